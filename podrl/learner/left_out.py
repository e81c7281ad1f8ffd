"""Counts the samples that train the policy, and, by reason, the samples that do not."""

import numpy as np
from jaxtyping import Float, Int

from podrl import groups
from podrl.learner.settings import AlgorithmConfig, PPOConfig
from podrl.types import Experience, LeftOut


def left_out(
    config: AlgorithmConfig, step: int, experience: Experience, advantage_BT: Float[np.ndarray, "B T"]
) -> Int[np.ndarray, " B"]:
    """Returns the LeftOut code of each sample of a batch; 0 for samples with a weight in the policy's loss.

    Args:
      config: settings of the algorithm; its `masked_out` decides which samples the loss sees.
      step: number of steps done before this batch trains.
      experience: the batch.
      advantage_BT: advantages of the sampled tokens.
    """
    masked_B = config.masked_out(experience)
    equal_B = groups.spread(experience.reward_B, experience.rollouts.group_B) == 0
    idle_B = ~((advantage_BT != 0) & (experience.rollouts.mask_BT > 0)).any(axis=1)
    idle_B &= config.of_samples(lambda part: part.advantage_alone, experience)
    alone_B = config.of_samples(lambda part: part.policy_alone, experience)
    warmup = config.critic_warmup if isinstance(config, PPOConfig) else 0
    found: dict[LeftOut, np.ndarray] = {
        LeftOut.STALE: (experience.lost_B == LeftOut.STALE) & alone_B,
        LeftOut.CRITIC_WARMUP: np.full(len(masked_B), step < warmup),
        LeftOut.EQUAL_REWARDS: idle_B & equal_B,
        LeftOut.ZERO_ADVANTAGE: idle_B,
    }
    return np.select([masked_B != LeftOut.NOT, *found.values()], [masked_B, *found], LeftOut.NOT)


def counted(left_out_B: Int[np.ndarray, " B"]) -> dict[str, float]:
    """Counts the samples with a weight in the loss, and for each reason the samples without a weight, if any."""
    reasons = {
        f"loss/left_out/{reason.name.lower()}": float((left_out_B == reason).sum())
        for reason in LeftOut
        if reason and (left_out_B == reason).any()
    }
    return {"loss/samples": float((left_out_B == LeftOut.NOT).sum()), **reasons}
