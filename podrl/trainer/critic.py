"""The critic's forward pass, its training step, and the scoring of packed batches by it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podrl.mesh import rules
from podrl.models import decoder, scalar
from podrl.models.config import ModelConfig
from podrl.trainer.objective import CriticRows, Objective
from podrl.trainer.optimizer import Optimizer
from podrl.trainer.step import TrainStep, make_update
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


@dataclasses.dataclass(frozen=True)
class ValueForward:
    """How rows are run through the critic.

    Attributes:
      config: of the trunk.
      mesh: where it runs.
      dtype: compute dtype; values are float32 whatever it is.
      remat: see `podrl.models.decoder.hidden`.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: str = "float32"
    remat: str = "none"

    def __call__(
        self,
        params: PyTree,
        tokens_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        position_BT: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "B T"]:
        """Value of what was there before each token; 0 on first tokens and padding. Dropout as in `Forward`."""
        hidden_BTD = decoder.hidden(
            params,
            tokens_BT,
            segment_BT,
            position_BT,
            self.config,
            dtype=jnp.dtype(self.dtype),
            remat=self.remat,
            mesh=self.mesh,
            dropout_key=dropout_key,
        )
        value_BT = jnp.roll(scalar.scores(params, hidden_BTD), 1, axis=1)
        return jnp.where((position_BT > 0) & (segment_BT > 0), value_BT, 0.0)


def make_critic_step(
    config: ModelConfig,
    loss: ValueLoss,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    remat: str = "none",
    seed: int = 0,
) -> TrainStep:
    """train_step(state, frozen, CriticBatch) of a critic; see `podrl.trainer.step.make_update`."""
    forward = ValueForward(config, mesh, dtype, remat)
    trainable, _ = scalar.split_trainable(scalar.abstract_params(config, mesh, jnp.dtype("float32")), config)
    return make_update(
        _objective(forward, loss), trainable, scalar.join_trainable, optimizer, mesh, prefix="critic", seed=seed
    )


def make_value_fn(config: ModelConfig, mesh: Mesh, *, dtype: str = "float32") -> ValueFn:
    """value_fn(params, batch) -> value_ABT, jitted; micro-batches beyond `batch.micro_batches` are 0."""
    forward = ValueForward(config, mesh, dtype)

    def values(params: PyTree, batch: CriticBatch | TrainBatch) -> Float[Array, "A B T"]:
        def body(index: Array, out_ABT: Array) -> Array:
            pick = lambda x_ABT: jax.lax.dynamic_index_in_dim(x_ABT, index, axis=0, keepdims=False)  # noqa: E731
            rows_BT = (pick(x_ABT) for x_ABT in (batch.tokens_ABT, batch.segment_ABT, batch.position_ABT))
            value_BT = forward(params, *rows_BT)
            return jax.lax.dynamic_update_index_in_dim(out_ABT, value_BT, index, axis=0)

        out_ABT = rules.constrain(jnp.zeros(batch.tokens_ABT.shape), ("layers", "batch", "time"), mesh)
        return jax.lax.fori_loop(0, batch.micro_batches, body, out_ABT)

    return jax.jit(values)


def _objective(forward: ValueForward, loss: ValueLoss) -> Objective:
    def objective(params: PyTree, rows: CriticRows) -> tuple[Ratio, Mapping[str, Ratio]]:
        value_BT = forward(params, rows.tokens_BT, rows.segment_BT, rows.position_BT, rows.key)
        return loss(value_BT, rows.value_BT, rows.return_BT, rows.mask_BT, rows.length_BT)

    return objective
