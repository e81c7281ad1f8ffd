"""Reads a run directory for the page: only files of known names, which may still grow or be damaged."""

import dataclasses
import functools
import itertools
import json
import statistics
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.groups import member_of, spread
from podrl.mappings import JsonObject, LogRecord, Span, TurnRecord
from podrl.rundir import gauges, trace
from podrl.rundir import spans as spans_file
from podrl.rundir.about import NAME as ABOUT
from podrl.rundir.findings import examine
from podrl.rundir.identity import DEFAULTS, last_step
from podrl.storage.seal import unseal
from podrl.storage.storage import Place, is_remote, locate
from podrl.view.lines import JsonLinesReader, Series
from podrl.view.liveness import state
from podrl.view.units import unit

STOPS = ("end", "length", "stop string", "failed", "environment", "deadline", "calls")
_TICK = 1e-7  # seconds by which ends of spans may differ and still count as equal
# For each measured stage: (name of the planned quantity on the page, key of this quantity in the plan).
_PLANNED = {
    "step": ("step", "step_s"),
    "rollout": ("rollout", "rollout_s"),
    "update": ("score and update", "trainer_s"),
    "publish": ("publish", "move_s"),
}
_SEARCHED = 50  # number of the newest traced steps whose samples are searched
_SHOWN = 4000  # largest number of spans in an answer


