"""Runs episodes in worker processes; one thread starts the episodes, answers observations and polls for messages."""

import contextlib
import dataclasses
import pathlib
import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from podrl.environments.calls import Cuts
from podrl.environments.config import EnvironmentConfig
from podrl.environments.host import CallReporter, EnvironmentHost
from podrl.environments.host import EnvironmentFailure as EnvironmentFailure
from podrl.environments.journal import Journal
from podrl.environments.protocol import Role, Task, Turn
from podrl.mappings import JsonObject, PackedTokens, ToolDeclaration, TurnRecord
from podrl.workers.child import refuse_inside
from podrl.workers.process import Loop
from podrl.workers.user_code import Limits


@dataclasses.dataclass(frozen=True)
class EpisodeObservation:
    """An observation of an episode, after which the model samples a turn; answered with `Episodes.turn`.

    Attributes:
      episode: number of the episode, as passed to `Episodes.start`.
      observation: text to append; '' for none.
      role: 'raw', 'user' or 'tool'; see podrl.environments.protocol.Model.say.
      stop: strings that end the turn, besides the end of the model's turn.
      max_new: largest number of sampled tokens; None samples as many as there is room for.
      reward: reward of the previous turn, assigned to that turn's last sampled token.
      records: outside answers that went into the observation, JSON objects with the keys "by", "text", "seconds",
        "failed" and "replayed", one per call.
      cuts: for each tool output, its character ranges [start, end) in `observation`, ascending.
      cut_tokens: largest number of tokens of each group. The environment's process has no tokenizer, so `observation`
        is not shortened yet: the engine's side applies `podrl.environments.calls.shortened` before it encodes the text.
      chat: fields of a podrl.rollout.branches.ChatRequest, which replaces the observation; None for an observation.
      dropped: numbers of earlier requests of the episode whose answers no client received.
      rewards: (number of an earlier request, reward of its answer) of each reward that a program gave.
      overlaps: True if the episode made this request while one of its earlier requests was open.
      drawn: packed token columns (ids, log-probabilities, versions) of the answer to this request in an earlier run
        (podrl.rollout.partial.pack_turn). The answer is used again; None if the model must answer the request. The
        entry 'routes' has the packed routes of the branch that the request opened, if any (`Episodes.record`).
    """

    episode: int
    observation: str
    role: Role
    stop: tuple[str, ...]
    max_new: int | None
    reward: float
    records: tuple[TurnRecord, ...] = ()
    cuts: Cuts = ()
    cut_tokens: int = 0
    chat: JsonObject | None = None
    dropped: Sequence[int] = ()
    rewards: Sequence[tuple[int, float]] = ()
    overlaps: bool = False
    drawn: PackedTokens | None = None


@dataclasses.dataclass(frozen=True)
class EpisodeEnd:
    """An episode that has ended.

    Attributes:
      episode: number of the episode, as passed to `Episodes.start`.
      reward: reward of the episode's Result; None for no reward.
      metrics: metrics of the Result, by name.
      text: the completion that reward functions read, from the Result; None for the text that the model wrote.
      reason: 'ended' if `run` returned or `say` found no room; 'turns' if env.max_turns turns were over; 'calls' if the
        model made a call beyond env.max_tool_calls; 'deadline' if env.deadline_s or env.blocked_s passed; 'failed' if
        the episode's program failed. After 'deadline' and 'failed' the sample must be left out of the loss.
      why: error message for 'failed', mostly with the last lines of the program's standard error; '' for any other
        reason.
      dropped: numbers of requests whose answers no client received, since the last EpisodeObservation with `chat`.
      rewards: (number of an earlier request, reward of its answer) of each reward since that EpisodeObservation.
    """

    episode: int
    reward: float | None
    metrics: dict[str, float]
    text: str | None
    reason: Literal["ended", "turns", "calls", "deadline", "failed"]
    why: str = ""
    dropped: Sequence[int] = ()
    rewards: Sequence[tuple[int, float]] = ()


@dataclasses.dataclass(frozen=True)
class EpisodeRestart:
    """An episode that starts again from its first observation; its observations and turns so far no longer count."""

    episode: int


@dataclasses.dataclass(frozen=True)
class EpisodeReturn:
    """An episode whose environment has returned; its EpisodeEnd comes after `Episodes.record` has been called.

    Only an episode whose record has token columns sends this event.
    """

    episode: int


EpisodeEvent = EpisodeObservation | EpisodeReturn | EpisodeEnd | EpisodeRestart


