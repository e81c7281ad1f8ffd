"""The process of the front: `python -m podrl.environments.front_worker`, started by podrl.environments.front.

The process is an HTTP server. It passes each request as a frame to its owner, the process that started it, and gets the
answer back as frames. It checks the keys of episodes, joins retries to open requests, and notices clients that hang up.
It never imports jax.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import hashlib
import hmac
import itertools
import socket
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import uvloop

from podrl.environments.front_http import BACKLOG, Client, parse, serving, to_json
from podrl.environments.front_page import FrontPage
from podrl.environments.wire import chat, completions, generate, messages, responses, reward
from podrl.environments.wire.requests import ASIDE, Answer, AnswerPart, Choice, ParsedRequest, RefusedRequest
from podrl.mappings import JsonObject
from podrl.runtime.sockets import raise_descriptor_limit
from podrl.workers import child
from podrl.workers.frames import frame_of

_BEAT_S = 3.0  # an idle stream sends a comment this often, so that no proxy closes it
_LARGE = 1 << 20  # size of a body in bytes above which bodies are read one after the other, which bounds the memory
_KEPT = 32  # number of requests of an episode above which the oldest answered requests are forgotten
_DIALECTS: Mapping[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/completions": completions,
    "/inference/v1/generate": generate,
    reward.PATH: reward,
}
_TYPED = ("/v1/responses", "/v1/messages")  # paths whose errors and events have a field `type`
_JSON = "application/json"
# Many clients split a stream at every character that Unicode calls the end of a line, as str.splitlines does. JSON
# itself escapes all of these characters but three.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# Headers of the page's response; they forbid scripts.
_NO_SCRIPTS = (
    "content-security-policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
    "referrer-policy: no-referrer\r\ncache-control: no-store\r\n"
)


@dataclasses.dataclass(eq=False)
class _Exchange:
    """A request that was passed to the owner, its answer so far, and the clients that wait for it.

    Attributes:
      number: number of the request in frames.
      request: the request, parsed.
      dialect: module that writes the answer.
      digest: SHA-256 of the path and the body, by which a retry is recognised.
      parts: parts of the answer so far; empty unless the request asks for parts.
      outcome: the whole answer, or the refusal; None while the request is open.
      clients: clients that wait for the answer.
      delivered: True once the whole answer was sent to a client that was still connected.
    """

    number: int
    request: ParsedRequest
    dialect: Any
    digest: bytes
    parts: list[AnswerPart] = dataclasses.field(default_factory=list)
    outcome: Answer | RefusedRequest | None = None
    clients: list[Client] = dataclasses.field(default_factory=list)
    delivered: bool = False

    def receive(self, event: AnswerPart | Answer | RefusedRequest) -> None:
        """Stores a part or the outcome, and wakes the waiting clients; parts after the outcome are ignored."""
        if self.outcome is None:
            if isinstance(event, AnswerPart):
                self.parts.append(event)
            else:
                self.outcome = event
            for client in self.clients:
                client.wake()


class _Episode:
    """The requests of one key.

    Attributes:
      name: name of the episode in frames.
      open: semaphore that limits the open requests.
      ended: True once the owner has closed the key.
      exchanges: requests that a retry may join, by their digests, the newest last.
    """

    def __init__(self, name: str, max_requests: int) -> None:
        self.name, self.open, self.ended = name, asyncio.Semaphore(max_requests), False
        self.exchanges: collections.OrderedDict[bytes, _Exchange] = collections.OrderedDict()


class Endpoint:
    """The application of the HTTP server: checks keys, passes requests to the owner and its answers to clients."""

    def __init__(self, settings: JsonObject, send: Callable[[JsonObject], None]) -> None:
        """Keeps the arguments.

        Args:
          settings: fields of a podrl.environments.front.FrontSettings.
          send: function that sends a frame to the owner.
        """
        self._models: list[str] = list(settings["models"])
        self._parser: str = settings["parser"]
        self._max_requests: int = settings["max_requests"]
        self._max_body_bytes: int = settings["body_bytes"]
        self._context: int = settings["context_tokens"]
        self._grace_s: float = settings["grace_s"]
        self._page = FrontPage(self._parser) if settings["page"] else None
        self._send = send
        self._episodes: dict[bytes, _Episode] = {}  # episodes by the digests of their keys
        self._digests: dict[str, bytes] = {}  # digests of keys, by the names of episodes
        self._exchanges: dict[int, tuple[_Episode, _Exchange]] = {}
        self._numbers = itertools.count()
        self._large = asyncio.Lock()

    # Frames of the owner.

    def receive(self, frame: JsonObject, numbers: bytes = b"") -> None:
        """Acts on a frame of the owner; `numbers` are the token ids and log-probabilities of an answer."""
        match frame:
            case {"open": name, "key": key}:
                digest = self._digests[name] = _digest(key)
                self._episodes[digest] = _Episode(name, self._max_requests)
            case {"close": name} if name in self._digests:
                self._close(name)
            case {"part": number, "fields": fields} if number in self._exchanges:
                self._exchanges[number][1].receive(AnswerPart(**{**fields, "choice": Choice(**fields["choice"])}))
            case {"answer": number, "fields": fields} if number in self._exchanges:
                exchange, answer = self._exchanges[number][1], Answer.from_frame(fields, numbers)
                if self._page is not None and exchange.outcome is None and exchange.dialect is not reward:
                    self._page.add(exchange.request, answer)
                exchange.receive(answer)
            case {"refusal": number, "fields": fields} if number in self._exchanges:
                self._forget(*self._exchanges[number], RefusedRequest(**fields))

    def _close(self, name: str) -> None:
        episode = self._episodes.pop(self._digests.pop(name))
        episode.ended = True
        for owner, exchange in list(self._exchanges.values()):
            if owner is episode:
                self._forget(episode, exchange, _episode_ended())

    def _forget(self, episode: _Episode, exchange: _Exchange, refusal: RefusedRequest | None = None) -> None:
        """Forgets a request, so that no retry joins it; clients that wait for it are refused with `refusal`."""
        self._exchanges.pop(exchange.number, None)
        if episode.exchanges.get(exchange.digest) is exchange:
            del episode.exchanges[exchange.digest]
        if refusal is not None:
            exchange.receive(refusal)

    # Requests of clients.

    async def __call__(self, client: Client) -> None:
        """Answers one HTTP request of a connection."""
        with contextlib.suppress(ConnectionError):  # the client hung up
            try:
                await self._handle(client)
            except RefusedRequest as refused:
                error = refused.error() | ({"type": "error"} if client.path in _TYPED else {})
                if client.started:
                    await client.send_events(_event(error), more=False)
                else:
                    await client.send_response(refused.status, _JSON, to_json(error))

    async def _handle(self, client: Client) -> None:
        if client.path == "/health" and client.method == "GET":
            await client.send_response(200, _JSON, to_json({"status": "ok"}))
            return
        try:
            episode = self._episode(client)
            if self._page is not None and client.path == "/" and client.method == "GET":
                await client.send_response(200, "text/html; charset=utf-8", self._page.html(), _NO_SCRIPTS)
                return
            if client.path != "/v1/models" and client.path not in _DIALECTS:
                served = ", ".join([*_DIALECTS, "/v1/models"])
                raise RefusedRequest(404, "not_found", f"There is no path {client.path[:80]!r}; there are {served}.")
            if client.method != (method := "POST" if client.path in _DIALECTS else "GET"):
                why = f"{client.path} takes {method}, and the request has {client.method[:80]}."
                raise RefusedRequest(405, "method_not_allowed", why)
        except RefusedRequest:
            with contextlib.suppress(RefusedRequest):
                # The body is read before the refusal, because most clients read no answer while they still send.
                await client.drain(self._max_body_bytes)
            raise
        if client.path == "/v1/models":
            await client.send_response(200, _JSON, to_json(self._model_list()))
            return
        async with episode.open:  # a request waits here before its body is read, so that it takes no memory
            await self._answer(client, episode)

    def _episode(self, client: Client) -> _Episode:
        """Finds the episode of a client's key.

        Raises:
          RefusedRequest: no open episode has this key.
        """
        # The duration of a look-up by digest tells an attacker nothing about the key.
        digest = _digest(client.key)
        episode = self._episodes.get(digest)
        known = self._digests[episode.name] if episode is not None else bytes(len(digest))
        if not hmac.compare_digest(known, digest) or episode is None:
            raise RefusedRequest(
                401, "invalid_api_key", "No open episode has this key: send 'Authorization: Bearer KEY'."
            )
        return episode

    def _model_list(self) -> JsonObject:
        names = [name + end for name in self._models for end in ("", ASIDE)]
        shared: dict[str, object] = {"object": "model", "created": 0, "owned_by": "podrl"}
        shared |= {"max_model_len": self._context} if self._context else {}
        return {"object": "list", "data": [{"id": name, **shared} for name in names]}

    async def _answer(self, client: Client, episode: _Episode) -> None:
        declared = client.header("content-length")
        small = declared.isdigit() and len(declared) < 10 and int(declared) <= _LARGE
        async with contextlib.nullcontext() if small else self._large:
            exchange = self._exchange_of(client, episode, await client.read_body(self._max_body_bytes))
        exchange.clients.append(client)
        try:
            await (self._send_stream if exchange.request.stream else self._send_whole)(client, exchange)
        finally:
            exchange.clients.remove(client)
            self._on_client_done(episode, exchange)

    def _exchange_of(self, client: Client, episode: _Episode, body: bytearray) -> _Exchange:
        """Finds the request that a retry repeats, or passes a new request to the owner.

        Raises:
          RefusedRequest: the body is not JSON, a field cannot be honoured, or the episode has ended.
        """
        hashed = hashlib.sha256(client.path.encode() + b"\0")
        hashed.update(body)
        digest = hashed.digest()
        if client.header("x-stainless-retry-count") not in ("", "0") and digest in episode.exchanges:
            return episode.exchanges[digest]
        dialect = _DIALECTS[client.path]
        request = dialect.read(parse(body), self._models, self._parser)
        if episode.ended:  # the owner closed the key while the body arrived
            raise _episode_ended()
        exchange = _Exchange(next(self._numbers), request, dialect, digest)
        earlier = episode.exchanges.pop(digest, None)  # retries join the newer request from now on
        if earlier is not None and earlier.delivered:
            self._forget(episode, earlier)
        answered = (old for old in episode.exchanges.values() if old.delivered and not old.clients)
        for old in list(itertools.islice(answered, max(len(episode.exchanges) - _KEPT, 0))):
            self._forget(episode, old)
        # `asdict` would copy every message: the copies took an eighth of this process's time.
        fields = {**vars(request), "model_request": vars(request.model_request)}
        self._send({"request": exchange.number, "episode": episode.name, "fields": fields})
        # The request is stored only after `_send`, so that no retry joins a request that could not be written.
        episode.exchanges[digest], self._exchanges[exchange.number] = exchange, (episode, exchange)
        return exchange

    def _on_client_done(self, episode: _Episode, exchange: _Exchange) -> None:
        """Cancels a request after its last client has hung up, unless a retry joins it within `grace_s` seconds."""

        def cancel_if_unread() -> None:
            if not exchange.clients and not exchange.delivered and exchange.number in self._exchanges:
                self._forget(episode, exchange)
                self._send({"disconnect": exchange.number})

        if exchange.delivered and episode.exchanges.get(exchange.digest) is not exchange:
            # A newer request has the same body, and retries join the newer request.
            self._exchanges.pop(exchange.number, None)
        elif not exchange.clients and not exchange.delivered:
            asyncio.get_running_loop().call_later(self._grace_s, cancel_if_unread)

    async def _send_whole(self, client: Client, exchange: _Exchange) -> None:
        while exchange.outcome is None:
            await client.wait()
        if isinstance(exchange.outcome, RefusedRequest):
            raise exchange.outcome
        await client.send_response(
            200, _JSON, to_json(exchange.dialect.write(exchange.request, exchange.outcome, self._parser))
        )
        self._mark_delivered(exchange)

    async def _send_stream(self, client: Client, exchange: _Exchange) -> None:
        stream, sent = None, 0
        while True:
            if sent == len(exchange.parts) and exchange.outcome is None:
                if not await client.wait(_BEAT_S):
                    await client.send_events(": at work\n\n")
                continue
            if isinstance(exchange.outcome, RefusedRequest):
                raise exchange.outcome
            first = exchange.parts[0] if exchange.parts else exchange.outcome
            assert first is not None
            if stream is None:
                stream = exchange.dialect.AnswerStream(exchange.request, first.id, first.created, self._parser)
            new, sent = exchange.parts[sent:], len(exchange.parts)
            chunks = [chunk for part in new for chunk in stream.part(part.index, part.choice)]
            if exchange.outcome is None:
                await client.send_events("".join(map(_event, chunks)))
                continue
            chunks += stream.end(exchange.outcome)
            done = "" if client.path in _TYPED else "data: [DONE]\n\n"
            await client.send_events("".join(map(_event, chunks)) + done, more=False)
            self._mark_delivered(exchange)
            return

    def _mark_delivered(self, exchange: _Exchange) -> None:
        exchange.delivered = True
        self._send({"delivered": exchange.number})


def _event(body: JsonObject) -> str:
    """Writes JSON as a server-sent event, named by its type if it has one."""
    name, data = f"event: {body['type']}\n" if "type" in body else "", to_json(body).decode()
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return f"{name}data: {data}\n\n"


def _episode_ended() -> RefusedRequest:
    return RefusedRequest(409, "episode_ended", "The episode of this key has ended.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    # `replies.write` could block, and would then stop the answers to all clients.
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, replies)

    def send(header: JsonObject) -> None:
        pipe.write(frame_of(to_json(header)))

    frames = child.frames(requests)
    settings = (await anext(frames))[0]["serve"]
    try:
        family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        place = (settings["host"], settings["port"])
        listening = socket.create_server(place, family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        send({"failed": f"the front cannot listen at {settings['host']}:{settings['port']}: {error}."})
        return
    raise_descriptor_limit()
    endpoint = Endpoint(settings, send)
    async with serving(endpoint, listening):
        send({"listening": listening.getsockname()[1]})
        async for frame, numbers in frames:
            endpoint.receive(frame, numbers)


def main() -> None:
    """Serves requests until the owner closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    requests, replies = child.begin()
    # The collector of cycles took a tenth of this process's time, because it walks through all open requests.
    gc.freeze()
    gc.set_threshold(50_000)
    uvloop.run(_serve(requests, replies))  # a quarter less processor time than with asyncio's own loop


if __name__ == "__main__":
    main()
