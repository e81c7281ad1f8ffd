"""Batches in flight: made by another thread, or in windows, where several versions of the weights draw a sample."""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from podrl.rollout.clock import TokenClock, last_window, stop_at
from podrl.rollout.partial import Partial
from podrl.rundir.run import Run
from podrl.types import Experience, Policy, Prompts


class Ready:
    """A batch that needs no waiting: restored from a checkpoint, or read from data."""

    def __init__(self, value: Any):
        self._value = value

    def result(self) -> Any:
        return self._value

    complete = result


class Later:
    """A batch that another thread is making; the watchdog sees a wait for it under a name."""

    def __init__(self, future: Future, run: Run, stage: str):
        self._future, self._run, self._stage = future, run, stage

    def result(self) -> Any:
        with self._run.watchdog.stage(self._stage):
            return self._future.result()

    complete = result


class Generator(Protocol):
    """Makes experience of prompts, in windows: podrl.learner.generation.Generator, which documents the methods."""

    def begin(self, prompts: Prompts, step: int, quantum: int, partial: Partial | None = None) -> Any: ...

    def play(self, makings: Sequence[tuple[Any, int | None]], policy: Policy) -> None: ...

    def finish(self, making: Any, policy: Policy) -> Experience: ...

    def give_up(self, making: Any) -> None: ...


class Windows:
    """Batches that are made in windows, on one thread.

    Window w lasts from the publication of version w to the next. `podrl.rollout.clock.TokenClock` says what samples
    draw in it. A window begins when a batch is first asked for: all that is drawn in it has been submitted by then, and
    a checkpoint before that finds every open sample at the begin of a window.
    """

    def __init__(self, generator: Generator, thread: ThreadPoolExecutor, run: Run, clock: TokenClock):
        """Begins nothing yet.

        Args:
          generator: makes the batches.
          thread: the thread that uses the rollout mesh.
          run: the watchdog.
          clock: is told the lengths of samples.
        """
        self._generator, self._thread, self._run, self._clock = generator, thread, run, clock
        self._makings: dict[int, Any] = {}  # by step
        self._futures: dict[int, Future] = {}  # by step
        self._policy: Policy | None = None

    def resume(self, step: int, pending: Sequence[Any]) -> list[Any]:
        """Takes over the batches of steps from `step` on that a checkpoint holds."""
        batches = []
        for i, batch in enumerate(pending):
            if isinstance(batch, Partial):
                self._clock.restore(step, batch.longest)
                batches.append(self.submit(batch.prompts, batch.step, batch.quantum, batch))
            else:
                batches.append(self.whole(step + i, batch))
        return batches

    def whole(self, step: int, made: Any) -> "Windowed":
        """Takes over a batch that is made already; asking for it begins a window, as for any other."""
        self._futures[step] = Future()
        self._end(step, made)
        return Windowed(self, step)

    def submit(self, prompts: Prompts, step: int, quantum: int, partial: Partial | None = None) -> "Windowed":
        """Opens the batch of a step, to be begun with the next window.

        Args:
          prompts: the prompts of the batch.
          step: the step that trains on it.
          quantum: number of tokens that a sample draws in a window.
          partial: the batch as a checkpoint holds it.
        """
        making = self._generator.begin(prompts, step, quantum, partial)
        self._futures[step] = Future()
        self._makings[step] = making
        return Windowed(self, step)

    def end_window(self) -> None:
        """Does nothing: a window ends by itself, when its samples have drawn what they may."""

    closing = end_window

    def publish(self, policy: Policy) -> None:
        """Gives the policy of the next window."""
        self._policy = policy

    def result(self, step: int) -> Any:
        """Waits for a batch, after the window was begun that belongs to the newest policy."""
        if self._policy is not None:
            self._thread.submit(self._play, self._policy)
            self._policy = None
        with self._run.watchdog.stage("rollout"):
            result = self._futures[step].result()
        del self._futures[step]
        return result

    def state(self, step: int) -> Any:
        """Returns what there is of a batch, between windows: its result, or a Partial."""
        if (making := self._makings.get(step)) is None:
            return self._futures[step].result()
        return making.partial(self._clock.state(min(self._makings) - 1))

    def close(self) -> None:
        """Gives up what is open."""
        for making in self._makings.values():
            self._generator.give_up(making)

    def _end(self, step: int, made: Any) -> None:
        self._clock.saw(step, longest_of(made))
        self._futures[step].set_result(made)

    def _play(self, policy: Policy) -> None:
        """Plays a window: first what trains at once, as at the start of a run, then the rest."""
        steps = sorted(self._makings)
        try:
            for chosen in ([s for s in steps if s <= policy.version], [s for s in steps if s > policy.version]):
                makings = {step: self._makings[step] for step in chosen}
                rows = [(making, stop_at(s, policy.version, making.quantum)) for s, making in makings.items()]
                if rows:
                    self._generator.play(rows, policy)
                for step in [s for s in chosen if policy.version >= last_window(s)]:
                    experience = self._generator.finish(self._makings[step], policy)
                    del self._makings[step]
                    self._end(step, experience)
        except BaseException as error:  # noqa: BLE001 - raised where the batches are waited for
            for future in [future for future in self._futures.values() if not future.done()]:
                future.set_exception(error)
            while self._makings:
                self._generator.give_up(self._makings.popitem()[1])


class Windowed:
    """A batch that Windows, or a Wall, is making under a key."""

    def __init__(self, windows: Any, key: Any):
        self._windows, self._key = windows, key

    def result(self) -> Any:
        return self._windows.result(self._key)

    def complete(self) -> Any:
        return self._windows.state(self._key)


def noted(experience: Experience, worked: Mapping[str, float]) -> Experience:
    """Adds what is known of a window to the metrics of a batch, such as the seconds that it took, `time/window`."""
    return dataclasses.replace(experience, counts={**experience.counts, **worked})


def longest_of(experience: Experience) -> int:
    """The most tokens that a sample of a batch drew."""
    return int(experience.rollouts.mask_BT.sum(axis=1).max(initial=0))
