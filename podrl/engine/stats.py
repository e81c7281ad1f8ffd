"""Counts a session's work, and times it: what decode steps take, and what prefill takes beside them."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping


class Meter:
    """Tells seconds of prefill from seconds of decoding.

    Where no dispatch is in flight, as when a window begins, prefill calls are waited for before the next one is
    launched, with nothing left to do for it: that costs the device one launch. Calls behind a dispatch in flight are
    taken to be as long as those, and decoding is the rest of the time until the last dispatch is read.

    Attributes:
      calls: prefill calls so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.calls = 0
        self._clock = clock
        self._flying = 0
        self._since = 0.0  # when the device could begin with what is waited for next
        self._new = 0  # calls of which none is waited for yet
        self._alone, self._alone_s = 0, 0.0  # calls that were timed
        self._later_s = 0.0  # the time of all else

    def begin(self) -> None:
        """Called before prefill calls are given to the device."""
        if not self._flying and not self._new:
            self._since = self._clock()

    def prefilled(self, calls: int) -> None:
        """Called after so many were."""
        self.calls += calls
        self._new += calls

    @property
    def alone(self) -> bool:
        """True where the device has prefill calls and nothing else: they are to be waited for."""
        return not self._flying and self._new > 0

    def launch(self) -> None:
        """Called before a dispatch is launched, after what was to be waited for."""
        if not self._flying:
            now = self._clock()
            if self._new:
                self._alone, self._alone_s = self._alone + self._new, self._alone_s + now - self._since
            self._since = now
        self._flying, self._new = self._flying + 1, 0

    def read(self) -> None:
        """Called after the oldest dispatch in flight was read."""
        now = self._clock()
        self._flying, self._later_s, self._since = self._flying - 1, self._later_s + now - self._since, now

    def seconds(self) -> tuple[float, float]:
        """Seconds of prefill and of decode steps; (0, all) where no call was timed."""
        between_s = min((self.calls - self._alone) * self._alone_s / max(self._alone, 1), self._later_s)
        return self._alone_s + between_s, self._later_s - between_s


@dataclasses.dataclass
class Stats:
    """Counters of a session.

    Attributes:
      tokens: sampled tokens kept.
      dispatches: calls of `generate`.
      decode_steps: steps of the busiest shard, summed over dispatches.
      lane_steps: lane places of all steps of all shards, live or not.
      prefill_tokens: prompt and given tokens computed, padding excluded.
      spills: stores moved to the host.
      failed: samples that ended without a distribution to draw from, by version of the weights.
      host_seconds: time without a dispatch in flight, from the last read to the next launch.
      plan_seconds: time in which dispatches were planned.
      meter: seconds of prefill and of decode steps.
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
      tokens: sampled tokens, end tokens included.
      seconds: wall time.
      decode_steps: steps of the busiest shard, summed over dispatches.
      lane_utilisation: tokens over lane places of all decode steps.
      prefill_tokens: prompt (and given) tokens computed.
      prefill_calls: device calls that computed them.
      dispatches: device calls of `generate`.
      spills: caches moved to the host because the pool ran dry.
      failed: samples that ended because logits were NaN or infinite.
      compiles: programs compiled during the call; 0 after `warm_up`.
      host_seconds: time in which the device had nothing queued: from reading the results of the last dispatch in
        flight to the next launch. Where the host keeps up it is next to nothing.
      plan_seconds: time in which dispatches were planned.
      prefill_seconds, decode_seconds: of prefill calls, and of decode steps; see Meter.
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
        """Of a session that has ended."""
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
        """Returns the metrics of a step that tell the engine's work: seconds and counts."""
        return {
            "time/prefill": self.prefill_seconds,
            "time/decode": self.decode_seconds,
            "time/planning": self.plan_seconds,
            "perf/dispatches": float(self.dispatches),
            "perf/decode_steps": float(self.decode_steps),
            "perf/prefill_calls": float(self.prefill_calls),
            "perf/prefill_tokens": float(self.prefill_tokens),
        }
