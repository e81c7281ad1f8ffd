"""Measures one GRPO update, log-probabilities included, by podrl and by Tunix's own functions on the same samples.

    python -m venv tunix && tunix/bin/pip install google-tunix==0.1.7
    python tests/parity/compare_tunix_step.py --tunix_python=tunix/bin/python [options of benchmarks step]

Both build a random Gemma-2-style model of the same sizes, score the same random samples, and then train on them. Tunix
pads the samples, as it does by default, and uses its own loss function, its own log-probabilities for the reference,
and optax's adamw. The sides take turns, one update each; each side compiles and updates once before it counts. Prints
one JSON object: medians of both sides' seconds and processor seconds, and the ratios. Processor seconds mean more if
other programs run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix_python", required=True, help="interpreter with google-tunix installed")
    parser.add_argument("--rounds", type=int, default=2)
    args, rest = parser.parse_known_args()
    sides = {"podrl": [sys.executable, "-m", "benchmarks", "step", "--steps=1", "--json", *rest]}
    sides["tunix"] = [args.tunix_python, __file__, "--serve", *rest]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, command in sides.items():
            runs[name].append(_measured(command))
            sys.stderr.write(f"{name}: {runs[name][-1]}\n")
    figures = {
        f"{name}_{key}": statistics.median(run[key] for run in runs[name])
        for name in sides
        for key in ("seconds", "cpu_seconds", "logprob_seconds")
    }
    pairs = list(zip(runs["podrl"], runs["tunix"], strict=True))
    for ratio, key in (("speedup", "seconds"), ("cpu_speedup", "cpu_seconds")):
        figures[ratio] = statistics.median(tunix[key] / podrl[key] for podrl, tunix in pairs)
    sys.stdout.write(json.dumps(figures) + "\n")


def _measured(command: list[str]) -> dict[str, float]:
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{command} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def serve(rest: list[str]) -> None:
    """Measures Tunix's side: one update on samples of `benchmarks step`, after an update that compiles."""
    # This module defines the options and the samples. It needs only numpy, so Tunix's interpreter can import it.
    from benchmarks import step as bench_step

    args = bench_step._parser().parse_args(rest)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.models.gemma import model as gemma
    from tunix.rl import algo_core, common
    from tunix.rl.grpo import grpo_learner
    from tunix_model import make_model

    sizes = dict(part.split("=") for part in args.src.split(","))
    fsdp, tp = int(sizes.get("fsdp", 1)), int(sizes.get("tensor", 1))
    mesh = Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))
    gemma.ModelConfig.__hash__ = object.__hash__  # nnx.jit hashes the model's attributes
    algo = grpo_learner.GRPOConfig(num_generations=args.group, beta=0.04)
    algo.temperature = 1.0  # Tunix copies it from the rollout configuration

    @nnx.jit
    def update(model: Any, optimizer: Any, example: Any) -> Any:
        loss = lambda model: algo_core.grpo_loss_fn(model, example, algo, 0, 1)  # noqa: E731
        (value, _), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return value

    @jax.jit(static_argnums=0)
    def score(graphdef: Any, state: Any, prompt_BT: Any, completion_BT: Any) -> Any:
        return common.compute_per_token_logps(graphdef, state, prompt_BT, completion_BT, 0, 1)

    def example_of(seed: int) -> dict[str, Any]:
        sample = bench_step._samples(args, seed)
        P, C = args.prompt_len[1], args.completion_len[1]
        B, mask_BT = len(sample["length_B"]), sample["mask_BT"]
        prompt_BT, completion_BT = np.zeros((B, P), np.int32), np.zeros((B, C), np.int32)
        done_BT = np.zeros((B, C), bool)
        for b in range(B):
            start, stop = int(mask_BT[b].argmax()), int(sample["length_B"][b])
            prompt_BT[b, P - start :] = np.maximum(sample["tokens_BT"][b, :start], 2)
            completion_BT[b, : stop - start] = np.maximum(sample["tokens_BT"][b, start:stop], 2)
            done_BT[b, : stop - start] = True
        put = jnp.asarray
        return {
            "prompt_ids": put(prompt_BT),
            "prompt_mask": put(prompt_BT > 0),
            "completion_ids": put(completion_BT),
            "completion_mask": put(done_BT),
            "advantages": put(sample["advantage_BT"]),
            "old_per_token_logps": None,
        }

    with jax.set_mesh(mesh):
        model = make_model(args, is_sampling=False)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
        for seed in range(args.seed, args.seed + 2):
            fields = example_of(seed)
            began = time.perf_counter()
            graphdef, state = nnx.split(model)
            reference_BT = jax.block_until_ready(score(graphdef, state, fields["prompt_ids"], fields["completion_ids"]))
            scored, busy = time.perf_counter(), time.process_time()
            loss = update(model, optimizer, common.TrainExample(**fields, ref_per_token_logps=reference_BT))
            jax.block_until_ready((loss, nnx.state(model)))
            run = {
                "seconds": time.perf_counter() - scored,
                "cpu_seconds": time.process_time() - busy,
                "logprob_seconds": scored - began,
                "loss": float(loss),
            }
    sys.stdout.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2:])
    else:
        main()
