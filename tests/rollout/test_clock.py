"""The clocks decide without an engine: tokens have the versions of TokenClock's formula, batches consist of groups that
have ended, and a journal repeats a run."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.engine.config import RolloutConfig
from podrl.rollout.clock import TokenClock, WallClock, choose, last_window, stop_at
from podrl.rollout.journal import NAME, WallJournal


@dataclasses.dataclass(eq=False)
class Group:
    index: int
    submit_step: int
    number: int
    drawn: int | None = None
    ended: bool = False
    repeated: bool = False
    signal: bool | None = True

    @property
    def ready(self):
        return self.ended and self.signal is not None

    @property
    def oldest(self):
        return self.drawn

    def record(self):
        runs = [] if self.drawn is None else [[self.drawn, 3]]
        return {"index": self.index, "asked": self.submit_step, "runs": [runs], "tokens": [3], "late": []}


@given(batch=st.integers(0, 9), staleness=st.integers(1, 4), quantum=st.integers(1, 9), length=st.integers(1, 60))
def test_windows_draw_each_token_by_the_version_of_the_formula(batch, staleness, quantum, length):
    drawn = []
    for version in range(max(batch - staleness, 0), last_window(batch) + 1):
        most = stop_at(batch, version, quantum)
        left = length - len(drawn)
        drawn += [version] * (left if most is None else min(most, left))
    first = max(batch - staleness, 0)
    assert drawn == [min(first + i // quantum, max(batch - 1, 0)) for i in range(length)]


def test_one_window_has_no_quantum_to_follow():
    clock = TokenClock(RolloutConfig(), staleness=1)
    clock.saw(3, 100)
    assert not clock.used and clock.state(4) == []


def test_the_oldest_groups_make_the_batch_and_one_asked_again_is_waited_for():
    groups = [Group(i, 0, i, drawn=v, ended=True) for i, v in enumerate([2, 1, None, 1])]
    assert [g.index for g in choose(groups, 3, 3, 2)] == [1, 3, 0]
    assert choose(groups, 3, 5, 2) == []
    late = Group(9, 1, 4, drawn=1, repeated=True)
    assert choose([*groups, late], 3, 2, 2) == []  # step 3 is the last step that may train on a token of version 1
    assert [g.index for g in choose([*groups, late], 2, 2, 2)] == [1, 3]
    late.ended = True
    assert [g.index for g in choose([*groups, late], 3, 2, 2)] == [9, 1]


def play(clock, seed, *, steps, size, staleness, decided=None):
    """Plays steps in which groups end at random; with `decided`, the batches of an earlier run, they end as in that
    run. Returns the batches."""
    chance, open_, batches, number = random.Random(seed), [], [], 0
    for step in range(steps):
        for old in clock.stale(step, open_):
            open_[open_.index(old)] = Group(old.index, step, old.number, repeated=True)
        while number < min((step + 1 + staleness), steps) * size:
            open_.append(Group(number, number // size, number))
            number += 1
        wanted = None if decided is None else {(g.index, g.submit_step): g for g in decided[step]}
        while not (chosen := clock.batch(step, open_, size)):
            for group in open_:
                if wanted is not None:
                    if (then := wanted.get((group.index, group.submit_step))) is not None:
                        group.drawn, group.ended = then.drawn, True
                elif not group.ended and chance.random() < 0.5:
                    group.drawn = step if group.drawn is None else group.drawn
                    group.ended = chance.random() < 0.4
        left = [group for group in open_ if group not in chosen]
        assert clock.decide(step, chosen, left)["queue/ready"] == sum(group.ended for group in left) or decided
        open_ = left
        batches.append(chosen)
    return batches


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), staleness=st.integers(1, 3))
def test_every_prompt_is_in_one_batch_and_the_journal_repeats_them(tmp_path_factory, seed, staleness):
    directory, how = tmp_path_factory.mktemp("run"), {"steps": 5, "size": 3, "staleness": staleness}
    batches = play(WallClock(WallJournal(directory), staleness, "run"), seed, **how)
    assert sorted(group.index for batch in batches for group in batch) == [*range(5 * 3)]
    for step, batch in enumerate(batches):
        assert all(group.drawn is None or step - staleness <= group.drawn <= step for group in batch)
    written = (directory / NAME).read_bytes()
    again = play(WallClock(WallJournal(directory), staleness, "run"), 0, decided=batches, **how)
    assert [[(g.index, g.submit_step) for g in b] for b in again] == [
        [(g.index, g.submit_step) for g in b] for b in batches
    ]
    assert (directory / NAME).read_bytes() == written


def test_a_group_that_becomes_another_is_refused(tmp_path):
    clock = WallClock(WallJournal(tmp_path), 1, "run")
    group = Group(4, 0, 0, drawn=0, ended=True)
    assert clock.decide(0, clock.batch(0, [group], 1), []) == {
        "queue/running": 0.0,
        "queue/ready": 0.0,
        "queue/cancelled": 0.0,
    }
    for other, over in (
        (Group(4, 0, 0, ended=True), False),
        (Group(4, 0, 0), True),
        (Group(5, 0, 0, ended=True), False),
    ):
        with pytest.raises(
            ValueError, match=r"samples of prompt 4 in step 0 differ from their entry in run/batches\.jsonl"
        ):
            clock.batch(0, [other], 1, over=over)
    assert clock.batch(0, [Group(4, 0, 0)], 1) == []  # while group 4 is open, it may still become the recorded one


def test_groups_of_equal_rewards_are_dropped_as_long_as_others_can_take_their_places(tmp_path):
    clock = WallClock(WallJournal(tmp_path), 1, "run", replaced=4)
    signals = [False, None, True, False, True]
    groups = [Group(i, 0, i, drawn=0, ended=True, signal=signal) for i, signal in enumerate(signals)]
    clock.stale(0, groups)
    assert clock.without_signal(0, groups, 1) == [groups[0]]
    left = groups[1:]
    assert clock.without_signal(0, left, 0) == []
    assert clock.batch(0, left, 4) == [], "no batch is chosen while the rewards of group 1 are not known"
    chosen = clock.batch(0, left, 3)
    assert [group.index for group in chosen] == [2, 4, 3], "a group of equal rewards fills the batch"
    expected = {"groups_drawn": 4.0, "groups_replaced": 1.0, "groups_left_without_signal": 1.0}
    found = clock.decide(0, chosen, [groups[1]])
    assert {f"dynamic_sampling/{name}": value for name, value in expected.items()}.items() <= found.items()
    assert found["loss/left_out/dynamic_sampling"] == 4.0 and found["queue/ready"] == 0.0
    again = WallClock(WallJournal(tmp_path), 1, "run", replaced=4)
    for group in groups:
        group.ended, group.signal = False, None
    assert again.without_signal(0, groups, 0) == [groups[0]], (
        "the repeated run drops the same group, before its rewards are known"
    )
    assert again.decide(0, chosen, []) == found


def test_groups_found_too_old_in_a_step_are_repeated_as_if_known_at_its_begin(tmp_path):
    clock = WallClock(WallJournal(tmp_path), 1, "run")
    groups = [Group(0, 0, 0, drawn=0), Group(1, 0, 1), Group(2, 0, 2, drawn=1, ended=True)]
    assert clock.stale(2, groups) == [groups[0]]
    left = [groups[1], groups[2]]
    assert clock.stale_since(2, left) == []
    groups[1].drawn = 0
    assert clock.stale_since(2, left) == [groups[1]]
    clock.decide(2, [groups[2]], [])
    again = WallClock(WallJournal(tmp_path), 1, "run")
    assert again.stale(2, groups) == groups[:2]
    assert again.stale_since(2, groups) == []
