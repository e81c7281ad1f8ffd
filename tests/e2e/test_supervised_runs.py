"""SFT and DPO as whole runs: killed, resumed, exported, and as pods."""

import math
import os
import signal
import subprocess
import sys

import pytest
from processes import environment, job, run, same_end
from test_pods import process

pytestmark = pytest.mark.e2e
SMALL = (
    *("--config.trainer.max_steps=6", "--config.checkpoint.every=2", "--config.eval.problems=16"),
    *("--config.eval.samples=1", "--config.log.tensorboard=False"),
)
PODS = {"dpo": ("--local_processes=4", "--topology=split"), "sft": ("--local_processes=4",)}


def base(name):
    return (f"--config={name}_tiny.py", *SMALL, f"--config.{name}.batch_size=8")


@pytest.fixture(scope="module", params=["dpo", "sft"])
def whole(request, tmp_path_factory):
    """Runs each algorithm undisturbed in one process: (algorithm, run)."""
    return request.param, run(tmp_path_factory.mktemp(request.param) / "run", base=base(request.param))


def test_a_killed_run_ends_as_one_that_never_was(whole, tmp_path):
    name, undisturbed = whole
    with job(tmp_path / "run", base=base(name)) as started:
        started.wait_for_step(3)
        started.kill()
    resumed = run(tmp_path / "run", base=base(name))
    assert "Resumed after step" in resumed.stdout
    same_end(resumed.workdir, undisturbed.workdir)
    losses = [record[f"{name}/loss"] for record in undisturbed.records() if f"{name}/loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0]
    command = [sys.executable, "-m", "podrl.export", f"--workdir={undisturbed.workdir}", f"--out={tmp_path / 'model'}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and (tmp_path / "model" / "model.safetensors").exists(), done.stderr


def test_a_pod_learns_as_one_process_does_and_resumes_after_a_kill(whole, tmp_path):
    """Two trainer hosts take the same answers; two rollout hosts get the weights for evaluations."""
    name, alone = whole
    pod = run(tmp_path / "pod" / "run", *PODS[name], base=base(name))
    ours, theirs = pod.records(), alone.records()
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    steps = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if f"{name}/loss" in mine]
    assert len(steps) == 6
    for mine, other in steps:
        for key in (f"{name}/loss", "tokens/learned", "tokens/all"):
            assert math.isclose(mine[key], other[key], rel_tol=1e-5), (mine["step"], key, mine[key], other[key])
    with job(tmp_path / "killed" / "run", *PODS[name], base=base(name)) as running:
        running.wait_for_step(3)
        os.kill(process(running.process.pid, 1), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    resumed = run(tmp_path / "killed" / "run", *PODS[name], base=base(name))
    assert "Resumed after step" in resumed.stdout
    same_end(resumed.workdir, pod.workdir)
