"""Weights, advantages and counts of samples whose sources in a mixture have different settings."""

from typing import Any

import numpy as np

from podrl.algorithms.policy_loss import PolicyLoss
from podrl.learner.mini_batches import Update
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.mappings import Metrics
from podrl.types import SOURCE, Experience


class SourceWeights:
    """The settings `PER_SOURCE` (podrl.learner.settings), one value for all samples or one value per sample.

    Attributes:
      mixed: True if sources have different settings.
    """

    def __init__(self, config: GRPOConfig | PPOConfig):
        self._config, self.mixed = config, len(config.parts) > 1
        # Estimators take numpy as well as jax arrays, and return the same kind.
        self._estimators: list[Any] = [part.estimator() for part in config.parts]

    def of(self, name: str, experience: Experience, chosen: np.ndarray | slice = slice(None)) -> Any:
        """Reads a setting: one number, or, if sources differ, one number per chosen sample, (b, 1)."""
        if not self.mixed:
            return getattr(self._config, name)
        return self._config.of_samples(lambda part: getattr(part, name), experience)[chosen, None]

    def advantages(self, experience: Experience, rewards: np.ndarray) -> np.ndarray:
        """Computes the advantages from token rewards, (B, T), by the estimator of each sample's source."""
        rollouts = experience.rollouts
        if not self.mixed:
            (estimator,) = self._estimators
            return estimator(rewards, experience.greedy_reward_B, rollouts.mask_BT, group_B=rollouts.group_B)
        part_B, advantage_BT = self._config.part_of(experience), np.zeros(rewards.shape, np.float64)
        for number, (part, estimator) in enumerate(zip(self._config.parts, self._estimators, strict=True)):
            rows_B = np.flatnonzero(part_B == number)
            if len(rows_B) and part.reward_coef:
                chosen = (x[rows_B] for x in (rewards, experience.greedy_reward_B, rollouts.mask_BT))
                advantage_BT[rows_B] = estimator(*chosen, group_B=rollouts.group_B[rows_B])
        return advantage_BT

    def of_rewards(self, update: Update, loss: PolicyLoss) -> tuple[Any, float]:
        """Returns `reward_coef` of an update's samples, and a factor that corrects the divisor of the loss.

        The loss is divided by the tokens (or sequences, as `loss_agg_mode` says) of all samples. With the factor, the
        rewards' part is divided by the tokens (or sequences) of the samples that learn from rewards. If all samples
        have the same settings, both numbers are 1, because the advantages already include the weight.
        """
        if not self.mixed:
            return 1.0, 1.0
        weight_B1, mask_BT = self.of("reward_coef", update.experience, update.chosen), update.mask_BT
        return weight_B1, loss.divisor(mask_BT) / loss.divisor(mask_BT * (weight_B1 > 0))

    def metrics(self, experience: Experience, teachable_BT: np.ndarray) -> Metrics:
        """Counts the tokens of each part of a mixture's loss, and describes the sources with settings of their own.

        These sources have metrics of their samples, tokens and mean reward. Without a mixture there are no metrics.

        Args:
          experience: the batch.
          teachable_BT: 1 on the tokens that a teacher may teach.
        """
        if not self.mixed:
            return {}
        config, rollouts = self._config, experience.rollouts
        counted_BT = config.counted(experience)
        found = {"rl": ("reward_coef", counted_BT), "teacher": ("teacher_coef", teachable_BT)}
        found |= {"ce": ("observation_coef", config.observed(experience))}
        metrics = {
            f"loss/tokens/{name}": float(((self.of(key, experience) > 0) * x_BT).sum())
            for name, (key, x_BT) in found.items()
        }
        names_B = np.array([str(name) for name in rollouts.prompts.fields[SOURCE]])[rollouts.group_B]
        for name in config.number_of:
            own_B = names_B == name
            reward_B = experience.reward_B[own_B & experience.rewarded()]
            metrics[f"source/{name}/samples"] = float(own_B.sum())
            metrics[f"source/{name}/reward"] = float(reward_B.mean()) if len(reward_B) else 0.0
            metrics[f"source/{name}/tokens"] = float(counted_BT[own_B].sum())
        return metrics
