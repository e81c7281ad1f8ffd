"""Flags, configuration files, topologies, meshes, hosts and run directories that podrl.launch must refuse."""

import importlib.util
import os
import pathlib

from commands import Bad

SMALL = (
    "--workdir=run",
    "--config.trainer.max_steps=2",
    "--config.eval.problems=0",
    "--config.data.size=64",  # few, because every start looks for the longest prompt
    "--config.rollout.prompts_per_step=2",
    "--config.grpo.num_generations=2",
    "--config.rollout.lanes=4",
    "--config.rollout.max_tokens_to_generate=8",
    "--config.log.to=()",
    "--config.trainer.eval_every_n_steps=0",
)
BASE = ("--config=grpo_gemma.py", "--config.fake_devices=8", "--config.roles.colocated=False", *SMALL)


def launch(args, words, **files) -> Bad:
    """Returns a command that runs the small job with further arguments; the keys of `files` are file names, with '__'
    for a dot."""
    args = [args] if isinstance(args, str) else args
    named = {name.replace("__", "."): content for name, content in files.items()}
    return Bad([*BASE, *args], [words] if isinstance(words, str) else words, files=named)


def config_file(text: str, words, *args: str, name: str = "mine.py") -> Bad:
    """Returns a command whose configuration file has the text `text`."""
    words = [words] if isinstance(words, str) else words
    return Bad([f"--config={name}", "--workdir=run", *args], words, files={name: text})


def _returning(values: str) -> str:
    """Returns the text of a configuration file with these values."""
    return f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({values})\n"


def _directory(path: pathlib.Path) -> None:
    path.mkdir()


def _sealed(path: pathlib.Path) -> None:
    path.mkdir(mode=0o500)


