"""Computes checksums of sharded leaves, records them for each published version, and refuses weights that differ.

The checksum of a leaf is defined in podrl/storage/bits.py. Each device sums its own shard, so that no value of a leaf
crosses devices. Every replica is summed, so that a damaged copy is found.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jax.typing import ArrayLike
from jaxtyping import Array, UInt32

from podrl.storage import bits
from podrl.transfer.plan import ShardLayout
from podrl.types import Policy, PyTree

VERSIONS_KEPT = 8
# A row for each device W of the mesh, a column for each leaf l.
Sums = UInt32[Array, "W l"]


class WeightMismatchError(RuntimeError):
    """Arrived weights differ from the published weights, replicas differ, or a version is not the expected one.

    No rollout may use these weights.
    """


class ExpectedLeaves:
    """The leaves that one side of a transfer must hold, and their checksums.

    Attributes:
      shardings: sharding of every leaf.
      paths: place of every leaf in the tree, for messages.
    """

    def __init__(
        self,
        treedef: Any,
        paths: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype],
        shardings: Sequence[NamedSharding],
        *,
        summed_as: Sequence[np.dtype],
        side: str,
    ):
        """Describes the leaves of one side; the program of the checksums compiles at its first call.

        Args:
          treedef: structure of the tree.
          paths: place of each leaf in the tree, for messages.
          shapes: global shape of each leaf.
          dtypes: dtype of each leaf on this side.
          shardings: sharding of each leaf, all on one mesh.
          summed_as: dtype that each leaf is cast to before its checksum is computed.
          side: name of the side, for messages: 'source' or 'target'.

        Raises:
          ValueError: the leaves lie on several meshes.
        """
        self._treedef, self.paths, self._shapes, self._dtypes = treedef, paths, shapes, dtypes
        self.shardings = shardings
        meshes = {s.mesh for s in shardings}
        if len(meshes) > 1:
            raise ValueError(
                f"The {side} tree lies on {len(meshes)} meshes: place all leaves of a role on its one mesh."
            )
        self._layouts = [ShardLayout.of(s, len(shape)) for s, shape in zip(shardings, shapes, strict=True)]
        self._program: Any = lambda leaves: np.zeros((1, 0), np.uint32)
        if meshes:
            self._program = checksum_program(shapes, summed_as, shardings, cast(Mesh, meshes.pop()))

    def check(self, tree: PyTree, what: str) -> list[Array]:
        """Checks a tree's structure, shapes, dtypes and shardings; returns its leaves. `what` is its name in messages.

        Raises:
          ValueError: the structure, or a leaf's shape, dtype or sharding, is not the expected one.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self._treedef:
            raise ValueError(f"{what} have the structure {treedef}, but the plan was made for {self._treedef}.")
        rows = zip(leaves, self.paths, self._shapes, self._dtypes, self.shardings, strict=True)
        for leaf, path, shape, dtype, sharding in rows:
            same_place = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if leaf.shape != shape or leaf.dtype != dtype or not same_place:
                raise ValueError(
                    f"{what}: leaf {path} is {leaf.dtype}{list(leaf.shape)} on {leaf.sharding}, but the plan has "
                    f"{dtype}{list(shape)} on {sharding}: another layout needs a new plan (Publisher or PullReceiver)."
                )
        return leaves

    def tree(self, leaves: Sequence[Array]) -> PyTree:
        return jax.tree.unflatten(self._treedef, leaves)

    def sums(self, leaves: Sequence[Array]) -> Array:
        """Computes the checksums of all leaves on every device, as `Sums` replicated over the mesh.

        All processes of the mesh must call it.
        """
        return self._program(leaves)

    def fold(self, sums_Wl: Array) -> tuple[list[int], list[int]]:
        """Reads the result of `sums`; returns (checksum of every leaf, positions of leaves whose replicas differ)."""
        return fold(read(sums_Wl), self._layouts)

    def totals(self, sums_Wl: Any, version: int) -> list[int]:
        """Returns the checksum of every leaf that is about to be sent, from the result of `sums`.

        Raises:
          WeightMismatchError: replicas of a leaf differ.
        """
        totals, torn = self.fold(sums_Wl)
        if torn:
            raise WeightMismatchError(
                f"Version {version} cannot be published: replicas of {self.names(torn)} differ on the trainer mesh; "
                "the last update was not the same on all devices. Resume from the last checkpoint."
            )
        return totals

    def names(self, indices: Sequence[int]) -> str:
        return ", ".join(self.paths[i] for i in indices)


