"""Records from files: which formats are read, and what is said when a file is not what it should be."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from podrl.runtime.storage import is_remote, locate

Record = Mapping[str, Any]
_ARRAY_RECORD = ".array_record"


class Source(Protocol):
    """Random access to records, as Grain's MapDataset reads it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class Records(Sequence[Record]):
    """Records held in memory, each with the place it came from."""

    def __init__(self, name: str, records: Sequence[Record], places: Sequence[str] | None = None) -> None:
        self.name, self._records = name, records
        self._places = places

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._records[index]

    def place(self, index: int) -> str:
        """File and line of a record, for messages."""
        return self._places[index] if self._places else f"{self.name} record {index}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} records)"


class ParsedOnAccess(Records):
    """Records another reader holds on disk; each is parsed when it is asked for."""

    def __init__(self, name: str, stored: Any, parse: Callable[[Any, str], Record]) -> None:
        super().__init__(name, stored)
        self._parse = parse

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._parse(self._records[index], self.place(index))


def read(path: str, required: Sequence[str] = ()) -> Records:
    """Opens a file of records.

    Args:
      path: a .jsonl, .csv (with a header, as Kaggle's GSM8K), .parquet or .array_record file, or 'tfds:NAME/SPLIT';
        local or gs://; `*` in the last part stands for several files, read in the order of their names.
      required: fields every record must have, as text that is not empty or as numbers.

    Raises:
      FileNotFoundError: nothing matches the path.
      ValueError: an unknown format, an empty file, or a record that does not hold what it must; names file and line.
      ImportError: the library of the format, or of gs://, is not installed; names the extra.
    """
    if path.startswith("tfds:"):
        return _tfds(path, required)
    suffix = _suffix(path)
    if suffix == _ARRAY_RECORD:
        return _array_record(path, _files(path), required)
    if suffix not in _READERS:
        known = ", ".join((*_READERS, _ARRAY_RECORD))
        raise ValueError(f"{path} ends in {suffix!r}, which is no known format: use {known}, or tfds:NAME/SPLIT.")
    files = _files(path)
    found: list[tuple[Record, str]] = []
    for file in files:
        before = len(found)
        for record, place in _READERS[suffix](file, required):
            found.append((_checked(record, place, required), place))
        if len(found) == before:
            raise ValueError(f"{file} is empty: it must hold at least one record.")
    return Records(path, [record for record, _ in found], [place for _, place in found])


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    # Sharded array records are called name.array_record-00000-of-00008.
    return _ARRAY_RECORD if _ARRAY_RECORD in name else epath.Path(name).suffix.lower()


def _files(path: str) -> list[epath.Path]:
    """The files a path or pattern stands for; the name the user gave is taken as it is where it exists."""
    whole = epath.Path(locate(path))
    if whole.is_file():
        return [whole]
    files = sorted(whole.parent.glob(whole.name)) if "*" in whole.name else []
    if not files:
        kind = "is a directory" if whole.is_dir() else "does not exist"
        raise FileNotFoundError(f"Data file {path} {kind}: data.path and data.eval_path must name files of records.")
    return files


def _text(file: epath.Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{file} line {line} is not UTF-8 text: {error.reason}.") from error


def _jsonl(file: epath.Path, required: Sequence[str]) -> Iterator[tuple[Record, str]]:
    del required
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        yield _object(line, place), place


def _object(text: str | bytes, place: str) -> Record:
    try:
        record = json.loads(text)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place} is not JSON ({reason}): {text[:80]!r}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} holds {type(record).__name__} {text[:80]!r}: every line must be a JSON object.")
    return record


def _csv(file: epath.Path, required: Sequence[str]) -> Iterator[tuple[Record, str]]:
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    header: list[str] = []
    try:
        for row in reader:
            place = f"{file} line {reader.line_num}"
            if not row:
                continue
            if not header:
                header = [name.strip() for name in row]
                _has_columns(header, required, place)
            elif len(row) != len(header):
                raise ValueError(f"{place} has {len(row)} values for the {len(header)} columns {', '.join(header)}.")
            else:
                yield dict(zip(header, row, strict=True)), place
    except csv.Error as error:
        raise ValueError(f"{file} line {reader.line_num} is not CSV: {error}.") from error


def _has_columns(header: Sequence[str], required: Sequence[str], place: str) -> None:
    for name in required:
        if name not in header:
            raise ValueError(
                f"{place}: no column {name!r} among {', '.join(header)}: set data.question_field and data.answer_field."
            )


def _parquet(file: epath.Path, required: Sequence[str]) -> Iterator[tuple[Record, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow: pip install 'podrl[parquet]'.") from error
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(file.read_bytes()))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    _has_columns(table.column_names, required, str(file))
    for number, record in enumerate(table.to_pylist()):
        yield record, f"{file} row {number}"


_READERS: dict[str, Callable[[epath.Path, Sequence[str]], Iterator[tuple[Record, str]]]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _array_record(path: str, files: Sequence[epath.Path], required: Sequence[str]) -> Records:
    """Array records whose every record is a JSON object."""
    if is_remote(path):
        raise ValueError(f"{path}: ArrayRecord files are read from disks only: copy it, or use .parquet or .jsonl.")
    import grain

    stored: Any
    try:
        stored = grain.sources.ArrayRecordDataSource([str(file) for file in files])
    except RuntimeError as error:
        raise ValueError(f"{path} is not an ArrayRecord file: {error}") from error
    if not len(stored):
        raise ValueError(f"{path} is empty: it must hold at least one record.")
    return ParsedOnAccess(path, stored, lambda text, place: _checked(_object(text, place), place, required))


def _tfds(path: str, required: Sequence[str]) -> Records:
    """A data set of TensorFlow Datasets, read without TensorFlow from its ArrayRecord files."""
    name, _, split = path.removeprefix("tfds:").rpartition("/")
    if not name or not split:
        raise ValueError(f"{path!r} must name data set and split, as in tfds:gsm8k/train.")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(f"{path} needs TensorFlow Datasets: pip install tensorflow-datasets.") from error
    stored = tfds.data_source(name, split=split, builder_kwargs={"file_format": "array_record"})
    return ParsedOnAccess(path, stored, lambda raw, place: _checked(_decoded(raw), place, required))


def _decoded(raw: Mapping[str, Any]) -> Record:
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in raw.items()}


def _checked(record: Record, place: str, required: Sequence[str]) -> Record:
    for name in required:
        if name not in record:
            raise ValueError(f"{place} lacks {name!r} (it has {', '.join(record) or 'no fields'}).")
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            raise ValueError(f"{place}: {name!r} is {value!r} but must be text that is not empty, or a number.")
    return record
