"""Eight CPU devices for every test: set before any test module imports jax."""

import os

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session")
def _buckets():
    pytest.importorskip("gcsfs", reason="needs the extra [gcs]")
    pytest.importorskip("gcp_storage_emulator", reason="needs the storage emulator of the extra [test]")
    from bucket import Bucket

    with Bucket() as served:
        yield served


@pytest.fixture
def bucket(_buckets, monkeypatch):
    """A bucket of a storage emulator, which gs:// leads to in this process and its children."""
    for name, value in _buckets.environment().items():
        monkeypatch.setenv(name, value)
    return _buckets
