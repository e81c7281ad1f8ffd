"""Records of a run: metrics.jsonl, samples.jsonl, and the trackers that `log.to` names."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from podrl.config import Count, Natural, Positive, section
from podrl.mappings import ConfigValues, LogRecord, Metrics, SavedState
from podrl.rundir.sinks import End, SinkName, open_sink
from podrl.storage.storage import locate, write_whole

log = logging.getLogger("podrl.metrics")


@section(
    "log",
    former={
        "tensorboard": "it is the name 'tensorboard' in log.to now, () for no tracker.",
        "wandb": "it is the name 'wandb' in log.to now; the mode is the variable WANDB_MODE, online or offline.",
        "wandb_project": "it is log.project now.",
    },
)
@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Settings of logging: outputs besides metrics.jsonl.

    Attributes:
      to: trackers that get metrics and samples too: 'tensorboard', 'wandb', 'mlflow' (the last two are extras).
      project: name of the project in W&B, and of the experiment in MLflow.
      samples_every: number of steps between two steps whose samples are written to samples.jsonl; 0 writes none.
      trace: steps whose samples are recorded token by token in the folder trace: none ('off'), the first and every
        `samples_every`-th ('sampled'), or all ('all', 'updates'). 'updates' also computes weight and clip of every
        token before each update, at the cost of a forward pass. Spans are recorded with every value except 'off'.
      trace_mb: bound on the size of the folder trace, in MiB; the oldest steps make room for new steps.
      samples: number of completions written to samples.jsonl each time.
      plan: file that `podrl.plan --json` wrote for this job, for perf/plan_*; '' for none.
      console_every: number of steps between printed lines if the output is not a terminal.
      stall_s: seconds that a stage may take before all stacks are printed; after four times as long the process exits
        with code 42.
    """

    to: tuple[SinkName, ...] = ("tensorboard",)
    project: str = "podrl"
    samples_every: Natural = 10
    samples: Natural = 4
    trace: Literal["off", "sampled", "all", "updates"] = "sampled"
    trace_mb: Count = 512
    plan: str = ""
    console_every: Count = 10
    stall_s: Positive = 900.0

    def __post_init__(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ValueError(f"log.to={self.to} names a tracker twice: name each once.")


MetricsLogger = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """Appends one JSON object per step to metrics.jsonl, and passes it to every tracker.

    A resumed run passes `start`: lines of step `start` and of later steps are dropped first, so that each step is
    written once. A full disk does not stop the run: lines wait in memory until there is space.

    Attributes:
      problems: sentences that name the files in which a resumed run did not find the lines that it had written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: LogConfig,
        *,
        start: int,
        run_config: ConfigValues,
        marks: SavedState | None = None,
    ):
        """Opens the files.

        Args:
          workdir: the run directory, or its local copy.
          config: settings that name the trackers.
          start: the first step that will be written.
          run_config: configuration of the run, for W&B and MLflow.
          marks: result of the method `marks` after step `start` - 1, to compare the files with; None compares nothing.
        """
        self.workdir = pathlib.Path(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._sinks = [
            open_sink(name, self.workdir, start=start, project=config.project, run_config=run_config)
            for name in config.to
        ]
        marks = marks or {}
        self._metrics, self._samples = (
            JsonLinesFile(self.workdir / name, start, marks.get(name)) for name in ("metrics.jsonl", "samples.jsonl")
        )
        self.problems = [
            f"{file.path.name} {file.difference}: its records of the steps up to {start - 1} are missing or changed. "
            "The run goes on."
            for file in (self._metrics, self._samples)
            if file.difference
        ]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one record; values that are not finite are written as null, so that every line is valid JSON."""
        values = {name: float(value) for name, value in metrics.items()}
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.write({"step": step, **clean})
        for sink in self._sinks:
            sink.write(step, values)

    def write_samples(self, step: int, samples: Iterable[LogRecord]) -> None:
        """Appends prompts, completions and rewards to samples.jsonl."""
        samples = list(samples)
        for sample in samples:
            self._samples.write({"step": step, **sample})
        for sink in self._sinks if samples else ():
            sink.write_samples(step, samples)

    def marks(self) -> SavedState:
        """Returns size and checksum of each file's content, for the checkpoint of the last step written."""
        return {file.path.name: file.mark() for file in (self._metrics, self._samples)}

    def close(self, end: End = "finished") -> None:
        """Closes the files, and tells the trackers how the run ended."""
        self._metrics.close()
        self._samples.close()
        for sink in self._sinks:
            sink.close(end)


def read_metrics(workdir: str | os.PathLike) -> list[LogRecord]:
    """Reads all records of metrics.jsonl, oldest first; [] if there is no such file."""
    return read_records(workdir, "metrics.jsonl")


def read_records(workdir: str | os.PathLike, name: str) -> list[LogRecord]:
    """Reads the records in the valid lines of a run directory's file, local or in a bucket; [] if there is no file."""
    path = locate(workdir) / name
    return [record for _, record in _records(path.read_bytes() if path.exists() else b"")]


def _records(content: bytes) -> Iterator[tuple[bytes, LogRecord]]:
    """Yields (line, record) of every valid line: a JSON object with an integer step.

    Lines are split at '\\n' only: str.splitlines would also split at U+2028 and other characters that JSON strings may
    hold unescaped.
    """
    for line in content.split(b"\n"):
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            yield line, record


class JsonLinesFile:
    """A file of JSON lines that is appended to; lines that cannot be written wait in memory for the next try.

    Attributes:
      path: the file.
      size: number of bytes of all lines so far, including waiting lines.
      difference: how the lines in the file differ from the mark, such as 'is gone'; '' if they do not differ.
    """

    def __init__(self, path: pathlib.Path, start: int, mark: SavedState | None = None):
        """Opens the file, after dropping invalid lines and the records of step `start` and later.

        Args:
          path: the file.
          start: the first step that will be written.
          mark: result of the method `mark` after step `start` - 1, to compare the kept lines with; None for no mark.
        """
        self.path, self._waiting, self._failing = path, b"", False
        exists = path.exists()
        content = path.read_bytes() if exists else b""
        lines = b"".join(line + b"\n" for line, record in _records(content) if record["step"] < start)
        self.difference = ""
        if not exists and (start if mark is None else mark["size"]):
            self.difference = "is gone"
        elif mark is not None and hashlib.sha256(lines[: mark["size"]]).hexdigest() != mark["sha256"]:
            self.difference = "is not what this run wrote"
        if not content.startswith(lines):
            write_whole(path, lines)
        elif len(content) > len(lines):
            os.truncate(path, len(lines))  # needs no space on a full disk, unlike a new copy of the file
        self.size, self._sha256 = len(lines), hashlib.sha256(lines)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: LogRecord) -> None:
        """Appends a record as one line."""
        self._append(json.dumps(record, ensure_ascii=False) + "\n")

    def halve(self) -> None:
        """Drops the older half of the file's lines, and the lines that wait in memory."""
        lines = self.path.read_bytes().split(b"\n")[:-1]
        kept = b"".join(line + b"\n" for line in lines[len(lines) // 2 :])
        write_whole(self.path, kept)
        os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting, self.size, self._sha256 = b"", len(kept), hashlib.sha256(kept)

    def _append(self, text: str) -> None:
        content = text.encode(errors="backslashreplace")  # UTF-8 cannot encode a lone surrogate
        self._waiting += content
        self.size += len(content)
        self._sha256.update(content)
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("%s cannot be written (%s): its lines wait in memory.", self.path, error.strerror)
            self._failing = True

    def mark(self) -> SavedState:
        """Returns size and checksum of all lines so far, including waiting lines."""
        return {"size": self.size, "sha256": self._sha256.hexdigest()}

    def close(self) -> None:
        """Writes the lines that wait, and closes the file; an error is logged if they still cannot be written."""
        self._append("")
        if self._waiting:
            log.error("%s lacks its last %d bytes.", self.path, len(self._waiting))
        os.close(self._file)


class UserMetrics:
    """Collects values that user code adds to a run's records, and passes every record to the user's loggers.

    Attributes:
      loggers: functions that are called as logger(step, metrics).
    """

    def __init__(self):
        self.loggers: list[MetricsLogger] = []
        self._added: dict[str, tuple[list[object], Callable[..., float]]] = {}

    def add(self, metrics: Metrics, *, prefix: str = "") -> None:
        """Adds values to the next record.

        Args:
          metrics: values by name: a number, or a pair (value, function that reduces all values of the name to one).
            Several numbers of one name are averaged.
          prefix: text to put before each name.
        """
        for name, entry in metrics.items():
            value, reduce = entry if isinstance(entry, tuple) else (float(entry), None)
            self._added.setdefault(prefix + name, ([], reduce or statistics.fmean))[0].append(value)

    def take(self) -> dict[str, float]:
        """Returns the values added since the last call, one reduced value per name."""
        added, self._added = self._added, {}
        return {name: float(reduce(values)) for name, (values, reduce) in added.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes a step's record to all loggers."""
        for logger in self.loggers:
            logger(step, metrics)
