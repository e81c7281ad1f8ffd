"""A teacher in a plan: its memory on the trainer's chips, and its programs, compiled for TPUs."""

import importlib.util
import json
import os
import pathlib

import jax
import pytest
from ml_collections import ConfigDict

from podrl import launch
from podrl.job.config import TINY, complete, parse, with_prompt_length
from podrl.models.hf_config import read_config
from podrl.models.sizes import config_of, parameter_count
from podrl.plan.bounds import least_bytes, least_trainer_seconds
from podrl.plan.chips import parse_topology, prepare
from podrl.plan.compile import CompileResult, measure
from podrl.plan.programs import Setting, weight_move
from podrl.plan.training import HINTED, LIKELY, TEACHING, training_programs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
COMPARED = "reference log-probabilities"


@pytest.fixture
def teacher(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Writes a model without weights, twice as wide as the tiny one, with the same ids."""
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    values = json.loads((pathlib.Path(str(TINY)) / "config.json").read_text())
    values |= {name: 2 * values[name] for name in ("hidden_size", "intermediate_size")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def _setting(
    teacher: pathlib.Path | None, topology: str = "v5e:2x2", *, offload: str = "none", **grpo: object
) -> Setting:
    """Returns the default job, in which all parameters are trained, with the teacher if there is one, else on rewards
    only."""
    chips = parse_topology(topology, key="--trainer")
    config = launch.load_config(launch.find_config("grpo_gemma.py")).to_dict()
    config["grpo"] |= grpo | {"beta": 0.0}
    config["trainer"] |= {"offload": offload}
    config["roles"] |= {"colocated": False}
    if teacher is not None:
        config["algorithm"] = "opd"
        config["model"]["reference"] = str(teacher)
    job = parse(with_prompt_length(ConfigDict(complete(config)).to_dict()))
    return Setting(job, chips, chips, 16)


def _programs(setting: Setting) -> dict:
    return {program.name: program for program in training_programs(setting)}


def test_every_form_has_its_programs_and_the_teacher_is_held_once(teacher):
    held = 4 * parameter_count(read_config(teacher)) / 4  # float32, on four chips
    without = _programs(_setting(None))
    assert list(without) == ["train step"] and without["train step"].resident == 0
    sampled, few, full = (_programs(_setting(teacher, teacher_kl=kl)) for kl in ("sampled", "top_k", "full"))
    assert list(sampled) == ["train step", COMPARED, "old log-probabilities"]
    assert list(few) == ["train step", TEACHING] and list(full) == ["train step"]
    assert sampled["train step"].resident == few["train step"].resident == pytest.approx(held, rel=0.02)
    assert full["train step"].resident == 0, (
        "the teacher's parameters are an argument of the update, so they are not counted beside it"
    )
    # The teacher's parameters are an argument of the program that scores with them. The optimizer's moments stay in
    # memory beside the program; the policy's parameters do too, unless the program reads them.
    own = parameter_count(_setting(None).model)
    assert few[TEACHING].resident == pytest.approx(4 * 2 * own / 4, rel=0.02)
    assert sampled[COMPARED].resident == pytest.approx(4 * 3 * own / 4, rel=0.02)
    assert sampled["old log-probabilities"].resident == pytest.approx(4 * 2 * own / 4 + held, rel=0.02)


@pytest.mark.parametrize(("kl", "runs"), [("sampled", 1), ("top_k", 2), ("full", 2)])
def test_a_teacher_on_the_host_is_copied_before_each_run_of_the_program_that_reads_it(teacher, kl, runs):
    own = {"teacher_kl": kl, "num_iterations": 2}
    here, there = (_programs(_setting(teacher, offload=offload, **own)) for offload in ("none", "reference"))
    assert there.keys() - here.keys() == {"copy of the reference"} and not here.keys() - there.keys()
    assert there["copy of the reference"].runs == runs
    assert there["train step"].resident == 0


def test_a_published_size_may_be_the_teacher(teacher):
    sized = _setting(pathlib.Path("qwen3-0.6b"), teacher_kl="sampled")
    assert teacher.is_dir() and sized.reference == config_of("qwen3-0.6b")
    held = 4 * parameter_count(config_of("qwen3-0.6b")) / 4
    assert _programs(sized)["train step"].resident == pytest.approx(held, rel=0.02)


def test_bounds_and_moves_have_the_teacher(teacher):
    held = 4 * parameter_count(read_config(teacher)) / 4
    with_, without = _setting(teacher, teacher_kl="full"), _setting(None)
    assert least_bytes("trainer", with_) - least_bytes("trainer", without) == pytest.approx(held, rel=0.02)
    pack = [next(p for p in weight_move(s).programs if p.name == "move: pack").resident for s in (with_, without)]
    assert pack[0] - pack[1] == pytest.approx(held, rel=0.02)
    # A model of twice the width has four times the weights in feed-forward layers, but only twice the weights in
    # attention, because its heads are the same.
    own = without.model
    attention = own.model_dim * own.head_dim * 2 * (own.num_heads + own.num_kv_heads)
    forward = attention + 3 * own.ffn_dim * own.model_dim
    theirs = 2 * attention + 4 * 3 * own.ffn_dim * own.model_dim
    times = {kl: least_trainer_seconds(_setting(teacher, teacher_kl=kl)) for kl in ("sampled", "top_k", "full")}
    unit = least_trainer_seconds(without) / (3 * forward)
    assert times["full"] == pytest.approx(unit * (3 * forward + theirs))
    assert times["top_k"] == times["sampled"] == pytest.approx(unit * (4 * forward + theirs))


def test_a_teacher_that_cannot_be_compared_is_refused_before_anything_is_compiled(teacher):
    with pytest.raises(ValueError, match=r"grpo\.teacher_top_k=100000 is more than the 384 token ids"):
        training_programs(_setting(teacher, teacher_kl="top_k", teacher_top_k=100000))
    values = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(values | {"vocab_size": 100}))
    with pytest.raises(ValueError, match=r"any of the 384 token ids of the policy, but the teacher has only 100"):
        training_programs(_setting(teacher, teacher_kl="full"))


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_every_form_compiles_for_tpus_and_its_operations_are_counted(teacher, topology):
    chip = parse_topology(topology, key="--trainer").chip
    read: dict[str, dict[str, CompileResult]] = {}
    for kl in ("", "sampled", "top_k", "full"):
        setting = _setting(teacher if kl else None, topology, **({"teacher_kl": kl} if kl else {}))
        read[kl] = {p.name: measure(p, chip, quick=True) for p in training_programs(setting)}
        assert all(m.fits and m.seconds > 0 for m in read[kl].values())
    update = {kl: programs["train step"] for kl, programs in read.items()}
    compared, teaching = read["sampled"][COMPARED], read["top_k"][TEACHING]
    assert update["sampled"].flops == pytest.approx(update[""].flops, rel=0.02), "only the advantages differ"
    assert update["full"].flops == pytest.approx(update[""].flops + compared.flops, rel=0.02), (
        "the update has the teacher's pass in addition"
    )
    assert update["top_k"].flops == pytest.approx(update[""].flops, rel=0.02), (
        "the update compares other ids, not more ids"
    )
    passes = compared.flops + read["sampled"]["old log-probabilities"].flops
    assert teaching.flops == pytest.approx(passes, rel=0.05), "one pass of each model"
    held = 4 * parameter_count(read_config(teacher)) / 4
    # A program's peak includes its arguments. With teacher_kl='full', the teacher's parameters are arguments of the
    # update.
    assert update["full"].peak - update[""].peak > held
    assert update["sampled"].resident == pytest.approx(held, rel=0.02)


def test_a_policy_that_teaches_itself_is_held_once_more_or_not_at_all(teacher):
    """The policy's average is in float32, as the parameters are here. If the current policy is the teacher, nothing
    more is held."""

    def programs(**grpo: object) -> dict:
        chips = parse_topology("v5e:2x2", key="--trainer")
        config = launch.load_config(launch.find_config("grpo_gemma.py")).to_dict()
        config |= {"algorithm": "opd", "data": config["data"] | {"hint": "{answer}"}}
        config["grpo"] |= grpo
        job = parse(with_prompt_length(ConfigDict(complete(config)).to_dict()))
        return _programs(Setting(job, chips, chips, 16))

    held = 4 * parameter_count(read_config(pathlib.Path(str(TINY)))) / 4
    for name, bytes_per_chip in {"current": 0.0, "initial": held, "ema": held}.items():
        found = programs(teacher=name)
        assert list(found) == ["train step", COMPARED, "old log-probabilities"]
        assert found["train step"].resident == pytest.approx(bytes_per_chip, rel=0.05)
        shapes = [x.shape for x in jax.tree.leaves(found[COMPARED].lower().args_info) if len(x.shape) == 3]
        assert shapes != [x.shape for x in jax.tree.leaves(found["train step"].lower().args_info) if len(x.shape) == 3]
        likely = programs(teacher=name, teacher_kl="top_k", teacher_top_k=5)
        assert list(likely) == ["train step", LIKELY, HINTED]
        assert likely["train step"].resident == found["train step"].resident
        assert likely[HINTED].resident == found[COMPARED].resident
        (columns,) = [x.shape for x in jax.tree.leaves(likely[HINTED].lower().args_info) if x.shape[3:] == (5,)]
        assert columns[:3] in shapes, "the ids have the shape of the rows with hints in their prompts"
        assert LIKELY in likely and likely[LIKELY].lower() is not None
