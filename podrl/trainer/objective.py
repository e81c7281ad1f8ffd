"""What one micro-batch of packed rows contributes to the loss: a forward pass and a loss on its log-probabilities."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podrl.models import decoder
from podrl.models.config import ModelConfig
from podrl.trainer import logprob
from podrl.types import CriticBatch, PyTree, Ratio, TrainBatch


@flax.struct.dataclass
class Rows:
    """One micro-batch of a TrainBatch; fields mean what they mean there. `key` is for what is random in training."""

    key: PRNGKeyArray
    kl_scale: Float[Array, ""]
    tokens_BT: Int[Array, "B T"]
    segment_BT: Int[Array, "B T"]
    position_BT: Int[Array, "B T"]
    mask_BT: Float[Array, "B T"]
    advantage_BT: Float[Array, "B T"]
    old_logprob_BT: Float[Array, "B T"]
    ref_logprob_BT: Float[Array, "B T"]
    sampler_logprob_BT: Float[Array, "B T"]
    length_BT: Float[Array, "B T"]
    prefix_BT: Int[Array, "B T"] | None = None


@flax.struct.dataclass
class CriticRows:
    """One micro-batch of a CriticBatch; fields mean what they mean there, `key` what it means in Rows."""

    key: PRNGKeyArray
    tokens_BT: Int[Array, "B T"]
    segment_BT: Int[Array, "B T"]
    position_BT: Int[Array, "B T"]
    mask_BT: Float[Array, "B T"]
    value_BT: Float[Array, "B T"]
    return_BT: Float[Array, "B T"]
    length_BT: Float[Array, "B T"]
    prefix_BT: Int[Array, "B T"] | None = None


def rows_of(batch: TrainBatch | CriticBatch, index: Int[Array, ""], key: PRNGKeyArray) -> Any:
    """Micro-batch `index` (traced) of the batch, as Rows or CriticRows; its key is `key` folded with the index."""
    kind = CriticRows if isinstance(batch, CriticBatch) else Rows
    scalars = {} if isinstance(batch, CriticBatch) else {"kl_scale": batch.kl_scale}
    return kind(
        key=jax.random.fold_in(key, index),
        **scalars,
        **{
            field.name: micro_batch(getattr(batch, field.name.replace("_BT", "_ABT")), index)
            for field in dataclasses.fields(kind)
            if field.name.endswith("_BT")
        },
    )


def micro_batch(x_ABT: Array | None, index: Int[Array, ""]) -> Any:
    """One micro-batch of a field, where the batch has it."""
    return None if x_ABT is None else jax.lax.dynamic_index_in_dim(x_ABT, index, axis=0, keepdims=False)


class TokenLoss(Protocol):
    """A loss on token log-probabilities, undivided, with its metrics, undivided too.

    `kl_scale` is a factor on the coefficient of its KL to the reference, where it has one.
    """

    def __call__(
        self,
        logprob_BT: Float[Array, "B T"],
        old_logprob_BT: Float[Array, "B T"],
        ref_logprob_BT: Float[Array, "B T"],
        sampler_logprob_BT: Float[Array, "B T"],
        advantage_BT: Float[Array, "B T"],
        entropy_BT: Float[Array, "B T"],
        mask_BT: Float[Array, "B T"],
        length_BT: Float[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        /,
        *,
        kl_scale: Float[Array, ""] | float,
    ) -> tuple[Ratio, Mapping[str, Ratio]]: ...


class Objective(Protocol):
    """What a training step minimises: objective(params, rows) for the whole parameter tree and one micro-batch."""

    def __call__(self, params: PyTree, rows: Any, /) -> tuple[Ratio, Mapping[str, Ratio]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trunk:
    """How rows are run through a decoder, for losses and for scoring alike.

    Attributes:
      config: the model.
      mesh: where it runs.
      dtype: compute dtype; what the heads give is float32 whatever it is.
      remat: see `podrl.models.decoder.hidden`.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: str = "float32"
    remat: str = "none"

    def hidden(
        self,
        params: PyTree,
        tokens_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        position_BT: Int[Array, "B T"],
        prefix_BT: Int[Array, "B T"] | None,
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "B T D"]:
        """Hidden states; with a key, the inputs of adapters are dropped at the rate of the model's configuration."""
        return decoder.hidden(
            params,
            tokens_BT,
            segment_BT,
            position_BT,
            self.config,
            dtype=jnp.dtype(self.dtype),
            remat=self.remat,
            mesh=self.mesh,
            dropout_key=dropout_key,
            prefix_BT=prefix_BT,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Trunk):
    """The actor's forward pass.

    Attributes:
      temperature: of the distribution whose log-probabilities are meant: that of sampling.
    """

    temperature: float = 1.0

    def __call__(
        self,
        params: PyTree,
        tokens_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        position_BT: Int[Array, "B T"],
        prefix_BT: Int[Array, "B T"] | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """(log-probability, entropy) of every token, nats; 0 on padding and the first of a segment.

        Fields as in TrainBatch, dropout as in `hidden`.
        """
        hidden_BTD = self.hidden(params, tokens_BT, segment_BT, position_BT, prefix_BT, dropout_key)
        return logprob.token_logprobs(
            params, hidden_BTD, tokens_BT, segment_BT, self.config, temperature=self.temperature, mesh=self.mesh
        )


def token_objective(forward: Forward, loss: TokenLoss) -> Objective:
    """The objective of every loss that looks at token log-probabilities: GRPO, PPO's actor, supervised fine-tuning."""

    def objective(params: PyTree, rows: Rows) -> tuple[Ratio, Mapping[str, Ratio]]:
        where = (rows.segment_BT, rows.position_BT, rows.prefix_BT)
        logprob_BT, entropy_BT = forward(params, rows.tokens_BT, *where, rows.key)
        return loss(
            logprob_BT,
            rows.old_logprob_BT,
            rows.ref_logprob_BT,
            rows.sampler_logprob_BT,
            rows.advantage_BT,
            entropy_BT,
            rows.mask_BT,
            rows.length_BT,
            rows.segment_BT,
            kl_scale=rows.kl_scale,
        )

    return objective


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Supervised fine-tuning: the mean of -log p over loss tokens, each token counting the same."""

    def __call__(
        self,
        logprob_BT: Float[Array, "B T"],
        old_logprob_BT: Float[Array, "B T"],
        ref_logprob_BT: Float[Array, "B T"],
        sampler_logprob_BT: Float[Array, "B T"],
        advantage_BT: Float[Array, "B T"],
        entropy_BT: Float[Array, "B T"],
        mask_BT: Float[Array, "B T"],
        length_BT: Float[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        /,
        *,
        kl_scale: Float[Array, ""] | float = 1.0,
    ) -> tuple[Ratio, Mapping[str, Ratio]]:
        """(-sum of log p over mask, tokens), and sft/loss and sft/entropy."""
        del old_logprob_BT, ref_logprob_BT, sampler_logprob_BT, advantage_BT, length_BT, segment_BT, kl_scale
        count = jnp.sum(mask_BT)
        loss = Ratio(-jnp.sum(jnp.where(mask_BT > 0, logprob_BT, 0.0)), count)
        entropy = Ratio(jnp.sum(jnp.where(mask_BT > 0, jax.lax.stop_gradient(entropy_BT), 0.0)), count)
        return loss, {"sft/loss": loss, "sft/entropy": entropy}
