"""Publishing weights: every version moves by the one plan and is compared, leaf by leaf, with what was sent."""

from typing import Any

import jax

from podrl.mesh.reshard.collective import CollectiveTransport
from podrl.mesh.reshard.ledger import Expected, Ledger, WeightMismatchError, read
from podrl.mesh.reshard.move import default_bucket_bytes, transport_for
from podrl.mesh.reshard.plan import Plan, make_plan
from podrl.mesh.reshard.receipt import ReceiptChannel
from podrl.mesh.reshard.relayout import RelayoutTransport
from podrl.types import Policy, PyTree

__all__ = ["Publisher", "WeightMismatchError"]


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
          bucket_bytes: bound on the bytes a device stages at once; by default 16 MiB on CPU (32 inside one process),
            64 MiB elsewhere.
          transport: 'auto', or 'collective' to go the way of several processes inside one (disjoint meshes only).

        Raises:
          ValueError: trees of different structure, several meshes on one side, or a leaf that does not divide.
        """
        leaves, treedef = jax.tree.flatten(source)
        sources = [leaf.sharding for leaf in leaves]
        targets = jax.tree.leaves(target_shardings)
        everywhere = all(s.is_fully_addressable for s in [*sources, *targets])
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(targets, sources if everywhere and transport == "auto" else ())
        self.plan: Plan = make_plan(source, target_shardings, dtype=target_dtype, bucket_bytes=bucket_bytes)
        paths = [leaf.path for leaf in self.plan.leaves]
        shapes = [leaf.shape for leaf in self.plan.leaves]
        before, after = ([getattr(leaf, k) for leaf in self.plan.leaves] for k in ("source_dtype", "target_dtype"))
        self._source = Expected(treedef, paths, shapes, before, sources, summed_as=after, side="source")
        self._target = Expected(treedef, paths, shapes, after, targets, summed_as=after, side="target")
        self._ledger = Ledger(self._target)
        self._transport: Any
        self._receipts: ReceiptChannel | None = None
        if leaves and (transport == "collective" or not (everywhere or RelayoutTransport.fits(self.plan))):
            self._transport = CollectiveTransport(self.plan, sources, targets)
            self._receipts = ReceiptChannel(len(leaves), sources[0].mesh, targets[0].mesh)
        else:
            self._transport = transport_for(self.plan, sources, targets)

    def publish(
        self, params: PyTree | None, version: int, *, donate: bool = False, replacing: PyTree | None = None
    ) -> Policy:
        """The parameters on the rollout mesh, in the rollout dtype, compared with what was sent.

        Args:
          params: the trainer's parameters, placed as planned. They survive unless donated. None on a process outside
            the trainer mesh.
          version: the training step that made them, the same on every process.
          donate: the parameters are given up: each leaf is deleted as soon as it has been read.
          replacing: weights of an earlier policy that nobody uses any more, not even where this call fails: their
            memory is taken for the new ones, leaf by leaf. None leaves all earlier policies as they are.

        Returns:
          The policy; on a process outside the rollout mesh one without weights (an empty tree).

        Raises:
          ValueError: the parameters, or those to replace, are not those the plan was made for.
          WeightMismatchError: a leaf arrived changed, or another version than the one asked for.
        """
        leaves, sums_Wl = None, None
        if params is not None:
            leaves = self._source.check(params, "Parameters")
            sums_Wl = self._source.sums(leaves)
        old = None if replacing is None else self._target.check(replacing, "Weights to replace")
        moved = self._transport.move(leaves, donate=donate, replacing=old)
        if self._receipts is not None:
            sums_Wl, sent_version = self._receipts.send(sums_Wl, version)
            if (sent := int(read(sent_version))) != version:
                raise WeightMismatchError(
                    f"Version {version} was expected, version {sent} was sent: all processes must publish the same "
                    "versions in the same order."
                )
        totals = self._source.totals(sums_Wl, version)
        if moved is None:
            return Policy(params={}, version=version)
        self._ledger.enter(version, totals)
        policy = Policy(params=self._target.tree(moved), version=version)
        self.verify(policy)
        return policy

    def verify(self, policy: Policy) -> None:
        """Compares a policy's weights with what was published under its version.

        Raises:
          WeightMismatchError: another version, or leaves that differ, by name.
        """
        self._ledger.verify(policy)
