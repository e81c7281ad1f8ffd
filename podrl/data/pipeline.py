"""Turns records into batches of prompts: their order, length limit and resumable position, and held-out prompts."""

import contextlib
import importlib.metadata
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from podrl.config import named
from podrl.data import conversation, shape, sources, template
from podrl.data.cache import Cache, key
from podrl.data.config import AUTO, EMBEDDED, REASONING, DataConfig, is_generated
from podrl.data.curriculum import ChosenStream
from podrl.data.hint import TEACHER_PROMPT, with_hint
from podrl.data.mixture import OpenedSource, interleaved, keyed_paths, reasoning_gym, report_repeats, split
from podrl.data.pools import Curriculum, CurriculumConfig
from podrl.data.problem_generator import Problem
from podrl.data.stream import BatchStream, Limit, Mixture, Stream, TooLong
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.mappings import Record, TaskFields
from podrl.types import Prompts

_log = logging.getLogger("podrl.data")
_OUTLIER = 4  # the longest prompt is reported if it exceeds this many times the 99th percentile of lengths


class _Task(NamedTuple):
    """A record ready for use: its prompt as text and as token ids, and the fields that reward functions read."""

    text: str
    tokens: Sequence[int]
    fields: TaskFields


class PromptStream(BatchStream[_Task]):
    """An endless, exactly resumable stream of `Prompts`, the same for any number of processes.

    Every process that reads the stream gets whole batches. So the number of processes changes neither which prompts are
    skipped nor where a batch ends.

    Attributes:
      prompts_per_step: number P of prompts in a step of the whole job.
      steps_per_epoch: number of records divided by `prompts_per_step`, rounded down; at least 1.
      curriculum: pass rates by which prompts are chosen; None if every prompt has its turn.
      unanswered: an entry for each file that has a record without an answer: (text that names the record and its
        fields, reward functions that only the file's source has, possibly none).
      groups: names of the groups that the records' field `group` may have.
      listed: records of a list, each as (text that names the record, its fields); empty for records of files.
    """

    groups: Sequence[str] = ()
    listed: Sequence[tuple[str, TaskFields]] = ()

    def __init__(
        self,
        source: sources.Source | Mixture,
        render: Callable[[Any], tuple[template.TextPart, TaskFields]],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        shuffle_seed: int | None = 42,
        long_prompts: Literal["skip", "error"] = "skip",
        unanswered: Sequence[tuple[str, Sequence[str]]] = (),
        curriculum: CurriculumConfig | None = None,
        hint_tokens: int = 0,
    ) -> None:
        """Starts at the first prompt.

        Args:
          source: records by index, or a mixture of such sources.
          render: function of a record, or of a `MixtureRecord` in a mixture, that returns its prompt and reward fields.
          tokenizer: tokenizer of the model that answers.
          prompts_per_step: number of prompts in a step of the whole job.
          max_prompt_length: largest number of tokens of a prompt; also the width of every batch.
          shuffle_seed: seed of the order; None keeps the source's order.
          long_prompts: treatment of a longer prompt: 'skip' leaves it out and counts it, 'error' raises an error.
          unanswered: value of the attribute `unanswered`.
          curriculum: settings of the choice of prompts by their pass rates. With None, or settings that decide
            nothing, every prompt has its turn.
          hint_tokens: number of tokens by which a teacher's prompt with its hint may exceed `max_prompt_length`.

        Raises:
          ValueError: the source is empty, or a step has no prompts.
        """
        if prompts_per_step < 1:
            raise ValueError(f"rollout.prompts_per_step={prompts_per_step} must be at least 1.")
        limit = Limit(max_prompt_length, "rollout.max_prompt_length", long_prompts)
        both = "rollout.max_prompt_length + grpo.teacher_hint_tokens"
        hint_limit = Limit(max_prompt_length + hint_tokens, both, long_prompts)

        def prepare(index: int, record: Any) -> _Task | TooLong:
            prompt, fields = render(record)
            hinted = fields.get(TEACHER_PROMPT, ())
            if len(hinted) > hint_limit.tokens:
                return hint_limit.exceeded(prompt.text, len(hinted))
            return _tokenise(prompt, fields, tokenizer, limit)

        order = (source, prepare, shuffle_seed, limit)
        tasks: Stream[_Task] = Stream(*order, tools=tokenizer.tools_digest)
        self.curriculum = None
        if curriculum is not None and curriculum.used:
            self.curriculum = Curriculum(curriculum, tasks.records)
            tasks = ChosenStream(*order, curriculum=self.curriculum, tools=tokenizer.tools_digest)
        super().__init__(tasks)
        self.prompts_per_step, self.unanswered = prompts_per_step, unanswered
        self.steps_per_epoch = max(1, tasks.records // prompts_per_step)
        self._width, self._pad_id = max_prompt_length, tokenizer.pad_id

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        hint_tokens: int = 0,
        teachers: Mapping[str, Tokenizer] | None = None,
    ) -> "PromptStream":
        """Builds the training stream of a configuration, with the prompts that teachers read.

        Args:
          config: settings of the data.
          tokenizer: tokenizer of the model that answers.
          prompts_per_step: number of prompts in a step of the whole job.
          max_prompt_length: largest number of tokens of a prompt.
          hint_tokens: number of tokens by which a teacher's prompt may exceed `max_prompt_length`.
          teachers: tokenizers of teachers, as in `renderer`.

        Raises:
          ValueError: a record or a setting is not allowed.
        """
        opened = split(config)
        stream = cls(
            opened.train,
            renderer(config, tokenizer, teachers or {}),
            tokenizer,
            prompts_per_step=prompts_per_step,
            max_prompt_length=max_prompt_length,
            shuffle_seed=config.seed if config.shuffle else None,
            long_prompts=config.long_prompts,
            unanswered=opened.unanswered,
            curriculum=config.curriculum,
            hint_tokens=hint_tokens,
        )
        stream.groups = config.groups
        return stream

    @classmethod
    def from_list(
        cls,
        prompts: Iterable[str | Record],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        max_prompt_length: int,
        shuffle_seed: int | None = None,
        system: str = "",
        held_out: Iterable[str | Record] = (),
    ) -> "PromptStream":
        """Builds a stream over a list of prompts: texts, which are used as they are, or records (podrl.data.shape).

        A question becomes a turn of the chat template if the model has one, after the instructions `system`. Reward
        functions read the record's fields as they are, and its question as `question`. A prompt that is too long is an
        error. Prompts that ask a question of the list `held_out` are left out, and counted in a warning. The other
        arguments are those of the constructor.

        Raises:
          ValueError: an item asks nothing; the message names its position. Or all prompts ask held-out questions.
        """
        asked = {shape.same_question(_listed(item, f"Held-out prompt {i}")) for i, item in enumerate(held_out)}
        every = {f"Prompt {i}": _listed(item, f"Prompt {i}") for i, item in enumerate(prompts)}
        placed = {place: record for place, record in every.items() if shape.same_question(record) not in asked}
        report_repeats(len(every) - len(placed), len(every), "train_ds", "eval_ds", left=len(placed))
        lacks = [place for place, record in placed.items() if not shape.answers(record, place)]
        form = "chat" if tokenizer.has_chat_template else "plain"

        def fields(record: Record) -> TaskFields:
            others = {key: value for key, value in record.items() if key != shape.prompt_field(record)}
            return {shape.QUESTION: shape.question(record), **others}

        def render(record: Record) -> tuple[template.TextPart, TaskFields]:
            return conversation.prompt(record, tokenizer, system=system, form=form), fields(record)

        stream = cls(
            sources.Records("the list of prompts", list(placed.values())),
            render,
            tokenizer,
            prompts_per_step=prompts_per_step,
            max_prompt_length=max_prompt_length,
            shuffle_seed=shuffle_seed,
            long_prompts="error",
            unanswered=[(f"{lacks[0]} lacks 'answer'", ())] if lacks else [],
        )
        stream.listed = [(place, fields(record)) for place, record in placed.items()]
        return stream

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompts:
        """Returns the next batch, every row `max_prompt_length` tokens wide.

        Raises:
          ValueError: long_prompts is 'error' and a prompt is too long; or it is 'skip', and all prompts or 10,000
            prompts in a row are too long.
        """
        start = self._stream.emitted
        tasks = self._stream.take(self.prompts_per_step)
        return _batch(tasks, start, self._width, self._pad_id, self.state())