class Episodes:
    """Runs episodes in worker processes; only one thread may use it.

    Attributes:
      parser: format of the model's tool calls (EnvironmentConfig.parser).
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        limits: Limits,
        *,
        journal: Journal | None,
        on_call: CallReporter | None = None,
        error_files: pathlib.Path | None = None,
    ) -> None:
        """Starts the workers and loads the environment and its tools into them.

        Args:
          config: the settings of the environments and their tools.
          limits: resources that each process with user code may take, and environment variables that it may see.
          journal: the recorded outside answers; None records nothing.
          on_call: function that receives each outside call that is made, except calls that the journal answers. It is
            called on a thread of this object.
          error_files: directory for the standard error of MCP servers that are started by command, one file each; None
            writes to this process's own standard error.

        Raises:
          ValueError: the environment or a tool cannot be loaded; the message says why.
          ServiceError: an MCP server does not answer.
        """
        refuse_inside()
        self._config = config
        self._messages: queue.SimpleQueue[EpisodeEvent | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._host = EnvironmentHost(config, limits, journal, _event_emitter(self._messages), on_call, error_files)
        messages = self._messages
        self._loop = Loop("podrl-episodes", lambda context: messages.put(_error_of(context)))
        self._finalizer = weakref.finalize(self, self._loop.end, self._host.close)
        try:
            self.parser, self._tools, self._observe_first = self._loop.run(self._host.open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tools(self) -> list[ToolDeclaration]:
        """The tools as chat templates take them: {"type": "function", "function": {name, description, parameters}}."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["schema"],
                },
            }
            for tool in self._tools
        ]

    def observes_first(self, env: object) -> bool:
        """Returns True if an environment's first observation is a part of the prompt.

        Args:
          env: field `env` of the record that the environment plays; None if the record has no such field.
        """
        name = env if env in self._config.others else self._config.environment
        return name in self._observe_first

    def start(self, episode: int, task: Task, *, recorded: bool = True) -> None:
        """Starts an episode; `poll` returns its first EpisodeObservation, or its EpisodeEnd.

        Args:
          episode: number of the episode, chosen by the caller; no other episode of this object may have it.
          task: the sample that the episode plays.
          recorded: True plays the episode from the record of an earlier run if there is one.
        """
        self._loop.soon(self._host.start, episode, task, recorded)

    def turn(self, episode: int, turn: Turn, drawn: PackedTokens | None = None) -> None:
        """Answers an EpisodeObservation with the model's turn.

        `Turn("", stop=protocol.FULL)` says that the sample has no room for the observation, so that `say` raises Ended.

        Args:
          episode: number of the episode.
          turn: the model's turn.
          drawn: packed token columns (ids, log-probabilities, versions) of the turn as JSON, for the record of the
            episode; None records only a hash of the turn.
        """
        value: dict[str, object] = {
            "text": turn.text,
            "stop": turn.stop,
            "tokens": [int(token) for token in turn.tokens],
        }
        if turn.prompt:
            value["prompt"] = [int(token) for token in turn.prompt]
        if turn.logprobs:
            value |= {"logprobs": [float(logprob) for logprob in turn.logprobs], "pieces": list(turn.pieces)}
        self._loop.soon(self._host.turn, episode, value, drawn)

    def record(self, episode: int, routes: Sequence[PackedTokens | None]) -> None:
        """Adds the routes (experts of each token) to an episode's record after its EpisodeReturn, and has it written.

        Args:
          episode: number of the episode.
          routes: for each answer with token columns, the packed routes (podrl.rollout.partial.pack_routes) of the
            branch that its request opened; None if the request opened no branch, or if routes are not recorded.
        """
        self._loop.soon(self._host.record, episode, routes)

    def rest(self, episode: int) -> None:
        """Stops counting an episode towards env.processes, because the model answers it only in the next window.

        The episode's program keeps its process. Without this call, episodes that must end before the next window might
        wait for that process for ever.
        """
        self._loop.soon(self._host.rest, episode)

    def cancel(self, episode: int) -> None:
        """Ends an episode without an EpisodeEnd; `poll` may still return messages that the episode sent before."""
        self._loop.soon(self._host.cancel, episode)

    def poll(self, timeout_s: float) -> list[EpisodeEvent]:
        """Returns all messages that have come; waits for the first one if there are none.

        Args:
          timeout_s: longest wait for the first message, seconds; 0 does not wait.

        Returns:
          The messages in their order; [] if none came in time.

        Raises:
          EnvironmentFailure: an environment raised an error, did not repeat its log on a replay, or lost three workers
            in a row.
          ServiceError: an MCP server was unreachable for env.server_deadline_s seconds.
        """
        events: list[EpisodeEvent] = []
        with contextlib.suppress(queue.Empty):
            message = self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
            while True:
                if isinstance(message, BaseException):
                    self._failure = self._failure or message
                else:
                    events.append(message)
                message = self._messages.get_nowait()
        if self._failure is not None:
            raise self._failure
        return events

    def waiting(self) -> list[str]:
        """Describes the calls or environments that episodes wait for: 'calculator of sample 3 of prompt 17, 41 s'."""
        return self._host.waiting()

    def close(self) -> None:
        """Ends every process, and returns when none is left."""
        self._finalizer()


def _event_emitter(messages: queue.SimpleQueue[Any]) -> Callable[[JsonObject | BaseException], None]:
    def emit(event: JsonObject | BaseException) -> None:
        match event:
            case BaseException():
                messages.put(event)
            case {"turn_request": episode, **fields}:
                cuts = tuple(tuple((start, end) for start, end in group) for group in fields["cuts"])
                lists = {"stop": tuple(fields["stop"]), "records": tuple(fields["records"]), "cuts": cuts}
                messages.put(EpisodeObservation(episode, **{**fields, **lists}))
            case {"returned": episode}:
                messages.put(EpisodeReturn(episode))
            case {"done": episode, **result}:
                messages.put(EpisodeEnd(episode, **result))
            case {"restart": episode}:
                messages.put(EpisodeRestart(episode))

    return emit


def _error_of(context: Mapping[str, Any]) -> BaseException:
    """Returns the error in an event loop's context: a bug of podrl on the loop's thread, which `poll` raises."""
    return context.get("exception") or RuntimeError(str(context.get("message")))
