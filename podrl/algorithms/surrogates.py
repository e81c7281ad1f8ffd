"""The policy-gradient surrogates, one pure function each: per-token losses, and which tokens were clipped.

r = exp(logprob - old_logprob) is the probability ratio of a token, A its advantage. Every function takes finite arrays
(`segments.masked` first); the values it gives on masked tokens mean nothing.

Shared arguments:
  logprob_BT, old_logprob_BT: log-probabilities under the policy being trained, and under the one that sampled, nats.
  advantage_BT: advantages, unitless.
  mask_BT: 1 on loss tokens.
  length_BT, segment_BT: number of loss tokens in the token's sequence, 1 on padding; sequence numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from podrl.algorithms.kl import LOG_RATIO_LIMIT
from podrl.algorithms.segments import masked, sequence_mean
from podrl.types import Mask

# A mean over a sequence is bounded more tightly than a token (verl, Tunix): e^10 = 22,026.
SEQUENCE_LOG_RATIO_LIMIT = 10.0


class Surrogate(NamedTuple):
    """Per-token policy losses with the numbers that metrics need.

    Attributes:
      loss_BT: loss of each token.
      clipped_BT: True where the clip took the token's gradient away (or, for CISPO, changed its weight).
      clipped_low_BT: True where the dual clip did (GMPO: clipped with a negative advantage; IPO: the token fell).
      ratio_BT: the probability ratio the loss used.
    """

    loss_BT: Float[Array, "B T"]
    clipped_BT: Bool[Array, "B T"]
    clipped_low_BT: Bool[Array, "B T"]
    ratio_BT: Float[Array, "B T"]


def token_ratio(logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes exp(logprob - old_logprob), with the logarithm held within +-20; no gradient flows beyond."""
    return jnp.exp(jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def given(
    loss_BT: Float[Array, "B T"], logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"]
) -> Surrogate:
    """Completes the losses of a function that says nothing of clipping."""
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
    """Takes max(-r A, -clip(r, 1 - epsilon_low, 1 + epsilon_high) A), bounded by -epsilon_c A where A < 0 (PPO).

    PPO (arXiv 1707.06347, eq. 7), clip-higher (DAPO, arXiv 2503.14476, eq. 10), dual clip (arXiv 1912.09729, eq. 5).

    Args:
      epsilon_low: how far the ratio may fall below 1.
      epsilon_high: how far it may rise above 1.
      epsilon_c: largest ratio that counts when the advantage is negative, above 1; None for no dual clip.
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
    """Clips the sequence ratio s = exp(mean over the sequence of log r) (GSPO, arXiv 2507.18071).

    The token form (section 4.3) has the value of s but each token's own gradient: s enters as
    stop_gradient(s) * exp(logprob - stop_gradient(logprob)). With one advantage per sequence both forms have the same
    gradient under sequence-mean-token-mean; with advantages per token only the token form credits tokens separately.

    Args:
      epsilon_low: how far s may fall below 1 (3e-4 in the paper).
      epsilon_high: how far s may rise above 1 (4e-4 in the paper).
      token_form: gradient per token.
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
    """Weighs -A logprob by a clipped ratio without gradient: every token learns (CISPO, arXiv 2506.13585, eq. 4).

    Args:
      epsilon_low: lower bound of the weight is 1 - epsilon_low; 1 leaves it free.
      epsilon_high: upper bound of the weight is 1 + epsilon_high.
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
    """Replaces the clip by a smooth gate, -(4 / tau) sigmoid(tau (r - 1)) A (SAPO, arXiv 2511.20347).

    At r = 1 the gradient is that of -r A, and it fades as r leaves 1, the faster the larger tau.

    Args:
      tau_positive: temperature of tokens with A > 0.
      tau_negative: temperature of the others.
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
    """Takes -exp(mean of log r) mean(A), each log r clipped on the side A pushes to (GMPO, arXiv 2507.20673).

    The clip acts on log r, at -epsilon_low and epsilon_high. The value of a sequence stands on each of its tokens, so
    sequence-mean-token-mean gives the paper's mean over sequences.

    Args:
      advantage_BT: advantages, one per sequence in the paper; their mean counts.
      epsilon_low: how far log r may fall below 0 (0.4 in the paper).
      epsilon_high: how far it may rise above 0 (0.4 in the paper).
      eps: added to lengths; 1e-8 is verl's arithmetic.
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
    """Takes -r A, 0 where the token's probability has moved too far the way A pushes it; plus coef (log r)^2.

    DPPO's binary total variation (arXiv 2602.04879), with the penalty that prime-rl adds. A clip of the ratio holds
    rare tokens back at once and frequent ones hardly ever; probabilities measure both alike. The penalty is on every
    token, those cut included, so these are drawn back.

    Args:
      epsilon_low: how far exp(logprob) may fall below exp(old_logprob) where A < 0.
      epsilon_high: how far it may rise above where A > 0.
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
    """Takes -r A, 0 where the token's probability has moved too far either way; plus coef (log r)^2.

    prime-rl's IPO, its default since August 2026: DPPO's mask without regard to the sign of A. Tokens that have moved
    far are held where they are, also where A would bring them back; the penalty is on them as well, and does.

    Args:
      epsilon_low: how far exp(logprob) may fall below exp(old_logprob).
      epsilon_high: how far it may rise above.
      coef: weight of the penalty.
    """
    fell_BT, rose_BT = _moved(logprob_BT, old_logprob_BT, epsilon_low, epsilon_high)
    return _cut(logprob_BT, old_logprob_BT, advantage_BT, fell_BT, rose_BT, coef)


def _moved(
    logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"], epsilon_low: float, epsilon_high: float
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Marks the tokens whose probability fell by more than epsilon_low, and those where it rose by epsilon_high."""
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
    """Takes -r A, 0 on the tokens that are cut, plus coef (log r)^2 on all."""
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
    """Takes -A logprob + beta / 2 (log r)^2, policy gradient held by a quadratic penalty (DRO, arXiv 2405.19107).

    Without a ratio on A it serves samples of any policy; the penalty is all that holds the policy to that one. As in
    Tinker's loss of that name, per token.

    Args:
      beta: weight of the penalty.
    """
    log_r_BT = jnp.clip(logprob_BT - old_logprob_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    never_BT = jnp.zeros(logprob_BT.shape, bool)
    loss_BT = -advantage_BT * logprob_BT + 0.5 * beta * log_r_BT**2
    return Surrogate(loss_BT, never_BT, never_BT, jax.lax.stop_gradient(token_ratio(logprob_BT, old_logprob_BT)))


def reinforce(
    logprob_BT: Float[Array, "B T"], old_logprob_BT: Float[Array, "B T"], advantage_BT: Float[Array, "B T"]
) -> Surrogate:
    """Takes -A logprob, the plain policy gradient (Williams 1992), also the loss of GPG (arXiv 2504.02546).

    The old log-probabilities enter only the ratio that is reported.
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
    """Clips, and drops a few tokens of large covariance between advantage and logprob (Clip-Cov, arXiv 2505.22617).

    Chosen among the unclipped tokens whose covariance lies between the bounds. The paper draws them at random; here
    those with the largest covariance are taken, so that a step is a function of its batch.

    Args:
      epsilon_low: how far the ratio may fall below 1.
      epsilon_high: how far it may rise above 1.
      fraction: share of the loss tokens of this call that is cut off, at least one token.
      covariance_low: lower bound, exclusive.
      covariance_high: upper bound, exclusive.
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
    """Takes -r A, plus coef abs(log r) on the tokens of largest covariance of advantage and logprob (arXiv 2505.22617).

    Args:
      fraction: share of the loss tokens of this call that is penalised, at least one token.
      coef: weight of the penalty.
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
    """Computes (A - mean A) (logprob - mean logprob), means over the loss tokens of this call, without gradient."""
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
