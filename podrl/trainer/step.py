"""Compiled programs on packed batches: an optimizer update as a pure function of the state, and scoring of tokens."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from podrl import offload
from podrl.mesh import rules
from podrl.models import moe, parameters
from podrl.models.config import ModelConfig
from podrl.trainer import state as state_lib
from podrl.trainer.objective import Forward, Objective, TokenLoss, token_objective
from podrl.trainer.optimizer import AdamState, Optimizer, apply_updates, global_norm
from podrl.types import Batch, Layout, PyTree, Ratio, Rows, TrainState

DeviceMetrics = dict[str, Float[Array, ""]]  # the metrics of one update
TrainStep = Callable[[TrainState, PyTree, Batch[Any]], tuple[TrainState, DeviceMetrics]]
ScoreFn = Callable[[PyTree, Batch[Layout]], Float[Array, "A B T"]]
TokenWeights = Callable[[Array, Any], tuple[Float[Array, "B T"], Float[Array, "B T"]]]
TokenScoreFn = Callable[[PyTree, Batch[Layout]], tuple[Float[Array, "A B T"], Float[Array, "A B T"]]]
_SMALL_BYTES = 64 << 20  # bytes of a model's parameters, up to which each device holds a copy of them in an update


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
    join: Callable[[PyTree, PyTree], PyTree] = parameters.join_trainable,
    balance_coef: float = 0.0,
) -> TrainStep:
    """Builds the jitted training step of a loss on token log-probabilities; see `make_update`.

    Args:
      config: the model.
      loss: loss on log-probabilities, e.g. a PolicyLoss of podrl.algorithms, or CrossEntropy.
      optimizer: optimizer of the trainable parameters.
      mesh: devices that hold the state and the batch.
      temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
      dtype: compute dtype.
      param_dtype: type of the stored parameters.
      remat: values that the backward pass recomputes: 'none' keeps everything, see `podrl.models.decoder.hidden`.
      seed: seed of the adapters' dropout.
      objective_of: function of a forward pass and the loss that returns the objective.
      join: function (trainable, frozen) -> parameters that the objective takes.
      balance_coef: coefficient of the experts' balance loss, the mean of `moe.balance_loss` over layers and
        tokens; its gradient is added to the gradient of the loss. 0 compiles the step without it.

    Raises:
      ValueError: `balance_coef` is not 0, and the model has no experts.
    """
    moe.check_balance(config, balance_coef)

    def objective_on(devices: Mesh, balance: Array | None = None) -> Objective:
        forward = Forward(
            config=config, mesh=devices, temperature=temperature, dtype=dtype, remat=remat, balance=balance
        )
        return objective_of(forward, loss)

    def balanced(per_token: Array) -> Objective:
        return objective_on(mesh, per_token * (balance_coef / config.routed_layers))

    abstract = parameters.abstract_params(config, mesh, jnp.dtype(param_dtype))
    trainable, _ = parameters.split_trainable(abstract, config)
    return make_update(
        objective_on,
        trainable,
        join,
        optimizer,
        mesh,
        seed=seed,
        balanced=balanced if balance_coef else None,
        by_row=not getattr(inspect.unwrap(loss), "batch_dependent", False),  # a loss may wrap a PolicyLoss
    )


def make_update(
    objective_on: Callable[[Mesh], Objective],
    trainable: PyTree,
    join: Callable[[PyTree, PyTree], PyTree],
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    prefix: str = "actor",
    seed: int = 0,
    balanced: Callable[[Array], Objective] | None = None,
    by_row: bool = True,
) -> TrainStep:
    """Builds train_step(state, frozen, batch) -> (state, metrics), jitted; `state` is donated.

    Gradients, numerators and denominators of the filled micro-batches are added up and divided once at the end. How
    sequences are packed, split and sharded therefore changes the update by rounding only, except with dropout and with
    losses that rank the tokens of a micro-batch (`PolicyLoss.batch_dependent`). The number of filled micro-batches is
    an argument of the compiled program, so it may vary without a new compilation.

    If the model is small (`_SMALL_BYTES`), the mesh cuts only rows, and the loss is a sum over rows (`by_row`, without
    `balanced`), every device gets a copy of the parameters and adds up the gradients of its own rows over all
    micro-batches, and the devices exchange their sums once. Otherwise they exchange parameters and gradients in every
    micro-batch.

    An update whose gradient or loss is not finite is skipped: parameters and optimizer state keep their values, and
    `{prefix}/nonfinite` is 1. The step counter still rises.

    The random numbers of a forward pass depend only on (seed, step, micro-batch), and on the device's place in the mesh
    if each device adds up its own gradients. So a run resumed on the same mesh draws the numbers that it would have
    drawn without the interruption.

    Metrics (float32 scalars): the objective's metrics, `{prefix}/grad_norm` (before clipping), `{prefix}/lr` if the
    optimizer's schedule is known, and `{prefix}/nonfinite`.

    Args:
      objective_on: function of a mesh that returns the objective to minimise, for rows on the mesh's devices.
      trainable: shapes and shardings of the trainable parameters.
      join: function (trainable, frozen) -> parameters that the objective takes.
      optimizer: optimizer that turns gradients into updates.
      mesh: devices that hold the state and the batch.
      prefix: group of the metrics that the update adds.
      seed: seed of the random numbers of a forward pass.
      balanced: function that takes the loss's denominator divided by the batch's number of tokens, and returns the
        objective to differentiate, which has one more term, a mean over tokens; None differentiates the objective of
        `objective_on`.
      by_row: True if the loss of several rows is the sum of the losses of the rows.
    """

    def step(state: TrainState, frozen: PyTree, batch: Batch[Any]) -> tuple[TrainState, DeviceMetrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        if balanced is None and by_row and _cuts_rows_only(mesh, batch) and _is_small((state.params, frozen)):
            grads, loss, metrics = _accumulate_by_device(objective_on, join, state.params, frozen, batch, key, mesh)
            grads = _placed_like(grads, trainable, mesh)
        else:
            whole, objective = lambda params: join(params, frozen), objective_on(mesh)
            if balanced is not None:
                objective = balanced(_count_per_token(objective, whole(state.params), batch, key))
            place = functools.partial(_placed_like, placed=trainable, mesh=mesh)
            grads, loss, metrics = _accumulate(objective, state.params, whole, batch, key, place)
        divisor = loss.count + (loss.count == 0)
        grads = jax.tree.map(lambda g: g / divisor, grads)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.total)
        if optimizer.on_host:
            params, opt_state = _updated_in_parts(optimizer, grads, norm, finite, state, placed.opt_state)
        else:
            params, opt_state = _updated(optimizer, grads, finite, state.params, state.opt_state)
        scalars = {name: ratio.mean() for name, ratio in metrics.items()}
        scalars[f"{prefix}/grad_norm"] = norm
        scalars[f"{prefix}/nonfinite"] = jnp.where(finite, 0.0, 1.0)
        if optimizer.schedule is not None:
            scalars[f"{prefix}/lr"] = optimizer.schedule(_update_count(state.opt_state, state.step))
        new_state = TrainState(params, opt_state, state.step + 1)
        return new_state, {name: jnp.asarray(x, jnp.float32) for name, x in scalars.items()}

    abstract = state_lib.abstract_train_state(trainable, optimizer, mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, rules.replicated(mesh)))


def _updated(
    optimizer: Optimizer, grads: PyTree, finite: Array, params: PyTree, opt_state: PyTree, **norm: Array
) -> tuple[PyTree, PyTree]:
    """Makes an update if it is `finite`; returns (parameters, optimizer state).

    Args:
      optimizer: optimizer of the parameters.
      grads: gradients.
      finite: True if the gradients and the loss are finite; if not, parameters and optimizer state keep their values.
      params: parameters before the update.
      opt_state: optimizer state before the update.
      norm: keyword `norm`, the global norm of all gradients, if `grads` holds only a part of them.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax transformations of users may mix dtypes
        updates, new_state = optimizer.transform.update(grads, opt_state, params, **norm)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(finite, new, old)

    new_params = apply_updates(params, updates)
    return jax.tree.map(choose, new_params, params), jax.tree.map(choose, new_state, opt_state)


