"""Adds up the time of a compiled program's operations by their kind, from a trace of jax's profiler."""

import glob
import os
from collections.abc import Sequence
from typing import Any

_SLOW = frozenset(
    ["cosine", "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "sine", "tanh"]
)
# A trace times these operations, and again the operations inside them; to count no time twice, these are left out.
_CONTAINERS = ("while", "conditional", "call")


def kinds_of(text: str) -> dict[str, str]:
    """Returns the kind of each operation of a compiled program, by the operation's name.

    The kinds are 'matrix products', 'collectives', 'exponentials' (also logarithms, powers, sines, cosines and tanh)
    and 'other' (elementwise operations, copies and reductions). The kind of a fusion is the first of these that one of
    its operations has.

    Args:
      text: the compiled program, as `compiled.as_text()` returns it.

    Raises:
      ValueError: the text is no compiled program.
    """
    from podrl.plan.hlo_text import called, parse

    computations, _ = parse(text)
    return {
        i.name: _kind([i.opcode, *(inner.opcode for name in called(i, "calls") for inner in computations[name])])
        for body in computations.values()
        for i in body
        if i.opcode not in _CONTAINERS
    }


def _kind(opcodes: Sequence[str]) -> str:
    from podrl.plan.hlo import COLLECTIVES

    if "dot" in opcodes:
        return "matrix products"
    if any(opcode.startswith(COLLECTIVES) for opcode in opcodes):
        return "collectives"
    return "other" if _SLOW.isdisjoint(opcodes) else "exponentials"


def seconds_by_kind(text: str, trace_dir: str) -> dict[str, float]:
    """Sums the seconds of a program's operations in a trace over all devices, for each kind of `kinds_of`.

    Args:
      text: the compiled program. Operations of other programs in the trace count too if their names are the same.
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
