"""Compares settings, data, tokenizer, models, user code and versions: between hosts, and between starts of a run."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping

from etils import epath

from podrl.data import sources
from podrl.data.cache import Cache
from podrl.data.mixture import WORTH
from podrl.data.tokenizer import FILES
from podrl.job.config import SCRATCH, Job
from podrl.mappings import ConfigValues
from podrl.rundir import identity
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod
from podrl.storage import hub
from podrl.storage.storage import is_remote, locate, write_whole

NAME = "files.json"  # facts of a run's last start, in its run directory

# Settings that may differ between hosts, because they concern files and processes of one host, or files that only the
# leader writes. All other settings must be equal. Even a rollout host, which writes no checkpoint, needs
# checkpoint.every, because it must know which steps have a checkpoint.
_OWN = ("log.", "checkpoint.keep", "compile_cache", "data.cache", "reward.workers")
_SHOWN = 3  # largest number of differences that a message names
_BLOCK, _BLOCKS = 1 << 14, 64  # size in bytes and number of the blocks that are read from a file of weights
_ABSENT = "absent"
_MODULE = re.compile(r"^([A-Za-z_]\w*)(?=(?:\.\w+)*:[A-Za-z_])(?!.*\.py:)|(?<=-m )([A-Za-z_]\w*)")
_SCRIPT = re.compile(r"[^\s:,'\"=]+\.py\b")
_MOST = 1000  # largest number of files of a package that are read
_TEXT = 4096  # longer settings, in characters, are not searched for names of files


def check_settings(values: ConfigValues, pod: Pod, deadline_s: float) -> None:
    """Refuses settings that differ from the leader's; the leader itself only publishes its settings.

    Args:
      values: the configuration, as plain nested mappings, before anything is derived from files.
      pod: the job's processes.
      deadline_s: longest wait for the leader, in seconds.

    Raises:
      ValueError: a setting differs; the message names the settings, both values and this host.
      ChannelError: the leader did not answer.
    """
    mine = json.loads(json.dumps(values, default=_plain))
    if pod.leads:
        pod.channel.put("settings", Message(mine))
        return
    settings = pod.get(LEADER, "settings", deadline_s).value
    differ = [change for changes in identity.changes(settings, mine, {}) for change in changes]
    if differ := [change for change in differ if not change.startswith(_OWN)]:
        how = f", with --join={pod.seat.leader}" if pod.seat.late else " on every host"
        raise ValueError(
            f"{_label(pod)} has other settings than the leader ('was' is the leader's value, 'now' this host's): "
            f"{'; '.join(differ[:_SHOWN])}{_more(differ)}. Start the job's own command{how}."
        )


def check_files(mine: Mapping[str, str], pod: Pod, deadline_s: float) -> None:
    """Refuses files and versions that differ between this host and the other hosts.

    A data file or code that is missing on this host is not reported here, but by the function that reads it.

    Args:
      mine: files and versions of this host, as `facts` describes them.
      pod: the job's processes.
      deadline_s: longest wait for the leader, in seconds.

    Raises:
      ValueError: a file or version differs; the message names it, both values and both hosts.
      ChannelError: the leader did not answer.
    """
    if pod.leads:
        pod.channel.serve("alike", SettingsComparison(pod.seat.process, mine))
        return
    answer = pod.call(LEADER, "alike", Message({"process": pod.seat.process, "facts": mine}), deadline_s).value
    if differ := [
        f"{key} is {mine[key]} here, and {value} on {pod.seat.hosts.name(other)} (host {other})"
        for key, (value, other) in answer["differ"].items()
    ]:
        raise ValueError(
            f"{_label(pod)} differs from the other hosts: {'; '.join(differ[:_SHOWN])}{_more(differ)}. All hosts of a "
            "job need the same files and versions: copy them from one host, or put them where all hosts read them."
        )


def changed_since(mine: Mapping[str, str], place: str, workdir: pathlib.Path) -> str:
    """Compares the facts of this start with the facts of the run's last start, and writes the new facts to files.json.

    A changed file does not end a run, because users resume runs with corrected data or repaired functions.

    Args:
      mine: files and versions of this start, as `facts` describes them.
      place: the run directory as the user named it, which holds the checkpoints.
      workdir: the directory on this machine's disk that holds the run's files.

    Returns:
      A sentence that names the facts that differ; '' if all are equal, if no earlier start wrote facts, or if the run
      has made no step yet.
    """
    path = workdir / NAME
    try:
        theirs = json.loads(path.read_bytes())
        differ = [
            f"{key} was {theirs[key]}, now {mine[key]}" for key in mine if mine[key] != theirs.get(key, mine[key])
        ]
    except (OSError, ValueError, AttributeError):  # the first start, or a damaged file
        differ = []
    write_whole(path, json.dumps(mine, indent=2, sort_keys=True) + "\n")
    if not differ or not identity.has_steps(workdir, locate(place) / "checkpoints"):
        return ""
    return (
        f"Files or versions have changed since this run was last started: {'; '.join(differ[:_SHOWN])}{_more(differ)}. "
        "Steps made before are not repeated: give another --workdir to train from the beginning."
    )


class SettingsComparison:
    """Compares the facts of all hosts, on the leader. The first host that reports a fact sets the expected value."""

    def __init__(self, process: int, facts: Mapping[str, str]):
        """Takes the facts of the leader, host `process`, as the first expected values."""
        self._known = {key: (value, process) for key, value in facts.items()}

    def __call__(self, message: Message) -> Message:
        """Returns the facts in which the sending host differs, each as (expected value, process that reported it)."""
        process, facts = int(message.value["process"]), message.value["facts"]
        first = {key: self._known.setdefault(key, (value, process)) for key, value in facts.items()}
        return Message({"differ": {key: known for key, known in first.items() if known[0] != facts[key]}})


def facts(job: Job) -> dict[str, str]:
    """Describes each file and package that a job's numbers depend on, besides settings: {name: checksum or version}.

    Data files on a disk are read completely, as in training; a data file in a bucket is described by its size and time
    of change. Files of weights, which may take terabytes, are read only in part. Models in a bucket are left out,
    because all hosts read the same files; data and models of the hub are left out, because their commits are in the
    settings.
    """
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    own = pathlib.Path(__file__).resolve().parent.parent
    found["podrl"] = _of_code(sorted(file for file in own.rglob("*.py") if _counts(file, own)), own)
    cache = Cache(job.data.cache)
    for key, path, part in _data(job):
        if path.startswith(hub.DATA):
            continue
        try:
            files = sources.files(sources.of_split(path, part))
        except (ValueError, OSError):
            continue
        found[f"{key}={path}" + (f" ({part})" if part else "")] = _joined(_of_file(file, cache) for file in files)
    for key, directory in _models(job):
        found |= {f"{key}={name}": value for name, value in _of_model(directory)}
    for key, text in _texts(job.as_mapping()):
        for script in sorted(_scripts(text)):
            if (file := pathlib.Path(script).expanduser()).is_file():
                found[f"{key}={script}"] = _of_code(_with_imports(file.resolve()), file.resolve().parent)
        for name in map("".join, _MODULE.findall(text)):
            if files := _of_package(name):
                root = pathlib.Path(os.path.commonpath([file.parent for file in files]))
                found[f"{key}={name}"] = _of_code(files[:_MOST], root)
        if key.endswith("_file") and (file := pathlib.Path(text).expanduser()).is_file():
            found[f"{key}={text}"] = _of_file(epath.Path(file), cache)
    return found


def _plain(value: object) -> object:
    """Replaces a value that JSON cannot hold, in the same way on all hosts."""
    if isinstance(value, set | frozenset):  # the order of a set depends on the hash seed of the process
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or str(value)  # str of a function holds its address in this process


def _counts(file: pathlib.Path, root: pathlib.Path) -> bool:
    """Returns False for dangling links, which editors leave, and for hidden files and files in hidden folders."""
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)


def _scripts(text: str) -> set[str]:
    """Lists the Python files that a setting's text names, as 'FILE.py:NAME' or as words of a command."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    named = {one.rpartition(":")[0] if ":" in one else one for one in (text, *words)}
    return {one for one in (*named, *_SCRIPT.findall(text)) if one.endswith(".py")}


