"""GRPO and its family: sample groups, score them, turn rewards into advantages, update the policy."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.mismatch import mismatch, pearson
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pipeline import PromptStream
from podrl.learner.generation import Generator, repeated
from podrl.learner.grpo_config import GRPOConfig
from podrl.learner.kl_control import LossKL, RewardKL
from podrl.learner.loop import InFlight, Schedule, train
from podrl.learner.mismatch_gate import MismatchGate
from podrl.learner.parts import Evaluator, Later, LearnerParts, gathered
from podrl.learner.ppo_config import PPOConfig
from podrl.learner.rollout_side import RolloutParts
from podrl.learner.run import Run
from podrl.learner.scoring import Scores, policy_scores
from podrl.learner.trainer_side import TrainerSide
from podrl.rewards.compose import NamedRewards, RewardConfig, RewardError, Rewards
from podrl.runtime.pod import Pod
from podrl.trainer import packing
from podrl.trainer.objective import TokenLoss
from podrl.trainer.state import local_rows
from podrl.types import STOP_LENGTH, Experience, Policy, TrainBatch

# metric_fn(prompts, completions, rewards, **fields) -> {name: value}
MetricFn = Callable[..., Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class CurrentAsOld:
    """A loss whose old policy is the current one: exact when a batch of fresh samples makes a single update."""

    loss: TokenLoss

    def __call__(self, logprob_BT, old_logprob_BT, *rest, kl_scale):
        del old_logprob_BT
        return self.loss(logprob_BT, jax.lax.stop_gradient(logprob_BT), *rest, kl_scale=kl_scale)


@dataclasses.dataclass(frozen=True)
class SamplerAsOld:
    """A loss whose old policy is the sampler; trainer and sampler are compared all the same, at the current weights."""

    loss: TokenLoss

    def __call__(
        self, logprob_BT, old_logprob_BT, ref_logprob_BT, sampler_logprob_BT, advantage_BT, entropy_BT, *where, kl_scale
    ):
        arrays = (logprob_BT, old_logprob_BT, ref_logprob_BT, sampler_logprob_BT, advantage_BT, entropy_BT, *where)
        loss, metrics = self.loss(*arrays, kl_scale=kl_scale)
        return loss, {**metrics, **mismatch(jax.lax.stop_gradient(logprob_BT), sampler_logprob_BT, where[0])}


class GRPOLearner:
    """Trains an RLCluster's actor with a GRPOConfig and reward functions.

    Attributes:
      parts_class, trainer_parts_class: the loop's parts in one process, and on a trainer host of several.
    """

    parts_class: "type[GRPOParts]"
    trainer_parts_class: "type[GRPOTrainerParts]"

    def __init__(
        self,
        rl_cluster: RLCluster,
        algo_config: GRPOConfig | PPOConfig,
        reward_fns: Callable | str | Sequence[Callable | str] = (),
        metric_fns: Sequence[MetricFn] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        reward_config: RewardConfig | None = None,
        pod: Pod | None = None,
    ):
        """Nothing runs yet.

        Args:
          rl_cluster: the models.
          algo_config: the algorithm.
          reward_fns: functions `(prompts, completions, **fields) -> list[float]`, or their names.
          metric_fns: functions `(prompts, completions, rewards, **fields) -> {name: value}`, run every step.
          data_shuffle_seed: seed of the shuffling where `train` is given a plain list; None keeps its order.
          reward_config: weights, deadlines and workers; `reward_fns` wins where both name functions.
          pod: the job's processes where there are several; every one of them makes a learner and trains.
        """
        self._pod = pod
        self.cluster, self.config = rl_cluster, algo_config
        self._metric_fns = tuple(metric_fns or ())
        self._shuffle_seed = data_shuffle_seed
        config = reward_config or RewardConfig()
        fns = (reward_fns,) if callable(reward_fns) or isinstance(reward_fns, str) else tuple(reward_fns)
        config = dataclasses.replace(config, fns=fns) if fns else config
        if rl_cluster.reward_source and not config.model:
            config = dataclasses.replace(config, model=rl_cluster.reward_source)
        self._reward_config = config

    def train(
        self,
        train_ds: PromptStream | Iterable[str | Mapping[str, Any]],
        *,
        prompts_per_step: int = 8,
        evaluator: Evaluator | None = None,
        run: Run | None = None,
        save_every: int | None = None,
    ) -> int:
        """Trains until `training_config.max_steps`; returns the step reached.

        Args:
          train_ds: a stream of prompts, or a list of prompts: texts, or mappings with a `prompt` and further fields
            that reward functions receive by name.
          prompts_per_step: P, where `train_ds` is a list. A stream gives P times `config.prompt_batches` at a time.
          evaluator: scores the policy on held-out prompts.
          run: files, checkpoints and signals; by default under training_config.checkpoint_root_directory, or nowhere.
        """
        training = self.cluster.training_config
        limit = self.cluster.config.rollout().max_prompt_length
        if not isinstance(train_ds, PromptStream):
            train_ds = PromptStream.from_list(
                list(train_ds),
                self.cluster.tokenizer,
                prompts_per_step=prompts_per_step * self.config.prompt_batches,
                max_prompt_length=limit,
                shuffle_seed=self._shuffle_seed,
            )
        run = run or Run(training.checkpoint_root_directory)
        schedule = Schedule(
            max_steps=training.max_steps or train_ds.steps_per_epoch,
            max_staleness=self.config.max_staleness,
            save_every=run.checkpoint_config.every if save_every is None else save_every,
            eval_every=training.eval_every_n_steps,
        )
        with run, contextlib.ExitStack() as stack:
            parts = self._parts(stack, train_ds, run, schedule, evaluator)
            stack.callback(parts.close)
            try:
                return train(parts, schedule)
            except RewardError:
                if isinstance(parts, GRPOParts):
                    parts.rescue()
                raise

    def _parts(
        self,
        stack: contextlib.ExitStack,
        stream: PromptStream,
        run: Run,
        schedule: Schedule,
        evaluator: Any,
    ) -> "GRPOParts | RolloutParts":
        """What this process does in the loop."""
        if self._pod is None:
            rewards = stack.enter_context(Rewards(self._reward_config))
            return self.parts_class(self, rewards, stream, run, schedule, evaluator)
        wait_s = 4 * run.log_config.stall_s
        if not self.cluster.trains:
            rewards = stack.enter_context(Rewards(self._reward_config))
            generate = Generator(self.cluster, rewards, self.config)
            return RolloutParts(self.cluster, generate, stream, run, schedule, evaluator, self._pod, wait_s)
        parts = self.trainer_parts_class(self, NamedRewards(self._reward_config), stream, run, schedule, None)
        parts.connect(self._pod, wait_s, evaluates=evaluator is not None)
        return parts

    def metrics_of(self, experience: Experience) -> dict[str, float]:
        """What the user's metric functions say about a batch."""
        if not self._metric_fns:
            return {}
        asked = experience.rollouts.prompts
        prompts, fields = repeated(asked.text, asked.fields, self.config.num_generations)
        named: dict[str, float] = {}
        for fn in self._metric_fns:
            named.update(fn(prompts, list(experience.rollouts.completions), experience.reward_B.tolist(), **fields))
        return {name: float(value) for name, value in named.items()}


