"""config.json read and written: every family, both rope spellings, and refused fields."""

import dataclasses
import json
import math
import pathlib

import pytest

from podrl.models import moe
from podrl.models.config import GLOBAL_WINDOW, Experts, RopeScaling
from podrl.models.hf_config import config_from_hf, config_to_hf, read_config
from podrl.models.parameters import param_specs
from podrl.models.sizes import SIZES, config_of, parameter_count, parameters_of_a_token

FIXTURES = sorted((pathlib.Path(__file__).parent / "fixtures").iterdir())
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# The published config.json of Qwen2.5-0.5B.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

# The published config.json of Qwen3-30B-A3B and of Mixtral-8x7B-v0.1.
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
# Fields that the text parts of the published files of Qwen 3.5 share, with and without experts; the files also have a
# part for images.
QWEN35 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}


def _qwen35(layers: int, **fields: object) -> dict:
    return QWEN35 | {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "num_hidden_layers": layers,
        **fields,
    }


QWEN35_35B = _qwen35(
    40,
    hidden_size=2048,
    linear_num_value_heads=32,
    mlp_only_layers=[],
    model_type="qwen3_5_moe_text",
    moe_intermediate_size=512,
    num_attention_heads=16,
    num_experts=256,
    num_experts_per_tok=8,
    num_key_value_heads=2,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
)


