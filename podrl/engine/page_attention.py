"""A Pallas TPU kernel of decoding attention: each read copies its page to the chip once, for all lanes of the read.

A run is a sequence of consecutive reads that serve the same lanes: a prompt's pages for its samples, or the pages of
one lane. Each step of the grid belongs to a lane. The step of a run's first lane computes the run for all its lanes;
the steps of its other lanes do nothing. While one block of pages is worked on, the next is copied into a second buffer.
The softmax is updated block by block (arXiv 2205.14135), so only each lane's result is written.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from podrl.engine import page_attention_gpu
from podrl.engine.reads import ReadShape, Runs
from podrl.mesh.chips import chip_of
from podrl.models.attention import NEG_INF
from podrl.models.config import ModelConfig

_LANES, _ROWS = 128, 8  # size of a register in float32
_PAGES = 8  # number of pages of a block; fewer if their keys and values take more than _BUFFER bytes
_BUFFER, _VMEM_BYTES = 2 << 20, 32 << 20
_SCALAR_BYTES = 512 << 10  # largest size of a read list: half of a core's memory for scalars
_SCORES = 6  # largest number of arrays of a head's scores that the compiler keeps at once


class Sizes(NamedTuple):
    """Sizes that decide how much near memory (VMEM) a run takes.

    Attributes:
      W: largest number of lanes of a run.
      K: number of key heads on a device.
      G: number of queries of a lane per key head.
      C: number of tokens of a page.
      H: head dimension.
    """

    W: int
    K: int
    G: int
    C: int
    H: int

    @property
    def rows(self) -> int:
        """Number of a lane's queries per key head, rounded up to whole registers."""
        return -(-self.G // _ROWS) * _ROWS

    def pages(self, dtype: jnp.dtype) -> int:
        """Returns the largest number of pages of a block."""
        room = _BUFFER // (2 * self.K * self.C * self.H * jnp.dtype(dtype).itemsize)
        return max(1, min(room, _PAGES))

    def near(self, dtype: jnp.dtype) -> int:
        """Returns the bytes of near memory: queries, sums and their statistics, two blocks of pages, and scores."""
        W, K, _, C, H = self
        pages = self.pages(dtype)
        kept = W * K * self.rows * 2 * (H + _LANES) * 4
        blocks = 2 * 2 * pages * K * C * H * jnp.dtype(dtype).itemsize
        return kept + blocks + _SCORES * W * self.rows * pages * C * 4


def takes(page_tokens: int, head_dim: int, dtype: jnp.dtype, *, numbers: int) -> bool:
    """Returns True if the kernel can run: pages fill whole tiles, and the read list fits the memory for scalars.

    A page's tokens are the rows of a tile, and the head dimension is its columns.

    Args:
      page_tokens: number of tokens of a page.
      head_dim: H, head dimension.
      dtype: dtype of keys and values.
      numbers: count of the integers in a shard's read list, all of which the kernel keeps in the memory for scalars.
    """
    tiles = head_dim % _LANES == 0 and page_tokens % (_ROWS * 4 // jnp.dtype(dtype).itemsize) == 0
    return tiles and 4 * numbers <= _SCALAR_BYTES


def chosen(
    wanted: bool | None, model: ModelConfig, mesh: Mesh, page_tokens: int, reads: ReadShape, dtype: jnp.dtype
) -> bool:
    """Returns True if an engine uses the attention kernel: as configured, or by default if it runs and is faster.

    On TPUs the kernel is faster if a device has two cores, which share no near memory: XLA then writes the gathered
    pages to HBM (counted: docs/measurements/planning.md). On GPUs the kernel is faster (docs/measurements/chips.md).

    Args:
      wanted: `rollout.page_kernel`.
      model: architecture of the model.
      mesh: the rollout mesh.
      page_tokens: number of tokens of a page.
      reads: sizes of a shard's read list.
      dtype: dtype of keys and values.

    Raises:
      ValueError: the kernel is wanted, but it does not run with these sizes or devices.
    """
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    kind, whole = device.device_kind, model.num_kv_heads % tensor == 0
    if whole and page_attention_gpu.takes(device, page_tokens, model.head_dim, dtype):
        return wanted is not False
    chip = chip_of(kind)
    heads = max(model.num_kv_heads // tensor, 1), model.num_heads // model.num_kv_heads
    near, room = Sizes(reads.members, *heads, page_tokens, model.head_dim).near(dtype), _VMEM_BYTES
    room = min(room, chip.near or room) if chip is not None else 0
    fits = whole and near <= room and takes(page_tokens, model.head_dim, dtype, numbers=reads.size)
    if wanted and not fits:
        raise ValueError(
            "rollout.page_kernel=True needs an NVIDIA GPU, Ampere or later, page and head sizes that are powers of two "
            "from 16 on, and at most 64 KiB of one head's keys in a page; or a TPU, a head size that is a multiple of "
            f"{_LANES}, pages of whole tiles, a read list of at most {_SCALAR_BYTES >> 10} KB, and near memory for a "
            f"run (here {near >> 20} MiB of {room >> 20}). Both need a number of key heads that tensor={tensor} "
            f"divides. This job has {kind}, {model.num_kv_heads} key heads of size {model.head_dim}, "
            f"rollout.page_tokens={page_tokens} and a read list of {4 * reads.size >> 10} KB: leave "
            "the key None."
        )
    return fits and ((chip is not None and chip.cores > 1) if wanted is None else wanted)


def page_attention(
    q_RNH: Float[Array, "R N H"],
    layer: Int[Array, ""] | int,
    key_LMKCH: Float[Array, "L M K C H"],
    value_LMKCH: Float[Array, "L M K C H"],
    runs: Runs,
    position_R: Int[Array, " R"],
    *,
    window: Int[Array, ""],
    softcap: float,
    name: str,
    interpret: bool = False,
) -> tuple[Float[Array, "R K G"], Float[Array, "R K G"], Float[Array, "R K G H"]]:
    """Computes attention of one query token per lane to the pages that the lane reads, on one device.

    Args:
      q_RNH, layer, key_LMKCH, value_LMKCH, position_R, window, softcap: arguments of
        `podrl.engine.attention.decode_attention`.
      runs: the shared reads of the lanes, or their own reads.
      name: name of the kernel in the compiled program.
      interpret: True to run the kernel on CPU, slowly.

    Returns:
      The fields of `podrl.engine.attention.PartialSoftmax`: each query's largest score, the sum of its weights
      exp(score - largest score), and the sum of its weighted values; `NEG_INF`, 0 and 0 for a lane without reads.
    """
    R, N, H = q_RNH.shape
    _, _, K, C, _ = key_LMKCH.shape
    W, G = runs.lane_UW.shape[1], N // K
    sizes = Sizes(W, K, G, C, H)
    rows, pages = sizes.rows, min(sizes.pages(key_LMKCH.dtype), runs.page_U.shape[0])
    q_RKgH = jnp.pad(q_RNH.reshape(R, K, G, H).astype(jnp.float32), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    limits_2 = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)])
    scalars = (runs.first_R, runs.number_R, runs.lane_UW.reshape(-1), runs.page_U, runs.start_U, runs.count_U)
    anywhere, wide = pl.BlockSpec(memory_space=pl.ANY), (W, K, rows, _LANES)
    pair = (2, pages, K, C, H)
    value_RKgH, stats_RKg = pl.pallas_call(
        functools.partial(_kernel, W=W, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(R,),
            in_specs=[anywhere] * 3,
            out_specs=[anywhere] * 2,
            scratch_shapes=[
                pltpu.VMEM((W, K, rows, H), jnp.float32),
                pltpu.VMEM(pair, key_LMKCH.dtype),
                pltpu.VMEM(pair, value_LMKCH.dtype),
                pltpu.VMEM((W, K, rows, H), jnp.float32),
                pltpu.VMEM(wide, jnp.float32),
                pltpu.VMEM(wide, jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((R, K, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((R, K, rows, _LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES),
        name=name,
        interpret=interpret,
    )(*scalars, position_R, limits_2, q_RKgH, key_LMKCH, value_LMKCH)
    reads_R = runs.number_R > 0  # the kernel writes nothing for the other lanes: their outputs are uninitialised
    top_RKG = jnp.where(reads_R[:, None, None], stats_RKg[:, :, :G, 0], NEG_INF)
    mass_RKG = jnp.where(reads_R[:, None, None], stats_RKg[:, :, :G, _LANES // 2], 0.0)
    return top_RKG, mass_RKG, jnp.where(reads_R[:, None, None, None], value_RKgH[:, :, :G], 0.0)


def _kernel(
    first_R, number_R, lane_UW, page_U, start_U, count_U, position_R, limits_2,
    q_RKgH, key_LMKCH, value_LMKCH, out_RKgH, stats_RKg,
    q_WKgH, k_2PKCH, v_2PKCH, sum_WKgH, top_WKg, mass_WKg, moved, copied,
    *, W: int, softcap: float,
):  # fmt: skip
    """Computes the run whose first lane is the lane of this grid step; does nothing if there is no such run."""
    r = pl.program_id(0)
    number, read = number_R[r], _div(first_R[r], W)
    _, P, K, C, _ = k_2PKCH.shape
    blocks = _div(number + P - 1, P)

    def member(w: int) -> Any:
        return lane_UW[read * W + w]

    def pages(block: Any, act: Any) -> None:
        """Calls `act` with the copy of each page of a block, to start it or to wait for it."""
        slot = block & 1
        for p in range(P):

            @pl.when(block * P + p < number)
            def _(p: int = p) -> None:
                page = page_U[read + block * P + p]
                for pool, buffer in ((key_LMKCH, k_2PKCH), (value_LMKCH, v_2PKCH)):
                    act(pltpu.make_async_copy(pool.at[limits_2[0], page], buffer.at[slot, p], copied.at[slot]))

    def results(act: Any) -> None:
        for w in range(W):
            lane = member(w)

            # A read may serve fewer than W lanes, so its empty places are skipped.
            @pl.when((number_R[lane] > 0) & (first_R[lane] == read * W + w))
            def _(w: int = w, lane: Any = lane) -> None:
                for kept, out in ((sum_WKgH, out_RKgH), (top_WKg, stats_RKg)):
                    act(pltpu.make_async_copy(kept.at[w], out.at[lane], moved.at[1]))

    def attend(block: Any, _: None) -> None:
        @pl.when(block + 1 < blocks)
        def _() -> None:
            pages(block + 1, lambda copy: copy.start())

        pages(block, lambda copy: copy.wait())
        seen = _seen(block, read, number, member, start_U, count_U, position_R, limits_2[1], top_WKg.shape, P, C)
        for k in range(K):
            _add(k, block & 1, seen, softcap, q_WKgH, k_2PKCH, v_2PKCH, sum_WKgH, top_WKg, mass_WKg)

    @pl.when((number > 0) & (first_R[r] == read * W))
    def _() -> None:
        queries = [pltpu.make_async_copy(q_RKgH.at[member(w)], q_WKgH.at[w], moved.at[0]) for w in range(W)]
        for copy in queries:
            copy.start()
        pages(0, lambda copy: copy.start())
        sum_WKgH[...] = jnp.zeros(sum_WKgH.shape, jnp.float32)
        mass_WKg[...] = jnp.zeros(mass_WKg.shape, jnp.float32)
        top_WKg[...] = jnp.full(top_WKg.shape, NEG_INF, jnp.float32)
        for copy in queries:
            copy.wait()
        jax.lax.fori_loop(0, blocks, attend, None)
        half = jax.lax.broadcasted_iota(jnp.int32, top_WKg.shape, 3) < _LANES // 2
        top_WKg[...] = jnp.where(half, top_WKg[...], mass_WKg[...])
        results(lambda copy: copy.start())
        results(lambda copy: copy.wait())


def _div(x: Any, by: int) -> Any:
    """Divides non-negative integers with lax.div, because `//` looks up the machine's chip, and there may be none."""
    return jax.lax.div(x, jnp.full_like(x, by))


def _seen(block, read, number, member, start_U, count_U, position_R, window, shape, P: int, C: int) -> tuple[Any, Any]:
    """Returns which tokens of a block each query sees, (W * rows, P * C), and which were copied, (P * C, 1)."""
    W, _, rows, _ = shape
    query, token = (jax.lax.broadcasted_iota(jnp.int32, (W * rows, P * C), axis) for axis in (0, 1))
    at = jax.lax.broadcasted_iota(jnp.int32, (P * C, 1), 0)
    position, owner, page, row = jnp.zeros_like(query), _div(query, rows), _div(token, C), _div(at, C)
    for w in range(W):
        position = jnp.where(owner == w, position_R[member(w)], position)
    start, last, there = jnp.zeros_like(token), jnp.zeros_like(token), jnp.zeros_like(at)
    for p in range(P):
        n = block * P + p
        place = read + jnp.minimum(n, number - 1)
        count = jnp.where(n < number, count_U[place], 0)
        start = jnp.where(page == p, start_U[place] - p * C, start)
        last = jnp.where(page == p, p * C + count, last)
        there = jnp.where(row == p, (n < number).astype(jnp.int32), there)
    return (token < last) & (position - (start + token) < window), there > 0


def _add(k: int, slot, seen, softcap: float, q_WKgH, k_2PKCH, v_2PKCH, sum_WKgH, top_WKg, mass_WKg) -> None:
    """Adds a block's keys and values to the softmax of the queries of one key head."""
    seen_QT, there_T1 = seen
    W, _, rows, H = q_WKgH.shape
    flat = lambda ref: ref[:, k].reshape(W * rows, ref.shape[3])  # noqa: E731
    keys_TH, values_TH = (x[slot, :, k].reshape(-1, H) for x in (k_2PKCH, v_2PKCH))
    # Places of pages that were not copied hold arbitrary bits, and 0 x NaN is NaN.
    values_TH = jnp.where(there_T1, values_TH, jnp.zeros_like(values_TH))
    score_QT = jax.lax.dot_general(
        flat(q_WKgH).astype(keys_TH.dtype), keys_TH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if softcap:
        score_QT = jnp.tanh(score_QT / softcap) * softcap
    score_QT = jnp.where(seen_QT, score_QT, NEG_INF)
    had_QX = flat(top_WKg)
    top_QX = jnp.maximum(had_QX, jnp.max(score_QT, axis=1, keepdims=True))
    weight_QT = jnp.where(seen_QT, jnp.exp(score_QT - top_QX[:, :1]), 0.0)
    shrink_QX = jnp.exp(had_QX - top_QX)
    part_QH = jax.lax.dot(weight_QT.astype(values_TH.dtype), values_TH, preferred_element_type=jnp.float32)
    whole = lambda x: x.reshape(W, rows, x.shape[1])  # noqa: E731
    top_WKg[:, k] = whole(top_QX)
    mass_WKg[:, k] = whole(flat(mass_WKg) * shrink_QX + jnp.sum(weight_QT, axis=1, keepdims=True))
    sum_WKgH[:, k] = whole(flat(sum_WKgH) * shrink_QX[:, :1] + part_QH)
