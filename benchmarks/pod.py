"""Measures what the leader of a large pod spends per step: `python -m benchmarks pod --trainers=64 --rollouts=256`."""

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from podrl.groups import complete
from podrl.learner.loop import Schedule, Start, train
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.rundir.profiler import Profiler
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts
from podrl.types import NO_EPISODE, STOP_EOS, Experience, Policy, Prompts, Rollouts, blank_columns

DEADLINE_S = 600.0
_SKIPPED = 1  # number of first steps that do not count: the first step makes every connection


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the training loop of every host of a pod, without devices, and measures its leader.

    The leader is this process; the other hosts are threads of `--processes` further processes. All of them run the
    job's own loop, channel, encryption, control messages, batches and farewell messages; sampling and updates are
    sleeps, and weights do not move. Only the first `--gathering` trainer hosts fetch rows from the rollout hosts; the
    others only exchange messages with the leader, whose load does not depend on these rows.

    Returns:
      trainers, rollouts, samples: numbers of hosts, and samples of a step.
      leader_cpu_ms: processor time of the leader per step, all threads.
      messages, megabytes: number and size of the messages that the leader sent and received per step.
      step_ms, added_ms: time of a step, and the part of it beyond the sleeps of one sampling and one update; all hosts
        share the cores of this machine.
      others_cpu_ms: processor time of all simulated hosts per step.
      start_s: seconds until all hosts had joined.

    Raises:
      ValueError: a number is below 1.
      RuntimeError: simulated hosts failed.
    """
    args = _parser().parse_args(argv)
    for name in ("trainers", "rollouts", "steps", "processes", "prompts", "samples", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)} must be at least 1.")
    hosts = _hosts(args)
    started = time.monotonic()
    pod = Pod(Seat(0, hosts, "127.0.0.1:0", secrets.token_hex(16)), host="127.0.0.1")
    with _others(args, pod) as others:
        pod.join(DEADLINE_S, lambda reached, waited_s: f"Only {reached} hosts came within {waited_s:.0f} s.")
        start_s = time.monotonic() - started
        recorder = _Marks(pod)
        _play(pod, args, recorder)
        for process in range(1, pod.seat.hosts.count):
            pod.get(process, "done", DEADLINE_S)
        pod.leave()
    each = recorder.per_step()
    return {
        "trainers": args.trainers,
        "rollouts": args.rollouts,
        "samples": args.rollouts * args.prompts * args.samples,
        "leader_cpu_ms": 1e3 * each["cpu"],
        "messages": each["messages"],
        "megabytes": each["bytes"] / 1e6,
        "step_ms": 1e3 * each["time"],
        "added_ms": 1e3 * (each["time"] - args.generate_s - args.update_s),
        "others_cpu_ms": 1e3 * sum(others),
        "start_s": start_s,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pod", description=__doc__)
    parser.add_argument("--trainers", type=int, default=4, help="trainer hosts, the leader included")
    parser.add_argument("--rollouts", type=int, default=16, help="rollout hosts")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step on every rollout host")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="mean tokens of a sample")
    parser.add_argument("--generate_s", type=float, default=1.0, help="seconds that sampling takes on every host")
    parser.add_argument("--update_s", type=float, default=0.2, help="seconds that an update takes")
    parser.add_argument("--gathering", type=int, default=8, help="trainer hosts that fetch their rows of every batch")
    parser.add_argument("--processes", type=int, default=8, help="processes that simulate the other hosts")
    parser.add_argument("--json", action="store_true")
    return parser


def _hosts(args: argparse.Namespace) -> Hosts:
    return Hosts(tuple(range(args.trainers)), tuple(range(args.trainers, args.trainers + args.rollouts)))


@contextlib.contextmanager
def _others(args: argparse.Namespace, pod: Pod) -> Iterator[list[float]]:
    """Simulates all hosts but the leader for the time of a `with` block.

    The block gets a list. When the block has ended, the list holds the processor seconds per step of each process that
    simulated hosts.
    """
    members = [p for p in range(pod.seat.hosts.count) if p]
    command = [sys.executable, "-m", "benchmarks.pod"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started: list[subprocess.Popen[str]] = []
    spent: list[float] = []
    try:
        for share in filter(None, (members[i :: args.processes] for i in range(args.processes))):
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            started.append(one)
            assert one.stdin is not None
            words = {"args": vars(args), "members": share, "leader": pod.channel.address, "secret": pod.seat.secret}
            one.stdin.write(json.dumps(words) + "\n")
            one.stdin.flush()
        yield spent
        for one in started:
            said, _ = one.communicate(timeout=DEADLINE_S)
            if one.returncode:
                raise RuntimeError(f"Simulated hosts ended with exit code {one.returncode}: see above.")
            spent.append(json.loads(said)["cpu"])
    finally:
        for one in started:
            one.kill()
            one.wait()


def _play(pod: Pod, args: argparse.Namespace, recorder: "_Marks") -> None:
    """Runs the training loop as host `pod.seat.process` of the pod does."""
    run: Any = Run()
    cluster: Any = Cluster()
    barrier = StepBarrier(pod, run, DEADLINE_S)
    schedule = Schedule(args.steps + _SKIPPED)
    if pod.seat.process in pod.seat.hosts.trainer:
        share, shares = pod.seat.hosts.rank(pod.seat.process), len(pod.seat.hosts.trainer)

        def needed(step: int, experience: Experience) -> np.ndarray:
            return np.arange(share, len(experience.rollouts.length_B), shares)

        kind = RemoteRollouts if share < args.gathering else _Words
        some: Any = {"needed": needed, "deadline_s": DEADLINE_S, "begun": schedule.begun}
        P = args.rollouts * args.prompts
        rollouts: Any = kind(cluster, Data(P), run, pod, barrier, prompts=P, **some)
    else:
        made = experience(args, pod.seat.hosts.rank(pod.seat.process))

        def generate(prompts: Any, policy: Policy, step: int) -> Experience:
            time.sleep(args.generate_s)
            return made

        some = {"evaluator": None, "deadline_s": DEADLINE_S}
        rollouts = HostRollouts(cluster, run, pod, barrier, generate=generate, **some)
    trains = pod.seat.process in pod.seat.hosts.trainer
    train(rollouts, _Sleeps(args.update_s if trains else 0.0), recorder, schedule)
    rollouts.close()


def experience(args: argparse.Namespace, rank: int) -> Experience:
    """Makes a rollout host's share of a batch, with samples of random lengths."""
    rng = np.random.default_rng(rank)
    P, B, T = args.prompts, args.prompts * args.samples, 2 * args.tokens
    length_B = rng.integers(args.tokens // 2, 3 * args.tokens // 2, B).astype(np.int32)
    prompt, text = "Which number is it? " * 8, "A few words of an answer. " * (args.tokens // 6)
    real_BT = np.arange(T) < length_B[:, None]
    length_P = np.full(P, 40, np.int32)
    prompts = Prompts(
        tokens_PT=rng.integers(0, 30_000, (P, 40), np.int32),
        length_P=length_P,
        index_P=np.arange(rank * P, rank * P + P, dtype=np.int64),
        text=[prompt] * P,
        fields={"answer": ["42"] * P},
        data_state=b"{}",
    )
    rollouts = Rollouts(
        prompts=prompts,
        group_B=complete(P, B // P),
        length_B=length_B,
        mask_BT=real_BT.astype(np.float32),
        turn_reward_BT=np.zeros((B, T), np.float32),
        stop_B=np.full(B, STOP_EOS, np.int32),
        completions=[text] * B,
        episodes=[NO_EPISODE] * B,
        seconds=args.generate_s,
        **blank_columns((B, T), pad_id=0) | {"tokens_BT": rng.integers(0, 30_000, (B, T), np.int32)},
    )
    rewards = rng.random((2, B)).astype(np.float32)
    return Experience(rollouts, rewards, rewards[0], np.zeros(0, np.float32), 0.0, {}, np.zeros(B, np.int32))


class _Words(RemoteRollouts):
    """A trainer host that fetches no rows, and only exchanges messages with the leader."""

    def gather(self, step: int, *, everything: bool = False) -> Any:
        del step, everything


class Data:
    """Stands for a data stream whose batches have `prompts` prompts."""

    def __init__(self, prompts: int):
        self._prompts = prompts

    def __next__(self) -> Prompts:
        P = self._prompts
        ones = np.ones(P, np.int32)
        return Prompts(np.ones((P, 1), np.int32), ones, np.arange(P), text=[""] * P, fields={}, data_state=b"{}")

    def restore(self, state: bytes) -> None:
        del state


class Cluster:
    """Stands for models and weights; moves nothing."""

    class tokenizer:  # noqa: N801 - stands for the attribute of RLCluster
        pad_id = 0

    class weights:  # noqa: N801 - stands for the attribute of RLCluster
        @staticmethod
        def await_version(version: int) -> None:
            del version

    def sync_weights(self, step: int, *, in_place: bool) -> Policy:
        del in_place
        return Policy({}, step)


class Run:
    """Stands for a run: nothing is written, and no stop is ever requested."""

    profiler, traced, workdir = Profiler(""), None, None

    class watchdog:  # noqa: N801 - stands for the attribute of Run
        @staticmethod
        def stage(name: str) -> contextlib.AbstractContextManager[None]:
            del name
            return contextlib.nullcontext()

    def stopping(self) -> bool:
        return False

    def notify_takeover(self) -> None: ...


class _Sleeps:
    """An algorithm that trains nothing; its update sleeps for `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def score(self, step: int, experience: Any) -> None: ...

    def rewards(self, experience: Any, scores: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    def advantages(self, experience: Any, scores: Any, rewards: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    def pack(self, step: int, experience: Any, scores: Any, advantages: Any) -> Sequence[Any]:
        return ()

    def update(self, step: int, batches: Sequence[Any]) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {}


class _Marks:
    """A recorder that keeps no files, only the clock, processor time and traffic after each step."""

    def __init__(self, pod: Pod):
        self._pod = pod
        self._marks: list[dict[str, float]] = []

    def restore(self) -> Start:
        return Start(0, b"", (), set())

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

    def record(self, step: int, experience: Any, metrics: Any) -> None:
        traffic = self._pod.channel.traffic
        mark = {"time": time.monotonic(), "cpu": time.process_time()}
        self._marks.append(mark | {"messages": traffic.messages, "bytes": traffic.bytes})

    def save(self, step: int, in_flight: Any) -> None: ...

    def evaluate(self, policy: Policy, step: int) -> None: ...

    def stopping(self) -> bool:
        return False

    def notify_takeover(self) -> None: ...

    def per_step(self) -> dict[str, float]:
        first, *_, last = self._marks[_SKIPPED - 1 :]
        return {name: (last[name] - first[name]) / (len(self._marks) - _SKIPPED) for name in first}


def _simulate() -> None:
    """Plays the hosts that the first line of standard input names, each on a thread; prints processor time per step."""
    words = json.loads(sys.stdin.readline())
    args = argparse.Namespace(**words["args"])

    def host(process: int) -> _Marks:
        pod = Pod(Seat(process, _hosts(args), words["leader"], words["secret"]), host="127.0.0.1").join(
            DEADLINE_S, lambda reached, waited_s: ""
        )
        recorder = _Marks(pod)
        _play(pod, args, recorder)
        pod.channel.put("done", Message())
        pod.leave()
        return recorder

    with ThreadPoolExecutor(len(words["members"])) as threads:
        recorders = list(threads.map(host, words["members"]))
    print(json.dumps({"cpu": recorders[0].per_step()["cpu"]}))


if __name__ == "__main__":
    _simulate()
