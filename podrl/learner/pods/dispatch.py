"""The dispatcher, on the leader of a pod: it gives groups to rollout hosts, and decides what each batch holds."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from podrl.config import plural
from podrl.learner import experience as codec
from podrl.mappings import JournalEntry, JsonObject, SavedState
from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.open_groups import Group, OpenGroups, begun
from podrl.rollout.partial import PartialBatch, cut, join, of_message, take_prompts
from podrl.rundir import leases
from podrl.rundir.leases import NOBODY, Lease, LeaseServer
from podrl.runtime.channel import LateError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, MovedError, Pod
from podrl.types import BatchError, Prompts

_AGAIN_S = 0.05


@dataclasses.dataclass(eq=False)
class RemoteGroup(Group):
    """The leader's record of a group whose samples a rollout host makes.

    Attributes:
      samples: number of samples; 0 with `rollout.clock='tokens'`, because then only the host counts them.
      since: step at which the group was opened.
      quantum: number of tokens that a sample draws in a window; used only with `rollout.clock='tokens'`.
      host: number of the host that makes the group, or NOBODY.
      entry: the journal's entry of the group once the group has ended; None before, and with `rollout.clock='tokens'`.
      moved: True once a host that had the group was lost.
    """

    samples: int
    since: int
    quantum: int
    host: int = NOBODY
    entry: JournalEntry | None = None
    moved: bool = False

    @property
    def ended(self) -> bool:
        """Returns True when all samples have ended; with `rollout.clock='tokens'`, when a host has the group.

        With 'tokens' the trainers wait for the rows that they fetch, so the leader need not know when samples end.
        """
        return self.entry is not None if self.samples else self.host != NOBODY

    @property
    def oldest(self) -> int | None:
        return self.submit_step if self.drawn is None and self.repeated and self.entry is None else self.drawn

    def states(self) -> Sequence[tuple[SavedState, None]]:
        """Returns one empty record per sample: only the host knows the tokens that it has drawn."""
        return [({}, None)] * self.samples

    def record(self) -> JournalEntry:
        assert self.entry is not None
        return self.entry


@dataclasses.dataclass
class _HostQueue:
    """The leader's account of one rollout host: the orders sent to it, and its answers so far.

    Attributes:
      address: address of the host's channel endpoint.
      since: step that the host had reached when this account was opened.
      sent: number of orders sent so far.
      dropped: number of orders that the host has read, so that the channel no longer offers them.
      change: number of the newest change of the leases that the host knows.
    """

    address: str
    since: int
    sent: int = 0
    dropped: int = 0
    change: int = 0


class Dispatcher:
    """Gives every group to one rollout host at a time, and makes batches of the groups that the clock chooses.

    When a host is lost, its groups go to other hosts.

    With `rollout.clock='tokens'` a group is one host's part of the prompts of a batch. A batch can be decided as soon
    as all of its groups have hosts; the trainers then wait for the rows that they fetch. The trainers still hold the
    weights that the lost host used or would have used. A host that takes the group over draws it under the same
    versions, so the group becomes the same as on the lost host.

    With `rollout.clock='wall'` a group has one prompt. Its host keeps the group until all trainers have its batch, and
    tells the leader when the group has ended. The leader writes to the journal which groups each batch holds, and which
    prompts are submitted again, before it tells any other process. A group that is taken over is begun anew, under the
    same random keys. If the journal already records the group (some trainer has not fetched its batch yet, or the steps
    are repeated after a restart), the group is drawn under the recorded versions.
    """

    def __init__(
        self,
        pod: Pod,
        lease_server: LeaseServer,
        clock: TokenClock | WallClock,
        *,
        size: int,
        group_size: int,
        shares: int,
        deadline_s: float,
        read: Callable[[], Prompts],
    ):
        """Stores the collaborators, and begins to receive the reports of the rollout hosts.

        Args:
          pod: the job's processes.
          lease_server: table of the leases, and of the rollout hosts in the job.
          clock: decides which groups make a batch, and which prompts are submitted again.
          size: number of prompts in a batch, without prompts in reserve for dynamic sampling.
          group_size: number of samples per prompt.
          shares: number of groups that a batch is cut into with `rollout.clock='tokens'`; 0 for one group per host.
          deadline_s: the longest wait for a batch, in seconds.
          read: function that reads the prompts of the next batch from the data.
        """
        self._pod, self._lease_server, self._clock = pod, lease_server, clock
        self._size, self._group_size, self._shares = size, group_size, shares
        self._deadline_s, self._read = deadline_s, read
        self._by_tokens = clock.mode != "wall"
        self._open = OpenGroups(clock, size, self._group, self._ends)
        self._decided: dict[int, list[RemoteGroup]] = {}  # decided groups that hosts still serve to trainers, by step
        self._queues: dict[int, _HostQueue] = {}  # accounts of the rollout hosts, by host
        # `_start`: the step at which this process began. `_at`: the step that it has reached.
        self._start = self._at = 0
        self._clock_from = 0  # steps before this step are repeated from the journal
        self._batches = 0  # number of batches of prompts that were read since the start of the run
        self._batches_before = 0  # number of batches of prompts that had been read before the current step
        self._failed: int | None = None  # number of a host that has reported that it cannot go on
        # The batch whose prompts could not be read, and the error.
        self._read_error: tuple[int, BatchError] | None = None
        # The step and the result of the last call of `_collect_states`.
        self._saved: tuple[int, Mapping[tuple[int, int], PartialBatch]] = (-1, {})
        self._awaited_step: int | None = None  # the step whose groups this process waits for
        lease_server.regroup = self._regroup
        pod.wait_sources.append(self._describe_wait)
        pod.channel.serve("groups", self._on_report)

    def resume(self, step: int, pending: Sequence[PartialBatch], whole: int) -> None:
        """Takes over the open groups of a checkpoint; called before any host is let in.

        Args:
          step: number of steps done.
          pending: unfinished batches of the checkpoint.
          whole: number of batches in the checkpoint that are complete.
        """
        self._start = self._at = step
        self._batches = step + sum(int(part.rows["asked_P"].sum()) for part in pending) // self._size
        if self._by_tokens:  # complete batches count as read; no host makes them again
            self._batches = step + whole + len(pending)
        self._clock_from = self._clock.known(step)
        self._open.resume(step, pending)

    def advance(self, step: int, batches: int) -> dict[str, int]:
        """Advances to a step: submits again the prompts of groups that are too old, and hands out the prompts of new
        batches.

        If the prompts of a batch cannot be read, `decide` raises the error when training reaches this batch.

        Args:
          step: number of steps done.
          batches: number of batches, since the start of the run, whose prompts must have been read when this returns.

        Returns:
          The number of orders that each host must have read before it begins this window, by the host's address.
        """
        self._batches_before = self._batches
        new = self._new(batches)
        with self._lease_server.lock:
            self._at = step
            self._forget()
            self._open.resubmit(self._clock.stale(step, self._open.groups), step, self._give_up)
            for prompts in new:
                self._open.submit(prompts, self._batches)
                self._batches += 1
            self._assign()
            return {queue.address: queue.sent for queue in self._queues.values()}

    def decide(self, step: int) -> None:
        """Waits until a step's batch has its groups, and announces them to all processes.

        With `rollout.clock='wall'` the groups are first written to the journal.

        Raises:
          BatchError: the prompts of the batch could not be read.
          LateError: too few groups were ready within the deadline.
          ValueError: a group differs from the journal's record of it.
        """
        end = time.monotonic() + self._deadline_s
        with self._lease_server.lock:
            if self._lease_server.task(leases.batch(step)) is not None:
                return
            if self._read_error is not None and step >= self._read_error[0]:
                self._open_batch(step, [], [LEADER])
                error, lease = self._read_error[1], Lease(leases.batch(step), 0, 1, LEADER)
                self._pod.channel.put(lease.key("header"), codec.failure(error))  # other trainers raise it, too
                raise error
            self._awaited_step = step
            while not (chosen := self._choose_batch(step)) and self._failed is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise LateError(self._late(step))
                self._lease_server.lock.wait(left)
            self._awaited_step = None
            if not chosen:
                self._open_batch(step, [], [self._failed or 0])
                return
            if self._clock.known(step) == step:
                # A new decision, with `rollout.clock='wall'`: the sort puts each host's groups side by side, so that
                # each host has one lease. A decision that is repeated keeps the order of the journal.
                chosen.sort(key=lambda group: group.host)
            self._open.decide(step, chosen)
            self._decided[step] = chosen
            self._open_batch(step, [group.key for group in chosen], [group.host for group in chosen])

    def counts(self, step: int) -> Mapping[str, float]:
        """Returns the metrics of the queue at the time when the batch of a step was decided.

        Only the first call for a step returns metrics.
        """
        return self._open.counts(step)

    def state(self, step: int, first: int) -> PartialBatch:
        """Collects, for a checkpoint, as many open groups as the batch of a step will have.

        Groups whose prompts were read for the current step join the last batch that was begun before this step. Hosts
        offer the state of their groups at the start of each window in which a checkpoint is made.

        Args:
          step: step that trains on the batch.
          first: number of steps done.
        """
        if self._by_tokens:
            return join([self._part(group, first) for group in self._open.groups if group.submit_step == step])
        if self._saved[0] != first:
            self._saved = (first, self._collect_states(first))
        return self._open.state(step, step - first, last=step == self._batches_before - 1, found=self._saved[1])

    # The callers of the following methods hold the lock of the leases.

    def _group(
        self, prompts: Prompts, number: int, submit_step: int, repeated: bool, origin: PartialBatch | None
    ) -> RemoteGroup:
        quantum = self._clock.quantum(self._at) if origin is None else origin.quantum
        if not self._by_tokens and origin is not None and not begun(origin):
            origin = None
        samples = 0 if self._by_tokens else self._group_size
        return RemoteGroup(prompts, number, submit_step, repeated, origin, samples, self._at, quantum)

    def _ends(self, prompts: int) -> Sequence[int]:
        """Cuts a number of prompts into groups; returns 0 and the end of each group.

        With `rollout.clock='wall'` each prompt is a group; with 'tokens' group sizes differ by at most one prompt.
        """
        if not self._by_tokens:
            return range(prompts + 1)
        # Before the first host has joined, the batch is cut for the configured number of rollout hosts.
        hosts = len(self._queues) or len(self._pod.seat.hosts.heads)
        count = min(self._shares or max(hosts, 1), prompts)
        return [i * prompts // count for i in range(count + 1)]

    def _choose_batch(self, step: int) -> list[RemoteGroup]:
        """Returns the groups of a step's batch; an empty list as long as the batch has to wait."""
        if late := self._clock.stale_since(step, self._open.groups):
            self._open.resubmit(late, step, self._give_up)
            self._assign()
        if self._open.replace(step, self._give_up):
            self._assign()
        return self._clock.batch(step, self._open.groups, self._size)

    def _open_batch(self, step: int, groups: Sequence[tuple[int, int]], hosts: Sequence[int]) -> None:
        position = self._open.rest().decode()
        more = {"since": step, "groups": groups, "position": position}
        self._lease_server.open_chosen(leases.batch(step), hosts, joined=not self._by_tokens, **more)

    def _give_up(self, group: RemoteGroup) -> None:
        if group.host in self._queues:
            self._order(group.host, {"drop": [list(group.key)]})

    def _regroup(self) -> None:
        """Updates the list of hosts, and gives the groups of lost hosts to other hosts."""
        addresses = {host: self._pod.address(host) for host in self._lease_server.members}
        for host in [host for host, queue in self._queues.items() if addresses.get(host) != queue.address]:
            self._drop(self._queues.pop(host), None)
            # A host that could not go on would stop the job; once it is lost, other hosts make its groups, and the job
            # goes on.
            self._failed = None if self._failed == host else self._failed
        for host, address in addresses.items():
            self._queues.setdefault(host, _HostQueue(address, self._lease_server.members[host]))
        for group in self._open.groups:
            if group.host not in self._queues and group.host != NOBODY:
                group.host, group.entry, group.looked_up, group.moved = NOBODY, None, None, True
                self._lease_server.reassigned += 1
                if self._clock.anew and self._clock.recorded(*group.key, self._at) is None:
                    group.origin = None
        for step, groups in self._decided.items():
            if (task := self._lease_server.task(leases.batch(step))) is None:
                continue
            for lease in task.leases:
                moved = [group for group in groups[lease.first : lease.last] if group.host != lease.host]
                for group in moved:
                    group.host, group.moved = lease.host, True
                if lease.host in self._queues:
                    self._send_groups(lease.host, moved, in_batch=True)
        self._assign()
        self._lease_server.lock.notify_all()

    def _assign(self) -> None:
        """Gives the groups that no host makes to the hosts with the fewest unfinished groups."""
        if not self._queues:
            return
        load, new = dict.fromkeys(sorted(self._queues), 0), {}
        for group in self._open.groups:
            if group.host != NOBODY and group.entry is None:
                load[group.host] += 1
        for group in (group for group in self._open.groups if group.host == NOBODY):
            group.host = min(load, key=lambda host: (load[host], host))
            load[group.host] += 1
            new.setdefault(group.host, []).append(group)
        for host, groups in new.items():
            self._send_groups(host, groups)

    def _send_groups(self, host: int, groups: Sequence[RemoteGroup], *, in_batch: bool = False) -> None:
        """Orders a host to make groups.

        `in_batch` is True if a batch already holds the groups, so that the host must draw the same tokens again.
        """
        # Groups with different fields go into separate orders: join() would add every field to all prompts, as None.
        for _, alike in itertools.groupby(groups, lambda group: tuple(group.prompts.fields)):
            entries, parts = [], []
            for group in alike:
                own = {"number": group.number, "asked": group.submit_step, "repeated": group.repeated}
                own |= {"quantum": group.quantum, "moved": group.moved, "prompts": len(group.prompts.length_P)}
                own |= {"position": group.prompts.data_state.decode(), "taken": in_batch}
                entries.append({**own, **self._how_to_draw(group, in_batch)})
                parts.append(group.part(group.submit_step))
            whole = join(parts).message()
            self._order(host, {"partial": whole.value, "groups": entries}, whole.arrays)

    def _how_to_draw(self, group: RemoteGroup, in_batch: bool) -> JsonObject:
        """Returns the part of an order that tells a host how to draw a group.

        `record`: the journal's entry that the group must repeat, or None. `since`: the first version of the weights
        with which the host plays the group.
        """
        if self._by_tokens:
            since = self._start if group.origin is not None else group.since
            return {"record": None, "since": since}
        record = group.entry if in_batch else self._clock.recorded(*group.key, self._at)
        since = min((runs[0][0] for runs in record["runs"] if runs), default=self._at) if record else self._at
        # A group from a checkpoint continues from its state at the beginning of window `_start`.
        return {"record": record, "since": self._start if group.origin is not None else since}

    def _order(self, host: int, value: JsonObject, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        queue = self._queues[host]
        message = Message({**value, "window": self._at, "clock_from": self._clock_from}, arrays or {})
        self._pod.channel.put(order(queue.address, queue.sent), message)
        queue.sent += 1

    def _drop(self, queue: _HostQueue, read: int | None) -> None:
        """Stops offering the first `read` orders to a host; all orders if `read` is None, because the host is lost."""
        for number in range(queue.dropped, queue.sent if read is None else read):
            self._pod.channel.drop(order(queue.address, number))
            queue.dropped = number + 1

    def _forget(self) -> None:
        """Frees the memory of batches that all trainers have."""
        for step in [step for step in self._decided if self._lease_server.task(leases.batch(step)) is None]:
            del self._decided[step]
        self._clock.forget(self._at)
        change = min((queue.change for queue in self._queues.values()), default=0)
        self._lease_server.passed(min([self._at, *self._decided]), change)

    def _on_report(self, message: Message) -> Message:
        """Stores a host's report about its groups; runs on the channel's thread."""
        report = message.value
        with self._lease_server.lock:
            host = next((host for host, queue in self._queues.items() if queue.address == report["address"]), None)
            if host is None:
                return Message()
            queue = self._queues[host]
            queue.change = max(queue.change, int(report["change"]))
            self._drop(queue, int(report["orders"]))
            mine = {group.key: group for group in self._open.groups if group.host == host}
            for index, submit_step, version in report["drawn"]:
                if (group := mine.get((index, submit_step))) is not None:
                    group.looked_up = version
            without_signal = {(index, submit_step) for index, submit_step in report["without_signal"]}
            for record in report["ended"]:
                if (group := mine.get((record["index"], record["asked"]))) is not None:
                    group.entry, group.signal = record, group.key not in without_signal
                    group.looked_up = min((runs[0][0] for runs in record.get("runs", ()) if runs), default=None)
            if report["failed"]:
                self._failed = host
            self._lease_server.lock.notify_all()
        return Message()

    def _describe_wait(self) -> str:
        served = bool(self._queues) or self._awaited_step is None
        return "" if served else f"a rollout host for the prompts of step {self._awaited_step}: none is in the job"

    def _late(self, step: int) -> str:
        who = {host: sum(g.entry is None for g in self._open.groups if g.host == host) for host in sorted(self._queues)}
        hosts = ", ".join(
            f"{self._pod.seat.hosts.name(h)} (host {h}) makes {plural(n, 'group')}" for h, n in who.items() if n
        )
        return (
            f"{self._pod.name} waited {self._deadline_s:.0f} s for the groups of step {step}: "
            f"{hosts or 'there is no rollout host in the job'}. See what they are doing (kill -USR1 prints their "
            "stacks), add a host (docs/hosts.md), or raise log.stall_s."
        )

    # The callers of the following methods do not hold the lock of the leases.

    def _new(self, batches: int) -> list[Prompts]:
        """Reads prompts until `batches` batches have been read since the start of the run; keeps an error for later."""
        new: list[Prompts] = []
        while self._read_error is None and self._batches + len(new) < batches:
            try:
                new.append(self._read())
            except BatchError as error:
                self._read_error = self._batches + len(new), error
        return new

    def _part(self, group: RemoteGroup, at: int) -> PartialBatch:
        """Fetches the state of a group at the start of a window, from whichever host has the group by then.

        Raises:
          LateError: no host had the group within the deadline.
        """
        key, end = part_of(at, group.key), time.monotonic() + self._deadline_s
        while True:
            host, queue = group.host, self._queues.get(group.host)
            try:
                if queue is not None:
                    return of_message(self._pod.get(host, key, self._deadline_s, moved=self._has_moved(host, queue)))
            except MovedError:
                end = time.monotonic() + self._deadline_s
            if time.monotonic() > end:
                raise LateError(self._late(group.submit_step))
            time.sleep(_AGAIN_S)

    def _has_moved(self, host: int, queue: _HostQueue) -> Callable[[], bool]:
        """Returns a function that tells whether a host is lost, or another process has taken its place."""
        return lambda: self._queues.get(host) is not queue

    def _collect_states(self, at: int) -> dict[tuple[int, int], PartialBatch]:
        """Collects the state of all groups at the start of a window; hosts that are lost meanwhile are left out."""
        with self._lease_server.lock:
            queues = {host: queue for host, queue in self._queues.items() if queue.since < at}
        states: dict[tuple[int, int], PartialBatch] = {}
        for host, queue in queues.items():
            try:
                message = self._pod.get(host, part_of(at), self._deadline_s, moved=self._has_moved(host, queue))
            except MovedError:
                continue
            for part in parts_of(message) if message.value else ():
                states[int(part.prompts.index_P[0]), int(part.samples[0]["asked"])] = part
        return states


def order(address: str, number: int) -> str:
    """Returns the channel's key of an order to the host at an address; `number` counts the host's orders from 0."""
    return f"orders/{address}/{number}"


def part_of(step: int, group: tuple[int, int] | None = None) -> str:
    """Returns the channel's key of a host's state after a step: the state of one group, or of all groups joined."""
    return f"groups@{step}" if group is None else f"group/{group[0]}/{group[1]}@{step}"


def parts_of(message: Message, prompts: Sequence[int] = ()) -> list[PartialBatch]:
    """Unpacks groups that were joined in one message.

    Args:
      message: the joined groups.
      prompts: number of prompts of each group; empty if every group has one prompt.
    """
    whole = of_message(message)
    ends = np.cumsum([0, *(prompts or [1] * len(whole.prompts.length_P))])
    return [cut(whole, take_prompts(whole.prompts, np.arange(i, j)), int(i)) for i, j in itertools.pairwise(ends)]
