"""Assigns samples to lanes and pages of the pool: scheduling policy on the host, without jax.

Samples of a prompt that are added as one group stay on one data-parallel shard and share the prompt's pages there.
Lanes and pages change only between dispatches. The scheduler plans a dispatch before the results of the previous
dispatch are known: it assumes that every lane is live until its sample is reported as ended. A wrong assumption only
costs idle decode steps.
"""

import bisect
import collections
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podrl.engine.reads import LaneReads, Page, ReadShape
from podrl.engine.records import DispatchPlan, Feed, Fill, PoolShape, PromptRow, Sample, Status, StoreMove, TokenStore

# Prompts are prefilled ahead while a shard has fewer waiting samples than this factor times its lanes. If a prefill
# call has more rows than the shard has lanes, the rows count in place of the lanes.
_AHEAD = 2


class _Fit(NamedTuple):
    """Counts of the pages and tokens that are needed to prefill the tokens appended to a sample.

    Attributes:
      keep: number of the sample's first pages that stay; the last of them is filled up first.
      tokens: number of tokens to feed, which includes the tokens of pages that do not stay.
      new: number of new pages, for the tokens that do not fit the pages that stay.
      rest: number of free places in the sample's last page afterwards.
    """

    keep: int
    tokens: int
    new: int
    rest: int


