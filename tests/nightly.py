"""Chooses among tests marked `nightly`: those that a change touches run every time, the others by .ci/nightly alone."""

import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest


def changed_since(commit: str, root: pathlib.Path) -> list[str] | None:
    """Lists the files, relative to the root, that differ from a commit; None where the commit is not known here."""
    words = ["git", "-C", str(root), "diff", "--name-only", commit]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def touched(item: Any, changed: Sequence[str] | None, root: pathlib.Path) -> bool:
    """True if a test has to run: it is not marked nightly, or changes touch its file or a path that its marks name.

    Args:
      item: the collected test.
      changed: the files that have changed; None where that is not known, and every test runs.
      root: the checkout.

    Raises:
      pytest.UsageError: a mark names a path that is not there, so that no change would ever touch it.
    """
    marks = list(item.iter_markers("nightly"))
    named = [path for mark in marks for path in mark.args]
    if missing := [path for path in named if not (root / path).exists()]:
        raise pytest.UsageError(f"{item.nodeid} is marked nightly({missing[0]!r}), which is no path of the checkout.")
    if not marks or changed is None:
        return True
    own = item.path.relative_to(root).as_posix()
    return any(path == name or path.startswith(f"{name}/") for path in changed for name in (own, *named))
