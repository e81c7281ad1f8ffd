"""The trainer's side of the pull transport: keeps the newest versions of the weights and sends them to rollout hosts.

The trainer does not wait for rollout hosts: to offer a version, each device copies its shards in the rollout dtype. The
boxes of a bucket are cut when a process requests them, so a process that dies leaves no state on the trainer.
"""

import itertools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from podrl import offload
from podrl.runtime.message import Message
from podrl.transfer.boxes import Cutter
from podrl.transfer.plan import default_bucket_bytes, target_dtype_of
from podrl.transfer.pull.handshake import JsonObject, Reads, Side, pull_plan
from podrl.transfer.verify import ExpectedLeaves
from podrl.types import PyTree

_RECEIVERS_KEPT = 64


class PullServer:
    """Serves all trees of one trainer process, each as a `ServedTree`.

    Call `answer` on the channel's thread, where requests arrive, and `ServedTree.offer` on the thread that trains.
    """

    def __init__(self, *, lease_s: float = 120.0):
        """Stores the lease; `serve` adds the trees.

        Args:
          lease_s: seconds for which a version is kept after a receiver's last request for it, unless the receiver says
            earlier that it has finished.
        """
        self._session = secrets.token_hex(8)
        self._lease_s = lease_s
        self._trees: dict[str, ServedTree] = {}

    def serve(self, name: str, source: PyTree, **options: Any) -> "ServedTree":
        """Serves a tree under a name; `options` are keyword arguments of `ServedTree`."""
        assert name not in self._trees, name
        self._trees[name] = ServedTree(source, lease_s=self._lease_s, **options)
        return self._trees[name]

    def answer(self, request: Message) -> Message:
        """Answers a request of a `PullReceiver`; the answer to an invalid request is {'error': reason}."""
        reply = self._answer(request.value)
        return reply if isinstance(reply, Message) else Message(reply)

    def _answer(self, request: JsonObject) -> Message | JsonObject:
        try:
            # A receiver may send requests before the trainer serves the first tree.
            if (tree := self._trees.get(str(request["tree"]))) is None:
                return {"wait": []}
            if request["op"] == "await":
                known = tree.versions
                return {} if max(known, default=-1) >= int(request["version"]) else {"wait": known}
            if request["op"] == "join":
                reply = tree.join(Side.read(request["target"]), int(request["process"]))
                return {"session": self._session, **reply} if reply["versions"] else {"wait": []}
            if request["session"] != self._session:
                return {"rejoin": True}
            receiver = int(request["receiver"])
            if request["op"] == "end":
                return tree.end(receiver)
            return tree.bucket(receiver, int(request["version"]), int(request["bucket"]), int(request["part"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


class _Version:
    """A version that receivers may pull: its leaves, their checksums, and for each receiver the end of its lease."""

    def __init__(self, leaves: Sequence[Array], totals: list[int]):
        self.leaves, self.totals = leaves, totals
        self.leases: dict[int, float] = {}


class _Receiver:
    """A process that pulls weights: the plan for its layout, and the boxes of each leaf that are sent from here."""

    def __init__(self, source: Side, target: Side, process: int, mesh: Mesh, bucket_bytes: int):
        self.target, self.process = target, process
        here = jax.process_index()
        local = [device for device in mesh.devices.flat if device.process_index == here]
        self.plan = pull_plan(source, target, bucket_bytes)
        self.cutter = Cutter(self.plan.leaves, local)
        ids = [device.id for device in mesh.devices.flat]
        positions = target.positions(process)
        self.wanted: list[list[tuple[int, int]]] = []
        for leaf in self.plan.leaves:
            reads = Reads.of(leaf, positions)
            mine_k = reads.of_process(source.owners, here)
            rows = zip(reads.slot_K[mine_k].tolist(), reads.source_K[mine_k].tolist(), strict=True)
            self.wanted.append([(slot, ids[position]) for slot, position in rows])


class ServedTree:
    """Serves one tree to rollout processes; every trainer process offers the same versions in the same order."""

    def __init__(
        self,
        source: PyTree,
        *,
        target_dtype: DTypeLike | None = None,
        keep: int = 1,
        bucket_bytes: int | None = None,
        lease_s: float = 120.0,
    ):
        """Describes the source tree; `offer` makes the versions that receivers pull.

        Args:
          source: tree of the parameters, or of ShapeDtypeStructs with their shardings; all on one mesh.
          target_dtype: type that floating-point leaves are cast to before they move; None keeps their type.
          keep: number of versions that are kept for late receivers, including a version that is being copied. A version
            takes the tree's size in the target dtype, spread over the trainer mesh.
          bucket_bytes: bound on the bytes that a device stages for a bucket; None chooses it by platform.
          lease_s: seconds for which a version is kept after a receiver's last request for it.

        Raises:
          ValueError: the leaves lie on several meshes.
        """
        self._keep, self._lease_s = keep, lease_s
        flat, treedef = jax.tree_util.tree_flatten_with_path(source)
        leaves = [leaf for _, leaf in flat]
        shapes, shardings = [tuple(leaf.shape) for leaf in leaves], [leaf.sharding for leaf in leaves]
        after = [target_dtype_of(leaf.dtype, target_dtype) for leaf in leaves]
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        before = [leaf.dtype for leaf in leaves]
        self._source = ExpectedLeaves(treedef, paths, shapes, before, shardings, summed_as=after, side="source")
        self._lock = threading.Lock()
        self._versions: OrderedDict[int, _Version] = OrderedDict()
        self._pinned: int | None = None
        self._receivers: OrderedDict[int, _Receiver] = OrderedDict()
        self._numbers = itertools.count()
        if not leaves:
            return
        self._mesh = cast(Mesh, shardings[0].mesh)
        self._side = Side.of(source, after)
        self._bucket_bytes = bucket_bytes or default_bucket_bytes(shardings)
        self._copy: Callable[[Sequence[Array]], Sequence[Array]] = jax.jit(
            lambda leaves: [jnp.copy(x).astype(dtype) for x, dtype in zip(leaves, after, strict=True)],
            out_shardings=shardings,
        )

    def offer(self, params: PyTree, version: int, *, donate: bool = False, lasting: bool = False) -> None:
        """Makes a version of the parameters available to receivers.

        Args:
          params: the trainer's parameters, with the shardings of `source`.
          version: number of the weights; the same on every process.
          donate: True to delete each leaf of `params` after it has been copied; no effect with `lasting`.
          lasting: True if the caller never changes or donates these arrays, such as a frozen base. They are then served
            without a copy, and cast when a bucket is cut.

        Raises:
          ValueError: the parameters do not have the structure, shapes, dtypes and shardings of `source`.
          WeightMismatchError: replicas of a leaf differ.
        """
        leaves = self._source.check(params, "Parameters")
        if leaves:
            totals = self._source.totals(self._source.sums(offload.on_devices(leaves)), version)
            with self._lock:
                self._trim(version)
            entry = _Version(leaves if lasting else self._copy(leaves), totals)
            with self._lock:
                self._versions[version] = entry
                self._versions.move_to_end(version)
            if donate and not lasting:
                jax.tree.map(lambda x: x.delete(), leaves)

    def hold(self, version: int) -> None:
        """Keeps a version in addition to the `keep` newest versions, until `hold` is called for another version.

        Some receivers, such as evaluation hosts, may pull the version long after it was offered.

        Raises:
          ValueError: other versions are offered, but this one is not.
        """
        with self._lock:
            if self._versions and version not in self._versions:
                raise ValueError(f"Version {version} cannot be held: there are {list(self._versions)}.")
            self._pinned = version

    def join(self, target: Side, process: int) -> JsonObject:
        """Registers a receiver; returns its number, the source's description, the bucket size and the versions."""
        with self._lock:
            same = (r for r in self._receivers.values() if (r.target, r.process) == (target, process))
            receiver = next(same, None) or _Receiver(self._side, target, process, self._mesh, self._bucket_bytes)
            number = next(self._numbers)
            self._receivers[number] = receiver
            if len(self._receivers) > _RECEIVERS_KEPT:
                self._receivers.popitem(last=False)
            return {
                "receiver": number,
                "source": self._side.message(),
                "bucket_bytes": self._bucket_bytes,
                "versions": list(self._versions),
            }

    def bucket(self, number: int, version: int, bucket: int, part: int) -> Message | JsonObject:
        """Cuts one bucket of a version for a receiver.

        Args:
          number: number of the receiver.
          version: version to cut.
          bucket: number of the bucket in the plan.
          part: number of the part, if the bucket is one large leaf that moves in parts; 0 if leaves move whole.

        Returns:
          A message with the boxes as bulk and the checksums of all leaves. If the bucket cannot be sent, a mapping with
          the key 'rejoin' if the receiver is unknown, 'wait' if the version is not offered yet, or 'gone' if it is
          no longer offered.
        """
        with self._lock:
            if (receiver := self._receivers.get(number)) is None:
                return {"rejoin": True}
            self._receivers.move_to_end(number)
            if (entry := self._versions.get(version)) is None:
                known = list(self._versions)
                return {"gone": known} if known and version < max(known) else {"wait": known}
            entry.leases[number] = time.monotonic() + self._lease_s
            chosen = receiver.plan.buckets[bucket]
            leaves = {i: offload.on_devices(entry.leaves[i]) for i in chosen.leaves}
            boxes = receiver.cutter.cut(leaves, chosen.leaves, part if chosen.parts > 1 else None)
            arrays = [boxes[i][slot][device] for i in chosen.leaves for slot, device in receiver.wanted[i]]
        with jax.transfer_guard_device_to_host("allow"):
            on_host = jax.device_get(arrays)
        return Message({"totals": entry.totals}, bulk=[as_bytes(array) for array in on_host])

    def end(self, number: int) -> JsonObject:
        """Ends the leases of a receiver that has finished its pull."""
        with self._lock:
            for entry in self._versions.values():
                entry.leases.pop(number, None)
            self._trim()
        return {}

    @property
    def versions(self) -> list[int]:
        """Lists the versions that can be pulled, oldest first."""
        return list(self._versions)

    def _trim(self, coming: int | None = None) -> None:
        """Drops the oldest versions beyond the `keep` newest, unless a receiver is pulling them or `hold` keeps them.

        Args:
          coming: version that is about to be offered and counts as one of the newest; None for no new version.
        """
        now = time.monotonic()
        droppable = [version for version in self._versions if version not in (coming, self._pinned)]
        room = self._keep - (coming is not None)
        for version in droppable[: max(len(droppable) - room, 0)]:
            if all(until < now for until in self._versions[version].leases.values()):
                del self._versions[version]


def as_bytes(array: np.ndarray) -> memoryview:
    """Returns a view of an array's memory as bytes, for an array of any dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
