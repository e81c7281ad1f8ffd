"""Builds meshes from mesh strings of the configuration, and splits devices between roles."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from podrl.types import JaxDevice

AXES = ("data", "expert", "fsdp", "seq", "tensor")
EXPERT = "expert"  # cuts rows, and spreads the experts of each layer
SEQ = "seq"  # cuts rows along time
_ALWAYS = ("data", "fsdp", "tensor")  # axes of every mesh; a mesh has another axis only if its size is larger than 1
REST = -1
# Other systems' names of the axes.
_ALIASES = {"dp": "data", "ep": EXPERT, "tp": "tensor", "model": "tensor", "sp": SEQ, "cp": SEQ}
Sizes = tuple[int, int, int, int, int]


def parse_mesh(spec: str, *, key: str = "mesh", auto: str = "fsdp=-1") -> Sizes:
    """Parses a mesh string into the sizes of the axes ("data", "expert", "fsdp", "seq", "tensor").

    Args:
      spec: a mesh string, such as 'fsdp=4', 'fsdp=4,seq=4' or 'auto'; axes left out have size 1; -1 stands for all
        devices left over. Other systems' names of the axes are understood: dp, ep, tp, model, sp, cp.
      key: the configuration key that the string came from, for errors.
      auto: the mesh string that 'auto' stands for in this role.

    Returns:
      The sizes, at most one of them -1.

    Raises:
      ValueError: an axis is unknown or repeated, a size is neither positive nor -1, or more than one size is -1.
    """
    text = auto if spec.strip() == "auto" else spec
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        alias, _, value = (p.strip() for p in part.partition("="))
        name = _ALIASES.get(alias, alias)
        if name not in AXES:
            raise ValueError(
                f"{key}={spec!r} names axis {name!r}: give axes and sizes such as fsdp=4,tensor=2 (axes are "
                f"{', '.join(AXES)}), or the word 'auto'."
            )
        if name in sizes:
            raise ValueError(f"{key}={spec!r} gives axis {name!r} twice: keep one of them.")
        try:
            sizes[name] = int(value)
        except ValueError:
            raise ValueError(
                f"{key}={spec!r} gives {name!r} the size {value!r}: write an integer, as {name}=2."
            ) from None
        if sizes[name] < 1 and sizes[name] != REST:
            raise ValueError(f"{key}={spec!r} gives {name!r} the size {value}: sizes are positive, or -1 for the rest.")
    if list(sizes.values()).count(REST) > 1:
        raise ValueError(f"{key}={spec!r} has two sizes of -1: only one axis can take the rest of the devices.")
    data, expert, fsdp, seq, tensor = (sizes.get(axis, 1) for axis in AXES)
    return data, expert, fsdp, seq, tensor


def sort_devices(devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """Sorts devices in the same order on all processes: by slice, process, task, then id (ids have gaps on CPU).

    Under Pathways one process has all devices; there the order by slices and tasks keeps devices with fast links
    together.
    """

    def place(device: JaxDevice) -> tuple[int, ...]:
        names = ("slice_index", "process_index", "virtual_task_index")
        return (*(getattr(device, name, None) or 0 for name in names), device.id)

    return sorted(devices, key=place)


def make_mesh(
    spec: str, devices: Sequence[JaxDevice] | None = None, *, key: str = "mesh", auto: str = "fsdp=-1"
) -> Mesh:
    """Builds the mesh that a string describes, over all of `devices`.

    Args:
      spec: mesh string of the whole mesh; see `parse_mesh`.
      devices: every device of the role, in any order; None for all devices of the job.
      key: the configuration key that the string came from, for errors.
      auto: the mesh string that 'auto' stands for in this role.

    Returns:
      A mesh with the axes ("data", "expert", "fsdp", "seq", "tensor"), without expert and seq if their size is 1. The
      devices are in the order of `sort_devices`, the last axis fastest.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    ordered = sort_devices(jax.devices() if devices is None else devices)
    sizes = _fill(spec, parse_mesh(spec, key=key, auto=auto), ordered, key)
    grid = np.empty(len(ordered), dtype=object)
    grid[:] = ordered
    return _named(grid.reshape(sizes))


