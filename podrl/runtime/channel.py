"""The processes' own network: one process puts named messages, others wait for them; encrypted, with deadlines.

Every process is an endpoint: a board of messages under keys that others read, and functions that others call. Reads of
a key that is not there yet wait on the server's side. Requests are sent again until they are answered, so an endpoint
that went away and came back at its address is found; every request may therefore be served twice.

Strangers find little to do. Before they have proved that they hold the job's key a frame may not be longer than PIECE
(longer messages are cut into such), their connection ends after HANDSHAKE_S, and one that says nothing at all does not
even take a descriptor: the kernel keeps it.
"""

import contextlib
import hashlib
import itertools
import json
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from podrl.runtime.message import Message, MessageError, decode, encode

RESEND_S = 5.0
SILENCE_S = 30.0  # of a whole machine: heartbeats are the business of threads that no compilation holds up
_HEARTBEATS = 6  # in that time
PIECE = 1 << 20
HANDSHAKE_S = 10.0
_SEALED = 64  # bytes that encryption adds to a frame, and some
_SILENT_S = 600  # that the kernel keeps a connection to itself which has not sent a byte
_WAITING = 4096  # such connections at once
_DESCRIPTORS = 1 << 16

Handler = Callable[[Message], "Message | Future[Message]"]
Frames = Sequence[bytes | memoryview]


class ChannelError(RuntimeError):
    """A peer did not answer in time, refused, or answered wrongly; the message names it and the request."""


class LateError(ChannelError):
    """No answer within the deadline."""