def _qwen35_dense(layers: int, dim: int, ffn: int, heads: int, kv_heads: int, value_heads: int, tied: bool) -> dict:
    return _qwen35(
        layers,
        hidden_size=dim,
        intermediate_size=ffn,
        linear_num_value_heads=value_heads,
        mlp_only_layers=[],
        model_type="qwen3_5_text",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


QWEN35_DENSE = {
    "qwen3.5-0.8b": _qwen35_dense(24, 1024, 3584, 8, 2, 16, tied=True),
    "qwen3.5-2b": _qwen35_dense(24, 2048, 6144, 8, 2, 16, tied=True),
    "qwen3.5-4b": _qwen35_dense(32, 2560, 9216, 16, 4, 32, tied=True),
    "qwen3.5-9b": _qwen35_dense(32, 4096, 12288, 16, 4, 32, tied=False),
    "qwen3.5-27b": _qwen35_dense(64, 5120, 17408, 24, 4, 48, tied=False),
}
# The text part of the published config.json of Gemma 4 26B-A4B.
GEMMA4_26B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": True,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
# The text part of Gemma 4 31B.
GEMMA4_31B = GEMMA4_26B | {
    "enable_moe_block": False,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "top_k_experts": None,
}
# The text parts of Gemma 4 E2B and E4B.
GEMMA4_E4B = GEMMA4_26B | {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 10240,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "top_k_experts": None,
}
GEMMA4_E2B = GEMMA4_E4B | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
# The published config.json of GLM-4.5-Air.
GLM45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_the_published_fields_of_glm_are_read():
    config = config_from_hf(GLM45_AIR)
    assert config == config_of("glm-4.5-air") == config_from_hf(config_to_hf(config))
    assert config.experts == Experts(128, 8, 1408, score="sigmoid", selection_bias=True, shared_dim=1408)
    dense, routed = config.alike()[1], config.alike()[0]
    assert (dense.num_layers, dense.experts, dense.ffn_dim, routed.num_layers) == (1, None, 10944, 45)
    assert config.rotary_dim == 64 and config.qkv_bias and not config.qk_norm
    assert moe.route_bytes(config) == 45 * 8
    with pytest.raises(ValueError, match="first_k_dense_replace=46 for 46 layers"):
        config_from_hf(GLM45_AIR | {"first_k_dense_replace": 46})
    assert not config_from_hf(GLM45_AIR | {"first_k_dense_replace": 0}).kinds


def test_the_published_fields_of_gemma4_with_experts_are_read():
    images = {"model_type": "gemma4", "image_token_id": 258880, "vision_config": {"num_hidden_layers": 27}}
    config = config_from_hf(images | {"text_config": GEMMA4_26B, "tie_word_embeddings": True})
    assert config == config_of("gemma4-26b-a4b") == config_from_hf(config_to_hf(config))
    assert config.experts == Experts(128, 8, 704, beside_dense=True) and config.active_ffn_dim == 2112 + 8 * 704
    assert config.patterns() == ((((0, 5), (1, 1)), 5),) and moe.route_bytes(config) == 30 * 8
    with pytest.raises(ValueError, match="top_k_experts=500 and num_experts=128"):
        config_from_hf(GEMMA4_26B | {"top_k_experts": 500})


def test_the_published_fields_of_gemma4_31b_are_read():
    config = config_from_hf(
        {"model_type": "gemma4", "vision_config": {"num_hidden_layers": 27}, "text_config": GEMMA4_31B}
    )
    assert config == config_of("gemma4-31b") == config_from_hf(config_to_hf(config)) and config.experts is None
    assert config.patterns() == ((((0, 5), (1, 1)), 10),)
    within, across = config.alike()
    assert (within.num_kv_heads, within.head_dim, across.num_kv_heads, across.head_dim) == (16, 256, 4, 512)
    assert across.key_is_value and not within.key_is_value


def test_the_published_fields_of_small_gemma4_are_read():
    both = {"model_type": "gemma4", "audio_config": {}, "vision_config": {"num_hidden_layers": 16}}
    wide, narrow = (config_from_hf(both | {"text_config": raw}) for raw in (GEMMA4_E2B, GEMMA4_E4B))
    assert (wide, narrow) == (config_of("gemma4-e2b"), config_of("gemma4-e4b"))
    assert wide.patterns() == ((((0, 4), (1, 1)), 3), (((2, 4), (3, 1)), 4)) and wide.ple_dim == 256
    assert narrow.patterns() == ((((0, 5), (1, 1)), 4), (((2, 5), (3, 1)), 3))
    assert [alike.ffn_dim for alike in wide.alike()] == [6144, 6144, 12288, 12288]
    assert [alike.ffn_dim for alike in narrow.alike()] == [10240] * 4
    assert [(alike.head_dim, alike.windows()[0]) for alike in narrow.alike()[2:]] == [(256, 512), (512, GLOBAL_WINDOW)]


@pytest.mark.parametrize("raw", [GEMMA4_31B, GEMMA4_E2B, GEMMA4_E4B], ids=["31b", "e2b", "e4b"])
def test_a_changed_field_of_a_dense_gemma4_is_honoured_or_refused(raw):
    more = {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": 7, "num_kv_shared_layers": 12}
    more |= {"num_key_value_heads": 4, "use_double_wide_mlp": not raw["use_double_wide_mlp"]}
    same = changed_without_effect(raw, **more)
    unused = {"use_sliding_window", "top_k_experts", "num_experts", "moe_intermediate_size"}
    if raw is GEMMA4_31B:  # no layer shares keys, and there is no second table of embeddings
        unused |= {"use_double_wide_mlp", "vocab_size_per_layer_input"}
    assert same <= unused, same


def test_the_published_fields_of_qwen35_with_experts_are_read():
    images = {"model_type": "qwen3_5_moe", "image_token_id": 248056, "vision_config": {"depth": 27}}
    config = config_from_hf(images | {"text_config": QWEN35_35B, "tie_word_embeddings": False})
    assert config == config_of("qwen3.5-35b-a3b") == config_from_hf(QWEN35_35B)
    assert config.experts == Experts(256, 8, 512, shared_dim=512, shared_gate=True)
    assert config.patterns() == ((((1, 3), (0, 1)), 10),) and config.recurrent and config.norm_plus_one
    assert moe.route_bytes(config) == 2 * 40 * 8  # with 256 or more experts a route takes two bytes
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("name", QWEN35_DENSE)
def test_the_published_fields_of_qwen35_without_experts_are_read(name):
    raw = QWEN35_DENSE[name]
    images = {"model_type": "qwen3_5", "image_token_id": 248056, "vision_config": {"depth": 12}}
    config = config_from_hf(images | {"text_config": raw, "tie_word_embeddings": raw["tie_word_embeddings"]})
    assert config == config_of(name) == config_from_hf(raw)
    assert config.patterns() == ((((1, 3), (0, 1)), raw["num_hidden_layers"] // 4),) and config.experts is None
    assert config.recurrent and config.norm_plus_one and config.rotary_dim == 64
    assert config_from_hf(config_to_hf(config)) == config


def test_a_changed_field_of_a_qwen35_without_experts_is_honoured_or_refused():
    same = changed_without_effect(QWEN35_DENSE["qwen3.5-27b"])
    # layer_types overrides full_attention_interval. The fields of experts and windows mean nothing in a model without
    # experts and windows.
    experts = {"decoder_sparse_step", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
    windows = {"max_window_layers", "use_sliding_window", "sliding_window"}
    assert same <= experts | windows | {"full_attention_interval", "shared_expert_intermediate_size"}, same


# The published config.json of gpt-oss-20b.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


# The published config.json of Olmo-3-7B.
OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": False,
    "vocab_size": 100278,
}


def test_the_published_fields_of_olmo3_are_read():
    config = config_from_hf(OLMO3_7B)
    assert config == config_of("olmo3-7b")
    yarn = RopeScaling("yarn", 8.0, original_length=8192, attention_factor=1.2079441541679836)
    assert config.window_L == (4096, 4096, 4096, GLOBAL_WINDOW) * 8 and set(config.rope_theta_L) == {5e5}
    assert config.rope_scaling_L == (RopeScaling(), RopeScaling(), RopeScaling(), yarn) * 8
    assert config.post_norms and not config.pre_norms and config.joint_qk_norm and config.max_length == 65_536
    assert config_from_hf({k: v for k, v in OLMO3_7B.items() if k != "layer_types"}) == config
    written = config_to_hf(config)
    assert config_from_hf(written) == config
    # A release of transformers reads only one of the two spellings of the rope's fields.
    spelled = {"rope_parameters": written["rope_parameters"]}
    plain = {k: v for k, v in OLMO3_7B.items() if not k.startswith("rope_")}
    assert config_from_hf(plain | spelled) == config and config_from_hf(OLMO3_7B | spelled) == config
    with pytest.raises(ValueError, match=r"rope_parameters=.*always in an olmo3 model"):
        config_from_hf(plain | {"rope_parameters": OLMO3_7B["rope_scaling"]})
    assert changed_without_effect(OLMO3_7B) == {"use_sliding_window"}  # layer_types decides, whatever this flag is


def test_the_published_fields_of_gpt_oss_are_read():
    config = config_from_hf(GPT_OSS_20B)
    assert config == config_of("gpt-oss-20b")
    assert config.experts == Experts(32, 4, 2880, score="chosen", normalize=False, bias=True)
    assert config.window_L == (128, GLOBAL_WINDOW) * 12 and config.sinks and config.qkv_bias and config.o_bias
    assert config.rope_scaling_L[0] == RopeScaling(
        "yarn", 32.0, original_length=4096, truncate=False, attention_factor=0.1 * math.log(32) + 1
    )
    written = config_to_hf(config)
    assert config_from_hf(written) == config and "quantization_config" not in written
    plain = dataclasses.replace(config, rope_scaling_L=(RopeScaling(),) * 24, qkv_bias=False, o_bias=False)
    assert config_from_hf(config_to_hf(plain)) == plain


def test_the_published_fields_of_models_with_experts_are_read():
    qwen, mixtral = config_from_hf(QWEN3_30B), config_from_hf(MIXTRAL_8X7B)
    assert qwen == config_of("qwen3-30b-a3b")
    assert qwen.experts == Experts(128, 8, 768) and set(qwen.window_L) == {GLOBAL_WINDOW} and qwen.qk_norm
    assert mixtral.experts == Experts(8, 2, 14336) and not mixtral.qk_norm
    assert parameter_count(mixtral) == 46_702_792_704
    for config in (qwen, mixtral):
        assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    "raw", [QWEN3_30B, MIXTRAL_8X7B, QWEN35_35B, GPT_OSS_20B, GLM45_AIR, GEMMA4_26B], ids=lambda raw: raw["model_type"]
)
def test_a_changed_field_of_a_model_with_experts_is_honoured_or_refused(raw):
    """Every field that may change the logits changes the configuration, or is refused by its name."""
    same = changed_without_effect(raw)
    # Fields that have no effect without a window, or that layer_types overrides.
    assert same <= {"max_window_layers", "sliding_window", "use_sliding_window", "full_attention_interval"}, same
    if raw["model_type"] == "qwen3_moe":
        windowed = config_from_hf(raw | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": None})
        assert set(windowed.window_L) == {64}
    if raw["model_type"] == "gemma4_text":
        return
    with pytest.raises(ValueError, match=r"num_experts_per_tok=500 and (num|num_local|n_routed)_experts="):
        config_from_hf(raw | {"num_experts_per_tok": 500, "experts_per_token": None})
    with pytest.raises(ValueError, match="num_experts=128 and num_local_experts=4: they must be the same"):
        config_from_hf(QWEN3_30B | {"num_local_experts": 4})


def changed_without_effect(raw, **more):
    """Changes each field in turn; returns the fields that neither change the logits nor are refused by name."""
    gemma = raw["model_type"] == "gemma4_text"
    changes = {
        **{key: 3 for key in ("decoder_sparse_step", "max_window_layers")},
        "top_k_experts": 1,
        "enable_moe_block": not raw.get("enable_moe_block"),
        **{key: 1 for key in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")},
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "router_jitter_noise": 0.1,
        "use_sliding_window": True,
        "sliding_window": 64,
        "hidden_act": "silu" if gemma else "gelu",
        "attention_bias": not raw.get("attention_bias"),
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "topk_group": 2,
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
        "intermediate_size": 7,
        "rope_theta": 5.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rms_norm_eps": 0.5,
        "layer_types": ["sliding_attention"] * raw["num_hidden_layers"],
        "attn_logit_softcapping": 3.0,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": not raw.get("tie_word_embeddings"),
        "max_position_embeddings": 1 << 19,
        "shared_expert_intermediate_size": 8,
        "partial_rotary_factor": 0.25 if raw["model_type"] == "glm4_moe" else 0.5,
        "attn_output_gate": False,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "rope_parameters": {"rope_theta": 7.0},
        "n_group": 2,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "swiglu_limit": 6.0,
        "swiglu_alpha": 1.5,
        "experts_per_token": 3,
        "initial_context_length": 7,
        "quantization_config": {"quant_method": "gptq"},
        **more,
    }
    same = set()
    for key, value in changes.items():
        try:
            if config_from_hf(raw | {key: value}) == config_from_hf(raw):
                same.add(key)
        except ValueError as error:
            assert key in str(error), (key, error)
    return same


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda d: d.name)
def test_fixtures_survive_a_round_trip(directory):
    config = read_config(directory)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("name", sorted(SIZES))
def test_published_sizes_survive_a_round_trip(name):
    config = config_of(name)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gemma2-2b", 2_614_341_888),
        ("gemma3-1b", 999_885_952),
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("olmo3-7b", 7_298_011_136),
        ("olmo3-32b", 32_233_522_176),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen3.5-0.8b", 752_393_024),
        ("qwen3.5-2b", 1_881_825_088),
        ("qwen3.5-4b", 4_205_751_296),
        ("qwen3.5-9b", 8_953_803_264),
        ("qwen3.5-27b", 26_895_998_464),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("gpt-oss-20b", 20_914_757_184),
        ("glm-4.5-air", 106_852_251_264),
        ("gemma4-26b-a4b", 25_233_141_790),
        ("gemma4-31b", 30_697_345_340),
        ("gemma4-e2b", 4_628_569_379),
        ("gemma4-e4b", 7_463_013_418),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
    assert parameter_count(config_of(name)) == count


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.0), ("gpt-oss-20b", 3.6), ("glm-4.5-air", 12.8), ("gemma4-e4b", 4.6), ("qwen3-8b", 7.6)],
)
def test_a_token_passes_its_experts_and_no_table_that_it_only_reads(name, billions):
    config = config_of(name)
    assert round(parameters_of_a_token(param_specs(config), config) / 1e9, 1) == billions


def test_gemma3_sizes_have_the_numbers_of_their_names():
    assert [round(parameter_count(config_of(f"gemma3-{size}b")) / 1e9, 1) for size in (4, 12, 27)] == [3.9, 11.8, 27.0]


def test_an_unknown_size_lists_all():
    with pytest.raises(ValueError, match=r"'gemma3-5b'\. Did you mean 'gemma3-4b'\?.*gemma2-2b, .*gpt-oss-20b\."):
        config_of("gemma3-5b")


def test_gemma2_27b_scales_queries_by_model_size_over_heads():
    config = config_of("gemma2-27b")
    assert config.query_scale == pytest.approx((4608 / 32) ** -0.5) and config.head_dim == 128
    assert config.window_L[:2] == (4096, GLOBAL_WINDOW)


def test_both_rope_spellings_mean_the_same():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = config_from_hf(LLAMA | {"rope_theta": 500_000.0, "rope_scaling": scaling})
    new = config_from_hf(LLAMA | {"rope_parameters": scaling | {"rope_theta": 500_000.0}})
    assert old == new
    assert old.rope_theta_L == (500_000.0,) * 2
    assert old.rope_scaling_L[0] == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling_L[0].factor == 2.0


def test_yarn_is_read_as_published_and_as_transformers_infers_it():
    # The documented rope_scaling for long texts of Qwen 2.5; max_position_embeddings keeps its value of pre-training.
    published = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = config_from_hf(QWEN25 | {"rope_scaling": published})
    assert config.rope_scaling_L[0] == RopeScaling(
        "yarn", 4.0, original_length=32768, attention_factor=0.1 * math.log(4) + 1
    )
    assert config.max_length == 131_072
    assert config_from_hf(config_to_hf(config)) == config
    told = published | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    assert config_from_hf(QWEN25 | {"rope_scaling": told}).rope_scaling_L[0] == RopeScaling(
        "yarn", 4.0, original_length=32768, beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.25
    )
    scaled = config_from_hf(QWEN25 | {"rope_scaling": published | {"mscale": 1.0, "mscale_all_dim": 0.5}})
    assert scaled.rotations()[0][1][0] == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert (
        config_from_hf(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2}}).rope_scaling_L[0].original_length == 256
    )


