"""Transforms of a source's records before they are used: rename, filter by length, map by a function of the user.

Transformed records are written to the cache as JSON lines, once for the content of their files, the transforms and the
file of the function.
"""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Mapping

from podrl.config import Natural, Positive, section
from podrl.data.cache import Cache, key
from podrl.data.sources import Record, Records, check_json
from podrl.runtime import plain
from podrl.storage.storage import Place
from podrl.workers.process import DiedError, Functions, LateError
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import spec_at

_AT_ONCE = 256  # records that a function's process is given in one request


@section("data.sources.transforms.length")
@dataclasses.dataclass(frozen=True)
class Length:
    """Bounds of the characters of a field; records outside them are dropped.

    Attributes:
      field: whose text is measured.
      least, most: characters; 0 for no upper bound.
    """

    field: str = "question"
    least: Natural = 0
    most: Natural = 0

    def holds(self, record: Record) -> bool:
        """True where the record is kept."""
        value = record.get(self.field)
        size = 0 if value is None else len(plain.text(value) if isinstance(value, int | float) else str(value))
        return self.least <= size and (not self.most or size <= self.most)


@section("data.sources.transforms")
@dataclasses.dataclass(frozen=True)
class Transform:
    """One step of a source's transforms: exactly one of its three forms is given.

    Attributes:
      rename: old names of fields to new ones.
      length: bounds of a field's length.
      map: 'file.py:function' or 'package.module:function', called in a process of its own with each record, a dict; it
        returns the new record, or None to drop it.
      deadline_s: seconds that `map` may take for 256 records.
    """

    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    length: Length | None = None
    map: str = ""
    deadline_s: Positive = 60.0

    def __post_init__(self) -> None:
        if sum(map(bool, (self.rename, self.length, self.map))) != 1:
            raise ValueError(
                f"data.sources: the transform {dataclasses.asdict(self)} must be one of 'rename', 'length' and 'map'."
            )
        if not isinstance(self.rename, Mapping):
            raise ValueError(f"data.sources: rename={self.rename!r} must be a mapping of old names to new ones.")


def transformed(
    source: Records, content: str, steps: tuple[Transform, ...], cache: Cache
) -> tuple[Place, Mapping[str, int]]:
    """Writes a source's transformed records, unless they are in the cache.

    Args:
      source: the records.
      content: checksum of their files.
      steps: what is done, in this order.
      cache: where to.

    Returns:
      (a .jsonl file, dropped records by reason).

    Raises:
      ValueError: a function failed, is late, or returned something else than a record.
    """
    settings = [dataclasses.asdict(step) | {"code": _code(step)} for step in steps]
    name = key("transformed", content, settings)
    file, counts = cache.place(name, ".jsonl"), cache.place(name, ".json")
    if counts.exists() and file.exists():
        return file, json.loads(counts.read_text())
    dropped: collections.Counter[str] = collections.Counter()
    items = _items(source)
    with contextlib.ExitStack() as processes:
        for step in steps:
            items = _step(step, items, dropped, processes, source.name)
        lines = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for _, record in items)
    if not lines:
        raise ValueError(f"The transforms of {source.name} drop all of its {len(source)} records: {dict(dropped)}.")
    cache.write(file, lines)
    cache.write(counts, json.dumps(dropped).encode())
    return file, dropped


def _items(source: Records) -> Iterator[tuple[str, Record]]:
    """Yields place and record, of every record of a source.

    Raises:
      ValueError: a record with a value that JSON does not hold.
    """
    for i in range(len(source)):
        place, record = source.place(i), source[i]
        check_json(record, place)
        yield place, record


def _step(
    step: Transform,
    items: Iterator[tuple[str, Record]],
    dropped: collections.Counter[str],
    processes: contextlib.ExitStack,
    path: str,
) -> Iterator[tuple[str, Record]]:
    """Makes one step of the records of `path`.

    Raises:
      ValueError: a function failed, or the step names a field that no record has.
    """
    if step.map:
        yield from _mapped(step, items, dropped, processes)
        return
    had = dict[str, None]()
    for place, record in items:
        had |= dict.fromkeys(record)
        if step.length is None:
            renamed = {step.rename.get(name, name): value for name, value in record.items()}
            if len(renamed) < len(record):
                raise ValueError(
                    f"{place} has {', '.join(record)}, of which data.sources: rename={dict(step.rename)} gives two the "
                    "same name: rename both, or drop one by 'map'."
                )
            yield place, renamed
        elif step.length.holds(record):
            yield place, record
        else:
            dropped["length"] += 1
    named = list(step.rename) if step.length is None else [step.length.field]
    if had and (lacks := [name for name in named if name not in had]):
        what = "rename" if step.length is None else "length"
        raise ValueError(
            f"data.sources: {what} names {', '.join(map(repr, lacks))}, which no record of {path} has "
            f"(they have {', '.join(had)})."
        )


def _mapped(
    step: Transform,
    items: Iterator[tuple[str, Record]],
    dropped: collections.Counter[str],
    processes: contextlib.ExitStack,
) -> Iterator[tuple[str, Record]]:
    """Sends records through the user's function, in a process of its own."""
    place, _, name = step.map.rpartition(":")
    specs = {step.map: spec_at(place, name)}
    process = Functions("podrl.data.mapper", Limits(), specs, size=1, what="data.sources: map=")
    processes.enter_context(process)
    while several := [item for _, item in zip(range(_AT_ONCE), items, strict=False)]:
        try:
            reply = process.call(step.map, [record for _, record in several], step.deadline_s)
        except (LateError, DiedError) as error:
            places = f"{several[0][0]} to {several[-1][0]}"
            limit = f"deadline_s={step.deadline_s:g}"
            raise ValueError(
                f"data.sources: map={step.map} gave no answer for {places} within {limit}: {error}"
            ) from error
        if "raised" in reply:
            where = several[reply["record"]][0]
            raise ValueError(f"data.sources: map={step.map} failed for {where}: {reply['raised']}")
        for (where, _), record in zip(several, reply["records"], strict=True):
            if record is None:
                dropped[f"map {name}"] += 1
            else:
                yield where, record


def _code(step: Transform) -> str:
    """Checksum of the file that a function is in."""
    if not step.map:
        return ""
    place, colon, name = step.map.rpartition(":")
    if not colon or not name:
        raise ValueError(f"data.sources: map={step.map!r} must be 'file.py:function' or 'package.module:function'.")
    try:
        spec = spec_at(place, name)
    except ValueError as error:
        raise ValueError(f"data.sources: map={step.map!r}: {error}") from error
    file = spec.get("file") or getattr(importlib.util.find_spec(spec["module"]), "origin", None)
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() if file else ""
