"""Reads the growing files of JSON lines in a run directory, on a disk only their new lines; counts damaged lines."""

import json
import threading
from collections.abc import Callable
from typing import Any

from podrl.mappings import JsonObject
from podrl.storage.storage import Place, is_remote

_AT_ONCE = 1000  # number of lines that are parsed in one call


class JsonLinesReader:
    """Follows a file of JSON objects, one per line; an unfinished last line is left for the next update.

    Attributes:
      bad: number of lines that are not a JSON object with an integer step.
    """

    def __init__(self, path: Place, take: Callable[[JsonObject], None], forget: Callable[[], None]):
        """Stores the arguments.

        Args:
          path: the file.
          take: function that is called with each object once.
          forget: function that is called before the file is read again from its start. This happens if the file has
            become shorter, or if it is in a bucket and has changed.
        """
        self._path, self._take, self._forget = path, take, forget
        self._read, self._start = 0, b""
        self.bad = 0
        self._lock = threading.Lock()

    def update(self) -> None:
        """Reads the lines that are new since the last update; a changed file in a bucket is read again as a whole."""
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

    def _see(self, record: object) -> None:
        if isinstance(record, dict) and type(record.get("step")) is int:
            self._take(record)
        else:
            self.bad += 1


def _parsed(lines: list[bytes]) -> list[object]:
    """Parses lines; a damaged line gives None. All lines are parsed at once if none is damaged, which is faster."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines):
            return found
    except (ValueError, RecursionError):
        pass
    return [_one(line) for line in lines]


def _one(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Series:
    """Columns of numbers by name, each with the steps of its values.

    Attributes:
      columns: (steps, values) by name; a value is None where the record had null.
      last_step: the largest step of a record.
    """

    def __init__(self):
        self.columns: dict[str, tuple[list[int], list[float | None]]] = {}
        self.last_step = 0

    def take(self, record: JsonObject) -> None:
        """Adds a record of metrics.jsonl; values that are neither numbers nor null are left out."""
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
        """Drops all columns."""
        self.columns, self.last_step = {}, 0

    def thinned(self, name: str, most: int) -> tuple[list[int], list[float | None]]:
        """Returns (steps, values) of a column, thinned to about `most` points.

        A long column keeps the lowest and the highest value of every stretch of steps.
        """
        steps, values = self.columns.get(name, ([], []))
        if len(steps) <= most:
            return list(steps), list(values)
        stretch, chosen = -(-2 * len(steps) // most), []
        for begin in range(0, len(steps), stretch):
            known = [(value, i) for i, value in enumerate(values[begin : begin + stretch], begin) if value is not None]
            chosen += sorted({min(known)[1], max(known)[1]}) if known else []
        return [steps[i] for i in chosen], [values[i] for i in chosen]
