"""The figures of each TPU generation, and the peak operations per second of a device by its kind.

Figures of TPUs are from the vendor's pages, which give them per chip:
    https://cloud.google.com/tpu/docs/v4  .../v5e  .../v5p  .../v6e  .../tpu7x
HBM is the part that the compiler lets a program use, measured by compiling programs that need more.
"""

import dataclasses
from typing import Any

GIB, MIB = 1 << 30, 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of one JAX device of a generation (a tpu7x chip has two devices).

    Attributes:
      name: name of the chip in names of topologies, such as 'v5e'.
      flops: bfloat16 operations per second of the matrix units.
      hbm: bytes of HBM that a program may use.
      hbm_rate: bytes per second between HBM and the chip.
      ici_rate: bytes per second that one device sends over all its links inside a slice.
      dcn_rate: bytes per second that one device sends between slices.
      dimensions: number of dimensions of a topology, 2 or 3.
      largest: number of devices of the largest slice.
      options: options that the topology needs besides its name.
      compiler: options of the compiler.
      cores: number of TensorCores of a device; they share HBM but not near memory (VMEM).
      near: bytes of near memory of one core, as Pallas reports them; only set if a device has several cores.
      host_rate: bytes per second between the host's memory and one device, in one direction. No vendor's page gives
        this rate for TPUs; the default is from https://jax-ml.github.io/scaling-book/tpus.
    """

    name: str
    flops: float
    hbm: int
    hbm_rate: float
    ici_rate: float
    dcn_rate: float
    dimensions: int
    largest: int
    options: tuple[tuple[str, Any], ...] = ()
    compiler: tuple[tuple[str, Any], ...] = ()
    cores: int = 1
    near: int = 0
    host_rate: float = 16e9


# Keeps collectives off the SparseCores: if small programs run collectives there, libtpu 0.0.42 ends the process on a
# failed check.
_TENSORCORE_COLLECTIVES = tuple(
    (f"xla_tpu_enable_sparse_core_collective_offload_{kind}", "false")
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v4", 275e12, int(30.75 * GIB), 1228e9, 300e9, 6.25e9, 3, 4096, (("chip_config_name", "megacore"),)),
            cores=2,
            near=16 * MIB,
        ),
        Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9, 3.125e9, 2, 256),
        Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9, 6.25e9, 3, 8960, cores=2, near=64 * MIB),
        Chip("v6e", 918e12, int(31.25 * GIB), 1638e9, 400e9, 12.5e9, 2, 256),
        Chip("tpu7x", 1153e12, int(94.75 * GIB), 3690e9, 300e9, 6.25e9, 3, 9216, compiler=_TENSORCORE_COLLECTIVES),
    )
}

# Generation by the beginning of jax's `device_kind`; the longest match wins.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7": "tpu7x",
}
# Dense bfloat16 operations per second, from the vendor's data sheets.
_GPUS = {"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12}


def chip_of(kind: str) -> Chip | None:
    """Returns the figures of a device by jax's `device_kind`; None if it is not a known TPU."""
    return next((CHIPS[_KINDS[name]] for name in sorted(_KINDS, key=len, reverse=True) if kind.startswith(name)), None)


def peak_flops(kind: str) -> float:
    """Returns the peak bfloat16 operations per second of a device by jax's `device_kind`; 0 if not known, as on CPU."""
    known = {name: CHIPS[chip].flops for name, chip in _KINDS.items()} | _GPUS
    return next((known[name] for name in sorted(known, key=len, reverse=True) if kind.startswith(name)), 0.0)
