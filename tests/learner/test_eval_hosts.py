"""Evaluation hosts: if one is lost, the others make all shares of the evaluation, or the job ends with an error."""

import contextlib
import threading
import types
from typing import Any

import numpy as np
import pytest
from endpoints import joined
from test_elastic_hosts import DEADLINE_S, Stream, run
from waits import until

from podrl.learner.evaluations import eval_hosts
from podrl.learner.evaluations.eval_hosts import EvaluationHost, EvaluationShares
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime import channel
from podrl.runtime import pod as pod_of
from podrl.runtime.channel import ChannelError, LateError
from podrl.runtime.roles import Hosts
from podrl.types import BatchError, Policy

HOSTS = Hosts((0,), (1,), eval=(2, 3))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(channel._Link, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    for module in (pod_of, eval_hosts):
        monkeypatch.setattr(module, "_LOOK_S", 0.02)


class GoneError(Exception):
    """Ends a thread, as the real error would end the process."""


class Member:
    """An evaluation host on a thread of this process; it pauses within a share while the event `held` is clear."""

    def __init__(self, pod, *, fails: str = "", stops: bool = False):
        self.pod, self._fails, self.held, self.begun = pod, fails, threading.Event(), threading.Event()
        self.held.set()
        self.made: list[tuple[int, int]] = []  # (step, number of the share) of each share that was made
        self.ended: list[int] = []
        here: Any = run()
        here.stopping = lambda: stops
        weights: Any = types.SimpleNamespace(
            sync_weights=lambda version, *, in_place: Policy({}, version),
            config=types.SimpleNamespace(rollout=lambda: types.SimpleNamespace(lanes=2)),
        )
        evaluator: Any = types.SimpleNamespace(in_pieces=self._in_pieces)
        self._host = EvaluationHost(weights, evaluator, here, pod, DEADLINE_S)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with contextlib.suppress(GoneError, ChannelError):
            self.ended.append(self._host.work())

    def _in_pieces(self, policy, step, part, most):
        assert policy.version == step and most() == 2 * eval_hosts._PIECE_LANES
        self.begun.set()
        yield
        self.held.wait(DEADLINE_S)
        if self._fails:
            raise BatchError(self._fails)
        self.made.append((step, part[0]))
        share = np.full((1, 1), part[0] + 10.0 * step)
        return {"eval/x": share}, [{"share": part[0]}]


def leader_of(pods, deadline_s: float = DEADLINE_S):
    """Makes the leader's rollouts, and a list of the versions that they tell the trainers' weights to hold."""
    held: list[int] = []
    cluster: Any = types.SimpleNamespace(weights=types.SimpleNamespace(hold=held.append))
    made: Any = {"needed": None, "deadline_s": deadline_s, "prompts": 6}
    here: Any = run()
    return RemoteRollouts(cluster, Stream(), here, pods[0], StepBarrier(pods[0], here, DEADLINE_S), **made), held


def test_evaluations_are_made_by_their_own_hosts_and_joined_in_order():
    with joined(HOSTS, disposable=True) as pods:
        leader, held = leader_of(pods)
        members = [Member(pod) for pod in pods[2:]]
        for step in (0, 4):
            leader.begin_evaluation(Policy({}, step), step)
            assert not leader.unsaved(), "the evaluation has not failed, so checkpoints can be saved"
            made = leader.evaluated(wait=True)
            assert made is not None and leader.evaluated(wait=True) is None
            assert made[0] == step and made[1]["eval/x"] == 10.0 * step + 0.5 and made[2] == [{"share": 0}]
        assert held == [0, 4], "each evaluation holds the version that it scores"
        assert sorted(members[0].made + members[1].made) == [(0, 0), (0, 1), (4, 0), (4, 1)]
        leader._at = 6
        leader.close()
        for member in members:
            member.thread.join(DEADLINE_S)
            assert member.ended == [6]


def test_a_lost_hosts_share_is_made_by_another_or_by_the_next_that_comes():
    with joined(HOSTS, disposable=True) as pods:
        leader, _ = leader_of(pods)
        first = Member(pods[2])
        first.held.clear()
        leader.begin_evaluation(Policy({}, 2), 2)
        assert first.begun.wait(DEADLINE_S)
        second = Member(pods[3])
        pods[0].on_evaluator_lost(2)
        made = leader.evaluated(wait=True)
        assert made is not None and made[1]["eval/x"] == 20.5
        assert sorted(second.made) == [(2, 0), (2, 1)] and not first.made
        leader.close()


def test_a_share_that_fails_is_raised_where_it_is_waited_for():
    with joined(HOSTS, disposable=True) as pods:
        leader, _ = leader_of(pods)
        Member(pods[2], fails="no verdict")
        leader.begin_evaluation(Policy({}, 0), 0)
        collects: Any = leader._evaluations._work
        until(collects.done)
        assert leader.evaluated(wait=False) is None
        with pytest.raises(BatchError, match="no verdict"):
            leader.evaluated(wait=True)
        assert leader.unsaved(), "a run that resumes must repeat the failed evaluation"
        leader.close()


def test_without_a_host_the_wait_ends_with_a_word():
    with joined(HOSTS, disposable=True) as pods:
        leader, _ = leader_of(pods, deadline_s=0.5)
        leader.begin_evaluation(Policy({}, 2), 2)
        for pod in pods[2:]:
            pod.channel.close()
        until(lambda: all(pods[0].is_lost(host) for host in HOSTS.eval))
        assert pods[0].describe_waits() == "", "the trainer does not wait for the evaluation yet"
        collects: Any = leader._evaluations._work
        with pytest.raises(LateError, match=r"trainer 0 waited 0 s for an evaluation host: none of the hosts of"):
            leader.evaluated(wait=True)
        assert "an evaluation host for evaluation/2: none is in the job" in pods[0].describe_waits()
        leader.close()
        with pytest.raises(LateError, match=r"for the scores of evaluation/2, but only \d of \d shares were scored"):
            collects.result(DEADLINE_S)


def test_a_host_that_is_asked_to_stop_leaves_and_the_last_one_stops_the_job(monkeypatch):
    left = []

    def ends(seconds: float) -> None:
        raise GoneError

    with joined(HOSTS, disposable=True) as pods:
        for pod in pods[2:]:
            monkeypatch.setattr(pod, "quit", lambda text, code, pod=pod: left.append((pod.seat.process, code)))
            monkeypatch.setattr(pod, "await_end", ends)
        leader, _ = leader_of(pods)
        asked = Member(pods[2], stops=True)
        asked.thread.join(DEADLINE_S)
        assert left == [(2, 75)] and pods[0].is_lost(2) and not leader._barrier.ending()
        last = Member(pods[3], stops=True)
        until(leader._barrier.ending)
        leader.begin_evaluation(Policy({}, 4), 4)
        made = leader.evaluated(wait=True)
        assert made is not None and sorted(last.made) == [(4, 0), (4, 1)], (
            "the last evaluation host stays until the job has ended"
        )
        leader.close()
        last.thread.join(DEADLINE_S)
        assert last.ended == [0] and left == [(2, 75)]


def test_a_process_that_is_in_the_place_of_one_that_is_gone_is_the_one_that_is_answered():
    with joined(HOSTS, disposable=True) as pods:
        shares = EvaluationShares(pods[0], DEADLINE_S, lambda: False)
        message = channel.Message({"process": 2, "address": "127.0.0.1:1"})
        with pytest.raises(ValueError, match="host 2 is not in the job any more"):
            shares._on_request(message)
        asked = [
            shares._on_request(channel.Message({"process": 2, "address": pods[2].channel.address})) for _ in range(2)
        ]
        shares.open_shares("evaluation/3", 2, 3)
        assert not asked[0].done() and asked[1].result().value == {"step": 3, "share": 0, "shares": 2}
        again = shares._on_request(channel.Message({"process": 2, "address": pods[2].channel.address}))
        assert again.result().value["share"] == 0, (
            "a repeated request gets the same share, because the host has not received the answer"
        )


def test_a_host_that_may_leave_may_leave_though_the_others_are_lost_before_it_hears_so():
    with joined(HOSTS, disposable=True) as pods:
        shares, asks = EvaluationShares(pods[0], DEADLINE_S, lambda: False), channel.Message({"process": 2})
        assert shares._on_leaves(asks).value["goes"] and pods[0].is_lost(2)
        pods[0].let_go(3)
        assert shares._on_leaves(asks).value["goes"]
