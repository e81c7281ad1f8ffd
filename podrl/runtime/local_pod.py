"""Runs the processes of a pod on one machine: one process per fake host, output prefixed with the process's name.

The pod's exit code is the exit code of the first process whose failure ended the job. If a signal killed the process,
the code is 42, or 75 or 130 if it is the signal that asked the whole pod to stop. The processes of the pod end with the
process that started them, even if that process is killed.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, TextIO

from podrl.runtime import signals
from podrl.runtime.detect import UNIX
from podrl.runtime.memory import free_memory
from podrl.runtime.roles import ROLLOUT, TRAINER, Hosts
from podrl.runtime.watchdog import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED

_GRACE_S = 20.0  # time that the other processes have to report and end after one has failed
RESTARTS = 5
_LEADER = 0
_PR_SET_PDEATHSIG = 1
_LONGEST_PLACE = 60
# Memory of a process before it has a model: Python, jax and podrl.
_PROCESS_BYTES = 350 << 20
# Gloo's line about its connections, or a part of the line: Gloo writes it in pieces, and other threads write between
# the pieces. The numbers are bounded, so that a long run of digits that a program prints takes linear time.
_GLOO = re.compile(
    rb"(?:\[Gloo\] Rank )?N(?: is connected to )?N peer ranks\. ?|\[Gloo\] Rank N(?: is connected to N)?"
    rb"|Expected number of connected peer ranks is : N".replace(b"N", rb"\d{0,5}")
)
# Lines that jax writes about a cluster without process 0. After them, jax writes _ABORT.
_CHATTER = re.compile(
    rb"[EW]\d{4} .*(preemption_sync_manager|coordination_service_agent)\.cc:"
    rb"|Additional GRPC error information|:UNKNOWN:Error received from peer"
)
_ABORT = b"Terminating process because the JAX distributed service detected fatal errors"


class LocalPod:
    """The processes of one job on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        hosts: Hosts,
        *,
        replace_rollouts: bool,
        environment: Mapping[str, str],
        restarts: int = RESTARTS,
        again: str = "",
        workdir: pathlib.Path | None = None,
    ):
        """Stores the command and its processes.

        Args:
          command: command of every process.
          hosts: role of every process.
          replace_rollouts: True if the job goes on when a process that does not train is killed or ends with 42.
          environment: environment of every process. The variables that give a process its place are added, and
            PODRL_SECRET and PODRL_CHANNEL if they are missing.
          restarts: largest number of restarts, counted over all processes that do not train.
          again: command that starts the job again. The leader prints it; if the leader is killed, it is printed here.
          workdir: the run directory, whose newest checkpoint is named before `again`; None if it is in a bucket.
        """
        self._again, self._workdir = again, workdir
        self._command, self._hosts, self._replace = list(command), hosts, replace_rollouts
        self._joinable = "PODRL_SECRET" in environment  # True if hosts that are not started here can join
        own = {"PODRL_CHANNEL": f"127.0.0.1:{free_ports(1)[0]}", "PODRL_SECRET": secrets.token_hex(16)}
        place = {"PODRL_PLATFORM": "local", "PODRL_PROCESS_COUNT": str(hosts.count)}
        self._environment = own | dict(environment) | place
        self._children: dict[int, subprocess.Popen] = {}
        self._threads: list[threading.Thread] = []
        self._restarts = restarts  # number of restarts that are left
        self._stopping = 0  # number of the signal that asked this job to end; 0 if there was none

    def run(self) -> int:
        """Starts all processes, waits for them, and returns the job's exit code."""
        private = tempfile.TemporaryDirectory(prefix="podrl-", dir=_short_temporary())
        with private as place, self._signals():
            # jax's coordinator authenticates no one; only this user can reach a socket in this directory.
            self._environment["PODRL_COORDINATOR"] = f"{UNIX}{place}/coordinator"
            try:
                for process in (*self._hosts.trainer, *self._hosts.rollout, *self._hosts.eval):
                    if self._stopping:  # the processes started so far are killed, because none has anything to save yet
                        self._report(f"{signals.sentence(self._stopping)} All processes are ended.")
                        return signals.exit_code(self._stopping)
                    self._start(process)
                return self._wait()
            finally:
                self._kill()

    def _start(self, process: int) -> None:
        child = subprocess.Popen(
            self._command,
            env=self._environment | {"PODRL_PROCESS_INDEX": str(process)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that a Ctrl-C reaches the child only once, through this process
            preexec_fn=functools.partial(_die_with, os.getpid()),
        )
        self._children[process] = child
        for pipe, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert pipe is not None
            thread = threading.Thread(target=_copy, args=(pipe, out, self._hosts.name(process)), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _wait(self) -> int:
        failed: int | None = None
        # silent: True if the leader was killed, so that it could not print the command that starts the job again.
        end, silent = float("inf"), False
        while self._children:
            for process, child in list(self._children.items()):
                code = child.poll()
                if code is None:
                    continue
                del self._children[process]
                replaced = code and failed is None and self._may_replace(process, code)
                if replaced and _LEADER not in self._children:
                    self._report(
                        f"{self._hosts.name(process)} ended with {_describe_exit(code)} after the job had ended."
                    )
                elif replaced and self._restarts:
                    self._restarts -= 1
                    self._report(f"{self._hosts.name(process)} ended with {_describe_exit(code)}; it is started again.")
                    self._start(process)
                elif replaced and (self._joinable or any(self._hosts.role(p) == ROLLOUT for p in self._children)):
                    self._report(f"{self._hosts.name(process)} ended with {_describe_exit(code)}; the others go on.")
                elif self._leaves(process, code) and failed is None:
                    self._report(f"{self._hosts.name(process)} ended with {_describe_exit(code)}, as it was asked to.")
                elif code and failed is None:
                    failed = self._code(code)
                    end = time.monotonic() + _GRACE_S
                    if self._children:
                        text = f"{self._hosts.name(process)} ended with {_describe_exit(code)}"
                        self._report(f"{text}; the other processes must end too.")
                silent = silent or (process == _LEADER and code < 0 and not self._stopping)
            if self._children and time.monotonic() > end:
                self._report(f"{', '.join(map(self._hosts.name, self._children))} did not end: killed.")
                self._kill()
            time.sleep(0.05)
        for thread in self._threads:
            thread.join(5)
        if silent and self._again:
            self._report(f"{self._saved()} Resume with: {self._again}")
        return failed or 0

    def _saved(self) -> str:
        """Returns a sentence that names the newest complete checkpoint; incomplete ones have longer names."""
        if self._workdir is None:
            return "The run goes on from its newest complete checkpoint."
        steps = [int(place.name) for place in self._workdir.glob("checkpoints/*") if place.name.isdecimal()]
        return (
            f"Step {max(steps)} is saved in {self._workdir}." if steps else f"No step is saved in {self._workdir} yet."
        )

    def _code(self, code: int) -> int:
        """Returns the job's exit code after a process failed; a negative `code` means that a signal ended it."""
        if code == -self._stopping:
            return signals.exit_code(self._stopping)
        return EXIT_INFRASTRUCTURE if code < 0 else code

    def _may_replace(self, process: int, code: int) -> bool:
        infrastructure = code < 0 or code == EXIT_INFRASTRUCTURE
        return self._replace and self._hosts.role(process) != TRAINER and infrastructure and not self._stopping

    def _leaves(self, process: int, code: int) -> bool:
        """Returns True if a process that does not train was asked to leave the job and left, and the leader still runs.

        If the job cannot go on without this process, the leader ends with the same code.
        """
        may_go = self._replace and self._hosts.role(process) != TRAINER
        return may_go and code == EXIT_PREEMPTED and _LEADER in self._children

    def _kill(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._children.values():
            child.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Passes SIGTERM, SIGINT and SIGUSR1 on to every process; passes SIGHUP on as SIGTERM, unless it is ignored."""

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            number = signal.SIGTERM if number == signal.SIGHUP else number
            self._stopping = self._stopping or (number if number != signal.SIGUSR1 else 0)
            for child in list(self._children.values()):
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)

        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _report(self, text: str) -> None:
        print(f"podrl: {text}", file=sys.stderr, flush=True)


def _short_temporary() -> str:
    """Returns the directory for temporary files, or /tmp if a socket in it could have a path of over 107 characters."""
    place = tempfile.gettempdir()
    return place if len(place) <= _LONGEST_PLACE else "/tmp"


def check_memory(processes: int) -> None:
    """Refuses more processes than this machine has memory to start.

    Raises:
      ValueError: the processes would not fit; the error says how many do.
    """
    free = free_memory()
    if free is not None and processes * _PROCESS_BYTES > free:
        raise ValueError(
            f"--local_processes={processes} would need {processes * _PROCESS_BYTES / 2**30:.1f} GiB of memory before "
            f"any model is loaded, and {free / 2**30:.1f} GiB are free: start at most {max(free // _PROCESS_BYTES, 1)}."
        )


def free_ports(count: int) -> list[int]:
    """Finds ports of the loopback interface on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _copy(pipe: IO[bytes], out: TextIO, name: str) -> None:
    with pipe:
        for line in _without_chatter(pipe):
            # If the reader of `out` is gone, go on reading, so that the process never blocks on a full pipe.
            with contextlib.suppress(OSError):
                # One write per line, so that lines of other threads do not mix with it.
                out.write(f"[{name}] {line.decode(errors='replace').rstrip()}\n")
                out.flush()


def _without_chatter(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields a process's output lines, except lines of libraries that do not help the user."""
    lines = iter(lines)
    for line in lines:
        rest = _GLOO.sub(b"", line)
        if (rest == line or rest.strip()) and not _CHATTER.match(rest):
            yield rest
        if _ABORT in line:  # the process is ending: only jax's own stack follows
            for _ in lines:
                pass


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _die_with(parent: int) -> None:
    """Makes the kernel kill this child when the parent's thread ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(EXIT_INFRASTRUCTURE)
