"""What `nightly` leaves out: marked tests, while neither their file nor a path that they name has changed."""

import pathlib
import subprocess

import pytest
from nightly import changed_since, touched

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Item:
    """A collected test of tests/x/test_y.py with `nightly` marks of these paths."""

    nodeid, path = "test_y", ROOT / "tests" / "x" / "test_y.py"

    def __init__(self, *marks):
        self._marks = [pytest.mark.nightly(*paths).mark for paths in marks]

    def iter_markers(self, name):
        assert name == "nightly"
        return iter(self._marks)


@pytest.mark.parametrize(
    ("marks", "changed", "runs"),
    [
        ([], [], True),
        ([()], [], False),
        ([()], ["podrl/launch.py"], False),
        ([()], ["tests/x/test_y.py"], True),
        ([("podrl/plan",)], ["podrl/plan/hlo.py"], True),
        ([("podrl/plan",)], ["podrl/plan.py"], False),
        ([("podrl/launch.py",)], ["podrl/launch.py"], True),
        ([("podrl/plan",), ("launch",)], ["launch/gke.py"], True),
        ([("podrl/plan",)], None, True),
    ],
)
def test_what_runs(marks, changed, runs):
    assert touched(Item(*marks), changed, ROOT) == runs


@pytest.fixture
def git(tmp_path):
    """Makes a repository with two commits: `a` comes with the first, `b` and a Python file with the second."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for names in (("a",), ("b", "c.py")):
        for name in names:
            (tmp_path / name).write_text(CODE if name == "c.py" else "1")
        git("add", *names)
        git("commit", "-q", "-m", "more")
    return git


CODE = '''"""Adds."""


def add(x, y=1):
    """Adds one number to another."""
    return x + y  # exactly
'''


def test_changes_since_a_commit_and_since_one_that_is_not_known(git, tmp_path):
    (tmp_path / "a").write_text("2")  # not committed
    assert changed_since(git("rev-parse", "HEAD~1"), tmp_path) == ["a", "b", "c.py"]
    assert changed_since("0" * 40, tmp_path) is None


@pytest.mark.parametrize(
    ("words", "others", "changed"),
    [
        ('"""Adds one number to another."""', '"""Other words."""', False),
        ("  # exactly", "", False),
        ("x + y", "(x\n            + y)", False),
        ("y=1", "y=2", True),
        ("return x", '"""Not a docstring."""\n    return x', True),
        ("return x", "return (x", True),
    ],
)
def test_words_are_no_change(words, others, changed, git, tmp_path):
    (tmp_path / "c.py").write_text(CODE.replace(words, others))
    assert changed_since(git("rev-parse", "HEAD"), tmp_path) == (["c.py"] if changed else [])


def test_a_python_file_that_comes_goes_or_moves_is_changed(git, tmp_path):
    git("mv", "c.py", "d.py")
    assert changed_since(git("rev-parse", "HEAD"), tmp_path) == ["c.py", "d.py"]


def test_what_sets_up_every_test_has_every_test_run(git, tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "constraints.txt").write_text("jax==0.10.2")
    git("add", ".ci")
    assert changed_since(git("rev-parse", "HEAD"), tmp_path) is None


def test_a_path_that_was_renamed_is_refused():
    with pytest.raises(pytest.UsageError, match=r"nightly\('podrl/no\.py'\), which is no path"):
        touched(Item(("podrl/launch.py", "podrl/no.py")), [], ROOT)
