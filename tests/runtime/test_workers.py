"""Pools of processes with functions of users, for callers on an event loop and on threads."""

import asyncio
import os
import pathlib
import threading

import pytest

from podrl.runtime.user_code import Limits
from podrl.runtime.workers import DiedError, Functions, LateError, Loop, Pool, reap

MODULE = "podrl.data.mapper"  # the smallest: records in, records out

CODE = """
import os, pathlib, time

def slow(record):
    pathlib.Path(record["started"]).touch()
    time.sleep(600)

def pid(record):
    return {"pid": os.getpid()}
"""


@pytest.fixture
def specs(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return {name: {"file": str(tmp_path / "mine.py"), "name": name} for name in ("slow", "pid")}


def until(condition):
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came true")


def test_a_late_call_costs_its_process_and_the_next_one_finds_every_function(specs, tmp_path):
    with Functions(MODULE, Limits(), specs, size=1, what="") as functions:
        first = functions.call("pid", [{}], 60)["records"][0]["pid"]
        with pytest.raises(LateError):
            functions.call("slow", [{"started": str(tmp_path / "started")}], 0.5)
        assert not pathlib.Path(f"/proc/{first}").exists()
        second = functions.call("pid", [{}], 60)["records"][0]["pid"]
        assert second not in (first, os.getpid())
    assert not pathlib.Path(f"/proc/{second}").exists()


def test_a_call_that_waits_ends_when_its_pool_is_closed(specs, tmp_path):
    functions, raised, started = Functions(MODULE, Limits(), specs, size=1, what=""), [], tmp_path / "started"

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
        Functions(MODULE, Limits(), specs, size=2, what="Map ")


def test_a_pool_starts_a_process_where_a_call_would_wait_and_replaces_that_of_a_cancelled_call(specs, tmp_path):
    started = tmp_path / "started"

    async def play():
        pool = Pool(MODULE, Limits(), most=2)
        try:
            given = b'[{"started": "%s"}]' % str(started).encode()
            slow = asyncio.create_task(pool.call("slow", specs["slow"], given, 600))
            while not started.exists():
                await asyncio.sleep(0.01)
            beside = await pool.call("pid", specs["pid"], b"[{}]", 60)  # one process is busy: there may be two
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

    loop.soon(loop.end, leave)  # as garbage that is collected there does
    until(left.is_set)
    until(lambda: not any(thread.name == "a-loop" for thread in threading.enumerate()))
