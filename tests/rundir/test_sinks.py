"""The trackers that `log.to` names get the metrics of metrics.jsonl and the samples of samples.jsonl; a failing tracker
does not stop the run.

W&B and MLflow are replaced by objects that record calls; tests with the real clients run if these are installed.
"""

import contextlib
import json
import struct
import sys
import threading
import types
from typing import Any

import pytest
from waits import until

from podrl.rundir import sinks
from podrl.rundir.metrics import LogConfig, MetricsLog
from podrl.rundir.run import Run

_CONFIG = {"seed": 3, "judge": {"api_key": "hunter2", "url": "https://me:hunter2@host/v1"}, "max_tokens": 5}
_EVIL = "<script>x</script>\n| **b** ![i](http://h/i.png) `c`\x02 é"


def _run(path, *to, start=0, first=1, end="finished"):
    log = MetricsLog(path, LogConfig(to=to, project="mine"), start=start, run_config=_CONFIG)
    log.write(first, {"a/b": 1.5})
    log.write_samples(first, [{"prompt": "p", "completion": _EVIL, "reward": 0.5}])
    log.write_samples(first, [{"evaluation": "e", "prompt": "q", "turns": [1, "é"]}])
    log.write_samples(first, [])
    log.close(end)


class _WandB(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.Table = lambda columns, data: (columns, data)

    def init(self, **settings):
        self.calls.append(settings)
        run = types.SimpleNamespace()
        run.log = lambda values, step: self.calls.append((step, values))
        run.finish = lambda exit_code: self.calls.append(("finish", exit_code))
        return run


class _MLflow(types.ModuleType):
    """Stands in for mlflow's client with the methods that podrl uses; they refuse values that MLflow's server
    refuses."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls: list[Any] = []
        self.uris: list[str] = []
        self.experiments: dict[str, str] = {}
        self.entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of)
        self.MlflowClient = self._client

    def _client(self, uri):
        self.uris.append(uri)
        return self

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return types.SimpleNamespace(experiment_id=found) if found else None

    def create_experiment(self, name, artifacts):
        self.experiments[name] = "7"
        return "7"

    def create_run(self, experiment, run_name):
        self.calls.append(("create", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="0" * 32))

    def update_run(self, run, status):
        self.calls.append(("update", run, status))

    def log_batch(self, run, metrics=(), params=()):
        assert len(params) <= 100
        self.calls += [("metric", *metric[:2], metric[3]) for metric in metrics]
        self.calls += [("param", *param) for param in params]

    def log_dict(self, run, values, path):
        self.calls.append((path, json.loads(json.dumps(values))))

    def set_terminated(self, run, status):
        self.calls.append(("terminated", run, status))


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := _WandB())
    return module


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", module := _MLflow())
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return module


def _events(path):
    """Reads the events of a TensorBoard file with tensorboardX's protocol buffers."""
    from tensorboardX.proto import event_pb2

    generated: Any = event_pb2  # library without types
    left, events = path.read_bytes(), []
    while left:
        (size,) = struct.unpack("<Q", left[:8])
        events.append(generated.Event.FromString(left[12 : 12 + size]))
        left = left[16 + size :]
    return events


def test_a_killed_process_loses_no_event_that_tensorboard_took(tmp_path):
    sink = sinks.TensorBoard(tmp_path, 0)
    for step in (1, 2):
        sink.write(step, {"a": 1.5})
        (file,) = tmp_path.iterdir()
        assert [event.step for event in _events(file)] == [0, 1, 2][: step + 1]  # before it is closed
    sink.close("failed")


def test_tensorboard_is_imported_while_the_run_goes_on(tmp_path, monkeypatch):
    free, importing = threading.Event(), []

    class Slow(types.ModuleType):
        def __getattr__(self, name):
            importing.append(threading.current_thread())
            assert free.wait(60)
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "tensorboardX", Slow("tensorboardX"))
    log = MetricsLog(tmp_path, LogConfig(to=("tensorboard",)), start=0, run_config={})
    log.write(1, {"a": 1.5})
    free.set()
    log.close()
    assert importing and threading.main_thread() not in importing


