"""Scores the finished samples of a batch while its other samples are still being generated."""

import collections
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from podrl.config import plural
from podrl.mappings import TaskColumns, TaskFields
from podrl.types import BatchError

_HEAD = 160


class RewardError(BatchError):
    """A reward function failed; the message names the function, the sample if it is known, and the key to change."""


class RewardCall:
    """Samples that a reward function scores in one call.

    Attributes:
      prompts: prompt of each sample, as text.
      completions: completion of each sample, as text.
      fields: task fields by name, each with one value per sample.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        fields: TaskColumns,
        *,
        places: Sequence[int] | None = None,
        total: int | None = None,
    ) -> None:
        """Stores the samples; by default they are a whole batch.

        Args:
          prompts: prompt of each sample, as text.
          completions: completion of each sample, as text.
          fields: task fields by name, each with one value per sample.
          places: position of each sample in its batch, for messages; None numbers the samples from 0.
          total: number of samples in the batch, for messages; None takes the number of `completions`.
        """
        self.prompts, self.completions, self.fields = prompts, completions, fields
        self._places = range(len(completions)) if places is None else places
        self._total = len(completions) if total is None else total

    def of(self, rows: Sequence[int]) -> "RewardCall":
        """Returns a call with only the samples at `rows`, in the order of `rows`."""
        return RewardCall(
            [self.prompts[b] for b in rows],
            [self.completions[b] for b in rows],
            {name: [values[b] for b in rows] for name, values in self.fields.items()},
            places=[self._places[b] for b in rows],
            total=self._total,
        )

    def without(self, rows: Collection[int]) -> "RewardCall":
        """Returns the same samples, with an empty completion for each of `rows`."""
        completions = ["" if b in rows else text for b, text in enumerate(self.completions)]
        return RewardCall(self.prompts, completions, self.fields, places=self._places, total=self._total)

    def one(self, index: int) -> "RewardCall":
        """Returns the sample at `index` alone."""
        return self.of([index])

    @functools.cached_property
    def body(self) -> bytes:
        """The samples as JSON.

        Raises:
          RewardError: a field holds a value that JSON cannot represent.
        """
        content = {
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "fields": {name: list(values) for name, values in self.fields.items()},
        }
        try:
            return json.dumps(content, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"The data's fields {', '.join(self.fields)} cannot be sent to reward workers: {error}. Fields must be "
                "text, numbers, true, false, null, or lists and mappings of them."
            ) from error

    def show(self, index: int) -> str:
        """Describes the sample at `index` for a message, with its position in the whole batch."""
        return (
            f"sample {self._places[index]} of {self._total} (prompt {_head(self.prompts[index])}, "
            f"completion {_head(self.completions[index])})"
        )


class CallsInFlight:
    """Records which calls of reward functions are under way, for messages about a job's waits."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, str]] = {}  # start and description of the call, by thread id

    def call(self, name: str, part: RewardCall, score: Callable[[], list[float]]) -> list[float]:
        """Runs `score`, which calls the function `name` with `part`; `describe_waits` names the call meanwhile."""
        thread = threading.get_ident()
        self._calls[thread] = (
            time.monotonic(),
            f"reward function {name} of {plural(len(part.completions), 'sample')}",
        )
        try:
            return score()
        finally:
            del self._calls[thread]

    def describe_waits(self) -> str:
        """Names the three calls that have been running longest; '' if none is running."""
        now = time.monotonic()
        return "; ".join(f"{what}, for {now - since:.0f} s" for since, what in sorted(list(self._calls.values()))[:3])


Whole = Literal["sample", "group", "batch"]


class Scorer(NamedTuple):
    """A reward function that is called in the background.

    Attributes:
      whole: samples that are never split between two calls: one 'sample', the 'group' of a prompt, or the 'batch'. A
        call may score several samples or groups.
      parallel: largest number of calls at once.
      submit: function that starts a call in the background; the call returns one reward per sample.
    """

    whole: Whole
    parallel: int
    submit: Callable[[RewardCall], Future[list[float]]]


@dataclasses.dataclass
class _Line:
    """The queue of one reward function: samples that wait for a call, and the calls started so far.

    Attributes:
      scorer: the reward function.
      unit_B: number of each sample's unit; the samples of a unit are scored in one call (`Scorer.whole`).
      left: number of samples in each unit that have not ended.
      ready: indices of the samples that wait; a unit's samples enter when the last of them has ended.
      jobs: sample indices and future rewards of every call started.
    """

    scorer: Scorer
    unit_B: Sequence[int]
    left: dict[int, int]
    ready: list[int] = dataclasses.field(default_factory=list)
    jobs: list[tuple[list[int], Future[list[float]]]] = dataclasses.field(default_factory=list)


