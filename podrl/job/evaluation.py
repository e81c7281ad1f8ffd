"""Opens the records that a job evaluates on: those held out of its training data, and the sets of eval.sets."""

import functools
import logging
from collections.abc import Sequence

from podrl.cluster.rl_cluster import RLCluster
from podrl.data.config import DataConfig
from podrl.data.mixture import split
from podrl.data.pipeline import has_format, held_out_prompts, set_prompts
from podrl.job.config import Job
from podrl.learner.evaluate import Evaluator, HeldOut, Scorer, SetConfig, stop_texts
from podrl.rewards.reference import accuracies
from podrl.rollout.config import Sampling
from podrl.types import Prompts

_log = logging.getLogger(__name__)


def make_evaluator(cluster: RLCluster, job: Job) -> Evaluator | None:
    """Builds the evaluation on held-out records; None when it is off or has none."""
    data, limit = job.data, job.rollout.max_prompt_length
    batches: Sequence[Prompts] = ()
    if job.eval.problems:
        try:
            unanswered = split(data).unanswered
            if job.kind.given and unanswered and not data.eval_path:
                raise ValueError(f"{unanswered[0][0]}: without it nothing can be held out. Give it, or data.eval_path.")
            batches = held_out_prompts(data, cluster.tokenizer, count=job.eval.problems, max_prompt_length=limit)
        except ValueError as error:
            error.add_note(
                f"the evaluation reads it, which eval.problems={job.eval.problems} asks for and 0 leaves out"
            )
            raise
    sets = [_held_out_set(one, cluster, job) for one in job.eval.sets]
    if job.eval.problems and not batches:
        _log.warning(
            "There is no evaluation on records held out from data.path=%s: none fits rollout.max_prompt_length=%d. "
            "Give data.eval_path, raise data.eval_fraction=%s, or set eval.problems=0.",
            *(data.path, limit, data.eval_fraction),
        )
    if not batches and not sets:
        return None
    every, updates = job.trainer.eval_every_n_steps, job.updates_per_step
    nth = lambda step: step * updates // every if every and step < job.max_steps else 0  # noqa: E731
    scorer = _scorer(job, data)
    return Evaluator(cluster, batches, job.eval, scorer=scorer, sets=sets, nth=nth, groups=data.groups)


def _held_out_set(one: SetConfig, cluster: RLCluster, job: Job) -> HeldOut:
    """Opens a set of eval.sets.

    Raises:
      ValueError: bad data, or none that fits; names the set.
    """
    rollout, data = job.rollout, one.data(job.data)
    batches = set_prompts(
        data,
        cluster.tokenizer,
        count=one.problems or job.eval.problems,
        max_prompt_length=rollout.max_prompt_length,
    )
    scorer = _scorer(job, data)
    if not batches or (job.kind.given and scorer is None):
        raise ValueError(
            f"eval.sets: {one.name} has nothing to score: none of {one.path} fits rollout.max_prompt_length="
            f"{rollout.max_prompt_length}."
            if not batches
            else f"eval.sets: {one.name} has records without answers, and algorithm={job.section} has no rewards."
        )
    return HeldOut(
        batches,
        Sampling(
            temperature=one.temperature,
            max_new=one.max_tokens_to_generate or rollout.max_tokens_to_generate,
            stop_strings=stop_texts(cluster),
        ),
        job.eval.samples if one.samples is None else one.samples,
        scorer,
        name=one.name,
        every=one.every,
    )


def _scorer(job: Job, data: DataConfig) -> Scorer | None:
    """Makes the accuracies of a data set's completions, where the task has any and all records have answers."""
    if not job.has_accuracies or split(data).unanswered:
        return None
    return functools.partial(accuracies, has_format=has_format(data))
