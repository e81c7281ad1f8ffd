"""How RLCluster moves weights where trainers and rollouts are separate clusters: rollouts pull, trainers only offer."""

from typing import Any, Protocol

from podrl.mesh.reshard.fetch import PullReceiver
from podrl.mesh.reshard.peer import Peer
from podrl.mesh.reshard.serve import PullPublisher, PullServer
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod
from podrl.types import Policy, PyTree


class WeightPublisher(Protocol):
    """One tree on its way from trainer to rollout, on either side."""

    def publish(self, params: Any, version: int, *, replacing: PyTree | None = None) -> Policy: ...


class PullLink:
    """This process's end of the weights' way between clusters.

    Attributes:
      trains: whether it offers (a trainer process) or pulls.
    """

    def __init__(self, pod: Pod, *, keep: int, deadline_s: float):
        """Opens the data sockets on the interface of the channel.

        Args:
          pod: the job's processes, all there.
          keep: versions a trainer holds for rollouts that are late.
          deadline_s: the longest a rollout waits for a version.
        """
        hosts = pod.seat.hosts
        self.trains = pod.seat.process in hosts.trainer
        self._pod, self._keep, self._deadline_s = pod, keep, deadline_s
        host = pod.channel.address.rpartition(":")[0]
        self._server: PullServer | None = None
        self._peer: Peer | None = None
        if self.trains:
            server = self._server = PullServer(host)
            pod.channel.serve("pull", lambda message: Message(server.answer(message.value)))
        else:
            self._peer = Peer(host)

    def sender(self, name: str, source: PyTree, dtype: Any, *, lasting: bool = False) -> WeightPublisher:
        """Offers a tree; `lasting` for one that never changes."""
        assert self._server is not None
        publisher = self._server.publisher(name, source, target_dtype=dtype, keep=self._keep)
        return _Lasting(publisher) if lasting else publisher

    def receiver(self, name: str, target: PyTree) -> WeightPublisher:
        """Pulls a tree onto the shardings of `target`."""
        assert self._peer is not None
        return PullReceiver(name, target, self._peer, self._ask, timeout=self._deadline_s)  # pyright: ignore[reportReturnType]

    def _ask(self, process: int, request: Any, *, timeout: float) -> Any:
        return self._pod.call(self._pod.seat.hosts.trainer[process], "pull", Message(request), timeout).value


class _Lasting:
    """Offers arrays that stay as they are, without a copy."""

    def __init__(self, publisher: PullPublisher):
        self._publisher = publisher

    def publish(self, params: Any, version: int, *, replacing: PyTree | None = None) -> Policy:
        assert replacing is None, "trainers hold no policy"
        return self._publisher.publish(params, version, lasting=True)
