"""The command that completes a file of prompts.

    python -m podrl.generate --model=DIR --prompts=FILE.jsonl --out=FILE.jsonl [--n=8 --temperature=0.7 ...]

Each input line is a JSON object with "prompt" (text) or "messages" (a conversation for the model's chat template); its
other fields are copied to the output. Each output line holds one prompt with its completions, written as soon as they
are all there, so not in the order of the input: "index" is the line it came from.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from podrl.runtime import environment

STOP_NAMES = ("eos", "length", "stop_string")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podrl.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=pathlib.Path, help="Hugging Face directory")
    parser.add_argument("--prompts", required=True, type=pathlib.Path, help="JSON lines")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="JSON lines; overwritten")
    parser.add_argument("--n", type=int, default=1, help="completions per prompt")
    parser.add_argument("--preset", choices=("greedy", "standard", "liberal"), default=None)
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--top_p", type=float, default=None)
    parser.add_argument("--top_k", type=int, default=None)
    parser.add_argument("--min_p", type=float, default=None)
    parser.add_argument("--max_new", type=int, default=256, help="most new tokens per completion")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt as a user's turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=None, help="of weights and cache; bfloat16 where there is an accelerator")
    parser.add_argument("--mesh", default="auto", help="for example data=2,tensor=4; auto: data over all devices")
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--lanes", type=int, default=128)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    environment.prepare(os.environ, fake_devices=args.devices)
    environment.keep_compiled(os.environ, "auto")
    try:
        return _generate(args)
    except ValueError as error:
        _say(f"podrl.generate: error: {error}")
        return 1


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _generate(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp

    from podrl.data.tokenizer import Tokenizer
    from podrl.mesh.build import make_mesh
    from podrl.models import hf_load
    from podrl.rollout.config import RolloutConfig
    from podrl.rollout.rollout import RolloutWorker
    from podrl.types import Policy

    if args.n < 1 or args.max_new < 1:
        raise ValueError(f"--n={args.n} and --max_new={args.max_new} must be at least 1.")
    records = list(read_prompts(args.prompts))
    sampling = _sampling(args)
    mesh = make_mesh(args.mesh, jax.local_devices(), key="--mesh", auto="data=-1")
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    model, params = hf_load.load(args.model, mesh, dtype)
    tokenizer = Tokenizer.load(args.model)
    prompts = _tokenise(records, tokenizer, args.chat)
    longest = int(prompts.length_P.max())
    config = RolloutConfig(
        max_tokens_to_generate=args.max_new,
        max_prompt_length=longest,
        kv_cache_size=longest + args.max_new,
        lanes=min(args.lanes, len(records) * args.n),
    )
    worker = RolloutWorker(
        model, mesh, config, pad_id=tokenizer.pad_id, eos_ids=tokenizer.eos_ids, decode=tokenizer.decode, seed=args.seed
    )
    worker.warm_up(params, _say)
    stream = worker.stream(Policy(params, 0), prompts, group_size=args.n, step=0, sampling=sampling)
    with open(args.out, "w", encoding="utf-8") as out:
        _write(stream, records, args.n, out)
    stats = worker.stats
    _say(f"{stats.tokens} tokens in {stats.seconds:.1f} s ({stats.tokens / stats.seconds:.0f} tokens/s)")
    return 0


def read_prompts(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of prompts.

    Raises:
      ValueError: no such file, a line that is not an object with "prompt" or "messages", or no line at all.
    """
    if not path.is_file():
        raise ValueError(f"--prompts={path} does not exist.")
    empty = True
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from None
            if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
                raise ValueError(f'{path}, line {number}: must be an object with "prompt" or "messages".')
            empty = False
            yield record
    if empty:
        raise ValueError(f"--prompts={path} holds no prompt.")


def _sampling(args: argparse.Namespace) -> Any:
    from podrl.rollout.config import Sampling, preset

    names = ("temperature", "top_p", "top_k", "min_p")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    given |= {"max_new": args.max_new, "stop_strings": tuple(args.stop)}
    return preset(args.preset, **given) if args.preset else Sampling(**given)


def _tokenise(records: Sequence[dict[str, Any]], tokenizer: Any, chat: bool) -> Any:
    from podrl.types import Prompts

    texts = []
    for record in records:
        messages = record.get("messages") or ([{"role": "user", "content": record["prompt"]}] if chat else None)
        texts.append(tokenizer.apply_chat_template(messages) if messages else record["prompt"])
    # A chat template writes the start token itself.
    rows = [
        tokenizer.encode(text, bos=not (chat or "messages" in record))
        for text, record in zip(texts, records, strict=True)
    ]
    length_P = np.array([len(row) for row in rows])
    tokens_PT = np.full((len(rows), max(length_P.max(), 1)), tokenizer.pad_id, np.int32)
    for p, row in enumerate(rows):
        tokens_PT[p, : len(row)] = row
    return Prompts(tokens_PT, length_P, np.arange(len(rows)), texts, {}, b"")


def _write(stream: Iterator[Any], records: Sequence[dict[str, Any]], n: int, out: TextIO) -> None:
    """Writes each prompt when its last completion is there, and shows how far it is."""
    from rich.console import Console
    from rich.progress import track

    done: dict[int, dict[int, dict[str, Any]]] = {}
    started = time.perf_counter()
    total = len(records) * n
    for sample in track(stream, "generating", total=total, console=Console(stderr=True)):
        group = done.setdefault(sample.prompt, {})
        group[sample.sample] = {
            "text": sample.completion,
            "tokens": len(sample.tokens),
            "logprob": float(np.sum(sample.raw_logprobs)),
            "stop": STOP_NAMES[sample.stop],
            "seconds": round(time.perf_counter() - started, 3),
        }
        if len(group) == n:
            record = {"index": sample.prompt, **records[sample.prompt], "completions": [group[g] for g in range(n)]}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            del done[sample.prompt]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
