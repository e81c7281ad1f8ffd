"""Reads the growing JSON lines of a run directory: new lines only, and what is damaged is counted, not raised."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from podrl.storage.storage import Place, is_remote

_AT_ONCE = 1000  # lines


class Lines:
    """Follows a file of JSON objects, one per line; a line that is being written is left for the next time.

    Attributes:
      bad: lines that are no JSON object.
    """

    def __init__(self, path: Place, take: Callable[[Mapping[str, Any]], None], forget: Callable[[], None]):
        """Reads nothing yet; `take` is given each object once, `forget` called where the file has begun anew."""
        self._path, self._take, self._forget = path, take, forget
        self._read, self._start = 0, b""
        self.bad = 0
        self._lock = threading.Lock()

    def update(self) -> None:
        """Reads what is new."""
        with self._lock:
            size = self._size()
            if size == self._read:
                return
            whole = self._path.read_bytes() if is_remote(self._path) else self._local(0 if size < self._read else None)
            if whole is None:
                return
            if size < self._read or is_remote(self._path):
                self._read, self.bad = 0, 0
                self._forget()
            end = whole.rfind(b"\n") + 1
            lines = whole[:end].split(b"\n")[:-1]
            for first in range(0, len(lines), _AT_ONCE):
                for record in _parsed(lines[first : first + _AT_ONCE]):
                    self._see(record)
            self._read += end

    def _size(self) -> int:
        try:
            found: Any = self._path.stat()
        except OSError:
            return 0
        return int(getattr(found, "st_size", 0) or getattr(found, "length", 0))

    def _local(self, offset: int | None) -> bytes | None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read if offset is None else offset)
                return file.read()
        except OSError:
            return None

    def _see(self, record: Any) -> None:
        if isinstance(record, dict) and type(record.get("step")) is int:
            self._take(record)
        else:
            self.bad += 1


def _parsed(lines: list[bytes]) -> list[Any]:
    """Parses lines, all at once where none is damaged, which is faster; None stands for a damaged one."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines):
            return found
    except (ValueError, RecursionError):
        pass
    return [_one(line) for line in lines]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Series:
    """Columns of numbers by name, each with the steps it was written at."""

    def __init__(self):
        self.columns: dict[str, tuple[list[int], list[float | None]]] = {}
        self.last_step = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Adds a record of metrics.jsonl; what is no number is left out."""
        step = record["step"]
        self.last_step = max(self.last_step, step)
        for name, value in record.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                column = self.columns.get(name)
                if column is None:
                    column = self.columns[name] = ([], [])
                column[0].append(step)
                column[1].append(value)

    def forget(self) -> None:
        """Drops everything."""
        self.columns, self.last_step = {}, 0

    def thinned(self, name: str, most: int) -> tuple[list[int], list[float | None]]:
        """Returns at most about `most` points of a column: of every stretch the lowest and the highest value."""
        steps, values = self.columns.get(name, ([], []))
        if len(steps) <= most:
            return list(steps), list(values)
        stretch, kept = -(-2 * len(steps) // most), []
        for begin in range(0, len(steps), stretch):
            known = [(value, i) for i, value in enumerate(values[begin : begin + stretch], begin) if value is not None]
            kept += sorted({min(known)[1], max(known)[1]}) if known else []
        return [steps[i] for i in kept], [values[i] for i in kept]