class RunFiles:
    """The files of one run directory.

    Attributes:
      place: the run directory as the user named it.
      name: name of the run on the page.
      series: the run's metrics.
    """

    def __init__(self, place: str, name: str = ""):
        """Stores the place; `name` is the run's name on the page, by default the last part of the path.

        Raises:
          ValueError: `place` is not a run directory.
        """
        self.place, self._path = place, locate(place)
        self.name = name or self._path.name or place
        if not any((self._path / name).exists() for name in ("config.json", "metrics.jsonl")):
            raise ValueError(f"{place} is not a run directory: it has neither config.json nor metrics.jsonl.")
        self.series, self._spans = Series(), []
        self._found: tuple[int, JsonObject] | None = None
        self._examining = threading.Lock()
        self._samples: list[LogRecord] = []
        self._metrics = JsonLinesReader(self._path / "metrics.jsonl", self.series.take, self.series.forget)
        self._span_lines = JsonLinesReader(self._path / spans_file.NAME, self._take_span, self._spans.clear)
        self._sample_lines = JsonLinesReader(self._path / "samples.jsonl", self._samples.append, self._samples.clear)

    def update(self) -> None:
        """Reads the new lines of metrics.jsonl."""
        self._metrics.update()

    def spans(self) -> list[Span]:
        """Returns all spans, in the order in which they were written."""
        self._span_lines.update()
        return self._spans

    def _take_span(self, record: JsonObject) -> None:
        texts = all(isinstance(record.get(key), str) for key in ("host", "lane", "name"))
        if texts and all(type(record.get(key)) in (int, float) for key in ("start", "s")):
            self._spans.append(dict(record))

    def describe(self) -> dict[str, Any]:
        """Returns the facts that every view shows: the run's step and state, its newest numbers, its damaged files."""
        self.update()
        columns, summary = self.series.columns, self.json("summary.json")
        most = last_step(self.config())
        ended, step_s = bool(summary) and summary.get("steps") == self.series.last_step, self._median("time/step")
        word, note = state(self._path, finished=ended, step_s=step_s or 0.0)
        return {
            "name": self.name,
            "place": self.place,
            "step": self.series.last_step,
            "max_steps": most,
            "state": word,
            "note": note,
            "left_s": None
            if ended or step_s is None or most is None
            else max(most - self.series.last_step, 0) * step_s,
            "metrics": sorted(columns),
            "units": {name: unit(name) for name in sorted(columns)},
            "last": {
                name: next((v for v in reversed(column[1]) if v is not None), None) for name, column in columns.items()
            },
            "summary": summary,
            "traced": self.traced(),
            "problems": self.problems(),
        }

    def findings(self) -> JsonObject:
        """Returns the doctor's findings in the present records; the doctor looks again after each step of the run.

        Returns:
          {'found': fields of each finding, 'problem': reason why the doctor cannot read the run, '' if it can}.
        """
        self.update()
        with self._examining:
            if self._found is None or self._found[0] != self.series.last_step:
                step, problem, found = self.series.last_step, "", list[JsonObject]()
                try:
                    found = [dataclasses.asdict(finding) for finding in examine(self.place)]
                except ValueError as error:
                    problem = str(error)
                self._found = step, {"found": found, "problem": problem}
            return self._found[1]

    def problems(self) -> list[str]:
        """Returns a sentence about each file that could not be read in full."""
        files = (
            ("metrics.jsonl", self._metrics),
            ("spans.jsonl", self._span_lines),
            ("samples.jsonl", self._sample_lines),
        )
        sentences = [f"{name}: {lines.bad} lines cannot be read." for name, lines in files if lines.bad]
        if not self.config():
            sentences.append("config.json cannot be read.")
        return sentences

    def json(self, name: str) -> JsonObject:
        """Returns the object in a JSON file of the run; {} if the file is missing or damaged."""
        try:
            found = json.loads((self._path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def config(self) -> JsonObject:
        """Returns the run's configuration; {} if config.json is missing or damaged."""
        found = self.json("config.json")
        try:
            return dict(unseal(found)) if found else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def settings(self) -> JsonObject:
        """Returns the contents of the view /run: configuration, defaults, the page about the run, summary and plan."""
        return {
            "config": self.config(),
            "defaults": self.json(DEFAULTS),
            "about": self.json(ABOUT),
            "summary": self.json("summary.json"),
            "plan": self.plan(),
            "planned_for": self.planned_for(),
        }

    def plan(self) -> list[JsonObject]:
        """Compares the plan of `log.plan` with measurements; each row has name, unit, planned, measured, how and ratio.

        Entry `how` says how a quantity was planned: 'predicted' (seconds, from every program's roofline), 'counted'
        (memory, by the compiler) or 'assumed' (tokens of a completion). Measured values are medians of the last 20
        steps, and the largest memory of a device; None if not known. `ratio` is measured / planned.
        """
        self.update()
        plan, rows = self.json(gauges.PLAN), []
        for name, (text, key) in _PLANNED.items():
            rows.append([text, "s", _at(plan, "step", key), self._median(f"time/{name}"), "predicted"])
        programs = programs if isinstance(programs := plan.get("programs"), list) else []
        bytes_of_programs = [
            peak + (_at(each, "resident") or 0.0) for each in programs if (peak := _at(each, "peak")) is not None
        ]
        peaks = [p for p in self.series.columns.get("perf/memory_peak", ([], []))[1] if p is not None]
        memory = max(bytes_of_programs, default=0.0) / 2**30, max(peaks, default=None)
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
        """Returns the topologies that the plan is for; '' if there is no plan."""
        plan = self.json(gauges.PLAN)
        sides = [plan.get(side) for side in ("trainer", "rollout")]
        return " and ".join(dict.fromkeys(side for side in sides if isinstance(side, str)))

    def _median(self, metric: str) -> float | None:
        """Returns the median of a metric's newest 20 values; None if it has no values."""
        values = [value for value in self.series.columns.get(metric, ([], []))[1][-20:] if value is not None]
        return float(np.median(values)) if values else None

    # The trace.

    def traced(self) -> list[int]:
        """Lists the steps that have a trace, ascending."""
        try:
            return trace.traced_steps(self._path)
        except OSError:
            return []

    def step(self, step: int) -> trace.TracedStep:
        """Returns the trace of a step.

        Raises:
          ValueError: the step has no trace, or the trace is damaged.
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

    def group(self, step: int, group: int | None = None) -> JsonObject:
        """Returns the samples of one prompt, with all numbers of all tokens.

        Args:
          step: step of the trace.
          group: number of the prompt in the step; None or -1 for the prompt whose rewards differ most.

        Raises:
          ValueError: the step has no trace, or no such group.
        """
        traced = self.step(step)
        group_B, reward_B = traced.samples["group"], traced.samples["reward"]
        groups = len(traced.prompts)
        if group in (None, -1) and groups:
            group = int(group_B[np.nan_to_num(spread(reward_B, group_B)).argmax()])
        if group is None or not 0 <= group < groups:
            held = f"groups 0 to {groups - 1}" if groups else "no groups"
            raise ValueError(f"the trace of step {step} holds {held}: there is no group {group}.")
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

    def samples(self, wanted: Mapping[str, str]) -> JsonObject:
        """Returns 100 of the samples in `found`, beginning at the number `wanted["offset"]`, and the total count.

        An offset beyond the last sample gives the last hundred that has samples. `left_out` is True if older steps were
        not searched.
        """
        found = self.found(wanted)
        offset = min(max(_number_of(wanted, "offset", int) or 0, 0), max(len(found) - 1, 0) // 100 * 100)
        left_out = len(self.traced()) > _SEARCHED and not wanted.get("step")
        return {"count": len(found), "offset": offset, "left_out": left_out, "rows": found[offset : offset + 100]}

    def found(self, wanted: Mapping[str, str]) -> list[JsonObject]:
        """Returns the samples that a search finds in the newest 50 traced steps, newest step first.

        If no step is traced, the newest 5,000 lines of samples.jsonl are searched.

        Args:
          wanted: conditions by name: q (text), step, stop, low and high (bounds of the reward), failed (a call of a
            tool failed), sort (column to sort by; with '-' before it the largest value comes first).

        Raises:
          ValueError: low or high is not a number.
        """
        steps = self.traced()
        if wanted.get("step"):
            steps = [step for step in steps if str(step) == wanted["step"]]
        found: list[JsonObject] = []
        bounds = (_number_of(wanted, "low", float), _number_of(wanted, "high", float))
        for step in reversed(steps[-_SEARCHED:]):
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

    def _plain_rows(self) -> list[JsonObject]:
        self._sample_lines.update()
        rows = []
        for record in reversed(self._samples[-5000:]):
            text = record.get("completion", record.get("text", ""))
            rows.append({"step": record["step"], "prompt": str(record.get("prompt", "")), "completion": str(text)})
            rows[-1] |= {
                "given": "text" in record,
                "truth": _written(record.get("truth")),
                "rewards": _by_function(record),
            }
            rows[-1] |= {"branches": branches(record.get("turns") or ())}
            rows[-1] |= {"reward": reward if type(reward := record.get("reward")) in (int, float) else None}
        return rows

    # The timeline.

    def timeline(self, first: int | None, last: int | None, seconds: int | None = None) -> JsonObject:
        """Returns the spans of some steps, and the critical path of each of the last 20 of these steps.

        If the steps have more than 4,000 spans, only the longest are returned.

        If all arguments are None, the step is a typical one.

        Args:
          first: the first step; None for the step before `last`. Ignored if `seconds` is set.
          last: the last step; None for the newest step.
          seconds: length of the time to show, which ends with the last step; the first step is the step in which this
            time begins. None for whole steps.
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
        inside = [span for span in every if begin <= span["step"] <= end]
        longest = sorted(inside, key=lambda span: -span["s"])[:_SHOWN]
        longest = [span | {"row": row} for span, row in zip(longest, spans_file.rows(longest), strict=True)]
        unseen = sum(span["left_out"] for span in inside if type(span.get("left_out")) is int)
        by_step: dict[int, list[Span]] = {}
        for span in longest:
            by_step.setdefault(span["step"], []).append(span)
        paths = {step: critical_path(found) for step, found in list(by_step.items())[-20:]}
        return {
            "first": begin,
            "last": end,
            "steps": [steps[0], steps[-1]],
            "spans": sorted(longest, key=lambda span: span["start"]),
            "paths": paths,
            "left_out": len(inside) - len(longest) + unseen,
        }


def typical_step(spans: Sequence[Span]) -> int:
    """Returns the step that took the median time of the last 20 steps; the newest one if several steps took this time.

    The length of the first step is not known, so the first step is returned only if there is no other step.
    """
    ends: dict[int, float] = {}
    for span in spans:
        ends[span["step"]] = max(ends.get(span["step"], 0.0), span["start"] + span["s"])
    took = [(round(ends[step] - ends[before], 2), step) for before, step in itertools.pairwise(sorted(ends))][-20:]
    median = statistics.median_low(seconds for seconds, _ in took) if took else 0.0
    return max((step for seconds, step in took if seconds == median), default=min(ends))


def is_wait(span: Span) -> bool:
    """Returns True for a span in which a process waits for another one, or its loop waits for its own generation."""
    return span["name"].startswith("waiting") or (span["lane"] == "loop" and span["name"] == "rollout")


def critical_path(spans: Sequence[Span]) -> list[JsonObject]:
    """Returns the spans of a step's critical path, oldest first: the work for which all other work waited.

    The path is followed backwards from the end of the step. Each of its parts has a name, a host, a lane, a start, and
    `s`, its length in seconds. Calls of tools are not part of the path, because other samples go on during a call.
    """
    working = [s for s in spans if not is_wait(s) and s["lane"] != spans_file.TOOLS]
    busy = [(s["start"], s["start"] + s["s"], s) for s in working if s["s"] > 0]
    path: list[JsonObject] = []
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
    del changed  # used only as part of the cache's key, so that a changed file is read again
    return trace.read_step(path, step)


def _sample(traced: trace.TracedStep, b: int) -> JsonObject:
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


def _rows(traced: trace.TracedStep) -> list[JsonObject]:
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
            "branches": branches(traced.episodes[b].get("turns", ())),
        }
        for b, completion in enumerate(traced.completions)
    ]


