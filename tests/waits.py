"""Waits for events in tests, under one generous bound: a test that fails at it has met a hang, not a slow machine."""

import pathlib
import time
from collections.abc import Callable

PATIENCE_S = 300.0  # what takes seconds on a quiet machine has taken a minute on two cores with ten other processes


def until(happened: Callable[[], object], what: str = "", *, every_s: float = 0.02) -> None:
    """Returns as soon as `happened()` is true.

    Args:
      happened: looks whether the event has come; may raise AssertionError to end the wait at once.
      what: names the event in the failure; by default the source line of the caller names it.
      every_s: seconds between two looks.

    Raises:
      AssertionError: the event has not come within PATIENCE_S.
    """
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what or 'the awaited event'} did not happen within {PATIENCE_S:g} s"
        time.sleep(every_s)


def is_running(pid: int | str) -> bool:
    """True while a process is there; a zombie, whose parent has not asked for its exit code, has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
