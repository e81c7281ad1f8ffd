"""Decoder: a model with its weights, which `from_pretrained` returns and the Python API takes."""

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
from podrl.python_names import speaks_python
from podrl.storage import hub, storage
from podrl.types import PyTree

_log = logging.getLogger("podrl.models")


class Decoder(nnx.Module):
    """A decoder with its weights, callable on tokens.

    Attributes:
      config: architecture of the model, adapters included.
      weights: parameter tree of podrl/models/parameters.py, in which every leaf is an nnx.Param.
      mesh: devices that hold the parameters.
      directory: directory that the parameters were loaded from; '' if they were not loaded from a directory.
    """

    def __init__(self, config: ModelConfig, params: PyTree, mesh: Mesh, directory: str = ""):
        """Wraps a parameter tree without copying it."""
        self.config = config
        self.directory = directory
        self.mesh = mesh
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> PyTree:
        """The parameter tree without nnx.Param; shares the arrays."""
        return jax.tree.map(lambda p: p[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Param))

    def __call__(
        self, tokens_BT: Int[Array, "B T"], *, dtype: jax.typing.DTypeLike = jnp.float32
    ) -> Float[Array, "B T V"]:
        """Computes the logits after every token, float32: logits_BTV[b, t] scores token t + 1.

        Each row is one sequence from position 0. Padding on the right does not change the logits before it.

        Args:
          tokens_BT: token ids, in [0, V).
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
        """Returns the equivalent dense model, with adapters merged into the weights; self if there are no adapters."""
        if not self.config.lora.rank:
            return self
        config, params = lora.merge(self.params, self.config)
        return Decoder(config, params, self.mesh)

    def save(self, directory: str | pathlib.Path, *, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        """Writes a Hugging Face directory with the adapters merged; see `podrl.models.hf_save.save`."""
        dense = self.merged()
        hf_save.save(directory, dense.config, dense.params, dtype=dtype)

    def save_adapters(self, directory: str | pathlib.Path, *, base: str) -> None:
        """Writes only the adapters, in PEFT's layout; see `podrl.models.peft_files.save_adapters`."""
        peft_files.save_adapters(directory, self.config, self.params, base=base)


@jax.jit(static_argnames=("config", "dtype", "mesh"))
def _logits(params: PyTree, tokens_BT: Array, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Array:
    position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    segment_BT = jnp.ones_like(tokens_BT)
    hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, position_BT, config, dtype=dtype)
    return decoder.unembed(params, hidden_BTD, config)


@speaks_python
def from_pretrained(
    directory: str | pathlib.Path,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    lora: LoraConfig | None = None,
    adapters: str | pathlib.Path | None = None,
    seed: int = 0,
) -> Decoder:
    """Loads a model from a Hugging Face directory or from the hub, or a model that comes with podrl.

    Args:
      directory: directory with config.json and safetensors weights, a model's name ORG/NAME in the hub, or 'tiny',
        'tiny_moe', 'tiny_hybrid', 'tiny_tools' or 'tiny_search' for a model that comes with podrl.
      mesh: devices that hold the parameters, as `podrl.make_mesh` builds it; None for the first device.
      dtype: storage type of the parameters.
      lora: settings of fresh adapters to add; None for no fresh adapters.
      adapters: PEFT directory of adapters to load; None for none. At most one of `lora` and `adapters` may be set.
      seed: seed of the fresh adapters' random values.

    Raises:
      ValueError: the model is not supported or files are damaged (see `podrl.models.hf_load.load`), or both `lora` and
        `adapters` are set.
      StorageError: the bucket of the directory does not answer.
    """
    directory = on_this_host(directory)
    storage.check(directory, "directory")
    if lora is not None and lora.rank and adapters is not None:
        raise ValueError(f"lora (rank {lora.rank}) and adapters={adapters} are both set: set only one.")
    mesh = hf_load.single_device_mesh() if mesh is None else mesh
    config, params = hf_load.load(directory, mesh, dtype, lora, seed=seed)
    if adapters is not None:
        config, params = peft_files.load_adapters(adapters, config, params, mesh, dtype)
    return Decoder(config, params, mesh, os.fspath(directory))


def on_this_host(model: Any) -> Any:
    """Returns the model's local directory (`podrl.storage.hub.local`) if `model` is a string, else `model` itself."""
    return hub.local(model) if isinstance(model, str) else model


def directories_of(**models: Any) -> dict[str, str]:
    """Returns each model's directory by name: a path itself, or the directory of a Decoder; '' for any other model."""
    named = {name: isinstance(model, str | os.PathLike) for name, model in models.items()}
    return {n: os.fspath(model) if named[n] else getattr(model, "directory", "") for n, model in models.items()}


# End of the error about prompts with too many tokens: the keys to change.
_LOWER = (
    "lower rollout.max_prompt_length (0 takes the data's longest prompt), so that prompt and answer "
    "(rollout.max_tokens_to_generate) together exceed neither this number nor rollout.kv_cache_size. data.long_prompts "
    "says what becomes of longer prompts."
)


def check_positions(config: ModelConfig, prompt: int, longest: int, *, lower: str = _LOWER) -> None:
    """Refuses prompts that leave no position for an answer, and warns of samples longer than the model's positions.

    Args:
      config: the model.
      prompt: greatest length of a prompt, tokens.
      longest: greatest length of a prompt with its answer, tokens.
      lower: end of the error's sentence, which says what to change.

    Raises:
      ValueError: a prompt of the greatest length uses all positions of the model.
    """
    if prompt >= config.max_length:
        raise ValueError(
            f"A prompt may have {prompt} tokens and the model was made for {config.max_length} "
            f"(max_position_embeddings in config.json): {lower}"
        )
    if longest > config.max_length:
        _log.warning(
            "A sample may have %d tokens, prompt included, and the model was made for %d (max_position_embeddings in "
            "config.json): its text beyond that position is unreliable. In a job, lower rollout.max_prompt_length, "
            "rollout.max_tokens_to_generate or rollout.max_response_tokens.",
            longest,
            config.max_length,
        )


def check_vocab(config: ModelConfig, tokenizer_vocab_size: int) -> None:
    """Refuses a tokenizer that has ids without an embedding, or that has ids for at most half of the embeddings.

    A smaller surplus of embeddings is accepted, because embedding tables are often padded.

    Args:
      config: the model.
      tokenizer_vocab_size: largest token id of the tokenizer plus one.

    Raises:
      ValueError: the tokenizer is refused.
    """
    if tokenizer_vocab_size > config.vocab_size or 2 * tokenizer_vocab_size <= config.vocab_size:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab_size} ids and the model {config.vocab_size} embeddings: they must "
            "belong together. Use the tokenizer that came with the model."
        )
