"""Rows cut along time make the same update: packed rows, shared prompts, adapters, the critic, every kind of heads."""

import dataclasses

import jax
import numpy as np
import pytest

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.trainer.objective import CrossEntropy, SupervisedRows

# Entries of gradients of norm 5, in float32.
SAME = 2e-6
# 4 query heads, 2 of keys: exchanged, repeated, both with heads cut; the last two gather keys.
MESHES = ["seq=2", "fsdp=2,seq=4", "data=2,seq=2,tensor=2", "seq=8", "seq=4,tensor=2"]


def _update(case, loss, **batch):
    """Makes an update: (parameters before minus after, metrics); with SGD at rate 1, the gradient."""
    before = jax.tree.map(np.asarray, case.state()[0].params)
    state, metrics = case.step(loss)(*case.state(), case.batch(**batch))
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return change, {name: float(value) for name, value in metrics.items()}


def _assert_same(got, expected):
    (change, metrics), (expected_change, expected_metrics) = got, expected
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(expected_change)) > 1e-2
    for x, y in zip(jax.tree.leaves(change), jax.tree.leaves(expected_change), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=SAME)
    assert metrics.keys() == expected_metrics.keys()
    for name in metrics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("spec", MESHES)
def test_packed_rows(tiny, spec):
    loss = PolicyLoss(KLLossSettings())
    _assert_same(_update(tiny(spec), loss), _update(tiny(), loss))


@pytest.mark.parametrize("kv", [1, 4])
def test_heads(tiny, kv):
    heads = lambda case: dataclasses.replace(case, config=dataclasses.replace(case.config, num_kv_heads=kv))  # noqa: E731
    _assert_same(
        _update(heads(tiny("fsdp=2,seq=4")), CrossEntropy(), kind=SupervisedRows),
        _update(heads(tiny()), CrossEntropy(), kind=SupervisedRows),
    )


def test_adapters(tiny):
    loss = PolicyLoss(KLLossSettings())
    _assert_same(_update(tiny("fsdp=2,seq=2", lora=2), loss), _update(tiny(lora=2), loss))
