"""Planning: topologies, the step's arithmetic, and whole plans with the TPU compiler."""

import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from processes import run

from launch import machines
from podrl import launch
from podrl.job.config import complete, parse, with_prompt_length
from podrl.mesh.build import AXES, make_mesh, parse_mesh
from podrl.mesh.chips import CHIPS, GIB
from podrl.models.hf_config import read_config
from podrl.models.parameters import param_specs
from podrl.models.sizes import expert_parameter_count, parameter_count
from podrl.offload import on_host, to_devices
from podrl.plan import __main__ as plan
from podrl.plan import variants
from podrl.plan.__main__ import _topologies, command_of
from podrl.plan.bounds import _forward, least_bytes, least_trainer_seconds
from podrl.plan.chips import parse_topology, prepare
from podrl.plan.compile import CompileResult, _wanted_bytes, measure
from podrl.plan.predict import cost, predict, rebalanced
from podrl.plan.programs import Program, Setting, _decode_work
from podrl.plan.report import PREDICTED, PlanReport, _advice, _cost_line, _print_step
from podrl.plan.training import filled_micro_batches, training_programs
from podrl.plan.variants import (
    Trial,
    Variant,
    _meshed,
    _rollout_candidates,
    _total,
    _trainer_candidates,
    _trial,
    differences,
    helping,
    shortfall,
)
from podrl.rundir.console import make_console
from podrl.runtime import signals
from podrl.view.runs import RunFiles

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")


def test_topologies():
    two = parse_topology("v5p:2x2x4*2", key="--trainer")
    assert (two.chip.name, two.shape, two.slices, str(two)) == ("v5p", (2, 2, 4), 2, "v5p:2x2x4*2")
    with pytest.raises(ValueError, match=r"--rollout='v5x:2x4' names the generation 'v5x'\. Known: "):
        parse_topology("v5x:2x4", key="--rollout")
    with pytest.raises(ValueError, match=r"a v5p slice has 3 sizes of at least 1, as in v5p:2x2x4"):
        parse_topology("v5p:2x4", key="--trainer")
    with pytest.raises(ValueError, match="must look like v5e:2x4"):
        parse_topology("2x4", key="--trainer")


def test_the_plan_takes_the_shapes_that_the_launchers_take():
    def taken(parse: Callable[[str, str], object], spec: str) -> bool:
        try:
            parse(spec, "--trainer")
        except ValueError:
            return False
        return True

    sizes, shapes = (1, 2, 3, 4, 6, 8, 16, 32), set()
    for name, dims in (("v4", 3), ("v5e", 2), ("v5p", 3), ("v6e", 2), ("tpu7x", 3)):
        hosts = [machine for machine in machines.MACHINES if machine.split("-")[0] == name]
        for shape in itertools.product(sizes, repeat=dims):
            text = "x".join(map(str, shape))
            launched = any(taken(machines.parse_slices, f"{host}:{text}") for host in hosts)
            planned = taken(lambda spec, key: parse_topology(spec, key=key), f"{name}:{text}")
            assert planned == launched, f"{name}:{text}"
            shapes |= {f"{name}:{text}"} if planned else set()
    assert {"v5e:2x4", "v5p:4x4x8", "v6e:16x16", "tpu7x:1x1x1"} <= shapes and "v6e:4x16" not in shapes
    with pytest.raises(ValueError, match=r"'v5p:2x4x8' is not a slice that GKE makes: v5p comes as 2x2x1, 2x2x2"):
        parse_topology("v5p:2x4x8", key="--trainer")