def _updated_in_parts(
    optimizer: Optimizer, grads: PyTree, norm: Array, finite: Array, state: TrainState, placed: AdamState
) -> tuple[PyTree, AdamState]:
    """Makes the update of `_updated` part by part, with an AdamState that waits in the host's memory.

    A loop moves the state of one part of the parameters (one layer, say) to the devices, and back after its update. No
    compiler can move the state out of the loop, so the devices hold the state of one part only.

    Args:
      optimizer: AdamW.
      grads: gradients.
      norm: global norm of the gradients.
      finite: see `_updated`.
      state: state before the update.
      placed: shardings of the optimizer state.
    """
    adam, tree = cast(AdamState, state.opt_state), jax.tree.structure(state.params)
    trees = [state.params, adam.mu, adam.nu, *filter(None, [adam.master])]
    rows = [list(row) for row in zip(*map(tree.flatten_up_to, trees), strict=True)]
    grad_leaves, places = tree.flatten_up_to(grads), tree.flatten_up_to(placed.mu)
    cuts = {
        index: found
        for index, (grad, place) in enumerate(zip(grad_leaves, places, strict=True))
        if (found := offload.cut(grad.shape, place)) is not None
    }

    def changed(own: Sequence[Array], before: Sequence[Sequence[Array]]) -> list[list[Array]]:
        params, mu, nu, *master = (list(column) for column in zip(*before, strict=True))
        alone = AdamState(adam.count, mu, nu, master[0] if master else ())
        params, alone = _updated(optimizer, list(own), finite, params, alone, norm=norm)
        columns = [params, alone.mu, alone.nu, *filter(None, [alone.master])]
        return [list(row) for row in zip(*columns, strict=True)]

    def loop(chosen: Sequence[int], parts: int) -> list[list[Array]]:
        def body(part: Array, before: list[list[Array]]) -> list[list[Array]]:
            pieces, own = [], []
            for index, row in zip(chosen, before, strict=True):
                param, *waiting = (cuts[index].read(x, part) for x in row)
                pieces.append([param, *(offload.to_devices(x, places[index]) for x in waiting)])
                own.append(cuts[index].read(grad_leaves[index], part))
            after = []
            for index, row, (param, *moments) in zip(chosen, before, changed(own, pieces), strict=True):
                new = [param, *(jax.device_put(x, places[index]) for x in moments)]
                after.append([cuts[index].write(x, y, part) for x, y in zip(row, new, strict=True)])
            return after

        return jax.lax.fori_loop(0, parts, body, [rows[index] for index in chosen])

    for parts in sorted({cut.parts for cut in cuts.values()}):
        chosen = [index for index, cut in cuts.items() if cut.parts == parts]
        for index, row in zip(chosen, loop(chosen, parts), strict=True):
            rows[index] = row
    small = [index for index in range(len(rows)) if index not in cuts]
    if small:
        after = changed([grad_leaves[index] for index in small], [rows[index] for index in small])
        for index, row in zip(small, after, strict=True):
            rows[index] = row
    params, mu, nu, *master = (tree.unflatten(column) for column in zip(*rows, strict=True))
    count = jnp.where(finite, adam.count + 1, adam.count)
    return params, AdamState(count, mu, nu, master[0] if master else ())


