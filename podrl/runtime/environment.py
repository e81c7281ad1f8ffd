"""What must be in the environment before jax is imported."""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import MutableMapping

_FAKE = "--xla_force_host_platform_device_count"


def prepare(env: MutableMapping[str, str], *, fake_devices: int) -> None:
    """Asks for faked CPU devices where no accelerator is named; appends to XLA_FLAGS, never replaces.

    A count already in XLA_FLAGS wins, and so does JAX_NUM_CPU_DEVICES (jax lets it beat XLA_FLAGS silently). The flag
    concerns only the CPU platform: on a machine with a GPU or TPU it changes nothing.

    Args:
      env: usually os.environ.
      fake_devices: CPU devices to fake; 0 leaves the environment alone.

    Raises:
      ValueError: jax is imported already, so the flags would be ignored.
    """
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if fake_devices <= 0 or _FAKE in env.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in env:
        return
    if "jax" in sys.modules:
        raise ValueError(
            "jax was initialised before podrl.launch, so XLA_FLAGS can no longer take effect: start the job with "
            "`python -m podrl.launch` and a configuration that imports no jax, or set XLA_FLAGS yourself before the "
            "first import of jax."
        )
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {_FAKE}={fake_devices}".strip()


def keep_compiled(env: MutableMapping[str, str], where: str) -> None:
    """Lets jax keep compiled programs, so that the next start of a job does not compile them again.

    A directory in JAX_COMPILATION_CACHE_DIR wins. jax recompiles what it cannot read there.

    Args:
      env: usually os.environ.
      where: a directory; 'auto' for one of this user and processor under $XDG_CACHE_HOME or ~/.cache;
        empty keeps nothing.
    """
    if not where or "JAX_COMPILATION_CACHE_DIR" in env:
        return
    if where == "auto":
        base = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        directory = pathlib.Path(base, "podrl", f"compiled-{_processor()}")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # machine code lies there: nobody else may write
        except OSError:
            return  # no home: every start compiles
        where = str(directory)
    env["JAX_COMPILATION_CACHE_DIR"] = where
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def _processor() -> str:
    """Differs between processors that do not run each other's machine code: a home directory is often shared."""
    text = ""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        text = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
