"""The transport under Pathways: one controller sees all devices, and the service moves arrays between any two meshes.

The package pathwaysutils calls the service, which keeps its own plan for every set of layouts that it has seen. This
module only casts leaves before they move. The package is imported only when JAX_PLATFORMS names the proxy.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array

from podrl.config import install
from podrl.transfer.move import Move
from podrl.transfer.plan import TransferPlan

MODULE = "pathwaysutils.experimental.reshard"


def platforms() -> str:
    """Returns the platforms that jax uses: JAX_PLATFORMS, or the value that jax.config.update('jax_platforms') set."""
    config: Any = jax.config
    return config.jax_platforms or ""


def chosen(platforms: str) -> bool:
    """Returns True if a comma-separated list of platforms names the Pathways proxy."""
    return "proxy" in platforms.split(",")


def service_reshard() -> Callable[..., Any]:
    """Returns pathwaysutils' reshard: (arrays, shardings, donate=, cache_resharding_plans=) -> arrays.

    Raises:
      ValueError: the package is not installed, or has no such function.
    """
    try:
        return importlib.import_module(MODULE).reshard
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"JAX_PLATFORMS={platforms()!r} runs under Pathways, which needs the package pathwaysutils to "
            f"move weights between meshes ({error}): {install('pathways')} on the controller."
        ) from error


class PathwaysTransport:
    """Moves whole buckets by the Pathways service; always donates arrays that were cast for the move."""

    in_flight = 2
    overwrites = False

    def __init__(
        self,
        plan: TransferPlan,
        sources: Sequence[Sharding],
        targets: Sequence[Sharding],
        *,
        reshard: Callable[..., Any] | None = None,
    ):
        """Prepares the casts of a plan.

        Args:
          plan: plan made from `sources` and `targets`.
          sources, targets: sharding of each leaf before and after the move.
          reshard: function that moves arrays, with the signature of `service_reshard`'s result; None uses the service.

        Raises:
          ValueError: pathwaysutils is not installed.
        """
        self.plan, self._targets = plan.unsplit(), targets
        self._reshard = reshard or service_reshard()
        self._casts: list[Any] = [
            jax.jit(lambda x, dtype=leaf.target_dtype: jnp.astype(x, dtype), out_shardings=source)
            if leaf.casts
            else None
            for leaf, source in zip(plan.leaves, sources, strict=True)
        ]

    def send(self, move: Move, chosen: tuple[int, ...], part: int | None) -> list[Array]:
        for is_cast in (True, False):
            which = [i for i in chosen if bool(self._casts[i]) == is_cast]
            arrays = [self._casts[i](move.sources[i]) if is_cast else move.sources[i] for i in which]
            places = [self._targets[i] for i in which]
            donate = is_cast or move.donate
            if which:
                move.put(which, self._reshard(arrays, places, donate=donate, cache_resharding_plans=True))
        return [move.out[i] for i in chosen]

    def land(self, move: Move, sent: list[Array]) -> None:
        jax.block_until_ready(sent)
