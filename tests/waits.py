"""Waits for events in tests, with one generous bound: a wait that exceeds it means a hang, not a slow machine."""

import pathlib
import time
from collections.abc import Callable

PATIENCE_S = 300.0  # work of a few seconds on a quiet machine has taken a minute on two cores with ten other processes


def until(happened: Callable[[], object], what: str = "", *, every_s: float = 0.02) -> None:
    """Returns as soon as `happened()` is true.

    Args:
      happened: function that returns True once the event has happened; it may raise AssertionError to end the wait.
      what: name of the event in the failure message; by default the caller's source line.
      every_s: seconds between two looks.

    Raises:
      AssertionError: the event has not happened within PATIENCE_S.
    """
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what or 'the awaited event'} did not happen within {PATIENCE_S:g} s"
        time.sleep(every_s)


def is_running(pid: int | str) -> bool:
    """Returns True while a process exists; a zombie, whose parent has not read its exit code, counts as ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
