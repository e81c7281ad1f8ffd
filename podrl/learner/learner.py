"""GRPOLearner and PPOLearner: choose the rollouts, the algorithm and the recorder of this process, and run the loop."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Elsewhere, SavedByRun, as_settings, known_arguments, plural, refused_arguments, require
from podrl.data.pipeline import PromptStream
from podrl.data.shape import from_batches
from podrl.data.template import own_words
from podrl.learner import loop, recorder
from podrl.learner.answers.supervised import AnswerReport
from podrl.learner.distillation import make_grpo
from podrl.learner.evaluate import EvalConfig, Evaluator
from podrl.learner.generation import Generator
from podrl.learner.instructions import instructions_for
from podrl.learner.loop import Schedule
from podrl.learner.no_updates import no_update_reasons, no_update_reasons_on_samples
from podrl.learner.ppo import PPO
from podrl.learner.recorder import HostRecorder, Recorder, StepReport
from podrl.learner.report import MetricFn, SampleReport
from podrl.learner.rollout_source import Workload, evaluate_alone, rollout_source
from podrl.learner.rollouts import OfflineBatches
from podrl.learner.run_environments import REWARD_NAME, environment_config, run_environments
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.learner.traced_algorithm import TracedAlgorithm
from podrl.mappings import ConfigValues, Record, TaskFields
from podrl.python_names import speaks_python
from podrl.rewards.compose import EPISODE_FIELDS, NamedRewards, RewardConfig, Rewards
from podrl.rundir.run import Run
from podrl.runtime.pod import Pod
from podrl.runtime.roles import EVAL
from podrl.storage.checkpoint import CheckpointConfig
from podrl.trainer.pack_shape import PackShape
from podrl.types import BatchError, Experience, Rollouts
from podrl.view.report import write_ending

# For the name of each argument of TRL's GRPOTrainer that podrl lacks, what to use instead.
_TRL_ARGUMENTS = {
    "model": "it is RLCluster(actor=...), and the cluster is the first argument of the learner.",
    "args": "its settings are fields of podrl.RLTrainingConfig, of podrl.RolloutConfig and of the second argument of "
    "the learner; docs/from-trl.md has their names.",
    "train_dataset": "give the records to learner.train(records).",
    "eval_dataset": "give the records to learner.train(records, eval_records).",
    "processing_class": "the cluster has the tokenizer: RLCluster(..., tokenizer=DIR).",
    "peft_config": "the cluster has the adapters: RLCluster(..., lora=podrl.LoraConfig(rank=..., alpha=...)).",
    "reward_processing_classes": "a reward model is read with its own tokenizer: RLCluster(..., reward=DIR).",
    "optimizers": "say RLTrainingConfig(actor_optimizer=...), an optax transformation.",
    "callbacks": "metric_fns are called every step; every step is in metrics.jsonl.",
    "roles": "the cluster places the models: podrl.ClusterConfig(role_to_mesh={podrl.Role.ACTOR: mesh, ...}).",
    "tools": "say environment=podrl.ToolEnvironment(...).",
    "environment_factory": "say environment='file.py:Name', or an EnvironmentConfig.",
}


class Trainable(loop.Algorithm, recorder.Controllers, Protocol):
    """An algorithm whose state is part of a checkpoint."""


@dataclasses.dataclass(frozen=True)
class TrainingParts:
    """The parts that train, in a process with devices of the trainer mesh.

    Attributes:
      algorithm: turns batches into updates.
      report: describes a step by metrics and records of samples, and checks the metrics.
      needed: function (step, batch) -> the samples that this process's devices train on; None if this process has all
        rollouts, so that it fetches none from other hosts.
      evaluate: function that scores the trained model on held-out data without generating samples; all trainer hosts
        call it. None if evaluations need samples, or if the job has no evaluations.
    """

    algorithm: Trainable
    report: StepReport
    needed: Callable[[int, Experience], np.ndarray] | None = None
    evaluate: recorder.Evaluate | None = None


class NoTraining:
    """An algorithm (podrl.learner.loop.Algorithm) that does nothing, for a rollout host, which does not train."""

    def score(self, step: int, experience: object) -> None:
        return None

    def rewards(self, experience: object, scores: object) -> tuple[None, Mapping[str, float]]:
        return None, {}

    def advantages(self, experience: object, scores: object, rewards: object) -> tuple[None, Mapping[str, float]]:
        return None, {}

    def pack(self, step: int, experience: object, scores: object, advantages: object) -> Sequence[object]:
        return ()

    def update(self, step: int, batches: Sequence[object]) -> Mapping[str, float]:
        return {}


def fit(
    cluster: RLCluster,
    stream: recorder.ResumableStream | None,
    run: Run,
    schedule: Schedule,
    workload: Workload,
    *,
    trained: TrainingParts | None,
    offline: bool,
    pod: Pod | None,
) -> int:
    """Runs the loop for this process; returns the step reached.

    Args:
      cluster: the models, or the parts of them that this process holds.
      stream: the data; None on a rollout host that reads no data.
      run: the run's files, checkpoints and signals; the caller is inside its `with` block.
      schedule: steps at which the loop saves, evaluates and stops, and the staleness.
      workload: samples and evaluations of the job.
      trained: the algorithm and its report; None on a rollout host.
      offline: True if the batches are answers from data; samples are then generated for evaluations only.
      pod: the job's processes; None if there is one process.

    Raises:
      BatchError: a reward function failed, or too many samples failed. `Recorder.rescue` first saves the finished
        steps if it can.
    """
    on_hosts = pod is not None and bool(pod.seat.hosts.eval)  # True if the job has evaluation hosts
    if pod is not None and pod.seat.hosts.role(pod.seat.process) == EVAL:
        return evaluate_alone(cluster, workload.evaluator, run, pod)
    if on_hosts and trained is None:
        workload = dataclasses.replace(workload, evaluator=None)
    source, stopping = rollout_source(cluster, stream, run, schedule, workload, trained, pod, offline=offline)
    rollouts = OfflineBatches(source) if offline else source
    evaluate = (trained and trained.evaluate) or (None if workload.evaluator is None else rollouts.evaluate)
    records: Any
    if trained is None:
        assert pod is not None
        records = HostRecorder(run, schedule, enter=source.enter, evaluate=evaluate, stopping=stopping)
    else:
        assert stream is not None
        records = Recorder(
            cluster,
            stream,
            run,
            schedule,
            report=trained.report,
            controllers=trained.algorithm,
            evaluate=evaluate,
            stopping=stopping,
            beside=source if on_hosts else None,
            curriculum=workload.curriculum,
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.spans.compiles())
        stack.callback(rollouts.close)
        stack.callback(records.close)
        try:
            return loop.train(rollouts, trained.algorithm if trained else NoTraining(), records, schedule)
        except BatchError:
            records.rescue()
            raise


def learn_answers(
    algorithm: Callable[..., Any],
    settings: Any,
    shape: PackShape,
    cluster: Any,
    stream: recorder.ResumableStream | None,
    run: Run,
    evaluator: Any,
    pod: Pod | None = None,
    held_out: Sequence[Any] = (),
) -> int:
    """Trains on answers from data until `training_config.max_steps`; returns the step reached.

    Args:
      algorithm: class of the algorithm: SFT, DPO, ORPO, KTO or RewardModelling.
      settings: settings of the algorithm.
      shape: shape of a packed batch.
      cluster: the models.
      stream: batches of answers; None on a rollout host.
      run: files, checkpoints and signals.
      evaluator: scores the policy on held-out prompts; None disables evaluation.
      pod: the job's processes, each of which calls this function; None if there is one process.
      held_out: batches of answers on which the algorithm evaluates the model without generating samples. If there are
        any, `evaluator` is not used.
    """
    training = cluster.training_config
    assert training.max_steps is not None, "the stream of answers has no end, so max_steps must be set"
    schedule = Schedule(
        max_steps=training.max_steps,
        save_every=run.checkpoint_config.every,
        eval_every=training.eval_every_n_steps,
    )
    trained = None
    if cluster.trains:
        own = algorithm(cluster, settings, shape)
        evaluate = own.evaluator(held_out) if held_out else None
        trained = TrainingParts(own, AnswerReport(own.watched()), evaluate=evaluate)
    with run:
        for text in no_update_reasons(training):
            run.console.print(f"Warning: {text}")
        return fit(cluster, stream, run, schedule, Workload(None, evaluator), trained=trained, offline=True, pod=pod)


class SampleLearner(SavedByRun):
    """Base class of GRPOLearner and PPOLearner: trains on samples that reward functions score."""

    evaluate = Elsewhere(
        "train(records, eval_records) evaluates before step 1, every eval_every_n_steps updates, and at the end."
    )
    can_enable_async_rollout = Elsewhere("batches are sampled ahead by max_staleness of the algorithm's settings.")
    should_sync_weights = Elsewhere("weights move after every step, unless trainer and rollout share them.")

    def __init__(
        self,
        algorithm: Callable[..., Any],
        rl_cluster: RLCluster,
        algo_config: GRPOConfig | PPOConfig,
        reward_fns: Callable | str | Sequence[Callable | str],
        metric_fns: Sequence[MetricFn] | None,
        data_shuffle_seed: int | None,
        reward_config: RewardConfig | ConfigValues | None,
        pod: Pod | None,
        environment: object,
    ):
        """Checks the settings. `algorithm` makes GRPO or PPO; the other arguments are as in GRPOLearner."""
        kind = PPOConfig if algorithm is PPO else GRPOConfig
        require(isinstance(rl_cluster, RLCluster), "rl_cluster", rl_cluster, "a podrl.RLCluster")
        require(isinstance(algo_config, kind), "The settings of the algorithm", algo_config, f"a podrl.{kind.__name__}")
        several = isinstance(reward_fns, Iterable) or callable(reward_fns)
        require(several, "reward_fns", reward_fns, "a function, a name, or a list of them")
        self._environment = environment_config(environment)
        rl_cluster.config.rollout().require(environment=self._environment.used)
        self._algorithm, self._pod = algorithm, pod
        self.cluster, self.config = rl_cluster, algo_config
        self._metric_fns = tuple(metric_fns or ())
        self._shuffle_seed = data_shuffle_seed
        settings = None if reward_config is None else as_settings(RewardConfig, reward_config, "reward_config")
        config = settings or (RewardConfig(fns=()) if self._environment.used else RewardConfig())
        fns = (reward_fns,) if callable(reward_fns) or isinstance(reward_fns, str) else tuple(reward_fns)
        config = dataclasses.replace(config, fns=fns) if fns else config
        config.check_weights()
        config.check_names("reward_fns" if fns else "RewardConfig.fns")
        if rl_cluster.reward_source and not config.model:
            config = dataclasses.replace(config, model=rl_cluster.reward_source)
        self._reward_config = config
        self._trained_to = 0  # number of steps trained without a run directory; if not 0, `train` refuses to begin
        self._generate: Generator | None = None  # set while `train` runs, if this process generates
        self._prompts = 0

    @property
    def rl_cluster(self) -> RLCluster:
        """The cluster, under the name that Tunix has for it."""
        return self.cluster

    @property
    def algo_config(self) -> GRPOConfig | PPOConfig:
        """The settings of the algorithm, under the name that Tunix has for them."""
        return self.config

    @speaks_python
    @refused_arguments({"skip_jit": "the update is always compiled; set JAX_DISABLE_JIT=1 to follow it step by step."})
    @known_arguments
    def train(
        self,
        train_ds: PromptStream | Iterable[str | Record],
        eval_ds: Iterable[str | Record] | None = None,
        *,
        prompts_per_step: int | None = None,
        evaluator: Any = None,
        run: Run | None = None,
        save_every: int | None = None,
        checkpoint: CheckpointConfig | ConfigValues | None = None,
    ) -> int:
        """Trains until `training_config.max_steps`; returns the step reached.

        Args:
          train_ds: the training data, in one of three forms: a stream of prompts; a list of prompts, each a text or a
            record, whose fields the reward functions receive by name; or a list of batches,
            `{'prompts': [...], 'field': [...]}`; a step takes `config.prompt_batches` of them, usually one.
          eval_ds: list of held-out prompts, or of batches of them, as in `train_ds`. Their rewards are measured every
            `training_config.eval_every_n_steps` updates, with greedy and with sampled completions. Prompts of a list
            `train_ds` that ask the same questions are left out of training; a stream is not checked.
          prompts_per_step: P, the number of prompts of a step, if `train_ds` is a list; by default the size of its
            batches, or RolloutConfig.prompts_per_step. A stream has its own number: it yields P times
            `config.prompt_batches` prompts at a time.
          evaluator: function (policy, step) -> (metrics, samples to show) that scores the policy; excludes `eval_ds`.
            To score with this learner's reward functions, pass a podrl.learner.evaluate.Evaluator made with
            `rewards=learner.rewards_of`.
          run: files, checkpoints and signals. By default `train` makes a run in
            training_config.checkpoint_root_directory, or a run without files if the directory is None. A run that
            `train` makes in a directory ends, after its last step, with summary.json, report.html, a table of the
            first and last evaluation, and a list of its files.
          save_every: number of steps between checkpoints; overrides `checkpoint.every`.
          checkpoint: settings of the checkpoints, a CheckpointConfig or a dict of its fields; excludes `run`.

        Raises:
          ValueError: arguments contradict each other, or do not have the forms described above; or an earlier call
            trained without files, so that this call cannot go on from the earlier one.
        """
        training = self.cluster.training_config
        if self._trained_to:
            raise ValueError(
                f"This learner has trained {plural(self._trained_to, 'step')} without files, and cannot go on: set "
                "training_config.checkpoint_root_directory, with which a call of train goes on where the last one "
                "ended (training_config.max_steps counts from the first step), or make a new cluster and learner."
            )
        if eval_ds is not None and evaluator is not None:
            raise ValueError("eval_ds and evaluator both say what is evaluated: give one of them.")
        eval_items, _ = from_batches([] if eval_ds is None else list(eval_ds))
        items: Sequence[str | Record] | None = None
        if not isinstance(train_ds, PromptStream):
            items, size = _items(train_ds, prompts_per_step)
            size = (size or self.cluster.config.rollout().prompts_per_step) * self.config.prompt_batches
            train_ds = self._listed(items, size, shuffle_seed=self._shuffle_seed, held_out=eval_items)
        held_out: Sequence[tuple[str, TaskFields]] = ()
        if eval_items:
            evaluator, held_out = self._evaluator(eval_items)
        prompts = train_ds.prompts_per_step // self.config.prompt_batches
        own = run is None
        if run is None:
            run = self._own_run(prompts, save_every, checkpoint)
        elif checkpoint is not None:
            raise ValueError("run and checkpoint both say when to save: give checkpoint to the run.")
        schedule = self._schedule(train_ds, run, save_every)
        of_run: Any = (self.cluster.config.rollout(), self._reward_config, self._environment)
        for text in no_update_reasons_on_samples(training, self.config, *of_run, steps=schedule.max_steps):
            run.console.print(f"Warning: {text}")
        if items is not None:
            self._print_about(items, run)
        elif eval_items:
            run.console.print("It was not checked whether the stream of prompts asks questions of eval_ds.")
        with run, contextlib.ExitStack() as stack:
            others = {REWARD_NAME: self._environment.reward_weight} if self._environment.used else {}
            stack.enter_context(
                run_environments(self.cluster, self._environment, self._reward_config.limits, run, self._pod)
            )
            if self._pod is None or not self.cluster.trains:
                rewards: Rewards | NamedRewards = stack.enter_context(Rewards(self._reward_config, others))
                rewards.check_answers(train_ds.unanswered)
                for prompts_read in filter(None, (train_ds.listed, held_out)):
                    self._check_fields(rewards, prompts_read)
                if train_ds.listed:
                    self._check_metric_fns(train_ds.listed)
                run.watchdog.wait_sources.append(rewards.describe_waits)
                self._generate = Generator(self.cluster, rewards, self.config, self._environment, spans=run.spans)
                self._prompts = prompts
                stack.callback(setattr, self, "_generate", None)
            else:  # rollout hosts score the samples
                rewards = NamedRewards(self._reward_config, others)
            if (curriculum := train_ds.curriculum) is not None:
                self.config.check_curriculum(self.cluster.config.rollout())
                curriculum.begin(lag=self.config.max_staleness, names=rewards.names)
            workload = Workload(
                self._generate,
                evaluator,
                prompts=prompts,
                replaced=self.config.num_generations if self.config.dynamic_sampling else 0,
                group_size=self.config.num_generations + int(self.config.estimator().needs_greedy),
                whole=self._whole(),
                curriculum=curriculum,
            )
            trained = self._trained(train_ds, rewards.names, run) if self.cluster.trains else None
            step = fit(self.cluster, train_ds, run, schedule, workload, trained=trained, offline=False, pod=self._pod)
            if own and run.leads and run.workdir is not None:
                if step == schedule.max_steps:
                    write_ending(run, {"seed": self.cluster.seed})
                else:
                    run.console.print(
                        f"Stopped after step {step} of {schedule.max_steps}; the newest checkpoint in {run.place} is "
                        f"of step {run.saved_step()}. The same script goes on from there."
                    )
            self._trained_to = 0 if run.place else step
            return step

    def _own_run(self, prompts: int, save_every: int | None, checkpoint: CheckpointConfig | ConfigValues | None) -> Run:
        """Makes the run of a call of `train` that was given none; `prompts` is the number of prompts of a step."""
        directory = self.cluster.training_config.checkpoint_root_directory
        saves = None if checkpoint is None else as_settings(CheckpointConfig, checkpoint, "checkpoint")
        if directory is None and not (saves is None and save_every is None):
            raise ValueError(
                "checkpoint and save_every say when to save, but there is no place for checkpoints: set "
                "RLTrainingConfig(checkpoint_root_directory=DIR)."
            )
        return Run(directory, config=self._settings(prompts), checkpoint=saves)

    def _print_about(self, items: Sequence[str | Record], run: Run) -> None:
        """Prints what precedes the questions of a list of prompts."""
        if before := instructions_for(self._reward_config.fns):
            run.console.print(
                f"Each question is preceded by {before!r}, because a reward function reads the tags that this text "
                "asks for."
            )
        templated = any(isinstance(item, Mapping) and not isinstance(item.get("prompt"), str) for item in items)
        if templated and (words := own_words(self.cluster.tokenizer)):
            run.console.print(f"The chat template itself writes {words!r} before a question that has no system turn.")

    def _listed(
        self,
        items: Sequence[str | Record],
        size: int,
        *,
        shuffle_seed: int | None = None,
        held_out: Sequence[str | Record] = (),
    ) -> PromptStream:
        limit = self.cluster.config.rollout().max_prompt_length
        return PromptStream.from_list(
            items,
            self.cluster.tokenizer,
            prompts_per_step=size,
            max_prompt_length=limit,
            shuffle_seed=shuffle_seed,
            system=instructions_for(self._reward_config.fns),
            held_out=held_out,
        )

    def _evaluator(self, items: Sequence[str | Record]) -> tuple[Evaluator, Sequence[tuple[str, TaskFields]]]:
        """Makes an evaluator that scores all held-out prompts with the run's reward functions.

        Returns:
          The evaluator; place and fields of each prompt.
        """
        stream, sampled = self._listed(items, len(items)), self.cluster.config.eval_sampling()
        evaluator = Evaluator(self.cluster, [next(stream)], EvalConfig(), rewards=self.rewards_of, sampled=sampled)
        return evaluator, [(f"Held-out {place[0].lower()}{place[1:]}", fields) for place, fields in stream.listed]

    def _check_fields(self, rewards: Rewards, records: Sequence[tuple[str, TaskFields]]) -> None:
        """Refuses records without a field that a reward function takes, and reward functions that podrl cannot call."""
        of_episodes = dict.fromkeys(EPISODE_FIELDS if self._environment.used else (), "")
        everywhere = set(of_episodes).union(*(fields for _, fields in records))
        by_functions: dict[tuple[str, ...], list[tuple[str, TaskFields]]] = {}
        for place, fields in records:
            own = tuple(fields.get("reward_fns") or ())
            by_functions.setdefault(own, []).append((place, {**of_episodes, **fields}))
        for own, some in by_functions.items():
            rewards.check_fields(some, own, everywhere)

    def _check_metric_fns(self, records: Sequence[tuple[str, TaskFields]]) -> None:
        """Refuses metric functions that cannot be called with the fields of the training records."""
        fields = dict.fromkeys(set[str]().union(*(fields for _, fields in records)))
        for fn in self._metric_fns:
            try:
                inspect.signature(fn).bind([], [], [], **fields)
            except ValueError:
                continue  # Python cannot tell the arguments of some built-in functions
            except TypeError as error:
                raise ValueError(
                    f"metric_fns: {getattr(fn, '__name__', fn)} must take prompts, completions and rewards, and the "
                    f"fields of the records by name ({', '.join(sorted(fields))}): {error}."
                ) from None

    @speaks_python
    def rewards_of(self, rollouts: Rollouts) -> dict[str, np.ndarray]:
        """Scores samples with the reward functions of the running training, in batches of the size of training batches.

        Returns:
          The rewards of all samples, (B,), by name: 'reward' is the reward of training, 'reward/NAME' the reward of one
          function. A sample without a reward has NaN.
        """
        assert self._generate is not None, "rewards_of works only while `train` runs, where samples are generated"
        prompts, samples = len(rollouts.prompts.length_P), len(rollouts.group_B)
        at_once = max(1, self._prompts * self.config.num_generations * prompts // max(samples, 1))
        return self._generate.judged(rollouts, at_once=at_once)

    def _schedule(self, stream: PromptStream, run: Run, save_every: int | None) -> Schedule:
        training, prompts = self.cluster.training_config, stream.prompts_per_step // self.config.prompt_batches
        updates = self.config.num_iterations * max(prompts // (training.mini_batch_size or prompts), 1)
        self.config.check_clock(self.cluster.config.rollout(), self._environment.calls_per_window)
        return Schedule(
            max_steps=training.steps(updates) or stream.steps_per_epoch,
            max_staleness=self.config.max_staleness,
            save_every=run.checkpoint_config.every if save_every is None else save_every,
            eval_every=training.eval_every_n_steps,
            updates_per_step=updates,
            section=self.config.section,
        )

    def _whole(self) -> bool:
        """True if a host must generate its share of a batch as a whole.

        Dynamic sampling needs the whole share to replace groups, and some reward functions get whole batches.
        """
        config = self._reward_config
        in_process = any(not isinstance(fn, str) for fn in config.fns)  # function objects are called with whole batches
        return self.config.dynamic_sampling or in_process or config.calls == "batch"

    def _settings(self, prompts_per_step: int) -> dict[str, Any]:
        """Returns the content of config.json for a run without a configuration file, with a configuration's keys."""
        section, cluster = self.config.section, self.cluster
        return {
            "algorithm": section,
            "seed": cluster.seed,
            "model": {**cluster.directories, "lora": dataclasses.asdict(cluster.model.lora)},
            "tokenizer": str(cluster.tokenizer.directory),
            "trainer": dataclasses.asdict(cluster.training_config),
            "rollout": dataclasses.asdict(cluster.config.rollout()) | {"prompts_per_step": prompts_per_step},
            section: dataclasses.asdict(self.config),
            "reward": dataclasses.asdict(self._reward_config),
            "env": dataclasses.asdict(self._environment),
        }

    def _trained(self, stream: PromptStream, reward_names: Sequence[str], run: Run) -> TrainingParts:
        """Makes the algorithm and its report; called only on a process that trains."""
        samples = stream.prompts_per_step // self.config.prompt_batches * self.config.num_generations
        algorithm = self._algorithm(
            self.cluster,
            self.config,
            samples=samples,
            log=run.console.print,
            pieces=self._environment.branches,
        )
        report = SampleReport(
            self.config,
            reward_names=reward_names,
            metric_fns=self._metric_fns,
            watched=algorithm.watched(),
            skipped=lambda: stream.skipped,
            curriculum=stream.curriculum,
            groups=stream.groups,
        )
        traced = TracedAlgorithm(algorithm, run, reward_names, self.config, stream.curriculum)
        return TrainingParts(traced, report, traced.needed)


