"""Sampler corrections and mismatch measures on numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.aggregate import token_mean
from podrl.algorithms.corrections import CORRECTIONS, binary_divergence, importance_weight
from podrl.algorithms.mismatch import derived, mismatch, pearson
from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.testing import policy_rows


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


# Two sequences in one row with weights (2, 0.5, 4) and (1, 0.1); the masked token holds NaN.
WEIGHT_BT = np.array([[np.nan, 2.0, 0.5, 4.0, 1.0, 0.1, 1.0]])
MASK_BT = np.array([[0.0, 1, 1, 1, 1, 1, 0]])
LENGTH_BT = np.array([[3.0, 3, 3, 3, 2, 2, 1]])
SEGMENT_BT = np.array([[1, 1, 1, 1, 2, 2, 0]])
SAMPLER_BT = np.full((1, 7), -5.0)


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", 0.0, np.inf, [1, 1, 1, 1, 1, 1, 1]),
        ("tis", 0.0, 2.0, [1, 2, 0.5, 2, 1, 0.1, 1]),
        ("sequence_tis", 0.0, 3.0, [1, 3, 3, 3, 0.1, 0.1, 1]),
        ("icepop", 0.4, 3.0, [1, 2, 0.5, 0, 1, 0, 1]),
        # Geometric means: 4^(1/3) = 1.587 and 0.1^(1/2) = 0.316.
        ("geometric_mask", 0.5, 1.6, [1, 1, 1, 1, 0, 0, 1]),
        ("geometric_mask", 0.3, 1.5, [1, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_weights_by_hand(kind, low, high, expected):
    assert kind in CORRECTIONS
    old_BT = jnp.asarray(SAMPLER_BT) + jnp.log(WEIGHT_BT)
    weight_BT = importance_weight(
        old_BT, jnp.asarray(SAMPLER_BT), MASK_BT, LENGTH_BT, SEGMENT_BT, kind, low=low, high=high
    )
    np.testing.assert_allclose(weight_BT[0], expected, rtol=1e-12)


def test_a_sequence_beyond_the_bound_is_left_out():
    """Three sequences of two tokens: products of weights 4, 2 and 0.25; a masked token follows."""
    log_w_BT = jnp.log(jnp.array([[2.0, 2.0, 4.0, 0.5, 0.5, 0.5, 7.0]]))
    mask_BT = jnp.array([[1.0, 1, 1, 1, 1, 1, 0]])
    where = (mask_BT, jnp.array([[2.0] * 6 + [1.0]]), jnp.array([[1, 1, 2, 2, 3, 3, 0]]))

    def weights(low, high):
        found_BT = importance_weight(log_w_BT, jnp.zeros_like(log_w_BT), *where, "sequence_mask", low=low, high=high)
        return found_BT[0].tolist()

    assert weights(0.0, 3.0) == pytest.approx([0, 0, 2, 2, 0.25, 0.25, 1])
    assert weights(0.5, 5.0) == pytest.approx([4, 4, 2, 2, 0, 0, 1])


def test_a_token_is_left_out_by_the_divergence_of_its_probability_not_by_its_ratio():
    """The probabilities are (.9, .6), (.6, .9), (.01, .001) and (.5, .3), the trainer's first.

    D(.9, .6) = .9 log 1.5 + .1 log .25 = .22629 and D(.6, .9) = .6 log(2/3) + .4 log 4 = .31124; D(.01, .001) = .01 log
    10 + .99 log(.99 / .999) = .01407; D(.5, .3) = .5 log(5/3) + .5 log(5/7) = .08718, D(.3, .5) = .08228.
    """
    p_BT = jnp.array([[0.9, 0.6, 0.01, 0.5, jnp.nan]])
    q_BT = jnp.array([[0.6, 0.9, 0.001, 0.3, 0.5]])
    found_BT = binary_divergence(jnp.log(p_BT), jnp.log(q_BT))
    np.testing.assert_allclose(found_BT[0, :4], [0.3112387, 0.3112387, 0.0140665, 0.0871767], atol=1e-6)
    where = (jnp.array([[1.0, 1, 1, 1, 0]]), jnp.array([[4.0] * 4 + [1]]), jnp.array([[1, 1, 1, 1, 0]]))
    for high, expected in ((0.1, [0, 0, 10, 5 / 3, 1]), (0.08, [0, 0, 10, 0, 1]), (0.4, [1.5, 2 / 3, 10, 5 / 3, 1])):
        weight_BT = importance_weight(jnp.log(p_BT), jnp.log(q_BT), *where, "kpop", low=0.0, high=high)
        np.testing.assert_allclose(weight_BT[0], expected, rtol=1e-9)
    # The first policy gives both tokens the probability 1; the second gives them 1 and exp(-200).
    sure_BT = binary_divergence(jnp.zeros((1, 2)), jnp.array([[0.0, -200.0]]))
    assert sure_BT[0, 0] == 0 and 10 < sure_BT[0, 1] < 20


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_weights_carry_no_gradient(kind):
    low, high, _ = CORRECTIONS[kind]

    def total(old_BT):
        return importance_weight(
            old_BT, jnp.asarray(SAMPLER_BT), MASK_BT, LENGTH_BT, SEGMENT_BT, kind, low=low, high=high
        ).sum()

    assert np.all(np.asarray(jax.grad(total)(jnp.asarray(SAMPLER_BT + 0.3))) == 0)


def test_mismatch_by_hand_and_adds_up():
    d_BT = jnp.array([[0.0, 0.5, -0.25, jnp.nan]])
    mask_BT = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    sampler_BT = jnp.array([[-1.0, -2.0, -0.5, 0.0]])
    found = mismatch(sampler_BT + d_BT, sampler_BT, mask_BT)
    means = {name: float(ratio.mean()) for name, ratio in found.items()}
    assert means["sampler/abs_diff"] == pytest.approx(0.25)
    assert means["sampler/exp_diff"] == pytest.approx((1 + np.exp(0.5) + np.exp(0.25)) / 3)
    assert means["sampler/kl"] == pytest.approx((np.exp(0.5) - 1.5 + np.exp(-0.25) - 0.75) / 3)
    reverse = (0.5 * np.exp(0.5) - np.exp(0.5) + 1 - 0.25 * np.exp(-0.25) - np.exp(-0.25) + 1) / 3
    assert means["sampler/kl_reverse"] == pytest.approx(reverse)
    probabilities = np.exp([[-1.0, -1.5, -0.75], [-1.0, -2.0, -0.5]])
    assert pearson(means) == pytest.approx(np.corrcoef(probabilities)[0, 1], abs=1e-12)
    halves = [
        mismatch(sampler_BT + d_BT, sampler_BT, mask_BT * keep) for keep in (jnp.arange(4) < 2, jnp.arange(4) >= 2)
    ]
    for name, ratio in found.items():
        both = halves[0][name] + halves[1][name]
        np.testing.assert_allclose([both.total, both.count], [ratio.total, ratio.count], rtol=1e-12)


def test_no_mismatch_is_exactly_none():
    with jax.enable_x64(False):
        logprob_BT = -jax.random.uniform(jax.random.key(0), (2, 7)) * 5
        mask_BT = jnp.ones((2, 7))
        found = mismatch(logprob_BT, logprob_BT, mask_BT)
    for name in ("sampler/abs_diff", "sampler/kl", "sampler/kl_reverse"):
        assert float(found[name].mean()) == 0.0
    assert float(found["sampler/exp_diff"].mean()) == 1.0
    assert pearson({name: float(ratio.mean()) for name, ratio in found.items()}) == pytest.approx(1.0, abs=1e-5)


def test_pearson_of_a_constant():
    assert pearson({f"sampler/moment_{name}": 1.0 for name in ("x", "y", "xx", "yy", "xy")}) == 1.0


def test_both_kl_directions_are_unbiased():
    sampler_V = jax.nn.log_softmax(jnp.array([0.3, -1.0, 0.8, 0.1]))
    trainer_V = jax.nn.log_softmax(jnp.array([0.5, -0.8, 0.6, 0.3]))
    one_token = [mismatch(trainer_V[v].reshape(1, 1), sampler_V[v].reshape(1, 1), jnp.ones((1, 1))) for v in range(4)]
    for name, p_V, q_V in (("sampler/kl", sampler_V, trainer_V), ("sampler/kl_reverse", trainer_V, sampler_V)):
        mean = sum(float(jnp.exp(sampler_V[v])) * float(one_token[v][name].mean()) for v in range(4))
        np.testing.assert_allclose(mean, (jnp.exp(p_V) * (p_V - q_V)).sum(), rtol=1e-10)


def critic_rows(mask_BT, length_BT, value_BT, return_BT):
    layout = policy_rows(jnp.ones(mask_BT.shape, int), mask_BT, length_BT).layout
    return CriticRows(layout=layout, mask_BT=mask_BT, length_BT=length_BT, value_BT=value_BT, return_BT=return_BT)


def test_value_loss_by_hand_with_junk_under_the_mask():
    value_BT = jnp.array([[1.0, 2.0, jnp.nan]])
    old_BT = jnp.array([[1.1, 1.0, jnp.inf]])
    return_BT = jnp.array([[0.0, 3.0, jnp.nan]])
    mask_BT, length_BT = jnp.array([[1.0, 1.0, 0.0]]), jnp.array([[2.0, 2.0, 1.0]])
    rows = critic_rows(mask_BT, length_BT, old_BT, return_BT)

    def total(value_BT):
        return value_loss(value_BT, rows, clip_range=0.2)

    loss, metrics = total(value_BT)
    # Token 0 is within the clip: 1 / 2. Token 1 is clipped to 1.2, which is further from 3: 1.8^2 / 2 and no gradient.
    np.testing.assert_allclose([loss.total, loss.count], [0.5 + 1.62, 2.0], rtol=1e-12)
    assert float(metrics["critic/vf_clipfrac"].mean()) == 0.5
    assert float(metrics["critic/value"].mean()) == 1.5
    grad_BT = jax.grad(lambda x_BT: total(x_BT)[0].total)(value_BT)
    np.testing.assert_allclose(grad_BT[0], [1.0, 0.0, 0.0], rtol=1e-12)
    np.testing.assert_allclose(token_mean(return_BT, mask_BT).mean(), 1.5)
    h = 1e-6
    sides = [float(total(value_BT.at[0, 0].add(step))[0].total) for step in (h, -h)]
    np.testing.assert_allclose((sides[0] - sides[1]) / (2 * h), 1.0, rtol=1e-7)
    with pytest.raises(ValueError, match=r"^ppo\.clip_range_value=0"):
        value_loss(value_BT, rows, clip_range=0.0)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_finite_differences_of_the_value_loss(mode):
    rng = np.random.default_rng(0)
    value_BT, old_BT, return_BT = (jnp.asarray(rng.normal(size=(2, 5))) for _ in range(3))
    mask_BT = jnp.array([[0.0, 1, 1, 1, 0], [0.0, 1, 1, 0, 0]])
    length_BT = jnp.where(mask_BT > 0, mask_BT.sum(axis=1, keepdims=True), 1.0)

    rows = critic_rows(mask_BT, length_BT, old_BT, return_BT)

    def mean(x_BT):
        return value_loss(x_BT, rows, clip_range=0.4, mode=mode)[0].mean()

    grad_BT = np.asarray(jax.grad(mean)(value_BT))
    for b, t in np.ndindex(2, 5):
        step_BT = 1e-6 * (np.arange(2)[:, None] == b) * (np.arange(5) == t)
        sides = float(mean(value_BT + step_BT)) - float(mean(value_BT - step_BT))
        np.testing.assert_allclose(sides / 2e-6, grad_BT[b, t], rtol=1e-6, atol=1e-8)
    assert np.abs(grad_BT).max() > 0.1 and (grad_BT == 0).sum() == 5


def test_the_effective_sample_size_of_weights():
    """Of n equal weights all n count; if only one of n weights is not 0, one counts; without weights none counts."""
    moments = {f"sampler/moment_{name}": 1.0 for name in ("x", "y", "xx", "yy", "xy")}
    assert "sampler/ess" not in derived(moments | {"sampler/weight": 0.5})
    for weights, count in (([0.5] * 8, 8.0), ([0.0] * 7 + [3.0], 1.0), ([1.0, 3.0], 1.6), ([0.0] * 4, 0.0)):
        means = {"sampler/weight": np.mean(weights), "sampler/moment_weight": np.mean(np.square(weights))}
        assert derived(moments | means)["sampler/ess"] == pytest.approx(count / len(weights))
