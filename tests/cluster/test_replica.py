"""The hosts of a rollout replica: how they find each other, and which messages the head sends to the other hosts."""

import contextlib
import dataclasses
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from endpoints import joined
from waits import PATIENCE_S, until

from podrl.cluster.replica import ReplicaHead, follow
from podrl.engine.device import CALLS
from podrl.runtime import joining
from podrl.runtime.channel import ChannelError
from podrl.runtime.detect import Cluster
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod
from podrl.runtime.roles import Hosts
from podrl.types import Policy


@pytest.fixture
def pods():
    """Joins a trainer and a replica of three hosts, as endpoints of this process."""
    with joined(Hosts((0,), (1, 2, 3), replica=3)) as pods:
        yield pods


class Part:
    """Stands in for one host's RLCluster and its engine, and records the calls that are made on it."""

    def __init__(self):
        self.made, self.rollout = [], self

    def sync_weights(self, version, *, in_place):
        self.made.append(("move", version, in_place))
        return Policy({"w": version}, version)

    def device(self, policy):
        self.made.append(("open", policy.version))
        return types.SimpleNamespace(note=self.made.append)

    def put_back(self, device):
        self.made.append(("close",))

    def sleep(self):
        self.made.append(("sleep",))


def run_of(stopping=lambda: False):
    """Stands in for a run; it has only what `follow` reads."""
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext())
    profiler = types.SimpleNamespace(wanted=None, after=lambda step: None)
    return types.SimpleNamespace(stopping=stopping, watchdog=watchdog, profiler=profiler)


def followed(pods, parts, run):
    """Calls `follow` in a thread for each pod of `pods`; returns the futures, whose result is the step that was
    reached."""
    threads = ThreadPoolExecutor(len(parts))
    return [threads.submit(follow, part, pod, run, deadline_s=20.0) for pod, part in zip(pods, parts, strict=True)]


