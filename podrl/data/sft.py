"""Streams of supervised examples, as batches of tokens: prompt and answer, with a mask over the tokens to learn."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Count, Natural, Range, Share, section
from podrl.data import answers, conversation, mixture, pipeline, shape, template
from podrl.data.answers import Example, encode
from podrl.data.config import DataConfig
from podrl.data.facts import Fact
from podrl.data.mixture import Form, split
from podrl.data.problem_generator import Problem, RandomDraws
from podrl.data.stream import BatchStream, Limit, Stream, TooLong
from podrl.data.sums import Sum
from podrl.data.template import TextPart, turn
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.mappings import ChatMessage, Record
from podrl.runtime import plain

# Styles of answers that a base model might write instead of the reference form.
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
    """Settings of supervised fine-tuning: size, length and form of the examples.

    Attributes:
      batch_size: number of examples in a step.
      max_length: largest number of tokens of prompt and target together; data.long_prompts says whether longer examples
        are left out or are an error.
      tagged_share: share of the targets in the reference form: reasoning and answer, each in its tags; for 'sums' a
        call of the calculator, for 'facts' a search with a cited answer. The other targets are written as a base model
        might answer. The share applies to the targets that podrl writes: the targets of embedded tasks, and of files of
        questions and answers.
      full_steps: number of steps at the start in which every target has the reference form, whatever `tagged_share` is.
    """

    batch_size: Count = 64
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    tagged_share: Share = 1.0
    full_steps: Natural = 0


@dataclasses.dataclass(frozen=True)
class SFTBatch:
    """B supervised examples on the host.

    Attributes:
      tokens_BT: token ids of prompt and target, right-padded with the pad id to the stream's max_length.
      length_B: number of tokens of each example.
      mask_BT: 1 on the tokens to learn: the target, its end mark included; 0 on the other tokens.
      text: texts of the examples.
      data_state: state of the stream after this batch, as JSON bytes.
    """

    tokens_BT: Int[np.ndarray, "B T"]
    length_B: Int[np.ndarray, " B"]
    mask_BT: Float[np.ndarray, "B T"]
    text: Sequence[str]
    data_state: bytes

    @staticmethod
    def of(examples: Sequence[Example], max_length: int, pad_id: int, data_state: bytes) -> "SFTBatch":
        """Makes a batch of examples, each of at most `max_length` tokens; rows are `max_length` tokens wide."""
        tokens_BT, length_B = right_padded([example.tokens for example in examples], pad_id, width=max_length)
        mask_BT = np.zeros(tokens_BT.shape, np.float32)
        for b, example in enumerate(examples):
            mask_BT[b, : length_B[b]] = example.learned
        return SFTBatch(tokens_BT, length_B, mask_BT, [example.text for example in examples], data_state)


class SFTStream(BatchStream[Example]):
    """An endless, exactly resumable stream of `SFTBatch`.

    Attributes:
      steps_per_epoch: number of batches that together have as many examples as there are records, at least 1.
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
          data: settings of the records: an embedded task, or a file. Each record of a file has one of three forms.
            'messages' is a conversation, rendered by the model's chat template with the schemas in 'tools', if any;
            every turn of the assistant is learned, unless its 'weight' is 0. 'prompt' and 'completion' are texts, used
            as they are, or turns; the completion is learned. data.question_field and data.answer_field are a question
            and its answer; the answer is learned in one of the forms of `forms`. If all records of a file have
            data.answer_field, the questions that an evaluation uses are left out.
          config: settings of the examples.
          tokenizer: tokenizer of the model that learns.
          shard_index: index of the part of each batch that this process keeps, from 0.
          shard_count: number of parts of a batch; must divide sft.batch_size.

        Raises:
          ValueError: the data cannot be read, a record has none of the three forms, or a batch does not split.
        """
        if config.batch_size % shard_count:
            raise ValueError(
                f"sft.batch_size={config.batch_size} does not split over {shard_count} processes: it must be a "
                "multiple of their number."
            )
        assert 0 <= shard_index < shard_count, (shard_index, shard_count)
        limit = Limit(config.max_length, "sft.max_length", data.long_prompts)
        source, parts = open_answers(data, check_form)
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
    """Makes an example of a record; the record's position in the stream decides in which of the `forms` it is."""

    def __init__(self, data: DataConfig, config: SFTConfig, tokenizer: Tokenizer, limit: Limit) -> None:
        self._data, self._config, self._tokenizer, self._limit = data, config, tokenizer, limit
        self._render = pipeline.Renderer(data, tokenizer)

    def __call__(self, index: int, record: Record | Problem) -> Example | TooLong:
        if isinstance(record, Mapping) and record.get("messages") is not None:
            return answers.turns(record["messages"], self._tokenizer, self._limit, tools=record.get("tools"))
        if isinstance(record, Mapping) and record.get("completion") is not None:
            return answers.of_record(record, ("completion",), self._render, self._tokenizer, self._limit)[0]
        prompt, fields = self._render(record)
        # The 2 keeps these draws apart from the draws that write the problem: there ProblemGenerator uses 0 and 1.
        draw = RandomDraws(self._data.seed, 2, index)
        tagged = index < self._config.full_steps * self._config.batch_size
        tagged = tagged or draw.share() < self._config.tagged_share
        reference, plain = forms(record, fields, draw)
        parts = reference if tagged else plain
        if isinstance(record, Mapping) and self._render.in_turns:
            message = {"role": "assistant", "content": "".join(part.text for part in parts)}
            return answers.turns([*self._render.turns(record), message], self._tokenizer, self._limit)
        return encode([prompt, *parts], self._tokenizer, self._limit)


