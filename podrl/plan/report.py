"""Prints a plan as tables, or returns it as one mapping."""

import dataclasses
from collections.abc import Sequence

import rich.console

from podrl.job.weights import Copies
from podrl.mappings import JsonObject
from podrl.mesh.build import describe_mesh
from podrl.mesh.chips import GIB
from podrl.models.sizes import parameter_count
from podrl.plan.compile import CompileResult
from podrl.plan.predict import JobCost, Prediction, rebalanced
from podrl.plan.programs import TRAINER, Setting, WeightMove
from podrl.plan.simulate import Outlook
from podrl.plan.variants import Trial, shortfall
from podrl.rundir.console import print_table

_MOST_IDLE = 0.6  # if a side is idle for a larger share of a step, the report advises another split


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """The results of a plan.

    Attributes:
      setting: the planned job and its topologies.
      measured: measurements of the job's programs.
      move: weight move of a step.
      prediction: prediction of a step, every program at its roofline.
      knobs: trials of the memory options, for each program that does not fit, by its name.
      searched: trials of a search; empty without a search.
      chosen: keys that a search chose, each as 'KEY=VALUE'.
      cost: time and cost of all steps; None if they were not computed.
      factor: assumed time of a step divided by the step's roofline, for `cost`.
      outlook: simulation of the job with the user's lengths of samples; None if there are no such lengths.
      chips: numbers of chips of the trainer and of the rollout; zeros if both sides share the same chips.
      command: shell command that runs the job as a search found it; '' without a search.
    """

    setting: Setting
    measured: Sequence[CompileResult]
    move: WeightMove
    prediction: Prediction
    knobs: dict[str, list[Trial]]
    searched: Sequence[Trial]
    chosen: Sequence[str]
    cost: JobCost | None = None
    factor: float = 1.0
    outlook: Outlook | None = None
    chips: tuple[int, int] = (0, 0)
    command: str = ""

    @property
    def fits(self) -> bool:
        return all(m.fits for m in self.measured)


def as_mapping(report: PlanReport) -> JsonObject:
    """Returns the report as plain data, in bytes, seconds and FLOP."""
    setting = report.setting
    shape = setting.job.pack_shape(setting.trainer_mesh())
    how = "predicted" if setting.trainer.predicted else "counted"
    return {
        "trainer": str(setting.trainer),
        "rollout": str(setting.rollout),
        "parameters": parameter_count(setting.model),
        "batch": {**dataclasses.asdict(shape), "longest": setting.longest, "completion": setting.completion},
        "fits": report.fits,
        "how": {"arguments": "counted", "flops": "counted", "peak": how, "bytes": how, "seconds": "predicted"},
        "outlook": None if report.outlook is None else dataclasses.asdict(report.outlook),
        "weights": {**dataclasses.asdict(copies := setting.copies()), "split_fits": _split_fits(report, copies)},
        "programs": [
            {
                **dataclasses.asdict(m),
                "missing": m.missing,
                "seconds": m.seconds,
                "bound": m.bound,
            }
            for m in report.measured
        ],
        "move": {
            "moved_bytes": report.move.plan.moved_bytes,
            "seconds": report.move.seconds,
            "buckets": report.move.buckets,
            "note": report.move.note,
        },
        "step": dataclasses.asdict(report.prediction),
        "cost": dataclasses.asdict(report.cost) | {"factor": report.factor} if report.cost else {},
        "knobs": {name: [_trial(t) for t in trials] for name, trials in report.knobs.items()},
        "search": [_trial(t) for t in report.searched],
        "chosen": list(report.chosen),
        "command": report.command,
    }


PREDICTED = (
    "No compiler of GPUs is at hand: every program was compiled for CPU devices in their place. Counted from it: "
    "arguments and results (parameters, moments and pages are among them), operations, and the bytes that collectives "
    "send. Predicted: the memory that a program needs besides these, a part of its peak; the bytes that it moves; and "
    "all seconds, by the vendor's peak figures. A GPU fuses and lays out otherwise: leave a fifth of the memory free."
)


def _trial(trial: Trial) -> JsonObject:
    return {**dataclasses.asdict(trial), "keys": list(trial.keys)}


def print_report(console: rich.console.Console, report: PlanReport) -> None:
    """Prints tables of programs, collectives and the step, and advice for programs that do not fit."""
    setting = report.setting
    shape = setting.job.pack_shape(mesh := setting.trainer_mesh())
    console.print(
        f"{parameter_count(setting.model) / 1e9:.2f} billion parameters; trainer {setting.trainer} "
        f"({describe_mesh(mesh)}), rollout {setting.rollout} ({describe_mesh(setting.rollout_mesh())}); up to "
        f"{shape.micro_batches} micro-batches of {shape.rows} rows of {shape.tokens} tokens; completions of "
        f"{setting.completion} tokens."
    )
    header = [
        "program",
        "runs",
        "peak GiB",
        "resident",
        "of",
        "fits",
        "compile s",
        "cpu s",
        "TFLOP",
        "GB",
        "roofline s",
        "bound",
    ]
    if setting.trainer.predicted:
        console.print(PREDICTED)
    print_table(console, "Programs, per chip", header, [_row(m) for m in report.measured])
    rows = [
        [m.name, c.kind, f"{c.count:,.0f}", _size(c.bytes), "between slices" if c.crosses else "inside a slice"]
        for m in report.measured
        for c in m.collectives
    ]
    if rows:
        print_table(console, "Collectives of one execution", ["program", "kind", "count", "sent", "where"], rows)
    for m in report.measured:
        if m.uncounted:
            console.print(f"{m.name}: the operations of {', '.join(m.uncounted)} are not counted.")
    _print_move(console, report.move)
    console.print(f"Weights of a rollout chip while it generates: {(copies := setting.copies()).of_rollout()} in all.")
    verdict = "which fits, too" if _split_fits(report, copies) else "which does not fit"
    console.print(f"With topology=split a trainer chip also keeps {copies.of_trainer()} in all, {verdict}.")
    if hosts := report.setting.job.roles.eval.hosts:
        console.print(f"Hosts that evaluate and do nothing else (roles.eval.hosts={hosts}) are beside these chips.")
    _print_step(console, report)


