"""A stranger who reaches a job's ports but does not know its secret cannot disturb the job."""

import contextlib
import os
import pathlib
import resource
import socket
import struct
import subprocess
import sys

import pytest
from processes import job, listening, trained_steps
from waits import PATIENCE_S, until

from podrl.runtime.channel import Channel
from podrl.runtime.message import PIECE, Message

# The program of an endpoint. For each call it opens 100 files, so a call fails if the process has no descriptors left.
# The answer has the number of its open files and its memory in bytes.
ENDPOINT = """
import os, pathlib, sys
from podrl.runtime.channel import Channel
from podrl.runtime.message import Message
endpoint = Channel("endpoint", secret="s3cret")

def work(message):
    files = [open(os.devnull) for _ in range(100)]
    for file in files:
        file.close()
    status = pathlib.Path("/proc/self/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) << 10
    return Message({"twice": 2 * message.value, "open": len(os.listdir("/proc/self/fd")), "resident": resident})

endpoint.serve("work", work)
print(endpoint.address, flush=True)
sys.stdin.read()
"""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG = b"\x06" + struct.pack(">Q", 1 << 29)  # header of a command of half a gigabyte
HOSTILE = {
    "one byte": b"\xff",
    "eight zeros": bytes(8),  # a jax process aborts if its transfer port gets these bytes
    "zeros": bytes(64),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "a greeting": GREETING,
    "a long frame": GREETING + LONG + bytes(24 << 20),
    "as long as allowed": GREETING + b"\x06" + struct.pack(">Q", PIECE) + bytes(PIECE // 2),
    "no encryption": GREETING.replace(b"CURVE", b"NULL\0"),
    "an old protocol": b"\xff" + bytes(8) + b"\x7f\x01\x05",
}


def limited(limits: str, program: str) -> list[str]:
    """Returns a command that runs a Python program under limits. A shell sets the limits, because Python code could
    hang in a fork of a process with jax."""
    return ["bash", "-c", f'{limits}; exec "$0" -c "$1"', sys.executable, program]


@contextlib.contextmanager
def endpoint(descriptors: int = 1024):
    """Starts an endpoint that may open at most `descriptors` files; yields its process and its address."""

    process = subprocess.Popen(
        limited(f"ulimit -n {descriptors}", ENDPOINT), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        host, _, port = process.stdout.readline().strip().rpartition(":")
        yield process, (host, int(port))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def intrude(address: tuple[str, int], stack: contextlib.ExitStack, sent: bytes = b"") -> socket.socket:
    """Opens a connection, sends the bytes `sent`, and leaves the connection open until `stack` closes it."""
    made = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
    with contextlib.suppress(OSError):  # the endpoint may have closed the connection while it was writing
        made.sendall(sent)
    return made


def asked(member: Channel, address: tuple[str, int], value: int) -> dict:
    answer = member.call(f"{address[0]}:{address[1]}", "work", Message(value), deadline_s=PATIENCE_S).value
    assert answer["twice"] == 2 * value
    return answer


def test_3000_silent_and_100_hostile_connections_change_nothing():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip("this process may not open 3,100 connections itself")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    early, late = Channel("early", secret="s3cret"), Channel("late", secret="s3cret")
    with endpoint() as (process, address), contextlib.ExitStack() as stack:
        stack.callback(lambda: (early.close(), late.close()))
        before = asked(early, address, 1)
        for _ in range(3000):
            intrude(address, stack)
        hostile = [intrude(address, stack, words) for _ in range(12) for words in HOSTILE.values()][:100]
        for value in range(20):
            during = asked(early, address, value)
        assert asked(late, address, 7)  # a client that has the secret can still connect
        assert during["open"] < before["open"] + 200
        assert during["resident"] < before["resident"] + 100 * 2 * PIECE
        assert process.poll() is None
        # The endpoint has closed the strangers' connections.
        until(
            lambda: asked(early, address, 3)["open"] <= before["open"] + 20,
            "the end of the strangers' connections",
            every_s=0.5,
        )
        assert len(hostile) == 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.e2e
def test_a_job_of_separate_clusters_goes_on_among_intruders(tmp_path):
    args = ["--local_processes=2", "--topology=split", "--config.trainer.max_steps=3", "--config.eval.problems=0"]
    with job(tmp_path / "run", *args) as attacked, contextlib.ExitStack() as stack:
        attacked.wait_for_step(1)
        members = attacked.children()
        ports = listening(members)
        # Two channels and two endpoints for weights listen, all on this machine's own interface.
        assert len(ports) >= 4 and {host for host, _ in ports} == {"127.0.0.1"}
        for address in ports:
            for words in HOSTILE.values():
                intrude(address, stack, words)
        for member in members:
            for shown in ("environ", "cmdline"):
                words = pathlib.Path(f"/proc/{member}/{shown}").read_bytes().split(b"\0")
                secrets = [word.partition(b"=")[2] for word in words if word.startswith(b"PODRL_SECRET=")]
                assert all(set(secret) == set(b"*") for secret in secrets)
        attacked.finish(0)
    assert trained_steps(tmp_path / "run") == [1, 2, 3]


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes():
    program = "import resource; from podrl.runtime.sockets import raise_descriptor_limit as up; up(); up()\n"
    program += "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 5000)
    command = limited(f"ulimit -Sn 256; ulimit -Hn {hard}", program)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str((hard, hard))


def test_messages_longer_than_a_piece_arrive_whole():
    a, b = Channel("a", secret="s3cret"), Channel("b", secret="s3cret")
    try:
        numbers = os.urandom(3 * PIECE + 5)
        a.serve("echo", lambda message: Message(message.value, bulk=[memoryview(numbers), memoryview(b"")]))
        text = "x" * (2 * PIECE)
        answer = b.call(a.address, "echo", Message(text), deadline_s=30)
        assert answer.value == text and [bytes(piece) for piece in answer.bulk] == [numbers, b""]
    finally:
        a.close()
        b.close()
