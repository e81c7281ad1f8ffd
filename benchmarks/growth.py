"""Measures how costs grow with samples, tokens, parameters, lanes, hosts and records: `python -m benchmarks growth`."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Models by their rough number of parameters in millions: (layers, width, width of the feed-forward, heads, vocabulary).
_MODELS = {
    0.5: (3, 128, 256, 4, 384),
    2: (4, 192, 576, 6, 1024),
    8: (6, 320, 960, 10, 2048),
    30: (8, 512, 1536, 16, 8192),
    100: (12, 768, 2304, 24, 16384),
}
_GROUP = 8  # number of samples per prompt
_JOB = ("--prompt_len=40:60", f"--group={_GROUP}")  # lengths of the default job's prompts
_SHORT = (*_JOB, "--completion_len=15:35", "--src=fsdp=1", "--steps=2")


@dataclass(frozen=True)
class Series:
    """One cost at several sizes.

    Attributes:
      bench: name of the benchmark that measures the cost.
      cost: name of the benchmark's figure that is the cost.
      work: function of the benchmark's figures that returns the amount of its work, in any unit.
      points: options of the benchmark for each size.
      unit: plural noun of what a size counts, such as 'samples', for messages.
    """

    bench: str
    cost: str
    work: Callable[[Mapping[str, Any]], float]
    points: Mapping[float, Sequence[str]]
    unit: str


def _flops(figures: Mapping[str, Any]) -> float:
    return figures["mfu"] * figures["matmul_flops"] * figures["seconds"]


def _decoded(figures: Mapping[str, Any]) -> float:
    """Counts operations of a generation: 2 for each float32 weight and sampled token, plus the operations of attention.

    With two query heads for each key head, a query takes one operation for each byte of a live token's keys and values.
    """
    live = (figures["prompt_tokens"] / figures["samples"] * _GROUP) + figures["tokens"] / figures["samples"] / 2
    return figures["tokens"] * (figures["weight_bytes"] / 2 + figures["kv_token_bytes"] * live)


def _model(millions: float) -> list[str]:
    layers, dim, ffn, heads, vocab = _MODELS[millions]
    sizes = f"--layers={layers} --dim={dim} --ffn={ffn} --heads={heads} --kv_heads={heads // 2} --vocab={vocab}"
    return [*sizes.split(), "--head_dim=32"]


_GENERATE = ("--mesh=data=1", "--repeats=2")
_SAMPLES, _TOKENS, _HOSTS = (32, 128, 512, 2048), (64, 256, 1024, 4096), (2, 4, 8, 16)
SERIES: Mapping[str, Series] = {
    "update by samples": Series(
        "step", "cpu_seconds", _flops, {n: (*_SHORT, f"--prompts={n // _GROUP}") for n in _SAMPLES}, "samples"
    ),
    "update by tokens": Series(
        "step",
        "cpu_seconds",
        _flops,
        {n: (*_JOB, f"--completion_len={n}", "--src=fsdp=1", "--steps=2", "--prompts=2") for n in _TOKENS},
        "tokens of a sample",
    ),
    "update by parameters": Series(
        "step",
        "cpu_seconds",
        _flops,
        {k: (*_SHORT, "--prompts=4", *_model(k)) for k in _MODELS},
        "million parameters",
    ),
    "rollout by samples": Series(
        "rollout",
        "cpu_seconds",
        _decoded,
        {n: (*_JOB, *_GENERATE, "--max_new=64", f"--prompts={n // _GROUP}") for n in _SAMPLES},
        "samples",
    ),
    "rollout by tokens": Series(
        "rollout",
        "cpu_seconds",
        _decoded,
        {n: (*_JOB, *_GENERATE, f"--max_new={n}", "--prompts=4", "--vocab=4096") for n in _TOKENS[:-1]},
        "most tokens of a sample",
    ),
    "rollout by lanes": Series(
        "rollout",
        "cpu_seconds",
        _decoded,
        {n: (*_JOB, *_GENERATE, "--max_new=64", "--prompts=32", f"--lanes={n}") for n in (16, 32, 64, 128, 256)},
        "lanes, the same 256 samples",
    ),
    "rollout by parameters": Series(
        "rollout",
        "cpu_seconds",
        _decoded,
        {k: (*_JOB, *_GENERATE, "--max_new=32", "--prompts=4", *_model(k)) for k in _MODELS},
        "million parameters",
    ),
    "leader of a pod by hosts": Series(
        "pod",
        "leader_cpu_ms",
        lambda figures: figures["trainers"] + figures["rollouts"],
        {5 * n: (f"--trainers={n}", f"--rollouts={4 * n}", "--steps=4") for n in _HOSTS},
        "hosts",
    ),
    "start by records": Series(
        "growth",
        "cpu_seconds",
        lambda figures: figures["records"],
        {n: (f"--records={n}",) for n in (1000, 10_000, 100_000, 1_000_000)},
        "records",
    ),
}


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmarks of every series, each size in a process of its own, and fits exponents.

    Returns:
      For each series its points, (size, cost, work), and the exponents of cost and of work over the larger half of its
      sizes, because costs of small sizes are mostly fixed. With --records: the figures records (their number) and
      cpu_seconds (processor seconds of opening them).
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth", description=__doc__)
    parser.add_argument("--series", nargs="+", default=tuple(SERIES), choices=tuple(SERIES), metavar="NAME")
    parser.add_argument("--results", default="", help="a file of JSON lines; its points are not measured again")
    parser.add_argument("--records", type=int, default=0, help="measure only the start of a job with this many records")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.records:
        return _records(args.records)
    file = pathlib.Path(args.results) if args.results else None
    lines = file.read_text().splitlines() if file and file.exists() else []
    known = {(line["series"], line["size"]): line["figures"] for line in map(json.loads, lines)}
    found = {}
    for name in args.series:
        series, points = SERIES[name], []
        for size, options in series.points.items():
            if (name, size) not in known:
                known[name, size] = _measured(series.bench, options)
                if file:
                    with file.open("a") as out:
                        out.write(json.dumps({"series": name, "size": size, "figures": known[name, size]}) + "\n")
            figures = known[name, size]
            points.append((size, figures[series.cost], series.work(figures)))
            print(f"{name}: {size} {series.unit}: {figures[series.cost]:.4g} {series.cost}", file=sys.stderr)
        found[name] = {"points": points} | exponents(points)
    return found


def exponents(points: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Fits cost ~ size^a and work ~ size^b over the larger half of the sizes; returns a, b, and c of cost ~ work^c.

    Args:
      points: (size, cost, work) by growing size.
    """
    size, cost, work = np.log(np.maximum(np.asarray(points[len(points) // 2 - 1 :], float), 1e-12)).T
    fit = lambda x, y: float(np.polyfit(x, y, 1)[0]) if np.ptp(x) > 0.05 else float("nan")  # noqa: E731
    return {"cost_by_size": fit(size, cost), "work_by_size": fit(size, work), "cost_by_work": fit(work, cost)}


def _measured(bench: str, options: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", bench, *options, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"benchmarks {bench} {' '.join(options)} failed: {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _records(count: int) -> dict[str, Any]:
    """Measures how long a job's data takes at its first start: processor seconds from a JSONL file to a batch."""
    import podrl
    from podrl.data.pipeline import DataConfig, PromptStream
    from podrl.data.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "records.jsonl"
        with file.open("w") as out:
            for i in range(count):
                out.write(json.dumps({"question": f"{i} plus {i} is how many?", "answer": str(2 * i)}) + "\n")
        busy = time.process_time()
        config = DataConfig(path=str(file), cache=str(pathlib.Path(folder) / "cache"), system_prompt="")
        tokenizer = Tokenizer(podrl.TINY)
        next(PromptStream.from_config(config, tokenizer, prompts_per_step=8, max_prompt_length=256))
        return {"records": count, "cpu_seconds": time.process_time() - busy}
