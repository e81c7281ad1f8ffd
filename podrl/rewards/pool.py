"""Processes that run reward functions and can be killed: who is idle, who is late, who is replaced."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from podrl.rewards import worker

# Importing what a reward function needs may take long (a math library, say); a call's deadline starts after it.
LOAD_S = 120.0
_LEAVE_S = 1.0


class LateError(Exception):
    """A worker did not answer in time and was killed."""


class DiedError(Exception):
    """A worker's process ended in the middle of a request."""


class Pool:
    """A fixed number of workers, each holding every function; a call takes an idle one and waits for its answer."""

    def __init__(self, specs: Mapping[str, Mapping[str, str]], size: int) -> None:
        """Starts the workers at once and loads the functions into all of them, in parallel.

        Args:
          specs: id of a function to what podrl.rewards.worker.load takes.
          size: number of processes.

        Raises:
          ValueError: a function cannot be loaded; says why.
        """
        worker.refuse_inside()
        self._specs = specs
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._all)
        started = [self._start() for _ in range(size)]
        try:
            for process in started:
                self._loaded(process)
        except BaseException:
            self.close()
            raise
        for process in started:
            self._idle.put(process)

    def call(self, function: str, body: bytes, deadline_s: float) -> dict[str, Any]:
        """The reply of podrl.rewards.worker.call for the batch in `body` (see there), from any idle worker.

        Raises:
          LateError: no answer within `deadline_s`; the worker was killed and is replaced.
          DiedError: the worker's process ended; it is replaced.
        """
        process = self._idle.get()
        try:
            return process.exchange({"id": function}, body, deadline_s)
        except (LateError, DiedError):
            self._drop(process)
            process = self._start()
            self._loaded(process)
            raise
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends every process; returns when none is left."""
        self._finalizer()

    def _start(self) -> "_Worker":
        process = _Worker()
        with self._lock:
            self._all.add(process)
        for name, spec in self._specs.items():
            process.send({"id": name, "spec": spec, "path": sys.path})
        return process

    def _loaded(self, process: "_Worker") -> None:
        """Waits until a started worker holds all functions."""
        end = time.monotonic() + LOAD_S
        for name in self._specs:
            try:
                reply = process.receive(end)
            except (LateError, DiedError) as error:
                raise ValueError(f"Reward function {name} cannot be loaded: {error}") from error
            if "raised" in reply:
                raise ValueError(f"Reward function {name} cannot be loaded: {reply['raised']}")

    def _drop(self, process: "_Worker") -> None:
        process.close(wait_s=0)
        with self._lock:
            self._all.discard(process)


def _close_all(processes: set["_Worker"]) -> None:
    """Asks all to leave, then sees to it."""
    for process in processes:
        process.leave()
    for process in processes:
        process.close(_LEAVE_S)
    processes.clear()


class _Worker:
    """One process and its pipes."""

    def __init__(self) -> None:
        read_life, self._life = os.pipe()
        environment = dict(os.environ) | {worker.INSIDE: "1", worker.LIFE: str(read_life), "JAX_PLATFORMS": "cpu"}
        # A session of its own: Ctrl-C in the terminal does not reach it, and what a function starts dies with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "podrl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=(read_life,),
            start_new_session=True,
        )
        os.close(read_life)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._write, self._read = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._write, False)
        self._received = bytearray()

    def exchange(self, header: Mapping[str, Any], body: bytes, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        self.send(header, body, end)
        return self.receive(end)

    def send(self, header: Mapping[str, Any], body: bytes = b"", end: float | None = None) -> None:
        end = time.monotonic() + LOAD_S if end is None else end
        rest = memoryview(worker.pack(header, body))
        while rest:
            self._await(end, write=True)
            try:
                rest = rest[os.write(self._write, rest) :]
            except BrokenPipeError as error:
                raise self._death() from error

    def receive(self, end: float) -> dict[str, Any]:
        while (reply := worker.take(self._received)) is None:
            self._await(end, write=False)
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise self._death()
            self._received += chunk
        return reply

    def leave(self) -> None:
        """Lets the process end by itself: its next read finds the end of the pipe."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self, wait_s: float) -> None:
        """Ends the process, at the latest after `wait_s` seconds, and frees the pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._wait_unreaped(wait_s)
        # Not reaped yet, so the group's number is still its own: this ends what a function may have started, too.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        os.close(self._life)

    def _await(self, end: float, *, write: bool) -> None:
        poll = select.poll()
        poll.register(self._write if write else self._read, select.POLLOUT if write else select.POLLIN)
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise LateError("it did not answer in time.")

    def _death(self) -> DiedError:
        ended = self._wait_unreaped(_LEAVE_S)
        if ended is None:
            return DiedError("it closed its pipe.")
        if ended.si_code == os.CLD_EXITED:
            return DiedError(f"its process ended with exit code {ended.si_status}.")
        return DiedError(f"its process ended with {signal.Signals(ended.si_status).name}.")

    def _wait_unreaped(self, wait_s: float) -> os.waitid_result | None:
        """How the process ended, None when it has not within `wait_s`; its number stays taken until `close`."""
        end = time.monotonic() + wait_s
        while (ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return ended
