"""PolicyLoss: published constants, hand-worked numbers, and properties of every loss in every layout."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl import testing
from podrl.algorithms.mismatch import divided
from podrl.algorithms.policy_loss import KINDS, PENALISED, KLLossSettings, LossSettings, PolicyLoss, with_old
from podrl.testing import lay_out, packed_layout, policy_rows, sequences

pytestmark = pytest.mark.usefixtures("quick_compilation")

# These losses have every surrogate, correction and aggregation mode and several KL estimators at least once.
SETTINGS = {
    "clip": PolicyLoss(
        KLLossSettings(
            epsilon_high=0.28, epsilon_c=3.0, sampler_correction="tis", entropy_coef=0.01, kl_loss_mode="k3+"
        )
    ),
    "gspo": PolicyLoss(KLLossSettings(policy_loss_fn="gspo", kl_loss_mode="k2", sampler_correction="sequence_tis")),
    "gspo_token": PolicyLoss(
        KLLossSettings(
            policy_loss_fn="gspo-token", sampler_correction="geometric_mask", correction_low=0.8, correction_high=1.2
        )
    ),
    "cispo": PolicyLoss(
        KLLossSettings(policy_loss_fn="cispo", loss_agg_mode="token-mean", sampler_correction="icepop", beta=0.0)
    ),
    "sapo": PolicyLoss(
        KLLossSettings(policy_loss_fn="sapo", loss_agg_mode="seq-mean-token-sum", kl_loss_mode="low_var_kl")
    ),
    "gmpo": PolicyLoss(
        KLLossSettings(policy_loss_fn="gmpo", sampler_correction="tis", kl_loss_mode="abs", kl_clamp_value=0.3)
    ),
    "clip_cov": PolicyLoss(
        KLLossSettings(
            policy_loss_fn="clip_cov", cov_fraction=0.3, clip_cov_low=0.0, loss_agg_mode="token-mean", beta=0.0
        )
    ),
    "kl_cov": PolicyLoss(
        KLLossSettings(policy_loss_fn="kl_cov", cov_fraction=0.3, loss_agg_mode="token-sum-scale", loss_agg_scale=40)
    ),
    "dppo": PolicyLoss(
        KLLossSettings(policy_loss_fn="dppo", epsilon_low=0.05, epsilon_high=0.1, sampler_correction="tis", beta=0.0)
    ),
    "ipo": PolicyLoss(
        KLLossSettings(
            policy_loss_fn="ipo", epsilon=0.1, sampler_correction="sequence_mask", correction_low=0.2, beta=0.0
        )
    ),
    "dro": PolicyLoss(
        KLLossSettings(
            policy_loss_fn="dro", dro_beta=0.3, loss_agg_mode="token-mean", beta=0.0, sampler_correction="kpop"
        )
    ),
    "reinforce": PolicyLoss(
        KLLossSettings(policy_loss_fn="gpg", loss_agg_mode="sequence-mean-token-scale", loss_agg_scale=40)
    ),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def run(kind, arguments):
    return testing.run(SETTINGS[kind], arguments)


def test_every_kind_is_covered():
    assert {loss.settings.kind for loss in SETTINGS.values()} == set(KINDS)


def one_row(**arrays):
    """Returns a loss's arguments for one sequence after one prompt token; NeMo-RL's tests have sequences of three
    tokens."""
    size = len(arrays["advantage"])
    given = {name: jnp.concatenate([jnp.zeros(1), jnp.asarray(value)])[None] for name, value in arrays.items()}
    zero_BT = jnp.zeros((1, size + 1))
    logprob_BT, entropy_BT = (given.pop(name, zero_BT) for name in ("logprob", "entropy"))
    given.setdefault("sampler_logprob", given.get("old_logprob", zero_BT))
    mask_BT, length_BT = zero_BT.at[:, 1:].set(1.0), jnp.full((1, size + 1), float(size))
    return logprob_BT, entropy_BT, policy_rows(jnp.ones((1, size + 1), int), mask_BT, length_BT, **given)


@pytest.mark.parametrize(
    ("settings", "advantage", "ratio", "expected"),
    [
        # NeMo-RL's test: the ratios 0.5, 1 and 1.5 give the token losses -0.5, 1 and -2.4.
        ({}, [1.0, -1.0, 2.0], [0.5, 1.0, 1.5], -1.9 / 3),
        # NeMo-RL's test: dual clip with c = 3 bounds the last token's loss at 12: -0.5, 1, 12.
        ({"epsilon_c": 3.0}, [1.0, -1.0, -4.0], [0.5, 1.0, 5.0], 12.5 / 3),
        ({}, [1.0, -1.0, -4.0], [0.5, 1.0, 5.0], 20.5 / 3),
        # Clip-higher moves only the upper bound: -1.28 * 2 in place of -1.2 * 2.
        ({"epsilon_high": 0.28}, [1.0, -1.0, 2.0], [0.5, 1.0, 1.5], (-0.5 + 1.0 - 2.56) / 3),
        ({"epsilon_low": 0.1}, [1.0, -1.0, -2.0], [1.0, 1.0, 0.5], (-1.0 + 1.0 + 1.8) / 3),
        # GSPO: s = (0.5 * 1 * 1.5)^(1/3) = 0.9086 stays within the clip; A sums to 2.
        ({"policy_loss_fn": "gspo"}, [1.0, -1.0, 2.0], [0.5, 1.0, 1.5], -2.0 * 0.75 ** (1 / 3) / 3),
        # SAPO at ratio 1: (4 / tau) / 2 A = 2 A / tau.
        ({"policy_loss_fn": "sapo"}, [1.0, -1.0, 2.0], [1.0, 1.0, 1.0], (-2.0 + 2.0 / 1.05 - 4.0) / 3),
        # GMPO: mean A = 1. Log ratios are at most 0.2 if A > 0, at least -0.2 if A < 0: (0.5 * e^0.2 * e^-0.2)^(1/3).
        ({"policy_loss_fn": "gmpo"}, [2.0, 2.0, -1.0], [0.5, 1.5, 0.5], -(0.5 ** (1 / 3))),
    ],
)
def test_golden_numbers(settings, advantage, ratio, expected):
    old = jnp.array([-1.0, -1.0, -3.0])
    arguments = one_row(logprob=old + jnp.log(jnp.array(ratio)), old_logprob=old, advantage=advantage)
    loss, _ = PolicyLoss(KLLossSettings(beta=0.0, **settings))(*arguments)
    np.testing.assert_allclose(loss.mean(), expected, rtol=1e-12)


def test_reinforce_constant_of_nemo_rl():
    arguments = one_row(logprob=[-0.5, -1.0, -1.5], advantage=[1.0, -1.0, 2.0])
    loss, _ = PolicyLoss(KLLossSettings(policy_loss_fn="reinforce", beta=0.0))(*arguments)
    np.testing.assert_allclose(loss.mean(), 2.5 / 3, rtol=1e-12)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    old = jnp.array([-1.0, -1.0, -1.0])
    arguments = one_row(logprob=old + jnp.log(jnp.array([0.5, 1.0, 1.5])), old_logprob=old, advantage=[1.0, -1.0, 2.0])
    settings = PolicyLoss(KLLossSettings(policy_loss_fn="cispo", beta=0.0))
    grad_BT = jax.grad(lambda logprob_BT: settings(logprob_BT, *arguments[1:])[0].mean())(arguments[0])
    np.testing.assert_allclose(grad_BT[0], [0.0, -0.8 / 3, 1.0 / 3, -2.4 / 3], rtol=1e-12)


def moved(old, new, advantage, **settings):
    """Returns (loss, gradient by token, metrics) of a sample whose tokens moved from old to new probabilities."""
    arguments = one_row(logprob=np.log(new), old_logprob=np.log(old), advantage=advantage)
    loss = PolicyLoss(KLLossSettings(loss_agg_mode="token-mean", beta=0.0, **settings))
    value, metrics = loss(*arguments)
    grad_BT = jax.grad(lambda *xs: loss(*xs)[0].mean())(*arguments)
    return float(value.mean()), np.asarray(grad_BT)[0, 1:], metrics


def test_dppo_masks_by_probability_and_draws_back():
    # Probabilities .1 -> .4, .5 -> .1, .2 -> .2, .9 -> .5, .01 -> .04: the first two moved too far in the direction of
    # A and the fourth too far against it; the last one's ratio of 4 does not matter, as its difference is only .03.
    old, new = np.array([0.1, 0.5, 0.2, 0.9, 0.01]), np.array([0.4, 0.1, 0.2, 0.5, 0.04])
    advantage = np.array([1.0, -2.0, 0.5, 3.0, 1.0])
    found = functools.partial(moved, old, new, advantage, policy_loss_fn="dppo")
    value, grad, metrics = found()
    log_r, kept = np.log(new / old), np.array([0, 0, 1, 1, 1])
    pushed = -advantage * new / old * kept
    np.testing.assert_allclose(value, (-0.5 - 3 * 5 / 9 - 4 + 1e-3 * (log_r**2).sum()) / 5, rtol=1e-12)
    np.testing.assert_allclose(grad, (pushed + 2e-3 * log_r) / 5, rtol=1e-12, atol=1e-15)
    assert float(metrics["actor/pg_clipfrac"].mean()) == 0.4 and float(metrics["actor/pg_clipfrac_lower"].mean()) == 0.2
    np.testing.assert_allclose(found(dppo_kl_coef=0.0)[1], pushed / 5, rtol=1e-12, atol=1e-15)
    assert np.count_nonzero(found(dppo_kl_coef=0.0, epsilon_low=0.5)[1]) == 4
    assert np.count_nonzero(found(dppo_kl_coef=0.0, epsilon=0.5)[1]) == 5


def test_ipo_masks_what_moved_either_way_and_draws_back():
    # Probabilities .1 -> .25, .5 -> .35, .2 -> .25, .9 -> .5, .01 -> .04: all but the third and fifth moved by over .1.
    old, new = np.array([0.1, 0.5, 0.2, 0.9, 0.01]), np.array([0.25, 0.35, 0.25, 0.5, 0.04])
    advantage = np.array([1.0, 2.0, -0.5, 3.0, 1.0])
    found = functools.partial(moved, old, new, advantage, policy_loss_fn="ipo", epsilon=0.1)
    value, grad, metrics = found()
    log_r, kept = np.log(new / old), np.array([0, 0, 1, 0, 1])
    pushed = -advantage * new / old * kept
    np.testing.assert_allclose(value, (0.5 * 1.25 - 4 + 1e-3 * (log_r**2).sum()) / 5, rtol=1e-12)
    np.testing.assert_allclose(grad, (pushed + 2e-3 * log_r) / 5, rtol=1e-12, atol=1e-15)
    assert float(metrics["actor/pg_clipfrac"].mean()) == pytest.approx(0.6)
    np.testing.assert_allclose(found(dppo_kl_coef=0.0)[1], pushed / 5, rtol=1e-12, atol=1e-15)
    # The second probability fell by .15, less than epsilon_low, so its token is no longer masked.
    assert np.count_nonzero(found(dppo_kl_coef=0.0, epsilon_low=0.2)[1]) == 3


def test_dro_is_the_policy_gradient_and_a_square():
    old, new, advantage = np.array([-1.0, -2.0, -0.5]), np.array([-0.5, -2.0, -1.5]), np.array([2.0, -1.0, 0.5])
    arguments = one_row(logprob=new, old_logprob=old, advantage=advantage)
    loss = PolicyLoss(KLLossSettings(policy_loss_fn="dro", dro_beta=0.2, loss_agg_mode="token-mean", beta=0.0))
    value, _ = loss(*arguments)
    np.testing.assert_allclose(value.mean(), (1.0 - 2.0 + 0.75 + 0.1 * (0.25 + 1.0)) / 3, rtol=1e-12)
    grad_BT = jax.grad(lambda *xs: loss(*xs)[0].mean())(*arguments)
    np.testing.assert_allclose(grad_BT[0, 1:], (-advantage + 0.2 * (new - old)) / 3, rtol=1e-12)


def test_clip_cov_cuts_the_largest_in_the_band():
    # Advantages 2, -1, -1 and logprobs -1, -2, -3 have means 0 and -2: covariances 2, 0, 1.
    arguments = one_row(logprob=[-1.0, -2.0, -3.0], old_logprob=[-1.0, -2.0, -3.0], advantage=[2.0, -1.0, -1.0])

    def grad(low, high, fraction=0.1, arguments=arguments):
        loss = PolicyLoss(
            KLLossSettings(
                policy_loss_fn="clip_cov", beta=0.0, clip_cov_low=low, clip_cov_high=high, cov_fraction=fraction
            )
        )
        return np.asarray(jax.grad(lambda *xs: loss(*xs)[0].mean())(*arguments))[0, 1:] * 3

    np.testing.assert_allclose(grad(0.5, 3.0), [0.0, 1.0, 1.0], atol=1e-12)
    np.testing.assert_allclose(grad(0.5, 1.5), [-2.0, 1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(grad(0.5, 3.0, fraction=0.7), [0.0, 1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(grad(2.5, 3.0), [-2.0, 1.0, 1.0], atol=1e-12)
    # A token that the ratio has clipped already is not chosen; the token with the next largest covariance is.
    moved = one_row(logprob=[-1.0, -2.0, -3.0], old_logprob=[-2.0, -2.0, -3.0], advantage=[2.0, -1.0, -1.0])
    np.testing.assert_allclose(grad(0.5, 3.0, arguments=moved), [0.0, 1.0, 0.0], atol=1e-12)


def test_kl_and_entropy_enter_with_their_coefficients():
    arguments = one_row(
        logprob=[-1.0, -1.0, -1.0],
        old_logprob=[-1.0, -1.0, -1.0],
        ref_logprob=[0.0, -15.0, -30.0],
        entropy=[0.5, 1.0, 1.5],
        advantage=[0.0, 0.0, 0.0],
    )
    loss, metrics = PolicyLoss(KLLossSettings(beta=0.1, kl_loss_mode="kl", entropy_coef=0.01))(*arguments)
    np.testing.assert_allclose(metrics["actor/kl"].mean(), 42 / 3, rtol=1e-12)
    np.testing.assert_allclose(metrics["actor/entropy"].mean(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(loss.mean(), 0.1 * 14 - 0.01, rtol=1e-12)
    *policy, rows = arguments
    scaled = rows.replace(kl_scale=jnp.asarray(2.5))
    traced, _ = PolicyLoss(KLLossSettings(beta=0.04, kl_loss_mode="kl", entropy_coef=0.01))(*policy, scaled)
    np.testing.assert_allclose(traced.mean(), loss.mean(), rtol=1e-12)


@pytest.mark.parametrize("kind", SETTINGS)
def test_masked_tokens_and_packing_do_not_matter(kind):
    def strictly(*arguments):
        with jax.numpy_dtype_promotion("strict"):  # users may forbid implicit casts
            return SETTINGS[kind](*arguments)

    testing.check_packing(strictly)


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if not SETTINGS[kind].batch_dependent])
def test_any_split_into_micro_batches_adds_up(kind):
    testing.check_micro_batches(SETTINGS[kind])


@pytest.mark.parametrize("kind", SETTINGS)
def test_no_advantage_no_gradient(kind):
    # The penalties of dppo and kl_cov do not depend on the advantage, and all covariances are equal (0).
    quiet = PolicyLoss(KLLossSettings(policy_loss_fn=kind, beta=0.0, dppo_kl_coef=0.0, dro_beta=0.0))
    testing.check_no_advantage(quiet, but=1 if kind == "kl_cov" else 0)
    loud = PolicyLoss(KLLossSettings(policy_loss_fn=kind, beta=0.0))
    with pytest.raises(AssertionError) if kind in PENALISED else contextlib.nullcontext():
        testing.check_no_advantage(loud)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kl_cov"])
def test_every_loss_passes_the_checks_for_those_of_users(kind):
    quiet = {"dppo": {"dppo_kl_coef": 0.0}, "ipo": {"dppo_kl_coef": 0.0}, "dro": {"dro_beta": 0.0}}
    testing.check_policy_loss(kind, **quiet.get(kind, {}))


@pytest.mark.parametrize("kind", SETTINGS)
def test_extreme_ratios_stay_finite_in_float32(kind):
    testing.check_extremes(SETTINGS[kind])


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind not in ("cispo", "gspo_token")])
def test_finite_differences(kind):
    tokens = sequences(constant_advantage=False)
    layout = packed_layout(tokens["owner"])
    _, _, grad_BT = run(kind, lay_out(tokens, layout))
    found = np.asarray(grad_BT)[layout.row, layout.column]
    h = 1e-6
    if SETTINGS[kind].settings.kl_loss_mode.endswith("+"):
        tokens["ref_logprob"] = tokens["logprob"]  # no KL: its straight-through gradient is no derivative
        found = np.asarray(run(kind, lay_out(tokens, layout))[2])[layout.row, layout.column]
    for at in np.flatnonzero(tokens["mask"]):
        sides = []
        for step in (h, -h):
            moved = dict(tokens, logprob=tokens["logprob"] + step * (np.arange(tokens["mask"].size) == at))
            sides.append(float(run(kind, lay_out(moved, layout))[0].total))
        np.testing.assert_allclose((sides[0] - sides[1]) / (2 * h), found[at], rtol=1e-6, atol=1e-8)


def test_finite_differences_of_cispo_with_its_weight_held():
    # If the old log-probabilities move with the current ones, the ratio and therefore the weight stay the same.
    tokens = sequences(constant_advantage=False)
    layout = packed_layout(tokens["owner"])
    weightless = PolicyLoss(KLLossSettings(policy_loss_fn="cispo", beta=0.0, loss_agg_mode="token-mean"))

    def total(arguments):
        return float(weightless(*arguments)[0].total)

    grad_BT = jax.grad(lambda x_BT, *rest: weightless(x_BT, *rest)[0].total)(*lay_out(tokens, layout))
    for at in np.flatnonzero(tokens["mask"]):
        sides = []
        for step in (1e-6, -1e-6):
            move = step * (np.arange(tokens["mask"].size) == at)
            moved = {name: tokens[name] + move for name in ("logprob", "old_logprob", "sampler_logprob")}
            sides.append(total(lay_out(tokens | moved, layout)))
        expected = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(expected, grad_BT[layout.row[at], layout.column[at]], rtol=1e-6, atol=1e-8)


def test_finite_differences_of_gspo_token_with_its_sequence_held():
    # The sequence ratio s is constant while a token moves: the token's ratio is then s exp(logprob - logprob before).
    tokens = sequences(constant_advantage=False)
    layout = packed_layout(tokens["owner"])
    loss = PolicyLoss(KLLossSettings(policy_loss_fn="gspo_token", beta=0.0, epsilon=0.2))
    grad_BT = jax.grad(lambda x_BT, *rest: loss(x_BT, *rest)[0].total)(*lay_out(tokens, layout))
    keep = tokens["mask"] > 0
    for at in np.flatnonzero(keep):
        mine = keep & (tokens["owner"] == tokens["owner"][at])
        s = np.exp((tokens["logprob"] - tokens["old_logprob"])[mine].mean())
        advantage, n = tokens["advantage"][at], tokens["length"][at]

        def value(step, s=s, advantage=advantage):
            ratio = s * np.exp(step)
            return max(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2))

        expected = (value(1e-6) - value(-1e-6)) / 2e-6 / n
        np.testing.assert_allclose(expected, grad_BT[layout.row[at], layout.column[at]], rtol=1e-6, atol=1e-8)


def test_gspo_forms_agree_with_one_advantage_per_sequence():
    for constant in (True, False):
        tokens = sequences(constant_advantage=constant)
        arguments = lay_out(tokens, packed_layout(tokens["owner"]))
        losses = [
            PolicyLoss(KLLossSettings(policy_loss_fn=kind, beta=0.0, epsilon=0.9)) for kind in ("gspo", "gspo_token")
        ]
        grads = [jax.grad(lambda *xs, loss=loss: loss(*xs)[0].mean())(*arguments) for loss in losses]
        same = np.allclose(*grads, rtol=1e-10, atol=1e-15)
        assert same == constant


@pytest.mark.parametrize(
    "kind", ["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo", "ipo", "dro", "reinforce"]
)
def test_on_policy_gradient_is_the_policy_gradient(kind):
    # With old = current (no gradient flows through old) every surrogate has the gradient -A / n per token; the slope of
    # SAPO's gate at 1 is 1 as well.
    tokens = sequences()
    layout = packed_layout(tokens["owner"])
    arguments = lay_out(tokens, layout)
    loss = with_old(PolicyLoss(KLLossSettings(policy_loss_fn=kind, beta=0.0)), "current")
    grad = np.asarray(jax.grad(lambda *xs: loss(*xs)[0].mean())(*arguments))[layout.row, layout.column]
    expected = -tokens["mask"] * tokens["advantage"] / tokens["length"] / 3
    np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-15)


def test_weights_are_advantages_until_the_clip_takes_them():
    logprob = np.log([1.5, 1.1, 0.5, 0.9, 5.0])
    arguments = one_row(advantage=[2.0, 2.0, -1.0, -1.0, -4.0], logprob=logprob, old_logprob=np.zeros(5))
    weight_BT, clipped_BT = PolicyLoss(KLLossSettings(epsilon_c=3.0)).token_weights(arguments[0], arguments[2])
    np.testing.assert_allclose(weight_BT[0], [0.0, 0.0, 2.2, 0.0, -0.9, 0.0], rtol=1e-12)
    assert clipped_BT[0].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("kind", SETTINGS)
def test_weights_are_the_gradient_of_the_policy_gradient_part(kind):
    mode = "sequence-mean-token-mean" if kind == "gmpo" else "token-mean"
    plain = {"beta": 0.0, "entropy_coef": 0.0, "loss_agg_mode": mode, "loss_agg_scale": None}
    loss = PolicyLoss(dataclasses.replace(SETTINGS[kind].settings, **plain))
    tokens = sequences()
    arguments = lay_out(tokens, packed_layout(tokens["owner"]))
    slope_BT, metrics = jax.grad(lambda *xs: (lambda found: (found[0].total, found[1]))(loss(*xs)), has_aux=True)(
        *arguments
    )
    rows = arguments[2]
    weight_BT, clipped_BT = SETTINGS[kind].token_weights(arguments[0], rows)
    length_BT = rows.clean().length_BT if kind == "gmpo" else 1.0
    np.testing.assert_allclose(weight_BT, -slope_BT * length_BT, rtol=1e-9, atol=1e-12)
    assert np.abs(weight_BT).max() > 0.1 and (weight_BT[rows.mask_BT == 0] == 0).all()
    shares = [float(metrics[f"actor/{name}"].mean()) for name in ("pg_clipfrac", "pg_clipfrac_lower")]
    assert max(shares) - 1e-9 <= clipped_BT.sum() / rows.mask_BT.sum() <= sum(shares) + 1e-9


@pytest.mark.parametrize("correction", ["tis", "sequence_tis", "sequence_mask", "icepop", "geometric_mask"])
def test_two_policies_are_never_corrected_twice(correction):
    tokens = sequences()
    tokens["old_logprob"] = tokens["sampler_logprob"]
    arguments = lay_out(tokens, packed_layout(tokens["owner"]))
    plain, _ = PolicyLoss(KLLossSettings(beta=0.0))(*arguments)
    corrected, metrics = PolicyLoss(KLLossSettings(beta=0.0, sampler_correction=correction))(*arguments)
    assert float(plain.total) == float(corrected.total)
    assert float(metrics["sampler/weight"].mean()) == 1.0


def test_where_the_ratio_starts_is_chosen_without_touching_the_rows():
    tokens = sequences()
    loss, layout = PolicyLoss(KLLossSettings()), packed_layout(tokens["owner"])
    for old, name in (("trainer", "old_logprob"), ("current", "logprob"), ("sampler", "sampler_logprob")):
        found, metrics = with_old(loss, old)(*lay_out(tokens, layout))
        expected, others = loss(*lay_out(tokens | {"old_logprob": tokens[name]}, layout))
        np.testing.assert_allclose(found.total, expected.total, rtol=1e-12)
        # sampler/kl compares the sampler with the old policy; if the sampler is the old policy, with the current
        # weights.
        compared = (
            others if old != "sampler" else loss(*lay_out(tokens | {"old_logprob": tokens["logprob"]}, layout))[1]
        )
        np.testing.assert_allclose(metrics["sampler/kl"].mean(), compared["sampler/kl"].mean(), rtol=1e-12)
        np.testing.assert_allclose(metrics["actor/ratio"].mean(), others["actor/ratio"].mean(), rtol=1e-12)
        assert (float(metrics["sampler/abs_diff"].mean()) > 0.1) and metrics.keys() == others.keys()


def test_three_policies_are_corrected_once():
    # Without clipping, ratio x weight is current over sampler: the loss is the same with the sampler as the old policy.
    tokens = sequences()
    layout = packed_layout(tokens["owner"])
    wide = {"beta": 0.0, "epsilon_low": 1.0, "epsilon_high": 1e6}
    three, _ = PolicyLoss(KLLossSettings(sampler_correction="tis", correction_high=1e6, **wide))(
        *lay_out(tokens, layout)
    )
    tokens["old_logprob"] = tokens["sampler_logprob"]
    two, _ = PolicyLoss(KLLossSettings(**wide))(*lay_out(tokens, layout))
    np.testing.assert_allclose(three.total, two.total, rtol=1e-12)


def test_dropped_tokens_still_count_in_the_denominator():
    tokens = sequences()
    tokens["sampler_logprob"] = tokens["old_logprob"] - 3.0
    loss, metrics = PolicyLoss(KLLossSettings(beta=0.0, sampler_correction="icepop"))(
        *lay_out(tokens, packed_layout(tokens["owner"]))
    )
    assert float(loss.total) == 0.0
    assert float(loss.count) == pytest.approx(3.0)
    assert float(metrics["sampler/kept"].mean()) == 0.0


def aged(tokens):
    """Gives the tokens the ages 0, 1, 3 and 0 steps in turn; returns (arguments of the loss, age of each token)."""
    layout, ages = packed_layout(tokens["owner"]), np.array([0, 1, 3, 0])[np.arange(len(tokens["mask"])) % 4]
    logprob_BT, entropy_BT, rows = lay_out(tokens, layout)
    age_BT = np.full(rows.mask_BT.shape, np.nan)
    age_BT[layout.row, layout.column] = ages
    return (logprob_BT, entropy_BT, dataclasses.replace(rows, age_BT=jnp.asarray(age_BT))), ages


@pytest.mark.parametrize("old", ["trainer", "sampler"])
def test_metrics_by_age_are_means_over_the_tokens_of_that_age(old):
    tokens = sequences()
    arguments, ages = aged(tokens)
    loss = PolicyLoss(KLLossSettings(epsilon=0.1), oldest=3)
    found, metrics = with_old(loss, old)(*arguments)
    plain, others = with_old(PolicyLoss(KLLossSettings(epsilon=0.1)), old)(*arguments)
    assert float(found.total) == float(plain.total) and others.keys() < metrics.keys()
    means = divided({name: float(ratio.mean()) for name, ratio in metrics.items()})
    start = tokens["old_logprob" if old == "trainer" else "sampler_logprob"]
    ratio, keep = np.exp(tokens["logprob"] - start), tokens["mask"] > 0
    # The sampler is compared with the ratio's old policy, or with the current weights if the sampler is the old policy.
    diff = np.abs(tokens["old_logprob" if old == "trainer" else "logprob"] - tokens["sampler_logprob"])
    A = tokens["advantage"]
    clipped = (A > 0) & (ratio > 1.1) | (A < 0) & (ratio < 0.9)
    values = {"sampler/abs_diff": diff, "actor/ratio": ratio, "actor/pg_clipfrac": clipped}
    for age in (0, 1, 3):
        here = keep & (ages == age)
        assert means[f"rollout/share_stale_{age}"] == pytest.approx(here.sum() / keep.sum())
        for name, value in values.items():
            assert means[f"{name}_stale_{age}"] == pytest.approx(value[here].mean(), rel=1e-12), name
    assert means["sampler/abs_diff"] == pytest.approx(diff[keep].mean())
    assert not [name for name in means if name.endswith("_stale_2")], "no token is two steps old"


def test_tokens_beyond_the_bound_leave_the_policy_loss_and_stay_in_its_denominators():
    tokens = sequences(constant_advantage=False)
    arguments, ages = aged(tokens)
    layout, settings = packed_layout(tokens["owner"]), KLLossSettings(sampler_correction="tis", beta=0.0)
    plain, _, grad_BT = testing.run(PolicyLoss(settings, oldest=3), arguments)
    found, metrics, left_BT = testing.run(PolicyLoss(settings, oldest=3, stale_bound=1), arguments)
    old = ages > 1
    kept = grad_BT[layout.row, layout.column] * ~old
    assert np.count_nonzero(kept) < np.count_nonzero(grad_BT)
    np.testing.assert_array_equal(left_BT[layout.row, layout.column], kept)
    assert float(found.count) == float(plain.count) and float(found.total) != float(plain.total)
    keep = tokens["mask"] > 0
    assert float(metrics["sampler/kept"].mean()) == pytest.approx((keep & ~old).sum() / keep.sum())
    assert "times 0 for tokens drawn by weights more than 1 step old" in PolicyLoss(settings, None, 3, 1).formula()


def test_sharding_over_devices_changes_nothing():
    tokens = sequences()
    arguments = lay_out(tokens, packed_layout(tokens["owner"]))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, Spec("data"))
    spread = jax.tree.map(lambda x: jax.device_put(x, rows) if np.ndim(x) else x, arguments)
    loss, metrics, grad_BT = run("gspo", arguments)
    sharded_loss, sharded_metrics, sharded_grad_BT = run("gspo", spread)
    whole, sharded = (testing.numbers_of(*found) for found in ((loss, metrics), (sharded_loss, sharded_metrics)))
    testing.assert_same(whole, sharded, "by how the batch is sharded")
    np.testing.assert_allclose(grad_BT, sharded_grad_BT, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"policy_loss_fn": "ppg"}, "grpo.policy_loss_fn='ppg'", "gspo_token"),
        ({"epsilon": 1.5}, "grpo.epsilon=1.5", "[0, 1]"),
        ({"epsilon_low": -0.1}, "grpo.epsilon_low=-0.1", "[0, 1e9]"),
        ({"epsilon_low": 1.5}, "grpo.epsilon_low=1.5", "[0, 1]: a ratio cannot fall"),
        ({"epsilon_high": float("nan")}, "grpo.epsilon_high=nan", "[0, 1e9]"),
        ({"epsilon_c": 0.5}, "grpo.epsilon_c=0.5", "(1, 1e9]"),
        ({"epsilon_c": 3.0, "policy_loss_fn": "gspo"}, "grpo.epsilon_c=3.0", "'clip' only"),
        ({"beta": -1.0}, "grpo.beta=-1.0", "[0, 1e9]"),
        ({"kl_loss_mode": "kl2"}, "grpo.kl_loss_mode='kl2'", "low_var_kl"),
        ({"kl_clamp_value": 0.0}, "grpo.kl_clamp_value=0.0", "(0, 1e9]"),
        ({"loss_agg_mode": "mean"}, "grpo.loss_agg_mode='mean'", "token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "grpo.loss_agg_mode", "token-sum-scale"),
        ({"loss_agg_mode": "sequence-mean-token-scale"}, "grpo.loss_agg_scale=None", "length in tokens"),
        ({"policy_loss_fn": "gmpo", "loss_agg_mode": "token-mean"}, "grpo.loss_agg_mode='token-mean'", "gmpo"),
        ({"policy_loss_fn": "gmpo", "sampler_correction": "icepop"}, "grpo.sampler_correction='icepop'", "tis"),
        ({"sampler_correction": "is"}, "grpo.sampler_correction='is'", "icepop"),
        ({"sampler_correction": "icepop", "correction_low": 7.0}, "grpo.correction_low=7.0", "low < high"),
        ({"sampler_correction": "icepop", "correction_high": 0.9}, "grpo.correction_high=0.9", "leave 1"),
        ({"tau_negative": 0.0}, "grpo.tau_negative=0.0", "(0, 1e9]"),
        ({"cov_fraction": 0.0}, "grpo.cov_fraction=0.0", "(0, 1]"),
        ({"clip_cov_low": 6.0}, "grpo.clip_cov_low=6.0", "clip_cov_high"),
        ({"entropy_coef": float("inf")}, "grpo.entropy_coef=inf", "[-1e9, 1e9] or None"),
    ],
)
def test_bad_settings_name_the_key(settings, key, hint):
    with pytest.raises(ValueError) as error:
        PolicyLoss(KLLossSettings(**settings))
    said = str(error.value).replace("KLLossSettings.", "grpo.")  # settings name their class, PolicyLoss the keys
    assert key in said
    assert hint in said


def test_formula_has_the_numbers():
    text = SETTINGS["clip"].formula()
    for part in ("clip(r, 0.8, 1.28)", "3 |A|", "min(w, 2)", "0.04 KL: k3+", "0.01 entropy", "mean over sequences"):
        assert part in text
    assert "/ 40" in SETTINGS["kl_cov"].formula()
    for settings in SETTINGS.values():
        assert "{" not in settings.formula()


def test_warnings_name_what_is_probably_not_meant():
    assert "k3+" in PolicyLoss(KLLossSettings(kl_loss_mode="kl")).warnings()[0]
    assert PolicyLoss(KLLossSettings(kl_loss_mode="k3")).warnings() == ()
    assert PolicyLoss(KLLossSettings(kl_loss_mode="kl", beta=0.0)).warnings() == ()
    assert "micro-batch" in PolicyLoss(KLLossSettings(policy_loss_fn="kl_cov", beta=0.0)).warnings()[0]


def of_torch(torch, kind, correction, old_T, sampler_T, advantage_T, owner_T):
    """Returns (a function that sums the weighted token losses of given log-probabilities, the weights of the
    correction), both in torch."""
    p_T, q_T = old_T.exp(), sampler_T.exp()
    w_T = (old_T - sampler_T).exp()
    whole_T = torch.stack([(old_T - sampler_T)[owner_T == i].sum() for i in owner_T]).exp()
    both_T = p_T * (p_T / q_T).log() + (1 - p_T) * ((1 - p_T) / (1 - q_T)).log()
    back_T = q_T * (q_T / p_T).log() + (1 - q_T) * ((1 - q_T) / (1 - p_T)).log()
    weight_T = {
        "none": torch.ones_like(w_T),
        "tis": w_T.clamp(max=1.2),
        "sequence_mask": whole_T * (whole_T <= 1.5),
        "icepop": w_T * ((w_T >= 0.5) & (w_T <= 1.2)),
        "kpop": w_T * (torch.maximum(both_T, back_T) <= 0.02),
    }[correction]

    def loss(logprob_T):
        log_r_T = logprob_T - old_T
        r_T, moved_T = log_r_T.exp(), logprob_T.exp() - old_T.exp()
        clipped_T = r_T.clamp(0.8, 1.2)
        match kind:
            case "clip":
                token_T = torch.maximum(-r_T * advantage_T, -clipped_T * advantage_T)
            case "cispo":
                token_T = -clipped_T.detach() * advantage_T * logprob_T
            case "ipo":
                token_T = -r_T * advantage_T * (moved_T.detach().abs() <= 0.05) + 1e-3 * log_r_T**2
            case "dro":
                token_T = -advantage_T * logprob_T + 0.05 / 2 * log_r_T**2
            case _:
                token_T = -advantage_T * logprob_T
        return (token_T * weight_T).sum()

    return loss, weight_T


@pytest.mark.parametrize("correction", ["none", "tis", "sequence_mask", "icepop", "kpop"])
@pytest.mark.parametrize("kind", ["clip", "cispo", "ipo", "dro", "reinforce"])
def test_gradients_are_those_of_torch(kind, correction):
    """Sums the token losses of one row with two sequences; some tokens lie beyond the bounds."""
    torch = pytest.importorskip("torch")
    with jax.enable_x64(True):
        rng, size = np.random.default_rng(3), 12
        old = -rng.uniform(0.2, 3.0, size)
        sampler, logprob = old + rng.normal(scale=0.3, size=size), old + rng.normal(scale=0.3, size=size)
        advantage, owner = rng.normal(size=size), np.repeat([1, 2], [5, 7])
        given = [torch.tensor(values) for values in (old, sampler, advantage, owner)]
        theirs, weight_T = of_torch(torch, kind, correction, *given)
        x_T = torch.tensor(logprob, requires_grad=True)
        expected = theirs(x_T)
        expected.backward()
        assert correction == "none" or bool((weight_T != (given[0] - given[1]).exp()).any())  # some weights are bounded
        high = {"tis": 1.2, "sequence_mask": 1.5, "icepop": 1.2, "kpop": 0.02}.get(correction)
        more = {"epsilon": 0.05} if kind == "ipo" else {}
        settings = LossSettings(
            policy_loss_fn=kind,
            loss_agg_mode="token-sum-scale",
            loss_agg_scale=1.0,
            sampler_correction=correction,
            correction_high=high,
            **more,
        )
        length_BT = jnp.asarray(np.repeat([5.0, 7.0], [5, 7])[None])
        arrays = {"old_logprob": old, "sampler_logprob": sampler, "advantage": advantage}
        rows = policy_rows(
            jnp.asarray(owner[None]),
            jnp.ones((1, size)),
            length_BT,
            **{name: jnp.asarray(value[None]) for name, value in arrays.items()},
        )

        def mine(logprob_BT):
            return PolicyLoss(settings)(logprob_BT, jnp.zeros((1, size)), rows)[0].mean()

        value, slope_BT = jax.value_and_grad(mine)(jnp.asarray(logprob[None]))
        assert float(value) == pytest.approx(float(expected.detach()), rel=1e-9)
        np.testing.assert_allclose(slope_BT[0], x_T.grad, rtol=1e-9, atol=1e-12)
