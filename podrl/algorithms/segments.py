"""Masks and sums over the sequences that share a packed row.

A packed row holds several sequences; `segment_BT` numbers them 1, 2, ... and is 0 on padding. A padded layout is the
special case of one segment per row, so everything here serves both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podrl.types import Mask


def masked(x_BT: Float[Array, "B T"], mask_BT: Mask) -> Float[Array, "B T"]:
    """Keeps values where the mask is set; 0 elsewhere.

    A masked token loses its value and its gradient, even if it held NaN or infinity. This holds only if the mask is
    applied before the arithmetic: a NaN that has entered the arithmetic comes back through the chain rule as 0 * NaN.

    Args:
      x_BT: values.
      mask_BT: 1 (or True) on tokens that count, 0 elsewhere.
    """
    return jnp.where(mask_BT.astype(bool), x_BT, jnp.zeros((), x_BT.dtype))


def segment_sum(x_BT: Float[Array, "B T"], segment_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Sums over each token's own sequence, and writes the sum to every token of the sequence.

    The terms of a sequence are added in token order starting from 0, so the sum does not depend on the other sequences
    of the row: packing leaves it unchanged to the bit, except on a GPU, where XLA may add in any order. Differentiable.

    Args:
      x_BT: values, 0 on tokens that must not count; padding (segment 0) is summed like one more sequence.
      segment_BT: sequence numbers, each at most T.
    """
    slots = x_BT.shape[1] + 1

    def one_row(x_T: Float[Array, " T"], segment_T: Int[Array, " T"]) -> Float[Array, " T"]:
        return jnp.zeros(slots, x_T.dtype).at[segment_T].add(x_T)[segment_T]

    return jax.vmap(one_row)(x_BT, segment_BT)


def sequence_mean(
    x_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    eps: float = 0.0,
) -> Float[Array, "B T"]:
    """Averages over the loss tokens of each token's own sequence, and writes the mean to every token of the sequence.

    Args:
      x_BT: values; masked tokens are ignored, even if they hold NaN.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in this token's sequence, 1 on padding.
      segment_BT: number of each token's sequence within its row, 0 on padding.
      eps: number added to the length; 0 gives the exact mean, and verl adds 1e-8.
    """
    return segment_sum(masked(x_BT, mask_BT), segment_BT) / (length_BT + eps)
