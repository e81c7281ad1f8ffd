"""The transfer plan: which source device sends which box of a leaf to which target device, in which bucket.

This module runs on the host. Both layouts of a leaf cut its dimensions evenly, so cutting dimension d into lcm(source
cuts, target cuts) parts gives a grid of equal boxes. Every shard, of the source or of the target, is a whole number of
boxes, each in a slot of the shard. One program per mesh, the same on all its devices, can then cut a shard into boxes
or join boxes into a shard. Only the wiring between slots differs from device to device: it is a table per leaf,
computed with numpy.

Letters of this package: W devices of a mesh in its row-major order, M slots of a shard, U devices that hold the same
block, i dimensions of the leaf, E pairs of devices.
"""

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec
from jax.typing import DTypeLike
from jaxtyping import Int

from podrl.types import PyTree

# Bytes that a device stages (holds in buffers of a move) for one bucket. On CPU they are few enough to stay in its
# caches; elsewhere they are enough to pay for the start of a transfer.
_BUCKET_BYTES = {"cpu": 16 << 20}
DEFAULT_BUCKET_BYTES = 64 << 20
# The in-place transport stages nothing. Starting its programs takes a tenth of a move. Larger buckets mean fewer
# programs, but these take longer to compile.
_IN_PLACE_BUCKET_BYTES = 32 << 20
_CACHE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """The layout of an array on a mesh, in numbers only.

    Attributes:
      mesh_shape: sizes of the mesh axes.
      device_ids: ids of the devices in the mesh's row-major order.
      dims: positions of the mesh axes that cut each dimension of the array, major first.
    """

    mesh_shape: tuple[int, ...]
    device_ids: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sharding: "Sharding | ShardLayout", rank: int) -> "ShardLayout":
        """Derives the layout of an array of `rank` dimensions from a jax sharding; returns a ShardLayout unchanged.

        Raises:
          ValueError: the sharding is neither a NamedSharding nor a SingleDeviceSharding.
        """
        if isinstance(sharding, ShardLayout):
            return sharding
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return cls((1,), (device.id,), ((),) * rank)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"A transfer needs arrays placed by NamedSharding, not {type(sharding).__name__}: "
                "place them with podrl.mesh.rules.shardings and jit's out_shardings."
            )
        mesh = cast(Mesh, sharding.mesh)
        names = {name: i for i, name in enumerate(mesh.axis_names)}
        dims: list[tuple[int, ...]] = []
        for entry in (*sharding.spec, *(None,) * (rank - len(sharding.spec))):
            entry = () if entry is None else (entry,) if isinstance(entry, str) else entry
            dims.append(tuple(names[name] for name in entry))
        return cls(tuple(mesh.devices.shape), _mesh_ids(mesh), tuple(dims))

    @classmethod
    def abstract(cls, sizes: Mapping[str, int], spec: Spec, rank: int, *, first_id: int = 0) -> "ShardLayout":
        """Builds a layout on a mesh that need not exist: axes of `sizes`, device ids counted from `first_id`."""
        names = {name: i for i, name in enumerate(sizes)}
        entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
        dims = [tuple(names[name] for name in e) for e in entries] + [()] * (rank - len(entries))
        count = math.prod(sizes.values())
        return cls(tuple(sizes.values()), tuple(range(first_id, first_id + count)), tuple(dims))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns the number of blocks that each dimension of the array is cut into."""
        return tuple(math.prod(self.mesh_shape[axis] for axis in axes) for axes in self.dims)

    def blocks(self) -> Int[np.ndarray, "W i"]:
        """Returns, for each device in mesh order, the index of its block along every dimension of the array."""
        return _block_table(self.mesh_shape, self.dims)


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """Shape, dtype and sharding of a leaf that need not exist, so that a plan can be made without devices."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: "Sharding | ShardLayout"


