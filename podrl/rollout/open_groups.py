"""Open groups: prompts whose samples do not belong to a batch yet, in a single process or on the leader of a pod."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from podrl.config import plural
from podrl.engine.session import Track
from podrl.mappings import JournalEntry, SavedState
from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.journal import agrees, runs_of
from podrl.rollout.partial import PartialBatch, cut, join, of_tracks, take_prompts
from podrl.types import Prompts


@dataclasses.dataclass(eq=False)
class Group(abc.ABC):
    """A prompt and its samples; with `rollout.clock='tokens'`, several prompts whose samples one process makes.

    Attributes:
      prompts: the prompts.
      number: position of the group in the order of submission.
      submit_step: step at which the prompts were submitted last; a part of the samples' random keys.
      repeated: True if the prompt was submitted again because its earlier samples became too old.
      origin: state in a checkpoint or on another host from which the samples continue; None if the samples begin in
        this process, or once they have continued.
      looked_up: oldest version that is known to have drawn a token; None if no token is known.
      signal: True if the rewards of the samples differ, or dynamic sampling is off; None until all rewards are known.
    """

    prompts: Prompts
    number: int
    submit_step: int
    repeated: bool
    origin: PartialBatch | None
    looked_up: int | None = dataclasses.field(init=False, default=None)
    signal: bool | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.looked_up = None if self.origin is None else oldest_of(self.origin)

    @property
    def index(self) -> int:
        """Position in the data of the group's first prompt."""
        return int(self.prompts.index_P[0])

    @property
    def key(self) -> tuple[int, int]:
        """Identity of the group: position in the data of its first prompt, and `submit_step`."""
        return self.index, self.submit_step

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once all samples have ended."""

    @property
    def ready(self) -> bool:
        """True once a step may train on the group (podrl.rollout.clock.Candidate.ready)."""
        return self.ended

    @property
    def drawn(self) -> int | None:
        """Oldest version that is known to have drawn a token; None if no token is known."""
        return self.looked_up

    @property
    def oldest(self) -> int | None:
        """Oldest version that may have drawn a token (podrl.rollout.clock.Candidate.oldest)."""
        return self.drawn

    @abc.abstractmethod
    def record(self) -> JournalEntry:
        """Returns the entry of an ended group for the journal (podrl.rollout.journal.WallJournal)."""

    @abc.abstractmethod
    def states(self) -> Sequence[tuple[SavedState, Track | None]]:
        """Returns the values and records of the samples, in the form of podrl.rollout.players.Player.state."""

    def part(self, step: int) -> PartialBatch:
        """Copies the present state of the samples as a part of a step's batch, for a checkpoint."""
        states = self.states() if self.origin is None else ()
        whole = self.origin or of_tracks(self.prompts, states, prompt_count=bool(states), step=step, quantum=0)
        return self.marked(whole, step)

    def marked(self, part: PartialBatch, step: int) -> PartialBatch:
        """Returns `part` as a part of a step's batch, with `submit_step` and `repeated` added to its samples."""
        own = {"asked": self.submit_step, "repeated": self.repeated}
        return dataclasses.replace(part, step=step, samples=[{**sample, **own} for sample in part.samples])


_G = TypeVar("_G", bound=Group)
_NONE: Mapping[tuple[int, int], PartialBatch] = {}


