"""Reads records from files of several formats; the error about a malformed file names the file and the line.

Every record is checked when its file is opened. Records of .jsonl, .csv and ArrayRecord files on a disk stay there, and
are read again on access: of a .jsonl or .csv file the process keeps only the place and the checksum of each record, 20
bytes in all. Parquet files, and files in a bucket, are kept in memory.
"""

import array
import bisect
import collections
import contextlib
import csv
import datetime
import decimal
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from etils import epath

from podrl.config import install
from podrl.data import shape
from podrl.mappings import JsonObject, Record
from podrl.runtime import plain
from podrl.storage import hub
from podrl.storage.regular import regular
from podrl.storage.storage import first_line, is_remote, locate

Check = Callable[[Record, str], None]  # takes a record and its place; raises ValueError to refuse the record
_JSONL, _ARRAY_RECORD = ".jsonl", ".array_record"
# The values of data.path that name no file. podrl.data.config, which lists the tasks, imports this module.
_TASKS = "The data.path of a job may also be a task: problems, sums, facts or reasoning_gym:NAME."
_MARK = b"\xef\xbb\xbf"  # the byte-order mark, with which some programs begin UTF-8 files
csv.field_size_limit(1 << 30)  # in characters; the library's default, 131,072, is too few for a long document
Made = TypeVar("Made")


class Source(Protocol):
    """Random access to records by index, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


def make(source: Source, index: int, writer: Callable[[Record], Made]) -> Made:
    """Applies a function to the record at an index.

    Raises:
      ValueError: `writer` raised a ValueError; the message begins with the record's place.
    """
    record = source[index]
    try:
        return writer(record)
    except ValueError as error:
        where: Any = getattr(source, "place", "Record {}".format)
        raise ValueError(f"{where(index)}: {error}") from error


def make_all(source: Source, writer: Callable[[Record], Made]) -> Iterator[Made]:
    """Applies a function to every record, in order; its errors get the record's place, as in `make`."""
    return (make(source, i, writer) for i in range(len(source)))


def check_json(record: Record, place: str) -> None:
    """Refuses a record with a value that JSON cannot hold, because workers and files get records as JSON.

    Raises:
      ValueError: JSON cannot hold a value; the message names the place, the field and its value.
    """
    for name, value in record.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{place}: the field {name!r} is {repr(value)[:80]}, which JSON does not hold ({error}): leave it out "
                "of the file, or write it as text."
            ) from None


class Records(Sequence[Record]):
    """Records held in memory."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name, self._records = name, records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._records[index]

    def place(self, index: int) -> str:
        """Returns the file and the line (or number) of a record, for messages."""
        return f"{self.name} record {index}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} records)"


class ParsedOnAccess(Records):
    """Records that a reader of another library finds on disk; each record is parsed on access."""

    def __init__(self, name: str, stored: Any, parse: Callable[[Any, str], Record]) -> None:
        super().__init__(name, stored)
        self._parse = parse

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        if index >= len(self):  # a `for` loop ends at an IndexError, and other libraries raise other errors
            raise IndexError(index)
        return self._parse(self._records[index], self.place(index))


class _Lines(Records):
    """Records that are lines of text in a file; only the place and the checksum of each record are in memory."""

    def __init__(self, file: epath.Path, parse: Callable[[str, str], Record]) -> None:
        super().__init__(str(file), ())
        self._file, self._parse = file, parse
        # Every read of a file in a bucket would be a request, so its content is kept in memory.
        self._content = file.read_bytes() if is_remote(file) else None
        self._starts, self._sizes = array.array("q"), array.array("I")
        self._lines, self._sums = array.array("I"), array.array("I")

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the places, line numbers and checksums of the records, for a cache."""
        fields = ("starts", "sizes", "lines", "sums")
        return {name: np.asarray(getattr(self, f"_{name}")) for name in fields}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Appends the records in the arrays that `arrays` returned for a file of the same content."""
        for name in ("starts", "sizes", "lines", "sums"):
            getattr(self, f"_{name}").frombytes(arrays[name].tobytes())

    def open(self) -> io.BufferedIOBase:
        """Opens the file's bytes at the beginning."""
        return open(self._file, "rb") if self._content is None else io.BytesIO(self._content)

    def add(self, start: int, raw: bytes, line: int) -> None:
        """Appends the next record: `start` is the offset in bytes, `raw` the bytes, `line` the number of the line."""
        self._starts.append(start)
        self._sizes.append(len(raw))
        self._lines.append(line)
        self._sums.append(zlib.crc32(raw))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        start, size = self._starts[index], self._sizes[index]
        with self.open() as content:
            content.seek(start)
            raw = content.read(size)
        if zlib.crc32(raw) != self._sums[index]:
            raise ValueError(
                f"{self.place(index)} is no longer what it was when the file was opened: a data file must stay as it "
                "is while a run uses it. Give the changed file another name, and start with it in a new --workdir."
            )
        return self._parse(raw.decode(), self.place(index))

    def place(self, index: int) -> str:
        return f"{self._file} line {self._lines[index]}"


