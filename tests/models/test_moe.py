"""Experts: the choice equals its definition; values and gradients equal a dense float64 sum over all experts."""

import dataclasses
import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build, rules
from podrl.models import decoder, dispatch, moe, parameters
from podrl.models.config import Experts, LoraConfig
from podrl.models.hf_config import config_from_hf
from podrl.plan.chips import parse_topology, prepare

RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}
CONFIG = config_from_hf(RAW)


OSS = config_from_hf(
    {
        name: value
        for name, value in RAW.items()
        if name not in ("num_experts", "moe_intermediate_size", "norm_topk_prob")
    }
    | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3, "layer_types": ["full_attention"] * 2}
)


def config_with(lora=LoraConfig(), **changes):  # noqa: B008 - frozen
    experts = Experts(**({"count": 8, "chosen": 2, "ffn_dim": 12} | changes))
    return dataclasses.replace(CONFIG, experts=experts, lora=lora)


ADAPTERS = LoraConfig(rank=3, alpha=6.0, pattern="expert_in|expert_out")
INTEGERS = dataclasses.replace(ADAPTERS, base_dtype="int8")


def random_layer(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = moe.param_shapes(config)
    layer = {
        name: jnp.asarray(rng.normal(size=shape) * (0.05 if std < 0 else std or 0.5), jnp.float32)
        for name, (shape, _, std) in shapes.items()
    }
    return layer | {name: random_integers(layer[name]) for name in layer if f"{name}_scale" in layer}


def random_integers(weight):
    return jnp.clip(jnp.round(8 * weight), -7, 7).astype(jnp.int8)


def random_params(config, seed=0):
    """Draws random parameters whose adapters have an effect, and whose projections are integers if configured so."""
    params = parameters.init_params(
        dataclasses.replace(config, lora=dataclasses.replace(config.lora, base_dtype="")), jax.random.key(seed)
    )
    specs, layers = parameters.param_specs(config)["layers"], dict(params["layers"])
    for i, (name, spec) in enumerate(sorted(specs.items())):
        if name not in layers or name.endswith("_lora_b"):
            layers[name] = 0.1 * jax.random.normal(jax.random.key(i), spec.shape)
        if spec.dtype.startswith("int"):
            layers[name] = random_integers(layers[name]).astype(spec.dtype)
    return params | {"layers": layers}


def dense(layer, lora):
    """Returns a layer's weights as floats, with adapters merged."""
    layer = dict(layer)
    for name, product in (("expert_in", "EDR,EGRF->EGDF"), ("expert_out", "EFR,ERD->EFD")):
        if f"{name}_scale" in layer:
            inputs = layer[name].shape[-2]
            layer[name] = layer[name] * jnp.repeat(
                layer[f"{name}_scale"], inputs // layer[f"{name}_scale"].shape[-2], -2
            )
        if f"{name}_lora_a" in layer:
            delta = jnp.einsum(product, layer[f"{name}_lora_a"], layer[f"{name}_lora_b"])
            layer[name] = layer[name] + lora.alpha / lora.rank * delta
    return layer


def reference(x_XD, layer, experts, expert_Xk):
    """Computes every expert for every token in float64, with weight 0 for experts that are not chosen."""
    bias = lambda name: layer.get(name, 0.0)  # noqa: E731
    silu = lambda a: a / (1 + jnp.exp(-a))  # noqa: E731
    logit_XE = x_XD @ layer["router"] + bias("router_bias")
    score_XE = 1 / (1 + jnp.exp(-logit_XE)) if experts.score == "sigmoid" else jnp.exp(logit_XE)
    mask_XE = jnp.zeros(logit_XE.shape).at[jnp.arange(len(x_XD))[:, None], expert_Xk].set(1.0)
    if experts.score == "softmax":
        score_XE = score_XE / score_XE.sum(-1, keepdims=True)
    weight_XE = score_XE * mask_XE
    if experts.normalize or experts.score == "chosen":
        weight_XE = weight_XE / weight_XE.sum(-1, keepdims=True)
    h_XE2F = jnp.einsum("XD,EGDF->XEGF", x_XD, layer["expert_in"])
    h_XE2F += bias("expert_in_bias")
    a_XEF = silu(h_XE2F[:, :, 0]) * h_XE2F[:, :, 1]
    if experts.bias:  # gpt-oss
        gate_XEF, up_XEF = jnp.minimum(h_XE2F[:, :, 0], 7), jnp.clip(h_XE2F[:, :, 1], -7, 7)
        a_XEF = (up_XEF + 1) * gate_XEF / (1 + jnp.exp(-1.702 * gate_XEF))
    y_XED = jnp.einsum("XEF,EFD->XED", a_XEF, layer["expert_out"]) + bias("expert_out_bias")
    out_XD = experts.scale * jnp.einsum("XE,XED->XD", weight_XE, y_XED)
    if experts.shared_dim:
        h_X2S = jnp.einsum("XD,GDS->XGS", x_XD, layer["shared_in"])
        shared_XD = (silu(h_X2S[:, 0]) * h_X2S[:, 1]) @ layer["shared_out"]
        gate_X1 = 1 / (1 + jnp.exp(-x_XD @ layer["shared_gate"]))[:, None] if experts.shared_gate else 1.0
        out_XD = out_XD + gate_X1 * shared_XD
    return out_XD


VARIANTS = {
    "softmax": {},
    "not_normalised": {"normalize": False},
    "sigmoid_scaled": {"score": "sigmoid", "scale": 2.5},
    "sigmoid_biased": {"score": "sigmoid", "selection_bias": True},
    "softmax_of_the_chosen": {"score": "chosen", "normalize": False},
    "shared": {"shared_dim": 10},
    "shared_gated": {"shared_dim": 10, "shared_gate": True},
    "one_chosen": {"chosen": 1, "normalize": False},
    "all_chosen": {"chosen": 8},
    "adapters": {"lora": ADAPTERS},
    "adapter_in": {"lora": dataclasses.replace(ADAPTERS, pattern="expert_in")},
    "adapter_out": {"lora": dataclasses.replace(ADAPTERS, pattern="expert_out")},
    "integers": {"lora": INTEGERS},
    "integers_in_groups": {"lora": dataclasses.replace(INTEGERS, pattern="q"), "ffn_dim": 128},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_all_experts_in_float64(variant):
    check_against_reference(config_with(**VARIANTS[variant]), 30, seed=len(variant))


@pytest.mark.parametrize("scale", [1.0, 30.0])  # at scale 30 most gate and up values are clipped
def test_biases_and_the_bounded_activation(scale):
    layer = random_layer(OSS)
    layer["expert_in"] *= scale
    check_against_reference(OSS, 30, seed=3, layer=layer)


@pytest.mark.parametrize(("count", "chosen", "tokens"), [(1, 1, 3), (5, 3, 300), (6, 6, 1)])
def test_any_number_of_experts_and_tokens(count, chosen, tokens):
    check_against_reference(config_with(count=count, chosen=chosen, ffn_dim=5), tokens, seed=count)


def check_against_reference(config, tokens, seed, layer=None):
    rng = np.random.default_rng(seed)
    layer, x_BTD = layer or random_layer(config, seed), jnp.asarray(rng.normal(size=(1, tokens, 16)), jnp.float32)
    cotangent = rng.normal(size=(tokens, 16))

    def ours(layer, x_BTD):
        out_BTD, route_BTk = moe.feed_forward(x_BTD, layer, 0, config)
        return jnp.sum(out_BTD[0] * cotangent.astype(np.float32)), (out_BTD, route_BTk)

    gradients = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True, allow_int=True)
    (_, (out_BTD, route_BTk)), got = jax.jit(gradients)(layer, x_BTD)
    expert_Xk = np.asarray(route_BTk[0]) - 1
    assert all(len(set(row)) == config.experts.chosen for row in expert_Xk.tolist())
    with jax.enable_x64(True):
        wide, x_XD = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (layer, x_BTD[0]))

        def theirs(layer, x_XD):
            out_XD = reference(x_XD, dense(layer, config.lora), config.experts, expert_Xk)
            return jnp.sum(out_XD * cotangent), out_XD

        (_, want_XD), want = jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True)(wide, x_XD)
        want_XD, want = jax.tree.map(np.asarray, (want_XD, want))
    np.testing.assert_allclose(out_BTD[0], want_XD, atol=1e-5 * max(1, np.abs(want_XD).max()), rtol=0)
    np.testing.assert_allclose(got[1][0], want[1], atol=1e-5 * max(1, np.abs(want[1]).max()), rtol=0)
    for name, value in got[0].items():
        if f"{name}_scale" in layer or name.endswith("_scale"):
            continue  # integers and their scales are not trained
        scale = max(1, np.abs(want[0][name]).max())
        np.testing.assert_allclose(value, want[0][name], atol=1e-5 * scale, rtol=0, err_msg=name)


