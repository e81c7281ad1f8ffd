"""Batches with `rollout.clock='wall'`: each prompt once, ages within the bound, bitwise repetition from the journal."""

import dataclasses
import functools
import itertools
import json
import random
import shutil
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from replaced_groups import assert_replaced
from test_episodes import Scripted, Words, dialogue_of

from podrl.engine.config import Sampling
from podrl.environments.workers import EpisodeEnd
from podrl.learner.experience import join
from podrl.rollout.batches import BatchMaker
from podrl.rollout.clock import WallClock, in_sessions, sessions_of
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.group_player import GroupPlayer, OwnGroup
from podrl.rollout.journal import NAME, WallJournal, runs_of
from podrl.rollout.partial import join as join_parts
from podrl.rollout.partial import join_prompts, of_message, of_tracks, take_prompts
from podrl.rollout.token_budget import TokenBudget
from podrl.runtime.message import decode, encode
from podrl.runtime.watchdog import Watchdog
from podrl.storage import sealed_lines
from podrl.storage.seal import unseal
from podrl.types import STOP_DEADLINE, BatchError, Experience, Policy

G, P, LAST = 2, 3, 6  # samples per prompt, prompts per batch; batches 0 to LAST are made
ARRAYS = ("tokens_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "length_B", "stop_B")


class Maker:
    """Stands in for Generator, without rewards; the random generator `clock` decides how long a window lasts."""

    def __init__(self, worker, sampling, clock):
        self._worker, self._sampling, self._clock = worker, sampling, clock

    def begin(self, prompts, step, partial=None):
        player = self._worker.player(prompts, group_size=G, step=step, sampling=self._sampling, partial=partial)
        return types.SimpleNamespace(player=player)

    def play(self, makings, policy, *, halt, on_ended):
        """Plays a window. Unless the window is repeated, it halts a few dispatches after its batch was taken."""
        left, taken, rows = self._clock.randint(0, 3), [0], []

        def add():
            rows.extend((making.player, budget) for making, budget in makings[len(rows) :])

        def halted():
            stops = halt()  # halt() may open groups
            add()
            taken[0] += self.done()
            return stops if self.repeats() else taken[0] > left

        add()
        for _ in self._worker.advance(policy, rows, halt=halted):
            on_ended()
            add()

    def signal(self, making):
        return True

    def gather(self, makings, step, seconds):
        del step
        parts = [self._worker.rows(making.player, seconds) for making in makings]
        rollouts = join(parts, join_prompts([part.prompts for part in parts]))
        return Experience(
            rollouts, np.zeros((0, P * G)), np.zeros(P * G), np.zeros(P * G), 0.0, {}, np.zeros(P * G, np.int32)
        )

    def give_up(self, making):
        making.player.abandon()


class Interrupted(Maker):
    """Interrupts a new window after a few dispatches and continues it under the same weights, as a host does; a window
    that is repeated from the journal is not interrupted."""

    def play(self, makings, policy, *, halt, on_ended):
        left = 0 if self.repeats() else self._clock.randint(0, 2)
        while left:
            left -= 1
            asked = itertools.count()
            halted = functools.partial(self._heard, asked, self._clock.randint(1, 3))
            for _ in self._worker.advance(policy, [(m.player, budget) for m, budget in makings], halt=halted):
                on_ended()
        super().play(makings, policy, halt=halt, on_ended=on_ended)

    @staticmethod
    def _heard(asked, most):
        return next(asked) >= most


class Judging(Maker):
    """A maker whose `signal` does not know a group's rewards in its first call for the group; about half of the groups
    have equal rewards."""

    def __init__(self, *args):
        super().__init__(*args)
        self._asked = set()

    def signal(self, making):
        if making.player not in self._asked:
            self._asked.add(making.player)
            return None
        return differ(sum(len(track.tokens) for track in making.player.done.values()))


def differ(tokens):
    """Tells from a group's number of tokens whether its rewards differ."""
    return tokens % 2 == 0


class RepeatingBatchMaker(BatchMaker):
    """A BatchMaker that tells its `maker` whether the window is repeated, and whether the window's batch was taken."""

    def __init__(self, maker, *args):
        super().__init__(maker, *args)
        maker.done = lambda: (future := self._waited.get(self._playing.version)) is None or future.done()
        maker.repeats = lambda: self._repeats

    def _play(self, policy):
        self._repeats = self._clock.known(policy.version) > policy.version
        super()._play(policy)


def made(
    worker,
    policies,
    batches,
    sampling,
    directory,
    *,
    S,
    clock=0,
    begin=None,
    until=LAST,
    env_client=lambda: None,
    maker=Maker,
    replaced=0,
):
    """Plays a run in `directory` from its beginning, or from `begin` = (step, open groups), up to the step `until`.

    Returns:
      The batches by step, and the content of a checkpoint after each step.
    """
    directory.mkdir(exist_ok=True)
    worker.env_client = env_client()
    thread = ThreadPoolExecutor(1)
    run = types.SimpleNamespace(watchdog=Watchdog(60.0))
    clock_of = WallClock(WallJournal(directory), S, str(directory), replaced=replaced)
    wall = RepeatingBatchMaker(maker(worker, sampling, random.Random(clock)), thread, run, clock_of, P)
    first, pending = begin or (0, [])
    flying, found, saved = list(wall.resume(first, pending)), {}, {}
    submitted = first + len(flying)
    try:
        for step in range(first, until + 1):
            wall.end_window()
            thread.submit(lambda: None).result()  # wait: publish() moves weights on this thread, after the window
            wall.publish(policies[step])
            if step > first:
                saved[step] = [again(batch.complete()) for batch in flying]
            while submitted < min(step + 1 + S, LAST + 1):
                flying.append(wall.submit(batches[submitted], submitted))
                submitted += 1
            found[step] = flying.pop(0).result()
    finally:
        wall.end_window()
        wall.closing()
        thread.shutdown()
        wall.close()
        worker.env_client = None
    return found, saved


def again(partial):
    """Restores open groups as from a checkpoint."""
    return of_message(decode([bytes(frame) for frame in encode(partial.message())]))


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for step, mine in one.items():
        theirs = two[step]
        counts = [{name: n for name, n in each.counts.items() if "time/" not in name} for each in (mine, theirs)]
        assert counts[0] == counts[1] and mine.data_state == theirs.data_state
        assert mine.rollouts.completions == theirs.rollouts.completions
        np.testing.assert_array_equal(mine.rollouts.prompts.index_P, theirs.rollouts.prompts.index_P)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(mine.rollouts, name), getattr(theirs.rollouts, name), err_msg=name)


