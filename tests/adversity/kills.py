"""Kills whole training runs, resumes them by the same command, and compares the results with undisturbed runs.

    python tests/adversity/kills.py --kills=100 --seed=1
    python tests/adversity/kills.py --grid --seed=1
    python tests/adversity/kills.py --hosts=10 --seed=1

A life of a run ends by SIGKILL, either just before a chosen change to its files (every open for writing, rename, mkdir
and remove in the run directory counts) or at a random time after its first change. In a pod a random process or the
launcher dies. A process that calls a tool is also killed between call and answer. After its lives a run is started once
more. It must end with exit code 0, and its metrics, samples, weights and optimizer must equal those of an undisturbed
run bit for bit. A run with rollout.clock='wall' must instead train on each prompt once, and podrl.replay must repeat
its last step.

With --grid a random process of every run is killed after each of its steps but the last, in all combinations of:
staleness 2 and 3; full training and LoRA; with tools and without; one process, a shared pod and a split pod. With
--hosts there is one run of 30 steps with staleness 2, in a split pod of one trainer and two rollout hosts. Only rollout
hosts are killed, at random times, and the launcher starts them again.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # the command finds processes.py here

from processes import SMALL, environment, same_end, trained_steps, wall_clock_kept

from podrl.job.config import TINY

STEPS = 4
DEADLINE_S = 300.0
WALL_STALENESS = 2
ANSWERS = ("dpo", "kto", "reward_model")  # these algorithms learn from the data's answers
KILLER = pathlib.Path(__file__).resolve().parent / "killer"
_JOB = (f"--config.trainer.max_steps={STEPS}", "--config.checkpoint.every=1", "--config.eval.problems=0")
# A start costs less with fewer devices, and when it need not look for the longest prompt.
_SAMPLED = (*SMALL, *_JOB, "--config.fake_devices=4", "--config.rollout.max_prompt_length=64")
_STALE = ("--config.grpo.max_staleness=2", "--config.rollout.window_tokens=8")
_WALL = ("--config.rollout.clock=wall", f"--config.grpo.max_staleness={WALL_STALENESS}")
_FEW_LANES = ("--config.rollout.lanes=4", "--config.rollout.max_tokens_to_generate=40")  # weights change mid-sample
_THREE = ("--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0")
_ADAPTERS = ("--config.model.lora.rank=4", "--config.trainer.learning_rate=2e-3")
# The teacher is the model that the run starts from: it pulls against the rewards. The comparison of teacher and policy
# uses all logits.
_TAUGHT = ("--config.algorithm=opd", f"--config.model.reference={TINY}", "--config.grpo.teacher_kl=full")


def _answers(name: str) -> tuple[str, ...]:
    small = (f"--config={name}_tiny.py", "--config.model.path=tiny", f"--config.{name}.batch_size=8")
    return (*small, *_JOB, "--config.log.to=()")


# A tool whose answers are recorded. Samples are short, and no checkpoint is saved before the end.
_TOOLS = (
    *("--config=grpo_tools.py", f"--config.env.tools=('{pathlib.Path(__file__).with_name('chance.py')}:calculator',)"),
    *("--config.rollout.prompts_per_step=8", "--config.log.samples_every=1", "--config.log.to=()"),
    *(*_JOB, "--config.checkpoint.every=0"),
)
_PROCESSES = ("--local_processes=", "--topology=", "--config.roles.", "--config.fake_devices=")  # for podrl.replay
_TOPOLOGIES = {"single": (), "shared": ("--local_processes=2",), "split": ("--local_processes=2", "--topology=split")}
VARIANTS = {
    "single": _SAMPLED,
    "lora, stale": (*_SAMPLED, *_ADAPTERS, *_STALE),
    "opd": (*_SAMPLED, *_TAUGHT, "--config.grpo.reward_coef=1.0"),
    "ppo": (*(flag.replace("config.grpo.", "config.ppo.") for flag in _SAMPLED), "--config.algorithm=ppo"),
    **{name: _answers(name) for name in ANSWERS},
    "shared": (*_SAMPLED, "--local_processes=2"),
    "split": (*_SAMPLED, "--local_processes=2", "--topology=split"),
    "split, stale": (*_SAMPLED, "--local_processes=2", "--topology=split", *_STALE),
    "shared, stale": (*_SAMPLED, "--local_processes=2", *_STALE, "--config.grpo.max_staleness=3"),
    "wall": (*_SAMPLED, *_WALL),
    "wall, shared": (*_SAMPLED, *_WALL, *_FEW_LANES, "--local_processes=2"),
    "wall, split": (*_SAMPLED, *_WALL, *_FEW_LANES, *_THREE),
    "hybrid": (*_SAMPLED, *_STALE, "--config.model.path=tiny_hybrid"),
    "hybrid, split": (*_SAMPLED, *_STALE, "--config.model.path=tiny_hybrid", *_TOPOLOGIES["split"]),
    "tools": _TOOLS,
    "tools, stale": (*_TOOLS, *_STALE, "--config.checkpoint.every=1"),
    "tools, split": (*_TOOLS, "--local_processes=2", "--topology=split"),
}
_HOSTS = (*_SAMPLED, *_STALE, "--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0")


def _grid() -> dict[str, tuple[str, ...]]:
    """Makes every combination of staleness, adapters, tools and topology, by name."""
    made = {}
    for staleness, lora, tools, topology in itertools.product((2, 3), (False, True), (False, True), _TOPOLOGIES):
        words = [f"S={staleness}", *["lora"] * lora, *["tools"] * tools, topology]
        flags = (*(_TOOLS if tools else _SAMPLED), *(_ADAPTERS if lora else ()), *_STALE)
        flags += (f"--config.grpo.max_staleness={staleness}", "--config.checkpoint.every=1")
        made[", ".join(words)] = flags + _TOPOLOGIES[topology]
    return made


GRID = _grid()


@dataclasses.dataclass
class Whole:
    """An undisturbed run: its directory, its number of file changes, seconds from the first change to the end, number
    of tool calls."""

    workdir: pathlib.Path
    changes: int
    seconds: float
    calls: int


class Life:
    """One start of a run. Its process is killed just before change number `at` of the run directory, or just before a
    change whose path contains `at`; if `at` is 0, nothing is killed."""

    def __init__(self, variant: str, workdir: pathlib.Path, *, at: int | str = 0):
        workdir.parent.mkdir(parents=True, exist_ok=True)
        if not (workdir.parent / "world").exists():
            (workdir.parent / "world").write_text("first")
        self._log = workdir.parent / f"changes-{uuid.uuid4().hex}"
        self._out = workdir.parent / "output.txt"
        self._tag = uuid.uuid4().hex
        command = [sys.executable, "-m", "podrl.launch", *(VARIANTS | GRID)[variant], f"--workdir={workdir}"]
        paths = f"{KILLER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        more = {"PODRL_KILL_WATCH": str(workdir), "PODRL_KILL_LOG": str(self._log), "PODRL_KILL_AT": str(at)}
        env = environment(PYTHONPATH=paths, PODRL_KILL_TAG=self._tag, **more)
        self._started = time.monotonic()
        with self._out.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=workdir.parent)

    def changes(self) -> list[str]:
        """Lists the changes so far, as 'pid number event path'."""
        return self._log.read_text().split("\n")[:-1] if self._log.exists() else []

    def first_change(self) -> bool:
        """Waits for the first change; False if the run ended without a change."""
        while not self._log.exists():
            if self.process.poll() is not None:
                return False
            self.check_time()
            time.sleep(0.005)
        return True

    def processes(self) -> list[int]:
        """Lists ids of all live processes of this life that run podrl.launch, a pod's launcher first."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                mine = f"PODRL_KILL_TAG={self._tag}".encode() in pathlib.Path(f"/proc/{name}/environ").read_bytes()
                if mine and b"podrl.launch" in pathlib.Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def end(self) -> int:
        """Waits for the command's end and for all processes it started; returns its exit code."""
        while self.process.poll() is None:
            self.check_time()
            time.sleep(0.02)
        while self._left():
            self.check_time()
            time.sleep(0.02)
        return self.process.returncode

    def output(self) -> str:
        return self._out.read_text(errors="replace")

    def _left(self) -> list[str]:
        left = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"PODRL_KILL_TAG={self._tag}".encode() in pathlib.Path(f"/proc/{name}/environ").read_bytes():
                    left.append(name)
        return left

    def check_time(self) -> None:
        """Ends all processes of a life that takes too long, and raises AssertionError."""
        if time.monotonic() - self._started > DEADLINE_S:
            for pid in map(int, self._left()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"A run did not end within {DEADLINE_S} s after its start or kill:\n{self.output()}")


