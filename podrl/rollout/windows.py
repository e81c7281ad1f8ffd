"""Batches in flight: made by another thread, or in windows, where several versions of the weights draw a sample."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from podrl.rollout.clock import TokenClock, last_window, stop_at
from podrl.rollout.partial import Partial
from podrl.rundir.run import Run
from podrl.types import Experience, Policy, Prompts

Key = tuple[int, int]  # of a batch or a part: the step that trains on it, the place of its first prompt in the batch


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

    Attributes:
      played: the newest version whose window was played, here or by others before; -1 for none.
    """

    def __init__(
        self,
        generator: Generator,
        thread: ThreadPoolExecutor,
        run: Run,
        clock: TokenClock | None = None,
        *,
        done: Callable[[Key, Any], Any] = lambda key, made: made,
        held: Callable[[Policy], Policy] = lambda policy: policy,
    ):
        """Begins nothing yet.

        Args:
          generator: makes the batches.
          thread: the one that uses the rollout mesh.
          run: the watchdog.
          clock: is told the lengths of samples; None where another process sets the quanta.
          done: (key, Experience, or the exception instead of one) -> the batch's result.
          held: gives the weights of a policy's version, where others may have taken their place.
        """
        self._generator, self._thread, self._run = generator, thread, run
        self._clock, self._done, self._held = clock, done, held
        self._makings: dict[Key, Any] = {}
        self._futures: dict[Key, Future] = {}
        self._policy: Policy | None = None
        self.played = -1

    def resume(self, step: int, pending: Sequence[Any]) -> list[Any]:
        """Takes over the batches of steps from `step` on that a checkpoint holds."""
        batches = []
        for i, batch in enumerate(pending):
            if isinstance(batch, Partial):
                if self._clock is not None:
                    self._clock.restore(step, batch.longest)
                batches.append(self.submit(batch.prompts, batch.step, batch.quantum, batch))
            else:
                batches.append(self.whole(step + i, batch))
        return batches

    def whole(self, step: int, made: Any) -> "Windowed":
        """Takes over a batch that is made already; asking for it begins a window, as for any other."""
        self._futures[step, 0] = Future()
        self._end((step, 0), made)
        return Windowed(self, (step, 0))

    def submit(
        self, prompts: Prompts, step: int, quantum: int, partial: Partial | None = None, *, first: int = 0
    ) -> "Windowed":
        """Opens the batch of a step, to be begun with the next window.

        Args:
          prompts: of the batch, or of a part of it.
          step: that trains on it.
          quantum: tokens of a sample in a window.
          partial: what a checkpoint holds of it.
          first: place of the part in the batch.
        """
        making = self._generator.begin(prompts, step, quantum, partial)
        self._futures[step, first] = Future()
        self._makings[step, first] = making
        return Windowed(self, (step, first))

    def catch_up(
        self, making: Any, key: Key, *, since: int, begun: Callable[[int, Any], None] = lambda version, making: None
    ) -> None:
        """Plays, on the thread, the windows of a batch that others have played; then it is one of these batches.

        Args:
          making: the batch, or a part of it.
          key: of it.
          since: the version whose window is the first.
          begun: told before each window, and before the next one to come, of its version and of the batch.
        """
        step = key[0]
        for version in range(since, min(self.played, last_window(step)) + 1):
            begun(version, making)
            policy = self._held(Policy({}, version))
            self._generator.play([(making, stop_at(step, version, making.quantum))], policy)
            if version >= last_window(step):
                self._done(key, self._generator.finish(making, policy))
                return
        begun(self.played + 1, making)
        self._makings[key] = making

    def end_window(self) -> None:
        """Does nothing: a window ends by itself, when its samples have drawn what they may."""

    closing = end_window

    def publish(self, policy: Policy) -> None:
        """Gives the policy of the next window."""
        self._policy = policy

    def begin(self) -> None:
        """Begins the window that belongs to the newest policy."""
        if self._policy is not None:
            self._thread.submit(self._play, self._policy)
            self._policy = None

    def result(self, key: Key) -> Any:
        """Waits for a batch, after the window was begun that belongs to the newest policy."""
        self.begin()
        with self._run.watchdog.stage("rollout"):
            result = self._futures[key].result()
        del self._futures[key]
        return result

    def state(self, key: Key) -> Any:
        """Returns what there is of a batch, between windows: its result, or a Partial."""
        if (making := self._makings.get(key)) is None:
            return self._futures[key].result()
        return making.partial(self._clock.state(min(self._makings)[0] - 1) if self._clock else ())

    def open(self, step: int) -> list[Key]:
        """Lists the parts of the batch of a step that are not made yet."""
        return [key for key in list(self._makings) if key[0] == step]

    def close(self) -> None:
        """Gives up what is open."""
        for making in self._makings.values():
            self._generator.give_up(making)

    def _end(self, key: Key, made: Any) -> None:
        if self._clock is not None:
            self._clock.saw(key[0], longest_of(made))
        if key in self._futures:  # nobody here waits for what was taken over
            self._futures[key].set_result(made)

    def _play(self, policy: Policy) -> None:
        """Plays a window: first what trains at once, as at the start of a run, then the rest."""
        keys = sorted(self._makings)
        try:
            policy = self._held(policy)
            for chosen in ([k for k in keys if k[0] <= policy.version], [k for k in keys if k[0] > policy.version]):
                makings = {k: self._makings[k] for k in chosen}
                rows = [(m, stop_at(k[0], policy.version, m.quantum)) for k, m in makings.items()]
                if rows:
                    self._generator.play(rows, policy)
                for key in [k for k in chosen if policy.version >= last_window(k[0])]:
                    experience = self._generator.finish(self._makings[key], policy)
                    del self._makings[key]
                    self._end(key, self._done(key, experience))
            self.played = policy.version
        except BaseException as error:  # noqa: BLE001 - raised where the batches are waited for
            undone = [key for key, future in list(self._futures.items()) if not future.done()]
            waited = [*undone, *(key for key in list(self._makings) if key not in undone)]
            for key in undone:
                self._futures[key].set_exception(error)
            for key in waited:
                if (making := self._makings.pop(key, None)) is not None:
                    self._generator.give_up(making)
                self._done(key, error)


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
