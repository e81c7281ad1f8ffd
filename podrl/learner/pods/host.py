"""A rollout host of a pod: makes the prompts that it has leases of, and serves what it made to the trainers."""

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from podrl.cluster.replica import Head
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pools import Curriculum
from podrl.learner import experience as codec
from podrl.learner.evaluate import Evaluator
from podrl.learner.evaluations.hosts import evaluated, offer
from podrl.learner.loop import InFlight, Start
from podrl.learner.recorder import Stream
from podrl.rollout.partial import Partial, cut, of_message
from podrl.rollout.wall_host import WallHost
from podrl.rollout.windows import Key, Later, Windows
from podrl.rundir import leases
from podrl.rundir.accord import Accord
from podrl.rundir.leases import Lease, Task, Told
from podrl.rundir.run import Run
from podrl.runtime.channel import ChannelError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.watchdog import EXIT_PREEMPTED
from podrl.types import BatchError, Experience, Policy, Prompts

_LAST_WORDS_S = 300.0
_VERDICT_S = 30 * 86400.0  # trainers may wait for an evaluation before they save; their loss is noticed otherwise
_log = logging.getLogger("podrl.hosting")


class HostRollouts:
    """Runs on a rollout host: receives weights, makes and scores what it has leases of, serves it to the trainers.

    A lease may come late, of a batch that another host had begun and was lost with. The samples are then drawn again,
    under the versions that were to draw them, which the trainers still hold: they become the same.
    """

    def __init__(
        self,
        cluster: RLCluster,
        stream: Stream | None,
        run: Run,
        pod: Pod,
        accord: Accord,
        *,
        generate: Any,
        evaluator: Evaluator | None,
        deadline_s: float,
        windows: bool = False,
        wall: bool = False,
        curriculum: Curriculum | None = None,
        last: int | None = None,
    ):
        """Nothing runs yet.

        Args:
          cluster: the cluster with this host's part of the rollout mesh.
          stream: batches of prompts, whole; None where batches are given answers.
          run: signals and the watchdog; writes nothing.
          pod: the job's processes, all there.
          accord: this process's accord.
          generate: a Generate, a Generator for windows; None where `submit` is never called.
          evaluator: evaluator on the held-out prompts.
          deadline_s: the longest wait for any of the other processes.
          windows: batches are made in windows.
          wall: the leader gives single groups, and decides by the clock what batches hold.
          curriculum: the data's curriculum.
          last: the step after which hosts go; None for none.
        """
        self._curriculum, self._last = curriculum, last
        self._cluster, self._stream, self._run, self._pod, self._accord = cluster, stream, run, pod, accord
        self._generate, self._evaluator, self._deadline_s = generate, evaluator, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        self._made_in_windows, self._at = windows or wall, 0
        self._leases = Told(pod, deadline_s, changed=self._take_over)
        self._wall = None
        if wall:
            self._wall = WallHost(
                generate,
                self._thread,
                pod,
                self._leases,
                held=self._held,
                offer=self._offer,
                taking=run.tell_taking,
                deadline_s=deadline_s,
            )
        self._windows: Any = self._wall or Windows(generate, self._thread, run, done=self._done, held=self._held)
        self._lock, self._closed = threading.Lock(), False
        self._tasks: dict[str, Prompts | None] = {}  # begun here: of a batch, its prompts
        self._accepted: set[Lease] = set()
        self._batches: dict[Lease, Experience] = {}
        self._offered: list[tuple[int, str]] = []  # partial batches, with the step they were saved after
        self._evaluations: list[tuple[int, str]] = []  # offered and not dropped yet, with their step
        self._policy: Policy | None = None  # on the rollout mesh; of the thread
        self._replica = Head(pod, stops=run.stop) if pod.seat.hosts.replica > 1 else None
        if self._replica is not None and cluster.generates:
            cluster.rollout.tell = self._replica.tell
        pod.channel.serve("rows", self._rows)

    def enter(self) -> Mapping[str, Any]:
        """Asks the leader to be let in; returns the point at which this host begins."""
        return self._leases.enter()

    def resume(self, start: Start) -> Sequence[InFlight]:
        """Takes up what this host has leases of, of batches that a checkpoint holds in part.

        What a checkpoint holds whole, the trainers have.
        """
        if self._wall is not None:
            self._leases.follow()
            self._wall.follow()
            return []
        self._windows.played = start.step - 1
        batches: list[InFlight] = []
        for step, whole in enumerate(start.pending, start.step):
            if whole:
                batches.append(self._windows.whole(step, None))
            elif self._leases.task(leases.batch(step)) is None:
                raise ChannelError(
                    f"trainer 0 restored a part of the batch of step {step} and gave nobody leases of it: start the "
                    "same command again, and report this."
                )
            else:
                batches.append(self._begin(step, self._partial(step).prompts, start.step))
        self._leases.follow()
        return batches

    def agree(self, step: int) -> None:
        if self._pod.seat.disposable and self._run.stopping() and self._leases.leave():
            self._leave()
        self._at = step
        if self._pod.seat.disposable:
            self._leases.reached(step)
        self._accord.agree(step)
        if self._replica is not None:
            self._replica.tell("step", (step, self._run.profiler.wanted))
        if self._curriculum is not None and self._accord.results is not None:
            self._curriculum.hear(self._accord.results)
        self._leases.take(self._accord.tasks)
        taken = self._accord.taken
        if self._wall is not None:
            self._wall.agreed(self._accord.results, taken)
        _drop_before(taken, self._offered, self._pod)
        _drop_before(step, self._evaluations, self._pod)  # the leader has read it: its word came after
        with self._lock:
            done = [name for name in self._tasks if leases.is_over(name, taken)]
            for name in done:
                del self._tasks[name]
            self._accepted = {lease for lease in self._accepted if lease.task not in done}
        self._leases.forget(name for name in self._leases.names() if leases.is_over(name, taken))
        for lease in [each for each in self._batches if leases.step_of(each.task) < taken]:
            del self._batches[lease]
            self._pod.channel.drop(lease.key("header"))
            self._pod.channel.drop(lease.key("texts"))

    def _leave(self) -> None:
        """Ends this process, which was asked to stop, and those of its replica; the others make what it has begun."""
        if self._replica is not None:
            self._replica.tell("leave", ())
        self._pod.quit("it was asked to stop, and the job goes on without it", EXIT_PREEMPTED)
        self._pod.await_end(_LAST_WORDS_S)

    def publish(self, step: int) -> Policy:
        self.agree(step)
        policy = self.move(step, in_place=True)
        self._windows.publish(policy)
        return policy

    def move(self, step: int, *, in_place: bool) -> Policy:
        with self._run.watchdog.stage("publish"):
            # Not on the thread, which may have to make what a lost host has not given to every trainer yet: without
            # that the trainers cannot make these weights.
            self._cluster.weights.await_version(step)
        if self._wall is not None:
            self._wall.end_window()
        # After every batch in flight, so that one thread at a time enqueues on the rollout mesh.
        with self._run.watchdog.stage("publish"):
            return self._thread.submit(self._move, step, in_place).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        if self._wall is not None:
            return _Offered(self, step, ())  # the leader reads the prompts, and gives them
        try:
            prompts = self.next_batch()
        except BatchError as error:
            for lease in self._leases.mine(leases.batch(step)):
                self._offer(lease, error)
            self._pod.await_end(_VERDICT_S)  # the trainers save first, then end the job
            raise
        return self._begin(step, prompts, policy.version)

    def next_batch(self) -> Any:
        return None if self._stream is None else next(self._stream)

    def evaluate(self, policy: Policy, step: int) -> None:
        """Sends the evaluation of the held-out prompts that this host has leases of to the leader.

        The last one it stays for until the leader has all of it: a host may be lost that has not made its share.
        """
        name = leases.evaluation(step)
        self._leases.await_task(name)
        try:
            for lease in self._accept(name, None):
                self._thread.submit(self._score, lease, policy).result()
        except BatchError:
            self._pod.await_end(_VERDICT_S)  # the trainers save first, then end the job
            raise
        if step == self._last:
            self._pod.get(LEADER, evaluated(step), self._deadline_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._windows.closing()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._windows.close()
        if self._replica is not None:
            self._replica.tell("end", (self._at,))

    # Leases.

    def _accept(self, name: str, prompts: Prompts | None) -> list[Lease]:
        """Begins a task; returns the leases that this host has of it. Later ones come to `_take_over`."""
        with self._lock:
            self._tasks[name] = prompts
            mine = self._leases.mine(name)
            self._accepted.update(mine)
            return mine

    def _begin(self, step: int, prompts: Prompts, version: int) -> InFlight:
        name = leases.batch(step)
        mine = self._accept(name, prompts)
        made = []
        for lease in mine:
            if self._task(lease).since < version:  # begun by a host that was lost before this one came
                self._thread.submit(self._make_again, lease, prompts)
            else:
                made.append(self._make(lease, prompts))
        return _Offered(self, step, made)

    def _make(self, lease: Lease, prompts: Prompts) -> InFlight:
        task, step = self._task(lease), leases.step_of(lease.task)
        if not self._made_in_windows:
            produced = self._thread.submit(self._produce, lease, prompts, task.since)
            return Later(produced, self._run, "rollout")
        share, partial = self._share(lease, task, prompts)
        return self._windows.submit(share, step, task.quantum, partial, first=lease.first)

    def _take_over(self, name: str) -> None:
        """Makes what another host was to make; what this one has not begun itself it makes when it does."""
        if self._wall is not None and leases.is_batch(name):
            self._wall.told(name)
            return
        with self._lock:
            if name not in self._tasks or self._closed:
                return
            prompts, news = self._tasks[name], [x for x in self._leases.mine(name) if x not in self._accepted]
            self._accepted.update(news)
            if news:
                self._run.tell_taking()
            for lease in news:
                _log.warning("%s takes over prompts %d-%d of %s.", self._pod.name, lease.first, lease.last - 1, name)
                if self._wall is not None:
                    self._wall.aside(functools.partial(self._make_again, lease, prompts))
                else:
                    self._thread.submit(self._make_again, lease, prompts)

    def _make_again(self, lease: Lease, prompts: Prompts | None) -> None:
        """Makes, on the thread, what another host was to make, under the versions that it was to be drawn by."""
        task, step = self._task(lease), leases.step_of(lease.task)
        try:
            if prompts is None:
                self._score(lease, Policy({}, step))
            elif not self._made_in_windows:
                self._produce(lease, prompts, task.since)
            else:
                share, partial = self._share(lease, task, prompts)
                making = self._generate.begin(share, step, task.quantum, partial)
                begun: Callable[[int, Any], None] = lambda version, so_far: self._keep(lease, version, so_far)  # noqa: E731
                self._windows.catch_up(making, (step, lease.first), since=task.since, begun=begun)
        except BatchError as error:
            if prompts is not None:
                self._offer(lease, error)
        except BaseException as error:
            _log.exception("%s could not take over %s", self._pod.name, lease)
            self._pod.quit(f"prompts {lease.first}-{lease.last - 1} of {lease.task} could not be taken over: {error}")
            raise

    def _task(self, lease: Lease) -> Task:
        task = self._leases.task(lease.task)
        assert task is not None, lease
        return task

    def _share(self, lease: Lease, task: Task, prompts: Prompts) -> tuple[Prompts, Partial | None]:
        """Returns a lease's prompts, and what a checkpoint holds of them."""
        share = codec.take_prompts(prompts, np.arange(lease.first, lease.last))
        if not task.partial:
            return share, None
        return share, cut(self._partial(leases.step_of(lease.task)), share, lease.first)

    def _partial(self, step: int) -> Partial:
        """Returns what a checkpoint holds of a batch."""
        return of_message(self._pod.get(LEADER, f"partial/{step}", self._deadline_s))

    # On the thread.

    def _move(self, step: int, in_place: bool) -> Policy:
        if self._replica is not None:
            self._replica.tell("move", (step, in_place))
        self._policy = self._cluster.sync_weights(step, in_place=in_place)
        return self._policy

    def _held(self, policy: Policy) -> Policy:
        """Returns the policy of this version, moved again if another is in its place."""
        if self._policy is None or self._policy.version != policy.version:
            return self._move(policy.version, True)
        return self._policy

    def _produce(self, lease: Lease, prompts: Prompts, version: int) -> None:
        generate, step = self._generate, leases.step_of(lease.task)
        assert generate is not None, "given answers are not generated"
        share = codec.take_prompts(prompts, np.arange(lease.first, lease.last))
        try:
            experience = generate(share, self._held(Policy({}, version)), step)
        except BatchError as error:
            self._offer(lease, error)
            raise
        self._offer(lease, experience)

    def _score(self, lease: Lease, policy: Policy) -> None:
        """Evaluates a share of the held-out prompts; more hosts than problems leave some without."""
        assert self._evaluator is not None
        part = (lease.first, self._task(lease).leases[-1].last)
        try:
            made = self._evaluator.scores(self._held(policy), leases.step_of(lease.task), part)
        except BatchError as error:
            offer(self._pod, lease, error)
            raise
        offer(self._pod, lease, made)
        self._evaluations.append((leases.step_of(lease.task), lease.key("scores")))

    # What others ask for.

    def _done(self, key: Key, made: Any) -> None:
        """Serves a part that was made in windows."""
        step, first = key
        for lease in self._leases.mine(leases.batch(step)):
            if lease.first == first:
                self._offer(lease, made)

    def _offer(self, lease: Lease, made: Any) -> None:
        """Serves part of a batch to the trainers, or tells them why there is none."""
        if isinstance(made, BatchError):
            self._pod.channel.put(lease.key("header"), codec.failure(made))
        elif isinstance(made, Experience):
            self._batches[lease] = made
            self._pod.channel.put(lease.key("texts"), codec.texts(made))
            self._pod.channel.put(lease.key("header"), codec.header(made))

    def keep_partial(self, step: int) -> None:
        """Serves what there is of this host's part of a batch to the leader, who saves it; waits for nothing."""
        if self._wall is not None and not any(at == self._at for at, _ in self._offered):
            name, message = self._wall.parts(self._at)
            self._offered.append((self._at, name))
            self._pod.channel.put(name, message)
        if self._wall is not None or not self._made_in_windows:
            return
        for lease in self._leases.mine(leases.batch(step)):
            if (step, lease.first) in self._windows.open(step):
                self._offer_partial(lease, self._at, self._windows.state((step, lease.first)))

    def _keep(self, lease: Lease, version: int, making: Any) -> None:
        """Serves, on the thread, what there was of a part when a window began that a checkpoint may be made in."""
        if version >= self._at - 1:
            self._offer_partial(lease, version, making.partial(()))

    def _offer_partial(self, lease: Lease, at: int, partial: Partial) -> None:
        name = lease.key(f"partial@{at}")
        self._offered.append((at, name))
        self._pod.channel.put(name, partial.message())

    def share_result(self, made: Sequence[InFlight]) -> None:
        """Waits for parts of a batch that this host makes, after it has begun the window of the newest policy."""
        if self._made_in_windows:
            self._windows.begin()
        try:
            for part in made:
                part.result()
        except BatchError:
            self._pod.await_end(_VERDICT_S)  # the trainers save first, then end the job
            raise

    def _rows(self, message: Message) -> Message:
        """Answers, on the channel's thread, a request for rows of some samples of a part."""
        names, (first, last) = message.value["names"], message.value["part"]
        lease = Lease(message.value["task"], int(first), int(last), self._pod.seat.process)
        if lease not in self._batches:  # lost with the process that this one is in the place of
            return Message({"gone": True})
        if not set(names) <= set(codec.ALL_ROWS):
            raise ValueError(f"{names} are not all rows of a batch: {codec.ALL_ROWS} are")
        return codec.rows(self._batches[lease], message.arrays["chosen"], names)


class _Offered:
    """A batch that this host makes a part of and other hosts train on."""

    def __init__(self, host: HostRollouts, step: int, made: Sequence[InFlight]):
        self._host, self._step, self._made = host, step, made

    def result(self) -> None:
        self._host.share_result(self._made)

    def complete(self) -> None:
        """Serves what a checkpoint must hold of a batch that is not whole yet; waits for nothing."""
        self._host.keep_partial(self._step)


def _drop_before(step: int, offered: list[tuple[int, str]], pod: Pod) -> None:
    """Stops offering what belongs to earlier steps."""
    for old in [each for each in offered if each[0] < step]:
        offered.remove(old)
        pod.channel.drop(old[1])
