"""A tool whose answers a test can change between the lives of a run; files in its working directory control it.

The answers depend on file `world`. File `calls` has one byte per call, over all lives. File `kill_at_calls` lists
numbers of calls: during each of these calls the tool kills its caller, so the caller never gets the answer.
"""

import contextlib
import hashlib
import os
import pathlib
import signal
import time


def calculator(query: str) -> str:
    """A number."""
    with open("calls", "ab", buffering=0) as calls:
        calls.write(b".")
        number = calls.tell()
    with contextlib.suppress(FileNotFoundError):
        if str(number) in pathlib.Path("kill_at_calls").read_text().split():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the tool's process dies with its parent
    world = pathlib.Path("world").read_text()
    return str(int(hashlib.sha256(f"{world} {query}".encode()).hexdigest(), 16) % 10_000_000)
