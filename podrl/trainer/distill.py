"""Objectives with the KL of the policy to a teacher in the loss, and programs that compute the teacher's scores."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from podrl.algorithms.aggregate import token_mean
from podrl.algorithms.distill import Distillation, IdRows, TaughtRows, TopKRows, top_k_kl
from podrl.algorithms.segments import masked
from podrl.mesh import rules
from podrl.models import parameters
from podrl.models.config import ModelConfig
from podrl.trainer.divergence import LogitInputs, chosen_logprobs, token_divergence, top_ids
from podrl.trainer.objective import Forward, Objective, TokenLoss, Trunk
from podrl.types import Batch, Layout, PyTree, Ratio


@dataclasses.dataclass(frozen=True)
class TeacherParts:
    """The parts of an update's programs that change if the loss has the KL to a teacher.

    Attributes:
      step: keyword arguments for `make_train_step`; empty if nothing changes.
      whole: True if the update reads the teacher's parameters; its frozen parameters are then the pair (the policy's
        frozen parameters, the teacher's parameters).
      score: function that lists the policy's likeliest ids for a packed mini-batch and scores them under the teacher,
        see `make_top_k_fns`; None if the update does not need it.
      likely: function that only lists the policy's likeliest ids. An update uses it if the teacher reads other rows
        than the policy; None if the update does not need it.
      score_ids: function that scores the ids of `likely` under the teacher, in the teacher's rows (IdRows); None if the
        update does not need it.
    """

    step: Mapping[str, Any]
    whole: bool = False
    score: Callable[[PyTree, PyTree, Batch[Layout]], PyTree] | None = None
    likely: Callable[[PyTree, Batch[Layout]], PyTree] | None = None
    score_ids: Callable[[PyTree, Batch[IdRows]], PyTree] | None = None


def teacher_parts(how: Distillation, forward: Forward, teacher: ModelConfig) -> TeacherParts:
    """Builds the parts that an update with a teacher needs; a KL estimated on the sampled token changes nothing.

    Args:
      how: form of the KL and the ids that it compares.
      forward: the policy's forward pass.
      teacher: the teacher's architecture.

    Raises:
      ValueError: the teacher has fewer token ids than the policy, or the policy has fewer than `how.top_k`.
    """
    if how.sampled:
        return TeacherParts({})
    ids = forward.config.vocab_size
    if teacher.vocab_size < ids:
        raise ValueError(
            f"grpo.teacher_kl={how.kl!r} needs the teacher's probability of any of the {ids} token ids of the policy, "
            f"but the teacher has only {teacher.vocab_size}: set model.reference to a teacher with all ids, or set "
            "grpo.teacher_kl='sampled'."
        )
    trunk = Trunk(config=teacher, mesh=forward.mesh, dtype=forward.dtype)
    if how.kl == "full":
        join = lambda params, fixed: (parameters.join_trainable(params, fixed[0]), fixed[1])  # noqa: E731
        objective = functools.partial(full_objective, teacher=trunk)
        return TeacherParts({"objective_of": objective, "join": join}, whole=True)
    if how.top_k > ids:
        raise ValueError(
            f"grpo.teacher_top_k={how.top_k} is more than the {ids} token ids there are: set it to {ids}, which "
            "compares all of them, or set grpo.teacher_kl='full'."
        )
    score, likely, score_ids = make_top_k_fns(forward, trunk, how.top_k)
    return TeacherParts({"objective_of": top_k_objective}, score=score, likely=likely, score_ids=score_ids)


def full_objective(forward: Forward, loss: TokenLoss, *, teacher: Trunk) -> Objective:
    """Builds the objective loss + KL(policy || teacher); the KL, over the whole vocabulary, is a weighted token mean.

    The objective's parameters are the pair (policy's parameters, teacher's parameters). The teacher's hidden states are
    computed in every micro-batch, so that no batch has to hold them.

    Args:
      forward: the policy's forward pass.
      loss: policy loss on `rows.policy`; its divisor is the same as without a teacher.
      teacher: forward pass of the teacher, which has all token ids of the policy and may have more. It runs on the
        devices of the policy's forward pass.
    """
    teacher = dataclasses.replace(teacher, mesh=forward.mesh)

    def objective(params: tuple[PyTree, PyTree], rows: TaughtRows, key: PRNGKeyArray):
        own, theirs = params
        layout = rows.layout
        policy = LogitInputs(own, forward.hidden(own, layout, key), forward.config)
        hidden_BTE = jax.lax.stop_gradient(teacher.hidden(jax.lax.stop_gradient(theirs), layout))
        teacher_out = LogitInputs(theirs, hidden_BTE, teacher.config, ids=forward.config.vocab_size)
        of = {"temperature": forward.temperature, "mesh": forward.mesh}
        logprob_BT, entropy_BT, kl_BT = token_divergence(policy, teacher_out, layout.tokens_BT, layout.segment_BT, **of)
        return _joined(loss(logprob_BT, entropy_BT, rows.policy), kl_BT, rows)

    return objective


def top_k_objective(forward: Forward, loss: TokenLoss) -> Objective:
    """Builds the objective loss + KL(policy || teacher) over the ids in the rows, with all other ids counted as one.

    Args:
      forward: the policy's forward pass.
      loss: policy loss on `rows.policy`; its divisor is the same as without a teacher.
    """

    def objective(params: PyTree, rows: TopKRows, key: PRNGKeyArray):
        layout = rows.layout
        policy = LogitInputs(params, forward.hidden(params, layout, key), forward.config)
        id_BTJ = jnp.concatenate([layout.tokens_BT[..., None], rows.id_BTK], axis=-1)
        of = {"temperature": forward.temperature, "mesh": forward.mesh}
        logprob_BTJ, entropy_BT = chosen_logprobs(policy, id_BTJ, layout.segment_BT, **of)
        kl_BT = top_k_kl(logprob_BTJ[..., 1:], rows.teacher_logprob_BTK)
        return _joined(loss(logprob_BTJ[..., 0], entropy_BT, rows.policy), kl_BT, rows)

    return objective


def _joined(
    found: tuple[Ratio, Mapping[str, Ratio]], kl_BT: Float[Array, "B T"], rows: TaughtRows
) -> tuple[Ratio, Mapping[str, Ratio]]:
    """Adds the weighted KL to the numerator of a loss; the metric opd/reverse_kl is the mean KL, nats per token.

    The sum is later divided by the loss's denominator. With the factor `rows.scale` the result is a mean over the KL's
    own tokens (`podrl.algorithms.policy_rows.ExtraTermRows`).
    """
    loss, metrics = found
    taught_BT = (rows.weight_BT > 0).astype(kl_BT.dtype)
    kl_BT = masked(kl_BT, taught_BT)
    mean_kl = jax.lax.stop_gradient(token_mean(kl_BT, taught_BT))
    return Ratio(loss.total + rows.scale * jnp.sum(rows.weight_BT * kl_BT), loss.count), {
        **metrics,
        "opd/reverse_kl": mean_kl,
    }


def make_top_k_fns(forward: Forward, teacher: Trunk, k: int) -> tuple[Callable, Callable, Callable]:
    """Builds the jitted programs that compute a teacher's log-probabilities of the policy's k likeliest ids.

    The ids at index t are alternatives to token t. Micro-batches beyond `batch.micro_batches` are not computed; their
    values are 0.

    Returns:
      Three functions. top_k_fn(params, teacher's params, batch) -> (id_ABTK, teacher_logprob_ABTK), in nats, is for a
      policy and a teacher that read the same rows. For a teacher that reads other rows, there are likely_fn(params,
      batch) -> id_ABTK, and score_ids_fn(teacher's params, batch of IdRows) -> teacher_logprob_ABTK.

    Args:
      forward: the policy's forward pass.
      teacher: the teacher's forward pass.
      k: number of ids.
    """
    mesh, ids = forward.mesh, forward.config.vocab_size
    place = functools.partial(rules.constrain, axes=("layers", "batch", "time", "act"), mesh=mesh)

    def zeros(layout: Layout, dtype: DTypeLike) -> Array:
        return place(jnp.zeros((*layout.tokens_BT.shape, k), dtype))

    def looped(score: Callable[[Any], PyTree], batch: Batch[Any], out: PyTree) -> PyTree:
        def body(index: Array, out: PyTree) -> PyTree:
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch.rows)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return jax.tree.map(put, out, score(rows))

        return jax.lax.fori_loop(0, batch.micro_batches, body, out)

    def likely_ids(params: PyTree, layout: Layout) -> Array:
        return top_ids(LogitInputs(params, forward.hidden(params, layout), forward.config), k, mesh=mesh)

    def logprobs(theirs: PyTree, layout: Layout, id_BTK: Array) -> Array:
        teacher_out = LogitInputs(theirs, teacher.hidden(theirs, layout), teacher.config, ids=ids)
        return chosen_logprobs(teacher_out, id_BTK, layout.segment_BT, temperature=forward.temperature, mesh=mesh)[0]

    def both(params: PyTree, theirs: PyTree, batch: Batch[Layout]) -> tuple[Array, Array]:
        def score(layout: Layout) -> tuple[Array, Array]:
            id_BTK = likely_ids(params, layout)
            return id_BTK, logprobs(theirs, layout, id_BTK)

        return looped(score, batch, (zeros(batch.rows, jnp.int32), zeros(batch.rows, jnp.float32)))

    def likely(params: PyTree, batch: Batch[Layout]) -> Array:
        return looped(functools.partial(likely_ids, params), batch, zeros(batch.rows, jnp.int32))

    def score_ids(theirs: PyTree, batch: Batch[IdRows]) -> Array:
        return looped(
            lambda rows: logprobs(theirs, rows.layout, rows.id_BTK), batch, zeros(batch.rows.layout, jnp.float32)
        )

    return jax.jit(both), jax.jit(likely), jax.jit(score_ids)
