"""The process that runs Python tools: `python -m podrl.environments.tool_worker`, started by `toolbox.py`.

Apart from podrl, the process imports only the standard library and the modules that its tools import. podrl's modules
import no jax here.
"""

import asyncio
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from podrl.environments.protocol import Task
from podrl.mappings import JsonObject, ToolDeclaration
from podrl.workers import child

MOST_CHARACTERS = 1 << 20
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", dict: "object"}
_KINDS |= dict.fromkeys((list, tuple, set, frozenset, Sequence, Iterable), "array")


def plain(value: object) -> str:
    """Converts a result to text without lone surrogates; cuts the middle out of a text beyond `MOST_CHARACTERS`."""
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
    elif isinstance(value, str):
        text = value
    else:
        text = "" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    text = text.encode(errors="replace").decode()  # UTF-8 cannot encode lone surrogates
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]} ... [{len(text) - 2 * half} characters left out] ... {text[-half:]}"
    return text


def declaration(fn: Callable[..., object], name: str) -> ToolDeclaration:
    """Declares a function as a tool for chat templates.

    Args:
      fn: function to declare.
      name: name of the tool.

    Returns:
      'name', 'description' (the docstring), 'schema' (JSON schema of the parameters) and 'task' (name of the parameter
      that receives the calling sample; '' for none). The schema leaves this parameter out.
    """
    hints, described = _hints(fn), _described(inspect.getdoc(fn) or "")
    properties, required, task = {}, [], ""
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if _is_task(hints.get(parameter.name)):
            task = parameter.name
            continue
        about = {"description": described[parameter.name]} if parameter.name in described else {}
        properties[parameter.name] = about | _schema(hints.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": inspect.getdoc(fn) or "", "schema": schema, "task": task}


def call(fn: Callable[..., object], arguments: JsonObject, task: JsonObject) -> dict[str, str]:
    """Calls a function with the arguments of a model.

    Args:
      fn: the function, which may be a coroutine function.
      arguments: arguments by name, JSON values.
      task: fields of the sample that calls, for a parameter that is annotated as a Task; empty if no parameter is.

    Returns:
      'text' (the answer, or the first line of an error) and 'failed': '', 'arguments' if the function does not take the
      arguments, or 'exception' if it raised an error.
    """
    hints = _hints(fn)
    own = {name: Task(**task) for name, hint in hints.items() if task and _is_task(hint)}
    try:
        if taken := [name for name in own if name in arguments]:
            raise TypeError(f"got an unexpected keyword argument {taken[0]!r}")
        converted = {name: _converted(name, value, hints.get(name)) for name, value in arguments.items()}
        bound = _bound(fn, {**converted, **own})
    except (TypeError, ValueError) as error:
        return {"text": plain(f"{type(error).__name__}: {error}"[:1000]), "failed": "arguments"}
    try:
        value = fn(*bound.args, **bound.kwargs)
        return {"text": plain(asyncio.run(value) if inspect.iscoroutine(value) else value), "failed": ""}
    except Exception as error:  # noqa: BLE001 - the model reads the error as text
        first = str(error).strip().partition("\n")[0]
        return {"text": plain(f"{type(error).__name__}: {first}"[:1000]), "failed": "exception"}


def _hints(fn: Callable[..., object]) -> JsonObject:
    """Gets a function's annotations; {} if an annotation cannot be evaluated, such as a name only for type checkers."""
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:  # noqa: BLE001 - annotations are code of the user
        return {}


def _is_task(hint: object) -> bool:
    return hint is Task or Task in typing.get_args(hint)


def _schema(hint: object) -> dict[str, Any]:
    """Makes the JSON schema of an annotation; {} for an annotation that has no schema."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        texts = [one for one in inner[1:] if isinstance(one, str)]
        return _schema(inner[0]) | ({"description": texts[0]} if texts else {})
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(one) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 or not all(kinds) else {"anyOf": kinds}
    if (values := _choices(hint)) is not None:
        kinds = list(dict.fromkeys(kind for value in values if (kind := _KINDS.get(type(value)))))
        return ({"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else {}) | {"enum": values}
    kind = _KINDS.get(origin or hint)  # pyright: ignore[reportArgumentType]
    items = _schema(inner[0]) if kind == "array" and inner and _is_uniform(hint) else {}
    return ({"type": kind} if kind else {}) | ({"items": items} if items else {})


def _is_uniform(hint: object) -> bool:
    """Returns True if all items of an array have one annotation; False for a tuple that annotates each item."""
    return typing.get_origin(hint) is not tuple or typing.get_args(hint)[1:] == (...,)


def _choices(hint: object) -> list[object] | None:
    """Lists the values that a Literal or an enum allows; None for any other annotation."""
    if typing.get_origin(hint) is Literal:
        return [value.value if isinstance(value, enum.Enum) else value for value in typing.get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = list(hint.__members__.values())
        values = [member.value for member in members]
        simple = all(isinstance(value, str | int | float) for value in values)
        return values if simple else [member.name for member in members]
    return None


def _lists_values(hint: object) -> bool:
    """Returns True for an annotation that is or contains a Literal or an enum."""
    return _choices(hint) is not None or any(map(_lists_values, typing.get_args(hint)))


def _converted(name: str, value: object, hint: object) -> object:
    """Converts a JSON value for a function: a value of an enum becomes its member, also in arrays, objects and unions.

    Args:
      name: name of the parameter, for the error message.
      value: the JSON value.
      hint: annotation of the parameter.

    Raises:
      ValueError: the annotation lists the allowed values, and `value` is not one of them.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if not _lists_values(hint):
        return value
    if (values := _choices(hint)) is not None:
        for index, one in enumerate(values):
            if one == value and isinstance(one, bool) == isinstance(value, bool):
                return list(hint.__members__.values())[index] if isinstance(hint, enum.EnumMeta) else inner[index]
        raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}")
    if origin is Annotated:
        return _converted(name, value, inner[0])
    if origin in (typing.Union, types.UnionType):
        wrong: list[str] = []
        for one in inner if value is not None else ():
            if _lists_values(one) and (isinstance(value, list | dict) or _choices(one) is not None):
                try:
                    return _converted(name, value, one)
                except ValueError as error:
                    wrong.append(str(error))
        if wrong and all(_lists_values(one) or one is type(None) for one in inner):
            raise ValueError("; or ".join(wrong))
        return value
    if isinstance(value, dict) and len(inner) == 2:
        return {key: _converted(name, one, inner[1]) for key, one in value.items()}
    if isinstance(value, list) and _is_uniform(hint):
        converted = [_converted(name, one, inner[0]) for one in value]
        return origin(converted) if origin in (tuple, set, frozenset) else converted
    return value


