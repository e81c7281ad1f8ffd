"""Chooses the source of this process's batches: the process itself, or in a pod the source for its role."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from podrl.cluster.engines import able
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pools import Curriculum
from podrl.learner import experience as codec
from podrl.learner.evaluate import Evaluator
from podrl.learner.evaluations.eval_hosts import EvaluationHost
from podrl.learner.loop import Schedule
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.learner.recorder import ResumableStream
from podrl.learner.rollouts import Generate, LocalRollouts
from podrl.mappings import Span
from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.journal import WallJournal
from podrl.rundir.run import Run
from podrl.rundir.step_barrier import StepBarrier
from podrl.rundir.summary import keep_evaluation
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod


@dataclasses.dataclass(frozen=True)
class Workload:
    """The samples and evaluations of a job, and how they are made.

    Attributes:
      generate: function that makes experience from prompts; None if this process does not generate.
      evaluator: scores the policy on (this process's share of) held-out prompts; None disables evaluation.
      prompts: number of prompts per generated batch, without prompts in reserve for dynamic sampling; 0 if batches are
        answers from data.
      group_size: number of samples per prompt, including a greedy sample that is drawn with the others.
      replaced: number of samples that are left out of the loss for each group that dynamic sampling replaces; 0 without
        dynamic sampling.
      whole: True if a share of a batch must be made by one host as a whole, because reward functions or dynamic
        sampling compare the prompts of a share.
      curriculum: chooses the prompts by their past rewards; None without a curriculum.
    """

    generate: Generate | None
    evaluator: Any
    prompts: int = 0
    group_size: int = 0
    replaced: int = 0
    whole: bool = False
    curriculum: Curriculum | None = None


def rollout_source(
    cluster: RLCluster,
    stream: ResumableStream | None,
    run: Run,
    schedule: Schedule,
    workload: Workload,
    trained: Any,
    pod: Pod | None,
    *,
    offline: bool,
) -> tuple[Any, Callable[[], bool]]:
    """Makes the source of this process's batches.

    Args:
      cluster: the models on their meshes.
      stream: the data; None on hosts that read none.
      run: run directory, signals and the watchdog.
      schedule: steps at which the loop saves, evaluates and stops, and the staleness.
      workload: the samples and evaluations of the job.
      trained: the algorithm on a trainer host; None on a rollout host.
      pod: the job's processes; None for a job of one process.
      offline: True if batches are answers from data (SFT, DPO), so that no batch is generated.

    Returns:
      The source, and a function that returns True once the run was asked to stop.
    """
    deadline_s = 4 * run.log_config.stall_s
    clock = _clock(cluster, schedule, run, pod, replaced=workload.replaced, offline=offline)
    if pod is None:
        assert stream is not None and clock is not None
        if isinstance(workload.evaluator, Evaluator) and run.leads and run.workdir is not None:
            workload.evaluator.keep = functools.partial(keep_evaluation, run.workdir)
        source: Any = LocalRollouts(
            cluster,
            stream,
            run,
            generate=workload.generate,
            evaluator=workload.evaluator,
            clock=clock,
            prompts=workload.prompts,
        )
        return source, run.stopping
    share_spans(pod, run)
    barrier = StepBarrier(pod, run, deadline_s)
    if trained is not None:
        assert stream is not None
        rows = codec.AGED_ROWS if schedule.max_staleness > 1 else codec.NEEDED_ROWS
        source = RemoteRollouts(
            cluster,
            stream,
            run,
            pod,
            barrier,
            needed=trained.needed,
            deadline_s=deadline_s,
            clock=clock,
            rows=rows,
            begun=schedule.begun,
            prompts=workload.prompts,
            whole=workload.whole,
            group_size=workload.group_size,
        )
    else:
        source = HostRollouts(
            cluster,
            run,
            pod,
            barrier,
            generate=workload.generate,
            evaluator=workload.evaluator,
            deadline_s=deadline_s,
            mode="wall" if clock is None else clock.mode,
            last=schedule.max_steps,
        )
    return source, barrier.stopping


def _clock(
    cluster: RLCluster, schedule: Schedule, run: Run, pod: Pod | None, *, replaced: int = 0, offline: bool
) -> TokenClock | WallClock | None:
    """Makes the clock that `rollout.clock` names; None if another process, the leader, has the `WallClock`.

    Raises:
      ValueError: `rollout.clock` is 'wall', and there is no run directory for the journal.
    """
    if offline or cluster.config.rollout().clock == "tokens":
        windows = able(cluster.config.rollout_engine, "windows")
        return TokenClock(cluster.config.rollout(), staleness=schedule.max_staleness if windows else 1)
    if run.workdir is None and (pod is None or pod.leads):
        raise ValueError("rollout.clock='wall' keeps a journal: give --workdir, or set rollout.clock='tokens'.")
    if pod is not None and not pod.leads:
        return None
    assert run.workdir is not None
    journal = WallJournal(run.workdir, run.hurry)
    return WallClock(journal, schedule.max_staleness, str(run.place), replaced=replaced)


def evaluate_alone(cluster: RLCluster, evaluator: Any, run: Run, pod: Pod) -> int:
    """Runs an evaluation host, which makes no batches; returns the step that the job reached."""
    share_spans(pod, run)
    with run.spans.compiles():
        return EvaluationHost(cluster, evaluator, run, pod, 4 * run.log_config.stall_s).work()


def share_spans(pod: Pod, run: Run) -> None:
    """Sends every process's spans to the leader of a pod, which writes them; no process waits for an answer."""
    run.spans.host = pod.name

    def received(message: Message) -> Message:
        if run.tracing is not None:
            run.tracing.add_spans(message.value)
        return Message()

    def send(spans: list[Span]) -> None:
        pod.channel.request(pod.address(LEADER), "call", "spans", Message(spans))

    if pod.leads:
        pod.channel.serve("spans", received)
    elif run.log_config.trace != "off":
        run.spans.send = send