def held_out_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, count: int, max_prompt_length: int, batch_size: int | None = None
) -> list[Prompts]:
    """Makes the fixed evaluation set; the training stream of the same configuration never asks these questions.

    Args:
      config: settings of the data.
      tokenizer: tokenizer of the model that answers.
      count: number of prompts; the result has fewer prompts if fewer are held out.
      max_prompt_length: largest number of tokens of a prompt; `config.long_prompts` says whether longer prompts are
        left out or are an error.
      batch_size: number of prompts in each batch (the last may hold fewer); None puts all prompts into one batch.

    Returns:
      Batches whose `index_P` counts through the whole set, from 0, and whose `data_state` is empty.

    Raises:
      ValueError: a record or a setting is not allowed.
    """
    if not count:
        return []
    opened = split(config)
    rendered: Iterator[tuple[template.TextPart, TaskFields]]
    if opened.evaluation is not None:
        rendered = sources.make_all(opened.evaluation, Renderer(config, tokenizer))
    else:
        streams = [sources.make_all(_held_out(part, count), PartRenderer(part, tokenizer)) for part in opened.parts]
        rendered = interleaved(streams)
    return _fixed(rendered, config, tokenizer, count, max_prompt_length, batch_size)


def set_prompts(config: DataConfig, tokenizer: Tokenizer, *, count: int, max_prompt_length: int) -> list[Prompts]:
    """Makes one batch of the first `count` prompts that are not too long, from a configuration's only source.

    The prompts of a generated task are held-out problems. The list is empty if no prompt is short enough.
    """
    (part,) = split(config, key="eval.sets").parts
    records = _held_out(part, count) if is_generated(part.config.path) else part.train
    return _fixed(
        sources.make_all(records, PartRenderer(part, tokenizer)), config, tokenizer, count, max_prompt_length, None
    )


