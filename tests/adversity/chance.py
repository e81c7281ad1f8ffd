"""A tool that answers otherwise in every life of a run, and may end one, as files in its working directory say.

File `world` is what its answers are made of; `calls` has a byte for each call of all lives; `kill_at_calls` lists the
calls in which the process that asked is killed, so that it has asked and has no answer.
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
            time.sleep(60)  # it dies with its parent
    world = pathlib.Path("world").read_text()
    return str(int(hashlib.sha256(f"{world} {query}".encode()).hexdigest(), 16) % 10_000_000)
