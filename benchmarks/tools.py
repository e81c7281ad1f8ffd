"""Measures generation in which every sample calls a tool: `python -m benchmarks tools`."""

import asyncio
import dataclasses
import functools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import rollout, tail
from benchmarks.model import fake_devices

_COUNTED = 8  # steps that count each time that one of the two ways (windows, whole batches) is measured


class Calls:
    """An environment that answers `calls` turns of the model, each after a random wait of up to `delay_s` seconds.

    With `slow` above 0, the share `slow` of the answers takes `delay_s`, and the others take no time. A turn is half to
    one and a half times as long as the mean; all turns of a sample have `sampled` tokens together.
    """

    async def run(self, task: Any, model: Any) -> None:
        asked, draw = task.fields, random.Random(task.seed)
        left, observation = asked["sampled"], "" if asked["calls"] else asked["observation"]
        for turns in range(asked["calls"] + 1, 1, -1):
            turn = max(round(left / turns * (0.5 + draw.random())), 1)
            await model.say(observation, max_new=turn)
            share = float(draw.random() < asked["slow"]) if asked["slow"] else draw.random()
            await model.outside("wait", functools.partial(_waited, share * asked["delay_s"]))
            left, observation = left - turn, asked["observation"]
        await model.say(observation)


async def _waited(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times one batch with tool calls, and its two parts: plain samples of the same tokens, and prefill of the outputs.

    Decode steps of plain samples do not read keys and values of the outputs, so `of_plain` includes that cost. For
    `of_context`, plain samples begin with half of the outputs, so that they read as much on average, and the other half
    is prefilled apart: the excess of `of_context` over 1 is the cost of the calls.

    Returns:
      of_plain, cpu_of_plain: time with calls over the time of plain samples and prefill, in wall seconds and in CPU
        time. CPU time is comparable where the machine is shared.
      of_context, cpu_of_context: the same two quotients for the comparison `of_context` above.
      seconds, plain_seconds, prefill_seconds: median seconds with calls, of plain samples, and of prefill; the three
        are timed in turn.
      tokens, calls, given_tokens: sampled tokens, calls, and tokens of the tools' outputs.
      prefill_per_given: tokens that prefill computed per token of an output.
      decode_steps, decode_steps_plain: decode steps with calls, and of plain samples.
      lane_utilisation, lane_utilisation_plain: sampled tokens over lane places of all decode steps.
      host_seconds_per_call: CPU time of this process's Python threads per call, beyond their time for plain samples.
      spills, compiles: counts of the engine with calls.
      With --slow, the figures of `_stale` instead.
    """
    parser = rollout.make_parser(prog="python -m benchmarks tools", description=__doc__)
    parser.set_defaults(mesh="data=1", max_new=128)
    parser.add_argument("--calls", type=int, default=3, help="calls of each sample, whose turns share --max_new")
    parser.add_argument("--given", type=int, default=24, help="tokens of a tool's output")
    parser.add_argument("--delay_ms", type=float, default=200.0, help="longest wait for a tool")
    parser.add_argument(
        "--slow", type=float, default=0.0, help="share of calls that all wait --delay_ms; compares --staleness with 1"
    )
    parser.add_argument("--update_ms", type=float, default=0.0, help="time of an update on other devices, with --slow")
    args = parser.parse_args(argv)
    fake_devices(args.devices)
    given = args.calls * args.given
    bench = rollout.Bench(args, response=args.max_new + given, end_ids=())
    if args.slow:
        return _stale(bench, args)
    prefills, half = rollout.Bench(_prefill_only(args, given)), rollout.Bench(_prefill_only(args, given - given // 2))
    with _playing(args) as host:
        jobs = {
            "plain": _Job(bench),
            "prefill": _Job(prefills),
            "context": _Job(bench, _env_client(host), _asked(args, 0, given // 2)),
            "half": _Job(half),
            "called": _Job(bench, _env_client(host), _asked(args, args.calls, args.given)),
        }
        times = [{name: job.time() for name, job in jobs.items()} for _ in range(args.repeats + 1)][1:]
    seconds, cpu, threads = ({name: median(t[name][i] for t in times) for name in jobs} for i in range(3))
    stats, plain = jobs["called"].stats, jobs["plain"].stats
    calls, tokens = args.prompts * args.group * args.calls, args.prompts * args.group * given
    return {
        "of_plain": seconds["called"] / (seconds["plain"] + seconds["prefill"]),
        "of_context": seconds["called"] / (seconds["context"] + seconds["half"]),
        "cpu_of_plain": cpu["called"] / (cpu["plain"] + cpu["prefill"]),
        "cpu_of_context": cpu["called"] / (cpu["context"] + cpu["half"]),
        "seconds": seconds["called"],
        "plain_seconds": seconds["plain"],
        "prefill_seconds": seconds["prefill"],
        "tokens": stats.tokens,
        "calls": calls,
        "given_tokens": tokens,
        "prefill_per_given": (stats.prefill_tokens - plain.prefill_tokens) / tokens,
        "decode_steps": stats.decode_steps,
        "decode_steps_plain": plain.decode_steps,
        "lane_utilisation": stats.lane_utilisation,
        "lane_utilisation_plain": plain.lane_utilisation,
        "host_seconds_per_call": (threads["called"] - threads["plain"]) / calls,
        "spills": stats.spills,
        "compiles": stats.compiles,
    }


def _stale(bench: rollout.Bench, args: Any) -> dict[str, Any]:
    """Plays training steps whose samples wait for slow calls, by turns in windows and with whole batches.

    A step lasts as long as its window, or as the update beside it if the update is longer. A sample that is played in
    windows ends one turn in each window except its last (`env.calls_per_window=1`).

    Returns:
      staleness: staleness of the windows.
      step_seconds, step_seconds_whole: median seconds of a step in windows, and with whole batches (a staleness of 1).
      faster: step_seconds_whole over step_seconds.
      lane_utilisation, lane_utilisation_whole: share of busy lanes in windows, and with whole batches.
    """
    fields = {name: [value] * args.prompts for name, value in _asked(args, args.calls, args.given).items()}
    times: dict[int, list[float]] = {args.staleness: [], 1: []}
    busy: dict[int, list[float]] = {args.staleness: [], 1: []}
    with _playing(args) as host:
        for _ in range(args.repeats + 1):
            bench.worker.env_client = _env_client(host)
            for staleness in times:
                seconds, lanes = _steps(bench, args, fields, staleness)
                times[staleness] += seconds
                busy[staleness] += lanes
    # The first measurement of each way is left out, because it compiles.
    kept = {S: [max(t, args.update_ms / 1e3) for t in seconds[_COUNTED:]] for S, seconds in times.items()}
    step, whole = median(kept[args.staleness]), median(kept[1])
    return {
        "staleness": args.staleness,
        "step_seconds": step,
        "step_seconds_whole": whole,
        "faster": whole / step,
        "lane_utilisation": median(busy[args.staleness][_COUNTED:]),
        "lane_utilisation_whole": median(busy[1][_COUNTED:]),
    }


def _steps(
    bench: rollout.Bench, args: Any, fields: Mapping[str, Any], staleness: int
) -> tuple[list[float], list[float]]:
    """Returns (seconds, shares of busy lanes) of the windows in which the most batches are in flight."""
    from podrl.engine.config import Sampling
    from podrl.types import Policy

    def begin(step: int) -> Any:
        index_P = bench.prompts.index_P + step * args.prompts
        prompts = dataclasses.replace(bench.prompts, index_P=index_P, fields=dict(fields))
        return bench.worker.player(prompts, group_size=args.group, step=step, sampling=Sampling(max_new=args.max_new))

    windows, seconds, busy, flying = staleness + _COUNTED, [], [], []
    how: Any = {"windows": windows, "steps": windows + staleness, "staleness": staleness}
    for window, flying in enumerate(tail.in_windows(bench.worker.config, begin, lambda step: args.max_new, **how)):
        rows = [(player, tokens) for _, player, tokens in flying]
        started = time.perf_counter()
        for _ in bench.worker.advance(Policy(bench.policy.params, window), rows, calls=1 if staleness > 1 else None):
            pass
        seconds.append(time.perf_counter() - started)
        busy.append(bench.worker.stats.lane_utilisation)
    for player in (player for _, player, tokens in flying if tokens is not None):
        player.abandon()
    return seconds[staleness:], busy[staleness:]


class _Job:
    """A batch that can be generated again and again; `stats` are the statistics of the last time."""

    def __init__(self, bench: rollout.Bench, env_client: Any = None, fields: Mapping[str, Any] | None = None):
        """Prepares the bench's batch; with an `env_client`, environments play it and find `fields` in their tasks."""
        self._bench, self._env_client = bench, env_client
        count = len(bench.prompts.length_P)
        self._prompts = dataclasses.replace(
            bench.prompts, fields={name: [value] * count for name, value in (fields or {}).items()}
        )
        self.stats: Any = None

    def time(self) -> tuple[float, float, float]:
        """Generates the batch: seconds, CPU seconds of the process, CPU seconds of its Python threads."""
        self._bench.prompts, self._bench.worker.env_client = self._prompts, self._env_client
        before = _thread_seconds()
        self.stats = self._bench.generate()
        return self.stats.seconds, self._bench.cpu_seconds, _thread_seconds() - before


def _thread_seconds() -> float:
    idents = [thread.ident for thread in threading.enumerate() if thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def _prefill_only(args: Any, given: int) -> Any:
    """Returns options for a batch that measures prefill: every sample has a prompt of its own, of `given` + 1 tokens,
    and draws one token."""
    changes = {"prompts": args.prompts * args.group, "group": 1, "prompt_len": (given + 1, given + 1), "max_new": 1}
    return type(args)(**(vars(args) | changes))


def _asked(args: Any, calls: int, given: int) -> dict[str, Any]:
    """Makes the fields of the tasks that `Calls` plays.

    Without calls, the whole output is appended before the first sampled token.
    """
    waits = {"delay_s": args.delay_ms / 1e3, "slow": args.slow}
    return {"calls": calls, "sampled": args.max_new, "observation": "1" * given, **waits}


def _playing(args: Any) -> Any:
    """Starts processes in which `Calls` runs; they end with the context."""
    from podrl.environments.config import EnvironmentConfig
    from podrl.environments.workers import Episodes
    from podrl.workers.user_code import Limits

    return Episodes(EnvironmentConfig(environment=f"{__name__}:Calls"), Limits(), journal=None)


def _env_client(host: Any) -> Any:
    from podrl.data.dialogue import Dialogue
    from podrl.data.tokenizer import Tokenizer
    from podrl.job.config import TINY
    from podrl.rollout.episodes import EnvironmentClient

    dialogue = Dialogue(Tokenizer(TINY))
    assert len(dialogue.encode("1" * 40)) == 40
    return EnvironmentClient(host, dialogue)
