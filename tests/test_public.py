"""The names and defaults of the Python API; field names follow Tunix where podrl has the concept."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

import podrl

FIELDS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "vectors" / "config_fields.json"
# Fields podrl renders differently on purpose: Tunix's default is not representable, or podrl's differs and says why.
_DIFFERENT = {"data_type", "eos_tokens", "seed"}


def test_every_public_name_exists():
    assert {name: getattr(podrl, name).__module__ for name in podrl.__all__}
    with pytest.raises(AttributeError, match="GRPOLearner"):
        _ = podrl.GRPOTrainer


def test_importing_podrl_imports_no_jax():
    code = "import podrl, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("name", ["GRPOConfig", "PPOConfig", "RolloutConfig", "RLTrainingConfig", "ClusterConfig"])
def test_fields_have_tunix_defaults_or_are_refused_with_advice(name):
    if not FIELDS.exists():
        pytest.skip("the field list is not beside the checkout")
    cls = getattr(podrl, name)
    mine = {f.name: f for f in dataclasses.fields(cls)}
    spec = json.loads(FIELDS.read_text())[name]
    for field, about in spec["fields"].items():
        if field in mine:
            default = mine[field].default
            if about["default"] is not None and field not in _DIFFERENT:
                assert repr(default) == about["default"], field
        else:
            with pytest.raises(ValueError, match=r"has no field \w+: \w+"):
                cls(**{field: None})
    for field in spec["documented_only"]:
        if field not in mine:
            with pytest.raises(ValueError, match=r"has no field \w+: \w+"):
                cls(**{field: None})


def test_roles_are_those_of_the_field():
    assert {r.name: r.value for r in podrl.Role} == {
        "ACTOR": "actor",
        "CRITIC": "critic",
        "REFERENCE": "reference",
        "REWARD": "reward",
        "ROLLOUT": "rollout",
    }
