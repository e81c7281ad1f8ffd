"""A signal that arrives while Python discards exceptions still ends the process."""

import subprocess
import sys

LOST = """
import os, signal
from podrl.rundir.run import Run
from podrl.runtime import signals

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass  # the handler runs here, and what it raises is discarded

signals.leave_on_signals(unwind=True)
with Run(None) as run:
    Finalized()
    print("went on")
    run.begin()
    print("began")
"""


def test_a_stop_that_a_finalizer_swallowed_is_raised_when_training_begins():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "went on\n", done.stdout + done.stderr
    assert "Exception ignored in" in done.stderr and done.stderr.strip().splitlines()[-1].startswith(
        "podrl.runtime.signals.StoppedError: SIGTERM before there was anything new to save"
    )
    assert done.returncode != 0