class _JoinedFiles(Records):
    """The records of several files, one file after the other."""

    def __init__(self, name: str, parts: Sequence[Records]) -> None:
        super().__init__(name, ())
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        part, inside = self._find(index)
        return part[inside]

    def place(self, index: int) -> str:
        part, inside = self._find(index)
        return part.place(inside)

    def _find(self, index: int) -> tuple[Records, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        return self._parts[which], index - (self._ends[which - 1] if which else 0)


class _Normal(Records):
    """Records whose conversations are in the form that podrl reads, which podrl.data.shape.normal makes."""

    def __init__(self, written: Records) -> None:
        super().__init__(written.name, written)
        self._written = written

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return shape.normal(self._written[index])

    def place(self, index: int) -> str:
        return self._written.place(index)


class RecordCache(Protocol):
    """A cache of files that were read before."""

    def __call__(self, file: epath.Path, lines: _Lines, read: Callable[[], None]) -> None:
        """Fills `lines` with the file's records; calls `read` to read the file if the cache lacks its content."""
        ...


def read(
    path: str,
    one_of: Sequence[str] = (),
    check: Check | None = None,
    *,
    split: str = "",
    cache: RecordCache | None = None,
    as_written: bool = False,
) -> Records:
    """Opens a file of records, and writes their conversations in one form (podrl.data.shape.normal).

    Args:
      path: path of a .jsonl, .csv (with a header, such as Kaggle's GSM8K), .parquet or .array_record file, local or
        gs://; 'tfds:NAME/SPLIT'; or 'hf:ORG/NAME:CONFIG:SPLIT' of the hub. A `*` in the last part of a path stands for
        several files, which are read in the order of their names.
      one_of: names of columns; a table (.csv, .parquet) must have at least one of them.
      check: function of (record, its place) that raises ValueError to refuse the record. It is called with every record
        in order, except the records that `cache` holds.
      split: beginning of the names of the files to read, if `path` is a directory.
      cache: cache of .jsonl files that were read before, so that they are not read again.
      as_written: True to leave conversations in the form of the file.

    Raises:
      FileNotFoundError: nothing matches the path.
      ValueError: the format is unknown, a file is empty or malformed, or `check` refuses a record; the message names
        file and line.
      ImportError: the library of the format, or of gs://, is not installed; the message names the extra.
    """
    accept: Check = check or (lambda record, place: None)
    if not as_written:
        written = _read(path, one_of, lambda record, place: accept(shape.normal(record), place), split, cache)
        return _Normal(written)
    return _read(path, one_of, accept, split, cache)


def _read(path: str, one_of: Sequence[str], accept: Check, split: str, cache: RecordCache | None) -> Records:
    path = of_split(path, split)
    suffix = "" if path.startswith("tfds:") else _suffix(str(files(path)[0]) if path.startswith(hub.DATA) else path)
    if path.startswith("tfds:") or suffix == _ARRAY_RECORD:
        records = _tfds(path) if not suffix else _array_record(path, files(path))
        for i in range(len(records)):
            accept(records[i], records.place(i))
        return records
    if suffix in _PACKED:
        raise ValueError(
            f"{path} is compressed, and podrl needs random access to the file: unpack it (such as by 'gunzip -k'), "
            "or write it as .parquet."
        )
    if suffix not in _KNOWN:
        usable = ", ".join((*_KNOWN, _ARRAY_RECORD))
        raise ValueError(
            f"{path} ends in {suffix!r}, which is not a known format: use {usable}, tfds:NAME/SPLIT or "
            f"hf:ORG/NAME:CONFIG:SPLIT. {_TASKS}"
        )
    parts = []
    for file in files(path):
        parts.append(_READERS[suffix](file, one_of, accept) if suffix != _JSONL else _jsonl(file, accept, cache))
        if not len(parts[-1]):
            raise ValueError(f"{file} is empty: it must hold at least one record.")
    return parts[0] if len(parts) == 1 else _JoinedFiles(path, parts)


def identity(path: str, split: str = "") -> tuple[object, ...]:
    """Identifies the content of a path's files: the result changes if a file's name, size or time changes.

    The result is () for 'tfds:' and for '', which name no files.

    Raises:
      FileNotFoundError: nothing matches the path.
    """
    if not path or path.startswith("tfds:"):
        return ()
    found = files(of_split(path, split))
    if is_remote(path):
        return tuple((str(file), file.stat().mtime, file.stat().length) for file in found)
    stats = [(str(file), os.stat(file)) for file in found]  # etils' stat() has times in whole seconds only
    return tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats)


