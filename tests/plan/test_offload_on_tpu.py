"""Optimizer state and reference in the host's memory, compiled for TPUs: the chips hold less, and copies take time."""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.job.weights import device_bytes
from podrl.mesh.build import make_mesh
from podrl.models.config import LoraConfig, ModelConfig, gemma2_config
from podrl.models.parameters import abstract_params
from podrl.offload import HOST, copier, tree_on_host
from podrl.plan.chips import CHIPS, parse_topology, prepare
from podrl.plan.compile import CompileResult, measure
from podrl.plan.programs import TRAINER, Program
from podrl.trainer import state as state_lib
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape
from podrl.trainer.step import make_train_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly("podrl/plan", "podrl/trainer", "podrl/offload.py"),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]"),
]


MODEL = gemma2_config(
    vocab_size=8192, num_layers=8, model_dim=1024, ffn_dim=8192, num_heads=8, num_kv_heads=4, head_dim=128
)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():  # monkeypatch restores the variables that `prepare` sets
        monkeypatch.setenv(name, value)


def _measured(model: ModelConfig, *, sequences: int, **training: Any) -> tuple[CompileResult, float]:
    """Compiles an update for four v5e chips; returns its measurements, and the bytes per chip of its arguments on the
    host.

    A loop whose number of rounds is not in the program counts as three rounds.

    Args:
      model: the model.
      sequences: number of sequences of the update.
      **training: fields of RLTrainingConfig.
    """
    machine = parse_topology("v5e:2x2", key="--trainer")
    mesh = make_mesh("fsdp=4", machine.devices())
    config = RLTrainingConfig(eval_every_n_steps=0, max_steps=1, dtype="bfloat16", remat="full", **training)
    optimizer, loss = config.optimizer(), PolicyLoss(KLLossSettings())
    shape = pack_shape(config, mesh, sequences=sequences, max_length=512, group_size=4, max_prompt_length=128)
    of: Any = {"dtype": config.dtype, "param_dtype": config.param_dtype, "remat": config.remat}
    step: Any = make_train_step(model, loss, optimizer, mesh, **of)
    state, frozen = state_lib.abstract_state(model, optimizer, mesh, config.param_dtype)
    frozen = config.place_frozen(frozen, model.lora, mesh)
    batch = state_lib.abstract_batch(loss.rows, shape, mesh)
    program = Program("train step", TRAINER, lambda: step.lower(state, frozen, batch), 1.0, trips=lambda depth: 3.0)
    away = [leaf for leaf in jax.tree.leaves((state.opt_state, frozen)) if leaf.sharding.memory_kind == HOST]
    return measure(program, machine.chip, quick=True), sum(x.size * x.dtype.itemsize for x in away) / mesh.size


def test_a_frozen_base_is_copied_once_forward_and_once_backward():
    model = dataclasses.replace(MODEL, lora=LoraConfig(rank=16))
    here, none = _measured(model, sequences=64, offload="none")
    there, away = _measured(model, sequences=64, offload="base")
    assert none == 0 and away > 2**27 and here.host_s == 0
    assert there.host == pytest.approx(away, rel=0.01)
    assert there.host_s == pytest.approx(3 * 2 * away / CHIPS["v5e"].host_rate, rel=0.01)
    assert there.peak < here.peak - 0.8 * away, (here.peak, there.peak, away)


def test_a_copy_of_the_reference_takes_the_seconds_of_its_bytes():
    machine = parse_topology("v5e:2x2", key="--trainer")
    params = abstract_params(MODEL, make_mesh("fsdp=4", machine.devices()), jnp.dtype("float32"))
    waiting = tree_on_host(params, make_mesh("fsdp=4", machine.devices()), "trainer.offload='reference'")
    copy: Any = copier(waiting)
    found = measure(Program("copy", TRAINER, lambda: copy.lower(waiting), 1.0), machine.chip, quick=True)
    size = device_bytes(params)
    assert device_bytes(waiting) == 0 and size > 2**27
    assert (found.host, found.peak) == (pytest.approx(size, rel=0.01), pytest.approx(size, rel=0.01))
    assert found.bound == "host" and found.seconds == pytest.approx(size / machine.chip.host_rate, rel=0.01)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_peak_falls_by_the_state_that_is_on_the_host(param_dtype):
    here, none = _measured(MODEL, sequences=8, param_dtype=param_dtype)
    there, away = _measured(MODEL, sequences=8, param_dtype=param_dtype, offload="optimizer")
    assert none == 0 and away > 2**28
    assert there.host == pytest.approx(away, rel=0.01)
    assert there.host_s == pytest.approx(away / CHIPS["v5e"].host_rate, rel=0.01)
    assert there.peak < here.peak - 0.8 * away, (here.peak, there.peak, away)
