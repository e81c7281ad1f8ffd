"""The process of the front: `python -m podrl.environments.front_worker`, started by podrl.environments.front.

The process is an HTTP server: it sends each request to its owner as a frame, and gets the answer back as frames. It
checks the keys of episodes, joins retries to open requests, and notices clients that hang up. It never imports jax.
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
from podrl.environments.wire import chat, completions, generate, messages, responses
from podrl.environments.wire.requests import ASIDE, Answer, AnswerPart, Choice, ParsedRequest, RefusedRequest
from podrl.runtime.sockets import raise_descriptor_limit
from podrl.workers import child
from podrl.workers.frames import frame_of

_BEAT_S = 3.0  # an idle stream sends a comment this often, so that no proxy closes it
_LARGE = 1 << 20  # bytes; longer bodies are read one at a time, which bounds the memory
_KEPT = 32  # number of an episode's requests, open ones included, above which answered requests are forgotten
_DIALECTS: Mapping[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/completions": completions,
    "/inference/v1/generate": generate,
}
_TYPED = ("/v1/responses", "/v1/messages")  # paths whose errors and events have a field `type`
_JSON = "application/json"
# Many clients split a stream at every character that Unicode calls the end of a line, as str.splitlines does. JSON
# escapes the other ones.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# Headers of the page.
_NO_SCRIPTS = (
    "content-security-policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
    "referrer-policy: no-referrer\r\ncache-control: no-store\r\n"
)


@dataclasses.dataclass(eq=False)
class _Turn:
    """A request that was passed to the owner, with its answer so far and its waiting clients.

    Attributes:
      number: number of the request in frames.
      wanted: the request, parsed.
      dialect: module that writes the answer.
      digest: SHA-256 of the path and the body, by which a retry is recognised.
      parts: parts of the answer so far; empty unless the request asks for parts.
      outcome: the whole answer, or the refusal; None while the request is open.
      readers: clients that wait for the answer.
      delivered: True once the whole answer was sent to a client that was still connected.
    """

    number: int
    wanted: ParsedRequest
    dialect: Any
    digest: bytes
    parts: list[AnswerPart] = dataclasses.field(default_factory=list)
    outcome: Answer | RefusedRequest | None = None
    readers: list[Client] = dataclasses.field(default_factory=list)
    delivered: bool = False

    def add(self, event: AnswerPart | Answer | RefusedRequest) -> None:
        """Keeps a part or the outcome, and wakes the waiting clients; nothing follows an outcome."""
        if self.outcome is None:
            if isinstance(event, AnswerPart):
                self.parts.append(event)
            else:
                self.outcome = event
            for client in self.readers:
                client.wake()


class _Episode:
    """The requests of one key.

    Attributes:
      name: name of the episode in frames.
      open: semaphore that limits the open requests.
      ended: True once the owner has closed the key.
      turns: requests that a retry may join, by their digests, the newest last.
    """

    def __init__(self, name: str, most: int) -> None:
        self.name, self.open, self.ended = name, asyncio.Semaphore(most), False
        self.turns: collections.OrderedDict[bytes, _Turn] = collections.OrderedDict()


class Endpoint:
    """The application of the HTTP server: checks keys, passes requests to the owner and its answers to clients."""

    def __init__(self, settings: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Keeps the arguments.

        Args:
          settings: fields of a podrl.environments.front.FrontSettings.
          tell: function that sends a frame to the owner.
        """
        self._models: list[str] = list(settings["models"])
        self._parser: str = settings["parser"]
        self._most_open: int = settings["max_requests"]
        self._most_bytes: int = settings["body_bytes"]
        self._context: int = settings["context_tokens"]
        self._grace_s: float = settings["grace_s"]
        self._page = FrontPage(self._parser) if settings["page"] else None
        self._tell = tell
        self._episodes: dict[bytes, _Episode] = {}  # by the digests of their keys
        self._digests: dict[str, bytes] = {}  # digests of keys, by the names of episodes
        self._turns: dict[int, tuple[_Episode, _Turn]] = {}
        self._numbers = itertools.count()
        self._large = asyncio.Lock()

    # Frames of the owner.

    def heard(self, frame: Mapping[str, Any], numbers: bytes = b"") -> None:
        """Acts on a frame of the owner; `numbers` are the token ids and log-probabilities of an answer."""
        match frame:
            case {"open": name, "key": key}:
                digest = self._digests[name] = _digest(key)
                self._episodes[digest] = _Episode(name, self._most_open)
            case {"close": name} if name in self._digests:
                self._close(name)
            case {"part": number, "said": said} if number in self._turns:
                self._turns[number][1].add(AnswerPart(**{**said, "choice": Choice(**said["choice"])}))
            case {"answer": number, "said": said} if number in self._turns:
                turn, answer = self._turns[number][1], Answer.of(said, numbers)
                if self._page is not None and turn.outcome is None:
                    self._page.add(turn.wanted, answer)
                turn.add(answer)
            case {"refuse": number, "said": said} if number in self._turns:
                self._forget(*self._turns[number], RefusedRequest(**said))

    def _close(self, name: str) -> None:
        episode = self._episodes.pop(self._digests.pop(name))
        episode.ended = True
        for of, turn in list(self._turns.values()):
            if of is episode:
                self._forget(of, turn, _ended())

    def _forget(self, episode: _Episode, turn: _Turn, why: RefusedRequest | None = None) -> None:
        """Forgets a request, so that no retry joins it; clients that wait for it are refused with `why`."""
        self._turns.pop(turn.number, None)
        if episode.turns.get(turn.digest) is turn:
            del episode.turns[turn.digest]
        if why is not None:
            turn.add(why)

    # Requests of clients.

    async def __call__(self, client: Client) -> None:
        """Answers one HTTP request of a connection."""
        with contextlib.suppress(ConnectionError):  # the client hung up
            try:
                await self._handle(client)
            except RefusedRequest as refused:
                error = refused.error() | ({"type": "error"} if client.path in _TYPED else {})
                if client.began:
                    await client.say(_event(error), more=False)
                else:
                    await client.whole(refused.status, _JSON, to_json(error))

    async def _handle(self, client: Client) -> None:
        if client.path == "/health" and client.method == "GET":
            await client.whole(200, _JSON, to_json({"status": "ok"}))
            return
        try:
            episode = self._episode(client)
            if self._page is not None and client.path == "/" and client.method == "GET":
                await client.whole(200, "text/html; charset=utf-8", self._page.html(), _NO_SCRIPTS)
                return
            if client.path != "/v1/models" and client.path not in _DIALECTS:
                served = ", ".join([*_DIALECTS, "/v1/models"])
                raise RefusedRequest(404, "not_found", f"There is no path {client.path[:80]!r}; there are {served}.")
            if client.method != (method := "POST" if client.path in _DIALECTS else "GET"):
                why = f"{client.path} takes {method}, and the request has {client.method[:80]}."
                raise RefusedRequest(405, "method_not_allowed", why)
        except RefusedRequest:
            with contextlib.suppress(RefusedRequest):
                # Most clients read no answer before they have sent the whole body.
                await client.drain(self._most_bytes)
            raise
        if client.path == "/v1/models":
            await client.whole(200, _JSON, to_json(self._listed()))
            return
        async with episode.open:  # before the body is read, so that a waiting request takes no memory
            await self._answer(client, episode)

    def _episode(self, client: Client) -> _Episode:
        """Finds the episode of a client's key.

        Raises:
          RefusedRequest: no open episode has this key.
        """
        # The time of a look-up by digest tells an attacker nothing about the key.
        digest = _digest(client.key)
        episode = self._episodes.get(digest)
        known = self._digests[episode.name] if episode is not None else bytes(len(digest))
        if not hmac.compare_digest(known, digest) or episode is None:
            raise RefusedRequest(
                401, "invalid_api_key", "No open episode has this key: send 'Authorization: Bearer KEY'."
            )
        return episode

    def _listed(self) -> dict[str, Any]:
        names = [name + end for name in self._models for end in ("", ASIDE)]
        shared: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "podrl"}
        shared |= {"max_model_len": self._context} if self._context else {}
        return {"object": "list", "data": [{"id": name, **shared} for name in names]}

    async def _answer(self, client: Client, episode: _Episode) -> None:
        declared = client.header("content-length")
        small = declared.isdigit() and len(declared) < 10 and int(declared) <= _LARGE
        async with contextlib.nullcontext() if small else self._large:
            turn = self._turn_of(client, episode, await client.body(self._most_bytes))
        turn.readers.append(client)
        try:
            await (self._stream if turn.wanted.stream else self._whole)(client, turn)
        finally:
            turn.readers.remove(client)
            self._left(episode, turn)

    def _turn_of(self, client: Client, episode: _Episode, body: bytearray) -> _Turn:
        """Finds the request that a retry repeats, or passes a new request to the owner.

        Raises:
          RefusedRequest: a field cannot be honoured, or the episode has ended.
        """
        hashed = hashlib.sha256(client.path.encode() + b"\0")
        hashed.update(body)
        digest = hashed.digest()
        if client.header("x-stainless-retry-count") not in ("", "0") and digest in episode.turns:
            return episode.turns[digest]
        dialect = _DIALECTS[client.path]
        wanted = dialect.read(parse(body), self._models, self._parser)
        if episode.ended:  # the owner closed the key while the body arrived
            raise _ended()
        turn = _Turn(next(self._numbers), wanted, dialect, digest)
        twin = episode.turns.pop(digest, None)  # retries join the newer request from now on
        if twin is not None and twin.delivered:
            self._forget(episode, twin)
        done = (one for one in episode.turns.values() if one.delivered and not one.readers)
        for old in list(itertools.islice(done, max(len(episode.turns) - _KEPT, 0))):
            self._forget(episode, old)
        # Not `asdict`, which copies every message: that was an eighth of this process's time.
        asked = {**vars(wanted), "ask": vars(wanted.ask)}
        self._tell({"ask": turn.number, "of": episode.name, "asked": asked})
        # After `_tell`, so that no retry joins a request that could not be written.
        episode.turns[digest], self._turns[turn.number] = turn, (episode, turn)
        return turn

    def _left(self, episode: _Episode, turn: _Turn) -> None:
        """Cancels a request after its last client has hung up, unless a retry joins it within the grace."""

        def look() -> None:
            if not turn.readers and not turn.delivered and turn.number in self._turns:
                self._forget(episode, turn)
                self._tell({"drop": turn.number})

        if turn.delivered and episode.turns.get(turn.digest) is not turn:
            self._turns.pop(turn.number, None)  # retries join a newer request with the same body
        elif not turn.readers and not turn.delivered:
            asyncio.get_running_loop().call_later(self._grace_s, look)

    async def _whole(self, client: Client, turn: _Turn) -> None:
        while turn.outcome is None:
            await client.news()
        if isinstance(turn.outcome, RefusedRequest):
            raise turn.outcome
        await client.whole(200, _JSON, to_json(turn.dialect.write(turn.wanted, turn.outcome, self._parser)))
        self._delivered(turn)

    async def _stream(self, client: Client, turn: _Turn) -> None:
        stream, told = None, 0
        while True:
            if told == len(turn.parts) and turn.outcome is None:
                if not await client.news(_BEAT_S):
                    await client.say(": at work\n\n")
                continue
            if isinstance(turn.outcome, RefusedRequest):
                raise turn.outcome
            first = turn.parts[0] if turn.parts else turn.outcome
            assert first is not None
            if stream is None:
                stream = turn.dialect.AnswerStream(turn.wanted, first.id, first.created, self._parser)
            new, told = turn.parts[told:], len(turn.parts)
            chunks = [chunk for part in new for chunk in stream.part(part.index, part.choice)]
            if turn.outcome is None:
                await client.say("".join(map(_event, chunks)))
                continue
            chunks += stream.end(turn.outcome)
            done = "" if client.path in _TYPED else "data: [DONE]\n\n"
            await client.say("".join(map(_event, chunks)) + done, more=False)
            self._delivered(turn)
            return

    def _delivered(self, turn: _Turn) -> None:
        turn.delivered = True
        self._tell({"delivered": turn.number})


