"""Configurations of published models by name, for planning without weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from podrl.config import nearest
from podrl.models.config import ModelConfig
from podrl.models.hf_config import config_from_hf
from podrl.models.parameters import is_param, param_specs, stacks_of
from podrl.types import PyTree

ModelFields = dict[str, Any]  # fields of a Hugging Face config.json


def _gemma2(dim: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int) -> ModelFields:
    return {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "query_pre_attn_scalar": scalar,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma3(
    dim: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 256,
    scalar: int = 256,
    small: bool = False,
) -> ModelFields:
    """Fields of a Gemma 3's text decoder; `small` is the 1B model, which has no vision tower and shorter contexts."""
    more = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    return {
        "model_type": "gemma3_text",
        "vocab_size": 262_144 if small else 262_208,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768 if small else 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": scalar,
        "sliding_window": 512 if small else 1024,
        "sliding_window_pattern": 6,
        **({} if small else more),
    }


def _gemma4_small(
    dim: int, ffn: int, layers: int, kv_heads: int, *, every: int, shared: int, wide: bool
) -> ModelFields:
    """Fields of a small Gemma 4: one in `every` layers has no window; the last `shared` layers reuse earlier keys."""
    return {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "layer_types": (["sliding_attention"] * (every - 1) + ["full_attention"]) * (layers // every),
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
    }


def _gemma4(
    dim: int, ffn: int, layers: int, heads: int, kv_heads: int, full_kv_heads: int, **experts: Any
) -> ModelFields:
    """Fields of a Gemma 4's text decoder; `full_kv_heads` counts the key heads of layers without a window."""
    return {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "attention_k_eq_v": True,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        **experts,
    }


def _qwen3(dim: int, ffn: int, layers: int, heads: int, *, tied: bool) -> ModelFields:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(dim: int, expert: int, layers: int, heads: int) -> ModelFields:
    """Fields of a Qwen 3 with 128 experts, with 8 for each token; `expert` is an expert's inner dimension."""
    dense = _qwen3(dim, 3 * dim, layers, heads, tied=False)
    return dense | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert,
        "norm_topk_prob": True,
    }


