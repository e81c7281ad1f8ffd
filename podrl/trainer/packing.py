"""Which packed row each sequence lies in, and the copies between the sample layout and the packed layout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from podrl.types import CriticBatch, TrainBatch


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The fixed shape of every TrainBatch of a run: contents vary, compiled programs do not.

    Attributes:
      micro_batches: A, the most micro-batches a batch may need.
      rows: B, rows of one micro-batch over all data shards.
      tokens: T, tokens of one row.
      shards: data shards that split the rows of a micro-batch evenly.
    """

    micro_batches: int
    rows: int
    tokens: int
    shards: int = 1

    @staticmethod
    def for_worst_case(
        sequences: int, max_length: int, *, max_tokens_per_row: int, rows_per_micro_batch: int, shards: int = 1
    ) -> "PackShape":
        """The smallest shape that holds any `sequences` sequences of at most `max_length` tokens.

        First-fit decreasing puts at least floor(T / max_length) sequences into every row but the last: a row that
        turns a sequence away already holds more than T - max_length tokens.

        Args:
          sequences: sequences of one mini-batch.
          max_length: longest possible sequence, tokens.
          max_tokens_per_row: T.
          rows_per_micro_batch: B; rounded up to a multiple of `shards`, and down to what the worst case fills.
          shards: size of the mesh axes that split the rows (data x fsdp).

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
        return PackShape(_ceil(worst_rows, rows), rows, max_tokens_per_row, shards)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each of B sequences lies in the packed rows.

    Attributes:
      shape: of the packed arrays.
      micro_batches: micro-batches that hold tokens, at least 1.
      length_B: tokens of each sequence.
      micro_B, row_B, start_B: micro-batch, row in it, and first token of each sequence.
      segment_B: segment id of each sequence in its row, from 1.
    """

    shape: PackShape
    micro_batches: int
    length_B: Int[np.ndarray, " B"]
    micro_B: Int[np.ndarray, " B"]
    row_B: Int[np.ndarray, " B"]
    start_B: Int[np.ndarray, " B"]
    segment_B: Int[np.ndarray, " B"]

    def padding_share(self) -> float:
        """Share of the computed tokens (those of filled micro-batches) that hold no sequence."""
        return 1.0 - float(self.length_B.sum()) / (self.micro_batches * self.shape.rows * self.shape.tokens)

    def flat_indices(self) -> tuple[Int[np.ndarray, " X"], Int[np.ndarray, " X"], Int[np.ndarray, " X"]]:
        """(sequence, offset in it, index into the flattened packed array) of every real token, sequence by sequence."""
        sequence_X = np.repeat(np.arange(len(self.length_B)), self.length_B)
        first_B = np.cumsum(self.length_B) - self.length_B
        offset_X = np.arange(len(sequence_X)) - first_B[sequence_X]
        base_B = (self.micro_B * self.shape.rows + self.row_B) * self.shape.tokens + self.start_B
        return sequence_X, offset_X, base_B[sequence_X] + offset_X


def place(length_B: Int[np.ndarray, " B"], shape: PackShape) -> Placement:
    """First-fit decreasing into rows, rows dealt to data shards so that their token counts are close.

    Args:
      length_B: tokens of each sequence, at least 1.
      shape: what the rows look like.

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
    order_B = np.argsort(-length_B, kind="stable")
    bin_B, start_B, segment_B = (np.zeros(len(length_B), np.int64) for _ in range(3))
    load: list[int] = []
    count: list[int] = []
    free = np.zeros(len(length_B), np.int64)
    for b in order_B:
        fits = np.flatnonzero(free[: len(load)] >= length_B[b])
        row = int(fits[0]) if len(fits) else len(load)
        if row == len(load):
            load.append(0)
            count.append(0)
            free[row] = shape.tokens
        bin_B[b], start_B[b], segment_B[b] = row, load[row], count[row] + 1
        load[row] += int(length_B[b])
        count[row] += 1
        free[row] -= length_B[b]
    if len(load) > shape.micro_batches * shape.rows:
        raise ValueError(
            f"{len(length_B)} sequences fill {len(load)} rows of {shape.tokens} tokens but the batch has "
            f"{shape.micro_batches} x {shape.rows}: it was made for fewer or shorter sequences; check "
            "trainer.mini_batch_size and trainer.max_tokens_per_row."
        )
    micro_batches = _ceil(len(load), shape.rows)
    slot = _deal(load, micro_batches, shape)[bin_B]
    return Placement(
        shape, micro_batches, length_B, slot // shape.rows, slot % shape.rows, start_B=start_B, segment_B=segment_B
    )


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
      ValueError: arrays whose first dimension is not the number of placed sequences.
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

    def rows(values_X: Any, dtype: Any, fill: Any = 0) -> Any:
        shape = placement.shape
        out = np.full(shape.micro_batches * shape.rows * shape.tokens, fill, dtype)
        out[flat_X] = values_X
        return out.reshape(shape.micro_batches, shape.rows, shape.tokens)

    def masked(values_BT: np.ndarray) -> Any:
        return rows(np.where(mask_X, values_BT[sequence_X, offset_X], 0.0), np.float32)

    micro_batches: Any = np.asarray(placement.micro_batches, np.int32)
    scale: Any = np.asarray(kl_scale, np.float32)
    return TrainBatch(
        tokens_ABT=rows(tokens_BT[sequence_X, offset_X], np.int32),
        segment_ABT=rows(placement.segment_B[sequence_X], np.int32),
        position_ABT=rows(offset_X, np.int32),
        mask_ABT=rows(mask_X, np.float32),
        advantage_ABT=masked(advantage_BT),
        old_logprob_ABT=masked(old_logprob_BT),
        ref_logprob_ABT=masked(ref_logprob_BT),
        sampler_logprob_ABT=masked(sampler_logprob_BT),
        length_ABT=rows(np.maximum(count_B, 1)[sequence_X], np.float32, fill=1),
        micro_batches=micro_batches,
        kl_scale=scale,
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
