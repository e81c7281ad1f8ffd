"""Compares each preset named after another system with that system's own defaults, field by field."""

import math

import pytest
from ml_collections import ConfigDict

from podrl.algorithms.presets import PRESETS
from podrl.job.config import complete, parse

# For each system: its version with the date, and rows (the system's field, the system's value, podrl's field, podrl's
# value). Values that are numbers must be equal; docs/algorithms.md explains both values where they are words.
SOURCES = {
    "trl_grpo": (
        "TRL 1.10.0.dev0, 24 July 2026",
        ("beta", 0.0, "beta", 0.0),
        ("epsilon", 0.2, "epsilon", 0.2),
        ("epsilon_high", None, "epsilon_high", None),
        ("delta", None, "epsilon_c", None),
        ("importance_sampling_level", "token", "kind", "clip"),
        ("loss_type", "dapo", "mode", "token-mean"),
        ("scale_rewards", "group", "advantage_scale", "std"),
        ("added to the standard deviation (grpo_trainer.py)", 1e-4, "advantage_eps", 1e-4),
        ("vllm_importance_sampling_correction", True, "correction", "sequence_mask"),
        ("vllm_importance_sampling_mode", "sequence_mask", "sampler_correction", "sequence_mask"),
        ("vllm_importance_sampling_clip_max", 3.0, "correction_high", 3.0),
        ("vllm_importance_sampling_clip_min", None, "correction_low", None),
        ("mask_truncated_completions", False, "overlong_filter", False),
        ("num_iterations", 1, "num_iterations", 1),
    ),
    "prime_rl": (
        "prime-rl 0.8.0 after its change #3418, 27 August 2026",
        ("trainer.loss.type", "ipo", "kind", "ipo"),
        ("trainer.loss.eps", 0.1, "epsilon", 0.1),
        ("trainer.loss.kl_tau", 1e-3, "dppo_kl_coef", 1e-3),
        ("trainer.loss.adv_tau", 1.0, "reward_coef", 1.0),
        ("algo.type (reward - mean of the group)", "grpo", "advantage_scale", "none"),
        ("rl_scale (number of tokens)", "tokens", "mode", "token-mean"),
        ("inference_logprobs (start of the ratio)", "inference", "old_logprob", "sampler"),
        ("correction beside the ratio", "none", "correction", "none"),
    ),
    "verl_grpo": (
        "verl 0.10.0.dev, 22 August 2026, with what its page of GRPO asks for",
        ("actor.clip_ratio_low", 0.2, "low", 0.2),
        ("actor.clip_ratio_high", 0.2, "high", 0.2),
        ("actor.clip_ratio_c", 3.0, "epsilon_c", 3.0),
        ("actor.policy_loss.loss_mode", "vanilla", "kind", "clip"),
        ("actor.loss_agg_mode", "token-mean", "mode", "token-mean"),
        ("actor.entropy_coeff", 0, "entropy_coef", 0.0),
        ("actor.kl_loss_coef (use_kl_loss: True)", 0.001, "beta", 0.001),
        ("actor.kl_loss_type", "low_var_kl", "kl_loss_mode", "low_var_kl"),
        ("bound of low_var_kl (core_algos.py)", 10.0, "kl_clamp_value", 10.0),
        ("added to the length (core_algos.py)", 1e-8, "length_eps", 1e-8),
        ("algorithm.adv_estimator", "grpo", "advantage_estimator", "grpo"),
        ("algorithm.norm_adv_by_std_in_grpo", True, "advantage_scale", "std"),
        ("epsilon of the advantage (core_algos.py)", 1e-6, "advantage_eps", 1e-6),
        ("a group of one (core_algos.py)", "its reward", "singleton", "raw"),
        ("algorithm.use_kl_in_reward", False, "kl_in_reward", 0.0),
        ("rollout_correction.rollout_is", None, "correction", "none"),
        ("actor.ppo_epochs", 1, "num_iterations", 1),
    ),
    "open_instruct_grpo": (
        "open-instruct e6c3044, 20 August 2026",
        ("loss_fn", "dapo", "kind", "clip"),
        ("clip_lower", 0.2, "low", 0.2),
        ("clip_higher", 0.272, "high", 0.272),
        ("beta", 0.05, "beta", 0.05),
        ("kl_estimator", 2, "kl_loss_mode", "k3"),
        ("loss_denominator", "token", "mode", "token-mean"),
        ("advantage_normalization_type", "centered", "advantage_scale", "none"),
        ("use_rho_correction", True, "correction", "tis"),
        ("rho_clamp_upper_bound", 2.0, "correction_high", 2.0),
        ("rho_mask_upper_bound (0 disables)", 0.0, "correction_low", None),
        ("mask_truncated_completions", False, "overlong_filter", False),
        ("active_sampling", False, "dynamic_sampling", False),
    ),
    "nemo_grpo": (
        "NeMo-RL 0.7.0, 29 July 2026, grpo_math_1B.yaml",
        ("loss_fn.ratio_clip_min", 0.2, "low", 0.2),
        ("loss_fn.ratio_clip_max", 0.2, "high", 0.2),
        ("loss_fn.ratio_clip_c", None, "epsilon_c", None),
        ("loss_fn.reference_policy_kl_penalty", 0.01, "beta", 0.01),
        ("loss_fn.reference_policy_kl_type", "k3", "kl_loss_mode", "k3"),
        ("loss_fn.kl_output_clamp_value", 10.0, "kl_clamp_value", 10.0),
        ("loss_fn.token_level_loss", True, "mode", "token-mean"),
        ("loss_fn.sequence_level_importance_ratios", False, "kind", "clip"),
        ("loss_fn.use_importance_sampling_correction", False, "correction", "none"),
        ("grpo.use_leave_one_out_baseline", True, "advantage_estimator", "rloo_std"),
        ("epsilon of the advantage (advantage_estimator.py)", 1e-6, "advantage_eps", 1e-6),
        ("grpo.use_dynamic_sampling", False, "dynamic_sampling", False),
        ("grpo.overlong_filtering", False, "overlong_filter", False),
    ),
    "slime_grpo": (
        "slime 0.3.1, 21 August 2026",
        ("loss-type", "policy_loss", "kind", "clip"),
        ("eps-clip", 0.2, "low", 0.2),
        ("eps-clip-high", None, "high", 0.2),
        ("eps-clip-c", None, "epsilon_c", None),
        ("advantage-estimator", "grpo", "advantage_estimator", "grpo"),
        ("grpo_std_normalization", True, "advantage_scale", "std"),
        ("added to the standard deviation (rollout.py)", 1e-6, "advantage_eps", 1e-6),
        ("calculate-per-token-loss", False, "mode", "sequence-mean-token-mean"),
        ("use-kl-loss", False, "beta", 0.0),
        ("kl-coef", 0.0, "kl_in_reward", 0.0),
        ("entropy-coef", 0.0, "entropy_coef", 0.0),
        ("use-tis", False, "correction", "none"),
        ("use-rollout-logprobs", False, "old_logprob", "auto"),
    ),
    "areal": (
        "AReaL 2.0.0, 22 August 2026, examples/math/gsm8k_grpo.yaml",
        ("actor.use_sapo_loss, use_cispo_loss", False, "kind", "clip"),
        ("actor.eps_clip", 0.4, "epsilon", 0.4),
        ("actor.eps_clip_higher", None, "epsilon_high", None),
        ("actor.c_clip", None, "epsilon_c", None),
        ("actor.kl_ctl", 0.0, "kl_in_reward", 0.0),
        ("actor.use_decoupled_loss", True, "old_logprob", "trainer"),
        ("actor.rejection_sampling.metric (action mask)", "ratio", "correction", "icepop"),
        ("actor.rejection_sampling.upper", 5.0, "correction_high", 5.0),
        ("actor.rejection_sampling.lower", None, "correction_low", 0.0),
        ("actor.reward_norm.mean_level", "group", "advantage_estimator", "grpo"),
        ("actor.reward_norm.std_level", "group", "advantage_scale", "std"),
        ("actor.reward_norm.std_unbiased", True, "advantage_ddof", 1),
        ("actor.reward_norm.eps", 1e-5, "advantage_eps", 1e-5),
        ("divisor of the loss (number of tokens)", "tokens", "mode", "token-mean"),
    ),
    "tinker_ppo": (
        "tinker-cookbook 9dfcc3a, 19 August 2026, and Tinker's page of losses",
        ("loss_fn", "ppo", "kind", "clip"),
        ("1 - clip_low_threshold", 0.2, "low", 0.2),
        ("clip_high_threshold - 1", 0.2, "high", 0.2),
        ("loss.sum()", "sum", "mode", "token-sum-scale"),
        ("divisor of the sum", 1.0, "loss_agg_scale", 1.0),
        ("compute_advantages (reward - mean of the group)", "centred", "advantage_scale", "none"),
        ("logprobs (start of the ratio)", "sampling", "old_logprob", "sampler"),
        ("kl_penalty_coef", 0.0, "kl_in_reward", 0.0),
        ("num_substeps", 1, "num_iterations", 1),
    ),
}


