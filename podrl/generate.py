"""The command that completes a file of prompts.

    python -m podrl.generate --model=DIR --prompts=FILE.jsonl --out=FILE.jsonl [--n=8 --temperature=0.7 ...]

Each record holds "prompt" (text), "messages" (a conversation for the model's chat template) or, as a task file does,
"question". If podrl.export wrote --model, a question becomes a prompt in the same way as in the exported run; otherwise
the chat template formats the question, without a system prompt. The output has one line per prompt, in the order of the
prompts, with the record's fields and "completions". A line's "index" is the number of the prompt, unless the record has
an "index". Until all prompts are complete, the finished ones are in FILE.jsonl.partial, and the same command continues
from there.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from podrl.config import plural
from podrl.data import shape, sources
from podrl.environments import config as env
from podrl.mappings import JsonObject, Record
from podrl.runtime import environment, signals
from podrl.runtime.arguments import (
    Parser,
    add_device_options,
    add_history_option,
    as_sentence,
    check_numbers,
    write_line,
)
from podrl.runtime.watchdog import announce_if_long
from podrl.storage import hub, storage
from podrl.storage.regular import load_object
from podrl.storage.storage import StorageError, is_remote
from podrl.workers.user_code import Limits

STOP_NAMES = ("eos", "length", "stop_string", "failed", "environment", "deadline", "calls")
# Arguments that do not change completions, so they may differ when a command continues a partial output.
_FREE = ("out", "prompts", "devices")
_SHORT, _LONG = 64, 256  # tokens: the longest prompt is rounded up to _SHORT, or to a multiple of _LONG
_LANES = (8, 32)  # numbers of lanes for few samples; for more samples, --lanes lanes are used


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.generate", __doc__)
    parser.add_argument(
        "--model",
        required=True,
        help=f"Hugging Face directory, ORG/NAME of the hub, or the embedded {' or '.join(hub.EMBEDDED)}",
    )
    parser.add_argument(
        "--prompts", required=True, help="file of JSON lines, a .csv file, or anything else that data.path accepts"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=pathlib.Path,
        help="file of JSON lines to write; replaced when all completions are there",
    )
    parser.add_argument("--n", type=int, default=1, help="completions per prompt")
    parser.add_argument(
        "--preset",
        choices=("greedy", "standard", "liberal"),
        default=None,
        help="named sampling settings, which the next four options change one by one",
    )
    parser.add_argument("--temperature", type=float, default=None, help="0 is greedy; default: the preset's, or 1")
    parser.add_argument(
        "--top_p",
        type=float,
        default=None,
        help="least total probability of the tokens to sample from; default: the preset's, or 1, which is off",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=None,
        help="number of tokens to sample from; default: the preset's, or 0, which is off",
    )
    parser.add_argument(
        "--min_p",
        type=float,
        default=None,
        help="least probability of a token to sample from, as a share of the largest; default: the preset's, or 0",
    )
    parser.add_argument("--max_new", type=int, default=256, help="largest number of new tokens per completion")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends a completion; may be given several times"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the chat template as a user's message"
    )
    parser.add_argument(
        "--system_prompt",
        default=None,
        help='system prompt before a "question"; default: the system prompt of the exported run',
    )
    parser.add_argument(
        "--question_field",
        default=None,
        help="field of the records with the question; default: the field of the exported run",
    )
    parser.add_argument("--env", default="", help="environment of every completion: file.py:Name or module:Name")
    parser.add_argument("--program", default="", help="agent program of every completion, such as 'python agent.py'")
    parser.add_argument(
        "--tool", action="append", default=[], help="tool that completions may call; may be given several times"
    )
    parser.add_argument(
        "--parser", choices=get_args(env.Parser), default="call_tool", help="format of a tool call (env.parser)"
    )
    add_history_option(parser, get_args(env.History))
    parser.add_argument(
        "--max_response",
        type=int,
        default=None,
        help="largest number of tokens of a completion with the observations of --env; default: --max_new",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    add_device_options(parser)
    parser.add_argument("--lanes", type=int, default=128, help="largest number of completions that are sampled at once")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    environment.prepare(os.environ, fake_devices=args.devices)
    environment.enable_compile_cache(os.environ, "auto")
    try:
        return _generate(args)
    except (ValueError, OSError, ImportError, StorageError) as error:
        write_line(f"podrl.generate: error: {as_sentence(error)}")
        return 1


def _generate(args: argparse.Namespace) -> int:
    args.model = pathlib.Path(hub.local(args.model))
    _check(args)
    with announce_if_long(f"Reading {args.prompts}", write_line):
        records = read_prompts(args.prompts, _prompt_settings(args)["question_field"])
    with announce_if_long("Loading modules", write_line):
        import jax
        import jax.numpy as jnp

        from podrl.data.tokenizer import Tokenizer
        from podrl.engine.config import RolloutConfig
        from podrl.learner.run_environments import offered_tools
        from podrl.mesh.build import make_decoding_mesh
        from podrl.models import hf_load
        from podrl.models.pretrained import check_positions, check_vocab
        from podrl.rollout.worker import RolloutWorker
        from podrl.types import Policy

    sampling = _sampling(args)
    mesh = make_decoding_mesh(args.mesh, jax.local_devices(), key="--mesh")
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    environment = _environment(args)
    tokenizer = Tokenizer.load(args.model, tools=offered_tools(environment, Limits()))
    with announce_if_long("Tokenising the prompts", write_line):
        rows, texts = _tokenise(records, tokenizer, args)
    output = OutputFile(args.out, _settings(args, records, tokenizer.tools_digest), args.n)
    left = [index for index in range(len(records)) if index not in output.done]
    if output.done:
        write_line(
            f"{output.partial} holds {len(output.done)} of {plural(len(records), 'prompt')}; going on from there."
        )
    if left:
        with announce_if_long(f"Reading the weights in {args.model}", write_line):
            model, params = hf_load.load(args.model, mesh, dtype)
        longest, new = max(map(len, rows)), args.max_response or args.max_new
        check_vocab(model, tokenizer.vocab_size)
        check_positions(model, longest, longest + new, lower="shorten the longest prompt.")
        prompt, lanes = sizes(longest, len(records) * args.n, args.lanes)
        config = RolloutConfig(
            max_tokens_to_generate=args.max_new,
            max_response_tokens=args.max_response,
            max_prompt_length=prompt,
            kv_cache_size=prompt + new,
            lanes=lanes,
        )
        tokenizer_settings = {"pad_id": tokenizer.pad_id, "eos_ids": tokenizer.eos_ids, "decode": tokenizer.decode}
        worker = RolloutWorker(model, mesh, config, seed=args.seed, **tokenizer_settings)
        worker.warm_up(params, write_line)
        prompts = _prompts(rows, left, records, tokenizer)
        with _env_client(environment, tokenizer) as worker.env_client:
            if worker.env_client is not None:
                prompts = worker.env_client.opened(prompts, [texts[index] for index in left])
            request = {"group_size": args.n, "step": 0, "sampling": sampling, "mode": "eval"}
            _write(worker.stream(Policy(params, 0), prompts, **request), records, left, output)
        stats = worker.stats
        write_line(f"{stats.tokens} tokens in {stats.seconds:.1f} s ({stats.tokens / stats.seconds:.0f} tokens/s)")
    output.finish()
    return 0


def sizes(longest: int, samples: int, most_lanes: int) -> tuple[int, int]:
    """Rounds the sizes for which programs are compiled, so that similar files of prompts use the same programs.

    Args:
      longest: length of the longest prompt, tokens.
      samples: number of completions of all prompts.
      most_lanes: largest number of lanes.

    Returns:
      (longest prompt that the programs accept, 64 tokens or a multiple of 256; lanes: 8, 32 or `most_lanes`).
    """
    prompt = _SHORT if longest <= _SHORT else -(-longest // _LONG) * _LONG
    return prompt, min([most_lanes, *(lanes for lanes in _LANES if lanes >= samples)])


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments before anything is loaded, so that the command does not fail after hours of sampling.

    Raises:
      ValueError: the arguments contradict each other, or the output cannot be written.
    """
    check_numbers(args, "n", "max_new", "lanes", "devices")
    out: pathlib.Path = args.out
    if is_remote(os.fspath(out)) or ":/" in os.fspath(out):
        raise ValueError(
            f"--out={out} must be a local file: name a local file, and copy the file to the bucket afterwards."
        )
    if not is_remote(args.prompts) and os.path.realpath(out) == os.path.realpath(args.prompts):
        raise ValueError(f"--out={out} is the file of --prompts={args.prompts}: give another name.")
    with contextlib.suppress(OSError):  # finds hard links: two names of one file; a missing file is not an error here
        if os.path.samefile(out, args.prompts):
            raise ValueError(f"--out={out} is the file of --prompts={args.prompts}: give another name.")
    if out.is_dir():
        raise ValueError(f"--out={out} is a directory: name a file.")
    if not out.parent.is_dir():
        raise ValueError(f"--out={out}: the directory {out.parent} does not exist.")
    if out.exists() and not out.is_file():
        raise ValueError(
            f"--out={out} is not a regular file, so it cannot be replaced when all prompts are "
            "complete: give another name."
        )
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out={out}: the directory {out.parent} cannot be written to.")
    if not args.model.is_dir():
        raise ValueError(
            f"--model={args.model} is not a directory: give a Hugging Face directory, ORG/NAME of the hub, or "
            f"{' or '.join(hub.EMBEDDED)}."
        )