def _loop(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


def _fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


_MINIMAL = _returning("{}")
_PAST = {"run/metrics.jsonl": '{"step": 0, "time/step": 1.0}\n'}  # the metrics of a run that has finished a step

CONFIG_FILES = {
    "no config": Bad(["--workdir=run"], ["--config", "grpo_gemma.py"]),
    "config is empty": Bad(["--config=", "--workdir=run"], ["--config"]),
    "config without a value": Bad(["--workdir=run", "--config"], ["--config"]),
    "evaluation beside training": Bad(
        ["--config=sft_tiny.py", "--workdir=run", "--config.eval.beside=True"], ["'beside'", "roles.eval.hosts"]
    ),
    "misspelt config": Bad(["--config=grpo_gema.py"], ["grpo_gema.py", "no such file", "'grpo_gemma.py'"]),
    "config in no directory": Bad(["--config=nowhere/mine.py"], ["nowhere/mine.py", "no such file"]),
    "config is a directory": Bad(["--config=mine.py"], ["mine.py", "no such file"], files={"mine.py": _directory}),
    "config of another kind": Bad(["--config=mine.yaml"], ["mine.yaml", "Python"], files={"mine.yaml": "seed: 1\n"}),
    "config is binary": config_file("\0\1\2", ["mine.py", "null bytes"]),
    "config is not UTF-8": Bad(["--config=mine.py"], ["mine.py", "utf-8"], files={"mine.py": b"x = '\xff\xfe'\n"}),
    "config does not parse": config_file("def get_config(:\n  pass\n", ["mine.py", "line 1", "invalid syntax"]),
    "config is badly indented": config_file("def get_config():\nreturn 1\n", ["mine.py", "line 2", "indented block"]),
    "config with tabs": config_file("def f():\n\tx = 1\n        y = 2\n", ["mine.py", "line 3"]),
    "config is unfinished": config_file("x = (1,\n", ["mine.py", "line 1", "never closed"]),
    "config without get_config": config_file("x = 1\n", ["mine.py", "get_config"]),
    "get_config is not a function": config_file("get_config = 3\n", ["mine.py", "get_config"]),
    "get_config gives None": config_file(
        "def get_config():\n    pass\n", ["mine.py", "get_config", "None", "ConfigDict"]
    ),
    "get_config gives a list": config_file("def get_config():\n    return [1]\n", ["mine.py", "list", "ConfigDict"]),
    "get_config gives a text": config_file("def get_config():\n    return 'x'\n", ["mine.py", "str", "ConfigDict"]),
    "get_config raises": config_file(
        "def get_config():\n    return 1 / 0\n", ["mine.py", "line 2", "ZeroDivisionError", "division by zero"]
    ),
    "get_config lacks a key": config_file(
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict().nothing\n",
        ["mine.py", "line 3", "nothing"],
    ),
    "config raises at import": config_file("raise RuntimeError('not today')\n", ["mine.py", "line 1", "not today"]),
    "config exits": config_file("import sys\nsys.exit(3)\n", ["mine.py", "line 2", "SystemExit"]),
    "config lacks an import": config_file("import nowhere_at_all\n", ["mine.py", "line 1", "nowhere_at_all"]),
    "config misspells an import": config_file(
        "from ml_collections import ConfigDct\n", ["mine.py", "line 1", "ConfigDct"]
    ),
    "get_config wants an argument": config_file("def get_config(x):\n    return x\n", ["mine.py", "get_config"]),
    "variant of a config without": Bad(["--config=mine.py:big"], ["mine.py", "'big'"], files={"mine.py": _MINIMAL}),
    "no such variant": Bad(["--config=grpo_gemma.py:loar"], ["grpo_gemma.py", "'loar'", "lora"]),
    "get_config gives a dict": config_file(
        "def get_config():\n    return {}\n", ["mine.py", "get_config", "dict", "ConfigDict"]
    ),
    "config that misses what a trainer needs": config_file(
        _MINIMAL, ["config.trainer lacks", "--config.trainer.eval_every_n_steps"]
    ),
    "config that misses what a trainer needs, which the command line gives": Bad(
        ["--config=mine.py", "--workdir=run", "--config.trainer.eval_every_n_steps=0"],
        ["--config.trainer.max_steps"],
        files={"mine.py": _MINIMAL},
    ),
    "config that misses max_steps": config_file(
        _returning("{'trainer': {'eval_every_n_steps': 0}}"), ["--config.trainer.max_steps"]
    ),
    "config with an unknown group": config_file(_returning("{'trainr': {'max_steps': 1}}"), ["trainr", "'trainer'"]),
    "config with an unknown key": config_file(
        _returning("{'trainer': {'max_step': 1}}"), ["trainer", "max_step", "'max_steps'"]
    ),
    "config with a number for a group": config_file(
        _returning("{'trainer': {'max_steps': 1}, 'data': 3}"), ["data", "3"]
    ),
    "config with a text for a number": config_file(
        _returning("{'trainer': {'max_steps': 'many', 'eval_every_n_steps': 0}}"),
        ["trainer.max_steps", "'many'", "whole number"],
    ),
    "config with a list for a text": config_file(
        _returning("{'trainer': {'max_steps': 1, 'eval_every_n_steps': 0}, 'data': {'path': ['a']}}"),
        ["data.path", "['a']"],
    ),
    "config with an unknown algorithm": config_file(
        _returning("{'algorithm': 'grop', 'trainer': {'max_steps': 1}}"), ["'grop'", "grpo"]
    ),
    "config with a number for the algorithm": config_file(
        _returning("{'algorithm': 3, 'trainer': {'max_steps': 1}}"), ["algorithm", "3"]
    ),
}

FLAGS = {
    "unknown flag": launch("--confg.seed=3", ["confg"]),
    "last part of a key": launch("--max_steps=10", ["--max_steps", "'--config.trainer.max_steps=10'"]),
    "last part of a key, with dashes": launch("--max-steps=10", ["'--config.trainer.max_steps=10'"]),
    "last part of several keys": launch("--path=x", ["'--config.data.path' or '--config.model.path'"]),
    "setting of TRL": launch("--num_train_epochs=3", ["--num_train_epochs", "trainer.max_steps is the number of"]),
    "seed alone": launch("--seed=3", ["--config.seed=N", "--config.data.seed=N"]),
    "name of another system": launch("--lr=1e-4", ["--lr", "--config.trainer.learning_rate=1e-4"]),
    "last part of no key": launch("--swiftness=1e-4", ["--swiftness", "--help_config"]),
    "misspelt flag": launch("--workdri=x", ["workdri", "'--workdir'"]),
    "resume": launch("--config.resume=True", ["'resume'", "the same command with the same --workdir resumes"]),
    "no flag": launch("seed=3", ["seed=3", "--"]),
    "lone word": launch("train", ["train", "--"]),
    "single dash": launch("-workdri=x", ["workdri"]),
    "topology": launch("--topology=ring", ["--topology=ring", "auto", "shared"]),
    "topology of a pod": launch(["--topology=ring", "--local_processes=2"], ["--topology=ring", "auto", "shared"]),
    "config misspelt": launch("--confg.trainer.max_steps=3", ["'confg'", "'config'"]),
    "reward file alone": launch("--config.reward.fns=('mine.py',)", ["'mine.py'", "mine.py:FUNCTION"]),
    "topology of several processes": launch("--topology=shared", ["--topology=shared", "2 processes", "1 process"]),
    "topology split alone": launch("--topology=split", ["--topology=split", "PODRL_CHANNEL"]),
    "topology pathways alone": launch("--topology=pathways", ["--topology=pathways", "JAX_PLATFORMS=proxy"]),
    "local_processes word": launch("--local_processes=two", ["local_processes", "two"]),
    "local_processes fraction": launch("--local_processes=2.5", ["local_processes", "2.5"]),
    "local_processes negative": launch("--local_processes=-2", ["--local_processes=-2", "0"]),
    "local_processes too many": launch(
        ["--local_processes=100000", "--fake_devices=1"], ["--local_processes=100000", "memory", "start at most"]
    ),
    "local_processes huge": launch("--local_processes=1" + "0" * 30, ["--local_processes=1000"]),
    "fake_devices word": launch("--fake_devices=eight", ["fake_devices", "eight"]),
    "fake_devices negative": launch("--fake_devices=-8", ["fake_devices=-8"]),
    "config.fake_devices word": launch("--config.fake_devices=many", ["fake_devices", "many"]),
    "config.fake_devices negative": launch("--config.fake_devices=-8", ["fake_devices=-8"]),
    "join_s word": launch("--join_s=soon", ["join_s", "soon"]),
    "join_s negative": launch("--join_s=-1", ["join_s=-1"]),
    "join_s nan": launch("--join_s=nan", ["join_s=nan"]),
    "heartbeat_s word": launch("--heartbeat_s=x", ["heartbeat_s", "x"]),
    "heartbeat_s zero": launch("--heartbeat_s=0", ["heartbeat_s=0"]),
    "dry_run word": launch("--dry_run=maybe", ["dry_run", "maybe"]),
    "debug word": launch("--debug=perhaps", ["debug", "perhaps"]),
    "shared_workdir word": launch("--shared_workdir=x", ["shared_workdir", "x"]),
    "markup in a flag": launch("--[bold]x=[/b]", ["[bold]x"]),
    "markup in an override": launch("--config.[bold].x=1", ["[bold]"]),
}

OVERRIDES = {
    "unknown key": launch("--config.grpo.num_generatons=4", ["num_generatons", "'num_generations'"]),
    "unknown group": launch("--config.trainr.max_steps=4", ["trainr", "'trainer'"]),
    "unknown top key": launch("--config.sed=4", ["sed", "'seed'"]),
    "group as a value": launch("--config.trainer=4", ["trainer", "4"]),
    "key below a value": launch("--config.seed.x=4", ["seed", "'x'"]),
    "empty key": launch("--config.=4", ["config"]),
    "empty part": launch("--config.trainer..max_steps=4", ["config.trainer"]),
    "key without a value": launch("--config.seed", ["seed"]),
    "key of another algorithm": launch("--config.ppo.beta=0.1", ["ppo", "grpo"]),
    "text for a number": launch("--config.grpo.num_generations=four", ["num_generations", "four"]),
    "fraction for a whole number": launch("--config.seed=2.5", ["seed", "2.5", "whole"]),
    "fraction for an optional whole number": launch("--config.trainer.max_steps=2.5", ["max_steps", "2.5", "whole"]),
    "empty number": launch("--config.seed=", ["seed"]),
    "text for a truth": launch("--config.data.shuffle=perhaps", ["shuffle", "perhaps"]),
    "number in words": launch("--config.trainer.learning_rate=1e-", ["learning_rate", "1e-"]),
    "unbalanced tuple": launch("--config.reward.fns=('answer',", ["reward.fns", "('answer',"]),
    "tuple of the wrong kind": launch("--config.reward.weights=('x',)", ["reward.weights", "'x'"]),
    "text for a tuple": launch("--config.reward.weights=heavy", ["reward.weights", "heavy"]),
    "unknown algorithm": launch("--config.algorithm=grop", ["grop", "grpo"]),
    "empty algorithm": launch("--config.algorithm=", ["algorithm"]),
    "text for a tuple of ids": launch("--config.rollout.eos_tokens=<eos>", ["rollout.eos_tokens[0]='<eos>'", "whole"]),
    "text for an object": launch("--config.trainer.actor_optimizer=adam", ["trainer.actor_optimizer", "an object"]),
    "refused by name": launch(
        "--config.rollout.tensor_parallel_size=2", ["tensor_parallel_size", "roles.rollout.mesh='tensor=4'"]
    ),
    "short name": launch("--lr=1e-4", ["no flag --lr", "'--config.trainer.learning_rate=1e-4'"]),
    "short name in a group": launch("--config.trainer.lr=1e-4", ["has no key 'lr'", "'config.trainer.learning_rate'"]),
    "stop": launch("--config.rollout.stop=5", ["'stop'", "rollout.stop_strings", "rollout.eos_tokens"]),
    "field of a source": launch(
        "--config.data.sources=({'path': 'd', 'wieght': 3},)",
        ["config.data.sources[0] has no key 'wieght'", "'weight'"],
    ),
    "value of a source": launch(
        "--config.data.sources=({'path': 'd', 'weight': 'x'},)", ["data.sources[0].weight='x' must be a number"]
    ),
    "source without a path": launch(
        "--config.data.sources=({'weight': 3},)", ["config.data.sources[0] lacks path: set 'path' there."]
    ),
    "field of a set": launch(
        "--config.eval.sets=({'path': 'd', 'nam': 'x'},)", ["config.eval.sets[0] has no key 'nam'", "'name'"]
    ),
}

SIZES = {
    "mini-batches": launch(
        "--config.trainer.mini_batch_size=3", ["prompts do not split", "mini-batches of 3", "trainer.mini_batch_size"]
    ),
    "no prompts": launch("--config.rollout.prompts_per_step=0", ["prompts_per_step=0"]),
    "groups of one": launch("--config.grpo.num_generations=1", ["num_generations=1"]),
    "aggregation": launch("--config.grpo.loss_agg_mode=token-men", ["token-men", "token-mean"]),
    "no steps": launch("--config.trainer.max_steps=0", ["max_steps=0"]),
    "learning rate -1": launch("--config.trainer.learning_rate=-1.0", ["learning_rate=-1"]),
    "learning rate nan": launch("--config.trainer.learning_rate=nan", ["learning_rate=nan"]),
    "learning rate inf": launch("--config.trainer.learning_rate=inf", ["learning_rate=inf"]),
    "temperature -1": launch("--config.rollout.temperature=-1.0", ["temperature=-1"]),
    "no tokens": launch("--config.rollout.max_tokens_to_generate=0", ["max_tokens_to_generate=0"]),
    "no room for tools": launch(
        ["--config.env.environment=tools", "--config.env.tools=('calculator',)"],
        ["rollout.max_response_tokens", "max_tokens_to_generate=8"],
    ),
    "seed beyond 32 bits": launch("--config.seed=99999999999", ["seed=99999999999"]),
}

MESHES = {
    "devices over": launch(
        ["--config.roles.trainer.mesh=fsdp=3", "--config.roles.rollout.mesh=data=4"], ["fsdp=3", "data=4", "8"]
    ),
    "devices missing": launch(
        ["--config.roles.trainer.mesh=fsdp=8", "--config.roles.rollout.mesh=data=4"], ["fsdp=8", "data=4", "8"]
    ),
    "unknown axis": launch("--config.roles.trainer.mesh=fsdp=4,rows=2", ["roles.trainer.mesh", "'rows'", "tensor"]),
    "axis twice": launch("--config.roles.trainer.mesh=fsdp=2,fsdp=2", ["roles.trainer.mesh", "'fsdp' twice"]),
    "axis without a size": launch("--config.roles.trainer.mesh=fsdp", ["roles.trainer.mesh", "fsdp=2"]),
    "axis with a word": launch("--config.roles.rollout.mesh=data=all", ["roles.rollout.mesh", "'all'"]),
    "axis of size 0": launch("--config.roles.trainer.mesh=fsdp=0", ["roles.trainer.mesh", "size 0"]),
    "axis of size -2": launch("--config.roles.trainer.mesh=fsdp=-2", ["roles.trainer.mesh", "-2"]),
    "axis fraction": launch("--config.roles.trainer.mesh=fsdp=1.5", ["roles.trainer.mesh", "1.5"]),
    "axis huge": launch("--config.roles.trainer.mesh=fsdp=" + "9" * 40, ["roles.trainer.mesh", "999"]),
    "two open axes": launch("--config.roles.trainer.mesh=fsdp=-1,tensor=-1", ["roles.trainer.mesh", "-1"]),
    "mesh of nonsense": launch("--config.roles.trainer.mesh=;;", ["roles.trainer.mesh", "axes are"]),
    "rollout needs more": launch("--config.roles.rollout.mesh=data=3,tensor=3", ["roles.rollout.mesh", "needs 9,"]),
    "colocated mesh": launch(
        ["--config.roles.colocated=True", "--config.roles.trainer.mesh=fsdp=4"], ["roles.trainer.mesh", "fsdp=4"]
    ),
    "critic of grpo": launch("--config.roles.critic.mesh=fsdp=2", ["roles.critic.mesh", "critic", "ppo"]),
    "reward without a model": launch("--config.roles.reward.mesh=data=2", ["roles.reward.mesh", "reward.model"]),
    "critic on the rollout": launch("--config.roles.critic.mesh=rollout", ["roles.critic.mesh", "'trainer'"]),
    "hosts of one process": launch("--config.roles.trainer.hosts=0-3", ["roles.trainer.hosts", "0-3"]),
    "hosts in words": launch(
        ["--local_processes=2", "--config.roles.trainer.hosts=first"], ["roles.trainer.hosts", "first"]
    ),
    "hosts beyond the job": launch(
        ["--local_processes=2", "--config.roles.trainer.hosts=0,7"], ["roles.trainer.hosts", "7"]
    ),
    "hosts in both roles": launch(
        ["--local_processes=2", "--config.roles.trainer.hosts=0-1", "--config.roles.rollout.hosts=1"], ["two roles"]
    ),
    "host 0 generates": launch(
        ["--local_processes=2", "--config.roles.rollout.hosts=0"], ["roles.rollout.hosts", "host 0 must be a trainer"]
    ),
    "hosts backwards": launch(
        ["--local_processes=4", "--config.roles.trainer.hosts=3-1"], ["roles.trainer.hosts", "3-1"]
    ),
    "host negative": launch(["--local_processes=4", "--config.roles.trainer.hosts=-1"], ["roles.trainer.hosts", "-1"]),
}


def _platform(words, **variables: str) -> Bad:
    return Bad(BASE, words, environment=variables)


_LOCAL = {"PODRL_PLATFORM": "local", "PODRL_PROCESS_COUNT": "2", "PODRL_PROCESS_INDEX": "0"}
PLATFORMS = {
    "unknown platform": _platform(["PODRL_PLATFORM=moon", "local"], PODRL_PLATFORM="moon"),
    "local without a count": _platform(["PODRL_PROCESS_COUNT"], PODRL_PLATFORM="local"),
    "count of none": _platform(["PODRL_PROCESS_COUNT=0"], **_LOCAL | {"PODRL_PROCESS_COUNT": "0"}),
    "count in words": _platform(["PODRL_PROCESS_COUNT='two'"], **_LOCAL | {"PODRL_PROCESS_COUNT": "two"}),
    "index beyond": _platform(["PODRL_PROCESS_INDEX=2", "below 2"], **_LOCAL | {"PODRL_PROCESS_INDEX": "2"}),
    "index negative": _platform(["PODRL_PROCESS_INDEX=-1"], **_LOCAL | {"PODRL_PROCESS_INDEX": "-1"}),
    "no coordinator": _platform(["PODRL_COORDINATOR", "HOST:PORT"], **_LOCAL, PODRL_SECRET="x"),
    "coordinator without a port": _platform(["PODRL_COORDINATOR='a'"], **_LOCAL, PODRL_COORDINATOR="a"),
    "no secret": _platform(["PODRL_SECRET", "openssl"], **_LOCAL, PODRL_COORDINATOR="127.0.0.1:1"),
    "role": _platform(["PODRL_ROLE='boss'"], **_LOCAL, PODRL_COORDINATOR="127.0.0.1:1", PODRL_ROLE="boss"),
    "proxy without a target": _platform(["JAX_BACKEND_TARGET", "grpc://"], JAX_PLATFORMS="proxy"),
    "jobset without a role": _platform(["PODRL_ROLE=''"], PODRL_PLATFORM="jobset_split"),
    "worker without hosts": _platform(["TPU_WORKER_HOSTNAMES"], TPU_WORKER_ID="0"),
    "worker beyond": _platform(["TPU_WORKER_ID=3", "below 2"], TPU_WORKER_ID="3", TPU_WORKER_HOSTNAMES="a,b"),
    "slices without a leader": _platform(
        ["MEGASCALE_COORDINATOR_ADDRESS"],
        TPU_WORKER_ID="0",
        TPU_WORKER_HOSTNAMES="a",
        MEGASCALE_NUM_SLICES="2",
        MEGASCALE_SLICE_ID="0",
    ),
    "hosts without one disk": _platform(
        ["--workdir=/", "/run", "gs://", "--shared_workdir"], TPU_WORKER_ID="0", TPU_WORKER_HOSTNAMES="a,b"
    ),
}

WORKDIRS = {
    "a file": launch("--workdir=mine", ["--workdir=mine", "director"], mine="x"),
    "below a file": launch("--workdir=mine/run", ["--workdir=mine/run"], mine="x"),
    "a loop of links": launch("--workdir=loop", ["--workdir=loop"], loop=_loop),
    "a pipe": launch("--workdir=pipe", ["--workdir=pipe"], pipe=_fifo),
    "a device": launch("--workdir=/dev/null", ["--workdir=/dev/null"]),
    "below proc": launch("--workdir=/proc/podrl", ["--workdir=/proc/podrl"]),
    "too long a name": launch("--workdir=" + "x" * 300, ["--workdir=xxx"]),
    "markup, a file": launch("--workdir=[bold]x[/b]", ["--workdir=[bold]x[/b]"], **{"[bold]x[/b]": "x"}),
    "unknown scheme": launch("--workdir=s3://bucket/run", ["s3://bucket/run", "gs://"]),
    "no bucket": launch("--workdir=gs://", ["gs://"]),
    "config.json damaged": launch([], ["run/config.json is damaged", "line 1"], **_PAST, **{"run/config__json": "{"}),
    "config.json a list": launch([], ["run/config.json is damaged", "list"], **_PAST, **{"run/config__json": "[1]"}),
    "config.json a directory": launch([], ["run/config.json"], **{"run/config__json": _directory}),
    "compile cache is a file": launch("--config.compile_cache=mine", ["compile_cache"], mine="x"),
}
if importlib.util.find_spec("pathwaysutils") is None:
    PLATFORMS["proxy without its client"] = _platform(
        ["pathwaysutils"], JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET="grpc://127.0.0.1:1"
    )

CASES = {
    f"{group} {name}": bad
    for group, table in (
        ("file:", CONFIG_FILES),
        ("flag:", FLAGS),
        ("override:", OVERRIDES),
        ("size:", SIZES),
        ("mesh:", MESHES),
        ("platform:", PLATFORMS),
        ("workdir:", WORKDIRS),
    )
    for name, bad in table.items()
}
