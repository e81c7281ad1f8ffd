"""Sets environment variables that jax reads when it is imported, and adapts jax's compilation to clusters.

The adaptations concern which compiled programs a process of a cluster caches, and when it first runs a program.
"""

import contextlib
import glob
import hashlib
import importlib.util
import inspect
import os
import pathlib
import platform
import sys
import types
from collections.abc import MutableMapping
from typing import Any

from podrl.config import plural

_FAKE = "--xla_force_host_platform_device_count"
# Files of accelerators' drivers: TPU, NVIDIA, AMD, and CUDA under WSL.
_DRIVERS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
_GOOGLE = "0x1ae0"  # Google's number as a vendor of PCI devices
_MEET_S = 600.0  # longest wait for the slowest process to compile; the channel notices a dead process sooner


def prepare(env: MutableMapping[str, str], *, fake_devices: int) -> None:
    """Sets jax's platform on a machine without accelerators, and adds the number of fake CPU devices to XLA_FLAGS.

    A count that is already in XLA_FLAGS or JAX_NUM_CPU_DEVICES is kept; jax silently prefers JAX_NUM_CPU_DEVICES.
    The flag concerns only the CPU platform: on a machine with a GPU or TPU it changes nothing.

    Args:
      env: environment to change, usually os.environ.
      fake_devices: number of CPU devices to fake; 0 adds no flag.

    Raises:
      ValueError: jax has made its CPU devices already, so the flag would be ignored.
    """
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    leave_out_libtpu(env)
    if fake_devices <= 0 or _FAKE in env.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in env:
        return
    backends = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)
    if backends and set(backends) != {"cpu"}:
        return
    if backends:
        raise ValueError(
            f"jax was initialised before the job, so XLA_FLAGS can no longer ask for "
            f"{plural(fake_devices, 'device')}: call "
            "nothing that computes or lists devices before, or set XLA_FLAGS yourself before the first import of jax."
        )
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {_FAKE}={fake_devices}".strip()


def leave_out_libtpu(env: MutableMapping[str, str]) -> None:
    """Chooses jax's CPU platform on a machine without accelerators, so that libtpu does not report a missing TPU.

    The choice is left to jax if libtpu is not installed, if a platform is named already, if variables of a TPU are set,
    if the files of an accelerator's driver exist, or if the machine has a device made by Google.

    Args:
      env: environment to change, usually os.environ.
    """
    named = any(name.startswith(("JAX_PLATFORM", "TPU_")) for name in env)
    if named or importlib.util.find_spec("libtpu") is None or any(glob.glob(pattern) for pattern in _DRIVERS):
        return
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            if pathlib.Path(vendor).read_text().strip() == _GOOGLE:
                return
    env["JAX_PLATFORMS"] = "cpu"


def enable_compile_cache(env: MutableMapping[str, str], cache: str) -> None:
    """Enables jax's compilation cache, so that the next start of a job does not compile the same programs again.

    A directory in JAX_COMPILATION_CACHE_DIR is used instead of `cache`. jax recompiles a program that it cannot read
    from the cache.

    Args:
      env: environment to change, usually os.environ.
      cache: directory of the cache; 'auto' for a directory of this user and processor under $XDG_CACHE_HOME or
        ~/.cache; '' leaves jax's own settings unchanged.

    Raises:
      ValueError: `cache` exists and is not a directory.
    """
    if cache != "auto" and os.path.exists(cache) and not os.path.isdir(cache):
        raise ValueError(f"compile_cache={cache!r} is not a directory: name one, or 'auto', or '' to keep nothing.")
    if not cache:
        return
    cache = env.get("JAX_COMPILATION_CACHE_DIR", cache)
    if cache == "auto":
        base = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        directory = pathlib.Path(base, "podrl", f"compiled-{_processor()}")
        try:
            # The cache holds machine code, so no other user may write to it.
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return  # without a home directory every start compiles
        cache = str(directory)
    env["JAX_COMPILATION_CACHE_DIR"] = cache
    # A bucket gets no small programs: compiling all of them takes a second, asking a bucket for each would take longer.
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1" if "://" in cache else "0")


def cache_own_programs() -> None:
    """Makes jax cache every process's own compiled programs; by itself it caches only the programs of process 0.

    Without this change the rollout hosts of a shared pod compile decoding again at every start. A program over the
    devices of several processes still has one cache entry, because all processes may share one bucket; process 0 writes
    the entry. On CPU such a program has an entry for each process. If the installed jax has other internals, nothing
    changes.
    """
    from jax._src import compiler

    original, write = (getattr(compiler, name, None) for name in ("_compile_and_write_cache", "_cache_write"))
    if original is None or write is None or original.__module__ == __name__ or "distributed" not in write.__globals__:
        return
    if [*inspect.signature(original).parameters][:3] != ["backend", "computation", "executable_devices"]:
        return
    as_first = {"distributed": types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))}
    own_write = types.FunctionType(write.__code__, {**write.__globals__, **as_first})
    own = types.FunctionType(original.__code__, {**original.__globals__, "_cache_write": own_write})

    def compile_and_write(
        backend: Any, computation: object, executable_devices: object, *args: object, **kwargs: object
    ) -> object:
        alone = getattr(executable_devices, "is_fully_addressable", False) or backend.platform == "cpu"
        return (own if alone else original)(backend, computation, executable_devices, *args, **kwargs)

    compiler._compile_and_write_cache = compile_and_write


def meet_before_first_runs() -> None:
    """Makes the processes of a CPU cluster wait for each other before they first run a program that they share.

    Gloo, which carries the collectives between CPU devices of different processes, gives up on a process that arrives
    30 s after another one, and no setting changes that bound. On a loaded machine a process reads weights and compiles
    for longer than that. So each process compiles the program and then waits at a barrier of jax's coordinator. After
    10 minutes the barrier fails with an error that names the missing processes. Later runs of the program have no
    barrier; programs of other platforms never have one. If the installed jax has other internals, nothing changes.
    """
    from jax._src import compiler, distributed

    original = getattr(compiler, "compile_or_get_cached", None)
    if original is None or original.__module__ == __name__:
        return
    if [*inspect.signature(original).parameters][:3] != ["backend", "computation", "devices"]:
        return
    met: set[str] = set()

    def compile_and_meet(backend: Any, computation: object, devices: Any, *args: object, **kwargs: object) -> object:
        compiled = original(backend, computation, devices, *args, **kwargs)
        processes = sorted({device.process_index for device in devices.flat})
        client = distributed.global_state.client
        if client is not None and len(processes) > 1 and backend.platform == "cpu":
            # The barrier is named after the program, not after a count of compilations: a process may have to compile
            # again a program that the others still have.
            program = hashlib.blake2b(f"{processes} {computation}".encode(), digest_size=16).hexdigest()
            if program not in met:
                met.add(program)
                client.wait_at_barrier(f"podrl/{program}", int(_MEET_S * 1000), processes)
        return compiled

    compiler.compile_or_get_cached = compile_and_meet


def _processor() -> str:
    """Returns a name for the processor's instruction set, in which machines that share a home directory may differ."""
    text = ""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        text = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
