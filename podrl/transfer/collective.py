"""The transport for several processes of one jax.distributed cluster: sends boxes by collectives over both meshes.

All processes of both meshes move the same plan in the same order. The transport also runs in one process that has two
disjoint meshes.

A link is a pair of a source device and a target device. For each bucket, one program on the source mesh packs the boxes
that each device sends into messages, one message for each different set of links. One collective-permute then moves
each message, and one program on the target mesh joins the boxes into shards. Even a small collective takes about a
millisecond over TCP, so leaves with equal links share a message.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int, UInt32

from podrl.transfer.boxes import blank_program
from podrl.transfer.messages import UNION, BucketPrograms, Crossing, Rounds, Tables, arrival, bucket_programs
from podrl.transfer.move import Move, drive
from podrl.transfer.plan import PlacedLeaf, TransferPlan, make_plan
from podrl.types import PyTree

FLAT_BYTES = 1 << 20


class CollectiveTransport:
    """Moves leaves by collectives over the union of two disjoint meshes.

    Attributes:
      plan: plan of the move from the source mesh to the shardings in which leaves arrive on the target mesh.
      source, target: the meshes.
      union: all devices in one row, source first.
      programs: the programs of every bucket, in order.
      crossing_bytes: bytes that cross in one move.
    """

    in_flight = 2
    overwrites = False

    def __init__(
        self,
        plan: TransferPlan,
        sources: Sequence[NamedSharding],
        targets: Sequence[NamedSharding],
        *,
        flat_bytes: int = FLAT_BYTES,
    ):
        """Assigns boxes to rounds (`podrl.transfer.messages.Rounds`); programs compile at the first move.

        Args:
          plan: plan made from `sources` and `targets`.
          sources: sharding of each leaf before the move, all on one mesh.
          targets: sharding of each leaf after the move, all on one mesh that shares no device with the source mesh.
          flat_bytes: bound in bytes. Boxes of one shape that cross the same links share a message with boxes of other
            shapes if they have fewer bytes in sum.

        Raises:
          ValueError: the meshes share devices.
        """
        self.plan = plan
        if not plan.leaves:
            return
        self.source, self.target = cast(Mesh, sources[0].mesh), cast(Mesh, targets[0].mesh)
        before, after = list(self.source.devices.flat), list(self.target.devices.flat)
        if shared := {d.id for d in before} & {d.id for d in after}:
            raise ValueError(
                f"The collective transport needs disjoint meshes, but devices {sorted(shared)} are in both: give the "
                "roles separate hosts, or all the same devices."
            )
        self.union = Mesh(np.array([*before, *after], dtype=object), (UNION,))
        arrivals = [
            arrival(leaf.shape, leaf.target_dtype.itemsize, source, target)
            for leaf, source, target in zip(plan.leaves, sources, targets, strict=True)
        ]
        placed = [
            PlacedLeaf(leaf.shape, leaf.target_dtype, source) for leaf, source in zip(plan.leaves, sources, strict=True)
        ]
        # Each device stages a bucket twice while the bucket crosses.
        bucket_bytes = max(1, plan.bucket_bytes // 2)
        self.plan = make_plan(placed, arrivals, bucket_bytes=bucket_bytes, paths=[leaf.path for leaf in plan.leaves])
        self._leaves = [
            Crossing(leaf, plan.leaves[i].source_dtype, sources[i], arrivals[i], targets[i], Rounds.of(leaf))
            for i, leaf in enumerate(self.plan.leaves)
        ]
        by_key: dict[object, BucketPrograms] = {}
        self.programs: list[BucketPrograms] = []
        for bucket in self.plan.buckets:
            leaves, in_parts = [self._leaves[i] for i in bucket.leaves], bucket.parts > 1
            key = tuple(leaf.key for leaf in leaves), in_parts
            if key not in by_key:
                by_key[key] = bucket_programs(leaves, self.union, in_parts=in_parts, flat_bytes=flat_bytes)
            self.programs.append(by_key[key])
        self._by_bucket = {b.leaves: programs for b, programs in zip(self.plan.buckets, self.programs, strict=True)}
        self._receives = any(d.process_index == jax.process_index() for d in after)
        self._kept: dict[object, Any] = {}

    @property
    def crossing_bytes(self) -> int:
        """Returns the bytes that cross between the meshes in a move of all weights."""
        return sum(
            bucket.parts * message.crossing_bytes
            for bucket, programs in zip(self.plan.buckets, self.programs, strict=True)
            for message in programs.messages
        )

    def arguments(self, number: int) -> dict[str, tuple[PyTree, ...]]:
        """Returns the argument shapes of a bucket's programs 'pack', 'cross' and 'unpack', to compile ahead of time."""
        bucket, programs = self.plan.buckets[number], self.programs[number]

        def common(mesh: Mesh, tables: Tables) -> list[jax.ShapeDtypeStruct]:
            start, rows = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(mesh.axis_names))
            return [
                jax.ShapeDtypeStruct((), np.int32, sharding=start),
                jax.ShapeDtypeStruct(tables.table_WC.shape, np.int32, sharding=rows),
            ]

        leaves = [self._leaves[i] for i in bucket.leaves]
        inputs = [jax.ShapeDtypeStruct(x.leaf.shape, x.dtype, sharding=x.source) for x in leaves]
        so_far = [jax.ShapeDtypeStruct(x.leaf.shape, x.leaf.target_dtype, sharding=x.arrival) for x in leaves]
        place = NamedSharding(self.target, Spec(self.target.axis_names))
        arrived = [message.buffer(place) for message in programs.messages]
        return {
            "pack": (*common(self.source, programs.slots), inputs),
            "cross": (list(programs.buffers),),
            "unpack": (*common(self.target, programs.rounds), arrived, so_far if bucket.parts > 1 else []),
        }

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> Sequence[Array]:
        """Queues packing, crossing and unpacking; returns arrays that are ready when the bucket is no longer staged."""
        programs, leaf = self._by_bucket[chosen], self._leaves[chosen[0]]
        at = 0 if part is None else leaf.leaf.part_start(part)
        shards: list[list[Array]] = [[] for _ in programs.messages]
        if move.leaves is not None:
            leaves = [move.leaves[i] for i in chosen]
            packed = programs.pack(self._start(self.source, at), self._table(self.source, programs.slots), leaves)
            for pieces, array in zip(shards, packed, strict=True):
                pieces += [s.data for s in array.addressable_shards]
            del packed
        if self._receives:
            # Empty buffers in which messages arrive; the next bucket often has the same programs and can reuse them.
            if programs not in move.kept:
                move.kept.clear()
                move.kept[programs] = programs.blank()
            for pieces, array in zip(shards, move.kept[programs], strict=True):
                pieces += [s.data for s in array.addressable_shards]
        arrays = [
            jax.make_array_from_single_device_arrays(buffer.shape, buffer.sharding, pieces, dtype=buffer.dtype)
            for buffer, pieces in zip(programs.buffers, shards, strict=True)
        ]
        del shards
        arrays = programs.cross(arrays)
        if not self._receives:
            return arrays
        arrived = [self._arrived(array) for array in arrays]
        del arrays
        so_far = []
        if part is not None:
            so_far = [move.out[chosen[0]] if part else blank_program(self.target, leaf.join, leaf.leaf.shape)()]
        start, table = self._start(self.target, at), self._table(self.target, programs.rounds)
        done, token = programs.unpack(start, table, arrived, so_far)
        if part == leaf.leaf.parts - 1 and part is not None:
            done = [self._spread(leaf, done[0])]
        move.put(chosen, done)
        return [token]

    def land(self, move: Move, sent: Sequence[Array]) -> None:
        jax.block_until_ready(sent)

    def _arrived(self, array: Array) -> Array:
        """Returns the target mesh's part of a message as an array on that mesh."""
        devices = set(self.target.devices.flat)
        shards = [s.data for s in array.addressable_shards if s.device in devices]
        place = NamedSharding(self.target, Spec(self.target.axis_names))
        shape = (array.shape[0] // self.union.size * self.target.size, *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, place, shards, dtype=array.dtype)

    def _spread(self, leaf: Crossing, array: Array) -> Array:
        """Spreads a leaf that arrived in parts to its target sharding, by a gather inside the target mesh."""
        if leaf.arrival == leaf.target:
            return array
        if leaf not in self._kept:
            self._kept[leaf] = jax.jit(lambda x: x, out_shardings=leaf.target)
        return self._kept[leaf](array)

    def _table(self, mesh: Mesh, tables: Tables) -> Array:
        """Returns a table as an array, a row per device; keeps the array, so later moves need no host transfer."""
        if (mesh, tables) not in self._kept:
            place = NamedSharding(mesh, Spec(mesh.axis_names))
            rows_WC = tables.table_WC
            self._kept[mesh, tables] = jax.make_array_from_callback(rows_WC.shape, place, lambda index: rows_WC[index])
        return self._kept[mesh, tables]

    def _start(self, mesh: Mesh, at: int) -> Array:
        """Returns the start of a part as an array on every device of a mesh; makes each such array once."""
        if (mesh, at) not in self._kept:
            place = NamedSharding(mesh, Spec())
            self._kept[mesh, at] = jax.make_array_from_callback((), place, lambda _: np.int32(at))
        return self._kept[mesh, at]


class ReceiptChannel:
    """Sends the checksums and the version of published weights from the source mesh to the target mesh."""

    def __init__(self, num_leaves: int, source: Mesh, target: Mesh):
        """Plans the transfer of a version and of `num_leaves` checksums per source device, between disjoint meshes."""
        self._source = NamedSharding(source, Spec())
        place = NamedSharding(target, Spec())
        receipt = [
            PlacedLeaf((source.size, num_leaves), jnp.dtype(jnp.uint32), self._source),
            PlacedLeaf((), jnp.dtype(jnp.int32), self._source),
        ]
        plan = make_plan(receipt, [place, place])
        self._transport = CollectiveTransport(plan, [self._source] * 2, [place] * 2)

    def send(self, sums_Wl: UInt32[Array, "W l"] | None, version: int) -> tuple[UInt32[Array, "W l"], Int[Array, ""]]:
        """Sends the checksums and the version from the source mesh; all processes of both meshes call it.

        Args:
          sums_Wl: checksums of l leaves on W source devices, replicated over the source mesh; None on a process outside
            the source mesh.
          version: version of the weights; ignored on a process outside the source mesh.

        Returns:
          The received checksums and version; on a process that only sends, its own checksums and version.
        """
        sent = None
        if sums_Wl is not None:
            # jax.device_put onto the mesh would compare the value on all processes, but receivers do not run this line.
            mesh = cast(Mesh, self._source.mesh)
            here = [jax.device_put(np.int32(version), d) for d in mesh.local_devices]
            sent = [sums_Wl, jax.make_array_from_single_device_arrays((), self._source, here)]
        received = drive(self._transport, sent)
        if received[0] is None:
            assert sent is not None, "a process of neither mesh has no part in publishing"
            received = sent
        return received[0], received[1]
