"""What passes between the host and the engine's programs: sizes, device state, seats, chunks, results."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from podrl.rollout import attention
from podrl.rollout.sampling import LaneSampling
from podrl.rollout.visits import VisitShape

KEEP, SEAT, FREE = 0, 1, 2  # what `bulk_insert` does with a lane


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Fixed sizes of the compiled programs; per data-parallel shard unless said otherwise.

    Attributes:
      lanes: R.
      segments: M, the unread last one included.
      segment_tokens: C.
      steps: decode steps per dispatch.
      prompt_segments: most segments of a prompt.
      max_segments: J, segments one sample and its prompt may hold together.
      members: W.
      stop_ids: E.
      buckets: prefill chunk lengths, ascending multiples of C.
      prefill_tokens: rows of a prefill call times its bucket, about.
    """

    lanes: int
    segments: int
    segment_tokens: int
    steps: int
    prompt_segments: int
    max_segments: int
    members: int
    stop_ids: int
    buckets: tuple[int, ...]
    prefill_tokens: int

    def prefill_rows(self, bucket: int) -> int:
        """Rows of the prefill program of a bucket."""
        return max(1, self.prefill_tokens // bucket)

    def visits(self) -> VisitShape:
        """Room for every lane and segment at once; a shared visit serves at least one lane."""
        shared = self.lanes * self.prompt_segments
        up = lambda n, block: -(-n // block) * block  # noqa: E731
        return VisitShape(
            self.lanes, up(shared, attention.SHARED_BLOCK), up(self.segments, attention.OWN_BLOCK), self.members
        )


@flax.struct.dataclass
class DecodeState:
    """Pools and lanes on the rollout mesh. Lanes and segments are sharded over data and fsdp, K over tensor.

    Attributes:
      key_LMKCH, value_LMKCH: segment pools.
      token_R: the token each lane feeds next.
      position_R: its position.
      left_R: tokens the lane may still sample.
      live_R: whether the lane samples.
      sampling: settings of the lane's sample.
      stop_RE: ids that end it; -1 is none.
    """

    key_LMKCH: Float[Array, "L M K C H"]
    value_LMKCH: Float[Array, "L M K C H"]
    token_R: Int[Array, " R"]
    position_R: Int[Array, " R"]
    left_R: Int[Array, " R"]
    live_R: Bool[Array, " R"]
    sampling: LaneSampling
    stop_RE: Int[Array, "R E"]


@flax.struct.dataclass
class Emitted:
    """What a dispatch produced: `steps` columns per lane, of which the first `count` hold tokens."""

    tokens_RT: Int[Array, "R T"]
    logprob_RT: Float[Array, "R T"]
    raw_logprob_RT: Float[Array, "R T"]
    count_R: Int[Array, " R"]
    live_R: Bool[Array, " R"]
    steps_X: Int[Array, " X"]


@dataclasses.dataclass(frozen=True)
class Seats:
    """Host arrays for `bulk_insert`, over all lanes of the mesh: what to do with each lane and what to seat there."""

    action_R: np.ndarray
    token_R: np.ndarray
    position_R: np.ndarray
    left_R: np.ndarray
    top_k_R: np.ndarray
    key_R2: np.ndarray
    stop_RE: np.ndarray
    temperature_R: np.ndarray
    top_p_R: np.ndarray
    min_p_R: np.ndarray

    @classmethod
    def empty(cls, lanes: int, stop_ids: int) -> "Seats":
        """No lane changes."""
        whole = lambda: np.zeros(lanes, np.int32)  # noqa: E731
        real = lambda: np.zeros(lanes, np.float32)  # noqa: E731
        return cls(
            action_R=whole(),
            token_R=whole(),
            position_R=whole(),
            left_R=whole(),
            top_k_R=whole(),
            key_R2=np.zeros((lanes, 2), np.uint32),
            stop_RE=np.full((lanes, stop_ids), -1, np.int32),
            temperature_R=real(),
            top_p_R=real(),
            min_p_R=real(),
        )

    def packed(self) -> np.ndarray:
        """All fields side by side as int32, one row per lane."""
        columns = [
            *(x[:, None] for x in (self.action_R, self.token_R, self.position_R, self.left_R, self.top_k_R)),
            self.key_R2.view(np.int32),
            *(x[:, None].view(np.int32) for x in (self.temperature_R, self.top_p_R, self.min_p_R)),
            self.stop_RE,
        ]
        return np.concatenate(columns, axis=1)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of given tokens to prefill for one sequence.

    Attributes:
      shard: whose pool.
      tokens: the tokens, at most the largest bucket.
      start: position of the first one.
      prior: (segment, start, count) of what the sequence holds already.
      targets: segments that take the new keys and values, C tokens each.
    """

    shard: int
    tokens: np.ndarray
    start: int
    prior: Sequence[tuple[int, int, int]]
    targets: Sequence[int]
