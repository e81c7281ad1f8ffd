"""Locks a run directory: by a file lock that ends with its process, or by a lease if other machines may write there.

On a disk the kernel holds the lock (flock), so that a killed run's successor starts at once. In a bucket, and on a
network file system whose locks may mean nothing to other machines, the owner renews a lease every `BEAT_S` seconds.
A process that finds a lease looks at its owner. If the owner is alive on this machine, the process gives up. If the
owner is dead on this machine, the process takes over at once. If the owner ran on another machine, the process waits
for `EXPIRY_S` seconds, and takes over unless the lease is renewed.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from podrl.storage.mounts import on_network
from podrl.storage.storage import Place, StorageError, first_line, is_remote

BEAT_S = 10.0
EXPIRY_S = 60.0
NAME = "lock"
_ANSWER_S = 10  # deadline of one request to the bucket
# Seconds to wait before the lock is refused: a process that was killed just now still looks alive, and a process that
# has just taken the lock has not written its name yet.
_GRACE_S = 2.0
_DYING_S = 10.0  # a killed process holds its lock until the kernel has freed its memory
_log = logging.getLogger("podrl.lock")


@dataclasses.dataclass(frozen=True)
class Owner:
    """The writer of a run directory.

    Attributes:
      token: text that no other owner has.
      shown: description of the owner's process, host and start, for the user.
      pid: number of the owner's process.
      machine: boot and process namespace in which `pid` is valid; '' if the system does not say.
      born: start of the process in the kernel's ticks, because process numbers are used again.
      beat: number of renewals of the lease.
    """

    token: str
    shown: str
    pid: int
    machine: str
    born: str
    beat: int = 0

    @classmethod
    def me(cls) -> "Owner":
        """Returns the record of this process, with a new token."""
        pid = os.getpid()
        shown = f"process {pid} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
        return cls(uuid.uuid4().hex, shown, pid, _machine(), _born(pid))

    @classmethod
    def parse(cls, text: bytes) -> "Owner | None":
        """Parses the result of `text`; returns None for other content, such as after an interrupted write."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None

    def text(self) -> str:
        """Returns the record as text of a fixed length, so that a renewal never leaves the end of an older record."""
        return json.dumps(dataclasses.asdict(self)).ljust(510) + "\n"

    def alive(self) -> bool | None:
        """Returns True if the owner runs, False if it has ended, None if its machine is another one or unknown."""
        return _born(self.pid) == self.born if self.machine and self.machine == _machine() else None


