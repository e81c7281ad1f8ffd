"""Rewards are computed while the batch is still being sampled, and equal the rewards of a batch scored as a whole."""

import dataclasses
import re
import types
from typing import Any

import numpy as np
import pytest
from waits import until

from podrl.engine.config import RolloutConfig
from podrl.learner.generation import Generator
from podrl.learner.settings import GRPOConfig
from podrl.rewards.compose import RewardConfig, RewardError, Rewards
from podrl.rollout.worker import FinishedSample
from podrl.types import NO_EPISODE, STOP_EOS, STOP_FAILED, Prompts, Rollouts, blank_columns

P, G = 3, 2
B = P * G
FUNCTIONS = """
import pathlib
import time

HERE = pathlib.Path(__file__).parent


def notes(prompts, completions, number, **fields):
    for completion in completions:
        (HERE / completion).touch()
    return [len(completion) + 0.1 * n for completion, n in zip(completions, number, strict=True)]


def size(prompts, completions, **fields):
    return [float(len(completions))] * len(completions)


def lowest(prompts, completions, **fields):
    return [float(min(int(completion[5:]) for completion in completions))] * len(completions)


def gated(prompts, completions, **fields):
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return [float(len(completions))] * len(completions)


def fails(prompts, completions, **fields):
    return [1.0 / (completion != "said 3") for completion in completions]
"""


class Engine:
    """An engine that ends its samples in the order `order`; it calls `wait(b)` before it ends sample b."""

    reward_model = env_client = None
    config = types.SimpleNamespace(rollout=lambda: RolloutConfig(max_tokens_to_generate=2), rollout_engine=object)

    def __init__(self, order, wait=lambda b: None, failed=()):
        self._order, self._wait, self._failed = order, wait, failed

    def generate(self, prompts, policy, *, group_size, step, sampling, ended):
        stop_B = np.array([STOP_FAILED if b in self._failed else STOP_EOS for b in range(B)])
        for b in self._order:
            self._wait(b)
            own = {"tokens": [7], "versions": [0], "drawn": {}}
            ended(FinishedSample(b // G, b % G, stop=int(stop_B[b]), completion=f"said {b}", episode=NO_EPISODE, **own))
        ones_BT = np.ones((B, 2), np.float32)
        rows = blank_columns((B, 2), pad_id=1) | {"mask_BT": ones_BT, "turn_reward_BT": ones_BT}
        rows |= {
            "group_B": np.arange(B) // G,
            "length_B": np.full(B, 2),
            "stop_B": stop_B,
            "version_BT": ones_BT.astype(np.int32),
        }
        texts = [f"said {b}" for b in range(B)]
        return Rollouts(prompts=prompts, completions=texts, episodes=[NO_EPISODE] * B, seconds=1.0, **rows)


def made(tmp_path, engine, *fns, watch=None, **settings):
    (tmp_path / "scores.py").write_text(FUNCTIONS)
    fields = {"number": list(range(P))}
    prompts = Prompts(np.ones((P, 1), np.int32), np.ones(P, np.int32), np.arange(P), ["p"] * P, fields, b"")
    config = RewardConfig(fns=tuple(fn if callable(fn) else f"{tmp_path}/scores.py:{fn}" for fn in fns), **settings)
    with Rewards(config) as rewards:
        if watch is not None:
            watch.append(rewards.describe_waits)
        generator = Generator(engine, rewards, GRPOConfig(num_generations=G))
        return generator(prompts, None, 0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("calls", "done"), [("sample", [3, 0, 4, 5, 2]), ("group", [4, 5, 2, 3])])
def test_a_reward_is_there_before_the_last_sample_ends(calls, done, tmp_path):
    """The engine ends its last sample only after the rewards of the ended samples are recorded."""
    order = [3, 0, 4, 5, 2, 1]

    def wait(b):
        if b != order[-1]:
            return
        wanted = [tmp_path / f"said {sample}" for sample in done]
        until(lambda: all(path.exists() for path in wanted), "the scoring of ended samples before the last sample ends")
        assert not (tmp_path / "said 1").exists()

    experience = made(tmp_path, Engine(order, wait), "notes", calls=calls)
    expected_B = [6 + 0.1 * (b // G) for b in range(B)]
    np.testing.assert_array_equal(experience.reward_FB, [expected_B])


@pytest.mark.parametrize("order", [range(B), [5, 0, 3, 1, 4, 2]])
def test_what_is_given_at_once_changes_no_reward(order, tmp_path):
    def here(prompts, completions, number, **fields):
        return [n - 0.3 * len(completions) for n in number]

    found = [
        made(tmp_path, Engine(order, failed=[2]), "notes", here, calls=calls) for calls in ("sample", "group", "batch")
    ]
    assert np.isnan(found[0].reward_FB[:, 2]).all() and np.isfinite(np.delete(found[0].reward_FB, 2, axis=1)).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other.reward_FB, found[0].reward_FB)
        np.testing.assert_array_equal(other.reward_B, found[0].reward_B)
    # `here` is a function object, not a name, so it scores the 5 samples that did not fail in one call.
    np.testing.assert_allclose(found[0].reward_FB[1, :2], [-1.5, -1.5])


@pytest.mark.parametrize(("calls", "whole"), [("sample", 1), ("group", G), ("batch", B)])
def test_what_belongs_together_is_in_one_call(calls, whole, tmp_path):
    """Sample 2 failed, so its group is scored without it. `size` gives a sample the number of samples in its call,
    `lowest` the lowest index among them."""
    reward_FB = made(tmp_path, Engine([5, 2, 0, 3, 1, 4], failed=[2]), "size", "lowest", calls=calls).reward_FB
    size_B, lowest_B = reward_FB
    for b in set(range(B)) - {2}:
        others = set(range(b - b % whole, b - b % whole + whole)) - {2}
        assert {lowest_B[other] for other in others} == {lowest_B[b]} and size_B[b] >= len(others)


def test_calls_that_are_dear_are_few_and_said_while_they_are_waited_for(tmp_path):
    """All other samples end while the first call runs, so one or two further calls score them all."""
    said: list[Any] = []

    def wait(b):
        if b == 4:
            until((tmp_path / "begun").exists)
        if b == 1:
            said.append(said[0]())
            (tmp_path / "go").touch()

    experience = made(tmp_path, Engine([5, 4, 0, 2, 3, 1], wait), "gated", watch=said, calls="sample", workers=1)
    assert re.fullmatch(r"reward function gated of (1 sample|2 samples), for \d+ s", said[1]) and said[0]() == ""
    assert sorted(experience.reward_FB[0]) in ([1, 5, 5, 5, 5, 5], [1, 1, 4, 4, 4, 4])


@pytest.mark.parametrize("calls", ["sample", "group", "batch"])
def test_a_failure_names_the_sample_by_its_place_in_the_batch(calls, tmp_path):
    with pytest.raises(RewardError, match=r"(?s)fails failed for sample 3 of 6 .*'said 3'.*division by zero"):
        made(tmp_path, Engine(range(B)), "fails", calls=calls)


def test_an_engine_that_does_not_tell_is_scored_at_its_end(tmp_path):
    class Silent(Engine):
        def generate(self, *args, ended, **options):
            return super().generate(*args, ended=lambda sample: None, **options)

    told, silent = (made(tmp_path, kind(range(B)), "notes", "size") for kind in (Engine, Silent))
    for field in dataclasses.fields(told):
        if field.name.startswith("reward_"):
            np.testing.assert_array_equal(getattr(told, field.name), getattr(silent, field.name))
