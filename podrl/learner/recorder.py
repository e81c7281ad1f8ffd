"""Keeps a run's files (metrics one step late, checkpoints, evaluations), shows progress, and tells when to stop."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from podrl.cluster.checkpoint_state import abstract_checkpoint_state, checkpoint_state, load_checkpoint_state
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import plural
from podrl.data.pools import Curriculum
from podrl.learner import experience as codec
from podrl.learner.loop import InFlight, Schedule, Start
from podrl.mappings import JsonObject, LogRecord, Metrics, SavedState
from podrl.mesh.chips import peak_flops
from podrl.models.parameters import param_specs
from podrl.models.sizes import parameters_of_a_token
from podrl.rundir.console import Progress, TimeLeft
from podrl.rundir.findings import Examination
from podrl.rundir.gauges import Gauges, StepWork, first_start
from podrl.rundir.history import Past
from podrl.rundir.metrics import read_metrics
from podrl.rundir.run import Run
from podrl.rundir.summary import brief, eval_records
from podrl.types import Policy

_CURRICULUM = "curriculum."  # prefix of the curriculum's arrays in a checkpoint
# A function that scores a policy after a step, and returns eval/* metrics and a few samples; None if another process
# has them.
Evaluate = Callable[[Policy, int], tuple[dict[str, float], list[LogRecord]] | None]


class BesideTraining(Protocol):
    """Runs evaluations on evaluation hosts, one at a time, while training goes on."""

    def begin_evaluation(self, policy: Policy, step: int) -> None:
        """Begins the evaluation of a policy after a step."""
        ...

    def evaluated(self, *, wait: bool) -> tuple[int, dict[str, float], list[LogRecord]] | None:
        """Returns (step, eval/* metrics, a few samples) of the evaluation that was begun; None while it runs.

        Each evaluation is returned once.
        """
        ...

    def unsaved(self) -> bool:
        """True if the evaluation that was begun has failed.

        No checkpoint may be saved then, so that a resumed run begins the evaluation again.
        """
        ...


class ResumableStream(Protocol):
    """An endless, resumable stream of batches."""

    def __next__(self) -> Any: ...

    def restore(self, state: bytes) -> None: ...


class StepReport(Protocol):
    """An algorithm's description of a step: metrics, records of samples, and a check of the metrics."""

    def describe(self, experience: Any) -> dict[str, float]:
        """Computes host metrics of a batch, without waiting for the device."""
        ...

    def finished(self, values: dict[str, float]) -> dict[str, float]:
        """Completes metrics fetched from the device."""
        ...

    def samples(self, experience: Any) -> Sequence[LogRecord]:
        """Makes records for samples.jsonl."""
        ...

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        ...

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises ValueError if a step's metrics say that the run cannot succeed."""
        ...


class Controllers(Protocol):
    """The adaptive state of a run, such as KL coefficients, as part of a checkpoint."""

    def state(self) -> SavedState: ...

    def restore(self, state: SavedState) -> None: ...


class Recorder:
    """Implements podrl.learner.loop.Recorder on a trainer host.

    Everything a step depends on is in the checkpoint: weights, optimizer, step, the position of the data stream after
    the last submitted batch, the batches in flight, the coefficients that adapt between steps, and the curriculum.
    """

    def __init__(
        self,
        cluster: RLCluster,
        stream: ResumableStream,
        run: Run,
        schedule: Schedule,
        *,
        report: StepReport,
        controllers: Controllers,
        evaluate: Evaluate | None,
        beside: BesideTraining | None = None,
        stopping: Callable[[], bool],
        curriculum: Curriculum | None = None,
    ):
        """Stores the collaborators.

        Args:
          cluster: the cluster whose weights are saved.
          stream: the data, whose position is saved.
          run: files, checkpoints, and the watchdog.
          schedule: steps at which the loop saves, evaluates and stops.
          report: the algorithm's description of a step.
          controllers: the algorithm's adaptive state.
          evaluate: scores the policy on held-out prompts; None disables evaluation.
          beside: runs evaluations on evaluation hosts while training goes on; training waits for an evaluation before
            the next evaluation or checkpoint, and at the end. None if training stops for evaluations.
          stopping: function that returns True once the run was asked to stop; all processes get the same answer.
          curriculum: the data's curriculum; None without one.
        """
        self._curriculum = curriculum
        self._cluster, self._stream, self._run, self._schedule = cluster, stream, run, schedule
        self._report, self._controllers = report, controllers
        self._evaluate, self._beside, self.stopping = evaluate, beside, stopping
        self._evaluated: set[int] = set()  # steps whose evaluation is in metrics.jsonl
        self._trained: tuple[int, bytes] | None = None  # (steps done, data position after them); None before training
        # The newest step until it is written: (step, host metrics, device metrics, time of its end).
        self._late: tuple[int, dict[str, float], Metrics, float] | None = None
        self._progress: Progress | None = None
        self._time_left = TimeLeft(schedule.max_steps)
        self._examination = Examination(run.config)
        self._nonfinite = 0  # number of steps in a row with an update that was skipped
        self._start, self._last = 0, time.monotonic()
        self._before: dict[str, float] = {}  # seconds of the stages before the first step
        self._gauges: Gauges | None = None  # None in processes that write no metrics
        self._compiled = 0.0  # seconds of compiling before this step

    def restore(self) -> Start:
        step, data_state, pending, restored, marks = 0, b"", [], None, None
        if self._run.checkpoints is not None:
            with self._run.watchdog.stage("restoring"):
                read = functools.partial(codec.content, pad_id=self._cluster.tokenizer.pad_id)
                restored = self._run.checkpoints.restore_latest(abstract_checkpoint_state(self._cluster), read)
        if restored is not None:
            step, marks = restored.step, restored.host.get("files")
            if step > self._schedule.max_steps:
                each, most = self._schedule.updates_per_step, self._schedule.updates
                held = plural(step, "step") + (f" of {each} updates, {step * each} updates" if each > 1 else "")
                raise ValueError(
                    f"{self._run.place} holds {held}, more than trainer.max_steps={most}: "
                    f"set trainer.max_steps to at least {step * each}, or give another --workdir."
                )
            load_checkpoint_state(self._cluster, restored.state)
            data_state, controllers, pending = restored.content
            if data_state:
                self._stream.restore(data_state)
            if self._curriculum is not None:
                known = {k: x for k, x in restored.arrays.items() if k.startswith(_CURRICULUM)}
                self._curriculum.recall({name.removeprefix(_CURRICULUM): x for name, x in known.items()})
            self._controllers.restore(controllers)
            self._run.console.print(f"Resumed after step {step} from {self._run.place}.")
            if step == self._schedule.max_steps:
                self._run.console.print(
                    f"That was the last step of this run (trainer.max_steps={self._schedule.updates}), so nothing is "
                    "trained. Raise trainer.max_steps to go on, or give another --workdir to start anew."
                )
        self._run.open_metrics(step + 1 if step else 0, marks)
        earlier = read_metrics(self._run.workdir) if self._run.workdir is not None else []
        self._evaluated = {record["step"] for record in eval_records(earlier) if record["step"] <= step}
        for record in earlier:  # an earlier start of the run has printed the warnings of these records
            self._examination.see(record)
        self._before = self._take_times()
        if self._run.leads:
            began = first_start(self._run.workdir, time.time() - sum(self._before.values()), step)
            self._gauges = Gauges(self._work(), plan=self._run.planned, earlier=earlier, first_start=began)
        self._start, self._last = step, time.monotonic()
        self._run.profiler.after(step)
        return Start(step, data_state, pending, self._evaluated)

    def stage(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._run.watchdog.stage(name)

    def record(self, step: int, experience: Any, metrics: Metrics) -> None:
        self._flush()
        host = self._report.describe(experience) if self._run.leads else {}
        now = time.monotonic()
        host["time/step"], self._last = now - self._last, now
        times = self._take_times()
        host["time/other"] = max(host["time/step"] - sum(times.values()), 0.0)
        times = self._before | times
        self._before = {}
        if "time/rollout" in times:
            host["time/waiting"] = times["time/rollout"]
        host = times | host
        if compiled := self._run.spans.compiled - self._compiled:
            host["perf/compile"], self._compiled = compiled, self._run.spans.compiled
        self._late = (step, host, metrics, time.time())
        if self._run.tracing is not None:
            self._run.tracing.record(step, experience, self._run.spans.take(step), self._cluster.tokenizer)
        self._run.spans.pass_on(step, last=step == self._schedule.max_steps)
        self._run.profiler.after(step)
        log = self._run.log_config
        if self._run.metrics is not None and log.samples_every and (step % log.samples_every == 0 or step == 1):
            samples = list(self._report.samples(experience))[: log.samples]
            self._run.metrics.write_samples(step, samples)
            self._warn(*({"step": step, **sample} for sample in samples))
        if step == self._schedule.max_steps:
            self._flush()
        self._trained = (step, experience.data_state)
        self._end_evaluation(wait=False)  # `_trained` is set, so `rescue` can save this step if this call fails

    def _take_times(self) -> dict[str, float]:
        """Returns time/STAGE for each stage: the seconds spent in the stage since the last call."""
        return {f"time/{stage}": seconds for stage, seconds in self._run.watchdog.take_spent().items()}

    def save(self, step: int, in_flight: Sequence[InFlight]) -> None:
        if self._run.checkpoints is None:
            return
        assert self._trained is not None, "a checkpoint is saved only after a trained step"
        self._end_evaluation(wait=True)  # a run that resumes from this checkpoint no longer has the weights to evaluate
        with self._run.watchdog.stage("checkpoint"):
            self._flush()
            done = [batch.complete() for batch in in_flight] if self._run.leads else []
            host, arrays = codec.dump(done)
            if self._curriculum is not None and self._run.leads:
                arrays |= {_CURRICULUM + name: x for name, x in self._curriculum.memory(step).items()}
            position = done[-1].data_state if done else self._trained[1]
            content = {"data_state": position.decode(), "pending": host, "controllers": self._controllers.state()}
            content["files"] = self._run.marks()
            self._run.push()  # a checkpoint whose steps are missing in metrics.jsonl could not be resumed without a gap
            self._run.checkpoints.save(step, checkpoint_state(self._cluster), content, arrays)
            if step == self._schedule.max_steps or self.stopping():
                self._run.checkpoints.wait()
            self._run.notify_saved(self._run.saved_step())

    def rescue(self) -> None:
        """Saves the finished steps when the next batch could not be made; a resumed run makes this batch again."""
        if self._trained is None or self._run.checkpoints is None:
            return
        step, position = self._trained
        owed = self._beside is not None and self._beside.unsaved()
        with self._run.watchdog.stage("checkpoint"):
            self._run.checkpoints.wait()
            # With `rollout.clock='wall'` the data position is empty while groups are open, and a checkpoint without
            # batches in flight would lose the prompts of these groups. So no checkpoint is saved: the run resumes from
            # the older checkpoint and the journal.
            if self._run.saved_step() < step and position and not owed:
                self.save(step, [])
                self._run.checkpoints.wait()
        self._run.console.print(f"Saved after step {self._run.saved_step()} in {self._run.place}.")

    def evaluate(self, policy: Policy, step: int) -> None:
        # A run that was asked to stop leaves its evaluation to the run that resumes it, except the last step's
        # evaluation.
        postponed = self.stopping() and step < self._schedule.max_steps
        if self._evaluate is None or step in self._evaluated or postponed:
            return
        self._end_evaluation(wait=True)
        self._flush()
        if self._beside is not None and step < self._schedule.max_steps:
            with self._run.watchdog.stage("evaluation"):
                self._beside.begin_evaluation(policy, step)
            return
        with self._run.watchdog.stage("evaluation"):
            found = self._evaluate(policy, step)
        self._evaluated.add(step)  # not before: a host that joins during the evaluation must take part in it
        self._compiled = self._run.spans.compiled
        times = self._before | self._take_times()
        self._before = {}
        if found is not None:
            self._write_evaluation(step, *found, times)
        if step == self._schedule.max_steps:
            self._run.spans.pass_on(step, last=True)  # no later step would pass these spans on
        self._last = time.monotonic()

    def _end_evaluation(self, *, wait: bool) -> None:
        """Writes the evaluation that evaluation hosts made, if its scores have arrived; with `wait`, waits for them."""
        if self._beside is None:
            return
        with self._run.watchdog.stage("evaluation"):
            result = self._beside.evaluated(wait=wait)
        if result is not None:
            self._evaluated.add(result[0])  # not before, so that a resumed run repeats a lost evaluation
            self._write_evaluation(*result, times={})

    def _write_evaluation(
        self, step: int, metrics: dict[str, float], samples: list[LogRecord], times: dict[str, float]
    ) -> None:
        if self._gauges is not None:
            self._gauges.see(times)
        if self._run.metrics is not None:
            self._run.metrics.write(step, metrics | times)
            self._run.metrics.write_samples(step, samples)
        if self._run.times is not None:
            self._run.times.see(times)
        self._run.push(wait=False)
        self._cluster.metrics.log(step, metrics)
        self._warn({"step": step, **metrics})
        if step == self._schedule.max_steps and self._run.workdir is not None:
            return  # the summary's table shows this evaluation beside the first one
        records = f" ({plural(int(metrics['eval/records']), 'record')})" if "eval/records" in metrics else ""
        self._run.console.print(f"Evaluation after step {step}{records}: {brief(metrics)}")

    def close(self) -> None:
        """Writes the last step's metrics."""
        self._flush()
        if self._progress is not None:
            self._progress.close()

    def _flush(self) -> None:
        """Fetches and writes the metrics of the newest step, unless they are written already."""
        if self._late is None:
            return
        step, host, device, ended = self._late
        self._late = None
        with self._run.watchdog.stage("metrics"):  # the fetch waits for the device, which may hang
            values = {**host, **self._report.finished(fetched_means(device))}
        values.update(self._cluster.metrics.take())
        if self._gauges is not None:
            values |= self._gauges.of_step(values, _memory_peak(), ended)
        if self._run.metrics is not None:
            self._run.metrics.write(step, values)
        if self._run.times is not None:
            self._run.times.see(values)
        self._cluster.metrics.log(step, values)
        self._warn({"step": step, **values})
        self._check_finite(step, values)
        self._report.check(step, values)
        self._show(step, values)

    def _work(self) -> StepWork:
        """Returns the devices and the model's sizes, from which gauges compute the utilisation."""
        meshes = (self._cluster.actor_mesh, self._cluster.rollout_mesh)
        devices = {device for mesh in meshes for device in mesh.devices.flat}
        model, passes = self._cluster.model, Past(self._run.config).setting("algo.num_iterations", 1)
        trainable = parameters_of_a_token(self._cluster.state.params, model)
        peak = peak_flops(next(iter(devices)).device_kind)
        return StepWork(len(devices), peak, parameters_of_a_token(param_specs(model), model), trainable, passes)

    def _warn(self, *records: LogRecord) -> None:
        """Prints what podrl/rundir/checks.py finds in records; each finding is printed once in a run."""
        for finding in (finding for record in records for finding in self._examination.see(record)):
            self._run.console.print(f"Warning: {finding.report()}")

    def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
        """Raises ValueError after the third step in a row with an update whose gradient was not finite."""
        if not values.get("actor/nonfinite"):
            self._nonfinite = 0
            return
        self._nonfinite += 1
        if self._nonfinite >= 3:
            raise ValueError(
                f"Gradients were not finite in an update of each of the last {self._nonfinite} steps, up to step "
                f"{step}: lower trainer.learning_rate, set trainer.max_grad_norm, or look at samples.jsonl for "
                "degenerate text."
            )

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        if self._progress is None:
            self._progress = Progress(
                self._run.console,
                "step",
                self._start,
                self._schedule.max_steps,
                self._run.log_config.console_every,
                self._schedule.updates_per_step,
            )
        left = self._time_left.after(step, values["time/step"])
        shown = {short: values[name] for name, short in self._report.watched() if name in values}
        named = {name for name, _ in self._report.watched()}
        more = {name: value for name, value in values.items() if _in_table(name) and name not in named}
        self._progress.update(step, shown, left, more)


class HostRecorder:
    """Implements podrl.learner.loop.Recorder on a rollout host, which writes no metrics and no checkpoints."""

    def __init__(
        self,
        run: Run,
        schedule: Schedule,
        *,
        enter: Callable[[], JsonObject],
        evaluate: Evaluate | None,
        stopping: Callable[[], bool],
    ):
        """Stores the collaborators.

        Args:
          run: signals, the watchdog and the profiler.
          schedule: steps at which the loop saves, evaluates and stops.
          enter: function that asks the leader to let this host in; returns `step`, at which this host begins, and
            `evaluated`, the steps that are already evaluated.
          evaluate: scores the policy on this host's share of the held-out prompts; None disables evaluation.
          stopping: function that returns True once the run was asked to stop, in all processes of the job alike.
        """
        self._run, self._schedule = run, schedule
        self._enter, self._evaluate, self.stopping = enter, evaluate, stopping
        self._evaluated: set[int] = set()

    def restore(self) -> Start:
        with self._run.watchdog.stage("waiting for trainer 0 to restore"):
            start = self._enter()
        self._run.begin()
        self._evaluated = set(start["evaluated"])
        self._run.profiler.after(int(start["step"]))
        return Start(int(start["step"]), b"", (), self._evaluated)

    def stage(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._run.watchdog.stage(name)

    def record(self, step: int, experience: Any, metrics: Metrics) -> None:
        self._run.spans.pass_on(step, last=step == self._schedule.max_steps)
        self._run.profiler.after(step)

    def save(self, step: int, in_flight: Sequence[InFlight]) -> None:
        for batch in in_flight:
            batch.complete()
        self._run.notify_saved(step)

    def evaluate(self, policy: Policy, step: int) -> None:
        postponed = self.stopping() and step < self._schedule.max_steps
        if self._evaluate is None or step in self._evaluated or postponed:
            return
        with self._run.watchdog.stage("evaluation"):
            self._evaluate(policy, step)
        if step == self._schedule.max_steps:
            self._run.spans.pass_on(step, last=True)

    def rescue(self) -> None:
        return None

    def close(self) -> None:
        return None


def _in_table(name: str) -> bool:
    """True for metrics that the live table shows beside the watched ones: rewards, lengths, entropy, time of a step."""
    of_rewards = name.startswith("reward/") and name not in ("reward/std", "reward/kl", "reward/kl_coef")
    of_rewards = of_rewards and not name.startswith("reward/zero/")
    return of_rewards or name in ("completion/length_mean", "completion/truncated", "actor/entropy", "time/step")


def _memory_peak() -> float | None:
    """Returns the most bytes that a device of this process has held; None if the platform does not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if found and "peak_bytes_in_use" in found]
    return max(peaks, default=None)


def fetched_means(metrics: Metrics) -> dict[str, float]:
    """Fetches metrics to the host; a metric that is a list over the step's updates becomes the list's mean."""
    return {name: float(np.mean(value)) for name, value in jax.device_get(dict(metrics)).items()}