def test_gemma3_has_two_rope_bases_in_either_spelling():
    base = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "sliding_window": 512,
    }
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config_from_hf(base | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling})
    new = config_from_hf(
        base
        | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, **scaling},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }
        }
    )
    assert old == new
    assert old.window_L == (512,) * 5 + (GLOBAL_WINDOW, 512)
    assert old.rope_theta_L == (1e4,) * 5 + (1e6, 1e4)
    assert [s.kind for s in old.rope_scaling_L] == ["none"] * 5 + ["linear", "none"]
    assert old.head_dim == 256 and old.num_heads == 8 and old.vocab_size == 262_208  # the family's defaults


def test_the_text_part_of_an_image_model_is_read():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {"whatever": 1}, "boi_token_index": 5}
    assert config_from_hf(raw) == config_from_hf(text)


def test_early_gemma_files_mean_the_tanh_form():
    gemma = LLAMA | {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 8}
    assert config_from_hf(gemma).activation == "gelu_tanh"
    assert config_from_hf(LLAMA | {"hidden_act": "gelu"}).activation == "gelu"


def test_qwen_windows_begin_at_max_window_layers():
    qwen = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 7, "max_window_layers": 1}
    assert config_from_hf(qwen).window_L == (GLOBAL_WINDOW,) * 3
    assert config_from_hf(qwen | {"use_sliding_window": True}).window_L == (GLOBAL_WINDOW, 7, 7)
    # As in transformers: no window, whatever use_sliding_window is.
    none = {"use_sliding_window": True, "sliding_window": None}
    assert config_from_hf(qwen | none).window_L == (GLOBAL_WINDOW,) * 3


