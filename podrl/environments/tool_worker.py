"""The process a Python tool runs in: `python -m podrl.environments.tool_worker`, started by podrl.environments.toolbox.

It imports the standard library and what tools import, never jax.
"""

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from podrl.runtime import child
from podrl.runtime.user_objects import explain, extend_path, load_function

MOST_CHARACTERS = 1 << 20
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array", dict: "object"}


def plain(value: Any) -> str:
    """Turns a tool's result into text that any pipe takes, without its middle where it is endless."""
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
    elif isinstance(value, str):
        text = value
    else:
        text = "" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    text = text.encode(errors="replace").decode()  # lone surrogates
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]} ... [{len(text) - 2 * half} characters left out] ... {text[-half:]}"
    return text


def declaration(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    """A function as chat templates take tools: its name, its docstring, and a JSON schema of its parameters."""
    try:
        hints = typing.get_type_hints(fn)
    except Exception:  # noqa: BLE001 - annotations may name what only type checkers see
        hints = {}
    properties, required = {}, []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        hint = hints.get(parameter.name)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((one for one in typing.get_args(hint) if one is not type(None)), None)
        kind = _KINDS.get(typing.get_origin(hint) or hint)  # pyright: ignore[reportArgumentType]
        properties[parameter.name] = {"type": kind} if kind else {}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": inspect.getdoc(fn) or "", "schema": schema}


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """A tool's answer as text; what it raises, or arguments it does not take, as text too."""
    try:
        bound = inspect.signature(fn).bind(**arguments)
    except TypeError as error:
        return {"text": f"TypeError: {error}", "failed": "arguments"}
    try:
        value = fn(*bound.args, **bound.kwargs)
        return {"text": plain(asyncio.run(value) if inspect.iscoroutine(value) else value), "failed": ""}
    except Exception as error:  # noqa: BLE001 - text for the model
        first = str(error).strip().partition("\n")[0]
        return {"text": plain(f"{type(error).__name__}: {first}"[:1000]), "failed": "exception"}


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.runtime.user_code.Limits as JSON."""
    tools: dict[str, Callable[..., Any]] = {}

    def handle(header: dict[str, Any], content: bytes) -> dict[str, Any]:
        del content
        if "spec" not in header:
            return call(tools[header["tool"]], header["arguments"])
        extend_path(header["path"])
        try:
            fn = tools[header["tool"]] = load_function(header["spec"])
            return declaration(fn, header["spec"]["name"].rpartition(".")[2])
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
            return {"raised": explain(error)}

    child.serve(handle)


if __name__ == "__main__":
    main()
