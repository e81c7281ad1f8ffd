"""Measures how long weights take between two meshes: `python -m benchmarks reshard`."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import reshard_pod, trees
from benchmarks.model import add_options, fake_devices


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks reshard", description=__doc__)
    add_options(parser, layers=5, dim=256, ffn=800, head_dim=64, vocab=512)
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
    parser.add_argument("--local_processes", type=int, default=0, help="a fake pod of this many CPU processes")
    parser.add_argument("--fake_devices", type=int, default=2, help="devices of each of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times moves of one tree from mesh to mesh, `jax.device_put` of the same tree, and a copy in memory.

    Returns:
      plan_ms, plan_cached_ms: time for making the plan, and for finding it in the cache.
      first_ms: milliseconds of the first move, compilation included.
      median_ms: median milliseconds of a later move, which replaces the tree of the previous move, as in the training
        loop.
      fresh_ms: median milliseconds of a move that keeps the trees of earlier moves.
      publish_ms: median milliseconds of a replacing move with checksums on both meshes and their comparison.
      bytes_moved: bytes that cross between devices.
      gb_s: rate of a move: bytes read at the source plus bytes written at the target, divided by median_ms.
      peak_extra_bytes: memory beyond both trees during a move that replaces; on CPU of the whole process, otherwise of
        the fullest device.
      bucket_bytes: bytes of the largest bucket on all devices of the larger mesh.
      compiles_after_first: programs built after the first move.
      device_put_ms: median milliseconds of a cast on the source mesh, followed by jax.device_put of the same tree.
      memcpy_gb_s: rate of numpy.copyto for as many bytes as the source tree has, read plus written.
      memcpy_share, speedup: gb_s over memcpy_gb_s, and device_put_ms over median_ms.
      cpu_ms, device_put_cpu_ms: processor time of this process for a move and for a device_put; other programs affect
        it less than wall time.
      With --local_processes, the figures of `benchmarks.reshard_pod.run` instead.
    """
    args = _parser().parse_args(argv)
    if args.local_processes:
        return reshard_pod.run(args)
    fake_devices(args.devices)
    return _measure(args)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    from podrl.transfer.collective import CollectiveTransport
    from podrl.transfer.move import drive
    from podrl.transfer.plan import default_bucket_bytes, make_plan
    from podrl.transfer.publish import Publisher, transport_for

    source, targets = trees.trees(args)
    tree = trees.random_tree(source)
    leaves = jax.tree.leaves(tree)
    sides = [leaf.sharding for leaf in leaves], jax.tree.leaves(targets)
    bucket_bytes = args.bucket_bytes or default_bucket_bytes(sides[1], sides[0] if args.transport == "auto" else ())
    make = functools.partial(make_plan, tree, targets, dtype=args.dst_dtype, bucket_bytes=bucket_bytes)
    plan_s, plan = trees.timed(make)
    kind = CollectiveTransport if args.transport == "collective" else transport_for
    transport = kind(plan, *sides)

    def fresh() -> list[Any]:
        return drive(transport, leaves)

    def move() -> None:
        last[:] = drive(transport, leaves, replacing=last)

    publisher = Publisher(
        tree, targets, target_dtype=args.dst_dtype, bucket_bytes=bucket_bytes, transport=args.transport
    )

    def publish() -> None:
        policies[:] = [publisher.publish(tree, 1, replacing=policies[0].params)]

    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiles.append(event))
    first_s, last = trees.timed(fresh)
    move()
    compiles.clear()
    median_s = trees.median(move, args.repeats)
    built = sum(name.endswith("backend_compile_duration") for name in compiles)
    gb_s = (plan.source_bytes + plan.target_bytes) / median_s / 1e9
    memcpy_gb_s = trees.memcpy_gb_s(plan.source_bytes)
    put, few = _device_put(tree, targets, args.dst_dtype), max(3, args.repeats // 3)
    device_put_s = trees.median(put, few)
    policies = [publisher.publish(tree, 1)]
    meshes = [plan.leaves[0].source.device_ids, plan.leaves[0].target.device_ids]
    return {
        "plan_ms": plan_s * 1e3,
        "plan_cached_ms": min(trees.timed(make)[0] for _ in range(5)) * 1e3,
        "first_ms": first_s * 1e3,
        "median_ms": median_s * 1e3,
        "fresh_ms": trees.median(fresh, few) * 1e3,
        "publish_ms": trees.median(publish, few) * 1e3,
        "bytes_moved": plan.moved_bytes,
        "gb_s": gb_s,
        "peak_extra_bytes": trees.peak_extra_bytes(move, 0),
        "bucket_bytes": plan.largest_bucket * max(map(len, meshes)),
        "compiles_after_first": built,
        "device_put_ms": device_put_s * 1e3,
        "cpu_ms": trees.median_cpu(move, few) * 1e3,
        "device_put_cpu_ms": trees.median_cpu(put, few) * 1e3,
        "memcpy_gb_s": memcpy_gb_s,
        "memcpy_share": gb_s / memcpy_gb_s,
        "speedup": device_put_s / median_s,
        "leaves": len(plan.leaves),
        "source_bytes": plan.source_bytes,
        "target_bytes": plan.target_bytes,
    }


def _device_put(tree: Any, targets: Any, dtype: str) -> Callable[[], Any]:
    import jax

    cast = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))
    same = all(leaf.dtype == np.dtype(dtype) for leaf in jax.tree.leaves(tree))
    return lambda: jax.block_until_ready(jax.device_put(tree if same else cast(tree), targets))
