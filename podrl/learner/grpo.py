"""GRPO and its family: implements each line of the loop (podrl/learner/loop.py) for groups of samples.

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

from podrl.algorithms.distill import Distillation
from podrl.algorithms.echo import ObservedRows, with_observations
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import starting_from, with_old
from podrl.algorithms.policy_rows import PolicyRows
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.control import LossKL, RewardKL
from podrl.learner.mini_batches import MiniBatches, Update
from podrl.learner.scoring import ReferencedScores, Scores, differences_by_routes, policy_scores
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.learner.source_weights import SourceWeights
from podrl.mappings import Metrics, SavedState
from podrl.trainer import packing
from podrl.trainer.pack_shape import other_micro_batches
from podrl.types import Batch, Experience, Layout, PyTree, Rollouts


class GRPO:
    """Implements podrl.learner.loop.Algorithm for GRPO and every other estimator that needs no critic.

    PPO updates its policy with the same code, but computes the advantages with its critic.

    Attributes:
      cluster: the actor and its reference.
      mini_batches: the samples of each update, and the shape of their rows.
      old: source of the ratio's denominator: 'current', 'trainer' or 'sampler'.
    """

    def __init__(
        self,
        cluster: RLCluster,
        config: GRPOConfig | PPOConfig,
        *,
        samples: int,
        log: Callable[[str], None],
        pieces: bool = False,
        teacher: Distillation | None = None,
    ):
        """Sets the cluster's loss, and keeps a reference if the settings need one.

        Args:
          cluster: the actor and its reference.
          config: the settings.
          samples: number of samples of a step.
          log: function that prints a warning about settings that are probably a mistake.
          pieces: True if a sample may have several pieces, each a token sequence with a context of its own.
          teacher: settings of the teacher, whose divergence is a part of the loss unless `teacher.sampled`; None for no
            teacher.
        """
        self.cluster, self._config, self._samples = cluster, config, samples
        self.mini_batches = MiniBatches(cluster, config, samples)
        self.old = config.old_source(self.mini_batches.updates)
        self._sources = SourceWeights(config)
        self._loss = config.policy_loss(cluster.config.rollout().max_tokens_to_generate)
        self._reward_kl, self._loss_kl = RewardKL(config), LossKL(config)
        self._scored_first, self._needs_reference = self._reference_use()
        for warning in config.warnings(self.mini_batches.updates):
            log(f"Warning: {warning}")
        if self._needs_reference:
            cluster.keep_reference()
        loss = with_old(self._loss, self.old)
        self._token_loss = with_observations(loss) if config.observed_weight else loss
        cluster.actor.prepare(self._token_loss, self._token_weights, teacher)
        self.mini_batches.place(pieces=pieces, by_sample=self._loss.by_sample)
        of_update = (self.mini_batches.shape, self.mini_batches.size, config.num_generations)
        for text in other_micro_batches(cluster.training_config, *of_update):
            log(f"Warning: {text}")
        # For each mini-batch of a step, three numbers of tokens: of its sequences, of its packed rows (a shared prompt
        # counts once), and of the rows as they are computed (with padding).
        self._packed: list[tuple[int, int, int]] = []
        routed = cluster.actor.model.experts is not None
        self._warn_of_routes = log if routed and not cluster.config.rollout().router_replay else None

    def _reference_use(self) -> tuple[bool, bool]:
        """Returns (True if the reference scores before `pack`, True if a reference is needed at all)."""
        scored_first = self._reward_kl.active
        return scored_first, scored_first or self._loss.needs_reference()

    def _token_weights(self, logprob_BT: Array, rows: Any) -> tuple[Array, Array]:
        """Computes the weight of each token in the update, and whether it was clipped, for the trace."""
        return self._loss.token_weights(logprob_BT, starting_from(self.old, logprob_BT, rows.alone))

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
        updates, shape = self.mini_batches.split(step, 0, len(rollouts.length_B)), self.mini_batches.shape
        old = "sampler" if self.old == "sampler" else "trainer"
        return policy_scores(self.cluster, rollouts, shape, updates, old=old)

    def rewards(self, experience: Experience, scores: Scores) -> tuple[np.ndarray, Metrics]:
        """Computes token rewards, less the KL if it is in the reward.

        The reward of a turn lies on the turn's last sampled token; the remaining reward of a sample lies on the
        sample's last sampled token.
        """
        turn_reward_BT = experience.rollouts.turn_reward_BT
        reward_B: Any = experience.reward_B - turn_reward_BT.sum(axis=1, dtype=np.float64)
        mask_BT: Any = experience.rollouts.mask_BT
        reward_BT: Any = outcome_reward(reward_B, mask_BT) + turn_reward_BT
        if not self._reward_kl.active:
            return reward_BT, {}
        ref_BT = cast(ReferencedScores, scores).ref_logprob_BT
        return self._reward_kl.penalised(reward_BT, scores.old_logprob_BT, ref_BT, mask_BT)

    def advantages(self, experience: Experience, scores: Scores, rewards: np.ndarray) -> tuple[np.ndarray, Metrics]:
        """Computes every sampled token's advantage by the estimator of its sample's source, times `reward_coef`."""
        weight = self._sources.of("reward_coef", experience)
        metrics = self._sources.metrics(experience, self._teachable(experience))
        return weight * self._sources.advantages(experience, rewards), metrics

    def _teachable(self, experience: Experience) -> np.ndarray:
        """Marks the tokens (B, T) that a teacher may teach: the sampled tokens of the samples in the loss."""
        return self._config.counted(experience)

    def pack(
        self, step: int, experience: Experience, scores: Scores, advantages: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs the mini-batches of all passes.

        All passes are packed before the first update, so old log-probabilities are computed with the weights before
        the step's first update, for later passes too.
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
        if self._warn_of_routes:
            self._compare_routes(step, rollouts, loss_mask_BT)
        reads, batches = self._loss.reads(self._sources.mixed), []
        for chosen in self.mini_batches.split(step, iteration, len(advantage_BT)):
            placement = packing.place_samples(rollouts, chosen, self.mini_batches.shape)
            update = Update(experience, scores, chosen, loss_mask_BT[chosen], placement)
            self._packed.append((placement.apart, placement.packed, placement.computed))
            mask_BT, length_BT = placement.loss_tokens(update.mask_BT)
            put = functools.partial(placement.scatter, where_BT=update.mask_BT)
            own_BT, weight_B1 = self._of_update(advantage_BT, update)
            # In a mixture the loss multiplies by `weight_BT` once more, so the advantage is divided by the weight here.
            rows: Any = PolicyRows(
                layout=placement.replayed(rollouts, chosen),
                mask_BT=mask_BT,
                length_BT=length_BT,
                advantage_BT=put(own_BT / np.where(weight_B1 > 0, weight_B1, 1) if self._sources.mixed else own_BT),
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
                weight_BT = self._sources.of("observation_coef", experience) * self._config.observed(experience)
                scale = self._loss.divisor(update.mask_BT) / max(float((weight_BT[chosen] > 0).sum()), 1.0)
                rows = ObservedRows(rows, placement.scatter(weight_BT[chosen]), scale)
            batches.append(self._placed(rows, update))
        return batches

    def _compare_routes(self, step: int, rollouts: Rollouts, loss_mask_BT: np.ndarray) -> None:
        """Warns once, in a run without router replay, how far trainer and sampler differ with and without replay."""
        log, self._warn_of_routes = cast(Callable[[str], None], self._warn_of_routes), None
        chosen = self.mini_batches.split(step, 0, len(loss_mask_BT))[0]
        found = "may differ more than with router replay"
        if rollouts.route_BTX is not None and np.any(loss_mask_BT[chosen]):
            shape = self.mini_batches.shape
            own, replayed = differences_by_routes(self.cluster, rollouts, chosen, loss_mask_BT, shape)
            found = f"differ by {own:.2g} nats on average, and with router replay they would differ by {replayed:.2g}"
        log(
            "Warning: rollout.router_replay is off, so the trainer chooses each token's experts. Log-probabilities "
            f"of trainer and sampler {found}. Watch sampler/abs_diff, and set rollout.router_replay=True, or bound the "
            "effect by sampler_correction='tis'."
        )

    def _of_update(self, advantage_BT: np.ndarray, update: Update) -> tuple[np.ndarray, Any]:
        """Returns the weighted advantages of an update's samples, and the weight of each sample's token losses."""
        weight_B1, factor = self._sources.of_rewards(update, self._loss)
        return factor * advantage_BT[update.chosen], factor * weight_B1

    def _placed(self, rows: Any, update: Update) -> Batch[Any]:
        """Puts an update's rows on the mesh, and adds the old and reference log-probabilities that the loss reads."""
        batch = self.cluster.actor.put(update.placement.batch(rows))
        alone = self._with_old(batch.rows.alone, batch.layout())
        if self._loss.needs_reference():
            alone = alone.with_reference(self.cluster.actor.reference_logprobs(batch.layout()))
        return Batch(batch.rows.around(alone), batch.micro_batches)

    def _with_old(self, rows: PolicyRows, layout: Batch[Layout]) -> PolicyRows:
        if self.old != "trainer" or self._scored_first:
            return rows
        return dataclasses.replace(rows, old_logprob_BT=self.cluster.actor.logprobs(layout))

    def update(self, step: int, batches: Sequence[Batch[PolicyRows]], weighed: list[PyTree] | None = None) -> Metrics:
        """Makes one optimizer update per batch, then adapts the coefficient of the KL in the loss (`kl_target`).

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
        if self._packed:  # empty if the batches were not made by `pack_pass`
            apart, packed, computed = np.sum(self._packed, axis=0).tolist()
            metrics |= {"packing/shared": 1 - packed / apart, "packing/padding": 1 - packed / computed}
        jax.block_until_ready(self.cluster.state.step)  # so that the stage 'update' covers the device's work
        if self._loss_kl.active:
            return metrics | self._loss_kl.trained(metrics["actor/kl"], self._samples)
        metrics.pop("actor/kl", None)  # the loss has no KL, so this metric is a 0 that was not measured
        return metrics

    # Methods for the trace, a pod's hosts and checkpoints.

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose packed rows lie on this process's devices, in any pass of the step."""
        return self.mini_batches.needed(step, experience)

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
        """Returns the coefficients of the KL in the reward and of an adaptive KL in the loss, for a checkpoint."""
        return {name: control.state() for name, control in self._kl_controls()}

    def restore(self, state: SavedState) -> None:
        """Restores the coefficients that `state` returned."""
        for name, control in self._kl_controls():
            if name in state:  # missing if the run that saved it had no such KL, or a fixed coefficient in the loss
                control.restore(state[name])

    def _kl_controls(self) -> list[tuple[str, RewardKL | LossKL]]:
        reward: list[tuple[str, RewardKL | LossKL]] = [("reward_kl", self._reward_kl)] * self._reward_kl.active
        return reward + [("loss_kl", self._loss_kl)] * self._loss_kl.steered


def gathered(collected: Sequence[Metrics]) -> dict[str, list[Any]]:
    """Lists each metric's values over several updates, on the device: a mean there would need a program per metric."""
    return {name: [metrics[name] for metrics in collected] for name in collected[0]}
