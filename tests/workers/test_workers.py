"""Pools of processes that run users' functions, for callers on an event loop and on threads."""

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import subprocess
import threading

import pytest
from waits import PATIENCE_S

from podrl.data import mapper
from podrl.workers import frames, user_objects
from podrl.workers import process as workers
from podrl.workers.process import DiedError, Functions, LateWorkerError, Loop, Pool, reap
from podrl.workers.user_code import Limits

MODULE = "podrl.data.mapper"  # the simplest worker: its functions take records and return records

CODE = r"""
import fcntl, os, pathlib, signal, stat, struct, subprocess, time

def slow(record):
    pathlib.Path(record["started"]).touch()
    time.sleep(600)

def pid(record):
    return {"pid": os.getpid()}

def echo(record):
    print("x" * 200_000, "to standard output", sep="")
    return record

def answers():
    pipes = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    return next(fd for fd in pipes if stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & 3)

def frame(head):
    return struct.pack(">II", len(head), 0) + head

def misbehave(record):
    match record["how"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ended":
            os._exit(7)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "closed":
            os.close(answers())
        case "long":
            os.write(answers(), b"\xff" * 8)
        case "no JSON":
            os.write(answers(), frame(b"{nonsense}"))
        case "no object":
            os.write(answers(), frame(b"[1]"))
        case "deep":
            os.write(answers(), frame(b"[" * 50_000))
        case "of another":
            os.write(answers(), frame(b'{"number": 77, "reply": {"records": [{}]}}'))
        case "no answer":
            os.write(answers(), frame(b'{"number": 1, "reply": 5}'))
        case "detached":
            for _ in range(20):
                subprocess.Popen(["sleep", "600"], start_new_session=True)
            pathlib.Path(record["started"]).write_text("".join(f"{pid} " for pid in children()))
            os._exit(0)
    time.sleep(600)

def children():
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and parent(pid) == os.getpid()]

def parent(pid):
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
"""


