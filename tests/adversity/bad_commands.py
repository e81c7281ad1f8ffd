"""Command lines of podrl.generate, podrl.export and podrl.plan that must be refused."""

import importlib.util
import json
import pathlib
import shutil

from commands import Bad

from podrl.job.config import TINY

PROMPT = '{"prompt": "2+2?"}\n'
_GENERATE = (f"--model={TINY}", "--prompts=p.jsonl", "--out=o.jsonl")


def generate(args, words, prompts: str | bytes = PROMPT, **files) -> Bad:
    """Returns a command of podrl.generate for one prompt, with the usual arguments followed by `args`."""
    args = [args] if isinstance(args, str) else args
    named = {name.replace("__", "."): content for name, content in files.items()}
    return Bad([*_GENERATE, *args], words, "generate", {"p.jsonl": prompts} | named)


def _directory(path: pathlib.Path) -> None:
    path.mkdir()


def _link(path: pathlib.Path) -> None:
    path.symlink_to("p.jsonl")


def _model_without_template(path: pathlib.Path) -> None:
    shutil.copytree(TINY, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


GENERATE = {
    "nothing": Bad([], ["--model", "--prompts", "--out"], "generate"),
    "unknown argument": generate("--tempreature=1", ["--tempreature=1"]),
    "out is prompts": generate("--out=p.jsonl", ["--out=p.jsonl", "--prompts=p.jsonl", "another name"]),
    "out is prompts by another path": generate("--out=./p.jsonl", ["--out=p.jsonl", "--prompts"]),
    "out is prompts by a link": generate("--out=l.jsonl", ["--out=l.jsonl", "--prompts=p.jsonl"], l__jsonl=_link),
    "out is a directory": generate("--out=d", ["--out=d", "directory"], d=_directory),
    "out is a device": generate("--out=/dev/null", ["--out=/dev/null", "regular file"]),
    "out in no directory": generate("--out=d/o.jsonl", ["--out=d/o.jsonl", "d does not exist"]),
    "out below a file": generate("--out=p.jsonl/o", ["--out=p.jsonl/o", "p.jsonl"]),
    "out in a bucket": generate("--out=gs://b/o.jsonl", ["--out=gs:/", "local"]),
    "unfinished output of others": generate(
        "--n=1",
        ["o.jsonl.partial", "other settings", "--n was 3, now 1"],
        o__jsonl__partial='{"podrl.generate": {"n": 3}}\n{"index": 0}\n',
    ),
    "unfinished output of another kind": generate(
        [], ["o.jsonl.partial", "not an unfinished output"], o__jsonl__partial="mine\nmine\n"
    ),
    "prompts nowhere": generate("--prompts=no.jsonl", ["--prompts=no.jsonl", "does not exist"]),
    "prompts a directory": generate("--prompts=d", ["--prompts=d"], d=_directory),
    "prompts empty": generate([], ["p.jsonl", "empty"], ""),
    "prompts blank": generate([], ["p.jsonl", "empty"], "\n\n"),
    "prompts not JSON": generate([], ["p.jsonl line 2", "not JSON"], PROMPT + "{\n"),
    "prompts a list": generate([], ["p.jsonl line 1", "list"], "[1]\n"),
    "prompts not UTF-8": generate([], ["p.jsonl line 2", "UTF-8"], PROMPT.encode() + b'{"prompt": "\xff"}\n'),
    "prompts without a prompt": generate([], ["p.jsonl line 1", "'question'"], '{"text": "a"}\n'),
    "prompt a number": generate([], ["p.jsonl line 2", "'prompt'", "3"], PROMPT + '{"prompt": 3}\n'),
    "prompt null": generate([], ["p.jsonl line 1", "'prompt'", "None"], '{"prompt": null}\n'),
    "prompt empty": generate([], ["p.jsonl line 1", "'prompt'", "''"], '{"prompt": ""}\n'),
    "question a list": generate([], ["p.jsonl line 1", "'question'", "['a']"], '{"question": ["a"]}\n'),
    "messages a text": generate([], ["p.jsonl line 1", "'messages'"], '{"messages": "a"}\n'),
    "messages empty": generate([], ["p.jsonl line 1", "'messages'"], '{"messages": []}\n'),
    "messages without content": generate([], ["p.jsonl line 1", "'content'"], '{"messages": [{"role": "user"}]}\n'),
    "messages of texts": generate([], ["p.jsonl line 1", "'messages'"], '{"messages": ["a"]}\n'),
    "prompts of another format": generate("--prompts=p.txt", ["p.txt", "not a known format"], p__txt=PROMPT),
    "model nowhere": generate("--model=nowhere", ["--model=nowhere", "not a directory"]),
    "model a file": generate("--model=p.jsonl", ["--model=p.jsonl", "not a directory"]),
    "model empty": generate("--model=d", ["d", "tokenizer.json"], d=_directory),
    "chat without a template": generate(["--model=m", "--chat"], ["m has no chat template"], m=_model_without_template),
    "n 0": generate("--n=0", ["--n=0"]),
    "n word": generate("--n=two", ["--n", "'two'"]),
    "n fraction": generate("--n=1.5", ["--n", "'1.5'"]),
    "max_new 0": generate("--max_new=0", ["--max_new=0"]),
    "max_new -3": generate("--max_new=-3", ["--max_new=-3"]),
    "lanes 0": generate("--lanes=0", ["--lanes=0"]),
    "devices 0": generate("--devices=0", ["--devices=0"]),
    "devices -1": generate("--devices=-1", ["--devices=-1"]),
    "seed -1": generate("--seed=-1", ["--seed=-1"]),
    "seed huge": generate("--seed=1" + "0" * 30, ["--seed=1000", "2**32"]),
    "seed word": generate("--seed=x", ["--seed", "'x'"]),
    "temperature -1": generate("--temperature=-1", ["temperature=-1"]),
    "temperature nan": generate("--temperature=nan", ["temperature=nan"]),
    "temperature inf": generate("--temperature=inf", ["temperature=inf"]),
    "temperature word": generate("--temperature=hot", ["--temperature", "'hot'"]),
    "top_p 0": generate("--top_p=0", ["top_p=0"]),
    "top_p 2": generate("--top_p=2", ["top_p=2"]),
    "top_p nan": generate("--top_p=nan", ["top_p=nan"]),
    "top_k -1": generate("--top_k=-1", ["top_k=-1"]),
    "min_p 2": generate("--min_p=2", ["min_p=2"]),
    "stop empty": generate("--stop=", ["stop"]),
    "preset": generate("--preset=wild", ["--preset", "'wild'", "greedy"]),
    "dtype": generate("--dtype=foo", ["--dtype", "'foo'", "float32"]),
    "mesh too large": generate("--mesh=data=9", ["--mesh", "data=9", "8"]),
    "mesh axis": generate("--mesh=rows=8", ["--mesh", "'rows'", "tensor"]),
    "mesh word": generate("--mesh=big", ["--mesh", "'big'"]),
    "mesh tensor": generate("--mesh=tensor=3", ["--mesh", "tensor=3"]),
}


def export(args, words, **files) -> Bad:
    args = [args] if isinstance(args, str) else args
    named = {name.replace("__", "."): content for name, content in files.items()}
    return Bad(args, words, "export", named)


_RUN = ["--workdir=run", "--out=out"]
EXPORT = {
    "nothing": export([], ["--workdir", "--out"]),
    "no run": export(_RUN, ["--workdir=run", "config.json"]),
    "an empty directory": export(_RUN, ["--workdir=run", "config.json"], run=_directory),
    "a file for a run": export(_RUN, ["--workdir=run"], run="x"),
    "config damaged": export(_RUN, ["run/config.json is damaged", "line 1"], **{"run/config__json": "{"}),
    "config a list": export(_RUN, ["run/config.json"], **{"run/config__json": "[]"}),
    "config of something else": export(_RUN, ["run/config.json"], **{"run/config__json": "{}"}),
    "out in a bucket": export(["--workdir=run", "--out=gs://b/o"], ["--out=gs://b/o", "local"], run=_directory),
    "step word": export([*_RUN, "--step=last"], ["--step", "'last'"]),
    "dtype": export([*_RUN, "--dtype=int8"], ["--dtype", "'int8'", "bfloat16"]),
    "unknown argument": export([*_RUN, "--quantize"], ["--quantize"]),
    "another scheme": export(["--workdir=s3://b/r", "--out=o"], ["s3://b/r", "gs://"]),
}


def plan(args, words) -> Bad:
    args = [args] if isinstance(args, str) else args
    return Bad(["--config=grpo_gemma.py", *args], words, "plan")


_NO_PATH = ["--trainer=v5e:2x4", "--config.model.path=", "--config.rollout.max_prompt_length=64"]
PLAN = {
    "no config": Bad(["--trainer=v5e:2x4"], ["--config"], "plan"),
    "no trainer": plan([], ["--trainer", "v5e:2x4"]),
    "no generation": plan("--trainer=2x4", ["--trainer='2x4'", "v5e:2x4"]),
    "unknown generation": plan("--trainer=v5x:2x4", ["--trainer='v5x:2x4'", "'v5x'", "v5"]),
    "two sizes for three": plan("--trainer=v5p:2x4", ["--trainer='v5p:2x4'", "3 sizes"]),
    "three sizes for two": plan("--trainer=v5e:2x2x2", ["--trainer='v5e:2x2x2'", "2 sizes"]),
    "size 0": plan("--trainer=v5e:0x4", ["--trainer='v5e:0x4'"]),
    "size -1": plan("--trainer=v5e:-1x4", ["--trainer='v5e:-1x4'"]),
    "size in words": plan("--trainer=v5e:twoxfour", ["--trainer='v5e:twoxfour'"]),
    "no such shape": plan("--trainer=v5e:3x5", ["v5e:3x5", "not a slice that GKE makes"]),
    "huge shape": plan("--trainer=v5e:1000x1000", ["--trainer='v5e:1000x1000'"]),
    "astronomic shape": plan("--trainer=v5e:" + "9" * 30 + "x4", ["--trainer"]),
    "no slices": plan("--trainer=v5e:2x4*0", ["--trainer='v5e:2x4*0'"]),
    "too many slices": plan("--trainer=v5e:2x4*999999999", ["--trainer='v5e:2x4*999999999'"]),
    "rollout nonsense": plan(["--trainer=v5e:2x4", "--rollout=moon"], ["--rollout='moon'", "v5e:2x4"]),
    "rollout of a colocated job": plan(
        ["--trainer=v5e:2x4", "--rollout=v5e:2x4"], ["--rollout=v5e:2x4", "roles.colocated=False"]
    ),
    "mesh too large": plan(
        ["--trainer=v5e:2x4", "--config.roles.trainer.mesh=fsdp=64"], ["roles.trainer.mesh", "fsdp=64", "8"]
    ),
    "mesh axis": plan(["--trainer=v5e:2x4", "--config.roles.trainer.mesh=pipe=8"], ["roles.trainer.mesh", "'pipe'"]),
    "unknown size": plan([*_NO_PATH, "--config.model.size=gemma2-3b"], ["'gemma2-3b'", "Did you mean 'gemma2-9b'"]),
    "no size and no path": plan(_NO_PATH, ["model.path", "model.size"]),
    "no prompt length and no path": plan(_NO_PATH[:2], ["rollout.max_prompt_length=0", "model.path"]),
    "model nowhere": plan(["--trainer=v5e:2x4", "--config.model.path=nowhere"], ["model.path='nowhere'"]),
    "completion 0": plan(["--trainer=v5e:2x4", "--completion=0"], ["--completion=0"]),
    "completion too long": plan(["--trainer=v5e:2x4", "--completion=4096"], ["--completion=4096", "40"]),
    "completion word": plan(["--trainer=v5e:2x4", "--completion=long"], ["completion", "long"]),
    "supervised": Bad(["--config=sft_tiny.py", "--trainer=v5e:2x4"], ["sft", "reinforcement"], "plan"),
    "unknown key": plan(["--trainer=v5e:2x4", "--config.trainer.lr=1"], ["'lr'"]),
    "unknown flag": plan(["--trainer=v5e:2x4", "--serach"], ["serach"]),
    "no flag": plan(["--trainer=v5e:2x4", "search"], ["search"]),
}
if importlib.util.find_spec("libtpu") is None:
    PLAN = {"without its compiler": plan("--trainer=v5e:2x4", ["[tpu]'", "v5e:2x4"])}

CASES = {
    f"{command} {name}": bad
    for command, table in (("generate:", GENERATE), ("export:", EXPORT), ("plan:", PLAN))
    for name, bad in table.items()
}
