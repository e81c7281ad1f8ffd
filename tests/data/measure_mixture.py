"""Measures a mixture of 1 million prompts in 8 JSONL files (1 GB): `python tests/data/measure_mixture.py DIR`.

Run it twice: the first start reads the files, the second uses the cache in DIR. It prints seconds of the start (wall
clock and this process's CPU), the process's peak memory, and milliseconds of a batch of 8 prompts; then milliseconds of
a batch that a curriculum chooses after every record has been trained on.
"""

import dataclasses
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


def write(folder: pathlib.Path) -> None:
    """Writes the 8 files below `folder`; files that exist are kept."""
    filler = "A baker sells loaves, rolls and cakes on every day of the week, and counts what is left in the evening. "
    for k in range(8):
        file = folder / f"s{k}.jsonl"
        if file.exists():
            continue
        with file.open("w") as out:
            for i in range(125_000):
                row = {
                    "question": f"{k} plus {i} is how many?",
                    "answer": str(i + k),
                    "source_text": filler * 8,
                    "id": i,
                }
                out.write(json.dumps(row) + "\n")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    started, used = time.monotonic(), time.process_time()
    import podrl
    from podrl.data.pipeline import DataConfig, PromptStream
    from podrl.data.pools import CurriculumConfig
    from podrl.data.tokenizer import Tokenizer

    imported = time.monotonic() - started
    sources = tuple({"path": str(folder / f"s{k}.jsonl"), "weight": 1.0 + k} for k in range(8))
    config = DataConfig(sources=sources, cache=str(folder / "cache"), system_prompt="")  # pyright: ignore[reportArgumentType]
    stream = PromptStream.from_config(config, Tokenizer(podrl.TINY), prompts_per_step=8, max_prompt_length=256)
    next(stream)
    wall, cpu = time.monotonic() - started, time.process_time() - used
    said = batches(stream)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(f"start {wall:.1f} s (imports {imported:.1f} s, CPU {cpu:.1f} s), peak {peak:.0f} MB, {said}\n")
    rates = CurriculumConfig(easy_share=0.1, hard_share=0.2, retire_after=3, postpone_after=2)
    chosen = dataclasses.replace(config, curriculum=rates)
    stream = PromptStream.from_config(chosen, Tokenizer(podrl.TINY), prompts_per_step=8, max_prompt_length=256)
    assert stream.curriculum is not None
    stream.curriculum.recall(trained_on(stream.curriculum.records))
    next(stream)
    sys.stdout.write(f"with a curriculum and all trained on: {batches(stream)}\n")


def batches(stream: Iterator[Any]) -> str:
    """Draws 500 batches; returns their median and longest time in words."""
    times = []
    for _ in range(500):
        begun = time.monotonic()
        next(stream)
        times.append(time.monotonic() - begun)
    times.sort()
    return f"batch of 8: median {1e3 * times[250]:.2f} ms, slowest of 500 {1e3 * times[-1]:.2f} ms"


def trained_on(records: int, steps: int = 1000) -> dict[str, np.ndarray]:
    """Returns the state of a curriculum that has trained on all records, as checkpoints hold it."""
    random = np.random.default_rng(0)
    numbers = {name: random.integers(0, 4, records).astype(np.int32) for name in ("solved", "failed")}
    numbers |= {"ids": np.arange(records), "last": random.integers(0, steps, records)}
    none = {name: np.zeros(0, np.int64) for name in ("newer_step", "newer_ids", "newer_rate")}
    rates = {"rate": random.choice([0.0, 0.25, 0.5, 1.0], records).astype(np.float32)}
    return numbers | rates | none | {"range": np.array([steps, steps])}


if __name__ == "__main__":
    main()
