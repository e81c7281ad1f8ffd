"""The process that tests a program: what it holds, the program's process cannot read, nor answer for it.

A test of functions is Python that runs here, in a namespace with a stand-in for everything that the program defines:
calls go to the program's process as plain values and come back as plain values, so that no object of the program can
make itself equal to what a test expects.
"""

import builtins
import contextlib
import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import TypeGuard, TypeVar

from podrl.rewards.sandbox import kernel
from podrl.rewards.sandbox.messages import Bounds, Printed, Testing, Verdict
from podrl.rewards.sandbox.program import start_programs
from podrl.rewards.sandbox.values import Reference, decode, encode, receive, send

_SAID = 300
_PER_BYTE = 8  # bytes of memory for a byte of the request, as JSON and as objects
T = TypeVar("T")
_WORD = re.compile(r"[^\W\d]\w*")


class TestError(Exception):
    """A test that is no Python: an error of the data, whatever the program does."""


class _MalformedError(Exception):
    """The program's process sent what podrl.rewards.sandbox.program never sends: no test of it passes."""


class _Program:
    """A program's process, with what it reads and prints."""

    def __init__(self, control: socket.socket, kind: str, source: str, text: str) -> None:
        self._control = control
        self.channel, theirs = socket.socketpair()
        self.output, written = os.pipe()
        given = os.memfd_create("input")
        os.write(given, text.encode(errors="replace"))
        os.lseek(given, 0, os.SEEK_SET)
        socket.send_fds(control, [kind.encode()], [given, written, theirs.fileno()])
        for one in (given, written):
            os.close(one)
        theirs.close()
        self.pid = receive(control)
        with contextlib.suppress(OSError):  # it has ended
            send(self.channel, source)

    def end(self, *, kill: bool) -> int:
        """The status it ends with."""
        if kill:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.output)
        return receive(self._control)


def check(job: socket.socket, limits: Bounds) -> None:
    """Answers the job on a socket: isolated already, this process and those it starts are all there is."""
    control, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            job.close()
            control.close()
            start_programs(theirs, limits)
        finally:
            os._exit(1)
    theirs.close()
    kernel.filter_calls(kernel.CHECKER)
    content = bytearray()
    while part := job.recv(1 << 20):
        content += part
    # Tests and replies of the program are kept beside the request, which is read before anything of the program is.
    kernel.limit_memory((limits["memory_mb"] << 20) + _PER_BYTE * len(content))
    request = json.loads(content)
    try:
        tests = request["tests"]
        if _are_printed(tests):
            verdict = _scripts(control, request, tests, limits)
        else:
            verdict = _functions(control, request, limits)
    except TestError as error:
        verdict = {"passed": [], "said": "", "error": str(error)}
    job.sendall(json.dumps(verdict).encode())


def _are_printed(tests: list[str] | list[Printed]) -> TypeGuard[list[Printed]]:
    return bool(tests) and isinstance(tests[0], dict)


def _scripts(control: socket.socket, request: Testing, tests: list[Printed], limits: Bounds) -> Verdict:
    """Runs the program once for every input, and compares what it prints."""
    passed, said, end = [], "", time.monotonic() + limits["wall_s"]
    for number, test in enumerate(tests):
        program = _Program(control, "script", request["program"], test["input"])
        printed = _read(program.output, end, limits["file_mb"] << 20)
        status = program.end(kill=printed is None)
        passed.append(status == 0 and printed is not None and _lines(printed) == _lines(test["output"]))
        if not passed[-1] and not said:
            said = f"test {number}: " + _end_of(status) if status else f"test {number}: it printed {printed!r}"
        if not passed[-1] and not request["all"]:
            break
    return {"passed": passed, "said": said[:_SAID]}


def _read(descriptor: int, end: float, most: int) -> str | None:
    """All that is printed until the pipe ends; None if it is too much or takes too long."""
    content, poll = bytearray(), select.poll()
    poll.register(descriptor, select.POLLIN)
    while (left := end - time.monotonic()) > 0 and poll.poll(left * 1000):
        part = os.read(descriptor, 1 << 16)
        if not part:
            return content.decode(errors="replace")
        content += part
        if len(content) > most:
            return None
    return None


