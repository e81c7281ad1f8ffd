"""A pod on this machine: whose exit code counts, what of its processes' output is shown, and that nobody is left."""

import os
import signal
import sys
import threading
import time

import pytest

from podrl.runtime.local_pod import LocalPod
from podrl.runtime.roles import Hosts

_PREAMBLE = "import os, signal, sys, time\nindex = int(os.environ['PODRL_PROCESS_INDEX'])\n"


def _pod(program: str, *, replace_rollouts: bool = False) -> LocalPod:
    command = [sys.executable, "-c", _PREAMBLE + program]
    return LocalPod(command, Hosts((0,), (1, 2)), replace_rollouts=replace_rollouts, environment=os.environ)


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        ("sys.exit(1)", 1, "exit code 1"),
        ("sys.exit(75)", 75, "exit code 75"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 42, "signal SIGKILL"),
        ("os.abort()", 42, "signal SIGABRT"),
    ],
)
def test_the_first_that_fails_gives_the_exit_code(first, code, words, capfd):
    assert _pod(f"if index == 2:\n    {first}\ntime.sleep(0.5)\nsys.exit(7)").run() == code
    assert f"podrl: rollout 1 ended with {words}; the others have to end too." in capfd.readouterr().err


def test_lines_have_a_name_and_the_chatter_of_collectives_is_left_out(capfd):
    said = [
        "[Gloo] Rank 0 is connected to 1 peer ranks.",
        "a line of podrl",
        "E1121 22:33:19.323981    2077 coordination_service_agent.cc:289] Polled an error from coordination service.",
        "Additional GRPC error information from remote target coordination_service while calling /xla.coordination:",
        ":UNKNOWN:Error received from peer  {grpc_status:14}",
        "F1121 22:33:19.324048    2077 client.h:80] Terminating process because the JAX distributed service detected "
        "fatal errors. This most likely indicates that another task died; absl::Status: UNAVAILABLE",
        ":UNKNOWN:Error received from peer  {grpc_status:14}",
        "*** Check failure stack trace: ***",
        "    @     0x7f8b26258634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
    ]
    assert _pod(f"for line in {said!r} if index == 1 else ():\n    print(line)").run() == 0
    out = capfd.readouterr().out.splitlines()
    assert out == [f"[rollout 0] {said[1]}", f"[rollout 0] {said[5]}"]


def test_a_stack_trace_of_something_else_is_shown(capfd):
    said = ["F1121 22:33:19 2077 array.cc:80] Check failed: n > 0", "*** Check failure stack trace: ***", "    @  0x7f"]
    assert _pod(f"for line in {said!r} if index == 0 else ():\n    print(line)").run() == 0
    assert capfd.readouterr().out.splitlines() == [f"[trainer 0] {line}" for line in said]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_process_once(number, tmp_path, capfd):
    program = f"""
import pathlib
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    time.sleep(0.5)
    sys.exit(0)
signal.signal({int(number)}, heard)
pathlib.Path({str(tmp_path)!r}, str(index)).touch()
time.sleep(600)
"""

    def send() -> None:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=send).start()
    assert _pod(program).run() == 0
    names = ("trainer 0", "rollout 0", "rollout 1")
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(f"[{name}] heard {number.name}" for name in names)
    assert signal.getsignal(number) is before


def test_only_rollouts_that_were_killed_are_started_again_and_not_for_ever(tmp_path, capfd):
    program = f"""
import pathlib
started = pathlib.Path({str(tmp_path)!r}, "started")
if index == 2:
    with started.open("a") as out:
        out.write(".")
    if len(started.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert _pod(program, replace_rollouts=True).run() == 0
    assert capfd.readouterr().err.count("rollout 1 ended with signal SIGKILL; it is started again.") == 2
    assert _pod("sys.exit(42 if index == 2 else 0)", replace_rollouts=True).run() == 42
    assert capfd.readouterr().err.count("it is started again") == 5
    assert _pod("sys.exit(1 if index == 2 else 0)", replace_rollouts=True).run() == 1
    assert "started again" not in capfd.readouterr().err


def test_a_process_that_does_not_end_when_another_failed_is_killed(monkeypatch, capfd):
    monkeypatch.setattr("podrl.runtime.local_pod._GRACE_S", 0.3)
    program = "print(os.getpid(), flush=True)\nif index == 0:\n    time.sleep(0.5)\n    sys.exit(3)\ntime.sleep(600)"
    assert _pod(program).run() == 3
    said = capfd.readouterr()
    assert "rollout 0, rollout 1 did not end: killed." in said.err
    pids = [int(line.split()[-1]) for line in said.out.splitlines()]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