def assert_whole(found, S):
    """Asserts that every prompt is in exactly one batch, and no token is older than the staleness bound."""
    assert sorted(i for batch in found.values() for i in batch.rollouts.prompts.index_P) == [*range(P * (LAST + 1))]
    for step, batch in found.items():
        versions = batch.rollouts.version_BT[batch.rollouts.version_BT >= 0]
        assert step - S <= versions.min() and versions.max() <= step


def mixed(found):
    rows = [row[row >= 0] for batch in found.values() for row in batch.rollouts.version_BT]
    return sum(len(set(row.tolist())) > 1 for row in rows)


@pytest.fixture(scope="module")
def policies(tiny):
    return [Policy(tiny.make_params(version), version) for version in range(LAST + 1)]


@pytest.fixture(scope="module")
def batches(prompts_of):
    made = [prompts_of([5, 17, 9], index=np.arange(P) + P * b) for b in range(LAST + 1)]
    return [dataclasses.replace(batch, data_state=str(b).encode()) for b, batch in enumerate(made)]


@pytest.mark.parametrize(("S", "clock", "greedy"), [(1, 1, 0), (2, 3, 1), (3, 4, 0)])
def test_a_run_is_repeated_from_its_journal(tight, policies, batches, tmp_path, S, clock, greedy):
    sampling = Sampling(max_new=40, stop_ids=(17, 250), stop_strings=("cacbab", "bbcc"), greedy=greedy)
    whole, _ = made(tight, policies, batches, sampling, tmp_path / "one", S=S, clock=clock)
    assert_whole(whole, S)
    assert mixed(whole)
    assert all(batch.counts["time/window"] > 0 for step, batch in whole.items() if step)
    assert tight.stats.compiles == 0
    (tmp_path / "two").mkdir()
    journal = (tmp_path / "one" / NAME).read_bytes()
    (tmp_path / "two" / NAME).write_bytes(journal)
    assert_equal(whole, made(tight, policies, batches, sampling, tmp_path / "two", S=S, clock=99)[0])
    assert (tmp_path / "two" / NAME).read_bytes() == journal
    other, _ = made(tight, policies, batches, sampling, tmp_path / "three", S=S, clock=99)
    assert (tmp_path / "three" / NAME).read_bytes() != journal
    assert_whole(other, S)


