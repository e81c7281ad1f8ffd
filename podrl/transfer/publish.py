"""Moves trees between meshes by the transport that fits the meshes; `Publisher` also checks every leaf on arrival."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.sharding import Sharding
from jax.typing import DTypeLike

from podrl.transfer.collective import CollectiveTransport, ReceiptChannel
from podrl.transfer.in_place import InPlaceTransport
from podrl.transfer.local import LocalTransport, RelayoutTransport
from podrl.transfer.move import Transport, drive
from podrl.transfer.pathways import PathwaysTransport, chosen, platforms
from podrl.transfer.plan import TransferPlan, default_bucket_bytes, in_one_memory, make_plan, named
from podrl.transfer.verify import ExpectedLeaves, Ledger, WeightMismatchError, read
from podrl.types import Policy, PyTree

__all__ = ["Publisher", "WeightMismatchError", "reshard", "transport_for"]


def transport_for(plan: TransferPlan, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Transport:
    """Chooses the transport between two meshes; this process must be able to address all of their devices.

    Args:
      plan: plan made from `sources` and `targets`.
      sources, targets: sharding of each leaf before and after the move; each side lies on one mesh.
    """
    pathways = chosen(platforms())
    if not pathways and in_one_memory(sources, targets):
        return InPlaceTransport(plan, sources, targets)
    if RelayoutTransport.fits(plan):
        return RelayoutTransport(plan, sources, targets)
    return (PathwaysTransport if pathways else LocalTransport)(plan, sources, targets)


_kept_transport = functools.lru_cache(maxsize=64)(transport_for)


def reshard(
    tree: PyTree,
    shardings: PyTree,
    *,
    dtype: DTypeLike | None = None,
    donate: bool = False,
    on_ready: Callable[[float], None] | None = None,
) -> PyTree:
    """Moves a tree to other shardings; keeps the plan and the programs, so that an equal move later compiles nothing.

    Args:
      tree: tree of arrays placed by NamedSharding, or on single devices.
      shardings: tree with one target sharding per leaf.
      dtype: type that floating-point leaves are cast to; None keeps their type.
      donate: True to give the sources up: a leaf that need not move becomes the result itself, and every other leaf is
        deleted once it has been read.
      on_ready: function that is called with the seconds that the move took, once every leaf has arrived; None to call
        nothing.

    Returns:
      A tree of the same structure on the target shardings.

    Raises:
      ValueError: the trees have different structures, or a dimension of a leaf does not divide into its shards.
    """
    began = time.perf_counter()
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths, leaves = [jax.tree_util.keystr(path) for path, _ in flat], [leaf for _, leaf in flat]
    targets = treedef.flatten_up_to(shardings)
    out: list[Array | None] = [None] * len(leaves)
    groups: dict[object, list[int]] = {}  # by (source mesh, target mesh): positions of the leaves
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        groups.setdefault((named(leaf.sharding).mesh, named(target).mesh), []).append(i)
    for group in groups.values():
        before, after = tuple(leaves[i].sharding for i in group), tuple(targets[i] for i in group)
        mine, bucket_bytes = [leaves[i] for i in group], default_bucket_bytes(after, before)
        plan = make_plan(mine, list(after), dtype=dtype, bucket_bytes=bucket_bytes, paths=[paths[i] for i in group])
        moved = drive(_kept_transport(plan, before, after), mine, donate=donate)
        for i, array in zip(group, moved, strict=True):
            out[i] = array
    if on_ready is not None:
        on_ready(time.perf_counter() - began)
    return jax.tree.unflatten(treedef, out)


class Publisher:
    """Moves weights from the trainer mesh to the rollout mesh, one version after another.

    The plan and the programs are made once. From the second version on nothing compiles, and the host reads only the
    checksums, 4 bytes per leaf and device, and with the collective transport the version. If the two meshes belong to
    different processes of one cluster, every process of both meshes makes a Publisher and calls `publish` in the same
    order; the checksums travel with the weights.

    Attributes:
      plan: the transfer plan; `plan.explain(bandwidth)` describes it in words.
    """

    def __init__(
        self,
        source: PyTree,
        target_shardings: PyTree,
        *,
        target_dtype: DTypeLike | None = None,
        bucket_bytes: int | None = None,
        transport: str = "auto",
    ):
        """Plans the transfer.

        Args:
          source: tree of the parameters, or of ShapeDtypeStructs with their shardings; all on one mesh.
          target_shardings: tree with one NamedSharding per leaf, all on one mesh, which may share devices with the
            source mesh.
          target_dtype: type that floating-point leaves are cast to before they move; None keeps their type.
          bucket_bytes: bound on the bytes that a device stages for a bucket, of which a few move at once; None chooses
            16 MiB on CPU (32 MiB inside one process), 64 MiB elsewhere.
          transport: 'auto', or 'collective' to use the transport of several processes inside one process; the meshes
            must then be disjoint.

        Raises:
          ValueError: the trees have different structures, one side lies on several meshes, a dimension of a leaf does
            not divide into its shards, or the meshes of a collective transport share devices.
        """
        leaves, treedef = jax.tree.flatten(source)
        sources = [leaf.sharding for leaf in leaves]
        targets = jax.tree.leaves(target_shardings)
        everywhere = all(s.is_fully_addressable for s in [*sources, *targets])
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(targets, sources if everywhere and transport == "auto" else ())
        self.plan: TransferPlan = make_plan(source, target_shardings, dtype=target_dtype, bucket_bytes=bucket_bytes)
        paths = [leaf.path for leaf in self.plan.leaves]
        shapes = [leaf.shape for leaf in self.plan.leaves]
        before, after = ([getattr(leaf, k) for leaf in self.plan.leaves] for k in ("source_dtype", "target_dtype"))
        self._source = ExpectedLeaves(treedef, paths, shapes, before, sources, summed_as=after, side="source")
        self._target = ExpectedLeaves(treedef, paths, shapes, after, targets, summed_as=after, side="target")
        self._ledger = Ledger(self._target)
        self._transport: Transport
        self._receipts: ReceiptChannel | None = None
        self._receives = any(d.process_index == jax.process_index() for s in targets[:1] for d in s.device_set)
        if leaves and (transport == "collective" or not (everywhere or RelayoutTransport.fits(self.plan))):
            self._transport = CollectiveTransport(self.plan, sources, targets)
            self._receipts = ReceiptChannel(len(leaves), sources[0].mesh, targets[0].mesh)
        else:
            self._transport = transport_for(self.plan, sources, targets)

    def publish(
        self, params: PyTree | None, version: int, *, donate: bool = False, replacing: PyTree | None = None
    ) -> Policy:
        """Moves the parameters to the rollout mesh, in the rollout dtype, and checks that every leaf arrived unchanged.

        Args:
          params: the trainer's parameters, placed as planned; kept unless donated. None on a process outside the
            trainer mesh.
          version: number of the weights, usually the number of steps done so far; the same on every process.
          donate: True to give the parameters up: a leaf that need not move becomes a weight of the policy, and every
            other leaf is deleted as soon as it has been read.
          replacing: weights of an earlier policy that nothing uses any more, even if this call fails. The new weights
            take their memory, leaf by leaf. None leaves all earlier policies unchanged.

        Returns:
          The policy; on a process outside the rollout mesh a policy without weights (an empty tree).

        Raises:
          ValueError: the parameters, or the weights to replace, do not have the structure, shapes, dtypes and shardings
            of the plan.
          WeightMismatchError: replicas of a leaf differ on the trainer mesh, a leaf arrived changed, or the trainer
            sent another version.
        """
        leaves, sums_Wl = None, None
        if params is not None:
            leaves = self._source.check(params, "Parameters")
            sums_Wl = self._source.sums(leaves)
        old = None if replacing is None else self._target.check(replacing, "Weights to replace")
        moved = drive(self._transport, leaves, donate=donate, replacing=old)
        if self._receipts is not None:
            sums_Wl, sent_version = self._receipts.send(sums_Wl, version)
            if (sent := int(read(sent_version))) != version:
                raise WeightMismatchError(
                    f"Version {version} was expected, version {sent} was sent: all processes must publish the same "
                    "versions in the same order."
                )
        totals = self._source.totals(sums_Wl, version)
        if self.plan.leaves and not self._receives:
            return Policy(params={}, version=version)
        self._ledger.enter(version, totals)
        policy = Policy(params=self._target.tree(moved), version=version)
        self.verify(policy)
        return policy

    def verify(self, policy: Policy) -> None:
        """Compares a policy's weights with the checksums published under its version.

        Raises:
          WeightMismatchError: the version was not published or is too old, or leaves differ; the error names them.
          ValueError: the weights do not have the structure, shapes, dtypes and shardings of the plan.
        """
        self._ledger.verify(policy)
