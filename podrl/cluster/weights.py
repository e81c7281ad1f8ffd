"""WeightSync: moves the actor's weights to the rollout mesh, in place if requested, and the frozen base only once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from podrl import offload
from podrl.cluster.actor import Actor
from podrl.cluster.pull_link import PullLink, WeightPublisher
from podrl.engine.config import RolloutConfig
from podrl.models import lora, parameters
from podrl.models.config import LoraConfig
from podrl.transfer.publish import Publisher
from podrl.types import Policy, PyTree


class WeightSync:
    """Moves the actor's weights to the rollout mesh.

    Under LoRA the frozen base crosses once, at the first move, and the adapters at every move. With
    `rollout.merge_adapters` the whole model, with the adapters folded in, crosses at every move instead.

    Attributes:
      model: configuration of the model that the rollout decodes: the actor's, without adapters if they are merged.
      dtype: type of the weights on the rollout mesh.
      publisher: publisher of the leaves that change.
      merge: function (trainable, frozen) -> the model with its adapters folded in; None if they are not merged.
    """

    def __init__(
        self,
        actor: Actor,
        mesh: Mesh,
        local: Mesh,
        config: RolloutConfig,
        *,
        generates: bool,
        link: PullLink | None = None,
    ):
        """Plans the moves.

        Args:
          actor: the actor whose weights move.
          mesh: mesh of the rollout, over all its processes.
          local: mesh of this process's part of `mesh`; `mesh` itself if the process has all its devices.
          config: rollout settings, which say the dtype of the weights (by default the dtype of training) and whether
            adapters are merged.
          generates: True if this process has devices of `mesh`.
          link: connection between trainers and rollouts if they are separate clusters; None for one cluster.
        """
        self._actor, self._mesh, self._local, self._generates, self._link = actor, mesh, local, generates, link
        self.dtype = jnp.dtype(config.data_type or actor.training.dtype)
        self.model, sent, base = actor.model, actor.state.params, actor.frozen
        self.merge: Callable[[PyTree, PyTree], PyTree] | None = None
        if config.merge_adapters and actor.model.lora.rank:
            self.model = dataclasses.replace(actor.model, lora=LoraConfig())
            sent, base = parameters.abstract_params(self.model, actor.mesh, self.dtype), {}
            self.merge = lora.merging(actor.model, sent)
        target = parameters.abstract_params(self.model, mesh, self.dtype)
        merges = self.merge is not None  # a merged model moves whole, with the leaves that are never trained
        self._moved_places, frozen = (target, {}) if merges else parameters.split_trainable(target, self.model)
        self.publisher: Any = self._publisher_of("trainable", sent, self._moved_places)
        self._base_publisher = self._publisher_of("base", base, frozen, lasting=True) if base else None
        self._base: PyTree | None = None if base else {}
        self._in_place: PyTree | None = None  # the leaves that the last in-place move made

    def _publisher_of(self, name: str, source: PyTree, target: PyTree, *, lasting: bool = False) -> WeightPublisher:
        """Returns this process's part of a publisher that moves a tree of arrays or shapes to the shardings of
        `target`."""
        if self._link is None:
            return Publisher(
                offload.on_devices(source), jax.tree.map(lambda leaf: leaf.sharding, target), target_dtype=self.dtype
            )
        if self._link.trains:
            return self._link.sender(name, source, self.dtype, lasting=lasting)
        return self._link.receiver(name, target)

    def move(self, version: int, *, in_place: bool = False) -> Policy:
        """Moves the actor's weights to the rollout mesh.

        Args:
          version: number of these weights.
          in_place: True to reuse the buffers of the previous call's policy, if that call was in place, too; the
            previous policy becomes invalid, even if this call fails.

        Returns:
          The policy on this process's part of the rollout mesh. On a process without devices of the rollout mesh the
          policy holds no weights.
        """
        actor = self._actor
        if self._base_publisher is not None and self._base is None:
            # A base in the host's memory goes to the devices first. With separate clusters it stays where it is, and is
            # copied when rollouts pull it.
            base = actor.frozen if self._link is not None else offload.on_devices(actor.frozen)
            self._base = self._base_publisher.publish(base if actor.loaded else None, 0).params
        sent = actor.state.params if actor.loaded else None
        if self.merge is not None and actor.loaded:
            sent = self.merge(actor.state.params, actor.frozen)
        old, self._in_place = (self._in_place if in_place else None), None
        if in_place and self._generates:
            # The first in-place move overwrites zeros, so that one compiled program serves all moves.
            old = old or _zeros(self._moved_places)
        moved = self.publisher.publish(sent, version, replacing=old)
        if not self._generates:
            return moved
        if in_place:
            self._in_place = moved.params
        return Policy(self._view(parameters.join_trainable(moved.params, self._base)), version)

    def await_version(self, version: int) -> None:
        """Waits until the trainers offer a version, if they are a separate cluster; may be called on any thread.

        Raises:
          TransferTimeoutError: the version was not offered in time.
        """
        if self._link is not None and not self._link.trains:
            self.publisher.await_version(version)

    def hold(self, version: int) -> None:
        """Makes this trainer process keep a version until the next call of `hold`; only with `topology=split`."""
        self.publisher.hold(version)

    def blank(self) -> Policy:
        """Returns a policy with zero weights, for compiling before the first weights have arrived."""
        return Policy(_zeros(parameters.abstract_params(self.model, self._local, self.dtype)), 0)

    def release(self) -> None:
        """Frees the memory kept for the next in-place move."""
        self._in_place = None

    def _view(self, params: PyTree) -> PyTree:
        """Restricts arrays of the rollout mesh to this process's part of it, without a copy."""
        if self._local is self._mesh:
            return params

        def view(x: jax.Array) -> jax.Array:
            sharding = NamedSharding(self._local, x.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
            return jax.make_array_from_single_device_arrays(
                x.shape, sharding, [s.data for s in x.addressable_shards], dtype=x.dtype
            )

        return jax.tree.map(view, params)


def _zeros(abstract: PyTree) -> PyTree:
    """Makes zeros with the shapes, dtypes and shardings of the tree `abstract`."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=places
    )()
