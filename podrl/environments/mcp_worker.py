"""The process that holds MCP sessions: `python -m podrl.environments.mcp_worker`, started by `servers.py`.

All calls to a server share one session; a session that broke is opened again. The code works with package mcp 1.24 to
2.x; if a name differs between versions, the code tries both names. It never imports jax.
"""

import asyncio
import collections
import contextlib
import logging
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, BinaryIO, TextIO

from podrl.environments.config import MCPServer
from podrl.environments.tool_worker import plain
from podrl.mappings import JsonObject, ToolDeclaration
from podrl.workers import child
from podrl.workers.frames import pack

_CONNECT_S = 30.0  # longest time to connect and list the tools
_PING_S = 5.0  # longest wait for a server's answer to a ping
_WATCH_S = 2.0  # time between two checks of the server during a call
_PAGES = 1000  # largest number of pages of a server's list of tools that are read after its first page
_LAST_LINES = 20  # largest number of lines of a command's standard error that an error message repeats
_FILE_BYTES = 16 << 20  # largest size of the file with a command's standard error
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # pauses between attempts to connect
# The command runs under PR_SET_PDEATHSIG (1) with SIGKILL (9): the kernel kills it when this process ends, whatever
# the reason.
_DIE_WITH_PARENT = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9);os.execvp(sys.argv[1],sys.argv[1:])"


class _Server:
    """A server, and the session with it while it is connected."""

    def __init__(
        self,
        key: str,
        server: MCPServer,
        secrets: "_ServerSecrets",
        unreachable_s: float,
        send: Callable[[JsonObject], None],
    ) -> None:
        self._key, self._server, self._secrets, self._send = key, server, secrets, send
        self._max_unreachable_s = unreachable_s
        self._session: Any = None
        self._ready, self._broken = asyncio.Event(), asyncio.Event()
        self._checks: set[asyncio.Task[None]] = set()

    async def keep_connected(self) -> None:
        """Keeps the server connected; returns when it cannot be started or was unreachable for too long."""
        disconnected_at, pause, opened = time.monotonic(), _FIRST_PAUSE_S, False
        while True:
            why = "the connection closed"
            connecting = _connect(self._server.target, self._server.command, self._secrets)
            try:
                async with asyncio.timeout(_CONNECT_S) as limit, connecting as session:
                    await session.initialize()
                    tools = await _list_tools(session)
                    limit.reschedule(None)
                    opened = True
                    self._broken.clear()
                    self._session = session
                    self._ready.set()
                    self._send({"opened": self._key, "tools": [_declaration(tool) for tool in tools]})
                    pause = _FIRST_PAUSE_S
                    await self._broken.wait()
                    disconnected_at = time.monotonic()
                    limit.reschedule(asyncio.get_running_loop().time() + _PING_S)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - a server may be unreachable in many ways
                why = self._secrets.hide(_describe(error))
                if not self._server.is_url and not opened and not isinstance(_innermost(error), TimeoutError):
                    last = self._secrets.last_lines() or "(nothing)"
                    why = f"ended at its start, or is not an MCP server ({why}). Its standard error ends:\n{last}"
                    self._send({"failed": self._key, "why": why})
                    return
            self._ready.clear()
            if time.monotonic() - disconnected_at + pause > self._max_unreachable_s:
                self._send({"unreachable": self._key, "why": why})
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def call(self, name: str, arguments: JsonObject) -> dict[str, str]:
        """Calls a tool, and waits while the server is unreachable.

        Args:
          name: the server's name for the tool.
          arguments: arguments by name, JSON values.

        Returns:
          The answer: 'text' and 'failed' (the kind of failure, or '').
        """
        why = ""
        for _ in range(self._server.retries + 1):
            await self._ready.wait()
            session = self._session
            try:
                result = await asyncio.wait_for(
                    self._call_while_alive(session, name, arguments), self._server.deadline_s
                )
            except TimeoutError:
                check = asyncio.create_task(self._reopen_if_dead(session))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
                return {"text": f"Timed out after {self._server.deadline_s:g} s.", "failed": "deadline"}
            except Exception as error:  # noqa: BLE001 - a refusal becomes text; a lost connection leads to a new attempt
                why = _describe(error)
                if session is self._session and await self._alive(session):
                    return {"text": plain(why), "failed": "arguments"}
                self._break(session)
                continue
            failed = getattr(result, "is_error", None) if hasattr(result, "is_error") else result.isError
            texts = [_text_of(part) for part in result.content]
            return {"text": plain("\n".join(texts)), "failed": "exception" if failed else ""}
        return {"text": f"The connection to the tool was lost: {plain(why)}", "failed": "lost"}

    async def _call_while_alive(self, session: Any, name: str, arguments: JsonObject) -> Any:
        """Calls a tool; meanwhile checks that a server on the network still runs, because some clients do not notice
        its end.

        Raises:
          ConnectionError: the server is gone.
        """
        call = asyncio.create_task(session.call_tool(name, dict(arguments)))
        try:
            while not (await asyncio.wait({call}, timeout=_WATCH_S))[0]:
                if self._server.is_url and await self._is_gone(session):
                    self._break(session)
                    raise ConnectionError("the server is gone")
            return call.result()
        finally:
            call.cancel()

    async def _is_gone(self, session: Any) -> bool:
        """Returns True if nothing listens at the server's address, or if the server lost the session; False if the
        server is only busy."""
        url = urllib.parse.urlsplit(self._server.target)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(url.hostname, port), _PING_S)
            writer.close()
            await asyncio.wait_for(session.send_ping(), _PING_S)
        except TimeoutError:
            return False
        except Exception:  # noqa: BLE001 - clients report a lost server by many errors
            return True
        return False

    async def _reopen_if_dead(self, session: Any) -> None:
        """Opens the session again if the server does not answer a ping; used after a call that took too long."""
        if not await self._alive(session):
            self._break(session)

    async def _alive(self, session: Any) -> bool:
        try:
            await asyncio.wait_for(session.send_ping(), _PING_S)
        except Exception:  # noqa: BLE001 - clients report a lost server by many errors
            return False
        return True

    def _break(self, session: Any) -> None:
        if session is self._session:
            self._session = None
            self._ready.clear()
            self._broken.set()


