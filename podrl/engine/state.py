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

STOP_IDS = 8  # ids that may end a sample, or a turn of one, the tokenizer's included
KEEP, SEAT, FREE = 0, 1, 2  # what `bulk_insert` does with a lane


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Fixed sizes of the compiled programs; per data-parallel shard unless said otherwise.

    Attributes:
      lanes: R.
      pages: M, the unread last one included.
      page_tokens: C.
      steps: decode steps per dispatch.
      prompt_pages: most pages of a prompt.
      max_pages: J, pages one sample and its prompt may hold together.
      members: W.
      stop_ids: E.
      buckets: prefill chunk lengths, ascending.
      prefill_tokens: rows of a prefill call times its bucket, about.
      slots: prompts whose memory of linear attention is kept, at least `lanes`; 0 for models without such layers.
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
        """Memories of linear attention: those of the lanes, of the prompts behind them, and `nowhere`."""
        return self.lanes + self.slots + 1

    @property
    def nowhere(self) -> int:
        """The last place: what is read from it counts as zeros, and what need not be kept is written to it."""
        return self.places - 1

    def prefill_rows(self, bucket: int) -> int:
        """Returns the number of rows of a bucket's prefill program."""
        return max(1, self.prefill_tokens // bucket)

    @property
    def prefill_calls(self) -> tuple[tuple[int, int], ...]:
        """The longest chunk of each prefill program, ascending, and its rows."""
        return tuple((bucket, self.prefill_rows(bucket)) for bucket in self.buckets)

    def chunk_pages(self, bucket: int) -> int:
        """Returns the most pages a chunk lies in: one more than it fills where it begins inside a page."""
        return -(-bucket // self.page_tokens) + 1

    def chunk_shape(self, shards: int, bucket: int) -> tuple[int, int]:
        """Returns the shape of what `pack_chunks` makes."""
        width = bucket + 2 + 3 * self.max_pages + self.chunk_pages(bucket) + 3 * bool(self.slots)
        return shards * self.prefill_rows(bucket), width

    def pack_chunks(self, shards: int, bucket: int, chunks: Sequence["Chunk"]) -> np.ndarray:
        """Packs chunks into the flat argument of a bucket's prefill: int32, one row per prefill row of the mesh.

        Columns: tokens (bucket), start, then J pages, J starts, J counts of what came before, the targets, the offset;
        with slots also the number of tokens, and the places that the memory is read from and written to.
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

        Columns: their number, then R places, then R lanes.
        """
        flat = np.zeros((shards, 1 + 2 * self.lanes), np.int32)
        for shard, place, lane in copies:
            number = flat[shard, 0]
            flat[shard, 1 + number], flat[shard, 1 + self.lanes + number] = place, lane
            flat[shard, 0] += 1
        return flat

    def reads(self) -> ReadShape:
        """Sizes of a read list with room for every lane and page; a shared read serves at least one lane."""
        shared = self.lanes * self.prompt_pages
        up = lambda n, block: -(-n // block) * block  # noqa: E731
        return ReadShape(
            self.lanes, up(shared, attention.SHARED_BLOCK), up(self.pages, attention.OWN_BLOCK), self.members
        )


@flax.struct.dataclass
class DecodeState:
    """Pools and lanes on the rollout mesh. Lanes and pages are sharded over data and fsdp, K over tensor.

    Attributes:
      pools: all that lies in pages, a page in the same place of each: keys and values (L, M, K, C, H) of each kind of
        layers, and where routes are recorded, the experts that each token took (L, M, 1, C, k), see
        `podrl.models.moe.route`.
      token_R: the token each lane feeds next.
      position_R: its position.
      left_R: tokens the lane may still sample.
      live_R: whether the lane samples.
      sampling: settings of the lane's sample.
      stop_RE: ids that end it; -1 is none.
      memories: what layers of linear attention keep of a sequence: states (L, P, N, H, U) and inputs of the convolution
        (L, P, I), see `podrl.models.delta.memory_shapes`; of each kind of such layers, or of each layer where they are
        unrolled. The first R of the P places are those of the lanes: a live lane's has the memory of the tokens before
        `position_R`. See `EngineShape.places`.
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
class Emitted:
    """Tokens of one dispatch: `steps` columns per lane, of which the first `count` hold tokens.

    `failed` lanes ended because there was no distribution to draw a token from, see `podrl.engine.sampling.Draw`.

    Attributes:
      drawn: an array (R, T) for each name of `podrl.types.DRAWN`.
    """

    tokens_RT: Int[Array, "R T"]
    drawn: Mapping[str, Shaped[Array, "R T"]]
    count_R: Int[Array, " R"]
    live_R: Bool[Array, " R"]
    failed_R: Bool[Array, " R"]
    steps_X: Int[Array, " X"]


@dataclasses.dataclass(frozen=True)
class LaneUpdates:
    """Arrays for `bulk_insert`, over all lanes of the mesh: each lane's action, and the sample to put there."""

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
        """Splits packed fields, inside a program."""
        real_R3 = jax.lax.bitcast_convert_type(packed_RI[:, 7:10], jnp.float32)
        key_R2 = jax.lax.bitcast_convert_type(packed_RI[:, 5:7], jnp.uint32)
        return cls(*[*packed_RI[:, :5].T, key_R2, *real_R3.T, packed_RI[:, 10:]])


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of given tokens to prefill for one sequence.

    Attributes:
      shard: whose pool.
      tokens: the tokens, at most the largest bucket.
      start: position of the first one.
      prior: (page, start, count) of what the sequence holds already.
      targets: pages that take the new keys and values.
      offset: place of the first token in the first of them; what lies before it there stays.
      begins, ends: places of the memory before the chunk and after it, where the shape has slots.
    """

    shard: int
    tokens: np.ndarray
    start: int
    prior: Sequence[tuple[int, int, int]]
    targets: Sequence[int]
    offset: int = 0
    begins: int = 0
    ends: int = 0
