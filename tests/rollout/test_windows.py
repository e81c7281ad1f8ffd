"""Batches sampled in windows: token versions follow a formula, samples depend on no other, kills change nothing."""

import dataclasses
import itertools
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from test_episodes import Scripted, Words, dialogue_of

from podrl.engine.config import RolloutConfig, Sampling
from podrl.learner.experience import share_of
from podrl.rollout.batches import BatchMaker
from podrl.rollout.clock import TokenClock
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.group_player import TokenGroup
from podrl.rollout.partial import PartialBatch, cut, join, of_message
from podrl.rollout.token_budget import TokenBudget
from podrl.runtime.message import decode, encode
from podrl.runtime.watchdog import Watchdog
from podrl.trainer.objective import Forward
from podrl.types import BatchError, Experience, Layout, Policy

G, LAST = 3, 5  # samples per prompt; batches 0 to LAST are made
ARRAYS = ("tokens_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "length_B", "stop_B")


class Maker:
    """Stands in for Generator, without rewards."""

    def __init__(self, worker, sampling, calls=None):
        self._worker, self._sampling, self._calls = worker, sampling, calls

    def __call__(self, prompts, policy, step):
        return experience_of(self._worker.generate(policy, prompts, group_size=G, step=step, sampling=self._sampling))

    def begin(self, prompts, step, partial=None):
        player = self._worker.player(prompts, group_size=G, step=step, sampling=self._sampling, partial=partial)
        return types.SimpleNamespace(step=step, player=player)

    def play(self, makings, policy, *, halt=None, on_ended=None):
        assert halt is None  # with rollout.clock='tokens' a window ends by numbers of tokens and calls alone
        rows = [(making.player, quantum) for making, quantum in makings]
        for _ in self._worker.advance(policy, rows, calls=self._calls):
            pass

    def finish(self, making, policy):
        del policy
        return experience_of(self._worker.rows(making.player, 0.0))

    def give_up(self, making):
        making.player.abandon()


def experience_of(rollouts):
    """Makes a batch without rewards."""
    none_B = np.zeros(len(rollouts.length_B))
    return Experience(rollouts, np.zeros((0, len(none_B))), none_B, none_B, 0.0, {}, none_B.astype(np.int32))


def made(worker, policies, batches, sampling, *, S, quantum, restarts=(), calls=None, env_client=lambda: None):
    """Returns the batches of a loop with staleness S; at the steps in `restarts` a new BatchMaker resumes from a
    checkpoint, as another process would."""
    worker.env_client = env_client()
    thread, run = ThreadPoolExecutor(1), types.SimpleNamespace(watchdog=Watchdog(60.0))
    settings = RolloutConfig(window_tokens=quantum, steps_per_dispatch=4, max_tokens_to_generate=44)
    lengths = TokenClock(settings, staleness=S)
    windows = BatchMaker(Maker(worker, sampling, calls), thread, run, lengths)
    found, flying, submitted = [], [], 0
    for step in range(LAST + 1):
        thread.submit(lambda: None).result()  # waits for the window's end, as a move of weights on this thread would
        windows.publish(policies[step])
        if step in restarts:
            pending = [again(batch.complete()) for batch in flying]
            lengths, worker.env_client = TokenClock(settings, staleness=S), env_client()
            windows = BatchMaker(Maker(worker, sampling, calls), thread, run, lengths)
            flying = windows.resume(step, pending)
            windows.publish(policies[step])
        while submitted < min(step + 1 + S, LAST + 1):
            flying.append(windows.submit(batches[submitted], submitted))
            submitted += 1
        found.append(flying.pop(0).result().rollouts)
    thread.shutdown()
    worker.env_client = None
    return found


def again(batch):
    """Restores a batch as from a checkpoint."""
    return (
        of_message(decode([bytes(frame) for frame in encode(batch.message())]))
        if isinstance(batch, PartialBatch)
        else batch
    )


@pytest.fixture(scope="module")
def policies(tiny):
    return [Policy(tiny.make_params(version), version) for version in range(LAST + 1)]


@pytest.fixture(scope="module")
def batches(prompts_of):
    return [prompts_of([5, 17, 9], index=np.arange(3) + 3 * b) for b in range(LAST + 1)]


@pytest.mark.parametrize(("S", "quantum"), [(1, 8), (2, 8), (3, 4), (3, None)])
def test_version_of_a_token_is_a_formula_of_its_sample(tight, policies, batches, S, quantum):
    sampling = Sampling(max_new=40, stop_ids=(17, 250))
    found = made(tight, policies, batches, sampling, S=S, quantum=quantum)
    mixed = 0
    for b, rollouts in enumerate(found):
        settings = RolloutConfig(steps_per_dispatch=4, max_tokens_to_generate=44)
        K = quantum or TokenClock(settings, staleness=S).quantum(0)
        if quantum is None and max(b - S, 0) > 0:
            longest = max(int(before.mask_BT.sum(axis=1).max()) for before in found[max(b - S - 4, 0) : b - S])
            K = max(-(-(0.7 * longest / S) // 4), 1) * 4
        for versions_T in rollouts.version_BT:
            drawn = versions_T[versions_T >= 0]
            expected = [min(max(b - S, 0) + i // int(K), max(b - 1, 0)) for i in range(len(drawn))]
            assert drawn.tolist() == expected, (b, K)
            mixed += len(set(expected)) > 1
    assert (mixed > 0) == (S > 1)
    assert tight.stats.compiles == 0


def test_a_request_that_comes_while_others_are_sampled_gives_what_it_gives_alone(tight, policies, batches):
    sampling = Sampling(max_new=40, stop_ids=(17, 250))
    asked = [tight.player(batch, group_size=G, step=7, sampling=sampling) for batch in batches[:3]]
    players, order = [(asked[0], None)], []
    for player, _ in tight.advance(policies[1], players):
        order.append(asked.index(player))
        # The second request comes as soon as a sample has ended, the third after the last sample of the first two.
        if len(players) < len(asked):
            last = len(order) == G * len(batches[0].length_P) * len(players)
            players += [(asked[len(players)], None)] * (len(players) == 1 or last)
    assert sorted(order) == [0] * 9 + [1] * 9 + [2] * 9 and order.index(1) < 9 and order[18:] == [2] * 9
    for player, batch in zip(asked, batches, strict=False):
        alone = tight.generate(policies[1], batch, group_size=G, step=7, sampling=sampling)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(tight.rows(player, 0.0), name), getattr(alone, name))


@pytest.mark.parametrize("S", [0, 2])
def test_the_ratio_to_the_version_that_drew_a_token_is_1_under_filters(tight, tiny, policies, batches, S):
    """Each version gives its tokens the probabilities with which they were drawn, so the ratio starts at 1."""
    sampling = Sampling(temperature=1.2, top_k=40, top_p=0.7, min_p=0.2, max_new=40, stop_ids=(17, 250))
    forward = jax.jit(Forward(config=tiny.model, mesh=tiny.mesh, temperature=1.2).__call__)
    for b, rollouts in enumerate(made(tight, policies, batches, sampling, S=S, quantum=8)):
        sampled_BT, version_BT = rollouts.mask_BT > 0, rollouts.version_BT
        assert rollouts.kept_BT[sampled_BT].mean() < 0.9 and sampled_BT.any()
        versions = set(version_BT[sampled_BT].tolist())
        assert versions == ({b} if S == 0 else versions) and versions <= {max(b - 2, 0), max(b - 1, 0)} | {b * (S == 0)}
        (B, T), width = rollouts.tokens_BT.shape, 17 + 40
        # A tenth row is added, so that the mesh's two shards divide the number of rows.
        tokens_BT = np.pad(rollouts.tokens_BT, ((0, 1), (0, width - T)))
        place_BT = np.tile(np.arange(width), (B + 1, 1))
        segment_BT = (place_BT < np.append(rollouts.length_B, 0)[:, None]).astype(np.int32)
        layout = Layout(tokens_BT, segment_BT, place_BT)
        for version in versions:
            logprob_BT = np.asarray(forward(policies[version].params, layout)[0])[:B, :T]
            ratio = np.exp(logprob_BT - rollouts.logprob_BT)[version_BT == version]
            np.testing.assert_allclose(ratio, 1.0, atol=2e-5)


def test_a_batch_that_fails_ends_the_waits_for_all(tight, policies, batches):
    class Fails(Maker):
        def finish(self, making, policy):
            if making.step == 1:
                raise BatchError("no reward")
            return super().finish(making, policy)

    thread, run = ThreadPoolExecutor(1), types.SimpleNamespace(watchdog=Watchdog(60.0))
    clock = TokenClock(RolloutConfig(), staleness=2)
    windows = BatchMaker(Fails(tight, Sampling(max_new=9)), thread, run, clock)
    flying = [windows.submit(batches[step], step) for step in range(3)]
    windows.publish(policies[0])
    assert flying[0].result().rollouts.length_B.all()
    for batch in flying[1:]:
        with pytest.raises(BatchError, match="no reward"):
            batch.result()
    thread.shutdown()


def test_what_is_in_flight_and_another_process_change_nothing(tight, tiny, tight_config, policies, batches):
    sampling = Sampling(max_new=40, stop_ids=(17, 250), stop_strings=("ab", "cc"))
    whole = made(tight, policies, batches, sampling, S=3, quantum=8)
    restarted = made(tight, policies, batches, sampling, S=3, quantum=8, restarts=range(1, LAST + 1))
    few = tiny.worker(dataclasses.replace(tight_config, pool_tokens=8 * 8 * 12))
    roomy = made(few, policies, batches, sampling, S=3, quantum=8, restarts=(2,))
    for other in (restarted, roomy):
        for mine, theirs in zip(whole, other, strict=True):
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
            assert mine.completions == theirs.completions
    assert len({stop for rollouts in whole for stop in rollouts.stop_B.tolist()}) > 1


@pytest.mark.parametrize("calls", [None, 1])
def test_windows_of_samples_that_are_answered(tight, policies, batches, calls):
    """Bits and versions depend neither on the time of answers nor on a restart, after which environments begin
    again."""
    sampling, S, K = Sampling(max_new=30), 3, 8
    hosts = itertools.count()

    def env_client(seed=None):
        return EnvironmentClient(Scripted(dialogue_of, None if seed is None else seed + next(hosts)), Words())

    more = {"S": S, "quantum": K, "calls": calls}
    whole = made(tight, policies, batches, sampling, **more, env_client=env_client)
    late = made(tight, policies, batches, sampling, **more, env_client=lambda: env_client(5))
    restarted = made(
        tight, policies, batches, sampling, **more, env_client=lambda: env_client(17), restarts=range(1, LAST + 1)
    )
    for other in (late, restarted):
        for mine, theirs in zip(whole, other, strict=True):
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
            assert [e["turns"] for e in mine.episodes] == [e["turns"] for e in theirs.episodes]
    used = set()
    for b, rollouts in enumerate(whole):
        for versions_T, episode in zip(rollouts.version_BT, rollouts.episodes, strict=True):
            turns = [turn["tokens"] for turn in episode["turns"] if turn["by"] == "model"]
            expected = versions_of(turns, b, S, K, calls)
            assert versions_T[versions_T >= 0].tolist() == expected
            used.add(len(set(expected)))
    assert used - {0} == {1, 2, 3}


def versions_of(turns, b, S, K, calls):
    """Computes the versions of tokens in turns of these lengths: a window ends after K tokens or `calls` calls."""
    version, drawn, made_calls, found = max(b - S, 0), 0, 0, []
    for tokens in turns:
        for _ in range(tokens):
            if version < b - 1 and (drawn == K or (calls and made_calls == calls)):
                version, drawn, made_calls = version + 1, 0, 0
            found.append(version)
            drawn += 1
        made_calls += 1
    return found


def test_a_batch_of_several_hosts_is_cut_for_as_many_or_others(tight, policies, batches):
    maker = Maker(tight, Sampling(max_new=40))
    parts = []
    for first in (0, 1):
        share = dataclasses.replace(
            batches[first], data_state=b"there", fields={"answer": ["1", "2", "3"]}, text=["a", "b", "c"]
        )
        group = TokenGroup(share, first, 7, False, None, maker.begin(share, 7), quantum=8)
        maker.play([group.row(TokenBudget(8))], policies[0])
        parts.append(dataclasses.replace(group.part(7), longest=[31]))
    whole = again(join(parts))
    assert whole.prompts.text == ["a", "b", "c"] * 2 and whole.prompts.fields["answer"] == ["1", "2", "3"] * 2
    assert (whole.step, whole.quantum, whole.longest, whole.data_state) == (7, 8, [31], b"there")
    for part, first in zip(parts, (0, 3), strict=True):
        mine = cut(whole, part.prompts, first)
        assert list(mine.samples) == list(part.samples)
        for name, values in part.rows.items():
            np.testing.assert_array_equal(mine.rows[name], values)
    assert len(whole.samples) == 18
    (share,) = share_of([whole.prompts], 1, 4)  # prompts 1 and 2, for host 1 of four; two hosts drew the batch
    mine = cut(whole, share, 1)
    assert len(share.length_P) == 2 and list(mine.samples) == list(whole.samples[3:9])
    np.testing.assert_array_equal(mine.rows["count_B"], whole.rows["count_B"][3:9])
    start, end = whole.rows["count_B"][:3].sum(), whole.rows["count_B"][:9].sum()
    np.testing.assert_array_equal(mine.rows["tokens_X"], whole.rows["tokens_X"][start:end])
    for count, sample in zip(whole.rows["count_B"], whole.samples, strict=True):
        assert count == 8 or sample["track"]["stop"] is not None


def test_a_quantum_follows_the_longest_samples():
    clock = TokenClock(RolloutConfig(steps_per_dispatch=8, max_tokens_to_generate=60), staleness=2)
    assert clock.quantum(0) == 24  # 0.7 of the limit divided by two is 21, rounded up to whole dispatches
    for step, longest in enumerate([10, 50, 12, 9, 8, 60]):
        clock.saw(step, longest)
    assert [clock.quantum(step) for step in (1, 2, 5, 6)] == [8, 24, 24, 24]
    other = TokenClock(RolloutConfig(steps_per_dispatch=8, max_tokens_to_generate=60), staleness=2)
    other.restore(6, clock.state(6))
    assert other.quantum(6) == 24


def test_a_window_is_a_number_of_whole_dispatches():
    with pytest.raises(
        ValueError, match=r"RolloutConfig.window_tokens=12 must be a multiple of RolloutConfig.steps_per_dispatch=8"
    ):
        RolloutConfig(window_tokens=12)
