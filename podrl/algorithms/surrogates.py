"""The policy-gradient surrogates, one pure function each: per-token losses, and marks of the clipped tokens.

r = exp(logprob - old_logprob) is the probability ratio of a token, A its advantage, sg() stops the gradient. Every
function takes finite arrays (apply `segments.masked` first); its results on masked tokens are meaningless. Losses have
the unit of the advantages; `podrl.algorithms.aggregate` turns them into one number.

Shared arguments:
  logprob_BT: log-probabilities under the policy being trained, nats; differentiated.
  old_logprob_BT: log-probabilities under the policy that the ratio starts from, nats; constants.
  advantage_BT: advantages, unitless or in reward units.
  mask_BT: 1 on loss tokens.
  length_BT: number of loss tokens in the token's sequence, 1 on padding.
  segment_BT: number of the token's sequence within its row, 0 on padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked, sequence_mean
from podrl.types import Mask

# Largest mean of log r over a sequence: lower than the limit for one token (verl, Tunix); e^10 = 22,026.
SEQUENCE_LOG_RATIO_LIMIT = 10.0


class Surrogate(NamedTuple):
    """Per-token policy losses with the numbers that metrics need.

    Attributes:
      loss_BT: loss of each token.
      clipped_BT: True where the clip took the token's gradient away. Some surrogates mark other tokens. CISPO marks
        tokens whose weight it clipped; GMPO marks tokens with A > 0 and log r outside the bounds; DPPO and IPO mark
        tokens whose -r A was set to 0; Clip-Cov marks the tokens that it dropped, KL-Cov the tokens that it penalised.
      clipped_low_BT: True where the dual clip took the token's gradient away. GMPO marks tokens with A < 0 and log r
        outside the bounds. DPPO and IPO mark tokens whose -r A was set to 0 because their probability fell.
      ratio_BT: probability ratio that the loss used.
    """

    loss_BT: Float[Array, "B T"]
    clipped_BT: Bool[Array, "B T"]
    clipped_low_BT: Bool[Array, "B T"]
    ratio_BT: Float[Array, "B T"]


def token_ratio(logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes r = exp(logprob - old_logprob), with log r clipped to +-20; no gradient flows beyond these bounds."""
    return jnp.exp(jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def of_token_losses(
    loss_BT: Float[Array, "B T"], logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"]
) -> Surrogate:
    """Makes a Surrogate from the token losses of a user's function; no token counts as clipped."""
    never_BT = jnp.zeros(loss_BT.shape, bool)
    return Surrogate(loss_BT, never_BT, never_BT, token_ratio(logprob_BT, old_logprob_BT))


def clip(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    epsilon_c: float | None = None,
) -> Surrogate:
    """Computes max(-r A, -clip(r, 1 - epsilon_low, 1 + epsilon_high) A), at most -epsilon_c A where A < 0.

    The maximum is PPO's (arXiv 1707.06347, eq. 7). An epsilon_high above epsilon_low is clip-higher (DAPO, arXiv
    2503.14476, eq. 10). The bound where A < 0 is the dual clip (arXiv 1912.09729, eq. 5).

    Args:
      epsilon_low: distance of the lower bound of r from 1, in [0, 1].
      epsilon_high: distance of the upper bound of r from 1, at least 0.
      epsilon_c: largest r that counts where A < 0, above 1; None for no dual clip.
    """
    return _clip_ratio(token_ratio(logprob_BT, old_logprob_BT), advantage_BT, epsilon_low, epsilon_high, epsilon_c)


def _clip_ratio(
    ratio_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    epsilon_low: float,
    epsilon_high: float,
    epsilon_c: float | None = None,
) -> Surrogate:
    free_BT = -advantage_BT * ratio_BT
    bound_BT = -advantage_BT * jnp.clip(ratio_BT, 1.0 - epsilon_low, 1.0 + epsilon_high)
    loss_BT = jnp.maximum(free_BT, bound_BT)
    low_BT = jnp.zeros(ratio_BT.shape, bool)
    if epsilon_c is not None:
        ceiling_BT = -advantage_BT * epsilon_c
        low_BT = (loss_BT > ceiling_BT) & (advantage_BT < 0)
        loss_BT = jnp.where(advantage_BT < 0, jnp.minimum(ceiling_BT, loss_BT), loss_BT)
    return Surrogate(loss_BT, bound_BT > free_BT, low_BT, ratio_BT)


def gspo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    token_form: bool = False,
) -> Surrogate:
    """Computes max(-s A, -clip(s, 1 - epsilon_low, 1 + epsilon_high) A) (GSPO, arXiv 2507.18071).

    s = exp(mean over the sequence of log r) is the ratio of the sequence; its logarithm is at most 10. The token form
    (section 4.3) has the value of s but each token's own gradient: sg(s) exp(logprob - sg(logprob)) takes the place of
    s. With one advantage per sequence both forms have the same gradient under sequence-mean-token-mean; with an
    advantage per token only the token form credits tokens separately.

    Args:
      epsilon_low: distance of the lower bound of s from 1 (3e-4 in the paper).
      epsilon_high: distance of the upper bound of s from 1 (4e-4 in the paper).
      token_form: True if each token has its own gradient.
    """
    log_s_BT = sequence_mean(logprob_BT - old_logprob_BT, mask_BT, length_BT, segment_BT)
    if token_form:
        log_s_BT = logprob_BT - jax.lax.stop_gradient(logprob_BT) + jax.lax.stop_gradient(log_s_BT)
    ratio_BT = jnp.exp(jnp.minimum(log_s_BT, SEQUENCE_LOG_RATIO_LIMIT))
    return _clip_ratio(ratio_BT, advantage_BT, epsilon_low, epsilon_high)


