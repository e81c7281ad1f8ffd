"""Replays a recorded step: repeats its batch and update bitwise, or with changed settings.

    python -m podrl.replay RUN --step=N [--start=0] [--change=grpo.beta=0.1 ...] [--keep=DIR] [flags of podrl.launch]

The replay starts from the run's newest checkpoint before step N, or with --start=0 from the run's beginning. It repeats
the steps up to N. With rollout.clock='wall', the clock's decisions are read from the run's journal. RUN is only read.

Without --change, the metrics of the step must equal the recorded metrics bitwise. If the run has a checkpoint of N, its
weights and optimizer state must be equal, too. With --change, the batch of the step is sampled as in the run. The step
is then trained twice: with the run's settings, and with the changed ones. The command shows the metrics with changed
settings beside the recorded metrics, and compares the weight and clip of each token between the two trainings.

The run's code, data, model, processes (--local_processes) and kind of devices must be available. Exit code 0: the step
is equal, or the comparison was shown. 1: the step is different, or the replay was not possible.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from podrl.config import former
from podrl.mappings import ConfigValues, JsonObject
from podrl.rollout.journal import NAME as BATCHES
from podrl.rundir import identity, trace, weights
from podrl.rundir.console import make_console, print_table
from podrl.rundir.history import kind_of
from podrl.rundir.metrics import read_metrics
from podrl.runtime.arguments import Parser, as_sentence
from podrl.runtime.watchdog import EXIT_DONE, EXIT_USER
from podrl.storage.storage import complete_steps, is_remote

_CLOCKS = re.compile(
    r"time/|perf/|pod/|rollout/tokens_per_s|episode/seconds|tools/.*/seconds|data/skipped_prompts|step$"
)
# None of these settings changes a step (podrl/rundir/identity.py). Every step is saved, because a replay with --change
# starts from the checkpoint of the step before.
_QUIET = (
    "log.trace=off",
    "checkpoint.every=1",
    "trainer.eval_every_n_steps=0",
)
_FIRST = ("actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ratio", "actor/kl", "actor/approx_kl")
_CONFIG = '''"""The configuration of a recorded run, replayed by podrl.replay."""

import json
import pathlib

from ml_collections import ConfigDict


def get_config():
    return ConfigDict(json.loads(pathlib.Path(__file__).with_name("recorded.json").read_text()))
'''


@dataclasses.dataclass(frozen=True)
class ReplayedStep:
    """A step that was repeated.

    Attributes:
      start: step of the checkpoint from which the replay started; 0 for the beginning of the run.
      recorded: metrics of the step in the run, and the checksums of its checkpoint if checkpoints are compared.
      found: metrics and checksums of the step in the replay.
      tokens: comparison of the step's tokens without and with changed settings, or the reason why they cannot be
        compared; None without changed settings.
    """

    start: int
    recorded: JsonObject
    found: JsonObject
    tokens: weights.WeightComparison | str | None


def replay(
    run: pathlib.Path,
    step: int,
    changes: Sequence[str],
    scratch: pathlib.Path,
    flags: Sequence[str],
    begin: int | None = None,
) -> ReplayedStep:
    """Repeats a step; with changed settings, trains on its batch twice, without and with the changes.

    Args:
      run: directory of the run.
      step: number of the step.
      changes: changed settings of the step, each KEY=VALUE; empty for an exact replay.
      scratch: an empty directory for the replay's own runs.
      flags: further flags for podrl.launch.
      begin: step of the checkpoint to start from; 0 starts from the beginning of the run, None from the newest
        checkpoint before the step.

    Raises:
      ValueError: there is no such run, step or checkpoint, a change names no key, or the replay ended before the step.
    """
    if is_remote(run):
        raise ValueError(f"{run} is in a bucket: copy it here, with its newest checkpoint before step {step}.")
    config = identity.read(run, run / "checkpoints")
    if config is None:
        raise ValueError(
            f"{run} is not a run directory: it holds no config.json. Give the directory that was passed as --workdir."
        )
    recorded = _of_step(run, step)
    if recorded is None:
        steps = [record["step"] for record in read_metrics(run) if kind_of(record) == "step"]
        known = f"metrics.jsonl has steps {steps[0]} to {steps[-1]}" if steps else "metrics.jsonl has none"
        raise ValueError(f"--step={step} was not recorded in {run}: {known}.")
    saved = [saved for saved in complete_steps(run / "checkpoints") if saved < step]
    start = max(saved, default=0) if begin is None else begin
    if start not in (0, *saved):
        allowed = f"0 or one of {saved}" if saved else "0"
        raise ValueError(f"--start={start} is not a checkpoint of {run} before step {step}: use {allowed}.")
    logged = {key: value for key, value in (config.get("log") or {}).items() if not former(f"log.{key}")}
    # The lists eval.sets and log.to are emptied here, because no flag of podrl.launch can empty a list in the JSON.
    config = {**config, "eval": {**(config.get("eval") or {}), "sets": []}, "log": {**logged, "to": []}}
    (scratch / "recorded.json").write_text(json.dumps(config))
    (scratch / "replay.py").write_text(_CONFIG)
    problems = min(int((config.get("eval") or {}).get("problems", 0)), 1)  # 0 would also remove the metrics of accuracy
    quiet = (*_QUIET, f"checkpoint.keep={step + 1}", f"eval.problems={problems}", "eval.samples=1")
    again, values = scratch / "run", [f"--config.{value}" for value in quiet]
    _prepare(run, again, start, config)
    if not changes:
        weighed = step in complete_steps(run / "checkpoints")
        _launch(scratch, again, [*values, *flags], lambda: _done(again, step, weighed))
        found = _of_step(again, step) or {}
        if weighed:
            recorded, found = {**recorded, **_sums(run, step)}, {**found, **_sums(again, step)}
        return ReplayedStep(start, recorded, found, None)
    if start < step - 1:
        _launch(scratch, again, [*values, *flags], lambda: step - 1 in complete_steps(again / "checkpoints"))
    source = again if start < step - 1 else run
    both = {scratch / "unchanged": (), scratch / "changed": changes}
    for workdir, own_changes in both.items():
        _prepare(source, workdir, step - 1, _changed(config, own_changes))
        settings = [*values, "--config.log.trace=updates", *(f"--config.{change}" for change in own_changes)]
        _launch(scratch, workdir, [*settings, *flags], functools.partial(_done, workdir, step))
    return ReplayedStep(start, recorded, _of_step(scratch / "changed", step) or {}, _tokens(*both, step=step))


def _done(workdir: pathlib.Path, step: int, saved: bool = False) -> bool:
    """Returns True once the metrics of the step are recorded and, with `saved`, its checkpoint is complete."""
    return _of_step(workdir, step) is not None and (not saved or step in complete_steps(workdir / "checkpoints"))


def _tokens(before: pathlib.Path, now: pathlib.Path, *, step: int) -> weights.WeightComparison | str:
    """Compares the tokens of a step in the traces of two runs; returns the reason as text if this is not possible."""
    try:
        return weights.compare(*(trace.read_step(workdir, step) for workdir in (before, now)))
    except ValueError as error:
        return str(error)


def _prepare(run: pathlib.Path, target: pathlib.Path, step: int, config: ConfigValues) -> None:
    """Makes a run directory that continues from a checkpoint of another run.

    Args:
      run: directory of the other run.
      target: directory to make.
      step: step of the checkpoint; 0 for a run from the beginning.
      config: configuration that the new run is to have.
    """
    target.mkdir()
    if step:
        shutil.copytree(run / "checkpoints" / str(step), target / "checkpoints" / str(step))
        identity.write(target, config)
        kept = "".join(json.dumps(record) + "\n" for record in read_metrics(run) if record["step"] <= step)
        (target / "metrics.jsonl").write_text(kept)
    if (run / "outside").is_dir():  # the recorded answers of tools
        shutil.copytree(run / "outside", target / "outside")
    if (run / BATCHES).is_file():  # the recorded decisions of the clock
        shutil.copy(run / BATCHES, target / BATCHES)


def _launch(scratch: pathlib.Path, workdir: pathlib.Path, flags: Sequence[str], is_done: Callable[[], bool]) -> None:
    """Runs the training command until `is_done` returns True.

    Args:
      scratch: directory of the configuration and the output.
      workdir: directory of the new run.
      flags: flags of podrl.launch.
      is_done: function that returns True once the new run has made the step.

    Raises:
      ValueError: the command ended before the new run made the step.
    """
    command = [sys.executable, "-m", "podrl.launch", f"--config={scratch / 'replay.py'}", f"--workdir={workdir}"]
    with (scratch / "output.txt").open("a") as output:
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not is_done():
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()  # podrl.launch then saves its step and ends
                process.wait()
    if not is_done():
        last = (scratch / "output.txt").read_text(errors="replace").strip().split("\n")[-1]
        raise ValueError(f"the replay ended with exit code {process.returncode} before its step: {last}")


def _sums(workdir: pathlib.Path, step: int) -> JsonObject:
    """Reads the checksums of the weights and the optimizer state in a checkpoint."""
    from podrl.storage.record import CheckpointRecord  # imports jax

    state = CheckpointRecord.read(workdir / "checkpoints" / str(step)).state or {}
    return {f"checkpoint/{name}": total for name, total in state.items()}


def _of_step(workdir: pathlib.Path, step: int) -> JsonObject | None:
    """Reads the metrics of a step, without metrics that depend on clocks or the process; None if the step is not
    recorded."""
    for record in read_metrics(workdir):
        if record["step"] == step and kind_of(record) == "step":
            return {name: value for name, value in record.items() if not _CLOCKS.match(name)}
    return None


def _changed(config: ConfigValues, changes: Sequence[str]) -> ConfigValues:
    """Applies changes of the form KEY=VALUE to a configuration, with values as config.json would hold them.

    Raises:
      ValueError: a change is not of this form, or the configuration has no such key.
    """
    changed = json.loads(json.dumps(config))
    for change in changes:
        key, equals, text = change.partition("=")
        *groups, name = key.split(".")
        section = changed
        for group in groups:
            section = section.get(group) if isinstance(section, dict) else None
        if not equals or not isinstance(section, dict) or name not in section:
            raise ValueError(f"--change={change} must be KEY=VALUE of a key that the run's configuration has.")
        try:
            value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        except ValueError:
            value = text
        section[name] = float(value) if isinstance(section[name], float) and isinstance(value, int) else value
    return changed


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.replay", __doc__)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help="a run directory")
    parser.add_argument("--step", type=int, required=True, help="number of the step in metrics.jsonl")
    parser.add_argument("--start", type=int, metavar="STEP", help="a checkpoint of the run, or 0 for its beginning")
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting to change; may be given several times",
    )
    parser.add_argument("--keep", type=pathlib.Path, help="a new directory for the replay's own files")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    args, flags = _parser().parse_known_args(argv)
    console = make_console(120)
    with tempfile.TemporaryDirectory(prefix="podrl-replay-") as temporary:
        try:
            if args.keep is not None:
                args.keep.mkdir(parents=True)
            scratch = args.keep or pathlib.Path(temporary)
            done = replay(args.run, args.step, args.change, scratch, flags, args.start)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"podrl.replay: error: {as_sentence(error)}\n")
            return EXIT_USER
    start, old, new = done.start, done.recorded, done.found
    names = sorted(old.keys() | new.keys(), key=lambda name: (name not in _FIRST, name))
    other = [name for name in names if old.get(name) != new.get(name)]
    source = f"checkpoint {start}" if start else "the beginning"
    sums = " and checksums of the weights" if any(name.startswith("checkpoint/") for name in names) else ""
    equal = f"{len(names) - len(other)} of {len(names)} metrics{sums} are equal"
    console.print(f"Step {args.step} again, from {source}: {equal}.")
    if other:
        rows = [[name, _shown(old.get(name)), _shown(new.get(name))] for name in other]
        print_table(console, ", ".join(args.change) or "Different", ["metric", "recorded", "again"], rows)
    if isinstance(done.tokens, str):
        console.print(f"No table of tokens: {done.tokens}.")
    elif done.tokens is not None:
        title = "Tokens in the loss by the sign of their advantage; weight is -d loss / d logprob, means over passes"
        print_table(console, title, weights.COUNTS, done.tokens.counts)
        if done.tokens.changed:
            print_table(console, "Tokens whose weight changed most", weights.CHANGED, done.tokens.changed)
    return EXIT_USER if other and not args.change else EXIT_DONE


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.9g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
