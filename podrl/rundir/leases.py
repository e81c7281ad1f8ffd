"""Leases: which rollout host serves which part of a batch or evaluates which records, while hosts come and go.

The leader cuts an evaluation into leases and gives each to a host. The leases of a batch it gives to the hosts that
have made its groups (podrl.learner.pods.dispatch). Every process hears of every change at once. A host that is lost
loses its leases to the others, or to the next one that comes.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podrl.runtime.channel import ChannelError, LateError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod

NOBODY = -1
_log = logging.getLogger("podrl.leases")
_FOREVER_S = 1e9


def batch(step: int) -> str:
    """The name of the task to make the batch that a step trains on."""
    return f"batch/{step}"


def is_batch(task: str) -> bool:
    """True for the task to make a batch."""
    return task.startswith("batch/")


def evaluation(step: int) -> str:
    """The name of the task to evaluate the weights of a step."""
    return f"evaluation/{step}"


def is_over(name: str, taken: int) -> bool:
    """True for a batch, or an evaluation, before step `taken`."""
    return step_of(name) < taken


def step_of(task: str) -> int:
    """The step of a task's name."""
    return int(task.rpartition("/")[2])


@dataclasses.dataclass(frozen=True)
class Lease:
    """Some neighbouring prompts of a task, and the host that makes them.

    Attributes:
      task: the task; see `batch` and `evaluation`.
      first, last: places of the prompts within the task; `last` is not among them.
      host: the host's number in the job, or NOBODY.
    """

    task: str
    first: int
    last: int
    host: int

    def key(self, kind: str) -> str:
        """The channel's key of what its host offers: 'header' of a batch, 'scores' of an evaluation."""
        return f"{kind}/{self.task}/{self.first}-{self.last}"


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and its leases, which cover it in order.

    Attributes:
      leases: leases of all its prompts.
      since: the step at which it was opened.
      groups: index of the first prompt of each group of a batch, and the step at which the prompt was asked.
      position: position of the data by the wall clock, where no other prompt is open.
      change: number of the change of the table that it is as of.
    """

    leases: tuple[Lease, ...]
    since: int
    groups: Sequence[tuple[int, int]] = ()
    position: str = ""
    change: int = 0

    def value(self) -> dict[str, Any]:
        """Packs it for a message."""
        parts = [[lease.first, lease.last, lease.host] for lease in self.leases]
        return {**dataclasses.asdict(self), "leases": parts}

    @staticmethod
    def of(name: str, value: Mapping[str, Any]) -> "Task":
        """Unpacks what `value` packed."""
        leases = tuple(Lease(name, *map(int, part)) for part in value["leases"])
        return Task(**{**value, "leases": leases})


def cut(task: str, shares: int, hosts: Sequence[int]) -> list[Lease]:
    """Cuts a task of so many shares into a lease for each; `hosts` get them in this order, or nobody where none are."""
    hosts = hosts or (NOBODY,)
    return [Lease(task, i, i + 1, hosts[i * len(hosts) // shares]) for i in range(shares)]


class Leases:
    """Base of both sides: the table of tasks as this process knows it."""

    def __init__(self, pod: Pod, deadline_s: float):
        """Knows of no task; `deadline_s` is the longest wait for a host to be there."""
        self._pod, self._deadline_s = pod, deadline_s
        self._tasks: dict[str, Task] = {}
        self._changed = threading.Condition(threading.RLock())
        pod.waiting.append(self._waits)
        self._lacking = ""  # the task that this process waits for a host of

    def task(self, name: str) -> Task | None:
        """Returns a task; None where there is none of that name, or none that this process was told of."""
        return self._tasks.get(name)

    def mine(self, name: str) -> list[Lease]:
        """Returns this process's leases of a task."""
        task = self._tasks.get(name)
        return [lease for lease in task.leases if lease.host == self._pod.seat.process] if task else []

    def holds(self, lease: Lease) -> bool:
        """Returns whether a lease is still as it was."""
        task = self._tasks.get(lease.task)
        return task is not None and lease in task.leases

    def held(self, name: str) -> list[Lease]:
        """Waits until all leases of a task have hosts; returns them in order.

        Raises:
          LateError: they had none within the deadline.
        """
        end = time.monotonic() + self._deadline_s
        with self._changed:
            try:
                while (task := self._tasks.get(name)) is None or any(x.host == NOBODY for x in task.leases):
                    self._lacking = name if task is not None else ""
                    if not self._changed.wait(max(end - time.monotonic(), 0.0)) and time.monotonic() >= end:
                        raise LateError(
                            f"{self._pod.name} waited {self._deadline_s:.0f} s for a rollout host: there is none in "
                            "the job. Add one (docs/hosts.md), or start the same command again."
                        )
                return list(task.leases)
            finally:
                self._lacking = ""

    def await_task(self, name: str) -> None:
        """Waits until this process was told of a task.

        Raises:
          LateError: it was not, within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._tasks, self._deadline_s):
                raise LateError(f"{self._pod.name} waited {self._deadline_s:.0f} s to be told of {name} by trainer 0.")

    def forget(self, names: Iterable[str]) -> None:
        """Drops tasks that are done."""
        with self._changed:
            for name in names:
                self._tasks.pop(name, None)

    def names(self) -> list[str]:
        """Lists the tasks that are not done."""
        return list(self._tasks)

    def _waits(self) -> str:
        return f"a rollout host that makes {self._lacking}: none is in the job" if self._lacking else ""


class Told(Leases):
    """The table as the leader tells it to another process."""

    def __init__(self, pod: Pod, deadline_s: float, *, changed: Callable[[str], None] = lambda task: None):
        """Asks nothing yet; `changed` is called, on a thread of its own, with each task whose leases have changed."""
        super().__init__(pod, deadline_s)
        self._change, self._on_change = 0, changed
        self._thread: threading.Thread | None = None

    @property
    def change(self) -> int:
        """Returns the number of the last change heard of."""
        return self._change

    def enter(self) -> Mapping[str, Any]:
        """Asks the leader to be let in; returns where this process begins.

        Raises:
          ChannelError: no answer within the deadline.
        """
        me = Message({"process": self._pod.seat.process, "address": self._pod.channel.address})
        told = self._pod.call(LEADER, "enter", me, self._deadline_s)
        start = {**told.value, "arrays": told.arrays}
        self._change = int(start["change"])
        self.take(start["tasks"])
        return start

    def follow(self) -> None:
        """Begins to follow changes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="podrl-leases", daemon=True)
            self._thread.start()

    def reached(self, step: int) -> None:
        """Tells the leader, which waits for no answer either, that this process has come to a step."""
        me = Message({"process": self._pod.seat.process, "step": step})
        self._pod.channel.request(self._pod.address(LEADER), "call", "host reached", me)

    def leave(self) -> bool:
        """Asks the leader whether this process may leave; if so, it has no leases any more.

        Raises:
          ChannelError: no answer within the deadline.
        """
        me = Message({"process": self._pod.seat.process})
        return bool(self._pod.call(LEADER, "host leaves", me, self._deadline_s).value["goes"])

    def take(self, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over tasks as the leader packed them, where they are news."""
        news = []
        with self._changed:
            for name, value in tasks.items():
                task, known = Task.of(name, value), self._tasks.get(name)
                if known is None or task.change > known.change:
                    self._tasks[name] = task
                    news.append(name)
            self._changed.notify_all()
        for name in news:
            self._on_change(name)

    def _follow(self) -> None:
        while True:
            request = self._pod.channel.request(
                self._pod.address(LEADER), "get", f"leases/{self._change + 1}", Message()
            )
            try:
                tasks = request.wait(_FOREVER_S, "trainer 0: leases").value
            except ChannelError:
                return
            self._change += 1
            self.take(tasks)


class Given(Leases):
    """The table on the leader, which gives the leases.

    Attributes:
      taken_over: leases and groups that went from a lost host to others, so far.
      regroup: function that is called, under `lock`, when a host has come or was lost, after its leases were given to
        others.
    """

    def __init__(
        self,
        pod: Pod,
        deadline_s: float,
        *,
        ending: Callable[[], bool] = lambda: False,
    ):
        """Gives nothing yet.

        Args:
          pod: the job's processes.
          deadline_s: see Leases.
          ending: whether the job was asked to stop, for which hosts stay.
        """
        super().__init__(pod, deadline_s)
        self._ending = ending
        self._members: dict[int, int] = {}  # hosts, and the steps they have come to
        self._entered: dict[int, int] = {}  # by host: the step that it began at
        self._starts: dict[int, Callable[[], dict[str, Any]]] = {}  # by step: where one begins that enters then
        self._change = 0
        self._dropped = 0  # changes that are not offered any more
        self._told: dict[int, int] = {}  # by step: the change that told its batch
        self.taken_over = 0
        self.regroup: Callable[[], None] = lambda: None

    @property
    def hosts(self) -> int:
        """Rollout hosts in the job."""
        return len(self._members)

    @property
    def members(self) -> Mapping[int, int]:
        """The rollout hosts in the job, and the steps they have come to."""
        return self._members

    @property
    def lock(self) -> threading.Condition:
        """The lock of the table, notified of every change."""
        return self._changed

    def serve(self, step: int, start: Callable[[], dict[str, Any]]) -> None:
        """Lets processes in: those of the configuration at `step`; `start` makes what they are told."""
        with self._changed:
            self._begins(step, start)
            there = [host for host in self._pod.seat.hosts.heads if not self._pod.is_lost(host)]
            self._members, self._entered = dict.fromkeys(there, step), dict.fromkeys(there, step)
        self._pod.on_lost = self._lost
        for host in self._pod.seat.hosts.heads:
            if self._pod.is_lost(host):
                self._lost(host)
        with self._changed:
            self.regroup()
        self._pod.channel.serve("enter", self._enter)
        self._pod.channel.serve("host reached", self._on_reached)
        self._pod.channel.serve("host leaves", self._on_leaves)

    def _begins(self, step: int, start: Callable[[], dict[str, Any]]) -> None:
        """Sets `start`, whose result is the answer to a process that enters the job at `step`.

        The function of the step before is kept, because some hosts may still be at that step.
        """
        self._starts[step] = start
        for old in [s for s in self._starts if s < step - 1]:
            del self._starts[old]

    def open_chosen(
        self,
        name: str,
        hosts: Sequence[int],
        *,
        joined: bool,
        since: int,
        groups: Sequence[tuple[int, int]],
        position: str,
    ) -> None:
        """Gives a batch to hosts that have made it already, and tells all.

        Args:
          name: the name of the task.
          hosts: the host of each place of the batch; the one that failed where there is no batch.
          joined: whether neighbouring places of a host are one lease.
          since, groups, position: see Task.
        """
        starts = [i for i, host in enumerate(hosts) if not i or not joined or hosts[i - 1] != host]
        ends = [*starts[1:], len(hosts)]
        with self._changed:
            leases = tuple(Lease(name, i, j, hosts[i]) for i, j in zip(starts, ends, strict=True))
            self._tasks[name] = Task(leases, since, groups=tuple(groups), position=position)
            self._tell([name])
            self._told[step_of(name)] = self._change

    def passed(self, step: int, heard: int) -> None:
        """Drops changes up to the batches before a step, and up to those of `heard`: nobody asks for them again."""
        for old in [s for s, change in self._told.items() if s < step and change <= heard]:
            change = self._told.pop(old)
            while self._dropped < change:
                self._dropped += 1
                self._pod.channel.drop(f"leases/{self._dropped}")

    def open_shares(self, name: str, shares: int, since: int) -> None:
        """Gives an evaluation, in so many shares, to the hosts that are there, and tells them."""
        with self._changed:
            leases = cut(name, shares, sorted(self._members))
            self._tasks[name] = Task(tuple(leases), since)
            self._tell([name])

    def advance(self, step: int, start: Callable[[], dict[str, Any]], *, waits: bool) -> None:
        """Goes on to a step once every host has come to the one before, so that none misses words or weights.

        Args:
          step: the step to go on to.
          start: function that makes what processes are told that enter at this step.
          waits: False where hosts cannot fall behind, as they all stay.

        Raises:
          LateError: a host had not come within the deadline.
        """
        with self._changed:
            if waits and not self._changed.wait_for(lambda: not self._behind(step - 1), self._deadline_s):
                names = ", ".join(f"{self._pod.seat.hosts.name(p)} (host {p})" for p in self._behind(step - 1))
                raise LateError(
                    f"{self._pod.name} waited {self._deadline_s:.0f} s for {names} to come to step {step - 1}: see "
                    "what it is doing (kill -USR1 prints its stacks), or raise log.stall_s."
                )
            self._begins(step, start)

    def _behind(self, step: int) -> list[int]:
        return [host for host, reached in self._members.items() if reached < step]

    def _on_reached(self, message: Message) -> Message:
        with self._changed:
            host = int(message.value["process"])
            if host in self._members:
                self._members[host] = max(self._members[host], int(message.value["step"]))
                self._changed.notify_all()
        return Message()

    def _on_leaves(self, message: Message) -> Message:
        """Lets a host go that was asked to stop, on the channel's thread; the last one stays, and the job stops."""
        host = int(message.value["process"])
        with self._changed:
            gone = host not in self._members  # it asks again, and the other hosts may have been lost since then
            goes = gone or (not self._ending() and any(other != host for other in self._members))
            if goes and not gone:
                for process in self._pod.seat.hosts.replica_of(host):
                    self._pod.let_go(process)
                name = f"{self._pod.seat.hosts.name(host)} (host {host})"
                _log.warning("%s was asked to stop, and leaves; %d hosts stay.", name, len(set(self._members) - {host}))
                self._lost(host)
        return Message({"goes": goes})

    def _enter(self, message: Message) -> Message:
        """Tells a process, on the channel's thread, where it begins; a rollout host gets leases from then on."""
        process = int(message.value["process"])
        with self._changed:
            step = min(self._starts)
            if process in self._members:
                step = self._members[process]
            elif process not in self._pod.seat.hosts.trainer and self._pod.is_at(process, message.value["address"]):
                self._members[process] = self._entered[process] = step
                name = f"{self._pod.seat.hosts.name(process)} (host {process})"
                _log.warning("%s makes samples from now on, one of %d hosts.", name, len(self._members))
                self._give_again()
            start = self._starts.get(step, self._starts[min(self._starts)])()
            arrays = start.pop("arrays", {})
            tasks = {name: task.value() for name, task in self._tasks.items()}
            return Message({**start, "change": self._change, "tasks": tasks}, arrays)

    def _lost(self, host: int) -> None:
        """Takes the leases of a lost host, on the channel's thread."""
        with self._changed:
            self._members.pop(host, None)
            self._changed.notify_all()
            self._give_again()

    def _give_again(self) -> None:
        """Gives away what hosts had that are not there any more."""
        changed = []
        for name, task in self._tasks.items():
            there = {*self._members, *self._pod.seat.hosts.trainer}
            if all(lease.host in there for lease in task.leases):
                continue
            kept = [lease for lease in task.leases if lease.host in there]
            leases: list[Lease] = []
            for lease in task.leases:
                leases.append(lease if lease in kept else self._moved(lease, kept + leases))
            self.taken_over += sum(lease not in task.leases for lease in leases if lease.host != NOBODY)
            if tuple(leases) != task.leases:
                self._tasks[name] = dataclasses.replace(task, leases=tuple(leases))
                changed.append(name)
        if changed:
            self._tell(changed)
        self.regroup()

    def _moved(self, lease: Lease, others: Sequence[Lease]) -> Lease:
        """Gives a lost host's lease to the host that has the least of the task, or to nobody where none is there."""
        of = dict.fromkeys(sorted(self._members), 0)
        for other in others:
            if other.host in of:
                of[other.host] += other.last - other.first
        evaluates, since = lease.task.startswith("evaluation/"), self._tasks[lease.task].since
        # Who came after an evaluation had begun has no copy of its weights.
        hosts = sorted(of, key=lambda host: (evaluates and self._entered[host] > since, of[host], host))
        return dataclasses.replace(lease, host=hosts[0] if hosts else NOBODY)

    def _tell(self, names: Sequence[str]) -> None:
        """Tells all others of tasks that have changed."""
        self._change += 1
        for name in names:
            self._tasks[name] = dataclasses.replace(self._tasks[name], change=self._change)
        tasks = {name: self._tasks[name].value() for name in names}
        self._pod.channel.put(f"leases/{self._change}", Message(tasks))
        self._changed.notify_all()
