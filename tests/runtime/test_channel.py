"""Messages between processes arrive as they were sent, or are refused."""

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq
from waits import PATIENCE_S, until

from podrl.runtime.channel import Channel, ChannelError
from podrl.runtime.local_pod import free_ports
from podrl.runtime.message import Message, MessageError, _digest, decode, encode
from podrl.runtime.request import Request
from podrl.runtime.sockets import interface_towards


@pytest.fixture
def pair():
    a, b = Channel("a", secret="s3cret"), Channel("b", secret="s3cret")
    yield a, b
    a.close()
    b.close()


def test_messages_carry_json_and_arrays():
    arrays = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "empty": np.zeros((0, 4), np.float32)}
    message = decode(encode(Message({"a": [1, "two", None]}, arrays)))
    assert message.value == {"a": [1, "two", None]}
    for name, array in arrays.items():
        assert message.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(message.arrays[name], array)


def test_a_cut_or_changed_message_is_refused():
    frames = encode(Message({"a": 1}, {"x": np.arange(4.0)}))
    with pytest.raises(MessageError, match="checksum"):
        decode([*frames[:-1], frames[-1][:-8]])
    with pytest.raises(MessageError, match="checksum"):
        decode(frames[:-1])
    with pytest.raises(MessageError, match="cut"):
        decode(frames[:1])
    with pytest.raises(MessageError, match="only numbers"):
        decode(encode(Message(None, {"x": np.array(["text"])})))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("podrl.runtime.message.VERSION", 3)
    frames = encode(Message())
    monkeypatch.undo()
    with pytest.raises(MessageError, match=r"version 3 arrived, but this process reads version 2"):
        decode(frames)


def test_a_read_waits_for_what_is_offered(pair):
    a, b = pair
    threading.Timer(0.2, lambda: a.put("late", Message(7))).start()
    assert b.get(a.address, "late", deadline_s=10).value == 7
    assert b.get(a.address, "late", deadline_s=10).value == 7  # the connection is still open
    a.drop("late")
    with pytest.raises(ChannelError, match=r"within 0\.3 s from trainer 0: late"):
        b.get(a.address, "late", deadline_s=0.3, who="trainer 0")


def test_what_was_dropped_is_not_served_to_a_later_question(pair):
    a, b = pair

    def drops(_):
        """Drops the message 'old' on the channel's thread, when the request for it has arrived and is read next."""
        until(lambda: a._server.getsockopt(zmq.EVENTS) & zmq.POLLIN, "the arrival of the question")
        a.drop("old")
        return Message()

    a.serve("drops", drops)
    a.put("old", Message(7))
    a.put("other", Message(8))
    call = b.request(a.address, "call", "drops", Message())
    question = b.request(a.address, "get", "old", Message())
    call.wait(PATIENCE_S, "drops")
    assert b.get(a.address, "other", deadline_s=PATIENCE_S).value == 8  # a later request on the same connection
    assert not question.done


def test_calls_answer_and_errors_come_back(pair):
    a, b = pair
    a.serve("double", lambda m: Message(None, {"y": 2 * m.arrays["x"]}))
    a.serve("fail", lambda m: 1 / 0)
    answer = b.call(a.address, "double", Message(None, {"x": np.arange(3)}), deadline_s=10)
    np.testing.assert_array_equal(answer.arrays["y"], [0, 2, 4])
    with pytest.raises(ChannelError, match="ZeroDivisionError"):
        b.call(a.address, "fail", Message(), deadline_s=10)


def test_a_call_waits_until_its_function_is_served(pair):
    a, b = pair
    request = b.request(a.address, "call", "later", Message(3))
    assert not request.arrived(0.3)
    a.serve("later", lambda m: Message(m.value + 1))
    assert request.arrived(10) and request.wait(0.0, "a: later").value == 4


def test_bursts_of_requests_from_both_sides_are_all_answered(pair):
    """Sends more messages than are read in one turn of a socket, so each socket is read again after the others."""
    a, b = pair
    for end in (a, b):
        end.serve("same", lambda m: m)
    pairs = [(a, b.address, i) for i in range(500)] + [(b, a.address, i) for i in range(500)]
    requests = [(end.request(address, "call", "same", Message(i)), i) for end, address, i in pairs]
    assert [request.wait(30, "the other").value for request, _ in requests] == [i for _, i in requests]


