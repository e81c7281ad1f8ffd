"""Opens paths on local disks or in buckets (gs://), and describes the errors of unusable buckets."""

import concurrent.futures
import contextlib
import errno
import importlib.util
import os
import pathlib
import threading

from etils import epath

from podrl.config import install

Place = pathlib.Path | epath.Path

_ROLES = "roles/storage.objectUser and roles/storage.legacyBucketReader"
# Orbax writes this file last if a directory cannot be renamed atomically, as in a bucket.
_COMMITTED = "commit_success.txt"
# Deadline for a bucket's answer: the libraries themselves try for minutes to find credentials and to connect.
ANSWER_S = 10.0
_DISK = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has no quota left",
    errno.EFBIG: "takes no file that large",
    errno.EROFS: "is read-only",
}


class StorageError(Exception):
    """Storage failed although the request is right: the same command may succeed later (exit code 42)."""


def is_remote(path: str | os.PathLike) -> bool:
    """Returns True if a path is a URL, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def locate(path: str | os.PathLike) -> Place:
    """Returns a path object that reads and writes at a local path or a URL.

    Raises:
      ValueError: `path` is a URL but not gs://BUCKET/....
      ImportError: the libraries for gs:// are not installed; the error names podrl's extra.
    """
    if not is_remote(path):
        return pathlib.Path(path).expanduser()
    url = os.fspath(path)
    _bucket(url)
    if importlib.util.find_spec("gcsfs") is None:
        raise ImportError(f"{url} is in a bucket, which needs gcsfs: {install('gcs')}.")
    import fsspec.config

    # Otherwise gcsfs caches listings of directories, to which other processes (and tensorstore in this process) write.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(url)


def absolute(path: str | os.PathLike) -> Place:
    """Returns the result of `locate`, with a local path made absolute, as Orbax needs it; raises the same errors."""
    place = locate(path)
    return place if is_remote(place) else place.absolute()


def check(path: str | os.PathLike, key: str, *, writes: bool = False) -> None:
    """Checks that a path's bucket exists and may be used; local paths pass.

    Args:
      path: path of the user.
      key: flag or configuration key that the path came from, for the message.
      writes: True if checkpoints are written there; for this Orbax needs more permissions than for reading.

    Raises:
      ValueError: there are no credentials, there is no such bucket, or the permission is missing; the error names the
        bucket and what to do.
      StorageError: the service failed, or did not answer within `ANSWER_S` seconds.
      ImportError: the libraries for gs:// are not installed.
    """
    if not is_remote(path):
        return
    url = os.fspath(locate(path))
    import google.cloud.storage  # noqa: F401 - imported here, so that the slow import does not count as waiting

    # After a timeout the thread goes on waiting for the bucket: Python cannot end a thread.
    answer: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Thread(target=_answer, args=(answer, url, key, writes), name="podrl-bucket", daemon=True).start()
    try:
        answer.result(ANSWER_S)
    except TimeoutError:
        raise StorageError(
            f"{key}={url}: bucket {_bucket(url)} cannot be reached: nothing answered within {ANSWER_S:g} s. Is there a "
            "network here?"
        ) from None


def _answer(answer: "concurrent.futures.Future[None]", url: str, key: str, writes: bool) -> None:
    """Puts the result or the error of `_probe` into a future."""
    try:
        answer.set_result(_probe(url, key, writes=writes))
    except BaseException as error:  # noqa: BLE001 - the future raises it in the thread that waits
        answer.set_exception(error)


def _probe(url: str, key: str, *, writes: bool) -> None:
    """Does the work of `check`, without a deadline."""
    bucket = _bucket(url)
    import google.cloud.storage as gcs
    from google.api_core.exceptions import ClientError, NotFound
    from google.auth.exceptions import DefaultCredentialsError

    try:
        try:
            client = gcs.Client()
        except (DefaultCredentialsError, OSError):  # OSError: there are credentials, but they name no project
            if writes:
                raise
            client = gcs.Client.create_anonymous_client()  # this is enough for public data
        if writes:
            client.get_bucket(bucket)
        else:
            next(iter(client.list_blobs(bucket, max_results=1)), None)
    except DefaultCredentialsError:
        raise ValueError(
            f"{key}={url}: there are no Google credentials here for bucket {bucket}. Run `gcloud auth "
            "application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to a key file, or give the machine a "
            f"service account with {_ROLES} on it."
        ) from None
    except NotFound:
        raise ValueError(
            f"{key}={url}: there is no bucket {bucket}. Make it with `gcloud storage buckets create gs://{bucket}`, "
            f"or correct {key}."
        ) from None
    except ClientError as error:
        if error.code in (401, 403):
            raise ValueError(denied(url, key)) from None
        raise StorageError(f"{key}={url}: bucket {bucket} cannot be asked: {first_line(error)}") from error
    except Exception as error:
        if "Project was not passed" in str(error):
            raise ValueError(
                f"{key}={url}: the credentials for bucket {bucket} name no project: set GOOGLE_CLOUD_PROJECT."
            ) from None
        raise StorageError(f"{key}={url}: bucket {bucket} cannot be reached: {first_line(error)}") from error


def denied(url: str, key: str) -> str:
    """Returns the error message for valid credentials without the needed permission."""
    return (
        f"{key}={url}: these credentials may not use bucket {_bucket(url)}. Grant their account {_ROLES} on it "
        f"(gcloud storage buckets add-iam-policy-binding gs://{_bucket(url)} --role=... --member=...)."
    )


def is_denied(error: BaseException) -> bool:
    """Returns True if an error of gcsfs is about insufficient permission."""
    return getattr(error, "code", None) in (401, 403) or str(error).startswith("Forbidden")


def complete_steps(directory: Place) -> list[int]:
    """Lists the steps with a complete checkpoint in a directory, oldest first; [] if the directory does not exist."""
    if not directory.is_dir():
        return []
    named = sorted((int(path.name), path) for path in directory.iterdir() if path.name.isdigit())
    return [step for step, path in named if not is_remote(path) or (path / _COMMITTED).exists()]


def remove_tree(directory: Place) -> None:
    """Removes a directory with all its content, if it exists."""
    path = epath.Path(directory)
    if path.exists():
        path.rmtree()


def write_whole(file: pathlib.Path, content: str | bytes) -> None:
    """Writes a local file atomically: a reader finds the old content or all of the new, even after a power cut."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as out:
        out.write(content.encode() if isinstance(content, str) else content)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
    sync_directory(file.parent)


def sync_directory(directory: pathlib.Path) -> None:
    """Waits until the names of a local directory's files are on disk, so that a new file survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_trouble(error: BaseException) -> str:
    """Describes a disk that is full, over quota or read-only, or takes no file that large; '' for other errors."""
    if not isinstance(error, OSError) or error.errno not in _DISK:
        return ""
    place = f" ({error.filename})" if error.filename else ""
    return (
        f"The disk of the run{place} {_DISK[error.errno]}: make it writable or free space there, or give a --workdir "
        "on another disk; the same command then goes on from the newest checkpoint."
    )


def tree_size(directory: Place) -> int:
    """Returns the bytes that a local directory's files take on disk; files that vanish meanwhile count 0."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def file_size(file: Place) -> int:
    """Returns the size of a file in bytes."""
    return epath.Path(file).stat().length if is_remote(file) else os.stat(file).st_size


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters; the error's type if it has no text."""
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0][:300]


def _bucket(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if scheme != "gs" or not bucket:
        raise ValueError(f"{url} cannot be read or written: give a local path or gs://BUCKET/PATH.")
    return bucket
