"""Published model sizes, for planning without their weights."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from podrl.config import nearest
from podrl.models.config import ModelConfig
from podrl.models.decoder import is_param, param_specs
from podrl.models.hf_config import config_from_hf


def _gemma2(dim: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int) -> dict[str, Any]:
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


def _llama31(dim: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
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


# Fields of the config.json published with each model. The Llama 3 rows are release 3.1.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "gemma2-2b": _gemma2(2304, 9216, 26, 8, 4, 256, 256),
    "gemma2-9b": _gemma2(3584, 14_336, 42, 16, 8, 256, 256),
    "gemma2-27b": _gemma2(4608, 36_864, 46, 32, 16, 128, 144),
    "llama3-8b": _llama31(4096, 14_336, 32, 32),
    "llama3-70b": _llama31(8192, 28_672, 80, 64),
    "llama3-405b": _llama31(16_384, 53_248, 126, 128),
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}


def config_of(name: str) -> ModelConfig:
    """Looks up the ModelConfig of a published size.

    Raises:
      ValueError: no such size; the nearest name is given.
    """
    if name not in SIZES:
        raise ValueError(f"podrl has no model size {name!r}.{nearest(name, SIZES)}")
    return config_from_hf(SIZES[name], where=name)


def parameter_count(config: ModelConfig) -> int:
    """Counts the model's parameters, adapters included."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config), is_leaf=is_param))
