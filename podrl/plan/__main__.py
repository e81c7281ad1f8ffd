"""The plan command: compiles a job with the TPU compiler on a CPU machine, to see whether it fits and how fast it runs.

    python -m podrl.plan --config=grpo_gemma.py:gemma2_2b_v5e16 --trainer=v5e:2x4 --rollout=v5e:2x4
        [--search] [--quick] [--json] [--completion=TOKENS] [--lengths=PATH] [--price=DOLLARS]
        [--config.group.key=value ...]

Topologies are, for example, v4:2x2x1, v5e:2x4, v5p:2x2x4, v6e:16x16 and tpu7x:2x2x1; v5e:2x4*2 is two slices. GPUs of
one machine are, for example, h100:8 and l4:4; their figures are predicted in part. No weights are needed: if model.path
is empty, model.size names a published size. The exit code is 0 if everything fits, and 1 if something does not fit or
after a user error. Plans for TPUs need the extra [tpu].
"""

import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from podrl import launch
from podrl.mappings import ConfigValues
from podrl.plan import chips
from podrl.runtime import signals
from podrl.runtime.arguments import as_sentence
from podrl.runtime.watchdog import announce_if_long

if TYPE_CHECKING:
    import numpy as np

    from podrl.job.config import Job
    from podrl.plan.report import PlanReport

