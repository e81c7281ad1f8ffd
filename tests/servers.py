"""Starts servers on ports of this machine, for as long as a test needs them."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from waits import until


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen]:
    """Runs a server's command, yields the process once it accepts connections on `port`, and kills it at the end."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def listens() -> bool:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        until(listens, f"a server on port {port}")
        yield process
    finally:
        process.kill()
        process.wait()
