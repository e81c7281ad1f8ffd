"""A Pallas TPU kernel of attention in which a token sees its own segment and the earlier segments that it continues.

Every array has time last, [B, heads, H, T], and scores have keys first, [s, t]. With this layout a head dimension of 64
needs no padding, statistics of queries are rows, and only the keys (in the backward pass also the values) of a block
are transposed, once for all query heads of a group. A step of the grid computes one pair of a query block and a key
block. The pairs in which a query may see a key are listed from the packed rows at run time; other pairs are neither
loaded nor computed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

NEG_INF = -1e30
LANES = 128
# Default number of tokens of a block; largest number of elements in a block's queries over all heads of a group.
_BLOCK, _MOST = 512, 1 << 19
_VMEM_BYTES = 32 << 20
# A pair of blocks is one number with three parts: the row, the block that stays the same over consecutive steps, and
# the block that changes with every step. Each block has this many bits.
_BITS = 10
# Indices on axis X of `bounds_BXT`, which holds each token's segment, the last segment that sees the token, and the
# token's position; then the size of this axis, padded to 8. On padding, the last segment is -1: every query's segment
# is larger, so no query sees padding.
_SEGMENT, _LAST, _POSITION, _BOUNDS = 0, 1, 2, 8
_BY_FIRST, _BY_LAST = ((0,), (0,)), ((1,), (1,))  # contract the first, or the last, dimension of both operands


def prefix_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_BT: Int[Array, "B T"],
    window: Int[Array, ""],
    sinks: tuple[Float[Array, " N"], ...],
    last_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    *,
    softcap: float,
    name: str,
    block: int = _BLOCK,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes `podrl.models.attention.attention` with shared tokens on one device, forward and backward, in kernels.

    The forward pass is an online softmax over key blocks (arXiv 2205.14135). The backward pass recomputes the weights
    from the scores and their logsumexp, once for the gradient of queries and once for the gradients of keys and values
    (arXiv 2307.08691, section 3.1).

    Args:
      q_BTNH: scaled, rotated queries; T is a multiple of 128 and H of 64.
      k_BTKH: rotated keys.
      v_BTKH: values.
      segment_BT: segment of each token, 0 on padding.
      window: number of positions that a token sees, its own included.
      sinks: scores of the heads' sinks, in one array; () if heads have no sinks.
      last_BT: last segment that sees each token; 0 on padding.
      position_BT: position of each token inside its own sequence.
      softcap: c in c * tanh(score / c); 0 is off.
      name: name under which remat policies may keep the output and its logsumexp.
      block: largest number of tokens of a block, 128 times a power of 2; blocks are smaller if a group has many or wide
        heads.
      interpret: True if the kernels run interpreted on CPU, which is slow.

    Raises:
      ValueError: the kernel cannot compute arrays of these sizes.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    size = _block(T, N // K * H, block)
    if T % LANES or H % 64 or size << _BITS < T or B >> (31 - 2 * _BITS):
        raise ValueError(
            f"{B} rows of {T} tokens with heads of {H}: the kernel takes at most {(1 << 31 - 2 * _BITS) - 1} rows; "
            f"their length must be a multiple of {LANES} and at most {size << _BITS} tokens, and the size of a head a "
            "multiple of 64. Use form='blockwise'."
        )
    static = _Static(T, size, N // K, softcap, name, interpret)
    bounds_BXT = _bounds(segment_BT, last_BT, position_BT, -T % size)
    window_1 = jnp.asarray(window, jnp.int32).reshape(1)
    needed_Bij = needed_blocks(bounds_BXT, window_1[0], size)
    q_BNHT, k_BKHT, v_BKHT = (x.transpose(0, 2, 3, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
    where = (bounds_BXT, window_1, _pairs(needed_Bij, by_keys=False), _pairs(needed_Bij, by_keys=True))
    sinks = tuple(sink_N.astype(jnp.float32)[:, None, None] for sink_N in sinks)
    out_BNHT: Array = _attend(q_BNHT, k_BKHT, v_BKHT, where, sinks, static)
    return out_BNHT.transpose(0, 3, 1, 2)


class _Static(NamedTuple):
    """Static arguments of the kernels.

    Attributes:
      T: number of tokens in a row.
      size: number of tokens in a block.
      group: number of query heads that share a key/value head.
      softcap: c in c * tanh(score / c); 0 is off.
      name: name under which remat policies may keep the output and its logsumexp.
      interpret: True if the kernels run interpreted on CPU.
    """

    T: int
    size: int
    group: int
    softcap: float
    name: str
    interpret: bool

    @property
    def ragged(self) -> bool:
        """Returns True if the last block extends beyond the end of the row, where arrays hold arbitrary values."""
        return self.T % self.size > 0


class BlockPairs(NamedTuple):
    """Pairs of blocks in the order in which a kernel visits them.

    Attributes:
      code_n: codes row << 20 | block that stays << 10 | block that changes; -1 after the last pair.
      number: number of pairs.
    """

    code_n: Int[Array, " n"]
    number: Int[Array, ""]


def _block(T: int, width: int, block: int) -> int:
    """Chooses the number of tokens of a block; the whole row is one block if it is short enough.

    Args:
      T: number of tokens in a row.
      width: number of elements in a token's queries, over all heads of a group.
      block: largest number of tokens.
    """
    while block > LANES and block * width > _MOST:
        block //= 2
    return min(block, T)


def _bounds(segment_BT: Array, last_BT: Array, position_BT: Array, pad: int) -> Int[Array, "B 8 T"]:
    """Stacks the description of the tokens that kernels read, padded by `pad` tokens without a segment."""
    rows = [segment_BT, jnp.where(segment_BT > 0, last_BT, -1), position_BT]
    rows += [jnp.zeros_like(segment_BT)] * (_BOUNDS - len(rows))
    bounds_BXT = jnp.stack([x.astype(jnp.int32) for x in rows], axis=1)
    past = jnp.zeros((*bounds_BXT.shape[:2], pad), jnp.int32).at[:, _LAST].set(-1)
    return jnp.concatenate([bounds_BXT, past], axis=2) if pad else bounds_BXT


def needed_blocks(bounds_BXT: Int[Array, "B 8 T"], window: Int[Array, ""], size: int) -> Bool[Array, "B i j"]:
    """Computes which key blocks j may hold a token that a query of block i sees; a block's own keys always count.

    A tile of 128 keys counts if the query's segment lies between the tile's smallest segment and the last segment that
    sees a token of the tile, and the tile's latest position is in the window. This is exact if segments are numbered
    along the row and the same segments see all tokens of the tile; otherwise it may count too many blocks, never too
    few.

    Args:
      bounds_BXT: description of the tokens, from `_bounds`.
      window: number of positions that a token sees, its own included.
      size: number of tokens of a block.
    """
    B, _, T = bounds_BXT.shape
    segment_BsX, position_BsX = (bounds_BXT[:, x].reshape(B, T // LANES, LANES) for x in (_SEGMENT, _POSITION))
    real_BsX = segment_BsX > 0
    most = jnp.iinfo(jnp.int32).max
    low_B1s = jnp.min(jnp.where(real_BsX, segment_BsX, most), axis=2)[:, None]
    high_B1s = jnp.max(bounds_BXT[:, _LAST].reshape(B, T // LANES, LANES), axis=2)[:, None]
    late_B1s = jnp.max(jnp.where(real_BsX, position_BsX, -most // 2), axis=2)[:, None]
    segment_BT1 = bounds_BXT[:, _SEGMENT][:, :, None]
    seen_BTs = (low_B1s <= segment_BT1) & (segment_BT1 <= high_B1s)
    seen_BTs &= bounds_BXT[:, _POSITION][:, :, None] - late_B1s < window
    n = T // size
    seen_Bij = jnp.any(seen_BTs.reshape(B, n, size, n, size // LANES), axis=(2, 4))
    i_n = jnp.arange(n)
    return (seen_Bij & (i_n[:, None] > i_n)) | (i_n[:, None] == i_n)


def _pairs(needed_Bij: Bool[Array, "B i j"], *, by_keys: bool) -> BlockPairs:
    """Lists the needed pairs of blocks in ascending order of row, then of query block (key block if `by_keys`)."""
    B, n, _ = needed_Bij.shape
    i_P, j_P = np.tril_indices(n)
    stays_P, changes_P = (j_P, i_P) if by_keys else (i_P, j_P)
    code_BP = (np.arange(B)[:, None] << 2 * _BITS) | (stays_P << _BITS) | changes_P
    needed_BP = needed_Bij[:, i_P, j_P]
    most = jnp.iinfo(jnp.int32).max
    code_n = jnp.sort(jnp.where(needed_BP, jnp.asarray(code_BP, jnp.int32), most).reshape(-1))
    return BlockPairs(jnp.append(jnp.where(code_n < most, code_n, -1), -1), jnp.sum(needed_BP, dtype=jnp.int32))


# --- kernels ---
# Arguments of a kernel: pairs and window in scalar memory; blocks of queries (q; in the backward pass also the output's
# gradient, the logsumexp and delta), keys, values and the description of tokens; results; accumulators.


def _decode(code: Array) -> tuple[Array, Array, Array]:
    """Splits a pair's code into (row, block that stays, block that changes)."""
    most = (1 << _BITS) - 1
    return code >> 2 * _BITS, (code >> _BITS) & most, code & most


