"""Types that cross layers, and the dimension key: the letters that end every array name of podrl.

Dimension key:
  P prompts        G samples per prompt    B sequences or packed rows (podrl.groups: the prompt of each sample)
  T tokens         S cache length          R decode lanes           C tokens of a page of the key/value pool
  V vocabulary     D model                 F feed-forward           L layers
  N query heads    K key/value heads       H head dimension         A micro-batches (gradient accumulation)
  F is also the number of reward functions, on the host.

Index t describes token t everywhere: `logprob_BT[b, t]` is log p(token t | tokens < t); index 0 is masked.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

PyTree = Any


class BatchError(ValueError):
    """A batch cannot be trained on: the run saves the steps before it, then ends with this message."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """P distinct prompts on the host, with the fields their rewards need and the data position after them.

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


SOURCE = "dataset"  # the field of prompts that names their source in a mixture

Mode = Literal["train", "eval"]  # what samples are made for

# Why a sample ended; values of `Rollouts.stop_B`. A failed one met logits without a distribution (NaN, infinity); an
# environment ended one by returning, or had no time left for it, or it ended after a call beyond env.max_tool_calls.
STOP_EOS, STOP_LENGTH, STOP_STRING, STOP_FAILED, STOP_ENV, STOP_DEADLINE, STOP_CALLS = range(7)


class LeftOut(enum.IntEnum):
    """The reason why a sample has no weight in the policy's loss; of several, the first in podrl/learner/left_out.py.

    The names are those of `loss/left_out/REASON`, and docs/metrics.md explains each. The numbers are in checkpoints.
    """

    NOT = 0
    FAILED = 1  # the model's logits gave no distribution
    NO_REWARD = 2  # its reward is NaN, or that of its prompt's greedy completion
    GROUP = 3  # another sample of its group failed or has no reward
    OUT_OF_TIME = 4  # its environment met its deadline
    NO_TOKENS = 5  # it ended before the policy said anything
    OVERLONG = 6  # the limit cut it off, and such samples are filtered
    STALE = 7  # all of its tokens are older than the bound
    CRITIC_WARMUP = 8  # only the critic learns in this step
    EQUAL_REWARDS = 9  # its advantage is 0, as all rewards of its group are equal
    ZERO_ADVANTAGE = 10  # its advantage is 0 for another reason
    DYNAMIC_SAMPLING = 11  # its group was replaced by another


# `Rollouts.episodes` of a sample that has no environment.
NO_EPISODE: Mapping[str, Any] = {"turns": [], "metrics": {}, "seconds": 0.0}


@dataclasses.dataclass(frozen=True)
class Column:
    """The storage type and the fill of a per-token array of `Rollouts`.

    Attributes:
      dtype: numpy type of its values on the host, on disk and between hosts.
      fill: value of a token that the policy did not sample, and beyond the end of a sample.
      drawn: whether the engine makes the value with each token that it samples.
    """

    dtype: type[np.generic]
    fill: float
    drawn: bool = True


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B finished samples of P prompts on the host; prompt and completion in one right-padded row.

    A field whose type has a `Column` is a row of the tables TOKENS and DRAWN below. Sessions, checkpoints of partial
    samples, messages between hosts and the trace go by these tables, so a new number per token is one field here, a
    value of `podrl.engine.sampling.Draw` of the same name, and whoever reads it.

    Attributes:
      prompts: what was asked.
      tokens_BT: prompt then completion, padded with the pad id.
      group_B: row of each sample's prompt in `prompts`; a group is found by it alone, and may be incomplete.
      length_B: prompt plus completion tokens.
      piece_BT: number of the piece that each token belongs to, from 0 within its sample and ascending. A piece is a
        token sequence with a context of its own: no token attends to another piece, and positions restart. Piece 0
        begins with the prompt; 0 beyond the end.
      mask_BT: 1 where the policy sampled the token (the end token included), 0 on prompt, tool output and padding.
      logprob_BT: log-probability at the sampling temperature over the whole vocabulary, nats: the distribution the
        trainer computes too.
      kept_BT: share of that distribution that top-k, top-p and min-p left, 1 without them and where mask is 0: the
        token was drawn with log-probability logprob_BT - log(kept_BT).
      raw_logprob_BT: log-probability under the model's own distribution at temperature 1, nats.
      version_BT: version of the weights that sampled each token; -1 where mask is 0.
      turn_reward_BT: what the sample's environment gave, on the last sampled token of the turn it was given for; what
        it gave for the whole sample is on the last of all, and where nothing was sampled on the prompt's last token.
        0 elsewhere, and without an environment.
      stop_B: why each ended: STOP_EOS to STOP_CALLS.
      completions: decoded completions without end tokens.
      episodes: of each sample, as JSON: `turns` (of the model: by, text, tokens, versions of the first and last, stop,
        reward; of others: by, text, tokens, seconds, failed, replayed), `metrics` by name, `seconds`, and `text`
        where the environment gave the text to be scored.
      seconds: wall time the batch took to generate.
      route_BTX: the experts that computed each token in the sampler, prompt tokens included: bytes of the numbers
        (L, k) that `podrl.models.moe.route` takes, 0 where none are recorded (the last token, which no program was
        fed, and padding). None where routes are not recorded.
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
    episodes: Sequence[Mapping[str, Any]]
    seconds: float
    route_BTX: UInt8[np.ndarray, "B T X"] | None = None


