"""Cuts and joins batches of experience, and turns them into messages for other hosts and for checkpoints.

A batch travels in three parts. The header is small and goes to every trainer host: lengths, masks, rewards. Rows
(tokens and log-probabilities) go only to the hosts that need them to train. Texts go only to the host that writes
metrics. A checkpoint holds all three.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from podrl import groups
from podrl.data.hint import TEACHER_PROMPT
from podrl.mappings import SavedState, TaskColumns
from podrl.rewards.compose import RewardServiceError
from podrl.rollout.partial import PartialBatch, of_message, take_prompts
from podrl.runtime.message import Message
from podrl.runtime.service import ServiceError
from podrl.types import NO_EPISODE, SOURCE, TOKENS, BatchError, Experience, LeftOut, Prompts, Rollouts, blank_columns

ROUTES = "route_BTX"  # the experts that computed each token; exists only if they are recorded
ALL_ROWS = (*(f"{name}_BT" for name in TOKENS), ROUTES)
NEEDED_ROWS = ("tokens_BT", "logprob_BT", ROUTES)  # per-token arrays that training reads
TRAINED_FIELDS = (SOURCE, TEACHER_PROMPT)  # fields of prompts that training reads
AGED_ROWS = (*NEEDED_ROWS, "version_BT")  # per-token arrays that training reads if the age of tokens matters


def share_of(batches: Sequence[Prompts], index: int, count: int) -> list[Prompts]:
    """Divides the prompts of `batches`, in order, into `count` nearly equal shares; returns share `index`, from 0.

    A batch without prompts in the share is left out. If there are more shares than prompts, some shares have no batch.
    """
    first, end = np.linspace(0, sum(len(prompts.length_P) for prompts in batches), count + 1).astype(int)[index:][:2]
    share, at = list[Prompts](), 0
    for prompts in batches:
        size = len(prompts.length_P)
        rows = np.arange(max(first - at, 0), min(end - at, size))
        share += [take_prompts(prompts, rows)] if len(rows) else []
        at += size
    return share


def select(rollouts: Rollouts, groups_P: Int[np.ndarray, " P"]) -> Rollouts:
    """Selects the samples of some prompts, in the order of `groups_P`, and numbers their groups anew from 0."""
    chosen = _rows_of(rollouts, groups.rows_of(rollouts.group_B, groups_P))
    sizes = [np.count_nonzero(rollouts.group_B == p) for p in groups_P]
    chosen["group_B"] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return dataclasses.replace(rollouts, prompts=take_prompts(rollouts.prompts, groups_P), **chosen)


def places(rollouts: Rollouts, chosen: slice) -> Rollouts:
    """Selects some members of every group; `chosen` is a slice of the members' numbers in the group, from 0."""
    member_B = groups.member_of(rollouts.group_B)
    wanted = np.arange(member_B.max(initial=-1) + 1)[chosen]
    return dataclasses.replace(rollouts, **_rows_of(rollouts, np.flatnonzero(np.isin(member_B, wanted))))


def _rows_of(rollouts: Rollouts, rows_B: Int[np.ndarray, " B"]) -> dict[str, Any]:
    arrays = {
        field.name: getattr(rollouts, field.name)[rows_B]
        for field in dataclasses.fields(rollouts)
        if isinstance(getattr(rollouts, field.name), np.ndarray)
    }
    texts = {name: [getattr(rollouts, name)[int(b)] for b in rows_B] for name in ("completions", "episodes")}
    return arrays | texts


def join(parts: Sequence[Rollouts], prompts: Prompts) -> Rollouts:
    """Joins the samples of consecutive prompts of one batch.

    Args:
      parts: samples of consecutive prompts, in the order of the batch; all rows have one width.
      prompts: prompts of the batch; the parts may cover only the first of them.
    """
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(parts[0])
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    arrays["group_B"] = joined_groups([part.group_B for part in parts], [len(part.prompts.length_P) for part in parts])
    count = sum(len(part.prompts.length_P) for part in parts)
    return dataclasses.replace(
        parts[0],
        prompts=take_prompts(prompts, np.arange(count)),
        completions=[text for part in parts for text in part.completions],
        episodes=[episode for part in parts for episode in part.episodes],
        seconds=sum(part.seconds for part in parts),
        **arrays,
    )


