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
    """Makes SIGUSR1 print the stacks of all threads to stderr; SIGUSR2, too, no longer ends the process."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    main = threading.current_thread() is threading.main_thread()
    if main and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for podrl.rundir.profiler, once training has begun


class Watchdog:
    """Watches one stage at a time on behalf of the thread that runs the loop.

    After `stall_s` seconds in one stage it prints the stage, its age and all stacks to stderr, once per stage; after
    four times as long it exits the process with code 42 (infrastructure: restart me), because nothing else would.
    Where the stage waits for another process, it says so after a tenth of `stall_s`. SIGUSR1 prints the stacks at any
    time.

    Attributes:
      waits_for: each says what this process waits for, '' for nothing; said with the stage.
      last_words: what is said before the process ends: what is saved, and how to resume.
      tells: whether a wait is said early, which is for the process that tells the user.
      ended: told of every stage that has ended: its name, start and end (`time.monotonic`).
    """

    def __init__(self, stall_s: float):
        self._stall_s = stall_s
        self._stages: list[tuple[str, float]] = []
        self._spent: dict[str, float] = {}
        self.waits_for: list[Callable[[], str]] = []
        self.last_words: Callable[[], str] = lambda: ""
        self.tells = True
        self.ended: Callable[[str, float, float], None] = lambda name, started, ended: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podrl-watchdog", daemon=True)
        self._thread.start()
        stacks_on_signal()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Marks the loop's current stage. Nested ones are watched one by one, and their seconds are theirs alone."""
        started = time.monotonic()
        self._stages.append((name, started))
        try:
            yield
        finally:
            self._stages.pop()
            now = time.monotonic()
            seconds = now - started
            self._spent[name] = self._spent.get(name, 0.0) + seconds
            if self._stages:
                outer = self._stages[-1][0]
                self._spent[outer] = self._spent.get(outer, 0.0) - seconds
            self.ended(name, started, now)

    def take_spent(self) -> dict[str, float]:
        """Returns seconds per stage since the last call, those of stages within it not included."""
        spent, self._spent = self._spent, {}
        return spent

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _waits(self) -> str:
        said = "; ".join(found for source in list(self.waits_for) if (found := source()))
        return f" (it waits for {said})" if said else ""

    def _watch(self) -> None:
        reported: tuple[str, float] | None = None
        hinted: tuple[str, float] | None = None
        while not self._closed.wait(min(self._stall_s / 4, 5.0)):
            stages = list(self._stages)
            if not stages:
                continue
            name, started = stages[-1]
            age = time.monotonic() - started
            early = self.tells and self._stall_s / 10 < age <= self._stall_s and hinted != stages[-1]
            if early and (late := self._waits()):
                hinted = stages[-1]
                print(f"podrl: stage '{name}' has taken {age:.0f} s so far{late}.", file=sys.stderr, flush=True)
            if age > self._stall_s and reported != stages[-1]:
                reported = stages[-1]
                limit = f"log.stall_s={self._stall_s:g}"
                print(
                    f"podrl: stage '{name}'{self._waits()} has taken {age:.0f} s, more than {limit}; "
                    f"process {os.getpid()} exits 42 at {4 * self._stall_s:g} s. All stacks:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if age > 4 * self._stall_s:
                given_up = f"podrl: stage '{name}' did not end within {age:.0f} s: giving up. {self.last_words()}"
                print(given_up.rstrip(), file=sys.stderr, flush=True)
                os._exit(EXIT_INFRASTRUCTURE)
