"""The real update on rows that share prompts, compiled for TPUs: it has the kernel, and it moves fewer bytes."""

import importlib.util
import os

import numpy as np
import pytest

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.mesh.build import make_mesh
from podrl.models.config import gemma2_config
from podrl.plan.chips import parse_topology, prepare
from podrl.plan.compile import QUICK
from podrl.plan.hlo import ProgramCost, cost_of
from podrl.trainer import state as state_lib
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape
from podrl.trainer.packing import SharedPrefixes, place
from podrl.trainer.step import make_train_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py"),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]"),
]
SAMPLES, PROMPT, LONGEST = 8, 512, 1024
KERNELS = ("prefix_attention_fwd", "prefix_attention_dq", "prefix_attention_dkv")


def _update(topology: str, *, share: bool, spec: str = "fsdp=1", chips: int = 1) -> tuple[str, ProgramCost]:
    """Compiles an update on one prompt's samples; returns the program's text, and its cost per chip if all samples have
    full length."""
    machine = parse_topology(topology, key="--trainer")
    mesh = make_mesh(spec, machine.devices()[:chips])
    model = gemma2_config(
        vocab_size=4096, num_layers=4, model_dim=512, ffn_dim=2048, num_heads=8, num_kv_heads=4, head_dim=64, window=256
    )
    training = RLTrainingConfig(
        eval_every_n_steps=0, max_steps=1, dtype="bfloat16", max_seq_token_per_tpu=8192, share_prompts=share
    )
    shape = pack_shape(
        training, mesh, sequences=SAMPLES, max_length=LONGEST, group_size=SAMPLES, max_prompt_length=PROMPT
    )
    prefixes = SharedPrefixes(np.zeros(SAMPLES, np.int64), np.full(SAMPLES, PROMPT - 1))
    filled = place(np.full(SAMPLES, LONGEST), shape, prefixes).micro_batches
    loss, optimizer = PolicyLoss(KLLossSettings()), training.optimizer()
    step = make_train_step(model, loss, optimizer, mesh, dtype=training.dtype, remat=training.remat)
    state, frozen = state_lib.abstract_state(model, optimizer, mesh, training.param_dtype)
    lowered = step.lower(state, frozen, state_lib.abstract_batch(loss.rows, shape, mesh))
    text = lowered.compile(compiler_options=dict(QUICK) | dict(machine.chip.compiler)).as_text() or ""
    return text, cost_of(text, trips=lambda depth: float(filled))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("compiler")
def test_an_update_that_shares_prompts_moves_fewer_bytes():
    text, sharing = _update("v5e:2x2", share=True)
    assert all(name in text for name in KERNELS) and "splash" not in text
    assert not sharing.uncounted and sharing.flops > 0
    text, alone = _update("v5e:2x2", share=False)
    assert "splash" in text and "prefix_attention" not in text
    assert sharing.bytes < 0.7 * alone.bytes, (sharing.bytes, alone.bytes)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_an_update_of_rows_cut_along_time_exchanges_heads(topology: str):
    share = topology != "v5e:2x2"
    text, cost = _update(topology, share=share, spec="seq=4", chips=4)
    assert all(name in text for name in KERNELS) if share else "splash" in text
    assert not cost.uncounted
    kinds = {collective.kind for collective in cost.collectives}
    assert "all-to-all" in kinds, kinds
