"""One optimizer update as a pure function of state and packed batch, and the scoring of packed batches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from podrl.mesh import rules
from podrl.models import decoder
from podrl.models.config import ModelConfig
from podrl.trainer import state as state_lib
from podrl.trainer.objective import Forward, Objective, TokenLoss, token_objective
from podrl.trainer.optimizer import Optimizer, apply_updates, global_norm
from podrl.types import Batch, Layout, PyTree, Ratio, TrainState

Metrics = dict[str, Float[Array, ""]]
TrainStep = Callable[[TrainState, PyTree, Batch[Any]], tuple[TrainState, Metrics]]
ScoreFn = Callable[[PyTree, Batch[Layout]], Float[Array, "A B T"]]
TokenWeights = Callable[[Array, Any], tuple[Float[Array, "B T"], Float[Array, "B T"]]]
TokenScoreFn = Callable[[PyTree, Batch[Layout]], tuple[Float[Array, "A B T"], Float[Array, "A B T"]]]


def make_train_step(
    config: ModelConfig,
    loss: TokenLoss,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    dtype: str = "float32",
    param_dtype: str = "float32",
    remat: str = "none",
    seed: int = 0,
    objective_of: Callable[[Forward, TokenLoss], Objective] = token_objective,
    join: Callable[[PyTree, PyTree], PyTree] = decoder.join_trainable,
) -> TrainStep:
    """Builds the jitted training step of a loss on token log-probabilities; see `make_update`.

    Args:
      config: the model.
      loss: e.g. a PolicyLoss of podrl.algorithms, or CrossEntropy.
      temperature: sampling temperature; log-probabilities are those of this distribution.
      dtype: compute dtype.
      param_dtype: type of the stored parameters.
      remat: values that the backward pass recomputes: 'none' keeps everything, see `podrl.models.decoder.hidden`.
      seed: seed of the adapters' dropout.
      objective_of: function that makes the objective of a forward pass and the loss.
      join: (trainable, frozen) -> what the objective takes for parameters.
    """
    forward = Forward(config=config, mesh=mesh, temperature=temperature, dtype=dtype, remat=remat)
    abstract = decoder.abstract_params(config, mesh, jnp.dtype(param_dtype))
    trainable, _ = decoder.split_trainable(abstract, config)
    return make_update(objective_of(forward, loss), trainable, join, optimizer, mesh, seed=seed)


def make_update(
    objective: Objective,
    trainable: PyTree,
    join: Callable[[PyTree, PyTree], PyTree],
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    prefix: str = "actor",
    seed: int = 0,
) -> TrainStep:
    """Builds train_step(state, frozen, batch) -> (state, metrics), jitted; `state` is donated.

    Gradients, numerators and denominators of the filled micro-batches are added and divided once at the end, so how
    sequences are packed, split and sharded does not change the update. The number of micro-batches is traced.

    An update whose gradient is not finite is skipped, parameters and moments staying as they were, and shows as 1 in
    `{prefix}/nonfinite`; the step is counted all the same.

    What is random in a forward pass depends on (seed, step, micro-batch) and on nothing else, so a run that is resumed
    draws what it would have drawn.

    Metrics (float32 scalars): those of the objective, `{prefix}/grad_norm` (before clipping), `{prefix}/lr` where the
    optimizer's schedule is known, `{prefix}/nonfinite`.

    Args:
      objective: the loss to minimise.
      trainable: shapes and shardings of the parameters that are trained.
      join: (trainable, frozen) -> the whole tree that the objective takes.
      optimizer: turns gradients into updates.
      mesh: devices that hold all of it.
      prefix: group of the metrics this function adds.
      seed: seed of the random numbers of a forward pass.
    """

    def step(state: TrainState, frozen: PyTree, batch: Batch[Any]) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        whole = lambda params: join(params, frozen)  # noqa: E731
        grads, loss, metrics = _accumulate(objective, state.params, whole, batch, key, mesh, trainable)
        divisor = loss.count + (loss.count == 0)
        grads = jax.tree.map(lambda g: g / divisor, grads)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.total)
        with jax.numpy_dtype_promotion("standard"):  # optax transformations given by users promote
            updates, opt_state = optimizer.transform.update(grads, state.opt_state, state.params)
        params = apply_updates(state.params, updates)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(finite, new, old)

        scalars = {name: ratio.mean() for name, ratio in metrics.items()}
        scalars[f"{prefix}/grad_norm"] = norm
        scalars[f"{prefix}/nonfinite"] = jnp.where(finite, 0.0, 1.0)
        if optimizer.schedule is not None:
            scalars[f"{prefix}/lr"] = optimizer.schedule(_update_count(state.opt_state, state.step))
        new_state = TrainState(
            jax.tree.map(choose, params, state.params),
            jax.tree.map(choose, opt_state, state.opt_state),
            state.step + 1,
        )
        return new_state, {name: jnp.asarray(x, jnp.float32) for name, x in scalars.items()}

    abstract = state_lib.abstract_train_state(trainable, optimizer, mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, rules.replicated(mesh)))


def make_logprob_fn(config: ModelConfig, mesh: Mesh, *, temperature: float = 1.0, dtype: str = "float32") -> ScoreFn:
    """Builds logprob_fn(params, batch) -> logprob_ABT, jitted: log p(token | before), nats, 0 on first tokens, padding.

    `params` is a whole tree: `join_trainable(state.params, frozen)` for the actor, `frozen` or a separate model for
    the reference. Micro-batches beyond `batch.micro_batches` are not computed; their values are 0.
    """
    forward = Forward(config=config, mesh=mesh, temperature=temperature, dtype=dtype)
    return make_score_fn(lambda params, layout: forward(params, layout)[0], mesh)


def make_score_fn(score: Callable[[PyTree, Layout], Float[Array, "B T"]], mesh: Mesh) -> ScoreFn:
    """Builds score_fn(params, batch) -> values_ABT, jitted; micro-batches beyond `batch.micro_batches` are 0.

    Args:
      score: (params, layout) -> a value per token of a micro-batch.
      mesh: devices it runs on.
    """

    def scores(params: PyTree, batch: Batch[Layout]) -> Float[Array, "A B T"]:
        def body(index: Array, out_ABT: Array) -> Array:
            scored_BT = score(params, _micro_batch(batch.rows, index))
            return jax.lax.dynamic_update_index_in_dim(out_ABT, scored_BT, index, axis=0)

        return jax.lax.fori_loop(0, batch.micro_batches, body, _zeros(batch, mesh))

    return jax.jit(scores)


def make_token_score_fn(
    config: ModelConfig, mesh: Mesh, *, temperature: float = 1.0, dtype: str = "float32"
) -> TokenScoreFn:
    """Builds token_score_fn(params, batch) -> (logprob_ABT, entropy_ABT), jitted: as `make_logprob_fn`, and entropies.

    A program of its own: the one without entropies, which training reads, stays as it is.
    """
    forward = Forward(config=config, mesh=mesh, temperature=temperature, dtype=dtype)

    def scores(params: PyTree, batch: Batch[Layout]) -> tuple[Float[Array, "A B T"], Float[Array, "A B T"]]:
        def body(index: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            scored = forward(params, _micro_batch(batch.rows, index))
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return put(out[0], scored[0]), put(out[1], scored[1])

        return jax.lax.fori_loop(0, batch.micro_batches, body, (_zeros(batch, mesh), _zeros(batch, mesh)))

    return _read_by_hosts(scores, mesh)


def make_token_weight_fn(
    config: ModelConfig, weigh: TokenWeights, mesh: Mesh, *, temperature: float = 1.0, dtype: str = "float32"
) -> Callable[[PyTree, Batch[Any]], tuple[Float[Array, "A B T"], Float[Array, "A B T"]]]:
    """Builds token_weight_fn(params, batch) -> (weight_ABT, clipped_ABT), jitted: `weigh` of every micro-batch.

    Args:
      config: the model.
      weigh: (logprob_BT, rows) -> two numbers of every token.
      mesh: devices it runs on.
      temperature: as in `make_train_step`.
      dtype: compute dtype.
    """
    forward = Forward(config=config, mesh=mesh, temperature=temperature, dtype=dtype)

    def weights(params: PyTree, batch: Batch[Any]) -> tuple[Float[Array, "A B T"], Float[Array, "A B T"]]:
        def body(index: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            rows = _micro_batch(batch.rows, index)
            found = weigh(forward(params, rows.layout)[0], rows)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return put(out[0], found[0]), put(out[1], found[1])

        zeros = _zeros(batch.layout(), mesh)
        return jax.lax.fori_loop(0, batch.micro_batches, body, (zeros, zeros))

    return _read_by_hosts(weights, mesh)


def _read_by_hosts(program: Callable, mesh: Mesh) -> Callable:
    """Compiles a program whose results any host of the mesh can read whole."""
    return jax.jit(program, out_shardings=rules.replicated(mesh)) if mesh.is_multi_process else jax.jit(program)


def _zeros(batch: Batch[Layout], mesh: Mesh) -> Float[Array, "A B T"]:
    return rules.constrain(jnp.zeros(batch.rows.tokens_BT.shape), ("layers", "batch", "time"), mesh)


def _accumulate(
    objective: Objective,
    trainable: PyTree,
    whole: Callable[[PyTree], PyTree],
    batch: Batch[Any],
    key: PRNGKeyArray,
    mesh: Mesh,
    placed: PyTree,
) -> tuple[PyTree, Ratio, dict[str, Ratio]]:
    """Sums float32 gradients of the numerator, the loss and its metrics over the filled micro-batches."""

    def pin(grads: PyTree) -> PyTree:
        if mesh.size == 1:
            return grads
        return jax.tree.map(lambda g, p: jax.lax.with_sharding_constraint(g, p.sharding), grads, placed)

    def numerator(trainable: PyTree, index: Array):
        loss, metrics = objective(whole(trainable), _micro_batch(batch.rows, index), jax.random.fold_in(key, index))
        return loss.total, (loss, dict(metrics))

    def body(index: Array, carry):
        (_, aux), grads = jax.value_and_grad(numerator, has_aux=True)(trainable, index)
        wide = pin(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return jax.tree.map(jnp.add, carry, (wide, *aux))

    if batch.rows.layout.tokens_BT.shape[0] == 1:
        (_, (loss, metrics)), grads = jax.value_and_grad(numerator, has_aux=True)(trainable, jnp.int32(0))
        return pin(jax.tree.map(lambda g: g.astype(jnp.float32), grads)), loss, metrics
    scalars = jax.eval_shape(lambda: numerator(trainable, jnp.int32(0))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), scalars)
    start = (pin(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable)), *zeros)
    return jax.lax.fori_loop(0, batch.micro_batches, body, start)


def _micro_batch(rows: PyTree, index: Array) -> Any:
    """Slices micro-batch `index` (traced) from the rows of a Batch."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), rows)


def _update_count(opt_state: PyTree, default: Array) -> Array:
    """Reads the optimizer's own count of updates, which skipped steps do not raise."""
    return getattr(opt_state, "count", default)
