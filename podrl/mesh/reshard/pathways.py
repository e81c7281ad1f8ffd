"""The transport under Pathways: one controller sees all devices, and the service moves arrays between any two meshes.

The package pathwaysutils asks the service, which keeps its own plan for every set of layouts it has seen. What is left
to do here: cast before moving, bound what is staged by buckets, and give up what nobody needs any more. A move cannot
run without the service; the package is asked for only when JAX_PLATFORMS names the proxy.
"""

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from podrl.mesh.reshard.plan import Plan
from podrl.mesh.reshard.programs import give_up

IN_FLIGHT = 2
MODULE = "pathwaysutils.experimental.reshard"


def platforms() -> str:
    """JAX_PLATFORMS, or what jax.config.update('jax_platforms', ...) made of it."""
    config: Any = jax.config
    return config.jax_platforms or ""


def chosen(platforms: str) -> bool:
    """Whether a list of platforms names the Pathways proxy."""
    return "proxy" in platforms.split(",")


def service_reshard() -> Callable[..., Any]:
    """pathwaysutils' reshard: (arrays, shardings, donate=, cache_resharding_plans=) -> arrays.

    Raises:
      ValueError: the package is not there, or has no such function.
    """
    try:
        return importlib.import_module(MODULE).reshard
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"JAX_PLATFORMS={platforms()!r} runs under Pathways, which needs the package pathwaysutils to "
            f"move weights between meshes ({error}): pip install 'podrl[pathways]' on the controller."
        ) from error


class PathwaysTransport:
    """Carries out a plan by the service; see `move`."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Any],
        targets: Sequence[Any],
        *,
        reshard: Callable[..., Any] | None = None,
    ):
        """Args:
          plan: made from the same shardings.
          sources, targets: sharding of each leaf before and after.
          reshard: what moves arrays; by default `service_reshard()`.

        Raises:
          ValueError: pathwaysutils is not installed.
        """
        self._plan, self._targets = plan, targets
        self._reshard = reshard or service_reshard()
        self._casts: list[Any] = [
            jax.jit(lambda x, dtype=leaf.target_dtype: jnp.astype(x, dtype), out_shardings=source)
            if leaf.casts
            else None
            for leaf, source in zip(plan.leaves, sources, strict=True)
        ]

    def move(
        self, leaves: Sequence[Array], *, donate: bool = False, replacing: Sequence[Array] | None = None
    ) -> list[Array]:
        """The leaves on their target shardings, in the target dtypes.

        Args:
          leaves, replacing: as in `Transport.move`.
          donate: the sources are given up; what was cast on the way always is.

        Returns:
          New arrays, possibly still being written; at most two buckets are staged at any time.
        """
        out: list[Any] = [None] * len(leaves)
        flying: deque[list[Array]] = deque()
        for bucket in self._plan.buckets:
            if len(flying) == IN_FLIGHT:
                jax.block_until_ready(flying.popleft())
            give_up(replacing, bucket.leaves)
            cast = [i for i in bucket.leaves if self._casts[i]]
            plain = [i for i in bucket.leaves if not self._casts[i]]
            self._send(cast, [self._casts[i](leaves[i]) for i in cast], out, donate=True)
            self._send(plain, [leaves[i] for i in plain], out, donate=donate)
            give_up(leaves if donate else None, cast)
            flying.append([out[i] for i in bucket.leaves])
        return out

    def _send(self, indices: Sequence[int], arrays: list[Array], out: list[Any], *, donate: bool) -> None:
        if not indices:
            return
        targets = [self._targets[i] for i in indices]
        moved = self._reshard(arrays, targets, donate=donate, cache_resharding_plans=True)
        for i, array in zip(indices, moved, strict=True):
            out[i] = array
