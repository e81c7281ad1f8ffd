"""All forms of attention agree, values and gradients: windows, soft caps, segments, grouped heads, meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from podrl.mesh.build import make_mesh
from podrl.models.attention import attention, dense
from podrl.models.config import GLOBAL_WINDOW

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _inputs(B=2, T=37, N=4, K=2, H=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    q_BTNH, k_BTKH, v_BTKH = (
        jax.random.normal(key, (B, T, heads, H)) for key, heads in zip(keys[:3], (N, K, K), strict=True)
    )
    # Row 0 has two segments and padding; the other rows have one segment each.
    segment_BT = np.ones((B, T), np.int32)
    segment_BT[0] = np.where(np.arange(T) < T // 3, 1, np.where(np.arange(T) < T - 4, 2, 0))
    return q_BTNH * H**-0.5, k_BTKH, v_BTKH, jnp.asarray(segment_BT)


def _values_and_grads(run, inputs, windows):
    """Returns (gradients, outputs) of `run(q, k, v, window)` for every window, from one compiled program."""
    *qkv, segment_BT = inputs

    def total(q_BTNH, k_BTKH, v_BTKH, window):
        out_BTNH = run(q_BTNH, k_BTKH, v_BTKH, window)
        weight_BTNH = jax.random.normal(jax.random.key(9), q_BTNH.shape) * (segment_BT > 0)[:, :, None, None]
        return jnp.sum(out_BTNH * weight_BTNH), out_BTNH

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    return [compiled(*qkv, jnp.int32(window)) for window in windows]


def _compare(found, expected, inputs, atol):
    keep_BT = np.asarray(inputs[3]) > 0
    for (grads, out_BTNH), (expected_grads, expected_BTNH) in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(out_BTNH)[keep_BT], np.asarray(expected_BTNH)[keep_BT], atol=atol)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert float(jnp.abs(expected_grad).max()) > 0.01
            np.testing.assert_allclose(grad, expected_grad, atol=atol)


@functools.cache
def _dense(softcap, windows, **sizes):
    inputs = _inputs(**sizes)
    return _values_and_grads(
        lambda q, k, v, window: dense(q, k, v, inputs[3], window=window, softcap=softcap), inputs, windows
    )


WINDOWS = (GLOBAL_WINDOW, 5, 23)


@pytest.mark.parametrize("block", [64, 16, 10])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_blockwise_equals_dense(block, softcap):
    inputs = _inputs()

    def run(q_BTNH, k_BTKH, v_BTKH, window):
        return attention(
            q_BTNH, k_BTKH, v_BTKH, inputs[3], form="blockwise", block=block, window=window, softcap=softcap
        )

    _compare(_values_and_grads(run, inputs, WINDOWS), _dense(softcap, WINDOWS), inputs, atol=5e-6)


# For each segment of a row: (number of its tokens, number of the segment that it continues or 0, number of tokens of
# that segment's sequence that it continues).
TREES = (
    # Three segments that continue one segment, and a segment alone.
    [(9, 0, 0), (6, 1, 9), (4, 1, 9), (8, 1, 9), (10, 0, 0)],
    [(20, 0, 0), (7, 1, 20), (3, 2, 27), (5, 2, 23), (6, 1, 4)],  # a tree of two levels, then padding
)


def _paths(parts):
    """Lists for each segment of a row its own tokens, and all tokens of its sequence, as indices in the row."""
    at, paths = 0, [([], [])]
    for size, parent, shared in parts:
        own = list(range(at, at + size))
        paths.append((own, paths[parent][1][:shared] + own))
        at += size
    return paths[1:]


def _shared(T=64):
    """Packs `TREES` into rows of T tokens; returns segment_BT, (last_BT, position_BT)."""
    segment_BT, last_BT, position_BT = (np.zeros((2, T), np.int32) for _ in range(3))
    for row, parts in enumerate(TREES):
        for number, (own, whole) in enumerate(_paths(parts), 1):
            segment_BT[row, own], last_BT[row, whole] = number, number
            position_BT[row, whole] = np.arange(len(whole))
    return jnp.asarray(segment_BT), (jnp.asarray(last_BT), jnp.asarray(position_BT))


@functools.cache
def _one_by_one(windows):
    """Computes attention over each sequence of `TREES` separately, as the reference for `_shared`."""
    segment_BT, _ = _shared()

    def run(q_BTNH, k_BTKH, v_BTKH, window):
        out_BTNH = jnp.zeros_like(q_BTNH)
        for row, parts in enumerate(TREES):
            for own, whole in _paths(parts):
                q, k, v = (x[row : row + 1, np.array(whole)] for x in (q_BTNH, k_BTKH, v_BTKH))
                out = dense(q, k, v, jnp.ones((1, len(whole)), jnp.int32), window=window, softcap=3.0)
                out_BTNH = out_BTNH.at[row, np.array(own)].set(out[0, len(whole) - len(own) :])
        return out_BTNH

    return _values_and_grads(run, (*_inputs(T=64)[:3], segment_BT), windows)


@pytest.mark.parametrize(
    "form",
    [dict(form="dense"), dict(block=64), dict(block=8), dict(spec="fsdp=2,tensor=2"), dict(spec="seq=8", block=2)],
)
def test_a_shared_beginning_is_seen_as_if_each_had_its_own(form):
    segment_BT, shared = _shared()
    inputs = (*_inputs(T=64)[:3], segment_BT)
    spec = form.get("spec")
    mesh = make_mesh(spec, jax.devices()[: 8 if "seq" in spec else 4]) if spec else None
    options = {name: value for name, value in form.items() if name != "spec"}

    def run(q_BTNH, k_BTKH, v_BTKH, window):
        return attention(
            q_BTNH, k_BTKH, v_BTKH, segment_BT, shared=shared, mesh=mesh, window=window, softcap=3.0, **options
        )

    found = _values_and_grads(run, inputs, WINDOWS)
    _compare(found, _one_by_one(WINDOWS), inputs, atol=5e-6)
    # Outputs are also finite on padding, and in blocks that hold only padding.
    assert all(jnp.isfinite(out_BTNH).all() for _, out_BTNH in found)


@pytest.mark.parametrize(
    "how",
    [
        dict(form="dense"),
        dict(block=64),
        dict(block=8),
        dict(spec="fsdp=2,tensor=2"),
        dict(spec="tensor=4"),
        dict(spec="seq=4", block=4),  # devices exchange heads
        dict(spec="seq=8", block=2),  # devices gather keys
        dict(spec="seq=2,tensor=2", block=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("shares", [False, True])
def test_sinks_take_weight_as_a_key_of_value_zero_does(how, shares):
    """Compares every form with a softmax over one more column of scores: values and gradients, also of the sinks."""
    segment_BT, shared = _shared()
    arrays = (*_inputs(T=64)[:3], jnp.array([-1.0, 0.5, 2.0, 30.0]))  # the last sink takes all the weight
    spec = how.get("spec")
    mesh = make_mesh(spec, jax.devices()[: math.prod(int(x[-1]) for x in spec.split(","))]) if spec else None
    options = {name: value for name, value in how.items() if name != "spec"}
    real_BT11 = (segment_BT > 0)[:, :, None, None]

    def ours(q_BTNH, k_BTKH, v_BTKH, sink_N):
        return attention(
            q_BTNH, k_BTKH, v_BTKH, segment_BT, shared=shared if shares else None, sinks=(sink_N,), mesh=mesh,
            window=jnp.int32(9), softcap=3.0, **options,
        )  # fmt: skip

    def definition(q_BTNH, k_BTKH, v_BTKH, sink_N):
        k_BTNH, v_BTNH = (jnp.repeat(x, 2, axis=2) for x in (k_BTKH, v_BTKH))
        score_BNTS = 3.0 * jnp.tanh(jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) / 3.0)
        last_BT, position_BT = shared
        back_TS = jnp.arange(64)[:, None] - jnp.arange(64)
        seen_BTS = (segment_BT[:, :, None] == segment_BT[:, None]) & (back_TS >= 0)
        if shares:
            query_BT1 = segment_BT[:, :, None]
            seen_BTS = (segment_BT[:, None] <= query_BT1) & (query_BT1 <= last_BT[:, None]) & (back_TS >= 0)
            back_TS = position_BT[:, :, None] - position_BT[:, None]
        weight_BNTS = jnp.exp(score_BNTS) * (seen_BTS & (back_TS < 9))[:, None]
        weight_BNTS /= jnp.sum(weight_BNTS, axis=-1, keepdims=True) + jnp.exp(sink_N)[:, None, None]
        return jnp.einsum("BNTS,BSNH->BTNH", weight_BNTS, v_BTNH)

    def total(run, *arrays):
        out_BTNH = jnp.where(real_BT11, run(*arrays), 0)
        return jnp.sum(out_BTNH * jax.random.normal(jax.random.key(9), out_BTNH.shape)), out_BTNH

    got, want = (
        jax.jit(jax.grad(functools.partial(total, run), argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        for run in (ours, definition)
    )
    assert np.abs(want[0][3][:3]).min() > 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_splash_is_not_asked_to_share():
    segment_BT, shared = _shared()
    with pytest.raises(ValueError, match="'splash' lets a token see its own segment only: use 'prefix'"):
        attention(*_inputs()[:3], segment_BT, shared=shared, window=jnp.int32(5), softcap=0.0, form="splash")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("spec", ["data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4", "fsdp=2,seq=4", "seq=4,tensor=2"])
def test_mesh_does_not_change_attention(heads, spec):
    mesh: Mesh = make_mesh(spec, jax.devices()[:8])
    sizes = dict(B=4, N=heads[0], K=heads[1], T=64 if "seq" in spec else 37)
    inputs = _inputs(**sizes)

    def run(q_BTNH, k_BTKH, v_BTKH, window):
        return attention(q_BTNH, k_BTKH, v_BTKH, inputs[3], mesh=mesh, block=16, window=window, softcap=5.0)

    _compare(_values_and_grads(run, inputs, (9,)), _dense(5.0, (9,), **sizes), inputs, atol=5e-6)


@pytest.mark.parametrize("shares", [False, True])
def test_sinks_in_the_tpu_kernels(shares):
    _, (last_BT, position_BT) = _shared(T=128)
    q_BTNH, k_BTKH, v_BTKH, segment_BT = _inputs(T=128, N=2, K=1, H=64)
    shared = (last_BT, position_BT) if shares else None
    segment_BT = _shared(T=128)[0] if shares else segment_BT
    how = {"window": jnp.int32(40), "softcap": 0.0, "shared": shared}

    def total(run, q_BTNH, sink_N):
        out_BTNH = run(q_BTNH, k_BTKH, v_BTKH, segment_BT, sinks=(sink_N,), **how)
        return jnp.sum(jnp.where((segment_BT > 0)[:, :, None, None], jnp.sin(out_BTNH), 0))

    form = {"form": "prefix"} if shares else {"form": "splash", "windows": (40,)}
    runs = functools.partial(attention, **form, interpret=True), dense
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, run), argnums=(0, 1)))(q_BTNH, jnp.array([0.5, 2.0]))
        for run in runs
    )
    assert np.abs(want[1][1]).min() > 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("spec", ["", "seq=2"])
def test_splash_equals_dense(spec):
    """Runs the TPU kernel in Pallas' interpreter; the window is picked at run time from the compiled windows."""
    sizes, windows = dict(B=1, T=256, N=2, K=1, H=64), (GLOBAL_WINDOW, 40)
    inputs, mesh = _inputs(**sizes), make_mesh(spec, jax.devices()[:2]) if spec else None

    def run(q_BTNH, k_BTKH, v_BTKH, window):
        return attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            inputs[3],
            form="splash",
            windows=windows,
            interpret=True,
            window=window,
            softcap=5.0,
            mesh=mesh,
        )

    _compare(_values_and_grads(run, inputs, windows), _dense(5.0, windows, **sizes), inputs, atol=2e-5)


