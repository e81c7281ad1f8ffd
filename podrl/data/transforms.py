"""Transforms a source's records before they are used: renames fields, drops by length, maps by a user's function.

Transformed records are written to the cache as JSON lines. They are written again when the content of the source's
files, the transforms, the file of the user's function, or the code of podrl.data has changed.
"""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Mapping

from podrl.config import Natural, Positive, plural, section
from podrl.data.cache import Cache, key
from podrl.data.sources import Records, check_json
from podrl.mappings import Record
from podrl.runtime import plain
from podrl.storage.storage import Place
from podrl.workers.process import DiedError, Functions, LateWorkerError
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import explain_load, spec_at

_AT_ONCE = 256  # number of records in one request to the process of a user's function


@section("data.sources.transforms.length")
@dataclasses.dataclass(frozen=True)
class Length:
    """Bounds of the length of a field's text; records outside them are dropped.

    Attributes:
      field: name of the field whose text is measured.
      least: least number of characters.
      most: largest number of characters; 0 for no upper bound.
    """

    field: str = "question"
    least: Natural = 0
    most: Natural = 0

    def holds(self, record: Record) -> bool:
        """True if the record is kept, because the field's text is within the bounds; an absent field has length 0."""
        value = record.get(self.field)
        size = 0 if value is None else len(plain.text(value) if isinstance(value, int | float) else str(value))
        return self.least <= size and (not self.most or size <= self.most)


@section("data.sources.transforms")
@dataclasses.dataclass(frozen=True)
class Transform:
    """One step of a source's transforms; exactly one of `rename`, `length` and `map` must be set.

    Attributes:
      rename: new names of fields, by their old names.
      length: bounds of the length of a field's text; records outside them are dropped.
      map: function 'file.py:function' or 'package.module:function', which is called in a process of its own with each
        record as a dict. It returns the new record, or None to drop the record.
      deadline_s: longest time that `map` may take for 256 records, in seconds.
    """

    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    length: Length | None = None
    map: str = ""
    deadline_s: Positive = 60.0

    def __post_init__(self) -> None:
        if sum(map(bool, (self.rename, self.length, self.map))) != 1:
            raise ValueError(
                f"data.sources: the transform {dataclasses.asdict(self)} must set exactly one of "
                "'rename', 'length' and 'map'."
            )
        if not isinstance(self.rename, Mapping):
            raise ValueError(f"data.sources: rename={self.rename!r} must be a mapping of old names to new ones.")


def transformed(
    source: Records, content: str, steps: tuple[Transform, ...], cache: Cache
) -> tuple[Place, Mapping[str, int]]:
    """Writes a source's transformed records to the cache, unless they are there already.

    Args:
      source: records of the source.
      content: checksum of the files that hold the records.
      steps: transforms of the source, applied in this order.
      cache: cache that the result is written to.

    Returns:
      (path of the .jsonl file, number of dropped records by reason).

    Raises:
      ValueError: a function failed, exceeded its deadline, or returned neither a record nor None; a step names a field
        that no record has; or the steps drop all records.
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
        raise ValueError(
            f"The transforms of {source.name} drop all of its {plural(len(source), 'record')}: {dict(dropped)}."
        )
    cache.write(file, lines)
    cache.write(counts, json.dumps(dropped).encode())
    return file, dropped


def _items(source: Records) -> Iterator[tuple[str, Record]]:
    """Yields (place, record) of every record of a source.

    Raises:
      ValueError: a record has a value that JSON cannot hold.
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
    """Applies one step to the records of `path`; yields (place, record), and counts dropped records in `dropped`.

    Raises:
      ValueError: a function failed, or the step names a field that no record has, or gives two fields the same name.
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
                    f"{place} has {', '.join(record)}, and data.sources: rename={dict(step.rename)} gives two of these "
                    "fields the same name: rename both, or drop one by 'map'."
                )
            yield place, renamed
        elif step.length.holds(record):
            yield place, record
        else:
            dropped["length"] += 1
    named = list(step.rename) if step.length is None else [step.length.field]
    if had and (lacks := [name for name in named if name not in had]):
        key = "rename" if step.length is None else "length"
        raise ValueError(
            f"data.sources: {key} names {', '.join(map(repr, lacks))}, which no record of {path} has "
            f"(they have {', '.join(had)})."
        )


def _mapped(
    step: Transform,
    items: Iterator[tuple[str, Record]],
    dropped: collections.Counter[str],
    processes: contextlib.ExitStack,
) -> Iterator[tuple[str, Record]]:
    """Applies the user's function to records, in a process of its own, which `processes` closes.

    Raises:
      ValueError: the function failed, exceeded its deadline, or returned neither a record nor None.
    """
    place, _, name = step.map.rpartition(":")
    specs = {step.map: spec_at(place, name)}
    process = Functions("podrl.data.mapper", Limits(), specs, size=1, label="data.sources: map={}".format)
    processes.enter_context(process)
    while several := [item for _, item in zip(range(_AT_ONCE), items, strict=False)]:
        try:
            reply = process.call(step.map, [record for _, record in several], step.deadline_s)
        except (LateWorkerError, DiedError) as error:
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
    """Computes the checksum of the file that holds a step's function; '' if the step has no function.

    Raises:
      ValueError: `map` names no function, or its file or package does not exist.
    """
    if not step.map:
        return ""
    place, colon, name = step.map.rpartition(":")
    if not colon or not name:
        raise ValueError(f"data.sources: map={step.map!r} must be 'file.py:function' or 'package.module:function'.")
    try:
        spec = spec_at(place, name)
        file = spec.get("file") or getattr(importlib.util.find_spec(spec["module"]), "origin", None)
    except Exception as error:  # find_spec imports the package of a module, which may raise anything
        raise ValueError(f"data.sources: map={step.map!r}: {explain_load(error)}") from error
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() if file else ""
