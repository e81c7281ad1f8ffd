"""The journal of outside answers: one JSON line each, written before the answer is used and looked up on a replay."""

import asyncio
import contextlib
import hashlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import BinaryIO, Protocol

from podrl.environments.finished_episodes import NUMBER
from podrl.environments.protocol import Task
from podrl.mappings import JournalEntry, JsonObject
from podrl.runtime.channel import Channel
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.storage import sealed_lines
from podrl.storage.storage import sync_directory

_log = logging.getLogger("podrl.environments")
_READ, _ADD = "outside/read", "outside/add"


# Entries by (index, sample, n). An entry has the keys "index", "sample", "n", "request" and "answer".
Records = dict[tuple[int, int, int], JournalEntry]
# Fields of a line in the older format, which has no checksum.
_UNSEALED = ({"index": int, "sample": int, "n": int, "request": str, "answer": dict},)


class RecordStore(Protocol):
    """A store of records, grouped under the name of their step: 'STEP' for training, 'eval-STEP' for evaluations."""

    async def read(self, name: str) -> Records: ...

    async def add(self, name: str, record: JournalEntry) -> None:
        """Writes a record; returns when the record would survive the death of this process and a loss of power."""
        ...


class Journal:
    """Looks up and records the outside answers of one process.

    If `exact` is True, a run that is started again draws the same samples, so each sample makes the same requests in
    the same order. An answer is found by (step, prompt, sample, number of the request) and a hash of the request's
    description. If the description has changed, the answer is not used and the request is made again.

    Attributes:
      exact: True if a run that is started again draws the same samples.
    """

    def __init__(self, store: RecordStore, *, exact: bool = True) -> None:
        """Stores the arguments.

        Args:
          store: store of the records.
          exact: True if a run that is started again draws the same samples, so that a changed request deserves a
            warning.
        """
        self._store, self.exact = store, exact
        self._known: dict[str, Records] = {}
        self._reading = asyncio.Lock()  # locked while the store is read, so that no sample looks up an outdated record
        self._old: set[str] = set()  # names of steps that must be read again, as other processes may have added records
        self._shed: set[str] = set()  # names of steps with records that were added to the store but not to `_known`
        self._warned = not exact

    async def find(self, task: Task, number: int, description: str) -> JsonObject | None:
        """Looks up the recorded answer to a request.

        Args:
          task: the sample that made the request.
          number: number of the request among the sample's requests.
          description: description of the request.

        Returns:
          The answer; None if there is no record of this number with the same description.
        """
        name = _name(task)
        async with self._reading:
            stale = name in self._old or (number == NUMBER and name in self._shed)
            if (known := self._known.get(name)) is None or stale:
                self._old.discard(name)
                self._shed.discard(name)
                try:
                    known = self._known[name] = {**await self._store.read(name), **self._known.get(name, {})}
                except BaseException:  # if this sample is cancelled, the next sample must read again
                    self._old.add(name)
                    raise
        found = known.get((task.index, task.sample, number))
        if found is None or found["request"] == _hash(description):
            return None if found is None else found["answer"]
        if not self._warned:
            _log.warning(
                "Sample %d of prompt %d asks for %.80r at step %s, but the journal holds another request at this "
                "place: it gets a new answer, and the run will differ from the earlier one.",
                *(task.sample, task.index, description, name),
            )
        self._warned = True
        return None

    async def add(self, task: Task, number: int, description: str, answer: JsonObject) -> None:
        """Records `answer`, JSON values, as the answer to a request; see `find` for the other arguments."""
        record = {
            "index": task.index,
            "sample": task.sample,
            "n": number,
            "request": _hash(description),
            "answer": answer,
        }
        await self._store.add(_name(task), record)
        if _is_large(record):
            self._shed.add(_name(task))
            # If an earlier run recorded this episode, its record no longer counts.
            self._known.get(_name(task), {}).pop(_key(record), None)
        else:
            self._known.setdefault(_name(task), {})[_key(record)] = record

    def read_again(self) -> None:
        """Makes the next `find` for each step read the store again, because other processes may have added records."""
        self._old.update(list(self._known))

    def forget(self, before: int) -> None:
        """Frees the memory of the answers in all steps before `before`."""
        for name in list(self._known):
            if _step(name) < before:
                self._known.pop(name, None)