def cispo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """Computes -sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A logprob (CISPO, arXiv 2506.13585, eq. 4).

    The clipped ratio is a weight without gradient, so every token keeps a gradient.

    Args:
      epsilon_low: distance of the lower bound of the weight from 1; 1 for no lower bound.
      epsilon_high: distance of the upper bound of the weight from 1.
    """
    ratio_BT = jax.lax.stop_gradient(token_ratio(logprob_BT, old_logprob_BT))
    weight_BT = jnp.clip(ratio_BT, 1.0 - epsilon_low, 1.0 + epsilon_high)
    loss_BT = -weight_BT * advantage_BT * logprob_BT
    return Surrogate(loss_BT, ratio_BT != weight_BT, jnp.zeros(ratio_BT.shape, bool), ratio_BT)


def sapo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """Computes -(4 / tau) sigmoid(tau (r - 1)) A, a smooth gate in place of the clip (SAPO, arXiv 2511.20347).

    At r = 1 the gradient equals the gradient of -r A. It fades as r moves away from 1, and fades faster for a larger
    tau.

    Args:
      tau_positive: temperature tau of tokens with A > 0, above 0.
      tau_negative: temperature tau of all other tokens, above 0.
    """
    ratio_BT = token_ratio(logprob_BT, old_logprob_BT)
    tau_BT = jnp.where(advantage_BT > 0, jnp.asarray(tau_positive, ratio_BT.dtype), tau_negative)
    gate_BT = jax.nn.sigmoid(tau_BT * (ratio_BT - 1.0)) * (4.0 / tau_BT)
    never_BT = jnp.zeros(ratio_BT.shape, bool)
    return Surrogate(-gate_BT * advantage_BT, never_BT, never_BT, ratio_BT)


def gmpo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Mask,
    length_BT: Float[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    eps: float = 0.0,
) -> Surrogate:
    """Computes -exp(mean of clipped log r) mean(A), both means over the sequence (GMPO, arXiv 2507.20673).

    The clip bounds log r only in the direction in which A pushes it: log r is at most epsilon_high where A > 0, and at
    least -epsilon_low where A < 0. Every token gets the value of its sequence, so sequence-mean-token-mean gives the
    paper's mean over sequences.

    Args:
      advantage_BT: advantages. The paper has one advantage per sequence; here this is the mean over the sequence's
        loss tokens.
      epsilon_low: distance of the lower bound of log r from 0, nats (0.4 in the paper).
      epsilon_high: distance of the upper bound of log r from 0, nats (0.4 in the paper).
      eps: number added to lengths; verl adds 1e-8.
    """
    log_r_BT = jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    bound_BT = jnp.clip(log_r_BT, -epsilon_low, epsilon_high)
    sign_BT = jnp.sign(advantage_BT)
    kept_BT = sign_BT * jnp.minimum(sign_BT * log_r_BT, sign_BT * bound_BT)
    ratio_BT = jnp.exp(sequence_mean(kept_BT, mask_BT, length_BT, segment_BT, eps=eps))
    loss_BT = -sequence_mean(advantage_BT, mask_BT, length_BT, segment_BT, eps=eps) * ratio_BT
    outside_BT = log_r_BT != bound_BT
    return Surrogate(loss_BT, outside_BT & (advantage_BT > 0), outside_BT & (advantage_BT < 0), ratio_BT)


