"""The rollout's side of the pull transport: asks every trainer process for the boxes its own devices need."""

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array

from podrl.mesh.reshard.ends import Joiner, Slots
from podrl.mesh.reshard.handshake import Ask, Message, Reads, Side, pull_plan
from podrl.mesh.reshard.ledger import Expected, Ledger, WeightMismatchError
from podrl.mesh.reshard.peer import Peer, TransferTimeoutError
from podrl.mesh.reshard.programs import give_up
from podrl.types import Policy, PyTree

IN_FLIGHT = 2
_POLL_S = 0.02


class VersionGoneError(RuntimeError):
    """The trainer does not hold the version any more; a newer one can be had."""


class _AgainError(Exception):
    """The trainer restarted or forgot this receiver: join once more."""


class PullReceiver:
    """Pulls one tree, version after version; the counterpart of `PullPublisher`.

    Every process of the rollout cluster makes one and calls `publish` in the same order; each pulls what its own
    devices hold, and the checksums are compared over the whole rollout mesh.
    """

    def __init__(self, name: str, target: PyTree, peer: Peer, ask: Ask, *, timeout: float = 300.0):
        """Args:
          name: which of the trainer's trees.
          target: ShapeDtypeStructs with the shardings and dtypes of the rollout, all on one mesh.
          peer: this process's transfer sockets, shared by its receivers.
          ask: the channel to the trainer processes.
          timeout: seconds a `publish` may take, waiting for the version included.

        Raises:
          ValueError: leaves on several meshes.
        """
        self._name, self._peer, self._ask_process, self._timeout = name, peer, ask, timeout
        flat, treedef = jax.tree_util.tree_flatten_with_path(target)
        leaves = [leaf for _, leaf in flat]
        dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        shapes, self._shardings = [tuple(leaf.shape) for leaf in leaves], [leaf.sharding for leaf in leaves]
        self._target = Expected(treedef, paths, shapes, dtypes, self._shardings, summed_as=dtypes, side="target")
        self._ledger = Ledger(self._target)
        self._joined: _Joined | None = None
        self._deadline = 0.0
        if leaves:
            self._side = Side.of(target, dtypes)
            mesh = cast(Mesh, self._shardings[0].mesh)
            self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]

    def publish(
        self, params: None, version: int | None, *, donate: bool = False, replacing: PyTree | None = None
    ) -> Policy:
        """The weights of a version, pulled from the trainer and compared with what was published there.

        Args:
          params: None; they are the trainer's.
          version: the one wanted, waited for if it is not there yet; None for the newest, on a rollout of one process.
          donate: means nothing here.
          replacing: as of `Publisher.publish`.

        Raises:
          VersionGoneError: the trainer has gone on and does not hold it any more.
          TransferTimeoutError: not in time; names the trainer process and the stage.
          ValueError: trainer and rollout hold different models.
          WeightMismatchError: a leaf arrived changed.
        """
        assert params is None, "a rollout process publishes nothing"
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
                self._leave()
                if time.monotonic() > self._deadline:
                    raise TransferTimeoutError(
                        f"Version {version} of {self._name!r} did not come within {self._timeout:g} s; last: {error}"
                    ) from error
                time.sleep(_POLL_S)
        self._ledger.enter(version, totals)
        policy = Policy(params=self._target.tree(leaves), version=version)
        self._ledger.verify(policy)
        return policy

    def verify(self, policy: Policy) -> None:
        """As `Publisher.verify`."""
        self._ledger.verify(policy)

    def _ask(self, process: int, op: str, /, **fields: Any) -> Message:
        """The reply of a trainer process, asked again while it has nothing to say yet."""
        request = {"op": op, "tree": self._name, **fields}
        while True:
            left = self._deadline - time.monotonic()
            reply = self._ask_process(process, request, timeout=max(left, _POLL_S))
            if "error" in reply:
                raise ValueError(f"Trainer process {process} refuses to serve {self._name!r}: {reply['error']}")
            if "rejoin" in reply:
                raise _AgainError(f"trainer process {process} does not know this receiver any more")
            if "gone" in reply:
                raise VersionGoneError(
                    f"Trainer process {process} holds versions {_words(reply['gone'])} of {self._name!r}, not "
                    f"{fields['version']}: ask for a newer one, or hold more (rollout.max_staleness)."
                )
            if "wait" not in reply:
                return reply
            if left <= 0:
                raise TransferTimeoutError(
                    f"Trainer process {process} did not publish version {fields.get('version', '0 or later')} of "
                    f"{self._name!r} within {self._timeout:g} s; it holds {_words(reply['wait'])}."
                )
            time.sleep(_POLL_S)
            request.pop("done", None)

    def _join(self) -> "_Joined":
        me = {"target": self._side.message(), "process": jax.process_index()}
        first = self._ask(0, "join", **me)
        while not first["versions"]:
            if time.monotonic() > self._deadline:
                raise TransferTimeoutError(
                    f"Trainer process 0 published nothing of {self._name!r} within {self._timeout:g} s."
                )
            time.sleep(_POLL_S)
            first = self._ask(0, "join", **me)
        source = Side.read(first["source"])
        replies = {p: first if p == 0 else self._ask(p, "join", **me) for p in source.processes}
        return _Joined(replies, source, self._side, self._devices)

    def _leave(self) -> None:
        if self._joined is not None:
            for trainer in self._joined.trainers.values():
                self._peer.forget(trainer.address)
        self._joined = None

    def _pull(
        self, joined: "_Joined", version: int, replacing: Sequence[Array] | None
    ) -> tuple[list[Array], list[int]]:
        """All leaves of a version, bucket by bucket, at most two of them staged; and the checksums told with them."""
        out: list[Any] = [None] * len(joined.plan.leaves)
        flying: deque[_Flight] = deque()
        totals: list[int] = []
        for bucket, chosen in enumerate(joined.plan.buckets):
            for part in range(chosen.parts):
                if len(flying) == IN_FLIGHT:
                    self._land(joined, flying.popleft(), out, replacing)
                flying.append(self._take_off(joined, version, bucket, part, totals))
        while flying:
            self._land(joined, flying.popleft(), out, replacing)
        for process, trainer in joined.trainers.items():
            self._ask(process, "end", done=trainer.take_done(), session=trainer.session, receiver=trainer.receiver)
        return joined.joiner.finish(out, self._shardings), totals

    def _take_off(self, joined: "_Joined", version: int, bucket: int, part: int, totals: list[int]) -> "_Flight":
        """Asks for a bucket and starts pulling it; the first reply fills in the checksums."""
        chosen = joined.plan.buckets[bucket]
        boxes: dict[tuple[int, int], Array] = {}
        flight = _Flight(chosen.leaves, part if chosen.parts > 1 else None, boxes)
        for process, trainer in joined.trainers.items():
            keys = [(i, int(k)) for i in chosen.leaves for k in joined.mine[process][i]]
            if not keys:
                continue
            reply = self._ask(
                process,
                "offer",
                session=trainer.session,
                receiver=trainer.receiver,
                version=version,
                bucket=bucket,
                part=part,
                done=trainer.take_done(),
            )
            shapes = [
                jax.ShapeDtypeStruct(
                    joined.plan.leaves[i].part_box,
                    joined.plan.leaves[i].target_dtype,
                    sharding=SingleDeviceSharding(joined.landing[i][k]),
                )
                for i, k in keys
            ]
            pulled = self._peer.pull(trainer.address, reply["number"], shapes)
            boxes.update(zip(keys, pulled, strict=True))
            flight.offers.append((process, reply["number"]))
            totals += [] if totals else reply["totals"]
            if totals != list(reply["totals"]):
                raise WeightMismatchError(
                    f"Trainer process {process} tells other checksums than the first for version {version} of "
                    f"{self._name!r}: all must publish the same versions in the same order."
                )
        return flight

    def _land(self, joined: "_Joined", flight: "_Flight", out: list[Any], replacing: Sequence[Array] | None) -> None:
        """Waits for a bucket, hands its boxes to all devices that want them, and puts them together."""
        who = f"Pulling {self._name!r} from trainer process {', '.join(str(p) for p, _ in flight.offers)}"
        self._peer.wait(list(flight.boxes.values()), self._deadline, who)
        for process, number in flight.offers:
            joined.trainers[process].done.append(number)
        give_up(replacing, flight.leaves)
        joined.joiner.join(joined.spread(flight), flight.part, out)
        jax.block_until_ready([out[i] for i in flight.leaves])