@pytest.fixture
def specs(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return {name: {"file": str(tmp_path / "mine.py"), "name": name} for name in ("slow", "pid", "echo", "misbehave")}


def until(condition):
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition never became true")


def open_files():
    gc.collect()  # else garbage of earlier tests may close its files between two counts
    return len(os.listdir("/proc/self/fd"))


def test_a_late_call_costs_its_process_and_the_next_one_finds_every_function(specs, tmp_path):
    with Functions(MODULE, Limits(), specs, size=1, label=str) as functions:
        first = functions.call("pid", [{}], 60)["records"][0]["pid"]
        with pytest.raises(LateWorkerError):
            functions.call("slow", [{"started": str(tmp_path / "started")}], 0.5)
        assert not pathlib.Path(f"/proc/{first}").exists()
        second = functions.call("pid", [{}], 60)["records"][0]["pid"]
        assert second not in (first, os.getpid())
    assert not pathlib.Path(f"/proc/{second}").exists()


def test_a_call_that_waits_ends_when_its_pool_is_closed(specs, tmp_path):
    functions, raised, started = Functions(MODULE, Limits(), specs, size=1, label=str), [], tmp_path / "started"

    def wait():
        try:
            functions.call("slow", [{"started": str(started)}], 600)
        except DiedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(started.exists)
    functions.close()
    thread.join(60)
    assert not thread.is_alive() and len(raised) == 1


def test_a_function_whose_file_ends_the_process_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("import os\nos._exit(3)\n")
    specs = {"mine": {"file": str(tmp_path / "mine.py"), "name": "f"}}
    with pytest.raises(ValueError, match=r"^Map mine cannot be loaded: its process ended with exit code 3\.$"):
        Functions(MODULE, Limits(), specs, size=2, label="Map {}".format)


def test_a_pool_starts_a_process_where_a_call_would_wait_and_replaces_that_of_a_cancelled_call(specs, tmp_path):
    started = tmp_path / "started"

    async def play():
        pool = Pool(MODULE, Limits(), most=2)
        try:
            given = b'[{"started": "%s"}]' % str(started).encode()
            slow = asyncio.create_task(pool.call("slow", specs["slow"], given, 600))
            while not started.exists():
                await asyncio.sleep(0.01)
            beside = await pool.call("pid", specs["pid"], b"[{}]", 60)  # one process is busy, so a second may start
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            both = await asyncio.gather(*[pool.call("pid", specs["pid"], b"[{}]", 60) for _ in range(8)])
            return beside["records"][0]["pid"], {one["records"][0]["pid"] for one in both}
        finally:
            reap(await pool.close())

    beside, pids = asyncio.run(play())
    assert beside in pids and len(pids) <= 2


def test_a_loop_can_be_ended_from_its_own_thread():
    loop, left = Loop("a-loop"), threading.Event()

    async def leave():
        left.set()
        return []

    loop.soon(loop.end, leave)  # the garbage collector may call end() on this thread
    until(left.is_set)
    until(lambda: not any(thread.name == "a-loop" for thread in threading.enumerate()))


MISBEHAVIOUR = {
    "killed": (DiedError, "ended with SIGKILL"),
    "ended": (DiedError, "ended with exit code 7"),
    "stopped": (LateWorkerError, "did not answer in time"),
    "closed": (DiedError, "closed its pipe"),
    "long": (DiedError, "something other than an answer: a message of 8589934590 bytes"),
    "no JSON": (DiedError, "something other than an answer: a message that is not JSON"),
    "no object": (DiedError, "something other than an answer: a message that is not a JSON object"),
    "deep": (DiedError, "something other than an answer: a message that is not JSON"),
    "of another": (DiedError, "sent an answer without a request"),
    "no answer": (DiedError, "sent an answer without a request"),
    "detached": (DiedError, "ended with exit code 0"),
}


def test_whatever_a_function_does_its_call_ends_with_an_error_and_the_next_one_is_well(specs, tmp_path):
    """A function that misbehaves leaves no process and no open file."""
    started, before, pids = tmp_path / "started", 0, []
    with Functions(MODULE, Limits(), specs, size=1, label=str) as functions:
        for how, (kind, words) in MISBEHAVIOUR.items():
            pids.append(functions.call("pid", [{}], 60)["records"][0]["pid"])
            before = before or open_files()
            with pytest.raises(kind, match=words):
                functions.call(
                    "misbehave", [{"how": how, "started": str(started)}], 0.5 if kind is LateWorkerError else 60
                )
            assert functions.call("echo", [{"how": how}], 60) == {"records": [{"how": how}]}
            assert open_files() <= before, how
    gone = [*pids, *started.read_text().split()]
    assert len(gone) == len(MISBEHAVIOUR) + 20
    until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in gone))  # init reaps detached processes
    assert len(set(pids)) == len(pids)


def test_a_deadline_ends_while_the_request_does_not_fit_into_the_pipe(specs, tmp_path):
    async def play():
        pool, started = Pool(MODULE, Limits()), tmp_path / "started"
        try:
            slow = json.dumps([{"started": str(started)}]).encode()
            with pytest.raises(LateWorkerError):  # the process is busy and does not read the following messages
                await pool.call("slow", specs["slow"], slow + b" " * (8 << 20), 2)
            return await pool.call("echo", specs["echo"], json.dumps([{"long": "x" * (8 << 20)}]).encode(), 60)
        finally:
            reap(await pool.close())

    assert len(asyncio.run(play())["records"][0]["long"]) == 8 << 20


def test_hundreds_of_calls_at_once_each_get_their_own_answer(specs):
    async def play():
        pool = Pool(MODULE, Limits(), most=3)
        try:
            names = ["echo", "pid"] * 150
            calls = [pool.call(name, specs[name], given(number), 60) for number, name in enumerate(names)]
            return await asyncio.gather(*calls)
        finally:
            reap(await pool.close())

    def given(number):
        return json.dumps([{"number": number}]).encode()

    answers = [one["records"][0] for one in asyncio.run(play())]
    assert answers[::2] == [{"number": number} for number in range(0, 300, 2)]
    assert len({one["pid"] for one in answers[1::2]}) <= 3


