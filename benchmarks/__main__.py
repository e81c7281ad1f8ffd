"""Runs a benchmark: `python -m benchmarks NAME [options]`."""

import importlib
import json
import sys
from collections.abc import Sequence

from podrl.config import nearest

BENCHES = (
    *(
        "agents",
        "agree",
        "compiles",
        "decode",
        "device",
        "experts",
        "front",
        "growth",
        "grpo",
        "kernels",
        "on_chip",
        "peers",
        "pod",
        "reshard",
        "rollout",
        "step",
    ),
    *("tools", "trace", "waits"),
)


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark and prints its figures: one JSON object with --json, else a line each."""
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        print(__doc__, f"Each has its own --help: {', '.join(f'benchmarks {one} --help' for one in BENCHES)}", sep="\n")
        return 0 if len(argv) > 1 else 1
    if argv[1] not in BENCHES:
        print(f"benchmarks: there is no benchmark {argv[1]!r}.{nearest(argv[1], BENCHES)}", file=sys.stderr)
        return 1
    try:
        figures = importlib.import_module(f"benchmarks.{argv[1]}").run(argv[2:])
    except ValueError as error:
        print(f"benchmarks {argv[1]}: error: {error}", file=sys.stderr)
        return 1
    if "--json" in argv:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