def test_the_experts_with_the_highest_scores_are_chosen():
    config = config_with(score="sigmoid", selection_bias=True, chosen=3)
    layer, x_XD = random_layer(config), jnp.asarray(np.random.default_rng(1).normal(size=(20, 16)), jnp.float32)
    expert_Xk, weight_Xk, _ = moe.route(x_XD, layer, config.experts)
    score_XE = 1 / (1 + np.exp(-np.asarray(x_XD) @ np.asarray(layer["router"])))
    want_Xk = np.argsort(-(score_XE + np.asarray(layer["selection_bias"])), axis=-1)[:, :3]
    np.testing.assert_array_equal(expert_Xk, want_Xk)
    weight = np.take_along_axis(score_XE, want_Xk, -1)  # the weights leave out the selection bias
    np.testing.assert_allclose(weight_Xk, weight / weight.sum(-1, keepdims=True), atol=1e-6)


def test_the_use_of_experts_is_counted_in_the_layer_where_it_is_least_even():
    experts = config_with(chosen=2, count=8).experts
    even_Xk, same_Xk = np.arange(16).reshape(8, 2) % 8 + 1, np.tile([3, 5], (8, 1))
    real = np.arange(10) < 8
    route_LBTk = np.stack([even_Xk, same_Xk]).reshape(2, 1, 8, 2)
    route_LBTk = np.concatenate([route_LBTk, np.full((2, 1, 2, 2), 1)], axis=2)  # padding does not count
    measure = lambda route, real: [float(x) for x in moe.use_of_experts(jnp.asarray(route), real[None], experts)]  # noqa: E731
    np.testing.assert_allclose(measure(route_LBTk, real), [8, 0], atol=1e-6)
    np.testing.assert_allclose(measure(route_LBTk[:1], real), [2, 1], atol=1e-6)
    half_Xk = np.arange(16).reshape(8, 2) % 4 + 1  # 4 of 8 experts: log 4 is half-way from log 2 to log 8
    np.testing.assert_allclose(measure(half_Xk[None, None], real[:8]), [4, 0.5], atol=1e-6)
    unknown = np.full((1, 1, 10, 2), moe.UNKNOWN)
    assert np.isfinite(measure(unknown, real)).all() and measure(unknown, real)[0] == 0


