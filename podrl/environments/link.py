"""A worker process on an event loop: frames out without blocking, frames in as calls, and its end as one too."""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from podrl.runtime.frames import pack, take
from podrl.runtime.user_code import Limits
from podrl.runtime.workers import Worker


class Link:
    """A Worker whose frames are handled on the running event loop."""

    def __init__(
        self, module: str, limits: Limits, on_frame: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        """Starts the process.

        Args:
          module: the module it runs.
          limits: what it may take and see.
          on_frame: called with each frame's header.
          on_end: called once when its pipe ends, unless `close` was called before.
        """
        self.worker = Worker(module, limits)
        self._loop = asyncio.get_running_loop()
        self._on_frame, self._on_end = on_frame, on_end
        self._received, self._waiting = bytearray(), bytearray()
        self._open = True
        os.set_blocking(self.worker.read, False)
        self._loop.add_reader(self.worker.read, self._readable)

    def send(self, header: Mapping[str, Any]) -> None:
        """Sends a frame, together with all others that are sent before the loop's next round."""
        if self._open:
            if not self._waiting:
                self._loop.call_soon(self._write)
            self._waiting += pack(header)

    def close(self) -> None:
        """Kills the process and what it started."""
        self._stop()
        self.worker.close(wait_s=0)

    def leave(self) -> Worker:
        """Asks the process to end; whoever gets the worker closes it."""
        self._write()
        self._stop()
        self.worker.leave()
        return self.worker

    def _write(self) -> None:
        if not self._open:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self.worker.write, self._waiting)]
        except BlockingIOError:
            self._loop.add_writer(self.worker.write, self._write)
            return
        except BrokenPipeError:
            self._waiting.clear()  # its end is read from the other pipe
        self._loop.remove_writer(self.worker.write)

    def _readable(self) -> None:
        try:
            chunk = os.read(self.worker.read, 1 << 20)
        except BlockingIOError:
            return
        if not chunk:
            self._stop()
            self._on_end()
            return
        self._received += chunk
        while self._open and (frame := take(self._received)) is not None:
            self._on_frame(frame)

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self.worker.read)
            self._loop.remove_writer(self.worker.write)
