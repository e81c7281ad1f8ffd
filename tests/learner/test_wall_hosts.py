"""Hosts join and leave with `rollout.clock='wall'`: each prompt once, ages within the bound, exact repetition."""

import contextlib
import dataclasses
import json
import random
import shutil
import threading
import time
import types
from concurrent.futures import CancelledError

import numpy as np
import pytest
from endpoints import joined
from replaced_groups import assert_replaced
from test_elastic_hosts import DEADLINE_S, HOSTS, G, P, Stream, T, Weights, experience_of, run

from podrl.engine.config import RolloutConfig
from podrl.learner.loop import Schedule, Start, train
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.learner.recorder import HostRecorder
from podrl.learner.rollout_source import _clock
from podrl.rollout.clock import WallClock
from podrl.rollout.journal import NAME, WallJournal
from podrl.rollout.partial import join_prompts, of_message
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime import channel, joining
from podrl.runtime import pod as pod_of
from podrl.runtime.channel import ChannelError
from podrl.runtime.message import decode, encode
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts
from podrl.types import DRAWN, STOP_EOS, BatchError


def token(index: int, submit_step: int, sample: int, place: int, version: int) -> int:
    """Returns the token that a version draws at a position of a sample; nothing else has an influence on the token."""
    return random.Random(f"{index} {submit_step} {sample} {place} {version}").randrange(2, 1000)


class Player:
    """Stands in for the player of a prompt's samples; `token` gives the tokens that it draws."""

    def __init__(self, prompts, submit_step, partial):
        self.request, self.done = types.SimpleNamespace(samples=G, prompts=prompts), {}
        self.index, self.submit_step = int(prompts.index_P[0]), submit_step
        self.tracks = []
        for g in range(G):
            length = random.Random(f"{self.index} {submit_step} {g}").randint(1, T - 1)
            fields = {"sampled": 0, "limit": length, "stop": None, "paused": None, "first": 1, "text": "", "breaks": []}
            self.tracks.append(
                types.SimpleNamespace(**fields, tokens=[], versions=[], routes=None, drawn={name: [] for name in DRAWN})
            )
        self.rows = self.tracks  # the code under test only iterates over `rows`
        if partial is not None:
            ends = np.cumsum([0, *partial.rows["count_B"]])
            for g, track in enumerate(self.tracks):
                own = slice(int(ends[g]), int(ends[g + 1]))
                track.versions, track.tokens = (partial.rows[n][own].tolist() for n in ("version_X", "tokens_X"))
                track.drawn = {name: [0.0] * len(track.tokens) for name in DRAWN}
                track.sampled = len(track.tokens)

    def draw(self, g: int, version: int) -> None:
        track = self.tracks[g]
        track.tokens.append(token(self.index, self.submit_step, g, track.sampled, version))
        track.versions.append(version)
        track.sampled += 1
        for values in track.drawn.values():
            values.append(0.0)

    def state(self):
        return [({}, track) for track in self.tracks]


class Sampler:
    """A sampler that draws one token of every open sample at a time, at its own pace."""

    def __init__(self, seed: int):
        self._pace = random.Random(seed)

    def begin(self, prompts, step, partial=None):
        return types.SimpleNamespace(player=Player(prompts, step, partial), step=step)

    def play(self, makings, policy, *, halt, on_ended):
        rows = [(m.player, g, budget.limit(g, m.player.tracks[g].sampled)) for m, budget in makings for g in range(G)]
        while rows and not halt():
            time.sleep(self._pace.choice([0.0, 0.001, 0.003]))
            for row in list(rows):
                player, g, until = row
                track = player.tracks[g]
                if track.stop is None and track.sampled == track.limit:
                    track.stop, player.done[g] = STOP_EOS, track
                    on_ended()
                if track.stop is not None or track.sampled == until:
                    rows.remove(row)
                else:
                    player.draw(g, policy.version)

    def gather(self, makings, step, seconds):
        tracks = [track for making in makings for track in making.player.tracks]
        B = len(tracks)
        tokens_BT, version_BT = np.ones((B, T), np.int32), np.full((B, T), -1, np.int32)
        for b, track in enumerate(tracks):
            tokens_BT[b, 1 : 1 + track.sampled], version_BT[b, 1 : 1 + track.sampled] = track.tokens, track.versions
        prompts = join_prompts([making.player.request.prompts for making in makings])
        return experience_of(prompts, tokens_BT, version_BT, np.zeros(B), seconds)

    def signal(self, making):
        return True

    def give_up(self, making):
        return


class Judging(Sampler):
    """A sampler whose `signal` does not know a group's rewards in its first call for the group; about half of the
    groups have equal rewards."""

    def signal(self, making):
        if not hasattr(making, "asked"):
            making.asked = True
            return None
        return differ(sum(track.sampled for track in making.player.tracks))