@dataclasses.dataclass(frozen=True, eq=False)
class LeafPlan:
    """The plan to move one leaf: each of its boxes goes from a source shard to a target shard.

    Attributes:
      path: place of the leaf in the tree, for messages.
      shape: global shape.
      source_dtype: dtype before the move.
      target_dtype: dtype during the move and after it.
      source: layout before the move.
      target: layout after the move.
      box: shape of one box of the common grid.
      source_slots: number of boxes along each dimension of a source shard.
      target_slots: number of boxes along each dimension of a target shard.
      source_WM: position, in mesh order, of the source device from which target device w reads the box for its slot m
        (slots row-major).
      slot_WM: slot of the same box in the source device's shard.
      parts: number of parts that each box is split into so that a part fits a bucket; 1 for most leaves.
      part_axis: dimension that is split into parts.
      part_size: extent of a part along `part_axis`; the last part may overlap the part before it.
    """

    path: str
    shape: tuple[int, ...]
    source_dtype: np.dtype
    target_dtype: np.dtype
    source: ShardLayout
    target: ShardLayout
    box: tuple[int, ...]
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    source_WM: Int[np.ndarray, "W M"]
    slot_WM: Int[np.ndarray, "W M"]
    parts: int
    part_axis: int
    part_size: int

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.target_dtype.itemsize

    @property
    def staged_bytes(self) -> int:
        """Returns the bytes that one device stages for one part: all slots of a shard, on the side with more slots."""
        slots = max(math.prod(self.source_slots), math.prod(self.target_slots))
        whole = self.box_bytes * slots
        return whole if self.parts == 1 else whole // self.box[self.part_axis] * self.part_size

    @property
    def part_box(self) -> tuple[int, ...]:
        """Returns the shape of the array that is sent for a slot: a box, or a part of a box."""
        box = list(self.box)
        if self.parts > 1:
            box[self.part_axis] = self.part_size
        return tuple(box)

    def part_start(self, part: int) -> int:
        """Returns the index along `part_axis` at which a part begins inside its box."""
        return min(part * self.part_size, self.box[self.part_axis] - self.part_size)

    def corners(self) -> Int[np.ndarray, "W M i"]:
        """Returns, for each slot of each target device, the start of its box inside the source shard."""
        # The slots of a source shard number its boxes row-major.
        index_WMi = np.stack(np.unravel_index(self.slot_WM, self.source_slots or (1,)), axis=-1)[..., : len(self.box)]
        return index_WMi * np.array(self.box, np.int64)

    @property
    def casts(self) -> bool:
        return self.source_dtype != self.target_dtype

    @functools.cached_property
    def stays(self) -> bool:
        """Returns True if the leaf need not move: same blocks on the same devices in the same dtype."""
        (source, target) = self.source, self.target
        if self.casts or (source.device_ids, source.cuts) != (target.device_ids, target.cuts):
            return False
        return np.array_equal(source.blocks(), target.blocks())


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that move together: several whole leaves at once, or one leaf part after part.

    Attributes:
      leaves: positions of the leaves in `TransferPlan.leaves`.
      parts: number of parts of the bucket's only leaf; the parts fill the bucket one after the other. 1 if leaves are
        not split.
      bytes: bytes that one device stages for the bucket, or for one of its parts.
    """

    leaves: tuple[int, ...]
    parts: int
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """The plan to move a whole tree, leaf by leaf in buckets.

    Attributes:
      treedef: structure of the tree.
      leaves: plans of the leaves, in flattening order.
      buckets: the buckets, in the order in which they move.
      bucket_bytes: bound on the bytes that one device stages for a bucket. Up to `Transport.in_flight` buckets are
        staged at once.
    """

    treedef: Any
    leaves: tuple[LeafPlan, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    def unsplit(self) -> "TransferPlan":
        """Returns the plan for a transport that stages no boxes: every leaf moves whole."""
        return dataclasses.replace(self, buckets=tuple(dataclasses.replace(b, parts=1) for b in self.buckets))

    @property
    def source_bytes(self) -> int:
        """Returns the bytes of the tree before the move, each value counted once."""
        return sum(math.prod(leaf.shape) * leaf.source_dtype.itemsize for leaf in self.leaves)

    @property
    def target_bytes(self) -> int:
        """Returns the bytes of the tree after the move, all replicas counted."""
        return sum(leaf.box_bytes * leaf.source_WM.size for leaf in self.leaves)

    @functools.cached_property
    def links(self) -> Int[np.ndarray, "E 3"]:
        """Returns (source id, target id, bytes) of every pair of different devices that bytes move between."""
        by_place: dict[tuple[ShardLayout, ShardLayout], list[LeafPlan]] = {}
        for leaf in self.leaves:
            place = (dataclasses.replace(leaf.source, dims=()), dataclasses.replace(leaf.target, dims=()))
            by_place.setdefault(place, []).append(leaf)
        rows: dict[tuple[int, int], int] = {}
        for (source, target), leaves in by_place.items():
            sources, targets = len(source.device_ids), len(target.device_ids)
            bytes_E = np.zeros(targets * sources, np.int64)
            for leaf in leaves:
                edge_WM = np.arange(targets)[:, None] * sources + leaf.source_WM
                bytes_E += np.bincount(edge_WM.ravel(), minlength=bytes_E.size) * leaf.box_bytes
            for edge in np.flatnonzero(bytes_E):
                pair = source.device_ids[edge % sources], target.device_ids[edge // sources]
                if pair[0] != pair[1]:
                    rows[pair] = rows.get(pair, 0) + int(bytes_E[edge])
        return np.array([(*pair, size) for pair, size in sorted(rows.items())], np.int64).reshape(-1, 3)

    @property
    def moved_bytes(self) -> int:
        """Returns the number of bytes that move from one device to another."""
        return int(self.links[:, 2].sum())

    @property
    def largest_bucket(self) -> int:
        """Returns the bytes that one device stages for the largest bucket."""
        return max((bucket.bytes for bucket in self.buckets), default=0)

    def seconds(self, bandwidth: float) -> float:
        """Estimates the seconds of a move.

        Args:
          bandwidth: bytes per second that one device can send and, at the same time, receive.
        """
        busiest = [int(np.bincount(_dense(id_E), self.links[:, 2]).max(initial=0)) for id_E in self.links.T[:2]]
        return max(busiest) / bandwidth

    def explain(self, bandwidth: float) -> str:
        """Describes the plan in words: bytes per link, largest bucket, expected seconds.

        Args:
          bandwidth: bytes per second that one device can send and, at the same time, receive.
        """
        links = self.links
        lines = [
            f"{len(self.leaves)} leaves, {_size(self.source_bytes)} before, {_size(self.target_bytes)} after with "
            f"replicas; {_size(self.moved_bytes)} change device over {len(links)} links",
            f"{sum(b.parts for b in self.buckets)} buckets, largest {_size(self.largest_bucket)} per device "
            f"(bound {_size(self.bucket_bytes)})",
            f"expected {self.seconds(bandwidth):.4g} s at {bandwidth / 1e9:g} GB/s per device",
        ]
        if len(links) <= 32:
            lines += [f"  device {a} -> {b}: {_size(n)}" for a, b, n in links.tolist()]
        else:
            low, mid, high = np.percentile(links[:, 2], [0, 50, 100])
            lines.append(f"  per link: least {_size(low)}, median {_size(mid)}, most {_size(high)}")
        return "\n".join(lines)


def default_bucket_bytes(targets: Sequence[Sharding], sources: Sequence[Sharding] = ()) -> int:
    """Returns the bytes that a device may stage for one bucket, by platform of the targets.

    Give `sources` only if this process can address all devices of both meshes.
    """
    if sources and in_one_memory(sources, targets):
        return _IN_PLACE_BUCKET_BYTES
    platform = next(iter(targets[0].device_set)).platform if targets else ""
    return _BUCKET_BYTES.get(platform, DEFAULT_BUCKET_BYTES)


def in_one_memory(sources: Sequence[Sharding], targets: Sequence[Sharding]) -> bool:
    """Returns True if all devices of the shardings are CPUs of this process."""
    devices = {device for sharding in (*sources, *targets) for device in sharding.device_set}
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


def named(sharding: Any) -> NamedSharding:
    """Returns a NamedSharding unchanged, and a SingleDeviceSharding as a NamedSharding over a mesh of one device."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return NamedSharding(Mesh(np.array([device]), ("data",)), Spec())
    return sharding


