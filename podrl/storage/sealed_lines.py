"""Files of JSON lines with a checksum per line: a damaged line is reported, an incomplete last line is cut off."""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import BinaryIO

from podrl.mappings import JsonObject
from podrl.storage.seal import is_sealed, seal, unseal
from podrl.storage.storage import first_line

_log = logging.getLogger("podrl.storage")
Shape = Mapping[str, type]  # keys of a record, with the types of their values


@dataclasses.dataclass(frozen=True)
class SealedLines:
    """The content of a file of lines.

    Attributes:
      records: (number of the line, from 1; its object) of every undamaged line, in their order.
      damaged: (number of the line, description of the damage) of every damaged line, without a torn last line.
      unsealed: numbers of the lines in `records` that have no checksum, because an older podrl wrote them.
      torn: number of bytes of an incomplete last line, whose write was interrupted before it was reported as done; 0 if
        there is none.
    """

    records: list[tuple[int, JsonObject]]
    damaged: list[tuple[int, str]]
    unsealed: list[int]
    torn: int


def encode(record: JsonObject) -> bytes:
    """Encodes a record as a line with its checksum, the newline included."""
    return json.dumps(seal(record)).encode() + b"\n"


def decode(content: bytes, unsealed: Collection[Shape]) -> SealedLines:
    """Parses the lines of a file and checks their checksums.

    Args:
      content: bytes of the file.
      unsealed: shapes that a record without a checksum may have, because an older podrl wrote it. A record must have
        exactly the keys of a shape, so that a line whose checksum's key is damaged does not pass as an old line.
    """
    *lines, last = content.split(b"\n")
    found = SealedLines([], [], [], 0)
    for number, line in enumerate([*lines, last] if last else lines, 1):
        try:
            record = json.loads(line.decode())
            if not isinstance(record, dict):
                raise ValueError(f"it holds {type(record).__name__}, not an object")
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
    """Reads a file with `decode`, and warns of a torn line and of lines without a checksum.

    A file that does not exist counts as empty.
    """
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
    """Opens a file to append lines; first cuts off a torn last line, or adds the newline that the last line lacks."""
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


def _has(record: JsonObject, shape: Shape) -> bool:
    return record.keys() == shape.keys() and all(type(record[key]) is kind for key, kind in shape.items())


def _whole(line: bytes) -> bool:
    """Returns True if a line begins with a whole JSON value.

    False for a line whose write was interrupted; True for a line that only lacks its newline.
    """
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except ValueError:
        return False
    except RecursionError:
        pass
    return True
