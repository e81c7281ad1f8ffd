"""The process that runs environments: `python -m podrl.environments.worker`, started by podrl.environments.host.

Many episodes share the event loop of the process. podrl imports no jax here, and the process ends when its parent does.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import re
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO, get_args

from podrl.environments.calls import Cuts
from podrl.environments.config import NONE, PROGRAM, EnvironmentConfig
from podrl.environments.programs import AgentFailure, ProgramEnvironment
from podrl.environments.protocol import FULL, REFUSED, Ended, Model, OutsideError, Result, Role, Task, Turn
from podrl.environments.tools import ToolEnvironment
from podrl.environments.wire import chat as wire_chat
from podrl.environments.wire.requests import ASIDE, Answer, Choice, ParsedRequest, RefusedRequest
from podrl.mappings import ChatMessage, JsonObject, ToolDeclaration, ToolSchema, TurnRecord
from podrl.workers import child
from podrl.workers.frames import pack
from podrl.workers.user_objects import LoadError, explain, explain_load, extend_path, load, short

HEARTBEAT_S = 0.2  # a frame is sent this often, so that the host knows that the event loop runs
_EPISODE_FRAMES = ("start", "turn", "answer", "rest", "cancel")  # kinds of frames that belong to one episode
# Errors of these types are mistakes of the environment's code if they come before the model's first answer.
_MISTAKES = (AttributeError, LookupError, NameError, TypeError)
_YIELDS = 3  # rounds of the event loop after each frame, so that the frame's episode runs before the next frame comes


class RemoteModel:
    """The Model of one episode: it sends the environment's requests to the host as frames, and awaits the answers."""

    def __init__(self, send: Callable[[JsonObject], None], attempt: int, config: EnvironmentConfig) -> None:
        self._send, self._attempt, self._config = send, attempt, config
        self._outside_requests, self._turns = 0, 0
        self.out_of_turns = False  # True once the environment has asked for a turn beyond env.max_turns
        self.out_of_calls = False  # True once the model has made a call beyond env.max_tool_calls
        self.rested = asyncio.Event()  # set once the episode does not count towards env.processes any more
        self._turn: asyncio.Future[Turn] | None = None
        self._answers: dict[int, asyncio.Future[JsonObject]] = {}
        self._records: list[TurnRecord] = []
        self._dropped: list[int] = []
        self._trained: set[str] = set()  # ids of answers that are trained
        self._rewards: list[tuple[int, float]] = []

    async def say(
        self,
        observation: str = "",
        *,
        role: Role = "raw",
        stop: Sequence[str] = (),
        max_new: int | None = None,
        reward: float = 0.0,
    ) -> Turn:
        """See podrl.environments.protocol.Model.say."""
        return await self.observe(observation, role=role, stop=stop, max_new=max_new, reward=reward)

    async def observe(
        self,
        observation: str,
        *,
        role: Role,
        stop: Sequence[str],
        max_new: int | None,
        reward: float,
        cuts: Cuts = (),
        cut_tokens: int = 0,
        records: Sequence[TurnRecord] = (),
        chat: JsonObject | None = None,
        overlaps: bool = False,
    ) -> Turn:
        """Does the work of `say` and `chat`; arguments are the fields of podrl.environments.workers.EpisodeObservation.

        Raises:
          Ended: the sample has no room or no turns left.
          RefusedRequest: a request in `chat` cannot be honoured.
          RuntimeError: an earlier call has not returned yet.
          ValueError: there is no such role.
        """
        if role not in get_args(Role):
            raise ValueError(f"role={role!r} must be one of {', '.join(map(repr, get_args(Role)))}.")
        if self._turn is not None:
            raise RuntimeError("An episode says one thing at a time: `await` each model.say before the next.")
        if self._turns == self._config.max_turns:
            self.out_of_turns = True
            raise Ended(f"env.max_turns={self._config.max_turns} turns are over.")
        observation_fields = {
            "observation": str(observation).encode(errors="replace").decode(),  # UTF-8 cannot encode lone surrogates
            "role": role,
            "stop": list(stop),
            "max_new": max_new,
            "reward": float(reward),
            "cuts": cuts,
            "cut_tokens": cut_tokens,
        } | ({} if chat is None else {"chat": chat, **self.news()})
        self._turn = asyncio.get_running_loop().create_future()
        frame = {"turn_request": self._attempt, "fields": observation_fields, "records": [*self._records, *records]}
        self._send(frame | ({"overlaps": True} if overlaps else {}))
        self._records = []
        try:
            turn = await self._turn
        finally:
            self._turn = None
        if turn.stop == REFUSED:
            raise RefusedRequest(**json.loads(turn.text))
        if turn.stop == FULL:
            raise Ended("There is no room for the observation (rollout.max_response_tokens).")
        self._turns += 1
        return turn

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSchema] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        aside: bool = False,
    ) -> dict[str, Any]:
        """See podrl.environments.protocol.Model.chat."""
        body = {"model": f"policy{ASIDE * aside}", "messages": list(messages), "tools": list(tools), "stop": list(stop)}
        request_body, parser = json.loads(json.dumps(body | {"max_tokens": max_tokens})), self._config.parser
        request = wire_chat.read(request_body, ("policy",), parser)
        answer = await self.answer(request)
        id_ = wire_chat.call_ids(answer, 0)
        return wire_chat.assistant_message(
            answer.choices[0], stop=request.stop, tools=request.model_request.tools, parser=parser, id=id_
        )

    async def answer(self, request: ParsedRequest, *, overlaps: bool = False) -> Answer:
        """Answers a parsed HTTP request, in the same way as `chat` answers a conversation.

        Args:
          request: request for one answer.
          overlaps: True if the request came while an earlier request of the episode was open.

        Raises:
          RefusedRequest: the request cannot be rendered as a prompt.
          Ended: the sample has no room or no turns left.
        """
        model_request, answer = request.model_request, Answer(str(self._turns), 0, (), ())
        names = ("messages", "text", "ids", "tools", "stop_ids", "max_new", "aside", "pieces")
        chat_fields = {name: getattr(model_request, name) for name in names}
        chat_fields |= {"stop": request.stop, "logprobs": request.logprobs}
        chat_fields |= {"parser": self._config.parser, "id": wire_chat.call_ids(answer, 0)}
        chat_fields = json.loads(json.dumps(chat_fields))  # turns tuples into lists, as the host receives them
        limits = {"stop": model_request.stop, "max_new": model_request.max_new}
        turn = await self.observe("", role="raw", reward=0.0, **limits, chat=chat_fields, overlaps=overlaps)
        choice = Choice(turn.text, turn.tokens, turn.logprobs, turn.pieces, turn.stop)
        if not model_request.aside:
            self._trained.add(answer.id)
        return dataclasses.replace(answer, prompt_ids=turn.prompt, choices=[choice])

    @property
    def answers(self) -> int:
        """Number of answered requests, which is also the number of the next request."""
        return self._turns

    def drop(self, request: int) -> None:
        """Reports that no client received the answer to a request, so that the host removes it from the sample."""
        self._dropped.append(request)

    def reward(self, answer: str, reward: float) -> None:
        """Adds a reward to an earlier answer; the id `answer` may have the prefix of an HTTP API, such as 'chatcmpl-3'.

        Raises:
          RefusedRequest: the episode has no trained answer of this id.
        """
        if (number := re.split("[-_]", answer)[-1]) not in self._trained:
            why = f"This episode has no answer {answer[:80]!r} that is trained: give the `id` of an earlier answer."
            raise RefusedRequest(404, "unknown_request", why, "request")
        self._rewards.append((int(number), reward))

    def news(self) -> JsonObject:
        """Returns the requests that were dropped and the rewards that were added since the last call of `news`."""
        news = {"dropped": self._dropped, "rewards": self._rewards}
        self._dropped, self._rewards = [], []
        return news

    def clock(self, *, runs: bool) -> None:
        """Starts or stops the clock of env.deadline_s, which counts the time of the episode's own work."""
        self._send({"clock": runs, "attempt": self._attempt})

    async def outside(self, what: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """See podrl.environments.protocol.Model.outside."""
        number = self._next_number()
        reply = await self._request(number, {"what": f"outside {what}"})
        if "make" in reply:
            started = time.monotonic()
            try:
                answer: dict[str, object] = {"answer": await make()}
            except Exception as error:  # noqa: BLE001 - recorded as text, and raised as an OutsideError below
                answer = {"raised": f"{type(error).__name__}: {error}"}
            try:
                json.dumps(answer)
            except (TypeError, ValueError) as error:
                raise TypeError(f"outside({what!r}) must give JSON, not {short(answer)}: {error}") from error
            reply = await self._request(number, {"made": answer | {"seconds": time.monotonic() - started}})
        failed = reply.get("raised", "")
        text = failed or json.dumps(reply["answer"])
        self._records.append(record(what, text, "exception" if failed else "", reply))
        if failed:
            raise OutsideError(failed)
        return reply["answer"]

    async def toolset(self, config: EnvironmentConfig) -> list[ToolDeclaration]:
        """Gets the declarations of a ToolEnvironment's tools, see podrl.environments.toolbox.Tool.declared."""
        return (await self._request(self._next_number(), {"toolset": dataclasses.asdict(config)}))["tools"]

    async def call(self, key: str, name: str, arguments: JsonObject) -> JsonObject:
        """Calls a tool.

        Args:
          key: key of the tool in its declaration.
          name: name of the tool.
          arguments: arguments by name, JSON values.

        Returns:
          The answer: 'text', 'failed' (the kind of failure, or ''), 'seconds' (time of the call) and 'replayed'
          (True if the answer came from the journal).
        """
        description = f"{name} {json.dumps(arguments, sort_keys=True)}"
        return await self._request(self._next_number(), {"what": description, "tool": key, "arguments": arguments})

    def on_turn(self, turn: Turn) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(turn)

    def on_answer(self, number: int, reply: JsonObject) -> None:
        if (waiting := self._answers.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(reply)

    def _next_number(self) -> int:
        self._outside_requests += 1
        return self._outside_requests - 1

    async def _request(self, number: int, request: JsonObject) -> JsonObject:
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._send({"outside": self._attempt, "number": number, **request})
        return await self._answers[number]


def record(by: str, text: str, failed: str, reply: JsonObject) -> TurnRecord:
    """Makes the record of one outside answer, which is sent with the next observation.

    Args:
      by: name of the tool, or description of the request.
      text: the answer as text.
      failed: kind of failure; '' if the call succeeded.
      reply: the host's reply, with 'seconds' and 'replayed' if they are known.
    """
    return {
        "by": by,
        "text": text,
        "seconds": reply.get("seconds", 0.0),
        "failed": failed,
        "replayed": reply.get("replayed", False),
    }


class _ResultError(TypeError):
    """Says that `run` returned an object other than a podrl.Result, or a Result with a field of a wrong type."""


class OneTurn:
    """The environment 'none' of env.others: the model answers once, without tools."""

    async def run(self, task: Task, model: Model) -> None:
        """Plays one episode, see podrl.environments.protocol.Environment."""
        await model.say()


class _Worker:
    """Runs the episodes of this process."""

    def __init__(self, replies: BinaryIO) -> None:
        self._replies = replies
        self._config, self._folder = EnvironmentConfig(), ""
        self._environments: dict[
            str, Any
        ] = {}  # environments by name: a class (every episode gets an instance), or one object for all episodes
        self._models: dict[int, RemoteModel] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def handle(self, frame: JsonObject) -> None:
        match frame:
            case {"load": specs, "config": config, "path": path, "folder": folder}:
                extend_path(path)
                self._folder = folder
                self._load(specs, EnvironmentConfig(**config))
            case {"start": attempt, "task": task, "rested": rested}:
                model = self._models[attempt] = RemoteModel(self.send, attempt, self._config)
                if rested:
                    model.rested.set()
                self._tasks[attempt] = asyncio.create_task(self._play(attempt, Task(**task)))
            case {"turn": attempt, "value": turn} if attempt in self._models:
                self._models[attempt].on_turn(Turn(**turn))
            case {"answer": attempt, "number": number, "reply": reply} if attempt in self._models:
                self._models[attempt].on_answer(number, reply)
            case {"rest": attempt} if attempt in self._models:
                self._models[attempt].rested.set()
            case {"cancel": attempt} if attempt in self._tasks:
                self._tasks[attempt].cancel()

    def send(self, frame: JsonObject) -> None:
        self._replies.write(pack(frame))
        self._replies.flush()

    async def send_heartbeats(self, every_s: float) -> None:
        while True:
            self.send({"heartbeat": True})
            await asyncio.sleep(every_s)

    def _load(self, specs: Mapping[str, Mapping[str, str] | None], config: EnvironmentConfig) -> None:
        """Loads env.environment and env.others.

        Args:
          specs: source of each environment by its name; None for an environment that comes with podrl.
          config: settings of the environments.
        """
        self._config = config
        name = ""
        reply: dict[str, object] = {"loaded": None}
        try:
            for name, spec in specs.items():
                environment = self._environments[name] = _environment(name, spec, config, self._folder)
                _check_playable(environment)
            reply["observe_first"] = [
                name for name, one in self._environments.items() if getattr(one, "observes_first", False) is True
            ]
            own = getattr(self._environments[config.environment], "config", None)
            reply["loaded"] = dataclasses.asdict(own) if isinstance(own, EnvironmentConfig) else None
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
            file = (specs[name] or {}).get("file", "")
            reply = {"loaded": None, "name": name, "raised": explain_load(error, file)}
        self.send(reply)

    async def _play(self, attempt: int, task: Task) -> None:
        try:
            result = Result()
            with contextlib.suppress(Ended):
                played = await self._environment_of(task).run(task, self._models[attempt])
                result = result if played is None else played
            model = self._models[attempt]
            reason = "turns" if model.out_of_turns else "calls" if model.out_of_calls else "ended"
            self.send({"done": attempt, "reason": reason, **model.news(), **_result_fields(result)})
        except asyncio.CancelledError:
            raise
        except AgentFailure as failure:
            failure_fields = {"reward": None, "metrics": failure.metrics(), "text": None, "why": str(failure)}
            self.send({"done": attempt, "reason": "failed", **failure_fields})
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
            why, certain = _explained(error, answered=self._models[attempt].answers > 0)
            self.send({"raised": attempt, "why": why, "certain": certain})
        finally:
            del self._models[attempt], self._tasks[attempt]

    def _environment_of(self, task: Task) -> Any:
        """Returns the environment that the task's field `env` names, else env.environment; a class is instantiated."""
        environment = self._environments.get(str(task.fields.get("env")), self._environments[self._config.environment])
        return environment() if inspect.isclass(environment) else environment


def _environment(name: str, spec: Mapping[str, str] | None, config: EnvironmentConfig, folder: str) -> Any:
    if spec is None and name == PROGRAM:
        return ProgramEnvironment(config, folder)
    if spec is None:
        return OneTurn if name == NONE else ToolEnvironment(config=config)
    return load(spec)


def _check_playable(environment: Any) -> None:
    """Checks that an environment has `async def run(task, model)` and, if it is a class, needs no arguments.

    Raises:
      LoadError: an episode cannot use the environment; the message says why.
    """
    if inspect.isroutine(environment):
        raise LoadError(
            f"{environment.__name__} is a function: name a class (or an object) that has `async def run(self, task, "
            "model)`. A function that the model may call belongs in env.tools."
        )
    a_class, run = inspect.isclass(environment), getattr(environment, "run", None)
    name = environment.__name__ if a_class else f"the {type(environment).__name__} {short(environment)}"
    if not callable(run) or (inspect.isroutine(run) and not inspect.iscoroutinefunction(inspect.unwrap(run))):
        other = ", but a plain `def run`: write `async` before it" if callable(run) else ""
        raise LoadError(f"{name} has no `async def run(self, task, model)`{other}.")
    try:
        if a_class:
            inspect.signature(environment).bind()
    except TypeError as error:
        why = f"{name} is made anew for each episode, without arguments ({error}): give them defaults"
        raise LoadError(f"{why}, or name an object in place of the class.") from None
    except ValueError:  # a class without a signature, such as one written in C
        pass
    unbound = a_class and not isinstance(inspect.getattr_static(environment, "run"), staticmethod | classmethod)
    try:
        inspect.signature(run).bind(*[None] * (3 if unbound else 2))
    except TypeError as error:
        raise LoadError(f"`run` of {name} is called with task and model: {error}.") from None
    except ValueError:
        pass


def _explained(error: BaseException, *, answered: bool) -> tuple[str, bool]:
    """Explains an error of an episode: (text, True if the code is wrong whatever the model answers).

    Args:
      error: exception that `run` raised, or the _ResultError about its result.
      answered: True if the model had answered before.
    """
    if isinstance(error, _ResultError):
        return str(error), True
    why = explain(error)
    if isinstance(error, AttributeError | TypeError) and re.search(r"\bcoroutine\b", str(error)):
        warnings.filterwarnings("ignore", "coroutine 'RemoteModel")  # Python's own words for the same
        return f"{why}: write `await` before model.say, model.chat and model.outside", True
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    variable = raising.f_code is os.environ.__getitem__.__code__  # another machine may have it
    return why, not answered and isinstance(error, _MISTAKES) and not variable


def _result_fields(result: Any) -> JsonObject:
    """Converts a Result to JSON.

    Raises:
      _ResultError: `result` is not a Result, or has a field of a wrong type.
      ValueError: the reward or a metric is not a finite number.
    """
    if not isinstance(result, Result):
        must = "it must return a podrl.Result, such as podrl.Result(reward=1.0), or None"
        raise _ResultError(f"run returned {short(result)} ({type(result).__name__}): {must}")
    if not isinstance(result.metrics, Mapping):
        raise _ResultError(f"run returned metrics={short(result.metrics)}, not numbers by name")
    metrics = {str(name): _number(str(name), value) for name, value in result.metrics.items()}
    reward = None if result.reward is None else _number("reward", result.reward)
    for name, value in {**metrics, "reward": reward or 0.0}.items():
        if value != value or abs(value) == float("inf"):
            raise ValueError(f"run returned {name}={value}, not a finite number")
    if result.text is not None and not isinstance(result.text, str):
        raise _ResultError(f"run returned text={short(result.text)} ({type(result.text).__name__}), not a text")
    return {"reward": reward, "metrics": metrics, "text": result.text}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _ResultError(f"run returned {name}={short(value)} ({type(value).__name__}), not a number") from None


async def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    worker = _Worker(replies)
    heartbeats = asyncio.create_task(worker.send_heartbeats(HEARTBEAT_S))
    async for frame, _ in child.frames(requests):
        # This report is sent before the frame is handled. If the worker then sends nothing more, the host knows which
        # episode blocks the worker.
        worker.send({"handling": next((frame[kind] for kind in _EPISODE_FRAMES if kind in frame), None)})
        worker.handle(frame)
        for _ in range(_YIELDS):
            await asyncio.sleep(0)
    heartbeats.cancel()


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    requests, replies = child.begin()
    asyncio.run(_serve(requests, replies))


if __name__ == "__main__":
    main()
