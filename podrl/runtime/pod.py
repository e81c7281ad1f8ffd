"""The processes of one job: how they find each other, notice a lost one, and end together with one exit code.

Trainer 0 leads. Everyone joins at its endpoint and gets the roster; it watches all connections and the others watch
its. A process that fails tells the leader before it goes, the leader tells everybody, and each leaves hard: nobody
sits in a collective or a barrier waiting for the dead.
"""

import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from podrl.runtime.channel import Channel, ChannelError, LateError
from podrl.runtime.message import Message
from podrl.runtime.roles import ROLLOUT, Hosts
from podrl.runtime.watchdog import EXIT_DONE, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED

LEADER = 0
_log = logging.getLogger("podrl.pod")
_FAREWELL_S = 5.0
_OVER_S = 3600.0
_LAST_S = 10.0
_OTHERS_S = 30.0
_LAST_STEP_S = 0.2  # from saying that one leaves to having left
_LOOK_S = 2.0  # between two looks at where a process is


@dataclasses.dataclass(frozen=True)
class Seat:
    """This process's place in the job: role, rank, addresses.

    Attributes:
      process: number in the job; 0 leads.
      hosts: who does what.
      leader: 'host:port' of the leader's endpoint.
      secret: of the job's channel.
      disposable: rollout processes may go and come back (topology split).
    """

    process: int
    hosts: Hosts
    leader: str
    secret: str
    disposable: bool = False


