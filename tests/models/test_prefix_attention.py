"""The TPU kernel for shared prompts, in Pallas' interpreter and compiled for TPUs, equals dense attention."""

import functools
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh.build import make_mesh
from podrl.models.attention import _kernel, attention, dense
from podrl.models.config import GLOBAL_WINDOW
from podrl.models.prefix_attention import _bounds, needed_blocks
from podrl.plan.chips import parse_topology, prepare

pytestmark = pytest.mark.usefixtures("quick_compilation")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")

# For each segment of a row: (number of its tokens, number of the segment that it continues or 0[, number of tokens of
# that segment's sequence that it continues; by default all]).
ROWS = (
    ((150, 0), (60, 1), (131, 1), (1, 1), (30, 0)),  # one prompt with three samples, and a separate sequence
    # A tree of two levels. Padding follows; it fills a whole tile if rows have 512 tokens.
    ((30, 0), (140, 0), (60, 2), (30, 3), (40, 3, 160), (50, 2, 70)),
)


def layout(T, rows=ROWS):
    """Packs `rows` into rows of T tokens; returns segment_BT, (last_BT, position_BT)."""
    segment_BT, last_BT, position_BT = np.zeros((3, len(rows), T), np.int32)
    for row, parts in enumerate(rows):
        at, paths = 0, [np.zeros(0, np.int64)]  # for each segment: indices of its tokens, and of its whole sequence
        for number, (size, parent, *shared) in enumerate(parts, 1):
            before = paths[parent][: shared[0] if shared else None]
            own = np.arange(at, at + size)
            paths.append(np.append(before, own))
            segment_BT[row, own], position_BT[row, own] = number, len(before) + np.arange(size)
            last_BT[row, paths[-1]] = number
            at += size
    return jnp.asarray(segment_BT), (jnp.asarray(last_BT), jnp.asarray(position_BT))


def qkv(T, N, K, H, dtype, B=2):
    keys = jax.random.split(jax.random.key(3), 3)
    return [jax.random.normal(key, (B, T, heads, H)).astype(dtype) for key, heads in zip(keys, (N, K, K), strict=True)]


def values_and_grads(run, arrays, segment_BT, windows):
    """Computes, for every window, the outputs of real tokens and the gradients with respect to unscaled queries, keys
    and values; returns all in float32."""
    real_BT = (segment_BT > 0)[:, :, None, None]

    def total(q_BTNH, k_BTKH, v_BTKH, window):
        out_BTNH = run((q_BTNH * q_BTNH.shape[3] ** -0.5).astype(q_BTNH.dtype), k_BTKH, v_BTKH, window)
        weight_BTNH = jnp.where(real_BT, jax.random.normal(jax.random.key(9), q_BTNH.shape), 0.0)
        return jnp.sum(out_BTNH * weight_BTNH), out_BTNH

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    found = []
    for window in windows:
        grads, out_BTNH = compiled(*arrays, jnp.int32(window))
        assert jnp.isfinite(out_BTNH).all()  # outputs on padding are finite, too
        found.append([np.asarray(x, np.float32) for x in (jnp.where(real_BT, out_BTNH, 0), *grads)])
    return found


def compare(found, expected, atol):
    for some, others in zip(found, expected, strict=True):
        for x, y in zip(some, others, strict=True):
            assert np.abs(y).max() > 0.1
            np.testing.assert_allclose(x, y, atol=atol, rtol=0)


WINDOWS = (GLOBAL_WINDOW, 100)


@pytest.mark.parametrize(
    ("T", "block", "heads", "H", "softcap", "dtype", "atol"),
    [
        (384, 128, (4, 2), 64, 5.0, jnp.float32, 1e-5),
        (384, 256, (2, 2), 64, 0.0, jnp.float32, 1e-5),  # the last block reaches beyond the row
        (512, 512, (2, 1), 128, 0.0, jnp.bfloat16, 2e-2),  # one block
        (640, 256, (3, 1), 64, 5.0, jnp.bfloat16, 2e-2),
    ],
)
def test_the_kernel_equals_dense(T, block, heads, H, softcap, dtype, atol):
    segment_BT, shared = layout(T)
    arrays = qkv(T, *heads, H, dtype)

    def kernel(q, k, v, window):
        return attention(
            q,
            k,
            v,
            segment_BT,
            shared=shared,
            window=window,
            softcap=softcap,
            form="prefix",
            block=block,
            interpret=True,
        )

    def reference(q, k, v, window):
        return dense(q, k, v, segment_BT, shared=shared, window=window, softcap=softcap)

    run = functools.partial(values_and_grads, arrays=arrays, segment_BT=segment_BT, windows=WINDOWS)
    compare(run(kernel), run(reference), atol)


def _mask(T, rows, window):
    """Returns which tokens each token sees: the tokens on its path that are in its window."""
    seen_BTT = np.zeros((len(rows), T, T), bool)
    for row, parts in enumerate(rows):
        at, paths = 0, [np.zeros(0, np.int64)]
        for size, parent, *shared in parts:
            before = paths[parent][: shared[0] if shared else None]
            paths.append(np.append(before, np.arange(at, at + size)))
            for place in range(len(before), len(paths[-1])):
                seen_BTT[row, paths[-1][place], paths[-1][max(0, place + 1 - window) : place + 1]] = True
            at += size
    return seen_BTT


