"""Opens the records that a job evaluates on: records held out of its training data, and the sets of eval.sets."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from podrl.cluster.rl_cluster import RLCluster
from podrl.data.config import DataConfig
from podrl.data.mixture import split
from podrl.data.pairs import held_out_pairs
from podrl.data.pipeline import has_format, held_out_prompts, set_prompts
from podrl.data.template import ANSWER_END, ANSWER_START
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import Sampling
from podrl.job.config import Job, pair_settings
from podrl.learner.evaluate import Evaluator, HeldOut, Scorer, SetConfig, stop_texts
from podrl.rewards.reference import accuracies
from podrl.types import Prompts

_log = logging.getLogger(__name__)


def make_evaluator(cluster: RLCluster, job: Job) -> Evaluator | None:
    """Builds the evaluation on held-out records and on the sets of eval.sets; None if there is neither."""
    data, batches = job.data, held_out(job, cluster.tokenizer)
    sets = [_held_out_set(one, cluster, job) for one in job.eval.sets]
    if not batches and not sets:
        return None
    every, updates = job.trainer.eval_every_n_steps, job.updates_per_step
    nth = lambda step: step * updates // every if every and step < job.max_steps else 0  # noqa: E731
    scorer = _scorer(job, data)
    return Evaluator(cluster, batches, job.eval, scorer=scorer, sets=sets, nth=nth, groups=data.groups)


def held_out(job: Job, tokenizer: Tokenizer) -> Sequence[Any]:
    """Makes the batches of the evaluation on held-out records: prompts, or pairs if the job trains a reward model.

    Warns if there are no held-out records although eval.problems asks for some.

    Raises:
      ValueError: a record cannot be used; a note says that eval.problems asks for it.
    """
    data, count = job.data, job.eval.problems
    if not count:
        return ()
    more = f" raise data.eval_fraction={data.eval_fraction},"
    if job.kind.scores:
        found: Sequence[Any] = held_out_pairs(data, tokenizer, count=count, **pair_settings(job))
        why = f"none fits {job.section}.max_length={job.algo.max_length}"
        if not data.eval_path and (lacks := split(data, job.kind.form).unanswered):
            why, more = f"{lacks[0][0]}, and where pairs have no answer, none are held out", ""
    else:
        limit, why = (
            job.rollout.max_prompt_length,
            f"none fits rollout.max_prompt_length={job.rollout.max_prompt_length}",
        )
        try:
            opened = split(data)
            unanswered = opened.unanswered
            if not opened.held_out:
                why = "a question's hash decides whether its records are held out, and there are too few questions"
            if job.kind.offline and unanswered and not data.eval_path:
                why, more = f"{unanswered[0][0]}, and where records have no answer, none are held out", ""
                found = ()
            else:
                found = held_out_prompts(data, tokenizer, count=count, max_prompt_length=limit)
        except ValueError as error:
            error.add_note(f"the evaluation reads it, which eval.problems={count} asks for and 0 leaves out")
            raise
    if not found:
        _say_none("data.sources" if data.sources else f"data.path={data.path}", why, more)
    return found


@functools.cache  # warns once, though the checks of a start and the evaluation both open the records
def _say_none(origin: str, why: str, more: str) -> None:
    _log.warning(
        "There is no evaluation on records held out from %s: %s. Give data.eval_path,%s or set eval.problems=0.",
        *(origin, why, more),
    )


def open_set(one: SetConfig, tokenizer: Tokenizer, job: Job) -> tuple[Sequence[Prompts], Scorer | None]:
    """Opens a set of eval.sets: its prompts, and the function that computes accuracies.

    Raises:
      ValueError: the set has bad data, or no record that fits; the message names the set.
    """
    rollout, data = job.rollout, one.data(job.data)
    batches = set_prompts(
        data,
        tokenizer,
        count=one.problems or job.eval.problems,
        max_prompt_length=rollout.max_prompt_length,
    )
    scorer = _scorer(job, data)
    if not batches or (job.kind.offline and scorer is None):
        raise ValueError(
            f"eval.sets: {one.name} has nothing to score: none of {one.path} fits rollout.max_prompt_length="
            f"{rollout.max_prompt_length}."
            if not batches
            else f"eval.sets: {one.name} has records without answers, and algorithm={job.section} has no rewards."
        )
    return batches, scorer


def _held_out_set(one: SetConfig, cluster: RLCluster, job: Job) -> HeldOut:
    rollout = job.rollout
    batches, scorer = open_set(one, cluster.tokenizer, job)
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


def unmeasured(job: Job, data: DataConfig) -> str:
    """Returns the reason why a data set has no accuracies; '' if it has them."""
    if not job.has_accuracies:
        return (
            f"data.system_prompt does not ask for an answer between {ANSWER_START} and {ANSWER_END}, and reward.fns "
            "has none of the functions that read one ('answer', 'number')"
        )
    lacking = split(data).unanswered
    return lacking[0][0] if lacking else ""


def _scorer(job: Job, data: DataConfig) -> Scorer | None:
    """Makes the function that computes a completion's accuracies; None if the data set has none (`unmeasured`)."""
    if unmeasured(job, data):
        return None
    return functools.partial(accuracies, has_format=has_format(data))
