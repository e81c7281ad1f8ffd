"""Values that calls of the engine with slots pass on: prefixes and result tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float

from podrl.engine.config import Sampling


@flax.struct.dataclass
class SlotData:
    """Tokens of one slot, or several, from a call; see `ResultTokens`."""

    tokens: Any
    valid: Any
    lengths: Any
    log_prob: Any = None


@flax.struct.dataclass
class ResultTokens:
    """Tokens of a call, in one array so that one copy brings them to the host.

    Attributes:
      data: int32 (slots, 2 N + 1): N tokens, N validity flags, the length so far.
      tokens_idx, valid_idx, length_idx: column ranges of the three. Length counts the tokens `generate` made since the
        slot was filled; a flag is 0 behind a sample's last token, from where logits were NaN or infinite, and in empty
        slots.
      samples_per_slot: rows per slot.
      log_prob: float32 (slots, N), log-probability of each token at the sampling temperature over the whole vocabulary,
        nats.
    """

    data: Any
    tokens_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    length_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    samples_per_slot: int = flax.struct.field(pytree_node=False)
    log_prob: Any = None

    def copy_to_host_async(self) -> None:
        """Starts the copies to the host."""
        for array in (self.data, self.log_prob):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """Returns the same tokens as numpy arrays."""
        return dataclasses.replace(self, data=np.asarray(self.data), log_prob=np.asarray(self.log_prob))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Returns the rows of one slot."""
        n = self.samples_per_slot
        return self.get_result_at_slots(range(slot * n, (slot + 1) * n))

    def get_result_at_slots(self, slots: Sequence[int]) -> SlotData:
        """Returns the rows of several slots, in the order asked for."""
        rows = np.asarray(slots)
        part = lambda columns: self.data[rows, columns[0] : columns[1]]  # noqa: E731
        lengths = part(self.length_idx)[:, 0]
        return SlotData(part(self.tokens_idx), part(self.valid_idx), lengths, self.log_prob[rows])


@flax.struct.dataclass
class Prefix:
    """Keys and values of a prompt, and the first token of each sample drawn from it.

    Every data-parallel shard holds a copy, so that inserting moves nothing between shards.

    Attributes:
      key_LMKCH, value_LMKCH: the prompt's pages, then unused ones.
      blocks: (position of the first token, tokens held) of the pages in use.
      length: tokens of the prompt.
      tokens: first token of each sample.
      keys: random key of each sample, two uint32 words.
      sampling: how the samples are drawn; `max_new` is set and counts the first token.
    """

    key_LMKCH: Float[Array, "L M K C H"]
    value_LMKCH: Float[Array, "L M K C H"]
    blocks: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)
    length: int = flax.struct.field(pytree_node=False)
    tokens: tuple[int, ...] = flax.struct.field(pytree_node=False)
    keys: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling = flax.struct.field(pytree_node=False)
