"""Names of models and data sets of the Hugging Face hub: pins each name to a commit, and copies the files to this host.

A model's name is 'ORG/NAME' or 'ORG/NAME@REVISION'; a data set's name is 'hf:ORG/NAME[@REVISION][:CONFIG]:SPLIT'.
Files are downloaded to the hub's own cache (HF_HOME), once for all processes of a host; cached files are used when the
hub cannot be reached. `local` also knows the names of the models that come with podrl.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podrl.config import install
from podrl.mappings import ConfigValues
from podrl.storage.storage import StorageError, first_line

_ASSETS = pathlib.Path(__file__).resolve().parent.parent / "assets"
# The models that come with podrl, by their names. A user's directory of the same name must be written as ./NAME.
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny_moe", "tiny_hybrid", "tiny_tools", "tiny_search")}
DATA = "hf:"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[\w.-]+))?")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUFFIXES = (".parquet", ".jsonl", ".csv")
# The keys of a configuration that may name repositories, and the lists whose items may name one in their `path`.
_KEYS = ("model.path", "model.reference", "model.critic", "reward.model", "tokenizer", "data.path", "data.eval_path")
_LISTS = ("data.sources", "eval.sets", "model.teachers")


class Name(NamedTuple):
    """A repository of the hub and its revision.

    Attributes:
      repo: 'ORG/NAME'.
      revision: branch, tag or commit.
      kind: 'model' or 'dataset'.
      rest: (configuration or '', split) of a data set; () for a model.
    """

    repo: str
    revision: str
    kind: str
    rest: tuple[str, ...] = ()


def parse_name(path: str) -> Name | None:
    """Parses a path that names a repository of the hub; None for a path of this machine or a bucket.

    Raises:
      ValueError: the path begins with 'hf:' but is not a name of a data set.
    """
    if path.startswith(DATA):
        place, *rest = path.removeprefix(DATA).split(":")
        found = _NAME.fullmatch(place)
        if found is None or len(rest) not in (1, 2) or not rest[-1]:
            raise ValueError(
                f"{path!r} must be hf:ORG/NAME:SPLIT or hf:ORG/NAME:CONFIG:SPLIT, as hf:openai/gsm8k:main:train."
            )
        return Name(found["repo"], found["revision"] or "main", "dataset", (rest[0] if rest[1:] else "", rest[-1]))
    found = _NAME.fullmatch(path)
    # If the part before "/" is a local directory, the path is a misspelt local path and not a name of the hub.
    if found is None or pathlib.Path(path).exists() or pathlib.Path(path.partition("/")[0]).exists():
        return None
    return Name(found["repo"], found["revision"] or "main", "model")


def local(path: str) -> str:
    """Returns the directory of a model of podrl or of the hub, downloaded if needed; returns any other path unchanged.

    Raises:
      ValueError: the hub has no such model, or this account may not read it.
      StorageError: the hub cannot be reached and the cache lacks the model; the same command continues the download.
      ImportError: huggingface_hub is not installed.
    """
    if path in EMBEDDED:
        return str(EMBEDDED[path])
    name = parse_name(path)
    return path if name is None else _snapshot(name, tuple(_MODEL_FILES))


def data_files(path: str) -> list[str]:
    """Downloads the files of a data set's split, and returns the local files in the order of their names.

    Raises:
      ValueError: the hub has no such data set or split, or this account may not read it.
      StorageError: the hub cannot be reached and the cache lacks the files; the same command continues the download.
      ImportError: huggingface_hub is not installed.
    """
    name = parse_name(path)
    assert name is not None, path
    config, split = name.rest
    listed = sorted(_listed(name))
    chosen = _declared(name, listed, config, split) or _conventional(listed, config, split)
    suffixes = sorted({os.path.splitext(file)[1] for file in chosen})
    if len(suffixes) != 1:
        usable = [file for file in listed if file.endswith(_SUFFIXES)]
        raise ValueError(
            f"{path}: no files of one format ({', '.join(_SUFFIXES)}) hold the split {split!r}"
            f"{f' of {config!r}' if config else ''}; the data set has {', '.join(usable[:8]) or 'none of these'}."
        )
    folder = _snapshot(name, tuple(chosen))
    return [os.path.join(folder, file) for file in chosen]


def names(values: ConfigValues) -> dict[str, str]:
    """Returns the values of a configuration that name repositories of the hub, by dotted key."""
    keys = [*_KEYS, *(f"{key}.{k}" for key in _LISTS for k in range(len(_items(values, key))))]
    found = {key: _at(values, key) for key in keys}
    return {key: text for key, text in found.items() if text and parse_name(text) is not None}


def pinned(values: ConfigValues, recorded: ConfigValues) -> ConfigValues:
    """Replaces branches and tags by commits in every name of the hub in a configuration.

    Args:
      values: the configuration.
      recorded: content of the run's config.json, whose commits are kept for equal names; {} for a new run.

    Returns:
      A copy of the configuration.

    Raises:
      ValueError: the hub has no such repository or revision, or this account may not read it.
      StorageError: the hub cannot be reached, and the cache does not know the commit.
      ImportError: huggingface_hub is not installed.
    """
    return renamed(values, {key: _pin(text, _at(recorded, key)) for key, text in names(values).items()})


def renamed(values: ConfigValues, texts: Mapping[str, str]) -> ConfigValues:
    """Returns a copy of a configuration with other texts at dotted keys; `texts` has the texts by key."""
    copy: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for key, text in texts.items():
        group, _, name = key.rpartition(".")
        if group in _LISTS:
            items = list(_items(copy, group))
            items[int(name)] = {**items[int(name)], "path": text}
            section, _, field = group.partition(".")
            copy[section][field] = tuple(items)
        else:
            (copy[group] if group else copy)[name] = text
    return copy


def _at(values: ConfigValues, key: str) -> str:
    """Returns the text at a dotted key of a configuration; '' if there is no text."""
    group, _, name = key.rpartition(".")
    if group in _LISTS:
        items = _items(values, group)
        item = items[int(name)] if int(name) < len(items) else {}
        found = item.get("path", "") if isinstance(item, Mapping) else ""
    else:
        found = (values.get(group, {}) if group else values).get(name, "")
    return found if isinstance(found, str) else ""


def _items(values: ConfigValues, key: str) -> Sequence[Any]:
    """Returns the items of one of `_LISTS`; () if the configuration has none, or another value there."""
    section, _, field = key.partition(".")
    found = values.get(section, {}).get(field)
    return found if isinstance(found, list | tuple) else ()


def push(folder: str | os.PathLike, repo: str) -> str:
    """Uploads a directory as a model of the hub, and creates the repository if needed; returns the commit's address.

    Args:
      folder: directory to upload.
      repo: name of the repository, ORG/NAME.

    Raises:
      ValueError: `repo` is not such a name, or this account may not write it.
      StorageError: the hub cannot be reached.
    """
    if _NAME.fullmatch(repo) is None or "@" in repo:
        raise ValueError(f"--push={repo} must be ORG/NAME.")
    name = Name(repo, "main", "model")
    api, arguments = _api(repo), {"folder_path": os.fspath(folder), "commit_message": "Made by podrl.export"}
    try:
        api.create_repo(repo, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, **arguments).commit_url)
    except Exception as error:
        raise _explained(error, name) from error


def _pin(path: str, before: str) -> str:
    name = parse_name(path)
    if name is None:
        return path
    if _COMMIT.fullmatch(name.revision):
        return path
    start = (DATA if name.kind == "dataset" else "") + name.repo
    end = path.removeprefix(start).removeprefix(f"@{name.revision}")
    if path == before:  # a run of an earlier podrl, which did not pin this key
        return path
    if "@" not in path and before.startswith(f"{start}@") and before.endswith(end):
        return before
    return f"{start}@{_commit(name)}{end}"


def _commit(name: Name) -> str:
    """Returns the commit of a branch or tag; from the cache on this host if the hub cannot be reached."""
    try:
        return str(_api(name.repo).repo_info(name.repo, repo_type=name.kind, revision=name.revision).sha)
    except Exception as error:
        cached = pathlib.Path(_cache()) / f"{name.kind}s--{name.repo.replace('/', '--')}" / "refs" / name.revision
        if cached.is_file() and not _refused(error):
            return cached.read_text().strip()
        raise _explained(error, name) from error


@functools.cache
def _snapshot(name: Name, patterns: tuple[str, ...]) -> str:
    _api(name.repo)
    import huggingface_hub

    arguments: dict[str, Any] = {"repo_type": name.kind, "revision": name.revision, "allow_patterns": list(patterns)}
    arguments |= {"endpoint": os.environ.get("HF_ENDPOINT"), "cache_dir": _cache(), "token": os.environ.get("HF_TOKEN")}
    try:
        return huggingface_hub.snapshot_download(name.repo, **arguments)
    except Exception as error:
        raise _explained(error, name) from error


@functools.cache
def _listed(name: Name) -> list[str]:
    """Lists the files of a repository; the cached files on this host if the hub cannot be reached."""
    try:
        return list(_api(name.repo).list_repo_files(name.repo, repo_type=name.kind, revision=name.revision))
    except Exception as error:
        root = pathlib.Path(_cache()) / f"{name.kind}s--{name.repo.replace('/', '--')}" / "snapshots" / name.revision
        found = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
        if found and not _refused(error):
            return found
        raise _explained(error, name) from error


def _declared(name: Name, listed: list[str], config: str, split: str) -> list[str]:
    """Lists the files that a data set's card names for a split; [] if it names none."""
    import fnmatch

    import yaml

    if "README.md" not in listed:
        return []
    text = pathlib.Path(_snapshot(name, ("README.md",)), "README.md").read_text()
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    card = yaml.safe_load(head[1]) if head else None
    for entry in (card or {}).get("configs") or []:
        if config and entry.get("config_name") != config:
            continue
        files = entry.get("data_files")
        rows = files if isinstance(files, list) else [{"split": "train", "path": files}]
        for row in rows:
            if isinstance(row, dict) and row.get("split") == split:
                patterns = row["path"] if isinstance(row["path"], list) else [row["path"]]
                return [file for file in listed if any(fnmatch.fnmatchcase(file, one) for one in patterns)]
    return []


