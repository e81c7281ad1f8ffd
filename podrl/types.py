"""Types that cross layers, and the dimension key: the letters that end the names of podrl's arrays.

Dimension key:
  P prompts        G samples per prompt    B sequences or packed rows (podrl.groups finds the prompt of each sequence)
  T tokens         S cache length          R decode lanes           C tokens of a page of the key/value pool
  V vocabulary     D model                 F feed-forward           L layers
  N query heads    K key/value heads       H head dimension         A micro-batches (gradient accumulation)
  F is also the number of reward functions, on the host.

Index t describes token t everywhere: `logprob_BT[b, t]` is log p(token t | tokens < t); index 0 is masked.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from podrl.mappings import EpisodeRecord, TaskColumns

PyTree = Any


class JaxDevice(Protocol):
    """A device of jax, real or of a topology; type checkers do not recognise jax's own class."""

    id: int
    process_index: int
    platform: str
    device_kind: str


class BatchError(ValueError):
    """Raised when a batch cannot be trained on: the run saves the steps before it, then ends with this message."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """P prompts on the host, with fields for reward functions and the position in the data after the prompts.

    Attributes:
      tokens_PT: prompt tokens, right-padded with the pad id.
      length_P: number of tokens in each prompt, at least 1.
      index_P: position of each prompt in the data stream since step 0; part of every sample's random key.
      text: the prompts as text, one per row.
      fields: fields of the tasks (question, answer, ...), each a sequence of P values. Reward functions and
        environments read them.
      data_state: the data iterator's state after this batch, as JSON bytes.
    """

    tokens_PT: Int[np.ndarray, "P T"]
    length_P: Int[np.ndarray, " P"]
    index_P: Int[np.ndarray, " P"]
    text: Sequence[str]
    fields: TaskColumns
    data_state: bytes


SOURCE = "dataset"  # the field of prompts that names their source in a mixture

Mode = Literal["train", "eval"]  # the purpose of samples: training or evaluation

# The reason why a sample ended; values of `Rollouts.stop_B`. STOP_FAILED: the logits gave no distribution (NaN or
# infinity). STOP_ENV: the environment returned. STOP_DEADLINE: the environment had no time left, or its program failed.
# STOP_CALLS: the episode ended after the model made more calls than env.max_tool_calls.
STOP_EOS, STOP_LENGTH, STOP_STRING, STOP_FAILED, STOP_ENV, STOP_DEADLINE, STOP_CALLS = range(7)


class LeftOut(enum.IntEnum):
    """The reason why a sample has no weight in the policy's loss.

    If several reasons apply to a sample, the reason that is tested first counts (podrl/learner/left_out.py). The names
    are those of the metrics `loss/left_out/REASON`, which docs/metrics.md explains. Checkpoints hold the numbers, so a
    number must not change.
    """

    NOT = 0
    FAILED = 1  # the model's logits gave no distribution
    NO_REWARD = 2  # the reward of the sample, or of the greedy completion of its prompt, is NaN
    GROUP = 3  # another sample of the group failed or has no reward
    OUT_OF_TIME = 4  # the environment missed its deadline, or the environment's program failed
    NO_TOKENS = 5  # the sample ended before the policy had a turn
    OVERLONG = 6  # the length limit cut the sample off, and the setting overlong_filter leaves cut samples out
    STALE = 7  # all tokens were sampled by versions older than the setting stale_bound allows
    CRITIC_WARMUP = 8  # only the critic learns in this step
    EQUAL_REWARDS = 9  # the advantage is 0 because all rewards of the group are equal
    ZERO_ADVANTAGE = 10  # the advantage is 0 for another reason
    DYNAMIC_SAMPLING = 11  # dynamic sampling replaced the group by another group


# The entry of `Rollouts.episodes` for a sample that has no environment.
NO_EPISODE: EpisodeRecord = {"turns": [], "metrics": {}, "seconds": 0.0}


@dataclasses.dataclass(frozen=True)
class Column:
    """The storage type and the fill value of a per-token array of `Rollouts`.

    Attributes:
      dtype: numpy type of the array's values on the host, on disk and between hosts.
      fill: value at tokens that the policy did not sample, and beyond the end of a sample.
      drawn: True if the engine computes the value when it samples the token.
    """

    dtype: type[np.generic]
    fill: float
    drawn: bool = True


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B finished samples of P prompts on the host; prompt and completion in one right-padded row.

    A field whose type has a `Column` is an entry of the tables TOKENS and DRAWN below. Sessions, checkpoints of partial
    samples, messages between hosts and the trace all read these tables. So a new number per token takes one field here,
    a field of the same name in `podrl.engine.sampling.Draw`, and the code that reads it.

    Attributes:
      prompts: the P prompts that the samples answer.
      tokens_BT: prompt tokens, then completion tokens, padded with the pad id.
      group_B: row in `prompts` of each sample's prompt. Samples with the same row are a group; a group may be
        incomplete.
      length_B: number of prompt and completion tokens of each sample.
      piece_BT: number of the piece that each token belongs to, counted from 0 within a sample, never falling. A piece
        is a token sequence with a context of its own: its tokens do not attend to other pieces, and its positions
        start at 0. Piece 0 begins with the prompt. The value beyond the end of a sample is 0.
      mask_BT: 1 where the policy sampled the token (the end token included), 0 on prompt, tool output and padding.
      logprob_BT: log-probability at the sampling temperature over the whole vocabulary, nats. The trainer's
        log-probabilities are defined in the same way.
      kept_BT: total probability of the tokens that top-k, top-p and min-p left to choose from, under the distribution
        of `logprob_BT`. The token was drawn with log-probability logprob_BT - log(kept_BT). 1 without these filters and
        where mask is 0.
      raw_logprob_BT: log-probability under the model's own distribution at temperature 1, nats.
      version_BT: version of the weights that sampled each token; -1 where mask is 0.
      turn_reward_BT: rewards that the sample's environment gave. The reward of a turn is on the last sampled token of
        the turn. The reward of the whole sample is on the sample's last sampled token, or on the prompt's last token
        if no token was sampled. 0 elsewhere, and without an environment.
      stop_B: reason why each sample ended: STOP_EOS to STOP_CALLS.
      completions: decoded completions without end tokens.
      episodes: record of each sample's episode, as JSON: `turns`, `metrics` by name and `seconds`; `text` if the
        environment gave the text to be scored; `reward`, the sum of the environment's rewards, if it gave any. A turn
        of the model has by, text, tokens, versions of the first and last token, stop and reward. A turn of a tool or
        a service has by, text, tokens, seconds, failed and replayed.
      seconds: wall time that generating the batch took.
      route_BTX: numbers of the experts that computed each token in the sampler, prompt tokens included. The entry of a
        token has the bytes of the array (L, k) that `podrl.models.moe.route` takes. 0 where no route is recorded: at
        padding, and at the last token, which no program has read. None if the job does not record routes.
    """

    prompts: Prompts
    tokens_BT: Annotated[Int[np.ndarray, "B T"], Column(np.int32, 0, drawn=False)]
    group_B: Int[np.ndarray, " B"]
    length_B: Int[np.ndarray, " B"]
    piece_BT: Int[np.ndarray, "B T"]
    mask_BT: Float[np.ndarray, "B T"]
    logprob_BT: Annotated[Float[np.ndarray, "B T"], Column(np.float32, 0.0)]
    kept_BT: Annotated[Float[np.ndarray, "B T"], Column(np.float32, 1.0)]
    raw_logprob_BT: Annotated[Float[np.ndarray, "B T"], Column(np.float32, 0.0)]
    version_BT: Annotated[Int[np.ndarray, "B T"], Column(np.int32, -1, drawn=False)]
    turn_reward_BT: Float[np.ndarray, "B T"]
    stop_B: Int[np.ndarray, " B"]
    completions: Sequence[str]
    episodes: Sequence[EpisodeRecord]
    seconds: float
    route_BTX: UInt8[np.ndarray, "B T X"] | None = None


