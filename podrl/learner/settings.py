"""What the configurations of all algorithms share: sampling of groups, shaping of rewards, KL control, bounds."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from podrl.algorithms.aggregate import SCALED_MODES, canonical_mode
from podrl.algorithms.estimator import AdvantageEstimator
from podrl.algorithms.kl import AdaptiveKL
from podrl.algorithms.policy_loss import PolicyLoss
from podrl.algorithms.shaping import overlong_penalty
from podrl.types import STOP_LENGTH, Rollouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Fields that GRPOConfig and PPOConfig have in common, none of them Tunix's.

    Attributes:
      loss_agg_scale: length the scale modes divide by, tokens; None is rollout.max_tokens_to_generate.
      sampler_correction, correction_low, correction_high: see podrl.algorithms.policy_loss.
      old_logprob: where the ratio's denominator comes from. 'current': the policy itself, exact when a fresh batch
        makes one update. 'trainer': a forward pass before the first update. 'sampler': what the engine reported.
        'auto': 'sampler' for stale samples, 'trainer' for several updates or a KL in the reward, else 'current'.
      max_staleness: how many updates older than the trainer the sampling policy may be; 0 is strictly on-policy.
      dynamic_sampling: groups whose rewards are all equal are replaced by groups of further prompts (DAPO).
      dynamic_sampling_batches: batches of prompts a step sets aside with dynamic sampling, its own included. What is
        not needed is passed over, so the data position never depends on results. At least 2.
      overlong_shaping: completions lose reward over the last `overlong_buffer` tokens before the limit (DAPO).
      overlong_buffer: those tokens; None is a fifth of rollout.max_tokens_to_generate.
      overlong_penalty: reward lost at the limit.
      overlong_filter: completions cut off by the limit leave the loss; their rewards still count in their groups.
      no_stop_reward: reward of a completion that the limit cut off, in place of its own; None for its own.
      kl_target: KL to the reference per token, nats, that its coefficient is steered to, be it in the loss or in the
        reward; None keeps the coefficient fixed.
      kl_horizon: samples over which the coefficient moves by at most a fifth.
      mismatch_bound: mean |log-probability of the trainer - of the sampler| per token, nats, above which a step warns.
      mismatch_patience: steps in a row above the bound after which the run stops; 0 only warns.
    """

    section: ClassVar[str] = "grpo"

    loss_agg_scale: float | None = None
    sampler_correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None
    old_logprob: Literal["auto", "current", "trainer", "sampler"] = "auto"
    max_staleness: int = 0
    dynamic_sampling: bool = False
    dynamic_sampling_batches: int = 3
    overlong_shaping: bool = False
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0
    overlong_filter: bool = False
    no_stop_reward: float | None = None
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    mismatch_bound: float = 0.2
    mismatch_patience: int = 5

    def check(self) -> None:
        """Raises ValueError for settings of this class that do not fit together; subclasses call it."""
        name = self.section
        config: Any = self
        if config.num_generations < 1 or config.num_iterations < 1 or self.max_staleness < 0:
            raise ValueError(
                f"{name}.num_generations={config.num_generations} and {name}.num_iterations={config.num_iterations} "
                f"must be at least 1, {name}.max_staleness={self.max_staleness} at least 0."
            )
        if self.dynamic_sampling and config.num_generations < 2:
            raise ValueError(
                f"{name}.dynamic_sampling=True needs {name}.num_generations of at least 2, not "
                f"{config.num_generations}: a single sample never differs from its group."
            )
        if self.dynamic_sampling_batches < 2:
            raise ValueError(
                f"{name}.dynamic_sampling_batches={self.dynamic_sampling_batches} must be at least 2: the step's own "
                "batch and what its groups are replaced from."
            )
        if not self.overlong_penalty >= 0 or (self.overlong_buffer is not None and self.overlong_buffer < 1):
            raise ValueError(
                f"{name}.overlong_penalty={self.overlong_penalty} must be 0 or more and {name}.overlong_buffer="
                f"{self.overlong_buffer} at least 1 token, or None."
            )
        if self.no_stop_reward is not None and not math.isfinite(self.no_stop_reward):
            raise ValueError(f"{name}.no_stop_reward={self.no_stop_reward} must be a finite number, or None.")
        if not self.mismatch_bound > 0 or self.mismatch_patience < 0:
            raise ValueError(
                f"{name}.mismatch_bound={self.mismatch_bound} must be above 0 (inf never warns) and "
                f"{name}.mismatch_patience={self.mismatch_patience} at least 0 (0 never stops)."
            )
        if self.kl_target is not None:
            self._check_steered(self.kl_target)
            AdaptiveKL(self.kl_target, self.kl_horizon)
        self.estimator()
        self.policy_loss(max_tokens=1)  # refuses what the loss cannot do; the limit plays no part in that

    def _check_steered(self, target: float) -> None:
        """Raises ValueError unless the KL is in exactly one place."""
        coefs = self.kl_coefs()
        used = [f"{self.section}.{field}={coef:g}" for field, coef in coefs.items() if coef > 0]
        if not used:
            raise ValueError(
                f"{self.section}.kl_target={target} steers the coefficient of the KL to the reference, and there is "
                f"none: give it a start above 0 ({' or '.join(f'{self.section}.{field}' for field in coefs)})."
            )
        if len(used) > 1:
            raise ValueError(
                f"{self.section}.kl_target={target} steers one coefficient, but the KL to the reference is in two "
                f"places: set {' or '.join(used)} to 0."
            )

    # What the learner asks.

    def reward_kl(self) -> tuple[float, str]:
        """(coefficient, estimator) of the KL in the reward; 0 for none."""
        raise NotImplementedError

    def kl_coefs(self) -> dict[str, float]:
        """Coefficients of the KL to the reference by the fields that set them, in the loss or in the reward."""
        raise NotImplementedError

    def estimator(self) -> AdvantageEstimator:
        """The advantage these settings describe."""
        return AdvantageEstimator(**shared(self, AdvantageEstimator), section=self.section)

    def policy_loss(self, max_tokens: int) -> PolicyLoss:
        """The loss these settings describe; `max_tokens` is rollout.max_tokens_to_generate."""
        fields = self.loss_fields()
        if canonical_mode(fields["loss_agg_mode"], key=f"{self.section}.loss_agg_mode") in SCALED_MODES:
            fields["loss_agg_scale"] = self.loss_agg_scale or float(max_tokens)
        return PolicyLoss(**fields, section=self.section)

    def loss_fields(self) -> dict[str, Any]:
        """Fields of PolicyLoss."""
        return shared(self, PolicyLoss)

    def old_source(self, updates_per_step: int) -> str:
        """'current', 'trainer' or 'sampler', with 'auto' decided."""
        if self.old_logprob != "auto":
            return self.old_logprob
        if self.max_staleness:
            return "sampler"
        return "current" if updates_per_step == 1 and not self.reward_kl()[0] else "trainer"

    def warnings(self, updates_per_step: int) -> list[str]:
        """Settings that are legal and probably not meant, the loss's included, one sentence each."""
        name, old = self.section, self.old_source(updates_per_step)
        found = list(self.policy_loss(max_tokens=1).warnings())
        if old == "sampler" and self.sampler_correction != "none":
            source = f"{name}.old_logprob={self.old_logprob!r}, {name}.max_staleness={self.max_staleness}"
            found.append(
                f"{name}.sampler_correction={self.sampler_correction!r} does nothing: the ratio starts from the "
                f"sampler already ({source}), so the correction is 1. Set {name}.old_logprob='trainer', or "
                f"{name}.sampler_correction='none'."
            )
        if old == "current" and updates_per_step > 1:
            found.append(
                f"{name}.old_logprob='current' with {updates_per_step} updates per step holds the ratio at 1 in all of "
                f"them, so nothing is clipped: set {name}.old_logprob='auto', or make one update per step "
                f"({name}.num_iterations=1, trainer.mini_batch_size=None)."
            )
        return found

    @property
    def prompt_batches(self) -> int:
        """Batches of prompts that a step takes from the data."""
        return self.dynamic_sampling_batches if self.dynamic_sampling else 1

    def shaped(self, reward_B: Float[np.ndarray, " B"], rollouts: Rollouts, limit: int) -> Float[np.ndarray, " B"]:
        """Rewards after what the length of a completion does to them; `limit` is rollout.max_tokens_to_generate."""
        if self.no_stop_reward is not None:
            reward_B = np.where(rollouts.stop_B == STOP_LENGTH, self.no_stop_reward, reward_B)
        if self.overlong_shaping:
            buffer = max(limit // 5, 1) if self.overlong_buffer is None else self.overlong_buffer
            length_B: Any = (rollouts.mask_BT > 0).sum(axis=1)
            penalty_B = overlong_penalty(length_B, limit=limit, buffer=buffer, penalty=self.overlong_penalty)
            reward_B = reward_B + np.asarray(penalty_B)
        return reward_B

    def loss_mask(self, rollouts: Rollouts) -> Float[np.ndarray, "B T"]:
        """1 on the tokens that count in the loss."""
        if not self.overlong_filter:
            return rollouts.mask_BT
        return np.where((rollouts.stop_B == STOP_LENGTH)[:, None], 0.0, rollouts.mask_BT).astype(np.float32)

    def describe(self, max_tokens: int) -> list[str]:
        """What is done beside the loss, one plain line each, for the dry run."""
        lines = []
        coef, mode = self.reward_kl()
        if coef:
            lines.append(f"reward per token: - {coef:g} KL to the reference ({mode})")
        if self.kl_target is not None:
            lines.append(
                f"that coefficient of the KL is where it starts: it is steered to a KL of {self.kl_target:g} nats per "
                "token"
            )
        if self.dynamic_sampling:
            lines.append(
                f"dynamic sampling: groups of equal rewards are replaced from {self.dynamic_sampling_batches - 1} "
                "further batches of prompts"
            )
        if self.overlong_shaping:
            buffer = max(max_tokens // 5, 1) if self.overlong_buffer is None else self.overlong_buffer
            lines.append(
                f"overlong shaping: 0 up to {max_tokens - buffer} tokens, then down to -{self.overlong_penalty:g} at "
                f"{max_tokens}"
            )
        if self.overlong_filter:
            lines.append(f"overlong filter: completions cut off at {max_tokens} tokens leave the loss")
        if self.no_stop_reward is not None:
            lines.append(f"completions cut off at {max_tokens} tokens get the reward {self.no_stop_reward:g}")
        return lines


def shared(config: Any, cls: type) -> dict[str, Any]:
    """The values of the fields that a configuration has in common with `cls`."""
    mine = {f.name for f in dataclasses.fields(config)}
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if f.name in mine}
