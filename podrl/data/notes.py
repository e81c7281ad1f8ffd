"""Notes that are taken of every record while its file is read: its question's hash, and whether it has an answer."""

import array
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.data import shape
from podrl.data.sources import Record, Source


class Notes:
    """The notes of the records of one source, in their order."""

    def __init__(self, question_field: str, answer_field: str) -> None:
        """None yet; see podrl.data.shape for the fields."""
        self._question, self._answer = question_field, answer_field
        self._hashes, self._answered = array.array("Q"), array.array("b")

    @property
    def key(self) -> Sequence[str]:
        """Settings that the notes depend on."""
        return (self._question, self._answer)

    def check(self, record: Record, place: str) -> None:
        """Refuses a record that asks nothing, and notes it."""
        shape.check(record, place, self._question)
        self.note(record, place)

    def note(self, record: Record, place: str) -> None:
        """Notes a record that asks."""
        self._note(record, answered=shape.answers(record, place, self._answer))

    def note_given(self, record: Record, place: str) -> None:
        """Notes a record whose answer is given: its field `answer`, which nobody trains on, may hold anything."""
        try:
            answered = shape.answers(record, place, self._answer)
        except ValueError:
            answered = False
        self._note(record, answered=answered)

    def _note(self, record: Record, *, answered: bool) -> None:
        self._answered.append(answered)
        self._hashes.append(_hash(shape.same_question(record, self._question)))

    def __len__(self) -> int:
        return len(self._hashes)

    def arrays(self, start: int) -> dict[str, np.ndarray]:
        """The notes from a record on."""
        hashes, answered = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._answered, np.int8)
        return {"hashes": hashes[start:].copy(), "answered": answered[start:].copy()}

    def extend(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Appends notes that `arrays` returned."""
        self._hashes.frombytes(arrays["hashes"].tobytes())
        self._answered.frombytes(arrays["answered"].tobytes())

    @property
    def hashes(self) -> np.ndarray:
        """The hash of every record's question, equal where records ask the same (see `shape.same_question`)."""
        return np.frombuffer(self._hashes, np.uint64)

    def unanswered(self, records: Any) -> str:
        """The place of the first record without an answer, and what it has; '' where all have one."""
        missing = np.flatnonzero(np.frombuffer(self._answered, np.int8) == 0)
        if not len(missing):
            return ""
        first = int(missing[0])
        return f"{records.place(first)} lacks {self._answer!r} (it has {', '.join(records[first])})"

    def held_out(self, fraction: float) -> np.ndarray:
        """The records that are held out: by the question's hash, so that a repeated question is on one side only."""
        return self.hashes < np.uint64(math.ceil(fraction * 2.0**64))


class Subset(Sequence[Record]):
    """A part of a source's records, in the source's order."""

    def __init__(self, source: Source, indices: np.ndarray) -> None:
        """Those at `indices`."""
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._source[int(self._indices[index])]

    def place(self, index: int) -> str:
        """Names a record, for messages."""
        source: Any = self._source
        return source.place(int(self._indices[index]))


def _hash(question: str) -> int:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
