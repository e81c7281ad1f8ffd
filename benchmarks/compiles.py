"""Compiles all programs of the shipped configurations for each TPU, without a TPU: `python -m benchmarks compiles`."""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
# Topologies of one host with four chips, and of two such hosts.
_HOSTS = {2: ("2x2", "2x4"), 3: ("2x2x1", "2x2x2")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job whose programs are compiled; meshes leave a size open, because a chip of tpu7x has two devices.

    Attributes:
      config: value of --config that names the configuration.
      hosts: number of hosts with four chips for the trainer, and the same number for the rollout: 1 or 2.
      changes: values that replace the configuration's values, by dotted key.
      programs: beginnings of the names of the programs to compile; () for all. The other programs of this
        configuration are the same as in another case.
    """

    config: str
    hosts: int = 1
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    programs: tuple[str, ...] = ()


_MESHES = {"roles.trainer.mesh": "fsdp=-1", "roles.rollout.mesh": "data=-1"}
_HALVED = {"roles.trainer.mesh": "fsdp=-1,tensor=2", "roles.rollout.mesh": "data=-1,tensor=2"}
_SHARED = {"trainer.share_prompts": True, "trainer.max_tokens_per_row": 1024}
_ENGINE = ("prefill", "insert", "generate", "spill", "restore")
_TAUGHT = {"algorithm": "opd", "model.reference": str(pathlib.Path(__file__).parents[1] / "podrl" / "assets" / "tiny")}
_UPDATE = ("train step",)

CASES = {
    "default": Case("grpo_gemma.py"),
    "lora": Case("grpo_gemma.py:lora"),
    "async": Case("grpo_gemma.py:async", programs=("train step", "old")),
    "ppo": Case("ppo_gemma.py", programs=("train step", "old", "reference", "critic", "values")),
    "mixture": Case("grpo_tools.py:mixture", programs=_UPDATE),
    "tools": Case("grpo_tools.py", programs=("train step", "prefill", "generate", "move")),
    "sft": Case("sft_tiny.py"),
    "experts": Case("sft_tiny.py:moe"),
    "experts_grpo": Case("grpo_gemma.py:moe"),  # the trainer uses the experts that the sampler chose
    "linear_sft": Case("sft_tiny.py:hybrid"),
    "linear_grpo": Case("grpo_gemma.py:hybrid"),  # linear attention has states in the trainer and in the engine
    "dpo": Case("dpo_tiny.py"),
    "orpo": Case("orpo_tiny.py"),
    "kto": Case("kto_tiny.py"),
    "reward_model": Case("reward_model_tiny.py"),
    # The rollout has one replica, on all chips of two hosts.
    "replica_of_two_hosts": Case(
        "grpo_gemma.py", hosts=2, changes={"roles.rollout.mesh": "fsdp=-1,tensor=2"}, programs=_ENGINE
    ),
    "shared_prompts_and_seq": Case(
        "grpo_gemma.py",
        changes=_SHARED | {"roles.trainer.mesh": "fsdp=-1,seq=2"},
        programs=("train step", "reference"),
    ),
    # The teacher is the policy's own checkpoint, and is compared with the policy in the loss. A teacher that only gave
    # advantages would need no case, because its programs would be those of `default`.
    # The programs that score likely ids are left out: on tpu7x, a failed check of libtpu 0.0.42 ends the process.
    "teacher_top_k": Case("grpo_gemma.py", changes=_TAUGHT | {"grpo.teacher_kl": "top_k"}, programs=_UPDATE),
    "teacher_full": Case("grpo_gemma.py", changes=_TAUGHT | {"grpo.teacher_kl": "full"}, programs=_UPDATE),
    "gemma2_2b": Case("grpo_gemma.py:gemma2_2b_v5e16", hosts=2, changes=_HALVED),
    "gemma4_e4b": Case("grpo_real.py:gemma4_e4b_v5e16", hosts=2, changes=_HALVED | {"roles.trainer.mesh": "fsdp=-1"}),
    "gemma3_4b": Case("grpo_real.py:gemma3_4b_v5e16", hosts=2, changes=_HALVED | {"roles.trainer.mesh": "fsdp=-1"}),
    "qwen3_06b": Case("grpo_real.py:qwen3_06b_v6e8", changes=_MESHES),
}
# Configurations that are not compiled, because the named case has the same programs, in some cases at another size.
SAME = {
    "grpo_tools.py:mcp": "tools",  # the same tool, in an MCP server
    "sft_tools.py": "sft",
    "grpo_agents.py": "tools",
    "grpo_reasoning.py": "default",  # the default job with other records
    "grpo_search.py": "tools",
    "grpo_search.py:prompted": "tools",
    "sft_search.py": "sft",
    "grpo_real.py:qwen3_06b_gpu": "qwen3_06b",  # the same job for a GPU
    # These are other sizes of the models, and train all weights. The named case stands for them; podrl.plan compiles
    # them for their slices.
    "grpo_qwen.py:qwen3_06b_v6e8": "qwen3_06b",
    "grpo_qwen.py:qwen3_17b_v6e8": "qwen3_06b",
    "grpo_qwen.py:qwen3_4b_v6e16": "qwen3_06b",
    "grpo_qwen.py:qwen3_8b_v5p16": "qwen3_06b",
    "grpo_qwen.py:qwen3_8b_v6e32": "qwen3_06b",
    "grpo_qwen.py:qwen3_14b_v6e32": "qwen3_06b",
    "grpo_qwen.py:qwen3_32b_v5p32": "qwen3_06b",
    "grpo_qwen.py:qwen3_30b_a3b_v5p32": "experts_grpo",
    "grpo_qwen.py:qwen3_30b_a3b_v6e64": "experts_grpo",
    "grpo_qwen.py:qwen35_08b_v6e8": "linear_grpo",
    "grpo_qwen.py:qwen35_2b_v6e8": "linear_grpo",
    "grpo_qwen.py:qwen35_4b_v6e16": "linear_grpo",
    "grpo_qwen.py:qwen35_9b_v6e32": "linear_grpo",
    "grpo_qwen.py:qwen35_27b_v5p32": "linear_grpo",
    "grpo_qwen.py:qwen35_35b_a3b_v5p32": "linear_grpo",
    "grpo_gemma.py:gemma4_e2b_v6e16": "gemma4_e4b",
    "grpo_gemma.py:gemma4_e4b_v6e16": "gemma4_e4b",
    "grpo_gemma.py:gemma4_31b_v5p32": "gemma4_e4b",
    "grpo_gemma.py:gemma4_26b_a4b_v5p32": "experts_grpo",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiles", description=__doc__)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--cases", nargs="+", default=tuple(CASES), choices=tuple(CASES), metavar="CASE")
    parser.add_argument("--programs", nargs="+", default=(), help="beginnings of the programs' names", metavar="NAME")
    parser.add_argument("--effort", default="least", choices=("least", "full"), help="effort of the compiler")
    parser.add_argument("--results", default="", help="a file of JSON lines; its programs are not compiled again")
    parser.add_argument("--table", default="", help="write a Markdown table of the results to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Compiles the programs of the cases for the chips with the TPU compiler, and counts their work; runs none.

    Returns:
      With --json: 'programs', which has for each compiled program: case, program, topology, peak_bytes and hbm_bytes of
      a chip (the bytes that the program uses and may use), fits, moved_bytes (of HBM, read and written), sent_bytes and
      collectives (by kind) of one execution, and seconds and processor time of compiling. Without --json: a line for
      each program.

    Raises:
      ValueError: libtpu is not installed.
    """
    from podrl.plan import chips

    args = _parser().parse_args(argv)
    chips.prepare(os.environ)
    file = pathlib.Path(args.results) if args.results else None
    found = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    done = {(one["case"], one["program"], one["topology"]) for one in found}
    for name in args.cases:
        for chip in args.chips:
            for one in _compiled(name, chip, args, done):
                found.append(one)
                print(_line(one), file=sys.stderr, flush=True)
                if file:
                    with file.open("a") as lines:
                        lines.write(json.dumps(one) + "\n")
    if args.table:
        pathlib.Path(args.table).write_text(table(found))
    if args.json:
        return {"programs": found}
    return {f"{one['case']}, {one['program']}, {one['topology']}": _figures(one) for one in found}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Writes results as Markdown: a row per program, a column per chip and one for the compiler's processor time."""
    cells = {(one["case"], one["program"], one["topology"].split(":")[0]): _figures(one) for one in found}
    columns = [chip for chip in CHIPS if any(key[2] == chip for key in cells)]
    rows = list(dict.fromkeys(key[:2] for key in sorted(cells, key=lambda key: list(CASES).index(key[0]))))
    busy = {(one["case"], one["program"], one["topology"].split(":")[0]): one["cpu_seconds"] for one in found}
    lines = [["case", "program", *columns, "compile CPU s"], ["---"] * (3 + len(columns))]
    for case, name in rows:
        keys = [(case, name, chip) for chip in columns]
        spent = " / ".join(f"{busy[key]:.{int(busy[key] < 10)}f}" if key in busy else "-" for key in keys)
        lines.append([f"`{case}`", name, *(cells.get(key, "") for key in keys), spent])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figures(one: Mapping[str, Any]) -> str:
    sizes = [one[name] / 1e6 for name in ("peak_bytes", "moved_bytes", "sent_bytes")]
    return " / ".join(f"{size:,.0f}" if size >= 10 else f"{size:.2g}" for size in sizes) + (
        "" if one["fits"] else ", does not fit"
    )


def _line(one: Mapping[str, Any]) -> str:
    return f"{one['case']}, {one['program']}, {one['topology']}: {_figures(one)} MB, {one['cpu_seconds']:.1f} CPU s"


def setting_of(name: str, chip: str) -> Any:
    """Returns a case's job on the topologies of a chip, a podrl.plan.programs.Setting."""
    from podrl.job.config import parse, with_prompt_length
    from podrl.launch import find_config, load_config
    from podrl.mesh.chips import CHIPS as KNOWN
    from podrl.plan.chips import parse_topology
    from podrl.plan.programs import Setting

    case = CASES[name]
    topology = parse_topology(f"{chip}:{_HOSTS[KNOWN[chip].dimensions][case.hosts - 1]}", key="--chips")
    job = parse(with_prompt_length(_values(load_config(find_config(case.config)).to_dict(), case.changes)))
    return Setting(job, topology, topology, job.rollout.max_tokens_to_generate)


def _compiled(name: str, chip: str, args: argparse.Namespace, done: set[tuple[str, str, str]]) -> Iterator[Any]:
    """Yields the results of a case for a chip, except the results that are `done`."""
    from podrl.plan import programs, training
    from podrl.plan.answers import answer_programs
    from podrl.plan.compile import measure
    from podrl.plan.hlo import ProgramCost

    case, setting = CASES[name], setting_of(name, chip)
    if setting.job.kind.offline:
        listed = answer_programs(setting)
    else:
        move = programs.weight_move(setting).programs
        listed = [*programs.rollout_programs(setting), *training.training_programs(setting), *move]
    wanted = (tuple(args.programs) or ("",), case.programs or ("",))
    for program in listed:
        left_out = not all(program.name.startswith(begins) for begins in wanted)
        if left_out or (name, program.name, str(setting.trainer)) in done:
            continue
        m = measure(program, setting.trainer.chip, quick=args.effort == "least")
        yield {
            "case": name,
            "program": program.name,
            "topology": str(setting.trainer),
            "effort": args.effort,
            "peak_bytes": m.peak,
            "hbm_bytes": m.capacity,
            "fits": m.peak <= m.capacity,
            "moved_bytes": m.bytes,
            "sent_bytes": sum(c.bytes for c in m.collectives),
            "collectives": ProgramCost(m.flops, m.bytes, m.collectives).by_kind(),
            "seconds": m.compile_s,
            "cpu_seconds": m.compile_cpu_s,
        }


def _values(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a configuration after setting keys such as 'trainer.remat'."""
    from ml_collections import ConfigDict

    from podrl.job.config import complete

    for key, value in changes.items():
        section = config
        *above, last = key.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return ConfigDict(complete(config)).to_dict()
