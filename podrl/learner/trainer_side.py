"""The loop's parts on a trainer host: rollouts come from other hosts, weights go to them, all agree when to stop.

`TrainerSide` is put before a learner's parts: class GRPOTrainerParts(TrainerSide, GRPOParts). Every trainer host runs
the same steps in the same order; the leader also writes metrics and speaks for all.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from podrl.learner import wire
from podrl.learner.loop import InFlight
from podrl.learner.parts import LearnerParts, Ready
from podrl.rewards.compose import RewardError
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.types import Experience, Policy


class RemoteBatch:
    """A batch that the rollout hosts are making."""

    def __init__(self, parts: "TrainerSide", step: int):
        self._parts, self._step = parts, step
        self._experience: Experience | None = None
        self._complete = False

    def result(self) -> Experience:
        """The batch, with the rows of this host's devices."""
        if self._experience is None:
            self._experience = self._parts.gather(self._step)
        return self._experience

    def complete(self) -> Experience:
        """The batch with all its rows and texts, for a checkpoint; only the leader's copy of it is written."""
        if not self._complete:
            self._experience = self._parts.gather(self._step, everything=True)
            self._complete = True
        assert self._experience is not None
        return self._experience


class TrainerSide(LearnerParts):
    """Overrides of a learner's parts where generation happens on other hosts."""

    pod: Pod
    deadline_s: float

    def connect(self, pod: Pod, deadline_s: float, *, evaluates: bool) -> None:
        """Says who the others are; call before the loop starts.

        Args:
          pod: the job's processes, all there.
          deadline_s: the longest wait for any of them.
          evaluates: whether the rollout hosts evaluate.
        """
        self.pod, self.deadline_s = pod, deadline_s
        self._stop = self._wished = False
        self._asking = ThreadPoolExecutor(max(len(pod.seat.hosts.rollout), 1), thread_name_prefix="podrl-gather")
        self._last_state = b""
        if pod.leads:
            pod.channel.serve("stop", self._on_wish)
            self._evaluator = self.evaluation if evaluates else None

    # The loop's parts.

    def restore(self) -> tuple[int, list[InFlight]]:
        step, in_flight = super().restore()
        self._last_state = self._data_state
        if self.pod.leads:
            self._announce(step, len(in_flight))
        return step, in_flight

    def publish(self, step: int) -> Policy:
        self._agree(step)
        with self.run.watchdog.stage("publish"):
            return self.cluster.sync_weights(step, in_place=True)

    def submit(self, policy: Policy, step: int) -> InFlight:
        return RemoteBatch(self, step)

    def update(self, step: int, experience: Experience) -> Mapping[str, Any]:
        metrics = super().update(step, experience)  # pyright: ignore[reportAttributeAccessIssue]
        self._last_state = experience.rollouts.prompts.data_state
        return metrics

    def save(self, step: int, in_flight: list[InFlight]) -> None:
        done = [Ready(b.complete()) if self.pod.leads and isinstance(b, RemoteBatch) else b for b in in_flight]
        self._data_state = done[-1].result().rollouts.prompts.data_state if done else self._last_state
        super().save(step, done)

    def stopping(self) -> bool:
        return self._stop

    def step_metrics(self, batch: Any) -> dict[str, float]:
        return super().step_metrics(batch) if self.pod.leads else {}

    def close(self) -> None:
        super().close()
        self._asking.shutdown(wait=False, cancel_futures=True)

    # Between hosts.

    def gather(self, step: int, *, everything: bool = False) -> Experience:
        """The batch of a step from all rollout hosts.

        Args:
          step: whose batch.
          everything: all rows and texts, not only what this host needs.

        Raises:
          RewardError: a reward function failed on one of them.
          ChannelError: one of them was late.
        """
        with self.run.watchdog.stage("rollout"):
            headers = self._from_all(lambda p: self.pod.get(p, f"header/{step}", self.deadline_s))
            for message in headers:
                if "error" in message.value:
                    raise RewardError(message.value["error"])
            experience = wire.assemble(headers, self.cluster.tokenizer.pad_id)
            counts = [len(message.arrays["length_B"]) for message in headers]
            wanted = np.arange(sum(counts)) if everything else self.needed_samples(step, experience)
            self._fetch_rows(step, experience, counts, wanted, everything)
            if everything or self.pod.leads:
                sent = self._from_all(lambda p: self.pod.get(p, f"texts/{step}", self.deadline_s))
                experience = wire.with_texts(experience, sent)
        return experience

    def evaluation(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The evaluator of a leader: means over what the rollout hosts measured on their shares."""
        del policy
        parts = [m.value for m in self._from_all(lambda p: self.pod.get(p, f"evaluation/{step}", self.deadline_s))]
        total = math.fsum(part["problems"] for part in parts)
        names = next((part["metrics"] for part in parts if part["metrics"]), {})
        metrics = {
            name: math.fsum(part["metrics"].get(name, 0.0) * part["problems"] for part in parts) / total
            for name in names
        }
        self._evaluated.add(step)
        return metrics, [sample for part in parts for sample in part["samples"]][: len(parts[0]["samples"])]

    def _fetch_rows(
        self, step: int, experience: Experience, counts: list[int], wanted: np.ndarray, everything: bool
    ) -> None:
        names = wire.NEEDED_ROWS if not everything else wire.ALL_ROWS
        starts = np.cumsum([0, *counts])
        hosts = self.pod.seat.hosts.rollout

        def fetch(process: int) -> tuple[np.ndarray, Message] | None:
            first = starts[hosts.index(process)]
            mine = wanted[(wanted >= first) & (wanted < first + counts[hosts.index(process)])]
            if not len(mine):
                return None
            request = Message({"step": step, "names": list(names)}, {"chosen": mine - first})
            return mine, self.pod.call(process, "rows", request, self.deadline_s)

        for fetched in self._from_all(fetch):
            if fetched is not None:
                wire.fill_rows(experience, *fetched)

    def _from_all(self, ask: Callable[[int], Any]) -> list[Any]:
        return list(self._asking.map(ask, self.pod.seat.hosts.rollout))

    def _agree(self, step: int) -> None:
        """Every process goes on, or stops, by the leader's word for this step."""
        if self.pod.leads:
            self._stop = self._stop or self._wished or self.run.stopping()
            self.pod.channel.put(f"word/{step}", Message({"stop": self._stop}))
            self.pod.channel.drop(f"word/{step - 2}")
            if step > self._start:
                self._announce(step, 0)
            return
        if self.run.stopping():
            self.pod.call(LEADER, "stop", Message(), self.deadline_s)
        with self.run.watchdog.stage(f"waiting for trainer 0 at step {step}"):
            self._stop = bool(self.pod.get(LEADER, f"word/{step}", self.deadline_s).value["stop"])

    def _announce(self, step: int, pending: int) -> None:
        """Tells rollout hosts that start now where to begin."""
        state = self._data_state if pending else self._last_state
        value = {"step": step, "pending": pending, "data_state": state.decode(), "evaluated": sorted(self._evaluated)}
        self.pod.channel.put("start", Message(value))

    def _on_wish(self, message: Message) -> Message:
        self._wished = True
        return message
