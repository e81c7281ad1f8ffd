"""Rows cut along time make the same update: packed rows, shared prompts, adapters, the critic, every kind of heads."""

import dataclasses

import pytest
from updates import assert_same, update

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.trainer.objective import CrossEntropy, SupervisedRows

# The model has 4 query heads and 2 key heads. The first mesh exchanges heads, the second repeats key heads, and the
# third does both with heads that are split over the tensor axis. The last two meshes gather keys.
MESHES = ["seq=2", "fsdp=2,seq=4", "data=2,seq=2,tensor=2", "seq=8", "seq=4,tensor=2"]


@pytest.mark.parametrize("spec", MESHES)
def test_packed_rows(tiny, spec):
    loss = PolicyLoss(KLLossSettings())
    assert_same(update(tiny(spec), loss), update(tiny(), loss), rel=1e-5)


@pytest.mark.parametrize("kv", [1, 4])
def test_heads(tiny, kv):
    heads = lambda case: dataclasses.replace(case, config=dataclasses.replace(case.config, num_kv_heads=kv))  # noqa: E731
    assert_same(
        update(heads(tiny("fsdp=2,seq=4")), CrossEntropy(), kind=SupervisedRows),
        update(heads(tiny()), CrossEntropy(), kind=SupervisedRows),
        rel=1e-5,
    )


def test_adapters(tiny):
    loss = PolicyLoss(KLLossSettings())
    assert_same(update(tiny("fsdp=2,seq=2", lora=2), loss), update(tiny(lora=2), loss), rel=1e-5)
