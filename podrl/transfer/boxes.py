"""Cuts shards into the boxes of a plan, and joins boxes into shards, by compiled programs.

A box is a part of an array that lies in one source shard and goes to one place, its slot, of a target shard
(podrl.transfer.plan). Every program runs on all devices of one mesh without communication. A program depends only on
shapes and the mesh, so equal buckets share a program. The parts of a large leaf share a program, too, because the start
of a part is an argument.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from podrl.transfer.plan import LeafPlan
from podrl.types import JaxDevice, PyTree

Columns = Sequence[Array]
# One entry per slot of a shard: each device's box for this slot, by device id.
Slots = Sequence[Mapping[int, Array]]


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A shard seen as a grid of equal boxes.

    Attributes:
      spec: partition spec of the leaf on the mesh.
      slots: number of boxes along each dimension of a shard.
      box: shape of a box.
      dtype: dtype of the boxes.
      part_axis: dimension along which boxes are split into parts.
      part_size: extent of a part along `part_axis`; 0 if boxes travel whole.
    """

    spec: Spec
    slots: tuple[int, ...]
    box: tuple[int, ...]
    dtype: np.dtype
    part_axis: int
    part_size: int

    @classmethod
    def of(cls, leaf: LeafPlan, slots: tuple[int, ...], spec: Spec) -> "Boxes":
        return cls(spec, slots, leaf.box, leaf.target_dtype, leaf.part_axis, leaf.part_size if leaf.parts > 1 else 0)

    def corners(self) -> Iterator[tuple[int, ...]]:
        """Yields the start of each box inside the shard, one index per dimension; boxes in row-major order."""
        for index in itertools.product(*map(range, self.slots)):
            yield tuple(i * n for i, n in zip(index, self.box, strict=True))

    @property
    def travelling(self) -> tuple[int, ...]:
        """Returns the shape of the array that is sent for a slot: a box, or a part of a box."""
        if not self.part_size:
            return self.box
        return (*self.box[: self.part_axis], self.part_size, *self.box[self.part_axis + 1 :])


def lifted(shape: tuple[int, ...], mesh: Mesh) -> tuple[tuple[int, ...], NamedSharding]:
    """Returns (global shape, sharding) of an array with one box of `shape` on every device of `mesh`."""
    if not shape:
        return (), NamedSharding(mesh, Spec())
    return (shape[0] * mesh.size, *shape[1:]), NamedSharding(mesh, _every_device(shape, mesh))


@functools.lru_cache(maxsize=1024)
def cut_program(mesh: Mesh, boxes: tuple[Boxes, ...]) -> Callable[[Array | None, Sequence[Array]], Sequence[Columns]]:
    """Returns a jitted program that cuts and casts leaves: (start, leaves) -> per leaf, one array of boxes per slot.

    Each array has one box on every device. `start` is the index at which the part begins along the part axis: an int32
    scalar on the mesh, or None for whole boxes.
    """

    def cut(start: Int[Array, ""] | None, shards: Sequence[Array]) -> list[list[Array]]:
        out = []
        for shard, form in zip(shards, boxes, strict=True):
            pieces = [_slice(shard, corner, form, start).astype(form.dtype) for corner in form.corners()]
            out.append(pieces)
        return out

    specs_out = [[_every_device(form.box, mesh)] * math.prod(form.slots) for form in boxes]
    return _on_all_devices(cut, mesh, (Spec(), [form.spec for form in boxes]), specs_out)


@functools.lru_cache(maxsize=1024)
def join_program(mesh: Mesh, boxes: tuple[Boxes, ...]) -> Callable[[Sequence[Columns]], Sequence[Array]]:
    """Returns a jitted program that joins boxes into leaves: per leaf, one array per slot -> the leaves on the mesh."""

    def join(columns: Sequence[Columns]) -> list[Array]:
        return [joined(pieces, form.slots) for pieces, form in zip(columns, boxes, strict=True)]

    specs_in = ([[_every_device(form.box, mesh)] * math.prod(form.slots) for form in boxes],)
    return _on_all_devices(join, mesh, specs_in, [form.spec for form in boxes])


@functools.lru_cache(maxsize=1024)
def write_program(mesh: Mesh, form: Boxes) -> Callable[[Array, Int[Array, ""], Columns], tuple[Array, Array]]:
    """Returns a jitted program that writes one part of every box into a leaf: (leaf, start, pieces) -> (leaf, token).

    The leaf is donated. The token is ready when the result is ready. A caller can wait for the token even after the
    result has been donated to the write of the next part.
    """

    def write(shard: Array, start: Int[Array, ""], pieces: Columns) -> tuple[Array, Array]:
        return overwrite(shard, pieces, form, start), start + 1

    specs_in = (form.spec, Spec(), [_every_device(form.box, mesh)] * math.prod(form.slots))
    return _on_all_devices(write, mesh, specs_in, (form.spec, Spec()), donate=(0,))


