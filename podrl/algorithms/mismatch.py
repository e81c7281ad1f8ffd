"""Measures how far sampler and trainer log-probabilities differ; the measures add over micro-batches and hosts."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from podrl.algorithms.aggregate import token_mean
from podrl.algorithms.corrections import log_weight
from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked
from podrl.types import Mask, Ratio

_STALE = "_stale_"  # separates a metric's name from the age of its tokens, as in sampler/abs_diff_stale_2

# Moments of the trainer's (x) and the sampler's (y) probabilities. `pearson` computes the correlation from their means,
# once these are summed over all micro-batches and hosts.
MOMENTS = ("x", "y", "xx", "yy", "xy")


def mismatch(
    logprob_BT: Float[Array, "B T"], sampler_logprob_BT: Float[Array, "B T"], mask_BT: Mask
) -> dict[str, Ratio]:
    """Measures per-token distances between trainer and sampler; 0 (exp_diff 1) if they agree bit for bit.

    The measures are means over loss tokens, all of which the sampler drew. With d = logprob - sampler_logprob and
    w = exp(d), a token's values are:

      sampler/abs_diff    abs(d), nats
      sampler/exp_diff    exp(abs(d)), at least 1
      sampler/kl          w - 1 - d, which estimates KL(sampler || trainer), nats
      sampler/kl_reverse  w d - w + 1 (importance-weighted), which estimates KL(trainer || sampler), nats
      sampler/moment_*    moments of the two probabilities: pass the means to `pearson`

    Args:
      logprob_BT: trainer's log-probabilities under the weights that are compared with the sampler, nats.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens, nats.
      mask_BT: 1 on loss tokens.
    """
    d_BT = jnp.clip(log_weight(logprob_BT, sampler_logprob_BT, mask_BT), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w_minus_1_BT = jnp.expm1(d_BT)
    x_BT = jnp.exp(masked(logprob_BT, mask_BT))
    y_BT = jnp.exp(masked(sampler_logprob_BT, mask_BT))
    values = {
        "sampler/abs_diff": jnp.abs(d_BT),
        "sampler/exp_diff": jnp.exp(jnp.abs(d_BT)),
        "sampler/kl": w_minus_1_BT - d_BT,
        "sampler/kl_reverse": (w_minus_1_BT + 1.0) * d_BT - w_minus_1_BT,
    }
    moments = (x_BT, y_BT, x_BT * x_BT, y_BT * y_BT, x_BT * y_BT)
    values |= {f"sampler/moment_{name}": value_BT for name, value_BT in zip(MOMENTS, moments, strict=True)}
    return {name: token_mean(value_BT, mask_BT) for name, value_BT in values.items()}


def mismatch_by_age(
    logprob_BT: Float[Array, "B T"],
    sampler_logprob_BT: Float[Array, "B T"],
    mask_BT: Mask,
    age_BT: Float[Array, "B T"],
    oldest: int,
) -> dict[str, Ratio]:
    """Splits `sampler/abs_diff` by the age of tokens: each entry is the part of the mean from tokens of one age.

    Args:
      logprob_BT: trainer's log-probabilities, nats.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens, nats.
      mask_BT: 1 on loss tokens.
      age_BT: age of each token, in steps.
      oldest: largest age.

    Returns:
      `sampler/abs_diff_stale_AGE` for the ages 0 to `oldest`, nats; sums over the tokens of the age, divided by the
      number of all loss tokens. `divided` then divides them by the share of the age.
    """
    d_BT = jnp.clip(log_weight(logprob_BT, sampler_logprob_BT, mask_BT), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    diff_BT = jnp.abs(d_BT)
    return {
        f"sampler/abs_diff_stale_{age}": token_mean(jnp.where(age_BT == age, diff_BT, 0.0), mask_BT)
        for age in range(oldest + 1)
    }


def ratios_by_age(
    ratio_BT: Float[Array, "B T"],
    clipped_BT: Bool[Array, "B T"],
    mask_BT: Mask,
    age_BT: Float[Array, "B T"],
    oldest: int,
) -> dict[str, Ratio]:
    """Splits the ratio and the share of clipped tokens by the age of tokens, and measures the share of each age.

    Args:
      ratio_BT: probability ratios, unitless.
      clipped_BT: True on clipped tokens.
      mask_BT: 1 on loss tokens.
      age_BT: age of each token, in steps.
      oldest: largest age.

    Returns:
      `rollout/share_stale_AGE`, the share of each age; and `actor/ratio_stale_AGE` and `actor/pg_clipfrac_stale_AGE`,
      each age's parts of the two means over all loss tokens. `divided` divides the parts by the share.
    """
    found: dict[str, Ratio] = {}
    for age in range(oldest + 1):
        here_BT = age_BT == age
        values = {
            f"rollout/share_stale_{age}": here_BT.astype(ratio_BT.dtype),
            f"actor/ratio_stale_{age}": jnp.where(here_BT, ratio_BT, 0.0),
            f"actor/pg_clipfrac_stale_{age}": (here_BT & clipped_BT).astype(ratio_BT.dtype),
        }
        found |= {name: token_mean(value_BT, mask_BT) for name, value_BT in values.items()}
    return found


def divided(mean: Mapping[str, float]) -> dict[str, float]:
    """Turns each metric by age into a mean over the tokens of its age, and leaves out ages that no token has.

    Args:
      mean: means over all loss tokens, by the metric's name. The value of a metric by age is the part of the mean that
        tokens of this age contribute.
    """
    found = {}
    for name, value in mean.items():
        of, stale, age = name.rpartition(_STALE)
        share = mean[f"rollout/share{_STALE}{age}"] if stale else 1.0
        if share > 0:
            found[name] = value if of in ("", "rollout/share") else value / share
    return found


def pearson(mean: Mapping[str, float]) -> float:
    """Computes Pearson's correlation of trainer and sampler probabilities from the means of `sampler/moment_*`.

    The correlation is 1 if either side does not vary. It has about three correct digits, because the means are float32.
    """
    x, y, xx, yy, xy = (float(mean[f"sampler/moment_{name}"]) for name in MOMENTS)
    variance_x, variance_y = xx - x * x, yy - y * y
    if variance_x <= 0 or variance_y <= 0:
        return 1.0
    return min(max((xy - x * y) / (variance_x * variance_y) ** 0.5, -1.0), 1.0)


def derived(mean: Mapping[str, float]) -> dict[str, float]:
    """Computes sampler/pearson, and sampler/ess if tokens have correction weights, from means of `sampler/moment_*`.

    sampler/ess is the effective sample size as a share of the tokens: (mean w)^2 / mean w^2 (Kish, Survey Sampling,
    1965), with w the correction weight.
    """
    found = {"sampler/pearson": pearson(mean)}
    if (square := mean.get("sampler/moment_weight")) is not None:
        found["sampler/ess"] = mean["sampler/weight"] ** 2 / square if square > 0 else 0.0
    return found
