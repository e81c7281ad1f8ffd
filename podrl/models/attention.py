"""Causal self-attention over packed rows, with windows, soft caps and sinks; four algorithms compute it."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int

from podrl.mesh import rules
from podrl.models import time_cut

NEG_INF = -1e30
# Name under which remat policies may keep the values that attention's backward pass needs besides q, k and v.
ATTENTION_NAME = "attention"
# Default number of tokens in a block. A shorter row is one block, and all its scores are computed at once.
BLOCK = 512
_LANES = 128

Form = Literal["auto", "dense", "blockwise", "splash", "prefix"]


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_BT: Int[Array, "B T"],
    *,
    window: Int[Array, ""],
    softcap: float,
    shared: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    sinks: "Sinks" = (),
    mesh: Mesh | None = None,
    windows: Sequence[int] = (),
    form: Form = "auto",
    block: int = BLOCK,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes softmax(cap(q k)) v over packed rows, where a token sees earlier tokens of its segment in a window.

    Token t sees token s iff s <= t, t - s < window, and both have the same non-zero segment. Scores and softmax are
    float32; the output has q's dtype.

    Args:
      q_BTNH: scaled, rotated queries. Heads are grouped: query head n reads key/value head n // (N / K).
      k_BTKH: rotated keys.
      v_BTKH: values.
      segment_BT: segment of each token, 0 on padding; outputs on padding are finite but meaningless.
      window: number of tokens that a token sees, itself included; traced, so it may differ per layer.
      softcap: c in c * tanh(score / c); 0 is off.
      shared: (last_BT, position_BT) of `podrl.types.Layout` if sequences share their first tokens; None if not. Token t
        then sees token s iff s <= t, segment[s] <= segment[t] <= last[s] and position[t] - position[s] < window.
      sinks: scores of the heads' sinks, in one array; a sink is a key with value 0 that every token sees (gpt-oss). ()
        if heads have no sinks.
      mesh: mesh over which rows and heads are split as `podrl.mesh.rules` says; None for one device.
      windows: all values that `window` can take; splash is compiled once for each value shorter than T.
      form: algorithm. 'dense' holds all T x T scores of a row, forward and backward. 'blockwise' holds `block` x
        `block` scores and skips blocks in which no key is seen. 'splash' is JAX's TPU kernel, and 'prefix' is podrl's
        TPU kernel for `shared`. 'auto' takes the matching kernel on TPU if T is a multiple of 128 and H of 64 (splash
        also needs `windows`), and 'blockwise' elsewhere.
      block: number of tokens in a block of 'blockwise', and in the largest block of 'prefix'.
      interpret: True if the TPU kernels run interpreted on CPU, which is slow.

    Raises:
      ValueError: 'splash' with `shared`, which it cannot compute, or 'prefix' without `shared`.
    """
    if form == "auto":
        form = _kernel(q_BTNH.shape, windows, shared=shared is not None) if on_tpu(mesh) else "blockwise"
    if form == "dense":
        return dense(q_BTNH, k_BTKH, v_BTKH, segment_BT, window=window, softcap=softcap, shared=shared, sinks=sinks)
    if form == "splash":
        if shared is not None:
            raise ValueError(
                "form='splash' lets a token see its own segment only: use 'prefix' if segments share tokens."
            )
        run = functools.partial(_splash, softcap=softcap, windows=tuple(sorted(set(windows))), interpret=interpret)
    elif form == "prefix":
        if shared is None:
            raise ValueError(
                "form='prefix' needs shared=(last_BT, position_BT), but shared=None: pass both, or use 'splash'."
            )
        from podrl.models.prefix_attention import prefix_attention

        run = functools.partial(
            prefix_attention, softcap=softcap, name=ATTENTION_NAME, block=block, interpret=interpret
        )
    else:
        run = functools.partial(_blockwise, softcap=softcap, block=block)
    arguments = (q_BTNH, k_BTKH, v_BTKH, segment_BT, window, sinks, *(shared or ()))
    if mesh is None or mesh.size == 1:
        return run(*arguments)
    return _over_mesh(run, functools.partial(_blockwise, softcap=softcap), block, mesh, *arguments)


