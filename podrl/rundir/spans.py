"""Spans: which process did what from when to when, collected by any thread; spans.jsonl, and Chrome's trace format."""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

NAME = "spans.jsonl"
_KEPT = 20_000  # spans that wait for someone to take them
_EVERY = 5  # steps between messages to the process that writes
_LATER = re.compile(r" at step \d+$")  # of a stage's name
_COMPILES = "/jax/core/compile/backend_compile_duration"


class Spans:
    """Collects the spans of a process until they are taken; the newest are kept where nobody takes them.

    Attributes:
      host: the process, as other processes call it.
      compiled: seconds spent compiling so far, by all threads.
      send: sends spans to the process that writes them, where that is another; returns at once.
    """

    def __init__(self, host: str = "trainer 0"):
        self.host = host
        self.compiled = 0.0
        self.send: Callable[[list[dict[str, Any]]], None] | None = None
        self._clock = time.time() - time.monotonic()  # one offset for all: spans of a process never jump
        self._found: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._step = 0
        self._held: list[dict[str, Any]] = []  # until they are sent

    def add(self, name: str, started: float, ended: float, *, lane: str = "loop", step: int | None = None) -> None:
        """Adds a span of `time.monotonic()`; `lane` is what did it, `step` None for the step that is under way."""
        start, name = round(started + self._clock, 6), _LATER.sub("", name)
        span = {"step": step, "host": self.host, "lane": lane, "name": name, "start": start}
        self._found.append(span | {"s": round(ended - started, 6)})

    @contextlib.contextmanager
    def span(self, name: str, *, lane: str, step: int | None = None) -> Iterator[None]:
        """Adds what happens in a block as a span, also if it raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, started, time.monotonic(), lane=lane, step=step)

    def take(self, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the spans since the last call; those without a step were made on the way to `step`, or after it."""
        taken, self._step = [], self._step if step is None else step
        step = self._step
        while self._found:
            span = self._found.popleft()
            taken.append(span if span["step"] is not None else span | {"step": step})
        return taken

    def pass_on(self, step: int) -> None:
        """Sends what there is, every few steps, where `send` is set."""
        if self.send is None:
            return
        self._held += self.take(step)
        if step % _EVERY == 0 or step == 1:
            self.send(self._held)
            self._held = []

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Adds every compilation of a program while the block lasts."""

        def listen(event: str, duration_secs: float, **_: Any) -> None:
            if event == _COMPILES:
                self.compiled += duration_secs
                now = time.monotonic()
                self.add("compile", now - duration_secs, now, lane="compile")

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


def chrome_trace(spans: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Converts spans to the JSON object that Perfetto and chrome://tracing open: a process per host, a row per lane."""
    hosts: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    named: set[int] = set()
    events: list[dict[str, Any]] = []
    for span in spans:
        host, lane = str(span["host"]), str(span["lane"])
        if host not in hosts:
            hosts[host] = len(hosts) + 1
            events.append({"ph": "M", "name": "process_name", "pid": hosts[host], "args": {"name": host}})
        at = {"pid": hosts[host], "tid": lanes.setdefault((host, lane), len(lanes) + 1)}
        if at["tid"] not in named:
            named.add(at["tid"])
            events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": lane}})
        times = {"ts": round(1e6 * span["start"]), "dur": max(round(1e6 * span["s"]), 1)}
        events.append(
            {"ph": "X", "name": str(span["name"]), "cat": lane, **at, **times, "args": {"step": span["step"]}}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
