"""Samples left out of the loss are counted: samples drawn = samples in the loss + samples left out, by reason."""

import types
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from podrl.engine.config import RolloutConfig
from podrl.learner.generation import Generator
from podrl.learner.grpo import GRPO
from podrl.learner.report import SampleReport
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.learner.source_weights import SourceWeights
from podrl.learner.traced_algorithm import TracedAlgorithm
from podrl.rewards.batch import OpenBatch, Scorer
from podrl.rundir.spans import Spans
from podrl.types import (
    NO_EPISODE,
    STOP_DEADLINE,
    STOP_ENV,
    STOP_EOS,
    STOP_FAILED,
    STOP_LENGTH,
    Experience,
    LeftOut,
    Policy,
    Prompts,
    Rollouts,
)

LIMIT, PROMPT, STEP = 5, 2, 9


class Engine:
    """An engine that draws samples of random lengths, stop reasons and versions; some samples are empty."""

    reward_model = env_client = None

    def __init__(self, rng):
        self._rng = rng
        rollout = lambda: RolloutConfig(max_tokens_to_generate=LIMIT)  # noqa: E731
        self.config = types.SimpleNamespace(rollout=rollout, rollout_engine=Engine)

    def generate(self, batch, policy, *, group_size, step, sampling=None, ended=None):
        rng, B, T = self._rng, len(batch.length_P) * group_size, PROMPT + LIMIT
        length_B = rng.integers(0, LIMIT + 1, B) * (rng.uniform(size=B) < 0.8)
        place_BT = np.tile(np.arange(T), (B, 1))
        given_BT = rng.uniform(size=(B, T)) < 0.2  # tokens that a tool appended
        mask_BT = ((place_BT >= PROMPT) & (place_BT < PROMPT + length_B[:, None]) & ~given_BT).astype(np.float32)
        stops = [STOP_EOS, STOP_LENGTH, STOP_ENV, STOP_DEADLINE, STOP_FAILED]
        return Rollouts(
            prompts=batch,
            group_B=np.arange(B) // group_size,
            tokens_BT=np.ones((B, T), np.int32),
            length_B=PROMPT + length_B,
            piece_BT=np.zeros((B, T), np.int16),
            mask_BT=mask_BT,
            logprob_BT=-mask_BT,
            kept_BT=np.ones((B, T), np.float32),
            raw_logprob_BT=-mask_BT,
            version_BT=np.where(mask_BT > 0, step - rng.integers(0, 4, (B, T)), -1),
            turn_reward_BT=np.zeros((B, T), np.float32),
            stop_B=rng.choice(stops, B, p=[0.5, 0.2, 0.2, 0.07, 0.03]),
            completions=["c"] * B,
            episodes=[NO_EPISODE] * B,
            seconds=1.0,
        )


class Grader:
    """Draws rewards from two values, so that some groups have equal rewards; one reward in fifty is missing."""

    names = ("fn",)

    def __init__(self, rng):
        self._rng = rng

    def open(self, texts, fields, *, group_B):
        return OpenBatch([Scorer("group", 1, self._submit)], texts, fields, group_B)

    def _submit(self, part):
        values = self._rng.choice([0.0, 1.0, np.nan], len(part.prompts), p=[0.6, 0.38, 0.02])
        job = Future()
        job.set_result(values.tolist())
        return job

    def take_late(self):
        return 0

    def combine(self, reward_FB):
        return reward_FB[0]


def made(config: Any, seed: int, prompts=6) -> Experience:
    """Makes a batch as the rollout side does."""
    rng, P = np.random.default_rng(seed), prompts * config.prompt_batches
    tokens_PT = np.ones((P, PROMPT), np.int32)
    asked = Prompts(tokens_PT, np.full(P, PROMPT), np.arange(P), ["p"] * P, {}, b"{}")
    engine: Any = Engine(rng)
    grader: Any = Grader(rng)
    return Generator(engine, grader, config)(asked, Policy({}, STEP), STEP)


def counted(config: Any, experience: Experience) -> tuple[dict[str, float], np.ndarray]:
    """Returns the metrics of a step's samples, and the weight that the algorithm itself gives every token in the
    gradient."""
    algorithm: Any = object.__new__(GRPO)
    algorithm._config = config
    algorithm._sources, algorithm._reward_kl = SourceWeights(config), types.SimpleNamespace(active=False)
    algorithm.pack = lambda *of: []
    algorithm.update = lambda *of: {}
    algorithm.state = algorithm.restore = None
    run: Any = types.SimpleNamespace(tracing=None, traced=None, spans=Spans())
    traced = TracedAlgorithm(algorithm, run, ["fn"], config)
    rewards, _ = traced.rewards(experience, None)
    if isinstance(config, PPOConfig):
        advantage_BT = np.where(experience.rollouts.mask_BT > 0, 0.5, 0.0)
        traced.pack(STEP, experience, None, advantage_BT)
    else:
        advantage_BT, _ = traced.advantages(experience, None, rewards)
        traced.pack(STEP, experience, None, advantage_BT)
    report = SampleReport(config, reward_names=("fn",), metric_fns=[], watched=(), skipped=lambda: 0)
    metrics = {**report.describe(experience), **traced.update(STEP, [])}
    weight_BT = config.loss_mask(experience) * advantage_BT
    if config.stale_bound is not None:
        weight_BT = weight_BT * (STEP - experience.rollouts.version_BT <= config.stale_bound)
    return metrics, weight_BT


