"""Limits of processes that run users' code: no secrets of the job in their environment, and bounded resources."""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import threading
from collections.abc import Mapping, MutableMapping

from podrl.config import Count, section

# Names of variables that hold secrets, such as PODRL_SECRET, HF_TOKEN, WANDB_API_KEY, AWS_ACCESS_KEY_ID.
_SECRET = re.compile(r"(^|_)(SECRETS?|TOKENS?|PASS(WD|WORD|PHRASE)?|CREDENTIALS?|(API)?KEYS?|AUTH)(_|$)", re.IGNORECASE)
_OF_THE_JOB = re.compile(r"PODRL_SECRET(_FILE)?")
_hiding, _hidden = threading.Lock(), set[str]()  # used by hide_secrets: its lock, and the names that it has hidden


@section("reward.limits")
@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of each process with users' code, and the secret variables that it may see.

    Attributes:
      memory_mb: bound on the memory that one process allocates, in MiB (RLIMIT_DATA, which leaves mapped files out).
      processes: number of processes and threads that this user may have in addition to those that run when the process
        starts (RLIMIT_NPROC, which the kernel does not apply to root).
      file_mb: bound on the size of a file that the process writes, in MiB (RLIMIT_FSIZE).
      environment: names of environment variables that the process may see although their names sound secret, such as
        'OPENAI_API_KEY'. All other variables with a part like TOKEN, KEY, SECRET or PASSWORD in the name are withheld.
    """

    memory_mb: Count = 16384
    processes: Count = 1024
    file_mb: Count = 4096
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.environment:
            if is_of_the_job(name):
                raise ValueError(
                    f"reward.limits.environment names {name}, which no code of users may see: leave it out."
                )

    def apply(self) -> None:
        """Sets the limits of this process and its children; they cannot be raised again."""
        import resource

        limits = {
            resource.RLIMIT_DATA: self.memory_mb << 20,
            resource.RLIMIT_FSIZE: self.file_mb << 20,
            resource.RLIMIT_CORE: 0,
        }
        if (running := _tasks_of_user()) is not None:
            limits[resource.RLIMIT_NPROC] = running + self.processes
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))

    def visible(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of an environment that users' code may see."""
        withheld = self.withheld(environment)
        return {name: value for name, value in environment.items() if name not in withheld}

    def withheld(self, environment: Mapping[str, str]) -> list[str]:
        """Lists the names of an environment's variables that are withheld from users' code."""
        return sorted(name for name in environment if is_secret(name) and name not in self.environment)


def is_secret(name: str) -> bool:
    """Returns True if the name of an environment variable sounds secret, so that only the job itself should see it."""
    return _SECRET.search(name) is not None


def is_of_the_job(name: str) -> bool:
    """Returns True if a variable holds the secret of the job's own network, which users' code may never see."""
    return _OF_THE_JOB.fullmatch(name) is not None


def forget(environment: MutableMapping[str, str], name: str) -> None:
    """Removes a variable from an environment; if it is os.environ, also hides the value in /proc/PID/environ.

    As long as a process lives, the kernel shows the environment with which the process was started. Users' functions
    run under the same user, so they could read it.
    """
    if environment is os.environ:
        _overwrite(name)
    environment.pop(name, None)


def hide_secrets() -> None:
    """Hides secret variables of this process in /proc/PID/environ; os.environ and child processes keep them.

    Each name is hidden only once, because the kernel shows only the values with which the process was started.
    """
    with _hiding:
        for name in [name for name in os.environ if is_secret(name) and name not in _hidden]:
            value = os.environ[name]
            _overwrite(name)
            os.environ[name] = value  # restores the value, in new memory that the kernel does not show
            _hidden.add(name)


def _overwrite(name: str) -> None:
    """Overwrites a variable's value with asterisks in the memory that the kernel shows."""
    with contextlib.suppress(AttributeError, OSError):  # a system without /proc shows nothing that must be hidden
        getenv = ctypes.CDLL(None).getenv
        getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        if (at := getenv(name.encode())) is not None:
            ctypes.memset(at, ord("*"), len(ctypes.string_at(at)))


def _tasks_of_user() -> int | None:
    """Counts this user's processes and threads; None if the system does not say."""
    if not pathlib.Path("/proc/self/status").exists():
        return None
    count, me = 0, os.getuid()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # the process ended meanwhile
            if process.stat().st_uid == me:
                count += len(os.listdir(process / "task"))
    return count
