"""Measures the cost of recording samples, in a run that traces every second step: `python -m benchmarks trace`."""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from podrl.rundir import spans, trace
from podrl.rundir.metrics import LogConfig, read_metrics

_WARM = 3  # number of first steps that do not count: the steps that compile, and one more


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks trace", description=__doc__)
    parser.add_argument("--config", default="grpo_gemma.py")
    parser.add_argument("--steps", type=int, default=63, help="steps of the run, every second of which is traced")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Trains a configuration with every second step traced, and compares the medians of both kinds of steps.

    Returns:
      step_s, traced_step_s: median seconds of an untraced and of a traced step.
      traced_step_cost_s: median difference between a traced step and its neighbours.
      cost: share of a step's time that tracing takes by default, with one traced step in log.samples_every.
      bytes_per_traced_step, span_bytes_per_step: bytes that a traced step adds to the trace, and that a step adds to
        the spans.
      steps: number of traced steps that were compared.

    Raises:
      ValueError: there are too few steps, or the run failed.
    """
    args = _parser().parse_args(argv)
    if args.steps < _WARM + 2:
        raise ValueError(f"--steps={args.steps} must be at least {_WARM + 2}: the first ones compile.")
    with tempfile.TemporaryDirectory(prefix="podrl-trace-") as folder:
        workdir = pathlib.Path(folder, "run")
        overrides = [f"trainer.max_steps={args.steps}", "log.samples_every=2", "log.trace=sampled", "eval.problems=0"]
        command = [sys.executable, "-m", "podrl.launch", f"--config={args.config}", f"--workdir={workdir}"]
        command += [f"--config.{each}" for each in (*overrides, "checkpoint.every=0", *args.set)]
        # os.environ lacks the variables that C libraries of this process, such as libtpu, have set after Python
        # started.
        own = dict(os.environ)
        ended = subprocess.run(command, capture_output=True, text=True, env=own)
        if ended.returncode:
            raise ValueError(f"the run ended with exit code {ended.returncode}: {ended.stderr.strip()[-500:]}")
        seconds = {r["step"]: r["time/step"] for r in read_metrics(workdir) if "time/step" in r}
        files = [workdir / trace.FOLDER / trace.file_name(step) for step in trace.traced_steps(workdir)]
        sizes = [path.stat().st_size for path in files]
        span_bytes = (workdir / spans.NAME).stat().st_size
    return figures(seconds) | {
        "bytes_per_traced_step": statistics.median(sizes),
        "span_bytes_per_step": span_bytes / args.steps,
    }


def figures(seconds: dict[int, float]) -> dict[str, Any]:
    """Compares each traced step (its number is even) with the mean of its neighbours.

    The last step saves a checkpoint, so it is left out.
    """
    traced = [step for step in seconds if step % 2 == 0 and step > _WARM and step + 1 in seconds]
    traced = [step for step in traced if step + 1 < max(seconds)] or traced
    others = [step for step in seconds if step % 2 and step > _WARM]
    difference = statistics.median(seconds[s] - (seconds[s - 1] + seconds[s + 1]) / 2 for s in traced)
    plain = statistics.median(seconds[s] for s in others)
    return {
        "step_s": plain,
        "traced_step_s": statistics.median(seconds[s] for s in traced),
        "traced_step_cost_s": difference,
        "cost": difference / LogConfig().samples_every / plain,
        "steps": len(traced),
    }
