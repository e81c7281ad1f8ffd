"""Counts tokens of a batch that are not what its masks, ids, probabilities and versions say they are."""

import numpy as np
from jaxtyping import Bool

from podrl.types import STOP_FAILED, Rollouts


def faults(rollouts: Rollouts, *, step: int, max_staleness: int) -> dict[str, float]:
    """Compares the arrays of a batch with each other; counts add over hosts, and those that are 0 are left out.

      rollout/faulty_tokens    mask on a prompt's or a pad's place, on the first token of a piece, or on a token without
                               version or log-probability, or none on a sampled one; prompt tokens of a row that are
                               not the prompt's; pieces whose numbers do not count up from 0, or that divide a prompt
      rollout/unknown_version  sampled by weights that the trainer has not made
      rollout/stale_tokens     sampled by weights more than `max_staleness` updates old

    Args:
      rollouts: samples as the engine gave them, before any leaves the loss.
      step: the step that trains on them: its weights, before its update, have this version.
      max_staleness: updates that samples may be old.
    """
    prompts = rollouts.prompts
    asked_B = prompts.length_P[rollouts.group_B]
    place_T = np.arange(rollouts.tokens_BT.shape[1])
    usable_B1 = (rollouts.stop_B != STOP_FAILED)[:, None]
    sampled_BT = rollouts.version_BT >= 0
    completion_BT = (place_T >= asked_B[:, None]) & (place_T < rollouts.length_B[:, None])
    likely_BT = np.isfinite(rollouts.logprob_BT) & (rollouts.logprob_BT <= 1e-5)
    trained_BT = rollouts.mask_BT > 0
    step_BT = np.diff(rollouts.piece_BT.astype(np.int32), axis=1, prepend=0)
    misnumbered_BT = (place_T < rollouts.length_B[:, None]) & (
        (step_BT < 0) | (step_BT > 1) | ((step_BT != 0) & ~completion_BT)
    )
    predicted_BT = completion_BT & (step_BT == 0)  # the first token of a piece has no context
    wrong_BT = (trained_BT != sampled_BT) | (trained_BT & ~(predicted_BT & likely_BT))
    width = min(prompts.tokens_PT.shape[1], len(place_T))
    given_BT = prompts.tokens_PT[rollouts.group_B, :width]
    altered_BT = (rollouts.tokens_BT[:, :width] != given_BT) & (place_T[:width] < asked_B[:, None])
    counts = {
        "rollout/faulty_tokens": ((wrong_BT | misnumbered_BT) & usable_B1).sum() + altered_BT.sum(),
        "rollout/unknown_version": (rollouts.version_BT > step).sum(),
        "rollout/stale_tokens": (sampled_BT & (rollouts.version_BT < step - max_staleness)).sum(),
    }
    return {name: float(count) for name, count in counts.items() if count}


def ages(rollouts: Rollouts, *, step: int) -> dict[str, float]:
    """Counts by which a report says how old a batch's tokens are; they add over hosts.

    rollout/age              updates by which the weights of step `step` are newer, summed over sampled tokens
    rollout/mixed_samples    samples that several versions of the weights drew
    """
    sampled_BT = rollouts.version_BT >= 0
    newest_B = rollouts.version_BT.max(axis=1, initial=-1)
    oldest_B = np.where(sampled_BT, rollouts.version_BT, newest_B[:, None]).min(axis=1, initial=2**31 - 1)
    age = int((step - rollouts.version_BT[sampled_BT]).sum())
    return {"rollout/age": float(age), "rollout/mixed_samples": float((newest_B > oldest_B).sum())}


def beyond(rollouts: Rollouts, oldest: int) -> Bool[np.ndarray, " B"]:
    """True for samples all of whose sampled tokens were drawn by weights older than a version; False without any."""
    sampled_BT = rollouts.mask_BT > 0
    fresh_BT = sampled_BT & (rollouts.version_BT >= oldest)
    return np.any(sampled_BT, axis=1) & ~np.any(fresh_BT, axis=1)
