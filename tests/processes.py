"""Whole training processes for tests: starts one, waits for a moment in its life, ends it, reads its files."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from metric_names import unlisted
from quick_runs import process_environment
from waits import PATIENCE_S, is_running, until

from podrl.rundir.metrics import read_metrics
from podrl.storage.checkpoint import read_state

DEADLINE_S = 420.0
# A curriculum that retires prompts within three steps: there are few records, and some are solved at once.
CURRICULUM = (
    *("--config.data.size=12", "--config.data.curriculum.metric=approximate_format"),
    *("--config.data.curriculum.pass_at=0.0", "--config.data.curriculum.retire_after=1"),
    *("--config.data.curriculum.retire_rate=0.5", "--config.data.curriculum.postpone_after=1"),
    *("--config.data.curriculum.postpone_steps=2", "--config.data.curriculum.hard_share=0.25"),
)
SMALL = (
    "--config=grpo_gemma.py",
    "--config.fake_devices=8",
    "--config.roles.colocated=False",
    "--config.trainer.max_steps=6",
    "--config.checkpoint.every=2",
    "--config.eval.problems=16",
    "--config.eval.samples=1",
    "--config.rollout.prompts_per_step=4",
    "--config.grpo.num_generations=4",
    "--config.rollout.lanes=16",
    "--config.rollout.max_tokens_to_generate=16",
    "--config.rollout.max_prompt_length=64",  # otherwise each process searches for its longest prompt for over a second
    "--config.log.to=()",
)
# Two devices, for runs that set no mesh: two suffice to shard all arrays, and each further device makes starts and
# steps slower.
TWO_DEVICES = "--config.fake_devices=2"
# Metrics that may differ between two equal runs.
_CLOCKS = re.compile(r"time/|perf/|pod/|rollout/tokens_per_s|episode/seconds|tools/.*/seconds")


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without the tests' faked devices: the launcher fakes its own."""
    return process_environment(os.environ, **more)


class Job:
    """One `python -m podrl.launch` process; its output goes to stdout.txt and stderr.txt, by default beside the run
    directory."""

    def __init__(
        self, workdir: pathlib.Path, *args: str, base: Sequence[str] = SMALL, logs: pathlib.Path | None = None
    ):
        """Starts the process.

        Args:
          workdir: passed as --workdir.
          args: further flags.
          base: flags that come before `args`.
          logs: directory of the process's output, also its working directory; the default is the run directory's
            parent.
        """
        self.workdir = workdir
        logs = logs or workdir.parent
        logs.mkdir(parents=True, exist_ok=True)
        self._out, self._err = logs / "stdout.txt", logs / "stderr.txt"
        command = [sys.executable, "-m", "podrl.launch", *base, f"--workdir={workdir}", *args]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment(), cwd=logs)

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait_for(self, what: str, happened: Callable[[], bool], every_s: float = 0.002) -> None:
        """Returns as soon as `happened()` is true; fails if the process ends first or the deadline passes."""

        def looked() -> bool:
            found = happened()
            assert found or self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}:\n{self.stderr}"
            )
            return found

        try:
            until(looked, what, every_s=every_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.stdout}{self.stderr}") from None

    def wait_for_step(self, step: int) -> None:
        """Returns as soon as the training record of `step` is in metrics.jsonl."""
        self.wait_for(f"step {step}", lambda: any(r["step"] == step and "time/step" in r for r in self.records()))

    def records(self) -> list[dict]:
        return read_metrics(self.workdir)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL: no handler runs, nothing is flushed."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> int:
        """Waits for the process to end by itself; returns its exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)  # this signal makes it print all stacks
            raise AssertionError(f"did not end within {DEADLINE_S} s:\n{self.stdout}{self.stderr}") from None

    def finish(self, code: int = 0) -> "Job":
        """Waits for the end and checks the exit code."""
        assert self.end() == code, f"exit code {self.process.returncode}, not {code}:\n{self.stdout}\n{self.stderr}"
        return self

    def children(self) -> list[int]:
        """Lists the ids of the live processes that this job's process started."""
        return [pid for pid in _processes() if _parent(pid) == self.process.pid]


@contextlib.contextmanager
def job(workdir: pathlib.Path, *args: str, **kwargs) -> Iterator[Job]:
    """Starts a Job, which always ends with the block, even after an error."""
    started = Job(workdir, *args, **kwargs)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


def run(workdir: pathlib.Path, *args: str, code: int = 0, **kwargs) -> Job:
    """Runs a Job from start to end; every metric in its metrics.jsonl must be in docs/metrics.md."""
    with job(workdir, *args, **kwargs) as started:
        done = started.finish(code)
    if pathlib.Path(workdir, "metrics.jsonl").exists():  # a run directory in a bucket is not checked
        assert (names := unlisted(name for record in done.records() for name in record)) == [], names
    return done


