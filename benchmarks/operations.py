"""Divides the time of a compiled program's operations by their kind, from a trace of jax's profiler."""

import glob
import os
import re
from typing import Any

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Operations whose time in a trace contains that of the operations inside them.
_CONTAINERS = ("while", "conditional", "call")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(.*", re.M)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?^}", re.M | re.S)
_CALLED = re.compile(r"calls=%?([\w.\-]+)")


def kinds_of(text: str) -> dict[str, str]:
    """Returns the kind of each operation of a compiled program, by the operation's name.

    Kinds are 'matrix products', 'collectives', 'exponentials' (with tanh, logarithms, sines and cosines) and 'other'
    (elementwise operations, copies and reductions). A fusion has the first of these kinds that one of its operations
    has.

    Args:
      text: the compiled program, as `compiled.as_text()` returns it.
    """
    bodies = {found[1]: found[0] for found in _COMPUTATION.finditer(text)}
    kinds = {}
    for found in _INSTRUCTION.finditer(text):
        name, opcode = found[1], found[2]
        called = _CALLED.search(found[0])
        inside = bodies.get(called[1], "") if called else ""
        operations = {opcode, *(each[2] for each in _INSTRUCTION.finditer(inside))}
        if opcode not in _CONTAINERS:
            kinds[name] = _kind(operations)
    return kinds


def _kind(operations: set[str]) -> str:
    if "dot" in operations:
        return "matrix products"
    if any(operation.startswith(_COLLECTIVES) for operation in operations):
        return "collectives"
    slow = {
        "exponential",
        "exponential-minus-one",
        "tanh",
        "log",
        "log-plus-one",
        "logistic",
        "sine",
        "cosine",
        "power",
    }
    return "exponentials" if operations & slow else "other"


def seconds_by_kind(text: str, trace_dir: str) -> dict[str, float]:
    """Sums the time of a program's operations over all devices of a trace: the seconds of each kind, see `kinds_of`.

    Args:
      text: the compiled program whose runs were traced; operations of other programs with the same names count too.
      trace_dir: directory that `jax.profiler.trace` wrote.
    """
    from jax.profiler import ProfileData

    kinds = kinds_of(text)
    total: dict[str, float] = dict.fromkeys(("matrix products", "collectives", "exponentials", "other"), 0.0)
    for path in glob.glob(os.path.join(trace_dir, "**", "*.xplane.pb"), recursive=True):
        data: Any = ProfileData.from_file(path)
        for event in (event for plane in data.planes for line in plane.lines for event in line.events):
            if event.name in kinds:
                total[kinds[event.name]] += event.duration_ns / 1e9
    return total
