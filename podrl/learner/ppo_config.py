"""PPOConfig: proximal policy optimisation with a critic, under Tunix's field names where it has one."""

import dataclasses
import math
from typing import Any

from podrl.algorithms.kl import canonical_mode as canonical_kl
from podrl.algorithms.presets import preset
from podrl.config import refuses
from podrl.learner.settings import AlgorithmConfig


@refuses(
    {
        "data_shuffle_seed": "the order of prompts follows --config.data.seed.",
        "mini_batch_size": "say trainer.mini_batch_size (RLTrainingConfig): sequences per update.",
        "vf_coef": "the critic has an optimizer of its own: say trainer.critic_learning_rate.",
    }
)
@dataclasses.dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """The algorithm. The first group has Tunix's names and defaults; the rest is podrl's.

    Attributes:
      algo_variant: 'ppo'.
      advantage_estimator: 'gae'.
      policy_loss_fn: see PolicyLoss; 'ppo' is the clipped ratio.
      reward_manager: 'sequence-level': one reward for a completion, on its last token.
      kl_clamp_value: bound on a token's KL; None for none.
      value_loss_fn: 'ppo': squared error, clipped around the values before the update.
      num_iterations: passes over each batch of samples, of the critic and of the actor.
      gamma, gae_lambda: discount and lambda of GAE, per sampled token.
      beta: coefficient of the KL to the reference policy in the reward; 0 for none (no reference is kept then).
      epsilon, epsilon_low, epsilon_high, epsilon_c: clip ranges of the ratio; see PolicyLoss.
      entropy_coef: weight of the entropy bonus; None is 0.
      clip_range_value: how far a value may move in one step, reward units.
      kl_method: estimator of the KL in the reward; see podrl.algorithms.kl.

      num_generations: samples per prompt; the critic needs no group.
      loss_agg_mode: how token losses become one number, the critic's too.
      critic_warmup: first steps of the run, in which only the critic learns.
      whiten_advantages: advantages are scaled to mean 0 and variance 1 over the batch's tokens.
      whiten_rewards: token rewards, KL included, are scaled to variance 1 over the batch's tokens before GAE.
      Others: see AlgorithmConfig.
    """

    section = "ppo"

    algo_variant: str = "ppo"
    advantage_estimator: str = "gae"
    policy_loss_fn: str = "ppo"
    reward_manager: str = "sequence-level"
    kl_clamp_value: float | None = None
    value_loss_fn: str = "ppo"
    num_iterations: int = 1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    entropy_coef: float | None = None
    clip_range_value: float = 0.2
    kl_method: str = "low_var_kl"

    num_generations: int = 1
    loss_agg_mode: str = "token-mean"
    critic_warmup: int = 0
    whiten_advantages: bool = True
    whiten_rewards: bool = False

    def __post_init__(self):
        for name, only in (
            ("algo_variant", ("ppo",)),
            ("advantage_estimator", ("gae",)),
            ("value_loss_fn", ("ppo",)),
            ("reward_manager", ("sequence-level",)),
        ):
            if getattr(self, name) not in only:
                hint = ": group estimators need no critic, say algorithm=grpo" if name == "advantage_estimator" else ""
                raise ValueError(f"ppo.{name}={getattr(self, name)!r} must be {' or '.join(map(repr, only))}{hint}.")
        self.check()
        canonical_kl(self.kl_method, key="ppo.kl_method")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"ppo.beta={self.beta} must be a finite number, 0 or above.")
        if not self.clip_range_value > 0:
            raise ValueError(f"ppo.clip_range_value={self.clip_range_value} must be above 0; use inf for no clipping.")
        if self.critic_warmup < 0:
            raise ValueError(f"ppo.critic_warmup={self.critic_warmup} must be at least 0 steps.")

    def reward_kl(self) -> tuple[float, str]:
        return self.beta, self.kl_method

    def kl_coefs(self) -> dict[str, float]:
        return {"beta": self.beta}

    def loss_fields(self) -> dict[str, Any]:
        # The KL is in the reward, so none is in the loss.
        return super().loss_fields() | {"beta": 0.0, "entropy_coef": self.entropy_coef or 0.0}

    def describe(self, max_tokens: int) -> list[str]:
        lines = [
            f"critic: max((v - R)^2, (clip(v, v_old -+ {self.clip_range_value:g}) - R)^2) / 2, {self.loss_agg_mode}",
            f"advantages whitened over the batch's tokens: {'yes' if self.whiten_advantages else 'no'}",
        ]
        if self.whiten_rewards:
            lines.append("token rewards scaled to variance 1 over the batch's tokens")
        if self.critic_warmup:
            lines.append(f"only the critic learns in the first {self.critic_warmup} steps")
        return [*super().describe(max_tokens), *lines]


def preset_fields(name: str) -> dict[str, Any]:
    """Fields of PPOConfig that an algorithm's preset sets.

    Raises:
      ValueError: an unknown preset.
    """
    chosen = preset(name)
    learner = dict(chosen.learner)
    fields = {**chosen.advantage, **chosen.loss}
    fields |= {"beta": learner.pop("kl_in_reward", 0.0), "kl_method": learner.pop("kl_reward_mode", "low_var_kl")}
    return fields | learner
