"""Generates groups of samples, window after window, in a single process or on a rollout host of a pod."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from podrl.engine.session import Track
from podrl.mappings import JournalEntry, SavedState
from podrl.rollout.clock import in_sessions, last_window, sessions_of, stop_at
from podrl.rollout.journal import runs_of
from podrl.rollout.open_groups import Group
from podrl.rollout.partial import PartialBatch, of_tracks
from podrl.rollout.token_budget import TokenBudget, as_budget
from podrl.types import STOP_DEADLINE, Experience, Policy, Prompts

# How the versions of the weights that draw a token are decided (podrl.rollout.clock):
#   wall     with `rollout.clock='wall'`: by time
#   windows  with `rollout.clock='tokens'`: by numbers of tokens; several versions draw a sample
#   whole    with `rollout.clock='tokens'`: one version draws all samples of a batch in one call
Mode = Literal["wall", "windows", "whole"]
_LOOK_S = 0.01  # seconds between two checks of the rewards while no sample is open


@dataclasses.dataclass(eq=False)
class OwnGroup(Group):
    """A group whose samples this process makes.

    Attributes:
      samples: the samples (podrl.learner.generation.GroupInFlight); None if one version draws all of them in one call,
        or if a checkpoint had the finished samples.
      recorded: entry of the group in the journal, which the samples must reproduce; None if the journal has no entry.
      since: first version of the weights that still has to draw tokens of the group in this process; only read if the
        group is `fixed`.
      in_batch: True if a batch holds the group.
      ended_reported: True if the leader of a pod knows that the group has ended.
      oldest_reported: True if the leader of a pod knows the oldest version that drew one of the group's tokens.
    """

    samples: Any
    recorded: JournalEntry | None = None
    since: int = 0
    in_batch: bool = False
    ended_reported: bool = False
    oldest_reported: bool = False

    @property
    def fixed(self) -> bool:
        """True if it is decided in advance which version draws each token."""
        return self.recorded is not None

    @property
    def ended(self) -> bool:
        return len(self.samples.player.done) == self.samples.player.request.samples

    @property
    def ready(self) -> bool:
        return self.ended and (self.fixed or self.signal is not None)

    @property
    def drawn(self) -> int | None:
        if self.looked_up is None:
            # Reads the player's tracks, because `states()` lacks the tokens of open conversations.
            versions = (v for track in self.samples.player.rows for v in track.versions if v >= 0)
            self.looked_up = min(versions, default=None)
        return self.looked_up

    def states(self) -> Sequence[tuple[SavedState, Track | None]]:
        return self.samples.player.state()

    def sessions(self, version: int) -> list[TokenBudget]:
        """Lists the budget of a fixed group in each session of a version."""
        assert self.recorded is not None
        return sessions_of(self.recorded, version)

    def row(self, budget: TokenBudget) -> tuple[Any, TokenBudget]:
        """Returns the samples and their budget, as a pair for podrl.learner.generation.Generator.play."""
        self.origin = None  # out of date from now on, because the samples are about to continue
        return self.samples, budget

    def record(self) -> JournalEntry:
        states = self.states()
        runs = [[] if track is None else runs_of(track.versions, track.breaks) for _, track in states]
        late = [b for b, (value, _) in enumerate(states) if value.get("episode", {}).get("stop") == STOP_DEADLINE]
        tokens = [0 if track is None else len(track.tokens) for _, track in states]
        return {"index": self.index, "asked": self.submit_step, "runs": runs, "tokens": tokens, "late": late}

    def check(self) -> None:
        """Raises ValueError if a batch holds the group and the samples differ from its entry in the journal."""
        if self.in_batch and self.record() != self.recorded:
            raise ValueError(
                f"The samples of prompt {self.index}, which this host took over, differ from the journal's entry: "
                f"{self.recorded}"
            )


@dataclasses.dataclass(eq=False)
class TokenGroup(OwnGroup):
    """The share of a batch that one process samples: its unit of work with `rollout.clock='tokens'`.

    Elsewhere a group holds the samples of one prompt; this group holds the samples of all prompts of the share.

    Attributes:
      quantum: number of tokens that a sample draws in each window except the last; not used if one version draws all
        tokens.
      experience: experience of the group; None until the group has ended.
    """

    quantum: int = 0
    experience: Experience | None = None

    @property
    def fixed(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return self.experience is not None

    @property
    def drawn(self) -> None:
        return None

    def sessions(self, version: int) -> list[TokenBudget]:
        return [as_budget(stop_at(self.submit_step, version, self.quantum))]

    def part(self, step: int) -> PartialBatch:
        """Copies the present state of the samples, for a checkpoint.

        With dynamic sampling the last prompts may not have been submitted yet; they have no samples.
        """
        del step
        prompt_count = len(self.samples.player.request.prompts.length_P)
        part = of_tracks(
            self.prompts, self.states(), prompt_count=prompt_count, step=self.submit_step, quantum=self.quantum
        )
        return self.marked(part, self.submit_step)


class GroupPlayer:
    """Generates groups through the windows of versions, on the thread that uses the rollout mesh.

    Window w lasts from the publication of version w to the publication of version w + 1. Fixed groups, whose token
    budgets are decided in advance, are played first and without interruption. With `rollout.clock='tokens'` all groups
    are fixed; with 'wall' only the groups in the journal are fixed.
    """

    def __init__(
        self,
        generator: Any,
        mode: Mode,
        *,
        weights: Callable[[int], Policy],
        on_ended: Callable[[], None],
        closed: Callable[[], bool],
    ):
        """Stores the collaborators.

        Args:
          generator: a podrl.learner.generation.Generator; in mode 'whole' any function that makes a batch.
          mode: clock of the job, and whether several versions draw a sample.
          weights: function that returns the weights of a version.
          on_ended: function that is called when a group may have ended, and when the rewards of a group became known.
          closed: function that returns True once this process must stop for good.
        """
        self._generator, self._mode = generator, mode
        self._weights, self._on_ended, self._closed = weights, on_ended, closed
        self._joined_at = time.monotonic()
        self._began: float | None = None  # time at which the present window began
        self._window_s: float | None = None  # seconds of the window before the present one
        self._unscored: list[OwnGroup] = []  # groups whose samples have all ended, but whose rewards are not all known

    def open(
        self,
        prompts: Prompts,
        number: int,
        submit_step: int,
        repeated: bool,
        origin: PartialBatch | None,
        *,
        quantum: int = 0,
        recorded: JournalEntry | None = None,
        since: int = 0,
        in_batch: bool = False,
    ) -> OwnGroup:
        """Opens a group; its samples begin when `play` reaches it. For the arguments see OwnGroup and TokenGroup."""
        samples = None if self._mode == "whole" else self._generator.begin(prompts, submit_step, origin)
        own = (prompts, number, submit_step, repeated, origin, samples, recorded, since, in_batch)
        return OwnGroup(*own) if self._mode == "wall" else TokenGroup(*own, quantum=quantum)

    def give_up(self, group: OwnGroup) -> None:
        """Cancels the open samples of a group."""
        if group.samples is not None:
            self._generator.give_up(group.samples)

    def begin_window(self) -> None:
        """Records the start of a window."""
        self._began = time.monotonic()

    def end_window(self) -> None:
        """Records the end of the window, if one has begun."""
        if self._began is not None:
            self._window_s = time.monotonic() - self._began
        self._began = None

    def experience(self, groups: Sequence[OwnGroup], step: int, position: bytes) -> Experience:
        """Returns the experience of groups that have ended, which is the batch of a step or a part of the batch.

        Args:
          groups: the groups; with `rollout.clock='tokens'` exactly one.
          step: the step that trains on the groups.
          position: state of the data, JSON bytes, for a checkpoint without open groups; used only with
            `rollout.clock='wall'`.

        Raises:
          BatchError: a reward function failed, or too many samples failed.
        """
        if isinstance(groups[0], TokenGroup):
            assert groups[0].experience is not None
            return groups[0].experience
        now = time.monotonic()
        seconds, self._joined_at = now - self._joined_at, now
        experience = self._generator.gather([group.samples for group in groups], step, seconds)
        prompts = dataclasses.replace(experience.rollouts.prompts, data_state=position)
        experience = dataclasses.replace(experience, rollouts=dataclasses.replace(experience.rollouts, prompts=prompts))
        return experience if self._window_s is None else with_counts(experience, {"time/window": self._window_s})

    # Methods for the thread that uses the rollout mesh.

    def play(
        self, groups: Callable[[], Iterable[OwnGroup]], version: int, *, halt: Callable[[], bool], repeats: bool
    ) -> None:
        """Plays the groups through a window: the fixed groups first, then the others.

        Args:
          groups: function that returns the open groups. `on_ended` may open further groups, which join the window.
          version: version of the weights.
          halt: function that returns True once the groups that are not fixed must stop. They stop when the dispatches
            in flight have ended.
          repeats: True if the window is repeated from the journal, so that only fixed groups are played.
        """
        for together in self._in_order(list(groups()), version):
            self.repeat(together, version)
        if not repeats:
            self._play_on(groups, version, halt)

    def repeat(self, groups: Sequence[OwnGroup], version: int) -> None:
        """Plays fixed groups through a window, in the sessions of their budgets and without other interruptions.

        An interruption would begin a further session, whose prefill would change the last bits of the samples.
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
                    self._generator.play(rows, policy, halt=halt, on_ended=self._on_ended)
        for group in known:
            if isinstance(group, TokenGroup) and not self._closed():
                self._finish(group, policy)
                group.since = version + 1

    def _play_on(self, groups: Callable[[], Iterable[OwnGroup]], version: int, halt: Callable[[], bool]) -> None:
        """Plays the groups that are not fixed until all are ready, or until `halt` returns True.

        A group that is opened during the session joins the session, because a further session would prefill all open
        samples again.
        """
        rows: list[tuple[Any, TokenBudget]] = []
        begun: set[OwnGroup] = set()

        def add() -> None:
            new = [group for group in groups() if not (group.fixed or group.ended or group in begun)]
            rows.extend(group.row(TokenBudget(urgent=group.oldest is not None)) for group in new)
            begun.update(new)

        def ended() -> None:
            self._look_up_signals(groups())
            self._on_ended()
            add()

        def halted() -> bool:
            if self._look_up_signals(self._unscored):
                self._on_ended()
                add()
            return halt()

        if self._look_up_signals(groups()):
            self._on_ended()
        add()
        while rows or self._unscored:
            if rows:
                self._generator.play(rows, self._weights(version), halt=halted, on_ended=ended)
                rows.clear()
            else:
                time.sleep(_LOOK_S)
            if halted():
                return

    def _look_up_signals(self, groups: Iterable[OwnGroup]) -> bool:
        """Sets `signal` of ended groups whose rewards are known; returns True if there was such a group.

        Raises:
          BatchError: a reward function failed.
        """
        ended = [group for group in groups if group.ended and not group.ready]
        for group in ended:
            group.signal = self._generator.signal(group.samples)
        self._unscored = [group for group in ended if not group.ready]
        return len(self._unscored) < len(ended)

    def _in_order(self, groups: Sequence[OwnGroup], version: int) -> list[list[OwnGroup]]:
        """Splits the fixed groups into sets that are played together, and sorts the sets.

        With `rollout.clock='tokens'`, the groups of the batch that trains next come first.
        """
        fixed = [group for group in groups if group.fixed]
        if self._mode == "wall":
            return [fixed]
        fixed.sort(key=lambda group: (group.submit_step, group.number))
        if self._mode == "whole":
            return [[group] for group in fixed]
        return [[g for g in fixed if g.submit_step <= version], [g for g in fixed if g.submit_step > version]]

    def _finish(self, group: TokenGroup, policy: Policy) -> None:
        """Makes the experience of a TokenGroup, if this window is the last window that draws its samples."""
        if self._mode == "whole":
            group.experience = self._generator(group.prompts, policy, group.submit_step)
        elif policy.version >= last_window(group.submit_step):
            group.experience = self._generator.finish(group.samples, policy)
        self._on_ended()


def with_counts(experience: Experience, worked: Mapping[str, float]) -> Experience:
    """Adds metrics of a window, such as its seconds `time/window`, to the counts of a batch."""
    return dataclasses.replace(experience, counts={**experience.counts, **worked})


def longest_of(experience: Experience) -> int:
    """Returns how many tokens the longest sample of a batch drew."""
    return int(experience.rollouts.mask_BT.sum(axis=1).max(initial=0))
