"""The worker's side of podrl.workers.process: takes its pipes, applies its limits, and ends when its parent ends.

It imports no jax and, apart from podrl, only the standard library.
"""

import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO

from podrl.mappings import JsonObject
from podrl.workers.frames import LENGTHS, pack
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import explain_load, extend_path, load_function

INSIDE = "PODRL_USER_WORKER"
LIFE = "PODRL_LIFE_FD"


def refuse_inside() -> None:
    """Refuses to train in a worker process: it imports a user's script only to call one of the script's functions.

    Raises:
      ValueError: this process is a worker.
    """
    if os.environ.get(INSIDE):
        raise ValueError(
            "A worker imported the file of a reward function, transform, tool or environment, and that file started "
            "training: put the training part of the script under `if __name__ == '__main__':`."
        )


def begin() -> tuple[BinaryIO, BinaryIO]:
    """Applies the limits on the command line (a Limits as JSON); returns (pipe of requests, pipe of replies)."""
    requests, replies = _claim_pipes()
    Limits(**json.loads(sys.argv[1])).apply()
    del sys.argv[1:]
    return requests, replies


def serve(
    describe: Callable[[Callable[..., Any], JsonObject], JsonObject],
    call: Callable[[Callable[..., Any], Any], JsonObject],
) -> None:
    """Loads functions of users and calls them, one request after the other, until the parent closes the pipe.

    Args:
      describe: function that takes (a user's function, its spec) and returns the description for the parent.
      call: function that takes (a user's function, the parent's arguments as parsed JSON) and returns the answer.
    """
    requests, replies = begin()
    functions: dict[str, Callable[..., Any]] = {}
    while len(lengths := requests.read(LENGTHS.size)) == LENGTHS.size:
        head, body = LENGTHS.unpack(lengths)
        start, content = requests.read(head), requests.read(body)
        if len(content) < body or len(start) < head:  # the parent ended in the middle of a request
            return
        match header := json.loads(start):
            case {"call": key}:
                reply = call(functions[key], json.loads(content))
            case {"load": key, "spec": spec, "path": path}:
                extend_path(path)
                try:
                    found, settings = load_function(spec), spec.get("settings")
                    functions[key] = found if settings is None else found(**settings)
                    reply = describe(functions[key], spec)
                except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises an error
                    reply = {"raised": explain_load(error, spec.get("file", ""))}
            case _:
                raise AssertionError(header)
        replies.write(pack({"number": header["number"], "reply": reply}))
        replies.flush()


async def frames(requests: BinaryIO) -> AsyncIterator[tuple[JsonObject, bytes]]:
    """Yields (header, body) of each request, on the running event loop, until the parent closes the pipe."""
    import asyncio  # imported here, because most workers have no event loop

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    while True:
        try:
            head, body = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
            frame = await reader.readexactly(head + body)
        except asyncio.IncompleteReadError:
            return
        yield json.loads(frame[:head]), frame[head:]


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the pipes of requests and of replies, and ties this process's life to its parent's.

    Output of the user's code then goes to standard error, and its standard input is empty.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    life = int(os.environ.pop(LIFE))
    # The parent holds the other end and never writes. When the parent is gone the kernel sends SIGIO, which ends this
    # process at any point of its work. A thread could not end it, because a hung function may hold the interpreter.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life, select.POLLHUP)
    if poll.poll(0):
        sys.exit(0)
    return requests, replies
