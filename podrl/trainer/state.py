"""Builds the training state, and places the state and its batches on the mesh."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Int

from podrl import offload
from podrl.mesh import rules
from podrl.models import parameters
from podrl.models.config import ModelConfig
from podrl.trainer.optimizer import AdamState, Optimizer
from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch, Layout, PyTree, Rows, TrainState

# Logical axes of a packed array: micro-batches, rows, tokens, values of a token.
_AXES = ("layers", "batch", "time", "act")


def abstract_state(
    config: ModelConfig, optimizer: Optimizer, mesh: Mesh, dtype: DTypeLike = "float32"
) -> tuple[TrainState, PyTree]:
    """Returns (state, frozen parameters) as shapes, dtypes and shardings, for restoring checkpoints and compiling.

    Args:
      config: the model; under LoRA the state holds the adapters and their optimizer state, and the rest is frozen.
      optimizer: optimizer of the trainable parameters.
      mesh: mesh of the trainer.
      dtype: type of the stored parameters.
    """
    params = parameters.abstract_params(config, mesh, jnp.dtype(dtype))
    trainable, frozen = parameters.split_trainable(params, config)
    return abstract_train_state(trainable, optimizer, mesh), frozen


def abstract_train_state(trainable: PyTree, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns the abstract state of abstract trainable parameters; optimizer leaves are sharded like their parameters.

    Args:
      trainable: shapes, dtypes and shardings of the trainable parameters.
      optimizer: optimizer of these parameters; if its state is on the host, leaves that can be cut into parts lie
        there.
      mesh: mesh of the trainer; optimizer leaves without a parameter's shape are replicated on it.
    """
    whole = rules.replicated(mesh)

    def like_param(leaf: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.shape != param.shape:
            return offload.placed(leaf, whole)
        hosted = optimizer.on_host and offload.cut(param.shape, param.sharding) is not None
        return offload.placed(leaf, offload.on_host(param.sharding) if hosted else param.sharding)

    opt_state: Any = jax.eval_shape(optimizer.transform.init, trainable)
    if isinstance(opt_state, AdamState):  # optax's tree_map_params hides dtypes, on which the master copy depends
        trees = {name: jax.tree.map(like_param, getattr(opt_state, name), trainable) for name in ("mu", "nu")}
        master = jax.tree.map(like_param, opt_state.master, trainable) if opt_state.master else ()
        opt_state = AdamState(cast(Any, offload.placed(opt_state.count, whole)), **trees, master=master)
    else:
        opt_state = optax.tree_utils.tree_map_params(
            optimizer.transform,
            like_param,
            opt_state,
            trainable,
            transform_non_params=lambda leaf: offload.placed(leaf, whole),
        )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return TrainState(trainable, opt_state, step)


def abstract_like(state: TrainState, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of a state, for restoring a checkpoint that replaces the state."""
    return abstract_train_state(jax.tree.map(_abstract, state.params), optimizer, mesh)


def init_state(params: PyTree, config: ModelConfig, optimizer: Optimizer, mesh: Mesh) -> tuple[TrainState, PyTree]:
    """Splits all parameters of a model into (training state at step 0, frozen parameters), without copying them.

    The state shares its arrays with `params`. The first training step donates the state, which deletes these arrays.

    Args:
      params: whole parameter tree on `mesh`.
      config: the model; under LoRA the state holds the adapters only.
      optimizer: optimizer of the trainable parameters.
      mesh: mesh of the trainer.
    """
    trainable, frozen = parameters.split_trainable(params, config)
    return init_train_state(trainable, optimizer, mesh), frozen


def init_train_state(trainable: PyTree, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Makes the state at step 0 from trainable parameters on `mesh`, without copying a parameter.

    Raises:
      ValueError: the optimizer's state belongs in the host's memory, which the devices cannot reach.
    """
    if optimizer.on_host:
        offload.check(mesh, "trainer.offload='optimizer' (or 'all')", "set trainer.offload='none'.")
    abstract = abstract_train_state(jax.tree.map(_abstract, trainable), optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
    opt_state = jax.jit(optimizer.transform.init, out_shardings=shardings)(trainable)
    # Computed on the mesh: an array copied from a local device to one device of each of several hosts cannot be saved.
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=rules.replicated(mesh))()
    return TrainState(trainable, opt_state, step)


def abstract_batch(rows: type[Rows], shape: PackShape, mesh: Mesh, *, route_bytes: int = 0) -> Batch[Rows]:
    """Returns a packed batch as shapes, dtypes and shardings, for compiling ahead.

    Args:
      rows: dataclass of per-token inputs, e.g. PolicyRows; Layout for a batch that is only scored.
      shape: shape of the packed arrays.
      mesh: devices that will hold the batch.
      route_bytes: number of bytes of a token's recorded routes; 0 if no routes are replayed.
    """

    def placed(dtype: DTypeLike, *axes: str) -> Any:
        dims = (shape.micro_batches, shape.rows, shape.tokens)[: len(axes)]
        return jax.ShapeDtypeStruct(dims, dtype, sharding=rules.sharding_for(axes, dims, mesh))

    token, value = (placed(dtype, *_AXES[:3]) for dtype in (jnp.int32, jnp.float32))
    layout = Layout(*[token] * (4 if shape.shared or shape.tree else 3), sample_BT=token if shape.whole else None)
    if route_bytes:
        dims = (shape.micro_batches, shape.rows, shape.tokens, route_bytes)
        route: Any = jax.ShapeDtypeStruct(dims, jnp.uint8, sharding=rules.sharding_for(_AXES, dims, mesh))
        layout = dataclasses.replace(layout, route_BTX=route)
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=rules.replicated(mesh))
    if issubclass(rows, Layout):
        return Batch(cast(Any, layout), count)
    scalar, names = (
        placed(jnp.float32, "layers"),
        [field.name for field in dataclasses.fields(cast(Any, rows)) if field.default is dataclasses.MISSING],
    )
    fields: Any = {name: value if name.endswith("_BT") else scalar for name in names}
    return Batch(rows(**(fields | {"layout": layout})), count)


def fetch(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """Copies a device array of the mesh to the host; every process gets the whole array."""
    if mesh.is_multi_process:
        array = jax.jit(lambda x: x, out_shardings=rules.replicated(mesh))(array)
    return np.asarray(array)


def batch_shardings(batch: Batch[Rows], mesh: Mesh) -> Batch[Rows]:
    """Returns shardings that split rows and tokens over the mesh axes of "batch" and "time", and replicate the rest.

    Args:
      batch: a batch; only the shapes of its arrays are read.
      mesh: devices that will hold the batch.
    """
    return jax.tree.map(lambda x: rules.sharding_for(_AXES[: np.ndim(x)], np.shape(x), mesh), batch)


def local_rows(shape: PackShape, mesh: Mesh) -> Int[np.ndarray, " rows"]:
    """Lists the indices of the rows of a micro-batch that lie on this process's devices, ascending.

    Every micro-batch has the same indices.
    """
    array = (shape.micro_batches, shape.rows, shape.tokens)
    sharding = rules.sharding_for(_AXES[:3], array, mesh)
    rows = [
        np.arange(shape.rows)[index[1]] for index in sharding.addressable_devices_indices_map(array).values() if index
    ]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def put_batch(batch: Batch[Rows], mesh: Mesh) -> Batch[Rows]:
    """Copies a host batch to the mesh; every process passes the same batch and copies the rows of its own devices."""

    def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)

    return jax.tree.map(put, batch, batch_shardings(batch, mesh))


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
