"""Packing: chooses the place of each sequence in packed rows, and copies values to packed rows and back."""

import bisect
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch, Layout, Rollouts, Rows


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """The prefixes that B sequences share within their groups.

    Attributes:
      group_B: number of each sequence's group; sequences of one group begin with the same `length_B` tokens.
      length_B: number of shared tokens, less than the length of the sequence; no shared token counts in a loss.
    """

    group_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]

    @staticmethod
    def of_prompts(length_P: Int[np.ndarray, " P"], group_B: Int[np.ndarray, " B"]) -> "SharedPrefixes":
        """Returns the shared prefixes of samples, which are their prompts without the last token.

        The last token of a prompt is not shared, because it predicts another token in each sample.

        Args:
          length_P: number of tokens in each prompt.
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
        """Makes one sequence of each sample; `length_B` are the lengths of the samples."""
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

    Sequences that begin with the same tokens form a tree: a sequence shares its first tokens with its parent, a
    sequence of the same row, and goes on with tokens of its own. Every token lies in the row once, as a token of one
    sequence, and has a loss only there. The sequences of a row are numbered along their trees, parents first; among the
    children of one parent, a child that shares more tokens comes first. So the sequences that share a token have
    consecutive numbers.

    Methods take and return per-token values in the sample layout: one right-padded row per sample, in which the
    sample's sequences lie as `pieces` says.

    Attributes:
      shape: shape of the packed arrays.
      pieces: the sequences. If samples share a prompt only, the prompt is one more sequence in each row that has it.
      micro_batches: number of micro-batches that hold tokens, at least 1.
      packed: number of tokens in all rows; shared tokens count once per row.
      apart: number of tokens of all sequences, as if none was shared.
      micro_B, row_B: micro-batch of each sequence, and its row in the micro-batch.
      start_B: index in the row at which the sequence's own tokens begin.
      segment_B: number of the sequence in the row, from 1, which is the segment id of its own tokens.
      parent_B: index of the sequence with which the sequence shares its first tokens; -1 if it shares none.
      shared_B: number of tokens that the sequence shares with its parent.
    """

    shape: PackShape
    pieces: Pieces
    micro_batches: int
    packed: int
    apart: int
    micro_B: Int[np.ndarray, " B"]
    row_B: Int[np.ndarray, " B"]
    start_B: Int[np.ndarray, " B"]
    segment_B: Int[np.ndarray, " B"]
    parent_B: Int[np.ndarray, " B"]
    shared_B: Int[np.ndarray, " B"]

    @property
    def computed(self) -> int:
        """Number of tokens that are computed: all tokens of filled micro-batches, padding included."""
        return self.micro_batches * self.shape.rows * self.shape.tokens

    def padding_share(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1.0 - self.packed / self.computed

    @functools.cached_property
    def _tokens(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """Lists (sequence, offset in the sequence, index in the flattened packed array) of every token, by sequence.

        A shared token is listed once for each sequence, always with the same index.
        """
        length_B = self.pieces.length_B
        sequence_X = np.repeat(np.arange(len(length_B)), length_B)
        first_B = np.cumsum(length_B) - length_B
        offset_X = np.arange(len(sequence_X)) - first_B[sequence_X]
        slot_B = self.micro_B * self.shape.rows + self.row_B
        flat_X = (slot_B * self.shape.tokens + self.start_B - self.shared_B)[sequence_X] + offset_X
        shared_X = np.flatnonzero(offset_X < self.shared_B[sequence_X])
        depth_B = self._depth()
        for depth in range(1, int(depth_B.max()) + 1):
            here_X = shared_X[depth_B[sequence_X[shared_X]] == depth]
            flat_X[here_X] = flat_X[first_B[self.parent_B[sequence_X[here_X]]] + offset_X[here_X]]
        return sequence_X, offset_X, flat_X

    def _depth(self) -> Int[np.ndarray, " B"]:
        """Computes the number of ancestors of each sequence."""
        depth_B, parent_B = np.zeros_like(self.parent_B), self.parent_B
        while (parent_B >= 0).any():
            depth_B += parent_B >= 0
            parent_B = np.where(parent_B >= 0, self.parent_B[parent_B], -1)
        return depth_B

    @functools.cached_property
    def _source(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """Returns, for each token of `_tokens`, its sample and its index in that sample's row."""
        sequence_X, offset_X, _ = self._tokens
        return self.pieces.sample_B[sequence_X], self.pieces.begin_B[sequence_X] + offset_X

    @functools.cached_property
    def _own(self) -> Bool[np.ndarray, " X"]:
        """Marks the tokens of `_tokens` that are their sequence's own, and not shared with its parent."""
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
          ValueError: two sequences were placed with a shared prefix but have different tokens in it, or the number of
            rows of `tokens_BT` is not the number of placed samples.
        """
        sequence_X, offset_X, flat_X = self._tokens
        tokens_X = self._checked(tokens_BT)[self._source]
        tokens_ABT = self._packed(tokens_X)
        if (bad := np.flatnonzero(tokens_ABT.reshape(-1)[flat_X] != tokens_X)).size:
            raise ValueError(
                f"Sequence {self._named(bad[0])} has token {tokens_X[bad[0]]} at {offset_X[bad[0]]}, where another "
                "sequence of its group has a different token: samples of a prompt must begin with that prompt; or set "
                "trainer.share_prompts=False."
            )
        segment_X = self.segment_B[sequence_X]
        layout = Layout(tokens_ABT, self._packed(segment_X), self._packed(offset_X))
        if self.shape.shared or self.shape.tree:
            last_ABT: Any = np.zeros_like(tokens_ABT)
            np.maximum.at(last_ABT.reshape(-1), flat_X, segment_X.astype(np.int32))
            layout = dataclasses.replace(layout, last_BT=last_ABT)
        if self.shape.whole:
            layout = dataclasses.replace(layout, sample_BT=self._packed(self._sample_numbers()[sequence_X]))
        return layout

    def _sample_numbers(self) -> Int[np.ndarray, " B"]:
        """Numbers the samples of each row from 1."""
        slot_B = self.micro_B * self.shape.rows + self.row_B
        key_Y, at_B = np.unique(slot_B * self.pieces.samples + self.pieces.sample_B, return_inverse=True)
        return at_B - np.searchsorted(key_Y, slot_B * self.pieces.samples) + 1

    def replayed(self, rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"]) -> Layout:
        """Packs the samples at `chosen_n` as `layout` does, with the recorded routes if the shape has routes.

        A token that sequences share has the routes of the sequence to which it belongs; a prompt has the routes of one
        sample.
        """
        layout = self.layout(rollouts.tokens_BT[chosen_n])
        if rollouts.route_BTX is None or not self.shape.routes:
            return layout
        dims = (self.shape.micro_batches, self.shape.rows, self.shape.tokens, rollouts.route_BTX.shape[2])
        route_ABTX: Any = np.zeros(dims, np.uint8)
        sample_X, at_X = (x_X[self._own] for x_X in self._source)
        flat = route_ABTX.reshape(-1, dims[-1])
        flat[self._tokens[2][self._own]] = rollouts.route_BTX[np.asarray(chosen_n)[sample_X], at_X]
        return dataclasses.replace(layout, route_BTX=route_ABTX)

    def loss_tokens(self, mask_BT: Shaped[np.ndarray, "B T"]) -> tuple[Any, Any]:
        """Packs the loss mask, and for each token the number of loss tokens in its sample.

        Args:
          mask_BT: loss mask in the sample layout; a token counts where it is not 0.

        Returns:
          The mask as 1 and 0; and for each token the number of loss tokens in all pieces of its sample. The number is 1
          on padding and in sequences without a loss token, such as a shared prompt.

        Raises:
          ValueError: a shared token counts in the loss, or the number of rows is not the number of placed samples.
        """
        sequence_X, offset_X, _ = self._tokens
        sample_X, _ = self._source
        mask_X = self._checked(mask_BT)[self._source] != 0
        if (bad := np.flatnonzero(mask_X & ~self._own)).size:
            raise ValueError(
                f"Token {offset_X[bad[0]]} of sequence {self._named(bad[0])} counts in the loss and is shared with "
                "other sequences: only tokens that do not count in the loss can be shared."
            )
        count_B = np.maximum(np.bincount(sample_X, mask_X, minlength=self.pieces.samples), 1)
        speaks_B = np.bincount(sequence_X, mask_X, minlength=len(self.row_B)) > 0
        return self._packed(mask_X), self._packed(np.where(speaks_B[sequence_X], count_B[sample_X], 1.0), fill=1.0)

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
        out[self._tokens[2][self._own]] = values_X[self._own]
        return out.reshape(shape.micro_batches, shape.rows, shape.tokens)

    def _checked(self, values_BT: Shaped[np.ndarray, "B T"]) -> np.ndarray:
        values = np.asarray(values_BT)
        if len(values) != self.pieces.samples:
            raise ValueError(
                f"{len(values)} rows of per-token values for {self.pieces.samples} placed samples: pass one row for "
                "each placed sample."
            )
        return values

    def _named(self, token: int) -> str:
        """Describes a token's sequence for error messages: the sample, and the token at which a later piece begins."""
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
    pieces = Pieces.one_each(np.asarray(length_B, np.int64))
    _check_lengths(pieces.length_B, shape)
    alone = _Forest.apart(pieces, np.arange(len(pieces.length_B)))
    return _first_that_fits([*([_Forest.of(pieces, prefixes)] if shape.shared and prefixes else []), alone], shape)


def place_samples(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], shape: PackShape) -> Placement:
    """Places the samples at `chosen_n` as `place` does; samples of one prompt share its tokens if the shape allows it.

    Each piece of a sample is a sequence, and may lie in another row than the sample's other pieces. If `shape.tree` is
    set, the pieces of a group share their common prefixes. If `shape.whole` is set, all pieces of a sample lie in one
    row. Without `shape.whole` they lie in one row, and share no tokens, only if the pieces would otherwise fill more
    rows than the shape has and every sample fits into a row.

    Raises:
      ValueError: see `place`; also, a sample that must stay whole is longer than a row.
    """
    pieces = Pieces.of(rollouts, chosen_n)
    if not pieces.begin_B.any():
        return place(pieces.length_B, shape, _prefixes(rollouts, chosen_n, pieces))
    _check_lengths(pieces.length_B, shape)
    unit_B = pieces.sample_B if shape.whole else np.arange(len(pieces.length_B))
    forests = [_Forest.apart(pieces, unit_B)]
    if shape.tree:
        forests.insert(0, _Forest.grown(rollouts, chosen_n, pieces, unit_B))
    elif shape.shared and not shape.whole:
        forests.insert(0, _Forest.of(pieces, _prefixes(rollouts, chosen_n, pieces)))
    if shape.whole:
        forests = [forest for forest in forests if forest.largest() <= shape.tokens]
        if not forests:
            total_n = np.bincount(pieces.sample_B, pieces.length_B, minlength=pieces.samples).astype(np.int64)
            n = int(total_n.argmax())
            raise ValueError(
                f"Sample {int(chosen_n[n])} has {total_n[n]} tokens in {np.count_nonzero(pieces.sample_B == n)} pieces "
                f"but a packed row holds {shape.tokens}, and the loss has terms over whole samples, whose pieces must "
                "lie in one row: raise trainer.max_tokens_per_row, lower rollout.max_response_tokens, or choose a loss "
                "and a sampler correction with terms per token."
            )
    elif (whole := _Forest.apart(pieces, pieces.sample_B)).largest() <= shape.tokens:
        forests.append(whole)
    return _first_that_fits(forests, shape)


def _prefixes(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], pieces: Pieces) -> SharedPrefixes:
    """Returns the prompts that the first pieces of samples share; later pieces share nothing."""
    prefixes = SharedPrefixes.of_prompts(rollouts.prompts.length_P, rollouts.group_B)
    prefixes = prefixes.chosen(np.asarray(chosen_n)[pieces.sample_B])
    return SharedPrefixes(prefixes.group_B, np.where(pieces.begin_B == 0, prefixes.length_B, 0))


def _check_lengths(length_B: Int[np.ndarray, " B"], shape: PackShape) -> None:
    if len(length_B) == 0:
        raise ValueError("There is no sequence to pack: a training batch needs at least one.")
    if length_B.min() < 1:
        raise ValueError(f"Sequence {int(length_B.argmin())} has {length_B.min()} tokens: it needs at least 1.")
    if length_B.max() > shape.tokens:
        raise ValueError(
            f"Sequence {int(length_B.argmax())} has {length_B.max()} tokens but a packed row holds {shape.tokens}: "
            "raise trainer.max_tokens_per_row, or lower rollout.max_prompt_length or rollout.max_tokens_to_generate."
        )


def _first_that_fits(forests: "Sequence[_Forest]", shape: PackShape) -> Placement:
    """Places the first forest that fits into the shape's rows; `forests` are in the order of preference."""
    most = shape.micro_batches * shape.rows
    rows: list[_Rows] = []
    for forest in forests:
        rows.append(_Rows(forest, shape.tokens))
        if len(rows[-1].load) <= most:
            return rows[-1].placement(shape)
    raise _TooManyRowsError(
        f"{len(forests[-1].pieces.length_B)} sequences fill {len(rows[-1].load)} rows of {shape.tokens} tokens but the "
        f"batch has {shape.micro_batches} x {shape.rows}: check trainer.mini_batch_size and "
        "trainer.max_tokens_per_row."
    )


# A tree of some sequences: (sequence, index of its parent in the list or -1, number of tokens shared with the parent).
_Tree = list[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True)
class _Forest:
    """The sequences to place, and their common prefixes.

    Attributes:
      pieces: the sequences to place, followed by one sequence for each prompt that samples share.
      families: numbers of the sequences that may share tokens, in the order in which rows take them. A family is a list
        of units; all sequences of one unit lie in one row.
      like_B: for each sequence, the sequence with which it has the longest common prefix: an earlier sequence of its
        family, or the family's prompt; -1 for none.
      alike_B: number of tokens in this common prefix.
      most_B: largest number of tokens that a sequence may share. With more, a loss token or the token before it would
        no longer lie in the sequence's own segment.
      prompt_F: sequence of the prompt that every row with sequences of a family also holds; -1 for none.
    """

    pieces: Pieces
    families: list[list[list[int]]]
    like_B: list[int]
    alike_B: list[int]
    most_B: list[int]
    prompt_F: list[int]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence."""
        return self.pieces.length_B.tolist()

    @functools.cached_property
    def count(self) -> int:
        """Number of sequences to place, without prompts."""
        return sum(len(unit) for family in self.families for unit in family)

    @staticmethod
    def apart(pieces: Pieces, unit_B: Int[np.ndarray, " B"]) -> "_Forest":
        """Lists sequences that share nothing; sequences with the same number in `unit_B` lie in one row."""
        B = len(pieces.length_B)
        families = [[unit] for unit in _listed(unit_B, range(B)).values()]
        return _Forest(pieces, families, [-1] * B, [0] * B, [0] * B, [-1] * len(families))

    @staticmethod
    def of(pieces: Pieces, prefixes: SharedPrefixes) -> "_Forest":
        """Lists sequences that share prefixes; the prefix of each group becomes a sequence of its own."""
        B, length_B = len(pieces.length_B), prefixes.length_B
        key_B = list(zip(prefixes.group_B.tolist(), length_B.tolist(), strict=True))
        # Sequences with the most own tokens come first.
        order_B = np.argsort(length_B - pieces.length_B, kind="stable").tolist()
        families = _listed([key_B[b] for b in order_B], order_B)
        shared = {key: B + x for x, key in enumerate(key for key in families if key[1])}
        first_X = [families[key][0] for key in shared]
        trunks = Pieces(
            pieces.samples,
            np.append(pieces.sample_B, pieces.sample_B[first_X]),
            np.append(pieces.begin_B, pieces.begin_B[first_X]),
            np.append(pieces.length_B, length_B[first_X]),
        )
        like_B, alike_B = [shared.get(key, -1) for key in key_B], length_B.tolist()
        none = [-1] * len(shared)
        return _Forest(
            trunks,
            [[[b] for b in members] for members in families.values()],
            [*like_B, *none],
            [*alike_B, *none],
            [*alike_B, *none],
            [shared.get(key, -1) for key in families],
        )

    @staticmethod
    def grown(
        rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], pieces: Pieces, unit_B: Int[np.ndarray, " B"]
    ) -> "_Forest":
        """Lists pieces of samples; pieces of one group share their common prefixes."""
        like_B, alike_B, most_B = [], [], []
        known: dict[int, list[tuple[bytes, int]]] = {}  # (tokens, index) of each group's pieces, sorted
        row_B = np.asarray(chosen_n)[pieces.sample_B]
        group_B = rollouts.group_B[row_B].tolist()
        for b, (row, begin, length) in enumerate(zip(row_B, pieces.begin_B, pieces.length_B, strict=True)):
            part = slice(begin, begin + length)
            tokens = rollouts.tokens_BT[row, part].astype(">u4").tobytes()
            family = known.setdefault(group_B[b], [])
            at = bisect.bisect(family, (tokens, b))
            near = [(_alike(tokens, other), a) for other, a in family[max(at - 1, 0) : at + 1]]
            family.insert(at, (tokens, b))
            alike, like = max(near, default=(0, -1))
            like_B.append(like)
            alike_B.append(alike)
            loss_X = np.flatnonzero(rollouts.mask_BT[row, part])
            most_B.append(int(max(loss_X[0] if len(loss_X) else length, 1)) - 1)
        units = _listed(unit_B, range(len(like_B)))
        families = _listed([group_B[unit[0]] for unit in units.values()], list(units.values()))
        return _Forest(pieces, list(families.values()), like_B, alike_B, most_B, [-1] * len(families))

    def tree(self, units: Sequence[list[int]], prompt: int, room: float = np.inf) -> tuple[list[list[int]], _Tree, int]:
        """Joins units of a family to a tree, one after the other; leaves out units that do not fit into `room` tokens.

        Returns:
          The units that fit, the tree of their sequences, and the number of the tree's tokens.
        """
        tree: _Tree = [(prompt, -1, 0)] if prompt >= 0 else []
        size = self.lengths[prompt] if prompt >= 0 else 0
        # For each sequence: (how many of its first tokens form a path in the tree, index of the path's end in the tree)
        ends: dict[int, tuple[int, int]] = {prompt: (size, 0)} if prompt >= 0 else {}
        taken = []
        for unit in units:
            before, longer = (len(tree), dict(ends)) if len(unit) > 1 else None, size
            for b in unit:
                shared, parent = self._parent(b, ends)
                longer += self.lengths[b] - shared
                if longer > room:
                    break
                while parent >= 0 and shared <= tree[parent][2]:  # the tokens belong to an ancestor
                    parent = tree[parent][1]
                self._note(b, len(tree), ends)
                tree.append((b, parent, shared))
            if longer <= room:
                taken.append(unit)
                size = longer
            elif before is not None:
                del tree[before[0] :]
                ends = before[1]
        return (taken, tree, size) if taken else ([], [], 0)

    def _parent(self, b: int, ends: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """Finds the longest path of the tree that a sequence may share: (number of tokens, index of its end or -1)."""
        best, at, alike = (0, -1), b, self.most_B[b]
        while at >= 0 and alike > best[0]:
            shared, index = ends.get(at, best)
            if min(shared, alike) > best[0]:
                best = (min(shared, alike), index)
            at, alike = self.like_B[at], min(alike, self.alike_B[at])
        return best

    def _note(self, b: int, index: int, ends: dict[int, tuple[int, int]]) -> None:
        """Records a sequence's path in `ends`, for this sequence and for the sequences that share a prefix with it."""
        at, alike = b, self.lengths[b]
        while at >= 0 and ends.get(at, (0, -1))[0] < alike:
            ends[at] = (alike, index)
            at, alike = self.like_B[at], min(alike, self.alike_B[at])

    def largest(self) -> int:
        """Counts the tokens of the largest unit."""
        return max(self.tree([unit], -1)[2] for family in self.families for unit in family)


def _alike(one: bytes, other: bytes) -> int:
    """Counts the tokens, of 4 bytes each, in the common prefix of two sequences."""
    size = min(len(one), len(other)) // 4
    differs_X = np.frombuffer(one, np.uint32, size) != np.frombuffer(other, np.uint32, size)
    return int(differs_X.argmax()) if differs_X.any() else size


def _listed(key_X: Iterable[Hashable], value_X: Iterable[Any]) -> dict[Any, list[Any]]:
    """Lists the values of each key, in the order of the values."""
    listed: dict[Any, list[Any]] = {}
    for key, value in zip(key_X, value_X, strict=True):
        listed.setdefault(key, []).append(value)
    return listed


class _Rows:
    """Rows filled with a forest; they are numbered in the order in which they were opened.

    Attributes:
      load: number of tokens in each row.
    """

    def __init__(self, forest: _Forest, tokens: int):
        """Places the families, the largest first, by first-fit decreasing.

        A family that fits into no open row as a whole can be split, but then the trainer computes some of its shared
        tokens twice. The family is split only if the emptiest open row can take more than two of its tokens for each
        token that is computed twice. Otherwise a new row takes as much of the family as fits.
        """
        self._forest, self._tokens = forest, tokens
        self.load: list[int] = []
        self._count: list[int] = []
        self._free = np.zeros(forest.count, np.int64)
        self._placed: list[tuple[int, ...]] = []  # (sequence, row, start, segment, parent, shared)
        families = [
            (forest.tree(units, prompt)[2], units, prompt)
            for units, prompt in zip(forest.families, forest.prompt_F, strict=True)
        ]
        for size, units, prompt in sorted(families, key=lambda family: -family[0]):
            self._fill(units, prompt, size)

    def _fill(self, left: list[list[int]], prompt: int, size: int) -> None:
        tree = functools.partial(self._forest.tree, prompt=prompt)
        while left:
            row = self._first_with(size)
            if row is None and self.load:
                emptiest = int(np.argmax(self._free[: len(self.load)]))
                taken, _, part = tree(left, room=int(self._free[emptiest]))
                if part > 2 * (part + tree(_without(left, taken))[2] - size):
                    row = emptiest
            if row is None:
                row = self._opened()
            taken, placed, _ = tree(left, room=int(self._free[row]))
            self._put(placed, row)
            left = _without(left, taken)
            size = tree(left)[2]

    def placement(self, shape: PackShape) -> Placement:
        """Deals the rows to micro-batches and shards."""
        order_B = np.argsort([sequence for sequence, *_ in self._placed], kind="stable")
        sequence_B, row_B, start_B, segment_B, parent_B, shared_B = np.array(self._placed, np.int64)[order_B].T
        parent_B = np.append(np.argsort(order_B), -1)[parent_B]
        whole, micro_batches = self._forest.pieces, -(-len(self.load) // shape.rows)
        sample_B = whole.sample_B[sequence_B]
        child_X = np.flatnonzero((parent_B >= 0) & (sequence_B[parent_B] >= self._forest.count))
        sample_B[parent_B[child_X]] = sample_B[child_X]  # a prompt is read from a sample of its row: the last one
        pieces = Pieces(whole.samples, sample_B, whole.begin_B[sequence_B], whole.length_B[sequence_B])
        micro_B, row_B = np.divmod(_deal(self.load, micro_batches, shape)[row_B], shape.rows)
        place = (micro_B, row_B, start_B, segment_B, parent_B, shared_B)
        apart = sum(self._forest.lengths[: self._forest.count])
        return Placement(shape, pieces, micro_batches, sum(self.load), apart, *place)

    def _put(self, tree: _Tree, row: int) -> None:
        """Appends a tree to the tokens of a row: parents first; among siblings, a sequence that shares more tokens
        comes first."""
        children = _listed([parent for _, parent, _ in tree], range(len(tree)))
        left, place = [*reversed(children[-1])], {-1: -1}
        while left:
            index = left.pop()
            sequence, parent, shared = tree[index]
            place[index], self._count[row] = len(self._placed), self._count[row] + 1
            self._placed.append((sequence, row, self.load[row], self._count[row], place[parent], shared))
            self.load[row] += (own := self._forest.lengths[sequence] - shared)
            self._free[row] -= own
            left += sorted(reversed(children.get(index, ())), key=lambda child: tree[child][2])

    def _first_with(self, room: int) -> int | None:
        fits = np.flatnonzero(self._free[: len(self.load)] >= room)
        return int(fits[0]) if len(fits) else None

    def _opened(self) -> int:
        self.load.append(0)
        self._count.append(0)
        self._free[len(self.load) - 1] = self._tokens
        return len(self.load) - 1


def _without(units: list[list[int]], taken: list[list[int]]) -> list[list[int]]:
    """Lists the units that are not in `taken`; units with the same first sequence are the same."""
    firsts = {unit[0] for unit in taken}
    return [unit for unit in units if unit[0] not in firsts]


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

    The fullest row goes first. Each row goes to the shard with the fewest tokens, among the shards of all
    micro-batches that still have a free row.
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
