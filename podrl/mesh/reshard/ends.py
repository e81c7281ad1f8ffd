"""The two ends of a transfer inside one process: its shards cut into boxes, boxes put together into its shards.

Neither end waits for another process: programs run on the process's own devices only, so that they may be called in
any order, at any time, from any one thread.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh.reshard.plan import LeafPlan
from podrl.mesh.reshard.programs import Boxes, blank_program, cut_program, join_program, lifted, write_program

# For every slot of a shard the box of each device, by device id.
Slots = Sequence[Mapping[int, Array]]


class _End:
    def __init__(self, leaves: Sequence[LeafPlan], devices: Sequence[Any]):
        self._leaves = leaves
        self._devices = list(devices)
        self._mesh = Mesh(np.array(self._devices, dtype=object), ("local",))
        self._starts: dict[int, Array] = {}

    def _lift(self, shape: tuple[int, ...], dtype: Any, shards: Mapping[int, Array]) -> Array:
        """One array over the local devices, a shard of `shape` on each."""
        whole, place = lifted(shape, self._mesh)
        pieces = [shards[device.id] for device in self._devices]
        return jax.make_array_from_single_device_arrays(whole, place, pieces, dtype=dtype)

    def _form(self, i: int, slots: tuple[int, ...]) -> Boxes:
        leaf = self._leaves[i]
        return Boxes.of(leaf, slots, lifted(leaf.box, self._mesh)[1].spec)

    def _start(self, i: int, part: int) -> Array:
        at = self._leaves[i].part_start(part)
        if at not in self._starts:
            self._starts[at] = jax.device_put(np.int32(at), NamedSharding(self._mesh, Spec()))
        return self._starts[at]


class Cutter(_End):
    """Cuts this process's shards of the source into boxes; made from the plan's leaves and its devices there."""

    def cut(self, leaves: Sequence[Array], indices: Sequence[int], part: int | None) -> dict[int, Slots]:
        """Boxes of the leaves `indices`, cast; of one part of them where a part is given.

        Args:
          leaves: all leaves of the plan, placed as it says.
        """
        boxes: dict[int, Slots] = {}
        work: list[int] = []
        shards = {i: {s.device.id: s.data for s in leaves[i].addressable_shards} for i in indices}
        for i in indices:
            leaf = self._leaves[i]
            if part is None and math.prod(leaf.source_slots) == 1 and leaves[i].dtype == leaf.target_dtype:
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
    """Puts boxes together into this process's shards of the target; made from the plan's leaves and its devices."""

    def join(self, boxes: Mapping[int, Slots], part: int | None, out: list[Any]) -> None:
        """Writes boxes into `out`, which holds for every leaf the shards of this process in one array, or None."""
        if part is not None:
            ((i, slots),) = boxes.items()
            leaf, form = self._leaves[i], self._form(i, self._leaves[i].target_slots)
            if part == 0:
                shape = self._shard_shape(i)
                out[i] = blank_program(self._mesh, form, lifted(shape, self._mesh)[0])()
            columns = [self._lift(leaf.part_box, leaf.target_dtype, slot) for slot in slots]
            out[i], _ = write_program(self._mesh, form)(out[i], self._start(i, part), columns)
            return
        work = [i for i, slots in boxes.items() if len(slots) > 1]
        for i in boxes.keys() - set(work):
            out[i] = self._lift(self._leaves[i].box, self._leaves[i].target_dtype, boxes[i][0])
        if work:
            forms = tuple(self._form(i, self._leaves[i].target_slots) for i in work)
            columns = [
                [self._lift(self._leaves[i].box, self._leaves[i].target_dtype, s) for s in boxes[i]] for i in work
            ]
            for i, array in zip(work, join_program(self._mesh, forms)(columns), strict=True):
                out[i] = array

    def finish(self, out: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Array]:
        """The global arrays whose local shards `out` holds."""
        return [
            jax.make_array_from_single_device_arrays(
                leaf.shape, sharding, [s.data for s in array.addressable_shards], dtype=leaf.target_dtype
            )
            for leaf, sharding, array in zip(self._leaves, shardings, out, strict=True)
        ]

    def _shard_shape(self, i: int) -> tuple[int, ...]:
        leaf = self._leaves[i]
        return tuple(n * slots for n, slots in zip(leaf.box, leaf.target_slots, strict=True))
