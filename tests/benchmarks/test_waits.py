"""The waits that a run directory records, compared with the simulation of its lengths, worked by hand."""

import io
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks import __main__ as bench
from podrl.job.config import complete
from podrl.rundir import identity, trace

LENGTH, SAMPLES = 100, 4
HEADER = {"format": trace.FORMAT, "reward_names": ["r"], "fields": {}, "pieces": {"1": "a"}}
HEADER |= {"prompts": ["p", "q"], "completions": ["a"] * SAMPLES, "episodes": [{}] * SAMPLES}


def _write(run, steps, *, staleness=2, decode_steps=60, prefill_calls=2, **values):
    """Writes a run whose samples of 100 tokens get 40 of them in the window before the last if staleness is 2.

    A prefill call takes 0.1 s, a decode step 0.01 s, the rest of a window 0.05 s; an update 2 s, a weight move 0.2 s.
    """
    folder = run / trace.FOLDER
    folder.mkdir(parents=True)
    given = {"algorithm": "grpo", "grpo": {"max_staleness": staleness}, "rollout": {"lanes": 8}}
    config = ConfigDict(complete(given | {"roles": {"rollout": {"mesh": values.pop("mesh", "data=2")}}})).to_dict()
    config["rollout"] |= {"steps_per_dispatch": 8, "max_tokens_to_generate": 1024, "kv_cache_size": 2048}
    identity.write(run, config)
    took = {"time/decode": 0.01 * decode_steps, "time/prefill": 0.1 * prefill_calls, "perf/decode_steps": decode_steps}
    took |= {"time/rollout": sum(took[f"time/{part}"] for part in ("decode", "prefill")) + 0.05}
    took |= {
        "perf/prefill_calls": prefill_calls,
        "perf/dispatches": 8,
        "time/planning": 0.08,
        "time/reward": 0.1,
        "time/update": 2.0,
        "time/publish": 0.2,
    }
    took |= {"time/step": 2.25, "perf/waits_samples": 0.01, "perf/waits_rollout": 0.4} | values
    lines = []
    for step in range(1, steps + 1):
        text = json.dumps(HEADER | {"step": step}).encode()
        ones = np.ones(SAMPLES * LENGTH, np.float32)
        arrays = {"sample.length": np.full(SAMPLES, LENGTH), "sample.prompt_length": np.full(SAMPLES, 50)}
        arrays["sample.group"] = np.arange(SAMPLES) // 2
        arrays |= {"token.mask": ones.astype(np.uint8), "token.tokens": ones.astype(np.int32)}
        np.savez(packed := io.BytesIO(), header=np.frombuffer(text, np.uint8), **arrays)
        (folder / trace.file_name(step)).write_bytes(packed.getvalue())
        lines.append(json.dumps({"step": step, **took}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(run)


def _waits(capsys, *argv):
    assert bench.main(["benchmarks", "waits", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_model_is_put_beside_what_a_run_measured(tmp_path, capsys):
    found = _waits(capsys, _write(tmp_path / "run", 20))
    # A window has 60 tokens of the batch that is due, and 40 of the next batch beside it. Its prefill holds the prompts
    # of both batches at once, and the 40 tokens of each of the 4 samples that go on.
    assert found["steps"] == 12 and found["model_decode_steps"] == 60 and found["model_prefill_calls"] == 2
    milliseconds = [found[f"{name}_ms"] for name in ("decode_step", "prefill_call", "window", "plan")]
    assert milliseconds == pytest.approx([10.0, 100.0, 50.0, 10.0])
    assert (found["step_s"], found["trainer_idle"], found["rollout_idle"]) == pytest.approx((2.25, 0.01, 0.4))
    assert (found["model_step_s"], found["model_trainer_idle"]) == pytest.approx((2.2, 0.0))
    assert found["model_rollout_idle"] == pytest.approx(1 - (0.6 + 0.2 + 0.05 + 0.1 + 0.2) / 2.2)


def test_speeds_of_another_staleness_give_the_same_prediction(tmp_path, capsys):
    # At S=1 a window has 100 decode steps and a single prefill call: 1.15 s. At S=2 it has 0.85 s.
    one = _write(tmp_path / "one", 20, staleness=1, decode_steps=100, prefill_calls=1)
    two = _write(tmp_path / "two", 20)
    own, other = _waits(capsys, two), _waits(capsys, two, f"--speeds={one}")
    assert other == pytest.approx(own)
    own, other = _waits(capsys, one), _waits(capsys, one, f"--speeds={two}")
    assert other == pytest.approx(own) and own["model_rollout_idle"] == pytest.approx(1 - (1.15 + 0.1 + 0.2) / 2.2)


def test_runs_that_do_not_tell_are_refused(tmp_path, capsys):
    _write(tmp_path / "short", 9)
    assert bench.main(["benchmarks", "waits", str(tmp_path / "short")]) == 1
    assert "has 9 steps, 9 of them traced: 16 are needed" in capsys.readouterr().err
    assert bench.main(["benchmarks", "waits", str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err
    assert bench.main(["benchmarks", "waits", _write(tmp_path / "auto", 20, mesh="auto")]) == 1
    assert "roles.rollout.mesh='auto', which leaves its size to the devices" in capsys.readouterr().err
    assert bench.main(["benchmarks", "waits", _write(tmp_path / "wall", 20, **{"time/prefill": 0.0})]) == 1
    assert "has no time/prefill: give a run with rollout.clock='tokens'" in capsys.readouterr().err