def await_end(pids: Sequence[int]) -> None:
    """Returns as soon as none of the processes in `pids` runs."""
    until(lambda: not any(map(is_running, pids)), f"the end of {list(pids)}")


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    """Returns the parent of a live process; None when it is gone (or a zombie)."""
    try:
        state, parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def same_end(run_a: pathlib.Path, run_b: pathlib.Path) -> None:
    """Asserts bitwise equal parameters, optimizer state and step in the newest checkpoints, and equal metrics."""
    same_weights(run_a, run_b)
    assert comparable(run_a) == comparable(run_b)
    assert samples(run_a) == samples(run_b)


def same_weights(run_a: pathlib.Path, run_b: pathlib.Path) -> None:
    """Asserts bitwise equal parameters, optimizer state and step in the newest checkpoints."""
    (step_a, state_a), (step_b, state_b) = (read_state(run / "checkpoints") for run in (run_a, run_b))
    assert step_a == step_b
    flat_a, flat_b = (jax.tree_util.tree_flatten_with_path(state)[0] for state in (state_a, state_b))
    assert [path for path, _ in flat_a] == [path for path, _ in flat_b]
    different = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(flat_a, flat_b, strict=True)
        if np.asarray(a).dtype != np.asarray(b).dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]
    assert not different, f"{len(different)} of {len(flat_a)} leaves differ, such as {different[:3]}"
    assert any("opt_state" in jax.tree_util.keystr(path) for path, _ in flat_a)


def comparable(workdir: pathlib.Path) -> list[dict]:
    """Reads the records of metrics.jsonl without measured times."""
    return [{k: v for k, v in r.items() if not _CLOCKS.match(k)} for r in read_metrics(workdir)]


def on_any_mesh(workdir: pathlib.Path) -> list[dict]:
    """Reads the records of metrics.jsonl without measured times, and without the metrics of packing.

    The number and the length of packed rows depend on the mesh.
    """
    return [{k: v for k, v in record.items() if not k.startswith("packing/")} for record in comparable(workdir)]


def samples(workdir: pathlib.Path) -> list[dict]:
    """Reads samples.jsonl without the durations of tools, and without the marks of recorded answers."""
    found = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    for turn in (turn for sample in found for turn in sample.get("turns", ())):
        turn.pop("seconds", None)
        turn.pop("replayed", None)
    return found


def trained_steps(workdir: pathlib.Path) -> list[int]:
    """Lists the steps whose training records are in metrics.jsonl, in their order."""
    return [r["step"] for r in read_metrics(workdir) if "time/step" in r]


def listening(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Lists (address, port) of every TCP socket on which some of these processes accept connections."""
    inodes = set()
    for pid in pids:
        for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(descriptor))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


def wall_clock_kept(workdir: pathlib.Path, *flags: str, prompts: int, staleness: int) -> None:
    """Asserts what a run with `rollout.clock='wall'` promises: each prompt is trained or dropped once, no token is too
    old, and podrl.replay repeats the last step.

    `flags` are flags with which the run was started; podrl.replay gets the same flags.
    """
    steps, records = trained_steps(workdir), read_metrics(workdir)
    assert steps == list(range(1, steps[-1] + 1))
    assert not any("rollout/stale_tokens" in record or "rollout/faulty_tokens" in record for record in records)
    lines = [json.loads(line) for line in (workdir / "batches.jsonl").read_text().splitlines()]
    decided = {line["step"]: line for line in lines if "groups" in line}
    batches = {step: line["groups"] for step, line in decided.items()}
    ended = [group["index"] for groups in batches.values() for group in groups]
    if any("dropped" in line for line in decided.values()):  # with dynamic sampling, unused prompts in reserve are gaps
        ended += [index for line in decided.values() for index, _ in line["dropped"]]
        assert len(ended) == len(set(ended)) > prompts * steps[-1]
    else:
        assert sorted(ended) == [*range(prompts * steps[-1])]
    for step, groups in batches.items():
        versions = {version for group in groups for runs in group["runs"] for version, _ in runs}
        assert step - staleness <= min(versions) and max(versions) <= step
    command = [sys.executable, "-m", "podrl.replay", str(workdir), f"--step={steps[-1]}", "--start=0", *flags]
    more = {"cwd": workdir.parent, "env": environment(), "capture_output": True, "text": True, "check": False}
    replayed = subprocess.run(command, timeout=DEADLINE_S, **more)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"Step {steps[-1]} again, from the beginning" in replayed.stdout
    assert "metrics and checksums of the weights are equal" in replayed.stdout


def chose(records: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if a run's curriculum has retired or postponed a prompt, and had other prompts left."""
    sizes = [record for record in records if "data/curriculum/unseen" in record]
    closed = [record["data/curriculum/retired"] + record["data/curriculum/postponed"] for record in sizes]
    return bool(sizes) and 0 < max(closed) < sum(v for k, v in sizes[-1].items() if k.startswith("data/curriculum/"))
