"""Which packed row each sequence lies in, and the copies between the sample layout and the packed layout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from podrl.types import CriticBatch, Rollouts, TrainBatch


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The fixed shape of every TrainBatch of a run: contents vary, compiled programs do not.

    Attributes:
      micro_batches: A, the most micro-batches a batch may need.
      rows: B, rows of one micro-batch over all data shards.
      tokens: T, tokens of one row.
      shards: data shards that split the rows of a micro-batch evenly.
      shared: whether sequences that begin alike may share those tokens in a row.
    """

    micro_batches: int
    rows: int
    tokens: int
    shards: int = 1
    shared: bool = False

    @staticmethod
    def for_worst_case(
        sequences: int,
        max_length: int,
        *,
        max_tokens_per_row: int,
        rows_per_micro_batch: int,
        shards: int = 1,
        shared: bool = False,
    ) -> "PackShape":
        """The smallest shape that holds any `sequences` sequences of at most `max_length` tokens.

        First-fit decreasing puts at least floor(T / max_length) sequences into every row but the last: a row that
        turns a sequence away already holds more than T - max_length tokens. Where sharing would need more rows than
        that, `place` does without.

        Args:
          sequences: sequences of one mini-batch.
          max_length: longest possible sequence, tokens.
          max_tokens_per_row: T.
          rows_per_micro_batch: B; rounded up to a multiple of `shards`, and down to what the worst case fills.
          shards: size of the mesh axes that split the rows (data x fsdp).
          shared: see PackShape.

        Raises:
          ValueError: a sequence of `max_length` does not fit into a row, or a size is not positive.
        """
        sizes = {
            "sequences": sequences,
            "max_length": max_length,
            "max_tokens_per_row": max_tokens_per_row,
            "rows_per_micro_batch": rows_per_micro_batch,
            "shards": shards,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if max_length > max_tokens_per_row:
            raise ValueError(
                f"Sequences of up to {max_length} tokens do not fit into rows of {max_tokens_per_row}: raise "
                "trainer.max_tokens_per_row, or lower rollout.max_prompt_length or rollout.max_tokens_to_generate."
            )
        worst_rows = _ceil(sequences, max_tokens_per_row // max_length)
        rows = min(_ceil(rows_per_micro_batch, shards), _ceil(worst_rows, shards)) * shards
        return PackShape(_ceil(worst_rows, rows), rows, max_tokens_per_row, shards, shared)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which of B sequences begin alike.

    Attributes:
      group_B: sequences of one group are equal in their first `length_B` tokens.
      length_B: how many; fewer than the sequence has, and none of them counts in a loss.
    """

    group_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]

    @staticmethod
    def of_prompts(length_P: Int[np.ndarray, " P"], samples: int) -> "Heads":
        """Of samples that come prompt by prompt, as many of each.

        The last token of a prompt is not among those shared: what it predicts is another token in each sample.

        Raises:
          ValueError: samples that are not as many of each prompt.
        """
        if samples % max(len(length_P), 1):
            raise ValueError(f"{samples} samples of {len(length_P)} prompts are not as many of each.")
        group_B = np.arange(samples) // max(samples // max(len(length_P), 1), 1)
        return Heads(group_B, np.maximum(np.asarray(length_P, np.int64)[group_B] - 1, 0))

    def chosen(self, index_n: Int[np.ndarray, " n"]) -> "Heads":
        """Those of some of the sequences."""
        return Heads(self.group_B[index_n], self.length_B[index_n])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each of B sequences lies in the packed rows.

    Attributes:
      shape: of the packed arrays.
      micro_batches: micro-batches that hold tokens, at least 1.
      packed: tokens in all rows, those shared counted once a row.
      length_B: tokens of each sequence.
      micro_B, row_B: micro-batch of each sequence and row in it.
      start_B: where in the row its own tokens begin.
      segment_B: segment id of its own tokens in the row, from 1.
      head_B: how many tokens it shares with others, before its own.
      head_start_B, prefix_B: where those begin in the row, and their segment id (0 where there are none).
    """

    shape: PackShape
    micro_batches: int
    packed: int
    length_B: Int[np.ndarray, " B"]
    micro_B: Int[np.ndarray, " B"]
    row_B: Int[np.ndarray, " B"]
    start_B: Int[np.ndarray, " B"]
    segment_B: Int[np.ndarray, " B"]
    head_B: Int[np.ndarray, " B"]
    head_start_B: Int[np.ndarray, " B"]
    prefix_B: Int[np.ndarray, " B"]

    def padding_share(self) -> float:
        """Share of the computed tokens (those of filled micro-batches) that hold no sequence."""
        return 1.0 - self.packed / (self.micro_batches * self.shape.rows * self.shape.tokens)

    def flat_indices(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """(sequence, offset in it, index into the flattened packed array) of every real token, sequence by sequence."""
        sequence_X = np.repeat(np.arange(len(self.length_B)), self.length_B)
        first_B = np.cumsum(self.length_B) - self.length_B
        offset_X = np.arange(len(sequence_X)) - first_B[sequence_X]
        begin_B = np.where(self.head_B > 0, self.head_start_B, self.start_B)
        begin_X = np.where(
            offset_X < self.head_B[sequence_X], begin_B[sequence_X], (self.start_B - self.head_B)[sequence_X]
        )
        row_X = (self.micro_B * self.shape.rows + self.row_B)[sequence_X]
        return sequence_X, offset_X, row_X * self.shape.tokens + begin_X + offset_X


def place(length_B: Int[np.ndarray, " B"], shape: PackShape, heads: Heads | None = None) -> Placement:
    """First-fit decreasing into rows, rows dealt to data shards so that their token counts are close.

    Where the shape says so, sequences that begin alike go to a row together as far as they fit, with one copy of their
    beginning; where that takes more rows than the shape has, nothing is shared.

    Args:
      length_B: tokens of each sequence, at least 1.
      shape: what the rows look like.
      heads: which sequences begin alike; None where none do.

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
    if shape.shared and heads is not None:
        rows.fill_alike(heads)
    if not shape.shared or heads is None or len(rows.load) > most:
        rows = _Rows(length_B, shape.tokens)
        rows.fill()
    load = rows.load
    if len(load) > most:
        raise ValueError(
            f"{len(length_B)} sequences fill {len(load)} rows of {shape.tokens} tokens but the batch has "
            f"{shape.micro_batches} x {shape.rows}: it was made for fewer or shorter sequences; check "
            "trainer.mini_batch_size and trainer.max_tokens_per_row."
        )
    micro_batches = _ceil(len(load), shape.rows)
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
        head_B=rows.head_B,
        head_start_B=rows.head_start_B,
        prefix_B=rows.prefix_B,
    )


def place_samples(rollouts: Rollouts, chosen_n: Int[np.ndarray, " n"], shape: PackShape) -> Placement:
    """`place` for some of a batch's samples; those of one prompt begin alike."""
    heads = Heads.of_prompts(rollouts.prompts.length_P, len(rollouts.length_B))
    return place(rollouts.length_B[chosen_n], shape, heads.chosen(chosen_n))


class _Rows:
    """Rows being filled; per sequence what Placement says, with rows numbered as they were opened.

    Attributes:
      load: tokens in each row.
    """

    def __init__(self, length_B: Int[np.ndarray, " B"], tokens: int):
        B = len(length_B)
        self._length_B, self._tokens = length_B, tokens
        self.row_B, self.start_B, self.segment_B = (np.zeros(B, np.int64) for _ in range(3))
        self.head_B, self.head_start_B, self.prefix_B = (np.zeros(B, np.int64) for _ in range(3))
        self.load: list[int] = []
        self._count: list[int] = []
        self._free = np.zeros(B, np.int64)

    def fill(self) -> None:
        """First-fit decreasing, every sequence by itself."""
        for b in np.argsort(-self._length_B, kind="stable"):
            row = self._first_with(int(self._length_B[b]))
            self._put(int(b), self._opened() if row is None else row, int(self._length_B[b]))

    def fill_alike(self, heads: Heads) -> None:
        """First-fit decreasing, group by group.

        A group that fits nowhere whole is split where that saves more padding than another copy of its head costs.
        """
        own_B = self._length_B - heads.length_B
        order_B = np.argsort(-own_B, kind="stable")
        groups: dict[tuple[int, int], list[int]] = {}
        for b in order_B.tolist():
            groups.setdefault((int(heads.group_B[b]), int(heads.length_B[b])), []).append(b)
        sizes = {key: key[1] + int(own_B[members].sum()) for key, members in groups.items()}
        for key in sorted(groups, key=lambda key: -sizes[key]):
            head, left = key[1], groups[key]
            while left:
                row, taken = self._first_with(head + int(own_B[left].sum())), left
                if row is None:
                    row = int(np.argmax(self._free[: len(self.load)])) if self.load else None
                    taken = [] if row is None else _that_fit(left, own_B, int(self._free[row]) - head)
                    if int(own_B[taken].sum()) <= head:
                        row, taken = self._opened(), _that_fit(left, own_B, self._tokens - head)
                assert row is not None
                self._put_alike(taken, row, head, own_B)
                placed = set(taken)
                left = [b for b in left if b not in placed]

    def _put_alike(self, members: list[int], row: int, head: int, own_B: Int[np.ndarray, " B"]) -> None:
        if head:
            self.head_B[members], self.head_start_B[members] = head, self.load[row]
            self.prefix_B[members] = self._count[row] + 1
            self._take(row, head)
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
    """Those that fit into some room together, taken in their order."""
    taken = []
    for b in members:
        if size_B[b] <= room:
            taken.append(b)
            room -= int(size_B[b])
    return taken


def pack(
    placement: Placement,
    *,
    tokens_BT: Int[np.ndarray, "B T"],
    mask_BT: Shaped[np.ndarray, "B T"],
    advantage_BT: Float[np.ndarray, "B T"] | Float[np.ndarray, " B"],
    old_logprob_BT: Float[np.ndarray, "B T"],
    ref_logprob_BT: Float[np.ndarray, "B T"],
    sampler_logprob_BT: Float[np.ndarray, "B T"],
    kl_scale: float = 1.0,
) -> TrainBatch:
    """Copies samples into packed rows, as numpy arrays.

    Values at masked tokens never reach the batch: advantages and log-probabilities are 0 there, NaN or not.

    Args:
      placement: from `place` on the lengths of these very sequences.
      tokens_BT: right-padded sequences.
      mask_BT: 1 where the token counts in the loss.
      advantage_BT: per token, or one per sequence (shape (B,)).
      old_logprob_BT, ref_logprob_BT, sampler_logprob_BT: as in TrainBatch; nats.
      kl_scale: as in TrainBatch.

    Raises:
      ValueError: arrays whose first dimension is not the number of placed sequences; shared tokens that differ or count
        in a loss.
    """
    sequence_X, offset_X, flat_X = placement.flat_indices()
    B = len(placement.length_B)
    mask_BT = np.asarray(mask_BT)
    _check_rows(B, tokens_BT=tokens_BT, mask_BT=mask_BT, advantage_BT=advantage_BT, old_logprob_BT=old_logprob_BT)
    _check_rows(B, ref_logprob_BT=ref_logprob_BT, sampler_logprob_BT=sampler_logprob_BT)
    if advantage_BT.ndim == 1:
        advantage_BT = np.broadcast_to(advantage_BT[:, None], tokens_BT.shape)
    mask_X = mask_BT[sequence_X, offset_X] != 0
    count_B = np.bincount(sequence_X, mask_X, minlength=B)
    own_X = offset_X >= placement.head_B[sequence_X]
    if (bad := np.flatnonzero(mask_X & ~own_X)).size:
        raise ValueError(
            f"Token {offset_X[bad[0]]} of sequence {sequence_X[bad[0]]} counts in the loss and is shared with other "
            "sequences: only tokens without a loss can be."
        )

    def rows(values_X: Any, dtype: Any, fill: Any = 0) -> Any:
        shape = placement.shape
        out = np.full(shape.micro_batches * shape.rows * shape.tokens, fill, dtype)
        out[flat_X] = values_X
        return out.reshape(shape.micro_batches, shape.rows, shape.tokens)

    def masked(values_BT: np.ndarray) -> Any:
        return rows(np.where(mask_X, values_BT[sequence_X, offset_X], 0.0), np.float32)

    tokens_X = np.asarray(tokens_BT)[sequence_X, offset_X]
    tokens_ABT = rows(tokens_X, np.int32)
    if (bad := np.flatnonzero(tokens_ABT.reshape(-1)[flat_X] != tokens_X)).size:
        raise ValueError(
            f"Sequence {sequence_X[bad[0]]} has token {tokens_X[bad[0]]} at {offset_X[bad[0]]}, where another of its "
            "group has a different one: samples of a prompt must begin with that prompt; or set "
            "trainer.share_prompts=False."
        )
    micro_batches: Any = np.asarray(placement.micro_batches, np.int32)
    scale: Any = np.asarray(kl_scale, np.float32)
    return TrainBatch(
        tokens_ABT=tokens_ABT,
        segment_ABT=rows(np.where(own_X, placement.segment_B[sequence_X], placement.prefix_B[sequence_X]), np.int32),
        position_ABT=rows(offset_X, np.int32),
        mask_ABT=rows(mask_X, np.float32),
        advantage_ABT=masked(advantage_BT),
        old_logprob_ABT=masked(old_logprob_BT),
        ref_logprob_ABT=masked(ref_logprob_BT),
        sampler_logprob_ABT=masked(sampler_logprob_BT),
        length_ABT=rows(np.where(own_X, np.maximum(count_B, 1)[sequence_X], 1), np.float32, fill=1),
        micro_batches=micro_batches,
        kl_scale=scale,
        prefix_ABT=rows(np.where(own_X, placement.prefix_B[sequence_X], 0), np.int32)
        if placement.shape.shared
        else None,
    )


def pack_values(
    placement: Placement,
    *,
    tokens_BT: Int[np.ndarray, "B T"],
    mask_BT: Shaped[np.ndarray, "B T"],
    value_BT: Float[np.ndarray, "B T"],
    return_BT: Float[np.ndarray, "B T"],
) -> CriticBatch:
    """The same for the critic's batch."""
    packed = pack(
        placement,
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        advantage_BT=return_BT,
        old_logprob_BT=value_BT,
        ref_logprob_BT=value_BT,
        sampler_logprob_BT=value_BT,
    )
    return CriticBatch(
        tokens_ABT=packed.tokens_ABT,
        segment_ABT=packed.segment_ABT,
        position_ABT=packed.position_ABT,
        mask_ABT=packed.mask_ABT,
        value_ABT=packed.old_logprob_ABT,
        return_ABT=packed.advantage_ABT,
        length_ABT=packed.length_ABT,
        micro_batches=packed.micro_batches,
        prefix_ABT=packed.prefix_ABT,
    )


def unpack(placement: Placement, values_ABT: Shaped[np.ndarray, "A B T"], width: int) -> Shaped[np.ndarray, "B width"]:
    """Per-token results back in the sample layout, 0 beyond each sequence.

    Args:
      placement: the one the rows were packed with.
      values_ABT: one value per packed token, on the host.
      width: T of the sample layout, at least the longest sequence.
    """
    sequence_X, offset_X, flat_X = placement.flat_indices()
    out_BT = np.zeros((len(placement.length_B), width), values_ABT.dtype)
    out_BT[sequence_X, offset_X] = np.asarray(values_ABT).reshape(-1)[flat_X]
    return out_BT


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
            f"{len(order)} sequences do not split into mini-batches of {size}: trainer.mini_batch_size must divide "
            "prompts per step x grpo.num_generations."
        )
    return list(order.reshape(-1, size))


def _deal(load: Sequence[int], micro_batches: int, shape: PackShape) -> Int[np.ndarray, " rows"]:
    """A slot (micro-batch x B + row) for every row; the heaviest go first, each to the lightest shard with room."""
    per_shard = shape.rows // shape.shards
    groups = micro_batches * shape.shards
    tokens, used = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    slots = np.zeros(len(load), np.int64)
    for row in np.argsort(-np.asarray(load), kind="stable"):
        group = int(np.argmin(np.where(used < per_shard, tokens, np.iinfo(np.int64).max)))
        micro, shard = divmod(group, shape.shards)
        slots[row] = micro * shape.rows + shard * per_shard + used[group]
        tokens[group] += load[row]
        used[group] += 1
    return slots


def _check_rows(B: int, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        if len(array) != B:
            raise ValueError(
                f"{name} has {len(array)} rows for {B} placed sequences: pass the sequences that were placed."
            )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
