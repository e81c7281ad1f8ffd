"""The process that a program runs in, and the process that starts it: neither ever holds the tests."""

import gc
import operator
import os
import random
import socket
import sys
import types
from typing import Any

from podrl.rewards.sandbox import kernel
from podrl.rewards.sandbox.messages import Bounds
from podrl.rewards.sandbox.values import Reference, decode, encode, receive, send

_ITEMS = 1_000_000  # largest number of items that a test may read from an iterator


def start_programs(control: socket.socket, limits: Bounds) -> None:
    """Starts a process for every message on `control`; answers with the process id, then with the status at the end.

    A message is 'script' or 'functions' with three descriptors: standard input, standard output, and the channel that
    brings the program's source.
    """
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 16, 3)
        if not kind:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            try:
                _run(kind.decode(), descriptors, limits)
            finally:
                os._exit(1)
        for one in descriptors:
            os.close(one)
        send(control, pid)
        _, status = os.waitpid(pid, 0)
        send(control, status)


def _run(kind: str, descriptors: list[int], limits: Bounds) -> None:
    """Runs a program in this process, which then ends."""
    kernel.die_with_parent()
    nothing = os.open("/dev/null", os.O_RDWR)
    descriptors = [
        os.dup2(one, 100 + place) for place, one in enumerate(descriptors)
    ]  # copies with high numbers, because the lines below replace the descriptors 0 to 3
    # If functions are called, no process reads the program's output, so the program would block when the pipe is full.
    printed = descriptors[1] if kind == "script" else nothing
    for place, source in enumerate((descriptors[0], printed, nothing)):
        os.dup2(source, place)
    os.dup2(descriptors[2], 3)
    kernel.close_all_but(3)
    channel = socket.socket(fileno=3)
    source = receive(channel)
    sys.path[:] = limits["imports"]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, encoding="utf-8") for n, mode in enumerate("rww"))
    sys.argv = ["program.py"]
    random.seed(0)
    kernel.limit(limits)
    kernel.filter_calls(kernel.PROGRAM)
    gc.enable()
    if kind == "script":
        channel.close()
        _script(source)
    else:
        _functions(source, channel)


def _script(source: str) -> None:
    """Runs the program as a script, with the exit status that `python program.py` would have."""
    status = 0
    try:
        _execute(source, "__main__")
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever the program raises, it has failed
        status = 1
    try:
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - sys.stdout may be an object of the program
        status = status or 1
    os._exit(status & 255)


def _functions(source: str, channel: socket.socket) -> None:
    """Runs the program; then, until the channel ends, answers requests for the objects that it defines."""
    objects: list[object] = []

    def refer(value: object) -> Reference:
        objects.append(value)
        return Reference(len(objects) - 1, type(value).__name__)

    def resolve(reference: Reference) -> object:
        return objects[reference.number]

    try:
        names = _execute(source, "program")
        found = {name: encode(value, refer) for name, value in names.items() if not name.startswith("__")}
        send(channel, {"names": found})
    except BaseException as error:  # noqa: BLE001 - reported to the tests, which fail
        send(channel, _raised(error))
        os._exit(1)
    while True:
        request = receive(channel)
        try:
            arguments = decode(request["arguments"], resolve)
            keywords = decode(request["keywords"], resolve)
            value = _apply(request["operation"], arguments, keywords)
            reply = {"value": encode(value, refer), "arguments": encode(arguments[1:], refer)}
        except BaseException as error:  # noqa: BLE001 - raised again by the test that asked
            reply = _raised(error)
        send(channel, reply)


def _apply(operation: str, arguments: list[Any], keywords: dict[str, Any]) -> object:
    """Applies a test's operation on a stand-in to the program's object, which is the first argument."""
    this, *rest = arguments
    if operation == "call":
        return this(*rest, **keywords)
    if operation == "items":
        items = []
        for item in this:
            items.append(item)
            if len(items) > _ITEMS:
                raise ValueError(f"more than {_ITEMS} items")
        return items
    known = {"len": len, "str": str, "repr": repr, "next": next, "attribute": getattr, "assign": setattr}
    known |= {"item": operator.getitem, "put": operator.setitem, "contains": operator.contains}
    return known[operation](this, *rest)


def _raised(error: BaseException) -> dict[str, object]:
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:500]
    except BaseException:  # noqa: BLE001 - the program's own __str__ may raise anything
        text = ""
    return {"raised": names, "text": text}


def _execute(source: str, name: str) -> dict[str, object]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)  # running the program is the purpose of this process
    return dict(module.__dict__)
