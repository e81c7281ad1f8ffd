"""The table of TPU machine shapes: node selectors and process counts for each row of the vendor's page.

Sources, by column:
  machine type, accelerator label, chips per host, shapes of GKE node pools
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
  VM types of one generation, largest slice
    https://cloud.google.com/tpu/docs/v4  .../v5e  .../v5p  .../v6e  .../tpu7x
  names that xpk accepts as --tpu-type
    xpk 1.16.0, xpk/core/system_characteristics.py (a test compares the two tables where xpk is installed)
"""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of TPU host.

    Attributes:
      name: name of the machine in `--trainer` and `--rollout`.
      accelerator: value of the node label cloud.google.com/gke-tpu-accelerator.
      machine_type: Compute Engine machine type.
      chips_per_host: number of chips of one VM; also the pod's google.com/tpu limit.
      dimensions: axes of a topology (2: '4x4', 3: '2x2x4').
      max_chips: number of chips in the largest slice.
      host: topology of one host, the smallest slice of this machine.
      xpk_prefix: xpk's name of the generation; '' if xpk does not know this machine.
    """

    name: str
    accelerator: str
    machine_type: str
    chips_per_host: int
    dimensions: int
    max_chips: int
    host: tuple[int, ...]
    xpk_prefix: str


_2D_SHAPES = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_3D_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("v4", "tpu-v4-podslice", "ct4p-hightpu-4t", 4, 3, 4096, (2, 2, 1), "v4"),
        Machine("v5e-1t", "tpu-v5-lite-podslice", "ct5lp-hightpu-1t", 1, 2, 1, (1, 1), ""),
        Machine("v5e", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t", 4, 2, 256, (2, 2), "v5litepod"),
        Machine("v5e-8t", "tpu-v5-lite-podslice", "ct5lp-hightpu-8t", 8, 2, 8, (2, 4), ""),
        Machine("v5p", "tpu-v5p-slice", "ct5p-hightpu-4t", 4, 3, 8960, (2, 2, 1), "v5p"),
        Machine("v6e-1t", "tpu-v6e-slice", "ct6e-standard-1t", 1, 2, 1, (1, 1), "v6e"),
        Machine("v6e", "tpu-v6e-slice", "ct6e-standard-4t", 4, 2, 256, (2, 2), "v6e"),
        Machine("v6e-8t", "tpu-v6e-slice", "ct6e-standard-8t", 8, 2, 8, (2, 4), ""),
        Machine("tpu7x-1t", "tpu7x", "tpu7x-standard-1t", 1, 3, 1, (1, 1, 1), "tpu7x"),
        Machine("tpu7x", "tpu7x", "tpu7x-standard-4t", 4, 3, 9216, (2, 2, 1), "tpu7x"),
    )
}


@dataclasses.dataclass(frozen=True)
class Slices:
    """A number of equal slices of one machine, as `v6e:2x4*2` asks for.

    Attributes:
      machine: machine of every host.
      topology: number of chips of a slice along each axis, such as '2x4'.
      count: number of slices.
    """

    machine: Machine
    topology: str
    count: int

    @property
    def chips(self) -> int:
        """Number of chips of one slice."""
        return math.prod(int(n) for n in self.topology.split("x"))

    @property
    def devices(self) -> int:
        """Number of JAX devices of all slices; a chip of tpu7x is two devices."""
        return self.chips * self.count * (2 if self.machine.name.startswith("tpu7x") else 1)

    @property
    def hosts(self) -> int:
        """Number of hosts, pods and processes of one slice."""
        return self.chips // self.machine.chips_per_host

    @property
    def xpk_type(self) -> str:
        """Returns the value of xpk's --tpu-type.

        Raises:
          ValueError: xpk has no such machine.
        """
        if not self.machine.xpk_prefix or (self.machine.name, self.topology) == ("v5e", "2x2"):
            raise ValueError(
                f"xpk 1.16 has no {self.machine.name}:{self.topology} ({self.machine.machine_type}): "
                "use launch.gke, a slice of v6e, or one of v5e with at least 8 chips."
            )
        return f"{self.machine.xpk_prefix}-{self.topology}"


def parse_slices(spec: str, flag: str) -> Slices:
    """Reads `MACHINE:TOPOLOGY` or `MACHINE:TOPOLOGY*COUNT`.

    Args:
      spec: text such as 'v6e:4x4' or 'v6e:2x4*2'.
      flag: flag that the spec came from, for messages.

    Raises:
      ValueError: the spec has another form, or names an unknown machine or a topology that the machine does not have.
    """
    match = re.fullmatch(r"([a-z0-9-]+):([0-9]+(?:x[0-9]+)+)(?:\*([0-9]+))?", spec.strip())
    if match is None:
        raise ValueError(f"{flag}={spec} is not MACHINE:TOPOLOGY[*SLICES]: write for example v6e:4x4 or v6e:2x4*2.")
    name, topology, count = match[1], match[2], int(match[3] or 1)
    if name not in MACHINES:
        raise ValueError(f"{flag}={spec} names machine {name!r}: known are {', '.join(MACHINES)}.")
    if count < 1:
        raise ValueError(f"{flag}={spec} asks for {count} slices: ask for at least 1.")
    machine = MACHINES[name]
    _check_topology(machine, tuple(int(n) for n in topology.split("x")), f"{flag}={spec}")
    return Slices(machine, topology, count)


def check_multislice(slices: Slices, what: str) -> None:
    """Refuses a cluster of several slices of one host each, because multislice joins only slices of several hosts.

    Raises:
      ValueError: there are several slices of one host; the message names them by `what`.
    """
    if slices.count > 1 and slices.hosts == 1:
        raise ValueError(
            f"{what} would make one cluster of {slices.count} slices of one host each, which multislice does not join: "
            f"ask for one slice of {slices.count * slices.chips} or more chips, or for slices of several hosts."
        )


def _check_topology(machine: Machine, shape: tuple[int, ...], what: str) -> None:
    if len(shape) != machine.dimensions:
        example = "x".join(map(str, machine.host))
        raise ValueError(
            f"{what}: a {machine.name} topology has {machine.dimensions} numbers, as {machine.name}:{example}."
        )
    if min(shape) < 1:
        raise ValueError(f"{what} has a side without chips: every number must be at least 1.")
    chips = math.prod(shape)
    if chips > machine.max_chips:
        raise ValueError(f"{what} has {chips} chips: the largest {machine.name} slice has {machine.max_chips}.")
    if shape == machine.host:
        return
    if machine.max_chips == machine.chips_per_host:
        raise ValueError(
            f"{what}: {machine.machine_type} comes as one host of {'x'.join(map(str, machine.host))} only."
        )
    if machine.dimensions == 2:
        if shape not in _2D_SHAPES:
            known = ", ".join("x".join(map(str, s)) for s in _2D_SHAPES)
            raise ValueError(f"{what}: {machine.name} comes as {known}.")
    elif shape not in _3D_SMALL and any(n % 4 for n in shape):
        small = ", ".join("x".join(map(str, s)) for s in _3D_SMALL)
        raise ValueError(f"{what}: {machine.name} comes as {small}, or with every number a multiple of 4.")
