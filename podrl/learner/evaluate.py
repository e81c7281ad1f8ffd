"""Scores a policy on held-out records by the run's rewards and by accuracies, with greedy and sampled completions."""

import dataclasses
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from podrl.cluster.config import Mode
from podrl.cluster.engines import able
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Natural, NonNegative, section
from podrl.data.config import AUTO, DataConfig, SourceConfig
from podrl.data.dialogue import Dialogue
from podrl.engine.config import Sampling
from podrl.learner.experience import places, share_of, take_prompts
from podrl.learner.scored_text import scored_text
from podrl.mappings import LogRecord
from podrl.rewards.reference import majority
from podrl.rewards.text import TextConfig
from podrl.types import Policy, Prompts, Rollouts

# Evaluation uses random keys that no training step uses.
_EVAL_STEP = 1 << 30


@section("eval.sets")
@dataclasses.dataclass(frozen=True)
class SetConfig:
    """Settings of a further set of records to evaluate on, beside the records held out of the training data.

    Attributes:
      name: name of the set; the set's metrics are eval/NAME/*.
      path: source of the set's records, as in data.path; all of its records are for evaluation.
      problems: number of records used, from the first on; None takes eval.problems.
      samples: number of completions per record at `temperature`, for mean@k, pass@k and majority@k; None is
        eval.samples, 0 leaves only the greedy completion.
      temperature: sampling temperature of the set's completions other than the greedy one.
      max_tokens_to_generate: largest number of tokens of a completion; None is rollout.max_tokens_to_generate, which is
        also the largest value.
      every: number n; the set is scored in every n-th evaluation. The first and the last evaluation score all sets.
      reward: reward functions of the set's records, in place of reward.fns. A resumed run must keep the functions that
        its sources and sets name, because checkpoints have a row of rewards for each function. A set's other settings
        may change.
      env: environment of the set's records, one of env.others; '' for env.environment.
      split: beginning of the names of the files used if `path` is a directory, such as 'train'.
      template: form of the set's prompts, as in data.template; '' takes data.template.
      system_prompt: instructions before the set's questions, as in data.sources.
      question_field, answer_field: fields of the question and of the answer; '' takes the same key of `data`.
      arguments: settings of the set's dataset of reasoning-gym; by default data.arguments if the training data have the
        same dataset, else the dataset's own defaults.
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
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not _SET.fullmatch(self.name):
            raise ValueError(
                f"eval.sets: name={self.name!r} must be letters, digits, '_' and '-', and not begin as metrics of the "
                f"held-out records do ({', '.join((*_TAKEN, _GROUP))})."
            )

    def data(self, data: DataConfig) -> DataConfig:
        """Returns data settings with only this set's records; `data` are the job's settings."""
        own = {name: getattr(self, name) for name in (*_AS_SOURCE, "name")}
        same = self.path in (data.path, *(source.path for source in data.sources))
        changed = {"path": "", "eval_path": "", "eval_fraction": 0.0, "arguments": data.arguments if same else {}}
        return dataclasses.replace(data, sources=(SourceConfig(**own),), **changed)


_TAKEN = ("greedy", "sampled", "error", "pair", "records")
_GROUP = "group_"
_SET = re.compile(rf"(?!(?:{'|'.join((*_TAKEN, _GROUP))}))[A-Za-z0-9_-]+")
_AS_SOURCE = ("path", "split", "template", "system_prompt", "question_field", "answer_field", "reward", "env")
_AS_SOURCE += ("arguments",)


# A function that keeps the results of an evaluation. Its arguments are the evaluation's step, and the mean of each
# record by metric.
Keep = Callable[[int, Mapping[str, list[float | None]]], None]
Scored = tuple[dict[str, np.ndarray], list[LogRecord]]  # the result of `Evaluator.scores`


@section(
    "eval",
    former={
        "beside": "training stops for evaluations; with --topology=split, roles.eval.hosts names hosts that evaluate "
        "meanwhile."
    },
)
@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Settings of evaluations: numbers of prompts, of samples per prompt and of samples shown, and further sets.

    Attributes:
      problems: number of held-out prompts used; 0 leaves out the evaluation on held-out prompts.
      samples: number of sampled completions per prompt, for the sampled rewards, accuracies and pass@k. Held-out
        prompts are sampled at temperature 1, prompts of a further set at the temperature of the set.
      show: number of samples written to samples.jsonl per evaluation and set.
      sets: further sets of records.
    """

    problems: Natural = 256
    samples: Count = 4
    show: Natural = 4
    sets: tuple[SetConfig, ...] = ()

    def __post_init__(self) -> None:
        names = [one.name for one in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"eval.sets: {twice[0]!r} is the name of two sets: give each set a name of its own.")