class _ServerSecrets:
    """The secrets that a server gets, and the standard error of its command, from which these secrets are removed.

    Attributes:
      variables: environment variables that a command gets besides the variables of this process.
      headers: http headers for a server on the network, by name.
    """

    def __init__(self, variables: Mapping[str, str], headers: Mapping[str, str], error_file: str) -> None:
        """Stores the arguments.

        Args:
          variables: environment variables that a command gets besides the variables of this process.
          headers: http headers for a server on the network, by name.
          error_file: path of the file for the command's standard error; '' writes to this process's own standard error.
        """
        self.variables, self.headers, self._error_file = dict(variables), dict(headers), error_file
        values = {word for text in (*variables.values(), *headers.values()) for word in (text, *text.split())}
        self._hidden = sorted((value for value in values if len(value) > 3), key=len, reverse=True)
        self._last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._reader: threading.Thread | None = None

    def hide(self, text: str) -> str:
        for value in self._hidden:
            text = text.replace(value, "***")
        return text

    @contextlib.contextmanager
    def captured_stderr(self) -> Iterator[TextIO]:
        """Opens a pipe for a command's standard error; a thread reads it and keeps the last lines."""
        read, write = os.pipe()
        self._last.clear()
        self._reader = threading.Thread(target=self._keep, args=(read,), name="podrl-server-stderr", daemon=True)
        self._reader.start()
        with os.fdopen(write, "w") as file:
            yield file

    def last_lines(self) -> str:
        """Returns the last lines of the command's standard error; waits at most 5 s for the command to end."""
        if self._reader is not None:
            # The wait has a limit, because a process that the command left behind may keep the pipe open.
            self._reader.join(_PING_S)
        return "".join(self._last).rstrip()

    def _keep(self, read: int) -> None:
        out = open(self._error_file, "a") if self._error_file else None  # noqa: SIM115 - sys.stderr stays open
        with os.fdopen(read, errors="replace") as lines, contextlib.closing(out) if out else contextlib.nullcontext():
            for line in iter(lambda: lines.readline(1 << 16), ""):
                line = self.hide(line)
                self._last.append(line[:1000])
                with contextlib.suppress(OSError):  # a full disk must not end the reading, or the pipe blocks
                    if out is None or out.tell() < _FILE_BYTES:
                        print(line, end="", file=out or sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def _connect(target: str, command: list[str], secrets: _ServerSecrets) -> AsyncIterator[Any]:
    """Opens a session over stdio, sse (for an address that ends in /sse) or streamable http.

    Args:
      target: address of the server; not used if `command` has words.
      command: words of the command that starts the server; empty for a server on the network.
      secrets: secrets of the server, and the receiver of its standard error.
    """
    from mcp import ClientSession
    from mcp.shared._httpx_utils import create_mcp_http_client

    stack = contextlib.AsyncExitStack()
    if command:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        guarded = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command]
        started = {"command": guarded[0], "args": guarded[1:], "env": {**os.environ, **secrets.variables}}
        errors = stack.enter_context(secrets.captured_stderr())
        transport: Any = stdio_client(StdioServerParameters(**started, encoding_error_handler="replace"), errors)
    elif target.rstrip("/").endswith("/sse"):
        from mcp.client.sse import sse_client

        transport = sse_client(target, headers=secrets.headers)
    else:
        from mcp.client.streamable_http import streamable_http_client

        client = await stack.enter_async_context(create_mcp_http_client(headers=secrets.headers))
        transport = streamable_http_client(target, http_client=client)
    async with stack, transport as (read, write, *_), ClientSession(read, write) as session:
        yield session


async def _list_tools(session: Any) -> list[Any]:
    """Lists all tools of a server, page by page.

    Raises:
      ValueError: the list repeats a page, or has more than 1,001 pages.
    """
    from mcp.types import PaginatedRequestParams

    tools, seen, params = [], set(), None
    while True:
        page = await session.list_tools(params=params)
        tools += page.tools
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if not cursor:
            return tools
        if cursor in seen:
            raise ValueError(f"its list of tools repeats the page {cursor[:80]!r} after {len(seen) + 1} pages")
        if len(seen) == _PAGES:
            raise ValueError(f"its list of tools goes on after {len(seen) + 1} pages, and podrl reads no more")
        seen.add(cursor)
        params = PaginatedRequestParams(cursor=cursor)


def _declaration(tool: Any) -> ToolDeclaration:
    schema = dict(getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {})
    for name, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name, kind()), kind):
            del schema[name]
    return {"name": tool.name, "description": tool.description or "", "schema": schema}


def _text_of(content: Any) -> str:
    """Gets the text of one part of a server's answer, or of the resource in the part.

    The text of a part without text is the name of its kind, such as '[image]'.
    """
    text = getattr(content, "text", None)
    if text is None:
        text = getattr(getattr(content, "resource", None), "text", None)
    return f"[{content.type}]" if text is None else text


def _describe(error: BaseException) -> str:
    """Describes an error by its class and the first line of its message; an exception group by its first error."""
    error = _innermost(error)
    text = str(error).strip().partition("\n")[0][:300] or "no answer in time" * isinstance(error, TimeoutError)
    return f"{type(error).__name__}{': ' * bool(text)}{text}"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    servers: dict[str, _Server] = {}
    keepers: list[asyncio.Task[None]] = []
    calls: dict[int, asyncio.Task[None]] = {}

    def send(frame: JsonObject) -> None:
        replies.write(pack(frame))
        replies.flush()

    async def answer(frame: JsonObject) -> None:
        try:
            try:
                reply = await servers[frame["server"]].call(frame["name"], frame["arguments"])
            except Exception as error:  # noqa: BLE001 - a malformed answer of a server; without a reply the call would hang
                reply = {"text": plain(_describe(error)), "failed": "exception"}
            send({"result": frame["call"], "reply": reply})
        finally:
            del calls[frame["call"]]

    async for frame, _ in child.frames(requests):
        match frame:
            case {"open": key, "server": server, "unreachable_s": unreachable_s}:
                secrets = _ServerSecrets(frame["variables"], frame["headers"], frame["error_file"])
                servers[key] = _Server(key, MCPServer(**server), secrets, unreachable_s, send)
                keepers.append(asyncio.create_task(servers[key].keep_connected()))
            case {"call": number}:
                calls[number] = asyncio.create_task(answer(frame))
            case {"cancel": number} if number in calls:
                calls[number].cancel()
    for keeper in keepers:
        keeper.cancel()
    await asyncio.gather(*keepers, return_exceptions=True)


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    requests, replies = child.begin()
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # the host reports the failures
    asyncio.run(_serve(requests, replies))


if __name__ == "__main__":
    main()
