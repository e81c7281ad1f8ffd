"""MXFP4: values by hand, reading by parts, and a model in MXFP4 against the same model in bfloat16."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from podrl.mesh import build
from podrl.models import load, parameters, save
from podrl.models.hf_config import config_from_hf
from podrl.models.mxfp4 import joined
from podrl.models.tensor_files import scan_directory, scan_file

OSS = pathlib.Path(__file__).parent / "fixtures" / "gpt_oss"
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def pack(rng, experts, outputs, inputs):
    return {
        "blocks": rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8),
        "scales": rng.integers(0, 250, (experts, outputs, inputs // 32), np.uint8),
    }


def stored_in(path, tensors):
    safetensors.numpy.save_file(tensors, path)
    return joined(scan_file(path))


def test_values_by_hand(tmp_path):
    """The low half of a byte comes first; bit 3 is the sign; scale s means 2 ** (s - 127), from subnormal to large."""
    blocks = np.zeros((1, 3, 1, 16), np.uint8)
    blocks[0, :, 0, :8] = [(2 * i) | (2 * i + 1) << 4 for i in range(8)]  # codes 0 to 15 in order
    scales = np.array([[[127], [0], [252]]], np.uint8)
    whole = stored_in(tmp_path / "x", {"w_blocks": blocks, "w_scales": scales})["w"].read()
    assert whole.dtype == ml_dtypes.bfloat16 and whole.shape == (1, 32, 3)
    want_16 = np.array([*VALUES, *(-v for v in VALUES)])
    for output, exponent in enumerate((0, -127, 125)):
        np.testing.assert_array_equal(whole[0, :16, output].astype(np.float64), want_16 * 2.0**exponent)
    assert not whole[0, 16:].astype(np.float32).any()


def test_a_part_is_that_part_of_the_whole(tmp_path):
    packed = pack(np.random.default_rng(0), 3, 6, 128)
    tensor = stored_in(tmp_path / "x", {f"w_{name}": value for name, value in packed.items()})["w"]
    whole, out = tensor.read(), np.empty((2, 50, 3), ml_dtypes.bfloat16)
    assert tensor.shape == (3, 128, 6) and tensor.stop - tensor.start == whole.nbytes
    tensor.read_into(out, (slice(1, 3), slice(20, 70), slice(2, 5)))
    np.testing.assert_array_equal(out, whole[1:3, 20:70, 2:5])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_blocks": ((2, 4, 1, 16), np.uint8)}, r"w_scales .* are \('U8', \(2, 4, 1, 16\)\) and None"),
        ({"w_blocks": ((2, 4, 1, 16), np.uint8), "w_scales": ((2, 4, 2), np.uint8)}, r"\('U8', \(2, 4, 2\)\)"),
        ({"w_blocks": ((2, 4, 1, 16), np.int8), "w_scales": ((2, 4, 1), np.uint8)}, r"\('I8', \(2, 4, 1, 16\)\)"),
        ({"w_blocks": ((4, 1, 16), np.uint8), "w_scales": ((4, 1), np.uint8)}, r"MXFP4 has bytes \(U8\) of shapes"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        stored_in(tmp_path / "x", {name: np.zeros(shape, dtype) for name, (shape, dtype) in tensors.items()})


def test_a_model_in_mxfp4_is_the_model_in_bfloat16(tmp_path):
    """Reads a directory in the published form onto a mesh that cuts the experts' weights, and writes it as bfloat16."""
    raw = json.loads((OSS / "config.json").read_text()) | {"hidden_size": 32, "intermediate_size": 64}
    model, rng = config_from_hf(raw), np.random.default_rng(1)
    save(tmp_path / "made", model, parameters.init_params(model, jax.random.key(0)), dtype=jnp.bfloat16)
    plain = {name: tensor.read() for name, tensor in scan_directory(tmp_path / "made").items()}
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        pair = {f"{name}_{kind}": value for kind, value in pack(rng, experts, outputs, inputs).items()}
        pair[f"{name}_scales"] = pair[f"{name}_scales"] % 8 + 118
        plain[name] = np.ascontiguousarray(stored_in(tmp_path / "pair", pair)[name].read())
        packed |= pair
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for directory, tensors, more in (("packed", packed, quantized), ("plain", plain, {})):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text(json.dumps(raw | more))
        safetensors.numpy.save_file(tensors, tmp_path / directory / "model.safetensors")
    mesh = build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())
    config, params = load(tmp_path / "packed", mesh, jnp.bfloat16)
    same, want = load(tmp_path / "plain", mesh, jnp.bfloat16)
    assert config == same
    jax.tree.map(np.testing.assert_array_equal, params, want)
    save(tmp_path / "saved", config, params, dtype=jnp.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    written = scan_directory(tmp_path / "saved")
    assert set(written) == set(plain)
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor.read(), plain[name])
