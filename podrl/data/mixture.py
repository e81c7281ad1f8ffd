"""Opens the sources of a job's data: chooses the training and held-out records, and counts the dropped records."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from etils import epath

from podrl.config import named, plural
from podrl.data import shape, sources
from podrl.data.cache import Cache, key
from podrl.data.config import EMBEDDED, REASONING, DataConfig, SourceConfig, is_generated
from podrl.data.notes import Notes, Subset
from podrl.data.reasoning import ReasoningGym
from podrl.data.sources import Source
from podrl.data.stream import Mixture
from podrl.data.transforms import transformed
from podrl.mappings import Record, TaskFields
from podrl.types import SOURCE

_log = logging.getLogger(__name__)
# Files of at least this many bytes are cached: reading a smaller file is faster than finding it in the cache.
WORTH = 1 << 20

T = TypeVar("T")
Form = Callable[[Record, str, DataConfig], None]


@dataclasses.dataclass(frozen=True)
class OpenedSource:
    """An opened source: its records, split into training and held-out records.

    Attributes:
      name: name of the source; '' if the records come from data.path and not from data.sources.
      config: settings of a job that has this source only.
      train: records to train on.
      held_out: records held out.
      weight: share of the prompts that are drawn from this source, relative to the other sources' weights.
      unanswered: text that names the source's first record without an answer, and the record's fields; '' if all
        records have answers.
      counts: number of the source's records, by their use: 'used', 'held out', ...
      fields: fields that the settings add to the source's records.
      hashes: question hashes of the records to train on; empty for a task that generates its records.
    """

    name: str
    config: DataConfig
    train: Source
    held_out: Source
    weight: float
    unanswered: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fields: TaskFields = dataclasses.field(default_factory=dict)
    hashes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclasses.dataclass(frozen=True)
class OpenedSources:
    """The records of a configuration's sources.

    Attributes:
      parts: sources of the configuration, at least one.
      evaluation: records of data.eval_path; None if data.eval_path is ''.
      unanswered: an entry for each file that has a record without an answer: (text that names the record and its
        fields, reward functions that only the file's source has, possibly none).
      evaluation_unanswered: text that names the first record of data.eval_path without an answer, and the record's
        fields; '' if all records have answers.
    """

    parts: Sequence[OpenedSource]
    evaluation: Source | None
    unanswered: Sequence[tuple[str, Sequence[str]]]
    evaluation_unanswered: str = ""

    @property
    def unmeasured(self) -> str:
        """Text that names a record without an answer in a file that evaluations use; '' if all have answers."""
        lacking = (
            [self.evaluation_unanswered] if self.evaluation is not None else [part.unanswered for part in self.parts]
        )
        return next(filter(None, lacking), "")

    def count_shared_questions(self, other: "OpenedSources") -> int:
        """Counts the training records with a question that is also in the training records of `other`.

        The problems of tasks that generate their records do not count.
        """
        theirs = np.concatenate([part.hashes for part in other.parts])
        return sum(int(np.isin(part.hashes, theirs).sum()) for part in self.parts)

    @property
    def train(self) -> Source | Mixture:
        """The training records: the records of the only source, or a mixture of all sources."""
        if len(self.parts) == 1:
            return self.parts[0].train
        names = [part.name for part in self.parts]
        return Mixture([part.train for part in self.parts], [part.weight for part in self.parts], names)

    @property
    def held_out(self) -> int:
        """Number of records in data.eval_path, or without this key the number of records that the sources hold out."""
        return sum(len(part.held_out) for part in self.parts) if self.evaluation is None else len(self.evaluation)

    def rows(self) -> Sequence[Record]:
        """Returns a row per source for the run directory: the share of the prompts, and numbers of records by use."""
        whole = sum(part.weight for part in self.parts)
        return [
            {"source": part.name or part.config.path, "share": round(part.weight / whole, 6), **part.counts}
            for part in self.parts
        ]


def split(config: DataConfig, form: Form | None = None, key: str = "") -> OpenedSources:
    """Opens the records of a configuration; a file that has not changed since the last call is not read again.

    Args:
      config: settings of the data.
      form: check of a job that trains on answers: a function of (record, place of the record, settings of the source)
        that raises ValueError for a record of another form. With this check, records of a file are held out only if all
        of them have an answer in data.answer_field. None for a job that trains on prompts: every record must have a
        question.
      key: name of the configuration's key that the paths come from, for error messages; '' for data.path or
        data.sources.

    Raises:
      FileNotFoundError: a file does not exist; the message names the key.
      ValueError: a record or a setting is not allowed; the message names key, file and line.
    """
    identities = []
    for of_file, path, part in keyed_paths(config, key):
        with named(of_file, path):
            identities.append(sources.identity(path, part))
    return _opened(_Key(config, form, key, tuple(identities)))


def keyed_paths(config: DataConfig, key: str = "") -> list[tuple[str, str, str]]:
    """Lists the files that a configuration reads: (name of the key, path, beginning of the names of the files).

    Args:
      config: settings of the data.
      key: name of the configuration's key that the paths come from, as for `split`; '' for data.path or data.sources.
    """
    paths = [("data.eval_path", config.eval_path, "")]
    for single, source in _pairs(config):
        paths.append((_key_of(source, key), single.path, source.split if source else ""))
    return [row for row in paths if row[1] and not is_generated(row[1])]


def _key_of(source: SourceConfig | None, key: str) -> str:
    return key or ("data.sources" if source else "data.path")


class _Key:
    """The arguments of `_opened` as a key of its cache.

    Keys are compared and hashed as texts, because a configuration may hold mappings. `identities` has the identity of
    every file, so that a changed file makes another key. `key` is not compared: only errors name it, and errors are
    not cached.
    """

    def __init__(self, config: DataConfig, form: Form | None, key: str, identities: tuple[object, ...]) -> None:
        self.config, self.form, self.key = config, form, key
        self._text = repr((config, form, identities))

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text


@functools.lru_cache(maxsize=64)  # cached, because a job opens the same data several times
def _opened(key: _Key) -> OpenedSources:
    config, cache = key.config, Cache(key.config.cache)
    evaluation, notes = None, Notes(config.question_field, config.answer_field)
    of_evaluation = ""
    if config.eval_path:
        with named("data.eval_path", config.eval_path):
            evaluation = _read(config, config.eval_path, "", notes, cache, key.form, with_question=True)
        of_evaluation = notes.unanswered(evaluation)
    files: list[_File | None] = []
    for single, source in _pairs(config):
        with named(_key_of(source, key.key), single.path):
            files.append(_file(single, source, cache, key.form))
    held_out_hashes = np.unique(np.concatenate([notes.hashes, *(file.hashes[file.is_held] for file in files if file)]))
    parts = [_part(*pair, file, held_out_hashes, key.form) for pair, file in zip(_pairs(config), files, strict=True)]
    unanswered = [(of_evaluation, ()), *((part.unanswered, part.fields.get("reward_fns", ())) for part in parts)]
    return OpenedSources(parts, evaluation, [(place, fns) for place, fns in unanswered if place], of_evaluation)


def _pairs(config: DataConfig) -> list[tuple[DataConfig, SourceConfig | None]]:
    return list(zip(config.singles(), config.sources or (None,), strict=True))


class _File(NamedTuple):
    """The records of a source that is read from files.

    Attributes:
      records: records after the transforms of the source.
      dropped: number of records that the transforms dropped, by reason.
      hashes: question hash of every record.
      is_held: True for each record that is held out.
      unanswered: text that names the first record without an answer and its fields; '' if all records have answers.
    """

    records: sources.Records
    dropped: Mapping[str, int]
    hashes: np.ndarray
    is_held: np.ndarray
    unanswered: str


def _file(config: DataConfig, source: SourceConfig | None, cache: Cache, form: Form | None) -> _File | None:
    """Reads the files of a source; returns None if its records are generated."""
    if is_generated(config.path):
        return None
    notes = Notes(config.question_field, config.answer_field)
    dropped: Mapping[str, int] = {}
    path, part = config.path, source.split if source else ""
    if source and source.transforms:
        raw = sources.read(path, split=part, as_written=True)
        files = () if path.startswith("tfds:") else sources.files(sources.of_split(path, part))
        content = [cache.content(file) for file in files] or [path]
        file, dropped = transformed(raw, key(content), source.transforms, cache)
        path, part = str(file), ""
    try:
        records = _read(config, path, part, notes, cache, form)
    except ValueError as error:
        if source and source.transforms:
            raise ValueError(f"{config.path}, after the transforms of data.sources: {error}") from error
        raise
    unanswered = notes.unanswered(records)
    holds_out = not config.eval_path and not (form is not None and unanswered)
    is_held = notes.held_out(config.eval_fraction if holds_out else 0.0)
    if is_held.all():
        raise ValueError(
            f"data.eval_fraction={config.eval_fraction} holds out all of the records of {config.path}, {len(is_held)} "
            "in number, so that none of them is left to train on: lower it, or give data.eval_path."
        )
    return _File(records, dropped, notes.hashes, is_held, unanswered)


def _part(
    config: DataConfig, source: SourceConfig | None, file: _File | None, held_hashes: np.ndarray, form: Form | None
) -> OpenedSource:
    """Chooses a source's training records: leaves out each question that a source or data.eval_path holds out."""
    name, fields = (source.label, {SOURCE: source.label, **source.fields}) if source else ("", {})
    if file is None:
        train, held_out = _generated(config)
        lacks = _lacks(train, config, form)
        used = _chosen(np.arange(len(train)), source, config.seed)
        counts = {"records": len(train), "not chosen": len(train) - len(used), "used": len(used)}
        train = train if len(used) == len(train) else Subset(train, used)
        return OpenedSource(
            name, config, train, held_out, (source and source.weight) or len(train), lacks, counts, fields
        )
    records, is_held = file.records, file.is_held
    leaks = ~is_held & np.isin(file.hashes, held_hashes)
    kept = np.flatnonzero(~is_held & ~leaks)
    count = int(leaks.sum())
    where = f"data.eval_path={config.eval_path}" if config.eval_path else "records held out of other sources"
    report_repeats(count, len(records), config.path, where, left=len(kept))
    used = _chosen(kept, source, config.seed)
    counts = {"records": len(records) + sum(file.dropped.values()), **file.dropped, "held out": int(is_held.sum())}
    counts |= {"asked by held-out records": count} if count else {}
    counts |= {"not chosen": len(kept) - len(used), "used": len(used)}
    train = records if len(used) == len(records) else Subset(records, used)
    weight = (source and source.weight) or len(used)
    held_out = Subset(records, np.flatnonzero(is_held))
    return OpenedSource(name, config, train, held_out, weight, file.unanswered, counts, fields, file.hashes[used])


def report_repeats(count: int, records: int, path: str, where: str, *, left: int) -> None:
    """Warns how many training records repeat a held-out question.

    Args:
      count: number of training records with a question that is held out, which the caller leaves out.
      records: number of all records of the training data.
      path: name of the training data.
      where: name of the held-out records.
      left: number of records to train on.

    Raises:
      ValueError: records repeat held-out questions, and none is left to train on.
    """
    if count and not left:
        raise ValueError(
            f"Every record of {path}, {count} in number, repeats a question of {where}: none is left to train on. Give "
            "held-out records that share no question with the training records."
        )
    if count:
        _log.warning(
            "%d of %d records of %s repeat a question of %s (case and white space aside) and are left out of training.",
            *(count, records, path, where),
        )


def _generated(config: DataConfig) -> tuple[Any, Any]:
    """Returns the problems of a generated task: (problems to train on, held-out problems)."""
    if config.path.startswith(REASONING):
        gym = reasoning_gym(config)
        return gym.source("train"), gym.source("held_out")
    generator = EMBEDDED[config.path]
    sizes = config.size, config.seed
    return generator.source("train", *sizes), generator.source("held_out", *sizes)


def reasoning_gym(config: DataConfig) -> ReasoningGym:
    """Returns the dataset of reasoning-gym that data.path names."""
    return ReasoningGym(config.path, config.arguments, config.seed, config.size)


def _lacks(problems: Any, config: DataConfig, form: Form | None) -> str:
    """Returns a text that describes the first of some generated records if it has no answer; else ''.

    Some datasets of reasoning-gym have no answers.

    Raises:
      ValueError: `form` refuses the record.
    """
    if not isinstance(first := problems[0], Mapping):
        return ""
    if form is not None:
        form(first, config.path, config)
    return "" if "answer" in first else f"{config.path} lacks 'answer' (it has {', '.join(first)})"


def _read(
    config: DataConfig,
    path: str,
    part: str,
    notes: Notes,
    cache: Cache,
    form: Form | None,
    *,
    with_question: bool = False,
) -> sources.Records:
    """Reads the records of a file, and adds their notes to `notes`.

    If the file is large and was read before, records and notes come from the cache.

    Args:
      config: settings of a job that has this source only.
      path: path of the file, or of a directory of files.
      part: name of the split, with which the names of its files begin; '' if `path` is a file.
      notes: question hashes and answers of the records; this function adds the notes of the file.
      cache: cache of the records and notes of large files.
      form: function that raises ValueError for records of another form; None if records must have a question.
      with_question: True accepts a record of any form if it has a question. The records of an evaluation file may be
        prompts or answers, so the file is read with True.
    """

    def check(record: Record, place: str) -> None:
        if form is None or (with_question and shape.prompt_field(record, config.question_field)):
            notes.check(record, place)
        else:
            form(record, place, config)
            notes.note_any_answer(record, place)

    def fill(file: epath.Path, lines: Any, read: Callable[[], None]) -> None:
        if sources.size(file) < WORTH:
            read()
            return
        name = key("lines", cache.content(file), notes.key, getattr(form, "__module__", ""), with_question)
        if (stored := cache.load(name)) is not None:
            lines.restore(stored)
            notes.extend(stored)
            return
        start = len(notes)
        read()
        cache.store(name, lines.arrays() | notes.arrays(start))

    one_of = () if form else (config.question_field, "prompt", "messages", "conversations")
    return sources.read(path, one_of, check, split=part, cache=fill)


def _chosen(indices: np.ndarray, source: SourceConfig | None, seed: int) -> np.ndarray:
    """Chooses `count` or `fraction` of a source's records by the hashes of their indices; returns sorted indices."""
    if source is None or (source.count is None and source.fraction is None):
        return indices
    share = source.fraction or 1.0
    wanted = source.count if source.count is not None else max(1, round(share * len(indices)))
    if wanted > len(indices):
        raise ValueError(
            f"data.sources: {source.label} has count={wanted}, but only {plural(len(indices), 'record')} to choose "
            "from: give at most that many."
        )
    order = np.argsort(hashed(indices.astype(np.uint64) + np.uint64(seed << 32)), kind="stable")
    return np.sort(indices[order[:wanted]])


def hashed(values: np.ndarray) -> np.ndarray:
    """Hashes numbers of type uint64 (the finaliser of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def interleaved(items: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yields one item of each iterator in turn, until all iterators have ended."""
    left = list(items)
    while left:
        for one in list(left):
            try:
                yield next(one)
            except StopIteration:
                left.remove(one)
