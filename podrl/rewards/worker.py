"""The process that runs reward functions: `python -m podrl.rewards.worker`, started by podrl.rewards.compose.

The process imports the standard library, a few small modules of podrl, and what reward functions import, but not jax.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from podrl.config import plural
from podrl.runtime.service import is_away
from podrl.workers import child
from podrl.workers.user_objects import explain, one_line, short


def call(fn: Callable[..., object], prompts: list[str], completions: list[str], fields: Mapping[str, list]) -> dict:
    """Runs a reward function and checks what it returns.

    Returns:
      {'values': floats} if the result is good; {'raised': last lines of the traceback} if the function raised an error;
      {'away': one line} if a service that the function calls cannot be reached; or {'bad': what is wrong} if the
      function or its result has the wrong form, with the index 'sample' if a single value is wrong.
    """
    if mistake := mistaken(leading(fn), fields, getattr(fn, "__name__", "f")):
        return {"bad": mistake}
    try:
        result = _apply(fn, prompts, completions, fields)
        if inspect.iscoroutine(result):
            result = _await(result)
        if isinstance(result, str | Mapping) or not hasattr(result, "__iter__"):
            return {"bad": f"returned {short(result)} ({type(result).__name__}), not a list of numbers"}
        values = list(result)
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
        if is_away(error):
            return {"away": one_line(error)}
        return {"raised": explain(error)}
    if len(values) != len(completions):
        return {
            "bad": f"returned {plural(len(values), 'value')} for {plural(len(completions), 'completion')}: "
            f"{short(values)}"
        }
    floats = []
    for index, value in enumerate(values):
        try:
            number = value.__float__()
        except (AttributeError, TypeError, ValueError, OverflowError):
            return {"bad": f"returned {short(value)} ({type(value).__name__}), not a number", "sample": index}
        if not math.isfinite(number):
            return {"bad": f"returned {number}, not a finite number", "sample": index}
        floats.append(number)
    return {"values": floats}


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    child.serve(
        lambda fn, spec: {"needs": needs(fn), "options": options(fn), "leading": leading(fn)},
        lambda fn, batch: call(fn, batch["prompts"], batch["completions"], batch["fields"]),
    )


def needs(fn: Callable[..., object]) -> list[str]:
    """Names the record fields that a reward function requires: its arguments without a default, and its own `reads`."""
    required = [p.name for p in _of_fields(fn) if p.default is p.empty]
    return [*required, *getattr(fn, "reads", ())]


def options(fn: Callable[..., object]) -> list[str]:
    """Names the arguments of a reward function with the default None; each stands for a field that records may lack."""
    return [p.name for p in _of_fields(fn) if p.default is None]


def _of_fields(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """Returns the parameters that get fields of records: all but prompts and completions, `*args` and `**kwargs`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variable]
    if "completions" not in [p.name for p in named]:
        named = named[2:]  # the function gets prompts and completions by position
    return [p for p in named if p.name not in ("prompts", "completions")]


def leading(fn: Callable[..., object]) -> list[str] | None:
    """Names the arguments that get prompts and completions by their place; a positional-only argument ends in '/'.

    Returns:
      Two names, fewer if there are no more, or all positional-only arguments if these are more. None if the function
      takes completions by name, or any number of arguments, or if Python cannot tell its arguments.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    only = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if any(p.kind is p.VAR_POSITIONAL or (p.name == "completions" and p not in only) for p in parameters):
        return None
    placed = [p for p in parameters if p in only or p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name + "/" * (p in only) for p in placed[: max(2, len(only))]]


def mistaken(first: Sequence[str] | None, fields: Collection[str], name: str) -> str:
    """Returns the reason why a reward function cannot get prompts and completions as its first two arguments, or ''.

    Args:
      first: result of `leading`.
      fields: names of the fields of records that the function gets by keyword.
      name: name of the function.
    """
    taken = [argument for argument in first or () if argument in fields]
    if first is None or (len(first) == 2 and not taken):
        return ""
    define = f"define it as {name}(prompts, completions"
    if not first:
        return f"has no argument for the prompts and none for the completions: {define}, **fields)"
    shown = ", ".join([*first, "..."])
    what = "it takes fewer" if len(first) < 2 else "the others come by name, which '/' forbids"
    what = f"{taken[0]!r} is a field of the records" if taken else what
    others = "".join(f", {argument}" for argument in taken)
    return (
        f"is defined with ({shown}), but its first two arguments get the prompts and the completions, "
        f"and {what}: {define}{others}, **fields)"
    )


_OWN = threading.local()


def _await(work: Coroutine[object, Any, object]) -> Any:
    """Runs a coroutine on this thread's event loop, which stays open for clients that a module may have bound to it."""
    if not hasattr(_OWN, "runner"):
        _OWN.runner = asyncio.Runner()
    return _OWN.runner.run(work)


def _apply(fn: Callable[..., object], prompts: list[str], completions: list[str], fields: Mapping[str, list]) -> Any:
    """Passes arguments by keyword if the function names `completions`, else by position; leaves out fields that it does
    not take."""
    arguments = {**fields, "prompts": prompts, "completions": completions}
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn(prompts, completions, **fields)
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    named = parameters.get("completions")
    if named is not None and named.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return fn(**arguments)
    return fn(prompts, completions, **{k: v for k, v in arguments.items() if k not in ("prompts", "completions")})


if __name__ == "__main__":
    main()
