"""A Pallas kernel of decoding attention for NVIDIA GPUs: one launch for all lanes, however many pages they read.

Attention compiled by XLA loops over reads. Only the device knows where the loop ends, so on a GPU every iteration waits
for a round trip to the host. Here each program of the grid belongs to a lane, a key head, and one of a few parts of the
lane's reads, and takes the reads of its part one after the other. Samples of one prompt find the prompt's pages in the
second-level cache. The results of the parts are merged in order.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from podrl.engine.reads import Runs
from podrl.models.attention import NEG_INF
from podrl.types import JaxDevice

_ROWS = 16  # smallest number of rows of a matrix product
_PROGRAMS = 512  # about the number of programs that keep a GPU with 132 processors busy
_PARTS = 16  # largest number of parts of a lane's reads
_SCORES = 1 << 16  # largest size, in bytes, of one head's keys in a page: a program holds all of them


def takes(device: JaxDevice, page_tokens: int, head_dim: int, dtype: jnp.dtype) -> bool:
    """Returns True if the kernel runs on a device, with pages and heads of these sizes.

    The device must be an NVIDIA GPU of the Ampere generation or later. Both sizes must be powers of two, at least 16,
    and the keys of one head in a page must have at most 64 KiB. jax has deprecated the kernel's compiler, Triton in
    Pallas. If a later jax lacks it, engines use attention compiled by XLA.
    """
    generation = str(getattr(device, "compute_capability", ""))  # such as '9.0', or 'gfx90a' on an AMD GPU
    powers = all(size >= _ROWS and size & (size - 1) == 0 for size in (page_tokens, head_dim))
    small = page_tokens * head_dim * jnp.dtype(dtype).itemsize <= _SCORES
    compiler = importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    return powers and small and compiler and generation[:1].isdigit() and float(generation) >= 8


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
    """Computes attention of one token per lane to the pages of the lane's reads of one kind, shared or own.

    Arguments and results are those of `podrl.engine.page_attention.page_attention`.
    """
    from jax.experimental.pallas import triton  # imported here, as a later jax will no longer have it

    R, N, H = q_RNH.shape
    _, _, K, C, _ = key_LMKCH.shape
    G, W = N // K, runs.lane_UW.shape[1]
    rows = max(_ROWS, pl.next_power_of_2(G))
    parts = max(1, min(_PROGRAMS // (R * K), _PARTS, runs.page_U.shape[0]))
    q_RKgH = jnp.pad(q_RNH.reshape(R, K, G, H).astype(key_LMKCH.dtype), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    limits_2 = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)])
    numbers = (runs.first_R, runs.number_R, runs.page_U, runs.start_U, runs.count_U, position_R, limits_2)
    whole = lambda x: pl.BlockSpec(x.shape, lambda r, k, s: (0,) * x.ndim)  # noqa: E731
    mine = pl.BlockSpec((None, None, rows, H), lambda r, k, s: (r, k, 0, 0))
    sums = pl.BlockSpec((None, None, None, rows), lambda r, k, s: (s, r, k, 0))
    value_SRKgH, top_SRKg, mass_SRKg = pl.pallas_call(
        functools.partial(_kernel, W=W, parts=parts, tokens=C, softcap=softcap),
        grid=(R, K, parts),
        in_specs=[*map(whole, numbers), mine, whole(key_LMKCH), whole(value_LMKCH)],
        out_specs=[pl.BlockSpec((None, None, None, rows, H), lambda r, k, s: (s, r, k, 0, 0)), sums, sums],
        out_shape=[
            jax.ShapeDtypeStruct((parts, R, K, rows, H), jnp.float32),
            *[jax.ShapeDtypeStruct((parts, R, K, rows), jnp.float32)] * 2,
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=name,
        interpret=interpret,
    )(*numbers, q_RKgH, key_LMKCH, value_LMKCH)
    value_SRKGH, top_SRKG, mass_SRKG = (x[:, :, :, :G] for x in (value_SRKgH, top_SRKg, mass_SRKg))
    top_RKG = jnp.max(top_SRKG, axis=0)
    scale_SRKG = jnp.exp(top_SRKG - top_RKG)
    return top_RKG, jnp.sum(mass_SRKG * scale_SRKG, axis=0), jnp.sum(value_SRKGH * scale_SRKG[..., None], axis=0)


def _kernel(
    first_R, number_R, page_U, start_U, count_U, position_R, limits_2,
    q_gH, key_LMKCH, value_LMKCH, out_gH, top_g, mass_g,
    *, W: int, parts: int, tokens: int, softcap: float,
):  # fmt: skip
    """Computes attention of one key head's queries to a lane's reads number `part`, `part + parts`, and so on."""
    r, k, part = (pl.program_id(axis) for axis in range(3))
    layer, window = limits_2[0], limits_2[1]
    read, number, position = _div(first_R[r], W), number_R[r], position_R[r]
    q = q_gH[...]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows, H = q.shape

    def attend(n: Any, sums: tuple) -> tuple:
        had, mass, value = sums
        at = read + part + n * parts
        page, start, count = page_U[at], start_U[at], count_U[at]
        keys = key_LMKCH[layer, page, k]
        score = jax.lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if softcap:
            score = jnp.tanh(score / softcap) * softcap
        token = jax.lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
        seen = (token < count) & (position - (start + token) < window)
        score = jnp.where(seen, score, NEG_INF)
        top = jnp.maximum(had, jnp.max(score, axis=1))
        weight = jnp.where(seen, jnp.exp(score - top[:, None]), 0.0)
        shrink = jnp.exp(had - top)
        values = value_LMKCH[layer, page, k]
        more = jax.lax.dot_general(
            weight.astype(values.dtype),
            values,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return top, mass * shrink + jnp.sum(weight, axis=1), value * shrink[:, None] + more

    none = (jnp.full((rows,), NEG_INF, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, H), jnp.float32))
    turns = _div(jnp.maximum(number - part + parts - 1, 0), parts)
    top_g[...], mass_g[...], out_gH[...] = jax.lax.fori_loop(0, turns, attend, none)


def _div(x: Any, by: int) -> Any:
    """Divides integers that are not negative."""
    return jax.lax.div(x, jnp.full_like(x, by))
