"""Clocks decide where samples stop under each version of the weights, which groups make a batch, and which groups are
too old.

`TokenClock` decides by the samples' numbers of tokens alone, so a repeated run takes the same decisions. `WallClock`
decides by the times at which samples end, and writes each decision to the journal before any process acts on it, so
that the decision can be repeated. Neither uses an engine, a thread or a host. docs/async.md explains what both
guarantee.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from podrl.engine.config import RolloutConfig
from podrl.mappings import JournalEntry
from podrl.rollout.journal import WallJournal
from podrl.rollout.token_budget import TokenBudget
from podrl.types import LeftOut

_LOOKED_AT = 4  # number of batches whose longest sample sets the quantum
# The quantum is this share of the longest sample, divided by the staleness S. If the share is smaller, more tokens are
# left for the last windows; if it is larger, long samples start late.
_SHARE = 0.7


class TokenClock:
    """Cuts samples into windows of equally many tokens, one window for each version of the weights.

    With a staleness of S, token i of a sample of batch b is drawn by version
    min(max(b - S, 0) + i // quantum, max(b - 1, 0)), whatever else is in flight. In window b - 1, the last window
    before the batch trains, samples are drawn to their end.

    Unless `rollout.window_tokens` sets the quantum, it is 0.7 times the longest sample of the last four batches,
    divided by S and rounded up to whole dispatches: long samples are then cut into windows, and most samples are drawn
    by one version. Before the first batch is known, `rollout.max_tokens_to_generate` stands for the longest sample.
    """

    anew = False  # a host that takes over a group continues its samples, and gets the same tokens

    @property
    def mode(self) -> Literal["windows", "whole"]:
        """Returns 'windows' if several versions may draw a sample, 'whole' if one version draws all its tokens."""
        return "windows" if self.used else "whole"

    def __init__(self, rollout: RolloutConfig, *, staleness: int):
        """Begins without lengths of samples.

        Args:
          rollout: settings of the engine.
          staleness: S, the number of windows that may draw a sample.
        """
        self._fixed, self._windows = rollout.window_tokens, staleness
        self._multiple, self._limit = rollout.steps_per_dispatch, rollout.max_tokens_to_generate
        self._longest: dict[int, int] = {}  # number of tokens of each batch's longest sample, by step

    @property
    def used(self) -> bool:
        """True if several versions may draw a sample; with S = 1 every sample has one window."""
        return self._windows > 1

    def known(self, step: int) -> int:
        """Returns a number above all steps: decisions follow from the samples, so every step can be repeated."""
        return sys.maxsize

    def recorded(self, index: int, submit_step: int, step: int) -> None:
        """Returns None, as this clock has no journal."""

    def forget(self, before: int) -> None:
        """Does nothing, as this clock has no journal."""

    def quantum(self, step: int) -> int:
        """Returns the number of tokens that a sample draws in each window except its last.

        Args:
          step: number of steps that are done when the sample's batch begins.
        """
        if self._fixed is not None:
            return self._fixed
        tokens = _SHARE * max(self.state(step), default=self._limit) / max(self._windows, 1)
        return max(math.ceil(tokens / self._multiple), 1) * self._multiple

    def saw(self, step: int, longest: int) -> None:
        """Records the number of tokens of the longest sample in the batch of a step."""
        if not self.used:
            return
        self._longest[step] = longest
        self._longest.pop(step - 2 * _LOOKED_AT, None)

    def state(self, step: int) -> list[int]:
        """Returns the lengths that set the quantum when `step` steps are done, for a checkpoint."""
        return [self._longest[s] for s in range(step - _LOOKED_AT, step) if s in self._longest]

    def restore(self, step: int, state: Sequence[int]) -> None:
        """Takes over the lengths that `state` returned when `step` steps were done."""
        self._longest.update({step - len(state) + i: longest for i, longest in enumerate(state)})

    def stale(self, step: int, groups: Sequence["_C"]) -> list["_C"]:
        """Returns no groups: with this clock no group becomes too old."""
        return []

    stale_since = stale

    def without_signal(self, step: int, groups: Sequence["_C"], most: int) -> list["_C"]:
        """Returns no groups: with this clock, dynamic sampling replaces groups while the batch is sampled."""
        return []

    def batch(self, step: int, groups: Sequence["_C"], size: int, *, over: bool = False) -> list["_C"]:
        """Returns the groups that were opened for a step, in their order; an empty list until all of them have
        ended."""
        own = [group for group in groups if group.submit_step == step]
        return own if all(group.ended for group in own) else []

    def decide(self, step: int, chosen: Sequence["Candidate"], left: Sequence["Candidate"]) -> Mapping[str, float]:
        """Returns no metrics, and writes nothing."""
        return {}


ONE_WINDOW = TokenClock(RolloutConfig(), staleness=1)  # every sample is drawn by one version


def last_window(step: int) -> int:
    """Returns the version under which the samples of a step's batch are drawn to their end; 0 at the start of a run."""
    return max(step - 1, 0)


def stop_at(step: int, version: int, quantum: int) -> int | None:
    """Returns how many tokens a sample of a step's batch draws in the window of a version; None for all remaining
    tokens."""
    return None if version >= last_window(step) else quantum


class Candidate(Protocol):
    """The attributes that a clock reads of a group, which is a prompt with its samples.

    Attributes:
      index: position of the prompt in the data.
      submit_step: step at which the prompt was submitted; a part of the samples' random keys.
      number: place of the group in the order of submission.
      repeated: True if the prompt was submitted before, and its earlier samples became too old.
      ended: True if all samples have ended.
      ready: True if a step may train on the group: all samples have ended and, with dynamic sampling, all their rewards
        are known.
      signal: True if the rewards of a ready group differ; always True without dynamic sampling.
      drawn: oldest version known to have drawn a token of the group; None if no token is known.
      oldest: `drawn`; if `drawn` is not known, the oldest version that may have drawn a token.
    """

    @property
    def index(self) -> int: ...

    @property
    def submit_step(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def repeated(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def signal(self) -> bool | None: ...

    @property
    def drawn(self) -> int | None: ...

    @property
    def oldest(self) -> int | None: ...

    def record(self) -> JournalEntry:
        """Returns the entry of an ended group for the journal (podrl.rollout.journal.WallJournal)."""
        ...


_C = TypeVar("_C", bound=Candidate)
_G = TypeVar("_G")


class WallClock:
    """Makes each batch from the groups that end first, and repeats the decisions that are in its journal.

    After step s, a group with a token older than version s - S is dropped, and its prompt is submitted again under new
    random keys. The last step that may train on such a repeated group waits for it, so no prompt is repeated for ever.

    With dynamic sampling, a group whose rewards are all equal is dropped, and a prompt from the reserve of the batch's
    step is opened in its place. The journal's line of the batch lists the dropped groups.
    """

    anew = True  # a host that takes over a group begins its samples again, unless the journal has the group
    mode: Literal["wall"] = "wall"
    used = False  # samples have no quantum of tokens

    def __init__(self, journal: WallJournal, staleness: int, place: str, *, replaced: int = 0):
        """Stores the arguments.

        Args:
          journal: file of decisions; decisions in it are repeated, new decisions are added.
          staleness: S, largest age of a token, in steps.
          place: directory of the run, for messages.
          replaced: number of samples that dynamic sampling takes from the loss with each replaced group; 0 without
            dynamic sampling.
        """
        self._journal, self._staleness, self._place, self._replaced = journal, staleness, place, replaced
        self._cancelled = 0  # number of groups that became too old for the newest step
        self._dropped: list[tuple[int, int]] = []  # groups with equal rewards that left the queue in the newest step

    def known(self, step: int) -> int:
        """Returns the first step, from `step` on, whose batch is not in the journal.

        The batches of earlier steps are repeated as the journal says.
        """
        return self._journal.known(step)

    def recorded(self, index: int, submit_step: int, step: int) -> JournalEntry | None:
        """Returns the journal's entry of a group in a batch of `step` or later; None if no such batch has the group."""
        return self._journal.group(index, submit_step, step)

    def forget(self, before: int) -> None:
        """Frees the memory of decisions for steps before `before`."""
        self._journal.forget(before)

    def quantum(self, step: int) -> int:
        """Returns 0: windows end by time, not after a number of tokens."""
        return 0

    def saw(self, step: int, longest: int) -> None:
        """Ignores the lengths of samples."""

    def restore(self, step: int, state: Sequence[int]) -> None:
        """Ignores the lengths of samples."""

    def state(self, step: int) -> list[int]:
        """Returns no lengths."""
        return []

    def stale(self, step: int, groups: Sequence[_C]) -> list[_C]:
        """Returns the groups that are too old once `step` steps are done; writes the decision unless it is repeated."""
        self._dropped = []
        if self._journal.batch(step) is not None:
            old = set(self._journal.again(step))
        else:
            old = {group.index for group in self._too_old(step, groups)}
            if groups:  # there are no groups at the start and at the end of a run
                self._journal.write({"step": step, "again": [group.index for group in groups if group.index in old]})
        self._cancelled = len(old)
        return [group for group in groups if group.index in old]

    def stale_since(self, step: int, groups: Sequence[_C]) -> list[_C]:
        """Returns the groups that turn out to be too old only after the step has begun, and writes them to the journal.

        A dispatch may outlast a training step, so the versions of its tokens may be known too late for `stale`. The
        journal lists these groups as if `stale` had returned them, and a repeated run drops them at the step's start.
        """
        if self._journal.batch(step) is not None or not (late := self._too_old(step, groups)):
            return []
        old = [*self._journal.again(step), *(group.index for group in late)]
        self._journal.write({"step": step, "again": old})
        self._cancelled = len(old)
        return late

    def without_signal(self, step: int, groups: Sequence[_C], most: int) -> list[_C]:
        """Returns the groups that leave the queue in a step because their rewards are all equal (dynamic sampling).

        These groups enter the journal together with the batch of the step. This is early enough, because no earlier
        step trains on the groups that are opened in their place.

        Args:
          step: the newest step; its batch is not decided yet, or is repeated from the journal.
          groups: the open groups.
          most: number of prompts in reserve, from which groups can be opened in place of the groups that leave.
        """
        if (known := self._journal.batch(step)) is not None:
            keys = {(index, submit_step) for index, submit_step in known.get("dropped", ())}
            return [group for group in groups if (group.index, group.submit_step) in keys]
        dropped = [group for group in groups if group.ready and group.signal is False][:most]
        self._dropped += [(group.index, group.submit_step) for group in dropped]
        return dropped

    def batch(self, step: int, groups: Sequence[_C], size: int, *, over: bool = False) -> list[_C]:
        """Returns the groups of a step's batch; an empty list as long as too few are ready.

        Args:
          step: the step that trains on the batch.
          groups: the open groups.
          size: number of groups in a batch.
          over: True if sampling for the batch has ended, so that all its groups in the journal must have ended.

        Raises:
          ValueError: a repeated group differs from its entry in the journal.
        """
        if (known := self._journal.batch(step)) is None:
            return choose(groups, step, size, self._staleness)
        places, chosen = {(group.index, group.submit_step): group for group in groups}, []
        for record in known["groups"]:
            group = places.get((record["index"], record["asked"]))
            if group is None or (over and not group.ended) or (group.ended and group.record() != record):
                raise ValueError(
                    f"The samples of prompt {record['index']} in step {step} differ from their entry in {self._place}/"
                    "batches.jsonl. To repeat a run, use its code, data, model and the folder outside/ (answers of "
                    "tools, episodes of programs). Restore them, or delete the file to go on without repeating."
                )
            chosen.append(group)
        return chosen if all(group.ended for group in chosen) else []

    def decide(self, step: int, chosen: Sequence[Candidate], left: Sequence[Candidate]) -> Mapping[str, float]:
        """Writes a step's batch to the journal, unless the journal has it already.

        Args:
          step: the step that trains on the batch.
          chosen: the groups of the batch.
          left: the other open groups.

        Returns:
          The metrics of the queue (`queue/`) at the time when the batch was decided, and of dynamic sampling.
        """
        if (known := self._journal.batch(step)) is None:
            ready = sum(group.ready for group in left)
            queue = {
                "queue/running": float(len(left) - ready),
                "queue/ready": float(ready),
                "queue/cancelled": float(self._cancelled),
            }
            known = {"step": step, "groups": [group.record() for group in chosen], "queue": queue}
            if self._replaced:
                queue |= self._replacements(chosen)
                known["dropped"] = self._dropped
            self._journal.write(known)
        return known["queue"]

    def _replacements(self, chosen: Sequence[Candidate]) -> dict[str, float]:
        """Returns the metrics of dynamic sampling for a batch, with the names that they have with `TokenClock`."""
        count = len(self._dropped)
        metrics = {
            "dynamic_sampling/groups_drawn": float(len(chosen) + count),
            "dynamic_sampling/groups_replaced": float(count),
            "dynamic_sampling/groups_left_without_signal": float(sum(group.signal is False for group in chosen)),
        }
        if count:
            metrics[f"loss/left_out/{LeftOut.DYNAMIC_SAMPLING.name.lower()}"] = float(count * self._replaced)
        return metrics

    def _too_old(self, step: int, groups: Sequence[_C]) -> list[_C]:
        least = step - self._staleness
        return [group for group in groups if group.drawn is not None and group.drawn < least]


def choose(groups: Sequence[_C], step: int, size: int, staleness: int) -> list[_C]:
    """Chooses the groups of a step's batch; returns an empty list if too few are ready or the step must wait for a
    group.

    The last step that may train on a repeated group waits for it. Of the other groups that are ready, groups with a
    signal go before groups without a signal. Among these, groups with older tokens go first, and among equally old
    groups the group that was submitted first.

    Args:
      groups: the open groups.
      step: the step that trains on the batch.
      size: number of groups of the batch.
      staleness: S, largest age of a token, in steps.
    """
    ages = {group: group.oldest for group in groups if group.ready or group.repeated}
    due = [g for g, v in ages.items() if g.repeated and v is not None and v <= step - staleness][:size]
    if not all(group.ready for group in due):
        return []
    others = [group for group in ages if group.ready and group not in due]
    others.sort(key=lambda group: (group.signal is False, step if (v := ages[group]) is None else v, group.number))
    chosen = [*due, *others][:size]
    return chosen if len(chosen) == size else []


def in_sessions(budgets: Sequence[tuple[_G, Sequence[TokenBudget]]]) -> Iterator[list[tuple[_G, TokenBudget]]]:
    """Yields, for each session of a version, the groups that draw tokens in the session, each with its budget.

    Args:
      budgets: groups, each with its budgets for the sessions of the version.
    """
    for k in range(max((len(each) for _, each in budgets), default=0)):
        yield [(group, each[k]) for group, each in budgets if k < len(each)]


def sessions_of(group: JournalEntry, version: int) -> list[TokenBudget]:
    """Lists the budget of a recorded group in each session of a version.

    A sample has no limit in the session that draws its last token.
    """
    ends = [[tokens for v, tokens in runs if v == version] for runs in group["runs"]]
    return [_budget_of(group, version, ends, k) for k in range(max([1, *map(len, ends)]))]


def _budget_of(group: JournalEntry, version: int, ends: Sequence[Sequence[int]], k: int) -> TokenBudget:
    """Returns the budget of a recorded group in session `k` of a version.

    Args:
      group: the group's entry in the journal.
      version: version of the weights.
      ends: numbers of sampled tokens at which each sample left each session of the version.
      k: number of the session, from 0.
    """
    recorded, late = {}, {}
    for b, runs in enumerate(group["runs"]):
        last = runs[-1][0] if runs else 0
        if version < last or k < len(ends[b]) - 1:  # the sample goes on in a later session
            before = max((tokens for v, tokens in runs if v < version), default=0)
            recorded[b] = ends[b][min(k, len(ends[b]) - 1)] if ends[b] else before
        elif b in group["late"]:
            late[b] = group["tokens"][b]
    return TokenBudget(recorded=recorded, late=late, repeated=True)
