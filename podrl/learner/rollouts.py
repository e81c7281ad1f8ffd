"""Sources of the loop's batches: this process, other hosts, this host's share of a pod's, or given answers."""

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner import experience as codec
from podrl.learner.evaluate import Evaluator, summarised
from podrl.learner.loop import InFlight, Start
from podrl.learner.recorder import Evaluate, Stream
from podrl.rewards.compose import RewardServiceError
from podrl.rundir.run import Run
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.service import ServiceError
from podrl.types import BatchError, Experience, Policy, Prompts

_LAST_WORDS_S = 300.0

# (prompts, policy, step) -> samples and rewards: podrl.learner.generation.Generator.
Generate = Callable[[Prompts, Policy, int], Experience]


class Ready:
    """A batch that needs no waiting: restored from a checkpoint, or read from data."""

    def __init__(self, value: Any):
        self._value = value

    def result(self) -> Any:
        return self._value

    complete = result


class Later:
    """A batch that another thread is making; the watchdog sees a wait for it under a name."""

    def __init__(self, future: concurrent.futures.Future, run: Run, stage: str):
        self._future, self._run, self._stage = future, run, stage

    def result(self) -> Any:
        with self._run.watchdog.stage(self._stage):
            return self._future.result()

    complete = result


class Place(Protocol):
    """Base of the classes here that generate; GivenAnswers wraps one. `publish` is `agree`, then `move`."""

    def resume(self, start: Start) -> Sequence[InFlight]: ...

    def agree(self, step: int) -> None:
        """Makes every process of the job continue or stop at this step, as the leader decides."""
        ...

    def move(self, step: int, *, in_place: bool) -> Policy:
        """Moves the trainer's weights as version `step`; `in_place` as in RLCluster.sync_weights."""
        ...

    def next_batch(self) -> Any:
        """Reads the next batch from this process's data."""
        ...

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]] | None: ...

    def close(self) -> None: ...


class LocalRollouts:
    """Generates in this process, on one thread: batches are made in the order they were submitted."""

    def __init__(
        self, cluster: RLCluster, stream: Stream, run: Run, *, generate: Generate | None, evaluator: Evaluate | None
    ):
        """Starts nothing; `generate` is None if `submit` is never called."""
        self._cluster, self._stream, self._run = cluster, stream, run
        self._generate, self._evaluator = generate, evaluator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")

    def resume(self, start: Start) -> Sequence[InFlight]:
        return [Ready(experience) for experience in start.pending]

    def agree(self, step: int) -> None:
        """Does nothing: a single process agrees with itself."""

    def publish(self, step: int) -> Policy:
        return self.move(step, in_place=True)

    def move(self, step: int, *, in_place: bool) -> Policy:
        # After every batch in flight, so that one thread at a time enqueues on the rollout mesh.
        with self._run.watchdog.stage("publish"):
            return self._thread.submit(self._cluster.sync_weights, step, in_place=in_place).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        assert self._generate is not None, "given answers are not generated"
        return Later(self._thread.submit(self._generate, self.next_batch(), policy, step), self._run, "rollout")

    def next_batch(self) -> Any:
        with self._run.watchdog.stage("data"):
            return next(self._stream)

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        assert self._evaluator is not None
        return self._evaluator(policy, step)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class Accord:
    """Keeps a pod's processes in step: in every step all continue or stop as the leader decides.

    Attributes:
      taken: every trainer host has all it needs of the batches before this step, as far as the leader knew.
    """

    def __init__(self, pod: Pod, run: Run, deadline_s: float):
        self._pod, self._run, self._deadline_s = pod, run, deadline_s
        self._stop = self._wished = False
        self._trains = pod.seat.process in pod.seat.hosts.trainer
        self._reached = dict.fromkeys(pod.seat.hosts.trainer, 0)
        self._words: list[int] = []  # offered and not dropped yet
        self.taken = 0
        if pod.leads:
            pod.channel.serve("reached", self._on_reached)

    def stopping(self) -> bool:
        """True if the leader decided to stop, at the last step agreed on."""
        return self._stop

    def agree(self, step: int) -> None:
        """Waits for the leader's decision on a step; on the leader, sends it."""
        if self._pod.leads:
            self._reached[LEADER] = step
            self.taken = min(self._reached.values())
            self._stop = self._stop or self._wished or self._run.stopping()
            self._pod.channel.put(f"word/{step}", Message({"stop": self._stop, "taken": self.taken}))
            self._words.append(step)
            while self._words[0] < min(step - 1, self.taken):  # a trainer may be behind, a rollout host is at step
                self._pod.channel.drop(f"word/{self._words.pop(0)}")
            return
        stops = self._run.stopping()
        if self._trains or stops:
            reached = {"process": self._pod.seat.process, "step": step, "stop": stops}
            self._pod.call(LEADER, "reached", Message(reached), self._deadline_s)
        with self._run.watchdog.stage(f"waiting for trainer 0 at step {step}"):
            word = self._pod.get(LEADER, f"word/{step}", self._deadline_s).value
        self._stop, self.taken = bool(word["stop"]), int(word["taken"])

    def _on_reached(self, message: Message) -> Message:
        """Notes, on the channel's thread, where another host is and whether it was asked to stop."""
        self._wished = self._wished or message.value["stop"]
        if (process := message.value["process"]) in self._reached:
            self._reached[process] = max(self._reached[process], message.value["step"])
        return Message()


