"""Describes a job in plain words before it starts: devices, roles, meshes, algorithm and batch arithmetic."""

import collections
import os
import socket
from collections.abc import Mapping, Sequence

import jax
import rich.console
from jax.sharding import Mesh

from podrl.config import plural
from podrl.data.config import is_generated
from podrl.data.mixture import OpenedSources, split
from podrl.data.pipeline import replaced_fields, system_prompt, takes_system_prompt, task_fields
from podrl.data.template import own_words
from podrl.job.config import Job
from podrl.job.doubtful import doubtful
from podrl.job.evaluation import unmeasured
from podrl.job.placement import Meshes, PlannedPod, RolesConfig
from podrl.job.weights import copies, model_of
from podrl.learner.no_updates import no_update_reasons, no_update_reasons_on_samples
from podrl.mesh.build import describe_mesh
from podrl.models import moe
from podrl.rewards.compose import EPISODE_FIELDS
from podrl.rundir.about import About, Table, print_about
from podrl.runtime.pod import LEADER, Pod
from podrl.runtime.roles import EVAL, ROLLOUT, TRAINER
from podrl.trainer.pack_shape import PackShape, other_micro_batches

_DEFAULT_ROLES = RolesConfig()


def device_line() -> str:
    """Counts the devices of all processes of this process's jax cluster, in words: '8 x cpu'."""
    kinds = collections.Counter(d.device_kind for d in jax.devices())
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def role_rows(
    on: Meshes,
    auxiliary: Mapping[str, str],
    pod: Pod | PlannedPod | None = None,
    roles: RolesConfig = _DEFAULT_ROLES,
) -> list[list[str]]:
    """Makes one row per role: its mesh, its devices, and its processes.

    Args:
      on: meshes of all roles.
      auxiliary: descriptions of the roles 'critic', 'teacher' and 'reward', as far as the job has them.
      pod: the job's processes, or the processes that a dry run plans; None for one process.
      roles: the configured meshes, and hosts for evaluations.
    """
    evaluation = roles.eval
    does = {
        "trainer": "actor, reference: updates and log-probabilities",
        "rollout": f"rollout: batched decoding{'' if evaluation.hosts else ', evaluation'}",
        **auxiliary,
    }
    table, of_hosts = [], {}
    if isinstance(pod, Pod) and pod.seat.disposable:  # no other process sees the devices of a rollout host
        given, count = roles.rollout.mesh, pod.seat.hosts.replica
        each = f"of every {count} hosts" if count > 1 else "of every host"
        of_hosts[ROLLOUT] = of_hosts["reward"] = f"{'data=-1' if given == 'auto' else given} {each}"
        if roles.reward.mesh != ROLLOUT:
            of_hosts["reward"] = f"{roles.reward.mesh} {each}"
    for role, what in does.items():
        if role in of_hosts:
            table.append([role, of_hosts[role], "", "", _processes(role, pod), what])
            continue
        mesh: Mesh = getattr(on, role)
        ids = _ranges([d.id for d in mesh.devices.flat])
        shape, count = describe_mesh(mesh), f"{mesh.size}"
        if isinstance(pod, PlannedPod) and pod.split and role in (ROLLOUT, "reward"):
            copies, ids = len(pod.hosts.heads), ""
            shape, count = (f"{shape} each", f"{copies} x {count}") if copies > 1 else (shape, count)
        table.append([role, shape, count, ids, _processes(role, pod), what])
    if evaluation.hosts:
        process = f"hosts {evaluation.hosts}" if pod is None else _processes(EVAL, pod)
        table.append([EVAL, "as a rollout host", "", "", process, "evaluation and nothing else"])
    return table


def _processes(role: str, pod: Pod | PlannedPod | None, shown: int = 8) -> str:
    """Lists a role's processes: an id such as '4711', or host numbers with process ids and names of other machines."""
    if pod is None:
        return f"{os.getpid()}"
    all_hosts = pod.hosts if isinstance(pod, PlannedPod) else pod.seat.hosts
    of_trainer = dict.fromkeys((TRAINER, "critic", "teacher"), all_hosts.trainer)
    hosts = {**of_trainer, EVAL: all_hosts.eval}.get(role, all_hosts.rollout)
    if isinstance(pod, PlannedPod):
        name = f"host{'s' * (len(hosts) > 1)} {_ranges(hosts)}"
        return name + (f"; host {LEADER} leads" if role == TRAINER and len(hosts) > 1 else "")
    here, names = socket.gethostname(), []
    for host in [host for host in hosts if host in pod.ids][:shown]:
        number, machine = pod.ids[host]
        names.append(f"host {host}: {number}" + (f" on {machine}" if machine != here else ""))
    return ", ".join(names) + (f" and {len(hosts) - shown} more" if len(hosts) > shown else "")


