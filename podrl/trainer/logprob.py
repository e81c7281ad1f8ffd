"""Token log-probabilities and entropies from hidden states, chunk by chunk of the vocabulary, forward and backward."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from podrl.mesh import rules
from podrl.models.attention import einsum_f32
from podrl.models.config import ModelConfig
from podrl.types import PyTree

# Largest number of logits at a time on one device: 64 Mi float32 values are 256 MiB.
CHUNK_ELEMENTS = 1 << 26
_MIN_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Head:
    """Static arguments of the functions that compute logits: the split over chunks and mesh, and the logits' scaling.

    Attributes:
      softcap: bound on the absolute value of logits; 0 for no bound.
      temperature: divisor of the capped logits.
      chunk: number of ids in a chunk, C.
      mesh: mesh that splits the arrays; None for one device.
      rows, time, vocab, model: names of the mesh axes that split B, T, V and D.
    """

    softcap: float
    temperature: float
    chunk: int
    mesh: Mesh | None
    rows: tuple[str, ...]
    time: tuple[str, ...]
    vocab: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def tokens(self) -> Spec:
        """Placement of an array whose first two dimensions are B and T."""
        return Spec(self.rows or None, self.time) if self.time else Spec(self.rows or None)


def token_logprobs(
    params: PyTree,
    hidden_BTD: Float[Array, "B T D"],
    tokens_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    config: ModelConfig,
    *,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log p(token t | tokens < t) and the distribution's entropy, nats, for every token of packed rows.

    Logits are computed for one chunk of the vocabulary after another, once forward and once backward, so no more than
    `chunk_elements` of them exist on a device. Just before its use, a chunk of the output matrix is gathered over the
    mesh axes that split its model dimension. The chunk's gradient is scattered back at once, so no device holds more
    than one gathered chunk.

    Args:
      params: whole parameter tree; its 'unembed' (D, V) is used, or 'embed' (V, D) if there is no 'unembed'.
      hidden_BTD: final normalised hidden states; index t predicts token t + 1.
      tokens_BT: packed tokens.
      segment_BT: segment of each token, 0 on padding. The first token of a segment has no predecessor, so both results
        are 0 there.
      config: the model, whose logit cap is used.
      temperature: divisor of the capped logits; positive.
      mesh: mesh that splits B over the axes of "batch", T over the axes of "time", and V and D as the output matrix is
        split; None for one device.
      chunk_elements: largest number of logits on one device, unless a chunk of 128 ids has more.

    Raises:
      ValueError: the rows do not split evenly over the mesh, or the temperature is not positive.
    """
    B, T, _ = hidden_BTD.shape
    matrix_VD = output_matrix(params)
    head = head_of(matrix_VD.shape, B, T, config, temperature, mesh, chunk_elements)
    next_BT = jnp.roll(tokens_BT, -1, axis=1)
    logprob_BT, entropy_BT = _logprob(hidden_BTD, matrix_VD, next_BT, head)  # pyright: ignore[reportGeneralTypeIssues]
    keep = lambda x_BT: jnp.where(continues(segment_BT), jnp.roll(x_BT, 1, axis=1), 0.0)  # noqa: E731
    return keep(logprob_BT), keep(entropy_BT)


