"""Advantages from a critic: generalised advantage estimation over token rewards, and masked whitening.

Every function takes numpy arrays or jax arrays and returns arrays of the same library.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from podrl.types import Mask


def namespace(x: Any) -> Any:
    """Returns numpy for a numpy array, jax.numpy for a jax array."""
    return x.__array_namespace__()


def gae(
    reward_BT: Float[Array, "B T"],
    value_BT: Float[Array, "B T"],
    mask_BT: Mask,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes the advantages A_t = delta_t + gamma lam A_t' and the returns A_t + value_t (arXiv 1506.02438, eq. 16).

    delta_t = reward_t + gamma value_t' - value_t, where t' is the next token with mask 1. Tokens with mask 0 (tool
    output, prompt, padding) are skipped, and their rewards and values are ignored. At the last sampled token value_t'
    and A_t' are 0. Each row is one sequence: call this before packing.

    Args:
      reward_BT: reward of each token; an outcome reward must lie on a token with mask 1 (`outcome_reward`).
      value_BT: critic's value before each token, reward units.
      mask_BT: 1 on tokens the policy sampled.
      gamma: discount per sampled token, in [0, 1].
      lam: lambda, in [0, 1]; 1 sums rewards to the end (Monte Carlo), 0 looks one token ahead.

    Returns:
      Advantages (not whitened) and returns, both in reward units and 0 where mask is 0.
    """
    xp = namespace(reward_BT)
    keep_BT = mask_BT.astype(bool)
    reward_BT = xp.where(keep_BT, reward_BT, 0.0)
    value_BT = xp.where(keep_BT, value_BT, 0.0)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        advantage_B, next_value_B = carry
        reward_B, value_B, keep_B = x
        now_B = reward_B + gamma * next_value_B - value_B + gamma * lam * advantage_B
        advantage_B = xp.where(keep_B, now_B, advantage_B)
        return (advantage_B, xp.where(keep_B, value_B, next_value_B)), advantage_B

    zero_B = xp.zeros_like(reward_BT[:, 0])
    advantage_BT = _backwards(xp, step, (zero_B, zero_B), (reward_BT, value_BT, keep_BT))
    advantage_BT = xp.where(keep_BT, advantage_BT, 0.0)
    return advantage_BT, advantage_BT + value_BT


def discounted_return(reward_BT: Float[Array, "B T"], mask_BT: Mask, *, gamma: float) -> Float[Array, "B T"]:
    """Sums the rewards of each sampled token and of the later tokens, discounted by gamma per sampled token.

    Returns:
      Returns in reward units, 0 where mask is 0.
    """
    advantage_BT, _ = gae(reward_BT, namespace(reward_BT).zeros_like(reward_BT), mask_BT, gamma=gamma, lam=1.0)
    return advantage_BT


def _backwards(xp: Any, step: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs_BT: Any) -> Any:
    """Applies `step` from the last token to the first: a Python loop for numpy arrays, a scan for jax arrays."""
    xs_TB = tuple(x_BT.T for x_BT in xs_BT)
    if xp is not np:
        return jax.lax.scan(step, init, xs_TB, reverse=True)[1].T
    carry, out = init, []
    for t in reversed(range(xs_TB[0].shape[0])):
        carry, y = step(carry, tuple(x_TB[t] for x_TB in xs_TB))
        out.append(y)
    return np.stack(out[::-1], axis=1)


def outcome_reward(reward_B: Float[Array, " B"], mask_BT: Mask) -> Float[Array, "B T"]:
    """Puts each sequence's reward on its last token with mask 1, 0 elsewhere.

    A sequence without a sampled token has its reward on its first token. The sequence teaches nothing, but its reward
    counts in its group.
    """
    xp = namespace(reward_B)
    sampled_BT = mask_BT.astype(bool).astype(xp.int32)
    count_B1 = sampled_BT.sum(axis=1, keepdims=True)
    last_BT = (sampled_BT > 0) & (xp.cumsum(sampled_BT, axis=1) == count_B1)
    first_BT = (count_B1 == 0) & (xp.arange(sampled_BT.shape[1]) == 0)
    return xp.where(last_BT | first_BT, reward_B[:, None], 0.0)


def masked_whiten(
    x_BT: Float[Array, "B T"], mask_BT: Mask, *, shift_mean: bool = True, eps: float = 1e-8
) -> Float[Array, "B T"]:
    """Scales the tokens with mask 1 of the whole batch to variance 1 and, by default, mean 0.

    The result is (x - mean) / sqrt(variance + eps). The variance has Bessel's correction, and both sums are divided by
    count + eps: the arithmetic of TRL and verl. Equal values become exactly 0; without `shift_mean` their mean is then
    added back.

    Args:
      x_BT: values; masked tokens are ignored, even if they hold NaN.
      mask_BT: 1 on tokens that count.
      shift_mean: True if the result has mean 0; False adds the mean of x back after the division.
      eps: number added to the variance and to the count.

    Returns:
      Whitened values, 0 where mask is 0.
    """
    xp = namespace(x_BT)
    keep_BT = mask_BT.astype(bool)
    x_BT = xp.where(keep_BT, x_BT, 0.0)
    count = keep_BT.sum().astype(x_BT.dtype)
    mean = x_BT.sum() / (count + eps)
    square = xp.where(keep_BT, (x_BT - mean) ** 2, 0.0).sum() / (count + eps)
    variance = square * count / xp.maximum(count - 1.0, 1.0)
    white_BT = (x_BT - mean) / xp.sqrt(variance + eps)
    # The computed mean of equal numbers can be off by a rounding error, which division by a small root would blow up.
    spread = xp.where(keep_BT, x_BT, -xp.inf).max() > xp.where(keep_BT, x_BT, xp.inf).min()
    white_BT = xp.where(spread, white_BT, 0.0)
    if not shift_mean:
        white_BT = white_BT + mean
    return xp.where(keep_BT, white_BT, 0.0)