def prompt_settings_of(model: str | os.PathLike) -> JsonObject:
    """Reads the settings with which a model's run made prompts from questions, from prompts.json in its directory.

    Args:
      model: directory of the model, written by podrl.export or another program.

    Returns:
      The settings by name; {} if the directory has no such file.

    Raises:
      ValueError: the file is not a JSON object.
    """
    path = pathlib.Path(model) / shape.PROMPTS_FILE
    return load_object(path) if path.is_file() else {}


def _prompt_settings(args: argparse.Namespace) -> dict[str, str]:
    """Chooses the form of prompts: from the arguments, else as in the model's run, else by the chat template."""
    names = ("system_prompt", "question_field")
    own = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    defaults = {"system_prompt": "", "question_field": shape.QUESTION, "template": "chat"}
    return {**defaults, **prompt_settings_of(args.model), **own}


def read_prompts(path: str | os.PathLike, question_field: str = shape.QUESTION) -> sources.Records:
    """Reads the records of a file of prompts.

    Args:
      path: file of prompts, local or remote.
      question_field: name of the field that holds a question.

    Raises:
      ValueError: the file has no records, or a record has no prompt; the message names file, line and field.
      FileNotFoundError: there is no such file.
    """
    path = os.fspath(path)
    storage.check(path, "--prompts")
    named = not is_remote(path) and not path.startswith(("tfds:", hub.DATA)) and "*" not in path
    if named and not os.path.isfile(path):
        raise FileNotFoundError(f"--prompts={path} {'is not a file' if os.path.exists(path) else 'does not exist'}.")
    # As in training, a record without the field may have 'question', 'prompt' or 'messages' instead.
    return sources.read(path, check=functools.partial(_check_record, question_field=question_field))


