"""A rollout host of a pod: makes the groups that the leader assigns to it, and serves their samples to the trainers."""

import functools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrl.cluster.replica import ReplicaHead
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner import experience as codec
from podrl.learner.evaluate import Evaluator
from podrl.learner.evaluations.hosts import evaluated, offer
from podrl.learner.loop import InFlight, Start
from podrl.learner.pods.player import HostPlayer
from podrl.mappings import JsonObject
from podrl.rollout.batches import PendingBatch
from podrl.rollout.group_player import Mode
from podrl.rundir import leases
from podrl.rundir.leases import Lease, LeaseClient
from podrl.rundir.run import Run
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.watchdog import EXIT_PREEMPTED
from podrl.types import BatchError, Experience, Policy

_LAST_WORDS_S = 300.0
# This is in effect no limit, because an evaluation may take long. A lost trainer is noticed by other means.
_VERDICT_S = 30 * 86400.0
_log = logging.getLogger("podrl.hosting")


class HostRollouts:
    """Runs on a rollout host: receives weights, generates and scores the leader's groups, and serves them to trainers.

    Its leases name the parts of batches that it serves, and the held-out prompts that it evaluates. Leases of a lost
    host may arrive at any time.
    """

    def __init__(
        self,
        cluster: RLCluster,
        run: Run,
        pod: Pod,
        barrier: StepBarrier,
        *,
        generate: Any,
        evaluator: Evaluator | None,
        deadline_s: float,
        mode: Mode = "whole",
        last: int | None = None,
    ):
        """Stores the collaborators, and begins to answer requests for rows.

        Args:
          cluster: the cluster with this host's part of the rollout mesh.
          run: signals, the watchdog and the profiler.
          pod: the job's processes, all connected.
          barrier: agreement with the leader on continuing or stopping after each step.
          generate: a podrl.learner.generation.Generator; None if `submit` is never called.
          evaluator: scores the policy on the held-out prompts; None disables evaluation.
          deadline_s: the longest wait for another process, in seconds.
          mode: the clock of the samples, 'wall', 'windows' or 'whole' (podrl.rollout.group_player.Mode).
          last: last step of the job; the hosts leave after the evaluation of this step. None for no such step.
        """
        self._last = last
        self._cluster, self._run, self._pod, self._barrier = cluster, run, pod, barrier
        self._evaluator, self._deadline_s = evaluator, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        self._at, self._saved, self._generates = 0, -1, generate is not None
        self._leases = LeaseClient(pod, deadline_s, changed=self._take_over)
        self._player = HostPlayer(
            generate,
            self._thread,
            pod,
            self._leases,
            mode=mode,
            weights_of=self._weights_of,
            offer=self._offer,
            offer_state=self._offer_state,
            on_takeover=run.notify_takeover,
            deadline_s=deadline_s,
        )
        self._lock, self._closed = threading.Lock(), False
        self._tasks: set[str] = set()  # names of the evaluations that this host has begun
        self._accepted: set[Lease] = set()  # leases of these evaluations that this host has begun to score
        self._batches: dict[Lease, Experience] = {}  # parts of batches, from which trainers may fetch rows
        self._offered: list[tuple[int, str]] = []  # (step, key) of each state offered for the checkpoint after the step
        self._evaluations: list[tuple[int, str]] = []  # (step, key) of the scores that are offered
        self._policy: Policy | None = None  # the policy on the rollout mesh; used on the rollout thread only
        self._replica = ReplicaHead(pod, stops=run.stop) if pod.seat.hosts.replica > 1 else None
        if self._replica is not None and cluster.generates:
            cluster.rollout.broadcast = self._replica.broadcast
        pod.channel.serve("rows", self._rows)

    def enter(self) -> JsonObject:
        """Asks the leader to let this host into the job.

        Returns:
          The leader's answer: `step` is the step at which this host begins, `evaluated` the steps evaluated so far.
        """
        return self._leases.enter()

    def resume(self, start: Start) -> Sequence[InFlight]:
        """Begins to read the leader's orders and leases; returns no batch.

        The unfinished groups of a checkpoint come to hosts as orders of the leader.
        """
        self._leases.follow()
        if self._generates:
            self._player.follow()
        return []

    def agree(self, step: int) -> None:
        if self._pod.seat.disposable and self._run.stopping() and self._leases.leave():
            self._leave()
        self._at = step
        if self._pod.seat.disposable:
            self._leases.reached(step)
        self._barrier.agree(step)
        if self._replica is not None:
            self._replica.broadcast("step", (step, self._run.profiler.planned))
        needed_step = self._barrier.needed_step
        self._player.await_orders(step, self._barrier.orders, needed_step)
        _drop_before(needed_step, self._offered, self._pod)
        _drop_before(step, self._evaluations, self._pod)  # the leader read the scores before it announced this step
        with self._lock:
            old = {name for name in self._tasks if leases.is_over(name, needed_step)}
            self._tasks -= old
            self._accepted = {lease for lease in self._accepted if lease.task not in old}
        self._leases.forget(name for name in self._leases.names() if leases.is_over(name, needed_step))
        for lease in [each for each in self._batches if leases.step_of(each.task) < needed_step]:
            del self._batches[lease]
            self._pod.channel.drop(lease.key("header"))
            self._pod.channel.drop(lease.key("whole"))

    def _leave(self) -> None:
        """Ends this host and its replica after a stop signal; other hosts take over its groups."""
        if self._replica is not None:
            self._replica.broadcast("leave", ())
        self._pod.quit("it was asked to stop, and the job goes on without it", EXIT_PREEMPTED)
        self._pod.await_end(_LAST_WORDS_S)

    def publish(self, step: int) -> Policy:
        self.agree(step)
        policy = self.move(step, in_place=True)
        self._player.publish(policy)
        return policy

    def move(self, step: int, *, in_place: bool) -> Policy:
        with self._run.watchdog.stage("publish"):
            # This wait must not block the rollout thread. A trainer may still lack groups of a lost host. The rollout
            # thread has to make these groups again, and without them the trainers cannot compute the new weights.
            self._cluster.weights.await_version(step)
        self._player.end_window()
        # Runs on the rollout thread, after the work that waits there, so that one thread at a time launches programs.
        with self._run.watchdog.stage("publish"):
            return self._thread.submit(self._move, step, in_place).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        return PendingBatch(self._player.begin, self.save)  # the leader reads the prompts, and sends them as orders

    def next_batch(self) -> None:
        """Does nothing: no rollout host trains on answers from data (SFT, DPO)."""

    def evaluate(self, policy: Policy, step: int) -> None:
        """Evaluates the held-out prompts of this host's leases, and offers the scores to the leader.

        After the last evaluation the host stays until the leader has the scores of all hosts: another host may be lost
        before it has made its share.
        """
        name = leases.evaluation(step)
        self._leases.await_task(name)
        try:
            for lease in self._accept(name):
                self._thread.submit(self._score, lease, policy).result()
        except BatchError:
            self._pod.await_end(_VERDICT_S)  # the trainers save first, then end the job
            raise
        if step == self._last:
            self._pod.get(LEADER, evaluated(step), self._deadline_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._player.close()
        if self._replica is not None:
            self._replica.broadcast("end", (self._at,))

    # Leases.

    def _accept(self, name: str) -> list[Lease]:
        """Begins an evaluation; returns this host's leases of it. Leases that come later go to `_take_over`."""
        with self._lock:
            self._tasks.add(name)
            mine = self._leases.mine(name)
            self._accepted.update(mine)
            return mine

    def _take_over(self, name: str) -> None:
        """Serves this host's part of a batch, or evaluates leases of a lost host; called when a task's leases change.

        Leases of an evaluation that has not begun here are left to `evaluate`.
        """
        if leases.is_batch(name):
            self._player.serve_batch(name)
            return
        with self._lock:
            if name not in self._tasks or self._closed:
                return
            news = [x for x in self._leases.mine(name) if x not in self._accepted]
            self._accepted.update(news)
            if news:
                self._run.notify_takeover()
            for lease in news:
                _log.warning("%s takes over shares %d-%d of %s.", self._pod.name, lease.first, lease.last - 1, name)
                self._player.aside(functools.partial(self._score_again, lease))

    def _score_again(self, lease: Lease) -> None:
        """Evaluates the lease of a lost host, on the rollout thread."""
        try:
            self._score(lease, Policy({}, leases.step_of(lease.task)))
        except BatchError:
            return  # `_score` has offered the error in place of the scores
        except BaseException as error:
            _log.exception("%s could not take over %s", self._pod.name, lease)
            self._pod.quit(f"shares {lease.first}-{lease.last - 1} of {lease.task} could not be taken over: {error}")
            raise

    # Called on the rollout thread.

    def _move(self, step: int, in_place: bool) -> Policy:
        if self._replica is not None:
            self._replica.broadcast("move", (step, in_place))
        self._policy = self._cluster.sync_weights(step, in_place=in_place)
        return self._policy

    def _weights_of(self, policy: Policy) -> Policy:
        """Returns the policy with the weights of this version, moved again if the mesh holds another version."""
        if self._policy is None or self._policy.version != policy.version:
            return self._move(policy.version, True)
        return self._policy

    def _score(self, lease: Lease, policy: Policy) -> None:
        """Evaluates the held-out prompts of one lease, which may have none: there may be more shares than prompts."""
        assert self._evaluator is not None
        task = self._leases.task(lease.task)
        assert task is not None, lease
        part = (lease.first, task.leases[-1].last)
        try:
            scores = self._evaluator.scores(self._weights_of(policy), leases.step_of(lease.task), part)
        except BatchError as error:
            offer(self._pod, lease, error)
            raise
        offer(self._pod, lease, scores)
        self._evaluations.append((leases.step_of(lease.task), lease.key("scores")))

    # Answers to requests of other processes.

    def _offer(self, lease: Lease, result: Any) -> None:
        """Serves a part of a batch (an Experience) to the trainers, or the BatchError that says why there is none."""
        if isinstance(result, BatchError):
            for kind in ("whole", "header"):
                self._pod.channel.put(lease.key(kind), codec.failure(result))
        elif isinstance(result, Experience):
            self._batches[lease] = result
            self._pod.channel.put(lease.key("whole"), codec.whole(result))
            self._pod.channel.put(lease.key("header"), codec.header(result))

    def save(self) -> None:
        """Offers the state of unfinished groups to the leader, which writes the checkpoint; at most once per step."""
        if self._saved != self._at:
            self._saved = self._at
            self._player.save()

    def _offer_state(self, at: int, name: str, message: Message) -> None:
        """Offers a state that the checkpoint after step `at` holds, under the channel's key `name`."""
        self._offered.append((at, name))
        self._pod.channel.put(name, message)

    def _rows(self, message: Message) -> Message:
        """Answers a request for rows of some samples of a lease; runs on the channel's thread."""
        names, (first, last) = message.value["names"], message.value["part"]
        lease = Lease(message.value["task"], int(first), int(last), self._pod.seat.process)
        if lease not in self._batches:  # an earlier process with this process's number was lost, and the rows with it
            return Message({"gone": True})
        if not set(names) <= set(codec.ALL_ROWS):
            raise ValueError(f"{names} must be rows of a batch: {codec.ALL_ROWS} are its rows")
        return codec.rows(self._batches[lease], message.arrays["chosen"], names)


def _drop_before(step: int, offered: list[tuple[int, str]], pod: Pod) -> None:
    """Stops offering messages of steps before `step`, and removes them from `offered`, a list of (step, key)."""
    for old in [each for each in offered if each[0] < step]:
        offered.remove(old)
        pod.channel.drop(old[1])
