"""Console output of a run: tables, the progress bar, plain lines when the output is not a terminal.

Every console of podrl is made here, with markup off: paths, prompts and names are the user's, and mean what they say.
"""

import sys
from collections.abc import Mapping, Sequence

import rich.console
import rich.progress
import rich.table

# Wide enough for the tables when the output goes to a file.
_WIDTH = 100


def make_console(width: int = _WIDTH, *, stderr: bool = False, quiet: bool = False) -> rich.console.Console:
    """Makes a console of standard output or error, `width` columns where that is no terminal, or a silent one."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return rich.console.Console(
        width=None if terminal else width,
        stderr=stderr,
        quiet=quiet,
        soft_wrap=not terminal,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_table(
    console: rich.console.Console, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Prints a table; the first column is left-aligned, the others right-aligned."""
    table = rich.table.Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


class Progress:
    """A progress bar over steps with a few numbers: reward, KL, accuracy, tokens per second, time left.

    On a terminal one live bar; otherwise a line every `every` steps and at the end.
    """

    def __init__(self, console: rich.console.Console, description: str, start: int, total: int, every: int):
        self._console, self._total, self._every = console, total, max(every, 1)
        self._name = description
        self._live = None
        if console.is_terminal:
            self._live = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[numbers]}", markup=False),
                rich.progress.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task(description, total=total, completed=start, numbers="")
            self._live.start()

    def update(self, step: int, numbers: Mapping[str, float], seconds_left: float | None) -> None:
        """Shows step `step` of the total with named numbers; `seconds_left` is None where it is not known yet."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._live is not None:
            self._live.update(self._task, completed=step, numbers=text)
        elif step % self._every == 0 or step in (1, self._total):
            left = "" if seconds_left is None else f"  left {int(seconds_left) // 60}:{int(seconds_left) % 60:02d}"
            self._console.print(f"{self._name} {step}/{self._total}  {text}{left}")
            self._console.file.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