def _lines(text: str) -> list[str]:
    """Lines without the space at their ends; empty ones at the end do not count."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _functions(control: socket.socket, request: Testing, limits: Bounds) -> Verdict:
    """Runs the program once, and every test against what it defines."""
    sources = [request["setup"], *request["tests"]]
    codes = [_compiled(sources[0], "the set-up"), *(_compiled(test, test) for test in sources[1:])]
    program = _Program(control, "functions", request["program"], "")
    remote = _Remote(program, time.monotonic() + limits["wall_s"])
    passed, said = [], ""
    try:
        # Python's own names and those with two underscores are never the program's, nor is one that no test mentions.
        wanted = {word for source in sources for word in _WORD.findall(source) if not word.startswith("__")}
        names = {name: value for name, value in remote.names().items() if name in wanted and not _is_python(name)}
        names |= {"__name__": "tests", "__builtins__": builtins}
        exec(codes[0], names)  # a test of the data set, in its sandbox
    except BaseException as error:  # noqa: BLE001 - the program does not run, or has not what the set-up needs
        program.end(kill=True)
        return {"passed": [False] * len(request["tests"]), "said": _name(error)[:_SAID]}
    for number, code in enumerate(codes[1:]):
        try:
            exec(code, names)  # as above
            passed.append(True)
        except BaseException as error:  # noqa: BLE001 - a test that raises has failed
            passed.append(False)
            said = said or f"test {number}: {_name(error)}"
        if remote.malformed:
            passed, said = [False] * len(request["tests"]), remote.malformed
        if remote.malformed or not (passed[-1] or request["all"]):
            break
    program.end(kill=True)
    return {"passed": passed, "said": said[:_SAID], "unusable": remote.unusable[:_SAID]}


def _is_python(name: str) -> bool:
    return hasattr(builtins, name)


def _compiled(source: str, what: str) -> CodeType:
    try:
        return compile(source, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestError(f"the test {what!r} is no Python: {error}") from None


def _name(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - its text asks the program for that of a stand-in
        return type(error).__name__


def _end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it ended with exit code {os.waitstatus_to_exitcode(status)}"


class _Remote:
    """Requests to a program's process, and stand-ins of its objects.

    Attributes:
      malformed: the fault of a message from the program's process; '' while no message had one. A program can write
        to the channel itself, so a message proves nothing and is read as data.
      unusable: a value that a test gave the program and that is not plain data; '' for none.
    """

    def __init__(self, program: _Program, end: float) -> None:
        self._program, self._end = program, end
        self.malformed = self.unusable = ""

    def names(self) -> dict[str, object]:
        """The names that the program says it defines."""
        names = self._reply("names")["names"]
        if not isinstance(names, dict):
            raise self._not_a_message("its names are no mapping")
        return {name: self._local(value) for name, value in names.items()}

    def ask(self, operation: str, arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
        """The result of an operation, or its exception; mutable arguments take their new values."""
        refer = self._refer
        request = {"arguments": encode(list(arguments), refer), "keywords": encode(dict(keywords), refer)}
        if self.malformed:
            raise _MalformedError(self.malformed)
        try:
            send(self._program.channel, {"operation": operation, **request})
        except OSError:
            raise RuntimeError("the program has ended") from None
        reply = self._reply("value", "arguments")
        now = self._local(reply["arguments"])
        if not isinstance(now, list) or len(now) != len(arguments) - 1:
            raise self._not_a_message("it answers for other arguments")
        for given, left in zip(arguments[1:], now, strict=True):
            _update(given, left)
        return self._local(reply["value"])

    def _reply(self, *keys: str) -> dict[str, object]:
        """The next message, which has these keys and no other.

        Raises:
          Exception: the exception that the message names.
          RuntimeError, TimeoutError: the program ended, or is late.
          _MalformedError: it is no such message.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the program takes too long")
        self._program.channel.settimeout(left)
        try:
            reply = receive(self._program.channel)
        except (EOFError, OSError):
            raise RuntimeError("the program has ended, or takes too long") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._not_a_message(_name(error)) from None
        if isinstance(reply, dict) and reply.keys() == {"raised", "text"}:
            names, text = reply["raised"], reply["text"]
            if not isinstance(text, str) or not isinstance(names, list) or not names or {*map(type, names)} != {str}:
                raise self._not_a_message("it names no exception")
            raise _exception(names, text)
        if not isinstance(reply, dict) or reply.keys() != {*keys}:
            raise self._not_a_message(f"it must hold {' and '.join(keys)}")
        return reply

    def _local(self, value: object) -> object:
        try:
            return decode(value, lambda reference: StandIn(self, reference))
        except Exception as error:  # noqa: BLE001 - whatever a program can write
            raise self._not_a_message(_name(error)) from None

    def _refer(self, value: object) -> Reference:
        if type(value) is StandIn:
            return object.__getattribute__(value, "_reference")
        self.unusable = f"a test gives the program a {type(value).__name__}: only plain values can be given"
        raise TypeError(self.unusable)

    def _not_a_message(self, why: str) -> _MalformedError:
        self.malformed = f"a message of the program's process is malformed: {why}"
        return _MalformedError(self.malformed)


def _update(given: object, now: object) -> None:
    """Gives a mutable argument the value that the program's process left in its copy."""
    if type(given) is not type(now) or given == now:
        return
    match given, now:
        case (list(), list()) | (bytearray(), bytearray()):
            given[:] = now
        case (dict(), dict()) | (set(), set()):
            given.clear()
            given.update(now)


def _exception(names: Sequence[str], text: str) -> BaseException:
    """The exception that a program raised: of the nearest of Python's own types."""
    for kind in (getattr(builtins, str(name), None) for name in names):
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # it takes more, as UnicodeDecodeError does
                continue
    return RuntimeError(f"{names[0]}: {text}")


class StandIn:
    """An object of the program, in a test: it can be called and read, and equals nothing but itself."""

    def __init__(self, remote: _Remote, reference: Reference) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_reference", reference)

    def _ask(self, operation: str, *arguments: object, **keywords: object) -> object:
        return object.__getattribute__(self, "_remote").ask(operation, [self, *arguments], keywords)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return object.__getattribute__(self, "_remote").ask("call", [self, *arguments], keywords)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("assign", name, value)

    def __getitem__(self, key: object) -> object:
        return self._ask("item", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("put", key, value)

    def __contains__(self, value: object) -> bool:
        return self._plain(self._ask("contains", value), bool)

    def __iter__(self) -> Iterator[object]:
        return iter(self._plain(self._ask("items"), list))

    def __next__(self) -> object:
        return self._ask("next")

    def __len__(self) -> int:
        return self._plain(self._ask("len"), int)

    def __str__(self) -> str:
        return self._plain(self._ask("str"), str)

    def __repr__(self) -> str:
        return self._plain(self._ask("repr"), str)

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    def _plain(self, value: object, kind: type[T]) -> T:
        if not isinstance(value, kind) or type(value) is not kind:
            raise TypeError(f"the program answered with a {type(value).__name__}, not {kind.__name__}")
        return value
