"""The loop's order of events is compared with a trace worked out by hand."""

import contextlib

import pytest

from podrl.learner.loop import Schedule, Start, train


class Trace:
    """Rollouts, algorithm and recorder in one object that only records the loop's calls."""

    def __init__(self, start=0, restored=(), stop_after=None):
        self.events, self._start, self._restored, self._stop_after = [], start, list(restored), stop_after
        self._trained = start

    def train(self, schedule):
        return train(self, self, self, schedule)

    def restore(self):
        return Start(self._start, b"", self._restored, set())

    def resume(self, start):
        return [self._batch(step, version) for step, version in start.pending]

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

    @contextlib.contextmanager
    def stage(self, name):
        self.events.append(f"<{name}")
        yield
        self.events.append(f"{name}>")

    def score(self, step, experience):
        assert experience[0] == step
        self.events.append("score")
        return f"scores {step} v{experience[1]}"

    def rewards(self, experience, scores):
        self.events.append("rewards")
        return f"rewards with {scores}", {"of": "rewards", "kl": 1.0}

    def advantages(self, experience, scores, rewards):
        assert rewards == f"rewards with {scores}"
        self.events.append("advantages")
        return "advantages", {"of": "advantages"}

    def pack(self, step, experience, scores, advantages):
        assert advantages == "advantages"
        self.events.append("pack")
        return [f"batch {i} with {scores}" for i in range(2)]

    def update(self, step, batches):
        version = experience_of(batches)
        self.events.append(f"update {step} {version}")
        self._trained = step + 1
        return {"loss": [0.5, 0.25]}

    def record(self, step, experience, metrics):
        assert metrics == {"of": "advantages", "kl": 1.0, "loss": [0.5, 0.25]}

    def save(self, step, in_flight):
        self.events.append(f"save {step} +{[b.result()[0] for b in in_flight]}")

    def evaluate(self, policy, step):
        self.events.append(f"evaluate {step} v{policy}")

    def stopping(self):
        return self._stop_after is not None and self._trained >= self._stop_after

    def outside(self):
        """Lists the events; of those within the stage 'update', only the update itself."""
        inner = {"<update", "score", "rewards", "advantages", "pack", "update>"}
        return [event for event in self.events if event not in inner]


def experience_of(batches):
    """Returns the version of the policy that sampled the packed batch."""
    (version,) = {batch.split()[-1] for batch in batches}
    return version


def test_a_step_goes_from_scores_to_rewards_to_advantages_to_batches_to_updates():
    trace = Trace()
    trace.train(Schedule(max_steps=1))
    start = trace.events.index("<update")
    inside = ["<update", "score", "rewards", "advantages", "pack", "update 0 v0", "update>"]
    assert trace.events[start : start + 7] == inside


def test_on_policy_order():
    trace = Trace()
    assert trace.train(Schedule(max_steps=2)) == 2
    assert trace.outside() == [
        *("publish 0", "evaluate 0 v0"),
        *("submit 0 v0", "update 0 v0", "publish 1"),
        *("submit 1 v1", "update 1 v1", "publish 2", "save 2 +[]", "evaluate 2 v2"),
    ]


def test_one_step_of_staleness_keeps_two_in_flight_and_saves_the_second():
    trace = Trace()
    trace.train(Schedule(max_steps=3, max_staleness=1, save_every=1))
    assert trace.outside() == [
        *("publish 0", "evaluate 0 v0"),
        *("submit 0 v0", "submit 1 v0", "update 0 v0", "publish 1", "save 1 +[1]"),
        *("submit 2 v1", "update 1 v0", "publish 2", "save 2 +[2]"),
        *("update 2 v1", "publish 3", "save 3 +[]", "evaluate 3 v3"),
    ]


def test_resuming_goes_on_with_the_batches_that_were_in_flight():
    trace = Trace(start=1, restored=[(1, 0)])
    trace.train(Schedule(max_steps=3, max_staleness=1, save_every=2))
    assert trace.outside() == [
        *("publish 1", "submit 2 v1", "update 1 v0", "publish 2", "save 2 +[2]"),
        *("update 2 v1", "publish 3", "save 3 +[]", "evaluate 3 v3"),
    ]


def test_a_stop_saves_what_is_not_saved_yet():
    trace = Trace(stop_after=2)
    assert trace.train(Schedule(max_steps=9, save_every=5)) == 2
    assert trace.events[-1] == "save 2 +[]"
    trace = Trace(stop_after=2)
    trace.train(Schedule(max_steps=9, save_every=2))
    assert trace.events[-1] == "save 2 +[]" and trace.events.count("save 2 +[]") == 1


def test_a_finished_run_trains_nothing():
    trace = Trace(start=3)
    assert trace.train(Schedule(max_steps=3)) == 3
    # A run's recorder skips an evaluation that metrics.jsonl has.
    assert trace.outside() == ["publish 3", "evaluate 3 v3"]


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"^trainer\.max_steps=0 must be at least 1\.$"):
        Schedule(max_steps=0)
    with pytest.raises(ValueError, match=r"^ppo\.max_staleness=-1 must be at least 0\.$"):
        Schedule(max_steps=1, max_staleness=-1, section="ppo")
