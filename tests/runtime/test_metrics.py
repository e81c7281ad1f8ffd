"""metrics.jsonl holds each step once, whatever happened to the process that wrote it."""

import importlib.util
import json
import math

import pytest

from podrl.runtime.metrics import LogConfig, MetricsLog, read_metrics

_QUIET = LogConfig(tensorboard=False)


def _log(path, start=0):
    return MetricsLog(path, _QUIET, start=start, run_config={})


def test_every_line_is_one_valid_object(tmp_path):
    log = _log(tmp_path)
    log.write(1, {"loss": 1.5, "kl": math.nan})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.5, "kl": None}


def test_resuming_drops_later_records_and_a_torn_line(tmp_path):
    log = _log(tmp_path)
    for step in range(1, 5):
        log.write(step, {"x": step})
        log.write_samples(step, [{"text": f"é{step}"}])
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    log = _log(tmp_path, start=3)
    log.write(3, {"x": 30})
    log.close()
    assert [(r["step"], r["x"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"step": 1, "text": "é1"}, {"step": 2, "text": "é2"}]


def test_tensorboard_events_are_written(tmp_path):
    log = MetricsLog(tmp_path, LogConfig(), start=0, run_config={})
    log.write(1, {"a": 1.0})
    log.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_missing_wandb_is_named_with_its_extra(tmp_path):
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(ValueError, match=r"podrl\[wandb\]"):
        MetricsLog(tmp_path, LogConfig(tensorboard=False, wandb="offline"), start=0, run_config={})


@pytest.mark.parametrize("bad", [{"wandb": "sometimes"}, {"stall_s": 0.0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"log.{next(iter(bad))}"):
        LogConfig(**bad)
