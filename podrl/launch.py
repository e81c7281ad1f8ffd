"""The command: reads flags and configuration, prepares the environment before jax is imported, sets the exit code.

    python -m podrl.launch --config=grpo_gemma.py [--workdir=DIR] [--dry_run] [--config.group.key=value ...]

A config is looked up as given, then in configs/. Exit codes: 0 done, 1 user error, 42 infrastructure (restart me),
75 preempted after saving (the same command resumes).
"""

import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence

from absl import app, flags
from ml_collections import config_flags

from podrl.config import nearest
from podrl.runtime import environment
from podrl.runtime.watchdog import EXIT_USER

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Configuration file, as given or in configs/; file.py:variant."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run writes; an existing run there is resumed. Default: runs/<config>."
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


def resolve_arguments(argv: Sequence[str]) -> list[str]:
    """The command line with --config made a path that exists."""
    resolved, argv = [], list(argv)
    while argv:
        arg = argv.pop(0)
        if arg in ("--config", "-config") and argv:
            arg = f"--config={argv.pop(0)}"
        key, equals, value = arg.partition("=")
        if key in ("--config", "-config") and equals:
            arg = f"--config={find_config(value)}"
        resolved.append(arg)
    if not any(a.startswith("--config=") for a in resolved) and not {"--help", "--helpfull", "-h"} & set(resolved):
        raise ValueError("--config is missing: name a configuration, for example --config=grpo_gemma.py.")
    return resolved


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(resolve_arguments(argv))
    except (AttributeError, KeyError, TypeError) as error:
        # ml_collections' errors for an override that names no key, or has the wrong type.
        raise ValueError(f"A --config override is wrong: {str(error).strip(chr(34))}") from error


def _main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f"Arguments {list(argv[1:])} are not flags: every option starts with --, lists are quoted.")
    config = _CONFIG.value
    environment.prepare(os.environ, fake_devices=config.get("fake_devices", 0))
    from podrl.learner import job  # after the environment is prepared: this imports jax

    name = pathlib.Path(flags.FLAGS["config"].config_filename.partition(":")[0]).stem
    workdir = pathlib.Path(_WORKDIR.value or pathlib.Path("runs") / name)
    values = config.to_dict()
    if _DRY_RUN.value:
        return job.dry_run(values, workdir)
    return job.run(values, workdir, command=" ".join(["python -m podrl.launch", *sys.argv[1:]]))


def main() -> None:
    """Runs the command and leaves hard with its exit code, so that no background thread can hold the process."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    code = EXIT_USER
    try:
        code = _main(_parse(sys.argv))
    except (ValueError, FileNotFoundError) as error:
        if _DEBUG.present and _DEBUG.value:
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"podrl: error: {error}{notes}", file=sys.stderr)
    except KeyboardInterrupt:
        print("podrl: interrupted before there was anything to save.", file=sys.stderr)
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
