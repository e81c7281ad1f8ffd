"""The list of key segments a dispatch reads and writes: its layout as one flat integer array per shard.

Letters of the engine besides podrl.types: X data-parallel shards, M segments in a shard's pool, U visits to shared
(prompt) segments, O visits to own segments, W samples served by one shared visit, J segments one sample may hold,
E stop ids. A segment is C consecutive token places of one sequence; `start` is the position of its first token and
`count` how many tokens it holds. Segment M - 1 is never read: what must not be kept is written there.
"""

import dataclasses
import math
from typing import Any

import flax.struct
from jaxtyping import Array, Int


@flax.struct.dataclass
class Visits:
    """What one shard's lanes attend to during a dispatch, and where their new keys and values go.

    Attributes:
      total_2: number of shared and of own visits filled.
      longest_2: most shared and most own visits of any lane.
      shared_segment_U, shared_start_U, shared_count_U: prompt segments read, each for up to W lanes.
      shared_lane_UW: those lanes.
      shared_first_R: place of the lane in its first shared visit, as visit * W + member; its next visits follow at
        strides of W.
      shared_number_R: shared visits of the lane.
      own_segment_O, own_start_O, own_count_O, own_lane_O: segments read by one lane each, a lane's in a row.
      own_first_R, own_number_R: the lane's first own visit and how many follow.
      write_segment_R, write_offset_R: where the dispatch's keys and values of the lane go.
    """

    total_2: Int[Array, " 2"]
    longest_2: Int[Array, " 2"]
    shared_segment_U: Int[Array, " U"]
    shared_start_U: Int[Array, " U"]
    shared_count_U: Int[Array, " U"]
    shared_lane_UW: Int[Array, "U W"]
    shared_first_R: Int[Array, " R"]
    shared_number_R: Int[Array, " R"]
    own_segment_O: Int[Array, " O"]
    own_start_O: Int[Array, " O"]
    own_count_O: Int[Array, " O"]
    own_lane_O: Int[Array, " O"]
    own_first_R: Int[Array, " R"]
    own_number_R: Int[Array, " R"]
    write_segment_R: Int[Array, " R"]
    write_offset_R: Int[Array, " R"]


@dataclasses.dataclass(frozen=True)
class VisitShape:
    """Fixed sizes of one shard's visits. `shared` and `own` are multiples of the blocks they are read in."""

    lanes: int
    shared: int
    own: int
    members: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of Visits, in order."""
        size = {"U": (self.shared,), "O": (self.own,), "R": (self.lanes,), "2": (2,), "UW": (self.shared, self.members)}
        return {f.name: size[f.name.rsplit("_", 1)[1]] for f in dataclasses.fields(Visits)}  # pyright: ignore[reportArgumentType]

    @property
    def size(self) -> int:
        """Integers per shard."""
        return sum(math.prod(shape) for shape in self.fields().values())

    def split(self, flat: Any) -> Visits:
        """Visits as parts of a flat array: views of a numpy array, slices of a jax array."""
        parts, at = {}, 0
        for name, shape in self.fields().items():
            parts[name] = flat[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        return Visits(**parts)