def test_the_published_fields_of_qwen25_are_read():
    config = config_from_hf(QWEN25)
    assert parameter_count(config) == 494_032_768
    assert config.window_L == (GLOBAL_WINDOW,) * 24 and config.tie_embeddings
    with pytest.raises(ValueError, match="use_mrope=True, which podrl does not compute: it must be False"):
        config_from_hf(QWEN25 | {"use_mrope": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba'.*gemma2, gemma3_text, gemma4_text, glm4_moe, gpt_oss, llama, mistral, mixtral, olmo3",
        ),
        ({"model_type": None}, "has no model_type"),
        ({"residual_multiplier": 0.2}, "field residual_multiplier=0.2, which podrl does not know"),
        ({"attention_bias": True}, "attention_bias=True, which podrl does not compute: it must be False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"hidden_act": "relu"}, "activation 'relu': gelu_pytorch_tanh, gelu, silu"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope scaling 'longrope': default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' without 'factor'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 33}},
            "beta_fast must be at least beta_slow",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 0}},
            "rope_scaling.truncate=0: it must be true",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, r"rope field\(s\) beta_fast"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' without 'factor'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "each of 2 layers"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which a llama model does not use"),
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24, which a llama model"),
        ({"rope_local_base_freq": 5e3}, "rope_local_base_freq=5000.0, which a llama model"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu', which a llama model"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.*, which a llama model"),
        ({"model_type": "mistral", "use_sliding_window": False}, "use_sliding_window=False, which a mistral model"),
        ({"model_type": "gemma2", "hidden_act": "silu"}, "hidden_act='silu', which a gemma2 model"),
        ({"model_type": "gemma2", "sliding_window_pattern": 3}, "sliding_window_pattern=3, which a gemma2 model"),
        ({"model_type": "gemma2", "sliding_window": None}, "no window: sliding_window must be a number"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "and use_sliding_window must be true"),
        ({"hidden_size": "32"}, "hidden_size='32': it must be a whole number above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6': it must be a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': it must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2': it must be a number"),
        ({"model_type": "qwen2", "layer_types": "full_attention"}, "layer_types='full_attention': it must be a list"),
        ({"hidden_act": ["silu"]}, "hidden_act=.*: it must be a string"),
        ({"sliding_window": 12}, "sliding_window=12, which a llama model does not use"),
        ({"num_key_value_heads": 3}, "4 query heads do not split over 3"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "=50.0, which a gemma3 model does not use"),
        ({"head_dim": 7}, "head_dim=7: it must be even"),
        ({"hidden_size": 36, "num_attention_heads": 12}, "head_dim=3: it must be even"),
        ({"hidden_size": 33}, "hidden_size=33, which does not split over num_attention_heads=4"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: it must be a number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: it must be a number"),
        ({"rope_theta": 0}, "rope_theta=0: it must be above 0"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings=1000.*at most 1073741824"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*it must be a number"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: it must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0: it must be above 0"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "low_freq_factor=1, which must be below"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "only a gemma3, gemma4 or olmo3 model has other positions",
        ),
    ],
)
def test_what_podrl_does_not_compute_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | change)