def branches(turns: Sequence[TurnRecord]) -> list[JsonObject]:
    """Returns the branches of a sample's turns as trees; no branches if the sample has one context.

    Each branch has the fields of podrl.rollout.branches.Branches.joined, its `turns`, and its own `branches`, which
    share more first tokens with it than with any earlier branch.
    """
    trees: list[JsonObject] = []
    known: dict[object, JsonObject] = {}
    branch = None
    for turn in turns:
        if began := turn.get("branch"):
            branch = {**began, "turns": [], "branches": []}
            (known[began["of"]]["branches"] if began["of"] in known else trees).append(branch)
            known[began["piece"]] = branch
        if branch is not None:
            fields = ("by", "text", "tokens", "reward", "failed")
            branch["turns"].append({name: turn[name] for name in fields if name in turn})
    return trees


def _written(answer: object) -> str:
    """Returns a reference answer as text; '' if there is none."""
    return "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _by_function(record: LogRecord) -> dict[str, float]:
    """Returns the reward of each function, by name, from a record of samples.jsonl."""
    if isinstance(rewards := record.get("rewards"), Mapping):  # only the record of an evaluation has this mapping
        named = {str(name).removeprefix("reward/"): value for name, value in rewards.items() if name != "reward"}
    else:
        named = {name: value for name, value in record.items() if name not in ("step", "reward", "truth")}
    return {name: _number(value) or 0.0 for name, value in named.items() if type(value) in (int, float)}


