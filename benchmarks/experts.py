"""Compares a model with experts to a dense model of equal active parameters: `python -m benchmarks experts`."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import rollout, step
from benchmarks.model import fake_devices

_SIDES = ("dense", "experts")


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times updates and generations of both models in turn, on random samples and prompts of the default job's lengths.

    Returns:
      update_ratio, decode_ratio: processor time with experts divided by processor time of the dense model, median of
        the rounds.
      update_ratio_wall, decode_ratio_wall: the same ratios of wall times.
      The other figures are each model's median processor and wall times, in milliseconds.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    parser.add_argument("--experts", default="8:2", metavar="COUNT:CHOSEN", help="see benchmarks step --help")
    parser.add_argument("--max_seq_token_per_tpu", default="480", help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    fake_devices(1)
    shapes = ["--prompts=16", "--group=8", "--prompt_len=40:60"]
    sides: dict[str, dict[str, Callable[[], Any]]] = {"update": {}, "decode": {}}
    for side in _SIDES:
        model = [f"--experts={args.experts}"] if side == "experts" else []
        rows = ["--completion_len=15:35", "--src=fsdp=1", f"--max_seq_token_per_tpu={args.max_seq_token_per_tpu}"]
        sides["update"][side] = _updates([*shapes, *model, *rows])
        sides["decode"][side] = _generations([*shapes, *model, "--max_new=64", "--mesh=data=1"])
    return {key: value for name, calls in sides.items() for key, value in _compare(name, calls, args.rounds).items()}


def _updates(argv: Sequence[str]) -> Callable[[], Any]:
    import jax

    job = step.make_update(step.make_parser().parse_args([*argv, "--steps=1"]))

    def update() -> None:
        job.state, metrics = job.train_step(job.state, job.frozen, job.batches[0])
        jax.block_until_ready((job.state, metrics))

    return update


def _generations(argv: Sequence[str]) -> Callable[[], Any]:
    bench = rollout.Bench(rollout.make_parser().parse_args(argv), end_ids=())
    return bench.generate


def _compare(name: str, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Times both sides in turn, after one call of each that does not count."""
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in _SIDES}
    for index in range(rounds + 1):
        for side in _SIDES:
            began, busy = time.perf_counter(), time.process_time()
            calls[side]()
            if index:
                seconds[side].append((time.process_time() - busy, time.perf_counter() - began))
    found = {}
    for place, clock in enumerate(("", "_wall")):
        dense, experts = ([pair[place] for pair in seconds[side]] for side in _SIDES)
        found[f"{name}_ratio{clock}"] = statistics.median(e / d for d, e in zip(dense, experts, strict=True))
        found[f"{name}_ms_dense{clock}"] = 1e3 * statistics.median(dense)
        found[f"{name}_ms_experts{clock}"] = 1e3 * statistics.median(experts)
    return found
