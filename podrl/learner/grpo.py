"""GRPO and its family, whole: implements each line of the loop (podrl/learner/loop.py) for groups of samples.

Rewards of a prompt's samples are compared with each other, which gives each sample's advantage; the policy is updated
on packed mini-batches of samples, in one or several passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from podrl.algorithms.echo import ObservedRows, with_observations
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import starting_from, with_old
from podrl.algorithms.policy_rows import PolicyRows
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.control import LossKL, RewardKL
from podrl.learner.scoring import ReferencedScores, Scores, policy_scores
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.mappings import Metrics, SavedState
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape, pack_shape
from podrl.trainer.state import local_rows
from podrl.types import SOURCE, Batch, Experience, Layout, PyTree


class GRPO:
    """Implements podrl.learner.loop.Algorithm for GRPO and every other estimator that needs no critic.

    PPO updates its policy by the same lines, on advantages of its own.

    Attributes:
      cluster: the actor and its reference.
      mini_batch_size: number of samples per update.
      old: source of the ratio's denominator: 'current', 'trainer' or 'sampler'.
      shape: packed shape of a mini-batch on the actor's mesh.
      layouts: (packed shape, mesh) pairs that samples are packed for.
    """

    def __init__(
        self,
        cluster: RLCluster,
        config: GRPOConfig | PPOConfig,
        *,
        samples: int,
        log: Callable[[str], None],
        pieces: bool = False,
    ):
        """Sets the cluster's loss, and keeps a reference if the settings need one.

        Args:
          cluster: the actor and its reference.
          config: the settings.
          samples: number of samples of a step.
          log: function that prints a warning about settings that are probably a mistake.
          pieces: True if samples may have several pieces.
        """
        self.cluster, self._config, self._samples, self._pieces = cluster, config, samples, pieces
        self.mini_batch_size = (cluster.training_config.mini_batch_size or 0) * config.num_generations or samples
        updates = len(packing.mini_batches(np.arange(samples), self.mini_batch_size)) * config.num_iterations
        self.old = config.old_source(updates)
        # Estimators take numpy as well as jax arrays, and return the same kind.
        self._estimators: list[Any] = [part.estimator() for part in config.parts]
        self._loss = config.policy_loss(cluster.config.rollout().max_tokens_to_generate)
        self._reward_kl, self._loss_kl = RewardKL(config), LossKL(config)
        self._scored_first, self._needs_reference = self._reference_use()
        for warning in config.warnings(updates):
            log(f"Warning: {warning}")
        if cluster.actor.model.experts is not None and not cluster.config.rollout().router_replay:
            log(
                "Warning: the model has experts, and the trainer chooses each token's anew, as rollout.router_replay "
                "is off. Where it differs from the sampler, log-probabilities differ: watch sampler/abs_diff, and set "
                "sampler_correction='tis'."
            )
        if self._needs_reference:
            cluster.keep_reference()
        self._prepare()
        # Numbers of tokens of each mini-batch of a step: in its sequences, in its rows, and computed.
        self._packed: list[tuple[int, int, int]] = []
        self.shape = self.pack_shape(cluster.actor_mesh)
        self.layouts: list[tuple[PackShape, Mesh]] = [(self.shape, cluster.actor_mesh)]

    def _reference_use(self) -> tuple[bool, bool]:
        """Returns (True if the reference scores before `pack`, True if a reference is needed at all)."""
        scored_first = self._reward_kl.active
        return scored_first, scored_first or self._loss.needs_reference()

    def _prepare(self) -> None:
        """Sets the actor's loss, and the function that computes the tokens' weights for the trace."""

        def weigh(logprob_BT: Array, rows: Any) -> tuple[Array, Array]:
            return self._loss.token_weights(logprob_BT, starting_from(self.old, logprob_BT, rows.alone))

        self.cluster.actor.prepare(self._token_loss(), weigh)

    def _token_loss(self) -> Any:
        """Builds the loss of an update's rows, with the loss of observed tokens if these have a weight."""
        loss = with_old(self._loss, self.old)
        return with_observations(loss) if self._config.observed_weight else loss

    @property
    def policy(self) -> "GRPO":
        """The algorithm whose packed mini-batches update the policy: this object."""
        return self

    # The methods that the loop calls.

    def score(self, step: int, experience: Experience) -> Scores:
        """Scores old and reference log-probabilities, if rewards or advantages need them before `pack` does."""
        rollouts = experience.rollouts
        if not self._scored_first:
            return Scores(rollouts.logprob_BT)
        mini_batches = self.mini_batches(step, 0, len(rollouts.length_B))
        old = "sampler" if self.old == "sampler" else "trainer"
        return policy_scores(self.cluster, rollouts, self.shape, mini_batches, old=old)

    def rewards(self, experience: Experience, scores: Scores) -> tuple[np.ndarray, Metrics]:
        """Computes token rewards: rewards of turns on their tokens, the remaining reward on the last token, less the
        KL."""
        turn_reward_BT = experience.rollouts.turn_reward_BT
        reward_B: Any = experience.reward_B - turn_reward_BT.sum(axis=1, dtype=np.float64)
        mask_BT: Any = experience.rollouts.mask_BT
        reward_BT: Any = outcome_reward(reward_B, mask_BT) + turn_reward_BT
        if not self._reward_kl.active:
            return reward_BT, {}
        ref_BT = cast(ReferencedScores, scores).ref_logprob_BT
        return self._reward_kl.penalised(reward_BT, scores.old_logprob_BT, ref_BT, mask_BT)

    def advantages(self, experience: Experience, scores: Scores, rewards: np.ndarray) -> tuple[np.ndarray, Metrics]:
        """Computes every sampled token's advantage over the other samples of its prompt, times `reward_coef`."""
        weight = self._of_samples("reward_coef", experience)
        return weight * self._by_rewards(experience, rewards), self._source_metrics(experience)

    @property
    def _mixed(self) -> bool:
        """True if sources of a mixture have different settings."""
        return len(self._config.parts) > 1

    def _by_rewards(self, experience: Experience, rewards: np.ndarray) -> np.ndarray:
        """Computes the advantages from rewards, separately for sources with different settings."""
        rollouts = experience.rollouts
        if not self._mixed:
            (estimator,) = self._estimators
            return estimator(rewards, experience.greedy_reward_B, rollouts.mask_BT, group_B=rollouts.group_B)
        part_B, advantage_BT = self._config.part_of(experience), np.zeros(rewards.shape, np.float64)
        for number, (part, estimator) in enumerate(zip(self._config.parts, self._estimators, strict=True)):
            rows_B = np.flatnonzero(part_B == number)
            if len(rows_B) and part.reward_coef:
                chosen = (x[rows_B] for x in (rewards, experience.greedy_reward_B, rollouts.mask_BT))
                advantage_BT[rows_B] = estimator(*chosen, group_B=rollouts.group_B[rows_B])
        return advantage_BT

    def _of_samples(self, name: str, experience: Experience, chosen: np.ndarray | slice = slice(None)) -> Any:
        """Reads a setting: a number, or one number per chosen sample, (b, 1), if sources have different settings."""
        if not self._mixed:
            return getattr(self._config, name)
        return self._config.of_samples(lambda part: getattr(part, name), experience)[chosen, None]

    def _source_metrics(self, experience: Experience) -> Metrics:
        """Counts the tokens of each component of a mixture's loss, and the samples and rewards of each source."""
        if not self._mixed:
            return {}
        config, rollouts = self._config, experience.rollouts
        counted_BT = config.counted(experience)
        of = functools.partial(self._of_samples, experience=experience)
        weights = {"rl": (of("reward_coef"), counted_BT), "teacher": (of("teacher_coef"), self._teachable(experience))}
        weights |= {"ce": (of("observation_coef"), config.observed(experience))}
        metrics = {f"loss/tokens/{name}": float(((w_B1 > 0) * x_BT).sum()) for name, (w_B1, x_BT) in weights.items()}
        names_B = np.array([str(name) for name in rollouts.prompts.fields[SOURCE]])[rollouts.group_B]
        for name in config.number_of:
            own_B = names_B == name
            reward_B = experience.reward_B[own_B & experience.rewarded()]
            metrics[f"source/{name}/samples"] = float(own_B.sum())
            metrics[f"source/{name}/reward"] = float(reward_B.mean()) if len(reward_B) else 0.0
            metrics[f"source/{name}/tokens"] = float(counted_BT[own_B].sum())
        return metrics

    def _teachable(self, experience: Experience) -> np.ndarray:
        """Marks the tokens (B, T) that a teacher may teach: those that count in the loss."""
        return self._config.counted(experience)

    def pack(
        self, step: int, experience: Experience, scores: Scores, advantages: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs the mini-batches of all passes.

        All passes are packed before the first update, so old and reference log-probabilities are computed with the
        weights before the step's first update.
        """
        advantage_BT = advantages.astype(np.float32)
        passes = range(self._config.num_iterations)
        self._packed.clear()
        return [batch for i in passes for batch in self.pack_pass(step, i, experience, scores, advantage_BT)]

    def pack_pass(
        self, step: int, iteration: int, experience: Experience, scores: Scores, advantage_BT: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs the mini-batches of one pass, in an order drawn from (seed, step, iteration)."""
        rollouts = experience.rollouts
        loss_mask_BT = self._config.loss_mask(experience)
        reads, batches = self._loss.reads(self._mixed), []
        for chosen in self.mini_batches(step, iteration, len(advantage_BT)):
            placement = packing.place_samples(rollouts, chosen, self.shape)
            self._packed.append((placement.apart, placement.packed, placement.computed))
            mask_BT, length_BT = placement.loss_tokens(loss_mask_BT[chosen])
            put = functools.partial(placement.scatter, where_BT=loss_mask_BT[chosen])
            own_BT, weight_B1 = self._of_update(advantage_BT, experience, scores, loss_mask_BT, chosen)
            # In a mixture the loss multiplies by `weight_BT` once more, so the advantage is divided by the weight here.
            rows: Any = PolicyRows(
                layout=placement.replayed(rollouts, chosen),
                mask_BT=mask_BT,
                length_BT=length_BT,
                advantage_BT=put(own_BT / np.where(weight_B1 > 0, weight_B1, 1) if self._mixed else own_BT),
                old_logprob_BT=put(scores.old_logprob_BT[chosen]),
                sampler_logprob_BT=put(rollouts.logprob_BT[chosen]),
                kl_scale=self._loss_kl.scale,
            )
            if "weight_BT" in reads:
                rows = dataclasses.replace(rows, weight_BT=put(weight_B1 * np.ones_like(own_BT)))
            if "loss_BT" in reads:
                loss_B = np.asarray(self._config.loss_of_part)[self._config.part_of(experience)[chosen]]
                loss_BT = np.broadcast_to(loss_B[:, None], own_BT.shape)
                rows = dataclasses.replace(rows, loss_BT=placement.scatter(loss_BT))
            if "age_BT" in reads:
                age_BT = (step - rollouts.version_BT[chosen]).astype(np.float32)
                rows = dataclasses.replace(rows, age_BT=put(age_BT))
            if self._config.observed_weight:
                weight_BT = self._of_samples("observation_coef", experience) * self._config.observed(experience)
                scale = self._loss.divisor(loss_mask_BT[chosen]) / max(float((weight_BT[chosen] > 0).sum()), 1.0)
                rows = ObservedRows(rows, placement.scatter(weight_BT[chosen]), scale)
            batches.append(self._placed(placement, rows, experience, scores, loss_mask_BT, chosen))
        return batches

    def _of_update(
        self,
        advantage_BT: np.ndarray,
        experience: Experience,
        scores: Scores,
        loss_mask_BT: np.ndarray,
        chosen: np.ndarray,
    ) -> tuple[np.ndarray, Any]:
        """Returns the weighted advantages of an update's samples, and the weight of each sample's token losses."""
        del scores
        weight_B1, factor = self._weight_of_rewards(experience, loss_mask_BT, chosen)
        return factor * advantage_BT[chosen], factor * weight_B1

    def _weight_of_rewards(
        self, experience: Experience, loss_mask_BT: np.ndarray, chosen: np.ndarray
    ) -> tuple[Any, float]:
        """Returns `reward_coef` of an update's samples, and a factor that corrects the divisor of the loss.

        The loss is divided by the tokens (or sequences, as `loss_agg_mode` says) of all samples. With the factor, the
        rewards' part is divided by the tokens (or sequences) of the samples that learn from rewards. Without a mixture
        both numbers are 1, as the weight is in the advantages already.
        """
        if not self._mixed:
            return 1.0, 1.0
        weight_B1, mask_BT = self._of_samples("reward_coef", experience, chosen), loss_mask_BT[chosen]
        return weight_B1, self._loss.divisor(mask_BT) / self._loss.divisor(mask_BT * (weight_B1 > 0))

    def _placed(
        self,
        placement: packing.Placement,
        rows: Any,
        experience: Experience,
        scores: Scores,
        loss_mask_BT: np.ndarray,
        chosen: np.ndarray,
    ) -> Batch[Any]:
        """Puts the rows of an update on the mesh, and adds old and reference log-probabilities computed there."""
        del experience, scores, loss_mask_BT, chosen
        batch = self.cluster.actor.put(placement.batch(rows))
        alone = self._with_old(batch.rows.alone, batch.layout())
        if self._loss.needs_reference():
            alone = alone.with_reference(self.cluster.actor.reference_logprobs(batch.layout()))
        return Batch(batch.rows.around(alone), batch.micro_batches)

    def _with_old(self, rows: PolicyRows, layout: Batch[Layout]) -> PolicyRows:
        if self.old != "trainer" or self._scored_first:
            return rows
        return dataclasses.replace(rows, old_logprob_BT=self.cluster.actor.logprobs(layout))

    def update(self, step: int, batches: Sequence[Batch[PolicyRows]], weighed: list[PyTree] | None = None) -> Metrics:
        """Makes one optimizer update per batch, then adapts the coefficient of the KL in the loss.

        Args:
          step: number of steps done.
          batches: packed mini-batches on the actor's mesh.
          weighed: list that the token weights of each update are appended to, for the trace (`Actor.token_weights`);
            None computes none.
        """
        found = []
        for batch in batches:
            if weighed is not None:
                weighed.append(self.cluster.actor.token_weights(batch))
            found.append(self.cluster.update_actor(batch))
        metrics: dict[str, Any] = gathered(found)
        if self._packed:  # batches that were packed by hand have no counts
            apart, packed, computed = np.sum(self._packed, axis=0).tolist()
            metrics |= {"packing/shared": 1 - packed / apart, "packing/padding": 1 - packed / computed}
        jax.block_until_ready(self.cluster.state.step)  # so that the stage 'update' covers the device's work
        if self._loss_kl.active:
            return metrics | self._loss_kl.trained(metrics["actor/kl"], self._samples)
        metrics.pop("actor/kl", None)  # a 0 that nothing measured: the loss has no KL
        return metrics

    # Shapes and splits, used by the methods above.

    def pack_shape(self, mesh: Mesh, more: int = 0) -> PackShape:
        """Computes the packed shape of a mini-batch on a mesh; `more` tokens are added to the longest prompt."""
        shape = pack_shape(
            self.cluster.training_config,
            mesh,
            sequences=self.mini_batch_size,
            max_length=self.cluster.config.longest + more,
            group_size=self._config.num_generations,
            max_prompt_length=self.cluster.config.rollout().max_prompt_length + more,
            pieces=self._pieces,
            by_sample=self._loss.by_sample,
        )
        others = (self.cluster.critic, *self.cluster.teachers)
        models = [other.model for other in others if other is not None]
        return shape.read_by([self.cluster.model, self.cluster.actor.reference_model, *models])

    def mini_batches(self, step: int, iteration: int, samples: int) -> list[np.ndarray]:
        """Splits a pass into the samples of each update, in an order drawn from (seed, step, iteration)."""
        order_B = np.arange(samples)
        if self.mini_batch_size < samples:
            order_B = np.random.default_rng((self.cluster.seed, step, iteration)).permutation(order_B)
        return packing.mini_batches(order_B, self.mini_batch_size)

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose packed rows lie on this process's devices, in any pass of the step.

        If samples have pieces, the batch must have the tokens of all samples, which decide which pieces lie in one row.
        """
        passes, samples = range(self._config.num_iterations), len(experience.rollouts.length_B)
        updates = [chosen for i in passes for chosen in self.mini_batches(step, i, samples)]
        rows = [self.rows_of_update(experience, chosen, *layout) for layout in self.layouts for chosen in updates]
        return np.unique(np.concatenate(rows))

    @staticmethod
    def rows_of_update(experience: Experience, chosen: np.ndarray, shape: PackShape, mesh: Mesh) -> np.ndarray:
        """Selects, from samples that are packed together, the samples whose rows lie on this process's devices."""
        placement = packing.place_samples(experience.rollouts, chosen, shape)
        here_B = np.isin(placement.row_B, local_rows(shape, mesh))
        return chosen[np.unique(placement.pieces.sample_B[here_B])]

    def columns(self, advantages: np.ndarray) -> dict[str, np.ndarray]:
        """Names the per-token results of `advantages` for the trace."""
        return {"advantage": advantages}

    def watched(self) -> list[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        kl = ("reward/kl", self._reward_kl.active), ("actor/kl", self._loss_kl.active)
        return [
            ("reward/mean", "reward"),
            *[(name, "kl") for name, measured in kl if measured][:1],
            ("accuracy/answer", "accuracy"),
            ("rollout/tokens_per_s", "tok/s"),
        ]

    def state(self) -> SavedState:
        """Returns the adaptive coefficients, for a checkpoint."""
        return {name: control.state() for name, control in self._kl_controls()}

    def restore(self, state: SavedState) -> None:
        """Restores the adaptive coefficients of a checkpoint."""
        for name, control in self._kl_controls():
            if name in state:  # a coefficient that was still fixed when the checkpoint was saved is not in it
                control.restore(state[name])

    def _kl_controls(self) -> list[tuple[str, RewardKL | LossKL]]:
        reward: list[tuple[str, RewardKL | LossKL]] = [("reward_kl", self._reward_kl)] * self._reward_kl.active
        return reward + [("loss_kl", self._loss_kl)] * self._loss_kl.steered


def gathered(collected: Sequence[Metrics]) -> dict[str, list[Any]]:
    """Collects metrics of several updates by name, still on the device: a mean there would be a program per metric."""
    return {name: [metrics[name] for metrics in collected] for name in collected[0]}
