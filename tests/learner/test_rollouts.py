"""Sources of batches: when they wait and move weights, and which copy of a batch they give to a checkpoint."""

import types

import pytest

from podrl.learner.loop import Start
from podrl.learner.pods.trainer import RemoteBatch
from podrl.learner.rollouts import OfflineBatches


class Place:
    """Stands in for the rollouts of a process; it only records the calls."""

    def __init__(self):
        self.events = []

    def resume(self, start):
        self.events.append(f"resume {start.step}")
        return []

    def agree(self, step):
        self.events.append(f"agree {step}")

    def move(self, step, *, in_place):
        self.events.append(f"move {step} {'in place' if in_place else 'beside'}")
        return f"policy {step}"

    def next_batch(self):
        self.events.append("batch")
        return "answers"

    def evaluate(self, policy, step):
        self.events.append(f"evaluate {policy} at {step}")
        return {"eval/x": 1.0}, []

    def close(self):
        self.events.append("close")


def test_given_answers_move_weights_only_to_evaluate_them():
    place = Place()
    rollouts = OfflineBatches(place)
    rollouts.resume(Start(2, b"", (), set()))
    policy = rollouts.publish(2)
    assert rollouts.submit(policy, 2).result() == "answers" and policy.params == {}
    rollouts.publish(3)
    assert rollouts.evaluate(policy, 3) == ({"eval/x": 1.0}, [])
    rollouts.close()
    assert place.events == [
        *("resume 2", "agree 2", "batch", "agree 3"),
        *("move 3 beside", "evaluate policy 3 at 3", "close"),
    ]


@pytest.mark.parametrize(("whole", "asked"), [(True, ["needed", "everything"]), (False, ["needed"])])
def test_only_the_copy_that_is_written_is_fetched_whole(whole, asked):
    fetched = []

    def gather(step, *, everything=False):
        fetched.append("everything" if everything else "needed")
        return f"batch {step}, {fetched[-1]}"

    rollouts = types.SimpleNamespace(gather=gather, traces=lambda step: False)
    batch = RemoteBatch(rollouts, 4, whole=whole)  # pyright: ignore[reportArgumentType]
    assert batch.result() == batch.result() == "batch 4, needed"
    assert batch.complete() == batch.complete() == batch.result() == f"batch 4, {asked[-1]}"
    assert fetched == asked


@pytest.mark.parametrize("whole", [True, False])
def test_the_copy_of_a_traced_batch_is_fetched_whole_and_once(whole):
    fetched, asked = [], []

    def gather(step, *, everything=False):
        fetched.append(everything)
        return f"batch {step}"

    def traces(step):
        asked.append(step)
        return True

    batch = RemoteBatch(types.SimpleNamespace(gather=gather, traces=traces), 4, whole=whole)  # pyright: ignore[reportArgumentType]
    assert batch.result() == batch.complete() == batch.result() == "batch 4"
    assert fetched == [True] and set(asked) == {4}
