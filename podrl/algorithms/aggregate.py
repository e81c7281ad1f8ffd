"""Aggregation modes: reduce per-token losses to a numerator and a denominator, which both add up over micro-batches.

In the table, l is the value of a loss token, n the number of loss tokens in its sequence, N the number of sequences
that have at least one loss token, and L a fixed length. sum(l) runs over all loss tokens of the batch, sum(n) over its
sequences.

=========================  ===============  ==========================
mode                       value            source
=========================  ===============  ==========================
token-mean                 sum(l) / sum(n)  DAPO, arXiv 2503.14476
sequence-mean-token-mean   sum(l / n) / N   GRPO, arXiv 2402.03300
sequence-mean-token-sum    sum(l) / N       REINFORCE over sequences
sequence-mean-token-scale  sum(l) / (L N)   Dr. GRPO, arXiv 2503.20783
token-sum-scale            sum(l) / L       Dr. GRPO without the mean
=========================  ===============  ==========================

`DIALECTS` has the names that other frameworks use for these modes.
"""

import jax.numpy as jnp
import numpy as np
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

# The meanings of other frameworks' names, taken from their source code: verl's `agg_loss` (one name changed its meaning
# after January 2026), TRL's `loss_type`, Tunix's `loss_agg_mode`. A preset that reproduces a framework understands the
# framework's names.
_VERL = {
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "sequence-mean-token-scale",
}
DIALECTS = {
    "verl": _VERL,
    "verl until January 2026": _VERL | {"seq-mean-token-sum-norm": "token-sum-scale"},
    "trl": {
        "grpo": "sequence-mean-token-mean",
        "bnpo": "token-mean",
        "dapo": "token-mean",
        "dr_grpo": "sequence-mean-token-scale",
    },
    "tunix": {
        "seq-mean-token-sum": "sequence-mean-token-sum",
        "sequence-mean-token-sum-norm": "sequence-mean-token-sum",
    },
}


def canonical_mode(mode: str, *, key: str = "grpo.loss_agg_mode", dialect: str = "") -> str:
    """Translates any known name of an aggregation mode into podrl's name.

    Args:
      mode: podrl's name, a name of `dialect`, or a name with one meaning in all dialects that use it.
      key: config key that error messages name.
      dialect: framework whose meaning of a name comes first, a key of `DIALECTS`; '' for no framework.

    Raises:
      ValueError: unknown name, or a name whose meaning differs between dialects.
    """
    if mode in MODES:
        return mode
    meanings = {whose: names[mode] for whose, names in DIALECTS.items() if mode in names}
    if dialect in meanings:
        return meanings[dialect]
    if not meanings:
        others = sorted({name for names in DIALECTS.values() for name in names})
        raise ValueError(f"{key}={mode!r} is not an aggregation mode: use one of {', '.join((*MODES, *others))}.")
    if len(set(meanings.values())) > 1:
        choices = ", ".join(f"{meaning!r} ({whose})" for whose, meaning in meanings.items())
        raise ValueError(f"{key}={mode!r} has more than one meaning: say which of {choices}.")
    return next(iter(meanings.values()))


def aggregate(
    value_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    mode: str,
    *,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Ratio:
    """Reduces per-token losses by a mode to a numerator and a denominator; add both over micro-batches and hosts.

    The number of sequences is the sum of mask / length over all tokens: a sequence adds 1 however it is packed, and 0
    if it has no loss token. `token-sum-scale` has no denominator that depends on data: its count is 0, and
    `Ratio.mean` then divides by 1.

    Args:
      value_BT: per-token values; masked tokens are ignored, even if they hold NaN.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      mode: name of the mode, in any spelling that `canonical_mode` knows.
      scale: fixed length L of the two scale modes, in tokens (usually the completion limit); other modes ignore it.
      eps: number added to the length in sequence-mean-token-mean; verl adds 1e-8.

    Returns:
      The numerator in the units of `value_BT`, and the number that divides it.

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
    """Computes the mean over loss tokens as a numerator and a denominator, for metrics, whatever the loss's mode is."""
    return Ratio(masked(value_BT, mask_BT).sum(), masked(jnp.ones_like(value_BT), mask_BT).sum())


def divisor(mask_BT: Float[np.ndarray, "B T"], mode: str) -> float:
    """Returns the divisor of the batch's sum: the number of loss tokens, or of sequences with a loss token, or 1.

    In a batch without a loss token the divisor is 1 for every mode, as it is in an update.

    Args:
      mask_BT: 1 on loss tokens; each row is one sequence, not packed.
      mode: name of the mode.
    """
    mode = canonical_mode(mode)
    if mode == "token-sum-scale":
        return 1.0
    counted = mask_BT > 0
    return float(counted.sum() if mode == "token-mean" else counted.any(axis=1).sum()) or 1.0


def as_token_mean(
    mask_BT: Float[np.ndarray, "B T"],
    mode: str,
    *,
    scale: float = 1.0,
    eps: float = 0.0,
    over_BT: Float[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B 1"]:
    """Returns one factor per sequence that makes `aggregate` compute a mean over tokens, whatever the mode is.

    Multiply token values by these factors, and aggregate the products by `mode`: the result is the mean of the values
    over tokens. So one part of a loss can be a mean over tokens while the mode divides its other parts differently.

    Args:
      mask_BT: 1 on loss tokens; each row is one sequence, not packed.
      mode: name of the mode.
      scale: fixed length L of the two scale modes, in tokens.
      eps: number that `aggregate` adds to the length in sequence-mean-token-mean.
      over_BT: 1 on the tokens to take the mean over: all loss tokens of some of the sequences; None for all loss
        tokens.
    """
    mode = canonical_mode(mode)
    length_B1 = (mask_BT > 0).sum(axis=1, keepdims=True)
    weight_B1 = {"sequence-mean-token-mean": length_B1 + eps, **dict.fromkeys(SCALED_MODES, scale)}.get(mode, 1.0)
    tokens = ((mask_BT if over_BT is None else over_BT) > 0).sum()
    return weight_B1 * divisor(mask_BT, mode) / max(int(tokens), 1) * np.ones_like(length_B1)
