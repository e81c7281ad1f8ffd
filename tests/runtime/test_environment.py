"""The environment is prepared before jax is imported, and existing values are only extended."""

import glob
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from podrl.runtime import environment
from podrl.runtime.local_pod import free_ports

_FLAG = "--xla_force_host_platform_device_count"


def _prepare(env, monkeypatch, devices=8):
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge", raising=False)
    environment.prepare(env, fake_devices=devices)
    return env


def test_appends_to_flags_that_are_there(monkeypatch):
    env = _prepare({"XLA_FLAGS": "--xla_dump_to=/d"}, monkeypatch)
    assert env["XLA_FLAGS"] == f"--xla_dump_to=/d {_FLAG}=8"


@pytest.mark.parametrize("given", [{"XLA_FLAGS": f"{_FLAG}=2"}, {"JAX_NUM_CPU_DEVICES": "2"}])
def test_a_count_the_user_gave_wins(given, monkeypatch):
    env = _prepare(dict(given), monkeypatch)
    assert {key: env[key] for key in given} == given
    assert env.get("XLA_FLAGS", "") == given.get("XLA_FLAGS", "")


def test_no_devices_leaves_the_flags_alone(monkeypatch):
    assert "XLA_FLAGS" not in _prepare({}, monkeypatch, devices=0)


def test_too_late_is_an_error_that_says_so():
    code = "import jax; jax.devices(); from podrl.runtime import environment; environment.prepare({}, fake_devices=8)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "jax was initialised before the job" in done.stderr and "8 devices" in done.stderr


def _has_accelerator() -> bool:
    return any(glob.glob(f"/dev/{name}") for name in ("accel*", "nvidia*", "kfd", "vfio/[0-9]*"))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
@pytest.mark.parametrize(
    "command",
    [
        "podrl.launch --config=grpo_gemma.py --dry_run --config.rollout.max_prompt_length=64",
        "benchmarks reshard --layers=1 --dim=16 --ffn=16 --heads=2 --kv_heads=1 --head_dim=8 --vocab=16 --src=fsdp=2 "
        "--dst=data=2 --repeats=1",
    ],
)
def test_a_command_on_a_machine_without_accelerator_says_nothing_of_tpus(command, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_PLATFORM", "TPU_"))}
    if _has_accelerator():
        pytest.skip("this machine has an accelerator")
    env["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2])  # benchmarks/ is not installed
    argv = [sys.executable, "-m", *command.split()]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert "libtpu" not in done.stdout and "TPU_" not in done.stdout


_AT_JAX = """
import os, runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            print(os.environ.get("JAX_PLATFORMS"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("command", ["podrl.evaluate", "podrl.export"])
def test_a_command_that_imports_jax_first_has_chosen_the_platform(command, tmp_path):
    """jax reads JAX_PLATFORMS when it is imported; set later, libtpu reports a missing TPU."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_PLATFORM", "TPU_"))}
    env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{pathlib.Path(__file__).parents[2]}"}
    (tmp_path / "libtpu.py").write_text("")  # looks installed
    if _has_accelerator():
        pytest.skip("this machine has an accelerator")
    done = subprocess.run([sys.executable, "-c", _AT_JAX, command], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu\n"


@pytest.mark.parametrize("named", ["JAX_PLATFORMS", "TPU_WORKER_HOSTNAMES"])
def test_a_platform_that_is_named_is_kept(named):
    env = {named: "tpu"}
    environment.leave_out_libtpu(env)
    assert env == {named: "tpu"}


def test_compiled_programs_are_kept_where_the_user_says(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    environment.enable_compile_cache(env, "auto")
    directory = pathlib.Path(env["JAX_COMPILATION_CACHE_DIR"])
    assert directory.parent == tmp_path / "podrl" and directory.stat().st_mode & 0o777 == 0o700
    environment.enable_compile_cache(env, "/elsewhere/compiled")
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(directory), "a directory that the environment names has priority"
    # Small programs are cached too, but not in a bucket.
    for where, least in {"": None, "/elsewhere/compiled": "0", "gs://bucket/compiled": "0.1"}.items():
        env = {}
        environment.enable_compile_cache(env, where)
        assert env.get("JAX_COMPILATION_CACHE_DIR") == (where or None)
        assert env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") == least


def test_no_place_for_compiled_programs_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    env = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    environment.enable_compile_cache(env, "auto")
    assert "JAX_COMPILATION_CACHE_DIR" not in env


_MEMBER = """
import functools, sys
import jax, jax.numpy as jnp
from jax._src import compiler, distributed
from podrl.runtime.environment import cache_own_programs, meet_before_first_runs
address, me = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, me, cluster_detection_method="deactivate")
jax.devices()
client, original = distributed.global_state.client, compiler.compile_or_get_cached

class Tells:
    def wait_at_barrier(self, name, *args):
        client.key_value_set(f"{me} waits at {name}", "")
        client.key_value_set(f"{me} waits", "", allow_overwrite=True)
        client.wait_at_barrier(name, *args)

    def __getattr__(self, name):
        return getattr(client, name)

@functools.wraps(original)
def slowly(backend, computation, devices, *args, **kwargs):
    compiled = original(backend, computation, devices, *args, **kwargs)
    if me == 1 and devices.size == 2:
        client.blocking_key_value_get("0 waits", 60_000)
    return compiled

distributed.global_state.client, compiler.compile_or_get_cached = Tells(), slowly
cache_own_programs()
meet_before_first_runs()
misses = []
jax.monitoring.register_event_listener(lambda name, **_: misses.extend([name] * name.endswith("/cache_misses")))
mesh = jax.sharding.Mesh(jax.devices(), "x")
whole = jax.device_put(jnp.arange(2.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
jax.block_until_ready(jax.jit(lambda x: x.sum() * 3)(whole))
jax.block_until_ready(jax.jit(lambda x: x.sum() * 5)(jax.device_put(jnp.arange(7.0), jax.local_devices()[0])))
print("written", len(misses))
"""


@pytest.mark.slow
def test_every_process_of_a_cluster_finds_what_it_compiled(tmp_path):
    """The second start compiles nothing, not even programs that only process 1 runs, which plain jax never caches.

    Process 1 compiles while process 0 waits for it before their first common program. Process 0 does not wait within
    Gloo, which would give up after 30 s.
    """
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    written = []
    for _ in range(2):
        argv = [sys.executable, "-c", _MEMBER, f"127.0.0.1:{free_ports(1)[0]}"]
        members = [subprocess.Popen([*argv, str(i)], env=env, text=True, stdout=subprocess.PIPE) for i in range(2)]
        outputs = [member.communicate(timeout=120)[0] for member in members]
        assert [member.returncode for member in members] == [0, 0]
        written.append([int(output.split()[-1]) for output in outputs])
    assert min(written[0]) >= 2 and written[1] == [0, 0]
