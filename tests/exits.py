"""Turns a call of os._exit during a test into a failure of that test; otherwise it would end the process of all
tests."""

import os
import threading
from collections.abc import Callable


def exit_only_between_tests(leave: Callable[[int], None]) -> Callable[[int], None]:
    """Returns `leave`, which ends the process, changed so that it raises AssertionError while a test runs.

    A process that a test forks may still end itself.
    """
    process = os.getpid()

    def guarded(code: int) -> None:
        if os.getpid() == process and (test := os.environ.get("PYTEST_CURRENT_TEST")):
            thread = threading.current_thread().name
            raise AssertionError(
                f"Thread {thread!r} called os._exit({code}) in the process of the tests, during {test}."
            )
        leave(code)

    return guarded
