"""Whole runs of SFT and DPO are killed, resumed, exported and made by pods; KTO and reward models train in pods too."""

import math
import os
import signal
import subprocess
import sys

import pytest
from processes import comparable, environment, job, run, same_end
from test_pods import process

from podrl.storage.storage import complete_steps

pytestmark = pytest.mark.e2e
SMALL = (
    *("--config.trainer.max_steps=6", "--config.checkpoint.every=2", "--config.eval.problems=16"),
    *("--config.eval.samples=1", "--config.log.to=()"),
)
PODS = {"dpo": ("--local_processes=4", "--topology=split"), "sft": ("--local_processes=4",)}


def base(name):
    return (f"--config={name}_tiny.py", *SMALL, f"--config.{name}.batch_size=8")


# Tests with this mark run only if this code changes. Otherwise tests/e2e/test_pods.py suffices: a pod distributes the
# data's answers as it distributes samples.
OF_ANSWERS = pytest.mark.nightly("podrl/learner/answers")


@pytest.fixture(scope="module", params=["dpo", pytest.param("sft", marks=OF_ANSWERS)])
def whole(request, tmp_path_factory):
    """Runs each algorithm undisturbed in one process; returns (algorithm, run)."""
    return request.param, run(tmp_path_factory.mktemp(request.param) / "run", base=base(request.param))


def test_a_killed_run_ends_as_one_that_never_was(whole, tmp_path):
    name, undisturbed = whole
    with job(tmp_path / "run", base=base(name)) as started:
        started.wait_for_step(3)
        started.wait_for("a checkpoint", lambda: complete_steps(started.workdir / "checkpoints"))  # a thread writes it
        started.kill()
    resumed = run(tmp_path / "run", base=base(name))
    assert "Resumed after step" in resumed.stdout
    same_end(resumed.workdir, undisturbed.workdir)
    losses = [record[f"{name}/loss"] for record in undisturbed.records() if f"{name}/loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0]
    command = [sys.executable, "-m", "podrl.export", f"--workdir={undisturbed.workdir}", f"--out={tmp_path / 'model'}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and (tmp_path / "model" / "model.safetensors").exists(), done.stderr


@OF_ANSWERS
def test_a_pod_that_is_killed_and_resumed_learns_as_one_process_does(whole, tmp_path):
    """Two trainer hosts train on the same answers; two rollout hosts get the weights for evaluations.

    Other tests assert that a killed pod, and a killed process that trains on the data's answers, end bitwise as
    undisturbed ones.
    """
    name, alone = whole
    with job(tmp_path / "run", *PODS[name], base=base(name)) as running:
        running.wait_for_step(3)
        os.kill(process(running.process.pid, 1), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    pod = run(tmp_path / "run", *PODS[name], base=base(name))
    assert "Resumed after step" in pod.stdout
    ours, theirs = pod.records(), alone.records()
    kept, kept_alone = comparable(pod.workdir), comparable(alone.workdir)  # without waits and compile times
    assert [record.keys() for record in kept] == [record.keys() for record in kept_alone]
    steps = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if f"{name}/loss" in mine]
    assert len(steps) == 6
    for mine, other in steps:
        for key in (f"{name}/loss", "tokens/learned", "tokens/all"):
            assert math.isclose(mine[key], other[key], rel_tol=1e-5), (mine["step"], key, mine[key], other[key])


def scores_samples(workdir, folder):
    """Exports the reward model of a run, and lets it score the samples of a GRPO step."""
    command = [sys.executable, "-m", "podrl.export", f"--workdir={workdir}", f"--out={folder / 'scores'}"]
    subprocess.run(command, env=environment(), capture_output=True, timeout=300, check=True)
    more = (f"--config.reward.model={folder / 'scores'}", "--config.trainer.max_steps=1", "--config.eval.problems=0")
    (record,) = run(folder / "grpo" / "run", *more).records()
    assert record["reward/reward_model"] != 0.0


@OF_ANSWERS
@pytest.mark.parametrize("name", ["kto", "reward_model"])
def test_a_pod_of_two_learns_what_one_process_does(name, tmp_path):
    """The pod has one trainer host and one rollout host; tests/learner/ resumes whole runs."""
    base = (f"--config={name}_tiny.py", *SMALL, f"--config.{name}.batch_size=8", "--config.trainer.max_steps=3")
    alone, pod = (
        run(tmp_path / place / "run", *pods, base=(*base, "--config.eval.problems=0"))
        for place, pods in (("alone", ()), ("pod", ("--local_processes=2", "--topology=split")))
    )
    ours, theirs = pod.records(), alone.records()
    kept, kept_alone = comparable(pod.workdir), comparable(alone.workdir)  # without a pod's waits for hosts
    assert [record.keys() for record in kept] == [record.keys() for record in kept_alone] and len(ours) == 3
    if name == "reward_model":
        scores_samples(pod.workdir, tmp_path)
    for mine, other in zip(ours, theirs, strict=True):
        for key in (f"{name}/loss", f"{name}/accuracy", "actor/grad_norm"):
            assert math.isclose(mine[key], other[key], rel_tol=1e-4, abs_tol=1e-5), (mine["step"], key)
