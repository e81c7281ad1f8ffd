"""Jobs that learn from given answers, as whole runs: killed, resumed, and exported."""

import subprocess
import sys

import pytest
from processes import environment, job, run, same_end

pytestmark = pytest.mark.e2e
SMALL = (
    *("--config.trainer.max_steps=6", "--config.checkpoint.every=2", "--config.eval.problems=16"),
    *("--config.eval.samples=1", "--config.log.tensorboard=False"),
)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_a_killed_run_ends_as_one_that_never_was(name, tmp_path):
    base = (f"--config={name}_tiny.py", *SMALL, "--config.model.path=tiny", f"--config.{name}.batch_size=8")
    whole = run(tmp_path / "whole" / "run", base=base)
    with job(tmp_path / "killed" / "run", base=base) as started:
        started.wait_for_step(3)
        started.kill()
    resumed = run(tmp_path / "killed" / "run", base=base)
    assert "Resumed after step" in resumed.stdout
    same_end(resumed.workdir, whole.workdir)
    if name == "dpo":
        losses = [record["dpo/loss"] for record in whole.records() if "dpo/loss" in record]
        assert len(losses) == 6 and losses[-1] < losses[0]
    command = [sys.executable, "-m", "podrl.export", f"--workdir={whole.workdir}", f"--out={tmp_path / 'model'}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and (tmp_path / "model" / "model.safetensors").exists(), done.stderr
