"""A trainer host of a pod: follows the batches that rollout hosts make, and fetches the rows that it trains on."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner import experience as codec
from podrl.learner.evaluations.eval_hosts import EvaluationShares
from podrl.learner.evaluations.hosts import RemoteEvaluations
from podrl.learner.loop import InFlight, Start
from podrl.learner.pods.dispatch import Dispatcher
from podrl.learner.recorder import ResumableStream
from podrl.mappings import LogRecord
from podrl.rollout.batches import ready
from podrl.rollout.clock import ONE_WINDOW, TokenClock, WallClock
from podrl.rollout.group_player import longest_of
from podrl.rollout.partial import PartialBatch
from podrl.rundir import leases
from podrl.rundir.leases import Lease, LeaseClient, LeaseServer
from podrl.rundir.run import Run
from podrl.rundir.step_barrier import StepBarrier
from podrl.rundir.summary import keep_evaluation
from podrl.runtime.message import Message
from podrl.runtime.pod import MovedError, Pod
from podrl.types import Experience, Policy

_ASKING = 256  # largest number of hosts from which data are fetched at the same time
_AGAIN_S = 0.05  # pause after a lease has moved, so that the news of its new host can arrive


class RemoteRollouts:
    """Runs on a trainer host: receives batches from the rollout hosts, and publishes weights to them.

    Every trainer host runs the same steps in the same order. The leader also tells every joining process at which step
    it begins, and collects the scores of evaluations.
    """

    def __init__(
        self,
        cluster: RLCluster,
        stream: ResumableStream,
        run: Run,
        pod: Pod,
        barrier: StepBarrier,
        *,
        needed: Callable[[int, Experience], np.ndarray] | None,
        deadline_s: float,
        clock: TokenClock | WallClock | None = ONE_WINDOW,
        rows: Sequence[str] = codec.NEEDED_ROWS,
        begun: Callable[[int], Iterable[int]] = lambda step: (),
        prompts: int = 0,
        whole: bool = False,
        group_size: int = 0,
    ):
        """Stores the collaborators, and makes the dispatcher on the leader.

        Args:
          cluster: the cluster with this host's part of the trainer's mesh.
          stream: the data; the leader reads prompts from it, and every trainer host reads answers from it (SFT, DPO).
          run: the watchdog, the trace and the run directory.
          pod: the job's processes, all connected.
          barrier: agreement of all processes to continue or stop after the same step.
          needed: function (step, batch) -> samples whose rows this host's devices train on; None if `submit` is never
            called.
          deadline_s: the longest wait for a rollout host, in seconds.
          clock: the leader's clock, which decides when weights change inside samples and which groups make a batch;
            None on other hosts with `rollout.clock='wall'`.
          rows: names of the per-token arrays that training reads.
          begun: function (steps done) -> steps whose batches may be under way then.
          prompts: number of prompts per batch; 0 if batches are answers from data.
          whole: True cuts a batch into as many shares as the configuration has rollout hosts, whichever hosts make
            them, because the samples of a prompt may depend on the other prompts of its share.
          group_size: number of samples per prompt.
        """
        self._cluster, self._stream, self._run, self._pod, self._barrier = cluster, stream, run, pod, barrier
        self._needed, self._clock, self._deadline_s = needed, clock or ONE_WINDOW, deadline_s
        self._begun = begun if prompts else lambda step: ()
        self._rows, self._apart = rows, bool(pod.seat.hosts.eval)
        self._lease_server = LeaseServer(pod, deadline_s, ending=barrier.ending) if pod.leads else None
        self._leases: Any = self._lease_server or LeaseClient(pod, deadline_s)
        self._dispatcher = None
        if self._lease_server is not None and clock is not None and prompts:
            self._dispatcher = Dispatcher(
                pod,
                self._lease_server,
                clock,
                size=prompts,
                group_size=group_size,
                shares=max(len(pod.seat.hosts.heads), 1) if whole else 0,  # at least 1, as hosts may join later
                deadline_s=deadline_s,
                read=self.next_batch,
            )
        note_evaluated = lambda step: self._start.evaluated.add(step)  # noqa: E731 - for hosts that join later
        self._eval_host_shares = (
            EvaluationShares(pod, deadline_s, barrier.ending) if pod.leads and self._apart else None
        )
        scores: Any = (self._lease_server, deadline_s, self._scores, note_evaluated)
        if (shares := self._eval_host_shares) is not None:
            scores = (shares, deadline_s, shares.collect, note_evaluated, shares.wait)
        keep = functools.partial(keep_evaluation, run.workdir) if run.workdir is not None else lambda step, means: None
        self._evaluations = RemoteEvaluations(pod, *scores, keep=keep)
        self._counted_reassigned = 0  # number of taken-over leases and groups that metrics have reported so far
        self._at = 0  # the step agreed on last
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="podrl-gather")
        self._start = Start(0, b"", (), set())

    def resume(self, start: Start) -> Sequence[InFlight]:
        self._start = start
        if self._lease_server is not None:
            if self._dispatcher is not None:
                partial = [batch for batch in start.pending if isinstance(batch, PartialBatch)]
                self._dispatcher.resume(start.step, partial, len(start.pending) - len(partial))
            self._lease_server.serve(start.step, self._begins(start.step))
        else:  # only the leader has metrics.jsonl, and all trainer hosts must evaluate after the same steps
            with self._run.watchdog.stage("waiting for trainer 0 to restore"):
                answer = self._leases.enter()
            start.evaluated.clear()
            start.evaluated.update(answer["evaluated"])
            self._leases.follow()
        batches: list[InFlight] = []
        for step, batch in enumerate(start.pending, start.step):
            if isinstance(batch, PartialBatch):
                self._clock.restore(start.step, batch.longest)
                batches.append(RemoteBatch(self, step, whole=self._pod.leads))
            else:
                self._clock.saw(step, longest_of(batch))
                batches.append(ready(batch))
        return batches

    def agree(self, step: int) -> None:
        self._at = step
        orders = None
        if self._lease_server is not None and step > self._start.step:
            with self._run.watchdog.stage("rollout"):
                self._lease_server.advance(step, self._begins(step), wait=self._pod.seat.disposable)
        if self._dispatcher is not None:
            orders = self._dispatcher.advance(step, max(self._begun(step), default=step - 1) + 1)
        self._barrier.agree(step, orders)
        needed_step = self._barrier.needed_step
        self._leases.forget(name for name in self._leases.names() if leases.is_over(name, needed_step))

    def publish(self, step: int) -> Policy:
        self.agree(step)
        return self.move(step, in_place=True)

    def move(self, step: int, *, in_place: bool) -> Policy:
        with self._run.watchdog.stage("publish"):
            return self._cluster.sync_weights(step, in_place=in_place)

    def submit(self, policy: Policy, step: int) -> InFlight:
        return RemoteBatch(self, step, whole=self._pod.leads)

    def next_batch(self) -> Any:
        with self._run.watchdog.stage("data"):
            return next(self._stream)

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]] | None:
        """Makes other hosts evaluate, and joins their scores on the leader; raises the errors of `evaluated`."""
        self.begin_evaluation(policy, step)
        result = self.evaluated(wait=True)
        return result and result[1:]

    def begin_evaluation(self, policy: Policy, step: int) -> None:
        """Begins an evaluation on the rollout hosts, which have the weights, or on evaluation hosts that pull them."""
        del policy
        if self._apart:
            self._cluster.weights.hold(step)
        self._evaluations.begin(step)

    def evaluated(self, *, wait: bool) -> tuple[int, dict[str, float], list[LogRecord]] | None:
        """Returns the evaluation that was begun, like podrl.learner.evaluations.hosts.RemoteEvaluations.evaluated."""
        return self._evaluations.evaluated(wait=wait)

    def unsaved(self) -> bool:
        """True if the newest evaluation has failed, so that no checkpoint may be saved now; see RemoteEvaluations."""
        return self._evaluations.unsaved()

    def _scores(self, name: str, deadline_s: float) -> list[Message]:
        return self._collect(name, lambda parts: self._from_each(parts, self._fetch_kind("scores", deadline_s)))

    def gather(self, step: int, *, everything: bool = False) -> Experience:
        """Collects the batch of a step from all rollout hosts.

        Args:
          step: step that trains on the batch.
          everything: True fetches all rows and texts, False only the rows and texts that this host needs.

        Raises:
          BatchError: a reward function or too many samples failed on a rollout host, or a service that a reward
            function calls could not be reached.
          ChannelError: a rollout host did not answer within the deadline.
        """
        assert self._needed is not None
        name = leases.batch(step)
        with self._run.watchdog.stage("rollout"):
            if self._dispatcher is not None:
                self._dispatcher.decide(step)
            experience = self._collect(name, lambda parts: self._gather(step, parts, everything))
        if self._lease_server is not None:
            reassigned = self._lease_server.reassigned - self._counted_reassigned
            self._counted_reassigned += reassigned
            counts = {"pod/hosts": float(self._lease_server.hosts), "pod/taken_over": float(reassigned)}
            counts |= {} if self._dispatcher is None else self._dispatcher.counts(step)
            experience = dataclasses.replace(experience, counts={**experience.counts, **counts})
            if len(self._pod.seat.hosts.trainer) == 1:
                self._lease_server.forget([name])  # no other trainer host will ask for the batch
        self._clock.saw(step, longest_of(experience))
        return experience

    def _gather(self, step: int, parts: Sequence[Lease], everything: bool) -> Experience:
        assert self._needed is not None
        texts = everything or self._pod.leads
        headers = self._from_each(parts, self._fetch_kind("whole" if texts else "header"))
        codec.raise_failure(headers)
        names = codec.ALL_ROWS if everything else self._rows
        experience = codec.assemble(headers, self._cluster.tokenizer.pad_id, names)
        counts = [len(message.arrays["length_B"]) for message in headers]
        every = np.arange(sum(counts))
        pieces = not everything and bool(experience.rollouts.piece_BT.any())
        if pieces:  # which pieces lie in one row depends on the tokens of all pieces
            self._fetch_rows(experience, parts, counts, every, ["tokens_BT"])
            names = [name for name in names if name != "tokens_BT"]
        wanted = every if everything else self._needed(step, experience)
        self._fetch_rows(experience, parts, counts, wanted, names)
        codec.fill_prompts(experience, every if pieces else wanted)
        return codec.with_texts(experience, headers) if texts else experience

    def traces(self, step: int) -> bool:
        """True if this host writes a trace of the batch that step `step` trains on."""
        traced = self._run.traced
        return self._pod.leads and traced is not None and traced.wants(step + 1)

    def drawn(self, step: int) -> PartialBatch | None:
        """Collects the state of an unfinished batch at the start of a window; on the leader only.

        Returns:
          The state. None if this host is not the leader, or if the batch will be whole without further weights: it is
          not made in windows, or this window is its last one.
        """
        if self._dispatcher is None or not (self._clock.mode == "wall" or (self._clock.used and step > self._at)):
            return None
        return dataclasses.replace(self._dispatcher.state(step, self._at), longest=self._clock.state(self._at))

    def close(self) -> None:
        self._evaluations.close()
        if self._eval_host_shares is not None:
            self._eval_host_shares.close(self._at)
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _fetch_rows(
        self,
        experience: Experience,
        parts: Sequence[Lease],
        counts: list[int],
        wanted: np.ndarray,
        names: Sequence[str],
    ) -> None:
        starts = dict(zip(parts, np.cumsum([0, *counts[:-1]]), strict=True))
        ends = dict(zip(parts, np.cumsum(counts), strict=True))

        def fetch(lease: Lease) -> tuple[np.ndarray, Message] | None:
            mine = wanted[(wanted >= starts[lease]) & (wanted < ends[lease])]
            if not len(mine):
                return None
            value = {"task": lease.task, "part": [lease.first, lease.last], "names": list(names)}
            request, moved = Message(value, {"chosen": mine - starts[lease]}), self._moved(lease)
            found = self._pod.call(lease.host, "rows", request, self._deadline_s, moved=moved)
            if found.value is not None:  # a new process has taken the host's place, so the rows are lost
                raise MovedError(lease.task)
            return mine, found

        for fetched in self._from_each(parts, fetch):
            if fetched is not None:
                codec.fill_rows(experience, *fetched)

    def _collect(self, task: str, ask: Callable[[list[Lease]], Any]) -> Any:
        """Calls `ask` with a task's leases; starts again when one of the leases moves to another host."""
        while True:
            parts = self._leases.await_leases(task)
            try:
                return ask(parts)
            except MovedError:
                time.sleep(_AGAIN_S)

    def _fetch_kind(self, kind: str, deadline_s: float | None = None) -> Callable[[Lease], Message]:
        wait_s = deadline_s or self._deadline_s
        return lambda lease: self._pod.get(lease.host, lease.key(kind), wait_s, moved=self._moved(lease))

    def _moved(self, lease: Lease) -> Callable[[], bool]:
        return lambda: not self._leases.holds(lease)

    def _from_each(self, parts: Sequence[Lease], ask: Callable[[Lease], Any]) -> list[Any]:
        return list(self._asking.map(ask, parts))

    def _begins(self, step: int) -> Callable[[], dict[str, Any]]:
        """Returns a function that makes the answer to a process that joins the job at a step."""
        return lambda: {"step": step, "evaluated": sorted(self._start.evaluated)}


class RemoteBatch:
    """A batch that the rollout hosts are making."""

    def __init__(self, rollouts: RemoteRollouts, step: int, *, whole: bool):
        """Stores the batch's step; `whole` is True if this host's copy goes into checkpoints."""
        self._rollouts, self._step, self._whole = rollouts, step, whole
        self._experience: Experience | None = None
        self._complete = False

    def result(self) -> Experience:
        """Waits for the batch and returns it with this host's rows, or with all rows if this host writes its trace."""
        if self._experience is None:
            self._complete = self._rollouts.traces(self._step)
            self._experience = self._rollouts.gather(self._step, everything=self._complete)
        return self._experience

    def complete(self) -> Experience | PartialBatch:
        """Returns the content of a checkpoint: on the leader the batch with all rows and texts.

        The call does not wait for an unfinished batch that is made in windows; it returns the batch's state as a
        PartialBatch. Other hosts' copies are not written, so other hosts only call `result`.
        """
        if not self._whole:
            return self.result()
        if self._experience is None and (partial := self._rollouts.drawn(self._step)) is not None:
            return partial
        if self._experience is None or not self._complete:
            self._experience = self._rollouts.gather(self._step, everything=True)
            self._complete = True
        return self._experience
