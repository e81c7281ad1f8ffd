"""Reward shaping by completion length."""

from typing import Any

from jaxtyping import Array, Float, Int

from podrl.algorithms.gae import namespace


def overlong_penalty(
    length_B: Int[Array, " B"], *, limit: int, buffer: int, penalty: float = 1.0
) -> Float[Array, " B"]:
    """Penalises long completions: 0 up to limit - buffer tokens, then linear to -penalty at the limit (DAPO, eq. 13).

    Args:
      length_B: sampled tokens of each completion, tokens and not characters.
      limit: the most a completion may have.
      buffer: tokens before the limit over which the penalty grows, at least 1 and at most `limit`.
      penalty: reward units.

    Raises:
      ValueError: a buffer outside [1, limit].
    """
    if not 1 <= buffer <= limit:
        raise ValueError(
            f"overlong_buffer={buffer} must lie in [1, rollout.max_tokens_to_generate={limit}]: it is the number of "
            "tokens before the limit over which the penalty grows."
        )
    xp: Any = namespace(length_B)
    over_B = (length_B - (limit - buffer)) / buffer
    return -penalty * xp.clip(over_B, 0.0, 1.0)
