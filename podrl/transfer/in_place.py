"""The transport for CPU devices of one process, which share a memory: targets read the source's shards in place.

For every box of a target shard, the target device gets an alias of the source shard that holds the box: an array over
the same memory. One program per bucket then cuts, casts and joins in one pass; nothing is staged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.transfer.boxes import cut_as, joined
from podrl.transfer.move import Move
from podrl.transfer.plan import TransferPlan, named


class InPlaceTransport:
    """Moves leaves by programs of the target, which read the source's memory and overwrite replaced arrays."""

    in_flight = 4
    overwrites = True  # writing over old arrays spares the page faults of fresh memory

    def __init__(self, plan: TransferPlan, sources: Sequence[Sharding], targets: Sequence[Sharding]):
        """Takes the arguments of `LocalTransport`."""
        self.plan = plan.unsplit()
        self._mesh: Any = named(targets[0]).mesh if targets else None
        self._place: Any = NamedSharding(self._mesh, Spec(self._mesh.axis_names)) if targets else None
        self._source_MW = [leaf.source_WM.T.tolist() for leaf in plan.leaves]
        self._words = [cut_as(leaf.source_dtype) for leaf in plan.leaves]
        self._reads: list[_Read] = []
        self._programs: dict[object, Callable[..., list[Array]]] = {}
        for leaf, target in zip(plan.leaves, targets, strict=True):
            corners = tuple(tuple(map(tuple, corner_Wi)) for corner_Wi in leaf.corners().swapaxes(0, 1).tolist())
            dtypes = leaf.source_dtype, leaf.target_dtype
            self._reads.append(_Read(named(target).spec, leaf.target_slots, leaf.box, corners, *dtypes))

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> list[Any]:
        with jax.transfer_guard("allow"):  # the guard would refuse aliases, although nothing is copied
            lent = [self.aliases(i, move.sources[i]) for i in chosen]
        old = [] if move.replacing is None else [move.replacing[i] for i in chosen]
        if (key := (chosen, bool(old))) not in self._programs:
            self._programs[key] = _program(self._mesh, tuple(self._reads[i] for i in chosen), bool(old))
        return [move.put(chosen, self._programs[key](old, lent)), lent]

    def land(self, move: Move, sent: list[Any]) -> None:
        jax.block_until_ready(sent[0])
        sent.clear()  # no alias may outlive the move: jit would copy a donated array that still has an alias

    def aliases(self, i: int, leaf: Array) -> list[Array]:
        """Returns one array per slot of a target shard; a device's part is the source shard that the slot reads."""
        shards = {s.device.id: np.asarray(s.data).view(self._words[i])[None] for s in leaf.addressable_shards}
        views = [shards[device] for device in self.plan.leaves[i].source.device_ids]
        shape = (self._mesh.size, *views[0].shape[1:])
        lent = [lambda index, w=source_W: views[w[index[0].start or 0]] for source_W in self._source_MW[i]]
        return [jax.make_array_from_callback(shape, self._place, shard, dtype=self._words[i]) for shard in lent]


class _Read(NamedTuple):
    """The boxes of a leaf that target devices read: box m of device w begins at `corner_MWi[m][w]` of its source shard.

    The source shard is lent to the device: the device reads it through an alias.
    """

    spec: Spec
    slots: tuple[int, ...]
    box: tuple[int, ...]
    corner_MWi: tuple[tuple[tuple[int, ...], ...], ...]
    source_dtype: np.dtype
    target_dtype: np.dtype

    def shard(self, lent: Sequence[Array], w: Array) -> Array:
        pairs = zip(lent, self.corner_MWi, strict=True)
        words = joined([self._box(shard[0], corner_Wi, w) for shard, corner_Wi in pairs], self.slots)
        values = words if words.dtype == self.source_dtype else jax.lax.bitcast_convert_type(words, self.source_dtype)
        return values.astype(self.target_dtype)

    def _box(self, shard: Array, corner_Wi: Sequence[tuple[int, ...]], w: Array) -> Array:
        if len(set(corner_Wi)) == 1:  # the corner is the same on all devices, so the slice can be static
            return jax.lax.slice(shard, corner_Wi[0], [at + n for at, n in zip(corner_Wi[0], self.box, strict=True)])
        return jax.lax.dynamic_slice(shard, list(jnp.asarray(corner_Wi, jnp.int32)[w]), self.box)


@functools.lru_cache(maxsize=1024)
def _program(mesh: Mesh, reads: tuple[_Read, ...], overwriting: bool) -> Callable[..., list[Array]]:
    """Returns the jitted program of a bucket: (leaves to overwrite, if any; aliases by leaf and slot) -> leaves."""

    def read(old: Sequence[Array], lent: Sequence[Sequence[Array]]) -> list[Array]:
        del old  # donated: only its memory is used
        w = jax.lax.axis_index(mesh.axis_names)
        return [leaf.shard(shards, w) for leaf, shards in zip(reads, lent, strict=True)]

    specs = [leaf.spec for leaf in reads]
    specs_in = (specs if overwriting else [], Spec(mesh.axis_names))
    mapped = jax.shard_map(read, mesh=mesh, in_specs=specs_in, out_specs=specs, check_vma=False)
    return jax.jit(mapped, out_shardings=[NamedSharding(mesh, s) for s in specs], donate_argnums=0, keep_unused=True)
