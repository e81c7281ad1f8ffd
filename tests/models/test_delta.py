"""Linear attention: packed rows computed in chunks equal rows computed token by token; a model with such layers;
adapters; refusals."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build
from podrl.models import Decoder, LoraConfig, decoder, delta, from_pretrained, parameters, peft_files
from podrl.models.config import LINEAR_PROJECTIONS, Delta
from podrl.models.hf_config import config_from_hf

QWEN3_5 = pathlib.Path(__file__).parent / "fixtures" / "qwen3_5"
RAW = json.loads((QWEN3_5 / "config.json").read_text())

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, H, U = 2, 6, 5
step = jax.jit(delta.step)
over_rows = jax.jit(delta.over_rows)  # saves a minute: without jit, operations compile one by one for each shape
# For each segment (number of its tokens, number of the segment that it continues or 0): prompts with samples, separate
# sequences, then padding.
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
    """Computes outputs and the last state of one row by `step`. A segment starts from the last state of the segment
    that it continues."""
    T = len(segment_T)
    out, ends, state = [], {0: np.zeros((1, N, H, U), np.float32)}, None
    for t in range(T):
        if segment_T[t] == 0:
            out.append(np.zeros((N, U), np.float32))
            continue
        if t == 0 or segment_T[t] != segment_T[t - 1]:
            state = ends[int(prefix_T[t])]
        y, state = step(state, *(x[t][None] for x in arrays))
        ends[int(segment_T[t])] = state
        out.append(y[0])
    return jnp.stack(out), state[0]


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_of_packed_rows_equal_tokens_one_by_one(chunk):
    segment_BT, prefix_BT = layout()
    arrays = [np.asarray(x) for x in inputs(*segment_BT.shape)]
    chunks = delta.cut(jnp.asarray(segment_BT), jnp.asarray(prefix_BT), chunk=chunk)
    out_BTNU, state_BNHU = over_rows(*arrays, chunks)
    for b in range(len(ROWS)):
        want_TNU, want_NHU = one_by_one([x[b] for x in arrays], segment_BT[b], prefix_BT[b])
        np.testing.assert_allclose(out_BTNU[b], want_TNU, atol=2e-5)
        np.testing.assert_allclose(state_BNHU[b], want_NHU, atol=2e-5)


def test_a_row_goes_on_from_the_state_of_the_one_before():
    arrays = [np.asarray(x) for x in inputs(2, 21)]
    segment_BT = np.ones((2, 21), np.int32)
    want_BTNU, want_BNHU = over_rows(*arrays, delta.cut(jnp.asarray(segment_BT), chunk=8))
    first, state = over_rows(*(x[:, :10] for x in arrays), delta.cut(jnp.asarray(segment_BT[:, :10]), chunk=8))
    padded_BT = np.pad(segment_BT[:, 10:], ((0, 0), (0, 9)))  # a whole chunk of padding changes no state
    rest = [np.pad(x[:, 10:], ((0, 0), (0, 9)) + ((0, 0),) * (x.ndim - 2), constant_values=3.0) for x in arrays]
    chunks = delta.cut(jnp.asarray(padded_BT), before_B=jnp.ones(2, jnp.int32), chunk=8)
    second, state = over_rows(*rest, chunks, state)
    np.testing.assert_allclose(jnp.concatenate([first, second[:, :11]], axis=1), want_BTNU, atol=2e-5)
    np.testing.assert_allclose(state, want_BNHU, atol=2e-5)


def test_gradients_are_those_of_tokens_one_by_one():
    segment_BT, prefix_BT = (x[:1] for x in layout())
    arrays = [x * 1.0 for x in inputs(*segment_BT.shape)]
    weight_TNU = jax.random.normal(jax.random.key(5), (segment_BT.shape[1], N, U))
    chunks = delta.cut(jnp.asarray(segment_BT), jnp.asarray(prefix_BT), chunk=8)

    def gradients(output):
        return jax.jit(jax.grad(lambda xs: jnp.sum(output(xs) * weight_TNU)))(arrays)

    got = gradients(lambda xs: delta.over_rows(*xs, chunks)[0][0])
    want = gradients(lambda xs: one_by_one([x[0] for x in xs], segment_BT[0], prefix_BT[0])[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)


def test_the_convolution_reads_through_shared_beginnings():
    segment_BT, prefix_BT = layout()
    x_BTKI = jax.random.normal(jax.random.key(0), (3, 40, 2, 4))
    weight_WKI = jax.random.normal(jax.random.key(1), (4, 2, 4))
    previous_BT = delta.previous(jnp.asarray(segment_BT), jnp.asarray(prefix_BT))
    out_BTKI = np.asarray(jax.jit(delta.convolve)(x_BTKI, weight_WKI, previous_BT))
    for b, parts in enumerate(ROWS):
        at = {n: np.flatnonzero(segment_BT[b] == n) for n in range(1, len(parts) + 1)}
        for number, (size, prefix) in enumerate(parts, 1):
            where = [*at.get(prefix, []), *at[number]]
            line = np.pad(np.asarray(x_BTKI[b])[where], ((3, 0), (0, 0), (0, 0)))
            want = sum(line[w : w + len(where)] * np.asarray(weight_WKI)[w] for w in range(4))
            np.testing.assert_allclose(out_BTKI[b][at[number]], want[-size:], atol=1e-5)


@pytest.fixture(scope="module")
def model():
    return from_pretrained(QWEN3_5)


def with_adapters(**settings):
    """Reads the model with adapters in its linear attention, and draws random values for the adapters."""
    fresh = from_pretrained(QWEN3_5, lora=LoraConfig(rank=2, alpha=4.0, pattern="in_proj_.*|out_proj", **settings))

    def grow(path, x):
        return x + 0.3 * jax.random.normal(jax.random.key(7), x.shape) if path[-1].key.endswith("_lora_b") else x

    return Decoder(fresh.config, jax.tree_util.tree_map_with_path(grow, fresh.params), fresh.mesh)


@pytest.fixture(scope="module")
def adapted():
    return with_adapters()


def test_packed_samples_of_a_prompt_are_computed_as_if_alone(adapted):
    segment_BT, prefix_BT = layout()
    tokens_BT = np.random.default_rng(0).integers(0, adapted.config.vocab_size, segment_BT.shape)
    position_BT = np.zeros_like(segment_BT)
    alone = []
    for b, parts in enumerate(ROWS):
        at = {n: np.flatnonzero(segment_BT[b] == n) for n in range(1, len(parts) + 1)}
        for number, (_, prefix) in enumerate(parts, 1):
            where = np.asarray([*at.get(prefix, []), *at[number]], int)
            position_BT[b, where] = np.arange(len(where))
            alone.append((b, at[number], where))
    last_BT = np.array(segment_BT)
    for b, n in np.argwhere(segment_BT > 0):
        last_BT[b, n] = max(segment_BT[b, (prefix_BT[b] == segment_BT[b, n]) | (np.arange(40) == n)])
    np.testing.assert_array_equal(delta.prefixes(jnp.asarray(segment_BT), jnp.asarray(last_BT)), prefix_BT)
    hidden = jax.jit(lambda *row, **shared: decoder.hidden(adapted.params, *row, adapted.config, **shared))
    got_BTD = np.asarray(hidden(tokens_BT, segment_BT, position_BT, last_BT=last_BT))
    rows = np.zeros((3, len(alone), 40), np.int32)  # tokens, segment, position
    for row, (b, _, where) in enumerate(alone):
        n = len(where)
        rows[0, row, :n], rows[1, row, :n], rows[2, row, :n] = tokens_BT[b, where], 1, np.arange(n)
    want_BTD = np.asarray(hidden(*rows))
    for row, (b, own, where) in enumerate(alone):
        np.testing.assert_allclose(got_BTD[b, own], want_BTD[row, len(where) - len(own) : len(where)], atol=2e-4)


def hidden_of(model):
    tokens_BT = jnp.arange(12)[None]
    row = tokens_BT, jnp.ones_like(tokens_BT), tokens_BT
    return np.asarray(jax.jit(lambda params: decoder.hidden(params, *row, model.config))(model.params))


def test_adapters_merge_and_go_through_peft_files_of_models_with_several_towers(model, adapted, tmp_path):
    stack = adapted.params["layers"]["linear"]
    assert {name for name in stack if name.endswith("_lora_a")} == {f"{name}_lora_a" for name in LINEAR_PROJECTIONS}
    assert not any(map(parameters.is_adapter, adapted.params["layers"]["full"]))
    want_BTD = hidden_of(adapted)
    assert np.abs(want_BTD - hidden_of(model)).max() > 0.1
    np.testing.assert_allclose(hidden_of(adapted.merged()), want_BTD, atol=2e-4)
    adapted.save_adapters(tmp_path / "adapters", base="base")
    settings, weights = (tmp_path / "adapters" / name for name in (peft_files.CONFIG_NAME, peft_files.WEIGHTS_NAME))
    raw, file = json.loads(settings.read_text()), weights.read_bytes()
    assert raw["target_modules"] == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    # The same adapters, as PEFT writes them for a model whose text decoder is one of several parts.
    end = 8 + int.from_bytes(file[:8], "little")
    header = file[8:end].replace(b"model.model.layers", b"model.model.language_model.layers")
    weights.write_bytes(len(header).to_bytes(8, "little") + header + file[end:])
    settings.write_text(json.dumps(raw | {"target_modules": r".*language_model\..*\.(in_proj_(qkv|z|b|a)|out_proj)"}))
    _, again = peft_files.load_adapters(tmp_path / "adapters", model.config, model.params)
    jax.tree.map(np.testing.assert_array_equal, again, adapted.params)


def test_all_but_the_projections_that_pace_the_states_are_stored_as_integers():
    rounded = with_adapters(base_dtype="int8")
    stack = rounded.params["layers"]["linear"]
    integers = {name for name, x in stack.items() if x.dtype == jnp.int8}
    assert integers == {"delta_in", "delta_gate", "delta_out", "gate", "up", "down"}
    assert {f"{name}_scale" for name in integers} <= set(stack)
    np.testing.assert_allclose(hidden_of(rounded.merged()), hidden_of(rounded), atol=2e-4)


def test_a_saved_model_is_read_as_the_same(model, tmp_path):
    model.save(tmp_path / "out")
    again = from_pretrained(tmp_path / "out")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "data=2,fsdp=2"])
def test_every_mesh_without_seq_computes_what_one_device_does(model, mesh):
    mesh = build.make_mesh(mesh, jax.devices()[:4])
    tokens_BT = jnp.arange(64).reshape(4, 16) % model.config.vocab_size
    position_BT = jnp.broadcast_to(jnp.arange(16), (4, 16))

    def output(params, mesh):
        return decoder.hidden(params, tokens_BT, jnp.ones_like(tokens_BT), position_BT, model.config, mesh=mesh)

    run = jax.jit(jax.value_and_grad(lambda params, mesh: jnp.sum(jnp.sin(output(params, mesh)))), static_argnums=1)
    shapes = parameters.abstract_params(model.config, mesh, jnp.dtype(jnp.float32))
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), model.params, shapes)
    np.testing.assert_allclose(jax.jit(output, static_argnums=1)(params, mesh), output(model.params, None), atol=1e-4)
    (value, grads), (want, wanted) = run(params, mesh), run(model.params, None)
    assert value == pytest.approx(float(want), abs=1e-2)  # the value is a sum of 1,024 sines
    # With rms_norm_eps=1e-6, float32 itself differs by 2e-4 from float64.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3 * float(jnp.max(jnp.abs(y)))), grads, wanted)


def test_heads_of_linear_attention_are_cut_over_tensor(model):
    mesh = build.make_mesh("tensor=2", jax.devices()[:2])
    stack = parameters.abstract_params(model.config, mesh, jnp.dtype(jnp.float32))["layers"]["linear"]
    whole = {name for name, x in stack.items() if x.sharding.is_fully_replicated}
    assert {name for name in whole if name.startswith("delta_")} == {"delta_norm"}  # one norm for all heads


def test_memory_of_a_sequence_in_the_published_35b_a3b_is_61_mib(model):
    """Each of 30 layers has 32 heads of 128 x 128 numbers in float32 and three inputs of 8,192 channels in bfloat16."""
    config = dataclasses.replace(model.config.alike()[1], delta=Delta(16, 32, 128, 128, 4))
    state, inputs = map(math.prod, delta.memory_shapes(config))
    assert 30 * (4 * state + 2 * inputs) / 2**20 == pytest.approx(61.4, abs=0.01)


def test_what_podrl_does_not_compute_yet_is_refused(model):
    mesh, tokens_BT = build.make_mesh("seq=2", jax.devices()[:2]), jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="leave seq out of the mesh"):
        decoder.hidden(model.params, tokens_BT, tokens_BT, tokens_BT, model.config, mesh=mesh)
    for changes, message in (
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"linear_num_value_heads": 3}, "value_heads=3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"rope_parameters": RAW["rope_parameters"] | {"partial_rotary_factor": 0.2}}, "partial_rotary_factor=0.2"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf(RAW | changes)