def forms(
    record: Record | Problem, fields: Mapping[str, str], draw: RandomDraws
) -> tuple[list[TextPart], list[TextPart]]:
    """Writes a record's answer in two forms: (the reference form, a form that a base model might write).

    The reference form is reasoning and answer, each in its tags; for 'sums' it is a call of the calculator, for 'facts'
    a search with a cited answer.
    """
    if isinstance(record, Sum):
        return record.called(), record.guessed(draw)
    if isinstance(record, Fact):
        return record.cited(draw), record.half_known(draw)
    # If several answers are right, the first is learned. 'solution' may be a field of the record's own, of any type.
    answer, *_ = plain.references(fields["answer"])
    solution = fields["solution"] if isinstance(fields["solution"], str) and fields["solution"].strip() else answer
    words = {"reasoning": plain_solution(solution), "answer": answer}
    return [turn(template.completion(**words))], [turn(draw.one(STYLES).format(**words))]


def plain_solution(solution: str) -> str:
    """Extracts the reasoning of a GSM8K solution, without the answer's line and the calculator's marks."""
    before, _, after = solution.rpartition("\n####")
    marked = before and "\n" not in after.strip()  # if more lines follow, '####' begins a heading of Markdown
    return _CALCULATION.sub("", before if marked else solution)


def check_form(record: Record, place: str, data: DataConfig) -> None:
    """Refuses a record that has none of the three forms of an example.

    Raises:
      ValueError: a field is missing or wrong; the message says which, and begins with `place`, the file and line.
    """
    if record.get("messages") is not None:
        fault = shape.turns_fault(record["messages"], tools=record.get("tools"))
        some = not fault and any(map(shape.is_learned, record["messages"]))
        fault = fault or (
            "" if some else "it has no turn of the assistant, or every turn of the assistant has weight 0"
        )
    elif record.get("completion") is not None:
        fault = answers.check(record, ("completion",), data)
    else:
        asked = {"prompt": "completion", data.question_field: data.answer_field}
        lacking = [name for asks, name in asked.items() if record.get(asks) is not None and record.get(name) is None]
        none = answers.lacks(record, lacking[0], data) if lacking else "the record has none of these"
        fault = "" if _solved(record, place, data) else none
    if fault:
        raise ValueError(
            f"{place} has {', '.join(record) or 'no fields'}: an example needs 'messages' (a list of "
            "{'role', 'content'} with an assistant's turn), or 'prompt' and 'completion' (texts or turns), or "
            f"{data.question_field!r} and {data.answer_field!r}; {fault}."
        )


def open_answers(data: DataConfig, check_form: Form) -> tuple[Any, Sequence[mixture.OpenedSource]]:
    """Opens records for learning answers, without the questions that an evaluation uses.

    Args:
      data: settings of the records.
      check_form: function (record, place of the record, settings of the source) that raises ValueError if a record of a
        file lacks a field that an example needs.

    Returns:
      (the records as a stream takes them, their sources).

    Raises:
      ValueError: the data cannot be read, or `check_form` refuses a record.
    """
    opened = split(data, check_form)
    return opened.train, opened.parts


def by_part(writers: Sequence[Callable[[int, Any], Any]]) -> Callable[[int, Any], Any]:
    """Makes the function that prepares each record by the writer of its source; `writers` are in the sources' order."""
    if len(writers) == 1:
        return writers[0]
    return lambda index, item: writers[item.part](index, item.record)


def _solved(record: Record, place: str, data: DataConfig) -> bool:
    """Returns True if a record holds a question and its answer."""
    return shape.is_text(record.get(data.question_field)) and shape.answers(record, place, data.answer_field)


def _turns(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> list[TextPart]:
    """Renders a conversation as parts; the assistant's turns are learned."""
    return conversation.parts(tokenizer, messages)
