"""A key/value pool too large for the machine is refused by arithmetic, before any of it is allocated."""

import jax
import pytest

from podrl.engine import sizes
from podrl.engine.config import RolloutConfig
from podrl.mesh.build import make_mesh


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(sizes, "free_memory", lambda: 3 << 30)
    config, mesh = RolloutConfig(lanes=10**6), make_mesh("data=2", jax.devices()[:2])
    shape = sizes.engine_shape(config, 2)
    sizes.check_memory(3 << 30, mesh, config, shape)
    with pytest.raises(
        ValueError,
        match=r"rollout\.lanes=1000000 needs 4\.0 GiB, but only 3\.0 GiB are free on this machine.*pool_tokens",
    ):
        sizes.check_memory(4 << 30, mesh, config, shape)
    monkeypatch.setattr(sizes, "free_memory", lambda: None)  # a system that does not report its memory
    sizes.check_memory(4 << 30, mesh, config, shape)
