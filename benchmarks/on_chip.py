"""Measures a GPU or TPU host without downloads: `python -m benchmarks on_chip --minutes=25 --out=DIR`.

Every part is a command of its own, so a part that fails, or takes the device's memory, does not end the others. The
result of a part is on disk before the next part begins: when started again, the benchmark goes on with the parts that
failed or were not begun.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import chip_table, grpo

_SIZES = ("qwen3-0.6b", "gemma3-1b")
_TINY = ["--layers=2", "--dim=32", "--ffn=32", "--heads=2", "--kv_heads=1", "--head_dim=128", "--vocab=640"]
# With at least this many bytes of device memory all parameters of a model are trained, with fewer only adapters.
_ROOMY = 40 << 30
_LEAST_S = 20.0  # seconds; a part is not begun with less time left


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement, which is a command of its own.

    Attributes:
      name: name of the part, and of its file of results.
      command: the words after `python -m`.
      minutes: expected duration, compiling included.
    """

    name: str
    command: Sequence[str]
    minutes: float


def parts(device: Mapping[str, Any], place: pathlib.Path, *, tiny: bool = False) -> list[Part]:
    """Lists the parts, the most important first.

    Args:
      device: result of `benchmarks device`; each part uses all its devices.
      place: the directory of results, which also keeps the random weights.
      tiny: True to use shapes that a CPU runs in seconds.
    """
    found = [Part("kernels", _bench("kernels", *(_tiny_kernels() if tiny else ())), 2)]
    for size in ("tiny",) if tiny else _SIZES:
        found += _of_size(size, device, place)
    found.sort(key=lambda part: (part.name.endswith(_SIZES[1]), part.name.startswith("grpo")))
    return found


def _of_size(size: str, device: Mapping[str, Any], place: pathlib.Path) -> list[Part]:
    tiny, devices = size == "tiny", device["devices"]
    model = [*_TINY, "--devices=1"] if tiny else [f"--size={size}"]
    drawn = ["--prompt_len=9", "--max_new=12", "--repeats=1", "--page_tokens=16"] if tiny else ["--prompt_len=256"]
    drawn += [] if tiny else ["--max_new=512"]
    dtype = "--dtype=bfloat16"
    mesh = f"--mesh=data={devices}"
    found = []
    for lanes in (1, 4) if tiny else (1, 32, 128):
        samples = [
            f"--prompts={max(lanes // 8, 1) * devices}",
            f"--group={min(lanes, 8)}",
            f"--lanes={lanes * devices}",
        ]
        found.append(Part(f"decode-{lanes}-{size}", _bench("rollout", *model, *samples, *drawn, mesh, dtype), 2))
    lengths = ["--prompt_len=9", "--completion_len=1:12", "--prompts=2", "--group=2", "--steps=2"]
    lengths = lengths if tiny else ["--prompt_len=256", "--completion_len=512", "--prompts=8", "--group=8", "--steps=3"]
    found.append(Part(f"update-{size}", _bench("step", *model, *lengths, f"--src=fsdp={devices}", dtype), 3))
    agreed = [*model, "--prompts=2", "--group=4", *drawn, mesh, dtype, "--embed_scale=4"]
    found.append(Part(f"agree-{size}", _bench("agree", *agreed), 2))
    moved = [f"--src=fsdp={devices}", f"--dst=tensor={devices}", "--src_dtype=float32", "--dst_dtype=bfloat16"]
    found.append(Part(f"move-{size}", _bench("reshard", *model, *moved, *(["--repeats=3"] if tiny else [])), 2))
    job = ["--prompts=2", "--group=2", "--max_new=12", "--steps=4", "--prompt_words=3:9"] if tiny else []
    job += [] if tiny or device["memory_bytes"] * devices >= _ROOMY else ["--lora_rank=32"]
    for staleness in (0, 1, 2):
        own = [f"--staleness={staleness}", f"--weights={place / f'weights-{size}'}"]
        found.append(Part(f"grpo-S{staleness}-{size}", _bench("grpo", *model, *job, *own, dtype), 4))
    if device["topology"] and not tiny:
        found.append(Part(f"grpo-plan-{size}", grpo.plan([*model, *job, dtype], device["topology"]), 2))
    return found


def _bench(name: str, *options: str) -> list[str]:
    return ["benchmarks", name, *options, "--json"]