def _turn(code_ref: Any) -> tuple[Array, Array, Array, Array]:
    """Reads the pair of this step: (block that stays, block that changes, whether the step is the first with the block
    that stays, whether it is the last)."""
    n = pl.program_id(1)
    code = code_ref[n]
    _, stays, changes = _decode(code)
    before = code_ref[jnp.maximum(n - 1, 0)]
    first = (n == 0) | ((before >> _BITS) != (code >> _BITS))
    return stays, changes, first, (code_ref[n + 1] >> _BITS) != (code >> _BITS)


def _seen(query_ref: Any, key_ref: Any, window_ref: Any, i: Array, j: Array, size: int) -> Array:
    """Computes the mask [s, t]: True if query t of block i sees key s of block j."""
    query, key = query_ref[0], key_ref[0].T
    row = lambda x: query[x : x + 1]  # noqa: E731
    segment_s1, last_s1, position_s1 = (key[:, x : x + 1] for x in (_SEGMENT, _LAST, _POSITION))
    s, t = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    seen = (segment_s1 <= row(_SEGMENT)) & (row(_SEGMENT) <= last_s1)
    return seen & (t - s >= (j - i) * size) & (row(_POSITION) - position_s1 < window_ref[0])


def _dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    # Products of bfloat16 are exact in float32. A global setting of a higher precision, which is meant for float32,
    # would be refused for bfloat16; DEFAULT overrides it.
    precision = None if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, (contracted, ((), ())), precision, preferred_element_type=jnp.float32)


