"""The text of a sample that reward functions and accuracies read: the model's own words, without words of tools."""

from podrl.mappings import EpisodeRecord


def scored_text(completion: str, episode: EpisodeRecord) -> str:
    """Removes the words of tools and environments, so that they never count as the model's answer.

    Args:
      completion: all of the sample's text, or the text that its environment gave.
      episode: the sample's entry of `Rollouts.episodes`.
    """
    # Only the model's turns have "versions"; the name in "by" is not proof, because a tool may be called "model".
    own = [turn["text"] for turn in episode["turns"] if "versions" in turn]
    return completion if "text" in episode or len(own) == len(episode["turns"]) else "".join(own)
