"""How a leaf crosses from one set of hosts to another: each byte once, from device to partner device.

Between hosts the link is the scarce thing, so nothing crosses twice: the leaf is first spread over the source devices
in tiles, one per port, every port sends its tile to its partner, and the target mesh spreads the tiles from there.
Ports are laid out like the target mesh where its size divides the source's (then the spreading is an all-gather among
replicas), like the source mesh where that is smaller, and in a row otherwise.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

GROUP = "group"
UNION = "union"


@dataclasses.dataclass(frozen=True)
class Ports:
    """The devices that send and receive.

    Attributes:
      source: source devices as (group, *ports); the devices of group 0 send.
      target: target devices as (group, *ports); the devices of group 0 receive.
      union: all devices in one row, source first.
      links: (sender, receiver), positions in `union`.
      like: 'source', 'target' or 'row': whose shape the ports have.
    """

    source: Mesh
    target: Mesh
    union: Mesh
    links: tuple[tuple[int, int], ...]
    like: str


def make_ports(source: Mesh, target: Mesh) -> Ports:
    """Pairs the devices of two disjoint meshes.

    Raises:
      ValueError: the meshes share devices.
    """
    before, after = list(source.devices.flat), list(target.devices.flat)
    if shared := {d.id for d in before} & {d.id for d in after}:
        raise ValueError(
            f"The collective transport needs disjoint meshes, devices {sorted(shared)} are in both: give the roles "
            "separate hosts, or all the same devices."
        )
    count = math.gcd(len(before), len(after))
    like = "target" if count == len(after) else "source" if count == len(before) else "row"
    names, shape = {
        "target": (target.axis_names, target.devices.shape),
        "source": (source.axis_names, source.devices.shape),
        "row": (("port",), (count,)),
    }[like]

    def grouped(devices: Sequence[Any]) -> Mesh:
        return Mesh(_grid(devices).reshape(-1, *shape), (GROUP, *names))

    links = tuple((i, len(before) + i) for i in range(count))
    return Ports(grouped(before), grouped(after), Mesh(_grid([*before, *after]), (UNION,)), links, like)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """How one leaf crosses.

    Attributes:
      tile: shape of what one port sends, under a leading dimension of 1.
      source_shape: shape of the leaf on the source devices under a leading dimension of groups, which are all alike.
      source: the sharding that gives every device of a group its tile.
      target_shape: the same on the target devices, where only the first group is filled.
      target: as `source`.
    """

    tile: tuple[int, ...]
    source_shape: tuple[int, ...]
    source: NamedSharding
    target_shape: tuple[int, ...]
    target: NamedSharding


def make_crossing(ports: Ports, shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> Crossing:
    """Tiles of a leaf: its own cuts on the side the ports are laid out like, then cut further by the unused axes.

    Dimensions that the other side cuts go first: the way there is then an exchange among few devices, where XLA would
    otherwise gather the whole leaf on each.
    """
    spec = {"source": source.spec, "target": target.spec, "row": Spec()}[ports.like]
    entries: list[tuple[str, ...]] = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    entries += [()] * (len(shape) - len(entries))
    sizes = ports.source.shape
    tile = [n // math.prod(sizes[a] for a in axes) for n, axes in zip(shape, entries, strict=True)]
    other = {"source": target.spec, "target": source.spec, "row": source.spec}[ports.like]
    cut_there = [d < len(other) and bool(other[d]) for d in range(len(shape))]
    order = sorted(range(len(shape)), key=lambda d: not cut_there[d])
    used = {axis for axes in entries for axis in axes}
    for axis, size in sizes.items():
        if axis == GROUP or axis in used or size == 1:
            continue
        for d in order:
            if tile[d] % size == 0:
                entries[d] += (axis,)
                tile[d] //= size
                break
    cut = Spec(GROUP, *(axes or None for axes in entries))
    return Crossing(
        tile=(1, *tile),
        source_shape=(sizes[GROUP], *shape),
        source=NamedSharding(ports.source, cut),
        target_shape=(ports.target.shape[GROUP], *shape),
        target=NamedSharding(ports.target, cut),
    )


def _grid(devices: Sequence[Any]) -> np.ndarray:
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid
