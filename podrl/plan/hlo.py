"""Counts the work of a compiled program from its text: matrix operations, bytes of memory, collectives.

XLA's own cost analysis counts the body of a loop once. Here the body counts as often as the loop runs according to its
condition. If the number of runs is a traced value, which the text does not have, the caller passes it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from podrl.plan.hlo_text import (
    Instruction,
    any_bytes,
    called,
    dims_of,
    group_of,
    hbm_bytes,
    largest_on_device,
    leaf_bytes,
    leaves,
    on_host,
    pairs_cross,
    parse,
    top_leaves,
)

# trips(depth): number of runs of a loop of unknown length, if it is nested in `depth` other loops of unknown length.
Trips = Callable[[int], float]

_FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "iota",
    ]
)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_VIEWS = ("bitcast", "reshape", "convert", "copy", "transpose")
# Attribute of a fusion whose result is its operand in another tiling, in the same buffer. The fusion itself reads no
# bytes: only the bytes that are read from its result count.
_ALIASED = "output_to_operand_aliasing={{}: (0, {})}"
_SLICES = ("dynamic-slice", "slice", "gather")
# Number of matrix products of the attention kernels, by a part of their names: the forward pass computes scores and
# outputs, each kernel of the backward pass computes the scores again and the gradients of one side.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
_PREFIX_PRODUCTS = {"prefix_attention_fwd": 2, "prefix_attention_dq": 3, "prefix_attention_dkv": 4}
# Kernels that read single pages of the pools, which are their operands with five dimensions.
_PAGE_KERNELS = ("shared_pages", "own_pages")
GROUPED = "gmm"  # kernel that multiplies each row by its group's matrix; the matrices are the operand of 3 dimensions


@dataclasses.dataclass(frozen=True)
class Collective:
    """Bytes that one chip sends over links in all executions of one kind of collective.

    Attributes:
      kind: name of the operation, such as 'all-gather'.
      count: number of executions.
      bytes: bytes that a chip sends in all executions together.
      crosses: True if the devices of a group lie in different slices: the data-centre network carries the bytes.
    """

    kind: str
    count: float
    bytes: float
    crosses: bool


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Work of one chip in one execution of a program: FLOP, bytes, collectives.

    Attributes:
      flops: operations of matrix products (two per multiply-add), including the products of attention kernels.
      bytes: bytes that the fused operations read from and write to HBM; an estimate.
      read: part of `bytes` that is read.
      from_host, to_host: bytes that the chip copies from and to the host's memory.
      collectives: collectives of the execution, one entry for each kind and each value of `crosses`.
      uncounted: names of kernels whose operations are not in `flops`.
    """

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    uncounted: tuple[str, ...] = ()
    read: float = 0.0
    from_host: float = 0.0
    to_host: float = 0.0

    def by_kind(self, parts: float = 1.0) -> dict[str, dict[str, float]]:
        """Returns the count and the bytes of each kind of collective, divided by `parts`, for a part of the work."""
        kinds: dict[str, dict[str, float]] = {}
        for c in self.collectives:
            had = kinds.setdefault(c.kind, {"count": 0.0, "bytes": 0.0})
            had["count"] += c.count / parts
            had["bytes"] += c.bytes / parts
        return kinds


@dataclasses.dataclass
class _Sum:
    flops: float = 0.0
    bytes: float = 0.0
    read: float = 0.0
    from_host: float = 0.0
    to_host: float = 0.0
    collectives: dict[tuple[str, bool], tuple[float, float]] = dataclasses.field(default_factory=dict)
    uncounted: set[str] = dataclasses.field(default_factory=set)

    def move(self, read: float, written: float) -> None:
        self.bytes += read + written
        self.read += read

    def add(self, other: "_Sum", times: float) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.read += times * other.read
        self.from_host += times * other.from_host
        self.to_host += times * other.to_host
        for key, (count, size) in other.collectives.items():
            had = self.collectives.get(key, (0.0, 0.0))
            self.collectives[key] = (had[0] + times * count, had[1] + times * size)
        self.uncounted |= other.uncounted


