"""Measures one optimizer update on random samples: `python -m podrl.bench step`."""

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="podrl.bench step", description=__doc__)
    sizes = {"layers": 3, "dim": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 384}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, default=4096, help="attention window of every other layer")
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt_len", type=_range, default=(16, 62), metavar="LOW:HIGH")
    parser.add_argument("--completion_len", type=_range, default=(1, 256), metavar="LOW:HIGH")
    parser.add_argument("--src", default="fsdp=2,tensor=2", help="trainer mesh; faked CPU devices are made for it")
    parser.add_argument("--max_tokens_per_row", type=int, default=None)
    parser.add_argument("--max_seq_token_per_tpu", type=int, default=None)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--remat", default="dots", choices=("none", "dots", "full", "offload"))
    parser.add_argument("--steps", type=int, default=5, help="timed updates, each on other samples; the median counts")
    parser.add_argument("--devices", type=int, default=8, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times training updates on samples of random lengths and contents.

    Returns:
      seconds (median of an update, log-probabilities of the reference excluded), cpu_seconds (processor time of it,
      which means more than seconds where other programs run), logprob_seconds (scoring the same batch once),
      tokens_per_second (real tokens), completion_tokens_per_second, padding_share (of computed tokens), mfu (model
      FLOP, real tokens, forward and backward, over `matmul_flops`), matmul_flops (this machine's rate, FLOP/s over the
      mesh), peak_bytes (of one device in the compiled update), compiles (programs built after the first update), and
      the shapes used.
    """
    args = _parser().parse_args(argv)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return _measure(args)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    from podrl.algorithms.policy_loss import PolicyLoss
    from podrl.mesh.build import make_mesh, parse_mesh
    from podrl.models import decoder
    from podrl.trainer import packing, step
    from podrl.trainer import state as state_lib
    from podrl.trainer.config import RLTrainingConfig

    sizes = parse_mesh(args.src, key="--src")
    mesh = make_mesh(args.src, jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)], key="--src")
    model = _model(args)
    training = RLTrainingConfig(
        eval_every_n_steps=0,
        max_tokens_per_row=args.max_tokens_per_row,
        max_seq_token_per_tpu=args.max_seq_token_per_tpu,
        dtype=args.dtype,
        remat=args.remat,
        learning_rate=1e-4,
    )
    optimizer = training.optimizer()
    shape = training.pack_shape(
        sequences=args.prompts * args.group, max_length=args.prompt_len[1] + args.completion_len[1], mesh=mesh
    )
    samples = [_samples(args, seed) for seed in range(args.seed, args.seed + args.steps + 1)]
    placements = [packing.place(sample["length_B"], shape) for sample in samples]
    batches = [
        state_lib.put_batch(_pack(sample, placement), mesh)
        for sample, placement in zip(samples, placements, strict=True)
    ]
    train_step = step.make_train_step(model, PolicyLoss(), optimizer, mesh, dtype=args.dtype, remat=args.remat)
    logprob_fn = step.make_logprob_fn(model, mesh, dtype=args.dtype)
    abstract = decoder.abstract_params(model, mesh, jax.numpy.dtype("float32"))
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    params = jax.jit(lambda key: decoder.init_params(model, key), out_shardings=placed)(jax.random.key(args.seed))
    state, frozen = state_lib.init_state(params, model, optimizer, mesh)
    compiled = train_step.lower(state, frozen, batches[0]).compile()  # pyright: ignore[reportFunctionMemberAccess]
    seconds, scoring, processor, compiles = [], [], [], []
    for index, batch in enumerate(batches):
        if index == 1:
            jax.monitoring.register_event_duration_secs_listener(_count_compiles(compiles))
        start = time.perf_counter()
        jax.block_until_ready(logprob_fn(decoder.join_trainable(state.params, frozen), batch))
        scored, busy = time.perf_counter(), time.process_time()
        state, metrics = train_step(state, frozen, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - scored)
        processor.append(time.process_time() - busy)
        scoring.append(scored - start)
    built = len(compiles)
    memory = compiled.memory_analysis()
    flops = _matmul_flops(mesh)
    work = [_model_flops(model, parameter_count(model), sample["length_B"]) for sample in samples]
    timed = range(1, len(samples))
    rates = lambda count: statistics.median(count(i) / seconds[i] for i in timed)  # noqa: E731
    return {
        "seconds": statistics.median(seconds[1:]),
        "cpu_seconds": statistics.median(processor[1:]),
        "logprob_seconds": statistics.median(scoring[1:]),
        "tokens_per_second": rates(lambda i: int(samples[i]["length_B"].sum())),
        "completion_tokens_per_second": rates(lambda i: int(samples[i]["mask_BT"].sum())),
        "padding_share": statistics.mean(placements[i].padding_share() for i in timed),
        "mfu": rates(lambda i: work[i] / flops),
        "matmul_flops": flops,
        "peak_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "compiles": built,
        "mesh": args.src,
        "parameters": parameter_count(model),
        "rows": shape.rows,
        "tokens_per_row": shape.tokens,
        "micro_batches": statistics.mean(placements[i].micro_batches for i in timed),
    }


def parameter_count(model: Any) -> int:
    """Parameters of the model, adapters included."""
    import jax

    from podrl.models import decoder

    specs = jax.tree.leaves(decoder.param_specs(model), is_leaf=decoder.is_param)
    return sum(math.prod(spec.shape) for spec in specs)


def _model(args: argparse.Namespace) -> Any:
    from podrl.models.config import LoraConfig, gemma2_config

    model = gemma2_config(
        vocab_size=args.vocab,
        num_layers=args.layers,
        model_dim=args.dim,
        ffn_dim=args.ffn,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        window=args.window,
    )
    return dataclasses.replace(model, lora=LoraConfig(rank=args.lora_rank)) if args.lora_rank else model


def _samples(args: argparse.Namespace, seed: int) -> dict[str, np.ndarray]:
    """Random sequences: one prompt length per group, one completion length per sample, both uniform."""
    rng = np.random.default_rng(seed)
    B = args.prompts * args.group
    prompt_B = np.repeat(rng.integers(args.prompt_len[0], args.prompt_len[1] + 1, args.prompts), args.group)
    length_B = prompt_B + rng.integers(args.completion_len[0], args.completion_len[1] + 1, B)
    T = args.prompt_len[1] + args.completion_len[1]
    place_T = np.arange(T)
    logprob_BT = -rng.exponential(2.0, (B, T)).astype(np.float32)
    return {
        "length_B": length_B,
        "tokens_BT": rng.integers(0, args.vocab, (B, T)),
        "mask_BT": (place_T >= prompt_B[:, None]) & (place_T < length_B[:, None]),
        "advantage_BT": rng.normal(size=B).astype(np.float32),
        "logprob_BT": logprob_BT,
    }


def _pack(sample: dict[str, np.ndarray], placement: Any) -> Any:
    from podrl.trainer import packing

    return packing.pack(
        placement,
        tokens_BT=sample["tokens_BT"],
        mask_BT=sample["mask_BT"],
        advantage_BT=sample["advantage_BT"],
        old_logprob_BT=sample["logprob_BT"],
        ref_logprob_BT=sample["logprob_BT"],
        sampler_logprob_BT=sample["logprob_BT"],
    )


def _model_flops(model: Any, parameters: int, length_B: np.ndarray) -> float:
    """FLOP of forward and backward on real tokens: 6 per parameter and token, plus causal attention."""
    tokens, squares = float(length_B.sum()), float((length_B.astype(np.float64) ** 2).sum())
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * squares / 2
    return 6.0 * parameters * tokens + attention


def _matmul_flops(mesh: Any, size: int = 1024) -> float:
    """FLOP/s of float32 matmuls of `size` on all devices of the mesh at once, the best of several tries."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    best = 0.0
    for devices in ([mesh.devices.flat[0]], list(mesh.devices.flat)):
        line = jax.sharding.Mesh(np.asarray(devices), ("all",))
        x = jax.device_put(jnp.ones((len(devices), size, size)), NamedSharding(line, Spec("all")))
        product = jax.jit(lambda a: jnp.einsum("nij,njk->nik", a, a) / size)
        product(x).block_until_ready()
        for _ in range(5):
            start = time.perf_counter()
            product(x).block_until_ready()
            best = max(best, 2.0 * len(devices) * size**3 / (time.perf_counter() - start))
    return best


def _count_compiles(seen: list[str]) -> Any:
    def listen(name: str, *_: Any, **__: Any) -> None:
        if name.endswith("backend_compile_duration"):
            seen.append(name)

    return listen
