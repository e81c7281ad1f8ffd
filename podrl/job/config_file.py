"""Configuration files: finds the file that a user names, runs it, and chooses its run directory.

Nothing here imports jax, because jax's environment depends on the file.
"""

import importlib.util
import inspect
import pathlib
import traceback

from ml_collections import ConfigDict

from podrl.config import near, nearest


def find_config(name: str, cwd: pathlib.Path | None = None) -> str:
    """Finds a configuration file: at the path that the user names, else in ./configs, else among podrl's own.

    Args:
      name: 'file.py' or 'file.py:variant'.
      cwd: directory in which to look; None for the current directory.

    Raises:
      ValueError: there is no such file; the message names the nearest one.
    """
    path, colon, variant = name.partition(":")
    here = pathlib.Path.cwd() if cwd is None else cwd
    package = pathlib.Path(__file__).resolve().parent.parent
    installed = package / "configs"  # in a checkout these files lie beside the package
    shipped = installed if installed.is_dir() else package.parent / "configs"
    candidates = [here / path, here / "configs" / path, shipped / path]
    for candidate in candidates:
        if candidate.is_file():
            return f"{candidate}{colon}{variant}"
    known = {p.name for d in (here / "configs", shipped) if d.is_dir() for p in d.glob("*.py")} - {"__init__.py"}
    raise ValueError(f"--config={name}: no such file, neither here nor in configs/.{nearest(path, known)}")


def load_config(path: str) -> ConfigDict:
    """Runs get_config of a configuration file named 'file.py' or 'file.py:variant'.

    Raises:
      ValueError: the file does not run, or get_config returns no ConfigDict; the message names file and line.
    """
    file, colon, variant = path.partition(":")
    if not file.endswith(".py"):
        raise ValueError(f"--config={file} must be a Python file, NAME.py, that defines get_config().")
    variants: tuple[str, ...] = ()
    try:
        spec = importlib.util.spec_from_file_location("podrl_config_file", file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        variants = getattr(module, "VARIANTS", ())
        if not callable(getattr(module, "get_config", None)):
            raise ValueError(f"--config={file} defines no get_config(): a configuration is a file with that function.")
        if colon and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"--config={file} has no variant {variant!r}: its get_config() takes no argument.")
        config = module.get_config(variant) if colon else module.get_config()
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.filename else "the file"
        raise ValueError(f"--config={file}: {place}: {error.msg}.") from error
    except (Exception, SystemExit) as error:  # the file is code, and may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"--config={file}{f', line {lines[-1]}' if lines else ''}"
        if isinstance(error, ValueError):  # the configuration refuses something, in its own words
            hint = near(variant, variants) if f"no variant {variant!r}" in str(error) else ""
            raise ValueError(f"{str(error).removesuffix('.')} ({where}).{hint}" if lines else str(error)) from error
        raise ValueError(f"{where}: {type(error).__name__}: {error}.") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"--config={file}: get_config() returned {'None' if config is None else f'a {type(config).__name__}'}, but "
            "must return an ml_collections.ConfigDict."
        )
    return config


def default_workdir(path: str) -> str:
    """Returns the run directory of a configuration 'file.py' or 'file.py:variant' if the user names no directory."""
    file, _, variant = path.partition(":")
    return f"runs/{pathlib.Path(file).stem}{'_' if variant else ''}{variant}"
