"""Compares podrl with every number in core_algos.json, which verl's functions computed in float64 (its key "about"
names verl's version)."""

import contextlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms import advantages, corrections, gae, kl
from podrl.algorithms.aggregate import aggregate
from podrl.algorithms.estimator import AdvantageEstimator, GroupSettings
from podrl.algorithms.mismatch import mismatch
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.presets import preset
from podrl.algorithms.segments import masked
from podrl.algorithms.surrogates import gmpo
from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.testing import policy_rows

VECTORS = json.loads((pathlib.Path(__file__).parent / "core_algos.json").read_text())
VERL_EPS = 1e-8
# For each preset: the name of its numbers in core_algos.json, and changes of the preset to the settings with which verl
# computed them.
PRESET_ADVANTAGES = {
    **{name: ("grpo", {}) for name in ("grpo", "dapo", "verl_grpo", "tunix_grpo")},
    **{name: ("dr_grpo", {}) for name in ("dr_grpo", "reinforce")},
    **{name: (name, {}) for name in ("rloo", "opo", "gpg", "remax")},
    "pass_at_k": ("grpo_passk", {}),
    "reinforce_pp": ("reinforce_plus_plus g=.99", {"gamma": 0.99}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", {}),
}
TOLERANCE = {np.float64: 1e-9, np.float32: 1e-5}


def of(reward_B, size):
    """Returns the group index of samples in groups of one size, group after group."""
    return np.arange(len(reward_B)) // size


@pytest.fixture(params=[np.float64, np.float32], ids=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(True) if request.param is np.float64 else contextlib.nullcontext():
        yield request.param


def close(actual, expected, dtype, mask_BT=None):
    actual = np.asarray(actual)
    assert actual.dtype == dtype
    expected = np.asarray(expected, np.float64)
    if mask_BT is not None:
        actual, expected = actual[mask_BT > 0], expected[mask_BT > 0]
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Inputs:
    """The input arrays of core_algos.json, as numpy arrays, or as jax arrays if `xp` is jax.numpy."""

    def __init__(self, dtype, xp=np):
        self.__dict__ |= {name: xp.asarray(np.array(value, dtype)) for name, value in VECTORS["inputs"].items()}
        self.mask = self.response_mask
        self.segment = (np.arange(5) < 99)[None].repeat(4, 0).astype(np.int32)
        self.reward_B = (self.token_level_rewards * self.mask).sum(axis=1)
        self.length = xp.broadcast_to(self.mask.sum(axis=1, keepdims=True), self.mask.shape)
        self.length = xp.where(self.mask > 0, self.length, xp.ones_like(self.length))

    @property
    def where(self):
        return self.mask, self.length, self.segment

    def rows(self, advantage_BT):
        given = {"ref_logprob": self.ref_log_prob, "sampler_logprob": self.rollout_log_prob}
        given |= {"old_logprob": self.old_log_prob, "advantage": advantage_BT}
        return policy_rows(self.segment, self.mask, self.length, **given)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("grpo", {"advantage_estimator": "grpo"}),
        ("dr_grpo", {"advantage_estimator": "grpo", "advantage_scale": "none"}),
        ("rloo", {"advantage_estimator": "rloo"}),
        ("opo", {"advantage_estimator": "opo"}),
        ("gpg", {"advantage_estimator": "gpg"}),
        ("grpo_passk", {"advantage_estimator": "grpo_passk"}),
        ("reinforce_plus_plus_baseline", {"advantage_estimator": "reinforce_plus_plus_baseline"}),
        ("reinforce_plus_plus g=.99", {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.99}),
        ("remax", {"advantage_estimator": "remax"}),
    ],
)
def test_outcome_advantages(key, settings, dtype, xp):
    x = Inputs(dtype, xp)
    expected = VECTORS["advantages"][key]
    estimator = AdvantageEstimator(GroupSettings(**settings))
    advantage_BT = estimator(x.token_level_rewards, x.remax_baseline, x.mask, group_B=of(x.token_level_rewards, 2))
    assert isinstance(advantage_BT, np.ndarray) == (xp is np)
    close(advantage_BT, expected["adv"] if isinstance(expected, dict) else expected, dtype)


