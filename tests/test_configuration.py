"""Every config class names the key when it refuses a wrong key, type or number, in Python and on the command line."""

import ast
import dataclasses
import math
import pathlib
import re
import tomllib
from typing import Annotated, Literal, get_args, get_type_hints

import pytest

import podrl
from podrl import config as configuration
from podrl.config import Count, Finite, NonNegative, Range, build, group_of, install, numbers, percent, section
from podrl.engine.config import Sampling
from podrl.job.config import KINDS, Job


@section("outer.inner")
@dataclasses.dataclass(frozen=True)
class Inner:
    width: Count = 1


@section("outer", {"vllm_*": "podrl decodes with its own engine; set lanes."})
@dataclasses.dataclass(frozen=True)
class Outer:
    rate: NonNegative
    names: tuple[str, ...] = ()
    inner: Inner = Inner()
    limit: Count | None = None
    mode: Literal["a", "b"] = "a"
    on: bool = False
    weights: tuple[Finite, ...] = ()


def test_builds_nested_values_and_converts_lists_and_integers():
    made = build(Outer, {"rate": 1, "names": ["x", "y"], "inner": {"width": 3}, "limit": None, "mode": "b"})
    assert made == Outer(rate=1.0, names=("x", "y"), inner=Inner(3), limit=None, mode="b")
    assert isinstance(made.rate, float) and isinstance(Outer(2).rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1, "nmes": []}, r"^config has no key 'nmes'.*'names'"),
        ({"rate": 1, "inner": {"widht": 2}}, r"^config\.outer\.inner has no key 'widht'.*'width'"),
        ({}, r"config lacks rate"),
        ({"rate": "fast"}, r"^outer\.rate='fast' must be a number in \[0, 1e9\]\.$"),
        ({"rate": None}, r"outer\.rate=None must be a number"),
        ({"rate": -1}, r"outer\.rate=-1 must be a number in \[0, 1e9\]"),
        ({"rate": 1, "limit": 1.5}, r"^outer\.limit=1\.5 must be a whole number in \[1, 2147483647\] or None\.$"),
        ({"rate": 1, "inner": {"width": True}}, r"outer\.inner\.width=True must be a whole number"),
        ({"rate": 1, "mode": "c"}, r"^outer\.mode='c' must be 'a' or 'b'\.$"),
        ({"rate": 1, "on": "yes"}, r"outer\.on='yes' must be True or False"),
        ({"rate": 1, "names": "xy"}, r"outer\.names='xy' must be a list of texts"),
        ({"rate": 1, "weights": [1.0, math.inf]}, r"outer\.weights\[1\]=inf must be a number in \[-1e9, 1e9\]"),
        ({"rate": 1, "vllm_memory": 0.2}, r"'vllm_memory': podrl decodes with its own engine; set lanes\.$"),
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
    with pytest.raises(ValueError, match=r"^Inner\.width=0 must be a whole number in \[1, "):
        dataclasses.replace(Inner(), width=0)


def test_a_number_without_a_range_is_a_bug_of_ours():
    @section("loose")
    @dataclasses.dataclass(frozen=True)
    class Loose:
        size: int | None = None

    with pytest.raises(AssertionError, match=r"Loose\.size is a number and has no Range"):
        Loose()


def test_ranges_are_intervals_with_finite_ends():
    half = Range("(0, 0.5]")
    assert [value in half for value in (0.0, 1e-9, 0.5, 0.51, math.nan, math.inf)] == [False, True, True, *[False] * 3]
    with pytest.raises(AssertionError):
        _ = 1 in Range("[0, inf]")


def configs() -> dict[str, type]:
    """Collects Sampling and every dataclass of settings that a configuration reaches, by section and name."""
    found, waiting = {}, [Job, Sampling, *(kind.settings for kind in KINDS.values())]
    while waiting:
        cls = waiting.pop()
        name = f"{group_of(cls)}:{cls.__name__}"
        if name not in found:
            found[name] = cls
            kinds = [f.default if dataclasses.is_dataclass(f.default) else f.type for f in dataclasses.fields(cls)]
            kinds = [kind if isinstance(kind, type) else type(kind) for kind in kinds]
            waiting += [kind for kind in kinds if hasattr(kind, "__section__")]
    return found


FIELDS = [(cls, field) for cls in configs().values() for field in numbers(cls)]


def test_every_config_is_found():
    names = {cls.__name__ for cls in configs().values()}
    assert {"GRPOConfig", "PPOConfig", "DPOConfig", "SFTConfig", "RolloutConfig", "RLTrainingConfig"} <= names
    assert {"JudgeConfig", "LoraConfig", "ScratchModel", "LogConfig", "CheckpointConfig", "DataConfig"} <= names
    assert len(FIELDS) > 120


