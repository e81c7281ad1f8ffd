"""ORPO by hand, and its weights against the derivative of its loss, by jax and by torch in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.orpo import orpo


def test_by_hand():
    # Two tokens of probability 1/2 against four of 1/4: odds 1 and 1/3, so z = log 3 and sigmoid(-z) = 1/4.
    found = orpo(jnp.array([[2.0, 8.0]]) * -math.log(2), jnp.array([[2.0, 4.0]]), coef=0.4)
    np.testing.assert_allclose(found.margin_P, [math.log(3)], rtol=1e-6)
    np.testing.assert_allclose(found.loss_P, [math.log(2) + 0.4 * math.log(4 / 3)], rtol=1e-6)
    # 1 / (1 - p) is 2 and 4/3: (1 + .4 / 4 x 2) / 2 and -(.4 / 4 x 4/3) / 4.
    np.testing.assert_allclose(found.weight_P2, [[0.6, -1 / 30]], rtol=1e-6)


def test_weights_are_minus_the_gradient():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        logprob_P2, length_P2 = jnp.asarray(-rng.uniform(1, 30, (6, 2))), jnp.asarray(rng.integers(1, 20, (6, 2)) * 1.0)
        found = orpo(logprob_P2, length_P2, coef=0.3)
        slope_P2 = jax.grad(lambda x_P2: orpo(x_P2, length_P2, coef=0.3).loss_P.sum())(logprob_P2)
        np.testing.assert_allclose(found.weight_P2, -slope_P2, rtol=1e-12)
        torch = pytest.importorskip("torch")
        x_P2 = torch.tensor(np.asarray(logprob_P2), requires_grad=True)
        mean_P2 = x_P2 / torch.tensor(np.asarray(length_P2))
        odds_P2 = mean_P2.exp() / (1 - mean_P2.exp())
        z_P = (odds_P2[:, 0] / odds_P2[:, 1]).log()
        loss_P = -mean_P2[:, 0] - 0.3 * torch.sigmoid(z_P).log()
        loss_P.sum().backward()
        np.testing.assert_allclose(found.loss_P, loss_P.detach(), rtol=1e-10)
        np.testing.assert_allclose(found.weight_P2, -x_P2.grad, rtol=1e-9)


def test_extremes_are_finite_in_float32():
    logprob_P2 = jnp.array([[0.0, -1e4], [-1e4, 0.0], [0.0, 0.0], [-1e-9, -2e4]], jnp.float32)
    found = orpo(logprob_P2, jnp.full((4, 2), 3.0, jnp.float32), coef=0.1)
    assert all(bool(jnp.isfinite(x).all()) for x in found)
    # The chosen answer has probability 1, so nothing is left to learn.
    np.testing.assert_allclose(found.weight_P2[0], [1 / 3, 0.0], atol=1e-6)
