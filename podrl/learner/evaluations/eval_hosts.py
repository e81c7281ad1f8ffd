"""Evaluation hosts of a pod: they score shares of evaluations, which trainer 0 gives out, and do nothing else."""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from typing import Any

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner import experience as codec
from podrl.learner.evaluate import Evaluator, Scored
from podrl.mappings import JsonObject
from podrl.rundir import leases
from podrl.rundir.run import Run
from podrl.runtime.channel import LateError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.watchdog import EXIT_PREEMPTED
from podrl.transfer.pull.fetch import VersionGoneError
from podrl.types import BatchError, Policy

_log = logging.getLogger("podrl.evaluation")
_LOOK_S = 0.5
_LAST_WORDS_S = 300.0
_PIECE_LANES = 8  # samples in a piece, per lane of the engine; a host notices a stop signal between pieces only


class EvaluationShares:
    """Runs on the leader: gives the shares of one evaluation at a time to evaluation hosts, and takes their scores.

    The leader answers a host that asks for a share as soon as a share is free. The share of a lost host goes to the
    next host that asks. That host may join much later, because trainers keep the weights until the next evaluation
    begins.
    """

    def __init__(self, pod: Pod, deadline_s: float, ending: Any):
        """Starts without an evaluation.

        Args:
          pod: the job's processes.
          deadline_s: the longest wait for scores while no evaluation host is in the job, in seconds.
          ending: function that returns True once the job was asked to stop; evaluation hosts then stay until the job
            ends.
        """
        self._pod, self._deadline_s, self._ending = pod, deadline_s, ending
        self._changed = threading.Condition()
        # `_step`: step of the evaluation. `_over`: step that the job reached; -1 until the job is over.
        self._step, self._over = 0, -1
        self._hosts: list[int | None] = []  # host of each share, which makes or has made it; None for a free share
        self._scores: dict[int, Message] = {}  # scores by the number of the share
        self._open_requests: dict[int, futures.Future[Message]] = {}  # open requests, by host
        self._waited = False  # True while training waits for the scores
        pod.on_evaluator_lost = self._remove_host
        pod.wait_sources.append(self._describe_wait)
        pod.channel.serve("share", self._on_request)
        pod.channel.serve("share made", self._on_scores)
        pod.channel.serve("share leaves", self._on_leaves)

    def open_shares(self, name: str, shares: int, since: int) -> None:
        """Opens the evaluation of version `since`, in `shares` shares; the previous evaluation must be complete."""
        del name
        with self._changed:
            self._step, self._scores = since, {}
            self._hosts = [None for _ in range(shares)]
            self._assign_shares()

    def collect(self, name: str, deadline_s: float) -> list[Message]:
        """Waits for all shares of an evaluation; returns the scores of each share, in the order of the shares.

        Raises:
          LateError: some shares were not made within the deadline, or before the job was over.
        """
        with self._changed:
            whole = lambda: len(self._scores) == len(self._hosts)  # noqa: E731
            self._changed.wait_for(lambda: whole() or self._over >= 0, deadline_s)
            if not whole():
                raise LateError(
                    f"{self._pod.name} waited for the scores of {name}, but only {len(self._scores)} of "
                    f"{len(self._hosts)} shares were scored by the hosts of roles.eval.hosts: start the same command "
                    "again."
                )
            return [self._scores[share] for share in range(len(self._hosts))]

    def forget(self, names: Iterable[str]) -> None:
        """Drops the scores, once they have been joined."""
        del names
        with self._changed:
            self._hosts, self._scores, self._waited = [], {}, False

    def wait(self, work: futures.Future[Any]) -> None:
        """Waits for the scores that `work` collects.

        Raises:
          LateError: no evaluation host was in the job for as long as the deadline.
        """
        absent_since, self._waited = None, True
        while not futures.wait([work], _LOOK_S).done:
            absent_since = None if self._present() else absent_since or time.monotonic()
            if absent_since is not None and time.monotonic() - absent_since > self._deadline_s:
                raise LateError(
                    f"{self._pod.name} waited {self._deadline_s:.0f} s for an evaluation host: none of the hosts of "
                    "roles.eval.hosts has joined the job, and an evaluation needs one. Start the same command on all "
                    "hosts again."
                )

    def close(self, step: int) -> None:
        """Tells the hosts that the job is over, and the step that it reached."""
        with self._changed:
            self._over = step
            self._assign_shares()
            self._changed.notify_all()

    def _present(self) -> list[int]:
        return [host for host in self._pod.seat.hosts.eval if not self._pod.is_lost(host)]

    def _describe_wait(self) -> str:
        """Names the missing shares, and the hosts that make them; '' if no share is missing."""
        if not self._waited or not (left := len(self._hosts) - len(self._scores)):
            return ""
        if not self._present():
            return f"an evaluation host for {leases.evaluation(self._step)}: none is in the job"
        makers = [host for share, host in enumerate(self._hosts) if host is not None and share not in self._scores]
        names = ", ".join(f"{self._pod.seat.hosts.name(host)} (host {host})" for host in dict.fromkeys(makers))
        by = names or "no host yet"
        return f"{left} of {len(self._hosts)} shares of {leases.evaluation(self._step)}, made by {by}"

    def _assign_shares(self) -> None:
        """Gives free shares to the hosts that ask for one; once the job is over, tells all of them so."""
        for host, request in list(self._open_requests.items()):
            left = [share for share in range(len(self._hosts)) if share not in self._scores]
            # A host that asks for a share again has not received the first answer, so it gets the same share.
            mine = [share for share in left if self._hosts[share] == host]
            free = [share for share in left if self._hosts[share] is None]
            if self._over >= 0:
                answer = {"over": self._over}
            elif mine or free:
                share = (mine or free)[0]
                self._hosts[share] = host
                answer = {"step": self._step, "share": share, "shares": len(self._hosts)}
            else:
                continue
            del self._open_requests[host]
            request.set_result(Message(answer))

    def _on_request(self, message: Message) -> "futures.Future[Message]":
        host, answer = int(message.value["process"]), futures.Future[Message]()
        if not self._pod.is_at(host, message.value["address"]):
            raise ValueError(f"host {host} is not in the job any more")
        with self._changed:
            self._open_requests[host] = answer
            self._assign_shares()
        return answer

    def _on_scores(self, message: Message) -> Message:
        of = message.value["of"]
        with self._changed:
            if of["step"] == self._step and of["shares"] == len(self._hosts):
                self._scores.setdefault(int(of["share"]), Message(message.value["made"], message.arrays))
                self._changed.notify_all()
        return Message()

    def _on_leaves(self, message: Message) -> Message:
        """Lets a host that was asked to stop leave the job, unless it is the last evaluation host or the job stops.

        The last host stays, and makes the job stop (`EvaluationHost._leave_if_stopping`).
        """
        host = int(message.value["process"])
        others = [other for other in self._present() if other != host]
        # A host that was allowed to leave may ask again, after other hosts were lost. The answer must still be yes.
        has_left = self._pod.is_lost(host)
        may_leave = has_left or (bool(others) and not self._ending())
        if may_leave and not has_left:
            self._pod.let_go(host)
            name = f"{self._pod.seat.hosts.name(host)} (host {host})"
            _log.warning("%s was asked to stop and leaves; %d evaluation hosts stay.", name, len(others))
            self._remove_host(host)
        return Message({"goes": may_leave})

    def _remove_host(self, host: int) -> None:
        """Frees the shares that a lost host has not made."""
        with self._changed:
            self._open_requests.pop(host, None)
            free_again = [i for i, own in enumerate(self._hosts) if own == host and i not in self._scores]
            for share in free_again:
                self._hosts[share] = None
            if free_again:
                task, name = leases.evaluation(self._step), self._pod.seat.hosts.name(host)
                _log.warning("The share that %s had of %s goes to the next evaluation host that asks.", name, task)
            self._assign_shares()


