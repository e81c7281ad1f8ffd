"""Worker processes that can be killed with all they started: their pipes, deadlines, and how they ended."""

import dataclasses
import functools
import itertools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from podrl.runtime import child, leftovers
from podrl.runtime.frames import pack, take
from podrl.runtime.user_code import Limits, hide_secrets

# Importing what code of users needs may take long (a math library, say); a call's deadline starts after it.
LOAD_S = 120.0
_LEAVE_S = 1.0
_numbers = itertools.count()


class LateError(Exception):
    """A worker did not answer in time."""


class DiedError(Exception):
    """A worker's process ended in the middle of a request."""


@functools.cache
def _job_mark() -> str:
    """The mark of this process's workers; starts the process that ends what carries it when this one is gone."""
    mark, (read, _kept) = secrets.token_hex(8), os.pipe()
    # In isolation and without site-packages it starts in milliseconds; it never holds the job's own output open.
    command = [sys.executable, "-I", "-S", leftovers.__file__, f"{mark}."]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {}}
    subprocess.run(command, stdin=read, check=True, start_new_session=True, **quiet)
    os.close(read)
    return mark


class Worker:
    """One process of a module that calls podrl.runtime.child, and its pipes.

    Attributes:
      write, read: descriptors of the pipes to and from it; `write` does not block.
    """

    def __init__(self, module: str, limits: Limits) -> None:
        """Starts `python -m MODULE` with what `limits` let it see and take.

        Args:
          module: name of the module.
          limits: what it may take and see.
        """
        hide_secrets()  # a worker can read /proc/PID/environ of this process, which has the same user
        read_life, self._life = os.pipe()
        self._mark = f"{_job_mark()}.{next(_numbers)}."
        own = {leftovers.MARK: self._mark, child.INSIDE: "1", child.LIFE: str(read_life), "JAX_PLATFORMS": "cpu"}
        # A session of its own: Ctrl-C in the terminal does not reach it, and its group can be ended as one.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(dataclasses.asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=limits.seen(os.environ) | own,
            pass_fds=(read_life,),
            start_new_session=True,
        )
        os.close(read_life)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.write, self.read = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.write, False)
        self._received = bytearray()

    def exchange(self, header: Mapping[str, Any], body: bytes, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        self.send(header, body, end)
        return self.receive(end)

    def send(self, header: Mapping[str, Any], body: bytes = b"", end: float | None = None) -> None:
        end = time.monotonic() + LOAD_S if end is None else end
        rest = memoryview(pack(header, body))
        while rest:
            self._await(end, write=True)
            try:
                rest = rest[os.write(self.write, rest) :]
            except BrokenPipeError as error:
                raise self.death() from error

    def receive(self, end: float) -> dict[str, Any]:
        while (reply := take(self._received)) is None:
            self._await(end, write=False)
            chunk = os.read(self.read, 1 << 20)
            if not chunk:
                raise self.death()
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
        # Not reaped yet, so the group's number is still its own: this ends what it may have started, too.
        os.killpg(self._process.pid, signal.SIGKILL)
        leftovers.end_marked(self._mark)  # what left the group
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        os.close(self._life)

    def death(self) -> DiedError:
        """Describes how a process ended whose pipe is closed."""
        ended = self._wait_unreaped(_LEAVE_S)
        if ended is None:
            return DiedError("it closed its pipe.")
        if ended.si_code == os.CLD_EXITED:
            return DiedError(f"its process ended with exit code {ended.si_status}.")
        return DiedError(f"its process ended with {signal.Signals(ended.si_status).name}.")

    def _await(self, end: float, *, write: bool) -> None:
        poll = select.poll()
        poll.register(self.write if write else self.read, select.POLLOUT if write else select.POLLIN)
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise LateError("it did not answer in time.")

    def _wait_unreaped(self, wait_s: float) -> os.waitid_result | None:
        """The exit status, or None if the process runs after `wait_s`; its id stays reserved until `close`."""
        end = time.monotonic() + wait_s
        while (ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return ended


def close_all(workers: Iterable[Worker]) -> None:
    """Asks all to leave, then sees to it."""
    workers = list(workers)
    for worker in workers:
        worker.leave()
    reap(workers)


def reap(workers: Iterable[Worker]) -> None:
    """Sees to it that workers that were asked to leave do."""
    for worker in workers:
        worker.close(_LEAVE_S)
