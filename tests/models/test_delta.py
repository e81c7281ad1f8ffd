"""The gated delta rule in chunks equals the rule token by token, for packed rows with shared beginnings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.models import delta

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, H, U = 2, 6, 5
# (tokens, number of the segment it goes on from or 0): prompts with samples, sequences alone, padding behind.
ROWS = (
    ((7, 0), (9, 1), (2, 1), (1, 1), (5, 0), (3, 0), (6, 6)),
    ((3, 0), (17, 0), (1, 2), (4, 2), (1, 0), (1, 5), (1, 5)),
    ((8, 0), (8, 1), (8, 1), (8, 0), (3, 0)),
)


def layout(T=40):
    segment_BT, prefix_BT = np.zeros((2, len(ROWS), T), np.int32)
    for row, parts in enumerate(ROWS):
        at = 0
        for number, (size, prefix) in enumerate(parts, 1):
            segment_BT[row, at : at + size], prefix_BT[row, at : at + size] = number, prefix
            at += size
    return segment_BT, prefix_BT


def inputs(B, T, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k = (delta.unit(jax.random.normal(key, (B, T, N, H))) for key in keys[:2])
    decay = -jax.nn.softplus(jax.random.normal(keys[3], (B, T, N)))
    return q, k, jax.random.normal(keys[2], (B, T, N, U)), decay, jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, N)))


def one_by_one(arrays, segment_T, prefix_T):
    """Outputs and the last state of one row, by `step`, each segment from the state at the end of the one before."""
    T = len(segment_T)
    out, ends, state = [], {0: jnp.zeros((1, N, H, U))}, None
    for t in range(T):
        if segment_T[t] == 0:
            out.append(jnp.zeros((N, U)))
            continue
        if t == 0 or segment_T[t] != segment_T[t - 1]:
            state = ends[int(prefix_T[t])]
        y, state = delta.step(state, *(x[t][None] for x in arrays))
        ends[int(segment_T[t])] = state
        out.append(y[0])
    return jnp.stack(out), state[0]


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_of_packed_rows_equal_tokens_one_by_one(chunk):
    segment_BT, prefix_BT = layout()
    arrays = inputs(*segment_BT.shape)
    chunks = delta.cut(jnp.asarray(segment_BT), jnp.asarray(prefix_BT), chunk=chunk)
    out_BTNU, state_BNHU = jax.jit(delta.over_rows)(*arrays, chunks)
    for b in range(len(ROWS)):
        want_TNU, want_NHU = one_by_one([x[b] for x in arrays], segment_BT[b], prefix_BT[b])
        np.testing.assert_allclose(out_BTNU[b], want_TNU, atol=2e-5)
        np.testing.assert_allclose(state_BNHU[b], want_NHU, atol=2e-5)


def test_a_row_goes_on_from_the_state_of_the_one_before():
    arrays = inputs(2, 21)
    segment_BT = jnp.ones((2, 21), jnp.int32)
    want_BTNU, want_BNHU = delta.over_rows(*arrays, delta.cut(segment_BT, chunk=8))
    first, state = delta.over_rows(*(x[:, :10] for x in arrays), delta.cut(segment_BT[:, :10], chunk=8))
    padded_BT = jnp.pad(segment_BT[:, 10:], ((0, 0), (0, 9)))  # a whole chunk of padding changes no state
    rest = [jnp.pad(x[:, 10:], ((0, 0), (0, 9)) + ((0, 0),) * (x.ndim - 2), constant_values=3.0) for x in arrays]
    chunks = delta.cut(padded_BT, before_B=jnp.ones(2, jnp.int32), chunk=8)
    second, state = delta.over_rows(*rest, chunks, state)
    np.testing.assert_allclose(jnp.concatenate([first, second[:, :11]], axis=1), want_BTNU, atol=2e-5)
    np.testing.assert_allclose(state, want_BNHU, atol=2e-5)


def test_gradients_are_those_of_tokens_one_by_one():
    segment_BT, prefix_BT = (x[:1] for x in layout())
    arrays = [x * 1.0 for x in inputs(*segment_BT.shape)]
    weight_TNU = jax.random.normal(jax.random.key(5), (segment_BT.shape[1], N, U))
    chunks = delta.cut(jnp.asarray(segment_BT), jnp.asarray(prefix_BT), chunk=8)
    got = jax.grad(lambda xs: jnp.sum(delta.over_rows(*xs, chunks)[0][0] * weight_TNU))(arrays)
    want = jax.grad(lambda xs: jnp.sum(one_by_one([x[0] for x in xs], segment_BT[0], prefix_BT[0])[0] * weight_TNU))(
        arrays
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)


def test_the_convolution_reads_through_shared_beginnings():
    segment_BT, prefix_BT = layout()
    x_BTI, weight_WI = jax.random.normal(jax.random.key(0), (3, 40, 4)), jax.random.normal(jax.random.key(1), (4, 4))
    previous_BT = delta.previous(jnp.asarray(segment_BT), jnp.asarray(prefix_BT))
    out_BTI = delta.convolve(x_BTI, weight_WI, previous_BT)
    for b, parts in enumerate(ROWS):
        at = {n: np.flatnonzero(segment_BT[b] == n) for n in range(1, len(parts) + 1)}
        for number, (size, prefix) in enumerate(parts, 1):
            where = [*at.get(prefix, []), *at[number]]
            line = np.pad(np.asarray(x_BTI[b])[where], ((3, 0), (0, 0)))
            want = sum(line[w : w + len(where)] * np.asarray(weight_WI)[w] for w in range(4))
            np.testing.assert_allclose(out_BTI[b][at[number]], want[-size:], atol=1e-5)
