"""Counts the tokens of a batch whose masks, ids, probabilities and versions contradict each other."""

import numpy as np
from jaxtyping import Bool

from podrl.types import STOP_FAILED, Rollouts


def faults(rollouts: Rollouts, *, step: int, max_staleness: int) -> dict[str, float]:
    """Compares the arrays of a batch with each other, and counts tokens with contradictions.

    Of failed samples, only the prompts are checked for faults.

      rollout/faulty_tokens    tokens with any of these faults:
                               the loss uses a token that is in the prompt or padding, begins a piece, has no
                               version, or has a log-probability that is positive or not finite;
                               the loss leaves a sampled token out;
                               a token in a row's prompt differs from the prompt;
                               the token's piece is neither the piece of the token before it nor the next piece;
                               the token's piece begins inside the prompt
      rollout/unknown_version  tokens sampled by weights that the trainer has not made yet
      rollout/stale_tokens     tokens sampled by weights that are more than `max_staleness` steps old

    Args:
      rollouts: samples as the engine made them, before any sample is left out of the loss.
      step: the step that trains on the samples; also the version of the weights before its update.
      max_staleness: largest allowed number of steps between the weights that sampled a token and the weights of the
        step.

    Returns:
      The counts that are not 0, by name; counts of several hosts may be added.
    """
    prompts = rollouts.prompts
    prompt_length_B = prompts.length_P[rollouts.group_B]
    place_T = np.arange(rollouts.tokens_BT.shape[1])
    usable_B1 = (rollouts.stop_B != STOP_FAILED)[:, None]
    sampled_BT = rollouts.version_BT >= 0
    completion_BT = (place_T >= prompt_length_B[:, None]) & (place_T < rollouts.length_B[:, None])
    likely_BT = np.isfinite(rollouts.logprob_BT) & (rollouts.logprob_BT <= 1e-5)
    trained_BT = rollouts.mask_BT > 0
    step_BT = np.diff(rollouts.piece_BT.astype(np.int32), axis=1, prepend=0)
    misnumbered_BT = (place_T < rollouts.length_B[:, None]) & (
        (step_BT < 0) | (step_BT > 1) | ((step_BT != 0) & ~completion_BT)
    )
    predicted_BT = completion_BT & (step_BT == 0)  # the first token of a piece has no context
    wrong_BT = (trained_BT != sampled_BT) | (trained_BT & ~(predicted_BT & likely_BT))
    width = min(prompts.tokens_PT.shape[1], len(place_T))
    prompt_BT = prompts.tokens_PT[rollouts.group_B, :width]
    altered_BT = (rollouts.tokens_BT[:, :width] != prompt_BT) & (place_T[:width] < prompt_length_B[:, None])
    counts = {
        "rollout/faulty_tokens": ((wrong_BT | misnumbered_BT) & usable_B1).sum() + altered_BT.sum(),
        "rollout/unknown_version": (rollouts.version_BT > step).sum(),
        "rollout/stale_tokens": (sampled_BT & (rollouts.version_BT < step - max_staleness)).sum(),
    }
    return {name: float(count) for name, count in counts.items() if count}


def ages(rollouts: Rollouts, *, step: int) -> dict[str, float]:
    """Counts how old a batch's tokens are; counts of several hosts may be added.

    rollout/age              number of steps from the weights that sampled a token to the weights of `step`, summed
                             over tokens
    rollout/mixed_samples    number of samples whose tokens come from several versions of the weights
    """
    sampled_BT = rollouts.version_BT >= 0
    newest_B = rollouts.version_BT.max(axis=1, initial=-1)
    oldest_B = np.where(sampled_BT, rollouts.version_BT, newest_B[:, None]).min(axis=1, initial=2**31 - 1)
    age = int((step - rollouts.version_BT[sampled_BT]).sum())
    return {"rollout/age": float(age), "rollout/mixed_samples": float((newest_B > oldest_B).sum())}


def beyond(rollouts: Rollouts, oldest: int) -> Bool[np.ndarray, " B"]:
    """Marks the samples whose sampled tokens were all drawn by weights older than the version `oldest`.

    Samples without sampled tokens are not marked.
    """
    sampled_BT = rollouts.mask_BT > 0
    fresh_BT = sampled_BT & (rollouts.version_BT >= oldest)
    return np.any(sampled_BT, axis=1) & ~np.any(fresh_BT, axis=1)
