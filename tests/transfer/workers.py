"""Starts several processes that run one script for a transport's test, waits for them, and shows their output."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

DEADLINE_S = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """A process of `python script args`, on faked CPU devices; its output goes to a file."""

    def __init__(self, script: pathlib.Path, args: Sequence[str], *, devices: int, log: pathlib.Path):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        self._log = log
        with log.open("w") as out:
            command = [sys.executable, "-u", str(script), *args]
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

    def wait(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text()


@contextlib.contextmanager
def started(script: pathlib.Path, each_args: Sequence[Sequence[str]], *, devices: int) -> Iterator[list[Worker]]:
    """Starts one worker per list of arguments; the end of the block ends all workers, even after an error."""
    workers: list[Worker] = []
    try:
        for rank, args in enumerate(each_args):
            log = script.with_name(f"{script.stem}-{rank}.log")
            workers.append(Worker(script, args, devices=devices, log=log))
        yield workers
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()


def run(script: pathlib.Path, each_args: Sequence[Sequence[str]], *, devices: int) -> list[str]:
    """Returns every worker's output, once all have ended with exit code 0."""
    with started(script, each_args, devices=devices) as workers:
        codes = [worker.wait() for worker in workers]
        said = [worker.output for worker in workers]
    assert codes == [0] * len(workers), f"exit codes {codes}\n" + "\n".join(said)
    return said