_TRAINER = flags.DEFINE_string("trainer", None, "Topology of the trainer, such as v5e:2x4 or h100:8.")
_ROLLOUT = flags.DEFINE_string("rollout", None, "Topology of the rollout; the trainer's by default.")
_SEARCH = flags.DEFINE_bool(
    "search", False, "Try meshes, micro-batches and remat policies, and plan the fastest that fit."
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "Compile with the least effort, in a sixth of the time; peaks of memory are right within 10%."
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
_COMPLETION = flags.DEFINE_integer(
    "completion", None, "Number of tokens of a completion to plan with; the largest possible by default."
)
_PRICE = flags.DEFINE_float(
    "price", 0.0, "Price of a chip in dollars per hour; the plan then shows the cost of the job."
)
_LENGTHS = flags.DEFINE_string(
    "lengths", "", "Lengths of completions: a run with a trace, or a file with a number of tokens in each line."
)
_OWN = ("trainer", "rollout", "search", "quick", "json", "completion", "price", "lengths", "factor")
_FACTOR = flags.DEFINE_float(
    "factor", 2.5, "Assumed ratio of a step's time to its roofline, for the hours and cost of the job."
)
_leads: dict[str, str] = {}  # each side's best trial so far of this process's search


def make_report(values: ConfigValues, *, log: Callable[[str], None] | None = None) -> "PlanReport":
    """Compiles every program of a configuration's job for the topologies that the flags name.

    Args:
      values: the whole configuration.
      log: function that is called with a line per program and trial; None logs nothing.

    Raises:
      ValueError: a topology, mesh or configuration is wrong, or they do not fit together.
    """
    from podrl.cluster.engines import ENGINES
    from podrl.job.config import KINDS, parse, section_of, with_prompt_length
    from podrl.plan import programs, training, variants
    from podrl.plan.compile import measure
    from podrl.plan.predict import cost, predict
    from podrl.plan.report import PlanReport
    from podrl.plan.simulate import outlook

    log = log or (lambda line: None)
    if KINDS[section_of(values.get("algorithm", "grpo"))].offline:
        raise ValueError(
            f"podrl.plan plans reinforcement learning: give a configuration of another algorithm than "
            f"{values['algorithm']}."
        )
    trainer, rollout = _topologies(_TRAINER.value or "", _ROLLOUT.value or "")
    job = parse(with_prompt_length(values))
    if _ROLLOUT.value and job.roles.colocated:
        raise ValueError(
            f"--rollout={_ROLLOUT.value} gives the rollout chips of its own, but with roles.colocated=True it shares "
            "the trainer's: leave out --rollout, or set --config.roles.colocated=False."
        )
    for name, shared in (("critic", "trainer"), ("teacher", "trainer"), ("reward", "rollout")):
        model = getattr(job.roles, name)
        if model.mesh != shared:
            raise ValueError(
                f"roles.{name}.mesh={model.mesh!r} must be {shared!r} to be planned: podrl.plan lays trainer and "
                "rollout over all chips of their topologies, so plan them without the devices set aside."
            )
    if job.rollout.engine not in ENGINES:
        raise ValueError(
            f"rollout.engine={job.rollout.engine!r} cannot be planned: podrl.plan knows the programs of podrl's engine "
            "only. Leave the key out to plan with it."
        )
    if trainer.predicted and job.trainer.hosts_base and job.model.lora.rank:
        raise ValueError(
            f"trainer.offload={job.trainer.offload!r} copies frozen layers in every micro-batch, which podrl.plan "
            "counts from programs that are compiled for TPUs only: plan for a TPU, or with trainer.offload='none'."
        )
    completion = job.rollout.max_tokens_to_generate if _COMPLETION.value is None else _COMPLETION.value
    if not 0 < completion <= job.rollout.max_tokens_to_generate:
        raise ValueError(
            f"--completion={completion} must be positive and at most rollout.max_tokens_to_generate="
            f"{job.rollout.max_tokens_to_generate}."
        )
    lengths = _lengths(job)
    setting = programs.Setting(job, trainer, rollout, completion)
    searched, chosen, known = [], [], {}
    if _SEARCH.value:
        found, searched = variants.search(setting, log=log, known=known, leads=_leads)
        chosen, setting = variants.differences(setting, found), found
    measured = []

    def measure_all(side: Sequence[programs.Program], chip: chips.Chip) -> None:
        for program in side:
            with announce_if_long(f"{program.name}: compiling", log):
                measured.append(measure(program, chip, quick=_QUICK.value and not trainer.predicted, known=known))
            log(f"{program.name}: compiled in {measured[-1].compile_s:.1f} s")

    # All programs are made before the first is compiled, so that sizes that contradict each other are refused at once.
    decode, train = programs.rollout_programs(setting), training.training_programs(setting)
    move = programs.weight_move(setting)
    measure_all(decode, (trainer if job.roles.colocated else rollout).chip)
    measure_all(train, trainer.chip)
    for program in move.programs:
        measure_all([program], rollout.chip if program.side == programs.ROLLOUT else trainer.chip)
    knobs = {m.name: variants.helping(setting, m) for m in measured if not m.fits}
    prediction = predict(
        measured, move.seconds, max_staleness=setting.job.algo.max_staleness, colocated=job.roles.colocated
    )
    for name, value, least in (("price", _PRICE.value, 0.0), ("factor", _FACTOR.value, 1.0)):
        if not least <= value < 1e6:
            raise ValueError(f"--{name}={value:g} must be a number of at least {least:g} and below 1e6.")
    counts = (math.prod(trainer.shape) * trainer.slices, math.prod(rollout.shape) * rollout.slices)
    chips_of = counts[0] if job.roles.colocated else sum(counts)
    apart = (0, 0) if job.roles.colocated else counts
    ahead = None if lengths is None or knobs else outlook(lengths, measured, setting, move_s=move.seconds)
    step = ahead.planned if ahead else prediction
    costs = cost(step, steps=job.max_steps, chips=chips_of, factor=_FACTOR.value, price=_PRICE.value)
    return PlanReport(setting, measured, move, prediction, knobs, searched, chosen, costs, _FACTOR.value, ahead, apart)


def command_of(config: str, args: Sequence[str], chosen: Sequence[str]) -> str:
    """Writes the shell command that runs a job with the keys that a search chose.

    Args:
      config: value of --config.
      args: all other arguments of the plan command, each as --name=value. Flags that only the plan reads are left out,
        and so are keys that `chosen` sets.
      chosen: keys that the search chose, each as 'KEY=VALUE' without '--config.'.
    """
    own = {f"--{flag}" for flag in _OWN} | {f"--no{flag}" for flag in _OWN}
    own |= {f"--config.{key.partition('=')[0]}" for key in chosen}
    own_args = [arg for arg in args if arg.partition("=")[0] not in own]
    words = ["python", "-m", "podrl.launch", f"--config={config}", *own_args, *(f"--config.{key}" for key in chosen)]
    return shlex.join(words)


def _lengths(job: "Job") -> "np.ndarray | None":
    """Reads --lengths; None if the flag is left out."""
    from podrl.plan.simulate import read_lengths

    if _LENGTHS.value and job.roles.colocated:
        raise ValueError(
            "--lengths simulates a trainer and a rollout side that work at the same time, but with "
            "roles.colocated=True they take turns: leave out --lengths, or set roles.colocated=False."
        )
    return read_lengths(_LENGTHS.value) if _LENGTHS.value else None


def _topologies(trainer: str, rollout: str) -> tuple[chips.Topology, chips.Topology]:
    """Parses --trainer and --rollout; without --rollout both sides have the trainer's topology."""
    if not trainer:
        raise ValueError("--trainer is missing: name the trainer's topology, for example --trainer=v5e:2x4.")
    first = chips.parse_topology(trainer, key="--trainer")
    second = chips.parse_topology(rollout, key="--rollout") if rollout else first
    if first.predicted != second.predicted:
        raise ValueError(
            f"--trainer={first} and --rollout={second}: one is GPUs and the other TPUs, but a job has one "
            "kind of devices."
        )
    return first, second


def _unfinished() -> str:
    """Says, when a signal ends the command, what a search has found so far."""
    found = "".join(f" Best so far of the {side}: {words}." for side, words in list(_leads.items()))
    return f"before the plan was complete.{found}"


def _run(argv: Sequence[str]) -> int:
    if {"--help", "--helpfull", "-h"} & set(argv):
        sys.stdout.write(f"{__doc__}\n{flags.FLAGS.main_module_help()}\n")
        return 0
    name, rest = launch.take_config(argv)
    config = launch.load_config(launch.find_config(name))
    options = {arg.partition("=")[0]: arg.partition("=")[2] for arg in rest}
    trainer, rollout = _topologies(options.get("--trainer", ""), options.get("--rollout", ""))
    purpose = f"It would compile every program of the job, training for {trainer} and decoding for {rollout}, and say "
    gpus = max(trainer.shape[0], rollout.shape[0]) if trainer.predicted else 0
    chips.prepare(os.environ, f"{purpose}whether they fit and how long a step takes at best.", gpus=gpus)
    values, extra = launch.resolve(config, rest)
    if extra:
        raise ValueError(f"Arguments {extra} are not flags: every option starts with --, lists are quoted.")
    from podrl.plan.report import as_mapping, print_report
    from podrl.rundir.console import make_console

    if (path := values["model"]["path"]) and (size := values["model"]["size"]):
        print(f"model.size={size!r} is not read, because model.path={path!r} names the model.", file=sys.stderr)
    report = make_report(values, log=lambda line: print(line, file=sys.stderr, flush=True))
    if _SEARCH.value:
        report = dataclasses.replace(report, command=command_of(name, rest[1:], report.chosen))
    if _JSON.value:
        sys.stdout.write(json.dumps(as_mapping(report)) + "\n")
    else:
        print_report(make_console(140), report)
    return 0 if report.fits else 1


def main() -> None:
    """Runs the command; user errors end it with one line and exit code 1."""
    signals.leave_on_signals(unwind=False, words=_unfinished)
    launch.start_log()
    try:
        code = _run(sys.argv)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"podrl.plan: error: {as_sentence(error)}") from None
    raise SystemExit(code)


if __name__ == "__main__":
    main()
