"""Writes a finished run's summary.json and before/after table."""

import json
import math
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
    """Writes summary.json from metrics.jsonl; returns the summary.

    Args:
      workdir: the run directory.
      extra: facts only the process knows (seed, devices, commit, paths).
    """
    records = read_metrics(workdir)
    evals = eval_records(records)
    steps = [r for r in records if "time/step" in r]
    seconds = {
        name.removeprefix("time/"): round(sum(r.get(name) or 0.0 for r in records), 3)
        for name in sorted({n for r in records for n in r if n.startswith("time/")})
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
    return summary


def eval_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """The means of an evaluation, without their errors and the number of records, by names without 'eval/'."""
    return _means(_eval_values(metrics))


_SHARES = ("answer", "partial", "format", "pass", "majority", "pair_accuracy")
_RECORDS, _ERROR = "records", "error/"
_Z = 1.96  # standard errors on either side of the mean that hold 95 % of a normal distribution


def print_before_after(console: rich.console.Console, summary: Mapping[str, Any]) -> None:
    """Prints the final table: every mean of the evaluation before and after, and the change, with 95 % intervals."""
    before, after = summary["before"], summary["after"]
    rows = []
    for name, end in _means(after).items():
        start = before.get(name)
        if start is None or end is None:
            continue
        was, now = (_half_width(values, name) for values in (before, after))
        moved = math.hypot(was, now)
        if _is_share(name):
            was, now, moved, start, end = (100 * value for value in (was, now, moved, start, end))
            cells = f"{start:.1f}% ± {was:.1f}", f"{end:.1f}% ± {now:.1f}", f"{end - start:+.1f} points ± {moved:.1f}"
        else:
            cells = f"{start:.3f} ± {was:.3f}", f"{end:.3f} ± {now:.3f}", f"{end - start:+.3f} ± {moved:.3f}"
        rows.append([name, *cells])
    if rows:
        count = after.get(_RECORDS)
        title = "Held-out records" if count is None else f"{count:.0f} held-out records, ± 95% intervals"
        print_table(console, title, ["mean", "before", "after", "change"], rows)


def _is_share(name: str) -> bool:
    """True for accuracies, in which 1 is every record; else the unit is that of the reward functions."""
    return name.endswith(_SHARES) and "_reward" not in name


def _half_width(values: Mapping[str, float], name: str) -> float:
    """Half of a mean's 95 % interval; NaN where its standard error is not known, as of a single record."""
    error = values.get(f"{_ERROR}{name}")
    return math.nan if error is None else _Z * error


def _means(values: Mapping[str, float]) -> dict[str, float]:
    records = (_RECORDS, f"/{_RECORDS}")
    return {name: value for name, value in values.items() if not name.startswith(_ERROR) and not name.endswith(records)}


def _eval_values(record: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}
