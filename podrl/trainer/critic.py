"""The critic's forward pass, its training step, and the scoring of packed batches by it."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podrl.models import scalar
from podrl.models.config import ModelConfig
from podrl.trainer.logprob import continues
from podrl.trainer.objective import CriticRows, Objective, Trunk
from podrl.trainer.optimizer import Optimizer
from podrl.trainer.step import TrainStep, make_score_fn, make_update
from podrl.types import CriticBatch, PyTree, Ratio, TrainBatch

ValueFn = Callable[[PyTree, CriticBatch | TrainBatch], Float[Array, "A B T"]]


class ValueLoss(Protocol):
    """A loss on values, undivided, with its metrics, undivided too."""

    def __call__(
        self,
        value_BT: Float[Array, "B T"],
        old_value_BT: Float[Array, "B T"],
        return_BT: Float[Array, "B T"],
        mask_BT: Float[Array, "B T"],
        length_BT: Float[Array, "B T"],
        /,
    ) -> tuple[Ratio, Mapping[str, Ratio]]: ...


class ValueForward(Trunk):
    """The critic's forward pass."""

    def __call__(
        self,
        params: PyTree,
        tokens_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        position_BT: Int[Array, "B T"],
        prefix_BT: Int[Array, "B T"] | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "B T"]:
        """Value of what was there before each token; 0 on padding and the first of a segment.

        Fields as in TrainBatch, dropout as in `hidden`.
        """
        hidden_BTD = self.hidden(params, tokens_BT, segment_BT, position_BT, prefix_BT, dropout_key)
        value_BT = jnp.roll(scalar.scores(params, hidden_BTD), 1, axis=1)
        return jnp.where(continues(segment_BT), value_BT, 0.0)


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
) -> TrainStep:
    """train_step(state, frozen, CriticBatch) of a critic; see `podrl.trainer.step.make_update`."""
    forward = ValueForward(config=config, mesh=mesh, dtype=dtype, remat=remat)
    trainable, _ = scalar.split_trainable(scalar.abstract_params(config, mesh, jnp.dtype(param_dtype)), config)
    return make_update(
        _objective(forward, loss), trainable, scalar.join_trainable, optimizer, mesh, prefix="critic", seed=seed
    )


def make_value_fn(config: ModelConfig, mesh: Mesh, *, dtype: str = "float32") -> ValueFn:
    """value_fn(params, batch) -> value_ABT, jitted; micro-batches beyond `batch.micro_batches` are 0."""
    return make_score_fn(ValueForward(config=config, mesh=mesh, dtype=dtype), mesh)


def _objective(forward: ValueForward, loss: ValueLoss) -> Objective:
    def objective(params: PyTree, rows: CriticRows) -> tuple[Ratio, Mapping[str, Ratio]]:
        where = (rows.segment_BT, rows.position_BT, rows.prefix_BT)
        value_BT = forward(params, rows.tokens_BT, *where, rows.key)
        return loss(value_BT, rows.value_BT, rows.return_BT, rows.mask_BT, rows.length_BT)

    return objective
