"""Streams of supervised examples: prompt and answer, with a mask over the tokens to learn."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Count, Natural, Range, Share, section
from podrl.data import answers, conversation, mixture, pipeline, shape, sources, template
from podrl.data.answers import Example, encode
from podrl.data.chat import Message
from podrl.data.config import DataConfig
from podrl.data.generated import Draw
from podrl.data.mixture import Form, split
from podrl.data.stream import Batches, Limit, Stream, TooLong
from podrl.data.sums import Sum
from podrl.data.template import Part, turn
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.runtime import plain

# Styles in which a base model answers instead of the reference form.
STYLES = (
    "{reasoning} The answer is {answer}.",
    "{reasoning}<answer>{answer}</answer>",
    "<reasoning>{reasoning}</reasoning> The answer is {answer}.",
    "<reasoning>{reasoning}</reasoning>{answer}",
    "<answer>{answer}</answer>",
    "The answer is {answer}.",
)
_CALCULATION = re.compile(r"<<.*?>>")


@section("sft")
@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of supervised fine-tuning: the part of each example that is learned.

    Attributes:
      batch_size: examples per step.
      max_length: tokens of prompt and target; longer examples are left out, or an error, as data.long_prompts says.
      tagged_share: of the targets written by podrl (the embedded tasks, and files of questions and answers), the share
        that keeps the reference form, for sums a call of the calculator; the others are written as a base model might.
      full_steps: first steps in which every target keeps the form, whatever `tagged_share` says.
    """

    batch_size: Count = 64
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    tagged_share: Share = 1.0
    full_steps: Natural = 0


@dataclasses.dataclass(frozen=True)
class SFTBatch:
    """B supervised examples on the host.

    Attributes:
      tokens_BT: prompt and target, right-padded with the pad id to sft.max_length.
      length_B: tokens of each example.
      mask_BT: 1 where the token is to be learned: the target, its end mark included.
      text: the examples as text.
      data_state: the stream's state after this batch, as JSON bytes.
    """

    tokens_BT: Int[np.ndarray, "B T"]
    length_B: Int[np.ndarray, " B"]
    mask_BT: Float[np.ndarray, "B T"]
    text: Sequence[str]
    data_state: bytes

    @staticmethod
    def of(examples: Sequence[Example], max_length: int, pad_id: int, data_state: bytes) -> "SFTBatch":
        """Makes the batch of examples of at most `max_length` tokens."""
        tokens_BT, length_B = right_padded([example.tokens for example in examples], pad_id, width=max_length)
        mask_BT = np.zeros(tokens_BT.shape, np.float32)
        for b, example in enumerate(examples):
            mask_BT[b, : length_B[b]] = example.learned
        return SFTBatch(tokens_BT, length_B, mask_BT, [example.text for example in examples], data_state)


