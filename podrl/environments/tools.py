"""ToolEnvironment: the model calls tools in its turns, within limits, and reads their outputs or why a call failed."""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from podrl.config import nearest
from podrl.environments import calls, dr_tulu
from podrl.environments.config import EnvironmentConfig, MCPServer
from podrl.environments.protocol import Environment, Result, Role, Task, Turn
from podrl.mappings import ChatMessage, ToolDeclaration, ToolSchema, TurnRecord
from podrl.python_names import speaks_python
from podrl.workers.user_objects import name_of

Tool = Callable[..., Any] | str | MCPServer
EXCEEDED = "Max tool calls exceeded."


class ToolEnvironment:
    """Runs a model's tool calls while the model answers a prompt once or plays another environment.

    Pass the environment to a learner, or set env.environment='file.py:NAME' to the name of the object in a file.

    Attributes:
      config: tools, parser and limits of the environment.
    """

    @speaks_python
    def __init__(
        self,
        tools: Tool | Sequence[Tool] = (),
        *,
        inner: Environment | None = None,
        config: EnvironmentConfig | None = None,
        **settings: Any,
    ) -> None:
        """Stores the tools and their limits; starts no process.

        Args:
          tools: Python functions, names of functions ('file.py:function', or a built-in tool), and MCPServers.
          inner: environment that is played with tools: its `say` runs the calls in a turn and returns the first turn
            without a call. None lets the model answer once.
          config: complete settings, which replace `tools` and `settings`.
          settings: fields of EnvironmentConfig.

        Raises:
          ValueError: workers cannot find a function by file and name, or a setting is not allowed.
        """
        listed = [tools] if isinstance(tools, str | MCPServer) or callable(tools) else list(tools)
        servers = tuple(tool for tool in listed if isinstance(tool, MCPServer))
        functions = tuple(_named(tool) for tool in listed if not isinstance(tool, MCPServer))
        self.config = config or EnvironmentConfig(environment="tools", tools=functions, mcp=servers, **settings)
        self._inner = inner

    @property
    def observes_first(self) -> bool:
        """True if the inner environment begins with an observation (podrl.environments.protocol.Environment)."""
        return getattr(self._inner, "observes_first", False) is True

    async def run(self, task: Task, model: Any) -> Result | None:
        """Plays one episode, see podrl.environments.protocol.Environment."""
        with_tools = await self.over(task, model)
        if self._inner is not None:
            return await self._inner.run(task, with_tools)
        await with_tools.say()
        return Result()

    async def over(self, task: Task, model: Any) -> "WithTools":
        """Wraps a Model so that the calls in its turns are run.

        An environment that uses tools in only a part of its episode calls `over` itself.

        Args:
          task: the sample.
          model: the Model that podrl passed to `run`.
        """
        return WithTools(self.config, await model.toolset(self.config), task, model)


