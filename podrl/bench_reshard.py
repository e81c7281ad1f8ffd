"""Measures moving weights between two meshes: `python -m podrl.bench reshard`."""

import argparse
import ctypes
import dataclasses
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="podrl.bench reshard", description=__doc__)
    sizes = {"layers": 5, "dim": 256, "ffn": 800, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--leaves", type=int, default=0, help="instead of a model: this many matrices, unstacked")
    parser.add_argument("--leaf_shape", default="1280x1024", help="shape of each of them, cut as (embed, mlp)")
    parser.add_argument("--src", default="fsdp=2,tensor=2", help="mesh the weights come from")
    parser.add_argument(
        "--dst", default="tensor=4", help="mesh they go to; other devices than --src where there are any"
    )
    parser.add_argument("--src_dtype", default="float32")
    parser.add_argument("--dst_dtype", default="bfloat16")
    parser.add_argument("--bucket_bytes", type=int, default=None, help="staged per device at once; default by platform")
    parser.add_argument("--transport", default="auto", choices=("auto", "collective"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--devices", type=int, default=8, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times moves of one tree from mesh to mesh, beside plain `jax.device_put` and a copy in memory.

    Returns:
      plan_ms, plan_cached_ms; first_ms (a move with its compilation), median_ms (a move alone), publish_ms (a move with
      checksums on both meshes and their comparison); bytes_moved (between devices); gb_s (bytes read at the source once
      plus bytes written at the target, over the median); peak_extra_bytes (memory beyond both trees during a move;
      on CPU of the whole process, otherwise of the fullest device), bucket_bytes (of all devices together);
      compiles_after_first; device_put_ms (cast on the source mesh, then jax.device_put); memcpy_gb_s (numpy.copyto of
      as many bytes as the source tree has, read plus written); memcpy_share (gb_s over it); speedup (over device_put).
    """
    args = _parser().parse_args(argv)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return _measure(args)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    from podrl.mesh.reshard.collective import CollectiveTransport
    from podrl.mesh.reshard.move import default_bucket_bytes, transport_for
    from podrl.mesh.reshard.plan import make_plan
    from podrl.mesh.reshard.publish import Publisher

    source, targets = _trees(args)
    tree = _random(source)
    leaves = jax.tree.leaves(tree)
    bucket_bytes = args.bucket_bytes or default_bucket_bytes(jax.tree.leaves(targets)[0])
    make = functools.partial(make_plan, tree, targets, dtype=args.dst_dtype, bucket_bytes=bucket_bytes)
    plan_s, plan = _timed(make)
    kind = CollectiveTransport if args.transport == "collective" else transport_for
    transport = kind(plan, [leaf.sharding for leaf in leaves], jax.tree.leaves(targets))

    def move() -> Any:
        return jax.block_until_ready(transport.move(leaves))

    publisher = Publisher(
        tree, targets, target_dtype=args.dst_dtype, bucket_bytes=bucket_bytes, transport=args.transport
    )
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiles.append(event))
    first_s, _ = _timed(move)
    compiles.clear()
    median_s = _median(move, args.repeats)
    built = sum(name.endswith("backend_compile_duration") for name in compiles)
    gb_s = (plan.source_bytes + plan.target_bytes) / median_s / 1e9
    memcpy_gb_s = _memcpy_gb_s(plan.source_bytes)
    device_put_s = _median(_device_put(tree, targets, args.dst_dtype), max(3, args.repeats // 3))
    sides = [plan.leaves[0].source.device_ids, plan.leaves[0].target.device_ids]
    return {
        "plan_ms": plan_s * 1e3,
        "plan_cached_ms": min(_timed(make)[0] for _ in range(5)) * 1e3,
        "first_ms": first_s * 1e3,
        "median_ms": median_s * 1e3,
        "publish_ms": _median(lambda: publisher.publish(tree, 1), max(3, args.repeats // 3)) * 1e3,
        "bytes_moved": plan.moved_bytes,
        "gb_s": gb_s,
        "peak_extra_bytes": _peak_extra(move, plan.target_bytes),
        "bucket_bytes": plan.largest_bucket * max(map(len, sides)),
        "compiles_after_first": built,
        "device_put_ms": device_put_s * 1e3,
        "memcpy_gb_s": memcpy_gb_s,
        "memcpy_share": gb_s / memcpy_gb_s,
        "speedup": device_put_s / median_s,
        "leaves": len(plan.leaves),
        "source_bytes": plan.source_bytes,
        "target_bytes": plan.target_bytes,
    }


def _trees(args: argparse.Namespace) -> tuple[Any, Any]:
    """(shapes on the source mesh, shardings on the target mesh)."""
    import jax

    from podrl.mesh.build import make_mesh, parse_mesh
    from podrl.mesh.rules import sharding_for
    from podrl.models import decoder
    from podrl.models.config import LoraConfig, gemma2_config

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
        model = gemma2_config(
            vocab_size=args.vocab,
            num_layers=args.layers,
            model_dim=args.dim,
            ffn_dim=args.ffn,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
        )
        if args.lora_rank:
            model = dataclasses.replace(model, lora=LoraConfig(rank=args.lora_rank))
        trees = [decoder.abstract_params(model, mesh, np.dtype(args.src_dtype)) for mesh in meshes]
    return trees[0], jax.tree.map(lambda leaf: leaf.sharding, trees[1])


def _random(tree: Any) -> Any:
    """Random arrays in the place of shapes."""
    import jax

    leaves, treedef = jax.tree.flatten(tree)

    def make(key: Any) -> list[Any]:
        return [
            jax.random.normal(jax.random.fold_in(key, i), leaf.shape, np.float32).astype(leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]

    made = jax.jit(make, out_shardings=[leaf.sharding for leaf in leaves])(jax.random.key(0))
    return jax.block_until_ready(jax.tree.unflatten(treedef, made))


def _device_put(tree: Any, targets: Any, dtype: str) -> Callable[[], Any]:
    import jax

    cast = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))
    same = all(leaf.dtype == np.dtype(dtype) for leaf in jax.tree.leaves(tree))
    return lambda: jax.block_until_ready(jax.device_put(tree if same else cast(tree), targets))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _median(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one call that does not count; each result is dropped before the next call."""
    work()
    return statistics.median(_timed(work)[0] for _ in range(repeats))


def _memcpy_gb_s(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    return 2 * size / _median(lambda: np.copyto(target, source), 7) / 1e9


def _peak_extra(move: Callable[[], Any], target_bytes: int) -> int:
    """Most memory in use during a move beyond what was there before and the result; -1 where it cannot be seen."""
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
