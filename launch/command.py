"""The podrl command line, exit codes and environment that every launcher submits."""

import itertools
import math
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# podrl's own: 42 infrastructure failed (restart me), 75 preempted after saving (restart me).
RESTART_CODES = (42, 75)
# Deaths by signal that say nothing about the program: 134 abort (jax does this when a peer vanishes), 137 killed,
# 139 segmentation fault in the runtime, 143 terminated before podrl could save.
SIGNAL_CODES = (134, 137, 139, 143)

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Named as variables are that hold something to keep: HF_TOKEN, WANDB_API_KEY.
_SECRET = re.compile(r"(^|_)(SECRETS?|TOKENS?|PASS(WD|WORD|PHRASE)?|CREDENTIALS?|(API)?KEYS?|AUTH)(_|$)", re.IGNORECASE)


_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
# A relative path of a file, anywhere in a value: not the end of a longer path, nor of a URL.
_FILE = re.compile(r"(?<![\w./:-])(?:\.{1,2}/)*\w[\w./-]*\.(?:py|jsonl?|csv|parquet|array_record|jinja|txt|ya?ml)\b")


def podrl_command(config: str, workdir: str, extra: Sequence[str]) -> list[str]:
    """Builds the command of one process.

    Args:
      config: value of podrl's --config.
      workdir: value of --workdir; pods share no disk, so it must be a URL such as gs://bucket/run.
      extra: further podrl flags, as given after `--`.

    Raises:
      ValueError: a workdir on a pod's own disk, or a flag given twice.
    """
    if "://" not in workdir:
        raise ValueError(f"--workdir={workdir} is a path inside a pod and dies with it: use gs://BUCKET/RUN.")
    for flag in extra:
        if flag.split("=")[0] in ("--config", "--workdir"):
            raise ValueError(f"{flag} stands after --: give {flag.split('=')[0]} before it, once.")
    return ["python", "-m", "podrl.launch", f"--config={config}", f"--workdir={workdir}", *extra]


def check_job(config: str, extra: Sequence[str], chips: Mapping[str, int], *, copied: bool = False) -> None:
    """Refuses, before anything is submitted, what the pods would refuse once they run.

    Args:
      config: value of podrl's --config; what it sets is known where the file and ml_collections are here.
      extra: further podrl flags.
      chips: of each role ('trainer', 'rollout'), or of 'all' together; devices count as chips.
      copied: relative paths may be there, on the disk of a host that is kept.

    Raises:
      ValueError: an empty model path, a file or directory that only this machine has, code included, or a mesh of other
        size.
    """
    given = dict(flag[len("--config.") :].split("=", 1) for flag in extra if re.match(r"--config\.[\w.]+=", flag))
    values = _values(config) | given
    if values.get("model.path") == "":
        raise ValueError("model.path is empty: say which model after --, as --config.model.path=gs://BUCKET/MODEL.")
    if not copied:
        _check_places(config, values)
    sizes = {role: _devices(values.get(f"roles.{role}.mesh", "auto")) for role in ("trainer", "rollout")}
    if values.get("roles.eval.hosts"):
        sizes["rollout"] = 0  # some of its machines evaluate
    together = {"all": sum(sizes.values())} if all(sizes.values()) else {}
    if values.get("roles.colocated") in ("True", "true"):
        together = {"all": max(sizes.values())} if any(sizes.values()) else {}
    for role, need in (sizes | together).items():
        if need and role in chips and need != chips[role]:
            meshes = {name: values.get(f"roles.{name}.mesh") for name in sizes if role in (name, "all")}
            said = " and ".join(f"roles.{name}.mesh={mesh}" for name, mesh in meshes.items())
            raise ValueError(
                f"{said} take {need} chips, and the machines asked for have {chips[role]}: change one of them."
            )


def _check_places(config: str, values: Mapping[str, str]) -> None:
    """Refuses files and directories of this machine: a relative path is one, a name of the hub is none.

    Raises:
      ValueError: a setting, or the configuration file, that pods would look for in vain.
    """
    file = pathlib.Path(config.partition(":")[0])
    if file.is_file() and not file.is_absolute() and not file.resolve().is_relative_to(_CONFIGS):
        raise ValueError(
            f"--config={config} is a file on this machine, which pods do not see: build the image with it in configs/, "
            "or take a configuration of podrl and say the rest after --, as --config.KEY=VALUE."
        )
    for key, value in values.items():
        local = _FILE.search(value)
        if key in ("model.path", "model.reference", "model.critic", "reward.model", "data.path", "data.eval_path"):
            own = "://" in value or value.startswith(("/", "hf:", "tfds:")) or not re.search(r"[./]", value)
            local = None if own or (not key.startswith("data.") and _of_hub(value)) else re.match(".*", value)
        if local:
            shown = f"{key}={value}" if local[0] == value else f"{key}={value} names {local[0]}, which"
            raise ValueError(
                f"--config.{shown} is a path on this machine, which pods do not see: copy data and models to the "
                f"bucket and say --config.{key}=gs://BUCKET/...; code has to be in the image: give "
                "its path there, from / on."
            )