@functools.lru_cache(maxsize=1024)
def blank_program(mesh: Mesh, form: Boxes, shape: tuple[int, ...]) -> Callable[[], Array]:
    """Returns a jitted program without arguments that makes a leaf of zeros, into which parts are written."""
    return jax.jit(lambda: jnp.zeros(shape, form.dtype), out_shardings=NamedSharding(mesh, form.spec))


def _on_all_devices(
    body: Callable[..., PyTree], mesh: Mesh, specs_in: PyTree, specs_out: PyTree, donate: tuple[int, ...] = ()
) -> Callable[..., PyTree]:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs_out, is_leaf=lambda x: isinstance(x, Spec))
    return jax.jit(mapped, out_shardings=places, donate_argnums=donate)


def _every_device(shape: tuple[int, ...], mesh: Mesh) -> Spec:
    return Spec(mesh.axis_names) if shape else Spec()


def cut_at(shard: Array, slot: int | Array, form: Boxes, start: Int[Array, ""] | None) -> Array:
    """Cuts the box of one slot from a shard; `slot` is a Python integer or a traced integer."""
    corner: list[Any] = []
    for n, size in zip(reversed(form.slots), reversed(form.box), strict=True):
        corner.insert(0, slot % n * size)
        slot = slot // n
    if start is None and all(isinstance(at, int) for at in corner):
        return _slice(shard, tuple(corner), form, None)
    if start is not None:
        corner[form.part_axis] += start
    return jax.lax.dynamic_slice(shard, [jnp.asarray(at, jnp.int32) for at in corner], form.travelling)


def overwrite(shard: Array, pieces: Sequence[Array], form: Boxes, start: Int[Array, ""]) -> Array:
    """Writes one part of every box into a shard; `start` is the index along the part axis at which the part begins."""
    for piece, corner in zip(pieces, form.corners(), strict=True):
        shard = jax.lax.dynamic_update_slice(shard, piece, _shifted(corner, form, start))
    return shard


def _shifted(corner: tuple[int, ...], form: Boxes, start: Int[Array, ""]) -> list[int | Array]:
    return [start + at if d == form.part_axis else at for d, at in enumerate(corner)]


def _slice(shard: Array, corner: tuple[int, ...], form: Boxes, start: Int[Array, ""] | None) -> Array:
    if start is not None:
        return jax.lax.dynamic_slice(shard, _shifted(corner, form, start), form.travelling)
    return jax.lax.slice(shard, corner, [at + n for at, n in zip(corner, form.box, strict=True)])


def joined(pieces: Sequence[Array], slots: tuple[int, ...]) -> Array:
    """Concatenates boxes, in row-major order of their slots, along every dimension; the last dimension first."""
    for d in reversed(range(len(slots))):
        count = slots[d]
        if count > 1:
            pieces = [jnp.concatenate(pieces[k : k + count], axis=d) for k in range(0, len(pieces), count)]
    (whole,) = pieces
    return whole


