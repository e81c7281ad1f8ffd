"""Models scored on sets of records: numbers by hand, and the commands of docs/evaluation.md."""

import json
import math
import pathlib
import re
import shlex

import numpy as np
import pytest

from podrl import evaluate

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()


def test_numbers_by_hand():
    right = np.array([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    found = evaluate.summary({"right": right, "majority": np.array([[1.0], [0.0], [1.0]])})
    assert {name: one["mean"] for name, one in found.items()} == pytest.approx(
        {"right": 1 / 2, "pass@2": (1 - 1 / 6 + 1) / 3, "pass@4": 2 / 3, "majority@4": 2 / 3}
    )
    assert found["right"]["interval"] == pytest.approx(1.959964 * 0.5 / math.sqrt(3))
    assert found["right"]["records"] == 3
    assert list(evaluate.summary({"right": right[:1, :1], "majority": right[:1, :1]})) == ["right"]
    assert "interval" not in evaluate.summary({"right": right[:1, :1], "majority": right[:1, :1]})["right"]


def test_a_difference_is_taken_record_by_record():
    one = {"right": np.array([[0.0, 1], [1, 1], [0, 0]]), "majority": np.zeros((3, 1))}
    other = {"right": one["right"] + 0.25, "majority": np.ones((3, 1))}
    assert evaluate.difference(one, other) == {"right": {"mean": 0.25, "interval": 0.0, "records": 3}}


def test_the_majority_is_of_answers():
    assert evaluate.majority(["4", "5", "5"], [1, 0, 0]) == 0
    assert evaluate.majority(["4", "5", "4"], [1, 0, 1]) == 1
    assert evaluate.majority(["4", "5"], [1, 0]) == 1


@pytest.mark.parametrize("text", ["x", "a=", "a=x,a=y", "a b=x"])
def test_sets_have_names(text, capsys):
    assert evaluate.main(["--model=m", f"--sets={text}", "--out=o"]) == 1
    assert "must be NAME=FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    for name in ("sums", "words"):
        records = [{"question": f"{name}: {n} + 3?", "answer": str(n + 3), "dataset": "ab"[n % 2]} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "podrl").symlink_to(ROOT / "podrl")
    monkeypatch.chdir(tmp_path)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
    commands = [shlex.split(line)[3:] for line in lines]
    assert len(commands) == 2
    for command in commands:
        assert evaluate.main(command) == 0, capsys.readouterr().err
        result = json.loads((tmp_path / "scores" / "result.json").read_text())
        if "difference" not in result:
            assert list(result["model"]) == ["sums", "words"]
            assert list(result["model"]["sums"]["by"]) == ["a", "b"]
            assert result["model"]["sums"]["all"]["pass@2"]["records"] == 4
        else:
            assert set(result["difference"]["sums"]) == {"right", "number", "exact_format"}
            completed = (tmp_path / "scores" / "sums.compare.jsonl").read_text().splitlines()
            assert [len(json.loads(line)["completions"]) for line in completed] == [2] * 4
    assert "difference" in capsys.readouterr().out