def _qwen35(dim: int, layers: int, heads: int, kv_heads: int, **more: Any) -> ModelFields:
    """Fields that the Qwen 3.5 models with and without experts share, and the fields `more` of one model."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        **more,
    }


def _qwen35_moe(dim: int, expert: int, layers: int, heads: int, kv_heads: int) -> ModelFields:
    """Fields of a Qwen 3.5 with 256 experts, with 8 for each token, and a shared expert, all of the same width."""
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    experts |= {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": expert}
    return _qwen35(dim, layers, heads, kv_heads, **experts)


def _qwen35_dense(
    dim: int, ffn: int, layers: int, heads: int, kv_heads: int, value_heads: int, *, tied: bool
) -> ModelFields:
    """Fields of a Qwen 3.5 without experts; `value_heads` counts the heads of its linear attention."""
    fields = {"intermediate_size": ffn, "linear_num_value_heads": value_heads, "tie_word_embeddings": tied}
    return _qwen35(dim, layers, heads, kv_heads, **fields)


def _olmo3(dim: int, ffn: int, layers: int, heads: int, kv_heads: int) -> ModelFields:
    return {
        "model_type": "olmo3",
        "vocab_size": 100_278,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    }


def _gpt_oss(experts: int, layers: int) -> ModelFields:
    return {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_local_experts": experts,
    }


def _glm45_air() -> ModelFields:
    return {
        "model_type": "glm4_moe",
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": True,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    }


def _llama32(dim: int, layers: int, heads: int, head_dim: int) -> ModelFields:
    base = _llama31(dim, 8192, layers, heads)
    return base | {
        "head_dim": head_dim,
        "rope_scaling": base["rope_scaling"] | {"factor": 32.0},
        "tie_word_embeddings": True,
    }


def _llama31(dim: int, ffn: int, layers: int, heads: int) -> ModelFields:
    return {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }


# Fields of the config.json published with each model. The Llama 3 rows are releases 3.1 and 3.2 (1B and 3B).
SIZES: Mapping[str, ModelFields] = {
    "gemma2-2b": _gemma2(2304, 9216, 26, 8, 4, 256, 256),
    "gemma2-9b": _gemma2(3584, 14_336, 42, 16, 8, 256, 256),
    "gemma2-27b": _gemma2(4608, 36_864, 46, 32, 16, 128, 144),
    "gemma3-1b": _gemma3(1152, 6912, 26, 4, 1, small=True),
    "gemma3-4b": _gemma3(2560, 10_240, 34, 8, 4),
    "gemma3-12b": _gemma3(3840, 15_360, 48, 16, 8),
    "gemma3-27b": _gemma3(5376, 21_504, 62, 32, 16, head_dim=128, scalar=168),
    "gemma4-e2b": _gemma4_small(1536, 6144, 35, 1, every=5, shared=20, wide=True),
    "gemma4-e4b": _gemma4_small(2560, 10_240, 42, 2, every=6, shared=18, wide=False),
    "gemma4-31b": _gemma4(5376, 21_504, 60, 32, 16, 4),
    "gemma4-26b-a4b": _gemma4(
        *(2816, 2112, 30, 16, 8, 2),
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "glm-4.5-air": _glm45_air(),
    "llama3-1b": _llama32(2048, 16, 32, 64),
    "llama3-3b": _llama32(3072, 28, 24, 128),
    "llama3-8b": _llama31(4096, 14_336, 32, 32),
    "llama3-70b": _llama31(8192, 28_672, 80, 64),
    "llama3-405b": _llama31(16_384, 53_248, 126, 128),
    "olmo3-7b": _olmo3(4096, 11_008, 32, 32, 32),
    "olmo3-32b": _olmo3(5120, 27_648, 64, 40, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "qwen3.5-0.8b": _qwen35_dense(1024, 3584, 24, 8, 2, 16, tied=True),
    "qwen3.5-2b": _qwen35_dense(2048, 6144, 24, 8, 2, 16, tied=True),
    "qwen3.5-4b": _qwen35_dense(2560, 9216, 32, 16, 4, 32, tied=True),
    "qwen3.5-9b": _qwen35_dense(4096, 12_288, 32, 16, 4, 32, tied=False),
    "qwen3.5-27b": _qwen35_dense(5120, 17_408, 64, 24, 4, 48, tied=False),
    "qwen3.5-35b-a3b": _qwen35_moe(2048, 512, 40, 16, 2),
    "gpt-oss-20b": _gpt_oss(32, 24),
}


def config_of(name: str) -> ModelConfig:
    """Looks up the ModelConfig of a published model by its name in SIZES.

    Raises:
      ValueError: unknown name; the message gives the nearest name.
    """
    if name not in SIZES:
        raise ValueError(f"podrl has no model size {name!r}.{nearest(name, SIZES)} All of them: {', '.join(SIZES)}.")
    return config_from_hf(SIZES[name], where=name)


def parameter_count(config: ModelConfig) -> int:
    """Counts the model's parameters, adapters included."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config), is_leaf=is_param))


def expert_parameter_count(config: ModelConfig) -> int:
    """Counts the parameters of all routed experts; a token uses the share `config.chosen_share` of them."""
    stacks = stacks_of(param_specs(config)["layers"], config)
    return sum(math.prod(spec.shape) for stack in stacks for n, spec in stack.items() if n.startswith("expert_"))


def table_parameter_count(config: ModelConfig) -> int:
    """Counts the parameters of the table of per-layer embeddings; a token reads one row of it."""
    return config.vocab_size * config.num_layers * config.ple_dim


def parameters_of_a_token(params: PyTree, config: ModelConfig) -> int:
    """Counts the parameters whose products compute one token.

    The token's share of the routed experts counts. A table does not count if a token only reads a row of it: the
    per-layer embeddings, and the token embeddings unless they are also the output layer.

    Args:
      params: the parameters, or a part of them, laid out like `param_specs(config)`.
      config: the model.
    """

    def count(path: Sequence[Any], leaf: Any) -> float:
        name = path[-1].key
        if name == "ple_table" or (name == "embed" and not config.tie_embeddings):
            return 0.0
        return math.prod(leaf.shape) * (config.chosen_share if name.startswith("expert_") else 1.0)

    return round(sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(count, params, is_leaf=is_param))))
