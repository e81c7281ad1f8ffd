"""The process a reward function runs in: `python -m podrl.rewards.worker`, started by podrl.rewards.pool.

It reads requests from its standard input and answers on its standard output, each message a pair of lengths, a JSON
header and a JSON body. It imports the standard library and what reward functions import, never jax, and it ends when
its parent does, even inside a function that never returns.
"""

import difflib
import fcntl
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

INSIDE = "PODRL_REWARD_WORKER"
LIFE = "PODRL_REWARD_LIFE_FD"
_LENGTHS = struct.Struct(">II")
_SHOWN = 200


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A message as it goes through the pipe."""
    head = json.dumps(header).encode()
    return _LENGTHS.pack(len(head), len(body)) + head + body


def take(data: bytearray) -> dict[str, Any] | None:
    """Takes a message off the front of `data` and returns its header; None while bytes of it are missing."""
    if len(data) < _LENGTHS.size:
        return None
    head, body = _LENGTHS.unpack_from(data)
    start, end = _LENGTHS.size, _LENGTHS.size + head + body
    if len(data) < end:
        return None
    header = json.loads(bytes(data[start : start + head]))
    del data[:end]
    return header


class LoadError(ValueError):
    """A spec names no function; the message is complete without a traceback."""


def load(spec: Mapping[str, str]) -> Callable[..., Any]:
    """The function a spec names: by 'file' or 'module', and 'name' (dotted inside the module).

    'settings', a JSON object, are keyword arguments it is always called with.

    Raises:
      LoadError: the module has no such function; says which it has.
    """
    module = _run_file(spec["file"]) if "file" in spec else importlib.import_module(spec["module"])
    found: Any = module
    for part in spec["name"].split("."):
        if not hasattr(found, part):
            own = [
                n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
            ]
            close = difflib.get_close_matches(part, own, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has: {', '.join(own) or 'no functions'}."
            raise LoadError(f"{spec.get('file') or spec['module']} has no function {spec['name']!r}. {hint}")
        found = getattr(found, part)
    if "settings" in spec:
        found = functools.partial(found, **json.loads(spec["settings"]))
    if not callable(found):
        raise LoadError(f"{spec['name']!r} is {type(found).__name__} {_short(found)}, not a function.")
    return found


def call(fn: Callable[..., Any], prompts: list[str], completions: list[str], fields: Mapping[str, list]) -> dict:
    """Runs a reward function and checks what it returns.

    Returns:
      {'values': floats} when all is well; {'raised': last lines of the traceback}; or {'bad': what is wrong} with
      'sample' where a single value is.
    """
    try:
        result = _apply(fn, prompts, completions, fields)
        if isinstance(result, str | Mapping) or not hasattr(result, "__iter__"):
            return {"bad": f"returned {_short(result)} ({type(result).__name__}), not a list of numbers"}
        values = list(result)
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
        return {"raised": _explain(error)}
    if len(values) != len(completions):
        return {"bad": f"returned {len(values)} values for {len(completions)} completions: {_short(values)}"}
    floats = []
    for index, value in enumerate(values):
        try:
            number = value.__float__()
        except (AttributeError, TypeError, ValueError, OverflowError):
            return {"bad": f"returned {_short(value)} ({type(value).__name__}), not a number", "sample": index}
        if not math.isfinite(number):
            return {"bad": f"returned {number}, not a finite number", "sample": index}
        floats.append(number)
    return {"values": floats}


def refuse_inside() -> None:
    """Raises when called in a reward worker: a script that starts training as soon as it is imported.

    Raises:
      ValueError: this process is a reward worker.
    """
    if os.environ.get(INSIDE):
        raise ValueError(
            "A reward worker imported the file of a reward function, and that file started training: put the training "
            "part of the script under `if __name__ == '__main__':`."
        )


def main() -> None:
    """Serves requests until the parent closes the pipe."""
    requests, replies = _take_pipes()
    functions: dict[str, Callable[..., Any]] = {}
    while lengths := requests.read(_LENGTHS.size):
        head, body = _LENGTHS.unpack(lengths)
        header = json.loads(requests.read(head))
        content = requests.read(body)
        if "spec" in header:
            reply = _load(header, functions)
        else:
            batch = json.loads(content)
            reply = call(functions[header["id"]], batch["prompts"], batch["completions"], batch["fields"])
        replies.write(pack(reply))
        replies.flush()


def _load(header: Mapping[str, Any], functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    sys.path.extend(path for path in header["path"] if path not in sys.path)
    try:
        functions[header["id"]] = load(header["spec"])
    except LoadError as error:
        return {"raised": str(error)}
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
        return {"raised": _explain(error)}
    return {}


def _run_file(path: str) -> Any:
    """Runs a file as a module of its own name, never as `__main__`; once per worker."""
    name = f"podrl_reward_{pathlib.Path(path).stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(path))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _apply(fn: Callable[..., Any], prompts: list[str], completions: list[str], fields: Mapping[str, list]) -> Any:
    """Calls by keyword where the function names `completions`, else by position; leaves out fields it does not take."""
    arguments = {**fields, "prompts": prompts, "completions": completions}
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn(prompts, completions, **fields)
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    named = parameters.get("completions")
    if named is not None and named.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return fn(**arguments)
    return fn(prompts, completions, **{k: v for k, v in arguments.items() if k not in ("prompts", "completions")})


def _explain(error: BaseException) -> str:
    """The traceback below our own line, at most its last 12 lines."""
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    lines = "".join(traceback.format_exception(type(error), error, inner)).rstrip().splitlines()
    return "\n".join(lines[-12:])


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything, and the report must not fail
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The request and reply pipes; what functions print goes to standard error, what they read is empty."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    life = int(os.environ.pop(LIFE))
    # The parent holds the other end and never writes. When it is gone the kernel sends SIGIO, which ends this process
    # whatever it is doing: a hung function may hold the interpreter, so no thread of ours could.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(life, select.POLLHUP)
    if gone.poll(0):
        sys.exit(0)
    return requests, replies


if __name__ == "__main__":
    main()
