"""The compiled steps at both ends of a transfer: cut shards into boxes, put boxes together into shards.

Every program runs on all devices of one mesh without communication, and depends only on shapes and the mesh, so equal
buckets share one. Parts of a large leaf share one too: where the part starts is an argument.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int

from podrl.mesh.reshard.plan import LeafPlan

Columns = Sequence[Array]


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A shard seen as a grid of equal boxes.

    Attributes:
      spec: how the leaf lies on the mesh.
      slots: boxes along each dimension of a shard.
      box: shape of a box.
      dtype: dtype of the boxes.
      part_axis: the dimension along which boxes travel in parts.
      part_size: extent of a part along it; 0 where boxes travel whole.
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
        """Where each box begins inside the shard, row-major."""
        for index in itertools.product(*map(range, self.slots)):
            yield tuple(i * n for i, n in zip(index, self.box, strict=True))

    @property
    def travelling(self) -> tuple[int, ...]:
        """Shape of what travels: a box, or a part of one."""
        if not self.part_size:
            return self.box
        return (*self.box[: self.part_axis], self.part_size, *self.box[self.part_axis + 1 :])


def give_up(arrays: Sequence[Array] | None, indices: Sequence[int]) -> None:
    """Frees the memory of some of the arrays, where there are any, once the programs that read them have."""
    if arrays is not None:
        for i in indices:
            arrays[i].delete()


def lifted(shape: tuple[int, ...], mesh: Mesh) -> tuple[tuple[int, ...], NamedSharding]:
    """Global shape and sharding of the array that holds one box of `shape` on every device of `mesh`."""
    if not shape:
        return (), NamedSharding(mesh, Spec())
    return (shape[0] * mesh.size, *shape[1:]), NamedSharding(mesh, _every_device(shape, mesh))


@functools.lru_cache(maxsize=1024)
def cut_program(mesh: Mesh, boxes: tuple[Boxes, ...]) -> Callable[[Any, Sequence[Array]], Sequence[Columns]]:
    """(start, leaves) -> for each leaf its slots, cast, each lifted to one box per device.

    `start` is where the part begins along the part axis: an int32 scalar on the mesh, or None for whole boxes.
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
    """For each leaf its slots, lifted -> the leaf on the mesh."""

    def join(columns: Sequence[Columns]) -> list[Array]:
        return [joined(pieces, form.slots) for pieces, form in zip(columns, boxes, strict=True)]

    specs_in = ([[_every_device(form.box, mesh)] * math.prod(form.slots) for form in boxes],)
    return _on_all_devices(join, mesh, specs_in, [form.spec for form in boxes])


@functools.lru_cache(maxsize=1024)
def write_program(mesh: Mesh, form: Boxes) -> Callable[[Array, Int[Array, ""], Columns], tuple[Array, Array]]:
    """(leaf, start, parts of its slots) -> the leaf with those parts written, and a token; the leaf is donated.

    The token is ready when the leaf is, and can still be waited for after the leaf has been donated to the next part.
    """

    def write(shard: Array, start: Int[Array, ""], pieces: Columns) -> tuple[Array, Array]:
        return overwrite(shard, pieces, form, start), start + 1

    specs_in = (form.spec, Spec(), [_every_device(form.box, mesh)] * math.prod(form.slots))
    return _on_all_devices(write, mesh, specs_in, (form.spec, Spec()), donate=(0,))


@functools.lru_cache(maxsize=1024)
def blank_program(mesh: Mesh, form: Boxes, shape: tuple[int, ...]) -> Callable[[], Array]:
    """() -> a leaf of zeros to write parts into."""
    return jax.jit(lambda: jnp.zeros(shape, form.dtype), out_shardings=NamedSharding(mesh, form.spec))


def _on_all_devices(body: Any, mesh: Mesh, specs_in: Any, specs_out: Any, donate: tuple[int, ...] = ()) -> Any:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs_out, is_leaf=lambda x: isinstance(x, Spec))
    return jax.jit(mapped, out_shardings=places, donate_argnums=donate)


def _every_device(shape: tuple[int, ...], mesh: Mesh) -> Spec:
    return Spec(mesh.axis_names) if shape else Spec()


def cut_at(shard: Array, slot: Any, form: Boxes, start: Int[Array, ""] | None) -> Array:
    """The box in a slot of a shard; the slot is a number, or a traced one."""
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
    """The shard with one part of each of its boxes written."""
    for piece, corner in zip(pieces, form.corners(), strict=True):
        shard = jax.lax.dynamic_update_slice(shard, piece, _shifted(corner, form, start))
    return shard


def _shifted(corner: tuple[int, ...], form: Boxes, start: Int[Array, ""]) -> list[Any]:
    return [start + at if d == form.part_axis else at for d, at in enumerate(corner)]


def _slice(shard: Array, corner: tuple[int, ...], form: Boxes, start: Int[Array, ""] | None) -> Array:
    if start is not None:
        return jax.lax.dynamic_slice(shard, _shifted(corner, form, start), form.travelling)
    return jax.lax.slice(shard, corner, [at + n for at, n in zip(corner, form.box, strict=True)])


def joined(pieces: Sequence[Array], slots: tuple[int, ...]) -> Array:
    """Concatenates row-major pieces along every dimension, the last one first."""
    for d in reversed(range(len(slots))):
        count = slots[d]
        if count > 1:
            pieces = [jnp.concatenate(pieces[k : k + count], axis=d) for k in range(0, len(pieces), count)]
    (whole,) = pieces
    return whole
