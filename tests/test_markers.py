"""Chooses the tests that have to run after a change: tests that depend on a changed file by imports or `nightly`
marks."""

import pathlib
import re
import subprocess
import sys

import pytest
from nightly import LONG_TESTS, changed_since, long_of, touched
from reach import Reach

ROOT = pathlib.Path(__file__).resolve().parents[1]
REACH = Reach(ROOT)


class Item:
    """Stands in for a collected test; each of `marks` is the tuple of paths of one `nightly` mark."""

    nodeid = "tests/x/test_y.py::test_z[case]"

    def __init__(self, *marks, path=None):
        self.path = path or ROOT / "tests" / "x" / "test_y.py"
        self._marks = [pytest.mark.nightly(*paths).mark for paths in marks]

    def iter_markers(self, name):
        assert name == "nightly"
        return iter(self._marks)


@pytest.mark.parametrize(
    ("marks", "changed", "runs"),
    [
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
    assert touched(Item(*marks), changed, REACH, ROOT) == runs


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


@pytest.mark.parametrize("changed", ["tests/conftest.py", "tests/quick_runs.py", ".ci/constraints.txt"])
def test_what_sets_up_every_test_has_every_test_run_but_those_for_the_night(changed):
    assert not REACH.untouched("tests/algorithms/test_kl.py", [changed])
    assert not touched(Item(("podrl/launch.py",)), [changed], REACH, ROOT)


def test_a_path_that_was_renamed_is_refused():
    with pytest.raises(pytest.UsageError, match=r"nightly\('podrl/no\.py'\), which the checkout does not have"):
        touched(Item(("podrl/launch.py", "podrl/no.py")), [], REACH, ROOT)


FILES = {
    "podrl/__init__.py": '_HOME = {"Loss": "podrl.late.loss"}',
    "podrl/plain.py": 'static = "first"\nimport logging\n_log = logging.getLogger("podrl.late")',
    "podrl/late/__init__.py": "",
    "podrl/late/loss.py": "def f():\n    from podrl import plain",
    "podrl/late/worker.py": "",
    "podrl/start.py": 'NAME = "podrl.late.worker:main"\nLOG = "podrl.nothing"',
    "podrl/data.json": "{}",
    "podrl/view/static/page.js": "",
    "configs/first.py": "",
    "docs/page.md": "",
    "tests/conftest.py": "import setup_of_all",
    "tests/setup_of_all.py": "import subprocess",
    "tests/helper.py": "import podrl.plain",
    "tests/x/conftest.py": "from podrl.start import NAME",
    "tests/x/test_late.py": "import podrl\nprint(podrl.Loss)",
    "tests/x/test_process.py": "import subprocess",
    "tests/x/test_page.py": 'PAGE = "docs/page.md"',
    "tests/y/acts.py": "",
    "tests/y/test_helped.py": "import helper\nprint(__file__)",
    "tests/y/test_package.py": "import podrl.late",
    "tests/y/data/some.json": "{}",
    "tests/y/test_config.py": 'CONFIG = "first.py"',
    "tests/y/test_data.py": 'HERE = "data"',
    "tests/y/test_none.py": "import json",
}
ALL = {"late", "helped", "package", "config", "data", "none"}  # test files whose dependencies are known
ALWAYS = {"tests/conftest.py", "tests/setup_of_all.py"}


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


OF_X = {"tests/x/conftest.py", "podrl/start.py", "podrl/late/worker.py", "podrl/__init__.py", "podrl/late/__init__.py"}
PLAIN = {"podrl/plain.py", "podrl/__init__.py"}


@pytest.mark.parametrize(
    ("test", "files"),
    [
        ("x/test_late.py", OF_X | PLAIN | {"podrl/late/loss.py"}),
        ("x/test_process.py", None),
        ("x/test_page.py", None),
        ("y/test_helped.py", {"tests/helper.py", "tests/y/acts.py"} | PLAIN),
        ("y/test_package.py", {"podrl/late/__init__.py", "podrl/late/loss.py", "podrl/late/worker.py"} | PLAIN),
        ("y/test_none.py", set()),
    ],
)
def test_what_a_test_file_depends_on(test, files, checkout):
    """A test file depends on its imports anywhere, modules named in its strings, the modules of a package's public
    names, and conftest.py files; None if its dependencies are unknown."""
    found = Reach(checkout).of(f"tests/{test}")
    assert found == (None if files is None else files | ALWAYS | {f"tests/{test}"})


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ([], ALL),
        (["docs/page.md", ".ci/nightly-passed", "benchmarks/step.py"], ALL),
        (["podrl/plain.py"], {"config", "data", "none"}),
        (["podrl/start.py"], ALL - {"late"}),
        (["tests/y/acts.py", "tests/x/test_late.py"], ALL - {"late", "helped"}),
        (["configs/first.py"], ALL - {"config"}),  # the word 'first' counts in files of tests/, not in podrl/plain.py
        (["tests/y/data/some.json"], ALL - {"data"}),
        (
            ["podrl/view/static/page.js"],
            ALL - {"late", "helped", "package"},
        ),  # podrl/plain.py names the folder 'static'
        (["configs/first.py", "podrl/start.py"], ALL - {"config", "late"}),
        (["tests/setup_of_all.py"], set()),
        (["podrl/data.json"], set()),
        (["podrl/gone.py"], set()),
        (["pyproject.toml"], set()),
    ],
)
def test_a_test_runs_unless_all_it_depends_on_is_as_it_was(changed, left_out, checkout):
    reach = Reach(checkout)
    tests = [path for path in FILES if "/test_" in path]
    assert {test for test in tests if not touched(Item(path=checkout / test), changed, reach, checkout)} == {
        test for test in tests if test.partition("/test_")[2].removesuffix(".py") in left_out
    }


