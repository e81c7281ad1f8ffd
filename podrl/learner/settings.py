"""Settings of the algorithms under Tunix's names: settings that GRPO and PPO share, and settings of each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float, Int

from podrl.algorithms import kl
from podrl.algorithms.aggregate import SCALED_MODES
from podrl.algorithms.distill import Distillation, Teacher, TeacherKL
from podrl.algorithms.echo import observed
from podrl.algorithms.estimator import AdvantageEstimator, AdvantageSettings, GAESettings, GroupSettings
from podrl.algorithms.policy_loss import PENALISED, KLLossSettings, LossSettings, PolicyLoss
from podrl.algorithms.shaping import overlong_penalty
from podrl.config import Count, Finite, Natural, NonNegative, Positive, Range, plural, section
from podrl.engine.config import RolloutConfig
from podrl.mappings import ConfigValues
from podrl.trainer import custom
from podrl.types import SOURCE, STOP_DEADLINE, STOP_LENGTH, Experience, LeftOut, Rollouts

# Settings of the loss that all samples of an update share; a mixture's sources cannot change them.
_SHARED = ("kl_clamp_value", "entropy_coef", "loss_agg_mode", "loss_agg_scale", "length_eps", "sampler_correction")
_SHARED += ("correction_low", "correction_high")
# Settings that choose and shape the surrogate, settings of the advantage, and all settings that a source may change.
_SURROGATE = tuple(f.name for f in dataclasses.fields(LossSettings) if f.name not in _SHARED)
_ADVANTAGE = tuple(f.name for f in dataclasses.fields(GroupSettings))
PER_SOURCE = ("reward_coef", "observation_coef", "teacher_coef", *_SURROGATE, *_ADVANTAGE)


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(LossSettings, AdvantageSettings):
    """Settings that GRPOConfig and PPOConfig share; settings of the loss and of the advantage are inherited.

    Attributes:
      reward_manager: level of the rewards; 'sequence-level' is one reward for a completion, on its last token.
      num_generations: G, samples per prompt.
      num_iterations: mu, passes over each batch of samples.

      old_logprob: source of the log-probabilities in the ratio's denominator. 'current': the policy itself, exact if a
        batch of fresh samples makes one update. 'trainer': a forward pass before the first update. 'sampler': the
        numbers that the engine reported. 'auto': 'sampler' for stale samples without a correction, 'trainer' for
        several updates, a KL in the reward, or a teacher with teacher_kl='sampled', else 'current'.
      max_staleness: number of steps by which the sampling policy may be behind the trainer; 0 is strictly on-policy;
        from 2 on, and with rollout.clock='wall', weights may change inside samples (docs/async.md).
      stale_bound: largest age, in steps, of a token that adds to the policy loss; older tokens still count in
        denominators, KL and entropy. None for no bound.
      dynamic_sampling: True if groups whose rewards are all equal are replaced by groups of further prompts (DAPO).
      dynamic_sampling_batches: number of prompt batches that a step takes from the data with dynamic sampling: one to
        train on, the others in reserve. Prompts that are not needed are skipped, so the data position never depends on
        results.
      overlong_shaping: True if completions lose reward over the last `overlong_buffer` tokens before the limit (DAPO).
      overlong_buffer: number of tokens before the limit over which reward is lost; None is a fifth of
        rollout.max_tokens_to_generate.
      overlong_penalty: reward lost at the limit.
      overlong_filter: True if completions cut off by the limit leave the loss; their rewards still count in their
        groups.
      no_stop_reward: reward of a completion that the limit cut off, in place of its own reward; None keeps the
        completion's own reward.
      kl_target: target of the KL to the reference, nats per token: the KL's coefficient (in the loss or in the reward)
        is adapted to reach it; None keeps the coefficient fixed.
      kl_horizon: number of samples over which the coefficient changes by at most a fifth.
      mismatch_bound: mean |trainer's log-probability - sampler's log-probability| per token, nats, above which a step
        warns and counts for mismatch_patience. With max_staleness=0 a step warns from 0.05 on at the latest.
      mismatch_patience: number of steps in a row above the bound after which the run stops; 0 only warns.
    """

    reward_manager: Literal["sequence-level"] = "sequence-level"
    num_generations: Count = 2
    num_iterations: Count = 1

    old_logprob: Literal["auto", "current", "trainer", "sampler"] = "auto"
    # Each step of staleness costs a batch in flight, and under topology=split a copy of the weights on every trainer.
    max_staleness: Annotated[int, Range("[0, 256]")] = 0
    stale_bound: Count | None = None
    dynamic_sampling: bool = False
    dynamic_sampling_batches: Annotated[int, Range("[2, 2147483647]")] = 3
    overlong_shaping: bool = False
    overlong_buffer: Count | None = None
    overlong_penalty: NonNegative = 1.0
    overlong_filter: bool = False
    no_stop_reward: Finite | None = None
    kl_target: Positive | None = None
    kl_horizon: Positive = 10_000.0
    mismatch_bound: Positive = 0.2
    mismatch_patience: Natural = 5

    def __post_init__(self):
        self.check_loss()
        self.check_advantage()
        self._own_loss()
        if self.dynamic_sampling and self.num_generations < 2:
            raise ValueError(
                f"{self.section}.dynamic_sampling=True needs {self.section}.num_generations of at least 2, not "
                f"{self.num_generations}: a single sample never differs from its group."
            )
        if self.kl_target is not None:
            self._check_steered(self.kl_target)
        if self.stale_bound is not None:
            self._check_stale(self.stale_bound)

    def _check_stale(self, bound: int) -> None:
        """Refuses a `stale_bound` that no token can exceed, or that the loss cannot apply to single tokens."""
        key = f"{self.section}.stale_bound={bound}"
        if bound >= self.max_staleness:
            raise ValueError(
                f"{key} leaves nothing out, because samples are at most {self.section}.max_staleness="
                f"{plural(self.max_staleness, 'step')} old: use a smaller bound, or None."
            )
        if self.kind == "gmpo":
            raise ValueError(f"{key} drops single tokens, but gmpo has one ratio per sequence: use None.")

    def _check_steered(self, target: float) -> None:
        """Refuses a `kl_target` unless the KL is in exactly one of loss and reward."""
        coefs = self.kl_coefs()
        used = [f"{self.section}.{field}={coef:g}" for field, coef in coefs.items() if coef > 0]
        if not used:
            raise ValueError(
                f"{self.section}.kl_target={target} adapts the coefficient of the KL to the reference, and this "
                f"coefficient is 0: set {' or '.join(f'{self.section}.{field}' for field in coefs)} above 0."
            )
        if len(used) > 1:
            raise ValueError(
                f"{self.section}.kl_target={target} adapts one coefficient, but the KL to the reference has two, "
                f"{' and '.join(used)}: set one of these keys to 0."
            )

    # Objects and numbers that the learner derives from the settings.

    @functools.cached_property
    def parts(self) -> Sequence[Any]:
        """The different settings that samples may have; entry 0 is for sources without settings of their own."""
        return [self]

    @functools.cached_property
    def number_of(self) -> Mapping[str, int]:
        """Maps each source with settings of its own to the index of these settings in `parts`."""
        return {}

    @functools.cached_property
    def loss_of_part(self) -> Sequence[int]:
        """Number of the surrogate of each of `parts`; parts with the same surrogate have the same number."""
        shapes = [{name: getattr(part, name) for name in _SURROGATE} for part in self.parts]
        different = [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]
        return [different.index(shape) for shape in shapes]

    def part_of(self, experience: Experience) -> Int[np.ndarray, " B"]:
        """Returns the number in `parts` of each sample's settings."""
        return np.zeros(len(experience.rollouts.length_B), np.int32)

    def of_samples(self, read: Callable[[Any], float | bool], experience: Experience) -> np.ndarray:
        """Returns, for each sample, the number that `read` finds in the sample's settings; shape (B,)."""
        return np.asarray([read(part) for part in self.parts])[self.part_of(experience)]

    @property
    def reward_kl(self) -> kl.Penalty:
        """The KL to the reference in the reward."""
        raise NotImplementedError

    @property
    def distillation(self) -> Distillation | None:
        """Settings of the teacher, whose divergence from the policy enters advantage or loss; None for no teacher."""
        return None

    @property
    def observed_weight(self) -> float:
        """Largest weight, over all samples, of a token from an environment; 0 if no such token is learned."""
        return 0.0

    def observed(self, experience: Experience) -> Float[np.ndarray, "B T"]:
        """Returns 1 on tokens from environments in samples that count in the loss, 0 elsewhere."""
        rollouts = experience.rollouts
        in_B = self.masked_out(experience) == LeftOut.NOT
        return np.where(in_B[:, None], observed(rollouts.mask_BT, rollouts.length_B, rollouts.piece_BT), np.float32(0))

    def kl_coefs(self) -> dict[str, float]:
        """Maps the fields that set a KL coefficient, in the loss or in the reward, to their values."""
        raise NotImplementedError

    def estimator(self) -> AdvantageEstimator:
        """Builds the configured advantage estimator."""
        raise NotImplementedError

    def policy_loss(self, max_tokens: int) -> PolicyLoss:
        """Builds the configured policy loss; `max_tokens` is rollout.max_tokens_to_generate."""
        own, settings = self._own_loss(), self
        if self.mode in SCALED_MODES and self.loss_agg_scale is None:
            settings = dataclasses.replace(self, loss_agg_scale=float(max_tokens))
        numbers = self.loss_of_part
        first = [part for i, part in enumerate(self.parts) if numbers[i] not in numbers[:i]]
        others = tuple(part.policy_loss(max_tokens) for part in first[1:])
        return PolicyLoss(settings, own, oldest=self.max_staleness, stale_bound=self.stale_bound, others=others)

    def _own_loss(self) -> Callable[..., Any] | None:
        """Loads the user's token loss, if the settings name one."""
        key = f"{self.section}.policy_loss_fn"
        return custom.loss(self.policy_loss_fn, self.policy_loss_args, key) if self.own_loss else None

    @property
    def correction(self) -> str:
        """The sampler correction in use; 'auto' is tis for stale samples, unless old_logprob='sampler' needs none."""
        stale = self.max_staleness and self.old_logprob != "sampler"
        return "tis" if self.sampler_correction == "auto" and stale else super().correction

    def old_source(self, updates_per_step: int) -> str:
        """Decides the source of old log-probabilities: 'current', 'trainer' or 'sampler'."""
        if self.old_logprob != "auto":
            return self.old_logprob
        if self.max_staleness and self.correction == "none":
            return "sampler"
        scored = self.reward_kl.coef or (self.distillation is not None and self.distillation.sampled)
        return "current" if updates_per_step == 1 and not scored else "trainer"

    def warnings(self, updates_per_step: int) -> list[str]:
        """Lists legal settings that are probably a mistake, including settings of the loss, one sentence each."""
        name, old = self.section, self.old_source(updates_per_step)
        found = list(self.policy_loss(max_tokens=1).warnings())  # warnings do not depend on max_tokens
        if old == "sampler" and self.correction != "none":
            found.append(
                f"{name}.sampler_correction={self.sampler_correction!r} does nothing: the ratio starts from the "
                f"sampler already ({name}.old_logprob='sampler'), so the correction is 1. Set {name}.old_logprob="
                f"'auto', or {name}.sampler_correction='none'."
            )
        if old == "sampler" and (bare := [part for part in self.parts if part.kind == "reinforce"]):
            found.append(
                f"{name}.policy_loss_fn={bare[0].policy_loss_fn!r} has no ratio, so {name}.old_logprob='sampler' "
                f"corrects nothing: samples of older weights count as if they were new. Set {name}.old_logprob="
                f"'auto' and {name}.sampler_correction='auto'."
            )
        if old == "current" and updates_per_step > 1:
            found.append(
                f"{name}.old_logprob='current' with {updates_per_step} updates per step holds the ratio at 1 in all of "
                f"them, so nothing is clipped: set {name}.old_logprob='auto', or make one update per step "
                f"({name}.num_iterations=1, trainer.mini_batch_size=None)."
            )
        return found

    def check_clock(self, rollout: RolloutConfig, calls_per_window: int | None) -> None:
        """Refuses settings that do not go with rollout.clock, and settings of windows in a run that has no windows.

        Raises:
          ValueError: there is such a setting; the message names its key.
        """
        name = self.section
        if rollout.clock == "tokens":
            windows = {"rollout.window_tokens": rollout.window_tokens, "env.calls_per_window": calls_per_window}
            for key, value in windows.items():
                if value is not None and self.max_staleness < 2:
                    raise ValueError(
                        f"{key}={value} has no effect with {name}.max_staleness={self.max_staleness}, where one "
                        "version of the weights draws all tokens of a sample: set "
                        f"{name}.max_staleness to at least 2, or leave {key} out."
                    )
            return
        if not self.max_staleness:
            raise ValueError(
                f"rollout.clock='wall' does not go with {name}.max_staleness=0, where every step waits for samples of "
                f"its own weights: set {name}.max_staleness to at least 1, or rollout.clock='tokens'."
            )
        windows = {"rollout.window_tokens": (rollout.window_tokens, "tokens")}
        windows |= {"env.calls_per_window": (calls_per_window, "calls")}
        for key, (value, counted) in windows.items():
            if value is not None:
                raise ValueError(
                    f"rollout.clock='wall' does not go with {key}={value}, because time ends a window, not the number "
                    f"of its {counted}: leave {key} out, or set rollout.clock='tokens'."
                )

    def check_curriculum(self, rollout: RolloutConfig) -> None:
        """Refuses settings that data.curriculum cannot be combined with.

        Raises:
          ValueError: there is such a setting; the message names its key.
        """
        if rollout.clock != "tokens":
            raise ValueError(
                f"data.curriculum does not go with rollout.clock={rollout.clock!r}, where the clock decides which step "
                "trains on a prompt: set rollout.clock='tokens', or leave data.curriculum out."
            )
        if self.dynamic_sampling:
            raise ValueError(
                f"data.curriculum does not go with {self.section}.dynamic_sampling=True: groups that are replaced "
                "leave no pass rates. Set it to False, or leave data.curriculum out."
            )

    @property
    def prompt_batches(self) -> int:
        """Number of prompt batches that a step takes from the data."""
        return self.dynamic_sampling_batches if self.dynamic_sampling else 1

    def shaped(self, reward_B: Float[np.ndarray, " B"], rollouts: Rollouts, limit: int) -> Float[np.ndarray, " B"]:
        """Applies penalties of completion length to rewards; `limit` is rollout.max_tokens_to_generate."""
        if self.no_stop_reward is not None:
            reward_B = np.where(rollouts.stop_B == STOP_LENGTH, self.no_stop_reward, reward_B)
        if self.overlong_shaping:
            buffer = max(limit // 5, 1) if self.overlong_buffer is None else self.overlong_buffer
            length_B: Any = (rollouts.mask_BT > 0).sum(axis=1)
            penalty_B = overlong_penalty(length_B, limit=limit, buffer=buffer, penalty=self.overlong_penalty)
            reward_B = reward_B + np.asarray(penalty_B)
        return reward_B

    def masked_out(self, experience: Experience) -> Int[np.ndarray, " B"]:
        """Returns the LeftOut code of each sample whose tokens all stay out of the loss; 0 for the other samples."""
        stop_B, lost_B = experience.rollouts.stop_B, experience.lost_B
        found = {
            LeftOut.OUT_OF_TIME: stop_B == STOP_DEADLINE,
            LeftOut.NO_TOKENS: ~experience.rollouts.mask_BT.any(axis=1),
            LeftOut.OVERLONG: (stop_B == STOP_LENGTH) & self.overlong_filter,
        }
        return np.select([~experience.rewarded(), *found.values()], [lost_B, *found], LeftOut.NOT)

    def loss_mask(self, experience: Experience) -> Float[np.ndarray, "B T"]:
        """Returns 1 on the tokens that count in the policy loss, 0 elsewhere."""
        return self.counted(experience)

    def counted(self, experience: Experience) -> Float[np.ndarray, "B T"]:
        """Returns 1 on the sampled tokens of samples that `masked_out` leaves in the loss, 0 elsewhere."""
        out_B, mask_BT = self.masked_out(experience) != LeftOut.NOT, experience.rollouts.mask_BT
        return np.where(out_B[:, None], np.float32(0), mask_BT) if out_B.any() else mask_BT

    @property
    def policy_alone(self) -> bool:
        """True if only the surrogate moves the policy: the loss has no KL, entropy, observations or divergence."""
        teacher = self.distillation
        exact = teacher is not None and not teacher.sampled
        return not (self.loss_kl.coef or self.entropy_coef or self.observed_weight or exact)

    @property
    def advantage_alone(self) -> bool:
        """True if a token whose advantage is 0 does not move the policy."""
        return self.policy_alone and self._scaled_by_advantage

    @property
    def _scaled_by_advantage(self) -> bool:
        """True if a token's surrogate is 0 whenever its advantage is 0."""
        return not self.own_loss and self.kind not in PENALISED

    @property
    def uses_rewards(self) -> bool:
        """True if rewards enter the loss of some samples."""
        return True

    def formula(self, max_tokens: int) -> str:
        """Writes the advantage and the loss with their numbers in plain text, a teacher's part included."""
        rewards, policy, teacher = self.estimator().formula(), self.policy_loss(max_tokens), self.distillation
        if teacher is None or not teacher.coef:  # only some sources of a mixture have a teacher; `describe` names them
            if self._scaled_by_advantage and not self.uses_rewards:
                return policy.formula_without_advantage()
            return f"{rewards}\n{policy.formula()}"
        if teacher.sampled or teacher.reward_coef:
            return teacher.formula(rewards, policy.formula())
        if self._scaled_by_advantage:
            return teacher.formula(rewards, policy.formula_without_advantage())
        return teacher.formula(rewards, f"+ {policy.formula()}; A is 0, as there is no reward")

    def describe(self, max_tokens: int) -> list[str]:
        """Describes the settings' additions to the loss, one plain line each, for the dry run."""
        lines = []
        if self.observed_weight:
            lines.append(
                f"loss + {self.observed_weight:g} x (-log p), mean over the tokens that environments gave after a "
                "sample's first turn (ECHO)"
            )
        if self.reward_kl.coef and self.uses_rewards:
            lines.append(f"reward per token: - {self.reward_kl.coef:g} KL to the reference ({self.reward_kl.mode})")
        if self.kl_target is not None:
            lines.append(
                f"the coefficient of the KL starts there and is steered to a KL of {self.kl_target:g} nats per token"
            )
        if self.dynamic_sampling:
            lines.append(
                f"dynamic sampling: groups of equal rewards are replaced from {self.dynamic_sampling_batches - 1} "
                "further batches of prompts"
            )
        if self.overlong_shaping and self.uses_rewards:
            buffer = max(max_tokens // 5, 1) if self.overlong_buffer is None else self.overlong_buffer
            lines.append(
                f"overlong shaping: 0 up to {max_tokens - buffer} tokens, then down to -{self.overlong_penalty:g} at "
                f"{max_tokens}"
            )
        if self.overlong_filter:
            lines.append(f"overlong filter: completions cut off at {max_tokens} tokens leave the loss")
        if self.no_stop_reward is not None and self.uses_rewards:
            lines.append(f"completions cut off at {max_tokens} tokens get the reward {self.no_stop_reward:g}")
        return lines


@section(
    "grpo",
    {
        "data_shuffle_seed": "it is an argument of GRPOLearner, which shuffles a list; files follow data.seed.",
        "use_rollout_logps": "say grpo.old_logprob='sampler'.",
        "off_policy_steps": "say grpo.max_staleness=N: batches are then sampled by a policy at most N steps old.",
    },
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig, KLLossSettings, GroupSettings):
    """Settings of the GRPO family: first Tunix's names and defaults (except kl_loss_mode, docs/algorithms.md), then
    podrl's.

    Attributes:
      algo_variant: name of the algorithm in Tunix; only 'grpo' is allowed.
      loss_algo: 'grpo', or 'gspo-token' for the sequence ratio of GSPO.
      kl_in_reward: coefficient of the KL to the reference policy in the reward; 0 for none.
      kl_reward_mode: estimator of the KL in the reward. No gradient is taken of rewards, so k1 is the plain choice: its
        value is unbiased.
      teacher_coef: weight of KL(policy || teacher) per sampled token, for on-policy distillation; 0 for none.
      teacher: model that teaches. 'reference': model.reference or model.teachers. Otherwise the policy teaches itself
        after a prompt with a hint (data.hint), with its weights before the first step ('initial'), its present weights
        ('current') or their moving average ('ema').
      teacher_rate: share of the distance to the policy by which the 'ema' teacher moves after every step.
      teacher_hint_tokens: number of tokens that a hint may add to rollout.max_prompt_length; prompts with a longer hint
        are left out, or are an error, as data.long_prompts says.
      teacher_kl: form of the divergence. 'sampled': estimated on the sampled token, with log(teacher / policy) as its
        advantage. 'full': exact, over the vocabulary, in the loss. 'top_k': over the policy's likeliest ids, with all
        other ids as one.
      teacher_top_k: number of likeliest ids that 'top_k' takes.
      reward_coef: weight of the advantage from rewards, which is added to the advantage from the teacher.
      observation_coef: weight of the cross-entropy on tokens from an environment, such as the output of tools, after a
        sample's first turn (ECHO); 0 for none. The cross-entropy is a mean over these tokens.
      sources: settings of the samples of a mixture's sources, by the source's name: values of the keys `PER_SOURCE`
        that differ from the job's. A job takes them from `grpo` of data.sources.
      Others: inherited settings, explained in the classes that they come from.
    """

    algo_variant: Literal["grpo"] = "grpo"
    policy_loss_fn: str | Callable[..., Any] = "grpo"
    loss_algo: Literal["grpo", "gspo-token"] = "grpo"
    kl_in_reward: NonNegative = 0.0
    kl_reward_mode: str = "k1"
    teacher_coef: NonNegative = 0.0
    teacher: Teacher = "reference"
    teacher_rate: Annotated[float, Range("(0, 1]")] = 0.05
    teacher_hint_tokens: Natural = 256
    teacher_kl: TeacherKL = "sampled"
    teacher_top_k: Count = 64
    reward_coef: NonNegative = 1.0
    observation_coef: NonNegative = 0.0
    sources: Mapping[str, ConfigValues] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        super().__post_init__()
        self._check_sources()
        self._check_teacher()
        kl.canonical_mode(self.kl_reward_mode, key="grpo.kl_reward_mode")
        if self.own_loss and self.loss_algo != "grpo":
            raise ValueError(
                f"grpo.loss_algo={self.loss_algo!r} names a loss and so does grpo.policy_loss_fn="
                f"{self.policy_loss_fn!r}: set grpo.loss_algo='grpo'."
            )
        estimator = self.estimator()
        if estimator.needs_critic:
            raise ValueError(
                f"grpo.advantage_estimator={self.advantage_estimator!r} needs a critic, which the GRPO learner "
                "lacks: set algorithm=ppo (PPOConfig, PPOLearner), or use a group estimator (grpo, rloo, opo, ...)."
            )
        if self.num_generations == 1 and estimator.needs_group and self.reward_coef:
            raw = "" if estimator.kind == "pass_at_k" else ", or grpo.singleton='raw' for the bare reward as advantage"
            raise ValueError(
                f"grpo.num_generations=1 with grpo.advantage_estimator={self.advantage_estimator!r} gives no sample an "
                "advantage other than 0, because a group of one has nothing to be compared with: use at least 2"
                f"{raw}."
            )

    def _check_teacher(self) -> None:
        """Refuses a teacher together with another use of the reference, and settings without anything to learn from."""
        if self.distillation is None and self.teacher_kl != "sampled":
            raise ValueError(
                f"grpo.teacher_kl={self.teacher_kl!r} needs a teacher, and grpo.teacher_coef=0 means there is none: "
                "set grpo.teacher_coef above 0, or grpo.teacher_kl='sampled'."
            )
        if self.distillation is None and self.teacher != "reference":
            raise ValueError(
                f"grpo.teacher={self.teacher!r} has no effect while grpo.teacher_coef=0: set "
                "grpo.teacher_coef above 0, or grpo.teacher='reference'."
            )
        if self.teacher != "reference" and self.teacher_kl == "full":
            raise ValueError(
                f"grpo.teacher_kl='full' compares policy and teacher after the same prompt, and grpo.teacher="
                f"{self.teacher!r} reads another prompt: set grpo.teacher_kl='top_k', which is exact if "
                "grpo.teacher_top_k is the size of the vocabulary, or 'sampled'."
            )
        if not (self.reward_coef or self.teacher_coef or self.observation_coef):
            raise ValueError(
                "grpo.reward_coef=0, grpo.teacher_coef=0 and grpo.observation_coef=0 leave nothing to learn from: set "
                "one of them above 0."
            )
        if self.teacher_coef and any(self.kl_coefs().values()):
            used = {f"grpo.{field}": f"grpo.{field}={coef:g}" for field, coef in self.kl_coefs().items() if coef}
            raise ValueError(
                f"grpo.teacher_coef={self.teacher_coef:g} compares the policy with a teacher, "
                f"{' and '.join(used.values())} with a reference, and a job compares it with one model: set "
                f"{' and '.join(used)} to 0, or grpo.teacher_coef to 0."
            )

    def _check_sources(self) -> None:
        """Refuses a source's settings if all samples of an update must share them, or if they contradict the job's."""
        for name, own in self.sources.items():
            where = f"The settings of the source {name!r} (data.sources: grpo)"
            if wrong := [key for key in own if key not in PER_SOURCE]:
                raise ValueError(
                    f"{where} have {', '.join(wrong)}, which all samples of an update share: set config.grpo.{wrong[0]}"
                    f" instead. A source may have {', '.join(PER_SOURCE)}."
                )
            if self.loss_algo != "grpo" and "policy_loss_fn" in own:
                raise ValueError(
                    f"{where} name a loss, and so does grpo.loss_algo={self.loss_algo!r}: set it to 'grpo'."
                )
            try:
                part = self._part(own)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if self.dynamic_sampling and not part.reward_coef:
                raise ValueError(
                    f"{where} have reward_coef=0, and grpo.dynamic_sampling=True replaces groups of equal rewards, "
                    "although the samples of these sources learn without rewards: set grpo.dynamic_sampling=False."
                )
            if part.estimator().needs_greedy and not self.estimator().needs_greedy:
                raise ValueError(
                    f"{where} have advantage_estimator='remax', whose greedy samples are drawn for all prompts or for "
                    "none: set grpo.advantage_estimator='remax', too, or choose another."
                )

    def _part(self, own: ConfigValues) -> "GRPOConfig":
        """Makes the settings of a source's samples from the values that the source sets."""
        taught = own.get("teacher_coef", self.teacher_coef)
        teacher = {} if taught else {"teacher_kl": "sampled", "teacher": "reference"}
        return dataclasses.replace(self, sources={}, **teacher, **own)

    @functools.cached_property
    def number_of(self) -> Mapping[str, int]:
        """Maps each source with settings of its own to the index of these settings in `parts`."""
        return {name: self.parts.index(self._part(own)) for name, own in self.sources.items()}

    @functools.cached_property
    def parts(self) -> "Sequence[GRPOConfig]":
        found = [self._part({})] if self.sources else [self]
        for part in map(self._part, self.sources.values()):
            found += [part] * (part not in found)
        return found

    def part_of(self, experience: Experience) -> Int[np.ndarray, " B"]:
        rollouts = experience.rollouts
        if len(self.parts) == 1:
            return super().part_of(experience)
        if SOURCE not in rollouts.prompts.fields:
            raise ValueError(
                f"grpo.sources={list(self.sources)} are told apart by the field `{SOURCE}` of prompts, and these have "
                "none: set the field of each prompt to the name of its source, or leave grpo.sources out."
            )
        part_P = np.array([self.number_of.get(name, 0) for name in rollouts.prompts.fields[SOURCE]], np.int32)
        return part_P[rollouts.group_B]

    def loss_mask(self, experience: Experience) -> Float[np.ndarray, "B T"]:
        mask_BT = self.counted(experience)
        if len(self.parts) == 1:
            return mask_BT
        used_B = self.of_samples(lambda part: part.policy_weight > 0, experience)
        return np.where(used_B[:, None], mask_BT, np.float32(0))

    @property
    def policy_weight(self) -> float:
        """Weight of the policy loss: `reward_coef`; if that is 0, `teacher_coef` with teacher_kl='sampled', else 0."""
        return self.reward_coef or self.teacher_coef * (self.teacher_kl == "sampled")

    @property
    def distillation(self) -> Distillation | None:
        if not any(part.teacher_coef for part in self.parts):
            return None
        return Distillation(self.teacher_coef, self.reward_coef, self.teacher_kl, self.teacher_top_k, self.teacher)

    @property
    def uses_rewards(self) -> bool:
        return any(part.reward_coef for part in self.parts)

    @property
    def observed_weight(self) -> float:
        return max(part.observation_coef for part in self.parts)

    @property
    def kind(self) -> str:
        """Canonical name of the surrogate."""
        return "gspo_token" if self.loss_algo == "gspo-token" else super().kind

    @property
    def reward_kl(self) -> kl.Penalty:
        return kl.Penalty(self.kl_in_reward, self.kl_reward_mode, self.kl_clamp_value)

    def kl_coefs(self) -> dict[str, float]:
        return {"beta": self.beta, "kl_in_reward": self.kl_in_reward}

    def describe(self, max_tokens: int) -> list[str]:
        own = {name: ", ".join(f"{key}={value!r}" for key, value in of.items()) for name, of in self.sources.items()}
        lines = [f"samples of {name} have settings of their own: {settings}" for name, settings in own.items()]
        if self.uses_rewards and self.reward_coef != 1.0 and not self.teacher_coef:
            lines.append(f"advantages times {self.reward_coef:g}")
        return [*lines, *super().describe(max_tokens)]

    def estimator(self) -> AdvantageEstimator:
        if not self.own_advantage:
            return AdvantageEstimator(self)
        key = "grpo.advantage_estimator"
        return AdvantageEstimator(self, custom.advantage(self.advantage_estimator, self.advantage_args, key))


@section(
    "ppo",
    {
        "data_shuffle_seed": "it is an argument of PPOLearner, which shuffles a list; files follow data.seed.",
        "mini_batch_size": "say trainer.mini_batch_size (RLTrainingConfig): prompts per update.",
        "vf_coef": "the critic has an optimizer of its own: say trainer.critic_learning_rate.",
    },
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig, GAESettings):
    """Settings of PPO with a critic: first Tunix's names and defaults, then podrl's.

    Attributes:
      algo_variant: name of the algorithm in Tunix; only 'ppo' is allowed.
      value_loss_fn: 'ppo': squared error, clipped around the values before the update.
      beta: coefficient of the KL to the reference policy in the reward; 0 for none, and then no reference is kept.
      clip_range_value: distance of a value from its value before the step, reward units, beyond which the loss stops
        pulling it further away; a large number clips nothing.
      kl_method: estimator of the KL in the reward; see podrl.algorithms.kl.

      critic_warmup: number of first steps of the run in which only the critic learns.
      whiten_advantages: True if advantages are scaled to mean 0 and variance 1 over the batch's tokens.
      whiten_rewards: True if token rewards, KL included, are scaled to variance 1 over the batch's tokens before GAE.
      Others: inherited settings, explained in the classes that they come from; `loss_agg_mode` is also the critic's.
    """

    algo_variant: Literal["ppo"] = "ppo"
    advantage_estimator: str | Callable[..., Any] = "gae"
    policy_loss_fn: str | Callable[..., Any] = "ppo"
    value_loss_fn: Literal["ppo"] = "ppo"
    beta: NonNegative = 0.04
    entropy_coef: Finite | None = None
    clip_range_value: Positive = 0.2
    kl_method: str = "low_var_kl"

    num_generations: Count = 1
    loss_agg_mode: str = "token-mean"
    critic_warmup: Natural = 0
    whiten_advantages: bool = True
    whiten_rewards: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.advantage_estimator != "gae":
            raise ValueError(
                f"ppo.advantage_estimator={self.advantage_estimator!r} must be 'gae': for group estimators, which "
                "need no critic, set algorithm=grpo."
            )
        kl.canonical_mode(self.kl_method, key="ppo.kl_method")

    @property
    def reward_kl(self) -> kl.Penalty:
        return kl.Penalty(self.beta, self.kl_method, self.kl_clamp_value)

    def kl_coefs(self) -> dict[str, float]:
        return {"beta": self.beta}

    def estimator(self) -> AdvantageEstimator:
        return AdvantageEstimator(self)

    def describe(self, max_tokens: int) -> list[str]:
        lines = [
            f"critic: max((v - R)^2, (clip(v, v_old -+ {self.clip_range_value:g}) - R)^2) / 2, {self.loss_agg_mode}",
            f"advantages whitened over the batch's tokens: {'yes' if self.whiten_advantages else 'no'}",
        ]
        if self.whiten_rewards:
            lines.append("token rewards scaled to variance 1 over the batch's tokens")
        if self.critic_warmup:
            first = "step 1 trains" if self.critic_warmup == 1 else f"steps 1 to {self.critic_warmup} train"
            lines.append(f"{first} the critic only")
        return [*super().describe(max_tokens), *lines]
