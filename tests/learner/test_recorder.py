"""The recorder's metrics, and when it notes an evaluation."""

import contextlib
import types

import jax.numpy as jnp
import pytest

from podrl.learner.grpo import gathered
from podrl.learner.loop import Schedule
from podrl.learner.recorder import Recorder, fetched_means
from podrl.types import Policy


def test_metrics_of_updates_stay_on_the_device_until_they_are_fetched():
    """Averaging them there started a program per metric behind a running update, which hung pods on CPU."""
    collected = [{"loss": jnp.float32(n), "lr": jnp.float32(1e-3)} for n in range(3)]
    together = gathered(collected)
    assert all(value is metrics["loss"] for value, metrics in zip(together["loss"], collected, strict=True))
    means = fetched_means(together | {"alone": jnp.float32(7), "host": 0.5})
    assert means == {"loss": 1.0, "lr": pytest.approx(1e-3), "alone": 7.0, "host": 0.5}


def test_a_host_that_enters_during_an_evaluation_takes_part_in_it():
    """A host that enters leaves out the steps noted as evaluated; the others would wait for its share for ever."""
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext(), take_spent=dict)
    run = types.SimpleNamespace(config={}, watchdog=watchdog, spans=types.SimpleNamespace(compiled=0.0))
    noted = []
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
    recorder.evaluate(Policy({}, 4), 4)
    assert noted == [set(), {0}] and recorder._evaluated == {0, 4}