def make_logprob_fn(config: ModelConfig, mesh: Mesh, *, temperature: float = 1.0, dtype: str = "float32") -> ScoreFn:
    """Builds logprob_fn(params, batch) -> logprob_ABT, jitted: log p(token t | tokens < t) of every token, nats.

    The value is 0 on padding, on the first token of a segment, and in micro-batches beyond `batch.micro_batches`, which
    are not computed.

    `params` is a whole tree: `join_trainable(state.params, frozen)` for the actor; `frozen` or the parameters of a
    separate model for the reference.

    Args:
      config: the model.
      mesh: devices that it runs on.
      temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
      dtype: compute dtype.
    """
    forward = Forward(config=config, mesh=mesh, temperature=temperature, dtype=dtype)
    return make_score_fn(lambda params, layout: forward(params, layout)[0], mesh)


def make_score_fn(score: Callable[[PyTree, Layout], Float[Array, "B T"]], mesh: Mesh) -> ScoreFn:
    """Builds score_fn(params, batch) -> values_ABT, jitted; 0 in micro-batches beyond `batch.micro_batches`.

    Args:
      score: function (params, layout) -> one value per token of a micro-batch.
      mesh: devices that it runs on.
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
    """Builds token_score_fn(params, batch) -> (logprob_ABT, entropy_ABT), jitted, both in nats; see `make_logprob_fn`.

    This is a separate program: the program of `make_logprob_fn`, which training uses, stays without entropies.

    Args:
      config: the model.
      mesh: devices that it runs on.
      temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
      dtype: compute dtype.
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
    """Builds token_weight_fn(params, batch) -> (weight_ABT, clipped_ABT), jitted: applies `weigh` to every micro-batch.

    Args:
      config: the model.
      weigh: function (logprob_BT, rows) -> two numbers per token, e.g. `PolicyLoss.token_weights`.
      mesh: devices that it runs on.
      temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
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
    """Compiles a program so that every host of the mesh can read all of its results."""
    return jax.jit(program, out_shardings=rules.replicated(mesh)) if mesh.is_multi_process else jax.jit(program)


def _zeros(batch: Batch[Layout], mesh: Mesh) -> Float[Array, "A B T"]:
    return rules.constrain(jnp.zeros(batch.rows.tokens_BT.shape), ("layers", "batch", "time"), mesh)


def _accumulate(
    objective: Objective,
    trainable: PyTree,
    whole: Callable[[PyTree], PyTree],
    batch: Batch[Any],
    key: PRNGKeyArray,
    place: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[PyTree, Ratio, dict[str, Ratio]]:
    """Sums over the filled micro-batches: float32 gradients of the loss's numerator, the loss itself, and its metrics.

    Args:
      objective: objective to minimise.
      trainable: trainable parameters.
      whole: function of the trainable parameters that returns the parameters that the objective takes.
      batch: packed rows.
      key: random key of the step.
      place: function that gives gradients their shardings.
    """

    def numerator(trainable: PyTree, index: Array):
        loss, metrics = objective(whole(trainable), _micro_batch(batch.rows, index), jax.random.fold_in(key, index))
        return loss.total, (loss, dict(metrics))

    def body(index: Array, carry):
        (_, aux), grads = jax.value_and_grad(numerator, has_aux=True)(trainable, index)
        wide = place(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return jax.tree.map(jnp.add, carry, (wide, *aux))

    if batch.rows.layout.tokens_BT.shape[0] == 1:
        (_, (loss, metrics)), grads = jax.value_and_grad(numerator, has_aux=True)(trainable, jnp.int32(0))
        return place(jax.tree.map(lambda g: g.astype(jnp.float32), grads)), loss, metrics
    scalars = jax.eval_shape(lambda: numerator(trainable, jnp.int32(0))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), scalars)
    start = (place(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable)), *zeros)
    return jax.lax.fori_loop(0, batch.micro_batches, body, start)


def _accumulate_by_device(
    objective_on: Callable[[Mesh], Objective],
    join: Callable[[PyTree, PyTree], PyTree],
    trainable: PyTree,
    frozen: PyTree,
    batch: Batch[Any],
    key: PRNGKeyArray,
    mesh: Mesh,
) -> tuple[PyTree, Ratio, dict[str, Ratio]]:
    """Computes the sums of `_accumulate` on each device for its own rows, and adds them up over devices at the end.

    Args:
      objective_on: function of a mesh of one device that returns the objective to minimise.
      join: function (trainable, frozen) -> parameters that the objective takes.
      trainable: trainable parameters.
      frozen: frozen parameters; leaves that wait in the host's memory are copied to the devices.
      batch: packed rows.
      key: random key of the step, from which each device derives its own key.
      mesh: devices that hold the state and the batch.
    """
    alone = Mesh(mesh.devices.reshape(-1)[:1].reshape([1] * mesh.devices.ndim), mesh.axis_names)
    axes, objective = rules.axes_over("batch", mesh), objective_on(alone)

    def sums(trainable: PyTree, frozen: PyTree, own: Batch[Any], key: PRNGKeyArray):
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        found = _accumulate(objective, trainable, lambda params: join(params, frozen), own, key)
        return jax.lax.psum(found, axes)

    rows = jax.tree.map(lambda x: x.spec, state_lib.batch_shardings(batch, mesh))
    whole = jax.sharding.PartitionSpec()
    # Without the check of varying axes: gradients are sums of one device until the end.
    run = jax.shard_map(sums, mesh=mesh, in_specs=(whole, whole, rows, whole), out_specs=whole, check_vma=False)
    return run(trainable, offload.fetched(frozen), batch, key)


def _cuts_rows_only(mesh: Mesh, batch: Batch[Any]) -> bool:
    """Returns True if the mesh has several devices, and each of them holds whole rows and whole experts."""
    shards = rules.batch_shards(mesh)
    return (
        1 < shards == mesh.size
        and mesh.shape.get("expert", 1) == 1
        and batch.rows.layout.tokens_BT.shape[1] % shards == 0
    )


def _is_small(params: PyTree) -> bool:
    """Returns True if parameters have at most `_SMALL_BYTES`."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) <= _SMALL_BYTES


