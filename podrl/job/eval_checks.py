"""Refuses evaluations that a job cannot make: their sets, their times and their devices."""

from typing import Any

from podrl.runtime.roles import ROLLOUT


def check_evaluation(job: Any) -> None:
    """Refuses sets of eval.sets whose sizes do not fit the job, and evaluations beside training where that cannot be.

    Args:
      job: a podrl.job.config.Job, complete.

    Raises:
      ValueError: says which, and what to set.
    """
    _check_devices(job)
    if job.eval.beside and job.kind.given:
        raise ValueError(
            "eval.beside=True evaluates while the rollout mesh waits for the trainer, and with "
            f"algorithm={job.section} it does nothing else: set eval.beside=False."
        )
    if job.eval.beside and (job.max_staleness > 1 or job.rollout.clock != "tokens"):
        raise ValueError(
            "eval.beside=True evaluates while the rollout mesh waits for the trainer, and it goes on with samples "
            f"instead: {job.section}.max_staleness={job.max_staleness}, rollout.clock={job.rollout.clock!r}. Set "
            "eval.beside=False, or a staleness of at most 1 and the clock 'tokens'."
        )
    most = job.rollout.max_tokens_to_generate
    for one in job.eval.sets:
        if (one.max_tokens_to_generate or 0) > most:
            raise ValueError(
                f"eval.sets: {one.name} has max_tokens_to_generate={one.max_tokens_to_generate}, and caches are made "
                f"for rollout.max_tokens_to_generate={most}: give at most that."
            )
        if not (one.problems or job.eval.problems):
            raise ValueError(
                f"eval.sets: {one.name} lacks problems, and eval.problems=0 does not say: give one of them."
            )


def _check_devices(job: Any) -> None:
    """Refuses devices, or hosts, for evaluations that cannot have any of their own."""
    mesh, hosts = job.roles.eval.mesh, job.roles.eval.hosts
    if hosts:
        asks, leave = f"roles.eval.hosts={hosts!r} names hosts that evaluate and do nothing else", "leave it empty"
    elif mesh != ROLLOUT:
        asks, leave = f"roles.eval.mesh={mesh!r} evaluates on devices of its own", f"say {ROLLOUT!r}"
    else:
        return
    if job.kind.given:
        rather = "roles.rollout.hosts these hosts" if hosts else "roles.rollout.mesh the devices"
        raise ValueError(
            f"{asks}, and with algorithm={job.section} the rollout mesh does nothing else: {leave}, and give {rather}."
        )
    if job.eval.beside:
        raise ValueError(f"{asks}, and eval.beside=True on the rollout's: {leave}, or set eval.beside=False.")
    if not hosts and (job.env.used or job.reward.model):
        what = "environments are" if job.env.used else f"reward.model={job.reward.model!r} is"
        raise ValueError(f"{asks}, while samples are trained on, and the job's {what} used by one at a time: {leave}.")
    if not (job.eval.problems or job.eval.sets):
        raise ValueError(f"{asks}, and eval.problems=0 leaves evaluations out: {leave}.")