class Channel:
    """This process's endpoint. All sockets live on one thread of its own; any thread may call any method.

    Attributes:
      address: 'host:port' at which others reach it.
    """

    def __init__(
        self,
        name: str,
        *,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float = SILENCE_S,
        threads: int = 1,
    ):
        """Starts listening.

        Args:
          name: who this process is, for messages: 'trainer 0'.
          secret: shared by all processes of the job; traffic is encrypted with keys made from it, and nobody else is
            let in.
          host: address of the interface to listen on; see `interface_towards`.
          port: 0 for a free one.
          silence_s: seconds without a sign of life after which a connection counts as broken.
          threads: that encrypt and send, each for its share of the connections.

        Raises:
          ValueError: no secret, or an address that cannot be listened on.
        """
        if not secret:
            raise ValueError("The processes' channel needs a secret: set PODRL_SECRET to the same text on all hosts.")
        self.name = name
        self._silence_ms = int(1000 * silence_s)
        self._public, self._private = _keys(secret)
        raise_descriptor_limit()
        self._context = zmq.Context(io_threads=threads)
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=_OneKey(self._public))
        self._server = self._context.socket(zmq.ROUTER)
        self._secure(self._server, server=True)
        try:
            listener = _listen(host, port)
            bound = listener.getsockname()[1]
            self._server.setsockopt(zmq.USE_FD, listener.detach())
            self._server.bind(f"tcp://{host}:{bound}")
        except (zmq.ZMQError, OSError) as error:
            self._server.close(linger=0)
            self._guard.stop()
            self._context.term()
            raise ValueError(
                f"The processes' channel cannot listen on {host}:{port or '*'} ({error}): another process holds the "
                "port, or the address is not of this host."
            ) from error
        self.address = f"{host}:{bound}"
        self._board: dict[str, Frames] = {}
        self._waiting: dict[str, list[tuple[bytes, bytes]]] = {}
        self._handlers: dict[str, Handler] = {}
        self._peers: dict[tuple[str, int], _Link] = {}
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

    # Messages and functions of this process.

    def put(self, key: str, message: Message) -> None:
        """Offers a message under a key, to all who wait for it now or ask later; replaces an older one."""
        frames = encode(message)
        self._do(lambda: self._offer(key, frames))

    def drop(self, key: str) -> None:
        """Stops offering a key."""
        self._do(lambda: self._board.pop(key, None))

    def serve(self, name: str, handler: Handler) -> None:
        """Answers calls of `name` with `handler`, on the channel's thread: it is quick, or gives a Future."""
        self._do(lambda: self._handlers.__setitem__(name, handler))

    # Messages and functions of other processes.

    def get(self, address: str, key: str, *, deadline_s: float, who: str = "") -> Message:
        """Waits for a message of another endpoint.

        Raises:
          ChannelError: it was not there within the deadline; `who` and the key are named.
        """
        return self.request(address, "get", key, Message()).wait(deadline_s, f"{who or address}: {key}")

    def call(self, address: str, name: str, message: Message, *, deadline_s: float, who: str = "") -> Message:
        """Calls a function of another endpoint and waits for its answer.

        Raises:
          ChannelError: no answer within the deadline, or the function failed.
        """
        return self.request(address, "call", name, message).wait(deadline_s, f"{who or address}: {name}")

    def request(self, address: str, kind: str, key: str, message: Message, *, lane: int = 0) -> "_Request":
        """Sends a request without waiting; the result's `wait` returns the answer.

        Args:
          address: the other endpoint.
          kind: 'get' or 'call'.
          key: of a message, or the name of a function.
          message: for the function.
          lane: which of several connections to it to take; on all but the first an answer is taken to need time, and
            the request is sent again only where its connection broke.
        """
        number = next(self._numbers)
        request = _Request(self, number, (address, lane), json.dumps([kind, key]).encode(), encode(message))
        self._do(lambda: self._send(request))
        return request

    def watch(self, address: str, lost: Callable[[], None]) -> None:
        """Calls `lost` once, on the channel's thread, when the connection to an endpoint breaks and stays broken."""
        self._do(lambda: self._link((address, 0)).watch(lost))

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
                for request in [r for r in self._answers.values() if not r.place[1]]:
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

    def _offer(self, key: str, frames: Frames) -> None:
        self._board[key] = frames
        for identity, number in self._waiting.pop(key, ()):
            self._answer(identity, number, b"ok", frames)

    def _answer(self, identity: bytes, number: bytes, status: bytes, frames: Frames) -> None:
        self._server.send_multipart([identity, number, status, *in_pieces(frames)], copy=False)

    def _receive_request(self) -> None:
        received = self._server.recv_multipart(copy=False)
        if len(received) < 4:
            return  # not a request of ours
        identity, number, head = (part.bytes for part in received[:3])
        try:
            kind, key = json.loads(head)
            message = decode(from_pieces(received[3:]))
            if kind == "get":
                waiting = self._waiting.setdefault(key, [])
                if (identity, number) not in waiting:
                    waiting.append((identity, number))
                if key in self._board:
                    self._offer(key, self._board[key])
                return
            if key not in self._handlers:
                return  # not served yet: the caller asks again
            answer = self._handlers[key](message)
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done: self._do(lambda: self._reply(identity, number, done.result)))
                return
            self._reply(identity, number, lambda: answer)
        except Exception as error:  # noqa: BLE001 - whatever arrives from outside, this endpoint goes on
            self._answer(identity, number, b"error", encode(Message(f"{type(error).__name__}: {error}")))

    def _reply(self, identity: bytes, number: bytes, result: Callable[[], Message]) -> None:
        try:
            status, frames = b"ok", encode(result())
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            status, frames = b"error", encode(Message(f"{type(error).__name__}: {error}"))
        self._answer(identity, number, status, frames)

    def _link(self, place: tuple[str, int]) -> "_Link":
        if place not in self._peers:
            client = self._context.socket(zmq.DEALER)
            self._secure(client, server=False)
            link = _Link(self, client, place)
            self._peers[place] = link
            for ready in link.sockets:
                self._poller.register(ready, zmq.POLLIN)
        return self._peers[place]

    def _came_back(self, place: tuple[str, int]) -> None:
        """Repeats requests over a connection that broke and stands again: some may have been lost."""
        for request in [r for r in self._answers.values() if r.place == place]:
            self._send(request)

    def _send(self, request: "_Request") -> None:
        if request.done:
            self._answers.pop(request.number, None)
            return
        self._answers[request.number] = request
        frames = [request.number.to_bytes(8, "little"), request.head, *in_pieces(request.frames)]
        self._link(request.place).client.send_multipart(frames, copy=False)

    def _answered(self, number: bytes, status: bytes, pieces: Sequence[Any]) -> None:
        request = self._answers.pop(int.from_bytes(number, "little"), None)
        if request is not None:
            request.answer(status, pieces)

    def _secure(self, sock: zmq.Socket, *, server: bool) -> None:
        sock.curve_secretkey, sock.curve_publickey = self._private, self._public
        if server:
            sock.curve_server = True
        else:
            sock.curve_serverkey = self._public
        sock.setsockopt(zmq.MAXMSGSIZE, PIECE + _SEALED)
        sock.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        sock.setsockopt(zmq.HEARTBEAT_IVL, self._silence_ms // _HEARTBEATS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        sock.setsockopt(zmq.HEARTBEAT_TTL, self._silence_ms)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)


class _Request:
    """A request in flight.

    Attributes:
      place: the endpoint asked, and which connection to it.
    """

    def __init__(self, channel: Channel, number: int, place: tuple[str, int], head: bytes, frames: Frames):
        self._channel, self.number, self.place, self.head, self.frames = channel, number, place, head, frames
        self._future: Future[tuple[bytes, Sequence[Any]]] = Future()
        self.done = False

    def answer(self, status: bytes, pieces: Sequence[Any]) -> None:
        """Takes the answer, in the pieces that arrived."""
        if not self.done:
            self.done = True
            self._future.set_result((status, pieces))

    def fail(self, text: str) -> None:
        """Makes `wait` raise ChannelError, unless the answer has arrived."""
        self.answer(b"error", in_pieces(encode(Message(text))))

    def wait(self, deadline_s: float, what: str) -> Message:
        """Waits for the answer.

        Args:
          deadline_s: the longest wait.
          what: the endpoint and what it was asked for, for messages.

        Raises:
          LateError: it did not come in time.
          ChannelError: the endpoint refused, or the answer arrived damaged.
        """
        try:
            status, pieces = self._future.result(deadline_s)
        except TimeoutError:
            self.done = True
            raise LateError(f"No answer within {deadline_s:g} s from {what}.") from None
        try:
            message = decode(from_pieces(pieces))
        except MessageError as error:
            raise ChannelError(f"{what}: {error}") from error
        if status == b"error":
            raise ChannelError(f"{what} was refused: {message.value}")
        return message


class _Link:
    """The connection to one other endpoint, and whether it stands."""

    _PATIENCE_S = 3.0

    def __init__(self, channel: Channel, client: zmq.Socket, place: tuple[str, int]):
        self._channel, self.client, self._place = channel, client, place
        self._monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.sockets = (client, self._monitor)
        self._stood = False
        self._broken_since: float | None = None
        self._lost: Callable[[], None] | None = None
        client.connect(f"tcp://{place[0]}")

    def watch(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def receive(self, ready: Any) -> None:
        if ready is self.client:
            received = self.client.recv_multipart(copy=False)
            if len(received) >= 3:  # else not an answer of ours
                number, status, *pieces = received
                self._channel._answered(number.bytes, status.bytes, pieces)
            return
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_since = None
            if self._stood:
                self._channel._came_back(self._place)
            self._stood = True
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
    """Authenticates connections by the job's key."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._public


def in_pieces(frames: Frames) -> Frames:
    """Splits bytes into frames of at most PIECE, after one with the length of each original frame."""
    pieces: list[bytes | memoryview] = [struct.pack(f"<{len(frames)}Q", *map(len, frames))]
    for frame in frames:
        whole = memoryview(frame)
        pieces += [whole[at : at + PIECE] for at in range(0, len(frame), PIECE)]
    return pieces


def from_pieces(pieces: Sequence[Any]) -> Frames:
    """Joins the frames of `in_pieces`; the results are copies, aligned as numpy aligns them.

    Raises:
      MessageError: other pieces than the first of them says.
    """
    buffers = [memoryview(getattr(piece, "buffer", piece)) for piece in pieces]
    if not buffers or len(buffers[0]) % 8:
        raise MessageError("A message without the lengths of its frames arrived: it was cut, or is another podrl's.")
    lengths = struct.unpack(f"<{len(buffers[0]) // 8}Q", buffers[0])
    rest = iter(buffers[1:])
    if sum(lengths) != sum(map(len, buffers[1:])):
        raise MessageError(f"A message of {sum(lengths)} bytes arrived with {sum(map(len, buffers[1:]))}: it was cut.")
    frames: list[bytes | memoryview] = []
    for length in lengths:
        frame = np.empty(length, np.uint8)
        at = 0
        while at < length:
            piece = next(rest)
            if at + len(piece) > length:
                raise MessageError("A message arrived with other pieces than it was cut into: it is refused.")
            frame[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        frames.append(frame.data)
    return frames


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as the system allows it, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; the kernel hands over a connection only after it has sent data."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        listener.bind((host, port))
        listener.listen(_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def interface_towards(host: str) -> str:
    """Finds the address of this host's interface towards `host`; sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _keys(secret: str) -> tuple[bytes, bytes]:
    """Derives the (public, private) CURVE keys of a job, the same in every process."""
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=b"podrl-channel").digest()
    private = zmq.utils.z85.encode(seed)
    return zmq.curve_public(private), private
