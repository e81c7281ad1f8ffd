"""The values that the engine with slots takes and returns: prefixes and result tokens."""

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
    """The tokens that a call made for one or several slots; see `ResultTokens` for the arrays."""

    tokens: Any
    valid: Any
    lengths: Any
    log_prob: Any = None


@flax.struct.dataclass
class ResultTokens:
    """The tokens of a call, in one array so that one copy brings them to the host.

    Attributes:
      data: int32 (slots, 2 N + 1): in each row N tokens, N validity flags, and the length so far.
      tokens_idx: column range [start, end) of the tokens.
      valid_idx: column range of the validity flags. A flag is 0 after a sample's last token, from the first token whose
        logits were NaN or infinite, and in empty slots.
      length_idx: column range of the length, the number of tokens that `generate` made since the slot was filled.
      samples_per_slot: number of rows per slot.
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
        """Returns the rows of several slots, in the order of `slots`."""
        rows = np.asarray(slots)
        part = lambda columns: self.data[rows, columns[0] : columns[1]]  # noqa: E731
        lengths = part(self.length_idx)[:, 0]
        return SlotData(part(self.tokens_idx), part(self.valid_idx), lengths, self.log_prob[rows])


@flax.struct.dataclass
class Prefix:
    """The keys and values of a prompt, and the first token of each sample drawn from it.

    Every data-parallel shard holds a copy, so that inserting a prefix moves nothing between shards.

    Attributes:
      key_LMKCH: keys in M pages of C tokens: the prompt's pages first, then unused pages.
      value_LMKCH: values, in the same pages.
      blocks: (position of the page's first token, number of its tokens) of each page in use.
      length: length of the prompt, tokens.
      tokens: first token of each sample.
      keys: random key of each sample, two uint32 words.
      sampling: sampling settings of the samples; `max_new` is set and counts the first token.
    """

    key_LMKCH: Float[Array, "L M K C H"]
    value_LMKCH: Float[Array, "L M K C H"]
    blocks: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)
    length: int = flax.struct.field(pytree_node=False)
    tokens: tuple[int, ...] = flax.struct.field(pytree_node=False)
    keys: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling = flax.struct.field(pytree_node=False)
