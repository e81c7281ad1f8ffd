"""Self-attention over packed rows: causal within a segment, with windows and soft caps."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

NEG_INF = -1e30


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_BT: Int[Array, "B T"],
    *,
    window: Int[Array, ""],
    softcap: float,
    mesh: Mesh | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q k)) v where token t sees s iff s <= t, t - s < window and both share a non-zero segment.

    Args:
      q_BTNH: scaled, rotated queries. Heads are grouped: query head n reads key/value head n // (N / K).
      segment_BT: 0 is padding; its outputs are finite and meaningless.
      window: how many tokens back are seen, itself included; traced, so it may differ per layer.
      softcap: c in c * tanh(score / c); 0 is off.

    Scores and softmax are float32; the output has q's dtype.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32)
    if softcap:
        score_BKGTS = jnp.tanh(score_BKGTS / softcap) * softcap
    t_T = jnp.arange(T)
    back_TS = t_T[:, None] - t_T[None, :]
    seen_BTS = (
        (segment_BT[:, :, None] == segment_BT[:, None, :])
        & (segment_BT[:, :, None] > 0)
        & (back_TS >= 0)
        & (back_TS < window)
    )
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, NEG_INF)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BTKH).reshape(B, T, N, H)
