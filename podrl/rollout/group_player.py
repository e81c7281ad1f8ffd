"""Plays groups of samples, window after window: for one process, and for a rollout host of a pod."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from podrl.engine.session import Track
from podrl.rollout.clock import in_sessions, last_window, sessions_of, stop_at
from podrl.rollout.journal import runs_of
from podrl.rollout.open_groups import Group
from podrl.rollout.partial import Partial, of_tracks
from podrl.rollout.points import Points, points
from podrl.types import STOP_DEADLINE, Experience, Policy, Prompts

# 'wall': the wall clock; 'windows': the clock of tokens, several versions draw a sample; 'whole': one version does.
Mode = Literal["wall", "windows", "whole"]


@dataclasses.dataclass(eq=False)
class OwnGroup(Group):
    """A group whose samples this process makes.

    Attributes:
      making: the samples (podrl.learner.generation.Making); None where one version draws them all, in one call.
      recorded: the journal's entry of the group, which its samples must become; None where there is none.
      since: the first version of the weights that draws the group here from now on, where it is `fixed`.
      taken: True once a batch holds the group.
      told: True once the leader of a pod knows that the group has ended.
      told_drawn: True once the leader of a pod knows the oldest version that drew a token.
    """

    making: Any
    recorded: Mapping[str, Any] | None = None
    since: int = 0
    taken: bool = False
    told: bool = False
    told_drawn: bool = False

    @property
    def fixed(self) -> bool:
        """True where it is known which version draws which tokens."""
        return self.recorded is not None

    @property
    def ended(self) -> bool:
        return len(self.making.player.done) == self.making.player.request.samples

    @property
    def drawn(self) -> int | None:
        if self.looked_up is None:
            versions = (v for _, track in self.states() if track is not None for v in track.versions if v >= 0)
            self.looked_up = min(versions, default=None)
        return self.looked_up

    def states(self) -> Sequence[tuple[Mapping[str, Any], Track | None]]:
        return self.making.player.state()

    def sessions(self, version: int) -> list[Points]:
        """Lists where the samples of a fixed group stop in each session of a version."""
        assert self.recorded is not None
        return sessions_of(self.recorded, version)

    def row(self, points: Points) -> tuple[Any, Points]:
        """Returns the samples and the points to play them to, as a pair for podrl.learner.generation.Generator.play."""
        self.origin = None
        return self.making, points

    def record(self) -> Mapping[str, Any]:
        states = self.states()
        runs = [[] if track is None else runs_of(track.versions, track.breaks) for _, track in states]
        late = [b for b, (value, _) in enumerate(states) if value.get("episode", {}).get("stop") == STOP_DEADLINE]
        tokens = [0 if track is None else len(track.tokens) for _, track in states]
        return {"index": self.index, "asked": self.asked, "runs": runs, "tokens": tokens, "late": late}

    def check(self) -> None:
        """Raises ValueError if the group, which has ended, has not become what a batch holds of it."""
        if self.taken and self.record() != self.recorded:
            raise ValueError(f"prompt {self.index}, taken over, does not become what it was: {self.recorded}")


@dataclasses.dataclass(eq=False)
class TokenGroup(OwnGroup):
    """A group by the clock of tokens: the prompts of a batch that one process makes.

    Attributes:
      quantum: number of tokens that a sample draws in a window, but for the last; 0 where one version draws all.
      made: the experience, once the group has ended.
    """

    quantum: int = 0
    made: Experience | None = None

    @property
    def fixed(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return self.made is not None

    @property
    def drawn(self) -> None:
        return None

    def sessions(self, version: int) -> list[Points]:
        return [points(stop_at(self.asked, version, self.quantum))]

    def part(self, step: int) -> Partial:
        """Copies the samples as they are, for a checkpoint; dynamic sampling may take prompts that have none yet."""
        del step
        asked = len(self.making.player.request.prompts.length_P)
        part = of_tracks(self.prompts, self.states(), asked=asked, step=self.asked, quantum=self.quantum)
        return self.marked(part, self.asked)


class GroupPlayer:
    """Plays groups through the windows of versions, on the thread that uses the rollout mesh.

    Window w lasts from the publication of version w to the next. Groups of which it is known where each sample stops
    are played first, and to the end: by the clock of tokens all are, by the wall clock those that the journal has.
    """

    def __init__(
        self,
        generator: Any,
        mode: Mode,
        *,
        weights: Callable[[int], Policy],
        took: Callable[[], None],
        closed: Callable[[], bool],
    ):
        """Plays nothing yet.

        Args:
          generator: a podrl.learner.generation.Generator; where one version draws all samples, what makes a batch.
          mode: see Mode.
          weights: returns the weights of a version.
          took: called when a group may have ended.
          closed: True once nothing more is to be played.
        """
        self._generator, self._mode = generator, mode
        self._weights, self._took, self._closed = weights, took, closed
        self._made_at = time.monotonic()
        self._began: float | None = None  # when the window was
        self._window_s: float | None = None  # of the window before this one

    def open(
        self,
        prompts: Prompts,
        number: int,
        asked: int,
        repeated: bool,
        origin: Partial | None,
        *,
        quantum: int = 0,
        recorded: Mapping[str, Any] | None = None,
        since: int = 0,
        taken: bool = False,
    ) -> OwnGroup:
        """Opens a group, to be begun with the next window; arguments as the attributes of OwnGroup and TokenGroup."""
        making = None if self._mode == "whole" else self._generator.begin(prompts, asked, origin)
        own = (prompts, number, asked, repeated, origin, making, recorded, since, taken)
        return OwnGroup(*own) if self._mode == "wall" else TokenGroup(*own, quantum=quantum)

    def give_up(self, group: OwnGroup) -> None:
        """Ends what a group has under way."""
        if group.making is not None:
            self._generator.give_up(group.making)

    def begin_window(self) -> None:
        """Notes that a window begins."""
        self._began = time.monotonic()

    def end_window(self) -> None:
        """Notes that the window ends, if one has begun."""
        if self._began is not None:
            self._window_s = time.monotonic() - self._began
        self._began = None

    def made(self, groups: Sequence[OwnGroup], step: int, position: bytes) -> Experience:
        """Returns the experience of groups that have ended, as (a part of) the batch of a step.

        Args:
          groups: by the clock of tokens one group.
          step: the step that trains on them.
          position: by the wall clock, state of the data for a checkpoint that holds no open groups.

        Raises:
          BatchError: a reward function, or too many samples, failed.
        """
        if isinstance(groups[0], TokenGroup):
            assert groups[0].made is not None
            return groups[0].made
        now = time.monotonic()
        seconds, self._made_at = now - self._made_at, now
        made = self._generator.gather([group.making for group in groups], step, seconds)
        prompts = dataclasses.replace(made.rollouts.prompts, data_state=position)
        made = dataclasses.replace(made, rollouts=dataclasses.replace(made.rollouts, prompts=prompts))
        return made if self._window_s is None else noted(made, {"time/window": self._window_s})

    # On the thread.

    def play(self, groups: Iterable[OwnGroup], version: int, *, halt: Callable[[], bool], repeats: bool) -> None:
        """Plays a window.

        Args:
          groups: the open groups.
          version: the version of the weights.
          halt: True once samples that are not fixed are to rest, after the dispatches that are launched.
          repeats: whether only fixed groups are played: the window is repeated from the journal.
        """
        groups = list(groups)
        for together in self._in_order(groups, version):
            self.repeat(together, version)
        if not repeats:
            self._play_on([group for group in groups if not group.fixed and not group.ended], version, halt)

    def repeat(self, groups: Sequence[OwnGroup], version: int) -> None:
        """Plays fixed groups through a window, session by session: nothing else interrupts them.

        An interruption would be another session, in which samples have other last bits than those recorded.
        """
        known = [group for group in groups if group.since <= version and not group.ended]
        if not known or self._closed():
            return
        policy = self._weights(version)
        halt = self._closed if self._mode == "wall" else None
        if self._mode != "whole":
            for chosen in in_sessions([(group, group.sessions(version)) for group in known]):
                rows = [group.row(where) for group, where in chosen if not group.ended]
                if rows and not self._closed():
                    self._generator.play(rows, policy, halt=halt, took=self._took)
        for group in known:
            if isinstance(group, TokenGroup) and not self._closed():
                self._finish(group, policy)
                group.since = version + 1

    def _play_on(self, groups: Sequence[OwnGroup], version: int, halt: Callable[[], bool]) -> None:
        rows = [group.row(Points(urgent=group.oldest is not None)) for group in groups]
        if rows:
            self._generator.play(rows, self._weights(version), halt=halt, took=self._took)

    def _in_order(self, groups: Sequence[OwnGroup], version: int) -> list[list[OwnGroup]]:
        """Lists the fixed groups that are played together, in order: by tokens those that train at once go first."""
        fixed = [group for group in groups if group.fixed]
        if self._mode == "wall":
            return [fixed]
        fixed.sort(key=lambda group: (group.asked, group.number))
        if self._mode == "whole":
            return [[group] for group in fixed]
        return [[g for g in fixed if g.asked <= version], [g for g in fixed if g.asked > version]]

    def _finish(self, group: TokenGroup, policy: Policy) -> None:
        """Completes a group by the clock of tokens after the last window that draws it."""
        if self._mode == "whole":
            group.made = self._generator(group.prompts, policy, group.asked)
        elif policy.version >= last_window(group.asked):
            group.made = self._generator.finish(group.making, policy)
        self._took()


def noted(experience: Experience, worked: Mapping[str, float]) -> Experience:
    """Adds what is known of a window to the metrics of a batch, such as the seconds that it took, `time/window`."""
    return dataclasses.replace(experience, counts={**experience.counts, **worked})


def longest_of(experience: Experience) -> int:
    """Returns the most tokens that a sample of a batch drew."""
    return int(experience.rollouts.mask_BT.sum(axis=1).max(initial=0))
