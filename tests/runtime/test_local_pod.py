"""A pod on this machine has the right exit code, shows the output of its processes, and leaves no process behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from linear import check_that_time_is_linear
from waits import PATIENCE_S, is_running, until

from podrl.runtime import local_pod

# The pod runs in a separate process, as in real use: it forks, and a process that has started jax should not fork.
_POD = """
import os, pathlib, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which a pod would go by
from podrl.runtime import local_pod
from podrl.runtime.roles import Hosts
program, replace, grace_s, rollouts, workdir = sys.argv[1:]
local_pod._GRACE_S = float(grace_s)
command = [sys.executable, "-c", program] if program else ["sleep", "600"]
os.environ["POD_TEST"] = str(os.getpid())
hosts = Hosts((0,), tuple(range(1, 1 + int(rollouts))))
again = {"again": "again", "workdir": pathlib.Path(workdir)}
pod = local_pod.LocalPod(command, hosts, replace_rollouts=replace == "True", environment=os.environ, **again)
sys.exit(pod.run())
"""
# Processes whose index is in `first` end first. The others wait until the launcher has read the exit codes of the first
# ones, whose ids exist until then.
_TURNS = """
def turns(folder, first):
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    if index in first:
        return (folder / str(os.getpid())).touch()
    while len(ended := os.listdir(folder)) < len(first) or any(os.path.exists('/proc/' + one) for one in ended):
        time.sleep(0.02)
"""
_PREAMBLE = "import os, pathlib, signal, sys, time\nindex = int(os.environ['PODRL_PROCESS_INDEX'])\n"


def _start(
    program: str, *, replace_rollouts: bool = False, grace_s: float = 20.0, rollouts: int = 2, workdir: object = "w"
) -> subprocess.Popen:
    """Starts a pod of one trainer (index 0) and `rollouts` rollout hosts that run `program`; '' only sleeps."""
    program = program and _PREAMBLE + program
    command = [sys.executable, "-c", _POD, program, str(replace_rollouts), str(grace_s), str(rollouts), str(workdir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _end(pod: subprocess.Popen) -> tuple[int, str, str]:
    """Waits for the end: (exit code, stdout, stderr)."""
    try:
        out, err = pod.communicate(timeout=PATIENCE_S)
    finally:
        pod.kill()
    return pod.returncode, out, err


def _run(program: str, **settings) -> tuple[int, str, str]:
    return _end(_start(program, **settings))


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        ("sys.exit(1)", 1, "exit code 1"),
        ("sys.exit(75)", 75, "exit code 75"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 42, "signal SIGKILL"),
        ("os.abort()", 42, "signal SIGABRT"),
    ],
)
def test_the_first_that_fails_gives_the_exit_code(first, code, words, tmp_path):
    wait = f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.05)"
    pod = _start(f"if index == 2:\n    {first}\n{wait}\nsys.exit(7)")
    assert pod.stderr is not None
    said = pod.stderr.readline()
    (tmp_path / "go").touch()
    assert _end(pod)[0] == code
    assert said == f"podrl: rollout 1 ended with {words}; the other processes must end too.\n"


@pytest.mark.parametrize("killed", [0, 2])
def test_the_command_that_resumes_is_shown_where_the_process_that_shows_it_was_killed(killed, tmp_path):
    for name in ("2", "14", "15.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    code, _, err = _run(f"if index == {killed}: os.kill(os.getpid(), signal.SIGKILL)", workdir=tmp_path)
    assert code == 42
    assert (f"Step 14 is saved in {tmp_path}. Resume with: again" in err) == (killed == 0)


def test_lines_have_a_name_and_the_chatter_of_collectives_is_left_out():
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
    code, out, _ = _run(f"for line in {said!r} if index == 1 else ():\n    print(line)")
    assert code == 0 and out.splitlines() == [f"[rollout 0] {said[1]}", f"[rollout 0] {said[5]}"]


def test_a_line_of_gloo_is_left_out_where_another_thread_writes_between_its_pieces():
    pieces = ["[Gloo] Rank ", "0", " is connected to ", "0", " peer ranks. "]
    pieces += ["Expected number of connected peer ranks is : ", "0\n"]
    mine = ["the worker is connected to 2 servers\n", "Rank 0\n", "\n"]
    torn = [line for i in (1, 4, 5) for line in (*pieces[:i], *mine, *pieces[i:])]
    assert b"".join(local_pod._without_chatter("".join(torn).encode().splitlines(keepends=True))) == b"".join(
        [line.encode() for line in mine] * 3
    )


def test_a_long_run_of_digits_takes_linear_time():
    def read(line: str) -> None:
        assert b"".join(local_pod._without_chatter([line.encode()])) == line.encode()

    check_that_time_is_linear(read, lambda size: "7" * size)


def test_a_stack_trace_of_something_else_is_shown():
    said = ["F1121 22:33:19 2077 array.cc:80] Check failed: n > 0", "*** Check failure stack trace: ***", "    @  0x7f"]
    code, out, _ = _run(f"for line in {said!r} if index == 0 else ():\n    print(line)")
    assert code == 0 and out.splitlines() == [f"[trainer 0] {line}" for line in said]


def test_lines_of_several_processes_stay_whole():
    code, out, _ = _run("for n in range(3000):\n    print(n)")
    assert code == 0
    for name in ("trainer 0", "rollout 0", "rollout 1"):
        mine = [line for line in out.splitlines() if line.startswith(f"[{name}] ")]
        assert mine == [f"[{name}] {n}" for n in range(3000)]
    assert len(out.splitlines()) == 9000


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_process_once(number, tmp_path):
    pod = _start(f"""
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    time.sleep(0.5)
    sys.exit(0)
