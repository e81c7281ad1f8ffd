"""Runs the agents' HTTP endpoint in a process, the front: makes a key for each episode, relays requests and answers."""

import asyncio
import dataclasses
import importlib.util
import secrets
from typing import Protocol

from podrl.config import install
from podrl.environments.wire.requests import Answer, AnswerPart, ParsedRequest, RefusedRequest
from podrl.mappings import JsonObject
from podrl.runtime.service import ServiceError
from podrl.workers.process import LOAD_S, Process
from podrl.workers.user_code import Limits

_WORKER = "podrl.environments.front_worker"  # not imported here, because it needs the packages of the extra [agents]


def check_packages() -> None:
    """Checks that the packages of the extra [agents] are installed.

    Raises:
      ValueError: a package is missing.
    """
    for package in ("httptools", "msgspec", "uvloop"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"The endpoint of agents needs package {package}: {install('agents')}.")


@dataclasses.dataclass(frozen=True)
class FrontSettings:
    """The settings of a front.

    Attributes:
      host: address to listen at.
      port: port to listen at; 0 takes any free port.
      models: model names that clients may use, each also with ':aside' appended; the first is the default.
      parser: format in which the model writes a tool call (env.parser).
      context_tokens: largest number of tokens of a prompt and its answer, which /v1/models reports; 0 reports nothing.
      max_requests: largest number of open requests of one key; further requests wait.
      body_bytes: longest body of a request, in bytes.
      grace_s: seconds for which a request stays open after its last client has hung up; a retry can join it meanwhile.
      page: True if `GET /?key=KEY` shows the newest requests and answers to a browser.
    """

    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] = ("policy",)
    parser: str = "call_tool"
    context_tokens: int = 0
    max_requests: int = 32
    body_bytes: int = 64 << 20
    grace_s: float = 5.0
    page: bool = False


class Handler(Protocol):
    """Receives the requests of a front. The front's event loop calls the methods, so they must not block."""

    def on_request(self, number: int, episode: str, request: ParsedRequest) -> None:
        """Receives a new request; the front's owner ends the request by `Front.send_answer` or `send_refusal`."""
        ...

    def on_disconnect(self, number: int) -> None:
        """Learns that all clients of a request have hung up without an answer, so that the request is cancelled."""
        ...

    def on_delivered(self, number: int) -> None:
        """Learns that a client has got its whole answer."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Learns that the front's process has died, so that all keys and open requests are lost."""
        ...


class Front:
    """Runs an HTTP endpoint like OpenAI's in another process, with which it exchanges frames on the event loop.

    Attributes:
      settings: settings of the endpoint.
      address: base URL for clients; '' until `start` has returned.
    """

    def __init__(self, settings: FrontSettings, limits: Limits, handler: Handler) -> None:
        """Keeps the arguments; `start` starts the process.

        Args:
          settings: settings of the endpoint.
          limits: memory, processes and environment variables of the process.
          handler: receiver of the requests.
        """
        self.settings, self.address = settings, ""
        self._limits, self._handler = limits, handler
        self._process: Process | None = None
        self._listening: asyncio.Future[int] | None = None

    async def start(self) -> str:
        """Starts the process and returns the base URL for clients.

        Raises:
          ValueError: the process cannot listen at the address, or a package of the extra [agents] is missing.
          ServiceError: the process died, or did not start in time.
        """
        check_packages()
        self._listening = asyncio.get_running_loop().create_future()
        self._process = Process(_WORKER, self._limits, self._on_frame, self._on_exit)
        self._process.send({"serve": dataclasses.asdict(self.settings)})
        if not (await asyncio.wait({self._listening}, timeout=LOAD_S))[0]:
            raise ServiceError(f"The process of the front did not start within {LOAD_S:g} s: this host is overloaded.")
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        self.address = f"http://{host}:{self._listening.result()}/v1"
        return self.address

    def open(self, episode: str) -> str:
        """Makes the key of an episode: 128 random bits, valid until `close`."""
        key = f"podrl-{secrets.token_urlsafe(16)}"
        self._send({"open": episode, "key": key})
        return key

    def close(self, episode: str) -> None:
        """Ends the key of an episode: open requests are refused with 409, later requests with 401."""
        self._send({"close": episode})

    def send_part(self, number: int, part: AnswerPart) -> None:
        """Sends the client the newest part of an answer; only for a request with `ModelRequest.parts`."""
        self._send({"part": number, "fields": {**vars(part), "choice": vars(part.choice)}})

    def send_answer(self, number: int, answer: Answer) -> None:
        """Sends the client its whole answer, which ends the request."""
        fields, numbers = answer.to_frame()
        self._send({"answer": number, "fields": fields}, numbers)

    def send_refusal(self, number: int, refusal: RefusedRequest) -> None:
        """Sends the client a refusal, which ends the request."""
        self._send({"refusal": number, "fields": refusal.fields()})

    def leave(self) -> list[Process]:
        """Asks the process to end.

        Returns:
          A list with the process, which the caller must close; an empty list if there is no process.
        """
        process, self._process = self._process, None
        return [process.leave()] if process is not None else []

    def _send(self, header: JsonObject, body: bytes = b"") -> None:
        if self._process is not None:
            self._process.send(header, body)

    def _on_frame(self, frame: JsonObject) -> None:
        assert self._listening is not None
        match frame:
            case {"request": number, "episode": episode, "fields": fields}:
                self._handler.on_request(number, episode, ParsedRequest.from_fields(fields))
            case {"disconnect": number}:
                self._handler.on_disconnect(number)
            case {"delivered": number}:
                self._handler.on_delivered(number)
            case {"listening": port}:
                self._listening.set_result(port)
            case {"failed": why} if not self._listening.done():
                self._listening.set_exception(ValueError(why))

    def _on_exit(self) -> None:
        assert self._process is not None and self._listening is not None
        process, self._process = self._process, None
        error = ServiceError(f"The process of the front died: {process.death()}")
        process.close()
        if self._listening.done():
            self._handler.on_failure(error)
        else:
            self._listening.set_exception(error)
