"""Parses the text of a compiled module: instructions, sizes of types, groups of devices."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LEAF = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_OFF_HBM = re.compile(r"S\([1-9]")
_ON_HOST = re.compile(r"S\(5\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `attributes` is the text after the operands."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses a module: (computations by name, name of the entry computation).

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].removeprefix("%")
            current = computations.setdefault(name, [])
            entry = name if line.startswith("ENTRY") else entry
        elif line == "}":
            current = None
        elif current is not None and " = " in line:
            current.append(_instruction(line.strip()))
    if not entry:
        raise ValueError("The text is not a compiled module: it has no ENTRY computation.")
    return computations, entry


def _instruction(line: str) -> Instruction:
    root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, _, tail = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : close], rest[close + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    if opcode in ("parameter", "constant"):
        attributes, operands = tail, ()
    return Instruction(name.strip().removeprefix("%"), kind, opcode.strip(), operands, attributes, root)


def _closing(text: str, start: int) -> int:
    """Finds the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"Unbalanced parentheses in the compiled text: {text[start : start + 80]!r}.")


def called(i: Instruction, *keys: str) -> list[str]:
    """Lists the computations that an instruction's attributes `keys` name."""
    names: list[str] = []
    for key in keys:
        if found := re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", i.attributes):
            names += re.findall(r"%([\w.\-]+)", found.group(1))
    return names


def leaves(text: str) -> Iterator[re.Match[str]]:
    """Yields a match for each array type in an HLO type; its groups are element type, dimensions and layout."""
    return _LEAF.finditer(text)


def top_leaves(text: str) -> list[str]:
    """Lists the array types in a type as texts."""
    return [leaf.group(0) for leaf in leaves(text)]


def leaf_bytes(leaf: re.Match[str]) -> float:
    """Counts the bytes of one array type."""
    kind, dims = leaf.group(1), leaf.group(2)
    bits = _BITS.get(kind)
    if bits is None:
        digits = re.search(r"\d+", kind)
        bits = int(digits.group(0)) if digits else 0
    return bits / 8 * math.prod(int(n) for n in dims.split(",") if n)


def any_bytes(text: str) -> float:
    """Counts the bytes of a type, in any memory."""
    return sum(leaf_bytes(leaf) for leaf in leaves(text))


def hbm_bytes(text: str) -> float:
    """Counts the bytes of those arrays of a type that lie in HBM, not in memory closer to the cores."""
    return sum(leaf_bytes(leaf) for leaf in leaves(text) if not _OFF_HBM.search(leaf.group(3) or ""))


def on_host(text: str) -> bool:
    """True if an array of a type lies in the host's memory."""
    return bool(_ON_HOST.search(text))


def largest_on_device(text: str) -> float:
    """Counts the bytes of the largest array of a type that does not lie in the host's memory; 0 if there is none."""
    return max((leaf_bytes(leaf) for leaf in leaves(text) if not on_host(leaf.group(3) or "")), default=0.0)


def dims_of(text: str) -> list[int]:
    """Returns the dimensions of the first array of a type."""
    leaf = next(leaves(text))
    return [int(n) for n in leaf.group(2).split(",") if n]


def group_of(attributes: str, devices: int, slices: int) -> tuple[int, bool]:
    """Parses a collective's groups: (number of devices in a group, True if they lie in different slices)."""
    ids = _first_group(attributes, devices)
    part = max(1, devices // slices)
    return len(ids), min(ids) // part != max(ids) // part


def _first_group(attributes: str, devices: int) -> list[int]:
    if found := re.search(r"replica_groups=\{\{([0-9,]+)\}", attributes):
        return [int(n) for n in found.group(1).split(",")]
    if found := re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", attributes):
        shape, dims, order = ([int(n) for n in (g or "").split(",") if n] for g in found.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape)[0].tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        axes = [(name, int(n)) for name, n in re.findall(r"'([^']+)'=(\d+)", found.group(1))]
        ids, stride = [0], devices
        for name, n in axes:
            stride //= n
            part = re.search(rf"'{re.escape(name)}'(?::\((\d+)\)(\d+))?", found.group(2))
            if part is None:
                continue
            major, taken = (int(part.group(1)), int(part.group(2))) if part.group(1) else (1, n)
            step = stride * n // (major * taken)
            ids = [base + k * step for base in ids for k in range(taken)]
        return ids
    return list(range(devices))


def pairs_cross(attributes: str, devices: int, slices: int) -> bool:
    """True if a permute sends between slices."""
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    pairs = re.findall(r"\{(\d+),(\d+)", found.group(0)) if found else []
    part = max(1, devices // slices)
    return any(int(a) // part != int(b) // part for a, b in pairs)
