"""Locks a run directory: by a file lock that ends with its process, or by a lease where other machines write too.

On a disk the kernel holds the lock (flock), so that a killed run's successor starts at once. In a bucket, and on a
network file system whose locks may mean nothing to other machines, the owner renews a lease every `BEAT_S` seconds.
Whoever finds the lease of an owner that is alive on this machine gives up; of one that is dead on this machine it takes
over at once; of one elsewhere it waits for `EXPIRY_S` seconds whether the lease is renewed.
"""

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
from collections.abc import Callable
from typing import Protocol

from podrl.runtime.detect import on_network
from podrl.runtime.storage import Place, StorageError, first_line, is_remote

BEAT_S = 10.0
EXPIRY_S = 60.0
NAME = "lock"
_ANSWER_S = 10  # of one request to the bucket
_GRACE_S = 2.0  # a process that was killed just now still looks alive; one that took the lock has not given its name
_DYING_S = 10.0  # a killed process holds its lock until the kernel has given back its memory
_log = logging.getLogger("podrl.lock")


@dataclasses.dataclass(frozen=True)
class Owner:
    """The writer of a run directory.

    Attributes:
      token: of this owner alone.
      host: its machine, for the user.
      pid: its process.
      machine: boot and process namespace in which `pid` means something; '' where the system does not tell.
      born: when the process started, in the kernel's ticks, because numbers of processes are used again.
      since: when it took the directory, for the user.
      beat: grows with every renewal.
    """

    token: str
    host: str
    pid: int
    machine: str
    born: str
    since: str
    beat: int = 0

    @classmethod
    def me(cls) -> "Owner":
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        return cls(uuid.uuid4().hex, socket.gethostname(), pid, _machine(), _born(pid) or "", since)

    @classmethod
    def parse(cls, text: str | bytes) -> "Owner | None":
        """Parses `text`; None for anything else, such as the rest of an interrupted write."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    def is_dead(self) -> bool:
        """True if the owner is known to have ended: it ran on this machine and does no more."""
        return bool(self.machine) and self.machine == _machine() and _born(self.pid) != self.born

    def is_here(self) -> bool:
        """True if the owner is known to run on this machine."""
        return bool(self.machine) and self.machine == _machine() and _born(self.pid) == self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """Exclusive ownership of a run directory, from the constructor to `release`."""

    def __init__(self, workdir: Place, shown: str):
        """Takes the lock.

        Args:
          workdir: the run directory; a local one exists.
          shown: as the user names it.

        Raises:
          ValueError: another process has it; says which.
          StorageError: the bucket does not answer.
          OSError: the directory cannot be written to.
        """
        self._shown, self._owner = shown, Owner.me()
        self._lost: Owner | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._held: _Held
        if is_remote(workdir):
            self._held, self._renewed = _Object(workdir), True
        else:
            path = pathlib.Path(workdir).absolute() / NAME
            network = on_network(str(path), _mounts())
            self._held = _File(path, self._refuse, network=network)
            self._renewed = network or not self._held.locked
        try:
            self._take()
        except BaseException:
            self._held.close()
            raise
        if self._renewed:
            self._thread = threading.Thread(target=self._renew, name="podrl-lock", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises ValueError if another process has taken the directory over because this one showed no life."""
        if self._lost is not None:
            raise ValueError(
                f"--workdir={self._shown} was taken over by {self._lost} after this process had given no sign of life "
                f"for {EXPIRY_S:.0f} s: this one ends without writing any more. Give another --workdir to run both."
            )

    def release(self) -> None:
        """Releases the directory; nothing of the lock stays in it."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=_ANSWER_S)
        if self._lost is None:
            self._held.remove(self._owner)
        self._held.close()

    def _take(self) -> None:
        other = self._held.read()
        end = time.monotonic() + _GRACE_S
        while other is not None and self._renewed and other.is_here():
            if time.monotonic() > end:
                self._refuse(other)
            time.sleep(0.05)
        if other is not None and not other.is_dead() and self._renewed:
            self._await_expiry(other)
        if not self._held.write(self._owner):
            self._refuse(self._held.read())

    def _await_expiry(self, other: Owner) -> None:
        _log.warning(
            "%s was last written to by %s: waiting for up to %.0f s whether it still is.", self._shown, other, EXPIRY_S
        )
        end, gone = time.monotonic() + EXPIRY_S, 0
        while time.monotonic() < end and gone < 2:  # once may be a look while it was written
            time.sleep(min(1.0, BEAT_S / 4))
            now = self._held.read()
            gone += now is None
            if now is not None and now != other:
                self._refuse(now)

    def _refuse(self, other: Owner | None) -> None:
        raise ValueError(
            f"--workdir={self._shown} is in use by {other or 'another process'}: wait until it has ended, stop it, or "
            "give another --workdir."
        )

    def _renew(self) -> None:
        while not self._done.wait(BEAT_S):
            try:
                other = self._held.read()
                if other is not None and other.token != self._owner.token:
                    self._lost = other
                    return
                renewed = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
                if self._held.write(renewed):
                    self._owner = renewed
            except Exception as error:  # noqa: BLE001 - storage that is away for a while ends no run
                _log.warning("The lease of %s could not be renewed: %s", self._shown, first_line(error))


class _Held(Protocol):
    """The record of the owner."""

    def read(self) -> Owner | None: ...

    def write(self, owner: Owner) -> bool:
        """Writes the record; False if somebody else wrote first."""
        ...

    def remove(self, owner: Owner) -> None: ...

    def close(self) -> None: ...


class _File:
    """A file under an exclusive flock; the file alone, where flock is missing or meaningless.

    Attributes:
      locked: whether the kernel keeps others out.
    """

    def __init__(self, path: pathlib.Path, refuse: Callable[[Owner | None], None], *, network: bool):
        """Opens and locks the file.

        Args:
          path: the lock file.
          refuse: raises; called with the owner where that one is alive, or its lock outlives it for long.
          network: whether the lock may be that of a machine which is gone; its lease then decides.
        """
        self._path, self.locked = path, False
        started = time.monotonic()
        while not self.locked:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.locked = _same_file(self._file, path)
            except BlockingIOError:
                other = self.read()
                known = other is not None and (other.is_here() or other.is_dead())
                if network and other is not None and not known:
                    return
                patience = _DYING_S if other is not None and other.is_dead() else _GRACE_S
                if time.monotonic() - started > patience:
                    os.close(self._file)
                    refuse(other)
                time.sleep(0.05)
            except OSError as error:
                _log.warning("%s cannot be locked (%s): it is only marked as in use.", path, error.strerror)
                return
            if not self.locked:
                os.close(self._file)

    def read(self) -> Owner | None:
        return Owner.parse(os.pread(self._file, 1 << 16, 0))

    def write(self, owner: Owner) -> bool:
        content = owner.text().encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        return True

    def remove(self, owner: Owner) -> None:
        found = self.read()
        if found is not None and found.token == owner.token and _same_file(self._file, self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)


class _Object:
    """An object of a bucket, replaced only in the version read last."""

    def __init__(self, workdir: Place):
        import google.cloud.storage as gcs

        bucket, _, folder = str(workdir).partition("://")[2].partition("/")
        try:
            self._blob = gcs.Client().bucket(bucket).blob(f"{folder.strip('/')}/{NAME}".lstrip("/"))
        except Exception as error:
            raise StorageError(f"{workdir} cannot be reached: {first_line(error)}") from error
        self._workdir, self._version = workdir, 0

    def read(self) -> Owner | None:
        from google.api_core.exceptions import NotFound

        try:
            self._blob.reload(timeout=_ANSWER_S)
            self._version = int(self._blob.generation or 0)
            return Owner.parse(self._blob.download_as_bytes(timeout=_ANSWER_S))
        except NotFound:
            self._version = 0
            return None
        except Exception as error:
            raise StorageError(f"{self._workdir}/{NAME} cannot be read: {first_line(error)}") from error

    def write(self, owner: Owner) -> bool:
        from google.api_core.exceptions import PreconditionFailed

        try:
            self._blob.upload_from_string(owner.text(), if_generation_match=self._version, timeout=_ANSWER_S)
        except PreconditionFailed:
            return False
        except Exception as error:
            raise StorageError(f"{self._workdir}/{NAME} cannot be written: {first_line(error)}") from error
        self._version = int(self._blob.generation or 0)
        return True

    def remove(self, owner: Owner) -> None:
        try:
            found = self.read()
            if found is not None and found.token == owner.token:
                self._blob.delete(if_generation_match=self._version, timeout=_ANSWER_S)
        except Exception as error:  # noqa: BLE001 - it expires
            _log.warning("The lease of %s could not be given back: %s", self._workdir, first_line(error))

    def close(self) -> None:
        return None


def _same_file(opened: int, path: pathlib.Path) -> bool:
    """True if a path still leads to an open file."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(opened)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _machine() -> str:
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """Returns when a process started; None when it is gone, a zombie included."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _mounts() -> str:
    try:
        return pathlib.Path("/proc/self/mounts").read_text()
    except OSError:
        return ""
