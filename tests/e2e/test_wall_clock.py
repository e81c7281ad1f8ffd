"""A run by the wall clock in a pod, with adapters, keeps what is promised."""

import os
import signal

import pytest
from processes import job, wall_clock_kept
from test_pods import process

pytestmark = pytest.mark.e2e

S = 2
# Fewer lanes than samples: weights change while some of a group are made.
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
