"""Programs of the shipped configurations that no other test compiles must compile for every TPU."""

import importlib.util
import json
import os
import pathlib

import pytest

from benchmarks import compiles
from podrl.plan import chips
from podrl.plan.answers import answer_programs
from podrl.plan.training import TEACHING, training_programs

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("[a-z]*.py"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch):
    env = dict(os.environ)
    chips.prepare(env)
    for name, value in env.items():  # monkeypatch restores the variables that `prepare` sets
        monkeypatch.setenv(name, value)


def _variants(file: pathlib.Path) -> list[str]:
    """Lists the configurations of a file in the form that --config takes."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    default = module.get_config.__defaults__
    names = getattr(module, "VARIANTS", default or ("",))
    return [file.name if default == (name,) or not name else f"{file.name}:{name}" for name in names]


def test_every_shipped_configuration_is_compiled():
    shipped = [name for file in CONFIGS for name in _variants(file)]
    assert len(shipped) >= 15 and "grpo_gemma.py" in shipped
    assert set(shipped) == {case.config for case in compiles.CASES.values()} | set(compiles.SAME)
    assert set(compiles.SAME.values()) <= set(compiles.CASES)


def test_a_case_changes_keys_of_its_configuration():
    values = compiles._values({"roles": {"rollout": {"mesh": "auto"}}}, {"roles.rollout.mesh": "fsdp=-1", "seed": 7})
    assert (values["roles"]["rollout"]["mesh"], values["roles"]["trainer"]["mesh"], values["seed"]) == (
        "fsdp=-1",
        "auto",
        7,
    )


def test_the_table_has_a_row_per_program_and_a_column_per_chip():
    one = {"program": "generate", "peak_bytes": 2.5e6, "moved_bytes": 4e9, "sent_bytes": 0.0, "fits": True}
    one["cpu_seconds"] = 12.34
    found = [
        {**one, "case": "lora", "topology": "v6e:2x2", "cpu_seconds": 0.567},
        {**one, "case": "default", "topology": "v6e:2x2", "fits": False},
        {**one, "case": "default", "topology": "v5e:2x2"},
    ]
    assert compiles.table(found).splitlines() == [
        "| case | program | v5e | v6e | compile CPU s |",
        "| --- | --- | --- | --- | --- |",
        "| `default` | generate | 2.5 / 4,000 / 0 | 2.5 / 4,000 / 0, does not fit | 12 / 12 |",
        "| `lora` | generate |  | 2.5 / 4,000 / 0 | - / 0.6 |",
    ]


@needs_libtpu
@pytest.mark.usefixtures("compiler")
def test_the_programs_of_a_teacher():
    listed = {name: training_programs(compiles.setting_of(name, "v5e")) for name in ("teacher_top_k", "teacher_full")}
    names = {name: [program.name for program in programs] for name, programs in listed.items()}
    assert names == {"teacher_top_k": ["train step", TEACHING], "teacher_full": ["train step"]}


@needs_libtpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("case", "names"),
    [("sft", ["train step"]), ("kto", ["train step", "log-probabilities"]), ("reward_model", ["train step", "scores"])],
)
def test_the_programs_of_given_answers(case: str, names: list[str]):
    programs = answer_programs(compiles.setting_of(case, "v5e"))
    assert [program.name for program in programs] == names
    assert "num_partitions = 4" in programs[-1].lower().as_text()


@pytest.mark.nightly("benchmarks", "podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("case", "chip", "wanted"),
    [
        *(("replica_of_two_hosts", chip, {"prefill 64", "generate", "spill", "restore"}) for chip in compiles.CHIPS),
        ("ppo", "tpu7x", {"critic step", "values"}),
    ],
)
def test_programs_compile_and_fit(case: str, chip: str, wanted: set[str], tmp_path: pathlib.Path, capsys):
    results = tmp_path / "results.jsonl"
    options = ["--cases", case, "--chips", chip, "--programs", *wanted, f"--results={results}", "--json"]
    found = {one["program"]: one for one in compiles.run(options)["programs"]}
    assert set(found) == wanted and all(one["fits"] and one["peak_bytes"] > 0 for one in found.values())
    if "spill" in wanted:  # each host keeps the whole array
        assert "all-gather" in found["spill"]["collectives"]
        assert found["generate"]["sent_bytes"] > 0
    else:
        assert [json.loads(line)["program"] for line in results.read_text().splitlines()] == list(found)
        capsys.readouterr()
        again = compiles.run(options)["programs"]
        assert again == list(found.values()) and f"{case}, " not in capsys.readouterr().err, (
            "no program is compiled again"
        )
