"""Supervised examples: which text follows a prompt, and which of its tokens the model is to learn."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from podrl.data import pipeline, problems, sources, template
from podrl.data.pipeline import PROBLEMS, DataConfig
from podrl.data.stream import Batches, Limit, Stream, TooLong
from podrl.data.tokenizer import Tokenizer

# What a base model writes instead of the reference form.
STYLES = (
    "{reasoning} The answer is {answer}.",
    "{reasoning}<answer>{answer}</answer>",
    "<reasoning>{reasoning}</reasoning> The answer is {answer}.",
    "<reasoning>{reasoning}</reasoning>{answer}",
    "<answer>{answer}</answer>",
    "The answer is {answer}.",
)
_CALCULATION = re.compile(r"<<.*?>>")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """What is learned from each example.

    Attributes:
      batch_size: examples per step.
      max_length: tokens of prompt and target; longer examples are left out, or an error, as data.long_prompts says.
      tagged_share: of the targets written by podrl (the embedded task, and files of questions and answers), the share
        that keeps the reference form; the others are written as a base model might.
      full_steps: first steps in which every target keeps the form, whatever `tagged_share` says.
    """

    batch_size: int = 64
    max_length: int = 96
    tagged_share: float = 1.0
    full_steps: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_length < 2:
            raise ValueError(
                f"sft.batch_size={self.batch_size} must be at least 1 and sft.max_length={self.max_length} at least 2."
            )
        if not 0 <= self.tagged_share <= 1 or self.full_steps < 0:
            raise ValueError(
                f"sft.tagged_share={self.tagged_share} must be between 0 and 1, sft.full_steps={self.full_steps} "
                "0 or more."
            )


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
    def of(examples: Sequence["Example"], max_length: int, pad_id: int, data_state: bytes) -> "SFTBatch":
        """The batch of examples of at most `max_length` tokens."""
        tokens_BT = np.full((len(examples), max_length), pad_id, np.int32)
        mask_BT = np.zeros(tokens_BT.shape, np.float32)
        for b, example in enumerate(examples):
            tokens_BT[b, : len(example.tokens)] = example.tokens
            mask_BT[b, : len(example.tokens)] = example.learned
        length_B = np.array([len(example.tokens) for example in examples], np.int32)
        return SFTBatch(tokens_BT, length_B, mask_BT, [example.text for example in examples], data_state)


class Example(NamedTuple):
    """A text, its tokens, and 1 for each of them that is learned."""

    text: str
    tokens: Sequence[int]
    learned: Sequence[int]


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
          data: where records come from. 'problems' is the embedded task. A file holds, in each record, 'messages' (a
            chat; every assistant turn is learned), or 'prompt' and 'completion' (used as they are), or the fields
            data.question_field and data.answer_field, written in the reference form; of such a file, the questions
            that an evaluation uses are left out.
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
        source = given_answers(data, _with_form)
        writer = _Writer(data, config, tokenizer, limit)
        super().__init__(Stream(source, writer, data.seed if data.shuffle else None, limit))
        self.steps_per_epoch = max(1, len(source) // config.batch_size)
        self._config, self._pad_id = config, tokenizer.pad_id
        rows = config.batch_size // shard_count
        self._rows = slice(shard_index * rows, (shard_index + 1) * rows)

    def __iter__(self) -> "SFTStream":
        return self

    def __next__(self) -> SFTBatch:
        examples = self._stream.take(self._config.batch_size)[self._rows]
        return SFTBatch.of(examples, self._config.max_length, self._pad_id, self.state())


class _Writer:
    """Makes an example of a record and its position in the stream."""

    def __init__(self, data: DataConfig, config: SFTConfig, tokenizer: Tokenizer, limit: Limit) -> None:
        self._data, self._config, self._tokenizer, self._limit = data, config, tokenizer, limit
        self._render = pipeline.Renderer(data, tokenizer)

    def __call__(self, index: int, record: Any) -> Example | TooLong:
        if isinstance(record, Mapping) and "messages" in record:
            parts = _turns(record["messages"], self._tokenizer)
        elif isinstance(record, Mapping) and "completion" in record:
            parts = [(record["prompt"], False), (record["completion"], True)]
        else:
            prompt, fields = self._render(record)
            reasoning = plain_solution(fields["solution"])
            parts = [(prompt, False), (self._style(index).format(reasoning=reasoning, answer=fields["answer"]), True)]
        return encode(parts, self._tokenizer, self._limit)

    def _style(self, index: int) -> str:
        reference = template.completion("{reasoning}", "{answer}")
        if index < self._config.full_steps * self._config.batch_size:
            return reference
        draw = np.random.PCG64(np.random.SeedSequence([self._data.seed, 2, index]))
        if draw.random_raw() / 2.0**64 < self._config.tagged_share:
            return reference
        return STYLES[draw.random_raw() % len(STYLES)]


def encode(parts: Sequence[tuple[str, bool]], tokenizer: Tokenizer, limit: Limit) -> Example | TooLong:
    """Parts of (text, whether it is learned) as one example; the end of a learned part is the model's end mark."""
    tokens, learned = [], []
    for i, (text, target) in enumerate(parts):
        opens = not i and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        ids = tokenizer.encode(text, bos=opens)
        ids = [*ids, tokenizer.turn_end_id] if target else ids
        tokens += ids
        learned += [int(target)] * len(ids)
    text = "".join(text for text, _ in parts)
    if len(tokens) > limit.tokens:
        return limit.exceeded(text, len(tokens))
    return Example(text, tokens, learned)