def _check_record(record: Record, place: str, question_field: str) -> None:
    """Refuses a record without a prompt, or with a field that the output cannot hold."""
    name = question_field if question_field in record else shape.QUESTION
    shape.check(record, place, name, remedy="name it by --question_field")
    if "completions" in record:
        raise ValueError(f"{place} has a field 'completions', which the output's own would replace: rename it.")
    sources.check_json(record, place)


def _settings(args: argparse.Namespace, records: sources.Records, tools: str = "") -> JsonObject:
    """Lists everything that completions depend on, as JSON, with checksums for the prompts and the tools."""
    digest = hashlib.sha256()
    for i in range(len(records)):
        digest.update(json.dumps(records[i], sort_keys=True, default=str).encode() + b"\n")
    own = {name: value for name, value in vars(args).items() if name not in _FREE} | _prompt_settings(args)
    return json.loads(json.dumps(own | {"prompts": digest.hexdigest(), "tools": tools}, default=str))


class OutputFile:
    """Collects completed prompts in a partial file beside the output, and writes the output when all are complete.

    Attributes:
      path: file of the output.
      completions: number of completions per prompt.
      partial: file that collects the completed prompts; its first line holds the settings of the command.
      done: (offset, size in bytes) of the line of every complete prompt in `partial`, by the number of the prompt.
    """

    def __init__(self, path: pathlib.Path, settings: JsonObject, completions: int) -> None:
        """Reads the partial output of an earlier start of the same command, if there is one.

        Args:
          path: file of the output.
          settings: settings of the command, JSON values.
          completions: number of completions per prompt.

        Raises:
          ValueError: the partial output has other settings, or is not an output of this command.
        """
        self.path, self.completions = path, completions
        self.partial = path.with_name(path.name + ".partial")
        self.done: dict[int, tuple[int, int]] = {}
        self._header = json.dumps({"podrl.generate": dict(settings)}).encode() + b"\n"
        raw = self.partial.read_bytes() if self.partial.exists() else b""
        self._end = raw.rfind(b"\n") + 1  # bytes after this place are a line that was cut off; they are overwritten
        if raw.count(b"\n") > 1:
            self._take(raw[: self._end], settings)
        else:
            self._end = 0

    def _take(self, raw: bytes, settings: JsonObject) -> None:
        head, *lines = raw.split(b"\n")[:-1]
        try:
            theirs = json.loads(head)["podrl.generate"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.partial} is not an unfinished output of podrl.generate: move it away, or give another --out."
            ) from None
        changed = [
            f"--{k} was {theirs.get(k)!r}, now {settings.get(k)!r}"
            for k in sorted({*theirs, *settings})
            if theirs.get(k) != settings.get(k)
        ]
        if changed:
            raise ValueError(
                f"{self.partial} holds an unfinished output of other settings: {'; '.join(changed)}. Give the same "
                "settings to continue it, or remove the file."
            )
        offset = len(head) + 1
        for number, line in enumerate(lines, 2):
            digest, _, rest = line.partition(b"\t")
            index, _, record = rest.partition(b"\t")
            if digest == _digest(rest):
                self.done[int(index)] = (offset + len(line) - len(record), len(record) + 1)
            else:
                write_line(
                    f"Line {number} of {self.partial} is damaged, or of another version: its prompt is generated again."
                )
            offset += len(line) + 1

    def add(self, index: int, record: Record) -> None:
        """Appends a line to the partial file: checksum, number of the prompt, record.

        The number is written separately because the record may have a field `index` of its own.

        Args:
          index: number of the prompt.
          record: line of the output, with all completions of the prompt.
        """
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        place = b"%d\t" % index
        place = _digest(place + line[:-1]) + b"\t" + place
        with open(self.partial, "r+b" if self._end else "wb") as file:
            if not self._end:
                self._end = file.write(self._header)
            file.truncate(self._end)
            file.seek(self._end)
            file.write(place + line)
        self.done[index] = (self._end + len(place), len(line))
        self._end += len(place) + len(line)

    def finish(self) -> None:
        """Writes the output with all lines in the order of the prompts, and removes the partial file."""
        ready = self.path.with_name(self.path.name + ".complete")
        with open(ready, "wb") as out, open(self.partial, "rb") as file:
            for _, (start, size) in sorted(self.done.items()):
                file.seek(start)
                out.write(file.read(size))
        ready.replace(os.path.realpath(self.path))
        self.partial.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).hexdigest().encode()


