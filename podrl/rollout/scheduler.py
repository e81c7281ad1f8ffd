"""Which sample sits in which lane with which segments: policy on the host, without jax.

Samples of a prompt are kept on one data-parallel shard, where the prompt's segments are read by all of them. Lanes and
segments change only between dispatches. The scheduler plans a dispatch before the results of the last one are known: it
takes every lane to be live until told otherwise, which costs idle steps, never correctness.
"""

import dataclasses
import enum
import heapq
from collections.abc import Sequence

import numpy as np

from podrl.rollout.visits import Seated, Segment, VisitShape


class Status(enum.Enum):
    """Where a sample is: waiting for a lane, in one, paused by its caller (without a lane), or ended."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


@dataclasses.dataclass(eq=False)
class Store:
    """Keys and values of a prompt or of a sample's own tokens; `spilled` while they are on the host."""

    key: tuple[str, int, int]
    segments: list[Segment] = dataclasses.field(default_factory=list)
    spilled: bool = False


@dataclasses.dataclass
class PromptRow:
    """A prompt on one shard: its store, and how many unfinished samples are assigned there."""

    store: Store
    users: int = 0
    filled: bool = False


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample as the scheduler sees it.

    Attributes:
      prompt: handle of its prompt; `length` are the prompt's tokens.
      left: tokens it may still sample, counted down by whole dispatches while it runs.
      position: position of the token it feeds next.
      grown: tokens sampled so far, at most.
      sealed: the last segment takes no more tokens (it was cut or filled by given tokens).
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
    shard: int = -1
    lane: int = -1
    status: Status = Status.WAITING
    grown: int = 0
    sealed: bool = True
    seated: int = -1
    spilled_at: int = -1


