"""The objective of one micro-batch of packed rows: a forward pass and a loss on its log-probabilities."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from podrl.models import decoder, moe
from podrl.models.config import ModelConfig
from podrl.trainer import logprob
from podrl.types import Layout, PyTree, Ratio


class TokenLoss(Protocol):
    """A loss on token log-probabilities: loss and metrics as numerators and denominators.

    `rows` holds the loss's inputs other than `logprob_BT` and `entropy_BT`: `layout`, and whatever else the loss reads.
    It is a dataclass, declared beside the loss.
    """

    def __call__(
        self, logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: Any, /
    ) -> tuple[Ratio, Mapping[str, Ratio]]: ...


class Objective(Protocol):
    """The function that a training step minimises: objective(params, rows, key) -> (loss, metrics) of a micro-batch.

    `params` are all parameters, `key` is the random key of the forward pass (dropout).
    """

    def __call__(self, params: PyTree, rows: Any, key: PRNGKeyArray, /) -> tuple[Ratio, Mapping[str, Ratio]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trunk:
    """Runs packed rows through a decoder, for losses and for scoring.

    Attributes:
      config: the model.
      mesh: devices that it runs on.
      dtype: compute dtype; log-probabilities, values and scores are float32 in any case.
      remat: values that the backward pass recomputes, see `podrl.models.decoder.hidden`.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: str = "float32"
    remat: str = "none"

    def hidden(self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T D"]:
        """Computes final normalised hidden states of packed rows.

        Args:
          params: whole parameter tree, adapters joined in.
          layout: packed tokens, their segments and positions.
          dropout_key: random key of the adapters' dropout, at the rate of `config`; None for no dropout.
        """
        return decoder.hidden(params, **self._arguments(layout, dropout_key))

    def _arguments(self, layout: Layout, dropout_key: PRNGKeyArray | None) -> dict[str, Any]:
        return {
            "tokens_BT": layout.tokens_BT,
            "segment_BT": layout.segment_BT,
            "position_BT": layout.position_BT,
            "config": self.config,
            "dtype": jnp.dtype(self.dtype),
            "remat": self.remat,
            "mesh": self.mesh,
            "dropout_key": dropout_key,
            "last_BT": layout.last_BT,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Trunk):
    """Runs the actor's forward pass.

    Attributes:
      temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
      balance: factor of the balance loss of every layer's experts, a sum over the tokens of a micro-batch. The gradient
        of the balance loss is added to the gradient of the loss. None adds nothing.
    """

    temperature: float = 1.0
    balance: Float[Array, ""] | None = None

    def hidden(self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T D"]:
        """Computes hidden states; tokens with recorded routes are computed by the recorded experts."""
        return self.replayed(params, layout, dropout_key)[0]

    def replayed(
        self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "B T D"], Mapping[str, Ratio]]:
        """Computes hidden states as `hidden` does, and metrics of the routes; no metrics if the layout has no routes.

        The metrics are `moe/replayed`, the share of tokens with recorded routes; `moe/route_differs`, the share of
        these tokens for which the trainer would choose another set of experts in any layer; and `moe/load_max` and
        `moe/evenness` of the trainer's own choice, see `podrl.models.moe.use_of_experts`.
        """
        route_LBTk = None if layout.route_BTX is None else moe.routes_of(layout.route_BTX, self.config)
        arguments = self._arguments(layout, dropout_key)
        hidden_BTD, own_LBTk = decoder.replayed(params, **arguments, route_LBTk=route_LBTk, balance=self.balance)
        if route_LBTk is None:
            return hidden_BTD, {}
        assert own_LBTk is not None and self.config.experts is not None
        real_BT = layout.segment_BT > 0
        known_BT = real_BT & jnp.any(route_LBTk != moe.UNKNOWN, axis=(0, 3))
        differs_BT = known_BT & ~jnp.all(moe.same_sets(route_LBTk, own_LBTk), axis=0)
        counts = [jnp.sum(x_BT, dtype=jnp.float32) for x_BT in (real_BT, known_BT, differs_BT)]
        load_max, evenness = moe.use_of_experts(own_LBTk, real_BT, self.config.experts)
        return hidden_BTD, {
            "moe/replayed": Ratio(counts[1], counts[0]),
            "moe/route_differs": Ratio(counts[2], counts[1]),
            "moe/load_max": Ratio(load_max, counts[0]),
            "moe/evenness": Ratio(evenness * counts[0], counts[0]),
        }

    def __call__(
        self, params: PyTree, layout: Layout, dropout_key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Computes (log-probability, entropy) of every token, nats; 0 on padding and the first token of a segment.

        A dropout key has the same effect as in `hidden`.
        """
        return self.scored(params, self.hidden(params, layout, dropout_key), layout)

    def scored(
        self, params: PyTree, hidden_BTD: Float[Array, "B T D"], layout: Layout
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Computes (log-probability, entropy) of every token, nats, from hidden states.

        Args:
          params: whole parameter tree.
          hidden_BTD: final normalised hidden states of the rows.
          layout: packed tokens, their segments and positions.
        """
        return logprob.token_logprobs(
            params,
            hidden_BTD,
            layout.tokens_BT,
            layout.segment_BT,
            self.config,
            temperature=self.temperature,
            mesh=self.mesh,
        )


def token_objective(forward: Forward, loss: TokenLoss) -> Objective:
    """Builds the objective of a loss on token log-probabilities: GRPO, PPO's actor, supervised fine-tuning."""

    def objective(params: PyTree, rows: Any, key: PRNGKeyArray) -> tuple[Ratio, Mapping[str, Ratio]]:
        hidden_BTD, routed = forward.replayed(params, rows.layout, key)
        total, metrics = loss(*forward.scored(params, hidden_BTD, rows.layout), rows)
        return total, {**metrics, **routed}

    return objective


@flax.struct.dataclass
class SupervisedRows:
    """Packed rows that the cross-entropy reads; `mask_BT` is 1 on the tokens to learn, 0 elsewhere."""

    layout: Layout
    mask_BT: Float[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Supervised fine-tuning: the mean of -log p over loss tokens, in which every token has the same weight."""

    def __call__(
        self, logprob_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], rows: SupervisedRows
    ) -> tuple[Ratio, Mapping[str, Ratio]]:
        """Computes the sum of -log p over loss tokens, their number, and the metrics sft/loss and sft/entropy, nats."""
        mask_BT = rows.mask_BT
        count = jnp.sum(mask_BT)
        loss = Ratio(-jnp.sum(jnp.where(mask_BT > 0, logprob_BT, 0.0)), count)
        entropy = Ratio(jnp.sum(jnp.where(mask_BT > 0, jax.lax.stop_gradient(entropy_BT), 0.0)), count)
        return loss, {"sft/loss": loss, "sft/entropy": entropy}