def _scores(k_Hs: Array, q_Ht: Array, softcap: float) -> Array:
    score_st = _dot(k_Hs, q_Ht, _BY_FIRST)
    return jnp.tanh(score_st * (1.0 / softcap)) * softcap if softcap else score_st


def _within(x: Array, block: Array, static: _Static) -> Array:
    """Sets the values of a block beyond the end of the row to 0."""
    if not static.ragged:
        return x
    at = block * static.size + jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(at < static.T, x, jnp.zeros_like(x))


def _each_head(static: _Static, body: Callable[[int | Array], None]) -> None:
    if static.group == 1:
        body(0)
    else:
        jax.lax.fori_loop(0, static.group, lambda g, _: body(g), None)


def _forward(code_ref, window_ref, q_ref, k_ref, v_ref, query_ref, key_ref, *rest, static: _Static) -> None:
    out_ref, lse_ref, top_ref, total_ref, sum_ref = rest
    i, j, first, last = _turn(code_ref)

    @pl.when(first)
    def _():
        top_ref[...] = jnp.full_like(top_ref, NEG_INF)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    seen = _seen(query_ref, key_ref, window_ref, i, j, static.size)
    k, v = k_ref[0, 0], _within(v_ref[0, 0], j, static)

    def add(g: int | Array) -> None:
        score = jnp.where(seen, _scores(k, q_ref[0, g], static.softcap), NEG_INF)
        top = jnp.maximum(top_ref[g], jnp.max(score, axis=0, keepdims=True))
        weight = jnp.exp(score - top)
        shrink = jnp.exp(top_ref[g] - top)
        top_ref[g] = top
        total_ref[g] = total_ref[g] * shrink + jnp.sum(weight, axis=0, keepdims=True)
        sum_ref[g] = sum_ref[g] * shrink + _dot(v, weight.astype(v.dtype), ((1,), (0,)))

    _each_head(static, add)

    @pl.when(last)
    def _():
        def finish(g: int | Array) -> None:
            out_ref[0, g] = (sum_ref[g] / total_ref[g]).astype(out_ref.dtype)
            lse_ref[0, g] = top_ref[g] + jnp.log(total_ref[g])

        _each_head(static, finish)


