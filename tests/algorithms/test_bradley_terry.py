"""Bradley-Terry by hand, and its weights against the derivative of its loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from podrl.algorithms.bradley_terry import ScoredRows, bradley_terry, weighted_score
from podrl.types import Layout


def test_by_hand():
    found = bradley_terry(jnp.array([[2.0, 1.0], [0.5, 0.5], [-1.0, 1.0]]))
    np.testing.assert_allclose(found.margin_P, [1.0, 0.0, -2.0])
    np.testing.assert_allclose(
        found.loss_P, [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(2))], rtol=1e-6
    )
    slopes = [1 / (1 + math.e), 0.5, 1 / (1 + math.exp(-2))]
    np.testing.assert_allclose(found.weight_P2, [[s, -s] for s in slopes], rtol=1e-6)


def test_the_weighted_scores_have_the_gradient_of_the_loss():
    """Two pairs lie in two packed rows; the scores of other tokens do not matter."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        score_BT = jnp.asarray(rng.normal(size=(2, 6)))
        places = np.array([[0, 2], [1, 0], [0, 5], [1, 4]])  # chosen, rejected, chosen, rejected

        def loss(score_BT):
            return bradley_terry(score_BT[places[:, 0], places[:, 1]].reshape(2, 2)).loss_P.mean()

        weight_4 = bradley_terry(score_BT[places[:, 0], places[:, 1]].reshape(2, 2)).weight_P2.ravel()
        mask_BT, weight_BT = np.zeros((2, 6)), np.zeros((2, 6))
        mask_BT[places[:, 0], places[:, 1]], weight_BT[places[:, 0], places[:, 1]] = 1.0, 2.0 * weight_4
        empty_BT = jnp.zeros((2, 6), jnp.int32)
        rows = ScoredRows(Layout(empty_BT, empty_BT, empty_BT), jnp.asarray(mask_BT), jnp.asarray(weight_BT))
        slope_BT = jax.grad(lambda x_BT: weighted_score(x_BT, rows)[0].mean())(score_BT)
        np.testing.assert_allclose(slope_BT, jax.grad(loss)(score_BT), rtol=1e-12)
        mean = weighted_score(score_BT, rows)[1]["reward_model/score"].mean()
        assert float(mean) == float(score_BT[places[:, 0], places[:, 1]].mean())
