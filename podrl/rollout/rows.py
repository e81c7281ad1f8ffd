"""Finished samples as rows of a batch: prompt and completion side by side, with the rewards of environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from podrl.engine.session import Track
from podrl.groups import complete
from podrl.rollout.episodes import Episode, RolloutRequest
from podrl.types import NO_EPISODE, STOP_LENGTH, Prompts, Rollouts, blank_columns

_PROMPTS_KEPT = 1 << 16


class SampleLengths:
    """Remembers the lengths of evaluation samples, so that the next evaluation can start with its longest samples.

    An evaluation samples the same prompts under the same random keys as the previous evaluation, with newer weights.
    """

    def __init__(self):
        """Makes an empty memory."""
        # Lengths of a prompt's samples, by the samples' random keys and the prompt's tokens.
        self._of_prompt: dict[bytes, list[int]] = {}

    def remember(self, request: RolloutRequest, rollouts: Rollouts) -> Rollouts:
        """Returns the samples of a request unchanged, and remembers their lengths if they belong to an evaluation."""
        if request.mode == "eval":
            length_PG = (
                rollouts.length_B.reshape(-1, request.group_size) - np.asarray(request.prompts.length_P)[:, None]
            )
            for p, lengths in enumerate(length_PG.tolist()):
                self._of_prompt[_name(request.prompts, p, request.keys_PG2)] = lengths
            while len(self._of_prompt) > _PROMPTS_KEPT:
                del self._of_prompt[next(iter(self._of_prompt))]
        return rollouts

    def expected(self, prompts: Prompts, keys_PG2: np.ndarray) -> dict[int, float]:
        """Returns the newest known length of each sample, in tokens, by row; samples never drawn before are missing."""
        known = [(p, self._of_prompt.get(_name(prompts, p, keys_PG2), ())) for p in range(len(keys_PG2))]
        return {p * keys_PG2.shape[1] + g: length for p, lengths in known for g, length in enumerate(lengths)}


def _name(prompts: Prompts, p: int, keys_PG2: np.ndarray) -> bytes:
    return keys_PG2[p].tobytes() + prompts.tokens_PT[p, : prompts.length_P[p]].tobytes()


def collect(
    request: RolloutRequest,
    samples: Mapping[int, Track | Episode],
    *,
    has_environments: bool,
    longest: int,
    pad_id: int,
    seconds: float,
) -> Rollouts:
    """Makes one batch of B = P * G finished samples.

    Args:
      request: the request.
      samples: samples by row; samples without any tokens may be missing.
      has_environments: True if the samples have environments, so that `samples` are episodes.
      longest: largest number of tokens of a completion; a row's length is this plus the width of the prompts.
      pad_id: id that fills the rows.
      seconds: duration of the generation.
    """
    prompts, group_size = request.prompts, request.group_size
    episodes: Any = samples if has_environments else {}
    tracks: Any = {b: episode.track for b, episode in episodes.items()} if has_environments else samples
    P, width = prompts.tokens_PT.shape
    B, T = P * group_size, width + longest
    columns = blank_columns((B, T), pad_id=pad_id)
    route_BTX = np.zeros((B, T, request.route_bytes), np.uint8) if request.route_bytes else None
    mask_BT, turn_reward_BT = np.zeros((B, T), np.float32), np.zeros((B, T), np.float32)
    group_B = complete(P, group_size)
    length_B = np.asarray(prompts.length_P, np.int32)[group_B]
    stop_B = np.full(B, STOP_LENGTH, np.int32)
    completions = [""] * B
    for b in range(B):
        track = tracks.get(b)
        n = length_B[b]
        columns["tokens_BT"][b, :n] = prompts.tokens_PT[group_B[b], :n]
        if track is None:
            continue
        assert track.stop is not None, track.handle
        end = n + len(track.tokens)
        columns["tokens_BT"][b, n:end], columns["version_BT"][b, n:end] = track.tokens, track.versions
        for name, values in track.drawn.items():
            columns[f"{name}_BT"][b, n:end] = values
        if route_BTX is not None and track.routes is not None:
            route_BTX[b, : len(track.routes)] = track.routes
        mask_BT[b, n:end] = np.asarray(track.versions) >= 0
        length_B[b], stop_B[b], completions[b] = end, track.stop, track.text
    records = [NO_EPISODE] * B
    for b, episode in episodes.items():
        assert episode.stop is not None, b
        records[b], completions[b], stop_B[b] = episode.record(), episode.text, episode.stop
        first = prompts.length_P[group_B[b]]
        columns["piece_BT"][b, first : first + len(episode.piece)] = episode.piece
        for place, reward in episode.rewards:
            turn_reward_BT[b, first + place] += reward
    return Rollouts(
        prompts=prompts,
        group_B=group_B,
        length_B=length_B,
        mask_BT=mask_BT,
        turn_reward_BT=turn_reward_BT,
        stop_B=stop_B,
        completions=completions,
        episodes=records,
        seconds=seconds,
        route_BTX=route_BTX,
        **columns,
    )
