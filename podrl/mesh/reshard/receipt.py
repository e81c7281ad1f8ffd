"""What travels beside the weights between processes: their checksums and version, for the receiver to compare."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int, UInt32

from podrl.mesh.reshard.collective import CollectiveTransport
from podrl.mesh.reshard.plan import Placed, make_plan


class ReceiptChannel:
    """Carries one receipt per publish from the source mesh to the target mesh."""

    def __init__(self, num_leaves: int, source: Mesh, target: Mesh):
        """Args are the number of leaves whose checksums travel, and the two disjoint meshes."""
        self._source = NamedSharding(source, Spec())
        place = NamedSharding(target, Spec())
        receipt = [
            Placed((source.size, num_leaves), jnp.dtype(jnp.uint32), self._source),
            Placed((), jnp.dtype(jnp.int32), self._source),
        ]
        plan = make_plan(receipt, [place, place])
        self._transport = CollectiveTransport(plan, [self._source] * 2, [place] * 2)

    def send(self, sums_Wl: UInt32[Array, "W l"] | None, version: int) -> tuple[UInt32[Array, "W l"], Int[Array, ""]]:
        """The sender's checksums and version.

        Args:
          sums_Wl: replicated over the source mesh; None on a process outside it.
          version: what a process of the source mesh sends.

        Returns:
          What was received; on a process that only sends, what it sent.
        """
        sent = None
        if sums_Wl is not None:
            # Not device_put: over several processes it would compare the value on all of them, receivers included.
            mesh = cast(Mesh, self._source.mesh)
            here = [jax.device_put(np.int32(version), d) for d in mesh.local_devices]
            sent = [sums_Wl, jax.make_array_from_single_device_arrays((), self._source, here)]
        received = self._transport.move(sent) or sent
        assert received is not None, "a process of neither mesh has no part in publishing"
        return received[0], received[1]
