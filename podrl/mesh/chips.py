"""The figures of one chip of each TPU generation; the most operations per second of a device by its kind.

Figures of TPUs are those of the vendor's pages, per chip:
    https://cloud.google.com/tpu/docs/v4  .../v5e  .../v5p  .../v6e  .../tpu7x
HBM is what the compiler allots of it, measured by asking for more.
"""

import dataclasses
from typing import Any

GIB, MIB = 1 << 30, 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of one JAX device of a generation (tpu7x has two to a chip).

    Attributes:
      name: name of the chip as in the topology, e.g. 'v5e'.
      flops: bfloat16 operations per second of the matrix units.
      hbm: bytes a program may use.
      hbm_rate: bytes per second between HBM and the chip.
      ici_rate: bytes per second one device sends over all its links inside a slice.
      dcn_rate: bytes per second it sends between slices.
      dimensions: dimensions of a topology, 2 or 3.
      largest: devices of the largest slice there is.
      options: options that the topology needs besides its name.
      compiler: options of the compiler.
      cores: TensorCores of a device, which share HBM and no near memory.
      near: bytes of near memory of a core, as Pallas has them; only told where there are several.
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


# With the collectives of small programs on the SparseCores, libtpu 0.0.42 ends the process on a failed check.
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

# Generation by the beginning of what jax calls a device; the longer one wins.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7": "tpu7x",
}
# Dense bfloat16 operations per second, of the vendor's data sheets.
_GPUS = {"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12}


def chip_of(kind: str) -> Chip | None:
    """Returns the generation of a device by jax's `device_kind`; None where it is no TPU that is known."""
    return next((CHIPS[_KINDS[name]] for name in sorted(_KINDS, key=len, reverse=True) if kind.startswith(name)), None)


def peak_flops(kind: str) -> float:
    """Most bfloat16 operations per second of a device, by jax's `device_kind`; 0 where it is not known, as of a CPU."""
    known = {name: CHIPS[chip].flops for name, chip in _KINDS.items()} | _GPUS
    return next((known[name] for name in sorted(known, key=len, reverse=True) if kind.startswith(name)), 0.0)