def _gradient(seen, k, v, q, dout, lse, delta, softcap: float) -> tuple[Array, Array]:
    """Computes (weights, derivative of the loss with respect to uncapped scores) of a pair of blocks, both [s, t]."""
    score = _scores(k, q, softcap)
    weight = jnp.where(seen, jnp.exp(score - lse), 0.0)
    dscore = weight * (_dot(v, dout, _BY_FIRST) - delta)
    if softcap:
        dscore = dscore * (1.0 - jnp.square(score * (1.0 / softcap)))
    return weight, dscore


def _backward_queries(
    code_ref, window_ref, q_ref, dout_ref, lse_ref, delta_ref, k_ref, v_ref, query_ref, key_ref, *rest, static: _Static
) -> None:
    dq_ref, sum_ref = rest
    i, j, first, last = _turn(code_ref)

    @pl.when(first)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    seen = _seen(query_ref, key_ref, window_ref, i, j, static.size)
    k, v = (_within(ref[0, 0], j, static) for ref in (k_ref, v_ref))

    def add(g: int | Array) -> None:
        around = (q_ref[0, g], dout_ref[0, g], lse_ref[0, g], delta_ref[0, g])
        _, dscore = _gradient(seen, k, v, *around, static.softcap)
        sum_ref[g] += _dot(k, dscore.astype(k.dtype), ((1,), (0,)))

    _each_head(static, add)

    @pl.when(last)
    def _():
        dq_ref[0] = sum_ref[...].astype(dq_ref.dtype)


def _backward_keys(
    code_ref, window_ref, q_ref, dout_ref, lse_ref, delta_ref, k_ref, v_ref, query_ref, key_ref, *rest, static: _Static
) -> None:
    dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = rest
    j, i, first, last = _turn(code_ref)

    @pl.when(first)
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    seen = _seen(query_ref, key_ref, window_ref, i, j, static.size)
    k, v = k_ref[0, 0], v_ref[0, 0]

    def add(g: int | Array) -> None:
        q, dout = (_within(ref[0, g], i, static) for ref in (q_ref, dout_ref))
        weight, dscore = _gradient(seen, k, v, q, dout, lse_ref[0, g], delta_ref[0, g], static.softcap)
        dscore = jnp.where(seen, dscore, 0.0) if static.ragged else dscore
        dk_sum_ref[...] += _dot(q, dscore.astype(q.dtype), _BY_LAST)
        dv_sum_ref[...] += _dot(dout, weight.astype(dout.dtype), _BY_LAST)

    _each_head(static, add)

    @pl.when(last)
    def _():
        dk_ref[0, 0] = dk_sum_ref[...].astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_sum_ref[...].astype(dv_ref.dtype)


# --- calls ---


# (description of the tokens, window, pairs ordered by query blocks, the same pairs ordered by key blocks).
Where = tuple[Array, Array, BlockPairs, BlockPairs]


# Scores of the heads' sinks, in one array (N, 1, 1), float32; () if heads have no sinks.
Sinks = tuple[Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BNHT: Array, k_BKHT: Array, v_BKHT: Array, where: Where, sinks: Sinks, static: _Static) -> Array:
    return _attend_fwd(q_BNHT, k_BKHT, v_BKHT, where, sinks, static)[0]


def _attend_fwd(q_BNHT: Array, k_BKHT: Array, v_BKHT: Array, where: Where, sinks: Sinks, static: _Static):
    call = _Call(q_BNHT, where, static)
    queries, keys = call.heads("query", static.group), call.heads("key", 1)
    out_BNHT, lse_BN1T = call(
        "fwd",
        _forward,
        operands=[(q_BNHT, queries), (k_BKHT, keys), (v_BKHT, keys)],
        results=[(q_BNHT.shape, q_BNHT.dtype, queries), (call.rows, jnp.float32, call.of_queries)],
        scratch=[(static.group, 1), (static.group, 1), (static.group, q_BNHT.shape[2])],
    )
    for sink_N11 in sinks:  # a sink acts as a key whose value is 0, so it only lowers the other keys' weights
        total_BN1T = jnp.logaddexp(lse_BN1T, sink_N11)
        out_BNHT = (out_BNHT * jnp.exp(lse_BN1T - total_BN1T)[..., : static.T]).astype(out_BNHT.dtype)
        lse_BN1T = total_BN1T
    out_BNHT, lse_BN1T = (checkpoint_name(x, static.name) for x in (out_BNHT, lse_BN1T))
    return out_BNHT, (q_BNHT, k_BKHT, v_BKHT, where, sinks, out_BNHT, lse_BN1T)


