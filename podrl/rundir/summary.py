"""Writes a finished run's summary.json, and prints its before/after table and where its files are."""

import contextlib
import json
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence

import rich.console

from podrl.config import plural
from podrl.mappings import JsonObject, LogRecord
from podrl.rundir import gauges, intervals
from podrl.rundir.console import print_table
from podrl.rundir.intervals import format_interval, is_share
from podrl.rundir.metrics import read_metrics
from podrl.storage.seal import seal, unseal
from podrl.storage.storage import write_whole


def eval_records(records: Sequence[LogRecord]) -> list[LogRecord]:
    """Lists the records of metrics.jsonl that hold an evaluation, oldest first."""
    return [r for r in records if any(name.startswith("eval/") for name in r)]


def write_summary(workdir: pathlib.Path, extra: JsonObject) -> JsonObject:
    """Writes summary.json from metrics.jsonl; returns the summary.

    Args:
      workdir: the run directory.
      extra: further entries: facts that only the process knows, such as seed, devices, commit and paths.
    """
    records = read_metrics(workdir)
    evals = eval_records(records)
    steps = [r for r in records if "time/step" in r]
    seconds = {
        name.removeprefix("time/"): round(sum(r.get(name) or 0.0 for r in records), 3)
        for name in sorted({n for r in records for n in r if n.startswith("time/")})
    }

    # Compiling takes minutes, so steps that compiled count only if every step compiled, as in a short run.
    timed = [r for r in steps if "perf/compile" not in r] or steps

    def rate(tokens: str, time: str) -> float | None:
        spent = sum(r.get(time) or 0.0 for r in timed)
        return round(sum(r.get(tokens) or 0.0 for r in timed) / spent, 1) if spent else None

    last = max((r["step"] for r in steps), default=0)
    summary = {
        "steps": last,
        "before": _eval_values(evals[0]) if evals else {},
        "after": _eval_values(evals[-1]) if evals else {},
        **(_paired_changes(workdir, evals[0]["step"], evals[-1]["step"]) if evals else {"change": {}, "unchanged": []}),
        "evaluated_at": [r["step"] for r in evals],
        "throughput": {
            "rollout_tokens_per_s": rate("tokens/completion", "time/rollout"),
            "update_tokens_per_s": rate("tokens/completion", "time/update"),
            "step_tokens_per_s": rate("tokens/completion", "time/step"),
        },
        "seconds": seconds,
        **_starts_and_wall_seconds(workdir, last),
        **extra,
    }
    write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _starts_and_wall_seconds(workdir: pathlib.Path, last: int) -> dict[str, float]:
    """Returns the number of starts of the run, and the wall seconds from the first and from the newest start to now.

    A start that continues from the last step trains nothing; then the seconds of an earlier summary.json are returned.
    """
    if not (starts := gauges.read_starts(workdir)):
        return {}
    seconds = dict(zip(("wall_s", "wall_s_last_start"), gauges.ages(starts), strict=True))
    path = workdir / "summary.json"
    if starts[-1].step == last and path.exists():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            earlier = json.loads(path.read_text())
            seconds = {name: float(earlier[name]) for name in seconds}
    return {"starts": len(starts), **{name: round(s, 1) for name, s in seconds.items()}}


_FOLDER = "evaluations"


def keep_evaluation(workdir: pathlib.Path, step: int, means: Mapping[str, Sequence[float | None]]) -> None:
    """Writes each record's means in an evaluation to evaluations/STEP.json; keeps the first and the newest evaluation.

    Args:
      workdir: the run directory.
      step: step that was evaluated.
      means: values of the records, one per record, by metric; None for a record without a value.
    """
    place = workdir / _FOLDER
    place.mkdir(exist_ok=True)
    write_whole(place / f"{step}.json", json.dumps(seal(means)) + "\n")
    for between in sorted(place.glob("*.json"), key=lambda path: int(path.stem))[1:-1]:
        between.unlink()


def _paired_changes(workdir: pathlib.Path, first: int, last: int) -> JsonObject:
    """Compares two evaluations record by record.

    Returns:
      {'change': paired 95 % interval of the change of each mean, by metric; 'unchanged': metrics that have the same
      value in both evaluations for every record}. Both are empty if an evaluation's file is missing or damaged.
    """
    nothing = {"change": {}, "unchanged": []}
    paths = [workdir / _FOLDER / f"{step}.json" for step in (first, last)]
    if first == last or not all(path.exists() for path in paths):
        return nothing
    try:
        was, now = (unseal(dict(json.loads(path.read_text()))) for path in paths)
    except (ValueError, TypeError):  # the file is damaged, so the table shows the wider, unpaired interval
        return nothing
    intervals_by_name: dict[str, tuple[float, float] | None] = {}
    unchanged = []
    for name in was:
        pairs = list(zip(was[name], now.get(name, ()), strict=False))
        changes = [b - a for a, b in pairs if a is not None and b is not None]
        if len(changes) < 2 or len(was[name]) != len(now[name]):
            continue
        if not any(changes):
            unchanged.append(name.removeprefix("eval/"))
        if is_share(name):
            intervals_by_name[name] = intervals.share_difference(changes)
        else:
            error = statistics.stdev(changes) / math.sqrt(len(changes))
            intervals_by_name[name] = intervals.mean(statistics.fmean(changes), error)
    change = {name.removeprefix("eval/"): ends for name, ends in intervals_by_name.items() if ends is not None}
    return {"change": change, "unchanged": unchanged}


