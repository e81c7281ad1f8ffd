"""Batches in flight in one process: groups of samples, made while other batches train."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.group_player import GroupPlayer, OwnGroup, TokenGroup, longest_of
from podrl.rollout.open_groups import OpenGroups
from podrl.rollout.partial import Partial
from podrl.rundir.run import Run
from podrl.types import Experience, Policy, Prompts


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch in flight.

    Attributes:
      result: waits for the batch, and returns it.
      complete: returns what a checkpoint between windows holds of it.
    """

    result: Callable[[], Any]
    complete: Callable[[], Any]


def ready(value: Any) -> Batch:
    """Makes a batch that needs no waiting: restored from a checkpoint, or read from data."""
    return Batch(lambda: value, lambda: value)


class Batches:
    """Makes batches of groups on one thread, window after window, as a clock decides.

    A window begins when a batch is first asked for: all that is drawn in it has been submitted by then, and a
    checkpoint before that finds every open sample at the begin of a window. By the clock of tokens it ends when samples
    have drawn what they may; a group is a whole batch. By the wall clock `end_window` has all samples rest after the
    dispatches that are launched; a group is one prompt. Keys and values are computed anew in the next window.

    By the wall clock, steps that the journal knows are repeated from it, whatever the time is: those of a run that was
    killed after its newest checkpoint, and those of podrl.replay.
    """

    def __init__(
        self, generator: Any, thread: ThreadPoolExecutor, run: Run, clock: TokenClock | WallClock, size: int = 0
    ):
        """Begins nothing yet.

        Args:
          generator: a podrl.learner.generation.Generator; where one version draws all samples, what makes a batch.
          thread: the thread that uses the rollout mesh.
          run: the watchdog.
          clock: decides where samples stop, which groups make a batch, and which are asked again.
          size: number of prompts of a batch.
        """
        self._thread, self._run, self._clock, self._size = thread, run, clock, size
        self._by_tokens = clock.mode != "wall"
        self._halt, self._closing = threading.Event(), threading.Event()
        self._player = GroupPlayer(
            generator,
            clock.mode,
            weights=lambda version: self._playing,
            took=self._take,
            closed=self._closing.is_set,
        )
        cuts = {"ends": lambda prompts: (0, prompts)} if self._by_tokens else {}
        self._open = OpenGroups(clock, size, self._group, **cuts)
        self._waited: dict[int, Future[Sequence[OwnGroup]]] = {}  # by step
        self._at = 0  # the newest version
        self._next: Policy | None = None  # of the next window
        self._playing = Policy({}, -1)  # of the window; of the thread
        self._failed: BaseException | None = None

    def resume(self, step: int, pending: Sequence[Experience | Partial]) -> list[Batch]:
        """Takes over the batches of steps from `step` on that a checkpoint holds: made, or their open groups."""
        self._at = step
        for i, batch in enumerate(pending):
            if isinstance(batch, Partial):
                self._clock.restore(step, batch.longest)
            else:
                own = (batch.rollouts.prompts, i, step + i, False, None, None)
                self._open.groups.append(TokenGroup(*own, made=batch))
        self._open.resume(step, [batch for batch in pending if isinstance(batch, Partial)])
        return [self._batch(step + i) for i in range(len(pending))]

    def submit(self, prompts: Prompts, step: int) -> Batch:
        """Opens the groups of the prompts of a step's batch, to be begun with the next window."""
        self._open.submit(prompts, step)
        return self._batch(step)

    def end_window(self) -> None:
        """Frees the thread, to move weights: by the wall clock has all samples rest."""
        self._halt.set()
        self._player.end_window()

    def publish(self, policy: Policy) -> None:
        """Gives the policy of the next window."""
        self._next, self._at = policy, policy.version

    def result(self, step: int) -> Experience:
        """Waits for a batch, after the window was begun that belongs to the newest policy."""
        if self._next is not None:
            self._halt.clear()
            self._player.begin_window()
            self._thread.submit(self._play, self._next)
            self._next = None
        with self._run.watchdog.stage("rollout"):
            groups = self._waited[step].result()
        del self._waited[step]
        self._clock.forget(step + 1)
        made = self._player.made(groups, step, self._open.rest())
        self._clock.saw(step, longest_of(made))
        return dataclasses.replace(made, counts={**made.counts, **self._open.counts(step)})

    def state(self, step: int) -> Experience | Partial:
        """Returns what there is of a batch, between windows.

        By the wall clock that is a part of the open groups: as many as the batch will have.
        """
        if self._failed is not None:
            raise self._failed
        if not self._by_tokens:
            return self._open.state(step, step - min(self._waited), last=step == max(self._waited))
        [group] = [group for group in self._open.groups if group.asked == step]
        if isinstance(group, TokenGroup) and group.made is not None:
            return group.made
        return dataclasses.replace(group.part(step), longest=self._clock.state(self._at))

    def closing(self) -> None:
        """Ends the thread's work, whatever it is."""
        self._closing.set()

    def close(self) -> None:
        """Gives up what is open."""
        for group in self._open.groups:
            self._player.give_up(group)

    def _group(self, prompts: Prompts, number: int, asked: int, repeated: bool, origin: Partial | None) -> OwnGroup:
        quantum = self._clock.quantum(self._at) if origin is None else origin.quantum
        recorded = self._clock.recorded(int(prompts.index_P[0]), asked, self._at)
        return self._player.open(prompts, number, asked, repeated, origin, quantum=quantum, recorded=recorded)

    def _batch(self, step: int) -> Batch:
        self._waited[step] = Future()
        return Batch(functools.partial(self.result, step), functools.partial(self.state, step))

    # On the thread.

    def _play(self, policy: Policy) -> None:
        """Plays a window: to its end, or until the next weights are there."""
        if self._failed is not None:
            return
        step, self._playing = policy.version, policy
        try:
            self._open.ask_again(self._clock.stale(step, self._open.groups), step, self._player.give_up)
            repeats = self._clock.known(step) > step
            self._take()
            self._player.play(self._open.groups, step, halt=self._halted, repeats=repeats)
            if not self._closing.is_set():
                self._take(over=True)
        except BaseException as error:  # noqa: BLE001 - raised where the batches are waited for
            self._failed = error
            for future in list(self._waited.values()):
                if not future.done():
                    future.set_exception(error)

    def _halted(self) -> bool:
        return self._halt.is_set() or self._closing.is_set()

    def _take(self, *, over: bool = False) -> None:
        """Makes the batch of this window's step of groups that have ended, if there are enough and none is waited for.

        `over` as in WallClock.batch.
        """
        step = self._playing.version
        future = self._waited.get(step)
        if future is None or future.done():
            return
        if chosen := self._clock.batch(step, self._open.groups, self._size, over=over):
            self._open.decide(step, chosen)
            future.set_result(chosen)
