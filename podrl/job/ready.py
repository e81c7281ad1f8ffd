"""Checks, before a model is loaded, that a job's files and code exist, and that the code can read the job's records."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from podrl.cluster.reward_model import own_tokenizer
from podrl.cluster.teacher import tokenizer_of
from podrl.cluster.worker import ends_of_samples
from podrl.config import named, near, plural
from podrl.data import sources
from podrl.data.config import is_generated
from podrl.data.dialogue import Dialogue
from podrl.data.mixture import OpenedSource, split
from podrl.data.pipeline import PartRenderer
from podrl.data.shape import ANSWER, QUESTION
from podrl.data.template import TextPart
from podrl.data.tokenizer import Tokenizer, foreign
from podrl.environments import dr_tulu
from podrl.environments.config import is_own
from podrl.environments.journal import Journal, Records
from podrl.environments.protocol import FULL, Task, Turn
from podrl.environments.workers import EnvironmentFailure, EpisodeEnd, EpisodeObservation, Episodes
from podrl.job.config import SCRATCH, Job
from podrl.job.evaluation import held_out, open_set
from podrl.job.weights import model_of
from podrl.learner.run_environments import environment_config
from podrl.mappings import JournalEntry
from podrl.mesh.build import AXES, EXPERT, parse_mesh
from podrl.models import orbax_files
from podrl.models.hf_config import read_config
from podrl.models.lora import check_lora
from podrl.models.moe import check_balance, check_mesh
from podrl.models.pretrained import check_positions, check_vocab
from podrl.models.scalar import check_head
from podrl.models.tensor_files import scan_directory
from podrl.rewards.compose import EPISODE_FIELDS, Rewards
from podrl.rollout.worker import check_eos
from podrl.rundir.gauges import read_plan
from podrl.rundir.sinks import check_installed
from podrl.runtime.roles import ROLLOUT, TRAINER
from podrl.runtime.service import ServiceError
from podrl.storage import hub, storage
from podrl.workers.user_objects import in_one_line

_log = logging.getLogger("podrl.job")
_LOOK = 256  # number of records of a source whose fields are checked
# Number of records of each source that are rendered as for training: at the start of a run, and in a dry run. To render
# a conversation of six turns takes 10 ms, a very long one a second.
_FEW, _MANY = 32, 10_000
# The answer of the model, the most turns, and the longest time of an episode in which an environment is tried, seconds.
_ANSWER, _MOST_TURNS, _TRIAL_S = "an answer", 8, 5.0


def check_models(job: Job, keys: Collection[str]) -> None:
    """Refuses directories of models without a configuration or weights that podrl reads.

    Args:
      job: the job.
      keys: keys of the models that this process loads: 'model.path', 'model.reference', 'model.teachers',
        'model.critic', 'reward.model'.

    Raises:
      ValueError: a directory cannot be used; the message names the key, and what is missing or damaged. Or a mesh
        spreads experts over devices, and the trained model has no experts, or the devices would get unequal numbers of
        them.
    """
    models = {"model.path": job.model.path, "model.reference": job.model.reference}
    models |= {"model.critic": job.model.critic, "reward.model": job.reward.model}
    teachers = [("model.teachers", teacher.path) for teacher in job.model.teachers]
    roles = job.roles
    own = {"model.critic": ("critic", roles.critic), "reward.model": ("reward", roles.reward)}
    own |= {"model.teachers": ("teacher", roles.teacher)}
    for key, path in [*models.items(), *teachers]:
        if key not in keys or not path or path == SCRATCH:
            continue
        directory = storage.locate(hub.local(path))
        if not directory.is_dir():
            raise ValueError(f"{key}={path!r} is not a directory: give a Hugging Face directory.")
        if storage.is_remote(directory):  # a look at each file would be a request to the bucket
            continue
        with named(key, path):
            model = read_config(directory)
            if orbax_files.find_checkpoint(directory) is None:
                scan_directory(directory)
        if key in own and own[key][1].mesh not in (TRAINER, ROLLOUT):
            check_mesh(model, own[key][1].mesh, key=f"roles.{own[key][0]}.mesh")
    for key, mesh in (("roles.trainer.mesh", roles.trainer.mesh), ("roles.rollout.mesh", roles.rollout.mesh)):
        if "model.path" in keys and parse_mesh(mesh, key=key)[AXES.index(EXPERT)] != 1:
            check_mesh(model_of(job), mesh, key=key)


def check_fit(job: Job, tokenizer: Tokenizer) -> None:
    """Checks that tokenizer, adapters, prompt length and end tokens fit the trained model, and checks other models.

    Every other model must have embeddings for all ids that it will read, and the reward model must have a head. Warns
    of a model that has another tokenizer and will read the policy's ids.

    Raises:
      ValueError: a tokenizer, a model or a setting does not fit; the message names its key.
    """
    model = model_of(job)
    with named("model.path", job.model.path):
        check_vocab(model, tokenizer.vocab_size)
    check_lora(model)
    check_balance(model, job.trainer.balance_coef)
    own = job.tokenizer and job.model.path not in ("", SCRATCH)
    if own and (warning := foreign(tokenizer.directory, job.model.directory)):
        _log.warning("%s Leave out tokenizer=%s unless this is meant.", warning, job.tokenizer)
    if not job.kind.scores:
        check_positions(model, job.rollout.max_prompt_length, 0)  # the cluster warns of long samples
        check_eos(ends_of_samples(job.rollout, tokenizer)[1], model)
    scorer = storage.locate(hub.local(job.reward.model)) if job.reward.model else None
    if scorer is not None and not storage.is_remote(scorer) and scorer.is_dir():  # hosts that train need not have it
        with named("reward.model", job.reward.model):
            check_head(scorer)
    teachers = [("model.teachers", teacher.path) for teacher in job.model.teachers]
    others = [("model.reference", job.model.reference), ("model.critic", job.model.critic), *teachers]
    for key, path in [*others, ("reward.model", job.reward.model)]:
        directory = hub.local(path)
        if path and storage.locate(directory).is_dir():
            with named(key, path):
                _check_tokens(key, directory, tokenizer)


def _check_tokens(key: str, directory: str, policy: Tokenizer) -> None:
    """Checks that a model other than the policy has embeddings for the ids of its tokenizer, else for the policy's."""
    own = None
    if key == "model.teachers":
        own = tokenizer_of(directory, policy)
    elif key == "reward.model":
        own = own_tokenizer(directory, policy)
    elif warning := foreign(policy.directory, directory):
        _log.warning("%s Give a %s with the policy's tokenizer unless this is meant.", warning, key)
    check_vocab(read_config(directory), (own or policy).vocab_size)