def _bound(fn: Callable[..., object], arguments: JsonObject) -> inspect.BoundArguments:
    """Binds arguments by name to a function's parameters, including positional-only ones.

    Raises:
      TypeError: the function does not take the arguments.
    """
    signature, named, places = inspect.signature(fn), dict(arguments), []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.name not in named and parameter.default is parameter.empty:
                raise TypeError(f"missing a required argument: {parameter.name!r}")
            places.append(named.pop(parameter.name, parameter.default))
    return signature.bind(*places, **named)


def _described(doc: str) -> dict[str, str]:
    """Reads the descriptions of parameters in a docstring, from a section `Args:` or from `:param name:`."""
    found = dict(re.findall(r"^[ ]*:param (?:[^\s:]+ )?(\w+):[ ]*(\S.*)$", doc, re.MULTILINE))
    name, inside, indent = "", False, 0
    for line in doc.splitlines():
        words, depth = line.strip(), len(line) - len(line.lstrip())
        if words in ("Args:", "Arguments:", "Parameters:"):
            inside, indent, name = True, 0, ""
        elif inside and words:
            indent = indent or depth
            if depth < indent or depth == 0:
                inside = False
            elif depth == indent and (begun := re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", words)):
                name, found[begun[1]] = begun[1], begun[2]
            elif name:
                found[name] = f"{found[name]} {words}".strip()
    return found


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    child.serve(
        lambda fn, spec: declaration(fn, spec["name"].rpartition(".")[2]),
        lambda fn, request: call(fn, request["arguments"], request["task"]),
    )


if __name__ == "__main__":
    main()
