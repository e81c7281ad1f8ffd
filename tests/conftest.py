"""Fakes eight CPU devices for every test before any test module imports jax, and shares compiled programs."""

import atexit
import gc
import os
import pathlib
import shutil
import sys
import tempfile

import hypothesis
import nightly
import pytest
from budget import leave_to_nightly
from exits import exit_only_between_tests
from quick_runs import NO_EMITTERS, QUICK_RUNS
from reach import Reach

gc.disable()  # off until all modules are imported, because imports make millions of objects and little garbage
# Without bytecode files each of hundreds of processes would compile podrl's modules anew, a tenth of the time of its
# start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="podrl-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Jobs may run inside this process. Without this line, a host that calls os._exit would end all tests without a word.
os._exit = exit_only_between_tests(os._exit)
hypothesis.settings.register_profile("podrl", deadline=None, print_blob=True)  # no example fails because it is slow
hypothesis.settings.load_profile("podrl")


def pytest_xdist_auto_num_workers(config):
    """Runs all tests in one process per core, but at most four (each needs gigabytes); runs chosen files in this
    process."""
    return min(os.cpu_count() or 1, 4) if config.args == config.getini("testpaths") else 0


@pytest.fixture(scope="module")
def quick_compilation():
    """Turns XLA's optimisations off for modules whose tests mostly compile: compiling then takes half the time.

    The keys of jax's cache in memory do not include this setting, so later modules in this process would get programs
    without optimisations, whose results differ in the last bits. The keys include the matmul precision. Setting it to
    the precision that CPU devices have anyway keeps the two kinds of programs apart.
    """
    _optimised(False)
    yield
    _optimised(True)


def pytest_addoption(parser):
    parser.addoption(
        "--since",
        metavar="COMMIT",
        default="",
        help="Leave out tests that depend on nothing that has changed since COMMIT, by their imports or nightly marks.",
    )
    parser.addoption("--write_long_tests", action="store_true", help=f"Write {nightly.LONG_TESTS} from this run.")


def pytest_ignore_collect(collection_path, config):
    """Skips files that have none of the requested marks, because most of a collection's time goes into imports."""
    marks = config.option.markexpr.split(" or ")
    if all(map(str.isidentifier, marks)) and collection_path.match("test_*.py"):
        source = collection_path.read_text().lower()
        return not any(mark in source for mark in marks) or None
    return None


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that do not depend on any file changed since all tests passed."""
    commit = config.getoption("since")
    changed = nightly.changed_since(commit, config.rootpath) if commit else None
    reach = None if changed is None else Reach(config.rootpath)
    left_out = {item for item in items if not nightly.touched(item, changed, reach, config.rootpath)}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_configure(config):
    """Turns XLA's emitters of fused loops off, which take half of the time of compiling; slow tests keep them.

    With emitters XLA compiles each loop in passes of its own; without emitters, the whole program at once. Slow tests
    run separately, so they can compile as runs do.
    """
    if config.getoption("write_long_tests") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(nightly.LongTests(config.rootpath / nightly.LONG_TESTS))
    if "not slow" in config.option.markexpr:
        os.environ["XLA_FLAGS"] += f" {NO_EMITTERS}"


def pytest_collection_finish(session):
    """Keeps the modules' objects out of garbage collections and makes collections rarer, which saves a twentieth of the
    tests' time."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


# Default tests and their fixtures compile much and run little, so they compile without optimisations. Plans need
# optimised programs, and slow tests compile as runs do.
OPTIMISED = "plan"
_MOST_MAPS = 32_000


def _quick(item):
    if item is None or item.path.parent.name == OPTIMISED:
        return False
    return not any(item.get_closest_marker(mark) for mark in ("slow", "parity", "e2e"))


def _optimised(yes):
    """Turns XLA's optimisations on or off. The matmul precision changes nothing on CPU devices; it keeps programs with
    and without optimisations apart in jax's caches."""
    import jax

    jax.config.update("jax_disable_most_optimizations", not yes)
    jax.config.update("jax_default_matmul_precision", None if yes else "float32")


def _runs_quickly(item):
    """Returns True if the processes that a test starts must compile without optimisations (tests/processes.py)."""
    return item is not None and item.get_closest_marker("e2e") and not item.get_closest_marker("optimised")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    leave_to_nightly(item)
    if _quick(item):
        _optimised(False)
    if _runs_quickly(item):
        os.environ[QUICK_RUNS] = "true"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if _quick(item) and not _quick(nextitem):
        _optimised(True)
    if not _runs_quickly(nextitem):
        os.environ.pop(QUICK_RUNS, None)
    if nextitem is None or nextitem.path != item.path:
        _drop_programs()


def _drop_programs():
    """Drops jax's compiled programs between two files if this process has half of the memory maps that Linux allows.

    Each program takes several of the 65,530 maps. A process that runs half of all tests would need about as many, and
    one without a free map dies of a segmentation fault.
    """
    maps = pathlib.Path("/proc/self/maps")  # exists only on Linux
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        jax.clear_caches()  # noqa: TID251 - no test counts compilations across two files
        gc.collect()


@pytest.fixture(scope="session")
def _buckets():
    pytest.importorskip("gcsfs", reason="needs the extra [gcs]")
    pytest.importorskip("gcp_storage_emulator", reason="needs the storage emulator of the extra [test]")
    from bucket import Bucket

    with Bucket() as served:
        yield served


@pytest.fixture
def bucket(_buckets, monkeypatch):
    """Returns the bucket of a storage emulator; in this process and its children, gs:// URLs lead to this emulator."""
    for name, value in _buckets.environment().items():
        monkeypatch.setenv(name, value)
    return _buckets
