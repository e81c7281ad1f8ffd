import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.engine.reads import ReadShape
from podrl.engine.records import PoolShape, Status
from podrl.engine.scheduler import Scheduler

SHAPE = PoolShape(
    shards=2, lanes=3, pages=9, page_tokens=8, steps=4, members=2, sample_pages=9, calls=((8, 3), (16, 2))
)


class Device:
    """Executes plans as the device would, one dispatch late, and checks that no page has two owners."""

    def __init__(self, scheduler: Scheduler, shape: PoolShape, wanted: dict[int, int], prompt: dict[int, int]):
        self.scheduler, self.shape, self.wanted, self.prompt = scheduler, shape, wanted, prompt
        self.made = dict.fromkeys(wanted, 0)
        self.spilled: set = set()
        self.flights: list[list[tuple[int, int]]] = []
        self.epoch: dict[int, int] = {}  # number of pauses by sample
        self.finished: list[int] = []
        self.pauses: dict[int, list[tuple[int, int]]] = {}  # by sample: (tokens made when it pauses, tokens it gets)
        self.paused: list[int] = []
        self.given: dict[int, int] = {}
        self.order: list[int] = []
        self.spills = 0
        self.prefills: list[list[int]] = []  # for each plan with prefills: their number on each shard
        self.memory: dict[tuple, tuple] = {}  # by (shard, place) or store: (sample, position of the next token)

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan.prefills:
            shards = [shard for _, shard, *_ in plan.prefills]
            self.prefills.append([shards.count(shard) for shard in range(self.shape.shards)])
        for store, shard, held, place in plan.spills:
            assert store.key not in self.spilled and held
            self.spilled.add(store.key)
            self.memory[store.key] = self.memory.get((shard, place), ())
            self.spills += 1
        for store, shard, _, place in plan.restores:
            self.spilled.remove(store.key)
            self.memory[shard, place] = self.memory.pop(store.key)
        if self.shape.slots:
            self.remember(plan)
        self.order += [s.id for s in plan.seats if s.grown == 0]
        if plan.running:
            self.check()
            if self.shape.slots:
                for s, shard, lane in plan.running:
                    assert self.memory[shard, lane] == (("sample", s.id), s.position)
                    self.memory[shard, lane] = (("sample", s.id), s.position + self.shape.steps)
            self.scheduler.advance()
            self.flights.append([(s.id, self.epoch.get(s.id, 0)) for s, _, _ in plan.running])
            if len(self.flights) < 2:
                return
        for handle, epoch in self.flights.pop(0) if self.flights else []:
            if handle in self.finished or epoch != self.epoch.get(handle, 0):
                continue
            self.made[handle] += self.shape.steps
            if self.pauses.get(handle) and self.made[handle] >= self.pauses[handle][0][0]:
                self.pause(handle)
            elif self.made[handle] >= self.wanted[handle]:
                self.finished.append(handle)
                for store, *_ in self.scheduler.finish(handle, grown=self.wanted[handle], live=False):
                    self.spilled.discard(store.key)

    def remember(self, plan) -> None:
        """Records whose linear-attention memory each place holds after a plan's prefills, feeds and copies; checks that
        each of these steps reads the memory of its own sample."""
        nowhere = self.shape.lanes + self.shape.slots
        for prompt, shard, _, place in plan.prefills:
            assert self.shape.lanes <= place < nowhere
            self.memory[shard, place] = (("prompt", prompt), 0)
        begins = [(feed.sample, feed.sample.shard, feed.place) for feed in plan.feeds]
        seated = {(s.shard, s.lane): s for s in plan.seats}
        begins += [(seated[shard, lane], shard, place) for shard, place, lane in plan.copies]
        for sample, shard, place in begins:
            whose = (("prompt", sample.prompt), 0)
            assert place == nowhere if sample.length == 1 else self.memory[shard, place] == whose
            self.memory[shard, sample.lane] = (("sample", sample.id), sample.position)
        for feed in plan.feeds:
            assert feed.start == feed.sample.length - 1 and not feed.offset

    def pause(self, handle: int) -> None:
        sample = self.scheduler.samples[handle]
        self.made[handle] = self.pauses[handle][0][0]
        self.paused.append(handle)
        self.epoch[handle] = self.epoch.get(handle, 0) + 1
        position = sample.length - 1 + self.made[handle] + self.given.get(handle, 0)
        for store in self.scheduler.pause(handle, position=position):
            self.spilled.remove(store.key)

    def resume(self, handle: int) -> None:
        self.paused.remove(handle)
        _, given = self.pauses[handle].pop(0)
        self.given[handle] = self.given.get(handle, 0) + given
        self.scheduler.give(handle, given)
        self.scheduler.resume(handle, left=self.wanted[handle] - self.made[handle])

    def check(self) -> None:
        for shard in self.scheduler._shards:
            stores = [row.store for row in shard.prompts.values()]
            stores += [s.store for s in self.scheduler.samples.values() if s.shard == shard.index]
            owned = [seg.index for store in stores if not store.spilled for seg in store.pages]
            everything = owned + shard.free_pages
            assert sorted(everything) == list(range(self.shape.pages))
            slots = [store.place for store in stores if store.place >= self.shape.lanes]
            slots = [place for place in slots if place < self.shape.lanes + self.shape.slots]
            every = range(self.shape.lanes, self.shape.lanes + self.shape.slots)
            assert sorted(slots + shard.free_slots) == list(every)
            lanes = list(shard.running) + shard.free_lanes
            assert sorted(lanes) == list(range(self.shape.lanes))
            for sample in shard.running.values():
                assert not sample.store.spilled
                assert not shard.prompts[sample.prompt].store.spilled
                pages = sample.store.pages
                assert all(page.start + page.count == after.start for page, after in itertools.pairwise(pages))
                assert len(pages) + len(shard.prompts[sample.prompt].store.pages) <= self.shape.sample_pages
                if sample.left > 0:
                    assert sample.store.pages[-1].count <= self.shape.page_tokens - self.shape.steps


