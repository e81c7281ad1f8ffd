"""System calls that isolate a process on Linux x86-64: namespaces, mounts, a filter of system calls, limits.

This module needs only the standard library, because it runs in processes that have no other packages.
"""

import ctypes
import functools
import os
import resource
import socket
import struct
from collections.abc import Sequence

from podrl.rewards.sandbox.messages import Bounds

NOBODY = 65534  # the user and group of programs
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_SIGCHLD = 17
_BIND, _REC, _PRIVATE, _READ_ONLY, _REMOUNT = 0x1000, 0x4000, 1 << 18, 1, 0x20
_NOSUID, _NODEV, _NOEXEC, _DETACH = 2, 4, 8, 2
_CLONE, _PIVOT_ROOT, _MOUNT_SETATTR, _CAPSET = 56, 155, 442, 126  # numbers of these system calls
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_ROOT = "/proc"  # mount point for the new root: it exists everywhere, and its content is not used

# Numbers of the system calls that programs may not make; these calls fail with EPERM. _MEMORY gets memory that no limit
# counts. _NETWORK opens sockets, of which namespaces do not isolate AF_VSOCK and AF_ALG. _OTHERS reach other processes.
_PROCESSES = (57, 58, 59, 322)
_MEMORY = (29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 240, 319, 447)
_NETWORK = (41,)
_OTHERS = (101, 310, 311, 312, 434, 438)
_ADMINISTRATION = (
    *(134, 135, 136, 139, 153, 154, 155, 156, 159, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173),
    *(174, 175, 176, 177, 178, 179, 180, 212, 227, 246, 248, 249, 250, 256, 272, 279, 298, 300, 303, 304, 305, 308),
    *(313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 443, 444, 445, 446),
)
PROGRAM = tuple(sorted({*_PROCESSES, *_MEMORY, *_NETWORK, *_OTHERS, *_ADMINISTRATION}))
# The checker may call memfd_create (319), with which it makes the file that a program reads.
CHECKER = tuple(number for number in PROGRAM if number != 319)

# PyDLL keeps the interpreter's lock during a call. The child of `clone` has only the calling thread, so this thread
# must hold the lock.
_libc = ctypes.PyDLL(None, use_errno=True)


class IsolationError(OSError):
    """The host does not let this process isolate a program; the message says which call failed."""


def clone() -> int:
    """Forks into new user, mount, process, network, IPC, host name and cgroup namespaces.

    Returns:
      The child's process id in the parent, 0 in the child.

    Raises:
      IsolationError: the host does not allow new namespaces.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(_CLONE, ctypes.c_ulong(_NAMESPACES | _SIGCHLD), None, None, None, None)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise IsolationError(code, f"clone into new namespaces: {os.strerror(code)}")
    return pid


def map_user(pid: int) -> None:
    """Maps the user `NOBODY` into a process's new user namespace; if this process is root, also root, for the set-up.

    Args:
      pid: id of the process, as this process sees it.

    Raises:
      IsolationError: the host does not allow the mapping.
    """
    root = os.geteuid() == 0
    try:
        for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            if not root and kind == "gid":
                _write(f"/proc/{pid}/setgroups", "deny")
            _write(f"/proc/{pid}/{kind}_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n" if root else f"{NOBODY} {own} 1\n")
    except OSError as error:
        raise IsolationError(error.errno, f"write the maps of a user namespace: {error.strerror}") from error


def enter_root(paths: Sequence[str], disk_mb: int) -> None:
    """Makes this process see no other files than `paths`, which are read-only, and an empty /tmp.

    Args:
      paths: files and directories of the host that stay visible; missing paths are left out.
      disk_mb: size of /tmp, in MiB of memory.

    Raises:
      IsolationError: a mount failed.
    """
    _mount("none", "/", "", _REC | _PRIVATE)
    shown = [(os.path.realpath(path), path) for path in paths if os.path.exists(path)]
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    _mount("tmpfs", _ROOT, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=1k,mode=755")
    for real, path in shown:
        target = _ROOT + real
        if not os.path.exists(target):
            _make(target, directory=os.path.isdir(real))
            _mount(real, target, "", _BIND | _REC)
            _restrict(target, device=real.startswith("/dev/"))
        if path in links and not os.path.lexists(_ROOT + path):
            _make(os.path.dirname(_ROOT + path), directory=True)
            os.symlink(links[path], _ROOT + path)
    os.makedirs(f"{_ROOT}/tmp", exist_ok=True)
    sizes = f"size={disk_mb}m,nr_inodes=4k,mode=1777"
    _mount("tmpfs", f"{_ROOT}/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, sizes)
    os.chdir(_ROOT)
    _call("pivot_root", _libc.syscall(_PIVOT_ROOT, b".", b"."))
    _call("umount of the host's files", _libc.umount2(b".", _DETACH))
    _mount("none", "/", "", _REMOUNT | _BIND | _READ_ONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")
    socket.sethostname("sandbox")


def become_nobody() -> None:
    """Drops every privilege of this process, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    _call("capset", _libc.syscall(_CAPSET, header, none))
    _call("no new privileges", _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("no traces", _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    _call("end with the parent", _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0))


def close_all_but(*kept: int) -> None:
    """Closes every descriptor of this process except 0, 1, 2 and `kept`."""
    last = 2
    for one in sorted({*kept} - {0, 1, 2}):
        os.closerange(last + 1, one)
        last = one
    os.closerange(last + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 20))


