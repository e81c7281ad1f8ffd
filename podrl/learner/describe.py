"""What a job is about to do, in plain words: devices, roles, meshes, the algorithm and the batch arithmetic."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import rich.console
from jax.sharding import Mesh

from podrl.learner.console import print_table
from podrl.learner.placement import Meshes
from podrl.mesh.build import describe_mesh
from podrl.trainer.packing import PackShape

if TYPE_CHECKING:
    from podrl.learner.job import RLJob


def device_line() -> str:
    """'8 x cpu' for the devices of this process."""
    kinds = collections.Counter(d.device_kind for d in jax.devices())
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def role_rows(on: Meshes, guests: Mapping[str, str]) -> list[list[str]]:
    """One row per role: its mesh and its devices.

    Args:
      on: the meshes.
      guests: what 'critic' and 'reward' do, as far as the job has them.
    """
    does = {
        "trainer": "actor, reference: updates and log-probabilities",
        "rollout": "rollout: batched decoding, evaluation",
        **guests,
    }
    table = []
    for role, what in does.items():
        mesh: Mesh = getattr(on, role)
        table.append([role, describe_mesh(mesh), f"{mesh.size}", _ranges([d.id for d in mesh.devices.flat]), what])
    return table


def _ranges(ids: Sequence[int]) -> str:
    """'0-3' or '0-1, 4'."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def print_roles(console: rich.console.Console, on: Meshes, guests: Mapping[str, str] | None = None) -> None:
    """Which devices do what; `guests` as in `role_rows`."""
    header = ["role", "mesh", "devices", "ids", "does"]
    print_table(console, f"Roles ({device_line()})", header, role_rows(on, guests or {}))


def print_plan(console: rich.console.Console, job: "RLJob", on: Meshes, workdir: str) -> None:
    """The tables a run starts with, and all that a dry run prints after the configuration."""
    print_roles(console, on, _guests(job))
    print_table(console, "Batch arithmetic", ["what", "number", "from"], batch_rows(job, on))
    console.print(in_words(job, on.trainer), markup=False)
    limit = job.rollout.max_tokens_to_generate
    loss = job.algo.policy_loss(limit)
    console.print(f"Algorithm {job.algorithm}:")
    for line in [job.algo.estimator().formula(), *loss.formula().splitlines(), *job.algo.describe(limit)]:
        console.print(f"  {line}", markup=False)
    for warning in job.algo.warnings(job.updates_per_step):
        console.print(f"Warning: {warning}", markup=False)
    console.print(f"Run directory: {workdir}\n")


def _guests(job: "RLJob") -> dict[str, str]:
    """What the models beside actor and rollout do, as far as the job has them."""
    critic = {"critic": "critic: values and their updates"} if job.algo.section == "ppo" else {}
    return critic | ({"reward": "reward model: scores of samples"} if job.reward.model else {})


def batch_rows(job: "RLJob", on: Meshes) -> list[list[str]]:
    """How prompts become samples, mini-batches, micro-batches and updates."""
    prompts, group, section = job.rollout.prompts_per_step, job.algo.num_generations, job.algo.section
    samples, mini = job.samples_per_step, job.mini_batch_size
    length = job.rollout.max_prompt_length + job.rollout.max_tokens_to_generate
    steps = job.trainer.max_steps or 0
    shape = _pack_shape(job, on.trainer)
    drawn = prompts * job.algo.prompt_batches
    set_aside = []
    if drawn > prompts:
        set_aside = [["prompts set aside", f"{drawn}", f"{prompts} x {section}.dynamic_sampling_batches"]]
    apart = []
    if on.critic != on.trainer:
        critic = _pack_shape(job, on.critic)
        made = _rows_of(critic)
        apart = [["micro-batches per update, critic", f"at most {critic.micro_batches}", made]]
    return [
        *set_aside,
        ["prompts per step", f"{prompts}", "rollout.prompts_per_step"],
        ["samples per prompt (G)", f"{group}", f"{section}.num_generations"],
        ["samples per step", f"{samples}", f"{prompts} x {group}"],
        ["decoded at once", f"{job.rollout.lanes}", _lanes_from(job)],
        ["mini-batches per pass", f"{samples // mini}", f"{samples} / trainer.mini_batch_size {mini}"],
        [
            "micro-batches per update",
            f"at most {shape.micro_batches}",
            _rows_of(shape),
        ],
        *apart,
        ["passes (mu)", f"{job.algo.num_iterations}", f"{section}.num_iterations"],
        ["updates per step", f"{job.updates_per_step}", "mini-batches x passes"],
        ["longest sequence", f"{length} tokens", "rollout.max_prompt_length + max_tokens_to_generate"],
        ["steps", f"{steps}", "trainer.max_steps"],
        ["samples in all", f"{steps * samples:,}", "steps x samples per step"],
    ]