def _attend_bwd(static: _Static, saved: Any, dout_BNHT: Array):
    q_BNHT, k_BKHT, v_BKHT, where, sinks, out_BNHT, lse_BN1T = saved
    f32, H = jnp.float32, q_BNHT.shape[2]
    delta_BN1T = jnp.sum(dout_BNHT.astype(f32) * out_BNHT.astype(f32), axis=2, keepdims=True)
    weights = [jnp.exp(sink_N11 - lse_BN1T[..., : static.T]) for sink_N11 in sinks]
    dsinks = tuple(-jnp.sum(weight_BN1T * delta_BN1T, axis=(0, 3))[..., None] for weight_BN1T in weights)
    delta_BN1T = jnp.pad(delta_BN1T, ((0, 0), (0, 0), (0, 0), (0, lse_BN1T.shape[3] - static.T)))
    grads = []
    for name, body in (("dq", _backward_queries), ("dkv", _backward_keys)):
        call = _Call(q_BNHT, where, static, by_keys=name == "dkv")
        queries, keys = call.heads("query", static.group), call.heads("key", 1)
        around = [(q_BNHT, queries), (dout_BNHT, queries), (lse_BN1T, call.of_queries), (delta_BN1T, call.of_queries)]
        to = [(q_BNHT, queries)] if name == "dq" else [(k_BKHT, keys), (v_BKHT, keys)]
        grads += call(
            name,
            body,
            operands=[*around, (k_BKHT, keys), (v_BKHT, keys)],
            results=[(x.shape, x.dtype, spec) for x, spec in to],
            scratch=[(static.group, H)] if name == "dq" else [(H,), (H,)],
        )
    return *grads, None, dsinks


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Call:
    """Calls kernels on one list of pairs, and declares which block of each array a step reads.

    Attributes:
      rows: shape of an array with one number per query, padded to whole blocks.
      of_queries: block specification of an array of shape `rows`.
    """

    def __init__(self, q_BNHT: Array, where: Where, static: _Static, *, by_keys: bool = False):
        self._bounds_BXT, self._window_1, by_query, by_key = where
        self._pairs = by_key if by_keys else by_query
        self._by_keys, self._static = by_keys, static
        B, N, self._H, _ = q_BNHT.shape
        self._groups = N // static.group
        self.rows = (B, N, 1, self._bounds_BXT.shape[2])
        self.of_queries = self._spec((1, static.group, 1), "query")

    def heads(self, side: str, heads: int) -> pl.BlockSpec:
        """Returns the block specification of an array with `heads` heads, for tokens on one side ('query' or 'key')."""
        return self._spec((1, heads, self._H), side)

    def _spec(self, sizes: tuple[int, ...], side: str) -> pl.BlockSpec:
        stays = (side == "key") == self._by_keys

        def index(k, n, code_ref, _):
            b, outer, inner = _decode(code_ref[n])
            place = outer if stays else inner
            return (b, k, 0, place) if len(sizes) == 3 else (b, 0, place)

        return pl.BlockSpec((*sizes, self._static.size), index)

    def __call__(self, name: str, body: Any, *, operands: Any, results: Any, scratch: Any) -> list[Array]:
        static = self._static
        bounds = [(self._bounds_BXT, self._spec((1, _BOUNDS), side)) for side in ("query", "key")]
        arrays, specs = zip(*operands, *bounds, strict=True)
        return pl.pallas_call(
            functools.partial(body, static=static),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self._groups, self._pairs.number),
                in_specs=list(specs),
                out_specs=[spec for *_, spec in results],
                scratch_shapes=[pltpu.VMEM((*shape, static.size), jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
            ),
            name=f"prefix_attention_{name}",
            interpret=static.interpret,
        )(self._pairs.code_n, self._window_1, *arrays)
