"""Checkpoints in the layout of Kaggle's Flax variations of Gemma become directories that podrl reads."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import sentencepiece

from podrl.contrib import kaggle_gemma
from podrl.data.tokenizer import Tokenizer
from podrl.models import hf_load, parameters
from podrl.models.hf_config import config_from_hf
from podrl.models.sizes import SIZES

SMALL = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def stored(params, *, turned):
    """Makes the layout of google-deepmind/gemma, {layer: {module: {...}}}, with rows and towers that podrl leaves
    out."""
    layers = {name: np.asarray(leaf) for name, leaf in params["layers"].items()}
    tree = {"embedder": {"input_embedding": np.concatenate([params["embed"], np.ones((16, 16), np.float32)])}}
    tree |= {"final_norm": {"scale": np.asarray(params["final_norm"])}}
    for i in range(3):
        one = {name: leaf[i] for name, leaf in layers.items()}
        gates = np.stack([one["gate"], one["up"]])
        attn = {"q_einsum": {"w": one["q"].transpose(1, 0, 2)}, "attn_vec_einsum": {"w": one["o"]}}
        attn |= {"kv_einsum": {"w": np.stack([one["k"].transpose(1, 0, 2), one["v"].transpose(1, 0, 2)])}}
        if "q_norm" in one:
            attn |= {"_query_norm": {"scale": one["q_norm"]}, "_key_norm": {"scale": one["k_norm"]}}
        mlp = {"gating_einsum": gates.transpose(0, 2, 1) if turned else gates, "linear": one["down"]}
        norms = {"pre_attention_norm": "pre_attn_norm", "post_attention_norm": "post_attn_norm"}
        norms |= {"pre_ffw_norm": "pre_mlp_norm", "post_ffw_norm": "post_mlp_norm"}
        tree[f"layer_{i}"] = {"attn": attn, "mlp": mlp} | {a: {"scale": one[b]} for a, b in norms.items()}
    return tree


def flat(tree, prefix="transformer"):
    """Converts to Kaggle's form: all keys but the last are joined by slashes; feed-forward arrays get key 'w'."""
    found = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}"
        if isinstance(value, dict):
            found |= flat(value, name)
        elif key in ("gating_einsum", "linear"):
            found[name] = {"w": value}
        else:
            found.setdefault(prefix, {})[key] = value
    return found


def write(folder, tree):
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder, tree)


@pytest.fixture(params=["gemma2-2b", "gemma3-4b"])
def size(request, monkeypatch):
    monkeypatch.setitem(SIZES, request.param, SIZES[request.param] | SMALL)
    return request.param


@pytest.fixture
def params(size):
    return parameters.init_params(config_from_hf(SIZES[size], where=size), jax.random.key(3))


@pytest.mark.parametrize("flattened", [True, False])
def test_a_converted_checkpoint_has_the_weights_of_the_model(size, params, flattened, tmp_path, gemma_pieces):
    tree = stored(params, turned=size == "gemma3-4b")
    tree |= {"vision_encoder": {"a": {"kernel": np.ones(3, np.float32)}}} if size == "gemma3-4b" else {}
    write(tmp_path / "it", flat(tree) if flattened else tree)
    (tmp_path / "tokenizer.model").write_bytes(gemma_pieces)
    kaggle_gemma.convert(tmp_path / "it", size, tmp_path / "out")
    config, found = hf_load.load(tmp_path / "out", dtype=jnp.bfloat16)
    assert config == config_from_hf(SIZES[size], where=size)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == gemma_pieces


def test_the_tokenizer_ends_turns_as_gemma_does(size, params, tmp_path, gemma_pieces):
    write(tmp_path / "it", flat(stored(params, turned=False)))
    (tmp_path / "tokenizer.model").write_bytes(gemma_pieces)
    kaggle_gemma.convert(tmp_path / "it", size, tmp_path / "out")
    tokenizer = Tokenizer(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "How many?"}], add_generation_prompt=True)
    assert text == "<bos><start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n"
    ends = [tokenizer.encode(mark) for mark in ("<eos>", "<end_of_turn>")]
    assert sorted(tokenizer.eos_ids) == sorted(i for ids in ends for i in ids)


@pytest.fixture(scope="module")
def gemma_pieces():
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["How many apples has Tom?", "Tom has 3 apples."] * 20),
        model_writer=stored,
        vocab_size=60,
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        num_threads=1,
    )
    return stored.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("layer_1"), r"pre_attn_norm is there for 2 of 3 layers"),
        (lambda tree: tree.pop("final_norm"), r"final_norm is missing"),
        (lambda tree: tree.update(more={"w": np.ones(2, np.float32)}), r"more/w is unknown"),
        (lambda tree: tree.update(final_norm={"scale": np.ones(17, np.float32)}), r"final_norm is \(17,\) but must be"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(change, message, params, size, tmp_path):
    tree = stored(params, turned=False)
    change(tree)
    write(tmp_path / "it", flat(tree))
    with pytest.raises(ValueError, match=message):
        kaggle_gemma.read(tmp_path / "it", size)


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="holds no Orbax checkpoint"):
        kaggle_gemma.read(tmp_path, "gemma2-2b")
    with pytest.raises(ValueError, match=r"--size=gemma-2b must be one of gemma2-2b"):
        kaggle_gemma.read(tmp_path, "gemma-2b")
    assert kaggle_gemma.main([f"--checkpoint={tmp_path}", "--size=gemma2-2b", f"--out={tmp_path / 'out'}"]) == 1
    assert "tokenizer.model: give Kaggle's file as --tokenizer=FILE." in capsys.readouterr().err