def test_a_stranger_gets_no_answer(pair):
    a, _ = pair
    a.put("x", Message(1))
    stranger = Channel("c", secret="another")
    with pytest.raises(ChannelError, match="No answer"):
        stranger.get(a.address, "x", deadline_s=1.0)
    stranger.close()


def _of_version_3(frames):
    body = frames[1].replace(b'"version": 2', b'"version": 3')
    return [_digest([body, *frames[2:]]) + frames[0][16:], body, *frames[2:]]


DAMAGE = {
    "cut": (lambda frames: [*frames[:-1], frames[-1][:-1]], "bytes was refused: its checksum does not match"),
    "short": (lambda frames: frames[:1], "A message was cut: 1 of its frames arrived"),
    "flipped": (lambda frames: [*frames[:-1], bytes([frames[-1][0] ^ 1]) + frames[-1][1:]], "checksum does not match"),
    "version": (_of_version_3, "version 3 arrived, but this process reads version 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_arrives_damaged_is_refused_on_either_end_and_the_next_message_is_not(damage, pair):
    (change, said), (a, b) = DAMAGE[damage], pair
    good = Message("good", {"x": np.arange(4)})
    a.serve("echo", lambda message: message)
    asked = Request(10**6, (a.address, 0), b'["call", "echo"]', change(encode(good)))
    b._do(lambda: b._send(asked))
    with pytest.raises(ChannelError, match=f"a: echo failed: MessageError: .*{said}"):
        asked.wait(10, "a: echo")
    a._do(lambda: a._offer("offer", change(encode(good))))
    with pytest.raises(ChannelError, match=f"{a.address}: offer: .*{said}"):
        b.get(a.address, "offer", deadline_s=10)
    assert b.call(a.address, "echo", good, deadline_s=10).value == "good"


def test_what_is_no_request_is_passed_over(pair):
    a, b = pair
    b._do(lambda: b._link((a.address, 0)).client.send_multipart([b"x"]))
    a.put("x", Message(1))
    assert b.get(a.address, "x", deadline_s=10).value == 1


def test_an_endpoint_that_is_not_there_yet_is_found_and_a_lost_one_is_noticed(pair, monkeypatch):
    monkeypatch.setattr("podrl.runtime.channel._Link._PATIENCE_S", 0.1)
    _, b = pair
    (port,) = free_ports(1)
    pending = b.request(f"127.0.0.1:{port}", "get", "x", Message())
    assert not pending.arrived(0.2)
    first = Channel("first", secret="s3cret", port=port)
    first.put("x", Message(1))
    assert pending.wait(PATIENCE_S, "first: x").value == 1
    lost = threading.Event()
    b.watch(first.address, lost.set)
    first.close()
    assert lost.wait(PATIENCE_S) and not b.is_given_up(f"127.0.0.1:{port}")


@pytest.mark.parametrize("lane", [0, 1])
def test_another_endpoint_at_the_address_of_before_answers_nothing_and_counts_as_a_loss(lane, pair, monkeypatch):
    """A process sends requests to an address that another process has taken over: the new process answers none."""
    monkeypatch.setattr("podrl.runtime.channel._Link._PATIENCE_S", 1e9)  # a broken connection counts as no loss here
    _, b = pair
    first = Channel("first", secret="s3cret")
    first.put("x", Message(1))
    address = first.address
    assert b.get(address, "x", deadline_s=PATIENCE_S).value == 1
    lost = threading.Event()
    b.watch(address, lost.set)
    first.close()
    second = Channel("second", secret="s3cret", port=int(address.rpartition(":")[2]))
    called: list[str] = []
    second.put("y", Message(2))
    second.serve("act", lambda message: called.append("act") or Message())
    asked = [b.request(address, kind, key, Message(), lane=lane) for kind, key in (("get", "y"), ("call", "act"))]
    assert lost.wait(PATIENCE_S) and b.is_given_up(address) and not b.is_up(address)
    assert not called and not any(request.arrived(0.1) for request in asked)
    second.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_endpoint_that_was_given_up_is_told_so_and_served_nothing(when, pair):
    a, b = pair
    called: list[str] = []
    a.serve("act", lambda message: called.append("act") or Message())
    a.put("x", Message(1))
    assert b.get(a.address, "x", deadline_s=PATIENCE_S).value == 1
    told = threading.Event()
    b.watch(a.address, told.set)
    waiting = [b.request(a.address, *asked, Message()) for asked in (("get", "y"), ("call", "late"))]
    if when == "before":
        assert not any(request.arrived(0.1) for request in waiting)
        a.give_up(b.number)
        assert told.wait(PATIENCE_S), "b must learn from the answers to its open requests that a has given it up"
    else:
        a.give_up(b.number)
    assert not b.request(a.address, "call", "act", Message()).arrived(0.1) and not called
    assert told.wait(PATIENCE_S) and b.is_given_up(a.address)
    a.put("y", Message(2))
    a.serve("late", lambda message: called.append("late") or Message())
    assert not any(request.arrived(0.1) for request in waiting) and not called
    c = Channel("the next in its place", secret="s3cret")
    assert c.get(a.address, "y", deadline_s=PATIENCE_S).value == 2
    c.close()


def test_an_endpoint_that_never_answered_is_lost_too(pair):
    _, b = pair
    (port,) = free_ports(1)
    lost = threading.Event()
    b.watch(f"127.0.0.1:{port}", lost.set, within_s=0.1)
    assert lost.wait(PATIENCE_S)


# Answers "alive", keeps the interpreter's lock in one C call at the first line of input, and answers "still".
_PEER = """
import ctypes, sys
from podrl.runtime.channel import Channel
from podrl.runtime.message import Message
peer = Channel("peer", secret="s3cret", silence_s=0.6)
print(peer.address, flush=True)
peer.put("alive", Message(1))
sys.stdin.readline()
ctypes.PyDLL(None).sleep(6)
peer.put("still", Message(2))
sys.stdin.read()
"""


@pytest.mark.e2e
def test_a_process_busy_in_c_is_not_lost_and_a_stopped_one_is():
    watcher, lost = Channel("w", secret="s3cret", silence_s=0.6), threading.Event()
    peer = subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert peer.stdin is not None and peer.stdout is not None
        address = peer.stdout.readline().strip()
        assert watcher.get(address, "alive", deadline_s=30).value == 1
        watcher.watch(address, lost.set)
        peer.stdin.write("\n")
        peer.stdin.flush()
        assert watcher.get(address, "still", deadline_s=60).value == 2  # it comes after ten times `silence_s`
        assert not lost.is_set()
        peer.send_signal(signal.SIGSTOP)
        assert lost.wait(30)
    finally:
        peer.kill()
        peer.communicate()
        watcher.close()


def test_closing_delivers_what_was_offered_before(pair):
    a, b = pair
    waiting = b.request(a.address, "get", "last words", Message())
    time.sleep(0.3)
    a.put("last words", Message("bye"))
    a.close()
    assert waiting.wait(10, "a").value == "bye"


@pytest.mark.parametrize("lane", [0, 1])
def test_a_closed_endpoint_keeps_nobody_waiting(lane, pair):
    a, b = pair
    a.put("offered", Message())
    b.get(a.address, "offered", deadline_s=PATIENCE_S)
    (port,) = free_ports(1)
    waiting = [
        b.request(address, "get", "never offered", Message(), lane=lane)
        for address in (a.address, f"127.0.0.1:{port}", b.address)
    ]
    ends = []

    def wait(request):
        with pytest.raises(ChannelError, match="this process has left the job's network") as error:
            request.wait(1e9, "a: never offered")
        ends.append(type(error.value))

    threads = [threading.Thread(target=wait, args=(request,), daemon=True) for request in waiting]
    for thread in threads:
        thread.start()
    b.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    wait(b.request(a.address, "get", "offered", Message(), lane=lane))
    assert ends == [ChannelError] * 4


def test_a_secret_is_required_and_a_taken_port_is_named(pair):
    a, _ = pair
    with pytest.raises(ValueError, match="PODRL_SECRET"):
        Channel("x", secret="")
    with pytest.raises(ValueError, match="cannot listen on"):
        Channel("x", secret="s", port=int(a.address.rpartition(":")[2]))


def test_the_interface_towards_this_host_is_local():
    assert interface_towards("127.0.0.1") == "127.0.0.1"
