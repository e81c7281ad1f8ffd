"""AdamW with warm-up, decay and clipping; its arithmetic is float32 for parameters of any storage type."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from podrl.config import NonNegative, Range, Share, section
from podrl.types import PyTree

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
Moment = Literal["float32", "bfloat16"]
Rate = Annotated[float, Range("[0, 1000]")]
BelowOne = Annotated[float, Range("[0, 1)")]


@section("trainer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Settings of AdamW (arXiv 1711.05101), its learning-rate schedule and gradient clipping.

    Attributes:
      learning_rate: peak learning rate.
      schedule: course of the learning rate after the warm-up: 'constant', or 'cosine' or 'linear' decay to
        `end_fraction` of the peak.
      end_fraction: final learning rate divided by the peak.
      b1, b2, eps, weight_decay: AdamW's hyperparameters; weight decay applies to every trainable parameter.
      max_grad_norm: largest global norm of the gradient; a larger gradient is scaled down to this norm. 0 is off.
      mu_dtype, nu_dtype: storage types of the first and second moments.
    """

    learning_rate: Rate = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    end_fraction: Share = 0.0
    b1: BelowOne = 0.9
    b2: BelowOne = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0
    mu_dtype: Moment = "float32"
    nu_dtype: Moment = "float32"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A gradient transformation, and the facts about it that a train step needs.

    Attributes:
      transform: the gradient transformation.
      schedule: learning-rate schedule, which only metrics read; None if it is unknown.
      on_host: True if the optimizer's state waits in the host's memory between updates; arrays that cannot be cut into
        parts, such as counters and vectors, stay on the devices.
    """

    transform: optax.GradientTransformation
    schedule: Schedule | None = None
    on_host: bool = False


class AdamState(NamedTuple):
    """State of AdamW.

    Attributes:
      count: number of updates made.
      mu, nu: first and second moments, trees like the parameters.
      master: float32 copy of all parameters if some of them are stored in a narrower type; otherwise ().
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride] - the name in checkpoints
    mu: PyTree
    nu: PyTree
    master: PyTree


def make_schedule(config: AdamSettings, *, warmup_steps: int = 0, decay_steps: int = 0) -> Schedule:
    """Builds the schedule: update index (0-based, traced) -> learning rate, float32.

    Args:
      config: peak rate, kind of schedule and final fraction.
      warmup_steps: number of updates over which the rate rises linearly to its peak; update i of n has the rate
        (i + 1) / n of the peak, so the first update's rate is above 0.
      decay_steps: number of updates, warm-up included, after which the rate is at its final value; cosine and linear
        need it.

    Raises:
      ValueError: the schedule decays, and the warm-up leaves no updates for the decay.
    """
    if config.schedule != "constant" and decay_steps <= warmup_steps:
        raise ValueError(
            f"trainer.schedule={config.schedule!r} has {decay_steps} updates, {warmup_steps} of them warm-up: raise "
            "trainer.max_steps or lower trainer.warmup_fraction."
        )

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1.0) / warmup_steps) if warmup_steps else jnp.float32(1.0)
        if config.schedule == "constant":
            return config.learning_rate * warm
        done = jnp.clip((step - warmup_steps) / (decay_steps - warmup_steps), 0.0, 1.0)
        left = 0.5 * (1.0 + jnp.cos(jnp.pi * done)) if config.schedule == "cosine" else 1.0 - done
        return config.learning_rate * warm * (config.end_fraction + (1.0 - config.end_fraction) * left)

    return schedule


def make_optimizer(config: AdamSettings, *, warmup_steps: int = 0, decay_steps: int = 0) -> Optimizer:
    """Builds AdamW with the schedule of `make_schedule`; unlike optax.adamw it works under strict dtype promotion."""
    schedule = make_schedule(config, warmup_steps=warmup_steps, decay_steps=decay_steps)
    return Optimizer(_adamw(config, schedule), schedule)


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Computes the square root of the sum of all squares, accumulated in float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Adds updates to parameters in float32, and stores the sums in the parameters' dtype."""
    return jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), params, updates)


def _adamw(config: AdamSettings, schedule: Schedule) -> optax.GradientTransformation:
    """Builds one transformation that clips gradients and updates moments and master copy in one pass.

    When `update` is called with only a part of the parameters, its argument `norm` is the norm of all gradients.
    """
    f32 = jnp.float32

    def init(params: PyTree) -> AdamState:
        narrow = [p.dtype != f32 for p in jax.tree.leaves(params)]
        master = jax.tree.map(lambda p: p.astype(f32), params) if any(narrow) else ()
        zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)  # noqa: E731
        return AdamState(jnp.zeros([], jnp.int32), zeros(config.mu_dtype), zeros(config.nu_dtype), master)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, norm: Array | None = None, **_: object
    ) -> tuple[PyTree, AdamState]:
        rate = schedule(state.count)
        step = (state.count + 1).astype(f32)
        clip = f32(1.0)
        if config.max_grad_norm:
            norm = global_norm(updates) if norm is None else norm
            clip = jnp.minimum(1.0, config.max_grad_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g.astype(f32) * clip, updates)
        mu = jax.tree.map(lambda m, g: config.b1 * m.astype(f32) + (1 - config.b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: config.b2 * v.astype(f32) + (1 - config.b2) * g * g, state.nu, grads)
        bias_mu, bias_nu = 1 - config.b1**step, 1 - config.b2**step
        wide = state.master or jax.tree.map(lambda p: p.astype(f32), params)

        def change(p: Array, m: Array, v: Array) -> Array:
            return -rate * (m / bias_mu / (jnp.sqrt(v / bias_nu) + config.eps) + config.weight_decay * p)

        updates = jax.tree.map(change, wide, mu, nu)
        master = state.master
        if state.master:
            master = jax.tree.map(jnp.add, state.master, updates)
            # The difference between the rounded master and the stored parameter: adding it in float32 (`apply_updates`)
            # gives exactly the rounded master.
            updates = jax.tree.map(lambda q, p: q.astype(p.dtype).astype(f32) - p.astype(f32), master, params)
        narrow = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
        return updates, AdamState(state.count + 1, narrow(mu, config.mu_dtype), narrow(nu, config.nu_dtype), master)

    return optax.GradientTransformationExtraArgs(init, update)
