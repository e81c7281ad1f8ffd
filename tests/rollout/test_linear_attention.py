"""A model with layers of linear attention, and adapters in them, passes the tests of rollouts, windows and replicas."""

import dataclasses

import pytest
from test_episodes import (
    play,
    test_rows_hold_what_was_sampled_and_given,
    test_samples_do_not_depend_on_when_answers_come,
)
from test_rollout import (
    roomy,
    test_any_order_gives_the_same_bits,
    test_edges,
    test_extended_samples_equal_full_forward,
    test_spills_change_nothing,
    test_stop_string_truncates_exactly,
    test_weights_change_in_flight,
)
from test_windows import (
    batches,
    policies,
    test_what_is_in_flight_and_another_process_change_nothing,
    test_windows_of_samples_that_are_answered,
)
from tiny_engine import TIGHT, Tiny

from podrl.models.config import LoraConfig
from podrl.models.hf_config import config_from_hf
from podrl.types import Policy

__all__ = [
    "batches",
    "play",
    "policies",
    "roomy",
    "test_any_order_gives_the_same_bits",
    "test_edges",
    "test_extended_samples_equal_full_forward",
    "test_rows_hold_what_was_sampled_and_given",
    "test_samples_do_not_depend_on_when_answers_come",
    "test_spills_change_nothing",
    "test_stop_string_truncates_exactly",
    "test_weights_change_in_flight",
    "test_what_is_in_flight_and_another_process_change_nothing",
    "test_windows_of_samples_that_are_answered",
]
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,  # with 1e-6, results in float32 differ by 2e-4 from results in float64
}


@pytest.fixture(scope="session")
def tiny():
    lora = LoraConfig(rank=2, alpha=4.0, pattern="in_proj_.*|out_proj")
    return Tiny("data=2", 2, dataclasses.replace(config_from_hf(QWEN3_5), lora=lora))


@pytest.fixture(scope="session")
def tight(tiny):
    return tiny.worker(TIGHT)


@pytest.fixture(scope="session")
def policy(tiny):
    return Policy(tiny.params, 7)
