"""Models that compute one number per token: forward pass, training step and scoring of critics and reward models."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from podrl.models import scalar
from podrl.models.config import ModelConfig
from podrl.trainer.logprob import continues
from podrl.trainer.objective import Objective, Trunk
from podrl.trainer.optimizer import Optimizer
from podrl.trainer.step import ScoreFn, TrainStep, make_score_fn, make_update
from podrl.types import Layout, PyTree, Ratio


class ValueLoss(Protocol):
    """A loss on values: loss and metrics as numerators and denominators; `rows` holds its inputs besides `value_BT`."""

    def __call__(self, value_BT: Float[Array, "B T"], rows: Any, /) -> tuple[Ratio, Mapping[str, Ratio]]: ...


class ScoreForward(Trunk):
    """Runs a reward model's forward pass."""

    def __call__(self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T"]:
        """Computes the score after each token; a dropout key has the same effect as in `hidden`."""
        return scalar.scores(params, self.hidden(params, layout, dropout_key))


class ValueForward(Trunk):
    """Runs the critic's forward pass."""

    def __call__(self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T"]:
        """Computes the value of the state before each token; 0 on padding and the first token of a segment.

        A dropout key has the same effect as in `hidden`.
        """
        value_BT = jnp.roll(scalar.scores(params, self.hidden(params, layout, dropout_key)), 1, axis=1)
        return jnp.where(continues(layout.segment_BT), value_BT, 0.0)


def make_critic_step(
    config: ModelConfig,
    loss: ValueLoss,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    param_dtype: str = "float32",
    remat: str = "none",
    seed: int = 0,
    reads: type[ValueForward] | type[ScoreForward] = ValueForward,
    prefix: str = "critic",
) -> TrainStep:
    """Builds train_step(state, frozen, batch) of a model with one number per token; see `step.make_update`.

    Args:
      config: the model.
      loss: loss on the numbers; the batch has the rows that the loss reads.
      optimizer: optimizer of the trainable parameters.
      mesh: devices that hold the state and the batch.
      dtype: compute dtype.
      param_dtype: type of the stored parameters.
      remat: values that the backward pass recomputes, see `podrl.models.decoder.hidden`.
      seed: seed of the adapters' dropout.
      reads: forward pass that computes the numbers: ValueForward for values before each token, ScoreForward for scores
        after each token.
      prefix: group of the update's metrics: the part of their names before '/'.
    """

    def objective_on(devices: Mesh) -> Objective:
        return _objective(reads(config=config, mesh=devices, dtype=dtype, remat=remat), loss)

    trainable, _ = scalar.split_trainable(scalar.abstract_params(config, mesh, jnp.dtype(param_dtype)), config)
    return make_update(objective_on, trainable, scalar.join_trainable, optimizer, mesh, prefix=prefix, seed=seed)


def make_value_fn(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    reads: type[ValueForward] | type[ScoreForward] = ValueForward,
) -> ScoreFn:
    """Builds value_fn(params, batch) -> value_ABT, jitted; 0 in micro-batches beyond `batch.micro_batches`.

    Args:
      config: the model.
      mesh: devices that it runs on.
      dtype: compute dtype.
      reads: forward pass that computes the numbers: ValueForward for values before each token, ScoreForward for scores
        after each token.
    """
    return make_score_fn(reads(config=config, mesh=mesh, dtype=dtype), mesh)


def _objective(forward: ValueForward | ScoreForward, loss: ValueLoss) -> Objective:
    def objective(params: PyTree, rows: Any, key: PRNGKeyArray) -> tuple[Ratio, Mapping[str, Ratio]]:
        return loss(forward(params, rows.layout, key), rows)

    return objective
