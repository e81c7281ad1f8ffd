"""Streams of preference pairs, as batches of tokens: two answers to one prompt, a preferred one and a rejected one."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from podrl.data import answers, pipeline, sources
from podrl.data.answers import Example, encode
from podrl.data.config import EMBEDDED, DataConfig
from podrl.data.mixture import interleaved, split
from podrl.data.problem_generator import RandomDraws
from podrl.data.sft import SFTBatch, by_part, forms, open_answers
from podrl.data.stream import BatchStream, Limit, Stream, TooLong
from podrl.data.tokenizer import Tokenizer
from podrl.mappings import Record


class _Pair(NamedTuple):
    chosen: Example
    rejected: Example


class PairStream(BatchStream[_Pair]):
    """An endless, exactly resumable stream of `SFTBatch`: rows 2p and 2p + 1 are the answers of pair p, chosen first.

    Attributes:
      steps_per_epoch: number of batches that together have as many pairs as there are records, at least 1.
    """

    def __init__(
        self, data: DataConfig, tokenizer: Tokenizer, *, pairs: int, max_length: int, key: str = "dpo.max_length"
    ) -> None:
        """Starts at the first pair.

        Args:
          data: settings of the records. Each record of a file holds the texts 'chosen' and 'rejected' and the question:
            either the text 'prompt', used as it is, or the field data.question_field, rendered as data.template says.
            All of these may be turns of a conversation; 'chosen' and 'rejected' may be whole conversations. The
            assistant's turns that only one of the two answers has are learned. If all records also have
            data.answer_field, the questions that an evaluation uses are left out. An embedded task such as
            'problems' gives a right answer in the task's format as the chosen answer, and an answer that a base model
            might write as the rejected answer.
          tokenizer: tokenizer of the model that learns.
          pairs: number of pairs in a batch.
          max_length: largest number of tokens of prompt and answer together; data.long_prompts says whether pairs with
            a longer answer are left out or are an error.
          key: name of the setting that `max_length` comes from, for messages.

        Raises:
          ValueError: the data cannot be read, or a record holds no pair.
        """
        limit = Limit(max_length, key, data.long_prompts)
        source, parts = open_answers(data, check_form)
        writer = by_part([_Writer(part.config, tokenizer, limit) for part in parts])
        seed = data.seed if data.shuffle else None
        stream = Stream(source, writer, seed, limit, tools=tokenizer.tools_digest)
        super().__init__(stream)
        self.steps_per_epoch = max(1, stream.records // pairs)
        self._pairs, self._max_length, self._pad_id = pairs, max_length, tokenizer.pad_id

    def __iter__(self) -> "PairStream":
        return self

    def __next__(self) -> SFTBatch:
        examples = [example for pair in self._stream.take(self._pairs) for example in pair]
        return SFTBatch.of(examples, self._max_length, self._pad_id, self.state())


def held_out_pairs(
    data: DataConfig, tokenizer: Tokenizer, *, count: int, pairs: int, max_length: int, key: str
) -> list[SFTBatch]:
    """Makes batches of at most `count` held-out pairs, `pairs` in a batch, in the form of PairStream.

    The list is empty if the data holds out no record. The other arguments are those of PairStream.
    """
    limit = Limit(max_length, key, data.long_prompts)
    if data.eval_path:
        whole = dataclasses.replace(data, path=data.eval_path, eval_path="", eval_fraction=0.0, sources=())
        opened = [(part.config, part.train) for part in split(whole, check_form).parts]
    else:
        opened = [(part.config, part.held_out) for part in split(data, check_form).parts]
    candidates = interleaved([_read_pairs(_Writer(config, tokenizer, limit), records) for config, records in opened])
    chosen = list(itertools.islice((pair for pair in candidates if not isinstance(pair, TooLong)), count))
    cuts = [chosen[i : i + pairs] for i in range(0, len(chosen), pairs)]
    return [SFTBatch.of([e for pair in cut for e in pair], max_length, tokenizer.pad_id, b"") for cut in cuts]


def _read_pairs(write: "_Writer", records: sources.Source) -> Iterator[_Pair | TooLong]:
    return (sources.make(records, i, functools.partial(write, i)) for i in range(len(records)))


class _Writer:
    """Makes a pair from a record; in an embedded task, the position in the stream seeds the random draws."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, limit: Limit) -> None:
        self._data, self._tokenizer, self._limit = data, tokenizer, limit
        self._render = pipeline.Renderer(data, tokenizer)

    def __call__(self, index: int, record: Any) -> _Pair | TooLong:
        if self._data.path in EMBEDDED:
            prompt, fields = self._render(record)
            examples = [
                encode([prompt, *answer], self._tokenizer, self._limit)
                for answer in forms(record, fields, RandomDraws(self._data.seed, 3, index))
            ]
        else:
            examples = answers.of_record(record, ("chosen", "rejected"), self._render, self._tokenizer, self._limit)
        chosen, rejected = examples
        if isinstance(chosen, TooLong) or isinstance(rejected, TooLong):
            return TooLong(max(one.length for one in examples if isinstance(one, TooLong)))
        if chosen.tokens == rejected.tokens:
            raise ValueError(
                f"'chosen' and 'rejected' are the same tokens ({chosen.text[-80:]!r}): they must differ in more than "
                "the chat template leaves out."
            )
        return _Pair(chosen, rejected)


def check_form(record: Record, place: str, data: DataConfig) -> None:
    """Refuses a record that holds no pair.

    Raises:
      ValueError: a field is missing or wrong; the message says which, and begins with `place`, the file and line.
    """
    if fault := answers.check(record, ("chosen", "rejected"), data):
        raise ValueError(
            f"{place} has {', '.join(record) or 'no fields'}: a pair needs the texts (or turns) 'chosen' and "
            f"'rejected', and the question that they answer in 'prompt' or {data.question_field!r}; {fault}."
        )
    if record["chosen"] == record["rejected"]:
        raise ValueError(f"{place} prefers an answer to itself: 'chosen' and 'rejected' must differ.")