def run(scheduler, shape, wanted, prompt) -> Device:
    device = Device(scheduler, shape, wanted, prompt)
    for _ in range(20_000):
        if not scheduler.busy and not device.flights:
            break
        device.step()
    assert sorted(device.finished) == sorted(wanted)
    assert scheduler.free_counts() == (shape.shards * shape.lanes, shape.shards * shape.pages)
    assert not device.spilled
    assert not scheduler.samples
    assert all(len(shard.free_slots) == shape.slots for shard in scheduler._shards)
    return device


@settings(max_examples=50)
@given(data=st.data())
def test_everything_finishes_and_nothing_leaks(data):
    """Schedules random groups of samples of up to the longest length, with far more tokens than the pool holds."""
    shape = dataclasses.replace(SHAPE, slots=data.draw(st.sampled_from([0, SHAPE.lanes])))
    scheduler, wanted, prompt_of = Scheduler(shape), {}, {}
    for _ in range(data.draw(st.integers(1, 8))):
        length, first = data.draw(st.integers(1, 17)), len(wanted)
        samples = []
        for _ in range(data.draw(st.integers(1, 5))):
            handle = len(wanted)
            limit = data.draw(st.integers(1, 48))
            wanted[handle], prompt_of[handle] = data.draw(st.integers(1, limit)), first
            samples.append((handle, limit, None))
        scheduler.add(first, length, samples, pieces=data.draw(st.integers(1, 2)))
    run(scheduler, shape, wanted, prompt_of)


