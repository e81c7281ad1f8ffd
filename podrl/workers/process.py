"""Worker processes, single or in pools for functions of users; a worker can be killed together with its children."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from podrl.mappings import JsonObject
from podrl.workers import child, leftovers
from podrl.workers.frames import pack, take
from podrl.workers.user_code import Limits, hide_secrets
from podrl.workers.user_objects import LoadError

# Longest time for the imports of users' code, such as a math library; a call's deadline starts after the imports.
LOAD_S = 120.0
_LEAVE_S = 1.0
_PATIENCE_S = 0.05  # time that a call waits for an idle process before another process is started for it
_numbers = itertools.count()
T = TypeVar("T")


class LateWorkerError(Exception):
    """A worker did not answer in time."""


class DiedError(Exception):
    """A request has no answer: the worker's process ended, was asked to end, or wrote something else."""


@functools.cache
def _job_mark() -> str:
    """Returns the mark of this process's workers; the first call starts the program that kills marked processes later.

    That program, podrl.workers.leftovers, waits until this process has ended.
    """
    mark, (read, _kept) = secrets.token_hex(8), os.pipe()
    # In isolated mode and without site-packages the program starts in milliseconds. Its output goes nowhere, so that it
    # does not keep the job's output open.
    command = [sys.executable, "-I", "-S", leftovers.__file__, f"{mark}."]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {}}
    subprocess.run(command, stdin=read, check=True, start_new_session=True, **quiet)
    os.close(read)
    return mark


