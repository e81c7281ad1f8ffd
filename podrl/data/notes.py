"""Stores the hash of every record's question, and whether the record has an answer, while a file is read."""

import array
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.data import shape
from podrl.data.sources import Records, Source
from podrl.mappings import Record


class Notes:
    """The notes of one source's records, in their order: hash of the question, and whether there is an answer."""

    def __init__(self, question_field: str, answer_field: str) -> None:
        """Makes empty notes; the arguments name the record's fields with the question and the answer."""
        self._question, self._answer = question_field, answer_field
        self._hashes, self._answered = array.array("Q"), array.array("b")

    @property
    def key(self) -> Sequence[str]:
        """The settings that the notes depend on, for the key of a cache."""
        return (self._question, self._answer)

    def check(self, record: Record, place: str) -> None:
        """Adds the notes of a record after checking that it asks a question.

        Raises:
          ValueError: the record asks nothing, or its answer is not allowed; the message names `place`.
        """
        shape.check(record, place, self._question)
        self.note(record, place)

    def note(self, record: Record, place: str) -> None:
        """Adds the notes of a record that is known to ask a question.

        Raises:
          ValueError: the record's answer is not allowed; the message names `place`.
        """
        self._note(record, answered=shape.answers(record, place, self._answer))

    def note_any_answer(self, record: Record, place: str) -> None:
        """Adds the notes of a record that has a completion. Its answer field may have any content, because nothing is
        trained on that field."""
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
        """Returns the notes of the records from index `start` on."""
        hashes, answered = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._answered, np.int8)
        return {"hashes": hashes[start:].copy(), "answered": answered[start:].copy()}

    def extend(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Appends notes that `arrays` returned."""
        self._hashes.frombytes(arrays["hashes"].tobytes())
        self._answered.frombytes(arrays["answered"].tobytes())

    @property
    def hashes(self) -> np.ndarray:
        """The hash of every record's question; equal for the same question, as `shape.same_question` compares them."""
        return np.frombuffer(self._hashes, np.uint64)

    def unanswered(self, records: Records) -> str:
        """Names the place and the fields of the first record without an answer; '' if every record has an answer."""
        missing = np.flatnonzero(np.frombuffer(self._answered, np.int8) == 0)
        if not len(missing):
            return ""
        first = int(missing[0])
        return shape.without_answer(records[first], records.place(first), self._answer)

    def held_out(self, fraction: float) -> np.ndarray:
        """Marks the records that are held out, about `fraction` of them.

        The hash of the question decides, so that records with the same question are all held out or all trained on.
        """
        return self.hashes < np.uint64(math.ceil(fraction * 2.0**64))


class Subset(Sequence[Record]):
    """A part of a source's records, in the source's order."""

    def __init__(self, source: Source, indices: np.ndarray) -> None:
        """Selects the records of `source` at `indices`, which are in rising order."""
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._source[int(self._indices[index])]

    def place(self, index: int) -> str:
        """Returns the place of a record in its file, for messages."""
        source: Any = self._source
        return source.place(int(self._indices[index]))


def _hash(question: str) -> int:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