@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_samples_that_pause_and_are_given_tokens_finish_too(data):
    """Samples pause, get tokens and wait at random, with a pool that one long sample fills: all finish, nothing
    leaks."""
    shape = PoolShape(shards=2, lanes=2, pages=12, page_tokens=8, steps=data.draw(st.sampled_from([4, 8])), members=2,
                      sample_pages=12, slots=data.draw(st.sampled_from([0, 2])))  # fmt: skip
    scheduler, wanted, pauses = Scheduler(shape), {}, {}
    for _ in range(data.draw(st.integers(1, 5))):
        length, first, samples = data.draw(st.integers(1, 17)), len(wanted), []
        for _ in range(data.draw(st.integers(1, 4))):
            handle = len(wanted)
            wanted[handle] = data.draw(st.integers(1, 40))
            at = sorted(data.draw(st.sets(st.integers(1, wanted[handle]), max_size=4)) - {wanted[handle]})
            room, pauses[handle] = 64 - wanted[handle], []
            for made in at:
                given = data.draw(st.integers(0, min(room, 20)))
                room -= given
                pauses[handle].append((made, given))
            samples.append((handle, wanted[handle], None))
        scheduler.add(first, length, samples)
    device = Device(scheduler, shape, wanted, dict.fromkeys(wanted, 0))
    device.pauses = pauses
    for _ in range(5_000):
        if not scheduler.busy and not device.flights and not device.paused:
            break
        device.step()
        if device.paused and (data.draw(st.booleans()) or not (scheduler.busy or device.flights)):
            device.resume(data.draw(st.sampled_from(device.paused)))
    assert sorted(device.finished) == sorted(wanted)
    assert scheduler.free_counts() == (4, 24) and not device.spilled


def test_a_thousand_requests_leak_nothing():
    rng = np.random.default_rng(0)
    shape = PoolShape(shards=4, lanes=8, pages=40, page_tokens=8, steps=4, members=4, sample_pages=40)
    scheduler, wanted, prompt_of = Scheduler(shape), {}, {}
    for p in range(250):
        handles = range(4 * p, 4 * p + 4)
        wanted |= {h: min(200, int(rng.geometric(0.02))) for h in handles}
        prompt_of |= dict.fromkeys(handles, 4 * p)
        scheduler.add(4 * p, int(rng.integers(1, 60)), [(h, 200, None) for h in handles])
    device = run(scheduler, shape, wanted, prompt_of)
    assert device.spills > 0


def test_longest_expected_first():
    shape = PoolShape(shards=1, lanes=2, pages=20, page_tokens=8, steps=4, members=2, sample_pages=20)
    scheduler = Scheduler(shape)
    for handle, expected in enumerate([5.0, 30.0, 12.0]):
        scheduler.add(handle, 4, [(handle, 40, expected)])
    device = run(scheduler, shape, {0: 5, 1: 30, 2: 12}, {0: 0, 1: 1, 2: 2})
    assert device.order == [1, 2, 0]


def test_the_youngest_is_spilled_and_its_results_are_awaited():
    shape = PoolShape(shards=1, lanes=2, pages=4, page_tokens=4, steps=4, members=2, sample_pages=4)
    scheduler = Scheduler(shape)
    scheduler.add(0, 1, [(0, 16, 4.0)])
    scheduler.add(1, 1, [(1, 16, 4.0)])
    for _ in range(2):
        assert not scheduler.plan().spills
        scheduler.advance()
    plan = scheduler.plan()  # both samples need a third page, and none is free
    assert [spill.store.key for spill in plan.spills] == [("sample", 1, 0)]
    assert [s.id for s, _, _ in plan.running] == [0]
    assert plan.frees == [(0, 1)]
    assert scheduler.samples[1].status is Status.WAITING
    assert not plan.restores