def plain_solution(solution: str) -> str:
    """The reasoning of a solution in GSM8K's form: without the answer's line and the calculator's marks."""
    return _CALCULATION.sub("", solution.rpartition("\n####")[0] or solution)


def _with_form(records: sources.Records, data: DataConfig) -> sources.Records:
    """The records, once each is known to hold one of the three forms.

    Raises:
      ValueError: a record in none of them; names file and line.
    """
    for i in range(len(records)):
        record = records[i]
        chat = record.get("messages")
        pair = all(isinstance(record.get(name), str) for name in ("prompt", "completion"))
        if isinstance(chat, list) and any(_is_assistant(turn) for turn in chat) and all(map(_is_turn, chat)):
            continue
        if chat is not None or not (pair or _solved(record, data)):
            raise ValueError(
                f"{records.place(i)} has {', '.join(record) or 'no fields'}: an example needs 'messages' (a list of "
                "{'role', 'content'} with an assistant's turn), or the texts 'prompt' and 'completion', or "
                f"{data.question_field!r} and {data.answer_field!r}."
            )
    return records


def given_answers(data: DataConfig, with_form: Callable[[sources.Records, DataConfig], sources.Records]) -> Any:
    """The records to learn answers from: of a file, without the questions that an evaluation uses.

    Args:
      data: where they come from.
      with_form: gives a file's records back, once each is known to hold what is needed.

    Raises:
      ValueError: bad data.
    """
    if data.path == PROBLEMS:
        return problems.Problems("train", data.size, data.seed)
    records = with_form(sources.read(data.path), data)
    if data.eval_path or not all(_solved(records[i], data) for i in range(len(records))):
        return records
    return pipeline.by_question(records, data)[0]


def _solved(record: sources.Record, data: DataConfig) -> bool:
    """Whether a record holds a question and its answer."""
    return all(str(record.get(name) or "").strip() for name in (data.question_field, data.answer_field))


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _is_assistant(turn: Any) -> bool:
    return _is_turn(turn) and turn["role"] == "assistant"


def _turns(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A chat as parts: what stands between the assistant's turns, and the turns themselves without end mark."""
    parts: list[tuple[str, bool]] = []
    shown = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
        if not before.startswith(shown):
            raise ValueError(
                f"The chat template writes turns before {i} differently once {i} follows: such a chat cannot be "
                "learned turn by turn; give 'prompt' and 'completion' instead."
            )
        target = message["content"].strip()
        parts += [(before[len(shown) :], False), (target, True)]
        after = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
        # The turn with its end mark, which `encode` writes; what follows the mark belongs to the next part.
        end = after.find(target, len(before)) + len(target)
        mark = tokenizer.token_text(tokenizer.turn_end_id)
        shown = after[: end + len(mark)] if after[end:].startswith(mark) else after[:end]
    return parts
