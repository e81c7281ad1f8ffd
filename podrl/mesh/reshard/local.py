"""The transport for one process that sees both meshes: device-to-device copies of boxes, never a host array.

Per bucket: one program on the source mesh casts and cuts every shard into boxes, one batched `device_put` sends each
box over its link, one program on the target mesh puts the shards together. Boxes travel as they are: on CPU, packing
them into one flat buffer per link was measured 4 to 10 times slower than the copies it saves.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh.reshard.plan import LeafPlan, Plan
from podrl.mesh.reshard.programs import Boxes, blank_program, cut_program, give_up, join_program, lifted, write_program

IN_FLIGHT = 2


class LocalTransport:
    """Carries out a plan inside one process; see `move`."""

    def __init__(self, plan: Plan, sources: Sequence[Any], targets: Sequence[Any]):
        """Prepares the wiring; programs compile at the first move.

        Args:
          plan: made from the same shardings.
          sources: sharding of each leaf before, in the plan's order.
          targets: sharding of each leaf after.
        """
        self._plan = plan
        self._sources = [named(s) for s in sources]
        self._targets = [named(t) for t in targets]
        self._wires = [_Wire(leaf, t) for leaf, t in zip(plan.leaves, self._targets, strict=True)]
        self._starts: dict[Any, Array] = {}

    def move(
        self, leaves: Sequence[Array], *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array]:
        """The leaves on their target shardings, in the target dtypes.

        Args:
          leaves, donate, replacing: as in `Transport.move`.

        Returns:
          New arrays, possibly still being written; at most two buckets are staged at any time.
        """
        out: list[Any] = [None] * len(leaves)
        flying: deque[list[Array]] = deque()
        for bucket in self._plan.buckets:
            give_up(replacing, bucket.leaves)
            for part in range(bucket.parts):
                if len(flying) == IN_FLIGHT:
                    jax.block_until_ready(flying.popleft())
                done = self._move_bucket(leaves, bucket.leaves, part if bucket.parts > 1 else None, out)
                flying.append(done)
            give_up(leaves if donate else None, bucket.leaves)
        return out

    def _move_bucket(
        self, leaves: Sequence[Array], indices: Sequence[int], part: int | None, out: list[Any]
    ) -> list[Array]:
        """Moves one bucket into `out`; returns arrays that are ready when nothing of it is staged any more."""
        boxes = self._cut(leaves, indices, part)
        pieces: list[Array] = []
        devices: list[Any] = []
        for i in indices:
            wire = self._wires[i]
            shards = [{s.device.id: s.data for s in box.addressable_shards} for box in boxes[i]]
            pieces += [shards[slot][device] for slot, device in wire.reads]
            devices += wire.devices
        moved = jax.device_put(pieces, devices) if pieces else []
        return self._join(indices, moved, part, out)

    def _cut(self, leaves: Sequence[Array], indices: Sequence[int], part: int | None) -> dict[int, Sequence[Array]]:
        """For each leaf its slots, each an array with one box per device of the source mesh."""
        boxes: dict[int, Sequence[Array]] = {}
        groups: dict[Mesh, list[int]] = {}
        for i in indices:
            if part is None and self._wires[i].whole_source:
                boxes[i] = (leaves[i],)
            else:
                groups.setdefault(cast(Mesh, self._sources[i].mesh), []).append(i)
        for mesh, members in groups.items():
            forms = tuple(self._form(i, self._sources[i], self._plan.leaves[i].source_slots) for i in members)
            start = None if part is None else self._start(mesh, members[0], part)
            cut = cut_program(mesh, forms)(start, [leaves[i] for i in members])
            boxes.update(zip(members, cut, strict=True))
        return boxes

    def _join(self, indices: Sequence[int], moved: Sequence[Array], part: int | None, out: list[Any]) -> list[Array]:
        """Puts boxes together into shards of the target arrays."""
        groups: dict[Mesh, list[tuple[int, Sequence[Array]]]] = {}
        taken = 0
        for i in indices:
            leaf, target, wire = self._plan.leaves[i], self._targets[i], self._wires[i]
            slots = math.prod(leaf.target_slots)
            mine = moved[taken : taken + len(wire.reads)]
            taken += len(wire.reads)
            if part is None and slots == 1:
                out[i] = jax.make_array_from_single_device_arrays(leaf.shape, target, mine)
                continue
            shape, place = lifted(leaf.part_box, cast(Mesh, target.mesh))
            columns: Sequence[Array] = [
                jax.make_array_from_single_device_arrays(shape, place, mine[m::slots]) for m in range(slots)
            ]
            groups.setdefault(cast(Mesh, target.mesh), []).append((i, columns))
        for mesh, members in groups.items():
            forms = tuple(self._form(i, self._targets[i], self._plan.leaves[i].target_slots) for i, _ in members)
            if part is None:
                joined = join_program(mesh, forms)([columns for _, columns in members])
                for (i, _), array in zip(members, joined, strict=True):
                    out[i] = array
                continue
            ((i, columns),) = members
            if part == 0:
                out[i] = blank_program(mesh, forms[0], self._plan.leaves[i].shape)()
            out[i], token = write_program(mesh, forms[0])(out[i], self._start(mesh, i, part), columns)
            return [token]
        return [out[i] for i in indices]

    def _form(self, i: int, place: NamedSharding, slots: tuple[int, ...]) -> Boxes:
        return Boxes.of(self._plan.leaves[i], slots, place.spec)

    def _start(self, mesh: Mesh, i: int, part: int) -> Array:
        """Where a part begins, on every device of a mesh; made once, so that later moves send nothing from the host."""
        key = (mesh, self._plan.leaves[i].part_start(part))
        if key not in self._starts:
            self._starts[key] = jax.device_put(np.int32(key[1]), NamedSharding(mesh, Spec()))
        return self._starts[key]


class _Wire:
    """Which box of which source device each target device reads.

    Attributes:
      reads: (slot, source device id) for every slot of every target device, slots fastest.
      devices: the target device of each read.
      whole_source: the shards travel as they are, without a program on the source mesh.
    """

    def __init__(self, leaf: LeafPlan, target: NamedSharding):
        sources = [leaf.source.device_ids[w] for w in leaf.source_WM.ravel().tolist()]
        slots = math.prod(leaf.target_slots)
        self.reads = list(zip(leaf.slot_WM.ravel().tolist(), sources, strict=True))
        self.devices = [device for device in cast(Mesh, target.mesh).devices.flat for _ in range(slots)]
        # A read from the same device would hand out the source's own buffer, which its owner may donate later.
        aliases = any(source == device.id for source, device in zip(sources, self.devices, strict=True))
        self.whole_source = math.prod(leaf.source_slots) == 1 and leaf.parts == 1 and not leaf.casts and not aliases


def named(sharding: Any) -> NamedSharding:
    """The sharding itself, or a mesh of one device for an array that lies on one."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return NamedSharding(Mesh(np.array([device]), ("data",)), Spec())
    return sharding
