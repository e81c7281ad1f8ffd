"""The engine with other dtypes, head sizes, depths and meshes, each compared with the full forward pass."""

import dataclasses

import jax
import numpy as np
import pytest

from podrl.engine.config import RolloutConfig, Sampling
from podrl.models.config import LoraConfig, gemma2_config
from podrl.models.hf_config import config_from_hf
from podrl.types import Policy

CONFIG = RolloutConfig(
    max_tokens_to_generate=20,
    max_prompt_length=20,
    kv_cache_size=64,
    lanes=8,
    steps_per_dispatch=4,
    page_tokens=8,
    prefill_tokens=8,  # prompts of up to three chunks
    members_per_read=2,
)
SMALL = {"vocab_size": 300, "num_layers": 2, "model_dim": 16, "ffn_dim": 16, "window": 6}

# Every case needs programs of its own, so slow cases are compiled without optimisations, too, which takes half the
# time.
pytestmark = pytest.mark.usefixtures("quick_compilation")
FORMS = pytest.mark.nightly("podrl/engine", "podrl/rollout", "podrl/models")


def generate(tiny, check, prompts_of, config=CONFIG, atol=1e-4):
    sampling = Sampling(max_new=20)
    worker = tiny.worker(config, warm=False)
    rollouts = worker.generate(
        Policy(tiny.params, 0), prompts_of([20, 7, 13, 1]), group_size=3, step=0, sampling=sampling
    )
    assert rollouts.mask_BT.sum() > 100
    check(tiny, rollouts, sampling, atol=atol)
    return worker, rollouts


@FORMS
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 1, 128), (1, 1, 256)])
def test_head_sizes(tiny_on, check, prompts_of, heads, kv_heads, head_dim):
    model = gemma2_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **SMALL)
    generate(tiny_on("data=1", 1, model), check, prompts_of)


def test_bfloat16(tiny_on, check, prompts_of):
    """Compares an engine with weights, activations and caches in bfloat16 with a float32 forward pass of the same
    weights.

    A log-probability may differ by a few bfloat16 steps (1/256) of the logits, which lie between -4 and 4.
    """
    model = gemma2_config(num_heads=4, num_kv_heads=2, head_dim=64, **{**SMALL, "num_layers": 1})
    tiny = tiny_on("data=1", 1, model, "bfloat16")
    _, rollouts = generate(tiny, check, prompts_of, atol=0.1)
    reference_BTV = tiny.logprobs(rollouts.tokens_BT, rollouts.length_B)
    chosen_BT = np.take_along_axis(reference_BTV, rollouts.tokens_BT[..., None], axis=2)[..., 0]
    error = (rollouts.raw_logprob_BT - chosen_BT)[rollouts.mask_BT > 0]
    assert np.abs(error).mean() < 0.01 and abs(error.mean()) < 0.003
    assert np.abs(error).max() > 1e-5  # differences show that it ran in bfloat16


@FORMS
@pytest.mark.slow
def test_more_layers_than_are_unrolled(tiny_on, check, prompts_of):
    """Deep models scan over stacked layers; adapters and both kinds of window are stacked too."""
    model = gemma2_config(num_heads=2, num_kv_heads=1, head_dim=8, **{**SMALL, "num_layers": 14})
    model = dataclasses.replace(model, lora=LoraConfig(rank=2, alpha=4.0, pattern="q|down"))
    tiny = tiny_on("data=1", 1, model)
    worker = tiny.worker(CONFIG, warm=False)
    engine = worker._get_engine(tiny.params)
    assert not engine.unrolled and engine.prepare(tiny.params) is tiny.params, "prepare() must not copy the weights"
    generate(tiny, check, prompts_of)


@pytest.mark.parametrize(
    ("mesh", "layers"),
    [
        ("fsdp=2", 14),
        pytest.param("tensor=2", 2, marks=[FORMS, pytest.mark.slow]),
        pytest.param("data=2,fsdp=2,tensor=2", 14, marks=[FORMS, pytest.mark.slow]),
    ],
)
def test_meshes(tiny_on, check, prompts_of, mesh, layers):
    """Covers unrolled and scanned layers, with weights sharded over tensor, over fsdp and over both."""
    model = gemma2_config(num_heads=4, num_kv_heads=2, head_dim=8, **{**SMALL, "num_layers": layers})
    devices = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    generate(tiny_on(mesh, devices, model), check, prompts_of)


QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,  # with 1e-6, float32 results would differ from float64 by 2e-4, above the tolerance
}


@pytest.mark.parametrize(
    ("mesh", "layers"),
    [
        ("fsdp=2", 16),
        ("tensor=2", 4),
        pytest.param("data=1", 4, marks=[FORMS, pytest.mark.slow]),
        pytest.param("data=2,fsdp=2,tensor=2", 16, marks=[FORMS, pytest.mark.slow]),
    ],
)
def test_layers_of_linear_attention(tiny_on, check, prompts_of, mesh, layers):
    """States of prompts in several chunks reach the lanes, and are spilled to the host and restored if the pool is
    short."""
    model = config_from_hf({**QWEN3_5, "num_hidden_layers": layers})
    devices = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    config = dataclasses.replace(CONFIG, pool_tokens=12 * 8)
    worker, _ = generate(tiny_on(mesh, devices, model), check, prompts_of, config, atol=2e-5)
    assert (worker.stats.spills > 0) == (devices < 8)


# Sinks, windows on every other layer, YaRN, biases of all projections and of experts, a bounded activation.
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "initial_context_length": 16,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("mesh", "layers"),
    [
        ("data=1", 2),
        pytest.param("fsdp=2", 14, marks=[FORMS, pytest.mark.slow]),
        pytest.param("tensor=2", 2, marks=[FORMS, pytest.mark.slow]),
    ],
)
def test_sinks_and_biases(tiny_on, check, prompts_of, mesh, layers):
    model = config_from_hf({**GPT_OSS, "num_hidden_layers": layers})
    tiny = tiny_on(mesh, 1 if mesh == "data=1" else 2, model)
    keys = iter(jax.random.split(jax.random.key(7), 99))
    changed = lambda x: jax.device_put(x + 0.5 * jax.random.normal(next(keys), x.shape), x.sharding)  # noqa: E731
    layers = tiny.params["layers"]
    layers |= {name: changed(x) for name, x in layers.items() if "bias" in name or name == "sinks"}
    assert "sinks" in layers and "expert_out_bias" in layers and "o_bias" in layers
    generate(tiny, check, prompts_of, atol=2e-5)


# Layers with a window have heads of size 8. Layers without a window have heads of size 16, and the keys are the values.
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
}
# As in Gemma 4 E2B, the last six of 15 layers reuse keys, and every layer has embeddings of its own.
SMALL_GEMMA4 = {
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 300,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}
BESIDE_DENSE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}


@pytest.mark.parametrize(
    ("mesh", "layers", "experts"),
    [
        ("fsdp=2", 15, {}),
        ("data=1", 3, BESIDE_DENSE),
        ("fsdp=2", 15, SMALL_GEMMA4),
        pytest.param("tensor=2", 9, SMALL_GEMMA4, marks=[FORMS, pytest.mark.slow]),
        pytest.param("tensor=2", 3, {}, marks=[FORMS, pytest.mark.slow]),
        pytest.param("data=2,fsdp=2,tensor=2", 15, BESIDE_DENSE, marks=[FORMS, pytest.mark.slow]),
    ],
)
def test_layers_of_two_kinds(tiny_on, check, prompts_of, mesh, layers, experts):
    """Each kind has pools of its own. The pools are so small that pages of both kinds are spilled and restored."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    model = config_from_hf({**GEMMA4, **experts, "num_hidden_layers": layers, "layer_types": types * (layers // 3)})
    model = dataclasses.replace(model, lora=LoraConfig(rank=2, alpha=4.0, pattern="q|v|down"))
    devices = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    tiny = tiny_on(mesh, devices, model)
    worker, _ = generate(tiny, check, prompts_of, dataclasses.replace(CONFIG, pool_tokens=12 * 8))
    assert (worker.stats.spills > 0) == (devices < 8)
