"""Kills this process with SIGKILL just before its n-th change in a run directory, or before a change to one file.

Python imports this module at start when its folder is on PYTHONPATH. Audit hooks see every open, rename, mkdir and
remove before it happens, so a process can be killed before each of them. No product code takes part.

Environment: PODRL_KILL_WATCH, the run directory; PODRL_KILL_LOG, a file that gets a line per change; PODRL_KILL_AT, the
number n or a part of the file's path.
"""

import os
import signal
import sys

_WATCHED = os.environ.get("PODRL_KILL_WATCH", "")
_LOG = os.environ.get("PODRL_KILL_LOG", "")
_AT = os.environ.get("PODRL_KILL_AT", "0")
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
_WRITES = os.O_WRONLY | os.O_RDWR
_seen = 0


def _hook(event: str, args: tuple) -> None:
    global _seen
    changes = bool((args[2] or 0) & _WRITES) if event == "open" else event in _CHANGES
    if not changes or not isinstance(args[0], str | os.PathLike) or not str(args[0]).startswith(_WATCHED):
        return
    _seen += 1
    line = f"{os.getpid()} {_seen} {event} {str(args[0])[len(_WATCHED) :]}\n"
    file = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)
    if str(_seen) == _AT or (not _AT.isdigit() and _AT in str(args[0])):
        os.kill(os.getpid(), signal.SIGKILL)


if _WATCHED and _LOG:
    sys.addaudithook(_hook)
