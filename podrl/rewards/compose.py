"""Combines reward functions: finds them, runs them in worker processes, adds their rewards, and reports failures."""

import dataclasses
import difflib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Finite, Positive, Workers, plural, section
from podrl.mappings import JsonObject, TaskColumns, TaskFields
from podrl.rewards import citations, formats, math_answer, reasoning, reference, text, turns, worker
from podrl.rewards.batch import CallsInFlight, OpenBatch, RewardCall, RewardError, Scorer
from podrl.rewards.code import CodeConfig, CodeTests
from podrl.rewards.judge import JudgeConfig, judge, judge_by_rubric
from podrl.rewards.text import TextConfig
from podrl.runtime import plain
from podrl.runtime.service import ServiceError
from podrl.workers.child import refuse_inside
from podrl.workers.process import DiedError, Functions, LateWorkerError
from podrl.workers.user_code import Limits
from podrl.workers.user_objects import in_one_line, spec_at, spec_of

RewardFn = Callable[..., Sequence[float]]
_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_ARGUMENTS_OF_TRL = ("completion_ids", "prompt_ids", "trainer_state")
EPISODE_FIELDS = ("turns", "model_text", "sample_text")  # fields that an environment adds to those of the records
_JUDGE_S = 5.0  # seconds that the judge has after its own deadline to report an error
# If the error of a function has one of these texts, the function exceeded the limit in this field of reward.limits.
_LIMITS = {
    "MemoryError": "memory_mb",
    "Unable to allocate": "memory_mb",
    "File too large": "file_mb",
    "Resource temporarily unavailable": "processes",
    "can't start new thread": "processes",
}


