"""Makes updates of the tiny model, and compares them."""

import jax
import numpy as np
import pytest

# Tolerance for the entries of a gradient of norm 5. In float32 their rounding errors add up to about 1e-6.
# trainer/test_float64.py runs tests in float64, where the tolerance is 1e-12.
SAME = 2e-6 if np.dtype(np.float32).itemsize == 4 else 1e-12


def update(case, loss, *, balance_coef=0.0, **batch):
    """Makes an update; returns (parameters before minus parameters after, metrics). With SGD at rate 1 this difference
    is the gradient."""
    before = jax.tree.map(np.asarray, case.state()[0].params)
    state, metrics = case.step(loss, balance_coef=balance_coef)(*case.state(), case.batch(**batch))
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return change, {name: float(value) for name, value in metrics.items()}


def assert_same(got, expected, *, atol=SAME, rel=1e-4):
    """Compares two updates: entries of the gradients by `atol`, metrics by `rel`."""
    (change, metrics), (expected_change, expected_metrics) = got, expected
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(expected_change)) > 1e-2
    for x, y in zip(jax.tree.leaves(change), jax.tree.leaves(expected_change), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)
    assert metrics.keys() == expected_metrics.keys()
    for name in metrics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=rel, abs=1e-5), name