def test_blockwise_in_bfloat16_stays_close_to_float32():
    inputs = _inputs(T=64, H=16)
    exact = dense(*inputs, window=jnp.int32(GLOBAL_WINDOW), softcap=0.0)
    narrow = attention(
        *(x.astype(jnp.bfloat16) for x in inputs[:3]),
        inputs[3],
        window=jnp.int32(GLOBAL_WINDOW),
        softcap=0.0,
        block=16,
    )
    assert narrow.dtype == jnp.bfloat16
    real = np.asarray(inputs[3]) > 0
    np.testing.assert_allclose(np.asarray(narrow, np.float32)[real], np.asarray(exact)[real], atol=0.05)


def test_blockwise_memory_grows_linearly():
    """A row that is twice as long needs less than 2.5 times the temporaries, forward and backward."""

    def temporaries(T):
        inputs = _inputs(B=1, T=T, N=2, K=1, H=16)

        def loss(q, k, v):
            return attention(q, k, v, inputs[3], window=jnp.int32(GLOBAL_WINDOW), softcap=0.0, block=64).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*inputs[:3]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.5 * temporaries(1024)


def test_a_token_sees_only_its_segment_window_and_past():
    q_BTNH, k_BTKH, v_BTKH, segment_BT = _inputs()
    run = jax.jit(lambda v: attention(q_BTNH, k_BTKH, v, segment_BT, window=jnp.int32(3), softcap=0.0, block=8))
    jacobian = jax.jacrev(lambda v: run(v)[0].sum((1, 2)))(v_BTKH)[:, 0].sum((2, 3))
    t, s = np.indices(jacobian.shape)
    segment_T = np.asarray(segment_BT)[0]
    seen = (s <= t) & (t - s < 3) & (segment_T[t] == segment_T[s]) & (segment_T[t] > 0)
    real = segment_T > 0
    np.testing.assert_array_equal(np.abs(jacobian)[real] > 1e-12, seen[real])
