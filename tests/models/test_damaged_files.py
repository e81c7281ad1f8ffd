"""Model files that are damaged or contradict themselves are refused in a sentence, and never misread."""

import json
import math
import pathlib
import random
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from podrl.models import from_pretrained, load
from podrl.models.hf_config import config_from_hf, read_config
from podrl.models.pretrained import check_positions
from podrl.models.tensor_files import INDEX_NAME, SINGLE_NAME, scan_directory, scan_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
_YARN = (
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_ROPE = {"rope_type": "linear", "factor": 2.0}
_CONFIGS = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in ("llama", "gemma3", "qwen3")}


def _entry(start, stop, *, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def _write(path, header, data=b"\0" * 32):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


_GOOD = {"a": _entry(0, 16), "b": _entry(16, 32)}
_BAD = {
    "negative": {"a": _entry(-16, 0, shape=[4]), "b": _entry(0, 32)},
    "into the header": {"a": _entry(-8, 8), "b": _entry(8, 32)},
    "backwards": {"a": _entry(16, 0, shape=[-4]), "b": _entry(0, 32)},
    "shared": {"a": _entry(0, 20), "b": _entry(16, 32)},
    "the same": {"a": _entry(0, 32), "b": _entry(0, 32)},
    "hole": {"a": _entry(0, 12), "b": _entry(16, 32)},
    "hole before": {"a": _entry(4, 16), "b": _entry(16, 32)},
    "hole behind": {"a": _entry(0, 16), "b": _entry(16, 28)},
    "beyond": {"a": _entry(0, 16), "b": _entry(16, 36)},
    "huge": {"a": _entry(0, 16), "b": _entry(16, 10**30)},
    "texts": {"a": _entry(0, 16), "b": _entry(16, 32) | {"shape": ["4"]}},
    "fraction": {"a": _entry(0, 16), "b": _entry(16, 32) | {"shape": [4.0]}},
    "flag": {"a": _entry(0, 16), "b": _entry(16, 32) | {"shape": [True, 4]}},
    "negative shape": {"a": _entry(0, 16), "b": _entry(16, 32, shape=[-2, -2])},
    "one offset": {"a": _entry(0, 16), "b": {**_entry(16, 32), "data_offsets": [16]}},
    "no object": {"a": _entry(0, 16), "b": 7},
    "no dtype": {"a": _entry(0, 16), "b": {"shape": [4], "data_offsets": [16, 32]}},
    "list": [1, 2],
    "twice": b'{"a": %s, "a": %s}' % (json.dumps(_entry(0, 16)).encode(), json.dumps(_entry(0, 32)).encode()),
    "deep": b"[" * 100_000,
    "no text": b'{"\xff": 1}',
}


@pytest.mark.parametrize("case", _BAD)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, case):
    assert list(scan_file(_write(tmp_path / "good", _GOOD))) == ["a", "b"]
    with pytest.raises(ValueError, match=r"damaged|truncated|safetensors"):
        scan_file(_write(tmp_path / "bad", _BAD[case]))


def test_mutated_headers_are_refused_or_describe_every_byte(tmp_path):
    """Changes some bytes in two thousand files: a file is refused, or its arrays cover the file's data, each byte
    once."""
    draw, read = random.Random(7), 0
    for i in range(2000):
        data = bytearray(_write(tmp_path / "file", _GOOD).read_bytes())
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data) - 32)] = (
                draw.choice(b'0123456789-[]{}",:.eE\x00\xff') if i % 2 else draw.randrange(256)
            )
        (tmp_path / "file").write_bytes(data)
        try:
            tensors = scan_file(tmp_path / "file").values()
        except ValueError as error:
            assert len(str(error)) < 1000
            continue
        read += 1
        assert sum(tensor.stop - tensor.start for tensor in tensors) == 32
        assert all(0 <= t.start <= t.stop <= len(data) for t in tensors) and all(
            math.prod(t.shape) >= 0 for t in tensors
        )
    assert read  # some changes do no harm, such as another name or dtype


@pytest.mark.parametrize("case", ["another file", "in two files", "another name"])
def test_an_index_that_contradicts_its_files_is_refused(tmp_path, case):
    one = {"a": np.zeros(4, np.float32)}
    two = {"b": np.ones(4, np.float32)} | ({"a": np.ones(4, np.float32)} if case == "in two files" else {})
    safetensors.numpy.save_file(one, tmp_path / "one.safetensors")
    safetensors.numpy.save_file(two, tmp_path / "two.safetensors")
    names = {"a": "one.safetensors", "b": "one.safetensors" if case == "another file" else "two.safetensors"}
    names |= {"c": "two.safetensors"} if case == "another name" else {}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ValueError, match="in two of its files" if case == "in two files" else "do not hold"):
        scan_directory(tmp_path)


