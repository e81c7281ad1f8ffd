"""The doctor: reads or watches a run directory and reports what is wrong with the run, the earliest problem first.

    python -m podrl.doctor RUN [--watch=SECONDS] [--json]

RUN is a local directory or gs://. Each finding states its step, the observation, what it means and which key to turn;
docs/doctor.md lists all findings. Exit code 0: nothing was found. 1: something was found, or the run cannot be read.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from podrl.config import plural
from podrl.rundir.checks import CHECKS
from podrl.rundir.console import make_console
from podrl.rundir.findings import Finding, examine
from podrl.rundir.history import WINDOW
from podrl.rundir.metrics import read_records
from podrl.runtime.arguments import Parser, as_sentence
from podrl.runtime.watchdog import EXIT_DONE, EXIT_USER
from podrl.storage.storage import StorageError, check, locate


def watch(run: str, wait: Callable[[], object]) -> Iterator[Finding]:
    """Yields the findings of a run while it goes on, each once, until the run has written its summary.

    Args:
      run: directory of the run, local or gs://.
      wait: function that is called between two looks at the run.
    """
    known: set[str] = set()
    while True:
        ended = (locate(run) / "summary.json").exists()
        for finding in examine(run):
            if finding.name not in known:
                known.add(finding.name)
                yield finding
        if ended:
            return
        wait()


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.doctor", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, or gs://")
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="seconds between two looks, until the run has ended"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per finding")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    args = _parser().parse_args(argv)
    console, found = make_console(120), 0
    try:
        if args.watch is not None and not args.watch > 0:
            raise ValueError(f"--watch={args.watch:g}: give seconds above 0.")
        check(args.run, "RUN")
        seen = watch(args.run, lambda: time.sleep(args.watch)) if args.watch else examine(args.run)
        for found, finding in enumerate(seen, 1):
            if args.json:
                console.file.write(json.dumps(dataclasses.asdict(finding)) + "\n")
            else:
                console.print(f"{found}. {finding.report()}")
            console.file.flush()
    except KeyboardInterrupt:
        pass
    except (ValueError, OSError, ImportError, StorageError) as error:
        sys.stderr.write(f"podrl.doctor: error: {as_sentence(error)}\n")
        return EXIT_USER
    if not found and not args.json:
        steps = sum("time/step" in record for record in read_records(args.run, "metrics.jsonl"))
        console.print(f"Nothing found: {len(CHECKS)} checks over {plural(steps, 'step')} of {args.run}.")
        if steps < 2 * WINDOW:
            console.print(f"Many checks compare steps: they need {WINDOW} to {2 * WINDOW} steps to find anything.")
    return EXIT_USER if found else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
