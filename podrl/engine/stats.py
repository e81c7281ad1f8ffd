"""Counts a session's work, and splits the time of the device between prefill and decode steps."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping


class Meter:
    """Splits the device's time into seconds of prefill and seconds of decoding.

    If no dispatch is in flight, as at the start of a window, the caller waits for the prefill calls before it launches
    the next dispatch, so that these calls are timed alone. The wait costs the device only the time of one launch,
    because the dispatch is prepared meanwhile. A prefill call that is queued after a dispatch is assumed to take the
    mean time of the timed calls. The remaining time until the last dispatch is read counts as decoding.

    Attributes:
      calls: number of prefill calls so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.calls = 0
        self._clock = clock
        self._flying = 0  # number of dispatches in flight
        self._since = 0.0  # time at which the device could begin its next work
        self._new = 0  # number of prefill calls since the last launch of a dispatch
        self._alone, self._alone_s = 0, 0.0  # number of prefill calls that were timed alone, and their seconds
        self._later_s = 0.0  # seconds of all device work besides the prefill calls that were timed alone

    def begin(self) -> None:
        """Prepares to time prefill calls that are about to be launched."""
        if not self._flying and not self._new:
            self._since = self._clock()

    def prefilled(self, calls: int) -> None:
        """Counts prefill calls that were launched."""
        self.calls += calls
        self._new += calls

    @property
    def alone(self) -> bool:
        """True if the device has prefill calls to run and no dispatch: the caller must wait for them."""
        return not self._flying and self._new > 0

    def launch(self) -> None:
        """Starts to time the next dispatch. If `alone` is True, the caller must wait for the prefill calls first."""
        if not self._flying:
            now = self._clock()
            if self._new:
                self._alone, self._alone_s = self._alone + self._new, self._alone_s + now - self._since
            self._since = now
        self._flying, self._new = self._flying + 1, 0

    def read(self) -> None:
        """Records that the results of the oldest dispatch in flight were read."""
        now = self._clock()
        self._flying, self._later_s, self._since = self._flying - 1, self._later_s + now - self._since, now

    def seconds(self) -> tuple[float, float]:
        """Returns (seconds of prefill, seconds of decoding); (0, all seconds) if no prefill call was timed."""
        between_s = min((self.calls - self._alone) * self._alone_s / max(self._alone, 1), self._later_s)
        return self._alone_s + between_s, self._later_s - between_s


@dataclasses.dataclass
class Stats:
    """Counters of a session.

    Attributes:
      tokens: number of sampled tokens that were kept.
      dispatches: number of calls of `generate`.
      decode_steps: number of decode steps of the busiest shard, summed over dispatches.
      lane_steps: number of decode steps times lanes, summed over shards and dispatches; idle lanes count, too.
      prefill_tokens: number of prompt tokens and appended tokens that prefill computed, padding excluded.
      spills: number of stores moved to the host.
      failed: number of samples that ended because logits were NaN or infinite, by version of the weights.
      host_seconds: seconds in which no dispatch was in flight, from the last read to the next launch.
      plan_seconds: seconds spent planning dispatches.
      meter: timer that splits the device's time into seconds of prefill and of decoding.
    """

    tokens: int = 0
    dispatches: int = 0
    decode_steps: int = 0
    lane_steps: int = 0
    prefill_tokens: int = 0
    spills: int = 0
    failed: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    host_seconds: float = 0.0
    plan_seconds: float = 0.0
    meter: Meter = dataclasses.field(default_factory=Meter)


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """Counters of the last call of `generate`, or of the last window.

    Attributes:
      tokens: number of sampled tokens, end tokens included.
      seconds: wall time of the call.
      decode_steps: number of decode steps of the busiest shard, summed over dispatches.
      lane_utilisation: sampled tokens divided by decode steps times lanes, 0 to 1.
      prefill_tokens: number of prompt tokens and appended tokens that prefill computed.
      prefill_calls: number of device calls of prefill.
      dispatches: number of device calls of `generate`.
      spills: number of caches moved to the host because pages, or places for memories of linear attention, ran out.
      failed: number of samples that ended because logits were NaN or infinite.
      compiles: number of programs compiled during the call; 0 after `warm_up`.
      host_seconds: seconds in which no dispatch was in flight, from reading the last dispatch in flight to the next
        launch; near 0 if the host keeps up.
      plan_seconds: seconds spent planning dispatches.
      prefill_seconds, decode_seconds: seconds of prefill calls, and of decode steps (`Meter`).
    """

    tokens: int = 0
    seconds: float = 0.0
    decode_steps: int = 0
    lane_utilisation: float = 0.0
    prefill_tokens: int = 0
    prefill_calls: int = 0
    dispatches: int = 0
    spills: int = 0
    failed: int = 0
    compiles: int = 0
    host_seconds: float = 0.0
    plan_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @classmethod
    def of(cls, s: Stats, *, seconds: float, compiles: int) -> "RolloutStats":
        """Makes the counters of a call from the counters of its session, which has ended."""
        prefill_s, decode_s = s.meter.seconds()
        return cls(
            tokens=s.tokens,
            seconds=seconds,
            decode_steps=s.decode_steps,
            lane_utilisation=s.tokens / max(s.lane_steps, 1),
            prefill_tokens=s.prefill_tokens,
            prefill_calls=s.meter.calls,
            dispatches=s.dispatches,
            spills=s.spills,
            failed=s.failed.total(),
            compiles=compiles,
            host_seconds=s.host_seconds,
            plan_seconds=s.plan_seconds,
            prefill_seconds=prefill_s,
            decode_seconds=decode_s,
        )

    def metrics(self) -> Mapping[str, float]:
        """Returns the step's metrics of the engine's work: seconds (`time/`) and counts (`perf/`)."""
        return {
            "time/prefill": self.prefill_seconds,
            "time/decode": self.decode_seconds,
            "time/planning": self.plan_seconds,
            "perf/dispatches": float(self.dispatches),
            "perf/decode_steps": float(self.decode_steps),
            "perf/prefill_calls": float(self.prefill_calls),
            "perf/prefill_tokens": float(self.prefill_tokens),
        }
