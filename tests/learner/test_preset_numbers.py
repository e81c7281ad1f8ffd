"""Every number of every preset, written out: the settings of a run that sets only the algorithm."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.kl import canonical_mode
from podrl.algorithms.presets import PRESETS, preset
from podrl.job.config import complete, parse, section_of
from podrl.learner.settings import GRPOConfig, PPOConfig

SEQUENCES, TOKENS = "sequence-mean-token-mean", "token-mean"
SUMS, SCALED = "sequence-mean-token-sum", "sequence-mean-token-scale"
NO_KL, K1 = (0.0, "", None), (0.04, "k1", None)
DAPO = {"dynamic_sampling": True, "overlong_shaping": True}

# preset: (loss, low, high, dual clip), aggregation, KL in the loss (beta, form, clamp),
#   (estimator, scale, eps, advantage in a group of one), KL in the reward (coefficient, form), further settings.
GRPO, PLAIN = ("grpo", "std", 1e-6, "zero"), ("grpo", "none", 1e-6, "zero")
CLIP, REINFORCE = ("clip", 0.2, 0.2, None), ("reinforce", 0.2, 0.2, None)
NUMBERS = {
    "grpo": (CLIP, SEQUENCES, (0.04, "k3", None), GRPO, None, {}),
    "dr_grpo": (CLIP, SCALED, NO_KL, PLAIN, None, {}),
    "dapo": (("clip", 0.2, 0.28, None), TOKENS, NO_KL, GRPO, None, DAPO),
    "gspo": (("gspo", 3e-4, 4e-4, None), SEQUENCES, NO_KL, GRPO, None, {}),
    "gspo_token": (("gspo_token", 3e-4, 4e-4, None), SEQUENCES, NO_KL, GRPO, None, {}),
    "cispo": (("cispo", 1.0, 4.0, None), TOKENS, NO_KL, GRPO, None, {}),
    "sapo": (("sapo", 0.2, 0.2, None), SEQUENCES, NO_KL, GRPO, None, {}),
    "gmpo": (("gmpo", 0.4, 0.4, None), SEQUENCES, NO_KL, GRPO, None, {}),
    "clip_cov": (("clip_cov", 0.2, 0.2, None), TOKENS, NO_KL, GRPO, None, {}),
    "kl_cov": (("kl_cov", 0.2, 0.2, None), TOKENS, NO_KL, GRPO, None, {}),
    "dppo": (("dppo", 0.2, 0.2, None), TOKENS, NO_KL, PLAIN, None, {}),
    "ipo": (("ipo", 0.1, 0.1, None), TOKENS, NO_KL, PLAIN, None, {}),
    "opd": (CLIP, TOKENS, NO_KL, GRPO, None, {}),
    "rloo": (REINFORCE, SUMS, NO_KL, ("rloo", "std", 1e-6, "zero"), (0.05, "k1"), {}),
    "reinforce": (REINFORCE, TOKENS, NO_KL, PLAIN, None, {}),
    "reinforce_pp": (CLIP, TOKENS, NO_KL, ("reinforce_plus_plus", "std", 1e-6, "zero"), (0.01, "k1"), {}),
    "reinforce_pp_baseline": (
        *(CLIP, TOKENS, (1e-3, "k2", None)),
        *(("reinforce_plus_plus_baseline", "std", 1e-6, "zero"), None, {}),
    ),
    "remax": (REINFORCE, SUMS, NO_KL, ("remax", "std", 1e-6, "zero"), None, {}),
    "opo": (REINFORCE, TOKENS, NO_KL, ("opo", "std", 1e-6, "zero"), None, {}),
    "gpg": (REINFORCE, TOKENS, NO_KL, ("gpg", "std", 1e-6, "zero"), None, {}),
    "pass_at_k": (CLIP, SEQUENCES, NO_KL, ("pass_at_k", "std", 1e-6, "zero"), None, {}),
    "ppo": (CLIP, TOKENS, NO_KL, ("gae", None, None, None), (0.04, "k3"), {}),
    "verl_grpo": (("clip", 0.2, 0.2, 3.0), TOKENS, (1e-3, "k3", 10.0), ("grpo", "std", 1e-6, "raw"), None, {}),
    "trl_grpo": (CLIP, TOKENS, NO_KL, ("grpo", "std", 1e-4, "zero"), None, {}),
    "prime_rl": (("ipo", 0.1, 0.1, None), TOKENS, NO_KL, PLAIN, None, {}),
    "open_instruct_grpo": (("clip", 0.2, 0.272, None), TOKENS, (0.05, "k3", None), PLAIN, None, {}),
    "nemo_grpo": (CLIP, TOKENS, (0.01, "k3", 10.0), ("rloo_std", "std", 1e-6, "zero"), None, {}),
    "slime_grpo": (CLIP, SEQUENCES, NO_KL, GRPO, None, {}),
    "areal": (("clip", 0.4, 0.4, None), TOKENS, NO_KL, ("grpo", "std", 1e-5, "zero"), None, {}),
    "tinker_ppo": (CLIP, "token-sum-scale", NO_KL, PLAIN, None, {}),
    "tunix_grpo": (CLIP, SEQUENCES, K1, GRPO, None, {}),
}
# CORRECTED: presets with a sampler correction. RATIO_FROM: presets whose `old_logprob` is not 'auto'.
CORRECTED = {
    "trl_grpo": ("sequence_mask", (0.0, 3.0)),
    "open_instruct_grpo": ("tis", (0.0, 2.0)),
    "areal": ("icepop", (0.0, 5.0)),
}
RATIO_FROM = dict.fromkeys(("dppo", "ipo", "prime_rl", "tinker_ppo"), "sampler") | {"areal": "trainer"}
BESIDE = (
    *("dynamic_sampling", "overlong_shaping", "overlong_filter", "no_stop_reward", "kl_target", "max_staleness"),
    *("whiten_rewards",),
)


def told(loss, estimator):
    """Reads the settings of a loss and of an advantage in the order of the first four columns of NUMBERS."""
    settings, (beta, mode, clamp) = loss.settings, loss.settings.loss_kl
    kl = (beta, canonical_mode(mode), clamp) if beta else NO_KL
    shape = (settings.kind, settings.low, settings.high, settings.epsilon_c)
    advantage, names = estimator.settings, ("advantage_scale", "advantage_eps", "singleton")
    group = tuple(getattr(advantage, name, None) for name in names)
    return shape, settings.mode, kl, (estimator.kind, *group)


@pytest.mark.parametrize("name", PRESETS)
def test_numbers(name):
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}}
    values["model"] = {"reference": "teacher" if name == "opd" else ""}
    values[section_of(name)] = {"num_generations": 4}
    config = parse(ConfigDict(complete(values)).to_dict()).algo
    loss, estimator = config.policy_loss(40), config.estimator()
    *expected, in_reward, beside = NUMBERS[name]
    assert told(loss, estimator) == tuple(expected)
    coef, mode, _ = config.reward_kl
    assert ((coef, canonical_mode(mode)) if coef else None) == in_reward
    assert {field: True for field in BESIDE if getattr(config, field, None)} == beside
    assert (config.distillation is not None) == (name == "opd")
    assert name != "opd" or (config.teacher_coef, config.reward_coef) == (1.0, 0.0)
    assert config.old_logprob == RATIO_FROM.get(name, "auto")
    # A run with the preset's name trains with the settings of the Python preset.
    chosen = preset(name)
    scale = {"loss_agg_scale": 40.0} if name == "dr_grpo" else {}
    assert told(chosen.policy_loss(**scale), chosen.advantage_estimator()) == tuple(expected)
    for found in (loss.settings, chosen.policy_loss(**scale).settings):
        assert (found.tau_positive, found.tau_negative, found.entropy_coef or 0.0) == (1.0, 1.05, 0.0)
        assert (found.cov_fraction, found.kl_cov_coef) == (2e-3 if name == "kl_cov" else 2e-4, 1.0)
        assert (found.clip_cov_low, found.clip_cov_high) == (1.0, 5.0)
        corrected = (found.correction, found.correction_bounds)
        assert corrected == CORRECTED.get(name, ("none", (0.0, float("inf"))))
        assert found.dppo_kl_coef == 1e-3
        assert found.length_eps == (1e-8 if name == "verl_grpo" else 0.0)
        assert found.loss_agg_scale == {"dr_grpo": 40.0, "tinker_ppo": 1.0}.get(name)
    for found in (estimator.settings, chosen.advantage_estimator().settings):
        rest = (found.gamma, getattr(found, "advantage_ddof", None), getattr(found, "gae_lambda", None))
        assert rest == ((1.0, None, 0.95) if name == "ppo" else (1.0, 1, None))


@pytest.mark.parametrize(("name", "cls"), [("grpo", GRPOConfig), ("ppo", PPOConfig)])
def test_an_algorithm_has_the_same_defaults_in_python_and_on_the_command_line(name, cls):
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}}
    told, mine = parse(ConfigDict(complete(values)).to_dict()).algo, cls()
    kl_mode = {"grpo": "kl_reward_mode", "ppo": "kl_method"}[name]
    assert mine.kind == told.kind and canonical_mode(getattr(mine, kl_mode)) == canonical_mode(getattr(told, kl_mode))
    # The values of these two settings have several names with the same meaning.
    same = {"policy_loss_fn": mine.policy_loss_fn, kl_mode: getattr(mine, kl_mode)}
    assert dataclasses.replace(told, **same) == mine
    assert mine.policy_loss(40).formula() == told.policy_loss(40).formula()


def test_every_preset_is_written_out():
    assert list(NUMBERS) == list(PRESETS)


VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "algorithms" / "core_algos.json").read_text())
# For each preset: the outputs of verl that the preset reproduces, and the settings in which verl's runs for these
# outputs differ from the preset.
ADVANTAGES = {
    **{name: ("grpo", {}) for name in ("grpo", "dapo", "verl_grpo", "tunix_grpo")},
    **{name: ("dr_grpo", {}) for name in ("dr_grpo", "reinforce")},
    **{name: (name, {}) for name in ("rloo", "opo", "gpg", "remax")},
    "pass_at_k": ("grpo_passk", {}),
    "reinforce_pp": ("reinforce_plus_plus g=.99", {"gamma": 0.99, "kl_in_reward": 0.0}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", {}),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_run_computes_the_advantages_of_the_vectors(name):
    """Parses a configuration, and compares the advantages of its estimator with verl's in float64."""
    key, changes = ADVANTAGES[name]
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}}
    values["grpo"] = {"num_generations": 2} | changes
    config = parse(ConfigDict(complete(values)).to_dict()).algo
    given = {field: np.array(VECTORS["inputs"][field]) for field in VECTORS["inputs"]}
    arrays = given["token_level_rewards"], given["remax_baseline"], given["response_mask"]
    found_BT = config.estimator()(*arrays, group_B=np.arange(len(arrays[0])) // 2)
    expected = VECTORS["advantages"][key]
    expected_BT = np.array(expected["adv"] if isinstance(expected, dict) else expected)
    np.testing.assert_allclose(found_BT, expected_BT, rtol=1e-9, atol=1e-9)
