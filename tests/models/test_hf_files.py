"""Checkpoint directories: reading, writing, and every kind of damage."""

import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from podrl.mesh import build
from podrl.models import Decoder, check_vocab, from_pretrained, hf_load, hf_save, load, parameters, save
from podrl.models.config import LoraConfig, gemma2_config
from podrl.models.tensor_files import scan_directory

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(d.name for d in FIXTURES.iterdir())


def trees_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture
def checkpoint(tmp_path):
    """Copies the fixture `llama`; tests damage the copy."""
    return pathlib.Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))


def tensors_of(directory):
    return dict(safetensors.numpy.load_file(directory / "model.safetensors"))


def test_experts_in_one_tensor_are_those_in_a_tensor_each(tmp_path, caplog):
    """Reads the form of Qwen 3.5's files, which also have tensors for images and for further predicted tokens."""
    directory = pathlib.Path(shutil.copytree(FIXTURES / "qwen3_5_moe", tmp_path / "fused"))
    tensors, fused = tensors_of(directory), {}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        apart = {
            part: np.stack([tensors.pop(f"{experts}.{e}.{part}.weight") for e in range(6)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        fused[f"{experts}.gate_up_proj"] = np.concatenate([apart["gate_proj"], apart["up_proj"]], axis=1)
        fused[f"{experts}.down_proj"] = apart["down_proj"]
    fused = {name.replace("model.", "model.language_model."): tensor for name, tensor in (tensors | fused).items()}
    more = {"mtp.layers.0.mlp.experts.gate_up_proj": np.ones(3), "model.visual.patch_embed.bias": np.ones(2)}
    safetensors.numpy.save_file({**fused, **more}, directory / "model.safetensors")
    mesh = build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())
    with caplog.at_level("INFO"):
        trees_equal(load(directory, mesh)[1], load(FIXTURES / "qwen3_5_moe", mesh)[1])
    (said,) = [line for line in caplog.messages if "skipped" in line]
    assert "2 tensors" in said and "1 of mtp" in said and "1 of model.visual" in said


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    directory = pathlib.Path(shutil.copytree(FIXTURES / "glm4_moe", tmp_path / "glm"))
    further = {f"model.layers.3.{name}": np.ones(2) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    safetensors.numpy.save_file({**tensors_of(directory), **further}, directory / "model.safetensors")
    with caplog.at_level("INFO"):
        params = load(directory, dtype=jnp.bfloat16)[1]
    assert any("skipped: 2 of model.layers.3." in line for line in caplog.messages)
    trees_equal(params, load(FIXTURES / "glm4_moe", dtype=jnp.bfloat16)[1])
    # The bias stays in float32, because it decides between experts of nearly equal scores.
    assert params["layers"]["routed"]["selection_bias"].dtype == jnp.float32


def test_keys_of_layers_that_reuse_those_of_others_are_left_out(tmp_path, caplog):
    directory = pathlib.Path(shutil.copytree(FIXTURES / "gemma4_small", tmp_path / "small"))
    names = [f"model.layers.{i}.self_attn.{name}.weight" for i in (3, 5) for name in ("k_proj", "v_proj", "k_norm")]
    unused = {name: np.ones(2) for name in names}
    safetensors.numpy.save_file({**tensors_of(directory), **unused}, directory / "model.safetensors")
    with caplog.at_level("INFO"):
        trees_equal(load(directory)[1], load(FIXTURES / "gemma4_small")[1])
    (said,) = [line for line in caplog.messages if "skipped" in line]
    assert all(f"2 of self_attn.{name}" in said for name in ("k_proj", "v_proj", "k_norm"))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_the_loaded_model(tmp_path, name):
    mesh = build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())
    config, params = load(FIXTURES / name, mesh)
    save(tmp_path / "out", config, params, dtype=jnp.bfloat16)
    original, written = scan_directory(FIXTURES / name), scan_directory(tmp_path / "out")
    assert set(written) == set(original)
    for key, tensor in original.items():
        assert written[key].code == ("F32" if key.endswith("e_score_correction_bias") else "BF16")
        np.testing.assert_array_equal(written[key].read(), tensor.read())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_reference_library_reads_what_podrl_writes(tmp_path):
    config, params = load(FIXTURES / "gemma3")
    save(tmp_path / "out", config, params)
    theirs = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert theirs["model.layers.1.self_attn.k_proj.weight"].dtype == np.float32
    np.testing.assert_array_equal(
        theirs["model.layers.1.self_attn.k_proj.weight"],
        np.asarray(params["layers"]["k"][1]).reshape(config.model_dim, -1).T,
    )


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_any_floating_dtype_is_loaded_in_any_other(checkpoint, stored, wanted):
    want = {k: v.astype(stored) for k, v in tensors_of(FIXTURES / "llama").items()}
    safetensors.numpy.save_file(want, checkpoint / "model.safetensors")
    _, params = load(checkpoint, dtype=wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(
        np.asarray(params["unembed"]), want["lm_head.weight"].astype(np.float32).T.astype(wanted)
    )


def test_weights_split_over_files_are_the_same_weights(tmp_path):
    mesh = build.make_mesh("fsdp=4,tensor=2", jax.devices())
    config, params = load(FIXTURES / "qwen2", mesh)
    save(tmp_path / "out", config, params, max_file_bytes=1000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    again_config, again = load(tmp_path / "out")
    assert again_config == config
    trees_equal(params, again)


def test_numpy_and_unsharded_parameters_are_saved_alike(tmp_path):
    config, params = load(FIXTURES / "mistral")
    save(tmp_path / "numpy", config, jax.tree.map(np.asarray, params))
    save(tmp_path / "plain", config, jax.tree.map(jnp.array, jax.tree.map(np.asarray, params)))
    trees_equal(load(tmp_path / "numpy")[1], params)
    trees_equal(load(tmp_path / "plain")[1], params)


# Streaming: loading holds one tensor on the host, saving at most two.
BIG = gemma2_config(vocab_size=512, num_layers=12, model_dim=256, ffn_dim=512, num_heads=4, num_kv_heads=2, head_dim=64)
LARGEST = 512 * 256 * 4  # bytes of an embedding or MLP matrix in float32
SLACK = 300_000  # allocations of Python and jax besides tensors


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    directory = tmp_path_factory.mktemp("memory") / "model"
    params = jax.tree.map(lambda p: jnp.ones(p.shape), parameters.param_specs(BIG), is_leaf=parameters.is_param)
    save(directory, BIG, params)
    return directory, params


def peak_bytes(action) -> int:
    action()  # the first call compiles
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("layout", "devices"), [("data=1", 1), ("fsdp=2,tensor=2", 4), ("data=8", 8)])
def test_loading_holds_one_tensor_at_a_time(big, layout, devices):
    directory, params = big
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 30 * LARGEST
    mesh = build.make_mesh(layout, jax.devices()[:devices])
    peak = peak_bytes(lambda: load(directory, mesh))
    assert LARGEST < peak < LARGEST + SLACK


def test_saving_holds_two_tensors_at_most(big, tmp_path):
    names = iter("ab")
    assert peak_bytes(lambda: save(tmp_path / next(names), BIG, big[1])) < 2 * LARGEST + SLACK


def test_missing_unknown_and_misshapen_tensors_are_listed_together(checkpoint):
    tensors = tensors_of(checkpoint)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    tensors["model.norm.weight"] = np.zeros(9, np.float32)
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load(checkpoint)
    text = str(caught.value)
    assert "1 tensors are missing: model.layers.1.mlp.up_proj.weight." in text
    assert "1 tensors are unknown: model.layers.0.self_attn.q_proj.bias." in text
    assert "model.norm.weight is (9,) but must be (8,)" in text


def test_a_long_list_of_missing_tensors_is_cut(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text()) | {"num_hidden_layers": 5}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"18 tensors are missing: .*, and 10 more\."):
        load(checkpoint)


def test_integer_weights_are_refused_by_name(checkpoint):
    tensors = tensors_of(checkpoint)
    tensors["model.layers.2.mlp.down_proj.weight"] = np.zeros((8, 12), np.int8)
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.down_proj\.weight in .* has dtype I8: .* F32"):
        load(checkpoint)


def test_a_truncated_tensor_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    stored = scan_directory(checkpoint)
    victim = max(stored.values(), key=lambda t: t.stop)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=rf"Tensor {victim.name} of .* is truncated"):
        load(checkpoint)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_file_cut_in_its_header_is_named(checkpoint, length):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"model\.safetensors \({length} bytes\) is not a complete safetensors file"):
        load(checkpoint)


