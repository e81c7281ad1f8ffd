"""The advantage of a run: its checked settings, and the call that turns rewards into advantages."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from jaxtyping import Array, Float

from podrl.algorithms import advantages
from podrl.algorithms.gae import namespace
from podrl.config import Positive, Range, Share, group_of, section
from podrl.types import Mask

# kind: formula, R the reward of a sample.
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
# Compare a sample with its group, so that in a group of one `singleton` decides.
_OF_A_GROUP = ("grpo", "rloo", "rloo_std", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl")
ALIASES = {"group_relative": "grpo", "leave_one_out": "rloo", "grpo_passk": "pass_at_k"}


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Settings of the advantage that every algorithm shares.

    Attributes:
      advantage_estimator: grpo, rloo, rloo_std, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg,
        pass_at_k, maxrl or gae, which needs a critic's values (`podrl.algorithms.gae`); or a function of the user's,
        'file.py:function' (docs/algorithms.md).
      advantage_args: numbers of such a function, by the names of its keywords.
      gamma: discount per sampled token; reinforce_plus_plus and gae only.
    """

    advantage_estimator: str | Callable[..., Any] = "grpo"
    advantage_args: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    gamma: Share = 1.0

    @property
    def own_advantage(self) -> bool:
        """True where the estimator is a function of the user's."""
        return callable(self.advantage_estimator) or ":" in self.advantage_estimator

    @property
    def section(self) -> str:
        """Section of the configuration that messages name, such as 'grpo'."""
        return group_of(self)

    def __post_init__(self):
        self.check_advantage()

    def check_advantage(self) -> None:
        """Raises ValueError for an unknown estimator."""
        name = self.advantage_estimator
        if isinstance(name, str) and ":" not in name and ALIASES.get(name, name) not in KINDS:
            raise ValueError(
                f"{self.section}.advantage_estimator={name!r} is not an estimator: use one of "
                f"{', '.join((*KINDS, *ALIASES))}, or 'file.py:function' for one of your own."
            )
        if self.advantage_args and not self.own_advantage:
            raise ValueError(
                f"{self.section}.advantage_args={self.advantage_args!r} are those of a function of your own, and "
                f"{self.section}.advantage_estimator={name!r} is none."
            )


@section("grpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSettings(AdvantageSettings):
    """Settings of advantages that compare the samples of a prompt.

    Attributes:
      advantage_scale: "std" divides grpo and pass_at_k by the group's standard deviation, "batch" grpo by that of the
        whole batch, "none" by nothing (Dr. GRPO).
      advantage_ddof: 1 for the sample standard deviation, 0 for the population's; grpo only.
      advantage_eps: added to the standard deviation; of maxrl, the least divisor.
      singleton: advantage of a group of one, "zero" or "raw".
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
      gae_lambda: lambda of the estimator, per sampled token; 1 trusts the rewards alone, 0 the critic alone.
    """

    advantage_estimator: str | Callable[..., Any] = "gae"
    gae_lambda: Share = 0.95


@dataclasses.dataclass(frozen=True)
class AdvantageEstimator:
    """The configured advantage estimator; calling it turns token rewards into token advantages.

    Attributes:
      settings: settings of the estimator.
      own: the user's estimator, where `settings` name one: (reward_PG, length_PG=) -> advantage_PG.
    """

    settings: GroupSettings | GAESettings = GroupSettings()
    own: Callable[..., Any] | None = None

    @property
    def kind(self) -> str:
        """Canonical name of the estimator; of a function of the user's, its name."""
        name = self.settings.advantage_estimator
        return ALIASES.get(name, name) if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)

    @property
    def needs_greedy(self) -> bool:
        """True if every prompt needs a greedy completion's reward as its baseline."""
        return self.kind == "remax"

    @property
    def needs_group(self) -> bool:
        """True if a group of one sample always has advantage 0."""
        return self.kind == "pass_at_k" or (self.kind in _OF_A_GROUP and self._group.singleton == "zero")

    @property
    def needs_critic(self) -> bool:
        """True if advantages come from a critic's values, by `podrl.algorithms.gae.gae` instead of a call."""
        return self.kind == "gae"

    @property
    def _group(self) -> GroupSettings:
        assert isinstance(self.settings, GroupSettings), self.kind
        return self.settings

    def formula(self) -> str:
        """Writes the advantage with its numbers in plain text, for the dry run."""
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
        """Computes every sampled token's advantage, one sequence per row, 0 where mask is 0; numpy or jax arrays.

        Args:
          reward_BT: token rewards: the outcome's on the last sampled token (`gae.outcome_reward`), less the KL penalty
            if it is in the reward (`kl.penalized_reward`). A sample without a sampled token counts, too.
          greedy_reward_B: reward of the greedy completion of each sample's prompt; zeros unless `needs_greedy`.
          mask_BT: 1 on tokens the policy sampled. Filters that drop samples from the loss come after this call, so
            that their rewards still count in their groups.
          group_B: number of each sample's group (`podrl.groups`).

        Raises:
          ValueError: `group_B` is not of as many samples; a group too small for the estimator.
        """
        assert not self.needs_critic, "gae needs a critic's values"
        xp, settings = namespace(reward_BT), self._group
        keep_BT = mask_BT.astype(bool)
        if self.kind == "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(reward_BT, mask_BT, gamma=settings.gamma)[0]
        counted_BT = keep_BT | ~keep_BT.any(
            axis=1, keepdims=True
        )  # a silent sample's reward is on a token of its prompt
        reward_B = xp.where(counted_BT, reward_BT, 0.0).sum(axis=1)
        if self.own is not None:
            advantage_B = self._given(reward_B, keep_BT.sum(axis=1), group_B)
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

    def _given(self, reward_B: Any, length_B: Any, group_B: advantages.GroupIndex) -> Any:
        """Asks the user's function, once for the groups of each size.

        Raises:
          ValueError: it returned something else than a finite number for every sample.
        """
        assert self.own is not None
        own = self.own

        def estimate(reward_PG: Any, length_PG: Any) -> Any:
            xp, (P, G) = namespace(reward_PG), reward_PG.shape
            made_PG = xp.asarray(own(reward_PG, length_PG=length_PG), reward_PG.dtype)
            if made_PG.size != reward_PG.size or not bool(xp.isfinite(made_PG).all()):
                raise ValueError(
                    f"{self.settings.section}.advantage_estimator={self.kind} returned shape {made_PG.shape} with "
                    f"{int((~xp.isfinite(made_PG)).sum())} values that are not finite: it must return a finite number "
                    f"for each of {P} prompts x {G} samples."
                )
            return made_PG

        return advantages.by_group(estimate, group_B, reward_B, length_B)