def limit(limits: Bounds) -> None:
    """Sets the limits of a program on this process; these limits cannot be raised again."""
    memory, seconds, size = limits["memory_mb"] << 20, limits["cpu_s"], limits["file_mb"] << 20
    limit_memory(memory)
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, size),
        # 3 more: the starter, the checker and the program's first thread also count
        (resource.RLIMIT_NPROC, limits["threads"] + 3),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _limit(kind, value)


def limit_memory(size: int) -> None:
    """Sets the largest address space of this process, in bytes; this limit cannot be raised again."""
    _limit(resource.RLIMIT_AS, size)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def filter_calls(denied: Sequence[int]) -> None:
    """Makes some system calls and the start of processes fail from now on; new threads are allowed.

    Args:
      denied: numbers of system calls that fail with EPERM.
    """
    program = _filter(tuple(denied))
    kept = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(kept)))
    _call("seccomp", _libc.prctl(_SET_SECCOMP, 2, header, 0, 0))


def prepare() -> None:
    """Builds the filters of system calls once, so that sandboxes forked later have them."""
    _filter(PROGRAM)
    _filter(CHECKER)


@functools.cache
def _filter(denied: tuple[int, ...]) -> bytes:
    """Builds the program of a seccomp filter, 8 bytes for each instruction."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    program = [
        (load, 0, 0, 4),  # loads the architecture; the next lines kill a process of another architecture
        (equal, 1, 0, 0xC000003E),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # loads the number of the call
        (at_least, 0, 1, 0x40000000),  # calls of the x32 interface have these numbers
        (give, 0, 0, kill),
        (equal, 0, 1, 435),  # clone3: no filter sees its flags; if it fails, the C library uses clone
        (give, 0, 0, enosys),
    ]
    for number in denied:
        program += [(equal, 0, 1, number), (give, 0, 0, eperm)]
    program += [
        (equal, 0, 4, _CLONE),
        (load, 0, 0, 16),  # loads the flags of clone, with which only new threads are allowed
        (any_bit, 0, 1, 0x00010000),  # the flag CLONE_THREAD
        (give, 0, 0, allow),
        (give, 0, 0, eperm),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


def _restrict(target: str, *, device: bool) -> None:
    """Makes a mount and all mounts below it read-only, without set-user-id; devices work only if `device` is True."""
    flags = 0x01 | 0x02 | (0 if device else 0x04)
    attributes = struct.pack("<QQQQ", flags, 0, 0, 0)
    _call(f"mount_setattr {target}", _libc.syscall(_MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, 32))


def _make(target: str, *, directory: bool) -> None:
    os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
    if not directory:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _call(f"mount {source} on {target}", done)


def _call(what: str, result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise IsolationError(code, f"{what}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