def brief(metrics: Mapping[str, float]) -> str:
    """Returns one line with an evaluation's accuracies and total rewards; the final table shows every mean."""
    means = {n: v for n, v in _means(_eval_values(metrics)).items() if not _BESIDE.search(n)}
    return "  ".join(f"{n} {v:.1%}" if is_share(n) else f"{n} {v:.3f}" for n, v in means.items())


_BESIDE = re.compile(r"_reward/|_(partial|format|pass)$")  # rewards by function, and means that explain an accuracy


_RECORDS, _ERROR = "records", "error/"


def print_before_after(console: rich.console.Console, summary: JsonObject) -> None:
    """Prints the final table: every mean in the first and the last evaluation, and its change, with 95 % intervals."""
    before, after = summary["before"], summary["after"]
    rows = []
    for name, end in _means(after).items():
        start = before.get(name)
        if end is None:
            continue
        share = is_share(name)
        unit, scale, digits = ("%", 100, 1) if share else ("", 1, 3)
        cells = [
            f"{scale * values[name]:.{digits}f}{unit}{format_interval(interval_of(values, name), percent=share)}"
            if values.get(name) is not None
            else "not measured"
            for values in (before, after)
        ]
        if start is None:  # the first evaluation lacks this mean, because it did not have this set of records
            rows.append([name, *cells, ""])
            continue
        if name in summary.get("unchanged", ()):  # an interval around 0 would suggest that something may have changed
            rows.append([name, *cells, "no record changed"])
            continue
        paired = summary.get("change", {}).get(name) or _change(before, after, name)
        moved = format_interval(paired, percent=share, signed=True)
        change = f"{scale * (end - start):+.{digits}f}{' points' * share}{moved}"
        rows.append([name, *cells, change])
    if rows:
        count = after.get(_RECORDS)
        title = "Held-out records" if count is None else f"{plural(int(count), 'held-out record')} [95% intervals]"
        print_table(console, title, ["mean", "before", "after", "change"], rows)


def interval_of(values: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Returns the 95 % interval of a mean of an evaluation; None if the records do not determine an interval.

    Args:
      values: metrics of the evaluation, without 'eval/' before their names.
      name: name of the mean.
    """
    error = values.get(f"{_ERROR}{name}")
    if not is_share(name):
        return intervals.mean(values[name], error)
    prefix = name.rpartition("/")[0]
    records = values.get(f"{prefix}/{_RECORDS}" if prefix else _RECORDS)
    return None if not records else intervals.share(values[name], error, records)


def _change(before: Mapping[str, float], after: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Returns the interval of a change from the intervals of both means, as if the means came from different records.

    Newcombe (1998), method 10.
    """
    was, now, start, end = interval_of(before, name), interval_of(after, name), before[name], after[name]
    if was is None or now is None:
        return None
    low = end - start - math.hypot(end - now[0], was[1] - start)
    return low, end - start + math.hypot(now[1] - end, start - was[0])


def _means(values: Mapping[str, float]) -> dict[str, float]:
    records = (_RECORDS, f"/{_RECORDS}")
    return {name: value for name, value in values.items() if not name.startswith(_ERROR) and not name.endswith(records)}


def _eval_values(record: LogRecord) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}


def print_files(console: rich.console.Console, workdir: pathlib.Path, place: str, summary: JsonObject) -> None:
    """Prints the paths of a finished run's files, and its speed.

    Args:
      workdir: local directory of the run's files.
      place: the run directory as the user names it.
      summary: content of summary.json.
    """
    rates = {k: v for k, v in summary["throughput"].items() if v}
    for name, rate in rates.items():
        console.print(f"{name.replace('_', ' ')}: {rate:,.0f}")
    spent = {name: s for name, s in summary["seconds"].items() if name != "step" and s >= 0.05}
    console.print("seconds by stage: " + ", ".join(f"{name} {s:.1f}" for name, s in spent.items()))
    console.print(f"Written to {place}:")
    samples = f"some prompts, completions, rewards; the lowest rewards: python -m podrl.view {place} --samples=10"
    if not _has_scored_samples(workdir / "samples.jsonl"):
        samples = "some texts trained on, and completions of evaluations"
    for name, what in (
        ("summary.json", "before/after, throughput, time split"),
        ("metrics.jsonl", "one object per step"),
        ("samples.jsonl", samples),
        ("report.html", f"the run as a page; while a run goes on: python -m podrl.view {place}"),
        ("tensorboard/", "the same metrics as events"),
        ("mlflow.db", "the same metrics in MLflow's database"),
        ("checkpoints/", f"export with: python -m podrl.export --workdir={place} --out=DIR"),
    ):
        if (workdir / name).exists() or name == "checkpoints/":
            console.print(f"  {name:15} {what}")


def _has_scored_samples(path: pathlib.Path) -> bool:
    """Returns True if a samples.jsonl has samples of training with their rewards."""
    if not path.exists():
        return False
    with path.open(encoding="utf-8") as lines:
        return any('"reward":' in line and '"evaluation":' not in line for line in lines)
