"""The transport for several processes of one jax.distributed cluster: boxes cross by collectives over both meshes.

All processes of both meshes call `move` in the same order. It runs in one process as well, over disjoint meshes.
Per bucket: one program on the source mesh packs what each device sends, a buffer for each different set of links; one
collective-permute per buffer crosses; one program on the target mesh puts shards together. A collective costs about a
millisecond over TCP whatever its size, so leaves that go the same way share one.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh.reshard.plan import Plan, make_plan
from podrl.mesh.reshard.programs import Boxes, blank_program, cut_at, give_up, joined, overwrite
from podrl.mesh.reshard.rounds import Links, Rounds, landing
from podrl.mesh.reshard.tables import Tables
from podrl.mesh.reshard.wire import from_words, to_words, word, word_shape

IN_FLIGHT = 2
UNION = "union"
FLAT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Parcel:
    """What crosses in one collective: the boxes of several leaves that go over the same links.

    Attributes:
      links: pairs (source position, target position).
      dtype: of the buffer's words.
      shape: of one device's buffer: equal boxes stacked, or flat and one after the other.
      boxes: (leaf, round, shape in words) in the order they lie in the buffer.
      flat: whether the boxes are flattened.
    """

    links: Links
    dtype: np.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, int, tuple[int, ...]], ...]
    flat: bool

    @classmethod
    def of(
        cls, links: Links, dtype: np.dtype, boxes: Sequence[tuple[int, int, tuple[int, ...]]], *, flat: bool
    ) -> "Parcel":
        shape = (sum(math.prod(box) for _, _, box in boxes),) if flat else (len(boxes), *boxes[0][2])
        return cls(links, dtype, shape, tuple(boxes), flat)

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross, all links together."""
        return math.prod(self.shape) * self.dtype.itemsize * len(self.links)

    def buffer(self, place: NamedSharding) -> jax.ShapeDtypeStruct:
        """A buffer on every device of a mesh, as one array."""
        shape = (self.shape[0] * place.mesh.size, *self.shape[1:])
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=place)

    def put(self, boxes: Sequence[Array]) -> Array:
        """Words of the boxes -> the buffer."""
        if self.flat:
            return jnp.concatenate([box.reshape(-1) for box in boxes])
        buffer = jax.lax.empty(self.shape, self.dtype)
        for k, box in enumerate(boxes):  # faster than jnp.stack on CPU, where that fuses with what made the boxes
            buffer = jax.lax.dynamic_update_index_in_dim(buffer, box, k, axis=0)
        return buffer

    def take(self, buffer: Array) -> list[Array]:
        """The inverse of `put`."""
        if not self.flat:
            return [buffer[k] for k in range(len(self.boxes))]
        ends = itertools.accumulate(math.prod(shape) for _, _, shape in self.boxes)
        return [
            buffer[end - math.prod(shape) : end].reshape(shape)
            for end, (_, _, shape) in zip(ends, self.boxes, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class CollectivePrograms:
    """The compiled steps of one bucket; ahead-of-time compilation lowers them as they are.

    Attributes:
      parcels: what crosses.
      buffers: their shapes on the union of the meshes.
      pack: on the source mesh, (start, slot table, leaves) -> buffers, cast.
      blank: on the target mesh, () -> buffers of zeros, where the others land.
      cross: on both meshes, buffers -> buffers, each moved over its links. Not donated: on CPU that costs a copy.
      unpack: on the target mesh, (start, round table, buffers, the leaf so far where it comes in parts) -> leaves and a
        token that is ready when they are.
      slots: which slot each source device sends of each leaf in each round.
      rounds: in which round each slot of each leaf arrives on each target device.
    """

    parcels: Sequence[Parcel]
    buffers: Sequence[jax.ShapeDtypeStruct]
    pack: Any
    blank: Any
    cross: Any
    unpack: Any
    slots: Tables
    rounds: Tables


class CollectiveTransport:
    """Carries out a plan over the union of two disjoint meshes; see `move`.

    Attributes:
      union: all devices in one row, source first.
      crossing: the plan from the source mesh to where leaves land on the target mesh.
      crossing_bytes: bytes that cross in one move.
    """

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[NamedSharding],
        targets: Sequence[NamedSharding],
        *,
        flat_bytes: int = FLAT_BYTES,
    ):
        """Lays out the rounds; programs compile at the first move.

        Args:
          plan: made from the same shardings.
          sources: sharding of each leaf before, all on one mesh.
          targets: sharding of each leaf after, all on one mesh disjoint from the first.
          flat_bytes: boxes of one shape that are less than this together, on one device, share a buffer with others.

        Raises:
          ValueError: the meshes share devices.
        """
        self.plan, self._flat_bytes = plan, flat_bytes
        if not plan.leaves:
            return
        self._sources, self._targets = sources, targets
        self.source, self.target = cast(Mesh, sources[0].mesh), cast(Mesh, targets[0].mesh)
        before, after = list(self.source.devices.flat), list(self.target.devices.flat)
        if shared := {d.id for d in before} & {d.id for d in after}:
            raise ValueError(
                f"The collective transport needs disjoint meshes, devices {sorted(shared)} are in both: give the roles "
                "separate hosts, or all the same devices."
            )
        self.union = Mesh(np.array([*before, *after], dtype=object), (UNION,))
        self._landings = [
            landing(leaf.shape, leaf.target_dtype.itemsize, source, target)
            for leaf, source, target in zip(plan.leaves, sources, targets, strict=True)
        ]
        placed = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.target_dtype, sharding=source)
            for leaf, source in zip(plan.leaves, sources, strict=True)
        ]
        paths = [leaf.path for leaf in plan.leaves]
        # A bucket is there twice while it crosses.
        bucket_bytes = max(1, plan.bucket_bytes // 2)
        self.crossing = make_plan(placed, self._landings, bucket_bytes=bucket_bytes, paths=paths)
        self._rounds = [Rounds.of(leaf) for leaf in self.crossing.leaves]
        made: dict[Any, CollectivePrograms] = {}
        self.programs: list[CollectivePrograms] = []
        for bucket in self.crossing.buckets:
            key = tuple(map(self._alike, bucket.leaves)), bucket.parts > 1
            if key not in made:
                made[key] = self._make_programs(bucket.leaves, bucket.parts > 1)
            self.programs.append(made[key])
        me = jax.process_index()
        self.sends = any(d.process_index == me for d in before)
        self.receives = any(d.process_index == me for d in after)
        self._kept: dict[Any, Any] = {}
        self._landing_ground: tuple[Any, Sequence[Array]] = (None, [])

    @property
    def crossing_bytes(self) -> int:
        return sum(
            bucket.parts * parcel.crossing_bytes
            for bucket, programs in zip(self.crossing.buckets, self.programs, strict=True)
            for parcel in programs.parcels
        )

    def arguments(self, number: int) -> dict[str, tuple[Any, ...]]:
        """Shapes of the arguments of a bucket's 'pack', 'cross' and 'unpack', for compiling ahead of time."""
        bucket, programs = self.crossing.buckets[number], self.programs[number]

        def common(mesh: Mesh, tables: Tables) -> list[jax.ShapeDtypeStruct]:
            start, rows = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(mesh.axis_names))
            return [
                jax.ShapeDtypeStruct((), np.int32, sharding=start),
                jax.ShapeDtypeStruct(tables.table_WC.shape, np.int32, sharding=rows),
            ]

        given, so_far = [], []
        for i in bucket.leaves:
            leaf = self.plan.leaves[i]
            given.append(jax.ShapeDtypeStruct(leaf.shape, leaf.source_dtype, sharding=self._sources[i]))
            so_far.append(jax.ShapeDtypeStruct(leaf.shape, leaf.target_dtype, sharding=self._landings[i]))
        place = NamedSharding(self.target, Spec(self.target.axis_names))
        landed = [parcel.buffer(place) for parcel in programs.parcels]
        return {
            "pack": (*common(self.source, programs.slots), given),
            "cross": (list(programs.buffers),),
            "unpack": (*common(self.target, programs.rounds), landed, so_far if bucket.parts > 1 else []),
        }

    def move(
        self, leaves: Sequence[Array] | None, *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array] | None:
        """The leaves on their target shardings, in the target dtypes.

        Args:
          leaves: arrays placed as the plan says; None on a process outside the source mesh.
          donate, replacing: as in `Transport.move`.

        Returns:
          New arrays, possibly still being written; None on a process outside the target mesh. At most two buckets of
          boxes are staged at any time.
        """
        if not self.plan.leaves:
            return []
        assert (leaves is not None) == self.sends, "leaves come from the processes of the source mesh"
        out: list[Any] = [None] * len(self.plan.leaves)
        flying: deque[Sequence[Array]] = deque()
        for bucket, programs in zip(self.crossing.buckets, self.programs, strict=True):
            give_up(replacing, bucket.leaves)
            for part in range(bucket.parts):
                if len(flying) == IN_FLIGHT:
                    jax.block_until_ready(flying.popleft())
                flying.append(self._move_bucket(bucket.leaves, programs, part, leaves, out))
            give_up(leaves if donate else None, bucket.leaves)
            if bucket.parts > 1 and self.receives:
                out[bucket.leaves[0]] = self._spread(bucket.leaves[0], out[bucket.leaves[0]])
        self._landing_ground = None, []
        return out if self.receives else None

    def _move_bucket(
        self,
        indices: Sequence[int],
        programs: CollectivePrograms,
        part: int,
        leaves: Sequence[Array] | None,
        out: list[Any],
    ) -> Sequence[Array]:
        """Moves one bucket into `out`; returns arrays that are ready when nothing of it is staged any more."""
        first = self.crossing.leaves[indices[0]]
        at = first.part_start(part) if first.parts > 1 else 0
        shards: list[list[Array]] = [[] for _ in programs.parcels]
        if leaves is not None:
            given = [leaves[i] for i in indices]
            packed = programs.pack(self._start(self.source, at), self._table(self.source, programs.slots), given)
            for pieces, array in zip(shards, packed, strict=True):
                pieces += [s.data for s in array.addressable_shards]
            del packed
        if self.receives:
            for pieces, array in zip(shards, self._blank(programs), strict=True):
                pieces += [s.data for s in array.addressable_shards]
        arrays = [
            jax.make_array_from_single_device_arrays(buffer.shape, buffer.sharding, pieces, dtype=buffer.dtype)
            for buffer, pieces in zip(programs.buffers, shards, strict=True)
        ]
        del shards
        arrays = programs.cross(arrays)
        if not self.receives:
            return arrays
        landed = [self._landed(array) for array in arrays]
        del arrays
        so_far = [self._so_far(indices[0], part, out)] if first.parts > 1 else []
        start, table = self._start(self.target, at), self._table(self.target, programs.rounds)
        done, token = programs.unpack(start, table, landed, so_far)
        for i, array in zip(indices, done, strict=True):
            out[i] = array
        return [token]

    def _alike(self, i: int) -> Any:
        """Equal for leaves that the same programs can move."""
        leaf, rounds = self.crossing.leaves[i], self._rounds[i]
        source = Boxes.of(leaf, leaf.source_slots, self._sources[i].spec)
        target = Boxes.of(leaf, leaf.target_slots, self._landings[i].spec)
        tables = rounds.links, rounds.slot_WR.tobytes(), rounds.round_WM.tobytes()
        return source, target, self._targets[i], leaf.shape, self.plan.leaves[i].source_dtype, tables

    def _make_programs(self, indices: tuple[int, ...], in_parts: bool) -> CollectivePrograms:
        parcels = self._parcels(indices)
        row, lifted = NamedSharding(self.union, Spec(UNION)), NamedSharding(self.target, Spec(self.target.axis_names))
        links = [[(s, self.source.size + t) for s, t in parcel.links] for parcel in parcels]

        def blank() -> list[Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in (parcel.buffer(lifted) for parcel in parcels)]

        def cross(arrays: Sequence[Array]) -> list[Array]:
            return [jax.lax.ppermute(x, UNION, pairs) for x, pairs in zip(arrays, links, strict=True)]

        crossed = jax.shard_map(cross, mesh=self.union, in_specs=row.spec, out_specs=row.spec, check_vma=False)
        slots = Tables([self._rounds[i].slot_WR for i in indices])
        rounds = Tables([self._rounds[i].round_WM for i in indices])
        return CollectivePrograms(
            parcels=parcels,
            buffers=[parcel.buffer(row) for parcel in parcels],
            pack=self._pack_program(indices, parcels, slots, in_parts),
            blank=jax.jit(blank, out_shardings=lifted),
            cross=jax.jit(crossed, out_shardings=row),
            unpack=self._unpack_program(indices, parcels, rounds, in_parts),
            slots=slots,
            rounds=rounds,
        )

    def _parcels(self, indices: Sequence[int]) -> list[Parcel]:
        """What crosses of these leaves; equal boxes together, and what is small of all shapes together.

        Flattening costs more than it saves where it is not small: on CPU a strided box is then read word by word.
        """
        alike: dict[tuple[Links, np.dtype, tuple[int, ...]], list[tuple[int, int, tuple[int, ...]]]] = {}
        for place, i in enumerate(indices):
            leaf = self.crossing.leaves[i]
            dtype, shape = word(leaf.target_dtype), word_shape(leaf.part_box, leaf.target_dtype)
            for r, links in enumerate(self._rounds[i].links):
                alike.setdefault((links, dtype, shape), []).append((place, r, shape))
        small: dict[tuple[Links, np.dtype], list[tuple[int, int, tuple[int, ...]]]] = {}
        parcels: list[Parcel] = []
        for (links, dtype, shape), boxes in alike.items():
            if len(boxes) * math.prod(shape) * dtype.itemsize < self._flat_bytes:
                small.setdefault((links, dtype), []).extend(boxes)
            else:
                parcels.append(Parcel.of(links, dtype, boxes, flat=False))
        return parcels + [Parcel.of(links, dtype, boxes, flat=True) for (links, dtype), boxes in small.items()]

    def _pack_program(self, indices: Sequence[int], parcels: Sequence[Parcel], tables: Tables, in_parts: bool) -> Any:
        leaves, specs = [self.crossing.leaves[i] for i in indices], [self._sources[i].spec for i in indices]
        forms = [Boxes.of(leaf, leaf.source_slots, spec) for leaf, spec in zip(leaves, specs, strict=True)]

        def pack(start: Array, table: Array, shards: Sequence[Array]) -> list[Array]:
            out = []
            for parcel in parcels:
                boxes = []
                for place, r, _ in parcel.boxes:
                    slot = tables.value(place, r, table[0])
                    box = cut_at(shards[place], slot, forms[place], start if in_parts else None)
                    boxes.append(to_words(box.astype(forms[place].dtype)))
                out.append(parcel.put(boxes))
            return out

        every = Spec(self.source.axis_names)
        mapped = jax.shard_map(
            pack, mesh=self.source, in_specs=(Spec(), every, specs), out_specs=every, check_vma=False
        )
        return jax.jit(mapped, out_shardings=NamedSharding(self.source, every))

    def _unpack_program(self, indices: Sequence[int], parcels: Sequence[Parcel], tables: Tables, in_parts: bool) -> Any:
        leaves, specs = [self.crossing.leaves[i] for i in indices], [self._landings[i].spec for i in indices]
        forms = [Boxes.of(leaf, leaf.target_slots, spec) for leaf, spec in zip(leaves, specs, strict=True)]

        def unpack(start: Array, table: Array, buffers: Sequence[Array], so_far: Sequence[Array]) -> Any:
            boxes: list[dict[int, Array]] = [{} for _ in indices]
            for parcel, buffer in zip(parcels, buffers, strict=True):
                for (place, r, _), box in zip(parcel.boxes, parcel.take(buffer), strict=True):
                    boxes[place][r] = box
            out = []
            for place, form in enumerate(forms):
                rounds = [tables.value(place, m, table[0]) for m in tables.columns(place)]
                slots = [from_words(box, form.dtype) for box in _pick(boxes[place], rounds)]
                out.append(overwrite(so_far[place], slots, form, start) if in_parts else joined(slots, form.slots))
            return out, start + 1

        every = Spec(self.target.axis_names)
        specs_in = (Spec(), every, [every] * len(parcels), specs if in_parts else [])
        mapped = jax.shard_map(unpack, mesh=self.target, in_specs=specs_in, out_specs=(specs, Spec()), check_vma=False)
        places = [(self._landings if in_parts else self._targets)[i] for i in indices]
        token = NamedSharding(self.target, Spec())
        return jax.jit(mapped, out_shardings=(places, token), donate_argnums=3)

    def _landed(self, array: Array) -> Array:
        """The buffers on the target devices, as an array of the target mesh."""
        devices = set(self.target.devices.flat)
        shards = [s.data for s in array.addressable_shards if s.device in devices]
        place = NamedSharding(self.target, Spec(self.target.axis_names))
        shape = (array.shape[0] // self.union.size * self.target.size, *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, place, shards, dtype=array.dtype)

    def _blank(self, programs: CollectivePrograms) -> Sequence[Array]:
        """Where buffers land; kept for the next bucket, which is often alike."""
        if self._landing_ground[0] is not programs:
            self._landing_ground = programs, programs.blank()
        return self._landing_ground[1]

    def _so_far(self, i: int, part: int, out: Sequence[Any]) -> Array:
        leaf = self.crossing.leaves[i]
        form = Boxes.of(leaf, leaf.target_slots, self._landings[i].spec)
        return blank_program(self.target, form, leaf.shape)() if part == 0 else out[i]

    def _spread(self, i: int, leaf: Array) -> Array:
        """A leaf that landed in parts, gathered among the devices that replicate it."""
        if self._landings[i] == self._targets[i]:
            return leaf
        if i not in self._kept:
            self._kept[i] = jax.jit(lambda x: x, out_shardings=self._targets[i])
        return self._kept[i](leaf)

    def _table(self, mesh: Mesh, tables: Tables) -> Array:
        """A table on its mesh, a row per device; made once, so that later moves send nothing from the host."""
        if (mesh, tables) not in self._kept:
            place = NamedSharding(mesh, Spec(mesh.axis_names))
            rows_WC = tables.table_WC
            self._kept[mesh, tables] = jax.make_array_from_callback(rows_WC.shape, place, lambda index: rows_WC[index])
        return self._kept[mesh, tables]

    def _start(self, mesh: Mesh, at: int) -> Array:
        """Where a part begins, on every device of a mesh; made once."""
        if (mesh, at) not in self._kept:
            place = NamedSharding(mesh, Spec())
            self._kept[mesh, at] = jax.make_array_from_callback((), place, lambda _: np.int32(at))
        return self._kept[mesh, at]


def _pick(boxes: Mapping[int, Array], rounds: Sequence[Any]) -> list[Array]:
    """The boxes of some rounds; where those differ from device to device, chosen as the program runs."""
    if all(isinstance(r, int) for r in rounds):
        return [boxes[r] for r in rounds]
    stacked = jnp.stack([boxes[r] for r in range(len(boxes))])
    chosen = jnp.take(stacked, jnp.stack([jnp.int32(r) for r in rounds]), axis=0, mode="clip")
    return [chosen[m] for m in range(len(rounds))]
