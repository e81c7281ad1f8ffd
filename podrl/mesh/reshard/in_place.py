"""The transport for CPU devices of one process, which share a memory: targets read the source's shards where they lie.

One program per bucket on the target mesh takes, for every box of a target shard, the whole source shard that holds it,
under an alias: the same memory, lent to the target device. Cutting, casting and joining are then a single pass, and
nothing is staged. The host handles addresses, never values.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh.reshard.local import named
from podrl.mesh.reshard.plan import LeafPlan, Plan
from podrl.mesh.reshard.programs import give_up, joined
from podrl.mesh.reshard.relayout import stays

IN_FLIGHT = 4


class InPlaceTransport:
    """Carries out a plan between CPU devices of one process; see `move`.

    Attributes:
      lenders: for every leaf, what aliases its source shards.
    """

    def __init__(self, plan: Plan, sources: Sequence[Any], targets: Sequence[Any]):
        """Args are those of `LocalTransport`."""
        self._plan = plan
        self._stays = stays(plan, sources, targets)
        self._targets = [named(t) for t in targets]
        self.lenders = [Lender(leaf, t) for leaf, t in zip(plan.leaves, self._targets, strict=True)]

    @staticmethod
    def fits(sources: Sequence[Any], targets: Sequence[Any]) -> bool:
        """Whether all devices are CPUs of this process."""
        devices = {device for sharding in (*sources, *targets) for device in sharding.device_set}
        return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)

    def move(
        self, leaves: Sequence[Array], *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array]:
        """The leaves on their target shardings, in the target dtypes; all of them are written when it returns.

        Args:
          leaves: arrays placed as the plan says.
          donate: the sources are given up: leaves that need no change are handed on, the others deleted once read.
          replacing: as in `Transport.move`; what is new is written over them, which spares fresh memory its faults.
        """
        out: list[Any] = [leaf if donate and stays else None for leaf, stays in zip(leaves, self._stays, strict=True)]
        flying: deque[tuple[Sequence[int], list[Any]]] = deque()
        for bucket in self._plan.buckets:
            changed = [i for i in bucket.leaves if out[i] is None]
            give_up(replacing, [i for i in bucket.leaves if out[i] is not None])
            if len(flying) == IN_FLIGHT:
                self._landed(*flying.popleft(), leaves, out, donate)
            flying.append((changed, self._read(leaves, changed, out, replacing)))
        for landing in flying:
            self._landed(*landing, leaves, out, donate)
        return out

    def _read(
        self, leaves: Sequence[Array], indices: Sequence[int], out: list[Any], replacing: Sequence[Array] | None
    ) -> list[Any]:
        """Starts the program that writes some leaves into `out`; returns the aliases it reads, to be kept so long."""
        groups: dict[Mesh, list[int]] = {}
        for i in indices:
            groups.setdefault(cast(Mesh, self._targets[i].mesh), []).append(i)
        lent: list[Any] = []
        for mesh, members in groups.items():
            with jax.transfer_guard("allow"):  # aliases: nothing is copied to or from the host
                columns = [self.lenders[i].columns(leaves[i]) for i in members]
            old = [] if replacing is None else [replacing[i] for i in members]
            program = _join_program(mesh, tuple(self.lenders[i].reading for i in members), replacing is not None)
            for i, array in zip(members, program(old, columns), strict=True):
                out[i] = array
            lent.append(columns)
        return lent

    def _landed(
        self, indices: Sequence[int], lent: list[Any], leaves: Sequence[Array], out: Sequence[Any], donate: bool
    ) -> None:
        """Waits for leaves, so that no alias outlives the move: jit copies an array given up while it is lent."""
        jax.block_until_ready([out[i] for i in indices])
        lent.clear()
        give_up(leaves if donate else None, indices)


class Lender:
    """Which source shard every slot of every target device reads, and from where in it.

    Attributes:
      reading: what the program that reads them must know.
    """

    def __init__(self, leaf: LeafPlan, target: NamedSharding):
        mesh = cast(Mesh, target.mesh)
        shard = (n * k for n, k in zip(leaf.box, leaf.source_slots, strict=True))
        self._lifted = ((mesh.size, *shard), NamedSharding(mesh, Spec(mesh.axis_names)))
        self._ids = leaf.source.device_ids
        self._source_WM = leaf.source_WM.tolist()
        self._words = _words(leaf.source_dtype)
        self.reading = _Reading.of(leaf, target.spec)

    def columns(self, leaf: Array) -> list[Array]:
        """For every slot an array over the target mesh: on each device the source shard to read, aliased."""
        shards = {s.device.id: np.asarray(s.data).view(self._words)[None] for s in leaf.addressable_shards}
        views = [shards[device] for device in self._ids]

        def lent(m: int) -> Callable[[Any], np.ndarray]:
            return lambda index: views[self._source_WM[index[0].start or 0][m]]

        shape, place = self._lifted
        slots = range(len(self._source_WM[0]))
        return [jax.make_array_from_callback(shape, place, lent(m), dtype=self._words) for m in slots]


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How the devices of the target mesh put a leaf together from source shards.

    Attributes:
      spec: how the leaf lies on the target mesh.
      slots: boxes along each dimension of a target shard.
      box: shape of a box.
      corner_WMi: where device w finds the box of its slot m in the source shard lent for it.
      source_dtype: of the values that the words lent stand for.
      target_dtype: what they are cast to.
    """

    spec: Spec
    slots: tuple[int, ...]
    box: tuple[int, ...]
    corner_WMi: tuple[tuple[tuple[int, ...], ...], ...]
    source_dtype: np.dtype
    target_dtype: np.dtype

    @classmethod
    def of(cls, leaf: LeafPlan, spec: Spec) -> "_Reading":
        # The slots of a source shard number its boxes row-major.
        index_WMi = np.stack(np.unravel_index(leaf.slot_WM, leaf.source_slots or (1,)), axis=-1)[..., : len(leaf.box)]
        corner_WMi = (index_WMi * np.array(leaf.box, np.int64)).tolist()
        table = tuple(tuple(tuple(corner) for corner in corners) for corners in corner_WMi)
        return cls(spec, leaf.target_slots, leaf.box, table, leaf.source_dtype, leaf.target_dtype)

    def read(self, lent: Sequence[Array], w: Array) -> Array:
        """The shard of device w."""
        words = joined([self._box(shard, m, w) for m, shard in enumerate(lent)], self.slots)
        values = words if words.dtype == self.source_dtype else jax.lax.bitcast_convert_type(words, self.source_dtype)
        return values.astype(self.target_dtype)

    def _box(self, shard: Array, m: int, w: Array) -> Array:
        corner_Wi = [corners[m] for corners in self.corner_WMi]
        if all(corner == corner_Wi[0] for corner in corner_Wi):
            return jax.lax.slice(shard, corner_Wi[0], [at + n for at, n in zip(corner_Wi[0], self.box, strict=True)])
        at_i = jnp.asarray(corner_Wi, jnp.int32)[w]
        return jax.lax.dynamic_slice(shard, list(at_i), self.box)