def size(file: epath.Path) -> int:
    """Returns the size of a file in bytes."""
    return epath.Path(file).stat().length


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    # Sharded array records are called name.array_record-00000-of-00008.
    return _ARRAY_RECORD if _ARRAY_RECORD in name else epath.Path(name).suffix.lower()


def files(path: str) -> list[epath.Path]:
    """Resolves a path or pattern to files, sorted by name; a `*` in the name of an existing file is not a pattern.

    Raises:
      FileNotFoundError: nothing matches the path, or the path is a directory.
    """
    if path.startswith(hub.DATA):
        return [epath.Path(file) for file in hub.data_files(path)]
    whole = epath.Path(locate(path))
    if regular(whole).is_file():
        return [whole]
    found = [regular(file) for file in sorted(whole.parent.glob(whole.name))] if "*" in whole.name else []
    if not found:
        kind = "is a directory" if whole.is_dir() else "does not exist"
        tasks = "" if whole.suffix else f" {_TASKS}"
        raise FileNotFoundError(f"Data file {path} {kind}: the path must name a file of records.{tasks}")
    return found


def _decoded_line(raw: bytes, file: epath.Path, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} line {number} is not UTF-8 text: {error.reason}.") from error


def _numbered(content: io.BufferedIOBase) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset in bytes, number from 1, bytes) of every line, without a byte-order mark; lines end at b'\\n'."""
    offset = 0
    for number, raw in enumerate(content, start=1):
        mark = len(_MARK) if not offset and raw.startswith(_MARK) else 0
        yield offset + mark, number, raw[mark:]
        offset += len(raw)


def of_split(path: str, split: str) -> str:
    """Returns the pattern of a split's files in a directory; returns `path` if there is no split, or for tfds: and hf:.

    Raises:
      ValueError: `path` is not a directory, or the files of the split do not have one known format.
    """
    if not split or path.startswith(("tfds:", hub.DATA)):
        return path
    whole = epath.Path(locate(path))
    suffixes = (
        sorted({file.suffix for file in whole.glob(f"{split}*") if file.suffix in _KNOWN}) if whole.is_dir() else []
    )
    if len(suffixes) != 1:
        raise ValueError(
            f"{path} with split={split!r} must be a directory that holds files {split}* of one of {', '.join(_KNOWN)}"
            f"{', and holds ' + ' and '.join(suffixes) if suffixes else ''}."
        )
    return f"{path.rstrip('/')}/{split}*{suffixes[0]}"


def _jsonl(file: epath.Path, accept: Check, cache: RecordCache | None) -> Records:
    records = _Lines(file, _object)

    def read() -> None:
        with records.open() as content:
            for start, number, raw in _numbered(content):
                text = _decoded_line(raw, file, number).rstrip("\n")
                if not text.strip():
                    continue
                place = f"{file} line {number}"
                accept(_object(text, place), place)
                records.add(start, raw, number)

    if cache is None:
        read()
    else:
        cache(file, records, read)
    return records


def _object(text: str | bytes, place: str) -> Record:
    try:
        record = json.loads(text, object_pairs_hook=_once, parse_float=plain.json_float)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place} is not JSON ({reason}): {text[:80]!r}. Every line must be a JSON object.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} holds {type(record).__name__} {text[:80]!r}: every line must be a JSON object.")
    if "\\ud" in str(text).lower():  # JSON can write half of a surrogate pair, which UTF-8 cannot encode
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{place} holds half of a surrogate pair (\\ud800 to \\udfff), which is not a character."
            ) from None
    return record


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    """Makes a dict of the pairs of a JSON object.

    Raises:
      ValueError: a key occurs twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        _refuse_twice([name for name, _ in pairs], "keys of an object")
    return fields


