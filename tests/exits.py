"""Turns a call of os._exit during a test into a failure of that test; otherwise it would end the process of all
tests."""

import os
import sys
import threading
import time
from collections.abc import Callable

_STUCK_S = 120.0


def exit_only_between_tests(leave: Callable[[int], None]) -> Callable[[int], None]:
    """Returns `leave`, which ends the process, changed so that it raises AssertionError while a test runs.

    A process that a test forks may still end itself. If the test goes on for two minutes after the call, for example
    because it waits for something that the exit was to end, the process ends after all.
    """
    process = os.getpid()

    def leave_if_stuck(code: int, test: str, text: str) -> None:
        time.sleep(_STUCK_S)
        if os.environ.get("PYTEST_CURRENT_TEST") == test:
            print(text, file=sys.__stderr__, flush=True)
            leave(code)

    def guarded(code: int) -> None:
        if os.getpid() == process and (test := os.environ.get("PYTEST_CURRENT_TEST")):
            thread = threading.current_thread().name
            text = f"Thread {thread!r} called os._exit({code}) in this process of tests, during {test}."
            threading.Thread(target=leave_if_stuck, args=(code, test, text), daemon=True).start()
            raise AssertionError(text)
        leave(code)

    return guarded
