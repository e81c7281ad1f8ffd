"""Orbax checkpoints as model directories: loaded as they were saved, on any mesh; every mismatch is listed."""

import dataclasses
import gc
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import textwrap
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig, from_pretrained, orbax_files, parameters
from podrl.models.config import gemma2_config

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


@pytest.mark.parametrize("wrapped", [False, True])
def test_leaves_that_are_not_numbers_are_refused_by_name(model, tmp_path, wrapped):
    layers = model.params["layers"]
    params = {**model.params, "layers": {**layers, "up": layers["up"].at[1, 0, 0].set(jnp.inf)}}
    orbax_files.save(tmp_path / "model", model.config, {"params": params} if wrapped else params)
    with pytest.raises(ValueError, match=r"Tensor (params/)?layers/up\[1\] in .* holds NaN or infinity"):
        from_pretrained(tmp_path / "model")


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


def test_a_long_list_is_cut_and_integers_are_refused(model, tmp_path):
    layers = {name: x.astype(jnp.int8) if name == "q" else x for name, x in model.params["layers"].items()}
    extra = {f"extra{i}": jnp.zeros(1) for i in range(9)}
    orbax_files.save(tmp_path / "model", model.config, {**model.params, **extra, "layers": layers})
    with pytest.raises(ValueError, match=r"9 leaves are unknown: extra0, .*extra7, \.\.\.\. 1 leaves are not floating"):
        from_pretrained(tmp_path / "model")


def test_unreadable_metadata_is_named(directory):
    (directory / "params" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match=r"The Orbax checkpoint .*params cannot be read"):
        from_pretrained(directory)


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 0), lambda path: os.truncate(path, 100)])
def test_lost_files_are_named(directory, damage):
    """The model is so small that its arrays share files with the table of contents."""
    for path in _data_files(directory):
        damage(path)
    with pytest.raises(ValueError, match=r"The Orbax checkpoint .*params cannot be read: .* \"(embed|layers|final)"):
        from_pretrained(directory)


def _data_files(directory):
    return [path for path in (directory / "params").rglob("*") if path.is_file() and path.parent.name == "d"]


BIG = gemma2_config(vocab_size=512, num_layers=4, model_dim=256, ffn_dim=256, num_heads=4, num_kv_heads=4, head_dim=64)
LARGEST = 4 * 256 * 256 * 4  # bytes of every projection, stacked, in float32
SLACK = 700_000  # allocations of Python, jax and Orbax besides leaves; half are Orbax's lists of counters


@pytest.fixture
def big(tmp_path):
    keys = iter(jax.random.split(jax.random.key(0), 32))
    params = jax.tree.map(
        lambda p: jax.random.normal(next(keys), p.shape), parameters.param_specs(BIG), is_leaf=parameters.is_param
    )
    orbax_files.save(tmp_path / "model", BIG, params)
    return tmp_path / "model"


# Orbax closes its event loop at the first failed read, while tensorstore still reports other reads to that loop.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_leaf_is_named(big):
    file = max(_data_files(big), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"Leaf [a-z/_]+ of the Orbax checkpoint .*params cannot be read: .* again"):
        from_pretrained(big)
    gc.collect()  # raises the warnings about unfinished reads in this test


@pytest.mark.parametrize(("layout", "devices"), [("data=1", 1), ("fsdp=2,tensor=2", 4), ("data=8", 8)])
def test_loading_holds_two_leaves_at_most(big, layout, devices):
    """The host holds one leaf in the stored dtype and in the wanted dtype. The devices' arrays in bfloat16, which are
    in the host's memory here, come on top."""
    total = 4 * sum(
        math.prod(p.shape) for p in jax.tree.leaves(parameters.param_specs(BIG), is_leaf=parameters.is_param)
    )
    assert total > 7 * LARGEST
    mesh = make_mesh(layout, jax.devices()[:devices])
    load = lambda: orbax_files.load(big / "params", BIG, mesh, jnp.bfloat16)  # noqa: E731
    load()
    tracemalloc.start()
    try:
        loaded = load()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loaded["embed"].dtype == jnp.bfloat16
    assert held < total / 2 + SLACK
    assert LARGEST / 2 < peak < held + 1.5 * LARGEST + SLACK, (peak, held)


WORKER = """
    import os, sys
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from podrl.mesh.build import make_mesh
    from podrl.models import from_pretrained, orbax_files

    rank, port, fixture, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", 3, rank)
    if rank > 0:  # process 0 has other things to do than to save models
        devices = [d for d in jax.devices() if d.process_index > 0]
        model = from_pretrained(fixture, make_mesh("fsdp=2,tensor=2", devices))
        orbax_files.save(out, model.config, model.params)
        assert os.path.exists(out + "/config.json")
        again = from_pretrained(out, make_mesh("fsdp=4", devices))
        whole = from_pretrained(fixture).params
        for got, want in zip(jax.tree.leaves(again.params), jax.tree.leaves(whole), strict=True):
            for shard in got.addressable_shards:
                np.testing.assert_array_equal(shard.data, want[shard.index])
        try:
            orbax_files.save(out, model.config, model.params)
        except ValueError as error:
            assert "is not empty" in str(error)
        else:
            raise AssertionError("saved twice")
    if rank < 2:  # alone: who reads waits for no other, nor does the first process when it saves
        local = from_pretrained(fixture, make_mesh("fsdp=2", jax.local_devices()))
        try:
            orbax_files.save(f"{out}-{rank}", local.config, local.params)
            from_pretrained(f"{out}-{rank}", make_mesh("fsdp=2", jax.local_devices()))
        except ValueError as error:
            assert rank == 1 and "Process 1 of 3 holds the whole model" in str(error)
    ocp.multihost.sync_global_processes("the end", processes={0, 1, 2})
    print("done", flush=True)
"""


@pytest.mark.nightly("podrl/models/orbax_files.py")
@pytest.mark.slow
def test_some_processes_of_a_job_save_and_load_together(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, str(script)]
    workers = []
    try:
        for rank in range(3):
            args = [str(rank), port, str(FIXTURE), str(tmp_path / "model")]
            pipe = subprocess.PIPE
            workers.append(
                subprocess.Popen([*command, *args], env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            )
        said = [worker.communicate(timeout=180)[0] for worker in reversed(workers)]
    finally:
        for worker in workers:
            worker.kill()
    assert all("done" in text for text in said), "\n".join(said)
    _assert_equal(from_pretrained(tmp_path / "model-0").params, from_pretrained(FIXTURE).params)


def test_saving_needs_a_dense_model_and_an_empty_directory(model, directory):
    with pytest.raises(ValueError, match="is not empty"):
        orbax_files.save(directory, model.config, model.params)
    adapted = dataclasses.replace(model.config, lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match="merge them first"):
        orbax_files.save(directory / "more", adapted, model.params)
