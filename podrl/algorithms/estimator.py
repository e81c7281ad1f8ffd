"""The advantage of a run: its checked settings, and the call that turns rewards into advantages."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from jaxtyping import Array, Float

from podrl.algorithms import advantages
from podrl.algorithms.gae import namespace
from podrl.config import Positive, Range, Share, group_of, near, section
from podrl.types import Mask

# Formula of each kind of estimator; R is the reward of a sample, and braces hold names of settings.
KINDS = {
    "grpo": "R - mean of the group",
    "rloo": "R - mean of the group's other samples",
    "rloo_std": "(R - mean of the group's other samples) / (their standard deviation + {advantage_eps:g})",
    "reinforce_plus_plus": "discounted return (gamma {gamma:g}), whitened over the batch's tokens",
    "reinforce_plus_plus_baseline": "R - mean of the group, whitened over the batch's tokens",
    "remax": "R - reward of the greedy completion",
    "opo": "R - length-weighted mean of the group",
    "gpg": "(R - mean of the group) B / (samples in groups with a spread)",
    "pass_at_k": "best of the group: R - second best; others: 0",
    "maxrl": "(R - mean of the group) / max(mean of the group, {advantage_eps:g})",
    "gae": "generalised advantage over sampled tokens (gamma {gamma:g}, lambda {gae_lambda:g})",
}
# Kinds that compare a sample with its group; `singleton` sets the advantage in a group of one sample.
_OF_A_GROUP = ("grpo", "rloo", "rloo_std", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl")
ALIASES = {"group_relative": "grpo", "leave_one_out": "rloo", "grpo_passk": "pass_at_k"}


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Settings of the advantage estimator that every algorithm has.

    Attributes:
      advantage_estimator: grpo, rloo, rloo_std, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg,
        pass_at_k, maxrl or gae, which needs a critic's values (`podrl.algorithms.gae`); or a function of the user's,
        'file.py:function' (docs/algorithms.md).
      advantage_args: numbers passed to the user's advantage function, by the names of its keywords.
      gamma: discount per sampled token; reinforce_plus_plus and gae only.
    """

    advantage_estimator: str | Callable[..., Any] = "grpo"
    advantage_args: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    gamma: Share = 1.0

    @property
    def own_advantage(self) -> bool:
        """True if the estimator is a function of the user's."""
        return callable(self.advantage_estimator) or ":" in self.advantage_estimator

    @property
    def section(self) -> str:
        """Section of the configuration that error messages name, such as 'grpo'."""
        return group_of(self)

    def __post_init__(self):
        self.check_advantage()

    def check_advantage(self) -> None:
        """Raises ValueError for an unknown estimator, or for `advantage_args` without a function of the user's."""
        name = self.advantage_estimator
        if isinstance(name, str) and ":" not in name and ALIASES.get(name, name) not in KINDS:
            names = (*KINDS, *ALIASES)
            raise ValueError(
                f"{self.section}.advantage_estimator={name!r} is not an estimator: use one of {', '.join(names)}, or "
                f"'file.py:function' for one of your own.{near(name, names)}"
            )
        if self.advantage_args and not self.own_advantage:
            raise ValueError(
                f"{self.section}.advantage_args={self.advantage_args!r} sets numbers for a function of your own, "
                f"but {self.section}.advantage_estimator={name!r} names none: leave the numbers out, "
                "or name 'file.py:function'."
            )


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSettings(AdvantageSettings):
    """Settings of advantages that compare the samples of a prompt.

    Attributes:
      advantage_scale: divisor of the advantage of grpo and pass_at_k: "std" for the group's standard deviation, "batch"
        (grpo only) for the standard deviation of the whole batch, "none" for no division (Dr. GRPO).
      advantage_ddof: 1 for the sample standard deviation, 0 for the population's; grpo only.
      advantage_eps: number added to the standard deviation; for maxrl, the smallest divisor.
      singleton: advantage of a group of one sample: "zero", or "raw" for its reward.
    """

    advantage_scale: Literal["std", "batch", "none"] = "std"
    advantage_ddof: Annotated[int, Range("[0, 1]")] = 1
    advantage_eps: Positive = 1e-6
    singleton: Literal["zero", "raw"] = "zero"

    def check_advantage(self) -> None:
        super().check_advantage()
        name = self.advantage_estimator
        if self.advantage_scale == "batch" and (not isinstance(name, str) or ALIASES.get(name, name) != "grpo"):
            raise ValueError(
                f"{self.section}.advantage_scale='batch' is for {self.section}.advantage_estimator='grpo', and not for "
                f"{name!r}: use 'std' or 'none'."
            )


