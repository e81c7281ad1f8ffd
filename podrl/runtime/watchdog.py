"""Watches the stages of the training loop: names a slow stage, prints all stacks, and ends a process that hangs."""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

_TOLD_AT_S = (3.0, 10.0, 30.0)  # ages at which a slow stage is explained to the user; then once every minute
# Explanations of stages that may take longer, above all the first time; other stages are explained by their names.
_DOES = {
    "start-up": "loading the models, and preparing their programs",
    "restoring": "looking for a checkpoint, and reading the newest",
    "data": "drawing the next prompts",
    "metrics": "waiting for the numbers of the step",
    "evaluation": "measuring on the held-out records; the first time prepares programs",
    "rollout": "sampling the batch and scoring it; the first time prepares programs",
    "update": "updating the weights; the first time prepares programs",
    "publish": "moving the weights to the rollout's devices",
    "checkpoint": "saving a checkpoint",
    "copying to the bucket": "copying the run's files to the bucket",
    "closing checkpoints": "waiting for the last checkpoint to be written",
}
# Stages of every step: of these only the first is explained. The progress of the steps shows the others.
_EACH_STEP = ("data", "rollout", "update", "publish", "metrics")
EXIT_DONE, EXIT_USER, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED = 0, 1, 42, 75


def _ages() -> Iterator[float]:
    """Yields the ages of a stage, in seconds, at which the user is told about it."""
    return itertools.chain(_TOLD_AT_S, itertools.count(60.0, 60.0))


@contextlib.contextmanager
def announce_if_long(text: str, log: Callable[[str], None]) -> Iterator[None]:
    """Calls `log` with `text` and its seconds while the `with` block takes long; for stages without a watchdog.

    Args:
      text: the work of the block.
      log: function that prints a line; it is called in another thread after 3, 10, 30 and 60 s, then every minute.
    """
    ended, started = threading.Event(), time.monotonic()
    arguments = (text, log, lambda age: ended.wait(max(started + age - time.monotonic(), 0.0)))
    thread = threading.Thread(target=announce, args=arguments, name="podrl-announces", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # no line comes after the block


def announce(text: str, log: Callable[[str], None], ends_before: Callable[[float], bool]) -> None:
    """Calls `log` at each age of a piece of work at which the user is told about it.

    Args:
      text: the work.
      log: function that prints a line.
      ends_before: function that waits until the work has the given age, in seconds; True if the work ended before.
    """
    for age in itertools.takewhile(lambda age: not ends_before(age), _ages()):
        log(f"{text} ({age:.0f} s so far) ...")


def stacks_on_signal() -> None:
    """Makes SIGUSR1 print the stacks of all threads to stderr, and keeps SIGUSR2 from ending the process."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    main = threading.current_thread() is threading.main_thread()
    if main and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # podrl.rundir.profiler handles it once training has begun


class Watchdog:
    """Watches the stages of the thread that runs the training loop, one stage at a time.

    After `stall_s` seconds in one stage it prints the stage, its age and all stacks to stderr, once per stage. After
    four times as long it ends the process with code 42 (infrastructure: restart me), because nothing else would end it.
    If a stage waits for another process, the watchdog says so after a tenth of `stall_s`. If a stage takes
    more than 3 s, the watchdog explains the stage, and repeats this after 10, 30 and 60 s and then every minute; among
    the stages of the steps (`_EACH_STEP`) it explains only the first of each name.
    SIGUSR1 prints the stacks at any time.

    Attributes:
      wait_sources: functions that describe the waits of this process as text, or return '' if there is no wait; the
        texts are printed with the stage.
      last_words: function that returns the text to print before the process ends: what is saved, and how to resume.
      log: function that prints a line about a stage that takes more than 3 s; None prints nothing.
      expected: seconds that each stage took when it ran last, if known; the line about a slow stage shows them.
      informs: True in the process that informs the user; only this process reports its waits after a tenth of
        `stall_s`.
      on_stage_end: function that is called after every stage with the stage's name, start and end (`time.monotonic`).
    """

    def __init__(self, stall_s: float):
        self._stall_s = stall_s
        self._stages: list[tuple[str, float]] = []
        self._spent: dict[str, float] = {}
        self.wait_sources: list[Callable[[], str]] = []
        self.last_words: Callable[[], str] = lambda: ""
        self.log: Callable[[str], None] | None = None
        self.expected: Mapping[str, float] = {}
        self._announced: dict[str, tuple[float, int]] = {}  # start and number of lines of each explained stage, by name
        self.informs = True
        self.on_stage_end: Callable[[str, float, float], None] = lambda name, started, ended: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podrl-watchdog", daemon=True)
        self._thread.start()
        stacks_on_signal()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Marks the current stage of the loop for the time of the `with` block.

        Of nested stages only the innermost is watched, and its seconds do not count for the stages around it.
        """
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
            self.on_stage_end(name, started, now)

    def take_spent(self) -> dict[str, float]:
        """Returns the seconds spent in each stage since the last call, without the seconds of nested stages."""
        spent, self._spent = self._spent, {}
        return spent

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _describe_waits(self) -> str:
        text = "; ".join(found for source in list(self.wait_sources) if (found := source()))
        return f" (it waits for {text})" if text else ""

    def announce_long(self, stage: tuple[str, float], now: float) -> None:
        """Prints a line about a slow stage: the work it does, and its duration so far.

        Args:
          stage: name of the stage, and the time at which it began (`time.monotonic`).
          now: present time of the same clock.
        """
        name, started = stage
        first, lines = self._announced.get(name, (started, 0))
        if name not in _EACH_STEP and started != first:
            first, lines = started, 0
        due = sum(1 for _ in itertools.takewhile(lambda age: age < now - started, _ages()))
        if self.log is None or started != first or due <= lines:
            return
        self._announced[name] = (started, due)
        last = f", {self.expected[name]:.0f} s the last time" if name in self.expected else ""
        self.log(f"{name}: {_DOES.get(name, 'at work')} ({now - started:.0f} s so far{last}) ...")

    def _watch(self) -> None:
        reported: tuple[str, float] | None = None
        hinted: tuple[str, float] | None = None
        while not self._closed.wait(min(self._stall_s / 4, 1.0)):
            stages = list(self._stages)
            if not stages:
                continue
            (name, started), now = stages[-1], time.monotonic()
            self.announce_long(stages[-1], now)
            age = now - started
            early = self.informs and self._stall_s / 10 < age <= self._stall_s and hinted != stages[-1]
            if early and (late := self._describe_waits()):
                hinted = stages[-1]
                print(f"podrl: stage '{name}' has taken {age:.0f} s so far{late}.", file=sys.stderr, flush=True)
            if age > self._stall_s and reported != stages[-1]:
                reported = stages[-1]
                limit = f"log.stall_s={self._stall_s:g}"
                print(
                    f"podrl: stage '{name}'{self._describe_waits()} has taken {age:.0f} s, more than {limit}; "
                    f"process {os.getpid()} exits 42 at {4 * self._stall_s:g} s. All stacks:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if age > 4 * self._stall_s:
                last_line = f"podrl: stage '{name}' did not end within {age:.0f} s: giving up. {self.last_words()}"
                print(last_line.rstrip(), file=sys.stderr, flush=True)
                os._exit(EXIT_INFRASTRUCTURE)
