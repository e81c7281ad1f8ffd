import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import letters

from podrl.config import build
from podrl.engine.config import RolloutConfig, Sampling
from podrl.engine.session import Opening
from podrl.rollout.players import Pace
from podrl.rollout.worker import pieces_per_prompt
from podrl.types import STOP_LENGTH, STOP_STRING, Policy


@settings(max_examples=12, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    group_size=st.integers(1, 7),
    max_new=st.integers(1, 44),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.4]),
    top_k=st.sampled_from([None, 40]),
    stop_ids=st.sampled_from([(), (17, 250)]),
    step=st.integers(0, 5),
)
def test_engine_equals_full_forward(
    check, tiny, tight, policy, prompts_of, lengths, group_size, max_new, temperature, top_k, stop_ids, step
):
    sampling = Sampling(temperature=temperature, top_k=top_k, max_new=max_new, stop_ids=stop_ids)
    rollouts = tight.generate(policy, prompts_of(lengths), group_size=group_size, step=step, sampling=sampling)
    check(tiny, rollouts, sampling)
    assert tight.stats.compiles == 0
    assert tight.stats.tokens == rollouts.mask_BT.sum()


@pytest.fixture(scope="module")
def roomy(tiny, tight_config):
    """Makes a worker whose pool always has free pages."""
    return tiny.worker(dataclasses.replace(tight_config, pool_tokens=8 * 8 * 12))


def test_spills_change_nothing(check, tiny, tight, roomy, policy, prompts_of):
    """Long samples get the same bits whether or not the pool can hold them all."""
    prompts, sampling = prompts_of([20, 18, 3, 11]), Sampling(max_new=44)
    spilled = tight.generate(policy, prompts, group_size=4, step=1, sampling=sampling)
    assert tight.stats.spills > 0
    check(tiny, spilled, sampling)
    whole = roomy.generate(policy, prompts, group_size=4, step=1, sampling=sampling)
    assert roomy.stats.spills == 0
    for name in ("tokens_BT", "logprob_BT", "raw_logprob_BT", "stop_B"):
        np.testing.assert_array_equal(getattr(spilled, name), getattr(whole, name))


def test_any_order_gives_the_same_bits(tight, policy, prompts_of):
    lengths = np.array([4, 20, 9, 17, 1, 12])
    whole = tight.generate(policy, prompts_of(lengths), group_size=3, step=2)
    assert len({tuple(row) for row in whole.tokens_BT}) == 18
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(6)[: 6 - seed]
        part = tight.generate(policy, prompts_of(lengths[order], index=order), group_size=3, step=2)
        rows = (order[:, None] * 3 + np.arange(3)).reshape(-1)
        T = min(whole.tokens_BT.shape[1], part.tokens_BT.shape[1])
        for name in ("tokens_BT", "logprob_BT", "raw_logprob_BT"):
            np.testing.assert_array_equal(getattr(part, name)[:, :T], getattr(whole, name)[rows, :T])
    other = tight.generate(policy, prompts_of(lengths), group_size=3, step=3)
    assert (other.tokens_BT != whole.tokens_BT).any(axis=1).all()


def test_an_evaluation_after_another_draws_the_longest_samples_first(roomy, policy, prompts_of, monkeypatch):
    """The second evaluation knows the lengths of the first one's samples: it needs fewer decode steps, and its samples
    are bitwise the same."""
    # This `refills` measures no times, which would make the number of steps depend on the load of the machine.
    monkeypatch.setattr(Pace, "refills", lambda pace: pace._session.flying > 0)
    prompts, how = prompts_of([5] * 40), {"group_size": 1, "step": 3, "sampling": Sampling(max_new=44, stop_ids=(17,))}
    made = []
    for mode in ("train", "train", "eval", "eval"):
        rollouts = roomy.generate(policy, prompts, mode=mode, **how)
        made.append((roomy.stats.decode_steps, rollouts))
    steps = [count for count, _ in made]
    assert steps[0] == steps[1] == steps[2] > steps[3], steps
    for name in ("tokens_BT", "length_B", "logprob_BT", "raw_logprob_BT", "stop_B"):
        np.testing.assert_array_equal(getattr(made[0][1], name), getattr(made[3][1], name), err_msg=name)


