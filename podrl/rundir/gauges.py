"""Gauges of a run's speed: computes perf/* of a step from its times, its tokens, and the times of earlier steps."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from podrl.mappings import LogRecord
from podrl.storage.regular import regular

_STARTS = "starts.jsonl"
PLAN = "plan.json"  # file of a run directory with a copy of the plan that log.plan names
_BEGINNING = ("time/start-up", "time/restoring", "time/opening the run directory")
# The kind of lost time (time outside useful steps) that each metric measures.
_LOST_TIME = {
    "perf/lost_start": "start",
    "perf/lost_compile": "compile",
    "perf/lost_checkpoint": "checkpoint",
    "perf/lost_evaluation": "evaluation",
}
# For each metric that compares a measured time with planned seconds: the plan's key with these seconds.
_PLANNED = {
    "perf/plan_step": "step_s",
    "perf/plan_rollout": "rollout_s",
    "perf/plan_update": "trainer_s",
    "perf/plan_publish": "move_s",
}


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The computation that a step of a run needs, and the devices that do it.

    Attributes:
      devices: number of devices of both meshes that belong to this process's cluster.
      peak: peak operations per second of one device; 0 if not known.
      parameters: number of the policy's parameters that every token passes, adapters included.
      trainable: number of the policy's parameters that every token passes and that have a gradient.
      passes: number of updates that each sample takes part in per step.
    """

    devices: int
    peak: float
    parameters: int
    trainable: int
    passes: int = 1

    def flops(self, values: Mapping[str, float]) -> float:
        """Returns the operations that a step needs.

        A trained token takes 2 operations per parameter in the forward pass, 2 in the backward pass, and 2 more per
        trainable parameter. A token of the rollout takes 2 per parameter.

        Args:
          values: metrics of the step; only tokens/* are read.
        """
        trained = (4 * self.parameters + 2 * self.trainable) * self.passes * values.get("tokens/all", 0.0)
        sampled = values.get("tokens/prompt", 0.0) + values.get("tokens/completion", 0.0)
        return trained + 2 * self.parameters * sampled


class Gauges:
    """Turns the times of a run's steps into shares and rates; counts the times of earlier starts of the run too."""

    def __init__(
        self,
        work: StepWork,
        *,
        plan: Mapping[str, float],
        earlier: Iterable[LogRecord],
        first_start: float,
        now: Callable[[], float] = time.time,
    ):
        """Adds up the times of earlier starts.

        Args:
          work: the computation of a step, and the devices.
          plan: planned seconds from `read_plan`; {} for no plan.
          earlier: records of metrics.jsonl from earlier starts, for the steps that the run keeps.
          first_start: time of the run's first start, in seconds since 1970.
          now: function that returns the present time in seconds since 1970.
        """
        self._work, self._plan, self._first_start, self._now = work, plan, first_start, now
        self._spent = dict.fromkeys(("useful", *_LOST_TIME.values()), 0.0)
        for record in earlier:
            self.see({name: value for name, value in record.items() if isinstance(value, int | float)})

    def see(self, values: Mapping[str, float]) -> None:
        """Adds the times in the record of a step or an evaluation to the sums of the run."""
        spent = self._spent
        spent["start"] += sum(values.get(name, 0.0) for name in _BEGINNING)
        spent["evaluation"] += values.get("time/evaluation", 0.0)
        # The record of an evaluation has no time/step. Its times are those since the last step, or since the start.
        if "time/step" not in values:
            spent["checkpoint"] += values.get("time/checkpoint", 0.0)
            counted = (*_BEGINNING, "time/evaluation", "time/checkpoint")
            kind = "start" if any(name in values for name in _BEGINNING) else "useful"
            spent[kind] += sum(s for name, s in values.items() if name.startswith("time/") and name not in counted)
            return
        step = values["time/step"]
        compiled = min(values.get("perf/compile", 0.0), step)
        saved = min(values.get("time/checkpoint", 0.0), step - compiled)
        spent["compile"] += compiled
        spent["checkpoint"] += saved
        spent["useful"] += step - compiled - saved

    def of_step(self, values: Mapping[str, float], memory: float | None, at: float | None = None) -> dict[str, float]:
        """Computes perf/* of a step, after adding the step's times to the sums of the run.

        Args:
          values: metrics of the step; perf/compile is among them if something was compiled.
          memory: largest number of bytes that a device of this process held; None if the platform does not say.
          at: time of the step's end, in seconds since 1970; None for now.

        Returns:
          perf/* by name: tokens per second and device, GiB (perf/memory_peak), ratios of measured to planned seconds
          (perf/plan_*), and shares from 0 to 1.
        """
        self.see(values)
        step = max(values["time/step"], 1e-9)
        tokens = values.get("tokens/completion", values.get("tokens/all", 0.0))
        perf = {"perf/tokens_per_s_per_device": tokens / step / self._work.devices}
        if self._work.peak:
            perf["perf/mfu"] = self._work.flops(values) / (step * self._work.devices * self._work.peak)
        if memory is not None:
            perf["perf/memory_peak"] = memory / 2**30
        wall = max((self._now() if at is None else at) - self._first_start, sum(self._spent.values()), 1e-9)
        perf["perf/goodput"] = self._spent["useful"] / wall
        perf |= {name: self._spent[kind] / wall for name, kind in _LOST_TIME.items()}
        perf["perf/lost_restart"] = 1.0 - sum(self._spent.values()) / wall
        if "time/rollout" in values:
            perf["perf/waits_samples"] = values.get("time/waiting", 0.0) / step
            busy = values["time/rollout"] + values.get("time/reward", 0.0)
            perf["perf/waits_rollout"] = max(0.0, 1.0 - busy / step)
        perf["perf/waits_weights"] = values.get("time/publish", 0.0) / step
        host = sum(values.get(name, 0.0) for name in ("time/data", "time/metrics", "time/other"))
        perf["perf/waits_host"] = host / step
        measured = {name: values.get(name.replace("perf/plan_", "time/")) for name in self._plan}
        return perf | {name: value / self._plan[name] for name, value in measured.items() if value is not None}