@pytest.mark.parametrize("window", [GLOBAL_WINDOW, 400, 200])
def test_blocks_are_visited_where_something_is_seen(window):
    rows = (((300, 0), *[(210, 1)] * 5), ((90, 0), (700, 0), (250, 2), (129, 0)), ((1, 0), (3, 1)))
    rows += (((512, 0), (256, 1), (300, 2), (200, 2), (130, 1, 384)),)
    T, size = 1536, 256
    segment_BT, shared = layout(T, rows)
    bounds = (segment_BT, *shared)
    needed = np.asarray(needed_blocks(_bounds(*bounds, 0), jnp.int32(window), size))
    n = T // size
    exact = _mask(T, rows, window).reshape(len(rows), n, size, n, size).any((2, 4)) | np.eye(n, dtype=bool)
    assert not (exact & ~needed).any()
    if window == GLOBAL_WINDOW:
        np.testing.assert_array_equal(needed, exact)
        assert needed.sum() < 0.75 * len(rows) * n * (n + 1) / 2
    else:  # a tile of 128 with parts of two segments counts for both, so a few blocks more are visited
        assert needed.sum() <= exact.sum() + 3


def test_blocks_that_nobody_sees_are_not_read():
    """NaN in the first sequence's values does not reach the second and third sequence."""
    T, block = 640, 128
    rows = (((256, 0), (128, 0), (256, 2)),)
    segment_BT, shared = layout(T, rows)
    q, k, v = qkv(T, 2, 1, 64, jnp.float32, B=1)
    alone_T = np.asarray(segment_BT[0] == 1)
    bad = [jnp.where(alone_T[:, None, None], np.nan, x) for x in (q, k, v)]
    options: dict[str, Any] = dict(shared=shared, window=jnp.int32(GLOBAL_WINDOW), softcap=0.0)

    def total(q, k, v):
        out = attention(q, k, v, segment_BT, form="prefix", block=block, interpret=True, **options)
        return jnp.sum(jnp.where(alone_T[:, None, None], 0.0, out) ** 2), out

    grads, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*bad)
    expected = dense(q, k, v, segment_BT, **options)
    assert np.isnan(out[0, alone_T]).all()
    np.testing.assert_allclose(out[0, ~alone_T], expected[0, ~alone_T], atol=1e-5)
    assert all(np.isfinite(x[0, ~alone_T]).all() and np.abs(x[0, ~alone_T]).max() > 1e-3 for x in grads)


def test_a_mesh_does_not_change_the_kernel():
    T = 384
    segment_BT, shared = layout(T)
    arrays = qkv(T, 4, 2, 64, jnp.float32)
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])

    def run(q, k, v, window, mesh):
        return attention(
            q,
            k,
            v,
            segment_BT,
            shared=shared,
            window=window,
            softcap=0.0,
            mesh=mesh,
            form="prefix",
            block=128,
            interpret=True,
        )

    alone, spread = (
        values_and_grads(functools.partial(run, mesh=where), arrays, segment_BT, (100,)) for where in (None, mesh)
    )
    compare(spread, alone, 1e-6)


def test_the_form_on_tpu():
    assert _kernel((2, 256, 4, 64), (5,), shared=True) == _kernel((2, 256, 4, 64), (), shared=True) == "prefix"
    assert _kernel((2, 256, 4, 64), (5,), shared=False) == "splash"
    assert _kernel((2, 256, 4, 64), (), shared=False) == _kernel((2, 200, 4, 64), (5,), shared=True) == "blockwise"


def test_what_the_kernel_does_not_take_is_refused():
    segment_BT, shared = layout(400)
    q, k, v = qkv(400, 2, 1, 64, jnp.float32)
    options: dict[str, Any] = dict(window=jnp.int32(5), softcap=0.0, form="prefix")
    with pytest.raises(
        ValueError, match=r"2 rows of 400 tokens with heads of 64: .* a multiple of 128 and .*'blockwise'"
    ):
        attention(q, k, v, segment_BT, shared=shared, **options)
    with pytest.raises(ValueError, match=r"form='prefix' needs shared=\(last_BT, position_BT\)"):
        attention(q, k, v, segment_BT, **options)


@pytest.mark.nightly("podrl/models")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_compiles_for_tpu(topology, monkeypatch: pytest.MonkeyPatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    mesh = make_mesh("fsdp=2,tensor=2", parse_topology(topology, key="--trainer").devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))

    def total(q, k, v, segment, prefix, position, window, softcap):
        out = attention(q, k, v, segment, shared=(prefix, position), window=window, softcap=softcap, mesh=mesh)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    # The first row ends inside a block of 512 tokens. In the second case 8 query heads of 256 per key/value head halve
    # the block to 256 tokens.
    for T, N, K, H, dtype, softcap in ((2688, 8, 4, 128, jnp.bfloat16, 0.0), (1024, 16, 2, 256, jnp.float32, 50.0)):
        of = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind, sharding=rows)  # noqa: E731
        bounds = [of(4, T, kind=jnp.int32)] * 3
        window = jax.ShapeDtypeStruct((), jnp.int32)
        grads = jax.jit(jax.grad(functools.partial(total, softcap=softcap), argnums=(0, 1, 2)))
        text = grads.lower(of(4, T, N, H), of(4, T, K, H), of(4, T, K, H), *bounds, window).compile().as_text() or ""
        assert all(f"prefix_attention_{name}" in text for name in ("fwd", "dq", "dkv"))
