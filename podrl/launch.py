"""The command: reads flags and configuration, prepares the environment before jax is imported, sets the exit code.

    python -m podrl.launch --config=grpo_gemma.py [--workdir=DIR] [--dry_run] [--config.group.key=value ...]

A config is looked up as given, then in configs/. Exit codes: 0 done, 1 user error, 42 infrastructure (restart me),
75 preempted after saving (the same command resumes).
"""

import importlib.util
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from podrl.config import nearest
from podrl.runtime import detect, environment
from podrl.runtime.watchdog import EXIT_DONE, EXIT_USER

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run writes; an existing run there is resumed. Default: runs/<name of the config>."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print configuration, roles and batch arithmetic; start nothing.")
_DEBUG = flags.DEFINE_bool("debug", False, "Print the whole traceback of user errors too.")


def find_config(name: str, cwd: pathlib.Path | None = None) -> str:
    """Path of a configuration named on the command line: as given, else in ./configs, else in the installed configs/.

    Args:
      name: 'file.py' or 'file.py:variant'.

    Raises:
      ValueError: no such file; names the nearest one there is.
    """
    path, colon, variant = name.partition(":")
    here = pathlib.Path.cwd() if cwd is None else cwd
    shipped = pathlib.Path(__file__).resolve().parent.parent / "configs"
    candidates = [here / path, here / "configs" / path, shipped / path]
    for candidate in candidates:
        if candidate.is_file():
            return f"{candidate}{colon}{variant}"
    known = {p.name for d in (here / "configs", shipped) if d.is_dir() for p in d.glob("*.py")} - {"__init__.py"}
    raise ValueError(f"--config={name}: no such file, neither here nor in configs/.{nearest(path, known)}")


def load_config(path: str) -> ConfigDict:
    """Runs get_config of a configuration file named 'file.py' or 'file.py:variant'."""
    file, colon, variant = path.partition(":")
    spec = importlib.util.spec_from_file_location("podrl_config_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config={file} defines no get_config(): a configuration is a file with that function.")
    return module.get_config(variant) if colon else module.get_config()


def take_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(value of --config, the other arguments).

    Raises:
      ValueError: --config is missing.
    """
    rest, config = [], None
    waiting = False
    for arg in argv:
        if waiting or arg.startswith("--config="):
            config, waiting = arg.removeprefix("--config="), False
        elif arg == "--config":
            waiting = True
        else:
            rest.append(arg)
    if config is None:
        raise ValueError("--config is missing: name a configuration, for example --config=grpo_gemma.py.")
    return config, rest


def _early(argv: Sequence[str], key: str, default: Any, prefix: str = "--config.") -> Any:
    """The value the command line gives to a key that is needed before all flags can be read."""
    given = [arg.partition("=")[2] for arg in argv if arg.startswith(f"{prefix}{key}=")]
    try:
        return type(default)(given[-1]) if given else default
    except ValueError:
        raise ValueError(f"{prefix}{key}={given[-1]} must be {type(default).__name__}, such as {default!r}.") from None


def _check_overrides(argv: Sequence[str], config: ConfigDict) -> None:
    """Refuses overrides of keys that do not exist, naming the nearest one of the same group."""
    for arg in argv:
        if not arg.startswith("--config."):
            continue
        path = arg.removeprefix("--config.").partition("=")[0]
        group: Any = config
        for i, key in enumerate(path.split(".")):
            if not isinstance(group, ConfigDict) or key not in group:
                known = list(group) if isinstance(group, ConfigDict) else []
                where = ".".join(["config", *path.split(".")[:i]])
                raise ValueError(f"{where} has no key {key!r}.{nearest(key, known)}")
            group = group.get_ref(key).get() if group.get(key) is None else group[key]


def _check_cluster(argv: Sequence[str]) -> None:
    """Refuses what this version cannot run on: several processes, Pathways, remote run directories."""
    cluster = detect.detect(os.environ, metadata=detect.tpu_vm_metadata(os.environ))
    detect.check_pathways(cluster)
    if cluster.process_count > 1 or cluster.topology in ("split", "pathways"):
        raise ValueError(
            f"This environment is a {cluster.kind} cluster of {cluster.process_count} processes (topology "
            f"{cluster.topology}): training over several processes is not supported yet. Run on one host, and unset "
            "the cluster's variables if they are left over."
        )
    for name in cluster.unset:
        os.environ.pop(name, None)
    workdir = _early(argv, "workdir", "", prefix="--")
    if "://" in workdir:
        raise ValueError(
            f"--workdir={workdir} is remote storage, which runs cannot be written to yet: use a local directory."
        )


def _run(argv: Sequence[str]) -> int:
    if {"--help", "--helpfull", "-h"} & set(argv):
        print(__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return EXIT_DONE
    name, rest = take_config(argv)
    path = find_config(name)
    config = load_config(path)
    _check_cluster(rest)
    environment.prepare(os.environ, fake_devices=_early(rest, "fake_devices", config.get("fake_devices", 0)))
    from podrl.learner import job  # after the environment is prepared: this imports jax

    config.algorithm = _early(rest, "algorithm", config.get("algorithm", "grpo"))
    complete = ConfigDict(job.complete(config.to_dict()))
    _check_overrides(rest, complete)
    holder = config_flags.DEFINE_config_dict("config", complete, sys_argv=rest)
    try:
        extra = flags.FLAGS(rest)[1:]
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(error).strip(chr(34))} (see python -m podrl.launch --help)") from error
    if extra:
        raise ValueError(f"Arguments {extra} are not flags: every option starts with --, lists are quoted.")
    file, _, variant = path.partition(":")
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{pathlib.Path(file).stem}{'_' if variant else ''}{variant}")
    values = holder.value.to_dict()
    if not _DEBUG.value:  # Orbax logs tracebacks of failures that podrl.runtime.checkpoint reports in one line
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    if _DRY_RUN.value:
        return job.dry_run(values, workdir)
    return job.run(values, workdir, command=" ".join(["python -m podrl.launch", *argv[1:]]))


def main() -> None:
    """Runs the command and leaves hard with its exit code, so that no background thread can hold the process."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    code = EXIT_USER
    try:
        code = _run(sys.argv)
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and error.name is not None:  # a bug; ours name the extra to install
            traceback.print_exc()
        if "--debug" in sys.argv:
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"podrl: error: {error}{notes}", file=sys.stderr)
    except KeyboardInterrupt:
        print("podrl: interrupted; the same command resumes from the newest checkpoint, if any.", file=sys.stderr)
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_USER
    except BaseException:  # noqa: BLE001 - the last frame: print once and leave
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
