"""Counts a decode step's collectives and reads of a TPU's memory, without a TPU: `python -m benchmarks decode`."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parser.add_argument("--size", default="gemma2-2b", help="a published size, see podrl/models/sizes.py")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--mesh", default="data=2,tensor=4")
    parser.add_argument("--lanes", type=int, default=256, help="over the whole mesh")
    parser.add_argument("--prompt_len", type=int, default=512)
    parser.add_argument("--max_new", type=int, default=1536)
    parser.add_argument("--group", type=int, default=8, help="samples that share a prompt")
    parser.add_argument("--page_tokens", type=int, default=None, help="rollout.page_tokens")
    parser.add_argument("--prefill_tokens", type=int, default=2048, help="rollout.prefill_tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--sampled", type=int, nargs="+", default=[0, 384, 768, 1152, 1528], help="tokens every lane has sampled"
    )
    parser.add_argument("--kernel", default="auto", choices=("auto", "yes", "no"), help="attention as a TPU kernel")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Compiles `generate` and the largest prefill for a topology and counts HBM reads in the compiled text.

    The count walks the compiled program: every operation reads its operands that lie in HBM (slices and gathers only
    the part that they take), and a loop counts as often as it runs. In attention a loop runs over reads: a read is one
    page of keys and values that one lane, or several lanes together, take. The engine's own code lists the reads for
    lanes that all hold a whole prompt and the given number of sampled tokens, and this list gives the number of runs.
    A kernel copies the page of each read once, so its pages are counted from the list, too.

    Returns:
      kernel: True if attention is a kernel.
      peak_bytes, prefill_peak_bytes: peaks of `generate` and of the prefill on one chip.
      hbm_bytes, fits: bytes that a program may use; True if both peaks are within them.
      compile_seconds: seconds for compiling both programs.
      weight_bytes: weights of one chip, without tables from which a token reads one row; all experts count as if each
        had a token.
      state_bytes: states of the lanes' linear attention on one chip.
      steps: an entry for every number of sampled tokens, with these figures of one chip in one decode step:
        kv_bytes: live keys and values; prompts count once per group.
        read_bytes: bytes read from HBM.
        ratio: read_bytes over the bytes of weights, states, and live keys and values.
        least_ms: time for the bytes that are read and written, at the chip's bandwidth.
        sent_bytes, sent_least_ms: bytes sent over links, and the time for them over all links of the chip.
        collectives: number and bytes of the collectives of each kind. A collective that runs once a dispatch counts
          as a fraction.
      All figures are counted; nothing is measured.

    Raises:
      ValueError: the size or the topology is unknown, or the mesh does not fit the topology.
    """
    from podrl.plan import chips

    args = _parser().parse_args(argv)
    chips.prepare(os.environ)
    return _measure(args)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import time

    import jax

    from podrl.engine.engine import Engine
    from podrl.engine.sizes import engine_shape
    from podrl.mesh.build import make_mesh
    from podrl.mesh.rules import batch_shards
    from podrl.models import parameters, sizes
    from podrl.plan import chips

    topology = chips.parse_topology(args.topology, key="--topology")
    mesh = make_mesh(args.mesh, topology.devices(), key="--mesh")
    model, dtype = sizes.config_of(args.size), jax.numpy.dtype(args.dtype)
    shape = engine_shape(_config(args), batch_shards(mesh), recurrent=model.recurrent)
    engine = Engine(model, mesh, shape, dtype, kernel={"yes": True, "no": False}.get(args.kernel))
    params = parameters.abstract_params(model, mesh, dtype)
    programs = {program.name: program for program in engine.programs(params)}
    started = time.perf_counter()
    generate, prefill = (
        programs[name].jitted.lower(*programs[name].args).compile()
        for name in ("generate", f"prefill_{engine.shape.buckets[-1]}")
    )
    seconds = time.perf_counter() - started
    peak, prefill_peak = (float(c.memory_analysis().peak_memory_in_bytes) for c in (generate, prefill))
    state = programs["generate"].args[1]
    token_bytes = _bytes(state.pools) / (shape.pages * shape.page_tokens)
    states = _bytes(state.memories) * shape.lanes / shape.places
    tables = {"ple_embed": params.get("ple_embed"), "embed": params["embed"] if "unembed" in params else None}
    weights = _bytes(params) - _bytes(tables)
    return {
        "peak_bytes": peak,
        "prefill_peak_bytes": prefill_peak,
        "hbm_bytes": topology.chip.hbm,
        "fits": max(peak, prefill_peak) <= topology.chip.hbm,
        "kernel": engine.kernel,
        "compile_seconds": seconds,
        "weight_bytes": weights,
        "state_bytes": states,
        "steps": [
            _count(engine, generate.as_text(), weights + states, token_bytes, sampled, args, topology.chip)
            for sampled in args.sampled
        ],
    }


