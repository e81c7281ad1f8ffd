"""Listening sockets on one interface, and the number of connections that a process may hold."""

import resource
import socket

_SILENT_S = 600  # seconds for which the kernel keeps a silent connection from the process
_WAITING = 4096  # number of connections that may wait to be accepted
_DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files and connections to what the system allows, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    On Linux the kernel hands a connection over only after its first data has arrived, or after about 10 minutes.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # only Linux has this option
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        listener.bind((host, port))
        listener.listen(_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def interface_towards(host: str) -> str:
    """Finds the address of this host's interface towards `host`, without sending `host` a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
