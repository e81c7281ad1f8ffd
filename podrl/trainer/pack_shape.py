"""Shapes of packed batches: how long rows are, and how many a micro-batch has, from settings and the mesh."""

import dataclasses

from jax.sharding import Mesh

from podrl.mesh.rules import batch_shards, time_shards
from podrl.trainer.config import RLTrainingConfig

# Defaults: tokens of one micro-batch on one device, and the number that row lengths are multiples of. On CPU
# small micro-batches stay near the caches and leave fewer empty rows; accelerators must fill their matrix units.
_DEVICE_TOKENS = {"cpu": 1280, "accelerator": 4096}
# By how much a row of an accelerator may exceed them where it then holds a whole group and no key says how much it may
# hold: in parts, the prompt is computed and the weights are read once for each (docs/measurements/planning.md).
_WHOLE_GROUP = 1.25
_ROW_MULTIPLE = {"cpu": 32, "accelerator": 128}
_SHORT = 256
# Batches that share prompts have fewer tokens, of which the last micro-batch should not leave many rows empty.
_SHARING_TOKENS = 480


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The fixed shape of every packed batch of a run: contents vary, compiled programs do not.

    Attributes:
      micro_batches: A, the most micro-batches a batch may need.
      rows: B, rows of one micro-batch over all data shards.
      tokens: T, tokens of one row.
      shards: data shards that split the rows of a micro-batch evenly.
      shared: True lets sequences that begin alike share those tokens in a row.
      whole: True keeps all pieces of a sample in one row, for a loss with terms over whole samples.
    """

    micro_batches: int
    rows: int
    tokens: int
    shards: int = 1
    shared: bool = False
    whole: bool = False

    @staticmethod
    def for_worst_case(
        sequences: int,
        max_length: int,
        *,
        max_tokens_per_row: int,
        rows_per_micro_batch: int,
        shards: int = 1,
        shared: bool = False,
    ) -> "PackShape":
        """Computes the smallest shape that holds any `sequences` sequences of at most `max_length` tokens.

        First-fit decreasing puts at least floor(T / max_length) sequences into every row but the last: a row that
        turns a sequence away already holds more than T - max_length tokens. Where sharing would need more rows than
        that, `place` does without.

        Args:
          sequences: sequences of one mini-batch.
          max_length: longest possible sequence, tokens.
          max_tokens_per_row: T.
          rows_per_micro_batch: B; rounded up to a multiple of `shards`, and down to what the worst case fills.
          shards: size of the mesh axes that split the rows (data x fsdp).
          shared: see PackShape.

        Raises:
          ValueError: a sequence of `max_length` does not fit into a row, or a size is not positive.
        """
        assert min(sequences, max_length, rows_per_micro_batch, shards) >= 1, (sequences, max_length, shards)
        if max_length > max_tokens_per_row:
            raise ValueError(
                f"Sequences of up to {max_length} tokens do not fit into rows of {max_tokens_per_row}: raise "
                "trainer.max_tokens_per_row, or lower rollout.max_prompt_length or rollout.max_tokens_to_generate."
            )
        worst_rows = _ceil(sequences, max_tokens_per_row // max_length)
        rows = min(_ceil(rows_per_micro_batch, shards), _ceil(worst_rows, shards)) * shards
        return PackShape(_ceil(worst_rows, rows), rows, max_tokens_per_row, shards, shared)


def pack_shape(
    training: RLTrainingConfig,
    mesh: Mesh,
    *,
    sequences: int,
    max_length: int,
    group_size: int = 1,
    max_prompt_length: int = 0,
) -> PackShape:
    """Chooses the shape of all packed batches of `sequences` sequences (one mini-batch) of at most `max_length` tokens.

    Args:
      training, mesh: settings of the sizes of rows and micro-batches, and the mesh that they are trained on.
      sequences, max_length: number and greatest length of the sequences that a batch must hold.
      group_size, max_prompt_length: sequences that begin with the same prompt, and tokens of the longest prompt.

    Raises:
      ValueError: rows that cannot hold the longest sequence or do not divide, a device limit that cannot hold a row.
    """
    kind = _kind(mesh)
    shards, parts = batch_shards(mesh), time_shards(mesh)
    limit, multiple = parts * (training.max_seq_token_per_tpu or 0), parts * _ROW_MULTIPLE[kind]
    wanted = max_length if max_length > _SHORT else int(1.65 * max_length)
    shared = training.share_prompts is not False and group_size > 1 and max_prompt_length > 1
    if shared and max_length > _SHORT:
        room, even = (limit or parts * _DEVICE_TOKENS[kind]) // multiple * multiple, kind == "accelerator"
        sized = limit or training.micro_sequences(group_size) or training.gradient_accumulation_steps
        whole = room if sized or not even else int(_WHOLE_GROUP * room)
        wanted = _group_row(group_size, max_prompt_length, max_length, room, whole, even=even) or wanted
    tokens = training.max_tokens_per_row or _ceil(wanted, multiple) * multiple
    if tokens % parts:
        raise ValueError(f"trainer.max_tokens_per_row={tokens} must be a multiple of the mesh's seq={parts}.")
    if 0 < limit < tokens:
        raise ValueError(
            f"trainer.max_seq_token_per_tpu={limit // parts} cannot hold a packed row of {tokens} tokens: raise it, or "
            "lower trainer.max_tokens_per_row."
        )
    full = parts * (_SHARING_TOKENS if shared and kind == "cpu" else _DEVICE_TOKENS[kind])
    per_device = max(1, (limit or full) // tokens)
    micro, count = training.micro_sequences(group_size), training.gradient_accumulation_steps
    if training.mini_batch_size and micro and count and sequences != micro * count:
        raise ValueError(
            f"trainer.mini_batch_size={training.mini_batch_size} makes {sequences} sequences, not micro-batches of "
            f"{micro} x trainer.gradient_accumulation_steps={count}: leave one of the three out."
        )
    if micro is None and count is not None:
        micro = _ceil(sequences, count)
    rows = per_device * shards
    if micro is not None and max_length <= tokens:
        # Rows that are longer for the sake of sharing are fewer: the memory is that of `micro` sequences.
        rows = _ceil(micro * max_length, tokens) if shared else _ceil(micro, tokens // max_length)
        if limit:
            rows = min(rows, per_device * shards)
    return PackShape.for_worst_case(
        sequences, max_length, max_tokens_per_row=tokens, rows_per_micro_batch=rows, shards=shards, shared=shared
    )


def _kind(mesh: Mesh) -> str:
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "accelerator"


def _group_row(group_size: int, prompt: int, longest: int, room: int, whole: int, *, even: bool) -> int:
    """Computes the tokens of a row with a prompt and its samples, all if they fit `whole`; 0 for one sample.

    Else those that fit `room`, or `even` parts of the group.
    """
    own = longest - prompt + 1  # each has its own last prompt token
    if prompt + group_size * own <= whole:
        return prompt + group_size * own
    fit = min(group_size, (room - prompt) // own)
    fit = _ceil(group_size, _ceil(group_size, fit)) if even and fit > 1 else fit
    return prompt + fit * own if fit > 1 else 0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
