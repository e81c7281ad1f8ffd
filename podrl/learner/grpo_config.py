"""GRPOConfig: which member of the GRPO family is trained, under Tunix's field names where it has one."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from podrl.algorithms.kl import canonical_mode as canonical_kl
from podrl.algorithms.presets import preset
from podrl.config import refuses
from podrl.learner.settings import AlgorithmConfig


@refuses(
    {
        "data_shuffle_seed": "the order of prompts follows --config.data.seed.",
        "use_rollout_logps": "say grpo.old_logprob='sampler'.",
        "off_policy_steps": "say grpo.max_staleness=N: batches are then sampled by a policy at most N updates old.",
    }
)
@dataclasses.dataclass(frozen=True)
class GRPOConfig(AlgorithmConfig):
    """The algorithm. The first group has Tunix's names and defaults; the rest is podrl's.

    Attributes:
      algo_variant: 'grpo'.
      advantage_estimator: 'grpo' (group-relative), 'rloo', 'opo', ...; see podrl.algorithms.estimator.
      policy_loss_fn: see PolicyLoss; 'grpo' is the clipped ratio.
      reward_manager: 'sequence-level': one reward for a completion.
      kl_clamp_value: bound on a token's KL; None for none.
      loss_agg_mode: how token losses become one number; see podrl.algorithms.aggregate.
      loss_algo: 'grpo', or 'gspo-token' for the sequence ratio of GSPO.
      num_generations: G, samples per prompt.
      num_iterations: mu, passes over each batch of samples.
      beta: coefficient of the KL to the reference policy in the loss; 0 for none (no reference is kept then).
      kl_loss_mode: 'kl', 'mse_kl', 'low_var_kl' and more; see podrl.algorithms.kl.
      epsilon: clip range of the ratio.
      epsilon_high: upper side when it differs (clip-higher); None for epsilon.

      epsilon_low: lower side when it differs; None for epsilon.
      epsilon_c: dual clip; None for none.
      entropy_coef: weight of the entropy bonus.
      advantage_scale, advantage_ddof, advantage_eps, singleton, gamma: see podrl.algorithms.estimator.
      length_eps, tau_positive, tau_negative, cov_fraction, clip_cov_low, clip_cov_high, kl_cov_coef: see
        podrl.algorithms.policy_loss.
      kl_in_reward: coefficient of the KL to the reference policy in the reward; 0 for none.
      kl_reward_mode: its estimator; only its value counts, so k1 is the plain choice.
      Others: see AlgorithmConfig.
    """

    algo_variant: str = "grpo"
    advantage_estimator: str = "grpo"
    policy_loss_fn: str = "grpo"
    reward_manager: str = "sequence-level"
    kl_clamp_value: float | None = None
    loss_agg_mode: str = "sequence-mean-token-mean"
    loss_algo: str = "grpo"
    num_generations: int = 2
    num_iterations: int = 1
    beta: float = 0.04
    kl_loss_mode: str = "kl"
    epsilon: float = 0.2
    epsilon_high: float | None = None

    epsilon_low: float | None = None
    epsilon_c: float | None = None
    entropy_coef: float = 0.0
    advantage_scale: Literal["std", "none"] = "std"
    advantage_ddof: int = 1
    advantage_eps: float = 1e-6
    singleton: str = "zero"
    gamma: float = 1.0
    length_eps: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_fraction: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_coef: float = 1.0
    kl_in_reward: float = 0.0
    kl_reward_mode: str = "k1"

    def __post_init__(self):
        for name, only in (("algo_variant", ("grpo",)), ("reward_manager", ("sequence-level",))):
            if getattr(self, name) not in only:
                raise ValueError(f"grpo.{name}={getattr(self, name)!r} must be {' or '.join(map(repr, only))}.")
        if self.loss_algo not in ("grpo", "gspo-token"):
            raise ValueError(f"grpo.loss_algo={self.loss_algo!r} must be 'grpo' or 'gspo-token'.")
        self.check()
        canonical_kl(self.kl_reward_mode, key="grpo.kl_reward_mode")
        if not 0 <= self.kl_in_reward < math.inf:
            raise ValueError(f"grpo.kl_in_reward={self.kl_in_reward} must be a finite number, 0 or above.")
        estimator = self.estimator()
        if estimator.needs_critic:
            raise ValueError(
                f"grpo.advantage_estimator={self.advantage_estimator!r} needs a critic, which the GRPO learner "
                "lacks: set algorithm=ppo (PPOConfig, PPOLearner), or use a group estimator (grpo, rloo, opo, ...)."
            )
        if self.num_generations == 1 and estimator.needs_group:
            raw = "" if estimator.kind == "pass_at_k" else ", or grpo.singleton='raw' for the bare reward as advantage"
            raise ValueError(
                f"grpo.num_generations=1 with grpo.advantage_estimator={self.advantage_estimator!r} gives no sample an "
                "advantage other than 0, because a group of one has nothing to be compared with: use at least 2"
                f"{raw}."
            )

    def reward_kl(self) -> tuple[float, str]:
        return self.kl_in_reward, self.kl_reward_mode

    def kl_coefs(self) -> dict[str, float]:
        return {"beta": self.beta, "kl_in_reward": self.kl_in_reward}

    def loss_fields(self) -> dict[str, Any]:
        fields = super().loss_fields()
        return fields | ({"policy_loss_fn": "gspo_token"} if self.loss_algo == "gspo-token" else {})

    def advantage(
        self,
        reward_BT: Float[np.ndarray, "B T"],
        greedy_reward_B: Float[np.ndarray, " B"],
        mask_BT: Float[np.ndarray, "B T"],
    ) -> Float[np.ndarray, "B T"]:
        """Advantage of every sampled token; mask is 1 on samples."""
        estimator: Any = self.estimator()  # its functions take numpy as well as jax arrays, and answer in kind
        return estimator(reward_BT, greedy_reward_B, mask_BT, group_size=self.num_generations)


def preset_fields(name: str) -> dict[str, Any]:
    """Fields of GRPOConfig that an algorithm's preset sets.

    Raises:
      ValueError: an unknown preset.
    """
    chosen = preset(name)
    return {**chosen.advantage, **chosen.loss, **chosen.learner}
