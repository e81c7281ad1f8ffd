"""Topologies to plan for: devices of TPU slices and GPU machines for the compiler, without the machines."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import MutableMapping
from typing import Any

from podrl.config import install, nearest, plural
from podrl.mesh.chips import CHIPS, GIB, Chip

_MOST_SLICES = 512
# Slices that GKE offers: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. In 3 dimensions GKE
# also offers every slice whose sizes are multiples of 4.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


# GPUs of one machine, by the vendor's data sheets: https://www.nvidia.com/en-us/data-center/h100/ (SXM), .../l4/. The
# operations are dense bfloat16, and the memory is without the driver's share. The rate at which GPUs exchange bytes is
# NVLink's in one direction for h100, and PCIe's for l4.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Chip("h100", 989e12, int(79.1 * GIB), 3350e9, 450e9, 50e9, 1, 8, host_rate=64e9),
        Chip("l4", 121e12, int(22.1 * GIB), 300e9, 32e9, 12.5e9, 1, 8, host_rate=32e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one shape, as in 'v5e:2x4' or, for two slices, 'v5e:2x4*2'; or GPUs of one machine, as in 'h100:8'.

    Attributes:
      chip: figures of one device.
      shape: number of chips along each dimension of a slice; for GPUs their number.
      slices: number of slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")

    @property
    def predicted(self) -> bool:
        """True if there is no compiler for these devices, so that programs are compiled for CPU devices instead."""
        return self.chip.name in GPUS

    def devices(self, *, copies: int = 1) -> list[Any]:
        """Returns the devices of `copies` copies of this topology, slice after slice; they are for compiling only.

        Raises:
          ValueError: the TPU compiler refuses the topology.
        """
        import jax
        from jax.experimental import topologies

        if self.predicted:
            return jax.devices("cpu")[: self.shape[0] * copies]
        options = dict(self.chip.options)
        if math.prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices * copies > 1:
            options["num_slices"] = self.slices * copies
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        except Exception as error:
            raise ValueError(f"The TPU compiler refuses the topology {name}: {str(error).splitlines()[0]}") from error
        return sorted(found.devices, key=lambda d: (d.process_index, d.id))


def parse_topology(text: str, *, key: str) -> Topology:
    """Parses 'v5e:2x4', 'v5p:2x2x4' or 'v6e:16x16', with '*2' at the end for two slices; or 'h100:8'.

    Args:
      text: the topology.
      key: flag that the topology came from, for messages.

    Raises:
      ValueError: the generation is unknown, the shape has a wrong number of dimensions, or no slice has this shape.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"{key}={text!r} must look like v5e:2x4, v5e:2x4*2 for two slices, or h100:8 for GPUs.")
    name, sizes, slices = found.groups()
    if name in GPUS:
        if "x" in sizes or slices or not 1 <= int(sizes) <= GPUS[name].largest:
            most = GPUS[name].largest
            raise ValueError(f"{key}={text!r} must be one machine with 1 to {most} GPUs, such as {name}:{most}.")
        return Topology(GPUS[name], (int(sizes),))
    if name not in CHIPS:
        raise ValueError(f"{key}={text!r} names the generation {name!r}.{nearest(name, {**CHIPS, **GPUS})}")
    chip, shape = CHIPS[name], tuple(int(n) for n in sizes.split("x"))
    if len(shape) != chip.dimensions or min(shape) < 1 or int(slices or 1) < 1:
        example = "2x4" if chip.dimensions == 2 else "2x2x4"
        raise ValueError(
            f"{key}={text!r}: a {name} slice has {chip.dimensions} sizes of at least 1, as in {name}:{example}, and a "
            "job at least 1 slice."
        )
    if math.prod(shape) > chip.largest or int(slices or 1) > _MOST_SLICES:
        raise ValueError(
            f"{key}={text!r}: the largest {name} slice has {chip.largest} chips, and a job at most {_MOST_SLICES} "
            f"slices; this topology has {plural(int(slices or 1), 'slice')} of {math.prod(shape)} chips."
        )
    shapes = _FLAT if chip.dimensions == 2 else (*_SMALL, *([(1, 1, 1)] if name == "tpu7x" else []))
    if shape not in shapes and not (chip.dimensions == 3 and all(n % 4 == 0 for n in shape)):
        known = ", ".join("x".join(map(str, one)) for one in shapes)
        more = ", or with every size a multiple of 4" if chip.dimensions == 3 else ""
        raise ValueError(f"{key}={text!r} is not a slice that GKE makes: {name} comes as {known}{more}.")
    return Topology(chip, shape, int(slices or 1))


def prepare(env: MutableMapping[str, str], purpose: str = "", *, gpus: int = 0) -> None:
    """Prepares the environment, before jax is imported, to compile for TPUs or GPUs that this machine does not have.

    Args:
      env: environment to change, usually os.environ.
      purpose: sentence of the message if the TPU compiler is not installed; it names the programs that the command
        would compile.
      gpus: number of GPUs of the larger machine if the plan is for GPUs; 0 for TPUs.

    Raises:
      ValueError: libtpu is not installed, and the plan is for TPUs.
    """
    if gpus:  # CPU devices in place of GPUs: for the trainer, for the rollout, and for a move that needs other devices
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={3 * gpus}".strip()
        env["JAX_PLATFORMS"] = "cpu"
        return
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"This needs the TPU compiler, which is not installed: {install('tpu')}. {purpose}".rstrip())
    env.setdefault("TPU_SKIP_MDS_QUERY", "1")
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    env.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    env.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # any type will do: libtpu warns if it finds none
    # libtpu normally admits one process at a time. Here several may compile at once, because no hardware is opened.
    env.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    env["JAX_PLATFORMS"] = "cpu"
    # jax can write programs for absent chips to its cache, but not read them: it would warn, and compile them again.
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
