"""Unpacks the archive of the user's code that a launcher has copied next to the run directory."""

import hashlib
import io
import os
import pathlib
import re
import sys
import tarfile
import tempfile
from collections.abc import MutableMapping

from podrl.storage.storage import StorageError, check, file_size, first_line, is_remote, locate

# No archive of launch/submission.py is longer: it has at most 32 MiB of files, and their headers.
_MOST_BYTES = 64 << 20
_NAME = re.compile(r"code-([0-9a-f]{64})\.tar$")


def unpack(url: str, parent: pathlib.Path) -> pathlib.Path:
    """Checks an archive of code against the SHA-256 in its name, and unpacks it into a new directory.

    Args:
      url: URL or path of the archive, as launch/ names it: gs://BUCKET/RUN.code-SHA256.tar.
      parent: directory in which the new directory is made.

    Returns:
      The new directory.

    Raises:
      ValueError: the name has another form, there is no such archive, its content does not have the SHA-256 of its
        name, or a file of the archive would be written outside the new directory.
      StorageError: the bucket did not answer, or the archive cannot be read.
    """
    named = _NAME.search(url)
    if named is None:
        raise ValueError(f"--code={url} must be RUN.code-SHA256.tar, an archive that launch/ made of a directory.")
    try:
        check(url, "--code")
        place = locate(url)
        if file_size(place) > _MOST_BYTES:
            raise ValueError(f"--code={url} is larger than what launch/ sends: submit the job again.")
        content = place.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"--code={url} does not exist: the launcher copies it when the job is submitted; submit the job again."
        ) from None
    except OSError as error:
        raise StorageError(f"--code={url} cannot be read: {first_line(error)}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != named[1]:
        raise ValueError(
            f"--code={url} has the SHA-256 {digest}, not the one in its name: the archive was damaged or replaced "
            "after it was sent, and none of its files is used; submit the job again."
        )
    target = pathlib.Path(tempfile.mkdtemp(prefix="podrl-code-", dir=parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"--code={url} is not an archive that launch/ made: {first_line(error)}") from None
    return target


def enter(url: str, environment: MutableMapping[str, str], *, workdir: str | None) -> pathlib.Path:
    """Unpacks the code of a job; the new directory becomes the working directory and the import path's first entry.

    Relative paths of the configuration then name files of the user's code, in this process and in its subprocesses.

    Args:
      url: URL or path of the archive, as for `unpack`.
      environment: environment to change, usually os.environ.
      workdir: the run directory; None for a process without a run directory.

    Returns:
      The directory of the code.

    Raises:
      ValueError: `unpack` refuses the archive; or the path of the run directory is relative, so that the run directory
        would be inside the copy of the code and be lost with the copy.
      StorageError: the bucket did not answer, or the archive cannot be read.
    """
    if workdir is not None and not (is_remote(workdir) or os.path.isabs(workdir)):
        raise ValueError(
            f"--workdir={workdir!r} is relative, and with --code relative paths are inside a copy of the code that is "
            "lost with the host: give --workdir=gs://BUCKET/RUN or an absolute path."
        )
    target = unpack(url, pathlib.Path(tempfile.gettempdir()))
    # Some images have podrl only in the working directory, which changes below. So podrl's path is added here.
    package = pathlib.Path(__file__).resolve().parents[2]
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(target), str(package), *others])
    os.chdir(target)
    sys.path.insert(0, str(target))
    return target
