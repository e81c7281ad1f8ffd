"""Measures a checkpoint that 4 processes save and that 4 and then 2 processes restore: python FILE [LEAVES].

A leaf has 128 MiB: 4,096 rows of 32 KiB. The figures in docs/reliability.md are for 16 leaves, the default.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

COLUMNS = 8192


def _resident() -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


class _Peak:
    """Measures the peak memory of this process by 50 samples a second."""

    def __init__(self) -> None:
        self.bytes, self._ended = _resident(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, _resident())

    def end(self) -> float:
        self._ended.set()
        return max(self.bytes, _resident())


def _host(rank: int, hosts: int, port: int, directory: str, mesh: str, what: str, leaves: int, rows: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", hosts, rank, cluster_detection_method="deactivate")
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    from podrl.mesh.build import make_mesh
    from podrl.storage.bits import tree_sums
    from podrl.storage.checkpoint import Checkpoints

    place = NamedSharding(make_mesh(mesh, jax.devices()), Spec("fsdp", "tensor"))
    make = jax.jit(lambda i: jax.random.normal(jax.random.key(i), (rows, COLUMNS)), out_shardings=place)
    abstract = {f"w{i}": jax.ShapeDtypeStruct((rows, COLUMNS), jnp.float32, sharding=place) for i in range(leaves)}
    checkpoints, found = Checkpoints(directory), {"what": what, "rank": rank}
    if what == "save":
        state = jax.block_until_ready({f"w{i}": make(i) for i in range(leaves)})
        tree_sums(state)  # compiles the program of the checksums
        found["held"], peak, started = _resident(), _Peak(), time.perf_counter()
        assert checkpoints.save(1, state, {}, {})
        found["blocked_s"] = time.perf_counter() - started
        assert checkpoints.wait()
    else:
        found["held"], peak, started = _resident(), _Peak(), time.perf_counter()
        restored = checkpoints.restore_latest(abstract)
        assert restored is not None and restored.step == 1
        jax.block_until_ready(restored.state)
    found |= {"seconds": time.perf_counter() - started, "most": peak.end()}
    found["share"] = sum(s.data.nbytes for s in make(0).addressable_shards) * leaves
    checkpoints.close()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    jax.distributed.shutdown()


def measure(leaves: int, rows: int = 4096) -> list[dict[str, Any]]:
    """Saves on 4 processes, restores on 4 and on 2; returns a record of seconds and bytes per process of each part."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for hosts, mesh, what in ((4, "fsdp=8", "save"), (4, "fsdp=8", "restore"), (2, "fsdp=2,tensor=2", "restore")):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            args = [str(hosts), str(port), directory, mesh, what, str(leaves), str(rows)]
            command = [sys.executable, __file__, "--host"]
            env = os.environ | {"JAX_PLATFORMS": "cpu"}
            started = [
                subprocess.Popen([*command, str(rank), *args], env=env, text=True, stdout=-1, stderr=-1)
                for rank in range(hosts)
            ]
            for process in started:
                out, err = process.communicate(timeout=300)
                assert process.returncode == 0, err[-2000:]
                lines = [line for line in out.splitlines() if line.startswith("{")]
                found.append({"hosts": hosts, "mesh": mesh} | json.loads(lines[-1]))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        rank, hosts, port, directory, mesh, what, leaves, rows = sys.argv[2:]
        _host(int(rank), int(hosts), int(port), directory, mesh, what, int(leaves), int(rows))
    else:
        for line in measure(int((sys.argv[1:] or ["16"])[0])):
            sys.stdout.write(json.dumps(line) + "\n")
