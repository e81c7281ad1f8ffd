"""Models with layers of several kinds: order of the layers, adapters, integers, checkpoints, refusals."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build
from podrl.models import LoraConfig, decoder, from_pretrained, parameters, peft_files
from podrl.models.config import PROJECTIONS
from podrl.models.hf_config import config_from_hf, config_to_hf

GEMMA4 = pathlib.Path(__file__).parent / "fixtures" / "gemma4"
EXPERTS, SMALL = (GEMMA4.with_name(name) for name in ("gemma4_experts", "gemma4_small"))
RAW = json.loads((GEMMA4 / "config.json").read_text())
MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


@pytest.fixture(scope="module")
def model():
    return from_pretrained(GEMMA4)


def hidden(params, config, tokens_BT, **how):
    """Computes the hidden states of rows of one segment, as one program, because single operations compile slower."""
    position_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    forward = jax.jit(lambda params, *row: decoder.hidden(params, *row, config, **how))
    return forward(params, tokens_BT, np.ones_like(position_BT), position_BT)


def pattern(model, kind_L):
    """Returns the model's configuration with layers of the kinds `kind_L`."""
    rows = [model.config.kind_L.index(kind) for kind in kind_L]
    per_layer = {
        name: tuple(getattr(model.config, name)[i] for i in rows)
        for name in ("window_L", "rope_theta_L", "rope_scaling_L")
    }
    return dataclasses.replace(model.config, num_layers=len(kind_L), kind_L=kind_L, **per_layer)


@pytest.mark.parametrize(
    "kind_L, want",
    [
        ((0, 0, 1, 0, 0, 1), (((0, 2), (1, 1)), 2)),
        ((0, 1, 1, 0), (((0, 1), (1, 2), (0, 1)), 1)),
        ((0, 1, 0, 1, 0), (((0, 1), (1, 1), (0, 1), (1, 1), (0, 1)), 1)),
    ],
)
def test_runs_of_equal_layers_are_the_model_in_its_order(model, kind_L, want):
    config = pattern(model, kind_L)
    assert config.patterns() == (want,)
    params = parameters.init_params(config, jax.random.key(0))
    tokens_BT = jnp.arange(14).reshape(2, 7)
    x_BTD = decoder.embed(params, tokens_BT, config, jnp.dtype(jnp.float32))
    rotary = decoder.rotations(config, jnp.broadcast_to(jnp.arange(7), (2, 7)))
    stacks, infos = parameters.stacks_of(params["layers"], config), decoder.layer_infos(config)
    taken = [0, 0]

    def attend(q, k, v, info, sinks):
        return decoder.attention(q, k, v, jnp.ones_like(tokens_BT), window=info.window, softcap=0.0), None

    @functools.partial(jax.jit, static_argnums=3)
    def after(x_BTD, layer, info, kind):
        return decoder.block(x_BTD, layer, info, rotary[kind], config.alike()[kind], attend)[0]

    for i, kind in enumerate(kind_L):
        layer, info = jax.tree.map(lambda a: np.asarray(a)[taken[kind]], (stacks[kind], infos[kind]))  # noqa: B023
        assert int(info.index) == i
        x_BTD = after(x_BTD, layer, info, kind)
        taken[kind] += 1
    want_BTD = decoder.rms_norm(x_BTD, params["final_norm"], config)
    for remat in ("none", "full"):
        np.testing.assert_allclose(hidden(params, config, tokens_BT, remat=remat), want_BTD, atol=2e-5)


