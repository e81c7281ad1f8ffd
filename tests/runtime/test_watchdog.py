"""A stage that does not end is named, its stacks are printed, and the process exits 42."""

import subprocess
import sys
import time

from podrl.runtime.watchdog import EXIT_INFRASTRUCTURE, Watchdog

_HANG = """
import time
from podrl.runtime.watchdog import Watchdog
def waiting_for_godot():
    time.sleep(60)
with Watchdog(0.2).stage("rollout"):
    waiting_for_godot()
"""


def test_a_hang_ends_with_its_name_its_stack_and_code_42():
    done = subprocess.run([sys.executable, "-c", _HANG], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == EXIT_INFRASTRUCTURE
    assert "stage 'rollout'" in done.stderr and "waiting_for_godot" in done.stderr
    assert "log.stall_s=0.2" in done.stderr


def test_time_is_kept_by_stage(capfd):
    watchdog = Watchdog(100.0)
    for _ in range(2):
        with watchdog.stage("a"):
            time.sleep(0.01)
    spent = watchdog.take_spent()
    watchdog.close()
    assert spent["a"] >= 0.02 and watchdog.take_spent() == {}
    assert capfd.readouterr().err == ""
