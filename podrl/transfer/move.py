"""Carries out a transfer plan over any transport: bucket by bucket, a few of them in flight.

A transport cuts the leaves of a bucket, sends them, and puts them together at the target. What is compared on arrival
is the business of `Publisher` and `PullReceiver`.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array

from podrl.transfer.plan import Plan


@dataclasses.dataclass
class Move:
    """A transfer of one tree in progress.

    Attributes:
      leaves: the source arrays in the order of the plan; None on a process that only receives.
      out: the target arrays as far as they are made; None where there is none, on a process that only sends always.
      replacing: arrays like the result whose memory is given up for it; None where there are none.
      donate: whether the source arrays are given up.
      kept: values that a transport keeps from bucket to bucket, dropped at the end.
    """

    leaves: Sequence[Array] | None
    out: list[Any]
    replacing: Sequence[Array] | None = None
    donate: bool = False
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def sources(self) -> Sequence[Array]:
        """Returns the source arrays, on processes that send."""
        assert self.leaves is not None
        return self.leaves

    def put(self, chosen: Sequence[int], arrays: Sequence[Array]) -> Sequence[Array]:
        """Stores target arrays, whole or in part; returns them."""
        for i, array in zip(chosen, arrays, strict=True):
            self.out[i] = array
        return arrays


class Transport(Protocol):
    """Moves arrays from mesh to mesh in some way; `drive` calls it bucket by bucket.

    Attributes:
      plan: the plan whose buckets are moved.
      in_flight: number of buckets that may be staged at once.
      overwrites: `send` writes over `Move.replacing` itself, where other transports need that memory freed first.
    """

    plan: Plan
    in_flight: int
    overwrites: bool

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> Any:
        """Cuts the leaves `chosen` and starts sending them; one part of one leaf if a part is given.

        Returns:
          What `land` needs. Programs that can be queued before their input is there have been.
        """
        ...

    def land(self, move: Move, sent: Any) -> None:
        """Waits until a sent bucket is at the target, stored in `move.out`, and no longer staged."""
        ...


def drive(
    transport: Transport,
    leaves: Sequence[Array] | None,
    *,
    donate: bool = False,
    replacing: Sequence[Array] | None = None,
) -> list[Any]:
    """Moves the leaves by a transport.

    Args:
      transport: made for their shardings.
      leaves: arrays placed as the plan says; None on a process outside the source mesh.
      donate: the sources are given up: a leaf that needs no change is handed on, the others are deleted once read.
      replacing: arrays like the result that are given up, bucket by bucket, as their successors are made: a target
        never holds more than the new leaves, the old ones still to be replaced, and what is staged.

    Returns:
      The leaves on their target shardings, in the target dtypes, all there; a list of None on a process outside the
      target mesh.
    """
    plan = transport.plan
    move = Move(leaves, [None] * len(plan.leaves), replacing, donate)
    flying: deque[tuple[Any, Sequence[int]]] = deque()

    def land_first() -> None:
        sent, read = flying.popleft()
        transport.land(move, sent)
        if donate:
            give_up(leaves, read)

    for bucket in plan.buckets:
        if donate and leaves is not None:
            unchanged = [i for i in bucket.leaves if plan.leaves[i].stays]
            move.put(unchanged, [leaves[i] for i in unchanged])
        chosen = tuple(i for i in bucket.leaves if move.out[i] is None)
        if not transport.overwrites:
            give_up(replacing, bucket.leaves)
        for part in range(bucket.parts) if chosen else ():
            if len(flying) == transport.in_flight:
                land_first()
            sent = transport.send(move, chosen, part if bucket.parts > 1 else None)
            flying.append((sent, chosen if part == bucket.parts - 1 else ()))
        give_up(replacing, bucket.leaves)
    while flying:
        land_first()
    return move.out


def give_up(arrays: Sequence[Array] | None, indices: Sequence[int]) -> None:
    """Frees the memory of some of the arrays, where there are any, once the programs that read them have."""
    if arrays is not None:
        for i in indices:
            arrays[i].delete()
