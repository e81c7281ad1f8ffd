"""Calls tools of MCP servers through one worker process, which holds the sessions with all servers."""

import asyncio
import dataclasses
import json
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Callable

from podrl.environments import mcp_worker
from podrl.environments.config import MCPServer
from podrl.mappings import JsonObject, ToolDeclaration
from podrl.runtime.service import ServiceError
from podrl.workers.process import LOAD_S, Process
from podrl.workers.user_code import Limits, is_of_the_job

_log = logging.getLogger("podrl.environments")
_MAX_DEATHS = 3  # the job ends after this many deaths of the process without an answer in between


class Servers:
    """Opens MCP servers and calls their tools; the worker process that holds the sessions is replaced when it dies."""

    def __init__(
        self, limits: Limits, deadline_s: float, on_lost: Callable[[Exception], None], error_files: pathlib.Path | None
    ) -> None:
        """Stores the arguments; the worker process starts with the first server.

        Args:
          limits: resources that the worker and the servers started by command may take, and variables they may see.
          deadline_s: longest time for which a server may be unreachable, seconds (env.server_deadline_s).
          on_lost: function that receives the error if a server was unreachable for longer than `deadline_s`.
          error_files: directory for the standard error of servers started by command, one file each; None writes to
            this process's own standard error.
        """
        self._error_files = error_files
        self._limits, self._deadline_s, self._on_lost = limits, deadline_s, on_lost
        self._process: Process | None = None
        self._open: dict[str, tuple[MCPServer, asyncio.Future[list[ToolDeclaration]]]] = {}
        self._calls: dict[int, tuple[JsonObject, asyncio.Future[JsonObject]]] = {}
        self._number, self._deaths = 0, 0

    async def open(self, server: MCPServer) -> list[ToolDeclaration]:
        """Connects to a server and lists its tools; a server that is connected already is not connected again.

        Returns:
          The tools: name, description and schema of each.

        Raises:
          ValueError: the server cannot be started or ends at its start, a variable that it needs is not set, or package
            mcp is missing.
          ServiceError: the server did not answer for `deadline_s`, or the worker process does not answer at all.
        """
        key = _key(server)
        if key not in self._open:
            server.check_command()
            server.secrets()  # raises an error if a variable is not set
            self._warn_withheld(server)
            self._open[key] = (server, asyncio.get_running_loop().create_future())
            if self._process is None:
                self._start()
            self._send_open(key)
        opened = self._open[key][1]
        # The worker watches `deadline_s` itself. This wait is longer by the time that the worker's own start may take.
        if not (await asyncio.wait({opened}, timeout=self._deadline_s + LOAD_S))[0]:
            raise self._no_reply_error(server, self._deadline_s + LOAD_S)
        return opened.result()

    async def call(self, server: MCPServer, name: str, arguments: JsonObject) -> JsonObject:
        """Calls a tool, and waits while the server is unreachable.

        Args:
          server: server that `open` has connected.
          name: the server's name for the tool.
          arguments: arguments by name, JSON values.

        Returns:
          The answer: 'text' and 'failed' (the kind of failure, or '').
        """
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        frame = {"call": number, "server": _key(server), "name": name, "arguments": arguments}
        self._calls[number] = (frame, future)
        assert self._process is not None
        self._process.send(frame)
        longest_s = (server.retries + 1) * (server.deadline_s + self._deadline_s + LOAD_S)
        try:
            if not (await asyncio.wait({future}, timeout=longest_s))[0]:
                self._on_lost(self._no_reply_error(server, longest_s))
            return await future
        finally:
            del self._calls[number]
            if not future.done() and self._process is not None:
                self._process.send({"cancel": number})

    def _no_reply_error(self, server: MCPServer, waited_s: float) -> ServiceError:
        return ServiceError(
            f"The process that talks to MCP server {server.target} did not answer for {waited_s:g} s: it is "
            "stopped, or this host is overloaded. The same command continues the run once the process answers; "
            "env.server_deadline_s says how long to wait."
        )

    def close(self) -> list[Process]:
        return [self._process.leave()] if self._process is not None else []

    def _start(self) -> None:
        self._process = Process(mcp_worker.__name__, self._limits, self._on_frame, self._on_exit)

    def _send_open(self, key: str) -> None:
        assert self._process is not None
        server = self._open[key][0]
        variables, headers = server.secrets()
        options = {
            "variables": variables,
            "headers": headers,
            "error_file": self._error_path(key),
            "unreachable_s": self._deadline_s,
        }
        self._process.send({"open": key, "server": dataclasses.asdict(server), **options})

    def _error_path(self, key: str) -> str:
        """Returns the path of the file for a command's standard error; '' for no file."""
        server = self._open[key][0]
        if self._error_files is None or server.is_url:
            return ""
        word = re.sub(r"[^A-Za-z0-9]+", "_", os.path.basename(shlex.split(server.target)[-1]))[:40]
        self._error_files.mkdir(parents=True, exist_ok=True)
        return str(self._error_files / f"{list(self._open).index(key)}-{word}.txt")

    def _warn_withheld(self, server: MCPServer) -> None:
        """Warns about environment variables that a server's command does not see because their names sound secret."""
        withheld = [name for name in self._limits.withheld(os.environ) if name not in server.environment]
        if (names := [name for name in withheld if not is_of_the_job(name)]) and not server.is_url:
            _log.warning(
                "MCP server %s is started without the environment variables %s, whose names sound secret: name the "
                "variables that it reads in MCPServer(environment=...).",
                *(server.target, ", ".join(names)),
            )

    def _on_frame(self, frame: JsonObject) -> None:
        match frame:
            case {"result": number, "reply": reply}:
                self._deaths = 0
                if number in self._calls and not self._calls[number][1].done():
                    self._calls[number][1].set_result(reply)
            case {"opened": key, "tools": tools}:
                self._finish_open(key, tools, None)
            case {"failed": key, "why": why}:
                target, future = self._open[key][0].target, self._open[key][1]
                if future.done():  # the server was connected before, so no caller waits for the future
                    self._on_lost(ServiceError(f"MCP server {target} {why}"))
                self._finish_open(key, [], ValueError(f"env.mcp: {target} {why}"))
            case {"unreachable": key, "why": why}:
                error = ServiceError(
                    f"MCP server {self._open[key][0].target} has been away for {self._deadline_s:g} s ({why}): the "
                    "same command goes on when it is back; env.server_deadline_s says how long to wait for it."
                )
                self._finish_open(key, [], error)
                self._on_lost(error)

    def _finish_open(self, key: str, tools: list[ToolDeclaration], error: Exception | None) -> None:
        future = self._open[key][1]
        if future.done():  # the server was opened again after the worker died
            return
        if error is None:
            future.set_result(tools)
        else:
            future.set_exception(error)

    def _on_exit(self) -> None:
        assert self._process is not None
        self._deaths += 1
        death = self._process.death()
        self._process.close()
        if self._deaths >= _MAX_DEATHS:
            self._process = None
            error = ServiceError(f"The process that talks to MCP servers died {_MAX_DEATHS} times in a row: {death}")
            for key in self._open:
                self._finish_open(key, [], error)
            self._on_lost(error)
            return
        self._start()
        for key in self._open:
            self._send_open(key)
        for frame, _ in self._calls.values():
            self._process.send(frame)


def _key(server: MCPServer) -> str:
    return json.dumps(dataclasses.asdict(server), sort_keys=True)
