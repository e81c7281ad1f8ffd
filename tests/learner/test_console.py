"""The console prints users' text as it is: no path, key, prompt or name is read as markup."""

import io
import pathlib
import re

import pytest

import podrl
from podrl.rundir.console import Progress, make_console, print_table

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
    """A console of rich's own, its `print`, `track` or markup would interpret users' text."""
    package = pathlib.Path(podrl.__file__).parent
    made = re.compile(r"\bConsole\(|from_markup|markup=True|rich\.print|from rich import print")
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
