"""The format reward of R1-style training: one pair of think tags, one pair of answer tags, nothing else."""

import re
from collections.abc import Sequence

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def r1_format(prompts: Sequence[str], completions: Sequence[str], **fields: object) -> list[float]:
    """Scores 1 for `<think>...</think><answer>...</answer>` alone, each tag once; else 0 (arXiv 2501.12948).

    A prompt that ends with `<think>` has opened the thoughts already: the completion must then start inside them.
    """
    del fields
    return [float(_keeps(_opened(p) + c)) for p, c in zip(prompts, completions, strict=True)]


def _opened(prompt: str) -> str:
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


def _keeps(text: str) -> bool:
    # The tags are counted first, for speed: if each occurs once, the pattern has only one place to try.
    return all(text.count(tag) == 1 for tag in TAGS) and _FORMAT.fullmatch(text) is not None