class Process:
    """One worker process, which runs a module that calls podrl.workers.child; use it on the loop that starts it."""

    def __init__(
        self, module: str, limits: Limits, on_frame: Callable[[JsonObject], None], on_end: Callable[[], None]
    ) -> None:
        """Starts `python -m MODULE` under limits.

        Args:
          module: name of the module.
          limits: resources that the process may use, and variables that it may see.
          on_frame: function that is called with each frame's header.
          on_end: function that is called once, when the process's pipe ends or brings bytes that are not frames. It is
            not called after `close` or `leave`.

        Raises:
          OSError: the system cannot start another process.
        """
        hide_secrets()  # a worker can read /proc/PID/environ of this process, which has the same user
        read_life, self._life = os.pipe()
        self._mark = f"{_job_mark()}.{next(_numbers)}."
        own = {leftovers.MARK: self._mark, child.INSIDE: "1", child.LIFE: str(read_life), "JAX_PLATFORMS": "cpu"}
        # A session of its own: Ctrl-C in the terminal does not reach the process, and its whole group can be killed.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(dataclasses.asdict(limits))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=limits.visible(os.environ) | own,
                pass_fds=(read_life,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(read_life)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._write_fd, self._read_fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._write_fd, False)
        os.set_blocking(self._read_fd, False)
        self._loop = asyncio.get_running_loop()
        self._on_frame, self._on_end = on_frame, on_end
        self._received, self._waiting = bytearray(), bytearray()
        self._open, self._closed, self._wrong = True, False, ""
        self._loop.add_reader(self._read_fd, self._readable)

    def send(self, header: JsonObject, body: bytes = b"") -> None:
        """Queues a frame; all frames queued before the loop's next iteration are written together.

        Raises:
          ValueError: the frame is too long.
        """
        frame = pack(header, body)
        if self._open:
            if not self._waiting:
                self._loop.call_soon(self._write)
            self._waiting += frame

    def leave(self) -> "Process":
        """Asks the process to end, and returns it; the caller must pass it to `reap` or call `close`."""
        self._write()
        self._stop()
        assert self._process.stdin is not None
        self._process.stdin.close()  # the process finds the end of the pipe at its next read
        return self

    def close(self, wait_s: float = 0.0) -> None:
        """Waits at most `wait_s` seconds until the process ends, kills it and its children, and closes the pipes."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._wait_unreaped(wait_s)
        # The process is not reaped yet, so its number still names its group: this also kills its children.
        os.killpg(self._process.pid, signal.SIGKILL)
        leftovers.end_marked(self._mark)  # kills children that have left the group
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        os.close(self._life)

    def death(self) -> DiedError:
        """Describes, after a call of `on_end`, how the process ended."""
        if self._wrong:
            return DiedError(f"it sent something other than an answer: {self._wrong}.")
        ended = self._wait_unreaped(_LEAVE_S)
        if ended is None:
            return DiedError("it closed its pipe.")
        if ended.si_code == os.CLD_EXITED:
            return DiedError(f"its process ended with exit code {ended.si_status}.")
        return DiedError(f"its process ended with {signal.Signals(ended.si_status).name}.")

    def _write(self) -> None:
        if not self._open:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._write_fd, self._waiting)]
        except BlockingIOError:
            self._loop.add_writer(self._write_fd, self._write)
            return
        except BrokenPipeError:
            self._waiting.clear()  # the process has ended; `_readable` finds the end of its output and reports it
        self._loop.remove_writer(self._write_fd)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._read_fd, 1 << 20)
        except BlockingIOError:
            return
        if not chunk:
            self._stop()
            self._on_end()
            return
        self._received += chunk
        while self._open:
            try:
                frame = take(self._received)
            except ValueError as error:
                self._wrong = str(error)
                self._stop()
                self._on_end()
                return
            if frame is None:
                return
            self._on_frame(frame)

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_fd)
            self._loop.remove_writer(self._write_fd)

    def _wait_unreaped(self, wait_s: float) -> os.waitid_result | None:
        """Returns the exit status, or None if the process still runs after `wait_s` seconds.

        The process is not reaped, so its number stays reserved until `close`.
        """
        end = time.monotonic() + wait_s
        while (ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return ended


class Loop:
    """An event loop on a thread of its own, for worker processes that are used from other threads."""

    def __init__(self, name: str, failed: Callable[[Mapping[str, object]], None] | None = None) -> None:
        """Starts the thread.

        Args:
          name: name of the thread.
          failed: function that is called with asyncio's context when a callback has raised an exception; None logs it.
        """
        self._loop = asyncio.new_event_loop()
        if failed is not None:
            self._loop.set_exception_handler(lambda _, context: failed(context))
        self._ending, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, Any, T]) -> T:
        """Runs a coroutine on the loop, waits for it, and returns its result.

        Raises:
          DiedError: `end` was called before or meanwhile.
        """
        with self._ending:  # under the lock, so that `end` finds all work that was accepted
            if self._ended:
                work.close()
                raise DiedError("it was asked to end.")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise DiedError("it was asked to end.") from None
        finally:
            future.cancel()  # has an effect only if the wait was interrupted

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Makes the loop call a function, without waiting for it."""
        self._loop.call_soon_threadsafe(call, *args)

    def end(self, leave: Callable[[], Coroutine[object, Any, Iterable[Process]]]) -> None:
        """Ends the loop and its processes.

        Args:
          leave: coroutine function that asks all processes of the loop to end, and returns them; runs on the loop.
        """
        # A finalizer may run this on the loop's own thread, which cannot wait for itself.
        if threading.current_thread() is self._thread:
            threading.Thread(target=self.end, args=(leave,)).start()
            return
        with self._ending:
            self._ended = True
        processes = asyncio.run_coroutine_threadsafe(self._finish(leave), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        reap(processes)

    @staticmethod
    async def _finish(leave: Callable[[], Coroutine[object, Any, Iterable[Process]]]) -> Iterable[Process]:
        # The loop runs callbacks in order: when the caller of `end` gets this result, the other callers have their own.
        processes = await leave()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return processes


def reap(processes: Iterable[Process]) -> None:
    """Waits at most 1 s for processes that were asked to leave, and kills the remaining ones."""
    end = time.monotonic() + _LEAVE_S
    for process in processes:
        process.close(max(0.0, end - time.monotonic()))


class Pool:
    """Processes that hold users' functions (`child.serve`), on one event loop; each call has a process to itself.

    Processes are started as calls need them. A process that dies or is late, or whose caller is cancelled, is killed;
    the next call starts another process in its place.

    Attributes:
      most: the largest number of processes.
    """

    def __init__(self, module: str, limits: Limits, most: int = 1) -> None:
        """Stores the arguments; calls start the processes.

        Args:
          module: name of the module that each process runs.
          limits: limits of each process.
          most: the largest number of processes.
        """
        self._module, self._limits, self.most, self._closed = module, limits, most, False
        self._all: set[_Holder] = set()
        self._idle: asyncio.Queue[_Holder] = asyncio.Queue()

    async def fill(self, specs: Mapping[str, JsonObject], label: Callable[[str], str]) -> dict[str, JsonObject]:
        """Starts all processes at once and loads functions into each.

        Args:
          specs: spec of each function by the function's id; podrl.workers.user_objects.load explains specs.
          label: function that names a function in errors, from its id.

        Returns:
          The module's description of each function, by id.

        Raises:
          ValueError: a function cannot be loaded; the error says why.
        """

        async def filled(holder: _Holder) -> dict[str, JsonObject]:
            about = {}
            for key, spec in specs.items():
                try:
                    about[key] = await holder.load(key, spec)
                except (LoadError, DiedError) as error:
                    raise ValueError(f"{label(key)} cannot be loaded: {error}") from error
            return about

        holders = [self._start() for _ in range(self.most)]
        about = await asyncio.gather(*map(filled, holders))
        for holder in holders:
            self._idle.put_nowait(holder)
        return about[0]

    async def load(self, key: str, spec: JsonObject) -> JsonObject:
        """Loads a function into a process, and returns the module's description of it.

        Raises:
          LoadError: the function cannot be loaded; the message says why.
          DiedError: the process ended.
        """
        return await self._with(lambda holder: holder.load(key, spec))

    async def call(self, key: str, spec: JsonObject, arguments: bytes, deadline_s: float) -> JsonObject:
        """Calls a function in a process of the pool.

        Args:
          key: id of the function.
          spec: spec of the function, from which it is loaded if the process does not have it yet.
          arguments: arguments of the function, as JSON.
          deadline_s: the longest wait for the answer, in seconds; the time to load the function does not count.

        Returns:
          The module's answer.

        Raises:
          LateWorkerError: no answer within `deadline_s`.
          DiedError: the process ended, or wrote something other than an answer.
          LoadError: the function cannot be loaded (again).
          ValueError: the arguments are too long.
          OSError: the system cannot start another process.
        """

        async def load_and_call(holder: _Holder) -> JsonObject:
            await holder.load(key, spec)
            return await holder.exchange({"call": key}, arguments, deadline_s)

        return await self._with(load_and_call)

    async def close(self) -> list[Process]:
        """Asks all processes to end, and refuses further calls; the caller must `reap` the processes it returns."""
        self._closed = True
        return [holder.leave() for holder in self._all]

    async def _with(self, use: "Callable[[_Holder], Awaitable[JsonObject]]") -> JsonObject:
        holder = await self._take()
        try:
            if holder.dead:
                holder.process.close()
                fresh = self._start()
                self._all.discard(holder)
                holder = fresh
            return await use(holder)
        finally:
            if holder.dead:  # a late answer or a cancelled call also makes a holder dead
                holder.process.close()
            self._idle.put_nowait(holder)  # a dead holder, too: it keeps its place in the pool for the next call

    async def _take(self) -> "_Holder":
        if not self._idle.empty():
            return self._idle.get_nowait()
        if self._all:
            try:
                return await asyncio.wait_for(self._idle.get(), _PATIENCE_S)
            except TimeoutError:
                pass
        return self._start() if len(self._all) < self.most else await self._idle.get()

    def _start(self) -> "_Holder":
        if self._closed:
            raise DiedError("it was asked to end.")
        holder = _Holder(self._module, self._limits)
        self._all.add(holder)
        return holder


class _Holder:
    """One process of a pool, and its functions; it counts as dead after the first request that gets no answer."""

    def __init__(self, module: str, limits: Limits) -> None:
        self.process = Process(module, limits, self._on_frame, self._on_end)
        self._death: DiedError | None = None
        self._number, self._reply = 0, asyncio.Future[JsonObject]()
        self._about: dict[str, JsonObject] = {}

    @property
    def dead(self) -> bool:
        return self._death is not None

    async def load(self, key: str, spec: JsonObject) -> JsonObject:
        """Loads a function into this process, unless it is there already; returns the module's description of it."""
        if key not in self._about:
            try:
                reply = await self.exchange({"load": key, "spec": spec, "path": sys.path}, b"", LOAD_S)
            except LateWorkerError:
                raise LoadError(f"it did not load within {LOAD_S:g} s.") from None
            if "raised" in reply:
                raise LoadError(reply["raised"])
            self._about[key] = reply
        return dict(self._about[key])

    async def exchange(self, header: JsonObject, body: bytes, deadline_s: float) -> JsonObject:
        if self._death is not None:
            raise self._death
        self.process.send({**header, "number": self._number + 1}, body)
        self._number, self._reply = self._number + 1, asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._reply, deadline_s)
        except TimeoutError:
            raise LateWorkerError("it did not answer in time.") from None
        finally:
            if self._reply.cancelled():  # the answer may still come, and must not be taken for a later request's answer
                self._fail(DiedError("its last request was given up."))

    def leave(self) -> Process:
        self._fail(DiedError("it was asked to end."))
        return self.process.leave()

    def _on_frame(self, frame: JsonObject) -> None:
        match frame:
            case {"number": self._number, "reply": dict(reply)} if not self._reply.done():
                self._reply.set_result(reply)
            case _:
                self._fail(DiedError("it sent an answer without a request."))

    def _on_end(self) -> None:
        self._fail(self.process.death())

    def _fail(self, death: DiedError) -> None:
        self._death = self._death or death
        if not self._reply.done():
            self._reply.set_exception(death)


