"""The programs of a model with linear attention copy none of its states, and a run calls the same programs."""

import re

import jax
import numpy as np
import pytest

from podrl.engine.config import RolloutConfig
from podrl.engine.engine import Engine
from podrl.engine.sizes import engine_shape
from podrl.mesh.build import make_mesh
from podrl.models import parameters
from podrl.models.hf_config import config_from_hf

QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
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
}
CONFIG = RolloutConfig(
    max_tokens_to_generate=8,
    max_prompt_length=8,
    kv_cache_size=16,
    lanes=4,
    steps_per_dispatch=4,
    page_tokens=8,
    prefill_tokens=8,
)


@pytest.mark.parametrize(("layers", "parts"), [(4, 1), (16, 1), (16, 2)], ids=["unrolled", "scanned", "tensor"])
def test_no_step_of_decoding_copies_the_states(layers, parts):
    model = config_from_hf({**QWEN3_5, "num_hidden_layers": layers})
    mesh = make_mesh(f"tensor={parts}", jax.devices()[:parts])
    engine = Engine(model, mesh, engine_shape(CONFIG, 1, recurrent=True), np.dtype("float32"))
    assert engine.unrolled == (layers == 4)
    programs = engine.programs(parameters.abstract_params(model, mesh, np.dtype("float32")))
    assert [p.name for p in programs][-3:] == ["copy", "spill_memory", "restore_memory"]
    generate = next(p for p in programs if p.name == "generate")
    text = generate.jitted.lower(*generate.args).compile().as_text()
    for memory in engine.memories():
        array = re.escape(f"f32[{','.join(map(str, memory.sharding.shard_shape(memory.shape)))}]")
        assert re.search(rf"= {array}\S* fusion\(|= {array}\S* dynamic-update-slice\(", text)
        assert not re.search(rf"= {array}\S* copy\(", text)
        assert memory.sharding.shard_shape(memory.shape)[2] == memory.shape[2] // parts  # each device has its own heads
