"""The text of a sample that reward functions and accuracies read: what the model wrote, not what it was told."""

from collections.abc import Mapping
from typing import Any


def scored_text(completion: str, episode: Mapping[str, Any]) -> str:
    """Leaves out what tools and environments said, so that a tool's words never count as the model's answer.

    Args:
      completion: all of the sample's text, or the text that its environment gave.
      episode: the sample's entry of `Rollouts.episodes`.
    """
    own = [turn["text"] for turn in episode["turns"] if "versions" in turn]  # a tool may have any name, "model" too
    return completion if "text" in episode or len(own) == len(episode["turns"]) else "".join(own)