CONFIGS: list[Any] = [
    GRPOConfig(num_generations=4, beta=0.0),
    GRPOConfig(num_generations=4, beta=0.04),
    GRPOConfig(num_generations=2, beta=0.0, overlong_filter=True, advantage_estimator="pass_at_k"),
    GRPOConfig(num_generations=4, beta=0.0, max_staleness=3, stale_bound=1, advantage_estimator="rloo"),
    GRPOConfig(num_generations=2, beta=0.0, dynamic_sampling=True),
    GRPOConfig(num_generations=1, beta=0.0, advantage_estimator="reinforce_plus_plus"),
    PPOConfig(num_generations=2, beta=0.0, overlong_filter=True),
    PPOConfig(num_generations=2, beta=0.0, critic_warmup=STEP + 1),
]


@pytest.mark.parametrize("which", range(len(CONFIGS)))
def test_what_leaves_the_loss_is_counted(which):
    config, seen = CONFIGS[which], set()
    for seed in range(40):
        experience = made(config, seed)
        metrics, weight_BT = counted(config, experience)
        left = {name: value for name, value in metrics.items() if name.startswith("loss/left_out/")}
        drawn = metrics.get("dynamic_sampling/groups_drawn", 6.0) * config.num_generations
        assert metrics["loss/samples"] + sum(left.values()) == drawn
        assert all(left.values()), "a reason that left out no sample has no metric"
        if config.advantage_alone and not getattr(config, "critic_warmup", 0):
            assert metrics["loss/samples"] == (weight_BT != 0).any(axis=1).sum()
        elif not getattr(config, "critic_warmup", 0):
            assert metrics["loss/samples"] == config.loss_mask(experience).any(axis=1).sum()
        else:
            assert metrics["loss/samples"] == 0
        seen |= set(left)
    assert "loss/left_out/no_tokens" in seen


def test_every_reason_is_met():
    found: set[str] = set()
    for config in CONFIGS:
        for seed in range(40):
            found |= set(counted(config, made(config, seed))[0])
    missing = {reason.name for reason in LeftOut if f"loss/left_out/{reason.name.lower()}" not in found}
    assert missing == {"NOT"}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "remax"])
def test_a_silent_sample_counts_in_its_group_and_takes_nobody_out(estimator):
    """Sample 1 is empty and has the reward 3, which counts in the baselines that are plain means over the group."""
    config: Any = GRPOConfig(num_generations=4, beta=0.0, advantage_estimator=estimator, advantage_scale="none")
    mask_BT = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]], np.float32)
    asked = Prompts(np.ones((1, PROMPT), np.int32), np.full(1, PROMPT), np.arange(1), ["p"], {}, b"{}")
    arrays: Any = (
        np.ones((4, 4), np.int32),
        np.zeros(4, np.int32),
        PROMPT + mask_BT.sum(axis=1).astype(int),
        np.zeros((4, 4), np.int16),
        mask_BT,
        -mask_BT,
    )
    more: Any = (np.ones((4, 4)), -mask_BT, np.zeros((4, 4), np.int32))
    turn_reward_BT = np.zeros((4, 4), np.float32)
    turn_reward_BT[1, PROMPT - 1] = 2.0  # from the environment; the other 1 is from a reward function
    build: Any = Rollouts
    rollouts = build(asked, *arrays, *more, turn_reward_BT, np.zeros(4, int), ["c"] * 4, [NO_EPISODE] * 4, 1.0)
    reward_B = np.array([1.0, 3.0, 0.0, 0.0])
    experience = Experience(rollouts, reward_B[None], reward_B, np.zeros(4), 0.0, {}, np.zeros(4, np.int32))
    metrics, weight_BT = counted(config, experience)
    expected = {
        "grpo": [0.0, -1.0, -1.0],
        "rloo": [0.0, -4 / 3, -4 / 3],
        "opo": [0.5, -0.5, -0.5],  # the empty sample has length 0, so it has no weight in opo's baseline
        "gpg": [0.0, -1.0, -1.0],
        "remax": [1.0, 0.0, 0.0],
    }[estimator]
    np.testing.assert_allclose(weight_BT[[0, 2, 3], 2], expected, atol=1e-6)
    assert not weight_BT[1].any() and metrics["loss/left_out/no_tokens"] == 1.0 and metrics["reward/mean"] == 1.0