# Per-token columns of Rollouts by name, without the shape suffix: all of them, and those that the engine draws.
TOKENS: Mapping[str, Column] = {
    field.name.removesuffix("_BT"): column
    for field in dataclasses.fields(Rollouts)
    for column in getattr(field.type, "__metadata__", ())
    if isinstance(column, Column)
}
DRAWN: Mapping[str, Column] = {name: column for name, column in TOKENS.items() if column.drawn}


def blank_columns(shape: tuple[int, int], *, pad_id: int, written: Collection[str] | None = None) -> dict[str, Any]:
    """Makes every per-token column of Rollouts, by field name, with the values that stand where nothing was sampled.

    All samples have one piece: `piece_BT` is 0, and always writable, as it travels with the header of a batch.

    Args:
      shape: (B, T) of each array.
      pad_id: fills the tokens.
      written: fields that the caller will write to; the others are read-only views of one value, which take no memory.
        None for all of them.
    """
    blank: dict[str, Any] = {"piece_BT": np.zeros(shape, np.int16)}
    for name, column in TOKENS.items():
        field, fill = f"{name}_BT", column.dtype(pad_id if name == "tokens" else column.fill)
        if written is not None and field not in written:
            blank[field] = np.broadcast_to(fill, shape)
        else:  # zeros take memory only where something is written
            blank[field] = np.full(shape, fill) if fill else np.zeros(shape, column.dtype)
    return blank


@dataclasses.dataclass(frozen=True)
class Experience:
    """Rollouts with their rewards, ready for advantages.

    Attributes:
      rollouts: the samples.
      reward_FB: reward of each function for each sample, unweighted.
      reward_B: the weighted sum the algorithm optimises, shaping included.
      greedy_reward_B: the same for the greedy completion of each sample's prompt; zeros unless the advantage needs it.
      seconds: wall time spent scoring.
      counts: what generation has to say about the batch, by metric name; of several hosts' parts sums, of time/* and
        perf/* the largest.
      lost_B: why each sample leaves the loss, as far as that is known where samples are made: LeftOut codes.
    """

    rollouts: Rollouts
    reward_FB: Float[np.ndarray, "F B"]
    reward_B: Float[np.ndarray, " B"]
    greedy_reward_B: Float[np.ndarray, " B"]
    seconds: float
    counts: Mapping[str, float]
    lost_B: Int[np.ndarray, " B"]

    def rewarded(self) -> Bool[np.ndarray, " B"]:
        """True for the samples of groups that are whole, so that their rewards count: all that `lost_B` leaves in."""
        return np.isin(self.lost_B, (LeftOut.NOT, LeftOut.STALE))

    @property
    def data_state(self) -> bytes:
        """The data iterator's state after this batch's prompts, as JSON bytes."""
        return self.rollouts.prompts.data_state


