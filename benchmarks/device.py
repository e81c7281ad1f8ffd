"""Measures the highest rates of a device, with which other figures are compared: `python -m benchmarks device`."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.model import fake_devices
from benchmarks.step import matmul_flops

_COPIED = {"cpu": 1 << 27, "accelerator": 1 << 31}  # bytes of the array whose copy is timed


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Detects the devices and measures their rates.

    Returns:
      The figures by name:
      platform, kind, devices: platform, model and number of the devices.
      jax: version of jax.
      topology: topology in the form that podrl.plan reads; '' if the devices are not TPUs.
      memory_bytes: bytes of one device's memory that programs may use; 0 if jax does not report them.
      matmul_flops, matmul_flops_f32: measured operations per second of matrix products on all devices together, in
        bfloat16 (in float32 on CPUs) and in float32.
      peak_flops: operations per second of all devices together in bfloat16, as the vendor states them; 0 if unknown.
      hbm_rate: bytes per second that a copy on one device reads and writes.
      hbm_rate_vendor: memory bandwidth of one device in bytes per second, as the vendor states it; 0 if unknown.
      launch_us: microseconds from the call of a small compiled program to its result.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    fake_devices(args.devices)
    return _measure()


def _measure() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from podrl.mesh.chips import chip_of, peak_flops

    devices = jax.devices()
    device = devices[0]
    on_cpu = device.platform == "cpu"
    everyone = jax.sharding.Mesh(np.asarray(devices), ("all",))
    chip = chip_of(device.device_kind)
    numbers = jax.device_put(jnp.zeros(_COPIED["cpu" if on_cpu else "accelerator"] // 4), device)
    copy, small = jax.jit(lambda x: x + 1.0), jax.jit(lambda x: x + 1.0)
    few = jax.device_put(jnp.zeros(8), device)
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "topology": f"{chip.name}:{_shape(devices, chip.dimensions)}" if chip else "",
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit", 0),
        "matmul_flops": matmul_flops(everyone, "float32" if on_cpu else "bfloat16"),
        "matmul_flops_f32": matmul_flops(everyone),
        "peak_flops": peak_flops(device.device_kind) * len(devices),
        "hbm_rate": 2 * numbers.nbytes / _least_seconds(lambda: copy(numbers).block_until_ready()),
        "hbm_rate_vendor": chip.hbm_rate if chip else 0.0,
        "launch_us": 1e6 * _least_seconds(lambda: small(few).block_until_ready()),
    }


def _shape(devices: Sequence[Any], dimensions: int) -> str:
    """Writes how many chips this host has along each axis of the slice, such as '2x2'."""
    places = np.asarray([device.coords for device in devices])[:, :dimensions]
    return "x".join(map(str, places.max(axis=0) - places.min(axis=0) + 1))


def _least_seconds(work: Callable[[], Any], tries: int = 20) -> float:
    work()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
