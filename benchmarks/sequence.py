"""Counts a train step whose rows are cut along time, and one with whole rows: `python -m benchmarks step --seq=2`."""

import argparse
import math
import os
from typing import Any

from benchmarks.model import fake_devices, model_of

# Nothing runs, so machine code for CPUs is made with least effort; XLA makes the counted text before the machine code.
_LEAST_EFFORT = {"xla_backend_optimization_level": 0}


def count(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles one update on the mesh `--src`, and on the mesh with its `fsdp` divided by `--seq`; runs neither.

    Bytes of HBM and collectives are counted from the compiled text of one chip; all samples have the greatest length.

    Returns:
      counted_hbm_bytes, counted_sent_bytes (over links), counted_collectives (by kind: executions and bytes sent) and
      peak_bytes without `seq`, and with `seq` under the same names behind 'seq_'; counted_hbm_ratio, counted_sent_ratio
      and peak_ratio (value with `seq` divided by value without it); mesh and seq_mesh.

    Raises:
      ValueError: `--seq` does not divide the mesh's fsdp, or the topology has another size than the mesh.
    """
    from podrl.mesh.build import AXES, parse_mesh
    from podrl.plan import chips

    sizes = dict(zip(AXES, parse_mesh(args.src, key="--src"), strict=True))
    if args.seq < 2 or sizes["seq"] != 1 or sizes["fsdp"] % args.seq:
        raise ValueError(
            f"--seq={args.seq} must be at least 2 and divide the fsdp of --src={args.src}, which has no seq itself."
        )
    if args.topology:
        chips.prepare(os.environ)
        devices = chips.parse_topology(args.topology, key="--topology").devices()
    else:
        fake_devices(math.prod(sizes.values()))
        import jax

        devices = jax.devices()[: math.prod(sizes.values())]
    cut = sizes | {"fsdp": sizes["fsdp"] // args.seq, "seq": args.seq}
    meshes = [",".join(f"{axis}={n}" for axis, n in each.items()) for each in (sizes, cut)]
    whole, seq = (_counted(args, mesh, devices) for mesh in meshes)
    ratio = lambda name: seq[name] / max(whole[name], 1.0)  # noqa: E731
    return {
        "mesh": meshes[0],
        "seq_mesh": meshes[1],
        **whole,
        **{f"seq_{name}": value for name, value in seq.items()},
        "counted_hbm_ratio": ratio("counted_hbm_bytes"),
        "counted_sent_ratio": ratio("counted_sent_bytes"),
        "peak_ratio": ratio("peak_bytes"),
    }


def _counted(args: argparse.Namespace, spec: str, devices: Any) -> dict[str, Any]:
    from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
    from podrl.mesh.build import make_mesh
    from podrl.plan.hlo import cost_of
    from podrl.trainer import state as state_lib
    from podrl.trainer import step
    from podrl.trainer.config import RLTrainingConfig
    from podrl.trainer.pack_shape import pack_shape

    training = RLTrainingConfig(
        eval_every_n_steps=0,
        max_tokens_per_row=args.max_tokens_per_row,
        max_seq_token_per_tpu=args.max_seq_token_per_tpu,
        share_prompts={"auto": None, "yes": True, "no": False}[args.share_prompts],
        dtype=args.dtype,
        remat=args.remat,
        learning_rate=1e-4,
    )
    mesh, model, optimizer = make_mesh(spec, devices, key="--src"), model_of(args), training.optimizer()
    shape = pack_shape(
        training,
        mesh,
        sequences=args.prompts * args.group,
        max_length=args.prompt_len[1] + args.completion_len[1],
        group_size=args.group,
        max_prompt_length=args.prompt_len[1],
    )
    loss = PolicyLoss(KLLossSettings())
    state, frozen = state_lib.abstract_state(model, optimizer, mesh, "float32")
    update: Any = step.make_train_step(model, loss, optimizer, mesh, dtype=args.dtype, remat=args.remat)
    lowered = update.lower(state, frozen, state_lib.abstract_batch(loss.rows, shape, mesh))
    compiled = lowered.compile(compiler_options=None if args.topology else _LEAST_EFFORT)
    cost = cost_of(compiled.as_text(), trips=lambda depth: float(shape.micro_batches) if depth == 0 else 1.0)
    memory = compiled.memory_analysis()
    return {
        "rows": shape.rows,
        "tokens_per_row": shape.tokens,
        "micro_batches": shape.micro_batches,
        "counted_hbm_bytes": cost.bytes,
        "counted_sent_bytes": sum(c.bytes for c in cost.collectives),
        "counted_collectives": cost.by_kind(),
        "peak_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
    }