def test_gpus_of_one_machine():
    eight = parse_topology("h100:8", key="--trainer")
    assert (str(eight), eight.predicted, eight.chip.flops) == ("h100:8", True, 989e12)
    assert parse_topology("l4:1", key="--trainer").chip.hbm < 24e9 < eight.chip.hbm
    for wrong in ("h100:9", "h100:0", "h100:2x4", "l4:4*2"):
        with pytest.raises(ValueError, match="must be one machine with 1 to 8 GPUs, such as "):
            parse_topology(wrong, key="--trainer")
    with pytest.raises(ValueError, match=r"names the generation 'h10'\. Did you mean 'h100'"):
        parse_topology("h10:8", key="--trainer")
    env = {"XLA_FLAGS": "--a"}
    prepare(env, gpus=2)  # works without libtpu
    assert env == {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=6", "JAX_PLATFORMS": "cpu"}
    assert _topologies("h100:2", "l4:1")[1].chip.name == "l4"
    with pytest.raises(ValueError, match="one is GPUs and the other TPUs, but a job has one kind of devices"):
        _topologies("h100:2", "v5e:2x2")


@pytest.mark.parametrize("gpus", ["h100:2", "l4:2"])
def test_programs_of_a_job_on_gpus_are_counted_on_cpu_devices_and_marked_so(gpus):
    chips = parse_topology(gpus, key="--trainer")
    config = launch.load_config(launch.find_config("grpo_gemma.py")).to_dict()
    config["rollout"] |= {"max_prompt_length": 64}
    config["grpo"] |= {"beta": 0.0}
    job = parse(ConfigDict(complete(config)).to_dict())
    setting = Setting(job, chips, chips, 16)
    assert setting.trainer_mesh().size == setting.rollout_mesh().size == 2
    (step,) = training_programs(setting)
    lowered = step.lower()
    assert "stablehlo.while" in lowered.as_text()
    # The memory of the default job includes weights and two moments in float32, spread over two devices.
    held = 12 * parameter_count(setting.model) / 2
    assert held < least_bytes("trainer", setting) < 20 * held
    assert least_trainer_seconds(setting) > 0
    assert all(word in PREDICTED for word in ("Counted", "Predicted", "compiled for CPU devices"))


@pytest.mark.parametrize(("trainer", "rollout"), [("h100:2", "h100:2"), ("h100:2", "h100:1"), ("l4:1", "l4:3")])
def test_a_job_on_gpus_is_planned_by_the_command(trainer, rollout):
    command = [
        sys.executable,
        "-m",
        "podrl.plan",
        "--config=grpo_gemma.py",
        "--config.roles.colocated=False",
        "--quick",
    ]
    command += [f"--trainer={trainer}", f"--rollout={rollout}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Everything fits." in done.stdout and "compiled for CPU devices" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("family", "shared"), [("qwen3_5", False), ("gemma2", True)])
def test_batches_of_several_pieces_a_sample_are_planned_with_the_arrays_of_a_run(family, shared):
    """Pieces share their beginnings, except in models with linear attention, whose batches have no `last_BT`."""
    chips = parse_topology("h100:2", key="--trainer")
    config = launch.load_config(launch.find_config("ppo_gemma.py")).to_dict()
    config["model"] |= {"path": str(FIXTURES / family)}
    config["rollout"] |= {"max_prompt_length": 64, "max_response_tokens": 80, "kv_cache_size": 160}
    config["env"] = {"environment": "agents.py:Forks"}
    setting = Setting(parse(ConfigDict(complete(config)).to_dict()), chips, chips, 16)
    score = next(p for p in training_programs(setting) if p.name == "reference log-probabilities")
    (_, batch), _ = score.lower().args_info
    assert (batch.rows.last_BT is not None) == shared
    assert setting.pack_shape(setting.trainer_mesh()).tree == shared


@pytest.mark.parametrize("family", ["gemma4", "qwen3", "qwen3_5"])
def test_the_least_time_of_a_step_counts_the_projections_of_every_kind_of_layer(family):
    model = read_config(FIXTURES / family)
    layers = [(alike.projections, param_specs(alike)["layers"]) for alike in model.alike()]
    assert _forward(model) == 2 * sum(math.prod(specs[name].shape) for names, specs in layers for name in names)


def test_the_memory_of_a_program_on_gpus_holds_its_temporaries():
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    lower = lambda: jax.jit(lambda a, b: (jnp.sin(a @ b) @ b).sum(0)).lower(x, x)  # noqa: E731
    found = measure(Program("p", "trainer", lower, 1), parse_topology("l4:1", key="--trainer").chip)
    assert 3 * 512 * 512 * 4 <= found.peak < 6 * 512 * 512 * 4  # two arguments, and at least one product
    assert found.flops == pytest.approx(2 * 2 * 512**3, rel=0.1) and found.fits


def test_the_memory_of_a_program_on_gpus_leaves_out_arrays_on_the_host_whose_copies_take_time():
    machine = parse_topology("l4:2", key="--trainer")
    here = NamedSharding(make_mesh("fsdp=2", machine.devices()), PartitionSpec("fsdp"))
    waiting, unread = (jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=on_host(here)) for _ in range(2))
    half = 512 * 512 * 4 / 2  # bytes of an array on each device
    copy = jax.jit(lambda x, y: to_devices(x, here))
    change = jax.jit(lambda x: jax.device_put(to_devices(x, here) + 1, on_host(here)), donate_argnums=0)
    for lower, peak in ((lambda: copy.lower(waiting, unread), half), (lambda: change.lower(waiting), 0)):
        found = measure(Program("p", "trainer", lower, 1), machine.chip)
        assert found.host == half and found.host_s == half / machine.chip.host_rate == found.seconds
        assert peak <= found.peak <= peak + half


