"""Simulates trainer and rollout step by step for known lengths of samples, to see which side waits, and how long."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from podrl.config import plural
from podrl.engine.config import RolloutConfig
from podrl.engine.sizes import engine_shape
from podrl.engine.state import EngineShape
from podrl.mesh.rules import batch_shards
from podrl.plan.compile import CompileResult
from podrl.plan.programs import ROLLOUT, TRAINER, Setting
from podrl.rollout.clock import TokenClock
from podrl.rollout.worker import pieces_per_prompt
from podrl.rundir.trace import read_step, traced_steps

_SHARES = tuple(n / 16 for n in range(1, 16))  # shares of the chips that are tried for the trainer
STEPS, WARM = 40, 8  # number of training steps of a simulation, and number of first steps that do not count


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Seconds of the parts of a step, measured or predicted.

    Attributes:
      decode_s: seconds of a decode step of all lanes.
      call_s: seconds of a prefill call of all shards, of about `rollout.prefill_tokens` tokens (rows times length).
      update_s: seconds of log-probabilities and updates of a batch.
      move_s: seconds of a weight move, in which neither side works.
      begin_s: seconds of all other work of a window. A window is the time between two weight moves; samples are drawn
        in it.
      plan_s: seconds in which the host plans a dispatch.
      score_s: seconds of a batch's rewards, after its last sample.
    """

    decode_s: float
    call_s: float
    update_s: float
    move_s: float
    begin_s: float = 0.0
    plan_s: float = 0.0
    score_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Load:
    """The sizes of an engine and of the batches that it generates.

    Attributes:
      rollout: settings of the engine.
      lanes: number of lanes on all shards together.
      shards: number of shards of the engine's mesh.
      samples: number of samples in a batch.
      group_size: number of samples per prompt.
      prompt: number of tokens in a prompt.
    """

    rollout: RolloutConfig
    lanes: int
    shards: int
    samples: int
    group_size: int
    prompt: int

    @functools.cached_property
    def shape(self) -> EngineShape:
        """Sizes of the engine's programs."""
        return engine_shape(self.rollout, self.shards)

    @functools.cached_property
    def pieces(self) -> int:
        """Number of pieces that a group is cut into; each piece prefills the prompt."""
        return pieces_per_prompt(self.samples // self.group_size, self.group_size, self.shards)

    @functools.cached_property
    def rows(self) -> int:
        """Number of prompts that a prefill call takes on all shards; 0 for prompts of several chunks."""
        bucket = next((b for b in self.shape.buckets if b >= self.prompt - 1), None)
        return 0 if bucket is None else self.shape.prefill_rows(bucket) * self.shards

    def calls(self, tokens: Sequence[int]) -> int:
        """Counts the prefill calls for sequences of these lengths, if they are spread evenly over the shards."""
        waves = collections.Counter[tuple[int, int]]()
        *_, largest = self.shape.buckets
        for length in tokens:
            for wave, at in enumerate(range(0, length, largest)):
                waves[wave, next(b for b in self.shape.buckets if b >= min(length - at, largest))] += 1
        rows = self.shape.prefill_rows
        return sum(math.ceil(n / self.shards / rows(bucket)) for (_, bucket), n in waves.items())


@dataclasses.dataclass(frozen=True)
class Window:
    """Device calls of a window: number of decode steps, and number of prefill calls."""

    steps: int
    calls: int


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """Means of a simulated training step.

    Attributes:
      step_s: seconds of the step.
      trainer_idle, rollout_idle: share of the step in which a side has no work of its own, from 0 to 1; weight moves
        count as work.
      lanes_busy: share of the lanes' decode steps that draw a token, from 0 to 1.
      decode_steps: decode steps of the step's window.
      prefill_calls: prefill calls of the step's window.
    """

    step_s: float
    trainer_idle: float
    rollout_idle: float
    lanes_busy: float
    decode_steps: float
    prefill_calls: float


def read_lengths(path: str) -> Int[np.ndarray, " N"]:
    """Reads the number of sampled tokens of each sample, from a run directory with a trace or from a file of numbers.

    Args:
      path: run directory with a trace (log.trace), or file with one number of sampled tokens per line.

    Returns:
      The lengths above 0.

    Raises:
      ValueError: there are no samples with tokens, a length is negative or no number, or a trace is damaged.
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
            raise ValueError(f"--lengths={path} is neither a run directory nor a file of numbers: {error}.") from None
    if not any(found) or min(found) < 0:
        smallest = f", the smallest of them {min(found)}" if found else ""
        raise ValueError(
            f"--lengths={path} holds {plural(len(found), 'length')}{smallest}: none may be negative, and one must be "
            "above 0. Give a run directory with a trace (log.trace), or a file with one number of sampled tokens per "
            "line."
        )
    return np.asarray([n for n in found if n], np.int64)


def simulate(lengths_N: Int[np.ndarray, " N"], speeds: Speeds, *, load: Load, staleness: int) -> SimulatedStep:
    """Simulates training steps whose samples have lengths drawn from `lengths_N`.

    Lanes decode in dispatches of `rollout.steps_per_dispatch`, and the engine launches a dispatch before it has read
    the previous dispatch (podrl.engine.session). So after the end of a sample its lane stays empty for one dispatch,
    unless many samples end at once and the engine waits for them. Samples of the batch that trains next come first.

    With a staleness of 0 the sides take turns. With 1 a batch is drawn while the batch before trains. From 2 on samples
    are drawn in windows (podrl.rollout.clock): a sample draws its quantum in each window, and all its remaining tokens
    in its last window. Each window computes the keys and values of open samples anew, in prefill calls of the engine's
    size.

    Args:
      lengths_N: numbers of sampled tokens, one per sample, for example from an earlier run; the simulation draws from
        them.
      speeds: seconds of the parts of a step.
      load: sizes of the engine and of a batch.
      staleness: number of steps by which a sample may be older than the weights that it trains.

    Returns:
      Means over the steps after the first `WARM`.
    """
    rng, samples = np.random.default_rng(0), load.samples
    batches = [rng.choice(lengths_N, samples).tolist() for _ in range(STEPS + staleness + 1)]
    windows, quanta = TokenClock(load.rollout, staleness=staleness), {}
    left = [list(batch) for batch in batches]
    waits = 2 * speeds.plan_s / max(load.rollout.steps_per_dispatch * speeds.decode_s, 1e-12)
    # `clock`: time at which the window begins. `trainer`: time at which the newest update ends.
    clock = trainer = 0.0
    worked, drawn, steps, calls = {"trainer": 0.0, "rollout": 0.0}, 0, 0, 0
    since = 0.0
    for window in range(STEPS):
        due = window if staleness == 0 else window + 1
        begun = range(0 if window == 0 else due + staleness - 1, due + staleness) if staleness else [due]
        quanta |= {b: windows.quantum(window) for b in begun}
        played = [b for b in range(0 if window == 0 else due, due + max(staleness, 1)) if any(left[b])]
        parts = {b: left[b] if b <= due else [min(n, quanta[b]) for n in left[b]] for b in played}
        work = window_work(parts, dict(enumerate(left)), dict(enumerate(batches)), load, waits=waits)
        left = [[n - p for n, p in zip(rest, parts.get(b, [0] * samples), strict=True)] for b, rest in enumerate(left)]
        generating = work.steps * speeds.decode_s + work.calls * speeds.call_s + speeds.begin_s
        generating += len([b for b in played if b <= due]) * speeds.score_s
        windows.saw(due, max(batches[due]))
        if staleness == 0:
            trainer = clock + generating + speeds.update_s
            done = trainer
        else:  # batch `window` trains while later batches are sampled; the first window samples batch 0 as well
            trainer = clock + speeds.update_s
            done = max(trainer, clock + generating)
        clock = done + speeds.move_s
        if window + 1 == WARM:
            since = clock
        elif window >= WARM:
            worked["trainer"] += speeds.update_s + speeds.move_s
            worked["rollout"] += generating + speeds.move_s
            drawn, steps, calls = drawn + sum(map(sum, parts.values())), steps + work.steps, calls + work.calls
    took, counted = clock - since, STEPS - WARM
    idle = {side: max(0.0, 1.0 - seconds / took) for side, seconds in worked.items()}
    busy = drawn / max(steps * load.lanes, 1)
    return SimulatedStep(took / counted, idle["trainer"], idle["rollout"], busy, steps / counted, calls / counted)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """A planned job with the user's lengths of samples, every program at its roofline; predicted, not measured.

    Attributes:
      lengths: number of the user's lengths.
      mean, longest: mean and largest length in tokens, each length cut to `rollout.max_tokens_to_generate`.
      chips: planned numbers of chips of trainer and rollout.
      planned: a step on these chips.
      best: (number of trainer chips, step) for the fastest split of the same chips.
    """

    lengths: int
    mean: float
    longest: int
    chips: tuple[int, int]
    planned: SimulatedStep
    best: tuple[int, SimulatedStep]


def outlook(
    lengths_N: Int[np.ndarray, " N"], measured: Sequence[CompileResult], setting: Setting, *, move_s: float
) -> Outlook:
    """Simulates a planned job whose trainer and rollout have chips of their own.

    Args:
      lengths_N: numbers of sampled tokens, one per sample, for example from an earlier run; the simulation draws from
        them.
      measured: measurements of the job's programs.
      setting: the job and its topologies.
      move_s: seconds of the weight move.
    """
    job, mesh = setting.job, setting.rollout_mesh()
    shards = batch_shards(mesh)
    shape = engine_shape(job.rollout, shards)
    seconds = {side: sum(m.runs * m.seconds for m in measured if m.side == side) for side in (TRAINER, ROLLOUT)}
    (generate,) = (m for m in measured if m.name == "generate")
    (prefill,) = (m for m in measured if m.name == f"prefill {shape.buckets[-1]}")
    rest = seconds[ROLLOUT] - generate.runs * generate.seconds - prefill.runs * prefill.seconds
    speeds = Speeds(generate.seconds / shape.steps, prefill.seconds, seconds[TRAINER], move_s, rest)
    lengths_N = np.minimum(lengths_N, job.rollout.max_tokens_to_generate)
    chips = setting.trainer_mesh().size, mesh.size
    samples, lanes = job.samples_per_step, min(shape.lanes * shards, job.samples_per_step)
    load = Load(job.rollout, lanes, shards, samples, job.algo.num_generations, job.rollout.max_prompt_length)
    staleness = job.algo.max_staleness
    planned = simulate(lengths_N, speeds, load=load, staleness=staleness)
    best = balance(lengths_N, speeds, chips=chips, load=load, staleness=staleness)[0]
    return Outlook(len(lengths_N), float(lengths_N.mean()), int(lengths_N.max()), chips, planned, best)


def window_work(
    parts: Mapping[int, Sequence[int]],
    left: Mapping[int, Sequence[int]],
    whole: Mapping[int, Sequence[int]],
    load: Load,
    *,
    waits: float = 0.0,
) -> Window:
    """Counts the decode steps and the prefill calls of a window.

    Args:
      parts: number of tokens that each sample draws in the window, a list for each batch, the oldest batch first; 0 if
        the sample ended before the window.
      left: number of tokens that each sample still has to draw when the window begins, a list for each batch.
      whole: number of tokens that each sample draws in all its windows, a list for each batch. The tokens of earlier
        windows are prefilled with the prompt.
      load: sizes of the engine and of the batches.
      waits: threshold for the mean share of running samples that end in a dispatch. Above it the engine reads each
        dispatch before it launches another, so that lanes are filled at once (podrl.rollout.players.Pace).
    """
    # `late` counts the lanes of samples that have ended, but whose end the engine has not read yet.
    steps, free, late = load.rollout.steps_per_dispatch, load.lanes, 0
    queue = collections.deque((b, i) for b, drawn in parts.items() for i, part in enumerate(drawn) if part)
    # By dispatch: the number of samples that end in it, and the steps until the last of them ends.
    ends, longest = collections.Counter[int](), collections.Counter[int]()
    prompts, shares = set[tuple[int, int]](), collections.deque([0.25], maxlen=8)
    dispatch = running = decoded = calls = 0
    while queue or running:
        begun, again = list[tuple[int, int]](), []
        while queue and free:
            b, i = queue.popleft()
            full, rest = divmod(parts[b][i] - 1, steps)
            ends[dispatch + full] += 1
            longest[dispatch + full] = max(longest[dispatch + full], rest + 1)
            running, free = running + 1, free - 1
            begun += {(b, i // load.group_size)} - prompts
            prompts.update(begun)
            again += [whole[b][i] - left[b][i]] if whole[b][i] > left[b][i] else []
        prompt_calls = load.calls([load.prompt - 1] * len(begun) * load.pieces)
        calls += prompt_calls + load.calls(again)
        if room := prompt_calls * load.rows // load.pieces - len(begun):  # free rows prefill the prompts that come next
            later = dict.fromkeys((b, i // load.group_size) for b, i in queue)
            prompts.update([prompt for prompt in later if prompt not in prompts][: max(room, 0)])
        ended, ran = ends[dispatch], running
        running -= ended
        decoded += steps if running else longest[dispatch]
        seen = not running or (dispatch > 0 and sum(shares) / len(shares) > waits)
        free, late = free + late + (ended if seen else 0), 0 if seen else ended
        dispatch += 1
        shares.append(ended / max(ran, 1))
    return Window(decoded, calls)


def balance(
    lengths_N: Int[np.ndarray, " N"], speeds: Speeds, *, load: Load, chips: tuple[int, int], staleness: int
) -> list[tuple[int, SimulatedStep]]:
    """Simulates other splits of the same chips: (trainer's chips, the step), fastest first.

    `update_s` is inversely proportional to the trainer's chips, and `begin_s` to the rollout's chips. Lanes and shards
    grow in proportion to the rollout's chips.

    Args:
      lengths_N: numbers of sampled tokens, one per sample; the simulation draws from them.
      speeds: seconds of the parts of a step, for the split `chips`.
      load: sizes of the engine and of a batch, for the split `chips`.
      chips: numbers of chips of trainer and rollout.
      staleness: number of steps by which a sample may be older than the weights that it trains.
    """
    trainer, rest = chips
    found = []
    for share in _SHARES:
        own = max(1, round(share * (trainer + rest)))
        if own >= trainer + rest:
            continue
        scale = (trainer + rest - own) / rest
        changed = dataclasses.replace(speeds, update_s=speeds.update_s * trainer / own, begin_s=speeds.begin_s / scale)
        held = {name: max(1, round(getattr(load, name) * scale)) for name in ("lanes", "shards")}
        step = simulate(lengths_N, changed, load=dataclasses.replace(load, **held), staleness=staleness)
        found.append((own, step))
    return sorted(found, key=lambda pair: pair[1].step_s)
