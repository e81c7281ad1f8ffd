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
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_default_matmul_precision", "float32")
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_default_matmul_precision", None)


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