def _over_mesh(
    run: time_cut.Attend,
    blockwise: time_cut.Attend,
    block: int,
    mesh: Mesh,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_BT: Array,
    window: Array,
    sinks: "Sinks",
    *also: Array,
) -> Array:
    """Runs a form of attention on every device's rows and heads.

    `blockwise` replaces `run` if rows are cut along time and the number of query heads is not a multiple of the number
    of parts: each device then has the queries of some blocks only (`podrl.models.time_cut`).
    """
    tensor = mesh.shape["tensor"]
    N, K = q_BTNH.shape[2], k_BTKH.shape[2]
    if N % tensor == 0 and tensor % K == 0:  # at most one key/value head per shard: each shard gets a copy of its head
        k_BTKH, v_BTKH = (jnp.repeat(x, tensor // K, axis=2) for x in (k_BTKH, v_BTKH))
    split = "heads" if N % tensor == 0 and k_BTKH.shape[2] % tensor == 0 else "act"
    q_spec = rules.spec_for(("batch", "time", split, "head_dim"), q_BTNH.shape, mesh)
    k_spec = rules.spec_for(("batch", "time", split, "head_dim"), k_BTKH.shape, mesh)
    segment_spec = rules.spec_for(("batch", "time"), segment_BT.shape, mesh)
    if axis := time_cut.time_axis(mesh, q_BTNH.shape[1]):
        run = time_cut.over_time(run, blockwise, axis, mesh.shape[axis], block)
    sink_specs = tuple(rules.spec_for((split,), sink_N.shape, mesh) for sink_N in sinks)
    specs = (q_spec, k_spec, k_spec, segment_spec, Spec(), sink_specs, *[segment_spec] * len(also))
    shard = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=q_spec, check_vma=False)
    return shard(q_BTNH, k_BTKH, v_BTKH, segment_BT, window, sinks, *also)


def dense(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_BT: Int[Array, "B T"],
    *,
    window: Int[Array, ""],
    softcap: float,
    shared: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    sinks: "Sinks" = (),
) -> Float[Array, "B T N H"]:
    """Computes attention by its definition, with all scores at once: the reference for the other forms.

    Arguments and result are as in `attention`.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32)
    if softcap:
        score_BKGTS = jnp.tanh(score_BKGTS / softcap) * softcap
    t_T = jnp.arange(T)
    back_TS = t_T[:, None] - t_T[None, :]
    same_BTS = (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT[:, :, None] > 0)
    seen_BTS = same_BTS & (back_TS >= 0) & (back_TS < window)
    if shared is not None:
        last_BT, position_BT = shared
        query_BT1 = segment_BT[:, :, None]
        within_BTS = (segment_BT[:, None, :] <= query_BT1) & (query_BT1 <= last_BT[:, None, :]) & (query_BT1 > 0)
        back_BTS = position_BT[:, :, None] - position_BT[:, None, :]
        seen_BTS = within_BTS & (back_TS >= 0) & (back_BTS < window)
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, NEG_INF)
    for sink_N in sinks:
        sink_BKGT1 = jnp.broadcast_to(sink_N.reshape(K, N // K, 1, 1), (B, K, N // K, T, 1)).astype(jnp.float32)
        score_BKGTS = jnp.concatenate([score_BKGTS, sink_BKGT1], axis=-1)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1)[..., :T].astype(v_BTKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BTKH).reshape(B, T, N, H)


def einsum_f32(equation: str, a: Array, b: Array) -> Array:
    """Computes an einsum accumulated in float32; widens operands on CPU, which lacks some mixed-precision products."""

    def narrow(a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    if a.dtype == jnp.float32 and b.dtype == jnp.float32:
        return narrow(a, b)
    widened = lambda a, b: narrow(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(a, b, cpu=widened, default=narrow)


# --- blockwise ---
# Scores have keys first, [B, K, s, G, t], and queries and outputs have time last, [B, K, H, G, T]. With this layout no
# matrix product of the forward or backward pass transposes a block of scores, only slices of q, k, v and the output.


def _blockwise(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_BT: Array,
    window: Array,
    sinks: "Sinks",
    *shared: Array,
    softcap: float,
    block: int,
    order: tuple[Array, ...] = (),
) -> Array:
    """Computes online softmax over key blocks (arXiv 2205.14135); the backward pass recomputes scores by blocks.

    Args:
      shared: last_BT and position_BT, or nothing.
      block: number of tokens in a block.
      order: block numbers of the queries, in one array, if the queries are only some blocks of the row; the length of
        the row is then a multiple of `block`. () if the queries are the whole row.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    size = min(block, T)
    pad = 0 if order else -T % size
    if pad:
        q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH))
    segment_BT, *also = (jnp.pad(x, ((0, 0), (0, pad))) if pad else x for x in (segment_BT, *shared))
    where = (segment_BT, jnp.asarray(window, jnp.int32), *also)
    q_BKHGT = q_BTNH.reshape(B, T + pad, K, N // K, H).transpose(0, 2, 4, 3, 1)
    k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    sinks = tuple(sink_N.astype(jnp.float32).reshape(K, 1, N // K, 1) for sink_N in sinks)
    out_BKHGT: Array = _flash(q_BKHGT, k_BKSH, v_BKSH, where, order, sinks, softcap, size)
    return out_BKHGT.transpose(0, 4, 1, 3, 2).reshape(B, T + pad, N, H)[:, :T]


# (segment_BT, window), followed by last_BT and position_BT if segments share tokens.
Where = tuple[Array, ...]


# One array with each query block's number in the row; () if query block n is block n of the row.
Order = tuple[Array, ...]
# Scores of the heads' sinks, in one array; () if heads have no sinks.
Sinks = tuple[Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _flash(q_BKHGT, k_BKSH, v_BKSH, where: Where, order: Order, sinks: Sinks, softcap: float, size: int) -> Array:
    return _flash_fwd(q_BKHGT, k_BKSH, v_BKSH, where, order, sinks, softcap, size)[0]


def _key_blocks(index: Array, where: Where, size: int) -> tuple[Array, Array]:
    """Computes the range [first, last) of key blocks in which queries of block `index` may see a key."""
    _, window, *shared = where
    if shared:
        return jnp.zeros_like(index), index + 1
    return jnp.maximum(index * size - jnp.minimum(window, index * size + 1) + 1, 0) // size, index + 1


def _cut(x: Array, index: Array, size: int, axis: int) -> Array:
    if x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=axis)


def _scores(q_BKHGt, k_BKsH, softcap: float) -> Array:
    """Computes capped scores of a query block against a key block, float32."""
    score = einsum_f32("BKsH,BKHGt->BKsGt", k_BKsH, q_BKHGt)
    return jnp.tanh(score * (1.0 / softcap)) * softcap if softcap else score


def _seen(where: Where, i: Array, j: Array, size: int) -> Array:
    """Computes the attention mask of query block i against key block j, [B, 1, s, 1, t]."""
    segment_BT, window, *shared = where
    t_T = jnp.arange(size)
    back_st = (i - j) * size + t_T[None, :] - t_T[:, None]
    key_Bs1, query_B1t = _cut(segment_BT, j, size, 1)[:, :, None], _cut(segment_BT, i, size, 1)[:, None, :]
    seen_Bst = (key_Bs1 == query_B1t) & (query_B1t > 0)
    if shared:
        last_BT, position_BT = shared
        last_Bs1 = _cut(last_BT, j, size, 1)[:, :, None]
        seen_Bst = (key_Bs1 <= query_B1t) & (query_B1t <= last_Bs1) & (query_B1t > 0) & (back_st >= 0)
        back_st = _cut(position_BT, i, size, 1)[:, None, :] - _cut(position_BT, j, size, 1)[:, :, None]
    return (seen_Bst & (back_st >= 0) & (back_st < window))[:, None, :, None]


def _where_seen(where: Where, seen: Array, body, carry):
    """Runs the body for a key block, or skips the block if no query sees a token of it.

    Only rows of several blocks whose segments share tokens need this test. Without shared tokens, `_key_blocks` has
    already left out the blocks beyond the window.
    """
    if len(where) == 2 or seen.shape[-1] == where[0].shape[1]:
        return body(carry)
    return jax.lax.cond(jnp.any(seen), body, lambda carry: carry, carry)


def _flash_fwd(q_BKHGT, k_BKSH, v_BKSH, where: Where, order: Order, sinks: Sinks, softcap: float, size: int):
    def attend(n: Array) -> tuple[Array, Array]:
        q, i = _cut(q_BKHGT, n, size, -1), order[0][n] if order else n

        def add(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            seen = _seen(where, i, j, size)

            def added(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, out = carry
                score = jnp.where(seen, _scores(q, _cut(k_BKSH, j, size, -2), softcap), NEG_INF)
                new_top = jnp.maximum(top, jnp.max(score, axis=2, keepdims=True))
                weight = jnp.exp(score - new_top)
                shrink = jnp.exp(top - new_top)
                total = total * shrink + jnp.sum(weight, axis=2, keepdims=True)
                v = _cut(v_BKSH, j, size, -2)
                part = einsum_f32("BKsH,BKsGt->BKHGt", v, weight.astype(v.dtype))
                return new_top, total, out * shrink + part

            return _where_seen(where, seen, added, carry)

        B, K, _, G, t = q.shape
        row = jnp.full((B, K, 1, G, t), NEG_INF, jnp.float32)
        carry = (row, jnp.zeros_like(row), jnp.zeros(q.shape, jnp.float32))
        for sink_K1G1 in sinks:  # the sums begin with the sink, as a key of weight 1 and value 0
            carry = (jnp.broadcast_to(sink_K1G1, row.shape), jnp.ones_like(row), carry[2])
        top, total, out = _loop(*_key_blocks(i, where, size), add, carry, single=t == k_BKSH.shape[-2])
        if len(where) > 2:  # a query block that is only padding has skipped all key blocks, so its total is 0
            total = jnp.where(total > 0, total, 1.0)
        return (out / total).astype(q.dtype), top + jnp.log(total)

    parts = _over_blocks(attend, q_BKHGT.shape[-1] // size)
    out_BKHGT, lse_BK1GT = (checkpoint_name(x, ATTENTION_NAME) for x in parts)
    return out_BKHGT, (q_BKHGT, k_BKSH, v_BKSH, where, order, sinks, out_BKHGT, lse_BK1GT)


def _flash_bwd(softcap: float, size: int, saved, dout_BKHGT):
    q_BKHGT, k_BKSH, v_BKSH, where, order, sinks, out_BKHGT, lse_BK1GT = saved
    f32 = jnp.float32
    delta_BK1GT = jnp.sum(dout_BKHGT.astype(f32) * out_BKHGT.astype(f32), axis=2, keepdims=True)
    single = k_BKSH.shape[-2] == size

    def add(j, carry, i, q, dout, lse, delta):
        seen = _seen(where, i, j, size)
        added = functools.partial(add_seen, j=j, seen=seen, q=q, dout=dout, lse=lse, delta=delta)
        return _where_seen(where, seen, added, carry)

    def add_seen(carry, j, seen, q, dout, lse, delta):
        dq, dk_BKSH, dv_BKSH = carry
        k, v = _cut(k_BKSH, j, size, -2), _cut(v_BKSH, j, size, -2)
        score = _scores(q, k, softcap)
        weight = jnp.where(seen, jnp.exp(score - lse), 0.0)
        dweight = einsum_f32("BKsH,BKHGt->BKsGt", v, dout)
        dscore = weight * (dweight - delta)
        if softcap:
            dscore = dscore * (1.0 - jnp.square(score * (1.0 / softcap)))
        dscore, weight = dscore.astype(q.dtype), weight.astype(q.dtype)
        dq = dq + einsum_f32("BKsH,BKsGt->BKHGt", k, dscore)
        dk = einsum_f32("BKsGt,BKHGt->BKsH", dscore, q)
        dv = einsum_f32("BKsGt,BKHGt->BKsH", weight, dout)
        if single:
            return dq, dk, dv

        def put(x: Array, y: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, j, size, -2) + y, j * size, axis=-2)

        return dq, put(dk_BKSH, dk), put(dv_BKSH, dv)

    def through(carry, n):
        q, dout, lse, delta = (_cut(x, n, size, -1) for x in (q_BKHGT, dout_BKHGT, lse_BK1GT, delta_BK1GT))
        i = order[0][n] if order else n
        step = functools.partial(add, i=i, q=q, dout=dout, lse=lse, delta=delta)
        start = (jnp.zeros(q.shape, f32), *carry)
        dq, dk, dv = _loop(*_key_blocks(i, where, size), step, start, single=single)
        return (dk, dv), dq.astype(q.dtype)

    zeros = (jnp.zeros(k_BKSH.shape, f32), jnp.zeros(v_BKSH.shape, f32))
    if single:
        (dk_BKSH, dv_BKSH), dq_BKHGT = through(zeros, jnp.int32(0))
    else:
        (dk_BKSH, dv_BKSH), parts = jax.lax.scan(through, zeros, jnp.arange(q_BKHGT.shape[-1] // size))
        dq_BKHGT = _join(parts)
    dsinks = tuple(-jnp.sum(jnp.exp(sink - lse_BK1GT) * delta_BK1GT, axis=(0, 4))[..., None] for sink in sinks)
    return dq_BKHGT, dk_BKSH.astype(k_BKSH.dtype), dv_BKSH.astype(v_BKSH.dtype), None, None, dsinks


_flash.defvjp(_flash_fwd, _flash_bwd)


def _loop(first: Array, last: Array, body, carry, *, single: bool):
    return body(jnp.int32(0), carry) if single else jax.lax.fori_loop(first, last, body, carry)


def _over_blocks(attend, count: int) -> tuple[Array, Array]:
    if count == 1:
        return attend(jnp.int32(0))
    out, lse = jax.lax.map(attend, jnp.arange(count))
    return _join(out), _join(lse)


def _join(blocks: Array) -> Array:
    """Joins blocks along their last axis, which is time; the argument has the blocks stacked on its first axis."""
    blocks = jnp.moveaxis(blocks, 0, -2)
    return blocks.reshape(*blocks.shape[:-2], -1)


# --- TPU kernels ---


def on_tpu(mesh: Mesh | None) -> bool:
    """True if the devices of a mesh are TPUs. Without a mesh (None), JAX's default devices are meant."""
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    return device.platform == "tpu"


def on_gpu(mesh: Mesh) -> bool:
    """True if the devices of a mesh are GPUs."""
    return mesh.devices.flat[0].platform == "gpu"


def _kernel(shape: tuple[int, ...], windows: Sequence[int], *, shared: bool) -> Form:
    _, T, _, H = shape
    if T % _LANES or H % 64:
        return "blockwise"
    if shared:
        return "prefix"
    return "splash" if windows else "blockwise"


def _splash(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_BT: Array,
    window: Array,
    sinks: Sinks,
    *,
    softcap: float,
    windows: tuple[int, ...],
    interpret: bool,
) -> Array:
    """Runs JAX's TPU kernel, which needs the window at compile time: each window shorter than the row gets a branch."""
    T = q_BTNH.shape[1]
    short = [w for w in windows if w < T]
    run = [functools.partial(_splash_one, window=w, softcap=softcap, interpret=interpret) for w in (*short, T)]
    arguments = (q_BTNH, k_BTKH, v_BTKH, segment_BT, sinks)
    if len(run) == 1 or len(set(windows)) == 1:
        return run[0](*arguments)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(short), window), run, *arguments)


def _splash_one(
    q_BTNH, k_BTKH, v_BTKH, segment_BT, sinks: Sinks, *, window: int, softcap: float, interpret: bool
) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N = q_BTNH.shape[1:3]
    mask = masks.CausalMask((T, T)) if window >= T else masks.LocalMask((T, T), (window - 1, 0), 0)
    size = next(size for size in (512, 256, _LANES) if T % size == 0)
    sizes = kernel.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    run = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap or None,
        residual_checkpoint_name=ATTENTION_NAME,
        interpret=interpret,
    )
    q_BNTH, k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    whole = [sink_N.astype(jnp.float32) for sink_N in sinks]
    rows = (q_BNTH, k_BKTH, v_BKTH, kernel.SegmentIds(segment_BT, segment_BT))
    out_BNTH: Any = jax.vmap(run, in_axes=(0,) * len(rows) + (None,) * len(whole))(*rows, *whole)
    return jnp.swapaxes(out_BNTH, 1, 2)
