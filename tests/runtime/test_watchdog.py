"""A stage that hangs is named, its stacks are printed, and the process exits 42."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

from waits import PATIENCE_S, until

from podrl.runtime import watchdog as watchdog_module
from podrl.runtime.local_pod import free_ports
from podrl.runtime.watchdog import EXIT_INFRASTRUCTURE, Watchdog, announce_if_long

_HANG = """
import time
from podrl.runtime.watchdog import Watchdog
def waiting_for_godot():
    time.sleep(60)
with Watchdog(0.2).stage("rollout"):
    waiting_for_godot()
"""


def _said(code: str, *, check: bool) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=check)


def test_a_hang_ends_with_its_name_its_stack_and_code_42():
    done = subprocess.run(
        [sys.executable, "-c", _HANG], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == EXIT_INFRASTRUCTURE
    assert "stage 'rollout'" in done.stderr and "waiting_for_godot" in done.stderr
    assert "log.stall_s=0.2" in done.stderr


_WAIT = """
import time, types
from podrl.runtime import watchdog as module
ages = iter([0.0, 0.1, 0.5, 1.7])  # at the start of the stage, and whenever the watchdog looks
module.time = types.SimpleNamespace(monotonic=lambda: next(ages))
watchdog = module.Watchdog(0.4)
watchdog.wait_sources += [lambda: "header/7 of rollout 1 (host 2), for 9 s", lambda: ""]
watchdog.last_words = lambda: "Step 4 is saved in runs/x. Resume with: COMMAND"
with watchdog.stage("rollout"):
    time.sleep(60)
"""


def test_a_wait_is_said_early_with_whom_it_is_for_and_at_the_end_what_resumes():
    done = subprocess.run(
        [sys.executable, "-c", _WAIT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == EXIT_INFRASTRUCTURE
    early, late, *_, last = done.stderr.splitlines()
    assert re.fullmatch(r"podrl: .*so far \(it waits for header/7 of rollout 1 \(host 2\), for 9 s\)\.", early), early
    assert "header/7 of rollout 1" in late and "log.stall_s=0.4" in late
    assert last.endswith("giving up. Step 4 is saved in runs/x. Resume with: COMMAND")


_SIGNAL = """
import os, signal
from podrl.runtime.watchdog import Watchdog
def asked():
    os.kill(os.getpid(), signal.SIGUSR1)
Watchdog(100.0)
asked()
print("alive")
"""


def test_a_stage_that_takes_long_says_what_it_does_again_and_again():
    watchdog, said = Watchdog(900.0), []
    try:
        watchdog.announce_long(("start-up", 100.0), 110.0)  # without `log` nothing is printed
        watchdog.log, watchdog.expected = said.append, {"start-up": 24.6}
        for name, started, now in (
            ("start-up", 100.0, 102.9),
            ("start-up", 100.0, 104.0),
            ("start-up", 100.0, 109.0),
            ("update", 0.0, 5.0),
            ("trying", 0.0, 4.0),
            ("update", 6.0, 16.0),  # the second update is known already
            ("trying", 5.0, 9.0),
            *(("start-up", 100.0, 100.0 + age) for age in range(10, 200)),
        ):
            watchdog.announce_long((name, started), now)
    finally:
        watchdog.close()
    assert said[:3] == [
        "start-up: loading the models, and preparing their programs (4 s so far, 25 s the last time) ...",
        "update: updating the weights; the first time prepares programs (5 s so far) ...",
        "trying: at work (4 s so far) ...",
    ]
    assert said.pop(3) == said[2]
    assert [re.search(r"\((\d+) s so far, 25 s the last time", line)[1] for line in said[3:]] == [
        *("11", "31", "61", "121", "181")
    ]


def test_what_comes_before_the_first_stage_is_told_again_and_again():
    for end_s, lines in ((2.0, 0), (3.0, 1), (59.0, 3), (200.0, 6)):
        said = []
        watchdog_module.announce("Checking", said.append, lambda age, end_s=end_s: age > end_s)
        assert said == [f"Checking ({age} s so far) ..." for age in (3, 10, 30, 60, 120, 180)][:lines]


def test_what_comes_before_the_first_stage_is_told_while_it_lasts(monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(watchdog_module, "_TOLD_AT_S", (0.01, 3600.0))
    with announce_if_long("Checking", lambda text: told.set()):
        assert told.wait(PATIENCE_S)
    monkeypatch.setattr(watchdog_module, "_TOLD_AT_S", (3600.0,))
    before = threading.active_count()
    with announce_if_long("Checking", lambda text: told.clear()):
        pass
    until(lambda: threading.active_count() <= before)
    assert told.is_set()


def test_a_script_of_the_library_survives_the_signal_and_prints_its_stacks():
    done = subprocess.run(
        [sys.executable, "-c", _SIGNAL], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "alive\n" and "in asked" in done.stderr


def test_time_is_kept_by_stage(capfd):
    watchdog, started = Watchdog(100.0), time.monotonic()
    for _ in range(2):
        with watchdog.stage("a"):
            time.sleep(0.01)
    with watchdog.stage("b"), watchdog.stage("c"):
        time.sleep(0.01)
    spent = watchdog.take_spent()
    watchdog.close()
    assert spent["a"] >= 0.02 and spent["c"] >= 0.01 and spent["b"] >= 0
    assert sum(spent.values()) <= time.monotonic() - started  # the time of stage c does not count in stage b, too
    assert watchdog.take_spent() == {}
    assert capfd.readouterr().err == ""


_ALONE = {
    "PODRL_PLATFORM": "local",
    "PODRL_PROCESS_INDEX": "0",
    "PODRL_PROCESS_COUNT": "2",
    "PODRL_COORDINATOR": "127.0.0.1:1",
    "PODRL_SECRET": "s",
}


def test_the_signal_prints_stacks_and_ends_nothing_while_hosts_are_missing(tmp_path):
    place = {**_ALONE, "PODRL_CHANNEL": f"127.0.0.1:{free_ports(1)[0]}"}
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_gemma.py", f"--workdir={tmp_path}", "--join_s=600"]
    with (tmp_path / "stderr").open("w") as stderr:
        waiting = subprocess.Popen(command, env=os.environ | place, stderr=stderr)
    try:

        def stacks_are_there():
            assert waiting.poll() is None
            status = pathlib.Path(f"/proc/{waiting.pid}/status").read_text()
            caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
            if caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                waiting.send_signal(signal.SIGUSR1)
            return "_host_roster" in (tmp_path / "stderr").read_text()

        until(stacks_are_there, every_s=0.1)
    finally:
        waiting.kill()
        waiting.wait()
