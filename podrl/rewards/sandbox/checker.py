"""The process that tests a program; the program's own process can neither read the tests nor send the verdict.

A test of functions is Python code that runs in this process. Its namespace has the plain values that the program
defines, and a stand-in for everything else that the program defines. Arguments go to the program's process as plain
values or as references to its objects, and results come back in the same way. So no object of the program can make
itself equal to a test's expected value.
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
from podrl.rewards.sandbox.messages import Bounds, ProgramTests, ScriptTest, Verdict
from podrl.rewards.sandbox.program import start_programs
from podrl.rewards.sandbox.values import Reference, decode, encode, receive, send

_MESSAGE_LENGTH = 300
_PER_BYTE = 8  # memory per byte of the request, in bytes: the request is held as JSON and as objects
T = TypeVar("T")
_WORD = re.compile(r"[^\W\d]\w*")


class TestError(Exception):
    """A test is not valid Python: an error of the data, whatever the program does."""


class _MalformedError(Exception):
    """The program's process sent a message that podrl.rewards.sandbox.program never sends: all tests then fail."""


class _Program:
    """A program's process, with its input, its output and the channel for messages.

    Attributes:
      channel: socket by which the program's source and requests go to the process, and replies come back.
      output: descriptor of the pipe that the program prints to.
      pid: id of the process.
    """

    def __init__(self, control: socket.socket, kind: str, source: str, text: str) -> None:
        self._control = control
        self.channel, theirs = socket.socketpair()
        self.output, written = os.pipe()
        stdin = os.memfd_create("input")
        os.write(stdin, text.encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        socket.send_fds(control, [kind.encode()], [stdin, written, theirs.fileno()])
        for one in (stdin, written):
            os.close(one)
        theirs.close()
        self.pid = receive(control)
        with contextlib.suppress(OSError):  # the process may have ended already
            send(self.channel, source)

    def end(self, *, kill: bool) -> int:
        """Waits for the end of the process; kills it first if `kill` is True. Returns the wait status."""
        if kill:
            with contextlib.suppress(ProcessLookupError):  # the process may have ended by itself
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.output)
        return receive(self._control)


def check(job: socket.socket, limits: Bounds) -> None:
    """Reads a job from a socket, tests its program, and sends the verdict.

    This process must be isolated already: it and the processes that it starts are then alone in their namespaces.
    """
    control, theirs = socket.socketpair()
    # The process that starts programs is forked before the request is read, so that it never holds the tests.
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
    # The memory for the request is added to the limit, which is meant only for the tests and the program's replies.
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


def _are_printed(tests: list[str] | list[ScriptTest]) -> TypeGuard[list[ScriptTest]]:
    return bool(tests) and isinstance(tests[0], dict)


def _scripts(control: socket.socket, request: ProgramTests, tests: list[ScriptTest], limits: Bounds) -> Verdict:
    """Runs the program once for every input, and compares its output with the output of the test."""
    passed, problem, end = [], "", time.monotonic() + limits["wall_s"]
    for number, test in enumerate(tests):
        program = _Program(control, "script", request["program"], test["input"])
        printed = _read(program.output, end, limits["file_mb"] << 20)
        status = program.end(kill=printed is None)
        passed.append(status == 0 and printed is not None and _lines(printed) == _lines(test["output"]))
        if not passed[-1] and not problem:
            problem = f"test {number}: " + _end_of(status) if status else f"test {number}: it printed {printed!r}"
        if not passed[-1] and not request["all"]:
            break
    return {"passed": passed, "said": problem[:_MESSAGE_LENGTH]}


