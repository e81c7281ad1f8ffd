"""Simulated training steps worked by hand, and the split of chips that balances trainer and rollout."""

import dataclasses
import json

import numpy as np
import pytest

from podrl.engine.config import RolloutConfig
from podrl.plan.simulate import Load, Speeds, balance, read_lengths, simulate, window_work

ROLLOUT = RolloutConfig(max_tokens_to_generate=1024, steps_per_dispatch=8, kv_cache_size=2048)
SAME = np.array([100])
# Prompts have 64 tokens. A prefill call takes 4 rows of 64 tokens, or 2 of 128, on each of 2 shards.
LOAD = Load(ROLLOUT, lanes=8, shards=2, samples=16, group_size=4, prompt=64)


def _step(lengths_N, *, staleness, lanes=8, **seconds):
    speeds = Speeds(**{"decode_s": 0.01, "call_s": 0.0, "update_s": 1.0, "move_s": 0.0} | seconds)
    return simulate(lengths_N, speeds, load=dataclasses.replace(LOAD, lanes=lanes), staleness=staleness)


def test_sides_that_take_turns_wait_for_each_other():
    # 16 samples of 100 tokens on 8 lanes take twice 12 dispatches of 8 steps and one of 4: 2 s. The update takes 1 s,
    # and the move 1 s.
    found = _step(SAME, staleness=0, move_s=1.0)
    assert found.step_s == pytest.approx(4.0) and found.lanes_busy == 1.0
    assert (found.trainer_idle, found.rollout_idle) == pytest.approx((2 / 4, 1 / 4))
    assert found.decode_steps == 200 and found.prefill_calls == 1, (
        "the call that prefills the first two prompts prefills the others, too"
    )


def test_with_staleness_the_slower_side_never_waits():
    found = _step(SAME, staleness=1, begin_s=0.6, call_s=0.1, score_s=0.3)
    assert found.step_s == pytest.approx(3.0)  # 0.6 s to begin, one prefill call, 2 s of decoding, 0.3 s to score
    assert (found.trainer_idle, found.rollout_idle) == pytest.approx((2 / 3, 0.0))
    slow = _step(SAME, staleness=1, update_s=10.0)
    assert (slow.step_s, slow.trainer_idle) == pytest.approx((10.0, 0.0))
    assert slow.rollout_idle == pytest.approx(0.8)


def test_a_tail_leaves_lanes_idle_and_windows_cut_it():
    lengths_N = np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, 2048).astype(int), 1, 1024)
    one, two, three = (_step(lengths_N, staleness=S, lanes=8, update_s=0.0) for S in (1, 2, 3))
    assert one.lanes_busy < two.lanes_busy <= 1.0 and one.step_s > two.step_s > 0.0
    # If no lane is ever idle, 16 samples of mean length take this time on 8 lanes; the samples that are drawn may be
    # shorter.
    least = 0.01 * 16 * lengths_N.mean() / 8
    assert all(found.step_s > 0.8 * least for found in (one, two, three))


def test_windows_take_the_decode_steps_that_the_engine_takes():
    # Log-normal lengths, 128 samples on 64 lanes: docs/measurements/rollout.md has the engine's own 1,168, 666 and 570.
    lengths_N = np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, 4096).astype(int), 1, 1024)
    load = dataclasses.replace(LOAD, samples=128, lanes=64, group_size=8)
    for staleness, measured in ((1, 1168), (2, 666), (3, 570)):
        found = simulate(lengths_N, Speeds(1.0, 0.0, 0.0, 0.0, plan_s=1.0), load=load, staleness=staleness)
        assert found.decode_steps == found.step_s == pytest.approx(measured, rel=0.03)


def test_a_window_takes_the_steps_of_its_longest_lanes():
    def steps(drawn, *, lanes, waits=0.0):
        parts = dict(enumerate(drawn))
        return window_work(parts, parts, parts, dataclasses.replace(LOAD, lanes=lanes), waits=waits).steps

    assert steps([[8]], lanes=1) == 8 and steps([[11, 3]], lanes=2) == 11, "a dispatch ends with its last sample"
    assert steps([[1, 0], [8]], lanes=1) == 9, "if no other lane runs, the next sample begins at once"
    # The first of three lanes is free after one dispatch, which is read after the second dispatch is launched. The mean
    # of the initial estimate 1 / 4 and the share 1 / 3 is then 7 / 24 = 0.2917: above 0.29 the session reads the second
    # dispatch at once and fills the second lane, and below 0.3 it does not.
    assert steps([[8, 16, 32], [16, 16]], lanes=3, waits=0.29) == 32
    assert steps([[8, 16, 32], [16, 16]], lanes=3, waits=0.3) == 40


