"""The player, on a rollout host of a pod: it makes the groups that the dispatcher assigns to the host, and serves
them."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrl.learner.pods.dispatch import order, part_of, parts_of
from podrl.mappings import JournalEntry, JsonObject
from podrl.rollout.group_player import GroupPlayer, Mode, OwnGroup
from podrl.rollout.open_groups import begun
from podrl.rollout.partial import PartialBatch, join
from podrl.rundir import leases
from podrl.rundir.leases import Lease, LeaseClient
from podrl.runtime.channel import ChannelError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.types import BatchError, Policy

_log = logging.getLogger("podrl.hosting")
_FOREVER_S = 1e9
_TELL_EVERY = 4  # number of windows between two reports to the leader, with rollout.clock='tokens'


class HostPlayer:
    """Plays groups window after window, and serves the groups that batches hold.

    A window begins when the batch of its step is first requested. With `rollout.clock='tokens'` a window ends when its
    samples have drawn their tokens. With 'wall' a window ends when the next weights have arrived and the running
    dispatch is over. Only with 'wall', orders of the leader interrupt the window after the running dispatch, and
    reports tell the leader which groups have ended. Samples are played on `thread`; a second thread puts batches
    together.
    """

    def __init__(
        self,
        generator: Any,
        thread: ThreadPoolExecutor,
        pod: Pod,
        lease_client: LeaseClient,
        *,
        mode: Mode,
        weights_of: Callable[[Policy], Policy],
        offer: Callable[[Lease, Any], None],
        offer_state: Callable[[int, str, Message], None],
        on_takeover: Callable[[], None],
        deadline_s: float,
    ):
        """Stores the collaborators.

        Args:
          generator: a podrl.learner.generation.Generator.
          thread: the thread that uses the rollout mesh.
          pod: the job's processes.
          lease_client: the leases as this host knows them.
          mode: the clock of the samples, 'wall', 'windows' or 'whole' (podrl.rollout.group_player.Mode).
          weights_of: function that returns a policy with its version's weights, moved again if the mesh holds another
            version.
          offer: function that serves a part of a batch, or the error that says why there is none.
          offer_state: function of (step, key, message) that offers a state which the checkpoint after the step holds.
          on_takeover: function called before this host begins groups of a lost host.
          deadline_s: the longest wait for the leader's orders, in seconds.
        """
        self._thread, self._pod, self._leases, self._mode = thread, pod, lease_client, mode
        self._offer, self._offer_state = offer, offer_state
        self._on_takeover, self._deadline_s = on_takeover, deadline_s
        self._player = GroupPlayer(
            generator,
            mode,
            weights=lambda version: weights_of(Policy({}, version)),
            on_ended=self._on_ended,
            closed=lambda: self._closed,
        )
        self._serving = ThreadPoolExecutor(1, thread_name_prefix="podrl-serving")
        self._more = threading.Condition()  # protects the attributes from `_orders` to `_groups`
        self._orders: list[Message] = []  # orders that still have to be carried out
        self._unfinished: int | None = None  # version of the newest window; None once it has ended
        self._asides: list[Callable[[], None]] = []  # work that waits for the gap between two dispatches
        self._order_count = 0  # number of orders received
        self._at = 0  # the step that this host has reached
        self._window: int | None = None  # version of the window that is open; None between windows
        self._closed = False
        self._unserved: set[Lease] = set()  # parts of batches that are not served yet
        self._parts: set[Lease] = set()  # parts of batches that are to be served, or were served
        self._released: list[tuple[int, int]] = []  # keys of groups that all trainers have
        self._groups: dict[tuple[int, int], OwnGroup] = {}  # groups by key; only the rollout thread changes them
        self._clock_from = 0  # windows of earlier versions are repeated from the journal
        self._policy: Policy | None = None  # policy of the next window
        self._failed: BatchError | None = None
        self._quiet = True  # no report went to the leader since the window began
        self._window_count = 0  # number of windows that have ended

    def follow(self) -> None:
        """Begins to read the leader's orders."""
        threading.Thread(target=self._follow, name="podrl-orders", daemon=True).start()

    def await_orders(self, step: int, orders: Mapping[str, int], needed_step: int) -> None:
        """Waits for the leader's orders before a window, and notes which groups all trainers have.

        Args:
          step: number of steps done.
          orders: number of orders that each host must have read, by the host's address.
          needed_step: first step whose batch a trainer host may still need, whole or in part.

        Raises:
          ChannelError: the orders did not come within the deadline.
        """
        count = orders.get(self._pod.channel.address, 0)
        with self._more:
            self._at = step
            if not self._more.wait_for(lambda: self._order_count >= count, self._deadline_s):
                raise ChannelError(
                    f"{self._pod.name} waited {self._deadline_s:.0f} s for orders of trainer 0 and "
                    f"received only {self._order_count} of {count}. Start the same command again, and report this."
                )
            self._parts = {lease for lease in self._parts if leases.step_of(lease.task) >= needed_step}
            for name in self._leases.names():
                task = self._leases.task(name)
                if task is not None and task.groups and leases.step_of(name) < needed_step:
                    self._released += [(int(index), int(submit_step)) for index, submit_step in task.groups]

    def publish(self, policy: Policy) -> None:
        """Sets the policy of the next window."""
        self._policy = policy

    def begin(self) -> None:
        """Begins the window of the newest policy, unless it has begun."""
        if self._policy is not None:
            with self._more:
                self._window = self._unfinished = self._policy.version
                self._player.begin_window()
                self._submit()
            self._policy = None

    def end_window(self) -> None:
        """Closes the window, so that the rollout thread becomes free to move weights.

        Samples stop after the running dispatch. Samples whose tokens in the window are fixed (with
        `rollout.clock='tokens'`, or in a repeated window) draw these tokens first.
        """
        with self._more:
            self._player.end_window()
            self._window = None

    def aside(self, work: Callable[[], None]) -> None:
        """Makes the rollout thread do `work` between two dispatches."""
        with self._more:
            self._asides.append(work)
            self._submit()

    def serve_batch(self, name: str) -> None:
        """Serves this host's parts of a batch; called when the leader has decided the batch, or has moved a part."""
        with self._more:
            news = set(self._leases.mine(name)) - self._parts
            self._parts |= news
            self._unserved |= news
            if news and not self._closed:
                self._serving.submit(self._serve)

    def save(self) -> None:
        """Offers the state of this host's groups between two windows, for a checkpoint."""
        self._thread.submit(self._save, self._at).result()

    def closing(self) -> None:
        """Sets the flag at which both threads end their work as soon as they can."""
        with self._more:
            self._closed, self._window = True, None

    def close(self) -> None:
        """Ends both threads, and cancels every open group."""
        self.closing()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._serving.shutdown(wait=True, cancel_futures=True)
        self._give_up(list(self._groups))

    def _submit(self) -> None:
        """Makes the rollout thread carry out orders and continue the open window; the caller holds `_more`."""
        if not self._closed:
            self._thread.submit(self._play, self._window)

    def _follow(self) -> None:
        """Reads the leader's orders, one after the other; runs on a thread of its own."""
        address = self._pod.channel.address
        while True:
            key = order(address, self._order_count)
            request = self._pod.channel.request(self._pod.address(LEADER), "get", key, Message())
            try:
                message = request.wait(_FOREVER_S, "trainer 0: orders")
            except ChannelError:
                return
            if moved := _moved_groups(message):
                count, steps = sum(entry["prompts"] for entry in moved), sorted({entry["asked"] for entry in moved})
                _log.warning("%s takes over prompts of a lost host: %d, of steps %s.", self._pod.name, count, steps)
            with self._more:
                if self._closed:
                    return
                self._orders.append(message)
                self._clock_from = int(message.value["clock_from"])
                self._order_count += 1
                self._more.notify_all()
                self._submit()

    # Called on the rollout thread.

    def _save(self, at: int) -> None:
        groups = list(self._groups.values())
        if self._mode == "wall":
            parts = [group.part(at) for group in groups if not group.in_batch]
            self._offer_state(at, part_of(at), join(parts).message() if parts else Message({}))
        elif self._mode == "windows":
            self._save_each([group for group in groups if group.submit_step > at], at)

    def _save_each(self, groups: Sequence[OwnGroup], at: int) -> None:
        """Offers each group's state at the start of its window for the checkpoint after step `at`."""
        for group in groups:
            self._offer_state(at, part_of(at, group.key), group.part(at).message())

    def _play(self, version: int | None) -> None:
        """Does the work that waits in `_asides`, carries out orders, and plays a version's window until its end.

        A window that is repeated from the journal ends only when its samples have drawn the recorded tokens.
        """
        try:
            while not self._closed:
                self._do_asides()
                if version is None or self._failed is not None:
                    return
                repeats = version < self._clock_from
                if self._window != version and not (repeats and self._unfinished == version):
                    return
                self._carry_out(version)
                self._catch_up(version)
                self._player.play(self._groups.values, version, halt=lambda: self._must_pause(version), repeats=repeats)
                if self._has_work(version):
                    continue
                self._close_window(version)
                self._report(last=True)
                self._unfinished = None
                return
        except BatchError as error:
            self._failed = error
            # The leader then decides on a batch without groups. The lease of this batch carries the error to the
            # trainers.
            self._send_report(failed=True)
            self._serving.submit(self._serve)
        except BaseException as error:
            if not self._closed:
                _log.exception("%s could not go on with its samples", self._pod.name)
                self._pod.quit(f"samples could not be made: {error}")
            raise

    def _must_pause(self, version: int) -> bool:
        """Returns True if samples must stop: the window was closed, or orders or other work must be done first."""
        return self._has_work(version) or self._window != version

    def _has_work(self, version: int) -> bool:
        """Returns True if orders or other work must be done before samples go on."""
        ordered = any(one.value["window"] <= version for one in list(self._orders))
        return ordered or bool(self._asides) or self._closed

    def _do_asides(self) -> None:
        with self._more:
            asides, self._asides = self._asides, []
        for work in asides:
            work()

    def _carry_out(self, version: int) -> None:
        """Carries out the orders of a version's window and of the windows before it."""
        with self._more:
            orders = [one for one in self._orders if one.value["window"] <= version]
            self._orders = [one for one in self._orders if one.value["window"] > version]
            released, self._released = self._released, []
        self._give_up(released)
        if any(_moved_groups(one) for one in orders):
            self._on_takeover()
        for one in orders:
            self._give_up([(int(index), int(submit_step)) for index, submit_step in one.value.get("drop", ())])
            if "partial" in one.value:
                groups = one.value["groups"]
                parts = parts_of(Message(one.value["partial"], one.arrays), [int(entry["prompts"]) for entry in groups])
                for part, entry in zip(parts, groups, strict=True):
                    group = self._open_group(part, entry)
                    self._groups[group.key] = group

    def _open_group(self, part: PartialBatch, entry: JournalEntry) -> OwnGroup:
        prompts = dataclasses.replace(part.prompts, data_state=entry["position"].encode())
        part = dataclasses.replace(part, prompts=prompts)
        return self._player.open(
            prompts,
            int(entry["number"]),
            int(entry["asked"]),
            bool(entry["repeated"]),
            part if part.samples and (begun(part) or self._mode != "wall") else None,
            quantum=int(entry["quantum"]),
            recorded=entry["record"],
            since=int(entry["since"]),
            in_batch=bool(entry["taken"]),
        )

    def _catch_up(self, version: int) -> None:
        """Plays groups taken over from another host through the windows that they missed, up to a version's window."""
        late = [g for g in self._groups.values() if g.fixed and g.since < version and not g.ended]
        for before in range(min((group.since for group in late), default=version), version):
            self._save_late(late, before)
            self._player.repeat(late, before)
        self._save_late(late, version)
        for group in late:
            group.since = version

    def _save_late(self, groups: Sequence[OwnGroup], version: int) -> None:
        """Offers the state of groups at the start of a window, if a checkpoint of this window may still be saved.

        With `rollout.clock='wall'` nothing is offered.
        """
        if self._mode == "windows" and version >= self._at - 1:
            self._save_each([group for group in groups if not group.ended], version)

    def _close_window(self, version: int) -> None:
        """Records that all groups have been played to the end of a version's window."""
        for group in self._groups.values():
            group.since = max(group.since, version + 1)

    def _on_ended(self) -> None:
        """Tells the leader which groups have ended, and serves the parts of batches that are now complete."""
        self._report()
        if self._unserved:
            self._serving.submit(self._serve)

    def _report(self, *, last: bool = False) -> None:
        """Tells the leader which groups have ended and, at the end of a window (`last`), the oldest version of each.

        With `rollout.clock='tokens'` the leader needs neither the groups nor the versions. Every few windows a report
        says how many orders and changes of leases this host has read, so that the leader can free them.
        """
        if self._mode != "wall":
            self._window_count += last
            if last and self._window_count % _TELL_EVERY == 0:
                self._send_report()
            return
        ended = [group for group in self._groups.values() if not group.ended_reported and group.ready]
        for group in ended:
            group.check()
        drawn = [g for g in self._groups.values() if last and not g.oldest_reported and g.oldest is not None]
        if ended or drawn or (last and self._quiet):
            self._send_report(
                ended=[group.record() for group in ended],
                without_signal=[group.key for group in ended if group.signal is False],
                drawn=[[g.index, g.submit_step, g.oldest] for g in drawn],
            )
        for group in ended:
            group.ended_reported = True
        for group in drawn:
            group.oldest_reported = True
        if last:
            self._quiet = True

    def _send_report(self, *, failed: bool = False, **groups: Sequence[object]) -> None:
        """Sends a report to the leader.

        Args:
          failed: True if this host cannot go on.
          groups: `ended` (journal entries), `without_signal` (keys) and `drawn` ([index, submit step, oldest version]);
            a list that is left out is empty.
        """
        self._quiet = False
        about = {"address": self._pod.channel.address, "orders": self._order_count, "change": self._leases.change}
        value = {**about, "ended": [], "without_signal": [], "drawn": [], "failed": failed, **groups}
        self._pod.channel.request(self._pod.address(LEADER), "call", "groups", Message(value))

    def _give_up(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if (group := self._groups.pop(key, None)) is not None:
                self._player.give_up(group)

    # Called on the serving thread.

    def _serve(self) -> None:
        """Puts together and serves the unserved parts of batches whose groups have all ended."""
        try:
            for lease in list(self._unserved):
                self._serve_part(lease)
        except BaseException as error:
            self._pod.quit(f"samples could not be put together: {error}")
            raise

    def _serve_part(self, lease: Lease) -> None:
        task = self._leases.task(lease.task)
        if task is None or not self._leases.holds(lease):
            self._unserved.discard(lease)
            return
        keys = [(int(index), int(submit_step)) for index, submit_step in task.groups][lease.first : lease.last]
        groups = [group for key in keys if (group := self._groups.get(key)) is not None and group.ended]
        if not keys or len(groups) < len(keys):
            if self._failed is not None:
                self._unserved.discard(lease)
                self._offer(lease, self._failed)
            return
        self._unserved.discard(lease)
        for group in groups:
            group.in_batch = True
        try:
            result = self._player.experience(groups, leases.step_of(lease.task), task.position.encode())
        except BatchError as error:
            result = error
        self._offer(lease, result)


def _moved_groups(order: Message) -> list[JsonObject]:
    """Lists an order's entries for groups that a lost host had."""
    return [entry for entry in order.value.get("groups", ()) if entry["moved"]]
