"""Packing: the place of each sequence in packed rows, and copies of values there and back."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch, Layout, Rollouts, Rows, SharedLayout


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """The prefixes that groups of B sequences have in common, and their lengths.

    Attributes:
      group_B: sequences of one group are equal in their first `length_B` tokens.
      length_B: how many; fewer than the sequence has, and none of them counts in a loss.
    """

    group_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]

    @staticmethod
    def of_prompts(length_P: Int[np.ndarray, " P"], group_B: Int[np.ndarray, " B"]) -> "SharedPrefixes":
        """Returns the shared prefixes of samples; `group_B` says which of the prompts each has.

        The last token of a prompt is not among those shared: what it predicts is another token in each sample.
        """
        return SharedPrefixes(group_B, np.maximum(np.asarray(length_P, np.int64)[group_B] - 1, 0))

    def chosen(self, index_n: Int[np.ndarray, " n"]) -> "SharedPrefixes":
        """Selects the shared prefixes of some of the sequences."""
        return SharedPrefixes(self.group_B[index_n], self.length_B[index_n])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of each of B sequences in the packed rows.

    Attributes:
      shape: of the packed arrays.
      micro_batches: micro-batches that hold tokens, at least 1.
      packed: tokens in all rows, those shared counted once a row.
      length_B: tokens of each sequence.
      micro_B, row_B: micro-batch of each sequence and row in it.
      start_B: where in the row its own tokens begin.
      segment_B: segment id of its own tokens in the row, from 1.
      shared_B: how many tokens it shares with others, before its own.
      shared_start_B, prefix_B: where those begin in the row, and their segment id (0 where there are none).
    """

    shape: PackShape
    micro_batches: int
    packed: int
    length_B: Int[np.ndarray, " B"]
    micro_B: Int[np.ndarray, " B"]
    row_B: Int[np.ndarray, " B"]
    start_B: Int[np.ndarray, " B"]
    segment_B: Int[np.ndarray, " B"]
    shared_B: Int[np.ndarray, " B"]
    shared_start_B: Int[np.ndarray, " B"]
    prefix_B: Int[np.ndarray, " B"]

    def padding_share(self) -> float:
        """Share of the computed tokens (those of filled micro-batches) that hold no sequence."""
        return 1.0 - self.packed / (self.micro_batches * self.shape.rows * self.shape.tokens)

    @functools.cached_property
    def _tokens(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """Lists (sequence, offset in it, index into the flattened packed array) of every real token, by sequence."""
        sequence_X = np.repeat(np.arange(len(self.length_B)), self.length_B)
        first_B = np.cumsum(self.length_B) - self.length_B
        offset_X = np.arange(len(sequence_X)) - first_B[sequence_X]
        begin_B = np.where(self.shared_B > 0, self.shared_start_B, self.start_B)
        begin_X = np.where(
            offset_X < self.shared_B[sequence_X], begin_B[sequence_X], (self.start_B - self.shared_B)[sequence_X]
        )
        row_X = (self.micro_B * self.shape.rows + self.row_B)[sequence_X]
        return sequence_X, offset_X, row_X * self.shape.tokens + begin_X + offset_X

    @functools.cached_property
    def _own(self) -> Bool[np.ndarray, " X"]:
        """Marks the real tokens that a sequence shares with no other."""
        return self._tokens[1] >= self.shared_B[self._tokens[0]]

    def scatter(
        self, values_BT: Shaped[np.ndarray, "B T"], *, where_BT: Shaped[np.ndarray, "B T"] | None = None
    ) -> Any:
        """Scatters per-token values from the sample layout to the packed rows, 0 on padding.

        Args:
          values_BT: in the sample layout, right-padded; integers become int32, all else float32.
          where_BT: tokens at which it is 0 get the value 0, whatever they hold, NaN included.

        Raises:
          ValueError: another number of rows than of placed sequences.
        """
        sequence_X, offset_X, _ = self._tokens
        values_X = self._checked(values_BT)[sequence_X, offset_X]
        if where_BT is not None:
            values_X = np.where(self._checked(where_BT)[sequence_X, offset_X] != 0, values_X, 0)
        return self._packed(values_X)

    def layout(self, tokens_BT: Int[np.ndarray, "B T"]) -> Layout:
        """Packs the tokens of right-padded sequences, with their segments and positions.

        Raises:
          ValueError: sequences that do not begin alike where they share tokens, or not those that were placed.
        """
        sequence_X, offset_X, flat_X = self._tokens
        tokens_X = self._checked(tokens_BT)[sequence_X, offset_X]
        tokens_ABT = self._packed(tokens_X)
        if (bad := np.flatnonzero(tokens_ABT.reshape(-1)[flat_X] != tokens_X)).size:
            raise ValueError(
                f"Sequence {sequence_X[bad[0]]} has token {tokens_X[bad[0]]} at {offset_X[bad[0]]}, where another of "
                "its group has a different one: samples of a prompt must begin with that prompt; or set "
                "trainer.share_prompts=False."
            )
        own_X, prefix_X = self._own, self.prefix_B[sequence_X]
        segment_ABT = self._packed(np.where(own_X, self.segment_B[sequence_X], prefix_X))
        position_ABT = self._packed(offset_X)
        if not self.shape.shared:
            return Layout(tokens_ABT, segment_ABT, position_ABT)
        return SharedLayout(tokens_ABT, segment_ABT, position_ABT, self._packed(np.where(own_X, prefix_X, 0)))

    def loss_tokens(self, mask_BT: Shaped[np.ndarray, "B T"]) -> tuple[Any, Any]:
        """Packs (1 where a token counts in the loss, number of such tokens in its sequence: at least 1, 1 on padding).

        Args:
          mask_BT: not 0 where a token counts.

        Raises:
          ValueError: a token that counts and is shared with other sequences, or not the placed sequences.
        """
        sequence_X, offset_X, _ = self._tokens
        mask_X = self._checked(mask_BT)[sequence_X, offset_X] != 0
        if (bad := np.flatnonzero(mask_X & ~self._own)).size:
            raise ValueError(
                f"Token {offset_X[bad[0]]} of sequence {sequence_X[bad[0]]} counts in the loss and is shared with "
                "other sequences: only tokens without a loss can be."
            )
        count_B = np.maximum(np.bincount(sequence_X, mask_X, minlength=len(self.length_B)), 1)
        return self._packed(mask_X), self._packed(np.where(self._own, count_B[sequence_X], 1.0), fill=1.0)

    def unpack(self, values_ABT: Shaped[np.ndarray, "A B T"], width: int) -> Shaped[np.ndarray, "B width"]:
        """Gathers per-token values from packed rows back to the sample layout, 0 beyond each sequence.

        Args:
          values_ABT: one value per packed token, on the host.
          width: T of the sample layout, at least the longest sequence.
        """
        sequence_X, offset_X, flat_X = self._tokens
        out_BT = np.zeros((len(self.length_B), width), values_ABT.dtype)
        out_BT[sequence_X, offset_X] = np.asarray(values_ABT).reshape(-1)[flat_X]
        return out_BT

    def batch(self, rows: Rows) -> Batch[Rows]:
        """Builds the batch from packed arrays of this placement; single numbers are repeated for each micro-batch."""
        A = self.shape.micro_batches
        whole: Any = jax.tree.map(lambda x: x if np.ndim(x) else np.full(A, x, np.float32), rows)
        count: Any = np.asarray(self.micro_batches, np.int32)
        return Batch(whole, count)

    def _packed(self, values_X: Shaped[np.ndarray, " X"], fill: float = 0) -> Any:
        shape = self.shape
        dtype = np.int32 if np.issubdtype(values_X.dtype, np.integer) else np.float32
        out = np.full(shape.micro_batches * shape.rows * shape.tokens, fill, dtype)
        out[self._tokens[2]] = values_X
        return out.reshape(shape.micro_batches, shape.rows, shape.tokens)

    def _checked(self, values_BT: Any) -> np.ndarray:
        values = np.asarray(values_BT)
        if len(values) != len(self.length_B):
            raise ValueError(
                f"{len(values)} rows of per-token values for {len(self.length_B)} placed sequences: pass those of the "
                "sequences that were placed."
            )
        return values


def place(length_B: Int[np.ndarray, " B"], shape: PackShape, prefixes: SharedPrefixes | None = None) -> Placement:
    """Places sequences: first-fit decreasing into rows, rows dealt to data shards so that token counts are close.

    Where the shape says so, sequences that begin alike go to a row together as far as they fit, with one copy of their
    beginning; where that takes more rows than the shape has, nothing is shared.

    Args:
      length_B: tokens of each sequence, at least 1.
      shape: what the rows look like.
      prefixes: which sequences begin alike; None where none do.

    Raises:
      ValueError: a sequence longer than a row, an empty sequence, or more rows than the shape has.
    """
    length_B = np.asarray(length_B, np.int64)
    if len(length_B) == 0:
        raise ValueError("There is no sequence to pack: a training batch needs at least one.")
    if length_B.min() < 1:
        raise ValueError(f"Sequence {int(length_B.argmin())} has {length_B.min()} tokens: every one needs at least 1.")
    if length_B.max() > shape.tokens:
        raise ValueError(
            f"Sequence {int(length_B.argmax())} has {length_B.max()} tokens but a packed row holds {shape.tokens}: "
            "raise trainer.max_tokens_per_row, or lower rollout.max_prompt_length or rollout.max_tokens_to_generate."
        )
    most = shape.micro_batches * shape.rows
    rows = _Rows(length_B, shape.tokens)
    if shape.shared and prefixes is not None:
        rows.fill_alike(prefixes)
    if not shape.shared or prefixes is None or len(rows.load) > most:
        rows = _Rows(length_B, shape.tokens)
        rows.fill()
    if len(load := rows.load) > most:
        raise ValueError(
            f"{len(length_B)} sequences fill {len(load)} rows of {shape.tokens} tokens but the batch has "
            f"{shape.micro_batches} x {shape.rows}: check trainer.mini_batch_size and trainer.max_tokens_per_row."
        )
    micro_batches = -(-len(load) // shape.rows)
    slot = _deal(load, micro_batches, shape)[rows.row_B]
    return Placement(
        shape,
        micro_batches,
        sum(load),
        length_B,
        slot // shape.rows,
        slot % shape.rows,
        start_B=rows.start_B,
        segment_B=rows.segment_B,
        shared_B=rows.shared_B,
        shared_start_B=rows.shared_start_B,
        prefix_B=rows.prefix_B,
    )


def place_samples(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], shape: PackShape) -> Placement:
    """Applies `place` to some of a batch's samples; those of one prompt share its tokens."""
    prefixes = SharedPrefixes.of_prompts(rollouts.prompts.length_P, rollouts.group_B)
    return place(rollouts.length_B[chosen_n], shape, prefixes.chosen(chosen_n))


class _Rows:
    """Rows being filled; each sequence's place, with rows numbered as they were opened.

    Attributes:
      load: tokens in each row.
    """

    def __init__(self, length_B: Int[np.ndarray, " B"], tokens: int):
        B = len(length_B)
        self._length_B, self._tokens = length_B, tokens
        self.row_B, self.start_B, self.segment_B = (np.zeros(B, np.int64) for _ in range(3))
        self.shared_B, self.shared_start_B, self.prefix_B = (np.zeros(B, np.int64) for _ in range(3))
        self.load: list[int] = []
        self._count: list[int] = []
        self._free = np.zeros(B, np.int64)

    def fill(self) -> None:
        """Places each sequence by itself, first-fit decreasing."""
        for b in np.argsort(-self._length_B, kind="stable"):
            row = self._first_with(int(self._length_B[b]))
            self._put(int(b), self._opened() if row is None else row, int(self._length_B[b]))

    def fill_alike(self, prefixes: SharedPrefixes) -> None:
        """Places sequences group by group, first-fit decreasing.

        A group that fits nowhere whole is split where that saves more padding than another copy of its prefix costs.
        """
        own_B = self._length_B - prefixes.length_B
        order_B = np.argsort(-own_B, kind="stable")
        groups: dict[tuple[int, int], list[int]] = {}
        for b in order_B.tolist():
            groups.setdefault((int(prefixes.group_B[b]), int(prefixes.length_B[b])), []).append(b)
        sizes = {key: key[1] + int(own_B[members].sum()) for key, members in groups.items()}
        for key in sorted(groups, key=lambda key: -sizes[key]):
            prefix, left = key[1], groups[key]
            while left:
                row, taken = self._first_with(prefix + int(own_B[left].sum())), left
                if row is None:
                    row = int(np.argmax(self._free[: len(self.load)])) if self.load else None
                    taken = [] if row is None else _that_fit(left, own_B, int(self._free[row]) - prefix)
                    if int(own_B[taken].sum()) <= prefix:
                        row, taken = self._opened(), _that_fit(left, own_B, self._tokens - prefix)
                assert row is not None
                self._put_alike(taken, row, prefix, own_B)
                placed = set(taken)
                left = [b for b in left if b not in placed]

    def _put_alike(self, members: list[int], row: int, prefix: int, own_B: Int[np.ndarray, " B"]) -> None:
        if prefix:
            self.shared_B[members], self.shared_start_B[members] = prefix, self.load[row]
            self.prefix_B[members] = self._count[row] + 1
            self._take(row, prefix)
        for b in members:
            self._put(b, row, int(own_B[b]))

    def _put(self, b: int, row: int, size: int) -> None:
        self.row_B[b], self.start_B[b], self.segment_B[b] = row, self.load[row], self._count[row] + 1
        self._take(row, size)

    def _take(self, row: int, size: int) -> None:
        self.load[row] += size
        self._count[row] += 1
        self._free[row] -= size

    def _first_with(self, room: int) -> int | None:
        fits = np.flatnonzero(self._free[: len(self.load)] >= room)
        return int(fits[0]) if len(fits) else None

    def _opened(self) -> int:
        self.load.append(0)
        self._count.append(0)
        self._free[len(self.load) - 1] = self._tokens
        return len(self.load) - 1


def _that_fit(members: list[int], size_B: Int[np.ndarray, " B"], room: int) -> list[int]:
    """Selects the sequences that fit together into some room, taken in their order."""
    taken = []
    for b in members:
        if size_B[b] <= room:
            taken.append(b)
            room -= int(size_B[b])
    return taken


def mini_batches(order_B: Sequence[int] | Int[np.ndarray, " B"], size: int | None) -> list[Int[np.ndarray, " size"]]:
    """Splits sequences, in the given order, into the groups that make one optimizer update each.

    Args:
      order_B: sequence indices, e.g. a permutation drawn for this pass over the batch.
      size: sequences per update; None is all of them.

    Raises:
      ValueError: `size` does not divide the number of sequences.
    """
    order = np.asarray(order_B, np.int64)
    size = len(order) if size is None else size
    if size < 1 or len(order) % size:
        raise ValueError(
            f"{len(order)} sequences do not split into mini-batches of {size}: trainer.mini_batch_size must divide the "
            "prompts of a step."
        )
    return list(order.reshape(-1, size))


def _deal(load: Sequence[int], micro_batches: int, shape: PackShape) -> Int[np.ndarray, " rows"]:
    """Assigns a slot (micro-batch x B + row) to every row; the heaviest first, each to the lightest shard with room."""
    per_shard, groups = shape.rows // shape.shards, micro_batches * shape.shards
    tokens, used, slots = (np.zeros(n, np.int64) for n in (groups, groups, len(load)))
    for row in np.argsort(-np.asarray(load), kind="stable"):
        group = int(np.argmin(np.where(used < per_shard, tokens, np.iinfo(np.int64).max)))
        micro, shard = divmod(group, shape.shards)
        slots[row] = micro * shape.rows + shard * per_shard + used[group]
        tokens[group] += load[row]
        used[group] += 1
    return slots
