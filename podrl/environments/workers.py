"""The host side of environments: episodes in subprocesses, who waits for what, and what is replayed after a death."""

import contextlib
import dataclasses
import pathlib
import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from podrl.environments.calls import Cuts
from podrl.environments.config import EnvironmentConfig
from podrl.environments.host import Called, Host
from podrl.environments.host import EnvironmentFailure as EnvironmentFailure
from podrl.environments.journal import Journal
from podrl.environments.protocol import Role, Task, Turn
from podrl.workers.child import refuse_inside
from podrl.workers.process import Loop
from podrl.workers.user_code import Limits


@dataclasses.dataclass(frozen=True)
class Say:
    """An observation for a sample, which then samples on; answered with `Episodes.turn`.

    Attributes:
      episode: as given to `Episodes.start`.
      observation: text to append; '' for none.
      role: 'raw', 'user' or 'tool'; see podrl.environments.protocol.Model.say.
      stop: strings at which the turn ends, the end of the model's turn aside.
      max_new: sampled tokens at most; None for what room there is.
      reward: of the turn before; goes to its last sampled token.
      records: what made the observation, JSON-able: {"by", "text", "seconds", "failed", "replayed"}, one per call.
      cuts: ranges [start, end) of characters of `observation`, ascending, in a group for each tool output in it.
      cut_tokens: tokens that each group may have. This side has no tokenizer: `observation` comes whole, and the
        engine's side makes `podrl.environments.calls.shortened` of it before it encodes it.
      chat: fields of a podrl.rollout.branches.Asked, which is answered instead of an observation; None for none.
      dropped: numbers of earlier requests of the episode whose answers nobody received.
    """

    episode: int
    observation: str
    role: Role
    stop: tuple[str, ...]
    max_new: int | None
    reward: float
    records: tuple[dict[str, Any], ...] = ()
    cuts: Cuts = ()
    cut_tokens: int = 0
    chat: Mapping[str, Any] | None = None
    dropped: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Done:
    """An episode that has ended.

    Attributes:
      reward, metrics, text: of its Result.
      reason: 'ended' by its own return, or because `say` found no room; 'turns': env.max_turns were over; 'calls': it
        ended after a call beyond env.max_tool_calls; 'deadline': env.deadline_s or env.blocked_s passed; 'failed': its
        program failed. After the last two the sample must leave the loss.
      dropped: as in Say.
      why: error of a program that failed, with the end of what it wrote to standard error.
    """

    episode: int
    reward: float | None
    metrics: dict[str, float]
    text: str | None
    reason: Literal["ended", "turns", "calls", "deadline", "failed"]
    why: str = ""
    dropped: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Anew:
    """An episode that begins from its first request again: what it said and was told so far is void."""

    episode: int


Message = Say | Done | Anew


class Episodes:
    """All episodes of this process; one thread may call it.

    Attributes:
      parser: of the calls of the environment's tools.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        limits: Limits,
        *,
        journal: Journal | None,
        called: Called | None = None,
        said: pathlib.Path | None = None,
    ) -> None:
        """Starts the workers and loads the environment and its tools into them.

        Args:
          config: names the environment.
          limits: what each process with code of users may take and see.
          journal: where outside answers are kept; None for nowhere.
          called: told of every call that is made, on a thread of this object; of none that the journal answers.
          said: directory of a file for each server that is started by command, with what it writes to standard error;
            None for this process's own.

        Raises:
          ValueError: says why it cannot be loaded.
          ServiceError: an MCP server does not answer.
        """
        refuse_inside()
        self._messages: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._host = Host(config, limits, journal, _emit_to(self._messages), called, said)
        messages = self._messages
        self._loop = Loop("podrl-episodes", lambda context: messages.put(_error_of(context)))
        self._finalizer = weakref.finalize(self, self._loop.end, self._host.close)
        try:
            self.parser, self._tools = self._loop.run(self._host.open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tools(self) -> list[dict[str, Any]]:
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

    def start(self, episode: int, task: Task) -> None:
        """Starts an episode; its first Say or Done comes from `poll`."""
        self._loop.soon(self._host.start, episode, task)

    def turn(self, episode: int, turn: Turn) -> None:
        """Answers a Say; `Turn("", stop=protocol.FULL)` says that there was no room for it, and `say` raises Ended."""
        value: dict[str, Any] = {"text": turn.text, "stop": turn.stop, "tokens": [int(token) for token in turn.tokens]}
        if turn.prompt:
            value["prompt"] = [int(token) for token in turn.prompt]
        if turn.logprobs:
            value |= {"logprobs": [float(logprob) for logprob in turn.logprobs], "pieces": list(turn.pieces)}
        self._loop.soon(self._host.turn, episode, value)

    def cancel(self, episode: int) -> None:
        """Forgets an episode; what it said before may still come from `poll`."""
        self._loop.soon(self._host.cancel, episode)

    def poll(self, timeout_s: float) -> list[Message]:
        """All that has come, or what comes first within `timeout_s`; [] where nothing does.

        Raises:
          EnvironmentFailure: the environment raised, was refused on a replay, or cannot be kept alive.
          ServiceError: an MCP server was away for env.server_deadline_s.
        """
        found: list[Message] = []
        with contextlib.suppress(queue.Empty):
            message = self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
            while True:
                if isinstance(message, BaseException):
                    self._failure = self._failure or message
                else:
                    found.append(message)
                message = self._messages.get_nowait()
        if self._failure is not None:
            raise self._failure
        return found

    def waiting(self) -> list[str]:
        """Lists the calls that episodes wait for: 'calculator of sample 3 of prompt 17, 41 s'."""
        return self._host.waiting()

    def close(self) -> None:
        """Ends every process; returns when none is left."""
        self._finalizer()


def _emit_to(messages: queue.SimpleQueue[Any]) -> Callable[[Mapping[str, Any] | BaseException], None]:
    def emit(event: Mapping[str, Any] | BaseException) -> None:
        match event:
            case BaseException():
                messages.put(event)
            case {"say": episode, **said}:
                cuts = tuple(tuple((start, end) for start, end in group) for group in said["cuts"])
                lists = {"stop": tuple(said["stop"]), "records": tuple(said["records"]), "cuts": cuts}
                messages.put(Say(episode, **{**said, **lists}))
            case {"done": episode, **result}:
                messages.put(Done(episode, **result))
            case {"anew": episode}:
                messages.put(Anew(episode))

    return emit


def _error_of(context: Mapping[str, Any]) -> BaseException:
    """A fault of ours on the loop's thread, to be raised where somebody sees it."""
    return context.get("exception") or RuntimeError(str(context.get("message")))
