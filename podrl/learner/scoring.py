"""What the models say of a batch before its first update, brought to the host for advantages over whole sequences."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from podrl.algorithms.mismatch import mismatch
from podrl.cluster.rl_cluster import RLCluster
from podrl.trainer import packing
from podrl.trainer.state import fetch
from podrl.types import Rollouts, TrainBatch


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per-token numbers in the sample layout; index 0 and padding hold 0.

    Attributes:
      old_logprob_BT: log-probabilities under the policy before the first update, nats.
      ref_logprob_BT: under the reference policy; zeros where there is none.
    """

    old_logprob_BT: Float[np.ndarray, "B T"]
    ref_logprob_BT: Float[np.ndarray, "B T"]


def policy_scores(
    cluster: RLCluster,
    rollouts: Rollouts,
    shape: packing.PackShape,
    mini_batches: list[np.ndarray],
    *,
    old: str,
    reference: bool,
) -> Scores:
    """Scores every sample with the actor and the reference.

    Args:
      cluster: the models.
      rollouts: the samples; on several trainer hosts each holds the rows of its own devices.
      shape: of one packed mini-batch.
      mini_batches: which samples go together, a partition of all.
      old: 'trainer' for a forward pass, 'sampler' for what the engine reported.
      reference: whether the reference is asked.
    """
    old_BT, ref_BT = (np.zeros(rollouts.tokens_BT.shape, np.float32) for _ in range(2))
    for chosen in mini_batches:
        placement = packing.place_samples(rollouts, chosen, shape)
        sampler_BT = rollouts.logprob_BT[chosen]
        batch = cluster.put_batch(
            packing.pack(
                placement,
                tokens_BT=rollouts.tokens_BT[chosen],
                mask_BT=rollouts.mask_BT[chosen],
                advantage_BT=np.zeros_like(sampler_BT),
                old_logprob_BT=sampler_BT,
                ref_logprob_BT=np.zeros_like(sampler_BT),
                sampler_logprob_BT=sampler_BT,
            )
        )

        def read(values_ABT, placement=placement):
            return packing.unpack(placement, fetch(values_ABT, cluster.actor_mesh), rollouts.tokens_BT.shape[1])

        old_BT[chosen] = read(cluster.actor_logprobs(batch) if old == "trainer" else batch.old_logprob_ABT)
        if reference:
            ref_BT[chosen] = read(cluster.reference_logprobs(batch))
    return Scores(old_BT, ref_BT)


def compared(batches: Sequence[TrainBatch]) -> list[dict[str, Any]]:
    """The measures of `mismatch` for batches that no update is made on; their old log-probabilities are the trainer's.

    It waits for each, so that no more programs are under way than before.
    """
    return [
        jax.device_get(_distances(batch.old_logprob_ABT, batch.sampler_logprob_ABT, batch.mask_ABT))
        for batch in batches
    ]


@jax.jit
def _distances(
    logprob_ABT: Float[Array, "A B T"], sampler_logprob_ABT: Float[Array, "A B T"], mask_ABT: Float[Array, "A B T"]
) -> dict[str, Float[Array, ""]]:
    return {name: ratio.mean() for name, ratio in mismatch(logprob_ABT, sampler_logprob_ABT, mask_ABT).items()}
