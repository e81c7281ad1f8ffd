"""Chooses the tests that a change touches, and those of them that run first; .ci/nightly runs all tests."""

import ast
import pathlib
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from reach import Reach

LONG = ("nightly", "e2e", "parity", "slow")  # marks of tests that the time of their stage bounds in any case


def changed_since(commit: str, root: pathlib.Path) -> list[str] | None:
    """Lists the files, relative to the root, that differ from a commit in more than comments and docstrings.

    A Python file that differs only in comments, docstrings or layout behaves as before, so it is left out.

    Returns:
      The files; None if the commit is not known here, so that every test has to run.
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
      item: collected test. A test marked nightly runs if its file or a path in its marks has changed; any other test
        runs unless its imports show that it depends on no changed file.
      changed: files that have changed; None if they are not known, so that every test runs.
      reach: dependencies of test files; None if every test runs.
      root: directory of the checkout.

    Raises:
      pytest.UsageError: a mark names a path that does not exist, so no change would ever touch it.
    """
    marks = list(item.iter_markers("nightly"))
    named = [path for mark in marks for path in mark.args]
    if missing := [path for path in named if not (root / path).exists()]:
        raise pytest.UsageError(f"{item.nodeid} is marked nightly({missing[0]!r}), which is no path of the checkout.")
    if changed is None or reach is None:
        return True
    own = _own(item, root)
    if not marks:
        return not reach.untouched(own, changed)
    return any(path == name or path.startswith(f"{name}/") for path in changed for name in (own, *named))


def near(item: Any, changed: Sequence[str] | None, reach: Reach | None, root: pathlib.Path) -> bool:
    """True if a test examines a changed file: its own file or, for default tests, a file that it imports directly.

    Args:
      item: collected test.
      changed: files that have changed; None if they are not known.
      reach: dependencies of test files; None if the changed files are not known.
      root: directory of the checkout.
    """
    if changed is None or reach is None:
        return False
    own = _own(item, root)
    examined = {own} if any(map(item.get_closest_marker, LONG)) else {own, *reach.imports(own)}
    return not examined.isdisjoint(changed)


def nearest_first(items: Sequence[Any], near: Collection[Any]) -> list[Any]:
    """Sorts tests by files: files with a test in `near` come first, then files with many tests, which are short."""
    files: dict[pathlib.Path, list[Any]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = sorted(files.values(), key=lambda tests: (not any(test in near for test in tests), -len(tests)))
    return [test for tests in order for test in tests]


def _own(item: Any, root: pathlib.Path) -> str:
    return item.path.relative_to(root).as_posix()
