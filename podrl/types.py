"""The types that cross a layer boundary, and the one dimension key every array name in podrl is spelled with.

Dimension key:
  P prompts        G samples per prompt    B sequences or packed rows (samples are group-major: b = p * G + g)
  T tokens         S cache length          R decode lanes           C segment length of the key/value pool
  V vocabulary     D model                 F feed-forward           L layers
  N query heads    K key/value heads       H head dimension         A micro-batches (gradient accumulation)
  F is also the number of reward functions, on the host.

Index t describes token t everywhere: `logprob_BT[b, t]` is log p(token t | tokens < t); index 0 is masked.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Prompts:
    """P distinct prompts on the host, with what their rewards need and where the data stream stands after them.

    Attributes:
      tokens_PT: prompt tokens, right-padded with the pad id.
      length_P: tokens in each prompt, at least 1.
      index_P: position of each prompt in the data stream since step 0; part of every sample's random key.
      text: the prompts as text, one per row.
      fields: task fields handed to reward functions, each a sequence of P values (question, answer, ...).
      data_state: the data iterator's state after this batch, as JSON bytes.
    """

    tokens_PT: Int[np.ndarray, "P T"]
    length_P: Int[np.ndarray, " P"]
    index_P: Int[np.ndarray, " P"]
    text: Sequence[str]
    fields: Mapping[str, Sequence[Any]]
    data_state: bytes


# Why a sample ended; values of `Rollouts.stop_B`.
STOP_EOS, STOP_LENGTH, STOP_STRING = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B = P * G finished samples on the host; prompt and completion in one right-padded row.

    Attributes:
      prompts: what was asked.
      tokens_BT: prompt then completion, padded with the pad id.
      length_B: prompt plus completion tokens.
      mask_BT: 1 where the policy sampled the token (the end token included), 0 on prompt, tool output and padding.
      logprob_BT: log-probability under the distribution the token was drawn from (temperature, top-k, top-p), nats.
      raw_logprob_BT: log-probability under the model's own distribution at temperature 1, nats.
      version_BT: version of the weights that sampled each token; -1 where mask is 0.
      stop_B: STOP_EOS, STOP_LENGTH or STOP_STRING.
      completions: decoded completions without end tokens.
      seconds: wall time the batch took to generate.
    """

    prompts: Prompts
    tokens_BT: Int[np.ndarray, "B T"]
    length_B: Int[np.ndarray, " B"]
    mask_BT: Float[np.ndarray, "B T"]
    logprob_BT: Float[np.ndarray, "B T"]
    raw_logprob_BT: Float[np.ndarray, "B T"]
    version_BT: Int[np.ndarray, "B T"]
    stop_B: Int[np.ndarray, " B"]
    completions: Sequence[str]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Experience:
    """Rollouts with their rewards, ready for advantages.

    Attributes:
      rollouts: the samples.
      reward_FB: reward of each function for each sample, unweighted.
      reward_B: the weighted sum the algorithm optimises, shaping included.
      greedy_reward_B: the same for the greedy completion of each sample's prompt; zeros unless the advantage needs it.
      seconds: wall time spent scoring.
      counts: what generation has to say about the batch, by metric name.
    """

    rollouts: Rollouts
    reward_FB: Float[np.ndarray, "F B"]
    reward_B: Float[np.ndarray, " B"]
    greedy_reward_B: Float[np.ndarray, " B"]
    seconds: float
    counts: Mapping[str, float]


@flax.struct.dataclass
class TrainBatch:
    """Packed rows for one optimizer update: A micro-batches of B rows, of which the first `micro_batches` hold tokens.

    Attributes:
      tokens_ABT: packed sequences.
      segment_ABT: 1, 2, ... within a row; 0 is padding. Attention never crosses segments but for prefixes.
      prefix_ABT: where samples of a prompt share its tokens, the segment of those that come before this one's own; 0 is
        none. None where nothing is shared.
      position_ABT: position of the token inside its own sequence.
      mask_ABT: 1 where the token counts in the loss.
      advantage_ABT: advantage of the token.
      old_logprob_ABT: log-probability of the token under the policy before the first update on this batch (the ratio's
        denominator), nats.
      sampler_logprob_ABT: log-probability the rollout engine reported when it drew the token, nats.
      ref_logprob_ABT: log-probability under the reference policy; zeros when no KL term is used.
      length_ABT: number of loss tokens in this token's sequence (1 on padding): weights of the sequence-mean modes.
      micro_batches: how many of the A micro-batches are filled, at least 1.
      kl_scale: what the loss multiplies its KL coefficient by; 1 unless the coefficient is steered.
    """

    tokens_ABT: Int[Array, "A B T"]
    segment_ABT: Int[Array, "A B T"]
    position_ABT: Int[Array, "A B T"]
    mask_ABT: Float[Array, "A B T"]
    advantage_ABT: Float[Array, "A B T"]
    old_logprob_ABT: Float[Array, "A B T"]
    sampler_logprob_ABT: Float[Array, "A B T"]
    ref_logprob_ABT: Float[Array, "A B T"]
    length_ABT: Float[Array, "A B T"]
    micro_batches: Int[Array, ""]
    kl_scale: Float[Array, ""]
    prefix_ABT: Int[Array, "A B T"] | None = None


@flax.struct.dataclass
class CriticBatch:
    """Packed rows for one update of the critic; fields that TrainBatch has too mean the same.

    Attributes:
      value_ABT: the critic's value before the token, as it was before the first update on this batch; reward units.
      return_ABT: what the value should have been.
    """

    tokens_ABT: Int[Array, "A B T"]
    segment_ABT: Int[Array, "A B T"]
    position_ABT: Int[Array, "A B T"]
    mask_ABT: Float[Array, "A B T"]
    value_ABT: Float[Array, "A B T"]
    return_ABT: Float[Array, "A B T"]
    length_ABT: Float[Array, "A B T"]
    micro_batches: Int[Array, ""]
    prefix_ABT: Int[Array, "A B T"] | None = None


@flax.struct.dataclass
class TrainState:
    """What a training step changes. `params` holds the trainable leaves only (under LoRA: the adapters)."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]


@flax.struct.dataclass
class ActorCriticState:
    """What a checkpoint holds of a job with a critic: the actor's TrainState under its own names, and the critic's."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    critic: TrainState


@flax.struct.dataclass
class Policy:
    """Weights on the rollout mesh, in the rollout dtype; `version` is the training step that produced them."""

    params: PyTree
    version: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Ratio:
    """A mean that is not divided yet: micro-batches and hosts add both parts, division happens once."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.total + other.total, self.count + other.count)

    def mean(self) -> Float[Array, ""]:
        """The quotient; 0 when nothing was counted."""
        return self.total / (self.count + (self.count == 0))


Mask = Bool[Array, "B T"] | Float[Array, "B T"]
