"""Linear attention by the gated delta rule (arXiv 2412.06464): packed rows in chunks, and one token at a time.

Each head has a state: a matrix that maps keys to values. A token first decays the state. It then replaces the value
that the state has for the token's key by a mix of this value and the token's own. Last, it reads the state with its
query:

    S_t = exp(decay_t) S_(t-1),  S_t += beta_t k_t (v_t - k_t S_t),  out_t = q_t S_t

Dimensions beside those of podrl.types: K heads of queries and keys, N heads of values, H key width, U value width, X
chunks of a row, C tokens of a chunk, W taps of the convolution. I channels of the convolution belong to each head of
keys: its query, its key, and the values of the heads that it serves. So all arrays are cut over `tensor` by heads. J is
(W - 1) I: the convolution's inputs of the last W - 1 tokens, for one head of keys.
"""

from collections.abc import Callable, Mapping

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
    """Declares a layer's leaves other than projections: (shape, logical axes, initial values as in `Param.std`)."""
    sizes = config.delta
    assert sizes is not None
    return {
        "delta_conv": (
            (sizes.key_heads, sizes.head_channels, sizes.taps),
            ("heads", "norm", "norm"),
            sizes.taps**-0.5,
        ),
        "delta_rate": ((sizes.value_heads,), ("heads",), 1.0),
        "delta_shift": ((sizes.value_heads,), ("heads",), -1.0),
        "delta_norm": ((sizes.value_dim,), ("norm",), -1.0),
    }


@flax.struct.dataclass
class Chunks:
    """Packed rows cut into chunks, with the dependencies of tokens on earlier tokens and states.

    A segment may continue another segment, its prefix. The past of a token inside its chunk consists of the earlier
    tokens of its own segment and of its prefix. This past starts from one of three states: the running state, which is
    the state at the end of the previous chunk; the held state, which is the state at the end of the last segment that
    other segments continue; or zeros.

    Attributes:
      past_BXCC: True at [.., i, j] if token j is token i or in its past.
      runs_BXC: True if the token's past starts from the running state.
      held_BXC: True if the token's past starts from the held state.
      last_BX: index in the chunk of the last token that is not padding; -1 if there is none.
      hold_BX: index in the chunk of the last token in a segment that other segments continue; the state after this
        token becomes the held state. -1 if there is no such token.
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
    """Cuts rows into chunks; the last chunk of a row may be padded. Segments may begin anywhere.

    Args:
      segment_BT: number of each token's segment, at most T, 0 on padding; the tokens of a segment are consecutive.
      prefix_BT: number of the segment that each token's segment continues, its prefix; 0 for none. A prefix continues
        no other segment, and only segments that continue the same prefix lie between a segment and its prefix. None if
        no segment continues another.
      before_B: number of the segment that began before the row; the row's first tokens continue it from the argument
        `state_BNHU` of `over_rows`. 0 if the row starts from zeros; None if all rows start from zeros.
      chunk: number of tokens of a chunk, C.
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