@pytest.mark.parametrize("value", [-1, 0, math.inf, math.nan, 10**30, 2.5, "x"], ids=str)
@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_number_is_taken_within_its_range_or_refused_by_name(cls, field, value):
    """A number within its range may still contradict another setting; the error about the contradiction also names a
    key."""
    limits, several = numbers(cls)[field], "tuple" in str(cls.__dataclass_fields__[field].type)
    whole = "whole number" if "int" in str(cls.__dataclass_fields__[field].type) else "number"
    required = {f.name: 1 for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
    if cls is Job:
        required = {"trainer": {"eval_every_n_steps": 1}, "algo": None}
    inside = not isinstance(value, str) and value in limits and (whole == "number" or isinstance(value, int))
    key = f"{cls.__name__}.{field}" if group_of(cls) else field  # a caller from outside podrl reads the class
    try:
        cls(**(required | {field: (value,) if several else value}))
    except ValueError as error:
        said = str(error)
        if inside:
            assert f"must be a {whole} in" not in said, said
        else:
            assert said.startswith(f"{key}{'[0]' if several else ''}={value!r} must be a {whole} in {limits}"), said
    else:
        assert inside


def test_defaults_lie_in_their_ranges():
    for cls, field in FIELDS:
        default = cls.__dataclass_fields__[field].default
        for value in default if isinstance(default, tuple) else (default,):
            assert value is dataclasses.MISSING or value is None or value in numbers(cls)[field], (cls, field)


def test_annotated_numbers_keep_their_own_ranges():
    @section("own")
    @dataclasses.dataclass(frozen=True)
    class Own:
        share: Annotated[float, Range("(0, 1)")] | None = None

    assert Own(share=0.5).share == 0.5
    with pytest.raises(ValueError, match=r"^Own\.share=1 must be a number in \(0, 1\) or None"):
        Own(share=1)


# Reading a field only to check or to print it does not count as a use.
CHECKS = re.compile(r"__post_init__|check|_check_\w+|describe|warnings")
ELSEWHERE = {
    "Job.compile_cache": "podrl.launch reads it from the configuration before jax is imported",
    "Job.fake_devices": "podrl.launch reads it from the configuration before jax is imported",
    "RolloutConfig.return_logprobs": "log-probabilities are always returned, so both values are honoured",
}


def used_attributes(source: str) -> set[str]:
    """Lists the attributes that a module reads, except in the functions that `CHECKS` matches."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and CHECKS.fullmatch(node.name):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        waiting += ast.iter_child_nodes(node)
    return found


def test_a_field_that_only_checks_read_counts_as_unused():
    checked, used = "def check(self): self.only_checked", "def use(self): self.used"
    assert used_attributes(f"{checked}\n{used}") == {"used"}


def test_every_field_of_every_config_is_used():
    """Every field is read outside checks, except the fields in `ELSEWHERE`, and fields with one legal value, which only
    document what podrl does."""
    package = pathlib.Path(podrl.__file__).parent
    used = set().union(*(used_attributes(path.read_text()) for path in package.rglob("*.py")))
    unread = [(cls, field) for cls in configs().values() for field in dataclasses.fields(cls) if field.name not in used]
    several = [(cls, field) for cls, field in unread if len(get_args(get_type_hints(cls)[field.name])) != 1]
    assert {f"{cls.__name__}.{field.name}" for cls, field in several} == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1.0, "100%"), (0.97, "97%"), (0.996, "99.6%"), (0.003, "0.3%"), (0.99996, "99.996%"), (1.2, "120%")],
)
def test_a_share_is_never_rounded_to_none_or_all(share, text):
    assert percent(share) == text


def test_the_command_that_installs_an_extra_fits_a_checkout_and_an_installed_podrl(tmp_path, monkeypatch):
    root = pathlib.Path(podrl.__file__).parents[1]
    monkeypatch.chdir(root)
    assert install("view") == "pip install -e '.[view]'"
    monkeypatch.chdir(tmp_path)
    assert install("view") == f"pip install -e '{root}[view]'"
    monkeypatch.setattr(configuration, "__file__", str(tmp_path / "site-packages/podrl/config.py"))
    assert install("view") == "pip install 'podrl[view]'"
    sources = {path: path.read_text() for path in (root / "podrl").rglob("*.py")}
    assert [path.name for path, text in sources.items() if "'podrl[" in text] == ["config.py"], (
        "only install() in podrl/config.py writes the command of an extra"
    )
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for text in sources.values() for extra in re.findall(r"\binstall\('(\w+)'\)", text)}
    assert len(named) > 10 and named <= set(extras)
