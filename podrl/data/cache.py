"""A cache of what reading data files found, by the content of the files: on a local disk, or in a bucket."""

import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import secrets
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from podrl.storage.storage import Place, is_remote, locate

AUTO = "auto"
_SETTLED_S = 2.0  # a file changed within its clock's grain of now may change again and keep its time


class Cache:
    """Arrays and files by keys that are checksums of what they were made of."""

    def __init__(self, where: str) -> None:
        """Opens a cache; nothing is written yet.

        Args:
          where: a directory, local or gs://; 'auto' for one under $XDG_CACHE_HOME or ~/.cache; '' for one that ends
            with the process.
        """
        if where == AUTO:
            home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
            where = os.path.join(home, "podrl", "data")
        self.directory: Place = locate(where or _temporary().name)

    def content(self, file: epath.Path) -> str:
        """Computes the checksum of a file's bytes, or finds it by the file's name, size and time."""
        stat = file.stat()
        which = [os.fspath(file), stat.length, stat.mtime]
        if not is_remote(file):  # a copy may keep name, size and time, but not the number and the change of the file
            own = os.stat(file)
            which = [os.path.realpath(file), own.st_size, own.st_mtime_ns, own.st_ctime_ns, own.st_ino]
        memo = self.place(key("stat", *which), ".txt")
        if memo.exists():
            return memo.read_text()
        if is_remote(file):
            digest = hashlib.sha256(file.read_bytes())
        else:
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256")
        if stat.mtime < time.time() - _SETTLED_S:
            with contextlib.suppress(OSError):  # it only saves the next reader time
                self.write(memo, digest.hexdigest().encode())
        return digest.hexdigest()

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """Loads the arrays of a key; None where there are none, or they are damaged."""
        place = self.place(name, ".npz")
        try:
            with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
                return {field: stored[field] for field in stored.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            return None

    def store(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps arrays under a key."""
        stored = io.BytesIO()
        np.savez(stored, **arrays)  # pyright: ignore[reportArgumentType]
        self.write(self.place(name, ".npz"), stored.getvalue())

    def place(self, name: str, suffix: str) -> Place:
        """The file of a key."""
        return self.directory / (name + suffix)

    def write(self, place: Place, content: bytes) -> None:
        """Writes a file whole: a reader finds all of it, or none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if is_remote(place):
            place.write_bytes(content)
            return
        ready = place.with_name(f"{place.name}.{secrets.token_hex(4)}")  # hosts may share a cache, and process numbers
        ready.write_bytes(content)
        ready.replace(place)


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """A directory that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="podrl-data-")


def key(*parts: Any) -> str:
    """The checksum of values that JSON holds, and of the code: what another version of it kept is not used."""
    return hashlib.sha256(json.dumps([_code(), *parts]).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Checksum of the code that reads records, checks them and takes notes of them."""
    here = pathlib.Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "runtime" / "plain.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
