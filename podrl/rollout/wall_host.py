"""A rollout host of a pod by the wall clock: it makes the groups that the leader gives it, and serves them."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrl.rollout.clock import in_sessions
from podrl.rollout.open_groups import OwnGroup, begun
from podrl.rollout.partial import Partial, join
from podrl.rollout.points import Points
from podrl.rollout.wall_queue import order, part_of, single
from podrl.rollout.windows import noted
from podrl.rundir import leases
from podrl.rundir.leases import Lease, Told
from podrl.runtime.channel import ChannelError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.types import BatchError, Policy

_log = logging.getLogger("podrl.wall")
_FOREVER_S = 1e9


@dataclasses.dataclass(eq=False)
class AssignedGroup(OwnGroup):
    """A group that the leader assigned to this host.

    Attributes:
      recorded: the journal's entry of the group, which its samples must become; None where the clock decides.
      since: the first version of the weights that draws the group here from now on, where it is recorded.
      taken: True once a batch holds the group.
      told: True once the leader knows that the group has ended.
      told_drawn: True once the leader knows the oldest version that drew a token.
    """

    recorded: Mapping[str, Any] | None
    since: int
    taken: bool
    told: bool = False
    told_drawn: bool = False


class WallHost:
    """Plays groups window after window, tells the leader which have ended, and serves those that batches hold.

    A window begins when the batch of its step is first asked for, and ends at the next dispatch once the next weights
    are there. Orders of the leader interrupt it, for a dispatch. Samples are played on `thread`, batches are put
    together on another. Stands in the place of podrl.rollout.windows.Windows.
    """

    def __init__(
        self,
        generator: Any,
        thread: ThreadPoolExecutor,
        pod: Pod,
        told: Told,
        *,
        held: Callable[[Policy], Policy],
        offer: Callable[[Lease, Any], None],
        taking: Callable[[], None],
        deadline_s: float,
    ):
        """Begins nothing yet.

        Args:
          generator: a podrl.learner.generation.Generator.
          thread: the one that uses the rollout mesh.
          pod: the job's processes.
          told: the leases as this host knows them.
          held: gives the weights of a policy's version, where others may have taken their place.
          offer: serves a part of a batch, or why there is none.
          taking: called before groups are begun that another host had.
          deadline_s: the longest wait for the leader's orders.
        """
        self._generator, self._thread, self._pod, self._leases = generator, thread, pod, told
        self._held, self._offer, self._taking, self._deadline_s = held, offer, taking, deadline_s
        self._serving = ThreadPoolExecutor(1, thread_name_prefix="podrl-serving")
        self._more = threading.Condition()  # of the next ten
        self._orders: list[Message] = []  # not carried out yet
        self._unfinished: int | None = None  # a window that is repeated, and has not come to its end
        self._asides: list[Callable[[], None]] = []  # not done yet
        self._read = 0  # orders that have come
        self._window: int | None = None  # the version that samples are drawn by now
        self._closed = False
        self._owed: set[Lease] = set()  # parts of batches that are not served yet
        self._known: set[Lease] = set()  # these, and those that were served
        self._passed: list[tuple[int, int]] = []  # groups that all trainers have
        self._groups: dict[tuple[int, int], AssignedGroup] = {}  # by prompt and the step it was asked at; of the thread
        self._clock_from = 0  # windows before that are repeated as they are recorded
        self._policy: Policy | None = None  # of the next window
        self._failed: BatchError | None = None
        self._served_at = self._began = time.monotonic()
        self._window_s: float | None = None  # of the window before this one

    def follow(self) -> None:
        """Begins to read the leader's orders."""
        threading.Thread(target=self._follow, name="podrl-orders", daemon=True).start()

    def agreed(self, word: Mapping[str, Any] | None, taken: int) -> None:
        """Waits for the orders that the leader's word counts; trainers have all of the batches before `taken`.

        Raises:
          ChannelError: they did not come within the deadline.
        """
        count = (word or {}).get("orders", {}).get(self._pod.channel.address, 0)
        with self._more:
            if not self._more.wait_for(lambda: self._read >= count, self._deadline_s):
                raise ChannelError(
                    f"{self._pod.name} waited {self._deadline_s:.0f} s for orders of trainer 0, and {self._read} of "
                    f"{count} have come. Start the same command again, and report this."
                )
            self._known = {lease for lease in self._known if leases.step_of(lease.task) >= taken}
            for name in self._leases.names():
                task = self._leases.task(name)
                if task is not None and task.groups and leases.step_of(name) < taken:
                    self._passed += [(int(index), int(asked)) for index, asked in task.groups]

    def publish(self, policy: Policy) -> None:
        """Gives the policy of the next window."""
        self._policy = policy

    def begin(self) -> None:
        """Begins the window that belongs to the newest policy."""
        if self._policy is not None:
            with self._more:
                self._window = self._unfinished = self._policy.version
                self._began = time.monotonic()
                self._submit()
            self._policy = None

    def end_window(self) -> None:
        """Has all samples rest, so that the thread is free to move weights."""
        with self._more:
            if self._window is not None:
                self._window_s = time.monotonic() - self._began
            self._window = None

    def aside(self, work: Callable[[], None]) -> None:
        """Has the thread do something between two dispatches."""
        with self._more:
            self._asides.append(work)
            self._submit()

    def told(self, name: str) -> None:
        """Serves what this host has of a batch that the leader has decided on, or given to it since."""
        with self._more:
            news = set(self._leases.mine(name)) - self._known
            self._known |= news
            self._owed |= news
            if news and not self._closed:
                self._serving.submit(self._serve)

    def parts(self, at: int) -> tuple[str, Message]:
        """Returns what this host has of its groups between windows, for a checkpoint, and the channel's key of that."""
        groups = self._thread.submit(lambda: [g.part(at) for g in self._groups.values() if not g.taken]).result()
        return part_of(at), join(groups).message() if groups else Message({})

    def closing(self) -> None:
        """Ends the threads' work, whatever it is."""
        with self._more:
            self._closed, self._window = True, None

    def close(self) -> None:
        """Gives up what is open."""
        self.closing()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._serving.shutdown(wait=True, cancel_futures=True)
        self._give_up(list(self._groups))

    def _submit(self) -> None:
        """Has the thread carry out orders and play on; under the lock."""
        if not self._closed:
            self._thread.submit(self._play, self._window)

    def _follow(self) -> None:
        """Reads orders, one after the other."""
        address = self._pod.channel.address
        while True:
            key = order(address, self._read)
            request = self._pod.channel.request(self._pod.address(LEADER), "get", key, Message())
            try:
                message = request.wait(_FOREVER_S, "trainer 0: orders")
            except ChannelError:
                return
            with self._more:
                if self._closed:
                    return
                self._orders.append(message)
                self._clock_from = int(message.value["clock_from"])
                self._read += 1
                self._more.notify_all()
                self._submit()

    # On the thread.

    def _play(self, version: int | None) -> None:
        """Does what is asked aside, then plays a window until it ends or all samples rest, with the orders that come.

        A window that is repeated does not end before its samples are where they were then.
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
                self._play_on(version, repeats)
                if self._hurried(version):
                    continue
                self._pass(version)
                self._report(last=True)
                self._unfinished = None
                return
        except BatchError as error:
            self._failed = error
            self._say(failed=True)  # the leader decides on a batch that says why there is none
        except BaseException as error:
            if not self._closed:
                _log.exception("%s could not go on with its samples", self._pod.name)
                self._pod.quit(f"samples could not be made: {error}")
            raise

    def _play_on(self, version: int, repeats: bool) -> None:
        self._repeat(list(self._groups.values()), version)
        if repeats:
            return
        open_ = [group for group in self._groups.values() if group.recorded is None and not group.ended]
        rows = [group.row(Points(urgent=group.oldest is not None)) for group in open_]

        def halted() -> bool:
            return self._hurried(version) or self._window != version

        if rows:
            self._generator.play(rows, self._held(Policy({}, version)), halt=halted, took=self._took)

    def _repeat(self, groups: Sequence[AssignedGroup], version: int) -> None:
        """Plays recorded groups through a window, session by session: nothing else interrupts them.

        An interruption would be another session, in which samples have other last bits than those recorded.
        """
        known = [(g, g.recorded) for g in groups if g.recorded is not None and g.since <= version and not g.ended]
        for chosen in in_sessions(known, version):
            rows = [group.row(points) for group, points in chosen if not group.ended]
            if rows and not self._closed:
                policy = self._held(Policy({}, version))
                self._generator.play(rows, policy, halt=lambda: self._closed, took=self._took)

    def _hurried(self, version: int) -> bool:
        """True where something is to be done before samples go on."""
        due = any(one.value["window"] <= version for one in list(self._orders))
        return due or bool(self._asides) or self._closed

    def _do_asides(self) -> None:
        with self._more:
            asides, self._asides = self._asides, []
        for work in asides:
            work()

    def _carry_out(self, version: int) -> None:
        """Carries out the orders up to those for a window."""
        with self._more:
            due = [one for one in self._orders if one.value["window"] <= version]
            self._orders = [one for one in self._orders if one.value["window"] > version]
            passed, self._passed = self._passed, []
        self._give_up(passed)
        if any(one.value["moved"] for one in due):
            self._taking()
        for one in due:
            self._give_up([(int(index), int(asked)) for index, asked in one.value.get("drop", ())])
            if "partial" in one.value:
                parts = single(Message(one.value["partial"], one.arrays))
                for (key, part), said in zip(parts, one.value["groups"], strict=True):
                    self._groups[key] = self._assigned(part, said)

    def _assigned(self, part: Partial, said: Mapping[str, Any]) -> AssignedGroup:
        origin, asked = part if begun(part) else None, int(part.samples[0]["asked"])
        return AssignedGroup(
            part.prompts,
            number=int(said["number"]),
            asked=asked,
            repeated=bool(part.samples[0]["repeated"]),
            origin=origin,
            making=self._generator.begin(part.prompts, asked, 0, origin),
            recorded=said["record"],
            since=int(said["since"]),
            taken=bool(said["taken"]),
        )

    def _catch_up(self, version: int) -> None:
        """Plays recorded groups, taken over from another host, through the windows before a version's."""
        late = [g for g in self._groups.values() if g.recorded is not None and g.since < version and not g.ended]
        for before in range(min((group.since for group in late), default=version), version):
            self._repeat(late, before)
        for group in late:
            group.since = version

    def _pass(self, version: int) -> None:
        """Notes that recorded groups have been played to the end of a window."""
        for group in self._groups.values():
            group.since = max(group.since, version + 1)

    def _took(self) -> None:
        """A sample has ended: tells the leader of groups that have, and serves what was waited for."""
        self._report()
        if self._owed:
            self._serving.submit(self._serve)

    def _report(self, *, last: bool = False) -> None:
        """Tells the leader which groups have ended, and, if all rest (`last`), the oldest version that drew each."""
        ended = [group for group in self._groups.values() if not group.told and group.ended]
        for group in ended:
            if group.taken and group.record() != group.recorded:
                raise ValueError(f"prompt {group.index}, taken over, does not become what it was: {group.recorded}")
        drawn = [g for g in self._groups.values() if last and not g.told_drawn and g.oldest is not None]
        if ended or last:
            self._say(ended=[group.record() for group in ended], drawn=[[g.index, g.asked, g.oldest] for g in drawn])
        for group in ended:
            group.told = True
        for group in drawn:
            group.told_drawn = True

    def _say(self, *, ended: Sequence[Any] = (), drawn: Sequence[Any] = (), failed: bool = False) -> None:
        about = {"address": self._pod.channel.address, "orders": self._read, "change": self._leases.change}
        value = {**about, "ended": list(ended), "drawn": list(drawn), "failed": failed}
        self._pod.channel.request(self._pod.address(LEADER), "call", "wall", Message(value))

    def _give_up(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if (group := self._groups.pop(key, None)) is not None:
                self._generator.give_up(group.making)

    # On the thread that serves.

    def _serve(self) -> None:
        """Puts together and serves the parts of batches that are owed, and whose groups have all ended."""
        try:
            for lease in list(self._owed):
                self._serve_part(lease)
        except BaseException as error:
            self._pod.quit(f"samples could not be put together: {error}")
            raise

    def _serve_part(self, lease: Lease) -> None:
        task = self._leases.task(lease.task)
        if task is None or not self._leases.holds(lease):
            self._owed.discard(lease)
            return
        keys = [(int(index), int(asked)) for index, asked in task.groups][lease.first : lease.last]
        if self._failed is not None and not keys:
            self._owed.discard(lease)
            self._offer(lease, self._failed)
            return
        groups = [group for key in keys if (group := self._groups.get(key)) is not None and group.ended]
        if not keys or len(groups) < len(keys):
            return
        self._owed.discard(lease)
        for group in groups:
            group.taken = True
        self._offer(lease, self._made(groups, leases.step_of(lease.task), task.position))

    def _made(self, groups: Sequence[AssignedGroup], step: int, position: str) -> Any:
        now = time.monotonic()
        seconds, self._served_at = now - self._served_at, now
        try:
            made = self._generator.gather([group.making for group in groups], step, seconds)
        except BatchError as error:
            return error
        prompts = dataclasses.replace(made.rollouts.prompts, data_state=position.encode())
        made = dataclasses.replace(made, rollouts=dataclasses.replace(made.rollouts, prompts=prompts))
        return made if self._window_s is None else noted(made, {"time/window": self._window_s})