def _label(pod: Pod) -> str:
    return f"{pod.name} (host {pod.seat.process}, {socket.gethostname()})"


def _more(differ: list[str]) -> str:
    return f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""


def _data(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yields (key, path, split) of the job's data files."""
    if job.data.sources:
        yield from (("data.sources", source.path, source.split) for source in job.data.sources)
    else:
        yield "data.path", job.data.path, ""
    yield "data.eval_path", job.data.eval_path, ""
    yield from (("eval.sets", one.path, one.split) for one in job.eval.sets)


def _models(job: Job) -> Iterator[tuple[str, str]]:
    """Yields (key, directory) of the models and the tokenizer that the job names."""
    named = {"model.path": job.model.path, "tokenizer": job.tokenizer, "model.reference": job.model.reference}
    named |= {"model.critic": job.model.critic, "reward.model": job.reward.model}
    teachers = [("model.teachers", teacher.path) for teacher in job.model.teachers]
    for key, path in [*named.items(), *teachers]:
        path = "tiny" if path == SCRATCH else path  # the scratch model has the tokenizer of 'tiny'
        if path and not is_remote(path) and not hub.parse_name(path):
            yield key, hub.local(path)


def _of_model(directory: str) -> Iterator[tuple[str, str]]:
    """Yields (file, description) of a model directory; reads small files whole, and only pieces of weight files."""
    folder = epath.Path(locate(directory))
    if not folder.is_dir():
        return
    for name in (*FILES, "config.json"):
        yield f"{directory}/{name}", _of_file(folder / name) if (folder / name).is_file() else _ABSENT
    for file in sorted(folder.glob("*.safetensors")):
        if file.is_file():
            yield f"{directory}/{file.name}", _of_weights(file)


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) of every text in nested settings; for a function the text is the path of its file."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, key)
    elif isinstance(value, str) and len(value) <= _TEXT:
        yield key, value
    elif inspect.isroutine(value) and (file := inspect.getsourcefile(inspect.unwrap(value))):
        yield key, file