def prefixes(segment_BT: Int[Array, "B T"], last_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the number of the segment that each token's segment continues, for `cut`; 0 for none.

    Args:
      segment_BT: number of each token's segment, 0 on padding.
      last_BT: last segment that sees the token, see `podrl.types.Layout`. It is the same for all tokens of a segment.
    """
    B, T = segment_BT.shape
    row_B1, number_S = jnp.arange(B)[:, None], jnp.arange(T + 1)
    last_BS = jnp.zeros((B, T + 1), last_BT.dtype).at[row_B1, segment_BT].max(last_BT)
    prefix_BS = lax.cummax(jnp.where(last_BS > number_S, number_S, 0), axis=1)
    prefix_BS = jnp.where(jnp.take_along_axis(last_BS, prefix_BS, axis=1) >= number_S, prefix_BS, 0)
    return jnp.where(prefix_BS == number_S, 0, prefix_BS)[row_B1, segment_BT]


def _chunked(x_BT: Array, chunk: int) -> Array:
    """Pads time to whole chunks and cuts it into chunks: (B, T, ...) -> (B, X, C, ...)."""
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
    """Applies the gated delta rule to one token of each row, in float32: (outputs, states after the token).

    Args:
      state_BNHU: states before the token.
      q_BNH, k_BNH: scaled queries, and keys of length 1.
      v_BNU: values.
      decay_BN: logarithm of the factor by which the state decays, at most 0.
      beta_BN: share of the state's value that the token's value replaces, in [0, 1].
    """
    kept_BN1, same_BN1 = jnp.exp(decay_BN)[..., None], jnp.sum(q_BNH * k_BNH, axis=2, keepdims=True)
    # One sum reads the old state for key and query, and the new state depends on the sum. XLA can then write the new
    # state over the old one.
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
    """Applies the gated delta rule to packed rows, in float32: (outputs, states after the last token of each row).

    Inside a chunk the changes of all tokens solve one triangular system (arXiv 2406.06484). A scan over the chunks
    carries the running state and the held state. Outputs of padding are 0.

    Args:
      q_BTNH, k_BTNH: scaled queries, and keys of length 1.
      v_BTNU: values.
      decay_BTN: logarithm of the factor by which the state decays at each token, at most 0.
      beta_BTN: share of the state's value that the token's value replaces, in [0, 1].
      chunks: dependencies of the tokens, from `cut`; C is a power of two.
      state_BNHU: states that the rows begin with, if `cut` had `before_B`; None otherwise.
    """
    B, T, N, H = k_BTNH.shape
    U, C = v_BTNU.shape[-1], chunks.past_BXCC.shape[-1]
    q, k, v, decay, beta = (
        jnp.moveaxis(_chunked(x.astype(jnp.float32), C), 3, 2) for x in (q_BTNH, k_BTNH, v_BTNU, decay_BTN, beta_BTN)
    )
    past = chunks.past_BXCC[:, :, None]
    # Logarithm of the decay from the state before the token's past in this chunk until after the token itself.
    kept_BXNC = _sum("BXNCD,BXND->BXNC", past.astype(jnp.float32), decay)
    pair_BXNCC = jnp.exp(jnp.where(past, kept_BXNC[..., :, None] - kept_BXNC[..., None, :], -jnp.inf))
    before = ~jnp.eye(C, dtype=bool)
    system = _sum("BXNCH,BXNDH->BXNCD", k * beta[..., None], k) * jnp.where(before, pair_BXNCC, 0.0)
    entering_BXNC = jnp.exp(kept_BXNC)
    sides = jnp.concatenate([v * beta[..., None], k * (beta * entering_BXNC)[..., None]], axis=-1)
    solved = _sum("BXNCD,BXNDU->BXNCU", _inverse(system), sides)
    inside = {
        "change": solved[..., :U],  # change by each token if the chunk starts from zeros
        "undo": solved[..., U:],  # its product with the state that enters the chunk is subtracted from the change
        "scores": _sum("BXNCH,BXNDH->BXNCD", q, k) * pair_BXNCC,
        "reads": q * entering_BXNC[..., None],
        "keys": k,
        "kept": kept_BXNC,
    }

    def body(carry: tuple[Array, Array], xs: tuple[dict[str, Array], Chunks]) -> tuple[tuple[Array, Array], Array]:
        x, now = xs
        sources = ((carry[0], now.runs_BXC), (carry[1], now.held_BXC))

        def entering(weight_BNCH: Array) -> Array:
            """Multiplies each token's row with the state that the token's past starts from."""
            (run, runs_BC), (held, held_BC) = sources
            from_run = _sum("BNCH,BNHU->BNCU", weight_BNCH * runs_BC[:, None, :, None], run)
            return from_run + _sum("BNCH,BNHU->BNCU", weight_BNCH * held_BC[:, None, :, None], held)

        change_BNCU = x["change"] - entering(x["undo"])
        out_BNCU = entering(x["reads"]) + _sum("BNCD,BNDU->BNCU", x["scores"], change_BNCU)

        def after(place_B: Array, otherwise: Array) -> Array:
            """Computes the state after the token at index `place_B` of each row; `otherwise` if the index is -1."""
            at_B = jnp.maximum(place_B, 0)
            take = lambda y, axis: jnp.take_along_axis(  # noqa: E731
                y, at_B.reshape(-1, *[1] * (y.ndim - 1)), axis=axis
            ).squeeze(axis)
            kept_BN, past_BC = take(x["kept"], 2), take(now.past_BXCC, 1)
            weight_BNC = jnp.exp(jnp.where(past_BC[:, None], kept_BN[..., None] - x["kept"], -jnp.inf))
            updated = _sum("BNCH,BNCU->BNHU", x["keys"] * weight_BNC[..., None], change_BNCU)
            for state, from_BC in sources:
                updated += state * jnp.where(take(from_BC, 1)[:, None], jnp.exp(kept_BN), 0.0)[..., None, None]
            return jnp.where((place_B >= 0)[:, None, None, None], updated, otherwise)

        return (after(now.last_BX, carry[0]), after(now.hold_BX, carry[1])), out_BNCU

    first = jnp.zeros((B, N, H, U), jnp.float32)
    begin = (first if state_BNHU is None else state_BNHU, first)
    by_chunk = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (inside, chunks))
    (state_BNHU, _), out_XBNCU = lax.scan(body, begin, by_chunk)
    out_BTNU = out_XBNCU.transpose(1, 0, 3, 2, 4).reshape(B, -1, N, U)[:, :T]
    return out_BTNU, state_BNHU


def _inverse(low_XCC: Float[Array, "*X C C"]) -> Float[Array, "*X C C"]:
    """Inverts the sum of the identity and a matrix that is zero on and above its diagonal; C is a power of two.

    Products of diagonal blocks, whose size doubles, are as stable as substitution, and XLA splits them over a mesh like
    other products. XLA's triangular solve is not an alternative: a scan over layers that used it hung on eight
    simulated CPU devices.
    """
    *X, C, _ = low_XCC.shape
    size, inverse = 1, jnp.ones((*X, C, 1, 1), low_XCC.dtype)  # size and inverses of the diagonal blocks
    while size < C:
        blocks = low_XCC.reshape(*X, C // (2 * size), 2 * size, C // (2 * size), 2 * size)
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_sum("...CD,...DE->...CE", lower, _sum("...CD,...DE->...CE", corner, upper))
        rows = jnp.concatenate([upper, jnp.zeros_like(upper)], -1), jnp.concatenate([corner, lower], -1)
        size, inverse = 2 * size, jnp.concatenate(rows, -2)
    return inverse[..., 0, :, :]


def previous(segment_BT: Int[Array, "B T"], prefix_BT: Int[Array, "B T"] | None = None) -> Int[Array, "B T"]:
    """Returns the index in the row of each token's predecessor; -1 if it has none.

    The predecessor of a segment's first token is the last token of the segment's prefix.
    """
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
    x_BTKI: Float[Array, "B T K I"], weight_WKI: Float[Array, "W K I"], previous_BT: Int[Array, "B T"]
) -> Float[Array, "B T K I"]:
    """Mixes each channel over a token and its W - 1 predecessors; the last tap is for the token itself.

    Args:
      x_BTKI: inputs of the convolution.
      weight_WKI: weight of each tap and channel.
      previous_BT: index of each token's predecessor, from `previous`.
    """
    out_BTKI, at_BT = x_BTKI * weight_WKI[-1], jnp.broadcast_to(jnp.arange(x_BTKI.shape[1]), previous_BT.shape)
    for tap_KI in weight_WKI[-2::-1]:
        at_BT = jnp.where(at_BT >= 0, jnp.take_along_axis(previous_BT, jnp.maximum(at_BT, 0), axis=1), _NONE)
        there_BTKI = jnp.take_along_axis(x_BTKI, jnp.maximum(at_BT, 0)[..., None, None], axis=1)
        out_BTKI = out_BTKI + jnp.where((at_BT >= 0)[..., None, None], there_BTKI, 0) * tap_KI
    return out_BTKI


# project(name, x) -> y: applies a projection of the layer by its name, adapter included.
Project = Callable[[str, Array], Array]


def mix(
    h_BTD: Float[Array, "B T D"],
    layer: PyTree,
    config: ModelConfig,
    project: Project,
    chunks: Chunks,
    previous_BT: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Applies a layer's linear attention (Qwen 3.5): convolution, delta rule, gated norm and output.

    Args:
      h_BTD: normalised residual stream.
      layer: leaves of the layer, see `param_shapes`.
      config: configuration of a model whose layers are all like this layer.
      project: applies the layer's projections.
      chunks: dependencies of the tokens, from `cut`.
      previous_BT: index of each token's predecessor, from `previous`.
    """
    out_BTD, _, _ = _mixed(
        h_BTD,
        layer,
        config,
        project,
        lambda x_BTKI, weight_WKI: (convolve(x_BTKI, weight_WKI, previous_BT), None),
        lambda q, k, v, decay, beta: over_rows(q, k, v, decay, beta, chunks),
    )
    return out_BTD


def memory_shapes(config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a layer's memory of a sequence: the float32 state, (N, H, U), and the inputs, (K, J).

    The inputs are the convolution's inputs of the last W - 1 tokens, one after another in one vector for each head of
    keys. The first dimension of both arrays is cut over `tensor`.
    """
    sizes = config.delta
    assert sizes is not None
    inputs = sizes.key_heads, (sizes.taps - 1) * sizes.head_channels
    return (sizes.value_heads, sizes.key_dim, sizes.value_dim), inputs


Memory = tuple[Float[Array, "B N H U"], Float[Array, "B K J"]]


def mix_on(
    h_BTD: Float[Array, "B T D"],
    layer: PyTree,
    config: ModelConfig,
    project: Project,
    memory: Memory,
    length_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Memory]:
    """Applies `mix` to rows that continue one sequence each: (output, memory after the last tokens).

    Args:
      h_BTD: normalised residual stream.
      layer: leaves of the layer, see `param_shapes`.
      config: configuration of a model whose layers are all like this layer.
      project: applies the layer's projections.
      memory: memory of the tokens before each row, see `memory_shapes`; zeros at the start of a sequence.
      length_B: number of tokens of each row; padding follows.
    """
    segment_BT = (jnp.arange(h_BTD.shape[1]) < length_B[:, None]).astype(jnp.int32)
    chunks = cut(segment_BT, before_B=jnp.ones_like(length_B))
    out_BTD, state_BNHU, inputs_BKJ = _mixed(
        h_BTD,
        layer,
        config,
        project,
        lambda x_BTKI, weight_WKI: _convolve_on(x_BTKI, weight_WKI, memory[1], length_B),
        lambda q, k, v, decay, beta: over_rows(q, k, v, decay, beta, chunks, memory[0]),
    )
    return out_BTD, (state_BNHU, inputs_BKJ)


def mix_one(
    h_B1D: Float[Array, "B 1 D"], layer: PyTree, config: ModelConfig, project: Project, memory: Memory
) -> tuple[Float[Array, "B 1 D"], Memory]:
    """Applies `mix_on` to one token of each row: (output, memory after the token)."""

    def rule(*arrays: Array) -> tuple[Array, Array]:
        out_BNU, state_BNHU = step(memory[0], *(x[:, 0] for x in arrays))
        return out_BNU[:, None], state_BNHU

    out_B1D, state_BNHU, inputs_BKJ = _mixed(
        h_B1D,
        layer,
        config,
        project,
        lambda x_B1KI, weight_WKI: _convolve_on(x_B1KI, weight_WKI, memory[1], None),
        rule,
    )
    return out_B1D, (state_BNHU, inputs_BKJ)


def _convolve_on(
    x_BTKI: Array, weight_WKI: Array, inputs_BKJ: Array, length_B: Int[Array, " B"] | None
) -> tuple[Array, Array]:
    """Applies `convolve` to rows that continue a sequence: (outputs, the last W - 1 inputs of each row).

    Args:
      x_BTKI: inputs of the convolution.
      weight_WKI: weight of each tap and channel.
      inputs_BKJ: the W - 1 inputs before each row, for each head in one vector.
      length_B: number of tokens of each row; None if no token is padding.
    """
    W, (B, T, K, channels) = len(weight_WKI), x_BTKI.shape
    wide_BKJ = jnp.concatenate([inputs_BKJ, x_BTKI.swapaxes(1, 2).reshape(B, K, -1)], axis=2)
    # All later code reads the barrier's result, so the barrier is the only reader of the concatenation itself. XLA can
    # then write the new inputs over the old ones.
    wide_BKJ = lax.optimization_barrier(wide_BKJ)

    def tap(w: int) -> Array:
        inputs_BKTI = wide_BKJ[..., w * channels : (w + T) * channels].reshape(B, K, T, channels)
        return inputs_BKTI * weight_WKI[w][:, None]

    # The last tap, too, reads the concatenation and not `x_BTKI`. XLA would fuse the sum of projection and adapter that
    # makes `x_BTKI` into the tap's product, and round the sum differently from the input that later tokens read.
    out_BKTI = tap(W - 1)
    for w in range(W - 2, -1, -1):
        out_BKTI = out_BKTI + tap(w)
    out_BTKI = out_BKTI.swapaxes(1, 2)
    if length_B is None:
        return out_BTKI, wide_BKJ[..., T * channels :]
    at_B1W1 = (length_B[:, None] + jnp.arange(W - 1))[:, None, :, None]
    last_BKWI = jnp.take_along_axis(wide_BKJ.reshape(B, K, -1, channels), at_B1W1, axis=2)
    return out_BTKI, last_BKWI.reshape(B, K, -1)


def _mixed(
    h_BTD: Array, layer: PyTree, config: ModelConfig, project: Project, convolve: Callable, rule: Callable
) -> tuple[Array, Array, PyTree]:
    """Applies a layer's linear attention: (output, second result of `rule`, second result of `convolve`).

    Args:
      h_BTD: normalised residual stream.
      layer: leaves of the layer, see `param_shapes`.
      config: configuration of a model whose layers are all like this layer.
      project: applies the layer's projections.
      convolve: function (inputs (B, T, K, I), weight (W, K, I)) -> (outputs, any second result).
      rule: function (queries, keys, values, decay, beta), with the shapes of `over_rows` -> (outputs, any second
        result).
    """
    sizes = config.delta
    assert sizes is not None

    weight_WKI = jnp.moveaxis(layer["delta_conv"].astype(h_BTD.dtype), 2, 0)
    mixed_BTKI, inputs = convolve(project("delta_in", h_BTD), weight_WKI)
    mixed_BTKI = jax.nn.silu(mixed_BTKI)
    q, k, v = jnp.split(mixed_BTKI, [sizes.key_dim, 2 * sizes.key_dim], axis=-1)
    B, T, _ = h_BTD.shape
    # A head of queries and keys serves value_heads / key_heads consecutive heads of values.
    q_BTNH, k_BTNH = (jnp.repeat(unit(x), sizes.value_heads // sizes.key_heads, axis=2) for x in (q, k))
    beta_BTN = jax.nn.sigmoid(project("delta_beta", h_BTD).astype(jnp.float32))
    speed_BTN = jax.nn.softplus(project("delta_decay", h_BTD).astype(jnp.float32) + layer["delta_shift"])
    decay_BTN = -jnp.exp(layer["delta_rate"].astype(jnp.float32)) * speed_BTN
    out_BTNU, state = rule(
        q_BTNH * sizes.key_dim**-0.5, k_BTNH, v.reshape(B, T, -1, sizes.value_dim), decay_BTN, beta_BTN
    )
    gate_BTNU = project("delta_gate", h_BTD).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(out_BTNU * out_BTNU, axis=-1, keepdims=True) + config.norm_eps)
    out_BTNU = (out_BTNU * scale).astype(h_BTD.dtype) * layer["delta_norm"].astype(h_BTD.dtype)
    out_BTNU = (out_BTNU * jax.nn.silu(gate_BTNU)).astype(h_BTD.dtype)
    return project("delta_out", out_BTNU), state, inputs


def _sum(letters: str, a: Array, b: Array) -> Array:
    return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST)
