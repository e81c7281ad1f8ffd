"""Direct preference optimisation: loss, gradient weight and margin of a pair from its answers' log-probabilities."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.aggregate import aggregate, token_mean
from podrl.algorithms.segments import masked
from podrl.types import Layout, Mask, Ratio


class PairLoss(NamedTuple):
    """Loss, weights and margins of P pairs; column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
      loss_P: loss of each pair, nats.
      margin_P: preference of the policy for the chosen answer. In DPO: the difference between the
        implicit rewards (beta times nats) of the chosen and the rejected answer. In ORPO: the log of their odds ratio.
      weight_P2: minus the derivative of each loss with respect to the answers' log-probabilities. The gradient of the
        loss therefore equals the gradient of -weight x logprob with a constant weight: a policy gradient in which the
        weights are the advantages.
    """

    loss_P: Float[Array, " P"]
    margin_P: Float[Array, " P"]
    weight_P2: Float[Array, "P 2"]


def dpo(
    logprob_P2: Float[Array, "P 2"],
    ref_logprob_P2: Float[Array, "P 2"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Computes DPO's loss and weights (arXiv 2305.18290, eq. 7), with a share of the labels assumed to be wrong.

    With m = beta ((logprob - ref) of the chosen - (logprob - ref) of the rejected) and s the share of wrong labels, the
    loss is -(1 - s) log sigmoid(m) - s log sigmoid(-m) (the conservative form, ericmitchell.ai/cdpo.pdf, eq. 3).

    Args:
      logprob_P2: log-probability of each whole answer under the policy, nats.
      ref_logprob_P2: log-probability of each whole answer under the reference, nats.
      beta: implicit reward per nat of difference to the reference, above 0.
      label_smoothing: share s of the labels that are assumed to be wrong, in [0, 0.5).
    """
    reward_P2 = beta * (logprob_P2 - ref_logprob_P2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    s = label_smoothing
    loss_P = -(1 - s) * jax.nn.log_sigmoid(margin_P) - s * jax.nn.log_sigmoid(-margin_P)
    slope_P = beta * ((1 - s) * jax.nn.sigmoid(-margin_P) - s * jax.nn.sigmoid(margin_P))
    return PairLoss(loss_P, margin_P, jnp.stack([slope_P, -slope_P], axis=1))


@flax.struct.dataclass
class WeightedRows:
    """Packed rows that `weighted_likelihood` reads.

    Attributes:
      layout: the packed tokens, their segments and positions.
      mask_BT: 1 on the tokens of the answers, 0 on prompts and padding.
      length_BT: number of answer tokens in this token's sequence, 1 on padding.
      weight_BT: weight of the answer that the token belongs to.
    """

    layout: Layout
    mask_BT: Mask
    length_BT: Float[Array, "B T"]
    weight_BT: Float[Array, "B T"]


def weighted_likelihood(
    logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: WeightedRows
) -> tuple[Ratio, dict[str, Ratio]]:
    """Sums -weight x logprob over each answer and averages the sums over answers.

    Args:
      logprob_BT: log-probabilities under the policy, nats; differentiated.
      entropy_BT: entropy of the next-token distribution, nats.
      rows: packed answers and their weights.

    Returns:
      The loss, and the metric actor/entropy: the mean entropy over answer tokens, nats.
    """
    logprob_BT, weight_BT = masked(logprob_BT, rows.mask_BT), masked(rows.weight_BT, rows.mask_BT)
    loss = aggregate(-weight_BT * logprob_BT, rows.mask_BT, rows.length_BT, "sequence-mean-token-sum")
    return loss, {"actor/entropy": token_mean(jax.lax.stop_gradient(entropy_BT), rows.mask_BT)}
