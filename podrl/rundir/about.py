"""The page about a run, written when it begins and kept as text in its directory."""

import io
import pathlib
from collections.abc import Callable

import rich.console

from podrl.rundir.console import make_console
from podrl.storage.storage import write_whole

NAME = "about.txt"


def write_about(workdir: pathlib.Path, tell: Callable[[rich.console.Console], None]) -> None:
    """Writes what `tell` prints on a console, as plain text."""
    page = io.StringIO()
    tell(make_console(160, file=page))
    write_whole(workdir / NAME, page.getvalue())
