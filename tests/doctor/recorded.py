"""Recorded runs for tests: their configuration, metrics and samples, in one small file.

`python tests/doctor/recorded.py DIR ...` writes the file from run directories; each run keeps its directory's name.
"""

import copy
import functools
import json
import lzma
import pathlib
import sys
from typing import Any

FILE = pathlib.Path(__file__).parent / "recorded.json.xz"


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    return json.loads(lzma.decompress(FILE.read_bytes()))


def names() -> list[str]:
    return sorted(_all())


def run(name: str) -> dict[str, Any]:
    """Returns a run's `config`, `metrics` and `samples`, which the test may change."""
    return copy.deepcopy(_all()[name])


def write(content: dict[str, Any], directory: pathlib.Path) -> str:
    """Writes a run directory; returns its path."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content["config"]))
    for name in ("metrics", "samples"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in content[name]))
    return str(directory)


def _read(directory: pathlib.Path) -> dict[str, Any]:
    lines = {name: (directory / f"{name}.jsonl").read_text().split("\n")[:-1] for name in ("metrics", "samples")}
    records = {name: [json.loads(line, parse_float=_short) for line in found] for name, found in lines.items()}
    return {"config": json.loads((directory / "config.json").read_text()), **records}


def _short(number: str) -> float:
    return float(f"{float(number):.6g}")


if __name__ == "__main__":
    found = {path.name: _read(path) for path in map(pathlib.Path, sys.argv[1:])}
    FILE.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
