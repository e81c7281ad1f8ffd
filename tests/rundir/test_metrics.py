"""metrics.jsonl holds each step once, whatever happened to the process that wrote it."""

import json
import math
import struct
from typing import Any

import pytest

from podrl.config import build
from podrl.rundir.metrics import LogConfig, MetricsLog, read_metrics
from podrl.rundir.run import Run

_QUIET = LogConfig(to=())


def _log(path, start=0):
    return MetricsLog(path, _QUIET, start=start, run_config={})


def test_every_line_is_one_valid_object(tmp_path):
    log = _log(tmp_path)
    log.write(1, {"loss": 1.5, "kl": math.nan})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.5, "kl": None}


def test_resuming_drops_later_records_and_a_torn_line(tmp_path):
    log = _log(tmp_path)
    for step in range(1, 5):
        log.write(step, {"x": step})
        log.write_samples(step, [{"text": f"é{step}"}])
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    log = _log(tmp_path, start=3)
    log.write(3, {"x": 30})
    log.close()
    assert [(r["step"], r["x"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"step": 1, "text": "é1"}, {"step": 2, "text": "é2"}]


def test_tensorboard_reads_the_events(tmp_path):
    """tensorboardX parses the events and confirms their checksums. A resumed run writes a START event, with which
    TensorBoard hides the older events of the repeated steps."""
    from tensorboardX import crc32c
    from tensorboardX.proto import event_pb2

    generated: Any = event_pb2  # library without types
    read = []
    for start in (0, 300):
        log = MetricsLog(tmp_path, LogConfig(), start=start, run_config={})
        log.write(start + 1, {"a/b": 1.5, "é": -1e300})
        log.close()
    for file in sorted((tmp_path / "tensorboard").glob("events.out.tfevents.*")):
        left = file.read_bytes()
        while left:
            size, checksum = struct.unpack("<QI", left[:12])
            event, (after,) = left[12 : 12 + size], struct.unpack("<I", left[12 + size : 16 + size])
            sums = crc32c._crc32c(left[:8]), crc32c._crc32c(event)
            assert [checksum, after] == [((c >> 15 | c << 17) + 0xA282EAD8) & 0xFFFFFFFF for c in sums]
            read.append(generated.Event.FromString(event))
            left = left[16 + size :]
    assert [event.step for event in read] == [0, 1, 0, 300, 301] and all(event.wall_time > 1e9 for event in read)
    assert read[0].file_version == read[2].file_version == "brain.Event:2"
    assert read[3].session_log.status == generated.SessionLog.START
    for event in (read[1], read[4]):
        assert [(value.tag, value.simple_value) for value in event.summary.value] == [("a/b", 1.5), ("é", -math.inf)]


@pytest.mark.parametrize("bad", [{"to": ("wandb", "neptune")}, {"to": ("wandb", "wandb")}, {"stall_s": 0.0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=rf"^LogConfig\.{next(iter(bad))}"):
        LogConfig(**bad)


@pytest.mark.parametrize(
    "former, now",
    [
        ({"tensorboard": False}, "log.to"),
        ({"tensorboard": True}, "log.to"),
        ({"wandb": "offline"}, "WANDB_MODE"),
        ({"wandb_project": "mine"}, "log.project"),
    ],
)
def test_former_keys_are_refused_with_what_took_their_place(former, now):
    """A key of earlier versions is refused, even with the value False."""
    with pytest.raises(ValueError, match=rf"config\.log has no key '{next(iter(former))}': .*{now}"):
        build(LogConfig, former, prefix="config.log")


def test_a_resumed_run_knows_how_long_a_start_took(tmp_path):
    """Each stage is expected to take as long as in the last start that measured it; times of later steps do not count,
    because only a start's first step compiles."""
    started = {"time/start-up": 6.0, "time/restoring": 0.5}
    records = [
        {"step": 0, **started, "time/evaluation": 4.0},
        {"step": 1, "time/step": 7.0, "time/update": 6.1, "time/rollout": 0.2},
        {"step": 2, "time/step": 0.7, "time/update": 0.5, "time/rollout": 0.1},
        {"step": 3, "time/step": 3.0, "time/update": 2.5, "time/rollout": 0.3, **started, "time/start-up": 2.0},
        {"step": 4, "time/step": 0.7, "time/update": 0.5, "time/rollout": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with Run(tmp_path, log=LogConfig(to=())) as run:
        expected = {"start-up": 2.0, "restoring": 0.5, "evaluation": 4.0, "update": 2.5, "rollout": 0.3}
        assert run.watchdog.expected == expected


def test_a_run_in_a_new_directory_knows_how_long_equal_programs_took(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    config = {"algorithm": "grpo", "seed": 0, "model": {"path": "a"}, "trainer": {"max_steps": 3, "remat": "full"}}

    def expected(**changes):
        place = tmp_path / f"run{len([*tmp_path.iterdir()])}"
        with Run(place, log=LogConfig(to=()), config={**config, **changes}) as run:
            known = run.watchdog.expected
            for record in ({"time/start-up": 6.0, "loss": 1.0}, {"time/update": 2.5, "time/start-up": 9.0}):
                run.times.see(record)  # pyright: ignore[reportOptionalMemberAccess]
        return known

    times = {"start-up": 6.0, "update": 2.5}
    assert expected() == {}
    assert expected() == expected(seed=1, trainer={"max_steps": 9, "remat": "full"}) == times
    assert expected(model={"path": "b"}) == expected(trainer={"max_steps": 3, "remat": "none"}) == {}
    assert expected(trainer=None) == expected(model={1: "a", "b": 2}) == {}  # a script's configuration may be any
    for file in cache.glob("podrl-times-*"):
        file.write_text('{"start-up": ')
    assert expected() == {} and expected() == times
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache / "missing"))  # nothing can be written there
    assert expected() == expected() == {}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert expected() == expected() == {}
