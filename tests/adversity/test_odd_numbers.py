"""NaN and infinite numbers, and sampling filters, in whole runs."""

import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
from processes import TWO_DEVICES, run

import podrl

pytestmark = pytest.mark.e2e
TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"
SHORT = ("--config.trainer.max_steps=2", "--config.eval.problems=0", TWO_DEVICES)


def test_filters_leave_ratios_at_1_and_say_what_they_kept(tmp_path):
    sampling = ("--config.rollout.top_k=50", "--config.rollout.top_p=0.9", "--config.rollout.min_p=0.02")
    corrected = ("--config.grpo.sampler_correction=tis", "--config.grpo.old_logprob=trainer")
    records = run(tmp_path / "run", *SHORT, *sampling, *corrected).records()
    assert len(records) == 2
    for record in records:
        assert 0.0 < record["rollout/kept_mass"] < 0.999
        assert record["sampler/abs_diff"] < 1e-5
        assert record["sampler/weight"] == pytest.approx(1.0, abs=1e-5) == record["actor/ratio"]


def test_logits_that_overflow_end_the_run_and_name_the_weights(tmp_path):
    """Every weight is within the range of float32, but the matrix product overflows."""
    model = pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))
    tensors = dict(safetensors.numpy.load_file(model / "model.safetensors"))
    name = "model.layers.0.mlp.down_proj.weight"
    large = np.asarray(tensors[name], np.float32)
    tensors[name] = large / np.abs(large).max() * np.float32(3e38)
    safetensors.numpy.save_file(tensors, model / "model.safetensors")
    failed = run(tmp_path / "run", *SHORT, f"--config.model.path={model}", code=1)
    assert "samples ended as failed, because the model's logits were NaN or infinite" in failed.stderr
    assert "weights of version 0" in failed.stderr and "float32 or bfloat16" in failed.stderr
    assert "Traceback" not in failed.stderr and failed.records() == []