def _ranges(ids: Sequence[int]) -> str:
    """Abbreviates sorted numbers: '0-3' or '0-1, 4'."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def print_plan(
    console: rich.console.Console,
    job: Job,
    on: Meshes,
    workdir: str,
    pod: Pod | PlannedPod | None = None,
    *,
    dry: bool = False,
) -> None:
    """Prints the tables that a run starts with, and that a dry run ends with."""
    if not console.quiet:
        print_about(console, about_job(job, on, pod))
        for line in (*([] if job.kind.offline else weight_lines(job, on, pod)), *data_lines(job)):
            console.print(line)
    if not console.quiet:
        for text in doubtful(job, pod=pod is not None):
            console.print(f"Warning: {text}")
    warns = not console.quiet and (dry or job.kind.offline)  # GRPO and PPO print this warning themselves
    of_update = (job.mini_batch_size, job.group_size)
    for text in other_micro_batches(job.trainer, job.pack_shape(on.trainer), *of_update) if warns else ():
        console.print(f"Warning: {text}")
    if dry:  # a run itself warns at its start
        for text in no_update_lines(job):
            console.print(f"Warning: {text}")
    console.print(f"Run directory: {workdir}\n")


def no_update_lines(job: Job) -> list[str]:
    """Lists the reasons why the job cannot change its weights; empty if it can."""
    if job.kind.offline:
        return no_update_reasons(job.trainer)
    of_job = (job.algo, job.rollout, job.reward, job.env)
    return no_update_reasons_on_samples(job.trainer, *of_job, steps=job.max_steps)


def about_job(job: Job, on: Meshes, pod: Pod | PlannedPod | None = None, code: str = "") -> About:
    """Makes the page about a job: roles, batch arithmetic, sources of data and formula.

    Args:
      job: the job.
      on: meshes of all roles.
      pod: the job's processes, or the processes that a dry run plans; None for one process.
      code: URL of the user's code, with its SHA-256; '' for none.
    """
    header = ["role", "mesh", "devices", "ids", "process", "does"]
    rows = role_rows(on, _auxiliary_models(job), pod, job.roles)
    title = f"Roles ({device_line()})"
    if isinstance(pod, PlannedPod):
        processes, topology = plural(pod.hosts.count, "host"), "split" if pod.split else "shared"
        title = f"Roles of {processes} with {plural(pod.share, 'device')} each (topology={topology})"
    tables = [Table(title, header, rows)]
    rows = offline_rows(job, on) if job.kind.offline else batch_rows(job, on)
    tables.append(Table("Batch arithmetic", ["what", "number", "from"], rows))
    if job.data.sources:
        tables.append(_sources(job))
    sent = [f"Code of the user, with its SHA-256: {code}"] if code else []
    lines = offline_lines(job) if job.kind.offline else [*algorithm_lines(job, on), *_route_lines(job)]
    return About(tables, [*lines, *sent])


def weight_lines(job: Job, on: Meshes, pod: Pod | PlannedPod | None) -> list[str]:
    """Describes the copies of the weights that exist besides the trained weights."""
    if not job.model.path and not job.model.size:
        return []
    trees = copies(job, on.trainer, on.rollout)
    generating = f"Weights of a rollout device while it generates: {trees.of_rollout()} in all."
    kept = f"A trainer device keeps for other hosts {trees.of_trainer()} in all."
    if isinstance(pod, PlannedPod):  # the page of a dry run describes all hosts; a running host describes itself
        return [generating, *([kept] if pod.split else [])]
    return [kept] if pod is not None and pod.seat.disposable else [generating]


def _sources(job: Job) -> Table:
    """Makes a table of a mixture's sources: each source's share of the draws, and counts of its records."""
    rows = split(job.data, job.kind.form).rows()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [[f"{v:.1%}" if (v := row.get(c, 0)) and c == "share" else f"{v}" for c in columns] for row in rows]
    return Table("Sources", columns, table)


_LOOK = 256  # number of records of a source's files that are searched for questions
_FEW = 10  # with fewer held-out records than this, comparing two evaluations says nothing


def data_lines(job: Job) -> list[str]:
    """Counts the records to train on and to evaluate on; if there are rewards, names the fields that functions get."""
    data = job.data
    try:
        opened = split(data, job.kind.form)
    except FileNotFoundError:
        return [f"Data: data.path={data.path} or data.eval_path={data.eval_path} is not here; the run itself needs it."]
    count = _count_line(job, opened)
    if job.kind.offline:
        return [count]
    fields, own, hidden = dict[str, None](), set[str](), set[str]()
    before, unused = dict[str, None](), dict[str, None]()
    for part in opened.parts:
        if text := system_prompt(part.config):
            fields |= {"system_prompt": None}
            look = 1 if is_generated(part.config.path) else _LOOK  # generating takes time; generated records are alike
            firsts = (part.train[i] for i in range(min(len(part.train), look)))
            takes = {takes_system_prompt(record, part.config) for record in firsts}
            before |= {text: None} if True in takes else {}
            unused |= {part.config.path: None} if False in takes else {}
        fields |= dict.fromkeys([*part.fields, *task_fields(part.train[0], part.config)])
        own |= set(record) if isinstance(record := part.train[0], Mapping) else set(task_fields(record, part.config))
        hidden |= replaced_fields(record, part.config)
    fields |= dict.fromkeys(EPISODE_FIELDS if job.env.used else ())
    about = f"{reward_line(job)}\n"
    read, made = ([name for name in fields if (name in own) == from_record] for from_record in (True, False))
    about += f"Reward functions receive prompts, completions, and these fields of the records: {', '.join(read)}."
    if made:
        about += f"\npodrl adds: {', '.join(made)}."
    if "answer" in fields:
        about += " `answer` is a text, or a list of texts, also where the record holds numbers."
        about += "".join(
            f"\nSome records have no answer, so functions get None: {place}." for place, _ in opened.unanswered
        )
    for name in sorted(hidden):
        about += (
            f"\nThe records' own field {name!r} is not given to functions: podrl reads questions and answers elsewhere."
        )
    if why := unmeasured(job, data) if job.eval.problems else "eval.problems=0":
        about += f"\nNo accuracies: {why}."
    elif opened.unanswered:
        about += f"\nNo accuracies of training samples: {opened.unanswered[0][0]}."
    about += "".join(f"\nQuestions are preceded by {text!r} (data.system_prompt)." for text in before)
    for path in unused:
        about += f"\nWarning: data.system_prompt is not put before the records of {path} that are conversations or "
        about += "have a text in 'prompt': these are used as they are."
    words = _words_of_template(job) if any(part.config.template == "chat" for part in opened.parts) else ""
    if words:
        about += f"\nThe chat template itself writes {words!r} before a question that has no system turn."
    if not before:
        nothing = f"Nothing{' else' if words else ''} precedes a question (data.system_prompt)."
        about += "\n" + ("data.system_prompt puts nothing before a question." if words is None else nothing)
    about += "".join(f"\n{line}" for line in _set_lines(job))
    return [count, about]


def _count_line(job: Job, opened: OpenedSources) -> str:
    """Counts the records to train on and to evaluate on."""
    data = job.data
    count = f"Data: {plural(sum(len(part.train) for part in opened.parts), 'record')} to train on, "
    if not job.eval.problems:
        apart = sum(len(part.held_out) for part in opened.parts if not is_generated(part.config.path))
        lost = f" Held out by data.eval_fraction, but not used: {plural(apart, 'record')}." if apart else ""
        return f"{count}no evaluation on held-out records (eval.problems=0).{lost}"
    if not opened.held_out:
        return f"{count}none held out, so there is no evaluation before and after."  # podrl.job.evaluation warns why
    held_out = min(opened.held_out, job.eval.problems)
    source = "data.eval_path" if data.eval_path else "held out from training"
    few = ""
    if held_out < min(_FEW, job.eval.problems):
        fraction = f"Raise data.eval_fraction={data.eval_fraction:g}, or give data.eval_path."
        few = (
            f" That is too few records to tell an improvement from noise. {'' if data.eval_path else fraction}".rstrip()
        )
    return f"{count}{held_out} to evaluate on ({source}).{few}"


def _words_of_template(job: Job) -> str | None:
    """Returns the words that the chat template writes before a question; None if its files are not here."""
    try:
        return own_words(job.model.open_tokenizer(job.tokenizer))
    except (ValueError, OSError):  # a later check refuses the files and names their key
        return None


def reward_line(job: Job) -> str:
    """Writes the formula of a sample's reward, a weighted sum, and names functions that score only some sources."""
    reward, env = job.reward, job.env
    names = [fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__) for fn in reward.fns]
    terms = list(zip(reward.weights or (1.0,) * len(names), names, strict=True))
    terms += [(reward.model_weight, f"score of reward.model={reward.model}")] if reward.model else []
    terms += [(env.reward_weight, "the environment's rewards")] if env.used else []
    text = " + ".join(name if weight == 1 else f"{weight:g} x {name}" for weight, name in terms)
    others = [name for name in reward.named if name not in reward.fns]
    said = f"Reward of a sample: {text or 0}."
    said += f" Some sources name reward functions of their own: {', '.join(others)}." if others else ""
    return said + ("" if job.algo.uses_rewards else " It is recorded and is not in the loss (grpo.reward_coef=0).")


