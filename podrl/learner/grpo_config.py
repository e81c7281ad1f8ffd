"""GRPOConfig: which member of the GRPO family is trained, under Tunix's field names where it has one."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float

from podrl.algorithms import advantages
from podrl.algorithms.policy_loss import PolicyLoss
from podrl.config import refuses

ESTIMATORS = ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline")


@refuses(
    {
        "data_shuffle_seed": "the order of prompts follows --config.data.seed.",
        "use_rollout_logps": "say grpo.old_logprob='sampler'.",
        "off_policy_steps": "say grpo.max_staleness=N: batches are then sampled by a policy at most N updates old.",
    }
)
@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """The algorithm. The first group has Tunix's names and defaults; the rest is podrl's.

    Attributes:
      algo_variant: 'grpo'.
      advantage_estimator: 'grpo' (group-relative), 'rloo', 'opo', 'gpg' or 'reinforce_pp_baseline'.
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
      advantage_scale: 'std' or 'none' (Dr. GRPO).
      advantage_ddof: 1 for the sample standard deviation, 0 for the population's.
      advantage_eps: added to the standard deviation.
      loss_agg_scale: length the scale modes divide by, tokens; None is rollout.max_tokens_to_generate.
      sampler_correction: importance weight between sampler and trainer; see podrl.algorithms.corrections.
      correction_low, correction_high: its bounds; None for the usual ones.
      old_logprob: where the ratio's denominator comes from. 'current': the policy itself, exact when a fresh batch
        makes one update. 'trainer': a forward pass before the first update. 'sampler': what the engine reported.
        'auto': 'current' for one update on fresh samples, 'trainer' for several, 'sampler' for stale samples.
      max_staleness: how many updates older than the trainer the sampling policy may be; 0 is strictly on-policy.
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
    loss_agg_scale: float | None = None
    sampler_correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None
    old_logprob: Literal["auto", "current", "trainer", "sampler"] = "auto"
    max_staleness: int = 0

    def __post_init__(self):
        for name, only in (("algo_variant", ("grpo",)), ("reward_manager", ("sequence-level",))):
            if getattr(self, name) not in only:
                raise ValueError(f"grpo.{name}={getattr(self, name)!r} must be {' or '.join(map(repr, only))}.")
        if self.loss_algo not in ("grpo", "gspo-token"):
            raise ValueError(f"grpo.loss_algo={self.loss_algo!r} must be 'grpo' or 'gspo-token'.")
        if self.advantage_estimator not in ESTIMATORS:
            raise ValueError(
                f"grpo.advantage_estimator={self.advantage_estimator!r} must be one of {', '.join(ESTIMATORS)}."
            )
        if self.num_generations < 1 or self.num_iterations < 1 or self.max_staleness < 0:
            raise ValueError(
                f"grpo.num_generations={self.num_generations} and grpo.num_iterations={self.num_iterations} must be at "
                f"least 1, grpo.max_staleness={self.max_staleness} at least 0."
            )
        if self.num_generations == 1 and self.advantage_estimator in ("grpo", "rloo"):
            raise ValueError(
                "grpo.num_generations=1 gives every sample the advantage 0, because a group of one has nothing to be "
                "compared with: use at least 2."
            )

    def policy_loss(self, max_tokens: int) -> PolicyLoss:
        """The loss these settings describe; `max_tokens` is rollout.max_tokens_to_generate."""
        scaled = self.loss_agg_mode in ("sequence-mean-token-scale", "token-sum-scale")
        return PolicyLoss(
            policy_loss_fn="gspo_token" if self.loss_algo == "gspo-token" else self.policy_loss_fn,
            epsilon=self.epsilon,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            epsilon_c=self.epsilon_c,
            beta=self.beta,
            kl_loss_mode=self.kl_loss_mode,
            kl_clamp_value=self.kl_clamp_value,
            entropy_coef=self.entropy_coef,
            loss_agg_mode=self.loss_agg_mode,
            loss_agg_scale=(self.loss_agg_scale or float(max_tokens)) if scaled else None,
            sampler_correction=self.sampler_correction,
            correction_low=self.correction_low,
            correction_high=self.correction_high,
        )

    def advantage(
        self, reward_B: Float[np.ndarray, " B"], mask_BT: Float[np.ndarray, "B T"]
    ) -> Float[np.ndarray, " B"] | Float[np.ndarray, "B T"]:
        """Advantage of every sample, or of every token where the estimator works on tokens; mask is 1 on samples."""
        size = self.num_generations
        match self.advantage_estimator:
            case "rloo":
                return advantages.leave_one_out(reward_B, group_size=size)
            case "opo":
                return advantages.opo(reward_B, mask_BT.sum(axis=1), group_size=size)
            case "gpg":
                return advantages.gpg(reward_B, group_size=size)
            case "reinforce_pp_baseline":
                return advantages.reinforce_plus_plus_baseline(reward_B, mask_BT, group_size=size)
            case _:
                return advantages.group_relative(
                    reward_B,
                    group_size=size,
                    scale=self.advantage_scale,
                    ddof=self.advantage_ddof,
                    eps=self.advantage_eps,
                )

    def old_source(self, updates_per_step: int) -> str:
        """'current', 'trainer' or 'sampler', with 'auto' decided."""
        if self.old_logprob != "auto":
            return self.old_logprob
        if self.max_staleness:
            return "sampler"
        return "current" if updates_per_step == 1 else "trainer"
