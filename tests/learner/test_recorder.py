"""The recorder's metrics."""

import jax.numpy as jnp
import pytest

from podrl.learner.grpo import gathered
from podrl.learner.recorder import fetched_means


def test_metrics_of_updates_stay_on_the_device_until_they_are_fetched():
    """Averaging them there started a program per metric behind a running update, which hung pods on CPU."""
    collected = [{"loss": jnp.float32(n), "lr": jnp.float32(1e-3)} for n in range(3)]
    together = gathered(collected)
    assert all(value is metrics["loss"] for value, metrics in zip(together["loss"], collected, strict=True))
    means = fetched_means(together | {"alone": jnp.float32(7), "host": 0.5})
    assert means == {"loss": 1.0, "lr": pytest.approx(1e-3), "alone": 7.0, "host": 0.5}
