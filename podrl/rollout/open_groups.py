"""Groups that no batch holds yet: prompts with their samples, in one process and on the leader of a pod."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from podrl.engine.session import Track
from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.journal import agrees, runs_of
from podrl.rollout.partial import Partial, cut, join, of_tracks, take_prompts
from podrl.types import Prompts


@dataclasses.dataclass(eq=False)
class Group(abc.ABC):
    """A prompt and its samples; by the clock of tokens, several prompts that one process makes.

    Attributes:
      prompts: the prompts.
      number: position in the order of submission.
      asked: step in the keys of the samples: that of the prompts' batch, or the one at which a prompt was asked again.
      repeated: True where the prompt was asked before, and its samples became too old.
      origin: samples as a checkpoint or another host has them; None where they are begun here, or have gone on since.
      looked_up: the oldest version that drew a token, as far as it was looked up or heard of.
    """

    prompts: Prompts
    number: int
    asked: int
    repeated: bool
    origin: Partial | None
    looked_up: int | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.looked_up = None if self.origin is None else oldest_of(self.origin)

    @property
    def index(self) -> int:
        """Position of the first prompt in the data."""
        return int(self.prompts.index_P[0])

    @property
    def key(self) -> tuple[int, int]:
        """Position of the first prompt in the data, and the step at which it was asked."""
        return self.index, self.asked

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once all samples have ended."""

    @property
    def drawn(self) -> int | None:
        """The oldest version that drew a token; None as long as there is no token, or none is heard of."""
        return self.looked_up

    @property
    def oldest(self) -> int | None:
        """As podrl.rollout.clock.Candidate.oldest."""
        return self.drawn

    @abc.abstractmethod
    def record(self) -> Mapping[str, Any]:
        """Returns the journal's entry of the group, once it has ended (podrl.rollout.journal.WallJournal)."""

    @abc.abstractmethod
    def states(self) -> Sequence[tuple[Mapping[str, Any], Track | None]]:
        """Returns the samples' records as podrl.rollout.players.Player.state does."""

    def part(self, step: int) -> Partial:
        """Copies the samples as they are, for a checkpoint, as a part of the batch of a step."""
        states = self.states() if self.origin is None else ()
        whole = self.origin or of_tracks(self.prompts, states, asked=bool(states), step=step, quantum=0)
        return self.marked(whole, step)

    def marked(self, part: Partial, step: int) -> Partial:
        """Adds to a copy of the samples how the prompt was asked; `step` is the step of the batch it is a part of."""
        own = {"asked": self.asked, "repeated": self.repeated}
        return dataclasses.replace(part, step=step, samples=[{**sample, **own} for sample in part.samples])


_G = TypeVar("_G", bound=Group)
_NONE: Mapping[tuple[int, int], Partial] = {}


class OpenGroups(Generic[_G]):
    """The groups that no batch holds yet.

    Attributes:
      groups: these, in the order of submission.
      position: state of the data after the prompts that were submitted last, as JSON bytes.
    """

    def __init__(
        self,
        clock: TokenClock | WallClock,
        size: int,
        make: Callable[[Prompts, int, int, bool, Partial | None], _G],
        ends: Callable[[int], Sequence[int]] = lambda prompts: range(prompts + 1),
    ):
        """Begins with no group.

        Args:
          clock: decides which groups make a batch, and which are asked again.
          size: number of groups of a batch.
          make: makes a group of the values of its fields, in their order.
          ends: cuts a number of prompts into groups: 0, and the end of each group.
        """
        self._clock, self._size, self._make, self._ends = clock, size, make, ends
        self.groups: list[_G] = []
        self.position = b""
        self._submitted = 0
        self._counts: dict[int, Mapping[str, float]] = {}  # by step

    def resume(self, step: int, pending: Sequence[Partial]) -> None:
        """Takes over the groups of a checkpoint, which holds them in as many parts as there are batches.

        Samples that the journal says became others are begun anew: a host that had them was lost later.
        """
        self._clock.forget(step)
        for part in pending:
            self.position = part.prompts.data_state
            for first, prompts in self._cut(part.prompts):
                origin = cut(part, prompts, first)
                said = {"asked": part.step, "repeated": False, **origin.samples[0]}
                record = self._clock.recorded(int(prompts.index_P[0]), int(said["asked"]), step)
                known = record is None or agrees(record, _runs(origin), step)
                self._add(prompts, int(said["asked"]), bool(said["repeated"]), origin if known else None)

    def submit(self, prompts: Prompts, step: int) -> None:
        """Opens the groups of the prompts of a step's batch."""
        self.position = prompts.data_state
        for _, part in self._cut(prompts):
            self._add(part, step)

    def ask_again(self, old: Sequence[_G], step: int, give_up: Callable[[_G], None]) -> None:
        """Gives up groups that are too old for a step, and asks their prompts again, in their places."""
        for group in old:
            give_up(group)
            self.groups[self.groups.index(group)] = self._make(group.prompts, group.number, step, True, None)

    def decide(self, step: int, chosen: Sequence[_G]) -> None:
        """Makes groups the batch of a step; it is in the journal when this returns."""
        left = [group for group in self.groups if group not in chosen]
        self._counts[step] = self._clock.decide(step, chosen, left)
        self.groups = left

    def counts(self, step: int) -> Mapping[str, float]:
        """Returns, once, the metrics of the queue when the batch of a step was decided."""
        return self._counts.pop(step, {})

    def rest(self) -> bytes:
        """Returns the position for a checkpoint that holds no open groups: empty as long as there are some."""
        return b"" if self.groups else self.position

    def state(
        self, step: int, ahead: int, *, last: bool = False, found: Mapping[tuple[int, int], Partial] = _NONE
    ) -> Partial:
        """Copies a part of the groups, for a checkpoint: as many as a batch will have.

        Args:
          step: the step of that batch.
          ahead: number of batches before it.
          last: whether the part has all groups that are left.
          found: samples as others have them, by the group's key.
        """
        own = self.groups[ahead * self._size : None if last else (ahead + 1) * self._size]
        parts = [group.marked(found[group.key], step) if group.key in found else group.part(step) for group in own]
        whole = join(parts)
        return dataclasses.replace(whole, prompts=dataclasses.replace(whole.prompts, data_state=self.position))

    def _cut(self, prompts: Prompts) -> list[tuple[int, Prompts]]:
        """Cuts prompts into those of groups, each with the place of the first."""
        ends = self._ends(len(prompts.length_P))
        return [(i, take_prompts(prompts, np.arange(i, j))) for i, j in itertools.pairwise(ends)]

    def _add(self, prompts: Prompts, asked: int, repeated: bool = False, origin: Partial | None = None) -> None:
        self.groups.append(self._make(prompts, self._submitted, asked, repeated, origin))
        self._submitted += 1


def oldest_of(part: Partial) -> int | None:
    """Returns the oldest version that drew a token of a part; None where it has no token."""
    return min((int(version) for version in part.rows["version_X"] if version >= 0), default=None)


def begun(part: Partial) -> bool:
    """Returns True if a sample of a part was begun."""
    return any(sample["track"] is not None for sample in part.samples)


def _runs(part: Partial) -> list[list[list[int]]]:
    """Lists the sessions that drew each sample, in the journal's form."""
    versions = np.split(part.rows["version_X"], np.cumsum(part.rows["count_B"])[:-1])
    breaks = [(sample["track"] or {}).get("breaks", ()) for sample in part.samples]
    return [runs_of(versions_X.tolist(), each) for versions_X, each in zip(versions, breaks, strict=True)]
