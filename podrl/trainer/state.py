"""Where the training state and its batches live on the mesh."""

import math
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from podrl.mesh import rules
from podrl.models import decoder
from podrl.models.config import ModelConfig
from podrl.trainer.optimizer import AdamState, Optimizer
from podrl.trainer.packing import PackShape
from podrl.types import CriticBatch, PyTree, TrainBatch, TrainState

Batch = TypeVar("Batch", TrainBatch, CriticBatch)


def abstract_state(
    config: ModelConfig, optimizer: Optimizer, mesh: Mesh, dtype: Any = "float32"
) -> tuple[TrainState, PyTree]:
    """(state, frozen parameters) as shapes, dtypes and shardings, for restoring checkpoints and for compiling ahead.

    Args:
      config: the model; under LoRA the state holds the adapters and their optimizer state, the rest is frozen.
      dtype: of the stored parameters.
    """
    params = decoder.abstract_params(config, mesh, jnp.dtype(dtype))
    trainable, frozen = decoder.split_trainable(params, config)
    return abstract_train_state(trainable, optimizer, mesh), frozen


def abstract_train_state(trainable: PyTree, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """The state around `trainable` (shapes with shardings): optimizer leaves lie like the parameter they belong to."""
    whole = rules.replicated(mesh)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def like_param(leaf: Any, param: Any) -> jax.ShapeDtypeStruct:
        return placed(leaf, param.sharding if leaf.shape == param.shape else whole)

    opt_state: Any = jax.eval_shape(optimizer.transform.init, trainable)
    if isinstance(opt_state, AdamState):  # whether there is a master copy depends on dtypes, which optax's walk hides
        trees = {name: jax.tree.map(like_param, getattr(opt_state, name), trainable) for name in ("mu", "nu")}
        master = jax.tree.map(like_param, opt_state.master, trainable) if opt_state.master else ()
        opt_state = AdamState(cast(Any, placed(opt_state.count, whole)), **trees, master=master)
    else:
        opt_state = optax.tree_utils.tree_map_params(
            optimizer.transform,
            like_param,
            opt_state,
            trainable,
            transform_non_params=lambda leaf: placed(leaf, whole),
        )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return TrainState(trainable, opt_state, step)


def init_state(params: PyTree, config: ModelConfig, optimizer: Optimizer, mesh: Mesh) -> tuple[TrainState, PyTree]:
    """(state at step 0, frozen parameters) around whole parameters that lie on `mesh`; no parameter is copied.

    The state shares its arrays with `params`; the first training step, which donates its state, deletes them.
    """
    trainable, frozen = decoder.split_trainable(params, config)
    return init_train_state(trainable, optimizer, mesh), frozen


def init_train_state(trainable: PyTree, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """The state at step 0 around parameters that lie on `mesh`; no parameter is copied."""
    abstract = abstract_train_state(jax.tree.map(_abstract, trainable), optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
    opt_state = jax.jit(optimizer.transform.init, out_shardings=shardings)(trainable)
    # Made in place: an array put from a local device onto one device of each of several hosts cannot be saved.
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=rules.replicated(mesh))()
    return TrainState(trainable, opt_state, step)


def abstract_batch(shape: PackShape, mesh: Mesh) -> TrainBatch:
    """A packed batch as shapes, dtypes and shardings, for compiling ahead."""

    def rows(dtype: Any) -> Any:
        dims = (shape.micro_batches, shape.rows, shape.tokens)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=rules.sharding_for(("layers", "batch", "time"), dims, mesh))

    whole, real = rows(jnp.int32), rows(jnp.float32)
    count, scale = (jax.ShapeDtypeStruct((), x, sharding=rules.replicated(mesh)) for x in (jnp.int32, jnp.float32))
    return TrainBatch(
        tokens_ABT=whole,
        segment_ABT=whole,
        position_ABT=whole,
        mask_ABT=real,
        advantage_ABT=real,
        old_logprob_ABT=real,
        sampler_logprob_ABT=real,
        ref_logprob_ABT=real,
        length_ABT=real,
        micro_batches=cast(Any, count),
        kl_scale=cast(Any, scale),
        prefix_ABT=whole if shape.shared else None,
    )


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a micro-batch are split."""
    return math.prod(mesh.shape[axis] for axis in rules.DEFAULT_RULES["batch"])


def fetch(array: Any, mesh: Mesh) -> np.ndarray:
    """A device array of the mesh as a host array, whole on every process."""
    if mesh.is_multi_process:
        array = jax.jit(lambda x: x, out_shardings=rules.replicated(mesh))(array)
    return np.asarray(array)


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """Rows over the batch axes of the mesh, everything else whole; `batch` needs shapes only."""
    return jax.tree.map(
        lambda x: rules.sharding_for(("layers", "batch", "time")[: np.ndim(x)], np.shape(x), mesh), batch
    )


def local_rows(shape: PackShape, mesh: Mesh) -> Int[np.ndarray, " rows"]:
    """Which rows of every micro-batch lie on this process's devices, ascending."""
    array = (shape.micro_batches, shape.rows, shape.tokens)
    sharding = rules.sharding_for(("layers", "batch", "time"), array, mesh)
    rows = [
        np.arange(shape.rows)[index[1]] for index in sharding.addressable_devices_indices_map(array).values() if index
    ]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Copies a host batch onto the mesh; every process passes the same batch and keeps the rows of its own devices."""

    def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)

    return jax.tree.map(put, batch, batch_shardings(batch, mesh))


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