def _number_of(wanted: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        return kind(wanted[name]) if wanted.get(name) else None
    except ValueError:
        raise ValueError(f"{name}={wanted[name][:40]!r} must be a number (offset: a whole one).") from None


def _fits(row: JsonObject, wanted: Mapping[str, str], low: float | None, high: float | None) -> bool:
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
    """Returns the mean distance between the trainer's and the sampler's log-probabilities of a sample, in nats.

    Returns None if the trainer's log-probabilities are not known.
    """
    first = int(traced.first[b])
    there = slice(first, first + int(traced.samples["length"][b]))
    distance = np.abs(traced.tokens["trainer_logprob"][there] - traced.tokens["logprob"][there])
    known = distance[np.isfinite(distance)]
    return float(known.mean()) if known.size else None


def _at(content: Any, *path: str) -> float | None:
    """Returns the number at a path of keys in nested JSON objects; None if there is no finite number."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return float(content) if type(content) in (int, float) and np.isfinite(content) else None


def _scored(traced: trace.TracedStep) -> int:
    """Returns the number of groups, counted from the first, that the trainer scored for the trace."""
    known = np.flatnonzero(np.isfinite(traced.tokens["trainer_logprob"]))
    last = int(np.searchsorted(traced.first, known[-1], side="right") - 1) if known.size else -1
    return int(traced.samples["group"][last]) + 1 if known.size else 0


def _mean(values: np.ndarray) -> float | None:
    return _number(np.nanmean(values)) if np.isfinite(values).any() else None


def _number(value: Any) -> float | None:
    value = float(value)
    return float(f"{value:.6g}") if np.isfinite(value) else None
