"""Decoder: a model with its weights, as `from_pretrained` returns it and the Python API takes it."""

import logging
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from podrl.models import decoder, hf_load, hf_save, lora, peft_files
from podrl.models.config import LoraConfig, ModelConfig
from podrl.storage import hub, storage
from podrl.types import PyTree

_log = logging.getLogger("podrl.models")


class Decoder(nnx.Module):
    """A decoder with its weights, callable on tokens.

    Attributes:
      config: architecture of the model, its adapters included.
      weights: the parameter tree of podrl/models/decoder.py, every leaf an nnx.Param.
      directory: source of the parameters, as the user named it; '' for parameters from elsewhere.
    """

    def __init__(self, config: ModelConfig, params: PyTree, mesh: Mesh, directory: str = ""):
        """Wraps a parameter tree, without a copy."""
        self.config = config
        self.directory = directory
        self.mesh = mesh
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> PyTree:
        """The parameter tree; shares the arrays."""
        return jax.tree.map(lambda p: p[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Param))

    def __call__(
        self, tokens_BT: Int[Array, "B T"], *, dtype: jax.typing.DTypeLike = jnp.float32
    ) -> Float[Array, "B T V"]:
        """Computes logits after every token, float32: logits_BTV[b, t] scores token t + 1.

        Rows are whole sequences from position 0; right padding does not change the logits before it.

        Args:
          tokens_BT: token ids in [0, V).
          dtype: compute dtype.

        Raises:
          ValueError: `tokens_BT` is not two-dimensional.
        """
        tokens_BT = jnp.asarray(tokens_BT)
        if tokens_BT.ndim != 2:
            raise ValueError(
                f"Tokens have shape {tokens_BT.shape}: give [batch, time], one sequence as tokens[None, :]."
            )
        return _logits(self.params, tokens_BT, self.config, jnp.dtype(dtype), self.mesh)

    def merged(self) -> "Decoder":
        """Returns the equivalent dense model, with the adapters folded into the weights."""
        if not self.config.lora.rank:
            return self
        config, params = lora.merge(self.params, self.config)
        return Decoder(config, params, self.mesh)

    def save(self, directory: str | pathlib.Path, *, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        """Writes a Hugging Face directory, adapters merged; see `podrl.models.hf_save.save`."""
        dense = self.merged()
        hf_save.save(directory, dense.config, dense.params, dtype=dtype)

    def save_adapters(self, directory: str | pathlib.Path, *, base: str) -> None:
        """Writes the adapters alone in PEFT's layout; see `podrl.models.peft_files.save_adapters`."""
        peft_files.save_adapters(directory, self.config, self.params, base=base)


@jax.jit(static_argnames=("config", "dtype", "mesh"))
def _logits(params: PyTree, tokens_BT: Array, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Array:
    position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    segment_BT = jnp.ones_like(tokens_BT)
    hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, position_BT, config, dtype=dtype)
    return decoder.unembed(params, hidden_BTD, config)


def from_pretrained(
    directory: str | pathlib.Path,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    lora: LoraConfig | None = None,
    adapters: str | pathlib.Path | None = None,
    seed: int = 0,
) -> Decoder:
    """Loads a Hugging Face directory.

    Args:
      directory: config.json and safetensors weights; or ORG/NAME of the hub.
      mesh: devices that hold the parameters, axes ("data", "fsdp", "tensor"); None is the first device.
      dtype: storage type of the parameters.
      lora: adds fresh adapters, random with `seed`.
      adapters: a PEFT directory to put on top instead.

    Raises:
      ValueError: an unsupported model or damaged files (see `podrl.models.hf_load.load`), or both kinds of adapters.
      StorageError: the bucket it is in does not answer.
    """
    directory = on_this_host(directory)
    storage.check(directory, "directory")
    if lora is not None and lora.rank and adapters is not None:
        raise ValueError(f"Both fresh adapters (rank {lora.rank}) and those of {adapters} were asked for: give one.")
    mesh = hf_load.single_device_mesh() if mesh is None else mesh
    config, params = hf_load.load(directory, mesh, dtype, lora, seed=seed)
    if adapters is not None:
        config, params = peft_files.load_adapters(adapters, config, params, mesh, dtype)
    return Decoder(config, params, mesh, os.fspath(directory))


def on_this_host(model: Any) -> Any:
    """Returns the directory of a model that is named as in the hub, downloaded where it is missing; others as given."""
    return hub.local(model) if isinstance(model, str) else model


def directories_of(**models: Any) -> dict[str, str]:
    """The directories that were given as models, or that a Decoder was read from; '' where there is none."""
    named = {name: isinstance(model, str | os.PathLike) for name, model in models.items()}
    return {n: os.fspath(model) if named[n] else getattr(model, "directory", "") for n, model in models.items()}


def check_positions(config: ModelConfig, prompt: int, longest: int) -> None:
    """Refuses prompts that leave no position for an answer, and warns of samples that may pass the last position.

    Args:
      prompt: most tokens of a prompt.
      longest: most tokens of a prompt and its answer.

    Raises:
      ValueError: the model has no more positions than a prompt has tokens.
    """
    if prompt >= config.max_length:
        raise ValueError(
            f"A prompt may have {prompt} tokens (rollout.max_prompt_length) and the model was made for "
            f"{config.max_length} (max_position_embeddings in config.json): it must be fewer."
        )
    if longest > config.max_length:
        _log.warning(
            "A sample may have %d tokens (rollout.max_prompt_length + rollout.max_tokens_to_generate) and the model "
            "was made for %d (max_position_embeddings in config.json): its text beyond that position is unreliable.",
            longest,
            config.max_length,
        )


def check_vocab(config: ModelConfig, tokenizer_vocab_size: int) -> None:
    """Refuses a tokenizer with ids that have no embedding, or one that covers less than half of them.

    Embedding tables are often padded beyond the tokenizer's ids; that is accepted.

    Args:
      tokenizer_vocab_size: largest token id plus one.

    Raises:
      ValueError: the two disagree.
    """
    if tokenizer_vocab_size > config.vocab_size or 2 * tokenizer_vocab_size <= config.vocab_size:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab_size} ids and the model {config.vocab_size} embeddings: they must "
            "belong together. Use the tokenizer that came with the model (model.path and tokenizer.path)."
        )
