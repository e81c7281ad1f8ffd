"""Measures generation by podrl and by Tunix's own sampler, side by side in one run.

    python -m venv tunix && tunix/bin/pip install google-tunix==0.1.7
    python tests/parity/compare_tunix.py --tunix_python=tunix/bin/python [--tunix_mesh=1,4] \\
        [options of benchmarks rollout]

Both build a random Gemma-2-style model of the same sizes, which samples nearly uniformly, and complete the same prompts
equally often. They take turns, one generation each, so that other load on the machine affects both. Each side compiles
and generates once before it counts. Prints one JSON object: both sides' tokens, seconds and CPU seconds (medians), and
the ratios.
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
    parser.add_argument("--tunix_mesh", default="1,4", help="fsdp,tp of Tunix's rollout mesh; 1,1 is one device")
    parser.add_argument("--rounds", type=int, default=3)
    args, rest = parser.parse_known_args()
    sides = {
        "podrl": Side([sys.executable, __file__, "--serve=podrl", *rest]),
        "tunix": Side([args.tunix_python, __file__, "--serve=tunix", f"--tunix_mesh={args.tunix_mesh}", *rest]),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name, side in sides.items():
            run = side.generate()
            print(f"{name} {'warm-up' if number == 0 else number}: {run}", file=sys.stderr, flush=True)
            runs[name] += [run] if number else []
    for side in sides.values():
        side.process.stdin.close()
        side.process.wait()
    figures = {
        f"{name}_{key}": median(runs[name], key) for name in sides for key in ("tokens", "seconds", "cpu_seconds")
    }
    rate = {name: [r["tokens"] / r["seconds"] for r in runs[name]] for name in sides}
    work = {name: [r["tokens"] / r["cpu_seconds"] for r in runs[name]] for name in sides}
    figures |= {f"{name}_tok_s": statistics.median(rate[name]) for name in sides}
    figures["speedup"] = statistics.median(a / b for a, b in zip(rate["podrl"], rate["tunix"], strict=True))
    figures["cpu_speedup"] = statistics.median(a / b for a, b in zip(work["podrl"], work["tunix"], strict=True))
    print(json.dumps(figures))


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


class Side:
    """A process that generates once per input line."""

    def __init__(self, command: list[str]):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def generate(self) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.process.args} ended: see above.")


def serve(generate: Any) -> None:
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = generate()
        run = {"tokens": tokens, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(run), flush=True)


def serve_podrl(rest: list[str]) -> None:
    from benchmarks import model as bench_model
    from benchmarks import rollout as bench_rollout

    bench_model.fake_devices(8)
    bench = bench_rollout.Bench(bench_rollout.make_parser().parse_args(rest))
    serve(lambda: bench.generate().tokens)


def serve_tunix(mesh_sizes: str, rest: list[str]) -> None:
    # These modules define the options and the prompts. They need only numpy, so Tunix's interpreter can import them.
    from benchmarks import model as bench_model
    from benchmarks import rollout as bench_rollout

    bench_model.fake_devices(8)
    args = bench_rollout.make_parser().parse_args(rest)

    import jax
    import numpy as np
    from jax.sharding import Mesh
    from tunix.generate import sampler
    from tunix_model import make_model

    fsdp, tp = (int(n) for n in mesh_sizes.split(","))
    mesh = Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))

    with jax.set_mesh(mesh):
        model = make_model(args, is_sampling=True)
        table = model.embedder.input_embedding
        table[...] = table[...] * (0.1 * args.dim**-0.5 / float(table[...].std()))
    print(f"tunix: gate weights {model.layers[0].mlp.gate_proj.kernel[...].sharding}", file=sys.stderr)
    prompts = bench_rollout.make_prompts(args)

    class Numbers:
        """Stands in for a tokenizer: the text of a prompt is its row number in `prompts`, so "3" is the fourth row."""

        def encode(self, text: str, **_: Any) -> list[int]:
            p = int(text)
            return prompts.tokens_PT[p, : prompts.length_P[p]].tolist()

        def decode(self, ids: list[int], **_: Any) -> str:
            return ""

        bos_id = staticmethod(lambda: 0)
        eos_id = staticmethod(lambda: bench_rollout.END_ID)
        pad_id = staticmethod(lambda: 0)

    longest = 1 << (args.prompt_len[1] - 1).bit_length()
    cache = sampler.CacheConfig(
        cache_size=longest + args.max_new, num_layers=args.layers, num_kv_heads=args.kv_heads, head_dim=args.head_dim
    )
    with jax.set_mesh(mesh):
        sample = sampler.Sampler(model, Numbers(), cache)
    texts = [str(p) for p in range(args.prompts) for _ in range(args.group)]
    calls = iter(range(1 << 30))

    def generate() -> int:
        with jax.set_mesh(mesh):
            out = sample(
                texts,
                max_generation_steps=args.max_new,
                max_prompt_length=longest,
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k,
                seed=next(calls),
                return_logprobs=True,
            )
        return sum(len(tokens) for tokens in out.tokens)

    serve(generate)


if __name__ == "__main__":
    if sys.argv[1] == "--serve=podrl":
        serve_podrl(sys.argv[2:])
    elif sys.argv[1] == "--serve=tunix":
        serve_tunix(sys.argv[2].partition("=")[2], sys.argv[3:])
    else:
        main()
