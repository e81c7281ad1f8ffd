"""The processes' own network: one process puts named messages, others wait for them; encrypted, with deadlines.

Every process is an endpoint: a board of messages under keys that others read, and functions that others call. Reads of
a key that is not there yet wait on the server's side. Requests are sent again until they are answered, so an endpoint
that was away for a while is found again; every request may therefore be served twice.

Every request names the endpoint that sends it and the one that it is for, by numbers that each draws when it starts. So
two endpoints never believe different things of each other: one that is given up (`give_up`) is served nothing any more
and told so by the answer to whatever it asks, and one that is not the endpoint of before, though it is at its address
(the next run of the same command), refuses. Either counts as the loss of the connection.

Strangers find little to do. Before they have proved that they hold the job's key a frame may not be longer than PIECE
(longer messages are cut into such), their connection ends after HANDSHAKE_S, and one that says nothing at all does not
even take a descriptor: the kernel keeps it.
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
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from podrl.runtime.message import PIECE, Frames, Message, decode, encode, from_pieces, in_pieces
from podrl.runtime.request import ChannelError as ChannelError
from podrl.runtime.request import LateError as LateError
from podrl.runtime.request import Request
from podrl.runtime.sockets import listen, raise_descriptor_limit

RESEND_S = 60.0  # connections that broke are noticed, and unserved calls wait: this is for what nobody thought of
SILENCE_S = 30.0  # of a whole machine: heartbeats are the business of threads that no compilation holds up
_HEARTBEATS = 6  # in that time
HANDSHAKE_S = 10.0
_SEALED = 64  # bytes that encryption adds to a frame, and some
_SWEEP_S = 1.0  # between two looks at connections that say nothing
_READABLE = int(zmq.POLLIN)
_TURN = 100  # messages of one socket before the others have theirs
_NUMBER = 8  # bytes of the number of a request, and of an endpoint
_GONE = b"gone"  # the status of an answer to an endpoint that was given up, or that means another endpoint

Handler = Callable[[Message], "Message | futures.Future[Message]"]


@dataclasses.dataclass
class Traffic:
    """Messages, answers included, that an endpoint sent and received, and their bytes before encryption."""

    messages: int = 0
    bytes: int = 0

    def count(self, frames: Sequence[Any]) -> None:
        self.messages += 1
        self.bytes += sum(map(len, frames))


class Channel:
    """This process's endpoint. All sockets live on one thread of its own; any thread may call any method.

    Attributes:
      address: 'host:port' at which others reach it.
      number: tells this endpoint from every other, also from an earlier or later one at the same address.
      traffic: bytes and messages so far.
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
          name: name of this process, for messages: 'trainer 0'.
          secret: shared by all processes of the job; traffic is encrypted with keys made from it, and nobody else is
            let in.
          host: address of the interface to listen on; see `interface_towards`.
          port: 0 for a free one.
          silence_s: seconds without a sign of life after which a connection counts as broken.
          threads: number of threads that encrypt and send, each for its share of the connections.

        Raises:
          ValueError: no secret, or an address that cannot be listened on.
        """
        if not secret:
            raise ValueError("The processes' channel needs a secret: set PODRL_SECRET to the same text on all hosts.")
        self.name, self.number, self.traffic = name, secrets.token_hex(_NUMBER), Traffic()
        self._known, self._refused = dict[str, bytes](), set[bytes]()  # endpoints by address; those given up
        self._senders: dict[tuple[bytes, bytes], bytes] = {}  # of the requests that wait for their answer
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
                f"The processes' channel cannot listen on {host}:{port or '*'} ({error}): another process holds the "
                "port, or the address is not of this host."
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
        """Offers a message under a key, to all who wait for it now or ask later; replaces an older one."""
        frames = encode(message)
        self._do(lambda: self._offer(key, frames))

    def drop(self, key: str) -> None:
        """Stops offering a key."""
        self._do(lambda: self._board.pop(key, None))

    def serve(self, name: str, handler: Handler) -> None:
        """Answers calls of `name` with `handler`, on the channel's thread: it is quick, or gives a Future."""
        self._do(lambda: self._serve(name, handler))

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

    def request(self, address: str, kind: str, key: str, message: Message, *, lane: int = 0) -> Request:
        """Sends a request without waiting; the result's `wait` returns the answer.

        Args:
          address: the other endpoint.
          kind: 'get' or 'call'.
          key: key of a message, or the name of a function.
          message: argument of the function.
          lane: number of the connection to take, of several to it; on all but the first an answer is taken to need
            time, and the request is sent again only where its connection broke.
        """
        number = next(self._numbers)
        request = Request(number, (address, lane), json.dumps([kind, key]).encode(), encode(message))
        self._do(lambda: self._send(request))
        return request

    def watch(self, address: str, lost: Callable[[], None], *, within_s: float = SILENCE_S) -> None:
        """Calls `lost` once, on the channel's thread, when an endpoint cannot be asked any more.

        That is when the connection to it breaks and stays broken, does not stand within `within_s` seconds, or leads to
        another endpoint than before; and when the endpoint has given this one up.
        """
        self._do(lambda: self._link((address, 0)).watch(lost, within_s))

    def give_up(self, number: str) -> None:
        """Serves an endpoint nothing from now on: each request of it, also one that waits, is answered by a refusal.

        Args:
          number: the other endpoint's `number`.
        """
        self._do(lambda: self._give_up(bytes.fromhex(number)))

    def is_given_up(self, address: str) -> bool:
        """True where an endpoint that was asked has given this one up, or is not the one of before."""
        link = self._peers.get((address, 0))
        return link is not None and link.refused

    def stands(self, address: str) -> bool:
        """True while there is a connection to an endpoint that was used before, as far as is known."""
        link = self._peers.get((address, 0))
        return link is not None and link.stands

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
        self._do_jobs()  # what was offered or asked before closing still leaves
        for link in self._peers.values():
            link.close()
        self._server.close(linger=1000)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _listen_to(self, sock: zmq.Socket, receive: Callable[[], None]) -> None:
        """Calls `receive` for each message of a socket.

        Its descriptor shows only that something changed since its events were looked at, which sending does too. So
        every socket that was used is looked at again, and a few hundred silent ones cost nothing.
        """
        self._sockets[sock] = receive
        self._touched[sock] = None
        self._selector.register(int(sock.getsockopt(zmq.FD)), selectors.EVENT_READ, sock)

    def _receive(self) -> None:
        """Takes the messages of the sockets that may have some, of none more than its turn."""
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
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it is gone
            self._wake_out.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _give_up(self, sender: bytes) -> None:
        self._refused.add(sender)
        asked = [request for request, by in self._senders.items() if by == sender]
        for key, waiting in self._waiting.items():
            self._waiting[key] = [request for request in waiting if request not in asked]
        for unserved in self._unserved.values():
            for request in asked:
                unserved.pop(request, None)
        for identity, number in asked:
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
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            status, frames = b"error", encode(Message(f"{type(error).__name__}: {error}"))
        self._answer(identity, number, status, frames)

    def _answer(self, identity: bytes, number: bytes, status: bytes, frames: Frames) -> None:
        self.traffic.count(frames)
        self._senders.pop((identity, number), None)
        self._server.send_multipart([identity, number + self._mine, status, *in_pieces(frames)], copy=False)
        self._touched[self._server] = None

    def _receive_request(self) -> None:
        received = self._server.recv_multipart(copy=False)
        self._do_jobs()  # whoever asks may know of what this process did before: it must be done by now
        self.traffic.count(received)
        if len(received) < 4:
            return  # not a request of ours
        identity, numbers, head = (part.bytes for part in received[:3])
        number, sender, wanted = (numbers[i * _NUMBER : (i + 1) * _NUMBER] for i in range(3))
        if sender in self._refused or wanted not in (b"", self._mine):
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

    def _came_back(self, place: tuple[str, int]) -> None:
        """Repeats requests over a connection that broke and stands again: some may have been lost."""
        for request in [r for r in self._answers.values() if r.place == place]:
            self._send(request)

    def _send(self, request: Request) -> None:
        if request.done:
            self._answers.pop(request.number, None)
            return
        self._answers[request.number] = request
        self.traffic.count(request.frames)
        numbers = request.number.to_bytes(_NUMBER, "little") + self._mine + self._known.get(request.place[0], b"")
        frames = [numbers, request.head, *in_pieces(request.frames)]
        client = self._link(request.place).client
        client.send_multipart(frames, copy=False)
        self._touched[client] = None

    def _answered(self, address: str, numbers: bytes, status: bytes, pieces: Sequence[Any]) -> None:
        sender = numbers[_NUMBER:]
        if status == _GONE or self._known.setdefault(address, sender) != sender:
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
    """The connection to one other endpoint, and whether it stands."""

    _PATIENCE_S = 3.0

    def __init__(self, channel: Channel, client: zmq.Socket, place: tuple[str, int]):
        self._channel, self.client, self._place = channel, client, place
        self.monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._stood = self.refused = False
        self._broken_since: float | None = None
        self._lost: Callable[[], None] | None = None
        self._until = math.inf  # when a connection that has never stood counts as broken
        client.connect(f"tcp://{place[0]}")

    @property
    def stands(self) -> bool:
        return self._broken_since is None and not self.refused

    def watch(self, lost: Callable[[], None], within_s: float) -> None:
        self._lost, self._until = lost, time.monotonic() + within_s

    def refuse(self) -> None:
        """Notes that the endpoint has given this one up, or is another one now."""
        self.refused = True
        self.check()

    def receive(self) -> None:
        received = self.client.recv_multipart(copy=False)
        self._channel.traffic.count(received)
        if len(received) >= 3:  # else not an answer of ours
            numbers, status, *pieces = received
            self._channel._answered(self._place[0], numbers.bytes, status.bytes, pieces)

    def receive_event(self) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_since = None
            if self._stood:
                self._channel._came_back(self._place)
            self._stood = True
        elif event == zmq.EVENT_DISCONNECTED and self._broken_since is None:
            self._broken_since = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        broken = self._broken_since is not None and now - self._broken_since > self._PATIENCE_S
        never = not self._stood and now > self._until
        if (broken or never or self.refused) and self._lost is not None:
            lost, self._lost = self._lost, None
            lost()

    def close(self) -> None:
        self.client.disable_monitor()
        self.monitor.close(linger=0)
        self.client.close(linger=1000 if self.stands else 0)  # what is meant for a lost endpoint would not leave


class _OneKey:
    """Authenticates connections by the job's key."""

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