def undisturbed(variant: str, folder: pathlib.Path) -> Whole:
    """Runs a variant from start to end."""
    life = Life(variant, folder / "run")
    assert life.first_change(), life.output()
    started = time.monotonic()
    assert life.end() == 0, life.output()
    assert trained_steps(folder / "run") == list(range(1, STEPS + 1))
    return Whole(folder / "run", len(life.changes()), time.monotonic() - started, calls_made(folder))


def calls_made(folder: pathlib.Path) -> int:
    """Counts the calls of tools in all lives of a run."""
    return (folder / "calls").stat().st_size if (folder / "calls").exists() else 0


def disturbed(
    variant: str, folder: pathlib.Path, whole: Whole, lives: int, rng: random.Random, *, by_time: float = 0.5
) -> list[str]:
    """Runs a variant, kills it up to `lives` times, and asserts that it ends as `whole` did; returns the kills in
    words.

    A life that reaches the run's end before the kill counts as no kill, but the run is compared all the same.
    `by_time` is the share of kills at random times; the other kills come at changes, which a first life always reaches.
    """
    kills: list[str] = []
    for _ in range(lives):
        kill = _killed_at_a_time if rng.random() < by_time else _killed_at_a_change
        if whole.calls and rng.random() < 0.5:
            kill = _killed_in_calls
        life, moments = kill(variant, folder / "run", whole, rng)
        kills += moments
        # Exit code -9 is the kill itself. A pod exits with 42, but a split pod goes on if a rollout host died.
        assert life.process.returncode in (-signal.SIGKILL, 42, 0), f"{variant}, killed {kills}:\n{life.output()}"
        if life.process.returncode == 0:
            break
    last = Life(variant, folder / "run")
    assert last.end() == 0, f"{variant}, killed {kills}:\n{last.output()}"
    try:
        if "wall" in variant:  # two runs with the wall clock differ, but podrl.replay repeats each of them
            flags = [flag for flag in VARIANTS[variant] if flag.startswith(_PROCESSES)]
            wall_clock_kept(folder / "run", *flags, prompts=4, staleness=WALL_STALENESS)
        else:
            same_end(folder / "run", whole.workdir)
        assert trained_steps(folder / "run") == list(range(1, STEPS + 1))
    except AssertionError as different:
        raise AssertionError(f"{variant}, killed {kills}: {different}") from None
    return kills


