"""Low-rank adapters: creates them beside the base weights, and merges them into the base weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from podrl import offload
from podrl.mesh import rules
from podrl.models.config import (
    ATTENTION_PROJECTIONS,
    EXPERT_PROJECTIONS,
    LINEAR_PROJECTIONS,
    MODULE_PROJECTIONS,
    PROJECTIONS,
    LoraConfig,
    ModelConfig,
)
from podrl.models.parameters import (
    Param,
    as_layers,
    is_adapter,
    join_trainable,
    param_specs,
    stacks_of,
)
from podrl.models.quantize import dequantized, sharding_of
from podrl.types import PyTree


def with_adapters(
    config: ModelConfig, params: PyTree, lora: LoraConfig, mesh: Mesh, dtype: jax.typing.DTypeLike, *, seed: int = 0
) -> tuple[ModelConfig, PyTree]:
    """Adds fresh adapters to the weights: A is normal with variance 1 / fan-in, B is zero.

    The model's outputs are therefore the same as before.

    Args:
      config, params: configuration and parameters of a model without adapters; the arrays are shared, not copied. With
        `lora.base_dtype` the projections must already be integers and scales.
      lora: settings of the adapters to add.
      mesh, dtype: mesh and storage type of the adapters.
      seed: seed of the random A matrices.

    Raises:
      ValueError: the model has adapters already, or the pattern matches no projection of this model.
    """
    stacks = [dict(stack) for stack in stacks_of(params["layers"], config)]
    if any(is_adapter(name) for stack in stacks for name in stack):
        raise ValueError("This model has adapters already: merge them first (podrl.models.lora.merge).")
    config = dataclasses.replace(config, lora=lora)
    specs: list[tuple[dict, str, Param]] = [
        (stack, name, declared[name])
        for stack, declared in zip(stacks, stacks_of(param_specs(config)["layers"], config), strict=True)
        for name in sorted(declared)
        if is_adapter(name)
    ]
    if not specs:
        raise matches_nothing(config)
    keys = jax.random.split(jax.random.key(seed), len(specs))
    for (stack, name, spec), key in zip(specs, keys, strict=True):
        stack[name] = _fresh(spec, key, mesh, dtype)
    return config, {**params, "layers": as_layers(stacks, config)}


def check_lora(config: ModelConfig) -> None:
    """Refuses adapters (`config.lora`) that match no projection of the model, or with a rank above the model's width.

    Raises:
      ValueError: the adapters are refused; the message names the key.
    """
    if not config.lora.rank:
        return
    stacks = stacks_of(param_specs(config)["layers"], config)
    if not any(is_adapter(name) for stack in stacks for name in stack):
        raise matches_nothing(config)
    if config.lora.rank > config.model_dim:
        raise ValueError(
            f"model.lora.rank={config.lora.rank} exceeds the model's width of {config.model_dim}: adapters of this "
            "rank would hold more numbers than the projections themselves. Lower it, or train all weights "
            "(model.lora.rank=0)."
        )


def matches_nothing(config: ModelConfig) -> ValueError:
    """Builds the error for a pattern that matches no projection of this model."""
    names = PROJECTIONS if config.experts is None else (*ATTENTION_PROJECTIONS, *EXPERT_PROJECTIONS)
    wanted = (*names, *LINEAR_PROJECTIONS.values()) if config.recurrent else names
    return ValueError(
        f"model.lora.pattern={config.lora.pattern!r} matches no projection of a {config.family} model: make it match "
        f"one of {', '.join(wanted)}."
    )


def _fresh(spec: Param, key: Array, mesh: Mesh, dtype: DTypeLike) -> Array:
    # jit takes a numpy array as a value that all processes of the mesh share, so the key is passed as a numpy array.
    make = _maker(spec.shape, spec.std, np.dtype(dtype), rules.sharding_for(spec.axes, spec.shape, mesh))
    return make(np.asarray(jax.random.key_data(key)))


@functools.lru_cache(maxsize=64)
def _maker(shape: tuple[int, ...], std: float, dtype: np.dtype, sharding: NamedSharding):
    def make(key_data: Array) -> Array:
        if std == 0:
            return jnp.zeros(shape, dtype)
        key = jax.random.wrap_key_data(key_data)
        return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def merge(params: PyTree, config: ModelConfig) -> tuple[ModelConfig, PyTree]:
    """Merges the adapters into the weights: W + (alpha / rank) A B, computed in float32.

    A merged weight keeps W's dtype and sharding. Integer weights become dense, in the dtype of the embeddings.

    Args:
      params: parameter tree with adapters.
      config: configuration of the model, whose `lora` gives alpha and rank.

    Returns:
      The configuration and parameters of the dense model; dense leaves without an adapter are shared with `params`.
    """
    layers = as_layers([_merged_stack(stack, params, config) for stack in stacks_of(params["layers"], config)], config)
    return dataclasses.replace(config, lora=LoraConfig()), {**params, "layers": layers}


def _merged_stack(stack: Mapping[str, Array], params: PyTree, config: ModelConfig) -> dict[str, Array]:
    """Merges the adapters of layers that are alike into their weights."""
    layers = {k: v for k, v in stack.items() if not is_adapter(k) and not k.endswith("_scale")}
    for name in (*MODULE_PROJECTIONS, *EXPERT_PROJECTIONS):
        if f"{name}_scale" in stack:
            layers[name] = dequantized(name, stack, params["embed"].dtype)
        if f"{name}_lora_a" in stack:
            a, b = stack[f"{name}_lora_a"], stack[f"{name}_lora_b"]
            layers[name] = _merged(name, layers[name], a, b, config.lora.scale)
    return layers


def merging(config: ModelConfig, merged: PyTree) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns `merge` as one jitted function: (adapters, base parameters) -> parameters of the dense model.

    Args:
      config: the model with adapters.
      merged: tree of abstract arrays with the dtypes and shardings of the dense model's parameters.
    """

    def fold(adapters: PyTree, base: PyTree) -> PyTree:
        _, params = merge(join_trainable(adapters, offload.fetched(base)), config)
        return jax.tree.map(lambda x, to: x.astype(to.dtype), params, merged)

    return jax.jit(fold, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, merged))


def _merged(name: str, weight: Array, a: Array, b: Array, scale: float) -> Array:
    def fold(weight: Array, a: Array, b: Array) -> Array:
        a, b, einsum = a.astype(jnp.float32), b.astype(jnp.float32), _EXPERT_PRODUCTS.get(name, "LIR,LRO->LIO")
        if name not in EXPERT_PROJECTIONS:
            a, b = a.reshape(a.shape[0], -1, a.shape[-1]), b.reshape(*b.shape[:2], -1)
        delta = jnp.einsum(einsum, a, b, precision=jax.lax.Precision.HIGHEST)
        return (weight.astype(jnp.float32) + scale * delta.reshape(weight.shape)).astype(weight.dtype)

    return jax.jit(fold, out_shardings=sharding_of(weight))(weight, a, b)


_EXPERT_PRODUCTS = {"expert_in": "LEDR,LEGRF->LEGDF", "expert_out": "LEFR,LERD->LEFD"}
