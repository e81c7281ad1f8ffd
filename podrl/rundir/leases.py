"""Leases: which rollout host serves which part of a batch, or evaluates which records, while hosts come and go.

A lease is a part of a task (a batch or an evaluation) that one host must do. The leader cuts an evaluation into leases
and gives each lease to a host. The leases of a batch go to the hosts that have made the batch's groups
(podrl.learner.pods.dispatch). Every process learns of every change at once. The leases of a lost host go to the other
hosts, or to the next host that joins.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podrl.config import plural
from podrl.mappings import JsonObject
from podrl.runtime.channel import ChannelError, LateError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod

NOBODY = -1
_log = logging.getLogger("podrl.leases")
_FOREVER_S = 1e9


def batch(step: int) -> str:
    """Returns the name of the task that makes the batch of a step."""
    return f"batch/{step}"


def is_batch(task: str) -> bool:
    """Returns True if the task makes a batch."""
    return task.startswith("batch/")


def evaluation(step: int) -> str:
    """Returns the name of the task that evaluates the weights of a step."""
    return f"evaluation/{step}"


def is_over(name: str, step: int) -> bool:
    """Returns True if the task called `name` belongs to a step before `step`; it may be a batch or an evaluation."""
    return step_of(name) < step


def step_of(task: str) -> int:
    """Returns the step in a task's name."""
    return int(task.rpartition("/")[2])


@dataclasses.dataclass(frozen=True)
class Lease:
    """A range of neighbouring places of a task, and the host that makes the groups or shares at these places.

    Attributes:
      task: name of the task, from `batch` or `evaluation`.
      first, last: range [first, last) of places within the task: groups of a batch, shares of an evaluation.
      host: number of the host in the job; NOBODY while no host has the lease.
    """

    task: str
    first: int
    last: int
    host: int

    def key(self, kind: str) -> str:
        """Returns the channel's key for a result of this lease; `kind` is 'header', 'whole' (batches) or 'scores'."""
        return f"{kind}/{self.task}/{self.first}-{self.last}"


@dataclasses.dataclass(frozen=True)
class LeasedTask:
    """A task and its leases, which cover the whole task in order.

    Attributes:
      leases: leases of all places of the task.
      since: step at which the leader opened the task.
      groups: (data index of the first prompt, step at which that prompt was submitted) of each group of a batch, in the
        order of the places; empty for an evaluation and for a batch that could not be made.
      position: data position to save if no other prompt is in flight; '' while other prompts are in flight.
      change: number of the newest change of the leader's table that concerned this task.
    """

    leases: tuple[Lease, ...]
    since: int
    groups: Sequence[tuple[int, int]] = ()
    position: str = ""
    change: int = 0

    def value(self) -> JsonObject:
        """Packs the task for a message."""
        parts = [[lease.first, lease.last, lease.host] for lease in self.leases]
        return {**dataclasses.asdict(self), "leases": parts}

    @staticmethod
    def of(name: str, value: JsonObject) -> "LeasedTask":
        """Builds the task called `name` from the result of its `value`."""
        leases = tuple(Lease(name, *map(int, part)) for part in value["leases"])
        return LeasedTask(**{**value, "leases": leases})


