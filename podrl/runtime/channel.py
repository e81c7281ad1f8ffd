"""The processes' own network: named messages one process offers and others wait for, encrypted, with deadlines.

Every process is an endpoint: a board of messages under keys that others read, and functions that others call. Reads of
a key that is not there yet wait on the server's side. Requests are sent again until they are answered, so an endpoint
that went away and came back at its address is found; every request may therefore be served twice.
"""

import contextlib
import hashlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from podrl.runtime.message import Message, MessageError, decode, encode

RESEND_S = 5.0
SILENCE_S = 30.0  # of a whole machine: heartbeats are the business of threads that no compilation holds up
_HEARTBEATS = 6  # in that time

Handler = Callable[[Message], Message]


class ChannelError(RuntimeError):
    """A peer did not answer in time, refused, or answered something else; the message names it and what was asked."""


class LateError(ChannelError):
    """No answer within the deadline."""


class Channel:
    """This process's endpoint. All sockets live on one thread of its own; every method may be called from any thread.

    Attributes:
      address: 'host:port' at which others reach it.
    """

    def __init__(self, name: str, *, secret: str, host: str = "127.0.0.1", port: int = 0, silence_s: float = SILENCE_S):
        """Starts listening.

        Args:
          name: who this process is, for messages: 'trainer 0'.
          secret: shared by all processes of the job; traffic is encrypted with keys made from it, and nobody else is
            let in.
          host: address of the interface to listen on; see `interface_towards`.
          port: 0 for a free one.
          silence_s: seconds without a sign of life after which a connection counts as broken.

        Raises:
          ValueError: no secret, or an address that cannot be listened on.
        """
        if not secret:
            raise ValueError("The processes' channel needs a secret: set PODRL_SECRET to the same text on all hosts.")
        self.name = name
        self._silence_ms = int(1000 * silence_s)
        self._public, self._private = _keys(secret)
        self._context = zmq.Context()
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=_OneKey(self._public))
        self._server = self._context.socket(zmq.ROUTER)
        self._secure(self._server, server=True)
        try:
            bound = port or self._server.bind_to_random_port(f"tcp://{host}")
            if port:
                self._server.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._server.close(linger=0)
            self._guard.stop()
            self._context.term()
            raise ValueError(
                f"The processes' channel cannot listen on {host}:{port or '*'} ({error}): another process holds the "
                "port, or the address is not of this host."
            ) from error
        self.address = f"{host}:{bound}"
        self._board: dict[str, list[bytes]] = {}
        self._waiting: dict[str, list[tuple[bytes, bytes]]] = {}
        self._handlers: dict[str, Handler] = {}
        self._peers: dict[str, _Link] = {}
        self._answers: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._server, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="podrl-channel", daemon=True)
        self._thread.start()

    # What this process offers.

    def put(self, key: str, message: Message) -> None:
        """Offers a message under a key, to everyone who waits for it now or asks later; replaces an older one."""
        frames = encode(message)
        self._do(lambda: self._offer(key, frames))

    def drop(self, key: str) -> None:
        """Stops offering a key."""
        self._do(lambda: self._board.pop(key, None))

    def serve(self, name: str, handler: Handler) -> None:
        """Answers calls of `name` with `handler`, on the channel's thread: it must be quick and may not call others."""
        self._do(lambda: self._handlers.__setitem__(name, handler))

    # What others offer.

    def get(self, address: str, key: str, *, deadline_s: float, who: str = "") -> Message:
        """Waits for a message of another endpoint.

        Raises:
          ChannelError: it was not there within the deadline; `who` and the key are named.
        """
        return self.request(address, "get", key, Message()).wait(deadline_s, f"{who or address}: {key}")

    def call(self, address: str, name: str, message: Message, *, deadline_s: float, who: str = "") -> Message:
        """Calls a function of another endpoint.

        Raises:
          ChannelError: no answer within the deadline, or the function failed.
        """
        return self.request(address, "call", name, message).wait(deadline_s, f"{who or address}: {name}")

    def request(self, address: str, kind: str, key: str, message: Message) -> "_Request":
        """Sends without waiting; the result's `wait` gives the answer."""
        number = next(self._numbers)
        head = json.dumps([kind, key]).encode()
        request = _Request(self, number, address, [number.to_bytes(8, "little"), head, *encode(message)])
        self._do(lambda: self._send(request))
        return request

    def watch(self, address: str, lost: Callable[[], None]) -> None:
        """Calls `lost` once, on the channel's thread, when the connection to an endpoint breaks and stays broken."""
        self._do(lambda: self._link(address).watch(lost))

    def close(self) -> None:
        """Ends the thread and the sockets; messages under way get a second to leave."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._kick()
        self._thread.join(5)
        self._guard.stop()
        self._context.term()

    # On the channel's thread.

    def _loop(self) -> None:
        resend = time.monotonic() + RESEND_S
        while not self._closed.is_set():
            readies = self._poller.poll(250)
            while not self._jobs.empty():  # before requests: what this process did first is seen first
                self._jobs.get()()
            for ready, _ in readies:
                if ready is self._server:
                    self._receive_request()
                elif ready == self._wake_in.fileno():
                    self._drain()
                else:
                    next(link for link in self._peers.values() if ready in link.sockets).receive(ready)
            for link in self._peers.values():
                link.check()
            if time.monotonic() > resend:
                resend = time.monotonic() + RESEND_S
                for request in list(self._answers.values()):
                    self._send(request)
        while not self._jobs.empty():  # what was offered or asked before closing still leaves
            self._jobs.get()()
        for link in self._peers.values():
            link.close()
        self._server.close(linger=1000)
        self._wake_in.close()
        self._wake_out.close()

    def _do(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)
        self._kick()

    def _kick(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it is gone
            self._wake_out.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _offer(self, key: str, frames: list[bytes]) -> None:
        self._board[key] = frames
        for identity, number in self._waiting.pop(key, ()):
            self._server.send_multipart([identity, number, b"ok", *frames])

    def _receive_request(self) -> None:
        received = self._server.recv_multipart()
        if len(received) < 3:
            return  # not a request of ours
        identity, number, head, *frames = received
        try:
            kind, key = json.loads(head)
            message = decode(frames)
            if kind == "get":
                waiting = self._waiting.setdefault(key, [])
                if (identity, number) not in waiting:
                    waiting.append((identity, number))
                if key in self._board:
                    self._offer(key, self._board[key])
                return
            if key not in self._handlers:
                return  # not served yet: the caller asks again
            answer = encode(self._handlers[key](message))
        except Exception as error:  # noqa: BLE001 - whatever arrives from outside, this endpoint goes on
            text = encode(Message(f"{type(error).__name__}: {error}"))
            self._server.send_multipart([identity, number, b"error", *text])
            return
        self._server.send_multipart([identity, number, b"ok", *answer])

    def _link(self, address: str) -> "_Link":
        if address not in self._peers:
            client = self._context.socket(zmq.DEALER)
            self._secure(client, server=False)
            link = _Link(self, client, address)
            self._peers[address] = link
            for ready in link.sockets:
                self._poller.register(ready, zmq.POLLIN)
        return self._peers[address]

    def _send(self, request: "_Request") -> None:
        if request.done:
            self._answers.pop(request.number, None)
            return
        self._answers[request.number] = request
        self._link(request.address).client.send_multipart(request.frames)

    def _answered(self, number: bytes, status: bytes, frames: list[bytes]) -> None:
        request = self._answers.pop(int.from_bytes(number, "little"), None)
        if request is not None:
            request.answer(status, frames)

    def _secure(self, sock: zmq.Socket, *, server: bool) -> None:
        sock.curve_secretkey, sock.curve_publickey = self._private, self._public
        if server:
            sock.curve_server = True
        else:
            sock.curve_serverkey = self._public
        sock.setsockopt(zmq.HEARTBEAT_IVL, self._silence_ms // _HEARTBEATS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        sock.setsockopt(zmq.HEARTBEAT_TTL, self._silence_ms)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)


class _Request:
    """A request under way."""

    def __init__(self, channel: Channel, number: int, address: str, frames: list[bytes]):
        self._channel, self.number, self.address, self.frames = channel, number, address, frames
        self._future: Future[tuple[bytes, list[bytes]]] = Future()
        self.done = False

    def answer(self, status: bytes, frames: list[bytes]) -> None:
        if not self.done:
            self.done = True
            self._future.set_result((status, frames))

    def fail(self, text: str) -> None:
        """Lets `wait` raise ChannelError, unless the answer is there already."""
        self.answer(b"error", encode(Message(text)))

    def wait(self, deadline_s: float, what: str) -> Message:
        try:
            status, frames = self._future.result(deadline_s)
        except TimeoutError:
            self.done = True
            raise LateError(f"No answer within {deadline_s:g} s from {what}.") from None
        try:
            message = decode(frames)
        except MessageError as error:
            raise ChannelError(f"{what}: {error}") from error
        if status == b"error":
            raise ChannelError(f"{what} was refused: {message.value}")
        return message


class _Link:
    """The connection to one other endpoint, and the news of whether it stands."""

    _PATIENCE_S = 3.0

    def __init__(self, channel: Channel, client: zmq.Socket, address: str):
        self._channel, self.client = channel, client
        self._monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.sockets = (client, self._monitor)
        self._broken_since: float | None = None
        self._lost: Callable[[], None] | None = None
        client.connect(f"tcp://{address}")

    def watch(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def receive(self, ready: Any) -> None:
        if ready is self.client:
            received = self.client.recv_multipart()
            if len(received) >= 2:  # else not an answer of ours
                number, status, *frames = received
                self._channel._answered(number, status, frames)
            return
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_since = None
        elif event == zmq.EVENT_DISCONNECTED and self._broken_since is None:
            self._broken_since = time.monotonic()

    def check(self) -> None:
        broken = self._broken_since is not None and time.monotonic() - self._broken_since > self._PATIENCE_S
        if broken and self._lost is not None:
            lost, self._lost = self._lost, None
            lost()

    def close(self) -> None:
        self.client.disable_monitor()
        self._monitor.close(linger=0)
        self.client.close(linger=1000)


class _OneKey:
    """Lets in whoever holds the job's key."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._public


def interface_towards(host: str) -> str:
    """The address of this host's interface from which `host` is reached; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _keys(secret: str) -> tuple[bytes, bytes]:
    """(public, private) CURVE keys of a job, the same in every process."""
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=b"podrl-channel").digest()
    private = zmq.utils.z85.encode(seed)
    return zmq.curve_public(private), private