def test_a_side_that_idles_most_of_a_step_is_told_how_to_split_the_chips():
    measured = [_program("trainer", 1, 1.0), _program("rollout", 1, 7.0)]
    step = predict(measured, 0.0, max_staleness=1, colocated=False)
    assert rebalanced(step, 8, 8) == (2, 14)  # 8 and 56 chip-seconds
    assert rebalanced(step, 1, 1) == (1, 1)
    report = PlanReport(None, measured, None, step, {}, [], [], chips=(8, 8))  # pyright: ignore[reportArgumentType]
    assert "trainer idles 86% of a step: of the 16 chips, about 2 for the trainer and 14 for the" in _advice(report)
    assert not _advice(dataclasses.replace(report, chips=(0, 0)))  # trainer and rollout on the same chips
    even = predict([_program("trainer", 1, 1.0), _program("rollout", 1, 2.0)], 0.0, max_staleness=1, colocated=False)
    assert not _advice(dataclasses.replace(report, prediction=even))  # a side idles for half of the step


def test_a_search_prints_the_command_that_runs_what_it_found():
    given = ["--trainer=v5e:2x4", "--search", "--noquick", "--config.trainer.remat=full", "--config.data.path=a b"]
    chosen = ["trainer.remat=dots", "trainer.train_micro_batch_size=4"]
    command = command_of("grpo_gemma.py:lora", given, chosen)
    assert command == (
        "python -m podrl.launch --config=grpo_gemma.py:lora '--config.data.path=a b' --config.trainer.remat=dots "
        "--config.trainer.train_micro_batch_size=4"
    )
    step = predict([_program("trainer", 1, 1.0)], 0.0, max_staleness=0, colocated=False)
    report = PlanReport(None, [], None, step, {}, [], chosen, command=command)  # pyright: ignore[reportArgumentType]
    console = make_console(60)
    console.file = io.StringIO()
    _print_step(console, report)
    assert command in console.file.getvalue().splitlines()  # on one line at any width


@needs_libtpu
@pytest.mark.parametrize(
    ("variant", "topology", "billions"),
    [
        ("qwen3_06b_v6e8", "v6e:2x2", 0.60),
        ("qwen3_17b_v6e8", "v6e:2x2", 1.72),
        ("qwen3_4b_v6e16", "v6e:2x4", 4.02),
        ("qwen3_8b_v5p16", "v5p:2x2x2", 8.19),
        ("qwen3_8b_v6e32", "v6e:4x4", 8.19),
        ("qwen3_14b_v6e32", "v6e:4x4", 14.77),
        ("qwen3_32b_v5p32", "v5p:2x2x4", 32.76),
        ("qwen3_30b_a3b_v5p32", "v5p:2x2x4", 30.53),
        ("qwen3_30b_a3b_v6e64", "v6e:4x8", 30.53),
        ("qwen35_08b_v6e8", "v6e:2x2", 0.75),
        ("qwen35_2b_v6e8", "v6e:2x2", 1.88),
        ("qwen35_4b_v6e16", "v6e:2x4", 4.21),
        ("qwen35_9b_v6e32", "v6e:4x4", 8.95),
        ("qwen35_27b_v5p32", "v5p:2x2x4", 26.90),
        ("qwen35_35b_a3b_v5p32", "v5p:2x2x4", 34.66),
        ("gemma4_e2b_v6e16", "v6e:2x4", 4.63),
        ("gemma4_e4b_v6e16", "v6e:2x4", 7.46),
        ("gemma4_26b_a4b_v5p32", "v5p:2x2x4", 25.23),
        ("gemma4_31b_v5p32", "v5p:2x2x4", 30.70),
    ],
)
def test_every_size_of_qwen_and_gemma4_has_room_on_its_chips(monkeypatch, variant, topology, billions):
    chips = _setting(monkeypatch, topology).trainer
    file = launch.find_config(f"grpo_{'qwen' if variant.startswith('qwen') else 'gemma'}.py")
    config = launch.load_config(f"{file}:{variant}").to_dict()
    setting = Setting(parse(ConfigDict(complete(config)).to_dict()), chips, chips, 512)
    parameters = parameter_count(setting.model)
    assert round(parameters / 1e9, 2) == billions and setting.model.lora.rank == 0
    assert setting.trainer_mesh().size == setting.rollout_mesh().size == len(chips.devices())
    # Weights and two moments of 4 bytes are spread over the trainer's chips, and take at most half of a chip's memory.
    kept = least_bytes("trainer", setting)
    assert 12 * parameters / len(chips.devices()) < kept < chips.chip.hbm / 2 > least_bytes("rollout", setting)


