"""Measures a job by podrl and by a peer, in turns on this machine: `python -m benchmarks peers --peer=trl --out=DIR`.

The peer's environment is built in DIR once. Other work of the machine slows both sides alike, so the ratios say more
than the seconds.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.trl_job import REWARDS

_HERE = pathlib.Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_SKIPPED = 2  # number of first steps that do not count, because podrl compiles in them


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Runs both sides and compares them.

    With `--peer=trl`: the default job's model, prompts, rewards and batch, by TRL's GRPOTrainer and by podrl.launch.
    With `--peer=tunix`: generation by Tunix's sampler and by podrl's engine, which tests/parity/compare_tunix.py
    compares; the options of this script go behind `--`.

    Returns:
      With TRL, for each side: SIDE_step_s (seconds of a step, median of the rounds), SIDE_rounds (seconds of a step in
      each round), SIDE_first_reward and SIDE_last_reward (means over the first and the last quarter of the steps) and
      SIDE_tokens (mean length of a completion). Then ratio (TRL's step over podrl's, median of the rounds) and the
      versions of TRL's packages. With Tunix, the figures that compare_tunix.py prints.

    Raises:
      ValueError: an environment cannot be built, or a side failed; the message has the side's last lines.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--peer", required=True, choices=("trl", "tunix"))
    parser.add_argument("--out", required=True, metavar="DIR", help="environments and runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("more", nargs="*", help="with --peer=tunix: options of compare_tunix.py, behind --")
    args = parser.parse_args(argv)
    place = pathlib.Path(args.out).resolve()
    python = _environment(place, args.peer)
    if args.peer == "tunix":
        script = _ROOT / "tests" / "parity" / "compare_tunix.py"
        return json.loads(_output([sys.executable, str(script), f"--tunix_python={python}", *args.more]))
    return _with_trl(args, place, python)


def _environment(place: pathlib.Path, peer: str) -> pathlib.Path:
    """Returns the interpreter of a peer's environment; builds the environment if it is missing or unfinished."""
    directory = place / f"env-{peer}"
    wanted, built = (_HERE / f"{peer}.txt").read_text(), directory / "built.txt"
    if not built.exists() or built.read_text() != wanted:
        print(f"Building the environment of {peer} in {directory}", file=sys.stderr)
        _output([sys.executable, "-m", "venv", "--clear", str(directory)])
        _output([str(directory / "bin" / "pip"), "install", "--quiet", "-r", str(_HERE / f"{peer}.txt")])
        built.write_text(wanted)
    return directory / "bin" / "python"


def _with_trl(args: argparse.Namespace, place: pathlib.Path, python: pathlib.Path) -> dict[str, Any]:
    from podrl.data.config import EMBEDDED, PROBLEMS
    from podrl.job.config import TINY

    data = place / "problems.jsonl"
    problems = EMBEDDED[PROBLEMS].source("train", 16 * (args.steps + 1))
    lines = (
        json.dumps({"question": p.question, "answer": p.answer})
        for p in map(problems.__getitem__, range(len(problems)))
    )
    data.write_text("".join(f"{line}\n" for line in lines))
    rounds: dict[str, list[Mapping[str, Any]]] = {"podrl": [], "trl": []}
    for number in range(args.rounds):
        # The directory is new, because podrl.launch would continue a finished run, and nothing would be measured.
        with tempfile.TemporaryDirectory() as workdir:
            rounds["podrl"].append(_podrl(args, data, pathlib.Path(workdir)))
        command = [str(python), str(_HERE / "trl_job.py"), f"--model={TINY}", f"--data={data}", f"--steps={args.steps}"]
        rounds["trl"].append(json.loads(_output(command).strip().splitlines()[-1]))
        print(
            f"round {number}: {[f'{name} {_step_s(side[-1]):.3f} s' for name, side in rounds.items()]}", file=sys.stderr
        )
    return compared(rounds)


def compared(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Compares the rounds of both sides; a round has step_s and rewards, both by step, and tokens."""
    found: dict[str, Any] = {}
    for name, side in rounds.items():
        steps = [_step_s(one) for one in side]
        quarter = max(len(side[0]["rewards"]) // 4, 1)
        found |= {
            f"{name}_step_s": statistics.median(steps),
            f"{name}_rounds": [round(step, 4) for step in steps],
            f"{name}_first_reward": statistics.mean(r for one in side for r in one["rewards"][:quarter]),
            f"{name}_last_reward": statistics.mean(r for one in side for r in one["rewards"][-quarter:]),
            f"{name}_tokens": statistics.mean(one["tokens"] for one in side),
        }
    pairs = zip(rounds["trl"], rounds["podrl"], strict=True)
    found["ratio"] = statistics.median(_step_s(theirs) / _step_s(ours) for theirs, ours in pairs)
    return found | {"versions": rounds["trl"][0].get("versions", {})}


def _step_s(one: Mapping[str, Any]) -> float:
    return statistics.median(one["step_s"][_SKIPPED:])


def _podrl(args: argparse.Namespace, data: pathlib.Path, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs the job by podrl.launch and reads its metrics."""
    settings = {
        "data.path": data,
        "data.system_prompt": "",
        "data.eval_fraction": 0.0,
        "reward.fns": REWARDS,
        "trainer.max_steps": args.steps,
        "trainer.eval_every_n_steps": 0,
        "eval.problems": 0,
        "log.to": (),
    }
    options = [f"--config.{name}={value}" for name, value in settings.items()]
    config = _ROOT / "configs" / "grpo_gemma.py"
    _output([sys.executable, "-m", "podrl.launch", f"--config={config}", f"--workdir={workdir}", *options])
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    return {
        "step_s": [record["time/step"] for record in steps],
        "rewards": [record["reward/mean"] for record in steps],
        "tokens": statistics.mean(record["completion/length_mean"] for record in steps),
    }


def _output(command: Sequence[str]) -> str:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise ValueError("\n".join([f"{' '.join(command)} ended with {done.returncode}:", *lines]))
    return done.stdout
