"""Runs tests of programs in sandboxes, many at once; refuses a host that cannot isolate programs."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence

from podrl.rewards.sandbox.messages import Bounds, ProgramLimits, ProgramTests, Verdict

_ROOT = str(pathlib.Path(__file__).resolve().parents[3])  # the directory from which podrl is imported
_MODULE = "podrl.rewards.sandbox.server"
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LEAVE_S = 30.0  # seconds that an answer may take beyond the programs' wall_s
_PROBE: ProgramTests = {"program": "def one():\n    return 1", "setup": "", "tests": ["assert one() == 1"], "all": True}


class RefusedError(RuntimeError):
    """This host cannot isolate a program; the message says what the host refuses, and which settings would allow it."""


class Sandboxes:
    """Tests programs, each in a sandbox of its own.

    Use it from the thread that made it: the process that starts sandboxes ends with that thread.
    """

    def __init__(self, limits: ProgramLimits, *, at_once: int, packages: Sequence[str] = ()) -> None:
        """Starts the process that starts sandboxes, and tests a first program.

        Args:
          limits: limits of every sandbox.
          at_once: largest number of sandboxes at once.
          packages: directories that programs may import from, besides the standard library.

        Raises:
          RefusedError: the host cannot isolate a program.
        """
        # Directories of the Python installation that a virtual environment uses.
        own = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        standard = [sysconfig.get_path(name, vars=own) for name in ("stdlib", "platstdlib")]
        imports = list(dict.fromkeys([*standard, f"{standard[1]}/lib-dynload", *packages]))
        paths = [path for path in dict.fromkeys((*_SYSTEM, *imports, *_DEVICES)) if os.path.exists(path)]
        self._limits: Bounds = {**limits, "imports": imports, "paths": paths}
        self._threads = concurrent.futures.ThreadPoolExecutor(at_once, thread_name_prefix="podrl-sandbox")
        self._lock = threading.Lock()
        self._control, self._bwrap = None, ""
        self._begin()

    def test(self, jobs: Sequence[ProgramTests]) -> list[Verdict]:
        """Tests programs, up to `at_once` of them at once.

        Args:
          jobs: programs with their tests.

        Returns:
          The verdict on each program, in the order of `jobs`. A sandbox that ended without an answer has passed no
          test.
        """
        return list(self._threads.map(self._test, jobs))

    def close(self) -> None:
        """Ends every sandbox."""
        self._threads.shutdown(cancel_futures=True)
        if self._control is not None:
            self._control.close()
            self._server.wait()

    def _begin(self) -> None:
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise RefusedError("programs can be isolated only on Linux x86-64.")
        self._start_server()
        found = self._test(_PROBE)
        if "refused" in found and (bwrap := shutil.which("bwrap")):
            self._bwrap = bwrap
            found = self._test(_PROBE)
        if found.get("passed") != [True]:
            self.close()
            tried = "new namespaces, and then bubblewrap," if self._bwrap else "new namespaces"
            raise RefusedError(
                f"this host cannot isolate programs: {tried} failed ({found.get('refused') or found.get('said')}). On "
                "Linux 5.14 or later, allow user namespaces (user.max_user_namespaces above 0, "
                "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, in a container a "
                f"seccomp profile with unshare and mount){'' if self._bwrap else ', or install bubblewrap'}."
            )

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps(self._limits)]
            self._server = subprocess.Popen(
                _command("serve", arguments),
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def _test(self, job: ProgramTests) -> Verdict:
        ours, theirs = socket.socketpair()
        process = None
        with ours, theirs:
            if self._bwrap:
                process = self._bubblewrapped(theirs)
            else:
                assert self._control is not None
                with self._lock:
                    socket.send_fds(self._control, [b"1"], [theirs.fileno()])
            theirs.close()
            answer = _ask(ours, job, self._limits["wall_s"] + _LEAVE_S)
        if process is not None:
            process.kill()
            output = process.communicate()[1].decode(errors="replace").strip()
            answer = answer or (json.dumps({"passed": [], "said": "", "refused": output}).encode() if output else b"")
        if not answer:
            return {"passed": [], "said": "its sandbox was ended"}
        return json.loads(answer)

    def _bubblewrapped(self, job: socket.socket) -> subprocess.Popen:
        """Starts a sandbox by bubblewrap. It is slower than a forked sandbox, because it starts an interpreter."""
        shown = [*self._limits["paths"], f"{_ROOT}/podrl/__init__.py", str(pathlib.Path(__file__).parents[1])]
        shown += [os.path.realpath(sys.executable), *_libraries()]
        binds = [part for path in shown for part in (_bind(path), path, path)]
        disk = str(self._limits["disk_mb"] << 20)
        options = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        options += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
        options += ["--uid", "65534", "--gid", "65534", "--setenv", "PYTHONHASHSEED", "0"]
        options += [*binds, "--size", disk, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        command = _command("alone", [str(job.fileno()), json.dumps(self._limits)])
        command[0] = os.path.realpath(command[0])
        return subprocess.Popen(
            [self._bwrap, *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[job.fileno()],
        )


# The hash seed is fixed, so that sets iterate in the same order in every run of a program.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PATH": "/nowhere"}


def _command(function: str, arguments: Sequence[str]) -> list[str]:
    start = f"import sys; sys.path.insert(0, {_ROOT!r}); from {_MODULE} import {function}; {function}()"
    return [sys.executable, "-s", "-S", "-P", "-c", start, *arguments]


def _bind(path: str) -> str:
    return "--dev-bind" if path.startswith("/dev/") else "--ro-bind"


def _libraries() -> list[str]:
    """Returns the path of the interpreter's own shared library, if it has one outside the system's directories."""
    name = sysconfig.get_config_var("LDLIBRARY") or ""
    path = os.path.join(sysconfig.get_config_var("LIBDIR") or "", name)
    return [path] if name.endswith(".so") and os.path.exists(path) and not path.startswith(_SYSTEM) else []


def _ask(channel: socket.socket, job: ProgramTests, timeout_s: float) -> bytes:
    """Sends a job and returns the answer; empty bytes if the sandbox ended without an answer."""
    channel.settimeout(timeout_s)
    content = bytearray()
    try:
        channel.sendall(json.dumps(job).encode())
        channel.shutdown(socket.SHUT_WR)
        while part := channel.recv(1 << 16):
            content += part
    except OSError:  # the sandbox has ended, or is late
        return bytes(content) if content.endswith(b"}") else b""
    return bytes(content)