def test_tensorboard_has_samples_as_text_that_is_no_markup(tmp_path):
    _run(tmp_path, "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [value for event in _events(file) for value in event.summary.value]
    assert [value.tag for value in values] == ["a/b", "samples", "samples"]
    for value in values[1:]:
        assert value.metadata.plugin_data.plugin_name == "text"
        assert value.tensor.dtype == 7 and [dim.size for dim in value.tensor.tensor_shape.dim] == [1]
    (text,) = values[1].tensor.string_val
    head, rule, row = text.decode().split("\n")
    assert head == "| prompt | completion | reward |" and rule == "| --- | --- | --- |"
    assert row.startswith(
        "| p | &#60;script&#62;x&#60;&#47;script&#62; ↵ &#124; &#42;&#42;b&#42;&#42; &#33;&#91;i&#93;"
    )
    assert row.endswith("&#96;c&#96;\ufffd é | 0&#46;5 |") and row.count("|") == 4


def test_wandb_has_metrics_and_tables_and_a_resumed_run_its_id(tmp_path, wandb):
    _run(tmp_path, "wandb")
    _run(tmp_path, "wandb", start=2, first=2, end="stopped")
    first, *calls = wandb.calls[:5]
    assert calls == [
        (1, {"a/b": 1.5}),
        (1, {"samples/train": (["prompt", "completion", "reward"], [["p", _EVIL, 0.5]])}),
        (1, {"samples/eval": (["evaluation", "prompt", "turns"], [["e", "q", '[1, "é"]']])}),
        ("finish", 0),
    ]
    assert wandb.calls[-1] == ("finish", 75)
    assert first["project"] == "mine" and first["resume"] == "allow" and len(first["id"]) == 12
    assert wandb.calls[5]["id"] == first["id"] and wandb.calls[6] == (2, {"a/b": 1.5})
    assert first["config"]["seed"] == 3 and "hunter2" not in str(first)


def test_wandb_which_drops_earlier_steps_has_a_late_evaluation_at_the_step_it_has_come_to(tmp_path, wandb):
    tracker = sinks.WandB(tmp_path, "mine", {})
    tracker.write(5, {"reward/mean": 1.0})
    tracker.write(3, {"eval/greedy_answer": 0.5})
    tracker.write(6, {"reward/mean": 2.0})
    assert wandb.calls[1:] == [(5, {"reward/mean": 1.0}), (5, {"eval/greedy_answer": 0.5}), (6, {"reward/mean": 2.0})]


def test_mlflow_has_metrics_params_and_tables_and_a_resumed_run_goes_on(tmp_path, mlflow, monkeypatch):
    _run(tmp_path, "mlflow")
    run = "0" * 32
    assert mlflow.calls == [
        ("create", "7", tmp_path.name),
        ("param", "seed", "3"),
        ("param", "judge.api_key", "(not recorded)"),
        ("param", "judge.url", "https://host/v1"),
        ("param", "max_tokens", "5"),
        ("metric", "a/b", 1.5, 1),
        (
            "samples/train_00000001.json",
            {"columns": ["prompt", "completion", "reward"], "data": [["p", _EVIL, 0.5]]},
        ),
        (
            "samples/eval_00000001.json",
            {"columns": ["evaluation", "prompt", "turns"], "data": [["e", "q", '[1, "é"]']]},
        ),
        ("terminated", run, "FINISHED"),
    ]
    mlflow.calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    _run(tmp_path, "mlflow", start=2, first=2)
    assert mlflow.calls[:2] == [("update", run, "RUNNING"), ("metric", "a/b", 1.5, 2)]
    for end, status in {"stopped": "KILLED", "failed": "FAILED"}.items():
        _run(tmp_path, "mlflow", start=2, first=2, end=end)
        assert mlflow.calls[-1] == ("terminated", run, status)
    assert set(mlflow.uris) == {f"sqlite:///{tmp_path / 'mlflow.db'}", "http://tracker"}
    assert list(mlflow.experiments) == ["mine"]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")]
)
def test_a_tracker_is_told_how_the_run_ended(tmp_path, mlflow, error, status):
    with contextlib.suppress(KeyboardInterrupt, ValueError), Run(tmp_path, log=LogConfig(to=("mlflow",))) as run:
        run.open_metrics(1)
        if error:
            raise error
    assert mlflow.calls[-1] == ("terminated", "0" * 32, status)


@pytest.mark.filterwarnings("ignore")  # warnings of MLflow
def test_the_client_of_mlflow_reads_back_what_was_written(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'podrl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    _run(tmp_path, "mlflow")
    _run(tmp_path, "mlflow", start=2, first=2)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "a/b")] == [(1, 1.5), (2, 1.5)]
    assert run.data.params["seed"] == "3" and run.info.status == "FINISHED"
    assert b"hunter2" not in (tmp_path / "mlflow.db").read_bytes()
    (file,) = (tmp_path / "mlflow").rglob("train_00000001.json")
    assert json.loads(file.read_text())["data"] == [["p", _EVIL, 0.5]]


@pytest.mark.filterwarnings("ignore")  # warnings of W&B
def test_the_client_of_wandb_writes_names_and_tables_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="W&B is not installed: pip install 'podrl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _run(tmp_path, "wandb")
    _run(tmp_path, "wandb", start=2, first=2)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "the resumed run must have the same id"
    for file in files:
        # W&B's own process writes the file.
        until(lambda file=file: b"samples/eval" in file.read_bytes(), every_s=0.1)
        held = file.read_bytes()
        assert b"a/b" in held and b"samples/train" in held and b"samples/eval" in held and b"hunter2" not in held
        (table,) = file.parent.rglob("train_*.table.json")
        assert json.loads(table.read_text()) == {
            "columns": ["prompt", "completion", "reward"],
            "data": [["p", _EVIL, 0.5]],
        }


@pytest.mark.parametrize("broken", ["init", "log"])
def test_a_tracker_that_fails_warns_once_and_the_files_are_whole(tmp_path, wandb, caplog, broken):
    def fail(*_, **__):
        raise OSError("no route to https://me:hunter2@host")

    if broken == "init":
        wandb.init = fail
    else:
        wandb.init = lambda **_: types.SimpleNamespace(log=fail, finish=fail)
    _run(tmp_path, "wandb")
    (said,) = caplog.messages
    assert "wandb of log.to" in said and "OSError: no route to https://host" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_a_tracker_that_hangs_delays_nothing_but_the_end_by_a_bounded_time(tmp_path, wandb, caplog, monkeypatch):
    free = threading.Event()
    wandb.init = lambda **_: free.wait()
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.01)
    monkeypatch.setattr(sinks, "_WAITING", 2)
    _run(tmp_path, "wandb")  # the run does not wait for the tracker
    free.set()
    (said,) = caplog.messages
    assert "is 2 records behind" in said


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # import raises ImportError
    with pytest.raises(ValueError, match=rf"\[{name}\]'"):
        MetricsLog(tmp_path, LogConfig(to=(name,)), start=0, run_config={})
    with pytest.raises(ValueError, match=rf"\[{name}\]'"):  # a start checks log.to before it loads models
        Run(tmp_path, log=LogConfig(to=(name,)))
