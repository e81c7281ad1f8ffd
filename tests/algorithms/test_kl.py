"""KL estimators: published constants, unbiasedness by enumeration, the penalty in the reward, and the adaptive
coefficient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms import kl


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # NeMo-RL's test: the log-probability is -1; the reference's is 0, -15 and -30.
        ("k1", [-1.0, 14.0, 29.0]),
        ("k2", [0.5, 98.0, 420.5]),
        ("k3", [np.e - 2, np.exp(-14) + 13.0, np.exp(-29) + 28.0]),
        ("abs", [1.0, 14.0, 29.0]),
        ("k1+", [-1.0, 14.0, 29.0]),
        ("k3+", [np.e - 2, np.exp(-14) + 13.0, np.exp(-29) + 28.0]),
    ],
)
def test_values(mode, expected):
    logprob_BT, ref_BT = jnp.full((1, 3), -1.0), jnp.array([[0.0, -15.0, -30.0]])
    np.testing.assert_allclose(kl.kl_divergence(logprob_BT, ref_BT, mode)[0], expected, rtol=1e-12)
    for alias, name in kl.ALIASES.items():
        if name == mode:
            np.testing.assert_allclose(kl.kl_divergence(logprob_BT, ref_BT, alias)[0], expected, rtol=1e-12)


def test_nemo_rl_rounds_to_the_same():
    value = kl.kl_divergence(jnp.full((1, 3), -1.0), jnp.array([[0.0, -15.0, -30.0]]), "k3")
    np.testing.assert_allclose(value[0], [0.7183, 13.0, 28.0], atol=1e-4)


def test_clamp_bounds_value_and_gradient():
    ref_BT = jnp.array([[0.0, -15.0, -30.0]])
    value_BT = kl.kl_divergence(jnp.full((1, 3), -1.0), ref_BT, "k3", clamp=10.0)
    np.testing.assert_allclose(value_BT[0], [np.e - 2, 10.0, 10.0], rtol=1e-12)
    grad_BT = jax.grad(lambda x_BT: kl.kl_divergence(x_BT, ref_BT, "k3", clamp=10.0).sum())(jnp.full((1, 3), -1.0))
    np.testing.assert_allclose(grad_BT[0], [1 - np.e, 0.0, 0.0], rtol=1e-12)


@pytest.mark.parametrize("mode", ["k1", "abs", "k2", "k3"])
def test_finite_differences(mode):
    logprob_BT, ref_BT = jnp.array([[-1.0, -0.2, -3.0]]), jnp.array([[-1.5, -0.9, -0.4]])
    grad_BT = jax.grad(lambda x_BT: kl.kl_divergence(x_BT, ref_BT, mode).sum())(logprob_BT)
    h = 1e-6
    sides = [kl.kl_divergence(logprob_BT + step, ref_BT, mode) for step in (h, -h)]
    np.testing.assert_allclose(grad_BT, (sides[0] - sides[1]) / (2 * h), rtol=1e-7)


def _expected(mode, logits_V, ref_V):
    """Averages the estimate and its gradient over all tokens; the gradient holds sampling probabilities constant."""
    prob_V = jax.nn.softmax(logits_V)

    def estimate(logits_V):
        value_BT = kl.kl_divergence(jax.nn.log_softmax(logits_V)[None], ref_V[None], mode)
        return (jax.lax.stop_gradient(prob_V) * value_BT[0]).sum()

    return jax.value_and_grad(estimate)(logits_V)


def test_which_estimators_have_the_right_value_and_gradient():
    logits_V = jnp.array([0.3, -1.0, 0.8, 0.1])
    ref_V = jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.2, 1.0]))

    def exact(logits_V):
        logprob_V = jax.nn.log_softmax(logits_V)
        return (jnp.exp(logprob_V) * (logprob_V - ref_V)).sum()

    value, grad_V = jax.value_and_grad(exact)(logits_V)
    for mode in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(_expected(mode, logits_V, ref_V)[0], value, rtol=1e-12)
    for mode in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(_expected(mode, logits_V, ref_V)[1], grad_V, rtol=1e-10)
    np.testing.assert_allclose(_expected("k1", logits_V, ref_V)[1], 0.0, atol=1e-15)
    assert not np.allclose(_expected("k3", logits_V, ref_V)[1], grad_V, rtol=1e-2)
    assert not np.allclose(_expected("k2", logits_V, ref_V)[0], value, rtol=1e-2)


@pytest.mark.parametrize("mode", kl.MODES)
def test_extremes_are_finite_in_float32(mode):
    with jax.enable_x64(False):
        logprob_BT, ref_BT = jnp.array([[-1e4, -0.1, -1e4]]), jnp.array([[-0.1, -1e4, -1e4]])
        value, grad_BT = jax.value_and_grad(lambda x_BT: kl.kl_divergence(x_BT, ref_BT, mode).sum())(logprob_BT)
        assert np.isfinite(value) and np.isfinite(grad_BT).all()
        assert grad_BT[0, 2] == 0 or mode in ("k1", "abs")


def test_reward_less_the_penalty():
    mask_BT = jnp.array([[0.0, 1.0, 1.0]])
    reward_BT = jnp.array([[jnp.nan, 0.0, 0.5]])
    logprob_BT, ref_BT = jnp.array([[jnp.nan, -1.0, -2.0]]), jnp.array([[0.0, -1.5, -1.0]])
    out_BT = kl.penalized_reward(reward_BT, kl.sampled_kl(logprob_BT, ref_BT, mask_BT, mode="k1"), mask_BT, coef=0.1)
    np.testing.assert_allclose(out_BT, [[0.0, -0.05, 0.6]], rtol=1e-12)


def test_adaptive_coefficient_moves_towards_the_target_and_is_bounded():
    controller = kl.AdaptiveKL(target=6.0, horizon=1000.0)
    assert controller.update(0.2, kl=6.0, samples=64) == 0.2
    assert controller.update(0.2, kl=600.0, samples=100) == pytest.approx(0.2 * 1.02)
    assert controller.update(0.2, kl=0.0, samples=100) == pytest.approx(0.2 * 0.98)
    assert kl.AdaptiveKL(1.0, 10.0).update(0.5, kl=math.nan, samples=4) == 0.5
    with pytest.raises(ValueError, match=r"kl_horizon=10.0 .* 50 samples: it must be above 10"):
        kl.AdaptiveKL(1.0, 10.0).update(0.5, kl=1.0, samples=50)
    with pytest.raises(ValueError, match="kl_target=0"):
        kl.AdaptiveKL(target=0.0, horizon=1.0)


def test_unknown_estimator_names_the_key():
    with pytest.raises(ValueError, match=r"^ppo\.kl_method='k4' .* low_var_kl"):
        kl.canonical_mode("k4", key="ppo.kl_method")