# (completion, reference answer) -> named 0/1 scores: answer, partial, format.
Scorer = Callable[[str, Any], dict[str, float]]
# samples -> rewards of every sample, (B,), NaN for none: 'reward' is the total, 'reward/NAME' is from one function.
RewardsOf = Callable[[Rollouts], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A set of records as an evaluation uses it.

    Attributes:
      batches: prompts of the set; empty if other hosts evaluate all of them.
      sampled: sampling settings of the completions other than the greedy one.
      samples: number of sampled completions per prompt.
      scorer: function that computes a completion's accuracies against the record's `answer`; None without answers.
      name: name of a set of eval.sets; '' for the records held out of the training data.
      every: number n; the set is scored in every n-th evaluation.
    """

    batches: Sequence[Prompts]
    sampled: Sampling
    samples: int
    scorer: Scorer | None = None
    name: str = ""
    every: int = 1


def stop_texts(cluster: RLCluster) -> tuple[str, ...]:
    """Returns training's stop strings that are text; stop strings that are special tokens end every sample anyway."""
    strings = cluster.config.rollout().stop_strings
    return Dialogue(cluster.tokenizer).stops(strings)[0] if strings else ()


class Evaluator:
    """Scores a policy on fixed prompts, with greedy and with sampled completions.

    Attributes:
      rewards: scores samples by the run's reward functions; None leaves rewards out.
      keep: function called with the step of each evaluation and the mean of every record by metric; the means are used
        for paired intervals.
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
        groups: Sequence[str] = (),
        sampled: Sampling | None = None,
    ):
        """Stores the prompts and settings.

        Args:
          cluster: the cluster that generates.
          batches: the held-out prompts.
          config: numbers of completions per prompt and of samples to show.
          scorer: function that computes a completion's accuracies against the record's `answer`; None without answers.
          rewards: scores samples by reward functions; `learner.rewards_of` uses the learner's functions.
          sets: further prompts, opened from `config.sets`.
          nth: function from a step to the number of the evaluation after this step, from 0 on; it returns 0 for the
            last evaluation, too, so that all sets are scored.
          groups: names of groups of held-out records, as in the field `group`; each has metrics eval/group_NAME/*.
          sampled: sampling settings of the held-out prompts' completions; the greedy completion has temperature 0
            instead. None is temperature 1 without filters. With temperature 0 there is only the greedy completion.
        """
        sampled = sampled or Sampling(max_new=cluster.config.rollout().max_tokens_to_generate)
        sampled = dataclasses.replace(sampled, stop_strings=stop_texts(cluster))
        own = [HeldOut(batches, sampled, config.samples if sampled.temperature else 0, scorer)] if batches else []
        self._cluster, self._sets, self._show, self._nth = cluster, [*own, *sets], config.show, nth
        self.rewards, self._groups = rewards, groups
        self.keep: Keep = lambda step, means: None

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]]:
        """Returns (eval/* metrics of a policy, a few samples)."""
        scores, shown = self.scores(policy, step)
        self.keep(step, by_record(scores))
        return summarised(scores), shown

    def scores(self, policy: Policy, step: int, part: tuple[int, int] = (0, 1)) -> Scored:
        """Scores a policy on the prompts, or on one of several shares of them.

        Args:
          policy: weights on the rollout mesh.
          step: step after which the weights are evaluated; it decides which sets are due.
          part: number of the share, from 0, and number of shares.

        Returns:
          The score of every sample of every prompt, (P, G), by metric, NaN for no score; and a few samples. Both are
          empty if the share has no prompts.
        """
        work = self.in_pieces(policy, step, part)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def in_pieces(
        self,
        policy: Policy,
        step: int,
        part: tuple[int, int] = (0, 1),
        most: Callable[[], int | None] = lambda: None,
    ) -> Generator[None, None, Scored]:
        """Scores as `scores` does, but in pieces, and yields after each piece.

        `most` is called before each piece. It returns the largest number of samples in the piece, or None to allow a
        whole batch. The number must be enough for one prompt's samples.
        """
        found: dict[str, np.ndarray] = {}
        shown: list[LogRecord] = []
        for eval_set in self._sets:
            batches = share_of(eval_set.batches, *part)
            if not batches or self._nth(step) % eval_set.every:
                continue
            whole = batches
            greedy = _Scores(eval_set, "greedy", 1)
            sampled = _Scores(eval_set, "sampled", eval_set.samples)
            while batches:
                piece, batches = _cut(batches, 1 + eval_set.samples, most())
                for scores, rollouts in zip((greedy, sampled), self._drawn(policy, piece, eval_set), strict=False):
                    scores.add(rollouts, self.rewards(rollouts) if self.rewards else {}, self._show)
                yield
            scored = greedy.by_metric() | sampled.by_metric()
            if eval_set.name:
                scored = _renamed(scored, eval_set.name)
            found |= scored
            named_P = [one for p in whole for one in p.fields.get("group", [None] * len(p.length_P))]
            for group in () if eval_set.name else self._groups:
                own_P = np.array([one == group for one in named_P])
                if own_P.any():
                    found |= _renamed({key: value_PG[own_P] for key, value_PG in scored.items()}, f"{_GROUP}{group}")
            shown += [{"set": eval_set.name, **one} if eval_set.name else one for one in greedy.shown]
        return found, shown

    def _drawn(self, policy: Policy, prompts: Prompts, eval_set: HeldOut) -> list[Rollouts]:
        """Draws each prompt's greedy sample and its other samples, in one call if the engine can do so."""
        G = eval_set.samples
        if able(self._cluster.config.rollout_engine, "greedy_members"):
            both = self._draw(policy, prompts, dataclasses.replace(eval_set.sampled, greedy=1), 1 + G)
            return [places(both, slice(0, 1)), *([places(both, slice(1, None))] if G else [])]
        greedy = dataclasses.replace(eval_set.sampled, temperature=0.0)
        drawn = [self._draw(policy, prompts, greedy, 1)]
        return [*drawn, *([self._draw(policy, prompts, eval_set.sampled, G)] if G else [])]

    def _draw(self, policy: Policy, prompts: Prompts, sampling: Sampling, group_size: int) -> Rollouts:
        return self._cluster.generate(
            prompts, policy, mode=Mode.EVAL, group_size=group_size, step=_EVAL_STEP, sampling=sampling
        )


class _Scores:
    """Collects the scores of a set's greedy completions, or of its sampled completions."""

    def __init__(self, eval_set: HeldOut, name: str, samples: int):
        """Makes an empty collection; `samples` is the number of samples per prompt."""
        self.samples, self.shown = samples, list[LogRecord]()
        self._set, self._name = eval_set, name
        self._values: dict[str, list[float]] = {}

    def add(self, rollouts: Rollouts, rewards: Mapping[str, np.ndarray], show: int) -> None:
        """Scores the samples of further prompts; `show` is the largest total number of samples kept as text."""
        eval_set, prompts, values = self._set, rollouts.prompts, self._values
        texts = [scored_text(*sample) for sample in zip(rollouts.completions, rollouts.episodes, strict=True)]
        for b, (p, completion) in enumerate(zip(rollouts.group_B.tolist(), rollouts.completions, strict=True)):
            record = {"evaluation": self._name, "prompt": prompts.text[p], "completion": completion}
            found: dict[str, float] = {}
            if eval_set.scorer is not None:
                record["truth"] = prompts.fields["answer"][p]
                found = eval_set.scorer(texts[b], record["truth"])
            rewards_of_sample = {key: float(reward_B[b]) for key, reward_B in rewards.items()}
            for key, value in (found | rewards_of_sample).items():
                values.setdefault(key, []).append(value)
            if len(self.shown) < show:
                turns = rollouts.episodes[b]["turns"]
                entry = {"rewards": rewards_of_sample} if rewards_of_sample else {}
                self.shown.append({**record, **found, **entry, **({"turns": turns} if turns else {})})
        if eval_set.name and self.samples > 1 and eval_set.scorer is not None:
            votes = [_ANSWERS.vote_of(text) for text in texts]
            right = values["answer"][-len(votes) :]
            for rows_B in (np.flatnonzero(rollouts.group_B == p) for p in range(len(prompts.length_P))):
                voted = majority([votes[b] for b in rows_B], [right[b] for b in rows_B])
                values.setdefault(_MAJORITY, []).append(voted)

    def by_metric(self) -> dict[str, np.ndarray]:
        """Returns the score of every sample of every prompt, (P, G), by metric."""
        of_one = {_MAJORITY: 1}
        return {
            f"eval/{self._name}_{key}": np.asarray(value).reshape(-1, of_one.get(key, self.samples))
            for key, value in self._values.items()
        }


def _renamed(scores: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {f"eval/{name}/{key.removeprefix('eval/')}": score for key, score in scores.items()}


def _cut(batches: Sequence[Prompts], samples: int, most: int | None) -> tuple[Prompts, list[Prompts]]:
    """Splits off a piece of at most `most` samples, but at least one prompt, and returns the piece and the rest.

    `samples` is the number of samples per prompt. With `most` None the piece is the first batch.
    """
    first, *others = batches
    count = len(first.length_P) if most is None else max(most // samples, 1)
    piece, rest = (take_prompts(first, rows_P) for rows_P in np.split(np.arange(len(first.length_P)), [count]))
    return piece, [rest, *others] if len(rest.length_P) else others


_MAJORITY = "majority"
_ANSWERS = TextConfig()


def by_record(scores: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Returns the mean over each record's samples, by metric; None for a record without scores."""
    found: dict[str, list[float | None]] = {}
    for name, score_PG in _with_pass(scores).items():
        known_PG = ~np.isnan(score_PG)
        total_P, count_P = np.where(known_PG, score_PG, 0).sum(axis=1), known_PG.sum(axis=1)
        means = zip(total_P.tolist(), count_P.tolist(), strict=True)
        found[name] = [total / count if count else None for total, count in means]
    return found


def _with_pass(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds pass@k of the sampled answers to the scores, if there are several samples per record.

    It is 1 if any of a record's samples is right, and has the shape (P, 1).
    """
    passes: dict[str, np.ndarray] = {}
    for name, answer_PG in scores.items():
        if answer_PG.shape[1] > 1 and name == "eval/sampled_answer":
            passes["eval/sampled_pass"] = answer_PG.max(axis=1, keepdims=True)
        elif answer_PG.shape[1] > 1 and name.endswith("/sampled_answer"):
            passes[f"{name.removesuffix('answer')}pass"] = answer_PG.max(axis=1, keepdims=True)
    return {**scores, **passes}


def summarised(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Averages (P, G) scores over samples and prompts; samples without a score (NaN) are left out.

    Returns:
      The mean of each metric, the standard error of each mean over prompts (eval/error/*), and the numbers of prompts.
    """
    scores = _with_pass(scores)
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
