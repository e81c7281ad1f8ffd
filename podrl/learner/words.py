"""The text of a sample that reward functions and accuracies read: what the model wrote, not what it was told."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def scored_text(
    completion: str, episode: Mapping[str, Any], own: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> str:
    """Leaves out what tools and environments said, so that a tool's words never count as the model's answer.

    Args:
      completion: all of the sample's text, or the text that its environment gave.
      episode: the sample's entry of `Rollouts.episodes`.
      own: the sampled tokens.
      decode: makes text of tokens.
    """
    told = any("versions" not in turn for turn in episode["turns"])  # a tool may have any name, "model" too
    return decode(own) if told and "text" not in episode else completion
