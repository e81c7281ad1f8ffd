"""Where a path leads, a local file system or a bucket (gs://), and what is said when a bucket cannot be used."""

import importlib.util
import os
import pathlib

from etils import epath

Place = pathlib.Path | epath.Path

_ROLES = "roles/storage.objectUser and roles/storage.legacyBucketReader"
# Written last by Orbax where a directory cannot be renamed in one piece, as in a bucket.
_COMMITTED = "commit_success.txt"


class StorageError(Exception):
    """Storage failed though nothing is wrong with what was asked of it: the same again may work (exit code 42)."""


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path is a URL, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def locate(path: str | os.PathLike) -> Place:
    """The path as an object that reads and writes where it leads.

    Raises:
      ValueError: a URL of another kind than gs://BUCKET/....
      ImportError: the libraries for gs:// are not installed; names the extra.
    """
    if not is_remote(path):
        return pathlib.Path(path).expanduser()
    url = os.fspath(path)
    _bucket(url)
    if importlib.util.find_spec("gcsfs") is None:
        raise ImportError(f"{url} is in a bucket, which needs gcsfs: pip install 'podrl[gcs]'.")
    import fsspec.config

    # Listings are kept otherwise, and other processes (and tensorstore in this one) write to the same directories.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(url)


def absolute(path: str | os.PathLike) -> Place:
    """`locate`, with a local path made absolute, as Orbax wants it; a URL is that already. Raises as `locate`."""
    place = locate(path)
    return place if is_remote(place) else place.absolute()


def check(path: str | os.PathLike, key: str, *, writes: bool = False) -> None:
    """Asks the bucket of a path whether it is there and may be used; local paths pass.

    Args:
      path: what the user gave.
      key: the flag or configuration key it came from, for the message.
      writes: whether checkpoints go there, for which Orbax asks more than reading needs.

    Raises:
      ValueError: no credentials, no such bucket, or no permission; names the bucket and what to do.
      StorageError: the service did not answer.
      ImportError: as in `locate`.
    """
    if not is_remote(path):
        return
    url = os.fspath(locate(path))
    bucket = _bucket(url)
    import google.cloud.storage as gcs
    from google.api_core.exceptions import ClientError, NotFound
    from google.auth.exceptions import DefaultCredentialsError

    try:
        try:
            client = gcs.Client()
        except (DefaultCredentialsError, OSError):  # OSError: credentials, but no project they belong to
            if writes:
                raise
            client = gcs.Client.create_anonymous_client()  # enough for public data
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
    """What to say where credentials are there and do not suffice."""
    return (
        f"{key}={url}: these credentials may not use bucket {_bucket(url)}. Grant their account {_ROLES} on it "
        f"(gcloud storage buckets add-iam-policy-binding gs://{_bucket(url)} --role=... --member=...)."
    )


def is_denied(error: BaseException) -> bool:
    """Whether an error of gcsfs says that the credentials do not suffice."""
    return getattr(error, "code", None) in (401, 403) or str(error).startswith("Forbidden")


def complete_steps(directory: Place) -> list[int]:
    """Steps whose checkpoint in a directory was written to its end, oldest first; [] where there is no directory."""
    if not directory.is_dir():
        return []
    named = sorted((int(path.name), path) for path in directory.iterdir() if path.name.isdigit())
    return [step for step, path in named if not is_remote(path) or (path / _COMMITTED).exists()]


def remove_tree(directory: Place) -> None:
    """Removes a directory with all that is in it, if it is there."""
    path = epath.Path(directory)
    if path.exists():
        path.rmtree()


def file_size(file: Place) -> int:
    """Size of a file in bytes."""
    return epath.Path(file).stat().length if is_remote(file) else os.stat(file).st_size


def first_line(error: BaseException) -> str:
    """An error of a library, short enough for a log line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _bucket(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if scheme != "gs" or not bucket:
        raise ValueError(f"{url} cannot be read or written: give a local path or gs://BUCKET/PATH.")
    return bucket