def make_plan(
    source: PyTree,
    target: PyTree,
    *,
    dtype: DTypeLike | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    paths: Sequence[str] | None = None,
) -> TransferPlan:
    """Plans the move of the tree `source` to the shardings in `target`; recent plans are cached.

    Args:
      source: tree of arrays, of ShapeDtypeStructs with shardings, or of `PlacedLeaf`.
      target: tree of the same structure whose leaves are shardings or `ShardLayout`s.
      dtype: type that floating-point leaves are cast to before they move; None keeps their type. Other leaves are never
        cast.
      bucket_bytes: bound on the bytes that a device stages for a bucket.
      paths: names of the leaves in messages; None to use their places in `source`.

    Raises:
      ValueError: the trees have different structures, a dimension of a leaf does not divide into its shards, or a leaf
        has a sharding of another kind than NamedSharding or SingleDeviceSharding.
    """
    leaves, treedef = jax.tree.flatten(source)
    targets, target_treedef = jax.tree.flatten(target)
    if treedef != target_treedef:
        raise ValueError(
            f"Source and target trees differ: {treedef} against {target_treedef}; give one sharding per leaf."
        )
    key = (
        treedef,
        tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves),
        tuple(targets),
        None if dtype is None else np.dtype(dtype),
        bucket_bytes,
        None if paths is None else tuple(paths),
    )
    if key in _cache:
        _cache.move_to_end(key)
        return _cache[key]
    if paths is None:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(source)[0]]
    plans = tuple(
        _plan_leaf(paths[i], leaf, targets[i], target_dtype_of(leaf.dtype, dtype), i, bucket_bytes)
        for i, leaf in enumerate(leaves)
    )
    plan = TransferPlan(treedef, plans, _buckets(plans, bucket_bytes), bucket_bytes)
    _cache[key] = plan
    if len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return plan


