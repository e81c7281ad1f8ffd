"""Rewards for events between a sample's turns, when an environment or its tools ran."""

from collections.abc import Sequence

from podrl.mappings import TurnRecord


def failed_calls(
    prompts: Sequence[str], completions: Sequence[str], turns: Sequence[Sequence[TurnRecord]], **fields: object
) -> list[float]:
    """Scores -1 for every tool call that failed, such as by an unknown tool, bad arguments, an error, or a deadline.

    `turns` holds the records of each sample's turns, as in samples.jsonl: 'failed' in the record of a call says why the
    call failed; it is '' if the call did not fail.
    """
    del prompts, completions, fields
    return [-float(sum(bool(turn.get("failed")) for turn in sample)) for sample in turns]