@pytest.mark.parametrize("name", PRESET_ADVANTAGES)
def test_advantages_of_presets(name, dtype):
    x = Inputs(dtype)
    key, changes = PRESET_ADVANTAGES[name]
    expected = VECTORS["advantages"][key]
    estimator = preset(name).advantage_estimator(**changes)
    advantage_BT = estimator(x.token_level_rewards, x.remax_baseline, x.mask, group_B=of(x.token_level_rewards, 2))
    close(advantage_BT, expected["adv"] if isinstance(expected, dict) else expected, dtype)


def test_singleton_group_of_verl(dtype):
    x = Inputs(dtype)
    estimator = preset("verl_grpo").advantage_estimator()
    advantage_BT = estimator(
        x.token_level_rewards[3:], x.remax_baseline[3:], x.mask[3:], group_B=of(x.token_level_rewards[3:], 1)
    )
    close(advantage_BT, VECTORS["advantages"]["grpo singleton group z"][3:], dtype)


def test_singleton_group(dtype):
    # In this vector of core_algos.json the groups are a, a, a, z: the fourth sample is alone.
    reward_B = Inputs(dtype).reward_B
    expected_BT = np.array(VECTORS["advantages"]["grpo singleton group z"])
    close(advantages.group_relative(reward_B[:3], group_B=of(reward_B[:3], 3)), expected_BT[:3, 0], dtype)
    close(
        advantages.group_relative(reward_B[3:], group_B=of(reward_B[3:], 1), singleton="raw"), expected_BT[3:, 0], dtype
    )


def test_returns(dtype):
    x = Inputs(dtype)
    _, return_BT = advantages.reinforce_plus_plus(x.token_level_rewards, x.mask, gamma=0.99)
    close(return_BT, VECTORS["advantages"]["reinforce_plus_plus g=.99"]["ret"], dtype, x.mask)
    close(gae.discounted_return(x.token_level_rewards, x.mask, gamma=1.0), VECTORS["advantages"]["remax"]["ret"], dtype)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("key", "gamma", "lam", "mask"),
    [
        ("gae g=1.0 l=1.0", 1.0, 1.0, "response_mask"),
        ("gae g=1.0 l=0.95", 1.0, 0.95, "response_mask"),
        ("gae g=0.99 l=0.95", 0.99, 0.95, "response_mask"),
        (
            "gae tool-masked g=.99 l=.95 (rewards,values pre-multiplied by tool_mask)",
            0.99,
            0.95,
            "tool_mask",
        ),
    ],
)
def test_gae(key, gamma, lam, mask, dtype, xp):
    x = Inputs(dtype, xp)
    mask_BT = getattr(x, mask)
    advantage_BT, return_BT = gae.gae(x.token_level_rewards, x.values, mask_BT, gamma=gamma, lam=lam)
    # On a masked token verl keeps the advantage carried from the next unmasked token, where podrl returns 0. So only
    # unmasked tokens are compared.
    close(return_BT, VECTORS["advantages"][key]["ret"], dtype, np.asarray(mask_BT))
    close(gae.masked_whiten(advantage_BT, mask_BT), VECTORS["advantages"][key]["adv"], dtype, np.asarray(mask_BT))


@pytest.mark.parametrize("shift", [True, False])
def test_masked_whiten(shift, dtype):
    x_BT, mask_BT = np.array([[1, 2, 3, 4]], dtype), np.array([[1, 1, 1, 0]], dtype)
    expected_BT = VECTORS["masked_whiten [1,2,3,4] mask 1110"]["shift" if shift else "noshift"]
    close(gae.masked_whiten(x_BT, mask_BT, shift_mean=shift), expected_BT, dtype, mask_BT)


@pytest.mark.parametrize("mode", ["k1", "abs", "k2", "k3"])
def test_kl(mode, dtype):
    x = Inputs(dtype, jnp)
    close(kl.kl_divergence(x.log_prob, x.ref_log_prob, mode), VECTORS["kl"][mode], dtype)