def check_decodes(mesh: Mesh | str, *, key: str) -> None:
    """Checks that a mesh, or a mesh string, does not cut rows along time, which the decoding engine cannot do.

    Raises:
      ValueError: the size of axis "seq" is not 1.
    """
    seq = parse_mesh(mesh, key=key)[AXES.index(SEQ)] if isinstance(mesh, str) else mesh.shape.get(SEQ, 1)
    if seq != 1:
        raise ValueError(
            f"{key}={mesh if isinstance(mesh, str) else describe_mesh(mesh)!r} cuts rows along time (seq={seq}), but "
            "decoding makes one token of a row at a time: give it data, expert, fsdp and tensor only; seq is for the "
            "meshes of roles.trainer, roles.critic and roles.reward."
        )


def make_decoding_mesh(spec: str, devices: Sequence[JaxDevice], *, key: str) -> Mesh:
    """Builds the mesh of a model that only generates; 'auto' puts all devices on the data axis.

    Args:
      spec: mesh string; see `parse_mesh`.
      devices: every device of the mesh, in any order.
      key: name of the argument that the string came from, for errors.

    Raises:
      ValueError: axis "seq" is larger than 1, or the sizes do not multiply to the number of devices.
    """
    check_decodes(spec, key=key)
    return make_mesh(spec, devices, key=key, auto="data=-1")


def with_own_axes(mesh: Mesh) -> Mesh | None:
    """Renames and reorders a mesh's axes to podrl's; None if a name is unknown or two names mean the same axis."""
    if set(_ALWAYS) <= set(mesh.axis_names) and mesh.axis_names == tuple(a for a in AXES if a in mesh.axis_names):
        return mesh
    names = [_ALIASES.get(str(name), str(name)) for name in mesh.axis_names]
    if not set(names) <= set(AXES) or len(set(names)) < len(names):
        return None
    order = [names.index(axis) for axis in AXES if axis in names]
    sizes = [mesh.devices.shape[names.index(axis)] if axis in names else 1 for axis in AXES]
    return _named(mesh.devices.transpose(order).reshape(sizes))


def split_devices(
    devices: Sequence[JaxDevice], trainer_spec: str, rollout_spec: str
) -> tuple[list[JaxDevice], list[JaxDevice]]:
    """Splits one process's devices between trainer and rollout; a single device serves both.

    Several devices are split into disjoint parts, the trainer's first. If both mesh strings leave a size open, each
    role gets about half.

    Args:
      devices: all devices of the process, in any order.
      trainer_spec: mesh string of the trainer; see `parse_mesh`.
      rollout_spec: mesh string of the rollout.

    Returns:
      (trainer devices, rollout devices), each in the order of `sort_devices`.

    Raises:
      ValueError: the two meshes need more or fewer devices than there are.
    """
    ordered = sort_devices(devices)
    trainer = parse_mesh(trainer_spec, key="roles.trainer.mesh", auto="fsdp=-1")
    rollout = parse_mesh(rollout_spec, key="roles.rollout.mesh", auto="data=-1")
    if len(ordered) == 1:
        return ordered, list(ordered)
    count = _split_point(trainer, rollout, len(ordered))
    first, second = ordered[:count], ordered[count:]
    if not first or not second or not (_fits(trainer, len(first)) and _fits(rollout, len(second))):
        raise ValueError(
            f"roles.trainer.mesh={trainer_spec!r} needs {_need(trainer)} devices and roles.rollout.mesh="
            f"{rollout_spec!r} needs {_need(rollout)}, {_hosts(ordered)} {len(ordered)}: the two must add up to all "
            "devices; change either mesh, write -1 for an open size, or set roles.colocated=True to share the devices."
            f"{_faking('roles.', _least(trainer) + _least(rollout), ordered)}"
        )
    return first, second


