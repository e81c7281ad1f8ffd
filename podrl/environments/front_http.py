"""Serves HTTP/1.1 for the front: parses requests, sends responses, and reads and writes JSON."""

import asyncio
import collections
import contextlib
import email.utils
import functools
import http
import json
import socket
import time
import traceback
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httptools
import msgspec

from podrl.environments.calls import DEPTH, check_depth
from podrl.environments.wire.requests import RefusedRequest

BACKLOG = 4096  # largest number of connections that wait to be accepted
_IDLE_S = 3600.0  # longest time that a client may send no request, or read nothing of a response
_END_S = 1.0  # longest wait for open requests at the end of the server
_SILENT_S = 60.0  # longest wait for the next piece of a body; meanwhile the request counts as open
_MAX_HEAD = 1 << 16  # largest number of bytes of a head, or of the trailers of a body
_MAX_UNREAD = 1 << 16  # largest number of bytes of a body that may arrive before they are read
_MAX_WAITING = 64  # largest number of requests of a connection that wait for the response to an earlier request
# A body that is too long is read and dropped, up to this many times the allowed length, because most clients read no
# answer before they have sent everything.
_DRAINED = 4


class Client:
    """One HTTP request of a connection, and the response to it.

    Attributes:
      method: HTTP method.
      path: path of the URL.
      started: True once the headers of the response were sent.
      disconnected: True once the client has hung up.
      keep_alive: True if the connection can take another request after this one.
    """

    def __init__(
        self,
        connection: "Connection",
        method: str,
        url: bytes,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        """Keeps the head of the request.

        Args:
          connection: connection of the request.
          method: HTTP method.
          url: path and query.
          headers: headers, with their names in lower case.
          keep_alive: True if the client wants the connection to stay open.
          chunked: True if the client reads a response in chunks (HTTP/1.1).
        """
        path, _, self._query = url.decode("latin-1").partition("?")
        self.method, self.path, self._headers = method, urllib.parse.unquote(path), headers
        self.started = self.disconnected = False
        self.keep_alive, self._chunked, self._connection = keep_alive, chunked, connection
        self._unread, self._complete = bytearray(), False
        self._wake_up: asyncio.Future[bool] | None = None

    def header(self, name: str) -> str:
        """Returns the value of a header, or '' if the request has no such header; `name` is in lower case."""
        return self._headers.get(name.encode(), b"").decode("latin-1").strip()

    @property
    def key(self) -> str:
        """The key that the client sent; '' if it sent none."""
        if self.path == "/":  # a browser sends no header
            return dict(urllib.parse.parse_qsl(self._query)).get("key", "")
        kind, _, key = self.header("authorization").partition(" ")
        return key.strip() if kind.lower() == "bearer" else self.header("x-api-key")

    # The body of the request.

    def receive_body(self, piece: bytes, *, complete: bool) -> int:
        """Adds a piece of the body; returns the number of bytes that the application has not read yet."""
        self._unread += piece
        self._complete = complete
        self.wake()
        return len(self._unread)

    async def read_body(self, max_bytes: int) -> bytearray:
        """Reads the whole body.

        Raises:
          RefusedRequest: the body is longer than `max_bytes`, or the client stopped sending.
          ConnectionError: the client hung up.
        """
        content, length = await self._read(max_bytes, _DRAINED * max_bytes)
        if length > max_bytes:
            raise RefusedRequest(
                413, "request_too_large", f"The body is longer than {max_bytes} bytes: send a shorter one."
            )
        return content

    async def drain(self, max_bytes: int) -> None:
        """Reads up to `max_bytes` of the body and drops them; a longer body is no error, unlike in `read_body`."""
        await self._read(0, max_bytes)

    async def _read(self, kept_bytes: int, max_bytes: int) -> tuple[bytearray, int]:
        """Reads the body, and stops once it has more than `max_bytes`; returns (the body, its length).

        A body of more than `kept_bytes` is dropped, and the returned body is empty.
        """
        content, length = bytearray(), 0
        if self.disconnected:
            raise ConnectionError
        if not self._complete and not self._unread and self.header("expect").lower() == "100-continue":
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            piece, self._unread = self._unread, bytearray()
            length += len(piece)
            if length > kept_bytes:
                content.clear()
            else:
                content += piece
            # Reading resumes after the last piece, too: a connection that does not read cannot notice a hang-up.
            self._connection.resume()
            if self._complete or length > max_bytes:
                return content, length
            if not await self.wait(_SILENT_S):
                why = f"No piece of the body came for {_SILENT_S:g} s, the longest wait: send the request again."
                raise RefusedRequest(408, "request_timeout", why)

    # Waiting.

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits until `wake` is called; returns False if this takes longer than `seconds` (None: no limit).

        Raises:
          ConnectionError: the client hung up.
        """
        woken = True
        if not self.disconnected:
            loop = asyncio.get_running_loop()
            self._wake_up = loop.create_future()
            timer = None if seconds is None else loop.call_later(seconds, self.wake, False)
            try:
                woken = await self._wake_up
            finally:
                if timer is not None:
                    timer.cancel()
        if self.disconnected:
            raise ConnectionError
        return woken

    def wake(self, woken: bool = True) -> None:
        """Wakes the task that waits in `wait`, if there is one."""
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(woken)

    # The response.

    async def send_response(self, status: int, content_type: str, content: bytes, headers: str = "") -> None:
        """Sends a whole response; `headers` are further lines of its head.

        Raises:
          ConnectionError: the client hung up.
        """
        head = self._head(status, content_type, f"{headers}content-length: {len(content)}\r\n")
        await self._send(head if self.method == "HEAD" else head + content)

    async def send_events(self, text: str, *, more: bool = True) -> None:
        """Sends a part of a stream of server-sent events; `more` is False for the last part.

        Raises:
          ConnectionError: the client hung up.
        """
        self.keep_alive, content = self.keep_alive and self._chunked, text.encode()
        if self._chunked:
            content = (b"%x\r\n%b\r\n" % (len(content), content) if content else b"") + b"0\r\n\r\n" * (not more)
        if not self.started:
            framing = "transfer-encoding: chunked\r\n" * self._chunked
            content = (
                self._head(200, "text/event-stream; charset=utf-8", f"cache-control: no-store\r\n{framing}") + content
            )
        await self._send(content)

    def _head(self, status: int, content_type: str, headers: str) -> bytes:
        # If the request is not complete yet, its rest could be taken for the next request.
        self.keep_alive = self.keep_alive and self._complete
        end = "" if self.keep_alive else "connection: close\r\n"
        return (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ndate: {_date(int(time.time()))}\r\n"
            f"content-type: {content_type}\r\nx-content-type-options: nosniff\r\n{headers}{end}\r\n"
        ).encode()

    async def _send(self, data: bytes) -> None:
        while self._connection.full or self.disconnected:
            await self.wait()
        self.started = True
        self._connection.write(data)


class Connection(asyncio.Protocol):
    """One connection: parses its requests, and passes them to the application one after the other.

    Attributes:
      full: True while too many written bytes wait for the client to read them.
      work: task that answers the requests.
      active_s: time at which bytes last arrived, a response ended or `full` became True; clock of the event loop.
    """

    def __init__(self, app: Callable[[Client], Awaitable[None]], connections: "set[Connection]") -> None:
        """Keeps the arguments.

        Args:
          app: function that answers a request.
          connections: set that has this connection while it is open.
        """
        self.full, self.active_s = False, 0.0
        self._app, self._connections, self._loop = app, connections, asyncio.get_running_loop()
        self._clients: collections.deque[Client] = collections.deque()  # open requests; the first is being answered
        self._request: asyncio.Future[None] | None = None  # future that is done when a request has arrived
        self._unparsed = 0  # number of bytes since the end of a head, or since the last piece of a body
        self._parser = self._new_parser()

    @property
    def busy(self) -> bool:
        """True if a request of this connection waits for its response."""
        return bool(self._clients)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Otherwise a request that follows the last request of a connection would make the last request fail, too.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def write(self, data: bytes) -> None:
        """Sends bytes to the client."""
        self._transport.write(data)

    def resume(self) -> None:
        """Resumes reading from the client, unless a request waits for the response to an earlier request."""
        if len(self._clients) <= 1:
            self._transport.resume_reading()

    def close(self) -> None:
        """Closes the connection after all written bytes are sent."""
        self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once, and drops the bytes that the client has not read."""
        self._transport.abort()

    async def _answer(self) -> None:
        while not self._transport.is_closing():
            if not self._clients:
                self._request = self._loop.create_future()
                await self._request
                continue
            client = self._clients[0]
            try:
                await self._app(client)
            except Exception:  # noqa: BLE001 - one request must not end the others
                traceback.print_exc()
                with contextlib.suppress(ConnectionError):
                    client.keep_alive = False
                    if not client.started:
                        await client.send_response(500, "text/plain", b"Internal Server Error")
            self._clients.popleft()
            self.active_s = self._loop.time()
            if not client.keep_alive or not client.started:
                self.close()
            self.resume()

    def _wake(self) -> None:
        if self._request is not None and not self._request.done():
            self._request.set_result(None)

    # Methods that the event loop calls (asyncio.Protocol).

    def connection_made(self, transport: Any) -> None:
        """Begins to answer requests."""
        self._transport: Any = transport
        self._connections.add(self)
        self.active_s = self._loop.time()
        self.work = self._loop.create_task(self._answer())

    def connection_lost(self, exc: Exception | None) -> None:
        """Marks the clients of all open requests as gone, and wakes them."""
        self._connections.discard(self)
        self._wake()
        for client in self._clients:
            client.disconnected = True
            client.wake()

    def pause_writing(self) -> None:
        """Makes responses wait until the client has read more."""
        self.full, self.active_s = True, self._loop.time()

    def resume_writing(self) -> None:
        """Continues the response that waits."""
        self.full = False
        for client in self._clients:
            client.wake()

    def data_received(self, data: bytes) -> None:
        """Parses bytes of requests."""
        self.active_s = self._loop.time()
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The client offers another protocol, as Java's client does in its first request. The parser skips the body
            # of such a request, so another parser gets the request without the offer.
            if self._headers.pop(b"upgrade", None) is None:
                self._refuse("The server opens no tunnels: send no CONNECT.")
                return
            version = self._parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
            head += [b"%b: %b" % header for header in self._headers.items()]
            self._parser = self._new_parser()
            self.data_received(b"\r\n".join([*head, b"", b""]) + data[offer.args[0] :])
        except httptools.HttpParserError as error:
            # If `on_headers_complete` raised an error, that error is the context of `error`.
            self._refuse(str(error.__context__ or f"The request is not HTTP/1.1: {error}."))
        else:
            if self._unparsed > _MAX_HEAD:
                self._refuse(f"The head or a trailer is longer than {_MAX_HEAD} bytes: send a shorter one.")

    def _refuse(self, why: str) -> None:
        if not any(client.started for client in self._clients):
            body = to_json(RefusedRequest(400, "invalid_http", why).error())
            head = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
        self.close()

    # Methods that the parser calls.

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._url, self._headers = b"", dict[bytes, bytes]()
        self._client: Client | None = None

    def on_url(self, url: bytes) -> None:
        """Takes a piece of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header; drops a trailer of a body."""
        if self._client is None:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Appends the request to the queue of the application, which answers one request at a time."""
        parser, self._unparsed = self._parser, 0
        if parser.should_upgrade():
            return
        chunked, method = parser.get_http_version() != "1.0", parser.get_method().decode()
        self._client = Client(
            self, method, self._url, self._headers, keep_alive=parser.should_keep_alive(), chunked=chunked
        )
        self._clients.append(self._client)
        self._wake()
        if len(self._clients) > 1:
            self._transport.pause_reading()
        if len(self._clients) > _MAX_WAITING:  # many requests came in one piece
            # The parser turns this error into an HttpParserError.
            raise ValueError(f"More than {_MAX_WAITING} requests wait for the response to an earlier one: send fewer.")

    def on_body(self, piece: bytes) -> None:
        """Takes a piece of the body."""
        self._unparsed = 0
        if self._client is not None and self._client.receive_body(piece, complete=False) > _MAX_UNREAD:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Ends the body."""
        self._unparsed = 0
        if self._client is not None:
            self._client.receive_body(b"", complete=True)


@contextlib.asynccontextmanager
async def serving(app: Callable[[Client], Awaitable[None]], listening: socket.socket) -> AsyncIterator[None]:
    """Serves HTTP while the context is open, and then gives open requests 1 s to end.

    Args:
      app: function that answers a request. If it raises an error before the response has begun, the client gets
        status 500.
      listening: socket that listens.
    """
    loop, connections = asyncio.get_running_loop(), set[Connection]()

    async def end_idle() -> None:
        while True:
            await asyncio.sleep(_IDLE_S / 60)
            for connection in [*connections]:
                waits_for_client = connection.full or not connection.busy
                if waits_for_client and loop.time() - connection.active_s > _IDLE_S:
                    connection.abort()  # `close` would wait for the client to read the rest of a response

    server = await loop.create_server(lambda: Connection(app, connections), sock=listening, backlog=BACKLOG)
    ending = loop.create_task(end_idle())
    try:
        yield
    finally:
        ending.cancel()
        server.close()
        end = loop.time() + _END_S
        while any(connection.busy for connection in connections) and loop.time() < end:
            await asyncio.sleep(0.02)


def parse(body: bytes | bytearray) -> Any:
    """Parses the JSON of a body.

    Raises:
      RefusedRequest: the body is not JSON, nests deeper than `DEPTH`, or has NaN, an infinity, or half of a surrogate
        pair, which no text can hold.
    """
    try:
        value = msgspec.json.decode(body)
        if body.count(b"[") + body.count(b"{") > DEPTH:  # bodies with fewer brackets need no check
            check_depth(value)
        return value
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, "invalid_json", f"The body is not JSON that can be read: {error}.") from None


def to_json(value: object) -> bytes:
    """Writes a value as JSON; NaN and infinities become null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a model can write half of a surrogate pair into the arguments of a call
        return json.dumps(value).encode()


@functools.lru_cache(1)
def _date(second: int) -> str:
    return email.utils.formatdate(second, usegmt=True)
