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
from podrl.models.config import LoraConfig, gemma2_config
from podrl.models.parameters import abstract_params
from podrl.offload import HOST, copier, tree_on_host
from podrl.plan.chips import parse_topology, prepare
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


def test_a_frozen_base_is_copied_once_forward_and_once_backward(monkeypatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    machine = parse_topology("v5e:2x2", key="--trainer")
    mesh, model = make_mesh("fsdp=4", machine.devices()), dataclasses.replace(MODEL, lora=LoraConfig(rank=16))
    found = {}
    for place in ("none", "base"):
        training = RLTrainingConfig(eval_every_n_steps=0, dtype="bfloat16", remat="full", offload=place)
        optimizer, loss = training.optimizer(), PolicyLoss(KLLossSettings())
        shape = pack_shape(training, mesh, sequences=64, max_length=512, group_size=4, max_prompt_length=128)
        step: Any = make_train_step(model, loss, optimizer, mesh, dtype="bfloat16", remat=training.remat)
        state, frozen = state_lib.abstract_state(model, optimizer, mesh, training.param_dtype)
        held = device_bytes(frozen)
        frozen = training.place_frozen(frozen, model.lora, mesh)
        batch = state_lib.abstract_batch(loss.rows, shape, mesh)
        lower = lambda step=step, state=state, frozen=frozen, batch=batch: step.lower(state, frozen, batch)  # noqa: E731
        program = Program("train step", TRAINER, lower, 1.0, trips=lambda depth: 3.0)
        found[place] = measure(program, machine.chip, quick=True), held - device_bytes(frozen)
    (here, none), (there, away) = found["none"], found["base"]
    assert none == 0 and away > 2**27 and here.host_s == 0
    assert there.host == pytest.approx(away, rel=0.01)
    assert there.host_s == pytest.approx(3 * 2 * away / machine.chip.host_rate, rel=0.01)
    assert there.peak < here.peak - 0.8 * away, (here.peak, there.peak, away)


def _measured(param_dtype: Any, *, hosted: bool) -> tuple[CompileResult, float]:
    """Compiles an update for four chips: (its measurements, bytes per chip of optimizer state on the host)."""
    machine = parse_topology("v5e:2x2", key="--trainer")
    mesh = make_mesh("fsdp=4", machine.devices())
    model = MODEL
    training = RLTrainingConfig(
        eval_every_n_steps=0, max_steps=1, dtype="bfloat16", param_dtype=param_dtype, remat="full"
    )
    optimizer, loss = dataclasses.replace(training.optimizer(), on_host=hosted), PolicyLoss(KLLossSettings())
    shape = pack_shape(training, mesh, sequences=8, max_length=512, group_size=4, max_prompt_length=128)
    step: Any = make_train_step(
        model, loss, optimizer, mesh, dtype="bfloat16", param_dtype=param_dtype, remat=training.remat
    )
    state, frozen = state_lib.abstract_state(model, optimizer, mesh, param_dtype)
    batch = state_lib.abstract_batch(loss.rows, shape, mesh)
    program = Program("train step", TRAINER, lambda: step.lower(state, frozen, batch), 1.0)
    away = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding.memory_kind == HOST]
    return measure(program, machine.chip, quick=True), sum(x.size * x.dtype.itemsize for x in away) / mesh.size


def test_a_copy_of_the_reference_takes_the_seconds_of_its_bytes(monkeypatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
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
def test_the_peak_falls_by_the_state_that_is_on_the_host(monkeypatch, param_dtype):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (here, none), (there, away) = _measured(param_dtype, hosted=False), _measured(param_dtype, hosted=True)
    assert none == 0 and away > 2**28
    assert there.host == pytest.approx(away, rel=0.01)
    assert there.peak < here.peak - 0.8 * away, (here.peak, there.peak, away)