def continues(segment_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where the previous token of the row is in the same segment, so that it predicts this token."""
    same_BT = (segment_BT == jnp.roll(segment_BT, 1, axis=1)) & (segment_BT > 0)
    return same_BT & (jnp.arange(segment_BT.shape[1]) > 0)


def output_matrix(params: PyTree) -> Float[Array, "V D"]:
    """Returns the matrix whose product with hidden states is the logits, one row per token id."""
    return params["unembed"].T if "unembed" in params else params["embed"]


def head_of(
    shape_VD: tuple[int, ...],
    B: int,
    T: int,
    config: ModelConfig,
    temperature: float,
    mesh: Mesh | None,
    chunk_elements: int,
) -> Head:
    """Decides how the logits of an output matrix are split over the mesh and into chunks.

    Args:
      shape_VD: shape of the whole output matrix.
      B: number of packed rows.
      T: number of tokens in a row.
      config: the model, whose logit cap is used.
      temperature: divisor of the capped logits.
      mesh: mesh that splits the arrays; None for one device.
      chunk_elements: largest number of logits on one device, exceeded only by chunks of _MIN_CHUNK ids.

    Raises:
      ValueError: the rows do not split evenly over the mesh, or the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive: set rollout.temperature above 0 for training.")
    row_axes: tuple[str, ...] = ()
    time_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()
    model_axes: tuple[str, ...] = ()
    if mesh is not None and mesh.size > 1:
        spec_VD = rules.spec_for(("vocab", "embed"), shape_VD, mesh)
        vocab_axes, model_axes = (_names(entry) for entry in (*spec_VD, None, None)[:2])
        row_axes, time_axes = rules.axes_over("batch", mesh), rules.axes_over("time", mesh)
        if T % _size(mesh, time_axes):
            raise ValueError(
                f"Packed rows of {T} tokens do not split over {_size(mesh, time_axes)} parts along time "
                f"({' x '.join(time_axes)}): trainer.max_tokens_per_row must be a multiple of that number."
            )
        if B % _size(mesh, row_axes):
            raise ValueError(
                f"{B} packed rows do not split over {_size(mesh, row_axes)} data shards "
                f"({' x '.join(row_axes)}): rows per micro-batch must be a multiple of that number."
            )
    else:
        mesh = None
    local_V = shape_VD[0] // _size(mesh, vocab_axes)
    local_X = B * T // _size(mesh, row_axes + time_axes)
    fit = max(chunk_elements // local_X, _MIN_CHUNK)
    chunk = math.ceil(local_V / math.ceil(local_V / fit))
    return Head(config.logit_softcap, temperature, chunk, mesh, row_axes, time_axes, vocab_axes, model_axes)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(mesh: Mesh | None, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes) if mesh is not None else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logprob(hidden_BTD: Array, matrix_VD: Array, target_BT: Array, head: Head) -> tuple[Array, Array]:
    return _logprob_fwd(hidden_BTD, matrix_VD, target_BT, head)[0]


def _logprob_fwd(hidden_BTD: Array, matrix_VD: Array, target_BT: Array, head: Head):
    run = functools.partial(_forward, head=head)
    if head.mesh is not None:
        rows = head.tokens
        matrix = Spec(head.vocab or None, head.model or None)
        run = jax.shard_map(
            run, mesh=head.mesh, in_specs=(rows, matrix, rows), out_specs=(rows, rows, rows), check_vma=False
        )
    logprob_BT, entropy_BT, lse_BT = run(hidden_BTD, matrix_VD, target_BT)
    return (logprob_BT, entropy_BT), (hidden_BTD, matrix_VD, target_BT, entropy_BT, lse_BT)


def _logprob_bwd(head: Head, saved, grads):
    hidden_BTD, matrix_VD, target_BT, entropy_BT, lse_BT = saved
    run = functools.partial(_backward, head=head)
    if head.mesh is not None:
        rows = head.tokens
        matrix = Spec(head.vocab or None, head.model or None)
        run = jax.shard_map(
            run,
            mesh=head.mesh,
            in_specs=(rows, matrix, rows, rows, rows, rows, rows),
            out_specs=(rows, matrix),
            check_vma=False,
        )
    dhidden_BTD, dmatrix_VD = run(hidden_BTD, matrix_VD, target_BT, entropy_BT, lse_BT, *grads)
    return dhidden_BTD, dmatrix_VD, None


_logprob.defvjp(_logprob_fwd, _logprob_bwd)


class VocabChunk(NamedTuple):
    """Consecutive rows of the output matrix, for the logits of C token ids.

    Attributes:
      weight_CD: rows of the matrix, over the whole model dimension.
      start: index of the first row in this device's part of the matrix.
      new_C: False on rows that were also in the previous chunk. The last chunk is moved back so that it ends with the
        vocabulary, because all chunks must have C rows.
      first: token id of the first row.
      number: index of the chunk on this device, from 0.
    """

    weight_CD: Array
    start: Array
    new_C: Array
    first: Array
    number: Array

    def offset(self, id_X: Array) -> Array:
        """Returns the index of each id in the chunk; outside [0, C) for ids of other chunks."""
        return id_X - self.first


def chunk_of(matrix_VD: Array, index: Array, dtype: jnp.dtype, head: Head) -> VocabChunk:
    """Slices one chunk of this device's part of the output matrix, and gathers its model dimension.

    Args:
      matrix_VD: part of the output matrix on this device.
      index: index of the chunk on this device, from 0; traced.
      dtype: type of the sliced rows.
      head: static arguments of the call.
    """
    V = matrix_VD.shape[0]
    start = jnp.minimum(index * head.chunk, V - head.chunk)
    weight_CD = jax.lax.dynamic_slice_in_dim(matrix_VD, start, head.chunk).astype(dtype)
    if head.model:
        weight_CD = jax.lax.all_gather(weight_CD, head.model, axis=1, tiled=True)
    new_C = jnp.arange(head.chunk) + start >= index * head.chunk
    first = start + (jax.lax.axis_index(head.vocab) * V if head.vocab else 0)
    return VocabChunk(weight_CD, start, new_C, first, index)


def cap(logits_XC: Array, head: Head) -> Array:
    """Caps logits and divides them by the temperature."""
    if head.softcap:
        logits_XC = jnp.tanh(logits_XC * (1.0 / head.softcap)) * head.softcap
    return logits_XC * (1.0 / head.temperature) if head.temperature != 1.0 else logits_XC


def _forward(hidden_BTD: Array, matrix_VD: Array, target_BT: Array, *, head: Head) -> tuple[Array, Array, Array]:
    hidden_XD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    target_X = target_BT.reshape(-1)
    V = matrix_VD.shape[0]
    chunks = math.ceil(V / head.chunk)

    def step(carry, index):
        top_X, sum_X, weighted_X, hit_X = carry
        chunk = chunk_of(matrix_VD, index, hidden_XD.dtype, head)
        new_C = chunk.new_C
        logits_XC = cap(einsum_f32("XD,CD->XC", hidden_XD, chunk.weight_CD), head)
        is_target_XC = (jnp.arange(head.chunk) == chunk.offset(target_X)[:, None]) & new_C
        hit_X = hit_X + jnp.sum(jnp.where(is_target_XC, logits_XC, 0.0), axis=1)
        masked_XC = logits_XC if chunks * head.chunk == V else jnp.where(new_C, logits_XC, -jnp.inf)
        new_top_X = jnp.maximum(top_X, jnp.max(masked_XC, axis=1))
        shift_X = jnp.exp(top_X - new_top_X)
        exp_XC = jnp.exp(masked_XC - new_top_X[:, None])
        sum_X = sum_X * shift_X + jnp.sum(exp_XC, axis=1)
        weighted_X = weighted_X * shift_X + jnp.sum(exp_XC * logits_XC, axis=1)
        return (new_top_X, sum_X, weighted_X, hit_X), None

    zero_X = jnp.zeros(target_X.shape, jnp.float32)
    start = (jnp.full_like(zero_X, -jnp.inf), zero_X, zero_X, zero_X)
    (top_X, sum_X, weighted_X, hit_X), _ = scan(step, start, chunks)
    if head.vocab:
        local_top_X = top_X
        top_X = jax.lax.pmax(local_top_X, head.vocab)
        shift_X = jnp.exp(local_top_X - top_X)
        sum_X, weighted_X, hit_X = jax.lax.psum((sum_X * shift_X, weighted_X * shift_X, hit_X), head.vocab)
    lse_X = top_X + jnp.log(sum_X)
    entropy_X = lse_X - weighted_X / sum_X
    shape = target_BT.shape
    return (hit_X - lse_X).reshape(shape), entropy_X.reshape(shape), lse_X.reshape(shape)


def _backward(
    hidden_BTD: Array,
    matrix_VD: Array,
    target_BT: Array,
    entropy_BT: Array,
    lse_BT: Array,
    dlogprob_BT: Array,
    dentropy_BT: Array,
    *,
    head: Head,
) -> tuple[Array, Array]:
    flat = (x_BT.reshape(-1) for x_BT in (target_BT, entropy_BT, lse_BT, dlogprob_BT, dentropy_BT))
    target_X, entropy_X, lse_X, dlogprob_X, dentropy_X = flat

    def dlogits(logits_XC: Array, chunk: VocabChunk) -> Array:
        centred_XC = logits_XC - lse_X[:, None]
        is_target_XC = jnp.arange(head.chunk) == chunk.offset(target_X)[:, None]
        # d logprob = onehot - p;  d entropy = -p (log p + entropy)
        slope_XC = dlogprob_X[:, None] + dentropy_X[:, None] * (centred_XC + entropy_X[:, None])
        return jnp.where(is_target_XC, dlogprob_X[:, None], 0.0) - jnp.exp(centred_XC) * slope_XC

    return pulled_back(hidden_BTD, matrix_VD, dlogits, head)


def pulled_back(
    hidden_BTD: Array, matrix_VD: Array, dlogits: Callable[[Array, VocabChunk], Array], head: Head
) -> tuple[Array, Array]:
    """Propagates the gradient of the logits to hidden states and output matrix, chunk by chunk.

    Args:
      hidden_BTD: hidden states on this device.
      matrix_VD: part of the output matrix on this device.
      dlogits: function (capped logits of a chunk, chunk) -> derivative of the loss with respect to these logits; a scan
        traces it once.
      head: static arguments of the call.

    Returns:
      The gradients of `hidden_BTD` and of `matrix_VD`, summed over the mesh axes that split other dimensions.
    """
    hidden_XD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    chunks = math.ceil(matrix_VD.shape[0] / head.chunk)

    def step(carry, index):
        dhidden_XD, dmatrix_VD = carry
        chunk = chunk_of(matrix_VD, index, hidden_XD.dtype, head)
        logits_XC = cap(einsum_f32("XD,CD->XC", hidden_XD, chunk.weight_CD), head)
        dlogits_XC = dlogits(logits_XC, chunk)
        if head.softcap:
            unit_XC = logits_XC * (head.temperature / head.softcap)
            dlogits_XC = dlogits_XC * (1.0 - unit_XC * unit_XC)
        draw_XC = jnp.where(chunk.new_C, dlogits_XC * (1.0 / head.temperature), 0.0).astype(hidden_XD.dtype)
        dhidden_XD = dhidden_XD + einsum_f32("XC,CD->XD", draw_XC, chunk.weight_CD)
        dweight_CD = einsum_f32("XC,XD->CD", draw_XC, hidden_XD)
        if head.model:
            dweight_CD = jax.lax.psum_scatter(dweight_CD, head.model, scatter_dimension=1, tiled=True)
        old_CD = jax.lax.dynamic_slice_in_dim(dmatrix_VD, chunk.start, head.chunk)
        return (dhidden_XD, jax.lax.dynamic_update_slice_in_dim(dmatrix_VD, old_CD + dweight_CD, chunk.start, 0)), None

    start = (jnp.zeros(hidden_XD.shape, jnp.float32), jnp.zeros(matrix_VD.shape, jnp.float32))
    (dhidden_XD, dmatrix_VD), _ = scan(step, start, chunks)
    if head.vocab:
        dhidden_XD = jax.lax.psum(dhidden_XD, head.vocab)
    if others := tuple(axis for axis in head.rows + head.time if axis not in head.model):
        dmatrix_VD = jax.lax.psum(dmatrix_VD, others)
    return dhidden_XD.reshape(hidden_BTD.shape).astype(hidden_BTD.dtype), dmatrix_VD.astype(matrix_VD.dtype)


def scan(step, carry, length: int):
    """Runs lax.scan over the indices 0 to length - 1; a length of 1 is compiled without a loop."""
    if length == 1:
        return step(carry, jnp.int32(0))
    return jax.lax.scan(step, carry, jnp.arange(length, dtype=jnp.int32))
