"""Many requests, unusual requests, and the statistics of many samples, on one tiny engine."""

import numpy as np
import pytest

from podrl.engine.config import Sampling
from podrl.engine.device import Device
from podrl.engine.session import Opening, Session
from podrl.types import STOP_EOS, STOP_LENGTH, STOP_STRING


@pytest.fixture
def session(tiny, tight):
    """Opens a session on the tiny engine without end tokens, so that each request decides its length."""
    engine = tight._get_engine(tiny.params)
    params = engine.prepare(tiny.params)

    def letters(tokens):
        return "".join("abc"[t % 3] + "abc"[t // 3 % 3] for t in tokens)

    return Session(Device(engine, engine.init_state(), params), 7, decode=letters, eos_ids=(), cache_tokens=64)


def keys(rng, count):
    return rng.integers(0, 1 << 32, (count, 2), dtype=np.uint32)


def drain(session):
    ended = []
    while session.busy:
        ended += session.step()
    return ended


def is_empty(session):
    scheduler = session._scheduler
    return (
        scheduler.free_counts() == (8, 24)
        and not scheduler.samples
        and not session.device.spilled
        and not session._tracks
        and not np.asarray(session.device.state.live_R).any()
    )


def test_a_thousand_random_requests_leak_nothing(session):
    """Draws lengths, settings, stop ids and stop strings at random, with twice as many tokens as the pool holds."""
    rng = np.random.default_rng(0)
    tracks = []
    for _ in range(250):
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=rng.choice([None, 30]),
            max_new=int(rng.integers(1, 14)) if rng.random() < 0.95 else 44,
            stop_ids=tuple(int(t) for t in rng.integers(6, 300, rng.integers(0, 9))),
            stop_strings=("abca", "ccc") if rng.random() < 0.3 else (),
        )
        prompt = rng.integers(6, 300, rng.integers(1, 21)).astype(np.int32)
        tracks += session.add(prompt, keys(rng, 4), sampling, pieces=int(rng.integers(1, 3)))
    ended = drain(session)
    assert sorted(t.handle for t in ended) == list(range(1000))
    assert {t.stop for t in ended} == {STOP_EOS, STOP_LENGTH, STOP_STRING}
    assert session.stats.spills > 0
    assert session.stats.tokens == sum(len(t.tokens) for t in ended)
    assert is_empty(session)


def test_all_end_at_once_and_one_runs_on(session):
    rng = np.random.default_rng(1)
    prompt = np.arange(9, 21, dtype=np.int32)
    for longest in (1, 4, 5):  # before, at and after a dispatch boundary
        tracks = session.add(prompt, keys(rng, 8), Sampling(max_new=longest))
        assert {t.handle for t in drain(session)} == {t.handle for t in tracks}
        assert all(len(t.tokens) == longest and t.stop == STOP_LENGTH for t in tracks)
        assert is_empty(session)
    short = session.add(prompt, keys(rng, 7), Sampling(max_new=2))
    (long,) = session.add(np.arange(6, 26, dtype=np.int32), keys(rng, 1), Sampling(max_new=44))
    order = drain(session)
    assert order[-1] is long and len(long.tokens) == 44 and long.stop == STOP_LENGTH
    assert all(len(t.tokens) == 2 for t in short)
    assert is_empty(session)


def test_samples_of_the_engine_follow_its_model(tiny, tight, policy, prompts_of):
    """Compares 1,600 first tokens with the full forward pass by chi-square at fixed seeds; the bound is mean plus 4.5
    deviations."""
    prompts, sampling = prompts_of([11]), Sampling(max_new=1, temperature=0.8)
    rollouts = [tight.generate(policy, prompts, group_size=400, step=step, sampling=sampling) for step in range(4)]
    tokens = np.concatenate([r.tokens_BT[:, 11] for r in rollouts])
    row = np.zeros((1, 12), np.int32)
    row[0, :11] = prompts.tokens_PT[0]
    weight_V = np.exp(tiny.logprobs(row, np.array([12]))[0, 11] / 0.8)
    expected_V = weight_V / weight_V.sum() * len(tokens)
    count_V = np.bincount(tokens, minlength=300)
    big = expected_V > 5
    assert big.sum() > 50
    observed = np.append(count_V[big], count_V[~big].sum())
    expected = np.append(expected_V[big], expected_V[~big].sum())
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), big.sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom), (statistic, freedom)


