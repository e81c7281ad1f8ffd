"""Spans: which process did what from when to when, collected by any thread; spans.jsonl, and Chrome's trace format."""

import contextlib
import heapq
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

NAME = "spans.jsonl"
_KEPT = 20_000  # spans that wait for someone to take them
TOOLS = "tools"  # the lane of calls, which overlap
CALLS = 200  # of that lane between two steps; the longest stay
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
        self._calls: list[tuple[float, int, dict[str, Any]]] = []  # a heap, the shortest first
        self._called = 0
        self._lock = threading.Lock()  # of the two above
        self._step = 0
        self._held: list[dict[str, Any]] = []  # until they are sent

    def add(self, name: str, started: float, ended: float, *, lane: str = "loop", step: int | None = None) -> None:
        """Adds a span of `time.monotonic()`; `lane` is what did it, `step` None for the step that is under way."""
        start, name = round(started + self._clock, 6), _LATER.sub("", name)
        span = {"step": step, "host": self.host, "lane": lane, "name": name, "start": start}
        self._found.append(span | {"s": round(ended - started, 6)})

    def add_call(self, name: str, started: float, ended: float, *, step: int | None, failed: str = "") -> None:
        """Adds a call of a tool, by any thread; `failed` is the kind of its failure."""
        span = {"step": step, "host": self.host, "lane": TOOLS, "name": name[:80]}
        span |= {"start": round(started + self._clock, 6), "s": round(ended - started, 6)}
        with self._lock:
            self._called += 1
            heapq.heappush(self._calls, (ended - started, self._called, span | ({"failed": failed} if failed else {})))
            if len(self._calls) > CALLS:
                heapq.heappop(self._calls)

    def _take_calls(self) -> list[dict[str, Any]]:
        """Returns the calls since the last time; the first one says in `left_out` how many shorter ones there were."""
        with self._lock:
            calls, called = [span for *_, span in self._calls], self._called
            self._calls, self._called = [], 0
        if called > len(calls):
            calls[0]["left_out"] = called - len(calls)
        return sorted(calls, key=lambda span: span["start"])

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
        self._found.extend(self._take_calls())
        while self._found:
            span = self._found.popleft()
            taken.append(span if span["step"] is not None else span | {"step": step})
        return taken

    def pass_on(self, step: int, *, last: bool = False) -> None:
        """Sends what there is, every few steps and after the last, where `send` is set."""
        if self.send is None:
            return
        self._held += self.take(step)
        if step % _EVERY == 0 or step == 1 or last:
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


def rows(spans: Sequence[Mapping[str, Any]]) -> list[int]:
    """Gives each span its row within its lane: 0, but for calls of tools that are made while others go on."""
    found, ends = [0] * len(spans), {}
    calls = [i for i, span in enumerate(spans) if span["lane"] == TOOLS]
    for i in sorted(calls, key=lambda i: spans[i]["start"]):
        span, free = spans[i], ends.setdefault(spans[i]["host"], [])
        row = next((r for r, end in enumerate(free) if end <= span["start"]), len(free))
        free[row : row + 1] = [span["start"] + span["s"]]
        found[i] = row
    return found


def chrome_trace(spans: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Converts spans to the JSON object that Perfetto and chrome://tracing open: a process per host, a row per lane.

    Calls of tools that overlap are in rows of their own: "tools", "tools 2", and so on.
    """
    spans = list(spans)
    hosts: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    named: set[int] = set()
    events: list[dict[str, Any]] = []
    for span, row in zip(spans, rows(spans), strict=True):
        host, lane = str(span["host"]), str(span["lane"]) + (f" {row + 1}" if row else "")
        if host not in hosts:
            hosts[host] = len(hosts) + 1
            events.append({"ph": "M", "name": "process_name", "pid": hosts[host], "args": {"name": host}})
        at = {"pid": hosts[host], "tid": lanes.setdefault((host, lane), len(lanes) + 1)}
        if at["tid"] not in named:
            named.add(at["tid"])
            events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": lane}})
        times = {"ts": round(1e6 * span["start"]), "dur": max(round(1e6 * span["s"]), 1)}
        told = {key: span[key] for key in ("step", "failed") if key in span}
        events.append({"ph": "X", "name": str(span["name"]), "cat": str(span["lane"]), **at, **times, "args": told})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
