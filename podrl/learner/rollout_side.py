"""The loop's parts on a rollout host: takes weights, generates and scores its share of each batch, and offers it."""

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pipeline import PromptStream
from podrl.learner import wire
from podrl.learner.evaluate import AccuracyEvaluator
from podrl.learner.generation import Generator
from podrl.learner.loop import InFlight, Schedule
from podrl.learner.parts import Later, Ready
from podrl.learner.run import Run
from podrl.rewards.compose import RewardError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.types import Experience, Policy

_LAST_WORDS_S = 300.0


class RolloutParts:
    """Implements podrl.learner.loop.Parts where there is no trainer: updates, records and saves happen elsewhere."""

    def __init__(
        self,
        cluster: RLCluster,
        generate: Generator,
        stream: PromptStream,
        run: Run,
        schedule: Schedule,
        evaluator: AccuracyEvaluator | None,
        pod: Pod,
        deadline_s: float,
    ):
        """Nothing runs yet.

        Args:
          cluster: with this host's part of the rollout mesh.
          generate: turns prompts into experience.
          stream: this host's share of every batch of prompts.
          run: signals and the watchdog; writes nothing.
          schedule: the job's.
          evaluator: on this host's share of the held-out prompts.
          pod: the job's processes, all there.
          deadline_s: the longest wait for any of them.
        """
        self.cluster, self.stream, self.run, self.schedule = cluster, stream, run, schedule
        self._generate, self._evaluator, self._pod, self._deadline_s = generate, evaluator, pod, deadline_s
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        self._batches: dict[int, Experience] = {}
        self._evaluated: set[int] = set()
        self._evaluations: list[int] = []  # on the board
        self._stop = False
        pod.channel.serve("rows", self._rows)

    def restore(self) -> tuple[int, list[InFlight]]:
        with self.run.watchdog.stage("waiting for trainer 0 to restore"):
            start = self._pod.get(LEADER, "start", self._deadline_s).value
        if start["data_state"]:
            self.stream.restore(start["data_state"].encode())
        self._evaluated = set(start["evaluated"])
        return int(start["step"]), [Ready(None)] * int(start["pending"])

    def publish(self, step: int) -> Policy:
        if self.run.stopping():
            self._pod.call(LEADER, "stop", Message(), self._deadline_s)
        with self.run.watchdog.stage(f"waiting for trainer 0 at step {step}"):
            self._stop = bool(self._pod.get(LEADER, f"word/{step}", self._deadline_s).value["stop"])
        for done in [s for s in self._batches if s < step]:
            del self._batches[done]
            self._pod.channel.drop(f"header/{done}")
            self._pod.channel.drop(f"texts/{done}")
        while self._evaluations and self._evaluations[0] < step:  # the leader has read it: its word came after
            self._pod.channel.drop(f"evaluation/{self._evaluations.pop(0)}")
        # After every batch in flight, so that one thread at a time enqueues on the rollout mesh.
        with self.run.watchdog.stage("publish"):
            return self._thread.submit(self.cluster.sync_weights, step, in_place=True).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        prompts = next(self.stream)

        def produce() -> None:
            try:
                experience = self._generate(prompts, policy, step)
            except RewardError as error:
                self._pod.channel.put(f"header/{step}", Message({"error": str(error)}))
                raise
            self._batches[step] = experience
            self._pod.channel.put(f"texts/{step}", wire.texts(experience))
            self._pod.channel.put(f"header/{step}", wire.header(experience))

        return _Offered(Later(self._thread.submit(produce), self.run, "rollout"), self._pod)

    def update(self, step: int, experience: Experience) -> Mapping[str, Any]:
        return {}

    def record(self, step: int, experience: Experience, metrics: Mapping[str, Any]) -> None:
        return None

    def save(self, step: int, in_flight: list[InFlight]) -> None:
        return None

    def evaluate(self, policy: Policy, step: int) -> None:
        postponed = self._stop and step < self.schedule.max_steps
        if self._evaluator is None or step in self._evaluated or postponed:
            return
        with self.run.watchdog.stage("evaluation"):
            metrics: dict[str, float] = {}
            samples: list[dict[str, Any]] = []
            if self._evaluator.problems:  # more hosts than problems leave some without
                metrics, samples = self._thread.submit(self._evaluator, policy, step).result()
        value = {"metrics": metrics, "samples": _jsonable(samples), "problems": self._evaluator.problems}
        self._pod.channel.put(f"evaluation/{step}", Message(value))
        self._evaluations.append(step)

    def stopping(self) -> bool:
        return self._stop

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _rows(self, message: Message) -> Message:
        """On the channel's thread: rows of some samples of a batch that is offered."""
        step, names = message.value["step"], message.value["names"]
        if step not in self._batches:
            raise ValueError(f"there is no batch of step {step} here, only of {sorted(self._batches)}")
        if not set(names) <= set(wire.ALL_ROWS):
            raise ValueError(f"{names} are not all rows of a batch: {wire.ALL_ROWS} are")
        return wire.rows(self._batches[step], message.arrays["chosen"], names)


@dataclasses.dataclass(frozen=True)
class _Offered:
    """A batch that was made here and is trained on elsewhere."""

    made: Later
    pod: Pod

    def result(self) -> Any:
        try:
            return self.made.result()
        except RewardError:
            self.pod.await_end(_LAST_WORDS_S)  # the trainers save first, then end the job
            raise


def _jsonable(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.item() if isinstance(v, np.generic) else v for k, v in sample.items()} for sample in samples]