def killed_after_steps(
    variant: str, folder: pathlib.Path, whole: Whole, rng: random.Random, steps: Sequence[int] = range(1, STEPS)
) -> list[str]:
    """Kills a random process after each step of `steps`, asserts that the run ends as `whole` did; returns the kills in
    words.

    A life goes on if the killed process was a rollout host of a split pod.
    """
    workdir, moments = folder / "run", []
    life = Life(variant, workdir)
    for step in steps:
        if life.process.poll() is not None:
            life.end()
            life = Life(variant, workdir)
        while life.process.poll() is None and not _trained(workdir, step):
            life.check_time()
            time.sleep(0.005)
        victims = life.processes()
        if life.process.poll() is not None or not victims:
            continue
        victim = rng.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            moments.append(f"after step {step} ({_which(victims.index(victim), len(victims))})")
        if not ("split" in variant and len(victims) > 2 and victim == victims[-1]):
            life.end()
    code = life.end()
    assert code in (-signal.SIGKILL, 42, 0), f"{variant}, killed {moments}:\n{life.output()}"
    if code:
        life = Life(variant, workdir)
        assert life.end() == 0, f"{variant}, killed {moments}:\n{life.output()}"
    try:
        same_end(workdir, whole.workdir)
        assert trained_steps(workdir) == list(range(1, STEPS + 1))
    except AssertionError as different:
        raise AssertionError(f"{variant}, killed {moments}: {different}") from None
    return moments


def lose_hosts(folder: pathlib.Path, kills: int, steps: int, rng: random.Random) -> list[int]:
    """Kills random rollout hosts of a split pod during one run, and asserts that the run ends as an undisturbed one.

    Returns:
      The steps after which hosts were lost.
    """
    flags = (*_HOSTS, f"--config.trainer.max_steps={steps}", f"--restarts={kills}")
    VARIANTS["hosts"] = flags
    whole = Life("hosts", folder / "whole" / "run")
    assert whole.end() == 0, whole.output()
    workdir, lost = folder / "killed" / "run", []
    life = Life("hosts", workdir)
    for _ in range(kills):
        before = len(_steps(workdir))
        while len(_steps(workdir)) <= before or len(victims := life.processes()) < 4:  # launcher, trainer, two rollouts
            assert life.process.poll() is None, f"ended after {len(lost)} kills:\n{life.output()}"
            life.check_time()
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice([pid for pid in victims if _index(pid) in ("1", "2")]), signal.SIGKILL)
            lost.append(len(_steps(workdir)))
    assert life.end() == 0, life.output()
    same_end(workdir, folder / "whole" / "run")
    assert trained_steps(workdir) == list(range(1, steps + 1))
    return lost


def _index(pid: int) -> str:
    words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((word.partition(b"=")[2].decode() for word in words if word.startswith(b"PODRL_PROCESS_INDEX=")), "")


def _steps(workdir: pathlib.Path) -> list[int]:
    return trained_steps(workdir) if (workdir / "metrics.jsonl").exists() else []


def _trained(workdir: pathlib.Path, step: int) -> bool:
    return (workdir / "metrics.jsonl").exists() and step in trained_steps(workdir)