@pytest.mark.parametrize("answered", [False, True])
def test_sessions_within_one_version_are_repeated(tight, policies, batches, tmp_path, answered):
    """Prefill and decoding differ in the last bits, so a repetition must prefill at the same interruptions."""
    sampling = Sampling(max_new=40, stop_ids=(17, 250))
    seeds = iter(range(9))

    def env_client():
        return EnvironmentClient(Scripted(dialogue_of, next(seeds)), Words()) if answered else None

    more = {"S": 2, "env_client": env_client}
    whole, _ = made(tight, policies, batches, sampling, tmp_path / "one", **more, clock=3, maker=Interrupted)
    assert_whole(whole, 2)
    journal = WallJournal(tmp_path / "one")
    every = [runs for step in whole for group in journal.batch(step)["groups"] for runs in group["runs"]]
    assert any(one[0] == other[0] for runs in every for one, other in itertools.pairwise(runs))
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / NAME, tmp_path / "two")
    assert_equal(whole, made(tight, policies, batches, sampling, tmp_path / "two", **more, clock=99)[0])
    assert (tmp_path / "two" / NAME).read_bytes() == (tmp_path / "one" / NAME).read_bytes()


def test_groups_past_the_bound_are_asked_again(tight, policies, batches, tmp_path):
    """Prompts whose samples become older than the staleness bound are sampled again, and a batch waits for the new
    samples."""
    sampling = Sampling(max_new=40, stop_ids=(17, 250))
    whole, _ = made(tight, policies, batches, sampling, tmp_path / "one", S=1, clock=5)
    assert_whole(whole, 1)
    journal = WallJournal(tmp_path / "one")
    cancelled = [(step, index) for step in range(LAST + 1) for index in journal.again(step)]
    assert cancelled and sum(batch.counts["queue/cancelled"] for batch in whole.values()) == len(cancelled)
    for step, index in cancelled:
        assert journal.group(index, step, step) is not None or any(s > step and i == index for s, i in cancelled)


@pytest.mark.parametrize("answered", [False, True])
def test_a_killed_run_goes_on_without_losing_a_prompt(tight, policies, batches, tmp_path, answered):
    """Steps that are in the journal are repeated, and for later steps the clock decides again. At the end another run
    repeats all steps from the journal."""
    sampling, S = Sampling(max_new=30, stop_ids=(17, 250)), 2
    seeds = iter(range(100))

    def env_client():
        return EnvironmentClient(Scripted(dialogue_of, next(seeds)), Words()) if answered else None

    more = {"S": S, "env_client": env_client}
    for killed, saved_after in [(2, 1), (4, 2), (4, 4), (6, 3)]:
        directory = tmp_path / f"{killed}-{saved_after}"
        lived, saved = made(tight, policies, batches, sampling, directory, clock=killed, until=killed, **more)
        with (directory / NAME).open("a") as file:
            file.write('{"step": 9, "gro')  # the line was torn when the run was killed
        begin = (saved_after, saved[saved_after])
        found, again = made(tight, policies, batches, sampling, directory, clock=50, begin=begin, **more)
        both = {step: lived[step] for step in range(saved_after)} | found
        assert_whole(both, S)
        assert_equal({s: found[s] for s in range(saved_after, killed + 1)}, {s: lived[s] for s in found if s in lived})
        replay = directory.with_name(f"replay-{directory.name}")
        replay.mkdir()
        shutil.copy(directory / NAME, replay)
        assert_equal(both, made(tight, policies, batches, sampling, replay, clock=77, **more)[0])
        begin = (saved_after + 1, again[saved_after + 1])  # a checkpoint that was saved while steps were repeated
        third, _ = made(tight, policies, batches, sampling, directory, clock=51, begin=begin, **more)
        assert_equal(third, {step: found[step] for step in third})