@functools.lru_cache(maxsize=1024)
def _join_program(
    mesh: Mesh, readings: tuple[_Reading, ...], overwriting: bool
) -> Callable[[Sequence[Array], Sequence[Sequence[Array]]], Sequence[Array]]:
    """(leaves to write over, if any; for each leaf its lent shards by slot) -> the leaves on the mesh."""

    def join(old: Sequence[Array], columns: Sequence[Sequence[Array]]) -> list[Array]:
        del old  # only its memory is wanted
        w = jax.lax.axis_index(mesh.axis_names)
        return [
            reading.read([jnp.squeeze(shard, 0) for shard in lent], w)
            for lent, reading in zip(columns, readings, strict=True)
        ]

    specs_out = [reading.spec for reading in readings]
    specs_in = (specs_out if overwriting else [], Spec(mesh.axis_names))
    mapped = jax.shard_map(join, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)
    places = [NamedSharding(mesh, spec) for spec in specs_out]
    return jax.jit(mapped, out_shardings=places, donate_argnums=0, keep_unused=True)


def _words(dtype: np.dtype) -> np.dtype:
    """Words in the place of narrow floats, which XLA's CPU compiler would cut and join by way of float32."""
    narrow = jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4
    return np.dtype(f"u{dtype.itemsize}") if narrow else dtype
