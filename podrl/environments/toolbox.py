"""Loads the tools of a process's environments, and runs their calls in other processes; errors of calls become text."""

import asyncio
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from podrl.environments import dr_tulu, tool_worker
from podrl.environments.config import BUILT_IN_TOOLS, EnvironmentConfig, MCPServer
from podrl.environments.protocol import Task
from podrl.environments.servers import Servers
from podrl.mappings import JsonObject, ToolDeclaration
from podrl.workers.process import DiedError, LateWorkerError, Pool, Process
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import spec_at


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool: a Python function in a worker process, or a tool of an MCP server.

    Attributes:
      declared: declaration of the tool for environments. Its fields are key, name, description, schema, query (the
        argument that gets the text between tags), tag (the tag around each document of an answer; '' for none) and,
        for a Python function, task (the parameter that gets the sample).
      deadline_s: longest time of one call, seconds.
      retries: number of times that a call is repeated after its process died or its server's connection was lost.
      turn: semaphore that allows `concurrency` calls at a time, of the function or of all tools of the server together.
      spec: source of the Python function, see podrl.workers.user_objects; None for a server's tool.
      server: server of the tool; None for a Python function.
      theirs: the server's name for the tool; '' for a Python function.
    """

    declared: ToolDeclaration
    deadline_s: float
    retries: int
    turn: asyncio.Semaphore
    spec: Mapping[str, str] | None = None
    server: MCPServer | None = None
    theirs: str = ""


class Toolbox:
    """Holds all tools of this process's environments; its methods run on one event loop."""

    def __init__(
        self,
        limits: Limits,
        server_deadline_s: float,
        on_lost: Callable[[Exception], None],
        error_files: pathlib.Path | None = None,
    ) -> None:
        self._functions = Pool(tool_worker.__name__, limits)
        self._servers = Servers(limits, server_deadline_s, on_lost, error_files)
        self._tools: dict[str, Tool] = {}
        self._sets: dict[str, list[str]] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._resolving = asyncio.Lock()

    async def toolset(self, config: EnvironmentConfig) -> list[ToolDeclaration]:
        """Loads a configuration's tools and connects to their servers, at the first call for this configuration.

        Returns:
          The declarations of the tools, see `Tool.declared`.

        Raises:
          ValueError: a tool cannot be found or loaded, or two tools have the same name; the message names the tool.
          ServiceError: a server does not answer.
        """
        name = json.dumps(dataclasses.asdict(config), sort_keys=True)
        async with self._resolving:
            if name not in self._sets:
                found: list[Tool] = []
                wanted = [tool for tool in config.tools if tool in dr_tulu.TOOLS]
                for tool in config.tools:
                    if tool not in wanted:
                        found.append(await self._function(tool, config))
                for server in config.servers:
                    found += await self._offered(server, wanted)
                _check_names(config, [tool.declared["name"] for tool in found])
                self._sets[name] = self._unique(found, wanted)
        return [_with_defaults(self._tools[key].declared, config) for key in self._sets[name]]

    async def call(self, key: str, arguments: JsonObject, task: Task) -> JsonObject:
        """Calls a tool, and waits first until fewer than `concurrency` calls of the function, or of the server, run.

        Args:
          key: key of the tool in its declaration.
          arguments: arguments by name, JSON values.
          task: the sample that calls.

        Returns:
          The answer: 'text', 'failed' (the kind of failure, or '') and 'seconds' (time of the call, without the wait).
        """
        tool = self._tools[key]
        async with tool.turn:
            started = time.monotonic()
            if tool.server is not None:
                reply = await self._servers.call(tool.server, tool.theirs, arguments)
            else:
                fields = dataclasses.asdict(task) if tool.declared["task"] else {}
                reply = await self._call_function(tool, {"arguments": arguments, "task": fields})
        return {"text": reply["text"], "failed": reply["failed"], "seconds": time.monotonic() - started}

    async def close(self) -> list[Process]:
        """Asks all processes to end.

        Returns:
          The processes, which the caller must close.
        """
        return [*await self._functions.close(), *self._servers.close()]

    async def _call_function(self, tool: Tool, request: JsonObject) -> JsonObject:
        assert tool.spec is not None
        body = json.dumps(request).encode()
        for attempt in range(tool.retries + 1):
            try:
                return await self._functions.call(tool.declared["key"], tool.spec, body, tool.deadline_s)
            except LateWorkerError:
                return {"text": f"Timed out after {tool.deadline_s:g} s.", "failed": "deadline"}
            except DiedError as error:
                if attempt == tool.retries:
                    return {"text": f"The tool failed: {error}", "failed": "died"}
        raise AssertionError

    async def _function(self, tool: str, config: EnvironmentConfig) -> Tool:
        place, _, name = tool.rpartition(":")
        try:
            spec = {"module": BUILT_IN_TOOLS[tool], "name": tool} if tool in BUILT_IN_TOOLS else spec_at(place, name)
            key = json.dumps(spec, sort_keys=True)
            declared = await self._functions.load(key, spec)
        except (ValueError, LateWorkerError, DiedError) as error:
            raise ValueError(f"env.tools: {tool!r} cannot be loaded: {error}") from error
        declared = {**declared, "key": key, "query": dr_tulu.query_of(declared["schema"]), "tag": ""}
        # The pool may have one process for each call that its tools can run at the same time.
        self._functions.most += 0 if key in self._tools else config.concurrency
        return Tool(declared, config.call_deadline_s, config.retries, self._turn(key, config.concurrency), spec)

    async def _offered(self, server: MCPServer, wanted: list[str]) -> list[Tool]:
        there = {tool["name"]: tool for tool in await self._servers.open(server)}
        if server.names:
            names = list(server.names)
        elif wanted:  # the server offers only those tools of env.tools that it has
            names = [name for name in wanted if _theirs(name, server, there)]
        else:
            names = list(there)
        found = []
        for name in names:
            theirs = _theirs(name, server, there)
            if not theirs:
                raise ValueError(
                    f"env.mcp: {server.target} has no tool {server.aliases.get(name, name)!r}: it has "
                    f"{', '.join(there) or 'none'}. Name others in `names`, or map the model's word in `aliases`."
                )
            key = json.dumps([dataclasses.asdict(server), name], sort_keys=True)
            known = dr_tulu.TOOLS.get(name)
            declared = {
                **there[theirs],
                "name": name,
                "key": key,
                "query": server.query.get(name) or dr_tulu.query_of(there[theirs]["schema"]),
                "tag": server.result.get(name, known.tag if known else ""),
            }
            turn = self._turn(json.dumps(dataclasses.asdict(server)), server.concurrency)
            found.append(Tool(declared, server.deadline_s, server.retries, turn, server=server, theirs=theirs))
        return found

    def _turn(self, name: str, concurrency: int) -> asyncio.Semaphore:
        return self._turns.setdefault(name, asyncio.Semaphore(concurrency))

    def _unique(self, tools: list[Tool], wanted: list[str]) -> list[str]:
        """Stores the tools, and returns their keys.

        Raises:
          ValueError: two tools have the same name, or no server has a tool in `wanted`.
        """
        names: dict[str, Tool] = {}
        for tool in tools:
            name = tool.declared["name"]
            if name in names:
                raise ValueError(
                    f"Two tools are called {name!r}: one of {_home(names[name])}, one of {_home(tool)}. Leave it "
                    "out of the `names` of one MCPServer, or give it another name there that `aliases` maps to it."
                )
            names[name] = tool
            self._tools[tool.declared["key"]] = tool
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"env.tools names {', '.join(missing)}, which no server in env.mcp has.")
        return [tool.declared["key"] for tool in tools]


