"""One call that brings a tree to other shardings inside one process, by the transport that fits."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Sharding
from jaxtyping import Array

from podrl.mesh.reshard.in_place import InPlaceTransport
from podrl.mesh.reshard.local import LocalTransport
from podrl.mesh.reshard.pathways import PathwaysTransport, chosen, platforms
from podrl.mesh.reshard.plan import Plan, make_plan
from podrl.mesh.reshard.relayout import RelayoutTransport
from podrl.types import PyTree

# Small enough to stay in a CPU's caches where boxes are staged there; accelerators want transfers long enough to pay.
_BUCKET_BYTES = {"cpu": 16 << 20}
_DEFAULT_BUCKET_BYTES = 64 << 20
# Nothing is staged in place: larger buckets are fewer programs to start (a tenth of a move), but longer to compile.
_IN_PLACE_BUCKET_BYTES = 32 << 20


class Transport(Protocol):
    """Carries out one plan."""

    def move(
        self, leaves: Sequence[Array], *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array]:
        """The leaves at their target, in the order of the plan.

        Args:
          leaves: arrays placed as the plan says.
          donate: the sources are given up, each deleted once it has been read.
          replacing: arrays like the result that are given up, bucket by bucket, as their successors are made: a target
            never holds more than the new leaves, the old ones still to be replaced, and what is staged.
        """
        ...


def default_bucket_bytes(targets: Sequence[Sharding], sources: Sequence[Sharding] = ()) -> int:
    """Bytes a device may stage at once, by its platform; with `sources` where any transport inside one process does."""
    if not targets:
        return _DEFAULT_BUCKET_BYTES
    if sources and InPlaceTransport.fits(sources, targets):
        return _IN_PLACE_BUCKET_BYTES
    platform = next(iter(targets[0].device_set)).platform
    return _BUCKET_BYTES.get(platform, _DEFAULT_BUCKET_BYTES)


def transport_for(plan: Plan, sources: Sequence[Any], targets: Sequence[Any]) -> Transport:
    """The transport for meshes that this process sees whole."""
    pathways = chosen(platforms())
    if not pathways and InPlaceTransport.fits(sources, targets):
        return InPlaceTransport(plan, sources, targets)
    if RelayoutTransport.fits(plan):
        return RelayoutTransport(plan, sources, targets)
    return (PathwaysTransport if pathways else LocalTransport)(plan, sources, targets)


def reshard(
    tree: PyTree,
    shardings: PyTree,
    *,
    dtype: Any = None,
    donate: bool = False,
    on_ready: Callable[[float], None] | None = None,
) -> PyTree:
    """The tree on other shardings; plan and programs are kept, so that the second call compiles nothing.

    Args:
      tree: arrays placed by NamedSharding.
      shardings: one target sharding per leaf.
      dtype: what floating-point leaves become; None keeps theirs.
      donate: the sources are given up, each deleted once it has been read.
      on_ready: called from another thread with the seconds it took, once every leaf is there.

    Returns:
      A tree of the same structure, possibly still being written.

    Raises:
      ValueError: trees of different structure, or a leaf that does not divide by its shards.
    """
    began = time.perf_counter()
    leaves, treedef = jax.tree.flatten(tree)
    targets = jax.tree.leaves(shardings)
    bucket_bytes = default_bucket_bytes(targets, [leaf.sharding for leaf in leaves])
    plan = make_plan(tree, shardings, dtype=dtype, bucket_bytes=bucket_bytes)
    if plan not in _transports:
        _transports[plan] = transport_for(plan, [leaf.sharding for leaf in leaves], targets)
    moved = _transports[plan].move(leaves, donate=donate)
    if on_ready is not None:
        threading.Thread(target=_report, args=(moved, began, on_ready), daemon=True).start()
    return jax.tree.unflatten(treedef, moved)


_transports: "weakref.WeakKeyDictionary[Plan, Transport]" = weakref.WeakKeyDictionary()


def _report(moved: Sequence[Array], began: float, on_ready: Callable[[float], None]) -> None:
    jax.block_until_ready(moved)
    on_ready(time.perf_counter() - began)
