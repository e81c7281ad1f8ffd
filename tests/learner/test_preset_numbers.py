"""Every number of every preset, written out: what a run trains with when nothing else is said."""

import json
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.kl import canonical_mode
from podrl.algorithms.presets import PRESETS, preset
from podrl.learner import job

SEQUENCES, TOKENS = "sequence-mean-token-mean", "token-mean"
SUMS, SCALED = "sequence-mean-token-sum", "sequence-mean-token-scale"
NO_KL, K1 = (0.0, "", None), (0.04, "k1", None)
DAPO = {"dynamic_sampling": True, "overlong_shaping": True}

# preset: (loss, low, high, dual clip), aggregation, KL in the loss (beta, form, clamp),
#   (estimator, scale, eps, lone samples), KL in the reward (coefficient, form), beside.
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
    "ppo": (CLIP, TOKENS, NO_KL, ("gae", "std", 1e-6, "zero"), (0.04, "k3"), {}),
    "verl_grpo": (("clip", 0.2, 0.2, 3.0), TOKENS, (1e-3, "k3", 10.0), ("grpo", "std", 1e-6, "raw"), None, {}),
    "trl_grpo": (CLIP, TOKENS, NO_KL, ("grpo", "std", 1e-4, "zero"), None, {}),
    "tunix_grpo": (CLIP, SEQUENCES, K1, GRPO, None, {}),
}
BESIDE = (
    *("dynamic_sampling", "overlong_shaping", "overlong_filter", "no_stop_reward", "kl_target", "max_staleness"),
    *("whiten_rewards",),
)


def told(loss, estimator):
    """What the first four columns say of a loss and an advantage."""
    kl = (loss.beta, canonical_mode(loss.kl_loss_mode), loss.kl_clamp_value) if loss.beta else NO_KL
    shape = (loss.kind, loss.low, loss.high, loss.epsilon_c)
    return (
        *(shape, loss.mode, kl),
        (estimator.kind, estimator.advantage_scale, estimator.advantage_eps, estimator.singleton),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_numbers(name):
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}}
    values[job.section_of(name)] = {"num_generations": 4}
    config = job.parse(ConfigDict(job.complete(values)).to_dict()).algo
    loss, estimator = config.policy_loss(40), config.estimator()
    *expected, in_reward, beside = NUMBERS[name]
    assert told(loss, estimator) == tuple(expected)
    coef, mode = config.reward_kl()
    assert ((coef, canonical_mode(mode)) if coef else None) == in_reward
    assert {field: True for field in BESIDE if getattr(config, field, None)} == beside
    # What a preset of Python's gives is what a run of that name trains with.
    chosen = preset(name)
    scale = {"loss_agg_scale": 40.0} if loss.loss_agg_scale else {}
    assert told(chosen.policy_loss(**scale), chosen.advantage_estimator()) == tuple(expected)
    for found in (loss, chosen.policy_loss(**scale)):
        assert (found.tau_positive, found.tau_negative, found.entropy_coef) == (1.0, 1.05, 0.0)
        assert (found.cov_fraction, found.kl_cov_coef) == (2e-3 if name == "kl_cov" else 2e-4, 1.0)
        assert (found.clip_cov_low, found.clip_cov_high, found.sampler_correction) == (1.0, 5.0, "none")
        assert found.length_eps == (1e-8 if name == "verl_grpo" else 0.0)
        assert found.loss_agg_scale == (40.0 if name == "dr_grpo" else None)
    for found in (estimator, chosen.advantage_estimator()):
        assert (found.advantage_ddof, found.gamma, found.gae_lambda) == (1, 1.0, 0.95)


def test_every_preset_is_written_out():
    assert list(NUMBERS) == list(PRESETS)


VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "algorithms" / "core_algos.json").read_text())
# preset: the outputs of verl that a run of it reproduces, and what their settings change of it.
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
    """From the configuration line to the array that the learner packs, in float64 up to there."""
    key, changes = ADVANTAGES[name]
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}}
    values["grpo"] = {"num_generations": 2} | changes
    config = job.parse(ConfigDict(job.complete(values)).to_dict()).algo
    given = {field: np.array(VECTORS["inputs"][field]) for field in VECTORS["inputs"]}
    found_BT = config.advantage(given["token_level_rewards"], given["remax_baseline"], given["response_mask"])
    expected = VECTORS["advantages"][key]
    expected_BT = np.array(expected["adv"] if isinstance(expected, dict) else expected)
    np.testing.assert_allclose(found_BT, expected_BT, rtol=1e-9, atol=1e-9)
