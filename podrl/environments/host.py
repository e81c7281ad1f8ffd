"""Runs a process's episodes in workers; if a worker dies or blocks, other workers replay the logs of its episodes."""

import asyncio
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from podrl.environments import worker as worker_module
from podrl.environments.calls import in_template
from podrl.environments.config import PROGRAM, EnvironmentConfig, is_own
from podrl.environments.finished_episodes import NUMBER, FinishedEpisode, digest
from podrl.environments.journal import Journal
from podrl.environments.protocol import Task
from podrl.environments.toolbox import Toolbox
from podrl.environments.worker import HEARTBEAT_S
from podrl.mappings import JsonObject, PackedTokens, ToolDeclaration, TurnRecord
from podrl.types import BatchError
from podrl.workers.process import LOAD_S, Process
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import spec_at

# Function that receives a finished outside call: (task, name of the tool, start, end, failed). Start and end are times
# of time.monotonic(), seconds; `failed` is the kind of failure, or ''.
CallReporter = Callable[[Task, str, float, float, str], None]
_MAX_LOST_WORKERS = 3  # the job ends once an episode has lost this many workers in a row
_SILENT_S = 3 * HEARTBEAT_S  # a worker without a frame for this time counts as blocked by one of its episodes
_log = logging.getLogger("podrl.environments")


class EnvironmentFailure(BatchError):  # noqa: N818 - the word of docs and logs
    """The code of an environment failed; the message names the environment, the sample, the turn and the error.

    Attributes:
      why: the error with its traceback; '' if the code raised none.
      certain: True if the code is wrong whatever the model answers.
    """

    def __init__(self, text: str, why: str = "", *, certain: bool = False) -> None:
        super().__init__(text)
        self.why, self.certain = why, certain


@dataclasses.dataclass
class _Episode:
    """An episode and its log. When the episode is replayed, it must repeat the log before it may continue.

    An episode has the same number until it ends, and a new `attempt` each time it starts in a worker. An outside
    request is a call of a tool or of Model.outside, and an outside answer is its result.

    Attributes:
      number: number of the episode, from the caller.
      task: the sample that the episode plays.
      attempt: number of the episode's present start in a worker; -1 before the first.
      worker: worker of the present attempt.
      observations: the log of observations, each the fields of a podrl.environments.workers.EpisodeObservation.
      turns: the log of the model's turns, one for each observation that the model has answered.
      drawn: packed token columns (ids, log-probabilities, versions) of each turn for the record of the episode; None
        for a turn if the record does not need its tokens.
      routes: future that gets the routes (the experts of each token) for the record of the episode, see
        podrl.environments.workers.Episodes.record; None until the environment has returned with tokens to record.
      answers: the log of outside answers, by their numbers.
      descriptions: descriptions of the outside requests, by their numbers.
      open_requests: (name of the tool, or else the description; start by time.monotonic()) of each outside request
        without an answer, by number.
      jobs: asyncio tasks that answer outside requests, by the requests' numbers; the entry NUMBER is the asyncio task
        that reads or writes the record of the whole episode.
      position: number of observations in the present attempt.
      attempts: number of attempts since the last new observation, including the present attempt. An attempt that ended
        because another episode blocked the worker does not count.
      spent_s: time of the environment and its tools up to `since`, seconds.
      since: time at which the environment's present work began, by time.monotonic(); 0 while the model samples.
      timer: timer of env.deadline_s; None while the model samples.
      rested: True if the episode does not count towards env.processes (podrl.environments.workers.Episodes.rest).
      finished: an earlier run's record of the whole episode. The record is played instead of the episode itself; None
        if there is no record.
    """

    number: int
    task: Task
    attempt: int
    worker: "_WorkerProcess"
    observations: list[JsonObject] = dataclasses.field(default_factory=list)
    turns: list[JsonObject] = dataclasses.field(default_factory=list)
    drawn: list[PackedTokens | None] = dataclasses.field(default_factory=list)
    routes: asyncio.Future[Sequence[PackedTokens | None]] | None = None
    answers: dict[int, JsonObject] = dataclasses.field(default_factory=dict)
    descriptions: dict[int, str] = dataclasses.field(default_factory=dict)
    open_requests: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)
    jobs: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    position: int = 0
    attempts: int = 1
    spent_s: float = 0.0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    rested: bool = False
    finished: FinishedEpisode | None = None