class Lock:
    """Exclusive ownership of a run directory, from the constructor to `release`."""

    def __init__(self, workdir: Place, label: str):
        """Takes the lock.

        Args:
          workdir: the run directory; a local directory must exist.
          label: the directory as the user names it, for messages.

        Raises:
          ValueError: another process has the lock; the error names it.
          StorageError: the bucket does not answer.
          OSError: the directory cannot be written to.
        """
        self._label, self._owner = label, Owner.me()
        self._new_owner: Owner | None = None
        self._done = threading.Event()
        self._record = _Object(workdir) if is_remote(workdir) else _File(pathlib.Path(workdir).absolute() / NAME)
        try:
            self._take()
        except BaseException:
            self._record.close()
            raise
        self._thread = threading.Thread(target=self._renew, name="podrl-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that this process still owns the directory.

        Raises:
          ValueError: another process has taken the directory over, because this process did not renew its lease.
        """
        if self._new_owner is not None:
            raise ValueError(
                f"--workdir={self._label} was taken over by {self._new_owner.shown} after this process had given no "
                f"sign of life for {EXPIRY_S:.0f} s: this process ends and writes nothing more. Give another --workdir "
                "to run both."
            )

    def release(self) -> None:
        """Releases the directory, and removes the lock's file or object from it."""
        self._done.set()
        self._thread.join(timeout=_ANSWER_S)
        try:
            record = self._record.read()
            if record is not None and record.token == self._owner.token:
                self._record.remove()
        except Exception as error:  # noqa: BLE001 - the lock ends with this process, or the lease expires
            _log.warning("The lock of %s could not be removed: %s", self._label, first_line(error))
        self._record.close()

    def _take(self) -> None:
        started, first = time.monotonic(), None
        while True:
            free, other = self._record.lock(), self._record.read()
            alive, waited = other and other.alive(), time.monotonic() - started
            # The owner ran on another machine: only its lease counts, because a kernel lock may outlive the machine.
            if self._record.leased and other is not None and alive is None:
                if first is None:
                    text = "%s is locked by %s: waiting up to %.0f s to see whether that process still runs."
                    _log.warning(text, self._label, other.shown, EXPIRY_S)
                first = first or other
                if other != first:
                    self._refuse(other)
                if waited > EXPIRY_S:
                    break
            elif free and not (self._record.leased and alive):
                break
            elif waited > (_DYING_S if alive is False else _GRACE_S):
                self._refuse(other)
            time.sleep(min(1.0, BEAT_S / 4) if self._record.leased else 0.05)
        if not self._record.write(self._owner):
            self._refuse(self._record.read())

    def _refuse(self, other: Owner | None) -> None:
        raise ValueError(
            f"--workdir={self._label} is in use by {other.shown if other else 'another process'}: wait until it has "
            "ended, stop it, or give another --workdir."
        )

    def _renew(self) -> None:
        while self._record.leased and not self._done.wait(BEAT_S):
            try:
                other = self._record.read()
                if other is not None and other.token != self._owner.token:
                    self._new_owner = other
                    return
                renewed = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
                if self._record.write(renewed):
                    self._owner = renewed
            except Exception as error:  # noqa: BLE001 - storage that is unreachable for a while must not end a run
                _log.warning("The lease of %s could not be renewed: %s", self._label, first_line(error))


class _File:
    """The owner's record in a file.

    Attributes:
      leased: True if the kernel's lock is not enough, because other machines may ignore it or have left it behind.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._opened = path, -1
        self.leased = on_network(str(path), _proc("self/mounts"))

    def lock(self) -> bool:
        """Tries to lock the file at the path; returns False if another process has the lock or replaced the file.

        On a file system without locks there is only the lease, and the call returns True.
        """
        self.close()
        self._opened = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self.leased:
                _log.warning("%s cannot be locked (%s): it is only marked as in use.", self._path, error.strerror)
            self.leased = True
        return os.path.exists(self._path) and os.path.samestat(os.fstat(self._opened), os.stat(self._path))

    def read(self) -> Owner | None:
        try:
            # The file is opened anew, so that a network file system asks its server.
            return Owner.parse(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, owner: Owner) -> bool:
        """Writes the record; returns True, because a file cannot tell whether another process wrote first."""
        content = owner.text().encode()
        os.pwrite(self._opened, content, 0)
        os.ftruncate(self._opened, len(content))
        if self.leased:
            os.fsync(self._opened)
        return True

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
        self._opened = -1


class _Object:
    """The owner's record in an object of a bucket; `write` returns False if the object has changed since `read`."""

    leased = True

    def __init__(self, workdir: Place):
        self._workdir, self._version = workdir, 0
        bucket, _, folder = str(workdir).partition("://")[2].partition("/")
        with self._reaching("opened"):
            import google.cloud.storage as gcs

            self._blob = gcs.Client().bucket(bucket).blob(f"{folder.strip('/')}/{NAME}".lstrip("/"))

    def lock(self) -> bool:
        return True

    def read(self) -> Owner | None:
        from google.api_core.exceptions import NotFound

        with self._reaching("read"):
            try:
                self._blob.reload(timeout=_ANSWER_S)
                self._version = int(self._blob.generation or 0)
                return Owner.parse(self._blob.download_as_bytes(timeout=_ANSWER_S))
            except NotFound:
                self._version = 0
                return None

    def write(self, owner: Owner) -> bool:
        from google.api_core.exceptions import PreconditionFailed

        with self._reaching("written"):
            try:
                self._blob.upload_from_string(owner.text(), if_generation_match=self._version, timeout=_ANSWER_S)
            except PreconditionFailed:
                return False
            self._version = int(self._blob.generation or 0)
            return True

    def remove(self) -> None:
        with self._reaching("removed"):
            self._blob.delete(if_generation_match=self._version, timeout=_ANSWER_S)

    def close(self) -> None:
        return None

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise StorageError(f"{self._workdir}/{NAME} cannot be {what}: {first_line(error)}") from error


def _machine() -> str:
    boot = _proc("sys/kernel/random/boot_id").strip()
    return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _born(pid: int) -> str:
    """Returns the start of a process in the kernel's ticks; '' if it does not run, or is a zombie."""
    fields = _proc(f"{pid}/stat").rpartition(")")[2].split()
    return "" if not fields or fields[0] in "ZX" else fields[19]


def _proc(name: str) -> str:
    """Reads a file of /proc; '' if it cannot be read."""
    try:
        return pathlib.Path("/proc", name).read_text()
    except OSError:
        return ""