@pytest.mark.parametrize(
    ("directory", "mesh"),
    [
        (GEMMA4, "data=2,fsdp=2"),
        (GEMMA4, "fsdp=2,tensor=2"),
        (GEMMA4, "data=2,seq=2"),
        pytest.param(SMALL, "fsdp=2,seq=2,tensor=2", marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_mesh_computes_what_one_device_does(directory, mesh):
    model = from_pretrained(directory)
    # The small model's norms are over 4 to 8 numbers and magnify rounding. With an epsilon of 1e-6 the error is 9e-4 of
    # a gradient's largest entry, with 1e-2 it is 2e-4. In float64, with 1e-6, mesh and device agree to 2e-11.
    config = dataclasses.replace(model.config, norm_eps=1e-2) if directory == SMALL else model.config
    mesh = build.make_mesh(mesh, jax.devices()[: math.prod(build.parse_mesh(mesh))])
    tokens_BT = jnp.arange(64).reshape(4, 16) % config.vocab_size
    weight_D = jnp.arange(config.model_dim) - 3.0

    def total(params, mesh):
        return (hidden(params, config, tokens_BT, mesh=mesh) @ weight_D).mean()

    shapes = parameters.abstract_params(config, mesh, jnp.dtype(jnp.float32))
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), model.params, shapes)
    got, want = (
        jax.jit(jax.value_and_grad(total), static_argnums=1)(p, m) for p, m in ((params, mesh), (model.params, None))
    )
    # Gradients are as large as 20. The order of sums differs between processors, which changes a gradient by 1e-5 of
    # its value.
    share = 1e-3 if directory == SMALL else 0.0
    largest = jax.tree.map(lambda x: np.abs(x).max(), want)
    jax.tree.map(
        lambda a, b, most: np.testing.assert_allclose(a, b, rtol=1e-4, atol=max(1e-4, share * most)),
        *(got, want, largest),
    )


def test_scalars_of_layers_do_not_train_and_are_joined_again(model):
    trainable, frozen = parameters.split_trainable(model.params, model.config)
    assert {kind: list(leaves) for kind, leaves in frozen["layers"].items()} == {
        "sliding": ["layer_scalar"],
        "full": ["layer_scalar"],
    }
    joined = parameters.join_trainable(trainable, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(model.params)
    gradient = jax.grad(lambda p: hidden(p, model.config, jnp.arange(6)[None]).sum())(model.params)
    assert not any(np.any(stack["layer_scalar"]) for stack in gradient["layers"].values())


@pytest.mark.parametrize(
    ("directory", "absent"),
    [(GEMMA4, {"full": {"v"}}), (SMALL, {"sliding_shared": {"k", "v"}, "full_shared": {"k", "v"}})],
    ids=["gemma4", "gemma4_small"],
)
def test_adapters_of_every_kind_merge_and_go_through_peft_files(directory, absent, tmp_path):
    model, adapted = from_pretrained(directory), from_pretrained(directory, lora=LoraConfig(rank=2))
    for kind, stack in adapted.params["layers"].items():
        assert {name for name in PROJECTIONS if f"{name}_lora_a" not in stack} == absent.get(kind, set())
    trainable, frozen = parameters.split_trainable(adapted.params, adapted.config)
    moved = jax.tree.map(lambda x: x + 0.1, trainable)
    params = parameters.join_trainable(moved, frozen)
    tokens_BT = jnp.arange(6)[None]
    want_BTD = hidden(params, adapted.config, tokens_BT)
    trained = type(model)(adapted.config, params, adapted.mesh)
    merged = trained.merged()
    np.testing.assert_allclose(hidden(merged.params, merged.config, tokens_BT), want_BTD, atol=1e-3)
    trained.save_adapters(tmp_path / "adapters", base="base")
    config, again = peft_files.load_adapters(tmp_path / "adapters", model.config, model.params)
    np.testing.assert_array_equal(hidden(again, config, tokens_BT), want_BTD)


@pytest.mark.parametrize("directory", [GEMMA4, EXPERTS, SMALL], ids=lambda d: d.name)
def test_projections_of_every_kind_are_stored_as_integers(directory):
    rounded = from_pretrained(directory, lora=LoraConfig(rank=2, base_dtype="int8"))
    for stack in rounded.params["layers"].values():
        assert stack["q"].dtype == jnp.int8 and stack["q_scale"].dtype == jnp.float32
        assert "down_lora_a" in stack  # the dense MLP beside experts has adapters, too
    specs = parameters.param_specs(rounded.config)
    shapes = jax.tree.map(lambda p: p.shape, specs, is_leaf=parameters.is_param)
    assert shapes == jax.tree.map(lambda a: a.shape, rounded.params)


@pytest.mark.parametrize("directory", [GEMMA4, EXPERTS, SMALL], ids=lambda d: d.name)
def test_a_saved_model_is_read_as_the_same_on_other_devices(directory, tmp_path):
    model = from_pretrained(directory)
    model.save(tmp_path / "out")
    again = from_pretrained(tmp_path / "out", build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices()))
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_both_spellings_of_the_full_layers_are_read():
    config = config_from_hf(RAW)
    old = config_to_hf(config)
    assert "per_layer_config" not in old and old["global_head_dim"] == 16
    assert config_from_hf(old) == config
    assert config_from_hf({"model_type": "gemma4", "text_config": RAW, "tie_word_embeddings": True}) == config
    assert config_from_hf(RAW | {"use_bidirectional_attention": "vision"}) == config  # concerns only tokens of images


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size_per_layer_input": 16}, "vocab_size_per_layer_input=262144 and vocab_size=24"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: a sliding and a full layer must come before"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers=7"),
        ({"num_kv_shared_layers": 1, **MOE}, "num_kv_shared_layers=1: .* no experts"),
        ({"enable_moe_block": True}, "lacks num_experts, which a gemma4 model with enable_moe_block needs"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"head_dim": 16, "hidden_size": 4}, "5": {}}}, "per_layer_config"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types"),
    ],
)
def test_what_podrl_does_not_compute_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(RAW | changes)


def test_embeddings_for_each_layer_are_what_a_missing_field_means():
    less = {name: value for name, value in RAW.items() if name != "hidden_size_per_layer_input"}
    assert config_from_hf(less | {"vocab_size_per_layer_input": 24}).ple_dim == 256
    assert config_from_hf(RAW | {"hidden_size_per_layer_input": None}) == config_from_hf(RAW)


def test_a_producing_layer_gets_the_gradients_of_the_layers_that_reuse_its_keys():
    small = from_pretrained(SMALL)
    assert [kind.name for kind in small.config.kinds] == ["sliding", "full", "sliding_shared", "full_shared"]
    assert small.config.patterns() == ((((0, 2), (1, 1)), 1), (((2, 2), (3, 1)), 1))
    # Without an output projection a layer's own queries do not reach the output, so only the last three layers use k.
    stacks = {
        name: {**stack, "o": stack["o"] * 0} if not name.endswith("_shared") else stack
        for name, stack in small.params["layers"].items()
    }
    params, tokens_BT = {**small.params, "layers": stacks}, jnp.arange(12)[None]
    gradient = jax.jit(jax.grad(lambda p, t: hidden(p, small.config, t).sum()))(params, tokens_BT)["layers"]
    assert np.any(gradient["full"]["k"][-1]) and np.any(gradient["sliding"]["v"][-1])
    assert not np.any(gradient["sliding"]["k"][0]), "only the last sliding layer shares its keys with later layers"
    assert set(gradient["full"]) - set(gradient["full_shared"]) == {"k", "v", "k_norm"}