def test_two_sets_of_weights_in_one_directory_are_refused(tmp_path):
    for file in ("one.safetensors", SINGLE_NAME):
        safetensors.numpy.save_file({"a": np.zeros(4, np.float32)}, tmp_path / file)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ValueError, match="it is unclear which weights to use"):
        scan_directory(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": SINGLE_NAME}}))
    assert list(scan_directory(tmp_path)) == ["a"]


@pytest.mark.parametrize("split", [False, True])
def test_a_head_of_its_own_counts_more_than_the_flag(tmp_path, split):
    """Like transformers, podrl uses a file's lm_head.weight even if tie_word_embeddings is true."""
    where = pathlib.Path(shutil.copytree(FIXTURES / "llama", tmp_path / "m"))
    tensors = dict(safetensors.numpy.load_file(where / SINGLE_NAME))
    untied = from_pretrained(where)
    assert not untied.config.tie_embeddings
    (where / "config.json").write_text(json.dumps(_CONFIGS["llama"] | {"tie_word_embeddings": True}))
    if split:
        (where / SINGLE_NAME).unlink()
        for name, held in (("x", {"lm_head.weight"}), ("y", tensors.keys() - {"lm_head.weight"})):
            safetensors.numpy.save_file({n: tensors[n] for n in held}, where / f"{name}.safetensors")
        names = {n: "x.safetensors" if n == "lm_head.weight" else "y.safetensors" for n in tensors}
        (where / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    assert not read_config(where).tie_embeddings
    tokens_BT = jnp.arange(8)[None]
    np.testing.assert_array_equal(np.asarray(from_pretrained(where)(tokens_BT)), np.asarray(untied(tokens_BT)))
    for own in (tensors["model.embed_tokens.weight"], None):  # an equal head, or no head: tied
        kept = {n: x for n, x in tensors.items() if n != "lm_head.weight"} | (
            {} if own is None else {"lm_head.weight": own}
        )
        for file in where.glob("*.safetensors*"):
            file.unlink()
        safetensors.numpy.save_file(kept, where / SINGLE_NAME)
        config, params = load(where)
        assert config.tie_embeddings and "unembed" not in params


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "llama",
            {"rope_scaling": _ROPE, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        ),
        ("llama", {"rope_scaling": _ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama", {"rope_scaling": _ROPE, "rope_parameters": {"rope_theta": 1e4}}),
        ("llama", {"rope_scaling": None, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}),
        ("gemma3", {"rope_local_base_freq": 5e3, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}),
        ("gemma3", {"rope_theta": 5e3, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}}),
    ],
)
def test_rotary_fields_that_differ_are_refused(name, change):
    base = {k: v for k, v in _CONFIGS[name].items() if not k.startswith("rope_")}
    with pytest.raises(ValueError, match=r"rope_.*(contradict them: delete one|they must be the same)"):
        config_from_hf(base | change)


@pytest.mark.parametrize("parameters", [None, {}, {"rope_theta": None}, {"rope_type": "default", "rope_theta": None}])
def test_a_null_rope_theta_is_one_that_is_not_there(parameters):
    base = {k: v for k, v in _CONFIGS["llama"].items() if not k.startswith("rope_")}
    wanted = config_from_hf(base)
    assert config_from_hf(base | {"rope_theta": None, "rope_parameters": parameters}) == wanted
    scaled = config_from_hf(base | {"rope_scaling": _ROPE | {"rope_theta": None}})
    assert scaled == config_from_hf(base | {"rope_scaling": _ROPE}) != wanted


def test_the_outer_fields_of_an_image_model_may_not_contradict_the_inner_ones():
    inner = _CONFIGS["gemma3"] | {"model_type": "gemma3_text"}
    raw = {"model_type": "gemma3", "text_config": inner, "vision_config": {}, "vocab_size": inner["vocab_size"]}
    assert config_from_hf(raw) == config_from_hf(inner)
    for outer in ({"vocab_size": 7}, {"tie_word_embeddings": not inner["tie_word_embeddings"]}):
        with pytest.raises(ValueError, match="and in text_config"):
            config_from_hf(raw | outer)


def test_every_field_with_any_value_is_read_or_refused():
    values = (None, 0, -1, 1, 2.5, True, "", "x", [], [None], {}, {"a": 1}, float("nan"), float("inf"), 10**30)
    rope = ("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "original_max_position_embeddings")
    for base in _CONFIGS.values():
        changes = [{key: value} for key in base for value in values]
        for key in ("rope_parameters", "rope_scaling"):
            for kind in ("llama3", "yarn"):
                changes += [{key: {"rope_type": kind, inner: value}} for inner in rope for value in values]
            yarn = {"rope_type": "yarn", "factor": 2.0}
            changes += [{key: yarn | {inner: value}} for inner in _YARN for value in values]
            changes += [{key: {kind: value}} for kind in ("full_attention", "sliding_attention") for value in values]
        for change in changes:
            try:
                config_from_hf({**base, **change})
            except ValueError as error:
                assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "text", ["[]", "7", '{"model_type": "llama", "model_type": "gemma"}', "[" * 100_000, "\xff", ""]
)
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"config\.json (holds a|line \d+ is not JSON|cannot be read as JSON|is not text)"
    ):
        read_config(tmp_path)


def test_prompts_need_positions_that_the_model_has(caplog):
    config = config_from_hf(_CONFIGS["llama"] | {"max_position_embeddings": 256})
    for prompt in (256, 4096):
        with pytest.raises(ValueError, match=rf"{prompt} tokens .* made for 256 .*lower rollout.max_prompt_length"):
            check_positions(config, prompt, prompt + 1)
    check_positions(config, 255, 256)
    assert not caplog.records
    check_positions(config, 128, 300)
    assert "A sample may have 300 tokens" in caplog.text
