"""Writes and reads a run's trace: one columnar file per step, with all tokens of its samples and numbers per token."""

import dataclasses
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from podrl.mappings import EpisodeRecord, TaskColumns
from podrl.storage.storage import Place, locate
from podrl.types import TOKENS, Experience

FOLDER = "trace"
FORMAT = 2  # format 1 had equally many samples of each prompt, and no column `group`
_FILE = re.compile(r"step_(\d{8,})\.npz")
_HEADER = "header"
_LARGEST = 1 << 31  # largest number of bytes that a file may unpack to, against files that would fill the memory

# Columns over tokens that every trace has, with their types; the algorithm adds more.
_OF_ROLLOUTS: Mapping[str, type[np.generic]] = {
    **{name: column.dtype for name, column in TOKENS.items()},
    "piece": np.int16,
    "mask": np.uint8,
    "turn_reward": np.float32,
}
# Columns that the trainer computes for the trace: each token's log-probability and the entropy of its distribution, in
# nats.
SCORES = ("trainer_logprob", "entropy")
# Columns that `TraceExtras` has with log.trace='updates': each token's weight in the step's updates, and 1 if the token
# is clipped.
WEIGHTS = ("weight", "clipped")
_OF_SAMPLES: Mapping[str, type[np.generic]] = {
    "group": np.int32,
    "length": np.int32,
    "prompt_length": np.int32,
    "stop": np.int8,
    "reward": np.float64,
}


def file_name(step: int) -> str:
    """Returns the name of a step's file in the folder `trace` of a run directory."""
    return f"step_{step:08d}.npz"


def traced_steps(workdir: Place) -> list[int]:
    """Lists the steps whose trace a run directory holds, ascending."""
    folder = workdir / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _FILE.fullmatch(path.name)))