def _of_file(file: epath.Path, cache: Cache | None = None) -> str:
    """Describes a file by size and checksum of the bytes, or a file in a bucket by size and time of change."""
    size = sources.size(file)
    if is_remote(file):
        return f"{size} bytes of {file.stat().mtime}"
    if cache is not None and size >= WORTH:  # the readers of large files need this entry of the cache, too
        return _described(size, cache.content(file))
    with open(file, "rb") as content:
        return _described(size, hashlib.file_digest(content, "sha256").hexdigest())


def _of_weights(file: epath.Path) -> str:
    """Describes a file by its size and a checksum of pieces all over it, because training changes the whole file."""
    size, digest = sources.size(file), hashlib.sha256()
    with open(file, "rb") as content:
        for i in range(_BLOCKS):
            content.seek(i * max(size - _BLOCK, 0) // (_BLOCKS - 1))
            digest.update(content.read(_BLOCK))
    return _described(size, digest.hexdigest())


def _of_code(files: Iterable[pathlib.Path], root: pathlib.Path) -> str:
    """Describes Python files by their names below a root, and their content."""
    digest, size = hashlib.sha256(), 0
    for file in files:
        content = file.read_bytes()
        size += len(content)
        digest.update(json.dumps([str(file.relative_to(root)), hashlib.sha256(content).hexdigest()]).encode())
    return _described(size, digest.hexdigest())


def _described(size: int, digest: str) -> str:
    return f"{size} bytes with SHA-256 {digest[:16]}"


def _joined(described: Iterable[str]) -> str:
    """Joins the descriptions of several files into one; a single description stays as it is."""
    each = list(described)
    whole = hashlib.sha256(json.dumps(each).encode()).hexdigest()
    return each[0] if len(each) == 1 else f"{len(each)} files with SHA-256 {whole[:16]}"


def _with_imports(file: pathlib.Path) -> list[pathlib.Path]:
    """Lists a file and the Python files in its folder that it imports, directly or through other files."""
    root, left, found = file.parent, [file], dict[pathlib.Path, None]()
    while left:
        one = left.pop()
        if one in found:
            continue
        found[one] = None
        try:
            tree = ast.parse(one.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # the code that runs the file will report the error
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:  # the next loop skips a top folder that holds no modules itself
                dotted = root.joinpath(*name.split("."))
                left += [
                    path for path in (dotted.with_name(f"{dotted.name}.py"), dotted / "__init__.py") if path.is_file()
                ]
            for top in {name.partition(".")[0] for name in names}:
                package = (root / top).rglob("*.py") if any((root / top).glob("*.py")) else ()
                left += [path for path in (root / f"{top}.py", *package) if path.is_file()]
    return sorted(found)


def _of_package(name: str) -> list[pathlib.Path]:
    """Lists the files of a user's top-level package or module, without importing it; nothing for podrl and builtins."""
    try:
        spec = None if name == "podrl" else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    places = [pathlib.Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in sorted(place.rglob("*.py"))] or [pathlib.Path(spec.origin or "")]
    return [file for file in files if file.suffix == ".py" and file.is_file()]
