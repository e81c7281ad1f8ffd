"""The read list of a dispatch: the pages that it reads and writes, as one flat integer array per shard.

The engine's dimension letters, besides those of podrl.types: X data-parallel shards, M pages in a shard's pool, U reads
of shared (prompt) pages, O reads of own pages, W samples served by one shared read, J pages that one sample and its
prompt may hold together, E stop ids. A page is C consecutive token places of one sequence; `start` is the position of
its first token, and `count` is the number of tokens in it. The content of page M - 1 is never used: keys and values
that need not be kept go there.
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
    """The pages that one shard's lanes attend to during a dispatch, and the pages for their new keys and values.

    Attributes:
      total_2: number of shared reads in use, and of own reads in use.
      longest_2: largest number of shared reads of a lane, and largest number of own reads of a lane.
      shared_page_U, shared_start_U, shared_count_U: prompt pages to read, each for up to W lanes: index of the page,
        position of its first token, number of its tokens.
      shared_lane_UW: lanes that each shared read serves.
      shared_first_R: place of the lane in its first shared read, as read * W + member; its other reads follow at
        strides of W.
      shared_number_R: number of shared reads of the lane.
      own_page_O, own_start_O, own_count_O, own_lane_O: pages of the samples in the lanes: index of the page, position
        of its first token, number of its tokens, the lane that reads it. Reads of one lane follow each other.
      own_first_R, own_number_R: index of the lane's first own read, and the number of its own reads.
      write_page_R, write_offset_R: page for the lane's new keys and values, and the place in the page where they begin.
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
    """Reads of one kind: the shared reads or the own reads of a `ReadList`.

    Attributes:
      first_R: place of the lane in its first read, as read * W + member.
      number_R: number of reads of the lane; these reads follow each other.
      lane_UW: lanes that each read serves.
      page_U, start_U, count_U: page of each read, position of the page's first token, number of its tokens.
    """

    first_R: Int[Array, " R"]
    number_R: Int[Array, " R"]
    lane_UW: Int[Array, "U W"]
    page_U: Int[Array, " U"]
    start_U: Int[Array, " U"]
    count_U: Int[Array, " U"]


@dataclasses.dataclass
class Page:
    """A page in use: its index in the pool, the position of its first token, and the number of its tokens."""

    index: int
    start: int
    count: int


class LaneReads(NamedTuple):
    """The pages of a live lane.

    Attributes:
      prompt: identity of the prompt; lanes of equal prompts share reads.
      shared: pages of the prompt.
      own: pages of the lane's sample; the last page has room for the tokens of the dispatch.
    """

    prompt: Hashable
    shared: Sequence[Page]
    own: Sequence[Page]


@dataclasses.dataclass(frozen=True)
class ReadShape:
    """Fixed sizes of one shard's read list.

    Attributes:
      lanes: R, number of lanes of the shard.
      shared: U, largest number of shared reads; a multiple of `podrl.engine.attention.SHARED_BLOCK`.
      own: O, largest number of own reads; a multiple of `podrl.engine.attention.OWN_BLOCK`.
      members: W, largest number of lanes that a shared read serves.
    """

    lanes: int
    shared: int
    own: int
    members: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each field of `ReadList`, in order."""
        size = {"U": (self.shared,), "O": (self.own,), "R": (self.lanes,), "2": (2,), "UW": (self.shared, self.members)}
        return {f.name: size[f.name.rsplit("_", 1)[1]] for f in dataclasses.fields(ReadList)}  # pyright: ignore[reportArgumentType]

    @property
    def size(self) -> int:
        """Number of integers in a shard's read list."""
        return sum(math.prod(shape) for shape in self.fields().values())

    def split(self, flat: Any) -> ReadList:
        """Splits a flat read list into its fields: views of a numpy array, slices of a jax array."""
        parts, at = {}, 0
        for name, shape in self.fields().items():
            parts[name] = flat[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        return ReadList(**parts)

    def fill(self, flat_I: np.ndarray, seated: Mapping[int, LaneReads], trash: int) -> None:
        """Writes one shard's read list into `flat_I`.

        Args:
          flat_I: zeros, int32 (size,).
          seated: pages of each live lane, by lane.
          trash: index of the page that all other lanes write to.
        """
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
        """Writes the reads of one prompt's pages from index `at` on; returns the index after the last one."""
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
