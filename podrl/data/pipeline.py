"""Turns records into batches of prompts: order, length limit, resumable position, held-out records."""

import array
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from podrl.config import Count, Range, Seed, section
from podrl.data import problems, sources, sums, template
from podrl.data.generated import Generator, Problem
from podrl.data.sources import Record
from podrl.data.stream import Batches, Limit, Stream, TooLong
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.types import Prompts

PROBLEMS = "problems"
# The tasks that come with podrl, by the names that data.path has for them.
EMBEDDED: Mapping[str, Generator[Any]] = {PROBLEMS: problems.GENERATOR, "sums": sums.GENERATOR}
AUTO = "auto"


@section("data")
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of the source of prompts: file or generator, template, order.

    Attributes:
      path: an embedded task, 'problems' or 'sums', or a file (see podrl.data.sources.read).
      eval_path: a file of held-out records; '' holds out a part of `path`.
      eval_fraction: share of the questions of `path` that is held out where `eval_path` is ''. An embedded task
        always holds out its own tenth.
      question_field: the record's field with the question.
      answer_field: the record's field with the answer; of a GSM8K solution, what follows '####'.
      system_prompt: instructions before the question; 'auto' is the reference text, and none for an embedded task.
      template: 'chat' for the model's own turns, 'plain' for a model without a chat template.
      seed: of the shuffling, and of an embedded task's problems.
      shuffle: new order every epoch; False keeps the order of the file.
      long_prompts: what happens to a prompt longer than rollout.max_prompt_length: 'skip' (counted) or 'error'.
      size: problems of an embedded task in an epoch.
    """

    path: str = PROBLEMS
    eval_path: str = ""
    eval_fraction: Annotated[float, Range("[0, 1)")] = 0.05
    question_field: str = "question"
    answer_field: str = "answer"
    system_prompt: str = AUTO
    template: Literal["chat", "plain"] = "chat"
    seed: Seed = 42
    shuffle: bool = True
    long_prompts: Literal["skip", "error"] = "skip"
    size: Count = 1_000_000

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"data.path is '': name a file of records, or an embedded task: {' or '.join(EMBEDDED)}.")


class _Task(NamedTuple):
    """A record ready for use: the prompt as text and ids, and the fields for its rewards."""

    text: str
    tokens: Sequence[int]
    fields: Mapping[str, Any]


class PromptStream(Batches[_Task]):
    """An endless, exactly resumable stream of `Prompts`, the same whatever the number of processes.

    Every process walks the whole stream and keeps its rows of each batch, so what is skipped, and where a batch ends,
    never depends on how many there are.

    Attributes:
      prompts_per_step: P of the whole job.
      steps_per_epoch: batches that use as many prompts as there are records.
    """

    def __init__(
        self,
        source: sources.Source,
        render: Callable[[Any], tuple[str, Mapping[str, Any]]],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        shuffle_seed: int | None = 42,
        long_prompts: Literal["skip", "error"] = "skip",
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> None:
        """Starts at the first prompt.

        Args:
          source: records by index.
          render: prompt text and reward fields of a record.
          tokenizer: of the model that answers.
          prompts_per_step: P over all shards.
          max_prompt_length: tokens; the width of every batch.
          shuffle_seed: None keeps the source's order.
          long_prompts: 'skip' or 'error'.
          shard_index: which part of each batch this process keeps.
          shard_count: number of parts; must divide P.

        Raises:
          ValueError: an empty source, or P that does not split into the shards.
        """
        if prompts_per_step < 1 or prompts_per_step % shard_count:
            raise ValueError(
                f"{prompts_per_step} prompts do not split over {shard_count} rollout processes: "
                "rollout.prompts_per_step must be a positive multiple of their number."
            )
        assert 0 <= shard_index < shard_count, (shard_index, shard_count)
        limit = Limit(max_prompt_length, "rollout.max_prompt_length", long_prompts)

        def prepare(index: int, record: Any) -> _Task | TooLong:
            return _tokenise(*render(record), tokenizer, limit)

        tasks = Stream(source, prepare, shuffle_seed, limit, tools=tokenizer.tools_digest)
        super().__init__(tasks)
        self.prompts_per_step = prompts_per_step
        self.steps_per_epoch = max(1, len(source) // prompts_per_step)
        self._width, self._pad_id = max_prompt_length, tokenizer.pad_id
        self._shard_index, self._shard_count = shard_index, shard_count

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> "PromptStream":
        """Builds the training stream of a configuration; see the constructor and `DataConfig`."""
        train, _ = split(config)
        return cls(
            train,
            Renderer(config, tokenizer),
            tokenizer,
            prompts_per_step=prompts_per_step,
            max_prompt_length=max_prompt_length,
            shuffle_seed=config.seed if config.shuffle else None,
            long_prompts=config.long_prompts,
            shard_index=shard_index,
            shard_count=shard_count,
        )

    @classmethod
    def from_list(
        cls,
        prompts: Iterable[str | Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        shuffle_seed: int | None = None,
    ) -> "PromptStream":
        """Builds a stream over prompts given as texts, used as they are, or as mappings with 'prompt' and other fields.

        Raises:
          ValueError: a mapping without 'prompt', or an item that is neither; names its position.
        """
        records = [_listed(item, i) for i, item in enumerate(prompts)]
        return cls(
            sources.Records("the list of prompts", records),
            lambda record: (record["prompt"], {k: v for k, v in record.items() if k != "prompt"}),
            tokenizer,
            prompts_per_step=prompts_per_step,
            max_prompt_length=max_prompt_length,
            shuffle_seed=shuffle_seed,
            long_prompts="error",
        )

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompts:
        """Returns the next batch (this shard's P / shard_count rows of it), every row `max_prompt_length` wide.

        Raises:
          ValueError: a prompt is too long under 'error', or all of them are under 'skip'.
        """
        start = self._stream.emitted
        tasks = self._stream.take(self.prompts_per_step)
        rows = self.prompts_per_step // self._shard_count
        first = self._shard_index * rows
        return _batch(tasks[first : first + rows], start + first, self._width, self._pad_id, self.state())


def held_out_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, count: int, max_prompt_length: int, batch_size: int | None = None
) -> list[Prompts]:
    """Makes the fixed evaluation set, whose questions the same configuration's training stream never has.

    Args:
      config: see `DataConfig`.
      tokenizer: of the model that answers.
      count: prompts wanted; fewer where the data holds fewer.
      max_prompt_length: tokens; longer prompts are left out, or an error, as `config.long_prompts` says.
      batch_size: prompts in each batch (the last may hold fewer); None for one batch of all.

    Returns:
      Batches whose `index_P` counts through the whole set and whose `data_state` is empty.
    """
    if not count:
        return []
    if config.path in EMBEDDED and not config.eval_path:
        records: Iterable[Any] = EMBEDDED[config.path].distinct("held_out", count, config.seed)
    else:
        held = split(config)[1]
        records = (held[i] for i in range(len(held)))
    render = Renderer(config, tokenizer)
    limit = Limit(max_prompt_length, "rollout.max_prompt_length", config.long_prompts)
    tasks = (_tokenise(*render(record), tokenizer, limit) for record in records)
    fitting = (task for task in tasks if not isinstance(task, TooLong))
    chosen = list(itertools.islice(fitting, count))
    size = batch_size or max(1, len(chosen))
    return [
        _batch(chosen[i : i + size], i, max_prompt_length, tokenizer.pad_id, b"") for i in range(0, len(chosen), size)
    ]


def longest_prompt(config: DataConfig, tokenizer: Tokenizer, *, look: int = 8192) -> int:
    """Length of the longest of the first `look` training prompts, in tokens, rounded up to a multiple of 64."""
    train, render = split(config)[0], Renderer(config, tokenizer)
    lengths = (len(tokenizer.encode(render(train[i])[0])) for i in range(min(look, len(train))))
    return -(-max(lengths, default=1) // 64) * 64


def has_format(config: DataConfig) -> bool:
    """True where the task asks for the reference format: reasoning, then the answer, each in its tags."""
    if config.system_prompt not in ("", AUTO):
        return all(tag in config.system_prompt for tag in template.TAGS)
    return config.path not in EMBEDDED or EMBEDDED[config.path].reasoned


def system_prompt(config: DataConfig) -> str:
    """The instructions before every question; '' for none."""
    reference = "" if config.path in EMBEDDED else template.SYSTEM_PROMPT
    return reference if config.system_prompt == AUTO else config.system_prompt


class Renderer:
    """Renders a record's prompt text and reward fields by the configuration's template."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._system = system_prompt(config)
        names = [str(tool["function"]["name"]) for tool in tokenizer.tools]
        unnamed = tokenizer.unnamed_tools if config.template == "chat" else names
        if missing := [name for name in unnamed if name not in self._system]:
            raise ValueError(
                f"Prompts do not name the tools {', '.join(missing)}: data.template={config.template} of "
                f"{tokenizer.directory} passes tools over. Describe them in data.system_prompt or "
                "env.system_prompt_file, or choose an env.parser whose tags the model knows."
            )

    def __call__(self, record: Record | Problem) -> tuple[str, Mapping[str, Any]]:
        fields = task_fields(record, self._config)
        return self.prompt(fields["question"]), ({"system_prompt": self._system} if self._system else {}) | dict(fields)

    def prompt(self, question: str) -> str:
        """Renders the prompt text of a question."""
        return template.wrap(self._tokenizer, question, system=self._system, form=self._config.template)


def task_fields(record: Record | Problem, config: DataConfig) -> dict[str, Any]:
    """question, answer and solution under these names, and every other field of the record under its own."""
    if not isinstance(record, Mapping):
        return dict(record.fields)
    question, answer = str(record[config.question_field]).strip(), str(record[config.answer_field]).strip()
    others = {k: v for k, v in record.items() if k not in (config.question_field, config.answer_field)}
    final = template.gsm8k_answer(answer) if "####" in answer else answer
    return {"solution": answer, **others, "question": question, "answer": final}


def split(config: DataConfig) -> tuple[sources.Source, sources.Source]:
    """(training records, held-out records); files are read again only when they have changed."""
    files = [config.eval_path, "" if config.path in EMBEDDED else config.path]
    return _split(config, *map(sources.identity, files))


@functools.lru_cache(maxsize=2)
def _split(config: DataConfig, *identities: tuple[Any, ...]) -> tuple[sources.Source, sources.Source]:
    del identities
    required = (config.question_field, config.answer_field)
    evaluation = sources.read(config.eval_path, required) if config.eval_path else None
    if config.path in EMBEDDED:
        generator = EMBEDDED[config.path]
        train: Any = generator.source("train", config.size, config.seed)
        return train, evaluation or generator.source("held_out", config.size, config.seed)  # pyright: ignore[reportReturnType]
    if evaluation is not None:
        return sources.read(config.path, required), evaluation
    held = HeldOut(config)
    return held.divide(sources.read(config.path, required, held.check))


class HeldOut:
    """Chooses a file's held-out records: `config.eval_fraction` of its questions."""

    def __init__(self, config: DataConfig) -> None:
        self._field, self._fraction = config.question_field, config.eval_fraction
        self._held = array.array("b")

    def check(self, record: Record, place: str) -> None:
        """Records whether the next record is for training or held out."""
        del place
        self._held.append(_held_out(str(record.get(self._field)), self._fraction))

    def divide(self, records: sources.Source) -> tuple[sources.Source, sources.Source]:
        """Divides the noted records into (training, held-out)."""
        held = np.frombuffer(self._held, np.int8)
        if len(held) and held.all():
            raise ValueError(
                f"data.eval_fraction={self._fraction} holds out all {len(held)} records of data.path, so that none is "
                "left to train on: lower it, or give data.eval_path."
            )
        return _Subset(records, np.flatnonzero(held == 0)), _Subset(records, np.flatnonzero(held))


def _held_out(question: str, fraction: float) -> bool:
    """Decides by the question's hash, so that a repeated question is on one side only, whatever the file's order."""
    digest = hashlib.sha256(question.strip().encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


class _Subset(Sequence[Record]):
    """A part of a source's records, in the source's order."""

    def __init__(self, source: sources.Source, indices: np.ndarray) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._source[int(self._indices[index])]


def _listed(item: str | Mapping[str, Any], index: int) -> Mapping[str, Any]:
    record = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise ValueError(f"Prompt {index} is {str(item)[:80]!r}: it must be a text, or a mapping with a text 'prompt'.")
    return record


def _tokenise(text: str, fields: Mapping[str, Any], tokenizer: Tokenizer, limit: Limit) -> "_Task | TooLong":
    opened = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    tokens = tokenizer.encode(text, bos=not opened)
    return _Task(text, tokens, fields) if len(tokens) <= limit.tokens else limit.exceeded(text, len(tokens))


def _batch(tasks: Sequence[_Task], first_index: int, width: int, pad_id: int, state: bytes) -> Prompts:
    tokens_PT, length_P = right_padded([task.tokens for task in tasks], pad_id, width=width)
    names = dict.fromkeys(name for task in tasks for name in task.fields)
    return Prompts(
        tokens_PT=tokens_PT,
        length_P=length_P,
        index_P=np.arange(first_index, first_index + len(tasks), dtype=np.int64),
        text=[task.text for task in tasks],
        fields={name: [task.fields.get(name) for task in tasks] for name in names},
        data_state=state,
    )
