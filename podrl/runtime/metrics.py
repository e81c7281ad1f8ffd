"""Where numbers go: metrics.jsonl, samples.jsonl, TensorBoard and, when asked for, W&B."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

log = logging.getLogger("podrl.metrics")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is written besides metrics.jsonl.

    Attributes:
      tensorboard: write TensorBoard events.
      wandb: '' for off, else the W&B mode: 'online' or 'offline' (extra [wandb]).
      wandb_project: W&B project name.
      samples_every: steps between samples written to samples.jsonl; 0 is never.
      samples: completions written each time.
      console_every: steps between printed lines when the output is not a terminal.
      stall_s: seconds a stage may take before all stacks are printed; after four times as long the process exits 42.
    """

    tensorboard: bool = True
    wandb: str = ""
    wandb_project: str = "podrl"
    samples_every: int = 10
    samples: int = 4
    console_every: int = 10
    stall_s: float = 900.0

    def __post_init__(self):
        if self.wandb not in ("", "online", "offline"):
            raise ValueError(f"log.wandb={self.wandb!r} must be '', 'online' or 'offline'.")
        if self.stall_s <= 0:
            raise ValueError(f"log.stall_s={self.stall_s} must be positive seconds.")


MetricsLogger = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """Appends one object per step to metrics.jsonl and feeds every other sink.

    A resumed run passes `start`: lines of steps at or after it are dropped first, so each step is written once.
    A disk that is full stops nothing: lines wait in memory until there is space.
    """

    def __init__(self, workdir: str | os.PathLike, config: LogConfig, *, start: int, run_config: Mapping[str, Any]):
        self.workdir = pathlib.Path(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[MetricsLogger] = []
        self._closers: list[Callable[[], None]] = []
        if config.tensorboard:
            self._open_tensorboard(start)
        if config.wandb:
            self._open_wandb(config, run_config)
        self._metrics = _reopen(self.workdir / "metrics.jsonl", start)
        self._samples = _reopen(self.workdir / "samples.jsonl", start)

    def add_sink(self, sink: MetricsLogger) -> None:
        """Calls `sink(step, metrics)` for every record from now on."""
        self._sinks.append(sink)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one record; not-a-number values are written as null, so every line is valid JSON."""
        values = {name: float(value) for name, value in metrics.items()}
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.append(json.dumps({"step": step, **clean}) + "\n")
        for sink in self._sinks:
            sink(step, values)

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends prompts, completions and rewards to samples.jsonl."""
        for sample in samples:
            self._samples.append(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        for close in self._closers:
            close()

    def _open_tensorboard(self, start: int) -> None:
        events = _TensorBoard(self.workdir / "tensorboard", start)
        self._sinks.append(events.write)
        self._closers.append(events.close)

    def _open_wandb(self, config: LogConfig, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                f"log.wandb={config.wandb!r} needs the wandb package: pip install 'podrl[wandb]', or leave "
                "log.wandb empty."
            ) from None
        run = wandb.init(
            project=config.wandb_project,
            dir=str(self.workdir),
            mode=config.wandb,
            config=dict(run_config),
            id=self._wandb_id(),
            resume="allow",
        )
        self._sinks.append(lambda step, metrics: run.log(dict(metrics), step=step))
        self._closers.append(run.finish)

    def _wandb_id(self) -> str:
        """A run id kept in the workdir, so that a resumed run continues its W&B page."""
        path = self.workdir / "wandb_id"
        if not path.exists():
            path.write_text(os.urandom(6).hex())
        return path.read_text().strip()


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, oldest first; [] when there is none."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    return [record for line in path.read_text().splitlines() if (record := _parse(line)) is not None]


class _Lines:
    """A file that text is appended to; what cannot be written waits for the next try."""

    def __init__(self, path: pathlib.Path):
        self._path, self._waiting, self._failing = path, b"", False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, text: str) -> None:
        self._waiting += text.encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("%s cannot be written (%s): its lines wait in memory.", self._path, error.strerror)
            self._failing = True

    def close(self) -> None:
        self.append("")
        if self._waiting:
            log.error("%s lacks its last %d bytes.", self._path, len(self._waiting))
        os.close(self._file)


class _TensorBoard:
    """An event file, written at once: no thread that a full disk could end, no event lost with a killed process."""

    def __init__(self, directory: pathlib.Path, start: int):
        from tensorboardX import event_file_writer  # imported late: half a second that --dry_run need not pay
        from tensorboardX.proto import event_pb2 as event_module
        from tensorboardX.proto import summary_pb2 as summary_module

        event_pb2: Any = event_module  # generated code without types
        summary_pb2: Any = summary_module

        self._event, self._summary, self._directory, self._failing = (
            event_pb2.Event,
            summary_pb2.Summary,
            directory,
            False,
        )
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = event_file_writer.EventsWriter(str(directory / "events"))
        if start:  # hides the events of later steps in the files of earlier lives
            restarted = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(self._event(wall_time=time.time(), step=start, session_log=restarted))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        try:
            self._writer.write_event(event)
            self._writer.flush()
        except OSError as error:
            if not self._failing:
                log.error("TensorBoard events in %s are incomplete: %s.", self._directory, error.strerror)
            self._failing = True

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            log.error("TensorBoard events in %s are incomplete: %s.", self._directory, error.strerror)


def _reopen(path: pathlib.Path, start: int) -> _Lines:
    """Opens for appending after dropping records at or after step `start` and a half-written last line."""
    if path.exists():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if (record := _parse(line)) is not None and record["step"] < start]
        if len(kept) != len(lines):
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.replace(path)
    return _Lines(path)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
