"""Small random checkpoints of every family, made and evaluated by `transformers` itself."""

import os
import pathlib

import numpy as np
import torch
import transformers

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
}
ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"]
# Only the layers without a window have YaRN.
OLMO3 = {
    "sliding_window": 5,
    "layer_types": ALTERNATING,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}

# Heads have two sizes; the runs of equal layers are 0 1 | 2 | 3 4 | 5.
GEMMA4 = {
    "layer_types": ALTERNATING * 2,
    "sliding_window": 5,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}

GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "attention_k_eq_v": True,
}

# As in Gemma 4 E2B, there are per-layer embeddings, and the last three layers reuse keys and have a wider MLP.
GEMMA4_SMALL = {
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 6,
}

# Heads of size 16, 4 of which rotate; 2 key heads for 4 value heads; the runs of equal layers are 0 1 2 | 3 | 4.
QWEN3_5 = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
}

QWEN3_5_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}

# Windows on every other layer, sinks, biases everywhere; many gate and up values are beyond the bounds of the
# activation.
GPT_OSS = {
    "intermediate_size": 16,
    "sliding_window": 5,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": YARN | {"truncate": False},
}
GLM4 = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}

# (name, configuration class, differences from SMALL): GQA ratios, head sizes unlike dim / heads, windows shorter than
# the sequences of the tests, tied and untied, biases, soft caps that bite, both rope bases and scalings.
CASES = [
    ("gemma_mha", "GemmaConfig", {"num_key_value_heads": 4}),
    ("gemma_mqa", "GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    (
        "gemma2_caps",
        "Gemma2Config",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    (
        "gemma2_no_caps",
        "Gemma2Config",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16},
    ),
    (
        "gemma2_mqa",
        "Gemma2Config",
        {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 3, "attn_logit_softcapping": 4.0},
    ),
    ("gemma2_mha", "Gemma2Config", {"num_key_value_heads": 4, "num_hidden_layers": 2, "sliding_window": 7}),
    (
        "gemma3_windows",
        "Gemma3TextConfig",
        {"layer_types": ALTERNATING, "sliding_window": 4, "rope_parameters": GEMMA3_ROPE, "query_pre_attn_scalar": 12},
    ),
    ("gemma3_pattern", "Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window": 6, "num_key_value_heads": 1}),
    (
        "gemma3_wide_heads",
        "Gemma3TextConfig",
        {"head_dim": 16, "num_key_value_heads": 4, "sliding_window": 5, "layer_types": ALTERNATING[::-1]},
    ),
    (
        "gemma4_shared_keys",
        "Gemma4TextConfig",
        GEMMA4 | {"num_hidden_layers": 6, "attention_k_eq_v": True, "final_logit_softcapping": 3.0},
    ),
    ("gemma4_own_values", "Gemma4TextConfig", GEMMA4 | {"layer_types": ALTERNATING}),
    ("gemma4_experts", "Gemma4TextConfig", GEMMA4 | GEMMA4_EXPERTS | {"num_hidden_layers": 6}),
    (
        "gemma4_small",
        "Gemma4TextConfig",
        GEMMA4 | GEMMA4_SMALL | {"vocab_size_per_layer_input": 48, "final_logit_softcapping": 3.0},
    ),
    (
        "gemma4_one_layer_reuses_keys",
        "Gemma4TextConfig",
        # Without per-layer embeddings, transformers 5.23 does not generate from a model in which one layer reuses keys.
        GEMMA4 | GEMMA4_SMALL | {"num_kv_shared_layers": 1, "attention_k_eq_v": True, "vocab_size_per_layer_input": 48},
    ),
    # A small epsilon lets the gated norms magnify rounding: transformers itself then differs by 2e-4 from float64.
    ("qwen3_5_shared_heads", "Qwen3_5TextConfig", QWEN3_5 | {"num_hidden_layers": 5, "rms_norm_eps": 1e-2}),
    (
        "qwen3_5_tied",
        "Qwen3_5TextConfig",
        QWEN3_5
        | {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
        | {"linear_num_key_heads": 4, "linear_value_head_dim": 5, "tie_word_embeddings": True},
    ),
    (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        QWEN3_5 | QWEN3_5_EXPERTS | {"num_hidden_layers": 5, "rms_norm_eps": 1e-2},
    ),
    ("glm4_moe_dense_first", "Glm4MoeConfig", GLM4 | {"first_k_dense_replace": 2, "num_hidden_layers": 4}),
    ("glm4_moe_norms", "Glm4MoeConfig", GLM4 | {"first_k_dense_replace": 0, "use_qk_norm": True, "head_dim": 16}),
    ("llama_untied", "LlamaConfig", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500_000.0}}),
    ("llama3_rope", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    ("llama_mha", "LlamaConfig", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("qwen2_bias", "Qwen2Config", {"tie_word_embeddings": True}),
    ("qwen2_windows", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2_wide_heads", "Qwen2Config", {"head_dim": 16, "num_key_value_heads": 1}),
    ("qwen2_mha", "Qwen2Config", {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 1_000_000.0}}),
    ("qwen2_yarn", "Qwen2Config", {"rope_parameters": YARN, "head_dim": 16}),
    ("qwen3_yarn", "Qwen3Config", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.5}}),
    ("olmo3_yarn", "Olmo3Config", OLMO3),
    ("qwen3_untied", "Qwen3Config", {"head_dim": 16, "num_key_value_heads": 1}),
    ("qwen3_tied", "Qwen3Config", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1_000_000.0}}),
    ("mistral_window", "MistralConfig", {"sliding_window": 5}),
    ("mistral_mqa", "MistralConfig", {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 3}),
    ("mistral_tied", "MistralConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 9}),
    ("mistral_global", "MistralConfig", {"sliding_window": None, "head_dim": 16}),
    (
        "qwen3_moe_weighted",
        "Qwen3MoeConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": False},
    ),
    (
        "qwen3_moe_windows",
        "Qwen3MoeConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_key_value_heads": 4,
        },
    ),
    ("mixtral_window", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    (
        "mixtral_one",
        "MixtralConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    ),
]
CASES += [
    ("gpt_oss", "GptOssConfig", GPT_OSS),
    (
        "gpt_oss_plain_rope",
        "GptOssConfig",
        GPT_OSS | {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 1e4}},
    ),
]
BY_NAME = {name: changes for name, _, changes in CASES}
# The sizes of the committed fixtures (tests/models/fixtures), one case per family.
FIXTURE_SIZES = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
FIXTURE_CASES = [
    ("gemma", "GemmaConfig", {"num_key_value_heads": 1}),
    ("gemma2", "Gemma2Config", dict(BY_NAME["gemma2_caps"], num_key_value_heads=1)),
    ("gemma3", "Gemma3TextConfig", dict(BY_NAME["gemma3_windows"], num_key_value_heads=1)),
    ("gemma4", "Gemma4TextConfig", dict(BY_NAME["gemma4_shared_keys"], num_key_value_heads=2)),
    (
        "gemma4_experts",
        "Gemma4TextConfig",
        GEMMA4 | GEMMA4_EXPERTS | {"layer_types": ALTERNATING[1:] * 2, "num_hidden_layers": 4, "num_experts": 4},
    ),
    (
        "gemma4_small",
        "Gemma4TextConfig",
        GEMMA4
        | GEMMA4_SMALL
        | {"vocab_size_per_layer_input": 24, "hidden_size_per_layer_input": 4, "global_head_dim": 12},
    ),
    ("glm4_moe", "Glm4MoeConfig", GLM4 | {"num_key_value_heads": 1, "use_qk_norm": True}),
    ("gpt_oss", "GptOssConfig", GPT_OSS | {"num_key_value_heads": 1, "num_hidden_layers": 2, "num_local_experts": 4}),
    ("llama", "LlamaConfig", {"num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE}),
    ("qwen2", "Qwen2Config", {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}),
    ("olmo3", "Olmo3Config", OLMO3 | {"num_key_value_heads": 1}),
    ("qwen3", "Qwen3Config", {"num_key_value_heads": 1}),
    ("mistral", "MistralConfig", {"num_key_value_heads": 1, "sliding_window": 5}),
    (
        "mixtral",
        "MixtralConfig",
        {"num_key_value_heads": 1, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    (
        "qwen3_5",
        "Qwen3_5TextConfig",
        QWEN3_5
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        | {"hidden_size": 16, "num_key_value_heads": 1, "linear_key_head_dim": 8},  # gated norms magnify rounding
    ),
    (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        QWEN3_5
        | QWEN3_5_EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"hidden_size": 16, "num_key_value_heads": 1, "linear_key_head_dim": 8},
    ),
    (
        "qwen3_moe",
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "norm_topk_prob": True,
        },
    ),
]


def make_model(config_class: str, changes: dict, *, seed: int = 0) -> "transformers.PreTrainedModel":
    """Makes a random float32 model in which every parameter matters: norms and biases differ from their defaults."""
    # No end token: greedy generation must not stop early.
    fields = SMALL | changes | {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    config = getattr(transformers, config_class)(**fields)
    config._experts_implementation = "eager"
    # A norm's weight is the value that the model's class gives it, plus noise. Some classes draw this value at random.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim > 1:
                value.copy_(noise * (0.5 if "embed" in name else 1.0) / value.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                value.copy_(noise * 0.3)
            elif name.endswith("A_log"):
                # The class draws decays that leave next to nothing of the state. The norm after it then magnifies
                # rounding, up to 1e-3 of a logit, in transformers as well.
                value.copy_(noise * 0.2 - 1)
            else:
                value.add_(noise * 0.2)
        for name, value in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias")):
                value.add_(torch.randn(value.shape, generator=generator) * 0.2)
    return model.eval()


def save_model(model: "transformers.PreTrainedModel", directory: os.PathLike) -> pathlib.Path:
    model.save_pretrained(directory)
    return pathlib.Path(directory)


def make_tokens(shape: tuple[int, int], vocab_size: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def logits(model: "transformers.PreTrainedModel", tokens_BT: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens_BT.astype(np.int64))).logits.numpy()
