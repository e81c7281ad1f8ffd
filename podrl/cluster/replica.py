"""A rollout replica over several hosts: the head sends each of its calls to the other hosts, and they repeat the call.

The head schedules, scores and answers the trainers. Before it makes a call that touches the replica's mesh (a move of
weights, a session, a program of the engine), it sends the call to the other hosts, in order; each of them makes the
same call with its own devices. Weights reach every host of a replica in the usual way: each host pulls them, or takes
part in the collective.
"""

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrl.engine.device import CALLS, Device
from podrl.rundir.run import Run
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.watchdog import EXIT_PREEMPTED
from podrl.types import Policy

_AHEAD = 16  # number of calls that a host requests before the head has sent them
_ACK_EVERY = 8  # number of calls between two acknowledgements
_LOOK_S = 0.5
_OWN = ("step", "move", "open", "use", "close", "sleep")  # calls that _Follower makes itself, not its Device
_LEAVE_S = 60.0  # longest time, in seconds, that `Pod.quit` takes to end this process on its own thread


class ReplicaHead:
    """The head's side of a replica.

    Any thread may call `broadcast`; the other hosts make the calls in the same order.
    """

    def __init__(self, pod: Pod, *, stops: Callable[[], None] = lambda: None):
        """Watches the other hosts of the replica; if a host is lost, this process ends.

        Args:
          pod: the job's processes.
          stops: function that is called, on the channel's thread, when another host of the replica is asked to stop.
        """
        self._pod, self._lock = pod, threading.Lock()
        self._numbers = itertools.count()
        self._others = pod.seat.hosts.replica_of(pod.seat.process)[1:]
        self._read = dict.fromkeys(self._others, 0)
        self._dropped = 0
        self._stops = stops
        pod.channel.serve("replica read", self._on_read)
        pod.channel.serve("replica stops", self._on_stops)
        for process in self._others:
            pod.channel.watch(pod.address(process), lambda process=process: self._lost(process))

    def broadcast(self, name: str, args: Sequence[object]) -> None:
        """Sends a call to the other hosts, which make it.

        Args:
          name: name of the call.
          args: arguments: arrays, numbers, texts, None, or lists without arrays.
        """
        arrays = {str(i): arg for i, arg in enumerate(args) if isinstance(arg, np.ndarray)}
        plain = [None if isinstance(arg, np.ndarray) else _plain(arg) for arg in args]
        with self._lock:
            self._pod.channel.put(_key(next(self._numbers)), Message({"call": name, "args": plain}, arrays))

    def _on_read(self, message: Message) -> Message:
        """Withdraws the calls that all other hosts have read; runs on the channel's thread."""
        process, count = int(message.value["process"]), int(message.value["count"])
        if process in self._read:
            self._read[process] = max(self._read[process], count)
        while self._dropped < min(self._read.values()):
            self._pod.channel.drop(_key(self._dropped))
            self._dropped += 1
        return Message()

    def _on_stops(self, message: Message) -> Message:
        """Stops this host because another host of the replica was asked to stop; runs on the channel's thread."""
        self._stops()
        return Message()

    def _lost(self, process: int) -> None:
        name = self._pod.seat.hosts.name(process)
        self._pod.quit(f"{name} (host {process}), which holds a part of this replica's weights, is gone")


def follow(cluster: Any, pod: Pod, run: Run, *, deadline_s: float) -> int:
    """Makes the calls that the head of this process's replica sends, until the head ends.

    Args:
      cluster: this host's part of the models; None if no call touches models.
      pod: the job's processes.
      run: the run, whose `with` block has been entered; used for its watchdog, profiles and stop signals. This process
        reports a stop signal to the head (or to the leader, if trainers and rollouts share a cluster).
      deadline_s: the longest wait for the answer to such a report, in seconds.

    Returns:
      The step that the head had reached.

    Raises:
      ChannelError: the head or the leader did not answer in time.
      ValueError: this process cannot make a call, because its state differs from the head's.
    """
    head = pod.seat.hosts.replica_of(pod.seat.process)[0]
    name, address = pod.seat.hosts.name(head), pod.address(head)
    pod.channel.watch(address, lambda: pod.quit(f"{name} (host {head}), the head of this replica, is gone"))
    follower, stop_sent, count = _Follower(cluster, run), False, 0
    requests = collections.deque(pod.channel.request(address, "get", _key(n), Message()) for n in range(_AHEAD))
    while True:
        with run.watchdog.stage(f"following {name}"):
            while not requests[0].arrived(_LOOK_S):
                if run.stopping() and not stop_sent:
                    stop_sent = True
                    word = Message({"process": pod.seat.process, "step": 0, "stop": True})
                    if pod.seat.disposable:
                        pod.call(head, "replica stops", word, deadline_s)
                    else:
                        pod.call(LEADER, "reached", word, deadline_s)
            message = requests.popleft().wait(0.0, f"{name}: {_key(count)}")
        requests.append(pod.channel.request(address, "get", _key(count + _AHEAD), Message()))
        count += 1
        if count % _ACK_EVERY == 0:
            read = {"process": pod.seat.process, "count": count}
            pod.channel.request(address, "call", "replica read", Message(read))
        args = [message.arrays.get(str(i), arg) for i, arg in enumerate(message.value["args"])]
        if message.value["call"] == "end":
            return int(args[0])
        if message.value["call"] == "leave":
            pod.quit("its replica was asked to stop, and the job goes on without it", EXIT_PREEMPTED)
            pod.await_end(_LEAVE_S)
        follower.make(message.value["call"], args)


class _Follower:
    """Makes the calls of a head on this host's devices."""

    def __init__(self, cluster: Any, run: Run):
        self._cluster, self._profiler = cluster, run.profiler
        self._policy: Policy | None = None
        self._device: Device | None = None

    def make(self, name: str, args: Sequence[object]) -> None:
        """Makes one call.

        Raises:
          ValueError: there is no such call, or it does not fit the calls before it.
        """
        if name in _OWN:
            getattr(self, f"_{name}")(*args)
        elif name in CALLS and self._device is not None:
            CALLS[name](self._device, *args)
        else:
            raise ValueError(
                f"The head of this replica sent the call {name!r}, which cannot run now: this host has no open "
                "session, or does not know the call. Run the same podrl on all hosts, and start the job again."
            )

    def _step(self, step: int, profile: tuple[int, int] | None) -> None:
        self._profiler.planned = profile
        self._profiler.after(step)

    def _move(self, version: int, in_place: bool) -> None:
        self._policy = self._cluster.sync_weights(version, in_place=in_place)

    def _policy_of(self, version: int) -> Policy:
        if self._policy is None or self._policy.version != version:
            own = "no weights" if self._policy is None else f"version {self._policy.version}"
            raise ValueError(
                f"The head of this replica samples with weights of version {version}, but this host has {own}."
            )
        return self._policy

    def _open(self, version: int) -> None:
        self._device = self._cluster.rollout.device(self._policy_of(version))

    def _use(self, version: int) -> None:
        assert self._device is not None
        self._device.use(self._device.engine.prepare(self._policy_of(version).params))

    def _close(self) -> None:
        if self._device is not None:
            self._cluster.rollout.put_back(self._device)
            self._device = None

    def _sleep(self) -> None:
        self._cluster.rollout.sleep()


def _plain(arg: object) -> object:
    """Converts an argument to values that JSON can hold: numbers, texts and lists."""
    if isinstance(arg, np.generic):
        return arg.item()
    return [_plain(each) for each in arg] if isinstance(arg, list | tuple) else arg


def _key(number: int) -> str:
    return f"replica/{number}"
