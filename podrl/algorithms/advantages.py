"""Advantage estimators for outcome rewards; they differ in the baseline and in the scale.

Every function takes numpy arrays or jax arrays and returns arrays of the same library and precision; functions that
take groups turn integer rewards into float32. Groups may be incomplete, of different sizes, and in any order.

A group of one sample has no baseline: by default its advantage is 0, so the sample teaches nothing. With
`singleton="raw"` its advantage is its reward, as in verl.

An advantage that is divided by a spread of rewards, or by their mean, is unitless; all others are in reward units.

Shared arguments:
  reward_B: task rewards, any range.
  mask_BT: 1 on tokens the policy sampled.
  group_B: number of each sample's group, a numpy array (`podrl.groups`). ValueError if its length is not B.
  singleton: advantage of a group of one, "zero" or "raw". ValueError for any other value.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float, Int

from podrl.algorithms.gae import discounted_return, masked_whiten, namespace
from podrl.groups import by_size
from podrl.types import BatchError, Mask

GroupIndex = Int[np.ndarray, " B"]
Groups = Float[Array, "P G"]  # P groups of G samples


def by_group(estimate: Callable[..., Groups], group_B: GroupIndex, *values_B: Float[Array, " B"]) -> Float[Array, " B"]:
    """Calls an estimator once for all groups of one size, and returns its results in the order of the samples.

    Args:
      estimate: function of one (P, G) array for each of `values_B`, with P groups of G samples; returns a (P, G) array.
      group_B: number of each sample's group.
      values_B: arrays with one value per sample; the first array holds the rewards.

    Raises:
      ValueError: the number of rewards differs from the length of `group_B`.
    """
    size = values_B[0].shape[0]
    if len(group_B) != size:
        raise ValueError(f"{size} rewards do not fit the groups of {len(group_B)} samples: each needs one reward.")
    xp = namespace(values_B[0])
    if not xp.issubdtype(values_B[0].dtype, xp.floating):
        values_B = (values_B[0].astype(xp.float32), *values_B[1:])
    sizes = by_size(group_B)
    order_B = np.concatenate([rows_PG.ravel() for rows_PG in sizes])
    # podrl's engine returns groups of one size, one after another: a reshape is then enough.
    if len(sizes) == 1 and np.array_equal(order_B, np.arange(size)):
        return estimate(*(values.reshape(sizes[0].shape) for values in values_B)).reshape(-1)
    advantages = [estimate(*(values[rows_PG] for values in values_B)).reshape(-1) for rows_PG in sizes]
    return xp.concatenate(advantages)[np.argsort(order_B)]


def _centred(reward_PG: Groups, baseline_PG: Groups) -> Groups:
    """Subtracts the baseline; the result is exactly 0 in a group of equal rewards.

    The computed mean of equal numbers can be off by a rounding error. Without this rule a later division by a tiny
    standard deviation would turn the error into a signal.
    """
    some_P1 = reward_PG.max(axis=1, keepdims=True) > reward_PG.min(axis=1, keepdims=True)
    return namespace(reward_PG).where(some_P1, reward_PG - baseline_PG, 0.0)


def _singleton(reward_PG: Groups, advantage_PG: Groups, singleton: str) -> Groups:
    if singleton not in ("zero", "raw"):
        raise ValueError(f"grpo.singleton={singleton!r}: use 'zero' (teach nothing) or 'raw' (keep the reward).")
    if reward_PG.shape[1] > 1:
        return advantage_PG
    return reward_PG if singleton == "raw" else namespace(reward_PG).zeros_like(reward_PG)


def group_relative(
    reward_B: Float[Array, " B"],
    *,
    group_B: GroupIndex,
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Float[Array, " B"]:
    """Centres and scales each reward within its group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
      scale: "std" divides by the group's standard deviation + eps; "batch" divides by the standard deviation of all
        rewards + eps (arXiv 2508.08221), unless there is only one reward; "none" only centres (Dr. GRPO, arXiv
        2503.20783).
      ddof: 1 for the sample standard deviation (Tunix, TRL, verl), 0 for the population's (NumPy, open-instruct).
      eps: number added to the standard deviation; a group of equal rewards gives exactly 0.
      singleton: advantage of a group of one: "zero", or "raw" for the reward. A `scale` of "std" divides this reward by
        1 + eps, "batch" divides it by the standard deviation of all rewards + eps.

    Returns:
      Advantages, with mean 0 in every group except groups of one under "raw"; unitless, but in reward units under
      "none".

    Raises:
      ValueError: unknown `scale`, `ddof` or `singleton`.
    """
    if scale not in ("std", "batch", "none"):
        raise ValueError(f"grpo.advantage_scale={scale!r}: use 'std', 'batch' or 'none'.")
    if scale != "none" and ddof not in (0, 1):
        raise ValueError(f"grpo.advantage_ddof={ddof}: use 1 (sample) or 0 (population).")

    def estimate(reward_PG: Groups) -> Groups:
        advantage_PG = _centred(reward_PG, reward_PG.mean(axis=1, keepdims=True))
        if scale == "std" and reward_PG.shape[1] == 1:
            return _singleton(reward_PG / (1.0 + eps), advantage_PG, singleton)
        if scale == "std":
            advantage_PG = advantage_PG / (reward_PG.std(axis=1, ddof=ddof, keepdims=True) + eps)
        return _singleton(reward_PG, advantage_PG, singleton)

    advantage_B = by_group(estimate, group_B, reward_B)
    if scale == "batch" and len(group_B) > 1:
        advantage_B = advantage_B / (reward_B.astype(advantage_B.dtype).std(ddof=ddof) + eps)
    return advantage_B


def maxrl(
    reward_B: Float[Array, " B"], *, group_B: GroupIndex, eps: float = 1e-6, singleton: str = "zero"
) -> Float[Array, " B"]:
    """Centres each reward within its group and divides by the group's mean (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 the weight of a prompt is one over its success rate, as in the gradient of the log of the
    success rate.

    Args:
      reward_B: task rewards, 0 or more.
      eps: smallest divisor; a group of equal rewards gives exactly 0.

    Returns:
      Advantages, unitless, with mean 0 in every group; in a group of one under "raw", the reward.

    Raises:
      BatchError: a numpy reward is negative. The mean is then no success rate, and can be 0 although rewards differ.
    """

    def estimate(reward_PG: Groups) -> Groups:
        mean_P1 = reward_PG.mean(axis=1, keepdims=True)
        # Not mean + eps: with a mean of 1/8 and an eps of 1e-6, the divisor would be off by a share of 8e-6.
        divisor_P1 = namespace(reward_PG).maximum(mean_P1, eps)
        return _singleton(reward_PG, _centred(reward_PG, mean_P1) / divisor_P1, singleton)

    if isinstance(reward_B, np.ndarray) and (reward_B < 0).any():
        raise BatchError(
            f"maxrl divides by the mean reward of a group, and a reward is {reward_B.min():g}: rewards must be 0 or "
            "more, such as 1 for a right answer. Change reward.fns or reward.weights, or take another "
            "grpo.advantage_estimator."
        )
    return by_group(estimate, group_B, reward_B)


def leave_one_out(
    reward_B: Float[Array, " B"],
    *,
    group_B: GroupIndex,
    scale: str = "none",
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Float[Array, " B"]:
    """Subtracts the mean reward of the group's other samples (RLOO, arXiv 2402.14740).

    Args:
      scale: "none" does not divide. "std" also divides by eps plus the sample standard deviation of the other samples'
        rewards (NeMo-RL's GRPO); if these rewards are equal, or if there is only one, "std" does not divide either.
      eps: number added to the standard deviation.

    Returns:
      Advantages in reward units; under "std" the advantages that were divided are unitless.
    """

    def estimate(reward_PG: Groups) -> Groups:
        others = max(reward_PG.shape[1] - 1, 1)
        baseline_PG = (reward_PG.sum(axis=1, keepdims=True) - reward_PG) / others
        advantage_PG = _centred(reward_PG, baseline_PG)
        if scale == "std" and others > 1:
            advantage_PG = advantage_PG / _spread_of_others(reward_PG, baseline_PG, eps)
        return _singleton(reward_PG, advantage_PG, singleton)

    return by_group(estimate, group_B, reward_B)


def _spread_of_others(reward_PG: Groups, mean_PG: Groups, eps: float) -> Groups:
    """Computes, for each sample, the standard deviation + eps of its group's other rewards; 1 if these are equal.

    The standard deviation has Bessel's correction.

    Args:
      reward_PG: rewards of P groups of G samples, G at least 3.
      mean_PG: mean of the other rewards of each sample's group.
      eps: number added to the standard deviation.
    """
    xp, size = namespace(reward_PG), reward_PG.shape[1]
    other_GG = ~np.eye(size, dtype=bool)
    reward_P1G = reward_PG[:, None, :]
    square_PGG = xp.where(other_GG, (reward_P1G - mean_PG[:, :, None]) ** 2, 0.0)
    most_PG = xp.where(other_GG, reward_P1G, -np.inf).max(axis=2)
    least_PG = xp.where(other_GG, reward_P1G, np.inf).min(axis=2)
    return xp.where(most_PG > least_PG, (square_PGG.sum(axis=2) / (size - 2)) ** 0.5 + eps, 1.0)


def opo(
    reward_B: Float[Array, " B"], length_B: Float[Array, " B"], *, group_B: GroupIndex, singleton: str = "zero"
) -> Float[Array, " B"]:
    """Subtracts the length-weighted mean reward of the group (OPO, arXiv 2505.23585, eq. 8).

    Args:
      length_B: number of sampled tokens of each completion.

    Returns:
      Advantages, in reward units.
    """

    def estimate(reward_PG: Groups, length_PG: Groups) -> Groups:
        length_PG = length_PG.astype(reward_PG.dtype)
        total_P1 = namespace(reward_PG).maximum(length_PG.sum(axis=1, keepdims=True), 1.0)
        baseline_P1 = (length_PG * reward_PG).sum(axis=1, keepdims=True) / total_P1
        return _singleton(reward_PG, _centred(reward_PG, baseline_P1), singleton)

    return by_group(estimate, group_B, reward_B, length_B)


def gpg(reward_B: Float[Array, " B"], *, group_B: GroupIndex, singleton: str = "zero") -> Float[Array, " B"]:
    """Scales centred rewards by B / (B - M) (GPG, arXiv 2504.02546, eq. 8).

    M is the number of samples in groups of equal rewards. The factor makes up for these groups, which contribute no
    gradient. (In verl M is the number of samples of reward 0.)

    Returns:
      Advantages, in reward units.
    """
    unequal_B = by_group(_unequal, group_B, reward_B)
    useful = namespace(reward_B).maximum(unequal_B.sum(), 1)

    def estimate(reward_PG: Groups) -> Groups:
        advantage_PG = _centred(reward_PG, reward_PG.mean(axis=1, keepdims=True))
        factor = len(group_B) / useful.astype(reward_PG.dtype)
        return _singleton(reward_PG, advantage_PG * factor, singleton)

    return by_group(estimate, group_B, reward_B)


def _unequal(reward_PG: Groups) -> Groups:
    """Returns 1 for every sample of a group whose rewards differ, else 0."""
    some_P1 = reward_PG.max(axis=1, keepdims=True) != reward_PG.min(axis=1, keepdims=True)
    return namespace(reward_PG).zeros_like(reward_PG) + some_P1


def pass_at_k(
    reward_B: Float[Array, " B"], *, group_B: GroupIndex, scale: str = "std", eps: float = 1e-6
) -> Float[Array, " B"]:
    """Credits the best sample of a group with its lead over the second best (pass@k with k = G, arXiv 2503.19595).

    The advantage of all other samples is 0. If two samples share the best reward, their advantages are 0 as well.

    Args:
      group_B: number of each sample's group; every group has at least 2 samples.
      scale: "std" divides by the group's sample standard deviation + eps, "none" does not divide.
      eps: number added to the standard deviation.

    Returns:
      Advantages, 0 or more; unitless under "std", in reward units under "none".

    Raises:
      ValueError: a group of one, or an unknown `scale`.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"grpo.advantage_scale={scale!r}: use 'std' or 'none'.")

    def estimate(reward_PG: Groups) -> Groups:
        xp, size = namespace(reward_PG), reward_PG.shape[1]
        if size < 2:
            raise ValueError(
                f"pass@k needs at least 2 samples in every group, and one has {size}: raise grpo.num_generations."
            )
        ranked_PG = xp.sort(reward_PG, axis=1)
        lead_P1 = ranked_PG[:, -1:] - ranked_PG[:, -2:-1]
        if scale == "std":
            lead_P1 = lead_P1 / (reward_PG.std(axis=1, ddof=1, keepdims=True) + eps)
        # If two samples share the best reward, the lead is 0, so it does not matter that both are marked.
        return xp.where(reward_PG == ranked_PG[:, -1:], lead_P1, 0.0)

    return by_group(estimate, group_B, reward_B)


