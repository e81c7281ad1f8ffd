"""The Bradley-Terry model of preferences: loss, gradient weight and margin of a pair from its answers' scores."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.segments import masked
from podrl.types import Layout, Mask, Ratio


class PreferenceLoss(NamedTuple):
    """Loss, weights and margins of P pairs; column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
      loss_P: loss of each pair, nats.
      margin_P: score of the chosen answer minus score of the rejected answer, which is the log-odds that the chosen
        answer is preferred.
      weight_P2: minus the derivatives of each pair's loss with respect to its two scores.
    """

    loss_P: Float[Array, " P"]
    margin_P: Float[Array, " P"]
    weight_P2: Float[Array, "P 2"]


def bradley_terry(score_P2: Float[Array, "P 2"]) -> PreferenceLoss:
    """Computes -log sigmoid(score of the chosen - score of the rejected) (arXiv 2203.02155, eq. 1) and its derivatives.

    Args:
      score_P2: score of each answer; column 0 is the chosen answer. Differences of scores are log-odds.
    """
    margin_P = score_P2[:, 0] - score_P2[:, 1]
    slope_P = jax.nn.sigmoid(-margin_P)
    return PreferenceLoss(-jax.nn.log_sigmoid(margin_P), margin_P, jnp.stack([slope_P, -slope_P], axis=1))


@flax.struct.dataclass
class ScoredRows:
    """Packed rows that `weighted_score` reads.

    Attributes:
      layout: the packed tokens, their segments and positions.
      mask_BT: 1 on the last token of each answer, where the answer's score is read, 0 elsewhere.
      weight_BT: weight of the answer, on its last token; other entries are ignored.
    """

    layout: Layout
    mask_BT: Mask
    weight_BT: Float[Array, "B T"]


def weighted_score(score_BT: Float[Array, "B T"], rows: ScoredRows) -> tuple[Ratio, dict[str, Ratio]]:
    """Averages -weight x score over answers; the metric reward_model/score is the mean score."""
    score_BT = masked(score_BT, rows.mask_BT)
    count = jnp.sum(jnp.asarray(rows.mask_BT, jnp.float32))
    loss = Ratio(jnp.sum(-masked(rows.weight_BT, rows.mask_BT) * score_BT), count)
    return loss, {"reward_model/score": Ratio(jnp.sum(jax.lax.stop_gradient(score_BT)), count)}
