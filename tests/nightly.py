"""Chooses the tests that have to run after a change, and lists the long tests that .ci/nightly measures."""

import ast
import collections
import functools
import pathlib
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from reach import Reach

LONG_TESTS = ".ci/long-tests"
_LONG_S = 4.0  # a test is long if its cases take more seconds on average in .ci/nightly


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
    """Returns the syntax tree of a Python source as text, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def touched(item: Any, changed: Sequence[str] | None, reach: Reach | None, root: pathlib.Path) -> bool:
    """Returns True if a test has to run after a change.

    Args:
      item: collected test. A test marked nightly runs if its file or a path in its marks has changed. A long test
        (.ci/long-tests) runs if a change touches its file, the conftest.py files of its folders, or a file that one of
        them imports directly. Any other test runs unless its imports show that it depends on no changed file.
      changed: files that have changed; None if they are not known, so that every test runs.
      reach: finds the files that a test file depends on; None if every test runs.
      root: directory of the checkout.

    Raises:
      pytest.UsageError: a mark names a path that does not exist, so no change would ever touch it.
    """
    marks = list(item.iter_markers("nightly"))
    named = [path for mark in marks for path in mark.args]
    if missing := [path for path in named if not (root / path).exists()]:
        raise pytest.UsageError(f"{item.nodeid} is marked nightly({missing[0]!r}), which the checkout does not have.")
    if changed is None or reach is None:
        return True
    own = item.path.relative_to(root).as_posix()
    if not marks and _function(item.nodeid) in _long(root) and reach.of(own) is not None:
        return not reach.imports(own).isdisjoint(changed)
    if not marks:
        return not reach.untouched(own, changed)
    return any(path == name or path.startswith(f"{name}/") for path in changed for name in (own, *named))


@functools.cache
def _long(root: pathlib.Path) -> frozenset[str]:
    """Reads the names of long tests, as in 'tests/x/test_y.py::test_z'."""
    path = root / LONG_TESTS
    return frozenset(path.read_text().split()) if path.exists() else frozenset()


def _function(case: str) -> str:
    return case.partition("[")[0]


class LongTests:
    """A plugin of pytest that writes the names of long tests to a file when all default tests have run."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self._path.write_text("".join(f"{name}\n" for name in long_of(self._seconds)))


def long_of(seconds: Mapping[str, float]) -> list[str]:
    """Lists the test functions whose cases take longer than `_LONG_S` on average, sorted.

    Args:
      seconds: time of each case, setup and teardown included, by its name, as in 'tests/x/test_y.py::test_z[case]'.
    """
    cases: dict[str, list[float]] = collections.defaultdict(list)
    for name, value in seconds.items():
        cases[_function(name)].append(value)
    return sorted(name for name, values in cases.items() if statistics.fmean(values) > _LONG_S)
