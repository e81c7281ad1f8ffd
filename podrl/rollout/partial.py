"""A batch between two windows, for a checkpoint or another host: the tokens that its samples have drawn so far."""

import base64
import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from podrl.engine.session import Track
from podrl.mappings import PackedTokens, SavedState
from podrl.runtime.message import Message
from podrl.types import TOKENS, Prompts

_ROUTES = ("route_YX", "route_B")  # names of rows that exist only if routes are recorded
_FIELDS = ("sampled", "limit", "stop", "paused", "first", "text", "breaks")  # fields of `Track` that are kept as JSON


@dataclasses.dataclass(frozen=True)
class PartialBatch:
    """Samples of a batch that have not all ended.

    Attributes:
      prompts: all prompts of the batch, as they were read.
      step: the step that trains on the batch.
      quantum: number of tokens that each sample draws in a window, except in its last; 0 with `rollout.clock='wall'`.
      longest: number of tokens of the longest sample in each recent batch; the next quanta follow from these numbers.
      samples: JSON values of each sample, group-major, for the prompts submitted so far. Dynamic sampling may submit
        the other prompts later.
      rows: per-token arrays by name, all samples one after the other. `count_B` has the number of tokens of each
        sample, `asked_P` says whether each prompt was submitted. If routes are recorded, `route_YX` has `Track.routes`
        of all samples, one after the other, and `route_B` has the number of tokens with routes in each sample. The
        routes of ended samples are kept because they are not computed again.
    """

    prompts: Prompts
    step: int
    quantum: int
    longest: Sequence[int]
    samples: Sequence[SavedState]
    rows: Mapping[str, np.ndarray]

    @property
    def data_state(self) -> bytes:
        """The data iterator's state after this batch's prompts, as JSON bytes."""
        return self.prompts.data_state

    def message(self) -> Message:
        """Packs the samples for a checkpoint or another host."""
        prompts = self.prompts
        value = {
            "step": self.step,
            "quantum": self.quantum,
            "longest": list(self.longest),
            "samples": [dict(sample) for sample in self.samples],
            "text": list(prompts.text),
            "fields": {name: list(values) for name, values in prompts.fields.items()},
            "data_state": prompts.data_state.decode(),
        }
        arrays = {"tokens_PT": prompts.tokens_PT, "length_P": prompts.length_P, "index_P": prompts.index_P}
        return Message(value, {**arrays, **self.rows})


def of_message(message: Message) -> PartialBatch:
    """Unpacks a message that `PartialBatch.message` packed."""
    value, arrays = message.value, message.arrays
    prompts = Prompts(
        **{name: np.asarray(arrays[name]) for name in ("tokens_PT", "length_P", "index_P")},
        text=list(value["text"]),
        fields=dict(value["fields"]),
        data_state=value["data_state"].encode(),
    )
    rows = {name: np.asarray(arrays[name]) for name in (*(f"{name}_X" for name in TOKENS), "count_B", "asked_P")}
    rows |= {name: np.asarray(arrays[name]) for name in _ROUTES if name in arrays}
    numbers = (int(value["step"]), int(value["quantum"]), list(value["longest"]))
    return PartialBatch(prompts, *numbers, list(value["samples"]), rows)


def of_tracks(
    prompts: Prompts,
    states: Sequence[tuple[SavedState, Track | None]],
    *,
    prompt_count: int,
    step: int,
    quantum: int,
    longest: Sequence[int] = (),
) -> PartialBatch:
    """Copies the records of samples.

    Args:
      prompts: prompts of the batch.
      states: values and records of the samples, as `Player.state` returns them.
      prompt_count: number of submitted prompts; these are the first prompts of the batch.
      step: the step that trains on the batch.
      quantum: number of tokens that each sample draws in a window, except in its last.
      longest: number of tokens of the longest sample in each recent batch.
    """
    samples, lists, counts = [], {name: [] for name in TOKENS}, []
    for value, track in states:
        drawn = {} if track is None else copy.deepcopy({name: getattr(track, name) for name in _FIELDS})
        samples.append({"track": drawn or None, **value})
        counts.append(0 if track is None else len(track.tokens))
        for name, values in ({} if track is None else _columns(track)).items():
            lists[name].extend(values)
    rows = {f"{name}_X": np.asarray(lists[name], column.dtype) for name, column in TOKENS.items()}
    rows["count_B"], rows["asked_P"] = np.asarray(counts, np.int32), np.arange(len(prompts.length_P)) < prompt_count
    routes = [None if track is None else track.routes for _, track in states]
    if any(r is not None for r in routes):  # a checkpoint cannot hold an empty array
        rows["route_YX"] = np.concatenate([r for r in routes if r is not None])
        rows["route_B"] = np.asarray([0 if r is None else len(r) for r in routes], np.int32)
    return PartialBatch(prompts, step, quantum, longest, samples, rows)


def _columns(track: Track) -> dict[str, list[Any]]:
    """Returns the per-token lists of a sample's record, by the names of `podrl.types.TOKENS`."""
    return {"tokens": track.tokens, "version": track.versions, **track.drawn}


def fill(track: Track, partial: PartialBatch, b: int) -> None:
    """Writes the tokens and the state of sample `b` of a partial batch into a new record."""
    ends = np.cumsum(partial.rows["count_B"])
    start, end = int(ends[b] - partial.rows["count_B"][b]), int(ends[b])
    for name, values in _columns(track).items():
        values[:] = partial.rows[f"{name}_X"][start:end].tolist()
    if "route_B" in partial.rows and (size := int(partial.rows["route_B"][b])):
        end = int(partial.rows["route_B"][: b + 1].sum())
        track.routes = partial.rows["route_YX"][end - size : end].copy()
    for name, value in partial.samples[b]["track"].items():
        setattr(track, name, value)
    if track.finder is not None:
        track.finder.restart(track.first)


