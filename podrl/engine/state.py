"""Types that pass between the host and the engine's programs: sizes, device state, lane updates, chunks, results."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from podrl.engine import attention
from podrl.engine.reads import ReadShape
from podrl.engine.sampling import LaneSampling

STOP_IDS = 8  # largest number of ids that may end a sample or a turn of a sample, including the tokenizer's end tokens
KEEP, SEAT, FREE = 0, 1, 2  # actions of `bulk_insert` on a lane


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Fixed sizes of the compiled programs; all counts are for one data-parallel shard.

    Attributes:
      lanes: R, number of lanes.
      pages: M, number of pages of the pool, including the last page, whose content is never used.
      page_tokens: C, number of tokens of a page.
      steps: number of decode steps per dispatch.
      prompt_pages: largest number of pages of a prompt.
      max_pages: J, largest number of pages that one sample and its prompt may hold together.
      members: W, largest number of samples that share a read of a prompt's page.
      stop_ids: E, largest number of ids that may end a sample.
      buckets: lengths of prefill chunks, tokens, ascending; each has a program.
      prefill_tokens: number of tokens of a prefill call, which has `prefill_tokens // bucket` rows, at least 1.
      slots: number of prompts whose memory of linear attention is kept, at least `lanes`; 0 for models without linear
        attention.
    """

    lanes: int
    pages: int
    page_tokens: int
    steps: int
    prompt_pages: int
    max_pages: int
    members: int
    stop_ids: int
    buckets: tuple[int, ...]
    prefill_tokens: int
    slots: int = 0

    @property
    def places(self) -> int:
        """Number of places for memories of linear attention: the lanes, then the prompts' slots, then `nowhere`."""
        return self.lanes + self.slots + 1

    @property
    def nowhere(self) -> int:
        """The last place: reading it gives zeros, and memories that need not be kept are written to it."""
        return self.places - 1

    def prefill_rows(self, bucket: int) -> int:
        """Returns the number of rows of a bucket's prefill program."""
        return max(1, self.prefill_tokens // bucket)

    @property
    def prefill_calls(self) -> tuple[tuple[int, int], ...]:
        """(longest chunk in tokens, rows) of each prefill program, ascending."""
        return tuple((bucket, self.prefill_rows(bucket)) for bucket in self.buckets)

    def chunk_pages(self, bucket: int) -> int:
        """Returns how many pages a chunk touches at most: one more than it fills, because it may begin in mid-page."""
        return -(-bucket // self.page_tokens) + 1

    def chunk_shape(self, shards: int, bucket: int) -> tuple[int, int]:
        """Returns the shape of the array that `pack_chunks` makes."""
        width = bucket + 2 + 3 * self.max_pages + self.chunk_pages(bucket) + 3 * bool(self.slots)
        return shards * self.prefill_rows(bucket), width

    def pack_chunks(self, shards: int, bucket: int, chunks: Sequence["PrefillChunk"]) -> np.ndarray:
        """Packs chunks into the flat argument of a bucket's prefill: int32, one row per prefill row of the mesh.

        The columns are the fields of `PrefillChunk`: the tokens (as many columns as the bucket), start, then J pages, J
        starts and J counts of the pages before the chunk, the target pages, the offset. If the shape has slots, the
        number of tokens and the places `begins` and `ends` follow.
        """
        J, (rows, width) = self.max_pages, self.chunk_shape(shards, bucket)
        flat = np.zeros((shards, rows // shards, width), np.int32)
        last = bucket + 1 + 3 * J + self.chunk_pages(bucket)
        flat[:, :, bucket + 1 + 3 * J : last] = self.pages - 1
        if self.slots:
            flat[:, :, -2:] = self.nowhere
        used = [0] * shards
        for chunk in chunks:
            row = flat[chunk.shard, used[chunk.shard]]
            used[chunk.shard] += 1
            row[: len(chunk.tokens)] = chunk.tokens
            row[bucket] = chunk.start
            for j, (page, start, count) in enumerate(chunk.prior):
                row[bucket + 1 + j], row[bucket + 1 + J + j], row[bucket + 1 + 2 * J + j] = page, start, count
            row[bucket + 1 + 3 * J : bucket + 1 + 3 * J + len(chunk.targets)] = chunk.targets
            row[last] = chunk.offset
            if self.slots:
                row[-3:] = len(chunk.tokens), chunk.begins, chunk.ends
        return flat.reshape(rows, width)

    def pack_copies(self, shards: int, copies: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Packs (shard, place, lane) into the argument of `Engine.copy_memories`: int32, a row for each shard.

        The columns are the number of copies, then R places, then R lanes.
        """
        flat = np.zeros((shards, 1 + 2 * self.lanes), np.int32)
        for shard, place, lane in copies:
            number = flat[shard, 0]
            flat[shard, 1 + number], flat[shard, 1 + self.lanes + number] = place, lane
            flat[shard, 0] += 1
        return flat

    def reads(self) -> ReadShape:
        """Returns the sizes of a read list that has room for any use of the lanes and pages.

        In the worst case every shared read serves only one lane: each lane then needs a read for each page of a prompt.
        """
        shared = self.lanes * self.prompt_pages
        up = lambda n, block: -(-n // block) * block  # noqa: E731
        return ReadShape(
            self.lanes, up(shared, attention.SHARED_BLOCK), up(self.pages, attention.OWN_BLOCK), self.members
        )


@flax.struct.dataclass
class DecodeState:
    """Pools and lanes on the rollout mesh. Lanes and pages are sharded over data, expert and fsdp, K over tensor.

    Attributes:
      pools: arrays that are cut into pages; a page has the same index in all of them. Each kind of attention layers has
        two, its keys and its values, (L, M, K, C, H). If routes are recorded, a last array has the experts that each
        token took, (L, M, 1, C, k) (`podrl.models.moe.route`).
      token_R: id of the token that each lane feeds next.
      position_R: position of the token `token_R` in its sequence.
      left_R: number of tokens that the lane may still sample.
      live_R: True if the lane samples.
      sampling: sampling settings of each lane.
      stop_RE: ids that end the lane's sample; -1 in unused columns.
      memories: arrays of the memory that layers of linear attention keep of a sequence. Each kind of these layers, or
        each layer if the layers are unrolled, has two: states (L, P, N, H, U) and inputs of the convolution
        (L, P, K, J) (`podrl.models.delta.memory_shapes`). P counts places (`EngineShape.places`), and the first R
        places belong to the lanes: the place of a live lane has the memory of the tokens before `position_R`.
    """

    pools: tuple[Array, ...]
    token_R: Int[Array, " R"]
    position_R: Int[Array, " R"]
    left_R: Int[Array, " R"]
    live_R: Bool[Array, " R"]
    sampling: LaneSampling
    stop_RE: Int[Array, "R E"]
    memories: tuple[Array, ...] = ()


@flax.struct.dataclass
class SampledTokens:
    """Tokens that one dispatch sampled.

    Attributes:
      tokens_RT: ids of the tokens; T is the number of decode steps, and the first `count_R` columns hold tokens.
      drawn: an array (R, T) for each name of `podrl.types.DRAWN`.
      count_R: number of tokens that each lane sampled.
      live_R: True if the lane continues to sample.
      failed_R: True if the lane ended because its logits were not a distribution (`podrl.engine.sampling.Draw`).
      steps_X: number of decode steps that each shard ran.
    """

    tokens_RT: Int[Array, "R T"]
    drawn: Mapping[str, Shaped[Array, "R T"]]
    count_R: Int[Array, " R"]
    live_R: Bool[Array, " R"]
    failed_R: Bool[Array, " R"]
    steps_X: Int[Array, " X"]


@dataclasses.dataclass(frozen=True)
class LaneUpdates:
    """Arrays for `Engine.bulk_insert`: what to do with each lane of the mesh, and the sample to seat in it.

    Attributes:
      action_R: KEEP, SEAT or FREE.
      token_R, position_R, left_R: values of the fields of `DecodeState` for a lane to seat.
      key_R2: random key of the sample, uint32.
      temperature_R, top_k_R, top_p_R, min_p_R: sampling settings (`podrl.engine.sampling.LaneSampling`).
      stop_RE: ids that end the sample; -1 in unused columns.
    """

    action_R: np.ndarray
    token_R: np.ndarray
    position_R: np.ndarray
    left_R: np.ndarray
    top_k_R: np.ndarray
    key_R2: np.ndarray
    temperature_R: np.ndarray
    top_p_R: np.ndarray
    min_p_R: np.ndarray
    stop_RE: np.ndarray

    @classmethod
    def empty(cls, lanes: int, stop_ids: int) -> "LaneUpdates":
        """Makes updates that change no lane."""
        whole = [np.zeros(lanes, np.int32) for _ in range(5)]
        real = [np.zeros(lanes, np.float32) for _ in range(3)]
        return cls(*[*whole, np.zeros((lanes, 2), np.uint32), *real, np.full((lanes, stop_ids), -1, np.int32)])

    def packed(self) -> np.ndarray:
        """Packs all fields side by side as int32, one row per lane."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return np.concatenate([x.reshape(len(x), -1).view(np.int32) for x in fields], axis=1)

    @classmethod
    def unpacked(cls, packed_RI: Any) -> "LaneUpdates":
        """Splits packed fields; for use inside a compiled program."""
        real_R3 = jax.lax.bitcast_convert_type(packed_RI[:, 7:10], jnp.float32)
        key_R2 = jax.lax.bitcast_convert_type(packed_RI[:, 5:7], jnp.uint32)
        return cls(*[*packed_RI[:, :5].T, key_R2, *real_R3.T, packed_RI[:, 10:]])


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one sequence to prefill.

    Attributes:
      shard: number of the shard whose pool holds the sequence.
      tokens: token ids, int32, at most as many as the largest bucket.
      start: position of the first token.
      prior: (page, start, count) of the pages that hold the sequence's earlier tokens.
      targets: indices of the pages for the new keys and values.
      offset: place of the first token in the first target page; the page's earlier places keep their content.
      begins, ends: places of the memory before the chunk, which is read, and of the memory after it, which is written;
        used if the shape has slots.
    """

    shard: int
    tokens: np.ndarray
    start: int
    prior: Sequence[tuple[int, int, int]]
    targets: Sequence[int]
    offset: int = 0
    begins: int = 0
    ends: int = 0
