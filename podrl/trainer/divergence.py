"""The reverse KL of a policy to a teacher over the whole vocabulary, and log-probabilities of a few ids, by chunks."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int

from podrl.models.attention import einsum_f32
from podrl.models.config import ModelConfig
from podrl.trainer.logprob import (
    CHUNK_ELEMENTS,
    Head,
    VocabChunk,
    cap,
    chunk_of,
    continues,
    head_of,
    output_matrix,
    pulled_back,
    scan,
)
from podrl.types import PyTree

_LOWEST = -1e30  # below any logit, but finite: 0 times minus infinity would be NaN


@dataclasses.dataclass(frozen=True)
class LogitInputs:
    """The inputs of a model's logits: its output matrix and the hidden states of packed rows.

    Attributes:
      params: whole parameter tree; its 'unembed' (D, V) is used, or 'embed' (V, D) if there is no 'unembed'.
      hidden_BTD: final normalised hidden states; index t predicts token t + 1.
      config: the model.
      ids: number of token ids to use, counted from id 0; None for all ids of the model.
    """

    params: PyTree
    hidden_BTD: Float[Array, "B T D"]
    config: ModelConfig
    ids: int | None = None

    def matrix(self) -> Float[Array, "V D"]:
        """The matrix whose product with hidden states is the logits, one row per id in use."""
        return output_matrix(self.params)[: self.ids]

    def head(self, temperature: float, mesh: Mesh | None, elements: int) -> Head:
        """Decides how the logits are split over the mesh and into chunks of at most `elements` values."""
        B, T, _ = self.hidden_BTD.shape
        return head_of(self.matrix().shape, B, T, self.config, temperature, mesh, elements)


def token_divergence(
    policy: LogitInputs,
    teacher: LogitInputs,
    tokens_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log p(token), the entropy of p, and KL(p || teacher), all in nats.

    p is the policy's distribution at `temperature`. The KL is an exact sum over the whole vocabulary,
    differentiable with respect to the policy and not to the teacher. The logits of both models are computed chunk by
    chunk, once forward and once backward, so no more than `chunk_elements` of them exist on a device
    (`podrl.trainer.logprob`).

    Args:
      policy: the policy's hidden states and output matrix; differentiated.
      teacher: the teacher's hidden states and output matrix, with the same number of ids in use.
      tokens_BT: packed tokens.
      segment_BT: segment of each token, 0 on padding. The first token of a segment has no predecessor, so all results
        are 0 there.
      temperature: divisor of the capped logits of both models; positive.
      mesh: mesh that splits the arrays, see `podrl.trainer.logprob.token_logprobs`; None for one device.
      chunk_elements: largest number of logits of both models on one device, unless chunks of 128 ids have more.
    """
    half = chunk_elements // 2
    head, their_head = policy.head(temperature, mesh, half), teacher.head(temperature, mesh, half)
    assert (head.chunk, head.vocab) == (their_head.chunk, their_head.vocab), (head, their_head)
    found: Any = _divergence(
        policy.hidden_BTD,
        policy.matrix(),
        jax.lax.stop_gradient(teacher.hidden_BTD),
        jax.lax.stop_gradient(teacher.matrix()),
        jnp.roll(tokens_BT, -1, axis=1),
        head,
        their_head,
    )
    logprob_BT, entropy_BT, kl_BT = (of_next(x_BT, segment_BT) for x_BT in found)
    return logprob_BT, entropy_BT, kl_BT


