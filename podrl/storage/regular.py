"""Refuses files of a user that may have no end, such as pipes, because podrl's readers read a file to its end."""

import collections
import json
import os
import pathlib
import stat
from typing import Any, TypeVar

from etils import epath

from podrl.mappings import JsonObject

File = TypeVar("File", bound=os.PathLike)

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular(file: File) -> File:
    """Returns `file` unchanged, for a reader that reads to its end: `regular(file).read_text()`.

    A directory, a path that does not exist and a file in a bucket are left to the reader.

    Raises:
      ValueError: `file` is a pipe, a device or a socket, or a link to one.
    """
    if "://" in os.fspath(file):
        return file
    try:
        mode = os.stat(file).st_mode
    except (OSError, ValueError):
        return file
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        target = "" if not os.path.islink(file) else f" (it links to {pathlib.Path(file).resolve()})"
        raise ValueError(f"{file} is {kind}{target} and must be a regular file, which has an end.")
    return file


def load_json(text: str | bytes) -> Any:
    """Parses the JSON of a user's file.

    Raises:
      ValueError: the text is not JSON (a json.JSONDecodeError if the place is known), has a key twice in an object, or
        is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_object(file: pathlib.Path | epath.Path) -> JsonObject:
    """Reads the JSON object that a user's file holds.

    Raises:
      ValueError: the file is a pipe, a device or a socket, is not text in UTF-8, not JSON, not an object, or has a key
        twice in an object; the error names the file, and the line if it is known.
    """
    path = regular(file)
    try:
        content = load_json(path.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} line {error.lineno} is not JSON: {error.msg}.") from None
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object.")
    return content


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        count = collections.Counter(name for name, _ in pairs)
        twice = next(name for name in count if count[name] > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found