def _bytes(arrays: Any) -> float:
    """Counts the bytes that one chip holds of a tree of shapes with shardings."""
    import jax

    return float(sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays)))


def _config(args: argparse.Namespace) -> Any:
    from podrl.engine.config import RolloutConfig

    given = {} if args.page_tokens is None else {"page_tokens": args.page_tokens}
    return RolloutConfig(
        max_prompt_length=args.prompt_len,
        max_tokens_to_generate=args.max_new,
        kv_cache_size=args.prompt_len + args.max_new,
        lanes=args.lanes,
        prefill_tokens=args.prefill_tokens,
        **given,
    )


def _count(
    engine: Any, text: str, held: float, token_bytes: float, sampled: int, args: argparse.Namespace, chip: Any
) -> dict[str, Any]:
    """Counts one step's work at a given filling of the lanes; `held` are the bytes of weights and states."""
    from podrl.engine import attention
    from podrl.plan.hlo import GROUPED, cost_of
    from podrl.plan.programs import local_experts

    reads, tokens = _filled(engine, args.prompt_len, sampled, args.group)
    N = engine.shape.steps
    counts = {**attention.loop_counts(reads), "decode_steps": N, "filters": 0}
    if experts := local_experts(engine.model, engine.mesh):
        counts[GROUPED] = experts
    cost = cost_of(text, named=counts)
    live, sent = float(tokens * token_bytes), sum(c.bytes for c in cost.collectives) / N
    return {
        "sampled": sampled,
        "kv_bytes": live,
        "read_bytes": cost.read / N,
        "ratio": cost.read / N / (held + live),
        "least_ms": 1e3 * cost.bytes / N / chip.hbm_rate,
        "sent_bytes": sent,
        "sent_least_ms": 1e3 * sent / chip.ici_rate,
        "collectives": cost.by_kind(N),
    }


def _filled(engine: Any, prompt: int, sampled: int, group: int) -> tuple[Any, int]:
    """Builds the read list of a shard whose lanes all hold a prompt and `sampled` tokens: (list, tokens read)."""
    from podrl.engine.reads import LaneReads, Page

    C, free = engine.shape.page_tokens, iter(range(engine.shape.pages))

    def pages(start: int, tokens: int) -> list[Page]:
        return [Page(next(free), start + at, min(C, tokens - at)) for at in range(0, tokens, C)]

    seated, shared = {}, []
    for lane in range(engine.shape.lanes):
        if lane % group == 0:
            shared = pages(0, prompt - 1)
        own = pages(prompt - 1, sampled)
        takes = own if own and own[-1].count < C else [*own, Page(engine.shape.pages - 1, prompt - 1 + sampled, 0)]
        seated[lane] = LaneReads(lane // group, shared, takes)
    flat_I = np.zeros(engine.read_shape.size, np.int32)
    engine.read_shape.fill(flat_I, seated, engine.shape.pages - 1)
    groups = -(-engine.shape.lanes // group)
    return engine.read_shape.split(flat_I), groups * (prompt - 1) + engine.shape.lanes * sampled
