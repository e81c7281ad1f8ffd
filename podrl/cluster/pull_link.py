"""The weight transfer between separate clusters, for RLCluster: trainers offer versions, rollouts pull them."""

import itertools
from typing import Protocol

from jax.typing import DTypeLike

from podrl.runtime.channel import Channel
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod
from podrl.transfer.pull.fetch import PullReceiver
from podrl.transfer.pull.handshake import JsonObject, Reply
from podrl.transfer.pull.serve import PullServer, ServedTree
from podrl.types import Policy, PyTree

_LANES = 4  # number of connections over which requests take turns


class WeightPublisher(Protocol):
    """The interface of `_Sender`, `_Receiver` and `Publisher`: each of them moves one tree from trainer to rollout."""

    def publish(self, params: PyTree, version: int, *, replacing: PyTree | None = None) -> Policy: ...


class PullLink:
    """This process's end of the weight transfer between clusters.

    Attributes:
      trains: True in a trainer process, which offers weights; False in a rollout process, which pulls them.
    """

    def __init__(self, pod: Pod, *, keep: int, deadline_s: float):
        """Opens a separate endpoint for weights, on the same network interface as the pod's channel.

        Args:
          pod: the job's processes, all of which have joined.
          keep: number of versions that a trainer keeps for rollouts that are late.
          deadline_s: the longest wait of a rollout for a version, in seconds.
        """
        hosts = pod.seat.hosts
        self.trains = pod.seat.process in hosts.trainer
        self._pod, self._keep, self._deadline_s = pod, keep, deadline_s
        host = pod.channel.address.rpartition(":")[0]
        self._channel = Channel(f"{pod.name}, weights", secret=pod.seat.secret, host=host, threads=_LANES)
        self._addresses: dict[int, str] = {}
        self._requests = itertools.count()
        self._server = PullServer() if self.trains else None
        if self._server is not None:
            self._channel.serve("pull", self._server.answer)
            pod.channel.put("weights", Message(self._channel.address))

    def sender(self, name: str, source: PyTree, dtype: DTypeLike, *, lasting: bool = False) -> WeightPublisher:
        """Returns a publisher that offers a tree, in a trainer process.

        Args:
          name: name of the tree, equal on both sides.
          source: tree of arrays or shapes with shardings.
          dtype: type that floating-point leaves are cast to before they move.
          lasting: True if the arrays never change, so that they are served without a copy.
        """
        assert self._server is not None
        return _Sender(self._server.serve(name, source, target_dtype=dtype, keep=self._keep), lasting)

    def receiver(self, name: str, target: PyTree) -> WeightPublisher:
        """Returns a publisher that pulls the tree `name` onto the shardings of `target`, in a rollout process."""
        assert not self.trains
        return _Receiver(PullReceiver(name, target, self._ask, timeout=self._deadline_s))

    def _ask(self, process: int, request: JsonObject) -> Reply:
        if process not in self._addresses:
            trainer = self._pod.seat.hosts.trainer[process]
            self._addresses[process] = self._pod.get(trainer, "weights", self._deadline_s).value
        # Requests take turns on several connections, because each connection is encrypted and sent by its own thread.
        lane = 1 + next(self._requests) % _LANES
        return self._channel.request(self._addresses[process], "call", "pull", Message(request), lane=lane)


class _Sender:
    """The trainer's end of the transfer of one tree; the policies that it returns hold no weights."""

    def __init__(self, tree: ServedTree, lasting: bool):
        self._tree, self._lasting = tree, lasting

    def publish(self, params: PyTree, version: int, *, replacing: PyTree | None = None) -> Policy:
        assert replacing is None, "a trainer process holds no policy"
        self._tree.offer(params, version, lasting=self._lasting)
        return Policy(params={}, version=version)

    def hold(self, version: int) -> None:
        self._tree.hold(version)


class _Receiver:
    """The rollout's end of the transfer of one tree."""

    def __init__(self, receiver: PullReceiver):
        self._receiver = receiver

    def publish(self, params: PyTree, version: int, *, replacing: PyTree | None = None) -> Policy:
        assert params is None, "a rollout process has nothing to send"
        return self._receiver.receive(version, replacing=replacing)

    def await_version(self, version: int) -> None:
        self._receiver.await_version(version)