def test_samples_do_not_resemble_their_neighbours(tight, policy, prompts_of):
    """Neighbouring samples, and the same sample in two consecutive steps, draw equal tokens as often as independent
    draws with the observed token frequencies would."""
    sampling = Sampling(max_new=1)
    first, second = (
        tight.generate(policy, prompts_of([11]), group_size=400, step=step, sampling=sampling).tokens_BT[:, 11]
        for step in (10, 11)
    )
    share_V = np.bincount(np.concatenate([first, second]), minlength=300) / 800
    chance = (share_V**2).sum()
    for a, b in ((first, second), (first[:-1], first[1:]), (first[::2], first[1::2])):
        assert abs((a == b).mean() - chance) < 4.5 * np.sqrt(chance / len(a))


def test_pauses_extends_and_spills_together(tiny, tight, policy):
    """Pauses and extends samples of long prompts while the pool is too small for all of them."""
    rng = np.random.default_rng(3)
    sampling, stops = Sampling(max_new=36), ("abc", "cba", "bb")
    session = tight.session(policy)
    tracks = []
    for _ in range(6):
        prompt = rng.integers(6, 300, rng.integers(12, 21)).astype(np.int32)
        tracks += session.add(prompt, keys(rng, 4), sampling, openings=[Opening(stop_strings=stops)] * 4)
    pauses = 0
    while session.open:
        for track in session.step():
            if track.stop is None:
                pauses += 1
                given = rng.integers(6, 300, min(rng.integers(0, 6), session.room(track))).tolist()
                session.extend(track, Opening(given, stops))
    stats = session.stats
    tight.close(session)
    assert pauses > 20 and stats.spills > 0
    assert session._scheduler.free_counts() == (8, 24) and not session.device.spilled
    T = 64
    rows_BT, length_B = np.zeros((len(tracks), T), np.int32), np.zeros(len(tracks), int)
    for b, track in enumerate(tracks):
        row = [*track.prompt, *track.tokens]
        rows_BT[b, : len(row)], length_B[b] = row, len(row)
    reference_BTV = tiny.logprobs(rows_BT, length_B)
    for b, track in enumerate(tracks):
        n, sampled = len(track.prompt), np.asarray(track.versions) >= 0
        chosen = reference_BTV[b, np.arange(n, length_B[b]), rows_BT[b, n : length_B[b]]]
        np.testing.assert_allclose(np.asarray(track.drawn["raw_logprob"])[sampled], chosen[sampled], atol=1e-4)
        assert sampled.sum() == track.sampled <= 36


