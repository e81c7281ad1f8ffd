"""The console prints users' text unchanged: no path, key, prompt or name is read as markup."""

import io
import pathlib
import re

import pytest

import podrl
from podrl.rundir.console import Progress, TimeLeft, make_console, print_table

HOSTILE = ["a[/b]", "[bold]x", "[red]", "runs/[1]", ":smile:", "[link=x]y[/link]", r"\[x]"]


@pytest.mark.parametrize("text", HOSTILE)
def test_lines_tables_and_progress_show_what_was_given(text):
    console = make_console(120)
    console.file = out = io.StringIO()
    console.print(f"Run directory: {text}")
    print_table(console, f"title {text}", ["name", f"{text} column"], [[text, f"cell {text}"]])
    progress = Progress(console, text, 0, 2, 1)
    progress.update(1, {f"reward/{text}": 1.0}, 1.0)
    progress.close()
    shown = out.getvalue()
    assert shown.count(text) == 7, shown


@pytest.mark.parametrize("text", HOSTILE)
def test_the_live_bar_shows_what_was_given(text):
    console = make_console(200)
    console.file = out = io.StringIO()
    console._force_terminal = True
    progress = Progress(console, text, 0, 2, 1)
    progress.update(1, {f"reward/{text}": 1.0}, 1.0)
    progress.close()
    assert text in out.getvalue() and f"reward/{text}" in out.getvalue()


def test_every_console_is_made_without_markup():
    """A console that rich makes by default, its `print` and its markup would interpret users' text."""
    package = pathlib.Path(podrl.__file__).parent
    made = re.compile(r"\bConsole\(|(?<!class )\b_Console\(|from_markup|markup=True|rich\.print|from rich import print")
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if made.search(line)
    ]
    home = [line for line in found if line.startswith("rundir/console.py")]
    assert len(home) == 1 and found == home


def test_the_time_left_is_said_once_it_can_be_known(capsys):
    progress = Progress(make_console(), "step", 0, 3, 1)
    progress.update(1, {"reward": 1.0}, None)
    progress.update(2, {"reward": 1.0}, 61.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first.strip() == "step 1/3  reward 1.000" and second == "step 2/3  reward 1.000  left 1:01"


def test_steps_that_are_told_at_once_took_their_own_time():
    """A host of a pod may learn of two steps at the same moment; the estimate must not take the second for instant."""
    left = TimeLeft(36)
    assert left.after(19, 40.0) is None
    assert left.after(20, 2.0) >= 2.0 * 16
    assert left.after(36, 2.0) == 0.0


def test_a_line_counts_updates_too_where_a_step_makes_several(capsys):
    progress = Progress(make_console(), "step", 0, 3, 1, updates=4)
    progress.update(2, {"lr": 5e-6}, None)
    assert capsys.readouterr().out == "step 2/3 (8 of 12 updates)  lr 5.00e-06\n"


def _live(width: int, steps: int = 3) -> str:
    console = make_console(width)
    console.file = out = io.StringIO()
    console._force_terminal, console.width = True, width
    progress = Progress(console, "step", 0, steps, 1)
    for step in range(1, steps + 1):
        progress.update(step, {"reward": float(step)}, 90.0 - step, {"reward/answer": 10.0 * step})
    progress.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_the_live_table_has_numbers_and_their_means():
    shown = _live(90, steps=25).replace("\r", "\n").splitlines()
    last = [line.split() for line in shown if line.startswith("reward/answer")][-1]
    assert last == ["reward/answer", "250.0", "205.0", "55.0"]
    assert any("25/25" in line and "left 1:05" in line for line in shown)


def test_a_narrow_terminal_gets_what_fits():
    shown = _live(32).replace("\r", "\n").splitlines()
    assert max(len(line.rstrip()) for line in shown) <= 32
    last = [line.split() for line in shown if line.startswith("reward/answer")][-1]
    assert last == ["reward/answer", "30.0"]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR_FORCE"])
def test_a_file_gets_lines_without_control_characters(capsys, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    progress = Progress(make_console(), "step", 0, 1, 1)
    progress.update(1, {"reward": 1.0}, None, {"reward/answer": 2.0})
    progress.close()
    assert capsys.readouterr().out == "step 1/1  reward 1.000\n"
    print_table(make_console(), "numbers", ["name", "value"], [["a", 1]])
    assert "\x1b" not in capsys.readouterr().out
