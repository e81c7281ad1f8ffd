"""KL estimators on sampled tokens, and the controller that adapts the KL coefficient.

The estimators follow J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). In the formulas
d = logprob - ref_logprob, in nats, and the tokens are drawn from the policy of `logprob`.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.gae import namespace
from podrl.types import Mask

# Largest argument of exp(): e^20 = 4.9e8 leaves float32 room for products and sums.
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
    """Settings of a KL to the reference.

    Attributes:
      coef: coefficient of the KL, in loss or reward per nat; 0 for no KL.
      mode: name of the estimator.
      clamp: bound on the absolute value of a token's KL, nats; None for no bound.
    """

    coef: float = 0.0
    mode: str = "k3"
    clamp: float | None = None


def canonical_mode(mode: str, *, key: str = "grpo.kl_loss_mode") -> str:
    """Translates any known name of a KL estimator into podrl's name.

    Raises:
      ValueError: unknown name; the message names the config key `key`.
    """
    mode = ALIASES.get(mode, mode)
    if mode not in MODES:
        raise ValueError(f"{key}={mode!r} is not a KL estimator: use one of {', '.join((*MODES, *ALIASES))}.")
    return mode


def kl_divergence(
    logprob_BT: Float[Array, "B T"], ref_logprob_BT: Float[Array, "B T"], mode: str, *, clamp: float | None = None
) -> Float[Array, "B T"]:
    """Estimates KL(policy || reference) per token, in nats.

    `FORMULAS` has the formulas. The values of k1 and k3 are unbiased. On-policy, however, the gradient of k1 is zero in
    expectation, and the gradient of k3 belongs to the other direction, KL(reference || policy). k2 has the right
    gradient. `k1+` and `k3+` have the value of k1 and k3 with the gradient of k2, because x - stop_gradient(x) is zero
    but has the gradient of x.

    Args:
      logprob_BT: log-probabilities under the policy that is differentiated, nats.
      ref_logprob_BT: log-probabilities under the reference, nats. Both arrays must be finite: mask them first.
      mode: k1 (kl), abs, k2 (mse, mse_kl), k3 (low_var, low_var_kl), k1+ or k3+.
      clamp: bound on the absolute value of the estimate, nats; None for no bound. Beyond the bound k1, abs, k2 and k3
        have no gradient; k1+ and k3+ keep the gradient of k2.

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
    """Subtracts the KL penalty from token rewards: the KL is in the reward (PPO), not in the loss (GRPO).

    The arrays are all numpy or all jax arrays, and the result is of the same kind.

    Args:
      reward_BT: token rewards; an outcome reward lies on the last sampled token.
      kl_BT: KL of each token from `sampled_kl`, nats; only its value matters here, and k1 and k3 have unbiased values.
      mask_BT: 1 on sampled tokens.
      coef: coefficient of the KL, reward units per nat.

    Returns:
      reward - coef x KL on sampled tokens, 0 elsewhere. A sequence without a sampled token keeps its rewards.
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
    """Estimates the KL of sampled tokens in nats; other tokens get 0. Use it for values, not for gradients.

    The arrays are all numpy or all jax arrays, and the result is of the same kind.

    Args:
      logprob_BT: log-probabilities under the policy that sampled, nats.
      ref_logprob_BT: log-probabilities under the reference, nats; on masked tokens both may hold any number.
      mask_BT: 1 on sampled tokens.
      mode: name of the estimator; k1+ and k3+ are k1 and k3 here.
      clamp: bound on the absolute value of the estimate, nats; None for no bound.

    Raises:
      ValueError: unknown mode.
    """
    xp = namespace(logprob_BT)
    d_BT = xp.where(mask_BT.astype(bool), logprob_BT - ref_logprob_BT, 0.0)
    kl_BT = _estimate(d_BT, canonical_mode(mode).removesuffix("+"))
    return kl_BT if clamp is None else xp.clip(kl_BT, -clamp, clamp)


@dataclasses.dataclass(frozen=True)
class AdaptiveKL:
    """A proportional controller that steers the KL coefficient towards a target (arXiv 1909.08593, section 2.2).

    The controller has no state: the caller keeps the coefficient and saves it in checkpoints.

    Attributes:
      target: wanted KL, in the unit of the argument `kl` of `update` (nats per token or per sample).
      horizon: number of samples over which the coefficient changes by at most about a fifth.
    """

    target: float
    horizon: float

    def __post_init__(self):
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(
                f"kl_target={self.target} and kl_horizon={self.horizon}: an adaptive coefficient needs both above 0."
            )

    def update(self, coef: float, *, kl: float, samples: int) -> float:
        """Returns coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon), the coefficient after a step.

        Args:
          coef: coefficient before the step.
          kl: mean KL of the step's samples, in the unit of `target`; NaN leaves the coefficient unchanged.
          samples: number of samples in the step.

        Raises:
          ValueError: the step has five horizons of samples or more, which could make the coefficient 0 or negative.
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
