"""Checksums of arrays: equal to numpy's, equal under every layout, changed by every flipped bit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.storage import bits
from podrl.storage.bits import compile_sums, leaf_name, tree_sums


def _hash(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def _by_hand(array):
    """Computes a checksum by its definition, element by element, in Python's integers."""
    words = np.asarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    total = 0
    for place, word in np.ndenumerate(words):
        weight = 1
        for d, i in enumerate(place):
            weight = weight * (_hash((i + 0x9E3779B9 * (d + 1)) % 2**32) | 1) % 2**32
        total += int(word) * weight
    return total % 2**32


_SHAPES = [((), "float32"), ((5,), "int32"), ((16, 4), "float32"), ((8, 3, 4), "bfloat16"), ((40, 8), "int8")]


@pytest.fixture(scope="module")
def tree():
    keys = jax.random.split(jax.random.key(0), len(_SHAPES))
    return {
        f"{i}": (jax.random.normal(key, shape) * 50).astype(dtype)
        for i, (key, (shape, dtype)) in enumerate(zip(keys, _SHAPES, strict=True))
    }


@contextlib.contextmanager
def compilations():
    """Lists the programs that are compiled, or read from jax's cache on disk, inside the block."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, *_, **__: found.append(name) if "backend_compile" in name else None
    )
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_sums_are_those_of_the_definition_under_every_layout(tree):
    expected = {name: _by_hand(leaf) for name, leaf in tree.items()}
    assert tree_sums(tree) == expected
    assert tree_sums(jax.tree.map(np.asarray, tree)) == expected
    for text, specs in (
        ("fsdp=4", {"2": Spec("fsdp"), "3": Spec(None, None, "fsdp"), "4": Spec(None, "fsdp")}),
        ("data=2,fsdp=2,tensor=2", {"2": Spec(("fsdp", "tensor")), "3": Spec("tensor", None, "fsdp")}),
    ):
        mesh = make_mesh(text, jax.devices()[: 8 if "tensor" in text else 4])
        placed = {
            name: jax.device_put(leaf, NamedSharding(mesh, specs.get(name, Spec()))) for name, leaf in tree.items()
        }
        assert tree_sums(placed) == expected


def test_large_shards_are_summed_by_the_same_definition():
    """A loop adds the 703 x 3 rows of this shard in runs of equal size, and a few rows are left over."""
    leaf = np.random.default_rng(0).standard_normal((703, 3, 100)).astype(np.float32)
    assert leaf.size > bits._SMALL
    total = leaf.view(np.uint32).astype(np.uint64)
    for d, size in enumerate(leaf.shape):
        weight = _hash((np.arange(size, dtype=np.uint64) + 0x9E3779B9 * (d + 1)) % 2**32) | 1
        total = total * weight.reshape([-1 if d == e else 1 for e in range(leaf.ndim)]) % 2**32
    assert tree_sums({"leaf": leaf}) == {"leaf": int(total.sum()) % 2**32}


def test_any_flipped_bit_and_exchanged_rows_change_the_sum(tree):
    rng = np.random.default_rng(0)
    for name, leaf in tree.items():
        before = tree_sums({name: leaf})
        raw = np.asarray(leaf)
        for _ in range(8):
            content = bytearray(raw.tobytes())
            bit = rng.integers(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            assert tree_sums({name: np.frombuffer(bytes(content), raw.dtype).reshape(raw.shape)}) != before
        if raw.ndim:
            assert tree_sums({name: raw[::-1].copy()}) != before


def test_leaves_are_named_alike_in_a_state_and_in_what_a_checkpoint_holds():
    path = lambda tree: leaf_name(jax.tree_util.tree_flatten_with_path(tree)[0][0][0])  # noqa: E731
    assert path({"a": [{"b": 1}]}) == "a/0/b" == path({"a": {"0": {"b": 1}}})


def test_what_is_compiled_ahead_is_what_runs(tree):
    mesh = make_mesh("fsdp=4", jax.devices()[:4])
    whole = NamedSharding(mesh, Spec())
    placed = {name: jax.device_put(jnp.tile(leaf[None], (3, *[1] * leaf.ndim)), whole) for name, leaf in tree.items()}
    compile_sums(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed))
    with compilations() as compiled:
        tree_sums(placed)
    assert compiled == []


def test_leaves_that_are_alike_share_a_program():
    rows = NamedSharding(make_mesh("fsdp=4", jax.devices()[:4]), Spec("fsdp"))
    tree = {f"{i}": jax.device_put(np.full((8, 5 + i % 2), i, np.float32), rows) for i in range(10)}
    with compilations() as compiled:
        sums = tree_sums(tree)
    assert len(compiled) == 3  # the sums of two shapes, and the gather of ten sums
    assert sums == tree_sums({name: np.asarray(leaf) for name, leaf in tree.items()}) and len(set(sums.values())) == 10


def test_an_accelerator_sums_in_one_pass():
    """The program for a CPU has a loop, and the programs for a GPU and a TPU have none."""
    leaf = jax.ShapeDtypeStruct((1 << 12, 256), "float32")
    traced = jax.jit(lambda x: bits.shard_sum(x, [0, 0])).trace(leaf)
    assert "stablehlo.while" in traced.lower().as_text()
    for platform in ("cuda", "tpu"):
        assert "stablehlo.while" not in traced.lower(lowering_platforms=(platform,)).as_text()