@needs_libtpu
def test_a_search_says_its_best_from_the_start_and_keeps_to_the_keys_of_the_configuration(monkeypatch):
    job: dict = {"model": {"path": "", "size": "llama3-8b"}, "rollout": _PROMPTS, "grpo": {"beta": 0.0}}
    said: list[str] = []
    seconds = iter(range(100, 0, -1))

    def total(side: str, variant: Variant, known: object) -> Trial:
        """Returns a trial that fits and is faster than the trial before."""
        return Trial(variant.keys, "", True, 1.0, 0.0, float(next(seconds)))

    monkeypatch.setattr(variants, "_total", total)
    for key, value in (("train_micro_batch_size", 1), ("micro_batch_sequences", 8)):
        setting = _setting(monkeypatch, "v5p:2x2x2", **job, trainer={key: value, "remat": "full"})
        found, _ = variants.search(setting, log=said.append, leads=plan._leads)
        changed = [one for one in differences(setting, found) if "micro" in one or "None" in one]
        assert all(one.startswith(f"trainer.{key}=") for one in changed), changed
        assert found.job.pack_shape(found.trainer_mesh()).micro_batches >= 1
    counted = next(index for index, line in enumerate(said) if line.startswith("search: counted, nothing compiled yet"))
    first = next(index for index, line in enumerate(said) if line.startswith("trainer: roles."))
    assert counted < first and re.search(r"takes at least [\d.]+ s, with roles\.trainer\.mesh=", said[counted])
    tried = [line for line in said if line.startswith("trainer: roles.")]
    bests = [re.search(r"best so far: ([\d.]+) s with roles\.trainer\.mesh=", line) for line in tried]
    assert all(bests) and float(bests[0][1]) == 100.0  # pyright: ignore[reportOptionalSubscript]
    left = signals.sentence(signal.SIGTERM, plan._unfinished)  # a signal ends the search here
    trainer, rollout = (line.rpartition("best so far: ")[2] for line in (tried[-1], said[-1]))
    assert left == (
        f"SIGTERM before the plan was complete. Best so far of the trainer: {trainer}. Best so far of the rollout: "
        f"{rollout}."
    )


def test_the_environment_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\[tpu\]'"):
        prepare({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    env = {"TPU_SKIP_MDS_QUERY": "0"}
    prepare(env)
    assert env["TPU_SKIP_MDS_QUERY"] == "0" and env["JAX_PLATFORMS"] == "cpu"


def _program(side: str, runs: float, seconds: float) -> CompileResult:
    return CompileResult("p", side, runs, True, 0, 0, GIB, 1.0, compute_s=seconds)


def test_strictly_on_policy_the_sides_take_turns():
    measured = [_program("trainer", 2, 1.0), _program("rollout", 10, 0.5), _program("both", 1, 9.0)]
    step = predict(measured, 1.0, max_staleness=0, colocated=False)
    assert (step.trainer_s, step.rollout_s, step.step_s) == (2.0, 5.0, 8.0)
    assert (step.trainer_idle, step.rollout_idle) == (5 / 8, 2 / 8)
    assert "trainer waits 62%" in step.waits


def test_a_job_costs_its_steps_at_a_multiple_of_the_roofline():
    step = predict([_program("trainer", 2, 1.0), _program("rollout", 10, 0.5)], 1.0, max_staleness=0, colocated=False)
    found = cost(step, steps=450, chips=16, factor=2.5, price=1.2)
    assert (found.hours, found.chip_hours, found.dollars) == (2.5, 40.0, 48.0)  # 450 x 8 s x 2.5 = 9,000 s
    assert _cost_line(found, 450, 2.5).startswith(
        "450 steps at 2.5 times the roofline (--factor): 2.5 hours, 40 chip-hours, 48 dollars. "
    )
    assert "--price=DOLLARS" in _cost_line(dataclasses.replace(found, dollars=0.0), 450, 2.5)


def test_with_staleness_the_slower_side_sets_the_pace():
    measured = [_program("trainer", 2, 1.0), _program("rollout", 10, 0.5)]
    step = predict(measured, 1.0, max_staleness=1, colocated=False)
    assert (step.step_s, step.waits) == (6.0, "the trainer waits for the rollout, 50% of the step")
    assert predict(measured, 1.0, max_staleness=1, colocated=True).step_s == 8.0


def test_the_slowest_resource_bounds_a_program():
    program = dataclasses.replace(_program("trainer", 1, 1.0), memory_s=2.0, network_s=0.5, peak=3 * GIB, resident=GIB)
    assert (program.seconds, program.bound, program.missing) == (2.0, "memory", 3 * GIB)


def test_what_the_compiler_asked_for():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (22.50G) exceeds "
        "available HBM (15.75G)."
    )
    assert _wanted_bytes(message) == (22.5 * GIB, True)  # True: the program's arguments come on top
    whole = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded hbm capacity "
        "by 2.75G. Memory usage report: "
    )
    assert _wanted_bytes(whole) == (18.5 * GIB, False)
    assert _wanted_bytes("INVALID_ARGUMENT: hbm") is None


def test_what_the_compiler_refused_does_not_fit_whatever_it_counted():
    refused = dataclasses.replace(_program("trainer", 1, 0.0), fits=False, peak=0.5 * GIB, at_least=True)
    trial = _trial(("k=1",), [dataclasses.replace(_program("trainer", 2, 1.0), peak=0.9 * GIB), refused])
    assert not trial.fits and trial.missing == 0 and trial.peak == 0.5 * GIB and trial.seconds == 2.0
    assert shortfall(trial).startswith("refused by the compiler")
    assert shortfall(dataclasses.replace(refused, peak=3 * GIB)) == "at least 2.00 GiB too much"


