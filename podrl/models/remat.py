"""Values of the forward pass that are kept for the backward pass, for each value of `trainer.remat` except 'none'."""

from typing import Any

import jax

from podrl import offload
from podrl.models.attention import ATTENTION_NAME
from podrl.models.dispatch import EXPERTS_NAME, ROUTES_NAME


def _offload(prim: Any, *args: Any, **params: Any) -> Any:
    """A remat policy that keeps the same values as "dots": the routes on the device, all others in host memory."""
    if prim.name == "name":
        kept = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[ROUTES_NAME],
            names_which_can_be_offloaded=[ATTENTION_NAME, EXPERTS_NAME],
            offload_src="device",
            offload_dst=offload.HOST,
        )
    else:
        kept = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", offload.HOST)
    return kept(prim, *args, **params)


POLICIES = {
    "full": jax.checkpoint_policies.save_only_these_names(ROUTES_NAME),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME, EXPERTS_NAME, ROUTES_NAME),
    ),
    "offload": _offload,
}