class OpenGroups(Generic[_G]):
    """The groups that do not belong to a batch yet.

    Attributes:
      groups: the open groups, in the order of submission.
      position: state of the data after the prompts that were submitted last, as JSON bytes.
    """

    def __init__(
        self,
        clock: TokenClock | WallClock,
        size: int,
        make: Callable[[Prompts, int, int, bool, PartialBatch | None], _G],
        ends: Callable[[int], Sequence[int]] = lambda prompts: range(prompts + 1),
    ):
        """Makes an empty collection.

        Args:
          clock: clock that decides which groups make a batch, and which prompts are submitted again.
          size: number of groups of a batch.
          make: function that makes a group; its arguments are the first five fields of `Group`.
          ends: function from a number of prompts to the boundaries of their groups. A boundary is the index of a
            prompt, and the first boundary is 0. By default each prompt is a group.
        """
        self._clock, self._size, self._make, self._ends = clock, size, make, ends
        self.groups: list[_G] = []
        self.position = b""
        self._submitted = 0
        # (step, prompts): in this step, the prompts may replace a group whose rewards are all equal.
        self._reserve: list[tuple[int, Prompts]] = []
        self._resumed_reserve: int | None = None  # size of the reserve of each batch in the checkpoint, in prompts
        self._counts: dict[int, Mapping[str, float]] = {}  # metrics of each decided batch, by step

    def resume(self, step: int, pending: Sequence[PartialBatch]) -> None:
        """Opens the groups of a checkpoint.

        The samples of a group begin anew if they cannot become the samples of the group's entry in the journal. This
        happens if the run lost the host of these samples after the checkpoint, and another host drew other samples.

        Args:
          step: number of steps that are done.
          pending: parts of the open groups, one for each batch in flight.
        """
        self._clock.forget(step)
        reserve: list[Prompts] = []
        for part in pending:
            self.position = part.prompts.data_state
            for first, prompts in self._cut(part.prompts):
                origin = cut(part, prompts, first)
                if self._keeps_reserve and not origin.samples:
                    reserve.append(prompts)
                    continue
                values = {"asked": part.step, "repeated": False, **origin.samples[0]}
                record = self._clock.recorded(int(prompts.index_P[0]), int(values["asked"]), step)
                known = record is None or agrees(record, _runs(origin), step)
                self._add(prompts, int(values["asked"]), bool(values["repeated"]), origin if known else None)
        # All batches have equally many prompts in reserve, because `submit` refuses another number, and a step uses its
        # reserve only after its checkpoint.
        if self._keeps_reserve and (batches := len(self.groups) // self._size):
            self._resumed_reserve = len(reserve) // batches
            self._reserve += [(step + i * batches // len(reserve), prompts) for i, prompts in enumerate(reserve)]

    def submit(self, prompts: Prompts, step: int) -> None:
        """Opens groups for the prompts of a step's batch.

        With `rollout.clock='wall'`, the prompts after the first `size` prompts are the step's reserve for dynamic
        sampling.

        Raises:
          ValueError: the batches of the checkpoint have another number of prompts in reserve.
        """
        self.position = prompts.data_state
        parts = [part for _, part in self._cut(prompts)]
        count = self._size if self._keeps_reserve else len(parts)
        if self._resumed_reserve not in (None, spare := len(parts) - count):
            raise ValueError(
                f"A batch has {plural(spare, 'prompt')} in reserve, but the unfinished batches of the checkpoint have "
                f"{self._resumed_reserve} each: dynamic_sampling and dynamic_sampling_batches may not change when a "
                "run resumes. Restore them, or begin another run."
            )
        for part in parts[:count]:
            self._add(part, step)
        self._reserve += [(step, part) for part in parts[count:]]

    def replace(self, step: int, give_up: Callable[[_G], None]) -> bool:
        """Replaces groups whose rewards are all equal by prompts of the step's reserve (dynamic sampling).

        Args:
          step: the step whose batch is decided next.
          give_up: function that cancels the open samples of a group.

        Returns:
          True if groups were opened.

        Raises:
          ValueError: the step is repeated, and the journal drops more groups than there are prompts in reserve.
        """
        opened = False
        # If the step is repeated from the journal, groups that are opened here may be among the groups to drop.
        while dropped := self._clock.without_signal(
            step, self.groups, left := sum(s == step for s, _ in self._reserve)
        ):
            if len(dropped) > left:
                raise ValueError(
                    f"batches.jsonl drops {len(dropped)} groups of equal rewards in step {step}, but {left} prompts "
                    "are in reserve. To repeat a run, use its dynamic_sampling and dynamic_sampling_batches: restore "
                    "them, or delete the file to go on without repeating."
                )
            for group in dropped:
                give_up(group)
                self.groups.remove(group)
                self._add(self._reserve.pop(0)[1], step)  # `decide` has dropped the reserves of earlier steps
            opened = True
        return opened

    def resubmit(self, old: Sequence[_G], step: int, give_up: Callable[[_G], None]) -> None:
        """Cancels groups that are too old for a step; new groups with the same prompts take their places.

        Args:
          old: groups that are too old.
          step: the step, which is part of the new samples' random keys.
          give_up: function that cancels the open samples of a group.
        """
        for group in old:
            give_up(group)
            self.groups[self.groups.index(group)] = self._make(group.prompts, group.number, step, True, None)

    def decide(self, step: int, chosen: Sequence[_G]) -> None:
        """Makes groups the batch of a step, and removes them from the open groups.

        With `rollout.clock='wall'` the decision is in the journal when this call returns.
        """
        left = [group for group in self.groups if group not in chosen]
        self._counts[step] = self._clock.decide(step, chosen, left)
        self.groups = left
        self._reserve = [(s, prompts) for s, prompts in self._reserve if s > step]

    def counts(self, step: int) -> Mapping[str, float]:
        """Returns the metrics of the queue at the time when a step's batch was decided; a second call returns an empty
        dict."""
        return self._counts.pop(step, {})

    def rest(self) -> bytes:
        """Returns `position` for a checkpoint that holds no open groups; empty bytes if there are open groups."""
        return b"" if self.groups else self.position

    def state(
        self, step: int, ahead: int, *, last: bool = False, found: Mapping[tuple[int, int], PartialBatch] = _NONE
    ) -> PartialBatch:
        """Copies the part of a checkpoint for one batch: as many open groups as a batch has, and the batch's reserve.

        Args:
          step: the step of the batch.
          ahead: number of batches in flight before this batch; their parts come first.
          last: True if the part has all remaining groups and reserves.
          found: states of the samples that other hosts make, by the group's key.
        """
        own = self.groups[ahead * self._size : None if last else (ahead + 1) * self._size]
        parts = [group.marked(found[group.key], step) if group.key in found else group.part(step) for group in own]
        reserve = [prompts for s, prompts in self._reserve if s == step or (last and s > step)]
        parts += [of_tracks(prompts, (), prompt_count=0, step=step, quantum=0) for prompts in reserve]
        whole = join(parts)
        return dataclasses.replace(whole, prompts=dataclasses.replace(whole.prompts, data_state=self.position))

    @property
    def _keeps_reserve(self) -> bool:
        """True with `rollout.clock='wall'`: prompts in reserve are kept here; with 'tokens' by each group itself."""
        return self._clock.mode == "wall"

    def _cut(self, prompts: Prompts) -> list[tuple[int, Prompts]]:
        """Cuts prompts into groups; returns (index of the first prompt, prompts) of each group."""
        ends = self._ends(len(prompts.length_P))
        return [(i, take_prompts(prompts, np.arange(i, j))) for i, j in itertools.pairwise(ends)]

    def _add(
        self, prompts: Prompts, submit_step: int, repeated: bool = False, origin: PartialBatch | None = None
    ) -> None:
        self.groups.append(self._make(prompts, self._submitted, submit_step, repeated, origin))
        self._submitted += 1


def oldest_of(part: PartialBatch) -> int | None:
    """Returns the oldest version that drew a token of a part; None if no token was drawn."""
    return min((int(version) for version in part.rows["version_X"] if version >= 0), default=None)


def begun(part: PartialBatch) -> bool:
    """Returns True if any sample of a part has begun."""
    return any(sample["track"] is not None for sample in part.samples)


def _runs(part: PartialBatch) -> list[list[list[int]]]:
    """Lists the sessions that drew each sample, in the form of the journal (`runs_of`)."""
    versions = np.split(part.rows["version_X"], np.cumsum(part.rows["count_B"])[:-1])
    breaks = [(sample["track"] or {}).get("breaks", ()) for sample in part.samples]
    return [runs_of(versions_X.tolist(), each) for versions_X, each in zip(versions, breaks, strict=True)]