class RemoteRollouts:
    """Runs on a trainer host: receives batches from the rollout hosts and sends weights to them.

    Every trainer host runs the same steps in the same order; the leader also tells the rollout hosts where to begin,
    and collects what they measured.
    """

    def __init__(
        self,
        cluster: RLCluster,
        stream: Stream,
        run: Run,
        pod: Pod,
        accord: Accord,
        *,
        needed: Callable[[int, Experience], np.ndarray] | None,
        deadline_s: float,
    ):
        """Nothing runs yet.

        Args:
          cluster: with this host's part of the trainer's mesh.
          stream: the data; read only where batches are given answers.
          run: the watchdog.
          pod: the job's processes, all there.
          accord: of this process.
          needed: (step, batch) -> samples whose rows this host's devices train on; None where `submit` is never called.
          deadline_s: the longest wait for any of the rollout hosts.
        """
        self._cluster, self._stream, self._run, self._pod, self._accord = cluster, stream, run, pod, accord
        self._needed, self._deadline_s = needed, deadline_s
        self._asking = ThreadPoolExecutor(max(len(pod.seat.hosts.rollout), 1), thread_name_prefix="podrl-gather")
        self._positions: dict[int, bytes] = {}  # of the data stream after each step's batch
        self._start = Start(0, b"", (), set())

    def resume(self, start: Start) -> Sequence[InFlight]:
        self._start = start
        if self._pod.leads:
            self._announce(start.step, len(start.pending), start.data_state)
        else:  # all evaluate after the same steps; metrics.jsonl is the leader's
            with self._run.watchdog.stage("waiting for trainer 0 to restore"):
                told = self._pod.get(LEADER, "start", self._deadline_s).value
            start.evaluated.clear()
            start.evaluated.update(told["evaluated"])
        for i, experience in enumerate(start.pending):
            self._positions[start.step + i] = experience.data_state
        return [Ready(experience) for experience in start.pending]

    def agree(self, step: int) -> None:
        self._accord.agree(step)
        if self._pod.leads and step > self._start.step:
            self._announce(step, 0, self._positions.pop(step - 1, b""))

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

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        """Joins, on the leader, the scores that the rollout hosts gave their shares of the held-out prompts.

        Raises:
          BatchError: a reward function failed on one of them, or a service it asks was away; on every trainer host.
        """
        del policy
        if not self._pod.leads:  # the others have nothing to do, but must stop where the leader does
            _raise_failure([self._pod.get(LEADER, f"evaluated/{step}", self._deadline_s)])
            return None
        messages = self._from_all(lambda p: self._pod.get(p, f"evaluation/{step}", self._deadline_s))
        self._pod.channel.put(f"evaluated/{step}", next((m for m in messages if "error" in m.value), Message({})))
        _raise_failure(messages)
        samples = [sample for message in messages for sample in message.value["samples"]]
        names = next((list(m.arrays) for m in messages if m.arrays), [])
        scores = {name: np.concatenate([m.arrays[name] for m in messages if m.arrays]) for name in names}
        return summarised(scores), samples[: len(messages[0].value["samples"])]

    def gather(self, step: int, *, everything: bool = False) -> Experience:
        """Collects the batch of a step from all rollout hosts.

        Args:
          step: whose batch.
          everything: all rows and texts, not only what this host needs.

        Raises:
          BatchError: a reward function, or too many samples, failed on one of them, or a service it asks was away.
          ChannelError: one of them was late.
        """
        assert self._needed is not None
        with self._run.watchdog.stage("rollout"):
            headers = self._from_all(lambda p: self._pod.get(p, f"header/{step}", self._deadline_s))
            _raise_failure(headers)
            names = codec.ALL_ROWS if everything else codec.NEEDED_ROWS
            experience = codec.assemble(headers, self._cluster.tokenizer.pad_id, names)
            counts = [len(message.arrays["length_B"]) for message in headers]
            wanted = np.arange(sum(counts)) if everything else self._needed(step, experience)
            self._fetch_rows(step, experience, counts, wanted, names)
            if everything or self._pod.leads:
                sent = self._from_all(lambda p: self._pod.get(p, f"texts/{step}", self._deadline_s))
                experience = codec.with_texts(experience, sent)
        self._positions[step] = experience.data_state
        return experience

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _fetch_rows(
        self, step: int, experience: Experience, counts: list[int], wanted: np.ndarray, names: Sequence[str]
    ) -> None:
        starts = np.cumsum([0, *counts])
        hosts = self._pod.seat.hosts.rollout

        def fetch(process: int) -> tuple[np.ndarray, Message] | None:
            first = starts[hosts.index(process)]
            mine = wanted[(wanted >= first) & (wanted < first + counts[hosts.index(process)])]
            if not len(mine):
                return None
            request = Message({"step": step, "names": list(names)}, {"chosen": mine - first})
            return mine, self._pod.call(process, "rows", request, self._deadline_s)

        for fetched in self._from_all(fetch):
            if fetched is not None:
                codec.fill_rows(experience, *fetched)

    def _from_all(self, ask: Callable[[int], Any]) -> list[Any]:
        return list(self._asking.map(ask, self._pod.seat.hosts.rollout))

    def _announce(self, step: int, pending: int, data_state: bytes) -> None:
        """Sends the first step to rollout hosts that start now."""
        evaluated = sorted(self._start.evaluated)
        value = {"step": step, "pending": pending, "data_state": data_state.decode(), "evaluated": evaluated}
        self._pod.channel.put("start", Message(value))


