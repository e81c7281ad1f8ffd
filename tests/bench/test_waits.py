"""What a run's directory says of waits beside the model of lengths, worked by hand."""

import io
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.bench import __main__ as bench
from podrl.job.config import complete
from podrl.rundir import identity, trace

LENGTH, QUANTUM, SAMPLES = 100, 40, 4
HEADER = {"format": trace.FORMAT, "group_size": 2, "reward_names": ["r"], "fields": {}, "pieces": {"1": "a"}}
HEADER |= {"prompts": ["p", "q"], "completions": ["a"] * SAMPLES, "episodes": [{}] * SAMPLES}


def _write(run, steps):
    """A run with a staleness of 2, whose samples of 100 tokens draw 40 of them two versions before their step's."""
    folder = run / trace.FOLDER
    folder.mkdir(parents=True)
    values = ConfigDict(
        complete({"algorithm": "grpo", "grpo": {"max_staleness": 2}, "rollout": {"lanes": 8}})
    ).to_dict()
    values["rollout"] |= {"steps_per_dispatch": 8, "max_tokens_to_generate": 1024, "kv_cache_size": 2048}
    identity.write(run, values)
    lines = []
    for step in range(1, steps + 1):
        text = json.dumps(HEADER | {"step": step}).encode()
        version_T = np.where(np.arange(LENGTH) < QUANTUM, max(step - 3, 0), max(step - 2, 0))
        ones = np.ones(SAMPLES * LENGTH, np.float32)
        arrays = {"sample.length": np.full(SAMPLES, LENGTH), "token.version": np.tile(version_T, SAMPLES)}
        arrays |= {"token.mask": ones.astype(np.uint8), "token.tokens": ones.astype(np.int32)}
        np.savez(packed := io.BytesIO(), header=np.frombuffer(text, np.uint8), **arrays)
        (folder / trace.file_name(step)).write_bytes(packed.getvalue())
        took = {"time/rollout": 0.72, "time/reward": 0.1, "time/update": 1.0, "time/publish": 0.2, "time/step": 1.25}
        lines.append(json.dumps({"step": step, **took, "perf/waits_samples": 0.01, "perf/waits_rollout": 0.4}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_model_is_put_beside_what_a_run_measured(tmp_path, capsys):
    _write(tmp_path / "run", 20)
    assert bench.main(["podrl.bench", "waits", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A window: 60 tokens in 8 dispatches, and one until their end is read: 72 decode steps; 40 of the next beside.
    assert found["decode_step_ms"] == pytest.approx(10.0) and found["steps"] == 12
    assert (found["step_s"], found["trainer_idle"], found["rollout_idle"]) == pytest.approx((1.25, 0.01, 0.4))
    assert (found["model_step_s"], found["model_trainer_idle"]) == pytest.approx((1.2, 0.0))
    assert found["model_rollout_idle"] == pytest.approx(1 - (0.72 + 0.1 + 0.2) / 1.2)


def test_too_few_steps_are_refused(tmp_path, capsys):
    _write(tmp_path / "run", 9)
    assert bench.main(["podrl.bench", "waits", str(tmp_path / "run")]) == 1
    assert "has 9 steps, 9 of them traced: 16 are needed" in capsys.readouterr().err
    assert bench.main(["podrl.bench", "waits", str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err
