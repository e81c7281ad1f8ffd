"""The pace of dispatches: the times at which the device waits for answers, and the cost of the waits."""

import numpy as np
import pytest

from podrl.rollout.players import Pace

LANE_S = 0.01  # seconds per lane; a dispatch of 8 samples takes 8 times as long


class World:
    """Simulates a device, environments and a clock: answers come one after the other, each after `answer_s` seconds."""

    flying, took, planned, crowded = 8, [8 * LANE_S, 20 * LANE_S], [LANE_S / 16], False

    def __init__(self, answer_s):
        self.answer_s, self.now, self.left, self.waited = answer_s, 0.0, 0, 0.0
        self.pace = Pace(self, lambda: self.now)

    def poll(self, timeout_s):
        took = min(timeout_s, self.answer_s)
        self.now, self.waited = self.now + took, self.waited + took
        heard = int(self.answer_s <= timeout_s)
        self.left -= heard
        return heard

    def count_waiting(self):
        return self.left

    def handle_messages(self):
        return

    def dispatches(self, count, paused):
        """Runs `count` dispatches, in each of which `paused` samples pause; returns the numbers of the dispatches that
        were read before the next launch."""
        first = []
        for number in range(count):
            if self.pace.read_first():
                first.append(number)
            self.left = paused
            self.pace.read(self.flying, paused, paused)
            if first and first[-1] == number:
                self.pace.wait(self, [self])
        return first


def test_quick_answers_are_waited_for_from_the_second_dispatch_on():
    world = World(LANE_S / 4)
    assert world.dispatches(50, paused=3) == list(range(1, 50))
    assert world.left == 0 and world.waited == pytest.approx(49 * 3 * LANE_S / 4)


def test_lanes_that_others_wait_for_are_given_again_before_the_next_dispatch():
    world = World(0.0)
    world.pace.read(8, 0, 2)
    assert not world.pace.refills()  # no sample waits for a lane
    world.crowded = True
    assert world.pace.refills()
    world.pace.read(8, 0, 0)
    assert world.pace.refills()  # samples that began together end together: no lane is freed for a while, then many
    world.planned = [LANE_S * 2]
    assert not world.pace.refills()  # planning idles the device for longer than the freed lanes save
    world.planned = [LANE_S / 16]
    for _ in range(8):
        world.pace.read(8, 0, 0)
    assert not world.pace.refills()  # no lane has become free for eight dispatches
    world.pace.read(8, 0, 8)
    assert world.pace.refills()
    world.planned, world.flying = [0.0], 0
    assert not world.pace.refills()  # there is nothing to read


def test_what_does_not_pay_is_tried_ever_more_rarely_and_within_what_it_may_win():
    world = World(LANE_S * 5)
    first = world.dispatches(200, paused=3)
    assert first[:6] == [1, 2, 4, 8, 16, 32] and np.diff(first[6:]).tolist() == [32] * (len(first) - 7)
    assert world.waited <= len(first) * 3 * LANE_S + 1e-9
    world.answer_s = LANE_S / 4
    assert len(world.dispatches(100, paused=3)) > 60  # the pace notices that waiting pays again


def test_without_pauses_nothing_is_waited_for():
    world = World(0.0)
    assert not world.dispatches(20, paused=0) and not world.waited
