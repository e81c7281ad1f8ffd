"""The metrics perf/* on times worked by hand: the shares of the time add up to 1, also across restarts."""

import json

import pytest

from podrl.mesh.chips import peak_flops
from podrl.rundir.gauges import Gauges, StepWork, first_start, read_plan

WORK = StepWork(devices=4, peak=1e9, parameters=100, trainable=10, passes=2)
STEP = {
    "time/step": 10.0,
    "time/rollout": 5.0,
    "time/reward": 1.0,
    "time/waiting": 6.0,
    "time/update": 3.0,
    "time/publish": 0.5,
    "time/data": 0.2,
    "time/other": 0.3,
    "tokens/all": 800.0,
    "tokens/prompt": 50.0,
    "tokens/completion": 600.0,
}
LOST = ("start", "compile", "checkpoint", "evaluation", "restart")


def gauges(now, *, first=0.0, earlier=(), plan=None):
    return Gauges(WORK, plan=plan or {}, earlier=earlier, first_start=first, now=lambda: now)


def test_rates_and_waits_by_hand():
    found = gauges(10.0).of_step(STEP, 3 * 2**30)
    operations = (4 * 100 + 2 * 10) * 2 * 800 + 2 * 100 * 650
    assert found["perf/mfu"] == pytest.approx(operations / (10 * 4 * 1e9))
    assert found["perf/tokens_per_s_per_device"] == pytest.approx(15.0)
    assert found["perf/memory_peak"] == 3.0
    assert found["perf/waits_samples"] == pytest.approx(0.6) and found["perf/waits_rollout"] == pytest.approx(0.4)
    assert found["perf/waits_weights"] == pytest.approx(0.05) and found["perf/waits_host"] == pytest.approx(0.05)
    assert found["perf/goodput"] == 1.0 and not any(found[f"perf/lost_{kind}"] for kind in LOST)
    assert not [name for name in found if name.startswith("perf/plan")]


def test_what_the_platform_does_not_tell_is_not_said():
    found = Gauges(StepWork(4, 0.0, 100, 10), plan={}, earlier=(), first_start=0.0, now=lambda: 1.0).of_step(STEP, None)
    assert not {"perf/mfu", "perf/memory_peak"} & set(found)
    given = gauges(1.0).of_step({"time/step": 2.0, "tokens/all": 80.0}, None)
    assert given["perf/tokens_per_s_per_device"] == 10.0 and "perf/waits_samples" not in given


def test_time_is_lost_by_kind_and_over_restarts():
    earlier = [
        {"step": 0, "time/evaluation": 5.0, "time/start-up": 4.0, "eval/records": 8.0, "eval/greedy_reward": None},
        {"step": 1, **STEP, "perf/compile": 6.0},
        {"step": 2, **STEP, "time/checkpoint": 2.0},
    ]
    now = {**STEP, "time/start-up": 3.0, "time/restoring": 1.0, "perf/compile": 50.0}
    found = gauges(1100.0, first=1000.0, earlier=earlier).of_step(now, None)
    expected = {"start": 0.08, "compile": 0.16, "checkpoint": 0.02, "evaluation": 0.05, "restart": 0.57}
    assert found["perf/goodput"] == pytest.approx(0.12)
    assert {kind: found[f"perf/lost_{kind}"] for kind in LOST} == pytest.approx(expected)


def test_what_comes_before_an_evaluation_is_no_restart():
    """Time of the first evaluation's record counts as start, not as restart: it includes the first publish, during
    which pods compile."""
    first = {"time/start-up": 4.0, "time/publish": 28.0, "time/evaluation": 8.0}
    later = {"time/publish": 1.0, "time/checkpoint": 2.0, "time/evaluation": 7.0}
    found = gauges(0.0, first=0.0, earlier=[first, STEP, later]).of_step(STEP, None, at=100.0)
    expected = {"start": 0.32, "compile": 0.0, "checkpoint": 0.02, "evaluation": 0.15, "restart": 0.3}
    assert found["perf/goodput"] == pytest.approx(0.21)
    assert {kind: found[f"perf/lost_{kind}"] for kind in LOST} == pytest.approx(expected)


def test_the_first_start_is_kept(tmp_path):
    assert first_start(None, 7.0, 0) == 7.0
    assert first_start(tmp_path, 100.0, 0) == 100.0
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write(
            '{"time": 1\n[]\n{"time": "soon"}\n{"time": 1, "step": Infinity}\n'
        )  # a torn line, and lines that podrl does not write, are skipped
    assert first_start(tmp_path, 300.0, 12) == 100.0 == first_start(tmp_path, 500.0, 14)
    assert json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1]) == {"time": 500.0, "step": 14}


def test_measured_is_put_over_planned(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"step": {"trainer_s": 1.5, "rollout_s": 2.0, "move_s": 0.0, "step_s": 4.0}}))
    found = gauges(1.0, plan=read_plan(path)).of_step(STEP, None)
    planned = {name: value for name, value in found.items() if name.startswith("perf/plan")}
    assert planned == {"perf/plan_step": 2.5, "perf/plan_rollout": 2.5, "perf/plan_update": 2.0}
    assert read_plan("") == {}
    for content in ("{}", "[]", "nothing", '{"step": {"trainer_s": null}}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"log.plan=.*is not a plan.*podrl.plan --config"):
            read_plan(path)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_plan(tmp_path / "other.json")


def test_devices_are_known_by_what_jax_calls_them():
    kinds = ("TPU v5 lite", "TPU v5p", "TPU v6 lite", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu")
    assert [peak_flops(kind) for kind in kinds] == [197e12, 459e12, 918e12, 989e12, 989e12, 0.0]