def test_lengths_of_sets_whose_records_have_the_same_numbers_are_told_apart(roomy, policy, prompts_of):
    sets, how = [prompts_of([5] * 3), prompts_of([9] * 3)], {"group_size": 2, "step": 4, "mode": "eval"}
    made = [
        roomy.generate(policy, prompts, sampling=Sampling(max_new=n), **how)
        for prompts, n in zip(sets, (44, 3), strict=True)
    ]
    for prompts, rollouts in zip(sets, made, strict=True):
        asked = roomy.player(prompts, sampling=Sampling(max_new=44), **how).request
        lengths = rollouts.length_B - np.repeat(prompts.length_P, 2)
        assert asked.expected == dict(enumerate(lengths.tolist()))


def test_prompt_is_prefilled_once_per_group(tight, policy, prompts_of):
    tight.generate(policy, prompts_of([20, 13, 5, 2]), group_size=4, step=0)
    assert tight.stats.prefill_tokens == 19 + 12 + 4 + 1


@pytest.mark.parametrize("ahead", [True, False])
def test_greedy_samples_beside_those_of_a_group_change_no_bit_and_prefill_nothing(
    tight, policy, prompts_of, monkeypatch, ahead
):
    """With `ahead` False each dispatch is read before the next launch, so that lanes are reused at once."""
    monkeypatch.setattr(Pace, "refills", lambda pace: not ahead and pace._session.flying > 0)
    prompts, sampling = prompts_of([20, 13, 5, 2]), Sampling(max_new=30)
    alone = [
        tight.generate(policy, prompts, group_size=1, step=4, sampling=dataclasses.replace(sampling, temperature=0.0)),
        tight.generate(policy, prompts, group_size=3, step=4, sampling=sampling),
    ]
    both = tight.generate(policy, prompts, group_size=4, step=4, sampling=dataclasses.replace(sampling, greedy=1))
    assert tight.stats.prefill_tokens == 19 + 12 + 4 + 1 and tight.stats.compiles == 0
    for name in ("tokens_BT", "length_B", "mask_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "stop_B"):
        rows = getattr(both, name).reshape(4, 4, *getattr(both, name).shape[1:])
        for found, expected in zip((rows[:, :1], rows[:, 1:]), alone, strict=True):
            np.testing.assert_array_equal(found.reshape(-1, *found.shape[2:]), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize(("mesh", "devices"), [("fsdp=2,tensor=2", 4)])
def test_sharded_engine_equals_full_forward(check, tiny, tiny_on, tight_config, prompts_of, mesh, devices):
    sharded = tiny_on(mesh, devices)
    worker = sharded.worker(tight_config)
    sampling = Sampling(max_new=30)
    rollouts = worker.generate(
        Policy(sharded.params, 0), prompts_of([20, 7, 13]), group_size=3, step=0, sampling=sampling
    )
    check(tiny, rollouts, sampling)


def test_stop_string_truncates_exactly(tight, policy, prompts_of):
    sampling = Sampling(max_new=40, stop_strings=("abb", "cac"))
    free = tight.generate(policy, prompts_of([5, 9]), group_size=6, step=4, sampling=Sampling(max_new=40))
    cut = tight.generate(policy, prompts_of([5, 9]), group_size=6, step=4, sampling=sampling)
    stopped = 0
    for b, text in enumerate(cut.completions):
        # The search for stop strings includes the end token's text, which is no part of the completion.
        whole = letters(list(free.tokens_BT[b, free.prompts.length_P[b // 6] : free.length_B[b]]))
        at = [whole.find(s) + 3 for s in sampling.stop_strings if s in whole]
        if not at:
            assert text == free.completions[b]
            continue
        stopped += 1
        assert cut.stop_B[b] == STOP_STRING
        assert text == whole[: min(at)]
        n = cut.length_B[b] - cut.prompts.length_P[b // 6]
        assert n == -(-min(at) // 2)  # a token is two letters: the last token contains the end of the stop string
        np.testing.assert_array_equal(cut.tokens_BT[b, : cut.length_B[b]], free.tokens_BT[b, : cut.length_B[b]])
    assert stopped >= 3


STOPS = ("aba", "bcb", "ca")


@settings(max_examples=6, derandomize=True)
@given(data=st.data())
def test_extended_samples_equal_full_forward(tiny, tight, policy, prompts_of, data):
    """Samples pause at a stop string, an end token or a limit, get random tokens and go on. All log-probabilities of
    sampled tokens agree with the full forward pass."""
    prompts = prompts_of(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    sampling = Sampling(max_new=30)
    session = tight.session(policy)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tracks, ended, given_tokens = [], [], 0
    for p, length in enumerate(prompts.length_P):
        keys = rng.integers(0, 1 << 32, (3, 2), dtype=np.uint32)
        openings = [Opening(rng.integers(6, 300, n).tolist(), STOPS) for n in rng.integers(0, 6, 3)]
        tracks += session.add(prompts.tokens_PT[p, :length], keys, sampling, openings=openings)
        given_tokens += sum(len(opening.tokens) for opening in openings)
    while session.busy or session.open:
        for track in session.step():
            if track.stop is not None:
                ended.append(track)
                continue
            if track.paused == STOP_STRING:
                assert track.text.endswith(STOPS)
            if rng.random() < 0.15:
                session.end(track)
                ended.append(track)
            else:
                extra = rng.integers(6, 300, min(rng.integers(0, 14), session.room(track))).tolist()
                given_tokens += len(extra)
                session.extend(track, Opening(extra, STOPS, max_new=int(rng.integers(1, 20))))
                if track.stop is not None:
                    ended.append(track)
    tight.close(session)
    assert len(ended) == len(tracks)
    assert sum(track.versions.count(-1) for track in tracks) == given_tokens
    assert session._scheduler.free_counts() == (8, 24)
    assert not session.device.spilled
    for track in ended:
        row = np.concatenate([track.prompt, track.tokens]).astype(np.int32)[None]
        assert row.shape[1] <= 64
        reference_TV = tiny.logprobs(row, np.array([row.shape[1]]))[0]
        n, sampled = len(track.prompt), np.asarray(track.versions) >= 0
        chosen = reference_TV[np.arange(n, row.shape[1]), row[0, n:]]
        np.testing.assert_allclose(np.asarray(track.drawn["raw_logprob"])[sampled], chosen[sampled], atol=1e-4)
        np.testing.assert_allclose(np.asarray(track.drawn["logprob"])[sampled], chosen[sampled], atol=1e-4)
        assert sampled.sum() == track.sampled


def test_weights_change_in_flight(tiny, tight, policy, prompts_of):
    """Tokens before the refresh carry the old version, tokens after it the new one; nothing is compiled."""
    prompts, sampling, new = prompts_of([6] * 8), Sampling(max_new=40), Policy(tiny.make_params(1), 8)
    old = tight.generate(policy, prompts, group_size=2, step=0, sampling=sampling)
    stream = tight.stream(policy, prompts, group_size=2, step=0, sampling=sampling)
    finished = [next(stream)]
    tight.refresh(new)
    finished += list(stream)
    versions = [f.versions for f in finished]
    assert {v for row in versions for v in row} == {7, 8}
    assert all(row == sorted(row) for row in versions)
    for f in finished:
        n = f.versions.count(7)
        b = f.prompt * 2 + f.sample
        np.testing.assert_array_equal(f.tokens[:n], old.tokens_BT[b, 6 : 6 + n])
    assert tight.stats.compiles == 0


def test_sleep_and_wake(tight, policy, prompts_of):
    before = tight.generate(policy, prompts_of([5, 6]), group_size=2, step=0)
    tight.sleep()
    tight.wake()
    after = tight.generate(policy, prompts_of([5, 6]), group_size=2, step=0)
    np.testing.assert_array_equal(before.tokens_BT, after.tokens_BT)
    stream = tight.stream(policy, prompts_of([5, 6]), group_size=2, step=0)
    next(stream)
    stream.close()  # the stream is abandoned halfway, and the next call starts clean
    again = tight.generate(policy, prompts_of([5, 6]), group_size=2, step=0)
    np.testing.assert_array_equal(before.tokens_BT, again.tokens_BT)


def test_edges(check, tiny, tight, policy, prompts_of):
    nothing = tight.generate(policy, prompts_of([3, 4]), group_size=2, step=0, sampling=Sampling(max_new=0))
    assert nothing.completions == [""] * 4
    np.testing.assert_array_equal(nothing.length_B, [3, 3, 4, 4])
    assert (nothing.stop_B == STOP_LENGTH).all()
    one = Sampling(max_new=1)
    check(tiny, tight.generate(policy, prompts_of([20] * 5), group_size=4, step=0, sampling=one), one)
    longest = Sampling(max_new=44, temperature=0.0)
    check(tiny, tight.generate(policy, prompts_of([20]), group_size=1, step=0, sampling=longest), longest)


@pytest.mark.parametrize(
    ("lengths", "sampling", "message"),
    [
        ([4, 0], Sampling(), "Prompt 1 is empty"),
        ([4, 21], Sampling(), "Prompt 1 has 21 tokens: rollout.max_prompt_length=20"),
        ([20], Sampling(max_new=45), "rollout.kv_cache_size=64"),
        ([20], Sampling(stop_ids=(9, 10, 11, 12)), "9 token ids end a sample"),
    ],
)
def test_impossible_requests_are_refused(tight, policy, prompts_of, lengths, sampling, message):
    with pytest.raises(ValueError, match=message):
        tight.generate(policy, prompts_of(lengths), group_size=2, step=0, sampling=sampling)
    tight.generate(policy, prompts_of([3]), group_size=1, step=0)  # the worker can still be used


def test_configuration_is_checked():
    with pytest.raises(ValueError, match="kv_cache_size"):
        RolloutConfig(max_prompt_length=1000, max_tokens_to_generate=100)
    with pytest.raises(ValueError, match="steps_per_dispatch=7"):
        RolloutConfig(steps_per_dispatch=7)
    with pytest.raises(ValueError, match="own engine"):
        build(RolloutConfig, {"rollout_vllm_hbm_utilization": 0.5}, "rollout")
    with pytest.raises(ValueError, match="tensor=4"):
        build(RolloutConfig, {"tensor_parallel_size": 4}, "rollout")
    with pytest.raises(ValueError, match="pool_tokens=128 is 2 pages of 64 tokens, fewer than the 18"):
        RolloutConfig(pool_tokens=128)


def test_pieces_fill_the_shards():
    assert pieces_per_prompt(16, 8, 4) == 1
    assert pieces_per_prompt(1, 8, 4) == 4
    assert pieces_per_prompt(2, 8, 4) == 2
    assert pieces_per_prompt(1, 3, 4) == 3
    assert pieces_per_prompt(17, 8, 4) == 1


def test_samples_are_told_of_as_they_end(tight, policy, prompts_of):
    """The engine reports each sample once, when it ends, with the values of its row."""
    told, steps = [], []
    sampling = Sampling(max_new=40, temperature=3.0, stop_ids=(17, 250))

    def ended(sample):
        told.append(sample)
        steps.append(tight._session.stats.dispatches)

    rollouts = tight.generate(policy, prompts_of([20, 3, 9]), group_size=4, step=2, sampling=sampling, ended=ended)
    assert sorted(3 * [0, 1, 2]) != [sample.prompt for sample in told]
    assert sorted((sample.prompt, sample.sample) for sample in told) == [(p, g) for p in range(3) for g in range(4)]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    for sample in told:
        b = sample.prompt * 4 + sample.sample
        row = slice(rollouts.prompts.length_P[sample.prompt], rollouts.length_B[b])
        assert (sample.completion, sample.stop) == (rollouts.completions[b], rollouts.stop_B[b])
        assert sample.tokens == rollouts.tokens_BT[b, row].tolist()


def test_ids_that_no_sample_can_end_with_are_refused(tiny, tight, policy, prompts_of, tight_config):
    for ids in ((1, 10**12), (tiny.model.vocab_size,), (-1,)):
        with pytest.raises(ValueError, match=r"rollout\.eos_tokens has the id .* no sample could end with it"):
            tiny.worker(tight_config, warm=False, eos_ids=ids)
    with pytest.raises(ValueError, match=r"Sampling\.stop_ids has the id 2000000000"):
        tight.generate(policy, prompts_of([5]), group_size=1, step=0, sampling=Sampling(stop_ids=(2_000_000_000,)))
