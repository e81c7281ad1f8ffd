"""The named algorithms: the settings of advantage, loss and learner that define each of them."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from podrl.algorithms.aggregate import canonical_mode
from podrl.algorithms.estimator import AdvantageEstimator, GAESettings, GroupSettings
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss

PresetFields = Mapping[str, Any]  # fields of an algorithm's settings, with the values that a preset gives them


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings that define an algorithm; all other settings keep their defaults.

    Attributes:
      about: description, one line.
      source: paper or program that the preset follows.
      advantage: fields of `GroupSettings`, or of `GAESettings` for gae.
      loss: fields of `KLLossSettings`. If the mode needs `loss_agg_scale` and the preset has none, the run sets it to
        its completion limit.
      dialect: framework whose names of aggregation modes come first (`podrl.algorithms.aggregate.DIALECTS`); '' for no
        framework.
      learner: settings of the training loop: the KL in the reward (`kl_in_reward` and `kl_reward_mode`; `beta` and
        `kl_method` in PPO); `dynamic_sampling` (replaces groups of equal rewards); `overlong_shaping` (a penalty on the
        last tokens before the limit); `overlong_filter` (leaves cut-off samples out of the loss); `old_logprob` (the
        policy that the ratio starts from); `teacher_coef` and `reward_coef` (weights of the two parts of the
        advantage).
    """

    about: str
    source: str
    advantage: PresetFields
    loss: PresetFields
    learner: PresetFields
    dialect: str = ""

    @property
    def settings(self) -> PresetFields:
        """Fields of GRPOConfig (or of PPOConfig for gae) that the preset sets."""
        return {**self.advantage, **self.loss, **self.learner}

    def advantage_estimator(self, **overrides: Any) -> AdvantageEstimator:
        """Builds the preset's advantage estimator; `overrides` replace fields of its settings."""
        fields = dict(self.advantage) | overrides
        kind = GAESettings if fields.get("advantage_estimator") == "gae" else GroupSettings
        return AdvantageEstimator(kind(**fields))

    def policy_loss(self, **overrides: Any) -> PolicyLoss:
        """Builds the preset's loss; `overrides` replace fields of its settings."""
        fields: dict[str, Any] = dict(self.loss) | overrides
        fields["loss_agg_mode"] = self.mode(fields["loss_agg_mode"])
        return PolicyLoss(KLLossSettings(**fields))

    def mode(self, name: str, *, key: str = "grpo.loss_agg_mode") -> str:
        """Translates a name that the preset's framework has for an aggregation mode into podrl's name.

        Raises:
          ValueError: unknown or ambiguous name; the message names the config key `key`.
        """
        return canonical_mode(name, key=key, dialect=self.dialect)


def _preset(
    about: str,
    source: str,
    advantage: PresetFields | None = None,
    loss: PresetFields | None = None,
    learner: PresetFields | None = None,
    *,
    dialect: str = "",
) -> Preset:
    # beta is 0 unless the algorithm has a KL term, because a reference policy costs a forward pass per step.
    frozen = (
        MappingProxyType(dict(part)) for part in (advantage or {}, {"beta": 0.0} | dict(loss or {}), learner or {})
    )
    return Preset(about, source, *frozen, dialect=dialect)


def _loss(kind: str, mode: str, **fields: Any) -> PresetFields:
    return {"policy_loss_fn": kind, "loss_agg_mode": mode} | fields


