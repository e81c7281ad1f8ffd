"""TPU generations: the figures of one chip, and the devices of a topology without the machine.

Figures are those of the vendor's pages, per chip:
    https://cloud.google.com/tpu/docs/v4  .../v5e  .../v5p  .../v6e  .../tpu7x
HBM is what the compiler allots of it, measured by asking for more.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import MutableMapping
from typing import Any

from podrl.config import nearest

GIB = 1 << 30
_MOST_SLICES = 512


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of one JAX device of a generation (tpu7x has two to a chip).

    Attributes:
      name: as in the topology, e.g. 'v5e'.
      flops: bfloat16 operations per second of the matrix units.
      hbm: bytes a program may use.
      hbm_rate: bytes per second between HBM and the chip.
      ici_rate: bytes per second one device sends over all its links inside a slice.
      dcn_rate: bytes per second it sends between slices.
      dimensions: of a topology, 2 or 3.
      largest: devices of the largest slice there is.
      options: what the topology needs besides its name.
      compiler: options of the compiler.
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


# With the collectives of small programs on the SparseCores, libtpu 0.0.42 ends the process on a failed check.
_TENSORCORE_COLLECTIVES = tuple(
    (f"xla_tpu_enable_sparse_core_collective_offload_{kind}", "false")
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, int(30.75 * GIB), 1228e9, 300e9, 6.25e9, 3, 4096, (("chip_config_name", "megacore"),)),
        Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9, 3.125e9, 2, 256),
        Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9, 6.25e9, 3, 8960),
        Chip("v6e", 918e12, int(31.25 * GIB), 1638e9, 400e9, 12.5e9, 2, 256),
        Chip("tpu7x", 1153e12, int(94.75 * GIB), 3690e9, 300e9, 6.25e9, 3, 9216, compiler=_TENSORCORE_COLLECTIVES),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one shape, as in 'v5e:2x4' or, for two slices, 'v5e:2x4*2'."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")

    def devices(self, *, copies: int = 1) -> list[Any]:
        """Returns the devices of `copies` such topologies side by side, for compiling only; slices one after the other.

        Raises:
          ValueError: a shape no machine of the generation has.
        """
        from jax.experimental import topologies

        options = dict(self.chip.options)
        if math.prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices * copies > 1:
            options["num_slices"] = self.slices * copies
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        except Exception as error:
            raise ValueError(f"{name} is no TPU topology: {str(error).splitlines()[0]}") from error
        return sorted(found.devices, key=lambda d: (d.process_index, d.id))


def parse_topology(text: str, *, key: str) -> Topology:
    """Parses 'v5e:2x4', 'v5p:2x2x4', 'v6e:16x16', or with '*2' behind for two slices.

    Args:
      key: the flag it came from, for errors.

    Raises:
      ValueError: an unknown generation, or a shape of the wrong number of dimensions.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"{key}={text!r} must look like v5e:2x4, or v5e:2x4*2 for two slices.")
    name, sizes, slices = found.groups()
    if name not in CHIPS:
        raise ValueError(f"{key}={text!r} names the generation {name!r}.{nearest(name, CHIPS)}")
    chip, shape = CHIPS[name], tuple(int(n) for n in sizes.split("x"))
    if len(shape) != chip.dimensions or min(shape) < 1 or int(slices or 1) < 1:
        example = "2x4" if chip.dimensions == 2 else "2x2x4"
        raise ValueError(f"{key}={text!r}: a {name} slice has {chip.dimensions} sizes, as in {name}:{example}.")
    if math.prod(shape) > chip.largest or int(slices or 1) > _MOST_SLICES:
        raise ValueError(
            f"{key}={text!r}: the largest {name} slice has {chip.largest} chips, and a job at most {_MOST_SLICES} "
            f"slices; this would be {slices or 1} of {math.prod(shape)} chips."
        )
    return Topology(chip, shape, int(slices or 1))


def prepare(env: MutableMapping[str, str], purpose: str = "") -> None:
    """Prepares the environment, before jax is imported, to compile for TPUs on a machine without any.

    Args:
      env: usually os.environ.
      purpose: what the compiler is for, a sentence of the message where it is not installed.

    Raises:
      ValueError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"This needs the TPU compiler, which is not installed: pip install 'podrl[tpu]'. {purpose}".rstrip()
        )
    env.setdefault("TPU_SKIP_MDS_QUERY", "1")
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    env.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    env.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # any: libtpu warns where it cannot find one
    # Several processes may compile at once: no hardware is opened.
    env.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    env["JAX_PLATFORMS"] = "cpu"
    # Programs for absent chips can be written to jax's cache, but not read back: it would warn and compile them anyway.
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