def _of_hub(value: str) -> bool:
    """True for ORG/NAME of the Hugging Face hub, where no such directory is here."""
    here = pathlib.Path(value.partition("/")[0])
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?", value) is not None and not here.exists()


def main(argv: Sequence[str]) -> int:
    """Checks podrl's own flags for tpu_vm.sh; returns 3 where the job would be refused, and says why."""
    config = next((flag.partition("=")[2] for flag in argv if flag.startswith("--config=")), "")
    try:
        check_job(config, argv, {}, copied=True)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


def _values(config: str) -> dict[str, str]:
    """Reads the texts that a configuration file sets; {} where it, or what it imports, is not here."""
    name, _, variant = config.partition(":")
    path = next((p for p in (pathlib.Path(name), pathlib.Path("configs") / name, _CONFIGS / name) if p.is_file()), None)
    try:
        found = runpy.run_path(str(path))["get_config"](*([variant] if variant else [])) if path else {}
    except ImportError:
        return {}
    return dict(_flat(found, ""))


def _flat(section: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    """Every setting of a section and of those in it, its value as text, its name with `before` before it."""
    for key, value in section.items():
        if hasattr(value, "items"):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def _devices(mesh: str) -> int:
    """Multiplies the sizes of a mesh such as 'fsdp=4,tensor=2'; 0 where it leaves one open."""
    sizes = [part.partition("=")[2] for part in mesh.split(",")]
    return math.prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 0


def job_name(name: str, limit: int, flag: str = "--name") -> str:
    """Returns `name` if Kubernetes accepts it as the start of pod and host names.

    Args:
      name: the name asked for.
      limit: characters left once Kubernetes has appended role, slice and host.
      flag: that gave it.

    Raises:
      ValueError: not a DNS label of at most `limit` characters.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > limit:
        raise ValueError(
            f"{flag}={name} must be lower-case letters, digits and '-', start with a letter, end with a letter or "
            f"digit and have at most {limit} characters; this one has {len(name)}."
        )
    return name


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """Returns podrl's environment in a pod, with the user's NAME=VALUE pairs over it.

    Raises:
      ValueError: a pair without '=', a bad name, the job's secret, or a value xpk's template would break on.
    """
    values = dict(ENVIRONMENT)
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if name == "PODRL_SECRET":
            raise ValueError(
                "--env=PODRL_SECRET=... would show the job's secret to everyone who lists processes: leave it out, "
                "every submission is given a new one. PODRL_SECRET_FILE may name a file of your own."
            )
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"--env={pair} must be NAME=VALUE.")
        if re.search(r'["\\\n]', value):
            raise ValueError(
                f"--env={name}=... holds a quote, backslash or newline: put such a value into a file instead."
            )
        values[name] = value
    return values


def is_secret(name: str) -> bool:
    """True if an environment variable, by its name, should not be printed."""
    return name != "PODRL_SECRET_FILE" and _SECRET.search(name) is not None


def redacted(word: str) -> str:
    """Hides the values of variables with secret-sounding names in a flag, for printing."""
    given = re.match(r"--env=(\w+)=", word)
    return f"{given[0]}REDACTED" if given and is_secret(given[1]) else word


def show(command: Sequence[str]) -> str:
    """Formats a command as a shell reads it, secrets hidden: its name and verbs, then one flag to a line."""
    command = [redacted(word) for word in command]
    verbs = list(itertools.takewhile(lambda word: not word.startswith("-"), command))
    return " \\\n  ".join([shlex.join(verbs), *map(shlex.quote, command[len(verbs) :])])


def split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at the first `--` into our own and podrl's."""
    argv = list(argv)
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def run(command: Sequence[str], *, stdin: str | None = None, missing: Mapping[str, str]) -> int:
    """Runs a client program and returns its exit code.

    Args:
      command: program and arguments.
      stdin: text for its standard input.
      missing: program name to the sentence that says how to install it.
    """
    try:
        return subprocess.run(command, input=stdin, text=True, check=False).returncode
    except FileNotFoundError:
        sys.stderr.write(f"{command[0]} is not on PATH: {missing[command[0]]}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
