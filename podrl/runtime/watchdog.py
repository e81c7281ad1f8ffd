"""Watches the loop's stages: names one that takes too long, prints every stack, ends a process that hangs."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

EXIT_DONE, EXIT_USER, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED = 0, 1, 42, 75


def stacks_on_signal() -> None:
    """Makes SIGUSR1, which would end the process otherwise, print the stacks of all threads to stderr."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


class Watchdog:
    """Watches one stage at a time on behalf of the thread that runs the loop.

    After `stall_s` seconds in one stage it prints the stage, its age and all stacks to stderr, once per stage; after
    four times as long it exits the process with code 42 (infrastructure: restart me), because nothing else would.
    SIGUSR1 prints the stacks at any time.

    Attributes:
      waits_for: whom the samples wait for, '' for nobody; said with the stage.
    """

    def __init__(self, stall_s: float):
        self._stall_s = stall_s
        self._stages: list[tuple[str, float]] = []
        self._spent: dict[str, float] = {}
        self.waits_for: Callable[[], str] = lambda: ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podrl-watchdog", daemon=True)
        self._thread.start()
        stacks_on_signal()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Marks the loop's current stage; nested stages are watched one by one. Its seconds are kept (`take_spent`)."""
        started = time.monotonic()
        self._stages.append((name, started))
        try:
            yield
        finally:
            self._stages.pop()
            self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - started

    def take_spent(self) -> dict[str, float]:
        """Returns seconds per stage since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        reported: tuple[str, float] | None = None
        while not self._closed.wait(min(self._stall_s / 4, 5.0)):
            stages = list(self._stages)
            if not stages:
                continue
            name, started = stages[-1]
            age = time.monotonic() - started
            if age > self._stall_s and reported != stages[-1]:
                reported = stages[-1]
                late = f" (it waits for {late})" if (late := self.waits_for()) else ""
                print(
                    f"podrl: stage '{name}'{late} has taken {age:.0f} s, more than log.stall_s={self._stall_s:g}; "
                    f"process {os.getpid()} exits 42 at {4 * self._stall_s:g} s. All stacks:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if age > 4 * self._stall_s:
                print(f"podrl: stage '{name}' did not end within {age:.0f} s: giving up.", file=sys.stderr, flush=True)
                os._exit(EXIT_INFRASTRUCTURE)
