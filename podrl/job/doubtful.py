"""Lists settings of a job that are legal but that nothing in the job reads, or that are probably a mistake."""

from collections.abc import Iterator, Mapping

from podrl.algorithms.aggregate import SCALED_MODES
from podrl.config import plural
from podrl.data.config import is_generated
from podrl.data.mixture import split
from podrl.environments.config import NONE, TOOLS
from podrl.job.config import SCRATCH, Job, unset
from podrl.mappings import ConfigValues

# Settings of the section env that say which environment there is; the other settings of env need an environment.
_NAMES = ("environment", "others", "program", "verifiers", "tools", "mcp", "system_prompt_file")
_LARGE_RATE = 0.1  # AdamW moves a weight by about the learning rate in each update; weights are of the order 0.01 to 1


def doubtful(job: Job, *, pod: bool = False) -> list[str]:
    """Lists settings that have no effect in this job although they differ from their defaults, and doubtful values.

    Args:
      job: the job.
      pod: True if the job has several processes.

    Returns:
      One sentence for each reason, which names the settings with their values.
    """
    values, usual = _flat(job.as_mapping()), _flat(unset(job.algorithm))
    found = []
    for reason, patterns in _unread(job, pod).items():
        keys = [key for key in values if key in usual and any(_named(key, pattern) for pattern in patterns)]
        if changed := [f"{key}={values[key]!r}" for key in keys if values[key] != usual[key]]:
            have = "has" if len(changed) == 1 else "have"
            found.append(f"{', '.join(changed)} {have} no effect: {reason}.")
    if not pod and job.roles.colocated and not job.kind.offline and job.algo.max_staleness:
        found.append(
            f"{job.section}.max_staleness={job.algo.max_staleness} lets generation and training overlap, and with "
            "roles.colocated=True they wait for each other on the same devices: set roles.colocated=False."
        )
    return [*found, *_values(job)]


def _unread(job: Job, pod: bool) -> dict[str, tuple[str, ...]]:
    """Returns {reason: settings that this job does not read for this reason}; 'a.*' stands for all keys of a group.

    A setting is listed only if it is certain that no part of the job reads it.
    """
    env, curriculum, model, log = job.env, job.data.curriculum, job.model, job.log
    own_tools = not set(env.choices) - {TOOLS, NONE}
    generated = all(is_generated(one.path) for one in job.data.singles())
    samples = not job.kind.offline
    reasons: dict[str, tuple[bool, tuple[str, ...]]] = {
        "the job has one process": (not pod, ("roles.trainer.hosts", "roles.rollout.hosts")),
        "the job has no environment (env.environment, env.tools, env.mcp, env.program)": (
            not env.used,
            tuple(f"env.{name}" for name in type(env).__dataclass_fields__ if name not in _NAMES),
        ),
        "env.tools is empty": (
            env.used and own_tools and not env.tools,
            ("env.call_deadline_s", "env.retries", "env.concurrency"),
        ),
        "env.mcp is empty": (env.used and own_tools and not env.mcp, ("env.server_deadline_s",)),
        "no share, retirement or postponement of data.curriculum is set": (
            not curriculum.used,
            ("data.curriculum.*",),
        ),
        "data.curriculum.easy_share is None": (
            curriculum.used and curriculum.easy_share is None and curriculum.hard_share is None,
            ("data.curriculum.easy_rate", "data.curriculum.hard_rate"),
        ),
        "data.curriculum.retire_after=0": (
            curriculum.used and not curriculum.retire_after,
            ("data.curriculum.retire_rate",),
        ),
        "data.curriculum.postpone_after=0": (
            curriculum.used and not curriculum.postpone_after,
            ("data.curriculum.postpone_steps",),
        ),
        f"model.path={model.path!r} is not {SCRATCH!r}": (model.path != SCRATCH, ("scratch.*",)),
        f"model.path={model.path!r} has sizes of its own": (bool(model.path), ("model.size",)),
        "model.lora.rank=0 trains all parameters": (
            not model.lora.rank,
            ("model.lora.alpha", "model.lora.pattern", "model.lora.dropout", "rollout.merge_adapters"),
        ),
        "reward.model is empty": (samples and not job.reward.model, ("reward.model_weight",)),
        "eval.problems=0 and eval.sets is empty, so there is no evaluation": (
            not (job.eval.problems or job.eval.sets),
            ("eval.samples", "eval.show"),
        ),
        f"algorithm={job.algorithm} has no critic": (job.section != "ppo", ("trainer.critic_learning_rate",)),
        "a reward model has no balance loss": (job.algorithm == "reward_model", ("trainer.balance_coef",)),
        "trainer.schedule='constant'": (job.trainer.schedule == "constant", ("trainer.end_fraction",)),
        "all data are embedded tasks, which hold out a tenth of their questions": (
            generated and not job.data.eval_path,
            ("data.eval_fraction",),
        ),
        "data.eval_path names the held-out records": (bool(job.data.eval_path), ("data.eval_fraction",)),
        "no data are generated": (
            not any(is_generated(one.path) for one in (*job.data.singles(), *job.eval.sets)),
            ("data.size",),
        ),
        "log.trace='off'": (log.trace == "off", ("log.trace_mb",)),
        "log.samples_every=0 writes no samples": (not log.samples_every, ("log.samples",)),
        "log.to names neither 'wandb' nor 'mlflow'": (not {"wandb", "mlflow"} & set(log.to), ("log.project",)),
        f"algorithm={job.algorithm} learns from answers of the data": (not samples, ("rollout.prompts_per_step",)),
    }
    found = {reason: keys for reason, (unread, keys) in reasons.items() if unread}
    return {**found, **_of_algorithm(job)} if samples else found


