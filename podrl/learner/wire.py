"""A batch of experience on its way from the rollout hosts to the trainer hosts, in the three parts they ask for.

The header is small and goes to every trainer host: lengths, masks, rewards. Rows (tokens and log-probabilities) go only
to the host whose devices will train on them. Texts go only to the host that writes metrics, and to checkpoints.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from podrl.runtime.message import Message
from podrl.types import Experience, Prompts, Rollouts

_ROWS = ("tokens_BT", "logprob_BT", "raw_logprob_BT", "version_BT")
ALL_ROWS = _ROWS
NEEDED_ROWS = _ROWS[:2]  # what training reads
_FILL = {"tokens_BT": 0, "logprob_BT": 0.0, "raw_logprob_BT": 0.0, "version_BT": -1}
_DTYPE = {"tokens_BT": np.int32, "logprob_BT": np.float32, "raw_logprob_BT": np.float32, "version_BT": np.int32}


def header(experience: Experience) -> Message:
    """What every trainer host needs to know of a rollout host's share of a batch."""
    rollouts = experience.rollouts
    value = {
        "width": rollouts.tokens_BT.shape[1],
        "rollout_s": rollouts.seconds,
        "reward_s": experience.seconds,
        "data_state": rollouts.prompts.data_state.decode(),
        "counts": dict(experience.counts),
    }
    arrays = {
        "length_B": rollouts.length_B,
        "stop_B": rollouts.stop_B,
        "mask_bits": np.packbits(rollouts.mask_BT != 0, axis=1),
        "reward_FB": experience.reward_FB,
        "reward_B": experience.reward_B,
        "greedy_reward_B": experience.greedy_reward_B,
        "length_P": rollouts.prompts.length_P,
        "index_P": rollouts.prompts.index_P,
    }
    return Message(value, arrays)


def texts(experience: Experience) -> Message:
    """Prompts, their fields and the completions."""
    prompts = experience.rollouts.prompts
    value = {
        "text": list(prompts.text),
        "fields": {name: list(values) for name, values in prompts.fields.items()},
        "completions": list(experience.rollouts.completions),
    }
    return Message(value, {"tokens_PT": prompts.tokens_PT})


def rows(experience: Experience, chosen: Int[np.ndarray, " n"], names: Sequence[str]) -> Message:
    """Per-token values of some samples, one after the other without padding."""
    keep_nT = _real(experience.rollouts.length_B[chosen], experience.rollouts.tokens_BT.shape[1])
    return Message(None, {name: getattr(experience.rollouts, name)[chosen][keep_nT] for name in names})


def assemble(headers: Sequence[Message], pad_id: int) -> Experience:
    """The whole batch out of every rollout host's header, in their order; rows and texts are still empty."""

    def joined(name: str, axis: int = 0) -> np.ndarray:
        return np.concatenate([h.arrays[name] for h in headers], axis)

    width = max(h.value["width"] for h in headers)
    length_B, length_P = joined("length_B"), joined("length_P")
    B = len(length_B)
    masks = [_unpacked(h, width) for h in headers]
    prompts = Prompts(
        tokens_PT=np.full((len(length_P), length_P.max(initial=1)), pad_id, np.int32),
        length_P=length_P,
        index_P=joined("index_P"),
        text=[""] * len(length_P),
        fields={},
        data_state=headers[0].value["data_state"].encode(),
    )
    blank = {name: np.full((B, width), _FILL[name], _DTYPE[name]) for name in _ROWS}
    blank["tokens_BT"][:] = pad_id
    rollouts = Rollouts(
        prompts=prompts,
        length_B=length_B,
        mask_BT=np.concatenate(masks),
        stop_B=joined("stop_B"),
        completions=[""] * B,
        seconds=max(h.value["rollout_s"] for h in headers),
        **blank,
    )
    reward_s = max(h.value["reward_s"] for h in headers)
    counts = {name: math.fsum(h.value["counts"][name] for h in headers) for name in headers[0].value["counts"]}
    rewards = (joined("reward_FB", 1), joined("reward_B"), joined("greedy_reward_B"))
    return Experience(rollouts, *rewards, reward_s, counts)


def fill_rows(experience: Experience, chosen: Int[np.ndarray, " n"], message: Message) -> None:
    """Writes what `rows` sent into the batch, in place."""
    rollouts = experience.rollouts
    keep_nT = _real(rollouts.length_B[chosen], rollouts.tokens_BT.shape[1])
    row_X, column_X = np.nonzero(keep_nT)
    for name, values_X in message.arrays.items():
        getattr(rollouts, name)[chosen[row_X], column_X] = values_X


def with_texts(experience: Experience, messages: Sequence[Message]) -> Experience:
    """The batch with every rollout host's texts, in their order."""

    def joined(name: str) -> list[Any]:
        return [item for message in messages for item in message.value[name]]

    fields = {name: [v for m in messages for v in m.value["fields"][name]] for name in messages[0].value["fields"]}
    prompts = dataclasses.replace(
        experience.rollouts.prompts,
        tokens_PT=np.concatenate([m.arrays["tokens_PT"] for m in messages]),
        text=joined("text"),
        fields=fields,
    )
    rollouts = dataclasses.replace(experience.rollouts, prompts=prompts, completions=joined("completions"))
    return dataclasses.replace(experience, rollouts=rollouts)


def _real(length_n: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width) < length_n[:, None]


def _unpacked(message: Message, width: int) -> np.ndarray:
    mask_BT = np.unpackbits(message.arrays["mask_bits"], axis=1, count=message.value["width"]).astype(np.float32)
    return np.pad(mask_BT, ((0, 0), (0, width - mask_BT.shape[1])))
