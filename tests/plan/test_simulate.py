"""Simulated training steps: worked by hand, and their balance."""

import json

import numpy as np
import pytest

from podrl.plan.simulate import Speeds, balance, read_lengths, simulate, window_steps
from podrl.rollout.config import RolloutConfig

ROLLOUT = RolloutConfig(max_tokens_to_generate=1024, steps_per_dispatch=8, kv_cache_size=2048)
SAME = np.array([100])


def _step(lengths_N, *, staleness, lanes=8, **seconds):
    speeds = Speeds(**{"decode_s": 0.01, "begin_s": 0.0, "update_s": 1.0, "move_s": 0.0} | seconds)
    return simulate(lengths_N, speeds, rollout=ROLLOUT, samples=16, lanes=lanes, staleness=staleness)


def test_sides_that_take_turns_wait_for_each_other():
    # 16 samples of 100 tokens on 8 lanes: 13 dispatches of 8 steps, one until the ends are read, 13 and one more: 224
    # decode steps, 2.24 s; 1 s of update, 1 s of move.
    found = _step(SAME, staleness=0, move_s=1.0)
    assert found.step_s == pytest.approx(4.24) and found.lanes_busy == pytest.approx(1600 / (224 * 8))
    assert (found.trainer_idle, found.rollout_idle) == pytest.approx((2.24 / 4.24, 1 / 4.24))


def test_with_staleness_the_slower_side_never_waits():
    found = _step(SAME, staleness=1, begin_s=0.5, score_s=0.26)
    assert found.step_s == pytest.approx(3.0)  # 2.24 s of decoding
    assert (found.trainer_idle, found.rollout_idle) == pytest.approx((2 / 3, 0.0))
    slow = _step(SAME, staleness=1, update_s=10.0)
    assert (slow.step_s, slow.trainer_idle) == pytest.approx((10.0, 0.0))
    assert slow.rollout_idle == pytest.approx(0.776)


def test_a_tail_leaves_lanes_idle_and_windows_cut_it():
    lengths_N = np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, 2048).astype(int), 1, 1024)
    one, two, three = (_step(lengths_N, staleness=S, lanes=8, update_s=0.0) for S in (1, 2, 3))
    assert one.lanes_busy < two.lanes_busy <= 1.0 and one.step_s > two.step_s > 0.0
    # No window is shorter than the tokens that it has to draw.
    least = 0.01 * 16 * lengths_N.mean() / 8
    assert all(found.step_s > 0.8 * least for found in (one, two, three))


def test_windows_take_the_decode_steps_that_the_engine_takes():
    # Log-normal lengths, 128 samples on 64 lanes: docs/async.md has 1,133, 670 and 586 steps of the engine itself.
    lengths_N = np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, 4096).astype(int), 1, 1024)
    how: dict = {"rollout": ROLLOUT, "samples": 128, "lanes": 64}
    for staleness, measured in ((1, 1133), (2, 670), (3, 586)):
        found = simulate(lengths_N, Speeds(1.0, 0.0, 0.0, 0.0), staleness=staleness, **how)
        assert found.step_s == pytest.approx(measured, rel=0.03)


def test_a_window_ends_when_the_last_end_is_read():
    of = lambda parts, left, lanes: window_steps(parts, dict(enumerate(left)), ROLLOUT, lanes)  # noqa: E731
    assert of({0: [8]}, [[9]], 1) == 8, "a quantum's end is known"
    assert of({0: [8]}, [[8]], 1) == 16, "that a sample ended is read a dispatch later"
    assert of({0: [1024]}, [[1024]], 1) == 1024, "the longest end where they must"
    assert of({0: [1, 0], 1: [8]}, [[9, 0], [8]], 1) == 8 * 4, "a lane is filled at the next dispatch but one"


def test_every_window_computes_open_samples_anew():
    # 16 samples of 100 tokens, a quantum of 0.7 x 100 / 2, so 40: of two batches in a window one has drawn 16 x 40.
    plain, anew = (_step(SAME, staleness=2, lanes=32, update_s=0.0, token_s=t) for t in (0.0, 0.001))
    assert anew.step_s - plain.step_s == pytest.approx(0.001 * 16 * 40)
    begun = _step(SAME, staleness=2, lanes=32, update_s=0.0, begin_s=0.5)
    assert begun.step_s - plain.step_s == pytest.approx(2 * 0.5), "prompts of both"


def test_the_best_split_gives_the_slower_side_more_chips():
    speeds = Speeds(decode_s=0.01, begin_s=0.0, update_s=8.0, move_s=0.0)
    splits = balance(SAME, speeds, rollout=ROLLOUT, samples=64, lanes=64, staleness=1, chips=(8, 8))
    own, best = splits[0]
    assert own > 8 and best.step_s < 8.0, "64 lanes draw 100 tokens in 1 s, the update takes 8"
    assert best.step_s == min(step.step_s for _, step in splits)


def test_lengths_of_nothing_are_refused(tmp_path):
    (tmp_path / "lengths").write_text("0\n0\n")
    with pytest.raises(ValueError, match=r"has 2 lengths, the least 0: give a run directory with a trace"):
        read_lengths(str(tmp_path / "lengths"))


def test_lengths_are_read_from_numbers_and_nothing_else(tmp_path):
    file = tmp_path / "lengths"
    file.write_text("\n".join(map(json.dumps, [3, 0, 12])) + "\n")
    assert read_lengths(str(file)).tolist() == [3, 12]
    file.write_text("many\n")
    with pytest.raises(ValueError, match="no file of numbers"):
        read_lengths(str(file))
    with pytest.raises(ValueError, match="has 0 lengths"):
        read_lengths(str(tmp_path))