class GRPOLearner(SampleLearner):
    """Trains an RLCluster's actor with a GRPOConfig and reward functions."""

    @speaks_python
    @refused_arguments(_TRL_ARGUMENTS)
    @known_arguments
    def __init__(
        self,
        rl_cluster: RLCluster,
        algo_config: GRPOConfig,
        reward_fns: Callable | str | Sequence[Callable | str] = (),
        metric_fns: Sequence[MetricFn] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        reward_config: RewardConfig | ConfigValues | None = None,
        pod: Pod | None = None,
        environment: object = None,
    ):
        """Stores the settings; `train` starts the run.

        Args:
          rl_cluster: the models.
          algo_config: settings of the algorithm.
          reward_fns: functions `(prompts, completions, **fields) -> list[float]`, or their names.
          metric_fns: functions `(prompts, completions, rewards, **fields) -> {name: value}`, called every step.
          data_shuffle_seed: seed that shuffles the prompts if `train` gets a list; None keeps the order of the list.
          reward_config: weights, deadlines and workers of rewards, a RewardConfig or a dict of its fields. If both
            `reward_config` and `reward_fns` name functions, `reward_fns` counts.
          pod: the job's processes, each of which makes a learner and calls `train`; None if there is one process.
          environment: environment of all samples: 'file.py:Name', a ToolEnvironment, or an EnvironmentConfig; None for
            no environment. Without `reward_fns` and `reward_config`, the samples have only the environment's rewards.
        """
        more = (reward_config, pod, environment)
        super().__init__(make_grpo, rl_cluster, algo_config, reward_fns, metric_fns, data_shuffle_seed, *more)


