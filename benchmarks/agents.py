"""Measures episodes of agent programs, and of environments that send conversations: `python -m benchmarks agents`."""

import argparse
import asyncio
import json
import os
import resource
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

import podrl.agent
from benchmarks.model import fake_devices

_TURNS = 3  # number of requests of a slow episode
_CONTEXT = 512  # greatest number of tokens of a prompt with its answer
_QUESTION = "How many of the letters of this sentence, counted one after the other without the spaces, are vowels? "


class Says:
    """An environment whose only turn answers the data's prompt."""

    async def run(self, task: Any, model: Any) -> None:
        await model.say(max_new=task.fields["most"])


class Asks:
    """An environment whose only request is the data's prompt, as a conversation."""

    async def run(self, task: Any, model: Any) -> None:
        await model.chat([_user(task.fields["question"])], max_tokens=task.fields["most"])


class Slow:
    """An environment that waits for `slow_s` seconds after each of its requests; its last request opens a branch."""

    async def run(self, task: Any, model: Any) -> None:
        messages = [_user(task.fields["question"])]
        for _ in range(_TURNS - 1):
            answer = await model.chat(messages, max_tokens=task.fields["most"])
            await asyncio.sleep(task.fields["slow_s"])
            messages += [answer, _user("Sure?")]
        await model.chat([_user("Anything else?")], max_tokens=task.fields["most"])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _solve(task: dict[str, Any]) -> None:
    """Asks the question of a task over HTTP."""
    fields = task["fields"]
    body = {"model": "policy", "messages": [_user(fields["question"])], "max_tokens": fields["most"]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as response:
        response.read()


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Measures the prefill of equal first requests, and many open episodes.

    Returns:
      prefilled_say, prefilled_chat, prefilled_program: tokens that prefill computed for --prompts groups of --group
        samples, if each sample's first request is made by `model.say()`, by `model.chat`, or over HTTP.
      prompt_tokens: number of tokens of the longest prompt of these samples.
      chat_of_say, program_of_say: prefilled_chat and prefilled_program divided by prefilled_say.
      episodes, episodes_seconds, answers: number of the slow episodes, seconds for all of them, and number of their
        answers.
      spills: how often the engine moved the pages of a slow episode to the host.
      memory_mb, memory_mb_before: peak memory of this process with the slow episodes, and before them.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks agents", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--max_new", type=int, default=8, help="most tokens of an answer")
    parser.add_argument("--episodes", type=int, default=1000, help="slow episodes, all open at once")
    parser.add_argument("--slow_s", type=float, default=2.0, help="wait of a slow episode after a request, seconds")
    parser.add_argument("--pool_tokens", type=int, default=None, help="rollout.pool_tokens")
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    fake_devices(args.devices)
    bench = _Bench(args)
    environments = {
        "say": {"environment": f"{__name__}:Says"},
        "chat": {"environment": f"{__name__}:Asks"},
        "program": {
            "environment": "program",
            "program": f"python -m {__name__}",
            "processes": args.prompts * args.group,
        },
    }
    counts = {}
    for name, environment in environments.items():
        with _episodes(environment) as host:
            bench.play(host, args.prompts, args.group)  # starts the processes
            counts[name] = bench.play(host, args.prompts, args.group)[0].prefill_tokens
    figures: dict[str, Any] = {"prompt_tokens": bench.prompt_tokens}
    figures |= {f"prefilled_{name}": count for name, count in counts.items()}
    figures |= {f"{name}_of_say": counts[name] / counts["say"] for name in ("chat", "program")}
    before, started = _peak_mb(), time.perf_counter()
    with _episodes({"environment": f"{__name__}:Slow"}) as host:
        stats, rollouts = bench.play(host, -(-args.episodes // args.group), args.group)
    answers = [turn for episode in rollouts.episodes for turn in episode["turns"] if turn["by"] == "model"]
    return {
        **figures,
        "episodes": len(rollouts.episodes),
        "episodes_seconds": time.perf_counter() - started,
        "answers": len(answers),
        "spills": stats.spills,
        "memory_mb_before": before,
        "memory_mb": _peak_mb(),
    }


def _episodes(environment: dict[str, Any]) -> Any:
    """Starts the processes in which episodes run; they end with the context."""
    from podrl.environments.config import EnvironmentConfig
    from podrl.environments.workers import Episodes
    from podrl.workers.user_code import Limits

    return Episodes(EnvironmentConfig(**environment), Limits(), journal=None)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Bench:
    """podrl's small model with tools, on which episodes are played.

    Attributes:
      prompt_tokens: number of tokens of the longest prompt that was played last.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Compiles the engine; call `fake_devices` before."""
        import jax

        from podrl.data.dialogue import Dialogue
        from podrl.data.tokenizer import Tokenizer
        from podrl.engine.config import RolloutConfig
        from podrl.mesh.build import make_decoding_mesh
        from podrl.models import hf_load
        from podrl.rollout.histories import Histories
        from podrl.rollout.worker import RolloutWorker
        from podrl.storage import hub
        from podrl.types import Policy

        self._args, directory = args, hub.EMBEDDED["tiny_tools"]
        mesh = make_decoding_mesh("data=1", jax.local_devices()[:1], key="--mesh")
        model, params = hf_load.load(directory, mesh, jax.numpy.dtype("float32"))
        tokenizer = Tokenizer.load(directory)
        config = RolloutConfig(
            max_prompt_length=_CONTEXT // 4,
            max_tokens_to_generate=_TURNS * args.max_new,
            max_response_tokens=3 * _CONTEXT // 4,
            kv_cache_size=_CONTEXT,
            lanes=32,
            pool_tokens=args.pool_tokens,
        )
        given = {"pad_id": tokenizer.pad_id, "eos_ids": tokenizer.eos_ids, "decode": tokenizer.decode}
        self._worker, self._policy = RolloutWorker(model, mesh, config, seed=0, **given), Policy(params, 0)
        self._worker.warm_up(params, lambda line: print(line, file=sys.stderr))
        self._dialogue, self._histories = Dialogue(tokenizer), Histories(tokenizer, "call_tool")
        self.prompt_tokens = self._started = 0

    def play(self, host: Any, prompts: int, group: int) -> tuple[Any, Any]:
        """Plays an episode for each sample; returns (counts of the engine, samples)."""
        import numpy as np

        from podrl.engine.config import Sampling
        from podrl.rollout.episodes import EnvironmentClient
        from podrl.types import Prompts

        texts = [f"{_QUESTION}{p}" for p in range(prompts)]
        ids = [self._histories.encode([_user(text)], []) for text in texts]
        length_P = np.asarray([len(one) for one in ids])
        tokens_PT = np.zeros((prompts, length_P.max()), np.int32)
        for p, one in enumerate(ids):
            tokens_PT[p, : len(one)] = one
        fields = {"question": texts, "most": [self._args.max_new] * prompts, "slow_s": [self._args.slow_s] * prompts}
        batch = Prompts(tokens_PT, length_P, np.arange(prompts), texts, fields, b"")
        self.prompt_tokens = int(length_P.max())
        self._worker.env_client = EnvironmentClient(host, self._dialogue, started=self._started)
        self._started += prompts * group
        try:
            sampling = Sampling(max_new=_TURNS * self._args.max_new)
            player = self._worker.player(batch, group_size=group, step=1, sampling=sampling)
            for _ in self._worker.advance(self._policy, [(player, None)]):
                pass
            return self._worker.stats, self._worker.rows(player, 0.0)
        finally:
            self._worker.env_client = None


if __name__ == "__main__":  # env.program starts this file as the agent program
    podrl.agent.serve(_solve)
