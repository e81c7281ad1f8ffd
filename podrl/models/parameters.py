"""The declaration of every parameter of a model: shape, logical axes and initial values."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from podrl.mesh import rules
from podrl.models import delta, dispatch, moe
from podrl.models.config import EXPERT_PROJECTIONS, INTEGER_PROJECTIONS, ModelConfig, quant_groups
from podrl.types import PyTree


@dataclasses.dataclass(frozen=True)
class Param:
    """Shape, logical axes and initial scale of one parameter.

    Attributes:
      shape, axes: size and logical axis of each dimension.
      std: standard deviation of the normal distribution of the initial values; 0 for zeros, -1 for ones.
      dtype: storage type if it differs from the model's: 'int8', 'int4' or 'float32'; '' for the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float
    dtype: str = ""

    def dtype_in(self, model_dtype: jax.typing.DTypeLike) -> jnp.dtype:
        return jnp.dtype(self.dtype or model_dtype)


EINSUMS = {
    # name: (einsum, shape letters, logical axes)
    "q": ("BTD,DNH->BTNH", "DNH", ("embed", "heads", "head_dim")),
    "k": ("BTD,DKH->BTKH", "DKH", ("embed", "kv_heads", "head_dim")),
    "v": ("BTD,DKH->BTKH", "DKH", ("embed", "kv_heads", "head_dim")),
    "o": ("BTNH,NHD->BTD", "NHD", ("heads", "head_dim", "embed")),
    "gate": ("BTD,DF->BTF", "DF", ("embed", "mlp")),
    "up": ("BTD,DF->BTF", "DF", ("embed", "mlp")),
    "down": ("BTF,FD->BTD", "FD", ("mlp", "embed")),
    # Linear attention: K heads of keys with I channels of the convolution each, N heads of values of width U.
    "delta_in": ("BTD,DKI->BTKI", "DKI", ("embed", "heads", "head_dim")),
    "delta_gate": ("BTD,DNU->BTNU", "DNU", ("embed", "heads", "head_dim")),
    "delta_beta": ("BTD,DN->BTN", "DN", ("embed", "heads")),
    "delta_decay": ("BTD,DN->BTN", "DN", ("embed", "heads")),
    "delta_out": ("BTNU,NUD->BTD", "NUD", ("heads", "head_dim", "embed")),
}


def projection_inputs(name: str) -> int:
    """Returns how many leading dimensions of a projection's weight are contracted with its input."""
    einsum, letters, _ = EINSUMS[name]
    return sum(c in einsum.split(",")[0] for c in letters)


def grouped_dim(name: str) -> int:
    """Returns the dimension of a layer's weight along which groups of inputs share a scale in integer storage."""
    return dispatch.GROUPED_DIM[name] if name in EXPERT_PROJECTIONS else projection_inputs(name) - 1


def param_specs(config: ModelConfig) -> dict:
    """Declares every parameter of the model, adapters included, as a tree of `Param` laid out like the parameters.

    The leaves of all layers are stacked under 'layers'. If layers are of several kinds, 'layers' has a stack for each
    kind under the kind's name.
    """
    unit = 0.0 if config.norm_plus_one else -1.0  # std -1: ones
    specs: dict[str, PyTree] = {
        "embed": Param((config.vocab_size, config.model_dim), ("vocab", "embed"), config.model_dim**-0.5),
        "layers": as_layers([_layer_specs(alike) for alike in config.alike()], config),
        "final_norm": Param((config.model_dim,), ("norm",), unit),
    }
    if config.ple_dim:
        width = config.num_layers * config.ple_dim
        specs["ple_table"] = Param((config.vocab_size, width), ("vocab", "embed"), config.ple_dim**-0.5)
        specs["ple_in"] = Param((config.model_dim, width), ("embed", "norm"), config.model_dim**-0.5)
        specs["ple_norm"] = Param((config.ple_dim,), ("norm",), unit)
    if not config.tie_embeddings:
        specs["unembed"] = Param((config.model_dim, config.vocab_size), ("embed", "vocab"), config.model_dim**-0.5)
    return specs


def stacks_of(layers: Mapping[str, PyTree], config: ModelConfig) -> tuple[PyTree, ...]:
    """Splits the subtree 'layers' of a parameter tree into one stack of leaves for each kind of layer."""
    return tuple(layers[kind.name] for kind in config.kinds) or (layers,)


def as_layers(stacks: Sequence[PyTree], config: ModelConfig) -> dict[str, PyTree]:
    """Joins one stack of leaves for each kind of layer into the subtree 'layers' of a parameter tree."""
    if not config.kinds:
        return stacks[0]
    return {kind.name: stack for kind, stack in zip(config.kinds, stacks, strict=True)}


