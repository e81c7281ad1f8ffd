"""The transport between two meshes over the same devices: a jitted identity that casts and changes the layout."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from podrl.mesh.reshard.plan import Plan
from podrl.mesh.reshard.programs import give_up

IN_FLIGHT = 2


class RelayoutTransport:
    """Carries out a plan whose source and target meshes hold the same devices in the same order."""

    def __init__(self, plan: Plan, sources: Sequence[Any], targets: Sequence[Any]):
        """Args are those of `LocalTransport`."""
        self._plan = plan
        self._targets = targets
        self._stays = stays(plan, sources, targets)
        self._programs: dict[tuple[int, ...], Callable[[Sequence[Array]], Sequence[Array]]] = {}

    @staticmethod
    def fits(plan: Plan) -> bool:
        """Whether every leaf stays on its devices, in their order."""
        return all(leaf.source.device_ids == leaf.target.device_ids for leaf in plan.leaves)

    def move(
        self, leaves: Sequence[Array], *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array]:
        """The leaves on their target shardings, in the target dtypes; none shares memory with its source.

        Args:
          leaves, replacing: as in `Transport.move`.
          donate: the sources are given up: leaves that need no change are handed on, the others deleted once read.
        """
        out: list[Any] = [None] * len(leaves)
        flying: deque[Sequence[Array]] = deque()
        for bucket in self._plan.buckets:
            handed_on = [i for i in bucket.leaves if donate and self._stays[i]]
            for i in handed_on:
                out[i] = leaves[i]
            changed = tuple(i for i in bucket.leaves if i not in handed_on)
            if len(flying) == IN_FLIGHT:
                jax.block_until_ready(flying.popleft())
            give_up(replacing, bucket.leaves)
            done = self._program(changed)([leaves[i] for i in changed]) if changed else []
            flying.append(done)
            for i, array in zip(changed, done, strict=True):
                out[i] = array
            give_up(leaves if donate else None, changed)
        return out

    def _program(self, indices: tuple[int, ...]) -> Callable[[Sequence[Array]], Sequence[Array]]:
        dtypes = [self._plan.leaves[i].target_dtype for i in indices]

        def relayout(arrays: Sequence[Array]) -> list[Array]:
            # Without the copy jit would forward an unchanged leaf, and its owner may donate that buffer later.
            return [jnp.copy(x).astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

        if indices not in self._programs:
            self._programs[indices] = jax.jit(relayout, out_shardings=[self._targets[i] for i in indices])
        return self._programs[indices]


def stays(plan: Plan, sources: Sequence[Any], targets: Sequence[Any]) -> list[bool]:
    """Whether each leaf is already what it should become."""
    return [
        not leaf.casts and source.is_equivalent_to(target, len(leaf.shape))
        for leaf, source, target in zip(plan.leaves, sources, targets, strict=True)
    ]
