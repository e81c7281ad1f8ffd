"""Groups of samples: a sample finds its prompt by an index, `group_B`, whatever the size and the order of groups.

`group_B[b]` is the row of sample b's prompt. Groups may be incomplete, and of different sizes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


def complete(prompts: int, size: int) -> Int[np.ndarray, " B"]:
    """Makes the index of `size` samples of each of `prompts` prompts, group after group."""
    return np.repeat(np.arange(prompts, dtype=np.int32), size)


def by_size(group_B: Int[np.ndarray, " B"]) -> list[Int[np.ndarray, "P G"]]:
    """Lists the samples of each group: one array for each size that groups have, its rows the groups of that size."""
    order_B = np.argsort(group_B, kind="stable")
    _, first_P, size_P = np.unique(np.asarray(group_B)[order_B], return_index=True, return_counts=True)
    return [order_B[first_P[size_P == G][:, None] + np.arange(G)] for G in np.unique(size_P)]


def rows_of(group_B: Int[np.ndarray, " B"], groups_P: Sequence[int] | Int[np.ndarray, " P"]) -> Int[np.ndarray, " B"]:
    """Lists the samples of some groups, group after group in the order given."""
    return np.concatenate([np.flatnonzero(group_B == p) for p in groups_P] or [np.zeros(0, np.int64)])


def member_of(group_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Numbers the samples within their groups, from 0."""
    member_B = np.zeros(len(group_B), np.int64)
    for rows_PG in by_size(group_B):
        member_B[rows_PG] = np.arange(rows_PG.shape[1])
    return member_B


def first_of(group_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " P"]:
    """Lists the first sample of each group that has one, in the order of the groups."""
    return np.unique(group_B, return_index=True)[1]


def any_of(flag_B: Bool[np.ndarray, " B"], group_B: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
    """Marks the samples of groups in which any sample is marked."""
    return np.isin(group_B, np.asarray(group_B)[flag_B])


def spread(value_B: Float[np.ndarray, " B"], group_B: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Computes the largest less the smallest value of each sample's group."""
    spread_B = np.zeros(len(value_B), np.float64)
    for rows_PG in by_size(group_B):
        spread_B[rows_PG] = np.ptp(value_B[rows_PG], axis=1)[:, None]
    return spread_B


def repeated(values: Sequence[Any], group_B: Int[np.ndarray, " B"]) -> list[Any]:
    """Gives each sample what belongs to its prompt."""
    return [values[p] for p in group_B]