class RemoteBatch:
    """A batch that the rollout hosts are making."""

    def __init__(self, rollouts: RemoteRollouts, step: int, *, whole: bool):
        """Starts nothing; `whole`: this host's copy is the one that checkpoints hold."""
        self._rollouts, self._step, self._whole = rollouts, step, whole
        self._experience: Experience | None = None
        self._complete = False

    def result(self) -> Experience:
        """Waits for the batch, with the rows of this host's devices."""
        if self._experience is None:
            self._experience = self._rollouts.gather(self._step)
        return self._experience

    def complete(self) -> Experience:
        """Waits for the batch with all its rows and texts, on the leader: other hosts' copies are not written."""
        if not self._whole:
            return self.result()
        if self._experience is None or not self._complete:
            self._experience = self._rollouts.gather(self._step, everything=True)
            self._complete = True
        return self._experience


class HostRollouts:
    """Runs on a rollout host: receives weights, makes and scores its share of each batch, serves it to the trainers."""

    def __init__(
        self,
        cluster: RLCluster,
        stream: Stream | None,
        run: Run,
        pod: Pod,
        accord: Accord,
        *,
        generate: Generate | None,
        evaluator: Evaluator | None,
        deadline_s: float,
    ):
        """Nothing runs yet.

        Args:
          cluster: with this host's part of the rollout mesh.
          stream: this host's share of every batch of prompts; None where batches are given answers.
          run: signals and the watchdog; writes nothing.
          pod: the job's processes, all there.
          accord: of this process.
          generate: turns prompts into experience; None where `submit` is never called.
          evaluator: on this host's share of the held-out prompts.
          deadline_s: the longest wait for any of the other processes.
        """
        self._cluster, self._stream, self._run, self._pod, self._accord = cluster, stream, run, pod, accord
        self._generate, self._evaluator, self._deadline_s = generate, evaluator, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        self._batches: dict[int, Experience] = {}
        self._evaluations: list[int] = []  # offered and not dropped yet
        pod.channel.serve("rows", self._rows)

    def resume(self, start: Start) -> Sequence[InFlight]:
        return [Ready(None) for _ in start.pending]

    def agree(self, step: int) -> None:
        self._accord.agree(step)
        for done in [s for s in self._batches if s < self._accord.taken]:
            del self._batches[done]
            self._pod.channel.drop(f"header/{done}")
            self._pod.channel.drop(f"texts/{done}")
        while self._evaluations and self._evaluations[0] < step:  # the leader has read it: its word came after
            self._pod.channel.drop(f"evaluation/{self._evaluations.pop(0)}")

    def publish(self, step: int) -> Policy:
        self.agree(step)
        return self.move(step, in_place=True)

    def move(self, step: int, *, in_place: bool) -> Policy:
        # After every batch in flight, so that one thread at a time enqueues on the rollout mesh.
        with self._run.watchdog.stage("publish"):
            return self._thread.submit(self._cluster.sync_weights, step, in_place=in_place).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        prompts, generate = self.next_batch(), self._generate
        assert generate is not None, "given answers are not generated"

        def produce() -> None:
            try:
                experience = generate(prompts, policy, step)
            except BatchError as error:
                self._pod.channel.put(f"header/{step}", _failure(error))
                raise
            self._batches[step] = experience
            self._pod.channel.put(f"texts/{step}", codec.texts(experience))
            self._pod.channel.put(f"header/{step}", codec.header(experience))

        return _Offered(Later(self._thread.submit(produce), self._run, "rollout"), self._pod)

    def next_batch(self) -> Any:
        return None if self._stream is None else next(self._stream)

    def evaluate(self, policy: Policy, step: int) -> None:
        """Sends the evaluation of this host's share to the leader."""
        assert self._evaluator is not None
        scores: dict[str, np.ndarray] = {}
        samples: list[dict[str, Any]] = []
        try:
            if self._evaluator.problems:  # more hosts than problems leave some without
                scores, samples = self._thread.submit(self._evaluator.scores, policy).result()
        except BatchError as error:
            self._pod.channel.put(f"evaluation/{step}", _failure(error))
            self._pod.await_end(_LAST_WORDS_S)  # the trainers save first, then end the job
            raise
        self._pod.channel.put(f"evaluation/{step}", Message({"samples": _jsonable(samples)}, scores))
        self._evaluations.append(step)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _rows(self, message: Message) -> Message:
        """Answers, on the channel's thread, a request for rows of some samples of a batch."""
        step, names = message.value["step"], message.value["names"]
        if step not in self._batches:
            raise ValueError(f"there is no batch of step {step} here, only of {sorted(self._batches)}")
        if not set(names) <= set(codec.ALL_ROWS):
            raise ValueError(f"{names} are not all rows of a batch: {codec.ALL_ROWS} are")
        return codec.rows(self._batches[step], message.arrays["chosen"], names)


