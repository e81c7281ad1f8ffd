"""Evaluations in a pod: trainer hosts give them to rollout or evaluation hosts, and the leader joins the scores."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from podrl.learner import experience as codec
from podrl.learner.evaluate import Keep, Scored, by_record, summarised
from podrl.mappings import LogRecord
from podrl.rundir import leases
from podrl.rundir.leases import Lease
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.types import BatchError

_LONGEST_S = 30 * 86400.0  # longest time for an evaluation; a lost host is noticed by other means


class Shares(Protocol):
    """Gives shares of evaluations to hosts: podrl.rundir.leases.LeaseServer, or EvaluationShares."""

    def open_shares(self, name: str, shares: int, since: int) -> None: ...

    def forget(self, names: Iterable[str]) -> None: ...


class RemoteEvaluations:
    """Runs on a trainer host: gives one evaluation at a time to other hosts; the leader collects the scores.

    The other hosts are the evaluation hosts if the job has any, else the rollout hosts.

    Attributes:
      step_in_flight: step of the evaluation under way; None if there is none.
    """

    def __init__(
        self,
        pod: Pod,
        shares: Shares | None,
        deadline_s: float,
        collect: Callable[[str, float], Sequence[Message]],
        done: Callable[[int], None],
        wait: Callable[[Future[Any]], None] = lambda work: None,
        *,
        keep: Keep = lambda step, means: None,
    ):
        """Starts without an evaluation.

        Args:
          pod: the job's processes.
          shares: the leader's LeaseServer or EvaluationShares; None on other trainer hosts.
          deadline_s: the longest wait for the leader, in seconds.
          collect: function (name, longest wait in seconds) -> each share's scores, in the order of the records.
          done: function called with the step of each complete evaluation.
          wait: function that waits for the future of `collect`, and raises if the scores can no longer come.
          keep: function that keeps an evaluation's means, as in podrl.learner.evaluate.Evaluator; called on the leader.
        """
        self._pod, self._shares, self._deadline_s = pod, shares, deadline_s
        self._collect, self._done, self._wait = collect, done, wait
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-scores")
        self._work: Future[Sequence[Message]] | None = None
        self.step_in_flight: int | None = None
        self._failed = False

    def begin(self, step: int) -> None:
        """Gives the evaluation after a step to the hosts in the job."""
        assert self.step_in_flight is None, "an evaluation begins only when the one before it has ended"
        self.step_in_flight = step
        if self._shares is not None:
            name = leases.evaluation(step)
            hosts = self._pod.seat.hosts.eval or self._pod.seat.hosts.heads
            self._shares.open_shares(name, max(len(hosts), 1), step)  # at least one share: hosts may join later
            self._work = self._thread.submit(self._collect, name, _LONGEST_S)

    def evaluated(self, *, wait: bool) -> tuple[int, dict[str, float], list[LogRecord]] | None:
        """Returns (step, eval/* metrics, a few samples) of the evaluation under way, if it is complete.

        Returns None if it is not complete, and on trainer hosts other than the leader. With `wait`, waits for the
        scores.

        Raises:
          BatchError: a reward function failed, or a service that it calls could not be reached; raised on every trainer
            host, and only with `wait`.
        """
        if (step := self.step_in_flight) is None:
            return None
        if self._work is None:  # hosts other than the leader collect nothing, but fail where the leader fails
            if wait:
                self.step_in_flight = None
                answer = self._pod.get(LEADER, evaluated(step), self._deadline_s)
                self._failed = "error" in answer.value
                codec.raise_failure([answer])
            return None
        if not wait and not (self._work.done() and self._work.exception() is None):
            return None
        work, self._work = self._work, None
        self._wait(work)
        messages = work.result()
        failed = [message for message in messages if "error" in message.value]
        if failed and not wait:  # the next call with `wait` raises the error, on all trainer hosts at once
            self._work = work
            return None
        self.step_in_flight, self._failed = None, bool(failed)
        self._done(step)
        assert self._shares is not None
        self._shares.forget([leases.evaluation(step)])
        self._pod.channel.put(evaluated(step), next(iter(failed), Message({})))
        codec.raise_failure(messages)
        samples = [sample for message in messages for sample in message.value["samples"]]
        names = dict.fromkeys(name for m in messages for name in m.arrays)  # a small set has records on some hosts only
        scores = {name: np.concatenate([m.arrays[name] for m in messages if name in m.arrays]) for name in names}
        self._keep(step, by_record(scores))
        return step, summarised(scores), samples[: len(messages[0].value["samples"])]

    def unsaved(self) -> bool:
        """True if the evaluation has failed, so that no checkpoint may be saved now.

        A run that resumed from this checkpoint would not make the evaluation; from an earlier checkpoint it makes it
        again.
        """
        return self._failed

    def close(self) -> None:
        """Stops collecting, without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def evaluated(step: int) -> str:
    """Returns the channel's key of the leader's message that an evaluation is complete, or why it has failed."""
    return f"evaluated/{step}"


def offer(pod: Pod, lease: Lease, result: Scored | BatchError) -> None:
    """Offers the leader the scores of a rollout host's share, or the error that says why there are none."""
    if isinstance(result, BatchError):
        pod.channel.put(lease.key("scores"), codec.failure(result))
    else:
        scores, samples = result
        pod.channel.put(lease.key("scores"), Message({"samples": codec.plain(samples)}, scores))
