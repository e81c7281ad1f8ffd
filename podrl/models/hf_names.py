"""Names and layouts of parameters in Hugging Face checkpoints."""

import dataclasses
import math

from podrl.models.config import ModelConfig
from podrl.models.decoder import Param, is_adapter, param_specs, projection_inputs

_PROJECTION_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
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


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter leaf and its tensors in a checkpoint.

    Attributes:
      leaf: path in the parameter tree, e.g. ('layers', 'q').
      name: tensor name; '{}' stands for the layer.
      stacked: the leaf is stacked over layers, one tensor each.
      param: the leaf's shape and logical axes, the layer axis included.
      inputs: leading dimensions (layers excluded) that a matrix contracts with its input; 0 for vectors and embeddings,
        which are stored as they are. A matrix is stored as [outputs, inputs].
    """

    leaf: tuple[str, ...]
    name: str
    stacked: bool
    param: Param
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape in one layer."""
        return self.param.shape[1:] if self.stacked else self.param.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the checkpoint."""
        if not self.inputs:
            return (math.prod(self.shape),) if self.leaf[-1].endswith("_bias") else self.shape
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])

    def names(self) -> list[str]:
        """Lists tensor names, one per layer for stacked leaves."""
        return [self.name.format(i) for i in range(self.param.shape[0])] if self.stacked else [self.name]


def module_of(projection: str) -> str:
    """Returns the name of a projection's module inside a layer, e.g. 'self_attn.q_proj' for 'q'."""
    return _PROJECTION_MODULES[projection]


def entries(config: ModelConfig, *, adapters: bool = False) -> list[Entry]:
    """Lists every leaf of the base model (or every adapter leaf, in PEFT's names) in the order of the forward pass."""
    specs = param_specs(config)
    found = []
    for key, param in specs["layers"].items():
        if is_adapter(key) == adapters:
            name, inputs = _layer_name(key, config)
            found.append(Entry(("layers", key), name, True, param, inputs))
    if adapters:
        return found
    head = [Entry(("embed",), "model.embed_tokens.weight", False, specs["embed"], 0)]
    tail = [Entry(("final_norm",), "model.norm.weight", False, specs["final_norm"], 0)]
    if "unembed" in specs:
        tail.append(Entry(("unembed",), "lm_head.weight", False, specs["unembed"], 1))
    return head + found + tail


def _layer_name(key: str, config: ModelConfig) -> tuple[str, int]:
    """Returns (tensor name with '{}' for the layer, number of leading input dimensions) of a leaf of the layers."""
    prefix = "model.layers.{}."
    norms = _POST_NORM_FAMILY if config.post_norms else _NORMS
    if key in norms:
        return f"{prefix}{norms[key]}.weight", 0
    if key.endswith("_bias"):
        return f"{prefix}{module_of(key.removesuffix('_bias'))}.bias", 0
    projection, _, side = key.partition("_lora_")
    module = module_of(projection)
    if side == "a":
        return f"base_model.model.{prefix}{module}.lora_A.weight", projection_inputs(projection)
    if side == "b":
        return f"base_model.model.{prefix}{module}.lora_B.weight", 1
    return f"{prefix}{module}.weight", projection_inputs(projection)
