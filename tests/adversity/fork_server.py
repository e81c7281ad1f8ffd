"""Runs podrl's commands in forks of one process that has imported their modules but started no backend of jax.

    python fork_server.py        # one request per line on stdin, one answer per line on stdout, both JSON

A start then costs only the command's own work, not the seconds of its imports. A fork runs the command as `python -m`
does, from the module's first line, in a session and a directory of its own, and is killed with all its children at its
deadline.
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import sys
import traceback
import warnings

# Modules that the commands import. The commands themselves are missing, because they run as `__main__`.
_IMPORTED = (
    "grain",
    "jinja2",
    "optax",
    "orbax.checkpoint",
    "tokenizers",
    "podrl.data.pairs",
    "podrl.job.job",
    "podrl.models.peft_files",
    "podrl.plan.report",
    "podrl.plan.variants",
    "podrl.rollout.worker",
    "podrl.runtime.joining",
)
_MEMORY = 12 << 30  # bytes


def _started_backends() -> list[str]:
    return sorted(sys.modules["jax._src.xla_bridge"]._backends)


def _child(request: dict) -> int:
    """Runs the command in the child; returns its exit code."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))  # bad input must not exhaust the machine's memory
    os.chdir(request["cwd"])
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, "stdout.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request["environment"])
    warnings.resetwarnings()
    warnings.simplefilter("ignore", RuntimeWarning)  # jax's warning about forks
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's warning about forks
    sys.argv = [request["module"], *request["args"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
            return 1
        return stop.code or 0
    except BaseException:  # noqa: BLE001 - prints what Python itself would print
        traceback.print_exc()
        return 1
    return 0


def _run(request: dict) -> dict:
    """Runs one command; returns its exit code, or None if it was killed at its deadline."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = _child(request)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    ended = os.pidfd_open(pid)
    in_time, _, _ = select.select([ended], [], [], request["deadline_s"])  # returns at once when the child ends
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # before waitpid(), so that the group's id is still the child's
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status) if in_time else None}


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    for name in _IMPORTED:
        importlib.import_module(name)
    assert not _started_backends(), _started_backends()
    answers = os.fdopen(os.dup(1), "w")
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
