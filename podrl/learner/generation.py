"""The rollout side of a step: generate a batch's samples, score them, and replace groups that teach nothing."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.groups import join, select, take_prompts
from podrl.learner.settings import AlgorithmConfig
from podrl.rewards.compose import Rewards
from podrl.rollout.config import Sampling
from podrl.types import Experience, Policy, Prompts, Rollouts


class Generator:
    """Turns prompts into experience; runs wherever the rollout mesh is, on one thread, batch after batch."""

    def __init__(self, cluster: RLCluster, rewards: Rewards, config: AlgorithmConfig):
        settings: Any = config
        self._cluster, self._rewards, self._config = cluster, rewards, config
        self._group_size: int = settings.num_generations
        self._greedy = config.estimator().needs_greedy
        self._limit = cluster.config.rollout().max_tokens_to_generate

    def __call__(self, prompts: Prompts, policy: Policy, step: int) -> Experience:
        """Samples of every prompt with their rewards; with dynamic sampling, of the first whose groups differ.

        Args:
          prompts: `config.prompt_batches` batches; what dynamic sampling does not need of them is passed over.
          policy: weights on the rollout mesh.
          step: part of every sample's random key.

        Raises:
          RewardError: a reward function failed.
        """
        drawn = len(prompts.length_P)
        wanted = drawn // self._config.prompt_batches
        rollouts, reward_FB, seconds = self._scored(take_prompts(prompts, np.arange(wanted)), policy, step)
        counts: dict[str, float] = {}
        if self._config.dynamic_sampling:
            rollouts, reward_FB, seconds, counts = self._refilled(
                prompts, policy, step, wanted, (rollouts, reward_FB, seconds)
            )
        reward_B = self._config.shaped(self._rewards.combine(reward_FB), rollouts, self._limit)
        greedy_B = np.zeros_like(reward_B)
        if self._greedy:
            greedy_B, more = self._greedy_rewards(rollouts.prompts, policy, step)
            seconds += more
        return Experience(rollouts, reward_FB, reward_B, greedy_B, seconds, counts)

    def _scored(
        self, prompts: Prompts, policy: Policy, step: int, *, group_size: int = 0, sampling: Sampling | None = None
    ) -> tuple[Rollouts, np.ndarray, float]:
        """(samples, reward of each function, seconds of scoring)."""
        group_size = group_size or self._group_size
        rollouts = self._cluster.generate(prompts, policy, group_size=group_size, step=step, sampling=sampling)
        started = time.monotonic()
        texts, fields = repeated(prompts.text, prompts.fields, group_size)
        reward_FB = self._rewards.score(texts, list(rollouts.completions), fields)
        if self._cluster.reward_model is not None:
            score_B = self._cluster.reward_model.score_samples(rollouts, fields)
            reward_FB = np.concatenate([reward_FB, score_B[None]])
        return rollouts, reward_FB, time.monotonic() - started

    def _refilled(
        self,
        prompts: Prompts,
        policy: Policy,
        step: int,
        wanted: int,
        first: tuple[Rollouts, np.ndarray, float],
    ) -> tuple[Rollouts, np.ndarray, float, dict[str, float]]:
        """Samples more prompts until `wanted` groups have a signal or the prompts are used up (DAPO, eq. 11).

        As many prompts are asked at a time as the share of groups with a signal so far makes likely to be enough.
        Places that stay open go to the first groups without a signal, which the loss ignores.
        """
        parts, seconds = [first], first[2]
        signal = self._signal(first[1])
        asked = wanted
        while signal.sum() < wanted and asked < len(prompts.length_P):
            share = max(float(signal.mean()), 0.125)
            count = math.ceil((wanted - int(signal.sum())) / share)
            rows = np.arange(asked, min(asked + count, len(prompts.length_P)))
            parts.append(self._scored(take_prompts(prompts, rows), policy, step))
            signal = np.concatenate([signal, self._signal(parts[-1][1])])
            seconds += parts[-1][2]
            asked += len(rows)
        rollouts = join([part[0] for part in parts], prompts)
        reward_FB = np.concatenate([part[1] for part in parts], axis=1)
        chosen = np.sort(np.concatenate([np.flatnonzero(signal)[:wanted], np.flatnonzero(~signal)])[:wanted])
        samples = (chosen[:, None] * self._group_size + np.arange(self._group_size)).ravel()
        counts = {
            "dynamic_sampling/groups_drawn": float(asked),
            "dynamic_sampling/groups_replaced": float((~signal[:wanted]).sum() - (~signal[chosen]).sum()),
            "dynamic_sampling/groups_left_without_signal": float((~signal[chosen]).sum()),
        }
        return select(rollouts, chosen, self._group_size), reward_FB[:, samples], seconds, counts

    def _signal(self, reward_FB: np.ndarray) -> np.ndarray:
        """Which groups have rewards that differ."""
        return np.ptp(self._rewards.combine(reward_FB).reshape(-1, self._group_size), axis=1) > 0

    def _greedy_rewards(self, prompts: Prompts, policy: Policy, step: int) -> tuple[np.ndarray, float]:
        """Reward of the greedy completion, repeated for each sample of its prompt."""
        sampling = Sampling(
            temperature=0.0, max_new=self._limit, stop_strings=self._cluster.config.rollout().stop_strings
        )
        rollouts, reward_FB, seconds = self._scored(prompts, policy, step, group_size=1, sampling=sampling)
        reward_P = self._config.shaped(self._rewards.combine(reward_FB), rollouts, self._limit)
        return np.repeat(reward_P, self._group_size), seconds + rollouts.seconds


def repeated(
    text: Sequence[str], fields: Mapping[str, Sequence[Any]], group_size: int
) -> tuple[list[str], dict[str, list[Any]]]:
    """Prompts and their fields repeated for every sample, group-major."""

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(group_size)]

    return repeat(text), {name: repeat(values) for name, values in fields.items()}