def _lanes_from(job: "RLJob") -> str:
    lanes, samples = job.rollout.lanes, job.samples_per_step
    return "rollout.lanes" + (f"; a step fills {samples}, so {samples} would cost less" if lanes > samples else "")


def in_words(job: "RLJob", trainer_mesh: Mesh) -> str:
    """The batch arithmetic as a sentence."""
    prompts, samples, mini = job.rollout.prompts_per_step, job.samples_per_step, job.mini_batch_size
    shape = _pack_shape(job, trainer_mesh)
    passes = job.algo.num_iterations
    text = f"Every step samples {job.algo.num_generations} completions of {prompts} prompts, {samples} in all"
    if job.algo.prompt_batches > 1:
        text += f" (from up to {prompts * job.algo.prompt_batches} prompts, until {prompts} groups have a signal)"
    text += f", and makes {job.updates_per_step} updates: {passes} pass{'es' if passes > 1 else ''} over "
    text += f"{samples // mini} mini-batches of {mini} sequences, each packed into at most {shape.micro_batches} "
    return text + f"micro-batches of {_rows_of(shape)}. The split changes no gradient."


def _rows_of(shape: PackShape) -> str:
    shared = ", in which samples share their prompt" if shape.shared else ""
    return f"{shape.rows} rows of {shape.tokens} tokens{shared}"


def _pack_shape(job: "RLJob", mesh: Mesh) -> PackShape:
    prompt = job.rollout.max_prompt_length
    return job.trainer.pack_shape(
        sequences=job.mini_batch_size,
        max_length=prompt + job.rollout.max_tokens_to_generate,
        mesh=mesh,
        group_size=job.algo.num_generations,
        max_prompt_length=prompt,
    )


def print_files(console: rich.console.Console, workdir: pathlib.Path, place: str, summary: Mapping[str, Any]) -> None:
    """Where a finished run left everything, and how fast it was.

    Args:
      workdir: the local directory of its files.
      place: the run directory as the user names it.
      summary: what is in summary.json.
    """
    rates = {k: v for k, v in summary["throughput"].items() if v}
    for name, rate in rates.items():
        console.print(f"{name.replace('_', ' ')}: {rate:,.0f}")
    spent = {name: s for name, s in summary["seconds"].items() if name != "step" and s >= 0.05}
    console.print("seconds by stage: " + ", ".join(f"{name} {s:.1f}" for name, s in spent.items()))
    console.print(f"Written to {place}:")
    for name, what in (
        ("summary.json", "before/after, throughput, time split"),
        ("metrics.jsonl", "one object per step"),
        ("samples.jsonl", "prompts, completions, rewards"),
        ("curve.png", "reward and accuracy"),
        ("tensorboard/", "the same metrics as events"),
        ("checkpoints/", f"export with: python -m podrl.export --workdir={place} --out=DIR"),
    ):
        if (workdir / name).exists() or name == "checkpoints/":
            console.print(f"  {name:15} {what}", markup=False)
