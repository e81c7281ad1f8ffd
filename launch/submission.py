"""Prepares a job for its hosts: packs the user's code into one archive, and refuses settings that hosts cannot follow.

tpu_vm.sh runs `python3 submission.py [--code=DIR --archive=FILE] -- PODRL_FLAGS`, which needs nothing but Python.
"""

import ast
import contextlib
import dataclasses
import hashlib
import io
import itertools
import math
import os
import pathlib
import posixpath
import re
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HELP = "a directory with your code, configuration and small data files; it is copied to every host"
CODE_BYTES = 32 << 20
CODE_FILES = 10_000
_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
# Names that are never sent as code: those of version control, of Python and its tools, and .env, which may hold
# secrets. A directory with metrics.jsonl belongs to a run.
_NEVER = frozenset(
    {".git", ".hg", "__pycache__", ".venv", ".env", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache"}
)
_RUNS, _RUN_FILE = "runs", "metrics.jsonl"
# Matches a relative path of a file anywhere in a value, but not the end of an absolute path or of a URL.
_FILE = re.compile(
    r"(?<![\w./:~-])(?:\.{1,2}/)*\w[\w./-]*"
    r"\.(?:py|jsonl?|csv|tsv|parquet|arrow|array_record|jinja2?|txt|md|ya?ml|toml|sh)(?:\.(?:gz|bz2|xz|zst))?\b"
)
_MODELS = ("model.path", "model.reference", "model.critic", "reward.model", "tokenizer")
_DATA = ("data.path", "data.eval_path", "env.system_prompt_file")
# Models and tasks that are in podrl.
_SHIPPED = ("tiny", "tiny_moe", "tiny_hybrid", "tiny_tools", "tiny_search", "scratch", "problems", "sums", "facts")
_WORDS = ("data.system_prompt", "env.system_prompt")  # texts for a model, in which names of files are only words


@dataclasses.dataclass(frozen=True)
class Code:
    """A directory of the user's code, as it is sent to the hosts.

    Attributes:
      directory: the directory on this machine.
      files: content by path below the directory, with '/' on every system, sorted.
      links: targets of symbolic links that stay in the directory, by path.
      programs: paths of files that their owner may execute.
    """

    directory: pathlib.Path
    files: Mapping[str, bytes]
    links: Mapping[str, str]
    programs: frozenset[str]

    @property
    def archive(self) -> bytes:
        """The tar archive. Its bytes depend only on the content, not on the user, the machine or the time."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted({*self.files, *self.links}):
                entry = tarfile.TarInfo(name)
                if name in self.links:
                    entry.type, entry.linkname = tarfile.SYMTYPE, self.links[name]
                    tar.addfile(entry)
                    continue
                entry.size, entry.mode = len(self.files[name]), 0o755 if name in self.programs else 0o644
                tar.addfile(entry, io.BytesIO(self.files[name]))
        return out.getvalue()

    def url(self, workdir: str) -> str:
        """Returns the URL of a run's archive: beside the run directory, with the SHA-256 of the archive in its name."""
        return f"{workdir.rstrip('/')}.code-{hashlib.sha256(self.archive).hexdigest()}.tar"

    def upload(self, workdir: str) -> list[str]:
        """Returns the command that copies its standard input, the archive, to the URL where the hosts look for it."""
        return ["gcloud", "storage", "cp", "-", self.url(workdir)]

    def described(self, workdir: str) -> str:
        """Describes the code that is sent with the job, as a comment for a shell."""
        return (
            f"# The code in {self.directory}, {len(self.files)} file{'s' * (len(self.files) > 1)} of "
            f"{len(self.archive) / 2**20:.1f} MiB, goes to "
            f"{self.url(workdir)} when this is submitted."
        )

    def holds(self, path: str) -> bool:
        """True if a relative path names a file or directory of the archive."""
        name = posixpath.normpath(path)
        return name in self.files or name in self.links or any(one.startswith(f"{name}/") for one in self.files)

    def missing(self, path: str) -> str:
        """Explains why a relative path is not in the archive."""
        left_out = (self.directory / path).exists() and not posixpath.normpath(path).startswith("..")
        reason = (
            "which leaves it out (a .gitignore names it, its name is never sent, as .env, or it is the output of a run)"
            if left_out
            else "which has no such file"
        )
        return f"--code={self.directory}, {reason}: relative paths are looked for there, and nowhere else"


def read_code(directory: str | os.PathLike) -> Code:
    """Reads a directory of code, small data and configuration files.

    Leaves out files that a .gitignore in the directory names, files in `_NEVER`, 'runs' and run directories.

    Raises:
      ValueError: the directory does not exist, is empty, or holds more than CODE_BYTES or CODE_FILES. Or it holds a
        directory `podrl`; a symbolic link with an absolute path, out of the directory, to another link or to a file
        that is left out; or anything but files, directories and links.
    """
    root = pathlib.Path(directory).expanduser()
    if not root.is_dir():
        raise ValueError(f"--code={directory} must be a directory: its files go to every host.")
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    programs: set[str] = set()
    try:
        found = sorted(itertools.islice(_walk(root, "", []), CODE_FILES + 1))
        sizes = {name: (root / name).stat().st_size for name in found if not (root / name).is_symlink()}
        if sum(sizes.values()) > CODE_BYTES or len(found) > CODE_FILES:
            most = sorted(sizes, key=lambda name: -sizes[name])[:3]
            raise ValueError(
                f"--code={directory} has {'over ' * (len(found) > CODE_FILES)}{min(len(found), CODE_FILES)} files of "
                f"{sum(sizes.values()) / 2**20:.1f} MiB, the largest "
                f"{', '.join(f'{name} ({sizes[name] / 2**20:.1f} MiB)' for name in most)}; it may have {CODE_FILES} "
                f"files and {CODE_BYTES >> 20} MiB: name what is not code in a .gitignore, and copy data to the bucket."
            )
        for name in found:
            path = root / name
            if path.is_symlink():
                links[name] = os.readlink(path)
            else:
                files[name] = path.read_bytes()
                programs |= {name} if path.stat().st_mode & 0o100 else set()
    except OSError as error:
        raise ValueError(f"--code={directory} cannot be read: {error}.") from None
    code = Code(root, files, links, frozenset(programs))
    for name, target in links.items():
        inside = posixpath.join(posixpath.dirname(name), target)
        if os.path.isabs(target) or not code.holds(inside) or posixpath.normpath(inside) in links:
            raise ValueError(
                f"--code={directory}: {name} is a symbolic link to {target}, which is not the relative path of a "
                "file or directory that is sent with the job and is no link itself: copy the target into the "
                "directory, or leave the link out by a .gitignore."
            )
    if not files:
        raise ValueError(f"--code={directory} has no file to send: everything in it is left out, or it is empty.")
    if code.holds("podrl"):
        raise ValueError(
            f"--code={directory} has a podrl of its own, and hosts run the podrl of their image: name a directory of "
            "your code alone, and build the image from your podrl."
        )
    return code


def _walk(root: pathlib.Path, below: str, rules: Sequence["_Rule"]) -> Iterator[str]:
    """Yields paths of files and links below a directory that are not left out."""
    place = root / below
    rules = [*rules, *_rules(place / ".gitignore", below)]
    with os.scandir(place) as found:
        entries = list(found)
    for entry in entries:
        name = f"{below}{entry.name}"
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name in _NEVER or entry.name.endswith(".pyc") or (is_directory and name == _RUNS):
            continue
        if next((not rule.back for rule in reversed(rules) if rule.names(name, is_directory)), False):
            continue
        if is_directory:
            if not (root / name / _RUN_FILE).is_file():
                yield from _walk(root, f"{name}/", rules)
        elif entry.is_symlink() or entry.is_file():
            yield name
        else:
            raise ValueError(f"--code={root}: {name} is neither a file, a directory nor a link: leave it out.")


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A line of a .gitignore.

    Attributes:
      below: directory of the .gitignore, '' or ending in '/'.
      pattern: pattern that the path below that directory must match.
      directories: True if the line names directories only.
      back: True if the line includes files again that an earlier line left out ('!').
    """

    below: str
    pattern: re.Pattern[str]
    directories: bool
    back: bool

    def names(self, path: str, is_directory: bool) -> bool:
        return (is_directory or not self.directories) and self.pattern.fullmatch(path, len(self.below)) is not None


def _rules(file: pathlib.Path, below: str) -> Iterator[_Rule]:
    """Reads a .gitignore, if there is one."""
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        text = re.sub(r"(?<!\\)\s+$", "", line)
        if not text or text.startswith("#"):
            continue
        back, text = text.startswith("!"), text.removeprefix("!")
        directories, text = text.endswith("/"), text.rstrip("/")
        anywhere = "" if "/" in text else "(?:.*/)?"
        with contextlib.suppress(re.error):  # git ignores such a line, too
            yield _Rule(below, re.compile(anywhere + _expression(text.removeprefix("/"))), directories, back)


def _expression(pattern: str) -> str:
    """Translates a pattern of gitignore(5) to a regular expression."""
    parts = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    out = ""
    for piece in re.findall(r"\*\*/|/\*\*(?=$)|\*+|\?|\[!?\]?[^]]*\]|\\.|.", pattern, re.DOTALL):
        if piece in parts:
            out += parts[piece]
        elif piece.startswith("*"):
            out += "[^/]*"
        elif len(piece) > 1 and piece[0] == "[":
            out += "(?!/)[" + ("^" if piece[1] == "!" else "") + piece[1 + (piece[1] == "!") :].replace("\\", "\\\\")
        else:
            out += re.escape(piece.removeprefix("\\") if len(piece) > 1 else piece)
    return out


def sentence(text: str) -> str:
    """Writes another program's error without spaces around it, and with a full stop at its end."""
    text = text.strip() or "it printed no reason"
    return text if text.endswith((".", "?", "!")) else f"{text}."


def check_job(config: str, extra: Sequence[str], chips: Mapping[str, int], *, code: Code | None = None) -> None:
    """Refuses, before anything is submitted, settings that the hosts would refuse once they run.

    Args:
      config: value of podrl's --config; its settings are known only if the file and ml_collections are on this machine.
      extra: further podrl flags.
      chips: number of chips of each role ('trainer', 'rollout'), or of 'all' together; JAX devices count as chips.
      code: the user's code that is sent with the job, in which relative paths are looked up; None for none.

    Raises:
      ValueError: the model path is empty, a file or directory (code included) is only on this machine, or a mesh has
        another size than the machines.
    """
    _check_config(config, code)
    values = _values(config, code) | _settings_in(extra)
    if values.get("model.path") == "":
        raise ValueError("model.path is empty: name the model after --, as in --config.model.path=gs://BUCKET/MODEL.")
    for key, value in values.items():
        for local in _places(key, value, code):
            _check_place(key, value, local, code)
    sizes = {role: _devices(values.get(f"roles.{role}.mesh", "auto")) for role in ("trainer", "rollout")}
    if values.get("roles.eval.hosts"):
        sizes["rollout"] = 0  # some of the rollout's machines evaluate, so its mesh is smaller
    together = {"all": sum(sizes.values())} if all(sizes.values()) else {}
    if values.get("roles.colocated") in ("True", "true"):
        together = {"all": max(sizes.values())} if any(sizes.values()) else {}
    for role, need in (sizes | together).items():
        if need and role in chips and need != chips[role]:
            meshes = {name: values.get(f"roles.{name}.mesh") for name in sizes if role in (name, "all")}
            meshes_text = " and ".join(f"roles.{name}.mesh={mesh}" for name, mesh in meshes.items() if mesh)
            raise ValueError(
                f"{meshes_text} take {need} chips, and the machines asked for have {chips[role]} (a "
                "chip of tpu7x counts twice): change the meshes or the machines."
            )


_CHECK_S = 300  # longest wait for podrl's check of its flags
_CHECK = """
import sys
try:
    from podrl.launch import check_flags
    check_flags(["launch", *sys.argv[1:]])
except ModuleNotFoundError as error:
    print(f"{error} in {sys.executable}.")
    sys.exit(4)
except ValueError as error:
    if isinstance(error.__cause__, ImportError):  # the configuration imports a module that only the image has
        print(error)
        sys.exit(4)
    sys.exit(str(error))
"""


def check_flags(config: str, extra: Sequence[str], code: Code | None = None) -> None:
    """Refuses flags that podrl itself cannot parse. podrl parses them in a separate process, which starts no device.

    Only the hosts check the flags, and a line on standard error says so, if this machine lacks podrl, a module that
    podrl or the configuration needs, or a configuration of the image, or if podrl does not answer within _CHECK_S.

    Args:
      config: value of podrl's --config.
      extra: further podrl flags.
      code: the user's code that is sent with the job; None for none.

    Raises:
      ValueError: podrl refuses the configuration file or a flag.
    """
    file = config.partition(":")[0]
    if os.path.isabs(file) and not os.path.exists(file):
        sys.stderr.write(f"podrl's own flags are checked on the hosts only: {file} is not here.\n")
        return
    root = pathlib.Path(__file__).resolve().parents[(__package__ or "").count(".") + 1]
    folder = code.directory.resolve() if code else pathlib.Path.cwd()
    paths = [str(root), *([str(folder)] if code else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _CHECK, f"--config={config}", *extra]
    only = "podrl's own flags are checked on the hosts only: "
    why = f"podrl has not answered within {_CHECK_S} s."
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{only}{why}\n")
        return
    if done.returncode == 1 and "Traceback" not in done.stderr:
        raise ValueError(sentence(done.stderr.strip().rpartition("\n")[2]))
    if done.returncode:
        why = done.stdout if done.returncode == 4 else done.stderr[-500:]
        sys.stderr.write(f"{only}{why.strip()}\n")


def _settings_in(extra: Sequence[str]) -> dict[str, str]:
    """Reads the settings among podrl's flags, in each form that podrl accepts: with or without '--config.' and '='."""
    found: dict[str, str] = {}
    for flag, after in zip(extra, [*extra, ""][1:], strict=True):
        match = re.match(r"(?:-{1,2}config\.(\w+(?:\.\w+)*)|-{0,2}([a-z]\w*(?:\.\w+)+))(=?)", flag)
        if match and (match[3] or (flag.startswith("-") and match.end() == len(flag))):
            found[match[1] or match[2]] = flag[match.end() :] if match[3] else after
    return found


def _check_config(config: str, code: Code | None) -> None:
    """Refuses a configuration file that the hosts would not find."""
    name = config.partition(":")[0]
    file = pathlib.Path(name)
    if file.is_absolute():
        return
    if code is not None:
        if not (code.holds(name) or code.holds(f"configs/{name}") or (_CONFIGS / name).is_file()):
            raise ValueError(f"--config={config} is not a configuration of podrl, and not in {code.missing(name)}.")
    elif file.is_file() and not file.resolve().is_relative_to(_CONFIGS):
        raise ValueError(
            f"--config={config} is a file on this machine, which the hosts do not see: send it by --code=DIR, or use "
            "a configuration of podrl and set the rest after --, as in --config.KEY=VALUE."
        )


def _places(key: str, value: str, code: Code | None) -> list[str]:
    """Lists the relative paths in a setting; a name of the hub is not a path."""
    if key in _WORDS:
        return []
    if key in _MODELS or key in _DATA:
        return [value] if _is_place(value, model=key in _MODELS, code=code) else []
    named = []
    if key.endswith((".sources", ".sets", ".teachers")):
        with contextlib.suppress(ValueError, SyntaxError, TypeError):
            named = [str(one["path"]) for one in ast.literal_eval(value) if "path" in one]
    model = key.endswith(".teachers")
    return list(
        dict.fromkeys([*(path for path in named if _is_place(path, model=model, code=code)), *_FILE.findall(value)])
    )


def _is_place(value: str, *, model: bool, code: Code | None) -> bool:
    """True if a value is a relative path, and not a name of the hub, of a task or of a shipped model."""
    if not value or value in _SHIPPED or "://" in value or value.startswith(("/", "hf:", "tfds:", "reasoning_gym:")):
        return False
    here = (code.holds if code else os.path.exists)(value)
    if model and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?", value):
        return here or (code is None and os.path.exists(value.partition("/")[0]))
    return here or re.search(r"[./]", value) is not None


def _check_place(key: str, value: str, local: str, code: Code | None) -> None:
    shown = f"--config.{key}={value}" if local == value else f"--config.{key}={value} names {local}, which"
    if code is None:
        raise ValueError(
            f"{shown} is a path on this machine, which the hosts do not see: send code, configurations and small files "
            f"by --code=DIR, copy data and models to the bucket and set --config.{key}=gs://BUCKET/..., or give an "
            "absolute path on the hosts' own disks."
        )
    if not code.holds(local):
        raise ValueError(f"{shown} is not in {code.missing(local)}.")


def _values(config: str, code: Code | None) -> dict[str, str]:
    """Reads the settings of a configuration file as texts; {} if the file, or one of its imports, is missing here."""
    name, _, variant = config.partition(":")
    folder = code.directory if code else pathlib.Path()
    path = next((p for p in (folder / name, folder / "configs" / name, _CONFIGS / name) if p.is_file()), None)
    own = [str(code.directory.resolve())] if code else []
    sys.path[:0] = own  # so that the file finds its modules, as on the hosts
    try:
        found = runpy.run_path(str(path))["get_config"](*([variant] if variant else [])) if path else {}
    except ImportError:
        return {}
    finally:
        del sys.path[: len(own)]
    return dict(_flat(found, ""))


def _flat(section: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    """Yields (key, value as text) of every setting in a section and its subsections; keys begin with `before`."""
    for key, value in section.items():
        if hasattr(value, "items"):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def _devices(mesh: str) -> int:
    """Multiplies the sizes of a mesh such as 'fsdp=4,tensor=2'; 0 if a size is missing or -1."""
    sizes = [part.partition("=")[2] for part in mesh.split(",")]
    return math.prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 0


def main(argv: Sequence[str]) -> int:
    """Checks podrl's flags for tpu_vm.sh, writes the archive of --code and prints its URL; returns 3 for a refusal."""
    own, extra = list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in own)
    podrl_flags = dict(flag.removeprefix("--").split("=", 1) for flag in extra if re.match(r"--\w+=", flag))
    try:
        code = read_code(flags["code"]) if "code" in flags else None
        config = podrl_flags.get("config", "")
        check_job(config, extra, {}, code=code)
        check_flags(config, [flag for flag in extra if not flag.startswith("--config=")], code)
        if code is not None:
            if not podrl_flags.get("workdir", "").startswith("gs://"):
                raise ValueError(
                    f"--code={flags['code']} goes to the bucket of the run, and "
                    f"--workdir={podrl_flags.get('workdir', '')} is in no bucket: give "
                    "--workdir=gs://BUCKET/RUN after --."
                )
            pathlib.Path(flags["archive"]).write_bytes(code.archive)
            print(code.url(podrl_flags["workdir"]))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
