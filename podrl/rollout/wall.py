"""Batches by the wall clock: weights change between two dispatches, and a batch is made of groups that are ready."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from podrl.rollout.clock import TokenClock, WallClock, in_sessions
from podrl.rollout.journal import runs_of
from podrl.rollout.partial import Partial, cut, join, of_tracks
from podrl.rollout.points import Points
from podrl.rollout.session import Track
from podrl.rollout.windows import Windowed, Windows, noted
from podrl.rundir.run import Run
from podrl.types import STOP_DEADLINE, Policy, Prompts


@dataclasses.dataclass(eq=False)
class Group:
    """A prompt whose samples are made.

    Attributes:
      prompts: the prompt alone.
      number: its place in the order of submission.
      asked: the step in the keys of its samples: that of its batch of prompts, or the one at which it was asked again.
      making: its samples; see podrl.rollout.windows.Generator.
      repeated: it was asked before, and its samples became too old.
      known: the oldest version that drew a token of it, as far as that was looked up.
      origin: what it was in another process; None where it was begun in this one.
      played: its samples were in a window here.
    """

    prompts: Prompts
    number: int
    asked: int
    making: Any
    repeated: bool = False
    known: int | None = None
    origin: Partial | None = None
    played: bool = False

    @property
    def index(self) -> int:
        """Position of the prompt in the data."""
        return int(self.prompts.index_P[0])

    @property
    def tracks(self) -> list[Track | None]:
        """The records of its samples; None of one that is not begun."""
        return [track for _, track in self.making.player.state()]

    @property
    def ended(self) -> bool:
        """True once all its samples have ended."""
        return len(self.making.player.done) == self.making.player.request.samples

    @property
    def drawn(self) -> int | None:
        """The oldest version that drew a token of it."""
        if self.known is None:
            drawn = (v for track in self.tracks if track is not None for v in track.versions if v >= 0)
            self.known = min(drawn, default=None)
        return self.known

    oldest = drawn

    def row(self, points: Points) -> tuple[Any, Points]:
        """Returns the pair that Generator.play takes: the samples of the group, and the points to play them to."""
        self.played = True
        return self.making, points

    def record(self) -> dict[str, Any]:
        """Returns the journal's entry of the group, once it has ended (podrl.rollout.journal.WallJournal)."""
        states = self.making.player.state()
        runs = [[] if track is None else runs_of(track.versions, track.breaks) for _, track in states]
        late = [b for b, (value, _) in enumerate(states) if value.get("episode", {}).get("stop") == STOP_DEADLINE]
        tokens = [0 if track is None else len(track.tokens) for _, track in states]
        return {"index": self.index, "asked": self.asked, "runs": runs, "tokens": tokens, "late": late}

    def part(self, step: int) -> Partial:
        """Copies the group's samples as they are, for a checkpoint, as a part of the batch of a step."""
        own = {"asked": self.asked, "repeated": self.repeated}
        if self.origin is not None and not self.played:
            samples = [{**sample, **own} for sample in self.origin.samples]
            return dataclasses.replace(self.origin, step=step, samples=samples)
        states = [({**value, **own}, track) for value, track in self.making.player.state()]
        return of_tracks(self.prompts, states, asked=1, step=step, quantum=0)


