"""The environment 'program': episodes run in long-lived processes of the user, which call the model over HTTP."""

import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from typing import Literal, Protocol, get_args

from podrl.environments.config import EnvironmentConfig
from podrl.environments.front import Front, FrontSettings
from podrl.environments.protocol import Ended, Result, Task
from podrl.environments.wire.requests import Answer, ParsedRequest, RefusedRequest
from podrl.mappings import JsonObject
from podrl.workers import leftovers
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import LoadError

Kind = Literal["agent", "environment", "infrastructure", "grading"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_LINE_BYTES = 64 << 20  # longest line that a program may write
_TAIL = 20  # number of last lines of standard error that the message of a failure shows
_FILE_BYTES = 64 << 20  # largest number of bytes of standard error that are kept in the run directory, for each worker
_GRACE_S = 5.0  # value of FrontSettings.grace_s for the front of the programs
# Settings that the job decides; their values in requests are ignored.
_IGNORED_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed")


class AgentFailure(Exception):  # noqa: N818 - a lost sample, not an error of this program
    """A program failed, and its sample is lost; the message ends with the last lines of the program's standard error.

    Attributes:
      kind: 'agent' if the program failed, 'infrastructure' if the endpoint failed; 'environment' or 'grading' if the
        program reported this kind (podrl.agent.Failure); 'grading' also if the program's result cannot be read.
      process_alive: True if the process is ready for its next task.
    """

    def __init__(self, kind: Kind, why: str, *, process_alive: bool = False) -> None:
        super().__init__(why)
        self.kind: Kind = kind
        self.process_alive = process_alive

    def metrics(self) -> dict[str, float]:
        """Counts the failure, for the metrics of its episode."""
        return _failure_metrics(self.kind)


class EndpointModel(Protocol):
    """The model as programs need it; podrl.environments.worker.RemoteModel implements it, and documents the methods."""

    rested: asyncio.Event

    @property
    def answers(self) -> int: ...

    async def answer(self, request: ParsedRequest, *, overlaps: bool = False) -> Answer: ...

    def drop(self, request: int) -> None: ...

    def reward(self, answer: str, reward: float) -> None: ...

    def clock(self, *, runs: bool) -> None: ...


@dataclasses.dataclass(eq=False)
class _Session:
    """The requests of one episode.

    Attributes:
      model: the episode's model; it answers one request at a time.
      failed: future that gets the episode's AgentFailure, if the episode fails; set once.
      turn: lock that a request holds while the model answers it, so that requests take turns.
      open: requests whose answers have not arrived yet.
      settled: event that is set whenever `open` gets shorter.
      numbers: numbers of the model's requests, by the numbers of the front's requests.
      dropped: requests whose clients hung up before they had the answer.
      jobs: tasks of the requests, by their numbers.
      full: True once a request found no room or no turns left.
      overridden: number of requests with a value for a setting in `_IGNORED_SETTINGS`.
    """

    model: EndpointModel
    failed: "asyncio.Future[None]"
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    open: set[int] = dataclasses.field(default_factory=set)
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    jobs: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    dropped: set[int] = dataclasses.field(default_factory=set)
    numbers: dict[int, int] = dataclasses.field(default_factory=dict)
    full: bool = False
    overridden: int = 0

    def fail(self, kind: Kind, why: str) -> None:
        """Ends the episode with a failure."""
        if not self.failed.done():
            self.failed.set_exception(AgentFailure(kind, why))

    def settle(self, number: int) -> None:
        """Forgets a request that is answered or refused."""
        self.open.discard(number)
        self.settled.set()


class ProgramEnvironment:
    """Runs an episode for each task in a process of the user's program.

    A process runs one episode at a time, and then takes the next task. It reads one JSON object per line, which holds
    the task, the endpoint's address and the key of the episode. It answers with one JSON object per line. podrl.agent
    has the program's side of this protocol.
    """

    def __init__(self, config: EnvironmentConfig, folder: str) -> None:
        """Stores the settings; processes start when they are needed.

        Args:
          config: settings of the environments, which name the program.
          folder: directory of the file for the programs' standard error; '' writes to this process's standard error.

        Raises:
          podrl.workers.user_objects.LoadError: there is no such command, file or module.
        """
        self._command = config.command
        missing = "" if shutil.which(self._command[0]) else f"command {self._command[0]!r}"
        if missing and pathlib.Path(self._command[0]).is_file():
            raise LoadError(
                f"the file {self._command[0]!r} is not executable: run chmod +x on it, or begin with its interpreter, "
                f"such as 'python {self._command[0]}'."
            )
        if self._command[0] == "python":
            missing = _missing_code(self._command[1:])
            self._command[0] = sys.executable
        if missing:
            raise LoadError(f"there is no {missing}.")
        self._config, self._log = config, _Log(folder)
        self._free = asyncio.Semaphore(config.processes)
        self._idle: list[_Runner] = []
        self._sessions: dict[str, _Session] = {}
        self._session_of_request: dict[int, _Session] = {}  # sessions by the numbers of their open requests
        self._front: Front | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    async def run(self, task: Task, model: EndpointModel) -> Result:
        """Plays one episode, see podrl.environments.protocol.Environment.

        Raises:
          AgentFailure: the program or the endpoint failed. If the program failed after a request had found no room or
            no turns left, there is no error: the episode only ends.
        """
        model.clock(runs=False)  # the wait for a free process does not count as time of the episode
        async with self._process_slot(model):
            front = await self._get_front()
            runner = self._idle.pop() if self._idle else await _Runner.start(self._command, front.address, self._log)
            name = str(next(self._numbers))
            session = self._sessions[name] = _Session(model, asyncio.get_running_loop().create_future())
            model.clock(runs=True)
            try:
                line = {"id": name, "base_url": front.address, "api_key": front.open(name)}
                result = await self._run_task(runner, session, line | {"task": dataclasses.asdict(task)})
                await self._keep_process(runner)
                return result
            except AgentFailure as failure:
                if failure.process_alive:
                    await self._keep_process(runner)
                else:
                    await runner.kill()
                if session.full and failure.kind == "agent":
                    return Result(metrics=_failure_metrics(None))  # the program gave up for lack of room
                raise AgentFailure(failure.kind, f"{failure}{runner.tail()}") from None
            except BaseException:
                runner.kill_now()
                raise
            finally:
                front.close(name)
                del self._sessions[name]
                for number, job in session.jobs.items():
                    self._session_of_request.pop(number, None)
                    job.cancel()
                session.failed.cancel()

    async def _keep_process(self, runner: "_Runner") -> None:
        """Keeps a process for the next episode; ends it if env.processes idle processes are kept already.

        An episode that rests until the next window keeps its process, and another episode may start a new process. So
        there can be more processes than env.processes.
        """
        if len(self._idle) < self._config.processes:
            self._idle.append(runner)
        else:
            await runner.kill()

    @contextlib.asynccontextmanager
    async def _process_slot(self, model: EndpointModel) -> AsyncIterator[None]:
        """Waits until fewer than env.processes episodes are open; episodes that have rested do not count."""
        if model.rested.is_set():
            yield
            return
        await self._free.acquire()
        leaving = asyncio.ensure_future(model.rested.wait())
        leaving.add_done_callback(lambda _: self._free.release())  # runs once, even if `leaving` is cancelled
        try:
            yield
        finally:
            leaving.cancel()

    async def _run_task(self, runner: "_Runner", session: _Session, line: JsonObject) -> Result:
        """Gives a task to a process; waits until the process has answered and every answer of the model has arrived."""
        working = asyncio.ensure_future(runner.run_task(line))
        try:
            await asyncio.wait({working, session.failed}, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            reply = working.result()
            while session.open:
                session.settled.clear()
                settling = asyncio.ensure_future(session.settled.wait())
                await asyncio.wait(
                    {settling, session.failed}, return_when=asyncio.FIRST_COMPLETED, timeout=2 * _GRACE_S
                )
                late = not settling.done()
                settling.cancel()
                if session.failed.done():
                    session.failed.result()
                if late and not any(number in session.dropped for number in session.open):
                    raise AgentFailure("agent", "The program ended while a request of it was open: await every answer.")
        finally:
            working.cancel()
        failures = _failure_metrics(None) | {"overridden": float(session.overridden)}
        return dataclasses.replace(reply, metrics={**failures, **reply.metrics})

    async def _get_front(self) -> Front:
        async with self._starting:
            if self._front is None:
                front = Front(FrontSettings(parser=self._config.parser, grace_s=_GRACE_S), Limits(), self)
                await front.start()
                self._front = front
            return self._front

    async def _answer(self, session: _Session, number: int, request: ParsedRequest, *, overlaps: bool) -> None:
        front = self._front
        assert front is not None
        try:
            _check(request)
            async with session.turn:
                if number in session.dropped:
                    return
                session.numbers[number] = session.model.answers
                answer = await session.model.answer(request, overlaps=overlaps)
            session.overridden += any(getattr(request.model_request, name) is not None for name in _IGNORED_SETTINGS)
            front.send_answer(number, answer)
        except (RefusedRequest, Ended) as error:
            session.settle(number)
            session.numbers.pop(number, None)
            if isinstance(error, Ended):
                session.full = True
                why = f"The maximum context length of this episode is reached, or its turns are over. {error}"
                error = RefusedRequest(400, "context_length_exceeded", why, "messages")
            front.send_refusal(number, error)

    def _take_reward(self, session: _Session, number: int, answer: str, reward: float) -> None:
        """Adds a reward at once, without waiting for the model, because the program may end after this request."""
        assert self._front is not None
        try:
            session.model.reward(answer, reward)
        except RefusedRequest as error:
            self._front.send_refusal(number, error)
        else:
            self._front.send_answer(number, Answer(answer, 0, (), ()))

    # The methods of podrl.environments.front.Handler.

    def on_request(self, number: int, episode: str, request: ParsedRequest) -> None:
        """Answers a request as soon as the model is free."""
        if (session := self._sessions.get(episode)) is None:
            return  # the front refused the request when the episode's key was closed
        if (reward := request.model_request.reward) is not None:
            self._take_reward(session, number, *reward)
            return
        overlaps = bool(session.open)
        session.open.add(number)
        self._session_of_request[number] = session
        session.jobs[number] = asyncio.create_task(self._answer(session, number, request, overlaps=overlaps))

    def on_disconnect(self, number: int) -> None:
        """Removes an answer from the sample if the client of its request hung up: nobody acted on the answer."""
        if (session := self._session_of_request.get(number)) is not None:
            session.dropped.add(number)
            session.jobs[number].add_done_callback(lambda job: self._drop(session, number, job))

    def _drop(self, session: _Session, number: int, job: "asyncio.Task[None]") -> None:
        if job.cancelled() or self._session_of_request.pop(number, None) is None:
            return  # the episode has ended
        if job.exception() is None and number in session.numbers:
            session.model.drop(session.numbers[number])
        session.settle(number)

    def on_delivered(self, number: int) -> None:
        """Forgets a request, because the program has got the answer to it."""
        if (session := self._session_of_request.pop(number, None)) is not None:
            session.settle(number)

    def on_failure(self, error: Exception) -> None:
        """Ends every open episode with a failure of the infrastructure; the next episode starts another front."""
        self._front = None
        for session in self._sessions.values():
            session.fail("infrastructure", str(error))


class _Log:
    """Writes the standard error of programs to a file, or to this process's standard error, up to `_FILE_BYTES`."""

    def __init__(self, folder: str) -> None:
        self._path = pathlib.Path(folder) / f"program.{os.getpid()}" if folder else None
        self._left = _FILE_BYTES

    def add(self, line: bytes) -> None:
        if self._left < len(line):
            return
        self._left -= len(line)
        if self._path is None:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line)


class _Runner:
    """A process of the program."""

    def __init__(self, process: asyncio.subprocess.Process, log: _Log, mark: str) -> None:
        self._process, self._log, self._mark = process, log, mark
        self._last: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self._reading = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, command: list[str], address: str, log: _Log) -> "_Runner":
        """Starts the program; it gets the address in its environment, and the key of each episode with the task.

        A key never goes into the arguments of the command, which all users of the machine can read.
        """
        # The mark, an environment variable, is how podrl.workers.leftovers finds processes to end. It begins with this
        # worker's own mark, so that the end of the worker also ends the program.
        mark = f"{os.environ.get(leftovers.MARK, '')}{secrets.token_hex(8)}."
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": address, leftovers.MARK: mark},
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        return cls(process, log, mark)

    async def run_task(self, line: JsonObject) -> Result:
        """Gives the process a task.

        Raises:
          AgentFailure: the process ended, its program raised an error, or its answer is not a result.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            await self._process.stdin.drain()
            while output := await self._process.stdout.readline():
                reply = _object(output)
                if reply.get("id") == line["id"]:
                    return _result(reply, self._log)
                self._log.add(output)  # an ordinary line of output, which is not the program's answer
        except ConnectionError:
            pass
        except ValueError as error:
            raise AgentFailure("agent", f"The program wrote a line of more than {_LINE_BYTES} bytes.") from error
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1.0)
        code = self._process.returncode
        ended = "closed its standard output" if code is None else f"ended with exit code {code}"
        raise AgentFailure("agent", f"The program {ended} before it had answered its task.")

    def tail(self) -> str:
        """Returns the last lines of standard error, for the end of a message."""
        return "".join(f"\n  {line}" for line in self._last)

    async def kill(self) -> None:
        """Kills the process and its descendants, and reads the rest of its standard error."""
        self.kill_now()
        # Before Python 3.13 asyncio also waits for the end of the pipes, which a descendant that hid itself may hold.
        await asyncio.wait({asyncio.ensure_future(self._process.wait()), self._reading}, timeout=1.0)
        vars(self._process)["_transport"].close()  # asyncio has no public way to let go of the pipes

    def kill_now(self) -> None:
        leftovers.end_marked(self._mark)  # comes first, because a killed process no longer shows its descendants
        # While a process group has members, no new process gets the group's number. So if the program has ended and a
        # process has its number, the group is empty, and this process is a stranger that must not be killed.
        if self._process.returncode is None or not os.path.exists(f"/proc/{self._process.pid}"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # raised at a line that is too long
            while line := await self._process.stderr.readline():
                self._last.append(line.decode(errors="replace").rstrip()[:500])
                self._log.add(line)


def _missing_code(arguments: list[str]) -> str:
    """Names the file or module in the arguments of `python` that does not exist; '' if nothing is missing.

    A program that cannot start would otherwise fail only with its first episode, after the models were loaded.
    """
    match arguments:
        case [file, *_] if file.endswith(".py") and not pathlib.Path(file).is_file():
            return f"file {str(pathlib.Path(file).absolute())!r}"
        case ["-m", module, *_]:
            try:
                found = importlib.util.find_spec(module) is not None
            except ModuleNotFoundError:  # a package before a dot does not exist
                found = False
            except Exception:  # noqa: BLE001 - find_spec imports the package; the program will show the package's error
                found = True
            return "" if found else f"module {module!r}"
    return ""


def _check(request: ParsedRequest) -> None:
    """Refuses a request that training cannot honour.

    Raises:
      RefusedRequest: a field cannot be honoured; the message names the field.
    """
    if (samples := request.model_request.samples) > 1:
        why = f"n={samples} is not served in training: make {samples} requests."
        raise RefusedRequest(400, "unsupported_parameter", why, "n")


def _object(line: bytes) -> JsonObject:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(line), dict):
            return found
    return {}


def _result(reply: JsonObject, log: _Log) -> Result:
    """Reads the result of a program.

    Raises:
      AgentFailure: the reply is not a result, or says that the program raised an error.
    """
    if "error" in reply:
        error = str(reply["error"])
        log.add(error.encode(errors="replace") + b"\n")
        kind = reply.get("kind", "agent")
        if kind not in _KINDS:
            raise _bad_value("kind", kind, f"one of {', '.join(_KINDS)}")
        raise AgentFailure(kind, f"The program raised an error.\n{error.strip()[-4000:]}", process_alive=True)
    reward, metrics, text = reply.get("reward"), reply.get("metrics") or {}, reply.get("text")
    if not isinstance(metrics, dict):
        raise _bad_value("metrics", metrics, "an object of numbers")
    for name, value in {**metrics, "reward": 0.0 if reward is None else reward}.items():
        if not isinstance(value, int | float) or not abs(value) < 1e300:
            raise _bad_value(name, value, "a finite number")
    if text is not None and not isinstance(text, str):
        raise _bad_value("text", text, "a text")
    return Result(None if reward is None else float(reward), {name: float(x) for name, x in metrics.items()}, text)


def _bad_value(name: str, value: object, must: str) -> AgentFailure:
    return AgentFailure(
        "grading", f"The program gave {name}={str(value)[:200]!r}, which must be {must}.", process_alive=True
    )


def _failure_metrics(kind: Kind | None) -> dict[str, float]:
    """Makes the metrics that count a failure of this kind; None counts no failure."""
    return {f"failed/{each}": float(each == kind) for each in _KINDS}