def cost_of(
    text: str,
    *,
    trips: Trips = lambda depth: 1.0,
    named: Mapping[str, float] = MappingProxyType({}),
    slices: int = 1,
) -> ProgramCost:
    """Counts the cost of a compiled program on one chip.

    Args:
      text: text of the compiled module (`compiled.as_text()`).
      trips: function that returns how often a loop of traced length runs, by its nesting depth among such loops.
      named: numbers to use instead of the numbers in the text, by name. The name of a `jax.named_scope` gives the runs
        of the loops directly in the scope. The name of a kernel of podrl.engine.page_attention gives the number of
        pages that the kernel reads. GROUPED gives the largest number of matrices that the kernel GROUPED reads.
      slices: number of slices over which the devices in the text are spread, in order and equally. The text of the
        TPU compiler has the devices of one slice; messages to other slices are found without this number.
    """
    return _Reader(text, trips, named, slices).cost()


class _Reader:
    def __init__(self, text: str, trips: Trips, named: Mapping[str, float], slices: int):
        self._computations, entry = parse(text)
        self._entry = entry
        self._trips, self._named, self._slices = trips, named, slices
        found = re.search(r"num_partitions=(\d+)", text[:20_000_000])
        self._devices = int(found.group(1)) if found else 1

    def cost(self) -> ProgramCost:
        total = self._computation(self._entry, 0)
        kinds = [Collective(kind, n, size, crosses) for (kind, crosses), (n, size) in sorted(total.collectives.items())]
        host = {"from_host": total.from_host, "to_host": total.to_host}
        return ProgramCost(total.flops, total.bytes, tuple(kinds), tuple(sorted(total.uncounted)), total.read, **host)

    @functools.cache  # noqa: B019 - a reader, and with it the cache, lives only while one text is read
    def _computation(self, name: str, depth: int) -> _Sum:
        total = _Sum()
        types = {i.name: i.type for i in self._computations[name]}
        for instruction in self._computations[name]:
            self._instruction(total, instruction, types, depth)
        return total

    def _instruction(self, total: _Sum, i: Instruction, types: Mapping[str, str], depth: int) -> None:
        if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):  # -done and -update count with their -start
            return
        if i.opcode == "while":
            count = self._trip_count(i, types)
            inside = depth if count is not None else depth + 1
            total.add(self._computation(called(i, "body")[0], inside), self._trips(depth) if count is None else count)
        elif i.opcode == "conditional":
            branches = called(i, "branch_computations") or called(i, "true_computation", "false_computation")
            for branch in branches:
                total.add(self._computation(branch, depth), 1.0 / len(branches))
        elif i.opcode in ("call", "call-start", "async-start"):  # a call-start runs on the SparseCores of a tpu7x
            total.add(self._computation(called(i, "to_apply", "calls")[0], depth), 1.0)
        elif i.opcode == "fusion":
            self._fusion(total, i, types)
        else:
            self._plain(total, i, types)
            total.move(*self._moved(i, types))
            self._host_copies(total, i, types)

    def _host_copies(self, total: _Sum, i: Instruction, types: Mapping[str, str]) -> None:
        """Counts the bytes that an instruction begins to copy from or to the host's memory."""
        if i.opcode not in ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"):
            return
        source = types.get(i.operands[1 if i.opcode == "dynamic-update-slice-start" else 0], "")
        if on_host(source):
            total.from_host += largest_on_device(i.type)
        elif on_host(i.type):
            total.to_host += any_bytes(source)

    def _moved(self, i: Instruction, types: Mapping[str, str]) -> tuple[float, float]:
        """Counts bytes (read, written) of an instruction outside fusions."""
        out = hbm_bytes(i.type)
        operand = lambda at: types.get(i.operands[at], "")  # noqa: E731
        if i.opcode == "slice-start":
            part = min((size for size in map(leaf_bytes, leaves(i.type)) if size > 8), default=0.0)
            return part, part
        if i.opcode in _SLICES:
            return (any_bytes(i.type) if hbm_bytes(operand(0)) else 0.0), out
        if i.opcode == "dynamic-update-slice":
            return hbm_bytes(operand(1)), any_bytes(operand(1)) if out else 0.0
        read = sum(hbm_bytes(types.get(name, "")) for name in i.operands)
        if i.opcode == "custom-call" and (pages := self._pages(i)) is not None:
            read += sum(_pages_bytes(types.get(name, ""), pages) for name in i.operands)
        if i.opcode == "custom-call" and i.name.startswith(GROUPED) and GROUPED in self._named:
            read -= sum(_unread_bytes(types.get(name, ""), self._named[GROUPED]) for name in i.operands)
        if i.opcode.endswith("-start"):  # the type of a start also lists its operands, so `out` counts them
            read = min(read, out)
            return read, out - read
        return read, out

    def _pages(self, i: Instruction) -> float | None:
        """Returns the pages of a pool that a kernel of podrl.engine.page_attention reads, if the caller gave them."""
        if 'custom_call_target="tpu_custom_call"' not in i.attributes:
            return None
        return next((self._named[name] for name in _PAGE_KERNELS if name in i.name and name in self._named), None)

    def _plain(self, total: _Sum, i: Instruction, types: Mapping[str, str], inside: str = "") -> None:
        """Counts operations and collectives of one instruction; in a fusion `inside` is the fusion's computation."""
        kind = i.opcode.removesuffix("-start")
        if i.opcode == "convolution":
            total.flops += _convolution_flops(i, types)
        elif i.opcode == "dot":
            total.flops += _dot_flops(i, types)
        elif i.opcode == "send" and "megascale" in i.attributes:
            # Programs of several slices are compiled slice by slice; messages between slices go through the hosts.
            self._count(total, "send", True, any_bytes(types.get(i.operands[0], "")))
        elif kind in COLLECTIVES:
            kind = "reduce-scatter" if inside.startswith("all-reduce-scatter") and kind == "all-reduce" else kind
            self._collective(total, i, kind, types)
        elif i.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in i.attributes:
            flops = _splash_flops(i, types)
            flops = _prefix_flops(i, types) if flops is None else flops
            if flops is None:
                total.uncounted.add(i.name.rstrip("0123456789."))
            total.flops += flops or 0.0

    def _collective(self, total: _Sum, i: Instruction, kind: str, types: Mapping[str, str]) -> None:
        size, crosses = group_of(i.attributes, self._devices, self._slices)
        whole = sum(leaf_bytes(leaf) for name in i.operands for leaf in leaves(types.get(name, "")))
        if kind == "collective-permute":
            sent = whole
            crosses = pairs_cross(i.attributes, self._devices, self._slices)
        elif kind == "all-gather":
            sent = whole * (size - 1)
        else:
            sent = whole * (size - 1) / size * (2 if kind == "all-reduce" else 1)
        self._count(total, kind, crosses, sent)

    def _count(self, total: _Sum, kind: str, crosses: bool, sent: float) -> None:
        if sent:
            had = total.collectives.get((kind, crosses), (0.0, 0.0))
            total.collectives[kind, crosses] = (had[0] + 1, had[1] + sent)

    def _fusion(self, total: _Sum, i: Instruction, types: Mapping[str, str]) -> None:
        name = called(i, "calls")[0]
        body = self._computations[name]
        inner = {x.name: x.type for x in body}
        # A collective that runs beside several fusions appears in each of them. It counts only in the first fusion,
        # which also has the collective's start.
        starts = any("AsyncCollectiveStart" in x.attributes for x in body)
        for x in body:
            if x.opcode == "fusion":
                nested = _Sum()
                self._fusion(nested, x, inner)
                nested.bytes = nested.read = 0.0
                total.add(nested, 1.0)
            elif "chain_id" not in x.attributes or starts:
                self._plain(total, x, inner, name)
        total.move(*self._fusion_bytes(i, types, body, inner))

    def _fusion_bytes(
        self, i: Instruction, types: Mapping[str, str], body: Sequence[Instruction], inner: Mapping[str, str]
    ) -> tuple[float, float]:
        """Counts the bytes (read, written) of a fusion: only the slices of inputs that the fusion reads, and only the
        parts of outputs that it updates."""
        by_name, users = {x.name: x for x in body}, _users(body)
        read = written = 0.0
        for x in body:
            if x.opcode == "parameter" and _place(x) < len(i.operands):
                size = hbm_bytes(types.get(i.operands[_place(x)], ""))
                read += min(size, self._read(x, users)) if size else 0.0
        root = next(x for x in body if x.root)
        ends = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for end, leaf in zip(ends, top_leaves(i.type), strict=False):
            size = hbm_bytes(leaf)
            while end.opcode in _VIEWS and end.operands and end.operands[0] in by_name:
                end = by_name[end.operands[0]]
            if size and end.opcode == "dynamic-update-slice":
                size = min(size, any_bytes(inner[end.operands[1]]))
            written += size
        return read, written

    def _read(self, x: Instruction, users: Mapping[str, Sequence[Instruction]]) -> float:
        """Counts how many bytes of a value inside a fusion its users read; infinite if a user reads the whole value."""
        read = 0.0
        for user in users.get(x.name, ()):
            if user.opcode in _SLICES and user.operands[0] == x.name:
                read += any_bytes(user.type)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == x.name:
                continue
            elif (user.opcode in ("bitcast", "reshape") or _ALIASED in user.attributes) and not user.root:
                read += self._read(user, users)
            elif user.opcode == "fusion":
                body = self._computations[called(user, "calls")[0]]
                places = {at for at, name in enumerate(user.operands) if name == x.name}
                read += sum(
                    self._read(p, _users(body)) for p in body if p.opcode == "parameter" and _place(p) in places
                )
            else:
                return math.inf
        return read

    def _trip_count(self, i: Instruction, types: Mapping[str, str]) -> float | None:
        """Returns how often a loop runs; None if the text does not tell.

        The number comes from the caller, from the compiler's own note, or from `for (k = first; k < last; k += by)`
        with three constants.
        """
        scope = re.search(r'op_name="[^"]*?([^/"]+)/while"', i.attributes)
        if scope and scope.group(1) in self._named:
            return self._named[scope.group(1)]
        if known := re.search(r"known_trip_count[^0-9]*(\d+)", i.attributes):
            return float(known.group(1))
        condition = {x.name: x for x in self._computations[called(i, "condition")[0]]}
        root = next(x for x in condition.values() if x.root)
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        left, right = (condition[name] for name in root.operands)
        if left.opcode != "get-tuple-element" or right.opcode != "constant":
            return None
        last = _integer(right)
        index = _index(left)
        body = {x.name: x for x in self._computations[called(i, "body")[0]]}
        by = _increment(body, index)
        caller = next(c for c in self._computations.values() if any(x is i for x in c))
        first = _start({x.name: x for x in caller}, i.operands[0], index)
        if last is None or by is None or first is None:
            return None
        return float(max(0, math.ceil((last - first) / by)))


