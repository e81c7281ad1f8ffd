"""Streams of labelled answers, as batches of tokens: a prompt, an answer, and whether the answer is desirable."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from podrl.data import answers, pipeline
from podrl.data.answers import Example, encode
from podrl.data.config import EMBEDDED, DataConfig
from podrl.data.mixture import OpenedSource
from podrl.data.problem_generator import RandomDraws
from podrl.data.sft import SFTBatch, by_part, forms, open_answers
from podrl.data.stream import BatchStream, Limit, Stream, TooLong
from podrl.data.tokenizer import Tokenizer
from podrl.mappings import Record

_log = logging.getLogger("podrl.data")
_LOOK = 1000  # the labels of this many first records of a source are compared


@dataclasses.dataclass(frozen=True)
class LabelledBatch(SFTBatch):
    """B answers with labels, on the host.

    Attributes:
      desirable_B: label of each answer: True for an answer to learn, False for an answer to avoid.
    """

    desirable_B: Bool[np.ndarray, " B"]

    def unrelated(self) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"], Float[np.ndarray, "B T"]]:
        """Joins every prompt with the answer of the next example: (tokens, lengths, mask of the answer).

        If prompt and answer together are longer than a row, the end of the answer is cut off.
        """
        B, T = self.tokens_BT.shape
        prompt_B = self.mask_BT.argmax(axis=1)
        tokens_BT, mask_BT = self.tokens_BT.copy(), np.zeros_like(self.mask_BT)
        length_B = np.zeros_like(self.length_B)
        for b, prompt in enumerate(prompt_B):
            other = (b + 1) % B
            length_B[b] = min(T, prompt + self.length_B[other] - prompt_B[other])
            theirs = slice(prompt_B[other], prompt_B[other] + length_B[b] - prompt)
            tokens_BT[b, prompt : length_B[b]] = self.tokens_BT[other, theirs]
            mask_BT[b, prompt : length_B[b]] = self.mask_BT[other, theirs]
        return tokens_BT, length_B, mask_BT


class _LabelledExample(NamedTuple):
    example: Example
    desirable: bool


class LabelStream(BatchStream[_LabelledExample]):
    """An endless, exactly resumable stream of `LabelledBatch`.

    Attributes:
      steps_per_epoch: number of batches that together have as many answers as there are records, at least 1.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, *, answers: int, max_length: int) -> None:
        """Starts at the first answer.

        Args:
          data: settings of the records. Each record of a file holds the text 'completion', the 'label' (true or false)
            and the question: either the text 'prompt', used as it is, or the field data.question_field, rendered as
            data.template says. 'prompt' and 'completion' may be turns of a conversation; the assistant's turns of the
            completion are learned. If all records also have data.answer_field, the questions that an evaluation uses
            are left out. In an embedded task such as 'problems', about half of the answers are right answers in the
            task's format and are desirable; the others are answers that a base model might write.
          tokenizer: tokenizer of the model that learns.
          answers: number of answers in a batch.
          max_length: largest number of tokens of prompt and answer together; data.long_prompts says whether longer
            examples are left out or are an error.

        Raises:
          ValueError: the data cannot be read, or a record holds no labelled answer.
        """
        limit = Limit(max_length, "kto.max_length", data.long_prompts)
        source, parts = open_answers(data, check_form)
        _warn_of_one_label(parts)
        writer = by_part([_Writer(part.config, tokenizer, limit) for part in parts])
        seed = data.seed if data.shuffle else None
        stream = Stream(source, writer, seed, limit, tools=tokenizer.tools_digest)
        super().__init__(stream)
        self.steps_per_epoch = max(1, stream.records // answers)
        self._answers, self._max_length, self._pad_id = answers, max_length, tokenizer.pad_id

    def __iter__(self) -> "LabelStream":
        return self

    def __next__(self) -> LabelledBatch:
        rows = self._stream.take(self._answers)
        batch = SFTBatch.of([item.example for item in rows], self._max_length, self._pad_id, self.state())
        return LabelledBatch(**vars(batch), desirable_B=np.array([item.desirable for item in rows]))


class _Writer:
    """Makes a labelled answer of a record; in an embedded task, the position in the stream seeds the random draws."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, limit: Limit) -> None:
        self._data, self._tokenizer, self._limit = data, tokenizer, limit
        self._render = pipeline.Renderer(data, tokenizer)

    def __call__(self, index: int, record: Any) -> _LabelledExample | TooLong:
        if self._data.path in EMBEDDED:
            prompt, fields = self._render(record)
            draw = RandomDraws(self._data.seed, 4, index)
            desirable = draw.share() < 0.5
            answer = forms(record, fields, draw)[0 if desirable else 1]
            example = encode([prompt, *answer], self._tokenizer, self._limit)
        else:
            desirable = bool(record["label"])
            (example,) = answers.of_record(record, ("completion",), self._render, self._tokenizer, self._limit)
        return example if isinstance(example, TooLong) else _LabelledExample(example, desirable)


def _warn_of_one_label(parts: Sequence[OpenedSource]) -> None:
    """Warns if all of the first records have the same label, which is often a mistake of the data."""
    if any(part.config.path in EMBEDDED for part in parts):
        return
    labels = [bool(part.train[i]["label"]) for part in parts for i in range(min(len(part.train), _LOOK))]
    if len(labels) > 1 and len(set(labels)) == 1:
        _log.warning(
            "All of the first %d records have 'label': %s, and KTO learns from the difference between good and bad "
            "answers. Check the labels.",
            len(labels),
            str(labels[0]).lower(),
        )


def check_form(record: Record, place: str, data: DataConfig) -> None:
    """Refuses a record that holds no labelled answer.

    Raises:
      ValueError: a field is missing or wrong; the message says which, and begins with `place`, the file and line.
    """
    if fault := answers.check(record, ("completion",), data):
        raise ValueError(
            f"{place} has {', '.join(record) or 'no fields'}: a labelled answer needs the text 'completion' (or "
            f"its turns), and the question that it answers in 'prompt' or {data.question_field!r}; {fault}."
        )
    if (label := record.get("label")) is None:
        raise ValueError(
            f"{place} has {', '.join(record)}: a labelled answer needs the field 'label', true for a good answer and "
            f"false for a bad one; {answers.lacks(record, 'label', data)}."
        )
    if not isinstance(label, bool | np.bool_):
        raise ValueError(f"{place}: 'label' is {label!r} but must be true (a good answer) or false (a bad one).")
