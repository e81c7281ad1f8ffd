"""AdamW against optax's, schedules by hand, master copies and moment dtypes, strict promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podrl.trainer.optimizer import AdamSettings, apply_updates, make_optimizer, make_schedule

PARAMS = {"a": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1])}


def _grads(step):
    return jax.tree.map(lambda p: jnp.sin(p * (step + 1)), PARAMS)


def _run(transform, params, steps=5):
    state = transform.init(params)
    for i in range(steps):
        updates, state = transform.update(_grads(i), state, params)
        params = apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_equals_optax(clip):
    config = AdamSettings(learning_rate=0.1, b1=0.8, b2=0.95, weight_decay=0.1, max_grad_norm=clip)
    reference = optax.adamw(0.1, b1=0.8, b2=0.95, eps=1e-8, weight_decay=0.1)
    if clip:
        reference = optax.chain(optax.clip_by_global_norm(clip), reference)
    got, _ = _run(make_optimizer(config).transform, PARAMS)
    expected, _ = _run(reference, PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)


def test_first_update_by_hand():
    """Without decay, Adam's first step is -rate x sign(gradient)."""
    params, _ = _run(make_optimizer(AdamSettings(learning_rate=0.5, max_grad_norm=0.0)).transform, PARAMS, steps=1)
    signs = jax.tree.map(lambda p, g: p - 0.5 * jnp.sign(g), PARAMS, _grads(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), params, signs)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.1 + 0.9 * (0.5 + 0.5**1.5), 0.55, 0.1 + 0.9 * (0.5 - 0.5**1.5), 0.1]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    config = AdamSettings(learning_rate=2.0, schedule=schedule, end_fraction=0.1)
    at = make_schedule(config, warmup_steps=4, decay_steps=8)
    rates = [float(at(jnp.int32(i))) for i in range(9)]
    np.testing.assert_allclose(rates, 2.0 * np.array(expected), rtol=1e-6)


def test_bfloat16_parameters_keep_a_master_copy():
    """Updates far below a bfloat16 step add up, as they would in float32."""
    config = AdamSettings(learning_rate=1e-4, max_grad_norm=0.0)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    wide_start = jax.tree.map(lambda p: p.astype(jnp.float32), narrow)
    params, state = _run(make_optimizer(config).transform, narrow, steps=60)
    expected, _ = _run(make_optimizer(config).transform, wide_start, steps=60)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.master, expected)
    jax.tree.map(lambda x, m: np.testing.assert_array_equal(x, m.astype(jnp.bfloat16)), params, state.master)
    assert any(float(jnp.abs(x - y).max()) > 0 for x, y in zip(*map(jax.tree.leaves, (params, narrow)), strict=True))


def test_moment_dtypes_and_strict_promotion():
    config = AdamSettings(learning_rate=0.1, mu_dtype="bfloat16", nu_dtype="bfloat16", max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("strict"):
        params, state = _run(make_optimizer(config).transform, PARAMS)
    assert state.mu["a"].dtype == state.nu["a"].dtype == jnp.bfloat16
    exact, _ = _run(make_optimizer(AdamSettings(learning_rate=0.1, max_grad_norm=1.0)).transform, PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.02), params, exact)


def test_errors_name_values_and_keys():
    with pytest.raises(
        ValueError, match=r"schedule='cosine' has 5 updates, 5 of them warm-up: raise trainer.max_steps"
    ):
        make_optimizer(AdamSettings(schedule="cosine"), warmup_steps=5, decay_steps=5)
    with pytest.raises(ValueError, match=r"^AdamSettings.b2=1.0 must be a number in \[0, 1\)"):
        AdamSettings(b2=1.0)
    with pytest.raises(ValueError, match=r"^AdamSettings.learning_rate=nan must be a number in \[0, 1000\]"):
        AdamSettings(learning_rate=float("nan"))
