"""Memory of compiled programs: less with more recomputation, and never a buffer of all logits."""

import dataclasses
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.policy_rows import ReferencedRows
from podrl.mesh.build import make_mesh
from podrl.mesh.rules import batch_shards
from podrl.models.config import gemma2_config
from podrl.plan.chips import parse_topology, prepare
from podrl.trainer import state as state_lib
from podrl.trainer.logprob import token_logprobs
from podrl.trainer.optimizer import AdamSettings, make_optimizer
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.step import make_train_step

ROWS, T, LAYERS = 8, 256, 6


def compiled_step(mesh, remat, *, dim, head_dim, dtype):
    """Compiles an update from shapes alone; returns its memory analysis."""
    config = gemma2_config(
        vocab_size=512,
        num_layers=LAYERS,
        model_dim=dim,
        ffn_dim=4 * dim,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
    )
    optimizer = make_optimizer(AdamSettings(max_grad_norm=0.0))
    state, frozen = state_lib.abstract_state(config, optimizer, mesh)
    shape = PackShape.for_worst_case(
        ROWS, T, max_tokens_per_row=T, rows_per_micro_batch=ROWS, shards=batch_shards(mesh)
    )
    step = make_train_step(config, PolicyLoss(KLLossSettings()), optimizer, mesh, remat=remat, dtype=dtype)
    return step.lower(state, frozen, state_lib.abstract_batch(ReferencedRows, shape, mesh)).compile().memory_analysis()


def test_what_is_computed_again_is_not_kept():
    """Per token and layer 'dots' keeps 13 D floats (12 D are outputs of projections), and 'full' keeps D floats."""
    mesh = make_mesh("data=1", jax.devices()[:1])
    used = {
        remat: compiled_step(mesh, remat, dim=64, head_dim=16, dtype="float32").temp_size_in_bytes
        for remat in ("none", "dots", "full")
    }
    row = ROWS * T * 64 * 4 * LAYERS  # bytes of D floats per token and layer
    assert used["none"] > used["dots"] + 4 * row, used
    assert used["dots"] > used["full"] + 8 * row, used


@pytest.mark.nightly("podrl/trainer", "podrl/models")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
def test_on_a_tpu_too_and_what_is_offloaded_lies_in_the_hosts_memory(monkeypatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():  # monkeypatch restores the variables that `prepare` sets
        monkeypatch.setenv(name, value)
    mesh = make_mesh("fsdp=4", parse_topology("v5e:2x2", key="--trainer").devices())
    found = {
        remat: compiled_step(mesh, remat, dim=512, head_dim=128, dtype="bfloat16")
        for remat in ("none", "dots", "full", "offload")
    }
    peak = {remat: memory.peak_memory_in_bytes for remat, memory in found.items()}
    row = ROWS * T * 512 * 2 * LAYERS // 4
    assert peak["none"] > peak["dots"] + 2 * row, peak
    assert peak["dots"] > peak["full"] + 4 * row, peak
    assert peak["dots"] > peak["offload"] + 4 * row, peak
    assert found["offload"].host_temp_size_in_bytes > 8 * row
    assert found["dots"].host_temp_size_in_bytes == 0


D, CHUNK = 16, 1 << 16


@pytest.mark.parametrize("backward", [False, True])
def test_log_probabilities_need_nothing_that_grows_with_tokens_times_vocabulary(backward):
    """The bytes of temporaries are a + b T + c V, without a term T V, so their mixed difference vanishes, forward and
    backward."""

    def used(time: int, vocab: int) -> int:
        config = gemma2_config(
            vocab_size=vocab, num_layers=1, model_dim=D, ffn_dim=8, num_heads=2, num_kv_heads=1, head_dim=8
        )
        config = dataclasses.replace(config, logit_softcap=30.0)
        params = {"embed": jax.ShapeDtypeStruct((vocab, D), jnp.float32)}
        hidden_BTD = jax.ShapeDtypeStruct((4, time, D), jnp.float32)
        tokens_BT = np.zeros((4, time), np.int32)

        def loss(params, hidden_BTD):
            found = token_logprobs(params, hidden_BTD, tokens_BT, tokens_BT + 1, config, chunk_elements=CHUNK)
            return sum(x.sum() for x in found)

        run = jax.grad(loss, argnums=(0, 1)) if backward else loss
        return jax.jit(run).lower(params, hidden_BTD).compile().memory_analysis().temp_size_in_bytes

    T, V = 64, 2048
    small, long, wide, both = used(T, V), used(4 * T, V), used(T, 4 * V), used(4 * T, 4 * V)
    logits = 4 * T * V * 4  # bytes of all logits in the smallest case
    assert both - long - wide + small < 0.05 * 9 * logits, (small, long, wide, both)
    assert both < 16 * logits / 4, (small, long, wide, both)