# Per-token columns of Rollouts by name, without the shape suffix. TOKENS: all columns. DRAWN: the columns whose values
# the engine computes when it samples a token.
TOKENS: Mapping[str, Column] = {
    field.name.removesuffix("_BT"): column
    for field in dataclasses.fields(Rollouts)
    for column in getattr(field.type, "__metadata__", ())
    if isinstance(column, Column)
}
DRAWN: Mapping[str, Column] = {name: column for name, column in TOKENS.items() if column.drawn}


def blank_columns(
    shape: tuple[int, int], *, pad_id: int, written: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Makes every per-token column of Rollouts, by field name, filled with the column's value for tokens that were not
    sampled.

    Every sample has one piece: `piece_BT` is 0. `piece_BT` is always writable, because a message between hosts carries
    pieces in its header and not as a column that `written` could name.

    Args:
      shape: (B, T) of each array.
      pad_id: token id that fills `tokens_BT`.
      written: names of the fields that the caller will write to; None for all fields. The other fields are read-only
        views of one value, which take no memory.
    """
    blank: dict[str, np.ndarray] = {"piece_BT": np.zeros(shape, np.int16)}
    for name, column in TOKENS.items():
        field, fill = f"{name}_BT", column.dtype(pad_id if name == "tokens" else column.fill)
        if written is not None and field not in written:
            blank[field] = np.broadcast_to(fill, shape)
        else:  # np.zeros takes memory only for the pages that are written; np.full writes all of them
            blank[field] = np.full(shape, fill) if fill else np.zeros(shape, column.dtype)
    return blank


@dataclasses.dataclass(frozen=True)
class Experience:
    """Rollouts with their rewards, ready for advantages.

    Attributes:
      rollouts: the samples.
      reward_FB: unweighted reward of each sample by each reward function, and in further rows by the reward model and
        the environment, if there are any.
      reward_B: weighted sum of the rewards, shaping included: the number that the algorithm optimises.
      greedy_reward_B: the weighted sum for the greedy completion of each sample's prompt; zeros unless the advantage
        estimator reads it.
      seconds: wall time that scoring took.
      counts: metrics of generating the batch, by metric name. Where several hosts made parts of the batch, a metric is
        the sum over the parts; time/* and perf/* are the largest of the parts.
      lost_B: LeftOut code of each sample, as far as the code that makes samples knows it; 0 for samples in the loss.
    """

    rollouts: Rollouts
    reward_FB: Float[np.ndarray, "F B"]
    reward_B: Float[np.ndarray, " B"]
    greedy_reward_B: Float[np.ndarray, " B"]
    seconds: float
    counts: Mapping[str, float]
    lost_B: Int[np.ndarray, " B"]

    def rewarded(self) -> Bool[np.ndarray, " B"]:
        """Marks the samples whose rewards count: samples that `lost_B` leaves in the loss, and stale samples."""
        return np.isin(self.lost_B, (LeftOut.NOT, LeftOut.STALE))

    @property
    def data_state(self) -> bytes:
        """The data iterator's state after this batch's prompts, as JSON bytes."""
        return self.rollouts.prompts.data_state


@flax.struct.dataclass
class Layout:
    """Packed tokens with their segment ids and positions: all that a forward pass reads.

    Attributes:
      tokens_BT: token ids of the packed sequences.
      segment_BT: segment id of each token: 1, 2, ... within a row; 0 is padding.
      position_BT: position of the token inside its own sequence, from 0.
      last_BT: last segment that sees each token; 0 on padding. A token s is seen by the later tokens t of the row with
        segment[s] <= segment[t] <= last[s]: the tokens of its own segment, and tokens of other segments whose sequences
        begin with s. None if segments share no tokens: a token is then seen by its own segment alone.
      sample_BT: number of each token's sample within the row, from 1; 0 on padding. Set only if samples have several
        segments, and each sample lies in one row so that loss terms over whole samples can be computed; else None.
      route_BTX: experts that the policy's tokens take, as in `Rollouts.route_BTX`; None where the router chooses for
        every token. Only the policy reads it, no other model.
    """

    tokens_BT: Int[Array, "B T"]
    segment_BT: Int[Array, "B T"]
    position_BT: Int[Array, "B T"]
    last_BT: Int[Array, "B T"] | None = None
    sample_BT: Int[Array, "B T"] | None = None
    route_BTX: UInt8[Array, "B T X"] | None = flax.struct.field(default=None, kw_only=True)

    def sample(self) -> Int[Array, "B T"]:
        """Returns the number of each token's sample within the row: 1, 2, ...; 0 on padding.

        The number is the token's segment id, unless samples have several segments. Loss terms over whole samples group
        tokens by this number. The number means nothing on tokens that several samples share; no loss counts them.
        """
        return self.segment_BT if self.sample_BT is None else self.sample_BT


Rows = TypeVar("Rows")


@flax.struct.dataclass
class Batch(Generic[Rows]):
    """Packed rows for one call of a compiled program: A micro-batches of B rows each.

    Attributes:
      rows: per-token arrays that the program reads: a Layout for scoring, else the dataclass that is declared beside
        the loss that reads it. Names of fields give the shape of one micro-batch; here each array has a leading
        dimension A before the dimensions of its name.
      micro_batches: how many of the A micro-batches hold tokens, at least 1. Micro-batches with tokens come first.
    """

    rows: Rows
    micro_batches: Int[Array, ""]

    def layout(self) -> "Batch[Layout]":
        """Returns the part of the batch that scoring reads; it shares the batch's arrays."""
        rows: Any = self.rows
        return Batch(rows.layout, self.micro_batches)


def unrouted(batch: Batch[Layout]) -> Batch[Layout]:
    """Drops the recorded routes from a batch for a model other than the current policy, which alone reads routes."""
    return Batch(dataclasses.replace(batch.rows, route_BTX=None), batch.micro_batches)


@flax.struct.dataclass
class TrainState:
    """State that a training step changes. `params` holds the trainable leaves only (with LoRA: the adapters)."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]


@flax.struct.dataclass
class ActorCriticState:
    """Checkpoint content of a job with a critic: the fields of the actor's TrainState, and the critic's TrainState."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    critic: TrainState


@flax.struct.dataclass
class AveragedState:
    """Checkpoint content of a job that keeps a moving average of its weights: TrainState's fields, and the average."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    average: PyTree


@flax.struct.dataclass
class Policy:
    """Weights on the rollout mesh, in the rollout dtype; `version` is the number under which they were published."""

    params: PyTree
    version: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Ratio:
    """Numerator and denominator of a mean. Each is summed over micro-batches and hosts before the only division."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.total + other.total, self.count + other.count)

    def mean(self) -> Float[Array, ""]:
        """Returns total / count; if nothing was counted, both are 0, and so is the result."""
        return self.total / (self.count + (self.count == 0))


Mask = Bool[Array, "B T"] | Float[Array, "B T"]