@pytest.mark.parametrize("S", [1, 2])
def test_groups_of_equal_rewards_are_replaced_and_all_of_it_is_repeated(tight, policies, prompts_of, tmp_path, S):
    """A step may open the prompts that its batch has in reserve; a killed run and a replay drop the same groups."""
    asked = [prompts_of([5, 17, 9] * 3, index=np.arange(3 * P) + 3 * P * b) for b in range(LAST + 1)]
    asked = [dataclasses.replace(batch, data_state=str(b).encode()) for b, batch in enumerate(asked)]
    play = functools.partial(made, tight, policies, asked, Sampling(max_new=30, stop_ids=(17, 250)), S=S)
    play = functools.partial(play, maker=Judging, replaced=G)
    lived, saved = play(tmp_path / "one", clock=S, until=4)
    found, _ = play(tmp_path / "one", clock=50, begin=(3, saved[3]))
    assert_equal({step: found[step] for step in (3, 4)}, {step: lived[step] for step in (3, 4)})
    whole = {step: lived[step] for step in range(3)} | found
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / NAME, tmp_path / "two")
    assert_equal(whole, play(tmp_path / "two", clock=99)[0])
    assert (tmp_path / "two" / NAME).read_bytes() == (tmp_path / "one" / NAME).read_bytes()
    assert_replaced(whole, WallJournal(tmp_path / "one"), asked, size=P, group_size=G, differ=differ)
    asked[:] = [take_prompts(batch, np.arange(P)) for batch in asked]
    with pytest.raises(ValueError, match=r"drops .* 0 prompts are in reserve\. .* dynamic_sampling_batches"):
        play(tmp_path / "two", clock=99)
    changed = (
        rf"has 0 prompts in reserve, but .* of the checkpoint have {2 * P} each: .* dynamic_sampling_batches may not"
    )
    with pytest.raises(ValueError, match=changed):
        play(tmp_path / "one", clock=99, begin=(3, saved[3]))


def test_a_window_waits_for_rewards_and_ends_without_them_when_it_must(prompts_of):
    known, looks, ended = iter([None, None, False]), itertools.count(), []
    generator: Any = types.SimpleNamespace(signal=lambda samples: next(known, None))
    playing = types.SimpleNamespace(done={0: None}, request=types.SimpleNamespace(samples=1))
    scored, unscored = (
        OwnGroup(prompts_of([5]), number, 0, False, None, types.SimpleNamespace(player=playing)) for number in range(2)
    )
    own = {"on_ended": lambda: ended.append(True), "closed": lambda: False}
    player = GroupPlayer(generator, "wall", weights=lambda version: Policy({}, version), **own)
    player.play(lambda: [scored], 0, halt=lambda: False, repeats=False)
    assert scored.ready and scored.signal is False and ended == [True]
    player.play(lambda: [unscored], 0, halt=lambda: next(looks) == 3, repeats=False)
    assert not unscored.ready and ended == [True]


def test_a_journal_of_other_samples_is_refused(tight, policies, batches, tmp_path):
    sampling = Sampling(max_new=40, stop_ids=(17, 250))
    made(tight, policies, batches, sampling, tmp_path, S=1, clock=1)
    lines = [unseal(json.loads(line)) for line in (tmp_path / NAME).read_text().splitlines()]
    lines[1]["groups"][0]["runs"][0][-1][1] += 1
    (tmp_path / NAME).write_bytes(b"".join(map(sealed_lines.encode, lines)))
    with pytest.raises(ValueError, match=r"in step 0 differ from their entry in .*batches\.jsonl"):
        made(tight, policies, batches, sampling, tmp_path, S=1, clock=1)


def test_samples_out_of_time_are_so_again(tight, policies, batches, tmp_path):
    """Some samples run out of time before their first turn, or while they wait for an answer. In the repetition all
    environments answer in time, and yet the same samples must be lost."""
    clock = random.Random(3)

    def late(task):
        script, turn = dialogue_of(task), None
        while True:
            if clock.random() < 0.15:
                yield EpisodeEnd(0, None, {}, None, "deadline")
            try:
                turn = yield script.send(turn)
            except StopIteration as ended:
                return ended.value

    more = {"S": 2, "clock": 1}
    sampling = Sampling(max_new=30, stop_ids=(17, 250))
    play = functools.partial(made, tight, policies, batches, sampling, **more)
    whole, _ = play(tmp_path / "one", env_client=lambda: EnvironmentClient(Scripted(late), Words()))
    stops = np.concatenate([batch.rollouts.stop_B for batch in whole.values()])
    drawn = np.concatenate([batch.rollouts.mask_BT.any(axis=1) for batch in whole.values()])
    assert (drawn & (stops == STOP_DEADLINE)).any() and (~drawn & (stops == STOP_DEADLINE)).any()
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / NAME, tmp_path / "two")
    assert_equal(whole, play(tmp_path / "two", env_client=lambda: EnvironmentClient(Scripted(dialogue_of), Words()))[0])


