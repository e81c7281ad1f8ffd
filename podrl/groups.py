"""Groups of samples: an index, `group_B`, maps each sample to its prompt, so groups may differ in size and order.

`group_B[b]` is the row of sample b's prompt among the P prompts. Groups may be incomplete, and of different sizes.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

T = TypeVar("T")


def complete(prompts: int, size: int) -> Int[np.ndarray, " B"]:
    """Makes the index of complete groups: `size` samples of each of `prompts` prompts, group after group."""
    return np.repeat(np.arange(prompts, dtype=np.int32), size)


def by_size(group_B: Int[np.ndarray, " B"]) -> list[Int[np.ndarray, "P G"]]:
    """Lists the samples of each group: one array (P groups, G samples) for each size G that groups have."""
    order_B = np.argsort(group_B, kind="stable")
    _, first_P, size_P = np.unique(np.asarray(group_B)[order_B], return_index=True, return_counts=True)
    return [order_B[first_P[size_P == G][:, None] + np.arange(G)] for G in np.unique(size_P)]


def rows_of(group_B: Int[np.ndarray, " B"], groups_P: Sequence[int] | Int[np.ndarray, " P"]) -> Int[np.ndarray, " B"]:
    """Lists the samples of the groups `groups_P`, group after group in the order of `groups_P`."""
    return np.concatenate([np.flatnonzero(group_B == p) for p in groups_P] or [np.zeros(0, np.int64)])


def member_of(group_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Numbers the samples within their groups, from 0, in the order of the batch."""
    member_B = np.zeros(len(group_B), np.int64)
    for rows_PG in by_size(group_B):
        member_B[rows_PG] = np.arange(rows_PG.shape[1])
    return member_B


def first_of(group_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " P"]:
    """Lists the first sample of each group that has samples, in the order of the groups' prompts."""
    return np.unique(group_B, return_index=True)[1]


def any_of(flag_B: Bool[np.ndarray, " B"], group_B: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
    """Marks every sample of each group in which `flag_B` marks a sample."""
    return np.isin(group_B, np.asarray(group_B)[flag_B])


def spread(value_B: Float[np.ndarray, " B"], group_B: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Computes, for each sample, the largest minus the smallest value of the sample's group."""
    spread_B = np.zeros(len(value_B), np.float64)
    for rows_PG in by_size(group_B):
        spread_B[rows_PG] = np.ptp(value_B[rows_PG], axis=1)[:, None]
    return spread_B


def repeated(values: Sequence[T], group_B: Int[np.ndarray, " B"]) -> list[T]:
    """Repeats the values of the prompts, so that each sample has the value of its prompt."""
    return [values[p] for p in group_B]
