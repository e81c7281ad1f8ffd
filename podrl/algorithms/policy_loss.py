"""The policy loss of a run: surrogate, correction, KL, entropy and aggregation, composed and checked."""

import dataclasses
import functools
import string
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from podrl.algorithms import aggregate as aggregation
from podrl.algorithms import kl, surrogates
from podrl.algorithms.corrections import CORRECTIONS, SAMPLE_CORRECTIONS, importance_weight, stale_weight
from podrl.algorithms.mismatch import mismatch, mismatch_by_age, ratios_by_age
from podrl.algorithms.policy_rows import PolicyRows, ReferencedRows
from podrl.algorithms.segments import masked, sequence_mean
from podrl.config import Finite, NonNegative, Positive, Range, group_of, near, plural, section
from podrl.types import Mask, Ratio

# Formula of the per-token loss of each kind; `PolicyLoss.formula` fills in the numbers of LossSettings.
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
    "dppo": "-r A, 0 where A > 0 and p - p_old > {epsilon_high:g}, or A < 0 and p_old - p > {epsilon_low:g}, "
    "p = exp(logprob), p_old = exp(old_logprob); + {dppo_kl_coef:g} (log r)^2",
    "ipo": "-r A, 0 where p - p_old > {epsilon_high:g} or p_old - p > {epsilon_low:g}, p = exp(logprob), "
    "p_old = exp(old_logprob); + {dppo_kl_coef:g} (log r)^2",
    "dro": "-A logprob + {dro_beta:g} / 2 (log r)^2",
    "reinforce": "-A logprob",
}
ALIASES = {"grpo": "clip", "ppo": "clip", "gspo-token": "gspo_token", "gpg": "reinforce", "geo_mean": "gmpo"}
PENALISED = ("kl_cov", "dppo", "ipo", "dro")  # kinds whose loss may differ from 0 on a token whose advantage is 0
RANKED = ("clip_cov", "kl_cov")  # kinds that rank the tokens of one micro-batch against each other
SAMPLE_RATIOS = ("gspo", "gspo_token", "gmpo")  # kinds with one ratio per sample
AGGREGATION_FORMULAS = {
    "token-mean": "sum over tokens / number of tokens",
    "sequence-mean-token-mean": "mean over sequences of (sum over tokens / tokens of the sequence)",
    "sequence-mean-token-sum": "mean over sequences of the sum over tokens",
    "sequence-mean-token-scale": "mean over sequences of (sum over tokens / {loss_agg_scale:g})",
    "token-sum-scale": "sum over tokens / {loss_agg_scale:g}",
}


def _read_by(kind: str) -> set[str]:
    """Returns the names of the settings that a surrogate's formula reads, and epsilon if a bound defaults to it."""
    names = {name for _, name, _, _ in string.Formatter().parse(KINDS[kind]) if name}
    names = {{"low": "epsilon_low", "high": "epsilon_high"}.get(name, name) for name in names}
    return names | ({"epsilon"} if "epsilon_low" in names or "epsilon_high" in names else set())


PolicyLossFn = Callable[[Array, Array, PolicyRows], tuple[Ratio, dict[str, Ratio]]]


def with_old(loss: "PolicyLoss", old: str) -> PolicyLossFn:
    """Wraps the loss so that its ratio starts from the policy named by `old`.

    Args:
      loss: policy loss to wrap.
      old: 'trainer' for the old log-probabilities in the rows; 'current' for the policy being trained, which is exact
        if a batch of fresh samples makes a single update; 'sampler' for the rollout engine. With 'sampler' the metrics
        of `podrl.algorithms.mismatch` compare the sampler with the current weights.
    """

    wrapper = functools.wraps(loss, assigned=(), updated=())  # make_train_step looks at the wrapped loss

    @wrapper
    def current(logprob_BT: Array, entropy_BT: Array, rows: PolicyRows):
        return loss(logprob_BT, entropy_BT, starting_from(old, logprob_BT, rows))

    @wrapper
    def sampler(logprob_BT: Array, entropy_BT: Array, rows: PolicyRows):
        found, metrics = loss(logprob_BT, entropy_BT, starting_from(old, logprob_BT, rows))
        distances = loss.distances(jax.lax.stop_gradient(logprob_BT), rows)
        return found, {**metrics, **distances}

    return {"trainer": loss, "current": current, "sampler": sampler}[old]


