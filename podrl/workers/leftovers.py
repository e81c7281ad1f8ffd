"""Ends processes that users' code detached from its worker; finds them by the worker's mark in their environment.

A process may leave its group and its session, and outlive its parent, but it keeps its environment unless it clears the
environment itself. This module imports only the standard library. It is also a program that ends the processes that a
killed job left behind.
"""

import contextlib
import os
import signal
import sys
import time

MARK = "PODRL_MARK"
_WAIT_S = 1.0


def end_marked(mark: str) -> None:
    """Kills processes whose mark begins with `mark`, and their children; returns when none is left, or after 1 s."""
    end = time.monotonic() + _WAIT_S
    while _kill(f"{MARK}={mark}".encode()) and time.monotonic() < end:
        time.sleep(0.002)


def _kill(mark: bytes) -> int:
    """Kills the marked processes that exist now, and their descendants; returns the number of marked processes."""
    children: dict[int, list[int]] = {}
    marked = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, IndexError):  # the process ended meanwhile, or is another user's
            if name.isdigit() and int(name) != os.getpid():
                children.setdefault(_parent(int(name)), []).append(int(name))
                if _carries(int(name), mark):
                    marked.append(int(name))
    doomed = list(marked)
    for number in doomed:
        doomed += [child for child in children.get(number, ()) if child not in doomed]
    with contextlib.ExitStack() as held:
        found = []
        for number in doomed:
            with contextlib.suppress(OSError, IndexError):
                process = os.pidfd_open(number)
                held.callback(os.close, process)
                # Check again: before the open, the system may have given the number to another process.
                if _carries(number, mark) or _parent(number) in doomed:
                    found.append(process)
        for process in found:  # not earlier: once a process is dead, its children have another parent
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
    return len(marked)


def _carries(number: int, mark: bytes) -> bool:
    with open(f"/proc/{number}/environ", "rb") as file:  # the file of a process that has ended is empty
        return any(variable.startswith(mark) for variable in file.read().split(b"\0"))


def _parent(number: int) -> int:
    with open(f"/proc/{number}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def main() -> None:
    """Waits in the background until no process holds the other end of standard input, then kills marked processes.

    The program's argument is the job's mark.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    os.read(0, 1)
    end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
