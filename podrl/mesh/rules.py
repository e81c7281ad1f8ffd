"""Maps logical axes of models and batches to mesh axes; no other module does."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.types import PyTree

MeshAxes = tuple[str, ...]

# Parameters: the model dimension ("embed") is cut over fsdp and seq; heads, feed-forward and vocabulary over tensor.
# Experts are cut over expert; all other weights have a copy at each position of this axis. Activations: rows are cut
# over data, expert and fsdp, time over seq. Their model dimension ("act") stays whole, so that XLA gathers weights and
# not activations.
DEFAULT_RULES: Mapping[str, MeshAxes] = {
    "act": (),
    "batch": ("data", "expert", "fsdp"),
    "embed": ("fsdp", "seq"),
    "expert": ("expert",),
    "head_dim": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "layers": (),
    "mlp": ("tensor",),
    "norm": (),
    "rank": (),
    "replica": ("data", "expert"),
    "time": ("seq",),
    "vocab": ("tensor",),
}


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in axes_over("batch", mesh))


def time_shards(mesh: Mesh) -> int:
    """Returns the number of parts that every row is cut into along time."""
    return math.prod(mesh.shape[axis] for axis in axes_over("time", mesh))


def axes_over(axis: str, mesh: Mesh | AbstractMesh) -> MeshAxes:
    """Lists the mesh axes larger than 1 that a logical axis is cut over."""
    return tuple(name for name in DEFAULT_RULES[axis] if mesh.shape.get(name, 1) > 1)


@runtime_checkable
class HasAxes(Protocol):
    """An object that declares a shape and one logical axis per dimension."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


def spec_for(
    axes: Sequence[str],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, MeshAxes] = DEFAULT_RULES,
) -> Spec:
    """Returns the PartitionSpec of an array: each logical axis becomes mesh axes.

    A dimension stays whole if its size does not divide by its mesh axes, or if earlier dimensions use these mesh axes.
    Mesh axes of size 1 and trailing whole dimensions are left out, which is the form in which XLA reports shardings.

    Args:
      axes: logical axes, one per dimension.
      shape: shape of the array.
      mesh: mesh with the axes of `podrl.mesh.build.make_mesh`.
      rules: mesh axes of each logical axis.

    Raises:
      ValueError: a logical axis has no rule, or the number of axes is not the number of dimensions.
    """
    if len(axes) != len(shape):
        raise ValueError(f"Logical axes {tuple(axes)} do not fit shape {tuple(shape)}: give one axis per dimension.")
    taken: set[str] = set()
    entries: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis not in rules:
            raise ValueError(f"Logical axis {axis!r} has no rule: known axes are {', '.join(sorted(rules))}.")
        names = tuple(name for name in rules[axis] if mesh.shape.get(name, 1) > 1 and name not in taken)
        parts = 1
        for name in names:
            parts *= mesh.shape[name]
        if not names or size % parts:
            entries.append(None)
            continue
        taken |= set(names)
        entries.append(names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return Spec(*entries)


def sharding_for(
    axes: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: Mapping[str, MeshAxes] = DEFAULT_RULES
) -> NamedSharding:
    """Returns the sharding of an array on a mesh of devices; arguments and errors are those of `spec_for`."""
    return NamedSharding(mesh, spec_for(axes, shape, mesh, rules))


def shardings(tree: PyTree, mesh: Mesh, rules: Mapping[str, MeshAxes] = DEFAULT_RULES) -> PyTree:
    """Returns shardings for a tree whose leaves declare `shape` and `axes`."""
    return jax.tree.map(
        lambda leaf: sharding_for(leaf.axes, leaf.shape, mesh, rules), tree, is_leaf=lambda x: isinstance(x, HasAxes)
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding with which every device holds the whole array."""
    return NamedSharding(mesh, Spec())


def constrain(x: Array, axes: Sequence[str], mesh: Mesh | None, rules: Mapping[str, MeshAxes] = DEFAULT_RULES) -> Array:
    """Constrains an activation to its sharding inside jit; returns it unchanged without a mesh, or on one device."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding_for(axes, x.shape, mesh, rules))
