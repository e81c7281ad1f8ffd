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


def test_changes_since_a_commit_and_since_one_that_is_not_known(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
        git("add", name)
        git("commit", "-q", "-m", name)
    (tmp_path / "a").write_text("2")  # not committed
    assert changed_since(git("rev-parse", "HEAD~1"), tmp_path) == ["a", "b"]
    assert changed_since("0" * 40, tmp_path) is None


def test_a_path_that_was_renamed_is_refused():
    with pytest.raises(pytest.UsageError, match=r"nightly\('podrl/no\.py'\), which is no path"):
        touched(Item(("podrl/launch.py", "podrl/no.py")), [], ROOT)
