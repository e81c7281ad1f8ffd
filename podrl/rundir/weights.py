"""Compares the weight and the clipping of every token in the updates of one step, between two runs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from podrl.groups import member_of
from podrl.rundir.trace import WEIGHTS, TracedStep

COUNTS = ("advantage", "tokens", "clipped", "clipped now", "mean |weight|", "mean |weight| now", "weight changed")
CHANGED = ("token", "prompt", "sample", "place", "advantage", "weight", "weight now", "clipped", "clipped now")


@dataclasses.dataclass(frozen=True)
class WeightComparison:
    """Two tables, as texts of cells, about the tokens of a step that count in the loss.

    Attributes:
      counts: rows with the columns of COUNTS, one row per sign of the advantage, and one for all tokens.
      changed: rows with the columns of CHANGED, one row for each of the tokens whose weight changed most.
    """

    counts: Sequence[Sequence[str]]
    changed: Sequence[Sequence[str]]


def compare(before: TracedStep, now: TracedStep, *, most: int = 10) -> WeightComparison:
    """Compares weight and clipping token by token; both steps must have been recorded with log.trace='updates'.

    Args:
      before: record of the step in the first run.
      now: record of the step in the second run.
      most: largest number of tokens to list.

    Raises:
      ValueError: a step lacks weight and clipping, or the two steps have different samples.
    """
    for name in WEIGHTS:
        if name not in before.tokens or name not in now.tokens:
            raise ValueError(
                "weight and clip of tokens are known only in steps that update a policy by GRPO, PPO or their "
                "families, not in steps in which only PPO's critic learns"
            )
    same = ("tokens", "version")
    if any(not np.array_equal(before.tokens[name], now.tokens[name]) for name in same):
        raise ValueError("the change led to other samples, so tokens cannot be compared one by one")
    advantage_X, counted_X = before.tokens["advantage"], before.tokens["trained"] > 0
    (old_X, old_clip_X), (new_X, new_clip_X) = ([step.tokens[name] for name in WEIGHTS] for step in (before, now))
    changed_X = np.where(counted_X, np.abs(new_X - old_X), 0.0)
    signs = {
        "positive": counted_X & (advantage_X > 0),
        "negative": counted_X & (advantage_X < 0),
        "zero": counted_X & (advantage_X == 0),
        "all": counted_X,
    }
    counts = []
    for sign, of_X in signs.items():
        if not of_X.any():
            continue
        clipped = [str(int((clip_X[of_X] > 0).sum())) for clip_X in (old_clip_X, new_clip_X)]
        means = [f"{np.abs(weight_X[of_X]).mean():.6g}" for weight_X in (old_X, new_X)]
        counts.append([sign, str(int(of_X.sum())), *clipped, *means, str(int((changed_X[of_X] > 0).sum()))])
    order_X = np.argsort(-changed_X, kind="stable")[:most]
    sample_X = np.repeat(np.arange(len(before.first)), before.samples["length"])
    group_B, member_B, rows = before.samples["group"], member_of(before.samples["group"]), []
    for x in (int(x) for x in order_X if changed_X[x] > 0):
        b = int(sample_X[x])
        position = [str(group_B[b]), str(member_B[b]), str(x - int(before.first[b]))]
        numbers = [f"{float(of_X[x]):.4g}" for of_X in (advantage_X, old_X, new_X, old_clip_X, new_clip_X)]
        rows.append([repr(before.pieces[int(before.tokens["tokens"][x])]), *position, *numbers])
    return WeightComparison(counts, rows)
