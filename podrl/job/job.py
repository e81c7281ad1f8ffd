"""Runs a job from its configuration: loads the models, opens the data, trains, writes the summary."""

import contextlib
import functools
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.pull_link import PullLink
from podrl.cluster.replica import follow
from podrl.cluster.rl_cluster import RLCluster
from podrl.cluster.scorer import ScorerCluster
from podrl.config import build
from podrl.data.config import DataConfig
from podrl.data.mixture import split
from podrl.data.pipeline import has_format
from podrl.environments.config import EnvironmentConfig
from podrl.job import alike, describe
from podrl.job.config import SCRATCH, Job, ModelSource, ScratchModel, parse, unset, with_prompt_length
from podrl.job.evaluation import held_out, make_evaluator, unmeasured
from podrl.job.placement import Meshes, PlannedPod, meshes
from podrl.job.ready import check_all, check_environments, check_fit, check_models, check_records, check_rewards
from podrl.learner.evaluate import EvalConfig
from podrl.learner.learner import GRPOLearner, PPOLearner, learn_answers
from podrl.learner.run_environments import (
    REWARD_NAME,
    asks_template,
    environment_config,
    offered_tools,
    run_environments,
)
from podrl.mappings import ConfigValues, JsonObject, ToolSchema
from podrl.models import parameters
from podrl.models.pretrained import Decoder
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.rewards.reference import accuracies
from podrl.rundir import identity
from podrl.rundir.about import write_about
from podrl.rundir.console import make_console
from podrl.rundir.metrics import LogConfig
from podrl.rundir.profiler import Profiler, parse_steps
from podrl.rundir.run import Run, check_workdir
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.roles import ROLLOUT, TRAINER
from podrl.runtime.service import ServiceError
from podrl.runtime.watchdog import EXIT_DONE, EXIT_PREEMPTED, announce_if_long
from podrl.storage import hub, storage
from podrl.storage.storage import StorageError, is_remote
from podrl.view.report import write_ending

_log = logging.getLogger("podrl.job")


def dry_run(values: ConfigValues, workdir: str, pod: PlannedPod | None = None, *, all_settings: bool = False) -> int:
    """Prints the settings that differ from their defaults, the role table and the batch arithmetic; checks the job.

    Args:
      values: the configuration, as plain nested mappings.
      workdir: the run directory, local or gs://.
      pod: the processes of the job; None for one process.
      all_settings: True to print every setting, as JSON.

    Raises:
      ValueError: the run itself would be refused. An empty model.path is also refused, after everything is printed.
    """
    console = make_console()
    sized = values["rollout"]["max_prompt_length"] or not values["model"]["path"]
    job = parse(with_prompt_length(values, () if sized else tools_of_prompts(values)))
    mine, defaults = identity.plain(job.as_mapping()), identity.plain(unset(job.algorithm))
    if all_settings:
        console.print(json.dumps(mine, indent=2))
    else:
        console.print("Settings that differ from their defaults (all settings: --all_settings):")
        for key, _, value in identity.differences(defaults, mine, {}):
            console.print(f"  {key}={json.dumps(value, ensure_ascii=False)}")
    describe.print_plan(console, job, pod.meshes(job.roles) if pod else meshes(job.roles), workdir, pod, dry=True)
    check_workdir(workdir)
    if values["model"]["path"]:
        check_all(job)
        if pathlib.Path(workdir).is_dir() and not hub.names(values):  # a run's config.json adds commits to hub names
            for sentence in identity.compare(workdir, pathlib.Path(workdir), mine, defaults):
                console.print(sentence)
    else:
        raise ValueError(
            "model.path is empty: the run itself needs --config.model.path=DIR. The rest of the configuration is as "
            "printed above."
        )
    return EXIT_DONE