def test_given_routes_are_taken_and_unknown_ones_chosen():
    config = config_with()
    layer, x_BTD = random_layer(config), jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 16)), jnp.float32)
    own_BTk = np.asarray(moe.feed_forward(x_BTD, layer, 0, config)[1])
    given_BTk = np.array([[[1, 8], [3, 4], [0, 0], [0, 0], [8, 7], [2, 1]]], np.uint8)
    taken_Xk, _, own_Xk = moe.route(x_BTD[0], layer, config.experts, jnp.asarray(given_BTk[0]))
    np.testing.assert_array_equal(own_Xk + 1, own_BTk[0])
    np.testing.assert_array_equal(taken_Xk + 1, np.where(given_BTk == moe.UNKNOWN, own_BTk, given_BTk)[0])
    _, reported_BTk = moe.feed_forward(x_BTD, layer, 0, config, route_BTk=jnp.asarray(given_BTk))
    np.testing.assert_array_equal(reported_BTk, own_BTk)  # the router's own choice
    again, _ = moe.feed_forward(x_BTD, layer, 0, config, route_BTk=jnp.asarray(own_BTk))
    np.testing.assert_array_equal(again, moe.feed_forward(x_BTD, layer, 0, config)[0])

    def loss(router):
        return jnp.sum(moe.feed_forward(x_BTD, {**layer, "router": router}, 0, config, route_BTk=given_BTk)[0] ** 2)

    assert np.abs(jax.grad(loss)(layer["router"])).max() > 1e-3  # the router gets gradients for given routes, too


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    config = config_with()
    layer, x_BTD = random_layer(config), jnp.ones((1, 500, 16))
    given_BTk = jnp.broadcast_to(jnp.asarray([3, 5]), (1, 500, 2))
    out_BTD, _ = moe.feed_forward(x_BTD, layer, 0, config, route_BTk=given_BTk)
    np.testing.assert_array_equal(out_BTD, jnp.broadcast_to(out_BTD[:, :1], out_BTD.shape))
    assert np.abs(out_BTD).max() > 0.1


