"""Runs a job from its configuration: loads the models, opens the data, trains, writes the summary."""

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.pull_link import PullLink
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import build
from podrl.data.chat import Tools
from podrl.data.pipeline import has_format, held_out_prompts
from podrl.data.tokenizer import Tokenizer
from podrl.environments.config import EnvironmentConfig
from podrl.job import describe
from podrl.job.config import SCRATCH, Job, ScratchModel, Share, parse, unset, with_prompt_length
from podrl.job.placement import Meshes, meshes
from podrl.learner.evaluate import Evaluator
from podrl.learner.learner import GRPOLearner, PPOLearner, learn_answers
from podrl.learner.playing import REWARD_NAME, asks_template, environment_config, offered, playing
from podrl.models import decoder
from podrl.models.config import gemma2_config
from podrl.models.pretrained import Decoder
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.rewards.reference import accuracies
from podrl.rundir import summary
from podrl.rundir.console import make_console
from podrl.rundir.run import Run
from podrl.runtime import storage
from podrl.runtime.message import Message
from podrl.runtime.metrics import LogConfig
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.roles import Hosts
from podrl.runtime.storage import StorageError, is_remote
from podrl.runtime.watchdog import EXIT_DONE, EXIT_PREEMPTED

_log = logging.getLogger("podrl.job")


def dry_run(values: Mapping[str, Any], workdir: str) -> int:
    """Prints the resolved configuration, the role table and the batch arithmetic."""
    console = make_console()
    if not values["model"]["path"]:
        console.print("model.path is empty: the run itself needs --config.model.path=DIR.")
    sized = values["rollout"]["max_prompt_length"] or not values["model"]["path"]
    job = parse(with_prompt_length(values, () if sized else tools_of_prompts(values)))
    console.print(json.dumps(job.as_mapping(), indent=2, default=str))
    describe.print_plan(console, job, meshes(job.roles), workdir)
    return EXIT_DONE


def build_cluster(job: Job, on: Meshes, link: PullLink | None = None, tools: Tools = ()) -> RLCluster:
    """Loads the models of a job onto its meshes; `tools` are those that prompts name."""
    roles = {Role.ACTOR: on.trainer, Role.REFERENCE: on.trainer, Role.ROLLOUT: on.rollout}
    config = ClusterConfig(
        role_to_mesh=roles | {Role.CRITIC: on.critic, Role.REWARD: on.reward},
        training_config=job.trainer,
        rollout_config=job.rollout,
    )
    tokenizer = Tokenizer(job.model.tokenizer(job.tokenizer), tools=tools)
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
        updates_per_step=job.updates_per_step,
        seed=job.seed,
        link=link,
    )


def scratch_model(config: ScratchModel, vocab_size: int, mesh: Mesh, seed: int, *, here: bool = True) -> Decoder:
    """Makes a Gemma 2 decoder with random parameters in place on the mesh; only shapes if that is on other hosts."""
    model = gemma2_config(vocab_size=vocab_size, **dataclasses.asdict(config))
    abstract = decoder.abstract_params(model, mesh, jnp.dtype("float32"))
    if not here:
        return Decoder(model, abstract, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(functools.partial(decoder.init_params, model), out_shardings=shardings)
    return Decoder(model, make(jax.random.key(seed)), mesh)


def _pull_link(job: Job, pod: Pod | None) -> PullLink | None:
    """Opens the weight transfer between clusters, in topology split."""
    if pod is None or not pod.seat.disposable:
        return None
    return PullLink(pod, keep=2 + job.max_staleness, deadline_s=4 * job.log.stall_s)


def run(values: Mapping[str, Any], workdir: str, *, command: str, pod: Pod | None = None) -> int:
    """Trains the job a configuration describes, or does this process's part of it; returns the exit code.

    Args:
      values: the configuration, as plain nested mappings.
      workdir: the run directory, local or gs://; a run that is there is resumed.
      command: how the process was started, for the message that says how to resume.
      pod: the job's processes where there are several; each calls this.
    """
    check_storage(workdir, values)
    tools = tools_of_prompts(values, pod)
    job = parse(with_prompt_length(values, tools))
    _check_auxiliary(job, pod)
    started = time.monotonic()
    link = _pull_link(job, pod)
    on = meshes(job.roles, pod.seat.hosts if pod else None, split=link is not None, trains=link is None or link.trains)
    if not job.kind.given:
        others = {REWARD_NAME: job.env.reward_weight} if job.env.used else {}
        Rewards(job.reward, others).close()  # fail on a misspelt reward function before loading models
    with _open_run(job, workdir, pod) as current:
        describe.print_plan(current.console, job, on, workdir)
        step = _train(job, on, link, current, pod, tools)
        if not current.leads:
            return EXIT_DONE if step == job.max_steps else EXIT_PREEMPTED
        facts = {"seed": job.seed, "devices": describe.device_line(), "wall_s": round(time.monotonic() - started, 1)}
        return finish(current, step, job.max_steps, facts, command)


def tools_of_prompts(values: Mapping[str, Any], pod: Pod | None = None) -> Tools:
    """The tools that the job's prompts name: in a pod the leader asks for them, so that all processes have the same."""
    config = environment_config(build(EnvironmentConfig, values["env"], "config.env"))
    if not asks_template(config):
        return ()
    if pod is None or pod.leads:
        found = offered(config, build(RewardConfig, values.get("reward", {}), "config.reward").limits)
        tools = json.loads(json.dumps(found))
        if pod is not None:
            pod.channel.put("tools", Message({"tools": tools}))
        return tools
    return pod.get(LEADER, "tools", 4 * build(LogConfig, values["log"], "config.log").stall_s).value["tools"]


def _train(job: Job, on: Meshes, link: PullLink | None, current: Run, pod: Pod | None, tools: Tools) -> int:
    """Loads the models, opens the data, and runs the loop; returns the step reached."""
    share = Share.of(pod)
    with current.watchdog.stage("start-up"):
        cluster = build_cluster(job, on, link, tools)
        if job.kind.given:  # a rollout host only evaluates; the first evaluation compiles
            stream = job.kind.stream(job, cluster.tokenizer, share) if cluster.trains else None
        else:
            stream = job.kind.stream(job, cluster.tokenizer, share)
            if pod is None:
                cluster.warm_up(cluster.sync_weights(0, in_place=True))
            elif cluster.generates:  # the weights come when everybody knows from which step
                cluster.warm_up()
    evaluator = make_evaluator(cluster, job, share)
    if job.kind.given:
        shape = job.pack_shape(on.trainer)
        with playing(cluster, environment_config(job.env), job.reward.limits, current, pod):
            return learn_answers(job.kind.algorithm, job.algo, shape, cluster, stream, current, evaluator, pod)
    measured = job.eval.problems and job.has_accuracies
    metric_fns = [functools.partial(answer_accuracy, has_format=has_format(job.data))] if measured else []
    make: Any = PPOLearner if job.section == "ppo" else GRPOLearner
    learner = make(cluster, job.algo, metric_fns=metric_fns, reward_config=job.reward, pod=pod, environment=job.env)
    if evaluator is not None:
        evaluator.rewards = learner.rewards_of
    return learner.train(stream, evaluator=evaluator, run=current)


def check_storage(workdir: str, values: Mapping[str, Any]) -> None:
    """Asks every bucket the job will use, before anything large is loaded; errors as in `storage.check`."""
    storage.check(workdir, "--workdir", writes=True)
    for place in ("data.path", "data.eval_path", "model.path", "model.reference", "model.critic", "reward.model"):
        group, _, key = place.partition(".")
        named = values.get(group, {}).get(key)
        storage.check(named if isinstance(named, str) else "", place)


def _check_auxiliary(job: Job, pod: Pod | None) -> None:
    """Refuses a directory of an auxiliary model that this process will load and that is missing."""
    hosts, process = (pod.seat.hosts, pod.seat.process) if pod else (Hosts((0,), (0,)), 0)
    for key, directory, loaders in (
        ("model.reference", job.model.reference, hosts.trainer),
        ("model.critic", job.model.critic, hosts.trainer),
        ("reward.model", job.reward.model, hosts.rollout),
    ):
        if directory and process in loaders and not storage.locate(directory).is_dir():
            raise ValueError(f"{key}={directory!r} is not a directory: give a Hugging Face directory.")


def _open_run(job: Job, workdir: str, pod: Pod | None) -> Run:
    """Opens the run directory; rollout hosts write nothing."""
    options: dict[str, Any] = {"log": job.log, "checkpoint": job.checkpoint, "config": job.as_mapping()}
    options["defaults"] = unset(job.algorithm)
    if pod is None:
        return Run(workdir, **options)
    trains = pod.seat.process in pod.seat.hosts.trainer
    savers = pod.seat.hosts.trainer if jax.process_count() > 1 and not pod.seat.disposable else ()
    return Run(workdir if trains else None, leads=pod.leads, savers=savers, **options)


def finish(current: Run, step: int, max_steps: int, facts: dict[str, Any], command: str) -> int:
    """Writes the summary, prints where the files are, and returns the exit code.

    Raises:
      ValueError: the last step could not be saved.
      StorageError: the same, in a bucket.
    """
    assert current.workdir is not None
    if (saved := current.saved_step()) < step:
        reached = f"Step {step} was reached but could not be saved (see above); the newest complete checkpoint is of "
        if is_remote(current.place):
            raise StorageError(f"{reached}step {saved}. The same command goes on from there: {command}")
        raise ValueError(
            f"{reached}step {saved}. Make space in {current.place}, then the same command goes on from there: {command}"
        )
    if step < max_steps:
        current.push()
        current.console.print(
            f"Stopped after step {step} of {max_steps}; saved in {current.place}. Resume with: {command}"
        )
        return EXIT_PREEMPTED
    written = summary.write_summary(current.workdir, facts)
    current.push()
    summary.print_before_after(current.console, written)
    describe.print_files(current.console, current.workdir, current.place, written)
    return EXIT_DONE


def make_evaluator(cluster: RLCluster, job: Job, share: Share | None = None) -> Evaluator | None:
    """Builds the evaluation on (this process's share of) held-out records; None when it is off or there are none."""
    if not job.eval.problems:
        return None
    data, limit = job.data, job.rollout.max_prompt_length
    try:
        batches = held_out_prompts(data, cluster.tokenizer, count=job.eval.problems, max_prompt_length=limit)
    except ValueError as error:
        error.add_note(f"the evaluation reads it, which eval.problems={job.eval.problems} asks for and 0 leaves out")
        raise
    if not batches:
        _log.warning(
            "There is no evaluation: none of the records held out from data.path=%s fits rollout.max_prompt_length=%d. "
            "Give data.eval_path, raise data.eval_fraction=%s, or set eval.problems=0.",
            *(data.path, limit, data.eval_fraction),
        )
        return None
    if share is not None and share.count > 1:
        batches = [cut for batch in batches if len((cut := share.cut(batch)).length_P)]
    scorer = functools.partial(accuracies, has_format=has_format(data)) if job.has_accuracies else None
    return Evaluator(cluster, batches, job.eval, scorer=scorer)


def answer_accuracy(
    prompts: list[str],
    completions: list[str],
    rewards: list[float],
    *,
    has_format: bool = True,
    answer: list[str] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Computes accuracy/{answer,partial,format} of the training samples, where the data has answers and a format."""
    del prompts, rewards
    if not answer:
        return {}
    pairs = zip(completions, answer, strict=True)
    scored = [accuracies(completion, str(truth), has_format=has_format) for completion, truth in pairs]
    return {f"accuracy/{name}": sum(s[name] for s in scored) / len(scored) for name in scored[0]}
