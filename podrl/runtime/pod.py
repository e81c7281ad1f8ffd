"""The processes of one job: how they find each other, notice a lost process, and end together with one exit code.

Trainer 0 is the leader. Every process joins at the leader's endpoint and gets the roster, the addresses of all
processes. The leader watches its connections to all processes, and every process watches its connection to the leader.
A process that fails tells the leader before it ends. The leader tells all others, and each ends at once with os._exit,
so that no process waits in a collective or a barrier for one that is gone.

A job of topology split goes on when a rollout or evaluation host is lost. From then on the leader's channel refuses the
requests of this host. If the host was only unreachable for a while, the answer to its next request tells it that it was
given up, and it ends with exit code 42. A process that reconnects and finds the leader of a later run also ends with
code 42. The process that takes the host's place starts from nothing.
"""

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from podrl.mappings import JsonObject
from podrl.runtime.channel import SILENCE_S, Channel, ChannelError, LateError
from podrl.runtime.message import Message
from podrl.runtime.roles import EVAL, TRAINER
from podrl.runtime.seat import Seat as Seat
from podrl.runtime.watchdog import EXIT_DONE, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, EXIT_USER

LEADER = 0
_log = logging.getLogger("podrl.pod")
_FAREWELL_S = 5.0  # longest wait of an ending process for the leader's answer; time for the leader's own report
_LAST_WORDS_S = 15.0  # time for the other processes to print why they end, before a failed leader ends
_OVER_S = 30 * 86400.0  # longest wait for the end of the job: no real limit, as a lost leader is noticed anyway
_OVER_LATE_S = 5.0  # time after the end of the job in which a process may leave by itself
_LAST_S = 10.0  # time for the thread that knows why the job ends to end this process
_OTHERS_S = 30.0  # time for the other processes to leave after the job is over; also the longest wait for an address
_LAST_STEP_S = 0.2  # time that a process needs to end after it has closed its connections
_LOOK_S = 0.5  # time between two checks whether a process has a new address, or another process must be asked


class MovedError(Exception):
    """A request was abandoned, because another process must be asked instead."""


