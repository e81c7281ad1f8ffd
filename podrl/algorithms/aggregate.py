"""Aggregation modes: turn per-token losses into one number, as numerators and denominators that add.

With l the value of a loss token, n the number of loss tokens in its sequence, N the number of sequences that have at
least one, and L a fixed length:

=========================  ===============  ==========================
mode                       value            source
=========================  ===============  ==========================
token-mean                 sum(l) / sum(n)  DAPO, arXiv 2503.14476
sequence-mean-token-mean   sum(l / n) / N   GRPO, arXiv 2402.03300
sequence-mean-token-sum    sum(l) / N       REINFORCE over sequences
sequence-mean-token-scale  sum(l) / (L N)   Dr. GRPO, arXiv 2503.20783
token-sum-scale            sum(l) / L       the same without the mean
=========================  ===============  ==========================

`DIALECTS` says what frameworks call them.
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

# The meaning of frameworks' own names, read off their sources: verl's `agg_loss` (one name changed its meaning after
# January 2026), TRL's `loss_type`, Tunix's `loss_agg_mode`. A preset that reproduces a framework speaks its names.
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
    """Returns podrl's name of an aggregation mode that is given under any name.

    Args:
      mode: podrl's name; one of the dialect; or one that all dialects which have it mean alike.
      key: the config key that messages name.
      dialect: whose names go first, a key of `DIALECTS`; '' for nobody's.

    Raises:
      ValueError: unknown or ambiguous name.
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
        told = ", ".join(f"{meaning!r} ({whose})" for whose, meaning in meanings.items())
        raise ValueError(f"{key}={mode!r} has more than one meaning: say which of {told}.")
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
    """Reduces per-token losses by a mode: numerator and denominator, which add over micro-batches, hosts, packings.

    A sequence counts by the sum of mask / length over its tokens, which is 1 however it is packed and 0 when it has no
    loss token. `token-sum-scale` has no denominator that depends on data: its count is 0, and `Ratio.mean` then divides
    by 1.

    Args:
      value_BT: per-token values; masked tokens are ignored whatever they hold.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      mode: a mode, or another name of one.
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
    """Averages over loss tokens, undivided: the mean that metrics use, whatever mode aggregates the loss."""
    return Ratio(masked(value_BT, mask_BT).sum(), masked(jnp.ones_like(value_BT), mask_BT).sum())


def divisor(mask_BT: Float[np.ndarray, "B T"], mode: str) -> float:
    """Returns the divisor of a mode: its number of loss tokens, of sequences with any, or 1; rows are sequences.

    Without a loss token it is 1, as an update divides by 1 then.
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
    """Returns the factor on each sequence's values by which a mode gives the mean over loss tokens.

    So two parts of a loss are aggregated together and have denominators of their own. Arguments as of `aggregate`.

    Args:
      over_BT: 1 on the tokens that the mean is over, whole sequences; None for all loss tokens.
    """
    mode = canonical_mode(mode)
    length_B1 = (mask_BT > 0).sum(axis=1, keepdims=True)
    weight_B1 = {"sequence-mean-token-mean": length_B1 + eps, **dict.fromkeys(SCALED_MODES, scale)}.get(mode, 1.0)
    tokens = ((mask_BT if over_BT is None else over_BT) > 0).sum()
    return weight_B1 * divisor(mask_BT, mode) / max(int(tokens), 1) * np.ones_like(length_B1)
