"""Runs podrl's commands for tests, with given arguments and files; returns the exit code, stdout and stderr."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

HERE = pathlib.Path(__file__).resolve().parent
DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of a command.

    Attributes:
      code: exit code; None if the command was killed at its deadline.
    """

    code: int | None
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Bad:
    """A command line that must be refused, with the files that it needs.

    Attributes:
      args: arguments of the command; paths are relative to an empty directory.
      words: words that the error message must contain.
      command: 'launch', 'generate', 'export' or 'plan'.
      files: for each file name the content, or a function that makes the file or directory at a path.
      environment: environment variables of the command.
    """

    args: Sequence[str]
    words: Sequence[str]
    command: str = "launch"
    files: Mapping[str, bytes | str | Callable[[pathlib.Path], None]] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def prepare(self, directory: pathlib.Path) -> None:
        """Writes `files` below a directory."""
        for name, content in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)


class Commands:
    """A process that runs commands in forks of itself (fork_server.py)."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "fork_server.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, env=environment(), text=True, **pipes)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n", "the server did not start; see its messages above"

    def run(self, bad: Bad, directory: pathlib.Path, *, deadline_s: float = DEADLINE_S) -> Done:
        """Runs a command in `directory`, in a fork of this server's process."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {
            "module": f"podrl.{bad.command}",
            "args": list(bad.args),
            "cwd": str(directory),
            "environment": dict(bad.environment),
            "deadline_s": deadline_s,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())["code"]
        texts = ((directory / f"{name}.txt").read_text(errors="replace") for name in ("stdout", "stderr"))
        return Done(code, *texts)

    def close(self) -> None:
        with self._server:  # closes the process's pipes, and waits for its end
            pass


def run_for_real(bad: Bad, directory: pathlib.Path, *, deadline_s: float = DEADLINE_S) -> Done:
    """Runs a command in its own process, as a user starts it."""
    command = [sys.executable, "-m", f"podrl.{bad.command}", *bad.args]
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment() | bad.environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """Returns this process's environment, with eight faked CPU devices."""
    return os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
