"""Writes the trace and the spans of a run one step late, on a thread that training does not wait for."""

import dataclasses
import functools
import logging
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from podrl.mappings import Span
from podrl.rundir import spans, trace
from podrl.rundir.metrics import JsonLinesFile, LogConfig
from podrl.storage.storage import write_whole
from podrl.types import Experience

log = logging.getLogger("podrl.trace")
_WAITING = 8  # number of steps that may wait for the disk; the trace leaves out further steps
SPAN_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class TraceSteps:
    """Decides which steps' samples are recorded, and which numbers are computed for them; all hosts that train decide
    alike."""

    config: LogConfig

    def wants(self, step: int) -> bool:
        """Returns True if the samples of a step are recorded."""
        every = self.config.samples_every
        return self._every_step or (every > 0 and (step % every == 0 or step == 1))

    @property
    def ever(self) -> bool:
        """Returns True if there are steps whose samples are recorded."""
        return self._every_step or self.config.samples_every > 0

    @property
    def share(self) -> float:
        """Returns the share of a step's groups, 0 to 1, whose log-probabilities the trainer computes for the trace."""
        return 1.0 if self._every_step else 0.25

    def weighs(self, step: int) -> bool:
        """Returns True if weight and clipping of every token are computed before the updates of a step."""
        return self.config.trace == "updates" and self.wants(step)

    @property
    def _every_step(self) -> bool:
        return self.config.trace in ("all", "updates")


class Tracing:
    """Owns spans.jsonl and the folder `trace` of a run directory.

    A resumed run passes `start`: records of step `start` and later are dropped, so that each step is recorded once.
    """

    def __init__(self, workdir: pathlib.Path, config: LogConfig, *, start: int):
        """Opens the files and starts the thread; `start` is the first step that will be recorded."""
        self._workdir, self._bound = workdir, config.trace_mb << 20
        self._lines = JsonLinesFile(workdir / spans.NAME, start)
        for step in trace.traced_steps(workdir):
            if step >= start:
                (workdir / trace.FOLDER / trace.file_name(step)).unlink()
        self._extras: tuple[int, trace.TraceExtras] | None = None
        self._failing, self._skipped = False, 0
        self._room = threading.Semaphore(_WAITING)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="podrl-trace", daemon=True)
        self._thread.start()

    def note(self, step: int, extras: trace.TraceExtras) -> None:
        """Keeps further contents of a step's trace until the step is recorded."""
        self._extras = (step, extras)

    def record(self, step: int, experience: Experience, new_spans: Sequence[Span], tokenizer: Any) -> None:
        """Hands a step to the thread and returns at once; if the disk is too slow, the step is left out.

        Args:
          step: number of the step.
          experience: samples of the step; recorded only if `note` was called for the step.
          new_spans: spans to record.
          tokenizer: podrl.data.tokenizer.Tokenizer of the samples.
        """
        self.add_spans(new_spans)
        extras, self._extras = self._extras, None
        if extras is None or extras[0] != step:
            return
        if self._room.acquire(blocking=False):
            self._queue.put(functools.partial(self._write, step, experience, extras[1], tokenizer))
        else:
            self._skipped += 1

    def add_spans(self, new_spans: Sequence[Span]) -> None:
        """Hands spans of this or another process to the thread."""
        if new_spans:
            self._queue.put(functools.partial(self._append, new_spans))

    def close(self) -> None:
        """Waits until the thread has written everything, and ends it."""
        self._queue.put(None)
        self._thread.join()
        self._lines.close()
        if self._skipped:
            log.warning("The trace lacks %d steps: the disk was too slow for them.", self._skipped)

    def _follow(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
                self._failing = False
            except Exception as error:  # noqa: BLE001 - whatever a disk or a tokenizer raises, training goes on
                if not self._failing:
                    log.error("The trace is incomplete: %s: %s", type(error).__name__, error)
                self._failing = True

    def _write(self, step: int, experience: Experience, extras: trace.TraceExtras, tokenizer: Any) -> None:
        folder = self._workdir / trace.FOLDER
        folder.mkdir(exist_ok=True)
        try:
            packed = trace.content(step, experience, extras, Pieces(tokenizer))
        finally:
            self._room.release()
        write_whole(folder / trace.file_name(step), packed)
        size = 0
        for step_of_file in reversed(trace.traced_steps(self._workdir)):
            path = folder / trace.file_name(step_of_file)
            size += path.stat().st_size
            if size > self._bound and step_of_file != step:
                path.unlink()

    def _append(self, new_spans: Sequence[Span]) -> None:
        for span in new_spans:
            self._lines.write(span)
        if self._lines.size > SPAN_BYTES:
            self._lines.halve()


class Pieces:
    """Returns the text of single tokens, with the spaces that belong to them."""

    def __init__(self, tokenizer: Any):
        """Takes a podrl.data.tokenizer.Tokenizer."""
        self._tokenizer = tokenizer
        self._anchor = next(iter(tokenizer.encode("a")), None)
        self._before = "" if self._anchor is None else tokenizer.decode([self._anchor])

    def __call__(self, token: int) -> str:
        """Returns the text that a token adds after another token.

        A token without a text of its own, such as a part of a character or a special token, gives its name in the
        vocabulary.
        """
        text = self._tokenizer.decode([token] if self._anchor is None else [self._anchor, token])
        text = text.removeprefix(self._before)
        return self._tokenizer.token_text(token) if not text or "\ufffd" in text else text