@pytest.mark.parametrize(
    ("test", "changed", "runs"),
    [
        ("y/test_helped.py", "tests/y/test_helped.py", True),
        ("y/test_helped.py", "tests/helper.py", True),
        ("y/test_helped.py", "podrl/plain.py", False),  # the helper imports it; an indirect import does not count
        ("x/test_late.py", "podrl/start.py", True),  # imported by tests/x/conftest.py, whose direct imports count
        ("x/test_late.py", "tests/x/conftest.py", True),
        ("x/test_late.py", "pyproject.toml", False),
        ("x/test_process.py", "pyproject.toml", True),  # it starts processes, so its dependencies are unknown
    ],
)
def test_a_long_test_runs_if_a_file_changed_that_it_imports_directly(test, changed, runs, checkout):
    (checkout / ".ci").mkdir()
    (checkout / LONG_TESTS).write_text(f"tests/{test}::test_z\ntests/other.py::test_z\n")
    item = Item(path=checkout / "tests" / test)
    item.nodeid = f"tests/{test}::test_z[case]"
    assert touched(item, [changed], Reach(checkout), checkout) == runs
    assert touched(item, None, None, checkout)


def test_long_tests_are_those_whose_cases_take_long_on_average():
    seconds = {"a.py::x[1]": 9.0, "a.py::x[2]": 1.0, "a.py::y[1]": 7.0, "a.py::y[2]": 0.5, "a.py::b": 4.1}
    assert long_of(seconds) == ["a.py::b", "a.py::x"]


def test_every_long_test_exists():
    """Some test files import test functions from other files, so a function may be defined in any test file."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    defined = set(re.findall(r"^ *def (test_\w+)\(", "\n".join(sources.values()), re.M))
    for name in (ROOT / LONG_TESTS).read_text().split():
        path, _, function = name.partition("::")
        assert path in sources and function in defined, f"{LONG_TESTS} names {name}: run .ci/nightly, or edit it"


def test_what_is_imported_is_found():
    """podrl.job.job imports most of podrl; every module that is then loaded must be among the files that `REACH`
    finds."""
    program = "import podrl.job.job, sys\nprint(*(m.__file__ for n, m in sys.modules.items() if n.startswith('podrl')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {pathlib.Path(name).relative_to(ROOT).as_posix() for name in done.stdout.split()}
    found = REACH.of("podrl/job/job.py")
    assert found is not None and len(imported) > 150 and imported - found == set()
