"""KL estimators on sampled tokens, and the controller that adapts the KL coefficient.

Estimators after J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with
d = logprob - ref_logprob, the tokens drawn from the policy of `logprob`.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.gae import namespace
from podrl.types import Mask

# exp() is not fed more than this: e^20 = 4.9e8 leaves float32 room for products and sums.
LOG_RATIO_LIMIT = 20.0

FORMULAS = {
    "k1": "d",
    "abs": "|d|",
    "k2": "d^2 / 2",
    "k3": "exp(-d) + d - 1",
    "k1+": "d, with the gradient of d^2 / 2",
    "k3+": "exp(-d) + d - 1, with the gradient of d^2 / 2",
}
MODES = tuple(FORMULAS)
ALIASES = {"kl": "k1", "mse": "k2", "mse_kl": "k2", "low_var": "k3", "low_var_kl": "k3", "low_var_kl+": "k3+"}


class Penalty(NamedTuple):
    """A KL to the reference: its coefficient (0 for none), its estimator, and a bound on a token's value or None."""

    coef: float = 0.0
    mode: str = "k3"
    clamp: float | None = None


def canonical_mode(mode: str, *, key: str = "grpo.kl_loss_mode") -> str:
    """Returns podrl's name of a KL estimator that is given under any name.

    Raises:
      ValueError: unknown name; `key` is the config key the message names.
    """
    mode = ALIASES.get(mode, mode)
    if mode not in MODES:
        raise ValueError(f"{key}={mode!r} is not a KL estimator: use one of {', '.join((*MODES, *ALIASES))}.")
    return mode


def kl_divergence(
    logprob_BT: Float[Array, "B T"], ref_logprob_BT: Float[Array, "B T"], mode: str, *, clamp: float | None = None
) -> Float[Array, "B T"]:
    """Estimates KL(policy || reference) per token, in nats.

    The values of k1 and k3 are unbiased, but on-policy the gradient of k1 is zero in expectation and that of k3 is the
    gradient of the other direction, KL(reference || policy). k2 has the right gradient; `k1+` and `k3+` join the value
    of one to the gradient of k2 (the sum x - stop_gradient(x) is zero with a gradient).

    Args:
      logprob_BT: log-probabilities under the policy that is differentiated.
      ref_logprob_BT: log-probabilities under the reference. Both must be finite: mask first.
      mode: k1 (kl), abs, k2 (mse, mse_kl), k3 (low_var, low_var_kl), k1+, k3+.
      clamp: bound on the absolute value of the estimate; no gradient flows beyond it. None: no bound.

    Raises:
      ValueError: unknown mode.
    """
    mode = canonical_mode(mode)
    d_BT = logprob_BT - ref_logprob_BT
    kl_BT = _estimate(d_BT, mode.removesuffix("+"))
    if clamp is not None:
        kl_BT = jnp.clip(kl_BT, -clamp, clamp)
    if mode.endswith("+"):
        k2_BT = 0.5 * jnp.square(d_BT)
        kl_BT = k2_BT - jax.lax.stop_gradient(k2_BT) + jax.lax.stop_gradient(kl_BT)
    return kl_BT


def _estimate(d_BT: Float[Array, "B T"], mode: str) -> Float[Array, "B T"]:
    xp = namespace(d_BT)
    if mode == "k1":
        return d_BT
    if mode == "abs":
        return xp.abs(d_BT)
    if mode == "k2":
        return 0.5 * xp.square(d_BT)
    log_r_BT = xp.minimum(-d_BT, LOG_RATIO_LIMIT)
    return xp.expm1(log_r_BT) - log_r_BT


def penalized_reward(
    reward_BT: Float[Array, "B T"],
    kl_BT: Float[Array, "B T"],
    mask_BT: Mask,
    *,
    coef: Float[Array, ""] | float,
) -> Float[Array, "B T"]:
    """Subtracts the KL penalty from token rewards: the KL in the reward (PPO), not in the loss (GRPO).

    Args:
      reward_BT: token rewards; an outcome reward sits on the last sampled token.
      kl_BT: `sampled_kl` of the policy that sampled; k1 is the unbiased choice here, its gradient plays no part.
      mask_BT: 1 on sampled tokens; elsewhere the result is 0, but in a sequence without any it is the reward.
      coef: nats to reward units.

    numpy or jax arrays; the answer is of the same kind.
    """
    xp, keep_BT = namespace(reward_BT), mask_BT.astype(bool)
    silent_BT = xp.where(keep_BT.any(axis=1, keepdims=True), 0.0, reward_BT)
    return xp.where(keep_BT, reward_BT - coef * kl_BT, silent_BT)


def sampled_kl(
    logprob_BT: Float[Array, "B T"],
    ref_logprob_BT: Float[Array, "B T"],
    mask_BT: Mask,
    *,
    mode: str,
    clamp: float | None = None,
) -> Float[Array, "B T"]:
    """Estimates the KL of sampled tokens, 0 elsewhere; numpy or jax arrays, without gradient."""
    xp = namespace(logprob_BT)
    d_BT = xp.where(mask_BT.astype(bool), logprob_BT - ref_logprob_BT, 0.0)
    kl_BT = _estimate(d_BT, canonical_mode(mode).removesuffix("+"))
    return kl_BT if clamp is None else xp.clip(kl_BT, -clamp, clamp)


@dataclasses.dataclass(frozen=True)
class AdaptiveKL:
    """A proportional controller that steers the KL coefficient towards a target (arXiv 1909.08593, section 2.2).

    It holds no state: the coefficient is the caller's, to be checkpointed with the step. A fixed coefficient is one
    that is never updated.

    Attributes:
      target: wanted KL in nats per the unit `kl` is measured in.
      horizon: samples over which the coefficient moves by at most a fifth.
    """

    target: float
    horizon: float

    def __post_init__(self):
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(
                f"kl_target={self.target} and kl_horizon={self.horizon}: an adaptive coefficient needs both above 0."
            )

    def update(self, coef: float, *, kl: float, samples: int) -> float:
        """Updates the coefficient after a step of `samples` samples with mean KL `kl`; NaN leaves it unchanged.

        Raises:
          ValueError: a step of five horizons, whose fifth each would turn the coefficient negative.
        """
        if samples >= 5 * self.horizon:
            raise ValueError(
                f"kl_horizon={self.horizon} is too short for steps of {samples} samples: it must be above "
                f"{samples / 5:g}, or one step could turn the coefficient negative."
            )
        if math.isnan(kl):
            return coef
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * samples / self.horizon)
