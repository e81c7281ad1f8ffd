"""Random trees, meshes and layouts, and the expected arrays, for every transport."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import AXES


def bits(array):
    return np.atleast_1d(np.asarray(array)).view(np.uint8)


def some_values(shape, dtype, seed):
    """Draws any bit patterns except NaNs, because a cast need not keep a NaN's payload."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-(2**31), 2**31, shape).astype(dtype)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(dtype)


@st.composite
def meshes(draw, first=0, last=8):
    """Draws a mesh over successive devices, all of them with numbers from `first` to `last` - 1."""
    # Sizes of data, expert, fsdp, seq, tensor.
    every = [
        (1, 1, 1, 1, 1),
        (1, 1, 2, 1, 2),
        (2, 1, 1, 1, 2),
        (1, 1, 1, 1, 4),
        (3, 1, 1, 1, 1),
        (1, 1, 3, 1, 2),
        (2, 1, 2, 1, 2),
        (1, 1, 8, 1, 1),
    ]
    every += [(1, 1, 2, 2, 1), (1, 1, 2, 2, 2), (1, 4, 2, 1, 1), (2, 2, 1, 1, 1)]
    sizes = draw(st.sampled_from([sizes for sizes in every if math.prod(sizes) <= last - first]))
    count = math.prod(sizes)
    first = draw(st.integers(first, last - count))
    grid = np.array(jax.devices()[first : first + count], dtype=object)
    return Mesh(grid.reshape(sizes), AXES)


@st.composite
def specs(draw, rank):
    """Draws a partition spec that uses every mesh axis at most once."""
    axes = list(draw(st.permutations(AXES)))
    entries = []
    for _ in range(rank):
        taken = [axes.pop() for _ in range(draw(st.integers(0, min(2, len(axes)))))]
        entries.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
    return Spec(*entries)


def divisor(mesh, entry):
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.shape[name] for name in names)


@st.composite
def transfers(draw, disjoint=False):
    """Draws (numpy leaves, source shardings, target shardings, target dtype, bucket bytes)."""
    split = draw(st.integers(1, 7)) if disjoint else 0
    source, target = draw(meshes(0, split or 8)), draw(meshes(split, 8))
    leaves, before, after = [], [], []
    for i in range(draw(st.integers(0, 3))):
        rank = draw(st.integers(0, 3))
        first, second = draw(specs(rank)), draw(specs(rank))
        shape = tuple(
            math.lcm(divisor(source, first[d]), divisor(target, second[d])) * draw(st.integers(1, 3))
            for d in range(rank)
        )
        dtype = draw(st.sampled_from([np.float32, jnp.bfloat16, np.int32, np.int8, np.bool_]))
        leaves.append(some_values(shape, np.dtype(dtype), i))
        before.append(NamedSharding(source, first))
        after.append(NamedSharding(target, second))
    return (
        leaves,
        before,
        after,
        draw(st.sampled_from([None, np.float32, jnp.bfloat16])),
        draw(st.sampled_from([64, 1 << 20])),
    )


def expected(leaf, dtype):
    if dtype is None or not jax.dtypes.issubdtype(leaf.dtype, np.floating):
        return leaf
    return leaf.astype(dtype)


def arrived(moved, leaves, after, dtype):
    """Asserts that every shard on every device holds the bits of `leaves`, cast to `dtype`."""
    for leaf, array, sharding in zip(leaves, moved, after, strict=True):
        want = expected(leaf, dtype)
        assert array.sharding == sharding
        assert array.dtype == want.dtype
        for shard in array.addressable_shards:
            assert (bits(shard.data) == bits(want[shard.index])).all()