def test_tokens_that_nobody_reads_cost_no_rows_and_change_no_other():
    config = config_with()
    layer, x_BTD = random_layer(config), jnp.asarray(np.random.default_rng(1).normal(size=(2, 50, 16)), jnp.float32)
    real_BT = jnp.asarray(np.random.default_rng(2).random((2, 50)) < 0.3)

    def loss(layer, x_BTD, real_BT):
        out_BTD, route_BTk = moe.feed_forward(x_BTD, layer, 0, config, real_BT=real_BT)
        read_BTD = out_BTD if real_BT is None else jnp.where(real_BT[..., None], out_BTD, 0)
        return jnp.sum(jnp.sin(read_BTD)), (out_BTD, route_BTk)

    grads, (out_BTD, route_BTk) = jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x_BTD, real_BT)
    whole_BTD, own_BTk = moe.feed_forward(x_BTD, layer, 0, config)
    np.testing.assert_allclose(out_BTD, jnp.where(real_BT[..., None], whole_BTD, 0), atol=1e-6)
    np.testing.assert_array_equal(route_BTk, own_BTk)  # padding's routes are recorded, too
    of_real = jax.grad(lambda layer, x: loss(layer, x[real_BT][None], None)[0], argnums=(0, 1))(layer, x_BTD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max())), grads, of_real)

    form = dispatch.Form(8, 1, "silu", 1.0, False)
    choice_Xk = jnp.where(real_BT.reshape(-1, 1), own_BTk.reshape(-1, 2) - 1, config.experts.count)
    plan = dispatch._plan(choice_Xk, form)
    assert int(plan.live_P.sum()) == 2 * int(real_BT.sum()) and int(plan.count_E.sum()) == int(plan.live_P.sum())


@pytest.mark.parametrize("lora", [LoraConfig(), INTEGERS], ids=["plain", "integers"])
def test_experts_of_all_layers_in_one_array_are_those_of_each(lora):
    config = config_with(lora=lora)
    layers = [random_layer(config, seed) for seed in range(3)]
    whole = {n: jnp.stack([layer[n] for layer in layers]) for n in layers[0] if n.startswith("expert_")}
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(1, 20, 16)), jnp.float32)
    for index, layer in enumerate(layers):
        want = moe.feed_forward(x_BTD, layer, 0, config)
        got = moe.feed_forward(x_BTD, {**layer, **whole}, jnp.int32(index), config)
        jax.tree.map(np.testing.assert_array_equal, got, want)


