"""Checksums of sharded arrays, computed on their devices: the same for every layout, different for any flipped bit.

The checksum of an array is the sum over its elements of bits x weight(position), modulo 2^32. The weight of a position
is the product of one odd hash per dimension, and so it is odd: any single flipped bit changes the sum. If two values
are exchanged, the sum changes too, except by chance. Each device sums its own shard, and sends only that sum.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, ArrayLike, UInt32

from podrl import offload
from podrl.types import PyTree

Leaf = Array | jax.ShapeDtypeStruct
Place = Mesh | Sharding  # mesh of an array, or the sharding of an array without a mesh
K = TypeVar("K", bound=Hashable)

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_RUNS = 8
_BLOCK = 1 << 12  # number of elements that one iteration of the loop in `_sum_runs` adds
_SMALL = 1 << 17  # a shard of at most this many elements is reduced without that loop


def leaf_name(path: Sequence[object]) -> str:
    """Returns the name of a leaf: the keys of its path in the tree, joined by '/'.

    Dataclasses, sequences and the mappings read from a checkpoint give the same name.
    """
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def tree_sums(tree: PyTree) -> dict[str, int]:
    """Returns the checksum of every array of a tree, by the array's `leaf_name`; waits for the devices.

    All processes that hold a part of an array, and no others, call this together and get the same result.
    """
    named = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    leaves = {name: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for name, leaf in named.items()}
    sums_by_name: dict[str, int] = {}
    for place, names in _by_place(leaves).items():
        sums = [_summed(place, leaves[name])(leaves[name]) for name in names]
        sums_by_name |= zip(names, np.asarray(_gathered(place, len(names))(sums)).tolist(), strict=True)
    return sums_by_name


def compile_sums(tree: PyTree) -> None:
    """Compiles the programs of `tree_sums` for a tree of arrays, or of jax.ShapeDtypeStructs with shardings."""
    leaves = dict(enumerate(jax.tree.leaves(tree)))
    for place, chosen in _by_place(leaves).items():
        for i in chosen:
            _summed(place, leaves[i])
        _gathered(place, len(chosen))


def _by_place(leaves: Mapping[K, Leaf]) -> dict[Place, list[K]]:
    """Groups the keys of leaves by the leaf's mesh, or by its sharding if the leaf has no mesh."""
    places: dict[Place, list[K]] = {}
    for key, leaf in leaves.items():
        sharding = leaf.sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        places.setdefault(mesh if isinstance(mesh, Mesh) else sharding, []).append(key)
    return places


def _summed(place: Place, leaf: Leaf) -> Callable[[Array], Array]:
    sharding = leaf.sharding
    spec = sharding.spec if isinstance(place, Mesh) and isinstance(sharding, NamedSharding) else None
    return _compiled(place, spec, leaf.shape, jnp.dtype(leaf.dtype), hosted=sharding.memory_kind == offload.HOST)


@functools.lru_cache(maxsize=512)
def _compiled(
    place: Place, spec: Spec | None, shape: tuple[int, ...], dtype: np.dtype, *, hosted: bool = False
) -> Callable[[Array], Array]:
    """Compiles a program that returns the sum of each device's shard of a leaf, on that device.

    If several devices hold copies of a shard, one of them returns the sum, and each of the others returns 0.

    A leaf in the host's memory (`hosted`) is copied to its devices first.

    There is one program per kind of leaf, not per tree, because a deep model, with the moments of its optimizer, has
    few different kinds of leaves.
    """
    if spec is None or not isinstance(place, Mesh):
        abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        return jax.jit(lambda x: shard_sum(x, [0] * x.ndim)[None]).lower(abstract).compile()
    mesh = place

    def local(shard: Array) -> Array:
        axes = [_axes(spec[d]) if d < len(spec) else () for d in range(shard.ndim)]
        starts = [_block(names, mesh) * size for names, size in zip(axes, shard.shape, strict=True)]
        used = {name for names in axes for name in names}
        first = jnp.bool_(True)  # True on one of several replicas: the copy from which a checkpoint is written
        for name in mesh.axis_names:
            first = first if name in used else first & (jax.lax.axis_index(name) == 0)
        return jnp.where(first, shard_sum(shard, starts), jnp.uint32(0))[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=Spec(mesh.axis_names), check_vma=False)
    own = NamedSharding(mesh, spec)
    if not hosted:
        return jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=own)).compile()
    waiting = jax.ShapeDtypeStruct(shape, dtype, sharding=offload.on_host(own))
    return jax.jit(lambda x: mapped(offload.to_devices(x, waiting.sharding))).lower(waiting).compile()


