"""Finds the settings under which a run cannot change its weights, so that the run can warn when it begins."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from podrl.engine.config import RolloutConfig
from podrl.environments.config import EnvironmentConfig
from podrl.learner.settings import AlgorithmConfig, GRPOConfig, PPOConfig
from podrl.rewards.compose import RewardConfig
from podrl.trainer.config import RLTrainingConfig

# Advantage estimators that give every sample of a group the advantage 0 if the group's samples, and for remax the
# greedy sample, are all the same text.
_ALIKE = ("grpo", "rloo", "opo", "gpg", "pass_at_k", "remax", "reinforce_plus_plus_baseline")


def no_update_reasons(training: RLTrainingConfig) -> list[str]:
    """Lists the reasons why no update can change the model, one sentence for each setting; empty if there is none."""
    if training.actor_optimizer is None and _zero(training.learning_rate):
        return [
            f"trainer.learning_rate={training.learning_rate:g} is 0 in float32 in every update, so this run does not "
            "change the model: set it above 0 unless that is what you want."
        ]
    return []


def no_update_reasons_on_samples(
    training: RLTrainingConfig,
    algo: AlgorithmConfig,
    rollout: RolloutConfig,
    reward: RewardConfig,
    environment: EnvironmentConfig,
    *,
    steps: int | None,
) -> list[str]:
    """Lists the reasons why a run on samples cannot change the policy or the critic, one sentence for each setting.

    The list leaves out settings that nobody can want and that their own classes refuse: groups of one sample if the
    advantage is then always 0, a run of no steps, adapters that match no parameter.

    Args:
      training, algo, rollout, reward, environment: the run's settings.
      steps: number of steps of the run; None if it is not known.
    """
    found = no_update_reasons(training)
    if isinstance(algo, PPOConfig):
        if steps is not None and algo.critic_warmup >= steps:
            found.append(
                f"ppo.critic_warmup={algo.critic_warmup} lasts for all {steps} steps of this run, so only the critic "
                f"learns and the policy stays as it is: set it below {steps}, or raise trainer.max_steps."
            )
        if training.critic_optimizer is None and _zero(training.critic_learning_rate):
            found.append(
                f"trainer.critic_learning_rate={training.critic_learning_rate:g} is 0 in float32, so the critic stays "
                "as it was made, and advantages come from its first values: set it above 0."
            )
    elif isinstance(algo, GRPOConfig) and not (algo.own_loss or algo.own_advantage or algo.entropy_coef):
        found += _without_advantage(algo, rollout, reward, environment)
    return found


def _without_advantage(
    algo: GRPOConfig, rollout: RolloutConfig, reward: RewardConfig, environment: EnvironmentConfig
) -> list[str]:
    """Lists the reasons why no sample can have an advantage.

    A KL to the reference does not count as a reason to learn: a policy that begins at the reference stays there.
    """
    if algo.distillation is not None or algo.observed_weight:
        return []
    weights = list(reward.weights or [1.0] * len(reward.fns)) + [1.0] * len(reward.named)
    weights += [reward.model_weight] * bool(reward.model) + [environment.reward_weight] * environment.used
    found, shaped = [], algo.overlong_shaping or algo.no_stop_reward
    if not any(weights) and not shaped:
        keys = {"reward.weights": bool(reward.fns), "reward.model_weight": bool(reward.model)}
        keys["env.reward_weight"] = environment.used
        named = " and ".join(key for key, used in keys.items() if used)
        found.append(
            f"All rewards have the weight 0, so no sample has an advantage and the policy stays as it is: set {named}."
        )
    alike = {
        f"rollout.temperature={rollout.temperature:g}": rollout.temperature == 0,
        f"rollout.top_k={rollout.top_k}": rollout.top_k == 1,
        f"rollout.min_p={rollout.min_p:g}": rollout.min_p == 1,
    }
    causes: Sequence[Any] = [name for name, true in alike.items() if true]
    if causes and algo.estimator().kind in _ALIKE and not environment.used:
        found.append(
            f"{' and '.join(causes)}: every sample of a prompt is the most likely one, so all have the same reward, no "
            "sample has an advantage and the policy stays as it is: sample with a temperature and more than one token."
        )
    return found


def _zero(rate: float) -> bool:
    """True for a rate that float32 arithmetic treats as 0."""
    return rate < float(np.finfo(np.float32).tiny)