def set_aside(
    devices: Sequence[JaxDevice], spec: str, *, shared: str, key: str = "mesh", hosts: int = 0
) -> tuple[list[JaxDevice], list[JaxDevice]]:
    """Sets the last devices of every host aside for a mesh of their own.

    Args:
      devices: devices of all hosts, or of the only host that is visible.
      spec: mesh string without open sizes; see `parse_mesh`.
      shared: value of `key` for a mesh without devices of its own, for errors.
      key: the configuration key that the string came from, for errors.
      hosts: number of hosts, with equally many devices, if only one of them is visible; 0 for the hosts of `devices`.

    Returns:
      (devices left, devices set aside), each in the order of `sort_devices`.

    Raises:
      ValueError: a size is open, or the mesh takes all devices of a host, or not equally many devices of every host.
    """
    sizes = parse_mesh(spec, key=key)
    if REST in sizes:
        raise ValueError(
            f"{key}={spec!r} leaves a size open: write a number for each, or {shared!r} for no devices of its own."
        )
    ordered = sort_devices(devices)
    count, seen = math.prod(sizes), sorted({d.process_index for d in ordered})
    hosts = hosts or len(seen)
    if count % hosts:
        raise ValueError(
            f"{key}={spec!r} needs {count} devices, and each of {hosts} hosts must give the same number of them: "
            f"the product of the mesh's sizes must be a multiple of {hosts}."
        )
    share = count // hosts
    of_host = [[d for d in ordered if d.process_index == host] for host in seen]
    if share >= (least := min(map(len, of_host))):
        raise ValueError(
            f"{key}={spec!r} takes {share} devices of every host, and one host has only {least}. At least one device "
            f"of each host must be left: make the mesh smaller, or set {key}={shared!r} to share devices."
        )
    left, taken = ([d for own in of_host for d in own[part]] for part in (slice(None, -share), slice(-share, None)))
    return left, taken