def _fixed(
    rendered: Iterator[tuple[template.TextPart, TaskFields]],
    config: DataConfig,
    tokenizer: Tokenizer,
    count: int,
    max_prompt_length: int,
    batch_size: int | None,
) -> list[Prompts]:
    """Makes batches of the first `count` prompts that are not too long."""
    limit = Limit(max_prompt_length, "rollout.max_prompt_length", config.long_prompts)
    tasks = (_tokenise(*prompt, tokenizer, limit) for prompt in rendered)
    fitting = (task for task in tasks if not isinstance(task, TooLong))
    chosen = list(itertools.islice(fitting, count))
    size = batch_size or max(1, len(chosen))
    return [
        _batch(chosen[i : i + size], i, max_prompt_length, tokenizer.pad_id, b"") for i in range(0, len(chosen), size)
    ]


def longest_prompt(config: DataConfig, tokenizer: Tokenizer, *, look: int = 8192) -> int:
    """Finds the length of the longest of the first `look` training prompts, in tokens, rounded up to a multiple of 64.

    Warns if this prompt is far longer than the other prompts. The data cache (`config.cache`) keeps the result, because
    rendering thousands of prompts delays a start.
    """
    cache = Cache(config.cache)
    name = _key_of_longest(config, tokenizer, look, cache)
    if name and (stored := cache.load(name)) is not None:
        found = _Longest(int(stored["tokens"]), int(stored["usual"]), str(stored["text"]))
    else:
        found = _longest(config, tokenizer, look)
        if name:
            with contextlib.suppress(OSError):  # if the cache cannot be written, only time is lost
                cache.store(name, {field: np.asarray(value) for field, value in found._asdict().items()})
    if found.tokens > _OUTLIER * found.usual:
        _log.warning(
            "The longest prompt has %d tokens (rounded up); 99 of 100 have at most %d. It begins %r. Buffers have room "
            "for the longest: --config.rollout.max_prompt_length=%d leaves longer prompts out and counts them, "
            "unless data.long_prompts is 'error'.",
            *(found.tokens, found.usual, found.text, found.usual),
        )
    return found.tokens


class _Longest(NamedTuple):
    """The longest prompt: its tokens (rounded up), the number that 99 of 100 prompts do not exceed (rounded up), and
    the beginning of its question."""

    tokens: int
    usual: int
    text: str


