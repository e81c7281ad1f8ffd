"""The job's encrypted network: each process offers messages and functions, and other processes read and call them.

Every process is an endpoint. It offers messages, which other processes read by key, and functions, which they call. A
read of a key that is not offered yet waits at the endpoint that will offer it. A request is sent again until it is
answered, so that it also reaches an endpoint that was unreachable for a while. Any request may therefore be served
twice.

Every endpoint draws a random number when it starts, and every request names its sender and its receiver by their
numbers. So two endpoints cannot disagree about whether they are connected. An endpoint that was given up (`give_up`)
is served nothing more: the answer to any of its requests says that it was given up. An endpoint of the next run may
listen at the address of an endpoint of an earlier run; it refuses requests that name the earlier endpoint. The sender
of a request treats both refusals as the loss of the connection.

A stranger can do little harm. A connection that does not prove within HANDSHAKE_S that it holds the job's key is ended.
No frame may be longer than PIECE, encryption aside; longer messages are cut into pieces of this length. A connection
that never sends a byte does not even take a file descriptor, because the kernel does not hand it over.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence, Sized
from concurrent import futures

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from podrl.runtime.message import PIECE, Frames, Message, decode, encode, from_pieces, in_pieces
from podrl.runtime.request import ChannelError as ChannelError
from podrl.runtime.request import LateError as LateError
from podrl.runtime.request import Request
from podrl.runtime.sockets import listen, raise_descriptor_limit

# Unanswered requests of lane 0 are repeated after this many seconds. This is a precaution, because broken connections
# are noticed anyway. The time is long, because a call stays unanswered for as long as its handler takes.
RESEND_S = 60.0
SILENCE_S = 30.0  # only a dead machine is silent for so long, because compiling does not delay the heartbeats' threads
_HEARTBEATS = 6  # number of heartbeats that are sent within SILENCE_S
HANDSHAKE_S = 10.0
_SEALED = 64  # bytes that encryption adds to a frame, rounded up
_SWEEP_S = 1.0  # time between two checks of silent connections
_READABLE = int(zmq.POLLIN)
_TURN = 100  # number of messages read from one socket before the next socket's turn
_NUMBER = 8  # length in bytes of the number of a request or an endpoint
_GONE = b"gone"  # status of an answer that refuses an endpoint that was given up, or a request for another endpoint
_CLOSED = "this process has left the job's network"  # error of the requests that are open when their endpoint closes

Handler = Callable[[Message], "Message | futures.Future[Message]"]


@dataclasses.dataclass
class Traffic:
    """Counts the messages that an endpoint sent and received, answers included, and their bytes before encryption."""

    messages: int = 0
    bytes: int = 0

    def count(self, frames: Sequence[Sized]) -> None:
        self.messages += 1
        self.bytes += sum(map(len, frames))


class Channel:
    """This process's endpoint. All its sockets live on the channel's thread; any thread may call any public method.

    Attributes:
      name: name of this process, for messages: 'trainer 0'.
      address: 'host:port' at which other processes reach this endpoint.
      number: random number of this endpoint, in hexadecimal; other endpoints at its address have other numbers.
      traffic: messages and bytes so far.
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
        """Starts the channel's thread and listens.

        Args:
          name: name of this process, for messages: 'trainer 0'.
          secret: text that all processes of the job share; the keys of the encryption are made from it, and a process
            without it cannot connect.
          host: address of the interface to listen on; see `interface_towards`.
          port: port to listen on; 0 for a free one.
          silence_s: seconds without a sign of life after which a connection counts as broken.
          threads: number of threads that encrypt and send, each for its share of the connections.

        Raises:
          ValueError: the secret is empty, or the endpoint cannot listen on the address.
        """
        if not secret:
            raise ValueError("The processes' channel needs a secret: set PODRL_SECRET to the same text on all hosts.")
        self.name, self.number, self.traffic = name, secrets.token_hex(_NUMBER), Traffic()
        # The number of the endpoint that answered at each address, and the numbers of the endpoints that this endpoint
        # has given up.
        self._endpoints, self._refused = dict[str, bytes](), set[bytes]()
        self._senders: dict[tuple[bytes, bytes], bytes] = {}  # the endpoint of each request that waits for its answer
        self._silence_ms, (self._public, self._private) = int(1000 * silence_s), _keys(secret)
        raise_descriptor_limit()
        self._context = zmq.Context(io_threads=threads)
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=_OneKey(self._public))
        self._server = self._context.socket(zmq.ROUTER)
        self._secure(self._server, server=True)
        try:
            listener = listen(host, port)
            bound = listener.getsockname()[1]
            self._server.setsockopt(zmq.USE_FD, listener.detach())
            self._server.bind(f"tcp://{host}:{bound}")
        except (zmq.ZMQError, OSError) as error:
            self._server.close(linger=0)
            self._guard.stop()
            self._context.term()
            raise ValueError(
                f"The processes' channel cannot listen on {host}:{port or '*'} ({error}): the address must be "
                "one of this host's, and the port must be free and allowed for this user."
            ) from error
        self.address = f"{host}:{bound}"
        self._board: dict[str, Frames] = {}
        self._waiting: dict[str, list[tuple[bytes, bytes]]] = {}
        self._unserved: dict[str, dict[tuple[bytes, bytes], Message]] = {}
        self._handlers: dict[str, Handler] = {}
        self._peers: dict[tuple[str, int], _Link] = {}
        self._answers: dict[int, Request] = {}
        self._numbers = itertools.count(1)
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._sockets: dict[zmq.Socket, Callable[[], None]] = {}
        self._touched: dict[zmq.Socket, None] = {}
        self._listen_to(self._server, self._receive_request)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="podrl-channel", daemon=True)
        self._thread.start()

    @property
    def _mine(self) -> bytes:
        return bytes.fromhex(self.number)

    # Messages and functions of this process.

    def put(self, key: str, message: Message) -> None:
        """Offers a message to every process that waits for the key or asks later; replaces an older message."""
        frames = encode(message)
        self._do(lambda: self._offer(key, frames))

    def drop(self, key: str) -> None:
        """Stops offering the message under a key."""
        self._do(lambda: self._board.pop(key, None))

    def serve(self, name: str, handler: Handler) -> None:
        """Answers calls of `name` with the result of `handler`.

        The handler runs on the channel's thread, which serves all connections: it must return at once, with the answer
        or with a Future of the answer.
        """
        self._do(lambda: self._serve(name, handler))

    # Messages and functions of other processes.

    def get(self, address: str, key: str, *, deadline_s: float, who: str = "") -> Message:
        """Waits for the message that another endpoint offers under a key.

        Raises:
          ChannelError: the message was not offered within the deadline; the error names `who` and the key.
        """
        return self.request(address, "get", key, Message()).wait(deadline_s, f"{who or address}: {key}")

    def call(self, address: str, name: str, message: Message, *, deadline_s: float, who: str = "") -> Message:
        """Calls a function that another endpoint serves, and waits for the answer.

        Raises:
          ChannelError: no answer within the deadline, or the function failed.
        """
        return self.request(address, "call", name, message).wait(deadline_s, f"{who or address}: {name}")

    def request(self, address: str, kind: str, key: str, message: Message, *, lane: int = 0) -> Request:
        """Sends a request without waiting for the answer.

        Args:
          address: address of the other endpoint.
          kind: 'get' or 'call'.
          key: key of a message, or name of a function.
          message: argument of the function.
          lane: number of the connection to use, because there may be several connections to one endpoint. An unanswered
            request of lane 0 is repeated every RESEND_S. Answers on other lanes may take long, so their requests are
            repeated only after the connection has broken.

        Returns:
          The request in flight; its `wait` returns the answer. If this endpoint is closed, `wait` raises ChannelError
          at once.
        """
        number = next(self._numbers)
        request = Request(number, (address, lane), json.dumps([kind, key]).encode(), encode(message))
        self._do(lambda: self._send(request))
        if self._closed.is_set():  # the channel's thread may have ended before it could see the request
            request.fail(_CLOSED)
        return request

    def watch(self, address: str, on_lost: Callable[[], None], *, within_s: float = SILENCE_S) -> None:
        """Calls `on_lost` once, on the channel's thread, when an endpoint can no longer be reached.

        An endpoint counts as lost when the connection to it breaks and stays broken, when the connection is not
        established within `within_s` seconds, when another endpoint answers at the same address, or when the endpoint
        has given this one up.
        """
        self._do(lambda: self._link((address, 0)).watch(on_lost, within_s))

    def give_up(self, number: str) -> None:
        """Refuses all further requests of an endpoint, and all its requests that already wait for an answer.

        Args:
          number: attribute `number` of the other endpoint.
        """
        self._do(lambda: self._give_up(bytes.fromhex(number)))

    def is_given_up(self, address: str) -> bool:
        """Returns True if the endpoint at an address is known to have given this one up, or to have been replaced."""
        link = self._peers.get((address, 0))
        return link is not None and link.refused

    def is_up(self, address: str) -> bool:
        """Returns True if a connection to an address was begun and is not known to be broken.

        The connection may not be established yet.
        """
        link = self._peers.get((address, 0))
        return link is not None and link.is_up

    def close(self) -> None:
        """Closes the sockets and ends the thread; messages that are not sent yet get one second to leave.

        Whoever still waits for the answer to a request of this endpoint gets a ChannelError.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._kick()
        self._thread.join(5)
        self._guard.stop()
        self._context.term()

    # Methods that run on the channel's thread.

    def _loop(self) -> None:
        now = time.monotonic()
        resend, sweep = now + RESEND_S, now + _SWEEP_S
        while not self._closed.is_set():
            readies = self._selector.select(0.0 if self._touched else 0.25)
            self._touched |= {key.data: None for key, _ in readies if key.data is not None}
            self._drain()
            self._do_jobs()
            now = time.monotonic()
            if now > sweep:
                sweep = now + _SWEEP_S
                self._touched |= dict.fromkeys(self._sockets)
                for link in self._peers.values():
                    link.check()
            if now > resend:
                resend = now + RESEND_S
                for request in [r for r in self._answers.values() if not r.place[1]]:
                    self._send(request)
            self._receive()
        self._do_jobs()  # messages that were queued before `close` still leave
        for request in self._answers.values():
            request.fail(_CLOSED)
        for link in self._peers.values():
            link.close()
        self._server.close(linger=1000)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _listen_to(self, sock: zmq.Socket, receive: Callable[[], None]) -> None:
        """Calls `receive` for each message that arrives at a socket.

        The file descriptor of a ZeroMQ socket shows only that the socket's state has changed since its events were last
        read, and sending reads the events too. So after every use of a socket its events are read again. The events of
        silent sockets are read only every `_SWEEP_S` seconds.
        """
        self._sockets[sock] = receive
        self._touched[sock] = None
        self._selector.register(int(sock.getsockopt(zmq.FD)), selectors.EVENT_READ, sock)

    def _receive(self) -> None:
        """Reads messages from the sockets that may have some, at most _TURN from each."""
        looked, self._touched = self._touched, {}
        for sock in looked:
            for _ in range(_TURN):
                if not int(sock.getsockopt(zmq.EVENTS)) & _READABLE:
                    break
                self._sockets[sock]()
            else:
                self._touched[sock] = None

    def _do(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)
        self._kick()

    def _do_jobs(self) -> None:
        while not self._jobs.empty():
            self._jobs.get()()

    def _kick(self) -> None:
        # Errors are ignored: a full pipe wakes the thread anyway, and a closed pipe means that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _give_up(self, sender: bytes) -> None:
        self._refused.add(sender)
        requests = [request for request, by in self._senders.items() if by == sender]
        for key, waiting in self._waiting.items():
            self._waiting[key] = [request for request in waiting if request not in requests]
        for unserved in self._unserved.values():
            for request in requests:
                unserved.pop(request, None)
        for identity, number in requests:
            self._answer(identity, number, _GONE, encode(Message()))

    def _offer(self, key: str, frames: Frames) -> None:
        self._board[key] = frames
        for identity, number in self._waiting.pop(key, ()):
            self._answer(identity, number, b"ok", frames)

    def _serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        for (identity, number), message in self._unserved.pop(name, {}).items():
            self._call(identity, number, name, message)

    def _call(self, identity: bytes, number: bytes, name: str, message: Message) -> None:
        try:
            answer = self._handlers[name](message)
        except Exception as error:  # noqa: BLE001 - whatever arrives from outside, this endpoint goes on
            self._answer(identity, number, b"error", encode(Message(f"{type(error).__name__}: {error}")))
            return
        if isinstance(answer, futures.Future):
            answer.add_done_callback(lambda done: self._do(lambda: self._reply(identity, number, done.result)))
        else:
            self._reply(identity, number, lambda: answer)

    def _reply(self, identity: bytes, number: bytes, result: Callable[[], Message]) -> None:
        try:
            status, frames = b"ok", encode(result())
        except Exception as error:  # noqa: BLE001 - the caller gets the error as the answer
            status, frames = b"error", encode(Message(f"{type(error).__name__}: {error}"))
        self._answer(identity, number, status, frames)

    def _answer(self, identity: bytes, number: bytes, status: bytes, frames: Frames) -> None:
        self.traffic.count(frames)
        self._senders.pop((identity, number), None)
        self._server.send_multipart([identity, number + self._mine, status, *in_pieces(frames)], copy=False)
        self._touched[self._server] = None

    def _receive_request(self) -> None:
        received = self._server.recv_multipart(copy=False)
        # The sender may rely on an earlier `put` or `serve` of this process, so these jobs must come first.
        self._do_jobs()
        self.traffic.count(received)
        if len(received) < 4:
            return  # not a request of this protocol
        identity, numbers, head = (part.bytes for part in received[:3])
        number, sender, receiver = (numbers[i * _NUMBER : (i + 1) * _NUMBER] for i in range(3))
        if sender in self._refused or receiver not in (b"", self._mine):
            self._answer(identity, number, _GONE, encode(Message()))
            return
        try:
            kind, key = json.loads(head)
            message = decode(from_pieces(received[3:]))
        except Exception as error:  # noqa: BLE001 - whatever arrives from outside, this endpoint goes on
            self._answer(identity, number, b"error", encode(Message(f"{type(error).__name__}: {error}")))
            return
        self._senders[identity, number] = sender
        if kind == "get":
            waiting = self._waiting.setdefault(key, [])
            if (identity, number) not in waiting:
                waiting.append((identity, number))
            if key in self._board:
                self._offer(key, self._board[key])
        elif key in self._handlers:
            self._call(identity, number, key, message)
        else:
            self._unserved.setdefault(key, {})[identity, number] = message

    def _link(self, place: tuple[str, int]) -> "_Link":
        if place not in self._peers:
            client = self._context.socket(zmq.DEALER)
            self._secure(client, server=False)
            link = _Link(self, client, place)
            self._peers[place] = link
            self._listen_to(client, link.receive)
            self._listen_to(link.monitor, link.receive_event)
        return self._peers[place]

    def _on_reconnect(self, place: tuple[str, int]) -> None:
        """Repeats the unanswered requests of a connection that broke and was restored, because some may have been
        lost."""
        for request in [r for r in self._answers.values() if r.place == place]:
            self._send(request)

    def _send(self, request: Request) -> None:
        if request.done:
            self._answers.pop(request.number, None)
            return
        self._answers[request.number] = request
        self.traffic.count(request.frames)
        numbers = request.number.to_bytes(_NUMBER, "little") + self._mine + self._endpoints.get(request.place[0], b"")
        frames = [numbers, request.head, *in_pieces(request.frames)]
        client = self._link(request.place).client
        client.send_multipart(frames, copy=False)
        self._touched[client] = None

    def _on_answer(self, address: str, numbers: bytes, status: bytes, pieces: Sequence[object]) -> None:
        sender = numbers[_NUMBER:]
        if status == _GONE or self._endpoints.setdefault(address, sender) != sender:
            for link in [link for place, link in self._peers.items() if place[0] == address]:
                link.refuse()
            return
        request = self._answers.pop(int.from_bytes(numbers[:_NUMBER], "little"), None)
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


class _Link:
    """A connection to one other endpoint; notices when the connection breaks."""

    _PATIENCE_S = 3.0

    def __init__(self, channel: Channel, client: zmq.Socket, place: tuple[str, int]):
        self._channel, self.client, self._place = channel, client, place
        self.monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._was_up = self.refused = False
        self._broken_since: float | None = None
        self._on_lost: Callable[[], None] | None = None
        self._until = math.inf  # time after which a connection that was never established counts as broken
        client.connect(f"tcp://{place[0]}")

    @property
    def is_up(self) -> bool:
        return self._broken_since is None and not self.refused

    def watch(self, on_lost: Callable[[], None], within_s: float) -> None:
        self._on_lost, self._until = on_lost, time.monotonic() + within_s

    def refuse(self) -> None:
        """Records that the endpoint has given this one up, or was replaced by another endpoint."""
        self.refused = True
        self.check()

    def receive(self) -> None:
        received = self.client.recv_multipart(copy=False)
        self._channel.traffic.count(received)
        if len(received) >= 3:  # an answer of this protocol has at least three parts
            numbers, status, *pieces = received
            self._channel._on_answer(self._place[0], numbers.bytes, status.bytes, pieces)

    def receive_event(self) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_since = None
            if self._was_up:
                self._channel._on_reconnect(self._place)
            self._was_up = True
        elif event == zmq.EVENT_DISCONNECTED and self._broken_since is None:
            self._broken_since = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        broken = self._broken_since is not None and now - self._broken_since > self._PATIENCE_S
        never = not self._was_up and now > self._until
        if (broken or never or self.refused) and self._on_lost is not None:
            on_lost, self._on_lost = self._on_lost, None
            on_lost()

    def close(self) -> None:
        self.client.disable_monitor()
        self.monitor.close(linger=0)
        self.client.close(linger=1000 if self.is_up else 0)  # messages to a lost endpoint could not be sent anyway


class _OneKey:
    """Accepts exactly the connections that use the job's public key."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._public


def _keys(secret: str) -> tuple[bytes, bytes]:
    """Derives the (public, private) CURVE keys of a job, the same in every process."""
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=b"podrl-channel").digest()
    private = zmq.utils.z85.encode(seed)
    return zmq.curve_public(private), private
