"""Simulates trainer and rollout step by step, with given lengths of samples: who waits for whom, and for how long."""

import dataclasses
import heapq
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from podrl.plan.compile import Measured
from podrl.plan.programs import ROLLOUT, TRAINER, Setting
from podrl.rollout.config import RolloutConfig
from podrl.rollout.sizes import engine_shape
from podrl.rollout.windows import Quantum
from podrl.rundir.trace import read_step, traced_steps

_SHARES = tuple(n / 16 for n in range(1, 16))  # of the chips, tried for the trainer
STEPS, WARM = 40, 8  # training steps, and the first that do not count


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Seconds of the parts of a step, measured or predicted.

    Attributes:
      decode_s: of a decode step of all lanes.
      begin_s: of the prefill of a batch's prompts, which every window does again for what is open.
      update_s: of log-probabilities and updates of a batch.
      move_s: of a weight move, in which neither side works.
      token_s: of the prefill of a token that was drawn under weights before.
      score_s: of a batch's rewards, after its last sample.
    """

    decode_s: float
    begin_s: float
    update_s: float
    move_s: float
    token_s: float = 0.0
    score_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Means of a simulated training step.

    Attributes:
      step_s: seconds of the step.
      trainer_idle, rollout_idle: share of it in which a side has no work of its own; moves are work.
      lanes_busy: share of the lanes' decode steps that draw a token.
    """

    step_s: float
    trainer_idle: float
    rollout_idle: float
    lanes_busy: float


def read_lengths(path: str) -> Int[np.ndarray, " N"]:
    """Reads sampled tokens of samples: of a run directory with a trace, or of a file with a number per line.

    Raises:
      ValueError: no samples with tokens are there, or a length is negative or no number.
    """
    place = pathlib.Path(path)
    if place.is_dir():
        found: list[int] = []
        for step in traced_steps(place):
            traced = read_step(place, step)
            ends = np.cumsum(traced.samples["length"])
            sampled = np.concatenate([[0], np.cumsum(traced.tokens["mask"] > 0)])
            found += (sampled[ends] - sampled[ends - traced.samples["length"]]).tolist()
    else:
        try:
            found = [int(json.loads(line)) for line in place.read_text().split("\n") if line.strip()]
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"--lengths={path} is no run directory and no file of numbers: {error}.") from None
    if not any(found) or min(found) < 0:
        raise ValueError(
            f"--lengths={path} has {len(found)} lengths, the least {min(found, default=0)}: give a run directory with "
            "a trace (log.trace), or a file with the tokens of a completion on each line."
        )
    return np.asarray([n for n in found if n], np.int64)


def simulate(
    lengths_N: Int[np.ndarray, " N"],
    speeds: Speeds,
    *,
    rollout: RolloutConfig,
    samples: int,
    lanes: int,
    staleness: int,
) -> Simulated:
    """Plays training steps whose samples have lengths drawn from `lengths_N`.

    Lanes decode in dispatches of `rollout.steps_per_dispatch`, of which one is launched before the last is read
    (podrl.rollout.session): a lane gets its next sample at the next dispatch but one after its last ended, those of the
    batch that trains next first, and an end that only reading shows costs a dispatch more. With a
    staleness of 0 the sides take turns; with 1 a batch is drawn while the one before trains; from 2 on in windows
    (podrl.rollout.windows): a sample draws its quantum in each, and in its last one the rest. Each window computes keys
    and values of what is open anew.
    """
    rng = np.random.default_rng(0)
    batches = [rng.choice(lengths_N, samples).tolist() for _ in range(STEPS + staleness + 1)]
    quantum, quanta = Quantum(rollout, windows=staleness), {}
    left = [list(batch) for batch in batches]
    clock = trainer = 0.0  # begin of the window, end of the newest update
    worked, drawn, slots = {"trainer": 0.0, "rollout": 0.0}, 0, 0
    since = 0.0
    for window in range(STEPS):
        due = window if staleness == 0 else window + 1
        begun = range(0 if window == 0 else due + staleness - 1, due + staleness) if staleness else [due]
        quanta |= {b: quantum.of(window) for b in begun}
        played = [b for b in range(0 if window == 0 else due, due + max(staleness, 1)) if any(left[b])]
        again = sum(whole - rest for b in played for whole, rest in zip(batches[b], left[b], strict=True) if rest)
        parts = {b: left[b] if b <= due else [min(n, quanta[b]) for n in left[b]] for b in played}
        ends, tokens = window_steps(parts, dict(enumerate(left)), rollout, lanes), sum(map(sum, parts.values()))
        left = [[n - p for n, p in zip(rest, parts.get(b, [0] * samples), strict=True)] for b, rest in enumerate(left)]
        generating = ends * speeds.decode_s + len(played) * speeds.begin_s + again * speeds.token_s
        generating += len([b for b in played if b <= due]) * speeds.score_s
        quantum.saw(due, max(batches[due]))
        if staleness == 0:
            trainer = clock + generating + speeds.update_s
            done = trainer
        else:  # the update of this window's batch goes on beside it; the first window draws that batch as well
            trainer = clock + speeds.update_s
            done = max(trainer, clock + generating)
        clock = done + speeds.move_s
        if window + 1 == WARM:
            worked, drawn, slots, since = {"trainer": 0.0, "rollout": 0.0}, 0, 0, clock
        elif window >= WARM:
            worked["trainer"] += speeds.update_s + speeds.move_s
            worked["rollout"] += generating + speeds.move_s
            drawn, slots = drawn + tokens, slots + ends * lanes
    took = clock - since
    idle = {side: max(0.0, 1.0 - seconds / took) for side, seconds in worked.items()}
    return Simulated(took / (STEPS - WARM), idle["trainer"], idle["rollout"], drawn / max(slots, 1))


@dataclasses.dataclass(frozen=True)
class Outlook:
    """A planned job with given lengths, every program at its roofline; predicted, not measured.

    Attributes:
      lengths: how many were given; mean and longest: of them, at most `rollout.max_tokens_to_generate`.
      chips: of trainer and rollout, as planned.
      planned: a step on them.
      best: chips of the trainer, of as many in all, with which a step is shortest; and that step.
    """

    lengths: int
    mean: float
    longest: int
    chips: tuple[int, int]
    planned: Simulated
    best: tuple[int, Simulated]


def outlook(
    lengths_N: Int[np.ndarray, " N"], measured: Sequence[Measured], setting: Setting, *, move_s: float
) -> Outlook:
    """Simulates a planned job whose trainer and rollout have chips of their own.

    Args:
      lengths_N: tokens of completions, as of a run that was.
      measured: its programs.
      move_s: seconds of the weight move.
    """
    job, mesh = setting.job, setting.rollout_mesh()
    shape = engine_shape(job.rollout, shards := mesh.shape["data"] * mesh.shape["fsdp"])
    seconds = {side: sum(m.runs * m.seconds for m in measured if m.side == side) for side in (TRAINER, ROLLOUT)}
    (generate,) = (m for m in measured if m.name == "generate")
    rest = seconds[ROLLOUT] - generate.runs * generate.seconds
    token_s = rest / (job.rollout.prompts_per_step * job.rollout.max_prompt_length)
    speeds = Speeds(generate.seconds / shape.steps, rest, seconds[TRAINER], move_s, token_s)
    lengths_N = np.minimum(lengths_N, job.rollout.max_tokens_to_generate)
    chips = setting.trainer_mesh().size, mesh.size
    how: Any = {"rollout": job.rollout, "samples": job.samples_per_step, "staleness": job.algo.max_staleness}
    lanes = min(shape.lanes * shards, job.samples_per_step)
    planned = simulate(lengths_N, speeds, lanes=lanes, **how)
    best = balance(lengths_N, speeds, lanes=lanes, chips=chips, **how)[0]
    return Outlook(len(lengths_N), float(lengths_N.mean()), int(lengths_N.max()), chips, planned, best)


def window_steps(
    parts: Mapping[int, Sequence[int]], left: Mapping[int, Sequence[int]], rollout: RolloutConfig, lanes: int
) -> int:
    """Counts the decode steps of a window.

    Args:
      parts: by batch, the oldest first: tokens that each sample draws in the window; 0 has ended before.
      left: by batch: tokens that each sample has to draw; a part that is all of them ends by itself, unseen until its
        dispatch is read.
      rollout, lanes: of the engine.
    """
    free, last = [0] * lanes, 0  # dispatches after which each lane has its next sample, and all rest
    for b, drawn in parts.items():
        for part, whole in zip(drawn, left[b], strict=True):
            if part:
                done = heapq.heappop(free) + -(-part // rollout.steps_per_dispatch)
                heapq.heappush(free, done + 1)
                last = max(last, done + (part == whole < rollout.max_tokens_to_generate))
    return last * rollout.steps_per_dispatch


def balance(
    lengths_N: Int[np.ndarray, " N"],
    speeds: Speeds,
    *,
    lanes: int,
    chips: tuple[int, int],
    **how: Any,
) -> list[tuple[int, Simulated]]:
    """Simulates other splits of the same chips: (trainer's chips, the step), fastest first; `how` as of `simulate`.

    Updates take time in inverse proportion to the trainer's chips; lanes are as many per chip of the rollout as given.
    """
    trainer, rest = chips
    found = []
    for share in _SHARES:
        own = max(1, round(share * (trainer + rest)))
        if own >= trainer + rest:
            continue
        other = trainer + rest - own
        changed = dataclasses.replace(
            speeds,
            update_s=speeds.update_s * trainer / own,
            begin_s=speeds.begin_s * rest / other,
            token_s=speeds.token_s * rest / other,
        )
        held = max(1, round(lanes * other / rest))
        step = simulate(lengths_N, changed, lanes=held, **how)
        found.append((own, step))
    return sorted(found, key=lambda pair: pair[1].step_s)
