"""Which device sends which box to which, in rounds: in a round each sends at most one box and receives at most one.

Between hosts the link is the scarce thing, so nothing crosses twice: a leaf that the target mesh replicates lands cut
further over the axes that replicate it, and is spread from there inside the target mesh.
"""

import dataclasses
import functools
import math
from typing import cast

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Int

from podrl.mesh.reshard.plan import LeafPlan

# A smaller shard is sent to every replica: another collective on the target mesh would take longer.
_SPREAD_BYTES = 1 << 16
Links = tuple[tuple[int, int], ...]


def landing(shape: tuple[int, ...], itemsize: int, source: NamedSharding, target: NamedSharding) -> NamedSharding:
    """Where a leaf arrives on the target mesh: its target sharding, cut further by the axes that replicate it.

    Dimensions that the source cuts go first, so that a target device reads from few sources.
    """
    sizes = target.mesh.shape
    entries: list[tuple[str, ...]] = [() if e is None else (e,) if isinstance(e, str) else e for e in target.spec]
    entries += [()] * (len(shape) - len(entries))
    tile = [n // math.prod(sizes[a] for a in axes) for n, axes in zip(shape, entries, strict=True)]
    if math.prod(tile) * itemsize <= _SPREAD_BYTES:
        return target
    order = sorted(range(len(shape)), key=lambda d: not (d < len(source.spec) and source.spec[d]))
    used = {axis for axes in entries for axis in axes}
    for axis, size in sizes.items():
        fits = [d for d in order if tile[d] % size == 0]
        if axis in used or size == 1 or not fits:
            continue
        entries[fits[0]] += (str(axis),)
        tile[fits[0]] //= size
    return NamedSharding(cast(Mesh, target.mesh), Spec(*(axes or None for axes in entries)))


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of one leaf.

    Attributes:
      links: for each round the pairs (source position, target position), by source.
      slot_WR: which slot of its shard a source device sends in each round.
      round_WM: in which round each slot of a target device's shard arrives.
    """

    links: tuple[Links, ...]
    slot_WR: Int[np.ndarray, "W R"]
    round_WM: Int[np.ndarray, "W M"]

    @classmethod
    def of(cls, leaf: LeafPlan) -> "Rounds":
        """The rounds of a leaf, as few as its busiest device has boxes to send or to receive."""
        colour_E = _colours(
            leaf.source_WM.astype(np.int64).tobytes(), leaf.source_WM.shape, len(leaf.source.device_ids)
        )
        round_WM = colour_E.reshape(leaf.source_WM.shape)
        links: list[Links] = []
        slot_WR = np.zeros((len(leaf.source.device_ids), int(round_WM.max()) + 1), np.int32)
        for r in range(slot_WR.shape[1]):
            target_E, slot_E = np.nonzero(round_WM == r)
            source_E = leaf.source_WM[target_E, slot_E]
            slot_WR[source_E, r] = leaf.slot_WM[target_E, slot_E]
            links.append(tuple(sorted(zip(source_E.tolist(), target_E.tolist(), strict=True))))
        return cls(tuple(links), slot_WR, round_WM)


@functools.lru_cache(maxsize=256)
def _colours(source_WM_bytes: bytes, shape: tuple[int, int], sources: int) -> Int[np.ndarray, " E"]:
    """A round for every edge (target w, its m-th read), so that no device has two edges in a round.

    Edges of a bipartite graph can be coloured with as many colours as the largest degree (Koenig 1916): an edge takes a
    colour free at both ends; if there is none, two colours change places along a path first.
    """
    source_E = np.frombuffer(source_WM_bytes, np.int64).tolist()
    targets, per_target = shape
    degree = max(per_target, int(np.bincount(source_E, minlength=1).max()))
    # at[v][c] is the edge of colour c at vertex v; sources first, then targets. -1 is none.
    at = np.full((sources + targets, degree), -1, np.int64).tolist()
    colour = [-1] * len(source_E)

    def ends(edge: int) -> tuple[int, int]:
        return source_E[edge], sources + edge // per_target

    for edge in range(len(source_E)):
        u, v = ends(edge)
        a, b = at[u].index(-1), at[v].index(-1)
        if at[v][a] >= 0:
            # The path of colours a, b, a, ... from v cannot end in u: swap it, and a is free at both ends.
            path, vertex, wanted = [], v, a
            while (step := at[vertex][wanted]) >= 0:
                path.append(step)
                vertex = sum(ends(step)) - vertex
                wanted = b if wanted == a else a
            for step in path:
                for end in ends(step):
                    if at[end][colour[step]] == step:
                        at[end][colour[step]] = -1
            for step in path:
                colour[step] = b if colour[step] == a else a
                for end in ends(step):
                    at[end][colour[step]] = step
        colour[edge] = a
        at[u][a] = at[v][a] = edge
    return np.array(colour, np.int64)