@dataclasses.dataclass
class Plan:
    """What to do on the device before and in the next dispatch, in the order of the fields.

    Attributes:
      spills: stores to copy to the host, with the segments that hold them; these may be overwritten afterwards.
      restores: stores to copy back, with their new segments.
      prefills: prompts to prefill on a shard, with the segments that take them.
      frees: lanes to stop.
      seats: samples to seat; shard and lane are in the sample.
      running: (sample, shard, lane) of every lane in the dispatch; empty when there is nothing to run.
    """

    spills: list[tuple[Store, int, list[int]]] = dataclasses.field(default_factory=list)
    restores: list[tuple[Store, int, list[int]]] = dataclasses.field(default_factory=list)
    prefills: list[tuple[int, int, list[int]]] = dataclasses.field(default_factory=list)
    frees: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    seats: list[Sample] = dataclasses.field(default_factory=list)
    running: list[tuple[Sample, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Room:
    """Segments for given tokens of a sample: what to spill and restore first, what it holds already
    as (segment, start, count), and the new segments."""

    spills: list[tuple[Store, int, list[int]]]
    restores: list[tuple[Store, int, list[int]]]
    shard: int
    prior: list[tuple[int, int, int]]
    targets: list[int]


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Sizes the scheduler works with: shards, and per shard lanes, usable segments, tokens per segment and dispatch."""

    shards: int
    lanes: int
    segments: int
    segment_tokens: int
    steps: int
    members: int


class _Shard:
    """Lanes, free segments, resident prompts and assigned samples of one data-parallel shard."""

    def __init__(self, index: int, shape: PoolShape):
        self.index = index
        self.free_lanes = list(range(shape.lanes))
        self.free_segments = list(range(shape.segments))
        self.prompts: dict[int, PromptRow] = {}
        self.assigned: list[Sample] = []  # to be seated here, in order
        self.running: dict[int, Sample] = {}  # by lane
        self.vacated: list[int] = []  # lanes the device may still take for live

    def take(self, count: int) -> list[int]:
        """The lowest free segments: live ones stay close together."""
        return [heapq.heappop(self.free_segments) for _ in range(count)]

    def give(self, segments: Sequence[int]) -> None:
        for segment in segments:
            heapq.heappush(self.free_segments, segment)


class Scheduler:
    """Seats samples, grows them, spills and restores them.

    A caller adds samples, then repeats: `plan()`, carry it out, `advance()`, and as results arrive `finish`, `pause`
    and `resume`.
    """

    def __init__(self, shape: PoolShape):
        self.shape = shape
        self.samples: dict[int, Sample] = {}
        self._shards = [_Shard(i, shape) for i in range(shape.shards)]
        self._pieces: list[list[Sample]] = []  # not yet on a shard, the one to seat first last
        self._sorted = True
        self._seat_count = 0
        self._plans = 0
        self._lengths: dict[int, list[int]] = {}  # by prompt: lengths of finished samples

    # What the caller reports.

    def add(self, prompt: int, length: int, samples: Sequence[tuple[int, int, float | None]], pieces: int = 1) -> None:
        """Queues samples of one prompt.

        Args:
          prompt: handle of the prompt, new.
          length: its tokens.
          samples: (handle, most new tokens, expected new tokens or None) of each.
          pieces: into how many groups, which may sit on different shards, to cut them.
        """
        made = [
            Sample(handle, prompt, length, max_new, expected, max_new, length - 1, Store(("sample", handle, 0)))
            for handle, max_new, expected in samples
        ]
        self.samples.update((s.id, s) for s in made)
        size = -(-len(made) // pieces)
        self._pieces.extend(made[i : i + size] for i in range(0, len(made), size))
        self._sorted = False

    def finish(self, handle: int, *, grown: int, live: bool) -> list[Store]:
        """A sample has ended with `grown` new tokens; `live`: the device may not know. Returns stores given up."""
        sample = self.samples.pop(handle)
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
        for store in dropped:
            if not store.spilled:
                shard.give([s.index for s in store.segments])
            store.segments = []
        return dropped

    def pause(self, handle: int, *, position: int) -> None:
        """A sample stops for its caller; of its tokens those before `position` have been fed and count."""
        sample = self.samples[handle]
        self._vacate(sample, live=True)
        shard = self._shards[sample.shard]
        if sample in shard.assigned:
            shard.assigned.remove(sample)
        sample.status, sample.position, sample.sealed = Status.PAUSED, position, True
        for segment in sample.store.segments:
            segment.count = min(segment.count, max(0, position - segment.start))
        if not sample.store.spilled:
            shard.give([s.index for s in sample.store.segments if s.count == 0])
        sample.store.segments = [s for s in sample.store.segments if s.count > 0]

    def resume(self, handle: int, *, left: int) -> None:
        """A paused sample may run again, after at most `left` more tokens it ends."""
        sample = self.samples[handle]
        assert sample.status is Status.PAUSED, sample
        sample.status, sample.left = Status.WAITING, left
        self._shards[sample.shard].assigned.insert(0, sample)

    def extend(self, handle: int, tokens: int) -> "Room | None":
        """Room for `tokens` given tokens of a paused sample; None while running samples hold the segments it needs."""
        sample = self.samples[handle]
        shard, C = self._shards[sample.shard], self.shape.segment_tokens
        row = shard.prompts[sample.prompt]
        count = -(-tokens // C)
        needed = [row.store, sample.store]
        plan = Plan()
        while len(shard.free_segments) < count + sum(self._missing(s) for s in needed):
            idle = [s for s in self._idle_stores(shard) if s not in needed]
            if not idle:
                return None
            self._spill(shard, idle[0], plan)
        restores = [(store, shard.index, self._restore(shard, store)) for store in needed if store.spilled]
        prior = [(s.index, s.start, s.count) for s in (*row.store.segments, *sample.store.segments)]
        new = shard.take(count)
        for j, index in enumerate(new):
            sample.store.segments.append(Segment(index, sample.position + j * C, min(C, tokens - j * C)))
        sample.position += tokens
        return Room(plan.spills, restores, shard.index, prior, new)

    def held(self, handle: int) -> int:
        """Segments a sample and its prompt hold."""
        sample = self.samples[handle]
        row = self._shards[sample.shard].prompts[sample.prompt]
        return len(sample.store.segments) + len(row.store.segments)

    @property
    def busy(self) -> bool:
        """Whether any sample waits for a lane or runs."""
        return any(s.status in (Status.WAITING, Status.RUNNING) for s in self.samples.values())

    def free_counts(self) -> tuple[int, int]:
        """(free lanes, free segments) over all shards."""
        return sum(len(s.free_lanes) for s in self._shards), sum(len(s.free_segments) for s in self._shards)

    # Planning.

    def plan(self) -> Plan:
        """The next dispatch: room for what runs, then restored and new samples in the lanes left."""
        plan = Plan()
        self._plans += 1
        if not self._sorted:
            self._pieces.sort(key=lambda piece: (self._expected(piece[0]), -piece[0].id))
            self._sorted = True
        for shard in self._shards:
            self._grow(shard, plan)
        while self._admit_one(plan):
            pass
        for shard in self._shards:
            taken = {sample.lane for sample in plan.seats if sample.shard == shard.index}
            plan.frees.extend((shard.index, lane) for lane in shard.vacated if lane not in taken)
            shard.vacated = []
            alive = [(s, shard.index, lane) for lane, s in sorted(shard.running.items()) if s.left > 0]
            plan.running.extend(alive)
        return plan

    def advance(self) -> None:
        """The planned dispatch was launched: every running sample is taken to have used all its steps."""
        for shard in self._shards:
            for sample in shard.running.values():
                if sample.left > 0:
                    sample.store.segments[-1].count += self.shape.steps
                    sample.position += self.shape.steps
                    sample.grown += self.shape.steps
                    sample.left -= self.shape.steps

    def _grow(self, shard: _Shard, plan: Plan) -> None:
        """A segment for every running sample whose last one is full, oldest sample first."""
        for sample in sorted(shard.running.values(), key=lambda s: s.seated):
            if sample.status is Status.RUNNING and sample.left > 0 and self._full(sample):
                while not shard.free_segments:
                    if not self._spill_one(shard, plan):
                        break
                    if sample.status is not Status.RUNNING:
                        break
                if sample.status is Status.RUNNING:
                    assert shard.free_segments, "a single sample must fit the pool: checked at submission"
                    self._open_segment(shard, sample)

    def _full(self, sample: Sample) -> bool:
        segments = sample.store.segments
        return sample.sealed or not segments or segments[-1].count >= self.shape.segment_tokens

    def _open_segment(self, shard: _Shard, sample: Sample) -> None:
        sample.store.segments.append(Segment(shard.take(1)[0], sample.position, 0))
        sample.sealed = False

    def _spill_one(self, shard: _Shard, plan: Plan) -> bool:
        """Moves the store needed last to the host: paused samples, idle prompts, then the youngest sample."""
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
        if youngest.store.segments:
            self._spill(shard, youngest.store, plan)
        return True

    def _idle_stores(self, shard: _Shard) -> list[Store]:
        """Stores on the device that no running sample reads: of paused or waiting samples, then of prompts."""
        used = {s.prompt for s in shard.running.values()}
        stores = [s.store for s in self.samples.values() if s.shard == shard.index and s.status is not Status.RUNNING]
        stores += [row.store for prompt, row in shard.prompts.items() if prompt not in used]
        return [store for store in stores if store.segments and not store.spilled]

    def _spill(self, shard: _Shard, store: Store, plan: Plan) -> None:
        held = [s.index for s in store.segments]
        plan.spills.append((store, shard.index, held))
        shard.give(held)
        store.spilled = True

    def _restore(self, shard: _Shard, store: Store) -> list[int]:
        new = shard.take(len(store.segments))
        for segment, index in zip(store.segments, new, strict=True):
            segment.index = index
        store.spilled = False
        return new

    def _admit_one(self, plan: Plan) -> bool:
        """Seats one sample on the shard with most free lanes that can take one."""
        for shard in sorted(self._shards, key=lambda s: (-len(s.free_lanes), s.index)):
            if not shard.free_lanes:
                continue
            if not shard.assigned and self._pieces and self._fits(shard, self._pieces[-1][0]):
                self._assign(shard, self._pieces.pop())
            ready = bool(shard.assigned) and shard.assigned[0].spilled_at < self._plans
            if ready and self._make_room(shard, shard.assigned[0], plan):
                self._seat(shard, shard.assigned.pop(0), plan)
                return True
        return False

    def _make_room(self, shard: _Shard, sample: Sample, plan: Plan) -> bool:
        """Whether the sample fits, if need be (on a shard where nothing runs) after spilling what nobody reads."""
        needed = [sample.store]
        if sample.prompt in shard.prompts:
            needed.append(shard.prompts[sample.prompt].store)
        while not self._fits(shard, sample):
            idle = [s for s in self._idle_stores(shard) if s not in needed]
            if shard.running or not idle:
                return False
            self._spill(shard, idle[0], plan)
        return True

    def _assign(self, shard: _Shard, piece: list[Sample]) -> None:
        for sample in piece:
            sample.shard = shard.index
            key = ("prompt", sample.prompt, shard.index)
            row = shard.prompts.setdefault(sample.prompt, PromptRow(Store(key)))
            row.users += 1
        shard.assigned.extend(sorted(piece, key=lambda s: (-self._expected(s), s.id)))

    def _expected(self, sample: Sample) -> float:
        """New tokens a sample will probably have: the caller's word, its finished siblings, everyone finished."""
        if sample.expected is not None:
            guess = sample.expected
        elif sample.prompt in self._lengths:
            guess = float(np.mean(self._lengths[sample.prompt]))
        else:
            guess = sample.max_new / 2
        return min(max(guess, sample.grown + self.shape.steps), sample.max_new)

    def _fits(self, shard: _Shard, sample: Sample) -> bool:
        """Whether seating the sample leaves the segments its neighbours are expected to need."""
        row = shard.prompts.get(sample.prompt)
        need = self._missing(sample.store) + (1 if self._full(sample) else 0)
        if row is None or not row.filled:
            need += self._prompt_segments(sample)
        elif row.store.spilled:
            need += len(row.store.segments)
        if not shard.running:
            return need <= len(shard.free_segments)
        return need + self._reserve(shard) <= len(shard.free_segments)

    def _reserve(self, shard: _Shard) -> int:
        C = self.shape.segment_tokens
        return sum(
            max(0, -(-int(np.ceil(self._expected(s))) // C) - len(s.store.segments)) for s in shard.running.values()
        )

    def _missing(self, store: Store) -> int:
        return len(store.segments) if store.spilled else 0

    def _prompt_segments(self, sample: Sample) -> int:
        return -(-(sample.length - 1) // self.shape.segment_tokens)

    def _seat(self, shard: _Shard, sample: Sample, plan: Plan) -> None:
        row = shard.prompts[sample.prompt]
        if not row.filled:
            C = self.shape.segment_tokens
            new = shard.take(self._prompt_segments(sample))
            row.store.segments = [
                Segment(index, j * C, min(C, sample.length - 1 - j * C)) for j, index in enumerate(new)
            ]
            row.filled = True
            if new:
                plan.prefills.append((sample.prompt, shard.index, new))
        for store in (row.store, sample.store):
            if store.spilled:
                plan.restores.append((store, shard.index, self._restore(shard, store)))
        if self._full(sample):
            self._open_segment(shard, sample)
        sample.lane = shard.free_lanes.pop(0)
        sample.status, sample.seated = Status.RUNNING, self._seat_count
        self._seat_count += 1
        shard.running[sample.lane] = sample
        plan.seats.append(sample)

    def _vacate(self, sample: Sample, live: bool) -> None:
        if sample.lane < 0:
            return
        shard = self._shards[sample.shard]
        del shard.running[sample.lane]
        heapq.heappush(shard.free_lanes, sample.lane)
        if live:
            shard.vacated.append(sample.lane)
        sample.lane = -1

    # The device's list.

    def visits(self, shape: VisitShape, trash: int) -> np.ndarray:
        """The planned dispatch's `Visits` of every shard, flat int32 (X, shape.size)."""
        flat_XI = np.zeros((self.shape.shards, shape.size), np.int32)
        for shard in self._shards:
            seated = {
                lane: Seated(s.prompt, shard.prompts[s.prompt].store.segments, s.store.segments)
                for lane, s in sorted(shard.running.items())
                if s.left > 0
            }
            shape.fill(flat_XI[shard.index], seated, trash)
        return flat_XI
