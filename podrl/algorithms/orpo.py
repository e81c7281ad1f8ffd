"""Odds ratio preference optimisation: loss, gradient weight and margin of a pair, without a reference."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podrl.algorithms.dpo import PairLoss

_SURE = -1e-6  # largest mean log-probability that is used, nats; at 0 the odds would be infinite


def orpo(logprob_P2: Float[Array, "P 2"], length_P2: Float[Array, "P 2"], *, coef: float) -> PairLoss:
    """Computes ORPO's loss and weights (arXiv 2403.07691, eq. 6 and 7).

    With l the mean log-probability of an answer's tokens, its odds are exp(l) / (1 - exp(l)). The loss of a pair is
    -l_chosen - coef log sigmoid(z), where z = log(odds of the chosen answer / odds of the rejected answer).

    Args:
      logprob_P2: log-probability of each whole answer under the policy, nats; column 0 is the chosen answer.
      length_P2: number of tokens of each answer, at least 1.
      coef: weight of the odds ratio's term relative to the chosen answer's likelihood, above 0 (lambda in the paper).

    Returns:
      Losses in nats per token, z as the margins, and minus the derivatives of the losses as the weights.
    """
    mean_P2 = jnp.minimum(logprob_P2 / length_P2, _SURE)
    against_P2 = -jnp.expm1(mean_P2)  # 1 - exp(l)
    odds_P2 = mean_P2 - jnp.log(against_P2)
    margin_P = odds_P2[:, 0] - odds_P2[:, 1]
    loss_P = -mean_P2[:, 0] - coef * jax.nn.log_sigmoid(margin_P)
    slope_P2 = coef * jax.nn.sigmoid(-margin_P)[:, None] / against_P2
    weight_P2 = jnp.stack([1.0 + slope_P2[:, 0], -slope_P2[:, 1]], axis=1) / length_P2
    return PairLoss(loss_P, margin_P, weight_P2)
