"""Data files, templates and prompts that must be refused, with file, line and field."""

import importlib.util
import json
import pathlib

from bad_flags import BASE
from commands import Bad

GOOD = '{"question": "Tom has 1 apple and buys 2. How many?", "answer": "3"}\n'


def data(name: str, content, words, *args: str) -> Bad:
    """Returns a command that trains the small job on one data file."""
    return Bad([*BASE, f"--config.data.path={name}", *args], words, files={name: content})


def sft(content, words, *args: str, name: str = "data.jsonl", algorithm: str = "sft") -> Bad:
    """Returns a command that trains a supervised job on one data file."""
    config = ["--config=sft_tiny.py", "--workdir=run", f"--config.algorithm={algorithm}", f"--config.data.path={name}"]
    return Bad([*config, "--config.model.path=tiny", "--config.eval.problems=0", *args], words, files={name: content})


def dpo(content, words, *args: str) -> Bad:
    config = ["--config=dpo_tiny.py", "--workdir=run", "--config.data.path=data.jsonl"]
    return Bad([*config, *args], words, files={"data.jsonl": content})


def _record(**fields) -> str:
    return json.dumps(fields) + "\n"


def _directory(path: pathlib.Path) -> None:
    path.mkdir()


def _parquet(**columns):
    def write(path: pathlib.Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    return write


FILES = {
    "nowhere": Bad([*BASE, "--config.data.path=no.jsonl"], ["no.jsonl", "does not exist", "data.path"]),
    "empty path": Bad([*BASE, "--config.data.path="], ["data.path", "problems"]),
    "a directory": data("data.jsonl", _directory, ["data.jsonl", "is a directory"]),
    "no pattern": Bad([*BASE, "--config.data.path=no*.jsonl"], ["no*.jsonl", "does not exist"]),
    "empty": data("empty.jsonl", b"", ["empty.jsonl", "is empty"]),
    "blank lines": data("blank.jsonl", b"\n \n\t\n", ["blank.jsonl", "is empty"]),
    "one of two empty": Bad(
        [*BASE, "--config.data.path=part*.jsonl"],
        ["part2.jsonl", "empty"],
        files={"part1.jsonl": GOOD, "part2.jsonl": ""},
    ),
    "broken line": data("x.jsonl", GOOD + '{"question": \n', ["x.jsonl line 2", "not JSON"]),
    "cut short": data("x.jsonl", GOOD + '{"question": "a', ["x.jsonl line 2", "not JSON"]),
    "two objects in a line": data("x.jsonl", GOOD + "{} {}\n", ["x.jsonl line 2", "not JSON"]),
    "single quotes": data("x.jsonl", "{'question': 'a'}\n", ["x.jsonl line 1", "not JSON"]),
    "array of objects": data("x.jsonl", "[" + GOOD.strip() + "]\n", ["x.jsonl line 1", "JSON object"]),
    "a list": data("x.jsonl", GOOD + "\n[1, 2]\n", ["x.jsonl line 3", "list", "JSON object"]),
    "a number": data("x.jsonl", GOOD + "17\n", ["x.jsonl line 2", "int", "JSON object"]),
    "null": data("x.jsonl", "null\n", ["x.jsonl line 1", "JSON object"]),
    "deeply nested": data("x.jsonl", '{"a":' + "[" * 100_000 + "\n", ["x.jsonl line 1", "not JSON"]),
    "not UTF-8": data("x.jsonl", GOOD.encode() + b'{"question": "\xe9"}\n', ["x.jsonl line 2", "UTF-8"]),
    "UTF-16": data("x.jsonl", GOOD.encode("utf-16"), ["x.jsonl line 1", "UTF-8"]),
    "null bytes": data("x.jsonl", b"\0" * 64, ["x.jsonl line 1", "not JSON"]),
    "compressed": data("x.jsonl", b"\x1f\x8b\x08\x00" + b"\xff" * 40, ["x.jsonl line 1", "UTF-8"]),
    "lacks the answer": data("x.jsonl", _record(question="q"), ["x.jsonl line 1", "'answer'", "number (reward.fns"]),
    "lacks the question": data("x.jsonl", _record(answer="1"), ["x.jsonl line 1", "'question'"]),
    "no field at all": data("x.jsonl", "{}\n", ["x.jsonl line 1", "'question'", "no fields"]),
    "null question": data("x.jsonl", _record(question=None, answer="1"), ["x.jsonl line 1", "'question'", "None"]),
    "empty question": data("x.jsonl", _record(question=" ", answer="1"), ["x.jsonl line 1", "'question'", "' '"]),
    "list for the question": data("x.jsonl", _record(question=["q"], answer="1"), ["x.jsonl line 1", "['q']"]),
    "truth for the answer": data("x.jsonl", _record(question="q", answer=True), ["x.jsonl line 1", "'answer'", "True"]),
    "object for the answer": data("x.jsonl", _record(question="q", answer={"a": 1}), ["x.jsonl line 1", "'answer'"]),
    "only the last line is bad": data("x.jsonl", GOOD * 500 + "{}\n", ["x.jsonl line 501", "'question'"]),
    "renamed field": data(
        "x.jsonl", GOOD, ["x.jsonl line 1", "'problem'", "question"], "--config.data.question_field=problem"
    ),
    "empty field name": data("x.jsonl", GOOD, ["''"], "--config.data.question_field="),
    "no header": data("x.csv", "q,1\n", ["x.csv line 1", "'question'", "data.question_field"]),
    "other columns": data("x.csv", "ask,answer\nq,1\n", ["x.csv line 1", "'question'", "ask"]),
    "short row": data("x.csv", "question,answer\nq,1\nq\n", ["x.csv line 3", "1 values for the 2 columns"]),
    "long row": data("x.csv", "question,answer\nq,1,2\n", ["x.csv line 2", "3 values for the 2 columns"]),
    "open quote": data("x.csv", 'question,answer\n"q,1\n', ["x.csv line 2", "CSV"]),
    "header alone": data("x.csv", "question,answer\n", ["x.csv", "is empty"]),
    "empty csv": data("x.csv", "", ["x.csv", "is empty"]),
    "empty cell": data("x.csv", "question,answer\n,1\n", ["x.csv line 2", "'question'"]),
    "csv not UTF-8": data("x.csv", b"question,answer\nq,\xff\n", ["x.csv line 2", "UTF-8"]),
    "no array record": data("x.array_record", b"nothing", ["x.array_record", "ArrayRecord"]),
    "text file": data("x.txt", "hello\n", ["x.txt", "not a known format", ".jsonl"]),
    "no suffix": data("x", GOOD, ["x ends in ''", "not a known format"]),
    "json": data("x.json", "[]", ["x.json", "not a known format"]),
    "gz": data("x.jsonl.gz", b"\x1f\x8b", ["x.jsonl.gz is compressed", "gunzip"]),
    "tfds without a split": Bad([*BASE, "--config.data.path=tfds:gsm8k"], ["tfds:gsm8k", "tfds:gsm8k/train"]),
    "https": Bad([*BASE, "--config.data.path=https://host/x.jsonl"], ["https://host/x.jsonl", "gs://"]),
    "markup in the name": Bad([*BASE, "--config.data.path=[bold]x.jsonl"], ["[bold]x.jsonl", "does not exist"]),
    "eval_path nowhere": Bad([*BASE, "--config.data.eval_path=no.jsonl"], ["no.jsonl", "does not exist", "eval_path"]),
    "eval_path broken": Bad(
        [*BASE, "--config.data.eval_path=e.jsonl"], ["e.jsonl line 1", "not JSON"], files={"e.jsonl": "{"}
    ),
    "everything held out": data(
        "x.jsonl", GOOD, ["data.eval_fraction", "data.path"], "--config.data.eval_fraction=0.9999999"
    ),
}

PARQUET = {
    "no parquet": data("x.parquet", b"PAR1 not", ["x.parquet", "Parquet"]),
    "empty parquet": data("x.parquet", b"", ["x.parquet", "Parquet"]),
    "parquet without a column": data("x.parquet", _parquet(answer=["q"]), ["x.parquet", "'question'"]),
    "parquet with a null": data(
        "x.parquet", _parquet(question=["q", None], answer=["1", "2"]), ["x.parquet row 1", "'question'"]
    ),
}
if importlib.util.find_spec("pyarrow") is None:
    PARQUET = {"parquet without its library": data("x.parquet", b"", ["x.parquet", "[parquet]'"])}

PROMPTS = {
    "too long, as errors": data(
        "x.jsonl",
        GOOD + _record(question="How many? " * 60, answer="3"),
        ["How many?", "rollout.max_prompt_length=64", "data.long_prompts=skip"],
        "--config.data.long_prompts=error",
        "--config.rollout.max_prompt_length=64",
        "--config.data.system_prompt=",
        "--config.data.eval_fraction=0.0",
        "--config.data.shuffle=False",
    ),
    "all too long": data(
        "x.jsonl",
        _record(question="How many? " * 60, answer="3"),
        ["longer than 64 tokens", "rollout.max_prompt_length"],
        "--config.rollout.max_prompt_length=64",
        "--config.data.eval_fraction=0.0",
    ),
    "all of the embedded task too long": Bad(
        [*BASE, "--config.rollout.max_prompt_length=4"], ["longer than 4 tokens", "rollout.max_prompt_length"]
    ),
    "longer than the cache and the model's positions": data(
        "x.jsonl",
        _record(question="How many? " * 400, answer="3"),
        ["max_position_embeddings", "lower rollout.max_prompt_length", "rollout.kv_cache_size"],
        "--config.data.eval_fraction=0.0",
    ),
    "template word": Bad([*BASE, "--config.data.template=chatty"], ["data.template", "chatty", "plain"]),
    "long_prompts word": Bad([*BASE, "--config.data.long_prompts=cut"], ["data.long_prompts", "cut", "skip"]),
    "eval_fraction 1": Bad([*BASE, "--config.data.eval_fraction=1.0"], ["data.eval_fraction=1"]),
    "eval_fraction nan": Bad([*BASE, "--config.data.eval_fraction=nan"], ["data.eval_fraction=nan"]),
    "size 0": Bad([*BASE, "--config.data.size=0"], ["data.size=0"]),
    "seed -1": Bad([*BASE, "--config.data.seed=-1"], ["data.seed=-1"]),
}

SUPERVISED = {
    "no form": sft(_record(text="x"), ["data.jsonl line 1", "text", "'messages'", "'completion'"]),
    "messages of another kind": sft(_record(messages="hello"), ["data.jsonl line 1", "'messages'"]),
    "messages without an assistant": sft(
        _record(messages=[{"role": "user", "content": "a"}]), ["data.jsonl line 1", "assistant"]
    ),
    "message without content": sft(
        _record(messages=[{"role": "user"}, {"role": "assistant", "content": "a"}]), ["data.jsonl line 1", "'content'"]
    ),
    "unknown role": sft(
        _record(messages=[{"role": "wizard", "content": "a"}, {"role": "assistant", "content": "b"}]), ["wizard"]
    ),
    "completion of another kind": sft(_record(prompt="a", completion=3), ["data.jsonl line 1", "'completion'"]),
    "prompt is missing": sft(_record(completion="b"), ["data.jsonl line 1", "'prompt'"]),
    "a bad second line": sft(_record(prompt="a", completion="b") + "x\n", ["data.jsonl line 2", "not JSON"]),
    "all too long": sft(_record(prompt="a" * 900, completion="b"), ["longer than", "sft.max_length"]),
    "too long as errors": sft(
        _record(prompt="a" * 900, completion="b"),
        ["sft.max_length", "data.long_prompts"],
        "--config.data.long_prompts=error",
    ),
    "scratch with adapters": Bad(
        ["--config=sft_tiny.py", "--workdir=run", "--config.model.path=scratch", "--config.model.lora.rank=4"],
        ["model.lora.rank=4", "scratch"],
    ),
    "batch of 0": sft(_record(prompt="a", completion="b"), ["sft.batch_size=0"], "--config.sft.batch_size=0"),
    "critic": sft(_record(prompt="a", completion="b"), ["roles.critic.mesh"], "--config.roles.critic.mesh=fsdp=2"),
    "pair without rejected": dpo(_record(prompt="a", chosen="b"), ["data.jsonl line 1", "'rejected'"]),
    "pair without a prompt": dpo(_record(chosen="b", rejected="c"), ["data.jsonl line 1", "'prompt'"]),
    "pair of one": dpo(_record(prompt="a", chosen="b", rejected="b"), ["data.jsonl line 1", "must differ"]),
    "pair of numbers": dpo(_record(prompt="a", chosen=1, rejected=2), ["data.jsonl line 1", "'chosen'"]),
    "negative beta": dpo(_record(prompt="a", chosen="b", rejected="c"), ["dpo.beta"], "--config.dpo.beta=-1.0"),
}

CASES = {
    f"{group} {name}": bad
    for group, table in (("data:", FILES | PARQUET), ("prompt:", PROMPTS), ("supervised:", SUPERVISED))
    for name, bad in table.items()
}