def _of_algorithm(job: Job) -> dict[str, tuple[str, ...]]:
    """Returns {reason: settings of the algorithm that the job does not read for this reason}.

    `PolicyLoss.warnings` names the settings that the policy loss does not read.
    """
    algo, name = job.algo, job.section
    reasons: dict[str, tuple[bool, tuple[str, ...]]] = {
        f"{name}.dynamic_sampling=False": (not algo.dynamic_sampling, ("dynamic_sampling_batches",)),
        f"{name}.overlong_shaping=False": (not algo.overlong_shaping, ("overlong_buffer", "overlong_penalty")),
        f"{name}.kl_target is None": (algo.kl_target is None, ("kl_horizon",)),
    }
    if len(algo.parts) == 1:  # the sources of a mixture may have settings of their own
        scaled = algo.mode in SCALED_MODES
        plain = f"{name}.sampler_correction={algo.sampler_correction!r} corrects nothing"
        reasons |= {
            plain: (algo.correction == "none", ("correction_low", "correction_high")),
            f"{name}.loss_agg_mode={algo.loss_agg_mode!r} has no scale": (not scaled, ("loss_agg_scale",)),
            f"{name} has no KL to the reference": (not any(algo.kl_coefs().values()), ("kl_clamp_value",)),
            f"{name}.beta=0": (not algo.beta, ("kl_loss_mode", "kl_method")),
        }
        kind = algo.estimator().kind
        discounted = kind == "gae" or kind.startswith("reinforce_plus_plus")
        unread = {
            "gamma": discounted,
            "advantage_scale": kind in ("grpo", "pass_at_k"),
            "advantage_ddof": kind == "grpo",
        }
        names = tuple(key for key, read in unread.items() if not read)
        reasons[f"the advantage estimator {kind} does not read it"] = (not algo.own_advantage, names)
    if name == "grpo":
        taught = algo.distillation
        reasons |= {
            "grpo.reward_coef=0 keeps rewards out of the loss": (
                not algo.uses_rewards,
                ("kl_in_reward", "overlong_shaping", "no_stop_reward"),
            ),
            "grpo.kl_in_reward=0": (not algo.kl_in_reward, ("kl_reward_mode",)),
            "grpo.teacher_coef=0": (taught is None, ("teacher_rate", "teacher_hint_tokens", "teacher_top_k")),
            "grpo.teacher is not 'ema'": (taught is not None and taught.teacher != "ema", ("teacher_rate",)),
            "grpo.teacher_kl is not 'top_k'": (taught is not None and taught.kl != "top_k", ("teacher_top_k",)),
        }
    return {reason: tuple(f"{name}.{key}" for key in keys) for reason, (unread, keys) in reasons.items() if unread}


def _values(job: Job) -> Iterator[str]:
    """Yields a sentence for each value that is probably a mistake."""
    rate = job.trainer.learning_rate
    if job.trainer.actor_optimizer is None and rate >= _LARGE_RATE:
        yield (
            f"trainer.learning_rate={rate:g} moves every weight by about {rate:g} in each update, which destroys a "
            "trained model: usual rates are 1e-7 to 1e-2."
        )
    every = job.trainer.eval_every_n_steps
    if every and not (job.eval.problems or job.eval.sets):
        yield f"trainer.eval_every_n_steps={every} has no effect: eval.problems=0 leaves evaluations out."
    try:
        opened = split(job.data, job.kind.form)
    except FileNotFoundError:  # a dry run on a machine that lacks the run's files
        return
    records = sum(len(part.train) for part in opened.parts)
    key = f"{job.section}.batch_size" if job.kind.offline else "rollout.prompts_per_step"
    batch = job.algo.batch_size if job.kind.offline else job.rollout.prompts_per_step
    is_game = bool(set(job.env.choices) - {TOOLS, NONE})  # an environment of the user may draw another game each time
    if 0 < records < batch and not is_game:
        yield (
            f"{key}={batch} is more than the {plural(records, 'record')} to train on, so every step has some of them "
            f"several times: set it to at most {records}."
        )
    if 0 < opened.held_out < job.eval.problems != type(job.eval)().problems:
        held_out = plural(opened.held_out, "held-out record")
        yield f"eval.problems={job.eval.problems} is more than the {held_out}: set it to at most {opened.held_out}."


def _flat(values: ConfigValues, prefix: str = "") -> dict[str, object]:
    """Maps the dotted path of every setting to its value; lists are tuples."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value
    return flat


def _named(key: str, pattern: str) -> bool:
    """True if the pattern is the key, the key of a mapping that holds it, or 'GROUP.*'."""
    return key == pattern or key.startswith(f"{pattern.removesuffix('*').removesuffix('.')}.")