def _sampling(args: argparse.Namespace) -> Any:
    from podrl.engine.config import Sampling, preset

    names = ("temperature", "top_p", "top_k", "min_p")
    own = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    own |= {"max_new": args.max_new, "stop_strings": tuple(args.stop)}
    try:
        return preset(args.preset, **own) if args.preset else Sampling(**own)
    except ValueError as error:  # the message names a configuration key, and this command has an option instead
        raise ValueError(str(error).replace("rollout.", "--", 1)) from None


def _tokenise(records: sources.Records, tokenizer: Any, args: argparse.Namespace) -> tuple[list[list[int]], list[str]]:
    """Encodes every prompt: (token ids of each prompt, text of each prompt with its special tokens)."""
    from podrl.data import conversation

    settings = _prompt_settings(args)
    form = "chat" if tokenizer.has_chat_template and settings["template"] == "chat" else "plain"
    rows, texts = [], []
    for i in range(len(records)):
        record = records[i]
        if args.chat and shape.prompt_field(record) == "prompt" and isinstance(record["prompt"], str):
            record = {"messages": [{"role": "user", "content": record["prompt"]}]}
        field = settings["question_field"] if settings["question_field"] in record else shape.QUESTION
        prompt = conversation.prompt(
            record, tokenizer, system=settings["system_prompt"], form=form, question_field=field
        )
        rows.append(tokenizer.encode(prompt.text, start=not prompt.rendered))
        texts.append(prompt.text)
    return rows, texts