def starting_from(old: str, logprob_BT: Float[Array, "B T"], rows: PolicyRows) -> PolicyRows:
    """Returns rows with the old log-probabilities that the ratio starts from.

    Args:
      old: name of the old policy, see `with_old`.
      logprob_BT: log-probabilities under the policy being trained, nats.
      rows: packed rows of the policy loss.
    """
    if old == "trainer":
        return rows
    old_BT = jax.lax.stop_gradient(logprob_BT) if old == "current" else rows.sampler_logprob_BT
    return dataclasses.replace(rows, old_logprob_BT=old_BT)


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of the policy loss of every algorithm; `KLLossSettings` adds the KL to the reference.

    Attributes:
      policy_loss_fn: clip (grpo, ppo), gspo, gspo_token, cispo, sapo, gmpo, clip_cov, kl_cov, dppo, ipo, dro or
        reinforce (gpg); or a function of the user's, 'file.py:function' (docs/algorithms.md).
      policy_loss_args: numbers passed to the user's loss function, by the names of its keywords.
      epsilon: largest distance of the ratio from 1 on either side, beyond which it is clipped; for gmpo, the
        distance of the log of the ratio from 0; for dppo and ipo, the distance of a token's probability from its old
        probability.
      epsilon_low: distance on the lower side, if it differs; None for epsilon.
      epsilon_high: distance on the upper side, if it differs (clip-higher); None for epsilon.
      epsilon_c: largest ratio that counts where the advantage is negative (dual clip); None for no bound. Only `clip`
        reads it.
      tau_positive: SAPO's temperature on tokens with a positive advantage.
      tau_negative: SAPO's temperature on all other tokens.
      cov_fraction: share of the loss tokens that clip_cov drops or kl_cov penalises.
      clip_cov_low: covariance, in advantage times nats, that a token must exceed for clip_cov to drop it.
      clip_cov_high: covariance, in advantage times nats, that a token must stay below for clip_cov to drop it.
      kl_cov_coef: weight of abs(log r) on the tokens that kl_cov penalises, loss per nat.
      dppo_kl_coef: weight of (log r)^2 on every loss token under dppo and ipo.
      dro_beta: twice the weight of (log r)^2 on every loss token under dro.
      kl_clamp_value: bound on the absolute value of a token's KL to the reference, nats; None for no bound.
      entropy_coef: weight of the entropy bonus, loss per nat; None is 0.
      loss_agg_mode: name of the mode that turns token losses into one number (`podrl.algorithms.aggregate`).
      loss_agg_scale: fixed length of the two scale modes, tokens; None takes rollout.max_tokens_to_generate of the run.
      length_eps: number added to sequence lengths; verl adds 1e-8.
      sampler_correction: none, tis, sequence_tis, sequence_mask, icepop, kpop or geometric_mask
        (`podrl.algorithms.corrections`); auto is tis if samples may be older than the trained weights and
        old_logprob is not 'sampler', else none.
      correction_low: lower bound of the sampler correction; None for the default of the chosen correction.
      correction_high: upper bound of the sampler correction; None for the default of the chosen correction.
    """

    policy_loss_fn: str | Callable[..., Any] = "clip"
    policy_loss_args: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    epsilon: NonNegative = 0.2
    epsilon_low: NonNegative | None = None
    epsilon_high: NonNegative | None = None
    epsilon_c: Annotated[float, Range("(1, 1e9]")] | None = None
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    cov_fraction: Annotated[float, Range("(0, 1]")] = 2e-4
    clip_cov_low: Finite = 1.0
    clip_cov_high: Finite = 5.0
    kl_cov_coef: NonNegative = 1.0
    dppo_kl_coef: NonNegative = 1e-3
    dro_beta: NonNegative = 0.05
    kl_clamp_value: Positive | None = None
    entropy_coef: Finite | None = 0.0
    loss_agg_mode: str = "sequence-mean-token-mean"
    loss_agg_scale: Positive | None = None
    length_eps: NonNegative = 0.0
    sampler_correction: Literal[
        "auto", "none", "tis", "sequence_tis", "sequence_mask", "icepop", "kpop", "geometric_mask"
    ] = "auto"
    correction_low: NonNegative | None = None
    correction_high: NonNegative | None = None

    @property
    def section(self) -> str:
        """Section of the configuration that error messages name, such as 'grpo'."""
        return group_of(self)

    def __post_init__(self):
        self.check_loss()

    def check_loss(self) -> None:
        """Raises ValueError for unknown names and for settings of the loss that contradict each other."""
        key = self.section
        names = (*KINDS, *ALIASES)
        hint = near(self.policy_loss_fn, names) if isinstance(self.policy_loss_fn, str) else ""
        self._check(
            self.kind in KINDS or self.own_loss,
            "policy_loss_fn",
            f"is not a policy loss: use one of {', '.join(names)}, or 'file.py:function' for one of your own",
            hint,
        )
        self._check(
            self.own_loss or not self.policy_loss_args,
            "policy_loss_args",
            f"sets numbers for a function of your own, but {key}.policy_loss_fn={self.policy_loss_fn!r} names none: "
            "leave the numbers out, or name 'file.py:function'",
        )
        self._check_correction()
        low = "epsilon" if self.epsilon_low is None else "epsilon_low"
        fits = self.kind == "gmpo" or self.low <= 1  # gmpo's bounds are distances of the log of a ratio
        self._check(fits, low, "must lie in [0, 1]: a ratio cannot fall further than by 1")
        self._check(
            self.epsilon_c is None or self.kind == "clip",
            "epsilon_c",
            f"works with {key}.policy_loss_fn='clip' only; set it to None",
        )
        self._check(self.clip_cov_low < self.clip_cov_high, "clip_cov_low", f"must be below {key}.clip_cov_high")
        self._check(
            self.kind != "gmpo" or self.mode == "sequence-mean-token-mean",
            "loss_agg_mode",
            "must be 'sequence-mean-token-mean' for gmpo, whose loss is one number per sequence",
        )

    def _check(self, holds: bool, name: str, requirement: str, hint: str = ""):
        if not holds:
            raise ValueError(f"{self.section}.{name}={getattr(self, name)!r} {requirement}.{hint}")

    def _check_correction(self):
        kind = self.correction
        low, high = self.correction_bounds
        low_name = "correction_low" if self.correction_low is not None else "correction_high"
        self._check(low < high, low_name, f"must give 0 <= low < high, have low {low:g}, high {high:g}")
        if kind in ("geometric_mask", "icepop", "sequence_mask"):
            self._check(low <= 1 <= high, low_name, f"must leave 1 (no mismatch) within [{low:g}, {high:g}]")
        self._check(
            not (self.kind == "gmpo" and kind in ("icepop", "kpop")),
            "sampler_correction",
            "drops single tokens, which gmpo's one ratio per sequence cannot; use tis or one for whole sequences",
        )

    @property
    def kind(self) -> str:
        """Canonical name of the surrogate; for a function of the user's, the name of the function."""
        name = self.policy_loss_fn
        return ALIASES.get(name, name) if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)

    @property
    def own_loss(self) -> bool:
        """True if the surrogate is a function of the user's."""
        return callable(self.policy_loss_fn) or ":" in self.policy_loss_fn

    @property
    def mode(self) -> str:
        """Canonical name of the aggregation mode."""
        return aggregation.canonical_mode(self.loss_agg_mode, key=f"{self.section}.loss_agg_mode")

    @property
    def low(self) -> float:
        """Lower side of the clip range: the ratio may fall to 1 - low."""
        return self.epsilon if self.epsilon_low is None else self.epsilon_low

    @property
    def high(self) -> float:
        """Upper side of the clip range: the ratio may rise to 1 + high."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def correction(self) -> str:
        """The sampler correction in use, a key of `CORRECTIONS`.

        'auto' is 'none' here. The classes of a run's settings override this property, because only they know whether
        samples can be older than the trained weights.
        """
        return "none" if self.sampler_correction == "auto" else self.sampler_correction

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the sampler correction, with defaults filled in."""
        low, high, _ = CORRECTIONS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def loss_kl(self) -> kl.Penalty:
        """The KL to the reference in the loss: this class has none, so its coefficient is 0."""
        return kl.Penalty()


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KLLossSettings(LossSettings):
    """Settings of a policy loss that includes the KL to the reference.

    Attributes:
      beta: coefficient of the KL to the reference policy in the loss, loss per nat; with 0 the loss has no KL and needs
        no reference.
      kl_loss_mode: estimator of the KL in the loss (`podrl.algorithms.kl`). Tunix's default, 'kl', has no gradient on
        average, so it does not hold the policy near the reference: docs/algorithms.md.
    """

    beta: NonNegative = 0.04
    kl_loss_mode: str = "k3"

    def check_loss(self) -> None:
        super().check_loss()
        kl.canonical_mode(self.kl_loss_mode, key=f"{self.section}.kl_loss_mode")

    @property
    def loss_kl(self) -> kl.Penalty:
        """The KL to the reference in the loss."""
        return kl.Penalty(self.beta, self.kl_loss_mode, self.kl_clamp_value)


