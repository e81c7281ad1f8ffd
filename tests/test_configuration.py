"""build and refuses: what users read when a key or value is wrong."""

import dataclasses
from typing import Literal

import pytest

from podrl.config import build, refuses


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 1


@refuses({"vllm_*": "podrl decodes with its own engine; set lanes."})
@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float
    names: tuple[str, ...] = ()
    inner: Inner = Inner()
    limit: int | None = None
    mode: Literal["a", "b"] = "a"
    on: bool = False

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate={self.rate} must be at least 0.")


def test_builds_nested_values_and_converts_lists_and_integers():
    made = build(Outer, {"rate": 1, "names": ["x", "y"], "inner": {"width": 3}, "limit": None, "mode": "b"})
    assert made == Outer(rate=1.0, names=("x", "y"), inner=Inner(3), limit=None, mode="b")
    assert isinstance(made.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1, "nmes": []}, r"config\.nmes.*'names'"),
        ({"rate": 1, "inner": {"widht": 2}}, r"config\.inner\.widht.*'width'"),
        ({}, r"config lacks rate"),
        ({"rate": "fast"}, r"config\.rate='fast' is str but must be float"),
        ({"rate": None}, r"config\.rate is None"),
        ({"rate": 1, "limit": 1.5}, r"config\.limit=1\.5 is float but must be int or None"),
        ({"rate": 1, "inner": {"width": True}}, r"width=True is bool"),
        ({"rate": 1, "mode": "c"}, r"config\.mode='c'"),
        ({"rate": 1, "vllm_memory": 0.2}, r"vllm_memory: podrl decodes with its own engine"),
        ({"rate": -1}, r"rate=-1\.0 must be at least 0"),
    ],
)
def test_refusals_name_the_key_the_value_and_what_must_hold(values, message):
    with pytest.raises(ValueError, match=message):
        build(Outer, values)


def test_python_callers_get_the_same_refusals():
    with pytest.raises(ValueError, match="own engine"):
        Outer(rate=1.0, vllm_lora=1)
    with pytest.raises(ValueError, match="'limit'"):
        Outer(rate=1.0, limmit=1)
