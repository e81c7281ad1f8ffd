"""Runs reward functions in worker processes that are killed and replaced when they are late."""

import queue
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from podrl.rewards import worker
from podrl.runtime.child import refuse_inside
from podrl.runtime.user_code import Limits
from podrl.runtime.workers import LOAD_S, DiedError, LateError, Worker, close_all


class Pool:
    """A fixed number of workers, each holding every function; a call takes an idle one and waits for its answer.

    Attributes:
      needs: parameters without a default, of every function.
    """

    def __init__(self, specs: Mapping[str, Mapping[str, Any]], size: int, limits: Limits) -> None:
        """Starts the workers at once and loads the functions into all of them, in parallel.

        Args:
          specs: id of a function to what podrl.runtime.user_objects.load takes.
          size: number of processes.
          limits: what each of them may take and see.

        Raises:
          ValueError: a function cannot be loaded; says why.
        """
        refuse_inside()
        self._specs, self._limits = specs, limits
        self.needs: dict[str, list[str]] = {}
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: set[Worker] = set()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._all)
        started = [self._start() for _ in range(size)]
        try:
            for process in started:
                self._loaded(process)
        except BaseException:
            self.close()
            raise
        for process in started:
            self._idle.put(process)

    def call(self, function: str, body: bytes, deadline_s: float) -> dict[str, Any]:
        """Sends a batch (`body`) to an idle worker and returns the reply of podrl.rewards.worker.call.

        Raises:
          LateError: no answer within `deadline_s`; the worker was killed and is replaced.
          DiedError: the worker's process ended; it is replaced.
        """
        process = self._idle.get()
        try:
            return process.exchange({"id": function}, body, deadline_s)
        except (LateError, DiedError):
            self._drop(process)
            process = self._start()
            try:
                self._loaded(process)
            except ValueError as error:
                if not isinstance(error.__cause__, DiedError):  # else the next call finds it dead, and replaces it
                    raise
            raise
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends every process; returns when none is left."""
        self._finalizer()

    def _start(self) -> Worker:
        process = Worker(worker.__name__, self._limits)
        with self._lock:
            self._all.add(process)
        for name, spec in self._specs.items():
            process.send({"id": name, "spec": spec, "path": sys.path})
        return process

    def _loaded(self, process: Worker) -> None:
        """Waits until a started worker holds all functions."""
        end = time.monotonic() + LOAD_S
        for name in self._specs:
            try:
                reply = process.receive(end)
            except (LateError, DiedError) as error:
                raise ValueError(f"Reward function {name} cannot be loaded: {error}") from error
            if "raised" in reply:
                raise ValueError(f"Reward function {name} cannot be loaded: {reply['raised']}")
            self.needs[name] = reply["needs"]

    def _drop(self, process: Worker) -> None:
        process.close(wait_s=0)
        with self._lock:
            self._all.discard(process)


def _close_all(processes: set[Worker]) -> None:
    close_all(processes)
    processes.clear()