@functools.lru_cache(maxsize=32)
def _gathered(place: Place, count: int) -> Callable[[Sequence[Array]], Array]:
    """Compiles a program that adds up the shards' sums of `count` leaves; the array of totals is whole on every device.

    Devices wait for each other only in this program, because many such programs in flight would block a pod of CPU
    devices.
    """
    if not isinstance(place, Mesh):
        abstract = [jax.ShapeDtypeStruct((1,), jnp.uint32, sharding=place)] * count
        return jax.jit(jnp.concatenate).lower(abstract).compile()
    own = NamedSharding(place, Spec(place.axis_names))
    whole = lambda sums: jax.lax.psum(jnp.concatenate(sums), place.axis_names)  # noqa: E731
    mapped = jax.shard_map(whole, mesh=place, in_specs=([own.spec] * count,), out_specs=Spec(), check_vma=False)
    return jax.jit(mapped).lower([jax.ShapeDtypeStruct((place.size,), jnp.uint32, sharding=own)] * count).compile()


def _axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _block(names: tuple[str, ...], mesh: Mesh) -> ArrayLike:
    """Returns the index of this device's block of a dimension that is split along the mesh axes `names`."""
    block: ArrayLike = 0
    for name in names:
        block = block * mesh.shape[name] + jax.lax.axis_index(name)
    return block


@jax.jit  # traced once for all equal kinds of leaves, in all programs
def shard_sum(shard: Array, starts: Sequence[ArrayLike]) -> UInt32[Array, ""]:
    """Computes the sum of a shard whose first element is at position `starts` of the whole array.

    The shard is treated as a matrix of r rows and c columns: c is its last dimension, r all others.
    """
    words = _words(shard)
    if not shard.ndim:
        return words
    weights = [_weights(d, size, start) for d, (size, start) in enumerate(zip(shard.shape, starts, strict=True))]
    weight_r = functools.reduce(lambda outer, w: (outer[:, None] * w).ravel(), weights[:-1], jnp.ones(1, jnp.uint32))
    words_rc = words.reshape(weight_r.size, shard.shape[-1]) * weight_r[:, None]
    return jnp.sum(_sum_rows(words_rc) * weights[-1], dtype=jnp.uint32)


def _sum_rows(words_rc: UInt32[Array, "r c"]) -> UInt32[Array, " c"]:
    """Sums over all rows.

    Only a CPU uses `_sum_runs`: on an accelerator its loop takes a thousand times as long, because a GPU starts a
    kernel for each iteration.
    """

    def reduce(words_rc: Array) -> Array:
        return jnp.sum(words_rc, axis=0, dtype=jnp.uint32)

    return jax.lax.platform_dependent(words_rc, cpu=_sum_runs, default=reduce)


def _sum_runs(words_rc: UInt32[Array, "r c"]) -> UInt32[Array, " c"]:
    """Sums over all rows by adding runs of rows: XLA's CPU compiler vectorises additions, but not a reduce.

    The loop keeps the compiler from merging the first additions with the reduce of the few rows that are left. A small
    shard is reduced directly, because compiling the loop would take longer than all sums of the shard.
    """
    rows, columns = words_rc.shape
    run = rows // _RUNS
    block = min(max(1, _BLOCK // max(1, columns)), run // 2)
    if not block or words_rc.size <= _SMALL:
        return jnp.sum(words_rc, axis=0, dtype=jnp.uint32)
    sum_rc = functools.reduce(jnp.add, [words_rc[k * run : (k + 1) * run] for k in range(_RUNS)])

    def add(k: Array, sum_bc: Array) -> Array:
        return sum_bc + jax.lax.dynamic_slice_in_dim(sum_rc, k * block, block)

    looped = run // block * block
    sum_bc = jax.lax.fori_loop(0, run // block, add, jnp.zeros((block, columns), jnp.uint32))
    left = (sum_bc, sum_rc[looped:], words_rc[_RUNS * run :])
    return functools.reduce(jnp.add, [jnp.sum(part, axis=0, dtype=jnp.uint32) for part in left])


def _weights(d: int, size: int, start: ArrayLike) -> UInt32[Array, " i"]:
    """Computes the weight of every position of a shard along dimension d."""
    position = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start).astype(jnp.uint32)
    return _hash(position + jnp.uint32(0x9E3779B9 * (d + 1) % 2**32)) | jnp.uint32(1)


def _words(x: Array) -> UInt32[Array, "..."]:
    """Returns the bit pattern of every element; a 64-bit element becomes the weighted sum of its two halves."""
    if x.dtype in (jnp.bool_, jnp.int4, jnp.uint4):  # bools and halves of a byte: each value serves as a word
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return halves[..., 0] + halves[..., 1] * jnp.uint32(0x85EBCA6B)
    return jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _hash(x: Array) -> Array:
    """Applies the 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
