"""Accuracy on held-out prompts, greedy and sampled, before, during and after training."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrl.cluster.config import Mode
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Natural, section
from podrl.rollout.config import Sampling
from podrl.types import Policy, Prompts

# Evaluation draws from keys no training step uses.
_EVAL_STEP = 1 << 30


@section("eval")
@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation: number of prompts, of samples per prompt, of samples shown.

    Attributes:
      problems: held-out prompts used; 0 turns evaluation off.
      samples: completions per prompt at temperature 1, for the sampled accuracies and pass@k.
      show: samples printed to samples.jsonl per evaluation.
    """

    problems: Natural = 256
    samples: Count = 4
    show: Natural = 4


# (completion, reference answer) -> named 0/1 scores: answer, partial, format.
Scorer = Callable[[str, str], dict[str, float]]


class AccuracyEvaluator:
    """Greedy and temperature-1 accuracies of a policy on fixed prompts that carry an `answer` field."""

    def __init__(self, cluster: RLCluster, batches: Sequence[Prompts], config: EvalConfig, scorer: Scorer):
        self._cluster, self._batches, self._config, self._scorer = cluster, batches, config, scorer

    @property
    def problems(self) -> int:
        """Number of prompts that are scored."""
        return sum(len(prompts.length_P) for prompts in self._batches)

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns (eval/{greedy,sampled}_{answer,partial,format} and eval/sampled_pass of a policy, a few samples)."""
        limit = self._cluster.config.rollout().max_tokens_to_generate
        greedy, shown = self._score(policy, "greedy", Sampling(temperature=0.0, max_new=limit), 1)
        k = self._config.samples
        sampled, _ = self._score(policy, "sampled", Sampling(temperature=1.0, max_new=limit), k)
        metrics = {f"eval/greedy_{name}": float(scores_PG.mean()) for name, scores_PG in greedy.items()}
        metrics |= {f"eval/sampled_{name}": float(scores_PG.mean()) for name, scores_PG in sampled.items()}
        if k > 1:
            metrics["eval/sampled_pass"] = float(sampled["answer"].max(axis=1).mean())
        return metrics, shown

    def _score(
        self, policy: Policy, name: str, sampling: Sampling, group_size: int
    ) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        scores: dict[str, list[float]] = {}
        shown: list[dict[str, Any]] = []
        for prompts in self._batches:
            rollouts = self._cluster.generate(
                prompts, policy, mode=Mode.EVAL, group_size=group_size, step=_EVAL_STEP, sampling=sampling
            )
            for b, completion in enumerate(rollouts.completions):
                p = b // group_size
                answer = str(prompts.fields["answer"][p])
                values = self._scorer(completion, answer)
                for key, value in values.items():
                    scores.setdefault(key, []).append(value)
                if len(shown) < self._config.show:
                    record = {"evaluation": name, "prompt": prompts.text[p], "completion": completion}
                    turns = rollouts.episodes[b]["turns"]
                    shown.append({**record, "truth": answer, **values, **({"turns": turns} if turns else {})})
        return {key: np.asarray(values).reshape(-1, group_size) for key, values in scores.items()}, shown