class WithTools:
    """A Model whose `say` runs the tool calls in a turn, and returns the first turn without a call.

    Attributes:
      calls: number of tool calls so far, including refused calls.
    """

    def __init__(self, config: EnvironmentConfig, tools: Sequence[ToolDeclaration], task: Task, model: Any) -> None:
        self._config, self._model = config, model
        self._tools = {tool["name"]: tool for tool in tools}
        self._format = calls.format_of(config.parser, list(self._tools))
        self._key = f"{task.mode}/{task.step}/{task.index}/{task.sample}/{task.seed}"
        self._call_counts: collections.Counter[str] = collections.Counter()  # by the name of the tool
        self._open = True  # False once a call exceeded env.max_tool_calls; later text is never read as a call
        self.calls = 0

    async def say(
        self,
        observation: str = "",
        *,
        role: Role = "raw",
        stop: Sequence[str] = (),
        max_new: int | None = None,
        reward: float = 0.0,
    ) -> Turn:
        """See podrl.environments.protocol.Model.say; `Turn.calls` lists the calls that `say` ran or refused."""
        turn = await self._turn(observation, role=role, stop=stop, max_new=max_new, reward=reward)
        all_calls: list[calls.Call] = []
        while wanted := self._format.calls(turn.text, turn.stop) if self._open else []:
            all_calls += wanted
            number = self.calls
            answers = await asyncio.gather(*[self._answer(call) for call in wanted])
            seen = self._format.observation([output for output, _ in answers], calls.call_id(self._key, number))
            turn = await self._turn(
                seen.text,
                role=self._format.role,
                stop=stop,
                max_new=max_new,
                reward=0.0,
                cuts=seen.cuts,
                cut_tokens=self._config.output_tokens,
                records=[record for _, record in answers],
            )
        return dataclasses.replace(turn, calls=tuple(all_calls))

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSchema] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        aside: bool = False,
    ) -> dict[str, Any]:
        """See podrl.environments.protocol.Model.chat; the caller must run the tool calls in the answer itself."""
        return await self._model.chat(messages, tools=tools, stop=stop, max_tokens=max_tokens, aside=aside)

    async def outside(self, what: str, make: Callable[[], Any]) -> Any:
        """See podrl.environments.protocol.Model.outside."""
        return await self._model.outside(what, make)

    async def _turn(self, observation: str, *, stop: Sequence[str], **limits: Any) -> Turn:
        """Samples the model's next turn.

        A call in a thought is a draft, which is not run. Its closing tag stops the generation nevertheless, so this
        method continues the turn.
        """
        turn = await self._model.observe(observation, stop=self._stops(stop), **limits)
        while self._open and turn.stop in self._format.stop and self._format.spoken(turn.text)[1]:
            left = None if limits["max_new"] is None else limits["max_new"] - len(turn.tokens)
            if left is not None and left <= 0:
                return dataclasses.replace(turn, stop="length")
            more = await self._model.observe("", role="raw", stop=self._stops(stop), max_new=left, reward=0.0)
            turn = Turn(turn.text + more.text, more.stop, (*turn.tokens, *more.tokens))
        return turn

    def _stops(self, stop: Sequence[str]) -> list[str]:
        return [*stop, *(self._format.stop if self._open else ())]

    async def _answer(self, call: calls.Call) -> tuple[calls.ToolOutput, TurnRecord]:
        self.calls += 1
        if self.calls > self._config.max_tool_calls:
            self._open, self._model.out_of_calls = False, True
            return _failure(call.name, EXCEEDED, "limit" if call.name in self._tools else "unknown_tool")
        if call.problem:
            return _failure(call.name, call.problem, "no_call")
        if (tool := self._tools.get(call.name)) is None:
            hint = nearest(call.name, self._tools) if len(self._tools) > 8 else ""
            text = f"There is no tool {calls.abbreviated(call.name)!r}.{hint} Tools: {', '.join(self._tools)}."
            return _failure(call.name, text, "unknown_tool")
        self._call_counts[call.name] += 1
        most = self._config.max_calls_per_tool.get(call.name)
        if most is not None and self._call_counts[call.name] > most:
            return _failure(call.name, f"Max calls of {call.name} exceeded.", "limit")
        schema = tool["schema"]
        parsed = dr_tulu.arguments(call.name, call.arguments, schema)
        arguments = {**tool.get("given", {}), **calls.fitted(parsed, schema, tool["query"])}
        reply = await self._model.call(tool["key"], call.name, arguments)
        text, failed = reply["text"], reply["failed"]
        record = {"by": call.name, "text": text, "failed": failed}
        record |= {"seconds": reply["seconds"], "replayed": reply["replayed"]}
        if failed or not tool["tag"]:
            return calls.ToolOutput([text]), record
        return calls.ToolOutput(dr_tulu.documents(text), tool["tag"]), record


def _failure(by: str, text: str, kind: str) -> tuple[calls.ToolOutput, TurnRecord]:
    record = {"by": calls.abbreviated(by), "text": text, "seconds": 0.0, "failed": kind, "replayed": False}
    return calls.ToolOutput([text]), record


def _named(tool: Callable[..., object] | str) -> str:
    name = name_of(tool)
    if name is None:
        raise ValueError(
            f"Tool {getattr(tool, '__name__', tool)!r} cannot be found by file and name (a lambda, a closure, or typed "
            "at a prompt): tools run in processes of their own; define it with `def` at the top of a file."
        )
    return name