def _refuse_twice(names: Sequence[str], noun: str) -> None:
    """Raises ValueError if a name occurs twice, because one of its two values would be lost."""
    if twice := sorted(name for name, count in collections.Counter(names).items() if count > 1):
        raise ValueError(f"several {noun} have the name {', '.join(map(repr, twice))}: each must have its own name")


def _csv(file: epath.Path, one_of: Sequence[str], accept: Check) -> Records:
    header: list[str] = []
    records = _Lines(file, lambda text, _: dict(zip(header, next(_csv_rows([text])), strict=True)))
    # The lines of the row that the csv reader is reading; a row has several lines if a quoted value has line feeds.
    rows: list[tuple[int, int, bytes]] = []

    def lines(content: io.BufferedIOBase) -> Iterator[str]:
        for start, number, raw in _numbered(content):
            rows.append((start, number, raw))
            yield _decoded_line(raw, file, number)

    with records.open() as content:
        try:
            for row in _csv_rows(lines(content)):
                (start, _, _), (_, last, _) = rows[0], rows[-1]
                raw, place = b"".join(raw for _, _, raw in rows), f"{file} line {last}"
                rows.clear()
                if not row:
                    continue
                if not header:
                    header += [name.strip() for name in row]
                    _has_columns(header, one_of, place)
                elif len(row) != len(header):
                    raise ValueError(
                        f"{place} has {len(row)} values for the {len(header)} columns {', '.join(header)}."
                    )
                else:
                    accept(dict(zip(header, row, strict=True)), place)
                    records.add(start, raw, last)
        except csv.Error as error:
            raise ValueError(f"{file} line {rows[-1][1] if rows else 1} is not CSV: {error}.") from error
    return records


def _csv_rows(lines: Iterator[str] | Sequence[str]) -> Iterator[list[str]]:
    return csv.reader(lines, strict=True)


def _has_columns(header: Sequence[str], one_of: Sequence[str], place: str) -> None:
    try:
        _refuse_twice(header, "columns")
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None
    if one_of and not set(one_of) & set(header):
        names = " or ".join(map(repr, one_of))
        raise ValueError(f"{place}: no column {names} among {', '.join(header)}: set data.question_field.")


class _Table(Records):
    """The rows of an Arrow table, which stores columns; each row is converted to a record on access."""

    def __init__(self, file: epath.Path, table: Any) -> None:
        super().__init__(str(file), ())
        self._table = table
        self._exact = {column.name: exact for column in table.schema if (exact := _shortest(column.type))}

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._row(self._table.slice(index, 1).to_pylist()[0])

    def rows(self) -> Iterator[Record]:
        """Yields all records, in order."""
        for batch in self._table.to_batches(max_chunksize=4096):
            yield from map(self._row, batch.to_pylist())

    def _row(self, record: Record) -> Record:
        exact = {name: shorten(record[name]) for name, shorten in self._exact.items()}
        return {name: _as_json(exact.get(name, value)) for name, value in record.items()}

    def place(self, index: int) -> str:
        return f"{self.name} row {index}"


