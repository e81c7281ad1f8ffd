"""Carries out a transfer plan over any transport: bucket by bucket, with a few buckets in flight.

A transport cuts the leaves of a bucket into boxes, sends the boxes, and joins them into leaves at the target.
`Publisher` and `PullReceiver` compare the leaves that arrived with the leaves that were sent.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array

from podrl.transfer.plan import TransferPlan


@dataclasses.dataclass
class Move:
    """A transfer of one tree in progress.

    Attributes:
      leaves: source arrays in the order of the plan; None on a process that only receives.
      out: target arrays in the order of the plan; None for a leaf that is not made yet, and for every leaf on a process
        that only sends.
      replacing: arrays like the result, deleted or overwritten when the new arrays are made; None to replace nothing.
      donate: True to delete the source arrays once they have been read.
      kept: values that a transport keeps from bucket to bucket; dropped at the end of the move.
    """

    leaves: Sequence[Array] | None
    out: list[Any]
    replacing: Sequence[Array] | None = None
    donate: bool = False
    kept: dict[object, Any] = dataclasses.field(default_factory=dict)

    @property
    def sources(self) -> Sequence[Array]:
        """Returns the source arrays; only on a process that sends."""
        assert self.leaves is not None
        return self.leaves

    def put(self, chosen: Sequence[int], arrays: Sequence[Array]) -> Sequence[Array]:
        """Stores target arrays of the leaves `chosen`, complete or still lacking parts; returns them."""
        for i, array in zip(chosen, arrays, strict=True):
            self.out[i] = array
        return arrays


class Transport(Protocol):
    """Moves arrays from one mesh to another; `drive` calls it bucket by bucket.

    Attributes:
      plan: the plan whose buckets are moved.
      in_flight: number of buckets that may be staged at once.
      overwrites: True if `send` writes over `Move.replacing` itself; False if that memory must be freed before `send`.
    """

    plan: TransferPlan
    in_flight: int
    overwrites: bool

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> Any:
        """Cuts leaves into boxes and starts to send them, without waiting for their arrival.

        Args:
          move: the move that the bucket belongs to.
          chosen: positions of the bucket's leaves to move.
          part: number of the part of the bucket's only leaf; None if leaves move whole.

        Returns:
          The argument `sent` for `land`. All programs that can be queued before their input has arrived are queued.
        """
        ...

    def land(self, move: Move, sent: Any) -> None:
        """Waits until a sent bucket has arrived, is stored in `move.out`, and is no longer staged."""
        ...


def drive(
    transport: Transport,
    leaves: Sequence[Array] | None,
    *,
    donate: bool = False,
    replacing: Sequence[Array] | None = None,
) -> list[Array]:
    """Moves the leaves of a tree by a transport, and waits until the last leaf has arrived.

    Args:
      transport: transport made for the leaves' shardings.
      leaves: arrays placed as the plan says; None on a process outside the source mesh.
      donate: True to give the sources up: a leaf that need not move becomes the result itself, and every other leaf is
        deleted once it has been read.
      replacing: arrays like the result that are deleted or overwritten, bucket by bucket, when the new arrays are made.
        So a target device never holds more than the new leaves, the old leaves still to be replaced, and the staged
        buckets. None to replace nothing.

    Returns:
      The leaves on their target shardings, in the target dtypes, all complete; a list of None on a process outside the
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
    """Deletes the arrays at `indices`; queued programs can still read them. Does nothing if `arrays` is None."""
    if arrays is not None:
        for i in indices:
            arrays[i].delete()
