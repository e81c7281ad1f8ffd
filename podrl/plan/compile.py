"""Compiles one program for its topology and measures its memory and roofline."""

import dataclasses
import functools
import hashlib
import math
import re
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax

from podrl.mesh.chips import GIB, Chip
from podrl.offload import HOST
from podrl.plan.chips import GPUS
from podrl.plan.hlo import GROUPED, Collective, cost_of
from podrl.plan.programs import Program
from podrl.types import PyTree

# Options to compile in less time, to learn only whether a program fits: schedules and tiles are not searched.
QUICK: Mapping[str, object] = (
    {"exec_time_optimization_effort": -1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")  # jax 0.10: later versions have levels instead
    else {"optimization_level": "O0"}
)


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """The measurements of a compiled program, per chip.

    Attributes:
      name: name of the program.
      side: side whose devices the program occupies.
      runs: executions per training step.
      fits: True if the compiler accepted the program, and `peak` + `resident` is at most `capacity`.
      peak: bytes at the fullest moment, arguments and results included; if the compiler refused the program, the bytes
        that it asked for.
      at_least: True if the compiler refused the program and named only its temporaries, so that `peak` lacks arguments.
      resident: bytes of arrays that are on the chip but are not the program's arguments.
      capacity: bytes that a program may use.
      compile_s: seconds of tracing and compiling.
      compile_cpu_s: processor seconds of tracing and compiling, on all cores; the figure to compare on a busy machine.
      host: bytes of host memory per chip for activations (`trainer.remat='offload'`) and for what `trainer.offload`
        keeps there.
      flops: operations of one execution; 0 if the compiler refused the program.
      bytes: bytes read from and written to HBM in one execution; 0 if the compiler refused the program.
      collectives: collectives of one execution; empty if the compiler refused the program.
      compute_s, memory_s, network_s, host_s: least seconds of one execution for its operations, HBM traffic,
        collectives, and copies from and to the host's memory.
      uncounted: names of kernels whose operations are not in `flops`.
    """

    name: str
    side: str
    runs: float
    fits: bool
    peak: float
    resident: float
    capacity: float
    compile_s: float
    compile_cpu_s: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    compute_s: float = 0.0
    memory_s: float = 0.0
    network_s: float = 0.0
    host_s: float = 0.0
    uncounted: tuple[str, ...] = ()
    at_least: bool = False

    @property
    def seconds(self) -> float:
        """Least seconds of one execution: the roofline."""
        return max(self._parts.values())

    @property
    def bound(self) -> str:
        """The resource that takes the longest: 'compute', 'memory', 'network' or 'host'; '' if none takes time."""
        return max(self._parts, key=lambda name: self._parts[name]) if self.seconds else ""

    @property
    def _parts(self) -> dict[str, float]:
        return {"compute": self.compute_s, "memory": self.memory_s, "network": self.network_s, "host": self.host_s}

    @property
    def missing(self) -> float:
        """Known bytes by which the program exceeds the capacity; 0 if the program fits. With `at_least` it may be 0
        although the program does not fit."""
        return max(0.0, self.peak + self.resident - self.capacity)


# Measurements of the programs of one job on its topologies, by a key that is different for every program.
CompileCache = MutableMapping[object, "CompileResult"]


def measure(program: Program, chip: Chip, *, quick: bool = False, known: CompileCache | None = None) -> CompileResult:
    """Compiles a program and measures its cost.

    Args:
      program: the program.
      chip: figures of the chip that the program runs on.
      quick: True to compile with least effort; peak and counts then belong to another schedule.
      known: measurements of the same job and topologies so far. A program whose name and text are among them is not
        compiled again; new measurements are added.
    """
    started, busy = time.perf_counter(), time.process_time()
    lowered = program.lower()
    if known is None:
        return _compiled(program, lowered, chip, quick, started, busy)
    text = hashlib.sha256(lowered.as_text().encode()).digest()  # equal only for equal meshes: the text has their axes
    key = (program.name, program.side, program.by_hand, quick, text)
    if key not in known:
        known[key] = _compiled(program, lowered, chip, quick, started, busy)
    found = known[key]
    refused = not found.bytes
    fits = not refused and found.peak + program.resident <= chip.hbm
    return dataclasses.replace(found, runs=program.runs, resident=program.resident, fits=fits)


def _compiled(program: Program, lowered: Any, chip: Chip, quick: bool, started: float, busy: float) -> CompileResult:
    """Compiles and measures a lowered program; `started` and `busy` are clock and processor seconds before lowering."""
    options = {**dict(chip.compiler), **(QUICK if quick else {})} or None
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        wanted = _wanted_bytes(str(error))
        if wanted is None:
            raise
        seconds = time.perf_counter() - started
        peak, at_least = wanted
        return CompileResult(
            program.name,
            program.side,
            program.runs,
            False,
            peak,
            program.resident,
            chip.hbm,
            seconds,
            at_least=at_least,
        )
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    memory = compiled.memory_analysis()
    read, written = memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes
    # The compiler's peak includes arguments in the host's memory.
    peak = float(memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes - read)
    if chip.name in GPUS:  # compiled for CPU: this compiler's peak does not count temporaries or host memory
        read = _host_bytes(lowered.args_info, compiled.input_shardings)
        written = _host_bytes(lowered.out_info, compiled.output_shardings)
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = float(kept + memory.temp_size_in_bytes - max(read, written))
    named = {GROUPED: float(program.experts)} if program.experts else {}
    cost = cost_of(compiled.as_text(), trips=program.trips, named=named)
    flops, size = cost.flops, cost.bytes
    if program.by_hand is not None:
        flops, size = program.by_hand.flops, program.by_hand.bytes
    # Only the larger direction counts, because both directions copy at the same time. Texts for CPU devices do not name
    # the host's memory.
    copied = max(read, written) if chip.name in GPUS else max(cost.from_host, cost.to_host)
    inside = sum(c.bytes for c in cost.collectives if not c.crosses)
    across = sum(c.bytes for c in cost.collectives if c.crosses)
    return CompileResult(
        name=program.name,
        side=program.side,
        runs=program.runs,
        fits=peak + program.resident <= chip.hbm,
        peak=peak,
        resident=program.resident,
        capacity=chip.hbm,
        compile_s=seconds,
        compile_cpu_s=busy,
        host=float(memory.host_temp_size_in_bytes + read),
        flops=flops,
        bytes=size,
        collectives=cost.collectives,
        compute_s=flops / chip.flops,
        memory_s=size / chip.hbm_rate,
        network_s=inside / chip.ici_rate + across / chip.dcn_rate,
        host_s=copied / chip.host_rate,
        uncounted=cost.uncounted if program.by_hand is None else (),
    )


def _host_bytes(shapes: PyTree, shardings: PyTree) -> int:
    """Counts the bytes per chip of the arrays that a program reads from, or writes to, the host's memory."""
    leaves = functools.partial(jax.tree.leaves, is_leaf=lambda x: x is None)  # a batch may lack some of its arrays
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x, sharding in zip(leaves(shapes), leaves(shardings), strict=True)
        if sharding is not None and sharding.memory_kind == HOST  # None: the program does not read the argument
    )


def _wanted_bytes(message: str) -> tuple[float, bool] | None:
    """Parses the compiler's out-of-HBM error: (bytes wanted, True if arguments are missing); None for other errors."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    temporaries = re.search(r"\(([\d.]+)([KMGT])\) exceeds available", message)
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message) or temporaries
    if found is None:
        return None
    size = float(found.group(1)) * {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}[found.group(2)]
    return size, found is temporaries
