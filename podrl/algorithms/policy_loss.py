"""The whole policy loss of a run: which surrogate, correction, KL, entropy and aggregation, composed and checked."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podrl.algorithms import aggregate as aggregation
from podrl.algorithms import kl, surrogates
from podrl.algorithms.corrections import CORRECTIONS, importance_weight
from podrl.algorithms.mismatch import mismatch
from podrl.algorithms.segments import masked, sequence_mean
from podrl.types import Mask, Ratio

# kind: formula of the per-token loss, with the fields of PolicyLoss filled in by `formula`.
KINDS = {
    "clip": "max(-r A, -clip(r, {low}, {high}) A)",
    "gspo": "max(-s A, -clip(s, {low}, {high}) A), s = exp(mean over the sequence of log r)",
    "gspo_token": "max(-s A, -clip(s, {low}, {high}) A), s = exp(mean over the sequence of log r), gradient per token",
    "cispo": "-sg(clip(r, {low}, {high})) A logprob",
    "sapo": "-(4 / tau) sigmoid(tau (r - 1)) A, tau = {tau_positive:g} where A > 0, else {tau_negative:g}",
    "gmpo": "-exp(mean over the sequence of log r) mean(A), log r clipped to [-{epsilon_low:g}, {epsilon_high:g}] "
    "on the side A pushes to",
    "clip_cov": "max(-r A, -clip(r, {low}, {high}) A), 0 on the max(1, {cov_fraction:g} of the) loss tokens of largest "
    "covariance of A and logprob in ({clip_cov_low:g}, {clip_cov_high:g})",
    "kl_cov": "-r A, + {kl_cov_coef:g} |log r| on the max(1, {cov_fraction:g} of the) loss tokens of largest "
    "covariance of A and logprob",
    "reinforce": "-A logprob",
}
ALIASES = {"grpo": "clip", "ppo": "clip", "gspo-token": "gspo_token", "gpg": "reinforce", "geo_mean": "gmpo"}
AGGREGATION_FORMULAS = {
    "token-mean": "sum over tokens / number of tokens",
    "sequence-mean-token-mean": "mean over sequences of (sum over tokens / tokens of the sequence)",
    "sequence-mean-token-sum": "mean over sequences of the sum over tokens",
    "sequence-mean-token-scale": "mean over sequences of (sum over tokens / {loss_agg_scale:g})",
    "token-sum-scale": "sum over tokens / {loss_agg_scale:g}",
}


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Settings of the policy loss; calling it gives the loss of a (micro-)batch and its metrics.

    Attributes:
      policy_loss_fn: clip (grpo, ppo), gspo, gspo_token, cispo, sapo, gmpo, clip_cov, kl_cov or reinforce (gpg).
      epsilon: how far the ratio may leave 1 on either side.
      epsilon_low: lower side when it differs; None for epsilon.
      epsilon_high: upper side when it differs (clip-higher); None for epsilon.
      epsilon_c: dual clip, the largest ratio that counts where the advantage is negative; None for none; `clip` only.
      tau_positive: SAPO's temperature where the advantage is positive.
      tau_negative: SAPO's temperature elsewhere.
      cov_fraction: share of the loss tokens that clip_cov and kl_cov single out.
      clip_cov_low: covariances below are left alone by clip_cov.
      clip_cov_high: covariances above are left alone by clip_cov.
      kl_cov_coef: weight of |log r| on the tokens kl_cov singles out.
      beta: coefficient of the KL to the reference in the loss; 0 for none.
      kl_loss_mode: estimator of that KL (`podrl.algorithms.kl`).
      kl_clamp_value: bound on the absolute value of a token's KL; None for none.
      entropy_coef: weight of the entropy bonus.
      loss_agg_mode: aggregation mode (`podrl.algorithms.aggregate`).
      loss_agg_scale: fixed length of the two scale modes, tokens; must be given for them.
      length_eps: added to sequence lengths; 1e-8 is verl's arithmetic.
      sampler_correction: none, tis, sequence_tis, icepop or geometric_mask (`podrl.algorithms.corrections`).
      correction_low: its lower bound; None for its usual value.
      correction_high: its upper bound; None for its usual value.
      section: config section that error messages name.
    """

    policy_loss_fn: str = "clip"
    epsilon: float = 0.2
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_fraction: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_coef: float = 1.0
    beta: float = 0.04
    kl_loss_mode: str = "kl"
    kl_clamp_value: float | None = None
    entropy_coef: float = 0.0
    loss_agg_mode: str = "sequence-mean-token-mean"
    loss_agg_scale: float | None = None
    length_eps: float = 0.0
    sampler_correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None
    section: str = "grpo"

    def __post_init__(self):
        key = self.section
        self._check(
            self.kind in KINDS, "policy_loss_fn", f"is not a policy loss: use one of {', '.join((*KINDS, *ALIASES))}"
        )
        aggregation.canonical_mode(self.loss_agg_mode, key=f"{key}.loss_agg_mode")
        kl.canonical_mode(self.kl_loss_mode, key=f"{key}.kl_loss_mode")
        self._check_clip()
        self._check_correction()
        for name in ("beta", "length_eps", "kl_cov_coef"):
            value = getattr(self, name)
            self._check(0 <= value < math.inf, name, "must be a finite number, 0 or above")
        self._check(math.isfinite(self.entropy_coef), "entropy_coef", "must be a finite number")
        for name in ("tau_positive", "tau_negative"):
            self._check(0 < getattr(self, name) < math.inf, name, "must be above 0")
        self._check(0 < self.cov_fraction <= 1, "cov_fraction", "must lie in (0, 1]")
        self._check(self.clip_cov_low < self.clip_cov_high, "clip_cov_low", f"must be below {key}.clip_cov_high")
        self._check(self.kl_clamp_value is None or self.kl_clamp_value > 0, "kl_clamp_value", "must be above 0 or None")
        if self.mode in aggregation.SCALED_MODES:
            given = self.loss_agg_scale is not None and 0 < self.loss_agg_scale < math.inf
            self._check(
                given, "loss_agg_scale", f"must be a length in tokens above 0 for {key}.loss_agg_mode={self.mode!r}"
            )
        self._check(
            self.kind != "gmpo" or self.mode == "sequence-mean-token-mean",
            "loss_agg_mode",
            "must be 'sequence-mean-token-mean' for gmpo, whose loss is one number per sequence",
        )

    def _check(self, holds: bool, name: str, requirement: str):
        if not holds:
            raise ValueError(f"{self.section}.{name}={getattr(self, name)!r} {requirement}.")

    def _check_clip(self):
        low_name = "epsilon" if self.epsilon_low is None else "epsilon_low"
        high_name = "epsilon" if self.epsilon_high is None else "epsilon_high"
        self._check(0 <= self.low <= 1, low_name, "must lie in [0, 1]: a ratio cannot fall further than by 1")
        self._check(0 <= self.high < math.inf, high_name, "must be a finite number, 0 or above")
        if self.epsilon_c is not None:
            self._check(
                self.kind == "clip",
                "epsilon_c",
                f"works with {self.section}.policy_loss_fn='clip' only; set it to None",
            )
            self._check(
                1 < self.epsilon_c < math.inf, "epsilon_c", "must be above 1 (usual: 3), or None for no dual clip"
            )

    def _check_correction(self):
        kind = self.sampler_correction
        self._check(kind in CORRECTIONS, "sampler_correction", f"is unknown: use one of {', '.join(CORRECTIONS)}")
        low, high = self.correction_bounds
        low_name = "correction_low" if self.correction_low is not None else "correction_high"
        self._check(0 <= low < high, low_name, f"must give 0 <= low < high, have low {low:g}, high {high:g}")
        if kind == "geometric_mask" or kind == "icepop":
            self._check(low <= 1 <= high, low_name, f"must leave 1 (no mismatch) within [{low:g}, {high:g}]")
        self._check(
            not (self.kind == "gmpo" and kind == "icepop"),
            "sampler_correction",
            "drops single tokens, which gmpo's one ratio per sequence cannot; use tis, sequence_tis or geometric_mask",
        )

    @property
    def kind(self) -> str:
        """The surrogate under podrl's name."""
        return ALIASES.get(self.policy_loss_fn, self.policy_loss_fn)

    @property
    def mode(self) -> str:
        """The aggregation mode under podrl's name."""
        return aggregation.canonical_mode(self.loss_agg_mode)

    @property
    def low(self) -> float:
        """How far the ratio may fall below 1."""
        return self.epsilon if self.epsilon_low is None else self.epsilon_low

    @property
    def high(self) -> float:
        """How far the ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds of the sampler correction, the usual ones where none are given."""
        low, high, _ = CORRECTIONS[self.sampler_correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def batch_dependent(self) -> bool:
        """True if the loss ranks the tokens of one call against each other, so that micro-batches change it."""
        return self.kind in ("clip_cov", "kl_cov")

    def needs_reference(self) -> bool:
        """True if reference log-probabilities enter the loss."""
        return self.beta > 0

    def warnings(self) -> tuple[str, ...]:
        """Settings that are legal and probably not meant, one sentence each."""
        found = []
        if self.beta > 0 and kl.canonical_mode(self.kl_loss_mode) == "k1":
            found.append(
                f"{self.section}.kl_loss_mode={self.kl_loss_mode!r} in the loss has zero expected gradient on-policy: "
                f"{self.section}.beta={self.beta:g} holds nothing back, so use 'k2' or 'k3+' (right gradient) or 'k3'."
            )
        if self.batch_dependent:
            found.append(
                f"{self.section}.policy_loss_fn={self.kind!r} picks tokens within each micro-batch: the gradient "
                "depends on the micro-batch size."
            )
        return tuple(found)

    def formula(self) -> str:
        """The loss with its numbers in plain text, for the dry run."""
        bounds = dict(low=f"{1 - self.low:g}", high=f"{1 + self.high:g}", epsilon_low=self.low, epsilon_high=self.high)
        token = KINDS[self.kind].format(**(dataclasses.asdict(self) | bounds))
        if self.epsilon_c is not None:
            token += f", at most {self.epsilon_c:g} |A| where A < 0"
        low, high = self.correction_bounds
        lines = [f"policy loss per token: {token}"]
        if self.sampler_correction != "none":
            weight = CORRECTIONS[self.sampler_correction][2].replace("high", f"{high:g}").replace("low", f"{low:g}")
            lines.append(f"times the sampler correction: {weight}, w = exp(old_logprob - sampler_logprob)")
        if self.beta:
            mode = kl.canonical_mode(self.kl_loss_mode)
            bound = "" if self.kl_clamp_value is None else f", within +-{self.kl_clamp_value:g}"
            lines.append(f"+ {self.beta:g} KL: {mode}: {kl.FORMULAS[mode]}, d = logprob - ref_logprob{bound}")
        if self.entropy_coef:
            lines.append(f"- {self.entropy_coef:g} entropy")
        lines.append(f"{self.mode}: " + AGGREGATION_FORMULAS[self.mode].format(loss_agg_scale=self.loss_agg_scale or 1))
        return "\n".join(lines) + "\nr = exp(logprob - old_logprob), A = advantage, sg = no gradient"

    def __call__(
        self,
        logprob_BT: Float[Array, "B T"],
        old_logprob_BT: Float[Array, "B T"],
        ref_logprob_BT: Float[Array, "B T"],
        sampler_logprob_BT: Float[Array, "B T"],
        advantage_BT: Float[Array, "B T"],
        entropy_BT: Float[Array, "B T"],
        mask_BT: Mask,
        length_BT: Float[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        *,
        kl_scale: Float[Array, ""] | float = 1.0,
    ) -> tuple[Ratio, dict[str, Ratio]]:
        """Loss and metrics of a (micro-)batch of packed rows; add the Ratios over micro-batches, then divide once.

        Masked tokens may hold anything, NaN included; they change neither values nor gradients.

        Args:
          logprob_BT: log-probabilities under the policy being trained, differentiated, nats.
          old_logprob_BT: log-probabilities under the trainer's weights that sampled. With one update per batch these
            are the current ones: pass stop_gradient(logprob_BT).
          ref_logprob_BT: log-probabilities under the reference; ignored when beta is 0.
          sampler_logprob_BT: the rollout engine's log-probabilities. Passing the same array as `old_logprob_BT` is the
            two-policy case: the correction is then 1, because the ratio already starts from the sampler.
          advantage_BT: advantages.
          entropy_BT: entropy of the next-token distribution, nats; zeros when it is not computed.
          mask_BT: 1 on loss tokens.
          length_BT: number of loss tokens in this token's sequence, 1 on padding.
          segment_BT: 1, 2, ... within a row, 0 on padding.
          kl_scale: factor on `beta`, for adaptive control; traced, so changing it compiles nothing.

        Returns:
          The loss; metrics actor/{pg_loss, pg_clipfrac, pg_clipfrac_lower, approx_kl, kl, entropy, ratio} and
          sampler/{weight, kept} plus those of `podrl.algorithms.mismatch`. All are means over loss tokens save pg_loss.
        """
        raw = (logprob_BT, old_logprob_BT, ref_logprob_BT, sampler_logprob_BT, advantage_BT, entropy_BT)
        logprob_BT, old_BT, ref_BT, sampler_BT, advantage_BT, entropy_BT = (masked(x_BT, mask_BT) for x_BT in raw)
        old_BT = jax.lax.stop_gradient(old_BT)
        length_BT = jnp.where(mask_BT.astype(bool), length_BT, jnp.ones((), length_BT.dtype))
        where = (mask_BT, length_BT, segment_BT)
        surrogate = self._surrogate(logprob_BT, old_BT, advantage_BT, *where)
        low, high = self.correction_bounds
        weight_BT = importance_weight(old_BT, sampler_BT, *where, self.sampler_correction, low=low, high=high)
        pg_BT = surrogate.loss_BT * self._pool(weight_BT, *where)

        kl_BT = jnp.zeros_like(logprob_BT)
        loss_BT = pg_BT - self.entropy_coef * entropy_BT
        if self.beta > 0:
            kl_BT = kl.kl_divergence(logprob_BT, ref_BT, self.kl_loss_mode, clamp=self.kl_clamp_value)
            loss_BT = loss_BT + self.beta * kl_scale * kl_BT

        means = {
            "actor/pg_clipfrac": surrogate.clipped_BT,
            "actor/pg_clipfrac_lower": surrogate.clipped_low_BT,
            "actor/approx_kl": old_BT - logprob_BT,
            "actor/kl": kl_BT,
            "actor/entropy": entropy_BT,
            "actor/ratio": surrogate.ratio_BT,
            "sampler/weight": weight_BT,
            "sampler/kept": weight_BT > 0,
        }
        metrics = {"actor/pg_loss": self._reduce(pg_BT, mask_BT, length_BT)}
        metrics |= {
            name: aggregation.token_mean(value_BT.astype(logprob_BT.dtype), mask_BT) for name, value_BT in means.items()
        }
        metrics |= mismatch(old_BT, sampler_BT, mask_BT)
        return self._reduce(loss_BT, mask_BT, length_BT), jax.lax.stop_gradient(metrics)

    def _reduce(self, value_BT: Float[Array, "B T"], mask_BT: Mask, length_BT: Float[Array, "B T"]) -> Ratio:
        scale = 1.0 if self.loss_agg_scale is None else self.loss_agg_scale
        return aggregation.aggregate(value_BT, mask_BT, length_BT, self.mode, scale=scale, eps=self.length_eps)

    def _surrogate(self, logprob_BT, old_BT, advantage_BT, mask_BT, length_BT, segment_BT) -> surrogates.Surrogate:
        policy = (logprob_BT, old_BT, advantage_BT)
        where = (mask_BT, length_BT, segment_BT)
        bounds = {"epsilon_low": self.low, "epsilon_high": self.high}
        match self.kind:
            case "clip":
                return surrogates.clip(*policy, **bounds, epsilon_c=self.epsilon_c)
            case "gspo" | "gspo_token":
                return surrogates.gspo(*policy, *where, **bounds, token_form=self.kind == "gspo_token")
            case "cispo":
                return surrogates.cispo(*policy, **bounds)
            case "sapo":
                return surrogates.sapo(*policy, tau_positive=self.tau_positive, tau_negative=self.tau_negative)
            case "gmpo":
                return surrogates.gmpo(*policy, *where, **bounds, eps=self.length_eps)
            case "clip_cov":
                covariance = {"covariance_low": self.clip_cov_low, "covariance_high": self.clip_cov_high}
                return surrogates.clip_cov(*policy, mask_BT, **bounds, fraction=self.cov_fraction, **covariance)
            case "kl_cov":
                return surrogates.kl_cov(*policy, mask_BT, fraction=self.cov_fraction, coef=self.kl_cov_coef)
            case _:
                assert self.kind == "reinforce", self.kind
                return surrogates.reinforce(*policy)

    def _pool(self, weight_BT, mask_BT, length_BT, segment_BT) -> Float[Array, "B T"]:
        """GMPO has one ratio per sequence, so its correction is the geometric mean over the sequence."""
        if self.kind != "gmpo" or self.sampler_correction == "none":
            return weight_BT
        tiny = 1e-10  # a sequence masked out has weight 0
        log_BT = sequence_mean(jnp.log(weight_BT + tiny), mask_BT, length_BT, segment_BT, eps=self.length_eps)
        return jnp.where(weight_BT > 0, jnp.exp(log_BT), 0.0)