def joined_groups(parts: Sequence[Int[np.ndarray, " B"]], prompts: Sequence[int]) -> Int[np.ndarray, " B"]:
    """Joins the group numbers of several parts, for a batch that joins the parts' prompts in the same order.

    Args:
      parts: for each part, the number of each sample's group in the part.
      prompts: number of prompts of each part.
    """
    firsts = np.cumsum([0, *prompts[:-1]])
    return np.concatenate([part + first for part, first in zip(parts, firsts, strict=True)]).astype(np.int32)


def header(experience: Experience) -> Message:
    """Packs the header of a rollout host's share of a batch: lengths, pieces, masks and rewards, for all trainers."""
    rollouts = experience.rollouts
    value = {
        "width": rollouts.tokens_BT.shape[1],
        "rollout_s": rollouts.seconds,
        "reward_s": experience.seconds,
        "data_state": rollouts.prompts.data_state.decode(),
        "counts": dict(experience.counts),
        "fields": {name: list(x) for name, x in rollouts.prompts.fields.items() if name in TRAINED_FIELDS},
        "pieces": np.argwhere(np.diff(rollouts.piece_BT, axis=1, prepend=0) > 0).tolist(),
        "turn_rewards": [
            [*at, float(rollouts.turn_reward_BT[*at])] for at in np.argwhere(rollouts.turn_reward_BT).tolist()
        ],
    }
    if rollouts.route_BTX is not None:
        value["route_bytes"] = rollouts.route_BTX.shape[2]
    arrays = {
        "group_B": rollouts.group_B,
        "length_B": rollouts.length_B,
        "stop_B": rollouts.stop_B,
        "mask_bits": np.packbits(rollouts.mask_BT != 0, axis=1),
        "reward_FB": experience.reward_FB,
        "reward_B": experience.reward_B,
        "greedy_reward_B": experience.greedy_reward_B,
        "lost_B": experience.lost_B,
        "length_P": rollouts.prompts.length_P,
        "index_P": rollouts.prompts.index_P,
    }
    return Message(value, arrays)


def texts(experience: Experience) -> Message:
    """Packs prompts, their fields, completions, and the samples' episodes with their environments."""
    prompts = experience.rollouts.prompts
    value = {
        "text": list(prompts.text),
        "fields": {name: list(values) for name, values in prompts.fields.items()},
        "completions": list(experience.rollouts.completions),
        "episodes": [dict(episode) for episode in experience.rollouts.episodes],
    }
    return Message(value, {"tokens_PT": prompts.tokens_PT})


def whole(experience: Experience) -> Message:
    """Packs the header and the texts in one message, for readers of the header and for readers of the texts."""
    one, other = header(experience), texts(experience)
    return Message({**one.value, **other.value}, {**one.arrays, **other.arrays})


def rows(experience: Experience, chosen: Int[np.ndarray, " n"], names: Sequence[str]) -> Message:
    """Packs per-token values of some samples, one sample after the other without padding.

    Args:
      experience: the batch.
      chosen: numbers of the samples.
      names: fields of Rollouts to pack; a field that is None is left out.
    """
    keep_nT = _real(experience.rollouts.length_B[chosen], experience.rollouts.tokens_BT.shape[1])
    values = {name: getattr(experience.rollouts, name) for name in names}
    return Message(None, {name: x_BT[chosen][keep_nT] for name, x_BT in values.items() if x_BT is not None})


def assemble(headers: Sequence[Message], pad_id: int, names: Sequence[str] = ALL_ROWS) -> Experience:
    """Builds a whole batch from the headers of its shares; rows and texts are still empty.

    Args:
      headers: headers of the shares, in the order of the batch.
      pad_id: token id that pads the samples' rows.
      names: names of the per-token arrays that `fill_rows` will write; other arrays are blank views, which take no
        memory.
    """

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
        fields=_fields(headers),
        data_state=headers[0].value["data_state"].encode(),
    )
    rollouts = Rollouts(
        prompts=prompts,
        group_B=joined_groups([_group(h) for h in headers], [len(h.arrays["length_P"]) for h in headers]),
        length_B=length_B,
        mask_BT=np.concatenate(masks),
        turn_reward_BT=_turn_rewards(headers, B, width),
        stop_B=joined("stop_B"),
        completions=[""] * B,
        episodes=[NO_EPISODE] * B,
        seconds=max(h.value["rollout_s"] for h in headers),
        route_BTX=_blank_routes(headers, B, width) if ROUTES in names else None,
        **blank_columns((B, width), pad_id=pad_id, written=names),
    )
    _write_pieces(rollouts, headers)
    reward_s = max(h.value["reward_s"] for h in headers)
    named = dict.fromkeys(name for h in headers for name in h.value["counts"])
    every = {name: [h.value["counts"].get(name, 0.0) for h in headers] for name in named}
    slowest = ("time/", "perf/")  # hosts work at the same time: the largest time counts; other counts add up
    counts = {name: (max if name.startswith(slowest) else math.fsum)(values) for name, values in every.items()}
    rewards = (joined("reward_FB", 1), joined("reward_B"), joined("greedy_reward_B"))
    lost_B = np.concatenate([_lost(h, mask_BT) for h, mask_BT in zip(headers, masks, strict=True)])
    return Experience(rollouts, *rewards, reward_s, counts, lost_B)


