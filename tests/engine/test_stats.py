"""The meter separates seconds of prefill from seconds of decoding, on simulated sessions with known times and on the
engine."""

import pytest

from podrl.engine.stats import Meter

STEP_S, CALL_S, HOST_S = 0.01, 0.3, 0.05


class Device:
    """Simulates a device that runs programs in order while the host goes on; `now` is the host's clock."""

    def __init__(self):
        self.now = self.done = 0.0
        self.ready: list[float] = []
        self.meter = Meter(lambda: self.now)

    def prefill(self, calls: int) -> None:
        self.meter.begin()
        self.done = max(self.done, self.now) + calls * CALL_S
        self.meter.prefilled(calls)

    def launch(self, steps: int) -> None:
        if self.meter.alone:
            self.now = max(self.now, self.done)
        self.meter.launch()
        self.done = max(self.done, self.now) + steps * STEP_S
        self.ready.append(self.done)

    def read(self) -> None:
        self.now = max(self.now, self.ready.pop(0))
        self.meter.read()


def _played(dispatches: list[tuple[int, int]]) -> Device:
    """Plays a session that launches each dispatch before it reads the previous one. A dispatch is (prefill calls before
    it, decode steps)."""
    device = Device()
    for number, (calls, steps) in enumerate(dispatches):
        device.prefill(calls)
        device.launch(steps)
        if number:
            device.read()
    device.read()
    return device


@pytest.mark.parametrize(
    "dispatches",
    [
        [(1, 8)],
        [(1, 8), (0, 8), (0, 8), (0, 3)],
        [(9, 8), (0, 8), (2, 8), (1, 8), (0, 8)],
    ],
    ids=["one", "begin", "between"],
)
def test_prefill_is_told_from_decoding(dispatches):
    device = _played(dispatches)
    calls, steps = (sum(part) for part in zip(*dispatches, strict=True))
    assert device.meter.calls == calls
    assert device.meter.seconds() == pytest.approx((calls * CALL_S, steps * STEP_S))
    assert sum(device.meter.seconds()) == pytest.approx(device.now)


def test_where_no_call_is_timed_all_is_decoding():
    assert _played([(0, 8), (2, 8)]).meter.seconds() == pytest.approx((0.0, 16 * STEP_S + 2 * CALL_S))


def test_time_without_work_is_nobodys():
    device = Device()
    for pause in (5.0, 0.0, 7.0):
        device.prefill(0)  # tools answer for `pause` seconds: no launch until then
        device.now += pause
        device.prefill(1)
        device.now += HOST_S  # the host's work meanwhile takes none of the device's time
        device.launch(8)
        device.read()
    assert device.meter.seconds() == pytest.approx((3 * CALL_S, 24 * STEP_S))


def test_an_engines_calls_are_counted_and_timed(tight, policy, prompts_of):
    tight.generate(policy, prompts_of([9, 4]), group_size=4, step=0)
    stats = tight.stats
    assert 0 < stats.prefill_calls <= stats.prefill_tokens and stats.plan_seconds > 0
    assert stats.prefill_seconds > 0 < stats.decode_seconds
    assert stats.prefill_seconds + stats.decode_seconds < stats.seconds
    named = stats.metrics()
    assert named["perf/prefill_calls"] == stats.prefill_calls and named["perf/dispatches"] == stats.dispatches
    assert named["time/prefill"] == stats.prefill_seconds and named["perf/decode_steps"] == stats.decode_steps
