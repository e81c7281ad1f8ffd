"""Measures what windows save of a batch's tail: `python -m podrl.bench rollout --tail --staleness=2`."""

import argparse
import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

STEPS, SHOWN = 14, 8  # training steps, and how many of the last of them count
MEAN, SIGMA = 5.0, 0.9  # of the logarithm of a sample's length


def measure(bench: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Generates batch after batch with samples of given lengths, in windows and whole.

    Lengths are log-normal, up to --max_new; every window decodes what a training step with that staleness asks for.

    Args:
      bench: a podrl.bench.rollout.Bench whose samples end by their lengths alone.
      args: its options.

    Returns:
      decode_steps (per training step) and decode_steps_whole (with a staleness of 1), their quotient fewer_steps, the
      same three by a simulation without dispatches (bound_*), mixed_samples (share of several versions),
      prefill_tokens (per training step, prompts included), prefill_tokens_whole, lane_utilisation.
    """
    lengths = [_lengths(args, step) for step in range(STEPS)]
    staleness = max(args.staleness, 1)
    windows, whole = (_engine(bench, args, lengths, S) for S in (staleness, 1))
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
        "samples": args.prompts * args.group,
        "lanes": lanes,
    }


def _lengths(args: argparse.Namespace, step: int) -> np.ndarray:
    rng = np.random.default_rng((args.seed, step))
    return np.clip(rng.lognormal(MEAN, SIGMA, args.prompts * args.group).astype(int), 1, args.max_new)


def _engine(bench: Any, args: argparse.Namespace, lengths: Sequence[np.ndarray], staleness: int) -> dict[str, float]:
    """Means over the last windows of what the engine counted."""
    from podrl.rollout.config import Sampling
    from podrl.rollout.players import Unanswered
    from podrl.rollout.windows import Quantum
    from podrl.types import Policy

    class Cut(Unanswered):
        """Samples that end after given numbers of tokens."""

        def __init__(self, request: Any, lengths_B: np.ndarray):
            super().__init__(request)
            self._lengths_B = lengths_B

        def _make(self, session: Any) -> None:
            super()._make(session)
            for track, b in self.rows.items():
                track.limit, track.expected = int(self._lengths_B[b]), 1.0  # nobody knows before how long it becomes

    quantum = Quantum(bench.worker.config, windows=staleness)
    flying: list[tuple[int, Cut, int]] = []
    counted, mixed, begun = [], [], 0
    for window in range(STEPS - 1):
        while begun < min(window + 1 + staleness, STEPS):
            prompts = dataclasses.replace(bench.prompts, index_P=bench.prompts.index_P + begun * args.prompts)
            asked = bench.worker.player(
                prompts, group_size=args.group, step=begun, sampling=Sampling(max_new=args.max_new)
            )
            flying.append((begun, Cut(asked.request, lengths[begun]), quantum.of(window)))
            begun += 1
        rows = [(player, None if step <= window + 1 else K) for step, player, K in flying]
        for _ in bench.worker.advance(Policy(bench.policy.params, window), rows):
            pass
        counted.append(bench.worker.stats)
        while flying and flying[0][0] <= window + 1:
            step, player, _ = flying.pop(0)
            quantum.saw(step, int(lengths[step].max()))
            mixed.append(np.mean([len(set(track.versions)) > 1 for track in player.rows]))
    last = _counted(counted, staleness)
    names = ("decode_steps", "prefill_tokens", "lane_utilisation")
    return {name: float(np.mean([getattr(stats, name) for stats in last])) for name in names} | {
        "mixed_samples": float(np.mean(mixed[-SHOWN:]))
    }


def _simulated(bench: Any, lengths: Sequence[np.ndarray], staleness: int) -> float:
    """Decode steps of a training step where a free lane takes the next sample at once, the batch that is due first."""
    from podrl.rollout.windows import Quantum

    quantum, lanes = Quantum(bench.worker.config, windows=staleness), bench.worker.config.lanes
    left: dict[int, list[int]] = {}
    quanta: dict[int, int] = {}
    counted, begun = [], 0
    for window in range(STEPS - 1):
        while begun < min(window + 1 + staleness, STEPS):
            left[begun], quanta[begun] = lengths[begun].tolist(), quantum.of(window)
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
            quantum.saw(step, int(lengths[step].max()))
            del left[step]
        counted.append(end)
    return float(np.mean(_counted(counted, staleness)))


def _counted(values: Sequence[Any], staleness: int) -> Sequence[Any]:
    """Values of windows in which as many batches are in flight as there may be."""
    return values[-SHOWN - staleness : len(values) - staleness + 1]