@dataclasses.dataclass
class _Flight:
    """A bucket on its way: its leaves, its part, the pulled boxes by (leaf, number), and whose offers they are."""

    leaves: Sequence[int]
    part: int | None
    boxes: dict[tuple[int, int], Array]
    offers: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Trainer:
    """A trainer process: where it serves, what it calls this receiver, and which offers it may let go."""

    address: str
    session: str
    receiver: int
    done: list[int] = dataclasses.field(default_factory=list)

    def take_done(self) -> list[int]:
        done, self.done = self.done, []
        return done


class _Joined:
    """What follows from the trainers' replies: the plan and where each box comes from and goes to.

    Attributes:
      trainers: by process.
      mine: for each trainer process and leaf the numbers of the boxes it offers.
      landing: for each leaf and box the device it is pulled to, the first of those that want it.
    """

    def __init__(self, replies: Mapping[int, Message], source: Side, target: Side, devices: Sequence[Any]):
        first = replies[min(replies)]
        self.versions: Sequence[int] = first["versions"]
        self.trainers = {
            p: _Trainer(str(r["address"]), str(r["session"]), int(r["receiver"])) for p, r in replies.items()
        }
        self.plan = pull_plan(source, target, int(first["bucket_bytes"]))
        self.joiner = Joiner(self.plan.leaves, devices)
        self._devices = devices
        positions = target.positions(jax.process_index())
        self._reads = [Reads.of(leaf, positions) for leaf in self.plan.leaves]
        self.mine = {p: [reads.of_process(source.owners, p) for reads in self._reads] for p in self.trainers}
        self.landing: list[list[Any]] = []
        for reads in self._reads:
            first_K = np.unique(reads.box_WM, return_index=True)[1]
            self.landing.append([devices[at // reads.box_WM.shape[1]] for at in first_K.tolist()])

    def spread(self, flight: _Flight) -> Mapping[int, Slots]:
        """The boxes of a bucket on every local device that wants them, slot by slot."""
        keys = [(i, w, m) for i in flight.leaves for w, m in np.ndindex(self._reads[i].box_WM.shape)]
        pieces = [flight.boxes[i, int(self._reads[i].box_WM[w, m])] for i, w, m in keys]
        away = [n for n, (i, w, m) in enumerate(keys) if self._landing_of(i, w, m) is not self._devices[w]]
        if away:
            moved = jax.device_put([pieces[n] for n in away], [self._devices[keys[n][1]] for n in away])
            for n, piece in zip(away, moved, strict=True):
                pieces[n] = piece
        slots: dict[int, list[dict[int, Array]]] = {
            i: [{} for _ in range(self._reads[i].box_WM.shape[1])] for i in flight.leaves
        }
        for (i, w, m), piece in zip(keys, pieces, strict=True):
            slots[i][m][self._devices[w].id] = piece
        return slots

    def _landing_of(self, i: int, w: int, m: int) -> Any:
        return self.landing[i][int(self._reads[i].box_WM[w, m])]


def _words(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
