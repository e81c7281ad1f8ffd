"""Writes a finished run's summary.json, curve.png and before/after table."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from podrl.rundir.console import print_table
from podrl.runtime.metrics import read_metrics
from podrl.runtime.storage import write_whole


def eval_records(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lists the records of metrics.jsonl that hold an evaluation, oldest first."""
    return [r for r in records if any(name.startswith("eval/") for name in r)]


def write_summary(workdir: pathlib.Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Writes summary.json and curve.png from metrics.jsonl; returns the summary.

    Args:
      workdir: the run directory.
      extra: facts only the process knows (seed, devices, commit, paths).
    """
    records = read_metrics(workdir)
    evals = eval_records(records)
    steps = [r for r in records if "time/step" in r]
    seconds = {
        name.removeprefix("time/"): round(sum(r.get(name) or 0.0 for r in steps), 3)
        for name in sorted({n for r in steps for n in r if n.startswith("time/")})
    }

    def rate(tokens: str, time: str) -> float | None:
        spent = sum(r.get(time) or 0.0 for r in steps)
        return round(sum(r.get(tokens) or 0.0 for r in steps) / spent, 1) if spent else None

    summary = {
        "steps": max((r["step"] for r in steps), default=0),
        "before": _eval_values(evals[0]) if evals else {},
        "after": _eval_values(evals[-1]) if evals else {},
        "evaluated_at": [r["step"] for r in evals],
        "throughput": {
            "rollout_tokens_per_s": rate("tokens/completion", "time/rollout"),
            "update_tokens_per_s": rate("tokens/completion", "time/update"),
            "step_tokens_per_s": rate("tokens/completion", "time/step"),
        },
        "seconds": seconds,
        **extra,
    }
    write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    if records:
        draw_curve(records, workdir / "curve.png")
    return summary


def draw_curve(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the reward per step on the left, evaluation accuracies on the right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rewards = [(r["step"], r["reward/mean"]) for r in records if r.get("reward/mean") is not None]
    if rewards:
        left.plot(*zip(*rewards, strict=True), color="tab:blue")
    left.set(xlabel="step", ylabel="mean reward", title="training reward")
    evals = eval_records(records)
    for name in sorted({n for r in evals for n in r if n.startswith("eval/") and n.endswith(_CURVES)}):
        points = [(r["step"], r[name]) for r in evals if r.get(name) is not None]
        right.plot(*zip(*points, strict=True), marker="o", label=name.removeprefix("eval/"))
    if evals:
        right.legend()
    right.set(xlabel="step", ylabel="share of held-out problems", title="evaluation", ylim=(0, 1.02))
    figure.savefig(path, dpi=110)


_CURVES = ("answer", "partial", "format", "pass")


def print_before_after(console: rich.console.Console, summary: Mapping[str, Any]) -> None:
    """Prints the final table: every evaluation metric before, after, and the change in points."""
    before, after = summary["before"], summary["after"]
    rows = []
    for name in after:
        start, end = before.get(name), after[name]
        if start is None or end is None or not name.endswith(_CURVES):
            continue
        rows.append([name, f"{100 * start:.1f}%", f"{100 * end:.1f}%", f"{100 * (end - start):+.1f}"])
    if rows:
        print_table(console, "Held-out problems", ["accuracy", "before", "after", "points"], rows)


def _eval_values(record: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}