class Functions:
    """A Pool for callers on threads; it has a fixed number of processes, and every process holds every function.

    Attributes:
      about: the module's description of each function, by id.
    """

    def __init__(
        self, module: str, limits: Limits, specs: Mapping[str, JsonObject], *, size: int, label: Callable[[str], str]
    ) -> None:
        """Starts the processes and loads the functions.

        Args:
          module: name of the module that each process runs; see `Process`.
          limits: limits of memory, processes, files and environment variables of each process.
          specs: spec of each function by the function's id; podrl.workers.user_objects.load explains specs.
          size: number of processes.
          label: function that names a function in errors of loading, from its id.

        Raises:
          ValueError: a function cannot be loaded; the error says why.
        """
        self._specs, self._label, self._pool = specs, label, Pool(module, limits, size)
        self._loop = Loop("podrl-functions")
        self._finalizer = weakref.finalize(self, self._loop.end, self._pool.close)
        try:
            self.about = self._loop.run(self._pool.fill(specs, label))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Functions":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, key: str, arguments: object, deadline_s: float) -> JsonObject:
        """Calls a function, waits for the answer, and returns it; raises the errors of `Pool.call`.

        Args:
          key: id of the function.
          arguments: arguments of the function: a value that JSON can hold, or such a value encoded as bytes already.
          deadline_s: the longest wait for the answer, in seconds.
        """
        body = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
        try:
            return self._loop.run(self._pool.call(key, self._specs[key], body, deadline_s))
        except LoadError as error:
            raise LoadError(f"{self._label(key)} cannot be loaded: {error}") from error

    def close(self) -> None:
        """Ends every process; returns when none is left."""
        self._finalizer()
