"""95 % intervals equal Wilson's by hand, cover the truth in simulations, and are the same on the page of podrl.view."""

import json
import math
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from podrl.rundir import intervals, summary
from podrl.rundir.console import make_console
from podrl.rundir.summary import print_before_after


@pytest.mark.parametrize(
    ("right", "records", "low", "high"),
    [
        (7, 7, 0.6457, 1.0),
        (0, 20, 0.0, 0.1611),
        (1, 1, 0.2065, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilsons_interval_by_hand(right, records, low, high):
    """The last case is Newcombe's (1998) example."""
    value_P = np.repeat([1.0, 0.0], [right, records - right])
    error = float(value_P.std(ddof=1) / math.sqrt(records)) if records > 1 else None
    assert intervals.share(right / records, error, records) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("p", "n"), [(0.5, 200), (0.95, 60), (0.99, 100), (0.03, 60), (0.9, 7)])
def test_nineteen_in_twenty_intervals_hold_the_share(p, n):
    right = np.random.default_rng(0).binomial(n, p, 4000) / n
    ends = [intervals.share(mean, math.sqrt(mean * (1 - mean) / (n - 1)), n) for mean in right.tolist()]
    assert np.mean([low <= p <= high for low, high in ends]) > 0.92


def test_nineteen_in_twenty_paired_intervals_hold_the_change():
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(1000):
        change_P = rng.choice([0.0, 1.0, -1.0], p=[0.9, 0.08, 0.02], size=60)
        low, high = intervals.share_difference(change_P.tolist())
        hits.append(low <= 0.06 <= high)
    assert np.mean(hits) > 0.92
    low, high = intervals.share_difference([0.0] * 7)
    assert low == -high and 0.2 < high < 0.25


@pytest.mark.parametrize(("value", "records"), [(2 / 3, 10), (0.1, 6), (0.7, 12)])
def test_equal_values_are_as_uncertain_as_their_number_says(value, records):
    """The computed standard error of equal values may be a rounding error instead of 0, and must count as 0."""
    error = float(np.std([value] * records, ddof=1) / math.sqrt(records))
    assert intervals.share(value, error, records) == pytest.approx(intervals.share(value, 0.0, records))
    assert intervals.mean(value, error) is None is intervals.mean(0.0, 0.0)
    assert intervals.mean(0.0, 1e-12) is not None


def test_shares_that_are_all_right_are_not_certain(capsys):
    values = {"greedy_answer": 1.0, "error/greedy_answer": 0.0, "records": 7.0, "hard/sampled_pass": 0.0}
    values |= {"error/hard/sampled_pass": 0.0, "hard/records": 20.0, "greedy_reward": 3.0, "error/greedy_reward": 0.0}
    print_before_after(make_console(), {"before": values, "after": values})
    printed = capsys.readouterr().out
    for text in ("100.0% [64.6, 100.0]", "+0.0 points [-35.4, +35.4]", "0.0% [0.0, 16.1]", "3.000 "):
        assert text in printed, printed
    assert "± 0.0" not in printed and "3.000 [" not in printed


def test_a_change_has_no_interval_if_one_side_has_none_and_nothing_is_paired(capsys):
    before, after = ({"greedy_reward": 0.5 + i, "error/greedy_reward": 0.25 - 0.25 * i, "records": 9.0} for i in (0, 1))
    print_before_after(make_console(), {"before": before, "after": after})
    row = next(line for line in capsys.readouterr().out.splitlines() if "greedy_reward" in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["0.500 [0.010, 0.990]", "1.500", "+1.000"]


def test_a_mean_that_the_first_evaluation_had_not_is_in_the_table(capsys):
    print_before_after(make_console(), {"before": {}, "after": {"hard/greedy_answer": 0.5, "hard/records": 4.0}})
    row = next(line for line in capsys.readouterr().out.splitlines() if "hard/greedy_answer" in line)
    assert "not measured" in row and "50.0%" in row


def test_the_change_of_a_run_is_paired_by_record(tmp_path, capsys):
    """Of ten records, five became right and none became wrong. The evaluation between the first and the last is not
    kept."""
    texts = {0: "0000000111", 4: "1000000111", 8: "1111100111"}
    for step, text in texts.items():
        answers = [float(one) for one in text]
        summary.keep_evaluation(
            tmp_path, step, {"eval/greedy_answer": answers, "eval/greedy_reward": [None, *answers[1:]]}
        )
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["0.json", "8.json"]
    records = [
        {"step": 0, "eval/greedy_answer": 0.3, "eval/records": 10},
        {"step": 8, "eval/greedy_answer": 0.8, "eval/records": 10},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    written = summary.write_summary(tmp_path, {})
    assert written["change"]["greedy_answer"] == pytest.approx(intervals.share_difference([1.0] * 5 + [0.0] * 5))
    assert written["change"]["greedy_reward"] == pytest.approx(intervals.mean(4 / 9, math.sqrt(20 / 81 / 8)))
    print_before_after(make_console(), written)
    assert "+50.0 points [+9.3, +74.0]" in capsys.readouterr().out
    (tmp_path / "evaluations" / "8.json").write_bytes((tmp_path / "evaluations" / "0.json").read_bytes())
    print_before_after(make_console(), summary.write_summary(tmp_path, {}))
    printed = capsys.readouterr().out
    assert "no record changed" in printed and "points" not in printed
    summary.keep_evaluation(tmp_path, 8, {"eval/greedy_answer": [float(one) for one in texts[8]]})
    kept = tmp_path / "evaluations" / "8.json"
    kept.write_text(kept.read_text().replace("1.0", "0.0", 1))
    assert summary.write_summary(tmp_path, {})["change"] == {}, "an evaluation whose file is damaged is not compared"
    kept.write_text("{")
    assert summary.write_summary(tmp_path, {})["change"] == {}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_has_the_same_intervals():
    core = (pathlib.Path(__file__).parents[2] / "podrl/view/static/core.js").read_text()
    start, end = core.index("  const isShare"), core.index("  function number(")
    asked = (
        "'eval/greedy_answer', 1, 0, 7",
        "'greedy_answer', 0.5, 0.1, 26",
        "'r_reward', 1, 0.5, 9",
        "'greedy_answer', 0.6666666666666666, 1e-16, 10",
        "'r_reward', 1, 0, 9",
        "'r_reward', 0.6666666666666666, 1e-16, 9",
    )
    calls = ", ".join(f"interval({one})" for one in asked)
    script = f"{core[start:end]}\nconsole.log(JSON.stringify([{calls}]))"
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    wanted = [intervals.share(1, 0, 7), intervals.share(0.5, 0.1, 26), intervals.mean(1, 0.5)]
    wanted += [intervals.share(2 / 3, 1e-16, 10)]
    *ends, none, rounded = json.loads(found)
    assert none is None is rounded and [pytest.approx(one) for one in wanted] == ends