def test_prefill_calls_are_counted_as_the_engine_makes_them():
    load = dataclasses.replace(LOAD, rollout=dataclasses.replace(ROLLOUT, max_prompt_length=256))
    assert load.shape.buckets == (64, 128, 256) and [load.shape.prefill_rows(b) for b in load.shape.buckets] == [
        4,
        2,
        1,
    ]
    assert load.calls([63] * 8) == 1 and load.calls([63] * 9) == 2, "8 rows of 64 on two shards"
    assert load.calls([65] * 4) == 1 and load.calls([65] * 5) == 2 and load.calls([65, 64]) == 2, "one call per bucket"
    assert load.calls([256 + 65] * 2) == 2, "a long prompt takes two calls: 256 tokens, then 65"

    def calls(drawn, lanes=16):
        """Counts the prefill calls of a window that continues a batch's 16 samples of 100 tokens; `drawn` has their
        tokens so far."""
        left = [100 - n for n in drawn]
        return window_work({0: left}, {0: left}, {0: [100] * 16}, dataclasses.replace(LOAD, lanes=lanes)).calls

    assert calls([0] * 16) == 1, "4 prompts of 63 tokens"
    assert calls([40] * 16) == 1 + 2, "4 prompts, then 16 samples of 40 tokens"
    assert calls([100] * 8 + [40] * 8) == 1 + 1, "tokens of ended samples are not computed again"
    assert calls([40] * 16, lanes=8) == 1 + 1 + 1, (
        "tokens are computed when their lane is free, prompts in free rows of earlier calls"
    )


def test_every_window_computes_open_samples_anew():
    # A batch has 16 samples of 100 tokens. The quantum is 40 (0.7 x 100 / 2, rounded up to dispatches). One of the two
    # batches in a window has drawn 16 x 40 tokens, which take two calls besides the call for its prompts. The prompts
    # of the other batch take a further call if they come later.
    plain, anew = (_step(SAME, staleness=2, lanes=32, update_s=0.0, call_s=t) for t in (0.0, 0.1))
    assert anew.prefill_calls == 1 + 2 and anew.step_s - plain.step_s == pytest.approx(0.1 * 3)
    begun = _step(SAME, staleness=2, lanes=32, update_s=0.0, begin_s=0.5)
    assert begun.step_s - plain.step_s == pytest.approx(0.5), "begin_s counts once in a window"


def test_speeds_of_one_staleness_predict_another():
    # In closed form, for a batch of 16 samples of 100 tokens on 32 lanes: at S=1 a window has 1 call and 100 steps. At
    # S=2 it has 3 calls, and draws the last 60 tokens of the batch that is due.
    speeds = {"decode_s": 0.01, "call_s": 0.2, "begin_s": 0.1, "update_s": 2.0}
    one, two = (_step(SAME, staleness=S, lanes=32, **speeds) for S in (1, 2))
    assert (one.decode_steps, one.prefill_calls, two.decode_steps, two.prefill_calls) == (100, 1, 60, 3)
    assert one.rollout_idle == pytest.approx(1 - (0.1 + 0.2 + 1.0) / 2.0)
    assert two.rollout_idle == pytest.approx(1 - (0.1 + 0.6 + 0.6) / 2.0)


def test_the_best_split_gives_the_slower_side_more_chips():
    speeds = Speeds(decode_s=0.01, call_s=0.0, update_s=8.0, move_s=0.0)
    load = dataclasses.replace(LOAD, samples=64, lanes=64, shards=8)
    splits = balance(SAME, speeds, load=load, staleness=1, chips=(8, 8))
    own, best = splits[0]
    assert own > 8 and best.step_s < 8.0, (
        "64 lanes draw 100 tokens in 1 s and the update takes 8 s, so the trainer gets more chips"
    )
    assert best.step_s == min(step.step_s for _, step in splits)


def test_lengths_of_nothing_are_refused(tmp_path):
    (tmp_path / "lengths").write_text("0\n0\n")
    with pytest.raises(
        ValueError, match=r"holds 2 lengths, the smallest of them 0: .* Give a run directory with a trace"
    ):
        read_lengths(str(tmp_path / "lengths"))


def test_lengths_are_read_from_numbers_and_nothing_else(tmp_path):
    file = tmp_path / "lengths"
    file.write_text("\n".join(map(json.dumps, [3, 0, 12])) + "\n")
    assert read_lengths(str(file)).tolist() == [3, 12]
    file.write_text("many\n")
    with pytest.raises(ValueError, match="nor a file of numbers"):
        read_lengths(str(file))
    with pytest.raises(ValueError, match="holds 0 lengths: none may be negative"):
        read_lengths(str(tmp_path))
