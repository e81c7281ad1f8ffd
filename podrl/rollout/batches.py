"""Batches in flight in a single process: groups of samples that are made while other batches train."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.group_player import GroupPlayer, OwnGroup, TokenGroup, longest_of
from podrl.rollout.open_groups import OpenGroups
from podrl.rollout.partial import PartialBatch
from podrl.rundir.run import Run
from podrl.types import Experience, Policy, Prompts


@dataclasses.dataclass(frozen=True)
class PendingBatch:
    """A batch in flight.

    Attributes:
      result: function that waits for the batch and returns it.
      complete: function that returns the batch's part of a checkpoint; call it between windows only.
    """

    result: Callable[[], Any]
    complete: Callable[[], Any]


def ready(value: Any) -> PendingBatch:
    """Wraps a batch that is already complete, because it was restored from a checkpoint or read from data."""
    return PendingBatch(lambda: value, lambda: value)


class BatchMaker:
    """Makes batches of groups on one thread, window after window, as a clock decides.

    A window is the time in which samples are drawn by one version of the weights. It begins when the caller first waits
    for a batch after `publish`. By then all prompts of the window have been submitted. Checkpoints are taken before
    this wait, so in them every open sample is at the start of a window. Keys and values are computed anew in every
    window.

    With `rollout.clock='tokens'` a group is a whole batch, and a window ends when all samples have drawn their tokens
    of the window. With 'wall' a group is one prompt, and `end_window` stops all samples after the dispatches in flight.

    With 'wall', steps in the journal are repeated exactly, however long they take. These are the steps that a killed
    run made after its newest checkpoint, or the steps that podrl.replay repeats.
    """

    def __init__(
        self, generator: Any, thread: ThreadPoolExecutor, run: Run, clock: TokenClock | WallClock, size: int = 0
    ):
        """Stores the collaborators.

        Args:
          generator: a podrl.learner.generation.Generator. Any function that makes a batch will do if one version of
            the weights draws all samples.
          thread: the one thread that uses the rollout mesh.
          run: the run, whose watchdog observes the waits.
          clock: clock that decides at which tokens samples stop, which groups make a batch, and which prompts are
            submitted again.
          size: number of prompts of a batch.
        """
        self._thread, self._run, self._clock, self._size = thread, run, clock, size
        self._by_tokens = clock.mode != "wall"
        self._halt, self._closing = threading.Event(), threading.Event()
        self._player = GroupPlayer(
            generator,
            clock.mode,
            weights=lambda version: self._playing,
            on_ended=self._take,
            closed=self._closing.is_set,
        )
        cuts = {"ends": lambda prompts: (0, prompts)} if self._by_tokens else {}
        self._open = OpenGroups(clock, size, self._group, **cuts)
        self._waited: dict[int, Future[Sequence[OwnGroup]]] = {}  # groups of each batch in flight, by step
        self._at = 0  # number of the newest version of the weights
        self._next: Policy | None = None  # the next window's policy; None once that window has begun
        self._playing = Policy({}, -1)  # the policy of the window that the thread plays
        self._failed: BaseException | None = None

    def resume(self, step: int, pending: Sequence[Experience | PartialBatch]) -> list[PendingBatch]:
        """Takes over the batches of a checkpoint.

        Args:
          step: number of steps done, which is also the step of the first batch.
          pending: the batches of this step and of later steps; a PartialBatch has the open groups of its batch.

        Returns:
          The batches in flight, in the order of their steps.
        """
        self._at = step
        for i, batch in enumerate(pending):
            if isinstance(batch, PartialBatch):
                self._clock.restore(step, batch.longest)
            else:
                own = (batch.rollouts.prompts, i, step + i, False, None, None)
                self._open.groups.append(TokenGroup(*own, experience=batch))
        self._open.resume(step, [batch for batch in pending if isinstance(batch, PartialBatch)])
        return [self._batch(step + i) for i in range(len(pending))]

    def submit(self, prompts: Prompts, step: int) -> PendingBatch:
        """Opens the groups of a batch; their samples begin in the next window.

        Args:
          prompts: prompts of the batch.
          step: the step that trains on the batch.
        """
        self._open.submit(prompts, step)
        return self._batch(step)

    def end_window(self) -> None:
        """Ends the window. Weights can be moved once the window's samples have stopped.

        With `rollout.clock='wall'`, samples stop after the dispatches in flight. With 'tokens', samples first draw all
        tokens of the window.
        """
        self._halt.set()
        self._player.end_window()

    def publish(self, policy: Policy) -> None:
        """Sets the policy of the next window."""
        self._next, self._at = policy, policy.version

    def result(self, step: int) -> Experience:
        """Begins the window of the newest policy, unless it has begun, and waits for the batch of a step.

        Raises:
          Exception: any error of the thread.
        """
        if self._next is not None:
            self._halt.clear()
            self._player.begin_window()
            self._thread.submit(self._play, self._next)
            self._next = None
        with self._run.watchdog.stage("rollout"):
            groups = self._waited[step].result()
        del self._waited[step]
        self._clock.forget(step + 1)
        experience = self._player.experience(groups, step, self._open.rest())
        self._clock.saw(step, longest_of(experience))
        return dataclasses.replace(experience, counts={**experience.counts, **self._open.counts(step)})

    def state(self, step: int) -> Experience | PartialBatch:
        """Returns a batch's part of a checkpoint: the batch, or its open groups; call it between windows only.

        With `rollout.clock='wall'` it is not decided yet which groups make the batch. So each batch in flight gets as
        many of the open groups as a batch has, and the last batch gets all remaining groups.
        """
        if self._failed is not None:
            raise self._failed
        if not self._by_tokens:
            return self._open.state(step, step - min(self._waited), last=step == max(self._waited))
        [group] = [group for group in self._open.groups if group.submit_step == step]
        if isinstance(group, TokenGroup) and group.experience is not None:
            return group.experience
        return dataclasses.replace(group.part(step), longest=self._clock.state(self._at))

    def closing(self) -> None:
        """Asks the thread to stop after the launched dispatches."""
        self._closing.set()

    def close(self) -> None:
        """Cancels every open sample."""
        for group in self._open.groups:
            self._player.give_up(group)

    def _group(
        self, prompts: Prompts, number: int, submit_step: int, repeated: bool, origin: PartialBatch | None
    ) -> OwnGroup:
        quantum = self._clock.quantum(self._at) if origin is None else origin.quantum
        recorded = self._clock.recorded(int(prompts.index_P[0]), submit_step, self._at)
        return self._player.open(prompts, number, submit_step, repeated, origin, quantum=quantum, recorded=recorded)

    def _batch(self, step: int) -> PendingBatch:
        self._waited[step] = Future()
        return PendingBatch(functools.partial(self.result, step), functools.partial(self.state, step))

    # Methods that run on the thread of the rollout mesh.

    def _play(self, policy: Policy) -> None:
        """Plays a window to its end; with `rollout.clock='wall'`, until `end_window`."""
        if self._failed is not None:
            return
        step, self._playing = policy.version, policy
        try:
            self._open.resubmit(self._clock.stale(step, self._open.groups), step, self._player.give_up)
            repeats = self._clock.known(step) > step
            self._take()
            self._player.play(lambda: self._open.groups, step, halt=self._halted, repeats=repeats)
            if not self._closing.is_set():
                self._take(over=True)
        except BaseException as error:  # noqa: BLE001 - `result` raises it again
            self._failed = error
            for future in list(self._waited.values()):
                if not future.done():
                    future.set_exception(error)

    def _halted(self) -> bool:
        return self._halt.is_set() or self._closing.is_set()

    def _take(self, *, over: bool = False) -> None:
        """Makes the batch of this window's step, if enough groups are ready and the clock waits for no other group.

        Args:
          over: True if sampling for the batch has ended (`WallClock.batch`).
        """
        step = self._playing.version
        future = self._waited.get(step)
        if future is None or future.done():
            return
        self._open.replace(step, self._player.give_up)
        if chosen := self._clock.batch(step, self._open.groups, self._size, over=over):
            self._open.decide(step, chosen)
            future.set_result(chosen)
