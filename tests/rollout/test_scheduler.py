import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.rollout.scheduler import PoolShape, Scheduler, Status
from podrl.rollout.visits import VisitShape

SHAPE = PoolShape(shards=2, lanes=3, segments=9, segment_tokens=8, steps=4, members=2)


class Device:
    """Follows plans as the device would, one dispatch late, and checks that no segment has two owners."""

    def __init__(self, scheduler: Scheduler, shape: PoolShape, wanted: dict[int, int], prompt: dict[int, int]):
        self.scheduler, self.shape, self.wanted, self.prompt = scheduler, shape, wanted, prompt
        self.made = dict.fromkeys(wanted, 0)
        self.spilled: set = set()
        self.flights: list[list[int]] = []
        self.finished: list[int] = []
        self.order: list[int] = []
        self.spills = 0

    def step(self) -> None:
        plan = self.scheduler.plan()
        for store, _, held in plan.spills:
            assert store.key not in self.spilled and held
            self.spilled.add(store.key)
            self.spills += 1
        for store, _, _ in plan.restores:
            self.spilled.remove(store.key)
        self.order += [s.id for s in plan.seats if s.grown == 0]
        if plan.running:
            self.check()
            self.scheduler.advance()
            self.flights.append([s.id for s, _, _ in plan.running])
            if len(self.flights) < 2:
                return
        for handle in self.flights.pop(0) if self.flights else []:
            if handle in self.finished:
                continue
            self.made[handle] += self.shape.steps
            if self.made[handle] >= self.wanted[handle]:
                self.finished.append(handle)
                for store in self.scheduler.finish(handle, grown=self.wanted[handle], live=False):
                    self.spilled.discard(store.key)

    def check(self) -> None:
        for shard in self.scheduler._shards:
            stores = [row.store for row in shard.prompts.values()]
            stores += [s.store for s in self.scheduler.samples.values() if s.shard == shard.index]
            owned = [seg.index for store in stores if not store.spilled for seg in store.segments]
            everything = owned + shard.free_segments
            assert sorted(everything) == list(range(self.shape.segments))
            lanes = list(shard.running) + shard.free_lanes
            assert sorted(lanes) == list(range(self.shape.lanes))
            for sample in shard.running.values():
                assert not sample.store.spilled
                assert not shard.prompts[sample.prompt].store.spilled
                if sample.left > 0:
                    assert sample.store.segments[-1].count <= self.shape.segment_tokens - self.shape.steps


def run(scheduler, shape, wanted, prompt) -> Device:
    device = Device(scheduler, shape, wanted, prompt)
    for _ in range(20_000):
        if not scheduler.busy and not device.flights:
            break
        device.step()
    assert sorted(device.finished) == sorted(wanted)
    assert scheduler.free_counts() == (shape.shards * shape.lanes, shape.shards * shape.segments)
    assert not device.spilled
    assert not scheduler.samples
    return device


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_everything_finishes_and_nothing_leaks(data):
    """Random groups with lengths up to what one shard can hold, far more than the pool holds at once."""
    scheduler, wanted, prompt_of = Scheduler(SHAPE), {}, {}
    for _ in range(data.draw(st.integers(1, 8))):
        length, first = data.draw(st.integers(1, 17)), len(wanted)
        samples = []
        for _ in range(data.draw(st.integers(1, 5))):
            handle = len(wanted)
            limit = data.draw(st.integers(1, 48))
            wanted[handle], prompt_of[handle] = data.draw(st.integers(1, limit)), first
            samples.append((handle, limit, None))
        scheduler.add(first, length, samples, pieces=data.draw(st.integers(1, 2)))
    run(scheduler, SHAPE, wanted, prompt_of)


def test_a_thousand_requests_leak_nothing():
    rng = np.random.default_rng(0)
    shape = PoolShape(shards=4, lanes=8, segments=40, segment_tokens=8, steps=4, members=4)
    scheduler, wanted, prompt_of = Scheduler(shape), {}, {}
    for p in range(250):
        handles = range(4 * p, 4 * p + 4)
        wanted |= {h: min(200, int(rng.geometric(0.02))) for h in handles}
        prompt_of |= dict.fromkeys(handles, 4 * p)
        scheduler.add(4 * p, int(rng.integers(1, 60)), [(h, 200, None) for h in handles])
    device = run(scheduler, shape, wanted, prompt_of)
    assert device.spills > 0