def _set_lines(job: Job) -> list[str]:
    """Describes the sets of eval.sets."""
    lines = []
    for one in job.eval.sets:
        samples, most = job.eval.samples if one.samples is None else one.samples, one.problems or job.eval.problems
        drawn = f"greedy and {samples} at temperature {one.temperature:g}" if samples else "greedy"
        often = "" if one.every == 1 else f", in every {one.every}th evaluation, the first and the last"
        also = split(job.data, job.kind.form).count_shared_questions(split(one.data(job.data), key="eval.sets"))
        trained = f" Training records with the same question as a record of this set: {also}." if also else ""
        lines.append(
            f"Evaluation set {one.name}: at most {plural(most, 'record')} of {one.path}, {drawn}{often}.{trained}"
        )
    return lines


def algorithm_lines(job: Job, on: Meshes) -> list[str]:
    """Lists the batch arithmetic in words, the algorithm's formulas, the guarantee for a resumed run, and warnings."""
    limit = job.rollout.max_tokens_to_generate
    formulas = [*job.algo.formula(limit).splitlines(), *job.algo.describe(limit)]
    return [
        in_words(job, on.trainer),
        f"Algorithm {job.algorithm}:",
        *(f"  {line}" for line in formulas),
        _guarantee(job),
        *(f"Warning: {warning}" for warning in job.algo.warnings(job.updates_per_step)),
    ]