def first_start(workdir: pathlib.Path | None, began: float, step: int) -> float:
    """Records this start of the run in starts.jsonl; returns the time of the run's first start, in seconds since 1970.

    Args:
      workdir: the run directory; None for a run without a directory, in which this start is the first.
      began: time of this start, in seconds since 1970.
      step: the step from which this start continues.
    """
    if workdir is None:
        return began
    earlier = read_starts(workdir)
    with (workdir / _STARTS).open("a") as file:
        file.write(json.dumps({"time": began, "step": step}) + "\n")
    return min((began, *(start.time for start in earlier)))


class RunStart(NamedTuple):
    """A start of a run: its time in seconds since 1970, and the step from which it continued."""

    time: float
    step: int


def read_starts(workdir: pathlib.Path) -> list[RunStart]:
    """Reads the starts of a run from starts.jsonl, in their order; a damaged line is left out."""
    path, found = workdir / _STARTS, list[RunStart]()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            found.append(RunStart(float(values["time"]), int(values["step"])))
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    return found


def ages(starts: Sequence[RunStart]) -> tuple[float, float]:
    """Returns the seconds from the first start and from the newest start of a run to now."""
    now = time.time()
    return max(now - min(start.time for start in starts), 0.0), max(now - starts[-1].time, 0.0)


def read_plan(path: str | os.PathLike) -> dict[str, float]:
    """Reads the planned seconds of a step's parts from a file of `podrl.plan --json`.

    Args:
      path: path of the file; '' for no file.

    Returns:
      Planned seconds by the metric that compares the measured seconds with them; {} for no file.

    Raises:
      ValueError: the file cannot be read or is not such a plan.
    """
    if not os.fspath(path):
        return {}
    try:
        step = json.loads(regular(pathlib.Path(path)).read_text())["step"]
        planned = {name: float(step[key]) for name, key in _PLANNED.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"log.plan={os.fspath(path)!r} is not a plan ({type(error).__name__}: {error}): write one with "
            "`python -m podrl.plan --config=... --trainer=... --json > plan.json`, or leave log.plan empty."
        ) from None
    return {name: seconds for name, seconds in planned.items() if seconds > 0}
