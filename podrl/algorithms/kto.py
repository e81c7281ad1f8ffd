"""Kahneman-Tversky optimisation: loss, gradient weight and reference point of answers labelled good or bad."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class KTOLoss(NamedTuple):
    """KTO's loss and weights for B labelled answers, and the reference point they were compared with.

    Attributes:
      loss_B: loss of each answer, unitless, between 0 and the weight of its label.
      weight_B: minus the derivative of each loss with respect to the answer's log-probability. The gradient of the loss
        therefore equals the gradient of -weight x logprob with a constant weight.
      kl: reference point z, nats.
    """

    loss_B: Float[Array, " B"]
    weight_B: Float[Array, " B"]
    kl: Float[Array, ""]


def kto(
    logratio_B: Float[Array, " B"],
    unrelated_logratio_B: Float[Array, " B"],
    desirable_B: Bool[Array, " B"],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """Computes KTO's loss and weights (arXiv 2402.01306, eq. 8).

    With r = log(p / p_ref) of the answer, the loss of a desirable answer is w (1 - sigmoid(beta (r - z))), and the loss
    of an undesirable answer is w (1 - sigmoid(beta (z - r))). The reference point z estimates KL(policy || reference)
    and has no gradient. To compute z, each prompt is followed by the answer of another prompt; z is the mean of r over
    these answers, or 0 if the mean is negative.

    Args:
      logratio_B: log(p / p_ref) of each whole answer, nats.
      unrelated_logratio_B: log(p / p_ref) of another example's answer after this example's prompt, nats.
      desirable_B: labels, True for a desirable answer.
      beta: implicit reward per nat of difference to the reference, above 0.
      desirable_weight, undesirable_weight: weight w of the loss of answers with this label (lambda_D and lambda_U).
    """
    kl = jnp.maximum(jnp.mean(unrelated_logratio_B), 0.0)
    sign_B = jnp.where(desirable_B, 1.0, -1.0)
    worth_B = jnp.where(desirable_B, desirable_weight, undesirable_weight)
    missed_B = jax.nn.sigmoid(-beta * sign_B * (logratio_B - kl))
    return KTOLoss(worth_B * missed_B, worth_B * beta * sign_B * missed_B * (1.0 - missed_B), kl)
