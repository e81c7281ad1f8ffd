"""The owner's side of the front: starts its process, opens and closes keys, and passes requests and answers."""

import asyncio
import dataclasses
import secrets
from typing import Any, Protocol

from podrl.environments import front_worker
from podrl.environments.link import Link
from podrl.environments.wire.asks import Answer, Part, Refused, Wanted
from podrl.runtime.service import ServiceError
from podrl.runtime.user_code import Limits
from podrl.runtime.workers import LOAD_S, Worker


@dataclasses.dataclass(frozen=True)
class FrontSettings:
    """The settings of a front.

    Attributes:
      host, port: the address to listen at; port 0 is any that is free.
      models: names of models that are answered, with and without ':aside'; the first where a client names none.
      parser: how the model writes a call (env.parser).
      context_tokens: most tokens of a prompt and its answer, as /v1/models says.
      max_requests: requests of one key that are open at once; further ones wait.
      body_bytes: longest body of a request.
      grace_s: seconds in which a retry joins a request whose client has hung up.
    """

    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] = ("policy",)
    parser: str = "call_tool"
    context_tokens: int = 0
    max_requests: int = 32
    body_bytes: int = 64 << 20
    grace_s: float = 5.0


class Handler(Protocol):
    """Answers the requests of a front; its methods are called on the front's event loop, and must not wait."""

    def asked(self, number: int, episode: str, wanted: Wanted) -> None:
        """A request of an episode, to be answered by `Front.part`, and at the end by `answer` or `refuse`."""
        ...

    def dropped(self, number: int) -> None:
        """The answer, made already or not, reached no client and nobody will ask for it again."""
        ...

    def failed(self, error: Exception) -> None:
        """The front's process has ended; no key is good any more."""
        ...


class Front:
    """An endpoint like OpenAI's in a process of its own; for the running event loop.

    Attributes:
      address: the base URL for clients, known once `start` has returned.
    """

    def __init__(self, settings: FrontSettings, limits: Limits, handler: Handler) -> None:
        """Starts nothing yet; `limits` say what the process may take and see."""
        self.settings, self.address = settings, ""
        self._limits, self._handler = limits, handler
        self._link: Link | None = None
        self._listening: asyncio.Future[int] | None = None

    async def start(self) -> str:
        """Starts the process; returns the address.

        Raises:
          ValueError: it cannot listen there, or package uvicorn is missing.
          ServiceError: it did not start.
        """
        self._listening = asyncio.get_running_loop().create_future()
        self._link = Link(front_worker.__name__, self._limits, self._heard, self._ended)
        self._link.send({"serve": dataclasses.asdict(self.settings)})
        if not (await asyncio.wait({self._listening}, timeout=LOAD_S))[0]:
            raise ServiceError(f"The process of the front did not start within {LOAD_S:g} s: this host is overloaded.")
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        self.address = f"http://{host}:{self._listening.result()}/v1"
        return self.address

    def open(self, episode: str) -> str:
        """Makes the key of an episode: 128 random bits, good until `close`."""
        key = f"podrl-{secrets.token_urlsafe(16)}"
        self._send({"open": episode, "key": key})
        return key

    def close(self, episode: str) -> None:
        """Ends a key: open requests are refused with 409, later ones with 401."""
        self._send({"close": episode})

    def part(self, number: int, part: Part) -> None:
        """Tells what was added to an answer, where `Ask.parts` asks for it."""
        self._send({"part": number, "said": dataclasses.asdict(part)})

    def answer(self, number: int, answer: Answer) -> None:
        """Answers a request."""
        self._send({"answer": number, "said": dataclasses.asdict(answer)})

    def refuse(self, number: int, refused: Refused) -> None:
        """Refuses a request."""
        self._send({"refuse": number, "said": refused.fields()})

    def leave(self) -> list[Worker]:
        """Ends the process; whoever gets the worker closes it."""
        link, self._link = self._link, None
        return [link.leave()] if link is not None else []

    def _send(self, frame: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(frame)

    def _heard(self, frame: dict[str, Any]) -> None:
        assert self._listening is not None
        match frame:
            case {"ask": number, "of": episode, "asked": asked}:
                self._handler.asked(number, episode, Wanted.of(asked))
            case {"drop": number}:
                self._handler.dropped(number)
            case {"listening": port}:
                self._listening.set_result(port)
            case {"failed": why} if not self._listening.done():
                self._listening.set_exception(ValueError(why))

    def _ended(self) -> None:
        assert self._link is not None and self._listening is not None
        link, self._link = self._link, None
        error = ServiceError(f"The process of the front died: {link.worker.death()}")
        link.close()
        if self._listening.done():
            self._handler.failed(error)
        else:
            self._listening.set_exception(error)
