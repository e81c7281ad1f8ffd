"""Measures how many decode steps windows of tokens save: `python -m benchmarks rollout --tail --staleness=2`."""

import argparse
import dataclasses
import heapq
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

STEPS, SHOWN = 14, 8  # number of training steps; only the last SHOWN steps count
MEAN, SIGMA = 5.0, 0.9  # mean and standard deviation of the logarithm of a sample's length


def measure(bench: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Generates batch after batch, in windows and as whole batches; the lengths of samples are drawn in advance.

    Lengths are log-normal, up to --max_new. A window is the time of one training step: in it the samples of the batch
    that trains next end, and the samples of up to `staleness` - 1 later batches draw their quanta.

    Args:
      bench: a benchmarks.rollout.Bench whose samples end by their lengths alone.
      args: options of the bench.

    Returns:
      decode_steps, decode_steps_whole: decode steps per training step in windows, and with whole batches (a staleness
        of 1).
      fewer_steps: decode_steps_whole over decode_steps.
      bound_*: the same three figures, simulated without dispatches: every free lane takes the next sample at once.
      mixed_samples: share of samples that several versions drew.
      prefill_tokens, prefill_tokens_whole: tokens that prefill computed per training step, prompts included.
      lane_utilisation: sampled tokens over lane places of all decode steps, in windows.
      window_cpu_s, predicted_cpu_s: processor seconds of a window, measured, and predicted by the model of podrl.plan
        --lengths from the speeds of whole batches.
      window_cpu_s_whole, predicted_cpu_s_whole: the same two figures for whole batches, predicted from the speeds of
        windows.
    """
    lengths = [_lengths(args, step) for step in range(STEPS)]
    staleness = max(args.staleness, 1)
    windows, whole = (_engine(bench, args, lengths, S) for S in (staleness, 1))
    played, played_whole = windows.pop("played"), whole.pop("played")
    lanes = bench.worker.config.lanes
    bound, bound_whole = (_simulated(bench, lengths, S) for S in (staleness, 1))
    return {
        "staleness": staleness,
        "decode_steps": windows["decode_steps"],
        "decode_steps_whole": whole["decode_steps"],
        "fewer_steps": whole["decode_steps"] / windows["decode_steps"],
        "bound_decode_steps": bound,
        "bound_decode_steps_whole": bound_whole,
        "bound_fewer_steps": bound_whole / bound,
        "mixed_samples": windows["mixed_samples"],
        "prefill_tokens": windows["prefill_tokens"],
        "prefill_tokens_whole": whole["prefill_tokens"],
        "lane_utilisation": windows["lane_utilisation"],
        "window_cpu_s": statistics.fmean(window.cpu_s for window in played),
        "predicted_cpu_s": _predicted(played, played_whole),
        "window_cpu_s_whole": statistics.fmean(window.cpu_s for window in played_whole),
        "predicted_cpu_s_whole": _predicted(played_whole, played),
        "samples": args.prompts * args.group,
        "lanes": lanes,
    }


@dataclasses.dataclass(frozen=True)
class _Played:
    """A played window: the engine's counts, processor seconds, and the predicted decode steps and prefill calls."""

    stats: Any
    cpu_s: float
    steps: int
    calls: int


def _predicted(windows: Sequence[_Played], others: Sequence[_Played]) -> float:
    """Predicts the mean processor seconds of windows from the median speeds of other windows.

    The processor seconds of the other windows are divided among prefill, decode steps and the rest in the proportions
    of the engine's seconds.
    """

    def speed(seconds: Any, count: Any) -> float:
        return statistics.median(w.cpu_s * seconds(w.stats) / w.stats.seconds / count(w.stats) for w in others)

    call_s = speed(lambda s: s.prefill_seconds, lambda s: s.prefill_calls)
    step_s = speed(lambda s: s.decode_seconds, lambda s: s.decode_steps)
    rest_s = speed(lambda s: s.seconds - s.prefill_seconds - s.decode_seconds, lambda s: 1)
    return statistics.fmean(w.calls * call_s + w.steps * step_s + rest_s for w in windows)


def _work(bench: Any, args: argparse.Namespace, rows: Sequence[tuple[Any, Any]], lengths: Sequence[np.ndarray]) -> Any:
    """Returns a function (waits) -> decode steps and prefill calls of a window, by podrl.plan.simulate.window_work."""
    from podrl.plan.simulate import Load, window_work

    config, mesh = bench.worker.config, bench.worker.mesh
    prompt = round(float(bench.prompts.length_P.mean()))
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    load = Load(config, config.lanes, shards, args.prompts * args.group, args.group, prompt)
    whole = {b: drawn.tolist() for b, drawn in enumerate(lengths)}
    left = {b: list(drawn) for b, drawn in whole.items()}
    for b, (player, _) in enumerate(rows):
        for track, i in player.rows.items():
            left[b][i] -= track.sampled
    parts = {b: left[b] if K is None else [min(n, K) for n in left[b]] for b, (_, K) in enumerate(rows)}
    return lambda waits: window_work(parts, left, whole, load, waits=waits)


def _lengths(args: argparse.Namespace, step: int) -> np.ndarray:
    rng = np.random.default_rng((args.seed, step))
    return np.clip(rng.lognormal(MEAN, SIGMA, args.prompts * args.group).astype(int), 1, args.max_new)


def in_windows(
    config: Any,
    begin: Callable[[int], Any],
    longest: Callable[[int], int],
    *,
    windows: int,
    steps: int,
    staleness: int,
) -> Iterator[list[tuple[int, Any, int | None]]]:
    """Yields the batches that each window plays, oldest first: (step, player, tokens that each sample may draw).

    The number of tokens is None for the batches that train next: their samples end in this window.

    Args:
      config: settings of the engine.
      begin: function that makes the player of the batch that a step trains on.
      longest: function from a step to the length of the longest sample of the step's batch, in tokens.
      windows, steps: number of windows to play, and number of training steps.
      staleness: largest number of versions that may draw one sample.
    """
    from podrl.rollout.clock import TokenClock

    clock, flying, begun = TokenClock(config, staleness=staleness), [], 0
    for window in range(windows):
        while begun < min(window + 1 + staleness, steps):
            flying.append((begun, begin(begun), clock.quantum(window)))
            begun += 1
        yield [(step, player, None if step <= window + 1 else tokens) for step, player, tokens in flying]
        while flying and flying[0][0] <= window + 1:
            step, *_ = flying.pop(0)
            clock.saw(step, longest(step))


def _engine(bench: Any, args: argparse.Namespace, lengths: Sequence[np.ndarray], staleness: int) -> dict[str, Any]:
    """Averages the engine's counters over the last windows."""
    from podrl.engine.config import Sampling
    from podrl.rollout.players import PlainPlayer
    from podrl.types import Policy

    class Cut(PlainPlayer):
        """Plays samples that end after numbers of tokens drawn in advance (`_lengths`)."""

        def __init__(self, request: Any, lengths_B: np.ndarray):
            super().__init__(request)
            self._lengths_B = lengths_B

        def _make(self, session: Any) -> None:
            super()._make(session)
            for track, b in self.rows.items():
                # All samples get the same expected length: the scheduler must not know in advance how long a sample
                # becomes.
                track.limit, track.expected = int(self._lengths_B[b]), 1.0

    def begin(step: int) -> Cut:
        prompts = dataclasses.replace(bench.prompts, index_P=bench.prompts.index_P + step * args.prompts)
        sampling = Sampling(max_new=args.max_new)
        asked = bench.worker.player(prompts, group_size=args.group, step=step, sampling=sampling)
        return Cut(asked.request, lengths[step])

    counted, mixed = [], []
    longest: Any = lambda step: int(lengths[step].max())  # noqa: E731
    played = in_windows(bench.worker.config, begin, longest, windows=STEPS - 1, steps=STEPS, staleness=staleness)
    for window, flying in enumerate(played):
        rows = [(player, K) for _, player, K in flying]
        work, started = _work(bench, args, rows, [lengths[step] for step, _, _ in flying]), time.process_time()
        for _ in bench.worker.advance(Policy(bench.policy.params, window), rows):
            pass
        stats, took = bench.worker.stats, time.process_time() - started
        made = work(2 * stats.plan_seconds / max(stats.decode_seconds, 1e-9))
        counted.append(_Played(stats, took, made.steps, made.calls))
        for player in (player for player, K in rows if K is None):
            mixed.append(np.mean([len(set(track.versions)) > 1 for track in player.rows]))
    last = _counted(counted, staleness)
    names = ("decode_steps", "prefill_tokens", "lane_utilisation")
    means = {name: float(np.mean([getattr(window.stats, name) for window in last])) for name in names}
    return means | {"mixed_samples": float(np.mean(mixed[-SHOWN:])), "played": last}


def _simulated(bench: Any, lengths: Sequence[np.ndarray], staleness: int) -> float:
    """Simulates the decode steps of a training step in which every free lane takes a sample of the oldest batch at
    once."""
    from podrl.rollout.clock import TokenClock

    clock, lanes = TokenClock(bench.worker.config, staleness=staleness), bench.worker.config.lanes
    left: dict[int, list[int]] = {}
    quanta: dict[int, int] = {}
    counted, begun = [], 0
    for window in range(STEPS - 1):
        while begun < min(window + 1 + staleness, STEPS):
            left[begun], quanta[begun] = lengths[begun].tolist(), clock.quantum(window)
            begun += 1
        free, end = [0] * lanes, 0
        for step in sorted(left):
            parts = [n if step <= window + 1 else min(n, quanta[step]) for n in left[step]]
            for part in (part for part in parts if part):
                done = heapq.heappop(free) + part
                heapq.heappush(free, done)
                end = max(end, done)
            left[step] = [n - part for n, part in zip(left[step], parts, strict=True)]
        for step in [step for step in left if step <= window + 1]:
            clock.saw(step, int(lengths[step].max()))
            del left[step]
        counted.append(end)
    return float(np.mean(_counted(counted, staleness)))


def _counted(values: Sequence[Any], staleness: int) -> Sequence[Any]:
    """Returns the values of the last windows in which the most batches are in flight."""
    return values[-SHOWN - staleness : len(values) - staleness + 1]