class Ledger:
    """Keeps the checksums of the last VERSIONS_KEPT published versions, and compares arrived weights with them."""

    def __init__(self, target: ExpectedLeaves):
        self._target = target
        self._published: OrderedDict[int, list[int]] = OrderedDict()

    def enter(self, version: int, totals: list[int]) -> None:
        """Records the checksum of every leaf of a version; forgets the oldest versions."""
        self._published[version] = totals
        self._published.move_to_end(version)
        while len(self._published) > VERSIONS_KEPT:
            self._published.popitem(last=False)

    def verify(self, policy: Policy) -> None:
        """Compares a policy's weights with the checksums recorded under its version.

        Raises:
          WeightMismatchError: the version is not recorded, or leaves differ; the error names them.
          ValueError: the weights do not have the structure, shapes, dtypes and shardings of the target.
        """
        if policy.version not in self._published:
            kept = ", ".join(map(str, self._published)) or "none"
            raise WeightMismatchError(
                f"The policy has version {policy.version}, but the published versions are {kept}: roll out with a "
                "policy that publish() or receive() returned."
            )
        leaves = self._target.check(policy.params, "Weights")
        totals, torn = self._target.fold(self._target.sums(leaves))
        sent = self._published[policy.version]
        bad = sorted({i for i, total in enumerate(totals) if total != sent[i]} | set(torn))
        if bad:
            raise WeightMismatchError(
                f"Version {policy.version} arrived changed on the rollout mesh: checksums differ for "
                f"{self._target.names(bad)}. Publish it again; if it recurs, check the devices and links of both."
            )


def read(values: ArrayLike) -> np.ndarray:
    """Copies checksums or a version to the host, even if jax's transfer guard forbids other copies to the host."""
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(values)


def checksum_program(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype], shardings: Sequence[NamedSharding], mesh: Mesh
) -> Callable[[Sequence[Array]], Sums]:
    """Builds a jitted program that computes the checksum of every leaf's shard on every device of `mesh`.

    Args:
      shapes: global shape of each leaf.
      dtypes: dtype that each leaf is cast to before its checksum is computed.
      shardings: sharding of each leaf on `mesh`.
      mesh: mesh of all leaves.

    Returns:
      A function of the leaves that returns one row per device in mesh order and one column per leaf, replicated over
      the mesh.
    """
    specs = [s.spec for s in shardings]
    layouts = [ShardLayout.of(s, len(shape)) for s, shape in zip(shardings, shapes, strict=True)]

    def local(shards: Sequence[Array]) -> Array:
        index = [jax.lax.axis_index(name) for name in mesh.axis_names]
        sums = [
            bits.shard_sum(shard.astype(dtype), _starts(layout, shard.shape, index))
            for shard, dtype, layout in zip(shards, dtypes, layouts, strict=True)
        ]
        return jnp.stack(sums)[None] if sums else jnp.zeros((1, 0), jnp.uint32)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=Spec(mesh.axis_names), check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, Spec()))


def fold(sums_Wl: UInt32[np.ndarray, "W l"], layouts: Sequence[ShardLayout]) -> tuple[list[int], list[int]]:
    """Combines the devices' sums; returns (checksum of every leaf, positions of leaves whose replicas differ)."""
    totals: list[int] = []
    torn: list[int] = []
    for i, layout in enumerate(layouts):
        by_block: dict[tuple[int, ...], int] = {}
        for block, value in zip(map(tuple, layout.blocks().tolist()), sums_Wl[:, i].tolist(), strict=True):
            if by_block.setdefault(block, value) != value and i not in torn:
                torn.append(i)
        totals.append(sum(by_block.values()) % 2**32)
    return totals, torn


def _starts(layout: ShardLayout, shape: Sequence[int], index: Sequence[Array]) -> list[Any]:
    """Returns where, in the whole leaf, the shard of the device at the mesh coordinates `index` begins."""
    starts: list[Any] = []
    for axes, size in zip(layout.dims, shape, strict=True):
        block: Any = 0
        for axis in axes:
            block = block * layout.mesh_shape[axis] + index[axis]
        starts.append(block * size)
    return starts