def chosen_logprobs(
    model: LogitInputs,
    id_BTK: Int[Array, "B T K"],
    segment_BT: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Float[Array, "B T K"], Float[Array, "B T"]]:
    """Computes log p(id) for K ids at each token's position, and the entropy of p, in nats; differentiable.

    Args:
      model: hidden states and output matrix of the model.
      id_BTK: K ids at each token's position: alternatives to the token itself.
      segment_BT: segment of each token, 0 on padding. Both results are 0 on padding and the first token of a segment.
      temperature: divisor of the capped logits; positive.
      mesh: mesh that splits the arrays; None for one device.
      chunk_elements: largest number of logits on one device, unless a chunk of 128 ids has more.
    """
    head = model.head(temperature, mesh, chunk_elements)
    wanted_BTK = jnp.roll(id_BTK, -1, axis=1)
    found: Any = _chosen(model.hidden_BTD, model.matrix(), wanted_BTK, head)
    logprob_BTK, entropy_BT = (of_next(x, segment_BT) for x in found)
    return logprob_BTK, entropy_BT


def top_ids(
    model: LogitInputs, k: int, *, mesh: Mesh | None = None, chunk_elements: int = CHUNK_ELEMENTS
) -> Int[Array, "B T K"]:
    """Lists the k likeliest ids at each token's position, the likeliest first.

    The ids of a segment's first token are meaningless, because no token of the segment predicts it.

    Args:
      model: hidden states and output matrix of the model.
      k: number of ids, at most the number of ids in use.
      mesh: mesh that splits the arrays; None for one device.
      chunk_elements: largest number of logits on one device, unless a chunk of 128 ids has more.
    """
    ids = model.matrix().shape[0]
    assert 0 < k <= ids, (k, ids)
    head = model.head(1.0, mesh, chunk_elements)
    rows, matrix = _specs(head)
    run = _on_mesh(functools.partial(_top, k=k, head=head), head, (rows, matrix), rows)
    return jnp.roll(run(model.hidden_BTD, model.matrix()), 1, axis=1)


def of_next(x_BT: Float[Array, "B T *K"], segment_BT: Int[Array, "B T"]) -> Float[Array, "B T *K"]:
    """Moves each result from the predicting token to the predicted token; 0 at tokens that no token predicts."""
    keep = continues(segment_BT).reshape(segment_BT.shape + (1,) * (x_BT.ndim - 2))
    return jnp.where(keep, jnp.roll(x_BT, 1, axis=1), 0.0)


def _specs(head: Head) -> tuple[Spec, Spec]:
    return head.tokens, Spec(head.vocab or None, head.model or None)