def test_a_header_that_lies_about_sizes_is_refused(checkpoint):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    assert data.count(b'"shape":[8,12]') == 3
    path.write_bytes(data.replace(b'"shape":[8,12]', b'"shape":[8,11]', 1))
    with pytest.raises(ValueError, match=r"has shape \(8, 11\) in BF16, but 192 bytes: the file is damaged"):
        load(checkpoint)


def test_missing_files_are_named(tmp_path):
    config, params = load(FIXTURES / "llama")
    save(tmp_path / "out", config, params, max_file_bytes=2000)
    gone = tmp_path / "out" / "model-00002-of-00006.safetensors"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
    gone.unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 6 weight files: model-00002-of-00006\.safetensors"):
        load(tmp_path / "out")
    with pytest.raises(ValueError, match=r"^'.*nowhere' is not a directory"):
        load(tmp_path / "nowhere")
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        load(tmp_path)


def test_saving_never_overwrites_and_leaves_nothing_half_done(tmp_path):
    config, params = load(FIXTURES / "llama")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").touch()
    with pytest.raises(ValueError, match="taken exists already"):
        save(tmp_path / "taken", config, params)
    broken = {**params, "final_norm": params["final_norm"][:-1]}
    with pytest.raises(ValueError, match=r"Parameter final_norm has shape \(7,\)"):
        save(tmp_path / "out", config, broken)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    adapted = from_pretrained(FIXTURES / "llama", lora=LoraConfig(rank=1))
    with pytest.raises(ValueError, match="adapters cannot be saved as plain weights"):
        save(tmp_path / "out", adapted.config, adapted.params)