def pack_turn(track: Track, places: slice, paused: int | None) -> PackedTokens:
    """Packs a turn of a sample as values for JSON.

    Args:
      track: record of the sample.
      places: indices of the turn's tokens in the record.
      paused: reason why the sample paused after the turn; None for a turn that has not ended.
    """
    columns = {
        name: base64.b64encode(np.asarray(values[places], TOKENS[name].dtype).tobytes()).decode()
        for name, values in _columns(track).items()
    }
    return {"columns": columns, "paused": paused}


def fill_turn(track: Track, packed: PackedTokens) -> int | None:
    """Adds a turn that `pack_turn` packed to the record of a sample; returns the reason of the pause after it."""
    before = len(track.tokens)
    for name, values in _columns(track).items():
        values.extend(np.frombuffer(base64.b64decode(packed["columns"][name]), TOKENS[name].dtype).tolist())
    track.sampled += len(track.tokens) - before
    return packed["paused"]


def pack_routes(routes: UInt8[np.ndarray, "T X"]) -> PackedTokens:
    """Packs the routes of a sample (`Track.routes`) as values for JSON."""
    return {"width": routes.shape[1], "bytes": base64.b64encode(routes.tobytes()).decode()}


def unpack_routes(packed: PackedTokens) -> UInt8[np.ndarray, "T X"]:
    """Unpacks routes that `pack_routes` packed."""
    return np.frombuffer(base64.b64decode(packed["bytes"]), np.uint8).reshape(-1, packed["width"]).copy()


def join(parts: Sequence[PartialBatch]) -> PartialBatch:
    """Joins the parts of a batch, such as the shares of several hosts, in their order."""
    prompts = join_prompts([part.prompts for part in parts])
    rows = {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows if name not in _ROUTES}
    if routed := [part.rows["route_YX"] for part in parts if "route_YX" in part.rows]:
        none = [np.zeros(len(part.samples), np.int32) for part in parts]
        counts = [part.rows.get("route_B", blank) for part, blank in zip(parts, none, strict=True)]
        rows |= {"route_YX": np.concatenate(routed), "route_B": np.concatenate(counts)}
    samples = list(itertools.chain.from_iterable(part.samples for part in parts))
    return dataclasses.replace(parts[0], prompts=prompts, samples=samples, rows=rows)


def join_prompts(of: Sequence[Prompts]) -> Prompts:
    """Joins prompts, one after the other; the result has the data position of `of[0]`.

    A prompt that lacks a field of other prompts has the value None in this field.
    """
    width = max(each.tokens_PT.shape[1] for each in of)
    pad = [np.pad(each.tokens_PT, ((0, 0), (0, width - each.tokens_PT.shape[1]))) for each in of]
    names = dict.fromkeys(name for each in of for name in each.fields)
    blank = [[None] * len(each.length_P) for each in of]
    return dataclasses.replace(
        of[0],
        tokens_PT=np.concatenate(pad),
        length_P=np.concatenate([each.length_P for each in of]),
        index_P=np.concatenate([each.index_P for each in of]),
        text=[text for each in of for text in each.text],
        fields={
            name: [value for each, none in zip(of, blank, strict=True) for value in each.fields.get(name, none)]
            for name in names
        },
    )


def take_prompts(prompts: Prompts, rows_P: Int[np.ndarray, " P"]) -> Prompts:
    """Selects prompts of a batch, in the order of the indices `rows_P`; the data position stays unchanged."""
    return dataclasses.replace(
        prompts,
        tokens_PT=prompts.tokens_PT[rows_P],
        length_P=prompts.length_P[rows_P],
        index_P=prompts.index_P[rows_P],
        text=[prompts.text[int(p)] for p in rows_P],
        fields={name: [values[int(p)] for p in rows_P] for name, values in prompts.fields.items()},
    )


def cut(partial: PartialBatch, prompts: Prompts, first: int) -> PartialBatch:
    """Cuts the part of some consecutive prompts out of a batch.

    Args:
      partial: batch to cut.
      prompts: the prompts to cut out.
      first: index of the first of these prompts in the batch.
    """
    submitted_P = partial.rows["asked_P"]
    group = len(partial.samples) // max(int(submitted_P.sum()), 1)
    places = np.cumsum([0, *submitted_P]) * group
    own = slice(first, first + len(prompts.length_P))
    chosen = slice(int(places[own.start]), int(places[own.stop]))
    ends = np.cumsum([0, *partial.rows["count_B"]])
    tokens = slice(int(ends[chosen.start]), int(ends[chosen.stop]))
    slices = {"asked_P": own, "count_B": chosen, "route_B": chosen}
    if "route_B" in partial.rows:
        known = np.cumsum([0, *partial.rows["route_B"]])
        slices["route_YX"] = slice(int(known[chosen.start]), int(known[chosen.stop]))
    rows = {name: values[slices.get(name, tokens)] for name, values in partial.rows.items()}
    if not len(rows.get("route_YX", ())):
        rows = {name: values for name, values in rows.items() if name not in _ROUTES}
    return dataclasses.replace(partial, prompts=prompts, samples=partial.samples[chosen], rows=rows)
