"""Adapters: no effect at the start, merging, dropout, patterns, PEFT directories."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh import build
from podrl.models import Decoder, decoder, from_pretrained, lora, parameters, peft_files
from podrl.models.config import PROJECTIONS, LoraConfig

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "gemma2"
EXPERTS = FIXTURE.parent / "qwen3_moe"
LORA = LoraConfig(rank=2, alpha=6.0)


@pytest.fixture(scope="module", name="tokens_BT")
def _tokens():
    return np.load(FIXTURE / "expected.npz")["tokens_BT"]


def busy(model: Decoder) -> Decoder:
    """Returns the model with random adapters, which change its output."""
    layers = dict(model.params["layers"])
    for i, name in enumerate(sorted(n for n in layers if n.endswith("_lora_b"))):
        layers[name] = jax.random.normal(jax.random.key(i), layers[name].shape) * 0.1
    return Decoder(model.config, {**model.params, "layers": layers}, model.mesh)


def test_fresh_adapters_change_nothing(tokens_BT):
    base, adapted = from_pretrained(FIXTURE), from_pretrained(FIXTURE, lora=LORA)
    assert sum(parameters.is_adapter(n) for n in adapted.params["layers"]) == 14
    np.testing.assert_array_equal(np.asarray(base(tokens_BT)), np.asarray(adapted(tokens_BT)))


def test_fresh_adapters_do_not_depend_on_the_mesh():
    one = from_pretrained(FIXTURE, lora=LORA)
    eight = from_pretrained(FIXTURE, build.make_mesh("fsdp=4,tensor=2", jax.devices()), lora=LORA)
    np.testing.assert_array_equal(one.params["layers"]["o_lora_a"], eight.params["layers"]["o_lora_a"])
    other = from_pretrained(FIXTURE, lora=LORA, seed=1)
    assert (np.asarray(one.params["layers"]["o_lora_a"]) != np.asarray(other.params["layers"]["o_lora_a"])).any()


def test_merging_keeps_the_logits(tokens_BT):
    adapted = busy(from_pretrained(FIXTURE, lora=LORA))
    merged = adapted.merged()
    assert not any(parameters.is_adapter(n) for n in merged.params["layers"]) and merged.config.lora.rank == 0
    assert merged.params["embed"] is adapted.params["embed"]
    difference = np.abs(np.asarray(adapted(tokens_BT)) - np.asarray(from_pretrained(FIXTURE)(tokens_BT))).max()
    assert difference > 0.05
    np.testing.assert_allclose(np.asarray(merged(tokens_BT)), np.asarray(adapted(tokens_BT)), atol=2e-5, rtol=0)


@pytest.mark.parametrize("pattern", ["q|expert_in|expert_out", "expert_in", "down_proj"])
def test_adapters_of_experts_merge_and_survive_a_peft_directory(tmp_path, pattern):
    tokens_BT = np.load(EXPERTS / "expected.npz")["tokens_BT"]
    base, adapted = from_pretrained(EXPERTS), from_pretrained(EXPERTS, lora=dataclasses.replace(LORA, pattern=pattern))
    np.testing.assert_array_equal(np.asarray(base(tokens_BT)), np.asarray(adapted(tokens_BT)))
    adapted = busy(adapted)
    want = np.asarray(adapted(tokens_BT))
    assert np.abs(want - np.asarray(base(tokens_BT))).max() > 0.02
    np.testing.assert_allclose(np.asarray(adapted.merged()(tokens_BT)), want, atol=2e-5, rtol=0)
    adapted.save_adapters(tmp_path / "adapter", base=str(EXPERTS))
    again = from_pretrained(
        EXPERTS, build.make_mesh("fsdp=2,tensor=2", jax.devices()[:4]), adapters=tmp_path / "adapter"
    )
    for name in (n for n in adapted.params["layers"] if parameters.is_adapter(n)):
        np.testing.assert_array_equal(again.params["layers"][name], adapted.params["layers"][name], err_msg=name)
    np.testing.assert_allclose(np.asarray(again(tokens_BT)), want, atol=2e-5, rtol=0)


def test_adapters_of_experts_are_refused_on_a_model_without(tmp_path):
    from_pretrained(EXPERTS, lora=dataclasses.replace(LORA, pattern="expert_in")).save_adapters(
        tmp_path / "a", base="x"
    )
    with pytest.raises(ValueError, match=r"^LoraConfig\.pattern='expert_in' matches no projection of a gemma2 model"):
        from_pretrained(FIXTURE, adapters=tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    raw = json.loads(path.read_text())
    assert raw["target_modules"] == [] and raw["target_parameters"] == ["mlp.experts.gate_up_proj"]
    path.write_text(json.dumps(raw | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]}))
    with pytest.raises(ValueError, match=r"target_parameters=\['mlp.gate.weight'\], which podrl does not compute"):
        from_pretrained(EXPERTS, adapters=tmp_path / "a")


def test_a_merged_weight_by_hand():
    config = dataclasses.replace(from_pretrained(FIXTURE).config, lora=LoraConfig(rank=1, alpha=2.0, pattern="gate"))
    params = {
        "layers": {
            "gate": jnp.ones((1, 2, 2)),
            "gate_lora_a": jnp.array([[[1.0], [2.0]]]),
            "gate_lora_b": jnp.array([[[3.0, -1.0]]]),
        }
    }
    _, merged = lora.merge(params, config)
    # 1 + (2 / 1) * outer([1, 2], [3, -1])
    np.testing.assert_allclose(merged["layers"]["gate"], [[[7.0, -1.0], [13.0, -3.0]]])


def test_dropout_scales_what_it_keeps_and_only_when_asked(tokens_BT):
    model = busy(from_pretrained(FIXTURE, lora=dataclasses.replace(LORA, dropout=0.5)))
    segment_BT = np.ones_like(tokens_BT)
    position_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)

    @jax.jit
    def hidden(key):
        return decoder.hidden(model.params, tokens_BT, segment_BT, position_BT, model.config, dropout_key=key)

    off = decoder.hidden(model.params, tokens_BT, segment_BT, position_BT, model.config)
    first, again, other = (np.asarray(hidden(jax.random.key(k))) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != np.asarray(off)).any()
    drop = decoder.adapter_dropout(model.config, jax.random.key(0), jnp.int32(3))
    dropped = np.asarray(drop("q", jnp.ones((100, 100))))
    assert set(np.unique(dropped)) == {0.0, 2.0} and abs(dropped.mean() - 1) < 0.05
    assert (dropped != np.asarray(drop("k", jnp.ones((100, 100))))).any()


@pytest.mark.parametrize("pattern", ["q_einsum", "attn", ""])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(
        ValueError, match=r"^LoraConfig\.pattern=.* matches no projection: .* gate, up, down, expert_in, expert_out"
    ):
        LoraConfig(rank=4, pattern=pattern)


def test_patterns_match_short_and_hugging_face_names():
    config = LoraConfig(rank=4, pattern="(q|v)_proj|down")
    assert [n for n in PROJECTIONS if config.covers(n)] == ["q", "v", "down"]
    with pytest.raises(ValueError, match=r"is not a regular expression"):
        LoraConfig(rank=4, pattern="(q")
    with pytest.raises(ValueError, match=r"^LoraConfig\.dropout=1\.0"):
        LoraConfig(rank=4, dropout=1.0)


def test_a_second_set_of_adapters_is_refused():
    model = from_pretrained(FIXTURE, lora=LORA)
    with pytest.raises(ValueError, match="has adapters already"):
        lora.with_adapters(model.config, model.params, LORA, model.mesh, jnp.float32)


def test_adapters_survive_a_peft_directory(tmp_path, tokens_BT):
    model = busy(from_pretrained(FIXTURE, lora=dataclasses.replace(LORA, pattern="q|o|down")))
    model.save_adapters(tmp_path / "adapter", base=str(FIXTURE))
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert raw["target_modules"] == ["q_proj", "o_proj", "down_proj"] and raw["r"] == 2 and raw["lora_alpha"] == 6.0
    mesh = build.make_mesh("fsdp=2,tensor=4", jax.devices())
    again = from_pretrained(FIXTURE, mesh, adapters=tmp_path / "adapter")
    assert again.config == dataclasses.replace(model.config, lora=again.config.lora)
    np.testing.assert_array_equal(again.params["layers"]["o_lora_b"], model.params["layers"]["o_lora_b"])
    np.testing.assert_allclose(np.asarray(again(tokens_BT)), np.asarray(model(tokens_BT)), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("key", "value"), [("use_dora", True), ("use_rslora", True), ("rank_pattern", {"q": 3}), ("bias", "all")]
)
def test_adapters_podrl_does_not_compute_are_refused(tmp_path, key, value):
    from_pretrained(FIXTURE, lora=LORA).save_adapters(tmp_path / "adapter", base="x")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{key}=.*does not compute"):
        from_pretrained(FIXTURE, adapters=tmp_path / "adapter")


def test_adapters_of_another_model_are_refused(tmp_path):
    from_pretrained(FIXTURE.parent / "llama", lora=LORA).save_adapters(tmp_path / "adapter", base="x")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 3}))
    with pytest.raises(
        ValueError, match=r"have the wrong shape: base_model\.model\.model\.layers\.0\.self_attn\.q_proj"
    ):
        from_pretrained(FIXTURE, adapters=tmp_path / "adapter")


def test_saving_adapters_of_a_dense_model_is_refused(tmp_path):
    model = from_pretrained(FIXTURE)
    with pytest.raises(ValueError, match="no adapters to save"):
        peft_files.save_adapters(tmp_path / "a", model.config, model.params, base="x")
