"""The journal of outside answers: one JSON line each, written before the answer is used, and looked up on a replay."""

import asyncio
import contextlib
import hashlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol

from podrl.environments.protocol import Task
from podrl.runtime.channel import Channel
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.storage import sealed_lines
from podrl.storage.storage import sync_directory

_log = logging.getLogger("podrl.environments")
_READ, _ADD = "outside/read", "outside/add"

Record = dict[str, Any]  # {"index", "sample", "n", "request", "answer"}
Records = dict[tuple[int, int, int], Record]  # by the first three
# Lines of before they had checksums.
_UNSEALED = ({"index": int, "sample": int, "n": int, "request": str, "answer": dict},)


class Store(Protocol):
    """A store of records by the name of their step: 'STEP', or 'eval-STEP' for evaluations."""

    async def read(self, name: str) -> Records: ...

    async def add(self, name: str, record: Record) -> None:
        """Returns when the record would outlive this process and its machine's power."""
        ...


class Journal:
    """Answers of the outside world, as one process looks them up and records them.

    A run that is started again draws the same samples, so the requests of a sample come again in their order: its
    answers are found by (step, prompt, sample, number) and a hash of the request. A request that changed gets a new
    answer.
    """

    def __init__(self, store: Store, *, exact: bool = True) -> None:
        """Of the records in `store`; not `exact`: it is no news that a run started again draws other samples."""
        self._store = store
        self._known: dict[str, Records] = {}
        self._old: set[str] = set()  # names that others have added records to
        self._warned = not exact

    async def find(self, task: Task, number: int, what: str) -> dict[str, Any] | None:
        """The answer to request `number` of a sample; None where there is no record of this request."""
        name = _name(task)
        if (known := self._known.get(name)) is None or name in self._old:
            self._old.discard(name)
            known = self._known[name] = {**await self._store.read(name), **self._known.get(name, {})}
        found = known.get((task.index, task.sample, number))
        if found is None or found["request"] == _hash(what):
            return None if found is None else found["answer"]
        if not self._warned:
            _log.warning(
                "Sample %d of prompt %d asks for %.80r at step %s, which is not what it asked for when this run was "
                "there before: it gets a new answer, and the run will differ from the earlier one.",
                *(task.sample, task.index, what, name),
            )
        self._warned = True
        return None

    async def add(self, task: Task, number: int, what: str, answer: Mapping[str, Any]) -> None:
        """Records an answer."""
        record = {"index": task.index, "sample": task.sample, "n": number, "request": _hash(what), "answer": answer}
        await self._store.add(_name(task), record)
        self._known.setdefault(_name(task), {})[_key(record)] = record

    def read_again(self) -> None:
        """Looks into the store again when a record is asked for: others may have added some."""
        self._old.update(list(self._known))

    def forget(self, before: int) -> None:
        """Frees the memory of steps before one."""
        for name in list(self._known):
            if _step(name) < before:
                self._known.pop(name, None)


class Files:
    """Records in `directory`/<name>.jsonl, a line with a checksum each; any thread may call any method.

    A damaged line is said and stays in the file; its call is made again where a sample comes to it again. One
    thread writes: all records that wait when the disk has taken the last ones go to it together.
    """

    def __init__(self, directory: pathlib.Path, written: Callable[[], None] = lambda: None) -> None:
        """Opens nothing yet.

        Args:
          directory: where the files are.
          written: called after records were written, on the thread that did.
        """
        self._directory, self._written = directory, written
        self._files: dict[str, BinaryIO] = {}
        self._records: dict[str, Records] = {}
        self._waiting: list[tuple[str, Record, Future[Message]]] = []
        self._lock = threading.Lock()  # of the files and what is read from them
        self._more = threading.Condition()  # of what waits and of the thread
        self._thread: threading.Thread | None = None

    async def read(self, name: str) -> Records:
        return {_key(record): record for record in self._listed(name)}

    async def add(self, name: str, record: Record) -> None:
        await asyncio.wrap_future(self._add(name, record))

    def serve(self, channel: Channel) -> None:
        """Keeps the records of the job's other processes too; an answer to them says that the disk has a record."""
        channel.serve(_READ, lambda message: Message(self._listed(message.value)))
        channel.serve(_ADD, lambda message: self._add(**message.value))

    def drop(self, before: int) -> None:
        """Deletes the records of steps before one that a checkpoint has passed."""
        self.release(before)
        with self._lock:
            for path in self._directory.glob("*.jsonl"):
                if _step(path.stem) < before:
                    path.unlink(missing_ok=True)

    def release(self, before: int) -> None:
        """Frees memory and closes files of steps before one; they are read again when they are asked for."""
        with self._lock:
            for name in [name for name in {*self._records, *self._files} if _step(name) < before]:
                self._records.pop(name, None)
                if (file := self._files.pop(name, None)) is not None:
                    file.close()

    def close(self) -> None:
        """Writes what waits, then closes the files; a later record opens them again."""
        with self._more:
            thread, self._thread = self._thread, None
            self._more.notify()
        if thread is not None:
            thread.join()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _listed(self, name: str) -> list[Record]:
        with self._lock:
            return list(self._read(name).values())

    def _add(self, name: str, record: Record) -> "Future[Message]":
        """A future that is done when the disk has the record."""
        done: Future[Message] = Future()
        done.set_running_or_notify_cancel()  # whoever waits for it may be cancelled, the writing not
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
            except Exception as error:  # noqa: BLE001 - raised where the record is waited for
                for *_, done in records:
                    done.set_exception(error)
            else:
                for *_, done in records:
                    done.set_result(Message())

    def _write(self, records: "Sequence[tuple[str, Record, Future[Message]]]") -> None:
        with self._lock:
            changed: dict[str, BinaryIO] = {}
            try:
                for name, record, _ in records:
                    known = self._read(name)
                    if known.get(_key(record)) == record:
                        continue  # sent twice
                    changed[name] = file = self._open(name)
                    file.write(sealed_lines.encode(record))
                    known[_key(record)] = record
                for file in changed.values():
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                for name, *_ in records:  # what of it is on the disk is read again, before more is written behind it
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
        """The records of a step, as far as they are what was written."""
        if name not in self._records:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{name}.jsonl"
            found = sealed_lines.read(path, _UNSEALED)
            self._records[name] = {_key(record): record for _, record in found.records}
            for line, why in found.damaged:
                _log.warning(
                    "Line %d of %s is damaged (%s). The answer it held is lost: the call is made again where a sample "
                    "comes to it again, and the run may differ from what it was.",
                    *(line, path, why),
                )
        return self._records[name]


class AtLeader:
    """The records that the leader of a job keeps (`Files.serve`), for a process that has no run directory."""

    def __init__(self, pod: Pod, deadline_s: float) -> None:
        """Waits for each answer of the leader for `deadline_s` at most."""
        self._pod, self._deadline_s = pod, deadline_s

    async def read(self, name: str) -> Records:
        records = (await self._call(_READ, name)).value
        return {_key(record): record for record in records}

    async def add(self, name: str, record: Record) -> None:
        await self._call(_ADD, {"name": name, "record": record})

    async def _call(self, function: str, value: Any) -> Message:
        return await asyncio.to_thread(self._pod.call, LEADER, function, Message(value), self._deadline_s)


def _key(record: Mapping[str, Any]) -> tuple[int, int, int]:
    return record["index"], record["sample"], record["n"]


def _name(task: Task) -> str:
    return f"{'eval-' if task.mode == 'eval' else ''}{task.step}"


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _hash(what: str) -> str:
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