def _event(body: Mapping[str, Any]) -> str:
    """Writes JSON as a server-sent event, named by its type if it has one."""
    name, data = f"event: {body['type']}\n" if "type" in body else "", to_json(body).decode()
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return f"{name}data: {data}\n\n"


def _ended() -> RefusedRequest:
    return RefusedRequest(409, "episode_ended", "The episode of this key has ended.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    # Not written with `replies.write`: a write that blocks would stop all clients.
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, replies)

    def tell(header: Mapping[str, Any]) -> None:
        pipe.write(frame_of(to_json(header)))

    frames = child.frames(requests)
    settings = (await anext(frames))[0]["serve"]
    try:
        family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        place = (settings["host"], settings["port"])
        listening = socket.create_server(place, family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        tell({"failed": f"the front cannot listen at {settings['host']}:{settings['port']}: {error}."})
        return
    raise_descriptor_limit()
    endpoint = Endpoint(settings, tell)
    async with serving(endpoint, listening):
        tell({"listening": listening.getsockname()[1]})
        async for frame, numbers in frames:
            endpoint.heard(frame, numbers)


def main() -> None:
    """Serves requests until the owner closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    requests, replies = child.begin()
    # The collector of cycles took a tenth of this process's time, because it walks through all open requests.
    gc.freeze()
    gc.set_threshold(50_000)
    uvloop.run(_serve(requests, replies))  # a quarter less processor time than with asyncio's own loop


if __name__ == "__main__":
    main()