@section("reward")
@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Settings of a job's rewards: functions, weights, deadlines and workers.

    Attributes:
      fns: reward functions, each a built-in name, 'path/to/file.py:function', 'package.module:function', or a Python
        function `(prompts, completions, **fields) -> list[float]`. A function written as NAME@DATASET scores only
        records of this data set, and gives 0 to all other samples.
      weights: weight of each function, in the order of `fns`; empty for 1 each.
      named: further functions, with weight 1. Such a function scores only records that name it in the field
        `reward_fns`. The records of a source with a `reward` in data.sources have this field. A record that names
        functions is scored by these functions only.
      calls: samples that a function always gets together: one 'sample', the 'group' of a prompt, or the 'batch'. With
        'sample' and 'group' a function is called while other samples are still generated; with 'batch' training waits
        for the call. A function without a file and a name, such as a lambda, always gets whole batches.
      deadline_s: longest time of a call of a function, seconds. If a call takes longer, each of its samples is scored
        in a call of its own. A sample whose own call takes longer gets the reward of an empty completion. A function
        without a file and a name runs in the job's process, and a late call of it ends the job. If a service that a
        function needs cannot be reached, the function is called again until this time has passed.
      workers: number of processes that run the functions; if `calls` is 'batch', at most one for each function.
      dataset_field: name of the field with the name of a record's data set.
      model: directory of a reward model (sequence classification with one label), whose score is added; '' for none.
      model_weight: weight of the reward model's score.
      judge: settings of the built-in functions 'judge' and 'rubric'.
      code: settings of the built-in function 'code', which tests programs.
      text: settings of 'choice', 'exact_match', 'token_f1', 'rouge_l', 'regex' and 'json_schema'.
      limits: memory, processes and files of a worker process, and the environment variables that it sees.
    """

    fns: tuple[str | Callable[..., Any], ...] = reference.DEFAULT
    weights: tuple[Finite, ...] = ()
    named: tuple[str, ...] = ()
    calls: Literal["sample", "group", "batch"] = "group"
    deadline_s: Positive = 30.0
    workers: Workers = 2
    dataset_field: str = "dataset"
    model: str = ""
    model_weight: Finite = 1.0
    judge: JudgeConfig = JudgeConfig()
    code: CodeConfig = CodeConfig()
    text: TextConfig = TextConfig()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.fns is not reference.DEFAULT:  # the default is not checked: a learner replaces it by its reward_fns
            self.check_weights()

    def check_weights(self) -> None:
        """Raises ValueError if there are weights, but not one for each function."""
        if self.weights and len(self.weights) != len(self.fns):
            raise ValueError(
                f"reward.weights has {plural(len(self.weights), 'value')} for {plural(len(self.fns), 'function')} in "
                "reward.fns: give one each, or none for 1 each."
            )

    def check_names(self, key: str = "reward.fns") -> None:
        """Raises ValueError if a function's name is not known, its file does not exist, or the judge has no URL.

        Args:
          key: name of the setting that holds the functions, for the message.
        """
        for fn in self.fns:
            _resolve(fn, self, key)

    def require(self, *, environment: bool) -> None:
        """Raises ValueError if no function, model or environment gives rewards, or weights do not match functions."""
        self.check_weights()
        if not self.fns and not self.model and not environment:
            raise ValueError("reward.fns is empty: name at least one reward function, or a reward.model.")


class RewardServiceError(RewardError, ServiceError):
    """Samples have no reward, although their function may be right: a service that it needs could not be reached until
    the deadline, or its workers were killed from outside."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """A reward function. If it has a `spec`, workers import and run it; otherwise a thread of this process runs it.

    The judge always runs in this process: it is podrl's code, and has an access token that users' code must not see.

    Attributes:
      name: name in metrics and messages, different from those of all other functions.
      spec: module or file, and name, by which a worker imports the function. If the spec has 'settings', the name is
        the name of a class, which the worker instantiates with these settings. None if the function runs in this
        process.
      here: the Python function, if it runs in this process; else None.
      dataset: name of the data set whose records the function scores; '' for all data sets.
      spec_text: the function as the configuration or a record's `reward_fns` names it.
      general: True if the function also scores records that name no functions in the field `reward_fns`.
    """

    name: str
    spec: JsonObject | None
    here: Callable[..., Any] | None
    dataset: str = ""
    spec_text: str = ""
    general: bool = True

    @property
    def key(self) -> str:
        """Key of the configuration that names the function."""
        return "reward.fns" if self.general else "reward.named, or reward of data.sources or eval.sets"

    @property
    def label(self) -> str:
        """The key that names the function, and the name as the user wrote it; for a Python function, its own name."""
        text = repr(self.spec_text) if ":" in self.spec_text else self.name
        return f"{self.key}: {text}"

    def scores(self, names: Sequence[str] | None) -> bool:
        """Returns True if the function scores a record with `names` in the field `reward_fns`, in any data set.

        Args:
          names: names of functions; None or empty if the record has no such field.
        """
        return self.spec_text in names if names else self.general


_OUTPUT, _OUTPUT_END = "<tool_output>", "</tool_output>"  # a tool's own text cannot have these tags: they are escaped


def without_outputs(completion: str) -> str:
    """Removes the outputs of tools from a text; an output without an end tag is removed up to the end of the text."""
    own, at = [], 0
    while (start := completion.find(_OUTPUT, at)) >= 0:
        own.append(completion[at:start])
        end = completion.find(_OUTPUT_END, start)
        if end < 0:
            return "".join(own)
        at = end + len(_OUTPUT_END)
    return "".join([*own, completion[at:]])


class _SingleReward(NamedTuple):
    """The reward of a sample that was scored in a call of its own.

    Attributes:
      reward: the reward; the reward of an empty completion if `trouble` is 'late', NaN if it is 'died'.
      trouble: 'late' if the function missed its deadline, 'died' if its worker died on the sample twice; '' otherwise.
    """

    reward: float
    trouble: str = ""


class NamedRewards:
    """The names of a configuration's reward functions, for processes that score no samples.

    Attributes:
      names: names of the rows of rewards, equal to `Rewards.names`.
    """

    def __init__(self, config: RewardConfig, others: Mapping[str, float] | None = None) -> None:
        self.names = _names(_functions(config), config, others or {})


class Rewards:
    """Scores completions with every function of a RewardConfig; a context manager, which ends the workers.

    Attributes:
      names: names of the rows of rewards in metrics and samples: the functions, the reward model, then `others`.
      describe_waits: function that names the longest-running calls (podrl.rewards.batch.CallsInFlight).
    """

    def __init__(self, config: RewardConfig, others: Mapping[str, float] | None = None) -> None:
        """Finds the functions and starts the workers.

        Args:
          config: the functions and their settings.
          others: weights of further rows, by name. The caller of `combine` adds these rows after the rows of the
            functions and the reward model.

        Raises:
          ValueError: a function cannot be found or loaded, or a setting would have no effect.
        """
        self._config = config
        self._functions = _functions(config)
        config.require(environment=bool(others))
        self._has_others = bool(others or config.model)
        self.names = _names(self._functions, config, others or {})
        weights = [*(config.weights or [1.0] * len(config.fns)), *[1.0] * (len(self._functions) - len(config.fns))]
        weights = [*weights, *[config.model_weight] * bool(config.model)]
        self._weight_F = np.asarray([*weights, *(others or {}).values()], np.float64)
        local = [f.name for f in self._functions if f.spec is None and not isinstance(f.here, _Judge)]
        if local:
            _log.warning(
                "Reward function %s cannot be imported by file and name (it is a lambda, a closure, or was typed at a "
                "prompt), so it runs in a thread of this process: a deadline ends the wait but not the function, "
                "reward.limits do not apply, and it sees all environment variables of the job.",
                ", ".join(local),
            )
        specs = {function.name: function.spec for function in self._functions if function.spec is not None}
        size = min(config.workers, len(specs)) if config.calls == "batch" else config.workers
        self._pool = None
        if specs:
            refuse_inside()
            labels = {function.name: function.label for function in self._functions}
            self._pool = Functions(worker.__name__, config.limits, specs, size=size, label=labels.__getitem__)
        self._lock, self._late_samples = threading.Lock(), 0
        self._calls = CallsInFlight()
        self.describe_waits = self._calls.describe_waits
        threads = max(len(self._functions) * config.workers, 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="podrl-reward")

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_answers(self, unanswered: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Refuses records without answers if a function needs answers; functions for one data set are not checked.

        Args:
          unanswered: for each source that has a record without an answer: (text that names the record and its fields,
            names of the source's own functions, possibly none).

        Raises:
          ValueError: a function needs a missing answer; the message names the record and the functions.
        """
        needs = self._about("needs")
        for place, own in unanswered:
            scored = [f for f in self._functions if f.scores(own) and not f.dataset]
            if asking := [f.name for f in scored if "answer" in needs[f.name]]:
                raise ValueError(
                    f"{place}, and {', '.join(asking)} (reward.fns, or the source's reward) "
                    f"{'reads' if len(asking) == 1 else 'read'} an answer: name the field that holds it in "
                    "data.answer_field, or choose rewards that read no answer."
                )

    def check_fields(
        self, records: Sequence[tuple[str, TaskFields]], own: Sequence[str], fields_of_job: Collection[str]
    ) -> None:
        """Refuses records that lack a field that a function takes, and functions without a place for completions.

        Args:
          records: place and fields of some records of a source.
          own: names of the source's own functions; empty if it has none.
          fields_of_job: names of the fields of all records of the job together. A function gets None for such a field
            if a record lacks it.

        Raises:
          ValueError: a record lacks a field, or a function has other arguments; the message names the record, the
            function and the field.
        """
        needs, dataset, leading = self._about("needs"), self._config.dataset_field, self._about("leading")
        for function in (f for f in self._functions if f.scores(own)):
            if mistake := worker.mistaken(leading[function.name], fields_of_job, function.name):
                raise ValueError(f"{function.key}: reward function {function.name} {mistake}.")
            mine = [one for one in records if function.dataset in ("", str(one[1].get(dataset)))]
            # Built-in functions refuse a record without the field; users' functions get None.
            always = (function.spec or {}).get("module", "").startswith(f"{__package__}.")
            for name in needs[function.name]:
                lacks = [(place, fields) for place, fields in mine if fields.get(name) is None]
                if name != "answer" and lacks and (always or name not in fields_of_job):
                    place, fields = lacks[0]
                    ours = " podrl passes no token ids or trainer state." if name in _ARGUMENTS_OF_TRL else ""
                    raise ValueError(
                        f"{place} has no field {name!r} (it has {', '.join(fields)}), which {function.name} of "
                        f"{function.key} takes: name a field that the records have, or give the argument a "
                        f"default.{ours}"
                    )

    def warn_of_absent(self, fields_of_job: Collection[str]) -> None:
        """Warns if an argument of a user's function is None in every call, because no record has a field of this name.

        Args:
          fields_of_job: names of the fields of all records of the job and its evaluation sets together.
        """
        optional, own = self._about("options"), f"{__package__}."
        for function in self._functions:
            if isinstance(function.here, _Judge) or (function.spec or {}).get("module", "").startswith(own):
                continue
            for name in (name for name in optional[function.name] if name not in fields_of_job):
                _log.warning(
                    "%s gets %s=None: no record has this field, judging by the first records of every source (%s).",
                    *(function.name, name, ", ".join(sorted(fields_of_job))),
                )

    def check_scored(
        self,
        records: Sequence[tuple[str, TaskFields]],
        others: Sequence[tuple[str, TaskFields]] = (),
        *,
        whole: bool,
    ) -> None:
        """Refuses records that no function scores, and functions for a data set that has no records.

        Args:
          records: place and fields of some records of every source.
          others: place and fields of some records of the evaluation sets, which need no rewards.
          whole: True if these records come from all data sets of the job. If False, a function for another data set
            only causes a warning.

        Raises:
          ValueError: no function scores a record, or a function is for a data set that has no records; the message
            names the record or the function.
        """
        field = self._config.dataset_field
        for place, fields in records:
            own, dataset = fields.get("reward_fns"), str(fields.get(field))
            if not self._has_others and not any(f.scores(own) and f.dataset in ("", dataset) for f in self._functions):
                raise ValueError(
                    f"{place} has {field}={fields.get(field)!r}, and no function of reward.fns scores it: name one for "
                    "this data set, or for all."
                )
        known = sorted({str(fields.get(field)) for _, fields in (*records, *others)})
        for function in (f for f in self._functions if f.dataset and f.dataset not in known):
            text = f"reward.fns: {function.name} scores the data set {function.dataset!r}, but the records belong to"
            if whole:
                raise ValueError(f"{text} {', '.join(known)} (by their field {field!r}): correct the name.")
            _log.warning("%s %s, judging by the first records of every source.", text, ", ".join(known))

    def try_own(self, prompt: str, place: str, fields: TaskFields) -> None:
        """Tries the user's own functions on two completions of a record, one of them empty.

        A late function or a dead worker is only a warning here, because a first call may take long (to load a model,
        for example). The run calls the function again; if it fails again, the run's warning or error says more.

        Args:
          prompt: the record's prompt as text.
          place: file and position of the record, for the message.
          fields: fields of the record by name.

        Raises:
          ValueError: a function raised an error, or returned something other than two finite numbers.
        """
        part = RewardCall([prompt] * 2, ["", "an answer"], {name: [value] * 2 for name, value in fields.items()})
        for function in (f for f in self._functions if f.scores(fields.get("reward_fns"))):
            ours = function.spec is None or function.spec.get("module", "").startswith(f"{__package__}.")
            if ours or function.dataset not in ("", str(fields.get(self._config.dataset_field))):
                continue
            try:
                reply = self._call(function, part, self._config.deadline_s)
            except LateWorkerError:
                late = f"did not return within reward.deadline_s={self._config.deadline_s:g}"
                _log.warning("%s: reward function %s, tried on %s: it %s.", function.key, function.name, place, late)
                continue
            except DiedError as error:
                died = f"its worker ended: {error}"
                _log.warning("%s: reward function %s, tried on %s: %s", function.key, function.name, place, died)
                continue
            problem = reply.get("bad")
            if raised := reply.get("raised"):
                problem = f"raised {in_one_line(raised)}"
            if problem:
                # TRL passes lists of turns for conversations; code for them indexes the letters of a text.
                texts = (
                    " If it indexes a completion: completions are texts, not lists of turns."
                    if ": string ind" in problem
                    else ""
                )
                raise ValueError(
                    f"{function.key}: reward function {function.name}, tried on {place} with the completions '' and "
                    f"'an answer': it {problem}.{texts}"
                )

    def _about(self, what: Literal["needs", "options", "leading"]) -> dict[str, Any]:
        """Returns the result of `worker.needs`, `worker.options` or `worker.leading` for each function."""
        here = {f.name: getattr(worker, what)(f.here) for f in self._functions if f.here is not None}
        return here | {name: about[what] for name, about in (self._pool.about if self._pool else {}).items()}

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], fields: TaskColumns
    ) -> Float[np.ndarray, "F B"]:
        """Computes the unweighted reward of every function for every completion.

        Args:
          prompts: B prompts as text.
          completions: B completions. Outputs of tools in podrl's tags, as `podrl.generate` writes them, are removed
            first; the whole texts are in the field `sample_text`.
          fields: task fields by name, B values each; reward functions receive them as keyword arguments.

        Returns:
          One row for each function, in the order of `names`; NaN for a sample on which a worker died twice.

        Raises:
          ValueError: completions, prompts and fields differ in length.
          RewardError: a function raised an error, hung, died, or returned something other than B finite numbers.
        """
        lengths = {"prompts": len(prompts), **{name: len(values) for name, values in fields.items()}}
        for name, length in lengths.items():
            if length != len(completions):
                raise ValueError(
                    f"{name} has {plural(length, 'value')} for {plural(len(completions), 'completion')}: they must "
                    "match."
                )
        if not completions:
            return np.zeros((len(self._functions), 0))
        own = [without_outputs(completion) for completion in completions]
        if own != list(completions):
            fields = {"sample_text": list(completions), **fields}
        part = RewardCall(prompts, own, fields)
        jobs = [self._submit(function, part) for function in self._functions]
        rewards = [job.result() for job in jobs]
        return np.array(rewards, np.float64).reshape(len(rewards), len(completions))

    def open(self, prompts: Sequence[str], fields: TaskColumns, *, group_B: Int[np.ndarray, " B"]) -> OpenBatch:
        """Opens a batch whose finished samples are scored while other samples of the batch are still generated.

        Args:
          prompts: B prompts as text, one per sample.
          fields: task fields by name, B values each.
          group_B: number of each sample's group; the samples of a prompt have the same number.
        """
        scorers = []
        for function in self._functions:
            whole: Any = "batch" if function.here else self._config.calls
            whole = "sample" if isinstance(function.here, _Judge) else whole
            parallel = 1 if function.here else self._config.workers
            scorers.append(Scorer(whole, parallel, functools.partial(self._submit, function)))
        return OpenBatch(scorers, prompts, fields, group_B)

    def combine(self, reward_FB: Float[np.ndarray, "F B"]) -> Float[np.ndarray, " B"]:
        """Adds up the weighted rewards of each sample.

        Args:
          reward_FB: unweighted rewards, one row for each of `names`, including the reward model's and `others`.

        Returns:
          The sums; NaN for a sample that was not scored, whose rewards are all NaN.

        Raises:
          RewardError: a sum is too large for float32, in which training computes, or only some of its terms are NaN.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            part_FB = self._weight_F[:, None] * reward_FB
            total_B = self._weight_F @ reward_FB
            bad_B = ~(np.abs(total_B) <= np.finfo(np.float32).max) & ~np.isnan(reward_FB).all(axis=0)
        if bad_B.any():
            b = int(bad_B.argmax())
            largest = int(np.argmax(np.where(np.isnan(part_FB[:, b]), np.inf, np.abs(part_FB[:, b]))))
            raise RewardError(
                f"The rewards of sample {b} of {len(total_B)} add up to {total_B[b]:g}, which training's float32 does "
                f"not hold (at most 3.4e38): reward function {self.names[largest]} contributes "
                f"{reward_FB[largest, b]:g} with the weight {self._weight_F[largest]:g}. Keep its rewards small, or "
                "lower its weight (reward.weights, reward.model_weight)."
            )
        return total_B

    def close(self) -> None:
        """Ends the workers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def _submit(self, function: _Function, part: RewardCall) -> Future[list[float]]:
        return self._threads.submit(self._calls.call, function.name, part, lambda: self._score(function, part))

    def _score(self, function: _Function, part: RewardCall) -> list[float]:
        """Computes a function's rewards for samples; 0 for samples of records that the function does not score."""
        own = part.fields.get("reward_fns") or [None] * len(part.completions)
        known = {one.spec_text for one in self._functions}
        for names in own:
            if unknown := [name for name in names or () if name not in known]:
                raise RewardError(
                    f"A record's field 'reward_fns' names {', '.join(map(repr, unknown))}, which is none of the job's "
                    f"functions, {', '.join(sorted(known))}: name it in reward.named, or in a source's 'reward'."
                )
        rows = [b for b, names in enumerate(own) if function.scores(names)]
        if not function.dataset and len(rows) == len(part.completions):
            return self._scored(function, part)
        if function.dataset and self._config.dataset_field not in part.fields:
            raise RewardError(
                f"Reward function {function.name} is for one data set, but the records have no field "
                f"{self._config.dataset_field!r} (reward.dataset_field): they have {', '.join(part.fields) or 'none'}."
            )
        if function.dataset:
            rows = [b for b in rows if str(part.fields[self._config.dataset_field][b]) == function.dataset]
        rewards = [0.0] * len(part.completions)
        for b, value in zip(rows, self._scored(function, part.of(rows)) if rows else [], strict=True):
            rewards[b] = value
        return rewards

    def _scored(self, function: _Function, part: RewardCall) -> list[float]:
        """Scores samples in one call, or in one call per sample if the call is late or its worker dies.

        A sample whose own call takes longer than the deadline gets the reward of an empty completion. A sample on which
        the worker dies twice gets NaN, and is left out of the loss.
        """
        limit, samples = self._config.deadline_s, range(len(part.completions))
        try:
            return self._values(function, part, self._patiently(function, part, limit))
        except LateWorkerError as error:
            if function.here is not None:  # a late call in a thread cannot be ended, so it is an error
                raise self._late(function, part) from error
        except DiedError as error:
            _log.warning("A worker of reward function %s is replaced: %s", function.name, error)
        alone = [self._alone(function, part.one(b)) for b in samples]
        bad = {b for b in samples if alone[b].trouble}
        with self._lock:
            self._late_samples += sum(one.trouble == "late" for one in alone)
        if self._config.calls == "sample" or (function.spec or {}).get("module", "").startswith("podrl."):
            return [one.reward for one in alone]
        # The function may compare samples, so one call scores all of them, with empty completions for bad samples.
        try:
            quiet = part.without(bad)
            together = self._values(function, quiet, self._patiently(function, quiet, limit * len(samples)))
        except (LateWorkerError, DiedError) as error:
            raise self._always(
                function, error, f"{plural(len(samples), 'sample')}, each of which it scores alone"
            ) from error
        return [alone[b].reward if alone[b].trouble == "died" else together[b] for b in samples]

    def _alone(self, function: _Function, part: RewardCall) -> "_SingleReward":
        """Scores one sample in a call of its own; if the worker dies, the call is repeated once."""
        trouble = ""
        for _ in range(2):
            try:
                return _SingleReward(
                    self._values(function, part, self._patiently(function, part, self._config.deadline_s))[0]
                )
            except LateWorkerError:
                trouble = "late"
                break
            except DiedError as error:
                trouble = "died"
                _log.warning("Reward function %s: %s It scored %s.", function.name, error, part.show(0))
        # If the function also fails on an empty completion, the function is at fault and not the sample.
        empty = part.without({0})
        try:
            reward = self._values(function, empty, self._patiently(function, empty, self._config.deadline_s))[0]
        except (LateWorkerError, DiedError) as error:
            raise self._always(function, error, f"{part.show(0)}, nor for an empty completion") from error
        if trouble == "died":
            _log.warning(
                "The worker of reward function %s died twice on %s: this sample is left out.",
                function.name,
                part.show(0),
            )
            return _SingleReward(np.nan, trouble)
        _log.warning(
            "Reward function %s exceeded reward.deadline_s=%g on %s: it has the reward of an empty completion, %g.",
            *(function.name, self._config.deadline_s, part.show(0), reward),
        )
        return _SingleReward(reward, trouble)

    def _always(self, function: _Function, error: LateWorkerError | DiedError, what: str) -> RewardError:
        """Returns the error for a function that fails on an empty completion, or on samples that it scores one by one.

        Args:
          function: the function.
          error: its last failure.
          what: the samples, for the message.
        """
        if "SIGKILL" in str(error):
            return RewardServiceError(
                f"The workers of reward function {function.name} are killed from outside ({error}), last for {what}. "
                "Is there memory left on this host (dmesg)? Lower reward.workers or reward.limits.memory_mb."
            )
        return RewardError(
            f"Reward function {function.name} gave no rewards for {what}: {error} If it is slow, make it faster, or "
            f"raise reward.deadline_s={self._config.deadline_s:g}."
        )

    def take_late(self) -> int:
        """Returns how many samples took longer than the deadline since the last call of this method."""
        with self._lock:
            count, self._late_samples = self._late_samples, 0
        return count

    def _values(self, function: _Function, part: RewardCall, reply: JsonObject) -> list[float]:
        if "raised" in reply:
            raise self._failed(function, part, f"it raised:\n{reply['raised']}")
        if "bad" in reply and "sample" in reply:
            raise RewardError(f"Reward function {function.name} {reply['bad']}, for {part.show(reply['sample'])}.")
        if "bad" in reply:
            raise self._failed(function, part, f"it {reply['bad']}.")
        return reply["values"]

    def _patiently(self, function: _Function, part: RewardCall, deadline_s: float) -> JsonObject:
        """Calls a function; repeats the call at growing intervals while a service of the function cannot be reached."""
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        while "away" in (reply := self._call(function, part, deadline_s)):
            waited = time.monotonic() - started
            if waited + pause > self._config.deadline_s:
                raise RewardServiceError(
                    f"Reward function {function.name} needs a service that has been away for {waited:.0f} s "
                    f"({reply['away']}). When the service is back, the same command resumes the run; reward.deadline_s="
                    f"{self._config.deadline_s:g} is the longest wait for it."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return reply

    def _call(self, function: _Function, part: RewardCall, deadline_s: float) -> JsonObject:
        if function.here is not None:
            if isinstance(function.here, _Judge):  # the judge has its own deadline, and its error says more
                deadline_s += _JUDGE_S
            return _in_thread(function.here, part, deadline_s)
        assert self._pool is not None
        # The function 'code' ends late programs by itself, and has a deadline for each program.
        if function.spec is not None and function.spec["name"] == CodeTests.__name__:
            deadline_s += self._config.code.longest_s(len(part.completions))
        return self._pool.call(function.name, part.body, deadline_s)

    def _late(self, function: _Function, part: RewardCall) -> RewardError:
        """Calls the function sample by sample to find a sample on which it hangs; returns the error of the late call.

        The calls together take at most one more deadline.
        """
        limit = self._config.deadline_s
        end, index, alone = time.monotonic() + limit, 0, 0.0
        while index < len(part.completions) and end > time.monotonic():
            started = time.monotonic()
            try:
                self._call(function, part.one(index), end - started)
            except (LateWorkerError, DiedError):
                alone = time.monotonic() - started
                break
            index += 1
        if alone >= limit / 2:
            which = f"It did not return within {alone:.1f} s for {part.show(index)} alone."
        else:
            which = (
                f"Called sample by sample, it scored {index} of {plural(len(part.completions), 'sample')} in the same "
                f"time: it is slow, not stuck. Its last sample was {part.show(min(index, len(part.completions) - 1))}."
            )
        return RewardError(
            f"Reward function {function.name} did not return within {limit} s for "
            f"{plural(len(part.completions), 'sample')}. "
            f"{which} Make it faster, or raise reward.deadline_s={limit}."
        )

    def _failed(self, function: _Function, part: RewardCall, what: str) -> RewardError:
        """Calls the function sample by sample to find a sample on which it fails; returns the error of the failed call.

        The calls together take at most one more deadline.

        Args:
          function: the function that failed.
          part: samples of the call.
          what: description of the failure, for the end of the message.
        """
        end = time.monotonic() + self._config.deadline_s
        batch = plural(len(part.completions), "sample")
        where = f"{batch} at once, and for none of them alone"
        for index in range(len(part.completions)):
            left = end - time.monotonic()
            if left <= 0:
                where = f"{batch} at once, and for none of the first {index} of them alone"
                break
            try:
                reply = self._call(function, part.one(index), left)
            except (LateWorkerError, DiedError):
                reply = {}
            if "values" not in reply:
                where = part.show(index)
                break
        else:
            where += f"; the first is {part.show(0)}"
        return RewardError(f"Reward function {function.name} failed for {where}: {what}{self._advice(what)}")

    def _advice(self, what: str) -> str:
        """Returns a sentence that names the key to change if a limit may have caused the failure; else ''."""
        withheld = [name for name in self._config.limits.withheld(os.environ) if name in what]
        if withheld:
            names = ", ".join(withheld)
            return f"\nReward functions do not see {names}: name what they need in reward.limits.environment."
        for phrase, key in _LIMITS.items():
            if phrase in what:
                return f"\nThe limit may be reward.limits.{key}={getattr(self._config.limits, key)}."
        return ""


class _Judge:
    """The built-in judge with its settings. Its requests end before the deadline, so it can report their errors."""

    def __init__(self, config: RewardConfig, *, rubric: bool):
        self._settings = {"config": config.judge, "deadline_s": config.deadline_s}
        self._rubric = config.judge.rubric if rubric else ""

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
        references = fields.get("answer", [None] * len(prompts))
        answers = ["" if one is None else " or ".join(plain.references(one)) for one in references]
        if not self._rubric:
            return judge(prompts, completions, answers, **self._settings)
        rubrics = fields.get(self._rubric) or [None] * len(prompts)
        return judge_by_rubric(prompts, completions, answers, rubrics, **self._settings)


def _in_thread(fn: Callable[..., Any], part: RewardCall, deadline_s: float) -> JsonObject:
    """Calls a function in a daemon thread: a function that never returns blocks neither the caller nor the exit."""
    replies: list[JsonObject] = []

    def run() -> None:
        fields = {name: list(values) for name, values in part.fields.items()}
        replies.append(worker.call(fn, list(part.prompts), list(part.completions), fields))

    thread = threading.Thread(target=run, daemon=True, name="podrl-reward-function")
    thread.start()
    thread.join(deadline_s)
    if not replies:
        raise LateWorkerError("it did not answer in time.")
    return replies[0]


# The module of each built-in function, by the function's name.
_BUILT_IN = {name: reference.__name__ for name in reference.BUILT_IN} | {
    "r1_format": formats.__name__,
    "math_equal": math_answer.__name__,
    "failed_calls": turns.__name__,
    "citations": citations.__name__,
    "citation_format": citations.__name__,
}
_JUDGE, _RUBRIC, _CODE = "judge", "rubric", "code"
MODEL_NAME = "reward_model"


# The built-in functions that read each setting, for settings that nothing else reads. reward.text.extract is missing,
# because a majority vote reads this setting, too.
_COMPARED = ("choice", "exact_match", "token_f1", "rouge_l")
_READ_BY = {
    "text.answer": _COMPARED,
    "text.normalise": _COMPARED[1:],
    "text.choices": ("choice",),
    "text.pattern": ("regex",),
    "text.schema": ("json_schema",),
    "judge": (_JUDGE, _RUBRIC),
    "code": (_CODE,),
}


def _check_read(config: RewardConfig) -> None:
    """Refuses a setting that has no effect, because the configuration has none of the functions that read it.

    Raises:
      ValueError: there is such a setting; the message names the setting and the functions that read it.
    """
    used = {fn.partition("@")[0] for fn in (*config.fns, *config.named) if isinstance(fn, str)}
    for key, functions in _READ_BY.items():
        section, _, field = key.partition(".")
        of_section = getattr(config, section)
        for name in [field] if field else [field.name for field in dataclasses.fields(of_section)]:
            value = getattr(of_section, name)
            if value != getattr(type(of_section)(), name) and not used & set(functions):
                raise ValueError(
                    f"reward.{section}.{name}={value!r} is read by {' and '.join(functions)} alone, and reward.fns is "
                    f"{tuple(map(str, config.fns))}: name one of them there, or remove the setting."
                )


def _functions(config: RewardConfig) -> list[_Function]:
    _check_read(config)
    named = [fn for fn in config.named if fn not in config.fns]
    found = [_resolve(fn, config, "reward.fns") for fn in config.fns]
    found += [_resolve(fn, config, "reward.named, data.sources or eval.sets: reward") for fn in named]
    pairs = zip(found, (*config.fns, *named), strict=True)
    general = len(config.fns)
    return _unique([dataclasses.replace(f, spec_text=str(fn), general=i < general) for i, (f, fn) in enumerate(pairs)])


def _names(functions: Sequence[_Function], config: RewardConfig, others: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names of the rows of rewards: the functions, the reward model if there is one, then `others`."""
    return (*(function.name for function in functions), *(MODEL_NAME,) * bool(config.model), *others)


def _resolve(fn: str | Callable[..., Any], config: RewardConfig, key: str) -> _Function:
    """Finds a reward function by its name in the configuration; workers import it later.

    Args:
      fn: the function or its name.
      config: settings of the rewards.
      key: key of the configuration that names the function, for errors.

    Raises:
      ValueError: `fn` is neither a function nor a name, the name is neither built in nor of a known form, its file does
        not exist, or reward.judge.url is missing.
    """
    if not isinstance(fn, str):
        if not callable(fn):
            raise ValueError(f"{key} holds {fn!r} ({type(fn).__name__}): give names or Python functions.")
        spec = spec_of(fn)
        name = getattr(fn, "__name__", type(fn).__name__).strip("<>")
        return _Function(name, spec, None if spec else fn)
    head, at, dataset = fn.rpartition("@")
    if not at or "/" in dataset or ":" in dataset:  # a file's name may hold an '@'
        return _named(fn, config, key)
    if not head or not dataset:
        raise ValueError(f"{key}={fn!r} must be a function, '@' and the name of a data set.")
    found = _named(head, config, key)
    return dataclasses.replace(found, name=f"{found.name}@{dataset}", dataset=dataset)


def _named(fn: str, config: RewardConfig, key: str) -> _Function:
    if fn in _BUILT_IN:
        return _Function(fn, {"module": _BUILT_IN[fn], "name": fn}, None)
    if fn in text.FUNCTIONS:
        settings = {"function": fn, **dataclasses.asdict(config.text)}
        name = text.TextReward.__name__
        return _Function(fn, {"module": text.__name__, "name": name, "settings": settings}, None)
    if fn == reasoning.NAME:
        spec = {"module": reasoning.__name__, "name": reasoning.ReasoningReward.__name__}
        return _Function(fn, {**spec, "settings": dataclasses.asdict(config.text)}, None)
    if fn == _CODE:
        settings = dataclasses.asdict(config.code)
        return _Function(fn, {"module": CodeTests.__module__, "name": CodeTests.__name__, "settings": settings}, None)
    if fn in (_JUDGE, _RUBRIC):
        if not config.judge.url:
            raise ValueError(f"{key}={fn!r} needs reward.judge.url, an OpenAI-compatible endpoint.")
        return _Function(fn, None, _Judge(config, rubric=fn == _RUBRIC))
    place, colon, name = fn.rpartition(":")
    if not colon or not place or not name:
        known = [*_BUILT_IN, *text.FUNCTIONS, reasoning.NAME, _CODE, _JUDGE, _RUBRIC]
        close = difflib.get_close_matches(fn, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"built in are {', '.join(known)}."
        if fn.endswith(".py"):
            hint = f"name the function in the file, {fn}:FUNCTION."
        raise ValueError(
            f"{key}={fn!r} is not a built-in reward, 'file.py:function' or 'package.module:function': {hint}"
        )
    try:
        spec = spec_at(place, name)
    except ValueError as error:
        raise ValueError(f"{key}={fn!r}: {error}") from None
    return _Function(name.rpartition(".")[2], spec, None)


def _unique(functions: Sequence[_Function]) -> list[_Function]:
    """Adds a number to the names of functions with equal names, so that each function has a metric of its own."""
    seen: dict[str, int] = {}
    renamed = []
    for function in functions:
        seen[function.name] = count = seen.get(function.name, 0) + 1
        renamed.append(function if count == 1 else dataclasses.replace(function, name=f"{function.name}_{count}"))
    return renamed
