"""Refuses weights with NaN or infinite values."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array


def refuse_nonfinite(leaf: Array, names: Sequence[str], where: str) -> None:
    """Raises if a leaf holds NaN or infinity; each device checks its own part, and no process waits for another.

    Args:
      leaf: weights on a mesh, in their storage dtype.
      names: names of the tensors that the leaf was made of: one name, or one for each index of its first dimension.
      where: file or directory of the weights, which the message names.

    Raises:
      ValueError: a value is NaN or infinite, in the file or because it is too large for the leaf's dtype. The message
        names the first such tensor. Only the processes whose devices hold the value raise.
    """
    stacked = len(names) > 1
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding) and not (stacked and sharding.spec and sharding.spec[0]), sharding
    largest = _largest(sharding, leaf.ndim, stacked)(leaf)
    for shard in largest.addressable_shards:
        bad = np.flatnonzero(~np.isfinite(np.asarray(shard.data)))
        if len(bad):
            some = f" ({len(bad)} of the {len(names)} tensors of this parameter do)" if stacked else ""
            raise ValueError(
                f"Tensor {names[int(bad[0])]} in {where} holds NaN or infinity{some}, as {leaf.dtype.name}: a model "
                "cannot run with it. Take another checkpoint, or a dtype that holds larger numbers."
            )


@functools.lru_cache(maxsize=64)
def _largest(sharding: NamedSharding, rank: int, stacked: bool):
    """Builds a function that computes each device's largest magnitude; NaN if a value is NaN.

    If `stacked`, the function computes one magnitude for each index of the first dimension.
    """

    def largest(part: Array) -> Array:
        return jax.lax.reduce_max(jax.lax.abs(part), tuple(range(int(stacked), rank)))[None]

    mesh = sharding.mesh
    return jax.jit(jax.shard_map(largest, mesh=mesh, in_specs=sharding.spec, out_specs=Spec(mesh.axis_names)))
