"""Keeps arrays of a mesh in the host's memory while the mesh's devices do not need them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

_PARTS, _TILE = 64, 16
Stack = Mapping[
    str, Any
]  # parameters of layers of one kind, by name, each stacked over the layers along the first axis
HOST = "pinned_host"  # the kind of the host's memory that devices read and write by themselves


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding that places an array in the same way, but in the host's memory."""
    return sharding.with_memory_kind(HOST)


def tree_on_host(tree: Any, mesh: Mesh, key: str) -> Any:
    """Moves a tree of arrays, or of their shapes with placements, from a mesh's devices to the memory of their hosts.

    Args:
      tree: the arrays or shapes.
      mesh: mesh whose devices hold the arrays.
      key: setting that needs the host's memory, with its value.

    Raises:
      ValueError: the arrays' devices cannot reach the host's memory.
    """
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x: placed(x, on_host(x.sharding)), tree)
    check(mesh, key, "set trainer.offload='none'.")
    return jax.jit(lambda tree: tree, out_shardings=jax.tree.map(lambda x: on_host(x.sharding), tree))(tree)


def base_on_host(frozen: Any, mesh: Mesh, key: str) -> Any:
    """Moves the matrices of the frozen layers under adapters to the memory of the mesh's hosts.

    A program that computes with them copies one layer at a time to the devices (`fetched`). Vectors and the tables of
    embeddings stay on the devices.

    Args:
      frozen: frozen parameters of `podrl.models.parameters.split_trainable`, as arrays or shapes with placements.
      mesh: mesh whose devices hold the arrays.
      key: setting that needs the host's memory, with its value.

    Raises:
      ValueError: the arrays' devices cannot reach the host's memory.
    """
    leaves, structure = jax.tree.flatten(frozen["layers"])
    moves = [x.ndim > 2 and x.sharding.memory_kind != HOST for x in leaves]
    moved = iter(tree_on_host([x for x, move in zip(leaves, moves, strict=True) if move], mesh, key))
    layers = [next(moved) if move else x for x, move in zip(leaves, moves, strict=True)]
    return {**frozen, "layers": structure.unflatten(layers)}


def copier(tree: Any) -> Callable[[Any], Any]:
    """Builds the program that copies trees like `tree` from the host's memory to their devices."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(lambda tree: jax.tree.map(to_devices, tree, shardings))


def placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Describes an array, by its shape and dtype, with another placement."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def on_devices(tree: Any) -> Any:
    """Copies to the devices the arrays of a tree that wait in the host's memory; each process copies its own parts.

    Other arrays are returned as they are. Shapes with placements in the host's memory get placements on the devices.
    """

    def moved(x: Any) -> Any:
        if x.sharding.memory_kind != HOST:
            return x
        sharding = x.sharding.with_memory_kind("device")
        if not isinstance(x, jax.Array):
            return placed(x, sharding)
        parts = [jax.device_put(s.data, SingleDeviceSharding(s.device)) for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts, dtype=x.dtype)

    return jax.tree.map(moved, tree)


def waits(x: Any) -> bool:
    """Returns True if a traced array lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def apart(stacks: Sequence[Stack], *, indexed: bool) -> tuple[list[Stack], list[Stack]]:
    """Splits traced stacks of layers into (leaves that a scan slices by layer, leaves that `fetched_layer` reads).

    Args:
      stacks: the leaves of each kind of layer.
      indexed: True if `fetched_layer` reads the leaves that wait in the host's memory. Scans over repeated patterns of
        layers would reshape these leaves, and compilers for TPUs cannot do that.
    """
    waiting: list[Stack] = [{name: x for name, x in stack.items() if indexed and waits(x)} for stack in stacks]
    both = zip(stacks, waiting, strict=True)
    return [{name: x for name, x in stack.items() if name not in own} for stack, own in both], waiting


def fetched(tree: Any) -> Any:
    """Copies to the devices the leaves of a traced tree that wait in the host's memory; other leaves stay the same."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if waits(x) else x, tree)


def fetched_layer(stacks: Any, layer: jax.Array) -> Any:
    """Copies one layer to the devices, from a traced tree whose leaves wait in the host's memory.

    Compilers for TPUs copy a part of such an array only if nothing but an index into its first axis selects the part.

    Args:
      stacks: arrays of all layers, stacked along the first axis.
      layer: number of the layer in the stacks.
    """
    return fetched(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacks))


def to_devices(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies an array (perhaps traced) to its devices from the host's memory, where `sharding` places it."""
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
    before it have a multiple of _TILE entries. A tile has 8 of these entries in float32, and 16 in bfloat16.

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
      mesh: devices that must reach the host's memory; None for the process's own.
      key: setting that needs the host's memory, with its value.
      instead: last part of the error message, which names the setting to change.

    Raises:
      ValueError: the devices cannot reach the host's memory.
    """
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"{key} needs {HOST} memory, which {device.device_kind} devices do not have ({', '.join(kinds)}): {instead}"
        )
