"""summary.json: figures that cover every start of a run."""

import json

import pytest

from podrl.rundir.console import make_console
from podrl.rundir.summary import print_files, write_summary


def test_wall_seconds_count_from_the_first_start_of_a_run(tmp_path):
    now = tmp_path.stat().st_mtime
    times = [{"time": now - 500, "step": 0}, {"time": now - 100, "step": 3}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in times))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "time/step": 1.0}) + "\n" for s in (3, 4)))
    written = write_summary(tmp_path, {})
    assert written["starts"] == 2 and written["wall_s"] >= 499
    assert written["wall_s"] - written["wall_s_last_start"] == pytest.approx(400, abs=0.2)
    with (tmp_path / "starts.jsonl").open("a") as file:  # a start after the last step trains nothing: wall_s stays
        file.write(json.dumps({"time": now, "step": 4}) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(written | {"wall_s": 450.0}))
    assert write_summary(tmp_path, {})["wall_s"] == 450.0
    (tmp_path / "summary.json").write_text("[")
    assert write_summary(tmp_path, {})["wall_s"] >= 499


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"step": 0, "evaluation": "greedy"}, {"step": 1, "text": "a"}], "of evaluations"),
        ([{"step": 1, "reward": 0.5}], "--samples=10"),
    ],
)
def test_the_last_lines_offer_training_samples_only_where_there_are_some(lines, words, tmp_path, capsys):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_files(make_console(), tmp_path, "runs/x", {"throughput": {}, "seconds": {}})
    assert words in next(line for line in capsys.readouterr().out.splitlines() if "samples.jsonl" in line)