def check_rewards(job: Job, rewards: Rewards, tokenizer: Tokenizer) -> None:
    """Refuses records that the job's reward functions or its chat template cannot use.

    Also refuses a curriculum that chooses by a reward function that the job does not have.

    Args:
      job: a job that samples.
      rewards: the job's reward functions, loaded.
      tokenizer: tokenizer that renders the first records of every source.

    Raises:
      ValueError: a record cannot be used; the message names the record, and the function or the template. Or
        data.curriculum chooses by a function that the job does not have.
    """
    if job.data.curriculum.used:
        job.data.curriculum.row(rewards.names)
    episode_fields = dict.fromkeys(EPISODE_FIELDS if job.env.used else (), "")
    opened = split(job.data)
    rewards.check_answers(opened.unanswered)
    shown = [(part, [(at, episode_fields | fields) for at, fields in _shown(part, tokenizer)]) for part in opened.parts]
    everywhere = set[str]().union(*(fields for _, records in shown for _, fields in records))
    for part, records in shown:
        rewards.check_fields(records, part.fields.get("reward_fns", ()), everywhere)
    sets: list[tuple[OpenedSource, list[tuple[str, dict[str, Any]]]]] = []
    for one in job.eval.sets:
        opened = split(one.data(job.data), key="eval.sets")
        rewards.check_answers(opened.unanswered)
        for part in opened.parts:
            records = [(at, episode_fields | fields) for at, fields in _shown(part, tokenizer)]
            own = set[str]().union(*(fields for _, fields in records))
            rewards.check_fields(records, part.fields.get("reward_fns", ()), own)
            sets.append((part, records))
    rewards.warn_of_absent(everywhere.union(*(fields for _, records in sets for _, fields in records)))
    # In a mixture, all records of a source carry the name of the same data set.
    whole = all(len(part.train) <= _LOOK or job.reward.dataset_field in part.fields for part, _ in (*shown, *sets))
    trained, others = ([record for _, records in parts for record in records] for parts in (shown, sets))
    rewards.check_scored(trained, others, whole=whole)