def _route_lines(job: Job) -> list[str]:
    """States the memory that recorded routes take, for a model with experts."""
    if not job.rollout.router_replay or not (job.model.path or job.model.size):
        return []
    try:
        size = moe.route_bytes(model_of(job))
    except ValueError:  # files that cannot be read: `ready.check_models` names the key, after this page is printed
        return []
    if not size:
        return []
    total = size * job.samples_per_step * job.longest / 2**20
    return [
        f"Router replay (rollout.router_replay): {size} bytes a token, at most {total:,.1f} MiB in a step's batch, so "
        "that the trainer sends each token to the experts that the sampler chose."
    ]


def _guarantee(job: Job) -> str:
    """States the guarantee for a run that is killed and started again."""
    if job.rollout.clock == "wall":
        return (
            "Guarantee (rollout.clock='wall'): in a run that is killed and started again no prompt is lost or trained "
            f"twice, no token is more than {plural(job.max_staleness, 'step')} old, and podrl.replay repeats all of "
            "it bitwise."
        )
    return "Guarantee (rollout.clock='tokens'): a run that is killed and started again ends bitwise the same."


def offline_rows(job: Job, on: Meshes) -> list[list[str]]:
    """Explains how answers from data become updates."""
    section, batch, shape = job.section, job.algo.batch_size, job.pack_shape(on.trainer)
    what = "pairs" if job.kind.answers == 2 else "examples"
    return [
        [f"{what} per step", f"{batch}", f"{section}.batch_size"],
        ["updates per step", "1", f"all {what} of the step"],
        ["micro-batches per update", f"at most {shape.micro_batches}", f"{shape.rows} rows of {shape.tokens} tokens"],
        ["longest example", f"{job.longest} tokens", f"{section}.max_length"],
        ["steps", f"{job.max_steps}", "trainer.max_steps"],
        [f"{what} in all", f"{job.max_steps * batch:,}", f"steps x {what} per step"],
    ]


def offline_lines(job: Job) -> list[str]:
    """Describes the loss of a job on answers from data, and the parameters it trains."""
    rank = job.model.lora.rank
    trained = f"adapters of rank {rank}" if rank else "all parameters"
    return [f"Algorithm {job.section}: {job.kind.algorithm.formula(job.algo)}; trains {trained} of {job.model.path}."]


