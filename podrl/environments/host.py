"""Runs all episodes of a process in workers, and replays their logs in a new worker if a worker dies or blocks."""

import asyncio
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from podrl.environments import worker as worker_module
from podrl.environments.calls import in_template
from podrl.environments.config import EnvironmentConfig, is_own
from podrl.environments.finished_episodes import NUMBER, FinishedEpisode, digest
from podrl.environments.journal import Journal
from podrl.environments.protocol import Task
from podrl.environments.toolbox import Toolbox
from podrl.environments.worker import BEAT_S
from podrl.types import BatchError
from podrl.workers.process import LOAD_S, Process
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import spec_at

# A function of an outside call: (task, name of the tool, start, end, failed). Start and end are times of
# time.monotonic(), seconds; `failed` is the kind of failure, or ''.
Called = Callable[[Task, str, float, float, str], None]
_LIVES = 3  # workers that an episode may lose in a row before the job ends
_SILENT_S = 3 * BEAT_S  # after this time without a frame, a worker counts as blocked by one of its episodes
_log = logging.getLogger("podrl.environments")


class EnvironmentFailure(BatchError):  # noqa: N818 - the word of docs and logs
    """The code of an environment failed; the message names the environment, the sample, the turn and the error."""


@dataclasses.dataclass
class _Episode:
    """An episode and its log. When the episode is replayed, it must repeat the log before it may continue.

    An episode has the same number until it ends, and a new `life` each time it starts in a worker.

    Attributes:
      number: number of the episode, from the caller.
      task: the sample that the episode plays.
      life: number of the episode's present start in a worker; -1 before the first.
      home: worker of the present life.
      observations: the log of observations, each the fields of a podrl.environments.workers.EpisodeObservation.
      turns: the log of the model's turns, one for each observation that the model has answered.
      drawn: packed token columns (ids, log-probabilities, versions) of each turn for the record of the episode; None
        for a turn whose tokens the record does not need.
      routes: future of the routes that the record of a returned episode waits for
        (podrl.environments.workers.Episodes.record); None before.
      answers: the log of outside answers, by their numbers.
      descriptions: descriptions of the outside requests, by their numbers.
      open_requests: (description, start by time.monotonic()) of each outside request without an answer, by number.
      jobs: tasks that answer outside requests, by their numbers; NUMBER is the task that reads or writes `finished`.
      at: number of observations in the present life.
      lives: number of lives since the last new observation, including the present life.
      spent_s: time of the environment and its tools up to `since`, seconds.
      since: time at which the environment's present work began, by time.monotonic(); 0 while the model samples.
      timer: timer of env.deadline_s; None while the model samples.
      rested: True if the episode does not count towards env.processes (podrl.environments.workers.Episodes.rest).
      finished: record of the whole episode from an earlier run, which is played instead of the episode itself; None if
        there is no record.
    """

    number: int
    task: Task
    life: int
    home: "_Home"
    observations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    drawn: list[Mapping[str, Any] | None] = dataclasses.field(default_factory=list)
    routes: asyncio.Future[Sequence[Mapping[str, Any] | None]] | None = None
    answers: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    descriptions: dict[int, str] = dataclasses.field(default_factory=dict)
    open_requests: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)
    jobs: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    at: int = 0
    lives: int = 1
    spent_s: float = 0.0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    rested: bool = False
    finished: FinishedEpisode | None = None


