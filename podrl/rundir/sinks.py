"""Trackers that get a run's metrics and samples besides its files: TensorBoard, W&B and MLflow, by name in `log.to`.

A failing tracker does not stop the run: it causes one warning, and the records that it misses are in metrics.jsonl and
samples.jsonl.
"""

import functools
import importlib
import importlib.util
import json
import logging
import os
import pathlib
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from podrl.config import install
from podrl.mappings import ConfigValues, LogRecord
from podrl.storage.storage import write_whole

log = logging.getLogger("podrl.metrics")

SinkName = Literal["tensorboard", "wandb", "mlflow"]
End = Literal["finished", "stopped", "failed"]

_WAITING = 1000  # largest number of records that wait for a slow tracker
_CLOSE_S = 30.0
_LACKS = "log.to names {0!r}, whose package cannot be imported: {1}, or leave it out of log.to."
_SECRET = re.compile(r"(?i)(^|_)(key|token|secret|password|passwd|credentials?|authorization|headers)$")
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")


class Sink(Protocol):
    """A tracker of experiments."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        ...

    def write_samples(self, step: int, samples: Sequence[LogRecord]) -> None:
        """Adds a table of samples."""
        ...

    def close(self, end: End) -> None:
        """Tells the tracker how the run ended; a run that was stopped or failed may be resumed later."""
        ...


def open_sink(name: SinkName, workdir: pathlib.Path, *, start: int, project: str, run_config: ConfigValues) -> Sink:
    """Opens a tracker on a thread of its own; a tracker that cannot be opened only causes a warning.

    Args:
      name: name of the tracker.
      workdir: the local run directory.
      start: the first step that will be written.
      project: name of the W&B project, or of MLflow's experiment.
      run_config: settings of the run, recorded without secrets.

    Raises:
      ValueError: the tracker's package cannot be imported.
    """
    if name == "tensorboard":
        return Remote(name, functools.partial(TensorBoard, workdir / name, start))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # mlflow reads the variable when it is imported
    try:
        importlib.import_module(name)
    except ImportError:
        raise ValueError(_LACKS.format(name, install(name))) from None
    make = functools.partial(_MAKERS[name], workdir, project, without_secrets(run_config))
    return Remote(name, make)


def check_installed(names: Sequence[SinkName]) -> None:
    """Refuses trackers whose package is not installed; imports none of the packages.

    Raises:
      ValueError: a package is missing.
    """
    for name in names:
        if name != "tensorboard" and sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise ValueError(_LACKS.format(name, install(name)))


class Remote:
    """A tracker behind a queue and a thread, so that a slow or lost server delays no step."""

    def __init__(self, name: str, make: Callable[[], Sink]):
        """Starts the thread, which opens the tracker by calling `make`."""
        self._name, self._make, self._failed = name, make, False
        self._end: End = "failed"
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"log.to {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = dict(metrics)
        self._enqueue(lambda sink: sink.write(step, values))

    def write_samples(self, step: int, samples: Sequence[LogRecord]) -> None:
        self._enqueue(lambda sink: sink.write_samples(step, samples))

    def close(self, end: End) -> None:
        """Waits at most 30 s until the thread has passed on the queued records."""
        self._end = end
        self._enqueue(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"did not take the last records in {_CLOSE_S:.0f} s")

    def _enqueue(self, call: Callable[[Sink], None] | None) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._warn(f"is {_WAITING} records behind")

    def _work(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._make()
        except Exception as error:  # noqa: BLE001 - a client may raise any error
            self._warn(f"cannot be opened: {type(error).__name__}: {error}")
        while (call := self._queue.get()) is not None:
            if sink is not None:
                self._try(call, sink)
        if sink is not None:
            self._try(lambda sink: sink.close(self._end), sink)

    def _try(self, call: Callable[[Sink], None], sink: Sink) -> None:
        try:
            call(sink)
        except Exception as error:  # noqa: BLE001 - a client may raise any error
            self._warn(f"failed: {type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        if not self._failed:
            log.warning(
                "%s of log.to %s. The run goes on; all records are in metrics.jsonl.",
                self._name,
                _URL_USER.sub("", problem),
            )
        self._failed = True


class TensorBoard:
    """Writes TensorBoard's event files: scalars, and samples as a table of text; each event is flushed at once."""

    def __init__(self, directory: pathlib.Path, start: int):
        """Creates an event file.

        Args:
          directory: directory of the event files; TensorBoard reads them in the order of their names.
          start: first step that will be written. TensorBoard hides the events of this step and later steps that earlier
            files hold.
        """
        # Importing tensorboardX takes half a CPU second; if torch is installed, two, because it also imports torch.
        from tensorboardX import RecordWriter, summary
        from tensorboardX.proto import event_pb2

        self._protobuf: Any = event_pb2  # generated code without types
        self._text = summary.text
        directory.mkdir(parents=True, exist_ok=True)
        # The name counts the earlier files, because two starts of a run may be less than a second apart.
        earlier = len(list(directory.glob("events*")))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{earlier}"
        self._file = RecordWriter(str(directory / name))
        self._append(0, file_version="brain.Event:2")
        if start or earlier:
            self._append(start, session_log=self._protobuf.SessionLog(status="START"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        scalars = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._append(step, summary={"value": scalars})

    def write_samples(self, step: int, samples: Sequence[LogRecord]) -> None:
        summary = self._text("samples", markdown(*table(samples)))
        summary.value[0].tag = "samples"
        self._append(step, summary=summary)

    def close(self, end: End) -> None:
        self._file.close()

    def _append(self, step: int, **content: object) -> None:
        event = self._protobuf.Event(wall_time=time.time(), step=step, **content)
        self._file.write(event.SerializeToString())
        self._file.flush()


class WandB:
    """A run of W&B, for which the environment variables of W&B apply: WANDB_MODE, WANDB_API_KEY and others."""

    def __init__(self, workdir: pathlib.Path, project: str, run_config: ConfigValues):
        import wandb

        self._wandb = wandb
        name = read_id(workdir / "wandb_id") or os.urandom(6).hex()
        self._run = wandb.init(project=project, dir=str(workdir), config=dict(run_config), id=name, resume="allow")
        write_whole(workdir / "wandb_id", name)
        # W&B drops a record with a lower step than the last record. Evaluations during training write such records.
        self._step = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(metrics), step=self._step)

    def write_samples(self, step: int, samples: Sequence[LogRecord]) -> None:
        columns, rows = table(samples)
        # The tables of training and of evaluation need two names, because their samples may have the same step.
        name = "samples/eval" if "evaluation" in columns else "samples/train"
        self._step = max(self._step, step)
        self._run.log({name: self._wandb.Table(columns=columns, data=rows)}, step=self._step)

    def close(self, end: End) -> None:
        self._run.finish(exit_code={"finished": 0, "stopped": 75, "failed": 1}[end])


class MLflow:
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI or in the database mlflow.db of the run directory."""

    def __init__(self, workdir: pathlib.Path, project: str, run_config: ConfigValues):
        from mlflow import MlflowClient, entities

        self._metric, folder = entities.Metric, workdir.absolute()
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
        run_id = read_id(workdir / "mlflow_id")
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
            old = self._client.get_experiment_by_name(name)
            artifacts = None if server else (folder / "mlflow").as_uri()
            experiment = old.experiment_id if old else self._client.create_experiment(name, artifacts)
            run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
            write_whole(workdir / "mlflow_id", run_id)
            params = [entities.Param(key, str(value)[:500]) for key, value in _flat(run_config)]
            for first in range(0, len(params), 100):  # a request may hold at most 100 settings
                self._client.log_batch(run_id, params=params[first : first + 100])
        self._id = run_id

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def write_samples(self, step: int, samples: Sequence[LogRecord]) -> None:
        columns, rows = table(samples)
        kind = "eval" if "evaluation" in columns else "train"
        self._client.log_dict(self._id, {"columns": columns, "data": rows}, f"samples/{kind}_{step:08d}.json")

    def close(self, end: End) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[end]
        self._client.set_terminated(self._id, status)


_MAKERS: dict[str, Callable[[pathlib.Path, str, ConfigValues], Sink]] = {"wandb": WandB, "mlflow": MLflow}


def read_id(path: pathlib.Path) -> str:
    """Reads the id of the tracker's run that a resumed run continues; '' if the file is missing or holds no id."""
    content = path.read_bytes() if path.exists() else b""
    if re.fullmatch(rb"[0-9a-f]{12}|[0-9a-f]{32}", content):
        return content.decode()
    if content:
        log.warning("%s holds no id of a tracked run: metrics go to a new run of the tracker.", path)
    return ""


def table(samples: Sequence[LogRecord]) -> tuple[list[str], list[list[object]]]:
    """Arranges samples as (columns, rows); a value that is neither number nor text becomes JSON, a missing value ''."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    rows = [[_cell(sample.get(name, "")) for name in columns] for sample in samples]
    return columns, rows


def _cell(value: object) -> object:
    return value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False, default=str)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown, with cells escaped so that they are shown as plain text."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell if i == 1 else _plain(str(cell)) for cell in line) + " |" for i, line in enumerate(lines)
    )


def _plain(text: str) -> str:
    """Escapes text for Markdown and HTML: punctuation becomes numbered entities, a line break an arrow."""
    text = text.replace("\r\n", "\n").replace("\n", " ↵ ")
    return "".join(
        (c if c.isalnum() or c == " " or ord(c) > 127 else f"&#{ord(c)};") if c.isprintable() else "\ufffd"
        for c in text
    )


def without_secrets(values: object) -> Any:
    """Copies settings without the values of keys that name a secret and without the users in URLs."""
    if isinstance(values, Mapping):
        return {
            key: "(not recorded)" if value and _SECRET.search(str(key)) else without_secrets(value)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [without_secrets(value) for value in values]
    return _URL_USER.sub("", values) if isinstance(values, str) else values


def _flat(values: ConfigValues, prefix: str = "") -> list[tuple[str, object]]:
    """Lists (dotted path, value) of every setting."""
    found = []
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        found += _flat(value, f"{prefix}{key}.") if nested else [(_mlflow_name(f"{prefix}{key}"), value)]
    return found


def _mlflow_name(name: str) -> str:
    """Replaces characters that MLflow refuses in a name; podrl's own names have none."""
    return re.sub(r"[^\w\-. :/]", "_", name)