class PPOLearner(SampleLearner):
    """Trains an RLCluster's actor and critic with a PPOConfig and reward functions."""

    @speaks_python
    @refused_arguments(_TRL_ARGUMENTS)
    @known_arguments
    def __init__(
        self,
        rl_cluster: RLCluster,
        ppo_config: PPOConfig,
        reward_fns: Callable | str | Sequence[Callable | str] = (),
        metric_fns: Sequence[MetricFn] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        reward_config: RewardConfig | ConfigValues | None = None,
        pod: Pod | None = None,
        environment: object = None,
    ):
        """Stores the settings, and makes the critic if the cluster has none; the arguments are as in GRPOLearner."""
        more = (reward_config, pod, environment)
        super().__init__(PPO, rl_cluster, ppo_config, reward_fns, metric_fns, data_shuffle_seed, *more)
        rl_cluster.make_critic()


def _items(train_ds: Iterable[str | Record], prompts_per_step: int | None) -> tuple[Sequence[str | Record], int | None]:
    """Returns the prompts of a list, and the size of its batches or else `prompts_per_step`.

    Raises:
      ValueError: `train_ds` is not a list or is empty, or its batches have another size than `prompts_per_step`.
    """
    several = isinstance(train_ds, Iterable) and not isinstance(train_ds, str)
    require(several, "train_ds", train_ds, "a list of records or batches of records; podrl.run reads files")
    items, size = from_batches(list(train_ds))
    if not items:
        raise ValueError(f"train_ds={train_ds!r:.80} is empty: it must have at least one prompt or record.")
    if size and prompts_per_step not in (None, size):
        raise ValueError(
            f"prompts_per_step={prompts_per_step} contradicts train_ds, whose batches have "
            f"{plural(size, 'prompt')} each: leave prompts_per_step out, or give a list of records."
        )
    return items, size or prompts_per_step
