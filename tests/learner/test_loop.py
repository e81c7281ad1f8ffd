"""The loop's order of events, worked out by hand."""

import pytest

from podrl.learner.loop import Schedule, train


class Trace:
    """Parts that only write down what the loop asks for."""

    def __init__(self, start=0, restored=(), stop_after=None):
        self.events, self._start, self._restored, self._stop_after = [], start, list(restored), stop_after
        self._trained = start

    def restore(self):
        return self._start, [self._batch(step, version) for step, version in self._restored]

    def publish(self, step):
        self.events.append(f"publish {step}")
        return step

    def submit(self, policy, step):
        self.events.append(f"submit {step} v{policy}")
        return self._batch(step, policy)

    def _batch(self, step, version):
        class Batch:
            def result(self):
                return step, version

        return Batch()

    def update(self, step, experience):
        assert experience[0] == step
        self.events.append(f"update {step} v{experience[1]}")
        self._trained = step + 1
        return {}

    def record(self, step, experience, metrics):
        pass

    def save(self, step, in_flight):
        self.events.append(f"save {step} +{[b.result()[0] for b in in_flight]}")

    def evaluate(self, policy, step):
        self.events.append(f"evaluate {step} v{policy}")

    def stopping(self):
        return self._stop_after is not None and self._trained >= self._stop_after


def test_on_policy_order():
    trace = Trace()
    assert train(trace, Schedule(max_steps=2)) == 2
    assert trace.events == [
        *("publish 0", "evaluate 0 v0"),
        *("submit 0 v0", "update 0 v0", "publish 1"),
        *("submit 1 v1", "update 1 v1", "publish 2", "save 2 +[]", "evaluate 2 v2"),
    ]


def test_one_step_of_staleness_keeps_two_in_flight_and_saves_the_second():
    trace = Trace()
    train(trace, Schedule(max_steps=3, max_staleness=1, save_every=1))
    assert trace.events == [
        *("publish 0", "evaluate 0 v0"),
        *("submit 0 v0", "submit 1 v0", "update 0 v0", "publish 1", "save 1 +[1]"),
        *("submit 2 v1", "update 1 v0", "publish 2", "save 2 +[2]"),
        *("update 2 v1", "publish 3", "save 3 +[]", "evaluate 3 v3"),
    ]


def test_resuming_goes_on_with_the_batches_that_were_in_flight():
    trace = Trace(start=1, restored=[(1, 0)])
    train(trace, Schedule(max_steps=3, max_staleness=1, save_every=2))
    assert trace.events == [
        *("publish 1", "submit 2 v1", "update 1 v0", "publish 2", "save 2 +[2]"),
        *("update 2 v1", "publish 3", "save 3 +[]", "evaluate 3 v3"),
    ]


def test_a_stop_saves_what_is_not_saved_yet():
    trace = Trace(stop_after=2)
    assert train(trace, Schedule(max_steps=9, save_every=5)) == 2
    assert trace.events[-1] == "save 2 +[]"
    trace = Trace(stop_after=2)
    train(trace, Schedule(max_steps=9, save_every=2))
    assert trace.events[-1] == "save 2 +[]" and trace.events.count("save 2 +[]") == 1


def test_a_finished_run_trains_nothing():
    trace = Trace(start=3)
    assert train(trace, Schedule(max_steps=3)) == 3
    assert trace.events == ["publish 3", "evaluate 3 v3"]  # which the parts skip where metrics.jsonl has it


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"trainer\.max_steps=0"):
        Schedule(max_steps=0)
