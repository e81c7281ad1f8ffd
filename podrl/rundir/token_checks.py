"""Checks of single tokens in the traces that the doctor reads; each names the first wrong token, or the worst."""

import math

import numpy as np

from podrl.groups import member_of
from podrl.mappings import LogRecord
from podrl.rundir.checks import check
from podrl.rundir.history import Past
from podrl.rundir.trace import TracedStep

# Largest allowed difference, in nats, of the trainer's and the sampler's log-probability of a token; docs/doctor.md.
APART, APART_INEXACT = 0.01, 2.0


@check(
    "a trace that cannot be read",
    kind="trace",
    meaning="the file was damaged after it was written; training never reads it",
    key="nothing: delete the file, and look at the disk",
)
def _unreadable(now: LogRecord, past: Past) -> str:
    return str(now.get("unreadable", ""))


@check(
    "a token that was not sampled counts as sampled",
    kind="trace",
    meaning="a token of the prompt or of the outside world is trained on as if the policy had said it, or the reverse",
    key="report it with the sample; an environment or a template of your own is the first suspect (env.environment)",
)
def _sampled(now: LogRecord, past: Past) -> str:
    step = _trace_of(now)
    if step is None:
        return ""
    mask_X, version_X, trained_X = (step.tokens[name] for name in ("mask", "version", "trained"))
    place_X = _place(step)
    prompt_X = place_X < np.repeat(step.samples["prompt_length"], step.samples["length"])
    alone_X = np.repeat([not episode.get("turns") for episode in step.episodes], step.samples["length"])
    for bad_X, problem in (
        ((mask_X > 0) & prompt_X, "it is of the prompt, and its mask is 1"),
        ((mask_X > 0) != (version_X >= 0), "its mask does not fit the version of the weights that sampled it"),
        ((mask_X == 0) & alone_X & ~prompt_X, "it is of an answer without tools, and its mask is 0"),
        ((trained_X > 0) & (mask_X == 0), "it counts in the loss, and its mask is 0"),
        ((mask_X > 0) & ~np.isfinite(step.tokens["logprob"]), "it was sampled, but its log-probability is not finite"),
    ):
        if bad_X.any():
            return f"{_token(step, bad_X)}: {problem} ({bad_X.sum()} such tokens)"
    return ""


@check(
    "a token of other weights",
    kind="trace",
    meaning="a sampled token's version is newer than the weights were, or older than max_staleness allows",
    key="report it: versions are checked on arrival; until then, another transfer (roles.colocated=True)",
)
def _weights(now: LogRecord, past: Past) -> str:
    step = _trace_of(now)
    if step is None:
        return ""
    version_X, newest = step.tokens["version"], step.step - 1
    oldest = newest - past.setting("algo.max_staleness", 0)
    bad_X = (version_X >= 0) & ((version_X > newest) | (version_X < oldest))
    if not bad_X.any():
        return ""
    version = int(version_X[np.argmax(bad_X)])
    may = f"{oldest} to {newest}" if oldest < newest else str(newest)
    return f"{_token(step, bad_X)}: its weights are version {version}, not {may} ({bad_X.sum()} such tokens)"


@check(
    "a token that the trainer does not reproduce",
    kind="trace",
    meaning="with the same weights, the trainer gives a sampled token another probability than the engine did: "
    "other weights are served, or they are computed in another way",
    key="rollout.data_type=trainer.dtype, float32 for both; SECTION.sampler_correction='tis'",
)
def _reproduced(now: LogRecord, past: Past) -> str:
    step = _trace_of(now)
    if step is None or "trainer_logprob" not in step.tokens:
        return ""
    bound = APART if past.exact else APART_INEXACT
    sampler_X, trainer_X = step.tokens["logprob"].astype(np.float64), step.tokens["trainer_logprob"].astype(np.float64)
    known_X = np.isfinite(trainer_X) & np.isfinite(sampler_X)
    fresh_X = (step.tokens["mask"] > 0) & (step.tokens["version"] == step.step - 1) & known_X
    apart_X = np.where(fresh_X, np.abs(trainer_X - sampler_X), 0.0)
    if not len(apart_X) or apart_X.max() <= bound:
        return ""
    worst = int(np.argmax(apart_X))
    return (
        f"{_token(step, apart_X > bound, worst)}: log p is {trainer_X[worst]:.4g} for the trainer and "
        f"{sampler_X[worst]:.4g} for the sampler, more than {bound:g} apart ({(apart_X > bound).sum()} such tokens)"
    )


@check(
    "an advantage that is not a number",
    kind="trace",
    meaning="a token counts in the loss with an advantage of NaN or infinity",
    key="the reward of the sample (reward.fns), and an estimator of your own",
)
def _advantage(now: LogRecord, past: Past) -> str:
    step = _trace_of(now)
    if step is None or "advantage" not in step.tokens:
        return ""
    bad_X = (step.tokens["trained"] > 0) & ~np.isfinite(step.tokens["advantage"])
    if not bad_X.any():
        return ""
    sample = int(np.searchsorted(step.first, int(np.argmax(bad_X)), side="right")) - 1
    reward = float(step.samples["reward"][sample])
    value = "no number" if math.isnan(reward) else f"{reward:g}"
    return f"{_token(step, bad_X)}: the reward of its sample is {value} ({bad_X.sum()} such tokens)"


def _trace_of(now: LogRecord) -> TracedStep | None:
    step = now.get("trace")
    return step if isinstance(step, TracedStep) and "trained" in step.tokens else None


def _place(step: TracedStep) -> np.ndarray:
    """Returns the place of each token within its sample, from 0."""
    return np.arange(len(step.tokens["mask"])) - np.repeat(step.first, step.samples["length"])


def _token(step: TracedStep, bad_X: np.ndarray, at: int | None = None) -> str:
    """Describes the place of token `at` in the step; None stands for the first token that is bad."""
    at = int(np.argmax(bad_X)) if at is None else at
    sample = int(np.searchsorted(step.first, at, side="right")) - 1
    group, member = step.samples["group"][sample], member_of(step.samples["group"])[sample]
    piece = step.pieces.get(int(step.tokens["tokens"][at]), "")
    return f"prompt {group}, sample {member}, token {at - int(step.first[sample])} ({piece!r})"
