"""Limits processes that run user code: no secrets of the job in their environment, bounded resources."""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import threading
from collections.abc import Mapping, MutableMapping

from podrl.config import Count, section

# Named as variables are that hold something to keep: PODRL_SECRET, HF_TOKEN, WANDB_API_KEY, AWS_ACCESS_KEY_ID.
_SECRET = re.compile(r"(^|_)(SECRETS?|TOKENS?|PASS(WD|WORD|PHRASE)?|CREDENTIALS?|(API)?KEYS?|AUTH)(_|$)", re.IGNORECASE)
_OF_THE_JOB = re.compile(r"PODRL_SECRET(_FILE)?")
_hiding, _hidden = threading.Lock(), set[str]()  # of hide_secrets: names that are done


@section("reward.limits")
@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of each process with user code, and the variables it sees besides the harmless ones.

    Attributes:
      memory_mb: memory of one process, in MiB (RLIMIT_DATA: what it allocates, not files it maps).
      processes: processes and threads that may come to those this user has when the process starts (RLIMIT_NPROC,
        which the kernel does not hold against root).
      file_mb: size of one file it writes, in MiB (RLIMIT_FSIZE).
      environment: names of environment variables that it sees though their names sound secret, such as
        'OPENAI_API_KEY'; all others whose name has a part like TOKEN, KEY, SECRET or PASSWORD are withheld.
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
        """Sets the limits on this process and its children; none can be raised again."""
        import resource

        wanted = {
            resource.RLIMIT_DATA: self.memory_mb << 20,
            resource.RLIMIT_FSIZE: self.file_mb << 20,
            resource.RLIMIT_CORE: 0,
        }
        if (running := _tasks_of_user()) is not None:
            wanted[resource.RLIMIT_NPROC] = running + self.processes
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))

    def seen(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the part of an environment that user code may see."""
        withheld = self.withheld(environment)
        return {name: value for name, value in environment.items() if name not in withheld}

    def withheld(self, environment: Mapping[str, str]) -> list[str]:
        """Lists the variables that are withheld."""
        return sorted(name for name in environment if is_secret(name) and name not in self.environment)


def is_secret(name: str) -> bool:
    """True if an environment variable's name says that only the job itself should see it."""
    return _SECRET.search(name) is not None


def is_of_the_job(name: str) -> bool:
    """True for a variable that no code of users may ever see: the secret of the job's own network."""
    return _OF_THE_JOB.fullmatch(name) is not None


def forget(environment: MutableMapping[str, str], name: str) -> None:
    """Removes a variable from an environment; for this process's own, also where the kernel shows it to others.

    /proc/PID/environ shows the environment a process was started with for as long as it lives, and the functions of
    users run under the same user.
    """
    if environment is os.environ:
        _overwrite(name)
    environment.pop(name, None)


def hide_secrets() -> None:
    """Takes secrets out of what the kernel shows of this process's environment; os.environ and children keep them.

    Each name is done once: the kernel shows the environment a process was started with, and no value set later.
    """
    with _hiding:
        for name in [name for name in os.environ if is_secret(name) and name not in _hidden]:
            value = os.environ[name]
            _overwrite(name)
            os.environ[name] = value  # in memory of its own; other threads find it in os.environ throughout
            _hidden.add(name)


def _overwrite(name: str) -> None:
    """Writes asterisks over a variable's value in the memory that the kernel shows."""
    with contextlib.suppress(AttributeError, OSError):  # a system without /proc has nothing to hide there
        getenv = ctypes.CDLL(None).getenv
        getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        if (at := getenv(name.encode())) is not None:
            ctypes.memset(at, ord("*"), len(ctypes.string_at(at)))


def _tasks_of_user() -> int | None:
    """Counts this user's processes and threads; None where the system does not say."""
    if not pathlib.Path("/proc/self/status").exists():
        return None
    count, me = 0, os.getuid()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            if process.stat().st_uid == me:
                count += len(os.listdir(process / "task"))
    return count