def _check_names(config: EnvironmentConfig, names: Sequence[str]) -> None:
    for key, named in (("max_calls_per_tool", config.max_calls_per_tool), ("arguments", config.arguments)):
        if unknown := [name for name in named if name not in names]:
            raise ValueError(f"env.{key} names {', '.join(unknown)}, but the tools are {', '.join(names)}.")


def _with_defaults(declared: ToolDeclaration, config: EnvironmentConfig) -> ToolDeclaration:
    """Declares the arguments in env.arguments as optional in a tool's schema, and adds their values as 'given'."""
    schema = declared["schema"]
    defaults = dr_tulu.arguments(declared["name"], config.arguments.get(declared["name"], {}), schema)
    if not defaults:
        return declared
    required = [name for name in schema.get("required", []) if name not in defaults]
    return {**declared, "schema": {**schema, "required": required}, "given": defaults}


def _theirs(name: str, server: MCPServer, there: Mapping[str, object]) -> str:
    """Returns a server's name for the tool that the model calls `name`; '' if the server has no such tool."""
    known = dr_tulu.TOOLS.get(name)
    words = [server.aliases[name]] if name in server.aliases else [name, *(known.theirs if known else ())]
    return next((word for word in words if word in there), "")


def _home(tool: Tool) -> str:
    return tool.server.target if tool.server else str((tool.spec or {}).get("file") or (tool.spec or {}).get("module"))
