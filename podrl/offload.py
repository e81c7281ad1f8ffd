"""Memory of the host as a place for arrays of a mesh that its devices do not need all the time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

_PARTS, _TILE = 64, 16
HOST = "pinned_host"  # the kind of the host's memory that devices read and write by themselves


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same placement in the host's memory."""
    return sharding.with_memory_kind(HOST)


def tree_on_host(tree: Any, mesh: Mesh, key: str) -> Any:
    """Moves a tree of arrays, or of their shapes with placements, from a mesh's devices to the memory of their hosts.

    Args:
      tree: the arrays or shapes.
      mesh: the devices.
      key: setting that needs the host's memory, with its value.

    Raises:
      ValueError: the arrays' devices cannot reach the host's memory.
    """
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x: placed(x, on_host(x.sharding)), tree)
    check(mesh, key, "set trainer.offload='none'.")
    return jax.jit(lambda tree: tree, out_shardings=jax.tree.map(lambda x: on_host(x.sharding), tree))(tree)


def copier(tree: Any) -> Callable[[Any], Any]:
    """Builds the program that copies a tree like `tree`, which is in the host's memory, to its devices."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(lambda tree: jax.tree.map(to_devices, tree, shardings))


def placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array at another place."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def to_devices(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies an array (perhaps traced) that `sharding` places in the host's memory to its devices."""
    return jax.device_put(x, sharding.with_memory_kind("device"))


@dataclasses.dataclass(frozen=True)
class Cut:
    """Equal parts of an array along one axis.

    Attributes:
      parts: number of the parts.
      axis: axis that is cut.
    """

    parts: int
    axis: int = 0

    def read(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Slices part number `part` (traced) from an array."""
        size = x.shape[self.axis] // self.parts
        return jax.lax.dynamic_slice_in_dim(x, part * size, size, self.axis)

    def write(self, x: jax.Array, new: jax.Array, part: jax.Array) -> jax.Array:
        """Replaces part number `part` (traced) of an array."""
        size = x.shape[self.axis] // self.parts
        return jax.lax.dynamic_update_slice_in_dim(x, new, part * size, self.axis)


def cut(shape: Sequence[int], sharding: NamedSharding) -> Cut | None:
    """Cuts an array into at most _PARTS equal parts along an axis that lies whole on each device.

    TPUs read and write parts of the host's memory in whole tiles: the last axis stays whole, and parts of the axis
    before it have a multiple of _TILE entries (8 float32 or 16 bfloat16 values).

    Args:
      shape: shape of the array.
      sharding: placement of the array.

    Returns:
      The cut with the most parts; None if there is none, as for vectors.
    """
    split = (*sharding.spec, *[None] * len(shape))
    found = Cut(1)
    for axis, size in enumerate(shape[:-1]):
        step = _TILE if axis == len(shape) - 2 else 1
        parts = [n for n in range(1, _PARTS + 1) if size % (n * step) == 0]
        if split[axis] is None and parts and parts[-1] > found.parts:
            found = Cut(parts[-1], axis)
    return found if found.parts > 1 else None


def check(mesh: Mesh | None, key: str, instead: str) -> None:
    """Refuses devices that cannot reach the host's memory.

    Args:
      mesh: devices that must reach it; None for the process's own.
      key: setting that needs it, with its value.
      instead: end of the message that names the key to turn.

    Raises:
      ValueError: the devices cannot.
    """
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"{key} needs {HOST} memory, which {device.device_kind} devices do not have ({', '.join(kinds)}): {instead}"
        )
