"""Integer base weights under adapters (QLoRA)."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build
from podrl.models import LoraConfig, decoder, from_pretrained, parameters
from podrl.models.config import gemma2_config
from podrl.models.quantize import quantize

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FIXTURE = FIXTURES / "gemma2"


def test_rounding_by_hand():
    weight = jnp.array([[1.1, -2.0, 0.25, 7.0, 0.0, 0.0]]).T  # groups (1.1, -2, .25) and (7, 0, 0)
    values, scale = quantize(weight, axis=0, groups=2, dtype="int4")
    np.testing.assert_allclose(scale[:, 0], [2 / 7, 1.0], rtol=1e-6)
    assert values[:, 0].astype(jnp.int32).tolist() == [4, -7, 1, 7, 0, 0]  # 1.1 is 3.85 levels of 2/7, .25 is .875
    zeros, scale = quantize(jnp.zeros((4, 1)), axis=0, groups=1, dtype="int8")
    assert not zeros.any() and not scale.any()


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 127), ("int4", 7)])
def test_error_is_at_most_half_a_level(dtype, levels):
    weight = np.asarray(jax.random.normal(jax.random.key(0), (3, 128, 5)))
    values, scale = quantize(jnp.asarray(weight), axis=1, groups=2, dtype=dtype)
    assert values.dtype == jnp.dtype(dtype) and scale.shape == (3, 2, 5)
    error = np.abs(np.asarray(values.astype(jnp.float32)) * np.repeat(scale, 64, 1) - weight).reshape(3, 2, 64, 5)
    largest = np.abs(weight).reshape(3, 2, 64, 5).max(2, keepdims=True)
    assert (error <= largest / levels / 2 * 1.001).all() and error.max() > 0


def test_groups_are_of_64_inputs_where_they_divide():
    config = gemma2_config(
        vocab_size=8, num_layers=1, model_dim=192, ffn_dim=100, num_heads=2, num_kv_heads=1, head_dim=128
    )
    config = dataclasses.replace(config, lora=LoraConfig(rank=2, base_dtype="int8"))
    specs = parameters.param_specs(config)["layers"]
    assert {n: specs[f"{n}_scale"].shape for n in ("q", "o", "gate", "down")} == {
        "q": (1, 3, 2, 128),
        "o": (1, 2, 2, 192),
        "gate": (1, 3, 100),
        "down": (1, 1, 192),
    }


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_eight_bits_are_closer_than_four_on_any_mesh(family):
    fixture = FIXTURES / family
    tokens_BT = np.load(fixture / "expected.npz")["tokens_BT"]
    exact = np.asarray(from_pretrained(fixture)(tokens_BT))
    error = {}
    for dtype in ("int8", "int4"):
        lora = LoraConfig(rank=2, base_dtype=dtype)
        one = from_pretrained(fixture, lora=lora)
        assert {
            one.params["layers"][n].dtype for n in one.params["layers"] if f"{n}_scale" in one.params["layers"]
        } == {jnp.dtype(dtype)}
        assert family == "gemma2" or {"expert_in_scale", "expert_out_scale"} < set(one.params["layers"])
        one = np.asarray(one(tokens_BT))
        four = np.asarray(
            from_pretrained(fixture, build.make_mesh("fsdp=2,tensor=2", jax.devices()[:4]), lora=lora)(tokens_BT)
        )
        np.testing.assert_allclose(one, four, atol=2e-5, rtol=0)
        error[dtype] = np.sqrt(np.mean((one - exact) ** 2) / np.mean(exact**2))
    assert 8 * error["int8"] < error["int4"] < 1.0, error  # 127 levels instead of 7


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_stay_and_only_adapters_learn(dtype):
    mesh = build.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    tokens_BT = np.load(FIXTURE / "expected.npz")["tokens_BT"]
    model = from_pretrained(FIXTURE, mesh, lora=LoraConfig(rank=2, base_dtype=dtype))
    abstract = parameters.abstract_params(model.config, mesh, jnp.float32)
    jax.tree.map(
        lambda a, r: (a.shape, a.dtype) == (r.shape, r.dtype) or pytest.fail(f"{a} {r}"), abstract, model.params
    )
    assert model.params["layers"]["gate"].dtype == jnp.dtype(dtype) and model.params["embed"].dtype == jnp.float32
    trainable, frozen = parameters.split_trainable(model.params, model.config)
    segment_BT, position_BT = np.ones_like(tokens_BT), np.broadcast_to(np.arange(12), tokens_BT.shape)

    @jax.jit
    def gradient(trainable):
        def loss(trainable):
            params = parameters.join_trainable(trainable, frozen)
            return (decoder.hidden(params, tokens_BT, segment_BT, position_BT, model.config) ** 2).sum()

        return jax.grad(loss)(trainable)

    found = gradient(trainable)["layers"]
    assert len(found) == 14 and all(np.abs(found[n]).max() > 0 for n in found if n.endswith("_b"))


@pytest.mark.parametrize(("family", "pattern"), [("gemma2", "q"), ("qwen3_moe", "q|expert_out")])
def test_merging_gives_the_dense_model_of_the_rounded_weights(tmp_path, family, pattern):
    fixture = FIXTURES / family
    tokens_BT = np.load(fixture / "expected.npz")["tokens_BT"]
    model = from_pretrained(fixture, lora=LoraConfig(rank=2, base_dtype="int4", pattern=pattern))
    merged = model.merged()
    assert {leaf.dtype for leaf in jax.tree.leaves(merged.params)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(np.asarray(merged(tokens_BT)), np.asarray(model(tokens_BT)), atol=1e-5, rtol=0)
    model.save(tmp_path / "out")
    again = from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(again(tokens_BT)), np.asarray(merged(tokens_BT)))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"^LoraConfig\.base_dtype='int3' must be '', 'int8' or 'int4'"):
        LoraConfig(rank=4, base_dtype="int3")
    with pytest.raises(ValueError, match="need adapters"):
        LoraConfig(rank=0, base_dtype="int8")
    config = dataclasses.replace(from_pretrained(FIXTURE).config, lora=LoraConfig(rank=1, base_dtype="int8"))
    with pytest.raises(ValueError, match="needs trained weights"):
        parameters.init_params(config, jax.random.key(0))
