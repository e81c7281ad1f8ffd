"""Linear attention by the gated delta rule (arXiv 2412.06464): packed rows in chunks, and one token at a time.

Each head keeps a matrix, its state, that maps keys to values. A token first decays the state, then replaces the value
that the state has under the token's key by a mix of it and the token's value, and reads the state by its query:

    S_t = exp(decay_t) S_(t-1),  S_t += beta_t k_t (v_t - k_t S_t),  out_t = q_t S_t

Letters beside those of podrl.types: H key width, U value width, X chunks of a row, C tokens of a chunk, I channels,
W taps of the convolution.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from podrl.models.config import ModelConfig
from podrl.types import PyTree

CHUNK = 64
_NONE = -1


def param_shapes(config: ModelConfig) -> Mapping[str, tuple[tuple[int, ...], tuple[str, ...], float]]:
    """Declares the leaves of a layer by name: (shape, logical axes, standard deviation at the start).

    They are not cut over tensor.
    """
    sizes = config.delta
    assert sizes is not None
    D, values = config.model_dim, sizes.value_heads * sizes.value_dim
    std = D**-0.5
    return {
        "delta_in": ((D, sizes.channels), ("embed", "norm"), std),
        "delta_gate": ((D, values), ("embed", "norm"), std),
        "delta_beta": ((D, sizes.value_heads), ("embed", "norm"), std),
        "delta_decay": ((D, sizes.value_heads), ("embed", "norm"), std),
        "delta_conv": ((sizes.channels, 1, sizes.taps), ("norm", "norm", "norm"), sizes.taps**-0.5),
        "delta_rate": ((sizes.value_heads,), ("norm",), 1.0),
        "delta_shift": ((sizes.value_heads,), ("norm",), -1.0),
        "delta_norm": ((sizes.value_dim,), ("norm",), -1.0),
        "delta_out": ((values, D), ("norm", "embed"), values**-0.5),
    }


@flax.struct.dataclass
class Chunks:
    """How the tokens of packed rows depend on each other, cut into chunks.

    A token's past inside its chunk is an earlier part of its own segment, and of the segment that its own goes on from.
    Before that lies one of three states: that at the end of the chunk before, that at the end of the last segment that
    others go on from, or none.

    Attributes:
      past_BXCC: [.., i, j] is true where token j is token i or in its past.
      runs_BXC: true where the state at the end of the chunk before is in the token's past.
      held_BXC: true where the held state is.
      last_BX: place of the last token of the chunk that is no padding; -1 where there is none.
      hold_BX: place of the last token whose segment others go on from: its state is held from here on; -1 for none.
    """

    past_BXCC: Bool[Array, "B X C C"]
    runs_BXC: Bool[Array, "B X C"]
    held_BXC: Bool[Array, "B X C"]
    last_BX: Int[Array, "B X"]
    hold_BX: Int[Array, "B X"]


def cut(
    segment_BT: Int[Array, "B T"],
    prefix_BT: Int[Array, "B T"] | None = None,
    before_B: Int[Array, " B"] | None = None,
    *,
    chunk: int = CHUNK,
) -> Chunks:
    """Cuts rows into chunks, of which the last may be padded. Segments may begin anywhere.

    Args:
      segment_BT: number of each token's segment, at most T; tokens of a segment lie side by side; 0 is padding.
      prefix_BT: number of the segment that each token's segment goes on from; 0 is none. That segment goes on from
        none, and between the two lie only segments that go on from it. None where no segment goes on from another.
      before_B: segment of the state that each row begins with; 0 is none. None where no row has such a state.
      chunk: C.
    """
    segment_BXC = _chunked(segment_BT, chunk)
    B, _, C = segment_BXC.shape
    place_C = jnp.arange(C)
    real_BXC = segment_BXC > 0
    last_BX = jnp.max(jnp.where(real_BXC, place_C, _NONE), axis=2)
    ends_BX = jnp.take_along_axis(segment_BXC, jnp.maximum(last_BX, 0)[..., None], axis=2)[..., 0]
    if before_B is None:
        before_B = jnp.zeros(B, segment_BT.dtype)
    came_BX = jnp.concatenate([before_B[:, None], ends_BX[:, :-1]], axis=1)[..., None]
    own_BXCC = segment_BXC[..., :, None] == segment_BXC[..., None, :]
    runs_BXC = real_BXC & (segment_BXC == came_BX)
    held_BXC, hold_BX = jnp.zeros_like(runs_BXC), jnp.full_like(last_BX, _NONE)
    if prefix_BT is not None:
        prefix_BXC = _chunked(prefix_BT, chunk)
        from_BXCC = (prefix_BXC[..., :, None] == segment_BXC[..., None, :]) & (prefix_BXC > 0)[..., None]
        runs_BXC |= (prefix_BXC > 0) & (prefix_BXC == came_BX)
        held_BXC = (prefix_BXC > 0) & ~runs_BXC & ~jnp.any(from_BXCC, axis=3)
        own_BXCC |= from_BXCC
        row_B1 = jnp.arange(B)[:, None]
        used_BS = jnp.zeros((B, segment_BT.shape[1] + 1), bool).at[row_B1, prefix_BT].set(True)
        goes_on_BXC = real_BXC & used_BS[row_B1[..., None], segment_BXC]
        hold_BX = jnp.max(jnp.where(goes_on_BXC, place_C, _NONE), axis=2)
    past_BXCC = own_BXCC & (place_C[:, None] >= place_C) & real_BXC[..., None]
    return Chunks(past_BXCC, runs_BXC, held_BXC, last_BX, hold_BX)


def _chunked(x_BT: Array, chunk: int) -> Array:
    """Pads time to whole chunks and cuts it into them: (B, X, C, ...)."""
    B, T, *rest = x_BT.shape
    padded = jnp.pad(x_BT, [(0, 0), (0, -T % chunk), *[(0, 0)] * len(rest)])
    return padded.reshape(B, -1, chunk, *rest)


def unit(x: Float[Array, "*X H"]) -> Float[Array, "*X H"]:
    """Scales vectors to length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def step(
    state_BNHU: Float[Array, "B N H U"],
    q_BNH: Float[Array, "B N H"],
    k_BNH: Float[Array, "B N H"],
    v_BNU: Float[Array, "B N U"],
    decay_BN: Float[Array, "B N"],
    beta_BN: Float[Array, "B N"],
) -> tuple[Float[Array, "B N U"], Float[Array, "B N H U"]]:
    """Applies the rule to one token of each row, in float32: (outputs, states after it).

    Args:
      state_BNHU: states before the token.
      q_BNH, k_BNH: queries, scaled, and keys of length 1.
      v_BNU: values.
      decay_BN: logarithm of what is kept of the state, at most 0.
      beta_BN: share of the value that is replaced, in [0, 1].
    """
    kept_BN1, same_BN1 = jnp.exp(decay_BN)[..., None], jnp.sum(q_BNH * k_BNH, axis=2, keepdims=True)
    # One sum reads the old state for both, and the new state depends on it: so XLA can write the new one in place.
    key_and_query = jnp.stack([k_BNH, q_BNH])[..., None] * state_BNHU
    known_BNU, read_BNU = jnp.sum(key_and_query, axis=3) * kept_BN1
    change_BNU = (v_BNU.astype(jnp.float32) - known_BNU) * beta_BN[..., None]
    out_BNU = read_BNU + same_BN1 * change_BNU
    return out_BNU, state_BNHU * kept_BN1[..., None] + k_BNH[..., None] * change_BNU[..., None, :]