def test_attention_in_both_directions_within_images_is_that_of_text_only_in_gemma4():
    with pytest.raises(ValueError, match="use_bidirectional_attention='vision'"):
        config_from_hf(LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": "vision"})


def test_fields_without_effect_are_accepted():
    assert config_from_hf(LLAMA | {"torch_dtype": "bfloat16", "use_cache": True, "eos_token_id": [1, 2]}) == (
        config_from_hf(LLAMA)
    )


def test_unread_fields_that_say_what_is_computed_are_accepted():
    said = {
        "final_logit_softcapping": None,
        "attn_logit_softcapping": 0.0,
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "silu",
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "sliding_window": None,
    }
    assert config_from_hf(LLAMA | said) == config_from_hf(LLAMA)
    gemma2 = LLAMA | {"model_type": "gemma2"}
    assert config_from_hf(gemma2 | {"hidden_act": "gelu"}) == config_from_hf(gemma2)
    listed = {"layer_types": ["full_attention", "sliding_attention"], "_sliding_window_pattern": 6}
    assert config_from_hf(gemma2 | listed).window_L == (GLOBAL_WINDOW, 4096)


def test_a_configuration_without_a_form_is_refused():
    config = config_from_hf(LLAMA)
    with pytest.raises(ValueError, match="has no form in Hugging Face's"):
        config_to_hf(dataclasses.replace(config, logit_softcap=30.0))


def test_a_directory_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-3])
    with pytest.raises(ValueError, match=r"config\.json line 1 is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # published numbers, in billions: 2.61, 9.24, 27.2, 8.03, 70.6, 405.9, 8.19
        ("gemma2-2b", 2.614),
        ("gemma2-9b", 9.242),
        ("gemma2-27b", 27.227),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.853),
        ("qwen3-8b", 8.191),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(name, billions):
    assert parameter_count(config_of(name)) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_an_unknown_size_gets_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'gemma2-27b'"):
        config_of("gemma2-27")
