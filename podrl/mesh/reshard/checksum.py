"""Checksums of sharded leaves that do not depend on the layout, and what two of them say about each other.

The checksum of a leaf is the sum over its elements of bits x weight(position) modulo 2^32, where a position's weight is
the product of one odd hash per dimension: any single flipped bit changes it, and so, but for chance, do exchanged
values. A device sums its own shard; no values cross devices. Every replica is summed, so that a bad copy is found.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, UInt32

from podrl.mesh.reshard.plan import Layout

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_RUNS = 8
_BLOCK = 1 << 12  # elements
# l counts leaves, W devices of the mesh.
Sums = UInt32[Array, "W l"]


def checksum_program(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype], shardings: Sequence[NamedSharding], mesh: Mesh
) -> Callable[[Sequence[Array]], Sums]:
    """A program that sums every leaf on every device of `mesh`; leaves are cast to `dtypes` first.

    Returns:
      leaves -> one row per device in mesh order, one column per leaf, the same on all devices.
    """
    specs = [s.spec for s in shardings]
    layouts = [Layout.of(s, len(shape)) for s, shape in zip(shardings, shapes, strict=True)]

    def local(shards: Sequence[Array]) -> Array:
        index = [jax.lax.axis_index(name) for name in mesh.axis_names]
        sums = [
            _sum_shard(shard.astype(dtype), layout, index)
            for shard, dtype, layout in zip(shards, dtypes, layouts, strict=True)
        ]
        return jnp.stack(sums)[None] if sums else jnp.zeros((1, 0), jnp.uint32)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=Spec(mesh.axis_names), check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, Spec()))


def fold(sums_Wl: UInt32[np.ndarray, "W l"], layouts: Sequence[Layout]) -> tuple[list[int], list[int]]:
    """(checksum of every leaf, leaves whose replicas differ from each other)."""
    totals: list[int] = []
    torn: list[int] = []
    for i, layout in enumerate(layouts):
        by_block: dict[tuple[int, ...], int] = {}
        for block, value in zip(map(tuple, layout.blocks().tolist()), sums_Wl[:, i].tolist(), strict=True):
            if by_block.setdefault(block, value) != value and i not in torn:
                torn.append(i)
        totals.append(sum(by_block.values()) % 2**32)
    return totals, torn


def _sum_shard(shard: Array, layout: Layout, index: Sequence[Array]) -> UInt32[Array, ""]:
    """The sum over a shard, seen as rows by columns: columns are its last dimension, rows all others."""
    words = _words(shard)
    if not shard.ndim:
        return words
    weights = [_weights(d, size, layout, index) for d, size in enumerate(shard.shape)]
    weight_r = functools.reduce(lambda outer, w: (outer[:, None] * w).ravel(), weights[:-1], jnp.ones(1, jnp.uint32))
    words_rc = words.reshape(weight_r.size, shard.shape[-1]) * weight_r[:, None]
    return jnp.sum(_sum_rows(words_rc) * weights[-1], dtype=jnp.uint32)


def _sum_rows(words_rc: UInt32[Array, "r c"]) -> UInt32[Array, " c"]:
    """The sum over all rows, written as additions of runs of rows: XLA's CPU compiler vectorises those, not reduces.

    The loop keeps it from merging the first additions with the reduce of what little is left.
    """
    rows, columns = words_rc.shape
    run = rows // _RUNS
    block = min(max(1, _BLOCK // max(1, columns)), run // 2)
    if not block:
        return jnp.sum(words_rc, axis=0, dtype=jnp.uint32)
    sum_rc = functools.reduce(jnp.add, [words_rc[k * run : (k + 1) * run] for k in range(_RUNS)])

    def add(k: Array, sum_bc: Array) -> Array:
        return sum_bc + jax.lax.dynamic_slice_in_dim(sum_rc, k * block, block)

    looped = run // block * block
    sum_bc = jax.lax.fori_loop(0, run // block, add, jnp.zeros((block, columns), jnp.uint32))
    left = (sum_bc, sum_rc[looped:], words_rc[_RUNS * run :])
    return functools.reduce(jnp.add, [jnp.sum(part, axis=0, dtype=jnp.uint32) for part in left])


def _weights(d: int, size: int, layout: Layout, index: Sequence[Array]) -> UInt32[Array, " i"]:
    """The weight of every position of a shard along dimension d."""
    block: Any = 0
    for axis in layout.dims[d]:
        block = block * layout.mesh_shape[axis] + index[axis]
    position = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(block * size).astype(jnp.uint32)
    return _hash(position + jnp.uint32(0x9E3779B9 * (d + 1) % 2**32)) | jnp.uint32(1)


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bit pattern of every element; a 64-bit element gives the sum of its halves, one weighted."""
    if x.dtype in (jnp.bool_, jnp.int4, jnp.uint4):  # narrower than a byte: the value itself
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return halves[..., 0] + halves[..., 1] * jnp.uint32(0x85EBCA6B)
    return jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _hash(x: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
