"""Rewards of what happened between a sample's turns, where an environment or its tools ran."""

from collections.abc import Mapping, Sequence
from typing import Any


def failed_calls(
    prompts: Sequence[str], completions: Sequence[str], turns: Sequence[Sequence[Mapping[str, Any]]], **fields: Any
) -> list[float]:
    """-1 for every call that failed: an unknown tool, bad arguments, an exception, a deadline.

    `turns` are the records of each sample, as in samples.jsonl: a call's names why it failed, '' where it did not.
    """
    del prompts, completions, fields
    return [-float(sum(bool(turn.get("failed")) for turn in sample)) for sample in turns]