FOUR_BITS = LoraConfig(rank=2, alpha=6.0, pattern="q|expert_in|expert_out", base_dtype="int4")
SPREAD = ("expert=4,fsdp=2", "expert=2,fsdp=2,tensor=2", "data=2,expert=2,seq=2", "expert=8")


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        *((spec, CONFIG) for spec in ("data=2,fsdp=2,tensor=2", "data=1,fsdp=4,seq=2,tensor=1", *SPREAD)),
        ("fsdp=2,seq=2,tensor=2", OSS),
        ("expert=2,fsdp=2,tensor=2", dataclasses.replace(OSS, lora=ADAPTERS)),
        ("expert=2,fsdp=2,tensor=2", config_with(lora=FOUR_BITS)),
        ("data=1,fsdp=2,tensor=4", config_with(lora=FOUR_BITS, ffn_dim=192)),  # 3 groups of scales, 4 devices
    ],
    ids=lambda part: part if isinstance(part, str) else f"{part.family}{part.lora.base_dtype}",
)
def test_a_mesh_changes_neither_logits_nor_gradients(spec, config):
    params, keys = random_params(config), iter(jax.random.split(jax.random.key(5), 99))
    for name, x in params["layers"].items():
        if "bias" in name or name == "sinks":  # these parameters begin at 0
            params["layers"][name] = 0.3 * jax.random.normal(next(keys), x.shape)
    trainable, frozen = parameters.split_trainable(params, config)
    tokens_BT = np.random.default_rng(0).integers(0, 32, (8, 16)).astype(np.int32)
    position_BT = np.broadcast_to(np.arange(16), (8, 16))

    def loss(trainable, frozen, mesh):
        params = parameters.join_trainable(trainable, frozen)
        hidden = decoder.hidden(
            params, tokens_BT, np.ones_like(tokens_BT), position_BT, config, mesh=mesh, remat="full"
        )
        return jnp.sum(jnp.sin(decoder.unembed(params, hidden, config)))

    mesh = build.make_mesh(spec, jax.devices())
    placed = jax.tree.map(
        lambda x, a: jax.device_put(x, a.sharding),
        params,
        parameters.abstract_params(config, mesh, jnp.dtype("float32")),
    )
    want, want_grad = jax.jit(jax.value_and_grad(lambda t, f: loss(t, f, None)))(trainable, frozen)
    placed = parameters.split_trainable(placed, config)
    got, got_grad = jax.jit(jax.value_and_grad(lambda t, f: loss(t, f, mesh)))(*placed)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert config.lora.rank == 0 or all(np.abs(grad).max() > 1e-3 for grad in jax.tree.leaves(want_grad))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * max(1, np.abs(b).max())), got_grad, want_grad
    )


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(remat):
    params, tokens_BT = random_params(CONFIG), np.arange(24, dtype=np.int32)[None] % 32

    def loss(params, remat):
        position_BT = np.arange(24)[None]
        hidden = decoder.hidden(params, tokens_BT, np.ones_like(tokens_BT), position_BT, CONFIG, remat=remat)
        return jnp.sum(decoder.unembed(params, hidden, CONFIG) ** 2)

    want = jax.jit(jax.grad(lambda p: loss(p, "none")))(params)
    got = jax.jit(jax.grad(lambda p: loss(p, remat)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max())), got, want)


def test_padding_is_given_to_no_expert():
    config = config_from_hf(RAW | {"num_hidden_layers": 1})  # in a second layer, padding would attend to other tokens
    params, tokens_BT = random_params(config), np.arange(24, dtype=np.int32)[None] % 32
    segment_BT = (np.arange(24) < 15).astype(np.int32)[None]
    layers = params["layers"] | {"expert_out": 2 * params["layers"]["expert_out"]}
    one, other = (
        decoder.hidden(whole, tokens_BT, segment_BT, np.arange(24)[None], config)
        for whole in (params, params | {"layers": layers})
    )
    np.testing.assert_array_equal(one[0, 15:], other[0, 15:])  # experts add nothing to padding
    assert np.abs(one - other)[0, :15].max(axis=-1).min() > 1e-3


def test_products_of_experts_are_computed_again_only_if_everything_is():
    params, tokens_BT = random_params(CONFIG), np.arange(24, dtype=np.int32)[None] % 32

    def loops(remat):
        def loss(params):
            hidden = decoder.hidden(
                params, tokens_BT, np.ones_like(tokens_BT), np.arange(24)[None], CONFIG, remat=remat
            )
            return jnp.sum(decoder.unembed(params, hidden, CONFIG) ** 2)

        text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
        return len(re.findall(r" while\(", text))  # includes the loops over blocks of rows

    assert loops("none") == loops("dots") < loops("full")


def test_the_cost_is_that_of_the_chosen_experts():
    """Blocks have at most 1.5 times as many rows as there are pairs of a token and an expert that it chose, with 8
    experts as with 64."""
    rng = np.random.default_rng(0)
    for count in (8, 64):
        expert_Xk = np.argsort(rng.normal(size=(4096, count)), axis=-1)[:, :2]
        plan = dispatch._plan(jnp.asarray(expert_Xk), dispatch.Form(count, 1, "silu", 1.0, False))
        rows = int(plan.blocks) * plan.block
        assert expert_Xk.size <= rows <= 1.5 * expert_Xk.size
        np.testing.assert_array_equal(
            np.asarray(plan.token_P)[np.asarray(plan.row_Xk)], np.arange(4096)[:, None] + [0, 0]
        )


