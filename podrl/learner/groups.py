"""Cutting and joining batches of prompts and of their samples, whole groups at a time."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from podrl.types import Prompts, Rollouts


def take_prompts(prompts: Prompts, rows_P: Int[np.ndarray, " P"]) -> Prompts:
    """Some prompts of a batch, in the order given; the data position stays that of the whole batch."""
    return dataclasses.replace(
        prompts,
        tokens_PT=prompts.tokens_PT[rows_P],
        length_P=prompts.length_P[rows_P],
        index_P=prompts.index_P[rows_P],
        text=[prompts.text[int(p)] for p in rows_P],
        fields={name: [values[int(p)] for p in rows_P] for name, values in prompts.fields.items()},
    )


def select(rollouts: Rollouts, groups_P: Int[np.ndarray, " P"], group_size: int) -> Rollouts:
    """The samples of some prompts, in the order given."""
    rows_B = (groups_P[:, None] * group_size + np.arange(group_size)).ravel()
    arrays = {
        field.name: getattr(rollouts, field.name)[rows_B]
        for field in dataclasses.fields(rollouts)
        if isinstance(getattr(rollouts, field.name), np.ndarray)
    }
    return dataclasses.replace(
        rollouts,
        prompts=take_prompts(rollouts.prompts, groups_P),
        completions=[rollouts.completions[int(b)] for b in rows_B],
        **arrays,
    )


def join(parts: Sequence[Rollouts], prompts: Prompts) -> Rollouts:
    """Batches of samples of consecutive prompts of one batch, one after the other.

    Args:
      parts: samples of the first prompts, of the next ones, ...; rows of one width.
      prompts: the batch they were taken from.
    """
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(parts[0])
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    asked = sum(len(part.prompts.length_P) for part in parts)
    return dataclasses.replace(
        parts[0],
        prompts=take_prompts(prompts, np.arange(asked)),
        completions=[text for part in parts for text in part.completions],
        seconds=sum(part.seconds for part in parts),
        **arrays,
    )