def test_all_hosts_make_the_heads_calls_in_its_order(pods, monkeypatch):
    parts, told, run = [Part(), Part()], [], run_of()
    for name in ("insert", "spill"):
        monkeypatch.setitem(CALLS, name, lambda device, *args, name=name: device.note((name, *args)))
    head = ReplicaHead(pods[1])

    def broadcast(name, *args):
        told.append((name, *args))
        head.broadcast(name, args)

    broadcast("move", 0, True)
    ended = followed(pods[2:], parts, run)
    broadcast("step", 0, (3, 5))
    broadcast("open", 0)
    rng = np.random.default_rng(0)
    for i in range(200):
        broadcast("insert", rng.integers(0, 9, (2, 3)).astype(np.int32))
        broadcast("spill", f"sample/{i}/0", np.int64(1), [i, i + 1])
    broadcast("close")
    broadcast("sleep")
    broadcast("end", 7)
    assert [each.result(PATIENCE_S) for each in ended] == [7, 7] and run.profiler.planned == [3, 5]
    expected = [call for call in told if call[0] not in ("step", "end")]
    for part in parts:
        assert len(part.made) == len(expected)
        for mine, call in zip(part.made, expected, strict=True):
            assert mine[0] == call[0] and all(np.array_equal(x, y) for x, y in zip(mine[1:], call[1:], strict=True))
    board = pods[1].channel._board
    until(lambda: sum(key.startswith("replica/") for key in list(board)) <= 8, "the removal of what all have read")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("move", (3, True)), ("open", (4,))], "samples with weights of version 4, but this host has version 3"),
        ([("open", (4,))], "samples with weights of version 4, but this host has no weights"),
        ([("generate", (np.zeros((1, 2), np.int32),))], "sent the call 'generate', which cannot run now"),
        ([("move", (3, True)), ("open", (3,)), ("__init__", ())], "sent the call '__init__', which cannot run now"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(pods, calls, message):
    head = ReplicaHead(pods[1])
    for name, args in calls:
        head.broadcast(name, args)
    (ended,) = followed(pods[2:3], [Part()], run_of())
    with pytest.raises(ValueError, match=message):
        ended.result(PATIENCE_S)


def test_a_host_that_is_asked_to_stop_tells_the_leader(pods):
    asked, stops = threading.Event(), []
    pods[0].channel.serve("reached", lambda message: stops.append(message.value) or asked.set() or Message())
    (ended,) = followed(pods[2:3], [Part()], run_of(stopping=lambda: True))
    assert asked.wait(PATIENCE_S)
    ReplicaHead(pods[1]).broadcast("end", (4,))
    assert ended.result(PATIENCE_S) == 4 and stops == [{"process": 2, "step": 0, "stop": True}]


def test_a_host_of_a_split_job_that_is_asked_to_stop_tells_its_head_and_all_of_them_leave(pods, monkeypatch):
    left: list[tuple[str, int]] = []

    class LeftError(Exception):
        pass

    def leaves(self, text, code):
        left.append((self.name, code))
        raise LeftError

    monkeypatch.setattr(Pod, "quit", leaves)
    asked = threading.Event()
    for pod in pods:
        pod.seat = dataclasses.replace(pod.seat, disposable=True)
    head = ReplicaHead(pods[1], stops=asked.set)
    ended = followed(pods[2:], [Part(), Part()], run_of(stopping=lambda: True))
    assert asked.wait(PATIENCE_S)
    head.broadcast("leave", ())
    for each in ended:
        with pytest.raises(LeftError):
            each.result(PATIENCE_S)
    assert sorted(left) == [("rollout 0.1", 75), ("rollout 0.2", 75)]


def test_the_hosts_of_a_replica_that_joins_have_seats_beside_each_other():
    """A host that restarts joins a new replica, not the lost one; replicas form in the order in which hosts arrive."""
    with joined(Hosts((0,), (1, 2), replica=2), disposable=True) as pods:
        leader, secret = pods[0].channel.address, {"PODRL_SECRET": "s"}

        def seat(index, count=2, slice_="a"):
            cluster = Cluster("jobset_split", "split", index, count, coordinator=f"{slice_}:8482")
            return joining.late_seat(leader, secret, 20.0, cluster)

        second, first = seat(1), seat(0)
        assert (first.process, second.process) == (3, 4) and first.late and first.hosts == pods[0].seat.hosts
        assert first.hosts.replica_of(4) == first.hosts.replica_of(3) == (3, 4)
        assert [first.hosts.name(p) for p in (1, 2, 3, 4)] == ["rollout 0", "rollout 0.1", "rollout 1", "rollout 1.1"]
        assert [first.hosts.follows(p) for p in range(5)] == [False, False, True, False, True]
        assert [seat(1).process, seat(0, slice_="b").process, seat(0).process] == [6, 7, 5]
        assert sorted(seat(i, 4, "c").process for i in range(4)) == [9, 10, 11, 12]
        with pytest.raises(ChannelError, match="a copy of the weights lies on 2 hosts together, and 1 join as one"):
            seat(0, 1)


def test_a_replica_comes_together_once(pods):
    """A host that starts again waits until all hosts of its replica gather again, and gets their new coordinator."""
    threads = ThreadPoolExecutor(4)
    first = [threads.submit(joining.gather_replica, pod, "unix:/tmp/x/coordinator", 20.0) for pod in pods[1:]]
    (place,) = {each.result(PATIENCE_S) for each in first}
    assert place.startswith("unix:/tmp/x/coordinator-")
    again = threads.submit(joining.gather_replica, pods[3], "unix:/tmp/x/coordinator", 20.0)
    time.sleep(1.5)
    assert not again.done()
    second = [threads.submit(joining.gather_replica, pod, "127.0.0.1:1", 20.0) for pod in pods[1:3]]
    (other,) = {each.result(PATIENCE_S) for each in [*second, again]}
    host, _, port = other.rpartition(":")
    assert host == "127.0.0.1" and int(port) > 1


def test_a_host_of_a_replica_that_never_comes_is_named(pods):
    threads = ThreadPoolExecutor(1)
    threads.submit(joining.gather_replica, pods[2], "unix:/tmp/x/coordinator", 5.0)
    with pytest.raises(ChannelError, match=r"rollout 0 waited 1 s for rollout 0.2 \(host 3\) of its replica"):
        joining.gather_replica(pods[1], "unix:/tmp/x/coordinator", 1.0)
