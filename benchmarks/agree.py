"""Compares the sampler's log-probabilities with the trainer's on a device: `python -m benchmarks agree`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.model import fake_devices
from benchmarks.rollout import Bench, make_parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Generates with random weights, and scores the samples as the trainer does, with the same weights and dtype.

    Returns:
      tokens: number of compared tokens.
      entropy: mean of -log p of the sampled tokens, in nats; `--embed_scale` changes it.
      mean, p99, max: absolute difference between both log-probabilities of a token, in nats.
    """
    args = make_parser(prog="python -m benchmarks agree", description=__doc__).parse_args(argv)
    fake_devices(args.devices)
    bench = Bench(args)
    rollouts = bench.rollouts()
    difference = np.abs(_scores(bench, rollouts) - rollouts.raw_logprob_BT)[rollouts.mask_BT.astype(bool)]
    return {
        "tokens": len(difference),
        "entropy": float(-rollouts.raw_logprob_BT[rollouts.mask_BT.astype(bool)].mean()),
        "mean": float(difference.mean()),
        "p99": float(np.quantile(difference, 0.99)),
        "max": float(difference.max()),
        "dtype": args.dtype,
    }


def _scores(bench: Bench, rollouts: Any) -> np.ndarray:
    """Computes the log-probabilities of a batch's tokens as the trainer does, [B, T]."""
    from podrl.trainer import packing, state, step
    from podrl.trainer.config import RLTrainingConfig
    from podrl.trainer.pack_shape import pack_shape

    args, mesh = bench.args, bench.worker.mesh
    training = RLTrainingConfig(eval_every_n_steps=0, dtype=args.dtype)
    shape = pack_shape(
        training, mesh, sequences=args.prompts * args.group, max_length=args.prompt_len[1] + args.max_new
    )
    placement = packing.place(rollouts.length_B, shape)
    score = step.make_logprob_fn(bench.model, mesh, temperature=args.temperature, dtype=args.dtype)
    batch = state.put_batch(placement.batch(placement.layout(rollouts.tokens_BT)), mesh)
    return placement.unpack(state.fetch(score(bench.policy.params, batch), mesh), rollouts.tokens_BT.shape[1])
