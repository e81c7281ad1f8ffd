"""Files of JSON lines with checksums: damage is found line by line, and only a line that was never whole is cut."""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

from podrl.storage.seal import is_sealed, seal, unseal
from podrl.storage.storage import first_line

_log = logging.getLogger("podrl.storage")
Shape = Mapping[str, type]  # the keys of a record, and the types of their values


@dataclasses.dataclass(frozen=True)
class SealedLines:
    """The content of a file of lines.

    Attributes:
      records: (number of the line from 1, its object) of every line that is as it was written, in their order.
      damaged: (number of the line, what is wrong) of every other one but a torn last line.
      unsealed: numbers of the lines without a checksum among `records`, which an earlier version of podrl wrote.
      torn: bytes of a last line whose writing was cut short; nobody was told that it had been written.
    """

    records: list[tuple[int, dict[str, Any]]]
    damaged: list[tuple[int, str]]
    unsealed: list[int]
    torn: int


def encode(record: Mapping[str, Any]) -> bytes:
    """Encodes a record as a line with its checksum, the newline included."""
    return json.dumps(seal(record)).encode() + b"\n"


def decode(content: bytes, unsealed: Collection[Shape]) -> SealedLines:
    """Reads lines.

    Args:
      content: bytes of the file.
      unsealed: the shapes that records without a checksum may have, as earlier versions wrote them: exactly these
        keys, so that a damaged name of the checksum does not make a line an old one, and values of these types.
    """
    *lines, last = content.split(b"\n")
    found = SealedLines([], [], [], 0)
    for number, line in enumerate([*lines, last] if last else lines, 1):
        try:
            record = json.loads(line.decode())
            if not isinstance(record, dict):
                raise ValueError(f"it holds {type(record).__name__}, no object")
            if any(_has(record, shape) for shape in unsealed):
                found.unsealed.append(number)
            elif is_sealed(record):
                record = unseal(record)
            else:
                raise ValueError("it carries no checksum")
        except (ValueError, RecursionError) as error:
            if number > len(lines) and not _whole(line):
                return dataclasses.replace(found, torn=len(line))
            found.damaged.append((number, first_line(error)))
        else:
            found.records.append((number, record))
    return found


def read(path: pathlib.Path, unsealed: Collection[Shape]) -> SealedLines:
    """Reads a file, as `decode`, and warns of lines without a checksum; a file that is not there is empty."""
    found = decode(path.read_bytes() if path.exists() else b"", unsealed)
    if found.torn:
        _log.warning("The last line of %s was never whole: its %d bytes are dropped.", path, found.torn)
    if found.unsealed:
        _log.warning(
            "%d lines of %s carry no checksum, because an earlier version of podrl wrote them: damage to them is not "
            "noticed.",
            *(len(found.unsealed), path),
        )
    return found


def open_to_append(path: pathlib.Path, unsealed: Collection[Shape]) -> BinaryIO:
    """Opens a file for further lines, after cutting off a torn last one and ending one without its newline."""
    file = path.open("ab+")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        if torn := decode(file.read(), unsealed).torn:
            file.truncate(size - torn)
        else:
            file.write(b"\n")
            file.flush()
    return file


def _has(record: Mapping[str, Any], shape: Shape) -> bool:
    return record.keys() == shape.keys() and all(type(record[key]) is kind for key, kind in shape.items())


def _whole(line: bytes) -> bool:
    """True if a line begins with a whole JSON value: what was cut short does not, what lost its newline does."""
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except ValueError:
        return False
    except RecursionError:
        pass
    return True