def _layer_specs(config: ModelConfig) -> dict[str, Param]:
    """Declares the stacked parameters of layers that are alike."""
    size = {
        "D": config.model_dim,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "F": config.ffn_dim,
    }
    if (linear := config.delta) is not None:
        size |= {"K": linear.key_heads, "I": linear.head_channels, "N": linear.value_heads, "U": linear.value_dim}
    layers: dict[str, Param] = {}

    def layer(name: str, shape: tuple[int, ...], axes: tuple[str, ...], std: float, dtype: str = ""):
        layers[name] = Param((config.num_layers, *shape), ("layers", *axes), std, dtype)

    unit = 0.0 if config.norm_plus_one else -1.0
    for name in config.projections:
        _, letters, axes = EINSUMS[name]
        shape = tuple(size[c] for c in letters)
        if name == "q" and config.gated_attention:
            shape = (*shape[:-1], 2 * config.head_dim)
        split = projection_inputs(name)
        fan_in = math.prod(shape[:split])
        integer = config.lora.base_dtype if name in INTEGER_PROJECTIONS else ""
        layer(name, shape, axes, fan_in**-0.5, integer)
        if integer:
            groups = quant_groups(shape[split - 1])
            layer(f"{name}_scale", (*shape[: split - 1], groups, *shape[split:]), axes, -1.0, "float32")
        if config.lora.covers(name):
            layer(f"{name}_lora_a", (*shape[:split], config.lora.rank), (*axes[:split], "rank"), fan_in**-0.5)
            layer(f"{name}_lora_b", (config.lora.rank, *shape[split:]), ("rank", *axes[split:]), 0.0)
    if config.delta is not None:
        for name, (shape, axes, std) in delta.param_shapes(config).items():
            layer(name, shape, axes, std)
    if config.experts is not None:
        for name, (shape, axes, std) in moe.param_shapes(config).items():
            integer = config.lora.base_dtype if name in EXPERT_PROJECTIONS else ""
            wide = name == "selection_bias" or name.endswith("_scale")
            layer(name, shape, axes, std, "float32" if wide else integer)
    if config.qkv_bias:
        for name in ("q", "k", "v"):
            _, letters, axes = EINSUMS[name]
            layer(f"{name}_bias", tuple(size[c] for c in letters[1:]), axes[1:], 0.0)
    if config.o_bias:
        layer("o_bias", (config.model_dim,), ("norm",), 0.0)
    if config.sinks:
        layer("sinks", (config.num_heads,), ("heads",), 0.0)
    norms = ["pre_attn_norm", "pre_mlp_norm"] if config.pre_norms else []
    norms += ["post_attn_norm", "post_mlp_norm"] if config.post_norms else []
    if config.experts is not None and config.experts.beside_dense:
        norms += ["router_norm", "pre_experts_norm", "post_experts_norm", "post_dense_norm"]
    for name in norms:
        layer(name, (config.model_dim,), ("norm",), unit)
    if config.qk_norm and config.delta is None:
        for name, heads in (("q", "N"), ("k", "K"))[: 1 if config.reuses_keys else 2]:
            if config.joint_qk_norm:
                layer(f"{name}_norm", (size[heads], config.head_dim), EINSUMS[name][2][1:], unit)
            else:
                layer(f"{name}_norm", (config.head_dim,), ("norm",), unit)
    if config.ple_dim:
        layer("ple_gate", (config.model_dim, config.ple_dim), ("embed", "mlp"), config.model_dim**-0.5)
        layer("ple_out", (config.ple_dim, config.model_dim), ("mlp", "embed"), config.ple_dim**-0.5)
        layer("post_ple_norm", (config.model_dim,), ("norm",), unit)
    if config.layer_scalar:
        layer("layer_scalar", (1,), ("norm",), -1.0)
    return layers


def is_param(leaf: object) -> bool:
    return isinstance(leaf, Param)


def abstract_params(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> PyTree:
    """Returns shapes, dtypes and shardings of the parameters on `mesh`; makes no array."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype_in(dtype), sharding=rules.sharding_for(p.axes, p.shape, mesh)),
        param_specs(config),
        is_leaf=is_param,
    )


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """Draws random parameters; jit with the out_shardings of `abstract_params` to create them on their devices.

    Args:
      config: the model.
      key: random key.
      dtype: storage type of the parameters.

    Raises:
      ValueError: the model stores projections as integers, which are quantised from a trained model
        (podrl/models/quantize.py).
    """
    if config.lora.base_dtype:
        raise ValueError(f"lora.base_dtype={config.lora.base_dtype!r} needs trained weights: load a model instead.")
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_param)
    keys = jax.random.split(key, len(specs))

    def init(spec: Param, key: PRNGKeyArray) -> Array:
        if spec.std > 0:
            return (jax.random.normal(key, spec.shape, jnp.float32) * spec.std).astype(spec.dtype_in(dtype))
        return jnp.full(spec.shape, 0.0 if spec.std == 0 else 1.0, spec.dtype_in(dtype))

    return jax.tree.unflatten(treedef, [init(s, k) for s, k in zip(specs, keys, strict=True)])


def is_adapter(name: str) -> bool:
    return name.endswith(("_lora_a", "_lora_b"))


def split_trainable(params: PyTree, config: ModelConfig) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trainable, frozen).

    With LoRA the adapters are trainable and all else is frozen. Without LoRA everything is trainable, except a router's
    selection bias and a layer's scalar: these have no gradient, so weight decay alone would pull them to 0. Without
    such leaves the frozen tree is empty.
    """
    trains = is_adapter if config.lora.rank else lambda name: name not in ("selection_bias", "layer_scalar")
    stacks = stacks_of(params["layers"], config)
    trainable = as_layers([{k: v for k, v in stack.items() if trains(k)} for stack in stacks], config)
    frozen = [{k: v for k, v in stack.items() if not trains(k)} for stack in stacks]
    rest = as_layers(frozen, config)
    if config.lora.rank:
        return {"layers": trainable}, {**params, "layers": rest}
    return ({**params, "layers": trainable}, {"layers": rest}) if any(frozen) else (params, {})


def join_trainable(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Joins the two trees of `split_trainable`, without a copy; a leaf in both is taken from the trainable tree."""
    if not frozen:
        return trainable
    nested = [key for key in trainable.keys() & frozen.keys() if isinstance(trainable[key], Mapping)]
    return {**frozen, **trainable, **{key: join_trainable(trainable[key], frozen[key]) for key in nested}}