def dppo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    coef: float = 1e-3,
) -> Surrogate:
    """Computes -r A + coef (log r)^2, without -r A if the probability has moved too far in the direction of A.

    This is DPPO's binary total variation (arXiv 2602.04879), with the penalty that prime-rl adds. A clip of the ratio
    stops rare tokens after a small change of probability, but almost never stops frequent tokens. A bound on the change
    of probability treats both alike. The penalty is on every token, so it also draws back tokens that have lost -r A.

    Args:
      epsilon_low: largest fall of a token's probability, exp(old_logprob) - exp(logprob); beyond it, -r A is left out
        where A < 0.
      epsilon_high: largest rise of a token's probability, exp(logprob) - exp(old_logprob); beyond it, -r A is left out
        where A > 0.
      coef: weight of the penalty.
    """
    fell_BT, rose_BT = _moved(logprob_BT, old_logprob_BT, epsilon_low, epsilon_high)
    cut_low_BT, cut_high_BT = fell_BT & (advantage_BT < 0), rose_BT & (advantage_BT > 0)
    return _cut(logprob_BT, old_logprob_BT, advantage_BT, cut_low_BT, cut_high_BT, coef)


def ipo(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    coef: float = 1e-3,
) -> Surrogate:
    """Computes -r A + coef (log r)^2, without -r A if the token's probability has moved too far in either direction.

    IPO is prime-rl's default since August 2026. Its mask is DPPO's mask, but does not depend on the sign of A. A token
    that has moved too far loses -r A even if A would bring it back; only the penalty draws it back.

    Args:
      epsilon_low: largest fall of a token's probability, exp(old_logprob) - exp(logprob); beyond it, -r A is left out.
      epsilon_high: largest rise of a token's probability, exp(logprob) - exp(old_logprob); beyond it, -r A is left out.
      coef: weight of the penalty.
    """
    fell_BT, rose_BT = _moved(logprob_BT, old_logprob_BT, epsilon_low, epsilon_high)
    return _cut(logprob_BT, old_logprob_BT, advantage_BT, fell_BT, rose_BT, coef)


