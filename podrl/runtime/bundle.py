"""Unpacks the user's code that a launcher has put beside the run, before anything of it is read."""

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

# What launch/submission.py sends at most, and the headers of so many files.
_MOST_BYTES = 64 << 20
_NAME = re.compile(r"code-([0-9a-f]{64})\.tar$")


def unpack(url: str, parent: pathlib.Path) -> pathlib.Path:
    """Unpacks an archive of code, checked against the SHA-256 in its name, into a new directory.

    Args:
      url: where the archive is, as launch/ names it: gs://BUCKET/RUN.code-SHA256.tar.
      parent: the directory that gets the new one.

    Raises:
      ValueError: another name, no such archive, other bytes than those that were sent, or an archive that would write
        outside its directory.
      StorageError: the bucket did not answer.
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
            f"--code={url} is not there: whoever started the job copies it; submit the job again."
        ) from None
    except OSError as error:
        raise StorageError(f"--code={url} cannot be read: {first_line(error)}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != named[1]:
        raise ValueError(
            f"--code={url} has the SHA-256 {digest}, not the one in its name: it was damaged or replaced after it was "
            "sent, and nothing of it is used; submit the job again."
        )
    target = pathlib.Path(tempfile.mkdtemp(prefix="podrl-code-", dir=parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"--code={url} is no archive that launch/ made: {first_line(error)}") from None
    return target


def enter(url: str, environment: MutableMapping[str, str], *, workdir: str | None) -> pathlib.Path:
    """Unpacks the code of a job, and makes it the working directory and the first place that imports come from.

    Relative paths of the configuration then mean files of the user's code, in this process and in those it starts.

    Args:
      url: see `unpack`.
      environment: usually os.environ.
      workdir: the run directory; None for a process that writes none.

    Raises:
      ValueError: as `unpack`; or a relative run directory, which would be within the code, and go with it.
      StorageError: as `unpack`.
    """
    if workdir is not None and not (is_remote(workdir) or os.path.isabs(workdir)):
        raise ValueError(
            f"--workdir={workdir!r} is relative, and with --code relative paths lie in a copy of the code that is lost "
            "with the host: say --workdir=gs://BUCKET/RUN, or a path from / on."
        )
    target = unpack(url, pathlib.Path(tempfile.gettempdir()))
    package = pathlib.Path(__file__).resolve().parents[2]  # an image may have podrl in its working directory alone
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(target), str(package), *others])
    os.chdir(target)
    sys.path.insert(0, str(target))
    return target
