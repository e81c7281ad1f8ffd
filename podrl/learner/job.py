"""From a configuration mapping to a finished run: builds the parts, trains, writes the summary."""

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podrl.algorithms.presets import preset
from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.pull_link import PullLink
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import build, defaults, merge
from podrl.data.pipeline import DataConfig, PromptStream, held_out_prompts, longest_prompt
from podrl.data.tokenizer import Tokenizer
from podrl.learner import describe, ppo_config, summary
from podrl.learner.console import make_console
from podrl.learner.evaluate import AccuracyEvaluator, EvalConfig
from podrl.learner.grpo import GRPOLearner
from podrl.learner.grpo_config import GRPOConfig, preset_fields
from podrl.learner.placement import Meshes, RolesConfig, meshes
from podrl.learner.ppo import PPOLearner
from podrl.learner.ppo_config import PPOConfig
from podrl.learner.run import Run
from podrl.learner.settings import AlgorithmConfig
from podrl.learner.setup import ModelSource
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.rewards.reference import accuracies
from podrl.rollout.config import RolloutConfig
from podrl.runtime import storage
from podrl.runtime.checkpoint import CheckpointConfig
from podrl.runtime.metrics import LogConfig
from podrl.runtime.pod import Pod
from podrl.runtime.roles import ROLLOUT, TRAINER
from podrl.runtime.storage import StorageError, is_remote
from podrl.runtime.watchdog import EXIT_DONE, EXIT_PREEMPTED
from podrl.trainer.config import RLTrainingConfig
from podrl.types import Prompts

SUPERVISED = ("sft", "dpo")  # algorithms that learn from given answers: podrl.learner.sft
_log = logging.getLogger("podrl.job")


