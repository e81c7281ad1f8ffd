"""The recorder's metrics, and the moment at which it records an evaluation."""

import contextlib
import types
from typing import Any

import jax.numpy as jnp
import pytest

from podrl.learner.grpo import gathered
from podrl.learner.loop import Schedule
from podrl.learner.recorder import Recorder, _in_table, fetched_means
from podrl.rundir.spans import Spans
from podrl.types import BatchError, Policy


def test_metrics_of_updates_stay_on_the_device_until_they_are_fetched():
    """Averaging metrics on the device would queue one program per metric behind a running update. This has hung pods on
    CPU."""
    collected = [{"loss": jnp.float32(n), "lr": jnp.float32(1e-3)} for n in range(3)]
    together = gathered(collected)
    assert all(value is metrics["loss"] for value, metrics in zip(together["loss"], collected, strict=True))
    means = fetched_means(together | {"alone": jnp.float32(7), "host": 0.5})
    assert means == {"loss": 1.0, "lr": pytest.approx(1e-3), "alone": 7.0, "host": 0.5}


def test_a_host_that_enters_during_an_evaluation_takes_part_in_it():
    """A host that joins skips the steps that are recorded as evaluated. If a step was recorded before its evaluation
    ended, the other hosts would wait for ever for the new host's share."""
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext(), take_spent=dict)
    run = types.SimpleNamespace(config={}, watchdog=watchdog, spans=Spans("trainer 1"))
    sent, noted = [], []
    run.spans.send = sent.append
    nothing = types.SimpleNamespace()
    recorder = Recorder(
        *(nothing, nothing, run, Schedule(max_steps=4)),  # pyright: ignore[reportArgumentType]
        report=nothing,  # pyright: ignore[reportArgumentType]
        controllers=nothing,  # pyright: ignore[reportArgumentType]
        evaluate=lambda policy, step: noted.append(set(recorder._evaluated)),
        stopping=lambda: False,
    )
    recorder.evaluate(Policy({}, 0), 0)
    recorder.evaluate(Policy({}, 0), 0)
    run.spans.add("evaluation", 1.0, 2.0)
    assert sent == []
    recorder.evaluate(Policy({}, 4), 4)
    assert [[span["name"] for span in spans] for spans in sent] == [["evaluation"]], (
        "the span of the last evaluation is sent at once, because no step follows"
    )
    assert noted == [set(), {0}] and recorder._evaluated == {0, 4}


def test_a_step_is_trained_when_an_evaluation_beside_it_fails():
    """The step counts as trained although the evaluation failed: a checkpoint has the step's weights under the step's
    number, so a resumed run does not train on the step's batch again."""

    def fails(*, wait: bool) -> None:
        raise BatchError("the judge is away")

    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext(), take_spent=dict)
    run: Any = types.SimpleNamespace(config={}, watchdog=watchdog, spans=Spans(), tracing=None, metrics=None)
    run.leads, run.profiler, run.log_config = False, types.SimpleNamespace(after=lambda step: None), None
    nothing: Any = types.SimpleNamespace()
    recorder = Recorder(
        *(nothing, nothing, run, Schedule(max_steps=8)),
        report=nothing,
        controllers=nothing,
        evaluate=None,
        beside=types.SimpleNamespace(evaluated=fails),  # pyright: ignore[reportArgumentType]
        stopping=lambda: False,
    )
    with pytest.raises(BatchError, match="the judge is away"):
        recorder.record(5, types.SimpleNamespace(data_state=b"5"), {})
    assert recorder._trained == (5, b"5") and recorder._late is not None and recorder._late[0] == 5


@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_last_evaluation_is_told_once_in_the_table(step):
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext(), take_spent=dict)
    run: Any = types.SimpleNamespace(
        config={}, watchdog=watchdog, spans=Spans(), metrics=None, workdir="runs/x", times=None
    )
    run.console, run.push = types.SimpleNamespace(print=(said := []).append), lambda wait: None
    nothing: Any = types.SimpleNamespace()
    evaluation = {"eval/greedy_answer": 0.25, "eval/greedy_format": 0.5, "eval/greedy_reward": 1.5, "eval/records": 8.0}
    evaluation |= {"eval/greedy_reward/short": 1.5, "eval/error/greedy_reward": 0.1, "eval/hard/sampled_reward": 2.0}
    cluster: Any = types.SimpleNamespace(metrics=types.SimpleNamespace(log=lambda step, metrics: None))
    recorder = Recorder(
        *(cluster, nothing, run, Schedule(max_steps=4)),
        report=nothing,
        controllers=nothing,
        evaluate=lambda policy, step: (evaluation, []),
        stopping=lambda: False,
    )
    recorder.evaluate(Policy({}, step), step)
    told = "greedy_answer 25.0%  greedy_reward 1.500  hard/sampled_reward 2.000"
    assert said == ([] if step == 4 else [f"Evaluation after step {step} (8 records): {told}"])


def test_the_table_has_every_reward_function_whatever_its_name():
    shown = ["reward/mean", "reward/answer", "reward/std_length", "reward/klaxon", "reward/zero_shot"]
    assert all(map(_in_table, shown))
    assert not any(map(_in_table, ["reward/std", "reward/kl", "reward/kl_coef", "reward/zero/answer"]))


def test_a_run_that_more_passes_a_step_make_too_long_is_told_in_updates():
    """max_steps counts updates, so the message must compare it with the run's 22 updates, not with its 11 steps."""
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext())
    checkpoints = types.SimpleNamespace(restore_latest=lambda *_: types.SimpleNamespace(step=11, host={}))
    run = types.SimpleNamespace(config={}, watchdog=watchdog, checkpoints=checkpoints, place="runs/x")
    nothing = types.SimpleNamespace()
    actor = types.SimpleNamespace(abstract_state=lambda: None)
    cluster = types.SimpleNamespace(actor=actor, critic=None, tokenizer=types.SimpleNamespace(pad_id=0))
    recorder = Recorder(
        *(cluster, nothing, run, Schedule(max_steps=6, updates_per_step=2)),  # pyright: ignore[reportArgumentType]
        report=nothing,  # pyright: ignore[reportArgumentType]
        controllers=nothing,  # pyright: ignore[reportArgumentType]
        evaluate=None,
        stopping=lambda: False,
    )
    with pytest.raises(
        ValueError,
        match=r"holds 11 steps of 2 updates, 22 updates, more than trainer\.max_steps=12: set trainer\.max_steps to",
    ):
        recorder.restore()