def fill_rows(experience: Experience, chosen: Int[np.ndarray, " n"], message: Message) -> None:
    """Writes received per-token rows into the batch, in place.

    Args:
      experience: the batch that `assemble` made with these per-token arrays.
      chosen: numbers of the samples in the batch, in the order of the message.
      message: message that `rows` made.
    """
    rollouts = experience.rollouts
    keep_nT = _real(rollouts.length_B[chosen], rollouts.tokens_BT.shape[1])
    row_X, column_X = np.nonzero(keep_nT)
    for name, values_X in message.arrays.items():
        getattr(rollouts, name)[chosen[row_X], column_X] = values_X


def fill_prompts(experience: Experience, rows: Int[np.ndarray, " n"]) -> None:
    """Copies prompt tokens from samples whose rows were received to the other samples of their groups, in place.

    Packing checks that samples which share a prompt have the same prompt tokens. Some of these samples train on other
    hosts, so their rows are not sent to this host.

    Args:
      experience: the batch.
      rows: numbers of the samples whose rows were received.
    """
    tokens_BT, length_P = experience.rollouts.tokens_BT, experience.rollouts.prompts.length_P
    group_B, held_B = experience.rollouts.group_B, np.isin(np.arange(len(tokens_BT)), rows)
    first_P, of_held = np.unique(group_B[held_B], return_index=True)
    source_P = dict(zip(first_P.tolist(), np.flatnonzero(held_B)[of_held].tolist(), strict=True))
    for b in np.flatnonzero(~held_B & groups.any_of(held_B, group_B)):
        prompt = int(group_B[b])
        tokens_BT[b, : length_P[prompt]] = tokens_BT[source_P[prompt], : length_P[prompt]]


def with_texts(experience: Experience, messages: Sequence[Message]) -> Experience:
    """Adds the texts of every share to the batch; `messages` are in the order of the batch."""

    def joined(name: str) -> list[Any]:
        return [item for message in messages for item in message.value[name]]

    names = dict.fromkeys(name for m in messages for name in m.value["fields"])
    blank = [[None] * len(m.value["text"]) for m in messages]
    parts = list(zip((m.value["fields"] for m in messages), blank, strict=True))
    fields = {name: [v for part, none in parts for v in part.get(name, none)] for name in names}
    prompts = dataclasses.replace(
        experience.rollouts.prompts,
        tokens_PT=np.concatenate([m.arrays["tokens_PT"] for m in messages]),
        text=joined("text"),
        fields=fields,
    )
    texts = {name: joined(name) for name in ("completions", "episodes")}
    rollouts = dataclasses.replace(experience.rollouts, prompts=prompts, **texts)
    return dataclasses.replace(experience, rollouts=rollouts)


def dump(batches: Sequence[Experience | PartialBatch]) -> tuple[list[SavedState], dict[str, np.ndarray]]:
    """Turns batches into checkpoint content.

    Returns:
      The JSON value of each batch, and all arrays, keyed by 'BATCH.PART.NAME'.
    """
    host, arrays = [], {}
    for i, batch in enumerate(batches):
        parts = {"partial": batch.message()} if isinstance(batch, PartialBatch) else _parts(batch)
        host.append({part: plain(message.value) for part, message in parts.items()})
        arrays |= {f"{i}.{part}.{name}": x for part, message in parts.items() for name, x in message.arrays.items()}
    return host, arrays


def _parts(experience: Experience) -> dict[str, Message]:
    every = np.arange(len(experience.rollouts.length_B))
    return {"header": header(experience), "texts": texts(experience), "rows": rows(experience, every, ALL_ROWS)}