def differ(tokens: int) -> bool:
    """Tells from a group's number of tokens whether its rewards differ."""
    return tokens % 2 == 0


class Ample(Stream):
    """A data stream that yields three times P numbered prompts: a batch, and two further batches in reserve."""

    def __next__(self):
        parts = [super(Ample, self).__next__() for _ in range(3)]
        return dataclasses.replace(join_prompts(parts), data_state=parts[-1].data_state)


class Member:
    """A rollout host on threads of this process; the threads end when the host's channel is closed."""

    def __init__(self, pod, weights, schedule, sampler):
        self.pod = pod
        here, barrier = run(), StepBarrier(pod, run(), DEADLINE_S)
        makes = {"generate": sampler, "evaluator": None, "deadline_s": DEADLINE_S, "mode": "wall"}
        self.host = HostRollouts(weights, here, pod, barrier, **makes)
        seen = HostRecorder(here, schedule, enter=self.host.enter, evaluate=None, stopping=barrier.stopping)

        def work() -> None:
            with contextlib.suppress(ChannelError, RuntimeError, CancelledError):  # raised once the host has died
                train(self.host, _Nothing(), seen, schedule)

        threading.Thread(target=work, daemon=True).start()

    def die(self) -> None:
        self.pod.channel.close()
        self.host.close()


