"""A cache, on a local disk or in a bucket, of the results of reading data files; the key is the files' content."""

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

import numpy as np
from etils import epath

from podrl.storage.storage import Place, is_remote, locate

AUTO = "auto"
# A file's checksum is stored only if the file was last changed at least this many seconds ago. The stored checksum is
# found again by the file's path, size and time of change. A file system's clock is coarse, so a file that has just
# changed may change again without a new time.
_SETTLED_S = 2.0


class Cache:
    """Stored arrays and files; each has as its key a checksum of the input from which it was made."""

    def __init__(self, where: str) -> None:
        """Opens a cache without writing anything.

        Args:
          where: directory of the cache, local or gs://. 'auto' is a directory under $XDG_CACHE_HOME or ~/.cache; '' is
            a temporary directory that is removed when the process ends.
        """
        if where == AUTO:
            home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
            where = os.path.join(home, "podrl", "data")
        self.directory: Place = locate(where or _temporary().name)

    def content(self, file: epath.Path) -> str:
        """Returns the checksum of a file's bytes: computed, or stored earlier under the file's name, size and time."""
        stat = file.stat()
        which = [os.fspath(file), stat.length, stat.mtime]
        if not is_remote(file):  # a copy may keep name, size and time, but has another inode number
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
            with contextlib.suppress(OSError):  # if the checksum cannot be stored, the next reader only takes longer
                self.write(memo, digest.hexdigest().encode())
        return digest.hexdigest()

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """Loads the arrays that are stored under a key; None if there are none, or their file is damaged."""
        place = self.place(name, ".npz")
        try:
            with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
                return {field: stored[field] for field in stored.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            return None

    def store(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Stores arrays under a key."""
        stored = io.BytesIO()
        np.savez(stored, **arrays)  # pyright: ignore[reportArgumentType]
        self.write(self.place(name, ".npz"), stored.getvalue())

    def place(self, name: str, suffix: str) -> Place:
        """Returns the path of the file with this name and suffix."""
        return self.directory / (name + suffix)

    def write(self, place: Place, content: bytes) -> None:
        """Writes a file atomically: a reader finds the whole file or no file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if is_remote(place):
            place.write_bytes(content)
            return
        # The name is random and not a process number: hosts may share a cache, and may have equal process numbers.
        ready = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        ready.write_bytes(content)
        ready.replace(place)


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """Makes a directory that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="podrl-data-")


def key(*parts: object) -> str:
    """Computes a key of the cache: the checksum of `parts`, which must be JSON values, and of this package's code.

    The code is part of the key, so that a changed reader does not use the results of an older reader.
    """
    return hashlib.sha256(json.dumps([_code(), *parts]).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Computes the checksum of the code that reads records, checks them and makes their notes."""
    here = pathlib.Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "runtime" / "plain.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