def test_a_request_that_is_too_long_costs_no_process(specs, monkeypatch):
    with Functions(MODULE, Limits(), specs, size=1, label=str) as functions:
        first = functions.call("pid", [{}], 60)
        monkeypatch.setattr(frames, "MOST_BYTES", 1 << 16)
        with pytest.raises(ValueError, match=r"a message of .* bytes, more than the limit of 65536"):
            functions.call("echo", ["x" * (1 << 16)], 60)
        assert functions.call("pid", [{}], 60) == first


def test_a_system_without_more_processes_fails_one_call_and_hangs_none(specs, monkeypatch):
    """A process that cannot be restarted keeps its place in the pool: a call that waits for it goes on and gets the
    error."""

    def none_left(*args, **kwargs):
        raise BlockingIOError("Resource temporarily unavailable")

    async def play():
        pool = Pool(MODULE, Limits())
        try:
            await pool.call("pid", specs["pid"], b"[{}]", 60)
            before = open_files()
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", none_left)
                dies = pool.call("misbehave", specs["misbehave"], b'[{"how": "ended"}]', 60)
                waits = [pool.call("pid", specs["pid"], b"[{}]", 60) for _ in range(3)]
                ended = await asyncio.gather(dies, *waits, return_exceptions=True)
                assert open_files() <= before
            assert [type(one) for one in ended] == [DiedError] + 3 * [BlockingIOError]
            await pool.call("pid", specs["pid"], b"[{}]", 60)
            assert open_files() <= before
        finally:
            reap(await pool.close())

    asyncio.run(play())


def test_calls_that_race_with_the_end_of_their_pool_all_end(specs):
    functions, ended = Functions(MODULE, Limits(), specs, size=2, label=str), []

    def call_until_it_ends():
        try:
            while True:
                functions.call("pid", [{}], 60)
        except DiedError as error:
            ended.append(error)

    threads = [threading.Thread(target=call_until_it_ends) for _ in range(16)]
    for thread in threads:
        thread.start()
    functions.close()
    for thread in threads:
        thread.join(60)
    assert len(ended) == len(threads)
    with pytest.raises(DiedError, match="asked to end"):
        functions.call("pid", [{}], 60)


@pytest.mark.parametrize("turns", range(8))
def test_every_caller_is_told_when_its_work_ends_as_the_loop_stops(turns, monkeypatch):
    loop, told, stopping = Loop("a-loop"), [], asyncio.Event()
    started, stop = threading.Event(), loop._loop.stop
    monkeypatch.setattr(loop._loop, "stop", lambda: (stopping.set(), stop()))

    async def work():
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping.wait()
        for _ in range(turns):
            await asyncio.sleep(0)

    def call():
        with contextlib.suppress(DiedError):
            loop.run(work())
        told.append(True)

    async def leave():
        return []

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert started.wait(PATIENCE_S)
    loop.end(leave)
    caller.join(PATIENCE_S)
    assert told


def test_processes_that_were_asked_to_leave_have_one_second_for_it_together(monkeypatch):
    waited = []

    class Stays:
        def close(self, wait_s):
            waited.append(wait_s)
            now[0] += wait_s

    now = [5.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    reap([Stays(), Stays(), Stays()])
    assert waited == [1.0, 0.0, 0.0]


def test_an_error_with_a_long_message_is_cut():
    try:
        raise ValueError("x" * 100_000 + "\nthe last line")
    except ValueError as error:
        told, line = user_objects.explain(error), user_objects.one_line(error)
    assert "[98014 characters left out]" in line and len(line) < 2100
    assert "characters left out]" in told and len(told) < 4000 and told.endswith("\nthe last line")


def test_what_a_data_map_makes_must_fit_into_an_answer(monkeypatch):
    monkeypatch.setattr(frames, "MOST_BYTES", 100)
    doubled = mapper.mapped(lambda record: {"text": 2 * record["text"]}, [{"text": "a"}, {"text": "b" * 20}])
    assert doubled == {
        "raised": "it returned more than 50 bytes of JSON for this record and the 1 before it",
        "record": 1,
    }
