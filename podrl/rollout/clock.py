"""Clocks: where samples stop under each version of the weights, which groups make a batch, which groups are too old.

`TokenClock` decides by the tokens of the sample alone, so a run that is repeated becomes the same. `WallClock` decides
by what has ended, and writes each decision to the journal before anybody acts on it, so that it can be repeated.
Neither knows of an engine, a thread or a host: docs/async.md says what both promise.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from podrl.engine.config import RolloutConfig
from podrl.rollout.journal import WallJournal
from podrl.rollout.points import Points

_LOOKED_AT = 4  # number of batches whose longest sample sets the quantum
_SHARE = 0.7  # of the longest sample per window: less fills the last windows, more leaves long samples a late start


class TokenClock:
    """Cuts samples into windows of equally many tokens, one window for each version of the weights.

    With a staleness of S, token i of a sample of batch b is drawn by version
    min(max(b - S, 0) + i // quantum, max(b - 1, 0)), whatever else is in flight: in window b - 1, the last before the
    batch trains, samples are drawn to their end.

    The quantum, unless `rollout.window_tokens` sets it, is 0.7 times the longest sample of the batches trained last,
    divided by S: this cuts the tail of the lengths, and leaves most samples to one version.
    """

    anew = False  # a group that another host takes over becomes what it was to become

    @property
    def mode(self) -> Literal["windows", "whole"]:
        """Returns 'windows' where several versions may draw a sample, 'whole' where one does."""
        return "windows" if self.used else "whole"

    def __init__(self, rollout: RolloutConfig, *, staleness: int):
        """Follows no lengths yet.

        Args:
          rollout: the engine's settings.
          staleness: S, the number of windows that may draw a sample.
        """
        self._fixed, self._windows = rollout.window_tokens, staleness
        self._multiple, self._limit = rollout.steps_per_dispatch, rollout.max_tokens_to_generate
        self._longest: dict[int, int] = {}  # by step

    @property
    def used(self) -> bool:
        """True where several versions may draw a sample; with S = 1 every sample has one window."""
        return self._windows > 1

    def known(self, step: int) -> int:
        """Returns a step after all others: what is decided follows from the samples, so every step becomes the same."""
        return sys.maxsize

    def recorded(self, index: int, asked: int, step: int) -> None:
        """Returns None: nothing is recorded."""

    def forget(self, before: int) -> None:
        """Does nothing: nothing is recorded."""

    def quantum(self, step: int) -> int:
        """Returns the tokens in a window of a sample whose batch is begun when `step` steps are done."""
        if self._fixed is not None:
            return self._fixed
        tokens = _SHARE * max(self.state(step), default=self._limit) / max(self._windows, 1)
        return max(math.ceil(tokens / self._multiple), 1) * self._multiple

    def saw(self, step: int, longest: int) -> None:
        """Notes the most tokens that a sample of the batch of a step drew."""
        if not self.used:
            return
        self._longest[step] = longest
        self._longest.pop(step - 2 * _LOOKED_AT, None)

    def state(self, step: int) -> list[int]:
        """Returns the lengths that set the quantum when `step` steps are done, for a checkpoint."""
        return [self._longest[s] for s in range(step - _LOOKED_AT, step) if s in self._longest]

    def restore(self, step: int, state: Sequence[int]) -> None:
        """Takes over what `state` returned when `step` steps were done."""
        self._longest.update({step - len(state) + i: longest for i, longest in enumerate(state)})

    def stale(self, step: int, groups: Sequence["_C"]) -> list["_C"]:
        """Returns no group: none becomes too old."""
        return []

    stale_since = stale

    def batch(self, step: int, groups: Sequence["_C"], size: int, *, over: bool = False) -> list["_C"]:
        """Returns the groups that were opened for a step, in their order; none as long as one has not ended."""
        own = [group for group in groups if group.asked == step]
        return own if all(group.ended for group in own) else []

    def decide(self, step: int, chosen: Sequence["Candidate"], left: Sequence["Candidate"]) -> Mapping[str, float]:
        """Returns no metrics, and writes nothing."""
        return {}


ONE_WINDOW = TokenClock(RolloutConfig(), staleness=1)  # every sample is drawn by one version


def last_window(step: int) -> int:
    """Returns the version under which the samples of a step's batch are drawn to their end; 0 at the start of a run."""
    return max(step - 1, 0)


def stop_at(step: int, version: int, quantum: int) -> int | None:
    """Returns how many tokens a sample of a step's batch draws in a version's window; None for all it has left."""
    return None if version >= last_window(step) else quantum


class Candidate(Protocol):
    """The attributes that the clock reads of a group: of a prompt and its samples.

    Attributes:
      index: the prompt's position in the data.
      asked: the step in the keys of its samples.
      number: its place in the order of submission.
      repeated: it was asked before, and its samples became too old.
      ended: all its samples have ended.
      drawn: the oldest version that drew a token of it, as far as is known; None for no token.
      oldest: `drawn`, or the oldest version that may have drawn a token where that is not known.
    """

    @property
    def index(self) -> int: ...

    @property
    def asked(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def repeated(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def drawn(self) -> int | None: ...

    @property
    def oldest(self) -> int | None: ...

    def record(self) -> Mapping[str, Any]:
        """Returns the journal's entry of the group, once it has ended (podrl.rollout.journal.WallJournal)."""
        ...


_C = TypeVar("_C", bound=Candidate)
_G = TypeVar("_G")


class WallClock:
    """Makes each batch of the groups that have ended first, and repeats what its journal says was decided before.

    A group with a token older than version s - S when s steps are done is given up, and its prompt is asked again under
    new keys. The last step that may train on a group that was asked again waits for it, so that none is asked for ever.
    """

    anew = True  # a group that another host takes over is begun again, unless the journal has it
    mode: Literal["wall"] = "wall"
    used = False  # no sample has a number of tokens to draw in a window

    def __init__(self, journal: WallJournal, staleness: int, place: str):
        """Decides nothing yet.

        Args:
          journal: the file of decisions: earlier ones are repeated, new ones are added.
          staleness: S, the age in versions that a token may have.
          place: the run's directory, for messages.
        """
        self._journal, self._staleness, self._place = journal, staleness, place
        self._cancelled = 0  # groups asked again for the newest step

    def known(self, step: int) -> int:
        """Returns the first step, from `step` on, whose batch is not decided; those before are repeated."""
        return self._journal.known(step)

    def recorded(self, index: int, asked: int, step: int) -> Mapping[str, Any] | None:
        """Returns the journal's entry of a group that a batch of `step` or later holds; None where none does."""
        return self._journal.group(index, asked, step)

    def forget(self, before: int) -> None:
        """Frees the memory of steps before one."""
        self._journal.forget(before)

    def quantum(self, step: int) -> int:
        """Returns 0: time ends a window, no number of tokens does."""
        return 0

    def saw(self, step: int, longest: int) -> None:
        """Ignores the lengths of samples."""

    def restore(self, step: int, state: Sequence[int]) -> None:
        """Ignores the lengths of samples."""

    def state(self, step: int) -> list[int]:
        """Returns no lengths."""
        return []

    def stale(self, step: int, groups: Sequence[_C]) -> list[_C]:
        """Decides which groups are given up when `step` steps are done."""
        if self._journal.batch(step) is not None:
            old = set(self._journal.again(step))
        else:
            old = {group.index for group in self._too_old(step, groups)}
            if groups:  # there are none at the beginning and at the end
                self._journal.write({"step": step, "again": [group.index for group in groups if group.index in old]})
        self._cancelled = len(old)
        return [group for group in groups if group.index in old]

    def stale_since(self, step: int, groups: Sequence[_C]) -> list[_C]:
        """Decides which groups are given up that were found to be too old after the step had begun.

        A dispatch may outlast a step of training. The journal has these as if they had been known when the step began,
        and repeats them so.
        """
        if self._journal.batch(step) is not None or not (late := self._too_old(step, groups)):
            return []
        old = [*self._journal.again(step), *(group.index for group in late)]
        self._journal.write({"step": step, "again": old})
        self._cancelled = len(old)
        return late

    def batch(self, step: int, groups: Sequence[_C], size: int, *, over: bool = False) -> list[_C]:
        """Returns the groups of a step's batch; none as long as too few have ended.

        Args:
          step: the step that trains on the batch.
          groups: the open groups.
          size: number of groups in a batch.
          over: whether sampling for the batch has ended, so that all its groups in the journal must have ended, too.

        Raises:
          ValueError: a group has not become what the journal says of it.
        """
        if (known := self._journal.batch(step)) is None:
            return choose(groups, step, size, self._staleness)
        places, chosen = {(group.index, group.asked): group for group in groups}, []
        for record in known["groups"]:
            group = places.get((record["index"], record["asked"]))
            if group is None or (over and not group.ended) or (group.ended and group.record() != record):
                raise ValueError(
                    f"Prompt {record['index']} of step {step} does not become what {self._place}/batches.jsonl says "
                    "of it: code, data, model and answers of tools must be those of the run that wrote it. Restore "
                    "them, or delete the file to go on without repeating."
                )
            chosen.append(group)
        return chosen if all(group.ended for group in chosen) else []

    def decide(self, step: int, chosen: Sequence[Candidate], left: Sequence[Candidate]) -> Mapping[str, float]:
        """Writes a step's batch to the journal, unless it is there.

        Args:
          step: the step that trains on the batch.
          chosen: the groups of the batch.
          left: the other open groups.

        Returns:
          Metrics of the queue.
        """
        if (known := self._journal.batch(step)) is None:
            ready = sum(group.ended for group in left)
            queue = {
                "queue/running": float(len(left) - ready),
                "queue/ready": float(ready),
                "queue/cancelled": float(self._cancelled),
            }
            known = {"step": step, "groups": [group.record() for group in chosen], "queue": queue}
            self._journal.write(known)
        return known["queue"]

    def _too_old(self, step: int, groups: Sequence[_C]) -> list[_C]:
        least = step - self._staleness
        return [group for group in groups if group.drawn is not None and group.drawn < least]


def choose(groups: Sequence[_C], step: int, size: int, staleness: int) -> list[_C]:
    """Chooses the groups of a step's batch of `size` groups; none as long as too few have ended, or one is waited for.

    A group that was asked again is waited for by the last step that may have it. Of the others that have ended, those
    with the oldest tokens go first, then those submitted first.
    """
    ages = {group: group.oldest for group in groups if group.ended or group.repeated}
    due = [g for g, v in ages.items() if g.repeated and v is not None and v <= step - staleness][:size]
    if not all(group.ended for group in due):
        return []
    others = [group for group in ages if group.ended and group not in due]
    others.sort(key=lambda group: (step if (v := ages[group]) is None else v, group.number))
    chosen = [*due, *others][:size]
    return chosen if len(chosen) == size else []


def in_sessions(points: Sequence[tuple[_G, Sequence[Points]]]) -> Iterator[list[tuple[_G, Points]]]:
    """Yields, for each session in which a version draws groups, the groups and where their samples stop.

    Args:
      points: the groups, each with where its samples stop in each session of the version.
    """
    for k in range(max((len(each) for _, each in points), default=0)):
        yield [(group, each[k]) for group, each in points if k < len(each)]


def sessions_of(group: Mapping[str, Any], version: int) -> list[Points]:
    """Lists where a recorded group's samples stop in each session of a version.

    A sample does not stop in the session that draws its last token.
    """
    ends = [[tokens for v, tokens in runs if v == version] for runs in group["runs"]]
    return [_points(group, version, ends, k) for k in range(max([1, *map(len, ends)]))]


def _points(group: Mapping[str, Any], version: int, ends: Sequence[Sequence[int]], k: int) -> Points:
    """Returns where a recorded group's samples stop in session `k` of a version.

    Args:
      group: the group's entry of the journal.
      version: the version of the weights.
      ends: numbers of sampled tokens at which each sample left each session of the version.
      k: the number of the session, from 0.
    """
    recorded, late = {}, {}
    for b, runs in enumerate(group["runs"]):
        last = runs[-1][0] if runs else 0
        if version < last or k < len(ends[b]) - 1:
            before = max((tokens for v, tokens in runs if v < version), default=0)
            recorded[b] = ends[b][min(k, len(ends[b]) - 1)] if ends[b] else before
        elif b in group["late"]:
            late[b] = group["tokens"][b]
    return Points(recorded=recorded, late=late)