@flax.struct.dataclass
class Layout:
    """Packed tokens with their segment ids and positions: all that a forward pass reads.

    Attributes:
      tokens_BT: packed sequences.
      segment_BT: 1, 2, ... within a row; 0 is padding. Attention never crosses segments but for shared prefixes.
      position_BT: position of the token inside its own sequence.
      route_BTX: the experts that the policy's tokens take, see `Rollouts.route_BTX`; None where all tokens choose for
        themselves. Other models than the policy do not read it.
    """

    tokens_BT: Int[Array, "B T"]
    segment_BT: Int[Array, "B T"]
    position_BT: Int[Array, "B T"]
    route_BTX: UInt8[Array, "B T X"] | None = flax.struct.field(default=None, kw_only=True)

    def prefix(self) -> Int[Array, "B T"] | None:
        """Segment id of the shared prefix that each token attends to besides its own segment."""
        return None

    def sample(self) -> Int[Array, "B T"]:
        """Number of each token's sample within the row, from 1, 0 on padding: its segment, unless samples have pieces.

        Terms over whole samples go by it. Meaningless on shared prefixes, which count in no loss.
        """
        return self.segment_BT


@flax.struct.dataclass
class SharedLayout(Layout):
    """A layout in which samples of a prompt share its tokens (a shared prefix).

    Attributes:
      prefix_BT: the segment that comes before the token's own; 0 where its sequence shares nothing.
    """

    prefix_BT: Int[Array, "B T"]

    def prefix(self) -> Int[Array, "B T"] | None:
        return self.prefix_BT


@flax.struct.dataclass
class PiecesLayout(Layout):
    """A layout in which all pieces of a sample lie in one row, so that terms over whole samples can be computed.

    Attributes:
      sample_BT: 1, 2, ... within a row; 0 is padding. A sample has one segment for each of its pieces.
    """

    sample_BT: Int[Array, "B T"]

    def sample(self) -> Int[Array, "B T"]:
        return self.sample_BT


Rows = TypeVar("Rows")


@flax.struct.dataclass
class Batch(Generic[Rows]):
    """Packed rows for one call of a compiled program: A micro-batches of B rows each.

    Attributes:
      rows: what the program reads of every token: a Layout for scoring, else a dataclass that lies beside the loss that
        reads it. Its fields are named for one micro-batch; here each array has a dimension A before those of its name.
      micro_batches: how many of the A micro-batches hold tokens, at least 1; they come first.
    """

    rows: Rows
    micro_batches: Int[Array, ""]

    def layout(self) -> "Batch[Layout]":
        """The part of the batch that scoring reads; shares the arrays."""
        rows: Any = self.rows
        return Batch(rows.layout, self.micro_batches)


def unrouted(batch: Batch[Layout]) -> Batch[Layout]:
    """Takes the recorded routes out of a batch: for models other than the policy, and older states of it."""
    return Batch(dataclasses.replace(batch.rows, route_BTX=None), batch.micro_batches)


@flax.struct.dataclass
class TrainState:
    """State that a training step changes. `params` holds the trainable leaves only (under LoRA: the adapters)."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]


@flax.struct.dataclass
class ActorCriticState:
    """Checkpoint content of a job with a critic: the actor's TrainState under its own names, and the critic's."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    critic: TrainState


@flax.struct.dataclass
class AveragedState:
    """Checkpoint content of a job that keeps a moving average of its weights: TrainState's names, and the average."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    average: PyTree


@flax.struct.dataclass
class Policy:
    """Weights on the rollout mesh, in the rollout dtype; `version` is the training step that produced them."""

    params: PyTree
    version: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Ratio:
    """Numerator and denominator of a mean: micro-batches and hosts add both, division happens once."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.total + other.total, self.count + other.count)

    def mean(self) -> Float[Array, ""]:
        """The quotient; 0 when nothing was counted."""
        return self.total / (self.count + (self.count == 0))


Mask = Bool[Array, "B T"] | Float[Array, "B T"]