def _split_fits(report: PlanReport, copies: Copies) -> bool:
    """True if the versions that a trainer keeps for rollout hosts fit beside each trainer program on a chip."""
    trained = [m for m in report.measured if m.side == TRAINER and not m.name.startswith("move: ")]
    return all(m.peak + m.resident + copies.on_trainer <= m.capacity for m in trained)


def _print_move(console: rich.console.Console, move: WeightMove) -> None:
    console.print(f"Weight move: {move.plan.explain(move.rate)}".replace("\n", "\n  "))
    if move.note:
        console.print(f"  {move.note}")


def _print_step(console: rich.console.Console, report: PlanReport) -> None:
    p = report.prediction
    rows = [
        ["trainer", f"{p.trainer_s:.4g}", f"{p.trainer_idle:.0%}"],
        ["rollout", f"{p.rollout_s:.4g}", f"{p.rollout_idle:.0%}"],
        ["weight move", f"{p.move_s:.4g}", ""],
        ["step", f"{p.step_s:.4g}", ""],
    ]
    print_table(console, "A step, every program at its roofline", ["side", "seconds", "idle"], rows)
    console.print(f"Who waits: {p.waits}.")
    if advice := _advice(report):
        console.print(advice)
    if report.outlook is not None:
        console.print(_outlook_line(report.outlook))
    if report.cost is not None:
        console.print(_cost_line(report.cost, report.setting.job.max_steps, report.factor))
    if report.chosen:
        console.print("Best found: " + " ".join(f"--config.{key}" for key in report.chosen))
    if report.command:
        console.print(f"To run it:\n{report.command}", soft_wrap=True, markup=False, highlight=False)
    for m in report.measured:
        if m.fits:
            continue
        console.print(
            f"{m.name} does not fit: it needs {'at least ' if m.at_least else ''}{(m.peak + m.resident) / GIB:.2f} GiB "
            f"of {m.capacity / GIB:.2f} GiB per chip, {shortfall(m)}."
        )
        if not report.knobs.get(m.name):
            console.print("  No setting that podrl.plan tries makes it smaller.")
        for trial in report.knobs.get(m.name, []):
            verdict = "fits" if trial.fits else f"still {shortfall(trial)}"
            keys = " ".join(f"--config.{key}" for key in trial.keys)
            console.print(f"  {keys}: {trial.peak / GIB:.2f} GiB, {verdict}")
    console.print("Everything fits." if report.fits else "It does not fit.")


def _advice(report: PlanReport) -> str:
    """Advises another split of the chips if a side is idle for a large part of a step; else returns ''."""
    p, now = report.prediction, report.chips
    side, idle = max(("trainer", p.trainer_idle), ("rollout", p.rollout_idle), key=lambda pair: pair[1])
    if idle <= _MOST_IDLE or not all(now):
        return ""
    better = rebalanced(p, *now)
    if better == now:
        return ""
    return (
        f"The {side} idles {idle:.0%} of a step: of the {sum(now):,} chips, about {better[0]:,} for the trainer and "
        f"{better[1]:,} for the rollout, instead of {now[0]:,} and {now[1]:,}, would keep both busy equally long; "
        "--trainer and --rollout say how many each has."
    )


def _outlook_line(o: Outlook) -> str:
    """Describes a step with the user's lengths of samples, and the split of the chips that makes it shortest."""
    own, best = o.best
    return (
        f"Predicted for {o.lengths:,} lengths from --lengths (mean {o.mean:.0f}, longest {o.longest}): a step of "
        f"{o.planned.step_s:.4g} s, the trainer idle {o.planned.trainer_idle:.0%} of it, the rollout "
        f"{o.planned.rollout_idle:.0%}, its lanes busy {o.planned.lanes_busy:.0%} of their decode steps. If of the "
        f"same {sum(o.chips):,} chips {own:,} were the trainer's, a step would take {best.step_s:.4g} s, the trainer "
        f"idle {best.trainer_idle:.0%}, the rollout {best.rollout_idle:.0%}. The cost is that of the step as planned."
    )


def _cost_line(cost: JobCost, steps: int, factor: float) -> str:
    """Describes the job's hours and cost, without evaluations, checkpoints and the start."""
    dollars = (
        f", {cost.dollars:,.0f} dollars" if cost.dollars else "; --price=DOLLARS per chip and hour says what it costs"
    )
    return (
        f"{steps:,} steps at {factor:g} times the roofline (--factor): {cost.hours:.1f} hours, {cost.chip_hours:,.0f} "
        f"chip-hours{dollars}. Evaluations, checkpoints and the start come on top."
    )


def _row(m: CompileResult) -> list[str]:
    gib = lambda n: f"{n / GIB:.2f}"  # noqa: E731
    refused = not m.seconds and not m.fits
    counts = (
        ["", "", "", ""] if refused else [f"{m.flops / 1e12:.3g}", f"{m.bytes / 1e9:.3g}", f"{m.seconds:.3g}", m.bound]
    )
    runs = f"{m.runs:g}"
    return [
        m.name,
        runs,
        gib(m.peak),
        gib(m.resident),
        gib(m.capacity),
        "yes" if m.fits else "NO",
        f"{m.compile_s:.1f}",
        f"{m.compile_cpu_s:.1f}",
        *counts,
    ]


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
