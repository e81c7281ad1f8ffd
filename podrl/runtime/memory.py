"""Measures how much memory this process may still use."""

import contextlib
import pathlib
import re


def free_memory() -> int | None:
    """Returns the bytes of memory that this process and its children may still use; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        table = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
        found.append(int(table["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):  # ValueError: a container without a limit has 'max' in the file
        group = pathlib.Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        found.append(limit - used + int(cached[1] if cached else 0))
    return min(found, default=None)