@section("ppo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GAESettings(AdvantageSettings):
    """Settings of generalised advantage estimation.

    Attributes:
      gae_lambda: lambda of the estimator, per sampled token; 1 sums the rewards to the end of the sample, 0 looks one
        token ahead and relies on the critic for the rest.
    """

    advantage_estimator: str | Callable[..., Any] = "gae"
    gae_lambda: Share = 0.95


@dataclasses.dataclass(frozen=True)
class AdvantageEstimator:
    """The configured advantage estimator; a call turns token rewards into token advantages.

    Attributes:
      settings: settings of the estimator.
      own: the user's function if `settings` name one: (reward_PG, length_PG=) -> advantage_PG. None otherwise.
    """

    settings: GroupSettings | GAESettings = GroupSettings()
    own: Callable[..., Any] | None = None

    @property
    def kind(self) -> str:
        """Canonical name of the estimator; for a function of the user's, the name of the function."""
        name = self.settings.advantage_estimator
        return ALIASES.get(name, name) if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)

    @property
    def needs_greedy(self) -> bool:
        """True if every prompt needs the reward of a greedy completion as its baseline."""
        return self.kind == "remax"

    @property
    def needs_group(self) -> bool:
        """True if a group of one sample is useless: the sample's advantage is 0, or pass_at_k refuses the group."""
        return self.kind == "pass_at_k" or (self.kind in _OF_A_GROUP and self._group.singleton == "zero")

    @property
    def needs_critic(self) -> bool:
        """True if advantages come from a critic's values: call `podrl.algorithms.gae.gae` then, not this object."""
        return self.kind == "gae"

    @property
    def _group(self) -> GroupSettings:
        assert isinstance(self.settings, GroupSettings), self.kind
        return self.settings

    def formula(self) -> str:
        """Writes the formula of the advantage with its numbers in plain text, for the dry run."""
        if self.own is not None:
            numbers = ", ".join(f"{name}={value:g}" for name, value in self.settings.advantage_args.items())
            return f"advantage: {self.kind}({numbers}), your own"
        text = KINDS[self.kind].format(**dataclasses.asdict(self.settings))
        if self.kind in ("grpo", "pass_at_k") and self._group.advantage_scale == "std":
            ddof = 1 if self.kind == "pass_at_k" else self._group.advantage_ddof
            text += f", divided by (standard deviation of the group (ddof {ddof}) + {self._group.advantage_eps:g})"
        if self.kind == "grpo" and self._group.advantage_scale == "batch":
            ddof, eps = self._group.advantage_ddof, self._group.advantage_eps
            text += f", divided by (standard deviation of all rewards (ddof {ddof}) + {eps:g})"
        return f"advantage: {text}"

    def __call__(
        self,
        reward_BT: Float[Array, "B T"],
        greedy_reward_B: Float[Array, " B"],
        mask_BT: Mask,
        *,
        group_B: advantages.GroupIndex,
    ) -> Float[Array, "B T"]:
        """Computes every sampled token's advantage; numpy or jax arrays, one sequence per row, not packed.

        Args:
          reward_BT: token rewards: the outcome reward on the last sampled token (`gae.outcome_reward`), rewards of
            turns on tokens of the turns, less the KL penalty if the KL is in the reward (`kl.penalized_reward`). A
            sample without a sampled token counts in its group, too.
          greedy_reward_B: reward of the greedy completion of each sample's prompt; zeros unless `needs_greedy`.
          mask_BT: 1 on tokens the policy sampled. Filters that drop samples from the loss must come after this call,
            because the rewards of dropped samples still count in their groups.
          group_B: number of each sample's group, a numpy array (`podrl.groups`).

        Returns:
          Advantages, 0 where mask is 0; one number for all sampled tokens of a sample, unless the estimator is
          reinforce_plus_plus. `podrl.algorithms.advantages` says their units.

        Raises:
          ValueError: `group_B` has another length than the batch; a group is too small for the estimator; or the user's
            function did not return a finite number for every sample.
          BatchError: maxrl got a negative reward in a numpy array.
        """
        assert not self.needs_critic, "gae needs a critic's values"
        xp, settings = namespace(reward_BT), self._group
        keep_BT = mask_BT.astype(bool)
        if self.kind == "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(reward_BT, mask_BT, gamma=settings.gamma)[0]
        # A sample without a sampled token has its reward on a token of its prompt, so all of its tokens count.
        counted_BT = keep_BT | ~keep_BT.any(axis=1, keepdims=True)
        reward_B = xp.where(counted_BT, reward_BT, 0.0).sum(axis=1)
        if self.own is not None:
            advantage_B = self._call_own(reward_B, keep_BT.sum(axis=1), group_B)
            return xp.where(keep_BT, advantage_B[:, None], 0.0)
        group = {"group_B": group_B, "singleton": settings.singleton}
        scale = {"scale": settings.advantage_scale, "eps": settings.advantage_eps}
        match self.kind:
            case "grpo":
                advantage_B = advantages.group_relative(reward_B, **group, **scale, ddof=settings.advantage_ddof)
            case "rloo":
                advantage_B = advantages.leave_one_out(reward_B, **group)
            case "rloo_std":
                advantage_B = advantages.leave_one_out(reward_B, **group, scale="std", eps=settings.advantage_eps)
            case "reinforce_plus_plus_baseline":
                return advantages.reinforce_plus_plus_baseline(reward_B, mask_BT, **group)
            case "remax":
                advantage_B = advantages.remax(reward_B, greedy_reward_B)
            case "opo":
                advantage_B = advantages.opo(reward_B, keep_BT.sum(axis=1), **group)
            case "gpg":
                advantage_B = advantages.gpg(reward_B, **group)
            case "maxrl":
                advantage_B = advantages.maxrl(reward_B, **group, eps=settings.advantage_eps)
            case _:
                assert self.kind == "pass_at_k", self.kind
                advantage_B = advantages.pass_at_k(reward_B, group_B=group_B, **scale)
        return xp.where(keep_BT, advantage_B[:, None], 0.0)

    def _call_own(self, reward_B: Any, length_B: Any, group_B: advantages.GroupIndex) -> Any:
        """Calls the user's function, once for all groups of one size, and returns an advantage per sample.

        Raises:
          ValueError: the function did not return a finite number for every sample.
        """
        assert self.own is not None
        own = self.own

        def estimate(reward_PG: Any, length_PG: Any) -> Any:
            xp, (P, G) = namespace(reward_PG), reward_PG.shape
            advantage_PG = xp.asarray(own(reward_PG, length_PG=length_PG), reward_PG.dtype)
            if advantage_PG.shape != (P, G) or not bool(xp.isfinite(advantage_PG).all()):
                raise ValueError(
                    f"{self.settings.section}.advantage_estimator={self.kind} returned shape {advantage_PG.shape} with "
                    f"{int((~xp.isfinite(advantage_PG)).sum())} values that are not finite: it must return a finite "
                    f"number for each of {P} prompts x {G} samples."
                )
            return advantage_PG

        return advantages.by_group(estimate, group_B, reward_B, length_B)
