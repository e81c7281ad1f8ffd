"""Fakes eight CPU devices for every test before any test module imports jax, and shares compiled programs."""

import atexit
import os
import shutil
import tempfile

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="podrl-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="module")
def quick_compilation():
    """Leaves XLA's optimisations out where compiling takes most of the time of a module's tests: it takes half.

    jax's cache in memory does not know that setting: what was compiled under it would go on being used by the modules
    that follow in this process, where it differs in the last bits from what they compile themselves. A precision that
    CPU devices have anyway is in the cache's keys, and keeps the two apart.
    """
    _optimised(False)
    yield
    _optimised(True)


# Folders whose default tests compile much and run little. Their session fixtures compile, too, before any fixture of a
# module could ask for it. Slow tests compile as runs do.
QUICK = ("cluster", "models", "rollout", "transfer")


def _quick(item):
    if item is None or item.path.parent.name not in QUICK:
        return False
    return not any(item.get_closest_marker(mark) for mark in ("slow", "parity", "e2e"))


def _optimised(yes):
    """Sets whether XLA optimises; the precision, which CPU devices have anyway, keeps both apart in jax's caches."""
    import jax

    jax.config.update("jax_disable_most_optimizations", not yes)
    jax.config.update("jax_default_matmul_precision", None if yes else "float32")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if _quick(item):
        _optimised(False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if _quick(item) and not _quick(nextitem):
        _optimised(True)


@pytest.fixture(scope="session")
def _buckets():
    pytest.importorskip("gcsfs", reason="needs the extra [gcs]")
    pytest.importorskip("gcp_storage_emulator", reason="needs the storage emulator of the extra [test]")
    from bucket import Bucket

    with Bucket() as served:
        yield served


@pytest.fixture
def bucket(_buckets, monkeypatch):
    """Starts a bucket of a storage emulator, to which gs:// leads in this process and its children."""
    for name, value in _buckets.environment().items():
        monkeypatch.setenv(name, value)
    return _buckets
