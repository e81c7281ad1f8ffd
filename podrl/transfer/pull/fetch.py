"""The rollout's side of the pull transport: fetches this process's boxes of the weights from every trainer process."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from podrl.runtime.message import Message
from podrl.runtime.request import ChannelError, LateError
from podrl.transfer.boxes import Joiner, Slots
from podrl.transfer.move import Move, drive
from podrl.transfer.pull.handshake import JsonObject, Reads, Reply, SendRequest, Side, pull_plan
from podrl.transfer.verify import ExpectedLeaves, Ledger, WeightMismatchError
from podrl.types import JaxDevice, Policy, PyTree

_POLL_S = 0.02


class TransferTimeoutError(ChannelError):
    """A version was not offered or did not arrive in time; the message names the trainer process or the last error."""


class VersionGoneError(ChannelError):
    """The trainer no longer holds the requested version; a newer version is available.

    If a rollout host pauses for too long, the leader gives the host up. The host may then meet this error before it
    hears from the leader.
    """


class _AgainError(Exception):
    """The trainer restarted or has forgotten this receiver, which must join again."""


class PullReceiver:
    """Pulls one tree, version after version; the counterpart of `ServedTree`.

    Every process of the rollout cluster makes a receiver and calls `receive` in the same order. Each process pulls the
    boxes that its own devices need; the checksums are compared over the whole rollout mesh.
    """

    def __init__(self, name: str, target: PyTree, send: SendRequest, *, timeout: float = 300.0):
        """Describes the target tree; `receive` sends the requests.

        Args:
          name: name under which the trainer serves the tree.
          target: tree of ShapeDtypeStructs with the shardings and dtypes of the rollout, all on one mesh.
          send: function that sends a request to a trainer process.
          timeout: seconds that a `receive` may take, the wait for the version included.

        Raises:
          ValueError: the leaves lie on several meshes.
        """
        self._name, self._send, self._timeout = name, send, timeout
        flat, treedef = jax.tree_util.tree_flatten_with_path(target)
        leaves = [leaf for _, leaf in flat]
        dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        shapes, self._shardings = [tuple(leaf.shape) for leaf in leaves], [leaf.sharding for leaf in leaves]
        self._target = ExpectedLeaves(treedef, paths, shapes, dtypes, self._shardings, summed_as=dtypes, side="target")
        self._ledger = Ledger(self._target)
        self._joined: _PullPlan | None = None
        self._deadline = 0.0
        if leaves:
            self._side = Side.of(target, dtypes)
            mesh = cast(Mesh, self._shardings[0].mesh)
            self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]

    def receive(self, version: int | None, *, replacing: PyTree | None = None) -> Policy:
        """Pulls the weights of a version from the trainer, and checks that every leaf arrived unchanged.

        Args:
          version: version to pull; the call waits until the trainer offers it. None for the newest version, only on a
            rollout of one process.
          replacing: weights of an earlier policy that nothing uses any more, even if this call fails. The new weights
            take their memory, leaf by leaf. None leaves all earlier policies unchanged.

        Raises:
          VersionGoneError: the trainer no longer holds the version.
          TransferTimeoutError: the version was not offered or did not arrive in time.
          LateError: a trainer process did not answer at all; the error names the process and the request.
          ValueError: trainer and rollout hold different models, or the weights to replace do not fit the target tree.
          WeightMismatchError: a leaf arrived changed, or trainer processes have different checksums for the version.
        """
        if not self._shardings:
            return Policy(params=self._target.tree([]), version=version or 0)
        self._deadline = time.monotonic() + self._timeout
        old = None if replacing is None else self._target.check(replacing, "Weights to replace")
        while True:
            try:
                joined = self._joined = self._joined or self._join()
                version = max(joined.versions) if version is None else version
                leaves, totals = self._pull(joined, version, old)
                break
            except (_AgainError, OSError) as error:
                self._joined = None
                if time.monotonic() > self._deadline:
                    raise TransferTimeoutError(
                        f"Version {version} of {self._name!r} did not arrive within {self._timeout:g} s. The last "
                        f"attempt failed with: {error}"
                    ) from error
                time.sleep(_POLL_S)
        self._ledger.enter(version, totals)
        policy = Policy(params=self._target.tree(leaves), version=version)
        self._ledger.verify(policy)
        return policy

    def await_version(self, version: int) -> None:
        """Waits until the trainer offers a version or a newer one, and pulls nothing; may be called on any thread.

        Only process 0 is asked: trainer processes compute a version's checksums together, so when process 0 has a
        version, all have it.

        Raises:
          TransferTimeoutError: the version was not offered in time.
          LateError: trainer process 0 did not answer at all.
        """
        if not self._shardings:
            return
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                request = {"op": "await", "tree": self._name, "version": version}
                _PendingRequest(self._send, 0, request, deadline, self._timeout).result()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TransferTimeoutError(
                        f"Version {version} of {self._name!r} was not offered within {self._timeout:g} s. The last "
                        f"attempt failed with: {error}"
                    ) from error
                time.sleep(_POLL_S)

    def verify(self, policy: Policy) -> None:
        """Compares a policy's weights with the checksums that the trainer sent for its version.

        Raises:
          WeightMismatchError: the version was not pulled or is too old, or leaves differ; the error names them.
          ValueError: the weights do not have the structure, shapes, dtypes and shardings of the target tree.
        """
        self._ledger.verify(policy)

    def _call(self, process: int, op: str, /, **fields: object) -> JsonObject:
        return self._start(process, op, **fields).result().value

    def _start(self, process: int, op: str, /, **fields: object) -> "_PendingRequest":
        request = {"op": op, "tree": self._name, **fields}
        return _PendingRequest(self._send, process, request, self._deadline, self._timeout)

    def _join(self) -> "_PullPlan":
        me = {"target": self._side.message(), "process": jax.process_index()}
        first = self._call(0, "join", **me)
        source = Side.read(first["source"])
        replies = {p: first if p == 0 else self._call(p, "join", **me) for p in source.processes}
        return _PullPlan(replies, source, self._side, self._devices, self._shardings)

    def _pull(
        self, joined: "_PullPlan", version: int, replacing: Sequence[Array] | None
    ) -> tuple[list[Array], list[int]]:
        """Pulls a version; returns (leaves, checksum of every leaf as the trainer computed it)."""
        pull = _Pull(joined, version, self._name, self._start)
        leaves = drive(pull, None, replacing=replacing)
        for process, trainer in joined.trainers.items():
            self._call(process, "end", **trainer)
        return leaves, pull.totals


class _PendingRequest:
    """A request to a trainer process; it is repeated while the trainer answers that it has nothing yet."""

    def __init__(self, send: SendRequest, process: int, request: JsonObject, deadline: float, timeout: float):
        self._send, self.process, self._request = send, process, request
        self._deadline, self._timeout = deadline, timeout
        self._reply: Reply = send(process, request)

    def result(self) -> Message:
        """Waits for the reply until the deadline.

        Raises:
          TransferTimeoutError: the trainer process has answered, but does not offer the requested version yet.
          LateError: the trainer process has not answered at all.
          VersionGoneError: the trainer process no longer holds the version.
          ValueError: the trainer process refuses the request as invalid.
          _AgainError: the trainer process does not know this receiver.
        """
        name, request = self._request["tree"], self._request
        what = f"trainer process {self.process}: {request['op']} of {name!r}"
        versions: Sequence[int] | None = None  # versions that the trainer had at its last reply; None before a reply
        while True:
            left = self._deadline - time.monotonic()
            try:
                message = self._reply.wait(max(left, _POLL_S), what)
            except LateError:  # a trainer that had nothing at its last reply may be late with its next reply
                if versions is None:
                    raise
                raise self._not_offered(versions) from None
            reply = message.value
            if "error" in reply:
                raise ValueError(f"Trainer process {self.process} refuses to serve {name!r}: {reply['error']}")
            if "rejoin" in reply:
                raise _AgainError(f"trainer process {self.process} does not know this receiver any more")
            if "gone" in reply:
                raise VersionGoneError(
                    f"Trainer process {self.process} holds versions {_words(reply['gone'])} of {name!r}, not "
                    f"{request['version']}: ask for a newer one, or hold more (grpo.max_staleness, ppo.max_staleness)."
                )
            if "wait" not in reply:
                return message
            versions = reply["wait"]
            if left <= 0:
                raise self._not_offered(reply["wait"])
            time.sleep(_POLL_S)
            self._reply = self._send(self.process, self._request)

    def _not_offered(self, versions: Sequence[int]) -> TransferTimeoutError:
        name, version = self._request["tree"], self._request.get("version", "0 or later")
        return TransferTimeoutError(
            f"Trainer process {self.process} did not offer version {version} of {name!r} within {self._timeout:g} s; "
            f"it holds {_words(versions)}."
        )


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """A bucket that is being pulled.

    Attributes:
      leaves: positions of the bucket's leaves in the plan.
      part: number of the part of the bucket's only leaf; None if leaves move whole.
      requests: (request, requested boxes as (leaf, number of the box)) for each trainer process that has boxes of the
        bucket.
    """

    leaves: Sequence[int]
    part: int | None
    requests: Sequence[tuple[_PendingRequest, Sequence[tuple[int, int]]]]


class _Pull:
    """The transport of one version: `send` requests a bucket's boxes from trainer processes, `land` waits for them.

    Attributes:
      totals: checksum of every leaf, from the first reply; empty before.
    """

    in_flight = 4  # so four replies are encrypted and sent at the same time
    overwrites = False

    def __init__(self, joined: "_PullPlan", version: int, name: str, start: Callable[..., _PendingRequest]):
        self.plan, self.totals = joined.plan, []
        self._joined, self._version, self._name, self._start = joined, version, name, start
        self._numbers = {bucket.leaves: number for number, bucket in enumerate(self.plan.buckets)}

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> _Bucket:
        joined, requests = self._joined, []
        which = {"version": self._version, "bucket": self._numbers[chosen], "part": part or 0}
        for process, trainer in joined.trainers.items():
            keys = [(i, int(k)) for i in chosen for k in joined.mine[process][i]]
            if keys:
                requests.append((self._start(process, "bucket", **trainer, **which), keys))
        return _Bucket(chosen, part, requests)

    def land(self, move: Move, sent: _Bucket) -> None:
        """Waits for a bucket, copies its boxes to all local devices that need them, and joins them into leaves."""
        boxes: dict[tuple[int, int], Array] = {}
        for request, keys in sent.requests:
            message = request.result()
            self._compare(request.process, message.value["totals"])
            arrays = [self._box(i, piece) for (i, _), piece in zip(keys, message.bulk, strict=True)]
            devices = [self._joined.arrival[i][k] for i, k in keys]
            # Boxes are copied even on CPU: an array that borrows numpy's memory must not reach code that donates it.
            boxes.update(zip(keys, jax.device_put(arrays, devices, may_alias=False), strict=True))
        jax.block_until_ready(self._joined.joiner.join(self._joined.spread(sent.leaves, boxes), sent.part, move.out))

    def _box(self, i: int, piece: memoryview) -> np.ndarray:
        leaf = self.plan.leaves[i]
        return np.frombuffer(piece, np.uint8).view(leaf.target_dtype).reshape(leaf.part_box)

    def _compare(self, process: int, totals: Sequence[int]) -> None:
        self.totals += [] if self.totals else totals
        if self.totals != list(totals):
            raise WeightMismatchError(
                f"Trainer process {process} has other checksums than the first process for version {self._version} of "
                f"{self._name!r}: all must offer the same versions in the same order."
            )


class _PullPlan:
    """The plan agreed with the trainers, and each box's source and targets.

    Attributes:
      versions: versions that trainer 0 offered when this process joined.
      trainers: two fields that every request to a trainer process must carry, by process: the session of the process,
        and the number that the process gave this receiver.
      plan: the transfer plan.
      joiner: object that joins pulled boxes into shards.
      mine: numbers of the boxes to pull from a trainer process, by process and leaf.
      arrival: device that each box is pulled to, by leaf and box: the first local device that needs the box.
    """

    def __init__(
        self,
        replies: Mapping[int, JsonObject],
        source: Side,
        target: Side,
        devices: Sequence[JaxDevice],
        shardings: Sequence[NamedSharding],
    ):
        first = replies[min(replies)]
        self.versions: Sequence[int] = first["versions"]
        self.trainers = {p: {"session": str(r["session"]), "receiver": int(r["receiver"])} for p, r in replies.items()}
        self.plan = pull_plan(source, target, int(first["bucket_bytes"]))
        self.joiner = Joiner(self.plan.leaves, devices, shardings)
        self._devices = devices
        positions = target.positions(jax.process_index())
        self._reads = [Reads.of(leaf, positions) for leaf in self.plan.leaves]
        self.mine = {p: [reads.of_process(source.owners, p) for reads in self._reads] for p in self.trainers}
        self.arrival: list[list[JaxDevice]] = []
        for reads in self._reads:
            first_K = np.unique(reads.box_WM, return_index=True)[1]
            self.arrival.append([devices[at // reads.box_WM.shape[1]] for at in first_K.tolist()])

    def spread(self, leaves: Sequence[int], boxes: Mapping[tuple[int, int], Array]) -> Mapping[int, Slots]:
        """Copies the pulled boxes of some leaves to every local device that needs them.

        Args:
          leaves: positions of the leaves.
          boxes: pulled boxes by (leaf, number of the box).

        Returns:
          The boxes by leaf, slot and device, as `Joiner.join` takes them.
        """
        keys = [(i, w, m) for i in leaves for w, m in np.ndindex(self._reads[i].box_WM.shape)]
        pieces = [boxes[i, int(self._reads[i].box_WM[w, m])] for i, w, m in keys]
        away = [n for n, (i, w, m) in enumerate(keys) if self._arrival_of(i, w, m) is not self._devices[w]]
        if away:
            moved = jax.device_put([pieces[n] for n in away], [self._devices[keys[n][1]] for n in away])
            for n, piece in zip(away, moved, strict=True):
                pieces[n] = piece
        slots: dict[int, list[dict[int, Array]]] = {
            i: [{} for _ in range(self._reads[i].box_WM.shape[1])] for i in leaves
        }
        for (i, w, m), piece in zip(keys, pieces, strict=True):
            slots[i][m][self._devices[w].id] = piece
        return slots

    def _arrival_of(self, i: int, w: int, m: int) -> JaxDevice:
        return self.arrival[i][int(self._reads[i].box_WM[w, m])]


def _words(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