def _environment(args: argparse.Namespace) -> env.EnvironmentConfig:
    """Makes the settings of the environment; without --env, --tool and --program, no environment is used.

    Raises:
      ValueError: --program is given together with --env or --tool.
    """
    if args.program and (args.env or args.tool):
        raise ValueError(
            f"--program={args.program!r} beside --env={args.env!r} and --tool={args.tool}: a program brings its own "
            "tools, so leave the others out."
        )
    if args.program:
        played = {"environment": env.PROGRAM, "program": args.program}
    elif not args.env and not args.tool:
        return env.EnvironmentConfig()
    else:
        played = {"environment": args.env or "tools", "tools": tuple(args.tool)}
    return env.EnvironmentConfig(**played, parser=args.parser, history=args.history)


@contextlib.contextmanager
def _env_client(config: env.EnvironmentConfig, tokenizer: Any) -> Iterator[Any]:
    """Starts the environment of the completions, and yields the client that the engine uses; None if there is none."""
    from podrl.data.dialogue import Dialogue
    from podrl.environments.workers import Episodes
    from podrl.learner.run_environments import check
    from podrl.rollout.episodes import EnvironmentClient

    if not config.used:
        yield None
        return
    with Episodes(config, Limits(), journal=None) as host:
        env_client = EnvironmentClient(
            host, Dialogue(tokenizer), history=config.history, observes_first=host.observes_first
        )
        check(host, env_client.dialogue)
        yield env_client


def _prompts(rows: Sequence[Sequence[int]], wanted: Sequence[int], records: sources.Records, tokenizer: Any) -> Any:
    """Makes Prompts of some prompts. The prompts keep their numbers among all prompts, which random keys depend on."""
    from podrl.data.tokenizer import right_padded
    from podrl.types import Prompts

    tokens_PT, length_P = right_padded([rows[index] for index in wanted], tokenizer.pad_id)
    names = dict.fromkeys(name for index in wanted for name in records[index])
    fields = {name: [records[index].get(name) for index in wanted] for name in names}
    texts = [tokenizer.decode(rows[index]) for index in wanted]
    return Prompts(tokens_PT, length_P, np.array(wanted), texts, fields, b"")


def _write(stream: Iterator[Any], records: sources.Records, wanted: Sequence[int], output: OutputFile) -> None:
    """Writes the output line of each prompt once all its completions are there, and shows progress."""
    from podrl.rundir.console import Progress, make_console

    n, groups = output.completions, dict[int, dict[int, JsonObject]]()
    total, tokens, started = len(wanted) * n, 0, time.perf_counter()
    progress = Progress(make_console(stderr=True), "generating", 0, total, max(total // 20, 1))
    for count, sample in enumerate(stream, 1):
        seconds = time.perf_counter() - started
        tokens += len(sample.tokens)
        group = groups.setdefault(sample.prompt, {})
        group[sample.sample] = {
            "text": sample.completion,
            "tokens": len(sample.tokens),
            "logprob": float(np.sum(sample.drawn["raw_logprob"])),
            "stop": STOP_NAMES[sample.stop],
            "seconds": round(seconds, 3),
            **({"turns": sample.episode["turns"]} if sample.episode["turns"] else {}),
            **{name: value for name, value in sample.episode.items() if name == "reward"},
            **({"metrics": sample.episode["metrics"]} if sample.episode["metrics"] else {}),
        }
        if len(group) == n:
            index = wanted[sample.prompt]
            line = {"index": index, **records[index], "completions": [group[g] for g in range(n)]}
            output.add(index, line)
            del groups[sample.prompt]
        progress.update(count, {"tokens/s": tokens / max(seconds, 1e-9)}, seconds / count * (total - count))
    progress.close()


if __name__ == "__main__":
    signals.leave_on_signals(
        unwind=False, words=lambda: "before all prompts were complete; the same command goes on with the others."
    )
    sys.exit(main(sys.argv[1:]))
