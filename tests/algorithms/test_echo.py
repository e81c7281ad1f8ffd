"""The cross-entropy of observed tokens, by hand and against torch, added to a policy loss that has another divisor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.echo import ObservedRows, observed, with_observations
from podrl.algorithms.policy_loss import LossSettings, PolicyLoss
from podrl.testing import policy_rows


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def test_what_was_observed():
    mask_BT = np.array([[0, 0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    # The second sample ends with a tool's answer, as if it left no room for a turn; the third has no sampled token.
    found_BT = observed(mask_BT, np.array([7, 5, 6]), np.zeros(mask_BT.shape, np.int16))
    np.testing.assert_array_equal(found_BT.nonzero(), ([0, 0, 1, 1], [4, 5, 3, 4]))


# One row: the prompt, two sampled tokens, two observed tokens, one sampled token, padding.
LOGPROB_BT = np.array([[np.nan, -1.0, -2.0, -3.0, -0.5, -1.5, np.nan]])
MASK_BT = np.array([[0.0, 1, 1, 0, 0, 1, 0]])
WEIGHT_BT = np.array([[0.0, 0, 0, 0.1, 0.1, 0, 0]])


def rows_of(mode):
    """Lays out the row with advantage 2; the policy loss is -A logprob, with the scale of aggregation `mode`."""
    loss = PolicyLoss(LossSettings(policy_loss_fn="reinforce", loss_agg_mode=mode))
    mask_BT = jnp.asarray(MASK_BT)
    where = (jnp.array([[1, 1, 1, 1, 1, 1, 0]]), mask_BT, jnp.where(mask_BT > 0, 3.0, 1.0))
    policy = policy_rows(*where, advantage=jnp.full((1, 7), 2.0), old_logprob=jnp.asarray(LOGPROB_BT))
    return loss, ObservedRows(policy, jnp.asarray(WEIGHT_BT), loss.divisor(MASK_BT) / 2)


@pytest.mark.parametrize(("mode", "own"), [("token-mean", 2 * 4.5 / 3), ("sequence-mean-token-sum", 2 * 4.5)])
def test_each_part_has_a_denominator_of_its_own(mode, own):
    loss, rows = rows_of(mode)
    found, metrics = with_observations(loss)(jnp.asarray(LOGPROB_BT), jnp.zeros((1, 7)), rows)
    assert float(found.mean()) == pytest.approx(own + 0.1 * (3.0 + 0.5) / 2, rel=1e-12)
    assert float(metrics["echo/nll"].mean()) == pytest.approx(1.75, rel=1e-12)
    # A second micro-batch without observations adds nothing but its own part of the policy loss.
    bare = ObservedRows(rows.policy, jnp.zeros((1, 7)), rows.scale)
    other, _ = with_observations(loss)(jnp.asarray(LOGPROB_BT), jnp.zeros((1, 7)), bare)
    alone, _ = loss(jnp.asarray(LOGPROB_BT), jnp.zeros((1, 7)), rows.policy)
    np.testing.assert_allclose([other.total, other.count], [alone.total, alone.count])


def test_the_gradient_is_that_of_torch():
    loss, rows = rows_of("token-mean")

    def value(logprob_BT):
        return with_observations(loss)(logprob_BT, jnp.zeros((1, 7)), rows)[0].mean()

    slope_BT = jax.grad(value)(jnp.asarray(LOGPROB_BT))
    torch = pytest.importorskip("torch")
    x_T = torch.tensor(np.nan_to_num(LOGPROB_BT[0]), requires_grad=True)
    sampled_T, seen_T = torch.tensor(MASK_BT[0]), torch.tensor(WEIGHT_BT[0])
    (-(2.0 * x_T * sampled_T).sum() / 3 - (seen_T * x_T).sum() / 2).backward()
    np.testing.assert_allclose(slope_BT[0], x_T.grad, rtol=1e-12)


def test_the_prompt_of_a_later_piece_is_no_observation():
    """The pieces have 3, 4 and 2 tokens. A token that was not sampled counts as observed only behind the first sampled
    token of its own piece."""
    mask_BT = np.array([[0, 1, 0, 0, 0, 1, 0, 0, 0, 0]])
    piece_BT = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(observed(mask_BT, np.array([9]), piece_BT), [[0, 0, 1, 0, 0, 0, 1, 0, 0, 0]])
