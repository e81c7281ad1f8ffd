"""Chooses the tests that a change touches; .ci/nightly runs the others, too."""

import ast
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from reach import Reach


def changed_since(commit: str, root: pathlib.Path) -> list[str] | None:
    """Lists the files, relative to the root, that differ from a commit in more than words.

    A Python file whose comments, docstrings or layout alone differ runs as it ran before.

    Returns:
      The files; None where the commit is not known here, and every test has to run.
    """
    done = _git(root, "diff", "--name-only", "--no-renames", commit)
    if done is None:
        return None
    return [name for name in done.splitlines() if not _same_code(commit, root, name)]


def _git(root: pathlib.Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _same_code(commit: str, root: pathlib.Path, name: str) -> bool:
    if not name.endswith(".py") or not (root / name).exists():
        return False
    before = _git(root, "show", f"{commit}:{name}")
    try:
        return before is not None and _code(before) == _code((root / name).read_text())
    except SyntaxError:
        return False


def _code(source: str) -> str:
    """Writes a Python source as its syntax tree, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def touched(item: Any, changed: Sequence[str] | None, reach: Reach | None, root: pathlib.Path) -> bool:
    """True if a test has to run.

    Args:
      item: the collected test. One that is marked nightly runs where its file or a path that its marks name has
        changed; any other one, unless its imports tell that it depends on nothing that has changed.
      changed: the files that have changed; None where that is not known, and every test runs.
      reach: what test files depend on; None where every test runs.
      root: the checkout.

    Raises:
      pytest.UsageError: a mark names a path that is not there, so that no change would ever touch it.
    """
    marks = list(item.iter_markers("nightly"))
    named = [path for mark in marks for path in mark.args]
    if missing := [path for path in named if not (root / path).exists()]:
        raise pytest.UsageError(f"{item.nodeid} is marked nightly({missing[0]!r}), which is no path of the checkout.")
    if changed is None or reach is None:
        return True
    own = item.path.relative_to(root).as_posix()
    if not marks:
        return not reach.untouched(own, changed)
    return any(path == name or path.startswith(f"{name}/") for path in changed for name in (own, *named))