def test_longest_expected_first():
    shape = PoolShape(shards=1, lanes=2, segments=20, segment_tokens=8, steps=4, members=2)
    scheduler = Scheduler(shape)
    for handle, expected in enumerate([5.0, 30.0, 12.0]):
        scheduler.add(handle, 4, [(handle, 40, expected)])
    device = run(scheduler, shape, {0: 5, 1: 30, 2: 12}, {0: 0, 1: 1, 2: 2})
    assert device.order == [1, 2, 0]


def test_the_youngest_is_spilled_and_its_results_are_awaited():
    shape = PoolShape(shards=1, lanes=2, segments=4, segment_tokens=4, steps=4, members=2)
    scheduler = Scheduler(shape)
    scheduler.add(0, 1, [(0, 16, 4.0)])
    scheduler.add(1, 1, [(1, 16, 4.0)])
    for _ in range(2):
        assert not scheduler.plan().spills
        scheduler.advance()
    plan = scheduler.plan()  # both need a third segment, none is free
    assert [store.key for store, _, _ in plan.spills] == [("sample", 1, 0)]
    assert [s.id for s, _, _ in plan.running] == [0]
    assert plan.frees == [(0, 1)]
    assert scheduler.samples[1].status is Status.WAITING
    assert not plan.restores


def test_groups_stay_together_and_share_visits():
    shape = PoolShape(shards=2, lanes=4, segments=20, segment_tokens=8, steps=4, members=2)
    scheduler = Scheduler(shape)
    scheduler.add(0, 20, [(h, 8, None) for h in range(3)])
    scheduler.add(3, 9, [(h, 8, None) for h in range(3, 6)])
    plan = scheduler.plan()
    assert len({s.shard for s in plan.seats if s.prompt == 0}) == 1
    assert {s.shard for s in plan.seats} == {0, 1}
    assert [(prompt, len(new)) for prompt, _, new in plan.prefills] == [(0, 3), (3, 1)]
    visit_shape = VisitShape(lanes=4, shared=16, own=20, members=2)
    visits = visit_shape.split(scheduler.visits(visit_shape, trash=19)[0])
    np.testing.assert_array_equal(visits.total_2, [6, 0])  # three members in visits of two: twice three segments
    np.testing.assert_array_equal(visits.longest_2, [3, 0])
    np.testing.assert_array_equal(visits.shared_count_U[:6], [8, 8, 3, 8, 8, 3])
    np.testing.assert_array_equal(visits.shared_first_R[:3], [0, 1, 6])
    assert visits.write_segment_R[3] == 19
    scheduler.advance()
    scheduler.plan()
    visits = visit_shape.split(scheduler.visits(visit_shape, trash=19)[0])
    np.testing.assert_array_equal(visits.own_count_O[:3], [4, 4, 4])
    np.testing.assert_array_equal(visits.own_start_O[:3], [19, 19, 19])
    np.testing.assert_array_equal(visits.write_offset_R[:3], [4, 4, 4])


def test_a_pause_keeps_what_counts():
    shape = PoolShape(shards=1, lanes=1, segments=6, segment_tokens=4, steps=4, members=1)
    scheduler = Scheduler(shape)
    scheduler.add(0, 3, [(0, 16, None)])
    for _ in range(3):
        scheduler.plan()
        scheduler.advance()
    scheduler.pause(0, position=7)  # tokens 2..6 were fed and count; 7..13 do not
    sample = scheduler.samples[0]
    assert [(s.start, s.count) for s in sample.store.segments] == [(2, 4), (6, 1)]
    room = scheduler.extend(0, 5)
    assert room is not None
    assert [(start, count) for _, start, count in room.prior] == [(0, 2), (2, 4), (6, 1)]
    assert len(room.targets) == 2 and not room.spills
    scheduler.resume(0, left=4)
    assert [s.id for s in scheduler.plan().seats] == [0]
    assert sample.position == 12
    with pytest.raises(AssertionError):
        scheduler.resume(0, left=4)
