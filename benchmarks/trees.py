"""The trees that the reshard benchmarks move, and their measures of time and memory."""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model import model_of


def trees(args: Any) -> tuple[Any, Any]:
    """Builds a model's tree as (shapes on the source mesh, shardings on the target mesh)."""
    import jax

    from podrl.mesh.build import make_mesh, parse_mesh
    from podrl.mesh.rules import sharding_for
    from podrl.models import parameters

    source, target = (math.prod(parse_mesh(getattr(args, k), key=f"--{k}")) for k in ("src", "dst"))
    devices = jax.devices()
    rest = devices[source:] if len(devices) >= source + target else devices
    meshes = make_mesh(args.src, devices[:source], key="--src"), make_mesh(args.dst, rest[:target], key="--dst")
    if args.leaves:
        shape = tuple(int(n) for n in args.leaf_shape.split("x"))
        trees = [
            {
                f"w{i:04d}": jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(("embed", "mlp"), shape, mesh))
                for i in range(args.leaves)
            }
            for mesh, dtype in zip(meshes, (args.src_dtype, args.dst_dtype), strict=True)
        ]
    else:
        model = model_of(args)
        trees = [parameters.abstract_params(model, mesh, np.dtype(args.src_dtype)) for mesh in meshes]
    return trees[0], jax.tree.map(lambda leaf: leaf.sharding, trees[1])


def random_tree(tree: Any) -> Any:
    """Makes arrays of scattered values in [-1, 1) by plain arithmetic; jax.random would take seconds to compile."""
    import jax
    import jax.numpy as jnp

    leaves, treedef = jax.tree.flatten(tree)

    def scattered(number: int, shape: tuple[int, ...]) -> Any:
        index = jnp.full(shape, number * 0x9E3779B9 % 2**32, jnp.uint32)
        for d in range(len(shape)):
            stride = math.prod(shape[d + 1 :]) % 2**32
            index += jax.lax.broadcasted_iota(jnp.uint32, shape, d) * jnp.uint32(stride)
        return (index * jnp.uint32(0x85EBCA6B)).astype(jnp.int32).astype(jnp.float32) / 2.0**31

    def make() -> list[Any]:
        return [scattered(i, leaf.shape).astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    made = jax.jit(make, out_shardings=[leaf.sharding for leaf in leaves])()
    return jax.block_until_ready(jax.tree.unflatten(treedef, made))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Times one call; returns (seconds, result)."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def median(work: Callable[[], Any], repeats: int) -> float:
    """Measures median seconds, after one call that does not count; each result is dropped before the next call."""
    work()
    return statistics.median(timed(work)[0] for _ in range(repeats))


def median_cpu(work: Callable[[], Any], repeats: int) -> float:
    """Measures median CPU seconds of this process for one call, after a first call that does not count."""

    def once() -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    work()
    return statistics.median(once() for _ in range(repeats))


def memcpy_gb_s(size: int) -> float:
    """Measures numpy.copyto of `size` bytes into memory without page faults: bytes read plus written per nanosecond."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    return 2 * size / median(lambda: np.copyto(target, source), 7) / 1e9


def peak_extra_bytes(move: Callable[[], Any], target_bytes: int) -> int:
    """Measures the most memory that a move uses beyond source and result; -1 where this cannot be measured."""
    import jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        result = move()
        after = [device.memory_stats() for device in jax.local_devices()]
        del result
        return max(s["peak_bytes_in_use"] - s["bytes_in_use"] for s in after)
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return -1
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    clear.write_text("5")  # resets the high-water mark of resident memory

    def resident(field: str) -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    before = resident("VmRSS:")
    result = move()
    peak = resident("VmHWM:") - before - target_bytes
    del result
    return peak