@pytest.mark.parametrize("lora", [LoraConfig(), ADAPTERS, INTEGERS], ids=["plain", "adapters", "integers"])
@pytest.mark.parametrize("oss", [False, True])
@pytest.mark.parametrize("alignment", [1, 128])
def test_the_tpu_form_equals_the_blocks(monkeypatch, alignment, oss, lora):
    monkeypatch.setattr(dispatch.tiles, "alignment", lambda *_: alignment)
    config = config_with(lora=lora, count=4, ffn_dim=128)
    if oss:
        config = dataclasses.replace(OSS, experts=dataclasses.replace(OSS.experts, ffn_dim=128), lora=lora)
    config = dataclasses.replace(config, model_dim=128)
    layer = random_layer(config)
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(1, 40, 128)), jnp.float32)
    kernels = dispatch._kernels
    monkeypatch.setattr(dispatch, "_kernels", lambda *args: kernels(*args, interpret=True))

    def loss(layer, x_BTD, tpu):
        out_BTD, route_BTk = moe.feed_forward(x_BTD, layer, 0, config, tpu=tpu)
        return jnp.sum(jnp.sin(out_BTD)), route_BTk

    gradients = lambda tpu: jax.value_and_grad(lambda *a: loss(*a, tpu), argnums=(0, 1), has_aux=True, allow_int=True)  # noqa: E731
    want, got = gradients(False)(layer, x_BTD), gradients(True)(layer, x_BTD)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, atol=1e-4 * max(1, np.abs(b).max()), rtol=1e-4)
    stack = layer | {n: jnp.stack([layer[n] * 0, layer[n]]) for n in layer if n.startswith("expert_")}
    out_BTD, _ = moe.feed_forward(x_BTD, stack, jnp.int32(1), config, tpu=True)
    np.testing.assert_allclose(out_BTD, moe.feed_forward(x_BTD, layer, 0, config)[0], atol=1e-4)


@pytest.mark.parametrize("tpu", [False, True])
def test_parts_of_the_experts_add_up_to_all_of_them(monkeypatch, tpu):
    """A device with some of the experts computes their share of outputs and gradients, in both forms of products."""
    kernels = dispatch._kernels
    monkeypatch.setattr(dispatch, "_kernels", lambda *args: kernels(*args, interpret=True))
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape)  # noqa: E731
    x_XD, w_in, w_out = draw(0, 40, 128), 0.1 * draw(1, 4, 2, 128, 128), 0.1 * draw(2, 4, 128, 128)
    expert_Xk, weight_Xk = jax.lax.top_k(draw(3, 40, 4), 2)[1], draw(4, 40, 2)

    def loss(args, first, count, parts):
        x_XD, weight_Xk, *w = args
        own = {name: a[first : first + count] for name, a in zip(("expert_in", "expert_out"), w, strict=True)}
        form = dispatch.Form(count, parts, "silu", 1.0, tpu)
        out_XD = dispatch.apply(x_XD, expert_Xk - first, weight_Xk, own, 0, form)
        return jnp.sum(out_XD * jnp.arange(128)), out_XD

    args, of = (x_XD, weight_Xk, w_in, w_out), jax.value_and_grad(loss, has_aux=True)
    halves = [of(args, first, 2, 2) for first in (0, 2)]
    total = jax.tree.map(lambda *each: sum(each), *halves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4), total, of(args, 0, 4, 1))


def test_selection_biases_do_not_train():
    config = config_with(selection_bias=True)
    params = random_params(config)
    trainable, frozen = parameters.split_trainable(params, config)
    assert list(frozen["layers"]) == ["selection_bias"] and "selection_bias" not in trainable["layers"]
    assert jax.tree.structure(parameters.join_trainable(trainable, frozen)) == jax.tree.structure(params)


