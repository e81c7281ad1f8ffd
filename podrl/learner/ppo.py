"""PPO: a critic's values turn token rewards into advantages; critic and actor are updated in turn."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from podrl.algorithms.gae import gae, masked_whiten
from podrl.algorithms.value_loss import value_loss
from podrl.cluster.critic import Critic
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.grpo import GRPOLearner, GRPOParts, MetricFn
from podrl.learner.parts import gathered
from podrl.learner.ppo_config import PPOConfig
from podrl.learner.scoring import Scores, compared
from podrl.learner.trainer_side import TrainerSide
from podrl.rewards.compose import RewardConfig
from podrl.runtime.pod import Pod
from podrl.trainer import packing
from podrl.types import CriticBatch, Experience, TrainBatch


class PPOParts(GRPOParts):
    """The loop's parts for PPO in one process: GRPO's, but advantages come from a critic, which learns too."""

    _config: PPOConfig

    def __init__(self, learner: GRPOLearner, *args: Any):
        super().__init__(learner, *args)
        critic = self.cluster.make_critic()
        assert critic is not None, "a trainer's process has devices of the critic's mesh"
        self._critic: Critic = critic
        loss = self._config.policy_loss(self.cluster.config.rollout().max_tokens_to_generate)
        clip, scale = self._config.clip_range_value, loss.loss_agg_scale or 1.0
        critic.prepare(functools.partial(value_loss, clip_range=clip, mode=loss.mode, scale=scale))
        self._critic_shape = critic.pack_shape(
            sequences=self._mini,
            max_length=self.cluster.longest,
            group_size=self._config.num_generations,
            max_prompt_length=self.cluster.config.rollout().max_prompt_length,
        )

    def _learn(self, step: int, experience: Experience, scores: Scores, reward_BT: np.ndarray) -> dict[str, Any]:
        config, mask_BT = self._config, experience.rollouts.mask_BT
        value_BT = self._values(step, experience)
        token: Any = reward_BT.astype(np.float32)
        mask: Any = mask_BT
        if config.whiten_rewards:
            token = masked_whiten(token, mask, shift_mean=False)
        found, wanted = gae(token, cast(Any, value_BT), mask, gamma=config.gamma, lam=config.gae_lambda)
        advantage_BT, return_BT = np.asarray(found), np.asarray(wanted)
        said = _spread(value_BT, return_BT, advantage_BT, mask_BT)
        if config.whiten_advantages:
            advantage_BT = np.asarray(masked_whiten(found, mask))
        batches = [
            batch
            for i in range(config.num_iterations)
            for batch in self._value_batches(step, i, experience, value_BT, return_BT)
        ]
        said |= gathered([self.cluster.update_critic(batch) for batch in batches])
        if step < config.critic_warmup:
            return said | gathered(compared(self._trainers_batches(step, experience, scores)))
        return said | self._update_actor(step, experience, scores, advantage_BT)

    def _values(self, step: int, experience: Experience) -> np.ndarray:
        """The critic's value before every token, before the first update of the step; 0 beyond the sampled tokens."""
        rollouts = experience.rollouts
        blank_BT = np.zeros(rollouts.tokens_BT.shape, np.float32)
        value_BT = blank_BT.copy()
        for chosen in self._mini_batches(step, 0, len(rollouts.length_B)):
            placement = packing.place_samples(rollouts, chosen, self._critic_shape)
            batch = packing.pack_values(
                placement,
                tokens_BT=rollouts.tokens_BT[chosen],
                mask_BT=rollouts.mask_BT[chosen],
                value_BT=blank_BT[chosen],
                return_BT=blank_BT[chosen],
            )
            value_BT[chosen] = packing.unpack(placement, self._critic.values(batch), len(value_BT[0]))
        return np.where(rollouts.mask_BT > 0, value_BT, 0.0).astype(np.float32)

    def _trainers_batches(self, step: int, experience: Experience, scores: Scores) -> list[TrainBatch]:
        """The batches of a step's first pass, their old log-probabilities the trainer's; advantages are 0."""
        batches = self._pass(step, 0, experience, scores, np.zeros(scores.old_logprob_BT.shape, np.float32))
        if self._old == "trainer":
            return batches
        score = self.cluster.actor_logprobs
        return [dataclasses.replace(batch, old_logprob_ABT=score(batch)) for batch in batches]

    def _value_batches(
        self, step: int, iteration: int, experience: Experience, value_BT: np.ndarray, return_BT: np.ndarray
    ) -> list[CriticBatch]:
        rollouts = experience.rollouts
        mask_BT = self._config.loss_mask(rollouts)
        return [
            packing.pack_values(
                packing.place_samples(rollouts, chosen, self._critic_shape),
                tokens_BT=rollouts.tokens_BT[chosen],
                mask_BT=mask_BT[chosen],
                value_BT=value_BT[chosen],
                return_BT=return_BT[chosen],
            )
            for chosen in self._mini_batches(step, iteration, len(rollouts.length_B))
        ]

    def _layouts(self) -> list[tuple[packing.PackShape, Mesh]]:
        return [*super()._layouts(), (self._critic_shape, self._critic.mesh)]

    def watched(self) -> Sequence[tuple[str, str]]:
        reward, kl, *others = super().watched()
        return (reward, kl, ("critic/explained_variance", "critic"), *others)


class PPOTrainerParts(TrainerSide, PPOParts):
    """The loop's parts for PPO on a trainer host."""


class PPOLearner(GRPOLearner):
    """Trains an RLCluster's actor and critic with a PPOConfig and reward functions."""

    parts_class = PPOParts
    trainer_parts_class = PPOTrainerParts  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        rl_cluster: RLCluster,
        ppo_config: PPOConfig,
        reward_fns: Callable | str | Sequence[Callable | str] = (),
        metric_fns: Sequence[MetricFn] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        reward_config: RewardConfig | None = None,
        pod: Pod | None = None,
    ):
        """Makes the critic where the cluster has none; nothing runs yet. Arguments as in GRPOLearner."""
        super().__init__(
            rl_cluster,
            ppo_config,
            reward_fns,
            metric_fns,
            data_shuffle_seed,
            reward_config=reward_config,
            pod=pod,
        )
        rl_cluster.make_critic()


def _spread(
    value_BT: np.ndarray, return_BT: np.ndarray, advantage_BT: np.ndarray, mask_BT: np.ndarray
) -> dict[str, Any]:
    """How well the values foretold the returns (1: exactly, 0: no better than a constant), and the advantages."""
    keep_BT = mask_BT > 0
    left = float(np.var((return_BT - value_BT)[keep_BT]))
    spread = float(np.var(return_BT[keep_BT]))
    return {
        "critic/explained_variance": 1.0 - left / spread if spread > 0 else 0.0,
        "critic/advantage_abs": float(np.abs(advantage_BT[keep_BT]).mean()) if keep_BT.any() else 0.0,
    }