def _unread_bytes(matrices: str, read: float) -> float:
    """Counts the bytes in HBM of those matrices of a stack (G, X, Y) that a kernel does not read, if it reads `read` of
    them; 0 for other arrays."""
    dims = dims_of(matrices) if matrices.count("[") == 1 else []
    return hbm_bytes(matrices) * max(0.0, 1 - read / dims[0]) if len(dims) == 3 else 0.0


def _pages_bytes(pool: str, pages: float) -> float:
    """Counts the bytes of `pages` pages of a pool (L, M, K, C, H) less the bytes of the pool; 0 for other arrays."""
    dims, size = dims_of(pool), hbm_bytes(pool)
    return size * (pages / (dims[0] * dims[1]) - 1) if len(dims) == 5 else 0.0


def _users(body: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for x in body:
        for operand in x.operands:
            users.setdefault(operand, []).append(x)
    return users


def _place(parameter: Instruction) -> int:
    """Returns the operand number of a fusion's parameter."""
    return int(parameter.attributes.split(")")[0])


def _dot_flops(i: Instruction, types: Mapping[str, str]) -> float:
    left = dims_of(types[i.operands[0]])
    found = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", i.attributes)
    contracted = [int(n) for n in found.group(1).split(",") if n] if found else []
    return 2.0 * math.prod(dims_of(i.type)) * math.prod(left[d] for d in contracted)


def _convolution_flops(i: Instruction, types: Mapping[str, str]) -> float:
    """Counts two operations per multiply-add outside padding: TPU programs write matrix products as convolutions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    assert labels is not None, i
    image, kernel, out = labels.groups()
    shapes = [dims_of(types[i.operands[0]]), dims_of(types[i.operands[1]]), dims_of(i.type)]
    size = [dict(zip(letters, dims, strict=True)) for letters, dims in zip((image, kernel, out), shapes, strict=True)]
    flops = 2.0 * size[2]["b"] * size[2]["f"] * size[1]["i"]
    digits = sorted(c for c in out if c.isdigit())
    window = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-]+)", _window(i.attributes))}
    for d, c in enumerate(digits):
        field = lambda key, default, d=d: window[key][d] if key in window else default  # noqa: E731
        low = int(field("pad", "0_0").split("_")[0])
        stride, spread, step = (int(field(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        flops *= _valid(size[2][c], size[1][c], size[0][c], stride, spread, step, low)
    return flops


def _window(attributes: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return found.group(1) if found else ""


@functools.lru_cache(maxsize=4096)
def _valid(out: int, kernel: int, image: int, stride: int, spread: int, step: int, low: int) -> int:
    """Counts pairs of output and kernel positions that meet an input along one dimension."""
    count = 0
    for k in range(kernel):
        place_o = np.arange(out) * stride + k * step - low
        count += int(((place_o >= 0) & (place_o <= (image - 1) * spread) & (place_o % spread == 0)).sum())
    return count


def _splash_flops(i: Instruction, types: Mapping[str, str]) -> float | None:
    """Counts operations of a splash attention kernel, from its grid of blocks; None for any other kernel.

    The kernel visits the blocks in its mask's list. If the last two dimensions of the list are equal, the mask is
    causal and its upper triangle is skipped; if they differ, the mask has a window.
    """
    products = next((n for name, n in _SPLASH_PRODUCTS.items() if i.name.startswith(name)), None)
    found = [next(leaves(types[name])) for name in i.operands if types.get(name)]
    grids = (dims_of(x.group(0)) for x in found if x.group(1).startswith("s") and x.group(2).count(",") == 2)
    queries = (dims_of(x.group(0)) for x in found if "f" in x.group(1) and x.group(2).count(",") >= 2)
    grid, q = next(grids, None), next(queries, None)
    if products is None or grid is None or q is None:
        return None
    rows, columns = max(grid[1:]), min(grid[1:])
    share = (rows + 1) / (2 * rows) if rows == columns else columns / rows
    *heads, T, H = q
    return 2.0 * products * math.prod(heads) * T * T * H * share


def _prefix_flops(i: Instruction, types: Mapping[str, str]) -> float | None:
    """Counts operations of podrl's attention kernel as if tokens saw all earlier tokens; None for any other kernel.

    The blocks that the kernel skips depend on the content of the rows. Its list of pairs has room for the lower
    triangle of blocks of each row, and for one pair more; so the number of blocks of a row follows from the length of
    the list. Blocks on the diagonal count as whole blocks.
    """
    products = next((n for name, n in _PREFIX_PRODUCTS.items() if name in i.name), None)
    found = [dims_of(types[name]) for name in i.operands if types.get(name)]
    q = next((dims for dims in found if len(dims) == 4), None)
    pairs = next((dims[0] - 1 for dims in found if len(dims) == 1 and dims[0] > 1), None)
    if products is None or pairs is None or q is None:
        return None
    B, N, H, T = q
    blocks = (math.isqrt(8 * pairs // B + 1) - 1) // 2
    return 2.0 * products * B * N * H * T * T * (blocks + 1) / (2 * blocks)


def _integer(x: Instruction) -> int | None:
    found = re.match(r"\s*(-?\d+)\s*\)", x.attributes) if x.opcode == "constant" else None
    return int(found.group(1)) if found else None


def _index(x: Instruction) -> int:
    found = re.search(r"index=(\d+)", x.attributes)
    assert found is not None, x
    return int(found.group(1))


def _increment(body: Mapping[str, Instruction], index: int) -> int | None:
    """Reads the number by which element `index` of a loop's state grows in the loop's body."""
    root = next(x for x in body.values() if x.root)
    if root.opcode != "tuple":
        return None
    grown = body[root.operands[index]]
    while grown.opcode in ("copy", "bitcast"):
        grown = body[grown.operands[0]]
    if grown.opcode != "add":
        return None
    steps = [_integer(body[name]) for name in grown.operands if name in body]
    return next((n for n in steps if n is not None), None)


def _start(caller: Mapping[str, Instruction], state: str, index: int) -> int | None:
    """Reads the initial value of element `index` of a loop's state."""
    initial = caller.get(state)
    if initial is None or initial.opcode != "tuple":
        return None
    first = caller.get(initial.operands[index])
    while first is not None and first.opcode in ("copy", "bitcast") and first.operands:
        first = caller.get(first.operands[0])
    return _integer(first) if first is not None else None
