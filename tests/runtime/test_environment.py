"""The environment is prepared before jax, and only ever appended to."""

import subprocess
import sys

import pytest

from podrl.runtime import environment

_FLAG = "--xla_force_host_platform_device_count"


def _prepare(env, monkeypatch, devices=8):
    monkeypatch.delitem(sys.modules, "jax", raising=False)
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
    code = "import jax, os; from podrl.runtime import environment; environment.prepare({}, fake_devices=8)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "jax was initialised before podrl.launch" in done.stderr
