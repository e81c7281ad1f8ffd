"""TPU topologies: their devices, without the machine, for the compiler."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import MutableMapping
from typing import Any

from podrl.config import nearest
from podrl.mesh.chips import CHIPS, Chip

_MOST_SLICES = 512
# Slices that GKE makes: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. In 3 dimensions also every
# one whose sizes are multiples of 4.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


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
      ValueError: an unknown generation, a shape of the wrong number of dimensions, or one that no slice has.
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
    made = _FLAT if chip.dimensions == 2 else (*_SMALL, *([(1, 1, 1)] if name == "tpu7x" else []))
    if shape not in made and not (chip.dimensions == 3 and all(n % 4 == 0 for n in shape)):
        known = ", ".join("x".join(map(str, one)) for one in made)
        more = ", or with every size a multiple of 4" if chip.dimensions == 3 else ""
        raise ValueError(f"{key}={text!r} is no slice that GKE makes: {name} comes as {known}{more}.")
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
