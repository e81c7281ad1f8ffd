"""Starts servers on ports of this machine, for as long as a test needs them."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen]:
    """Runs a command whose process listens on `port` once it is yielded; it is killed at the end."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()
