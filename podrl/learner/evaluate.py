"""Scores a policy on held-out records, greedy and sampled: the run's own rewards, and accuracies."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl.cluster.config import Mode
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Natural, section
from podrl.rollout.config import Sampling
from podrl.types import Policy, Prompts, Rollouts

# Evaluation draws from keys no training step uses.
_EVAL_STEP = 1 << 30


@section("eval")
@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation: number of prompts, of samples per prompt, of samples shown.

    Attributes:
      problems: held-out prompts used; 0 turns evaluation off.
      samples: completions per prompt at temperature 1, for the sampled rewards, accuracies and pass@k.
      show: samples printed to samples.jsonl per evaluation.
    """

    problems: Natural = 256
    samples: Count = 4
    show: Natural = 4


# (completion, reference answer) -> named 0/1 scores: answer, partial, format.
Scorer = Callable[[str, str], dict[str, float]]
# (samples, samples per prompt) -> rewards of every sample: 'reward' in all, 'reward/NAME' of a function; NaN for none.
RewardsOf = Callable[[Rollouts, int], Mapping[str, np.ndarray]]


class Evaluator:
    """Greedy and temperature-1 scores of a policy on fixed prompts.

    Attributes:
      rewards: scores samples by the run's reward functions; None leaves them out.
    """

    def __init__(
        self,
        cluster: RLCluster,
        batches: Sequence[Prompts],
        config: EvalConfig,
        *,
        scorer: Scorer | None = None,
        rewards: RewardsOf | None = None,
    ):
        """Generates nothing yet.

        Args:
          cluster: that generates.
          batches: the prompts.
          config: number of samples.
          scorer: accuracies of a completion against the record's `answer`; None where the task has none.
          rewards: e.g. `learner.rewards_of`, which scores as that learner trains.
        """
        self._cluster, self._batches, self._config = cluster, batches, config
        self._scorer, self.rewards = scorer, rewards

    @property
    def problems(self) -> int:
        """Number of prompts that are scored."""
        return sum(len(prompts.length_P) for prompts in self._batches)

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns (eval/* metrics of a policy, a few samples)."""
        scores, shown = self.scores(policy)
        return summarised(scores), shown

    def scores(self, policy: Policy) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """Returns (metric -> score of every sample of every prompt, (P, G), NaN for none; a few samples)."""
        limit = self._cluster.config.rollout().max_tokens_to_generate
        greedy, shown = self._score(policy, "greedy", Sampling(temperature=0.0, max_new=limit), 1)
        sampled, _ = self._score(policy, "sampled", Sampling(temperature=1.0, max_new=limit), self._config.samples)
        return greedy | sampled, shown

    def _score(
        self, policy: Policy, name: str, sampling: Sampling, group_size: int
    ) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        scores: dict[str, list[float]] = {}
        shown: list[dict[str, Any]] = []
        for prompts in self._batches:
            rollouts = self._cluster.generate(
                prompts, policy, mode=Mode.EVAL, group_size=group_size, step=_EVAL_STEP, sampling=sampling
            )
            rewards = self.rewards(rollouts, group_size) if self.rewards else {}
            for b, completion in enumerate(rollouts.completions):
                p = b // group_size
                record = {"evaluation": name, "prompt": prompts.text[p], "completion": completion}
                values: dict[str, float] = {}
                if self._scorer is not None:
                    record["truth"] = str(prompts.fields["answer"][p])
                    values = self._scorer(completion, record["truth"])
                given = {key: float(reward_B[b]) for key, reward_B in rewards.items()}
                for key, value in (values | given).items():
                    scores.setdefault(key, []).append(value)
                if len(shown) < self._config.show:
                    turns = rollouts.episodes[b]["turns"]
                    told = {"rewards": given} if given else {}
                    shown.append({**record, **values, **told, **({"turns": turns} if turns else {})})
        return {f"eval/{name}_{key}": np.asarray(v).reshape(-1, group_size) for key, v in scores.items()}, shown


def summarised(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of (P, G) scores over samples and prompts, the standard error of each over prompts, and their number.

    Samples without a score (NaN) are left out.
    """
    scores = dict(scores)
    answer_PG = scores.get("eval/sampled_answer")
    if answer_PG is not None and answer_PG.shape[1] > 1:
        scores["eval/sampled_pass"] = answer_PG.max(axis=1, keepdims=True)
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, score_PG in scores.items():
        known_P = ~np.isnan(score_PG).all(axis=1)
        if not known_P.any():
            continue
        metrics[name] = float(np.nanmean(score_PG) if np.isnan(score_PG).any() else score_PG.mean())
        mean_P = np.nanmean(score_PG[known_P], axis=1)
        if len(mean_P) > 1:
            errors[f"eval/error/{name.removeprefix('eval/')}"] = float(mean_P.std(ddof=1) / math.sqrt(len(mean_P)))
    counts = {"eval/records": float(max((len(score_PG) for score_PG in scores.values()), default=0))}
    return metrics | errors | counts
