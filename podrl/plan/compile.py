"""Compiles one program for its topology and measures its memory and roofline."""

import dataclasses
import hashlib
import re
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax

from podrl.mesh.chips import GIB, Chip
from podrl.plan.chips import GPUS
from podrl.plan.hlo import Collective, cost_of
from podrl.plan.programs import Program

# Compiles in a sixth of the time, to learn only whether a program fits: schedules and tiles are not searched.
QUICK: Mapping[str, Any] = (
    {"exec_time_optimization_effort": -1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")  # jax 0.10; later ones have levels
    else {"optimization_level": "O0"}
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a compiled program, per chip.

    Attributes:
      name, side, runs: of the program; `runs` per training step.
      fits: whether peak and resident bytes stay within the chip's.
      peak: bytes at the fullest moment, arguments and results included; what the compiler asked for where it refused.
      at_least: the compiler refused and named its temporaries only: `peak` lacks the arguments.
      resident: bytes of arrays the program does not see.
      capacity: bytes a program may use.
      compile_s: seconds of tracing and of the compiler.
      compile_cpu_s: processor time of that, on all cores: what counts where other programs run.
      host: bytes of host memory for what `trainer.remat='offload'` keeps there, per chip.
      flops, bytes, collectives: of one execution; 0 and empty where the compiler refused.
      compute_s, memory_s, network_s: least seconds of one execution by each of them.
      uncounted: kernels whose operations are not in `flops`.
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
    uncounted: tuple[str, ...] = ()
    at_least: bool = False

    @property
    def seconds(self) -> float:
        """Least seconds of one execution: the roofline."""
        return max(self.compute_s, self.memory_s, self.network_s)

    @property
    def bound(self) -> str:
        """The resource that bounds the roofline."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "network": self.network_s}
        return max(parts, key=lambda name: parts[name]) if self.seconds else ""

    @property
    def missing(self) -> float:
        """Bytes by which the program is known not to fit; 0 where it does, and may be 0 too where `at_least` is set."""
        return max(0.0, self.peak + self.resident - self.capacity)


# Measurements of one job on its topologies, by what tells its programs apart.
Known = MutableMapping[Any, "Measured"]


def measure(program: Program, chip: Chip, *, quick: bool = False, known: Known | None = None) -> Measured:
    """Compiles a program and measures its cost.

    Args:
      quick: compile with least effort: the peak is within a tenth of the true one, the counts are of another schedule.
      known: of the same job and topologies: a program that is there, of the same name and text, is not compiled again;
        others are added.
    """
    started, busy = time.perf_counter(), time.process_time()
    lowered = program.lower()
    if known is None:
        return _compiled(program, lowered, chip, quick, started, busy)
    text = hashlib.sha256(lowered.as_text().encode()).digest()  # the mesh's axes are in it
    key = (program.name, program.side, program.by_hand, quick, text)
    if key not in known:
        known[key] = _compiled(program, lowered, chip, quick, started, busy)
    found = known[key]
    refused = not found.bytes
    fits = not refused and found.peak + program.resident <= chip.hbm
    return dataclasses.replace(found, runs=program.runs, resident=program.resident, fits=fits)


def _compiled(program: Program, lowered: Any, chip: Chip, quick: bool, started: float, busy: float) -> Measured:
    """Compiles and measures what was lowered at so many seconds of the clock and of the processor."""
    options = {**dict(chip.compiler), **(QUICK if quick else {})} or None
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        asked = _asked(str(error))
        if asked is None:
            raise
        seconds = time.perf_counter() - started
        peak, at_least = asked
        return Measured(
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
    peak = float(memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes)
    if chip.name in GPUS:  # the peak of a CPU's program leaves its temporaries out
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = float(kept + memory.temp_size_in_bytes)
    cost = cost_of(compiled.as_text(), trips=program.trips)
    flops, size = cost.flops, cost.bytes
    if program.by_hand is not None:
        flops, size = program.by_hand.flops, program.by_hand.bytes
    inside = sum(c.bytes for c in cost.collectives if not c.crosses)
    across = sum(c.bytes for c in cost.collectives if c.crosses)
    return Measured(
        name=program.name,
        side=program.side,
        runs=program.runs,
        fits=peak + program.resident <= chip.hbm,
        peak=peak,
        resident=program.resident,
        capacity=chip.hbm,
        compile_s=seconds,
        compile_cpu_s=busy,
        host=float(memory.host_temp_size_in_bytes),
        flops=flops,
        bytes=size,
        collectives=cost.collectives,
        compute_s=flops / chip.flops,
        memory_s=size / chip.hbm_rate,
        network_s=inside / chip.ici_rate + across / chip.dcn_rate,
        uncounted=cost.uncounted if program.by_hand is None else (),
    )


def _asked(message: str) -> tuple[float, bool] | None:
    """Parses the compiler's out-of-HBM error: (bytes wanted, whether without arguments); None for any other failure."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    temporaries = re.search(r"\(([\d.]+)([KMGT])\) exceeds available", message)
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message) or temporaries
    if found is None:
        return None
    size = float(found.group(1)) * {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}[found.group(2)]
    return size, found is temporaries
