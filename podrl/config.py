"""Turns configuration mappings into frozen dataclasses, refusing by name whatever they do not know."""

import dataclasses
import difflib
import fnmatch
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ml_collections import config_dict

T = TypeVar("T")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """' Did you mean X?' for the known name closest to `name`, or the list of known names."""
    known = sorted(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(known)}."


def refuses(advice: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Class decorator: keyword arguments matching a pattern of `advice` raise with podrl's way to do the same.

    Other unknown keywords raise with the nearest field name. Positional arguments are untouched.

    Args:
      advice: shell-style patterns of field names (of other systems) to a sentence saying what to use instead.
    """

    def decorate(cls: type[T]) -> type[T]:
        original = cls.__init__
        names = [f.name for f in dataclasses.fields(cls) if f.init]  # pyright: ignore[reportArgumentType]

        @functools.wraps(original)
        def init(self, *args: Any, **kwargs: Any) -> None:
            for key in kwargs:
                if key not in names:
                    raise ValueError(refusal(cls, key, names))
            original(self, *args, **kwargs)

        cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
        cls.__refused__ = dict(advice)  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def refusal(cls: type, key: str, names: typing.Iterable[str], prefix: str = "") -> str:
    """The sentence that refuses `key` as a field of `cls`."""
    for pattern, advice in getattr(cls, "__refused__", {}).items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"{cls.__name__} has no field {prefix}{key}: {advice}"
    return f"{cls.__name__} has no field {prefix}{key}.{nearest(key, names)}"


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "config") -> T:
    """Makes the frozen dataclass `cls` from a mapping, recursing into dataclass fields.

    Args:
      cls: a dataclass.
      values: field values; lists become tuples, mappings become the dataclass the field is annotated with.
      prefix: dotted path of `values` in the user's config, for messages.

    Raises:
      ValueError: an unknown key (with the nearest known one), a missing required key, or a value of the wrong type.
    """
    assert dataclasses.is_dataclass(cls), cls
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ValueError(refusal(cls, key, fields, prefix=f"{prefix}."))
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{prefix} lacks {', '.join(missing)}: set --{prefix}.{missing[0]}=...")
    converted = {key: _convert(values[key], hints[key], f"{prefix}.{key}") for key in values}
    try:
        return cls(**converted)
    except ValueError as error:
        error.add_note(f"while reading {prefix}")
        raise


def defaults(cls: type) -> dict[str, Any]:
    """Default values of a dataclass as nested plain mappings; fields without a default are left out.

    A field whose default is None becomes an empty reference of its type, so that command-line overrides are converted.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    value: Any
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[field.name]):
                values[field.name] = defaults(hints[field.name])
            continue
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # pyright: ignore[reportCallIssue]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[field.name] = defaults(type(value)) | {
                k: v for k, v in dataclasses.asdict(value).items() if v is not None
            }
        elif value is None:
            simple = [t for t in typing.get_args(hints[field.name]) if t in (int, float, str, bool)]
            values[field.name] = config_dict.placeholder(simple[0]) if simple else None
        else:
            values[field.name] = value
    return values


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` on top, group by group."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _convert(value: Any, hint: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None:
        if type(None) in options or hint is Any:
            return None
        raise ValueError(f"--{path} is None but must be {_names(options)}.")
    if Any in options:
        return value
    for option in options:
        done, result = _try(value, option, path)
        if done:
            return result
    raise ValueError(f"--{path}={value!r} is {type(value).__name__} but must be {_names(options)}.")


def _try(value: Any, option: Any, path: str) -> tuple[bool, Any]:
    origin = typing.get_origin(option) or option
    if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
        return True, build(typing.cast(type, option), value, path)
    if origin is tuple and isinstance(value, list | tuple):
        args = typing.get_args(option)
        if len(args) == 2 and args[1] is Ellipsis:
            return True, tuple(_convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
        return True, tuple(value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    if origin is typing.Literal:
        return value in typing.get_args(option), value
    if isinstance(origin, type) and isinstance(value, origin) and not (isinstance(value, bool) and origin is int):
        return True, value
    if callable(value) and "Callable" in str(option):
        return True, value
    return False, None


def _names(options: typing.Iterable[Any]) -> str:
    return " or ".join("None" if o is type(None) else getattr(o, "__name__", str(o)) for o in options)
