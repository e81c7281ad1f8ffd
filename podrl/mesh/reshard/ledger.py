"""What was published under each version, and the refusal of weights that are not it."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from podrl.mesh.reshard.checksum import checksum_program, fold
from podrl.mesh.reshard.plan import Layout
from podrl.types import Policy, PyTree

VERSIONS_KEPT = 8


class WeightMismatchError(RuntimeError):
    """Weights on the rollout mesh are not those that were published; no rollout may use them."""


class Expected:
    """The leaves one side of a transfer must hold, and their checksums.

    Attributes:
      shardings: of every leaf.
      paths: its place in the tree, for messages.
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
        """`summed_as` are the dtypes leaves are cast to for their checksums; `side` is a word for messages.

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
        self._layouts = [Layout.of(s, len(shape)) for s, shape in zip(shardings, shapes, strict=True)]
        self._program: Any = lambda leaves: np.zeros((1, 0), np.uint32)
        if meshes:
            self._program = checksum_program(shapes, summed_as, shardings, cast(Mesh, meshes.pop()))

    def check(self, tree: PyTree, what: str) -> list[Array]:
        """The leaves of a tree that is as expected.

        Raises:
          ValueError: another structure, shape, dtype or place.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self._treedef:
            raise ValueError(f"{what} have the structure {treedef}, the plan was made for {self._treedef}.")
        rows = zip(leaves, self.paths, self._shapes, self._dtypes, self.shardings, strict=True)
        for leaf, path, shape, dtype, sharding in rows:
            same_place = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if leaf.shape != shape or leaf.dtype != dtype or not same_place:
                raise ValueError(
                    f"{what}: leaf {path} is {leaf.dtype}{list(leaf.shape)} on {leaf.sharding}, planned was "
                    f"{dtype}{list(shape)} on {sharding}; make a new Publisher for another layout."
                )
        return leaves

    def tree(self, leaves: Sequence[Array]) -> PyTree:
        return jax.tree.unflatten(self._treedef, leaves)

    def sums(self, leaves: Sequence[Array]) -> Any:
        """Checksums of the leaves on every device, the same on all of them; all processes of the mesh call it."""
        return self._program(leaves)

    def fold(self, sums_Wl: Any) -> tuple[list[int], list[int]]:
        """(checksum of every leaf, leaves whose replicas differ)."""
        return fold(read(sums_Wl), self._layouts)

    def totals(self, sums_Wl: Any, version: int) -> list[int]:
        """The checksum of every leaf about to be sent.

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
    """Checksums of the last versions that were sent, and what arrived measured against them."""

    def __init__(self, target: Expected):
        self._target = target
        self._published: OrderedDict[int, list[int]] = OrderedDict()

    def enter(self, version: int, totals: list[int]) -> None:
        """Notes the checksums of a version; old versions are forgotten."""
        self._published[version] = totals
        self._published.move_to_end(version)
        while len(self._published) > VERSIONS_KEPT:
            self._published.popitem(last=False)

    def verify(self, policy: Policy) -> None:
        """Compares a policy's weights with what was published under its version.

        Raises:
          WeightMismatchError: another version, or leaves that differ, by name.
        """
        if policy.version not in self._published:
            kept = ", ".join(map(str, self._published)) or "none"
            raise WeightMismatchError(
                f"Policy carries version {policy.version}, published versions are {kept}: roll out with a policy that "
                "publish() returned."
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


def read(values: Any) -> np.ndarray:
    """Checksums or a version on the host: the only values of a publish that are read there."""
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(values)
