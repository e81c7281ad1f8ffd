"""Chooses the source of this process's batches: itself, or by its role in a pod."""

from collections.abc import Callable, Mapping
from typing import Any

from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pools import Curriculum
from podrl.learner import experience as codec
from podrl.learner.evaluations.eval_hosts import EvaluationHost
from podrl.learner.loop import Schedule
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.learner.recorder import Stream
from podrl.learner.rollouts import Generate, LocalRollouts
from podrl.rollout.clock import TokenClock, WallClock
from podrl.rollout.journal import WallJournal
from podrl.rundir.accord import Accord
from podrl.rundir.run import Run
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod


def place_of(
    cluster: RLCluster,
    stream: Stream | None,
    run: Run,
    schedule: Schedule,
    trained: Any,
    generate: Generate | None,
    evaluator: Any,
    pod: Pod | None,
    given: bool,
    shared: Mapping[str, Any],
    curriculum: Curriculum | None = None,
) -> tuple[Any, Callable[[], bool]]:
    """Makes the source of this process's batches; returns it, and what says that the run was asked to stop.

    Arguments as of `fit`; `shared` says how hosts share a batch.
    """
    deadline_s = 4 * run.log_config.stall_s
    clock = _clock(cluster, schedule, run, pod, given=given)
    makes: Any = {"generate": generate, "evaluator": evaluator}
    if pod is None:
        assert stream is not None and clock is not None
        place: Any = LocalRollouts(cluster, stream, run, clock=clock, **makes)
        return place, run.stopping
    share_spans(pod, run)
    accord = Accord(pod, run, deadline_s)
    if trained is not None:
        assert stream is not None
        rows = codec.AGED_ROWS if schedule.max_staleness > 1 else codec.NEEDED_ROWS
        place = RemoteRollouts(
            cluster,
            stream,
            run,
            pod,
            accord,
            needed=trained.needed,
            deadline_s=deadline_s,
            clock=clock,
            rows=rows,
            begun=schedule.begun,
            curriculum=curriculum,
            **shared,
        )
    else:
        host: Any = makes | {"deadline_s": deadline_s, "curriculum": curriculum, "last": schedule.max_steps}
        host |= {"windows": isinstance(clock, TokenClock) and clock.used, "wall": not isinstance(clock, TokenClock)}
        place = HostRollouts(cluster, stream, run, pod, accord, **host)
    return place, accord.stopping


def _clock(
    cluster: RLCluster, schedule: Schedule, run: Run, pod: Pod | None, *, given: bool
) -> TokenClock | WallClock | None:
    """Makes the clock of rollout.clock; None where it is the wall clock and another process keeps it.

    Raises:
      ValueError: a run by the wall clock cannot be here.
    """
    own = isinstance(cluster.config.rollout_engine, str)  # another engine makes whole batches
    if given or cluster.config.rollout().clock == "tokens":
        return TokenClock(cluster.config.rollout(), staleness=schedule.max_staleness if own else 1)
    if pod is not None and pod.seat.hosts.replica > 1:
        raise ValueError(
            "rollout.clock='wall' needs a whole copy of the weights on each rollout host, and here "
            f"{pod.seat.hosts.replica} hold one together: give roles.rollout.mesh as many copies as hosts, or set "
            "rollout.clock='tokens'."
        )
    if run.workdir is None and (pod is None or pod.leads):
        raise ValueError("rollout.clock='wall' keeps a journal: give --workdir, or set rollout.clock='tokens'.")
    if not own:
        raise ValueError("rollout.clock='wall' needs podrl's own engine: set rollout.clock='tokens' for another.")
    if pod is not None and not pod.leads:
        return None
    assert run.workdir is not None
    return WallClock(WallJournal(run.workdir, run.hurry), schedule.max_staleness, str(run.place))


def evaluate_alone(cluster: RLCluster, evaluator: Any, run: Run, pod: Pod) -> int:
    """Runs an evaluation host, which makes no batches; returns the step that the job reached."""
    share_spans(pod, run)
    with run.spans.compiles():
        return EvaluationHost(cluster, evaluator, run, pod, 4 * run.log_config.stall_s).work()


def share_spans(pod: Pod, run: Run) -> None:
    """Has the spans of a pod's processes sent to the leader, which writes them; nobody waits for that."""
    run.spans.host = pod.name

    def received(message: Message) -> Message:
        if run.tracing is not None:
            run.tracing.add_spans(message.value)
        return Message()

    def send(spans: list[dict[str, Any]]) -> None:
        pod.channel.request(pod.address(LEADER), "call", "spans", Message(spans))

    if pod.leads:
        pod.channel.serve("spans", received)
    elif run.log_config.trace != "off":
        run.spans.send = send
