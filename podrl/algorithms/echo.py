"""ECHO: the policy also learns to predict its environment's answers, by a cross-entropy added to the policy loss.

The method is that of arXiv 2605.24517. An observed token is a token that the environment appended, for example a tool's
output, after the first sampled token of a piece. The policy did not sample this token, so the token has no advantage;
its probability is raised as in supervised fine-tuning.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from podrl.algorithms.aggregate import token_mean
from podrl.algorithms.policy_loss import PolicyLossFn
from podrl.algorithms.policy_rows import ExtraTermRows
from podrl.algorithms.segments import masked
from podrl.types import Ratio


@flax.struct.dataclass
class ObservedRows(ExtraTermRows):
    """Packed rows of an update that also learns from observations; the additional term is their cross-entropy."""


def observed(
    mask_BT: Float[np.ndarray, "B T"], length_B: Float[np.ndarray, " B"], piece_BT: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T"]:
    """Marks observed tokens with 1: tokens that the environment appended after the first sampled token of a piece.

    Tokens before a piece's first sampled token are its prompt and do not count: the first piece begins with the
    sample's prompt, and the prompts of later pieces repeat tokens of earlier pieces.

    Args:
      mask_BT: 1 on sampled tokens; one sample per row.
      length_B: number of tokens of each sample; padding follows.
      piece_BT: number of each token's piece within its sample, from 0.
    """
    sampled_BT = np.asarray(mask_BT) > 0
    count_BT = np.cumsum(sampled_BT, axis=1)
    starts_BT = np.diff(piece_BT, axis=1, prepend=0) > 0
    # Number of sampled tokens in earlier pieces of the sample.
    before_BT = np.maximum.accumulate(np.where(starts_BT, count_BT - sampled_BT, 0), axis=1)
    begun_BT = count_BT > before_BT
    return (begun_BT & ~sampled_BT & (np.arange(sampled_BT.shape[1]) < length_B[:, None])).astype(np.float32)


def with_observations(loss: PolicyLossFn):
    """Adds to a policy loss the weighted cross-entropy of observed tokens, divided by their number.

    The returned function reads ObservedRows. It adds the metric echo/nll: the unweighted mean of -log p over observed
    tokens, in nats.
    """

    @functools.wraps(loss, assigned=(), updated=())  # make_train_step looks at the wrapped loss
    def joined(
        logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: ObservedRows
    ) -> tuple[Ratio, dict[str, Ratio]]:
        found, metrics = loss(logprob_BT, entropy_BT, rows.policy)
        observed_BT = (rows.weight_BT > 0).astype(logprob_BT.dtype)
        nll_BT = -masked(logprob_BT, observed_BT)
        total = jnp.sum(rows.weight_BT * nll_BT)
        mean_nll = jax.lax.stop_gradient(token_mean(nll_BT, observed_BT))
        return Ratio(found.total + rows.scale * total, found.count), {**metrics, "echo/nll": mean_nll}

    return joined