class Files:
    """Keeps records in `directory`/<name>.jsonl, each a line with a checksum; any thread may call any method.

    A damaged line is logged and stays in the file; a sample that needs its answer makes the call again. One thread
    writes. Records that arrive while this thread waits for the disk are written together afterwards. A record of a
    finished episode with its tokens does not stay in memory after it is written.
    """

    def __init__(self, directory: pathlib.Path, written: Callable[[], None] = lambda: None) -> None:
        """Stores the arguments; files are opened when they are needed.

        Args:
          directory: directory of the files; created when the first record is read or written.
          written: function that the writing thread calls after it has written records.
        """
        self._directory, self._written = directory, written
        self._files: dict[str, BinaryIO] = {}
        self._records: dict[str, Records] = {}
        self._shed: set[str] = set()  # names of files with records that have left the memory
        self._waiting: list[tuple[str, JournalEntry, Future[Message]]] = []
        self._lock = threading.Lock()  # protects _files, _records and _shed
        self._more = threading.Condition()  # protects _waiting and _thread
        self._thread: threading.Thread | None = None

    async def read(self, name: str) -> Records:
        return {_key(record): record for record in self._listed(name)}

    async def add(self, name: str, record: JournalEntry) -> None:
        await asyncio.wrap_future(self._add(name, record))

    def serve(self, channel: Channel) -> None:
        """Serves the records to the job's other processes; the answer to `add` is sent once the disk has the record."""
        channel.serve(_READ, lambda message: Message(self._listed(message.value)))
        channel.serve(_ADD, lambda message: self._add(**message.value))

    def drop(self, before: int) -> None:
        """Deletes the records of all steps before `before`, which no run repeats once there is a later checkpoint."""
        self.release(before)
        with self._lock:
            for path in self._directory.glob("*.jsonl"):
                if _step(path.stem) < before:
                    path.unlink(missing_ok=True)

    def release(self, before: int) -> None:
        """Frees the memory and closes the files of all steps before step `before`; a later request reads them again."""
        with self._lock:
            for name in [name for name in {*self._records, *self._files} if _step(name) < before]:
                self._records.pop(name, None)
                if (file := self._files.pop(name, None)) is not None:
                    file.close()

    def close(self) -> None:
        """Writes all waiting records, then closes the files; a later record opens them again."""
        with self._more:
            thread, self._thread = self._thread, None
            self._more.notify()
        if thread is not None:
            thread.join()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _listed(self, name: str) -> list[JournalEntry]:
        with self._lock:
            if name in self._shed:
                self._shed.remove(name)
                self._records.pop(name, None)
            return list(self._read(name).values())

    def _add(self, name: str, record: JournalEntry) -> "Future[Message]":
        """Queues a record for the writing thread; the returned future is done when the disk has the record."""
        done: Future[Message] = Future()
        # A running future cannot be cancelled: a caller that stops waiting for the record must not stop the write.
        done.set_running_or_notify_cancel()
        with self._more:
            self._waiting.append((name, record, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="podrl-journal", daemon=True)
                self._thread.start()
            self._more.notify()
        return done

    def _follow(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._waiting or self._thread is not threading.current_thread())
                records, self._waiting = self._waiting, []
            if not records:
                return
            try:
                self._write(records)
                self._written()
            except Exception as error:  # noqa: BLE001 - the futures raise the error where callers wait
                for *_, done in records:
                    done.set_exception(error)
            else:
                for *_, done in records:
                    done.set_result(Message())

    def _write(self, records: "Sequence[tuple[str, JournalEntry, Future[Message]]]") -> None:
        with self._lock:
            changed: dict[str, BinaryIO] = {}
            try:
                for name, record, _ in records:
                    known = self._read(name)
                    if known.get(_key(record)) == record:
                        continue  # the same record came twice
                    changed[name] = file = self._open(name)
                    file.write(sealed_lines.encode(record))
                    if _is_large(record):
                        self._shed.add(name)
                        # If an earlier run recorded this episode, its record no longer counts.
                        known.pop(_key(record), None)
                    else:
                        known[_key(record)] = record
                for file in changed.values():
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                # An unknown part of the records is on the disk now: the files are read again before more is appended.
                for name, *_ in records:
                    self._records.pop(name, None)
                    with contextlib.suppress(OSError, KeyError):
                        self._files.pop(name).close()
                raise

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = sealed_lines.open_to_append(self._directory / f"{name}.jsonl", _UNSEALED)
            sync_directory(self._directory)
        return self._files[name]

    def _read(self, name: str) -> Records:
        """Reads the undamaged records of a step, and logs each damaged line."""
        if name not in self._records:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{name}.jsonl"
            found = sealed_lines.read(path, _UNSEALED)
            self._records[name] = {_key(record): record for _, record in found.records}
            for line, why in found.damaged:
                _log.warning(
                    "Line %d of %s is damaged (%s). The answer in it is lost: a sample that needs it makes the call "
                    "again, and the run may differ from the earlier one.",
                    *(line, path, why),
                )
        return self._records[name]


class AtLeader:
    """The RecordStore of a process without a run directory: asks the job's leader, which keeps the `Files`."""

    def __init__(self, pod: Pod, deadline_s: float) -> None:
        """Stores the arguments.

        Args:
          pod: connection to the leader.
          deadline_s: longest wait for an answer of the leader, seconds.
        """
        self._pod, self._deadline_s = pod, deadline_s

    async def read(self, name: str) -> Records:
        records = (await self._call(_READ, name)).value
        return {_key(record): record for record in records}

    async def add(self, name: str, record: JournalEntry) -> None:
        await self._call(_ADD, {"name": name, "record": record})

    async def _call(self, function: str, value: object) -> Message:
        return await asyncio.to_thread(self._pod.call, LEADER, function, Message(value), self._deadline_s)


def _key(record: JournalEntry) -> tuple[int, int, int]:
    return record["index"], record["sample"], record["n"]


def _is_large(record: JournalEntry) -> bool:
    """Returns True for the record of a finished episode with its tokens; only a run that is started again reads it."""
    return record["n"] == NUMBER and "drawn" in record["answer"]


def _name(task: Task) -> str:
    return f"{'eval-' if task.mode == 'eval' else ''}{task.step}"


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _hash(description: str) -> str:
    return hashlib.blake2b(description.encode(), digest_size=16).hexdigest()