def _tiny_kernels() -> list[str]:
    return ["--tokens=256", "--heads=2", "--kv_heads=1", "--window=60", "--lanes=4", "--pages=2"]


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the parts that fit into the time, and writes DIR/NAME.json for each and the table DIR/chips.md.

    Returns:
      done, failed, left: names of the parts that ended well, that failed, and for which no time was left.
      table: path of the table.
      minutes: minutes that this call took.

    Raises:
      ValueError: no device could be measured.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks on_chip", description="Fills a table about one GPU or TPU host."
    )
    parser.add_argument(
        "--minutes", type=float, default=25, help="minutes after which the command ends; call it again for more"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="results; parts with a result are not run again")
    parser.add_argument("--parts", default="", help="only parts whose names begin with one of these (A,B,...)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the command itself")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    place = pathlib.Path(args.out)
    place.mkdir(parents=True, exist_ok=True)
    host = Host(place, args.minutes)
    device = host.measure(Part("device", _bench("device"), 1))
    if "figures" not in device:
        raise ValueError(f"No device could be measured: {device['error']}")
    chosen = tuple(args.parts.split(","))
    wanted = [part for part in parts(device["figures"], place, tiny=args.tiny) if part.name.startswith(chosen)]
    found, left = host.measure_all(wanted)
    table = place / "chips.md"
    _write(table, chip_table.table({"device": device, **found}))
    failed = [name for name, result in found.items() if "error" in result]
    for name in failed:
        print(f"{name} failed: {found[name]['error'].splitlines()[-1]}", file=sys.stderr)
    if left:
        minutes = sum(part.minutes for part in left)
        names = ", ".join(part.name for part in left)
        print(f"Time was over before {names}: start the command again with --minutes={minutes:.0f}.", file=sys.stderr)
    return {
        "done": [name for name in found if name not in failed],
        "failed": failed,
        "left": [part.name for part in left],
        "table": str(table),
        "minutes": host.minutes(),
    }


class Host:
    """Runs parts one after the other on this host, and keeps their results."""

    def __init__(self, place: pathlib.Path, minutes: float, clock: Callable[[], float] = time.monotonic):
        """Starts the clock of a call that may take `minutes`; `place` is the directory of results."""
        self._place, self._limit_s, self._clock, self._started = place, 60 * minutes, clock, clock()

    def minutes(self) -> float:
        """Returns the minutes since the start."""
        return (self._clock() - self._started) / 60

    def measure_all(self, wanted: Sequence[Part]) -> tuple[dict[str, Any], list[Part]]:
        """Runs the parts that have no result yet and fit into the time: (results by name, parts that did not fit)."""
        found, left = {}, []
        for part in wanted:
            kept = self._kept(part)
            room_s = self._limit_s - 60 * self.minutes()
            if kept is None and room_s < max(60 * part.minutes / 2, _LEAST_S):
                left.append(part)
                continue
            found[part.name] = kept or self.measure(part)
        return found, left

    def measure(self, part: Part) -> Mapping[str, Any]:
        """Returns the kept result of a part, or runs the part and writes its result to disk."""
        if (kept := self._kept(part)) is not None:
            return kept
        room_s = max(self._limit_s - 60 * self.minutes(), _LEAST_S)
        print(f"{part.name}: about {part.minutes:g} minutes, {room_s / 60:.0f} left", file=sys.stderr)
        began = self._clock()
        result = {"command": list(part.command), **_run(part.command, room_s), "seconds": self._clock() - began}
        _write(self._place / f"{part.name}.json", json.dumps(result, indent=1))
        return result

    def _kept(self, part: Part) -> Mapping[str, Any] | None:
        """Returns the result of an earlier call with the same options; None if there is none or it failed."""
        file = self._place / f"{part.name}.json"
        if not file.exists():
            return None
        result = json.loads(file.read_text())
        return result if result["command"] == list(part.command) and "figures" in result else None


def _run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Runs a command and returns its figures, or its last lines as the error."""
    root = str(pathlib.Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=env, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"It took longer than the {limit_s:.0f} s that were left."}
    if done.returncode not in (0, 1) or not done.stdout.strip():  # podrl.plan ends with 1 when the job does not fit
        return {"error": "\n".join(done.stderr.strip().splitlines()[-15:]) or f"It ended with {done.returncode}."}
    return {"figures": json.loads(done.stdout.strip().splitlines()[-1])}


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file at once: a reader sees the whole file or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