def over_rows(
    q_BTNH: Float[Array, "B T N H"],
    k_BTNH: Float[Array, "B T N H"],
    v_BTNU: Float[Array, "B T N U"],
    decay_BTN: Float[Array, "B T N"],
    beta_BTN: Float[Array, "B T N"],
    chunks: Chunks,
    state_BNHU: Float[Array, "B N H U"] | None = None,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N H U"]]:
    """Applies the rule to packed rows, in float32: (outputs, states after the last token of each row).

    Inside a chunk the changes of all tokens solve one triangular system (arXiv 2406.06484); chunks, of a power of two
    tokens, follow each other in a scan that carries the state, and the held one. Arguments per token as of `step`;
    outputs of padding are 0.

    Args:
      chunks: see `cut`.
      state_BNHU: states that rows begin with, where `cut` was given `before_B`.
    """
    B, T, N, H = k_BTNH.shape
    U, C = v_BTNU.shape[-1], chunks.past_BXCC.shape[-1]
    q, k, v, decay, beta = (
        jnp.moveaxis(_chunked(x.astype(jnp.float32), C), 3, 2) for x in (q_BTNH, k_BTNH, v_BTNU, decay_BTN, beta_BTN)
    )
    past = chunks.past_BXCC[:, :, None]
    # Logarithm of what is kept from the state before the token's past in this chunk until after the token itself.
    kept_BXNC = _sum("BXNCD,BXND->BXNC", past.astype(jnp.float32), decay)
    pair_BXNCC = jnp.exp(jnp.where(past, kept_BXNC[..., :, None] - kept_BXNC[..., None, :], -jnp.inf))
    before = ~jnp.eye(C, dtype=bool)
    system = _sum("BXNCH,BXNDH->BXNCD", k * beta[..., None], k) * jnp.where(before, pair_BXNCC, 0.0)
    entering_BXNC = jnp.exp(kept_BXNC)
    sides = jnp.concatenate([v * beta[..., None], k * (beta * entering_BXNC)[..., None]], axis=-1)
    solved = _sum("BXNCD,BXNDU->BXNCU", _inverse(system), sides)
    inside = {
        "change": solved[..., :U],  # of each token, as if no state entered
        "undo": solved[..., U:],  # what of an entering state the changes take back
        "scores": _sum("BXNCH,BXNDH->BXNCD", q, k) * pair_BXNCC,
        "reads": q * entering_BXNC[..., None],
        "keys": k,
        "kept": kept_BXNC,
    }

    def body(carry: tuple[Array, Array], xs: tuple[dict[str, Array], Chunks]) -> tuple[tuple[Array, Array], Array]:
        x, now = xs
        sources = ((carry[0], now.runs_BXC), (carry[1], now.held_BXC))

        def entering(weight_BNCH: Array) -> Array:
            """Multiplies each token's row with the state before its past."""
            (run, runs_BC), (held, held_BC) = sources
            from_run = _sum("BNCH,BNHU->BNCU", weight_BNCH * runs_BC[:, None, :, None], run)
            return from_run + _sum("BNCH,BNHU->BNCU", weight_BNCH * held_BC[:, None, :, None], held)

        change_BNCU = x["change"] - entering(x["undo"])
        out_BNCU = entering(x["reads"]) + _sum("BNCD,BNDU->BNCU", x["scores"], change_BNCU)

        def after(place_B: Array, otherwise: Array) -> Array:
            """Computes the state after the token at a place of each row; `otherwise` where there is none."""
            at_B = jnp.maximum(place_B, 0)
            take = lambda y, axis: jnp.take_along_axis(  # noqa: E731
                y, at_B.reshape(-1, *[1] * (y.ndim - 1)), axis=axis
            ).squeeze(axis)
            kept_BN, past_BC = take(x["kept"], 2), take(now.past_BXCC, 1)
            weight_BNC = jnp.exp(jnp.where(past_BC[:, None], kept_BN[..., None] - x["kept"], -jnp.inf))
            made = _sum("BNCH,BNCU->BNHU", x["keys"] * weight_BNC[..., None], change_BNCU)
            for state, from_BC in sources:
                made += state * jnp.where(take(from_BC, 1)[:, None], jnp.exp(kept_BN), 0.0)[..., None, None]
            return jnp.where((place_B >= 0)[:, None, None, None], made, otherwise)

        return (after(now.last_BX, carry[0]), after(now.hold_BX, carry[1])), out_BNCU

    first = jnp.zeros((B, N, H, U), jnp.float32)
    begin = (first if state_BNHU is None else state_BNHU, first)
    by_chunk = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (inside, chunks))
    (state_BNHU, _), out_XBNCU = lax.scan(body, begin, by_chunk)
    out_BTNU = out_XBNCU.transpose(1, 0, 3, 2, 4).reshape(B, -1, N, U)[:, :T]
    return out_BTNU, state_BNHU