def test_a_failure_ends_the_waits_for_all(tight, policies, batches, tmp_path):
    class Fails(Maker):
        def play(self, makings, policy, *, halt, on_ended):
            raise BatchError("no reward")

    run = types.SimpleNamespace(watchdog=Watchdog(60.0))
    thread = ThreadPoolExecutor(1)
    wall = BatchMaker(Fails(tight, Sampling(max_new=9), None), thread, run, WallClock(WallJournal(tmp_path), 2, ""), P)
    flying = [wall.submit(batches[step], step) for step in range(3)]
    wall.publish(policies[0])
    for batch in flying:
        with pytest.raises(BatchError, match="no reward"):
            batch.result()
    thread.shutdown()


def test_a_checkpoint_of_a_pod_goes_on_in_one_process(tight, policies, batches, tmp_path):
    """A pod's leader has read one more batch when it saves, so a partial batch of its checkpoint may hold more prompts
    than one batch."""
    sampling = Sampling(max_new=30)
    _, saved = made(tight, policies, batches, sampling, tmp_path, S=2, until=3)
    run, thread = types.SimpleNamespace(watchdog=Watchdog(60.0)), ThreadPoolExecutor(1)
    clock = WallClock(WallJournal(tmp_path / "again"), 2, "")
    (tmp_path / "again").mkdir()
    wall = RepeatingBatchMaker(Maker(tight, sampling, random.Random(1)), thread, run, clock, P)
    [flying] = wall.resume(3, [again(join_parts(saved[3]))])
    assert len(flying.complete().prompts.index_P) == 2 * P
    wall.publish(policies[3])
    trained = flying.result().rollouts.prompts.index_P
    assert len(trained) == P
    wall.end_window()
    left = wall.submit(batches[5], 4).complete().prompts
    own = [*(i for part in saved[3] for i in part.prompts.index_P), *batches[5].index_P]
    assert sorted([*trained, *left.index_P]) == sorted(own) and left.data_state == b"5"
    thread.shutdown()
    wall.close()


def test_runs_and_points_of_a_sample():
    assert runs_of([2, 2, -1, -1, 2, 4, 4, -1], []) == [[2, 3], [4, 5]]
    # The interruption at token 3 begins no further run, because the version changes there.
    assert runs_of([2, 2, -1, -1, 2, 4, 4, -1], [2, 3]) == [[2, 2], [2, 3], [4, 5]]
    assert runs_of([-1], []) == []
    group = {"runs": [[[2, 3], [4, 5]], [], [[3, 7]]], "tokens": [5, 0, 8], "late": [1, 2]}
    found = [list(in_sessions([("a", sessions_of(group, version))])) for version in (1, 2, 3, 4)]
    assert [[name for name, _ in session] for each in found for session in each] == [["a"]] * 4
    found = [budget for each in found for [(_, budget)] in each]
    assert [budget.recorded for budget in found] == [{0: 0, 2: 0}, {0: 3, 2: 0}, {0: 3}, {}]
    assert [budget.late for budget in found] == [{1: 0}, {1: 0}, {1: 0, 2: 8}, {1: 0, 2: 8}]
    broken = {"runs": [[[2, 3], [2, 6], [4, 9]], [[2, 5]], [[2, 1], [2, 2], [2, 4]]], "tokens": [9, 5, 4], "late": [2]}
    found = list(in_sessions([("a", sessions_of(group, 2)), ("b", sessions_of(broken, 2))]))
    assert [[name for name, _ in session] for session in found] == [["a", "b"], ["b"], ["b"]]
    found = [session[-1][1] for session in found]
    assert [budget.recorded for budget in found] == [{0: 3, 2: 1}, {0: 6, 2: 2}, {0: 6}]
    assert [budget.late for budget in found] == [{}, {}, {2: 4}]
    budget = TokenBudget(4, {1: 8})
    assert budget.limit(0, 5) == 9 and budget.limit(1, 5) == 8 and TokenBudget().limit(2, 5) is None


def test_partial_samples_keep_what_was_said_of_their_group(tight, policies, batches, tmp_path):
    _, saved = made(tight, policies, batches, Sampling(max_new=30), tmp_path, S=2, until=3)
    assert [(len(part.prompts.length_P), part.data_state) for part in saved[3]] == [(P, b"4")] * 2
    assert {sample["asked"] for part in saved[3] for sample in part.samples} <= set(range(5))
    assert of_tracks.__name__ and all(len(part.samples) == P * G for part in saved[3])