def test_what_is_printed_of_a_plan_that_does_not_fit():
    whole = dataclasses.replace(_program("trainer", 1, 0.0), fits=False, peak=18.0 * GIB, resident=0.5 * GIB)
    whole = dataclasses.replace(whole, name="train step", capacity=15.75 * GIB)
    stubborn = dataclasses.replace(whole, name="move: pack", peak=16 * GIB)
    knobs = {
        "train step": [
            Trial(("trainer.remat=full",), "train step", True, 8.0 * GIB, 0.0, 1.0),
            Trial(("model.lora.rank=16",), "train step", False, 16.0 * GIB, 0.25 * GIB, 1.0, at_least=True),
        ]
    }
    step = predict([_program("trainer", 1, 2.0), whole], 0.5, max_staleness=0, colocated=False)
    report = PlanReport(None, [whole, stubborn], None, step, knobs, [], ["trainer.remat=full"])
    assert not report.fits
    console = make_console(140)
    console.file = io.StringIO()
    _print_step(console, report)
    lines = console.file.getvalue().splitlines()
    assert "train step does not fit: it needs 18.50 GiB of 15.75 GiB per chip, 2.75 GiB too much." in lines
    assert "  --config.trainer.remat=full: 8.00 GiB, fits" in lines
    assert "  --config.model.lora.rank=16: 16.00 GiB, still at least 0.25 GiB too much" in lines
    assert "move: pack does not fit: it needs 16.50 GiB of 15.75 GiB per chip, 0.75 GiB too much." in lines
    assert "  No setting that podrl.plan tries makes it smaller." in lines
    assert "Best found: --config.trainer.remat=full" in lines and lines[-1] == "It does not fit."
    assert any(line.startswith("Who waits: the trainer waits") for line in lines)


