"""Evaluations that training does not stop for: between batches of the rollout mesh, or on devices of their own."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from podrl.cluster.evaluation import EvaluationDevices
from podrl.learner.evaluate import Evaluator, summarised
from podrl.rundir.run import Run
from podrl.rundir.spans import Spans
from podrl.types import BatchError, Policy

Scored = tuple[dict[str, np.ndarray], list[dict[str, Any]]]  # as `Evaluator.scores` returns


class Beside:
    """Makes one evaluation at a time, in pieces, on the thread that generates, while that has nothing else to do.

    Between a batch that is made and the next weights the rollout mesh waits for the trainer. As many pieces are made
    there as the last of these gaps had room for.
    """

    def __init__(self, evaluator: Evaluator, spans: Spans):
        """Begins nothing yet."""
        self._evaluator, self._spans, self._step = evaluator, spans, 0
        self._works: list[tuple[Generator[None, None, Scored], Callable[[Scored | BatchError], None]]] = []
        self._found: tuple[int, dict[str, float], list[dict[str, Any]]] | None = None
        self._error: BatchError | None = None
        self._broken: Exception | None = None  # a fault of another kind, of a piece that nobody waited for
        self._closed, self._began, self._whole = True, None, False
        self._gap_s = self._piece_s = 0.0

    def begin(
        self,
        policy: Policy,
        step: int,
        part: tuple[int, int] = (0, 1),
        done: Callable[[Scored | BatchError], None] | None = None,
    ) -> None:
        """Begins the evaluation after a step, or a share of it; the policy must stay as it is. Called on the thread.

        `done` is called, on the thread, with what was made or with why it was not; without, `take` returns it.
        """
        self._step, self._whole = step, False
        work = self._evaluator.in_pieces(policy, step, part, lambda: None if self._whole else self._evaluator.beside)
        self._works.append((work, done or self._keep))

    @property
    def open(self) -> bool:
        """True while an evaluation is begun and not made."""
        return bool(self._works)

    def open_gap(self) -> None:
        """Allows pieces until `close_gap`; called by the loop, which has `fill` called when the thread is free."""
        self._closed, self._began = False, None

    def fill(self) -> None:
        """Makes pieces until the gap ends, or is expected to; called on the thread."""
        self._began = began = time.monotonic()
        while (
            self.open and not (self._closed or self._broken) and time.monotonic() + self._piece_s < began + self._gap_s
        ):
            self._advance()

    def close_gap(self) -> None:
        """Ends the gap after the piece that is being made; called by the loop when it has the next weights."""
        self._closed = True
        self._gap_s = 0.0 if self._began is None else time.monotonic() - self._began

    def finish(self) -> None:
        """Makes all that is left, at once; called on the thread."""
        self._whole = True
        while self.open:
            self._advance()
            if self._broken is not None:
                raise self._broken

    def take(self) -> tuple[int, dict[str, float], list[dict[str, Any]]] | None:
        """Returns (step, eval/* metrics, a few samples) of the evaluation that was made since the last call.

        Raises:
          BatchError: a reward function failed on it, or a service it asks was away.
        """
        if (error := self._error) is not None:
            self._error = None
            raise error
        found, self._found = self._found, None
        return found

    def _keep(self, made: Scored | BatchError) -> None:
        if isinstance(made, BatchError):  # raised where the evaluation is waited for
            self._error = made
        else:
            self._found = (self._step, summarised(made[0]), made[1])

    def _advance(self) -> None:
        if self._broken is not None:
            return
        started = time.monotonic()
        work, done = self._works[0]
        try:
            with self._spans.span("evaluation", lane="rollout"):
                next(work)
            if not self._whole:
                self._piece_s = time.monotonic() - started
            return
        except StopIteration as end:
            made = end.value
        except BatchError as error:
            made = error
        except Exception as error:  # noqa: BLE001 - raised where the rest is waited for
            self._broken = error
            return
        done(made)
        del self._works[0]


class Apart:
    """Makes one evaluation at a time, on devices and a thread of its own, while training goes on."""

    def __init__(self, evaluator: Evaluator, devices: EvaluationDevices, run: Run):
        """Begins nothing yet."""
        self._evaluator, self._devices, self._run = evaluator, devices, run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-evaluation")
        self._step, self._work = 0, None

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluates the trainer's weights, and waits for it."""
        self.begin_evaluation(policy, step)
        made = self.evaluated(wait=True)
        assert made is not None
        return made[1:]

    def begin_evaluation(self, policy: Policy, step: int) -> None:
        """Moves the trainer's weights, which are those after a step, and begins to evaluate them."""
        del policy
        assert self._work is None, "one at a time"
        moved = self._devices.move(step)
        self._step, self._work = step, self._thread.submit(self._make, moved, step)

    def evaluated(self, *, wait: bool) -> tuple[int, dict[str, float], list[dict[str, Any]]] | None:
        """Returns (step, eval/* metrics, a few samples) of the one that was begun, once; None as long as it lasts.

        Raises:
          BatchError: a reward function failed on it, or a service it asks was away.
        """
        if self._work is None or not (wait or self._work.done()):
            return None
        work, self._work = self._work, None
        return (self._step, *work.result())

    def unsaved(self) -> bool:
        """False: an evaluation that is begun can always be ended."""
        return False

    def close(self) -> None:
        """Waits for the evaluation that is made."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._devices.close()

    def _make(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        with self._run.spans.span("evaluation", lane="evaluation"):
            return self._evaluator(policy, step)
