"""The algorithms' configurations: presets, reward shaping and length penalties."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.presets import PRESETS, preset
from podrl.algorithms.shaping import overlong_penalty
from podrl.job.config import complete, parse, unset
from podrl.learner.control import LossKL, MismatchGate, RewardKL
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.types import NO_EPISODE, STOP_EOS, STOP_LENGTH, Experience, Prompts, Rollouts, blank_columns


def rollouts(lengths, stops, limit=8, prompt=2):
    """Makes samples of `lengths` tokens, each after a prompt of `prompt` tokens."""
    B, T = len(lengths), prompt + limit
    place_BT = np.tile(np.arange(T), (B, 1))
    mask_BT = ((place_BT >= prompt) & (place_BT < prompt + np.asarray(lengths)[:, None])).astype(np.float32)
    prompts = Prompts(
        np.zeros((B, prompt), np.int32), np.full(B, prompt), np.arange(B), ["p"] * B, {"answer": ["1"] * B}, b"{}"
    )
    return Rollouts(
        prompts=prompts,
        group_B=np.arange(B),
        length_B=prompt + np.asarray(lengths),
        mask_BT=mask_BT,
        turn_reward_BT=np.zeros((B, T), np.float32),
        stop_B=np.asarray(stops),
        completions=["c"] * B,
        episodes=[NO_EPISODE] * B,
        seconds=0.0,
        **blank_columns((B, T), pad_id=0) | {"version_BT": np.zeros((B, T), np.int32)},
    )


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_is_refused(name):
    if preset(name).advantage_estimator().needs_critic:
        config = PPOConfig(**preset(name).settings)
    else:
        config = GRPOConfig(num_generations=4, **preset(name).settings)
    coef, learner = config.reward_kl.coef, preset(name).learner
    assert coef == learner.get("kl_in_reward", learner.get("beta", 0.0))
    assert config.policy_loss(40).formula() and config.estimator().formula()
    assert bool(coef) == any("KL to the reference" in line for line in config.describe(40))
    for field in ("dynamic_sampling", "overlong_shaping"):
        assert getattr(config, field) == preset(name).learner.get(field, False)


def test_overlong_penalty_by_hand():
    # Limit 20, buffer 5: no penalty up to 15 tokens, a fifth of it for each further token, all of it at 20.
    penalty_B = overlong_penalty(np.array([3, 15, 16, 18, 20]), limit=20, buffer=5, penalty=2.0)
    np.testing.assert_allclose(penalty_B, [0.0, 0.0, -0.4, -1.2, -2.0], atol=1e-12)
    with pytest.raises(ValueError, match=r"overlong_buffer=21 must lie in \[1, rollout.max_tokens_to_generate=20"):
        overlong_penalty(np.array([3]), limit=20, buffer=21)


def of(samples):
    """Makes a batch of samples with equal rewards and no lost sample."""
    zero_B = np.zeros(len(samples.stop_B))
    return Experience(samples, zero_B[None], zero_B, zero_B, 0.0, {}, zero_B.astype(np.int32))


def test_shaping_counts_tokens_and_the_filter_leaves_groups_alone():
    samples = rollouts([4, 7, 8], [STOP_EOS, STOP_EOS, STOP_LENGTH])
    reward_B = np.array([0.5, 1.0, 1.0])
    config = GRPOConfig(overlong_shaping=True, overlong_buffer=2, no_stop_reward=-3.0, overlong_filter=True)
    np.testing.assert_allclose(config.shaped(reward_B, samples, 8), [0.5, 0.5, -4.0])
    kept_BT = config.loss_mask(of(samples))
    np.testing.assert_array_equal(kept_BT[:2], samples.mask_BT[:2])
    assert not kept_BT[2].any()
    plain = GRPOConfig()
    assert plain.shaped(reward_B, samples, 8) is reward_B and plain.loss_mask(of(samples)) is samples.mask_BT


def test_the_ratio_starts_from_the_trainer_where_the_reward_needs_its_scores():
    assert GRPOConfig().old_source(1) == "current"
    assert GRPOConfig().old_source(2) == "trainer"
    assert GRPOConfig(kl_in_reward=0.1).old_source(1) == "trainer"
    assert GRPOConfig(kl_in_reward=0.1, max_staleness=1).old_source(1) == "trainer"
    assert PPOConfig().old_source(1) == "trainer" and PPOConfig(beta=0.0).old_source(1) == "current"


def test_kl_in_the_reward_is_steered_and_survives_a_checkpoint():
    mask_BT = np.array([[0, 1, 1], [0, 1, 0]], np.float32)
    reward_BT = np.array([[0, 0, 2.0], [0, 1.0, 0]])
    logprob_BT = np.array([[0, -1.0, -2.0], [0, -1.0, np.nan]])
    ref_BT = np.array([[0, -1.5, -2.5], [0, -1.5, 0]])
    penalty = RewardKL(GRPOConfig(beta=0.0, kl_in_reward=0.1, kl_target=0.25, kl_horizon=20.0))
    result_BT, said = penalty.penalised(reward_BT, logprob_BT, ref_BT, mask_BT)
    np.testing.assert_allclose(result_BT, [[0, -0.05, 1.95], [0, 0.95, 0]])
    assert said == {"reward/kl": pytest.approx(0.5), "reward/kl_coef": 0.1}
    # The KL is twice its target. The error is clipped to 0.2, so 2 samples of a horizon of 20 raise the coefficient
    # by 2%.
    assert penalty.coef == pytest.approx(0.102)
    other = RewardKL(GRPOConfig(beta=0.0, kl_in_reward=0.1, kl_target=0.25))
    other.restore(penalty.state())
    assert other.coef == penalty.coef


def test_kl_in_the_loss_is_steered_and_survives_a_checkpoint():
    config = GRPOConfig(beta=0.1, kl_target=0.25, kl_horizon=20.0)
    control = LossKL(config)
    assert control.active and control.steered and control.scale == 1.0
    # The updates measured KLs of 0.4 and 0.6, on average twice the target. The error is clipped to 0.2, so 2 samples of
    # a horizon of 20 raise the coefficient by 2%.
    said = control.trained([jnp.float32(0.4), jnp.float32(0.6)], 2)
    assert said == {"actor/kl_coef": 0.1}
    assert control.coef == pytest.approx(0.102) and control.scale == pytest.approx(1.02)
    # At 0.2375 the error is -0.05, which lowers the coefficient by 0.5%. A KL of NaN changes nothing.
    assert control.trained([jnp.float32(0.2375)], 2) == {"actor/kl_coef": pytest.approx(0.102)}
    assert control.coef == pytest.approx(0.102 * 0.995)
    control.trained([jnp.float32(np.nan)], 2)
    other = LossKL(dataclasses.replace(config, beta=0.5))
    other.restore(json.loads(json.dumps(control.state())))
    assert other.coef == control.coef == pytest.approx(0.102 * 0.995) and other.scale == other.coef / 0.5
    fixed = LossKL(GRPOConfig(beta=0.1))
    fixed.trained([jnp.float32(9.0)], 2)
    assert not fixed.steered and fixed.scale == 1.0 and not LossKL(PPOConfig()).active


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (GRPOConfig, {"kl_target": 1.0, "beta": 0.0}, "GRPOConfig.beta or GRPOConfig.kl_in_reward"),
        (
            GRPOConfig,
            {"kl_target": 1.0, "kl_in_reward": 0.1},
            r"GRPOConfig.beta=0.04 and \w+.kl_in_reward=0.1: set one",
        ),
        (GRPOConfig, {"kl_target": 1.0, "kl_horizon": 0.0}, "kl_horizon=0.0"),
        (PPOConfig, {"kl_target": 1.0, "beta": 0.0}, "PPOConfig.beta"),
        (PPOConfig, {"dynamic_sampling": True}, "PPOConfig.num_generations of at least 2"),
        (GRPOConfig, {"dynamic_sampling_batches": 1}, r"a whole number in \[2, "),
        (PPOConfig, {"advantage_estimator": "grpo"}, "algorithm=grpo"),
        (GRPOConfig, {"advantage_estimator": "gae"}, "algorithm=ppo"),
        (PPOConfig, {"clip_range_value": 0.0}, "PPOConfig.clip_range_value=0.0"),
        (PPOConfig, {"epsilon": 2.0}, "PPOConfig.epsilon=2.0"),
        (PPOConfig, {"gae_lambda": 1.5}, "PPOConfig.gae_lambda=1.5"),
        (PPOConfig, {"mini_batch_size": 4}, "RLTrainingConfig.mini_batch_size"),
        (GRPOConfig, {"mismatch_bound": 0.0}, "GRPOConfig.mismatch_bound=0.0"),
        (GRPOConfig, {"no_stop_reward": float("nan")}, "GRPOConfig.no_stop_reward"),
    ],
)
def test_bad_settings_name_the_key(cls, values, message):
    with pytest.raises(ValueError, match=message):
        cls(**values)


@pytest.mark.parametrize(
    ("estimator", "singleton", "learns"),
    [
        *((name, "zero", False) for name in ("grpo", "rloo", "rloo_std", "opo", "gpg", "reinforce_plus_plus_baseline")),
        *((name, "raw", True) for name in ("grpo", "rloo", "rloo_std", "opo", "gpg", "reinforce_plus_plus_baseline")),
        *(("pass_at_k", singleton, False) for singleton in ("zero", "raw")),
        *((name, "zero", True) for name in ("remax", "reinforce_plus_plus")),
    ],
)
def test_a_group_of_one_is_refused_where_it_teaches_nothing(estimator, singleton, learns):
    values = {"advantage_estimator": estimator, "singleton": singleton, "num_generations": 1}
    if learns:
        mask_BT = np.array([[0, 1, 1], [0, 1, 0]], np.float32)
        arrays: Any = np.array([[0, 0, 1.0], [0, 0.25, 0]]), np.zeros(2), mask_BT
        advantage_BT = GRPOConfig(**values).estimator()(*arrays, group_B=np.arange(len(arrays[0])))
        assert np.any(advantage_BT != 0)
        return
    with pytest.raises(
        ValueError, match=f"num_generations=1 with GRPOConfig.advantage_estimator='{estimator}'"
    ) as error:
        GRPOConfig(**values)
    assert ("GRPOConfig.singleton='raw'" in str(error.value)) == (estimator != "pass_at_k")
    if estimator == "pass_at_k":
        return
    estimated = GRPOConfig(**(values | {"num_generations": 2})).estimator()
    advantage_BT = estimated(
        np.array([[0, 0, 1.0], [0, 0.25, 0]]), np.zeros(2), np.array([[0, 1.0, 1], [0, 1, 0]]), group_B=np.arange(2)
    )
    assert not np.any(advantage_BT)


@pytest.mark.parametrize(
    ("kind", "settings", "unread"),
    [
        ("reinforce", {"epsilon": 0.1}, ["epsilon"]),
        ("sapo", {"epsilon_high": 0.3, "tau_positive": 2.0}, ["epsilon_high"]),
        ("clip", {"cov_fraction": 0.1, "dro_beta": 1.0, "epsilon": 0.1}, ["cov_fraction", "dro_beta"]),
        ("cispo", {"epsilon_high": 0.3}, []),
        ("gmpo", {"epsilon": 0.4}, []),
        (lambda logprob_BT, old_logprob_BT, advantage_BT: -logprob_BT * advantage_BT, {"epsilon": 0.1}, ["epsilon"]),
    ],
)
def test_settings_that_the_loss_does_not_read_are_told(kind, settings, unread):
    warnings = GRPOConfig(beta=0.0, policy_loss_fn=kind, **settings).warnings(1)
    assert [text.partition("=")[0] for text in warnings] == [f"grpo.{name}" for name in unread]
    assert all("has no effect: the policy loss" in text for text in warnings)
    # A source of a mixture may have another loss, which reads these settings.
    sources = {"a": {"policy_loss_fn": "clip"}, "b": {"policy_loss_fn": "clip_cov"}, "c": {"policy_loss_fn": "dro"}}
    mixed = GRPOConfig(beta=0.0, policy_loss_fn=kind, sources=sources, **settings)
    assert not [text for text in mixed.warnings(1) if "has no effect" in text]


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_has_a_setting_that_its_loss_does_not_read(name):
    loss = PolicyLoss(KLLossSettings(**{"loss_agg_scale": 8.0, **PRESETS[name].loss}))
    assert not [text for text in loss.warnings() if "has no effect" in text]


def test_settings_that_undo_each_other_are_told():
    corrected = {"sampler_correction": "tis", "max_staleness": 1}
    (warning,) = GRPOConfig(beta=0.0, old_logprob="sampler", **corrected).warnings(1)
    assert "grpo.sampler_correction='tis' does nothing" in warning and "grpo.old_logprob='auto'" in warning
    (warning,) = GRPOConfig(beta=0.0, policy_loss_fn="gpg", max_staleness=1, sampler_correction="none").warnings(1)
    assert "grpo.policy_loss_fn='gpg' has no ratio" in warning and "grpo.sampler_correction='auto'" in warning
    (warning,) = PPOConfig(sampler_correction="icepop", old_logprob="sampler").warnings(1)
    assert "ppo.sampler_correction='icepop' does nothing" in warning
    assert not GRPOConfig(beta=0.0, **corrected).warnings(1)
    assert not GRPOConfig(beta=0.0, old_logprob="trainer", **corrected).warnings(1)
    assert not GRPOConfig(beta=0.0, sampler_correction="tis").warnings(2)
    (warning,) = GRPOConfig(beta=0.0, old_logprob="current").warnings(4)
    assert "grpo.old_logprob='current' with 4 updates per step" in warning and "num_iterations=1" in warning
    assert not GRPOConfig(beta=0.0, old_logprob="current").warnings(1)
    assert GRPOConfig(kl_loss_mode="kl").warnings(1) == list(GRPOConfig(kl_loss_mode="kl").policy_loss(8).warnings())


@pytest.mark.parametrize("settings_of", [GRPOConfig, PPOConfig])
def test_stale_samples_are_corrected_by_default_and_fresh_ones_are_not(settings_of):
    fresh, stale = settings_of(beta=0.0), settings_of(beta=0.0, max_staleness=1)
    assert (fresh.correction, fresh.old_source(1), fresh.old_source(2)) == ("none", "current", "trainer")
    assert (stale.correction, stale.old_source(1), stale.old_source(2)) == ("tis", "current", "trainer")
    assert stale.correction_bounds == (0.0, 2.0)
    assert "times the sampler correction: min(w, 2)" in stale.policy_loss(8).formula()
    # Each of these two changes centres the clip on the policy that sampled, so a correction would be 1.
    for changes in ({"old_logprob": "sampler"}, {"sampler_correction": "none"}):
        bare = settings_of(beta=0.0, max_staleness=1, **changes)
        assert (bare.correction, bare.old_source(1)) == ("none", "sampler")
    for kind in ("sequence_mask", "kpop"):  # an explicit correction is used
        asked = settings_of(beta=0.0, max_staleness=1, sampler_correction=kind)
        assert (asked.correction, asked.old_source(1)) == (kind, "current")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"stale_bound": 2, "max_staleness": 2},
            r"GRPOConfig.stale_bound=2 leaves nothing out.*GRPOConfig.max_staleness=2 steps",
        ),
        ({"stale_bound": 1}, "GRPOConfig.stale_bound=1 leaves nothing out"),
        ({"stale_bound": 0, "max_staleness": 2}, r"GRPOConfig.stale_bound=0 must"),
        (
            {"stale_bound": 1, "max_staleness": 2, "policy_loss_fn": "gmpo"},
            "GRPOConfig.stale_bound=1 drops single tokens",
        ),
    ],
)
def test_a_bound_on_age_that_cannot_be_kept_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


def test_fields_shared_by_both_algorithms_mean_the_same():
    mine = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(PPOConfig):
        if field.name.startswith(("overlong", "dynamic", "mismatch", "kl_target", "kl_horizon")):
            assert mine[field.name] == field.default


def test_the_gate_stops_with_a_diagnosis():
    gate = MismatchGate(0.1, 3, section="grpo", stale=True)
    bad = {"sampler/abs_diff": 0.3, "sampler/exp_diff": 1.4, "sampler/pearson": 0.9}
    for step, metrics in enumerate(({"sampler/abs_diff": 0.09}, bad, bad, {"sampler/abs_diff": 0.0}, bad, bad), 1):
        gate.check(step, metrics)  # two bad steps in a row, a good step, two bad steps again
    with pytest.raises(ValueError, match=r"step 3 in a row.*exp_diff 1.4.*max_staleness.*data_type") as error:
        gate.check(7, bad)
    assert "mismatch_bound=1000" in str(error.value)
    assert "grpo.sampler_correction='icepop'" in str(error.value)
    forgiving = MismatchGate(0.1, 0, section="ppo", stale=False)
    for step in range(9):
        forgiving.check(step, bad)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grpo": {"dynamic_sampling": True}}, r"does not go with grpo\.dynamic_sampling=True.*leave no pass rates"),
        ({"rollout": {"clock": "wall"}, "grpo": {"max_staleness": 1}}, r"does not go with rollout\.clock='wall'"),
        ({"algorithm": "sft"}, r"data\.curriculum chooses prompts .* algorithm=sft learns from given answers"),
    ],
)
def test_what_a_curriculum_cannot_be_combined_with_is_refused_by_name(values, message):
    given = {"trainer": {"eval_every_n_steps": 0, "max_steps": 6}, "data": {"curriculum": {"retire_after": 1}}}
    assert parse(ConfigDict(complete(given)).to_dict()).data.curriculum.used
    with pytest.raises(ValueError, match=message):
        parse(ConfigDict(complete(given | values)).to_dict())


def test_a_key_without_a_default_two_groups_down_can_be_set_on_the_command_line():
    shares = ConfigDict(unset("grpo")).data.curriculum
    shares.easy_share = 0.25
    assert shares.to_dict()["easy_share"] == 0.25