def test_samples_that_come_one_by_one_share_the_pages_of_their_prompt(tight, policy):
    """Samples that come one after the other draw the same tokens as samples that come together. Once the last sample of
    a prompt has ended, the prompt is prefilled again."""
    rng = np.random.default_rng(8)
    prompt, keys_52, sampling = rng.integers(6, 300, 20).astype(np.int32), keys(rng, 5), Sampling(max_new=9)
    session = tight.session(policy)
    together = session.add(prompt, keys_52, sampling, openings=[Opening()] * 5)
    drain(session)
    assert session.stats.prefill_tokens == 19
    tight.close(session)
    session = tight.session(policy)
    tracks = [session.track(prompt.copy(), key, sampling, Opening()) for key in keys_52]
    for track in tracks[:4]:
        session.seat([track], shared=True)
        session.step()
    drain(session)
    assert session.engine.shards == 2 and session.stats.prefill_tokens == 19
    for track in tracks[:4]:
        session.end(track)
    session.seat(tracks[4:], shared=True)
    drain(session)
    assert session.stats.prefill_tokens == 2 * 19
    for one, other in zip(together, tracks, strict=True):
        assert (one.tokens, one.drawn) == (other.tokens, other.drawn)
    session.end(tracks[4])
    assert session._scheduler.free_counts() == (8, 24)
    tight.close(session)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_fork_goes_on_as_its_source_did(session, crowded):
    """A sample has gone on twice. Forks from before the first and the second time go on like it, bit for bit, whether
    the sample's cache is on the device or, if the pool is crowded, on the host."""
    rng = np.random.default_rng(4)
    prompt = rng.integers(6, 300, 13).astype(np.int32)
    openings = [Opening(rng.integers(6, 300, count).tolist(), max_new=6) for count in (4, 5)]
    (source,) = session.add(prompt, keys(rng, 1), Sampling(max_new=40), openings=[Opening(max_new=7)])
    drain(session)
    ends = []
    for opening in openings:
        ends.append(len(source.tokens))
        session.extend(source, opening)
        drain(session)
    if crowded:
        for _ in range(8):
            session.add(rng.integers(6, 300, 20).astype(np.int32), keys(rng, 4), Sampling(max_new=40))
        while not (spilled := session._scheduler.samples[source.handle].store.spilled):
            session.step()
    forks = [session.fork(source, end) for end in ends]
    assert spilled if crowded else not session.device.spilled.keys() - {f"sample/{fork.handle}/0" for fork in forks}
    for fork in (*forks, session.fork(source, ends[0], held=True)):
        for opening in openings[ends.index(len(fork.tokens)) :]:
            session.extend(fork, opening)
            drain(session)
        assert fork.tokens == source.tokens and fork.versions == source.versions and fork.sampled == source.sampled
        assert (fork.drawn == source.drawn) == (fork in forks)  # prefill and decoding differ in the last bits
        session.end(fork)
    session.end(source)
    assert is_empty(session)


@pytest.mark.nightly("podrl/engine", "podrl/rollout", "podrl/models")
@pytest.mark.slow
def test_a_thousand_samples_that_wait_at_once_come_back_as_they_were(tiny, tight, policy):
    """All samples pause before any goes on. A pool of 24 pages spills them to the host; they continue in random order.

    Each sample then draws the same tokens as in a session without pauses: its cache came back bit for bit.
    """
    rng = np.random.default_rng(5)
    prompts = [rng.integers(6, 300, rng.integers(1, 21)).astype(np.int32) for _ in range(250)]
    keys_P42 = [keys(rng, 4) for _ in prompts]
    given = [rng.integers(6, 300, rng.integers(0, 12)).tolist() for _ in range(1000)]

    def play(order):
        """Returns the tokens of every sample, and the largest number of caches on the host; with `order` None no sample
        pauses."""
        session, most = tight.session(policy), 0
        paused = []
        first = [Opening(max_new=5)] * 4
        tracks = [
            track
            for prompt, keys_42 in zip(prompts, keys_P42, strict=True)
            for track in session.add(prompt, keys_42, Sampling(max_new=9), openings=first)
        ]
        while session.open:
            for track in session.step():
                if order is None and track.sampled <= 5 and track.first == 0:
                    session.extend(track, Opening(given[track.handle]))
                elif track.first == 0:
                    paused.append(track)
                else:
                    session.end(track)
            most = max(most, len(session.device.spilled))
            assert order is None or session.busy or len(paused) == 1000 or not paused
            if len(paused) == 1000:
                assert not session.busy
                for b in () if order is None else order:
                    session.extend(tracks[b], Opening(given[b]))
                paused.clear()
        assert session._scheduler.free_counts() == (8, 24) and not session.device.spilled and not session._tracks
        stats = session.stats
        tight.close(session)
        return [(track.tokens, track.drawn["raw_logprob"]) for track in tracks], most, stats

    alone, _, few = play(None)
    together, most, many = play(rng.permutation(1000))
    assert together == alone
    assert 900 < most <= 1000 + 250 and many.spills > few.spills
    assert many.tokens == few.tokens > 5000
