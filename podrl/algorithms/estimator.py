"""Which advantage a run trains on: its settings, checked, and the call that turns rewards into advantages."""

import dataclasses
import math

from jaxtyping import Array, Float

from podrl.algorithms import advantages
from podrl.algorithms.gae import namespace
from podrl.types import Mask

# kind: formula, R the reward of a sample.
KINDS = {
    "grpo": "R - mean of the group",
    "rloo": "R - mean of the group's other samples",
    "reinforce_plus_plus": "discounted return (gamma {gamma:g}), whitened over the batch's tokens",
    "reinforce_plus_plus_baseline": "R - mean of the group, whitened over the batch's tokens",
    "remax": "R - reward of the greedy completion",
    "opo": "R - length-weighted mean of the group",
    "gpg": "(R - mean of the group) B / (samples in groups with a spread)",
    "pass_at_k": "best of the group: R - second best; others: 0",
    "gae": "generalised advantage over sampled tokens (gamma {gamma:g}, lambda {gae_lambda:g})",
}
# Compare a sample with its group, so that in a group of one `singleton` decides.
_OF_A_GROUP = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
ALIASES = {"group_relative": "grpo", "leave_one_out": "rloo", "grpo_passk": "pass_at_k"}


@dataclasses.dataclass(frozen=True)
class AdvantageEstimator:
    """Settings of the advantage; calling it turns token rewards into token advantages.

    Attributes:
      advantage_estimator: grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg, pass_at_k, or
        gae, which needs a critic's values (`podrl.algorithms.gae`).
      advantage_scale: "std" divides grpo and pass_at_k by the group's standard deviation, "none" does not (Dr. GRPO).
      advantage_ddof: 1 for the sample standard deviation, 0 for the population's; grpo only.
      advantage_eps: added to the standard deviation.
      singleton: what a group of one gets, "zero" or "raw".
      gamma: discount per sampled token; reinforce_plus_plus and gae only.
      gae_lambda: lambda of gae.
      section: config section that error messages name.
    """

    advantage_estimator: str = "grpo"
    advantage_scale: str = "std"
    advantage_ddof: int = 1
    advantage_eps: float = 1e-6
    singleton: str = "zero"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    section: str = "grpo"

    def __post_init__(self):
        names = ", ".join((*KINDS, *ALIASES))
        self._check(self.kind in KINDS, "advantage_estimator", f"is not an estimator: use one of {names}")
        self._check(self.advantage_scale in ("std", "none"), "advantage_scale", "must be 'std' or 'none'")
        self._check(self.advantage_ddof in (0, 1), "advantage_ddof", "must be 1 (sample) or 0 (population)")
        self._check(0 < self.advantage_eps < math.inf, "advantage_eps", "must be above 0")
        self._check(self.singleton in ("zero", "raw"), "singleton", "must be 'zero' or 'raw'")
        self._check(0 <= self.gamma <= 1, "gamma", "must lie in [0, 1]")
        self._check(0 <= self.gae_lambda <= 1, "gae_lambda", "must lie in [0, 1]")

    def _check(self, holds: bool, name: str, requirement: str):
        if not holds:
            raise ValueError(f"{self.section}.{name}={getattr(self, name)!r} {requirement}.")

    @property
    def kind(self) -> str:
        """The estimator under podrl's name."""
        return ALIASES.get(self.advantage_estimator, self.advantage_estimator)

    @property
    def needs_greedy(self) -> bool:
        """True if every prompt needs a greedy completion's reward as its baseline."""
        return self.kind == "remax"

    @property
    def needs_group(self) -> bool:
        """True if a group of one teaches nothing, whatever its reward."""
        return self.kind == "pass_at_k" or (self.kind in _OF_A_GROUP and self.singleton == "zero")

    @property
    def needs_critic(self) -> bool:
        """True if advantages come from a critic's values, by `podrl.algorithms.gae.gae` instead of a call."""
        return self.kind == "gae"

    def formula(self) -> str:
        """The advantage with its numbers in plain text, for the dry run."""
        text = KINDS[self.kind].format(gamma=self.gamma, gae_lambda=self.gae_lambda)
        if self.kind in ("grpo", "pass_at_k") and self.advantage_scale == "std":
            ddof = 1 if self.kind == "pass_at_k" else self.advantage_ddof
            text += f", divided by (standard deviation of the group (ddof {ddof}) + {self.advantage_eps:g})"
        return f"advantage: {text}"

    def __call__(
        self, reward_BT: Float[Array, "B T"], greedy_reward_B: Float[Array, " B"], mask_BT: Mask, *, group_size: int
    ) -> Float[Array, "B T"]:
        """Advantage of every sampled token, one sequence per row, 0 where mask is 0; numpy or jax arrays.

        Args:
          reward_BT: token rewards: the outcome's on the last sampled token (`gae.outcome_reward`), less the KL penalty
            if it is in the reward (`kl.penalized_reward`).
          greedy_reward_B: reward of the greedy completion of each sample's prompt; zeros unless `needs_greedy`.
          mask_BT: 1 on tokens the policy sampled. Filters that drop samples from the loss come after this call, so
            that their rewards still count in their groups.
          group_size: samples per prompt; must divide B.

        Raises:
          ValueError: B is not a multiple of `group_size`; a group too small for the estimator.
        """
        assert not self.needs_critic, "gae needs a critic's values"
        xp = namespace(reward_BT)
        keep_BT = mask_BT.astype(bool)
        if self.kind == "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(reward_BT, mask_BT, gamma=self.gamma)[0]
        reward_B = xp.where(keep_BT, reward_BT, 0.0).sum(axis=1)
        group = {"group_size": group_size, "singleton": self.singleton}
        scale = {"scale": self.advantage_scale, "eps": self.advantage_eps}
        match self.kind:
            case "grpo":
                advantage_B = advantages.group_relative(reward_B, **group, **scale, ddof=self.advantage_ddof)
            case "rloo":
                advantage_B = advantages.leave_one_out(reward_B, **group)
            case "reinforce_plus_plus_baseline":
                return advantages.reinforce_plus_plus_baseline(reward_B, mask_BT, **group)
            case "remax":
                advantage_B = advantages.remax(reward_B, greedy_reward_B)
            case "opo":
                advantage_B = advantages.opo(reward_B, keep_BT.sum(axis=1), **group)
            case "gpg":
                advantage_B = advantages.gpg(reward_B, **group)
            case _:
                assert self.kind == "pass_at_k", self.kind
                advantage_B = advantages.pass_at_k(reward_B, group_size=group_size, **scale)
        return xp.where(keep_BT, advantage_B[:, None], 0.0)