class Wall:
    """Groups of samples that are made while batches train, on one thread.

    At most S + 1 batches of prompts are open or in training, S being the staleness. `end_window` has all samples rest
    after the dispatches that are launched, and the next window draws on by the newest weights; keys and values are
    computed anew. `podrl.rollout.clock.WallClock` decides which groups make a batch, and which are asked again.

    Steps that its journal knows are repeated from it, whatever the time is: those of a run that was killed after its
    newest checkpoint, and those of podrl.replay.
    """

    def __init__(self, generator: Any, thread: ThreadPoolExecutor, run: Run, clock: WallClock):
        """Begins nothing yet; `generator` is a podrl.learner.generation.Generator, `thread` uses the rollout mesh."""
        self._generator, self._thread, self._run, self._clock = generator, thread, run, clock
        self._open: list[Group] = []  # in order of submission
        self._waited: dict[int, Future[Sequence[Group]]] = {}  # by step
        self._sizes: dict[int, int] = {}  # by step: groups of its batch
        self._submitted = 0
        self._position = b""  # of the data, after the prompts submitted last
        self._policy: Policy | None = None
        self._halt, self._closing = threading.Event(), threading.Event()
        self._taken_at = time.monotonic()
        self._began: float | None = None  # when the newest window was
        self._window_s: float | None = None  # of the window before this one
        self._queue: dict[int, Mapping[str, float]] = {}  # by step: its metrics when the batch was decided

    def resume(self, step: int, pending: Sequence[Partial]) -> list[Windowed]:
        """Takes over the open groups of a checkpoint, which holds them in as many parts as there are batches."""
        self._clock.journal.forget(step)
        batches = []
        for i, part in enumerate(pending):
            group = len(part.samples) // len(part.prompts.length_P)
            for p, prompts in enumerate(self._generator.single(part.prompts)):
                said = part.samples[p * group]
                self._add(prompts, said["asked"], cut(part, prompts, p), repeated=said["repeated"])
            batches.append(self._batch(step + i, part.prompts))
        return batches

    def submit(self, prompts: Prompts, step: int, quantum: int = 0) -> Windowed:
        """Opens the groups of a batch of prompts, to be begun with the next window; there are no quanta."""
        del quantum
        for single in self._generator.single(prompts):
            self._add(single, step)
        return self._batch(step, prompts)

    def end_window(self) -> None:
        """Has all samples rest, so that the thread is free to move weights."""
        self._halt.set()
        if self._began is not None:
            self._window_s = time.monotonic() - self._began

    def publish(self, policy: Policy) -> None:
        """Gives the policy of the next window, which begins when a batch is first asked for."""
        self._policy = policy

    def result(self, step: int) -> Any:
        """Waits for the groups of a step, and for their rewards."""
        if self._policy is not None:
            self._halt.clear()
            self._began = time.monotonic()
            self._thread.submit(self._play, self._policy)
            self._policy = None
        with self._run.watchdog.stage("rollout"):
            groups = self._waited[step].result()
        del self._waited[step], self._sizes[step]
        self._clock.journal.forget(step + 1)
        now = time.monotonic()
        seconds, self._taken_at = now - self._taken_at, now
        experience = self._generator.gather([group.making for group in groups], step, seconds)
        position = b"" if self._open else self._position  # of the data, for a checkpoint without open groups
        prompts = dataclasses.replace(experience.rollouts.prompts, data_state=position)
        rollouts = dataclasses.replace(experience.rollouts, prompts=prompts)
        counts = experience.counts | self._queue.pop(step)
        experience = dataclasses.replace(experience, rollouts=rollouts, counts=counts)
        return experience if self._window_s is None else noted(experience, {"time/window": self._window_s})

    def state(self, step: int) -> Partial:
        """Returns a part of the open groups, between windows: as many as the batch of a step will have."""
        first = sum(size for s, size in self._sizes.items() if s < step)
        whole = join([group.part(step) for group in self._open[first : first + self._sizes[step]]])
        return dataclasses.replace(whole, prompts=dataclasses.replace(whole.prompts, data_state=self._position))

    def closing(self) -> None:
        """Ends the thread's work, whatever it is."""
        self._closing.set()

    def close(self) -> None:
        """Gives up what is open."""
        for group in self._open:
            self._generator.give_up(group.making)

    def _add(self, prompts: Prompts, asked: int, partial: Partial | None = None, *, repeated: bool = False) -> None:
        making = self._generator.begin(prompts, asked, 0, partial)
        drawn = [] if partial is None else partial.rows["version_X"]
        oldest = min((int(v) for v in drawn if v >= 0), default=None)
        self._open.append(Group(prompts, self._submitted, asked, making, repeated, oldest, partial))
        self._submitted += 1

    def _batch(self, step: int, prompts: Prompts) -> Windowed:
        self._position = prompts.data_state
        self._waited[step], self._sizes[step] = Future(), len(prompts.length_P)
        return Windowed(self, step)

    # On the thread.

    def _play(self, policy: Policy) -> None:
        """Plays a window: as its batch is recorded, or until the next weights are there."""
        try:
            self._ask_again(policy.version)
            if self._clock.journal.batch(policy.version) is None:
                self._play_on(policy)
            else:
                self._repeat(policy)
        except BaseException as error:  # noqa: BLE001 - raised where the batches are waited for
            for future in list(self._waited.values()):
                if not future.done():
                    future.set_exception(error)

    def _ask_again(self, step: int) -> None:
        """Gives up the groups that are too old for a step, and asks their prompts again."""
        for old in self._clock.stale(step, self._open):
            self._generator.give_up(old.making)
            making = self._generator.begin(old.prompts, step, 0)
            self._open[self._open.index(old)] = Group(old.prompts, old.number, step, making, repeated=True)

    def _play_on(self, policy: Policy) -> None:
        rows = [group.row(Points(urgent=group.oldest is not None)) for group in self._open if not group.ended]

        def take() -> None:
            self._take(policy.version)

        take()
        if rows:
            self._generator.play(rows, policy, halt=self._halted, took=take)

    def _halted(self) -> bool:
        return self._halt.is_set() or self._closing.is_set()

    def _take(self, step: int) -> None:
        """Makes the batch of a step of groups that are ready, if there are enough and none is waited for."""
        future, size = self._waited.get(step), self._sizes.get(step, 0)
        if future is None or future.done():
            return
        if chosen := self._clock.batch(step, self._open, size):
            self._decide(step, chosen)

    def _decide(self, step: int, chosen: Sequence[Group]) -> None:
        left = [group for group in self._open if group not in chosen]
        self._queue[step] = self._clock.decide(step, chosen, left)
        self._open = left
        self._waited[step].set_result(chosen)

    def _repeat(self, policy: Policy) -> None:
        """Plays a window as it is recorded: its batch, and what later ones drew in it."""
        step, journal = policy.version, self._clock.journal
        known = [(group, journal.group(group.index, group.asked, step)) for group in self._open]
        for chosen in in_sessions([(group, record) for group, record in known if record is not None], step):
            rows = [group.row(points) for group, points in chosen if not group.ended]
            if rows and not self._closing.is_set():
                self._generator.play(rows, policy, halt=self._closing.is_set)
        if self._closing.is_set():
            return
        self._decide(step, self._clock.batch(step, self._open, self._sizes[step], over=True))


def windows_or_wall(generator: Any, thread: ThreadPoolExecutor, run: Run, clock: TokenClock | WallClock) -> Any:
    """Makes batches in flight of the kind that a clock demands."""
    kind: Any = Wall if isinstance(clock, WallClock) else Windows
    return kind(generator, thread, run, clock)