class _Shard:
    """Lanes, free pages, resident prompts and assigned samples of one data-parallel shard."""

    def __init__(self, index: int, shape: PoolShape):
        self.index = index
        self.free_lanes = list(range(shape.lanes))
        self.free_pages = list(range(shape.pages))
        self.free_slots = list(range(shape.lanes, shape.lanes + shape.slots))  # places after those of the lanes
        self.prompts: dict[int, PromptRow] = {}
        self.assigned: list[Sample] = []  # samples to seat on this shard, in order
        self.running: dict[int, Sample] = {}  # samples in lanes, by lane
        self.vacated: list[int] = []  # lanes without a sample that the device may still decode
        self.reserved: int | None = None  # number of pages from Scheduler._reserve; None if they must be counted again

    def take(self, count: int) -> list[int]:
        """Takes the lowest free pages, so that pages in use stay close together."""
        return [heapq.heappop(self.free_pages) for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        for page in pages:
            heapq.heappush(self.free_pages, page)


class Scheduler:
    """Assigns lanes and pages to samples; moves pages to the host and back when the pool is full.

    A caller adds samples. Then it repeatedly calls `plan()`, carries the plan out and calls `advance()`. When results
    arrive it calls `finish`, `pause` and `resume`.
    """

    def __init__(self, shape: PoolShape):
        self.shape = shape
        self.samples: dict[int, Sample] = {}
        self._shards = [_Shard(i, shape) for i in range(shape.shards)]
        # Groups of samples that have no shard yet. The group to seat first is the last one, where `pop` takes it.
        self._pieces: list[list[Sample]] = []
        self._sorted = True
        self._seat_count = 0
        self._plans = 0
        self._lengths: dict[int, list[int]] = {}  # numbers of new tokens of finished samples, by prompt

    # Methods by which the caller reports changes.

    def add(
        self,
        prompt: int,
        length: int,
        samples: Sequence[tuple[int, int, float | None]],
        pieces: int = 1,
        *,
        urgent: bool = False,
        joins: bool = False,
    ) -> None:
        """Queues the samples of one prompt.

        Args:
          prompt: handle of the prompt. Samples that are added later may have the same prompt, and then share its pages
            on each shard. If all earlier samples of the prompt on a shard have ended, the pages there are gone, and the
            prompt is prefilled again.
          length: number of tokens of the prompt.
          samples: (handle, largest number of new tokens, expected number of new tokens or None) of each sample.
          pieces: number of groups to cut the samples into; groups may run on different shards.
          urgent: True if these samples get lanes before samples that are not urgent.
          joins: True if these samples prefer a shard with the prompt's pages to the shard with the most free lanes.
        """
        how = (urgent, joins)
        new = [
            Sample(
                handle, prompt, length, max_new, expected, max_new, length - 1, TokenStore(("sample", handle, 0)), *how
            )
            for handle, max_new, expected in samples
        ]
        self.samples.update((s.id, s) for s in new)
        size = -(-len(new) // pieces)
        self._pieces.extend(new[i : i + size] for i in range(0, len(new), size))
        self._sorted = False

    def finish(self, handle: int, *, grown: int, live: bool) -> list[tuple[TokenStore, int, list[int]]]:
        """Frees the lane and pages of a sample that has ended, and the prompt's pages after its last sample on a shard.

        Args:
          handle: handle of the sample.
          grown: number of new tokens that the sample ended with.
          live: True if the device may still decode the sample's lane, which must then be freed by a plan.

        Returns:
          (store, shard, indices of the store's pages on the device) of each store that was freed.
        """
        sample = self.samples.pop(handle)
        if sample.status is Status.WAITING:  # rare: a cancelled sample may end before it has a shard
            piece = next((piece for piece in self._pieces if any(s is sample for s in piece)), None)
            if piece is not None:  # the sample has no shard yet, so it holds no pages
                piece[:] = [s for s in piece if s is not sample]
                self._pieces = [piece for piece in self._pieces if piece]
                sample.status = Status.DONE
                return []
        self._lengths.setdefault(sample.prompt, []).append(grown)
        self._vacate(sample, live)
        if sample in self._shards[sample.shard].assigned:
            self._shards[sample.shard].assigned.remove(sample)
        sample.status = Status.DONE
        shard = self._shards[sample.shard]
        dropped = [sample.store]
        row = shard.prompts[sample.prompt]
        row.users -= 1
        if row.users == 0:
            dropped.append(row.store)
            del shard.prompts[sample.prompt]
        freed = []
        for store in dropped:
            pages = [] if store.spilled else [s.index for s in store.pages]
            shard.give(pages)
            self._give_slot(shard, store)
            store.pages = []
            freed.append((store, shard.index, pages))
        return freed

    def stores(self, handle: int) -> list[tuple[TokenStore, int]]:
        """Lists the stores that hold a sample's tokens, each with its shard.

        The first is the store of the prompt, which the prompt's other samples share; the second is the sample's own.
        The list is empty as long as the sample has no shard.
        """
        sample = self.samples[handle]
        if sample.shard < 0:
            return []
        row = self._shards[sample.shard].prompts[sample.prompt]
        return [(row.store, sample.shard), (sample.store, sample.shard)]

    def stop(self) -> DispatchPlan:
        """Drops all samples; returns a plan that frees the lanes in which the device would go on decoding."""
        plan = DispatchPlan()
        for sample in self.samples.values():
            self._vacate(sample, live=True)
        for shard in self._shards:
            plan.frees.extend((shard.index, lane) for lane in shard.vacated)
            shard.vacated = []
        self.samples.clear()
        return plan

    def pause(self, handle: int, *, position: int) -> list[TokenStore]:
        """Takes a sample out of its lane until `resume`; keeps the cache of its tokens before `position`.

        In models with linear attention (`PoolShape.slots`) no cache is kept, and all tokens are fed again, because a
        memory cannot be cut back to an earlier position. Which tokens are fed again must depend on the sample alone and
        not on its neighbours, because feeding a token again changes the last bits of all logits after it.

        Returns:
          A list with the sample's store if the store's copy on the host is now useless; else an empty list.
        """
        sample = self.samples[handle]
        self._vacate(sample, live=True)
        shard = self._shards[sample.shard]
        if sample in shard.assigned:
            shard.assigned.remove(sample)
        sample.status, sample.position, kept = Status.PAUSED, position, position
        if self.shape.slots:
            sample.unfed, kept = position - (sample.length - 1), 0
        for page in sample.store.pages:
            page.count = min(page.count, max(0, kept - page.start))
        if not sample.store.spilled:
            shard.give([s.index for s in sample.store.pages if s.count == 0])
        sample.store.pages = [s for s in sample.store.pages if s.count > 0]
        if not (self.shape.slots and sample.store.spilled):
            return []
        sample.store.spilled = False
        return [sample.store]

    def fork(self, handle: int, source: int, *, position: int) -> tuple[TokenStore, TokenStore, int]:
        """Adds a paused sample with the prompt of the sample `source` and with its tokens before `position`.

        The new sample's store counts as spilled: the caller copies the first pages of the source's store to the host,
        under the new store's name. Not for models with linear attention, whose memories cannot be cut back.

        Args:
          handle: handle of the new sample.
          source: handle of the sample to copy from.
          position: position of the token that the new sample feeds next: one less than the number of its tokens, prompt
            included.

        Returns:
          The new store, whose pages have the indices of the source's pages; the source's store; their shard.
        """
        of = self.samples[source]
        shared = [page for page in of.store.pages if page.start < position]
        pages = [Page(page.index, page.start, min(page.count, position - page.start)) for page in shared]
        store = TokenStore(("sample", handle, 0), pages, spilled=True)
        self.samples[handle] = Sample(
            id=handle,
            prompt=of.prompt,
            length=of.length,
            max_new=of.max_new,
            expected=of.expected,
            left=of.left,
            position=position,
            store=store,
            shard=of.shard,
            status=Status.PAUSED,
            grown=of.grown,
        )
        self._shards[of.shard].prompts[of.prompt].users += 1
        return store, of.store, of.shard

    def give(self, handle: int, tokens: int) -> None:
        """Records that tokens were appended to a sample without a lane; they are fed before the sample draws more."""
        sample = self.samples[handle]
        sample.unfed += tokens
        sample.position += tokens

    def resume(self, handle: int, *, left: int) -> None:
        """Queues a paused sample before samples that have no tokens yet; it may sample at most `left` more tokens."""
        sample = self.samples[handle]
        assert sample.status is Status.PAUSED, sample
        sample.status, sample.left = Status.WAITING, left
        sample.compact = self._room(sample, compact=False) < left
        assert self._room(sample, compact=sample.compact) >= left, (
            "the cache has no room for the tokens that the sample may still get"
        )
        assigned = self._shards[sample.shard].assigned
        assigned.insert(sum(s.grown > 0 for s in assigned), sample)

    def _fit(self, sample: Sample, *, compact: bool) -> _Fit:
        """Counts the pages that a sample's appended tokens need when they are fed after the sample's last page.

        With `compact` they are fed after the sample's first page that is not full. The tokens of all later pages are
        then fed again, too.
        """
        C, counts = self.shape.page_tokens, [page.count for page in sample.store.pages]
        keep = next((j + 1 for j, count in enumerate(counts) if count < C), len(counts)) if compact else len(counts)
        tokens = sum(counts[keep:]) + sample.unfed
        # Place at which the tokens end, counted from the first place of the last page that stays. If no page stays, the
        # count begins with an imaginary full page.
        end = tokens + (counts[keep - 1] if keep else C)
        return _Fit(keep, tokens, -(-end // C) - 1, -end % C)

    def _room(self, sample: Sample, *, compact: bool) -> int:
        """Counts the tokens that the sample can draw after its appended tokens in the pages that it may hold."""
        fit = self._fit(sample, compact=compact)
        left = self.shape.sample_pages - self._prompt_pages(sample) - fit.keep - fit.new
        return left * self.shape.page_tokens + fit.rest // self.shape.steps * self.shape.steps

    @property
    def busy(self) -> bool:
        """Returns True while any sample waits for a lane or runs."""
        return any(s.status in (Status.WAITING, Status.RUNNING) for s in self.samples.values())

    @property
    def crowded(self) -> bool:
        """Returns True while any sample waits for a lane."""
        return bool(self._pieces) or any(shard.assigned for shard in self._shards)

    def free_counts(self) -> tuple[int, int]:
        """Returns (free lanes, free pages), counted over all shards."""
        return sum(len(s.free_lanes) for s in self._shards), sum(len(s.free_pages) for s in self._shards)

    # Planning.

    def plan(self) -> DispatchPlan:
        """Plans the next dispatch.

        Running samples get pages first. Then waiting samples get free lanes. Finally, further prompts are prefilled
        ahead, in rows of prefill calls that would otherwise be empty.
        """
        plan = DispatchPlan()
        self._plans += 1
        if not self._sorted:
            self._pieces.sort(key=lambda piece: (piece[0].urgent, max(map(self._expected, piece)), -piece[0].id))
            self._sorted = True
        for shard in self._shards:
            self._grow(shard, plan)
            shard.reserved = None
        while self._admit_one(plan):
            pass
        self._fill_calls(plan)
        for shard in self._shards:
            taken = {sample.lane for sample in plan.seats if sample.shard == shard.index}
            plan.frees.extend((shard.index, lane) for lane in shard.vacated if lane not in taken)
            shard.vacated = []
            alive = [(s, shard.index, lane) for lane, s in sorted(shard.running.items()) if s.left > 0]
            plan.running.extend(alive)
        return plan

    def advance(self) -> None:
        """Advances every running sample by all steps of the dispatch just launched."""
        for shard in self._shards:
            for sample in shard.running.values():
                if sample.left > 0:
                    sample.store.pages[-1].count += self.shape.steps
                    sample.position += self.shape.steps
                    sample.grown += self.shape.steps
                    sample.left -= self.shape.steps

    def _grow(self, shard: _Shard, plan: DispatchPlan) -> None:
        """Gives a page to every running sample whose last page is full; the sample seated first is served first."""
        for sample in sorted(shard.running.values(), key=lambda s: s.seated):
            if sample.status is Status.RUNNING and sample.left > 0 and self._full(sample):
                while not shard.free_pages:
                    if not self._spill_one(shard, plan):
                        break
                    if sample.status is not Status.RUNNING:
                        break
                if sample.status is Status.RUNNING:
                    assert shard.free_pages, "a single sample must fit the pool: checked at submission"
                    self._open_page(shard, sample)

    def _full(self, sample: Sample) -> bool:
        pages = sample.store.pages
        return not pages or pages[-1].count + self.shape.steps > self.shape.page_tokens

    def _open_page(self, shard: _Shard, sample: Sample) -> None:
        sample.store.pages.append(Page(shard.take(1)[0], sample.position, 0))

    def _spill_one(self, shard: _Shard, plan: DispatchPlan) -> bool:
        """Moves one store to the host: an idle store, else the store of the sample seated last, which loses its lane.

        Returns False if there is no sample or store to move.
        """
        idle = self._idle_stores(shard)
        if idle:
            self._spill(shard, idle[0], plan)
            return True
        if not shard.running:
            return False
        youngest = max(shard.running.values(), key=lambda s: s.seated)
        self._vacate(youngest, live=True)
        youngest.status, youngest.spilled_at = Status.WAITING, self._plans
        shard.assigned.insert(0, youngest)
        if youngest.store.pages:
            self._spill(shard, youngest.store, plan)
        return True

    def _idle_stores(self, shard: _Shard) -> list[TokenStore]:
        """Lists the stores on the device that no running sample reads, in the order in which they are spilled.

        Stores of paused samples come first, then stores of waiting samples, then stores of prompts.
        """
        return [
            *self._resting(shard, Status.PAUSED),
            *self._resting(shard, Status.WAITING),
            *self._idle_prompts(shard),
        ]

    def _idle_prompts(self, shard: _Shard) -> list[TokenStore]:
        used = {s.prompt for s in shard.running.values()}
        prompts = [row.store for prompt, row in shard.prompts.items() if prompt not in used]
        return [store for store in prompts if store.pages and not store.spilled]

    def _resting(self, shard: _Shard, status: Status) -> list[TokenStore]:
        stores = [s.store for s in self.samples.values() if s.shard == shard.index and s.status is status]
        return [store for store in stores if store.pages and not store.spilled]

    def _spill(self, shard: _Shard, store: TokenStore, plan: DispatchPlan) -> None:
        pages = [s.index for s in store.pages]
        plan.spills.append(StoreMove(store, shard.index, pages, store.place))
        shard.give(pages)
        self._give_slot(shard, store)
        store.spilled = True

    def _take_slot(self, shard: _Shard, store: TokenStore) -> None:
        """Gives a prompt a slot for its memory; a prompt without tokens to prefill gets the place `nowhere`."""
        if self.shape.slots:
            nowhere = self.shape.lanes + self.shape.slots
            store.place = heapq.heappop(shard.free_slots) if store.pages else nowhere

    def _give_slot(self, shard: _Shard, store: TokenStore) -> None:
        if self.shape.lanes <= store.place < self.shape.lanes + self.shape.slots:
            heapq.heappush(shard.free_slots, store.place)
        store.place = -1

    def _lacks_slot(self, shard: _Shard, sample: Sample) -> bool:
        """Returns True if the sample's prompt needs a slot and none is free."""
        row = shard.prompts.get(sample.prompt)
        needs = (row is None or not row.filled or row.store.spilled) and self._prompt_pages(sample) > 0
        return bool(self.shape.slots) and needs and not shard.free_slots

    def _restore(self, shard: _Shard, store: TokenStore) -> list[int]:
        new = shard.take(len(store.pages))
        for page, index in zip(store.pages, new, strict=True):
            page.index = index
        store.spilled = False
        return new

    def _admit_one(self, plan: DispatchPlan) -> bool:
        """Puts one waiting sample into a lane; returns False if no waiting sample fits.

        Shards with more free lanes are tried first. If the next group `joins`, shards with its prompt go before them.
        """
        joined = self._pieces[-1][0].prompt if self._pieces and self._pieces[-1][0].joins else None
        for shard in sorted(self._shards, key=lambda s: (joined not in s.prompts, -len(s.free_lanes), s.index)):
            if not shard.free_lanes:
                continue
            if self._pieces and self._goes_before(shard) and self._make_room(shard, self._pieces[-1][0], plan):
                self._assign(shard, self._pieces.pop())
            # This plan does not seat a sample that it spilled, because the sample's tokens in flight are not read yet.
            ready = bool(shard.assigned) and shard.assigned[0].spilled_at < self._plans
            if ready and self._make_room(shard, shard.assigned[0], plan):
                self._seat(shard, shard.assigned.pop(0), plan)
                return True
        return False

    def _goes_before(self, shard: _Shard) -> bool:
        """Returns True if the next group of samples goes before the shard's assigned samples.

        This is the case if no sample is assigned, or if the group is urgent and the first assigned sample is neither
        urgent nor begun.
        """
        first = shard.assigned[0] if shard.assigned else None
        return first is None or (self._pieces[-1][0].urgent and not first.urgent and not first.grown)

    def _fill_calls(self, plan: DispatchPlan) -> None:
        """Prefills the next prompts ahead, in the rows that the plan's prefill calls would leave empty."""
        longest = [tokens for tokens, _ in self.shape.calls]
        used = [collections.Counter[int]() for _ in longest]  # number of used rows, by call and shard
        for fill in plan.prefills if longest else ():
            tokens = sum(page.count for page in self._shards[fill.shard].prompts[fill.prompt].store.pages)
            used[min(bisect.bisect_left(longest, tokens), len(longest) - 1)][fill.shard] += 1
        while self._pieces:
            sample = self._pieces[-1][0]
            if (call := bisect.bisect_left(longest, sample.length - 1)) == len(longest):
                return  # the prompt is longer than a chunk of any call
            rows, taken = self.shape.calls[call][1], used[call]
            room = -(-max(taken.values(), default=0) // rows) * rows
            fit = [s for s in self._shards if taken[s.index] < room and sample.prompt not in s.prompts]
            most = _AHEAD * max(self.shape.lanes, rows)
            fit = [s for s in fit if len(s.assigned) < most and self._short(s, sample) <= 0]
            fit = [s for s in fit if not self._lacks_slot(s, sample)]
            if not fit:
                return
            shard = min(fit, key=lambda s: (len(s.assigned), s.index))
            self._assign(shard, self._pieces.pop())
            self._fill(shard, sample, plan)
            taken[shard.index] += 1

    def _make_room(self, shard: _Shard, sample: Sample, plan: DispatchPlan) -> bool:
        """Spills idle stores until the sample fits the shard, which has a free lane; returns False if it cannot fit."""
        if self._short(shard, sample) > 0 and not self._make_pages(shard, sample, plan):
            return False
        # There are at least as many slots as lanes. A lane is free, so at least one slot belongs to a prompt without
        # running samples, and spilling this prompt frees the slot.
        if self._lacks_slot(shard, sample):
            self._spill(shard, self._idle_prompts(shard)[0], plan)
        return True

    def _make_pages(self, shard: _Shard, sample: Sample, plan: DispatchPlan) -> bool:
        """Spills idle stores until there are pages for the sample.

        While samples run, only stores of paused samples are spilled. Returns False, and spills nothing, if spilling
        would not free enough pages.
        """
        needed = [sample.store]
        if sample.prompt in shard.prompts:
            needed.append(shard.prompts[sample.prompt].store)
        idle = self._resting(shard, Status.PAUSED) if shard.running else self._idle_stores(shard)
        idle = [store for store in idle if store not in needed]
        if self._short(shard, sample) > sum(len(store.pages) for store in idle):
            return False
        while self._short(shard, sample) > 0:
            self._spill(shard, idle.pop(0), plan)
        return True

    def _assign(self, shard: _Shard, piece: list[Sample]) -> None:
        for sample in piece:
            sample.shard = shard.index
            key = ("prompt", sample.prompt, shard.index)
            row = shard.prompts.setdefault(sample.prompt, PromptRow(TokenStore(key)))
            row.users += 1
        at = sum(s.grown > 0 or s.urgent for s in shard.assigned) if piece[0].urgent else len(shard.assigned)
        shard.assigned[at:at] = sorted(piece, key=lambda s: (-self._expected(s), s.id))

    def _expected(self, sample: Sample) -> float:
        """Estimates how many new tokens a sample will have when it ends.

        The estimate is the caller's, or else the mean of the prompt's finished samples, or else half of `max_new`. It
        exceeds the sample's present number of tokens by at least one dispatch, and is at most `max_new`.
        """
        if sample.expected is not None:
            guess = sample.expected
        elif sample.prompt in self._lengths:
            guess = float(np.mean(self._lengths[sample.prompt]))
        else:
            guess = sample.max_new / 2
        return min(max(guess, sample.grown + self.shape.steps), sample.max_new)

    def _short(self, shard: _Shard, sample: Sample) -> int:
        """Counts how many more free pages are needed to seat this sample and to let its neighbours grow as expected.

        The count is 0 or less if there are enough.
        """
        row = shard.prompts.get(sample.prompt)
        need = self._missing(sample.store) + self._new_pages(sample)
        if row is None or not row.filled:
            need += self._prompt_pages(sample)
        elif row.store.spilled:
            need += len(row.store.pages)
        return need + (self._reserve(shard) if shard.running else 0) - len(shard.free_pages)

    def _new_pages(self, sample: Sample) -> int:
        """Counts the pages that seating a sample takes, besides the pages it has."""
        if not sample.unfed and not sample.compact:
            return 1 if self._full(sample) else 0
        fit = self._fit(sample, compact=sample.compact)
        return max(fit.keep + fit.new + (fit.rest < self.shape.steps) - len(sample.store.pages), 0)

    def _reserve(self, shard: _Shard) -> int:
        """Counts the pages that running samples are expected to need, besides the pages they have."""
        if shard.reserved is None:
            shard.reserved = sum(self._yet_to_open(sample) for sample in shard.running.values())
        return shard.reserved

    def _yet_to_open(self, sample: Sample) -> int:
        return max(0, -(-math.ceil(self._expected(sample)) // self.shape.page_tokens) - len(sample.store.pages))

    def _missing(self, store: TokenStore) -> int:
        return len(store.pages) if store.spilled else 0

    def _prompt_pages(self, sample: Sample) -> int:
        # A prompt's last token is not prefilled: each sample feeds it in its own lane.
        return -(-(sample.length - 1) // self.shape.page_tokens)

    def _seat(self, shard: _Shard, sample: Sample, plan: DispatchPlan) -> None:
        row = shard.prompts[sample.prompt]
        sample.lane = shard.free_lanes.pop(0)
        sample.store.place = sample.lane
        self._fill(shard, sample, plan)
        for store in (row.store, sample.store):
            if store.spilled:
                if store is row.store:
                    self._take_slot(shard, store)
                plan.restores.append(StoreMove(store, shard.index, self._restore(shard, store), store.place))
        if sample.unfed or sample.compact:
            plan.feeds.append(self._feed(shard, sample))
        elif self.shape.slots and not sample.store.pages:
            plan.copies.append((shard.index, row.store.place, sample.lane))
        if self._full(sample):
            self._open_page(shard, sample)
        sample.status, sample.seated = Status.RUNNING, self._seat_count
        self._seat_count += 1
        shard.running[sample.lane] = sample
        if shard.reserved is not None:
            shard.reserved += self._yet_to_open(sample)
        plan.seats.append(sample)

    def _fill(self, shard: _Shard, sample: Sample, plan: DispatchPlan) -> None:
        """Gives pages to a sample's prompt and plans its prefill, unless the prompt is prefilled already."""
        row = shard.prompts[sample.prompt]
        if row.filled:
            return
        C = self.shape.page_tokens
        new = shard.take(self._prompt_pages(sample))
        row.store.pages = [Page(index, j * C, min(C, sample.length - 1 - j * C)) for j, index in enumerate(new)]
        row.filled = True
        self._take_slot(shard, row.store)
        if new:
            plan.prefills.append(Fill(sample.prompt, shard.index, new, row.store.place))

    def _feed(self, shard: _Shard, sample: Sample) -> Feed:
        """Finds places for a sample's appended tokens: the free places of the last page that stays, then new pages."""
        C, pages = self.shape.page_tokens, sample.store.pages
        fit = self._fit(sample, compact=sample.compact)
        shard.give([page.index for page in pages[fit.keep :]])
        del pages[fit.keep :]
        last = [page for page in pages[-1:] if page.count < C]
        full = pages[: len(pages) - len(last)]
        row = shard.prompts[sample.prompt]
        prior = [(page.index, page.start, page.count) for page in (*row.store.pages, *full)]
        start, offset = sample.position - fit.tokens, sum(page.count for page in last)
        new = [Page(index, start - offset + (len(last) + j) * C, C) for j, index in enumerate(shard.take(fit.new))]
        pages.extend(new)
        targets = [*last, *new]
        for page in targets:
            page.count = min(C, sample.position - page.start)
        sample.unfed, sample.compact = 0, False
        return Feed(sample, start, prior, [page.index for page in targets], offset, row.store.place)

    def _vacate(self, sample: Sample, live: bool) -> None:
        if sample.lane < 0:
            return
        shard = self._shards[sample.shard]
        del shard.running[sample.lane]
        heapq.heappush(shard.free_lanes, sample.lane)
        if live:
            shard.vacated.append(sample.lane)
        sample.lane = -1

    # The read list of the device.

    def reads(self, shape: ReadShape, trash: int) -> np.ndarray:
        """Builds the planned dispatch's `ReadList` of every shard, flat: int32 (X, shape.size).

        Args:
          shape: sizes of a shard's read list.
          trash: index of the page that lanes without a sample write to; its content is never used.
        """
        flat_XI = np.zeros((self.shape.shards, shape.size), np.int32)
        for shard in self._shards:
            seated = {
                lane: LaneReads(s.prompt, shard.prompts[s.prompt].store.pages, s.store.pages)
                for lane, s in sorted(shard.running.items())
                if s.left > 0
            }
            shape.fill(flat_XI[shard.index], seated, trash)
        return flat_XI
