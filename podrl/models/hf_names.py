"""Names and layouts of parameters in Hugging Face checkpoints."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.models.config import EXPERT_PROJECTIONS, LINEAR_PROJECTIONS, ModelConfig
from podrl.models.parameters import Param, is_adapter, param_specs, projection_inputs, stacks_of

_PROJECTION_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
} | {name: f"linear_attn.{module}" for name, module in LINEAR_PROJECTIONS.items()}
_NORMS = {
    "pre_attn_norm": "input_layernorm",
    "pre_mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_POST_NORM_FAMILY = _NORMS | {
    "post_attn_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}

# Norms of the two feed-forwards of a layer with experts beside a dense one.
_BESIDE_DENSE = {
    "router_norm": "router.scale",
    "pre_experts_norm": "pre_feedforward_layernorm_2.weight",
    "post_experts_norm": "post_feedforward_layernorm_2.weight",
    "post_dense_norm": "post_feedforward_layernorm_1.weight",
}

# Per-layer embeddings, outside the layers and in each layer: leaf -> (tensor name, number of leading input dimensions).
_PER_LAYER = {
    "ple_table": ("model.embed_tokens_per_layer.weight", 0),
    "ple_in": ("model.per_layer_model_projection.weight", 1),
    "ple_norm": ("model.per_layer_projection_norm.weight", 0),
    "ple_gate": ("model.layers.{}.per_layer_input_gate.weight", 1),
    "ple_out": ("model.layers.{}.per_layer_projection.weight", 1),
    "post_ple_norm": ("model.layers.{}.post_per_layer_input_norm.weight", 0),
}

# Leaves of linear attention that are not projections: leaf -> tensor name after the layer's prefix.
_LINEAR = {
    "delta_conv": "linear_attn.conv1d.weight",
    "delta_rate": "linear_attn.A_log",
    "delta_shift": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
}

# Experts of each family: leaf -> tensor names after the layer's prefix; '{}' stands for the expert. Two names are the
# names of gate and up. gpt-oss and Gemma 4 have one tensor for all experts of a layer; gate and up alternate in the
# tensor of gpt-oss, and lie one above the other in the tensor of Gemma 4.
_QWEN3_MOE = {
    "router": ("mlp.gate.weight",),
    "expert_in": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "expert_out": ("mlp.experts.{}.down_proj.weight",),
}
_EXPERTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_5_moe": _QWEN3_MOE
    | {
        "shared_in": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "shared_out": ("mlp.shared_expert.down_proj.weight",),
        "shared_gate": ("mlp.shared_expert_gate.weight",),
    },
    "gemma4": {
        "router": ("router.proj.weight",),
        "router_gain": ("router.per_expert_scale",),
        "expert_in": ("experts.gate_up_proj",),
        "expert_out": ("experts.down_proj",),
    },
    "gpt_oss": {
        "router": ("mlp.router.weight",),
        "router_bias": ("mlp.router.bias",),
        "expert_in": ("mlp.experts.gate_up_proj",),
        "expert_out": ("mlp.experts.down_proj",),
        "expert_in_bias": ("mlp.experts.gate_up_proj_bias",),
        "expert_out_bias": ("mlp.experts.down_proj_bias",),
    },
    "glm4_moe": _QWEN3_MOE
    | {
        "selection_bias": ("mlp.gate.e_score_correction_bias",),
        "shared_in": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "shared_out": ("mlp.shared_experts.down_proj.weight",),
    },
    "mixtral": {
        "router": ("block_sparse_moe.gate.weight",),
        "expert_in": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        "expert_out": ("block_sparse_moe.experts.{}.w2.weight",),
    },
}
# Stacked dimensions of the leaves of experts, see `Entry.stacked`; all other leaves are stacked by layer alone.
_EXPERT_STACKS = {"expert_in": (0, 1, 2), "expert_out": (0, 1), "shared_in": (0, 1)}

# Adapters of experts in PEFT's files: leaf -> (inputs, permuted), see Entry. Matrix A is stored as (expert x rank, in),
# and B as (out, rank x expert).
_EXPERT_ADAPTERS = {
    "expert_in_lora_a": (1, (0, 2, 1)),
    "expert_in_lora_b": (2, (1, 3, 2, 0)),
    "expert_out_lora_a": (1, (0, 2, 1)),
    "expert_out_lora_b": (2, (2, 1, 0)),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter leaf and its tensors in a checkpoint.

    Attributes:
      leaf: path in the parameter tree, e.g. ('layers', 'q'), or ('layers', 'full', 'q') if layers are of several kinds.
      name: name of the leaf's tensors, in which the first '{}' stands for the layer and the second for the expert. If
        the leaf holds gate and up, this is the name of gate.
      stacked: dimensions of the leaf along which tensors are stacked: () for one tensor, (0,) for one tensor per layer,
        (0, 1) for one per layer and expert.
      param: shape and logical axes of the leaf, stacked dimensions included.
      inputs: number of dimensions, without the stacked ones, that are flattened into the second dimension of a stored
        matrix; 0 for vectors and embeddings, which are stored as they are. A matrix is stored as [outputs, inputs], and
        its input dimensions are the leading dimensions of the leaf, unless `permuted` gives another order.
      up_name: name of the tensors of up, if the leaf holds gate and up: they are at index 1 of the last stacked
        dimension, whose size is 2. '' otherwise.
      layers: for each layer of the stack, its number in the model; () if the stack holds all layers.
      alternating: True if gate and up alternate in the last dimension of the tensor, (E, ..., 2F), while the leaf keeps
        them apart in dimension 1, (E, 2, ..., F).
      permuted: dimensions, without the stacked ones, in the order in which a matrix is stored; () for outputs before
        inputs.
      whole: True if the file has all experts of a layer in one tensor of three dimensions: the first dimension of
        `order`, all dimensions between the first and the last flattened into one, and the last.
      sections: widths of the parts of each head. The leaf holds one head after another; the file has the first parts of
        all heads, then the second parts, and so on. () if the file has one head after another, too.
    """

    leaf: tuple[str, ...]
    name: str
    stacked: tuple[int, ...]
    param: Param
    inputs: int
    up_name: str = ""
    layers: tuple[int, ...] = ()
    alternating: bool = False
    permuted: tuple[int, ...] = ()
    whole: bool = False
    sections: tuple[int, ...] = ()

    def unstacked(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Selects, from one value per dimension of the leaf, the values of the dimensions that are not stacked."""
        return tuple(value for dim, value in enumerate(values) if dim not in self.stacked)

    @property
    def shape(self) -> tuple[int, ...]:
        """The part of the parameter's shape that one tensor holds."""
        return self.unstacked(self.param.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of `shape` in the order in which the tensor is stored."""
        if self.alternating:
            return (0, *range(2, len(self.shape)), 1)
        return self.permuted or (*range(self.inputs, len(self.shape)), *range(self.inputs))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the checkpoint."""
        if self.alternating:
            experts, _, *middle, last = self.shape
            return experts, *middle, 2 * last
        if self.sections and not self.inputs:  # torch stores a convolution as (channels, 1 input per channel, taps)
            heads, width, taps = self.shape
            return heads * width, 1, taps
        if not self.inputs:
            flat = self.leaf[-1].endswith(("_bias", "q_norm", "k_norm")) and not self.leaf[-1].startswith("expert")
            return (math.prod(self.shape),) if flat else self.shape
        shape = [self.shape[dim] for dim in self.order]
        if self.whole:
            return shape[0], math.prod(shape[1:-1]), shape[-1]
        return math.prod(shape[: -self.inputs]), math.prod(shape[-self.inputs :])

    def places(self) -> dict[str, tuple[int, ...]]:
        """Maps each tensor's name to its index in the stacked dimensions."""
        named = (self.name, self.up_name or self.name)
        places = {}
        for index in np.ndindex(*(self.param.shape[dim] for dim in self.stacked)):
            numbers = (self.layers[index[0]], *index[1:]) if self.layers else index
            places[named[index[-1] if self.up_name else 0].format(*numbers)] = index
        return places

    def names(self) -> list[str]:
        """Lists tensor names, in the order of `places`."""
        return list(self.places())

    def part(self, index: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the index of one tensor's part of the leaf: `leaf[entry.part(entry.places()[name])]`."""
        return part_of(self.stacked, index, len(self.param.shape))


def to_leaf(raw: Any, shape: Sequence[int], order: Sequence[int], sections: Sequence[int]) -> Any:
    """Converts a stored tensor to its part of the leaf, of shape `shape`; see `Entry.order` and `Entry.sections`."""
    if sections:
        raw = raw[_rows_by_head(len(raw), sections)]
    return raw.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))


def to_stored(part: Any, order: Sequence[int], sections: Sequence[int], stored_shape: Sequence[int]) -> Any:
    """Converts a part of a leaf to its stored tensor: the inverse of `to_leaf`."""
    stored = part.transpose(order).reshape(stored_shape)
    return stored[np.argsort(_rows_by_head(len(stored), sections))] if sections else stored


def _rows_by_head(rows: int, sections: Sequence[int]) -> np.ndarray:
    """Returns, for each row of a tensor with one head after another, the row in the stored tensor."""
    heads = rows // sum(sections)
    starts = [heads * sum(sections[:s]) for s in range(len(sections))]
    by_head = [
        start + head * width + np.arange(width)
        for head in range(heads)
        for start, width in zip(starts, sections, strict=True)
    ]
    return np.concatenate(by_head)


def part_of(stacked: Sequence[int], index: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    """Returns an array index that takes `index` in the stacked dimensions, and everything in the other dimensions.

    Args:
      stacked: numbers of the stacked dimensions.
      index: index in each of these dimensions.
      ndim: number of dimensions of the array.
    """
    where = dict(zip(stacked, index, strict=True))
    return tuple(where.get(dim, slice(None)) for dim in range(ndim))


def module_of(projection: str) -> str:
    """Returns the name of a projection's module inside a layer, e.g. 'self_attn.q_proj' for 'q'."""
    return _PROJECTION_MODULES[projection]


def expert_module(config: ModelConfig) -> str:
    """Returns the name of the module of all experts inside a layer, in models whose `transformers` class has one."""
    return "experts" if config.family == "gemma4" else "mlp.experts"


def entries(config: ModelConfig, *, adapters: bool = False) -> list[Entry]:
    """Lists every leaf of the base model in the order of the forward pass, or every adapter leaf with PEFT's names."""
    specs = param_specs(config)
    found = []
    for k, (stack, alike) in enumerate(zip(stacks_of(specs["layers"], config), config.alike(), strict=True)):
        for key, param in stack.items():
            if is_adapter(key) == adapters:
                entry = _expert_entry(key, param, config) or _layer_entry(key, param, alike)
                if config.kinds:
                    leaf = ("layers", config.kinds[k].name, key)
                    entry = dataclasses.replace(entry, leaf=leaf, layers=config.layers_of(k))
                found.append(entry)
    if adapters:
        return found
    head = [Entry(("embed",), "model.embed_tokens.weight", (), specs["embed"], 0)]
    for key, (name, inputs) in _PER_LAYER.items():
        head += [Entry((key,), name, (), specs[key], inputs)] if key in specs else []
    tail = [Entry(("final_norm",), "model.norm.weight", (), specs["final_norm"], 0)]
    if "unembed" in specs:
        tail.append(Entry(("unembed",), "lm_head.weight", (), specs["unembed"], 1))
    return head + found + tail


def _expert_entry(key: str, param: Param, config: ModelConfig) -> Entry | None:
    """Returns the entry of a leaf that belongs to a router or to experts; None for other leaves."""
    name, adapter, side = key.partition("_lora_")
    if adapter and name in EXPERT_PROJECTIONS:
        # PEFT wraps the module of all experts once for each parameter. The first parameter's wrapper is the inner one.
        both = all(map(config.lora.covers, EXPERT_PROJECTIONS))
        module = expert_module(config) + (".base_layer" if both and name == "expert_in" else "")
        inputs, permuted = _EXPERT_ADAPTERS[key]
        if key == "expert_in_lora_b" and config.family == "gpt_oss":
            permuted = (3, 1, 2, 0)  # gate and up alternate
        name = f"base_model.model.model.layers.{{}}.{module}.lora_{side.upper()}.weight"
        return Entry(("layers", key), name, (0,), param, inputs, permuted=permuted)
    names = _EXPERTS.get(config.family, {}).get(key)
    if names is None:
        return None
    if config.family == "gpt_oss":
        alternating = key in ("expert_in", "expert_in_bias")
        return Entry(
            ("layers", key), f"model.layers.{{}}.{names[0]}", (0,), param, int(key == "router"), alternating=alternating
        )
    if config.family == "gemma4" and key in EXPERT_PROJECTIONS:
        order = (0, 1, 3, 2) if key == "expert_in" else (0, 2, 1)
        name = f"model.layers.{{}}.{names[0]}"
        return Entry(("layers", key), name, (0,), param, 1, permuted=order, whole=True)
    inputs = 0 if key in ("selection_bias", "router_gain") else 1
    first, *second = (f"model.layers.{{}}.{name}" for name in names)
    return Entry(("layers", key), first, _EXPERT_STACKS.get(key, (0,)), param, inputs, second[0] if second else "")


def _layer_entry(key: str, param: Param, config: ModelConfig) -> Entry:
    name, inputs = _layer_name(key, config)
    by_head = config.delta is not None and key in ("delta_in", "delta_in_lora_b", "delta_conv")
    sections = config.delta.sections if config.delta is not None and by_head else ()
    return Entry(("layers", key), name, (0,), param, inputs, sections=sections)


def _layer_name(key: str, config: ModelConfig) -> tuple[str, int]:
    """Returns (tensor name with '{}' for the layer, number of leading input dimensions) of a leaf under 'layers'."""
    prefix = "model.layers.{}."
    norms = _POST_NORM_FAMILY if config.post_norms else _NORMS
    if key in norms:
        return f"{prefix}{norms[key]}.weight", 0
    if key in _BESIDE_DENSE:
        return f"{prefix}{_BESIDE_DENSE[key]}", 0
    if key in _LINEAR:
        return f"{prefix}{_LINEAR[key]}", 0
    if key in _PER_LAYER:
        return _PER_LAYER[key]
    if key == "layer_scalar":
        return f"{prefix}layer_scalar", 0
    if key == "sinks":
        return f"{prefix}self_attn.sinks", 0
    if key.endswith("_bias"):
        return f"{prefix}{module_of(key.removesuffix('_bias'))}.bias", 0
    projection, _, side = key.partition("_lora_")
    module = module_of(projection)
    if side == "a":
        return f"base_model.model.{prefix}{module}.lora_A.weight", projection_inputs(projection)
    if side == "b":
        return f"base_model.model.{prefix}{module}.lora_B.weight", 1
    return f"{prefix}{module}.weight", projection_inputs(projection)