def _auxiliary_models(job: Job) -> dict[str, str]:
    """Describes the job's auxiliary models."""
    critic = {"critic": "critic: values and their updates"} if job.section == "ppo" else {}
    names = ", ".join(f"{t.path} ({', '.join(t.sources) or 'all others'})" for t in job.model.teachers)
    critic |= {"teacher": f"teachers: log-probabilities of samples: {names}"} if names else {}
    return critic | ({"reward": "reward model: scores of samples"} if job.reward.model else {})


def batch_rows(job: Job, on: Meshes) -> list[list[str]]:
    """Explains how prompts become samples, mini-batches, micro-batches and updates."""
    prompts, group, section = job.rollout.prompts_per_step, job.algo.num_generations, job.section
    samples, mini = job.samples_per_step, job.mini_batch_size
    length, steps = job.longest, job.max_steps
    response = "max_tokens_to_generate" if job.rollout.max_response_tokens is None else "max_response_tokens"
    shape = job.pack_shape(on.trainer)
    drawn = prompts * job.algo.prompt_batches
    set_aside = []
    if drawn > prompts:
        set_aside = [["prompts set aside", f"{drawn}", f"{prompts} x {section}.dynamic_sampling_batches"]]
    apart = []
    if on.critic != on.trainer:
        critic = job.pack_shape(on.critic)
        row = _rows_of(critic)
        apart = [["micro-batches per update, critic", f"at most {critic.micro_batches}", row]]
    return [
        *set_aside,
        ["prompts per step", f"{prompts}", "rollout.prompts_per_step"],
        ["samples per prompt (G)", f"{group}", f"{section}.num_generations"],
        ["samples per step", f"{samples}", f"{prompts} x {group}"],
        ["decoded at once", f"{job.rollout.lanes}", _lanes_from(job)],
        ["mini-batches per pass", f"{samples // mini}", f"{prompts} prompts / trainer.mini_batch_size {mini // group}"],
        [
            "micro-batches per update",
            f"at most {shape.micro_batches}",
            _rows_of(shape),
        ],
        *apart,
        ["passes (mu)", f"{job.algo.num_iterations}", f"{section}.num_iterations"],
        ["updates per step", f"{job.updates_per_step}", "mini-batches x passes"],
        ["longest sequence", f"{length} tokens", f"rollout.max_prompt_length + {response}"],
        ["steps", f"{steps}", "trainer.max_steps" + (" / updates per step" if job.updates_per_step > 1 else "")],
        ["samples in all", f"{steps * samples:,}", "steps x samples per step"],
    ]


def _lanes_from(job: Job) -> str:
    lanes, samples = job.rollout.lanes, job.samples_per_step
    return "rollout.lanes" + (f"; a step fills {samples}, so {samples} would cost less" if lanes > samples else "")


def in_words(job: Job, trainer_mesh: Mesh) -> str:
    """Writes the batch arithmetic as a sentence."""
    prompts, samples, mini = job.rollout.prompts_per_step, job.samples_per_step, job.mini_batch_size
    shape = job.pack_shape(trainer_mesh)
    passes = job.algo.num_iterations
    text = f"Every step samples {plural(job.algo.num_generations, 'completion')} of {plural(prompts, 'prompt')}, "
    text += f"{samples} in all"
    if job.algo.prompt_batches > 1:
        text += f" (from up to {prompts * job.algo.prompt_batches} prompts, until {prompts} groups have a signal)"
    updates, batches = job.updates_per_step, samples // mini
    text += f", and makes {plural(updates, 'update')}: {plural(passes, 'pass', 'passes')} over "
    text += f"{plural(batches, 'mini-batch', 'mini-batches')} of {plural(mini, 'sequence')}, "
    text += f"{'each ' if batches > 1 else ''}packed into at most "
    text += f"{plural(shape.micro_batches, 'micro-batch', 'micro-batches')} of {_rows_of(shape)}. "
    text += "The split changes no gradient."
    if updates > 1:
        text += (
            f" trainer.max_steps and trainer.eval_every_n_steps count updates; all else, the log too, counts steps: "
            f"{plural(job.max_steps, 'step')} of {updates} updates are {job.max_steps * updates} updates."
        )
    return text


def _rows_of(shape: PackShape) -> str:
    shared = ", in which samples share their prompt" if shape.shared else ""
    return f"{plural(shape.rows, 'row')} of {shape.tokens} tokens{shared}"
