"""Trainer hosts of a pod that are at different steps get the same batches."""

import dataclasses
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
from podrl.types import Rollouts

STEPS = 3
S = 30.0
ARGS = types.SimpleNamespace(prompts=2, samples=2, tokens=8, generate_s=0.0)


@pytest.fixture
def pods():
    with joined(Hosts((0, 1), (2,))) as members:
        yield members


def _everything(step, experience):
    return np.arange(len(experience.rollouts.length_B))


def _trainer(pod, needed=_everything):
    run, barrier = bench.Run(), StepBarrier(pod, bench.Run(), S)
    some = {"needed": needed, "deadline_s": S, "begun": Schedule(STEPS + 1).begun, "prompts": ARGS.prompts}
    rollouts = RemoteRollouts(bench.Cluster(), bench.Data(ARGS.prompts), run, pod, barrier, **some)
    rollouts.resume(Start(0, b"", (), set()))
    return rollouts


def test_a_trainer_host_that_is_behind_still_gets_its_rows(pods):
    """The leader finishes all steps before the other trainer begins, because it waits for no other host between steps.

    The samples have two pieces each, so the other trainer gets the tokens of all samples; it gets the other columns of
    one sample only.
    """
    leader, slow, host = pods
    made = bench.experience(ARGS, 0)
    logprob_BT = np.where(made.rollouts.mask_BT > 0, -1.5, 0.0).astype(np.float32)
    piece_BT = (np.arange(made.rollouts.tokens_BT.shape[1]) > 2).astype(np.int16) * np.ones((4, 1), np.int16)
    made = dataclasses.replace(
        made, rollouts=dataclasses.replace(made.rollouts, logprob_BT=logprob_BT, piece_BT=piece_BT)
    )

    def own(step, experience):
        real_BT = made.rollouts.mask_BT > 0
        np.testing.assert_array_equal(experience.rollouts.tokens_BT[real_BT], made.rollouts.tokens_BT[real_BT])
        return np.array([2])

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

    def trains(trainer: RemoteRollouts) -> list[Rollouts]:
        taken = []
        for step in range(STEPS):
            policy = trainer.publish(step)
            taken.append(trainer.submit(policy, step).result().rollouts)
        trainer.publish(STEPS)
        return taken

    generating = threading.Thread(target=generates)
    generating.start()
    first, second = _trainer(leader), _trainer(slow, own)
    ahead = trains(first)
    generating.join(S)
    assert left == ["batch/0", "batch/1", "batch/2"], "batches that a trainer has not taken are kept"
    behind = trains(second)
    for one, other in zip(ahead, behind, strict=True):
        np.testing.assert_array_equal(one.tokens_BT, other.tokens_BT)
        np.testing.assert_array_equal(one.logprob_BT, logprob_BT)
        np.testing.assert_array_equal(other.logprob_BT, np.where(np.arange(4)[:, None] == 2, logprob_BT, 0))
    first.publish(STEPS + 1)
    rollouts.publish(STEPS + 1)
    assert not rollouts._batches, "a batch that all trainers have taken is dropped"
    for end in (first, second, rollouts):
        end.close()
