"""The transport for several processes of one jax.distributed cluster: tiles cross by a collective over both meshes.

All processes of both meshes call `move` in the same order. It runs in one process as well, over disjoint meshes.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh.reshard.crossing import UNION, Crossing, Ports, make_crossing, make_ports
from podrl.mesh.reshard.plan import Plan

IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class CollectivePrograms:
    """The four compiled steps of one bucket; ahead-of-time compilation lowers them as they are.

    Attributes:
      tiles: what crosses, as shapes on the union of the meshes.
      spread: on the source mesh, leaves -> tiles, cast.
      blank: on the target mesh, () -> tiles of zeros, where the others land.
      cross: on both meshes, tiles -> tiles, each moved to the partner device; donated.
      gather: on the target mesh, tiles -> leaves.
    """

    tiles: Sequence[jax.ShapeDtypeStruct]
    spread: Any
    blank: Any
    cross: Any
    gather: Any


class CollectiveTransport:
    """Carries out a plan over the union of two disjoint meshes; see `move`."""

    def __init__(self, plan: Plan, sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]):
        """Lays out the tiles; programs compile at the first move.

        Args:
          plan: made from the same shardings.
          sources: sharding of each leaf before, all on one mesh.
          targets: sharding of each leaf after, all on one mesh disjoint from the first.

        Raises:
          ValueError: the meshes share devices.
        """
        self._plan = plan
        self._targets = targets
        if not plan.leaves:
            return
        self.ports: Ports = make_ports(cast(Mesh, sources[0].mesh), cast(Mesh, targets[0].mesh))
        self.crossings: list[Crossing] = [
            make_crossing(self.ports, leaf.shape, s, t)
            for leaf, s, t in zip(plan.leaves, sources, targets, strict=True)
        ]
        self.buckets: list[tuple[int, ...]] = self._make_buckets()
        self._programs = [self.programs(bucket) for bucket in self.buckets]
        self._target_devices = set(self.ports.target.devices.flat)
        me = jax.process_index()
        self.sends = any(d.process_index == me for d in self.ports.source.devices.flat)
        self.receives = any(d.process_index == me for d in self.ports.target.devices.flat)

    def move(self, leaves: Sequence[Array] | None, *, donate: bool = False) -> list[Array] | None:
        """The leaves on their target shardings, in the target dtypes.

        Args:
          leaves: arrays placed as the plan says; None on a process outside the source mesh.
          donate: delete each source leaf as soon as it has been read.

        Returns:
          New arrays, possibly still being written; None on a process outside the target mesh. At most two buckets of
          tiles are staged at any time.
        """
        if not self._plan.leaves:
            return []
        assert (leaves is not None) == self.sends, "leaves come from the processes of the source mesh"
        out: list[Any] = [None] * len(self._plan.leaves)
        flying: deque[Sequence[Array]] = deque()
        for bucket, programs in zip(self.buckets, self._programs, strict=True):
            if len(flying) == IN_FLIGHT:
                jax.block_until_ready(flying.popleft())
            flying.append(self._move_bucket(bucket, programs, leaves, out))
            if donate and leaves is not None:
                for i in bucket:
                    leaves[i].delete()
        return out if self.receives else None

    def programs(self, bucket: Sequence[int]) -> CollectivePrograms:
        """The steps of one bucket, as jitted functions of sequences of arrays."""
        ports, crossings = self.ports, [self.crossings[i] for i in bucket]
        dtypes = [self._plan.leaves[i].target_dtype for i in bucket]
        width = ports.union.size

        def spread(leaves: Sequence[Array]) -> list[Array]:
            return [
                jnp.broadcast_to(x.astype(dtype), c.source_shape)
                for x, c, dtype in zip(leaves, crossings, dtypes, strict=True)
            ]

        def blank() -> list[Array]:
            return [jnp.zeros(c.target_shape, dtype) for c, dtype in zip(crossings, dtypes, strict=True)]

        def cross(tiles: Sequence[Array]) -> list[Array]:
            return [jax.lax.ppermute(tile, UNION, ports.links) for tile in tiles]

        def gather(tiles: Sequence[Array]) -> list[Array]:
            return [x[0] for x in tiles]

        row = NamedSharding(ports.union, Spec(UNION))
        crossed = jax.shard_map(cross, mesh=ports.union, in_specs=row.spec, out_specs=row.spec, check_vma=False)
        tiles = [
            jax.ShapeDtypeStruct((width, *c.tile[1:]), dtype, sharding=row)
            for c, dtype in zip(crossings, dtypes, strict=True)
        ]
        return CollectivePrograms(
            tiles=tiles,
            spread=jax.jit(spread, out_shardings=[c.source for c in crossings]),
            blank=jax.jit(blank, out_shardings=[c.target for c in crossings]),
            cross=jax.jit(crossed, out_shardings=row, donate_argnums=0),
            gather=jax.jit(gather, out_shardings=[self._targets[i] for i in bucket]),
        )

    def _move_bucket(
        self, bucket: Sequence[int], programs: CollectivePrograms, leaves: Sequence[Array] | None, out: list[Any]
    ) -> Sequence[Array]:
        """Moves one bucket into `out`; returns arrays that are ready when nothing of it is staged any more."""
        local: list[list[Array]] = [[] for _ in bucket]
        if leaves is not None:
            for shards, array in zip(local, programs.spread([leaves[i] for i in bucket]), strict=True):
                shards += [s.data for s in array.addressable_shards]
        if self.receives:
            for shards, array in zip(local, programs.blank(), strict=True):
                shards += [s.data for s in array.addressable_shards]
        arrays = [
            jax.make_array_from_single_device_arrays(tile.shape, tile.sharding, shards, dtype=tile.dtype)
            for tile, shards in zip(programs.tiles, local, strict=True)
        ]
        del local
        arrays = programs.cross(arrays)
        if not self.receives:
            return arrays
        tiles = [self._landed(i, array) for i, array in zip(bucket, arrays, strict=True)]
        del arrays
        done = programs.gather(tiles)
        for i, array in zip(bucket, done, strict=True):
            out[i] = array
        return done

    def _landed(self, i: int, array: Array) -> Array:
        """The tiles on the target devices, as an array of the target mesh."""
        crossing = self.crossings[i]
        shards = [s.data for s in array.addressable_shards if s.device in self._target_devices]
        return jax.make_array_from_single_device_arrays(
            crossing.target_shape, crossing.target, shards, dtype=array.dtype
        )

    def _make_buckets(self) -> list[tuple[int, ...]]:
        """Leaves in order, as many together as a device may stage; a larger one goes alone."""
        buckets: list[tuple[int, ...]] = []
        filled = 0
        for i, crossing in enumerate(self.crossings):
            size = math.prod(crossing.tile) * self._plan.leaves[i].target_dtype.itemsize
            if buckets and filled + size <= self._plan.bucket_bytes:
                buckets[-1] += (i,)
                filled += size
            else:
                buckets.append((i,))
                filled = size
        return buckets
