"""Names and loads Python objects of users: functions, classes and their files, with the texts of their errors."""

import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
from types import ModuleType
from typing import Any

from podrl.mappings import JsonObject

_MOST_SHOWN = 200
_LONGEST = 2000  # largest number of characters in a line of an error


class LoadError(ValueError):
    """An object of a user cannot be loaded; the message is complete without a traceback."""


def spec_at(place: str, name: str) -> dict[str, str]:
    """Returns the spec of an object, by which `load` finds it.

    Args:
      place: a path 'file.py' or a module 'package.module'.
      name: name of the object, dotted inside the module.

    Raises:
      LoadError: the file does not exist.
    """
    if not place.endswith(".py"):
        return {"module": place, "name": name}
    path = pathlib.Path(place).expanduser()
    if not path.is_file():
        raise LoadError(f"the file {path.absolute()} does not exist.")
    return {"file": str(path.resolve()), "name": name}


def spec_of(fn: object) -> dict[str, str] | None:
    """Returns the spec by which a worker loads an object; None if the object cannot be found by name in a file."""
    name, module = getattr(fn, "__qualname__", ""), sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not name or module is None or not file or not pathlib.Path(file).is_file():
        return None
    found: object = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    if isinstance(found, staticmethod):
        found = found.__func__
    if found is not fn:
        return None
    # A script, or a file that `load` ran, cannot be imported by name, unless `python -m` gave the script a name.
    spec = getattr(module, "__spec__", None)
    if module.__name__ != "__main__" and not module.__name__.startswith(_PREFIX):
        return {"module": module.__name__, "name": name}
    if module.__name__ == "__main__" and spec is not None:
        return {"module": spec.name, "name": name}
    return {"file": str(pathlib.Path(file).resolve()), "name": name}


def name_of(fn: object) -> str | None:
    """Returns 'file.py:name' or 'package.module:name' of an object; None if a worker cannot load it.

    A text is returned unchanged.
    """
    if isinstance(fn, str):
        return fn
    spec = spec_of(fn)
    return None if spec is None else f"{spec.get('file') or spec['module']}:{spec['name']}"


def load(spec: JsonObject) -> Any:
    """Loads the object that a spec names, by 'file' or 'module' and by 'name' (dotted inside the module).

    Raises:
      LoadError: the module has no such object; the error lists its functions and classes, and names the closest one.
      Exception: the module cannot be imported, or the file raised an error.
    """
    module = _run_file(spec["file"]) if "file" in spec else importlib.import_module(spec["module"])
    found: object = module
    for part in spec["name"].split("."):
        if not hasattr(found, part):
            own = [name for name, value in getattr(found, "__dict__", {}).items() if _is_own(value, module.__name__)]
            by_lower = {name.lower(): name for name in own}
            close = difflib.get_close_matches(part.lower(), by_lower, n=1)
            hint = f" Did you mean {by_lower[close[0]]!r}?" if close else ""
            place = spec.get("file") or spec["module"]
            raise LoadError(
                f"{place} has no function or class {spec['name']!r}; it has {', '.join(own) or 'none'}.{hint}"
            )
        found = getattr(found, part)
    return found


def _is_own(value: object, module: str) -> bool:
    """Returns True for a function or class that the module defines itself."""
    return callable(value) and getattr(value, "__module__", "") == module


def load_function(spec: JsonObject) -> Any:
    """Loads a function, or another object that can be called, with `load`.

    Raises:
      LoadError: the module has no such object, or the object cannot be called.
    """
    found = load(spec)
    if not callable(found):
        raise LoadError(f"{spec['name']!r} is {type(found).__name__} {short(found)}, not a function.")
    return found


def extend_path(path: list[str]) -> None:
    """Adds the entries of the parent's import path, so that this process can import the same modules."""
    sys.path.extend(one for one in path if one not in sys.path)


def explain(error: BaseException) -> str:
    """Returns an error's traceback without podrl's own frame: its last 12 lines, each cut to 2,000 characters.

    A LoadError gives its message alone.
    """
    if isinstance(error, LoadError):
        return str(error)
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    lines = "".join(traceback.format_exception(type(error), error, inner)).rstrip().splitlines()
    return "\n".join(map(_cut, lines[-12:]))


def in_one_line(explained: str) -> str:
    """Returns the last line of a text of `explain`, with the line in the file that raised the error."""
    places = re.findall(r'File "([^<].*)", line (\d+)', explained)
    return explained.strip().splitlines()[-1] + "".join(f" ({file}, line {line})" for file, line in places[-1:])


def explain_load(error: BaseException, file: str = "") -> str:
    """Describes an error of loading in one line, with the number of the line in the user's file that raised it."""
    if isinstance(error, LoadError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({file}, line {lines[-1]})" if lines else ""  # a SyntaxError's own text has the line
    return one_line(error, place)


def one_line(error: BaseException, place: str = "") -> str:
    """Returns an error's type and message in one line, cut to 2,000 characters and followed by `place`."""
    text = _cut(str(error))
    return " ".join(f"{type(error).__name__}{': ' * bool(text)}{text}{place}".split())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... [{len(text) - _LONGEST} characters left out]"


def short(value: object) -> str:
    """Returns the repr of a value, cut to 200 characters; never raises, whatever the value's `__repr__` does."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything, and the report must not fail
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_PREFIX = "podrl_user_"


def _run_file(path: str) -> ModuleType:
    """Runs a file once per process as a module with a name of its own, never as `__main__`; returns the module."""
    name = f"{_PREFIX}{pathlib.Path(path).stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(path))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
