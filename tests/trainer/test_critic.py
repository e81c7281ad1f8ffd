"""The critic: values do not depend on packing and sharding, and the gradient of its loss is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import packed_rows

from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.mesh.rules import batch_shards
from podrl.models import decoder, parameters, scalar
from podrl.trainer import packing
from podrl.trainer import state as state_lib
from podrl.trainer.critic import make_critic_step, make_value_fn
from podrl.trainer.pack_shape import PackShape

B, T = 8, 20
# Tolerance as in updates.py, but larger in float32: the critic's gradient is several times larger.
SAME = 5e-6 if np.dtype(np.float32).itemsize == 4 else 1e-12


def _params(case):
    """Draws a critic on the case's decoder with a random head."""
    params = scalar.on_trunk(case.params(), case.config, case.mesh, jnp.dtype(case.dtype))
    head_D1 = np.random.default_rng(5).normal(size=params[scalar.HEAD].shape).astype(np.float32)
    return {**params, scalar.HEAD: jax.device_put(head_D1, params[scalar.HEAD].sharding)}


def _packed(case, *, row, rows=4):
    length_B, samples = case.samples()
    shards = batch_shards(case.mesh)
    shape = PackShape.for_worst_case(B, T, max_tokens_per_row=row, rows_per_micro_batch=rows, shards=shards)
    placement = packing.place(length_B, shape)
    rng = np.random.default_rng(3)
    value_BT, return_BT = (rng.normal(size=(B, T)).astype(np.float32) for _ in range(2))
    batch = packed_rows(
        CriticRows,
        placement,
        tokens_BT=samples["tokens_BT"],
        mask_BT=samples["mask_BT"],
        value_BT=value_BT,
        return_BT=return_BT,
    )
    return placement, batch, (length_B, samples, value_BT, return_BT)


def _naive_values(params, config, tokens_BT, length_B):
    place_BT = jnp.tile(jnp.arange(T), (B, 1))
    segment_BT = (place_BT < jnp.asarray(length_B)[:, None]).astype(jnp.int32)
    hidden_BTD = decoder.hidden(params, jnp.asarray(tokens_BT), segment_BT, place_BT, config)
    return jnp.pad((hidden_BTD @ params[scalar.HEAD])[:, :-1, 0], ((0, 0), (1, 0)))


def _change(case, batch, loss):
    params = _params(case)
    before = jax.tree.map(np.asarray, params)
    state = state_lib.init_train_state(params, case.optimizer, case.mesh)
    step = make_critic_step(case.config, loss, case.optimizer, case.mesh, dtype=case.dtype)
    state, metrics = step(state, {}, state_lib.put_batch(batch, case.mesh))
    return jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), metrics


@pytest.mark.parametrize("spec", ["fsdp=1", "fsdp=2,tensor=2", "fsdp=2,seq=4"])
def test_value_is_what_the_head_says_before_each_token(tiny, spec):
    case = tiny(spec)
    placement, batch, (length_B, samples, *_) = _packed(case, row=40)
    value_ABT = make_value_fn(case.config, case.mesh)(_params(case), state_lib.put_batch(batch.layout(), case.mesh))
    value_BT = placement.unpack(state_lib.fetch(value_ABT, case.mesh), T)
    one = tiny()
    expected_BT = np.asarray(_naive_values(_params(one), one.config, samples["tokens_BT"], length_B))
    real_BT = np.arange(T) < length_B[:, None]
    np.testing.assert_allclose(value_BT, np.where(real_BT, expected_BT, 0.0), atol=2e-5)
    assert np.abs(value_BT).max() > 0.5 and (value_BT[:, 0] == 0).all()


def test_gradient_equals_the_naive_one_on_any_mesh_and_packing(tiny):
    case = tiny()
    loss = functools.partial(value_loss, clip_range=0.3)
    _, batch, (length_B, samples, value_BT, return_BT) = _packed(case, row=20, rows=8)
    mask_BT = np.asarray(samples["mask_BT"], bool)

    def naive(params):
        now_BT = _naive_values(params, case.config, samples["tokens_BT"], length_B)
        near_BT = jnp.clip(now_BT, value_BT - 0.3, value_BT + 0.3)
        worst_BT = jnp.maximum((now_BT - return_BT) ** 2, (near_BT - return_BT) ** 2)
        return 0.5 * jnp.where(mask_BT, worst_BT, 0.0).sum() / mask_BT.sum()

    expected_loss, grads = jax.jit(jax.value_and_grad(naive))(_params(case))
    change, metrics = _change(case, batch, loss)
    assert float(metrics["critic/vf_loss"]) == pytest.approx(float(expected_loss), rel=1e-5)
    assert float(metrics["critic/vf_clipfrac"]) > 0 and float(metrics["critic/grad_norm"]) > 0
    for x, y in zip(jax.tree.leaves(change), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=SAME)
    for spec in ("data=2,fsdp=2", "fsdp=2,seq=4"):
        other = tiny(spec)
        packed, _ = _change(other, _packed(other, row=60)[1], loss)
        for x, y in zip(jax.tree.leaves(packed), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=SAME)


def test_a_fresh_critic_says_0_and_leaves_the_actor_alone(tiny):
    case = tiny(lora=2)
    actor = case.params()
    params = scalar.on_trunk(actor, case.config, case.mesh, jnp.dtype("float32"))
    _, batch, _ = _packed(case, row=40)
    value_ABT = make_value_fn(case.config, case.mesh)(params, state_lib.put_batch(batch.layout(), case.mesh))
    assert (np.asarray(value_ABT) == 0).all()
    trainable, frozen = scalar.split_trainable(params, case.config)
    assert set(trainable) == {"layers", scalar.HEAD}
    assert all(parameters.is_adapter(name) for name in trainable["layers"])
    # Trained leaves are copies, so that donating them does not free the actor's; the base is shared.
    name = next(iter(trainable["layers"]))
    pointer = lambda x: x.addressable_shards[0].data.unsafe_buffer_pointer()  # noqa: E731
    assert pointer(trainable["layers"][name]) != pointer(actor["layers"][name])
    assert pointer(frozen["layers"]["q"]) == pointer(actor["layers"]["q"])


def test_masked_nan_has_no_influence(tiny):
    case = tiny()
    _, batch, _ = _packed(case, row=40)
    loss = functools.partial(value_loss, clip_range=0.3)
    clean, _ = _change(case, batch, loss)
    poison = {
        name: np.where(batch.rows.mask_BT > 0, getattr(batch.rows, name), np.nan).astype(np.float32)
        for name in ("value_BT", "return_BT")
    }
    dirty, metrics = _change(case, batch.replace(rows=batch.rows.replace(**poison)), loss)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert float(metrics["critic/nonfinite"]) == 0.0
