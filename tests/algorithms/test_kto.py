"""KTO by hand, and its weights against the derivative of its loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.kto import kto


def by_the_paper(own, unrelated, desirable, beta, good, bad):
    """Computes eq. 8 of arXiv 2402.01306 in float64, one answer at a time: lambda_y - v(x, y)."""
    z = max(0.0, sum(unrelated) / len(unrelated))
    losses = []
    for r, is_good in zip(own, desirable, strict=True):
        gap = beta * (r - z) if is_good else beta * (z - r)
        worth = good if is_good else bad
        losses.append(worth - worth / (1 + math.exp(-gap)))
    return losses, z


def test_by_hand():
    # z = 1, beta 0.5: a good answer at r = 3 has v = 2 sigmoid(1), a bad one at r = 1 lies on the reference point.
    found = kto(jnp.array([3.0, 1.0]), jnp.array([-1.0, 3.0]), jnp.array([True, False]), beta=0.5, desirable_weight=2.0)
    assert float(found.kl) == 1.0
    np.testing.assert_allclose(found.loss_B, [2 - 2 / (1 + math.exp(-1)), 0.5], rtol=1e-6)
    slope = 2 * 0.5 * math.exp(-1) / (1 + math.exp(-1)) ** 2
    np.testing.assert_allclose(found.weight_B, [slope, -0.5 / 4], rtol=1e-6)
    # The reference point is a divergence: an estimate below 0 counts as 0.
    below = kto(jnp.array([0.0]), jnp.array([-4.0]), jnp.array([True]), beta=0.5)
    assert float(below.kl) == 0.0 and float(below.loss_B[0]) == 0.5


@pytest.mark.parametrize(("good", "bad"), [(1.0, 1.0), (1.5, 0.75)])
def test_the_loss_is_the_papers_and_the_weights_are_minus_its_gradient(good, bad):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        own_B, unrelated_B, good_B = rng.normal(0, 8, 12), rng.normal(2, 5, 12), np.arange(12) % 3 > 0
        settings = {"beta": 0.3, "desirable_weight": good, "undesirable_weight": bad}
        found = kto(jnp.asarray(own_B), jnp.asarray(unrelated_B), jnp.asarray(good_B), **settings)
        expected, z = by_the_paper(own_B, unrelated_B, good_B, 0.3, good, bad)
        np.testing.assert_allclose(found.loss_B, expected, rtol=1e-12)
        assert float(found.kl) == pytest.approx(z, rel=1e-12)
        for b in (0, 5):
            up, down = (
                by_the_paper(own_B + way * 1e-6 * (np.arange(12) == b), unrelated_B, good_B, 0.3, good, bad)[0][b]
                for way in (1, -1)
            )
            assert float(found.weight_B[b]) == pytest.approx(-(up - down) / 2e-6, rel=1e-6)


def test_extremes_are_finite_in_float32():
    found = kto(jnp.array([-1e4, 1e4]), jnp.zeros(2), jnp.array([True, False]), beta=10.0)
    np.testing.assert_allclose(found.loss_B, [1.0, 1.0])
    np.testing.assert_allclose(found.weight_B, [0.0, 0.0])