def killed_in_calls(variant: str, workdir: pathlib.Path, calls: list[int]) -> tuple[Life, list[str]]:
    """Runs a life; the process that makes one of these calls (counted over all lives) is killed before the answer."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    (workdir.parent / "kill_at_calls").write_text(" ".join(map(str, calls)))
    life = Life(variant, workdir)
    life.end()
    return life, [f"in call {call}" for call in calls if call <= calls_made(workdir.parent)]


def _killed_in_calls(variant: str, workdir: pathlib.Path, whole: Whole, rng: random.Random) -> tuple[Life, list[str]]:
    made = calls_made(workdir.parent)
    # A dead rollout host of a split pod is replaced, so several can be killed in one life.
    further = sorted(rng.sample(range(1, whole.calls // 2), 3 if "split" in variant else 1))
    return killed_in_calls(variant, workdir, [made + call for call in further])


def _killed_at_a_change(
    variant: str, workdir: pathlib.Path, whole: Whole, rng: random.Random
) -> tuple[Life, list[str]]:
    # A life that resumes from a checkpoint makes fewer changes than the undisturbed run, and ends before a late change.
    at = rng.randint(1, max(whole.changes // 2, 1))
    life = Life(variant, workdir, at=at)
    life.end()
    # In a pod only the leader writes the run directory, so one process numbers all changes.
    done = [line.split(maxsplit=3) for line in life.changes()]
    last = next((change for change in done if int(change[1]) == at), None)
    return life, [f"before change {at} ({' '.join(last[2:])})"] if last else []


def _killed_at_a_time(variant: str, workdir: pathlib.Path, whole: Whole, rng: random.Random) -> tuple[Life, list[str]]:
    life, moments = Life(variant, workdir), []
    if life.first_change():
        # A life that resumes from a checkpoint is shorter than the undisturbed run, and ends before a late kill.
        seconds = rng.uniform(0, 0.7 * whole.seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            life.process.wait(seconds)
        if victims := life.processes():
            victim = rng.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                which = _which(victims.index(victim), len(victims))
                moments = [f"{seconds:.1f} s after the first change ({which})"]
    life.end()
    return life, moments


def _which(index: int, count: int) -> str:
    if count == 1:
        return "the process"
    return "the launcher" if index == 0 else f"process {index} of {count - 1}"


def main() -> int:
    """Kills runs until there were enough kills, and reports them; raises AssertionError at the first difference."""
    say = functools.partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lives", type=int, default=5, help="kills of one run at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(name.replace(", ", "+") for name in VARIANTS))
    parser.add_argument("--hosts", type=int, default=0, help="kill so many rollout hosts in one run of 30 steps")
    parser.add_argument("--grid", action="store_true", help="kill after each step of every combination, once")
    parser.add_argument(
        "--only", default="", help="with --grid: combinations whose names hold all of these, as S=3,lora"
    )
    options = parser.parse_args()
    if options.hosts:
        with tempfile.TemporaryDirectory(prefix="podrl-kills-") as top:
            lost = lose_hosts(pathlib.Path(top), options.hosts, 30, random.Random(options.seed))
        say(f"the same end after {len(lost)} rollout hosts were lost, after steps {', '.join(map(str, lost))}")
        return 0
    if options.grid:
        return _run_grid(options.only.split(","), random.Random(options.seed), say)
    names = [name.replace("+", ", ") for name in options.variants.split(",")]
    rng, kills, runs = random.Random(options.seed), 0, 0
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="podrl-kills-") as top:
        folder = pathlib.Path(top)
        wholes: dict[str, Whole] = {}
        while kills < options.kills:
            name = names[runs % len(names)]
            if name not in wholes:
                wholes[name] = undisturbed(name, folder / f"whole-{len(wholes)}")
            lives = min(options.lives, options.kills - kills)
            moments = disturbed(name, folder / f"run-{runs}", wholes[name], lives, rng)
            shutil.rmtree(folder / f"run-{runs}")
            kills, runs = kills + len(moments), runs + 1
            counts[name] += len(moments)
            say(f"{name}: the same end after {len(moments)} kills: {'; '.join(moments)}")
    say(f"{kills} kills of {runs} runs, every end bitwise that of an undisturbed run: {dict(counts)}")
    return 0


def _run_grid(words: Sequence[str], rng: random.Random, say: Callable[[str], None]) -> int:
    """Runs the combinations and reports each run that ends differently; returns the exit code, which is 1 if any run
    did so."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="podrl-kills-") as top:
        folder = pathlib.Path(top)
        for name in (name for name in GRID if all(word in name for word in words)):
            whole = undisturbed(name, folder / "whole")
            try:
                moments = killed_after_steps(name, folder / "killed", whole, rng)
                say(f"{name}: the same end after {len(moments)} kills: {'; '.join(moments)}")
            except AssertionError as different:
                failed += 1
                say(f"{name}: FAILED: {different}")
            for run in ("whole", "killed"):
                shutil.rmtree(folder / run)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
