"""The scheduler's records of samples and prompts, and the plans it makes."""

import dataclasses
import enum
from typing import NamedTuple

from podrl.engine.reads import Page


class Status(enum.Enum):
    """State of a sample: waiting for a lane, in a lane, paused by its caller (without a lane), or ended."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


@dataclasses.dataclass(eq=False)
class Store:
    """What the device holds of a prompt's tokens, or of a sample's own.

    Attributes:
      key: what it is of.
      pages: those with its keys and values.
      spilled: all of it is on the host.
      place: where its memory of linear attention lies, see `EngineShape.places`: a prompt's slot, a sample's lane; -1
        where it has none.
    """

    key: tuple[str, int, int]
    pages: list[Page] = dataclasses.field(default_factory=list)
    spilled: bool = False
    place: int = -1

    @property
    def name(self) -> str:
        """Its key as one word."""
        return "/".join(map(str, self.key))


@dataclasses.dataclass
class PromptRow:
    """A prompt on one shard: its pages, and the number of unfinished samples assigned there."""

    store: Store
    users: int = 0
    filled: bool = False


@dataclasses.dataclass(eq=False)
class Sample:
    """The scheduler's record of one sample.

    Attributes:
      prompt: handle of its prompt; `length` are the prompt's tokens.
      left: tokens it may still sample, counted down by whole dispatches while it runs.
      position: position of the token it feeds next.
      urgent: it comes before others that wait for a lane.
      grown: tokens sampled so far, at most.
      unfed: given tokens before `position` whose keys and values are not there: they are fed when it is seated.
      compact: feed again from the first page that is not full, not only from the last.
      spilled_at: the plan that took its lane away; what it sampled last is known only after that plan's dispatch.
    """

    id: int
    prompt: int
    length: int
    max_new: int
    expected: float | None
    left: int
    position: int
    store: Store
    urgent: bool = False
    shard: int = -1
    lane: int = -1
    status: Status = Status.WAITING
    grown: int = 0
    unfed: int = 0
    compact: bool = False
    seated: int = -1
    spilled_at: int = -1


class Move(NamedTuple):
    """A store to copy to the host or back: its shard, and the pages and the place that hold it."""

    store: Store
    shard: int
    pages: list[int]
    place: int


class Fill(NamedTuple):
    """A prompt to prefill on a shard: the pages that take it, and the place that takes its memory."""

    prompt: int
    shard: int
    pages: list[int]
    place: int


@dataclasses.dataclass
class Plan:
    """Lists the device work before and in the next dispatch, in the order of the fields.

    Attributes:
      spills: stores to copy to the host; their pages and places may be overwritten afterwards.
      restores: stores to copy back, with their new pages and places.
      prefills: prompts to prefill.
      feeds: samples whose given tokens to prefill, after the prompts.
      frees: lanes to stop.
      copies: (shard, place, lane): memories of prompts to copy to lanes, where seated samples begin with them.
      seats: samples to seat; shard and lane are in the sample.
      running: (sample, shard, lane) of every lane in the dispatch; empty when there is nothing to run.
    """

    spills: list[Move] = dataclasses.field(default_factory=list)
    restores: list[Move] = dataclasses.field(default_factory=list)
    prefills: list[Fill] = dataclasses.field(default_factory=list)
    feeds: list["Feed"] = dataclasses.field(default_factory=list)
    frees: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    seats: list[Sample] = dataclasses.field(default_factory=list)
    running: list[tuple[Sample, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens of a sample to prefill: those at positions from `start` on and before the one it feeds next.

    Attributes:
      prior: the full pages it has already, and its prompt's, as (page, start, count).
      targets: the pages that take them.
      offset: tokens that the first of these holds already.
      place: of the memory before them, its prompt's; the sample's lane takes that after them.
    """

    sample: Sample
    start: int
    prior: list[tuple[int, int, int]]
    targets: list[int]
    offset: int
    place: int


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Sizes the scheduler works with: shards; per shard lanes and usable pages; tokens per page and dispatch; samples
    that share a read; pages a sample and its prompt may hold; (longest chunk, rows of a shard) of each prefill call;
    prompts whose memory of linear attention is kept, at least the lanes; 0 for models without such layers."""

    shards: int
    lanes: int
    pages: int
    page_tokens: int
    steps: int
    members: int
    sample_pages: int
    calls: tuple[tuple[int, int], ...] = ()
    slots: int = 0