class Pod:
    """This process's view of the job. Call `join` first, and `leave` or `fail` at the end.

    Attributes:
      seat: place of this process in the job.
      name: name of this process: 'trainer 0', 'rollout 1'.
      leads: True on the leader.
      ids: (process id, machine) of each process by its number. On the leader it is complete once all have joined; on
        another process it has an entry for this process alone.
      last_words: function that returns the text to print if this process ends because another process has ended: the
        saved step and how to resume.
      on_lost: function that is called on the leader, on the channel's thread, with the number of a rollout process that
        was lost.
      on_evaluator_lost: function that is called like `on_lost`, with the number of a lost evaluation process.
      wait_sources: functions that describe further waits of this process as text; a function returns '' if there is no
        wait.
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
        self._changes = 0  # number of changes of the roster since it was complete
        self._complete = False  # True if all of the job's first processes have joined
        self._numbers = itertools.count(seat.hosts.count)  # numbers that are free for later processes
        self._late_numbers: set[int] = set()  # numbers of the processes that joined later
        # The process number that each request got. A request may be served twice, and must then get the same number
        # again.
        self._number_of_request: dict[str, int] = {}
        # Numbers reserved for those hosts of a replica that have not asked for their number yet: by (cluster, index of
        # the replica in the cluster), then by the host's place in the replica.
        self._parts: dict[tuple[str, int], dict[int, int]] = {}
        self._leavers: set[int] = set()
        self._lost_processes: set[int] = set()
        self._endpoints: dict[int, str] = {}  # on the leader, by process: random number of its channel
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._waits_of_threads: dict[int, tuple[str, float]] = {}  # by thread: description and start of its wait
        self.ids = {seat.process: (os.getpid(), socket.gethostname())}
        self.last_words: Callable[[], str] = lambda: ""
        self.on_lost: Callable[[int], None] = lambda process: None
        self.on_evaluator_lost: Callable[[int], None] = lambda process: None
        self.wait_sources: list[Callable[[], str]] = []
        self._first_failure: int | None = None

    # Joining.

    def join(self, deadline_s: float, too_few: Callable[[int, float], str]) -> "Pod":
        """Waits until every process of the job has joined.

        Args:
          deadline_s: the longest wait, in seconds.
          too_few: function of (number of processes that joined, seconds waited) that returns the start of the error.

        Returns:
          This object.

        Raises:
          ChannelError: some processes did not join within the deadline; the leader's error names them.
          ValueError: this process was started with other roles of hosts or another topology than the leader.
        """
        if self.leads:
            self._host_roster(deadline_s, too_few)
            return self
        me = {"process": self.seat.process, "address": self.channel.address, "host": socket.gethostname()}
        me |= {"pid": os.getpid(), "endpoint": self.channel.number, "job": self.seat.describe()}
        end = time.monotonic() + deadline_s
        try:
            refusal = self._ask_leader("call", "join", Message(me), deadline_s)
            if refusal.value:
                self.fail(EXIT_USER, refusal.value)
                raise ValueError(refusal.value)
            roster = self._ask_leader("get", "roster", Message(), max(end - time.monotonic(), 1.0))
        except ChannelError as error:
            raise ChannelError(
                f"{self.name} did not get into the job at {self._leader} ({error}): is trainer 0 running, is "
                "PODRL_SECRET the same on all hosts, and is that port open between them?"
            ) from None
        self._adopt(roster)
        self.channel.watch(self._leader, self._on_leader_lost)
        threading.Thread(target=self._await_verdict, name="podrl-verdict", daemon=True).start()
        threading.Thread(target=self._follow_roster, name="podrl-roster", daemon=True).start()
        if self._is_replaceable(self.seat.process):
            threading.Thread(target=self._await_over, name="podrl-over", daemon=True).start()
        return self

    def _ask_leader(self, kind: str, key: str, message: Message, deadline_s: float) -> Message:
        """Sends the leader a request and waits for the answer.

        Raises:
          ChannelError: no answer within the deadline, or an established connection to the leader has broken.
        """
        request = self.channel.request(self._leader, kind, key, message)
        broken = lambda: request.fail("the connection broke and did not come back")  # noqa: E731
        self.channel.watch(self._leader, broken, within_s=deadline_s)
        return request.wait(deadline_s, f"{self._leader}: {key}")

    def address(self, process: int, deadline_s: float = _OTHERS_S) -> str:
        """Returns a process's address; waits for a process that has not joined yet.

        Raises:
          ChannelError: the process did not join within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: process in self._addresses, deadline_s):
                name = self.seat.hosts.name(process)
                raise ChannelError(f"{self.name} waited {deadline_s:.0f} s for {name} (host {process}) to join.")
            return self._addresses[process]

    def is_lost(self, process: int) -> bool:
        """Returns, on the leader, whether a process was lost or has left."""
        with self._changed:
            return process in self._lost_processes or process in self._leavers

    def let_go(self, process: int) -> None:
        """Records, on the leader, that a rollout process leaves while the job goes on."""
        with self._changed:
            self._leavers.add(process)
            self._changed.notify_all()

    def is_at(self, process: int, address: str) -> bool:
        """Returns, on the leader, whether a process is in the job, at this address."""
        with self._changed:
            return self._addresses.get(process) == address and not self.is_lost(process)

    # During the job.

    def get(self, process: int, key: str, deadline_s: float, *, moved: Callable[[], bool] = lambda: False) -> Message:
        """Waits for a message that a process offers under a key; asks again if the process is replaced meanwhile.

        Args:
          process: number of the process in the job.
          key: key of the message.
          deadline_s: the longest wait, in seconds.
          moved: function that returns True once another process has to be asked; called every half second.

        Raises:
          ChannelError: the message was not offered within the deadline.
          MovedError: `moved` returned True.
        """
        return self._ask(process, "get", key, Message(), deadline_s, moved)

    def call(
        self, process: int, name: str, message: Message, deadline_s: float, *, moved: Callable[[], bool] = lambda: False
    ) -> Message:
        """Calls a function that a process serves, and waits for the answer.

        Args:
          process: number of the process in the job.
          name: name of the function.
          message: argument of the function.
          deadline_s: the longest wait, in seconds.
          moved: function that returns True once another process has to be asked; called every half second.

        Raises:
          ChannelError: no answer within the deadline, or the function failed.
          MovedError: `moved` returned True.
        """
        return self._ask(process, "call", name, message, deadline_s, moved)

    def describe_waits(self) -> str:
        """Describes what this process's threads wait for, from which processes and for how long; '' for nothing.

        The three longest waits are described, longest first.
        """
        now = time.monotonic()
        oldest = sorted(list(self._waits_of_threads.values()), key=lambda wait: wait[1])
        texts = [text for source in self.wait_sources if (text := source())]
        texts += [f"{event}, for {now - since:.0f} s" for event, since in oldest[:3]]
        return "; ".join(texts) + (f"; and {len(oldest) - 3} more" if len(oldest) > 3 else "")

    def _ask(
        self, process: int, kind: str, key: str, message: Message, deadline_s: float, moved: Callable[[], bool]
    ) -> Message:
        thread = threading.get_ident()
        event = f"{key} of {self.seat.hosts.name(process)} (host {process})"
        self._waits_of_threads[thread] = (event, time.monotonic())
        try:
            return self._answer(process, kind, key, message, deadline_s, moved)
        finally:
            del self._waits_of_threads[thread]

    def _answer(
        self, process: int, kind: str, key: str, message: Message, deadline_s: float, moved: Callable[[], bool]
    ) -> Message:
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
            if moved():
                request.forget()
                raise MovedError(key)
            if (new := self.address(process)) != address:
                request.forget()
                address, request = new, self.channel.request(new, kind, key, message)
        return request.wait(0.0, f"{address}: {key}")

    def _host_roster(self, deadline_s: float, too_few: Callable[[int, float], str]) -> None:
        everyone = self.seat.hosts.everyone
        self.channel.serve("number", self._on_number)
        self.channel.serve("join", self._on_join)
        self.channel.serve("leave", self._on_leave)
        self.channel.serve("failing", self._on_failing)
        end = time.monotonic() + deadline_s
        with self._changed:
            while missing := everyone - set(self._addresses):
                if not self._changed.wait(max(end - time.monotonic(), 0.0)) and time.monotonic() >= end:
                    names = ", ".join(f"{self.seat.hosts.name(p)} (host {p})" for p in sorted(missing))
                    reached = len(everyone) - len(missing)
                    raise ChannelError(f"{too_few(reached, deadline_s)} Missing: {names}.")
            self._complete, self._changes = True, 0
            self.channel.put("roster", self._roster())

    def _on_number(self, message: Message) -> Message:
        """Gives a number to a process that joins a running job, and tells it the roles of the job's first processes."""
        if not self.seat.disposable:
            raise ValueError("hosts can join a running job only with --topology=split.")
        hosts, request = self.seat.hosts, message.value
        size, (part, place) = hosts.replica, divmod(int(request["index"]), hosts.replica)
        if int(request["count"]) % size:
            raise ValueError(
                f"a copy of the weights lies on {size} hosts together, and {request['count']} join as one cluster: let "
                f"a multiple of {size} join (PODRL_PROCESS_COUNT, or hosts of a slice)."
            )
        with self._changed:
            once, left = str(request["once"]), self._parts.get((str(request["cluster"]), part), {})
            # A process that joins again replaces its dead predecessor, and so do the other hosts of its replica.
            if once not in self._number_of_request and place not in left:
                left = self._parts[(str(request["cluster"]), part)] = {i: next(self._numbers) for i in range(size)}
            number = self._number_of_request[once] if once in self._number_of_request else left.pop(place)
            self._number_of_request[once] = number
            self._late_numbers.add(number)
        roles = {"trainer": list(hosts.trainer), "rollout": list(hosts.rollout), "eval": list(hosts.eval)}
        return Message({"process": number, "replica": size, **roles})

    def _on_join(self, message: Message) -> Message:
        who: JsonObject = message.value
        process, address, endpoint = int(who["process"]), str(who["address"]), str(who["endpoint"])
        with self._changed:
            returned = process in self._addresses
            if returned and self._endpoints.get(process) == endpoint:
                return self._differences(who)  # the process has joined already: its request was served twice
            previous = next((one for one, there in self._addresses.items() if there == address), None)
            if previous is not None:
                raise ValueError(
                    f"{self.seat.hosts.name(process)} (host {process}) listens at {address}. "
                    f"{self.seat.hosts.name(previous)} (host {previous}) used this address before, and other processes "
                    "are still connected to it there: start this process again, at another port."
                )
            if returned and not self._is_replaceable(process):
                raise ValueError(f"{self.seat.hosts.name(process)} is in the job already, from another process.")
            if self.seat.hosts.count <= process and process not in self._late_numbers:
                raise ValueError(f"host {process} does not belong to this job: a new host must ask for its number.")
            self._addresses[process] = address
            former, self._endpoints[process] = self._endpoints.get(process, ""), endpoint
            self.ids[process] = (int(who["pid"]), str(who["host"]))
            self._lost_processes.discard(process)
            self._leavers.discard(process)
            self._changed.notify_all()
            if returned or process in self._late_numbers:
                self._changes += 1
                for key in ("roster", f"roster/{self._changes}") if self._complete else ():
                    self.channel.put(key, self._roster())
                event = "came back" if returned else "joined the job"
                _log.warning(
                    "%s (host %d) %s at %s, as process %d of %s. It generates as soon as its programs are prepared.",
                    *(self.seat.hosts.name(process), process, event, address, *self.ids[process]),
                )
        if returned:
            self.channel.give_up(former)
            self._notify_lost(process)
        self.channel.watch(address, lambda: self._on_broken(process, address))
        return self._differences(who)

    def _differences(self, who: JsonObject) -> Message:
        """Returns a message that says how one of the job's first processes was started differently from this one.

        The message is empty if both were started for the same job, or if the process joined later.
        """
        process = int(who["process"])
        if process >= self.seat.hosts.count:
            return Message()
        here, there = f"{self.name} (host {LEADER}, {socket.gethostname()})", f"(host {process}, {who['host']})"
        differ = self.seat.differences(who["job"])
        text = f"{self.seat.hosts.name(process)} {there} was started for another job than {here}: {'; '.join(differ)}. "
        return Message(f"{text}Start the same command on every host." if differ else None)

    def _roster(self) -> Message:
        addresses = {str(process): address for process, address in self._addresses.items()}
        return Message({"changes": self._changes, "addresses": addresses})

    def _adopt(self, roster: Message) -> None:
        with self._changed:
            self._changes = roster.value["changes"]
            self._addresses = {int(process): address for process, address in roster.value["addresses"].items()}
            self._changed.notify_all()

    def _follow_roster(self) -> None:
        """Takes over every new roster, so that no thread has to ask the leader for an address."""
        while not self._ended.is_set():
            request = self.channel.request(self._leader, "get", f"roster/{self._changes + 1}", Message())
            try:
                self._adopt(request.wait(1e9, "trainer 0: roster"))
            except ChannelError:
                return

    # Leaving and failing.

    def leave(self, code: int = EXIT_DONE) -> None:
        """Ends this process's part in the job cleanly, when the leader has declared the job over.

        On the leader this call declares the job over, waits for the other processes, and ends last.
        """
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
        """Returns True in the one process that prints a failing job's full error; the other processes print one line.

        The same error often strikes several processes, or follows from the end of another process. If the leader does
        not answer, the process prints its full error, too. Call this method before `fail`.
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
        """Reports that this process has failed, and why: the first line of `text`.

        The leader reports it to all other processes, which then end. Another process reports it to the leader, which
        ends the job if the job cannot go on without the process.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        if self.leads:
            self.channel.put("verdict", Message({"code": code, "text": f"{self.name}: {_first_line(text)}"}))
            # The service of jax's cluster ends with this process, and then every process in the cluster aborts. On a
            # busy host the other processes need more than _FAREWELL_S to print why they end.
            self._await_others(_LAST_WORDS_S)
        else:
            self._tell_leader(code, text)
        self.channel.close()

    def _await_others(self, deadline_s: float) -> None:
        """Waits, on the leader, at most `deadline_s` seconds until every other process has left or was lost."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while set(self._addresses) - {LEADER} - self._leavers - self._lost_processes and time.monotonic() < end:
                self._changed.wait(0.5)
        while any(map(self.channel.is_up, self._others())) and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(_LAST_STEP_S)

    def _others(self) -> list[str]:
        with self._changed:
            return [address for process, address in self._addresses.items() if process != LEADER]

    def await_end(self, deadline_s: float) -> None:
        """Waits until the job ends for a reason that another process knows; returns if it does not end in `deadline_s`.

        A process that has failed calls this method if the leader must handle the failure first, or if the failure is
        probably the consequence of another process's failure.
        """
        if self._ended.wait(deadline_s):
            time.sleep(_LAST_S)  # the thread that knows the reason prints it and ends the process

    def _tell_leader(self, code: int, text: str) -> None:
        who = {"process": self.seat.process, "address": self.channel.address}
        content = Message({**who, "code": code, "text": text})
        try:
            self.channel.call(self._leader, "leave", content, deadline_s=_FAREWELL_S)
        except ChannelError:
            _log.info("The leader did not answer the farewell.")

    def _on_failing(self, message: Message) -> Message:
        process = int(message.value["process"])
        with self._changed:
            if self._first_failure is None:
                self._first_failure = process
            return Message({"first": self._first_failure == process})  # the same answer to a request served twice

    def _on_leave(self, message: Message) -> Message:
        process, code = int(message.value["process"]), int(message.value["code"])
        with self._changed:
            same_address = self._addresses.get(process) == message.value["address"]
            # The process left or was lost before, and other hosts have its work.
            if process in self._leavers | self._lost_processes or not same_address:
                return Message()
            self._leavers.add(process)
            self._changed.notify_all()
        late = process >= self.seat.hosts.count  # the job goes on after any exit code of a host that joined late
        # If an evaluation is missed because its host has left, the next start of the job makes the evaluation.
        spared = self.seat.hosts.role(process) == EVAL or self._has_others(process)
        stopped = code == EXIT_PREEMPTED and message.value["text"] and spared
        lost = code == EXIT_INFRASTRUCTURE or stopped or (late and code != EXIT_DONE)
        replaced = self._is_replaceable(process) and lost
        orderly = code == EXIT_DONE or (code == EXIT_PREEMPTED and not message.value["text"])
        if not orderly and not replaced:
            # A user's error often strikes several processes at once: the leader gets time to save and to report its own
            # error.
            text = f"{self.seat.hosts.name(process)} ended with exit code {code}: {_first_line(message.value['text'])}"
            self._end(code, text, grace_s=_FAREWELL_S)
        elif replaced:
            self._notify_lost(process)
        return Message()

    def _is_replaceable(self, process: int) -> bool:
        """Returns True if the job goes on without this process."""
        return self.seat.disposable and self.seat.hosts.role(process) != TRAINER

    def _notify_lost(self, process: int) -> None:
        """Calls, on the leader, the function that gives a lost process's work to others."""
        (self.on_evaluator_lost if self.seat.hosts.role(process) == EVAL else self.on_lost)(process)

    def _has_others(self, process: int) -> bool:
        """Returns, on the leader, whether the job has a process of the same role in another replica."""
        hosts = self.seat.hosts
        with self._changed:
            there = set(self._addresses) - self._leavers - self._lost_processes - set(hosts.replica_of(process))
        return any(hosts.role(other) == hosts.role(process) for other in there)

    def _on_broken(self, process: int, address: str) -> None:
        """Gives the work of a process with a broken connection to others, or ends the job; runs on the leader."""
        with self._changed:
            if process in self._leavers or self._ended.is_set() or self._addresses.get(process) != address:
                return
            self._lost_processes.add(process)
        name = f"{self.seat.hosts.name(process)} (host {process}, {address})"
        if self._is_replaceable(process):
            _log.warning("%s is gone; other hosts, or the next host that joins, take over its unfinished work.", name)
            self.channel.give_up(self._endpoints[process])
            self._notify_lost(process)
            return
        self._end(EXIT_INFRASTRUCTURE, f"{name} is gone: its connection broke and did not come back")

    def _on_leader_lost(self) -> None:
        """Ends this process when it can no longer reach the leader, or the leader has given it up."""
        if self._ended.is_set():
            return
        why = "is gone: its connection broke"
        if self.channel.is_given_up(self._leader):
            why = f"goes on without this process (silent for {SILENCE_S:.0f} s, or replaced), or is of a later run"
        self._end(EXIT_INFRASTRUCTURE, f"trainer 0 ({self._leader}) {why}")

    def _await_over(self) -> None:
        """Ends this process soon after the job is over, because a process that joined too late never calls `leave`."""
        request = self.channel.request(self._leader, "get", "over", Message())
        try:
            request.wait(1e9, "trainer 0: over")
        except ChannelError:
            return
        if not self._ended.wait(_OVER_LATE_S):
            print(f"podrl: {self.name} ends: the job is over.", file=sys.stderr, flush=True)
            self._ended.set()
            self._tell_leader(EXIT_DONE, "")
            os._exit(EXIT_DONE)

    def quit(self, text: str, code: int = EXIT_INFRASTRUCTURE) -> None:
        """Ends this process, from any thread; with topology split the job goes on without a rollout or eval process."""
        self._end(code, text, farewell=True)

    def _await_verdict(self) -> None:
        request = self.channel.request(self._leader, "get", "verdict", Message())
        try:
            verdict = request.wait(1e9, "trainer 0: verdict").value
        except ChannelError:
            return
        self._end(int(verdict["code"]), str(verdict["text"]), farewell=True)

    def _end(self, code: int, text: str, *, grace_s: float = 0.2, farewell: bool = False) -> None:
        """Ends this process with `code`, on a new thread.

        Args:
          code: exit code.
          text: reason, printed before the end.
          grace_s: seconds in which a process that fails for the same reason may report and end by itself.
          farewell: True to tell the leader first, because it may wait for this message.
        """

        def finish() -> None:
            time.sleep(grace_s)  # a process that fails for the same reason gives the better report
            if self._ended.is_set():
                return
            self.fail(code, text) if self.leads else self._ended.set()
            print(f"podrl: {self.name} ends with exit code {code}: {text}", file=sys.stderr, flush=True)
            if code == EXIT_INFRASTRUCTURE and (words := self.last_words()):
                print(f"podrl: {words}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            if farewell:
                self._tell_leader(code, "")
            os._exit(code)

        threading.Thread(target=finish, name="podrl-end", daemon=True).start()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
