"""The rollout side of a step: generate a batch's samples and score them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from podrl.cluster.rl_cluster import RLCluster
from podrl.rewards.compose import Rewards
from podrl.types import Experience, Policy, Prompts


class Generator:
    """Turns prompts into experience; runs wherever the rollout mesh is, on one thread, batch after batch."""

    def __init__(self, cluster: RLCluster, rewards: Rewards, group_size: int):
        self._cluster, self._rewards, self._group_size = cluster, rewards, group_size

    def __call__(self, prompts: Prompts, policy: Policy, step: int) -> Experience:
        """Samples of every prompt with their rewards.

        Raises:
          RewardError: a reward function failed.
        """
        rollouts = self._cluster.generate(prompts, policy, group_size=self._group_size, step=step)
        started = time.monotonic()
        texts, fields = repeated(prompts.text, prompts.fields, self._group_size)
        reward_FB = self._rewards.score(texts, list(rollouts.completions), fields)
        return Experience(rollouts, reward_FB, self._rewards.combine(reward_FB), time.monotonic() - started)


def repeated(
    text: Sequence[str], fields: Mapping[str, Sequence[Any]], group_size: int
) -> tuple[list[str], dict[str, list[Any]]]:
    """Prompts and their fields repeated for every sample, group-major."""

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(group_size)]

    return repeat(text), {name: repeat(values) for name, values in fields.items()}