signal.signal({int(number)}, heard)
pathlib.Path({str(tmp_path)!r}, str(index)).touch()
time.sleep(600)
""")
    until(lambda: len(list(tmp_path.iterdir())) == 3, "the start of three processes")
    pod.send_signal(number)
    code, out, err = _end(pod)
    names = ("trainer 0", "rollout 0", "rollout 1")
    assert code == 0, err
    assert sorted(out.splitlines()) == sorted(f"[{name}] heard {number.name}" for name in names)


def test_only_rollouts_that_were_killed_are_started_again_and_not_for_ever(tmp_path):
    code, _, err = _run(
        f"""
started = pathlib.Path({str(tmp_path)!r}, "started")
if index == 2:
    with started.open("a") as out:
        out.write(".")
    if len(started.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
while index == 0 and not (started.exists() and len(started.read_text()) == 3):
    time.sleep(0.02)
""",
        replace_rollouts=True,
    )
    assert code == 0 and err.count("rollout 1 ended with signal SIGKILL; it is started again.") == 2
    failing = "sys.exit(42) if index == 2 else time.sleep(600 if index == 0 else 0)"
    code, _, err = _run(failing, replace_rollouts=True, grace_s=0.3)
    assert code == 42 and err.count("it is started again") == 5
    code, _, err = _run(
        f"{_TURNS}\nturns({str(tmp_path / 'a')!r}, first=(0,))\nsys.exit(42 if index == 2 else 0)",
        replace_rollouts=True,
    )
    assert code == 0 and "rollout 1 ended with exit code 42 after the job had ended." in err
    code, _, err = _run("sys.exit(1 if index == 2 else 0)", replace_rollouts=True)
    assert code == 1 and "started again" not in err
    code, _, err = _run(
        f"{_TURNS}\nturns({str(tmp_path / 'b')!r}, first=(2,))\nsys.exit(75 * (index == 2))", replace_rollouts=True
    )
    assert code == 0 and "rollout 1 ended with exit code 75, as it was asked to." in err
    pod = _start(
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2 * (index == 0)), sys.exit(75 if index else 0)))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.1)",
        replace_rollouts=True,
        grace_s=0.3,
    )
    assert pod.stdout is not None and all("ready" in pod.stdout.readline() for _ in range(3))
    pod.send_signal(signal.SIGTERM)
    code, _, err = _end(pod)
    assert code == 0 and err.count("as it was asked to") == 2 and "killed" not in err, (
        "the leader may take longer than grace_s, because it saves"
    )
    code, _, err = _run(f"{_TURNS}\nturns({str(tmp_path / 'c')!r}, first=(1, 2))\nsys.exit(75)", replace_rollouts=True)
    assert code == 75 and err.count("as it was asked to") == 2 and "started again" not in err


def test_a_job_that_hosts_may_join_goes_on_without_any_of_its_own(monkeypatch, tmp_path):
    """Without PODRL_SECRET no other host can join, so the pod ends when its only rollout host is lost for good. With
    it, the trainer goes on."""
    # The rollout host is started once, and five times again.
    gone = "turns({folder!r}, [1] * 6)\nsys.exit(42 if index else 0)"
    program = _TURNS + gone.format(folder=str(tmp_path / "alone"))
    code, _, err = _run(program, replace_rollouts=True, grace_s=0.3, rollouts=1)
    assert code == 42 and "the other processes must end too" in err
    monkeypatch.setenv("PODRL_SECRET", "of this test")
    program = _TURNS + gone.format(folder=str(tmp_path / "open"))
    code, _, err = _run(program, replace_rollouts=True, grace_s=0.3, rollouts=1)
    assert code == 0 and err.count("it is started again") == 5
    assert "rollout 0 ended with exit code 42; the others go on." in err


def test_a_process_that_does_not_end_when_another_failed_is_killed(tmp_path):
    program = f"""
pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
while len(os.listdir({str(tmp_path)!r})) < 3:
    time.sleep(0.05)
if index == 0:
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    code, _, err = _run(program, grace_s=0.3)
    assert code == 3 and "rollout 0, rollout 1 did not end: killed." in err
    pids = [int(file.name) for file in pathlib.Path(tmp_path).iterdir()]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"],
)
def test_all_end_with_it_also_while_it_is_still_starting_them(number, code):
    pod = _start("", rollouts=2000)
    while len(started := _children(pod.pid)) < 20:
        assert pod.poll() is None
        time.sleep(0.01)
    pod.send_signal(number)
    assert _end(pod)[0] == code
    assert len(started) < 1500, "the signal came too late: most processes had been started"
    left = set(started) | set(_sessions_of(pod.pid))
    until(lambda: not any(map(is_running, left)), "the end of all processes")


def test_a_process_that_a_signal_meets_before_it_is_ready_counts_as_stopped_by_it(tmp_path):
    pod = _start(f"pathlib.Path({str(tmp_path)!r}, str(index)).touch()\ntime.sleep(600)")
    while len(list(tmp_path.iterdir())) < 3:
        assert pod.poll() is None
        time.sleep(0.05)
    pod.send_signal(signal.SIGTERM)
    code, _, err = _end(pod)
    assert code == 75, err


def test_more_processes_than_the_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(local_pod, "free_memory", lambda: 3 << 30)
    local_pod.check_memory(8)
    with pytest.raises(ValueError, match=r"=9 would need 3\.1 GiB .* 3\.0 GiB are free: start at most 8\."):
        local_pod.check_memory(9)
    monkeypatch.setattr(local_pod, "free_memory", lambda: None)
    local_pod.check_memory(1000)


def _children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _sessions_of(marker: int) -> list[int]:
    """Finds sleeping processes of a pod by their environment, even after they have lost their parent."""
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            text = (directory / "environ").read_bytes()
        except OSError:
            continue
        if f"POD_TEST={marker}".encode() in text:
            found.append(int(directory.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