def share_of_mesh(spec: str, devices: Sequence[JaxDevice], hosts: int, *, key: str = "mesh") -> Mesh:
    """Builds one host's part of a mesh over several hosts; the devices of the other hosts need not be visible.

    Hosts that hold a copy of the weights together count as one host, with the devices of all of them.

    Args:
      spec: mesh string of the whole mesh; see `parse_mesh`. 'auto' is 'data=-1'.
      devices: devices of this host.
      hosts: number of hosts of the role, which have equally many devices.
      key: the configuration key that the string came from, for errors.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or one copy of the weights needs several hosts.
    """
    sizes, total = parse_mesh(spec, key=key, auto="data=-1"), hosts * len(devices)
    if not _fits(sizes, total):
        have = f"{hosts} hosts have {len(devices)} each" if hosts > 1 else f"the host has {len(devices)}"
        raise ValueError(f"{key} {spec} needs {_need(sizes)} devices, and {have}.")
    fixed = _least(sizes)
    data, *inner = (total // fixed if n == REST else n for n in sizes)
    if data % hosts:
        raise ValueError(
            f"{key}={spec!r} spreads one copy of the weights (expert x fsdp x seq x tensor = {math.prod(inner)} devices"
            f") over several hosts of {len(devices)} devices. Each host works on its own, so this product must divide "
            f"{len(devices)}."
        )
    sizes = zip(AXES, (data // hosts, *inner), strict=True)
    return make_mesh(",".join(f"{axis}={n}" for axis, n in sizes), devices, key=key)


def local_mesh(mesh: Mesh, process: int, *, key: str = "mesh") -> Mesh:
    """Returns the part of a mesh that one process works with: the rows along "data" that have devices of the process.

    If a row lies on several processes (a replica), all of them work with this row together.

    Args:
      mesh: mesh of a role, over all its processes.
      process: index of the process in its jax.distributed cluster.
      key: the configuration key that the mesh came from, for errors.

    Raises:
      ValueError: the process has no devices in the mesh, or a process that shares a row has devices in another row.
    """
    process_DX = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices).reshape(len(mesh.devices), -1)
    rows_D = (process_DX == process).any(axis=1)
    members = set(process_DX[rows_D].flat)
    shared = not (process_DX[rows_D] == process).all()
    if not rows_D.any() or (shared and rows_D.sum() > 1) or members & set(process_DX[~rows_D].flat):
        inner, mine = process_DX.shape[1], int((process_DX == process).sum())
        raise ValueError(
            f"{key}={describe_mesh(mesh)!r} gives a copy of the weights expert x fsdp x seq x tensor = {inner} "
            f"devices, and process {process} has {mine}: one of these numbers must divide the other, so that no "
            "process has parts of two copies."
        )
    return Mesh(mesh.devices[rows_D], mesh.axis_names)


def spreads_copies(mesh: Mesh) -> bool:
    """Returns True if a copy of the weights, which is a row of axis "data", lies on several processes."""
    rows = mesh.devices.reshape(len(mesh.devices), -1)
    return any(len({getattr(d, "process_index", 0) for d in row}) > 1 for row in rows)


def check_one_host(mesh: Mesh, *, key: str) -> None:
    """Refuses a mesh over several hosts, for a model that each host must be able to use alone.

    Raises:
      ValueError: the mesh has devices of several hosts.
    """
    if len(hosts := {d.process_index for d in mesh.devices.flat}) > 1:
        raise ValueError(
            f"{key}={describe_mesh(mesh)!r} spreads one copy of the weights over {len(hosts)} hosts, and each of them "
            "needs a whole copy: give this model a mesh of its own such as 'data=N' on N hosts."
        )


def describe_mesh(mesh: Mesh) -> str:
    """Describes the axes larger than 1: 'fsdp=2,tensor=2', or 'one device'."""
    return ",".join(f"{a}={n}" for a, n in mesh.shape.items() if n > 1) or "one device"


def _named(devices: np.ndarray) -> Mesh:
    """Builds the mesh of a grid over AXES; leaves out axes of size 1 that not every mesh has."""
    absent = [i for i, axis in enumerate(AXES) if axis not in _ALWAYS and devices.shape[i] == 1]
    return Mesh(devices.squeeze(tuple(absent)), tuple(axis for i, axis in enumerate(AXES) if i not in absent))


def _split_point(trainer: tuple[int, ...], rollout: tuple[int, ...], total: int) -> int:
    """Computes the number of the trainer's devices; the caller must check that the rest fits the rollout."""
    fixed_trainer, fixed_rollout = _least(trainer), _least(rollout)
    if REST not in trainer:
        return fixed_trainer
    if REST not in rollout:
        return total - fixed_rollout
    for taken in range((total + 1) // 2, 0, -1):
        if taken % fixed_trainer == 0 and (total - taken) % fixed_rollout == 0:
            return taken
    return total // 2


def _least(sizes: tuple[int, ...]) -> int:
    """Returns the smallest number of devices that a mesh with these sizes needs."""
    return math.prod(n for n in sizes if n != REST)


def _fits(sizes: tuple[int, ...], count: int) -> bool:
    fixed = _least(sizes)
    return count % fixed == 0 if REST in sizes else count == fixed


def _need(sizes: tuple[int, ...]) -> str:
    fixed = _least(sizes)
    return f"a multiple of {fixed}" if REST in sizes else str(fixed)


def _fill(spec: str, sizes: tuple[int, ...], devices: Sequence[JaxDevice], key: str) -> tuple[int, ...]:
    """Replaces the size -1 by the size with which the mesh uses all devices.

    Raises:
      ValueError: the sizes do not fit the number of devices.
    """
    if not devices or not _fits(sizes, len(devices)):
        raise ValueError(
            f"{key} {spec} needs {_need(sizes)} devices, {_hosts(devices)} {len(devices)}: "
            f"the sizes of {key} must multiply to the number of devices (-1 takes the rest)."
            f"{_faking(key, _least(sizes), devices)}"
        )
    fixed = _least(sizes)
    return tuple(len(devices) // fixed if n == REST else n for n in sizes)


def _faking(key: str, needed: int, devices: Sequence[JaxDevice]) -> str:
    """Returns a sentence for an error message: how to get enough fake CPU devices; '' for other devices."""
    fakes = all(isinstance(device, jax.Device) and device.platform == "cpu" for device in devices)
    if needed <= len(devices) or not fakes:
        return ""
    if key.startswith("roles."):
        return f" CPU devices are faked by --config.fake_devices={needed}."
    return f" CPU devices are faked by XLA_FLAGS=--xla_force_host_platform_device_count={needed} before the command."


def _hosts(devices: Sequence[JaxDevice]) -> str:
    """Names hosts in errors: 'host 0 has' or 'hosts 2-3 have'."""
    hosts = sorted({d.process_index for d in devices})
    if not hosts:
        return "there are"
    if len(hosts) == 1:
        return f"host {hosts[0]} has"
    dense = hosts[-1] - hosts[0] + 1 == len(hosts)
    return f"hosts {hosts[0]}-{hosts[-1]} have" if dense else f"hosts {', '.join(map(str, hosts))} have"
