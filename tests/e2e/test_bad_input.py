"""Wrong input is refused in one screen that says what is wrong and what to turn; nothing of the user's is touched."""

import json
import os
import pathlib
import shutil

import ml_dtypes  # noqa: F401 - bfloat16 for safetensors
import numpy as np
import pytest
from processes import Job, run
from safetensors.numpy import load_file, save_file

from podrl.learner.setup import TINY

pytestmark = pytest.mark.e2e
QUESTIONS = [{"question": f"Tom has {n} apples and buys 2. How many?", "answer": str(n + 2)} for n in range(40)]


def refused(done: Job, *texts: str) -> None:
    """One screen, no traceback, and every one of `texts` in it."""
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 24, done.stderr
    assert "podrl: error: " in done.stderr
    for text in texts:
        assert text in done.stderr, f"{text!r} is not in:\n{done.stderr}"


def write_jsonl(path: pathlib.Path, records) -> pathlib.Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["--config=grpo_gema.py"], ["grpo_gema.py: no such file", "'grpo_gemma.py'"]),
        (["--config.grpo.num_generatons=4"], ["num_generatons", "'num_generations'"]),
        (["--config.trainr.max_steps=4"], ["trainr", "'trainer'"]),
        (["--config.grpo.num_generations=four"], ["num_generations", "four"]),
        (["--config.fake_devices=many"], ["fake_devices", "many"]),
        (["--confg.seed=3"], ["confg.seed"]),
        (["seed=3"], ["seed=3"]),
        (["--config.roles.trainer.mesh=fsdp=3", "--config.roles.rollout.mesh=data=4"], ["fsdp=3", "data=4", "8"]),
        (["--config.roles.trainer.mesh=fsdp=4,model=2"], ["roles.trainer.mesh", "'model'", "tensor"]),
        (["--config.roles.rollout.mesh=data=3,tensor=3"], ["roles.rollout.mesh", "needs 9,"]),
        (["--config.trainer.mini_batch_size=7"], ["16 sequences", "mini-batches of 7", "trainer.mini_batch_size"]),
        (["--config.rollout.prompts_per_step=0"], ["prompts_per_step"]),
        (["--config.grpo.num_generations=1"], ["num_generations=1"]),
        (["--config.grpo.loss_agg_mode=token-men"], ["token-men", "token-mean"]),
        (["--config.trainer.max_steps=0"], ["max_steps=0"]),
        (["--config.trainer.learning_rate=-1.0"], ["learning_rate=-1"]),
        (["--config.trainer.learning_rate=nan"], ["learning_rate=nan"]),
        (["--config.rollout.temperature=-1.0"], ["temperature=-1"]),
        (["--config.data.path=nowhere.jsonl"], ["nowhere.jsonl", "does not exist", "data.path"]),
        (["--config.model.path=nowhere"], ["model.path='nowhere'", "'tiny'"]),
        (["--config.reward.fns=('anwser',)"], ["'anwser'", "'answer'"]),
        (["--config.reward.weights=(1.0, 2.0)"], ["reward.weights", "4 functions"]),
    ],
    ids=lambda value: value[0].removeprefix("--config") if isinstance(value, list) and value[0][:2] == "--" else "",
)
def test_flags_and_sizes(args, texts, tmp_path):
    done = run(tmp_path / "run", *args, code=1)
    refused(done, *texts)
    assert not (tmp_path / "run" / "checkpoints").exists() or not os.listdir(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("empty.jsonl", b"", ["empty.jsonl", "empty"]),
        ("broken.jsonl", b'{"question": "q", "answer": "1"}\n{"question": \n', ["broken.jsonl line 2", "not JSON"]),
        ("list.jsonl", b'{"question": "q", "answer": "1"}\n\n[1, 2]\n', ["list.jsonl line 3", "list", "JSON object"]),
        ("lacks.jsonl", b'{"question": "q"}\n', ["lacks.jsonl line 1", "'answer'"]),
        ("null.jsonl", b'{"question": null, "answer": "1"}\n', ["null.jsonl line 1", "'question'", "None"]),
        ("latin.jsonl", b'{"question": "q", "answer": "1"}\n{"question": "\xe9"}\n', ["latin.jsonl line 2", "UTF-8"]),
        ("short.csv", b"question,answer\nq,1\nq\n", ["short.csv line 3", "1 values for the 2 columns"]),
        ("header.csv", b"prompt,answer\nq,1\n", ["header.csv line 1", "'question'", "data.question_field"]),
        ("data.txt", b"hello\n", ["data.txt", "no known format"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_files(name, content, texts, tmp_path):
    (tmp_path / name).write_bytes(content)
    done = run(tmp_path / "run", f"--config.data.path={tmp_path / name}", code=1)
    refused(done, *texts)


@pytest.fixture
def model(tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


def test_a_truncated_model_file_names_the_tensor(model, tmp_path):
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    refused(run(tmp_path / "run", f"--config.model.path={model}", code=1), "Tensor ", "truncated", str(weights))


def _tensors(model):
    return dict(load_file(model / "model.safetensors"))


def _lost_shard(model):
    """Two files by the index, of which the second is not there."""
    there, lost = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    tensors = _tensors(model)
    files = {name: lost if name == "model.norm.weight" else there for name in tensors}
    save_file({name: x for name, x in tensors.items() if files[name] == there}, model / there)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _change(model, **changed):
    """Tensors by name, dots written as double underscores; None takes one away."""
    tensors = _tensors(model) | {name.replace("__", "."): x for name, x in changed.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, model / "model.safetensors")


def _fewer_embeddings(model):
    config = json.loads((model / "config.json").read_text())
    _change(model, model__embed_tokens__weight=_tensors(model)["model.embed_tokens.weight"][:200])
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))


@pytest.mark.parametrize(
    ("damage", "args", "texts"),
    [
        (_lost_shard, [], ["lacks 1 of 2 weight files", "model-00002-of-00002.safetensors"]),
        (
            lambda model: _change(model, model__norm__weight=np.zeros(7, np.float32)),
            [],
            ["1 tensors have the wrong shape: model.norm.weight is (7,) but must be (128,)"],
        ),
        (
            lambda model: _change(model, model__norm__weight=np.zeros(128, np.int8)),
            [],
            ["model.norm.weight", "dtype I8", "F32"],
        ),
        (
            lambda model: _change(model, model__norm__weight=None, model__bonus__weight=np.zeros(3, np.float32)),
            [],
            ["1 tensors are missing: model.norm.weight", "1 tensors are unknown: model.bonus.weight"],
        ),
        (_fewer_embeddings, [], ["The tokenizer has", "200 embeddings", "model.path"]),
        (
            lambda model: None,
            ["--config.model.lora.rank=4", "--config.model.lora.pattern=q_einsum"],
            ["lora.pattern='q_einsum' matches no projection", "q_proj"],
        ),
    ],
    ids=["lost shard", "wrong shape", "wrong dtype", "missing and extra tensors", "vocabulary", "LoRA pattern"],
)
def test_a_damaged_model_is_refused_before_training(damage, args, texts, model, tmp_path):
    damage(model)
    refused(run(tmp_path / "run", f"--config.model.path={model}", *args, code=1), *texts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_model_without_its_configuration_or_tokenizer(model, tmp_path):
    (model / "tokenizer.json").unlink()
    refused(run(tmp_path / "run", f"--config.model.path={model}", code=1), str(model), "tokenizer")
    (model / "config.json").write_text("{")
    refused(run(tmp_path / "run", f"--config.model.path={model}", code=1), str(model))


def test_a_prompt_longer_than_the_limit_is_an_error_where_asked_for(tmp_path):
    long = {"question": "How many? " * 60, "answer": "3"}
    data = write_jsonl(tmp_path / "data.jsonl", [*QUESTIONS, long])
    args = [f"--config.data.path={data}", "--config.data.system_prompt=", "--config.rollout.max_prompt_length=64"]
    args += ["--config.data.eval_fraction=0.0", "--config.eval.problems=0", "--config.data.shuffle=False"]
    args += ["--config.rollout.prompts_per_step=41", "--config.rollout.lanes=168", "--config.grpo.num_generations=2"]
    done = run(tmp_path / "run", *args, "--config.data.long_prompts=error", code=1)
    refused(done, "How many?", "rollout.max_prompt_length=64", "data.long_prompts=skip")


def test_a_few_records_some_of_them_too_long_train_without_them_and_without_an_evaluation(tmp_path):
    """Six questions: none is held out, one is longer than the limit, which is counted."""
    long = {"question": "Tom counts his apples. " * 30 + "How many?", "answer": "3"}
    data = write_jsonl(tmp_path / "data.jsonl", [*QUESTIONS[:3], long, *QUESTIONS[3:5]])
    args = [f"--config.data.path={data}", "--config.data.system_prompt=", "--config.rollout.max_prompt_length=64"]
    args += ["--config.data.eval_fraction=0.0", "--config.eval.samples=2", "--config.trainer.max_steps=3"]
    done = run(tmp_path / "run", *args)
    assert "no evaluation" in done.stderr and "data.eval_fraction" in done.stderr and "Traceback" not in done.stderr
    assert "skipped" in done.stderr and "longer than 64 tokens" in done.stderr
    skipped = [record["data/skipped_prompts"] for record in done.records()]
    assert len(skipped) == 3 and skipped == sorted(skipped) and skipped[-1] >= 2, "12 prompts are two rounds of 6"


def test_prompts_that_are_all_too_long(tmp_path):
    """Of the embedded task as well, whose records have no end worth waiting for."""
    done = run(tmp_path / "run", "--config.rollout.max_prompt_length=4", "--config.eval.problems=0", code=1)
    refused(done, "longer than 4 tokens", "rollout.max_prompt_length")


def test_a_workdir_that_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(run(tmp_path / "file", code=1), "--workdir", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_workdir_of_another_configuration_says_what_differs_and_is_left_alone(model, tmp_path):
    workdir = tmp_path / "run"
    os.truncate(model / "model.safetensors", 5000)  # so that the first run ends early
    refused(run(workdir, f"--config.model.path={model}", code=1), "truncated")
    before = (workdir / "config.json").read_text()
    done = run(workdir, f"--config.model.path={model}", "--config.grpo.beta=0.5", "--config.seed=3", code=1)
    refused(done, str(workdir), "grpo.beta was 0.04, now 0.5", "seed was 0, now 3", "--workdir")
    assert (workdir / "config.json").read_text() == before
    (workdir / "config.json").write_text("{")
    refused(run(workdir, code=1), str(workdir / "config.json"))
