"""Measures how far sampler and trainer log-probabilities differ; the measures add over micro-batches and hosts."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from podrl.algorithms.aggregate import token_mean
from podrl.algorithms.corrections import log_weight
from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked
from podrl.types import Mask, Ratio

_STALE = "_stale_"  # in names of metrics by age, before the age

# Moments of the two probabilities, from which `pearson` makes the correlation once everything has been added up.
MOMENTS = ("x", "y", "xx", "yy", "xy")


def mismatch(
    logprob_BT: Float[Array, "B T"], sampler_logprob_BT: Float[Array, "B T"], mask_BT: Mask
) -> dict[str, Ratio]:
    """Measures per-token distances between trainer and sampler; 0 (ratios 1) when they agree bit for bit.

    With d = logprob - sampler_logprob and w = exp(d), tokens drawn by the sampler:

      sampler/abs_diff    mean abs(d), nats
      sampler/exp_diff    mean exp(abs(d)), at least 1
      sampler/kl          KL(sampler || trainer), estimated by w - 1 - d
      sampler/kl_reverse  KL(trainer || sampler), estimated by w d - w + 1 (importance-weighted)
      sampler/moment_*    moments of the two probabilities: pass the means to `pearson`

    Args:
      logprob_BT: trainer's log-probabilities under the weights that sampled.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens.
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
    """Splits `sampler/abs_diff` into what the tokens of each age add to it; ages are updates, `oldest` the largest."""
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
    """Splits ratio and share of clipped tokens into what the tokens of each age add, with the share of the age."""
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
    """Divides what the tokens of an age add to a mean by their share; ages that no token has are left out."""
    found = {}
    for name, value in mean.items():
        of, stale, age = name.rpartition(_STALE)
        share = mean[f"rollout/share{_STALE}{age}"] if stale else 1.0
        if share > 0:
            found[name] = value if of in ("", "rollout/share") else value / share
    return found


def pearson(mean: Mapping[str, float]) -> float:
    """Correlates trainer and sampler probabilities, from the means of the `sampler/moment_*` entries.

    1 when either side does not vary: there is nothing to disagree about. Float32 means leave about three digits.
    """
    x, y, xx, yy, xy = (float(mean[f"sampler/moment_{name}"]) for name in MOMENTS)
    variance_x, variance_y = xx - x * x, yy - y * y
    if variance_x <= 0 or variance_y <= 0:
        return 1.0
    return min(max((xy - x * y) / (variance_x * variance_y) ** 0.5, -1.0), 1.0)


def derived(mean: Mapping[str, float]) -> dict[str, float]:
    """Makes sampler/pearson, and sampler/ess where weights correct tokens, of the means of `sampler/moment_*`.

    The effective sample size, as a share of the tokens, is (mean w)^2 / mean w^2 (Kish, Survey Sampling, 1965).
    """
    found = {"sampler/pearson": pearson(mean)}
    if (square := mean.get("sampler/moment_weight")) is not None:
        found["sampler/ess"] = mean["sampler/weight"] ** 2 / square if square > 0 else 0.0
    return found