class Pod:
    """This process's view of the job. Made by `join`; ended by `leave` or `fail`.

    Attributes:
      seat: this process's place.
      name: 'trainer 0', 'rollout 1'.
      leads: whether this is the leader.
    """

    def __init__(self, seat: Seat, *, host: str):
        """Opens this process's endpoint on the interface of address `host`.

        Raises:
          ValueError: the endpoint cannot listen.
        """
        self.seat, self.name = seat, seat.hosts.name(seat.process)
        self.leads = seat.process == LEADER
        port = int(seat.leader.rpartition(":")[2]) if self.leads else 0
        self.channel = Channel(self.name, secret=seat.secret, host=host, port=port)
        self._leader = self.channel.address if self.leads else seat.leader
        self._addresses: dict[int, str] = {LEADER: self._leader}
        self._changes = 0  # of the roster since all were there
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._first_failure: int | None = None

    # Coming together.

    def join(self, deadline_s: float, too_few: Callable[[int, float], str]) -> "Pod":
        """Waits until every process of the job is there.

        Args:
          deadline_s: the longest wait.
          too_few: what to say when only so many processes came within so many seconds.

        Raises:
          ChannelError: not all came within the deadline; names those that did not.
        """
        if self.leads:
            self._host_roster(deadline_s, too_few)
            return self
        me = {"process": self.seat.process, "address": self.channel.address, "host": socket.gethostname()}
        end = time.monotonic() + deadline_s
        try:
            self._ask_leader("call", "join", Message({**me, "pid": os.getpid()}), deadline_s)
            roster = self._ask_leader("get", "roster", Message(), max(end - time.monotonic(), 1.0))
        except ChannelError as error:
            raise ChannelError(
                f"{self.name} did not get into the job at {self._leader} ({error}): is trainer 0 running, is "
                "PODRL_SECRET the same on all hosts, and is that port open between them?"
            ) from None
        self._take(roster)
        self.channel.watch(self._leader, self._lost_leader)
        threading.Thread(target=self._await_verdict, name="podrl-verdict", daemon=True).start()
        threading.Thread(target=self._follow_roster, name="podrl-roster", daemon=True).start()
        return self

    def _ask_leader(self, kind: str, key: str, message: Message, deadline_s: float) -> Message:
        """Asks the leader; raises ChannelError as soon as an established connection to it breaks."""
        request = self.channel.request(self._leader, kind, key, message)
        self.channel.watch(self._leader, lambda: request.fail("the connection broke and did not come back"))
        return request.wait(deadline_s, f"{self._leader}: {key}")

    def address(self, process: int) -> str:
        """Returns a process's address; a replaced rollout process has a new one, which is known soon after it came."""
        with self._changed:
            return self._addresses[process]

    # During the job.

    def get(self, process: int, key: str, deadline_s: float) -> Message:
        """Waits for a message that a process offers under a key, also if it is replaced meanwhile.

        Raises:
          ChannelError: it was not there within the deadline.
        """
        return self._ask(process, "get", key, Message(), deadline_s)

    def call(self, process: int, name: str, message: Message, deadline_s: float) -> Message:
        """Calls a function that a process serves.

        Raises:
          ChannelError: no answer within the deadline, or the function failed.
        """
        return self._ask(process, "call", name, message, deadline_s)

    def _ask(self, process: int, kind: str, key: str, message: Message, deadline_s: float) -> Message:
        end = time.monotonic() + deadline_s
        address = self.address(process)
        request = self.channel.request(address, kind, key, message)
        while not request.arrived(min(_LOOK_S, max(end - time.monotonic(), 0.0))):
            if time.monotonic() >= end:
                request.forget()
                raise LateError(
                    f"{self.name} waited {deadline_s:.0f} s for {key} from {self.seat.hosts.name(process)} (host "
                    f"{process}): see what that host is doing (kill -USR1 prints its stacks), or raise log.stall_s."
                )
            if (new := self.address(process)) != address:
                request.forget()
                address, request = new, self.channel.request(new, kind, key, message)
        return request.wait(0.0, f"{address}: {key}")

    def _host_roster(self, deadline_s: float, too_few: Callable[[int, float], str]) -> None:
        everyone = set(self.seat.hosts.trainer) | set(self.seat.hosts.rollout)
        self.channel.serve("join", self._joined)
        self.channel.serve("leave", self._on_leave)
        self.channel.serve("failing", self._on_failing)
        end = time.monotonic() + deadline_s
        with self._changed:
            while missing := everyone - set(self._addresses):
                if not self._changed.wait(max(end - time.monotonic(), 0.0)) and time.monotonic() >= end:
                    names = ", ".join(f"{self.seat.hosts.name(p)} (host {p})" for p in sorted(missing))
                    reached = len(everyone) - len(missing)
                    raise ChannelError(f"{too_few(reached, deadline_s)} Missing: {names}.")
            self.channel.put("roster", self._roster())

    def _joined(self, message: Message) -> Message:
        who: Mapping[str, Any] = message.value
        process, address = int(who["process"]), str(who["address"])
        with self._changed:
            returned = process in self._addresses
            if returned and self._addresses[process] == address:
                return Message()  # asked twice
            if returned and not (self.seat.disposable and self.seat.hosts.role(process) == ROLLOUT):
                raise ValueError(f"{self.seat.hosts.name(process)} is in the job already, from another process.")
            self._addresses[process] = address
            self._gone.discard(process)
            self._left.discard(process)
            self._changed.notify_all()
            if returned:
                self._changes += 1
                for key in ("roster", f"roster/{self._changes}"):
                    self.channel.put(key, self._roster())
                _log.warning("%s came back at %s.", self.seat.hosts.name(process), address)
        self.channel.watch(address, lambda: self._lost(process, address))
        return Message()

    def _roster(self) -> Message:
        addresses = {str(process): address for process, address in self._addresses.items()}
        return Message({"changes": self._changes, "addresses": addresses})

    def _take(self, roster: Message) -> None:
        with self._changed:
            self._changes = roster.value["changes"]
            self._addresses = {int(process): address for process, address in roster.value["addresses"].items()}

    def _follow_roster(self) -> None:
        """Takes every new roster; nobody has to ask the leader where somebody is."""
        while not self._ended.is_set():
            request = self.channel.request(self._leader, "get", f"roster/{self._changes + 1}", Message())
            try:
                self._take(request.wait(1e9, "trainer 0: roster"))
            except ChannelError:
                return

    # Going apart.

    def leave(self, code: int = EXIT_DONE) -> None:
        """Ends this process's part cleanly, once the leader has all it needs; the leader leaves last."""
        if self._ended.is_set():
            return
        if not self.leads:
            self.get(LEADER, "over", _OVER_S)
        self._ended.set()
        if self.leads:
            self.channel.put("over", Message())
            self._await_others(_OTHERS_S)
        else:
            self._tell_leader(code, "")
        self.channel.close()

    def first_to_fail(self) -> bool:
        """True in the one process that prints in full why the job fails; the others print one line.

        One error often strikes several processes at once, or is brought to them. Call before `fail`.
        """
        me = Message({"process": self.seat.process})
        if self._ended.is_set():
            return False
        if self.leads:
            return bool(self._on_failing(me).value["first"])
        try:
            return bool(self.channel.call(self._leader, "failing", me, deadline_s=_FAREWELL_S).value["first"])
        except ChannelError:
            return not self._ended.is_set()

    def fail(self, code: int, text: str) -> None:
        """Tells the other processes that this one ends the job, and why: the first line of `text`."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self.leads:
            self.channel.put("verdict", Message({"code": code, "text": f"{self.name}: {_first_line(text)}"}))
            self._await_others(_FAREWELL_S)  # with this process goes the service of jax's cluster, and all still in it
        else:
            self._tell_leader(code, text)
        self.channel.close()

    def _await_others(self, deadline_s: float) -> None:
        """Waits, on the leader, until every other process has left or is gone."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while set(self._addresses) - {LEADER} - self._left - self._gone and time.monotonic() < end:
                self._changed.wait(0.5)
        time.sleep(_LAST_STEP_S)

    def await_end(self, deadline_s: float) -> None:
        """Waits to see whether the job is over for a reason that others know; in that case it does not return.

        For a process whose failure the leader must handle first, or is likely to follow from another's.
        """
        if self._ended.wait(deadline_s):
            time.sleep(_LAST_S)  # the thread that knows the reason says it and ends the process

    def _tell_leader(self, code: int, text: str) -> None:
        content = Message({"process": self.seat.process, "code": code, "text": text})
        try:
            self.channel.call(self._leader, "leave", content, deadline_s=_FAREWELL_S)
        except ChannelError:
            _log.info("The leader did not answer the farewell.")

    def _on_failing(self, message: Message) -> Message:
        process = int(message.value["process"])
        with self._changed:
            if self._first_failure is None:
                self._first_failure = process
            return Message({"first": self._first_failure == process})  # the same again where one asks twice

    def _on_leave(self, message: Message) -> Message:
        process, code = int(message.value["process"]), int(message.value["code"])
        with self._changed:
            self._left.add(process)
            self._changed.notify_all()
        replaced = self.seat.disposable and self.seat.hosts.role(process) == ROLLOUT and code == EXIT_INFRASTRUCTURE
        orderly = code == EXIT_DONE or (code == EXIT_PREEMPTED and not message.value["text"])
        if not orderly and not replaced:
            # A user's error often strikes several processes at once: this one says and saves its own first.
            text = f"{self.seat.hosts.name(process)} ended with exit code {code}: {_first_line(message.value['text'])}"
            self._end(code, text, grace_s=_FAREWELL_S)
        return Message()

    def _lost(self, process: int, address: str) -> None:
        """Handles, on the leader, a broken connection to a process."""
        with self._changed:
            if process in self._left or self._ended.is_set() or self._addresses.get(process) != address:
                return
            self._gone.add(process)
        name = f"{self.seat.hosts.name(process)} (host {process}, {address})"
        if self.seat.disposable and self.seat.hosts.role(process) == ROLLOUT:
            _log.warning("%s is gone; training waits for its replacement when it needs samples.", name)
            return
        self._end(EXIT_INFRASTRUCTURE, f"{name} is gone: its connection broke and did not come back")

    def _lost_leader(self) -> None:
        if not self._ended.is_set():
            self._end(EXIT_INFRASTRUCTURE, f"trainer 0 ({self._leader}) is gone: its connection broke")

    def _await_verdict(self) -> None:
        request = self.channel.request(self._leader, "get", "verdict", Message())
        try:
            verdict = request.wait(1e9, "trainer 0: verdict").value
        except ChannelError:
            return
        self._end(int(verdict["code"]), str(verdict["text"]), farewell=True)

    def _end(self, code: int, text: str, *, grace_s: float = 0.2, farewell: bool = False) -> None:
        """Ends this process from the thread that noticed the job's end; the leader may wait for a farewell."""

        def finish() -> None:
            time.sleep(grace_s)  # a process that is failing for the same reason says it better itself
            if self._ended.is_set():
                return
            self.fail(code, text) if self.leads else self._ended.set()
            print(f"podrl: {self.name} ends with exit code {code}: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            if farewell:
                self._tell_leader(code, "")
            os._exit(code)

        threading.Thread(target=finish, name="podrl-end", daemon=True).start()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