def _parquet(file: epath.Path, one_of: Sequence[str], accept: Check) -> Records:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow: {install('parquet')}.") from error
    try:
        content = io.BytesIO(file.read_bytes())
        names = pyarrow.parquet.read_schema(content).names
        _has_columns(names, one_of, str(file))
        table = pyarrow.parquet.read_table(content)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    records = _Table(file, table)
    for row, record in enumerate(records.rows()):
        accept(record, records.place(row))
    return records


def _as_json(value: object) -> Any:
    """Converts a value of Arrow to a value of JSON: decimals to numbers, dates and times to texts in ISO's form.

    Nulls inside objects are dropped, because Arrow adds them so that all objects of a column have the same keys. Bytes
    that are not UTF-8 text stay bytes, which reward functions and outputs refuse.
    """
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else plain.json_float(format(value, "f"))
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def _shortest(kind: Any) -> Callable[[Any], Any] | None:
    """Makes the function that reads 16-bit and 32-bit floats, at any depth of an Arrow type, as the user wrote them.

    The function reads the shortest decimal text of the float: a 32-bit 0.1 becomes the 64-bit 0.1, although its value
    is 0.10000000149011612. Returns None for a type without such floats.
    """
    import pyarrow

    if pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind):
        narrow = np.float16 if pyarrow.types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if pyarrow.types.is_struct(kind):
        inner = {field.name: one for field in kind if (one := _shortest(field.type))}
        within = lambda value: value | {name: one(value[name]) for name, one in inner.items()}  # noqa: E731
        return (lambda value: None if value is None else within(value)) if inner else None
    kinds = pyarrow.types
    is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    if not is_list or not (each := _shortest(kind.value_type)):
        return None
    return lambda value: None if value is None else [each(one) for one in value]


_READERS: dict[str, Callable[[epath.Path, Sequence[str], Check], Records]] = {
    ".csv": _csv,
    ".parquet": _parquet,
}
_KNOWN = (_JSONL, *_READERS)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".lz4")


def _array_record(path: str, found: Sequence[epath.Path]) -> Records:
    """Opens ArrayRecord files in which every record is a JSON object."""
    if is_remote(path):
        raise ValueError(f"{path}: ArrayRecord files are read from disks only: copy it, or use .parquet or .jsonl.")
    import grain

    stored: Any
    try:
        stored = grain.sources.ArrayRecordDataSource([str(file) for file in found])
    except RuntimeError as error:
        raise ValueError(f"{path} is not an ArrayRecord file: {error}") from error
    if not len(stored):
        raise ValueError(f"{path} is empty: it must hold at least one record.")
    return ParsedOnAccess(path, stored, _object)


def _tfds(path: str) -> Records:
    """Opens a data set of TensorFlow Datasets, without TensorFlow, from its ArrayRecord files."""
    name, _, split = path.removeprefix("tfds:").rpartition("/")
    if not name or not split:
        raise ValueError(f"{path!r} must name data set and split, as in tfds:gsm8k/train.")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(f"{path} needs TensorFlow Datasets: {install('tfds')}.") from error
    try:
        stored = tfds.data_source(name, split=split, builder_kwargs={"file_format": "array_record"})
    except (ValueError, OSError) as error:  # the error's own text is long: it lists all data sets
        raise ValueError(f"{path} cannot be opened: {first_line(error)[:200]}.") from error
    return ParsedOnAccess(path, stored, lambda raw, _: {key: _plain(value) for key, value in raw.items()})


def _plain(value: object) -> Any:
    """Converts a value of numpy to a value of Python, and bytes to text."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value] if value.ndim else _plain(value[()])
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value