def load(host: Sequence[SavedState], arrays: Mapping[str, np.ndarray], pad_id: int) -> list[Any]:
    """Restores the batches that `dump` stored; `pad_id` is the token id that pads the samples' rows."""

    def part(i: int, name: str) -> Message:
        prefix = f"{i}.{name}."
        mine = {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
        return Message(host[i][name], mine)

    experiences: list[Any] = []
    for i in range(len(host)):
        if "partial" in host[i]:
            experiences.append(of_message(part(i, "partial")))
            continue
        experience = assemble([part(i, "header")], pad_id)
        fill_rows(experience, np.arange(len(experience.rollouts.length_B)), part(i, "rows"))
        experiences.append(with_texts(experience, [part(i, "texts")]))
    return experiences


def content(
    host: SavedState, arrays: Mapping[str, np.ndarray], *, pad_id: int
) -> tuple[bytes, dict[str, np.ndarray], list[Any]]:
    """Splits a checkpoint's content into (data stream's state, controllers' state, batches in flight).

    Raises:
      KeyError, TypeError, AttributeError, ValueError: `host` does not have the form in which a recorder saves it.
    """
    return host["data_state"].encode(), dict(host["controllers"]), load(host["pending"], arrays, pad_id)


def failure(error: BatchError) -> Message:
    """Packs, for the trainer hosts, the reason why there is no batch or no evaluation."""
    return Message({"error": str(error), "away": isinstance(error, ServiceError)})


def raise_failure(messages: Sequence[Message]) -> None:
    """Raises the first error that a rollout host sent in place of its share.

    Raises:
      RewardServiceError: a service that a reward function calls could not be reached.
      BatchError: the share could not be made for another reason.
    """
    for message in messages:
        if "error" in message.value:
            error = RewardServiceError if message.value["away"] else BatchError
            raise error(message.value["error"])


def _real(length_n: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width) < length_n[:, None]


def _unpacked(message: Message, width: int) -> np.ndarray:
    mask_BT = np.unpackbits(message.arrays["mask_bits"], axis=1, count=message.value["width"]).astype(np.float32)
    return np.pad(mask_BT, ((0, 0), (0, width - mask_BT.shape[1])))


def _group(message: Message) -> np.ndarray:
    """Returns the number of each sample's group. Old checkpoints do not store it; their groups have equal sizes."""
    prompts, samples = len(message.arrays["length_P"]), len(message.arrays["length_B"])
    return message.arrays.get("group_B", groups.complete(prompts, samples // max(prompts, 1)))


def _fields(headers: Sequence[Message]) -> TaskColumns:
    """Joins the fields of prompts that training reads; prompts that lack a field of other prompts get None."""
    fields_of_headers = [(h.value.get("fields", {}), [None] * len(h.arrays["length_P"])) for h in headers]
    names = dict.fromkeys(name for fields, _ in fields_of_headers for name in fields)
    return {name: [value for fields, none in fields_of_headers for value in fields.get(name, none)] for name in names}


def _lost(message: Message, mask_BT: np.ndarray) -> np.ndarray:
    """Returns each sample's LeftOut code; in an old checkpoint without codes, GROUP if the sample's mask is empty."""
    silent_B = np.where(mask_BT.any(axis=1), LeftOut.NOT, LeftOut.GROUP).astype(np.int32)
    return message.arrays.get("lost_B", silent_B)


def _write_pieces(rollouts: Rollouts, messages: Sequence[Message]) -> None:
    """Numbers every sample's pieces by the tokens at which pieces begin; an old checkpoint has one piece per sample."""
    first = 0
    for message in messages:
        for b, t in message.value.get("pieces", ()):
            rollouts.piece_BT[first + b, t : rollouts.length_B[first + b]] += 1
        first += len(message.arrays["length_B"])


def _turn_rewards(headers: Sequence[Message], rows: int, width: int) -> np.ndarray:
    reward_BT, first = np.zeros((rows, width), np.float32), 0
    for message in headers:
        for b, t, reward in message.value["turn_rewards"]:
            reward_BT[first + b, t] = reward
        first += len(message.arrays["length_B"])
    return reward_BT


def _blank_routes(headers: Sequence[Message], rows: int, width: int) -> np.ndarray | None:
    """Makes an array of zeros for the routes; None if no part has routes, as in old checkpoints."""
    size = max(h.value.get("route_bytes", 0) for h in headers)
    return np.zeros((rows, width, size), np.uint8) if size else None


def plain(value: object) -> object:
    """Converts numpy numbers to Python's, so that the value can be written as JSON."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value
