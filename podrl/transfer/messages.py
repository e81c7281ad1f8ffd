"""Plans which boxes each collective between two meshes moves, and builds the programs before and after it.

A leaf crosses in rounds: in each round a device sends and receives at most one box. The boxes of several
leaves whose rounds have the same links share a message. The links between hosts are the bottleneck, so a leaf that the
target mesh replicates arrives with further cuts, along the axes that replicate it, and is then spread inside the target
mesh. Small shards are not cut further, so their values cross once for each replica (`arrival`).

Values travel as plain unsigned words: no program on the way interprets, widens or rounds them (XLA for CPU widens
bfloat16 to float32 around a collective). Leaves of different dtypes but equal width can share a message.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int

from podrl.transfer.boxes import Boxes, cut_at, joined, overwrite
from podrl.transfer.plan import LeafPlan
from podrl.types import PyTree

UNION = "union"
# A shard of at most this many bytes is sent to every replica: spreading it by a collective would take longer.
_SPREAD_BYTES = 1 << 16
_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint32)}
# Values narrower than a byte travel as a byte each.
_NARROW = ("bool", "int4", "uint4", "int2", "uint2")
Links = tuple[tuple[int, int], ...]


def arrival(shape: tuple[int, ...], itemsize: int, source: NamedSharding, target: NamedSharding) -> NamedSharding:
    """Returns a leaf's sharding on arrival: its target sharding, cut further by the axes that replicate it.

    A shard of at most 64 KiB is not cut further, and an axis cuts only a dimension that its size divides.
    Dimensions that the source sharding already cuts are cut first, so that a target device reads from few sources.
    """
    sizes = target.mesh.shape
    entries: list[tuple[str, ...]] = [() if e is None else (e,) if isinstance(e, str) else e for e in target.spec]
    entries += [()] * (len(shape) - len(entries))
    tile = [n // math.prod(sizes[a] for a in axes) for n, axes in zip(shape, entries, strict=True)]
    if math.prod(tile) * itemsize <= _SPREAD_BYTES:
        return target
    order = sorted(range(len(shape)), key=lambda d: not (d < len(source.spec) and source.spec[d]))
    used = {axis for axes in entries for axis in axes}
    for axis, size in sizes.items():
        fits = [d for d in order if tile[d] % size == 0]
        if axis in used or size == 1 or not fits:
            continue
        entries[fits[0]] += (str(axis),)
        tile[fits[0]] //= size
    return NamedSharding(cast(Mesh, target.mesh), Spec(*(axes or None for axes in entries)))


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """Assigns the boxes of one leaf to rounds.

    W is a device of the source or of the target mesh, R a round, M a slot of a target device's shard.

    Attributes:
      links: pairs (source position, target position) of each round, sorted by source.
      slot_WR: slot of its own shard that each source device sends in each round; 0 where it sends nothing.
      round_WM: round in which each slot of each target device's shard arrives.
    """

    links: tuple[Links, ...]
    slot_WR: Int[np.ndarray, "W R"]
    round_WM: Int[np.ndarray, "W M"]

    @classmethod
    def of(cls, leaf: LeafPlan) -> "Rounds":
        """Builds the rounds of a leaf: as many as the boxes that its busiest device sends or receives."""
        colour_E = _colours(
            leaf.source_WM.astype(np.int64).tobytes(), leaf.source_WM.shape, len(leaf.source.device_ids)
        )
        round_WM = colour_E.reshape(leaf.source_WM.shape)
        links: list[Links] = []
        slot_WR = np.zeros((len(leaf.source.device_ids), int(round_WM.max()) + 1), np.int32)
        for r in range(slot_WR.shape[1]):
            target_E, slot_E = np.nonzero(round_WM == r)
            source_E = leaf.source_WM[target_E, slot_E]
            slot_WR[source_E, r] = leaf.slot_WM[target_E, slot_E]
            links.append(tuple(sorted(zip(source_E.tolist(), target_E.tolist(), strict=True))))
        return cls(tuple(links), slot_WR, round_WM)


@functools.lru_cache(maxsize=256)
def _colours(source_WM_bytes: bytes, shape: tuple[int, int], sources: int) -> Int[np.ndarray, " E"]:
    """Assigns a round to every edge (target w, its m-th read) so that no device has two edges in one round.

    Rounds are the colours of an edge colouring. The edges of a bipartite graph can be coloured with as many colours as
    the largest degree (Koenig 1916): an edge takes a colour that is free at both ends; if there is none, two colours
    are swapped along a path first.
    """
    source_E = np.frombuffer(source_WM_bytes, np.int64).tolist()
    targets, per_target = shape
    degree = max(per_target, int(np.bincount(source_E, minlength=1).max()))
    # at[v][c] is the edge of colour c at vertex v, or -1 if there is none; vertices are the sources, then the targets.
    at = np.full((sources + targets, degree), -1, np.int64).tolist()
    colour = [-1] * len(source_E)

    def ends(edge: int) -> tuple[int, int]:
        return source_E[edge], sources + edge // per_target

    for edge in range(len(source_E)):
        u, v = ends(edge)
        a, b = at[u].index(-1), at[v].index(-1)
        if at[v][a] >= 0:
            # The path of colours a, b, a, ... from v cannot end in u: swapping a and b along it frees a at both ends.
            path, vertex, wanted = [], v, a
            while (step := at[vertex][wanted]) >= 0:
                path.append(step)
                vertex = sum(ends(step)) - vertex
                wanted = b if wanted == a else a
            for step in path:
                for end in ends(step):
                    if at[end][colour[step]] == step:
                        at[end][colour[step]] = -1
            for step in path:
                colour[step] = b if colour[step] == a else a
                for end in ends(step):
                    at[end][colour[step]] = step
        colour[edge] = a
        at[u][a] = at[v][a] = edge
    return np.array(colour, np.int64)


class Tables:
    """Integer tables with a row per device, as one program argument; columns equal on all devices become constants.

    Attributes:
      table_WC: columns C whose values differ between the W devices; at least one column (of zeros), because the
        programs need an argument.
    """

    def __init__(self, tables_Wn: Sequence[Int[np.ndarray, "W n"]]):
        self._places: list[list[tuple[bool, int]]] = []
        columns: list[np.ndarray] = []
        for table_Wn in tables_Wn:
            places: list[tuple[bool, int]] = []
            for column_W in table_Wn.T:
                same = bool((column_W == column_W[0]).all())
                places.append((same, int(column_W[0]) if same else len(columns)))
                if not same:
                    columns.append(column_W)
            self._places.append(places)
        empty_W1 = np.zeros((len(tables_Wn[0]), 1), np.int32)
        self.table_WC: Int[np.ndarray, "W C"] = np.stack(columns, axis=1).astype(np.int32) if columns else empty_W1

    def value(self, table: int, column: int, row_C: Int[Array, " C"]) -> int | Array:
        """Returns a device's value in a table's column: a Python number, or an entry of `row_C`."""
        same, value = self._places[table][column]
        return value if same else row_C[value]

    def columns(self, table: int) -> range:
        """Returns the indices of all columns of a table."""
        return range(len(self._places[table]))


@dataclasses.dataclass(frozen=True, eq=False)
class BoxMessage:
    """The content of one collective: boxes of several leaves that cross the same links.

    Attributes:
      links: pairs (source position, target position).
      dtype: type of the buffer's words.
      shape: shape of one device's buffer, in words: equal boxes stacked, or all boxes flattened one after the other.
      boxes: (leaf's place in the bucket, round, shape in words) of each box, in their order in the buffer.
      flat: True if the boxes are flattened, False if they are stacked.
    """

    links: Links
    dtype: np.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, int, tuple[int, ...]], ...]
    flat: bool

    @classmethod
    def of(
        cls, links: Links, dtype: np.dtype, boxes: Sequence[tuple[int, int, tuple[int, ...]]], *, flat: bool
    ) -> "BoxMessage":
        """Makes a message of at least one box; boxes that are stacked must all have the same shape."""
        shape = (sum(math.prod(box) for _, _, box in boxes),) if flat else (len(boxes), *boxes[0][2])
        return cls(links, dtype, shape, tuple(boxes), flat)

    @property
    def crossing_bytes(self) -> int:
        """Returns the bytes of the message, summed over its links."""
        return math.prod(self.shape) * self.dtype.itemsize * len(self.links)

    def buffer(self, place: NamedSharding) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array with one buffer on every device; `place` shards it over the mesh's devices."""
        shape = (self.shape[0] * place.mesh.size, *self.shape[1:])
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=place)

    def put(self, boxes: Sequence[Array]) -> Array:
        """Writes the boxes, as words, into one device's buffer."""
        if self.flat:
            return jnp.concatenate([box.reshape(-1) for box in boxes])
        buffer = jax.lax.empty(self.shape, self.dtype)
        for k, box in enumerate(boxes):  # on CPU faster than jnp.stack, which XLA fuses with the cutting of the boxes
            buffer = jax.lax.dynamic_update_index_in_dim(buffer, box, k, axis=0)
        return buffer

    def take(self, buffer: Array) -> list[Array]:
        """Reads the boxes, as words, from one device's buffer."""
        if not self.flat:
            return [buffer[k] for k in range(len(self.boxes))]
        ends = itertools.accumulate(math.prod(shape) for _, _, shape in self.boxes)
        return [
            buffer[end - math.prod(shape) : end].reshape(shape)
            for end, (_, _, shape) in zip(ends, self.boxes, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class BucketPrograms:
    """The jitted programs of one bucket, which compile at their first call or ahead of time.

    Attributes:
      messages: the bucket's messages.
      buffers: shape of each message's buffers on the union of the meshes.
      pack: program on the source mesh, (start, slot table, leaves) -> buffers; casts the leaves to the target's dtype.
      blank: program on the target mesh, () -> buffers of zeros, where the messages arrive.
      cross: program on both meshes, buffers -> buffers, each moved over its links. The buffers are not donated: on CPU
        donation costs a copy.
      unpack: program on the target mesh, (start, round table, buffers, leaf so far) -> leaves and a token that is ready
        when the leaves are. 'leaf so far' is a list: empty unless the bucket is a leaf that crosses in parts.
      slots: tables that give, for each leaf and round, the slot that each source device sends.
      rounds: tables that give, for each leaf and slot, the round in which the slot arrives on each target device.
    """

    messages: Sequence[BoxMessage]
    buffers: Sequence[jax.ShapeDtypeStruct]
    pack: Any
    blank: Any
    cross: Any
    unpack: Any
    slots: Tables
    rounds: Tables


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """The way in which one leaf crosses from the source mesh to the target mesh.

    Attributes:
      leaf: plan of the move from sharding `source` to sharding `arrival`.
      dtype: type of the leaf before it is cast for the crossing.
      source: sharding of the leaf on the source mesh.
      arrival: sharding of the leaf on the target mesh when it has crossed.
      target: sharding of the leaf on the target mesh after it has been spread there.
      rounds: the boxes that cross in each round.
    """

    leaf: LeafPlan
    dtype: np.dtype
    source: NamedSharding
    arrival: NamedSharding
    target: NamedSharding
    rounds: Rounds

    @property
    def cut(self) -> Boxes:
        return Boxes.of(self.leaf, self.leaf.source_slots, self.source.spec)

    @property
    def join(self) -> Boxes:
        return Boxes.of(self.leaf, self.leaf.target_slots, self.arrival.spec)

    @property
    def key(self) -> tuple[object, ...]:
        """Returns a value that is equal for two leaves if the same programs can move both."""
        tables = self.rounds.links, self.rounds.slot_WR.tobytes(), self.rounds.round_WM.tobytes()
        return self.cut, self.join, self.target, self.leaf.shape, self.dtype, tables


def bucket_programs(leaves: Sequence[Crossing], union: Mesh, *, in_parts: bool, flat_bytes: int) -> BucketPrograms:
    """Builds the jitted programs of one bucket.

    Args:
      leaves: the bucket's leaves.
      union: mesh of all devices in one row, the source mesh's devices first.
      in_parts: True if the bucket is one leaf that crosses part by part.
      flat_bytes: bound in bytes. Boxes of one shape that cross the same links share a message with boxes of other
        shapes if they have fewer bytes in sum.
    """
    source, target = cast(Mesh, leaves[0].source.mesh), cast(Mesh, leaves[0].target.mesh)
    messages = _messages(leaves, flat_bytes)
    row, lifted = NamedSharding(union, Spec(UNION)), NamedSharding(target, Spec(target.axis_names))
    links = [[(s, source.size + t) for s, t in message.links] for message in messages]

    def blank() -> list[Array]:
        return [jnp.zeros(shape.shape, shape.dtype) for shape in (message.buffer(lifted) for message in messages)]

    def cross(arrays: Sequence[Array]) -> list[Array]:
        return [jax.lax.ppermute(x, UNION, pairs) for x, pairs in zip(arrays, links, strict=True)]

    crossed = jax.shard_map(cross, mesh=union, in_specs=row.spec, out_specs=row.spec, check_vma=False)
    slots = Tables([leaf.rounds.slot_WR for leaf in leaves])
    rounds = Tables([leaf.rounds.round_WM for leaf in leaves])
    return BucketPrograms(
        messages=messages,
        buffers=[message.buffer(row) for message in messages],
        pack=_pack_program(leaves, messages, slots, source, in_parts),
        blank=jax.jit(blank, out_shardings=lifted),
        cross=jax.jit(crossed, out_shardings=row),
        unpack=_unpack_program(leaves, messages, rounds, target, in_parts),
        slots=slots,
        rounds=rounds,
    )


def _messages(leaves: Sequence[Crossing], flat_bytes: int) -> list[BoxMessage]:
    """Groups the boxes of a bucket's leaves into messages: equal boxes together, small boxes of all shapes together.

    Only small boxes are flattened, to share a message. For a large box, flattening costs more than the avoided
    message, because on CPU a strided box that is flattened is read word by word.
    """
    alike: dict[tuple[Links, np.dtype, tuple[int, ...]], list[tuple[int, int, tuple[int, ...]]]] = {}
    for place, crossing in enumerate(leaves):
        leaf = crossing.leaf
        dtype, shape = _word(leaf.target_dtype), _word_shape(leaf.part_box, leaf.target_dtype)
        for r, links in enumerate(crossing.rounds.links):
            alike.setdefault((links, dtype, shape), []).append((place, r, shape))
    small: dict[tuple[Links, np.dtype], list[tuple[int, int, tuple[int, ...]]]] = {}
    messages: list[BoxMessage] = []
    for (links, dtype, shape), boxes in alike.items():
        if len(boxes) * math.prod(shape) * dtype.itemsize < flat_bytes:
            small.setdefault((links, dtype), []).extend(boxes)
        else:
            messages.append(BoxMessage.of(links, dtype, boxes, flat=False))
    return messages + [BoxMessage.of(links, dtype, boxes, flat=True) for (links, dtype), boxes in small.items()]


def _pack_program(
    leaves: Sequence[Crossing], messages: Sequence[BoxMessage], tables: Tables, mesh: Mesh, in_parts: bool
) -> Callable[..., PyTree]:
    forms = [leaf.cut for leaf in leaves]

    def pack(start: Array, table: Array, shards: Sequence[Array]) -> list[Array]:
        out = []
        for message in messages:
            boxes = []
            for place, r, _ in message.boxes:
                slot = tables.value(place, r, table[0])
                box = cut_at(shards[place], slot, forms[place], start if in_parts else None)
                boxes.append(_to_words(box.astype(forms[place].dtype)))
            out.append(message.put(boxes))
        return out

    every = Spec(mesh.axis_names)
    specs_in = (Spec(), every, [form.spec for form in forms])
    mapped = jax.shard_map(pack, mesh=mesh, in_specs=specs_in, out_specs=every, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, every))


def _unpack_program(
    leaves: Sequence[Crossing], messages: Sequence[BoxMessage], tables: Tables, mesh: Mesh, in_parts: bool
) -> Callable[..., PyTree]:
    forms = [leaf.join for leaf in leaves]

    def unpack(
        start: Array, table: Array, buffers: Sequence[Array], so_far: Sequence[Array]
    ) -> tuple[list[Array], Array]:
        boxes: list[dict[int, Array]] = [{} for _ in leaves]
        for message, buffer in zip(messages, buffers, strict=True):
            for (place, r, _), box in zip(message.boxes, message.take(buffer), strict=True):
                boxes[place][r] = box
        out = []
        for place, form in enumerate(forms):
            rounds = [tables.value(place, m, table[0]) for m in tables.columns(place)]
            slots = [_from_words(box, form.dtype) for box in _pick(boxes[place], rounds)]
            out.append(overwrite(so_far[place], slots, form, start) if in_parts else joined(slots, form.slots))
        return out, start + 1

    every, specs = Spec(mesh.axis_names), [form.spec for form in forms]
    specs_in = (Spec(), every, [every] * len(messages), specs if in_parts else [])
    mapped = jax.shard_map(unpack, mesh=mesh, in_specs=specs_in, out_specs=(specs, Spec()), check_vma=False)
    places = [leaf.arrival if in_parts else leaf.target for leaf in leaves]
    return jax.jit(mapped, out_shardings=(places, NamedSharding(mesh, Spec())), donate_argnums=3)


def _pick(boxes: Mapping[int, Array], rounds: Sequence[Any]) -> list[Array]:
    """Picks the boxes of `rounds`; rounds that differ between devices are looked up while the program runs."""
    if all(isinstance(r, int) for r in rounds):
        return [boxes[r] for r in rounds]
    stacked = jnp.stack([boxes[r] for r in range(len(boxes))])
    chosen = jnp.take(stacked, jnp.stack([jnp.int32(r) for r in rounds]), axis=0, mode="clip")
    return [chosen[m] for m in range(len(rounds))]


def _word(dtype: np.dtype) -> np.dtype:
    """Returns the integer dtype in which values of a dtype cross between the meshes."""
    return _WORDS[np.dtype(dtype).itemsize]


def _word_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Returns the shape that an array has as words: an 8-byte value is two words, in a last dimension of 2."""
    return (*shape, 2) if np.dtype(dtype).itemsize == 8 else shape


def _to_words(x: Array) -> Array:
    """Reinterprets the bits of values as words; values narrower than a byte become a byte each."""
    if x.dtype.name in _NARROW:
        return x.astype(jnp.int8 if x.dtype.name.startswith("int") else jnp.uint8).view(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, _word(x.dtype))


def _from_words(x: Array, dtype: np.dtype) -> Array:
    """Reinterprets words as values of `dtype`, the inverse of `_to_words`."""
    name = np.dtype(dtype).name
    if name in _NARROW:
        return x.view(jnp.int8 if name.startswith("int") else jnp.uint8).astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)
