"""Measures one optimizer update on random samples: `python -m benchmarks step`."""

import argparse
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import operations, sequence
from benchmarks.model import add_options, fake_devices, model_of, number_range


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step", description=__doc__)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt_len", type=number_range, default=(16, 62), metavar="LOW:HIGH")
    parser.add_argument("--completion_len", type=number_range, default=(1, 256), metavar="LOW:HIGH")
    parser.add_argument("--src", default="fsdp=2,tensor=2", help="trainer mesh; faked CPU devices are made for it")
    parser.add_argument("--max_tokens_per_row", type=int, default=None)
    parser.add_argument("--max_seq_token_per_tpu", type=int, default=None)
    parser.add_argument(
        "--share_prompts", choices=("auto", "yes", "no"), default="auto", help="see trainer.share_prompts"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--remat", default="dots", choices=("none", "dots", "full", "offload"))
    parser.add_argument("--steps", type=int, default=5, help="timed updates, each on other samples; the median counts")
    parser.add_argument(
        "--operations", action="store_true", help="on CPU, also measure the seconds of each kind of operation"
    )
    parser.add_argument("--seq", type=int, default=0, help="count an update with this mesh axis beside one without")
    parser.add_argument("--topology", default="", help="with --seq: compile for these TPUs, such as v5e:2x4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Times training updates on random samples of random lengths; with --seq it counts instead (benchmarks.sequence).

    Returns:
      seconds, cpu_seconds: median wall time and processor time of an update, without the reference's log-probabilities.
        If other programs run, cpu_seconds says more.
      logprob_seconds: seconds for scoring the same batch once.
      tokens_per_second, completion_tokens_per_second: real tokens, and real tokens of completions, per second of an
        update.
      padding_share: share of the computed tokens that are padding.
      mfu: FLOP per second of forward and backward over real tokens, divided by `matmul_flops`.
      matmul_flops, peak_flops: FLOP/s of all devices of the mesh, measured for `--dtype`, and stated by the vendor for
        bfloat16 (0 if unknown).
      peak_bytes: peak of one device in the compiled update.
      compiles: programs built after the first update.
      mesh, parameters, rows, tokens_per_row, micro_batches: the mesh, and the sizes of the model and of packed batches.
      operations, with --operations: seconds that all devices together spent in each kind of operation in an update.
    """
    args = make_parser().parse_args(argv)
    if args.seq:
        return sequence.count(args)
    fake_devices(args.devices)
    return _measure(args)


@dataclasses.dataclass
class _Update:
    """A compiled update with its batch on the device.

    Attributes:
      samples: samples of every update, as `_samples` makes them.
      placements, batches: places of the samples in packed rows, and the packed rows on the mesh.
      score: function (whole parameters, batch) -> log-probabilities.
    """

    mesh: Any
    model: Any
    shape: Any
    samples: list[dict[str, np.ndarray]]
    placements: list[Any]
    batches: list[Any]
    train_step: Any
    score: Any
    state: Any
    frozen: Any


def make_update(args: argparse.Namespace) -> _Update:
    """Builds the programs, a random state and the batches of an update; compiles nothing yet."""
    import jax

    from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
    from podrl.groups import complete
    from podrl.mesh.build import make_mesh, parse_mesh
    from podrl.models import parameters
    from podrl.trainer import packing, step
    from podrl.trainer import state as state_lib
    from podrl.trainer.config import RLTrainingConfig
    from podrl.trainer.pack_shape import pack_shape

    sizes = parse_mesh(args.src, key="--src")
    mesh = make_mesh(args.src, jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)], key="--src")
    model = model_of(args)
    training = RLTrainingConfig(
        eval_every_n_steps=0,
        max_tokens_per_row=args.max_tokens_per_row,
        max_seq_token_per_tpu=args.max_seq_token_per_tpu,
        share_prompts={"auto": None, "yes": True, "no": False}[args.share_prompts],
        dtype=args.dtype,
        remat=args.remat,
        learning_rate=1e-4,
    )
    optimizer = training.optimizer()
    shape = pack_shape(
        training,
        mesh,
        sequences=args.prompts * args.group,
        max_length=args.prompt_len[1] + args.completion_len[1],
        group_size=args.group,
        max_prompt_length=args.prompt_len[1],
    )
    samples = [_samples(args, seed) for seed in range(args.seed, args.seed + args.steps + 1)]
    group_B = complete(args.prompts, args.group)
    prefixes = [packing.SharedPrefixes.of_prompts(sample["prompt_P"], group_B) for sample in samples]
    placements = [packing.place(s["length_B"], shape, alike) for s, alike in zip(samples, prefixes, strict=True)]
    batches = [
        state_lib.put_batch(_pack(sample, placement), mesh)
        for sample, placement in zip(samples, placements, strict=True)
    ]
    train_step = step.make_train_step(
        model, PolicyLoss(KLLossSettings()), optimizer, mesh, dtype=args.dtype, remat=args.remat
    )
    logprob_fn = step.make_logprob_fn(model, mesh, dtype=args.dtype)
    abstract = parameters.abstract_params(model, mesh, jax.numpy.dtype("float32"))
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    params = jax.jit(lambda key: parameters.init_params(model, key), out_shardings=placed)(jax.random.key(args.seed))
    state, frozen = state_lib.init_state(params, model, optimizer, mesh)
    return _Update(mesh, model, shape, samples, placements, batches, train_step, logprob_fn, state, frozen)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    from podrl.mesh.chips import peak_flops
    from podrl.models import parameters
    from podrl.models.sizes import parameter_count

    job = make_update(args)
    samples, placements, state = job.samples, job.placements, job.state
    compiled = job.train_step.lower(state, job.frozen, job.batches[0]).compile()
    memory = compiled.memory_analysis()
    seconds, scoring, processor, compiles = [], [], [], []
    for index, batch in enumerate(job.batches):
        if index == 1:
            jax.monitoring.register_event_duration_secs_listener(_count_compiles(compiles))
        start = time.perf_counter()
        jax.block_until_ready(job.score(parameters.join_trainable(state.params, job.frozen), batch.layout()))
        scored, busy = time.perf_counter(), time.process_time()
        state, metrics = job.train_step(state, job.frozen, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - scored)
        processor.append(time.process_time() - busy)
        scoring.append(scored - start)
    built = len(compiles)
    traced = {}
    if args.operations:
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                for batch in job.batches[1:]:
                    state, _ = job.train_step(state, job.frozen, batch)
                jax.block_until_ready(state)
            by_kind = operations.seconds_by_kind(compiled.as_text(), directory)
        traced = {"operations": {kind: seconds / args.steps for kind, seconds in by_kind.items()}}
    flops, weights = matmul_flops(job.mesh, args.dtype), parameter_count(job.model)
    work = [
        _model_flops(job.model, weights, sample["length_B"], placement.packed)
        for sample, placement in zip(samples, placements, strict=True)
    ]
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
        "peak_flops": peak_flops(jax.devices()[0].device_kind) * job.mesh.size,
        "peak_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "compiles": built,
        "mesh": args.src,
        "parameters": weights,
        "rows": job.shape.rows,
        "tokens_per_row": job.shape.tokens,
        "micro_batches": statistics.mean(placements[i].micro_batches for i in timed),
        **traced,
    }


def _samples(args: argparse.Namespace, seed: int) -> dict[str, np.ndarray]:
    """Draws random sequences: one prompt length per group, one completion length per sample, both uniform."""
    rng = np.random.default_rng(seed)
    B = args.prompts * args.group
    prompt_P = rng.integers(args.prompt_len[0], args.prompt_len[1] + 1, args.prompts)
    prompt_B = np.repeat(prompt_P, args.group)
    length_B = prompt_B + rng.integers(args.completion_len[0], args.completion_len[1] + 1, B)
    T = args.prompt_len[1] + args.completion_len[1]
    place_T = np.arange(T)
    logprob_BT = -rng.exponential(2.0, (B, T)).astype(np.float32)
    tokens_BT = rng.integers(0, args.vocab, (B, T))
    first_BT = np.repeat(tokens_BT[:: args.group], args.group, axis=0)
    return {
        "prompt_P": prompt_P,
        "length_B": length_B,
        "tokens_BT": np.where(place_T < prompt_B[:, None], first_BT, tokens_BT),
        "mask_BT": (place_T >= prompt_B[:, None]) & (place_T < length_B[:, None]),
        "advantage_BT": rng.normal(size=B).astype(np.float32),
        "logprob_BT": logprob_BT,
    }


def _pack(sample: dict[str, np.ndarray], placement: Any) -> Any:
    from podrl.algorithms.policy_rows import ReferencedRows

    mask_BT, length_BT = placement.loss_tokens(sample["mask_BT"])
    advantage_BT = np.broadcast_to(sample["advantage_BT"][:, None], sample["tokens_BT"].shape)
    logprob_BT = placement.scatter(sample["logprob_BT"], where_BT=sample["mask_BT"])
    given: dict[str, Any] = {
        "layout": placement.layout(sample["tokens_BT"]),
        "mask_BT": mask_BT,
        "length_BT": length_BT,
        "advantage_BT": placement.scatter(advantage_BT, where_BT=sample["mask_BT"]),
        "kl_scale": 1.0,
    }
    # All other arrays that the loss reads get random numbers of the size of log-probabilities, because their values do
    # not change the time.
    required = [field.name for field in dataclasses.fields(ReferencedRows) if field.default is dataclasses.MISSING]
    others = {name: logprob_BT for name in required if name not in given}
    return placement.batch(ReferencedRows(**given, **others))


def _model_flops(model: Any, parameters: int, length_B: np.ndarray, tokens: int) -> float:
    """Counts FLOP of forward and backward: 6 per parameter and packed token, plus causal attention."""
    squares = float((length_B.astype(np.float64) ** 2).sum())
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * squares / 2
    return 6.0 * parameters * tokens + attention


def matmul_flops(mesh: Any, dtype: str = "float32") -> float:
    """Measures FLOP/s of large square matmuls on all devices of the mesh at once, the best of several tries."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    best, size = 0.0, 1024 if mesh.devices.flat[0].platform == "cpu" else 8192
    for devices in ([mesh.devices.flat[0]], list(mesh.devices.flat)):
        line = jax.sharding.Mesh(np.asarray(devices), ("all",))
        x = jax.device_put(jnp.ones((len(devices), size, size), dtype), NamedSharding(line, Spec("all")))
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
