"""Measures a mixture of 1 million prompts in 8 JSONL files (1 GB): `python tests/data/measure_mixture.py DIR`.

Run twice: the first start reads the files, the second uses the cache in DIR. Prints seconds of the start (wall clock
and this process's CPU), the process's peak memory, and milliseconds of a batch of 8 prompts.
"""

import json
import pathlib
import resource
import sys
import time


def write(folder: pathlib.Path) -> None:
    """Writes the files, unless they are there."""
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
    from podrl.data.tokenizer import Tokenizer

    imported = time.monotonic() - started
    sources = tuple({"path": str(folder / f"s{k}.jsonl"), "weight": 1.0 + k} for k in range(8))
    config = DataConfig(sources=sources, cache=str(folder / "cache"), system_prompt="")  # pyright: ignore[reportArgumentType]
    stream = PromptStream.from_config(config, Tokenizer(podrl.TINY), prompts_per_step=8, max_prompt_length=256)
    next(stream)
    wall, cpu = time.monotonic() - started, time.process_time() - used
    times = []
    for _ in range(500):
        begun = time.monotonic()
        next(stream)
        times.append(time.monotonic() - begun)
    times.sort()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        f"start {wall:.1f} s (imports {imported:.1f} s, CPU {cpu:.1f} s), peak {peak:.0f} MB, batch of 8: median "
        f"{1e3 * times[250]:.2f} ms, slowest of 500 {1e3 * times[-1]:.2f} ms\n"
    )


if __name__ == "__main__":
    main()
