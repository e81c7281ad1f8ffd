"""How far the sampler's log-probabilities are from the trainer's: measures that add over micro-batches and hosts."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podrl.algorithms.aggregate import aggregate, token_mean
from podrl.algorithms.corrections import log_weight
from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked, segment_sum, sequence_mean
from podrl.types import Mask, Ratio

# Moments of the two probabilities, from which `pearson` makes the correlation once everything has been added up.
MOMENTS = ("x", "y", "xx", "yy", "xy")


def mismatch(
    logprob_BT: Float[Array, "B T"], sampler_logprob_BT: Float[Array, "B T"], mask_BT: Mask
) -> dict[str, Ratio]:
    """Per-token distances between trainer and sampler; all are 0 (ratios 1) when the two agree to the bit.

    With d = logprob - sampler_logprob and w = exp(d), tokens drawn by the sampler:

      sampler/abs_diff    mean |d|, nats
      sampler/exp_diff    mean exp|d|, at least 1
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


def pearson(mean: Mapping[str, float]) -> float:
    """Correlation of trainer and sampler probabilities, from the means of the `sampler/moment_*` entries.

    1 when either side does not vary: there is nothing to disagree about. Float32 means leave about three digits.
    """
    x, y, xx, yy, xy = (float(mean[f"sampler/moment_{name}"]) for name in MOMENTS)
    variance_x, variance_y = xx - x * x, yy - y * y
    if variance_x <= 0 or variance_y <= 0:
        return 1.0
    return min(max((xy - x * y) / (variance_x * variance_y) ** 0.5, -1.0), 1.0)


def sequence_log_perplexity(
    logprob_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    eps: float = 0.0,
) -> Float[Array, "B T"]:
    """Minus the mean log-probability of each token's sequence, nats per token, on every token of it."""
    return -sequence_mean(logprob_BT, mask_BT, length_BT, segment_BT, eps=eps)


def sequence_mismatch(
    logprob_BT: Float[Array, "B T"],
    sampler_logprob_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    eps: float = 0.0,
) -> dict[str, Ratio]:
    """Distances between trainer and sampler by sequence: perplexities, their ratio, and chi-squared divergences.

    Every sequence counts once. chi2_token = mean(w^2) - 1 and chi2_sequence = mean((product of w)^2) - 1 measure the
    variance an importance-weighted estimate would have.

    Args:
      logprob_BT: trainer's log-probabilities under the weights that sampled.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      segment_BT: sequence numbers.
      eps: added to lengths; 1e-8 is verl's arithmetic.
    """
    where = (mask_BT, length_BT, segment_BT)
    trainer_BT = sequence_log_perplexity(logprob_BT, *where, eps=eps)
    sampler_BT = sequence_log_perplexity(sampler_logprob_BT, *where, eps=eps)
    log_w_BT = log_weight(logprob_BT, sampler_logprob_BT, mask_BT)
    log_product_BT = segment_sum(log_w_BT, segment_BT)

    def square_less_1(log_x_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return jnp.expm1(2.0 * jnp.clip(log_x_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    per_sequence = {
        "sampler/trainer_ppl": jnp.exp(trainer_BT),
        "sampler/trainer_log_ppl": trainer_BT,
        "sampler/sampler_ppl": jnp.exp(sampler_BT),
        "sampler/sampler_log_ppl": sampler_BT,
        "sampler/log_ppl_diff": trainer_BT - sampler_BT,
        "sampler/log_ppl_abs_diff": jnp.abs(trainer_BT - sampler_BT),
        "sampler/ppl_ratio": jnp.exp(trainer_BT - sampler_BT),
        "sampler/chi2_sequence": square_less_1(log_product_BT),
    }
    result = {
        name: aggregate(value_BT, mask_BT, length_BT, "sequence-mean-token-mean")
        for name, value_BT in per_sequence.items()
    }
    return result | {"sampler/chi2_token": token_mean(square_less_1(log_w_BT), mask_BT)}