# Arrays that a user's token loss may take by keyword: the mask, the number of loss tokens of the token's sample, and
# the number of the sample within its row.
CONTEXT = ("mask_BT", "length_BT", "segment_BT")


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The configured policy loss; a call returns a (micro-)batch's loss and metrics.

    Attributes:
      settings: settings of the loss.
      own: the user's token loss if `settings` name one: (logprob_BT, old_logprob_BT, advantage_BT, mask_BT=,
        length_BT=, segment_BT=) -> loss_BT. None otherwise.
      oldest: largest age of a token, in steps. If it is 2 or more, the loss reads `age_BT` of the rows and returns
        metrics for each age.
      stale_bound: largest age of a token that counts in the policy loss, in steps; None for no bound.
      others: policy losses with other surrogates. A token with the number n > 0 in `loss_BT` of the rows has the
        surrogate of `others[n - 1]`. Correction, KL, entropy and aggregation follow `settings` for all tokens.
    """

    settings: LossSettings
    own: Callable[..., Array] | None = None
    oldest: int = 0
    stale_bound: int | None = None
    others: tuple["PolicyLoss", ...] = ()

    def __post_init__(self):
        settings = self.settings
        assert (self.own is not None) == settings.own_loss, settings.policy_loss_fn
        if settings.mode in aggregation.SCALED_MODES and settings.loss_agg_scale is None:
            raise ValueError(
                f"{settings.section}.loss_agg_scale=None must be a length in tokens for "
                f"{settings.section}.loss_agg_mode={settings.mode!r}."
            )

    @property
    def by_age(self) -> bool:
        """True if the loss reads the ages of tokens."""
        return self.oldest > 1

    @property
    def rows(self) -> type[PolicyRows]:
        """The class of the rows that the loss reads, with reference log-probabilities if the loss needs them."""
        return ReferencedRows if self.needs_reference() else PolicyRows

    def reads(self, mixed: bool) -> dict[str, DTypeLike]:
        """Returns the optional arrays that the loss reads from the rows, as dtypes by name.

        Args:
          mixed: True if samples of some data sources have settings of their own.
        """
        found: dict[str, DTypeLike] = {"weight_BT": jnp.float32} if mixed else {}
        found |= {"loss_BT": jnp.int32} if self.others else {}
        return found | ({"age_BT": jnp.float32} if self.by_age else {})

    @property
    def batch_dependent(self) -> bool:
        """True if the loss ranks all tokens of one call, so that the number of micro-batches changes it."""
        return any(loss.settings.kind in RANKED for loss in (self, *self.others))

    @property
    def by_sample(self) -> bool:
        """True if terms of the loss are computed over whole samples: all pieces of a sample must then be in one row."""
        settings = self.settings
        whole = settings.kind in SAMPLE_RATIOS or settings.sampler_correction in SAMPLE_CORRECTIONS
        return whole or self.own is not None or any(other.by_sample for other in self.others)

    def needs_reference(self) -> bool:
        """True if the loss reads reference log-probabilities."""
        return self.settings.loss_kl.coef > 0

    def divisor(self, mask_BT: Float[np.ndarray, "B T"]) -> float:
        """Returns the divisor of one update's loss: the number of loss tokens, of samples with a loss token, or 1.

        Args:
          mask_BT: 1 on loss tokens of the update's samples, one sample per row.
        """
        return aggregation.divisor(mask_BT, self.settings.mode)

    def token_share(self, mask_BT: Float[np.ndarray, "B T"]) -> float:
        """Returns the divisor of one update's loss, divided by its number of loss tokens.

        Multiply a sum over tokens by this factor, and add the product to the loss's numerator. The final division then
        turns the sum into a mean over loss tokens, whatever the divisor of the loss is.

        Args:
          mask_BT: 1 on loss tokens of the update's samples, one sample per row.
        """
        return self.divisor(mask_BT) / max(float((mask_BT > 0).sum()), 1.0)

    def as_token_mean(
        self, mask_BT: Float[np.ndarray, "B T"], over_BT: Float[np.ndarray, "B T"] | None = None
    ) -> Float[np.ndarray, "B 1"]:
        """Returns one factor per sample; advantages multiplied by it contribute a mean over tokens to the loss.

        Args:
          mask_BT: 1 on loss tokens of the update's samples, one sample per row.
          over_BT: 1 on the tokens to take the mean over: all loss tokens of some of the samples; None for all loss
            tokens.
        """
        settings = self.settings
        scale = 1.0 if settings.loss_agg_scale is None else settings.loss_agg_scale
        of = {"scale": scale, "eps": settings.length_eps}
        return aggregation.as_token_mean(mask_BT, settings.mode, **of, over_BT=over_BT)

    def warnings(self) -> tuple[str, ...]:
        """Lists settings that are legal but probably a mistake, one sentence each."""
        found, key, penalty = [], self.settings.section, self.settings.loss_kl
        if penalty.coef > 0 and kl.canonical_mode(penalty.mode) == "k1":
            found.append(
                f"{key}.kl_loss_mode={penalty.mode!r} in the loss has zero expected gradient on-policy: "
                f"{key}.beta={penalty.coef:g} holds nothing back, so use 'k2' or 'k3+' (right gradient) or 'k3'."
            )
        for kind in dict.fromkeys(loss.settings.kind for loss in (self, *self.others)):
            if kind not in RANKED:
                continue
            found.append(
                f"{key}.policy_loss_fn={kind!r} picks tokens within each micro-batch: the gradient "
                "depends on the micro-batch size."
            )
        losses = [loss.settings for loss in (self, *self.others)]
        read = set[str]().union(*(_read_by(one.kind) for one in losses if not one.own_loss))
        defaults = {field.name: field.default for field in dataclasses.fields(LossSettings)}
        for name in sorted(set[str]().union(*map(_read_by, KINDS)) - read):
            if (value := getattr(self.settings, name)) != defaults[name]:
                found.append(
                    f"{key}.{name}={value!r} has no effect: the policy loss {losses[0].kind} does not read it."
                )
        return tuple(found)

    def formula_without_advantage(self) -> str:
        """Writes the terms of the loss that have no advantage, KL and entropy, in plain text; '' if there are none."""
        settings, penalty, lines = self.settings, self.settings.loss_kl, list[str]()
        if penalty.coef:
            mode = kl.canonical_mode(penalty.mode)
            bound = "" if penalty.clamp is None else f", within +-{penalty.clamp:g}"
            lines.append(f"+ {penalty.coef:g} KL: {mode}: {kl.FORMULAS[mode]}, d = logprob - ref_logprob{bound}")
        if settings.entropy_coef:
            lines.append(f"- {settings.entropy_coef:g} entropy")
        return "\n".join([*lines, self._aggregation()] if lines else [])

    def _aggregation(self) -> str:
        mode, scale = self.settings.mode, self.settings.loss_agg_scale or 1
        return f"{mode}: {AGGREGATION_FORMULAS[mode].format(loss_agg_scale=scale)}"

    def formula(self) -> str:
        """Writes the formula of the loss with its numbers in plain text, for the dry run."""
        settings = self.settings
        bounds = {"low": f"{1 - settings.low:g}", "high": f"{1 + settings.high:g}"}
        bounds |= {"epsilon_low": settings.low, "epsilon_high": settings.high}
        if self.own is None:
            token = KINDS[settings.kind].format(**(dataclasses.asdict(settings) | bounds))
        else:
            numbers = ", ".join(f"{name}={value:g}" for name, value in settings.policy_loss_args.items())
            token = f"{settings.kind}({numbers}), your own"
        if settings.epsilon_c is not None:
            token += f", at most {settings.epsilon_c:g} |A| where A < 0"
        low, high = settings.correction_bounds
        lines = [f"policy loss per token: {token}"]
        if settings.correction != "none":
            weight = CORRECTIONS[settings.correction][2].replace("high", f"{high:g}").replace("low", f"{low:g}")
            lines.append(f"times the sampler correction: {weight}, w = exp(old_logprob - sampler_logprob)")
        if self.stale_bound is not None:
            lines.append(f"times 0 for tokens drawn by weights more than {plural(self.stale_bound, 'step')} old")
        lines.append(self.formula_without_advantage() or self._aggregation())
        return "\n".join(lines) + "\nr = exp(logprob - old_logprob), A = advantage, sg = no gradient"

    def __call__(
        self, logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: PolicyRows
    ) -> tuple[Ratio, dict[str, Ratio]]:
        """Computes loss and metrics of a packed (micro-)batch.

        Each result is a `Ratio`, a numerator and a denominator. Add the Ratios of all micro-batches, then divide once.

        The loss of a token is surrogate x correction + beta x kl_scale x KL - entropy_coef x entropy, times
        `rows.weight_BT` if the rows have weights. The correction is 0 on tokens older than `stale_bound`.
        `podrl.algorithms.aggregate` reduces the token losses. Masked tokens may hold anything, NaN included; they
        change neither values nor gradients.

        Args:
          logprob_BT: log-probabilities under the policy being trained, nats; differentiated.
          entropy_BT: entropy of the next-token distribution, nats.
          rows: the other per-token inputs, of the class `self.rows`.

        Returns:
          The loss; and the metrics actor/{pg_loss, pg_clipfrac, pg_clipfrac_lower, approx_kl, kl, entropy, ratio},
          sampler/{weight, kept}, sampler/moment_weight if the loss has a correction or a `stale_bound`, and the metrics
          of `podrl.algorithms.mismatch`, all without gradient. All are means over loss tokens, except pg_loss, which is
          aggregated as the loss is. `mismatch.divided` and
          `mismatch.derived` finish the metrics by age and the moments.
        """
        rows, mask_BT = rows.clean(), rows.mask_BT
        logprob_BT, entropy_BT = masked(logprob_BT, mask_BT), masked(entropy_BT, mask_BT)
        old_BT, length_BT = jax.lax.stop_gradient(rows.old_logprob_BT), rows.length_BT
        settings, penalty = self.settings, self.settings.loss_kl
        surrogate, weight_BT, pg_BT = self._policy_gradient(logprob_BT, old_BT, rows)

        kl_BT = jnp.zeros_like(logprob_BT)
        loss_BT = pg_BT - (settings.entropy_coef or 0.0) * entropy_BT
        if penalty.coef > 0:
            assert isinstance(rows, ReferencedRows), f"beta={penalty.coef} needs rows.with_reference(...)"
            kl_BT = kl.kl_divergence(logprob_BT, rows.ref_logprob_BT, penalty.mode, clamp=penalty.clamp)
            loss_BT = loss_BT + penalty.coef * rows.kl_scale * kl_BT
        if rows.weight_BT is not None:
            pg_BT, loss_BT = rows.weight_BT * pg_BT, rows.weight_BT * loss_BT

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
        if settings.correction != "none" or self.stale_bound is not None:
            means["sampler/moment_weight"] = weight_BT * weight_BT
        metrics = {"actor/pg_loss": self._reduce(pg_BT, mask_BT, length_BT)}
        metrics |= {
            name: aggregation.token_mean(value_BT.astype(logprob_BT.dtype), mask_BT) for name, value_BT in means.items()
        }
        metrics |= self.distances(old_BT, rows)
        if self.by_age:
            assert rows.age_BT is not None, f"oldest={self.oldest} needs ages"
            of_tokens = (surrogate.ratio_BT, surrogate.clipped_BT, mask_BT, rows.age_BT)
            metrics |= ratios_by_age(*of_tokens, self.oldest)
        return self._reduce(loss_BT, mask_BT, length_BT), jax.lax.stop_gradient(metrics)

    def token_weights(
        self, logprob_BT: Float[Array, "B T"], rows: PolicyRows
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Computes the weight of each token's log-probability in the policy gradient, and marks clipped tokens.

        The weight is minus the derivative of the sum of policy-gradient losses with respect to the token's
        log-probability. At a ratio of 1 the weight of most surrogates is the advantage, times the sampler correction
        and other factors on the token's loss. Where the clip took the gradient away, the weight is 0. KL, entropy and
        aggregation (division by lengths and numbers of tokens) are left out.

        Args:
          logprob_BT: log-probabilities under the policy being trained, nats.
          rows: the other per-token inputs.

        Returns:
          Weights, and 1 on clipped tokens; both 0 on masked tokens.
        """
        rows, mask_BT = rows.clean(), rows.mask_BT
        old_BT = jax.lax.stop_gradient(rows.old_logprob_BT)

        def total(logprob_BT: Array) -> tuple[Array, Array]:
            surrogate, _, pg_BT = self._policy_gradient(logprob_BT, old_BT, rows)
            pg_BT = pg_BT if rows.weight_BT is None else rows.weight_BT * pg_BT
            return masked(pg_BT, mask_BT).sum(), surrogate.clipped_BT | surrogate.clipped_low_BT

        slope_BT, clipped_BT = jax.grad(total, has_aux=True)(masked(logprob_BT, mask_BT))
        return masked(-slope_BT, mask_BT), masked(clipped_BT.astype(slope_BT.dtype), mask_BT)

    def _policy_gradient(
        self, logprob_BT: Array, old_BT: Array, rows: PolicyRows
    ) -> tuple[surrogates.Surrogate, Array, Array]:
        """Computes surrogate, correction weight and policy-gradient loss of every token.

        Call `PolicyRows.clean` on `rows` first.
        """
        settings, where = self.settings, (rows.mask_BT, rows.length_BT, rows.layout.sample())
        low, high = settings.correction_bounds
        weight_BT = importance_weight(old_BT, rows.sampler_logprob_BT, *where, settings.correction, low=low, high=high)
        if self.stale_bound is not None:
            assert rows.age_BT is not None, f"stale_bound={self.stale_bound} needs ages"
            weight_BT = weight_BT * stale_weight(rows.age_BT, rows.mask_BT, self.stale_bound)
        found = self._weighed(logprob_BT, old_BT, rows, weight_BT, 0)
        for number, other in enumerate(self.others, 1):
            theirs = other._weighed(logprob_BT, old_BT, rows, weight_BT, number)
            found = jax.tree.map(lambda x_BT, y_BT, n=number: jnp.where(rows.loss_BT == n, y_BT, x_BT), found, theirs)
        surrogate, pg_BT = found
        return surrogate, weight_BT, pg_BT

    def _weighed(
        self, logprob_BT: Array, old_BT: Array, rows: PolicyRows, weight_BT: Array, number: int
    ) -> tuple[surrogates.Surrogate, Array]:
        """Computes the surrogate, and its loss times the correction, on the tokens whose `loss_BT` is `number`.

        The results on other tokens are meaningless; `_policy_gradient` replaces them.
        """
        if rows.loss_BT is not None:
            rows = dataclasses.replace(rows, mask_BT=rows.mask_BT * (rows.loss_BT == number)).clean()
        surrogate = self._surrogate(logprob_BT, old_BT, rows)
        where = (rows.mask_BT, rows.length_BT, rows.layout.sample())
        return surrogate, surrogate.loss_BT * self._pool(weight_BT, *where)

    def distances(self, logprob_BT: Float[Array, "B T"], rows: PolicyRows) -> dict[str, Ratio]:
        """Measures how far a policy's log-probabilities are from the sampler's, also for each age if rows have ages.

        Args:
          logprob_BT: log-probabilities under the policy, nats.
          rows: packed rows with the sampler's log-probabilities.
        """
        found = mismatch(logprob_BT, rows.sampler_logprob_BT, rows.mask_BT)
        if self.by_age:
            assert rows.age_BT is not None, f"oldest={self.oldest} needs ages"
            found |= mismatch_by_age(logprob_BT, rows.sampler_logprob_BT, rows.mask_BT, rows.age_BT, self.oldest)
        return found

    def _reduce(self, value_BT: Float[Array, "B T"], mask_BT: Mask, length_BT: Float[Array, "B T"]) -> Ratio:
        settings = self.settings
        scale = 1.0 if settings.loss_agg_scale is None else settings.loss_agg_scale
        return aggregation.aggregate(value_BT, mask_BT, length_BT, settings.mode, scale=scale, eps=settings.length_eps)

    def _surrogate(self, logprob_BT, old_BT, rows: PolicyRows) -> surrogates.Surrogate:
        settings, mask_BT = self.settings, rows.mask_BT
        policy = (logprob_BT, old_BT, rows.advantage_BT)
        where = (mask_BT, rows.length_BT, rows.layout.sample())
        bounds = {"epsilon_low": settings.low, "epsilon_high": settings.high}
        if self.own is not None:
            context = dict(zip(CONTEXT, where, strict=True))
            return surrogates.of_token_losses(self.own(*policy, **context), *policy[:2])
        match settings.kind:
            case "clip":
                return surrogates.clip(*policy, **bounds, epsilon_c=settings.epsilon_c)
            case "gspo" | "gspo_token":
                return surrogates.gspo(*policy, *where, **bounds, token_form=settings.kind == "gspo_token")
            case "cispo":
                return surrogates.cispo(*policy, **bounds)
            case "sapo":
                return surrogates.sapo(*policy, tau_positive=settings.tau_positive, tau_negative=settings.tau_negative)
            case "gmpo":
                return surrogates.gmpo(*policy, *where, **bounds, eps=settings.length_eps)
            case "clip_cov":
                covariance = {
                    "covariance_low": settings.clip_cov_low,
                    "covariance_high": settings.clip_cov_high,
                }
                return surrogates.clip_cov(*policy, mask_BT, **bounds, fraction=settings.cov_fraction, **covariance)
            case "kl_cov":
                return surrogates.kl_cov(*policy, mask_BT, fraction=settings.cov_fraction, coef=settings.kl_cov_coef)
            case "dppo":
                return surrogates.dppo(*policy, **bounds, coef=settings.dppo_kl_coef)
            case "ipo":
                return surrogates.ipo(*policy, **bounds, coef=settings.dppo_kl_coef)
            case "dro":
                return surrogates.dro(*policy, beta=settings.dro_beta)
            case _:
                assert settings.kind == "reinforce", settings.kind
                return surrogates.reinforce(*policy)

    def _pool(self, weight_BT, mask_BT, length_BT, segment_BT) -> Float[Array, "B T"]:
        """Replaces correction weights by their geometric mean over the sequence if the surrogate is GMPO.

        GMPO has one ratio per sequence, so it needs one weight per sequence. Other surrogates keep the weights.
        """
        if self.settings.kind != "gmpo" or self.settings.correction == "none":
            return weight_BT
        tiny = 1e-10  # keeps the logarithm finite where the weight is 0
        log_BT = sequence_mean(jnp.log(weight_BT + tiny), mask_BT, length_BT, segment_BT, eps=self.settings.length_eps)
        return jnp.where(weight_BT > 0, jnp.exp(log_BT), 0.0)