def test_adaptive_kl():
    value = kl.AdaptiveKL(target=6, horizon=1e4).update(0.2, kl=9, samples=256)
    assert value == pytest.approx(VECTORS["adaptive_kl init=.2 target=6 horizon=1e4 update(9,256)"], abs=1e-12)


@pytest.mark.parametrize("empty_row", [False, True])
def test_aggregation(empty_row, dtype):
    x = Inputs(dtype, jnp)
    key = "agg_loss, row 1 fully masked" if empty_row else "agg_loss of row-major arange(20)"
    expected = VECTORS[key]
    value_BT = jnp.arange(20, dtype=dtype).reshape(4, 5)
    mask_BT = x.mask.at[1].set(0) if empty_row else x.mask

    def run(mode, **kwargs):
        return aggregate(value_BT, mask_BT, x.length, mode, **kwargs).mean()

    close(run("token-mean"), expected["token-mean"], dtype)
    close(run("seq-mean-token-sum"), expected["seq-mean-token-sum"], dtype)
    close(run("seq-mean-token-mean", eps=VERL_EPS), expected["seq-mean-token-mean"], dtype)
    close(run("token-sum-scale", scale=5), expected["seq-mean-token-sum-norm"], dtype)
    later = expected["seq-mean-token-sum-norm_later_upstream"]
    close(run("sequence-mean-token-scale", scale=5), later, dtype)


POLICY_LOSSES = {
    "vanilla": {"policy_loss_fn": "clip", "loss_agg_mode": "token-mean", "epsilon_c": 3.0},
    "gspo": {"policy_loss_fn": "gspo-token"},
    "sapo": {"policy_loss_fn": "sapo"},
    "gpg": {"policy_loss_fn": "gpg", "loss_agg_mode": "token-mean"},
    "cispo": {"policy_loss_fn": "cispo", "loss_agg_mode": "token-mean"},
    # core_algos.json does not say which share of tokens kl_cov penalises; its gradients show 3 of 14 tokens.
    "kl_cov": {"policy_loss_fn": "kl_cov", "loss_agg_mode": "token-mean", "cov_fraction": 0.25},
}


