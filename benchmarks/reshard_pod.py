"""Measures weight moves between the processes of a fake pod: `python -m benchmarks reshard --local_processes=4`."""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import trees

DEADLINE_S = 900.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the processes, each with its share of CPU devices, and gathers their measurements.

    The trainer mesh (--src) lies on the first processes, the rollout mesh (--dst) on the others; the weights go by the
    collective transport.

    Returns:
      The figures of the one-process benchmark, each of the slowest or fullest process. device_put_ms and speedup are
      left out, because plain jax.device_put does not move between processes.
      raw_ms: time for as many bytes between the same devices by ppermute alone, in arrays of a bucket's size.
      raw_gb_s, gb_s: bytes that cross between processes, divided by raw_ms and by the time of a move.
      raw_share: gb_s over raw_gb_s.
      cpu_ms, raw_cpu_ms: processor time of all processes for a move and for the raw collective; other programs change
        it little.

    Raises:
      ValueError: the meshes do not fill whole processes.
      RuntimeError: a process failed; its output is in the message.
    """
    from podrl.mesh.build import parse_mesh

    source, target = (math.prod(parse_mesh(getattr(args, k), key=f"--{k}")) for k in ("src", "dst"))
    have = args.local_processes * args.fake_devices
    if source % args.fake_devices or source + target != have:
        raise ValueError(
            f"--src {args.src} and --dst {args.dst} need {source} + {target} devices, --local_processes="
            f"{args.local_processes} of --fake_devices={args.fake_devices} have {have}: all devices must be used, and "
            "--src must end where a process ends."
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        return _gather(_figures(args, coordinator, Path(folder)))


def _figures(args: argparse.Namespace, coordinator: str, folder: Path) -> list[dict[str, Any]]:
    """Gathers the measurements of all processes."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.fake_devices}",
    }
    ranks = range(args.local_processes)
    logs = [folder / f"{rank}.log" for rank in ranks]
    workers: list[subprocess.Popen] = []
    try:
        for rank in ranks:
            command = [sys.executable, "-m", "benchmarks.reshard_pod", coordinator, str(rank), json.dumps(vars(args))]
            with logs[rank].open("w") as log:
                workers.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [worker.wait(timeout=DEADLINE_S) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    for rank, code in enumerate(codes):
        if code:
            raise RuntimeError(f"Process {rank} of the fake pod ended with code {code}:\n{logs[rank].read_text()}")
    return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def _gather(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {name: max(one[name] for one in each) for name in each[0]}
    for name in ("cpu_ms", "raw_cpu_ms"):
        figures[name] = sum(one[name] for one in each)
    crossing = figures["crossing_bytes"]
    figures["raw_gb_s"] = crossing / figures["raw_ms"] / 1e6
    figures["gb_s"] = crossing / figures["median_ms"] / 1e6
    figures["raw_share"] = figures["raw_ms"] / figures["median_ms"]
    return figures


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures in one process; all processes make the same calls in the same order."""
    import jax

    from podrl.transfer.collective import CollectiveTransport
    from podrl.transfer.move import drive
    from podrl.transfer.plan import default_bucket_bytes, make_plan
    from podrl.transfer.publish import Publisher

    source, targets = trees.trees(args)
    places = [leaf.sharding for leaf in jax.tree.leaves(source)]
    sends = any(d.process_index == jax.process_index() for d in places[0].device_set)
    tree = trees.random_tree(source) if sends else None
    leaves = jax.tree.leaves(tree) if sends else None
    bucket_bytes = args.bucket_bytes or default_bucket_bytes(jax.tree.leaves(targets))
    plan_s, plan = trees.timed(lambda: make_plan(source, targets, dtype=args.dst_dtype, bucket_bytes=bucket_bytes))
    transport = CollectiveTransport(plan, places, jax.tree.leaves(targets))

    def move() -> None:
        moved = drive(transport, leaves, replacing=last or None)
        last[:] = [] if moved[0] is None else moved

    last: list[Any] = []
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiles.append(event))
    first_s, _ = trees.timed(move)
    compiles.clear()
    median_s = trees.median(move, args.repeats)
    built = sum(name.endswith("backend_compile_duration") for name in compiles)
    raw, crossing_bytes = _raw(transport, plan.bucket_bytes)
    raw_s = trees.median(raw, args.repeats)
    publisher = Publisher(source, targets, target_dtype=args.dst_dtype, bucket_bytes=bucket_bytes)
    publish_s = trees.median(lambda: publisher.publish(tree, 1), max(3, args.repeats // 3))
    return {
        "plan_ms": plan_s * 1e3,
        "first_ms": first_s * 1e3,
        "median_ms": median_s * 1e3,
        "publish_ms": publish_s * 1e3,
        "bytes_moved": plan.moved_bytes,
        "crossing_bytes": crossing_bytes,
        "raw_ms": raw_s * 1e3,
        "cpu_ms": trees.median_cpu(move, args.repeats) * 1e3,
        "raw_cpu_ms": trees.median_cpu(raw, args.repeats) * 1e3,
        "peak_extra_bytes": trees.peak_extra_bytes(move, 0),
        "compiles_after_first": built,
        "memcpy_gb_s": trees.memcpy_gb_s(plan.source_bytes),
        "leaves": len(plan.leaves),
        "source_bytes": plan.source_bytes,
        "target_bytes": plan.target_bytes,
    }


def _raw(transport: Any, bucket_bytes: int) -> tuple[Any, int]:
    """Prepares the fastest possible move: (function that sends a move's bytes by plain ppermute, number of these
    bytes).

    The bytes go in arrays of a bucket's size: one array for all is slower, because it fits into no cache.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    union, sources = transport.union, transport.source.size
    links = [(k, sources + k) for k in range(min(sources, union.size - sources))]
    pieces = -(-transport.crossing_bytes // (len(links) * bucket_bytes))
    each = transport.crossing_bytes // (len(links) * pieces)
    row = NamedSharding(union, Spec(*union.axis_names))
    here = [[jax.device_put(np.ones((1, each), np.uint8), d) for d in union.local_devices] for _ in range(pieces)]
    arrays = [jax.make_array_from_single_device_arrays((union.size, each), row, shards) for shards in here]
    permute = jax.shard_map(
        lambda x: jax.lax.ppermute(x, union.axis_names[0], links), mesh=union, in_specs=row.spec, out_specs=row.spec
    )
    program = jax.jit(permute, out_shardings=row)

    def raw() -> None:
        for array in arrays:
            jax.block_until_ready(program(array))

    return raw, transport.crossing_bytes


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: jax.distributed swallows SIGTERM, and its waits are long."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(argv: Sequence[str]) -> None:
    """Runs one process; arguments: coordinator's address, rank, and the benchmark's arguments as JSON."""
    import jax

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    coordinator, rank, words = argv
    args = argparse.Namespace(**json.loads(words))
    jax.distributed.initialize(coordinator, args.local_processes, int(rank), cluster_detection_method="deactivate")
    sys.stdout.write(json.dumps(_measure(args)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
