"""The read list of a dispatch: the pages of keys it reads and writes, as one flat integer array per shard.

Letters of the engine besides podrl.types: X data-parallel shards, M pages in a shard's pool, U reads of shared
(prompt) pages, O reads of own pages, W samples served by one shared read, J pages one sample may hold,
E stop ids. A page is C consecutive token places of one sequence; `start` is the position of its first token and
`count` how many tokens it holds. Page M - 1 is never read: what must not be kept is written there.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import numpy as np
from jaxtyping import Array, Int


@flax.struct.dataclass
class ReadList:
    """The pages that one shard's lanes attend to during a dispatch, and those that take their new keys and values.

    Attributes:
      total_2: number of shared and of own reads filled.
      longest_2: most shared and most own reads of any lane.
      shared_page_U, shared_start_U, shared_count_U: prompt pages read, each for up to W lanes.
      shared_lane_UW: those lanes.
      shared_first_R: place of the lane in its first shared read, as read * W + member; its next reads follow at
        strides of W.
      shared_number_R: shared reads of the lane.
      own_page_O, own_start_O, own_count_O, own_lane_O: pages read by one lane each, a lane's in a row.
      own_first_R, own_number_R: the lane's first own read and how many follow.
      write_page_R, write_offset_R: where the dispatch's keys and values of the lane go.
    """

    total_2: Int[Array, " 2"]
    longest_2: Int[Array, " 2"]
    shared_page_U: Int[Array, " U"]
    shared_start_U: Int[Array, " U"]
    shared_count_U: Int[Array, " U"]
    shared_lane_UW: Int[Array, "U W"]
    shared_first_R: Int[Array, " R"]
    shared_number_R: Int[Array, " R"]
    own_page_O: Int[Array, " O"]
    own_start_O: Int[Array, " O"]
    own_count_O: Int[Array, " O"]
    own_lane_O: Int[Array, " O"]
    own_first_R: Int[Array, " R"]
    own_number_R: Int[Array, " R"]
    write_page_R: Int[Array, " R"]
    write_offset_R: Int[Array, " R"]


class Runs(NamedTuple):
    """Reads of one kind, of prompts or of single lanes (`ReadList`).

    Attributes:
      first_R: place of the lane in its first read, as read * W + member.
      number_R: reads of the lane, which follow each other.
      lane_UW: the lanes of each read.
      page_U, start_U, count_U: of each read its page, the position of the page's first token, and its tokens.
    """

    first_R: Int[Array, " R"]
    number_R: Int[Array, " R"]
    lane_UW: Int[Array, "U W"]
    page_U: Int[Array, " U"]
    start_U: Int[Array, " U"]
    count_U: Int[Array, " U"]


@dataclasses.dataclass
class Page:
    """A page in use: its index, the position of its first token, its number of tokens."""

    index: int
    start: int
    count: int


class LaneReads(NamedTuple):
    """The pages of a live lane: shared ones of its prompt, and its own; the last takes the dispatch's tokens."""

    prompt: Hashable
    shared: Sequence[Page]
    own: Sequence[Page]


@dataclasses.dataclass(frozen=True)
class ReadShape:
    """Fixed sizes of one shard's reads. `shared` and `own` are multiples of the blocks they are read in."""

    lanes: int
    shared: int
    own: int
    members: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of ReadList, in order."""
        size = {"U": (self.shared,), "O": (self.own,), "R": (self.lanes,), "2": (2,), "UW": (self.shared, self.members)}
        return {f.name: size[f.name.rsplit("_", 1)[1]] for f in dataclasses.fields(ReadList)}  # pyright: ignore[reportArgumentType]

    @property
    def size(self) -> int:
        """Number of integers per shard."""
        return sum(math.prod(shape) for shape in self.fields().values())

    def split(self, flat: Any) -> ReadList:
        """Splits reads into their fields: views of a numpy array, slices of a jax array."""
        parts, at = {}, 0
        for name, shape in self.fields().items():
            parts[name] = flat[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        return ReadList(**parts)

    def fill(self, flat_I: np.ndarray, seated: Mapping[int, LaneReads], trash: int) -> None:
        """Writes one shard's reads into zeros; lanes not seated write to the page `trash`."""
        view = self.split(flat_I)
        view.write_page_R[:] = trash
        by_prompt: dict[Hashable, list[int]] = {}
        at = 0
        for lane, (prompt, _, own) in seated.items():
            by_prompt.setdefault(prompt, []).append(lane)
            pages = [s for s in own if s.count > 0]
            view.own_first_R[lane], view.own_number_R[lane] = at, len(pages)
            for page in pages:
                view.own_page_O[at], view.own_start_O[at] = page.index, page.start
                view.own_count_O[at], view.own_lane_O[at] = page.count, lane
                at += 1
            view.write_page_R[lane], view.write_offset_R[lane] = own[-1].index, own[-1].count
            view.longest_2[1] = max(view.longest_2[1], len(pages))
        view.total_2[1] = at
        at = 0
        for lanes in by_prompt.values():
            at = self._fill_shared(view, lanes, seated[lanes[0]].shared, at)
        view.total_2[0] = at

    def _fill_shared(self, view: Any, lanes: Sequence[int], pages: Sequence[Page], at: int) -> int:
        """Writes the reads of one prompt's pages from place `at` on; returns the next place."""
        W = self.members
        for first in range(0, len(lanes), W):
            members = lanes[first : first + W]
            for w, lane in enumerate(members):
                view.shared_first_R[lane], view.shared_number_R[lane] = at * W + w, len(pages)
            for page in pages:
                view.shared_page_U[at], view.shared_start_U[at] = page.index, page.start
                view.shared_count_U[at] = page.count
                view.shared_lane_UW[at, : len(members)] = members
                at += 1
        view.longest_2[0] = max(view.longest_2[0], len(pages))
        return at