def _group_advantage(x):
    estimator = AdvantageEstimator()
    return estimator(x.token_level_rewards, x.remax_baseline, x.mask, group_B=of(x.token_level_rewards, 2))


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "tis"])
@pytest.mark.parametrize("key", POLICY_LOSSES)
def test_policy_loss_and_gradient(key, corrected, dtype):
    x = Inputs(dtype, jnp)
    settings = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, "length_eps": VERL_EPS}
    if corrected:
        settings |= {"sampler_correction": "tis", "correction_high": 2.0}
    policy_loss = PolicyLoss(KLLossSettings(**(settings | POLICY_LOSSES[key])))

    def loss(logprob_BT):
        ratio, metrics = policy_loss(logprob_BT, jnp.zeros_like(x.mask), x.rows(_group_advantage(x)))
        return ratio.mean(), metrics

    (value, metrics), grad_BT = jax.value_and_grad(loss, has_aux=True)(x.log_prob)
    group = VECTORS["policy_loss (grpo advantages, clip .2/.28, c=3, tau 1/1.05, token-mean)"]
    expected = group[key + (" +token TIS C=2" if corrected else "")]
    close(value, expected["loss"], dtype)
    close(grad_BT, expected["grad"], dtype)
    names = {"actor/pg_clipfrac": "actor/pg_clipfrac", "actor/pg_clipfrac_lower": "actor/pg_clipfrac_lower"}
    names |= {"actor/ppo_kl": "actor/approx_kl"}
    for name, number in expected["metrics"].items():
        if key == "kl_cov":  # verl reports the mean absolute log ratio here
            number_here = aggregate(jnp.abs(x.log_prob - x.old_log_prob), x.mask, x.length, "token-mean").mean()
        else:
            number_here = metrics[names[name]].mean()
        close(number_here, number, dtype)


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "tis"])
def test_gmpo_and_gradient(corrected, dtype):
    # verl adds 1e-8 to the lengths inside the exponent but not in the mean over sequences.
    x = Inputs(dtype, jnp)
    weight_BT = jnp.ones_like(x.mask)
    if corrected:
        weight_BT = corrections.importance_weight(
            x.old_log_prob, x.rollout_log_prob, *x.where, "tis", low=0.0, high=2.0
        )
    log_weight_B1 = masked(jnp.log(weight_BT), x.mask).sum(axis=1, keepdims=True) / x.mask.sum(axis=1, keepdims=True)

    def loss(logprob_BT):
        surrogate = gmpo(
            logprob_BT, x.old_log_prob, _group_advantage(x), *x.where, epsilon_low=0.2, epsilon_high=0.28, eps=VERL_EPS
        )
        loss_BT = surrogate.loss_BT * jnp.exp(log_weight_B1)
        return aggregate(loss_BT, x.mask, x.length, "sequence-mean-token-mean").mean(), surrogate

    (value, surrogate), grad_BT = jax.value_and_grad(loss, has_aux=True)(x.log_prob)
    group = VECTORS["policy_loss (grpo advantages, clip .2/.28, c=3, tau 1/1.05, token-mean)"]
    expected = group["geo_mean" + (" +token TIS C=2" if corrected else "")]
    close(value, expected["loss"], dtype)
    close(grad_BT, expected["grad"], dtype)

    def mean(flag_BT):
        return aggregate(flag_BT.astype(dtype), x.mask, x.length, "token-mean").mean()

    close(mean(surrogate.clipped_BT), expected["metrics"]["actor/pg_clipfrac"], dtype)
    close(mean(surrogate.clipped_low_BT), expected["metrics"]["actor/pg_clipfrac_lower"], dtype)

    settings = {"policy_loss_fn": "gmpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28}
    if corrected:
        settings |= {"sampler_correction": "tis", "correction_high": 2.0}
    rows = x.rows(_group_advantage(x))
    composed, metrics = PolicyLoss(KLLossSettings(**settings))(x.log_prob, jnp.zeros_like(x.mask), rows)
    np.testing.assert_allclose(composed.mean(), expected["loss"], rtol=1e-5, atol=1e-7)
    close(metrics["actor/approx_kl"].mean(), expected["metrics"]["actor/ppo_kl"], dtype)


ASYMMETRIC = {"epsilon_low": 0.2, "epsilon_high": 0.28}
# For each preset: the name of its numbers in core_algos.json, and changes of the preset to the settings with which verl
# computed them.
PRESET_LOSSES = {
    "verl_grpo": ("vanilla", {"epsilon_high": 0.28, "beta": 0.0}),
    "dapo": ("vanilla", {"epsilon_c": 3.0}),
    "gspo_token": ("gspo", ASYMMETRIC),
    "sapo": ("sapo", {}),
    "gpg": ("gpg", {}),
    "reinforce": ("gpg", {}),
    "cispo": ("cispo", ASYMMETRIC),
    "kl_cov": ("kl_cov", {"cov_fraction": 0.25}),
    "gmpo": ("geo_mean", ASYMMETRIC),
}


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "tis"])
@pytest.mark.parametrize("name", PRESET_LOSSES)
def test_losses_of_presets(name, corrected, dtype):
    x = Inputs(dtype, jnp)
    key, changes = PRESET_LOSSES[name]
    if corrected:
        changes = changes | {"sampler_correction": "tis", "correction_high": 2.0}
    policy_loss, rows = preset(name).policy_loss(**changes), x.rows(_group_advantage(x))

    def loss(logprob_BT):
        return policy_loss(logprob_BT, jnp.zeros_like(x.mask), rows)[0].mean()

    value, grad_BT = jax.value_and_grad(loss)(x.log_prob)
    group = VECTORS["policy_loss (grpo advantages, clip .2/.28, c=3, tau 1/1.05, token-mean)"]
    expected = group[key + (" +token TIS C=2" if corrected else "")]
    # All presets but verl_grpo divide a sequence's sum by n, and not by verl's n + 1e-8.
    tolerance = TOLERANCE[dtype] if policy_loss.settings.mode == "token-mean" else 1e-5
    np.testing.assert_allclose(value, expected["loss"], rtol=tolerance, atol=1e-7)
    np.testing.assert_allclose(grad_BT, expected["grad"], rtol=tolerance, atol=1e-7)