def _placed_like(grads: PyTree, placed: PyTree, mesh: Mesh) -> PyTree:
    """Gives gradients the shardings of the leaves of `placed`."""
    if mesh.size == 1:
        return grads
    return jax.tree.map(lambda g, p: jax.lax.with_sharding_constraint(g, p.sharding), grads, placed)


def _count_per_token(objective: Objective, params: PyTree, batch: Batch[Any], key: PRNGKeyArray) -> Array:
    """Divides the loss's denominator by the number of real tokens, both summed over filled micro-batches.

    Of the objective's results only the denominator is used. The compiler therefore drops the forward pass, unless the
    denominator depends on it.
    """

    def body(index: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = _micro_batch(batch.rows, index)
        tokens = jnp.sum(rows.layout.segment_BT > 0, dtype=jnp.float32)
        loss, _ = objective(params, rows, jax.random.fold_in(key, index))
        return total[0] + loss.count, total[1] + tokens

    count, tokens = jax.lax.fori_loop(0, batch.micro_batches, body, (jnp.float32(0), jnp.float32(0)))
    return count / jnp.maximum(tokens, 1)


def _micro_batch(rows: Rows, index: Array) -> Rows:
    """Slices micro-batch `index` (traced) from the rows of a Batch."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), rows)


def _update_count(opt_state: PyTree, default: Array) -> Array:
    """Reads the optimizer's own count of updates, which skipped updates do not raise; `default` if it has none."""
    return getattr(opt_state, "count", default)
