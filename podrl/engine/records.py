"""The scheduler's records of samples and prompts, and the plans it makes."""

import dataclasses
import enum
from typing import NamedTuple

from podrl.engine.reads import Page


class Status(enum.Enum):
    """State of a sample: waiting for a lane, running in a lane, paused until `Scheduler.resume` (no lane), or ended."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


@dataclasses.dataclass(eq=False)
class TokenStore:
    """The cache of a prompt's tokens on one shard, or of a sample's own tokens: pages, and a place for its memory.

    Attributes:
      key: ("prompt", prompt handle, shard) or ("sample", sample handle, 0).
      pages: pages with the keys and values of the tokens.
      spilled: True if the whole store has been moved to the host.
      place: place of the memory of linear attention (`EngineShape.places`): a slot for a prompt, the lane for a sample;
        -1 if the store has no place.
    """

    key: tuple[str, int, int]
    pages: list[Page] = dataclasses.field(default_factory=list)
    spilled: bool = False
    place: int = -1

    @property
    def name(self) -> str:
        """The parts of `key`, joined by '/'."""
        return "/".join(map(str, self.key))


@dataclasses.dataclass
class PromptRow:
    """A prompt on one shard: its store, the number of its unfinished samples there, and whether it is prefilled."""

    store: TokenStore
    users: int = 0
    filled: bool = False


@dataclasses.dataclass(eq=False)
class Sample:
    """The scheduler's record of one sample.

    Attributes:
      id: handle of the sample.
      prompt: handle of the sample's prompt.
      length: number of tokens of the prompt.
      max_new: largest number of tokens that the sample may sample.
      expected: caller's estimate of the number of tokens that the sample will draw; None without an estimate.
      left: number of tokens that the sample may still draw, counted down by whole dispatches while it runs.
      position: position of the token that the sample feeds next.
      store: cache of the sample's own tokens.
      urgent: True if the sample gets a lane before samples that are not urgent.
      joins: True if the sample prefers a shard with its prompt's pages to the shard with the most free lanes.
      shard: number of the sample's shard; -1 as long as it has none.
      lane: number of the sample's lane on the shard; -1 while it has none.
      status: state of the sample.
      grown: upper bound of the number of tokens sampled so far.
      unfed: number of tokens before `position` without keys and values; they are prefilled when the sample is seated.
      compact: True if all tokens after the first page that is not full are fed again, and not only the appended tokens.
      seated: number of the sample's newest seating, counted over all samples; -1 before the first.
      spilled_at: number of the plan that took the sample's lane away; -1 if no plan did. This plan does not seat the
        sample again, because the sample's tokens in flight are read only before a later plan.
    """

    id: int
    prompt: int
    length: int
    max_new: int
    expected: float | None
    left: int
    position: int
    store: TokenStore
    urgent: bool = False
    joins: bool = False
    shard: int = -1
    lane: int = -1
    status: Status = Status.WAITING
    grown: int = 0
    unfed: int = 0
    compact: bool = False
    seated: int = -1
    spilled_at: int = -1


class StoreMove(NamedTuple):
    """A store to copy to the host or back: its shard, and the pages and the place on the device that hold it."""

    store: TokenStore
    shard: int
    pages: list[int]
    place: int


class Fill(NamedTuple):
    """A prompt to prefill on a shard: the pages for its keys and values, and the place for its memory."""

    prompt: int
    shard: int
    pages: list[int]
    place: int


@dataclasses.dataclass
class DispatchPlan:
    """Lists the device work before and in the next dispatch.

    The work is done in the order of the fields, but lanes are freed and seated together, after the copies.

    Attributes:
      spills: stores to copy to the host; their pages and places may be overwritten afterwards.
      restores: stores to copy back, with their new pages and places.
      prefills: prompts to prefill.
      feeds: prefills of the tokens appended to samples; they run after the prefills of prompts.
      frees: (shard, lane) of lanes to stop.
      copies: (shard, place, lane) of each copy of a prompt's memory, from its place to the lane of a new sample.
      seats: samples to put into lanes; each has its shard and lane.
      running: (sample, shard, lane) of every lane in the dispatch; empty if there is nothing to run.
    """

    spills: list[StoreMove] = dataclasses.field(default_factory=list)
    restores: list[StoreMove] = dataclasses.field(default_factory=list)
    prefills: list[Fill] = dataclasses.field(default_factory=list)
    feeds: list["Feed"] = dataclasses.field(default_factory=list)
    frees: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    seats: list[Sample] = dataclasses.field(default_factory=list)
    running: list[tuple[Sample, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens of a sample to prefill: all from position `start` on except the last, which the sample's lane feeds next.

    Attributes:
      sample: sample whose tokens are prefilled.
      start: position of the first token to prefill.
      prior: (page, start, count) of the prompt's pages and of the sample's full pages.
      targets: indices of the pages for the new keys and values.
      offset: number of tokens that the first target page holds already.
      place: place of the prompt's memory, from which the prefill begins; the prefill writes the new memory to the
        sample's lane.
    """

    sample: Sample
    start: int
    prior: list[tuple[int, int, int]]
    targets: list[int]
    offset: int
    place: int


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Sizes that the scheduler works with.

    Attributes:
      shards: number of data-parallel shards.
      lanes: number of lanes of a shard.
      pages: number of usable pages of a shard.
      page_tokens: number of tokens of a page.
      steps: number of decode steps of a dispatch.
      members: largest number of samples that share a read of a prompt's page.
      sample_pages: largest number of pages that a sample and its prompt may hold together.
      calls: (longest chunk in tokens, rows of a shard) of each prefill call, ascending.
      slots: number of prompts of a shard whose memory of linear attention is kept, at least `lanes`; 0 for models
        without linear attention.
    """

    shards: int
    lanes: int
    pages: int
    page_tokens: int
    steps: int
    members: int
    sample_pages: int
    calls: tuple[tuple[int, int], ...] = ()
    slots: int = 0
