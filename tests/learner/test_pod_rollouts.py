"""Batches between the hosts of a pod whose trainers are at different steps."""

import threading
import types

import numpy as np
import pytest
from endpoints import joined

from benchmarks import pod as bench
from podrl.learner.loop import Schedule, Start
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime.roles import Hosts

STEPS = 3
S = 30.0
ARGS = types.SimpleNamespace(prompts=2, samples=2, tokens=8, generate_s=0.0)


@pytest.fixture
def pods():
    with joined(Hosts((0, 1), (2,))) as members:
        yield members


def _trainer(pod):
    everything = lambda step, experience: np.arange(len(experience.rollouts.length_B))  # noqa: E731
    run, barrier = bench.Run(), StepBarrier(pod, bench.Run(), S)
    some = {"needed": everything, "deadline_s": S, "begun": Schedule(STEPS + 1).begun, "prompts": ARGS.prompts}
    rollouts = RemoteRollouts(bench.Cluster(), bench.Data(ARGS.prompts), run, pod, barrier, **some)
    rollouts.resume(Start(0, b"", (), set()))
    return rollouts


def test_a_trainer_host_that_is_behind_still_gets_its_rows(pods):
    """The leader finishes all steps before the other trainer begins, because it waits for no other host between
    steps."""
    leader, slow, host = pods
    made = bench.experience(ARGS, 0)
    run, barrier = bench.Run(), StepBarrier(host, bench.Run(), S)
    generate = lambda prompts, policy, step: made  # noqa: E731
    rollouts = HostRollouts(bench.Cluster(), run, host, barrier, generate=generate, evaluator=None, deadline_s=S)
    left = []

    def generates() -> None:
        rollouts.enter()
        rollouts.resume(Start(0, b"", (), set()))
        for step in range(STEPS):
            policy = rollouts.publish(step)
            rollouts.submit(policy, step).result()
        rollouts.publish(STEPS)
        left.extend(lease.task for lease in rollouts._batches)

    def trains(trainer: RemoteRollouts) -> list[np.ndarray]:
        tokens = []
        for step in range(STEPS):
            policy = trainer.publish(step)
            tokens.append(trainer.submit(policy, step).result().rollouts.tokens_BT)
        trainer.publish(STEPS)
        return tokens

    generating = threading.Thread(target=generates)
    generating.start()
    first, second = _trainer(leader), _trainer(slow)
    ahead = trains(first)
    generating.join(S)
    assert left == ["batch/0", "batch/1", "batch/2"], "batches that a trainer has not taken are kept"
    behind = trains(second)
    for one, other in zip(ahead, behind, strict=True):
        np.testing.assert_array_equal(one, other)
    first.publish(STEPS + 1)
    rollouts.publish(STEPS + 1)
    assert not rollouts._batches, "what all have taken is dropped"
    for end in (first, second, rollouts):
        end.close()
