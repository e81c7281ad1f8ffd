"""The command that writes tasks of the package verifiers as records, which env.verifiers plays.

    python -m podrl.verifiers TASKSET --python=vf/bin/python --out=tasks.jsonl [--env=JSON] [--limit=N]

TASKSET is a package with tasks. It is installed together with verifiers in a separate Python environment, and --python
is the interpreter of this environment. docs/ecosystems.md describes the rest.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from podrl.config import plural
from podrl.environments.config import VERIFIERS_AGENT
from podrl.environments.verifiers_agent import REFUSED
from podrl.runtime.arguments import Parser
from podrl.runtime.watchdog import EXIT_DONE, EXIT_USER

_DEADLINE_S = (
    3600.0  # longest time for which verifiers may run; a taskset may download its data before its first record
)


def write(taskset: str, python: str, out: pathlib.Path, env: Mapping[str, object], limit: int | None) -> int:
    """Writes a record for each task of a taskset; `out` appears once all records are written.

    Args:
      taskset: name of the taskset.
      python: interpreter of the environment that has verifiers and the taskset.
      out: file of the records, one JSON object per line.
      env: further settings of the [env] block of verifiers' configuration.
      limit: largest number of records; None for all tasks.

    Returns:
      Number of records.

    Raises:
      ValueError: the taskset cannot be loaded (the message ends with verifiers' own error) or has no tasks; `python` or
        `out` cannot be used; or verifiers has not written all records within an hour.
    """
    own = env.get("taskset", {})
    if not isinstance(own, Mapping):
        raise ValueError(f'--env: taskset={own!r} must be an object of settings, such as {{"split": "train"}}.')
    block = {**env, "taskset": {**own, "id": taskset}}
    command = [python, "-P", str(VERIFIERS_AGENT), json.dumps(block), *([] if limit is None else [str(limit)])]
    partial = out.with_name(f"{out.name}.part")
    try:
        with partial.open("wb") as file:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, check=False, timeout=_DEADLINE_S
            )
        if done.returncode == REFUSED:
            raise ValueError(f"{taskset}: {done.stderr.decode(errors='replace').rstrip().rpartition(chr(10))[2]}")
        if done.returncode:
            raise ValueError(
                f"{taskset} cannot be read with {python}. It must be installed there beside verifiers (0.4 or later), "
                f"and --env must hold its settings:\n{done.stderr.decode(errors='replace')[-2000:]}"
            )
        with partial.open("rb") as lines:
            count = sum(1 for _ in lines)
        if not count:
            raise ValueError(f"{taskset} has no tasks with --env={json.dumps(env)}.")
        os.replace(partial, out)
        return count
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{taskset} was not written in full within {_DEADLINE_S:g} s. Tasks that never end need --limit=N."
        ) from error
    except OSError as error:
        raise ValueError(f"--python={python} or --out={out}: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.verifiers", __doc__)
    parser.add_argument("taskset", metavar="TASKSET", help="name of the taskset, as verifiers knows it")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has verifiers")
    parser.add_argument("--out", required=True, help="file of the records, such as tasks.jsonl")
    parser.add_argument(
        "--env",
        default="{}",
        metavar="JSON",
        help="further settings of verifiers' [env] block, such as "
        '\'{"taskset": {"split": "train"}, "agent": {"harness": {"id": "null"}}}\'',
    )
    parser.add_argument("--limit", type=int, default=None, help="largest number of records; needed if tasks never end")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        env = json.loads(args.env)
        if not isinstance(env, dict):
            raise ValueError(f"--env={args.env} must be a JSON object.")
        if args.limit is not None and args.limit < 1:
            raise ValueError(f"--limit={args.limit} must be at least 1.")
        count = write(args.taskset, args.python, pathlib.Path(args.out), env, args.limit)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    sys.stdout.write(
        f"{args.out} has {plural(count, 'record')}. To train on them:\n"
        f"python -m podrl.launch --config=grpo_agents.py --config.env.program='' --config.env.verifiers={args.python} "
        f"--config.data.path={args.out} --config.reward.fns='()'\n"
    )
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
