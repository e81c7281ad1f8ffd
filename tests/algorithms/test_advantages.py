"""Advantage estimators on numbers worked by hand, and properties that hold for all of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl import testing
from podrl.algorithms import advantages
from podrl.algorithms.estimator import KINDS, AdvantageEstimator, GAESettings, GroupSettings
from podrl.algorithms.gae import discounted_return, gae, masked_whiten, outcome_reward
from podrl.types import BatchError

REWARD_B = np.array([1.0, 0.0, 0.5, 0.5, 3.0, 1.0, 1.0, 1.0])  # two prompts, four samples each
MASK_BT = np.tril(np.ones((8, 8)))  # row b has b + 1 sampled tokens
OUTCOME = [kind for kind in KINDS if kind not in ("gae", "remax")]


def of(reward_B, size):
    """Returns the group index of samples in groups of one size, group after group."""
    return np.arange(len(reward_B)) // size


def estimate(kind, reward_B, mask_BT=MASK_BT, group_size=4, **fields):
    estimator = AdvantageEstimator(GroupSettings(advantage_estimator=kind, **fields))
    reward_BT = outcome_reward(reward_B, mask_BT)
    return estimator(reward_BT, np.zeros_like(reward_B), mask_BT, group_B=of(reward_BT, group_size))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Group 1: mean 0.5, squares 0.25, 0.25, 0, 0. Group 2: mean 1.5, squares 2.25, 0.25 x 3.
        ({"scale": "none"}, [0.5, -0.5, 0, 0, 1.5, -0.5, -0.5, -0.5]),
        ({"ddof": 1, "eps": 1e-9}, [0.5 * 6**0.5, -0.5 * 6**0.5, 0, 0, 1.5, -0.5, -0.5, -0.5]),
        ({"ddof": 0, "eps": 1e-9}, [2**0.5, -(2**0.5), 0, 0, 3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ({"ddof": 1, "eps": 1.0}, [0.5 / (1 + 6**-0.5), -0.5 / (1 + 6**-0.5), 0, 0, 0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_group_relative_by_hand(fields, expected):
    np.testing.assert_allclose(
        advantages.group_relative(REWARD_B, group_B=of(REWARD_B, 4), **fields), expected, atol=1e-8
    )


def test_maxrl_by_hand():
    reward_B = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])  # success rates 1/4 and 3/4
    found_B = advantages.maxrl(reward_B.astype(np.float32), group_B=of(reward_B, 4))
    np.testing.assert_allclose(found_B, [3, -1, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3], rtol=1e-6)
    assert np.all(advantages.maxrl(np.zeros(4), group_B=np.zeros(4)) == 0)
    assert np.all(advantages.maxrl(np.ones(4), group_B=np.zeros(4)) == 0)
    with pytest.raises(BatchError, match=r"a reward is -0\.5: rewards must be 0 or more"):
        advantages.maxrl(np.array([1.0, -0.5]), group_B=np.zeros(2))


def test_rewards_scaled_by_the_batch():
    reward_B = np.array([1.0, 0.0, 4.0, 2.0])
    found_B = advantages.group_relative(reward_B, group_B=of(reward_B, 2), scale="batch", eps=1e-4)
    np.testing.assert_allclose(found_B, np.array([0.5, -0.5, 1.0, -1.0]) / (reward_B.std(ddof=1) + 1e-4))
    for name in ("rloo", "pass_at_k"):
        with pytest.raises(
            ValueError, match=r"advantage_scale='batch' is for GroupSettings\.advantage_estimator='grpo'"
        ):
            GroupSettings(advantage_estimator=name, advantage_scale="batch")


def test_the_others_by_hand():
    loo = advantages.leave_one_out(REWARD_B, group_B=of(REWARD_B, 4))
    np.testing.assert_allclose(loo, [2 / 3, -2 / 3, 0, 0, 2, -2 / 3, -2 / 3, -2 / 3])
    # Rewards 3, 0, 0: the first sample's two neighbours are equal, so nothing is divided; the neighbours of each zero
    # are 3 and 0, with deviation 3 / sqrt(2).
    scaled = advantages.leave_one_out(np.array([3.0, 0, 0]), group_B=np.zeros(3, int), scale="std", eps=0.0)
    np.testing.assert_allclose(scaled, [3, -1.5 / (3 / 2**0.5), -1.5 / (3 / 2**0.5)])
    pair = advantages.leave_one_out(np.array([3.0, 1.0]), group_B=np.zeros(2, int), scale="std")
    np.testing.assert_allclose(pair, [2, -2])  # one other sample has no deviation, so nothing is divided
    length_B = np.array([1, 1, 1, 1, 3, 1, 1, 1])
    opo = advantages.opo(REWARD_B, length_B, group_B=of(REWARD_B, 4))  # second group's baseline: (3 x 3 + 3) / 6 = 2
    np.testing.assert_allclose(opo, [0.5, -0.5, 0, 0, 1, -1, -1, -1])
    reward_B = np.array([1.0, 0.0, 2.0, 2.0])  # equal rewards leave out the second group: factor 4 / 2
    np.testing.assert_allclose(advantages.gpg(reward_B, group_B=of(reward_B, 2)), [1.0, -1.0, 0, 0])
    best = advantages.pass_at_k(
        np.array([1.0, 0.0, 3.0, 7.0]), group_B=of(np.array([1.0, 0.0, 3.0, 7.0]), 4), scale="none"
    )
    np.testing.assert_allclose(best, [0, 0, 0, 4.0])
    np.testing.assert_allclose(
        advantages.pass_at_k(np.array([5.0, 1.0, 5.0]), group_B=of(np.array([5.0, 1.0, 5.0]), 3)), [0, 0, 0]
    )
    np.testing.assert_allclose(advantages.remax(np.array([1.0, 0.25]), np.array([0.5, 0.5])), [0.5, -0.25])


def test_reinforce_plus_plus_weighs_tokens_not_samples():
    mask_BT = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    advantage_BT = estimate("reinforce_plus_plus", np.array([1.0, 5.0]), mask_BT, group_size=1)
    # Four tokens 1, 1, 1, 5: mean 2, sample variance 4.
    np.testing.assert_allclose(advantage_BT, [[-0.5, -0.5, -0.5], [1.5, 0, 0]], atol=1e-7)


def test_discount_counts_sampled_tokens_only():
    mask_BT = np.array([[1.0, 0.0, 1.0, 1.0, 0.0]])
    reward_BT = outcome_reward(np.array([8.0]), mask_BT)
    np.testing.assert_array_equal(reward_BT, [[0, 0, 0, 8, 0]])
    np.testing.assert_array_equal(discounted_return(reward_BT, mask_BT, gamma=0.5), [[2, 0, 4, 8, 0]])


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("kind", OUTCOME)
def test_equal_rewards_teach_nothing(kind, xp):
    # 0.1 has no exact mean in binary: without care a rounding error would be divided by the small eps.
    reward_B = xp.asarray(np.full(8, 0.1, np.float32))
    advantage_BT = estimate(kind, reward_B, xp.asarray(MASK_BT.astype(np.float32)))
    assert np.all(np.asarray(advantage_BT) == 0.0)


@pytest.mark.parametrize("kind", [kind for kind in OUTCOME if kind != "pass_at_k"])
def test_singleton_groups(kind):
    if kind == "reinforce_plus_plus":
        return  # this estimator uses no groups
    zero_BT = estimate(kind, REWARD_B, group_size=1)
    assert np.all(zero_BT == 0.0)
    raw_BT = estimate(kind, REWARD_B, group_size=1, singleton="raw")
    assert np.any(raw_BT != 0.0)
    if kind in ("grpo", "rloo", "opo"):
        np.testing.assert_allclose(raw_BT[:, 0], REWARD_B, rtol=2e-6)


@pytest.mark.parametrize("kind", OUTCOME)
def test_every_estimator_passes_the_checks_for_those_of_users(kind):
    testing.check_advantage(kind)


@settings(max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=8, max_size=8), st.floats(-50, 50))
def test_group_relative_is_centred_and_shift_invariant(rewards, shift):
    reward_B = np.array(rewards)
    advantage_B = advantages.group_relative(reward_B, group_B=of(reward_B, 4), eps=1e-3)
    np.testing.assert_allclose(advantage_B.reshape(2, 4).sum(axis=1), 0.0, atol=1e-8)
    shifted_B = advantages.group_relative(reward_B + shift, group_B=of(reward_B + shift, 4), eps=1e-3)
    np.testing.assert_allclose(advantage_B, shifted_B, atol=1e-6)


def test_half_a_point_stays_half_a_point():
    advantage_B = advantages.group_relative(
        np.array([0.5, 0.0], np.float32), group_B=of(np.array([0.5, 0.0], np.float32), 2), scale="none"
    )
    np.testing.assert_array_equal(advantage_B, np.array([0.25, -0.25], np.float32))
    whole = advantages.group_relative(np.array([1, 0, 0, 0]), group_B=of(np.array([1, 0, 0, 0]), 4), scale="none")
    np.testing.assert_array_equal(whole, np.array([0.75, -0.25, -0.25, -0.25], np.float32))
    assert whole.dtype == np.float32


def test_gae_by_hand_over_tool_tokens():
    # Two sampled tokens with a tool token between them: gamma 1, lambda 0.5. delta_2 = 1 - 0.6 = 0.4; delta_0 = 0 + 0.6
    # - 0.2 = 0.4; A_0 = 0.4 + 0.5 * 0.4 = 0.6.
    mask_BT = np.array([[1.0, 0.0, 1.0, 0.0]])
    reward_BT = np.array([[0.0, np.nan, 1.0, np.nan]])
    value_BT = np.array([[0.2, np.nan, 0.6, np.nan]])
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=1.0, lam=0.5)
    np.testing.assert_allclose(advantage_BT, [[0.6, 0, 0.4, 0]], rtol=1e-12)
    np.testing.assert_allclose(return_BT, [[0.8, 0, 1.0, 0]], rtol=1e-12)


def test_gae_with_lambda_one_is_return_less_value():
    rng = np.random.default_rng(0)
    reward_BT, value_BT = rng.normal(size=(2, 8, 8))
    advantage_BT, return_BT = gae(reward_BT, value_BT, MASK_BT, gamma=0.9, lam=1.0)
    expected_BT = discounted_return(reward_BT, MASK_BT, gamma=0.9)
    np.testing.assert_allclose(return_BT, expected_BT, atol=1e-12)
    np.testing.assert_allclose(advantage_BT, (expected_BT - value_BT) * (MASK_BT > 0), atol=1e-12)


def test_whitening():
    x_BT = np.array([[1.0, 2.0, np.nan], [6.0, np.inf, -1.0]])
    mask_BT = np.array([[1, 1, 0], [1, 0, 1]])
    white_BT = masked_whiten(x_BT, mask_BT)
    counted = white_BT[mask_BT > 0]
    np.testing.assert_allclose([counted.mean(), counted.std(ddof=1)], [0.0, 1.0], atol=1e-7)
    assert np.all(white_BT[mask_BT == 0] == 0)
    kept_BT = masked_whiten(x_BT, mask_BT, shift_mean=False)
    np.testing.assert_allclose(kept_BT[mask_BT > 0], counted + 2.0, atol=1e-7)
    assert masked_whiten(np.array([[5.0]]), np.array([[1]])) == 0.0
    assert np.all(masked_whiten(np.zeros((1, 2)), np.zeros((1, 2))) == 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: advantages.group_relative(REWARD_B[:5], group_B=of(REWARD_B, 2)),
            "5 rewards do not fit .* of 8 samples",
        ),
        (lambda: advantages.pass_at_k(REWARD_B, group_B=of(REWARD_B, 1)), "one has 1: raise grpo.num_generations"),
        (lambda: advantages.group_relative(REWARD_B, group_B=of(REWARD_B, 4), scale="var"), "advantage_scale='var'"),
        (lambda: advantages.group_relative(REWARD_B, group_B=of(REWARD_B, 4), ddof=2), "advantage_ddof=2"),
        (lambda: advantages.group_relative(REWARD_B, group_B=of(REWARD_B, 1), singleton="no"), "singleton='no'"),
        (lambda: GroupSettings(advantage_estimator="grpo2"), "GroupSettings.advantage_estimator='grpo2' .* rloo"),
        (lambda: GAESettings(gamma=1.5), "GAESettings.gamma=1.5"),
        (lambda: GAESettings(gae_lambda=-1.0), "gae_lambda=-1.0"),
        (lambda: GroupSettings(advantage_eps=0.0), "advantage_eps=0.0"),
    ],
)
def test_errors_name_the_key(call, message):
    with pytest.raises(ValueError, match=message):
        call()
