"""Completions on their way to reward functions: scored while others of their batch are still made."""

import collections
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from podrl.types import BatchError

_HEAD = 160


class RewardError(BatchError):
    """A reward function failed; the message names it, the sample, and the key to turn."""


class Part:
    """Samples that a reward function is given at once.

    Attributes:
      prompts, completions, fields: as reward functions take them.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        fields: Mapping[str, Sequence[Any]],
        *,
        places: Sequence[int] | None = None,
        total: int | None = None,
    ) -> None:
        """Samples at `places` of a batch of `total`; by default the whole batch."""
        self.prompts, self.completions, self.fields = prompts, completions, fields
        self._places = range(len(completions)) if places is None else places
        self._total = len(completions) if total is None else total

    def of(self, rows: Sequence[int]) -> "Part":
        """Some of these samples."""
        return Part(
            [self.prompts[b] for b in rows],
            [self.completions[b] for b in rows],
            {name: [values[b] for b in rows] for name, values in self.fields.items()},
            places=[self._places[b] for b in rows],
            total=self._total,
        )

    def without(self, rows: Collection[int]) -> "Part":
        """These samples, some of them with an empty completion."""
        completions = ["" if b in rows else text for b, text in enumerate(self.completions)]
        return Part(self.prompts, completions, self.fields, places=self._places, total=self._total)

    def one(self, index: int) -> "Part":
        """One of these samples."""
        return self.of([index])

    @functools.cached_property
    def body(self) -> bytes:
        """The samples as JSON.

        Raises:
          RewardError: the fields hold something that JSON does not.
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
                "text, numbers, or lists and mappings of them."
            ) from error

    def show(self, index: int) -> str:
        """One of these samples for a message, with its place in the whole batch."""
        return (
            f"sample {self._places[index]} of {self._total} (prompt {_head(self.prompts[index])}, "
            f"completion {_head(self.completions[index])})"
        )


class Asked:
    """Calls of reward functions that are under way."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, str]] = {}  # by thread

    def call(self, name: str, part: Part, score: Callable[[], list[float]]) -> list[float]:
        """Notes a function's call while it is made."""
        thread = threading.get_ident()
        self._calls[thread] = (time.monotonic(), f"reward function {name} of {len(part.completions)} samples")
        try:
            return score()
        finally:
            del self._calls[thread]

    def waits(self) -> str:
        """Names the three calls that take longest; '' for none."""
        now = time.monotonic()
        return "; ".join(f"{what}, for {now - since:.0f} s" for since, what in sorted(list(self._calls.values()))[:3])


Whole = Literal["sample", "group", "batch"]


class Scorer(NamedTuple):
    """A reward function, run in the background.

    Attributes:
      whole: the samples that it is given in one call, with others or without: each alone, those of a prompt, or all.
      parallel: calls at once.
      submit: starts a call.
    """

    whole: Whole
    parallel: int
    submit: Callable[[Part], Future[list[float]]]


@dataclasses.dataclass
class _Line:
    """Samples on their way to one function: those that wait, and calls under way and made, by their rows.

    Attributes:
      unit_B: number of each sample's unit; the samples of a unit are given in one call.
      left: samples of each unit that have not ended.
    """

    scorer: Scorer
    unit_B: Sequence[int]
    left: dict[int, int]
    ready: list[int] = dataclasses.field(default_factory=list)
    jobs: list[tuple[list[int], Future[list[float]]]] = dataclasses.field(default_factory=list)


class OpenBatch:
    """A batch that is being sampled, of which functions score what has ended.

    A call holds all that waits, or what falls to one of several calls at once: where calls are dear they are few.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        prompts: Sequence[str],
        fields: Mapping[str, Sequence[Any]],
        group_B: Int[np.ndarray, " B"],
    ) -> None:
        """Of B samples, none of which has ended; `fields` are known before, B values each."""
        for name, values in fields.items():
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} values for {len(prompts)} prompts: they must match.")
        self._prompts, self._fields = prompts, fields
        self._ended: dict[int, tuple[str, Mapping[str, Any]] | None] = {}
        units = {"sample": np.arange(len(prompts)), "group": group_B, "batch": np.zeros(len(prompts), np.int64)}
        self._lines = [_Line(scorer, of := units[scorer.whole].tolist(), collections.Counter(of)) for scorer in scorers]
        self._given_up = False
        self._changed = threading.Condition(threading.RLock())

    def add(self, sample: int, completion: str, fields: Mapping[str, Any]) -> None:
        """A sample has ended; `fields` are what is known of it only now, the same names for every sample."""
        self._end(sample, (completion, fields))

    def leave_out(self, sample: int) -> None:
        """A sample has ended without a completion: it is not scored, the others of its prompt are."""
        self._end(sample, None)

    def missing(self) -> list[int]:
        """Samples that have not ended."""
        return [b for b in range(len(self._prompts)) if b not in self._ended]

    def result(self) -> Float[np.ndarray, "F B"]:
        """Every function's rewards, NaN for samples left out; all must have ended.

        Raises:
          RewardError: a function failed. What waits is given up.
        """
        assert not self.missing(), self.missing()
        with self._changed:
            self._changed.wait_for(lambda: self._failed() is not None or all(map(self._is_done, self._lines)))
            if (failed := self._failed()) is not None:
                self.cancel()
                failed.result()
        reward_FB = np.full((len(self._lines), len(self._prompts)), np.nan)
        for reward_B, line in zip(reward_FB, self._lines, strict=True):
            for rows, job in line.jobs:
                reward_B[rows] = job.result()
        return _whole(reward_FB)

    def known(self) -> tuple[Float[np.ndarray, "F B"], Bool[np.ndarray, " B"]]:
        """Returns the rewards that are there by now, as `result`, and which samples have all theirs."""
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
        """Gives up what has not begun."""
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

    def _end(self, sample: int, ended: tuple[str, Mapping[str, Any]] | None) -> None:
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
        """Starts calls with what waits, as many as there may be at once."""
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

    def _part(self, rows: Sequence[int]) -> Part:
        texts, more = zip(*[ended for b in rows if (ended := self._ended[b]) is not None], strict=True)
        fields = {name: [values[b] for b in rows] for name, values in self._fields.items()}
        fields |= {name: [own[name] for own in more] for name in more[0]}
        prompts = [self._prompts[b] for b in rows]
        return Part(prompts, texts, fields, places=rows, total=len(self._prompts))


def _whole(reward_FB: Float[np.ndarray, "F B"]) -> Float[np.ndarray, "F B"]:
    """A sample that lacks a function's reward has none."""
    return np.where(np.isnan(reward_FB).any(axis=0), np.nan, reward_FB)


def _plain(value: Any) -> Any:
    """Converts numpy values for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {str(value)[:80]!r} is no JSON value")


def _head(text: str) -> str:
    return repr(text if len(text) <= _HEAD else f"{text[:_HEAD]}...")