def build_cluster(job: Job, on: Meshes, link: PullLink | None = None, tools: Sequence[ToolSchema] = ()) -> RLCluster:
    """Loads the models of a job onto its meshes.

    Args:
      job: the job.
      on: meshes of all roles.
      link: transfer of weights to the other cluster under topology=split; None elsewhere.
      tools: tools that the chat template writes into prompts.
    """
    roles = {Role.ACTOR: on.trainer, Role.REFERENCE: on.trainer, Role.ROLLOUT: on.rollout}
    config = ClusterConfig(
        role_to_mesh=roles | {Role.CRITIC: on.critic, Role.REWARD: on.reward, Role.TEACHER: on.teacher},
        training_config=job.trainer,
        rollout_config=job.rollout,
    )
    tokenizer = job.model.open_tokenizer(job.tokenizer, tools)
    actor: Any = job.model.path
    if actor == SCRATCH:
        trains = (
            link.trains
            if link is not None
            else jax.process_index() in {d.process_index for d in on.trainer.devices.flat}
        )
        actor = scratch_model(job.scratch, tokenizer.vocab_size, on.trainer, job.seed, here=trains)
    else:
        actor = job.model.directory
    return RLCluster(
        actor=actor,
        critic=job.model.critic or None,
        reward=job.reward.model or None,
        reference=job.model.reference or None,
        tokenizer=tokenizer,
        cluster_config=config,
        lora=job.model.lora,
        seed=job.seed,
        link=link,
        teachers={teacher.path: teacher.sources for teacher in job.model.teachers},
    )


def build_scorer(job: Job, on: Meshes, trains: bool | None) -> ScorerCluster:
    """Loads the model of a job that trains a reward model.

    Args:
      job: the job.
      on: meshes of all roles.
      trains: under topology=split, True if this process trains; the meshes cannot tell, because a host then sees only
        its own cluster. None under any other topology: the actor's mesh then shows whether this process trains.
    """
    tokenizer = job.model.open_tokenizer(job.tokenizer)
    source: Any = None
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: on.trainer, Role.ROLLOUT: on.rollout},
        training_config=job.trainer,
        rollout_config=job.rollout,
    )
    here = config.roles_of(jax.process_index())[0] if trains is None else trains
    if here and job.model.path == SCRATCH:
        source = scratch_model(job.scratch, tokenizer.vocab_size, on.trainer, job.seed)
    elif here:
        source = job.model.directory
    return ScorerCluster(source, tokenizer, config, lora=job.model.lora, seed=job.seed, trains=trains)


def _train_scorer(job: Job, on: Meshes, link: PullLink | None, current: Run, pod: Pod | None) -> int:
    """Trains a reward model and evaluates it on held-out pairs; rollout hosts load no model and open no data."""
    if pod is not None and pod.seat.hosts.follows(pod.seat.process):
        return _follow(None, current, pod)
    with current.watchdog.stage("start-up"):
        cluster = build_scorer(job, on, None if link is None else link.trains)
        stream, eval_sets = None, ()
        if cluster.trains:
            stream, eval_sets = job.kind.stream(job, cluster.tokenizer), held_out(job, cluster.tokenizer)
    shape = job.pack_shape(on.trainer)
    step = learn_answers(job.kind.algorithm, job.algo, shape, cluster, stream, current, None, pod, eval_sets)
    _write_sources(current, job, {} if stream is None else stream.too_long)
    return step


