"""The page about a run: tables and lines derived from its settings, printed at its start and kept in its directory."""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import rich.console

from podrl.rundir.console import print_table
from podrl.storage.storage import write_whole

NAME = "about.json"


class Table(NamedTuple):
    """A table of the page.

    Attributes:
      title: line above the table.
      header: names of the columns.
      rows: cells of each row, one per column.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class About(NamedTuple):
    """The page about a run: facts that follow from the run's settings, without its data.

    Attributes:
      tables: tables, which come first.
      lines: sentences and formulas, one per line.
    """

    tables: Sequence[Table]
    lines: Sequence[str]


def print_about(console: rich.console.Console, about: About) -> None:
    """Prints the tables, then the lines."""
    for table in about.tables:
        print_table(console, *table)
    for line in about.lines:
        console.print(line)


def write_about(workdir: pathlib.Path, about: About) -> None:
    """Writes the page as JSON: {"tables": [{"title", "header", "rows"}], "lines"}."""
    page = {"tables": [table._asdict() for table in about.tables], "lines": list(about.lines)}
    write_whole(workdir / NAME, json.dumps(page) + "\n")