def test_kl_of_verl(dtype):
    x = Inputs(dtype, jnp)
    zero_BT = jnp.zeros_like(x.mask)
    rows = x.rows(zero_BT).replace(old_logprob_BT=x.log_prob)
    loss, metrics = preset("verl_grpo").policy_loss()(x.log_prob, zero_BT, rows)
    kl_BT = np.array(VECTORS["kl"]["k3"])
    mask_BT = np.array(VECTORS["inputs"]["response_mask"])
    mean = (kl_BT * mask_BT).sum() / mask_BT.sum()
    close(metrics["actor/kl"].mean(), mean, dtype)
    close(loss.mean(), 1e-3 * mean, dtype)


def test_value_loss(dtype):
    x = Inputs(dtype, jnp)
    _, return_BT = gae.gae(x.token_level_rewards, x.values, x.mask, gamma=0.99, lam=0.95)
    value_BT = x.values + jnp.array([0.3, -0.3, 0.1, 0.25, 0.0], dtype)
    layout = x.rows(return_BT).layout
    rows = CriticRows(layout=layout, mask_BT=x.mask, length_BT=x.length, value_BT=x.values, return_BT=return_BT)
    loss, metrics = value_loss(value_BT, rows, clip_range=0.2)
    expected = VECTORS["value_loss vpred=V+[.3,-.3,.1,.25,0], returns=gae(.99,.95), clip .2"]
    close(loss.mean(), expected["loss"], dtype)
    close(metrics["critic/vf_clipfrac"].mean(), expected["clipfrac"], dtype)


@pytest.mark.parametrize(("kind", "key"), [("tis", "token"), ("sequence_tis", "sequence")])
def test_truncated_weights(kind, key, dtype):
    x = Inputs(dtype, jnp)
    weight_BT = corrections.importance_weight(x.old_log_prob, x.rollout_log_prob, *x.where, kind, low=0.0, high=2.0)
    close(masked(weight_BT, x.mask), VECTORS["tis"][key], dtype)


def test_divergence_of_the_sampler(dtype):
    x = Inputs(dtype, jnp)
    found = mismatch(x.old_log_prob, x.rollout_log_prob, x.mask)
    close(found["sampler/kl"].mean(), VECTORS["offpolicy_metrics"]["k3_kl"], dtype)


def test_bands_are_the_rejection_masks(dtype):
    x = Inputs(dtype, jnp)
    pair = (x.old_log_prob, x.rollout_log_prob)
    icepop_BT = corrections.importance_weight(*pair, *x.where, "icepop", low=0.5, high=2.0)
    kept_BT = np.array(VECTORS["rejection"]["token_k1 0.5_2.0"])
    close(masked(icepop_BT, x.mask), kept_BT * np.exp(np.asarray(x.old_log_prob - x.rollout_log_prob)), dtype)
    # verl bounds the ratio sampler / trainer, the reciprocal of podrl's weight.
    geometric_BT = corrections.importance_weight(*pair, *x.where, "geometric_mask", low=1 / 1.1, high=1 / 0.9)
    close(masked(geometric_BT, x.mask), VECTORS["rejection"]["seq_mean_k1 0.9_1.1"], dtype)


def test_nothing_in_the_file_is_left_out():
    assert set(VECTORS["policy_loss (grpo advantages, clip .2/.28, c=3, tau 1/1.05, token-mean)"]) == {
        key + suffix for key in (*POLICY_LOSSES, "geo_mean") for suffix in ("", " +token TIS C=2")
    }
    assert len(VECTORS["advantages"]) == 14
    assert set(VECTORS["kl"]) == {"k1", "abs", "k2", "k3"}
    assert len(VECTORS["rejection"]) == 2
    assert len(VECTORS["offpolicy_metrics"]) == 1