@dataclasses.dataclass(frozen=True)
class TraceExtras:
    """The contents of a step's trace besides the step's samples.

    Attributes:
      reward_names: names of the reward functions.
      columns: further numbers of every token, in the sample layout, by name: advantage, trained (1 if the token counts
        in the loss, else 0), return under PPO, and WEIGHTS if the updates are traced.
      scores: function that fetches the columns SCORES of the first B' samples, each (B', T), as the trainer gives them
        before the step's first update; None if they are not computed.
    """

    reward_names: Sequence[str]
    columns: Mapping[str, Float[np.ndarray, "B T"]]
    scores: Callable[[], Mapping[str, Float[np.ndarray, "B T"]]] | None = None


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The samples of one step, as the step's file holds them.

    Attributes:
      step: number of the step, as in metrics.jsonl.
      reward_names: names of the reward functions.
      prompts: text of each prompt.
      fields: further fields of each prompt's record, by name.
      completions, episodes: completion and episode of each sample, as in podrl.types.Rollouts.
      pieces: text of every token id that occurs.
      samples: arrays over samples, by name: group (index of the sample's prompt in `prompts`), length and prompt_length
        (tokens), stop, reward, and rewards of shape (reward functions, samples).
      tokens: arrays over all tokens X, sample after sample without padding, by name: tokens, piece (number of the
        token's context within its sample; not in traces of older runs), mask, logprob, raw_logprob, kept, version,
        turn_reward, advantage, trained, trainer_logprob and entropy (nats; NaN if not computed), ...
    """

    step: int
    reward_names: Sequence[str]
    prompts: Sequence[str]
    fields: TaskColumns
    completions: Sequence[str]
    episodes: Sequence[EpisodeRecord]
    pieces: Mapping[int, str]
    samples: Mapping[str, Shaped[np.ndarray, " B"]]
    tokens: Mapping[str, Shaped[np.ndarray, " X"]]

    @property
    def first(self) -> Int[np.ndarray, " B"]:
        """Returns the index of each sample's first token in the arrays of `tokens`."""
        return np.cumsum(self.samples["length"]) - self.samples["length"]


def content(step: int, experience: Experience, extras: TraceExtras, piece: Callable[[int], str]) -> bytes:
    """Packs the samples of a step into the bytes of its file.

    Args:
      step: number of the step.
      experience: samples of the step with their rewards.
      extras: contents besides the samples.
      piece: function that returns the text of a token id.
    """
    rollouts = experience.rollouts
    keep_BT = np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[:, None]
    columns = {
        f"token.{name}": getattr(rollouts, f"{name}_BT")[keep_BT].astype(kind) for name, kind in _OF_ROLLOUTS.items()
    }
    columns |= {f"token.{name}": np.asarray(x_BT, np.float32)[keep_BT] for name, x_BT in extras.columns.items()}
    scores = {} if extras.scores is None else extras.scores()
    for name in SCORES:
        score_BT = np.full(keep_BT.shape, np.nan, np.float32)
        if name in scores:
            score_BT[: len(scores[name]), : scores[name].shape[1]] = scores[name]
        columns[f"token.{name}"] = np.where(rollouts.mask_BT > 0, score_BT, np.nan)[keep_BT].astype(np.float32)
    prompt_length_B = rollouts.prompts.length_P[rollouts.group_B]
    values = (rollouts.group_B, rollouts.length_B, prompt_length_B, rollouts.stop_B, experience.reward_B)
    samples = {
        f"sample.{name}": np.asarray(x_B).astype(kind)
        for (name, kind), x_B in zip(_OF_SAMPLES.items(), values, strict=True)
    }
    header = {
        "format": FORMAT,
        "step": step,
        "reward_names": list(extras.reward_names),
        "prompts": list(rollouts.prompts.text),
        "fields": {name: list(values) for name, values in rollouts.prompts.fields.items()},
        "completions": list(rollouts.completions),
        "episodes": [dict(episode) for episode in rollouts.episodes],
        "pieces": {int(i): piece(int(i)) for i in np.unique(columns["token.tokens"])},
    }
    text = json.dumps(header, default=str).encode()
    arrays: dict[str, Any] = {_HEADER: np.frombuffer(text, np.uint8), **samples, **columns}
    arrays["sample.rewards"] = np.asarray(experience.reward_FB, np.float64)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


_DAMAGED = (OSError, KeyError, ValueError, TypeError, RecursionError, EOFError, zipfile.BadZipFile, zlib.error)


def read_step(workdir: Place | str, step: int) -> TracedStep:
    """Reads the trace of a step; nothing in the file is executed.

    Raises:
      ValueError: the run directory has no trace of the step, or the trace is damaged.
    """
    workdir = locate(workdir) if isinstance(workdir, str) else workdir
    path = workdir / FOLDER / file_name(step)
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        steps = traced_steps(workdir)
        reason = (
            f"it holds only some steps (log.trace), from {steps[0]} to {steps[-1]}"
            if steps
            else "the run has no trace (log.trace)"
        )
        raise ValueError(f"{path} does not exist: {reason}.") from None
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error


def _parse(packed: bytes) -> TracedStep:
    with zipfile.ZipFile(io.BytesIO(packed)) as names:
        if sum(member.file_size for member in names.infolist()) > _LARGEST:
            raise ValueError(f"it unpacks to more than {_LARGEST} bytes")
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop(_HEADER).tobytes().decode())
    if header["format"] not in (1, FORMAT):
        raise ValueError(f"its format is {header['format']}, not 1 or {FORMAT}")
    parts = {part: {n.removeprefix(part): x for n, x in arrays.items() if n.startswith(part)} for part in _PARTS}
    samples, tokens = parts.values()
    length_B = samples["length"]
    if (length_B < 0).any() or any(x.shape != (length_B.sum(),) for x in tokens.values()):
        raise ValueError("its columns do not belong together")
    if header["format"] == 1:
        samples["group"] = np.arange(len(length_B)) // max(int(header["group_size"]), 1)
    if not np.isin(samples["group"], np.arange(len(header["prompts"]))).all():
        raise ValueError("some samples name a prompt that it does not hold")
    if any(x.shape[-1:] != length_B.shape for x in samples.values()) or len(header["completions"]) != len(length_B):
        raise ValueError("its columns do not belong together")
    return TracedStep(
        step=int(header["step"]),
        reward_names=header["reward_names"],
        prompts=header["prompts"],
        fields=header["fields"],
        completions=header["completions"],
        episodes=header["episodes"],
        pieces={int(i): str(text) for i, text in header["pieces"].items()},
        samples=samples,
        tokens=tokens,
    )


_PARTS = ("sample.", "token.")
