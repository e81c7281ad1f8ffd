"""The transports of one process that sees both meshes: device-to-device copies, or a new layout on the same devices.

Arrays never pass through the host. Each box is sent by itself: on CPU, packing boxes into one flat buffer per link was
measured to take 4 to 10 times as long as the copies that it saves.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding
from jaxtyping import Array

from podrl.transfer.boxes import Cutter, Joiner
from podrl.transfer.move import Move
from podrl.transfer.plan import TransferPlan, named
from podrl.types import JaxDevice


class LocalTransport:
    """Sends boxes from device to device.

    For each bucket, one program on the source mesh casts every shard and cuts it into boxes, one batched `device_put`
    sends each box over its link, and one program on the target mesh joins the boxes into shards.
    """

    in_flight = 2
    overwrites = False

    def __init__(self, plan: TransferPlan, sources: Sequence[Sharding], targets: Sequence[Any]):
        """Prepares the boxes of a plan; programs compile at the first move.

        Args:
          plan: plan made from `sources` and `targets`.
          sources: sharding of each leaf before the move, in the plan's order, all on one mesh.
          targets: sharding of each leaf after the move, all on one mesh.
        """
        self.plan = plan
        before, after = (_devices(shardings) for shardings in (sources, targets))
        # A box that stays on its device could share the source's memory, and the source may be donated later: copy it.
        self._cutter = Cutter(plan.leaves, before, copies=not set(before).isdisjoint(after))
        self._joiner = Joiner(plan.leaves, after, targets)
        self._targets = after
        # By leaf: the (slot, source device id) that each slot of each target device reads; slots vary fastest.
        self._reads: list[list[tuple[int, int]]] = []
        for leaf in plan.leaves:
            ids = [leaf.source.device_ids[w] for w in leaf.source_WM.ravel().tolist()]
            self._reads.append(list(zip(leaf.slot_WM.ravel().tolist(), ids, strict=True)))

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> list[Array]:
        """Queues cutting, sending and joining; returns arrays that are ready when the bucket has arrived."""
        boxes = self._cutter.cut(move.sources, chosen, part)
        counts = {i: len(self._reads[i]) // len(self._targets) for i in chosen}  # number of slots of a target shard
        pieces = [boxes[i][slot][device] for i in chosen for slot, device in self._reads[i]]
        devices = [device for i in chosen for device in self._targets for _ in range(counts[i])]
        moved = iter(jax.device_put(pieces, devices))
        arrived = {i: [{} for _ in range(counts[i])] for i in chosen}
        for i in chosen:
            for device in self._targets:
                for slot in arrived[i]:
                    slot[device.id] = next(moved)
        return self._joiner.join(arrived, part, move.out)

    def land(self, move: Move, sent: list[Array]) -> None:
        jax.block_until_ready(sent)


class RelayoutTransport:
    """Casts and changes the layout by a jitted identity; both meshes hold the same devices in the same order."""

    in_flight = 2
    overwrites = False

    def __init__(self, plan: TransferPlan, sources: Sequence[Sharding], targets: Sequence[Any]):
        """Takes the arguments of `LocalTransport`."""
        self.plan = plan.unsplit()
        self._targets = targets
        self._programs: dict[tuple[int, ...], Callable[[Sequence[Array]], Sequence[Array]]] = {}

    @staticmethod
    def fits(plan: TransferPlan) -> bool:
        """Returns True if every leaf stays on the same devices in the same order."""
        return all(leaf.source.device_ids == leaf.target.device_ids for leaf in plan.leaves)

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> Sequence[Array]:
        return move.put(chosen, self.program(chosen)([move.sources[i] for i in chosen]))

    def land(self, move: Move, sent: Sequence[Array]) -> None:
        jax.block_until_ready(sent)

    def program(self, chosen: tuple[int, ...]) -> Any:
        """Returns a jitted function that copies the leaves with the indices `chosen` to the target's dtypes and layout.

        No copy shares memory with its source.
        """
        dtypes = [self.plan.leaves[i].target_dtype for i in chosen]

        def relayout(arrays: Sequence[Array]) -> list[Array]:
            # Without the copy jit would return an unchanged leaf's own buffer, which its owner may donate later.
            return [jnp.copy(x).astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

        if chosen not in self._programs:
            self._programs[chosen] = jax.jit(relayout, out_shardings=[self._targets[i] for i in chosen])
        return self._programs[chosen]


def _devices(shardings: Sequence[Sharding]) -> list[JaxDevice]:
    """Lists the devices of the mesh that all the shardings lie on, in the mesh's order."""
    return list(cast(Mesh, named(shardings[0]).mesh).devices.flat) if shardings else []