def _conventional(listed: list[str], config: str, split: str) -> list[str]:
    """Lists the files whose names begin with the split, in the configuration's folder.

    Without a configuration the folders are data/ and the top of the repository.
    """
    folders = {config} if config else {"", "data"}
    usable = [file for file in listed if file.endswith(_SUFFIXES) and os.path.dirname(file) in folders]
    starts = re.compile(rf"{re.escape(split)}(?![A-Za-z0-9])")
    return [file for file in usable if starts.match(os.path.basename(file))]


def _api(repo: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{repo} is not a directory here; as a repository of the hub it needs huggingface_hub: {install('hub')}."
        ) from error
    return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))


def _cache() -> str:
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")


def _refused(error: BaseException) -> bool:
    return getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404)


def _explained(error: BaseException, name: Name) -> Exception:
    """Returns an exception that explains an error of the hub in one sentence."""
    from huggingface_hub import errors

    token = "" if os.environ.get("HF_TOKEN") else "; there is no token here"
    if isinstance(error, errors.GatedRepoError):
        return ValueError(
            f"{name.repo} is gated: accept its licence at https://huggingface.co/{name.repo} and set HF_TOKEN to a "
            f"token of that account{token}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"{name.repo} has no revision {name.revision!r}: name a branch, tag or commit that it has.")
    if _refused(error):
        return ValueError(
            f"{name.repo} is not a directory here, nor a {name.kind} of the hub that this account may read or write "
            f"(set HF_TOKEN){token}."
        )
    return StorageError(
        f"{name.repo} is not a directory here, and a request to the hub for {name.revision} failed "
        f"({type(error).__name__}: {first_line(error)}). The same command tries again; a download goes on where it "
        "stopped."
    )