def cut_as(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which values are cut and joined: unsigned words for floats narrower than 4 bytes.

    XLA for CPU would convert such floats to float32 and back.
    """
    narrow = jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4
    return np.dtype(f"u{dtype.itemsize}") if narrow else dtype


class _End:
    """This process's devices at one end of a transfer, as a mesh of their own.

    A program over that mesh does not wait for other processes.
    """

    def __init__(self, leaves: Sequence[LeafPlan], devices: Sequence[JaxDevice]):
        self._leaves = leaves
        self._devices = list(devices)
        self._mesh = Mesh(np.array(self._devices, dtype=object), ("local",))
        self._starts: dict[int, Array] = {}

    def _lift(self, shape: tuple[int, ...], dtype: DTypeLike, shards: Mapping[int, Array]) -> Array:
        """Makes one array over the local devices from one shard of `shape` per device."""
        whole, place = lifted(shape, self._mesh)
        pieces = [shards[device.id] for device in self._devices]
        return jax.make_array_from_single_device_arrays(whole, place, pieces, dtype=dtype)

    def _form(self, i: int, slots: tuple[int, ...]) -> Boxes:
        leaf = self._leaves[i]
        return Boxes.of(leaf, slots, lifted(leaf.box, self._mesh)[1].spec)

    def _start(self, i: int, part: int) -> Array:
        """Returns a part's start as an array on every device; keeps the array, so later moves need no host transfer."""
        at = self._leaves[i].part_start(part)
        if at not in self._starts:
            self._starts[at] = jax.device_put(np.int32(at), NamedSharding(self._mesh, Spec()))
        return self._starts[at]


class Cutter(_End):
    """Cuts the shards of this process's source devices into boxes."""

    def __init__(self, leaves: Sequence[LeafPlan], devices: Sequence[JaxDevice], *, copies: bool = False):
        """Stores the leaves' plans and the devices; programs compile at the first cut.

        Args:
          leaves: plans of the leaves.
          devices: this process's devices of the source mesh, in the mesh's order.
          copies: True if boxes must never share memory with the leaves that they are cut from.
        """
        super().__init__(leaves, devices)
        self._copies = copies

    def cut(
        self, leaves: Sequence[Array] | Mapping[int, Array], chosen: Sequence[int], part: int | None
    ) -> dict[int, Slots]:
        """Cuts the shards of some leaves into boxes of the target dtype.

        Args:
          leaves: leaves of the plan by their position, placed as the plan says; only chosen leaves are read.
          chosen: positions of the leaves to cut.
          part: number of the part to cut from every box; None for whole boxes.

        Returns:
          The boxes of each chosen leaf, by its position.
        """
        boxes: dict[int, Slots] = {}
        work: list[int] = []
        shards = {i: {s.device.id: s.data for s in leaves[i].addressable_shards} for i in chosen}
        for i in chosen:
            leaf = self._leaves[i]
            whole = part is None and math.prod(leaf.source_slots) == 1 and leaves[i].dtype == leaf.target_dtype
            if whole and not self._copies:
                boxes[i] = [shards[i]]
            else:
                work.append(i)
        if work:
            forms = tuple(self._form(i, self._leaves[i].source_slots) for i in work)
            start = None if part is None else self._start(work[0], part)
            lift = [self._lift(next(iter(shards[i].values())).shape, leaves[i].dtype, shards[i]) for i in work]
            for i, slots in zip(work, cut_program(self._mesh, forms)(start, lift), strict=True):
                boxes[i] = [{s.device.id: s.data for s in slot.addressable_shards} for slot in slots]
        return boxes


class Joiner(_End):
    """Joins boxes into the shards of this process's target devices."""

    def __init__(self, leaves: Sequence[LeafPlan], devices: Sequence[JaxDevice], shardings: Sequence[NamedSharding]):
        """Stores the leaves' plans and the devices; programs compile at the first join.

        Args:
          leaves: plans of the leaves.
          devices: this process's devices of the target mesh, in the mesh's order.
          shardings: sharding of each leaf on the target mesh.
        """
        super().__init__(leaves, devices)
        self._shardings = shardings

    def join(self, boxes: Mapping[int, Slots], part: int | None, out: list[Any]) -> list[Array]:
        """Joins boxes into leaves and stores the leaves in `out`.

        A leaf that arrives in parts is complete after its last part; until then `out` holds an array of its local
        shards.

        Args:
          boxes: the arrived boxes of each leaf, by the leaf's position in the plan; one leaf if `part` is not None.
          part: number of the part that arrived of every box; None for whole boxes.
          out: target arrays by the leaf's position.

        Returns:
          Arrays that are ready when the leaves are.
        """
        if part is not None:
            ((i, slots),) = boxes.items()
            leaf, form = self._leaves[i], self._form(i, self._leaves[i].target_slots)
            if part == 0:
                shape = tuple(n * count for n, count in zip(leaf.box, leaf.target_slots, strict=True))
                out[i] = blank_program(self._mesh, form, lifted(shape, self._mesh)[0])()
            columns = [self._lift(leaf.part_box, leaf.target_dtype, slot) for slot in slots]
            out[i], token = write_program(self._mesh, form)(out[i], self._start(i, part), columns)
            if part == leaf.parts - 1:
                out[i] = self._leaf(i, [s.data for s in out[i].addressable_shards])
            return [token]
        work = [i for i, slots in boxes.items() if len(slots) > 1]
        for i in boxes.keys() - set(work):
            out[i] = self._leaf(i, [boxes[i][0][device.id] for device in self._devices])
        if work:
            forms = tuple(self._form(i, self._leaves[i].target_slots) for i in work)
            columns = [
                [self._lift(self._leaves[i].box, self._leaves[i].target_dtype, slot) for slot in boxes[i]] for i in work
            ]
            for i, array in zip(work, join_program(self._mesh, forms)(columns), strict=True):
                out[i] = self._leaf(i, [s.data for s in array.addressable_shards])
        return [out[i] for i in boxes]

    def _leaf(self, i: int, shards: Sequence[Array]) -> Array:
        """Builds the global array of leaf `i` from this process's shards."""
        leaf = self._leaves[i]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._shardings[i], shards, dtype=leaf.target_dtype)
