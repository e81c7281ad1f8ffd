"""A decoder that outputs one number per token: the critic's value or the reward model's score."""

import dataclasses
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from podrl import offload
from podrl.mesh import rules
from podrl.models import lora, parameters
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.hf_config import read_config
from podrl.models.hf_load import load_entries
from podrl.models.hf_names import Entry, entries
from podrl.models.parameters import Param
from podrl.models.tensor_files import scan_directory
from podrl.storage.storage import locate
from podrl.transfer.publish import Publisher
from podrl.types import PyTree

HEAD = "score"  # name of the head's leaf, as in Hugging Face's sequence classification


def param_specs(config: ModelConfig) -> dict:
    """Declares the decoder's parameters without its output matrix, and the head (D, 1)."""
    specs = {name: spec for name, spec in parameters.param_specs(config).items() if name != "unembed"}
    return specs | {HEAD: Param((config.model_dim, 1), ("norm", "norm"), 0.0)}


def abstract_params(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> PyTree:
    """Returns shapes, dtypes and shardings of the parameters on `mesh`."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype_in(dtype), sharding=rules.sharding_for(p.axes, p.shape, mesh)),
        param_specs(config),
        is_leaf=parameters.is_param,
    )


def split_trainable(params: PyTree, config: ModelConfig) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trainable, frozen). The head trains; `parameters.split_trainable` splits the trunk."""
    trunk = {name: leaf for name, leaf in params.items() if name != HEAD}
    trainable, frozen = parameters.split_trainable(trunk, config)
    return {**trainable, HEAD: params[HEAD]}, frozen


def join_trainable(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Joins the two trees of `split_trainable`, without a copy."""
    trunk = {name: leaf for name, leaf in trainable.items() if name != HEAD}
    return {**parameters.join_trainable(trunk, frozen), HEAD: trainable[HEAD]}


def on_trunk(params: PyTree, config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> PyTree:
    """Copies a decoder's parameters and adds a head of zeros, so that every output starts at 0.

    Args:
      params: whole parameter tree of the decoder, on any mesh. Frozen leaves that have the right sharding already are
        shared, not copied.
      config: configuration of the decoder.
      mesh: devices that hold the copy.
      dtype: storage type of the copy's trainable parameters.
    """
    abstract = abstract_params(config, mesh, dtype)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    head = _zeros(abstract[HEAD])
    trunk = {name: leaf for name, leaf in params.items() if name in shardings}
    wanted = {name: leaf for name, leaf in shardings.items() if name in trunk}
    elsewhere = any(leaf.sharding.mesh != mesh for leaf in jax.tree.leaves(trunk))
    trunk = offload.on_devices(trunk) if elsewhere else trunk
    if mesh.is_multi_process and elsewhere:
        trunk = Publisher(trunk, wanted).publish(trunk, 0).params
    else:
        # Leaves that wait in the host's memory (trainer.offload='base') stay there.
        kinds = jax.tree.map(lambda x, to: to.with_memory_kind(x.sharding.memory_kind), trunk, wanted)
        trunk = jax.device_put(trunk, kinds)
    trainable, frozen = split_trainable({**trunk, HEAD: head}, config)
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.copy(x).astype(dtype), tree))
    return join_trainable(copy(trainable), frozen)


def stored_entries(config: ModelConfig) -> list[Entry]:
    """Lists the leaves of a sequence classification checkpoint with one label; the head comes last."""
    trunk = [entry for entry in entries(config) if entry.leaf != ("unembed",)]
    return [*trunk, Entry((HEAD,), "score.weight", (), param_specs(config)[HEAD], 1)]


def check_head(directory: str | os.PathLike) -> None:
    """Raises ValueError if the weights of a directory have no head, because they are then no reward model."""
    if not any(name.endswith("score.weight") for name in scan_directory(locate(directory))):
        raise ValueError(
            f"{directory} has no tensor score.weight: a reward model is a sequence classification model with one label "
            "(num_labels=1); a causal language model has no score."
        )


def load(
    directory: str | os.PathLike,
    mesh: Mesh,
    dtype: DTypeLike = "float32",
    *,
    lora_config: LoraConfig | None = None,
    needs_head: bool = True,
    seed: int = 0,
) -> tuple[ModelConfig, PyTree]:
    """Loads a Hugging Face directory of a sequence classification model with one label.

    Args:
      directory: directory, local or gs://, with config.json and safetensors weights; the head is `score.weight` (1, D).
      mesh: devices that hold the parameters.
      dtype: storage type of the parameters.
      lora_config: settings of fresh adapters to add; None for no adapters.
      needs_head: True to refuse a checkpoint without a head; False to give a causal language model a head of zeros.
      seed: seed of the adapters' random values.

    Raises:
      ValueError: the model is not supported, files are damaged, or there is no head although one is needed.
    """
    config = read_config(directory)
    stored = dict(scan_directory(locate(directory)))
    has_head = any(name.endswith("score.weight") for name in stored)
    if needs_head:
        check_head(directory)
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith("lm_head.weight")}
    wanted = stored_entries(config)[: None if has_head else -1]
    adapted = dataclasses.replace(config, lora=lora_config or LoraConfig())
    params = load_entries(wanted, stored, adapted, mesh, dtype, where=str(directory))
    if not has_head:
        params[HEAD] = _zeros(abstract_params(config, mesh, jnp.dtype(dtype))[HEAD])
    if adapted.lora.rank:
        score = params.pop(HEAD)
        adapted, params = lora.with_adapters(config, params, adapted.lora, mesh, dtype, seed=seed)
        params = {**params, HEAD: score}
    return adapted, params


def scores(params: PyTree, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Computes the output after every token from hidden states, float32."""
    head_D = params[HEAD][:, 0].astype(jnp.float32)
    return jnp.einsum("BTD,D->BT", hidden_BTD.astype(jnp.float32), head_D)


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