class _Offered:
    """A batch that this host made and other hosts train on."""

    def __init__(self, made: Later, pod: Pod):
        self._made, self._pod = made, pod

    def result(self) -> Any:
        try:
            return self._made.result()
        except BatchError:
            self._pod.await_end(_LAST_WORDS_S)  # the trainers save first, then end the job
            raise

    complete = result


class GivenAnswers:
    """Reads batches from data (SFT, DPO), the same on every trainer host; weights move only to be evaluated."""

    def __init__(self, place: Place):
        """Wraps `place`, with which this process would generate; on a rollout host it has no data stream."""
        self._place = place

    def resume(self, start: Start) -> Sequence[InFlight]:
        return self._place.resume(start)

    def publish(self, step: int) -> Policy:
        self._place.agree(step)
        return Policy({}, step)

    def submit(self, policy: Policy, step: int) -> InFlight:
        return Ready(self._place.next_batch())

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        """Moves the weights, which `publish` does not do here, and evaluates them."""
        del policy
        return self._place.evaluate(self._place.move(step, in_place=False), step)

    def close(self) -> None:
        self._place.close()


def _failure(error: BatchError) -> Message:
    """Tells the trainer hosts why there is no batch, or no evaluation."""
    return Message({"error": str(error), "away": isinstance(error, ServiceError)})


def _raise_failure(messages: Sequence[Message]) -> None:
    """Raises the first failure among what the rollout hosts sent."""
    for message in messages:
        if "error" in message.value:
            error = RewardServiceError if message.value["away"] else BatchError
            raise error(message.value["error"])


def _jsonable(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.item() if isinstance(v, np.generic) else v for k, v in sample.items()} for sample in samples]