_cache: OrderedDict[object, TransferPlan] = OrderedDict()


def target_dtype_of(dtype: DTypeLike, wanted: DTypeLike | None) -> np.dtype:
    dtype = np.dtype(dtype)
    return np.dtype(wanted) if wanted is not None and jax.dtypes.issubdtype(dtype, np.floating) else dtype


@functools.lru_cache(maxsize=256)
def _mesh_ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


@functools.lru_cache(maxsize=1024)
def _block_table(mesh_shape: tuple[int, ...], dims: tuple[tuple[int, ...], ...]) -> Int[np.ndarray, "W i"]:
    coords_aW = np.indices(mesh_shape).reshape(len(mesh_shape), -1)
    out_Wi = np.zeros((coords_aW.shape[1], len(dims)), np.int64)
    for d, axes in enumerate(dims):
        for axis in axes:
            out_Wi[:, d] = out_Wi[:, d] * mesh_shape[axis] + coords_aW[axis]
    return out_Wi


def row_major(index: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Computes the row-major number of each multi-index in the last axis of `index`; 0 if there are no dimensions."""
    out = np.zeros(index.shape[:-1], np.int64)
    for d, size in enumerate(sizes):
        out = out * size + index[..., d]
    return out


def _plan_leaf(path: str, leaf: Any, target: Any, dtype: np.dtype, turn: int, bucket_bytes: int) -> LeafPlan:
    shape = tuple(leaf.shape)
    source, target = ShardLayout.of(leaf.sharding, len(shape)), ShardLayout.of(target, len(shape))
    for side, layout in (("source", source), ("target", target)):
        for d, (size, cuts) in enumerate(zip(shape, layout.cuts, strict=True)):
            if size % cuts:
                raise ValueError(
                    f"Leaf {path} of shape {shape} does not fit the {side} mesh: dimension {d} of size {size} does not "
                    f"divide into {cuts} shards; change the mesh, or replicate it as podrl.mesh.rules.spec_for does."
                )
    pairs = list(zip(source.cuts, target.cuts, strict=True))
    grid = [math.lcm(s, t) for s, t in pairs]
    box = tuple(size // g for size, g in zip(shape, grid, strict=True))
    source_slots = tuple(g // s for g, (s, _) in zip(grid, pairs, strict=True))
    target_slots = tuple(g // t for g, (_, t) in zip(grid, pairs, strict=True))
    source_WM, slot_WM = _reads(source, target, source_slots, target_slots, turn)
    staged = math.prod(box) * dtype.itemsize * max(math.prod(source_slots), math.prod(target_slots))
    axis, parts, size = _split(box, -(-staged // bucket_bytes))
    return LeafPlan(
        path,
        shape,
        np.dtype(leaf.dtype),
        dtype,
        source,
        target,
        box,
        source_slots,
        target_slots,
        source_WM,
        slot_WM,
        parts=parts,
        part_axis=axis,
        part_size=size,
    )


def _reads(
    source: ShardLayout, target: ShardLayout, source_slots: tuple[int, ...], target_slots: tuple[int, ...], turn: int
) -> tuple[Int[np.ndarray, "W M"], Int[np.ndarray, "W M"]]:
    """Computes, for every slot of every target device, which source device to read and which slot of its shard.

    A device reads a block from itself if it holds the block. The other reads of the block go to its holders in turn, so
    that replicas send equal shares; `turn` is the replica that begins.
    """
    rank = len(source_slots)
    slot_Mi = np.indices(target_slots).reshape(rank, math.prod(target_slots)).T
    box_WMi = target.blocks()[:, None, :] * np.array(target_slots, np.int64) + slot_Mi
    per_source_i = np.array(source_slots, np.int64)
    slot_WM = row_major(box_WMi % per_source_i, source_slots)
    block_WM = row_major(box_WMi // per_source_i, source.cuts)

    block_W = row_major(source.blocks(), source.cuts)
    holders_bU = np.argsort(block_W, kind="stable").reshape(math.prod(source.cuts), -1)
    replicas = holders_bU.shape[1]
    if replicas == 1:
        return holders_bU[block_WM, 0], slot_WM

    order = np.argsort(block_WM, axis=None, kind="stable")
    sorted_block = block_WM.ravel()[order]
    first = np.searchsorted(sorted_block, sorted_block)
    turn_WM = np.empty(block_WM.size, np.int64)
    turn_WM[order] = np.arange(block_WM.size) - first
    chosen_WM = holders_bU[block_WM, (turn_WM.reshape(block_WM.shape) + turn) % replicas]
    source_ids, target_ids = np.array(source.device_ids), np.array(target.device_ids)
    if np.intersect1d(source_ids, target_ids).size:
        own_WMU = source_ids[holders_bU[block_WM]] == target_ids[:, None, None]
        own_WM = np.take_along_axis(holders_bU[block_WM], own_WMU.argmax(-1)[..., None], -1)[..., 0]
        chosen_WM = np.where(own_WMU.any(-1), own_WM, chosen_WM)
    return chosen_WM, slot_WM


def _split(box: tuple[int, ...], wanted: int) -> tuple[int, int, int]:
    """Chooses (axis, number of parts, extent of a part) that split a box into at least `wanted` parts, if possible.

    The axis is the first dimension of size `wanted` or more, else the longest dimension.
    """
    if wanted <= 1 or not box:
        return 0, 1, box[0] if box else 1
    axis = next((d for d, n in enumerate(box) if n >= wanted), int(np.argmax(box)))
    size = max(1, box[axis] // wanted)
    return axis, -(-box[axis] // size), size


def _buckets(leaves: Sequence[LeafPlan], bound: int) -> tuple[Bucket, ...]:
    """Fills buckets with leaves in order until the next leaf would not fit; a leaf in parts has its own bucket."""
    buckets: list[Bucket] = []
    open_leaves: list[int] = []
    filled = 0
    for i, leaf in enumerate(leaves):
        if leaf.parts > 1:
            buckets.append(Bucket((i,), leaf.parts, leaf.staged_bytes))
            continue
        if open_leaves and filled + leaf.staged_bytes > bound:
            buckets.append(Bucket(tuple(open_leaves), 1, filled))
            open_leaves, filled = [], 0
        open_leaves.append(i)
        filled += leaf.staged_bytes
    if open_leaves:
        buckets.append(Bucket(tuple(open_leaves), 1, filled))
    return tuple(buckets)


def _dense(id_E: np.ndarray) -> np.ndarray:
    return np.unique(id_E, return_inverse=True)[1]


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} B"