def cut(task: str, shares: int, hosts: Sequence[int]) -> list[Lease]:
    """Cuts a task into one lease per share; each host gets neighbouring shares, in the order of `hosts`.

    Without hosts every lease belongs to NOBODY.
    """
    hosts = hosts or (NOBODY,)
    return [Lease(task, i, i + 1, hosts[i * len(hosts) // shares]) for i in range(shares)]


class Leases:
    """Base class of the leader's and the other processes' tables of tasks and leases."""

    def __init__(self, pod: Pod, deadline_s: float):
        """Starts with an empty table; `deadline_s` is the longest wait for a host or a task, in seconds."""
        self._pod, self._deadline_s = pod, deadline_s
        self._tasks: dict[str, LeasedTask] = {}
        self._changed = threading.Condition(threading.RLock())
        pod.wait_sources.append(self._describe_wait)
        self._hostless_task = ""  # name of the task for which this process waits until a host joins

    def task(self, name: str) -> LeasedTask | None:
        """Returns the task of a name; None if this process knows no task of that name."""
        return self._tasks.get(name)

    def mine(self, name: str) -> list[Lease]:
        """Returns this process's leases of a task; [] if it knows no such task."""
        task = self._tasks.get(name)
        return [lease for lease in task.leases if lease.host == self._pod.seat.process] if task else []

    def holds(self, lease: Lease) -> bool:
        """Returns True if a lease still has the same host and range."""
        task = self._tasks.get(lease.task)
        return task is not None and lease in task.leases

    def await_leases(self, name: str) -> list[Lease]:
        """Waits until all leases of a task have hosts; returns the leases in order.

        Raises:
          LateError: within the deadline some lease had no host, or the leader did not announce the task.
        """
        end = time.monotonic() + self._deadline_s
        with self._changed:
            try:
                while (task := self._tasks.get(name)) is None or any(x.host == NOBODY for x in task.leases):
                    self._hostless_task = name if task is not None else ""
                    if not self._changed.wait(max(end - time.monotonic(), 0.0)) and time.monotonic() >= end:
                        raise LateError(
                            f"{self._pod.name} waited {self._deadline_s:.0f} s for rollout hosts to get work: there "
                            "is none in the job, or trainer 0 gave out none. Add a host (docs/hosts.md), or start the "
                            "same command again."
                        )
                return list(task.leases)
            finally:
                self._hostless_task = ""

    def await_task(self, name: str) -> None:
        """Waits until this process knows a task.

        Raises:
          LateError: the leader did not tell this process of the task within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._tasks, self._deadline_s):
                raise LateError(f"{self._pod.name} waited {self._deadline_s:.0f} s for trainer 0 to announce {name}.")

    def forget(self, names: Iterable[str]) -> None:
        """Removes finished tasks from the table."""
        with self._changed:
            for name in names:
                self._tasks.pop(name, None)

    def names(self) -> list[str]:
        """Lists the names of the tasks that have not been forgotten."""
        return list(self._tasks)

    def _describe_wait(self) -> str:
        return f"a rollout host for {self._hostless_task}: none is in the job" if self._hostless_task else ""


class LeaseClient(Leases):
    """A copy of the leader's table in another process, kept up to date by the leader's messages."""

    def __init__(self, pod: Pod, deadline_s: float, *, changed: Callable[[str], None] = lambda task: None):
        """Stores the arguments; `changed` gets the name of each task whose leases have changed.

        `enter` makes the first calls of `changed`, on its caller's thread; the thread of `follow` makes later calls.
        """
        super().__init__(pod, deadline_s)
        self._change, self._on_change = 0, changed
        self._thread: threading.Thread | None = None

    @property
    def change(self) -> int:
        """Returns the number of the last change of the leader's table that this process knows."""
        return self._change

    def enter(self) -> JsonObject:
        """Asks the leader to admit this process, and takes over the leader's table of leases.

        Returns:
          The leader's answer: the step at which this process begins, and the entries that the function `start` of
          `LeaseServer.serve` adds.

        Raises:
          ChannelError: no answer within the deadline.
        """
        me = Message({"process": self._pod.seat.process, "address": self._pod.channel.address})
        answer = self._pod.call(LEADER, "enter", me, self._deadline_s)
        start = {**answer.value, "arrays": answer.arrays}
        self._change = int(start["change"])
        self.take(start["tasks"])
        return start

    def follow(self) -> None:
        """Starts the thread that takes over the leader's changes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="podrl-leases", daemon=True)
            self._thread.start()

    def reached(self, step: int) -> None:
        """Tells the leader that this process has reached a step, without waiting for an answer."""
        me = Message({"process": self._pod.seat.process, "step": step})
        self._pod.channel.request(self._pod.address(LEADER), "call", "host reached", me)

    def leave(self) -> bool:
        """Asks the leader whether this process may leave; if it may, its leases have gone to other hosts.

        Raises:
          ChannelError: no answer within the deadline.
        """
        me = Message({"process": self._pod.seat.process})
        return bool(self._pod.call(LEADER, "host leaves", me, self._deadline_s).value["goes"])

    def take(self, tasks: Mapping[str, JsonObject]) -> None:
        """Takes over the leader's packed tasks, unless this table has the same or a newer state of them."""
        news = []
        with self._changed:
            for name, value in tasks.items():
                task, old = LeasedTask.of(name, value), self._tasks.get(name)
                if old is None or task.change > old.change:
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


class LeaseServer(Leases):
    """The leader's table, in which it gives leases to hosts.

    Attributes:
      reassigned: number of leases and groups of lost hosts that the leader has given to other hosts so far.
      regroup: function that is called under `lock` when a host has joined or was lost, after the leases without a host
        have been given to hosts.
    """

    def __init__(
        self,
        pod: Pod,
        deadline_s: float,
        *,
        ending: Callable[[], bool] = lambda: False,
    ):
        """Starts with an empty table; `serve` begins to answer requests.

        Args:
          pod: the job's processes.
          deadline_s: the longest wait for a host to join or to reach a step, in seconds.
          ending: function that returns whether the job was asked to stop; after that no host may leave.
        """
        super().__init__(pod, deadline_s)
        self._ending = ending
        self._members: dict[int, int] = {}  # step that each host in the job has reached, by host
        self._entered: dict[int, int] = {}  # step at which each host joined, by host
        # Functions that make the answer to a host that joins at a step, by step.
        self._starts: dict[int, Callable[[], dict[str, Any]]] = {}
        self._change = 0
        self._dropped = 0  # number of the last change whose message is not offered any more
        self._change_of_batch: dict[int, int] = {}  # number of the change that announced each batch, by step
        self.reassigned = 0
        self.regroup: Callable[[], None] = lambda: None

    @property
    def hosts(self) -> int:
        """Returns the number of rollout hosts in the job."""
        return len(self._members)

    @property
    def members(self) -> Mapping[int, int]:
        """Returns the step that each rollout host in the job has reached, by host."""
        return self._members

    @property
    def lock(self) -> threading.Condition:
        """Returns the table's lock, a condition that is notified of every change."""
        return self._changed

    def serve(self, step: int, start: Callable[[], dict[str, Any]]) -> None:
        """Admits hosts from now on; the configuration's hosts begin at `step`.

        Args:
          step: the step at which the job starts or resumes.
          start: function that returns the reply to a process that joins at this step. The entry 'arrays' of the reply
            holds its arrays.
        """
        with self._changed:
            self._begins(step, start)
            present = [host for host in self._pod.seat.hosts.heads if not self._pod.is_lost(host)]
            self._members, self._entered = dict.fromkeys(present, step), dict.fromkeys(present, step)
        self._pod.on_lost = self._remove_host
        for host in self._pod.seat.hosts.heads:
            if self._pod.is_lost(host):
                self._remove_host(host)
        with self._changed:
            self.regroup()
        self._pod.channel.serve("enter", self._enter)
        self._pod.channel.serve("host reached", self._on_reached)
        self._pod.channel.serve("host leaves", self._on_leaves)

    def _begins(self, step: int, start: Callable[[], dict[str, Any]]) -> None:
        """Sets `start`, whose result is the answer to a process that joins the job at `step`.

        The previous step's function is kept, because some hosts may still be at that step.
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
        """Opens a batch whose samples exist already: gives its leases to the samples' hosts, and announces the batch.

        Args:
          name: name of the task.
          hosts: the host of each place of the batch. If the batch could not be made: only the host that failed.
          joined: True to put neighbouring places of the same host into one lease.
          since, groups, position: attributes of the LeasedTask.
        """
        starts = [i for i, host in enumerate(hosts) if not i or not joined or hosts[i - 1] != host]
        ends = [*starts[1:], len(hosts)]
        with self._changed:
            leases = tuple(Lease(name, i, j, hosts[i]) for i, j in zip(starts, ends, strict=True))
            self._tasks[name] = LeasedTask(leases, since, groups=tuple(groups), position=position)
            self._announce([name])
            self._change_of_batch[step_of(name)] = self._change

    def passed(self, step: int, last_change: int) -> None:
        """Frees the messages of changes that every process has received.

        Args:
          step: first step whose batch may still be requested; changes of the leases of earlier batches are dropped.
          last_change: number of the last change that every host has received; later changes stay.
        """
        for old in [s for s, change in self._change_of_batch.items() if s < step and change <= last_change]:
            change = self._change_of_batch.pop(old)
            while self._dropped < change:
                self._dropped += 1
                self._pod.channel.drop(f"leases/{self._dropped}")

    def open_shares(self, name: str, shares: int, since: int) -> None:
        """Opens an evaluation: cuts it into `shares` leases for the hosts in the job, and announces it."""
        with self._changed:
            leases = cut(name, shares, sorted(self._members))
            self._tasks[name] = LeasedTask(tuple(leases), since)
            self._announce([name])

    def advance(self, step: int, start: Callable[[], dict[str, Any]], *, wait: bool) -> None:
        """Goes on to a step once every host has reached the previous step, so that no host misses messages or weights.

        Args:
          step: the step to go on to.
          start: function that makes the answer to a process that joins at this step.
          wait: False if hosts cannot fall behind, because they neither join nor leave.

        Raises:
          LateError: a host had not reached the previous step within the deadline.
        """
        with self._changed:
            if wait and not self._changed.wait_for(lambda: not self._behind(step - 1), self._deadline_s):
                names = ", ".join(f"{self._pod.seat.hosts.name(p)} (host {p})" for p in self._behind(step - 1))
                raise LateError(
                    f"{self._pod.name} waited {self._deadline_s:.0f} s for {names} to reach step {step - 1}: see "
                    "what the host is doing (kill -USR1 prints its stacks), or raise log.stall_s."
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
        """Answers whether a host that was asked to stop may leave; runs on the channel's thread.

        The last host may not leave: it stays, and the whole job stops.
        """
        host = int(message.value["process"])
        with self._changed:
            # A host may ask twice. If it was allowed to leave, the answer must stay yes, even if all other hosts have
            # been lost since.
            has_left = host not in self._members
            may_leave = has_left or (not self._ending() and any(other != host for other in self._members))
            if may_leave and not has_left:
                for process in self._pod.seat.hosts.replica_of(host):
                    self._pod.let_go(process)
                name = f"{self._pod.seat.hosts.name(host)} (host {host})"
                stay = len(set(self._members) - {host})
                stays = f"{plural(stay, 'rollout host')} {'stays' if stay == 1 else 'stay'}"
                _log.warning("%s was asked to stop and leaves; %s.", name, stays)
                self._remove_host(host)
        return Message({"goes": may_leave})

    def _enter(self, message: Message) -> Message:
        """Answers at which step a joining process begins, and gives a rollout host leases from then on; runs on the
        channel's thread."""
        process = int(message.value["process"])
        with self._changed:
            step = min(self._starts)
            if process in self._members:
                step = self._members[process]
            elif process not in self._pod.seat.hosts.trainer and self._pod.is_at(process, message.value["address"]):
                self._members[process] = self._entered[process] = step
                name = f"{self._pod.seat.hosts.name(process)} (host {process})"
                _log.warning("%s joined: the job has %s now.", name, plural(len(self._members), "rollout host"))
                self._reassign()
            start = self._starts.get(step, self._starts[min(self._starts)])()
            arrays = start.pop("arrays", {})
            tasks = {name: task.value() for name, task in self._tasks.items()}
            return Message({**start, "change": self._change, "tasks": tasks}, arrays)

    def _remove_host(self, host: int) -> None:
        """Removes a lost host and gives its leases to other hosts, on the channel's thread."""
        with self._changed:
            self._members.pop(host, None)
            self._changed.notify_all()
            self._reassign()

    def _reassign(self) -> None:
        """Gives leases that have no host, or a lost host, to the hosts in the job."""
        changed = []
        for name, task in self._tasks.items():
            present = {*self._members, *self._pod.seat.hosts.trainer}
            if all(lease.host in present for lease in task.leases):
                continue
            staying = [lease for lease in task.leases if lease.host in present]
            leases: list[Lease] = []
            for lease in task.leases:
                leases.append(lease if lease in staying else self._moved(lease, staying + leases))
            self.reassigned += sum(lease not in task.leases for lease in leases if lease.host != NOBODY)
            if tuple(leases) != task.leases:
                self._tasks[name] = dataclasses.replace(task, leases=tuple(leases))
                changed.append(name)
        if changed:
            self._announce(changed)
        self.regroup()

    def _moved(self, lease: Lease, others: Sequence[Lease]) -> Lease:
        """Gives a lost host's lease to the host with the fewest places of the task, or to NOBODY if there is no host.

        Returns the lease with its new host.
        """
        of = dict.fromkeys(sorted(self._members), 0)
        for other in others:
            if other.host in of:
                of[other.host] += other.last - other.first
        evaluates, since = lease.task.startswith("evaluation/"), self._tasks[lease.task].since
        # A host that joined after an evaluation had begun has no copy of the weights to evaluate, so it is chosen last.
        hosts = sorted(of, key=lambda host: (evaluates and self._entered[host] > since, of[host], host))
        return dataclasses.replace(lease, host=hosts[0] if hosts else NOBODY)

    def _announce(self, names: Sequence[str]) -> None:
        """Announces changed tasks to all other processes."""
        self._change += 1
        for name in names:
            self._tasks[name] = dataclasses.replace(self._tasks[name], change=self._change)
        tasks = {name: self._tasks[name].value() for name in names}
        self._pod.channel.put(f"leases/{self._change}", Message(tasks))
        self._changed.notify_all()