def _plan(*flags: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "podrl.plan", "--config=grpo_gemma.py", "--config.roles.colocated=False", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
def test_every_program_of_the_default_job_compiles_for_tpu_and_a_run_of_it_shows_the_plan(tmp_path):
    done = _plan("--trainer=v5e:2x2", "--quick", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads(done.stdout)
    names = [program["name"] for program in plan["programs"]]
    assert {"prefill 64", "generate", "train step", "reference log-probabilities", "move: cross"} <= set(names)
    assert plan["fits"] and all(program["peak"] < program["capacity"] for program in plan["programs"])
    step = next(program for program in plan["programs"] if program["name"] == "train step")
    # Forward, backward and the recomputation of 'dots': between 6 and 8 FLOP per parameter and token of a chip's rows.
    tokens = plan["batch"]["rows"] * plan["batch"]["tokens"] / 4
    assert 5.5 < step["flops"] / tokens / plan["parameters"] < 9
    assert any(c["kind"] in ("all-gather", "collective-permute") for c in step["collectives"])
    weights = plan["weights"]
    assert weights["versions"] == weights["generating"] == 2 and weights["split_fits"]
    assert weights["policy_bytes"] == 4 * plan["parameters"] > 3 * weights["version_bytes"] > 0
    assert plan["step"]["step_s"] > 0 and plan["move"]["moved_bytes"] > plan["parameters"] * 2
    (tmp_path / "plan.json").write_text(done.stdout)
    few = ("--config=grpo_gemma.py", "--config.trainer.max_steps=2", "--config.eval.problems=0", "--config.log.to=()")
    ran = run(tmp_path / "run", f"--config.log.plan={tmp_path / 'plan.json'}", base=few)
    page = RunFiles(str(ran.workdir))
    rows = {row["name"]: row for row in page.plan()}
    assert page.planned_for() == "v5e:2x2"
    report = (ran.workdir / "report.html").read_text()
    assert '"v5e:2x2"' in report and '"counted"' in report
    stages = {"step": ("step_s", "time/step"), "score and update": ("trainer_s", "time/update")}
    for name, (key, metric) in stages.items():
        row, measured = rows[name], [record[metric] for record in ran.records() if metric in record]
        assert (row["planned"], row["how"]) == (plan["step"][key], "predicted")
        assert min(measured) <= row["measured"] <= max(measured) and row["ratio"] == row["measured"] / row["planned"]
    memory, tokens = rows["memory, fullest device"], rows["tokens of a completion"]
    fullest = max(program["peak"] + program["resident"] for program in plan["programs"])
    assert (memory["how"], memory["planned"]) == ("counted", fullest / 2**30)
    assert tokens["planned"] == plan["batch"]["completion"] >= tokens["measured"] > 0
    assert all(record["perf/plan_step"] > 1 for record in ran.records() if "time/step" in record)


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_ends_with_1_and_a_knob_that_helps():
    flags = ["--config.model.path=", "--config.model.size=gemma2-2b", "--config.rollout.max_prompt_length=512"]
    flags += ["--config.rollout.max_tokens_to_generate=512", "--config.rollout.kv_cache_size=1024"]
    flags += ["--config.trainer.dtype=bfloat16", "--config.trainer.remat=none", "--config.rollout.prompts_per_step=8"]
    done = _plan("--trainer=v5e:2x4", "--quick", "--json", *flags)
    assert done.returncode == 1, done.stderr[-2000:]
    plan = json.loads(done.stdout)
    step = next(program for program in plan["programs"] if program["name"] == "train step")
    assert not step["fits"] and step["missing"] > 0
    assert any(trial["fits"] and "trainer.remat=dots" in trial["keys"] for trial in plan["knobs"]["train step"])


def _setting(monkeypatch: pytest.MonkeyPatch, topology: str, **changes: dict) -> Setting:
    """Returns the default job with some changed keys; trainer and rollout have a machine `topology` each."""
    env = dict(os.environ)
    prepare(env)
    for name, value in env.items():  # monkeypatch restores the variables that `prepare` sets
        monkeypatch.setenv(name, value)
    chips = parse_topology(topology, key="--trainer")
    config = launch.load_config(launch.find_config("grpo_gemma.py")).to_dict()
    config["roles"]["colocated"] = False
    for section, values in changes.items():
        config[section] |= values
    job = parse(with_prompt_length(ConfigDict(complete(config)).to_dict()))
    return Setting(job, chips, chips, 16)


@needs_libtpu
def test_rows_are_cut_along_time_where_they_are_fewer_than_chips(monkeypatch: pytest.MonkeyPatch):
    few = {"rollout": {"prompts_per_step": 2}, "grpo": {"num_generations": 2}, "trainer": {"share_prompts": False}}
    for changes, always in ((few, {1, 2, 4, 8}), ({}, {1})):
        groups = list(_trainer_candidates(_setting(monkeypatch, "v5e:2x4", **changes)))
        found = {group.mesh for group in groups if group.spare_of is None and "tensor" not in group.mesh}
        assert {parse_mesh(mesh)[AXES.index("seq")] for mesh in found} == always
        assert any("seq=8" in group.mesh for group in groups), "seq=8 is tried if no other mesh fits"
    two = list(_trainer_candidates(_setting(monkeypatch, "v5e:2x2*2")))
    assert [g.mesh for g in two if g.spare_of is None][::3] == ["data=2,fsdp=4", "data=2,fsdp=2,tensor=2"]
    assert "fsdp=8" in {g.mesh for g in two if g.spare_of == ""}


@needs_libtpu
def test_experts_are_spread_over_an_axis_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """A search tries the axis `expert` only for models with experts. Each chip then reads only its own experts, for the
    lanes of all chips."""
    sizes = {"model": {"path": "", "size": "qwen3-30b-a3b"}, "rollout": {"lanes": 64, "max_prompt_length": 64}}
    setting = _setting(monkeypatch, "v5p:2x2x2", **sizes)
    size = lambda group: parse_mesh(group.mesh)[AXES.index("expert")]  # noqa: E731
    assert {size(group) for group in _trainer_candidates(setting)} == {1, 2, 4, 8}
    assert {group.mesh for group in _rollout_candidates(setting) if size(group) > 1} == {
        "data=4,expert=2", "data=2,expert=4", "data=1,expert=8",
    }  # fmt: skip
    dense = _setting(monkeypatch, "v5p:2x2x2")
    assert {size(group) for group in (*_trainer_candidates(dense), *_rollout_candidates(dense))} == {1}
    whole, spread = (
        _decode_work(setting, make_mesh(spec, setting.rollout.devices()), 1, 8.0) for spec in ("data=8", "expert=8")
    )
    assert spread.flops == whole.flops
    experts = expert_parameter_count(setting.model) * setting.rollout_dtype().itemsize
    touched = lambda lanes: 1 - (1 - 8 / 128) ** lanes  # noqa: E731
    np.testing.assert_allclose(whole.bytes - spread.bytes, experts * (touched(8) - touched(64) / 8), rtol=1e-6)
    with pytest.raises(ValueError, match=r"roles.rollout.mesh='expert=8' .* a gemma2 model has none"):
        _meshed(dense, "rollout", "expert=8").rollout_mesh()


@needs_libtpu
def test_what_a_search_prints_is_what_the_launcher_takes(monkeypatch: pytest.MonkeyPatch):
    sized = {"train_micro_batch_size": 2}  # a search sets a number of sequences instead
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    setting = _setting(monkeypatch, "v5e:2x4", trainer=sized)
    found = list(_trainer_candidates(setting))[-1].variants[-1].setting
    printed = [f"--config.{key}" for key in differences(setting, found)]
    assert "--config.trainer.train_micro_batch_size=None" in printed and len(printed) >= 3
    given = ["--config=grpo_gemma.py", "--config.trainer.train_micro_batch_size=2", "--config.roles.colocated=False"]
    given += ["--fake_devices=16", *printed]
    command = [sys.executable, "-m", "podrl.launch", "--dry_run", "--all_settings", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f'"micro_batch_sequences": {found.job.trainer.micro_batch_sequences}' in done.stdout


@needs_libtpu
def test_what_is_too_large_for_certain_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    large: dict = {"model": {"path": "", "size": "llama3-70b"}, "rollout": _PROMPTS, "trainer": {"remat": "full"}}
    setting = _setting(monkeypatch, "v5e:2x4", **large)
    for side in ("trainer", "rollout"):
        trial = _total(side, Variant((), setting))
        assert trial.program == "counted, not compiled" and not trial.fits and trial.at_least
    # 70.6e9 parameters of 4 bytes, twice as many moments, and the reference's parameters, on 8 chips.
    kept = least_bytes("trainer", setting)
    assert 70.6e9 * 16 / 8 < kept < 70.6e9 * 16 / 8 * 1.06
    assert least_bytes("trainer", _setting(monkeypatch, "v5e:2x4", **large | {"trainer": {"remat": "dots"}})) > kept


@needs_libtpu
def test_products_of_experts_are_kept_only_where_a_device_has_all_experts(monkeypatch):
    job: dict = {"model": {"path": "", "size": "qwen3-30b-a3b"}, "rollout": _PROMPTS}

    def kept(mesh: str) -> float:
        """Counts how many more bytes remat='dots' keeps than 'full'."""
        full, dots = (
            least_bytes("trainer", _setting(monkeypatch, "v5p:2x2x4", **job | {"roles": roles, "trainer": trainer}))
            for roles, trainer in (({"trainer": {"mesh": mesh}}, {"remat": remat}) for remat in ("full", "dots"))
        )
        return dots - full

    setting = _setting(monkeypatch, "v5p:2x2x4", **job)
    shape, model = setting.job.pack_shape(setting.trainer_mesh()), setting.model
    inner = shape.rows * shape.tokens / 16 * model.num_layers * 2 * model.active_ffn_dim
    item = jnp.dtype(setting.job.trainer.dtype).itemsize
    assert kept("fsdp=16") - kept("fsdp=4,expert=4") == pytest.approx(inner * item, rel=1e-6)


@needs_libtpu
def test_what_full_takes_for_certain_is_counted_and_left_out_where_that_is_too_long(monkeypatch: pytest.MonkeyPatch):
    job: dict = {"model": {"path": "", "size": "llama3-8b"}, "rollout": _PROMPTS, "grpo": {"beta": 0.0}}
    job["roles"] = {"trainer": {"mesh": "fsdp=8"}}
    dots, full = (_setting(monkeypatch, "v5e:2x4", **job, trainer={"remat": remat}) for remat in ("dots", "full"))
    shape = dots.job.pack_shape(dots.trainer_mesh())
    tokens = dots.job.updates_per_step * filled_micro_batches(dots) * shape.rows * shape.tokens / 8
    # Each of 32 layers has 4096 x 128 x 2 x (32 + 8) + 3 x 4096 x 14336 weights. Recomputation leaves out the last
    # product.
    weights, last = 32 * 218103808, 32 * 58720256
    assert least_trainer_seconds(dots) == pytest.approx(6 * weights * tokens / 197e12)
    assert least_trainer_seconds(full) == pytest.approx((8 * weights - 2 * last) * tokens / 197e12)

    for times, needed in ((0.3, False), (4.0, True)):
        tried, said, known = [], [], {}

        def total(side: str, variant: Variant, given: dict) -> Trial:
            """Returns a trial that fits and takes `times` the seconds of its matrix products at the chip's peak."""
            assert given is known  # noqa: B023
            tried.append(variant.keys[:2])  # noqa: B023
            return Trial(variant.keys, "", True, 1.0, 0.0, times * least_trainer_seconds(variant.setting))  # noqa: B023

        monkeypatch.setattr(variants, "_total", total)
        variants.search(dots, log=said.append, known=known)
        policies = {keys[1] for keys in tried if keys[0].startswith("roles.trainer")}
        assert policies == {f"trainer.remat={name}" for name in ("dots", "none", *(["full"] if needed else []))}
        assert any("slower than" in line for line in said) != needed


def test_a_program_that_is_known_is_not_compiled_again():
    chip = CHIPS["v5e"]
    compiled = []

    class Lowered:
        def __init__(self, text: str):
            self.text = text

        def as_text(self) -> str:
            return self.text

        def compile(self, compiler_options: object) -> jax.stages.Compiled:
            compiled.append(self.text)
            return jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()

    def program(text: str, resident: float = 0.0) -> Program:
        return Program("train step", "trainer", lambda: Lowered(text), 1, resident=resident)

    known: dict = {}
    first = measure(program("a"), chip, quick=True, known=known)
    assert first.fits and measure(program("a"), chip, quick=True, known=known) == first
    crowded = measure(program("a", resident=float(chip.hbm)), chip, quick=True, known=known)
    assert not crowded.fits and crowded.resident == chip.hbm and compiled == ["a"]
    measure(program("b"), chip, quick=True, known=known)
    measure(program("a"), chip, known=known)
    assert compiled == ["a", "b", "a"], "other programs and other compiler efforts are compiled anew"


@needs_libtpu
def test_keys_that_do_not_divide_among_chips_are_whole_on_each(monkeypatch: pytest.MonkeyPatch):
    job: dict = {"model": {"path": "", "size": "gemma3-1b"}, "rollout": _PROMPTS}  # one key head
    one, two = (_setting(monkeypatch, "v5e:2x2", **job, roles={"rollout": {"mesh": mesh}}) for mesh in _MESHES)
    counted = [_decode_work(s, s.rollout_mesh(), 1, 8.0).bytes for s in (one, two)]
    weights = 2 * parameter_count(one.model)
    keys = [bytes_ - weights / n for bytes_, n in zip(counted, (1, 4), strict=True)]
    assert keys[0] == pytest.approx(keys[1]), "one key head cannot be split, so each of 4 chips reads it whole"


_MESHES = ("data=4", "tensor=4")
_PROMPTS = {"max_prompt_length": 64, "data_type": "bfloat16"}


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
def test_a_move_that_does_not_fit_gets_only_knobs_that_make_it_smaller(monkeypatch: pytest.MonkeyPatch):
    setting = _setting(monkeypatch, "v5e:2x2")
    measured = CompileResult("move: pack", "trainer", 0, False, 9 * GIB, GIB, 8 * GIB, 1.0)
    keys = [key for trial in helping(setting, measured) for key in trial.keys]
    assert "model.lora.rank=16" in keys and not any("remat" in key or "micro" in key for key in keys)


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
def test_two_slices_exchange_gradients_and_nothing_else():
    flags = ["--config.roles.trainer.mesh=data=2,fsdp=4", "--trainer=v5e:2x2*2", "--rollout=v5e:2x2"]
    done = _plan(*flags, "--quick", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads(done.stdout)
    crossing = {p["name"]: [c for c in p["collectives"] if c["crosses"]] for p in plan["programs"]}
    (sent,) = crossing.pop("train step")
    # At least a chip's share of the float32 gradient, at most the whole gradient.
    assert plan["parameters"] <= sent["bytes"] < 4 * plan["parameters"]
    assert not any(crossing.values())


@pytest.mark.nightly("podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@needs_libtpu
def test_a_search_settles_on_keys_that_fit():
    # The configured mesh does not fit this machine; a search replaces it.
    done = _plan("--trainer=v5e:2x2", "--search", "--quick", "--config.roles.trainer.mesh=fsdp=16")
    assert done.returncode == 0, done.stderr[-2000:]
    # With at least one row per chip there are 2 meshes x 3 policies for the trainer and 2 meshes for the rollout. All
    # fit at once, so the search cuts no rows along time and tries no wider mesh for decoding.
    bound = re.search(r"search: at most (\d+) trials: trainer (\d+) \(\d+ meshes", done.stderr)
    assert bound, done.stderr
    trials = re.findall(r"^(trainer|rollout): (\S.*): peak ([\d.]+) GiB \(.*\), (.*); at most (\d+)", done.stderr, re.M)
    assert len({keys for _, keys, *_ in trials}) == len(trials) == 6 + 2 <= int(bound[1])
    assert all(verdict.endswith(" s") for *_, verdict, _ in trials)
    seconds = {keys: float(verdict.removesuffix(" s")) for side, keys, _, verdict, _ in trials if side == "trainer"}
    best = re.search(r"Best found: (.*)\nTo run it:\n(.*)\nEverything fits", done.stdout)
    assert best, done.stdout
    assert best[2] == f"python -m podrl.launch --config=grpo_gemma.py --config.roles.colocated=False {best[1]}"
    chosen = [key.removeprefix("--config.") for key in best[1].split() if key.startswith("--config.")]
    fastest = {keys for keys, s in seconds.items() if s == min(seconds.values())}
    assert any({k for k in chosen if "rollout" not in k} <= set(keys.split()) for keys in fastest), (chosen, seconds)


def test_a_missing_topology_is_a_user_error():
    done = _plan()
    assert done.returncode == 1
    assert "--trainer is missing" in done.stderr or "[tpu]'" in done.stderr
