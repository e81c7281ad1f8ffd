"""A run reopens files that were cut off anywhere, with any bytes behind the cut, and keeps every whole record."""

import json
import pathlib
import random

import jax.numpy as jnp
import pytest

from podrl.rundir import identity
from podrl.rundir.metrics import LogConfig, MetricsLog, read_metrics
from podrl.rundir.run import Run
from podrl.rundir.sinks import read_id

_QUIET = LogConfig(to=())
# Line breaks of str.splitlines other than '\n' (U+0085, U+2028 and U+2029 stand in JSON unescaped), and characters of
# two to four bytes.
_TEXT = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg é 漢 🙂"


def _log(path: pathlib.Path, start: int = 0, marks=None) -> MetricsLog:
    return MetricsLog(path, _QUIET, start=start, run_config={}, marks=marks)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a run directory with three steps, and returns the marks of the third step."""
    path = tmp_path_factory.mktemp("written")
    log = _log(path)
    for step in (1, 2, 3):
        log.write(step, {"time/step": 0.5, "loss": step})
        log.write_samples(step, [{"prompt": _TEXT, "completion": f"{step}"}, {"prompt": "", "completion": _TEXT}])
    log.close()
    return path, log.marks()


def _tails():
    rng = random.Random(0)
    yield from (
        b"",
        b"\n",
        b"\xe2\x80",
        b'{"step": 1',
        b"[" * 5000,
        b'{"step": true}\n{"step": "1"}\n7\n',
        b"\x00" * 512,
    )
    yield from (rng.randbytes(40) for _ in range(3))


def _records(content: bytes) -> list[dict]:
    """Parses the lines of a file's bytes, each of which must be a record."""
    assert content.endswith(b"\n") or not content
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def test_text_with_any_line_break_survives_a_resume(written, tmp_path):
    path, marks = written
    before = {name: (path / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    log = _log(tmp_path, 4, marks)
    log.close()
    assert log.problems == []
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert [s["prompt"] for s in _records(before["samples.jsonl"])] == [_TEXT, ""] * 3
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_every_prefix_and_anything_after_it(name, written, tmp_path):
    """Whole lines stay in their order, and the next record begins on a new line."""
    path, marks = written
    whole = (path / name).read_bytes()
    every = _records(whole)
    for size in range(len(whole) + 1):
        kept = [r for r in every[: whole[:size].count(b"\n")]]
        if size < len(whole) and whole[size : size + 1] == b"\n":
            kept = every[: len(kept) + 1]  # only the line's end is missing
        tails = list(_tails())
        for tail in (tails[0], tails[1 + size % (len(tails) - 1)]):
            if not tail or tail.startswith(b"\n") or kept == every[: whole[:size].count(b"\n")]:
                (tmp_path / name).write_bytes(whole[:size] + tail)
                _check(name, tmp_path, kept, marks, complete=len(kept) == len(every))


def _check(name, workdir, kept, marks, *, complete):
    log = _log(workdir, 4, marks)
    assert [text.partition(" ")[0] for text in log.problems if name in text] == ([] if complete else [name])
    log.write(4, {"loss": 4.0})
    log.write_samples(4, [{"prompt": _TEXT}])
    log.close()
    found = _records((workdir / name).read_bytes())
    assert found[:-1] == kept and found[-1]["step"] == 4
    (workdir / name).unlink()


def test_what_is_lost_or_changed_is_said(written, tmp_path):
    path, marks = written
    log = _log(tmp_path, 4, marks)
    log.close()
    assert log.problems == [
        f"{name} is gone: its records of the steps up to 3 are missing or changed. The run goes on."
        for name in ("metrics.jsonl", "samples.jsonl")
    ]
    content = (path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(content.replace(b'"loss": 2', b'"loss": 3'))
    log = _log(tmp_path, 4, marks)
    log.close()
    assert log.problems[0].startswith("metrics.jsonl is not what this run wrote: ")
    (tmp_path / "metrics.jsonl").unlink()
    with Run(tmp_path, log=_QUIET) as run:  # without marks, as after a checkpoint of an older version
        run.open_metrics(4)
        assert run.metrics is not None and [text.partition(":")[0] for text in run.metrics.problems] == [
            "metrics.jsonl is gone"
        ]


def test_lines_of_a_step_after_the_checkpoint_are_no_loss(written, tmp_path):
    """The evaluation of the saved step is written after the checkpoint, and it is kept."""
    path, marks = written
    (tmp_path / "metrics.jsonl").write_bytes((path / "metrics.jsonl").read_bytes() + b'{"step": 3, "eval/x": 1.0}\n')
    (tmp_path / "samples.jsonl").write_bytes((path / "samples.jsonl").read_bytes())
    log = _log(tmp_path, 4, marks)
    log.close()
    assert log.problems == [] and len(read_metrics(tmp_path)) == 4


def test_text_that_has_no_bytes_is_written_escaped(tmp_path):
    log = _log(tmp_path)
    log.write_samples(1, [{"prompt": "half a pair \ud83d"}])
    log.close()
    assert _records((tmp_path / "samples.jsonl").read_bytes()) == [{"step": 1, "prompt": "half a pair \ud83d"}]


def test_config_json_is_taken_from_the_checkpoint_where_it_is_not_whole(tmp_path, caplog):
    config = {"seed": 3, "name": _TEXT}
    with Run(tmp_path, config=config, log=_QUIET) as run:
        assert run.checkpoints is not None
        run.checkpoints.save(1, {"w": jnp.ones(3)}, {}, {})
    path, checkpoints = tmp_path / "config.json", tmp_path / "checkpoints"
    whole = path.read_bytes()
    for size in range(len(whole)):
        for tail in (b"", b"\xe2\x80", b"}", b"\n[" * 3000):
            path.write_bytes(whole[:size] + tail)
            caplog.clear()
            assert identity.read(tmp_path, checkpoints) == config
            good = b"".join((whole[:size] + tail).split()) == b"".join(whole.split())
            assert ("its copy in the checkpoint of step 1 is used" in caplog.text) != good
    for content in (whole[:-9], b"", b"\xff", None):
        path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match="another configuration: seed was 3, now 4"):
            Run(tmp_path, config=config | {"seed": 4})
        with Run(tmp_path, config=config, log=_QUIET):
            assert path.read_bytes() == whole


def test_config_json_that_is_not_whole_is_refused_where_there_is_no_copy(written, tmp_path):
    """The metrics have steps, but no file tells which run made them."""
    (tmp_path / "metrics.jsonl").write_bytes((written[0] / "metrics.jsonl").read_bytes())
    for content in (b"", b'{"seed": 3', b"\xff", b"[]", b'{"seed": 3, "sha256": "0"}'):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is damaged .* restore the file, remove it"):
            Run(tmp_path, config={"seed": 3})
    (tmp_path / "config.json").write_text('{"seed": 3}')  # as an older version wrote it: without a checksum
    with Run(tmp_path, config={"seed": 3}):
        pass


def test_the_id_of_a_trackers_run_is_read_or_refused(tmp_path, caplog):
    path, made = tmp_path / "wandb_id", "0123456789ab"
    assert read_id(path) == "" and not caplog.text
    path.write_text(made)
    assert read_id(path) == made and not caplog.text
    for content in (made[:5].encode(), b"\xff\xfe", made.encode() + b"\x00"):
        path.write_bytes(content)
        caplog.clear()
        assert read_id(path) == "" and "holds no id of a tracked run" in caplog.text


def test_events_of_an_earlier_life_that_are_torn_hinder_nothing(tmp_path):
    for _ in range(2):
        log = MetricsLog(tmp_path, LogConfig(), start=0, run_config={})
        log.write(1, {"a": 1.0})
        log.close()
        for file in (tmp_path / "tensorboard").iterdir():
            file.write_bytes(file.read_bytes()[:-3] + b"\xff" * 7)
