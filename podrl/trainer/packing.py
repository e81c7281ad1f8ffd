"""Packing: chooses the place of each sequence in packed rows, and copies values to packed rows and back."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch, Layout, PiecesLayout, Rollouts, Rows, SharedLayout


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """The prefixes that B sequences share within their groups.

    Attributes:
      group_B: number of each sequence's group; sequences of one group begin with the same `length_B` tokens.
      length_B: number of shared tokens, fewer than the sequence has; none of them counts in a loss.
    """

    group_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]

    @staticmethod
    def of_prompts(length_P: Int[np.ndarray, " P"], group_B: Int[np.ndarray, " B"]) -> "SharedPrefixes":
        """Returns the shared prefixes of samples, which are their prompts without the last token.

        The last token of a prompt is not shared, because it predicts another token in each sample.

        Args:
          length_P: tokens of each prompt.
          group_B: index of each sample's prompt.
        """
        return SharedPrefixes(group_B, np.maximum(np.asarray(length_P, np.int64)[group_B] - 1, 0))

    def chosen(self, index_n: Int[np.ndarray, " n"]) -> "SharedPrefixes":
        """Returns the shared prefixes of the sequences at `index_n`."""
        return SharedPrefixes(self.group_B[index_n], self.length_B[index_n])


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The B token sequences of a number of samples; each sequence is a part of one sample's row.

    Attributes:
      samples: number of samples.
      sample_B: index of each sequence's sample, ascending.
      begin_B: index in the sample's row at which the sequence begins.
      length_B: number of tokens of each sequence, at least 1.
    """

    samples: int
    sample_B: Int[np.ndarray, " B"]
    begin_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]

    @staticmethod
    def one_each(length_B: Int[np.ndarray, " B"]) -> "Pieces":
        """Makes one sequence of each sample, whose lengths are `length_B`."""
        return Pieces(len(length_B), np.arange(len(length_B)), np.zeros(len(length_B), np.int64), length_B)

    @staticmethod
    def of(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"]) -> "Pieces":
        """Lists the pieces of the samples at `chosen_n`, without pieces that have no sampled token.

        A sample without any sampled token keeps its first piece.
        """
        length_n, piece_nT = np.asarray(rollouts.length_B[chosen_n], np.int64), rollouts.piece_BT[chosen_n]
        if not piece_nT.any():
            return Pieces.one_each(length_n)
        real_nT = np.arange(piece_nT.shape[1]) < length_n[:, None]
        begins_nT = np.diff(piece_nT, axis=1, prepend=-1) != 0
        sample_X, begin_X = np.nonzero(begins_nT & real_nT)
        last_X = np.append(sample_X[1:] != sample_X[:-1], True)
        length_X = np.where(last_X, length_n[sample_X], np.roll(begin_X, -1)) - begin_X
        sampled_nT = np.pad(np.cumsum(rollouts.mask_BT[chosen_n] > 0, axis=1), ((0, 0), (1, 0)))
        sampled_X = sampled_nT[sample_X, begin_X + length_X] - sampled_nT[sample_X, begin_X]
        silent_n = np.bincount(sample_X, sampled_X, minlength=len(length_n)) == 0
        kept_X = (sampled_X > 0) | (silent_n[sample_X] & (begin_X == 0))
        return Pieces(len(length_n), sample_X[kept_X], begin_X[kept_X], length_X[kept_X])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of each of B sequences in the packed rows.

    Methods take and return per-token values in the sample layout: one right-padded row per sample, in which the
    sample's sequences lie as `pieces` says. A sequence's own tokens are those that it does not share.

    Attributes:
      shape: shape of the packed arrays.
      pieces: the sequences.
      micro_batches: number of micro-batches that hold tokens, at least 1.
      packed: number of tokens in all rows; shared tokens count once per row.
      micro_B, row_B: micro-batch of each sequence, and its row in the micro-batch.
      start_B: index in the row at which the sequence's own tokens begin.
      segment_B: segment id of the sequence's own tokens in the row, from 1.
      shared_B: number of tokens that the sequence shares with others; they come before its own.
      shared_start_B, prefix_B: index in the row at which the shared tokens begin, and their segment id; 0 if the
        sequence shares nothing.
      number_B: number of the sequence's sample within the row, from 1; empty unless all pieces of a sample lie in one
        row and some sample has several.
    """

    shape: PackShape
    pieces: Pieces
    micro_batches: int
    packed: int
    micro_B: Int[np.ndarray, " B"]
    row_B: Int[np.ndarray, " B"]
    start_B: Int[np.ndarray, " B"]
    segment_B: Int[np.ndarray, " B"]
    shared_B: Int[np.ndarray, " B"]
    shared_start_B: Int[np.ndarray, " B"]
    prefix_B: Int[np.ndarray, " B"]
    number_B: Int[np.ndarray, " B"]

    def padding_share(self) -> float:
        """Share of the computed tokens, which are all tokens of filled micro-batches, that are padding."""
        return 1.0 - self.packed / (self.micro_batches * self.shape.rows * self.shape.tokens)

    @functools.cached_property
    def _tokens(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """Lists (sequence, offset in the sequence, index in the flattened packed array) of every token, by sequence.

        A shared token is listed once for each sequence, always with the same index.
        """
        length_B = self.pieces.length_B
        sequence_X = np.repeat(np.arange(len(length_B)), length_B)
        first_B = np.cumsum(length_B) - length_B
        offset_X = np.arange(len(sequence_X)) - first_B[sequence_X]
        begin_B = np.where(self.shared_B > 0, self.shared_start_B, self.start_B)
        begin_X = np.where(
            offset_X < self.shared_B[sequence_X], begin_B[sequence_X], (self.start_B - self.shared_B)[sequence_X]
        )
        row_X = (self.micro_B * self.shape.rows + self.row_B)[sequence_X]
        return sequence_X, offset_X, row_X * self.shape.tokens + begin_X + offset_X

    @functools.cached_property
    def _source(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """Lists (sample, index in the sample's row) of the tokens of `_tokens`."""
        sequence_X, offset_X, _ = self._tokens
        return self.pieces.sample_B[sequence_X], self.pieces.begin_B[sequence_X] + offset_X

    @functools.cached_property
    def _own(self) -> Bool[np.ndarray, " X"]:
        """Marks the tokens of `_tokens` that a sequence does not share."""
        return self._tokens[1] >= self.shared_B[self._tokens[0]]

    def scatter(
        self, values_BT: Shaped[np.ndarray, "B T"], *, where_BT: Shaped[np.ndarray, "B T"] | None = None
    ) -> Any:
        """Scatters per-token values from the sample layout to the packed rows, 0 on padding.

        Args:
          values_BT: values in the sample layout; integers become int32, all other types float32.
          where_BT: mask in the sample layout; tokens where it is 0 get the value 0, even if they hold NaN. None for no
            mask.

        Returns:
          An array (A, B, T) on the host.

        Raises:
          ValueError: the number of rows is not the number of placed samples.
        """
        values_X = self._checked(values_BT)[self._source]
        if where_BT is not None:
            values_X = np.where(self._checked(where_BT)[self._source] != 0, values_X, 0)
        return self._packed(values_X)

    def layout(self, tokens_BT: Int[np.ndarray, "B T"]) -> Layout:
        """Packs the tokens of right-padded samples, with their segments and positions.

        Raises:
          ValueError: samples that share tokens differ in them, or the number of rows is not the number of placed
            samples.
        """
        sequence_X, offset_X, flat_X = self._tokens
        tokens_X = self._checked(tokens_BT)[self._source]
        tokens_ABT = self._packed(tokens_X)
        if (bad := np.flatnonzero(tokens_ABT.reshape(-1)[flat_X] != tokens_X)).size:
            raise ValueError(
                f"Sequence {self._named(bad[0])} has token {tokens_X[bad[0]]} at {offset_X[bad[0]]}, where another of "
                "its group has a different one: samples of a prompt must begin with that prompt; or set "
                "trainer.share_prompts=False."
            )
        own_X, prefix_X = self._own, self.prefix_B[sequence_X]
        segment_ABT = self._packed(np.where(own_X, self.segment_B[sequence_X], prefix_X))
        position_ABT = self._packed(offset_X)
        if len(self.number_B):
            return PiecesLayout(tokens_ABT, segment_ABT, position_ABT, self._packed(self.number_B[sequence_X]))
        if not self.shape.shared:
            return Layout(tokens_ABT, segment_ABT, position_ABT)
        return SharedLayout(tokens_ABT, segment_ABT, position_ABT, self._packed(np.where(own_X, prefix_X, 0)))

    def replayed(self, rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"]) -> Layout:
        """Packs the samples at `chosen_n` as `layout` does, with the routes that the sampler recorded.

        Samples that share a prompt's tokens share its routes, too. If the samples have different routes for the prompt,
        the routes of one of them are used for all.
        """
        layout = self.layout(rollouts.tokens_BT[chosen_n])
        if rollouts.route_BTX is None:
            return layout
        dims = (self.shape.micro_batches, self.shape.rows, self.shape.tokens, rollouts.route_BTX.shape[2])
        route_ABTX: Any = np.zeros(dims, np.uint8)
        sample_X, at_X = self._source
        flat = route_ABTX.reshape(-1, dims[-1])
        flat[self._tokens[2]] = rollouts.route_BTX[np.asarray(chosen_n)[sample_X], at_X]
        return dataclasses.replace(layout, route_BTX=route_ABTX)

    def loss_tokens(self, mask_BT: Shaped[np.ndarray, "B T"]) -> tuple[Any, Any]:
        """Packs the loss mask, and for each token the number of loss tokens in its sample.

        Args:
          mask_BT: loss mask in the sample layout; a token counts where it is not 0.

        Returns:
          The mask as 1 and 0; and the number of loss tokens over all pieces of the token's sample, at least 1, and 1 on
          shared tokens and padding.

        Raises:
          ValueError: a shared token counts in the loss, or the number of rows is not the number of placed samples.
        """
        _, offset_X, _ = self._tokens
        sample_X, _ = self._source
        mask_X = self._checked(mask_BT)[self._source] != 0
        if (bad := np.flatnonzero(mask_X & ~self._own)).size:
            raise ValueError(
                f"Token {offset_X[bad[0]]} of sequence {self._named(bad[0])} counts in the loss and is shared with "
                "other sequences: only tokens that do not count in the loss can be shared."
            )
        count_B = np.maximum(np.bincount(sample_X, mask_X, minlength=self.pieces.samples), 1)
        return self._packed(mask_X), self._packed(np.where(self._own, count_B[sample_X], 1.0), fill=1.0)

    def unpack(self, values_ABT: Shaped[np.ndarray, "A B T"], width: int) -> Shaped[np.ndarray, "B width"]:
        """Copies per-token values from packed rows back to the sample layout; 0 where no sequence lies.

        Args:
          values_ABT: values of the packed tokens, one per token, on the host.
          width: T of the sample layout, at least the length of the longest sample.
        """
        out_BT = np.zeros((self.pieces.samples, width), values_ABT.dtype)
        out_BT[self._source] = np.asarray(values_ABT).reshape(-1)[self._tokens[2]]
        return out_BT

    def batch(self, rows: Rows) -> Batch[Rows]:
        """Builds a batch from rows with packed arrays of this placement; repeats scalar fields for each micro-batch."""
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
        if len(values) != self.pieces.samples:
            raise ValueError(
                f"{len(values)} rows of per-token values for {self.pieces.samples} placed samples: pass one row for "
                "each placed sample."
            )
        return values

    def _named(self, token: int) -> str:
        """Names the sequence of a token in words, for error messages: its sample, and where it begins if not at 0."""
        sample, at = (int(x_X[token]) for x_X in self._source)
        begin = at - int(self._tokens[1][token])
        return f"{sample}, from its token {begin} on," if begin else str(sample)


class _TooManyRowsError(ValueError):
    """The sequences fill more rows than the shape has."""


def place(length_B: Int[np.ndarray, " B"], shape: PackShape, prefixes: SharedPrefixes | None = None) -> Placement:
    """Places sequences in rows by first-fit decreasing, and deals the rows to data shards with similar token counts.

    If `shape.shared` is set, sequences with a shared prefix go to one row as far as they fit, with one copy of the
    prefix. If this takes more rows than the shape has, nothing is shared.

    Args:
      length_B: number of tokens of each sequence, at least 1.
      shape: number and length of the rows.
      prefixes: prefixes that sequences share; None if there are none.

    Raises:
      ValueError: there is no sequence, a sequence is empty or longer than a row, or the sequences fill more rows than
        the shape has.
    """
    return _place(Pieces.one_each(np.asarray(length_B, np.int64)), shape, prefixes)


def _place(pieces: Pieces, shape: PackShape, prefixes: SharedPrefixes | None) -> Placement:
    length_B = pieces.length_B
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
        raise _TooManyRowsError(
            f"{len(length_B)} sequences fill {len(load)} rows of {shape.tokens} tokens but the batch has "
            f"{shape.micro_batches} x {shape.rows}: check trainer.mini_batch_size and trainer.max_tokens_per_row."
        )
    micro_batches = -(-len(load) // shape.rows)
    slot = _deal(load, micro_batches, shape)[rows.row_B]
    return Placement(
        shape,
        pieces,
        micro_batches,
        sum(load),
        slot // shape.rows,
        slot % shape.rows,
        start_B=rows.start_B,
        segment_B=rows.segment_B,
        shared_B=rows.shared_B,
        shared_start_B=rows.shared_start_B,
        prefix_B=rows.prefix_B,
        number_B=np.zeros(0, np.int64),
    )


def place_samples(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], shape: PackShape) -> Placement:
    """Places the samples at `chosen_n` as `place` does; samples of one prompt share its tokens.

    Each piece of a sample is a sequence, and may lie in another row than the sample's other pieces. All pieces stay in
    one row, without shared prompts, if `shape.whole` is set, or if they would otherwise fill more rows than the shape
    has.

    Raises:
      ValueError: see `place`; also, a sample that must stay whole is longer than a row.
    """
    pieces = Pieces.of(rollouts, chosen_n)
    if not pieces.begin_B.any():
        return _place(pieces, shape, _prefixes(rollouts, chosen_n, pieces))
    total_n = np.bincount(pieces.sample_B, pieces.length_B, minlength=pieces.samples).astype(np.int64)
    if shape.whole:
        if total_n.max() > shape.tokens:
            n = int(total_n.argmax())
            raise ValueError(
                f"Sample {int(chosen_n[n])} has {total_n[n]} tokens in {np.count_nonzero(pieces.sample_B == n)} pieces "
                f"but a packed row holds {shape.tokens}, and the loss has terms over whole samples, whose pieces must "
                "lie in one row: raise trainer.max_tokens_per_row, lower rollout.max_response_tokens, or choose a loss "
                "and a sampler correction that go by token."
            )
        return _whole(pieces, total_n, shape)
    try:
        return _place(pieces, shape, _prefixes(rollouts, chosen_n, pieces))
    except _TooManyRowsError:
        if total_n.max() > shape.tokens:
            raise
        return _whole(pieces, total_n, shape)


def _prefixes(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], pieces: Pieces) -> SharedPrefixes:
    """Returns the prompts that the first pieces of samples share; other pieces share nothing."""
    prefixes = SharedPrefixes.of_prompts(rollouts.prompts.length_P, rollouts.group_B)
    prefixes = prefixes.chosen(np.asarray(chosen_n)[pieces.sample_B])
    return SharedPrefixes(prefixes.group_B, np.where(pieces.begin_B == 0, prefixes.length_B, 0))


def _whole(pieces: Pieces, total_n: Int[np.ndarray, " n"], shape: PackShape) -> Placement:
    """Places each sample as one sequence, then numbers the pieces of a row as its segments; nothing is shared.

    Args:
      pieces: pieces of the samples.
      total_n: tokens of all pieces of each sample.
      shape: number and length of the rows.
    """
    wholes = place(total_n, shape)
    sample_B, length_B = pieces.sample_B, pieces.length_B
    before_B = np.cumsum(length_B) - length_B
    before_B = before_B - (np.cumsum(total_n) - total_n)[sample_B]
    start_B, slot_B = (wholes.start_B[sample_B] + before_B), (wholes.micro_B * shape.rows + wholes.row_B)[sample_B]
    order_B = np.lexsort((start_B, slot_B))
    first_B = np.searchsorted(slot_B[order_B], slot_B[order_B])  # index, in this order, of the first piece of the row
    segment_B = np.zeros_like(start_B)
    segment_B[order_B] = np.arange(len(order_B)) - first_B + 1
    none_B = np.zeros_like(start_B)
    return dataclasses.replace(
        wholes,
        pieces=pieces,
        micro_B=wholes.micro_B[sample_B],
        row_B=wholes.row_B[sample_B],
        start_B=start_B,
        segment_B=segment_B,
        shared_B=none_B,
        shared_start_B=none_B,
        prefix_B=none_B,
        number_B=wholes.segment_B[sample_B] if shape.whole else wholes.number_B,
    )


class _Rows:
    """Fills rows with sequences and records each sequence's place; rows are numbered in the order they were opened.

    Attributes:
      load: number of tokens in each row.
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
        """Places each sequence without sharing, by first-fit decreasing."""
        for b in np.argsort(-self._length_B, kind="stable"):
            row = self._first_with(int(self._length_B[b]))
            self._put(int(b), self._opened() if row is None else row, int(self._length_B[b]))

    def fill_alike(self, prefixes: SharedPrefixes) -> None:
        """Places sequences group by group with one copy of their prefix per row, by first-fit decreasing.

        A group that fits into no open row as a whole is split, if the part in the emptiest open row has more tokens
        than another copy of the prefix. Otherwise a new row takes as much of the group as fits.
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
    """Selects sequences that fit together into `room` tokens: each in turn if it still fits."""
    taken = []
    for b in members:
        if size_B[b] <= room:
            taken.append(b)
            room -= int(size_B[b])
    return taken


def mini_batches(order_B: Sequence[int] | Int[np.ndarray, " B"], size: int | None) -> list[Int[np.ndarray, " size"]]:
    """Splits sequences, in the order of `order_B`, into mini-batches, each for one optimizer update.

    Args:
      order_B: sequence indices, e.g. a permutation drawn for this pass over the batch.
      size: number of sequences per update; None for all of them.

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
    """Assigns a slot (micro-batch x B + row) to every filled row, so that shards have similar numbers of tokens.

    The fullest row goes first; each row goes to the shard of a micro-batch that has the fewest tokens and a free row.
    """
    per_shard, groups = shape.rows // shape.shards, micro_batches * shape.shards
    tokens, used, slots = (np.zeros(n, np.int64) for n in (groups, groups, len(load)))
    for row in np.argsort(-np.asarray(load), kind="stable"):
        group = int(np.argmin(np.where(used < per_shard, tokens, np.iinfo(np.int64).max)))
        micro, shard = divmod(group, shape.shards)
        slots[row] = micro * shape.rows + shard * per_shard + used[group]
        tokens[group] += load[row]
        used[group] += 1
    return slots
