"""Compares the decoder with logits of transformers, which are committed as fixtures, and checks its properties."""

import dataclasses
import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build, rules
from podrl.models import decoder, from_pretrained, parameters
from podrl.models.config import LoraConfig, ModelConfig, RopeScaling, gemma2_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

FIXTURES = sorted((pathlib.Path(__file__).parent / "fixtures").iterdir())
CONFIG = gemma2_config(
    vocab_size=32, num_layers=2, model_dim=16, ffn_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, window=3
)


@functools.partial(jax.jit, static_argnums=4)
def _run(params, tokens_BT, segment_BT, position_BT, config):
    hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, position_BT, config)
    return decoder.unembed(params, hidden_BTD, config)


def run(params, tokens_BT, segment_BT, position_BT, config=CONFIG):
    return np.asarray(_run(params, tokens_BT, segment_BT, position_BT, config))


def random_params(config, seed=0):
    """Draws parameters as init_params does, but with numpy, so nothing is compiled."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        return jnp.asarray(
            rng.normal(size=spec.shape) * spec.std if spec.std > 0 else np.zeros(spec.shape), jnp.float32
        )

    return jax.tree.map(draw, parameters.param_specs(config), is_leaf=parameters.is_param)


def plain(tokens_BT):
    return np.ones_like(tokens_BT), np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module", name="tokens_BT")
def _tokens():
    return np.random.default_rng(0).integers(1, 32, (2, 8)).astype(np.int32)


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda d: d.name)
def test_logits_are_those_of_transformers(directory):
    expected = np.load(directory / "expected.npz")
    model = from_pretrained(directory)
    assert model.config.family == directory.name.removesuffix("_experts").removesuffix("_small")
    np.testing.assert_allclose(np.asarray(model(expected["tokens_BT"])), expected["logits_BTV"], atol=1e-4, rtol=0)


def test_there_is_a_fixture_of_every_family():
    assert [d.name for d in FIXTURES] == [
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_experts",
        "gemma4_small",
        "glm4_moe",
        "gpt_oss",
        "llama",
        "mistral",
        "mixtral",
        "olmo3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
    ]


def test_a_sharded_model_computes_what_one_device_computes():
    directory = next(d for d in FIXTURES if d.name == "gemma2")
    tokens_BT = np.load(directory / "expected.npz")["tokens_BT"]
    one = from_pretrained(directory)
    eight = from_pretrained(directory, build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices()))
    assert len(eight.params["layers"]["q"].sharding.device_set) == 8
    assert not eight.params["layers"]["gate"].sharding.is_fully_replicated
    np.testing.assert_allclose(np.asarray(one(tokens_BT)), np.asarray(eight(tokens_BT)), atol=2e-5, rtol=0)


def test_right_padding_changes_nothing(params, tokens_BT):
    segment_BT, position_BT = plain(tokens_BT)
    padded_BT = np.pad(tokens_BT, ((0, 0), (0, 3)), constant_values=7)
    got = run(params, padded_BT, np.pad(segment_BT, ((0, 0), (0, 3))), np.pad(position_BT, ((0, 0), (0, 3))))
    np.testing.assert_allclose(got[:, :8], run(params, tokens_BT, segment_BT, position_BT), atol=1e-5, rtol=0)
    assert np.isfinite(got).all()


def test_packed_sequences_do_not_see_each_other(params, tokens_BT):
    segment_BT, position_BT = plain(tokens_BT)
    want = run(params, tokens_BT, segment_BT, position_BT)
    packed = run(
        params,
        tokens_BT.reshape(1, 16),
        np.repeat([1, 2], 8)[None],
        np.tile(np.arange(8), 2)[None],
    )
    np.testing.assert_allclose(packed.reshape(want.shape), want, atol=1e-5, rtol=0)


def test_later_tokens_do_not_change_earlier_logits(params, tokens_BT):
    segment_BT, position_BT = plain(tokens_BT)
    changed_BT = tokens_BT.copy()
    changed_BT[:, 5] = (changed_BT[:, 5] + 1) % 32
    before, after = (run(params, t, segment_BT, position_BT) for t in (tokens_BT, changed_BT))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5] != after[:, 5]).any()


def test_window_bounds_what_a_one_layer_model_sees():
    config = dataclasses.replace(
        CONFIG,
        num_layers=1,
        window_L=CONFIG.window_L[:1],
        rope_theta_L=CONFIG.rope_theta_L[:1],
        rope_scaling_L=CONFIG.rope_scaling_L[:1],
    )
    params = random_params(config, 1)
    tokens_BT = np.arange(1, 9)[None]
    segment_BT, position_BT = plain(tokens_BT)
    changed_BT = tokens_BT.copy()
    changed_BT[0, 2] = 30
    before, after = (run(params, t, segment_BT, position_BT, config) for t in (tokens_BT, changed_BT))
    moved_T = (before != after).any(-1)[0]
    # Window 3: the token itself and the two before it.
    assert moved_T.tolist() == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_rematerialisation_changes_no_gradient(params, tokens_BT, remat):
    segment_BT, position_BT = plain(tokens_BT)

    def loss(params, remat):
        return jnp.mean(decoder.hidden(params, tokens_BT, segment_BT, position_BT, CONFIG, remat=remat) ** 2)

    want = jax.jit(jax.grad(lambda p: loss(p, "none")))(params)
    got = jax.jit(jax.grad(lambda p: loss(p, remat)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), got, want)


def test_params_follow_their_declaration():
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2, pattern="q|down"))
    mesh = build.make_mesh("fsdp=2,tensor=4", jax.devices())
    abstract = parameters.abstract_params(config, mesh, jnp.bfloat16)
    real = jax.eval_shape(lambda key: parameters.init_params(config, key, jnp.bfloat16), jax.random.key(0))
    jax.tree.map(lambda a, r: (a.shape, a.dtype) == (r.shape, r.dtype) or pytest.fail(f"{a} {r}"), abstract, real)
    assert sorted(k for k in real["layers"] if parameters.is_adapter(k)) == [
        "down_lora_a", "down_lora_b", "q_lora_a", "q_lora_b",
    ]  # fmt: skip
    trainable, frozen = parameters.split_trainable(real, config)
    assert len(jax.tree.leaves(trainable)) == 4
    joined = parameters.join_trainable(trainable, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(real)
    assert joined["layers"]["q"] is real["layers"]["q"]


def test_initial_parameters_have_the_declared_spread():
    config = dataclasses.replace(CONFIG, norm_plus_one=False)
    params = parameters.init_params(config, jax.random.key(0))
    assert (np.asarray(params["final_norm"]) == 1).all()
    assert np.std(np.asarray(params["layers"]["gate"])) == pytest.approx(16**-0.5, rel=0.1)
    assert np.std(np.asarray(params["layers"]["o"])) == pytest.approx((4 * 8) ** -0.5, rel=0.1)
    assert (np.asarray(params["layers"]["gate"]) != np.asarray(params["layers"]["up"])).any()


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    theta = 10_000.0
    scaling = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
    config = dataclasses.replace(CONFIG, rope_theta_L=(theta,) * 2, rope_scaling_L=(RopeScaling(), scaling), head_dim=8)
    plain_H, scaled_H = config.inverse_frequencies()
    np.testing.assert_allclose(plain_H, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    # The wavelengths are 6.3, 63, 628 and 6283 tokens. Below 64 / 4 = 16 tokens the frequency is kept, above 64 tokens
    # it is divided by 8. Between them it is a blend: the wavelength 62.83 turns 64 / 62.83 = 1.01859 times,
    # so (1.01859 - 1) / 3 = 0.0061972 of the original frequency is kept.
    np.testing.assert_allclose(scaled_H[[0, 2, 3]], [1, 0.01 / 8, 0.001 / 8], rtol=1e-6)
    np.testing.assert_allclose(scaled_H[1], 0.1 * (0.0061972 + (1 - 0.0061972) / 8), rtol=1e-4)


@pytest.mark.parametrize(
    ("truncate", "kept_H"),
    # Frequency number n is 10 ** -n. It turns twice in 64 tokens at n = log10(64 / 2 pi / 2) = 0.70697, and a tenth of
    # a time at n = 2.00800. Rounded outwards, these numbers are 0 and 3.
    [(False, [1, 0.77477, 0.00615, 0]), (True, [1, 2 / 3, 1 / 3, 0])],
)
def test_yarn_blends_kept_and_divided_frequencies_and_scales_what_it_turns(truncate, kept_H):
    scaling = RopeScaling("yarn", 8.0, original_length=64, beta_fast=2, beta_slow=0.1, truncate=truncate)
    scaling = dataclasses.replace(scaling, attention_factor=1.5)
    config = dataclasses.replace(CONFIG, rope_theta_L=(1e4,) * 2, rope_scaling_L=(RopeScaling(), scaling), head_dim=8)
    plain_H, scaled_H = config.inverse_frequencies()
    np.testing.assert_allclose(scaled_H, plain_H * (np.array(kept_H) * 7 / 8 + 1 / 8), rtol=1e-4)
    (infos,), (rotary,) = decoder.layer_infos(config), decoder.rotations(config, jnp.arange(3)[None])
    x_BTNH = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    for i, factor in enumerate((1.0, 1.5)):
        turned = decoder.rotate(x_BTNH, *rotary.of(infos.rotation[i]))
        np.testing.assert_allclose(
            jnp.linalg.norm(turned, axis=-1), factor * jnp.linalg.norm(x_BTNH, axis=-1), rtol=1e-5
        )


def test_layers_of_one_rotation_share_its_cosines_and_sines():
    scalings = (RopeScaling(), RopeScaling("linear", 8.0), RopeScaling(), RopeScaling())
    windows = {"window_L": (4,) * 4, "rope_theta_L": (1e4, 1e4, 1e4, 1e6), "rope_scaling_L": scalings}
    config = dataclasses.replace(CONFIG, num_layers=4, **windows)
    (freq_RH, factor_R), number_L = config.rotations()
    assert number_L == (0, 1, 0, 2) and factor_R == (1.0,) * 3
    np.testing.assert_array_equal(freq_RH[list(number_L)], config.inverse_frequencies())
    (rotary,) = decoder.rotations(config, jnp.array([[0, 1, 5]]))
    for number, freq_H in zip(number_L, config.inverse_frequencies(), strict=True):
        cos_BT1H, sin_BT1H = rotary.of(jnp.asarray(number))
        angle_TH = np.array([0, 1, 5])[:, None] * freq_H
        np.testing.assert_allclose(cos_BT1H[0, :, 0], np.cos(angle_TH), atol=1e-6)
        np.testing.assert_allclose(sin_BT1H[0, :, 0], np.sin(angle_TH), atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_cosines_and_sines_are_computed_once_for_all_layers(params, tokens_BT, remat):
    ones_BT = jnp.ones_like(tokens_BT)

    def total(params, position_BT):
        return decoder.hidden(params, tokens_BT, ones_BT, position_BT, CONFIG, remat=remat).sum()

    text = jax.jit(jax.grad(total)).lower(params, ones_BT).compile().as_text()
    # Both layers have the same rotation and share one table, which the backward pass may compute once more. A cosine
    # that a layer computed for itself would have no axis of rotations.
    shapes = re.findall(r"= (f32\[[\d,]*\])\S* (?:cosine|sine)\(", text)
    rows, places = tokens_BT.shape
    assert set(shapes) == {f"f32[1,{rows},{places},1,{CONFIG.head_dim // 2}]"} and len(shapes) <= 4


def test_configuration_errors_name_the_numbers():
    fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(ModelConfig)}
    with pytest.raises(ValueError, match="4 query heads do not split over 3"):
        ModelConfig(**(fields | {"num_kv_heads": 3}))
    with pytest.raises(ValueError, match="window_L has 2 entries for 3 layers"):
        ModelConfig(**(fields | {"num_layers": 3}))


def test_offloading_needs_a_host_memory(params, tokens_BT):
    class Device:
        device_kind = "Abacus"

        def addressable_memories(self):
            return [types.SimpleNamespace(kind="beads")]

    mesh = types.SimpleNamespace(devices=np.array([Device()], object), size=1)
    ones_BT = jnp.ones_like(tokens_BT)
    with pytest.raises(ValueError, match=r"trainer\.remat='offload' .* which Abacus devices do not have \(beads\)"):
        decoder.hidden(params, tokens_BT, ones_BT, ones_BT, CONFIG, remat="offload", mesh=mesh)


def test_embedding_rows_reach_their_shards_by_an_exchange(capfd):
    """XLA prints a warning if it can convert a sharding only by gathering the whole array; it must print none here."""
    mesh = build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())
    params = parameters.abstract_params(CONFIG, mesh, jnp.dtype("float32"))
    tokens_BT = jax.ShapeDtypeStruct((8, 20), jnp.int32, sharding=rules.sharding_for(("batch", "time"), (8, 20), mesh))
    embed = jax.jit(lambda params, tokens_BT: decoder.embed(params, tokens_BT, CONFIG, jnp.dtype("float32"), mesh))
    embed.lower(params, tokens_BT).compile()
    assert "rematerialization" not in capfd.readouterr().err
