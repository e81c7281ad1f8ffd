"""The messages by which two clusters agree on a pull: the layouts of both, and the boxes that each process pulls.

The device ids of one cluster mean nothing to the other, so the messages name positions in a mesh and the process that
owns each position. From the two descriptions both sides make the same plan.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from podrl.mappings import JsonObject
from podrl.runtime.message import Message
from podrl.transfer.plan import LeafPlan, PlacedLeaf, ShardLayout, TransferPlan, make_plan, row_major
from podrl.types import PyTree


class Reply(Protocol):
    """An answer of a trainer process that has not arrived yet."""

    def wait(self, deadline_s: float, what: str) -> Message:
        """Waits for the answer. If a bucket was requested, the boxes are the answer's bulk (binary buffers).

        Args:
          deadline_s: the longest wait, in seconds.
          what: description of the request, for the error's message.

        Raises:
          ChannelError: no answer within the deadline, or the request was refused.
          OSError: no answer, but the request may be repeated.
        """
        ...


class SendRequest(Protocol):
    """A function that sends a request to a trainer process, where `PullServer.answer` replies, without waiting.

    The channel encrypts the messages and authenticates both ends.
    """

    def __call__(self, process: int, request: JsonObject) -> Reply: ...


@dataclasses.dataclass(frozen=True)
class Side:
    """A tree on the mesh of one cluster, described for another cluster.

    Attributes:
      paths: place of each leaf in the tree.
      shapes: global shape of each leaf.
      dtypes: name of each leaf's dtype on the wire.
      dims: positions of the mesh axes that cut each dimension of each leaf.
      mesh_shape: sizes of the mesh axes.
      owners: process that owns the device at each position of the mesh, row-major.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    mesh_shape: tuple[int, ...]
    owners: tuple[int, ...]

    @classmethod
    def of(cls, tree: PyTree, dtypes: Sequence[np.dtype]) -> "Side":
        """Describes arrays or ShapeDtypeStructs placed by NamedSharding on one mesh.

        Raises:
          ValueError: the leaves lie on several meshes, or the tree has no leaves.
        """
        paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
        meshes = {leaf.sharding.mesh for leaf in leaves}
        if len(meshes) != 1:
            raise ValueError(f"The tree lies on {len(meshes)} meshes: place all leaves of a role on its one mesh.")
        layouts = [ShardLayout.of(leaf.sharding, len(leaf.shape)) for leaf in leaves]
        mesh = cast(Mesh, meshes.pop())
        return cls(
            paths=tuple(map(jax.tree_util.keystr, paths)),
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            dtypes=tuple(np.dtype(dtype).name for dtype in dtypes),
            dims=tuple(layout.dims for layout in layouts),
            mesh_shape=tuple(mesh.devices.shape),
            owners=tuple(device.process_index for device in mesh.devices.flat),
        )

    def message(self) -> JsonObject:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, message: JsonObject) -> "Side":
        """Builds a Side from the result of `message`; lists become tuples again."""
        return cls(**{field.name: _tuples(message[field.name]) for field in dataclasses.fields(cls)})

    @property
    def processes(self) -> list[int]:
        return sorted(set(self.owners))

    def positions(self, process: int) -> list[int]:
        """Lists the mesh positions of a process's devices."""
        return [w for w, owner in enumerate(self.owners) if owner == process]

    def layout(self, leaf: int, first_id: int) -> ShardLayout:
        ids = tuple(range(first_id, first_id + len(self.owners)))
        return ShardLayout(self.mesh_shape, ids, self.dims[leaf])


def pull_plan(source: Side, target: Side, bucket_bytes: int) -> TransferPlan:
    """Makes the transfer plan of a pull; both sides make the same plan.

    In the plan, a source device's id is its position in the source mesh. A target device's id is its position in the
    target mesh plus the number of source devices.

    Raises:
      ValueError: the trees hold different leaves, or a dimension of a leaf does not divide into its shards.
    """
    ours, theirs = (dict(zip(s.paths, zip(s.shapes, s.dtypes, strict=True), strict=True)) for s in (source, target))
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise ValueError(
                f"Leaf {path} is {_words(ours.get(path))} on the trainer and {_words(theirs.get(path))} on the rollout"
                ": start both with the same model, lora and rollout.data_type."
            )
    if source.paths != target.paths:
        raise ValueError(f"Leaves come in the order {source.paths} and {target.paths}: give both sides one tree.")
    before = [
        PlacedLeaf(shape, jax.numpy.dtype(dtype), source.layout(i, 0))
        for i, (shape, dtype) in enumerate(zip(source.shapes, source.dtypes, strict=True))
    ]
    after = [target.layout(i, len(source.owners)) for i in range(len(before))]
    return make_plan(before, after, bucket_bytes=bucket_bytes, paths=source.paths)


@dataclasses.dataclass(frozen=True)
class Reads:
    """The K different boxes of one leaf that one process pulls; each is pulled once, however many devices need it.

    Attributes:
      source_K: position in the source mesh of the device that each box is read from.
      slot_K: slot of the box in that device's shard.
      box_WM: number of the box, below K, for each slot M of the shard of each device W of the process.
    """

    source_K: Int[np.ndarray, " K"]
    slot_K: Int[np.ndarray, " K"]
    box_WM: Int[np.ndarray, "W M"]

    @classmethod
    def of(cls, leaf: LeafPlan, positions: Sequence[int]) -> "Reads":
        """Lists the different boxes that the devices at `positions` of the target mesh need of a leaf."""
        source_WM, slot_WM = leaf.source_WM[positions], leaf.slot_WM[positions]
        block_W = row_major(leaf.source.blocks(), leaf.source.cuts)
        box_WM = block_W[source_WM] * (int(leaf.slot_WM.max()) + 1) + slot_WM
        _, first_K, place = np.unique(box_WM, return_index=True, return_inverse=True)
        return cls(source_WM.ravel()[first_K], slot_WM.ravel()[first_K], place.reshape(box_WM.shape))

    def of_process(self, owners: Sequence[int], process: int) -> Int[np.ndarray, " k"]:
        """Returns the numbers of the boxes that a source process owns; `owners` is `Side.owners` of the source."""
        return np.flatnonzero(np.asarray(owners)[self.source_K] == process)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _words(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
