"""The process that starts sandboxes: it forks a sandbox for every job, and never reads the job itself.

`podrl.rewards.sandbox.host` starts this process with only the standard library, and without the job's environment
variables.
"""

import gc
import json
import os
import select
import selectors
import signal
import socket
import sys
import time

from podrl.rewards.sandbox import kernel
from podrl.rewards.sandbox.checker import check
from podrl.rewards.sandbox.messages import Bounds

# Modules that programs often import: a forked sandbox has them already.
PRELOADED = (
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
    *("functools", "heapq", "itertools", "math", "operator", "queue", "random", "re", "statistics", "string"),
    *("threading", "typing"),
)
_LEAVE_S = 5.0  # seconds that a sandbox may take beyond its programs' wall_s


def serve() -> None:
    """Starts a sandbox for every socket that the host sends, until the connection to the host ends.

    sys.argv holds the descriptor of this connection, and the `Bounds` of every sandbox as JSON.
    """
    control, limits = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    kernel.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        __import__(name)
    kernel.prepare()
    gc.disable()  # a collection writes to every object that it visits, so each sandbox would copy the objects' memory
    alive = os.pipe()  # the writing end closes when this process ends
    running: dict[int, tuple[int, float]] = {}  # (process id, time to kill it) of each sandbox, by descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            left = min((end for _, end in running.values()), default=time.monotonic() + 60) - time.monotonic()
            for key, _ in selector.select(max(left, 0)):
                if key.fileobj is control:
                    byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                    if not byte:
                        return
                    if (pid := _start(descriptors[0], alive[0], limits)) is not None:
                        descriptor = os.pidfd_open(pid)
                        running[descriptor] = (pid, time.monotonic() + limits["wall_s"] + _LEAVE_S)
                        selector.register(descriptor, selectors.EVENT_READ)
                else:
                    os.waitpid(running.pop(key.fd)[0], 0)
                    selector.unregister(key.fd)
                    os.close(key.fd)
            for pid, end in running.values():
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)


def alone() -> None:
    """Tests one program in a process that bubblewrap has isolated.

    sys.argv holds the descriptor of the job's socket, and the `Bounds` of the sandbox as JSON.
    """
    job, limits = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    os.chdir("/tmp")
    kernel.become_nobody()
    check(job, limits)


def _start(descriptor: int, alive: int, limits: Bounds) -> int | None:
    """Forks a sandbox that answers on a socket; a refusal of the host is sent as the answer.

    Args:
      descriptor: descriptor of the job's socket; it is closed in this process.
      alive: reading end of a pipe that ends with this process.
      limits: limits of the sandbox, and the files that it sees.

    Returns:
      The sandbox's process id, or None if no process could be forked.
    """
    job = socket.socket(fileno=descriptor)
    map_read, map_write = os.pipe()
    pid = None
    try:
        pid = kernel.clone()
        if pid == 0:
            _isolated(job, map_read, alive, limits)
        kernel.map_user(pid)
        os.write(map_write, b"1")
    except kernel.IsolationError as error:
        job.sendall(json.dumps({"passed": [], "said": "", "refused": error.strerror}).encode())
    finally:
        job.close()
        os.close(map_read)
        os.close(map_write)
    return pid


def _isolated(job: socket.socket, map_read: int, alive: int, limits: Bounds) -> None:
    """Isolates this process, tests a program, and ends this process; it never returns."""
    try:
        kernel.close_all_but(job.fileno(), map_read, alive)
        nothing = os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        kernel.die_with_parent()
        if os.read(map_read, 1) == b"1":
            os.close(map_read)
            kernel.enter_root(limits["paths"], limits["disk_mb"])
            kernel.become_nobody()
            kernel.die_with_parent()  # repeated, because the change of user has cleared the setting
            parent = select.poll()
            parent.register(alive, select.POLLHUP)
            if parent.poll(0):  # the parent ended before the line above, so the kernel will not end this process
                return
            check(job, limits)
    except kernel.IsolationError as error:
        job.sendall(json.dumps({"passed": [], "said": "", "refused": error.strerror}).encode())
    finally:
        os._exit(0)