def remax(reward_B: Float[Array, " B"], greedy_reward_B: Float[Array, " B"]) -> Float[Array, " B"]:
    """Subtracts the reward of the prompt's greedy completion (ReMax, arXiv 2310.10505).

    Args:
      reward_B: task rewards of the samples.
      greedy_reward_B: reward of the greedy completion, repeated for each sample of its prompt.

    Returns:
      Advantages, in reward units.
    """
    return reward_B - greedy_reward_B


def reinforce_plus_plus(
    reward_BT: Float[Array, "B T"], mask_BT: Mask, *, gamma: float = 1.0
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Whitens discounted returns over all sampled tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Args:
      reward_BT: token rewards, less the KL penalty (`kl.penalized_reward`); `gae.outcome_reward` makes token rewards of
        outcome rewards.
      gamma: discount per sampled token.

    Returns:
      Advantages (unitless) and returns (reward units), both 0 where mask is 0.
    """
    return_BT = discounted_return(reward_BT, mask_BT, gamma=gamma)
    return masked_whiten(return_BT, mask_BT), return_BT


def reinforce_plus_plus_baseline(
    reward_B: Float[Array, " B"], mask_BT: Mask, *, group_B: GroupIndex, singleton: str = "zero"
) -> Float[Array, "B T"]:
    """Centres rewards within the group, then whitens over all sampled tokens of the batch (arXiv 2501.03262).

    Args:
      mask_BT: 1 on tokens the policy sampled. The whitening counts tokens, so longer completions weigh more in it.
      singleton: advantage of a group of one before whitening, "zero" or "raw".

    Returns:
      Advantages, unitless, 0 where mask is 0.
    """
    centred_B = group_relative(reward_B, group_B=group_B, scale="none", singleton=singleton)
    return masked_whiten(centred_B[:, None] * mask_BT.astype(centred_B.dtype), mask_BT)
