"""A run by the wall clock that is killed loses no prompt and trains none twice; podrl.replay repeats it bitwise."""

import json
import subprocess
import sys

import pytest
from processes import DEADLINE_S, environment, job, run, trained_steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
S = 2
WALL = ("--config.rollout.clock=wall", f"--config.grpo.max_staleness={S}", "--config.eval.problems=0")


def test_killed_resumed_and_repeated(tmp_path):
    workdir = tmp_path / "run"
    for step in (1, 5):
        with job(workdir, *WALL) as started:
            started.wait_for_step(step)  # that of step 2 is on disk before step 4 is saved
            started.kill()
        assert "checkpoint could not be written" not in started.stderr
    done = run(workdir, *WALL)
    assert "Resumed after step" in done.stdout and "podrl.replay repeats all of it bitwise" in done.stdout
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]
    assert not any("rollout/stale_tokens" in record or "rollout/faulty_tokens" in record for record in done.records())
    lines = [json.loads(line) for line in (workdir / "batches.jsonl").read_text().splitlines()]
    batches = {line["step"]: line["groups"] for line in lines if "groups" in line}
    assert sorted(group["index"] for groups in batches.values() for group in groups) == [*range(24)]
    for step, groups in batches.items():
        versions = {version for group in groups for runs in group["runs"] for version, _ in runs}
        assert step - S <= min(versions) and max(versions) <= step
    command = [sys.executable, "-m", "podrl.replay", str(workdir), "--step=6", "--start=0"]
    more = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "check": False}
    replayed = subprocess.run(command, timeout=DEADLINE_S, **more)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "Step 6 again, from the beginning" in replayed.stdout
    assert "metrics and checksums of the weights are equal" in replayed.stdout
