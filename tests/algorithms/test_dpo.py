"""DPO by hand, and its weights against the derivative of its loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.dpo import dpo


def test_by_hand():
    # beta 0.5; rewards of the first pair 0.5 and -0.5, so m = 1; the policy equals the reference on the second pair: m
    # = 0.
    found = dpo(jnp.array([[-3.0, -5.0], [-2.0, -9.0]]), jnp.array([[-4.0, -4.0], [-2.0, -9.0]]), beta=0.5)
    np.testing.assert_allclose(found.margin_P, [1.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(found.loss_P, [math.log(1 + math.exp(-1)), math.log(2)], rtol=1e-6)
    slope = 0.5 / (1 + math.e)
    np.testing.assert_allclose(found.weight_P2, [[slope, -slope], [0.25, -0.25]], rtol=1e-6)


def test_smoothed_labels_by_hand():
    found = dpo(jnp.array([[-3.0, -5.0]]), jnp.array([[-4.0, -4.0]]), beta=0.5, label_smoothing=0.1)
    expected = 0.9 * math.log(1 + math.exp(-1)) + 0.1 * math.log(1 + math.e)
    np.testing.assert_allclose(found.loss_P, [expected], rtol=1e-6)
    # The loss has its minimum where sigmoid(m) is the share of right labels: the weight is 0 there.
    least = math.log(0.9 / 0.1)
    still = dpo(jnp.array([[2 * least, 0.0]]), jnp.zeros((1, 2)), beta=0.5, label_smoothing=0.1)
    np.testing.assert_allclose(still.weight_P2, [[0.0, 0.0]], atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_are_minus_the_gradient(smoothing):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        logprob_P2, ref_P2 = (jnp.asarray(-rng.uniform(5, 30, (6, 2))) for _ in range(2))

        def loss(x_P2):
            return dpo(x_P2, ref_P2, beta=0.3, label_smoothing=smoothing).loss_P.sum()

        weight_P2 = dpo(logprob_P2, ref_P2, beta=0.3, label_smoothing=smoothing).weight_P2
        np.testing.assert_allclose(weight_P2, -jax.grad(loss)(logprob_P2), rtol=1e-12)
        step = 1e-6 * jnp.zeros((6, 2)).at[2, 1].set(1.0)
        slope = (loss(logprob_P2 + step) - loss(logprob_P2 - step)) / 2e-6
        assert float(-slope) == pytest.approx(float(weight_P2[2, 1]), rel=1e-6)


def test_extremes_are_finite_in_float32():
    found = dpo(jnp.array([[-1e4, 0.0], [0.0, -1e4]], jnp.float32), jnp.zeros((2, 2), jnp.float32), beta=10.0)
    assert all(bool(jnp.isfinite(x).all()) for x in found)
    np.testing.assert_allclose(found.weight_P2, [[10.0, -10.0], [0.0, 0.0]])
