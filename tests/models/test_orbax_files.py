"""Orbax checkpoints as model directories: what is saved is what is loaded, on any mesh; what does not fit is listed."""

import dataclasses
import gc
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig, from_pretrained, orbax_files

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "gemma2"


@pytest.fixture(scope="module")
def model():
    return from_pretrained(FIXTURE)


@pytest.fixture
def directory(model, tmp_path):
    orbax_files.save(tmp_path / "model", model.config, model.params)
    return tmp_path / "model"


def _assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), tree, other)


def test_a_saved_model_comes_back_on_another_mesh(model, directory):
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    loaded = from_pretrained(directory, mesh)
    assert loaded.config == model.config
    _assert_equal(loaded.params, model.params)
    like = from_pretrained(FIXTURE, mesh).params
    jax.tree.map(
        lambda x, y: x.sharding == y.sharding or pytest.fail(f"{x.sharding} {y.sharding}"), loaded.params, like
    )


def test_it_is_cast_quantised_and_adapted_like_any_other(model, directory):
    narrow = from_pretrained(directory, dtype=jnp.bfloat16)
    _assert_equal(narrow.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    lora = LoraConfig(rank=2, base_dtype="int8")
    _assert_equal(from_pretrained(directory, lora=lora).params, from_pretrained(FIXTURE, lora=lora).params)


def test_a_tree_under_params_is_found(model, directory, tmp_path):
    shutil.rmtree(directory / "params")
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(directory / "default", args=ocp.args.PyTreeSave({"params": model.params}))
    _assert_equal(from_pretrained(directory).params, model.params)


def test_what_does_not_fit_is_listed(model, tmp_path):
    layers = {name: x for name, x in model.params["layers"].items() if name != "up"}
    params = {**model.params, "layers": {**layers, "down": layers["down"][:, :-1]}, "bonus": jnp.zeros(3)}
    orbax_files.save(tmp_path / "model", model.config, params)
    with pytest.raises(ValueError, match=r"1 leaves are missing: layers/up\. 1 leaves are unknown: bonus\.") as caught:
        from_pretrained(tmp_path / "model")
    assert "layers/down is (" in str(caught.value)


# Orbax closes its event loop at the first failed read, while tensorstore still completes others into it.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named(directory):
    for path in (directory / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":  # where the arrays are
            path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"The Orbax checkpoint .*params cannot be read"):
        from_pretrained(directory)
    gc.collect()  # what was left unfinished is complained about here


def test_saving_needs_a_dense_model_and_an_empty_directory(model, directory):
    with pytest.raises(ValueError, match="is not empty"):
        orbax_files.save(directory, model.config, model.params)
    adapted = dataclasses.replace(model.config, lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match="merge them first"):
        orbax_files.save(directory / "more", adapted, model.params)
