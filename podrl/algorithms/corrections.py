"""Corrections for a sampler that differs from the trainer's policy: importance weights and rejection masks.

The rollout engine samples with other kernels, another precision and, if samples may be stale, older weights than the
trainer's, so the two have different probabilities for a token. Their quotient is w = exp(old_logprob -
sampler_logprob), trainer over sampler; a weight computed from w corrects the loss for the difference. w compares the
*old* policy, from which the policy ratio r starts, with the sampler: r is current over old, so r w is current over
sampler. If the sampler's log-probabilities are used as the old ones, w is 1 everywhere, so nothing is corrected twice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked, segment_sum, sequence_mean
from podrl.types import Mask

# kind: (default low, default high, formula of the weight)
CORRECTIONS = {
    "none": (0.0, float("inf"), "1"),
    "tis": (0.0, 2.0, "min(w, high)"),
    "sequence_tis": (0.0, 2.0, "min(product of w over the sequence, high)"),
    "sequence_mask": (0.0, 3.0, "product of w over the sequence if low <= it <= high else 0"),
    "icepop": (0.5, 5.0, "w if low <= w <= high else 0"),
    "kpop": (
        *(0.0, 0.1),
        "w if both KL divergences of (p, 1 - p) and (q, 1 - q) are <= high else 0, p = exp(old_logprob), "
        "q = exp(sampler_logprob)",
    ),
    "geometric_mask": (0.999, 1.001, "1 if low <= (product of w over the sequence)^(1/n) <= high else 0"),
}

# Corrections that multiply or average w over a whole sample.
SAMPLE_CORRECTIONS = ("sequence_tis", "sequence_mask", "geometric_mask")


def log_weight(
    old_logprob_BT: Float[Array, "B T"], sampler_logprob_BT: Float[Array, "B T"], mask_BT: Mask
) -> Float[Array, "B T"]:
    """Computes the log of the importance weight w, in nats, without gradient; 0 on masked tokens whatever they hold.

    Args:
      old_logprob_BT: trainer's log-probabilities under the policy that the ratio starts from, nats.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens, nats.
      mask_BT: 1 on loss tokens.
    """
    return jax.lax.stop_gradient(masked(old_logprob_BT, mask_BT) - masked(sampler_logprob_BT, mask_BT))


def importance_weight(
    old_logprob_BT: Float[Array, "B T"],
    sampler_logprob_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    kind: str,
    *,
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """Computes the factor on each token's policy loss; 1 on masked tokens, no gradient.

    `CORRECTIONS` has the formulas. Aggregation still divides by all loss tokens, including the tokens of weight 0.
    Sources: TIS (truncated importance sampling, fengyao.notion.site/off-policy-rl), IcePop (arXiv 2510.18855), KPop
    (ringtech.notion.site/kpop), TRL's sequence mask, geometric-mean masking of sequences (yingru.notion.site, "When
    speed kills stability").

    Args:
      old_logprob_BT: trainer's log-probabilities under the policy that the ratio starts from, nats.
      sampler_logprob_BT: the rollout engine's log-probabilities of the same tokens, nats.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      segment_BT: number of each token's sequence within its row, 0 on padding.
      kind: name of the correction: none, tis, sequence_tis, sequence_mask, icepop, kpop or geometric_mask.
      low: lower bound, unitless; none, tis, sequence_tis and kpop ignore it.
      high: upper bound, unitless; for kpop it bounds a divergence, in nats; none ignores it.
    """
    log_w_BT = log_weight(old_logprob_BT, sampler_logprob_BT, mask_BT)
    if kind == "none":
        return jnp.ones_like(log_w_BT)
    if kind == "geometric_mask":
        mean_BT = sequence_mean(log_w_BT, mask_BT, length_BT, segment_BT)
        return jnp.where(mask_BT.astype(bool), within(mean_BT, low, high).astype(log_w_BT.dtype), 1.0)
    if kind in ("sequence_tis", "sequence_mask"):
        log_w_BT = segment_sum(log_w_BT, segment_BT)
    weight_BT = jnp.exp(jnp.clip(log_w_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if kind in ("icepop", "sequence_mask"):
        weight_BT = jnp.where(within(log_w_BT, low, high), weight_BT, 0.0)
    elif kind == "kpop":
        logprobs = (masked(old_logprob_BT, mask_BT), masked(sampler_logprob_BT, mask_BT))
        weight_BT = jnp.where(binary_divergence(*logprobs) <= high, weight_BT, 0.0)
    else:
        assert kind in ("tis", "sequence_tis"), kind
        weight_BT = jnp.minimum(weight_BT, high)
    return jnp.where(mask_BT.astype(bool), weight_BT, 1.0)


def binary_divergence(logprob_BT: Float[Array, "B T"], other_logprob_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes the larger of D(p, q) and D(q, p), in nats, without gradient.

    p and q are the probabilities of the token under the two policies. D is the Kullback-Leibler divergence over two
    events, this token and any other token: D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). p and q are clipped
    to [1e-6, 1 - 1e-6], which keeps D finite for a token of probability 1.

    Args:
      logprob_BT: log p, nats.
      other_logprob_BT: log q, nats.
    """
    logprobs = (jax.lax.stop_gradient(logprob_BT), jax.lax.stop_gradient(other_logprob_BT))
    p_BT, q_BT = (jnp.clip(jnp.exp(logprob), 1e-6, 1 - 1e-6) for logprob in logprobs)
    token_BT = jnp.log(p_BT) - jnp.log(q_BT)
    other_BT = jnp.log1p(-p_BT) - jnp.log1p(-q_BT)
    return jnp.maximum(p_BT * token_BT + (1 - p_BT) * other_BT, -q_BT * token_BT - (1 - q_BT) * other_BT)


def stale_weight(age_BT: Float[Array, "B T"], mask_BT: Mask, bound: int) -> Float[Array, "B T"]:
    """Computes the factor that takes old tokens out of the policy loss: 0 if the age is above `bound`, else 1.

    The factor is 1 on masked tokens. Aggregation still divides by all loss tokens, including the tokens left out.

    Args:
      age_BT: age of the token: the number of steps between the weights that sampled it and the trained weights.
      mask_BT: 1 on loss tokens.
      bound: largest age that counts, in steps.
    """
    return jnp.where(mask_BT.astype(bool) & (age_BT > bound), jnp.zeros_like(age_BT), 1.0)


def within(log_x_BT: Float[Array, "B T"], low: float, high: float):
    """True where low <= exp(log_x) <= high; log_x is clipped to +-LOG_RATIO_LIMIT first."""
    x_BT = jnp.exp(jnp.clip(log_x_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return (x_BT >= low) & (x_BT <= high)