def _moved(
    logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"], epsilon_low: float, epsilon_high: float
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Marks tokens whose probability fell by more than epsilon_low, and tokens with a rise of more than
    epsilon_high."""
    moved_BT = jax.lax.stop_gradient(jnp.exp(logprob_BT) - jnp.exp(old_logprob_BT))
    return moved_BT < -epsilon_low, moved_BT > epsilon_high


def _cut(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    cut_low_BT: Bool[Array, "B T"],
    cut_high_BT: Bool[Array, "B T"],
    coef: float,
) -> Surrogate:
    """Computes -r A + coef (log r)^2, without -r A where `cut_low_BT` or `cut_high_BT` is True."""
    ratio_BT, cut_BT = token_ratio(logprob_BT, old_logprob_BT), cut_high_BT | cut_low_BT
    log_r_BT = jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    loss_BT = jnp.where(cut_BT, 0.0, -advantage_BT * ratio_BT) + coef * log_r_BT**2
    return Surrogate(loss_BT, cut_BT, cut_low_BT, ratio_BT)


def dro(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    beta: float = 0.05,
) -> Surrogate:
    """Computes -A logprob + beta / 2 (log r)^2, a policy gradient with a quadratic penalty (DRO, arXiv 2405.19107).

    A is not multiplied by a ratio, so the loss can be used on samples of any policy; only the penalty keeps the trained
    policy near the policy that sampled. The loss is computed per token, as in Tinker's loss of this name.

    Args:
      beta: twice the weight of (log r)^2.
    """
    log_r_BT = jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    never_BT = jnp.zeros(logprob_BT.shape, bool)
    loss_BT = -advantage_BT * logprob_BT + 0.5 * beta * log_r_BT**2
    return Surrogate(loss_BT, never_BT, never_BT, jax.lax.stop_gradient(token_ratio(logprob_BT, old_logprob_BT)))


def reinforce(
    logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"], advantage_BT: Float[Array, "B T"]
) -> Surrogate:
    """Computes -A logprob, the plain policy gradient (Williams 1992), which is also GPG's loss (arXiv 2504.02546).

    The old log-probabilities are used only for the reported ratio.
    """
    ratio_BT = jax.lax.stop_gradient(token_ratio(logprob_BT, old_logprob_BT))
    never_BT = jnp.zeros(ratio_BT.shape, bool)
    return Surrogate(-advantage_BT * logprob_BT, never_BT, never_BT, ratio_BT)


def clip_cov(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Mask,
    *,
    epsilon_low: float,
    epsilon_high: float,
    fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Surrogate:
    """Computes `clip`, with a loss of 0 on a few tokens with a large covariance of advantage and logprob (Clip-Cov,
    arXiv 2505.22617).

    The dropped tokens are chosen among the unclipped tokens whose covariance (`token_covariance`) lies between the
    bounds. The paper draws them at random; here the tokens of largest covariance are dropped, so that a step is a
    function of its batch.

    Args:
      epsilon_low: distance of the lower bound of r from 1.
      epsilon_high: distance of the upper bound of r from 1.
      fraction: largest share of this call's loss tokens to drop; however small it is, one token may be dropped.
      covariance_low: lower bound of the covariance, exclusive, in advantage times nats.
      covariance_high: upper bound of the covariance, exclusive, in advantage times nats.
    """
    surrogate = clip(logprob_BT, old_logprob_BT, advantage_BT, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    covariance_BT = token_covariance(logprob_BT, advantage_BT, mask_BT)
    open_BT = (covariance_BT > covariance_low) & (covariance_BT < covariance_high) & ~surrogate.clipped_BT
    cut_BT = _largest(covariance_BT, open_BT & mask_BT.astype(bool), mask_BT, fraction)
    loss_BT = jnp.where(cut_BT, 0.0, surrogate.loss_BT)
    return surrogate._replace(loss_BT=loss_BT, clipped_BT=cut_BT)


def kl_cov(
    logprob_BT: Float[Array, "B T"],
    old_logprob_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Mask,
    *,
    fraction: float = 2e-4,
    coef: float = 1.0,
) -> Surrogate:
    """Computes -r A, plus coef abs(log r) on the tokens of largest covariance (KL-Cov, arXiv 2505.22617).

    `token_covariance` computes this covariance of advantage and logprob.

    Args:
      fraction: share of this call's loss tokens to penalise; at least one token is penalised.
      coef: weight of the penalty, loss per nat.
    """
    ratio_BT = token_ratio(logprob_BT, old_logprob_BT)
    covariance_BT = token_covariance(logprob_BT, advantage_BT, mask_BT)
    held_BT = _largest(covariance_BT, mask_BT.astype(bool), mask_BT, fraction)
    penalty_BT = coef * jnp.abs(logprob_BT - old_logprob_BT)
    loss_BT = -advantage_BT * ratio_BT + jnp.where(held_BT, penalty_BT, 0.0)
    return Surrogate(loss_BT, held_BT, jnp.zeros(ratio_BT.shape, bool), ratio_BT)


def token_covariance(
    logprob_BT: Float[Array, "B T"], advantage_BT: Float[Array, "B T"], mask_BT: Mask
) -> Float[Array, "B T"]:
    """Computes (A - mean A) (logprob - mean logprob) without gradient; means are over the loss tokens of this call.

    Returns:
      Covariance of each token, in advantage times nats; meaningless on masked tokens.
    """
    count = jnp.maximum(mask_BT.astype(logprob_BT.dtype).sum(), 1.0)

    def centred(x_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return x_BT - masked(x_BT, mask_BT).sum() / count

    return jax.lax.stop_gradient(centred(advantage_BT) * centred(logprob_BT))


def _largest(
    x_BT: Float[Array, "B T"], allowed_BT: Bool[Array, "B T"], mask_BT: Mask, fraction: float
) -> Bool[Array, "B T"]:
    """Marks the max(1, floor(fraction x loss tokens)) largest allowed entries; ties go to the earlier token."""
    k = jnp.maximum(jnp.floor(mask_BT.astype(x_BT.dtype).sum() * fraction), 1.0)
    flat = jnp.where(allowed_BT, x_BT, -jnp.inf).ravel()
    rank = jnp.zeros(flat.size, jnp.int32).at[jnp.argsort(-flat)].set(jnp.arange(flat.size, dtype=jnp.int32))
    return (rank.astype(x_BT.dtype) < k).reshape(x_BT.shape) & allowed_BT
