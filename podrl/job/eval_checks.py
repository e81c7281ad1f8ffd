"""Refuses evaluation sets that do not fit a job, and evaluation hosts that would have nothing to do."""

from typing import Any


def check_evaluation(job: Any) -> None:
    """Refuses sets of eval.sets whose sizes do not fit the job, and evaluation hosts without an evaluation.

    Args:
      job: a podrl.job.config.Job, complete.

    Raises:
      ValueError: a set or the hosts do not fit; the message says which, and what to set.
    """
    _check_hosts(job)
    if job.kind.scores and job.eval.sets:
        raise ValueError(
            f"eval.sets: {job.eval.sets[0].name} has prompts to sample from, and algorithm={job.section} samples "
            "nothing: leave eval.sets out, and name held-out pairs by data.eval_path."
        )
    most = job.rollout.max_tokens_to_generate
    for one in job.eval.sets:
        if (one.max_tokens_to_generate or 0) > most:
            raise ValueError(
                f"eval.sets: {one.name} has max_tokens_to_generate={one.max_tokens_to_generate}, and caches are made "
                f"for rollout.max_tokens_to_generate={most}: set it to at most {most}."
            )
        if not (one.problems or job.eval.problems):
            raise ValueError(
                f"eval.sets: {one.name} lacks problems, and eval.problems=0 gives no number: set one of them."
            )


def _check_hosts(job: Any) -> None:
    """Refuses evaluation hosts that would have nothing to do."""
    if not (hosts := job.roles.eval.hosts):
        return
    text = f"roles.eval.hosts={hosts!r} names hosts that evaluate and do nothing else"
    if job.kind.offline:
        raise ValueError(
            f"{text}, and with algorithm={job.section} the rollout mesh does nothing else: leave "
            "roles.eval.hosts empty, and name these hosts in roles.rollout.hosts."
        )
    if not (job.eval.problems or job.eval.sets):
        raise ValueError(f"{text}, and eval.problems=0 leaves evaluations out: leave roles.eval.hosts empty.")
