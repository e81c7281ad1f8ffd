"""Direct preference optimisation: loss, gradient weight and margin of a pair from its answers' log-probabilities."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.aggregate import aggregate, token_mean
from podrl.algorithms.segments import masked
from podrl.types import Layout, Mask, Ratio


class Pairs(NamedTuple):
    """Loss, weights and margins of P pairs; column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
      loss_P: loss of each pair, nats.
      margin_P: the policy's preference for the chosen answer: of DPO its implicit reward less that of the rejected one,
        beta times nats.
      weight_P2: minus the derivative of each loss by the answers' log-probabilities, so that the gradient of the loss
        is that of -weight logprob with the weight held: a policy gradient whose advantages the pair itself gives.
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
) -> Pairs:
    """Computes DPO's loss and weights (arXiv 2305.18290, eq. 7), with a share of labels assumed wrong.

    With m = beta ((logprob - ref) of the chosen - (logprob - ref) of the rejected) and s the share, the loss is
    -(1 - s) log sigmoid(m) - s log sigmoid(-m) (the conservative form, ericmitchell.ai/cdpo.pdf, eq. 3).

    Args:
      logprob_P2: log-probability of each whole answer under the policy, nats.
      ref_logprob_P2: the same under the reference.
      beta: reward of a nat of difference to the reference, above 0.
      label_smoothing: the share s, in [0, 0.5).
    """
    reward_P2 = beta * (logprob_P2 - ref_logprob_P2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    s = label_smoothing
    loss_P = -(1 - s) * jax.nn.log_sigmoid(margin_P) - s * jax.nn.log_sigmoid(-margin_P)
    slope_P = beta * ((1 - s) * jax.nn.sigmoid(-margin_P) - s * jax.nn.sigmoid(margin_P))
    return Pairs(loss_P, margin_P, jnp.stack([slope_P, -slope_P], axis=1))


@flax.struct.dataclass
class WeightedRows:
    """Packed rows that `weighted_likelihood` reads.

    Attributes:
      layout: the tokens and where they lie.
      mask_BT: 1 on the tokens of the answers.
      length_BT: number of such tokens in this token's sequence, 1 on padding.
      weight_BT: weight of the token's answer.
    """

    layout: Layout
    mask_BT: Mask
    length_BT: Float[Array, "B T"]
    weight_BT: Float[Array, "B T"]


def weighted_likelihood(
    logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: WeightedRows
) -> tuple[Ratio, dict[str, Ratio]]:
    """Sums -weight x logprob over each answer and averages over answers; the metric is actor/entropy."""
    logprob_BT, weight_BT = masked(logprob_BT, rows.mask_BT), masked(rows.weight_BT, rows.mask_BT)
    loss = aggregate(-weight_BT * logprob_BT, rows.mask_BT, rows.length_BT, "sequence-mean-token-sum")
    return loss, {"actor/entropy": token_mean(jax.lax.stop_gradient(entropy_BT), rows.mask_BT)}
