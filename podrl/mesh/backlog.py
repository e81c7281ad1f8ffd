"""A bound on the number of device programs in flight."""

from collections import deque

import jax

from podrl.types import PyTree

IN_FLIGHT = 4


class Backlog:
    """Limits the programs in flight to `limit`: a caller that adds one more waits for the oldest.

    A few programs in flight keep an accelerator busy. On the CPU platform many programs in flight can deadlock: all
    devices of a process share a pool with one thread per device, and from the 33rd unfinished program of a device on,
    starting a program holds a thread until an older program ends. A collective that waits for these threads never ends.
    """

    def __init__(self, limit: int = IN_FLIGHT):
        self._limit = limit
        self._results: deque[PyTree] = deque()

    def add(self, result: PyTree) -> None:
        """Registers a program by one of its results, which must not be donated to another program."""
        self._results.append(result)
        if len(self._results) > self._limit:
            jax.block_until_ready(self._results.popleft())
