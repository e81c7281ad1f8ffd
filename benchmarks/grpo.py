"""Measures whole steps of a GRPO job with a model of random weights: `python -m benchmarks grpo`."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.model import add_options, fake_devices, model_of, number_range

# Figures of a step; each is the median of a metric of the run.
_KEPT = {
    "rollout_s": "time/rollout",
    "decode_s": "time/decode",
    "reward_s": "time/reward",
    "update_s": "time/update",
    "publish_s": "time/publish",
    "waiting_s": "time/waiting",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "tokens_per_s_per_device": "perf/tokens_per_s_per_device",
    "sampler_abs_diff": "sampler/abs_diff",
    "mfu": "perf/mfu",
    "memory_peak": "perf/memory_peak",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks grpo", description=__doc__)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt_words", type=number_range, default=(20, 80), metavar="LOW:HIGH")
    parser.add_argument("--max_new", type=int, default=512)
    parser.add_argument("--staleness", type=int, default=0, help="grpo.max_staleness")
    parser.add_argument("--steps", type=int, default=8, help="steps; the first two, which compile, do not count")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--weights", default="", help="directory that keeps the random weights for the next call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Writes random weights and made-up questions, and runs `podrl.launch` on them; both roles share all devices.

    A model of random weights hardly ever ends a sample, so nearly all samples have `--max_new` tokens.

    Returns:
      steps, step_s, steps_per_hour: number of measured steps, median seconds of a step, and steps per hour.
      rollout_s, decode_s, reward_s, update_s, publish_s, waiting_s: median seconds of stages, as far as the run has
        them.
      rollout_tokens_per_s, tokens_per_s_per_device, sampler_abs_diff, mfu, memory_peak: medians of the metrics of these
        names (docs/metrics.md), as far as the run has them.

    Raises:
      ValueError: the job failed; the message is its last lines.
    """
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        weights = pathlib.Path(args.weights or place / "weights")
        if not (weights / "config.json").exists():
            command = [sys.executable, "-m", "benchmarks.grpo", str(weights), *argv]
            _finished(command)  # in a process of its own, which gives the device back
        _write_questions(place / "questions.jsonl", args)
        _finished(_job(args, weights, place))
        return _figures(place / "run" / "metrics.jsonl")


def plan(argv: Sequence[str], topology: str) -> list[str]:
    """Lists the arguments after `python -m` of the plan that predicts the steps of `run` on a topology of TPUs."""
    args = _parser().parse_args(argv)
    settings = {"model.path": "", "model.size": args.size, "rollout.max_prompt_length": 256, **_settings(args)}
    return ["podrl.plan", "--quick", "--json", f"--trainer={topology}", *_options(settings)]


def _job(args: argparse.Namespace, weights: pathlib.Path, place: pathlib.Path) -> list[str]:
    settings = {
        "model.path": weights,
        "data.path": place / "questions.jsonl",
        "data.template": "plain",
        "fake_devices": args.devices,
        "compile_cache": "",
        "eval.problems": 1,
        "eval.samples": 1,
        "log.to": (),
        "log.trace": "off",
        **_settings(args),
    }
    return [sys.executable, "-m", "podrl.launch", f"--workdir={place / 'run'}", *_options(settings)]


def _options(settings: Mapping[str, Any]) -> list[str]:
    config = pathlib.Path(__file__).parents[1] / "configs" / "grpo_gemma.py"
    return [f"--config={config}", *(f"--config.{name}={value}" for name, value in settings.items())]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "roles.colocated": True,
        "model.lora.rank": args.lora_rank,
        "rollout.prompts_per_step": args.prompts,
        "rollout.max_tokens_to_generate": args.max_new,
        "rollout.data_type": args.dtype,
        "grpo.num_generations": args.group,
        "grpo.max_staleness": args.staleness,
        "trainer.max_steps": args.steps,
        "trainer.eval_every_n_steps": 0,
        "trainer.dtype": args.dtype,
        "checkpoint.every": 0,
    }


def _finished(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise ValueError("\n".join([f"{' '.join(command)} ended with {done.returncode}:", *lines]))


def _write_questions(path: pathlib.Path, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    with path.open("w") as file:
        for _ in range(args.prompts * (args.steps + args.staleness + 1)):
            numbers = rng.integers(0, 100, rng.integers(args.prompt_words[0], args.prompt_words[1] + 1))
            record = {"question": f"Add {' and '.join(map(str, numbers))}.", "answer": str(numbers.sum())}
            file.write(json.dumps(record) + "\n")


def _figures(metrics: pathlib.Path) -> dict[str, Any]:
    records = [record for line in metrics.open() if "time/step" in (record := json.loads(line))][2:]
    if not records:
        raise ValueError(f"No step of {metrics} counts: raise --steps.")
    of = lambda name: statistics.median(record[name] for record in records if name in record)  # noqa: E731
    kept = {figure: of(name) for figure, name in _KEPT.items() if name in records[-1]}
    return {"steps": len(records), "step_s": of("time/step"), "steps_per_hour": 3600 / of("time/step"), **kept}


def write_weights(directory: str, argv: Sequence[str]) -> None:
    """Writes random weights of the model that the options describe, in bfloat16, and a tokenizer for it."""
    args = _parser().parse_args([*argv, "--lora_rank=0"])
    fake_devices(1)
    import jax
    import jax.numpy as jnp

    from podrl.models import hf_save, parameters

    model = model_of(args)
    params = jax.jit(lambda key: parameters.init_params(model, key, jnp.bfloat16))(jax.random.key(args.seed))
    hf_save.save(directory, model, params, dtype=jnp.bfloat16, extra_files=tokenizer_files(model.vocab_size))


def tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """Returns the files, by name, of a tokenizer: the embedded one plus made-up words, `vocab_size` words in all."""
    import podrl

    place = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"
    files = {file.name: file.read_bytes() for file in place.glob("tokenizer*")}
    described = json.loads(files["tokenizer.json"])
    words = described["model"]["vocab"]
    words += [[f"<word{number}>", -100.0] for number in range(len(words), vocab_size)]
    return {**files, "tokenizer.json": json.dumps(described).encode()}


if __name__ == "__main__":
    write_weights(sys.argv[1], sys.argv[2:])