class _Home:
    """A worker process.

    Attributes:
      link: the process.
      last_frame_at: time of the last frame from the process, by time.monotonic().
      at: life of the episode whose frame the process has handled last, as it reported; None before the first frame.
      loaded: future of the reply to loading the environments.
      episodes: numbers of the episodes in this process.
    """

    def __init__(self) -> None:
        self.link: Process | None = None
        self.last_frame_at = time.monotonic()
        self.at: int | None = None
        self.loaded: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
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
        emit: Callable[[Mapping[str, Any] | BaseException], None],
        called: Called | None = None,
        error_files: pathlib.Path | None = None,
    ) -> None:
        """Stores the arguments; `open` starts the workers.

        Args:
          config: the settings of the environments and their tools.
          limits: resources that each process with user code may take, and environment variables that it may see.
          journal: the recorded answers of tools and services; None records nothing.
          emit: function that receives each event ({"say": episode, ...}, {"returned": episode}, {"done": episode, ...}
            or {"anew": episode}) and each error.
          called: function that receives each outside call that is made, except calls that the journal answers; None
            for no such function.
          error_files: directory of the files with the standard error of MCP servers; None writes to this process's own.
        """
        self._config, self._limits, self._journal, self._emit = config, limits, journal, emit
        self._called, self._folder = called, error_files
        self._specs = {name: spec_at(*name.rsplit(":", 1)) if is_own(name) else None for name in config.choices}
        self._toolbox = Toolbox(limits, config.server_deadline_s, emit, error_files)
        self._homes: list[_Home] = []
        self._episodes: dict[int, _Episode] = {}
        self._lives: dict[int, _Episode] = {}
        self._next_life = 0
        self._warned = False
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> tuple[str, list[dict[str, Any]]]:
        """Starts the workers.

        Returns:
          (parser of tool calls, declarations of the tools); no declarations for an environment without tools.

        Raises:
          ValueError: the environment or a tool cannot be loaded, or env.others is set with a parser whose tools every
            prompt lists.
          ServiceError: an MCP server does not answer.
        """
        self._homes = [self._start_home() for _ in range(self._config.workers)]
        loaded = [await self._loaded(home) for home in self._homes]
        self._watch = asyncio.create_task(self._watch_blocked())
        own = loaded[0]["loaded"]
        if own is None:
            return self._config.parser, []
        if self._config.others and in_template(own["parser"]):
            raise ValueError(
                f"env.others={self._config.others} with env.parser={own['parser']}: every prompt names the tools of "
                "env.environment, which the records of the others cannot call. Choose a parser with tags, as call_tool."
            )
        return own["parser"], await self._toolbox.toolset(EnvironmentConfig(**own))

    def start(self, number: int, task: Task, recorded: bool = True) -> None:
        episode = self._episodes[number] = _Episode(number, task, -1, self._homes[0])
        if recorded and self._is_recorded(task):
            episode.jobs[NUMBER] = asyncio.create_task(self._look_up(episode))
        else:
            self._enter(episode)

    def turn(self, number: int, turn: dict[str, Any], drawn: Mapping[str, Any] | None = None) -> None:
        if (episode := self._episodes.get(number)) is not None:
            assert len(episode.turns) < len(episode.observations), f"episode {number} waits for no turn"
            episode.turns.append(turn)
            episode.drawn.append(drawn)
            if episode.finished is None:
                self._send_turn(episode)
            elif digest(turn) == episode.finished.turns[len(episode.turns) - 1]:
                self._emit_next(episode, episode.finished)
            else:
                self._begin_anew(episode)

    def record(self, number: int, routes: Sequence[Mapping[str, Any] | None]) -> None:
        if (episode := self._episodes.get(number)) is not None:
            assert episode.routes is not None, f"episode {number} has not returned"
            episode.routes.set_result(routes)

    def rest(self, number: int) -> None:
        if (episode := self._episodes.get(number)) is not None and not episode.rested:
            episode.rested = True
            if episode.life in self._lives:
                self._send(episode, {"rest": episode.life})

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
        return [*await self._toolbox.close(), *[home.link.leave() for home in self._homes if home.link is not None]]

    # A worker's life.

    def _start_home(self) -> _Home:
        home = _Home()
        home.link = Process(
            worker_module.__name__, self._limits, lambda frame: self._on_frame(home, frame), lambda: self._ended(home)
        )
        folder = "" if self._folder is None else str(self._folder.absolute())
        loading = {"load": self._specs, "config": dataclasses.asdict(self._config), "path": sys.path, "folder": folder}
        home.link.send(loading)
        return home

    async def _loaded(self, home: _Home) -> dict[str, Any]:
        try:
            loaded = await asyncio.wait_for(asyncio.shield(home.loaded), LOAD_S)
        except TimeoutError:
            loaded = {"raised": f"it did not load within {LOAD_S:g} s"}
        if "raised" in loaded:
            name = loaded.get("name", self._config.environment)
            key = "env.environment=" if name == self._config.environment else "env.others: "
            raise ValueError(f"{key}{name!r} cannot be loaded: {loaded['raised']}")
        return loaded

    def _ended(self, home: _Home) -> None:
        assert home.link is not None
        death = str(home.link.death())
        if not home.loaded.done():
            self._on_frame(home, {"loaded": None, "raised": death})
            return
        self._replace(home, death, None)

    def _replace(self, home: _Home, why: str, culprit: _Episode | None) -> None:
        """Replaces a worker that died or blocked, and replays its episodes in any workers.

        Args:
          home: the worker.
          why: reason, for an error message.
          culprit: episode that blocked the worker; it ends with the reason 'deadline'. None if the worker died.
        """
        assert home.link is not None
        home.link.close()
        fresh = self._start_home()
        self._homes[self._homes.index(home)] = fresh
        if culprit is not None:
            self._end(culprit, "deadline")
        for episode in [self._episodes[number] for number in sorted(home.episodes)]:
            episode.lives += culprit is None  # a worker that an episode blocked is not the fault of the others
            if episode.lives > _LIVES:
                self._emit(EnvironmentFailure(f"{self._name(episode)} lost {_LIVES} workers in a row: {why}"))
                return
            self._drop_life(episode)
            self._enter(episode)

    async def _watch_blocked(self) -> None:
        """Kills a worker whose event loop has been blocked for env.blocked_s."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            # This process was blocked itself and could not read frames of its workers, so the workers get more time.
            if now - last > 5 * BEAT_S:
                for home in self._homes:
                    home.last_frame_at = now
            last = now
            for home in list(self._homes):
                if home.loaded.done() and home.episodes and now - home.last_frame_at > self._config.blocked_s:
                    try:
                        self._blocked(home)
                    except OSError as error:  # the system cannot start another process; `poll` raises this error
                        self._emit(error)

    def _blocked(self, home: _Home) -> None:
        culprit = self._lives.get(home.at) if home.at is not None else None
        self._replace(home, f"it blocked its process for {self._config.blocked_s:g} s (env.blocked_s)", culprit)

    # An episode's life.

    def _enter(self, episode: _Episode) -> None:
        """Starts an episode, or its replay, in the worker with the fewest episodes."""
        episode.home = min(self._homes, key=lambda home: len(home.episodes))
        episode.life, self._next_life, episode.at = self._next_life, self._next_life + 1, 0
        self._episodes[episode.number] = self._lives[episode.life] = episode
        episode.home.episodes.add(episode.number)
        task = dataclasses.asdict(episode.task)
        self._send(episode, {"start": episode.life, "task": task, "rested": episode.rested})
        if len(episode.turns) == len(episode.observations):
            self._run_clock(episode)

    def _drop_life(self, episode: _Episode) -> None:
        self._stop_clock(episode, counts=False)  # a replay repeats this work, and counts its time
        for job in episode.jobs.values():
            job.cancel()
        episode.jobs.clear()
        episode.open_requests.clear()
        self._lives.pop(episode.life, None)
        episode.home.episodes.discard(episode.number)

    def _leave(self, episode: _Episode) -> None:
        if episode.life in self._lives:
            self._send(episode, {"cancel": episode.life})
        self._drop_life(episode)
        del self._episodes[episode.number]

    def _end(
        self, episode: _Episode, reason: Literal["ended", "deadline", "failed"], result: Mapping[str, Any] = {}
    ) -> None:
        self._leave(episode)
        self._emit({"done": episode.number, "reward": None, "metrics": {}, "text": None, "reason": reason, **result})

    def _run_clock(self, episode: _Episode) -> None:
        episode.since = time.monotonic()
        left = self._config.deadline_s - episode.spent_s
        episode.timer = asyncio.get_running_loop().call_later(max(left, 0), self._expired, episode)

    def _stop_clock(self, episode: _Episode, *, counts: bool = True) -> None:
        if episode.timer is not None:
            episode.timer.cancel()
            episode.spent_s += (time.monotonic() - episode.since) * counts
        episode.timer, episode.since = None, 0.0

    def _expired(self, episode: _Episode) -> None:
        home = episode.home
        if time.monotonic() - home.last_frame_at < _SILENT_S:
            self._end(episode, "deadline")
        elif home.at == episode.life:
            self._replace(home, "it blocked its process", episode)
        else:  # another episode blocks the worker, so this one gets more time
            episode.timer = asyncio.get_running_loop().call_later(BEAT_S, self._expired, episode)

    # The records of finished episodes.

    def _is_recorded(self, task: Task) -> bool:
        """Returns True if the whole episode is recorded at its end (`_returned`).

        Episodes of agent programs are recorded, because a program may behave differently on a replay. All conversations
        are recorded if a run that is started again draws other samples, because a replay would get other answers.
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
        self._emit({"say": episode.number, **finished.requests[at], "records": [], "drawn": drawn})

    def _begin_anew(self, episode: _Episode) -> None:
        """Starts a recorded episode in a worker, because the model's answer differs from the earlier run's."""
        if not self._warned:
            _log.warning(
                "%s is recorded as finished, but the model now answers otherwise (turn %d): the program runs again, "
                "and the run will differ from the earlier one.",
                *(self._name(episode), len(episode.turns) - 1),
            )
        self._warned, episode.finished = True, None
        for log in (episode.observations, episode.turns, episode.drawn):
            log.clear()
        self._emit({"anew": episode.number})
        self._enter(episode)

    def _returned(self, episode: _Episode, result: Mapping[str, Any]) -> None:
        """Ends an episode whose environment has returned; an episode with requests of Model.chat is recorded first."""
        recorded = self._is_recorded(episode.task) and (
            self._config.agent or any(one.get("chat") for one in episode.observations)
        )
        # A record cannot repeat an episode with a request whose answer the environment did not wait for.
        if not recorded or result["reason"] == "failed" or len(episode.turns) < len(episode.observations):
            self._end(episode, "ended", result)
            return
        self._drop_life(episode)
        episode.jobs[NUMBER] = asyncio.create_task(self._record(episode, result))

    async def _record(self, episode: _Episode, result: Mapping[str, Any]) -> None:
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

    def _send(self, episode: _Episode, frame: Mapping[str, Any]) -> None:
        assert episode.home.link is not None
        episode.home.link.send(frame)

    def _on_frame(self, home: _Home, frame: dict[str, Any]) -> None:
        home.last_frame_at = time.monotonic()
        match frame:
            case {"at": at}:
                home.at = at
            case {"loaded": _}:
                home.loaded.set_result(frame)
                if self._watch is not None and "raised" in frame:  # the first workers could load the environment
                    why = f"cannot be loaded again: {frame['raised']}"
                    self._emit(EnvironmentFailure(f"Environment {self._config.environment} {why}"))
            case {"say": life, "said": observation, "records": records} if life in self._lives:
                self._on_observation(self._lives[life], observation, records, overlaps=frame.get("overlaps", False))
            case {"ask": life, "n": number} if life in self._lives:
                self._on_outside_request(self._lives[life], number, frame)
            case {"clock": runs, "of": life} if life in self._lives:
                self._stop_clock(self._lives[life], counts=False)  # waiting for a process is not the episode's work
                if runs:
                    self._run_clock(self._lives[life])
            case {"done": life, **result} if life in self._lives:
                self._returned(self._lives[life], result)
            case {"raised": life, "why": why} if life in self._lives:
                episode = self._lives[life]
                self._leave(episode)
                self._emit(EnvironmentFailure(f"{self._name(episode)} failed: {why}"))

    def _on_observation(
        self, episode: _Episode, observation: dict[str, Any], records: list[dict[str, Any]], *, overlaps: bool
    ) -> None:
        at, episode.at = episode.at, episode.at + 1
        if at < len(episode.observations):
            if episode.observations[at] != observation and self._config.agent:  # programs need not repeat themselves
                why = "its worker was lost, and its program did not send the same requests again"
                self._end(episode, "failed", {"metrics": {"failed/infrastructure": 1.0}, "why": why})
                return
            if episode.observations[at] != observation:
                was, now = _difference(episode.observations[at], observation)
                self._emit(
                    EnvironmentFailure(
                        f"{self._name(episode)} did not repeat its observation on a replay, at turn {at}: first {was}, "
                        f"then {now}. What `run` does must follow from the task, the turns and the answers of "
                        "model.outside: take clocks, chance and services from there."
                    )
                )
                return
        else:
            episode.observations.append(observation)
            episode.lives = 1
            self._stop_clock(episode)
            self._emit({"say": episode.number, **observation, "records": records, "overlaps": overlaps})
        self._send_turn(episode)

    def _send_turn(self, episode: _Episode) -> None:
        """Sends the turn that the present life waits for, if the log already has this turn."""
        if 0 < episode.at <= len(episode.turns) and episode.at <= len(episode.observations):
            turn = episode.turns[episode.at - 1]
            self._send(episode, {"turn": episode.life, "value": turn})
            if episode.at == len(episode.turns):
                self._stop_clock(episode)
                self._run_clock(episode)

    def _on_outside_request(self, episode: _Episode, number: int, frame: Mapping[str, Any]) -> None:
        if "made" not in frame:
            description = str(frame.get("what", "its tools"))
            if number in episode.answers:
                if episode.descriptions[number] != description:
                    pair = f"first {episode.descriptions[number]!r}, then {description!r}"
                    self._emit(EnvironmentFailure(f"{self._name(episode)} made another request on a replay: {pair}."))
                    return
                self._send(episode, {"answer": episode.life, "n": number, "reply": episode.answers[number]})
                return
            episode.descriptions[number] = description
            name = description.partition(" ")[0] if "tool" in frame else description
            episode.open_requests[number] = (name, time.monotonic())
        episode.jobs[number] = asyncio.create_task(self._settle(episode, number, frame))

    async def _settle(self, episode: _Episode, number: int, frame: Mapping[str, Any]) -> None:
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
                self._send(episode, {"answer": episode.life, "n": number, "reply": {"make": True}})
        except ValueError as error:
            self._emit(EnvironmentFailure(f"{self._name(episode)} failed: {error}"))
        except Exception as error:  # noqa: BLE001 - `poll` raises it
            self._emit(error)

    async def _reply(
        self, episode: _Episode, number: int, answer: Mapping[str, Any], *, recorded: bool = False
    ) -> None:
        """Records an answer, so that a resumed run finds it, and then sends it to the environment.

        Args:
          episode: the episode that sent the request.
          number: number of the request.
          answer: the answer, JSON values.
          recorded: True if the answer came from the journal, or is the same in each run, and needs no record.
        """
        if not recorded:
            self._report_call(episode, number, answer)
        if self._journal is not None and not recorded:
            await self._journal.add(episode.task, number, episode.descriptions[number], answer)
        episode.open_requests.pop(number, None)
        episode.jobs.pop(number, None)
        episode.answers[number] = {**answer, "replayed": recorded}
        self._send(episode, {"answer": episode.life, "n": number, "reply": episode.answers[number]})

    def _report_call(self, episode: _Episode, number: int, answer: Mapping[str, Any]) -> None:
        """Reports a call that has just ended to `called`. The time that it waited for a free tool is not included."""
        if self._called is not None:
            ended = time.monotonic()
            failed = str(answer.get("failed") or ("exception" if "raised" in answer else ""))
            started = ended - float(answer.get("seconds", 0.0))
            self._called(episode.task, episode.descriptions[number].partition(" ")[0], started, ended, failed)

    def _name(self, episode: _Episode) -> str:
        return (
            f"Environment {self._config.environment} of {_sample(episode.task)} (step {episode.task.step}, after turn "
            f"{len(episode.turns)}; prompt {episode.task.prompt[:160]!r})"
        )


def _with_routes(
    drawn: Sequence[Mapping[str, Any] | None], routes: Sequence[Mapping[str, Any] | None]
) -> list[Mapping[str, Any] | None]:
    """Adds the routes of an episode to the token columns of its turns; turns without columns get none."""
    assert len(routes) == sum(one is not None for one in drawn), (len(routes), len(drawn))
    left = iter(routes)
    return [one and (one if (new := next(left)) is None else {**one, "routes": new}) for one in drawn]


def _sample(task: Task) -> str:
    return f"sample {task.sample} of prompt {task.index}"


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    """Describes the fields in which two observations differ: (the first observation's values, the second's)."""
    names = [name for name in was if was[name] != now[name]]
    return tuple(", ".join(f"{name}={one[name]!r}"[:400] for name in names) for one in (was, now))  # pyright: ignore[reportReturnType]
