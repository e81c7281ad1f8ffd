"""What every learner shares of the loop's parts: metrics one step late, checkpoints, evaluation, the progress line."""

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner import pending
from podrl.learner.console import Progress
from podrl.learner.loop import InFlight, Schedule
from podrl.learner.run import Run
from podrl.learner.summary import eval_records
from podrl.runtime.metrics import read_metrics
from podrl.types import Experience, Policy


class Stream(Protocol):
    """An endless, resumable stream of batches."""

    def __next__(self) -> Any: ...

    def restore(self, state: bytes) -> None: ...


class Evaluator(Protocol):
    """Scores a policy; returns eval/* metrics and a few samples."""

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]: ...


class Ready:
    """A batch that is already complete (restored from a checkpoint, or made on the spot)."""

    def __init__(self, value: Any):
        self._value = value

    def result(self) -> Any:
        return self._value


class Later:
    """A batch that another thread is making; waiting for it is watched under a name."""

    def __init__(self, future: concurrent.futures.Future, run: Run, stage: str):
        self._future, self._run, self._stage = future, run, stage

    def result(self) -> Any:
        with self._run.watchdog.stage(self._stage):
            return self._future.result()


class LearnerParts:
    """The loop's parts that do not depend on the algorithm.

    A subclass gives `submit`, `update` and `step_metrics`. Everything a step depends on is in the checkpoint: weights,
    optimizer, step, the position of the data stream after the last submitted batch, and the batches in flight.
    """

    def __init__(self, cluster: RLCluster, stream: Stream, run: Run, schedule: Schedule, evaluator: Evaluator | None):
        self.cluster, self.stream, self.run, self.schedule = cluster, stream, run, schedule
        self._evaluator = evaluator
        self._evaluated: set[int] = set()  # steps whose evaluation is in metrics.jsonl
        self._data_state = b""
        self._late: tuple[int, dict[str, float], Mapping[str, Any]] | None = None
        self._progress: Progress | None = None
        self._start, self._started, self._last = 0, time.monotonic(), time.monotonic()

    # What a subclass adds.

    def step_metrics(self, batch: Any) -> dict[str, float]:
        """Host metrics of a batch, without waiting for the device."""
        raise NotImplementedError

    def device_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Last touches to metrics fetched from the device."""
        return values

    def samples(self, batch: Any) -> Sequence[Mapping[str, Any]]:
        """Records for samples.jsonl."""
        return ()

    def controllers(self) -> dict[str, Any]:
        """JSON-able state of whatever adapts between steps."""
        return {}

    def restore_controllers(self, state: Mapping[str, Any]) -> None:
        """Inverse of `controllers`."""

    def needed_samples(self, step: int, experience: Any) -> np.ndarray:
        """Indices of the samples whose rows this process's devices train on, where rollouts come from other hosts."""
        raise NotImplementedError

    # The parts of podrl.learner.loop.Parts.

    def restore(self) -> tuple[int, list[InFlight]]:
        step = 0
        in_flight: list[InFlight] = []
        restored = None
        if self.run.checkpoints is not None:
            with self.run.watchdog.stage("restoring"):
                restored = self.run.checkpoints.restore_latest(self.cluster.abstract_saved())
        if restored is not None:
            step = restored.step
            self.cluster.load_saved(restored.state)
            self._data_state = restored.host["data_state"].encode()
            if self._data_state:
                self.stream.restore(self._data_state)
            self.restore_controllers(restored.host["controllers"])
            in_flight += [Ready(e) for e in pending.load(restored.host["pending"], restored.arrays)]
            self.run.console.print(f"Resumed after step {step} from {self.run.place}.")
        self.run.open_metrics(step + 1 if step else 0)
        if self.run.workdir is not None:
            self._evaluated = {r["step"] for r in eval_records(read_metrics(self.run.workdir))}
        self._start, self._last = step, time.monotonic()
        return step, in_flight

    def publish(self, step: int) -> Policy:
        with self.run.watchdog.stage("publish"):
            return self.cluster.sync_weights(step, in_place=True)

    def stopping(self) -> bool:
        return self.run.stopping()

    def record(self, step: int, experience: Any, metrics: Mapping[str, Any]) -> None:
        self._flush()
        host = self.step_metrics(experience)
        now = time.monotonic()
        host["time/step"], self._last = now - self._last, now
        for stage, seconds in self.run.watchdog.take_spent().items():
            host.setdefault(f"time/{stage}", seconds)
        self._late = (step, host, metrics)
        log = self.run.log_config
        if self.run.metrics is not None and log.samples_every and (step % log.samples_every == 0 or step == 1):
            self.run.metrics.write_samples(step, list(self.samples(experience))[: log.samples])
        if step == self.schedule.max_steps:
            self._flush()

    def save(self, step: int, in_flight: list[InFlight]) -> None:
        if self.run.checkpoints is None:
            return
        self._flush()
        done: list[Experience] = [batch.result() for batch in in_flight]
        host, arrays = pending.dump(done)
        content = {"data_state": self._data_state.decode(), "pending": host, "controllers": self.controllers()}
        self.run.push()  # a checkpoint whose steps are missing in metrics.jsonl could not be resumed without a gap
        with self.run.watchdog.stage("checkpoint"):
            self.run.checkpoints.save(step, self.cluster.saved(), content, arrays)
            if step == self.schedule.max_steps or self.stopping():
                self.run.checkpoints.wait()

    def evaluate(self, policy: Policy, step: int) -> None:
        # Asked to stop, a run leaves its evaluation to the one that resumes it; the last step is worth the wait.
        postponed = self.stopping() and step < self.schedule.max_steps
        if self._evaluator is None or step in self._evaluated or postponed:
            return
        self._flush()
        with self.run.watchdog.stage("evaluation"):
            metrics, samples = self._evaluator(policy, step)
        if self.run.metrics is not None:
            self.run.metrics.write(step, metrics)
            self.run.metrics.write_samples(step, samples)
        self.run.push(wait=False)
        self.cluster.log_external(step, metrics)
        text = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items())
        self.run.console.print(f"Evaluation after step {step}: {text}")
        self._last = time.monotonic()
        self.run.watchdog.take_spent()

    # Shared by the above.

    def next_batch(self) -> Any:
        """The next batch of the stream; remembers where the stream stands after it."""
        with self.run.watchdog.stage("data"):
            batch = next(self.stream)
        self._data_state = batch.data_state
        return batch

    def close(self) -> None:
        self._flush()
        if self._progress is not None:
            self._progress.close()

    def _flush(self) -> None:
        """Fetches and writes the step that `record` took note of."""
        if self._late is None:
            return
        step, host, device = self._late
        self._late = None
        values = {**host, **self.device_metrics(fetched_means(device))}
        values.update(self.cluster.take_buffered_metrics())
        if self.run.metrics is not None:
            self.run.metrics.write(step, values)
        self.cluster.log_external(step, values)
        self.check(step, values)
        self._show(step, values)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Looks at a step's metrics; raises ValueError where going on would be in vain."""
        if values.get("actor/nonfinite"):
            self._nonfinite = getattr(self, "_nonfinite", 0) + 1
            self.run.console.print(f"Step {step}: the gradient was not finite; the update was skipped.")
            if self._nonfinite >= 3:
                raise ValueError(
                    f"Gradients were not finite in {self._nonfinite} updates in a row, last at step {step}: lower "
                    "trainer.learning_rate, set trainer.max_grad_norm, or look at samples.jsonl for degenerate text."
                )
        else:
            self._nonfinite = 0

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        if self._progress is None:
            self._progress = Progress(
                self.run.console,
                "step",
                self._start,
                self.schedule.max_steps,
                self.run.log_config.console_every,
            )
            self._started, self._start = time.monotonic(), step
        pace = (time.monotonic() - self._started) / max(step - self._start, 1)
        left = pace * (self.schedule.max_steps - step)
        shown = {short: values[name] for name, short in self.watched() if name in values}
        self._progress.update(step, shown, left)

    def watched(self) -> Sequence[tuple[str, str]]:
        """(metric, label) pairs of the progress line."""
        return ()


def gathered(collected: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Metrics of several updates by name, still on the device: a mean there would be a program per metric."""
    return {name: [metrics[name] for metrics in collected] for name in collected[0]}


def fetched_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics on the host; of those that come as lists the means."""
    return {name: float(np.mean(value)) for name, value in jax.device_get(dict(metrics)).items()}
