"""Shapes of packed batches: the length of rows and the number of rows in a micro-batch, from settings and mesh."""

import dataclasses
from collections.abc import Iterable

from jax.sharding import Mesh

from podrl.config import plural
from podrl.mesh.rules import batch_shards, time_shards
from podrl.models.config import ModelConfig
from podrl.trainer.config import RLTrainingConfig

# Default number of tokens of one micro-batch on one device. On CPU small micro-batches stay near the caches and leave
# fewer empty rows; accelerators must fill their matrix units.
_DEVICE_TOKENS = {"cpu": 1280, "accelerator": 4096}
# Factor by which a row on an accelerator may exceed _DEVICE_TOKENS if it then holds a whole group and no key sets the
# size. A group split over rows costs more: each row computes the prompt and reads the weights once more
# (docs/measurements/planning.md).
_WHOLE_GROUP = 1.25
_ROW_MULTIPLE = {"cpu": 32, "accelerator": 128}  # row lengths are multiples of this number of tokens
_SHORT = 256  # sequences of at most this many tokens are short, see RLTrainingConfig.max_tokens_per_row
# On CPU, the value in place of _DEVICE_TOKENS for batches that share prompts. Such batches have fewer tokens, and
# smaller micro-batches leave fewer empty rows in the last micro-batch.
_SHARING_TOKENS = 480


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The shape of packed batches; all batches of a program have one shape, so each program is compiled once.

    Attributes:
      micro_batches: largest number of micro-batches that a batch may need, A.
      rows: number of rows of one micro-batch over all data shards, B.
      tokens: number of tokens of one row, T.
      shards: number of data shards that split the rows of a micro-batch evenly.
      shared: True if sequences of a row that begin with the same tokens share these tokens.
      whole: True if all pieces of a sample lie in one row, for a loss with terms over whole samples; `Layout.sample_BT`
        then numbers the samples of a row.
      tree: True if pieces of a group share their common prefixes, and not only the prompt.
      routes: True if rows carry the experts that the sampler recorded.
    """

    micro_batches: int
    rows: int
    tokens: int
    shards: int = 1
    shared: bool = False
    whole: bool = False
    tree: bool = False
    routes: bool = True

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

        First-fit decreasing puts at least floor(T / max_length) sequences into every row but the last, because a row
        that cannot take a sequence already holds more than T - max_length tokens. If shared prompts would need more
        rows than this, `packing.place` packs without sharing.

        Args:
          sequences: number of sequences of one mini-batch.
          max_length: greatest length of a sequence, tokens.
          max_tokens_per_row: length of a row, T.
          rows_per_micro_batch: wanted number of rows, B; rounded up to a multiple of `shards`, and reduced to the
            number of rows that the worst case fills.
          shards: product of the sizes of the mesh axes that split the rows (data x expert x fsdp).
          shared: True if sequences of a row that begin with the same tokens share these tokens.

        Raises:
          ValueError: a sequence of `max_length` tokens does not fit into a row.
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

    def read_by(self, models: Iterable[ModelConfig | None]) -> "PackShape":
        """Returns this shape, restricted so that all of these models can read its batches; None stands for no model.

        A layer of linear attention keeps only one state for segments that continue an earlier segment: the prompt's
        state. With such a model, pieces of samples share no tokens but the prompt's.
        """
        recurrent = any(model is not None and model.recurrent for model in models)
        return dataclasses.replace(self, tree=self.tree and not recurrent)


def pack_shape(
    training: RLTrainingConfig,
    mesh: Mesh,
    *,
    sequences: int,
    max_length: int,
    group_size: int = 1,
    max_prompt_length: int = 0,
    pieces: bool = False,
    by_sample: bool = False,
) -> PackShape:
    """Chooses the shape of packed batches from the trainer's settings and the mesh.

    Args:
      training: settings that may fix the sizes of rows and micro-batches.
      mesh: mesh that trains on the batches.
      sequences: number of sequences that a batch (one mini-batch) must hold.
      max_length: greatest length of a sequence, tokens.
      group_size: number of sequences that begin with the same prompt.
      max_prompt_length: greatest length of a prompt, tokens.
      pieces: True if samples may have several pieces.
      by_sample: True if the loss has terms over whole samples.

    Raises:
      ValueError: rows are too short for the longest sequence or do not split along time, a device's limit of tokens is
        below the length of a row, or keys that set the size of micro-batches contradict each other.
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
            f"trainer.max_seq_token_per_tpu={limit // parts} cannot hold a packed row of {tokens} tokens (or, "
            "with seq, a device's part of it): raise it, or lower trainer.max_tokens_per_row or the sequences' length."
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
        # If rows are longer because prompts are shared, fewer rows take about as much memory as `micro` sequences.
        rows = _ceil(micro * max_length, tokens) if shared else _ceil(micro, tokens // max_length)
        if limit:
            rows = min(rows, per_device * shards)
    shape = PackShape.for_worst_case(
        sequences, max_length, max_tokens_per_row=tokens, rows_per_micro_batch=rows, shards=shards, shared=shared
    )
    return dataclasses.replace(shape, whole=pieces and by_sample, tree=pieces and training.share_prompts is not False)


def other_micro_batches(training: RLTrainingConfig, shape: PackShape, sequences: int, group_size: int) -> list[str]:
    """Returns sentences about micro-batches that are fewer, or of another size, than the keys of `training` ask for.

    Args:
      training: the trainer's settings.
      shape: shape of the packed batch of an update.
      sequences: number of sequences of an update.
      group_size: number of sequences of each prompt.
    """
    return [text for text in (_fewer(training, shape, sequences), _uneven(training, shape, group_size)) if text]


def _uneven(training: RLTrainingConfig, shape: PackShape, group_size: int) -> str:
    size = training.micro_sequences(group_size) or 0
    if size % shape.shards == 0 or shape.micro_batches == 1:
        return ""
    key = "micro_batch_sequences" if training.micro_batch_sequences else "train_micro_batch_size"
    return (
        f"trainer.{key}={getattr(training, key)} asks for micro-batches of {plural(size, 'sequence')}, which the "
        f"{shape.shards} shards of the trainer's mesh do not split evenly: a micro-batch has {shape.rows} rows of "
        f"{shape.tokens} tokens. The gradient is the same."
    )


def _fewer(training: RLTrainingConfig, shape: PackShape, sequences: int) -> str:
    wanted = training.gradient_accumulation_steps or 0
    if wanted <= shape.micro_batches:
        return ""
    for name in ("train_micro_batch_size", "micro_batch_sequences"):
        if size := getattr(training, name):
            return f"trainer.gradient_accumulation_steps={wanted} has no effect beside trainer.{name}={size}."
    return (
        f"trainer.gradient_accumulation_steps={wanted} is more than an update can have here: its {sequences} sequences "
        f"fill at most {shape.micro_batches} x {shape.rows} rows of {shape.tokens} tokens, so there are at most "
        f"{shape.micro_batches} micro-batches. The gradient is the same."
    )


def _kind(mesh: Mesh) -> str:
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "accelerator"


def _group_row(group_size: int, prompt: int, longest: int, room: int, whole: int, *, even: bool) -> int:
    """Computes the length of a row that holds a prompt once and several of its samples; 0 if only one sample fits.

    Args:
      group_size: number of samples of the prompt.
      prompt: number of tokens in the longest prompt.
      longest: number of tokens in the longest sample, prompt included.
      room: largest length of a row that holds a part of the group.
      whole: largest length of a row that holds the whole group.
      even: True to split a group that needs several rows into parts of equal size (up to rounding); False to fill all
        rows but the last.
    """
    own = longest - prompt + 1  # each sample has its own last prompt token, which predicts another token in each sample
    if prompt + group_size * own <= whole:
        return prompt + group_size * own
    fit = min(group_size, (room - prompt) // own)
    fit = _ceil(group_size, _ceil(group_size, fit)) if even and fit > 1 else fit
    return prompt + fit * own if fit > 1 else 0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
