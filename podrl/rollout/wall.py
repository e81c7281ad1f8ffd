"""Batches by the wall clock: weights change between two dispatches, and a batch is made of groups that are ready."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from podrl.rollout.clock import TokenClock, WallClock, in_sessions, sessions_of
from podrl.rollout.open_groups import OpenGroups, OwnGroup
from podrl.rollout.partial import Partial
from podrl.rollout.points import Points
from podrl.rollout.windows import Windowed, Windows, noted
from podrl.rundir.run import Run
from podrl.types import Policy, Prompts


class Wall:
    """Groups of samples that are made while batches train, on one thread.

    At most S + 1 batches of prompts are open or in training, S being the staleness. `end_window` has all samples rest
    after the dispatches that are launched, and the next window draws on by the newest weights; keys and values are
    computed anew. `podrl.rollout.clock.WallClock` decides which groups make a batch, and which are asked again.

    Steps that its journal knows are repeated from it, whatever the time is: those of a run that was killed after its
    newest checkpoint, and those of podrl.replay.
    """

    def __init__(self, generator: Any, thread: ThreadPoolExecutor, run: Run, clock: WallClock, size: int):
        """Begins nothing yet.

        Args:
          generator: a podrl.learner.generation.Generator.
          thread: the thread that uses the rollout mesh.
          run: the watchdog.
          clock: decides which groups make a batch, and which are asked again.
          size: number of prompts of a batch.
        """
        self._generator, self._thread, self._run, self._clock, self._size = generator, thread, run, clock, size
        self._open = OpenGroups(clock, size, self._group)
        self._waited: dict[int, Future[Sequence[OwnGroup]]] = {}  # by step
        self._policy: Policy | None = None
        self._halt, self._closing = threading.Event(), threading.Event()
        self._taken_at = time.monotonic()
        self._began: float | None = None  # when the newest window was
        self._window_s: float | None = None  # of the window before this one

    def resume(self, step: int, pending: Sequence[Partial]) -> list[Windowed]:
        """Takes over the open groups of a checkpoint, which holds them in as many parts as there are batches."""
        self._open.resume(step, pending)
        return [self._batch(step + i) for i in range(len(pending))]

    def submit(self, prompts: Prompts, step: int, quantum: int = 0) -> Windowed:
        """Opens the groups of a batch of prompts, to be begun with the next window; there are no quanta."""
        del quantum
        self._open.submit(prompts, step)
        return self._batch(step)

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
        del self._waited[step]
        self._clock.journal.forget(step + 1)
        now = time.monotonic()
        seconds, self._taken_at = now - self._taken_at, now
        experience = self._generator.gather([group.making for group in groups], step, seconds)
        prompts = dataclasses.replace(experience.rollouts.prompts, data_state=self._open.rest())
        rollouts = dataclasses.replace(experience.rollouts, prompts=prompts)
        counts = experience.counts | self._open.counts(step)
        experience = dataclasses.replace(experience, rollouts=rollouts, counts=counts)
        return experience if self._window_s is None else noted(experience, {"time/window": self._window_s})

    def state(self, step: int) -> Partial:
        """Returns a part of the open groups, between windows: as many as the batch of a step will have."""
        return self._open.state(step, step - min(self._waited), last=step == max(self._waited))

    def closing(self) -> None:
        """Ends the thread's work, whatever it is."""
        self._closing.set()

    def close(self) -> None:
        """Gives up what is open."""
        for group in self._open.groups:
            self._give_up(group)

    def _group(self, prompts: Prompts, number: int, asked: int, repeated: bool, origin: Partial | None) -> OwnGroup:
        making = self._generator.begin(prompts, asked, 0, origin)
        return OwnGroup(prompts, number, asked, repeated, origin, making)

    def _give_up(self, group: OwnGroup) -> None:
        self._generator.give_up(group.making)

    def _batch(self, step: int) -> Windowed:
        self._waited[step] = Future()
        return Windowed(self, step)

    # On the thread.

    def _play(self, policy: Policy) -> None:
        """Plays a window: as its batch is recorded, or until the next weights are there."""
        try:
            old = self._clock.stale(policy.version, self._open.groups)
            self._open.ask_again(old, policy.version, self._give_up)
            if self._clock.journal.batch(policy.version) is None:
                self._play_on(policy)
            else:
                self._repeat(policy)
        except BaseException as error:  # noqa: BLE001 - raised where the batches are waited for
            for future in list(self._waited.values()):
                if not future.done():
                    future.set_exception(error)

    def _play_on(self, policy: Policy) -> None:
        rows = [group.row(Points(urgent=group.oldest is not None)) for group in self._open.groups if not group.ended]

        def take() -> None:
            self._take(policy.version)

        take()
        if rows:
            self._generator.play(rows, policy, halt=self._halted, took=take)

    def _halted(self) -> bool:
        return self._halt.is_set() or self._closing.is_set()

    def _take(self, step: int) -> None:
        """Makes the batch of a step of groups that are ready, if there are enough and none is waited for."""
        future = self._waited.get(step)
        if future is None or future.done():
            return
        if chosen := self._clock.batch(step, self._open.groups, self._size):
            self._decide(step, chosen)

    def _decide(self, step: int, chosen: Sequence[OwnGroup]) -> None:
        self._open.decide(step, chosen)
        self._waited[step].set_result(chosen)

    def _repeat(self, policy: Policy) -> None:
        """Plays a window as it is recorded: its batch, and what later ones drew in it."""
        step, journal = policy.version, self._clock.journal
        known = [(group, journal.group(group.index, group.asked, step)) for group in self._open.groups]
        points = [(group, sessions_of(record, step)) for group, record in known if record is not None]
        for chosen in in_sessions(points):
            rows = [group.row(points) for group, points in chosen if not group.ended]
            if rows and not self._closing.is_set():
                self._generator.play(rows, policy, halt=self._closing.is_set)
        if self._closing.is_set():
            return
        self._decide(step, self._clock.batch(step, self._open.groups, self._size, over=True))


def windows_or_wall(
    generator: Any, thread: ThreadPoolExecutor, run: Run, clock: TokenClock | WallClock, size: int
) -> Any:
    """Makes batches in flight of the kind that a clock demands; `size` is the number of prompts of a batch."""
    if isinstance(clock, WallClock):
        return Wall(generator, thread, run, clock, size)
    return Windows(generator, thread, run, clock)
