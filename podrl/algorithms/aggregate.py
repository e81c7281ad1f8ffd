"""How per-token values become one number: the aggregation modes, as numerators and denominators that add.

With l the value of a loss token, n the number of loss tokens in its sequence, N the number of sequences that have at
least one, and L a fixed length:

| mode                     | value             | also known as                                                      |
|--------------------------|-------------------|--------------------------------------------------------------------|
| token-mean               | sum(l) / sum(n)   | DAPO; TRL "dapo"                                                   |
| sequence-mean-token-mean | sum(l / n) / N    | GRPO; verl "seq-mean-token-mean"; TRL "grpo"                       |
| sequence-mean-token-sum  | sum(l) / N        | "seq-mean-token-sum"; Tunix "sequence-mean-token-sum-norm"         |
| sequence-mean-token-scale| sum(l) / (L N)    | Dr. GRPO; TRL "dr_grpo"; verl "seq-mean-token-sum-norm" since 2026 |
| token-sum-scale          | sum(l) / L        | verl "seq-mean-token-sum-norm" before                              |
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.segments import masked
from podrl.types import Mask, Ratio

MODES = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-scale",
    "token-sum-scale",
)
SCALED_MODES = ("sequence-mean-token-scale", "token-sum-scale")

# Names of other frameworks with one meaning. verl's "seq-mean-token-sum-norm" has two and is refused with both.
ALIASES = {
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm": "sequence-mean-token-sum",
}


def canonical_mode(mode: str, *, key: str = "grpo.loss_agg_mode") -> str:
    """podrl's name of an aggregation mode given under any name that has one meaning.

    Raises:
      ValueError: unknown or ambiguous name; `key` is the config key the message names.
    """
    mode = ALIASES.get(mode, mode)
    if mode == "seq-mean-token-sum-norm":
        raise ValueError(
            f"{key}='seq-mean-token-sum-norm' has two meanings: say 'token-sum-scale' for sum / scale (verl until "
            "January 2026) or 'sequence-mean-token-scale' for sum / (scale x sequences) (verl since, Dr. GRPO)."
        )
    if mode not in MODES:
        raise ValueError(f"{key}={mode!r} is not an aggregation mode: use one of {', '.join((*MODES, *ALIASES))}.")
    return mode


def aggregate(
    value_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    mode: str,
    *,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Ratio:
    """Numerator and denominator of an aggregation mode; both add over micro-batches, hosts and packings.

    A sequence counts by the sum of mask / length over its tokens, which is 1 however it is packed and 0 when it has no
    loss token. `token-sum-scale` has no denominator that depends on data: its count is 0, and `Ratio.mean` then divides
    by 1.

    Args:
      value_BT: per-token values; masked tokens are ignored whatever they hold.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      mode: a mode or alias of this module.
      scale: the fixed length L of the two scale modes, in tokens (usually the completion limit); unused by the others.
      eps: added to the length in sequence-mean-token-mean; 1e-8 is verl's arithmetic.

    Raises:
      ValueError: unknown mode.
    """
    mode = canonical_mode(mode)
    weight_BT = masked(jnp.ones_like(value_BT), mask_BT)
    value_BT = masked(value_BT, mask_BT)
    if mode == "token-mean":
        return Ratio(value_BT.sum(), weight_BT.sum())
    if mode == "token-sum-scale":
        return Ratio(value_BT.sum() / scale, jnp.zeros((), value_BT.dtype))
    sequences = (weight_BT / length_BT).sum()
    if mode == "sequence-mean-token-mean":
        return Ratio((value_BT / (length_BT + eps)).sum(), sequences)
    return Ratio(value_BT.sum() / (scale if mode == "sequence-mean-token-scale" else 1.0), sequences)


def token_mean(value_BT: Float[Array, "B T"], mask_BT: Mask) -> Ratio:
    """The mean over loss tokens, undivided: what metrics use whatever the loss is aggregated by."""
    return Ratio(masked(value_BT, mask_BT).sum(), masked(jnp.ones_like(value_BT), mask_BT).sum())
