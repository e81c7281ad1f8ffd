"""Models, tokenizers, chat templates and rewards that podrl.launch must refuse."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable

import ml_dtypes  # noqa: F401 - bfloat16 for safetensors
import numpy as np
from bad_flags import BASE
from commands import Bad
from safetensors.numpy import load_file, save_file

from podrl.job.config import TINY


def model(damage: Callable[[pathlib.Path], None], words, *args: str) -> Bad:
    """Returns a command that runs the small job on a damaged copy of the model that comes with podrl."""

    def copy(path: pathlib.Path) -> None:
        shutil.copytree(TINY, path)
        damage(path)

    return Bad([*BASE, "--config.model.path=model", *args], words, files={"model": copy})


def _without(name: str):
    return lambda model: (model / name).unlink()


def _written(name: str, content: str | bytes):
    def write(model: pathlib.Path) -> None:
        (model / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def _changed(name: str, **fields):
    """Returns a function that changes fields of a model's JSON file; the value None removes a field."""

    def change(model: pathlib.Path) -> None:
        content = json.loads((model / name).read_text()) | fields
        (model / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def config(words, **fields) -> Bad:
    """Returns a command that runs the small job on a model with changed fields in its config.json."""
    return model(_changed("config.json", **fields), words)


def _cut(count: int):
    def cut(model: pathlib.Path) -> None:
        weights = model / "model.safetensors"
        os.truncate(weights, max(weights.stat().st_size - count, 0))

    return cut


def _tensors(**changed):
    """Returns a function that changes tensors of a model by name, with '__' for a dot; the value None removes a
    tensor."""

    def change(model: pathlib.Path) -> None:
        tensors = dict(load_file(model / "model.safetensors"))
        tensors |= {name.replace("__", "."): x for name, x in changed.items()}
        save_file({name: x for name, x in tensors.items() if x is not None}, model / "model.safetensors")

    return change


def _lost_shard(model: pathlib.Path) -> None:
    """Writes an index that names two files; the second file is missing."""
    there, lost = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    tensors = dict(load_file(model / "model.safetensors"))
    files = {name: lost if name == "model.norm.weight" else there for name in tensors}
    save_file({name: x for name, x in tensors.items() if files[name] == there}, model / there)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _fewer_embeddings(model: pathlib.Path) -> None:
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    _tensors(model__embed_tokens__weight=embedding[:200])(model)
    _changed("config.json", vocab_size=200)(model)


def _with(*damages):
    def all_of(model: pathlib.Path) -> None:
        for damage in damages:
            damage(model)

    return all_of


MODELS = {
    "nowhere": Bad([*BASE, "--config.model.path=nowhere"], ["model.path='nowhere'", "tiny or tiny_moe"]),
    "none": Bad([*BASE, "--config.model.path="], ["model.path"]),
    "a file": Bad([*BASE, "--config.model.path=m"], ["model.path='m'", "not a directory"], files={"m": "x"}),
    "an empty directory": Bad([*BASE, "--config.model.path=m"], ["m"], files={"m": lambda path: path.mkdir()}),
    "reference nowhere": Bad([*BASE, "--config.model.reference=nowhere"], ["nowhere", "model.reference"]),
    "critic nowhere": Bad(
        ["--config=ppo_gemma.py", "--workdir=run", "--config.data.size=64", "--config.model.critic=nowhere"],
        ["nowhere", "model.critic"],
    ),
    "reward model nowhere": Bad([*BASE, "--config.reward.model=nowhere"], ["nowhere", "reward.model"]),
    "no config.json": model(_without("config.json"), ["model", "config.json"]),
    "config.json damaged": model(_written("config.json", "{"), ["config.json", "JSON"]),
    "config.json a list": model(_written("config.json", "[]"), ["config.json"]),
    "config.json empty": model(_written("config.json", ""), ["config.json", "JSON"]),
    "config.json not text": model(_written("config.json", b"\xff\xfe"), ["config.json"]),
    "no weights": model(_without("model.safetensors"), ["model", "safetensors"]),
    "weights empty": model(_written("model.safetensors", b""), ["model.safetensors"]),
    "weights of another kind": model(_written("model.safetensors", b"PK\3\4" * 100), ["model.safetensors"]),
    "weights cut short": model(_cut(1000), ["Tensor ", "truncated", "model.safetensors"]),
    "weights almost gone": model(_cut(10**9), ["model.safetensors"]),
    "header too long": model(_written("model.safetensors", b"\xff" * 64), ["model.safetensors"]),
    "lost shard": model(_lost_shard, ["lacks 1 of 2 weight files", "model-00002-of-00002.safetensors"]),
    "index damaged": model(_written("model.safetensors.index.json", "{"), ["model.safetensors.index.json"]),
    "index without a map": model(
        _written("model.safetensors.index.json", "{}"), ["model.safetensors.index.json", "weight_map"]
    ),
    "wrong shape": model(
        _tensors(model__norm__weight=np.zeros(7, np.float32)),
        ["1 tensors have the wrong shape: model.norm.weight is (7,) but must be (128,)"],
    ),
    "wrong dtype": model(_tensors(model__norm__weight=np.zeros(128, np.int8)), ["model.norm.weight", "dtype I8"]),
    "missing and unknown tensors": model(
        _tensors(model__norm__weight=None, model__bonus__weight=np.zeros(3, np.float32)),
        ["1 tensors are missing: model.norm.weight", "1 tensors are unknown: model.bonus.weight"],
    ),
    "NaN weights": model(
        _tensors(model__norm__weight=np.full(128, np.nan, np.float32)), ["model.norm.weight", "NaN", "model holds"]
    ),
    "infinite weights": model(
        _tensors(model__norm__weight=np.full(128, np.inf, np.float32)), ["model.norm.weight", "infinity"]
    ),
    "unknown family": config(["'mamba'", "gemma2"], model_type="mamba"),
    "no family": config(["config.json", "model_type"], model_type=None),
    "unknown activation": config(["relu6"], hidden_activation="relu6"),
    "no layers": config(["num_hidden_layers"], num_hidden_layers=None),
    "layers in words": config(["num_hidden_layers"], num_hidden_layers="three"),
    "zero layers": config(["num_hidden_layers"], num_hidden_layers=0),
    "negative width": config(["hidden_size"], hidden_size=-128),
    "heads that do not divide": config(["num_key_value_heads"], num_key_value_heads=3),
    "zero heads": config(["num_attention_heads"], num_attention_heads=0),
    "odd head size": config(["head_dim"], head_dim=33),
    "unknown rope scaling": config(
        ["rope scaling 'spiral'", "config.json"], rope_scaling={"rope_type": "spiral", "factor": 2.0}
    ),
    "unknown field": config(["num_experts"], num_experts=8),
    "fewer embeddings than tokens": model(_fewer_embeddings, ["The tokenizer has", "200 embeddings", "model.path"]),
    "LoRA pattern": Bad(
        [*BASE, "--config.model.lora.rank=4", "--config.model.lora.pattern=q_einsum"],
        ["lora.pattern='q_einsum' matches no projection", "q_proj"],
    ),
    "LoRA pattern no expression": Bad(
        [*BASE, "--config.model.lora.rank=4", "--config.model.lora.pattern=("], ["lora.pattern", "'('"]
    ),
    "LoRA rank": Bad([*BASE, "--config.model.lora.rank=-1"], ["lora.rank=-1"]),
    "LoRA base dtype": Bad(
        [*BASE, "--config.model.lora.rank=4", "--config.model.lora.base_dtype=int3"], ["lora.base_dtype", "int3"]
    ),
    "dtype": Bad([*BASE, "--config.trainer.dtype=float12"], ["trainer.dtype", "float12"]),
    "param dtype": Bad([*BASE, "--config.trainer.param_dtype=int8"], ["trainer.param_dtype", "int8"]),
    "rollout dtype": Bad([*BASE, "--config.rollout.data_type=foo"], ["rollout.data_type", "foo"]),
}

TOKENIZERS = {
    "no tokenizer": model(_without("tokenizer.json"), ["model", "tokenizer.json", "tokenizer.model"]),
    "empty": model(_written("tokenizer.json", ""), ["tokenizer.json"]),
    "damaged": model(_written("tokenizer.json", "{"), ["tokenizer.json"]),
    "another kind of JSON": model(_written("tokenizer.json", "{}"), ["tokenizer.json"]),
    "not text": model(_written("tokenizer.json", b"\xff\xfe\x00"), ["tokenizer.json"]),
    "no SentencePiece": model(
        _with(_without("tokenizer.json"), _written("tokenizer.model", b"nothing")), ["tokenizer.model", "SentencePiece"]
    ),
    "settings damaged": model(_written("tokenizer_config.json", "{"), ["tokenizer_config.json line 1", "JSON"]),
    "settings a list": model(_written("tokenizer_config.json", "[]"), ["tokenizer_config.json", "list"]),
    "generation settings damaged": model(_written("generation_config.json", "{,"), ["generation_config.json", "JSON"]),
    "template does not parse": model(_written("chat_template.jinja", "{% for %}"), ["chat template", "model"]),
    "template without an end": model(_written("chat_template.jinja", "{% if x %}"), ["chat template", "model"]),
    "template refuses": model(
        _written("chat_template.jinja", "{{ raise_exception('no users') }}"), ["chat template", "no users"]
    ),
    "template with an unknown name": model(
        _written("chat_template.jinja", "{{ nothing.at_all }}"), ["chat template", "nothing"]
    ),
    "template that divides by zero": model(
        _written("chat_template.jinja", "{{ 1 / 0 }}"), ["chat template", "division"]
    ),
    "template of the wrong types": model(_written("chat_template.jinja", "{{ messages + 1 }}"), ["chat template"]),
    "template that explodes": model(
        _written("chat_template.jinja", "{% for i in range(10 ** 9) %}{{ 'x' * 1000 }}{% endfor %}"),
        ["chat template"],
    ),
    "template that recurses": model(
        _written("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), ["chat template"]
    ),
    "template that escapes": model(
        _written("chat_template.jinja", "{{ ''.__class__.__mro__ }}"), ["chat template", "__class__"]
    ),
    "template not text": model(_written("chat_template.jinja", b"\xff\xfe"), ["chat_template.jinja"]),
    "no template": model(
        _changed("tokenizer_config.json", chat_template=None), ["no chat template", "data.template=plain"]
    ),
}


def reward(words, source: str = "", *args: str) -> Bad:
    """Returns a command that runs the small job with a reward function from a file with the text `source`."""
    fns = ["--config.reward.fns=('mine.py:score',)"] if source else []
    return Bad([*BASE, *fns, *args], words, files={"mine.py": source} if source else {})


REWARDS = {
    "misspelt": reward(["'anwser'", "'answer'"], "", "--config.reward.fns=('anwser',)"),
    "none": reward(["reward.fns"], "", "--config.reward.fns=()"),
    "a number": reward(["reward.fns", "3"], "", "--config.reward.fns=(3,)"),
    "markup": reward(["[bold]x[/b]"], "", "--config.reward.fns=('[bold]x[/b]',)"),
    "of one argument": reward(
        [
            "reward.fns: reward function score is defined with (completion, ...)",
            "define it as score(prompts, completions",
        ],
        "def score(completion):\n    return 1.0\n",
    ),
    "the first argument is a field": reward(
        [
            "reward.fns: reward function score is defined with (question, answer, ...)",
            "'question' is a field of the records",
        ],
        "def score(question, answer):\n    return [1.0] * len(question)\n",
    ),
    "file nowhere": reward(["nowhere.py", "does not exist"], "", "--config.reward.fns=('nowhere.py:f',)"),
    "module nowhere": reward(["nowhere_at_all"], "", "--config.reward.fns=('nowhere_at_all:f',)"),
    "no function in the file": reward(["reward.fns: 'mine.py:score'", "has no function"], "x = 1\n"),
    "not callable": reward(["reward.fns: 'mine.py:score'"], "score = 1\n"),
    "does not parse": reward(["reward.fns: 'mine.py:score' cannot be loaded", "mine.py, line 1"], "def score(:\n"),
    "raises at import": reward(["reward.fns: 'mine.py:score'", "not today"], "raise RuntimeError('not today')\n"),
    "lacks an import": reward(["reward.fns: 'mine.py:score'", "nowhere_at_all"], "import nowhere_at_all\n"),
    "weights": reward(["reward.weights", "4 functions"], "", "--config.reward.weights=(1.0, 2.0)"),
    "weights nan": reward(
        ["reward.weights", "nan"], "", "--config.reward.fns=('answer',)", "--config.reward.weights=(float('nan'),)"
    ),
    "deadline 0": reward(["reward.deadline_s=0"], "", "--config.reward.deadline_s=0.0"),
    "workers 0": reward(["reward.workers=0"], "", "--config.reward.workers=0"),
    "data set of nothing": reward(["'answer@'"], "", "--config.reward.fns=('answer@',)"),
    "judge without an address": reward(["reward.judge.url"], "", "--config.reward.fns=('judge',)"),
    "judge of another scheme": reward(["reward.judge.url", "ftp://x"], "", "--config.reward.judge.url=ftp://x"),
    "judge's template": reward(["reward.judge.template", "{completion}"], "", "--config.reward.judge.template=x"),
    "judge's retries": reward(["retries=-1"], "", "--config.reward.judge.retries=-1"),
}


def environment(words, source: str, *args: str) -> Bad:
    """Returns a command that runs the small job with an environment or tools from a file with the text `source`."""
    room = "--config.rollout.max_response_tokens=80"
    return Bad([*BASE, room, *args], words, files={"mine.py": source})


_GAME = "--config.env.environment=mine.py:Game"
ENVIRONMENTS = {
    "without run": environment(
        ["env.environment='mine.py:Game'", "Game has no `async def run("], "class Game: ...\n", _GAME
    ),
    "run that is no coroutine": environment(
        ["env.environment='mine.py:Game'", "Game has no `async def run(", "write `async` before it"],
        "class Game:\n    def run(self, task, model):\n        pass\n",
        _GAME,
    ),
    "run without the model": environment(
        ["env.environment='mine.py:Game'", "`run` of Game is called with task and model: too many"],
        "class Game:\n    async def run(self, task):\n        pass\n",
        _GAME,
    ),
    "a class that needs arguments": environment(
        ["env.environment='mine.py:Game'", "made anew for each episode", "'size'"],
        "class Game:\n    def __init__(self, size): ...\n    async def run(self, task, model): ...\n",
        _GAME,
    ),
    "misspelt": environment(
        ["env.environment='mine.py:Gmae'", "mine.py has no function or class 'Gmae'", "Did you mean 'Game'?"],
        "class Game: ...\n",
        "--config.env.environment=mine.py:Gmae",
    ),
    "does not parse": environment(["env.environment='mine.py:Game'", "invalid syntax", "line 1"], "def (:\n", _GAME),
    "no module": environment(
        ["env.environment='nowhere_at.all:G'", "No module named 'nowhere_at'"],
        "",
        "--config.env.environment=nowhere_at.all:G",
    ),
    "a program that is no command": environment(
        ["env.program='./mine.py'", "is not executable", "'python ./mine.py'"],
        "x = 1\n",
        "--config.env.program=./mine.py",
    ),
    "a plain function": environment(
        ["env.environment='mine.py:Game'", "Game is a function: name a class", "env.tools"],
        "def Game(task, model): ...\n",
        _GAME,
    ),
    "a coroutine function": environment(
        ["env.environment='mine.py:Game'", "Game is a function: name a class"],
        "async def Game(task, model): ...\n",
        _GAME,
    ),
    "the same tool twice": environment(
        ["env.tools=('calculator', 'calculator')", "'calculator' twice"], "", "--config.env.tools=calculator,calculator"
    ),
    "a server's file nowhere": environment(
        ["env.mcp: python nowhere.py", "there is no file", "nowhere.py"], "", "--config.env.mcp=python nowhere.py"
    ),
    "a server's file alone": environment(
        ["env.mcp: mine.py", "name it as 'python mine.py'"], "", "--config.env.mcp=mine.py"
    ),
    "a server's command with a comma": environment(
        ["env.mcp=python mine.py --x=1,2", "('python mine.py --x=1,2',)"], "", "--config.env.mcp=python mine.py --x=1,2"
    ),
    "a server of another scheme": environment(
        ["env.mcp.target='ftp://x/y'", "http://"], "", "--config.env.mcp=('ftp://x/y',)"
    ),
}

CASES = {
    f"{group} {name}": bad
    for group, table in (
        ("model:", MODELS),
        ("tokenizer:", TOKENIZERS),
        ("reward:", REWARDS),
        ("environment:", ENVIRONMENTS),
    )
    for name, bad in table.items()
}
