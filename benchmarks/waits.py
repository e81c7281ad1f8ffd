"""Compares the idle times of a run with the model of `podrl.plan --lengths`: `python -m benchmarks waits RUN`."""

import argparse
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from podrl.engine.config import RolloutConfig
from podrl.engine.sizes import engine_shape
from podrl.mesh.build import parse_mesh
from podrl.plan.simulate import Load, Speeds, read_lengths, simulate
from podrl.rundir import identity
from podrl.rundir.metrics import read_metrics
from podrl.rundir.trace import read_step, traced_steps

_WARM = 8  # number of first steps that do not count: they compile, and fill the windows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks waits", description=__doc__)
    parser.add_argument("run", help="directory of a run with topology=split, log.trace=all and its own meshes")
    parser.add_argument("--speeds", default="", metavar="RUN", help="another run, from which the seconds are taken")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Simulates a run by podrl.plan's model, from its lengths and the seconds of its calls, updates and moves.

    The lengths of samples and prompts come from the run. The seconds of a decode step, a prefill call, an update, a
    move, the rewards and a window's other work come from the same run, or from the run of --speeds. The decode steps
    and prefill calls of a window, and the idle shares, are computed by the model alone.

    Returns:
      max_staleness, samples, lanes, steps: sizes of the run; steps is the number of steps that count.
      decode_step_ms, prefill_call_ms, window_ms, plan_ms: times of a decode step, a prefill call, a window's other
        work, and the planning of a dispatch.
      The next figures exist twice, measured and by the model (with the prefix model_):
      decode_steps, prefill_calls: counts of a window.
      step_s: seconds of a step.
      trainer_idle, rollout_idle: share of a step in which the trainer waits for samples, and in which the rollout waits
        for weights.

    Raises:
      ValueError: there is no such run, or it has too few steps.
    """
    args = _parser().parse_args(argv)
    seen = _Seen(args.run)
    speeds = (_Seen(args.speeds) if args.speeds else seen).speeds()
    model = simulate(read_lengths(args.run), speeds, load=seen.load, staleness=seen.staleness)
    return {
        "max_staleness": seen.staleness,
        "samples": seen.load.samples,
        "lanes": seen.load.lanes,
        "steps": len(seen.steps),
        "decode_step_ms": 1e3 * speeds.decode_s,
        "prefill_call_ms": 1e3 * speeds.call_s,
        "window_ms": 1e3 * speeds.begin_s,
        "plan_ms": 1e3 * speeds.plan_s,
        "decode_steps": seen.mean("perf/decode_steps"),
        "model_decode_steps": model.decode_steps,
        "prefill_calls": seen.mean("perf/prefill_calls"),
        "model_prefill_calls": model.prefill_calls,
        "step_s": seen.mean("time/step"),
        "model_step_s": model.step_s,
        "trainer_idle": seen.mean("perf/waits_samples"),
        "model_trainer_idle": model.trainer_idle,
        "rollout_idle": seen.mean("perf/waits_rollout"),
        "model_rollout_idle": model.rollout_idle,
    }


class _Seen:
    """Reads the measurements of a run, except those of its first steps.

    Attributes:
      staleness: the run's `max_staleness`.
      load: sizes of the run's engine and batches (podrl.plan.simulate.Load).
      steps: steps that are read.
    """

    def __init__(self, path: str):
        """Reads a run directory.

        Raises:
          ValueError: the run has too few steps, a step without a trace, no times of prefill, or a mesh of open size.
        """
        place = pathlib.Path(path)
        config = identity.read(place, place / "checkpoints")
        if config is None:
            raise ValueError(f"{path} is not a run directory: it holds no config.json. Give its --workdir.")
        section = "ppo" if config["algorithm"] == "ppo" else "grpo"
        self.staleness: int = config[section]["max_staleness"]
        self._metrics: Mapping[int, Any] = {r["step"]: r for r in read_metrics(place) if "time/rollout" in r}
        self.steps = sorted(self._metrics)[_WARM:]
        traced = set(traced_steps(place))
        if len(self.steps) < _WARM or not traced.issuperset(self._metrics):
            raise ValueError(
                f"{path} has {len(self._metrics)} steps, {len(traced)} of them traced: {2 * _WARM} are needed, all "
                "traced (log.trace=all, log.trace_mb large enough)."
            )
        if not self.mean("time/prefill"):
            raise ValueError(
                f"{path} has no time/prefill: give a run with rollout.clock='tokens', whose samples take two "
                "dispatches or more (rollout.steps_per_dispatch)."
            )
        first = read_step(place, self.steps[0])
        prompt_B = first.samples["prompt_length"]
        named = (field.name for field in dataclasses.fields(RolloutConfig))
        given = {name: value for name in named if (value := config["rollout"].get(name)) is not None}
        given["max_prompt_length"] = given.get("max_prompt_length") or int(prompt_B.max())  # 0: the data's longest
        rollout = RolloutConfig(**given)
        sizes = parse_mesh(config["roles"]["rollout"]["mesh"], key="roles.rollout.mesh", auto="data=-1")
        shards = math.prod(sizes[:3])  # data, expert, fsdp
        if min(sizes) < 1:
            raise ValueError(
                f"{path} has roles.rollout.mesh={config['roles']['rollout']['mesh']!r}, which leaves its size to the "
                "devices: write it out in the run's command, such as data=4."
            )
        samples = len(prompt_B)
        lanes = engine_shape(rollout, shards).lanes * shards
        group_B = first.samples["group"].tolist()
        group_size = max(map(group_B.count, set(group_B)))
        self.load = Load(rollout, lanes, shards, samples, group_size, round(float(prompt_B.mean())))

    def mean(self, name: str) -> float:
        """Returns the mean over steps of a number in metrics.jsonl."""
        return statistics.fmean(self._metrics[step].get(name, 0.0) for step in self.steps)

    def per(self, name: str, count: str = "") -> float:
        """Returns the median over steps of one number divided by another.

        It is a median, because other programs may slow single steps.
        """
        return statistics.median(
            self._metrics[step].get(name, 0.0) / self._metrics[step].get(count, 1.0) for step in self.steps
        )

    def speeds(self) -> Speeds:
        """Measures the seconds of a decode step, of a prefill call, of a dispatch, and of the work done once a step."""
        steps = [self._metrics[step] for step in self.steps]
        return Speeds(
            decode_s=self.per("time/decode", "perf/decode_steps"),
            call_s=self.per("time/prefill", "perf/prefill_calls"),
            update_s=self.per("time/update"),
            move_s=self.per("time/publish"),
            begin_s=statistics.median(s["time/rollout"] - s["time/decode"] - s["time/prefill"] for s in steps),
            plan_s=self.per("time/planning", "perf/dispatches"),
            score_s=self.per("time/reward"),
        )