class _WorkerProcess:
    """A worker process.

    Attributes:
      process: handle of the process; None until the process has been started.
      last_frame_at: time of the last frame from the process, by time.monotonic().
      handling: attempt that the process works for, by the last report of the process; None before the first report, and
        while the process handles a frame that belongs to no episode.
      loaded: future that gets the worker's reply once it has loaded the environments.
      episodes: numbers of the episodes in this process.
    """

    def __init__(self) -> None:
        self.process: Process | None = None
        self.last_frame_at = time.monotonic()
        self.handling: int | None = None
        self.loaded: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self.episodes: set[int] = set()


class EnvironmentHost:
    """Runs all episodes of a process; podrl.environments.workers.Episodes calls it and documents its methods.

    Every method but `waiting` must be called on one event loop. `turn`, `record`, `rest` and `cancel` ignore an episode
    that has ended.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        limits: Limits,
        journal: Journal | None,
        emit: Callable[[JsonObject | BaseException], None],
        on_call: CallReporter | None = None,
        error_files: pathlib.Path | None = None,
    ) -> None:
        """Stores the arguments; `open` starts the workers.

        Args:
          config: the settings of the environments and their tools.
          limits: resources that each process with user code may take, and environment variables that it may see.
          journal: the recorded answers of tools and services; None records nothing.
          emit: function that receives each error and each event ({"turn_request": episode, ...}, {"returned": episode},
            {"done": episode, ...} or {"restart": episode}).
          on_call: function that receives each outside call that is made, except calls that the journal answers; None
            reports no calls.
          error_files: directory for the standard error of MCP servers, one file each; None writes it to the standard
            error of this process.
        """
        self._config, self._limits, self._journal, self._emit = config, limits, journal, emit
        self._on_call, self._folder = on_call, error_files
        self._specs = {name: self._spec(name) for name in config.choices}
        self._toolbox = Toolbox(limits, config.server_deadline_s, emit, error_files)
        self._workers: list[_WorkerProcess] = []
        self._episodes: dict[int, _Episode] = {}
        self._by_attempt: dict[int, _Episode] = {}
        self._next_attempt = 0
        self._warned = False
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> tuple[str, list[ToolDeclaration], frozenset[str]]:
        """Starts the workers.

        Returns:
          (parser of tool calls, declarations of the tools, names of the environments that begin with an observation);
          no declarations for an environment without tools.

        Raises:
          ValueError: the environment or a tool cannot be loaded, or env.others is set with a parser that needs the
            tools listed in every prompt.
          ServiceError: an MCP server does not answer.
        """
        self._workers = [self._start_worker() for _ in range(self._config.workers)]
        loaded = [await self._wait_until_loaded(worker) for worker in self._workers]
        self._watch = asyncio.create_task(self._watch_blocked())
        own, observe_first = loaded[0]["loaded"], frozenset(loaded[0]["observe_first"])
        if own is None:
            return self._config.parser, [], observe_first
        if self._config.others and in_template(own["parser"]):
            raise ValueError(
                f"env.others={self._config.others} with env.parser={own['parser']}: every prompt names the tools of "
                "env.environment, which the records of the others cannot call. Choose a parser with tags, such as "
                "call_tool."
            )
        return own["parser"], await self._toolbox.toolset(EnvironmentConfig(**own)), observe_first

    def start(self, number: int, task: Task, recorded: bool = True) -> None:
        episode = self._episodes[number] = _Episode(number, task, -1, self._workers[0])
        if recorded and self._is_recorded(task):
            episode.jobs[NUMBER] = asyncio.create_task(self._look_up(episode))
        else:
            self._enter(episode)

    def turn(self, number: int, turn: JsonObject, drawn: PackedTokens | None = None) -> None:
        if (episode := self._episodes.get(number)) is not None:
            assert len(episode.turns) < len(episode.observations), f"episode {number} waits for no turn"
            episode.turns.append(turn)
            episode.drawn.append(drawn)
            if episode.finished is None:
                self._send_turn(episode)
            elif digest(turn) == episode.finished.turns[len(episode.turns) - 1]:
                self._emit_next(episode, episode.finished)
            else:
                self._restart(episode)

    def record(self, number: int, routes: Sequence[PackedTokens | None]) -> None:
        if (episode := self._episodes.get(number)) is not None:
            assert episode.routes is not None, f"episode {number} has not returned"
            episode.routes.set_result(routes)

    def rest(self, number: int) -> None:
        if (episode := self._episodes.get(number)) is not None and not episode.rested:
            episode.rested = True
            if episode.attempt in self._by_attempt:
                self._send(episode, {"rest": episode.attempt})

    def cancel(self, number: int) -> None:
        if (episode := self._episodes.get(number)) is not None:
            self._leave(episode)

    def waiting(self) -> list[str]:
        """See podrl.environments.workers.Episodes."""
        now, lines = time.monotonic(), []
        for episode in list(self._episodes.values()):
            calls = list(episode.open_requests.values())
            if not calls and episode.since:
                calls = [("the environment", episode.since)]
            lines += [f"{name} of {_sample(episode.task)}, {now - since:.0f} s" for name, since in calls]
        return lines

    async def close(self) -> list[Process]:
        """Cancels all episodes and asks all processes to end.

        Returns:
          The processes, which the caller must close.
        """
        jobs = [job for episode in self._episodes.values() for job in episode.jobs.values()]
        for episode in list(self._episodes.values()):
            self._leave(episode)
        if self._watch is not None:
            self._watch.cancel()
            jobs.append(self._watch)
        await asyncio.gather(*jobs, return_exceptions=True)
        workers = [worker.process.leave() for worker in self._workers if worker.process is not None]
        return [*await self._toolbox.close(), *workers]

    # Starting and replacing workers.

    def _spec(self, name: str) -> dict[str, str] | None:
        """Returns where the code of a user's environment is; None for an environment that comes with podrl."""
        if not is_own(name):
            return None
        try:
            return spec_at(*name.rsplit(":", 1))
        except ValueError as error:
            raise ValueError(f"{self._setting(name)} cannot be loaded: {error}") from None

    def _setting(self, name: str) -> str:
        """Returns the setting that names an environment, with its key, for an error."""
        if name == PROGRAM:
            return f"env.{'program' if self._config.program else 'verifiers'}={self._config.agent!r}"
        return f"{'env.environment=' if name == self._config.environment else 'env.others: '}{name!r}"

    def _start_worker(self) -> _WorkerProcess:
        worker = _WorkerProcess()
        worker.process = Process(
            worker_module.__name__,
            self._limits,
            lambda frame: self._on_frame(worker, frame),
            lambda: self._on_exit(worker),
        )
        folder = "" if self._folder is None else str(self._folder.absolute())
        loading = {"load": self._specs, "config": dataclasses.asdict(self._config), "path": sys.path, "folder": folder}
        worker.process.send(loading)
        return worker

    async def _wait_until_loaded(self, worker: _WorkerProcess) -> JsonObject:
        try:
            loaded = await asyncio.wait_for(asyncio.shield(worker.loaded), LOAD_S)
        except TimeoutError:
            loaded = {"raised": f"it did not load within {LOAD_S:g} s"}
        if "raised" in loaded:
            name = loaded.get("name", self._config.environment)
            raise ValueError(f"{self._setting(name)} cannot be loaded: {loaded['raised']}")
        return loaded

    def _on_exit(self, worker: _WorkerProcess) -> None:
        assert worker.process is not None
        death = str(worker.process.death())
        if not worker.loaded.done():
            self._on_frame(worker, {"loaded": None, "raised": death})
            return
        self._replace(worker, death, None)

    def _replace(self, worker: _WorkerProcess, why: str, culprit: _Episode | None) -> None:
        """Replaces a worker that died or blocked, and replays its episodes in any workers.

        Args:
          worker: worker to replace.
          why: reason, for an error message.
          culprit: episode that blocked the worker; it ends with the reason 'deadline'. None if the worker died, or if
            the worker did not say for which episode it worked.
        """
        assert worker.process is not None
        worker.process.close()
        fresh = self._start_worker()
        self._workers[self._workers.index(worker)] = fresh
        if culprit is not None:
            self._end(culprit, "deadline")
        for episode in [self._episodes[number] for number in sorted(worker.episodes)]:
            episode.attempts += culprit is None  # a blocked worker counts against the culprit alone
            if episode.attempts > _MAX_LOST_WORKERS:
                self._emit(
                    EnvironmentFailure(f"{self._name(episode)} lost {_MAX_LOST_WORKERS} workers in a row: {why}")
                )
                return
            self._end_attempt(episode)
            self._enter(episode)

    async def _watch_blocked(self) -> None:
        """Replaces every worker whose event loop has been blocked for env.blocked_s."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            # If this loop is late, this process was blocked and could not read frames, so its workers get more time.
            if now - last > 5 * HEARTBEAT_S:
                for worker in self._workers:
                    worker.last_frame_at = now
            last = now
            for worker in list(self._workers):
                if worker.loaded.done() and worker.episodes and now - worker.last_frame_at > self._config.blocked_s:
                    try:
                        self._replace_blocked(worker)
                    except OSError as error:  # the system cannot start another process; `poll` raises this error
                        self._emit(error)

    def _replace_blocked(self, worker: _WorkerProcess) -> None:
        culprit = self._by_attempt.get(worker.handling) if worker.handling is not None else None
        self._replace(worker, f"it blocked its process for {self._config.blocked_s:g} s (env.blocked_s)", culprit)

    # Starting and ending episodes.

    def _enter(self, episode: _Episode) -> None:
        """Starts an episode, or its replay, in the worker with the fewest episodes."""
        episode.worker = min(self._workers, key=lambda worker: len(worker.episodes))
        episode.attempt, self._next_attempt, episode.position = self._next_attempt, self._next_attempt + 1, 0
        self._episodes[episode.number] = self._by_attempt[episode.attempt] = episode
        episode.worker.episodes.add(episode.number)
        task = dataclasses.asdict(episode.task)
        self._send(episode, {"start": episode.attempt, "task": task, "rested": episode.rested})
        if len(episode.turns) == len(episode.observations):
            self._run_clock(episode)

    def _end_attempt(self, episode: _Episode) -> None:
        self._stop_clock(episode, counts=False)  # the replay will repeat this work and count its time
        for job in episode.jobs.values():
            job.cancel()
        episode.jobs.clear()
        episode.open_requests.clear()
        self._by_attempt.pop(episode.attempt, None)
        episode.worker.episodes.discard(episode.number)

    def _leave(self, episode: _Episode) -> None:
        if episode.attempt in self._by_attempt:
            self._send(episode, {"cancel": episode.attempt})
        self._end_attempt(episode)
        del self._episodes[episode.number]

    def _end(
        self, episode: _Episode, reason: Literal["ended", "deadline", "failed"], result: Mapping[str, object] = {}
    ) -> None:
        self._leave(episode)
        self._emit({"done": episode.number, "reward": None, "metrics": {}, "text": None, "reason": reason, **result})

    def _run_clock(self, episode: _Episode) -> None:
        episode.since = time.monotonic()
        left = self._config.deadline_s - episode.spent_s
        episode.timer = asyncio.get_running_loop().call_later(max(left, 0), self._on_deadline, episode)

    def _stop_clock(self, episode: _Episode, *, counts: bool = True) -> None:
        if episode.timer is not None:
            episode.timer.cancel()
            episode.spent_s += (time.monotonic() - episode.since) * counts
        episode.timer, episode.since = None, 0.0

    def _on_deadline(self, episode: _Episode) -> None:
        worker = episode.worker
        if time.monotonic() - worker.last_frame_at < _SILENT_S:
            self._end(episode, "deadline")
        elif worker.handling == episode.attempt:
            self._replace(worker, "it blocked its process", episode)
        else:  # another episode blocks the worker, so this episode gets more time
            episode.timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._on_deadline, episode)

    # The records of finished episodes.

    def _is_recorded(self, task: Task) -> bool:
        """Returns True if the whole episode may have to be recorded at its end (`_on_return` decides).

        Episodes of agent programs are recorded, because a program may behave differently on a replay. If a run that is
        started again draws other samples, every episode with Model.chat is recorded, because a replay would get other
        answers.
        """
        if self._journal is None or task.fields.get("env") in self._config.others:
            return False
        return bool(self._config.agent) or not self._journal.exact

    def _description(self, task: Task) -> str:
        name = self._config.agent or self._config.environment
        return f"program {json.dumps([name, dataclasses.asdict(task)], sort_keys=True)}"

    async def _look_up(self, episode: _Episode) -> None:
        """Plays an episode from the record of an earlier run, or starts it if there is no record."""
        assert self._journal is not None
        try:
            record = await self._journal.find(episode.task, NUMBER, self._description(episode.task))
        except Exception as error:  # noqa: BLE001 - `poll` raises it
            self._emit(error)
            return
        episode.jobs.pop(NUMBER)
        if record is None:
            self._enter(episode)
        else:
            episode.finished = FinishedEpisode.read(record)
            self._emit_next(episode, episode.finished)

    def _emit_next(self, episode: _Episode, finished: FinishedEpisode) -> None:
        """Emits the next observation of a recorded episode, or its result after the last one."""
        at = len(episode.observations)
        if at == len(finished.requests):
            self._end(episode, "ended", finished.result)
            return
        episode.observations.append(dict(finished.requests[at]))
        drawn = finished.drawn[at] if finished.drawn else None
        self._emit({"turn_request": episode.number, **finished.requests[at], "records": [], "drawn": drawn})

    def _restart(self, episode: _Episode) -> None:
        """Starts a recorded episode in a worker, because the model's answer differs from its answer in the record."""
        if not self._warned:
            _log.warning(
                "%s is recorded as finished, but the model now answers otherwise (turn %d): the program runs again, "
                "and the run will differ from the earlier one.",
                *(self._name(episode), len(episode.turns) - 1),
            )
        self._warned, episode.finished = True, None
        for log in (episode.observations, episode.turns, episode.drawn):
            log.clear()
        self._emit({"restart": episode.number})
        self._enter(episode)

    def _on_return(self, episode: _Episode, result: JsonObject) -> None:
        """Ends an episode whose environment has returned.

        The episode is recorded first if `_is_recorded` is True, an agent program played it or it called Model.chat, it
        did not fail, and it waited for the answer to every request.
        """
        recorded = self._is_recorded(episode.task) and (
            self._config.agent or any(observation.get("chat") for observation in episode.observations)
        )
        # If the environment did not wait for the answer to a request, a record could not repeat the episode.
        if not recorded or result["reason"] == "failed" or len(episode.turns) < len(episode.observations):
            self._end(episode, "ended", result)
            return
        self._end_attempt(episode)
        episode.jobs[NUMBER] = asyncio.create_task(self._record(episode, result))

    async def _record(self, episode: _Episode, result: JsonObject) -> None:
        assert self._journal is not None
        drawn = ()
        if any(episode.drawn):
            episode.routes = asyncio.get_running_loop().create_future()
            self._emit({"returned": episode.number})
            drawn = _with_routes(episode.drawn, await episode.routes)
        finished = FinishedEpisode(episode.observations, [digest(turn) for turn in episode.turns], result, drawn)
        try:
            await self._journal.add(episode.task, NUMBER, self._description(episode.task), finished.record())
        except Exception as error:  # noqa: BLE001 - `poll` raises it
            self._emit(error)
            return
        episode.jobs.pop(NUMBER)
        self._end(episode, "ended", result)

    # Frames to and from the workers.

    def _send(self, episode: _Episode, frame: JsonObject) -> None:
        assert episode.worker.process is not None
        episode.worker.process.send(frame)

    def _on_frame(self, worker: _WorkerProcess, frame: JsonObject) -> None:
        worker.last_frame_at = time.monotonic()
        match frame:
            case {"handling": handling}:
                worker.handling = handling
            case {"loaded": _}:
                worker.loaded.set_result(frame)
                # `open` reports the errors of the first workers. A later worker's error means that an environment that
                # could be loaded before cannot be loaded any more.
                if self._watch is not None and "raised" in frame:
                    why = f"cannot be loaded again: {frame['raised']}"
                    self._emit(EnvironmentFailure(f"Environment {self._config.environment} {why}"))
            case {"turn_request": attempt, "fields": fields, "records": records} if attempt in self._by_attempt:
                overlaps = frame.get("overlaps", False)
                self._on_observation(self._by_attempt[attempt], fields, records, overlaps=overlaps)
            case {"outside": attempt, "number": number} if attempt in self._by_attempt:
                self._on_outside_request(self._by_attempt[attempt], number, frame)
            case {"clock": runs, "attempt": attempt} if attempt in self._by_attempt:
                self._stop_clock(
                    self._by_attempt[attempt], counts=False
                )  # waiting for a process is not the episode's work
                if runs:
                    self._run_clock(self._by_attempt[attempt])
            case {"done": attempt, **result} if attempt in self._by_attempt:
                self._on_return(self._by_attempt[attempt], result)
            case {"raised": attempt, "why": why, "certain": certain} if attempt in self._by_attempt:
                episode = self._by_attempt[attempt]
                self._leave(episode)
                self._emit(EnvironmentFailure(f"{self._name(episode)} failed: {why}", why, certain=certain))

    def _on_observation(
        self, episode: _Episode, observation: JsonObject, records: list[TurnRecord], *, overlaps: bool
    ) -> None:
        at, episode.position = episode.position, episode.position + 1
        if at < len(episode.observations):
            if episode.observations[at] != observation and self._config.agent:  # a program may differ on a replay
                why = "its worker was lost, and its program did not send the same requests again"
                self._end(episode, "failed", {"metrics": {"failed/infrastructure": 1.0}, "why": why})
                return
            if episode.observations[at] != observation:
                first, second = _difference(episode.observations[at], observation)
                self._emit(
                    EnvironmentFailure(
                        f"{self._name(episode)} did not repeat its observation on a replay, at turn {at}: "
                        f"first {first}, then {second}. What `run` does must follow from the task, the turns and the "
                        "answers of model.outside: take clocks, chance and services from there."
                    )
                )
                return
        else:
            episode.observations.append(observation)
            episode.attempts = 1
            self._stop_clock(episode)
            self._emit({"turn_request": episode.number, **observation, "records": records, "overlaps": overlaps})
        self._send_turn(episode)

    def _send_turn(self, episode: _Episode) -> None:
        """Sends the turn that the present attempt waits for, if the log already has this turn."""
        if 0 < episode.position <= len(episode.turns) and episode.position <= len(episode.observations):
            turn = episode.turns[episode.position - 1]
            self._send(episode, {"turn": episode.attempt, "value": turn})
            if episode.position == len(episode.turns):
                self._stop_clock(episode)
                self._run_clock(episode)

    def _on_outside_request(self, episode: _Episode, number: int, frame: JsonObject) -> None:
        if "made" not in frame:
            description = str(frame.get("what", "its tools"))
            if number in episode.answers:
                if episode.descriptions[number] != description:
                    pair = f"first {episode.descriptions[number]!r}, then {description!r}"
                    self._emit(EnvironmentFailure(f"{self._name(episode)} made another request on a replay: {pair}."))
                    return
                self._send(episode, {"answer": episode.attempt, "number": number, "reply": episode.answers[number]})
                return
            episode.descriptions[number] = description
            name = description.partition(" ")[0] if "tool" in frame else description
            episode.open_requests[number] = (name, time.monotonic())
        episode.jobs[number] = asyncio.create_task(self._answer_outside_request(episode, number, frame))

    async def _answer_outside_request(self, episode: _Episode, number: int, frame: JsonObject) -> None:
        """Answers an outside request from the journal or with a tool, or has the environment make the answer itself."""
        try:
            if "made" in frame:
                await self._reply(episode, number, frame["made"])
            elif "toolset" in frame:
                tools = await self._toolbox.toolset(EnvironmentConfig(**frame["toolset"]))
                await self._reply(episode, number, {"tools": tools}, recorded=True)
            elif self._journal and (
                found := await self._journal.find(episode.task, number, episode.descriptions[number])
            ):
                await self._reply(episode, number, found, recorded=True)
            elif "tool" in frame:
                answer = await self._toolbox.call(frame["tool"], frame["arguments"], episode.task)
                await self._reply(episode, number, answer)
            else:
                self._send(episode, {"answer": episode.attempt, "number": number, "reply": {"make": True}})
        except ValueError as error:
            self._emit(EnvironmentFailure(f"{self._name(episode)} failed: {error}"))
        except Exception as error:  # noqa: BLE001 - `poll` raises it
            self._emit(error)

    async def _reply(self, episode: _Episode, number: int, answer: JsonObject, *, recorded: bool = False) -> None:
        """Records an answer, so that a resumed run finds it, and then sends it to the environment.

        Args:
          episode: the episode that sent the request.
          number: number of the request.
          answer: the answer, JSON values.
          recorded: True if the answer needs no record: it came from the journal, or is the same in each run.
        """
        if not recorded:
            self._report_call(episode, number, answer)
        if self._journal is not None and not recorded:
            await self._journal.add(episode.task, number, episode.descriptions[number], answer)
        episode.open_requests.pop(number, None)
        episode.jobs.pop(number, None)
        episode.answers[number] = {**answer, "replayed": recorded}
        self._send(episode, {"answer": episode.attempt, "number": number, "reply": episode.answers[number]})

    def _report_call(self, episode: _Episode, number: int, answer: JsonObject) -> None:
        """Reports a call that has just ended to `on_call`; the time of waiting for a free tool is left out."""
        if self._on_call is not None:
            ended = time.monotonic()
            failed = str(answer.get("failed") or ("exception" if "raised" in answer else ""))
            started = ended - float(answer.get("seconds", 0.0))
            self._on_call(episode.task, episode.descriptions[number].partition(" ")[0], started, ended, failed)

    def _name(self, episode: _Episode) -> str:
        task = episode.task
        # Progress lines count steps from 1.
        when = f"step {task.step + 1}" if task.mode == "train" else "an evaluation"
        return (
            f"Environment {self._config.environment} of {_sample(task)} ({when}, after turn {len(episode.turns)}; "
            f"prompt {task.prompt[:160]!r})"
        )


def _with_routes(
    drawn: Sequence[PackedTokens | None], routes: Sequence[PackedTokens | None]
) -> list[PackedTokens | None]:
    """Adds the routes of an episode to the token columns of its turns; turns without columns get none."""
    assert len(routes) == sum(columns is not None for columns in drawn), (len(routes), len(drawn))
    unused = iter(routes)
    return [columns and (columns if (new := next(unused)) is None else {**columns, "routes": new}) for columns in drawn]


def _sample(task: Task) -> str:
    return f"sample {task.sample} of prompt {task.index}"


def _difference(was: JsonObject, now: JsonObject) -> tuple[str, str]:
    """Describes the fields in which two observations differ: (the first observation's values, the second's)."""
    names = [name for name in was if was[name] != now[name]]
    return tuple(", ".join(f"{name}={one[name]!r}"[:400] for name in names) for one in (was, now))  # pyright: ignore[reportReturnType]
