"""A run directory as the page reads it: named files only, also while they grow, also where some are damaged."""

import dataclasses
import functools
import itertools
import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.groups import member_of, spread
from podrl.rundir import gauges, trace
from podrl.rundir import spans as spans_file
from podrl.rundir.about import NAME as ABOUT
from podrl.rundir.findings import examine
from podrl.rundir.identity import DEFAULTS, last_step
from podrl.storage.seal import unseal
from podrl.storage.storage import Place, is_remote, locate
from podrl.view.lines import Lines, Series
from podrl.view.units import unit

STOPS = ("end", "length", "stop string", "failed", "environment", "deadline", "calls")
_LIVE_S = 90.0  # a run whose metrics are older and that has no summary is taken to have stopped
_TICK = 1e-7  # seconds
# What a plan predicts, by the stage that is measured: its name here, and its key in the plan.
_PLANNED = {
    "step": ("step", "step_s"),
    "rollout": ("rollout", "rollout_s"),
    "update": ("score and update", "trainer_s"),
    "publish": ("publish", "move_s"),
}
_SHOWN = 4000  # spans of an answer


class RunFiles:
    """One run directory.

    Attributes:
      place: the run's directory as the user named it.
      name: last part of the place.
      series: the run's metrics.
    """

    def __init__(self, place: str, name: str = ""):
        """Reads nothing yet; `name` is shown, by default the last part of the path.

        Raises:
          ValueError: there is no run.
        """
        self.place, self._path = place, locate(place)
        self.name = name or self._path.name or place
        if not any((self._path / name).exists() for name in ("config.json", "metrics.jsonl")):
            raise ValueError(f"{place} is not a run directory: it has neither config.json nor metrics.jsonl.")
        self.series, self._spans = Series(), []
        self._found: tuple[int, dict[str, Any]] | None = None
        self._examining = threading.Lock()
        self._samples: list[Mapping[str, Any]] = []
        self._metrics = Lines(self._path / "metrics.jsonl", self.series.take, self.series.forget)
        self._span_lines = Lines(self._path / spans_file.NAME, self._take_span, self._spans.clear)
        self._sample_lines = Lines(self._path / "samples.jsonl", self._samples.append, self._samples.clear)

    def update(self) -> None:
        """Reads what is new in metrics.jsonl."""
        self._metrics.update()

    def spans(self) -> list[dict[str, Any]]:
        """All spans, in the order they were written."""
        self._span_lines.update()
        return self._spans

    def _take_span(self, record: Mapping[str, Any]) -> None:
        texts = all(isinstance(record.get(key), str) for key in ("host", "lane", "name"))
        if texts and all(type(record.get(key)) in (int, float) for key in ("start", "s")):
            self._spans.append(dict(record))

    def describe(self) -> dict[str, Any]:
        """Facts that every view shows: where the run is, whether it goes on, the newest numbers, what is damaged."""
        self.update()
        columns, summary = self.series.columns, self.json("summary.json")
        most = last_step(self.config())
        ended = bool(summary) and summary.get("steps") == self.series.last_step
        age = self._age()
        return {
            "name": self.name,
            "place": self.place,
            "step": self.series.last_step,
            "max_steps": most,
            "state": "ended" if ended else "live" if age is not None and age < _LIVE_S else "stopped",
            "left_s": self._left(most) if not ended else None,
            "metrics": sorted(columns),
            "units": {name: unit(name) for name in sorted(columns)},
            "last": {
                name: next((v for v in reversed(column[1]) if v is not None), None) for name, column in columns.items()
            },
            "summary": summary,
            "traced": self.traced(),
            "problems": self.problems(),
        }

    def findings(self) -> dict[str, Any]:
        """Returns the doctor's findings in the present records; the doctor looks again after each step of the run.

        Returns:
          found: the findings' fields; problem: why the doctor cannot look, '' where it can.
        """
        self.update()
        with self._examining:
            if self._found is None or self._found[0] != self.series.last_step:
                step, problem, found = self.series.last_step, "", list[dict[str, Any]]()
                try:
                    found = [dataclasses.asdict(finding) for finding in examine(self.place)]
                except ValueError as error:
                    problem = str(error)
                self._found = step, {"found": found, "problem": problem}
            return self._found[1]

    def problems(self) -> list[str]:
        """Sentences on files that could not be read in full."""
        files = (
            ("metrics.jsonl", self._metrics),
            ("spans.jsonl", self._span_lines),
            ("samples.jsonl", self._sample_lines),
        )
        said = [f"{name}: {lines.bad} lines cannot be read." for name, lines in files if lines.bad]
        if not self.config():
            said.append("config.json cannot be read.")
        return said

    def _age(self) -> float | None:
        if is_remote(self._path):
            return 0.0
        try:
            return time.time() - (self._path / "metrics.jsonl").stat().st_mtime  # type: ignore[union-attr]
        except OSError:
            return None

    def _left(self, most: int | None) -> float | None:
        seconds = [s for s in self.series.columns.get("time/step", ([], []))[1][-20:] if s is not None]
        if not seconds or most is None:
            return None
        return max(most - self.series.last_step, 0) * float(np.median(seconds))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; {} where it is not there or damaged."""
        try:
            found = json.loads((self._path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def config(self) -> dict[str, Any]:
        """The resolved configuration; {} where it is not there or damaged."""
        found = self.json("config.json")
        try:
            return dict(unseal(found)) if found else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def settings(self) -> dict[str, Any]:
        """Returns the contents of /run: configuration, its defaults, counted sizes, summary and plan."""
        return {
            "config": self.config(),
            "defaults": self.json(DEFAULTS),
            "about": self.json(ABOUT),
            "summary": self.json("summary.json"),
            "plan": self.plan(),
            "planned_for": self.planned_for(),
        }

    def plan(self) -> list[dict[str, Any]]:
        """Rows of the plan that `log.plan` named beside what was measured: name, unit, planned, measured, how, ratio.

        How it was planned: predicted (seconds, from every program's roofline), counted (memory, by the compiler) or
        assumed (tokens of a completion). Measured are medians of the last 20 steps, and the most memory that a device
        held. None stands for not known.
        """
        self.update()
        plan, rows = self.json(gauges.PLAN), []
        for name, (text, key) in _PLANNED.items():
            rows.append([text, "s", _at(plan, "step", key), self._median(f"time/{name}"), "predicted"])
        programs = programs if isinstance(programs := plan.get("programs"), list) else []
        held = [peak + (_at(each, "resident") or 0.0) for each in programs if (peak := _at(each, "peak")) is not None]
        peaks = [p for p in self.series.columns.get("perf/memory_peak", ([], []))[1] if p is not None]
        memory = max(held, default=0.0) / 2**30, max(peaks, default=None)
        rows.append(["memory, fullest device", "GiB", *memory, "counted"])
        length = _at(plan, "batch", "completion"), self._median("completion/length_mean")
        rows.append(["tokens of a completion", "", *length, "assumed"])
        found = [dict(zip(("name", "unit", "planned", "measured", "how"), row, strict=True)) for row in rows]
        return [
            row | {"ratio": row["measured"] / row["planned"] if row["measured"] is not None else None}
            for row in found
            if row["planned"]
        ]

    def planned_for(self) -> str:
        """The topologies that the plan is for; '' where there is none."""
        plan = self.json(gauges.PLAN)
        sides = [plan.get(side) for side in ("trainer", "rollout")]
        return " and ".join(dict.fromkeys(side for side in sides if isinstance(side, str)))

    def _median(self, metric: str) -> float | None:
        """The median of a metric's newest 20 values."""
        values = [value for value in self.series.columns.get(metric, ([], []))[1][-20:] if value is not None]
        return float(np.median(values)) if values else None

    # The trace.

    def traced(self) -> list[int]:
        """The steps that have a trace."""
        try:
            return trace.traced_steps(self._path)
        except OSError:
            return []

    def step(self, step: int) -> trace.TracedStep:
        """The trace of a step.

        Raises:
          ValueError: there is none, or it is damaged.
        """
        return _read(self._path, step, self._changed(step))

    def _changed(self, step: int) -> float:
        if is_remote(self._path):
            return 0.0
        try:
            found: Any = (self._path / trace.FOLDER / trace.file_name(step)).stat()
            return found.st_mtime
        except OSError:
            return 0.0

    def group(self, step: int, group: int | None = None) -> dict[str, Any]:
        """The samples of one prompt, with every number of every token; None or -1 for that whose rewards differ most.

        Raises:
          ValueError: there is no trace of the step, or no such group in it.
        """
        traced = self.step(step)
        group_B, reward_B = traced.samples["group"], traced.samples["reward"]
        groups = len(traced.prompts)
        if group in (None, -1) and groups:
            group = int(group_B[np.nan_to_num(spread(reward_B, group_B)).argmax()])
        if group is None or not 0 <= group < groups:
            raise ValueError(f"step {step} has groups 0 to {groups - 1}, and no {group}.")
        members = np.flatnonzero(group_B == group).tolist()
        return {
            "step": step,
            "group": group,
            "groups": groups,
            "scored": _scored(traced),
            "prompt": traced.prompts[group],
            "fields": {name: values[group] for name, values in traced.fields.items() if len(values) > group},
            "reward_names": list(traced.reward_names),
            "clip": self._clip(),
            "samples": [_sample(traced, b) for b in members],
            "rewards": [_mean(reward_B[group_B == g]) for g in range(groups)],
        }

    def _clip(self) -> list[float]:
        section = next((self.config()[name] for name in ("grpo", "ppo") if name in self.config()), {})
        epsilon = section.get("epsilon") or 0.2
        return [epsilon if section.get(key) is None else section[key] for key in ("epsilon_low", "epsilon_high")]

    def samples(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Samples that a search finds (see `found`), a page at a time; `offset` says from which on."""
        found, offset = self.found(wanted), _number_of(wanted, "offset", int) or 0
        return {"count": len(found), "offset": offset, "rows": found[offset : offset + 100]}

    def found(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Samples that a search finds, of the last 50 steps that are traced.

        Args:
          wanted: q (text), step, stop, low and high (reward), failed (a tool call), sort (a column; '-' before it for
            largest first).
        """
        steps = self.traced()
        if wanted.get("step"):
            steps = [step for step in steps if str(step) == wanted["step"]]
        found: list[dict[str, Any]] = []
        bounds = (_number_of(wanted, "low", float), _number_of(wanted, "high", float))
        for step in reversed(steps[-50:]):
            try:
                found += [row for row in _rows(self.step(step)) if _fits(row, wanted, *bounds)]
            except ValueError as error:
                found.append({"step": step, "problem": str(error)})
        if not self.traced():
            found = [row for row in self._plain_rows() if _fits(row, wanted, *bounds)]
        key = wanted.get("sort", "")
        if name := key.removeprefix("-"):
            known = [row for row in found if row.get(name) is not None]
            found = sorted(known, key=lambda row: row[name], reverse=key.startswith("-"))
        return found

    def _plain_rows(self) -> list[dict[str, Any]]:
        self._sample_lines.update()
        rows = []
        for record in reversed(self._samples[-5000:]):
            text = record.get("completion", record.get("text", ""))
            rows.append({"step": record["step"], "prompt": str(record.get("prompt", "")), "completion": str(text)})
            rows[-1] |= {"truth": _written(record.get("truth")), "rewards": _by_function(record)}
            rows[-1] |= {"reward": reward if type(reward := record.get("reward")) in (int, float) else None}
        return rows

    # The timeline.

    def timeline(self, first: int | None, last: int | None, seconds: int | None = None) -> dict[str, Any]:
        """Spans of steps, by default of a typical one, with the critical path of each step.

        Args:
          first: the first step; None for the one before `last`.
          last: the last step; None for the newest.
          seconds: length of the time shown, up to the end of the last step; `first` is then the step
            in which that time begins.
        """
        every = self.spans()
        steps = sorted({span["step"] for span in every})
        if not steps:
            return {"first": 0, "last": 0, "steps": [0, 0], "spans": [], "paths": {}, "left_out": 0}
        if first is last is seconds is None:
            first = last = typical_step(every)
        end = steps[-1] if last is None else last
        begin = max(end - 1, steps[0]) if first is None else first
        if seconds is not None:
            until = max((span["start"] + span["s"] for span in every if span["step"] <= end), default=0.0)
            late = (span["step"] for span in every if span["step"] <= end and span["start"] >= until - seconds)
            begin = min(late, default=end)
        shown = [span for span in every if begin <= span["step"] <= end]
        longest = sorted(shown, key=lambda span: -span["s"])[:_SHOWN]
        longest = [span | {"row": row} for span, row in zip(longest, spans_file.rows(longest), strict=True)]
        unseen = sum(span["left_out"] for span in shown if type(span.get("left_out")) is int)
        by_step: dict[int, list[dict[str, Any]]] = {}
        for span in longest:
            by_step.setdefault(span["step"], []).append(span)
        paths = {step: critical_path(found) for step, found in list(by_step.items())[-20:]}
        return {
            "first": begin,
            "last": end,
            "steps": [steps[0], steps[-1]],
            "spans": sorted(longest, key=lambda span: span["start"]),
            "paths": paths,
            "left_out": len(shown) - len(longest) + unseen,
        }


def typical_step(spans: Sequence[Mapping[str, Any]]) -> int:
    """Returns the step, of the last 20, that took the median time; the newest of several, the first only if alone."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span["step"]] = max(ends.get(span["step"], 0.0), span["start"] + span["s"])
    took = [(round(ends[step] - ends[before], 2), step) for before, step in itertools.pairwise(sorted(ends))][-20:]
    median = statistics.median_low(seconds for seconds, _ in took) if took else 0.0
    return max((step for seconds, step in took if seconds == median), default=min(ends))


def is_wait(span: Mapping[str, Any]) -> bool:
    """True for a span in which a process waits for another, or its loop for its own generation."""
    return span["name"].startswith("waiting") or (span["lane"] == "loop" and span["name"] == "rollout")


def critical_path(spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Goes back from the end of a step: what was being done that the rest waited for, as (name, host, start, s).

    Calls of tools are no part of it: other samples go on beside them.
    """
    working = [s for s in spans if not is_wait(s) and s["lane"] != spans_file.TOOLS]
    busy = [(s["start"], s["start"] + s["s"], s) for s in working if s["s"] > 0]
    path: list[dict[str, Any]] = []
    now = max((end for _, end, _ in busy), default=0.0)
    while len(path) < 200 and any(start < now - _TICK for start, _, _ in busy):
        inside = [each for each in busy if each[0] < now - _TICK and each[1] >= now - _TICK]
        if not inside:
            now = max(end for _, end, _ in busy if end < now - _TICK)
            continue
        start, _, span = max(inside, key=lambda each: (each[0], -each[1]))
        nested = [end for s, end, o in busy if o["host"] == span["host"] and s >= start and end < now - _TICK]
        begin = max([start, *nested])
        path.append(
            {"name": span["name"], "host": span["host"], "lane": span["lane"], "start": begin, "s": now - begin}
        )
        now = begin
    return path[::-1]


@functools.lru_cache(maxsize=16)
def _read(path: Place, step: int, changed: float) -> trace.TracedStep:
    del changed  # another file than the one that was read
    return trace.read_step(path, step)


def _sample(traced: trace.TracedStep, b: int) -> dict[str, Any]:
    first, length = int(traced.first[b]), int(traced.samples["length"][b])
    tokens = {name: values[first : first + length] for name, values in traced.tokens.items()}
    ids = tokens.pop("tokens")
    return {
        "index": b,
        "reward": _number(traced.samples["reward"][b]),
        "rewards": [_number(r) for r in traced.samples["rewards"][:, b]],
        "stop": _stop(traced, b),
        "prompt_length": int(traced.samples["prompt_length"][b]),
        "length": length,
        "completion": traced.completions[b],
        "turns": list(traced.episodes[b].get("turns", ())),
        "ids": ids.tolist(),
        "text": [traced.pieces.get(int(i), f"[{i}]") for i in ids],
        "tokens": {name: [_number(value) for value in values] for name, values in tokens.items()},
        "mismatch": _mismatch(traced, b),
    }


def _rows(traced: trace.TracedStep) -> list[dict[str, Any]]:
    group_B, member_B = traced.samples["group"].tolist(), member_of(traced.samples["group"]).tolist()
    answers = traced.fields.get("answer", ())
    return [
        {
            "step": traced.step,
            "group": group_B[b],
            "sample": member_B[b],
            "prompt": traced.prompts[group_B[b]],
            "completion": completion,
            "truth": _written(answers[group_B[b]]) if group_B[b] < len(answers) else "",
            "reward": _number(traced.samples["reward"][b]),
            "rewards": {
                name: _number(reward)
                for name, reward in zip(traced.reward_names, traced.samples["rewards"][:, b], strict=False)
            },
            "stop": _stop(traced, b),
            "length": int(traced.samples["length"][b] - traced.samples["prompt_length"][b]),
            "failed": any(turn.get("failed") for turn in traced.episodes[b].get("turns", ())),
            "mismatch": _mismatch(traced, b),
        }
        for b, completion in enumerate(traced.completions)
    ]


def _written(answer: Any) -> str:
    """A reference answer as text; '' where there is none."""
    return "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _by_function(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the reward of each function, by name, from a record of samples.jsonl."""
    if isinstance(given := record.get("rewards"), Mapping):  # of an evaluation
        named = {str(name).removeprefix("reward/"): value for name, value in given.items() if name != "reward"}
    else:
        named = {name: value for name, value in record.items() if name not in ("step", "reward", "truth")}
    return {name: _number(value) or 0.0 for name, value in named.items() if type(value) in (int, float)}


def _number_of(wanted: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        return kind(wanted[name]) if wanted.get(name) else None
    except ValueError:
        raise ValueError(f"{name}={wanted[name][:40]!r} is not a number.") from None


def _fits(row: Mapping[str, Any], wanted: Mapping[str, str], low: float | None, high: float | None) -> bool:
    text, reward = f"{row['prompt']}\n{row['completion']}".lower(), row.get("reward")
    return (
        wanted.get("q", "").lower() in text
        and (not wanted.get("step") or str(row["step"]) == wanted["step"])
        and (not wanted.get("stop") or row.get("stop") == wanted["stop"])
        and (not wanted.get("failed") or bool(row.get("failed")))
        and (low is None or (reward is not None and reward >= low))
        and (high is None or (reward is not None and reward <= high))
    )


def _stop(traced: trace.TracedStep, b: int) -> str:
    code = int(traced.samples["stop"][b])
    return STOPS[code] if 0 <= code < len(STOPS) else str(code)


def _mismatch(traced: trace.TracedStep, b: int) -> float | None:
    """Mean distance of the trainer's log-probabilities from the sampler's; None where the trainer's are not known."""
    first = int(traced.first[b])
    there = slice(first, first + int(traced.samples["length"][b]))
    distance = np.abs(traced.tokens["trainer_logprob"][there] - traced.tokens["logprob"][there])
    known = distance[np.isfinite(distance)]
    return float(known.mean()) if known.size else None


def _at(content: Any, *path: str) -> float | None:
    """A number in an object of a JSON file; None where there is none."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return float(content) if type(content) in (int, float) and np.isfinite(content) else None


def _scored(traced: trace.TracedStep) -> int:
    """Counts the groups, from the first on, that the trainer scored for the trace."""
    known = np.flatnonzero(np.isfinite(traced.tokens["trainer_logprob"]))
    last = int(np.searchsorted(traced.first, known[-1], side="right") - 1) if known.size else -1
    return int(traced.samples["group"][last]) + 1 if known.size else 0


def _mean(values: np.ndarray) -> float | None:
    return _number(np.nanmean(values)) if np.isfinite(values).any() else None


def _number(value: Any) -> float | None:
    value = float(value)
    return float(f"{value:.6g}") if np.isfinite(value) else None
