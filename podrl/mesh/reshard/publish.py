"""Publishing weights: every version moves by the one plan and is compared, leaf by leaf, with what was sent."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from podrl.mesh.reshard.checksum import checksum_program, fold
from podrl.mesh.reshard.collective import CollectiveTransport
from podrl.mesh.reshard.move import default_bucket_bytes, transport_for
from podrl.mesh.reshard.plan import Plan, make_plan
from podrl.mesh.reshard.receipt import ReceiptChannel
from podrl.mesh.reshard.relayout import RelayoutTransport
from podrl.types import Policy, PyTree

_VERSIONS_KEPT = 8


class WeightMismatchError(RuntimeError):
    """Weights on the rollout mesh are not those that were published; no rollout may use them."""


class Publisher:
    """Moves weights from the trainer mesh to the rollout mesh, one version after another.

    The plan and the programs are made once; from the second version on nothing compiles, and the only host reads are
    the checksums, 4 bytes per leaf and device. Where the two meshes belong to different processes of one cluster, every
    process of both makes a Publisher and calls `publish` in the same order; the checksums travel with the weights.

    Attributes:
      plan: the transfer plan; `plan.explain(bandwidth)` puts it in words.
    """

    def __init__(
        self,
        source: PyTree,
        target_shardings: PyTree,
        *,
        target_dtype: Any = None,
        bucket_bytes: int | None = None,
        transport: str = "auto",
    ):
        """Plans the transfer.

        Args:
          source: the parameters, or ShapeDtypeStructs with their shardings; all on one mesh.
          target_shardings: one NamedSharding per leaf, all on one mesh; it may share devices with the source mesh.
          target_dtype: what floating-point leaves are cast to before they move; None keeps theirs.
          bucket_bytes: bound on the bytes a device stages at once; by default 4 MiB on CPU, 64 MiB elsewhere.

          transport: 'auto', or 'collective' to go the way of several processes inside one (disjoint meshes only).

        Raises:
          ValueError: trees of different structure, several meshes on one side, or a leaf that does not divide.
        """
        leaves, self._treedef = jax.tree.flatten(source)
        self._sources = [leaf.sharding for leaf in leaves]
        self._targets = jax.tree.leaves(target_shardings)
        if bucket_bytes is None and self._targets:
            bucket_bytes = default_bucket_bytes(self._targets[0])
        self.plan: Plan = make_plan(source, target_shardings, dtype=target_dtype, bucket_bytes=bucket_bytes or 1)
        self._source_sums = self._sums(self._sources, "source")
        self._target_sums = self._sums(self._targets, "target")
        self._published: OrderedDict[int, list[int]] = OrderedDict()
        self._transport: Any
        self._receipts: ReceiptChannel | None = None
        everywhere = all(s.is_fully_addressable for s in [*self._sources, *self._targets])
        if leaves and (transport == "collective" or not (everywhere or RelayoutTransport.fits(self.plan))):
            self._transport = CollectiveTransport(self.plan, self._sources, self._targets)
            self._receipts = ReceiptChannel(len(leaves), self._sources[0].mesh, self._targets[0].mesh)
        else:
            self._transport = transport_for(self.plan, self._sources, self._targets)

    def publish(self, params: PyTree | None, version: int, *, donate: bool = False) -> Policy:
        """The parameters on the rollout mesh, in the rollout dtype, compared with what was sent.

        Args:
          params: the trainer's parameters, placed as planned. They survive unless donated. None on a process outside
            the trainer mesh.
          version: the training step that made them, the same on every process.
          donate: the parameters are given up: each leaf is deleted as soon as it has been read.

        Returns:
          The policy; on a process outside the rollout mesh one without weights (an empty tree).

        Raises:
          ValueError: the parameters are not those the plan was made for.
          WeightMismatchError: a leaf arrived changed, or another version than the one asked for.
        """
        leaves, sums_Wl = None, None
        if params is not None:
            leaves = self._check(params, [leaf.source_dtype for leaf in self.plan.leaves], self._sources, "Parameters")
            sums_Wl = self._source_sums(leaves)
        moved = self._transport.move(leaves, donate=donate)
        if self._receipts is not None:
            sums_Wl, sent_version = self._receipts.send(sums_Wl, version)
            if (sent := int(_read(sent_version))) != version:
                raise WeightMismatchError(
                    f"Version {version} was expected, version {sent} was sent: all processes must publish the same "
                    "versions in the same order."
                )
        totals, torn = fold(_read(sums_Wl), [leaf.source for leaf in self.plan.leaves])
        if torn:
            raise WeightMismatchError(
                f"Version {version} cannot be published: replicas of {self._names(torn)} differ on the trainer mesh; "
                "the last update was not the same on all devices. Resume from the last checkpoint."
            )
        if moved is None:
            return Policy(params={}, version=version)
        self._published[version] = totals
        while len(self._published) > _VERSIONS_KEPT:
            self._published.popitem(last=False)
        policy = Policy(params=jax.tree.unflatten(self._treedef, moved), version=version)
        self.verify(policy)
        return policy

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
        leaves = self._check(policy.params, [leaf.target_dtype for leaf in self.plan.leaves], self._targets, "Weights")
        totals, torn = fold(_read(self._target_sums(leaves)), [leaf.target for leaf in self.plan.leaves])
        sent = self._published[policy.version]
        bad = sorted({i for i, total in enumerate(totals) if total != sent[i]} | set(torn))
        if bad:
            raise WeightMismatchError(
                f"Version {policy.version} arrived changed on the rollout mesh: checksums differ for "
                f"{self._names(bad)}. Publish it again; if it recurs, check the devices and links of these meshes."
            )

    def _names(self, indices: Sequence[int]) -> str:
        return ", ".join(self.plan.leaves[i].path for i in indices)

    def _sums(self, shardings: Sequence[NamedSharding], side: str) -> Any:
        meshes = {s.mesh for s in shardings}
        if len(meshes) > 1:
            raise ValueError(
                f"The {side} tree lies on {len(meshes)} meshes: place all leaves of a role on its one mesh."
            )
        if not meshes:
            return lambda leaves: np.zeros((1, 0), np.uint32)
        shapes = [leaf.shape for leaf in self.plan.leaves]
        dtypes = [leaf.target_dtype for leaf in self.plan.leaves]
        return checksum_program(shapes, dtypes, shardings, cast(Mesh, meshes.pop()))

    def _check(
        self, tree: PyTree, dtypes: Sequence[np.dtype], shardings: Sequence[NamedSharding], what: str
    ) -> list[Array]:
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self._treedef:
            raise ValueError(f"{what} have the structure {treedef}, the plan was made for {self._treedef}.")
        for leaf, dtype, sharding, planned in zip(leaves, dtypes, shardings, self.plan.leaves, strict=True):
            same_place = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if leaf.shape != planned.shape or leaf.dtype != dtype or not same_place:
                raise ValueError(
                    f"{what}: leaf {planned.path} is {leaf.dtype}{list(leaf.shape)} on {leaf.sharding}, planned was "
                    f"{dtype}{list(planned.shape)} on {sharding}; make a new Publisher for another layout."
                )
        return leaves


def _read(sums_Wl: Any) -> np.ndarray:
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(sums_Wl)
