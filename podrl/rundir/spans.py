"""Spans: pieces of a process's work with their start and length, collected for spans.jsonl and for Chrome's viewer."""

import contextlib
import heapq
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from podrl.mappings import JsonObject, Span

NAME = "spans.jsonl"
_MOST_WAITING = 20_000  # largest number of spans that wait to be taken
TOOLS = "tools"  # lane of the calls of tools, which overlap
CALLS = 200  # largest number of tool calls that are kept between two steps; shorter calls are dropped first
_EVERY = 5  # number of steps between two messages with spans to the process that writes them
_LATER = re.compile(r" at step \d+$")  # this end of a stage's name is left out of the span's name
_COMPILES = "/jax/core/compile/backend_compile_duration"


class Spans:
    """Collects the spans of a process, from any thread, until they are taken; spans that are never taken give way to
    newer ones.

    Attributes:
      host: name of the process in its job, such as 'trainer 0'.
      compiled: seconds that all threads have spent compiling so far.
      send: function that sends spans to the writing process, and returns at once; None in the writing process.
    """

    def __init__(self, host: str = "trainer 0"):
        self.host = host
        self.compiled = 0.0
        self.send: Callable[[list[Span]], None] | None = None
        self._clock = time.time() - time.monotonic()  # one offset for all spans, even if the system's time jumps
        self._spans: deque[Span] = deque(maxlen=_MOST_WAITING)
        self._calls: list[tuple[float, int, Span]] = []  # a heap of (seconds, number, span), shortest first
        self._call_count = 0
        self._lock = threading.Lock()  # protects _calls and _call_count
        self._step = 0
        self._unsent: list[Span] = []  # spans that the next message will send

    def add(self, name: str, started: float, ended: float, *, lane: str = "loop", step: int | None = None) -> None:
        """Adds a span.

        Args:
          name: name of the work; ' at step N' at its end is removed.
          started, ended: times of `time.monotonic()`.
          lane: name of the thread or part of the process that did the work.
          step: step that the work belongs to; None for the step under way.
        """
        start, name = round(started + self._clock, 6), _LATER.sub("", name)
        span = {"step": step, "host": self.host, "lane": lane, "name": name, "start": start}
        self._spans.append(span | {"s": round(ended - started, 6)})

    def add_call(self, name: str, started: float, ended: float, *, step: int | None, failed: str = "") -> None:
        """Adds a call of a tool.

        Args:
          name: name of the tool; cut after 80 characters.
          started, ended: times of `time.monotonic()`.
          step: step that the call belongs to; None for the step under way.
          failed: kind of the call's failure; '' if it did not fail.
        """
        span = {"step": step, "host": self.host, "lane": TOOLS, "name": name[:80]}
        span |= {"start": round(started + self._clock, 6), "s": round(ended - started, 6)}
        with self._lock:
            self._call_count += 1
            heapq.heappush(
                self._calls, (ended - started, self._call_count, span | ({"failed": failed} if failed else {}))
            )
            if len(self._calls) > CALLS:
                heapq.heappop(self._calls)

    def _collect_calls(self) -> list[Span]:
        """Returns the calls since the last collection, by start; `left_out` of one call counts the dropped calls."""
        with self._lock:
            calls, count = [span for *_, span in self._calls], self._call_count
            self._calls, self._call_count = [], 0
        if count > len(calls):
            calls[0]["left_out"] = count - len(calls)
        return sorted(calls, key=lambda span: span["start"])

    @contextlib.contextmanager
    def span(self, name: str, *, lane: str, step: int | None = None) -> Iterator[None]:
        """Adds the time of a `with` block as a span, even if the block raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, started, time.monotonic(), lane=lane, step=step)

    def take(self, step: int | None = None) -> list[Span]:
        """Returns the spans since the last call; spans without a step get the step `step`.

        If `step` is None, these spans get the step of the last call, because they were made after that call.
        """
        spans, self._step = [], self._step if step is None else step
        step = self._step
        self._spans.extend(self._collect_calls())
        while self._spans:
            span = self._spans.popleft()
            spans.append(span if span["step"] is not None else span | {"step": step})
        return spans

    def pass_on(self, step: int, *, last: bool = False) -> None:
        """Sends the spans collected so far, every few steps and after the last step, if `send` is set."""
        if self.send is None:
            return
        self._unsent += self.take(step)
        if step % _EVERY == 0 or step == 1 or last:
            self.send(self._unsent)
            self._unsent = []

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Adds a span for every compilation of a program while the `with` block lasts."""

        def listen(event: str, duration_secs: float, **_: object) -> None:
            if event == _COMPILES:
                self.compiled += duration_secs
                now = time.monotonic()
                self.add("compile", now - duration_secs, now, lane="compile")

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


def rows(spans: Sequence[Span]) -> list[int]:
    """Returns the row of each span within its lane: 0, or more for tool calls that overlap other calls on the host."""
    found, ends = [0] * len(spans), {}
    calls = [i for i, span in enumerate(spans) if span["lane"] == TOOLS]
    for i in sorted(calls, key=lambda i: spans[i]["start"]):
        span, free = spans[i], ends.setdefault(spans[i]["host"], [])
        row = next((r for r, end in enumerate(free) if end <= span["start"]), len(free))
        free[row : row + 1] = [span["start"] + span["s"]]
        found[i] = row
    return found


def chrome_trace(spans: Iterable[Span]) -> JsonObject:
    """Converts spans to the JSON object that Perfetto and chrome://tracing open: a process per host, a row per lane.

    Overlapping calls of tools have rows of their own: "tools", "tools 2", and so on.
    """
    spans = list(spans)
    hosts: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    named_lanes: set[int] = set()
    events: list[JsonObject] = []
    for span, row in zip(spans, rows(spans), strict=True):
        host, lane = str(span["host"]), str(span["lane"]) + (f" {row + 1}" if row else "")
        if host not in hosts:
            hosts[host] = len(hosts) + 1
            events.append({"ph": "M", "name": "process_name", "pid": hosts[host], "args": {"name": host}})
        at = {"pid": hosts[host], "tid": lanes.setdefault((host, lane), len(lanes) + 1)}
        if at["tid"] not in named_lanes:
            named_lanes.add(at["tid"])
            events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": lane}})
        times = {"ts": round(1e6 * span["start"]), "dur": max(round(1e6 * span["s"]), 1)}
        args = {key: span[key] for key in ("step", "failed") if key in span}
        events.append({"ph": "X", "name": str(span["name"]), "cat": str(span["lane"]), **at, **times, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
