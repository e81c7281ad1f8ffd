"""Integer storage of frozen projection weights (QLoRA): int8 or int4 values with a scale per group of inputs."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, Sharding
from jaxtyping import Array

from podrl.mesh import rules
from podrl.models.config import ModelConfig
from podrl.models.decoder import dense_weight
from podrl.models.parameters import grouped_dim, param_specs

_LARGEST = {"int8": 127, "int4": 7}


def quantize(weight: Array, *, axis: int, groups: int, dtype: str) -> tuple[Array, Array]:
    """Rounds each weight to the nearest integer multiple of its group's scale.

    The scale is the largest magnitude in the group, divided by 127 (int8) or 7 (int4).

    Args:
      weight: array of any shape and floating dtype.
      axis: dimension that is cut into groups; each index of the other dimensions has its own scales.
      groups: number of groups; must divide the size of the dimension.
      dtype: integer type: 'int8' or 'int4'.

    Returns:
      Integers of the weight's shape, and float32 scales with `groups` entries along `axis`.
    """
    shape = weight.shape
    assert shape[axis] % groups == 0, (shape, axis, groups)
    split = weight.astype(jnp.float32).reshape(*shape[:axis], groups, -1, *shape[axis + 1 :])
    scale = jnp.max(jnp.abs(split), axis=axis + 1, keepdims=True) / _LARGEST[dtype]
    values = jnp.round(split / jnp.where(scale == 0, 1.0, scale)).reshape(shape)
    return values.astype(jnp.dtype(dtype)), jnp.squeeze(scale, axis + 1)


def quantized_leaves(path: Sequence[str], weight: Array, config: ModelConfig, mesh: Mesh) -> Mapping[str, Array]:
    """Quantizes a projection, stacked over layers, into its two leaves in a model with `config.lora.base_dtype`.

    The function deletes `weight` to free its memory.

    Args:
      path: path of the projection in the parameter tree.
      weight: dense weight of the projection.
      config: the model with integer projections.
      mesh: devices that hold the leaves.
    """
    *above, name = path
    specs = functools.reduce(lambda node, key: node[key], above, param_specs(config))
    axis = grouped_dim(name) + 1  # dimension 0 is the layers
    groups = specs[f"{name}_scale"].shape[axis]
    names = (name, f"{name}_scale")
    shardings = tuple(rules.sharding_for(specs[n].axes, specs[n].shape, mesh) for n in names)

    def convert(weight: Array) -> tuple[Array, Array]:
        return quantize(weight, axis=axis, groups=groups, dtype=config.lora.base_dtype)

    leaves = jax.jit(convert, out_shardings=shardings)(weight)
    weight.delete()
    return dict(zip(names, leaves, strict=True))


def dequantized(name: str, layers: Mapping[str, Array], dtype: jax.typing.DTypeLike) -> Array:
    """Returns the dense weight of projection `name`, stacked over layers, with the sharding of its integers."""

    def convert(parts: Mapping[str, Array]) -> Array:
        return jax.vmap(lambda layer: dense_weight(name, layer, dtype))(parts)

    parts = {n: layers[n] for n in (name, f"{name}_scale")}
    return jax.jit(convert, out_shardings=sharding_of(layers[name]))(parts)


def sharding_of(x: object) -> Sharding | None:
    """Returns the sharding of an array; None for a host array or a tracer."""
    return x.sharding if isinstance(x, jax.Array) and not isinstance(x, Tracer) else None