def test_text_weights_of_an_image_model_are_found_among_the_rest(tmp_path):
    raw = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": raw}))
    tensors = tensors_of(FIXTURES / "gemma3")
    renamed = {f"language_model.{k}": v for k, v in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.patch_embedding.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    want_config, want = load(FIXTURES / "gemma3")
    config, params = load(tmp_path)
    assert config == want_config
    trees_equal(params, want)


def test_the_model_object():
    model = from_pretrained(FIXTURES / "llama", dtype=jnp.bfloat16)
    assert isinstance(model, Decoder) and model.params["embed"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"Tokens have shape \(4,\): give \[batch, time\]"):
        model(np.arange(4))
    trees_equal(model.params, hf_load.load(FIXTURES / "llama", dtype=jnp.bfloat16)[1])


def test_a_tokenizer_of_another_model_is_refused():
    config = from_pretrained(FIXTURES / "llama").config
    check_vocab(config, 24)
    check_vocab(config, 20)  # the model's embeddings are padded
    for size in (25, 12):
        with pytest.raises(ValueError, match=f"tokenizer has {size} ids and the model 24 embeddings"):
            check_vocab(config, size)


def test_weights_cannot_be_written_as_integers(tmp_path):
    config, params = load(FIXTURES / "llama")
    with pytest.raises(ValueError, match="written as int8"):
        hf_save.save(tmp_path / "out", config, params, dtype=jnp.int8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_weights_that_are_not_numbers_are_refused_by_name(checkpoint, name, value):
    tensors = tensors_of(checkpoint)
    tensors[name] = np.array(tensors[name])
    tensors[name].flat[-1] = value
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    for mesh in (None, build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())):
        with pytest.raises(ValueError, match=f"Tensor {name} in .*llama holds NaN or infinity"):
            load(checkpoint, mesh)


def test_weights_too_large_for_the_dtype_are_refused_by_name(checkpoint):
    tensors = tensors_of(checkpoint)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = np.array(tensors[name], np.float32)
    tensors[name][0, 0] = 1e5
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    load(checkpoint, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"{name} in .* \(1 of the \d tensors of this parameter do\), as float16"):
        load(checkpoint, dtype=jnp.float16)
