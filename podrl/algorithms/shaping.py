"""Reward shaping: a penalty on completions that come close to the length limit."""

from typing import Any

from jaxtyping import Array, Float, Int

from podrl.algorithms.gae import namespace


def overlong_penalty(
    length_B: Int[Array, " B"], *, limit: int, buffer: int, penalty: float = 1.0
) -> Float[Array, " B"]:
    """Penalises long completions (DAPO, arXiv 2503.14476, eq. 13).

    The result is 0 up to limit - buffer tokens, then falls linearly to -penalty at the limit.

    Args:
      length_B: number of sampled tokens of each completion.
      limit: largest number of sampled tokens of a completion.
      buffer: number of tokens before the limit over which the penalty grows, in [1, limit].
      penalty: penalty at the limit, reward units.

    Returns:
      Numbers to add to the rewards, in [-penalty, 0].

    Raises:
      ValueError: `buffer` lies outside [1, limit].
    """
    if not 1 <= buffer <= limit:
        raise ValueError(
            f"overlong_buffer={buffer} must lie in [1, rollout.max_tokens_to_generate={limit}]: it is the number of "
            "tokens before the limit over which the penalty grows."
        )
    xp: Any = namespace(length_B)
    over_B = (length_B - (limit - buffer)) / buffer
    return -penalty * xp.clip(over_B, 0.0, 1.0)
