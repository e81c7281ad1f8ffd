"""Tells local disks from file systems that other machines see, too.

This file and podrl/runtime/detect.py need only the standard library: some hosts that use them have nothing else.
"""

import pathlib

# File systems that several hosts can see at one path; every other kind counts as host-local.
_SHARED_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "ceph", "gpfs", "beegfs", "9p", "cifs", "smb3", "afs", "glusterfs", "daos"}
    | {"fuse.gcsfuse", "gcsfuse", "fuse.gcs", "fuse.s3fs", "fuse.juicefs", "fuse.glusterfs", "fuse.sshfs", "fuse.daos"}
)


def on_network(path: str, mounts: str) -> bool:
    """Returns True if a local path lies on a file system that other machines may write to.

    Args:
      path: the local path, absolute.
      mounts: text of /proc/mounts.
    """
    return _file_system(path, mounts) in _SHARED_FILE_SYSTEMS


def _file_system(path: str, mounts: str) -> str:
    wanted = pathlib.PurePosixPath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = pathlib.PurePosixPath(fields[1].replace("\\040", " "))
        # Of two lines with the same mount point the later one hides the earlier one, hence >=.
        if (wanted == point or point in wanted.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind
