"""The TPU kernel of decoding attention equals XLA's form in Pallas' interpreter, and compiles for TPUs."""

import importlib.util
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.engine import attention
from podrl.engine.config import RolloutConfig
from podrl.engine.engine import Engine
from podrl.engine.page_attention import chosen, takes
from podrl.engine.reads import LaneReads, Page, ReadShape
from podrl.engine.sizes import engine_shape
from podrl.mesh.build import make_mesh
from podrl.models import parameters
from podrl.models.config import gemma2_config
from podrl.plan.chips import parse_topology, prepare
from podrl.plan.hlo import cost_of
from podrl.rollout.worker import RolloutWorker

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
LAYERS, PAGES, KEYS, TOKENS, WIDTH, GROUP = 2, 60, 2, 64, 128, 4


def reads_of(members: int = 4) -> attention.ReadList:
    """Returns the read list of six lanes: 0, 1 and 4 share a long prompt, 2 has half a page, 3 is empty, 5 has only its
    own pages."""
    free = iter(range(PAGES))

    def pages(start: int, tokens: int) -> list[Page]:
        return [Page(next(free), start + at, min(TOKENS, tokens - at)) for at in range(0, tokens, TOKENS)]

    long, short = pages(0, 20 * TOKENS - 3), pages(0, 8)
    takes_new = Page(PAGES - 2, 0, 0)
    seated = {
        0: LaneReads("a", long, [*pages(20 * TOKENS - 3, 5 * TOKENS), takes_new]),
        1: LaneReads("a", long, [takes_new]),
        2: LaneReads("b", short, pages(8, 2 * TOKENS + 1)),
        4: LaneReads("a", long, pages(20 * TOKENS - 3, 4)),
        5: LaneReads("c", [], pages(0, 17 * TOKENS)),
    }
    shape = ReadShape(lanes=6, shared=44, own=32, members=members)
    flat_I = np.zeros(shape.size, np.int32)
    shape.fill(flat_I, seated, PAGES - 1)
    return shape.split(jnp.asarray(flat_I))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "softcap", "window", "members"),
    [("float32", 1e-5, 0.0, 1 << 30, 4), ("float32", 1e-5, 5.0, 400, 2), ("bfloat16", 2e-2, 0.0, 1 << 30, 4)],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_equals_the_form_of_xla(dtype: str, tolerance: float, softcap: float, window: int, members: int, gpu: bool):
    reads = reads_of(members)
    used = {int(p) for p in reads.shared_page_U[: reads.total_2[0]]} | {
        int(p) for p in reads.own_page_O[: reads.total_2[1]]
    }
    draw = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(draw), shape)  # noqa: E731
    q_RNH = (normal(6, KEYS * GROUP, WIDTH) * WIDTH**-0.5).astype(dtype)
    pools = [normal(LAYERS, PAGES, KEYS, TOKENS, WIDTH).astype(dtype) for _ in range(2)]
    unread = np.asarray([p for p in range(PAGES) if p not in used and p > 0])  # XLA reads page 0 for empty entries
    recent = attention.PartialSoftmax(
        normal(6, KEYS, GROUP), 1 + normal(6, KEYS, GROUP) ** 2, normal(6, KEYS, GROUP, WIDTH)
    )
    position_R = jnp.asarray([25 * TOKENS - 3, 20 * TOKENS - 3, 2 * TOKENS + 9, 0, 20 * TOKENS + 1, 17 * TOKENS])
    how = {"window": jnp.int32(window), "softcap": softcap}
    scratch = attention.make_scratch(reads, KEYS, KEYS * GROUP, WIDTH)
    layer = jnp.int32(1)
    expected, _ = jax.jit(
        lambda q: attention.decode_attention(q, layer, *pools, recent, reads, scratch, position_R, **how)
    )(q_RNH)
    pools = [pool.at[:, unread].set(jnp.nan).at[0].set(jnp.nan) for pool in pools]
    found = jax.jit(
        lambda q: attention.kernel_attention(
            q, layer, *pools, recent, reads, position_R, gpu=gpu, interpret=True, **how
        )
    )(q_RNH)
    assert found.dtype == q_RNH.dtype
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=tolerance, atol=tolerance)


def test_pages_must_fill_tiles_and_the_list_must_fit():
    bf16, f32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert takes(16, 128, bf16, numbers=100_000) and takes(8, 256, f32, numbers=1)
    assert not takes(8, 128, bf16, numbers=1) and not takes(64, 64, f32, numbers=1)
    assert not takes(16, 128, bf16, numbers=200_000)


def test_the_kernel_decodes_where_it_pays_and_fits():
    """For v4, the compiler refused 64 members per read with 8 heads of width 256, which need 17.8 of the 16 MiB of
    VMEM, and accepted 16 members. For v5p it accepted both."""

    def decodes(kind: str, heads: int = 8, members: int = 16, page_tokens: int = 64, tensor: int = 1, lanes: int = 64):
        devices = np.array([types.SimpleNamespace(device_kind=kind)] * tensor, object)
        mesh: Any = types.SimpleNamespace(devices=devices, shape={"data": 1, "fsdp": 1, "tensor": tensor})
        model = gemma2_config(
            vocab_size=512, num_layers=2, model_dim=256, ffn_dim=512, num_heads=16, num_kv_heads=heads, head_dim=256
        )
        reads = ReadShape(lanes=lanes, shared=lanes * 8, own=lanes * 8, members=members)
        return chosen(None, model, mesh, page_tokens, reads, jnp.dtype("bfloat16"))

    assert decodes("TPU v4") and decodes("TPU v5") and decodes("TPU v5p") and decodes("TPU v5", members=64)
    assert not any(decodes(kind) for kind in ("cpu", "NVIDIA H100", "TPU v5 lite", "TPU v6 lite", "TPU7x"))
    assert not decodes("TPU v4", members=64) and decodes("TPU v4", members=64, tensor=2)
    assert not decodes("TPU v5", heads=16, members=128) and not decodes("TPU v5", heads=16, page_tokens=1024)
    assert not decodes("TPU v5", heads=4, tensor=8) and not decodes("TPU v5", lanes=1 << 16)