def check_records(job: Job, tokenizer: Tokenizer, most: int = _FEW) -> None:
    """Renders the first `most` records of every source as for training, and the held-out records as for evaluation.

    Warns about records that are too long, and if no record is held out although eval.problems asks for some.

    Raises:
      ValueError: a record cannot be rendered, for example because the chat template does not write a turn; the message
        names the place of the record. Or no record has the field that data.question_field or data.answer_field names.
    """
    _check_field_names(job)
    in_files = any(not is_generated(one.path) for one in job.data.singles())
    job.kind.stream(job, tokenizer).look(most if in_files else _FEW)
    held_out(job, tokenizer)
    for one in job.eval.sets:
        open_set(one, tokenizer, job)


def _check_field_names(job: Job) -> None:
    """Refuses a field name that the user chose if no record has it: other fields would silently take its place."""
    opened = split(job.data, job.kind.form)
    read: list[tuple[Any, Any]] = [(part.config, part.train) for part in opened.parts]
    # Held-out records are searched too: sometimes only they have a field, such as the answers in an evaluation
    # of chat records.
    read += [] if opened.evaluation is None else [(job.data, opened.evaluation)]
    for key, usual in (("question_field", QUESTION), ("answer_field", ANSWER)):
        for name in dict.fromkeys(getattr(config, key) for config, _ in read):
            of_name = [source for config, source in read if getattr(config, key) == name != usual]
            records = [source[i] for source in of_name for i in range(min(len(source), _LOOK))]
            known = [record for record in records if isinstance(record, Mapping)]
            if known and not any(name in record for record in known):
                raise ValueError(
                    f"data.{key}={name!r}: none of the first {plural(len(known), 'record')} has this field. The first "
                    f"record has {', '.join(known[0])}.{near(name, known[0])}"
                )


def check_environments(job: Job, *, secrets: bool, tokenizer: Tokenizer | None = None) -> None:
    """Loads the code of the job's environments and Python tools, and finds the commands of its program and servers.

    Servers are not started.

    Args:
      job: the job.
      secrets: True if this process must have the environment variables that servers need; the machine of a dry run may
        lack them.
      tokenizer: tokenizer of the prompts with which an episode of each of the user's environments is tried; None tries
        none.

    Raises:
      ValueError: an environment, tool, command or variable is missing or cannot be loaded; the message names its key.
        Or the trial of an environment shows that its code is wrong.
    """
    env = environment_config(job.env)
    for server in env.servers:
        server.check_command()
        if secrets:
            server.secrets()
    # The names of a server's tools are known only once the server has been asked.
    tools = tuple(tool for tool in env.tools if not (env.mcp and tool in dr_tulu.TOOLS))
    if tools or env.agent or any(map(is_own, env.choices)):
        named = {"environment": env.environment if tools or env.agent else next(filter(is_own, env.choices))}
        named |= {"max_calls_per_tool": {}, "arguments": {}} if env.mcp else {}
        local = dataclasses.replace(env, tools=tools, mcp=(), deadline_s=min(env.deadline_s, _TRIAL_S), **named)
        # A trial that fails ends its worker processes, so each environment is tried in processes of its own.
        for trial in _trials(job, tokenizer) if tokenizer is not None else [None]:
            # A user's environment may name servers of its own, and the machine of a dry run may not reach them.
            with (
                contextlib.suppress(ServiceError, _OutsideRequest),
                Episodes(local, job.reward.limits, journal=Journal(_NoAnswers())) as episodes,
            ):
                if trial is not None:
                    tried, task = trial
                    if tokenizer is not None and episodes.observes_first(task.fields.get("env")):
                        closing = Dialogue(tokenizer).closing
                        task = dataclasses.replace(task, prompt=task.prompt.removesuffix(closing))
                    _try_environment(episodes, tried, task)