def chosen(name):
    """Reads the configuration of a run that sets only the algorithm."""
    values = {"algorithm": name, "trainer": {"max_steps": 1, "eval_every_n_steps": 0}, "grpo": {"num_generations": 4}}
    return parse(ConfigDict(complete(values)).to_dict()).algo


@pytest.mark.parametrize("name", SOURCES)
def test_a_preset_has_the_defaults_of_the_system_it_names(name):
    version, *fields = SOURCES[name]
    config = chosen(name)
    for theirs, value, ours, expected in fields:
        assert getattr(config, ours) == expected, (name, version, theirs, ours)
        if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (value, expected)):
            assert math.isclose(value, expected), (name, theirs)
    date = version.split(", ")[1]
    assert date in PRESETS[name].source, "the source of a preset names the date of the version"


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_else_of_a_preset_differs_from_podrls_defaults(name):
    """Every field that a preset sets has a row in SOURCES, under its own name or under the name in `derived`."""
    derived = {
        "policy_loss_fn": "kind",
        "loss_agg_mode": "mode",
        "epsilon": "low",
        "epsilon_high": "high",
        "sampler_correction": "correction",
    }
    held = {ours for _, _, ours, _ in SOURCES[name][1:]}
    loose = {key for key in PRESETS[name].settings if key not in held and derived.get(key) not in held}
    assert loose <= {"beta", "kl_loss_mode"}, loose  # with beta=0 the form of the KL has no effect
    assert not loose or PRESETS[name].settings["beta"] == 0