@pytest.mark.parametrize(("calls", "made"), [((), 24), (((8, 4),), 6)])
def test_rows_of_prefill_calls_are_filled_with_the_prompts_that_come_next(calls, made):
    """Each of two shards with one lane gets 24 prompts with one sample each. A prefill call with rows takes four
    prompts per shard."""
    shape = PoolShape(2, 1, 20, 8, 4, 2, 20, calls)
    scheduler = Scheduler(shape)
    wanted = dict.fromkeys(range(48), 4)
    for p in range(48):
        scheduler.add(p, 9 if p < 47 else 30, [(p, 4, None)])  # the last prompt has several chunks, in calls of its own
    device = run(scheduler, shape, wanted, {})
    assert sum(map(sum, device.prefills)) == 48
    rows = calls[0][1] if calls else 1
    assert sum(-(-max(counts) // rows) for counts in device.prefills) in range(made, made + 2)
    assert device.order == list(range(48))  # in the order of arrival, also if prefilled ahead


@pytest.mark.parametrize("calls", [(), ((16, 8),)])
def test_urgent_samples_do_not_wait_for_those_whose_prompts_were_prefilled_ahead(calls):
    shape = PoolShape(1, 4, 200, 8, 8, 4, 40, calls)
    scheduler, wanted = Scheduler(shape), dict.fromkeys(range(52), 64)
    device = Device(scheduler, shape, wanted, {})
    for p in range(12):
        scheduler.add(4 * p, 9, [(4 * p + i, 64, None) for i in range(4)])
    for _ in range(3):
        device.step()
    ahead = sum(len(shard.assigned) for shard in scheduler._shards)
    assert 4 <= ahead < 20 if calls else not ahead, (
        "with `calls`, between 4 and 19 of the 44 waiting samples are prefilled ahead; without `calls`, none is"
    )
    scheduler.add(48, 9, [(48 + i, 64, None) for i in range(4)], urgent=True)
    while 48 not in device.order:
        device.step()
    assert device.order.index(48) == 4, "the urgent sample begins after the 4 samples that have lanes"


def test_a_prompt_is_not_prefilled_ahead_where_pages_are_short():
    shape = PoolShape(1, 1, 3, 4, 4, 2, 3, ((8, 4),))
    scheduler = Scheduler(shape)
    for p in range(4):
        scheduler.add(p, 5, [(p, 4, None)])
    device = run(scheduler, shape, dict.fromkeys(range(4), 4), {})
    assert not device.spills and device.prefills[0] == [1]


def test_groups_stay_together_and_share_reads():
    shape = PoolShape(shards=2, lanes=4, pages=20, page_tokens=8, steps=4, members=2, sample_pages=20)
    scheduler = Scheduler(shape)
    scheduler.add(0, 20, [(h, 8, None) for h in range(3)])
    scheduler.add(3, 9, [(h, 8, None) for h in range(3, 6)])
    plan = scheduler.plan()
    assert len({s.shard for s in plan.seats if s.prompt == 0}) == 1
    assert {s.shard for s in plan.seats} == {0, 1}
    assert [(prompt, len(new)) for prompt, _, new, _ in plan.prefills] == [(0, 3), (3, 1)]
    read_shape = ReadShape(lanes=4, shared=16, own=20, members=2)
    reads = read_shape.split(scheduler.reads(read_shape, trash=19)[0])
    np.testing.assert_array_equal(reads.total_2, [6, 0])  # three members take two reads of three pages each
    np.testing.assert_array_equal(reads.longest_2, [3, 0])
    np.testing.assert_array_equal(reads.shared_count_U[:6], [8, 8, 3, 8, 8, 3])
    np.testing.assert_array_equal(reads.shared_first_R[:3], [0, 1, 6])
    assert reads.write_page_R[3] == 19
    scheduler.advance()
    scheduler.plan()
    reads = read_shape.split(scheduler.reads(read_shape, trash=19)[0])
    np.testing.assert_array_equal(reads.own_count_O[:3], [4, 4, 4])
    np.testing.assert_array_equal(reads.own_start_O[:3], [19, 19, 19])
    np.testing.assert_array_equal(reads.write_offset_R[:3], [4, 4, 4])


def test_a_pause_keeps_what_counts():
    shape = PoolShape(shards=1, lanes=1, pages=6, page_tokens=4, steps=4, members=1, sample_pages=6)
    scheduler = Scheduler(shape)
    scheduler.add(0, 3, [(0, 16, None)])
    for _ in range(3):
        scheduler.plan()
        scheduler.advance()
    scheduler.pause(0, position=7)  # tokens 2..6 were fed and count; tokens 7..13 do not
    sample = scheduler.samples[0]
    assert [(s.start, s.count) for s in sample.store.pages] == [(2, 4), (6, 1)]
    scheduler.give(0, 5)
    scheduler.resume(0, left=4)
    plan = scheduler.plan()
    (feed,) = plan.feeds  # the page that was not full takes the appended tokens after its own tokens
    assert (feed.sample, feed.start, feed.offset) == (sample, 7, 1)
    assert feed.targets == [page.index for page in sample.store.pages[1:3]]
    assert [(start, count) for _, start, count in feed.prior] == [(0, 2), (2, 4)]
    assert [(s.start, s.count) for s in sample.store.pages] == [(2, 4), (6, 4), (10, 2), (12, 0)]
    assert [s.id for s in plan.seats] == [0] and not plan.spills
    assert sample.position == 12
    with pytest.raises(AssertionError):
        scheduler.resume(0, left=4)


def test_a_fork_has_the_pages_that_its_source_had_at_the_position():
    shape = PoolShape(shards=1, lanes=2, pages=16, page_tokens=4, steps=4, members=1, sample_pages=8)
    scheduler = Scheduler(shape)
    scheduler.add(0, 3, [(0, 16, None)])
    for _ in range(3):
        scheduler.plan()
        scheduler.advance()
    scheduler.pause(0, position=7)
    pages = [(page.index, page.start, page.count) for page in scheduler.samples[0].store.pages]
    scheduler.give(0, 5)
    scheduler.resume(0, left=4)
    (feed,) = scheduler.plan().feeds
    assert len(scheduler.samples[0].store.pages) == len(pages) + 2
    store, source, shard = scheduler.fork(1, 0, position=7)
    assert [(page.index, page.start, page.count) for page in store.pages] == pages and pages[-1][1:] == (6, 1)
    assert store.spilled and source is scheduler.samples[0].store and shard == 0
    scheduler.give(1, 5)
    scheduler.resume(1, left=4)
    plan = scheduler.plan()
    assert [restore.store for restore in plan.restores] == [store] and not plan.prefills
    (other,) = plan.feeds
    assert (other.start, other.offset, len(other.targets)) == (feed.start, feed.offset, len(feed.targets))
    for handle in (0, 1):  # the prompt's pages stay as long as one of them needs them
        assert ("prompt", 0, 0) in {store.key for store, _ in scheduler.stores(1)}
        scheduler.finish(handle, grown=4, live=True)
    assert scheduler.free_counts() == (2, 16)


@pytest.mark.parametrize(("left", "fed"), [(4, (12, 7, 2)), (8, (5, 5, 2))])
def test_what_lies_behind_free_places_is_fed_again_only_where_room_is_short(left, fed):
    """A sample has 5 and 7 tokens in two pages of 8 places, and gets 2 tokens. To draw 8 more it needs the free
    places of the first page; to draw 4 more it does not."""
    shape = PoolShape(shards=1, lanes=1, pages=5, page_tokens=8, steps=4, members=1, sample_pages=3)
    scheduler = Scheduler(shape)
    scheduler.add(0, 1, [(0, 30, None)])
    sample = scheduler.samples[0]
    for position in (5, 12):
        while sample.position < position:
            scheduler.plan()
            scheduler.advance()
        scheduler.pause(0, position=position)
        if position == 5:
            scheduler.resume(0, left=8)
    assert [(page.start, page.count) for page in sample.store.pages] == [(0, 5), (5, 7)]
    scheduler.give(0, 2)
    scheduler.resume(0, left=left)
    (feed,) = scheduler.plan().feeds
    assert (feed.start, feed.offset, len(feed.targets)) == fed
    assert sum(page.count for page in sample.store.pages) == sample.position == 14


@pytest.mark.parametrize(("tokens", "fit"), [(12, False), (3, True)])
def test_given_tokens_without_room_spill_nothing(tokens, fit):
    shape = PoolShape(shards=1, lanes=3, pages=5, page_tokens=4, steps=4, members=1, sample_pages=8)
    scheduler = Scheduler(shape)
    for handle in range(3):
        scheduler.add(handle, 1, [(handle, 8, 1.0)])
    scheduler.plan()
    scheduler.advance()
    scheduler.pause(1, position=4)
    scheduler.pause(2, position=4)
    scheduler.give(1, tokens)
    scheduler.resume(1, left=4)
    plan = scheduler.plan()
    assert [s.id for s in plan.seats] == [1] * fit
    assert [spill.store for spill in plan.spills] == [scheduler.samples[2].store] * fit
    assert scheduler.samples[2].store.spilled == fit
