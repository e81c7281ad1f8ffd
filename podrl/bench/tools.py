"""Measures generation in which every sample calls a tool: `python -m podrl.bench tools`."""

import asyncio
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from podrl.bench import rollout
from podrl.bench.model import fake_devices


class Calls:
    """Environment that answers each of the model's turns, `calls` times, after a random wait of up to `delay_s`."""

    async def run(self, task: Any, model: Any) -> None:
        asked, wait = task.fields, random.Random(task.seed)
        observation = ""
        for _ in range(asked["calls"]):
            await model.say(observation, max_new=asked["turn_tokens"])
            await model.outside("wait", functools.partial(_waited, wait.random() * asked["delay_s"]))
            observation = asked["observation"]
        await model.say(observation, max_new=asked["turn_tokens"])


async def _waited(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Generates the same batch with calls, and the same tokens without: plain samples, and a prefill of what was given.

    Returns:
      of_plain (seconds with calls over those of plain samples and prefill), seconds, plain_seconds, prefill_seconds
      (medians), tokens, calls, given_tokens, prefill_per_given (tokens computed for each given one),
      lane_utilisation (sampled tokens over lane places of all decode steps), lane_utilisation_plain,
      cpu_seconds_per_call (of this process, above the plain samples and the prefill), spills, compiles.
    """
    parser = rollout.make_parser(prog="podrl.bench tools", description=__doc__)
    parser.set_defaults(mesh="data=1", max_new=128)
    parser.add_argument("--calls", type=int, default=3, help="of each sample; --max_new is shared by its turns")
    parser.add_argument("--given", type=int, default=24, help="tokens of a tool's output")
    parser.add_argument("--delay_ms", type=float, default=200.0, help="the longest wait for a tool")
    args = parser.parse_args(argv)
    fake_devices(args.devices)
    given = args.calls * args.given
    bench = rollout.Bench(args, response=args.max_new + given)
    told = rollout.Bench(_prefill_only(args, given))
    plain, prefill = _median(bench, args.repeats), _median(told, args.repeats)
    with _playing(args, bench):
        called = _median(bench, args.repeats)
    samples = args.prompts * args.group
    calls, tokens = samples * args.calls, samples * given
    without = plain.cpu_seconds + prefill.cpu_seconds
    return {
        "of_plain": called.stats.seconds / (plain.stats.seconds + prefill.stats.seconds),
        "seconds": called.stats.seconds,
        "plain_seconds": plain.stats.seconds,
        "prefill_seconds": prefill.stats.seconds,
        "tokens": called.stats.tokens,
        "calls": calls,
        "given_tokens": tokens,
        "prefill_per_given": (called.stats.prefill_tokens - plain.stats.prefill_tokens) / tokens,
        "lane_utilisation": called.stats.lane_utilisation,
        "lane_utilisation_plain": plain.stats.lane_utilisation,
        "cpu_seconds_per_call": (called.cpu_seconds - without) / calls,
        "spills": called.stats.spills,
        "compiles": called.stats.compiles,
    }


@dataclasses.dataclass(frozen=True)
class _Timed:
    stats: Any
    cpu_seconds: float


def _median(bench: rollout.Bench, repeats: int) -> _Timed:
    """The generation of median length, after one that is not counted."""
    bench.generate()
    timed = [_Timed(bench.generate(), bench.cpu_seconds) for _ in range(repeats)]
    return sorted(timed, key=lambda one: one.stats.seconds)[repeats // 2]


def _prefill_only(args: Any, given: int) -> Any:
    """Options of a batch in which each sample is a prompt of its own, as long as what its tools give it."""
    changes = {"prompts": args.prompts * args.group, "group": 1, "prompt_len": (given + 1, given + 1), "max_new": 1}
    return type(args)(**(vars(args) | changes))


def _playing(args: Any, bench: rollout.Bench) -> Any:
    """Gives the samples of a bench their environment; ends it with the context."""
    from podrl.data.dialogue import Dialogue
    from podrl.data.tokenizer import Tokenizer
    from podrl.environments.config import EnvironmentConfig
    from podrl.environments.workers import Episodes
    from podrl.job.config import TINY
    from podrl.rollout.episodes import Partner
    from podrl.runtime.user_code import Limits

    dialogue = Dialogue(Tokenizer(TINY))
    observation = "1" * args.given
    assert len(dialogue.encode(observation)) == args.given
    asked = {
        "calls": args.calls,
        "turn_tokens": args.max_new // (args.calls + 1),
        "delay_s": args.delay_ms / 1e3,
        "observation": observation,
    }
    bench.prompts = dataclasses.replace(
        bench.prompts, fields={name: np.full(args.prompts, value).tolist() for name, value in asked.items()}
    )
    host = Episodes(EnvironmentConfig(environment=f"{__name__}:Calls"), Limits(), journal=None)
    bench.worker.partner = Partner(host, dialogue)
    return host
