"""Compares who waited for whom in a run with the model of `podrl.plan --lengths`: `python -m podrl.bench waits RUN`."""

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.plan.simulate import Speeds, read_lengths, simulate, window_steps
from podrl.rollout.config import RolloutConfig
from podrl.rundir import identity
from podrl.rundir.trace import read_step, traced_steps
from podrl.runtime.metrics import read_metrics

_WARM = 8  # steps that compile and fill the windows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="podrl.bench waits", description=__doc__)
    parser.add_argument("run", help="directory of a run with topology=split, log.trace=all and its own meshes")
    parser.add_argument("--speeds", default="", metavar="RUN", help="another run, whose seconds are taken")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Plays a run's lengths with the model, at the seconds that decode steps, updates and moves took in it.

    Of the run are taken: lengths of samples, seconds of a decode step (those of all windows over the decode steps that
    the model counts for their tokens), of an update, of a move, of rewards. Idle shares follow from the model alone.

    Returns:
      max_staleness, samples, lanes, steps (that counted), decode_step_ms, and, measured and of the model: step_s,
      trainer_idle (share of a step in which the trainer waits for samples), rollout_idle (and the rollout for weights).

    Raises:
      ValueError: no such run, or one of too few steps.
    """
    args = _parser().parse_args(argv)
    seen = _Seen(args.run)
    speeds = (_Seen(args.speeds) if args.speeds else seen).speeds()
    model = simulate(
        read_lengths(args.run),
        speeds,
        rollout=seen.rollout,
        samples=seen.samples,
        lanes=seen.rollout.lanes,
        staleness=seen.staleness,
    )
    return {
        "max_staleness": seen.staleness,
        "samples": seen.samples,
        "lanes": seen.rollout.lanes,
        "steps": len(seen.steps),
        "decode_step_ms": 1e3 * speeds.decode_s,
        "step_s": seen.mean("time/step"),
        "model_step_s": model.step_s,
        "trainer_idle": seen.mean("perf/waits_samples"),
        "model_trainer_idle": model.trainer_idle,
        "rollout_idle": seen.mean("perf/waits_rollout"),
        "model_rollout_idle": model.rollout_idle,
    }


class _Seen:
    """What a run's directory says of its steps after the first ones."""

    def __init__(self, path: str):
        """Reads it.

        Raises:
          ValueError: too few steps, or no trace of each.
        """
        self._path = pathlib.Path(path)
        config = identity.read(self._path, self._path / "checkpoints")
        if config is None:
            raise ValueError(f"{path} is not a run directory: it holds no config.json. Give what --workdir was.")
        section = "ppo" if config["algorithm"] == "ppo" else "grpo"
        self.staleness: int = config[section]["max_staleness"]
        names = ("lanes", "steps_per_dispatch", "max_tokens_to_generate", "kv_cache_size", "window_tokens")
        given = {name: value for name in names if (value := config["rollout"].get(name)) is not None}
        self.rollout = RolloutConfig(**given)
        self._metrics: Mapping[int, Any] = {r["step"]: r for r in read_metrics(self._path) if "time/rollout" in r}
        self.steps = sorted(self._metrics)[_WARM:]
        traced = set(traced_steps(self._path))
        if len(self.steps) < _WARM or not traced.issuperset(self._metrics):
            raise ValueError(
                f"{path} has {len(self._metrics)} steps, {len(traced)} of them traced: {2 * _WARM} are needed, all "
                "traced (log.trace=all, log.trace_mb large enough)."
            )
        self.samples = len(read_step(self._path, self.steps[0]).samples["length"])

    def mean(self, name: str) -> float:
        """The mean of a number of metrics.jsonl."""
        return statistics.fmean(self._metrics[step].get(name, 0.0) for step in self.steps)

    def speeds(self) -> Speeds:
        """Seconds of a decode step and of what is done once in a step; prefill is in that of a decode step."""
        shares = {step: self._versions(step) for step in sorted(self._metrics)}
        counted, seconds = 0, 0.0
        for step in self.steps[: len(self.steps) - self.staleness]:
            version = step - 1 - min(self.staleness, 1)
            parts, left = {}, {}
            for batch in range(step, step + max(self.staleness, 1)):
                at = shares[batch]
                parts[batch] = [drawn.get(version, 0) for drawn in at]
                left[batch] = [sum(n for v, n in drawn.items() if v >= version) for drawn in at]
            counted += window_steps(parts, left, self.rollout, self.rollout.lanes)
            seconds += self._metrics[step]["time/rollout"]
        return Speeds(
            decode_s=seconds / counted,
            begin_s=0.0,
            update_s=self.mean("time/update"),
            move_s=self.mean("time/publish"),
            score_s=self.mean("time/reward"),
        )

    def _versions(self, step: int) -> list[dict[int, int]]:
        """For each sample of a step: how many tokens it drew under each version of the weights."""
        traced = read_step(self._path, step)
        ends = np.cumsum(traced.samples["length"])
        found = []
        for first, last in itertools.pairwise([0, *ends.tolist()]):
            sampled = traced.tokens["mask"][first:last] > 0
            versions, counts = np.unique(traced.tokens["version"][first:last][sampled], return_counts=True)
            found.append(dict(zip(versions.tolist(), counts.tolist(), strict=True)))
        return found
