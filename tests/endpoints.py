"""Joins the processes of a job as endpoints within this process."""

import contextlib
import threading
from collections.abc import Iterator

from waits import PATIENCE_S

from podrl.runtime.local_pod import free_ports
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts


@contextlib.contextmanager
def joined(hosts: Hosts, *, disposable: bool = False) -> Iterator[list[Pod]]:
    """Yields one Pod per process, all joined; closes their channels at the end, the leader's last.

    Rollout hosts that are `disposable` may come and go.
    """
    (port,) = free_ports(1)
    seats = [Seat(process, hosts, f"127.0.0.1:{port}", "s", disposable) for process in range(hosts.count)]
    pods = [Pod(seat, host="127.0.0.1") for seat in seats]
    joining = [threading.Thread(target=pod.join, args=(PATIENCE_S, lambda reached, waited_s: "")) for pod in pods]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(PATIENCE_S)
    try:
        yield pods
    finally:
        for pod in pods:
            pod._ended.set()  # otherwise a pod that sees another one close ends this process
        for pod in reversed(pods):
            pod.channel.close()
