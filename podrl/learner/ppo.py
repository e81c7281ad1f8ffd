"""PPO: a critic's values turn token rewards into advantages; critic and actor are updated in turn."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from podrl.algorithms.gae import gae, masked_whiten
from podrl.algorithms.policy_rows import PolicyRows
from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.grpo import GRPO, gathered
from podrl.learner.scoring import Scores, compared
from podrl.learner.settings import PPOConfig
from podrl.mappings import Metrics
from podrl.trainer import packing
from podrl.types import Batch, Experience, PyTree


@dataclasses.dataclass(frozen=True)
class PPOScores:
    """The policy's scores, and the critic's values in the sample layout, 0 on all tokens that were not sampled."""

    policy: Scores
    value_BT: np.ndarray


@dataclasses.dataclass(frozen=True)
class PPOBatches:
    """A step's packed batches of the critic and of the actor.

    While only the critic learns, the actor's batches are not trained on; they only measure the mismatch to the sampler.
    """

    critic: Sequence[Batch[CriticRows]]
    actor: Sequence[Batch[PolicyRows]]


class PPO:
    """Implements podrl.learner.loop.Algorithm: GRPO's updates of the policy, on the advantages of a critic."""

    def __init__(
        self,
        cluster: RLCluster,
        config: PPOConfig,
        *,
        samples: int,
        log: Callable[[str], None],
        pieces: bool = False,
    ):
        """Makes the critic if the cluster has none; arguments as in GRPO."""
        self._cluster, self._config = cluster, config
        self.policy = GRPO(cluster, config, samples=samples, log=log, pieces=pieces)
        critic = cluster.make_critic()
        assert critic is not None, "every trainer process must have devices of the critic's mesh"
        self._critic = critic
        loss = config.policy_loss(cluster.config.rollout().max_tokens_to_generate).settings
        clip, scale = config.clip_range_value, loss.loss_agg_scale or 1.0
        critic.prepare(functools.partial(value_loss, clip_range=clip, mode=loss.mode, scale=scale))
        self._critic_shape = self.policy.mini_batches.shape_on(critic.mesh)
        self.policy.mini_batches.layouts.append((self._critic_shape, critic.mesh))
        self.state, self.restore = self.policy.state, self.policy.restore

    # The methods that the loop calls.

    def score(self, step: int, experience: Experience) -> PPOScores:
        """Scores log-probabilities as GRPO does, and the critic's value before every sampled token."""
        scores, rollouts = self.policy.score(step, experience), experience.rollouts
        value_BT = np.zeros(rollouts.tokens_BT.shape, np.float32)
        for chosen in self.policy.mini_batches.split(step, 0, len(rollouts.length_B)):
            placement = packing.place_samples(rollouts, chosen, self._critic_shape)
            batch = placement.batch(placement.layout(rollouts.tokens_BT[chosen]))
            value_BT[chosen] = placement.unpack(self._critic.values(batch), len(value_BT[0]))
        return PPOScores(scores, np.where(rollouts.mask_BT > 0, value_BT, 0.0).astype(np.float32))

    def rewards(self, experience: Experience, scores: PPOScores) -> tuple[np.ndarray, Metrics]:
        """Computes token rewards as GRPO does; PPO's KL to the reference, if `beta` is above 0, is in the reward."""
        return self.policy.rewards(experience, scores.policy)

    def advantages(
        self, experience: Experience, scores: PPOScores, rewards: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], Metrics]:
        """Computes (advantage, return) of every sampled token by generalised advantage estimation."""
        config, mask_BT, value_BT = self._config, experience.rollouts.mask_BT, scores.value_BT
        token: Any = rewards.astype(np.float32)
        mask: Any = mask_BT
        if config.whiten_rewards:
            token = masked_whiten(token, mask, shift_mean=False)
        found, wanted = gae(token, cast(Any, value_BT), mask, gamma=config.gamma, lam=config.gae_lambda)
        advantage_BT, return_BT = np.asarray(found), np.asarray(wanted)
        measured = _spread(value_BT, return_BT, advantage_BT, mask_BT)
        if config.whiten_advantages:
            advantage_BT = np.asarray(masked_whiten(found, mask))
        return (advantage_BT, return_BT), measured

    def pack(
        self, step: int, experience: Experience, scores: PPOScores, advantages: tuple[np.ndarray, np.ndarray]
    ) -> PPOBatches:
        """Packs the passes of the critic and of the actor.

        While only the critic learns, the actor has one pass, which is not trained on but gives the mismatch metrics.
        """
        advantage_BT, return_BT = advantages
        critic = [
            batch
            for i in range(self._config.num_iterations)
            for batch in self._value_batches(step, i, experience, scores.value_BT, return_BT)
        ]
        if step < self._config.critic_warmup:
            return PPOBatches(critic, self._compared_batches(step, experience, scores.policy, advantage_BT))
        return PPOBatches(critic, self.policy.pack(step, experience, scores.policy, advantage_BT))

    def update(self, step: int, batches: PPOBatches, weighed: list[PyTree] | None = None) -> Metrics:
        """Updates the critic, then the actor; `weighed` is as in GRPO, but stays empty while only the critic learns."""
        metrics: dict[str, Any] = gathered([self._cluster.update_critic(batch) for batch in batches.critic])
        if step < self._config.critic_warmup:
            metrics |= gathered(compared(batches.actor))
            jax.block_until_ready(self._cluster.state.step)
            return metrics
        return metrics | {**self.policy.update(step, batches.actor, weighed)}

    def watched(self) -> list[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        *before, accuracy, speed = self.policy.watched()
        return [*before, ("critic/explained_variance", "critic"), accuracy, speed]

    def columns(self, advantages: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        """Names the per-token results of `advantages` for the trace; the return is the critic's target."""
        return self.policy.columns(advantages[0]) | {"return": advantages[1]}

    # Parts of the methods above.

    def _compared_batches(
        self, step: int, experience: Experience, scores: Scores, advantage_BT: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs a step's first pass, with old log-probabilities computed by the trainer."""
        batches = self.policy.pack_pass(step, 0, experience, scores, advantage_BT)
        if self.policy.old == "trainer":
            return batches
        score = self._cluster.actor.logprobs
        rows = (dataclasses.replace(batch.rows, old_logprob_BT=score(batch.layout())) for batch in batches)
        return [Batch(new, batch.micro_batches) for new, batch in zip(rows, batches, strict=True)]

    def _value_batches(
        self, step: int, iteration: int, experience: Experience, value_BT: np.ndarray, return_BT: np.ndarray
    ) -> list[Batch[CriticRows]]:
        rollouts = experience.rollouts
        loss_mask_BT = self._config.loss_mask(experience)
        batches = []
        for chosen in self.policy.mini_batches.split(step, iteration, len(rollouts.length_B)):
            placement = packing.place_samples(rollouts, chosen, self._critic_shape)
            mask_BT, length_BT = placement.loss_tokens(loss_mask_BT[chosen])
            rows = CriticRows(
                layout=placement.layout(rollouts.tokens_BT[chosen]),
                mask_BT=mask_BT,
                length_BT=length_BT,
                value_BT=placement.scatter(value_BT[chosen], where_BT=loss_mask_BT[chosen]),
                return_BT=placement.scatter(return_BT[chosen], where_BT=loss_mask_BT[chosen]),
            )
            batches.append(placement.batch(rows))
        return batches


def _spread(value_BT: np.ndarray, return_BT: np.ndarray, advantage_BT: np.ndarray, mask_BT: np.ndarray) -> Metrics:
    """Measures the explained variance of the values (1: exact, 0: no better than a constant) and the spread of
    advantages."""
    keep_BT = mask_BT > 0
    left = float(np.var((return_BT - value_BT)[keep_BT]))
    spread = float(np.var(return_BT[keep_BT]))
    return {
        "critic/explained_variance": 1.0 - left / spread if spread > 0 else 0.0,
        "critic/advantage_abs": float(np.abs(advantage_BT[keep_BT]).mean()) if keep_BT.any() else 0.0,
    }