class OpenBatch:
    """Scores a batch while it is sampled: reward functions are called with the samples that have ended.

    A call takes all waiting samples or, if several calls may run at once, its share of them. While earlier calls run,
    further samples wait, so a slow function gets few calls with many samples each.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        prompts: Sequence[str],
        fields: TaskColumns,
        group_B: Int[np.ndarray, " B"],
    ) -> None:
        """Opens a batch of B samples, none of which has ended.

        Args:
          scorers: reward functions, one for each row of the rewards.
          prompts: B prompts as text, one per sample.
          fields: task fields that are known before sampling, by name, B values each.
          group_B: group number of each sample; samples of one prompt have the same number.

        Raises:
          ValueError: a field does not have one value per prompt.
        """
        for name, values in fields.items():
            if len(values) != len(prompts):
                raise ValueError(
                    f"{name} has {plural(len(values), 'value')} for {plural(len(prompts), 'prompt')}: they must match."
                )
        self._prompts, self._fields = prompts, fields
        self._ended: dict[int, tuple[str, TaskFields] | None] = {}
        units = {"sample": np.arange(len(prompts)), "group": group_B, "batch": np.zeros(len(prompts), np.int64)}
        self._lines = [_Line(scorer, of := units[scorer.whole].tolist(), collections.Counter(of)) for scorer in scorers]
        self._given_up = False
        self._changed = threading.Condition(threading.RLock())

    def add(self, sample: int, completion: str, fields: TaskFields) -> None:
        """Adds the completion of a sample that has ended.

        Args:
          sample: index of the sample in the batch.
          completion: text to be scored.
          fields: fields that are known only after the sample's end, by name; every sample must have the same fields.
        """
        self._end(sample, (completion, fields))

    def leave_out(self, sample: int) -> None:
        """Marks a sample as ended without a completion; the sample is not scored."""
        self._end(sample, None)

    def missing(self) -> list[int]:
        """Lists the indices of the samples that have not ended."""
        return [b for b in range(len(self._prompts)) if b not in self._ended]

    def result(self) -> Float[np.ndarray, "F B"]:
        """Waits for every function's reward of every sample; all samples must have ended.

        Returns:
          Rewards, unweighted; NaN in all rows for a sample that was left out or lacks one function's reward.

        Raises:
          RewardError: a function failed; calls that have not begun are cancelled.
        """
        assert not self.missing(), self.missing()
        with self._changed:
            self._changed.wait_for(self.settled)
            if (failed := self._failed()) is not None:
                self.cancel()
                failed.result()
        reward_FB = np.full((len(self._lines), len(self._prompts)), np.nan)
        for reward_B, line in zip(reward_FB, self._lines, strict=True):
            for rows, job in line.jobs:
                reward_B[rows] = job.result()
        return _whole(reward_FB)

    def settled(self) -> bool:
        """Returns True if `result` would not wait: all samples are scored, or a function has failed."""
        with self._changed:
            done = not self.missing() and all(map(self._is_done, self._lines))
            return done or self._failed() is not None

    def known(self) -> tuple[Float[np.ndarray, "F B"], Bool[np.ndarray, " B"]]:
        """Reads the rewards that are known so far, without waiting.

        Returns:
          (rewards as in `result`, NaN in all rows for a sample that lacks a reward; for each sample True if it is
          complete, because all functions have scored it or because it was left out).
        """
        reward_FB = np.full((len(self._lines), len(self._prompts)), np.nan)
        there_FB = np.zeros(reward_FB.shape, bool)
        with self._changed:
            there_FB[:, [b for b, ended in self._ended.items() if ended is None]] = True
            for f, line in enumerate(self._lines):
                for rows, job in line.jobs:
                    if job.done() and not job.cancelled() and job.exception() is None:
                        reward_FB[f, rows], there_FB[f, rows] = job.result(), True
        return _whole(reward_FB), np.all(there_FB, axis=0)

    def cancel(self) -> None:
        """Cancels the calls that have not begun, and starts no others."""
        with self._changed:
            self._given_up = True
        for line in self._lines:
            for _, job in line.jobs:
                job.cancel()

    def _failed(self) -> Future[list[float]] | None:
        jobs = (job for line in self._lines for _, job in line.jobs)
        return next((job for job in jobs if job.done() and job.exception() is not None), None)

    def _is_done(self, line: _Line) -> bool:
        return not line.ready and all(job.done() for _, job in line.jobs)

    def _end(self, sample: int, ended: tuple[str, TaskFields] | None) -> None:
        with self._changed:
            assert sample not in self._ended, sample
            self._ended[sample] = ended
            for line in self._lines:
                unit = line.unit_B[sample]
                line.left[unit] -= 1
                if not line.left[unit]:
                    line.ready += [b for b, u in enumerate(line.unit_B) if u == unit and self._ended[b] is not None]
                    self._go_on(line)

    def _go_on(self, line: _Line) -> None:
        """Starts calls for the samples that wait, up to the number that may run at once."""
        running = sum(not job.done() for _, job in line.jobs)
        while line.ready and running < line.scorer.parallel and not self._given_up:
            units = list(dict.fromkeys(line.unit_B[b] for b in line.ready))
            chosen = set(units[: -(-len(units) // line.scorer.parallel)])
            rows = sorted(b for b in line.ready if line.unit_B[b] in chosen)
            line.ready = [b for b in line.ready if line.unit_B[b] not in chosen]
            job = line.scorer.submit(self._part(rows))
            line.jobs.append((rows, job))
            running += 1
            job.add_done_callback(lambda _: self._on_done(line))

    def _on_done(self, line: _Line) -> None:
        with self._changed:
            self._go_on(line)
            self._changed.notify_all()

    def _part(self, rows: Sequence[int]) -> RewardCall:
        texts, more = zip(*[ended for b in rows if (ended := self._ended[b]) is not None], strict=True)
        fields = {name: [values[b] for b in rows] for name, values in self._fields.items()}
        fields |= {name: [own[name] for own in more] for name in more[0]}
        prompts = [self._prompts[b] for b in rows]
        return RewardCall(prompts, texts, fields, places=rows, total=len(self._prompts))


def _whole(reward_FB: Float[np.ndarray, "F B"]) -> Float[np.ndarray, "F B"]:
    """Makes all rewards of a sample NaN if one of them is NaN."""
    return np.where(np.isnan(reward_FB).any(axis=0), np.nan, reward_FB)


def _plain(value: object) -> object:
    """Converts numpy values for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {str(value)[:80]!r} is not a JSON value")


def _head(text: str) -> str:
    return repr(text if len(text) <= _HEAD else f"{text[:_HEAD]}...")
