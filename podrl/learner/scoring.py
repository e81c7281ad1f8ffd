"""Scores a batch with the models before its first update, and brings the scores to the host for advantages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from podrl.algorithms.mismatch import mismatch
from podrl.algorithms.policy_rows import PolicyRows
from podrl.cluster.rl_cluster import RLCluster
from podrl.mappings import Metrics
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.state import fetch
from podrl.types import Batch, Rollouts


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per-token scores in the sample layout; index 0 and padding hold 0.

    Attributes:
      old_logprob_BT: log-probabilities under the policy before the step's first update, nats: computed by the trainer,
        or as the engine reported them.
    """

    old_logprob_BT: Float[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True)
class ReferencedScores(Scores):
    """Scores with log-probabilities under the reference or a teacher, nats: for a KL in the reward, or distillation."""

    ref_logprob_BT: Float[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True)
class SpanScores(ReferencedScores):
    """Scores of the cluster's teachers, which may use other tokenizers than the policy.

    Attributes:
      span_BT: number of the span of text in which a token is compared, -1 for none. A teacher's log-probability of a
        span is the sum over the span's tokens.
    """

    span_BT: Int[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True)
class IdScores(Scores):
    """Scores of a teacher that reads other rows than the policy: log-probabilities of the policy's likeliest ids.

    Attributes:
      number_BT: number of each sampled token among all sampled tokens of the batch, from 1 on; 0 on other tokens.
      id_XK: likeliest ids at the position of each sampled token; token number x has row x, and no loss reads row 0.
      teacher_logprob_XK: log-probabilities of these ids under the teacher, nats.
    """

    number_BT: Int[np.ndarray, "B T"]
    id_XK: Int[np.ndarray, "X K"]
    teacher_logprob_XK: Float[np.ndarray, "X K"]


def policy_scores(
    cluster: RLCluster,
    rollouts: Rollouts,
    shape: PackShape,
    mini_batches: list[np.ndarray],
    *,
    old: str,
    reference: Callable[[np.ndarray], np.ndarray] | None = None,
) -> ReferencedScores:
    """Finds the old log-probabilities of every sample, and scores every sample with the reference.

    Args:
      cluster: the models.
      rollouts: the samples; if there are several trainer hosts, each holds the rows of its own devices.
      shape: shape of one packed mini-batch.
      mini_batches: numbers of the samples that are packed together, a partition of all samples.
      old: source of the old log-probabilities: 'trainer' for a forward pass, 'sampler' for the engine's report.
      reference: function that scores some samples in place of the reference, and returns scores in the sample layout;
        None for the reference itself.

    Returns:
      Log-probabilities in the sample layout, (B, T), nats, the same on all trainer hosts.
    """
    old_BT = np.where(rollouts.mask_BT > 0, rollouts.logprob_BT, 0.0).astype(np.float32)
    ref_BT = np.zeros_like(old_BT)
    for chosen in mini_batches:
        placement = packing.place_samples(rollouts, chosen, shape)
        batch = cluster.actor.put(placement.batch(placement.replayed(rollouts, chosen)))

        def read(values_ABT, placement=placement):
            return placement.unpack(fetch(values_ABT, cluster.actor_mesh), rollouts.tokens_BT.shape[1])

        if old == "trainer":
            old_BT[chosen] = read(cluster.actor.logprobs(batch))
        # A process has only the values of its own rows, and advantages need all values.
        elif cluster.actor_mesh.is_multi_process:
            own = placement.batch(placement.scatter(old_BT[chosen]))
            old_BT[chosen] = read(cluster.actor.put(own).rows)
        ref_BT[chosen] = reference(chosen) if reference else read(cluster.actor.reference_logprobs(batch))
    return ReferencedScores(old_BT, ref_BT)


def differences_by_routes(
    cluster: RLCluster,
    rollouts: Rollouts,
    chosen: np.ndarray,
    loss_mask_BT: Float[np.ndarray, "B T"],
    shape: PackShape,
) -> tuple[float, float]:
    """Measures `sampler/abs_diff` of the samples of one update, in nats, without the update.

    Args:
      cluster: the models.
      rollouts: all samples of the step, with recorded routes.
      chosen: numbers of the samples of the update.
      loss_mask_BT: mask of the loss tokens of all samples; the samples in `chosen` must have at least one loss token.
      shape: packed shape of the update.

    Returns:
      The difference if the trainer chooses the experts of each token, and the difference if the trainer uses the
      recorded experts.
    """
    placement, mask_BT = packing.place_samples(rollouts, chosen, shape), loss_mask_BT[chosen]

    def put(rows: Any) -> Batch[Any]:
        return cluster.actor.put(placement.batch(rows))

    mask_ABT = put(placement.loss_tokens(mask_BT)[0]).rows
    sampler_ABT = put(placement.scatter(rollouts.logprob_BT[chosen], where_BT=mask_BT)).rows
    found = []
    for routes in (False, True):
        routed = dataclasses.replace(placement, shape=dataclasses.replace(shape, routes=routes))
        logprob_ABT = cluster.actor.logprobs(put(routed.replayed(rollouts, chosen)))
        found.append(float(_distances(logprob_ABT, sampler_ABT, mask_ABT)["sampler/abs_diff"]))
    own, replayed = found
    return own, replayed


def compared(batches: Sequence[Batch[PolicyRows]]) -> list[Metrics]:
    """Computes the metrics of `mismatch` on batches that are not trained on.

    The old log-probabilities of the batches must be the trainer's.

    Each batch is finished before the next one starts, so that programs do not pile up on the device.
    """
    return [
        jax.device_get(_distances(rows.old_logprob_BT, rows.sampler_logprob_BT, rows.mask_BT))
        for rows in (batch.rows for batch in batches)
    ]


@jax.jit
def _distances(
    logprob_ABT: Float[Array, "A B T"], sampler_logprob_ABT: Float[Array, "A B T"], mask_ABT: Float[Array, "A B T"]
) -> dict[str, Float[Array, ""]]:
    return {name: ratio.mean() for name, ratio in mismatch(logprob_ABT, sampler_logprob_ABT, mask_ABT).items()}
