"""The critic's loss: squared error of the values, clipped around the values before the update."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.aggregate import aggregate, token_mean
from podrl.algorithms.segments import masked
from podrl.types import Layout, Mask, Ratio


@flax.struct.dataclass
class CriticRows:
    """Packed rows that the critic's loss reads.

    Attributes:
      layout: the packed tokens, their segments and positions.
      mask_BT: 1 on loss tokens.
      length_BT: number of loss tokens in all pieces of this token's sample; 1 on padding and in pieces without a loss
        token.
      value_BT: the critic's value before the token, computed before the first update on this batch; reward units.
      return_BT: return that the value should predict, reward units.
    """

    layout: Layout
    mask_BT: Mask
    length_BT: Float[Array, "B T"]
    value_BT: Float[Array, "B T"]
    return_BT: Float[Array, "B T"]


def value_loss(
    value_BT: Float[Array, "B T"],
    rows: CriticRows,
    *,
    clip_range: float = 0.2,
    mode: str = "token-mean",
    scale: float = 1.0,
) -> tuple[Ratio, dict[str, Ratio]]:
    """Aggregates max((v - R)^2, (clip(v, v_old - clip_range, v_old + clip_range) - R)^2) / 2.

    This is PPO's clipped value loss as in TRL and verl; v is the value, v_old the value before the update, R the
    return.

    Args:
      value_BT: the critic's values, reward units; differentiated.
      rows: the critic's values before the update, the returns, and the mask of loss tokens.
      clip_range: distance between v and v_old beyond which the loss stops pulling v further away, reward units;
        infinity for no clip.
      mode: aggregation mode (`podrl.algorithms.aggregate`).
      scale: fixed length of the scale modes, tokens.

    Returns:
      The loss and critic/{vf_loss, vf_clipfrac, value, return}, all as numerators and denominators.

    Raises:
      ValueError: unknown mode; a clip range that is not above 0.
    """
    if not clip_range > 0:
        raise ValueError(f"ppo.clip_range_value={clip_range} must be above 0; use inf for no clipping.")
    mask_BT, length_BT = rows.mask_BT, rows.length_BT
    value_BT, old_value_BT, return_BT = (masked(x_BT, mask_BT) for x_BT in (value_BT, rows.value_BT, rows.return_BT))
    near_BT = jnp.clip(value_BT, old_value_BT - clip_range, old_value_BT + clip_range)
    free_BT, bound_BT = jnp.square(value_BT - return_BT), jnp.square(near_BT - return_BT)
    loss = aggregate(0.5 * jnp.maximum(free_BT, bound_BT), mask_BT, length_BT, mode, scale=scale)
    return loss, {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": token_mean((bound_BT > free_BT).astype(value_BT.dtype), mask_BT),
        "critic/value": token_mean(value_BT, mask_BT),
        "critic/return": token_mean(return_BT, mask_BT),
    }