class GRPOParts(LearnerParts):
    """The loop's parts for GRPO in one process."""

    def __init__(
        self,
        learner: GRPOLearner,
        rewards: Rewards | NamedRewards,
        stream: PromptStream,
        run: Run,
        schedule: Schedule,
        evaluator: Evaluator | None,
    ):
        super().__init__(learner.cluster, stream, run, schedule, evaluator)
        self._learner, self._config, self._rewards = learner, learner.config, rewards
        here = isinstance(rewards, Rewards)  # on a trainer host of several they have only names
        self._generate = Generator(self.cluster, rewards, self._config) if here else None
        # One thread does everything on the rollout mesh: batches are generated in the order they were submitted.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        samples = stream.prompts_per_step // self._config.prompt_batches * self._config.num_generations
        self._mini = self.cluster.training_config.mini_batch_size or samples
        updates = len(packing.mini_batches(np.arange(samples), self._mini)) * self._config.num_iterations
        self._old = self._config.old_source(updates)
        rollout = self.cluster.config.rollout()
        loss = self._config.policy_loss(rollout.max_tokens_to_generate)
        self._reward_kl, self._loss_kl = RewardKL(self._config), LossKL(self._config, loss.beta)
        self._needs_reference = loss.needs_reference() or self._reward_kl.active
        self._gate = MismatchGate(
            self._config.mismatch_bound,
            self._config.mismatch_patience,
            section=self._config.section,
            stale=self._config.max_staleness > 0,
            filtered=bool(rollout.top_k) or rollout.min_p > 0 or (rollout.top_p or 1.0) < 1.0,
        )
        for warning in self._config.warnings(updates):
            run.console.print(f"Warning: {warning}")
        if self._needs_reference:
            self.cluster.keep_reference()
        wrap = {"current": CurrentAsOld, "sampler": SamplerAsOld}.get(self._old)
        self.cluster.prepare_actor(wrap(loss) if wrap else loss)
        self._shape = self.cluster.pack_shape(self._mini, self._config.num_generations)
        self._trained: tuple[int, bytes] | None = None  # steps done in this process, data position after the last

    # Generation: on the rollout thread.

    def publish(self, step: int) -> Policy:
        # After every batch in flight, so that one thread at a time enqueues on the rollout mesh.
        with self.run.watchdog.stage("publish"):
            return self._thread.submit(self.cluster.sync_weights, step, in_place=True).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        assert self._generate is not None, "trainer hosts do not generate"
        return Later(self._thread.submit(self._generate, self.next_batch(), policy, step), self.run, "rollout")

    # Training: on the loop's thread.

    def update(self, step: int, experience: Experience) -> Mapping[str, Any]:
        rollouts = experience.rollouts
        with self.run.watchdog.stage("update"):
            scores = self._scores(step, experience)
            reward_BT: Any = outcome_reward(experience.reward_B, rollouts.mask_BT)  # pyright: ignore[reportArgumentType]
            said: dict[str, Any] = {}
            if self._reward_kl.active:
                reward_BT, said = self._reward_kl.penalised(
                    reward_BT, scores.old_logprob_BT, scores.ref_logprob_BT, rollouts.mask_BT
                )
            said |= self._learn(step, experience, scores, reward_BT)
            jax.block_until_ready(self.cluster.state.step)
            if self._loss_kl.active:
                said |= self._loss_kl.trained(said["actor/kl"], len(experience.reward_B))
        return said

    def _learn(self, step: int, experience: Experience, scores: Scores, reward_BT: np.ndarray) -> dict[str, Any]:
        """Token rewards -> advantages -> updates; metrics still on the device."""
        mask_BT = experience.rollouts.mask_BT
        assert isinstance(self._config, GRPOConfig), "PPO overrides this"
        advantage_BT = self._config.advantage(reward_BT, experience.greedy_reward_B, mask_BT)
        return self._update_actor(step, experience, scores, advantage_BT)

    def _update_actor(
        self, step: int, experience: Experience, scores: Scores, advantage_BT: np.ndarray
    ) -> dict[str, Any]:
        """All passes of a step over the actor."""
        advantage_BT = advantage_BT.astype(np.float32)
        passes = [self._pass(step, i, experience, scores, advantage_BT) for i in range(self._config.num_iterations)]
        return gathered([self.cluster.update_actor(batch) for batches in passes for batch in batches])

    def _scores(self, step: int, experience: Experience) -> Scores:
        """What the ratio starts from: scored ahead where the reward needs it, else filled in by `_pass`."""
        rollouts = experience.rollouts
        if not self._reward_kl.active:
            return Scores(rollouts.logprob_BT, np.zeros_like(rollouts.logprob_BT))
        mini_batches = self._mini_batches(step, 0, len(rollouts.length_B))
        old = "sampler" if self._old == "sampler" else "trainer"
        return policy_scores(self.cluster, rollouts, self._shape, mini_batches, old=old, reference=True)

    def _pass(
        self, step: int, iteration: int, experience: Experience, scores: Scores, advantage_BT: np.ndarray
    ) -> list[TrainBatch]:
        """The mini-batches of one pass, in an order drawn from (seed, step, iteration), with all they need but updates.

        Old and reference log-probabilities are those before the first update of the step: all passes are prepared
        before any is trained on.
        """
        rollouts = experience.rollouts
        mask_BT = self._config.loss_mask(rollouts)
        batches = []
        for chosen in self._mini_batches(step, iteration, len(advantage_BT)):
            host = packing.pack(
                packing.place_samples(rollouts, chosen, self._shape),
                tokens_BT=rollouts.tokens_BT[chosen],
                mask_BT=mask_BT[chosen],
                advantage_BT=advantage_BT[chosen],
                old_logprob_BT=scores.old_logprob_BT[chosen],
                ref_logprob_BT=scores.ref_logprob_BT[chosen],
                sampler_logprob_BT=rollouts.logprob_BT[chosen],
                kl_scale=self._loss_kl.scale,
            )
            batch: Any = self.cluster.put_batch(host)
            if self._old == "trainer" and not self._reward_kl.active:
                batch = dataclasses.replace(batch, old_logprob_ABT=self.cluster.actor_logprobs(batch))
            if self._needs_reference and not self._reward_kl.active:
                batch = dataclasses.replace(batch, ref_logprob_ABT=self.cluster.reference_logprobs(batch))
            batches.append(batch)
        return batches

    def _mini_batches(self, step: int, iteration: int, samples: int) -> list[np.ndarray]:
        order_B = np.arange(samples)
        if self._mini < samples:
            order_B = np.random.default_rng((self.cluster.seed, step, iteration)).permutation(order_B)
        return packing.mini_batches(order_B, self._mini)

    def needed_samples(self, step: int, experience: Experience) -> np.ndarray:
        """Indices of the samples whose packed rows lie on this process's devices, in any pass of the step."""
        rollouts = experience.rollouts
        needed = [
            chosen[np.isin(packing.place_samples(rollouts, chosen, shape).row_B, local_rows(shape, mesh))]
            for shape, mesh in self._layouts()
            for i in range(self._config.num_iterations)
            for chosen in self._mini_batches(step, i, len(rollouts.length_B))
        ]
        return np.unique(np.concatenate(needed))

    def _layouts(self) -> list[tuple[packing.PackShape, Mesh]]:
        """The packed shapes that samples are brought into, and the meshes these lie on."""
        return [(self._shape, self.cluster.actor_mesh)]

    def record(self, step: int, experience: Experience, metrics: Mapping[str, Any]) -> None:
        super().record(step, experience, metrics)
        self._trained = (step, experience.rollouts.prompts.data_state)

    def rescue(self) -> None:
        """Saves the steps done before a batch failed to be scored; a resumed run draws that batch again."""
        if self._trained is None or self.run.checkpoints is None:
            return
        step, self._data_state = self._trained
        self.run.checkpoints.wait()
        if self.run.saved_step() < step:
            self.save(step, [])
            self.run.checkpoints.wait()
        self.run.console.print(f"Saved after step {self.run.saved_step()} in {self.run.place}.")

    # Reporting.

    def step_metrics(self, batch: Experience) -> dict[str, float]:
        rollouts, G = batch.rollouts, self._config.num_generations
        sampled_B = rollouts.mask_BT.sum(axis=1)
        reward_PG = batch.reward_B.reshape(-1, G)
        metrics = {
            "reward/mean": float(batch.reward_B.mean()),
            "reward/std": float(batch.reward_B.std()),
            "reward/groups_without_signal": float((np.ptp(reward_PG, axis=1) == 0).mean()),
            "tokens/completion": float(sampled_B.sum()),
            "tokens/prompt": float(rollouts.prompts.length_P.sum()),
            "completion/length_mean": float(sampled_B.mean()),
            "completion/length_max": float(sampled_B.max()),
            "completion/truncated": float((rollouts.stop_B == STOP_LENGTH).mean()),
            "time/rollout": rollouts.seconds,
            "time/reward": batch.seconds,
            "rollout/tokens_per_s": float(sampled_B.sum() / max(rollouts.seconds, 1e-9)),
            "data/skipped_prompts": float(getattr(self.stream, "skipped", 0)),
        }
        metrics |= {
            f"reward/{name}": float(reward_B.mean())
            for name, reward_B in zip(self._rewards.names, batch.reward_FB, strict=True)
        }
        return metrics | dict(batch.counts) | self._learner.metrics_of(batch)

    def device_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Replaces the moments of the mismatch measure by the correlation they stand for."""
        if "sampler/moment_x" not in values:
            return values
        values["sampler/pearson"] = pearson(values)
        return {name: value for name, value in values.items() if not name.startswith("sampler/moment_")}

    def samples(self, batch: Experience) -> Sequence[Mapping[str, Any]]:
        rollouts, G = batch.rollouts, self._config.num_generations
        order = range(0, len(rollouts.completions), G)
        return [
            {
                "prompt": rollouts.prompts.text[b // G],
                "completion": rollouts.completions[b],
                "reward": float(batch.reward_B[b]),
                **{name: float(r_B[b]) for name, r_B in zip(self._rewards.names, batch.reward_FB, strict=True)},
            }
            for b in order
        ]

    def controllers(self) -> dict[str, Any]:
        return {name: control.state() for name, control in self._kl_controls()}

    def restore_controllers(self, state: Mapping[str, Any]) -> None:
        for name, control in self._kl_controls():
            if name in state:  # a run may be steered from its resumption on
                control.restore(state[name])

    def _kl_controls(self) -> list[tuple[str, RewardKL | LossKL]]:
        reward: list[tuple[str, RewardKL | LossKL]] = [("reward_kl", self._reward_kl)] * self._reward_kl.active
        return reward + [("loss_kl", self._loss_kl)] * self._loss_kl.steered

    def check(self, step: int, values: Mapping[str, float]) -> None:
        super().check(step, values)
        if warning := self._gate.check(step, values):
            self.run.console.print(f"Warning: {warning}")

    def watched(self) -> Sequence[tuple[str, str]]:
        kl = "reward/kl" if self._reward_kl.active else "actor/kl" if self._needs_reference else "actor/approx_kl"
        return (
            ("reward/mean", "reward"),
            (kl, "kl"),
            ("accuracy/answer", "accuracy"),
            ("rollout/tokens_per_s", "tok/s"),
        )

    def close(self) -> None:
        super().close()
        self._thread.shutdown(wait=True, cancel_futures=True)


class GRPOTrainerParts(TrainerSide, GRPOParts):
    """The loop's parts for GRPO on a trainer host."""


GRPOLearner.parts_class = GRPOParts
GRPOLearner.trainer_parts_class = GRPOTrainerParts
