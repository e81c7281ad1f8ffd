"""Dropout of adapter inputs depends on seed, step and micro-batch, and acts only in the training step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.models import parameters
from podrl.trainer.step import make_logprob_fn


def _dropping(case, rate):
    return dataclasses.replace(
        case, config=dataclasses.replace(case.config, lora=dataclasses.replace(case.config.lora, dropout=rate))
    )


def _step(case, seed=0):
    return case.step(PolicyLoss(KLLossSettings()), seed=seed)


def _run(case, train_step, *, step=0, **batch):
    """Makes an update at a given step; returns the trainable parameters."""
    state, frozen = case.state()
    state = state.replace(step=jax.device_put(jnp.int32(step), state.step.sharding))
    state, _ = train_step(state, frozen, case.batch(**batch))
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.params)])


def test_without_a_rate_seed_and_step_change_nothing(tiny):
    case = tiny(lora=2)
    np.testing.assert_array_equal(_run(case, _step(case)), _run(case, _step(case, seed=1), step=5))


def test_masks_depend_on_seed_step_and_micro_batch(tiny):
    case = _dropping(tiny(lora=2), 0.5)
    train_step = _step(case)
    first = _run(case, train_step)
    np.testing.assert_array_equal(first, _run(case, train_step))
    assert np.abs(first - _run(case, _step(case, seed=1))).max() > 1e-4
    assert np.abs(first - _run(case, train_step, step=1)).max() > 1e-4
    # Two equal micro-batches drop different inputs: their sum is not twice the first one's gradient.
    equal = {"lengths": [20] * 8, "row": 20, "rows": 4}
    length_B, samples = case.samples(lengths=[20] * 8)
    twice = {name: np.concatenate([x[:4], x[:4]]) for name, x in samples.items()}
    once = _run(case, train_step, **equal | {"rows": 8}, **twice)
    assert len(length_B) == 8 and np.abs(once - _run(case, train_step, **equal, **twice)).max() > 1e-5


def test_a_resumed_run_drops_what_it_would_have_dropped(tiny):
    case = _dropping(tiny(lora=2, learning_rate=1e-2), 0.5)
    state, frozen = case.state()
    train_step = _step(case, seed=3)
    for _ in range(2):
        state, _ = train_step(state, frozen, case.batch())
    saved = jax.tree.map(np.asarray, state)
    final, _ = train_step(state, frozen, case.batch())
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, case.state()[0])
    resumed, _ = _step(case, seed=3)(placed, frozen, case.batch())
    for x, y in zip(jax.tree.leaves(final), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_scoring_never_drops(tiny):
    plain, dropping = tiny(lora=2), _dropping(tiny(lora=2), 0.5)
    params = parameters.join_trainable(*(lambda s: (s[0].params, s[1]))(plain.state()))
    scores = [make_logprob_fn(case.config, case.mesh)(params, plain.batch().layout()) for case in (plain, dropping)]
    np.testing.assert_array_equal(np.asarray(scores[0]), np.asarray(scores[1]))