@dataclasses.dataclass(frozen=True)
class RLJob:
    """Everything `--config` says about a reinforcement-learning job; of grpo and ppo the algorithm reads one."""

    trainer: RLTrainingConfig
    algorithm: str = "grpo"
    seed: int = 0
    fake_devices: int = 0
    compile_cache: str = "auto"
    model: ModelSource = ModelSource()
    data: DataConfig = DataConfig()
    grpo: GRPOConfig = GRPOConfig()
    ppo: PPOConfig = PPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    roles: RolesConfig = RolesConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def algo(self) -> GRPOConfig | PPOConfig:
        """The settings of the algorithm that is trained."""
        return self.ppo if section_of(self.algorithm) == "ppo" else self.grpo

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.algo.num_generations

    @property
    def updates_per_step(self) -> int:
        return self.algo.num_iterations * (self.samples_per_step // self.mini_batch_size)

    @property
    def mini_batch_size(self) -> int:
        return self.trainer.mini_batch_size or self.samples_per_step


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with every key there is: defaults, then the algorithm's preset, then `values`."""
    if values.get("algorithm") in SUPERVISED:
        from podrl.learner import sft

        return sft.complete(values)
    name = values.get("algorithm", "grpo")
    section = section_of(name)
    base, given = defaults(RLJob), dict(values)
    other = "grpo" if section == "ppo" else "ppo"
    del base[other]
    # A configuration written for the other kind of algorithm keeps its batch sizes and whatever both kinds have.
    common = {"num_generations", "num_iterations"} | {f.name for f in dataclasses.fields(AlgorithmConfig)}
    carried = {key: value for key, value in given.pop(other, {}).items() if key in common}
    fields = ppo_config.preset_fields(name) if section == "ppo" else preset_fields(name)
    return merge(merge(base, {section: merge(fields, carried)}), given)


def section_of(algorithm: str) -> str:
    """Which section of the configuration an algorithm reads: 'ppo' with a critic, else 'grpo'.

    Raises:
      ValueError: an unknown algorithm; says which there are.
    """
    return "ppo" if preset(algorithm).advantage_estimator().needs_critic else "grpo"


def parse(values: Mapping[str, Any]) -> RLJob:
    """The job a configuration describes, its arithmetic checked.

    Raises:
      ValueError: unknown or missing keys, or sizes that do not divide.
    """
    job = build(RLJob, _in_own_names(values))
    if job.samples_per_step % job.mini_batch_size:
        raise ValueError(
            f"Batch of {job.samples_per_step} sequences does not split into mini-batches of {job.mini_batch_size}: "
            f"rollout.prompts_per_step x {job.algo.section}.num_generations must be a multiple of "
            "trainer.mini_batch_size."
        )
    if job.trainer.max_steps is None:
        raise ValueError("config.trainer lacks max_steps: set --config.trainer.max_steps=...")
    _check_guests(job)
    return job


def _in_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The aggregation mode under podrl's name, which the algorithm's preset may have another framework's names for."""
    algorithm = values.get("algorithm", "grpo")
    section = section_of(algorithm)
    given = values.get(section, {}).get("loss_agg_mode")
    if not isinstance(given, str):
        return dict(values)
    mode = preset(algorithm).mode(given, key=f"{section}.loss_agg_mode")
    return merge(values, {section: {"loss_agg_mode": mode}})


def _check_guests(job: RLJob) -> None:
    """Raises ValueError where devices are set aside for a model that the job has not."""
    critic, reward = job.roles.critic.mesh, job.roles.reward.mesh
    if critic != TRAINER and job.algo.section != "ppo":
        raise ValueError(
            f"roles.critic.mesh={critic!r} sets devices aside for a critic, and algorithm={job.algorithm} has none: "
            f"say {TRAINER!r}, or algorithm=ppo."
        )
    if reward != ROLLOUT and not job.reward.model:
        raise ValueError(
            f"roles.reward.mesh={reward!r} sets devices aside for a reward model, and there is none: say {ROLLOUT!r}, "
            "or give reward.model=DIR."
        )


def with_prompt_length(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces rollout.max_prompt_length=0 by the longest prompt of the data, and checks that the model exists."""
    if not values["model"]["path"]:
        return dict(values)
    directory = build(ModelSource, values["model"], "config.model").directory
    if values["rollout"]["max_prompt_length"]:
        return dict(values)
    data = build(DataConfig, values["data"], "config.data")
    return merge(values, {"rollout": {"max_prompt_length": longest_prompt(data, Tokenizer(directory))}})


def dry_run(values: Mapping[str, Any], workdir: str) -> int:
    """Prints the resolved configuration, the role table and the batch arithmetic."""
    if values.get("algorithm") in SUPERVISED:
        from podrl.learner import sft

        return sft.dry_run(values, workdir)
    console = make_console()
    if not values["model"]["path"]:
        console.print("model.path is empty: the run itself needs --config.model.path=DIR.")
    job = parse(with_prompt_length(values))
    console.print(json.dumps(dataclasses.asdict(job), indent=2, default=str))
    describe.print_plan(console, job, meshes(job.roles), workdir)
    return EXIT_DONE


def build_cluster(job: RLJob, on: Meshes, link: PullLink | None = None) -> RLCluster:
    """The models of a job on its meshes."""
    roles = {Role.ACTOR: on.trainer, Role.REFERENCE: on.trainer, Role.ROLLOUT: on.rollout}
    config = ClusterConfig(
        role_to_mesh=roles | {Role.CRITIC: on.critic, Role.REWARD: on.reward},
        training_config=job.trainer,
        rollout_config=job.rollout,
    )
    return RLCluster(
        actor=job.model.directory,
        critic=job.model.critic or None,
        reward=job.reward.model or None,
        reference=job.model.reference or None,
        tokenizer=job.model.directory,
        cluster_config=config,
        lora=job.model.lora,
        updates_per_step=job.updates_per_step,
        seed=job.seed,
        link=link,
    )


def _pull_link(job: RLJob, pod: Pod | None) -> PullLink | None:
    """The weights' way between clusters, in topology split."""
    if pod is None or not pod.seat.disposable:
        return None
    return PullLink(pod, keep=2 + job.algo.max_staleness, deadline_s=4 * job.log.stall_s)


def run(values: Mapping[str, Any], workdir: str, *, command: str, pod: Pod | None = None) -> int:
    """Trains the job a configuration describes, or does this process's part of it; returns the exit code.

    Args:
      values: the configuration, as plain nested mappings.
      workdir: the run directory, local or gs://; a run that is there is resumed.
      command: how the process was started, for the message that says how to resume.
      pod: the job's processes where there are several; each calls this.
    """
    if values.get("algorithm") in SUPERVISED:
        from podrl.learner import sft

        if pod is not None:
            raise ValueError(
                f"algorithm={values['algorithm']} runs in one process: start it on one host, without --local_processes."
            )
        check_storage(workdir, values)
        return sft.run(values, workdir, command=command)
    check_storage(workdir, values)
    job = parse(with_prompt_length(values))
    started = time.monotonic()
    share = Share.of(pod)
    link = _pull_link(job, pod)
    on = meshes(job.roles, pod.seat.hosts if pod else None, split=link is not None, trains=link is None or link.trains)
    Rewards(job.reward).close()  # a misspelt reward function is told before models are loaded and compiled
    with _open_run(job, workdir, pod) as current:
        describe.print_plan(current.console, job, on, workdir)
        with current.watchdog.stage("start-up"):
            cluster = build_cluster(job, on, link)
            limit = job.rollout.max_prompt_length
            stream = PromptStream.from_config(
                job.data,
                cluster.tokenizer,
                prompts_per_step=job.rollout.prompts_per_step * job.algo.prompt_batches,
                max_prompt_length=limit,
                shard_index=share.index,
                shard_count=share.count,
            )
            if pod is None:
                cluster.warm_up(cluster.sync_weights(0, in_place=True))
            elif cluster.generates:  # the weights come when everybody knows from which step
                cluster.warm_up()
        evaluator = make_evaluator(cluster, job.data, job.eval, limit, share)
        metric_fns = [answer_accuracy] if job.eval.problems else []
        make: Any = PPOLearner if job.algo.section == "ppo" else GRPOLearner
        learner = make(cluster, job.algo, metric_fns=metric_fns, reward_config=job.reward, pod=pod)
        step = learner.train(stream, evaluator=evaluator, run=current)
        if not current.leads:
            return EXIT_DONE if step == job.trainer.max_steps else EXIT_PREEMPTED
        facts = {"seed": job.seed, "devices": describe.device_line(), "wall_s": round(time.monotonic() - started, 1)}
        return finish(current, step, job.trainer.max_steps or step, facts, command)


def check_storage(workdir: str, values: Mapping[str, Any]) -> None:
    """Asks every bucket the job will use, before anything large is loaded; errors as in `storage.check`."""
    storage.check(workdir, "--workdir", writes=True)
    for place in ("data.path", "data.eval_path", "model.path", "model.reference", "model.critic", "reward.model"):
        group, _, key = place.partition(".")
        storage.check(values.get(group, {}).get(key) or "", place)


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of every batch of prompts this process generates for."""

    index: int = 0
    count: int = 1

    @staticmethod
    def of(pod: Pod | None) -> "Share":
        """A rollout host's part; trainer hosts, which generate nothing, count as the first."""
        if pod is None:
            return Share()
        hosts, process = pod.seat.hosts, pod.seat.process
        return Share(hosts.rank(process) if process in hosts.rollout else 0, len(hosts.rollout))

    def cut(self, prompts: Prompts) -> Prompts:
        """This share of a batch, contiguous."""
        bounds = np.linspace(0, len(prompts.length_P), self.count + 1).astype(int)
        rows = slice(bounds[self.index], bounds[self.index + 1])
        return dataclasses.replace(
            prompts,
            tokens_PT=prompts.tokens_PT[rows],
            length_P=prompts.length_P[rows],
            index_P=prompts.index_P[rows],
            text=prompts.text[rows],
            fields={name: values[rows] for name, values in prompts.fields.items()},
        )


def _open_run(job: RLJob, workdir: str, pod: Pod | None) -> Run:
    """The run directory, as far as this process uses it: rollout hosts write nothing."""
    options: dict[str, Any] = {"log": job.log, "checkpoint": job.checkpoint, "config": dataclasses.asdict(job)}
    if pod is None:
        return Run(workdir, **options)
    trains = pod.seat.process in pod.seat.hosts.trainer
    savers = pod.seat.hosts.trainer if jax.process_count() > 1 and not pod.seat.disposable else ()
    return Run(workdir if trains else None, leads=pod.leads, savers=savers, **options)


def finish(current: Run, step: int, max_steps: int, facts: dict[str, Any], command: str) -> int:
    """Writes the summary, says where everything is, and picks the exit code.

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


def make_evaluator(
    cluster: RLCluster, data: DataConfig, config: EvalConfig, max_prompt_length: int, share: Share | None = None
) -> AccuracyEvaluator | None:
    """The evaluation on (this process's share of) held-out problems, or None when it is off or there are none."""
    if not config.problems:
        return None
    batches = held_out_prompts(data, cluster.tokenizer, count=config.problems, max_prompt_length=max_prompt_length)
    if not batches:
        _log.warning(
            "There is no evaluation: data.path=%s holds out no question that fits. Give data.eval_path, raise "
            "data.eval_fraction=%s, or set eval.problems=0.",
            data.path,
            data.eval_fraction,
        )
        return None
    if share is not None and share.count > 1:
        batches = [cut for batch in batches if len((cut := share.cut(batch)).length_P)]
    return AccuracyEvaluator(cluster, batches, config, accuracies)


def answer_accuracy(
    prompts: list[str], completions: list[str], rewards: list[float], *, answer: list[str] | None = None, **_: Any
) -> dict[str, float]:
    """accuracy/{answer,partial,format} of the training samples, where the data has answers."""
    del prompts, rewards
    if not answer:
        return {}
    scored = [accuracies(completion, str(truth)) for completion, truth in zip(completions, answer, strict=True)]
    return {f"accuracy/{name}": sum(s[name] for s in scored) / len(scored) for name in scored[0]}