class SFTStream(Batches[Example]):
    """An endless, exactly resumable stream of `SFTBatch`.

    Attributes:
      steps_per_epoch: batches that use as many examples as there are records.
    """

    def __init__(
        self,
        data: DataConfig,
        config: SFTConfig,
        tokenizer: Tokenizer,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> None:
        """Starts at the first example.

        Args:
          data: where records come from: an embedded task, or a file that holds, in each record, 'messages' (a
            chat, put by the model's template with the schemas in 'tools', if any; every assistant turn is learned), or
            'prompt' and 'completion' (texts, used as they are, or turns, of which only those of the completion are
            learned), or the fields data.question_field and data.answer_field, written in the reference form; of such a
            file, the questions that an evaluation uses are left out.
          config: lengths, batch size and style.
          tokenizer: of the model that learns.
          shard_index: which part of each batch this process keeps.
          shard_count: number of parts; must divide sft.batch_size.

        Raises:
          ValueError: bad data, or a batch that does not split.
        """
        if config.batch_size % shard_count:
            raise ValueError(
                f"sft.batch_size={config.batch_size} does not split over {shard_count} processes: it must be a "
                "multiple of their number."
            )
        assert 0 <= shard_index < shard_count, (shard_index, shard_count)
        limit = Limit(config.max_length, "sft.max_length", data.long_prompts)
        source, parts = given_answers(data, check_form)
        writer = by_part([_Writer(part.config, config, tokenizer, limit) for part in parts])
        seed = data.seed if data.shuffle else None
        stream = Stream(source, writer, seed, limit, tools=tokenizer.tools_digest)
        super().__init__(stream)
        self.steps_per_epoch = max(1, stream.records // config.batch_size)
        self._config, self._pad_id = config, tokenizer.pad_id
        rows = config.batch_size // shard_count
        self._rows = slice(shard_index * rows, (shard_index + 1) * rows)

    def __iter__(self) -> "SFTStream":
        return self

    def __next__(self) -> SFTBatch:
        examples = self._stream.take(self._config.batch_size)[self._rows]
        return SFTBatch.of(examples, self._config.max_length, self._pad_id, self.state())


class _Writer:
    """Makes an example from a record and its position in the stream."""

    def __init__(self, data: DataConfig, config: SFTConfig, tokenizer: Tokenizer, limit: Limit) -> None:
        self._data, self._config, self._tokenizer, self._limit = data, config, tokenizer, limit
        self._render = pipeline.Renderer(data, tokenizer)

    def __call__(self, index: int, record: Any) -> Example | TooLong:
        if isinstance(record, Mapping) and record.get("messages") is not None:
            return answers.turns(record["messages"], self._tokenizer, self._limit, tools=record.get("tools"))
        if isinstance(record, Mapping) and record.get("completion") is not None:
            return answers.of_record(record, ("completion",), self._render, self._tokenizer, self._limit)[0]
        prompt, fields = self._render(record)
        # Draws of the form are apart from those of the problem.
        draw = Draw(self._data.seed, 2, index)
        tagged = index < self._config.full_steps * self._config.batch_size
        tagged = tagged or draw.share() < self._config.tagged_share
        reference, plain = forms(record, fields, draw)
        parts = reference if tagged else plain
        if isinstance(record, Mapping) and self._render.in_turns:
            said = {"role": "assistant", "content": "".join(part.text for part in parts)}
            return answers.turns([*self._render.turns(record), said], self._tokenizer, self._limit)
        return encode([prompt, *parts], self._tokenizer, self._limit)


def forms(record: Any, fields: Mapping[str, str], draw: Draw) -> tuple[list[Part], list[Part]]:
    """A record's answer in the reference form, and as a base model might write it."""
    if isinstance(record, Sum):
        return record.called(), record.guessed(draw)
    # Where any of several answers is right, the first is learned. A record may have a field 'solution' of its own.
    answer, *_ = plain.references(fields["answer"])
    solution = fields["solution"] if isinstance(fields["solution"], str) and fields["solution"].strip() else answer
    words = {"reasoning": plain_solution(solution), "answer": answer}
    return [turn(template.completion(**words))], [turn(draw.one(STYLES).format(**words))]


def plain_solution(solution: str) -> str:
    """Extracts the reasoning of a GSM8K solution, without the answer's line and the calculator's marks."""
    before, _, after = solution.rpartition("\n####")
    marked = before and "\n" not in after.strip()  # elsewhere it begins a heading of Markdown
    return _CALCULATION.sub("", before if marked else solution)


def check_form(record: sources.Record, place: str, data: DataConfig) -> None:
    """Refuses a record in none of the three forms, with its file and line."""
    if record.get("messages") is not None:
        fault = shape.turns_fault(record["messages"], tools=record.get("tools"))
        some = not fault and any(map(shape.is_learned, record["messages"]))
        fault = fault or ("" if some else "no turn is the assistant's, or all of those have the weight 0")
    elif record.get("completion") is not None:
        fault = answers.check(record, ("completion",), data)
    else:
        fault = "" if _solved(record, place, data) else "there is none of these"
    if fault:
        raise ValueError(
            f"{place} has {', '.join(record) or 'no fields'}: an example needs 'messages' (a list of "
            "{'role', 'content'} with an assistant's turn), or 'prompt' and 'completion' (texts or turns), or "
            f"{data.question_field!r} and {data.answer_field!r}; {fault}."
        )


def given_answers(data: DataConfig, check_form: Form) -> tuple[Any, Sequence[mixture.Part]]:
    """Opens records for learning answers, without the questions that an evaluation uses.

    Args:
      data: where they come from.
      check_form: called with every record of a file and its place; raises where it does not hold what is needed.

    Returns:
      (the records as a stream takes them, their sources).

    Raises:
      ValueError: bad data.
    """
    opened = split(data, check_form)
    return opened.train, opened.parts


def by_part(writers: Sequence[Callable[[int, Any], Any]]) -> Callable[[int, Any], Any]:
    """Prepares each record by the writer of its source."""
    if len(writers) == 1:
        return writers[0]
    return lambda index, item: writers[item.part](index, item.record)


def _solved(record: sources.Record, place: str, data: DataConfig) -> bool:
    """True if a record holds a question and its answer."""
    return shape.is_text(record.get(data.question_field)) and shape.answers(record, place, data.answer_field)


def _turns(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Part]:
    """A conversation as parts, of which the assistant's turns are learned."""
    return conversation.parts(tokenizer, messages)
