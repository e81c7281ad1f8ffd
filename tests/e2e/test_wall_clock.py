"""With `rollout.clock='wall'`, runs train on each prompt once and on no token that is too old: a pod with adapters, a
replica of two hosts, ReMax."""

import os
import signal

import pytest
from processes import TWO_DEVICES, job, run, wall_clock_kept
from test_pods import process

pytestmark = pytest.mark.e2e

S = 2
# There are fewer lanes than samples: weights change while some samples of a group are made.
_SLOW = ("--config.rollout.clock=wall", "--config.rollout.lanes=4", "--config.rollout.max_tokens_to_generate=40")
_POD = ("--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0", "--fake_devices=2")


def test_a_pod_with_adapters_that_loses_a_host_keeps_what_is_promised(tmp_path):
    workdir = tmp_path / "run"
    flags = (*_POD, *_SLOW, f"--config.grpo.max_staleness={S}", "--config.model.lora.rank=4")
    with job(workdir, *flags, "--config.trainer.learning_rate=2e-3") as running:
        running.wait_for_step(2)
        os.kill(process(running.process.pid, 2), signal.SIGKILL)
        running.wait_for("the host that takes its place", lambda: "came back at" in running.stderr)
        running.finish()
    records = [record for record in running.records() if "time/step" in record]
    assert sum(record["pod/taken_over"] for record in records) >= 1
    assert any(record["rollout/mixed_samples"] > 0 for record in records)
    wall_clock_kept(workdir, *_POD, prompts=4, staleness=S)


@pytest.mark.nightly("podrl/cluster/replica.py", "podrl/rollout/group_player.py", "podrl/learner/pods")
def test_two_hosts_that_hold_a_copy_of_the_weights_keep_what_is_promised(tmp_path):
    """The replica's first host decides when samples pause, and the second host makes the same calls of the engine."""
    replica = ("--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0", "--fake_devices=1")
    replica += ("--config.roles.trainer.mesh=data=1", "--config.roles.rollout.mesh=tensor=2")
    finished = run(tmp_path / "run", *replica, *_SLOW, f"--config.grpo.max_staleness={S}", "--config.eval.problems=0")
    assert any(record.get("rollout/mixed_samples", 0) > 0 for record in finished.records())
    wall_clock_kept(tmp_path / "run", *replica, prompts=4, staleness=S)


@pytest.mark.nightly("podrl/learner/generation.py", "podrl/rollout/batches.py")
def test_remax_with_dynamic_sampling_keeps_what_is_promised(tmp_path):
    remax = ("--config.algorithm=remax", f"--config.grpo.max_staleness={S}", "--config.eval.problems=0")
    remax += ("--config.grpo.dynamic_sampling=True",)
    finished = run(tmp_path / "run", TWO_DEVICES, *_SLOW, *remax)
    assert any(record.get("rollout/mixed_samples", 0) > 0 for record in finished.records())
    wall_clock_kept(tmp_path / "run", TWO_DEVICES, prompts=4, staleness=S)