def _try_environment(episodes: Episodes, tried: str, task: Task) -> None:
    """Plays an episode of a user's environment; warns of an error that another answer might not cause.

    Args:
      episodes: worker processes of this trial alone.
      tried: beginning of messages, with the setting that names the environment and the place of the record.
      task: the record's prompt and fields.

    Raises:
      ValueError: the code of the environment is wrong, whatever the model answers.
    """
    try:
        turns, reason = _play(episodes, task)
    except EnvironmentFailure as failure:
        returned = not failure.why or failure.why.startswith("run returned")
        what = f"{tried} {'' if returned else 'it raised '}{in_one_line(failure.why or str(failure))}"
        if failure.certain:
            raise ValueError(what) from None
        _log.warning("%s. Such an error ends a run, and a model's answers may be nonsense, too.", what)
        return
    if reason == "deadline":
        _log.warning("%s it was given up, because its own code took over %g s.", tried, _TRIAL_S)
    elif not turns:
        _log.warning("%s the episode ended before it asked the model. Is an `await` missing?", tried)


class _OutsideRequest(Exception):  # noqa: N818 - ends a trial
    """An environment that is only tried asked for something outside its own code."""


class _NoAnswers:
    """A store of a journal that gives no answers, and does not let them be made."""

    async def read(self, name: str) -> Records:
        raise _OutsideRequest

    async def add(self, name: str, record: JournalEntry) -> None:
        raise _OutsideRequest


def _trials(job: Job, tokenizer: Tokenizer) -> list[tuple[str, Task] | None]:
    """Lists the trials of the user's environments, each on the first record that it plays; [None] if there are none.

    Each is (beginning of messages, task), see `_try_environment`.
    """
    trials: dict[str, tuple[str, Task] | None] = {}
    first, *others = job.env.choices
    for part in split(job.data).parts:
        for place, prompt, fields in _rendered(part, tokenizer):
            name = fields["env"] if fields.get("env") in others else first
            if is_own(name) and name not in trials:
                setting = f"env.environment={name!r}" if name == first else f"env.others: {name!r}"
                trials[name] = (
                    f"{setting}, tried on {place} with the answer {_ANSWER!r}:",
                    Task(prompt.text, fields),
                )
    return [*trials.values()] or [None]


def _play(episodes: Episodes, task: Task) -> tuple[int, str]:
    """Plays an episode in which the model always answers the same: (turns that were asked for, reason of its end)."""
    number, turns = 0, 0
    episodes.start(number, task, recorded=False)
    while True:
        for event in episodes.poll(1.0):
            if isinstance(event, EpisodeEnd):
                return turns, event.reason
            if isinstance(event, EpisodeObservation):
                turns += 1
                episodes.turn(number, Turn(_ANSWER) if turns <= _MOST_TURNS else Turn("", stop=FULL))
                if turns > 2 * _MOST_TURNS:  # `run` catches Ended
                    return turns, ""


def check_all(job: Job) -> None:
    """Makes all checks of a start and further ones, for a dry run. Raises ValueError."""
    check_models(job, ("model.path", "model.reference", "model.teachers", "model.critic", "reward.model"))
    read_plan(job.log.plan)
    check_installed(job.log.to)
    tokenizer = job.model.open_tokenizer(job.tokenizer)
    check_environments(job, secrets=False, tokenizer=tokenizer)
    check_fit(job, tokenizer)
    check_records(job, tokenizer, _MANY)
    if not job.kind.offline:
        others = {"environment": job.env.reward_weight} if job.env.used else {}
        with Rewards(job.reward, others) as rewards:
            check_rewards(job, rewards, tokenizer)
            for part in () if job.env.used else split(job.data).parts:
                for place, fields in _shown(part, tokenizer)[:1]:
                    rewards.try_own(str(fields.get("question", "")), place, fields)


def _shown(part: OpenedSource, tokenizer: Tokenizer) -> list[tuple[str, dict[str, Any]]]:
    """Returns places and fields of the first records of a source, as reward functions get them."""
    shown = [(place, fields) for place, _, fields in _rendered(part, tokenizer)]
    for where, fields in shown:
        sources.check_json(fields, where)
    return shown


def _rendered(part: OpenedSource, tokenizer: Tokenizer) -> Iterator[tuple[str, TextPart, dict[str, Any]]]:
    """Renders the first records of a source: (place, prompt, fields)."""
    source: Any = part.train
    place = (lambda i: f"{part.config.path} record {i}") if is_generated(part.config.path) else source.place
    rendered = itertools.islice(sources.make_all(source, PartRenderer(part, tokenizer)), _LOOK)
    for i, (prompt, fields) in enumerate(rendered):
        yield place(i), prompt, dict(fields)