def _read(descriptor: int, end: float, most: int) -> str | None:
    """Reads all output until the pipe ends; None if there are more than `most` bytes, or the time `end` has come.

    `end` is a time of the monotonic clock, in seconds.
    """
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
    """Splits a text into lines without the space at their ends; drops empty lines at the end of the text."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _functions(control: socket.socket, request: ProgramTests, limits: Bounds) -> Verdict:
    """Runs the program once, then every test with the names that the program defines."""
    sources = [request["setup"], *request["tests"]]
    codes = [_compiled(sources[0], "the set-up"), *(_compiled(test, test) for test in sources[1:])]
    program = _Program(control, "functions", request["program"], "")
    remote = _Remote(program, time.monotonic() + limits["wall_s"])
    passed, problem = [], ""
    try:
        # Tests get only names that they mention. A program can replace neither Python's own names nor names that begin
        # with two underscores.
        wanted = {word for source in sources for word in _WORD.findall(source) if not word.startswith("__")}
        names = {
            name: value for name, value in remote.names().items() if name in wanted and not hasattr(builtins, name)
        }
        names |= {"__name__": "tests", "__builtins__": builtins}
        exec(codes[0], names)  # this process is the sandbox for code of the data set
    except BaseException as error:  # noqa: BLE001 - the program does not run, or lacks a name that the set-up needs
        program.end(kill=True)
        return {"passed": [False] * len(request["tests"]), "said": _name(error)[:_MESSAGE_LENGTH]}
    for number, code in enumerate(codes[1:]):
        try:
            exec(code, names)  # a test is code of the data set, like the set-up
            passed.append(True)
        except BaseException as error:  # noqa: BLE001 - a test that raises has failed
            passed.append(False)
            problem = problem or f"test {number}: {_name(error)}"
        if remote.malformed:
            passed, problem = [False] * len(request["tests"]), remote.malformed
        if remote.malformed or not (passed[-1] or request["all"]):
            break
    program.end(kill=True)
    return {"passed": passed, "said": problem[:_MESSAGE_LENGTH], "unusable": remote.unusable[:_MESSAGE_LENGTH]}


def _compiled(source: str, what: str) -> CodeType:
    try:
        return compile(source, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestError(f"{what!r} of the record's tests is not Python: {error}") from None


def _name(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - the program may fail to give the text of a stand-in in the error
        return type(error).__name__


def _end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it ended with exit code {os.waitstatus_to_exitcode(status)}"


class _Remote:
    """Sends requests to a program's process, and makes stand-ins for its objects.

    Attributes:
      malformed: fault in a message from the program's process; '' if no message had a fault. The program itself can
        write to the channel, so a message cannot be trusted, and is only read as data.
      unusable: complaint about a value that a test gave the program and that is not plain data; '' for none.
    """

    def __init__(self, program: _Program, end: float) -> None:
        self._program, self._end = program, end
        self.malformed = self.unusable = ""

    def names(self) -> dict[str, object]:
        """Returns the names that the program's process reports as defined, with their values or stand-ins."""
        names = self._reply("names")["names"]
        if not isinstance(names, dict):
            raise self._not_a_message("its names are not a mapping")
        return {name: self._local(value) for name, value in names.items()}

    def ask(self, operation: str, arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
        """Makes the program's process carry out an operation; updates the mutable arguments that the operation changed.

        Args:
          operation: name of the operation, see `podrl.rewards.sandbox.program`.
          arguments: the stand-in of an object of the program, then arguments of the operation.
          keywords: keyword arguments of a call.

        Returns:
          The result, plain or a stand-in.

        Raises:
          Exception: the exception that the operation raised.
          RuntimeError, TimeoutError: the program has ended, or is late.
          TypeError: an argument is neither plain data nor a stand-in.
          _MalformedError: the reply is malformed.
        """
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
        for argument, left in zip(arguments[1:], now, strict=True):
            _update(argument, left)
        return self._local(reply["value"])

    def _reply(self, *keys: str) -> dict[str, object]:
        """Receives the next message, which must have exactly these keys.

        Raises:
          Exception: the exception that the message names.
          RuntimeError, TimeoutError: the program has ended, or is late.
          _MalformedError: the message is malformed, or has other keys.
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
        except Exception as error:  # noqa: BLE001 - a program can write anything
            raise self._not_a_message(_name(error)) from None

    def _refer(self, value: object) -> Reference:
        if type(value) is StandIn:
            return object.__getattribute__(value, "_reference")
        self.unusable = f"a test gives the program a {type(value).__name__}: only plain values can be given"
        raise TypeError(self.unusable)

    def _not_a_message(self, why: str) -> _MalformedError:
        self.malformed = f"a message of the program's process is malformed: {why}"
        return _MalformedError(self.malformed)


def _update(argument: object, now: object) -> None:
    """Gives a mutable argument the value that the argument's copy in the program's process has after a call."""
    if not isinstance(argument, type(now)) or argument == now:  # a value of a subclass was sent as the plain type
        return
    match argument, now:
        case (list(), list()) | (bytearray(), bytearray()):
            argument[:] = now
        case (dict(), dict()) | (set(), set()):
            argument.clear()
            argument.update(now)


def _exception(names: Sequence[str], text: str) -> BaseException:
    """Makes an exception like the exception that a program raised, of the nearest of Python's own types.

    Args:
      names: names of the types of the program's exception, the nearest first.
      text: text of the program's exception.
    """
    for kind in (getattr(builtins, str(name), None) for name in names):
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # the type needs more arguments, such as UnicodeDecodeError
                continue
    return RuntimeError(f"{names[0]}: {text}")


class StandIn:
    """Stands for an object of the program in a test: it can be called and read, and equals nothing but itself."""

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