def _on_mesh(run, head: Head, in_specs, out_specs):
    if head.mesh is None:
        return run
    return jax.shard_map(run, mesh=head.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _logits(hidden_XD: Array, chunk: VocabChunk, head: Head) -> tuple[Array, Array]:
    """Computes a chunk's logits, and a copy with -inf for ids that were also in the previous chunk."""
    logits_XC = cap(einsum_f32("XD,CD->XC", hidden_XD, chunk.weight_CD), head)
    return logits_XC, jnp.where(chunk.new_C, logits_XC, -jnp.inf)


def _flat(hidden_BTD: Array) -> Array:
    return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _divergence(hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT, head: Head, their_head: Head):
    return _divergence_fwd(hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT, head, their_head)[0]


def _divergence_fwd(hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT, head: Head, their_head: Head):
    rows, matrix = _specs(head)
    run = functools.partial(_compare, head=head, their_head=their_head)
    run = _on_mesh(run, head, (rows, matrix, rows, _specs(their_head)[1], rows), (rows,) * 7)
    operands = (hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT)
    logprob_BT, entropy_BT, kl_BT, *sums = run(*operands)
    return (logprob_BT, entropy_BT, kl_BT), (operands, entropy_BT, kl_BT, *sums)


def _divergence_bwd(head: Head, their_head: Head, saved, grads):
    operands, *kept = saved
    rows, matrix = _specs(head)
    run = functools.partial(_pull_divergence, head=head, their_head=their_head)
    run = _on_mesh(run, head, (rows, matrix, rows, _specs(their_head)[1], *[rows] * 10), (rows, matrix))
    return *run(*operands, *kept, *grads), None, None, None


_divergence.defvjp(_divergence_fwd, _divergence_bwd)


def _compare(hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT, *, head: Head, their_head: Head):
    """Computes log p of the target, entropy, KL, and both models' largest logits and log sums, in one pass.

    A log sum is the log of the sum of exp(logit - largest logit). Every result has the shape (B, T).
    """
    hidden_XD, their_hidden_XE, target_X = _flat(hidden_BTD), _flat(their_hidden_BTE), target_BT.reshape(-1)

    def step(carry, index):
        top_X, their_top_X, sum_X, their_sum_X, weighted_X, gap_X, hit_X = carry
        chunk = chunk_of(matrix_VD, index, hidden_XD.dtype, head)
        logits_XC, masked_XC = _logits(hidden_XD, chunk, head)
        their_chunk = chunk_of(theirs_VE, index, their_hidden_XE.dtype, their_head)
        their_logits_XC, their_masked_XC = _logits(their_hidden_XE, their_chunk, their_head)
        is_target_XC = (jnp.arange(head.chunk) == chunk.offset(target_X)[:, None]) & chunk.new_C
        hit_X = hit_X + jnp.sum(jnp.where(is_target_XC, logits_XC, 0.0), axis=1)
        new = jnp.maximum(top_X, masked_XC.max(axis=1)), jnp.maximum(their_top_X, their_masked_XC.max(axis=1))
        sums = _over(new, top_X, their_top_X, sum_X, their_sum_X, weighted_X, gap_X)
        over_XC, their_over_XC = logits_XC - new[0][:, None], their_logits_XC - new[1][:, None]
        exp_XC, their_exp_XC = jnp.where(chunk.new_C, jnp.exp(over_XC), 0.0), jnp.exp(their_masked_XC - new[1][:, None])
        terms = (exp_XC, their_exp_XC, exp_XC * over_XC, exp_XC * (over_XC - their_over_XC))
        return (*new, *(total_X + x_XC.sum(axis=1) for total_X, x_XC in zip(sums, terms, strict=True)), hit_X), None

    zero_X = jnp.zeros(target_X.shape, jnp.float32)
    none_X = jnp.full_like(zero_X, _LOWEST)
    chunks = math.ceil(matrix_VD.shape[0] / head.chunk)
    (top_X, their_top_X, *sums, hit_X), _ = scan(step, (none_X, none_X, *[zero_X] * 5), chunks)
    if head.vocab:
        new = jax.lax.pmax((top_X, their_top_X), head.vocab)
        *sums, hit_X = jax.lax.psum((*_over(new, top_X, their_top_X, *sums), hit_X), head.vocab)
        top_X, their_top_X = new
    sum_X, their_sum_X, weighted_X, gap_X = sums
    log_X, their_log_X = jnp.log(sum_X), jnp.log(their_sum_X)
    kl_X, entropy_X = gap_X / sum_X - (log_X - their_log_X), log_X - weighted_X / sum_X
    found = (hit_X - top_X - log_X, entropy_X, kl_X, top_X, log_X, their_top_X, their_log_X)
    return tuple(x_X.reshape(target_BT.shape) for x_X in found)


def _over(new, top_X, their_top_X, sum_X, their_sum_X, weighted_X, gap_X) -> tuple[Array, Array, Array, Array]:
    """Converts running sums from the old largest logits of policy and teacher to the `new` largest logits.

    All sums use logits minus the largest logit. For likely ids this difference is small, so it keeps its precision;
    sums of the logits themselves would lose it when they are subtracted in the KL.
    """
    down_X, their_down_X = top_X - new[0], their_top_X - new[1]
    shift_X = jnp.exp(down_X)
    weighted_X = shift_X * (weighted_X + sum_X * down_X)
    gap_X = shift_X * (gap_X + sum_X * (down_X - their_down_X))
    return sum_X * shift_X, their_sum_X * jnp.exp(their_down_X), weighted_X, gap_X


def _pull_divergence(
    hidden_BTD, matrix_VD, their_hidden_BTE, theirs_VE, target_BT, *of_tokens, head: Head, their_head: Head
) -> tuple[Array, Array]:
    their_hidden_XE, target_X = _flat(their_hidden_BTE), target_BT.reshape(-1)
    entropy_X, kl_X, *sums, dlogprob_X, dentropy_X, dkl_X = (x_BT.reshape(-1) for x_BT in of_tokens)
    top_X1, log_X1, their_top_X1, their_log_X1 = (x_X[:, None] for x_X in sums)

    def dlogits(logits_XC: Array, chunk: VocabChunk) -> Array:
        their_chunk = chunk_of(theirs_VE, chunk.number, their_hidden_XE.dtype, their_head)
        their_logits_XC, _ = _logits(their_hidden_XE, their_chunk, their_head)
        centred_XC = logits_XC - top_X1 - log_X1
        ratio_XC = centred_XC - (their_logits_XC - their_top_X1 - their_log_X1)
        is_target_XC = jnp.arange(head.chunk) == chunk.offset(target_X)[:, None]
        # d logprob = onehot - p;  d entropy = -p (log p + entropy);  d kl = p (log p - log teacher - kl)
        slope_XC = dlogprob_X[:, None] + dentropy_X[:, None] * (centred_XC + entropy_X[:, None])
        slope_XC = slope_XC - dkl_X[:, None] * (ratio_XC - kl_X[:, None])
        return jnp.where(is_target_XC, dlogprob_X[:, None], 0.0) - jnp.exp(centred_XC) * slope_XC

    return pulled_back(hidden_BTD, matrix_VD, dlogits, head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chosen(hidden_BTD, matrix_VD, id_BTK, head: Head):
    return _chosen_fwd(hidden_BTD, matrix_VD, id_BTK, head)[0]


def _chosen_fwd(hidden_BTD, matrix_VD, id_BTK, head: Head):
    rows, matrix = _specs(head)
    run = _on_mesh(functools.partial(_gather, head=head), head, (rows, matrix, rows), (rows,) * 3)
    logprob_BTK, entropy_BT, lse_BT = run(hidden_BTD, matrix_VD, id_BTK)
    return (logprob_BTK, entropy_BT), (hidden_BTD, matrix_VD, id_BTK, entropy_BT, lse_BT)


def _chosen_bwd(head: Head, saved, grads):
    rows, matrix = _specs(head)
    run = functools.partial(_pull_chosen, head=head)
    run = _on_mesh(run, head, (rows, matrix, *[rows] * 5), (rows, matrix))
    return *run(*saved, *grads), None


_chosen.defvjp(_chosen_fwd, _chosen_bwd)


def _gather(hidden_BTD, matrix_VD, id_BTK, *, head: Head):
    """Computes log p of the ids, the entropy of p, and the log of the sum of exp(logits)."""
    hidden_XD, id_XK = _flat(hidden_BTD), id_BTK.reshape(-1, id_BTK.shape[-1])

    def step(carry, index):
        top_X, sum_X, weighted_X, hit_XK = carry
        chunk = chunk_of(matrix_VD, index, hidden_XD.dtype, head)
        logits_XC, masked_XC = _logits(hidden_XD, chunk, head)
        offset_XK = chunk.offset(id_XK)
        place_XK = jnp.clip(offset_XK, 0, head.chunk - 1)
        here_XK = (offset_XK == place_XK) & chunk.new_C[place_XK]
        hit_XK = hit_XK + jnp.where(here_XK, jnp.take_along_axis(logits_XC, place_XK, axis=1), 0.0)
        new_top_X = jnp.maximum(top_X, jnp.max(masked_XC, axis=1))
        shift_X = jnp.exp(top_X - new_top_X)
        exp_XC = jnp.exp(masked_XC - new_top_X[:, None])
        sum_X = sum_X * shift_X + jnp.sum(exp_XC, axis=1)
        weighted_X = weighted_X * shift_X + jnp.sum(exp_XC * logits_XC, axis=1)
        return (new_top_X, sum_X, weighted_X, hit_XK), None

    zero_X = jnp.zeros(id_XK.shape[0], jnp.float32)
    carry = (jnp.full_like(zero_X, -jnp.inf), zero_X, zero_X, jnp.zeros(id_XK.shape, jnp.float32))
    (top_X, sum_X, weighted_X, hit_XK), _ = scan(step, carry, math.ceil(matrix_VD.shape[0] / head.chunk))
    if head.vocab:
        local_top_X = top_X
        top_X = jax.lax.pmax(local_top_X, head.vocab)
        shift_X = jnp.exp(local_top_X - top_X)
        sum_X, weighted_X, hit_XK = jax.lax.psum((sum_X * shift_X, weighted_X * shift_X, hit_XK), head.vocab)
    lse_X = top_X + jnp.log(sum_X)
    entropy_X, shape = lse_X - weighted_X / sum_X, id_BTK.shape[:2]
    return (hit_XK - lse_X[:, None]).reshape(id_BTK.shape), entropy_X.reshape(shape), lse_X.reshape(shape)


def _pull_chosen(hidden_BTD, matrix_VD, id_BTK, entropy_BT, lse_BT, dlogprob_BTK, dentropy_BT, *, head: Head):
    id_XK, dlogprob_XK = (x.reshape(-1, id_BTK.shape[-1]) for x in (id_BTK, dlogprob_BTK))
    entropy_X, lse_X, dentropy_X = (x_BT.reshape(-1) for x_BT in (entropy_BT, lse_BT, dentropy_BT))
    row_X1, total_X1 = jnp.arange(len(id_XK))[:, None], dlogprob_XK.sum(axis=1, keepdims=True)

    def dlogits(logits_XC: Array, chunk: VocabChunk) -> Array:
        centred_XC = logits_XC - lse_X[:, None]
        offset_XK = chunk.offset(id_XK)
        # Ids of other chunks go to the index head.chunk, which mode="drop" discards; a negative index would wrap.
        place_XK = jnp.where((offset_XK >= 0) & (offset_XK < head.chunk), offset_XK, head.chunk)
        hit_XC = jnp.zeros_like(logits_XC).at[row_X1, place_XK].add(dlogprob_XK, mode="drop")
        slope_XC = total_X1 + dentropy_X[:, None] * (centred_XC + entropy_X[:, None])
        return hit_XC - jnp.exp(centred_XC) * slope_XC

    return pulled_back(hidden_BTD, matrix_VD, dlogits, head)


def _top(hidden_BTD, matrix_VD, *, k: int, head: Head) -> Array:
    hidden_XD = _flat(hidden_BTD)

    def best(value_XN: Array, id_XN: Array) -> tuple[Array, Array]:
        value_XK, place_XK = jax.lax.top_k(value_XN, k)
        return value_XK, jnp.take_along_axis(id_XN, place_XK, axis=1)

    def step(carry, index):
        value_XK, id_XK = carry
        chunk = chunk_of(matrix_VD, index, hidden_XD.dtype, head)
        _, masked_XC = _logits(hidden_XD, chunk, head)
        id_XC = jnp.broadcast_to(chunk.first + jnp.arange(head.chunk, dtype=jnp.int32), masked_XC.shape)
        found = (jnp.concatenate(pair, axis=1) for pair in ((value_XK, masked_XC), (id_XK, id_XC)))
        return best(*found), None

    shape = (hidden_XD.shape[0], k)
    start = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))
    found, _ = scan(step, start, math.ceil(matrix_VD.shape[0] / head.chunk))
    if head.vocab:
        found = best(*(jax.lax.all_gather(x_XK, head.vocab, axis=1, tiled=True) for x_XK in found))
    return found[1].reshape(*hidden_BTD.shape[:2], k)