def _engine(topology: str, spec: str, **how: bool) -> tuple[Engine, dict]:
    mesh = make_mesh(spec, parse_topology(topology, key="--topology").devices(), key="mesh")
    model = gemma2_config(
        vocab_size=512, num_layers=2, model_dim=256, ffn_dim=512, num_heads=8, num_kv_heads=4, head_dim=128, window=64
    )
    # Pools of 268 MB per chip, because the compiler may keep smaller pools in VMEM.
    config = RolloutConfig(max_prompt_length=128, max_tokens_to_generate=3968, kv_cache_size=4096, lanes=128)
    shape = engine_shape(config, mesh.shape["data"] * mesh.shape["fsdp"])
    engine = Engine(model, mesh, shape, jnp.dtype("bfloat16"), **how)
    params = parameters.abstract_params(model, mesh, jnp.dtype("bfloat16"))
    return engine, {program.name: program for program in engine.programs(params)}


def test_gpus_decode_with_their_kernel():
    """NVIDIA's GPUs from Ampere on use the Pallas kernel for GPUs if the sizes of pages and heads are powers of two.
    The program for an H100 holds the kernel and no loop."""

    def decodes(generation: str, wanted: bool | None = None, width: int = WIDTH) -> bool:
        device = types.SimpleNamespace(device_kind="a GPU", platform="gpu", compute_capability=generation)
        mesh: Any = types.SimpleNamespace(devices=np.array([device], object), shape={"tensor": 1})
        model = gemma2_config(
            vocab_size=512, num_layers=2, model_dim=256, ffn_dim=512, num_heads=8, num_kv_heads=4, head_dim=width
        )
        return chosen(wanted, model, mesh, TOKENS, ReadShape(2, 4, 16, 16), jnp.dtype("bfloat16"))

    assert decodes("8.0") and decodes("9.0") and decodes("12.0") and decodes("9.0", wanted=True)
    assert not decodes("9.0", wanted=False) and not decodes("7.5") and not decodes("gfx942")
    assert not decodes("9.0", width=80)
    reads = reads_of()
    shape = jax.ShapeDtypeStruct((LAYERS, PAGES, KEYS, TOKENS, WIDTH), "bfloat16")
    recent = attention.PartialSoftmax(
        jnp.zeros((6, KEYS, GROUP)), jnp.zeros((6, KEYS, GROUP)), jnp.zeros((6, KEYS, GROUP, WIDTH))
    )

    def attend(q_RNH: Any, keys: Any, values: Any) -> Any:
        how = {"window": jnp.int32(64), "softcap": 5.0, "gpu": True}
        return attention.kernel_attention(q_RNH, 1, keys, values, recent, reads, jnp.zeros(6, jnp.int32), **how)

    query = jax.ShapeDtypeStruct((6, KEYS * GROUP, WIDTH), "bfloat16")
    text = _lowered_for_a_gpu(attend, query, shape, shape)
    assert text.count("__gpu$xla.gpu.triton") == 2 and "stablehlo.while" not in text


def _lowered_for_a_gpu(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> str:
    of = jax.sharding.AbstractDevice
    platform = {"platform": "gpu"} if "platform" in inspect.signature(of).parameters else {}
    device = of(device_kind="NVIDIA H100", num_cores=None, **platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.nightly("podrl/engine/page_attention.py")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_every_tpu_and_reads_each_page_once(topology: str, monkeypatch: pytest.MonkeyPatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    engine, programs = _engine(topology, "data=-1,tensor=2", kernel=True)
    assert _engine(topology, "data=-1,tensor=2")[0].kernel == topology.startswith(("v4", "v5p"))
    chip = parse_topology(topology, key="--topology").chip
    generate = programs["generate"]
    text = generate.jitted.lower(*generate.args).compile(compiler_options=dict(chip.compiler) or None).as_text()
    loops = {"decode_steps": 1, "filters": 0, "shared_pages": 0, "own_pages": 0}
    none = cost_of(text, named=loops).read
    read = [cost_of(text, named=loops | {name: 3}).read - none for name in ("shared_pages", "own_pages")]
    L, _, K, C, H = engine.pools()[0].shape
    assert read == [pytest.approx(3 * L * 2 * K // 2 * C * H * 2)] * 2


def test_refused_where_it_cannot_be():
    mesh = make_mesh("tensor=2", jax.devices()[:2], key="mesh")
    model = gemma2_config(
        vocab_size=512, num_layers=2, model_dim=256, ffn_dim=512, num_heads=8, num_kv_heads=4, head_dim=128
    )
    assert not chosen(None, model, mesh, 64, ReadShape(2, 4, 16, 16), jnp.dtype("float32"))
    with pytest.raises(ValueError, match=r"page_kernel=True needs an NVIDIA GPU, .* has cpu, 4 key heads of size 128"):
        chosen(True, model, mesh, 64, ReadShape(2, 4, 16, 16), jnp.dtype("float32"))
    config = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8, kv_cache_size=16, lanes=2, page_kernel=True)
    worker = RolloutWorker(model, mesh, config, pad_id=0, eos_ids=(1,), decode=lambda ids: "", seed=0)
    with pytest.raises(ValueError, match=r"rollout\.page_kernel=True needs an NVIDIA GPU"):
        worker.warm_up(parameters.init_params(model, jax.random.key(0), jnp.dtype("float32")), lambda line: None)
