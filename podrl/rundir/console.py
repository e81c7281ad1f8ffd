"""Console output of a run: tables, the progress bar, plain lines when the output is not a terminal.

Every console of podrl is made here. Its markup is off, so that the user's paths, prompts and names are printed
unchanged.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any

import rich.console
import rich.live
import rich.progress
import rich.table
import rich.text

from podrl import python_names

# Number of columns that is enough for the tables when the output goes to a file.
_WIDTH = 124
_NARROW = 60  # a terminal with fewer columns gets a run's table without the columns of means
_LAST = 10  # number of steps over which a mean is taken


class _Console(rich.console.Console):
    """A console whose lines name Python arguments in place of keys while a call of a learner's user is in progress."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(python_names.line(one) if isinstance(one, str) else one for one in objects), **options)


def make_console(
    width: int = _WIDTH, *, stderr: bool = False, quiet: bool = False, file: IO[str] | None = None
) -> rich.console.Console:
    """Makes a console.

    Args:
      width: number of columns if the output is not a terminal.
      stderr: True for standard error, False for standard output.
      quiet: True to print nothing.
      file: file to print to; None prints to standard output or standard error.
    """
    terminal = (file or (sys.stderr if stderr else sys.stdout)).isatty()
    return _Console(
        file=file,
        # Without this, output to files would have colours if FORCE_COLOR or TTY_COMPATIBLE is set, as CI systems do.
        force_terminal=terminal,
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


class TimeLeft:
    """Estimates the seconds until the last step of a run."""

    def __init__(self, total: int) -> None:
        """Starts without an estimate; `total` is the number of the last step."""
        self._total = total
        self._first, self._began, self._spent = 0, 0.0, 0.0

    def after(self, step: int, seconds: float) -> float | None:
        """Returns the seconds that are left after a step that took `seconds`; None in the first call.

        The first step does not count: it compiles, so its time is untypical. The time of the steps so far is the larger
        of two: the time by the clock, and the sum of the steps' seconds. By the clock alone a step could take no time,
        because a host may learn of two steps at once. The sum alone leaves out the time between the steps.
        """
        if not self._first:
            self._first, self._began = step, time.monotonic()
            return None
        self._spent += seconds
        spent = max(self._spent, time.monotonic() - self._began)
        return spent / (step - self._first) * (self._total - step)


class Progress:
    """Shows the progress over steps, with the numbers that people watch.

    A terminal shows a live bar above a table of these numbers, with their means over the last and the first steps; a
    narrow terminal shows no means. Any other output gets a line every `every` steps, at the first step and at the end,
    without control characters.
    """

    def __init__(
        self, console: rich.console.Console, description: str, start: int, total: int, every: int, updates: int = 1
    ):
        """Shows the bar if the output is a terminal.

        Args:
          console: console to print to.
          description: name of a step, for the bar and the lines.
          start: number of steps done before.
          total: total number of steps.
          every: number of steps between two lines.
          updates: number of updates in a step; if there are several, a line counts updates too.
        """
        self._console, self._total, self._every, self._updates = console, total, max(every, 1), updates
        self._name = description
        self._history: dict[str, list[float]] = {}
        self._live = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[left]}", markup=False),
                console=console,
            )
            self._task = self._bar.add_task(description, total=total, completed=start, left="")
            self._live = rich.live.Live(self._bar, console=console, refresh_per_second=2)
            self._live.start()

    def update(
        self,
        step: int,
        numbers: Mapping[str, float],
        seconds_left: float | None,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Shows that a step is done, with its numbers.

        Args:
          step: number of the step, from 1.
          numbers: numbers that a line and the table show, by name.
          seconds_left: estimated seconds until the end; None if not known yet.
          more: further numbers that only the table shows.
        """
        left = "" if seconds_left is None else f"left {int(seconds_left) // 60}:{int(seconds_left) % 60:02d}"
        each = self._updates
        updates = f" ({step * each} of {self._total * each} updates)" if each > 1 else ""
        if self._live is not None:
            self._bar.update(self._task, completed=step, left=f"{updates} {left}".strip())
            self._live.update(rich.console.Group(self._bar, self._table({**numbers, **more})))
        elif step % self._every == 0 or step in (1, self._total):
            text = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
            self._console.print(f"{self._name} {step}/{self._total}{updates}  {text}" + (f"  {left}" if left else ""))
            self._console.file.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _table(self, numbers: Mapping[str, float]) -> rich.table.Table:
        """Returns the table of the numbers of this step, with their means over earlier steps.

        Names are wrapped in `Text`, so that no markup in a user's names is interpreted.
        """
        wide = self._console.width >= _NARROW
        table = rich.table.Table(box=None, pad_edge=False)
        table.add_column("", overflow="ellipsis", no_wrap=True)
        for title in ("now", f"last {_LAST}", f"first {_LAST}") if wide else ("now",):
            table.add_column(title, justify="right", no_wrap=True)
        for name, value in numbers.items():
            history = self._history.setdefault(name, [])
            history.append(value)
            means = [_short(sum(part) / len(part)) for part in (history[-_LAST:], history[:_LAST])] if wide else []
            table.add_row(rich.text.Text(name), _short(value), *means)
            del history[_LAST:-_LAST]
        return table


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.01:  # so that a small learning rate shows its digits
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
