"""Opens the records that a job evaluates on: records held out of its training data, and the sets of eval.sets."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
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
    batches = held_out(job, cluster.tokenizer)
    data = evaluation_data(job)[0] or job.data
    sets = [_held_out_set(one, cluster, job) for one in job.eval.sets]
    if not batches and not sets:
        return None
    every, updates = job.trainer.eval_every_n_steps, job.updates_per_step
    nth = lambda step: step * updates // every if every and step < job.max_steps else 0  # noqa: E731
    scorer = _scorer(job, data)
    return Evaluator(cluster, batches, job.eval, scorer=scorer, sets=sets, nth=nth, groups=data.groups)


def held_out(job: Job, tokenizer: Tokenizer) -> Sequence[Any]:
    """Makes the batches of the evaluation on held-out records: prompts, or pairs if the job trains a reward model.

    Warns if there are no held-out records although eval.problems asks for some, and if sources hold none out.

    Raises:
      ValueError: a record cannot be used; a note says that eval.problems asks for it.
    """
    count = job.eval.problems
    if not count:
        return ()
    data, lacking = evaluation_data(job)
    origin = "data.sources" if job.data.sources else f"data.path={job.data.path}"
    if data is None:
        of = "pairs" if job.kind.scores else "records"
        why = f"{next(iter(lacking.values()))}, and no {of} are held out if one of them has no answer"
        _warn_nothing_held_out(origin, why, "")
        return ()
    if lacking:
        _warn_held_out_of(", ".join(source.label for source in data.sources), "; ".join(lacking.values()))
    if job.kind.scores:
        found: Sequence[Any] = held_out_pairs(data, tokenizer, count=count, **pair_settings(job))
        why = f"none fits {job.section}.max_length={job.algo.max_length}"
    else:
        limit = job.rollout.max_prompt_length
        why = f"none fits rollout.max_prompt_length={limit}"
        try:
            if not split(data).held_out:
                why = "a question's hash decides whether its records are held out, and there are too few questions"
            found = held_out_prompts(data, tokenizer, count=count, max_prompt_length=limit)
        except ValueError as error:
            error.add_note(f"the evaluation reads it; eval.problems={count} asks for one, eval.problems=0 for none")
            raise
    if not found:
        _warn_nothing_held_out(origin, why, f" raise data.eval_fraction={data.eval_fraction},")
    return found


def evaluation_data(job: Job) -> tuple[DataConfig | None, Mapping[str, str]]:
    """Returns the settings of the data whose held-out records an evaluation uses.

    A job on answers from data holds out records of a source only if all of the source's records have an answer to
    compare with (podrl.data.mixture.split).

    Returns:
      Two values. The first is the settings with only the sources that hold records out, or None if no source does. The
      second maps the name of each other source to a text that names a record without an answer and the record's fields.
    """
    data = job.data
    parts = () if not job.kind.offline or data.eval_path else split(data, job.kind.form).parts
    lacking = {part.name: part.unanswered for part in parts if part.unanswered}
    if not lacking:
        return data, {}
    kept = tuple(source for source in data.sources if source.label not in lacking)
    return (dataclasses.replace(data, sources=kept) if kept else None), lacking


@functools.cache  # warns once, though the checks of a start and the evaluation both open the records
def _warn_nothing_held_out(origin: str, why: str, more: str) -> None:
    _log.warning(
        "There is no evaluation on records held out from %s: %s. Give data.eval_path,%s or set eval.problems=0.",
        *(origin, why, more),
    )


@functools.cache
def _warn_held_out_of(sources: str, lacking: str) -> None:
    _log.warning(
        "Evaluations use records held out from %s only. All records of the other sources are trained on, because "
        "a source cannot be evaluated if one of its records has no answer: %s.",
        *(sources, lacking),
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
    if not batches:
        raise ValueError(
            f"eval.sets: {one.name} has nothing to score: no record of {one.path} fits rollout.max_prompt_length="
            f"{rollout.max_prompt_length}. Raise it, or leave the set out."
        )
    if job.kind.offline and scorer is None:
        raise ValueError(
            f"eval.sets: {one.name} has records without answers, and algorithm={job.section} has no rewards: "
            f"{unmeasured(job, data)}. Give every record an answer, or leave the set out."
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
    """Returns the reason why evaluations on a data set have no accuracies; '' if they have them."""
    if not job.has_accuracies:
        return (
            f"data.system_prompt does not ask for an answer between {ANSWER_START} and {ANSWER_END}, and reward.fns "
            "has none of the functions that read one ('answer', 'number')"
        )
    return split(data).unmeasured


def _scorer(job: Job, data: DataConfig) -> Scorer | None:
    """Makes the function that computes a completion's accuracies; None if the data set has none (`unmeasured`)."""
    if unmeasured(job, data):
        return None
    return functools.partial(accuracies, has_format=has_format(data))
