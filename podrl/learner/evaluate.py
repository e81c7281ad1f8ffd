"""Scores a policy on held-out records, greedy and sampled: the run's own rewards, and accuracies."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from podrl.cluster.config import Mode
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Natural, NonNegative, section
from podrl.data.config import AUTO, DataConfig, SourceConfig
from podrl.learner.experience import share_of
from podrl.rewards.reference import majority
from podrl.rewards.text import TextConfig
from podrl.rollout.config import Sampling
from podrl.rundir.spans import Spans
from podrl.types import BatchError, Policy, Prompts, Rollouts

# Evaluation draws from keys no training step uses.
_EVAL_STEP = 1 << 30


@section("eval.sets")
@dataclasses.dataclass(frozen=True)
class SetConfig:
    """Settings of one set of records to evaluate on beside those that are held out of the training data.

    Attributes:
      name: its metrics are eval/NAME/*.
      path: as data.path; all its records are for evaluation.
      problems: records used, from the first on; None for as many as eval.problems.
      samples: completions of a record at `temperature`, for mean@k, pass@k and majority@k; None is eval.samples, 0
        leaves greedy ones alone.
      temperature: of those samples.
      max_tokens_to_generate: of a sample; None is rollout.max_tokens_to_generate, the most there can be.
      every: 2 scores it in every other evaluation, and so on; the first and the last one have all sets.
      reward: reward functions of its records, instead of reward.fns.
      env, split, template, system_prompt, question_field, answer_field: as of data.sources.
    """

    name: str
    path: str
    problems: Count | None = None
    samples: Natural | None = None
    temperature: NonNegative = 1.0
    max_tokens_to_generate: Count | None = None
    every: Count = 1
    reward: tuple[str, ...] = ()
    env: str = ""
    split: str = ""
    template: Literal["", "chat", "plain"] = ""
    system_prompt: str = AUTO
    question_field: str = ""
    answer_field: str = ""

    def __post_init__(self) -> None:
        if not _SET.fullmatch(self.name):
            raise ValueError(
                f"eval.sets: name={self.name!r} must be letters, digits, '_' and '-', and not begin as metrics of the "
                f"held-out records do ({', '.join(_TAKEN)})."
            )

    def data(self, data: DataConfig) -> DataConfig:
        """Settings of its records alone, where `data` are the job's."""
        own = {name: getattr(self, name) for name in (*_AS_SOURCE, "name")}
        return dataclasses.replace(data, path="", sources=(SourceConfig(**own),), eval_path="", eval_fraction=0.0)


_TAKEN = ("greedy", "sampled", "error", "pair", "records")
_SET = re.compile(rf"(?!(?:{'|'.join(_TAKEN)}))[A-Za-z0-9_-]+")
_AS_SOURCE = ("path", "split", "template", "system_prompt", "question_field", "answer_field", "reward", "env")


@section("eval")
@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation: number of prompts, of samples per prompt, of samples shown, further sets, and when.

    Attributes:
      problems: held-out prompts used; 0 leaves the evaluation on them out.
      samples: completions per prompt at temperature 1, for the sampled rewards, accuracies and pass@k.
      show: samples printed to samples.jsonl per evaluation and set.
      sets: further sets of records.
      beside: evaluate a copy of the weights in pieces while the trainer updates, instead of stopping training. The
        numbers are the same, and written a few steps later; those of the last step are waited for.
    """

    problems: Natural = 256
    samples: Count = 4
    show: Natural = 4
    sets: tuple[SetConfig, ...] = ()
    beside: bool = False

    def __post_init__(self) -> None:
        names = [one.name for one in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"eval.sets: {twice[0]!r} is the name of two sets: give each its own.")


# (completion, reference answer) -> named 0/1 scores: answer, partial, format.
Scorer = Callable[[str, str], dict[str, float]]
# (samples, samples per prompt) -> rewards of every sample: 'reward' in all, 'reward/NAME' of a function; NaN for none.
RewardsOf = Callable[[Rollouts, int], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A set of records as an evaluation uses it.

    Attributes:
      batches: its prompts; none where other hosts have them all.
      sampled: how the samples beside greedy completions are drawn.
      samples: of them for each prompt.
      scorer: accuracies of a completion against the record's `answer`; None where the task has none.
      name: of a set of eval.sets; '' for the records held out of the training data.
      every: in which evaluations it is scored: every n-th.
    """

    batches: Sequence[Prompts]
    sampled: Sampling
    samples: int
    scorer: Scorer | None = None
    name: str = ""
    every: int = 1


class Evaluator:
    """Greedy and sampled scores of a policy on fixed prompts.

    Attributes:
      rewards: scores samples by the run's reward functions; None leaves them out.
      beside: samples of a piece where it is evaluated beside training; None where training stops for it.
    """

    def __init__(
        self,
        cluster: RLCluster,
        batches: Sequence[Prompts],
        config: EvalConfig,
        *,
        scorer: Scorer | None = None,
        rewards: RewardsOf | None = None,
        sets: Sequence[HeldOut] = (),
        nth: Callable[[int], int] = lambda step: 0,
    ):
        """Generates nothing yet.

        Args:
          cluster: that generates.
          batches: the prompts.
          config: number of samples.
          scorer: accuracies of a completion against the record's `answer`; None where the task has none.
          rewards: e.g. `learner.rewards_of`, which scores as that learner trains.
          sets: further prompts, opened from `config.sets`.
          nth: number of the evaluation after a step, from 0 on; 0 for the last too, which has all sets.
        """
        sampled = Sampling(temperature=1.0, max_new=cluster.config.rollout().max_tokens_to_generate)
        own = [HeldOut(batches, sampled, config.samples, scorer)] if batches else []
        self._cluster, self._sets, self._show, self._nth = cluster, [*own, *sets], config.show, nth
        self.rewards = rewards
        self.beside = cluster.config.rollout().lanes if config.beside else None

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns (eval/* metrics of a policy, a few samples)."""
        scores, shown = self.scores(policy, step)
        return summarised(scores), shown

    def scores(
        self, policy: Policy, step: int, part: tuple[int, int] = (0, 1)
    ) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """Scores a policy on the prompts, or on one of several shares of them.

        Args:
          policy: weights on the rollout mesh.
          step: after which they are evaluated: which sets are due.
          part: the share's number, and how many there are.

        Returns:
          Metric -> score of every sample of every prompt, (P, G), NaN for none; a few samples. Of no prompts, nothing.
        """
        work = self.in_pieces(policy, step, part)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def in_pieces(
        self, policy: Policy, step: int, part: tuple[int, int] = (0, 1)
    ) -> Generator[None, None, tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
        """Scores as `scores` does, a piece at a time; yields after each."""
        found: dict[str, np.ndarray] = {}
        shown: list[dict[str, Any]] = []
        for whole in self._sets:
            batches = [cut for prompts in whole.batches if len((cut := share_of(prompts, *part)).length_P)]
            if not batches or self._nth(step) % whole.every:
                continue
            held = dataclasses.replace(whole, batches=batches)
            greedy = Sampling(temperature=0.0, max_new=held.sampled.max_new)
            scores, some = yield from self._score(policy, held, "greedy", greedy, 1)
            if held.samples:
                more, _ = yield from self._score(policy, held, "sampled", held.sampled, held.samples)
                scores |= more
            if held.name:
                scores = {f"eval/{held.name}/{key.removeprefix('eval/')}": score for key, score in scores.items()}
                some = [{"set": held.name, **record} for record in some]
            found |= scores
            shown += some
        return found, shown

    def _score(
        self, policy: Policy, held: HeldOut, name: str, sampling: Sampling, group_size: int
    ) -> Generator[None, None, tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
        scores: dict[str, list[float]] = {}
        shown: list[dict[str, Any]] = []
        for prompts in _pieces(held.batches, group_size, self.beside):
            rollouts = self._cluster.generate(
                prompts, policy, mode=Mode.EVAL, group_size=group_size, step=_EVAL_STEP, sampling=sampling
            )
            rewards = self.rewards(rollouts, group_size) if self.rewards else {}
            votes = [_ANSWERS.answer_of(completion) or completion for completion in rollouts.completions]
            for b, completion in enumerate(rollouts.completions):
                p = b // group_size
                record = {"evaluation": name, "prompt": prompts.text[p], "completion": completion}
                values: dict[str, float] = {}
                if held.scorer is not None:
                    record["truth"] = str(prompts.fields["answer"][p])
                    values = held.scorer(completion, record["truth"])
                given = {key: float(reward_B[b]) for key, reward_B in rewards.items()}
                for key, value in (values | given).items():
                    scores.setdefault(key, []).append(value)
                if len(shown) < self._show:
                    turns = rollouts.episodes[b]["turns"]
                    told = {"rewards": given} if given else {}
                    shown.append({**record, **values, **told, **({"turns": turns} if turns else {})})
            if held.name and group_size > 1 and held.scorer is not None:
                right = scores["answer"][-len(votes) :]
                groups = [slice(b, b + group_size) for b in range(0, len(votes), group_size)]
                scores.setdefault(_MAJORITY, []).extend(majority(votes[own], right[own]) for own in groups)
            yield
        shaped = {key: np.asarray(v).reshape(-1, 1 if key == _MAJORITY else group_size) for key, v in scores.items()}
        return {f"eval/{name}_{key}": value_PG for key, value_PG in shaped.items()}, shown


def _pieces(batches: Sequence[Prompts], group_size: int, most: int | None) -> Sequence[Prompts]:
    """Cuts batches of prompts into pieces of at most `most` samples, or of one prompt; None leaves them whole."""
    if most is None:
        return batches
    cuts = [math.ceil(len(prompts.length_P) / max(most // group_size, 1)) for prompts in batches]
    return [share_of(prompts, i, cut) for prompts, cut in zip(batches, cuts, strict=True) for i in range(cut)]


class Beside:
    """One evaluation at a time, made in pieces on the thread that generates, while that has nothing else to do.

    Between a batch that is made and the next weights the rollout mesh waits for the trainer. As many pieces are made
    there as the last of these gaps had room for.
    """

    def __init__(self, evaluator: Evaluator, spans: Spans):
        """Begins nothing yet."""
        self._evaluator, self._spans, self._step = evaluator, spans, 0
        self._work: Generator[None, None, Any] | None = None
        self._found: tuple[int, dict[str, float], list[dict[str, Any]]] | None = None
        self._error: BatchError | None = None
        self._closed, self._began = True, None
        self._gap_s = self._piece_s = 0.0

    def begin(self, policy: Policy, step: int) -> None:
        """Begins the evaluation after a step; the policy must stay as it is. Called on the thread."""
        self._step, self._work = step, self._evaluator.in_pieces(policy, step)

    @property
    def open(self) -> bool:
        """True while an evaluation is begun and not made."""
        return self._work is not None

    def open_gap(self) -> None:
        """Allows pieces until `close_gap`; called by the loop, which has `fill` called when the thread is free."""
        self._closed, self._began = False, None

    def fill(self) -> None:
        """Makes pieces until the gap ends, or is expected to; called on the thread."""
        self._began = began = time.monotonic()
        while self.open and not self._closed and time.monotonic() + self._piece_s < began + self._gap_s:
            self._advance()

    def close_gap(self) -> None:
        """Ends the gap after the piece that is being made; called by the loop when it has the next weights."""
        self._closed = True
        self._gap_s = 0.0 if self._began is None else time.monotonic() - self._began

    def finish(self) -> None:
        """Makes all pieces that are left; called on the thread."""
        while self.open:
            self._advance()

    def take(self) -> tuple[int, dict[str, float], list[dict[str, Any]]] | None:
        """Returns (step, eval/* metrics, a few samples) of the evaluation that was made since the last call.

        Raises:
          BatchError: a reward function failed on it, or a service it asks was away.
        """
        if (error := self._error) is not None:
            self._error = None
            raise error
        found, self._found = self._found, None
        return found

    def _advance(self) -> None:
        assert self._work is not None
        started = time.monotonic()
        try:
            with self._spans.span("evaluation", lane="rollout"):
                next(self._work)
            self._piece_s = time.monotonic() - started
        except StopIteration as end:
            scores, shown = end.value
            self._work, self._found = None, (self._step, summarised(scores), shown)
        except BatchError as error:  # raised where the evaluation is waited for
            self._work, self._error = None, error


def is_beside(evaluator: Any) -> bool:
    """True if evaluations are made beside training; a user's own evaluator knows nothing of that."""
    return getattr(evaluator, "beside", None) is not None


_MAJORITY = "majority"
_ANSWERS = TextConfig()


def summarised(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of (P, G) scores over samples and prompts, the standard error of each over prompts, and numbers of prompts.

    Samples without a score (NaN) are left out.
    """
    scores = dict(scores)
    several = {name: score_PG for name, score_PG in scores.items() if score_PG.shape[1] > 1}
    for name, answer_PG in several.items():
        if name == "eval/sampled_answer":
            scores["eval/sampled_pass"] = answer_PG.max(axis=1, keepdims=True)
        elif name.endswith("/sampled_answer"):
            scores[f"{name.removesuffix('answer')}pass"] = answer_PG.max(axis=1, keepdims=True)
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
    counts: dict[str, float] = {} if scores else {"eval/records": 0.0}
    for name, score_PG in scores.items():
        one = name.split("/")[1]
        records = "eval/records" if one.startswith(_TAKEN) else f"eval/{one}/records"
        counts[records] = float(max(counts.get(records, 0), len(score_PG)))
    return metrics | errors | counts
