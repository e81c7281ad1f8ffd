"""The list of key segments a dispatch reads and writes: its layout as one flat integer array per shard.

Letters of the engine besides podrl.types: X data-parallel shards, M segments in a shard's pool, U visits to shared
(prompt) segments, O visits to own segments, W samples served by one shared visit, J segments one sample may hold,
E stop ids. A segment is C consecutive token places of one sequence; `start` is the position of its first token and
`count` how many tokens it holds. Segment M - 1 is never read: what must not be kept is written there.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import numpy as np
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


@dataclasses.dataclass
class Segment:
    """A segment in use: which, the position of its first token, the tokens it holds."""

    index: int
    start: int
    count: int


class Seated(NamedTuple):
    """What a live lane reads: segments it shares with the lanes of the same prompt, and its own, of which the last one
    takes the tokens of the dispatch."""

    prompt: Hashable
    shared: Sequence[Segment]
    own: Sequence[Segment]


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

    def fill(self, flat_I: np.ndarray, seated: Mapping[int, Seated], trash: int) -> None:
        """Writes one shard's visits into zeros; `trash` is the segment that takes what lanes not seated compute."""
        view = self.split(flat_I)
        view.write_segment_R[:] = trash
        by_prompt: dict[Hashable, list[int]] = {}
        at = 0
        for lane, (prompt, _, own) in seated.items():
            by_prompt.setdefault(prompt, []).append(lane)
            segments = [s for s in own if s.count > 0]
            view.own_first_R[lane], view.own_number_R[lane] = at, len(segments)
            for segment in segments:
                view.own_segment_O[at], view.own_start_O[at] = segment.index, segment.start
                view.own_count_O[at], view.own_lane_O[at] = segment.count, lane
                at += 1
            view.write_segment_R[lane], view.write_offset_R[lane] = own[-1].index, own[-1].count
            view.longest_2[1] = max(view.longest_2[1], len(segments))
        view.total_2[1] = at
        at = 0
        for lanes in by_prompt.values():
            at = self._fill_shared(view, lanes, seated[lanes[0]].shared, at)
        view.total_2[0] = at

    def _fill_shared(self, view: Any, lanes: Sequence[int], segments: Sequence[Segment], at: int) -> int:
        """Visits to the segments of one prompt, from place `at` on; returns the next place."""
        W = self.members
        for first in range(0, len(lanes), W):
            members = lanes[first : first + W]
            for w, lane in enumerate(members):
                view.shared_first_R[lane], view.shared_number_R[lane] = at * W + w, len(segments)
            for segment in segments:
                view.shared_segment_U[at], view.shared_start_U[at] = segment.index, segment.start
                view.shared_count_U[at] = segment.count
                view.shared_lane_UW[at, : len(members)] = members
                at += 1
        view.longest_2[0] = max(view.longest_2[0], len(segments))
        return at