def _inverse(low_XCC: Float[Array, "*X C C"]) -> Float[Array, "*X C C"]:
    """Inverts the sum of the identity and a matrix that is zero on and above its diagonal.

    Products of blocks, which double in size, are as stable as substitution, and are cut over a mesh like any others.
    XLA's triangular solve is not: on eight faked CPU devices a scan of layers with one in it hung.
    """
    *X, C, _ = low_XCC.shape
    size, inverse = 1, jnp.ones((*X, C, 1, 1), low_XCC.dtype)  # of the blocks on the diagonal
    while size < C:
        blocks = low_XCC.reshape(*X, C // (2 * size), 2 * size, C // (2 * size), 2 * size)
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_sum("...CD,...DE->...CE", lower, _sum("...CD,...DE->...CE", corner, upper))
        rows = jnp.concatenate([upper, jnp.zeros_like(upper)], -1), jnp.concatenate([corner, lower], -1)
        size, inverse = 2 * size, jnp.concatenate(rows, -2)
    return inverse[..., 0, :, :]


def previous(segment_BT: Int[Array, "B T"], prefix_BT: Int[Array, "B T"] | None = None) -> Int[Array, "B T"]:
    """Returns the place of the token before each one, through the segment it goes on from; -1 where there is none."""
    B, T = segment_BT.shape
    place_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    inside_BT = jnp.concatenate([jnp.zeros((B, 1), bool), segment_BT[:, 1:] == segment_BT[:, :-1]], axis=1)
    first_BT = jnp.full((B, T), _NONE)
    if prefix_BT is not None:
        row_B1 = jnp.arange(B)[:, None]
        end_BS = jnp.full((B, T + 1), _NONE).at[row_B1, segment_BT].max(place_BT)
        first_BT = jnp.where(prefix_BT > 0, end_BS[row_B1, prefix_BT], _NONE)
    return jnp.where(segment_BT > 0, jnp.where(inside_BT, place_BT - 1, first_BT), _NONE)


def convolve(
    x_BTI: Float[Array, "B T I"], weight_WI: Float[Array, "W I"], previous_BT: Int[Array, "B T"]
) -> Float[Array, "B T I"]:
    """Mixes each channel over a token and the W - 1 tokens before it; the last tap is the token's own.

    Args:
      previous_BT: place of the token before each one, see `previous`.
    """
    out_BTI, at_BT = x_BTI * weight_WI[-1], jnp.broadcast_to(jnp.arange(x_BTI.shape[1]), previous_BT.shape)
    for tap_I in weight_WI[-2::-1]:
        at_BT = jnp.where(at_BT >= 0, jnp.take_along_axis(previous_BT, jnp.maximum(at_BT, 0), axis=1), _NONE)
        there_BTI = jnp.take_along_axis(x_BTI, jnp.maximum(at_BT, 0)[..., None], axis=1)
        out_BTI = out_BTI + jnp.where((at_BT >= 0)[..., None], there_BTI, 0) * tap_I
    return out_BTI


def mix(
    h_BTD: Float[Array, "B T D"],
    layer: PyTree,
    config: ModelConfig,
    chunks: Chunks,
    previous_BT: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Applies a layer's linear attention (Qwen 3.5): convolution, delta rule, gated norm and output.

    Args:
      h_BTD: the normalised residual stream.
      layer: the layer's leaves, see `param_shapes`.
      config: configuration of a model whose layers are all like this one.
      chunks, previous_BT: see `cut` and `previous`.
    """
    out_BTD, _, _ = _mixed(
        h_BTD,
        layer,
        config,
        lambda x_BTI, weight_WI: (convolve(x_BTI, weight_WI, previous_BT), None),
        lambda q, k, v, decay, beta: over_rows(q, k, v, decay, beta, chunks),
    )
    return out_BTD


def memory_shapes(config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns shapes of what a layer keeps of a sequence: its float32 state (N, H, U), and inputs of the convolution.

    Of these the last W - 1, side by side.
    """
    sizes = config.delta
    assert sizes is not None
    return (sizes.value_heads, sizes.key_dim, sizes.value_dim), ((sizes.taps - 1) * sizes.channels,)


Memory = tuple[Float[Array, "B N H U"], Float[Array, "B I"]]


def mix_on(
    h_BTD: Float[Array, "B T D"], layer: PyTree, config: ModelConfig, memory: Memory, length_B: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], Memory]:
    """As `mix`, for tokens that follow others: rows of one sequence each, and the memory after their last tokens.

    Args:
      memory: of the tokens before each row, see `memory_shapes`; zeros where there are none.
      length_B: tokens of each row; what lies behind is padding.
    """
    segment_BT = (jnp.arange(h_BTD.shape[1]) < length_B[:, None]).astype(jnp.int32)
    chunks = cut(segment_BT, before_B=jnp.ones_like(length_B))
    out_BTD, state_BNHU, inputs_BI = _mixed(
        h_BTD,
        layer,
        config,
        lambda x_BTI, weight_WI: _convolve_on(x_BTI, weight_WI, memory[1], length_B),
        lambda q, k, v, decay, beta: over_rows(q, k, v, decay, beta, chunks, memory[0]),
    )
    return out_BTD, (state_BNHU, inputs_BI)


def mix_one(
    h_B1D: Float[Array, "B 1 D"], layer: PyTree, config: ModelConfig, memory: Memory
) -> tuple[Float[Array, "B 1 D"], Memory]:
    """As `mix_on`, of one token for each row."""

    def rule(*arrays: Array) -> tuple[Array, Array]:
        out_BNU, state_BNHU = step(memory[0], *(x[:, 0] for x in arrays))
        return out_BNU[:, None], state_BNHU

    out_B1D, state_BNHU, inputs_BI = _mixed(
        h_B1D,
        layer,
        config,
        lambda x_B1I, weight_WI: _convolve_on(x_B1I, weight_WI, memory[1], None),
        rule,
    )
    return out_B1D, (state_BNHU, inputs_BI)


def _convolve_on(
    x_BTI: Array, weight_WI: Array, inputs_BI: Array, length_B: Int[Array, " B"] | None
) -> tuple[Array, Array]:
    """As `convolve`, of rows that follow W - 1 inputs each: (outputs, the last W - 1 inputs of each row).

    `length_B` counts the tokens of each row; None where none is padding.
    """
    W, (B, T, channels) = len(weight_WI), x_BTI.shape
    wide_BTI = jnp.concatenate([inputs_BI.reshape(B, W - 1, channels), x_BTI], axis=1)
    wide_BTI = lax.optimization_barrier(wide_BTI)  # its only reader, so that XLA can write the new inputs in place
    out_BTI = x_BTI * weight_WI[-1]
    for w in range(W - 2, -1, -1):
        out_BTI = out_BTI + wide_BTI[:, w : w + T] * weight_WI[w]
    if length_B is None:
        return out_BTI, wide_BTI[:, T:].reshape(B, -1)
    at_BW1 = (length_B[:, None] + jnp.arange(W - 1))[..., None]
    return out_BTI, jnp.take_along_axis(wide_BTI, at_BW1, axis=1).reshape(B, -1)


def _mixed(
    h_BTD: Array, layer: PyTree, config: ModelConfig, convolve: Callable, rule: Callable
) -> tuple[Array, Array, Any]:
    """Applies a layer's linear attention: (its output, what `rule` and `convolve` return beside theirs).

    Args:
      convolve: (inputs (B, T, I), weight (W, I)) -> (outputs, anything).
      rule: arguments per token as of `over_rows` -> (outputs, anything).
    """
    sizes = config.delta
    assert sizes is not None

    def matrix(name: str) -> Array:
        return layer[name].astype(h_BTD.dtype)

    mixed_BTI, inputs = convolve(h_BTD @ matrix("delta_in"), matrix("delta_conv")[:, 0].T)
    mixed_BTI = jax.nn.silu(mixed_BTI)
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = jnp.split(mixed_BTI, [keys, 2 * keys], axis=-1)
    B, T, _ = h_BTD.shape
    # Each head of keys serves as many heads of values side by side.
    q_BTNH, k_BTNH = (
        jnp.repeat(unit(x.reshape(B, T, -1, sizes.key_dim)), sizes.value_heads // sizes.key_heads, axis=2)
        for x in (q, k)
    )
    beta_BTN = jax.nn.sigmoid((h_BTD @ matrix("delta_beta")).astype(jnp.float32))
    speed_BTN = jax.nn.softplus((h_BTD @ matrix("delta_decay")).astype(jnp.float32) + layer["delta_shift"])
    decay_BTN = -jnp.exp(layer["delta_rate"].astype(jnp.float32)) * speed_BTN
    out_BTNU, state = rule(
        q_BTNH * sizes.key_dim**-0.5, k_BTNH, v.reshape(B, T, -1, sizes.value_dim), decay_BTN, beta_BTN
    )
    gate_BTNU = (h_BTD @ matrix("delta_gate")).reshape(out_BTNU.shape).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(out_BTNU * out_BTNU, axis=-1, keepdims=True) + config.norm_eps)
    out_BTNU = (out_BTNU * scale).astype(h_BTD.dtype) * layer["delta_norm"].astype(h_BTD.dtype)
    out_BTNU = (out_BTNU * jax.nn.silu(gate_BTNU)).astype(h_BTD.dtype)
    return out_BTNU.reshape(B, T, -1) @ matrix("delta_out"), state, inputs


def _sum(letters: str, a: Array, b: Array) -> Array:
    return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST)