def scratch_model(config: ScratchModel, vocab_size: int, mesh: Mesh, seed: int, *, here: bool = True) -> Decoder:
    """Makes a decoder with random parameters in place on the mesh; only shapes unless `here`.

    Args:
      config: sizes of the model.
      vocab_size: number of tokens in the vocabulary.
      mesh: mesh of the trainer.
      seed: seed of the parameters.
      here: True if the mesh has devices of this process.
    """
    model = config.model(vocab_size)
    abstract = parameters.abstract_params(model, mesh, jnp.dtype("float32"))
    if not here:
        return Decoder(model, abstract, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(functools.partial(parameters.init_params, model), out_shardings=shardings)
    return Decoder(model, make(jax.random.key(seed)), mesh)


def _pull_link(job: Job, pod: Pod | None) -> PullLink | None:
    """Opens the weight transfer between clusters, in topology split."""
    if pod is None or not pod.seat.disposable:
        return None
    return PullLink(pod, keep=job.kept_versions, deadline_s=4 * job.log.stall_s)


def run(
    values: ConfigValues,
    workdir: str,
    *,
    command: str,
    pod: Pod | None = None,
    profile: str = "",
    code: str = "",
) -> int:
    """Trains the job that a configuration describes, or does this process's part of the job; returns the exit code.

    Args:
      values: the configuration, as plain nested mappings.
      workdir: the run directory, local or gs://; if it holds a run, the run is resumed.
      command: command or Python call that started the job, for the message that says how to resume.
      pod: the job's processes, each of which calls this function; None if there is one process.
      profile: first and last step to profile, as in '120:125'; '' for none.
      code: URL of the user's code that this host has unpacked, with its SHA-256; '' if no code was sent.
    """
    steps = parse_steps(profile)
    check_storage(workdir, values)
    # This check comes first, because hosts with other settings may never send the messages that the code below awaits.
    if pod is not None:
        alike.check_settings(values, pod, 4 * build(LogConfig, values["log"], "config.log").stall_s)
    values = _pinned(values, workdir, pod)
    tools = tools_of_prompts(values, pod)
    log = make_console(quiet=pod is not None and not pod.leads).print
    with announce_if_long("Reading the configuration, and the data for its longest prompt", log):
        job = parse(with_prompt_length(values, tools))
    check_models(job, _loads(pod))
    with announce_if_long("Reading the files that the job names", log):
        files = alike.facts(job)
    if pod is not None:
        alike.check_files(files, pod, 4 * job.log.stall_s)
    link = _pull_link(job, pod)
    role = TRAINER if pod is None else pod.seat.hosts.role(pod.seat.process)
    on = meshes(job.roles, pod.seat.hosts if pod else None, split=link is not None, role=role)
    # Code that cannot be loaded, a record that cannot be rendered, or a misspelt reward fails before models are loaded.
    # If prompts name tools, tools_of_prompts has loaded the environments already.
    if _generates(pod) and not asks_template(environment_config(job.env)):
        with announce_if_long("Loading the environments and tools", log):
            check_environments(job, secrets=True)
    tokenizer = job.model.open_tokenizer(job.tokenizer, tools)
    check_fit(job, tokenizer)
    with announce_if_long("Checking the records of the data", log):
        if role == TRAINER:
            check_records(job, tokenizer)
    if not job.kind.offline:
        others = {REWARD_NAME: job.env.reward_weight} if job.env.used else {}
        with announce_if_long("Trying the reward functions", log), Rewards(job.reward, others) as rewards:
            check_rewards(job, rewards, tokenizer)
    with _open_run(job, workdir, pod, command) as current:
        current.profiler = Profiler(workdir, pod.name if pod else "trainer 0", steps)
        describe.print_plan(current.console, job, on, workdir, pod)
        if pod is not None and pod.leads and pod.seat.disposable:
            current.console.print(f"Further rollout hosts join by this command with --join={pod.channel.address}\n")
        _write_sources(current, job)
        if current.leads and current.workdir is not None:
            write_about(current.workdir, describe.about_job(job, on, pod, code))
            if changed := alike.changed_since(files, current.place, current.workdir):
                _log.warning("%s", changed)
        step = _train(job, on, link, current, pod, tools)
        if not current.leads:
            return EXIT_DONE if step == job.max_steps else EXIT_PREEMPTED
        facts = {"seed": job.seed, "devices": describe.device_line()}
        facts |= {"code": code} if code else {}
        return finish(current, step, job.max_steps, facts)


def _pinned(values: ConfigValues, workdir: str, pod: Pod | None) -> ConfigValues:
    """Adds commits to the names of the hub; in a pod the leader looks them up, so that all processes have the same."""
    if not hub.names(values):
        return values
    if pod is None or pod.leads:
        place = storage.absolute(workdir)
        values = hub.pinned(values, identity.read(place, place / "checkpoints") or {})
        if pod is not None:
            pod.channel.put("hub", Message({"names": hub.names(values)}))
        return values
    names = pod.get(LEADER, "hub", 4 * build(LogConfig, values["log"], "config.log").stall_s).value["names"]
    return hub.renamed(values, names)


def tools_of_prompts(values: ConfigValues, pod: Pod | None = None) -> Sequence[ToolSchema]:
    """Returns the tools that prompts name; in a pod the leader looks them up, so that all processes have the same."""
    config = environment_config(build(EnvironmentConfig, values["env"], "config.env"))
    if not asks_template(config):
        return ()
    if pod is None or pod.leads:
        found = offered_tools(config, build(RewardConfig, values.get("reward", {}), "config.reward").limits)
        tools = json.loads(json.dumps(found))
        if pod is not None:
            pod.channel.put("tools", Message({"tools": tools}))
        return tools
    return pod.get(LEADER, "tools", 4 * build(LogConfig, values["log"], "config.log").stall_s).value["tools"]


def _train(
    job: Job, on: Meshes, link: PullLink | None, current: Run, pod: Pod | None, tools: Sequence[ToolSchema]
) -> int:
    """Loads the models, opens the data, and runs the loop; returns the step reached."""
    if job.kind.scores:
        return _train_scorer(job, on, link, current, pod)
    with current.watchdog.stage("start-up"):
        cluster = build_cluster(job, on, link, tools)
        if job.kind.offline:  # a rollout host only evaluates; the first evaluation compiles
            stream = job.kind.stream(job, cluster.tokenizer) if cluster.trains else None
        else:
            stream = job.kind.stream(job, cluster.tokenizer)
            if pod is None:
                cluster.warm_up(cluster.sync_weights(0, in_place=True))
            elif cluster.generates:  # the weights come later, once all hosts know the step to start from
                cluster.warm_up()
    if pod is not None and pod.seat.hosts.follows(pod.seat.process):
        return _follow(cluster, current, pod)
    evaluator = make_evaluator(cluster, job)
    if job.kind.offline:
        shape = job.pack_shape(on.trainer)
        with run_environments(cluster, environment_config(job.env), job.reward.limits, current, pod):
            step = learn_answers(job.kind.algorithm, job.algo, shape, cluster, stream, current, evaluator, pod)
        _write_sources(current, job, {} if stream is None else stream.too_long)
        return step
    measured = job.eval.problems and not (unmeasured(job, job.data) or split(job.data).unanswered)
    metric_fns = [functools.partial(answer_accuracy, has_format=has_format(job.data))] if measured else []
    make: Any = PPOLearner if job.section == "ppo" else GRPOLearner
    learner = make(cluster, job.algo, metric_fns=metric_fns, reward_config=job.reward, pod=pod, environment=job.env)
    if evaluator is not None:
        evaluator.rewards = learner.rewards_of
    step = learner.train(stream, evaluator=evaluator, run=current)
    _write_sources(current, job, {} if stream is None else stream.too_long)
    return step


def _follow(cluster: RLCluster | None, current: Run, pod: Pod) -> int:
    """Repeats every call that the head of this process's replica makes; returns the step reached."""
    with current:
        return follow(cluster, pod, current, deadline_s=4 * current.log_config.stall_s)


def _write_sources(current: Run, job: Job, too_long: Mapping[str, int] | None = None) -> None:
    """Writes sources.json: counts of the records of each source of a mixture, by their use.

    Args:
      current: the run.
      job: the job.
      too_long: number of draws that were too long since step 0, by source; None before the run knows it.
    """
    if current.leads and current.workdir is not None and job.data.sources:
        rows = [dict(row) for row in split(job.data, job.kind.form).rows()]
        if too_long is not None:
            rows = [{**row, "too long": too_long.get(str(row["source"]), 0)} for row in rows]
        storage.write_whole(current.workdir / "sources.json", json.dumps(rows, indent=2) + "\n")


def check_storage(workdir: str, values: ConfigValues) -> None:
    """Checks that the buckets of the run directory, data and models can be used, before anything large is loaded.

    Raises:
      ValueError: `storage.check` refuses a path, or data, eval.sets or model.teachers have unknown or wrong keys.
      StorageError: the service of a bucket does not answer.
    """
    storage.check(workdir, "--workdir", writes=True)
    for place in ("data.path", "data.eval_path", "model.path", "model.reference", "model.critic", "reward.model"):
        group, _, key = place.partition(".")
        named = values.get(group, {}).get(key)
        storage.check(named if isinstance(named, str) else "", place)
    for teacher in build(ModelSource, values.get("model", {}), "config.model").teachers:
        storage.check(teacher.path, "model.teachers")
    for source in build(DataConfig, values.get("data", {}), "config.data").sources:
        storage.check(source.path, "data.sources")
    for one in build(EvalConfig, values.get("eval", {}), "config.eval").sets:
        storage.check(one.path, "eval.sets")


def _loads(pod: Pod | None) -> list[str]:
    """Lists the keys of the models whose weights this process reads."""
    if pod is None:
        return [key for keys in _LOADERS.values() for key in keys]
    trains = pod.seat.process in pod.seat.hosts.trainer
    return [*(_LOADERS[TRAINER] if trains else ()), *(_LOADERS[ROLLOUT] if _generates(pod) else ())]


def _generates(pod: Pod | None) -> bool:
    """Returns whether this process samples, in training or in evaluations."""
    return pod is None or pod.seat.process in (*pod.seat.hosts.rollout, *pod.seat.hosts.eval)


_LOADERS = {TRAINER: ("model.path", "model.reference", "model.teachers", "model.critic"), ROLLOUT: ("reward.model",)}


@contextlib.contextmanager
def _open_run(job: Job, workdir: str, pod: Pod | None, command: str) -> Iterator[Run]:
    """Opens the run directory for a `with` block; some errors of the block get a note on how to resume the run."""
    current = _make_run(job, workdir, pod)
    current.command = command
    if pod is not None:
        current.watchdog.wait_sources.append(pod.describe_waits)
        pod.last_words = current.how_to_resume
    try:
        with current:
            yield current
    # A channel or jax has lost a process, a service or a bucket is away, or the user pressed Ctrl-C.
    except (RuntimeError, ServiceError, StorageError, KeyboardInterrupt) as error:
        if words := current.how_to_resume():
            error.add_note(words)
        raise


def _make_run(job: Job, workdir: str, pod: Pod | None) -> Run:
    """Makes the run of this process; the run of a rollout host has no run directory."""
    options: dict[str, Any] = {"log": job.log, "checkpoint": job.checkpoint, "config": job.as_mapping()}
    options["defaults"] = unset(job.algorithm)
    if pod is None:
        return Run(workdir, **options)
    trains = pod.seat.process in pod.seat.hosts.trainer
    savers = pod.seat.hosts.trainer if jax.process_count() > 1 and not pod.seat.disposable else ()
    return Run(workdir if trains else None, leads=pod.leads, savers=savers, **options)


def finish(current: Run, step: int, max_steps: int, facts: JsonObject) -> int:
    """Writes and prints the end of a run, and returns the exit code.

    Raises:
      ValueError: the last step could not be saved.
      StorageError: the last step could not be saved in a bucket.
    """
    assert current.workdir is not None
    if (saved := current.saved_step()) < step:
        reached = f"Step {step} was reached but could not be saved (see above); the newest complete checkpoint is of "
        if is_remote(current.place):
            raise StorageError(f"{reached}step {saved}.")
        raise ValueError(
            f"{reached}step {saved}. Make space in {current.place}, then the same command, "
            f"{current.command}, goes on from there."
        )
    if step < max_steps:
        current.push()
        current.console.print(
            f"Stopped after step {step} of {max_steps}; saved in {current.place}. Resume with: {current.command}"
        )
        return EXIT_PREEMPTED
    write_ending(current, facts)
    return EXIT_DONE


def answer_accuracy(
    prompts: list[str],
    completions: list[str],
    rewards: list[float],
    *,
    has_format: bool = True,
    answer: list[object] | None = None,
    **_: object,
) -> dict[str, float]:
    """Computes accuracy/{answer,partial,format} of the training samples, as far as the data has answers and a format.

    Args:
      prompts: prompt of each sample; not read.
      completions: completion of each sample.
      rewards: reward of each sample; not read.
      has_format: True if the task asks for the exact format.
      answer: reference answer of each sample, a text or a list of accepted texts; None for data without answers.

    Returns:
      The mean of each accuracy over the samples; empty for data without answers.
    """
    del prompts, rewards
    if not answer:
        return {}
    pairs = zip(completions, answer, strict=True)
    scored = [accuracies(completion, truth, has_format=has_format) for completion, truth in pairs]
    return {f"accuracy/{name}": sum(s[name] for s in scored) / len(scored) for name in scored[0]}
