"""Writes the trace and the spans of a run one step late, in a thread that nothing waits for."""

import dataclasses
import functools
import logging
import pathlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrl.rundir import spans, trace
from podrl.rundir.metrics import Lines, LogConfig
from podrl.storage.storage import write_whole
from podrl.types import Experience

log = logging.getLogger("podrl.trace")
_WAITING = 8  # steps that may wait for the disk; more are left out
SPAN_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class TraceSteps:
    """Tells the steps whose samples are recorded, and what is computed for them: alike on all hosts that train."""

    config: LogConfig

    def wants(self, step: int) -> bool:
        """True for the steps whose samples are recorded."""
        every = self.config.samples_every
        return self._whole or (every > 0 and (step % every == 0 or step == 1))

    @property
    def ever(self) -> bool:
        """True where there are steps whose samples are recorded."""
        return self._whole or self.config.samples_every > 0

    @property
    def share(self) -> float:
        """Share of a step's groups whose log-probabilities the trainer computes for the trace."""
        return 1.0 if self._whole else 0.25

    def weighs(self, step: int) -> bool:
        """True for the steps before whose updates weight and clip of every token are computed."""
        return self.config.trace == "updates" and self.wants(step)

    @property
    def _whole(self) -> bool:
        return self.config.trace in ("all", "updates")


class Tracing:
    """Owns spans.jsonl and the folder `trace` of a run directory.

    A resumed run passes `start`: what was recorded of steps at or after it is dropped, so each is recorded once.
    """

    def __init__(self, workdir: pathlib.Path, config: LogConfig, *, start: int):
        """Opens the files and starts the thread; `start` is the first step that will be recorded."""
        self._workdir, self._bound = workdir, config.trace_mb << 20
        self._lines = Lines(workdir / spans.NAME, start)
        for step in trace.traced_steps(workdir):
            if step >= start:
                (workdir / trace.FOLDER / trace.file_name(step)).unlink()
        self._noted: tuple[int, trace.Noted] | None = None
        self._failing, self._left_out = False, 0
        self._room = threading.Semaphore(_WAITING)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="podrl-trace", daemon=True)
        self._thread.start()

    def note(self, step: int, noted: trace.Noted) -> None:
        """Keeps what the algorithm knows of a step's tokens until the step is recorded."""
        self._noted = (step, noted)

    def record(self, step: int, experience: Experience, done: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
        """Hands a step to the thread; returns at once. A disk that is too slow loses steps, not time."""
        self.add_spans(done)
        noted, self._noted = self._noted, None
        if noted is None or noted[0] != step:
            return
        if self._room.acquire(blocking=False):
            self._queue.put(functools.partial(self._write, step, experience, noted[1], tokenizer))
        else:
            self._left_out += 1

    def add_spans(self, done: Sequence[Mapping[str, Any]]) -> None:
        """Hands spans to the thread, those of other processes too."""
        if done:
            self._queue.put(functools.partial(self._append, done))

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        self._queue.put(None)
        self._thread.join()
        self._lines.close()
        if self._left_out:
            log.warning("The trace lacks %d steps: the disk was too slow for them.", self._left_out)

    def _follow(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
                self._failing = False
            except Exception as error:  # noqa: BLE001 - whatever a disk or a tokenizer raises, training goes on
                if not self._failing:
                    log.error("The trace is incomplete: %s: %s", type(error).__name__, error)
                self._failing = True

    def _write(self, step: int, experience: Experience, noted: trace.Noted, tokenizer: Any) -> None:
        folder = self._workdir / trace.FOLDER
        folder.mkdir(exist_ok=True)
        try:
            packed = trace.content(step, experience, noted, Pieces(tokenizer))
        finally:
            self._room.release()
        write_whole(folder / trace.file_name(step), packed)
        size = 0
        for kept in reversed(trace.traced_steps(self._workdir)):
            path = folder / trace.file_name(kept)
            size += path.stat().st_size
            if size > self._bound and kept != step:
                path.unlink()

    def _append(self, done: Sequence[Mapping[str, Any]]) -> None:
        for span in done:
            self._lines.write(span)
        if self._lines.size > SPAN_BYTES:
            self._lines.halve()


class Pieces:
    """Texts of tokens, one by one, with the spaces they stand for."""

    def __init__(self, tokenizer: Any):
        """Takes a podrl.data.tokenizer.Tokenizer."""
        self._tokenizer = tokenizer
        self._anchor = next(iter(tokenizer.encode("a")), None)
        self._before = "" if self._anchor is None else tokenizer.decode([self._anchor])

    def __call__(self, token: int) -> str:
        """The text of a token after others; its name in the vocabulary where it has none of its own."""
        whole = self._tokenizer.decode([token] if self._anchor is None else [self._anchor, token])
        text = whole.removeprefix(self._before)
        return self._tokenizer.token_text(token) if not text or "\ufffd" in text else text
