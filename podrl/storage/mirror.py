"""Copies a local directory to a bucket continuously, in a thread whose failures do not stop the run."""

import logging
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence

from podrl.storage import lock
from podrl.storage.storage import Place, StorageError, denied, first_line, is_denied, is_remote

_log = logging.getLogger("podrl.mirror")
_EVERY_S = 30.0
_SOON_S = 1.0  # a bucket accepts about one write per second to an object
_RETRY_S = 5.0


class Mirror:
    """Copies the files of `local` to a bucket every 30 s, about a second after `hurry`, and at once on `push`.

    A file that is removed from `local` after it was copied is removed from the bucket. Symbolic links and files that
    end in .tmp are not copied.

    Attributes:
      remote: the directory in the bucket.
      local: a new directory of this process; `close` removes it unless a file in it could not be copied.
    """

    def __init__(self, remote: Place, *, folders: Sequence[str] = ()):
        """Makes the local directory, and fetches the files at the top of the remote directory and in some folders.

        Args:
          remote: the directory in the bucket.
          folders: names of the folders in `remote` whose files are fetched, too.

        Raises:
          StorageError: the files cannot be read.
        """
        self.remote = remote
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="podrl-run-"))
        self._copied: dict[pathlib.Path, tuple[int, int]] = {}  # (time of change, size) when last copied
        self._changed = threading.Condition()
        self._requests = self._served = 0  # number of calls of `push`, and how many of them a copy has answered
        self._hurried = self._closing = self._failing = False
        self._thread: threading.Thread | None = None
        try:
            for folder in ("", *folders):
                self._fetch(folder)
        except Exception as error:
            shutil.rmtree(self.local)
            raise StorageError(f"{remote} cannot be read: {first_line(error)}") from error

    def start(self) -> None:
        """Copies existing files on the caller's thread, then starts the thread that copies changes.

        Raises:
          ValueError: the credentials do not allow writing to the bucket.
          StorageError: the first copy failed for another reason.
        """
        try:
            self._copy()
        except Exception as error:
            if is_denied(error):
                raise ValueError(denied(str(self.remote), "--workdir")) from error
            raise StorageError(f"{self.remote} cannot be written to: {first_line(error)}") from error
        self._thread = threading.Thread(target=self._follow, name="podrl-mirror", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Requests a copy about a second from now; meant for files that change more often than once a second."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def push(self, wait_s: float) -> bool:
        """Copies all changes made so far; returns False if the copy did not succeed within `wait_s` seconds.

        Before `start` it copies nothing and returns True.
        """
        if self._thread is None:
            return True
        with self._changed:
            self._requests += 1
            mine = self._requests
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._served >= mine, wait_s)

    def close(self, wait_s: float) -> bool:
        """Copies for the last time and ends the thread; returns False if the copy failed, and then keeps `local`."""
        good = self.push(wait_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if good:
            shutil.rmtree(self.local, ignore_errors=True)
        return good

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._hurried or self._requests > self._served or self._closing, _EVERY_S
                )
                if self._hurried:
                    self._changed.wait_for(lambda: self._requests > self._served or self._closing, _SOON_S)
                if self._closing:
                    return
                requests, self._hurried = self._requests, False
            try:
                self._copy()
            except Exception as error:  # noqa: BLE001 - whatever storage raises, training must outlive it
                if not self._failing:
                    _log.error(
                        "%s cannot be written to (%s): podrl tries again until it can.", self.remote, first_line(error)
                    )
                self._failing = True
                time.sleep(_RETRY_S)
                continue
            self._failing = False
            with self._changed:
                self._served = requests
                self._changed.notify_all()

    def _copy(self) -> None:
        for folder, _, names in os.walk(self.local):
            for name in sorted(names):
                path = pathlib.Path(folder) / name
                if path.suffix == ".tmp" or path.is_symlink():
                    continue
                try:
                    seen = _look(path)
                    if self._copied.get(path) == seen:
                        continue
                    content = path.read_bytes()
                except FileNotFoundError:  # the file was renamed meanwhile
                    continue
                target = self.remote / str(path.relative_to(self.local))
                if not is_remote(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                self._copied[path] = seen
        for path in [path for path in self._copied if not path.exists()]:
            (self.remote / str(path.relative_to(self.local))).unlink(missing_ok=True)
            del self._copied[path]

    def _fetch(self, folder: str) -> None:
        remote = self.remote / folder
        if not remote.is_dir():
            return
        (self.local / folder).mkdir(exist_ok=True)
        for file in remote.iterdir():
            if file.name and file.name != lock.NAME and file.is_file():
                path = self.local / folder / file.name
                path.write_bytes(file.read_bytes())
                self._copied[path] = _look(path)


def _look(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