class EvaluationHost:
    """Runs on an evaluation host: pulls the weights of each evaluation, and scores the shares that it gets."""

    def __init__(self, cluster: RLCluster, evaluator: Evaluator | None, run: Run, pod: Pod, deadline_s: float):
        """Stores the collaborators.

        Args:
          cluster: the cluster with this host's copy of the weights, and its decoding engine.
          evaluator: scores the policy on the held-out prompts; None if there are no prompts.
          run: signals, the watchdog and spans.
          pod: the job's processes, all connected.
          deadline_s: the longest wait for an answer of the leader, in seconds.
        """
        self._cluster, self._evaluator, self._run, self._pod = cluster, evaluator, run, pod
        self._deadline_s, self._refused = deadline_s, False
        self._policy: Policy | None = None

    def work(self) -> int:
        """Scores shares of evaluations until the job is over; returns the step that the job reached."""
        self._run.begin()
        while True:
            share = self._request_share()
            if "over" in share:
                return int(share["over"])
            # A host that was lost while it scored this share may have recorded outside answers. This host must repeat
            # these answers, so it reads the records again.
            self._run.notify_takeover()
            try:
                result = self._score_share(int(share["step"]), (int(share["share"]), int(share["shares"])))
            except VersionGoneError as error:  # the leader declared this host lost, and other hosts made the share
                _log.warning("Skips the share, because its weights are gone: %s", error)
                time.sleep(_LOOK_S)
                continue
            if isinstance(result, BatchError):
                failed = codec.failure(result)
                self._pod.call(LEADER, "share made", Message({"of": share, "made": failed.value}), self._deadline_s)
            else:
                scores, samples = result
                words = {"of": share, "made": {"samples": codec.plain(samples)}}
                self._pod.call(LEADER, "share made", Message(words, scores), self._deadline_s)
            self._run.spans.pass_on(int(share["step"]), last=True)

    def _request_share(self) -> JsonObject:
        """Waits for a share, or the end of the job."""
        me = Message({"process": self._pod.seat.process, "address": self._pod.channel.address})
        request = self._pod.channel.request(self._pod.address(LEADER), "call", "share", me)
        while not request.arrived(_LOOK_S):
            self._leave_if_stopping()
        return request.wait(0.0, "trainer 0: share").value

    def _score_share(self, step: int, part: tuple[int, int]) -> Scored | BatchError:
        """Scores a share under the weights after a step, which the trainers hold until the next evaluation begins."""
        assert self._evaluator is not None, "only a host with an evaluator scores shares"
        if self._policy is None or self._policy.version != step:
            with self._run.watchdog.stage("publish"):
                self._policy = self._cluster.sync_weights(step, in_place=True)
        most = _PIECE_LANES * self._cluster.config.rollout().lanes
        work = self._evaluator.in_pieces(self._policy, step, part, lambda: most)
        while True:
            try:
                with self._run.watchdog.stage("evaluation"):
                    next(work)
            except StopIteration as end:
                return end.value
            except BatchError as error:
                return error
            self._leave_if_stopping()

    def _leave_if_stopping(self) -> None:
        """Ends this process if it was asked to stop and other evaluation hosts stay; if none stays, stops the job."""
        if self._refused or not self._run.stopping():
            return
        me = {"process": self._pod.seat.process}
        if self._pod.call(LEADER, "share leaves", Message(me), self._deadline_s).value["goes"]:
            self._pod.quit("it was asked to stop, and the job goes on without it", EXIT_PREEMPTED)
            self._pod.await_end(_LAST_WORDS_S)
        self._refused = True
        self._pod.call(LEADER, "reached", Message(me | {"step": 0, "stop": True}), self._deadline_s)
