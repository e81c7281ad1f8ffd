"""GRPOConfig: which member of the GRPO family is trained, under Tunix's field names where it has one."""

import dataclasses
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float

from podrl.algorithms.aggregate import SCALED_MODES, canonical_mode
from podrl.algorithms.estimator import AdvantageEstimator
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import PolicyLoss
from podrl.algorithms.presets import preset
from podrl.config import refuses


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
      loss_agg_scale: length the scale modes divide by, tokens; None is rollout.max_tokens_to_generate.
      length_eps, tau_positive, tau_negative, cov_fraction, clip_cov_low, clip_cov_high, kl_cov_coef,
      sampler_correction, correction_low, correction_high: see podrl.algorithms.policy_loss.
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
    singleton: str = "zero"
    gamma: float = 1.0
    loss_agg_scale: float | None = None
    length_eps: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_fraction: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_coef: float = 1.0
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
        if self.num_generations < 1 or self.num_iterations < 1 or self.max_staleness < 0:
            raise ValueError(
                f"grpo.num_generations={self.num_generations} and grpo.num_iterations={self.num_iterations} must be at "
                f"least 1, grpo.max_staleness={self.max_staleness} at least 0."
            )
        estimator = self.estimator()
        if estimator.needs_critic or estimator.needs_greedy:
            raise ValueError(
                f"grpo.advantage_estimator={self.advantage_estimator!r} needs a critic or greedy completions, which "
                "the GRPO learner does not run: use one of the group estimators (grpo, rloo, opo, gpg, ...)."
            )
        if self.num_generations == 1 and estimator.kind in ("grpo", "rloo", "opo", "gpg", "pass_at_k"):
            raise ValueError(
                "grpo.num_generations=1 gives every sample the advantage 0, because a group of one has nothing to be "
                "compared with: use at least 2."
            )

    def estimator(self) -> AdvantageEstimator:
        """The advantage these settings describe."""
        return AdvantageEstimator(**_shared(self, AdvantageEstimator))

    def policy_loss(self, max_tokens: int) -> PolicyLoss:
        """The loss these settings describe; `max_tokens` is rollout.max_tokens_to_generate."""
        fields = _shared(self, PolicyLoss)
        if self.loss_algo == "gspo-token":
            fields["policy_loss_fn"] = "gspo_token"
        if canonical_mode(self.loss_agg_mode) in SCALED_MODES and self.loss_agg_scale is None:
            fields["loss_agg_scale"] = float(max_tokens)
        return PolicyLoss(**fields)

    def advantage(
        self, reward_B: Float[np.ndarray, " B"], mask_BT: Float[np.ndarray, "B T"]
    ) -> Float[np.ndarray, "B T"]:
        """Advantage of every sampled token; mask is 1 on samples."""
        estimator: Any = self.estimator()  # its functions take numpy as well as jax arrays, and answer in kind
        reward_BT = outcome_reward(cast(Any, reward_B), cast(Any, mask_BT))
        return estimator(reward_BT, np.zeros_like(reward_B), mask_BT, group_size=self.num_generations)

    def old_source(self, updates_per_step: int) -> str:
        """'current', 'trainer' or 'sampler', with 'auto' decided."""
        if self.old_logprob != "auto":
            return self.old_logprob
        if self.max_staleness:
            return "sampler"
        return "current" if updates_per_step == 1 else "trainer"


def preset_fields(name: str) -> dict[str, Any]:
    """Fields of GRPOConfig that an algorithm's preset sets.

    Raises:
      ValueError: an unknown preset, or one that asks for what the GRPO learner does not do.
    """
    chosen = preset(name)
    if chosen.learner:
        raise ValueError(
            f"algorithm={name!r} also needs {', '.join(sorted(chosen.learner))}, which the GRPO learner does not do "
            "yet: choose another preset, or set the fields of config.grpo one by one."
        )
    return {**chosen.advantage, **chosen.loss}


def _shared(config: GRPOConfig, cls: type) -> dict[str, Any]:
    """The values of the fields that GRPOConfig has in common with `cls`."""
    mine = {f.name for f in dataclasses.fields(config)}
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if f.name in mine}
