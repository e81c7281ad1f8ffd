"""Measures batched generation with a random model: `python -m benchmarks rollout`."""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import tail
from benchmarks.model import add_options, fake_devices, model_of, number_range

END_ID = 1
DEFAULTS = {"lanes": ", by default as many as there are samples, at most 128"}


def make_parser(
    prog: str = "python -m benchmarks rollout", description: str | None = __doc__
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_options(parser)
    parser.add_argument(
        "--embed_scale",
        type=float,
        default=0.1,
        help="scale of the random embeddings; larger ones give less even distributions",
    )
    parser.add_argument("--mesh", default="data=4", help="rollout mesh; faked CPU devices are made for it")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt_len", type=number_range, default=(16, 62), metavar="LOW:HIGH")
    parser.add_argument("--max_new", type=int, default=256)
    parser.add_argument(
        "--forced_len", type=int, default=0, help="most tokens of every sample, if below --max_new; 0: --max_new"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=None)
    engine = ("lanes", "steps_per_dispatch", "page_tokens", "pool_tokens", "prefill_tokens", "members_per_read")
    for name in engine:
        parser.add_argument(f"--{name}", type=int, default=None, help=f"rollout.{name}{DEFAULTS.get(name, '')}")
    parser.add_argument(
        "--page_kernel", type=lambda word: word == "yes", default=None, help="rollout.page_kernel: yes or no"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed generations after one untimed; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tail", action="store_true", help="log-normal lengths, batch after batch: see benchmarks.tail"
    )
    parser.add_argument("--staleness", type=int, default=2, help="staleness of --tail")
    parser.add_argument("--trace", default="", help="directory to write a profiler trace of one more generation to")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Generates the same batch several times with a random model.

    The model draws nearly uniformly, so a sample ends with probability 1 / vocab per token: lengths have a long tail.

    Returns:
      weight_bytes, kv_token_bytes: bytes of the whole model, and of a token's keys and values.
      samples, prompt_tokens, tokens: number of samples, tokens of all prompts, and tokens sampled per generation.
      seconds, tok_s: median seconds of a generation, and tokens sampled per second.
      cpu_seconds: median CPU time of a generation, which other programs on the machine disturb less than seconds.
      decode_steps: decode steps of the busiest shard.
      lane_utilisation, prefill_tokens, dispatches, spills: the engine's figures of these names.
      host_share: share of the time with no dispatch in flight.
      compiles, warm_up_seconds: programs built after warm-up, and seconds of the warm-up.
      peak_bytes: peak of one device in the compiled `generate`.
      mesh, lanes: the mesh and the number of lanes that were used.
    """
    args = make_parser().parse_args(argv)
    fake_devices(args.devices)
    return tail.measure(Bench(args, end_ids=()), args) if args.tail else _measure(args)


class Bench:
    """A rollout job with the command's options, whose batch can be generated again and again.

    Attributes:
      model: ModelConfig of the model that generates.
      prompts: prompts of the batch.
      warm_up_seconds: seconds that compiling took.
      cpu_seconds: CPU time of the last generation.
      kv_token_bytes: bytes of a token's keys and values in all layers.
    """

    def __init__(self, args: argparse.Namespace, response: int = 0, end_ids: Sequence[int] = (END_ID,)):
        """Builds the model and compiles the engine; call `fake_devices` before.

        Args:
          args: the options of `make_parser`.
          response: most sampled and appended tokens of a sample, if they are more than `max_new`.
          end_ids: tokens that end a sample.
        """
        import jax

        from podrl.mesh.build import make_mesh, parse_mesh
        from podrl.models import parameters
        from podrl.rollout.worker import RolloutWorker
        from podrl.types import Policy

        self.args = args
        sizes = parse_mesh(args.mesh, key="--mesh")
        mesh = make_mesh(args.mesh, jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)], key="--mesh")
        self.model = model = model_of(args)
        dtype = jax.numpy.dtype(args.dtype)
        abstract = parameters.abstract_params(model, mesh, dtype)
        self.kv_token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize

        def init(key: Any) -> Any:
            """Draws parameters with embeddings so small that all tokens are about equally likely in any context."""
            params = parameters.init_params(model, key, dtype)
            return {**params, "embed": params["embed"] * args.embed_scale}

        make = jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))
        self.policy = Policy(make(jax.random.key(args.seed)), 0)
        self.worker = RolloutWorker(
            model, mesh, _config(args, response), pad_id=0, eos_ids=end_ids, decode=lambda ids: "", seed=args.seed
        )
        started = time.perf_counter()
        self.worker.warm_up(self.policy.params, lambda line: print(line, file=sys.stderr))
        self.warm_up_seconds = time.perf_counter() - started
        self.cpu_seconds = 0.0
        self.prompts = make_prompts(args)

    def generate(self) -> Any:
        """Generates the batch and returns the worker's statistics."""
        before = time.process_time()
        self.rollouts()
        self.cpu_seconds = time.process_time() - before
        return self.worker.stats

    def rollouts(self) -> Any:
        """Generates the batch and returns its samples."""
        return self.worker.generate(
            self.policy, self.prompts, group_size=self.args.group, step=0, sampling=_sampling(self.args)
        )


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    bench = Bench(args)
    bench.generate()
    runs, cpu = [], []
    for _ in range(args.repeats):
        runs.append(bench.generate())
        cpu.append(bench.cpu_seconds)
    stats = sorted(runs, key=lambda s: s.seconds)[len(runs) // 2]
    if args.trace:
        with jax.profiler.trace(args.trace):
            bench.generate()
    memory = bench.worker.memory(bench.policy.params)
    seconds = statistics.median(s.seconds for s in runs)
    return {
        "tokens": stats.tokens,
        "seconds": seconds,
        "tok_s": stats.tokens / seconds,
        "decode_steps": stats.decode_steps,
        "lane_utilisation": stats.lane_utilisation,
        "prefill_tokens": stats.prefill_tokens,
        "dispatches": stats.dispatches,
        "spills": stats.spills,
        "host_share": stats.host_seconds / stats.seconds,
        "cpu_seconds": statistics.median(cpu),
        "compiles": sum(s.compiles for s in runs),
        "peak_bytes": memory,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(bench.policy.params)),
        "kv_token_bytes": bench.kv_token_bytes,
        "samples": args.prompts * args.group,
        "prompt_tokens": int(bench.prompts.length_P.sum()),
        "warm_up_seconds": bench.warm_up_seconds,
        "mesh": args.mesh,
        "lanes": bench.worker.config.lanes,
    }


def _config(args: argparse.Namespace, response: int) -> Any:
    from podrl.engine.config import RolloutConfig

    names = (
        "lanes",
        "steps_per_dispatch",
        "page_tokens",
        "pool_tokens",
        "prefill_tokens",
        "members_per_read",
        "page_kernel",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    # Lanes that no sample ever fills would only make the matrix products larger.
    given.setdefault("lanes", min(RolloutConfig.lanes, args.prompts * args.group))
    response = max(response, args.max_new)
    return RolloutConfig(
        max_tokens_to_generate=args.max_new,
        max_response_tokens=response,
        max_prompt_length=args.prompt_len[1],
        kv_cache_size=args.prompt_len[1] + response,
        **given,
    )


def _sampling(args: argparse.Namespace) -> Any:
    from podrl.engine.config import Sampling

    limit = min(args.max_new, args.forced_len or args.max_new)
    return Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_new=limit)


def make_prompts(args: argparse.Namespace) -> Any:
    """Draws random prompts of uniformly distributed lengths, without the end token."""
    from podrl.types import Prompts

    rng = np.random.default_rng(args.seed)
    P, (low, high) = args.prompts, args.prompt_len
    tokens_PT = rng.integers(END_ID + 1, args.vocab, (P, high)).astype(np.int32)
    length_P = rng.integers(low, high + 1, P)
    tokens_PT[np.arange(high) >= length_P[:, None]] = 0
    return Prompts(tokens_PT, length_P, np.arange(P), [""] * P, {}, b"")


def least_bytes(figures: Mapping[str, Any], devices: int) -> float:
    """Counts the bytes that a device must read: in every step the weights and live keys and values.

    The keys and values of a prompt count once for its group.

    Args:
      figures: result of `run`; the count is exact if all samples are equally long and all have a lane.
      devices: number of devices; each has the whole weights and an equal part of the samples.
    """
    steps, samples = figures["decode_steps"], figures["samples"]
    live = steps * figures["prompt_tokens"] + samples * steps * (steps - 1) / 2
    return steps * figures["weight_bytes"] + live / devices * figures["kv_token_bytes"]