class _Nothing:
    """An algorithm that trains on nothing."""

    score = pack = update = lambda *_: {}
    rewards = advantages = lambda *_: (None, {})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(channel._Link, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    monkeypatch.setattr(pod_of, "_LOOK_S", 0.02)


def train_through(
    directory,
    *,
    staleness,
    seed,
    steps,
    kills=0,
    start=None,
    hosts=HOSTS,
    until=None,
    sampler=Sampler,
    every=3,
    stream=Stream,
    replaced=0,
):
    """Trains from `start` to step `until`; after `kills` random steps it kills a rollout host and adds one.

    Returns:
      The batches by step, the open groups in the checkpoint of each step, and the leader's source of batches.
    """
    directory.mkdir(exist_ok=True)
    rng, seen, saved = random.Random(seed), {}, {}
    begin = Start(0, b"", (), set()) if start is None else start
    until = steps if until is None else until
    deaths = rng.sample(range(begin.step + 1, until - 1), kills) if kills else []
    schedule, weights = Schedule(steps, staleness, save_every=every), Weights(staleness)
    with joined(hosts, disposable=True) as pods:
        there = [Member(pod, weights, schedule, sampler(seed + i)) for i, pod in enumerate(pods) if i in hosts.rollout]
        here, clock = run(), WallClock(WallJournal(directory), staleness, str(directory), replaced=replaced)
        stream = stream()
        if begin.data_state:
            stream.restore(begin.data_state)
        needed = lambda step, experience: np.arange(len(experience.rollouts.length_B))  # noqa: E731
        more = {"deadline_s": DEADLINE_S, "begun": schedule.begun, "prompts": P, "group_size": G, "clock": clock}
        more |= {"needed": needed, "rows": ("tokens_BT", "version_BT")}
        here.stopping = lambda: begin.step + len(seen) + 1 >= until < steps
        barrier = StepBarrier(pods[0], here, DEADLINE_S)
        leader = RemoteRollouts(weights.offers(), stream, here, pods[0], barrier, **more)
        others, behind, came = [], {}, threading.Condition()
        for number in hosts.trainer[1:]:
            theirs = StepBarrier(pods[number], run(), DEADLINE_S)
            apart = {**more, "clock": None}  # only the leader has the clock
            others.append(RemoteRollouts(Weights(staleness).offers(), Stream(), run(), pods[number], theirs, **apart))

        def follow(other) -> None:
            def record(step, experience, metrics):
                with came:
                    behind[step - 1] = experience
                    came.notify_all()

            nothing = types.SimpleNamespace(
                restore=lambda: Start(begin.step, begin.data_state, begin.pending, set()), save=lambda *_: None,
                stage=lambda name: contextlib.nullcontext(), record=record, evaluate=lambda *_: None,
                stopping=lambda: False,
            )  # fmt: skip
            train(other, _Nothing(), nothing, schedule)

        threads = [threading.Thread(target=follow, args=(other,), daemon=True) for other in others]
        for thread in threads:
            thread.start()

        def record(step, experience, metrics):
            seen[step - 1] = experience
            if others:  # as in a job, where the trainers make each update together, no trainer is two steps behind
                with came:
                    assert came.wait_for(lambda: step - 2 in behind or step - 2 < begin.step, DEADLINE_S), step
            if step in deaths and there:
                one = there.pop(rng.randrange(len(there)))
                number = one.pod.seat.process
                one.die()
                address = pods[0].channel.address
                back = number in hosts.rollout and rng.random() < 0.5
                seat = Seat(number, hosts, address, "s", True) if back else None
                seat = seat or joining.late_seat(address, {"PODRL_SECRET": "s"}, 30.0)
                pod = Pod(seat, host="127.0.0.1").join(30.0, lambda reached, waited_s: "")
                there.append(Member(pod, weights, schedule, sampler(seed + step)))

        def save(step, in_flight):
            parts = [batch.complete() for batch in in_flight]
            saved[step] = [of_message(decode([bytes(frame) for frame in encode(part.message())])) for part in parts]

        recorder = types.SimpleNamespace(
            restore=lambda: begin, stage=lambda name: contextlib.nullcontext(), record=record, save=save,
            evaluate=lambda *_: None, stopping=barrier.stopping,
        )  # fmt: skip
        try:
            train(leader, _Nothing(), recorder, schedule)
            for thread in threads:
                thread.join(DEADLINE_S)
            if others:
                assert_equal(seen, behind)
        finally:
            pods[0]._ended.set()  # otherwise the first lost host would end the job
            for member in there:
                member.die()
        return seen, saved, leader


def assert_whole(seen, steps, staleness):
    """Asserts that every prompt is in exactly one batch, and no token is older than the staleness bound."""
    assert sorted(int(i) for batch in seen.values() for i in batch.rollouts.prompts.index_P) == [*range(P * steps)]
    for step, batch in seen.items():
        versions = batch.rollouts.version_BT[batch.rollouts.version_BT >= 0]
        assert step - staleness <= versions.min() and versions.max() <= step


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for step, mine in one.items():
        theirs = two[step].rollouts
        np.testing.assert_array_equal(mine.rollouts.prompts.index_P, theirs.prompts.index_P, err_msg=f"{step}")
        for name in ("length_B", "tokens_BT", "version_BT"):
            np.testing.assert_array_equal(getattr(mine.rollouts, name), getattr(theirs, name), err_msg=f"{step} {name}")


def repeated(directory, **kwargs):
    """Repeats a run from its journal."""
    again = directory.with_name(f"{directory.name}-again")
    again.mkdir()
    shutil.copy(directory / NAME, again)
    journal = (again / NAME).read_bytes()
    found = train_through(again, **kwargs)[0]
    assert (again / NAME).read_bytes() == journal
    return found


@pytest.mark.parametrize(("staleness", "kills"), [(1, 0), (2, 6), (3, 6)])
def test_hosts_lost_and_added_lose_no_prompt_and_all_of_it_is_repeated(tmp_path, staleness, kills):
    steps = 20
    seen, _, leader = train_through(tmp_path / "run", staleness=staleness, seed=staleness, steps=steps, kills=kills)
    assert_whole(seen, steps, staleness)
    drawn = [set(row[row >= 0].tolist()) for batch in seen.values() for row in batch.rollouts.version_BT]
    assert any(len(versions) > 1 for versions in drawn)
    assert_equal(seen, repeated(tmp_path / "run", staleness=staleness, seed=99, steps=steps))
    assert len(leader._lease_server._change_of_batch) < 5 and not leader._dispatcher._decided, (
        "changes and decisions that all hosts have received are dropped"
    )


def test_hosts_lost_while_steps_are_repeated_change_nothing(tmp_path):
    seen, _, _ = train_through(tmp_path / "run", staleness=2, seed=5, steps=16, kills=3)
    assert_equal(seen, repeated(tmp_path / "run", staleness=2, seed=77, steps=16, kills=5))


def test_trainers_that_are_not_equally_far_get_the_same_batches(tmp_path):
    hosts = Hosts((0, 1), (2, 3))
    seen, _, _ = train_through(tmp_path / "run", staleness=2, seed=3, steps=14, kills=4, hosts=hosts)
    assert_whole(seen, 14, 2)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on_without_losing_a_prompt(tmp_path, seed):
    """From the checkpoint on, steps that are in the journal are repeated; for later steps the clock decides again."""
    more = {"staleness": 2, "steps": 14}
    lived, saved, _ = train_through(tmp_path / "run", seed=seed, until=10, kills=2, **more)
    for saved_after in (9, 6, 3):
        directory = tmp_path / f"run-{saved_after}"
        shutil.copytree(tmp_path / "run", directory)
        pending = saved[saved_after]
        start = Start(saved_after, pending[-1].data_state, pending, set())
        found, _, _ = train_through(directory, seed=50, start=start, kills=2, **more)
        both = {step: lived[step] for step in range(saved_after)} | found
        assert_whole(both, 14, 2)
        assert_equal({step: found[step] for step in range(saved_after, 10)}, {s: lived[s] for s in found if s in lived})
        assert_equal(both, repeated(directory, seed=98, **more))


def test_groups_of_equal_rewards_are_replaced_while_hosts_are_lost_and_all_of_it_is_repeated(tmp_path):
    more = {"staleness": 2, "steps": 12, "sampler": Judging, "stream": Ample, "replaced": G}
    lived, saved, _ = train_through(tmp_path / "run", seed=1, until=8, kills=2, **more)
    start = Start(6, saved[6][-1].data_state, saved[6], set())
    found, _, _ = train_through(tmp_path / "run", seed=50, start=start, kills=2, **more)
    assert_equal({step: found[step] for step in (6, 7)}, {step: lived[step] for step in (6, 7)})
    both = {step: lived[step] for step in range(6)} | found
    assert_equal(both, repeated(tmp_path / "run", seed=98, **more))
    stream, journal = Ample(), WallJournal(tmp_path / "run")
    assert_replaced(both, journal, [next(stream) for _ in range(12)], size=P, group_size=G, differ=differ)


def test_a_host_that_is_asked_to_stop_leaves_its_groups_to_others_and_the_last_one_stops_the_job(tmp_path, monkeypatch):
    agree, left = HostRollouts.agree, []

    def asked(host, step):
        if (host._pod.seat.process, step) in ((1, 4), (2, 8)):
            host._run.stopping = host._barrier._run.stopping = lambda: True
        agree(host, step)

    def leave(host):
        left.append(host._pod.seat.process)
        host._pod.channel.close()
        raise ChannelError("it left")

    with monkeypatch.context() as patched:
        patched.setattr(HostRollouts, "agree", asked)
        patched.setattr(HostRollouts, "_leave", leave)
        lived, saved, _ = train_through(tmp_path / "run", staleness=2, seed=4, steps=14)
    step = max(saved)
    assert left == [1] and 8 <= step < 14
    assert sum(batch.counts["pod/taken_over"] for batch in lived.values()) > 0
    start = Start(step, saved[step][-1].data_state, saved[step], set())
    found, _, _ = train_through(tmp_path / "run", staleness=2, seed=5, steps=14, start=start)
    assert_whole(lived | found, 14, 2)


def test_groups_past_the_bound_are_asked_again(tmp_path):
    seen, _, _ = train_through(tmp_path / "run", staleness=1, seed=1, steps=20)
    assert_whole(seen, 20, 1)
    journal = WallJournal(tmp_path / "run")
    again = [(step, index) for step in range(20) for index in journal.again(step)]
    assert again and sum(batch.counts["queue/cancelled"] for batch in seen.values()) == len(again)


def test_a_dispatch_that_outlasts_a_step_of_training_makes_no_batch_too_old(tmp_path):
    """In step 5 the leader learns of tokens drawn in window 3. They are too old, so their prompt is sampled again."""
    slow, told = threading.Event(), threading.Event()

    def decides(step: int) -> bool:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return any(line["step"] == step and "again" in line for line in lines)

    class Slow(Sampler):
        def play(self, makings, policy, *, halt, on_ended):
            new = [one for one in makings if not any(track.sampled for track in one[0].player.tracks)]
            if policy.version == 3 and new and not slow.is_set():
                slow.set()
                super().play([one for one in makings if one is not new[-1]], policy, halt=bool, on_ended=on_ended)
                for _ in range(1000):
                    if decides(5):
                        break
                    time.sleep(0.01)
                super().play(new[-1:], policy, halt=bool, on_ended=on_ended)
                told.set()
            elif policy.version == 5:
                told.wait(10.0)
            super().play(makings, policy, halt=halt, on_ended=on_ended)

    path = tmp_path / "run" / NAME
    more = {"staleness": 1, "steps": 12}
    seen, _, _ = train_through(tmp_path / "run", seed=2, sampler=Slow, **more)
    assert told.is_set()
    assert_whole(seen, 12, 1)
    assert_equal(seen, repeated(tmp_path / "run", seed=99, **more))


def test_what_the_wall_clock_does_not_go_with_is_refused():
    config = types.SimpleNamespace(rollout_engine="podrl", rollout=lambda: RolloutConfig(clock="wall"))
    cluster = types.SimpleNamespace(config=config)
    here = run()
    here.workdir = None
    with pytest.raises(ValueError, match="keeps a journal: give --workdir"):
        _clock(cluster, Schedule(3, 1), here, None, offline=False)


def test_what_fails_on_a_host_is_told_to_the_trainers(tmp_path):
    class Fails(Sampler):
        def play(self, makings, policy, *, halt, on_ended):
            if policy.version == 2:
                raise BatchError("no reward")
            super().play(makings, policy, halt=halt, on_ended=on_ended)

    with pytest.raises(BatchError, match="no reward"):
        train_through(tmp_path / "run", staleness=1, seed=1, steps=6, sampler=Fails)