def test_what_experts_do_not_have_is_refused_by_name():
    for pattern, named in (("q|up", "up"), ("q|gate_proj|up_proj|down_proj", "gate, up"), ("q|expert_in|down", "down")):
        with pytest.raises(ValueError, match=rf"matches {named} but not the experts, which are a qwen3_moe model's"):
            dataclasses.replace(CONFIG, lora=LoraConfig(rank=2, pattern=pattern))
    with pytest.raises(ValueError, match=r"lora.dropout=0.5 with adapters on experts"):
        dataclasses.replace(CONFIG, lora=dataclasses.replace(ADAPTERS, dropout=0.5))
    for pattern in ("gate_up_proj|down_proj", "expert_.*", ".*"):
        lora = LoraConfig(rank=2, pattern=pattern)
        assert {"expert_in_lora_a", "expert_out_lora_b"} <= set(moe.param_shapes(config_with(lora=lora)))
    default = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
    adapters = {n for n in parameters.param_specs(default)["layers"] if parameters.is_adapter(n)}
    assert adapters == {f"{n}_lora_{side}" for n in "qkvo" for side in "ab"}
    with pytest.raises(ValueError, match="9 experts of 8 cannot be chosen"):
        Experts(8, 9, 4)
    with pytest.raises(ValueError, match="Router score 'max' is not known"):
        Experts(8, 2, 4, score="max")
    with pytest.raises(ValueError, match="shared_gate=True without"):
        Experts(8, 2, 4, shared_gate=True)


@pytest.mark.nightly("podrl/models")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
def test_the_kernels_compile_for_tpu_without_a_copy_of_the_weights(monkeypatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    mesh = build.make_mesh("data=1", parse_topology("v5e:2x2", key="--trainer").devices()[:1])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    config = dataclasses.replace(config_with(ffn_dim=256), model_dim=512)
    of = lambda *shape, kind=jnp.bfloat16: jax.ShapeDtypeStruct(shape, kind, sharding=place)  # noqa: E731
    layer = {name: of(*shape) for name, (shape, _, _) in moe.param_shapes(config).items()}
    stack = layer | {name: of(4, *layer[name].shape) for name in ("expert_in", "expert_out")}

    def decode(layer, x_R1D, index):
        return moe.feed_forward(x_R1D, layer, index, config, tpu=True)[0]

    def loss(layer, x_BTD):
        return jnp.sum(moe.feed_forward(x_BTD, layer, 0, config, tpu=True)[0].astype(jnp.float32) ** 2)

    decoded = jax.jit(decode).lower(stack, of(32, 1, 512), of(kind=jnp.int32)).compile()
    assert decoded.as_text().count("tpu_custom_call") >= 3
    # A copy of a layer's expert_in, in bfloat16, would need at least this many bytes.
    assert decoded.memory_analysis().temp_size_in_bytes < 2 * math.prod(layer["expert_in"].shape)
    jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layer, of(1, 1024, 512)).compile()


@pytest.mark.nightly("podrl/models")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
def test_gradients_of_experts_are_scattered_and_not_summed_on_every_device(monkeypatch):
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    mesh = build.make_mesh("fsdp=4,expert=4", parse_topology("v5p:2x2x4", key="--trainer").devices())
    config = dataclasses.replace(config_with(count=8, ffn_dim=256), model_dim=512)

    def of(shape, axes, kind):
        return jax.ShapeDtypeStruct(shape, kind, sharding=rules.sharding_for(axes, shape, mesh))

    layer = {name: of(shape, axes, jnp.float32) for name, (shape, axes, _) in moe.param_shapes(config).items()}
    x_BTD = of((16, 512, 512), ("batch", "time", "act"), jnp.bfloat16)

    def loss(layer, x_BTD):
        out_BTD, _ = moe.feed_forward(x_BTD, layer, 0, config, mesh=mesh, tpu=True)
        return jnp.sum(out_BTD.astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss)).lower(layer, x_BTD).compile().as_text()
    summed = [line for line in text.splitlines() if re.search(r"= \S+ all-reduce\(", line)]
    own = 2 * 512 * 256 // 4  # entries of `expert_out` on a device: a quarter of the matrices of 2 experts
    for line in summed:
        sizes = [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"\w+\[([\d,]+)\]", line.split("all-reduce(")[0])
        ]
        assert max(sizes) < own, line
    assert len(re.findall(r" reduce-scatter\(", text)) >= 3  # of two matrices' gradients, and of outputs