def _key_of_longest(config: DataConfig, tokenizer: Tokenizer, look: int, cache: Cache) -> str:
    """Computes the cache key of everything that the longest prompt depends on.

    Returns '' if the prompts depend on something without a checksum: a user's transform, or a data set of TFDS.
    """
    if any(source.transforms for source in config.sources):
        return ""
    paths = keyed_paths(config)
    if any(path.startswith("tfds:") for _, path, _ in paths):
        return ""
    files = []
    for of_file, path, part in paths:
        with named(of_file, path):
            files += sources.files(sources.of_split(path, part))
    files += [tokenizer.directory / file for file in (*tokenizer.files, "config.json")]
    gym = ("reasoning_gym",) if any(single.path.startswith(REASONING) for single in config.singles()) else ()
    versions = [importlib.metadata.version(package) for package in ("tokenizers", "jinja2", *gym)]
    contents = [cache.content(file) for file in files if file.exists()]
    return key("longest prompts", look, repr(config), tokenizer.tools_digest, versions, contents)


def _longest(config: DataConfig, tokenizer: Tokenizer, look: int) -> _Longest:
    lengths: list[int] = []
    longest, text = 1, ""
    for part in (opened := split(config)).parts:
        rendered = sources.make_all(part.train, Renderer(part.config, tokenizer))
        for prompt, fields in itertools.islice(rendered, -(-look // len(opened.parts))):
            length = len(_tokens_of(prompt, tokenizer))
            if length > longest:
                said = [value for value in fields.values() if isinstance(value, str) and value in prompt.text]
                longest, text = length, max(said, key=len, default=prompt.text)[:80]
            lengths.append(length)
    usual = int(np.quantile(lengths or [1], 0.99, method="lower"))
    return _Longest(-(-longest // 64) * 64, -(-usual // 64) * 64, text)


def _held_out(part: OpenedSource, count: int) -> Any:
    """Returns a source's held-out records; for a generated task, `count` different held-out problems."""
    if part.config.path.startswith(REASONING):
        return list(reasoning_gym(part.config).distinct(count))
    if part.config.path in EMBEDDED:
        return EMBEDDED[part.config.path].distinct("held_out", count, part.config.seed)
    return part.held_out


def has_format(config: DataConfig) -> bool:
    """True if the task asks for the reference format: reasoning, then the answer, each in its tags."""
    if config.sources:
        return all(map(has_format, config.singles()))
    if config.system_prompt not in ("", AUTO):
        return all(tag in config.system_prompt for tag in template.TAGS)
    return config.path not in EMBEDDED or EMBEDDED[config.path].reasoned


def system_prompt(config: DataConfig) -> str:
    """Returns the instructions before every question; '' for none, and for 'auto' that no reward function replaced."""
    return "" if config.system_prompt == AUTO else config.system_prompt


def renderer(
    config: DataConfig, tokenizer: Tokenizer, teachers: Mapping[str, Tokenizer]
) -> Callable[[Any], tuple[template.TextPart, TaskFields]]:
    """Makes the function that renders the items of a configuration's training stream: (prompt, reward fields).

    An item is a record, or a `MixtureRecord` of a mixture.

    Args:
      config: settings of the data.
      tokenizer: tokenizer of the policy.
      teachers: tokenizers of the teachers that do not share the policy's tokenizer, by the label of the source that the
        teacher reads; the key '' stands for all other sources.
    """
    if not config.sources:
        return Renderer(config, tokenizer, reader=teachers.get("") or (tokenizer if config.hint else None))

    def reader(part: OpenedSource) -> Tokenizer | None:
        return teachers.get(part.name) or teachers.get("") or (tokenizer if part.config.hint else None)

    renders = [PartRenderer(part, tokenizer, reader=reader(part)) for part in split(config).parts]
    return (lambda item: renders[item.part](item.record)) if len(renders) > 1 else renders[0]


class PartRenderer:
    """Renders the records of one source of a mixture, and adds the fields of the source's settings."""

    def __init__(self, part: OpenedSource, tokenizer: Tokenizer, *, reader: Tokenizer | None = None) -> None:
        self._render, self._fields = Renderer(part.config, tokenizer, reader=reader), part.fields

    def __call__(self, record: Record | Problem) -> tuple[template.TextPart, TaskFields]:
        prompt, fields = self._render(record)
        return prompt, {**fields, **self._fields}


class Renderer:
    """Renders a record's prompt text and reward fields by the configuration's template.

    `reader` is the tokenizer of a teacher, or None. With a reader, the fields also hold the token ids of the teacher's
    prompt. The teacher's prompt has the configuration's hint, if there is one.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, reader: Tokenizer | None = None) -> None:
        self._config, self._tokenizer, self._reader = config, tokenizer, reader
        self._system = system_prompt(config)
        names = [str(tool["function"]["name"]) for tool in tokenizer.tools]
        unnamed = tokenizer.unnamed_tools if config.template == "chat" else names
        if missing := [name for name in unnamed if name not in self._system]:
            raise ValueError(
                f"The prompts of data.template={config.template} in {tokenizer.directory} leave out the tools "
                f"{', '.join(missing)}. Describe them in data.system_prompt or "
                "env.system_prompt_file, or choose an env.parser whose tags the model knows."
            )

    def __call__(self, record: Record | Problem) -> tuple[template.TextPart, TaskFields]:
        fields = task_fields(record, self._config)
        question = record if isinstance(record, Mapping) else fields
        if self._reader is not None:
            hint = self._config.hint
            prompt = with_hint(question, fields, hint, self._field_of(question)) if hint else question
            fields = {**fields, TEACHER_PROMPT: _tokens_of(self.prompt(prompt, self._reader), self._reader)}
        return self.prompt(question), ({"system_prompt": self._system} if self._system else {}) | dict(fields)

    def _field_of(self, record: Record) -> str:
        return self._config.question_field if self._config.question_field in record else shape.QUESTION

    def prompt(self, record: Record, tokenizer: Tokenizer | None = None) -> template.TextPart:
        """Renders a record's prompt by the chat template of `tokenizer`; None stands for the policy's tokenizer."""
        return conversation.prompt(
            record,
            tokenizer or self._tokenizer,
            system=self._system,
            form=self._config.template,
            question_field=self._field_of(record),
        )

    @property
    def in_turns(self) -> bool:
        """True if a question is rendered as a turn of the chat template."""
        return self._config.template == "chat"

    def turns(self, record: Record) -> list[dict[str, str]]:
        """Writes a record's question as the turns of a conversation: one user's turn, with the instructions."""
        question = shape.question(record, self._field_of(record))
        return [{"role": "user", "content": template.user_turn(question, self._system)}]


def task_fields(record: Record | Problem, config: DataConfig) -> TaskFields:
    """Returns the fields of a record for reward functions, as podrl.data.shape.fields makes them."""
    if not isinstance(record, Mapping):
        return dict(record.fields)
    return shape.fields(record, config.question_field, config.answer_field)


def takes_system_prompt(record: Record | Problem, config: DataConfig) -> bool:
    """Returns True if the prompt is made from a question; conversations and prompts of text are used as they are."""
    if not isinstance(record, Mapping):
        return True
    name = shape.prompt_field(record, config.question_field)
    return not isinstance(record[name], list) and (name != "prompt" or config.question_field == "prompt")


def replaced_fields(record: Record | Problem, config: DataConfig) -> set[str]:
    """Names the fields of a record that reward functions do not get, because podrl gives their names other values."""
    if not isinstance(record, Mapping):
        return set()
    read, task = {shape.prompt_field(record, config.question_field), config.answer_field}, task_fields(record, config)
    own = {name for name in (shape.QUESTION, shape.ANSWER) if record.get(name) is not None}
    return {name for name in own - read if task[name] != record[name]}


def _listed(item: str | Record, place: str) -> Record:
    raw = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(raw, Mapping):
        raise ValueError(f"{place} is {item!r}: it must be a text, or a record with 'prompt' or 'question'.")
    record = shape.normal(raw)
    shape.check(record, place, remedy="rename that field")
    return record


def _tokens_of(prompt: template.TextPart, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(prompt.text, start=not prompt.rendered)


def _tokenise(prompt: template.TextPart, fields: TaskFields, tokenizer: Tokenizer, limit: Limit) -> "_Task | TooLong":
    tokens, text = _tokens_of(prompt, tokenizer), prompt.text
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