_SEQUENCES, _TOKENS = "sequence-mean-token-mean", "token-mean"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": _preset(
            "Group relative policy optimisation, KL in the loss",
            "arXiv 2402.03300",
            loss=_loss("clip", _SEQUENCES, beta=0.04, kl_loss_mode="k3"),
        ),
        "dr_grpo": _preset(
            "GRPO without its two biases: no division by the standard deviation, none by the length",
            "arXiv 2503.20783",
            advantage={"advantage_scale": "none"},
            loss=_loss("clip", "sequence-mean-token-scale"),
        ),
        "dapo": _preset(
            "Clip-higher, token mean, dynamic sampling, overlong shaping",
            "arXiv 2503.14476",
            loss=_loss("clip", _TOKENS, epsilon_high=0.28),
            learner={"dynamic_sampling": True, "overlong_shaping": True},
        ),
        "gspo": _preset(
            "One ratio per sequence",
            "arXiv 2507.18071",
            loss=_loss("gspo", _SEQUENCES, epsilon_low=3e-4, epsilon_high=4e-4),
        ),
        "gspo_token": _preset(
            "One ratio per sequence, gradient per token",
            "arXiv 2507.18071, section 4.3",
            loss=_loss("gspo_token", _SEQUENCES, epsilon_low=3e-4, epsilon_high=4e-4),
        ),
        "cispo": _preset(
            "Clipped importance weight, every token keeps its gradient; weight at most 5, no lower bound",
            "arXiv 2506.13585, bound of arXiv 2510.13786",
            loss=_loss("cispo", _TOKENS, epsilon_low=1.0, epsilon_high=4.0),
        ),
        "sapo": _preset(
            "Smooth gate in place of the clip",
            "arXiv 2511.20347",
            loss=_loss("sapo", _SEQUENCES),
        ),
        "gmpo": _preset(
            "Geometric mean of token ratios",
            "arXiv 2507.20673",
            loss=_loss("gmpo", _SEQUENCES, epsilon_low=0.4, epsilon_high=0.4),
        ),
        "clip_cov": _preset(
            "PPO clip, tokens of large covariance cut off to keep the entropy up",
            "arXiv 2505.22617",
            loss=_loss("clip_cov", _TOKENS),
        ),
        "kl_cov": _preset(
            "Policy gradient, tokens of the largest covariance held by a KL penalty",
            "arXiv 2505.22617",
            loss=_loss("kl_cov", _TOKENS, cov_fraction=2e-3),
        ),
        "dppo": _preset(
            "Tokens masked by how far their probability has moved, not by their ratio",
            "arXiv 2602.04879, numbers of prime-rl",
            advantage={"advantage_scale": "none"},
            loss=_loss("dppo", _TOKENS),
            learner={"old_logprob": "sampler"},
        ),
        "ipo": _preset(
            "Tokens masked by how far their probability has moved either way",
            "prime-rl, August 2026",
            advantage={"advantage_scale": "none"},
            loss=_loss("ipo", _TOKENS, epsilon=0.1),
            learner={"old_logprob": "sampler"},
        ),
        "opd": _preset(
            "On-policy distillation: a teacher, model.reference, in the place of rewards",
            "arXiv 2306.13649; Thinking Machines, October 2025",
            loss=_loss("clip", _TOKENS),
            learner={"teacher_coef": 1.0, "reward_coef": 0.0},
        ),
        "rloo": _preset(
            "REINFORCE with a leave-one-out baseline, KL in the reward",
            "arXiv 2402.14740",
            advantage={"advantage_estimator": "rloo"},
            loss=_loss("reinforce", "sequence-mean-token-sum"),
            learner={"kl_in_reward": 0.05, "kl_reward_mode": "k1"},
        ),
        "reinforce": _preset(
            "Plain policy gradient on centred rewards",
            "Williams 1992",
            advantage={"advantage_scale": "none"},
            loss=_loss("reinforce", _TOKENS),
        ),
        "reinforce_pp": _preset(
            "REINFORCE++: PPO's clip and KL reward without a critic, whitened over the batch",
            "arXiv 2501.03262",
            advantage={"advantage_estimator": "reinforce_plus_plus"},
            loss=_loss("clip", _TOKENS),
            learner={"kl_in_reward": 0.01, "kl_reward_mode": "k1"},
        ),
        "reinforce_pp_baseline": _preset(
            "REINFORCE++ with the group mean as baseline, k2 in the loss",
            "arXiv 2501.03262",
            advantage={"advantage_estimator": "reinforce_plus_plus_baseline"},
            loss=_loss("clip", _TOKENS, beta=1e-3, kl_loss_mode="k2"),
        ),
        "remax": _preset(
            "REINFORCE with the greedy completion's reward as baseline",
            "arXiv 2310.10505",
            advantage={"advantage_estimator": "remax"},
            loss=_loss("reinforce", "sequence-mean-token-sum"),
        ),
        "opo": _preset(
            "On-policy REINFORCE with the variance-optimal baseline",
            "arXiv 2505.23585",
            advantage={"advantage_estimator": "opo"},
            loss=_loss("reinforce", _TOKENS),
        ),
        "gpg": _preset(
            "Group policy gradient: no clip, no KL, no reference",
            "arXiv 2504.02546",
            advantage={"advantage_estimator": "gpg"},
            loss=_loss("gpg", _TOKENS),
        ),
        "pass_at_k": _preset(
            "Only the best sample of a group learns",
            "arXiv 2503.19595",
            advantage={"advantage_estimator": "pass_at_k"},
            loss=_loss("clip", _SEQUENCES),
        ),
        "ppo": _preset(
            "Actor and critic, GAE, KL in the reward",
            "arXiv 1707.06347, 1909.08593",
            advantage={"advantage_estimator": "gae", "gamma": 1.0, "gae_lambda": 0.95},
            loss=_loss("clip", _TOKENS),
            learner={"beta": 0.04, "kl_method": "k3"},
        ),
        "verl_grpo": _preset(
            "verl's GRPO: adv_estimator=grpo, use_kl_loss=True",
            "verl 0.10.0.dev, 22 August 2026",
            advantage={"advantage_eps": 1e-6, "singleton": "raw"},
            loss=_loss(
                "clip",
                _TOKENS,
                epsilon_c=3.0,
                beta=1e-3,
                kl_loss_mode="low_var_kl",
                kl_clamp_value=10.0,
                length_eps=1e-8,
            ),
            dialect="verl",
        ),
        "trl_grpo": _preset(
            "TRL's GRPOTrainer: loss_type='dapo', sequences left out by their sampler's mismatch",
            "TRL 1.10.0.dev0, 24 July 2026",
            advantage={"advantage_eps": 1e-4},
            loss=_loss("clip", _TOKENS, kl_loss_mode="k3", sampler_correction="sequence_mask", correction_high=3.0),
            dialect="trl",
        ),
        "prime_rl": _preset(
            "prime-rl's default: IPO on centred rewards, the ratio starting from the sampler",
            "prime-rl 0.8.0, 27 August 2026",
            advantage={"advantage_scale": "none"},
            loss=_loss("ipo", _TOKENS, epsilon=0.1, dppo_kl_coef=1e-3),
            learner={"old_logprob": "sampler"},
        ),
        "open_instruct_grpo": _preset(
            "open-instruct's GRPO: clip-higher on centred rewards, token truncation of the sampler's mismatch",
            "open-instruct, 20 August 2026",
            advantage={"advantage_scale": "none"},
            loss=_loss(
                "clip",
                _TOKENS,
                epsilon_high=0.272,
                beta=0.05,
                kl_loss_mode="k3",
                sampler_correction="tis",
                correction_high=2.0,
            ),
        ),
        "nemo_grpo": _preset(
            "NeMo-RL's GRPO: leave-one-out baseline and spread, KL in the loss",
            "NeMo-RL 0.7.0, 29 July 2026",
            advantage={"advantage_estimator": "rloo_std", "advantage_eps": 1e-6},
            loss=_loss("clip", _TOKENS, beta=0.01, kl_loss_mode="k3", kl_clamp_value=10.0),
        ),
        "slime_grpo": _preset(
            "slime's GRPO: clip, mean over samples, no KL",
            "slime 0.3.1, 21 August 2026",
            advantage={"advantage_eps": 1e-6},
            loss=_loss("clip", _SEQUENCES),
        ),
        "areal": _preset(
            "AReaL's decoupled PPO on groups: the clip from the trainer's policy, tokens beyond a weight of 5 left out",
            "AReaL 2.0.0, 22 August 2026, gsm8k_grpo.yaml",
            advantage={"advantage_eps": 1e-5},
            loss=_loss(
                "clip", _TOKENS, epsilon=0.4, sampler_correction="icepop", correction_low=0.0, correction_high=5.0
            ),
            learner={"old_logprob": "trainer"},
        ),
        "tinker_ppo": _preset(
            "Tinker's loss_fn='ppo' on centred rewards: summed over tokens, the ratio starting from the sampler",
            "tinker-cookbook, 19 August 2026",
            advantage={"advantage_scale": "none"},
            loss=_loss("clip", "token-sum-scale", loss_agg_scale=1.0),
            learner={"old_logprob": "sampler"},
        ),
        "tunix_grpo": _preset(
            "Tunix's arithmetic: GRPOConfig's defaults (version 0.1.7)",
            "Tunix algo_core.py",
            advantage={"advantage_eps": 1e-6},
            loss=_loss("grpo", _SEQUENCES, beta=0.04, kl_loss_mode="kl"),
            dialect="tunix",
        ),
    }
)


def preset(name: str) -> Preset:
    """Looks up a preset by name.

    Raises:
      ValueError: unknown name; the message gives the nearest known names.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"algorithm={name!r} is not known: {hint}There are {', '.join(PRESETS)}.")
